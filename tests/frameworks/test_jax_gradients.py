"""Gradients by finite differences in float64, for every option, and what has none."""

import anyflash as af
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from anyflash.jax import attention
from jax.test_util import check_grads
from small_rules import small_rules

jax.config.update("jax_enable_x64", True)

RULES = small_rules(np.array)


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed + sum(shape)).standard_normal(shape))


def check(call, *arrays):
    check_grads(jax.jit(call), arrays, order=1, modes=["rev"])


@pytest.fixture
def qkv():
    """Five queries of four heads, six keys of two."""
    return numbers(2, 4, 5, 3), numbers(2, 2, 6, 3), numbers(2, 2, 6, 4)


@pytest.mark.parametrize("name", RULES)
def test_every_rule(qkv, name):
    check(lambda *x: attention(*x, rule=RULES[name]), *qkv)


@pytest.mark.parametrize("align", ["none_front", "none_end", "scale_front", "scale_end"])
def test_every_alignment(qkv, align):
    check(
        lambda *x: jnp.tanh(
            jnp.concatenate(
                [y.ravel() for y in attention(*x, rule=af.causal() | af.sink(1), align=align, return_lse=True)]
            )
        ),
        *qkv,
    )


OPTIONS = {
    "scale": dict(scale=0.3),
    "softcap": dict(softcap=0.7),
    "alibi": dict(alibi_slopes=np.array([0.1, 0.2, 0.3, 0.4])),
    "key_lengths": dict(key_lengths=np.array([4, 6], np.int32)),
    "lse": dict(return_lse=True),
    "switches": dict(deterministic=True, allow_tf32=True),
    "threads": dict(threads=1),
    "text": dict(rule="documents(a, b)\n & causal()", tables={"a": jnp.arange(5) // 3, "b": jnp.arange(6) // 3}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(qkv, name):
    check(lambda *x: attention(*x, **OPTIONS[name]), *qkv)


@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (1, 4, 5, 6), (2, 1, 1, 6), (1, 1, 5, 1), (1, 4, 1, 1)])
def test_bias(qkv, shape):
    check(lambda q, k, v, bias: attention(q, k, v, bias=bias, return_lse=True), *qkv, numbers(*shape))


def test_sink_and_everything_else(qkv):
    def call(q, k, v, bias, sink):
        return attention(
            q,
            k,
            v,
            rule=af.causal(),
            bias=bias,
            sink=sink,
            softcap=2.0,
            scale=0.4,
            return_lse=True,
            align="none_end",
            alibi_slopes=jnp.full((2, 4), 0.1),
        )

    check(call, *qkv, numbers(1, 4, 5, 6), numbers(4))


def test_every_layout():
    check(lambda *x: attention(*x, layout="bshd"), numbers(2, 5, 4, 3), numbers(2, 6, 2, 3), numbers(2, 6, 2, 3))
    check(lambda *x: attention(*x, layout="bhds"), numbers(2, 4, 3, 5), numbers(2, 2, 3, 6), numbers(2, 2, 4, 6))
    check(lambda x: attention(x, layout="qkv", rule=af.causal(), return_lse=True), numbers(3, 2, 5, 3))
    ends = dict(cu_seqlens_q=jnp.array([0, 2, 5]), cu_seqlens_k=jnp.array([0, 3, 6]))
    check(lambda *x: attention(*x, layout="thd", **ends), numbers(5, 4, 3), numbers(6, 2, 3), numbers(6, 2, 3))
    pixels = [numbers(1, 2, 3, 4, 3) for _ in range(3)]
    check(lambda *x: attention(*x, rule=af.neighbourhood(3)), *pixels)


def test_one_array_in_every_place():
    check(lambda x: attention(x, x, x, bias=x @ x.mT), numbers(1, 2, 5, 3))


def results_of_calls(function, *arrays):
    """The attribute "call" of each call in a traced function: it begins with the names of the results."""
    found = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "ffi_call":
                found.append(dict(equation.params["attributes"])["call"].partition(";")[0].removeprefix("results="))
            for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(parameter, "jaxpr", parameter)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(function)(*arrays).jaxpr)
    return found


