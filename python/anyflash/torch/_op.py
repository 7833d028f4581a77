"""The operators anyflash::attention and anyflash::attention_backward, for PyTorch's graphs, transforms and modes:
shapes without data, gradients, batched calls. Eager calls do not use them (_attention.py), because reaching an operator
written in Python takes PyTorch tens of microseconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _arrays, _core
from .._frontend import second_derivative, without_gradient
from .._options import DEFAULTS, TENSORS, torch_schema
from ._rule import as_tensor, parts_of, rule_of

SECOND = second_derivative("torch")
FORWARD_MODE = "anyflash.torch.attention: a forward-mode derivative was asked for, expected reverse-mode ones alone"
NO_SLOPES = without_gradient("alibi_slopes", "alibi_slopes.detach()")

_TENSORS = ", ".join(f"Tensor? {name}" for name in TENSORS)
_OPTIONS = f"{_TENSORS}, Tensor[] tables, str names, str rule, SymInt[] numbers, {torch_schema()}"
_NAMES = (*TENSORS, "tables", "names", "rule", "numbers", *DEFAULTS)  # of these arguments
_FROM_OTHERS = tuple(name for name in TENSORS if name not in ("bias", "sink"))  # that may come from other frameworks
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
# Places of the first operator's arguments.
_PLACES = {name: place for place, name in enumerate(("q", "k", "v", *_NAMES, "statistics"))}
BIAS, SLOPES, SINK, PAGES = (_PLACES[name] for name in ("bias", "alibi_slopes", "sink", "page_table"))
TABLES, NAMES, NUMBERS, LAYOUT = (_PLACES[name] for name in ("tables", "names", "numbers", "layout"))
ARGUMENTS = len(_PLACES)


# The raw stream number, where PyTorch offers it: making a stream object takes microseconds.
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda gpu: torch.cuda.current_stream(gpu).cuda_stream)


def others_of(q: Tensor, options: Mapping[str, Any], out: Any = None) -> tuple[Any, ...]:
    """What comes from other frameworks in a call on a GPU. It takes stream_of before the call, _arrays.settle behind."""
    if not q.is_cuda:
        return ()
    given = map(options.get, _FROM_OTHERS)
    return tuple(
        [
            one
            for one in (*given, out, *options["rule"]._arrays)
            if one is not None and not isinstance(one, (Tensor, np.ndarray))
        ]
    )


def stream_of(q: Tensor, others: tuple[Any, ...] = ()) -> int:
    if others:
        return _arrays.stream_of(q, *others)
    return int(_stream(q.get_device())) if q.is_cuda else 0


def arguments(parts: tuple[Any, ...], options: Mapping[str, Any]) -> list[Any]:
    """Options as the operators take them, of the rule's parts_of and all others by name."""
    text, names, tables, numbers = parts
    tensors = [options.get(name) for name in TENSORS]
    return [*tensors, tables, names, text, numbers, *[options.get(name, DEFAULTS[name]) for name in DEFAULTS]]


def by_name(given: Sequence[Any]) -> dict[str, Any]:
    """Those `arguments` by their names in the schema."""
    return dict(zip(_NAMES, given))


def packed(q: Tensor, *given: Any) -> dict[str, Any]:
    """They as the extension takes options."""
    options = by_name(given)
    options["rule"] = rule_of(options["rule"], options.pop("names"), options.pop("tables"), options.pop("numbers"))
    options["threads"] = options["threads"] or torch.get_num_threads()
    options["stream"] = stream_of(q)
    return options


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
    """The backward call of an eager one by its operator, which modes see (torch.utils.flop_counter). The options are
    the extension's."""
    parts = parts_of(options["rule"], None)
    tensors = {name: None if options.get(name) is None else as_tensor(options[name], name) for name in TENSORS}
    given = arguments(parts, {**options, **tensors, "bias": bias, "sink": sink})
    made = torch.ops.anyflash.attention_backward(dout, dlse, out, lse, q, k, v, *given, wanted)
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
