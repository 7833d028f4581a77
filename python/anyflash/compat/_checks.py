"""Checks of the values of lengths and tables. On the CPU an eager call checks them at once, and a traced call checks
them by an operator, each time the compiled call runs. On a GPU they are not checked, because that would wait for the
GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _core
from .._options import DEFAULTS, TENSORS
from .._rules import full
from ..torch._attention import is_sharded
from ..torch._op import _OPTIONS, arguments, packed
from ..torch._rule import given_rule, parts_of

_library = torch.library.Library("anyflash", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_library.define("checked(Tensor[] given, str check, SymInt[] sizes) -> Tensor", tags=_TAGS)
_library.define("checked_sink(Tensor s_aux, Tensor q) -> Tensor", tags=_TAGS)
_library.define(f"checked_call(Tensor lengths, Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> Tensor", tags=_TAGS)


def traced() -> bool:
    """Whether values cannot be read yet: torch.compile traces the call, or a mode intercepts it."""
    return torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack())


def checked(check: str, *given: Tensor, sizes: Sequence[int] = ()) -> Tensor:
    """The first of `given`, once the check of that name has passed. Computations with it run after the check."""
    if given[0].is_cuda:
        return given[0]
    if traced():
        return torch.ops.anyflash.checked(list(given), check, list(sizes))
    _CHECKS[check](given, sizes)
    return given[0]


def _bounds(numbers: Tensor) -> tuple[int, int]:
    return (int(numbers.min()), int(numbers.max())) if numbers.numel() else (0, 0)


def _cache_lengths(given: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """given: cache_seqlens, and cache_leftpad if there is one. sizes: the cache's length, the number of new keys."""
    lengths, *leftpad = given
    room, new = sizes
    least, most = _bounds(lengths)
    if not 0 <= least <= most <= room:
        raise ValueError(f"cache_seqlens: {least} to {most}, expected 0 to {room}")
    if new and lengths.numel() and most + new > room:
        raise ValueError(f"cache_seqlens: {new} new keys go up to {most + new}, expected room for them in {room}")
    if leftpad and bool(((leftpad[0] < 0) | (leftpad[0] > lengths)).any()):
        raise ValueError(f"cache_leftpad: {leftpad[0].tolist()}, expected 0 to cache_seqlens {lengths.tolist()}")


def _pages(name: str) -> Callable[[Sequence[Tensor], Sequence[int]], None]:
    """given: the table, the lengths. sizes: the number of pages, their size. Pages that lengths reach must exist."""

    def check(given: Sequence[Tensor], sizes: Sequence[int]) -> None:
        (table, lengths), (count, size) = given, sizes
        if not table.numel():
            return
        if lengths.numel() and int(lengths.max()) > table.shape[1] * size:
            raise ValueError(f"{name}: room for {table.shape[1] * size} keys, expected {int(lengths.max())}")
        used = torch.arange(table.shape[1], device=table.device) * size < lengths[:, None]
        wrong = (used & ((table < 0) | (table >= count))).nonzero()
        if wrong.numel():
            entry, page = wrong[0].tolist()
            place = f"{entry}" if name == "cache_batch_idx" else f"({entry}, {page})"
            raise ValueError(f"{name}: {int(table[entry, page])} at {place}, expected 0 to {count - 1}")

    return check


