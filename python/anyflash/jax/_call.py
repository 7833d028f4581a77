"""One call of a handler (python/src/jax.cpp): its options as text, its checks when JAX traces it, its results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _core
from .._frontend import given_tables, refuse_masked
from .._options import DEFAULTS, TENSORS, text_of

NAMES = ("q", "k", "v", *TENSORS)
_TITLES = {"q": "query", "k": "key", "v": "value"}
_NOT_OF_JAX = (np.void, np.longdouble, np.clongdouble)
_Shape = tuple[int, ...]

for _platform, _handlers in _core.jax_handlers().items():
    for _name, _handler in _handlers.items():
        jax.ffi.register_ffi_target(_name, _handler, platform=_platform)


class Call(NamedTuple):
    """Everything about a call except its arrays, for JAX to compare calls."""

    names: tuple[str, ...]  # names of the operands: those of NAMES that are given, then ":" and each table's name
    rule: str
    scalars: tuple[Any, ...]  # as _options.constants has them

    @property
    def options(self) -> dict[str, Any]:
        return dict(zip(DEFAULTS, self.scalars))

    @property
    def layout(self) -> str:
        return str(self.options["layout"])

    def text(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """The attribute of a handler."""
        call = f"results={' '.join(results)}; operands={' '.join(operands)}; rule={self.rule}"
        return call + text_of(self.options)


def title(name: str) -> str:
    """The operand's name in errors."""
    return _TITLES.get(name, f"tables: {name[1:]}" if name[0] == ":" else name)


def operand(name: str, array: Any) -> Any:
    """An argument of a call as JAX accepts it; raises TypeError or ValueError otherwise."""
    if isinstance(array, jax.Array):
        return array
    if not isinstance(array, np.ndarray):
        kind = _core.echoed(type(array).__name__)
        raise TypeError(f"{title(name)}: type {kind}, expected an array of JAX or NumPy")
    refuse_masked(title(name), array)
    if array.dtype.kind in "OUSMm" or array.dtype.type in _NOT_OF_JAX or not array.dtype.isnative:
        raise TypeError(f"{title(name)}: type {array.dtype}, expected numbers of JAX's types")
    if array.dtype == np.int64 and not jax.config.jax_enable_x64 and (array != array.astype(np.int32)).any():
        raise ValueError(f"{title(name)}: numbers beyond int32, expected jax_enable_x64 with them")
    return array


