"""The operators anyflash::attention and anyflash::attention_backward, for PyTorch's graphs, transforms and modes:
shapes without data, gradients, batched calls. Eager calls do not use them (_attention.py), because reaching an operator
written in Python takes PyTorch tens of microseconds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _arrays, _core
from .._frontend import second_derivative, without_gradient
from ._rule import as_tensor, parts_of, rule_of

SECOND = second_derivative("torch")
FORWARD_MODE = "anyflash.torch.attention: a forward-mode derivative was asked for, expected reverse-mode ones alone"
NO_SLOPES = without_gradient("alibi_slopes", "alibi_slopes.detach()")

_OPTIONS = (
    "Tensor? bias, Tensor? alibi_slopes, Tensor? sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? key_lengths, Tensor? page_table, Tensor[] tables, str names, str rule, SymInt[] numbers, str align, "
    "str layout, float? scale, float softcap, bool deterministic, bool allow_tf32, int threads"
)
_library = torch.library.Library("anyflash", "DEF")
_library.define(
    f"attention(Tensor q, Tensor? k, Tensor? v, {_OPTIONS}, int statistics) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor q, Tensor? k, Tensor? v, "
    f"{_OPTIONS}, int wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# The indices of the arguments.
BIAS, SLOPES, SINK, CU_Q, CU_K, LENGTHS, PAGES, TABLES, NAMES, RULE, NUMBERS, ALIGN, LAYOUT = range(3, 16)
ARGUMENTS = 22  # of the first operator


# The raw stream number, where PyTorch offers it: making a stream object takes microseconds.
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda gpu: torch.cuda.current_stream(gpu).cuda_stream)


def others_of(
    q: Tensor, rule: Any, slopes: Any, cu_q: Any, cu_k: Any, lengths: Any, pages: Any, out: Any = None
) -> tuple[Any, ...]:
    """The arrays of other frameworks in a call on a GPU. Call stream_of on them before it and _arrays.settle after
    it."""
    if not q.is_cuda:
        return ()
    tables = rule._arrays
    if slopes is cu_q is cu_k is lengths is pages is out is None and not tables:
        return ()
    return tuple(
        one
        for one in (slopes, cu_q, cu_k, lengths, pages, out, *tables)
        if one is not None and not isinstance(one, (Tensor, np.ndarray))
    )


def stream_of(q: Tensor, others: tuple[Any, ...] = ()) -> int:
    if others:
        return _arrays.stream_of(q, *others)
    return int(_stream(q.get_device())) if q.is_cuda else 0


def packed(
    q: Tensor,
    bias: Any,
    alibi_slopes: Any,
    sink: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    key_lengths: Any,
    page_table: Any,
    tables: list[Tensor],
    names: str,
    rule: str,
    numbers: list[int],
    align: str,
    layout: str,
    scale: float | None,
    softcap: float,
    deterministic: bool,
    allow_tf32: bool,
    threads: int,
) -> tuple[Any, ...]:
    """The options as the extension takes them."""
    return (
        rule_of(rule, names, tables, numbers),
        align,
        layout,
        scale,
        bias,
        softcap,
        alibi_slopes,
        sink,
        deterministic,
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        key_lengths,
        page_table,
        allow_tf32,
        threads or torch.get_num_threads(),
        stream_of(q),
    )


def _forward(q: Tensor, k: Any, v: Any, *rest: Any) -> Any:
    *options, statistics = rest
    if statistics == 2:
        return _core.torch_attention(q, k, v, None, "lm", packed(q, *options))
    return *_core.torch_attention(q, k, v, None, True, packed(q, *options)), q.new_empty(0)


def _backward(
    dout: Tensor, dlse: Any, out: Tensor, lse: Tensor, q: Tensor, k: Any, v: Any, *rest: Any
) -> tuple[Tensor, ...]:
    *options, wanted = rest
    made = _core.torch_attention_backward(dout, q, k, v, out, lse, dlse, packed(q, *options), wanted)
    return tuple(q.new_empty(0) if one is None else one for one in made)


def dispatched(
    wanted: int,
    options: Any,
    dout: Tensor,
    dlse: Any,
    q: Tensor,
    k: Any,
    v: Any,
    bias: Any,
    sink: Any,
    out: Tensor,
    lse: Tensor,
) -> Any:
    """The backward call of an eager call, through its operator, which modes see (torch.utils.flop_counter). The options
    are the extension's."""
    rule, align, layout, scale, _, softcap, slopes, _, deterministic, _, *lengths, allow_tf32, threads, _ = options
    text, names, tables, numbers = parts_of(rule, None)
    slopes, *lengths = (None if one is None else as_tensor(one, "lengths") for one in (slopes, *lengths))
    made = torch.ops.anyflash.attention_backward(
        dout,
        dlse,
        out,
        lse,
        q,
        k,
        v,
        bias,
        slopes,
        sink,
        *lengths,
        tables,
        names,
        text,
        numbers,
        align,
        layout,
        scale,
        softcap,
        deterministic,
        allow_tf32,
        threads,
        wanted,
    )
    return tuple(one if wanted >> i & 1 else None for i, one in enumerate(made))


