"""What plan_sharding plans, without processes: balance, few pieces, little traffic, in little time."""

import time
from collections import OrderedDict

import anyflash as af
import numpy as np
import pytest
import torch
from anyflash import _core
from anyflash.torch.distributed import _planner, _schedule, plan_sharding
from anyflash.torch.distributed._parts import stage_parts
from anyflash.torch.distributed._pieces import merged
from anyflash.torch.distributed._schedule import Costs, schedule_of

pytestmark = pytest.mark.of_the_cpu

MILLION = 1 << 20
ENDS = np.array([0, *np.sort(np.random.default_rng(0).integers(1, MILLION, 63)), MILLION], np.int32)
RULES = {
    "full": (af.full(), MILLION, 1),
    "causal": (af.causal(), MILLION, 2),
    "window": (af.local(4096, causal=True), MILLION, 1),
    "documents": (af.documents_packed(ENDS) & af.causal(), MILLION, 32),
    "image": (af.neighbourhood(63), (1024, 1024), 1),
}


@pytest.mark.parametrize("name", RULES)
def test_balance_pieces_traffic_and_time(name):
    rule, shape, pieces = RULES[name]
    times = []
    for _ in range(5):
        _planner._kept.clear()
        start = time.perf_counter()
        plan = plan_sharding(rule, shape, ranks=8)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05
    assert plan.imbalance < 1.02
    every = [plan.positions(rank=rank) for rank in range(8)]
    assert all(len(own) == MILLION // 8 for own in every)
    assert torch.equal(torch.cat(every).sort()[0], torch.arange(MILLION))
    assert max(len(plan.pieces(rank=rank)) for rank in range(8)) <= pieces
    traffic = plan.traffic()
    assert 1 <= traffic["over_least"] <= 1.05
    assert all(a <= b for a, b in zip(traffic["bytes"], traffic["gathered"]))
    if name in ("window", "image"):
        assert traffic["stages"] == 1 and sum(traffic["bytes"]) < 0.07 * sum(traffic["gathered"])


def test_causal_is_zigzag():
    plan = plan_sharding(af.causal(), 8 * 1024, ranks=4)
    assert plan.pieces(rank=0) == [(0, 1024), (7 * 1024, 1024)]
    assert plan.pieces("key", rank=3) == [(3 * 1024, 2048)]


def test_other_keys_lie_in_contiguous_parts():
    plan = plan_sharding(af.full(), 1000, 300, ranks=3)
    assert [len(plan.pieces("key", rank=rank)) for rank in range(3)] == [1, 1, 1]
    assert sum(count for rank in range(3) for _, count in plan.pieces("key", rank=rank)) == 300


@pytest.mark.parametrize(
    "line, call",
    [
        ("q_shape: type str, expected 1 to 3 integers", lambda: plan_sharding(af.full(), "x", ranks=2)),
        ("q_shape: type NoneType, expected 1 to 3 integers", lambda: plan_sharding(af.full(), None, ranks=2)),
        ("q_shape: (1, 2, 3, 4), expected 1 to 3 sizes", lambda: plan_sharding(af.full(), (1, 2, 3, 4), ranks=2)),
        ("k_shape: 2 sizes, expected 1 as in q_shape", lambda: plan_sharding(af.full(), 4, (2, 2), ranks=2)),
        ("ranks: 0, expected at least 1", lambda: plan_sharding(af.full(), 4, ranks=0)),
        ("ranks: 100000, expected at most 16384", lambda: plan_sharding(af.full(), 1000, ranks=100000)),
        ("ranks: type str, expected an integer", lambda: plan_sharding(af.full(), 4, ranks="a")),
        ("rule: type int", lambda: plan_sharding(3, 4, ranks=2)),
        ("rank: not given", lambda: plan_sharding(af.full(), 4, ranks=2).positions()),
        ("rank: 2, expected 0 to 1", lambda: plan_sharding(af.full(), 4, ranks=2).positions(rank=2)),
        ("side: 'value', expected 'query' or 'key'", lambda: plan_sharding(af.full(), 4, ranks=2).positions("value")),
        (
            "rule documents: ids_q has 3 entries, expected 4 as the queries",
            lambda: plan_sharding(af.documents(np.arange(3)), 4, ranks=2),
        ),
    ],
)
def test_wrong_input(line, call):
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", range(40))
def test_the_calls_of_a_stage_have_all_that_see_its_keys_and_few_others(seed):
    generator = np.random.default_rng(seed)
    size, ranks = int(generator.integers(200, 1500)), int(generator.integers(2, 5))
    ids = np.sort(generator.integers(0, 5, size))
    rules = [af.causal(), af.local(int(generator.integers(1, 200)), causal=True), af.documents(ids), af.sink(3)]
    rule, shape = rules[seed % 4], (size,)
    if seed % 5 == 4:
        rule, shape = af.local(int(generator.integers(1, 4))), (int(generator.integers(8, 30)), 7)
    plan = plan_sharding(rule, shape, ranks=ranks)
    visible = np.unpackbits(
        np.frombuffer(_core.seen_blocks(rule, shape, shape, "none_front", *[list(range(shape[0] + 1))] * 2), np.uint8)
    )[7::8].reshape(shape[0], shape[0])
    flat = lambda pieces: np.concatenate([np.arange(0), *[np.arange(a, a + n) for a, n in pieces]])
    for rank in range(ranks):
        queries = plan._layout.queries[rank]
        for stage in plan._exchange().stages:
            keys, missing = flat(stage.keys(rank)), visible[flat(queries)][:, flat(stage.keys(rank))].copy()
            for part in stage_parts(rule, "none_front", plan._layout, queries, stage.keys(rank)):
                rows, columns = (slice(first, first + n) for first, n in (part.rows, part.columns))
                assert np.array_equal(flat(queries)[rows], flat(part.queries))
                assert np.array_equal(keys[columns], flat(part.keys))
                assert missing[rows, columns].any() or len(shape) == 1
                missing[rows, columns] = 0
            assert not missing.any()


def test_a_window_joins_the_rows_at_the_seam_alone():
    plan = plan_sharding(af.local(128, causal=True), 8192, ranks=2)
    (stage,) = plan._exchange().stages
    (part,) = stage_parts(plan.rule, "none_front", plan._layout, plan._layout.queries[1], stage.keys(1))
    assert part.rows == (0, 128)


def stages_of(plan, latency, of_key, of_stage, key_bytes):
    """The stages, if the own work takes a millisecond."""
    costs = Costs(latency=latency, of_key=of_key, key_bytes=key_bytes, of_pair=1e-12, of_stage=of_stage)
    return schedule_of(plan.rule, "none_front", plan._layout, costs=costs).stages


def test_stages_are_as_many_as_the_exchange_needs():
    plan = plan_sharding(af.full(), 1 << 16, ranks=2)
    assert len(stages_of(plan, 1e-5, 1e-9, 1e-4, 1024)) == 1  # hidden behind it
    assert len(stages_of(plan, 1e-1, 1e-7, 1e-5, 1024)) == 1  # each message costs more than it wins
    fine = stages_of(plan, 1e-5, 1e-7, 1e-5, 1024)
    assert len(fine) > 1  # longer than it: the first keys should come soon
    for rank in range(2):
        keys = [piece for stage in fine for piece in stage.keys(rank)]
        assert merged(keys) == plan._layout.keys[1 - rank]


def test_keys_of_several_processes_come_at_once_where_they_are_few():
    plan = plan_sharding(af.full(), 1 << 14, ranks=4)
    assert len(stages_of(plan, 1e-5, 1e-9, 1e-3, 8192)) == 1  # three messages and calls would take longer
    assert len(stages_of(plan, 1e-5, 1e-9, 1e-3, 1 << 20)) == 3  # too many bytes for one


def test_kept_schedules_are_bounded_by_bytes(monkeypatch):
    monkeypatch.setattr(_schedule, "_kept", OrderedDict())
    monkeypatch.setattr(_schedule, "_MOST_BYTES", 1 << 20)
    for n in range(2, 40):
        ids = torch.arange(1 << 14) // n if n != 20 else torch.arange(1 << 19)  # one that is larger than all may be
        plan = plan_sharding(af.documents(ids), len(ids), ranks=2)
        made = schedule_of(plan.rule, "none_front", plan._layout)
        assert made.bytes > 4 * len(ids) and made is schedule_of(plan.rule, "none_front", plan._layout)
        assert len(_schedule._kept) == 1 or sum(one.bytes for one in _schedule._kept.values()) <= 1 << 20
    assert 4 < len(_schedule._kept) < 16


def test_new_key_lengths_take_little_time():
    """Of many entries, in a call that would take seconds."""
    rule, lengths = af.documents(torch.arange(MILLION) // 5000) & af.causal(), list(range(MILLION - 64, MILLION))
    plan, costs = plan_sharding(rule, MILLION, ranks=8), Costs(2e-5, 1e-9, 8192, 1e-12, 1e-4)
    times = []
    for last in range(3):
        lengths[-1] -= last
        start = time.perf_counter()
        made = schedule_of(rule, "none_front", plan._layout, None, lengths, costs)
        stage_parts(rule, "none_front", plan._layout, plan._layout.queries[0], made.stages[0].keys(0), lengths)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.15  # 35 ms here; 1500 with the masks of all lengths
