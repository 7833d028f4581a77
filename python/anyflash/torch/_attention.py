"""attention for PyTorch: eager calls go straight to the extension, all others through the operator of _op.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from .. import _core
from .._arrays import settle
from .._frontend import NESTED, check_return_lse, without_gradient
from .._options import DEFAULTS, TENSORS, Scalars, check_names, constants, with_scalars
from .._rules import full
from ._op import NO_SLOPES, SECOND, arguments, dispatched, lse_of, others_of, refuse_tangents, stream_of
from ._rule import as_tensor, given_rule, parts_of
from ._transforms import transformed

if TYPE_CHECKING:
    from typing_extensions import Unpack

_core.use_torch(torch, getattr(Tensor, "__dlpack_c_exchange_api__", None))
_FULL = full()
_KEPT = ("alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "key_lengths")
_INTEGERS = ("cu_seqlens_q", "cu_seqlens_k", "key_lengths", "page_table")
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}
_LARGEST = torch.finfo(torch.float32).max
_CAST = (torch.float16, torch.bfloat16, torch.float32)  # float64 stays, as in PyTorch's own functions
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_FUNCTIONALIZE = torch._C._functorch.TransformType.Functionalize
_tracing, _grad, _autocast = torch._C._get_tracing_state, torch.is_grad_enabled, torch.is_autocast_enabled


@with_scalars
def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    rule: Any = _FULL,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool | str = False,
    plan: _core.Plan | None = None,
    out: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    tables: Mapping[str, Any] | None = None,
    **scalars: Unpack[Scalars],
) -> Any:
    """anyflash.attention on PyTorch's tensors, with gradients of q, k, v, bias and sink, through out and lse.

    The parameters are those of anyflash.attention (see help(anyflash.attention)). These differ or are new:

    rule : Rule or str
        anyflash.parse_rule reads a text. In torch.compile a Rule is a constant, and so are its tables, which are on the
        CPU: another Rule compiles again. Tables that change from call to call are passed by name:
        rule="documents(ids, ids)", tables={"ids": ids}.
    tables : {name: tensor}, optional
        The tables that a rule's text names: on the CPU, or, with all lengths of the call, on q's GPU.
    threads : int
        0: torch.get_num_threads().
    plan, out
        Not in graphs, nor under torch.func. out is refused where a gradient is recorded.

    Returns out, (out, lse) or (out, l, m), as anyflash.attention. If out has q's shape, its strides have q's order. No
    gradient goes through l and m, or to alibi_slopes, scale and softcap. Second derivatives raise NotImplementedError.
    On a GPU the call is queued on PyTorch's current stream.

    Works in torch.compile(fullgraph=True), torch.export and torch.func (vmap, grad, vjp); under autocast q, k and v are
    cast as scaled_dot_product_attention's are.

    DTensors of torch.distributed.tensor may be sharded over batch and heads. Each process attends with its own shard,
    and the results are DTensors with the same sharding. Tables are then plain tensors, complete in each process.

    Raises ValueError, TypeError or MemoryError with one line, as anyflash.attention. If PyTorch has no memory for a
    result, it raises its own error (RuntimeError, on a GPU torch.OutOfMemoryError).
    """
    q, k, v = cast(q, k, v)
    compiling = torch.compiler.is_compiling()
    if scalars and (compiling or not _core.plain_scalars(scalars)):
        check_names(scalars, attention)
        _refuse_gradients(scalars)
    options: Any = scalars
    options["rule"] = rule
    if not bias is alibi_slopes is sink is cu_seqlens_q is cu_seqlens_k is key_lengths is page_table is None:
        options["bias"], options["alibi_slopes"], options["sink"] = bias, alibi_slopes, sink
        options["cu_seqlens_q"], options["cu_seqlens_k"] = cu_seqlens_q, cu_seqlens_k
        options["key_lengths"], options["page_table"] = key_lengths, page_table
    if compiling or not is_direct(q, k, v, bias, sink):
        return _indirect(q, k, v, options, tables, return_lse, plan=plan, out=out)
    if plan is not None:
        options["plan"] = plan
    if "threads" not in options or (threads := options["threads"]).__class__ is int and threads == 0:
        options["threads"] = torch.get_num_threads()
    if rule.__class__ is not _core.Rule or tables is not None:
        options["rule"] = given_rule(rule, tables)
    others: tuple[Any, ...] = ()
    if q.is_cuda:
        others = others_of(q, options, None if isinstance(out, Tensor) else out)
        options["stream"] = stream_of(q, others)
    records = _grad() and _requires(q, k, v, bias, sink, alibi_slopes)
    if out is not None:
        tensor = isinstance(out, Tensor)
        if records or (tensor and _grad() and out.requires_grad):
            raise ValueError("out: given where a gradient is recorded, expected none there")
        made = _forward(options, others, q, k, v, out, return_lse)
        if tensor and not out.is_inference():
            increment_version(out)  # tells PyTorch, which does not see outside writes
        return made
    if not records:
        return _forward(options, others, q, k, v, out, return_lse)
    if isinstance(alibi_slopes, Tensor) and alibi_slopes.requires_grad:
        raise ValueError(NO_SLOPES)
    if return_lse is not False:
        check_return_lse(return_lse)
    kept: list[Any] = []
    if tables or not alibi_slopes is cu_seqlens_q is cu_seqlens_k is key_lengths is None:
        numbers = (alibi_slopes, cu_seqlens_q, cu_seqlens_k, key_lengths, *(tables or {}).values())
        kept = [one if isinstance(one, Tensor) and not one.is_inference() else None for one in numbers]
    named = (rule, dict(tables)) if tables else None
    return _Attention.apply(q, k, v, bias, sink, (return_lse, options, others, named), *kept)


def _indirect(q: Tensor, k: Any, v: Any, options: dict[str, Any], tables: Any, return_lse: Any, **refused: Any) -> Any:
    """In a graph, under a mode or transform, of DTensors."""
    options = {**dict.fromkeys(TENSORS), **options}
    if is_sharded(q, k, v, *map(options.get, TENSORS)):
        _refuse(refused, "beside DTensors")
        from ._sharded import sharded  # PyTorch has loaded what it needs by now

        return sharded(attention, q, k, v, tables, return_lse=return_lse, **options)
    for name, one in (("key", k), ("value", v)):
        if one is not None and not isinstance(one, Tensor):
            raise TypeError(f"{name}: type {type(one).__name__}, expected a torch.Tensor")
    if torch.compiler.is_compiling():
        for name, default in DEFAULTS.items():  # an operator would take any number or None for a switch
            if isinstance(default, bool) and not isinstance(one := options.get(name, default), int):
                raise TypeError(f"{name}: type {type(one).__name__}, expected True or False")
    else:
        refuse_tangents(q, k, v, options["bias"], options["alibi_slopes"], options["sink"])
        options.update(constants({name: one for name, one in options.items() if name in DEFAULTS}))
    parts = parts_of(options["rule"], tables)
    for name in TENSORS:
        if options[name] is not None:
            options[name] = as_tensor(options[name], name)
    of_rule = parts[2]
    given = ("query", "key", "value", *TENSORS, *["tables"] * len(of_rule))
    tensors = (q, k, v, *[options[name] for name in TENSORS], *of_rule)
    check_memory(given, tensors)
    _check_data(given, tensors)
    _refuse(refused, "in a graph or transform")
    return _through_operator(q, k, v, arguments(parts, options), return_lse)


def _refuse(given: Mapping[str, Any], where: str) -> None:
    for name, one in given.items():
        if one is not None:
            raise ValueError(f"{name}: given {where}, expected none there")


def plain_options(
    rule: Any, scale: float | None, layout: str = "bhsd", stream: int = 0, align: str = "none_front"
) -> dict[str, Any]:
    """As the extension takes them, of a call with no others."""
    threads = torch.get_num_threads()
    return {"rule": rule, "align": align, "scale": scale, "layout": layout, "threads": threads, "stream": stream}


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Any,
    scale: float | None = None,
    tables: dict[str, Tensor] | None = None,
    align: str = "none_front",
) -> Tensor:
    """attention(q, k, v, rule=rule, scale=scale, tables=tables, align=align) where is_direct holds of all, nothing is
    cast by autocast, and all is on the CPU."""
    options = plain_options(rule if tables is None else given_rule(rule, tables), scale, align=align)
    if not (_grad() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        made: Tensor = _core.torch_attention(q, k, v, None, False, options)
        return made
    named, kept = None, ()
    if tables is not None:
        named = rule, tables
        kept = (None,) * len(_KEPT) + tuple([None if one.is_inference() else one for one in tables.values()])
    out: Tensor = _Attention.apply(q, k, v, None, None, (False, options, (), named), *kept)
    return out


def _forward(options: Any, others: tuple[Any, ...], q: Tensor, k: Any, v: Any, out: Any, return_lse: Any) -> Any:
    made = _core.torch_attention(q, k, v, out, return_lse, options)
    if others:
        settle(q, *others)
    return made


def cast(q: Any, k: Any = None, v: Any = None) -> tuple[Any, Any, Any]:
    """The tensors cast as autocast requires."""
    if not isinstance(q, Tensor):
        raise TypeError(f"query: type {type(q).__name__}, expected a torch.Tensor")
    device = "cuda" if q.is_cuda else "cpu"
    if not _autocast(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in _CAST else x for x in (q, k, v))


def autocast_makes_one(*tensors: Tensor) -> bool:
    """Whether their types differ and autocast casts them all to the same type."""
    return _autocast(tensors[0].device.type) and all(tensor.dtype in _CAST for tensor in tensors)


def is_direct(q: Any, k: Any = None, v: Any = None, bias: Any = None, sink: Any = None) -> bool:
    """Whether no part of PyTorch (a mode, a transform, a subclass) intercepts accesses to the tensors' memory."""
    return (
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and type(bias) in _PLAIN
        and type(sink) in _PLAIN
        and not _modes()
        and _transforms() is None
        and _tracing() is None
        and forward_ad._current_level < 0
        and not getattr(q, "is_meta", True)
    )


