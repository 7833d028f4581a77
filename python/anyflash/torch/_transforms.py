"""torch.func's transforms of the operators: gradients that can nest with each other and with vmap. Calls under vmap
become one call with a longer batch if only tensors with a batch axis are mapped. Otherwise they run one after the
other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._op import ARGUMENTS, BIAS, FORWARD_MODE, LAYOUT, NUMBERS, PAGES, TABLES, _library, differentiate, refuse, save

_Dims = tuple[Any, ...]
_FORWARD, _BACKWARD = 0, 4  # the index of q among the operators' arguments


def _folded(size: int, dim: int | None, tensor: Any) -> Any:
    """Joins the mapped axis of a tensor to its first axis; a tensor that is not mapped is repeated."""
    if tensor is None:
        return None
    moved = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return moved.flatten(0, 1)


def _is_one_call(first: int, dims: _Dims, args: tuple[Any, ...]) -> bool:
    """Whether only q, k, v and tensors shaped like results are mapped, each with a batch, and no other tensor has a
    batch axis."""
    options, mapped = args[first:], dims[first:]
    bias, slopes, others = options[BIAS], options[BIAS + 1], options[BIAS + 2 : PAGES + 1]
    return (
        options[LAYOUT] in ("bhsd", "bshd", "bhds")
        and all(one is None or one.dim() > (dim is not None) for dim, one in zip(dims[: first + 3], args))
        and not options[TABLES]
        and all(dim is None for dim in mapped[BIAS : PAGES + 1])
        and (bias is None or (bias.dim() == 4 and bias.shape[0] == 1))
        and (slopes is None or slopes.dim() == 1)
        and all(tensor is None for tensor in others[1:])  # the first one is sink, which has only a head axis
    )


def _of_one(tensor: Tensor, dim: int | None) -> list[int]:
    """The shape of a tensor in each of the calls."""
    return [size for axis, size in enumerate(tensor.shape) if dim is None or axis != dim]


def _one_call(op: Callable[..., Any], size: int, dims: _Dims, args: tuple[Any, ...], first: int) -> list[Tensor]:
    folded = [_folded(size, dim, tensor) for dim, tensor in zip(dims[: first + 3], args)]
    results = op(*folded, *args[first + 3 :])
    batch = _of_one(args[first], dims[first])[0]
    return [one.unflatten(0, (size, batch)) if one.dim() > 1 else one.expand(size, 0) for one in results]


def _one_by_one(op: Callable[..., Any], size: int, dims: _Dims, args: tuple[Any, ...]) -> list[Tensor]:
    def nth(i: int, dim: Any, value: Any) -> Any:
        if isinstance(value, list):
            return [nth(i, one_dim, one) for one_dim, one in zip(dim or [None] * len(value), value)]
        if not isinstance(value, Tensor) or dim is None:
            return value
        return value.select(dim, i) if size else value.new_zeros(_of_one(value, dim))  # only the results' shapes matter

    calls = [op(*(nth(i, dim, value) for dim, value in zip(dims, args))) for i in range(size or 1)]
    return [torch.stack(results)[:size] for results in zip(*calls)]


def _map(op: Callable[..., Any], first: int) -> Callable[..., Any]:
    """vmap of the operator. Gradients of bias and sink are sums over the batch, so each call needs its own."""

    def mapped(info: Any, dims: _Dims, *args: Any) -> Any:
        size = info.batch_size
        if not (first == _BACKWARD and args[-1] >> 3) and _is_one_call(first, dims, args):
            results = _one_call(op, size, dims, args, first)
        else:
            results = _one_by_one(op, size, dims, args)
        return tuple(results), (0,) * len(results)

    return mapped


_forward, _backward = torch.ops.anyflash.attention, torch.ops.anyflash.attention_backward
if hasattr(torch.library, "register_vmap"):  # PyTorch 2.5
    torch.library.register_vmap("anyflash::attention", _map(_forward, _FORWARD), lib=_library)
    torch.library.register_vmap("anyflash::attention_backward", _map(_backward, _BACKWARD), lib=_library)


# A torch.autograd.Function accepts no lists: the tables go to the end.
def _flat(first: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
    at = first + TABLES
    return (*args[:at], *args[at + 1 :], *args[at])


def _nested(first: int, flat: tuple[Any, ...]) -> tuple[Any, ...]:
    at = first + TABLES
    end = first + ARGUMENTS - 1
    return (*flat[:at], list(flat[end:]), *flat[at:end])


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(*flat: Any) -> Any:
        return _forward(*_nested(_FORWARD, flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        save(ctx, _nested(_FORWARD, inputs), output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call = lambda *args: _Backward.apply(*_flat(_BACKWARD, args))
        made = list(differentiate(ctx, grads, call))
        made[NUMBERS] = None
        return _flat(_FORWARD, tuple(made))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, dims: _Dims, *flat: Any) -> Any:
        call = lambda *args: _Forward.apply(*_flat(_FORWARD, args))
        return _map(call, _FORWARD)(info, _nested(_FORWARD, dims), *_nested(_FORWARD, flat))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(*flat: Any) -> Any:
        return _backward(*_nested(_BACKWARD, flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = staticmethod(refuse)

    @staticmethod
    def vmap(info: Any, dims: _Dims, *flat: Any) -> Any:
        call = lambda *args: _Backward.apply(*_flat(_BACKWARD, args))
        return _map(call, _BACKWARD)(info, _nested(_BACKWARD, dims), *_nested(_BACKWARD, flat))


def transformed(*args: Any) -> Any:
    """The operator anyflash::attention under a transform of torch.func."""
    return _Forward.apply(*_flat(_FORWARD, args))