def _positions(given: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """given: the first positions. sizes: how many each takes, how many there are."""
    if given[0].numel():
        check_positions(_bounds(given[0])[1], *sizes)


def check_positions(first: int, taken: int, there: int) -> None:
    """ValueError if a rotation that uses `taken` positions from `first` on reads beyond the `there` that exist."""
    if taken and first + taken > there:
        raise ValueError(f"rotary_cos: {there} positions, expected at least {first + taken}")


def _indices(given: Sequence[Tensor], sizes: Sequence[int]) -> None:
    least, most = _bounds(given[0])
    if given[0].numel() and not 0 <= least <= most < sizes[0]:
        raise ValueError(f"indices: {least} to {most}, expected 0 to {sizes[0] - 1}")


def _cumulative(side: str) -> Callable[[Sequence[Tensor], Sequence[int]], None]:
    """sizes: the most that the last number may be, and the most between two; -1 for no bound."""
    name = f"cu_seqlens_{side}"

    def check(given: Sequence[Tensor], sizes: Sequence[int]) -> None:
        numbers = given[0].tolist()
        if numbers[0] != 0 or sorted(numbers) != numbers:
            raise ValueError(f"{name}: expected numbers from 0 on that do not fall")
        if 0 <= sizes[0] < numbers[-1]:
            raise ValueError(f"{name}: ends at {numbers[-1]}, expected {sizes[0]} at most")
        if sizes[1] < 0:
            return
        longest = max((b - a for a, b in zip(numbers, numbers[1:])), default=0)
        if sizes[1] < longest:
            raise ValueError(f"max_seqlen_{side}: {sizes[1]}, expected at least {longest} as in {name}")

    return check


def _whole(name: str, tokens: str) -> Callable[[Sequence[Tensor], Sequence[int]], None]:
    """Of Transformers' packed sequences. sizes: how many tokens there are, all of which are in a sequence."""

    def check(given: Sequence[Tensor], sizes: Sequence[int]) -> None:
        numbers = given[0].tolist()
        if numbers[0] != 0 or sorted(numbers) != numbers:
            raise ValueError(f"{name}: expected numbers from 0 on that do not fall")
        if numbers[-1] != sizes[0]:
            raise ValueError(
                f"{name}: ends at {numbers[-1]}, expected {sizes[0]}, as there are {tokens}; for generate, pad the "
                "sequences instead"
            )

    return check


def _used(side: str) -> Callable[[Sequence[Tensor], Sequence[int]], None]:
    """given: the numbers in use of each sequence, the cumulative lengths."""

    def check(given: Sequence[Tensor], sizes: Sequence[int]) -> None:
        used, lengths = given[0], given[1].diff()
        if bool(((used < 0) | (used > lengths)).any()):
            raise ValueError(f"seqused_{side}: {used.tolist()}, expected 0 to the lengths {lengths.tolist()}")

    return check


_CHECKS: dict[str, Callable[[Sequence[Tensor], Sequence[int]], None]] = {
    "cache_lengths": _cache_lengths,
    "indices": _indices,
    "positions": _positions,
    **{name: _pages(name) for name in ("block_table", "page_table", "cache_batch_idx")},
    **{f"cu_seqlens_{side}": _cumulative(side) for side in "qk"},
    **{f"seqused_{side}": _used(side) for side in "qk"},
    "cu_seq_lens_q": _whole("cu_seq_lens_q", "queries"),
    "cu_seq_lens_k": _whole("cu_seq_lens_k", "keys"),
}


def _checked(given: list[Tensor], check: str, sizes: list[int]) -> Tensor:
    _CHECKS[check](given, sizes)
    return given[0].clone()  # an operator must not return its argument


_library.impl("checked", _checked, "CPU")
torch.library.register_fake("anyflash::checked", lambda given, *_: torch.empty_like(given[0]), lib=_library)


def checked_call(lengths: Tensor, q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any]) -> Tensor:
    """The lengths, once what anyflash.torch.attention raises for the call is known not to be raised. For calls that
    write to a cache before they attend to it."""
    options = {name: call[name] for name in ("rule", *TENSORS, *DEFAULTS) if name in call}
    if traced():
        given = arguments(parts_of(options.pop("rule"), None), options)
        return torch.ops.anyflash.checked_call(lengths, q, k, v, *given)
    options["rule"] = given_rule(call["rule"], None)
    q, k, v, *given = (x.detach() if isinstance(x, Tensor) else x for x in (q, k, v, *options.values()))
    _core.result_shapes(q, k, v, dict(zip(options, given)))
    return lengths


def _checked_call(lengths: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    _core.result_shapes(q, k, v, packed(q, *options))
    return lengths.clone()


for _device in ("CPU", "CUDA"):
    _library.impl("checked_call", _checked_call, _device)
torch.library.register_fake("anyflash::checked_call", lambda lengths, *_: torch.empty_like(lengths), lib=_library)


def with_s_aux(function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """The function's result. Its errors name the sink as FlashAttention-3's callers do."""
    try:
        return function(*given, **options)
    except (ValueError, TypeError) as error:
        line = str(error)
        if not line.startswith("sink:"):
            raise
        raise type(error)(f"s_aux{line.removeprefix('sink')}") from None


def checked_sink(s_aux: Any, q: Any) -> Any:
    """s_aux; in a compiled call, whose errors with_s_aux does not see, once it is known that attention takes it."""
    compiled = torch.compiler.is_compiling() and isinstance(s_aux, Tensor) and isinstance(q, Tensor)
    if not compiled or q.dim() < 3 or s_aux.device != q.device or is_sharded(q, s_aux):
        return s_aux
    return torch.ops.anyflash.checked_sink(s_aux, q)


def _checked_sink(s_aux: Tensor, q: Tensor) -> Tensor:
    nothing = q.new_empty(1, q.shape[-2], 0, q.shape[-1])
    with_s_aux(_core.result_shapes, nothing, nothing, nothing, dict(rule=full(), sink=s_aux.detach()))
    return s_aux.clone()


for _device in ("CPU", "CUDA"):
    _library.impl("checked_sink", _checked_sink, _device)
torch.library.register_fake("anyflash::checked_sink", lambda s_aux, q: torch.empty_like(s_aux), lib=_library)
torch.library.register_autograd("anyflash::checked_sink", lambda ctx, gradient: (gradient, None), lib=_library)
