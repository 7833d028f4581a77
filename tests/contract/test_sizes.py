"""Strides over more than 2^31 elements, and strides of 0. What lies far apart is the CPU's here, in memory that the
system only promises; tests/gpu/strides_test.cpp has the like for a GPU."""

import anyflash as af
import numpy as np
import pytest
from cases import Case, Laid, same_bits
from devices import DEVICE, from_device, to_device
from memory import virtual
from strategies import FLOATS

# Where each axis of a (2, 2, 3, 4) tensor lies, in elements: some two entries are more than 2^31 (or 2^32) elements
# apart.
FAR = 2**31 + 2**20
STRIDES = {
    "batch": (FAR, 12, 4, 1),
    "head": (24, FAR, 4, 1),
    "sequence": (24, 12, 2**30 + 2**20, 1),
    "channel": (24, 3, 1, 2**30 + 2**20),
    "every": (2**33, 2**31 + 2**30, 2**30, 1),
    "beyond 2^32": (2**32 + 2**20, 12, 4, 1),
}


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("axis", STRIDES)
def test_far_apart(axis, type):
    case = Case(
        type=type, batch=2, heads_q=2, heads_kv=2, q_shape=(3,), k_shape=(3,), d_qk=4, d_v=4, rule=("causal",), seed=9
    )
    laid = Laid(case)
    out, lse = af.attention(laid.q, laid.k, laid.v, return_lse=True, **laid.options)
    expected = af.attention_backward(laid.dout, laid.q, laid.k, laid.v, out, lse, **laid.options)

    def far(a):
        there = virtual(a.shape, STRIDES[axis], a.dtype)
        there[...] = a
        return there

    q, k, v, dout = (far(a) for a in (laid.q, laid.k, laid.v, laid.dout))
    far_out = far(out * 0)
    _, far_lse = af.attention(q, k, v, out=far_out, return_lse=True, **laid.options)
    assert same_bits(far_out, out) and same_bits(far_lse, lse)
    gradients = af.attention_backward(dout, q, k, v, far_out, lse, **laid.options)
    for name, a, b in zip(gradients._fields, gradients, expected):
        assert (a is None and b is None) or same_bits(a, b), name


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_bias_far_apart(axis):
    case = Case(batch=2, heads_q=2, q_shape=(3,), k_shape=(4,), bias=("float32", (True, True, True, True)), seed=2)
    strides = [24, 12, 4, 1]
    strides[axis] = FAR
    if axis == 3:
        strides = [12, 6, 2, FAR]
    laid, plain = Laid(case), Laid(case)
    there = virtual((2, 2, 3, 4), strides, np.float32)
    there[...] = laid.options["bias"]
    laid.options["bias"] = there
    for (name, a), (_, b) in zip(laid.run().items(), plain.run().items(), strict=True):
        assert same_bits(a, b), name


def test_bias_of_more_than_2_to_the_31_places():
    """bias[i, j] = base[i + j] over 50,000 x 50,000 places: overlapping strides, so no memory, but the places are
    there."""
    n = 50_000
    rng = np.random.default_rng(0)
    base = rng.standard_normal(2 * n).astype(np.float32)
    if DEVICE != "cuda":
        bias = np.lib.stride_tricks.as_strided(base, (1, 1, n, n), (0, 0, 4, 4))
    else:
        bias = to_device(base).as_strided((1, 1, n, n), (0, 0, 1, 1))
    q, k, v = (rng.standard_normal((1, 1, n, 8)).astype(np.float32) for _ in range(3))
    out = from_device(af.attention(*map(to_device, (q, k, v)), bias=bias, rule=af.window(5, 3)))[0, 0]
    for i in (0, 1, 4321, 43_000, n - 2, n - 1):
        seen = np.arange(max(0, i - 5), min(n, i + 4))
        s = q[0, 0, i] @ k[0, 0, seen].T / 8**0.5 + base[i + seen]
        p = np.exp(s - s.max())
        assert np.abs(p @ v[0, 0, seen] / p.sum() - out[i]).max() < 1e-5


def test_more_than_2_to_the_31_pairs():
    """100,000 queries and keys: positions, runs and pairs beyond 32 bits, forward and backward."""
    n, rng = 100_000, np.random.default_rng(1)
    q, k, v, dout = (rng.standard_normal((1, 1, n, 4)).astype(np.float32) for _ in range(4))
    rule = af.local(3, 0, True) | af.prefix(1)
    there = [to_device(a) for a in (q, k, v)]
    results = af.attention(*there, rule=rule, return_lse=True)
    dq, dk, dv = map(from_device, af.attention_backward(to_device(dout), *there, *results, rule=rule)[:3])
    out, lse = map(from_device, results)
    tail = slice(n - 40, n)
    keys = np.concatenate([[0], np.arange(n - 42, n)])
    case = Case(q_shape=(40,), k_shape=(43,), d_qk=4, d_v=4)
    mask = np.array([[j == 0 or i - 2 <= j <= i for j in keys] for i in range(n - 40, n)])
    piece = Laid(
        case.but(rule=("dense", mask)),
        {"q": q[:, :, tail], "k": k[:, :, keys], "v": v[:, :, keys], "dout": dout[:, :, tail]},
    )
    expected = piece.run()
    close = lambda a, b: np.abs(a - b).max() < (1e-6 if DEVICE == "cpu" else 1e-5)  # a GPU cuts sums elsewhere
    assert close(out[:, :, tail], expected.out) and close(lse[:, :, tail], expected.lse)
    assert close(dq[:, :, tail], expected.dq)
    assert close(dk[:, :, n - 40 :], expected.dk[:, :, 3:]) and close(dv[:, :, n - 40 :], expected.dv[:, :, 3:])


def test_inputs_with_stride_zero():
    """One key and value row for all, and one head for all, without a copy."""
    case = Case(batch=2, heads_q=2, heads_kv=2, q_shape=(20,), k_shape=(30,), seed=6)
    tensors = {name: value.copy() for name, value in case.tensors.items()}
    for name in "kv":
        tensors[name] = np.broadcast_to(tensors[name][:1, :1], tensors[name].shape)
    laid = Laid(case, tensors)
    laid.k, laid.v = map(to_device, (tensors["k"], tensors["v"]))
    strides = laid.k.strides if DEVICE != "cuda" else laid.k.stride()
    assert strides[:2] == (0, 0)
    every = dict(deterministic=True)
    for (name, a), (_, b) in zip(laid.run(**every).items(), Laid(case, tensors).run(**every).items(), strict=True):
        assert same_bits(a, b), name
