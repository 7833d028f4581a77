"""flash_attn_with_kvcache: writes new keys into the cache, rotated if asked for, and attends to the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._core import echoed
from .._frontend import truth
from ..torch import attention
from ..torch._op import refuse_tangents
from ._checks import check_positions, checked, checked_call
from ._forward_only import detached, forward_only
from ._shared import and_dense, check_indices, check_table, check_tensor, moved, options, place_of, window_of

_NO_GRADIENT = "flash_attn_with_kvcache: a gradient was asked for, expected forward calls alone; take flash_attn_func"


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
    """Attention of q (batch, queries, heads, channels) to a cache. A backward call raises NotImplementedError.

    k_cache, v_cache: (batch of the cache, length, heads of keys, channels), or with block_table (batch, pages), int32,
    (pages, page size, heads of keys, channels), of any page size. cache_seqlens: the lengths in use, one integer or
    (batch,) int32; the whole cache if not given. cache_batch_idx (batch,): each entry's place in the cache; not with
    block_table. cache_leftpad (batch,): the first valid key of each entry; not with block_table.

    k, v (batch, new, heads of keys, channels): written into the cache, in place, after cache_seqlens, and attended to.
    rotary_cos, rotary_sin (positions, half of the rotated channels): rotate k and q; they need k. The first new key and
    the first query are at position cache_seqlens, whatever cache_leftpad is. Without causal and window all queries are
    at that position. rotary_interleaved: channels 2 i and 2 i + 1 make a pair, else i and i + half.

    Returns out, shaped as q, or (out, softmax_lse (batch, heads, queries)). Raises ValueError or TypeError with one
    line; the caches are then unchanged.
    """
    return with_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        softmax_scale,
        causal,
        window_size,
        softcap,
        rotary_interleaved,
        alibi_slopes,
        return_softmax_lse,
    )


def with_cache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    cache_seqlens: Any,
    cache_batch_idx: Any,
    cache_leftpad: Any,
    pages: Any,
    softmax_scale: Any,
    causal: bool,
    window_size: Sequence[int],
    softcap: Any,
    rotary_interleaved: bool,
    alibi_slopes: Any,
    return_softmax_lse: bool,
    sink: Any = None,
    name: str = "block_table",
) -> Any:
    """name: that of `pages` among the caller's arguments."""
    given = (q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, alibi_slopes, sink, softmax_scale, softcap)
    (q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, alibi_slopes, sink, softmax_scale, softcap) = detached(*given)
    call = options(0.0, softmax_scale, causal, window_size, softcap)
    call |= dict(layout="bshd", alibi_slopes=alibi_slopes, sink=sink)
    call["return_lse"] = truth("return_softmax_lse", return_softmax_lse)
    rotary_interleaved = truth("rotary_interleaved", rotary_interleaved)
    _check_shapes(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens)
    if pages is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        raise ValueError(f"{name}: given with cache_batch_idx or cache_leftpad, expected it alone")
    if k is not None and not torch.compiler.is_compiling():
        refuse_tangents(q, k_cache, v_cache, k, v, alibi_slopes)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise ValueError("k: given under torch.func, where no cache can be written, expected none there")
    place = place_of(q, cache_seqlens, cache_batch_idx, cache_leftpad, pages)
    table = _table(q, k_cache, cache_batch_idx, pages, name, place)
    room = k_cache.shape[1] * (1 if table is None else table.shape[1])
    new = 0 if k is None else k.shape[1]
    leftpad = _entries(q, cache_leftpad, "cache_leftpad", place)
    lengths = _lengths(q, cache_seqlens, leftpad, room, new, place)
    if table is not None:
        check = name if pages is not None else "cache_batch_idx"
        table = checked(check, table, lengths + new, sizes=k_cache.shape[:2])
        call["page_table"] = table.clamp(-1, 2**31 - 1).int() if table.dtype == torch.int64 else table
    if leftpad is not None:
        places = torch.arange(room, dtype=leftpad.dtype, device=place)
        call["rule"] = and_dense(call["rule"], (places >= leftpad[:, None])[:, None, None])
    turned = q
    if k is not None and v is not None:
        if rotary_cos is not None and rotary_sin is not None:
            moves = int(causal or max(window_of(window_size)) >= 0)
            _check_rotary(q, rotary_cos, rotary_sin)
            most = max(new, q.shape[1] if moves else min(q.shape[1], 1))
            if isinstance(cache_seqlens, int) and q.shape[0]:  # also on a GPU
                check_positions(cache_seqlens, most, rotary_cos.shape[0])
            start = checked("positions", lengths, sizes=(most, rotary_cos.shape[0]))
            k = _rotated(k, rotary_cos, rotary_sin, rotary_interleaved, start, 1)
            turned = _rotated(q, rotary_cos, rotary_sin, rotary_interleaved, start, moves)
        as_is = call if table is None else call | dict(key_lengths=lengths.int())
        lengths = checked_call(lengths, turned, k_cache, v_cache, as_is)
        _write(k_cache, v_cache, k, v, call.get("page_table"), lengths, room)
        lengths = lengths + new
    all_of_it = cache_seqlens is None and table is None and leftpad is None
    made = attention(turned, k_cache, v_cache, key_lengths=None if all_of_it else lengths.int(), **call)
    return forward_only(made, _NO_GRADIENT, *given)


