"""torch.nn.functional.scaled_dot_product_attention on anyflash: translates its arguments to a call of attention, or
gives the reason why PyTorch's own function must run."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from .. import _attention as _plain
from .. import _rules
from .._core import echoed, torch_covers
from ._attention import attention, autocast_makes_one, is_usual, plain_attention
from ._rule import constant

_log = logging.getLogger("anyflash.torch")
_pytorch_s_own = torch._C._nn.scaled_dot_product_attention  # whatever function F holds now
_transforms = torch._C._functorch.get_interpreter_stack
_FUNCTIONALIZE = torch._C._functorch.TransformType.Functionalize
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LARGEST = torch.finfo(torch.float32).max, torch.finfo(torch.float64).max
_PLAIN = (Tensor, torch.nn.Parameter)
_MASKS = (*_PLAIN, type(None))
_CAUSAL, _FULL = _rules.causal(), _rules.full()
_told: set[str] = set()
_lock = threading.Lock()
_users = 0  # of the override
_in_use = False  # _users > 0; a compiled graph depends on this flag, and not on the count


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with its arguments and results. anyflash computes every call
    that it supports. Otherwise PyTorch computes it, and the logger "anyflash.torch" warns once with the reason.

    query (..., Hq, L, E), key (..., H, S, E), value (..., H, S, Ev); attn_mask broadcasts to (..., Hq, L, S): boolean,
    True where a key takes part, or added to the scores, with a gradient of its own. A query that sees no key gives 0.

    Not supported: dropout, other types than float16, bfloat16, float32 and float64, more than 256 channels (512 of
    values), a scale that is not finite, batches and heads that broadcast, other devices than CPU and CUDA, nested
    tensors, subclasses of Tensor, lazily negated tensors and forward-mode derivatives. Wrong calls get PyTorch's own
    errors. Second derivatives raise NotImplementedError.
    """
    more = {} if enable_gqa is False else {"enable_gqa": enable_gqa}  # PyTorch 2.5
    if type(attn_mask) not in _MASKS and type(attn_mask).__name__ == "CausalBias":
        return _of_bias(
            attn_mask, (query, key, value, attn_mask), dropout_p=dropout_p, is_causal=is_causal, scale=scale, **more
        )
    if is_usual(query, key, value, attn_mask, dropout_p, scale) and (
        torch_covers(query, key, value, attn_mask, is_causal, enable_gqa)
    ):  # as what follows finds too, in ten times the time
        return _usual(query, key, value, attn_mask, is_causal, scale)
    reason = _reason(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if reason is None and scale is not None:
        reason = _reason_of_scale(scale, query.dtype)
    if reason is None:
        if query.dim() == 4 and attn_mask is None:
            return attention(query, key, value, rule=_CAUSAL if is_causal else _FULL, scale=scale)
        return _with_four_axes(query, key, value, attn_mask, is_causal, scale)
    if reason and reason not in _told and not torch.compiler.is_compiling():
        _told.add(reason)
        _log.warning("scaled_dot_product_attention: left to PyTorch: %s", reason)
    return _pytorch_s_own(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **more)


def _know_early_names() -> None:
    """PyTorch's causal mask object also has to handle calls of PyTorch's own function by names imported earlier. Those
    calls, too, then go to the function that F holds."""
    bias = getattr(sys.modules.get("torch.nn.attention.bias"), "CausalBias", None)
    if bias is None or "__torch_function__" not in vars(bias):
        return
    found = vars(bias)["__torch_function__"].__func__
    if found.__module__ == __name__:
        return

    def of_either(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return found(cls, F.scaled_dot_product_attention if func is _pytorch_s_own else func, types, args, kwargs)

    bias.__torch_function__ = classmethod(of_either)


def _of_bias(bias: Any, given: tuple[Any, ...], **options: Any) -> Tensor:
    """PyTorch's causal mask object handles calls of the function that F holds now, and of no other. It then calls that
    function again, with is_causal or with a plain tensor as mask."""
    return bias.__torch_function__(F.scaled_dot_product_attention, (type(bias),), given, options)


@functools.wraps(scaled_dot_product_attention)
def _override(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """The function placed in F. Code that has wrapped it may keep or call it after the last user has left: it then is
    PyTorch's own."""
    if _in_use:
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return _pytorch_s_own(query, key, value, attn_mask, dropout_p, is_causal, **options)


_override.__signature__ = inspect.signature(scaled_dot_product_attention)  # type: ignore[attr-defined]
_override.__wrapped__ = _pytorch_s_own
_override.__qualname__ = "_override"  # the name by which a pickle finds it; other wrappers read __name__

# torch.jit.script, in versions that have it, treats the override as PyTorch's own function.
if _builtins := getattr(torch.jit, "_builtins", None):
    for _one in (scaled_dot_product_attention, _override):
        _builtins._register_builtin(_one, "aten::scaled_dot_product_attention")


def _reason(q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, causal: bool, gqa: bool) -> str | None:
    """Why the call is not supported: None if it is, "" if it is wrong and PyTorch will raise."""
    if not (_is_plain(q) and _is_plain(k) and _is_plain(v)):
        return f"tensors of type {type(q).__name__}, {type(k).__name__} and {type(v).__name__}"
    if q.is_nested or k.is_nested or v.is_nested:
        return "nested tensors"
    if not torch.compiler.is_compiling():  # in a graph PyTorch checks both
        if any(isinstance(x, Tensor) and (x.is_neg() or x._is_zerotensor()) for x in (q, k, v, mask)):
            return "lazily negated or zero tensors"
        if forward_ad._current_level >= 0:
            return "a forward-mode derivative"
        if any(level.key() == _FUNCTIONALIZE for level in _transforms() or ()):
            return "torch.func.functionalize"
    if not isinstance(dropout, (float, int)) or not isinstance(causal, bool) or not isinstance(gqa, bool):
        return ""
    if dropout != 0.0:
        return "dropout_p is not 0"
    if q.dtype not in _TYPES:
        return f"type {q.dtype}"
    if q.layout is not torch.strided or not (q.is_cpu or q.is_cuda):
        return f"{q.layout} tensors on {q.device.type}"
    if q.is_cuda and (reason := _reason_of_gpu(q.get_device(), torch.is_grad_enabled())):
        return reason
    if k.layout is not torch.strided or v.layout is not torch.strided:
        return ""
    shape, of_keys, of_values = q.shape, k.shape, v.shape
    rank = len(shape)
    if rank < 2 or len(of_keys) != rank or len(of_values) != rank or (causal and mask is not None):
        return ""
    if k.device != q.device or v.device != q.device:
        return ""
    if (k.dtype != q.dtype or v.dtype != q.dtype) and not autocast_makes_one(q, k, v):
        return ""
    if shape[-1] != of_keys[-1] or of_keys[-2] != of_values[-2]:
        return ""
    if not 1 <= shape[-1] <= 256 or not 1 <= of_values[-1] <= 512:
        return f"{shape[-1]} and {of_values[-1]} channels"
    if shape[:-2] != of_keys[:-2] or shape[:-2] != of_values[:-2]:
        if not gqa or rank < 3 or of_keys[:-2] != of_values[:-2]:
            return "batches and heads that broadcast"
        if shape[:-3] != of_keys[:-3] or not of_keys[-3] or shape[-3] % of_keys[-3]:
            return ""
    return None if mask is None else _reason_of_mask(mask, (*shape[:-1], of_keys[-2]), q)


def _usual(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """Runs a call that torch_covers accepts."""
    if q.dim() < 4:
        return _usual(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask, causal, scale).squeeze(0)
    if mask is None:
        return plain_attention(q, k, v, _CAUSAL if causal else _FULL, scale)
    return plain_attention(q, k, v, "dense(mask)", scale, {"mask": mask.unsqueeze(0) if mask.dim() == 3 else mask})


def _is_plain(tensor: Any) -> bool:
    """Whether it is a plain tensor, or the stand-in for one in a graph."""
    return type(tensor) in _PLAIN or type(tensor).__name__ == "FakeTensor"


@constant
def _reason_of_gpu(index: int, backward: bool) -> str:
    """anyflash's error for a small call on that GPU; "" if it works. It is also asked while a graph is made."""
    return _asked(torch.device("cuda", index), backward)


@functools.cache
def _asked(device: torch.device, backward: bool) -> str:
    with _disable_current_modes(), temporarily_clear_interpreter_stack():  # tensors are real ones here
        small = torch.zeros(1, 1, 1, 8, device=device)
        try:
            out, lse = _plain.attention(small, small, small, return_lse=True)
            if backward:
                _plain.attention_backward(out, small, small, small, out, lse)
        except (ValueError, TypeError) as error:
            return str(error)
    return ""


def _reason_of_mask(mask: Any, shape: tuple[int, ...], q: Tensor) -> str | None:
    if not _is_plain(mask):
        return f"a mask of type {type(mask).__name__}"
    if mask.layout is not torch.strided or mask.device != q.device or not 2 <= mask.dim() <= len(shape):
        return ""
    if mask.dtype not in (torch.bool, torch.float32, q.dtype) and not autocast_makes_one(q, mask):
        return ""
    padded = (1,) * (len(shape) - mask.dim()) + tuple(mask.shape)
    return None if all(_broadcasts(own, full) for own, full in zip(padded, shape)) else ""


def _broadcasts(own: int | torch.SymInt, full: int | torch.SymInt) -> bool:
    """Whether two sizes broadcast. A size known only at run time counts as the full one, as in PyTorch, and is compared
    at run time."""
    if not torch.compiler.is_compiling():
        return own in (1, full)
    if _known(own == full) or _known(own == 1):
        return True
    if _known(own != full):
        return False
    torch._check(own == full)
    return True


def _known(fact: Any) -> bool:
    """Whether a comparison of sizes is known to be true in a graph without adding a guard."""
    if not torch.compiler.is_compiling():
        return bool(fact)
    import torch.fx.experimental.symbolic_shapes as symbolic  # PyTorch has loaded it by now

    known = symbolic.guard_or_false if hasattr(symbolic, "guard_or_false") else symbolic.guard_size_oblivious
    return bool(known(fact))


def _reason_of_scale(scale: Any, dtype: torch.dtype) -> str | None:
    """It must be finite in the type of the scores. PyTorch accepts some tensors as numbers, but none with a
    gradient."""
    if isinstance(scale, Tensor):
        return ""
    try:
        finite = bool(abs(scale) <= (_LARGEST[1] if dtype == torch.float64 else _LARGEST[0]))
    except (TypeError, ValueError):
        return ""
    return None if finite else f"scale {scale}"


def _with_four_axes(q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: float | None) -> Tensor:
    rank, shape = q.dim(), q.shape
    if mask is not None:
        mask = mask[(None,) * (rank - mask.dim())]
    if rank > 4:
        if mask is not None and not all(_known(size == 1) for size in mask.shape[:-3]):
            mask = mask.expand(*shape[:-3], *mask.shape[-3:])
        q, k, v, mask = (x if x is None else x.flatten(0, -4) for x in (q, k, v, mask))
    elif rank < 4:
        q, k, v, mask = (x if x is None else x[(None,) * (4 - rank)] for x in (q, k, v, mask))
    rule: Any = _CAUSAL if causal else _FULL
    tables = None
    if mask is not None and mask.dtype == torch.bool:
        if mask.is_cuda:  # added, as in PyTorch: here faster than a rule
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
        else:
            rule, tables, mask = "dense(mask)", {"mask": mask}, None
    out: Tensor = attention(q, k, v, rule=rule, scale=scale, bias=mask, tables=tables)
    return out if rank == 4 else out.reshape(*shape[:-1], v.shape[-1])


def switch_on() -> None:
    """Installs the override, for all threads."""
    global _users, _in_use
    torch.overrides.get_overridable_functions()  # PyTorch caches F's functions: its own must be among them
    with _lock:
        found = F.scaled_dot_product_attention
        if found is not _override and found is not _pytorch_s_own:
            raise RuntimeError(_replaced(found))
        F.scaled_dot_product_attention = _override
        _users += 1
        _in_use = True
        _know_early_names()


def switch_off() -> None:
    """Ends one user's switch_on."""
    global _users, _in_use
    with _lock:
        _users -= 1
        _in_use = _users > 0
        if not _in_use and F.scaled_dot_product_attention is _override:
            F.scaled_dot_product_attention = _pytorch_s_own


def _replaced(found: Any) -> str:
    """To take its calls would undo what it is for: context_parallel's attend to what other processes have, too. To hand
    them on would leave anyflash out without a word."""
    name = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', type(found).__qualname__)}"
    return (
        f"anyflash.torch: scaled_dot_product_attention is replaced by {echoed(name, 120)}, expected PyTorch's own; "
        "switch anyflash on first, then put that around it"
    )


@contextmanager
def sdpa() -> Iterator[None]:
    """A block in which torch.nn.functional.scaled_dot_product_attention runs on anyflash for all calls that anyflash
    supports, in all threads. After the block it is PyTorch's own again. Names imported from torch.nn.functional before
    the block stay PyTorch's own.

    Other code that replaces the function inside of the block keeps its replacement, which may call the one it found.
    Raises RuntimeError if the function is already replaced: by a wrapper of another library, or by PyTorch's
    context_parallel, whose calls must reach it.
    """
    switch_on()
    try:
        yield
    finally:
        switch_off()
