"""flash_attn_with_kvcache: new keys go into the cache, rotated if asked for, and the queries attend to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _core
from .._core import echoed
from .._frontend import truth
from ..torch import attention
from ..torch._op import refuse_tangents
from ..torch._rule import given_rule
from ._shared import and_dense, check_indices, check_pages, check_table, check_tensor, moved, options, place_of, window_of


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q (batch, queries, heads, channels) to a cache; without gradients.

    k_cache, v_cache: (batch of the cache, length, heads of keys, channels), or with block_table (batch, pages), int32,
    (pages, page size, heads of keys, channels), of any page size. cache_seqlens: the lengths in use, one integer or
    (batch,) int32; the whole cache if not given. cache_batch_idx (batch,): each entry's place in the cache; not with
    block_table. cache_leftpad (batch,): the first key of each entry; not with block_table.

    k, v (batch, new, heads of keys, channels): written into the cache, in place, behind cache_seqlens, and attended to.
    rotary_cos, rotary_sin (positions, half of the rotated channels): with k, rotate k and q, the first new key and the
    first query being at position cache_seqlens - cache_leftpad; without causal and window all queries are there.
    rotary_interleaved: channels 2 i and 2 i + 1 make a pair, else i and i + half.

    Returns out as q, or (out, softmax_lse (batch, heads, queries)). Raises ValueError or TypeError with one line; the
    caches are then as they were.
    """
    call = options(0.0, softmax_scale, causal, window_size, softcap)
    call["return_lse"] = truth("return_softmax_lse", return_softmax_lse)
    rotary_interleaved = truth("rotary_interleaved", rotary_interleaved)
    _check_shapes(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens)
    if block_table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        raise ValueError("block_table: given with cache_batch_idx or cache_leftpad, expected it alone")
    if k is not None and not torch.compiler.is_compiling():
        refuse_tangents(q, k_cache, v_cache, k, v, alibi_slopes)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise ValueError("k: given under torch.func, where no cache can be written, expected none there")
    with torch.no_grad():
        place = place_of(q, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
        table = _table(q, k_cache, cache_batch_idx, block_table, place)
        room = k_cache.shape[1] * (1 if table is None else table.shape[1])
        lengths, bounds = _lengths(q, cache_seqlens, room, k is not None, place)
        leftpad = _entries(q, cache_leftpad, "cache_leftpad", place)
        if leftpad is not None and not leftpad.is_cuda and bool(((leftpad < 0) | (leftpad > lengths)).any()):
            raise ValueError(f"cache_leftpad: {leftpad.tolist()}, expected 0 to cache_seqlens {lengths.tolist()}")
        new = 0 if k is None else k.shape[1]
        if table is not None:
            check_pages(table, lengths + new, k_cache, "cache_batch_idx" if block_table is None else "block_table")
            if table.dtype == torch.int64:
                table = table.clamp(-1, 2**31 - 1).int()
        call |= dict(layout="bshd", page_table=table, alibi_slopes=alibi_slopes)
        if leftpad is not None:
            places = torch.arange(room, dtype=leftpad.dtype, device=place)
            call["rule"] = and_dense(call["rule"], (places >= leftpad[:, None])[:, None, None])
        if k is not None and v is not None:
            if rotary_cos is not None and rotary_sin is not None:
                start, ends = lengths, bounds
                if leftpad is not None:
                    start = lengths - leftpad
                    ends = _bounds(start)
                local = causal or max(window_of(window_size)) >= 0
                k = _rotated(k, rotary_cos, rotary_sin, rotary_interleaved, start, ends, True)
                q = _rotated(q, rotary_cos, rotary_sin, rotary_interleaved, start, ends, local)
            _check_call(q, k_cache, v_cache, None if table is None else lengths.int(), call)
            _write(k_cache, v_cache, k, v, table, lengths, bounds, room)
            lengths = lengths + new
        all_of_it = cache_seqlens is None and table is None and leftpad is None
        return attention(q, k_cache, v_cache, key_lengths=None if all_of_it else lengths.int(), **call)


def _check_shapes(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cos: Any, sin: Any, lengths: Any) -> None:
    ranks = dict(q=(q, 4), k_cache=(k_cache, 4), v_cache=(v_cache, 4), k=(k, 4), v=(v, 4), rotary_cos=(cos, 2),
                 rotary_sin=(sin, 2))  # fmt: skip
    for name, (tensor, rank) in ranks.items():
        if tensor is None and name in ("k", "v", "rotary_cos", "rotary_sin"):
            continue
        check_tensor(name, tensor)
        if tensor.dim() != rank:
            raise ValueError(f"{name}: rank {tensor.dim()}, expected {rank}")
        if name not in ("q", "k_cache", "v_cache") and tensor.device != k_cache.device:
            raise ValueError(f"{name}: on {tensor.device}, expected {k_cache.device} as k_cache")
        if name.startswith("rotary") and not tensor.is_floating_point():
            raise TypeError(f"{name}: {tensor.dtype}, expected a floating-point type")
    if (
        q.shape[3] != k_cache.shape[3]
        or q.dtype != k_cache.dtype
        or not k_cache.shape[2]
        or q.shape[2] % k_cache.shape[2]
    ):
        raise ValueError(
            f"q: {q.dtype} of shape {tuple(q.shape)}, expected k_cache's type, channels, and multiple of heads: "
            f"{k_cache.dtype} of {tuple(k_cache.shape)}"
        )
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"v_cache: shape {tuple(v_cache.shape)}, expected {tuple(k_cache.shape[:3])} to begin with, as k_cache"
        )
    if (k is None) != (v is None) or (cos is None) != (sin is None):
        raise ValueError("k, v, rotary_cos, rotary_sin: expected in pairs")
    if k is None:
        if cos is not None:
            raise ValueError("rotary_cos: given without k, expected new keys to rotate")
        return
    if lengths is None:
        raise ValueError("cache_seqlens: not given, expected the lengths behind which k and v go")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if torch.compiler.is_compiling():
            continue
        if torch._debug_has_internal_overlap(cache) == 1:
            raise ValueError(f"{name}: its entries share memory, expected memory of their own to write to")
        if cache.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(f"{name}: made in inference mode, expected to be written to there alone")
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        expected = (q.shape[0], k.shape[1], *cache.shape[2:])
        if tuple(tensor.shape) != expected or tensor.dtype != cache.dtype:
            raise ValueError(
                f"{name}: {tensor.dtype} of shape {tuple(tensor.shape)}, expected {cache.dtype} of {expected}"
            )


