"""attention for JAX, with its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._frontend import check_return_lse, refuse_tables, refuse_tile_machine, second_derivative, without_gradient
from .._options import Scalars, check_names, constants, with_scalars
from .._rules import full
from . import _batch
from ._call import NAMES, Call, check_backward, operand, rule_parts, spread_as, vary_alike

if TYPE_CHECKING:
    from typing_extensions import Unpack

_FULL = full()
_DIFFERENTIABLE = ("q", "k", "v", "bias", "sink")
_RESULTS = {False: ("out",), True: ("out", "lse"), "lm": ("out", "l", "m")}


@with_scalars
def attention(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    rule: Any = _FULL,
    bias: Any = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    return_lse: bool | str = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    key_lengths: Any = None,
    page_table: Any = None,
    tables: Mapping[str, Any] | None = None,
    **scalars: Unpack[Scalars],
) -> Any:
    """anyflash.attention on JAX's arrays, with gradients of q, k, v, bias and sink, through out and lse.

    It works under jit, grad, vjp, vmap, checkpoint, scan and shard_map (over batch and heads).

    Arrays are JAX's or NumPy's. Options that are a word, a number or a switch are Python's own, constants of a compiled
    function. float64 needs jax_enable_x64. There is no plan and no out.

    Calls under vmap become one call with a longer batch. They run one after the other in the layouts "qkv" and "thd",
    with pages, and where a bias, a sink or a table would have to be copied or summed separately.

    Parameters not listed here are those of anyflash.attention.

    Parameters
    ----------
    rule : Rule or str
        Which keys a query sees. A Rule and its tables are constants of a compiled function. anyflash.parse_rule reads
        a text. For tables that change from call to call: rule="documents(ids, ids)", tables={"ids": ids}.
    tables : dict of str to array, optional
        The tables that a rule's text names.

    Returns
    -------
    array or tuple of arrays
        out, (out, lse) or (out, l, m), as anyflash.attention. No gradient goes through l and m.

    Raises
    ------
    ValueError
        Also TypeError: one line, as in anyflash.attention, when JAX traces the call, or for gradients of alibi_slopes.
    jax.errors.JaxRuntimeError
        The same line, when the computation runs, for errors in the arrays' values: descending lengths, for example.
    NotImplementedError
        For second derivatives.
    """
    refuse_tile_machine("jax")
    check_names(scalars, attention)
    check_return_lse(return_lse)
    if not isinstance(rule, str):
        refuse_tables(tables)
    text, named = rule_parts(rule, tables)
    given = zip(NAMES, (q, k, v, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, key_lengths, page_table))
    arrays = {name: operand(name, array) for name, array in given if array is not None or name == "q"}
    arrays |= {f":{name}": operand(f":{name}", table) for name, table in named.items()}
    try:
        numbers = constants(scalars)
    except TypeError as error:
        raise TypeError(f"{error}, known when the call is traced") from None
    call = Call(tuple(arrays), text, tuple(numbers.values()))
    made = _compiled(call, return_lse, tuple(arrays.values()))
    return made if return_lse else made[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(call: Call, return_lse: bool | str, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return _batch.forward(call, _RESULTS[return_lse], call.names)(*arrays)


def _once(make: Any) -> Any:
    """A function of arrays that refuses to be differentiated: make(...) for the first, static arguments."""

    @partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
    def run(call: Call, results: tuple[str, ...], names: tuple[str, ...], arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        return make(call, results, names)(*arrays)

    @run.defjvp
    def refuse(*_: Any) -> Any:
        raise NotImplementedError(second_derivative("jax"))

    return run


_forward_once, _backward_once = _once(_batch.forward), _once(_batch.backward)


def _forward(call: Call, return_lse: bool | str, primals: tuple[Any, ...]) -> tuple[Any, Any]:
    arrays = {name: primal.value for name, primal in zip(call.names, primals)}
    wanted = {name for name, primal in zip(call.names, primals) if primal.perturbed}
    if "alibi_slopes" in wanted:
        raise ValueError(without_gradient("alibi_slopes", "jax.lax.stop_gradient(alibi_slopes)"))
    if "page_table" in arrays:
        check_backward(call, arrays)
    made = _forward_once(call, _RESULTS[return_lse or True], call.names, tuple(arrays.values()))
    lse = made[2] + jnp.log(made[1]) if return_lse == "lm" else made[1]
    # The wanted gradients are passed to _backward as the shape of an empty array. The pytree must not depend on them:
    # JAX keeps one tree for every set of gradients that is asked of a call.
    bits = sum(1 << i for i, name in enumerate(_DIFFERENTIABLE) if name in wanted)
    return made if return_lse else made[:1], (arrays, made[0], lse, jnp.zeros((bits, 0)))


def _backward(call: Call, return_lse: bool | str, saved: Any, gradients: tuple[Any, ...]) -> tuple[Any]:
    arrays, out, lse, wanted = saved
    arrays = {name: arrays[name] for name in call.names}  # JAX sorts a dictionary's keys
    dout, dlse = gradients[0], gradients[1] if return_lse is True else None
    names = [name for i, name in enumerate(_DIFFERENTIABLE) if wanted.shape[0] >> i & 1]
    none = [one is None or isinstance(one, SymbolicZero) for one in (dout, dlse)]
    if not names or all(none):
        return ((None,) * len(arrays),)
    operands = {"dout": jnp.zeros_like(out) if none[0] else dout, "out": out, "lse": lse}
    if not none[1]:
        operands["dlse"] = dlse
    operands |= arrays
    results = tuple(f"d{name}" for name in names)
    made = _backward_once(call, results, tuple(operands), tuple(operands.values()))
    made = {name: spread_as(arrays[name], gradient) for name, gradient in zip(names, made)}
    return (tuple(made.get(name) for name in arrays),)


_attention.defvjp(_forward, _backward, symbolic_zeros=True)


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _compiled(call: Call, return_lse: bool | str, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return _attention(call, return_lse, vary_alike(arrays))
