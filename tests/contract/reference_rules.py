"""Every mask rule of the specification as an explicit boolean matrix, straight from the words of its table.

A rule is a tuple here: its name, then its arguments, e.g. ("local", 8, 0, True) or ("and", rule, rule). Nothing in this
file knows the library. Shapes: n queries, m keys, a sequence of 1 to 3 dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Places:
    """Where queries and keys sit: aligned coordinates (n, dims) and (m, dims), and the joint shape R of each entry's
    sequence (it is its document's where coordinates restart)."""

    x: np.ndarray
    y: np.ndarray
    joint_x: np.ndarray
    joint_y: np.ndarray

    def order_x(self):
        return _order(self.x, self.joint_x)

    def order_y(self):
        return _order(self.y, self.joint_y)

    def distance(self):
        """Sum over the dimensions of |x_i - y_i|, (n, m): what ALiBi multiplies."""
        return np.abs(self.x[:, None, :] - self.y[None, :, :]).sum(-1)


def _order(c, joint):
    """Row-major index of a coordinate in its joint shape."""
    order = np.zeros(len(c), np.int64)
    for i in range(c.shape[1]):
        order = order * joint[:, i] + c[:, i]
    return order


def aligned(entry, size, joint, align):
    """Coordinate of entry c of a dimension of `size` entries whose joint size is R."""
    if align == "none_front":
        return entry
    if align == "none_end":
        return entry + (joint - size)
    step = joint // np.maximum(size, 1)  # a dimension of size 0 has no entries to place
    return entry * step if align == "scale_front" else (entry + 1) * step - 1


def places(q_shape, k_shape, align, ids_q=None, ids_k=None):
    """Aligned coordinates of whole sequences; with document ids (1 dimension) they restart in each document."""
    if ids_q is not None and len(q_shape) == 1:
        return _places_in_documents(np.asarray(ids_q), np.asarray(ids_k), align)
    joint = np.maximum(q_shape, k_shape)

    def side(shape):
        entries = np.stack([axis.ravel() for axis in np.indices(shape)], -1)
        coordinates = [aligned(entries[:, i], shape[i], joint[i], align) for i in range(len(shape))]
        return np.stack(coordinates, -1), np.broadcast_to(joint, (len(entries), len(shape)))

    (x, joint_x), (y, joint_y) = side(q_shape), side(k_shape)
    return Places(x, y, joint_x, joint_y)


def _places_in_documents(ids_q, ids_k, align):
    def side(ids):
        position = np.array([np.count_nonzero(ids[:c] == ids[c]) for c in range(len(ids))], np.int64)
        size = np.array([np.count_nonzero(ids == d) for d in ids], np.int64)
        joint = np.array([max(np.count_nonzero(ids_q == d), np.count_nonzero(ids_k == d)) for d in ids], np.int64)
        return aligned(position, size, joint, align)[:, None], joint[:, None]

    (x, joint_x), (y, joint_y) = side(ids_q), side(ids_k)
    return Places(x, y, joint_x, joint_y)


def ids_of_lengths(cu_seqlens):
    return np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))


def document_ids(rule, entry):
    """(ids_q, ids_k) of the tree's documents atom for a batch entry, or (None, None)."""
    if rule[0] == "documents":
        return tuple(np.asarray(ids)[entry] if np.ndim(ids) == 2 else np.asarray(ids) for ids in rule[1:])
    if rule[0] == "documents_packed":
        return ids_of_lengths(rule[1]), ids_of_lengths(rule[2])
    for part in rule[1:]:
        if isinstance(part, tuple) and part and isinstance(part[0], str):
            found = document_ids(part, entry)
            if found[0] is not None:
                return found
    return None, None


def _per_dimension(value, dims):
    return [value] * dims if np.ndim(value) == 0 else list(value)