def is_usual(q: Any, k: Any, v: Any, mask: Any, dropout: Any, scale: Any) -> bool:
    """No graph, no autocast, numbers of the usual types: plain_attention may run the call where all is on the CPU."""
    return (
        not torch.compiler.is_compiling()
        and dropout.__class__ is float
        and dropout == 0.0
        and not _autocast("cpu")
        and (scale is None or (scale.__class__ is float and abs(scale) <= _LARGEST))
        and is_direct(q, k, v, mask)
    )


def is_sharded(*tensors: Any) -> bool:
    """Whether one of them is a DTensor."""
    return any([type(tensor).__name__ == "DTensor" for tensor in tensors])


def check_memory(names: tuple[str, ...], tensors: tuple[Any, ...]) -> None:
    """Checks that given tensors are strided numbers, for calls that do not reach the library's own check."""
    for name, tensor in zip(names, tensors):
        if tensor is None:
            continue
        if tensor.is_nested:
            raise ValueError(f"{name}: {NESTED}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name}: {tensor.layout}, expected torch.strided")


def _check_data(names: tuple[str, ...], tensors: tuple[Any, ...]) -> None:
    """Checks that all or none are on the device meta; else results would have shapes but no values. With a query (the
    first one) without data, lengths and tables may still be on the CPU."""
    device = tensors[0].device
    without = device.type == "meta"
    for name, tensor in zip(names, tensors):
        if tensor is None or (without and (name in _INTEGERS or name == "tables")):
            continue
        if (tensor.device.type == "meta") != without:
            raise ValueError(f"{name}: on {tensor.device}, expected {device} as query")


