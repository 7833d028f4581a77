"""Document ids that are new in every call, on the CPU and on the GPU: results against float64, and nobody waits."""

import functools
import itertools

import anyflash as af
import numpy as np
import pytest
import torch
from budgets import least_of

N = 1300


def ids_of(kind, n=N, seed=0):
    random = np.random.default_rng(seed)
    cuts = np.sort(random.choice(np.arange(1, n), 11, replace=False))
    segment = np.searchsorted(cuts, np.arange(n), side="right")
    return {
        "in order": segment,
        "with gaps": segment * 1_000_003 - 5_000_000_000,
        "descending": -segment,
        "one": np.full(n, -7),
        "all different": np.arange(n),
        "all different, shuffled": random.permutation(n),
        "segments in any order": random.integers(-3, 3, 12)[segment],
        "any id in any place": random.integers(0, 12, n),
        "short": np.arange(n) // 3,
    }[kind].astype(np.int64)


KINDS = (
    "in order|with gaps|descending|one|all different|all different, shuffled|segments in any order|"
    "any id in any place|short"
).split("|")


def positions(ids):
    """Of each entry in its document."""
    seen = {}
    return np.array([seen.setdefault(i, itertools.count()).__next__() for i in ids.tolist()])


def visible(rule, ids_q, ids_k):
    same = ids_q[:, None] == ids_k[None]
    apart = positions(ids_q)[:, None] - positions(ids_k)[None]
    return {
        "documents": same,
        "causal": same & (apart >= 0),
        "local": same & (abs(apart) < 40),
        "others": ~same,
        "sink": same | (np.arange(len(ids_k)) < 5)[None],
    }[rule]


def rule_of(name, ids_q, ids_k):
    documents = af.documents(ids_q, ids_k)
    return {
        "documents": documents,
        "causal": documents & af.causal(),
        "local": documents & af.local(40),
        "others": ~documents,
        "sink": documents | af.sink(5),
    }[name]


def randoms(*shapes, dtype):
    generator = torch.Generator(device="cuda").manual_seed(0)
    return [torch.randn(shape, device="cuda", dtype=dtype, generator=generator) for shape in shapes]