def test_only_what_is_asked_for_is_computed(qkv):
    q, k, v = qkv
    bias = numbers(1, 4, 5, 6)
    call = lambda q, k, v, bias: attention(q, k, v, bias=bias)
    assert results_of_calls(call, q, k, v, bias) == ["out"]
    gradient = lambda wanted: jax.grad(lambda *x: call(*x).sum(), wanted)
    assert results_of_calls(gradient(2), q, k, v, bias) == ["out lse", "dv"]
    assert results_of_calls(gradient((0, 3)), q, k, v, bias) == ["out lse", "dq dbias"]
    assert results_of_calls(jax.jit(gradient((0, 1, 2, 3))), q, k, v, bias) == ["out lse", "dq dk dv dbias"]


def test_gradients_of_one_argument_after_another(qkv):
    """What JAX keeps of a call is not only good for what was asked for last."""
    arrays = *qkv, numbers(2, 4, 5, 6), numbers(4)
    loss = lambda q, k, v, bias, sink: jnp.sin(attention(q, k, v, bias=bias, sink=sink)).sum()
    expected = jax.grad(loss, range(5))(*arrays)
    in_turn = lambda *arrays: [jax.grad(loss, i)(*arrays) for i in (*range(5), *range(5))]
    for made in in_turn(*arrays), jax.jit(in_turn)(*arrays):
        for one, other in zip(made, (*expected, *expected)):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_gradient_of_lse_alone(qkv):
    q, k, v = qkv
    dq, dk, dv = jax.grad(lambda *x: attention(*x, return_lse=True)[1].sum(), (0, 1, 2))(q, k, v)
    textbook = lambda q, k: jax.nn.logsumexp(q @ jnp.repeat(k, 2, 1).mT / 3**0.5, -1).sum()
    expected = jax.grad(textbook, (0, 1))(q, k)
    np.testing.assert_allclose(dq, expected[0], atol=1e-12)
    np.testing.assert_allclose(dk, expected[1], atol=1e-12)
    assert not dv.any()


def test_no_gradient_through_l_and_m(qkv):
    out = lambda *x: attention(*x, return_lse="lm")[0].sum()
    all_three = lambda *x: sum(y.sum() for y in attention(*x, return_lse="lm"))
    plain = lambda *x: attention(*x).sum()
    for got, expected, same in zip(*(jax.grad(each, (0, 1, 2))(*qkv) for each in (all_three, out, plain))):
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_allclose(got, same, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(lambda x: jax.grad(f)(x).sum()),
        jax.hessian,
        lambda f: jax.jit(jax.hessian(f)),
        lambda f: jax.grad(lambda x: jax.vmap(jax.grad(f))(x[None]).sum()),
    ],
)
def test_no_second_derivative(qkv, transform):
    q, k, v = qkv
    with pytest.raises(NotImplementedError, match="^anyflash.jax.attention: a second derivative was asked for"):
        transform(lambda q: jnp.sin(attention(q, k, v)).sum())(q)


def test_no_gradient_of_slopes(qkv):
    call = lambda slopes: attention(*qkv, alibi_slopes=slopes).sum()
    with pytest.raises(ValueError, match="^alibi_slopes: requires a gradient"):
        jax.grad(call)(jnp.ones(4))
    assert not jax.grad(lambda slopes: call(jax.lax.stop_gradient(slopes)))(jnp.ones(4)).any()


def test_no_gradient_of_pages():
    pages = jnp.zeros((3, 4, 2, 8))
    call = lambda q: attention(
        q, pages, pages, page_table=jnp.zeros((1, 2), jnp.int32), key_lengths=jnp.array([5])
    ).sum()
    with pytest.raises(ValueError, match="^page_table: "):
        jax.grad(call)(jnp.zeros((1, 2, 1, 8)))
