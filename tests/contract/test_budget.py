"""Budgets and chunks: the same bits as without, whatever the call; a budget below the least is an error that names the
least, and the least works. On a GPU, where parts may take other kernels, results are held against the bar instead."""

import anyflash as af
import numpy as np
import pytest
from bits import BIASES, SIZED, assert_same_bits
from budgets import least_of
from cases import Laid, check, same_bits
from cases import run_for_bits as run
from devices import DEVICE
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from strategies import FLOATS, calls, packed_cases, paged_cases, ragged_cases


def assert_unchanged(case, expected, **changes):
    if DEVICE == "cuda":
        check(case, deterministic=True, **changes)
    else:
        assert_same_bits(run(case, **changes), expected)


def divisors(n):
    return [i for i in range(1, n + 1) if n % i == 0] if n else [1, 3]


ANY = st.one_of(calls(), calls(long=True), packed_cases(), ragged_cases(), paged_cases())


@examples(150)
@given(ANY, st.data())
def test_chunks_change_no_bit(case, data):
    expected = run(case)
    counts = dict(
        num_chunks_q=data.draw(st.sampled_from([None, *divisors(case.queries)])),
        num_chunks_kv=data.draw(st.sampled_from([None, *divisors(case.keys)])),
    )
    assert_unchanged(case, expected, **counts)


@examples(100)
@given(ANY, st.data())
def test_budgets_change_no_bit_and_the_least_works(case, data):
    laid = Laid(case)
    if case.batch * case.heads_q * case.queries * case.keys == 0:
        return
    out, lse, *_ = laid.forward()
    passes = [lambda **changes: laid.forward(**changes)]
    if not case.page_size:
        passes.append(lambda **changes: laid.backward(out, lse, **changes))
    leasts = []
    for one in passes:
        expected, least = one(), least_of(one)
        leasts.append(least)
        assert least > 0 or DEVICE == "cuda"  # there the portable forward kernel needs no workspace
        if least > 0:
            with pytest.raises(ValueError, match=f"expected at least {least}$"):
                one(memory_budget=least - 1)
        if DEVICE == "cuda":
            continue
        for budget in (least, least + data.draw(st.integers(0, 4 * least))):
            for name, (x, y) in enumerate(zip(one(memory_budget=budget), expected, strict=True)):
                assert (x is None) == (y is None)
                assert x is None or same_bits(x, y), f"result {name} with {budget} bytes"
    if DEVICE == "cuda":
        check(case, backward=False, memory_budget=leasts[0])
        check(case, memory_budget=max(leasts))


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("bias", BIASES)
def test_many_blocks(type, bias):
    sink = "float64" if type == "float64" else "float32"  # in float64 the order of the sums of dsink shows
    case = SIZED.but(type=type, sink=sink, bias=bias and ("float32", bias))
    if DEVICE == "cuda":  # each call is held against the reference: in longdouble, for float64
        case = case.but(q_shape=(150,), k_shape=(180,))
    expected = run(case)
    for counts in ((2, 1), (1, 3), (5, 4), (case.queries, case.keys)):
        for threads in (1, 3) if DEVICE != "cuda" else (0,):
            assert_unchanged(case, expected, num_chunks_q=counts[0], num_chunks_kv=counts[1], threads=threads)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU does not divide keys")
@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("magnitude", [30.0, 1e30])
def test_large_scores_and_sums_that_overflow(type, magnitude):
    """A rounded lse has a remainder, and a sum of P V that overflows is made again: both over all chunks of the keys."""
    if type == "float16" and magnitude > 100:
        magnitude = 1e3
    case = SIZED.but(type=type, magnitude=1.0, softcap=0.0)
    laid = Laid(case)
    laid.q = laid.q * laid.q.dtype.type(30)
    if magnitude > 100:
        laid.v = laid.v * laid.v.dtype.type(magnitude * (1e7 if type in ("float32", "bfloat16") else 1))
    with np.errstate(all="ignore"):
        out, lse, *rows = laid.forward()
        for counts in (dict(num_chunks_q=4, num_chunks_kv=3), dict(num_chunks_kv=720)):
            made = laid.forward(**counts)
            assert all(same_bits(x, y) for x, y in zip(made, (out, lse, *rows), strict=True))
            for x, y in zip(laid.backward(out, lse, **counts), laid.backward(out, lse), strict=True):
                assert x is y is None or same_bits(x, y)


def test_a_plan_carries_its_chunks():
    q = np.random.default_rng(0).standard_normal((1, 2, 512, 64), np.float32)
    options = dict(rule=af.causal(), memory_budget=400_000)
    plan = af.plan(q, q, q, **options)
    np.testing.assert_array_equal(af.attention(q, q, q, plan=plan, **options), af.attention(q, q, q, rule=af.causal()))
    with pytest.raises(ValueError, match="^plan: made for memory_budget=400000, the call has none$"):
        af.attention(q, q, q, plan=plan, rule=af.causal())
    with pytest.raises(ValueError, match="^plan: made for memory_budget=400000, the call has 400001$"):
        af.attention(q, q, q, plan=plan, rule=af.causal(), memory_budget=400_001)
    with pytest.raises(ValueError, match="^plan: made for no num_chunks_kv, the call has 4$"):
        af.attention(q, q, q, plan=plan, num_chunks_kv=4, **options)


def test_a_plan_names_what_both_passes_need():
    q, lse = np.zeros((1, 2, 64, 64), np.float32), np.zeros((1, 2, 64), np.float32)
    forward = least_of(lambda **budget: af.attention(q, q, q, **budget))
    backward = least_of(lambda **budget: af.attention_backward(q, q, q, q, q, lse, **budget))
    assert forward < backward == least_of(lambda **budget: af.plan(q, q, q, **budget))
    af.plan(q, q, q, memory_budget=backward)
    for budget in (forward, backward - 1):
        with pytest.raises(ValueError, match=f"expected at least {backward}$"):
            af.plan(q, q, q, memory_budget=budget)
