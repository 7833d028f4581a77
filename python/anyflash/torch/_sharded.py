"""attention on DTensors of torch.distributed.tensor whose batch or heads are sharded. Each process attends with its own
shard. Only gradients of replicated tensors are summed over processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .._options import TENSORS
from ._op import shapes_of_results
from ._rule import parts_of
from ._traced import TracedRule

_BATCH, _HEADS = 0, 1
_AXES = {"bhsd": (0, 1), "bhds": (0, 1), "bshd": (0, -2), "thd": (None, 1), "qkv": (None, 1)}  # batch and heads of q
_Axes = tuple[int | None, int | None]  # a tensor's axes of the batch and of the heads; None where it has none


def sharded(
    call: Callable[..., Any], q: Any, k: Any, v: Any, tables: Any, *, rule: Any, layout: str = "bhsd", **options: Any
) -> Any:
    """call(q, k, v, ...) on this process' part of each tensor, its results as DTensors."""
    given = {"query": q, "key": k, "value": v, **{name: options.pop(name) for name in TENSORS}}
    given = {name: one for name, one in given.items() if one is not None}
    mesh = _mesh(given)
    if layout not in _AXES:
        raise ValueError(f"layout: {layout!r}, expected one of {', '.join(_AXES)}")
    axes = _axes(given, layout)
    kinds = [_kind(dim, given, axes) for dim in range(mesh.ndim)]
    _check_heads(kinds, mesh, given, axes)
    local = {name: _local(one, mesh, kinds, axes[name]) for name, one in given.items()}
    rule, tables = _local_rule(rule, tables, mesh, kinds)
    results = call(
        *[local.pop(name, None) for name in ("query", "key", "value")],
        rule=rule,
        tables=tables,
        layout=layout,
        **local,
        **options,
    )
    out, *rows = results if isinstance(results, tuple) else (results,)
    shapes = shapes_of_results(q, v, layout, "page_table" in given)
    batch, heads = axes["query"]
    of_out = (None, 0) if layout == "qkv" else (batch, heads)
    of_rows = (None, 0) if batch is None else (0, 1)
    made = [_whole(out, mesh, kinds, of_out, shapes[0])]
    made += [_whole(one, mesh, kinds, of_rows, shapes[1]) for one in rows]
    return tuple(made) if isinstance(results, tuple) else made[0]


def _mesh(given: Mapping[str, Any]) -> Any:
    first = next(one for one in given.values() if isinstance(one, DTensor))
    for name, one in given.items():
        if not isinstance(one, DTensor):
            raise ValueError(f"{name}: a plain tensor beside a DTensor, expected a DTensor; see DTensor.from_local")
        if one.device_mesh != first.device_mesh:
            raise ValueError(f"{name}: on another mesh, expected all DTensors on one")
    return first.device_mesh


def _axes(given: Mapping[str, Any], layout: str) -> dict[str, _Axes]:
    """The batch and head axes of each tensor. An axis of size 1 of bias, shared by all, does not count."""
    q, paged = given["query"], "page_table" in given
    batch, heads = _AXES[layout]
    heads = heads if heads is None or heads >= 0 else q.dim() + heads
    found: dict[str, _Axes] = {}
    for name, one in given.items():
        own: _Axes = (None, None)
        if name == "query" or (name in ("key", "value") and not paged):
            own = (batch, heads)
        elif name in ("key", "value"):
            own = (None, one.dim() - 2)
        elif name == "bias" and one.dim() == 4:
            own = (0 if one.shape[0] > 1 else None, 1 if one.shape[1] > 1 else None)
        elif name == "sink":
            own = (None, 0)
        elif name == "alibi_slopes":
            own = (None, 0) if one.dim() == 1 else (0, 1)
        elif name in ("key_lengths", "page_table"):
            own = (0, None)
        if name in ("key", "value") and own[_HEADS] is not None and one.shape[own[_HEADS]] == 1:
            own = (own[_BATCH], None)  # one head shared by all query heads
        found[name] = own
    return found


def _kind(dim: int, given: Mapping[str, Any], axes: Mapping[str, _Axes]) -> int | None:
    """What a mesh dimension shards: the batch, the heads, or nothing. The first tensor that it shards decides."""
    kind = None
    for name, one in given.items():
        placement = one.placements[dim]
        if isinstance(placement, (Replicate, Partial)):
            continue
        axis = placement.dim % one.dim() if type(placement) is Shard else None
        of_batch, of_heads = axes[name]
        if axis is None or axis not in (of_batch, of_heads):
            places = " or ".join(f"Shard({place})" for place in (of_batch, of_heads) if place is not None)
            raise ValueError(
                f"{name}: placed as {placement if axis is None else f'Shard({axis})'}, expected its batch or heads "
                f"sharded or none; redistribute it to {places or 'Replicate()'}"
            )
        if kind is None:
            kind = _BATCH if axis == of_batch else _HEADS
    return kind


