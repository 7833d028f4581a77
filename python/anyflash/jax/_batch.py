"""vmap of the calls. Mapped calls become one call with a longer batch if no array has to be copied for it. Otherwise
they run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from . import _call
from ._call import Call

_ROWS = ("q", "k", "v", "out", "lse", "dout", "dlse")  # they have a batch of their own
_SMALL = ("alibi_slopes", "key_lengths")  # small enough to repeat, so that calls need not run one by one
_Handler = Callable[[Call, tuple[str, ...], Mapping[str, Any]], list[jax.Array]]


@lru_cache(maxsize=1024)
def mapped(handler: _Handler, call: Call, results: tuple[str, ...], names: tuple[str, ...]) -> Any:
    """handler(call, results, arrays by name) as a function of the arrays alone, which vmap can map."""

    @custom_vmap
    def run(*arrays: Any) -> tuple[Any, ...]:
        return tuple(handler(call, results, dict(zip(names, arrays))))

    @run.def_vmap
    def rule(size: int, is_mapped: Sequence[bool], *arrays: Any) -> tuple[Any, Any]:
        of_one = {
            name: array.shape[1:] if of_map else array.shape for name, of_map, array in zip(names, is_mapped, arrays)
        }
        batch = next(iter(of_one["q"]), 0)
        ways = [
            _way(call, results, name, of_map, array, of_one[name], batch)
            for name, of_map, array in zip(names, is_mapped, arrays)
        ]
        if "alone" in ways:
            made = _one_by_one(run, is_mapped, arrays)
        else:
            longer = run(*(_lengthened(way, size, array) for way, array in zip(ways, arrays)))
            made = tuple(one.reshape(size, batch, *one.shape[1:]) for one in longer)
        return made, (True,) * len(results)

    return run


def _way(
    call: Call, results: tuple[str, ...], name: str, is_mapped: bool, array: Any, shape: tuple[int, ...], batch: int
) -> str:
    """How an operand enters one joined call: "joined" (its mapped axis joins its batch), "repeated", "as it is"; or
    "alone" if it cannot. shape: of one mapped call."""
    if call.layout not in ("bhsd", "bshd", "bhds") or "page_table" in call.names:
        return "alone"
    if name in _ROWS:
        return "joined" if is_mapped else "repeated"
    if name in ("bias", "sink") and f"d{name}" in results and not is_mapped:
        return "alone"  # each mapped call has its own gradient
    if name == "bias" and is_mapped:
        return "joined" if shape[:1] == (batch,) else "alone"
    if name in _SMALL and len(shape) == (1 if name == "key_lengths" else 2):  # it has a batch
        return "joined" if is_mapped else "repeated"
    if is_mapped:
        return "alone"
    if name == "bias":
        return "as it is" if shape[:1] == (1,) else "alone"
    return "as it is" if name[0] != ":" or _has_no_batch(array) else "alone"


def _has_no_batch(table: Any) -> bool:
    """Whether a rule's table has no batch axis: ids and lengths are integers, bitmaps and masks are not."""
    if np.issubdtype(table.dtype, np.signedinteger):
        return bool(table.ndim == 1)
    return bool(table.ndim < 4 or table.shape[0] == 1)


def _lengthened(way: str, size: int, array: Any) -> Any:
    if way == "as it is":
        return array
    if way == "repeated":
        array = jnp.broadcast_to(array, (size, *array.shape))
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _one_by_one(run: Any, is_mapped: Sequence[bool], arrays: Sequence[Any]) -> Any:
    def one(of_map: Sequence[Any]) -> Any:
        rest = iter(of_map)
        return run(*(next(rest) if its else array for its, array in zip(is_mapped, arrays)))

    return jax.lax.map(one, [array for its, array in zip(is_mapped, arrays) if its])


forward = partial(mapped, _call.forward)
backward = partial(mapped, _call.backward)