def _check_call(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Any, call: dict[str, Any]) -> None:
    """Raises what the call of attention would, before anything is written."""
    if torch.compiler.is_compiling():
        return
    names = ("rule", "align", "layout", "scale", "bias", "softcap", "alibi_slopes", "sink", "deterministic", "plan",
             "cu_seqlens_q", "cu_seqlens_k", "key_lengths", "page_table")  # fmt: skip
    own = {"rule": given_rule(call["rule"], None), "key_lengths": lengths}
    given = [own.get(name, call.get(name)) for name in names]
    q, k_cache, v_cache, *given = (x.detach() if isinstance(x, Tensor) else x for x in (q, k_cache, v_cache, *given))
    _core.result_shapes(q, k_cache, v_cache, (*given, False, 0, 0))


_Bounds = tuple[int, int] | None  # the least and the most of numbers; None if they are on a GPU, where nobody looks


def _bounds(numbers: Tensor) -> _Bounds:
    if numbers.is_cuda:
        return None
    return (int(numbers.min()), int(numbers.max())) if numbers.numel() else (0, 0)


def _entries(q: Tensor, indices: Any, name: str, place: torch.device) -> Any:
    if indices is None:
        return None
    check_indices(name, indices, 1)
    if tuple(indices.shape) != (q.shape[0],):
        raise ValueError(f"{name}: shape {tuple(indices.shape)}, expected ({q.shape[0]},)")
    return moved(name, indices, place)