def _check_heads(kinds: list[int | None], mesh: Any, given: Mapping[str, Any], axes: Mapping[str, _Axes]) -> None:
    """Checks that each query head is on the process of its key head."""
    processes = _processes(kinds, mesh, _HEADS)
    if processes == 1 or "key" not in given:
        return
    axis, of_query = axes["key"][_HEADS], axes["query"][_HEADS]
    if axis is None or given["key"].shape[axis] == given["query"].shape[of_query]:
        return
    if given["key"].shape[axis] % processes:
        by_heads = [name for name, one in given.items() if _shards_heads(kinds, one, axes[name])]
        by_batch = all(axes[name][_BATCH] is not None for name in by_heads)
        raise ValueError(
            f"key: {given['key'].shape[axis]} heads over {processes} processes, expected a multiple; redistribute "
            f"{', '.join(by_heads)} to Replicate(){' or Shard(0)' if by_batch else ''}"
        )


def _shards_heads(kinds: list[int | None], one: Any, axes: _Axes) -> bool:
    return any(
        kind == _HEADS and type(placement) is Shard and placement.dim % one.dim() == axes[_HEADS] % one.dim()
        for kind, placement in zip(kinds, one.placements)
        if axes[_HEADS] is not None
    )


def _processes(kinds: list[int | None], mesh: Any, kind: int) -> int:
    count = 1
    for dim, own in enumerate(kinds):
        count *= mesh.size(dim) if own == kind else 1
    return count


def _placements(kinds: list[int | None], axes: _Axes) -> list[Placement]:
    return [Replicate() if kind is None or axes[kind] is None else Shard(axes[kind]) for kind in kinds]


def _local(one: Any, mesh: Any, kinds: list[int | None], axes: _Axes) -> Tensor:
    """This process' shard. Each process computes its own part of the gradient of a replicated tensor."""
    wanted = _placements(kinds, axes)
    of_gradient = [
        Partial() if kind is not None and axes[kind] is None else placement for kind, placement in zip(kinds, wanted)
    ]
    if list(one.placements) != wanted:
        one = one.redistribute(mesh, wanted)
    local: Tensor = one.to_local(grad_placements=of_gradient)
    return local


def _whole(local: Tensor, mesh: Any, kinds: list[int | None], axes: _Axes, shape: tuple[Any, ...]) -> Any:
    placements = _placements(kinds, axes)
    if all(shape[axis] % _processes(kinds, mesh, kind) == 0 for kind, axis in enumerate(axes) if axis is not None):
        return DTensor.from_local(local, mesh, placements, run_check=False)
    order = sorted(range(len(shape)), key=lambda axis: (local.stride(axis), -axis))  # innermost first, in memory order
    strides, step = [0] * len(shape), 1
    for axis in order:
        strides[axis], step = step, step * max(shape[axis], 1)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides))


def _local_rule(rule: Any, tables: Any, mesh: Any, kinds: list[int | None]) -> tuple[Any, Any]:
    """The rule of this process' shard. A rule and its tables describe the whole call; tables with batch or head axes
    are cut to the shard."""
    if isinstance(rule, TracedRule):
        parts = parts_of(rule, tables)
        if any(axes != (None, None) for axes in _axes_of_tables(parts[0], parts[1].split(), parts[2])):
            raise ValueError(
                "rule: made in a graph with a table of batch entries or heads, expected a rule's text and "
                "tables beside DTensors"
            )
        return rule, tables
    text, names, arrays, _ = parts_of(rule, tables)
    every = _axes_of_tables(text, names.split(), arrays)
    if not any(axes[kind] is not None for axes in every for kind in kinds if kind is not None):
        return rule, tables
    own = [_part(array, mesh, _placements(kinds, axes)) for array, axes in zip(arrays, every)]
    return text, dict(zip(names.split(), own))


def _part(array: Tensor, mesh: Any, placements: list[Placement]) -> Tensor:
    device, whole = array.device, [Replicate()] * mesh.ndim
    if not isinstance(array, DTensor):
        array = DTensor.from_local(array.to(mesh.device_type), mesh, whole, run_check=False)
    part: Tensor = array.redistribute(mesh, placements).to_local().to(device)
    return part


def _axes_of_tables(text: str, names: list[str], arrays: list[Tensor]) -> list[_Axes]:
    rules = {}
    for rule, arguments in re.findall(r"(\w+)\(([^()]*)\)", text):
        for word in re.findall(r"\w+", arguments):
            rules[word] = rule
    return [_axes_of_table(rules.get(name, ""), array) for name, array in zip(names, arrays)]


def _axes_of_table(rule: str, array: Tensor) -> _Axes:
    shape = array.shape
    if rule == "documents" and len(shape) == 2:
        axes: _Axes = (0, None)
    elif rule in ("dense", "blocks") and len(shape) == 4:
        axes = (0, 1)
    elif rule == "blocks" and len(shape) == 3:
        axes = (None, 0)
    else:
        axes = (None, None)
    batch, heads = (axis if axis is not None and shape[axis] > 1 else None for axis in axes)
    return batch, heads