def _local(p, window, log2_stride=0, causal=False):
    step = 2**log2_stride
    far = np.abs(p.x[:, None, :] - p.y[None, :, :])
    seen = ((far % step == 0) & (far // step < window)).all(-1)
    return seen & (p.order_x()[:, None] >= p.order_y()[None, :]) if causal else seen


def _window(p, left, right):
    dims = p.x.shape[1]
    seen = np.ones((len(p.x), len(p.y)), bool)
    for i, (a, b) in enumerate(zip(_per_dimension(left, dims), _per_dimension(right, dims))):
        delta = p.y[None, :, i] - p.x[:, None, i]
        if a >= 0:
            seen &= delta >= -a
        if b >= 0:
            seen &= delta <= b
    return seen


def _tiles(p, shape, kernel):
    """The centre is clamped by clamping the kernel's first tile; a kernel longer than the row of tiles sees all of
    them."""
    dims = p.x.shape[1]
    seen = np.ones((len(p.x), len(p.y)), bool)
    for i, (tile, width) in enumerate(zip(_per_dimension(shape, dims), _per_dimension(kernel, dims))):
        count = -(-p.joint_x[:, i] // tile)
        first = np.clip(p.x[:, i] // tile - width // 2, 0, np.maximum(count - width, 0))[:, None]
        tile_y = p.y[None, :, i] // tile
        seen &= (first <= tile_y) & (tile_y < first + width)
    return seen


def _neighbourhood(p, kernel, dilation=1, causal=False):
    dims = p.x.shape[1]
    seen = np.ones((len(p.x), len(p.y)), bool)
    arguments = (_per_dimension(a, dims) for a in (kernel, dilation, causal))
    for i, (width, step, only_past) in enumerate(zip(*arguments)):
        x, y = p.x[:, i], p.y[:, i]
        same_class = (x % step)[:, None] == (y % step)[None, :]
        length = -(-(p.joint_x[:, i] - x % step) // step)
        place = x // step
        if only_past:
            first, last = place - width + 1, place
        else:
            first = np.clip(place - width // 2, 0, np.maximum(length - width, 0))
            last = first + width - 1
        place_y = (y // step)[None, :]
        seen &= same_class & (first[:, None] <= place_y) & (place_y <= last[:, None])
    return seen


def _table(table, entry, head):
    """The matrix of a (batch entry, head) of a table with 2, 3 or 4 axes, the leading ones of size 1 or full."""
    table = np.asarray(table)
    for index in (entry, head)[4 - table.ndim :]:
        table = table[index if len(table) > 1 else 0]
    return table != 0


def _blocks(n, m, bitmap, block_q, block_k, entry, head):
    table = _table(bitmap, entry, head)
    return table[np.arange(n)[:, None] // block_q, np.arange(m)[None, :] // block_k]


def sees(rule, p, entry=0, head=0, ids=(None, None)):
    """The rule as a matrix (n, m) of a batch entry and a head. Keys that do not exist are the caller's to remove."""
    n, m = len(p.x), len(p.y)
    name, *arguments = rule
    everything = np.ones((n, m), bool)
    if name == "full":
        return everything
    if name == "causal":
        return p.order_x()[:, None] >= p.order_y()[None, :]
    if name == "local":
        return _local(p, *arguments)
    if name == "window":
        return _window(p, *arguments)
    if name == "prefix":
        return everything & (p.order_y() < arguments[0])[None, :]
    if name == "prefix_queries":
        return everything & (p.order_x() < arguments[0])[:, None]
    if name == "sink":
        return everything & (np.arange(m) < arguments[0])[None, :]
    if name in ("documents", "documents_packed"):
        return ids[0][:, None] == ids[1][None, :]
    if name == "tiles":
        return _tiles(p, *arguments)
    if name == "neighbourhood":
        return _neighbourhood(p, *arguments)
    if name == "blocks":
        return _blocks(n, m, *arguments, entry, head)
    if name == "dense":
        return np.broadcast_to(_table(arguments[0], entry, head)[:, :m], (n, m))
    parts = [sees(part, p, entry, head, ids) for part in arguments]
    if name == "not":
        return ~parts[0]
    return parts[0] & parts[1] if name == "and" else parts[0] | parts[1]


def visible(rule, q_shape, k_shape, align, batch=1, heads=1, key_lengths=None):
    """(mask, distance): which keys each query sees, (batch, heads, n, m), and ALiBi's distances, (batch, n, m)."""
    n, m = int(np.prod(q_shape)), int(np.prod(k_shape))
    mask = np.zeros((batch, heads, n, m), bool)
    distance = np.zeros((batch, n, m), np.int64)
    for entry in range(batch):
        keys = m if key_lengths is None else int(key_lengths[entry])
        shape = k_shape if key_lengths is None else (keys,)
        ids_q, ids_k = document_ids(rule, entry)
        ids = (ids_q, None if ids_k is None else ids_k[:keys])
        p = places(q_shape, shape, align, *ids)
        distance[entry, :, :keys] = p.distance()
        if not _has_tables_by_head(rule):
            mask[entry, :, :, :keys] = sees(rule, p, entry, 0, ids)
            continue
        for head in range(heads):
            mask[entry, head, :, :keys] = sees(rule, p, entry, head, ids)
    return mask, distance


def _has_tables_by_head(rule):
    return rule[0] in ("blocks", "dense") or any(
        isinstance(part, tuple) and part and isinstance(part[0], str) and _has_tables_by_head(part) for part in rule[1:]
    )