def _refuse_gradients(scalars: Mapping[str, Any]) -> None:
    for name, number in scalars.items():
        if isinstance(number, Tensor) and number.requires_grad and _grad():
            raise ValueError(without_gradient(name, f"{name}.detach()"))


def _requires(q: Tensor, *others: Any) -> bool:
    if q.requires_grad:
        return True
    for tensor in others:
        if tensor is not None and isinstance(tensor, Tensor) and tensor.requires_grad:
            return True
    return False


def _through_operator(q: Tensor, k: Any, v: Any, rest: list[Any], return_lse: bool | str) -> Any:
    check_return_lse(return_lse)
    through = torch.ops.anyflash.attention if torch.compiler.is_compiling() or not _differentiates() else transformed
    made = through(q, k, v, *rest, 2 if return_lse == "lm" else 1)
    if return_lse == "lm":
        return made
    return made[:2] if return_lse else made[0]


def _differentiates() -> bool:
    """Whether the innermost torch.func transform uses a function's gradients or its vmap."""
    innermost = _transforms()
    return innermost is not None and innermost.key() != _FUNCTIONALIZE


class _Attention(torch.autograd.Function):
    """out, (out, lse) or (out, l, m). `kept` repeats the tensors among the options, except bias and sink, so that
    PyTorch notices changes before the backward pass: slopes, lengths, and the tables of `named`, a rule's text with its
    tables by name. An item is None if there is nothing to watch; if all are, `kept` is empty."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bias: Any, sink: Any, call: Any, *kept: Any) -> Any:
        return_lse, options, others, named = call
        made = _forward(options, others, q, k, v, None, return_lse or True)
        ctx.set_materialize_grads(False)
        out, lse = made[0], made[1]
        if return_lse == "lm":
            lse = lse_of(made[1], made[2], 2)
            ctx.mark_non_differentiable(*made[1:])
        plain = bias is None and sink is None and not kept
        ctx.call = (options, named) if plain else _without_saved(options, named, kept)
        ctx.save_for_backward(q, k, v, bias, sink, out, lse, *kept)
        return made if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None, _: Any = None) -> Any:
        needs = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(needs)
        q, k, v, bias, sink, out, lse, *kept = ctx.saved_tensors
        dout = out.new_zeros(()).expand(out.shape) if dout is None else in_memory(dout)
        dlse = None if dlse is None else in_memory(dlse)
        wanted = needs[0] | needs[1] << 1 | needs[2] << 2 | needs[3] << 3 | needs[4] << 4
        options, named = ctx.call
        if kept:
            options = _with_saved(options, named, kept)
        gradients = dispatched if _modes() else _gradients
        made = once(gradients, wanted, options, dout, dlse, q, k, v, bias, sink, out, lse)
        return *made, *[None] * (len(needs) - 5)


def _without_saved(options: Any, named: Any, kept: tuple[Any, ...]) -> tuple[Any, Any]:
    """The options and the text without what PyTorch saves of them, and frees after the backward pass."""
    left = {**options, "bias": None, "sink": None}
    for name, saved in zip(_KEPT, kept):
        if saved is not None:
            left[name] = None
    if named is not None:
        del left["rule"]
        rest = kept[len(_KEPT) :]
        named = named[0], {name: one if saved is None else None for (name, one), saved in zip(named[1].items(), rest)}
    return left, named


def _with_saved(options: Any, named: Any, kept: list[Any]) -> dict[str, Any]:
    """Those of _without_saved with what PyTorch has saved, of which hooks (torch.autograd.graph.saved_tensors_hooks)
    may have made copies. Bias and sink are still left out."""
    whole = dict(options)
    for name, saved in zip(_KEPT, kept):
        if saved is not None:
            whole[name] = saved
    if named is not None:
        rest = kept[len(_KEPT) :]
        tables = {name: one if saved is None else saved for (name, one), saved in zip(named[1].items(), rest)}
        whole["rule"] = _core.parse_rule(named[0], tables, True)
    return whole


def _gradients(
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
    """The gradients of a call. The options are those of _with_saved."""
    if bias is None and sink is None and not q.is_cuda:
        return _core.torch_attention_backward(dout, q, k, v, out, lse, dlse, options, wanted)
    others = others_of(q, options)
    options = {**options, "bias": bias, "sink": sink, "stream": stream_of(q, others)}
    made = _core.torch_attention_backward(dout, q, k, v, out, lse, dlse, options, wanted)
    if others:
        settle(q, *others)
    return made


def in_memory(gradient: Tensor) -> Tensor:
    """The gradient as plain memory: autograd may have made one that is lazily negated, lazily zero, or sparse."""
    if gradient.layout is not torch.strided:
        return gradient.to_dense()
    if gradient._is_zerotensor():
        return torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    return gradient.resolve_neg()


def once(gradients: Any, *arguments: Any) -> Any:
    """gradients(*arguments), in a backward pass. With create_graph=True the results refuse to be differentiated."""
    return _Once.apply(gradients, *arguments) if _grad() else gradients(*arguments)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Any, *arguments: Any) -> Any:
        return gradients(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(SECOND)