def _check_shapes(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cos: Any, sin: Any, lengths: Any) -> None:
    ranks = dict(
        q=(q, 4),
        k_cache=(k_cache, 4),
        v_cache=(v_cache, 4),
        k=(k, 4),
        v=(v, 4),
        rotary_cos=(cos, 2),
        rotary_sin=(sin, 2),
    )
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
        raise ValueError("cache_seqlens: not given, expected the lengths after which k and v go")
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


def _entries(q: Tensor, indices: Any, name: str, place: torch.device) -> Any:
    if indices is None:
        return None
    check_indices(name, indices, 1)
    if tuple(indices.shape) != (q.shape[0],):
        raise ValueError(f"{name}: shape {tuple(indices.shape)}, expected ({q.shape[0]},)")
    return moved(name, indices, place)


def _table(q: Tensor, k_cache: Tensor, batch_idx: Any, pages: Any, name: str, place: torch.device) -> Any:
    """Entries of a cache without pages, if they are not in the order of the batch, are pages as long as it is."""
    if pages is not None:
        check_table(name, pages, q.shape[0])
        return moved(name, pages, place)
    places = _entries(q, batch_idx, "cache_batch_idx", place)
    if places is not None:
        return places[:, None]
    if k_cache.shape[0] != q.shape[0]:
        raise ValueError(f"k_cache: batch {k_cache.shape[0]}, expected {q.shape[0]} as in q, or cache_batch_idx")
    return None


def _lengths(q: Tensor, cache_seqlens: Any, leftpad: Any, room: int, new: int, place: torch.device) -> Tensor:
    if cache_seqlens is None or isinstance(cache_seqlens, int):
        length = room if cache_seqlens is None else cache_seqlens
        if not 0 <= length <= room:
            raise ValueError(f"cache_seqlens: {echoed(repr(length))}, expected 0 to {room}")
        lengths = torch.full((q.shape[0],), length, dtype=torch.int32, device=place)
        if length + new > room and q.shape[0]:
            raise ValueError(f"cache_seqlens: {new} new keys go up to {length + new}, expected room for them in {room}")
    else:
        lengths = _entries(q, cache_seqlens, "cache_seqlens", place)
        if lengths.is_cuda and (new or lengths.dtype == torch.int64):  # sums, or conversion to int32, would overflow
            lengths = lengths.clamp(0, room)
    return checked("cache_lengths", lengths, *([] if leftpad is None else [leftpad]), sizes=(room, new))


def _write(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, table: Tensor | None, lengths: Tensor, room: int
) -> None:
    """Writes new keys into the cache. Places on a GPU are not checked but clamped to the nearest that exist."""
    batch, new = k.shape[:2]
    if batch == 0 or new == 0:
        return
    places = (lengths[:, None].long() + torch.arange(new, device=lengths.device)).clamp(0, room - 1)
    pages = torch.arange(batch, device=places.device)[:, None]
    if table is not None:
        count, page_size = k_cache.shape[:2]
        pages, places = table.long().gather(1, places // page_size), places % page_size
        pages = pages.clamp(0, count - 1)
    where = pages.to(k.device), places.to(k.device)
    k_cache[where] = k
    v_cache[where] = v


def _check_rotary(q: Tensor, cos: Tensor, sin: Tensor) -> None:
    if cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[3]:
        raise ValueError(
            f"rotary_cos: shape {tuple(cos.shape)}, expected (positions, at most {q.shape[3] // 2}), sin alike"
        )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, start: Tensor, step: int) -> Tensor:
    """Rotary embedding (Su et al., RoFormer, 2021) of the first 2 * cos.shape[1] channels of x (batch, sequence, heads,
    channels). Positions count from each entry's start, or all equal it if step is 0."""
    half = cos.shape[1]
    steps = torch.arange(x.shape[1], device=start.device) * step
    places = (start[:, None].long() + steps).clamp(0, max(cos.shape[0] - 1, 0))
    wide = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[places.to(table.device)][:, :, None].to(wide) for table in (cos, sin))
    rotated, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    pairs = rotated.unflatten(-1, (half, 2) if interleaved else (2, half))
    a, b = pairs.unbind(-1 if interleaved else -2)
    turned = torch.stack((a * c - b * s, a * s + b * c), -1 if interleaved else -2).flatten(-2)
    return torch.cat((turned.to(x.dtype), rest), -1)
