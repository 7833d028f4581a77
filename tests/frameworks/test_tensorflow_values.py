"""anyflash.tensorflow.attention against the contract's reference: results and, through tf.GradientTape, gradients,
eagerly and in graphs."""

import anyflash as af
import anyflash.tensorflow
import cases
import numpy as np
import pytest
import tensorflow as tf
from cases import Laid, same_bits
from devices import DEVICE
from hypothesis import given
from profiles import examples
from strategies import FLOATS, calls, paged_cases, ragged_cases
from test_core import CALLS, core_case


class TensorflowLaid(Laid):
    """A case's tensors as TensorFlow's."""

    place = staticmethod(tf.constant)
    wrap = staticmethod(lambda call: call)

    def forward(self, **changes):
        options = self.options | changes
        names = [name for name in ("bias", "sink") if name in options]
        self.tensors = [self.q, self.k, self.v, *(options.pop(name) for name in names)]

        def call(wanted):
            def function(*tensors):
                q, k, v, *terms = tensors
                return anyflash.tensorflow.attention(q, k, v, return_lse=wanted, **dict(zip(names, terms)), **options)

            return self.wrap(function)(*self.tensors)

        with tf.GradientTape() as self.tape:
            self.tape.watch(self.tensors)
            out, lse = call(True)
        assert DEVICE == "cpu" or "GPU" in out.device
        self.results = [out] if self.dlse is None else [out, lse]
        again, l, m = call("lm")
        assert same_bits(out.numpy(), again.numpy()) and same_bits(out.numpy(), call(False).numpy())
        self.names = names
        return tuple(x.numpy() for x in (out, lse, l, m))

    def backward(self, out, lse, **changes):
        given = [tf.constant(self.dout)] if self.dlse is None else [tf.constant(self.dout), self.dlse]
        made = [x.numpy() for x in self.tape.gradient(self.results, self.tensors, given)]
        terms = dict(zip(self.names, made[3:]))
        return af.Gradients(*made[:3], terms.get("bias"), terms.get("sink"))


class InGraphs(TensorflowLaid):
    """As a function whose every dimension is unknown."""

    @staticmethod
    def wrap(call):
        def function(*tensors):
            unknown = [tf.TensorSpec([None] * x.ndim, x.dtype) for x in tensors]
            return tf.function(call, input_signature=unknown, autograph=False)(*tensors)

        return function


@pytest.fixture(autouse=True, params=[TensorflowLaid, InGraphs], ids=["eager", "graph"])
def way(request, monkeypatch):
    monkeypatch.setattr(cases, "Laid", request.param)


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("name", [name for name in CALLS if CALLS[name].get("layout") != "qkv"])
def test_call(name, type):
    cases.check(core_case(name, type))


@examples(60)
@given(calls())
def test_any_call(case):
    cases.check(case)


@examples(15)
@given(ragged_cases())
def test_documents_end_to_end(case):
    cases.check(case)


@examples(15)
@given(paged_cases())
def test_pages(case):
    cases.check(case)


def test_rules_as_text_with_tables():
    rng = np.random.default_rng(0)
    q = tf.constant(rng.standard_normal((1, 2, 9, 4)))
    ids = tf.constant([0, 0, 0, 1, 1, 1, 1, 2, 2], tf.int64)
    function = tf.function(
        lambda q, ids: anyflash.tensorflow.attention(
            q, q, q, rule="documents(ids, ids) & causal()", tables={"ids": ids}
        )
    )
    for table in (ids, ids[::-1]):
        expected = af.attention(*[q.numpy()] * 3, rule=af.documents(table.numpy()) & af.causal())
        assert same_bits(function(q, table).numpy(), expected)