def rule_parts(rule: Any, tables: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """(text, tables by name) of a rule, which may be a text already."""
    if isinstance(rule, str):
        return " ".join(rule.split()), dict(given_tables(tables))
    if not isinstance(rule, _core.Rule):
        kind = _core.echoed(type(rule).__name__)
        raise TypeError(f"rule: type {kind}, expected a rule such as anyflash.causal(), or its text")
    return rule._parts


# ------------------------------------------------------------------------------------------------------------- checks


def _sequence(layout: str, shape: _Shape) -> int:
    """The sequence length of q, k or v; arbitrary if the shape is wrong."""
    places = {"bhsd": slice(2, -1), "bshd": slice(1, -2), "bhds": slice(3, None), "thd": slice(1), "qkv": slice(2, 3)}
    return prod(shape[places.get(layout, slice(0))])


def _stand_ins(call: Call, arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays of NumPy with the shapes and types of a call's, and the options as the extension takes them. Elements lie
    all in one place, but of integers that may be cumulative lengths: they are ones that cannot be wrong."""
    queries = keys = _sequence(call.layout, arrays["q"].shape)
    if "k" in arrays:
        keys = _sequence(call.layout, arrays["k"].shape)
        if "page_table" in arrays:
            keys = prod((*arrays["page_table"].shape[1:2], *arrays["k"].shape[1:2]))
    made: dict[str, Any] = {}
    for name, array in arrays.items():
        if not isinstance(array.dtype, np.dtype):
            raise TypeError(f"{title(name)}: type {array.dtype}, expected numbers")
        if not all(isinstance(size, int) for size in array.shape):
            raise ValueError(f"{title(name)}: a symbolic shape, expected numbers")
        if (name.startswith("cu_") or name[0] == ":") and array.ndim == 1 and array.dtype in (np.int32, np.int64):
            made[name] = np.zeros(array.shape, array.dtype)
            made[name][1:][-1:] = keys if name == "cu_seqlens_k" else queries
        else:
            made[name] = np.broadcast_to(np.zeros((), array.dtype), array.shape)
    rule = _core.parse_rule(call.rule, {name[1:]: array for name, array in made.items() if name[0] == ":"})
    text, tables = rule._parts
    for name in re.findall(r"documents_packed\(\w+, (\w+)\)", text):
        tables[name][1:][-1:] = keys  # of the memory that the rule reads
    return made, {"rule": rule, **call.options, **{name: made[name] for name in TENSORS if name in made}}


def result_shapes(call: Call, arrays: Mapping[str, Any]) -> tuple[_Shape, _Shape]:
    """The shapes of out and lse. Raises what anyflash.attention would, except for errors that depend on values in the
    arrays."""
    given, options = _stand_ins(call, arrays)
    return _core.result_shapes(given["q"], given.get("k"), given.get("v"), options)


def check_backward(call: Call, arrays: Mapping[str, Any]) -> None:
    """Raises what anyflash.attention_backward would, except for errors that depend on values in the arrays."""
    given, options = _stand_ins(call, arrays)
    q, k, v = given["q"], given.get("k"), given.get("v")
    shape, rows = _core.result_shapes(q, k, v, options)
    out = np.broadcast_to(np.zeros((), q.dtype), shape)
    lse = np.broadcast_to(np.zeros((), row_type(q.dtype)), rows)
    _core.attention_backward(out, q, k, v, out, lse, None, options, 0)


def row_type(dtype: Any) -> np.dtype[Any]:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


# -------------------------------------------------------------------------------------------------------------- calls


def _varying(array: Any) -> frozenset[Any]:
    """The mesh axes along which it varies, inside a function that shard_map maps (JAX 0.6 and newer)."""
    kind = jax.typeof(array) if hasattr(jax, "typeof") else None
    return getattr(getattr(kind, "manual_axis_type", None), "varying", getattr(kind, "vma", frozenset()))


def vary_alike(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands of a call, each varying along all mesh axes along which any of them does. Only then does JAX sum the
    gradient of an operand that was the same on several devices."""
    axes = [_varying(array) for array in arrays]
    union = frozenset().union(*axes)
    if not union:
        return arrays
    cast = partial(jax.lax.pcast, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary
    return tuple(array if own == union else cast(array, tuple(union - own)) for array, own in zip(arrays, axes))


def spread_as(array: Any, gradient: Any) -> Any:
    """A gradient sharded like its array over the explicit axes of a mesh, as JAX requires."""
    sharding = getattr(jax.typeof(array), "sharding", None) if hasattr(jax, "typeof") else None
    if sharding is None or not any(sharding.spec):
        return gradient
    return jax.sharding.reshard(gradient, sharding)


def _axes_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The mesh axes to declare for a call's results, whose operands vary alike. JAX 0.10 and newer needs this."""
    if "manual_axis_type" not in jax.ShapeDtypeStruct.__slots__ or not _varying(arrays["q"]):
        return {}
    of_q = jax.typeof(arrays["q"])
    on_mesh = jax.sharding.NamedSharding(of_q.sharding.mesh, jax.sharding.PartitionSpec())
    return {"manual_axis_type": of_q.manual_axis_type, "sharding": on_mesh}


def forward(call: Call, results: tuple[str, ...], arrays: Mapping[str, Any]) -> list[jax.Array]:
    """The results named in `results`, of out, lse, l and m."""
    shape, rows = result_shapes(call, arrays)
    q = arrays["q"].dtype
    of = lambda name: (shape, q) if name == "out" else (rows, row_type(q))
    made = [jax.ShapeDtypeStruct(*of(name), **_axes_of(arrays)) for name in results]
    text = call.text(results, tuple(arrays))
    return jax.ffi.ffi_call("anyflash_forward", made)(*arrays.values(), call=text)


def backward(call: Call, results: tuple[str, ...], arrays: Mapping[str, Any]) -> list[jax.Array]:
    """The gradients named in `results`, of dq, dk, dv, dbias and dsink."""
    owners = (arrays[name[1:]] for name in results)
    made = [jax.ShapeDtypeStruct(owner.shape, owner.dtype, **_axes_of(arrays)) for owner in owners]
    text = call.text(results, tuple(arrays))
    return jax.ffi.ffi_call("anyflash_backward", made)(*arrays.values(), call=text)