for _device in ("CPU", "CUDA"):
    _library.impl("attention", _forward, _device)
    _library.impl("attention_backward", _backward, _device)


def _empty(shape: tuple[Any, ...], like: Tensor) -> Tensor:
    """An uninitialised tensor as the extension makes results: with the stride order of a tensor of the same shape."""
    return torch.empty_like(like) if tuple(like.shape) == shape else like.new_empty(shape)


def shapes_of_results(q: Tensor, v: Any, layout: str, paged: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The shapes of out and lse."""
    least = {"qkv": 4, "thd": 3}.get(layout, 4)
    if q.dim() < least:
        raise ValueError(f"query: rank {q.dim()}, expected at least {least} in the layout {layout}")
    if layout == "qkv":
        return tuple(q.shape[1:]), tuple(q.shape[1:3])
    if v is None:
        raise ValueError(f"value: not given, expected one in the layout {layout}")
    if not paged and v.dim() != q.dim():
        raise ValueError(f"value: rank {v.dim()}, expected {q.dim()} as in query")
    d_v = v.shape[2] if layout == "bhds" and not paged else v.shape[-1]
    if layout == "thd":
        return (*q.shape[:-1], d_v), (q.shape[1], q.shape[0])
    if layout == "bhds":
        return (*q.shape[:2], d_v, *q.shape[3:]), (*q.shape[:2], math.prod(q.shape[3:]))
    heads, sequence = (q.shape[-2], q.shape[1:-2]) if layout == "bshd" else (q.shape[1], q.shape[2:-1])
    return (*q.shape[:-1], d_v), (q.shape[0], heads, math.prod(sequence))


def _forward_fake(q: Tensor, k: Any, v: Any, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape, rows = shapes_of_results(q, v, rest[LAYOUT - 3], rest[PAGES - 3] is not None)
    row_type = torch.float64 if q.dtype == torch.float64 else torch.float32
    first = q.new_empty(rows, dtype=row_type)
    return _empty(shape, q), first, torch.empty_like(first) if rest[-1] == 2 else q.new_empty(0)


def _backward_fake(
    dout: Tensor, dlse: Any, out: Tensor, lse: Tensor, q: Tensor, k: Any, v: Any, *rest: Any
) -> tuple[Tensor, ...]:
    owners = (q, k, v, rest[BIAS - 3], rest[SINK - 3])
    return tuple(
        q.new_empty(0) if owner is None or not rest[-1] >> i & 1 else torch.empty_like(owner)
        for i, owner in enumerate(owners)
    )


torch.library.register_fake("anyflash::attention", _forward_fake, lib=_library)
torch.library.register_fake("anyflash::attention_backward", _backward_fake, lib=_library)


def lse_of(first: Tensor, second: Tensor, statistics: int) -> Tensor:
    return second + first.log() if statistics == 2 else first


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Saves what differentiate needs of a call of the operator."""
    ctx.set_materialize_grads(False)
    out, first, second = output
    if inputs[SLOPES] is not None and inputs[SLOPES].requires_grad:
        raise ValueError(NO_SLOPES)
    if inputs[-1] == 2:
        ctx.mark_non_differentiable(first, second)
    tensors, ctx.others = inputs[: PAGES + 1], inputs[NAMES:-1]
    ctx.save_for_backward(out, lse_of(first, second, inputs[-1]), *tensors, *inputs[TABLES])


def differentiate(ctx: Any, grads_of_results: tuple[Any, ...], backward: Any = None) -> tuple[Any, ...]:
    """The gradients of the operator's arguments. backward: the function to call in place of its operator."""
    dout, dlse, _ = grads_of_results
    out, lse, *saved = ctx.saved_tensors
    tensors, tables = saved[: PAGES + 1], saved[PAGES + 1 :]
    q, k, v = tensors[:3]
    needs = ctx.needs_input_grad  # the tables follow the five differentiable tensors
    wanted = sum(needs[i] << bit for bit, i in enumerate((0, 1, 2, BIAS, SINK)))
    grads: list[Any] = [None] * ARGUMENTS
    if wanted and (dout is not None or dlse is not None):
        dout = torch.zeros_like(out) if dout is None else dout
        made = (backward or torch.ops.anyflash.attention_backward)(
            dout, dlse, out, lse, q, k, v, *tensors[3:], list(tables), *ctx.others, wanted
        )
        for bit, i in enumerate((0, 1, 2, BIAS, SINK)):
            if wanted >> bit & 1:
                grads[i] = made[bit]
    grads[TABLES] = [None] * len(tables)
    grads[NUMBERS] = None if ctx.others[NUMBERS - NAMES] else []  # PyTorch takes an empty list for a list of tensors
    return tuple(grads)


def refuse_tangents(*tensors: Any) -> None:
    """Refuses forward-mode derivatives, which PyTorch would silently leave out of the results."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(FORWARD_MODE)


def refuse(ctx: Any, *grads: Any) -> Any:
    """Refuses the derivative of a gradient."""
    raise NotImplementedError(SECOND)


torch.library.register_autograd(
    "anyflash::attention", lambda ctx, *grads: differentiate(ctx, grads), setup_context=save, lib=_library
)
torch.library.register_autograd("anyflash::attention_backward", refuse, lib=_library)