def reference(q, k, v, dout, mask):
    """out, dq, dk, dv in float64; mask: (batch or 1, 1, queries, keys)."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    k_all, v_all = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k_all.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -1e30)
    out = scores.softmax(-1).masked_fill(~mask, 0) @ v_all
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())


def results(q, k, v, dout, rule, **options):
    out, lse = af.attention(q, k, v, rule=rule, return_lse=True, **options)
    return out, *af.attention_backward(dout, q, k, v, out, lse, rule=rule, **options)[:3]


def check(got, expected, dtype, what=""):
    bar = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}[dtype]
    for name, one, other in zip(("out", "dq", "dk", "dv"), got, expected):
        largest = other.abs().max().item()
        assert (one.double() - other).abs().max().item() <= bar * max(largest, 1e-3), f"{name} {what}"


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype, d", [(torch.bfloat16, 128), (torch.float16, 64), (torch.float32, 64)], ids=str)
@pytest.mark.parametrize("rule", ["documents", "causal", "local", "others", "sink"])
def test_ids(rule, dtype, d, place):
    for kind in KINDS:
        ids = ids_of(kind)
        mask = torch.tensor(visible(rule, ids, ids), device="cuda")[None, None]
        tensors = randoms((1, 4, N, d), (1, 2, N, d), (1, 2, N, d), (1, 4, N, d), dtype=dtype)
        table = torch.tensor(ids if kind == "with gaps" else ids.astype(np.int32)).to(place)
        got = results(*tensors, rule_of(rule, table, table))
        check(got, reference(*tensors, mask), dtype, kind)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("rule", ["documents", "causal", "others", "sink"])
def test_ids_that_differ_between_sides_and_in_the_batch(rule, place):
    for kind in KINDS:
        ids_q = np.stack([ids_of(kind, 500, seed) for seed in (1, 2)])
        ids_k = np.stack([ids_of(kind, 900, seed) for seed in (3, 4)])
        mask = np.stack([visible(rule, *both) for both in zip(ids_q, ids_k)])[:, None]
        tensors = randoms((2, 4, 500, 128), *[(2, 2, 900, 128)] * 2, (2, 4, 500, 128), dtype=torch.bfloat16)
        got = results(*tensors, rule_of(rule, *(torch.tensor(x).to(place) for x in (ids_q, ids_k))))
        check(got, reference(*tensors, torch.tensor(mask, device="cuda")), torch.bfloat16, kind)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("rule", ["causal", "local"])
def test_documents_of_thousands_of_segments(rule, place):
    n = 5000
    for ids in (np.arange(n) % 2, np.arange(n) // 3 % 5, ids_of("any id in any place", n)):
        mask = torch.tensor(visible(rule, ids, ids), device="cuda")[None, None]
        tensors = randoms(*[(1, 1, n, 64)] * 4, dtype=torch.float16)
        table = torch.tensor(ids).to(place)
        check(results(*tensors, rule_of(rule, table, table)), reference(*tensors, mask), torch.float16)


def test_time_of_ids_that_alternate_is_not_quadratic():
    n = 1 << 20
    q, k, v = randoms((1, 1, 16, 64), (1, 1, n, 64), (1, 1, n, 64), dtype=torch.bfloat16)
    ids_q, ids_k = (torch.arange(x, device="cuda", dtype=torch.int32) % 2 for x in (16, n))
    call = functools.partial(af.attention, q, k, v, rule=af.documents(ids_q, ids_k) & ~af.causal())
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) < 100  # ms; 300 where each segment looks at all before it


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_budget_takes_batch_entries_apart(place):
    ids = np.stack([ids_of("segments in any order", 500, seed) for seed in range(3)])
    q, k, v, dout = randoms(*[(3, 4, 500, 64)] * 4, dtype=torch.float16)
    mask = torch.tensor(np.stack([visible("causal", one, one) for one in ids]), device="cuda")[:, None]
    table = torch.tensor(ids).to(place)
    call = functools.partial(af.attention, q, k, v, rule=rule_of("causal", table, table))
    check([call(memory_budget=least_of(call))], reference(q, k, v, dout, mask), torch.float16)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_new_ids_wait_for_nobody(direction, place):
    n = 16384
    q, k, v, dout = randoms(*[(1, 2, n, 64)] * 4, dtype=torch.bfloat16)
    out, lse = af.attention(q, k, v, return_lse=True)

    def call(seed):
        table = torch.tensor(ids_of("in order", n, seed), dtype=torch.int32).to(place)
        rule = af.documents(table, table)
        if direction == "forward":
            return functools.partial(af.attention, q, k, v, rule=rule)
        return functools.partial(af.attention_backward, dout, q, k, v, out, lse, rule=rule)

    for seed in range(3):
        call(seed)()
    calls = [call(seed) for seed in range(3, 8)]
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    for one in calls:
        one()
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


def test_more_new_ids_than_pinned_memory_holds():
    """While the GPU sleeps nothing is copied. Calls for which there is no room wait; none reads another's ids."""
    n, calls = 16384, 400
    q, k, v = randoms(*[(1, 1, n, 64)] * 3, dtype=torch.bfloat16)
    rules = [af.documents(torch.tensor(ids_of("in order", n, seed))) for seed in range(calls)]
    expected = []
    for rule in rules:
        expected.append(af.attention(q, k, v, rule=rule))
        torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    got = [af.attention(q, k, v, rule=rule) for rule in rules]
    assert all(torch.equal(one, other) for one, other in zip(got, expected))


def test_ids_on_the_gpu_may_change_under_a_plan():
    q, k, v, dout = randoms(*[(1, 2, N, 64)] * 4, dtype=torch.bfloat16)
    table = torch.tensor(ids_of("in order")).cuda()
    rule = rule_of("documents", table, table)
    plan = af.plan(q, k, v, rule=rule)
    for kind in KINDS:
        ids = ids_of(kind, seed=6)
        table.copy_(torch.tensor(ids))
        mask = torch.tensor(visible("documents", ids, ids), device="cuda")[None, None]
        check(results(q, k, v, dout, rule, plan=plan), reference(q, k, v, dout, mask), torch.bfloat16, kind)


def test_ids_change_between_replays():
    tensors = randoms(*[(1, 2, N, 64)] * 4, dtype=torch.bfloat16)
    table = torch.tensor(ids_of("in order")).cuda()
    rule = af.documents(table, table) & af.causal()
    results(*tensors, rule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = results(*tensors, rule)
    for kind in KINDS:
        ids = ids_of(kind, seed=5)
        table.copy_(torch.tensor(ids))
        graph.replay()
        mask = torch.tensor(visible("causal", ids, ids), device="cuda")[None, None]
        check(replayed, reference(*tensors, mask), torch.bfloat16, kind)