def _table(q: Tensor, k_cache: Tensor, batch_idx: Any, block_table: Any, place: torch.device) -> Tensor | None:
    """Entries of a cache without pages, if they are not in the order of the batch, are pages as long as it is."""
    if block_table is not None:
        check_table(block_table, q.shape[0])
        return moved("block_table", block_table, place)
    places = _entries(q, batch_idx, "cache_batch_idx", place)
    if places is not None:
        return places[:, None]
    if k_cache.shape[0] != q.shape[0]:
        raise ValueError(f"k_cache: batch {k_cache.shape[0]}, expected {q.shape[0]} as in q, or cache_batch_idx")
    return None


def _lengths(q: Tensor, cache_seqlens: Any, room: int, grows: bool, place: torch.device) -> tuple[Tensor, _Bounds]:
    if cache_seqlens is None or isinstance(cache_seqlens, int):
        length = room if cache_seqlens is None else cache_seqlens
        if not 0 <= length <= room:
            raise ValueError(f"cache_seqlens: {echoed(repr(length))}, expected 0 to {room}")
        return torch.full((q.shape[0],), length, dtype=torch.int32, device=place), (length, length)
    lengths = _entries(q, cache_seqlens, "cache_seqlens", place)
    bounds = _bounds(lengths)
    if bounds is None and (grows or lengths.dtype == torch.int64):  # lest sums, or numbers as int32, wrap around
        lengths = lengths.clamp(0, room)
    if bounds is not None and not 0 <= bounds[0] <= bounds[1] <= room:
        raise ValueError(f"cache_seqlens: {bounds[0]} to {bounds[1]}, expected 0 to {room}")
    return lengths, bounds


def _write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, table: Tensor | None, lengths: Tensor,
           bounds: _Bounds, room: int) -> None:  # fmt: skip
    """New keys whose places nobody has looked at go to the nearest that exist."""
    batch, new = k.shape[:2]
    if batch == 0 or new == 0:
        return
    most = bounds[1] if bounds else 0
    if most + new > room:
        raise ValueError(f"cache_seqlens: {new} new keys go up to {most + new}, expected room for them in {room}")
    places = (lengths[:, None].long() + torch.arange(new, device=lengths.device)).clamp(0, room - 1)
    pages = torch.arange(batch, device=places.device)[:, None]
    if table is not None:
        count, page_size = k_cache.shape[:2]
        pages, places = table.long().gather(1, places // page_size), places % page_size
        pages = pages.clamp(0, count - 1)
    where = pages.to(k.device), places.to(k.device)
    k_cache[where] = k
    v_cache[where] = v


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, start: Tensor, ends: _Bounds,
             moves: bool) -> Tensor:  # fmt: skip
    """Rotary embedding (Su et al., RoFormer, 2021) of the first 2 * cos.shape[1] channels of x (batch, sequence, heads,
    channels) from each entry's position on, or all at it. ends: the least and the most of start."""
    half, rows = cos.shape[-1], x.shape[1]
    if tuple(sin.shape) != tuple(cos.shape) or cos.dim() != 2 or 2 * half > x.shape[-1]:
        raise ValueError(
            f"rotary_cos: shape {tuple(cos.shape)}, expected (positions, at most {x.shape[-1] // 2}), sin alike"
        )
    steps = torch.arange(rows, device=start.device) * int(moves)
    least, most = ends or (0, 0)
    most += rows if moves else 1
    if start.numel() and rows and (least < 0 or most > cos.shape[0]):
        raise ValueError(f"rotary_cos: {cos.shape[0]} positions, expected at least {most}")
    places = (start[:, None].long() + steps).clamp(0, max(cos.shape[0] - 1, 0))
    wide = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[places.to(table.device)][:, :, None].to(wide) for table in (cos, sin))
    rotated, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    pairs = rotated.unflatten(-1, (half, 2) if interleaved else (2, half))
    a, b = pairs.unbind(-1 if interleaved else -2)
    turned = torch.stack((a * c - b * s, a * s + b * c), -1 if interleaved else -2).flatten(-2)
    return torch.cat((turned.to(x.dtype), rest), -1)
