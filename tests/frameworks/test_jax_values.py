"""anyflash.jax.attention against the contract's reference: results and, through JAX's differentiation, gradients; as
calls of their own, and compiled with the rule's tables as arguments."""

import anyflash as af
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from anyflash.jax import attention
from cases import Laid, same_bits
from hypothesis import given
from profiles import examples
from strategies import FLOATS, calls, packed_cases, paged_cases, ragged_cases
from test_core import CALLS, core_case

jax.config.update("jax_enable_x64", True)  # for float64


class JaxLaid(Laid):
    """A case's tensors as JAX's."""

    compiled = False
    place = staticmethod(lambda array: None if array is None else jnp.asarray(array))

    def function(self, return_lse, **changes):
        """attention of what has gradients alone, and these."""
        options = self.options | changes
        tables = {}
        if self.compiled:
            options["rule"], tables = options["rule"]._parts
        names = [name for name in ("bias", "sink") if name in options]
        constants = {name: value for name, value in options.items() if name not in names}
        tables = {name: jnp.asarray(table) for name, table in tables.items()}

        def call(q, k, v, *others):
            given = constants | dict(zip(names, others)) | ({"tables": tables} if tables else {})
            return attention(q, k, v, return_lse=return_lse, **given)

        return call, (self.q, self.k, self.v, *(options[name] for name in names))

    def jit(self, function):
        return jax.jit(function) if self.compiled else function

    def forward(self, **changes):
        made = {}
        for return_lse in (True, "lm", False):
            call, arrays = self.function(return_lse, **changes)
            made[return_lse] = self.jit(call)(*arrays)
        (out, lse), (again, l, m) = made[True], made["lm"]
        assert same_bits(np.asarray(out), np.asarray(again)) and same_bits(np.asarray(out), np.asarray(made[False]))
        return tuple(map(np.asarray, (out, lse, l, m)))

    def backward(self, out, lse, **changes):
        call, arrays = self.function(self.dlse is not None, **changes)
        dout = jnp.asarray(self.dout)

        def gradients(*arrays):
            return jax.vjp(call, *arrays)[1](dout if self.dlse is None else (dout, self.dlse))

        dq, dk, dv, *others = self.jit(gradients)(*arrays)
        names = [name for name in ("bias", "sink") if name in self.options]
        others = {f"d{name}": np.asarray(one) for name, one in zip(names, others)}
        return af.Gradients(*(None if one is None else np.asarray(one) for one in (dq, dk, dv)), **others)


class CompiledLaid(JaxLaid):
    compiled = True


@pytest.fixture(params=[JaxLaid, CompiledLaid], ids=["eager", "jit"])
def way(request, monkeypatch):
    monkeypatch.setattr(cases, "Laid", request.param)


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("name", CALLS)
def test_call(name, type, monkeypatch):
    """Each type in one of the two ways, which differ in nothing that has to do with types."""
    monkeypatch.setattr(cases, "Laid", JaxLaid if type in ("float16", "float64") else CompiledLaid)
    cases.check(core_case(name, type))


@examples(40)
@given(calls())
def test_any_call(way, case):
    cases.check(case)


@examples(10)
@given(packed_cases())
def test_packed(way, case):
    cases.check(case)


@examples(12)
@given(ragged_cases())
def test_documents_end_to_end(way, case):
    cases.check(case)


@examples(10)
@given(paged_cases())
def test_pages(way, case):
    cases.check(case)
