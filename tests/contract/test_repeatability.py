"""The same bits, whatever the number of threads, the batch, the run, the plan or the company."""

from concurrent.futures import ThreadPoolExecutor

import anyflash as af
import pytest
from bits import BIASES, SIZED, assert_same_bits
from cases import Case, Laid, check, rounds_otherwise, same_bits
from cases import run_for_bits as run
from devices import DEVICE
from hypothesis import given
from profiles import examples
from strategies import FLOATS, calls, ragged_cases


@pytest.mark.parametrize("type", FLOATS)
def test_threads(type):
    @examples(30)
    @given(calls(types=[type]))
    def property(case):
        expected = run(case, threads=1)
        for threads in (2, 3, 8):
            assert_same_bits(run(case, threads=threads), expected)

    property()


@examples(20)
@given(ragged_cases())
def test_threads_ragged(case):
    expected = run(case, threads=1)
    for threads in (2, 3, 8):
        assert_same_bits(run(case, threads=threads), expected)


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("bias", BIASES)
def test_threads_over_many_blocks(type, bias):
    case = SIZED.but(type=type, bias=bias and ("float32", bias))
    expected = run(case, threads=1)
    for threads in (2, 3, 8, 8):
        assert_same_bits(run(case, threads=threads), expected)


@pytest.mark.parametrize("type", FLOATS)
def test_few_queries_many_threads(type):
    """The keys of one head are cut into parts, which must not depend on the threads."""
    case = Case(
        type=type,
        heads_q=4,
        heads_kv=2,
        q_shape=(3,),
        k_shape=(5000,),
        d_qk=64,
        d_v=48,
        rule=("causal",),
        align="none_end",
        seed=9,
    )
    expected = run(case, threads=1)
    for threads in (2, 3, 8, 8):
        assert_same_bits(run(case, threads=threads), expected)


@pytest.mark.parametrize("type", FLOATS)
def test_one_head_many_threads(type):
    """dK, dV and dQ are summed over many blocks by several threads: the order must not depend on who is faster."""
    case = Case(
        type=type, q_shape=(1500,), k_shape=(1500,), d_qk=64, d_v=64, bias=(type, (True, True, False, True)), seed=8
    )
    expected = run(case, threads=1)
    for threads in (2, 3, 8, 8, 8):
        assert_same_bits(run(case, threads=threads), expected)


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("rule", [("full",), ("causal",), ("local", 100, 1, True)], ids=str)
def test_batch_of_three(type, rule):
    case = SIZED.but(
        type=type,
        batch=3,
        rule=rule,
        key_lengths=(700, 1, 300),
        bias=("float32", (True, True, True, True)),
        q_shape=(150,),
        sink=None,
    )
    together = run(case)
    for entry in range(3):
        single = case.but(batch=1, key_lengths=case.key_lengths[entry : entry + 1])
        tensors = {name: value[entry : entry + 1] for name, value in case.tensors.items()}
        alone = run(single, tensors)
        for (name, x), (_, y) in zip(alone.items(), together.items(), strict=True):
            assert same_bits(x, y[entry : entry + 1]), f"{name} of entry {entry}"


@examples(60)
@given(calls())
def test_a_given_plan_changes_nothing(case):
    laid = Laid(case)
    plan = af.plan(laid.q, laid.k, laid.v, **laid.options)
    assert_same_bits(laid.run(plan=plan), laid.run())


@examples(40)
@given(calls())
def test_strides_change_nothing(case):
    """Where a tensor lies in memory does not matter to any bit of the result."""
    if rounds_otherwise(case):
        check(case.but(wild=True))
        check(case.but(wild=False))
    else:
        assert_same_bits(run(case.but(wild=True)), run(case.but(wild=False)))


if DEVICE == "cpu":

    @pytest.mark.parametrize("switch", ["deterministic", "allow_tf32"])
    @examples(30)
    @given(case=calls())
    def test_a_gpus_switch_changes_nothing_on_the_cpu(switch, case):
        assert_same_bits(run(case, **{switch: True}), run(case, deterministic=False))


def test_calls_from_several_threads_at_once():
    expected = run(SIZED)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: run(SIZED), range(8)):
            assert_same_bits(result, expected)
