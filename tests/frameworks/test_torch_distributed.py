"""Attention of a sequence that is split over processes: values and gradients are those of one process that has all of
it, for random rules, lengths and options."""

from pathlib import Path

import pytest
from processes import run_processes

pytestmark = pytest.mark.of_the_cpu

BEGIN = f"""
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1] / "contract")!r}]
import itertools
import anyflash as af
from anyflash.torch import attention as alone
from anyflash.torch.distributed import attention, plan_sharding
"""


# The last seed: one query in each process, and a bias.
@pytest.mark.parametrize("processes, first, count, one_query", [(2, 0, 120, 2630), (4, 1000, 50, 2582)])
def test_random_calls_in_float64(processes, first, count, one_query, tmp_path):
    program = (
        f"from distributed_cases import check\nfor seed in (*range({first}, {first + count}), {one_query}): check(seed)"
    )
    run_processes(BEGIN + program, tmp_path, processes)


# The error of out and gradients against float64, beside that of the textbook in the same type: SPEC.md's bar.
ACCURACY = """
from bar import unit_in_last_place
torch.manual_seed(0)
for dtype, scale in ((torch.bfloat16, 1), (torch.float16, 1), (torch.float16, 20), (torch.float32, 1), (torch.float32, 40), (torch.bfloat16, 6)):
    x = [(torch.randn(1, 2, 256, 64) * (scale if i < 2 else 1)).to(device, dtype) for i in range(3)]
    weight = torch.randn(1, 2, 256, 64).to(device, dtype)

    def gradients(call, x, weight):
        x = [one.detach().requires_grad_() for one in x]
        out = call(*x)
        return out.detach(), *torch.autograd.grad(out, x, weight)

    def textbook(q, k, v):
        s = (q.float() if q.dtype != torch.float64 else q) @ k.mT.to(torch.promote_types(k.dtype, torch.float32))
        s = (s * 64**-0.5).masked_fill(torch.ones(256, 256, dtype=torch.bool, device=device).triu(1), -torch.inf)
        return (s.softmax(-1).to(q.dtype) @ v).to(q.dtype)

    exact = gradients(textbook, [one.double() for one in x], weight.double())
    usual = gradients(textbook, x, weight)
    sharding = plan_sharding(af.causal(), 256)
    part = lambda one: sharding.shard(one, dim=2).contiguous()
    made = gradients(lambda *x: attention(*x, rule=af.causal(), sharding=sharding, exchange="keys"), map(part, x), part(weight))
    for name, one, other, true in zip(("out", "dq", "dk", "dv"), made, usual, exact):
        error = (sharding.unshard(one, dim=2).double() - true).abs().max().item()
        allowed = 2 * (other.double() - true).abs().max().item() + unit_in_last_place(true.abs().max().item(), str(dtype)[6:])
        if rank == 0: print(f"{dtype} x{scale} {name}: {error / allowed:.2f} of the bar")
        assert error <= allowed, (dtype, scale, name, error, allowed)
"""


SAME_BITS = """
torch.manual_seed(rank)
x = [torch.randn(2, 2, 40 + 10 * rank, 8, device=device, requires_grad=True) for _ in range(3)]
runs = []
for _ in range(3):
    out = attention(*x, rule=af.causal(), exchange="keys", deterministic=True)
    runs.append([out, *torch.autograd.grad(out, x, torch.ones_like(out))])
assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))
"""

SHARD = """
for rule, shape in ((af.causal(), 100), (af.local(9), (17, 5)), (af.full(), 3), (af.full(), 0)):
    s = plan_sharding(rule, shape)
    sizes = shape if isinstance(shape, tuple) else (shape,)
    x = torch.randn(2, *sizes, 7, generator=torch.Generator().manual_seed(1)).to(device)
    own = s.shard(x, dim=1)
    flat = x.flatten(1, len(sizes)) if len(sizes) > 1 else x
    assert torch.equal(own.flatten(1, len(sizes)) if len(sizes) > 1 else own, flat[:, s.positions()])
    assert torch.equal(s.unshard(own, dim=1), x)
assert plan_sharding(af.causal(), 100).shard(torch.randn(3, 100)).shape == (3, 100 // ranks)
whole = torch.randn(100, requires_grad=True)
plan_sharding(af.causal(), 100).shard(whole).sum().backward()
assert whole.grad.sum() == 100 // ranks
"""

GROUPS = """
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
group = groups[rank // 2]
x = torch.randn(1, 2, 60, 8, generator=torch.Generator().manual_seed(rank // 2)).to(device)
part = slice(0, 20) if rank % 2 == 0 else slice(20, 60)
for exchange in ("keys", "heads"):
    out = attention(*[x[:, :, part]] * 3, group=group, rule=af.causal(), exchange=exchange)
    torch.testing.assert_close(out, alone(x, x, x, rule=af.causal())[:, :, part])
sharding = plan_sharding(af.causal(), 60, group=group)
own = sharding.shard(x, dim=2)
out = sharding.unshard(attention(own, own, own, rule=af.causal(), sharding=sharding), dim=2)
torch.testing.assert_close(out, alone(x, x, x, rule=af.causal()))
"""

# Logits so large that lse, rounded, has lost how many keys share a row's weight. Each logit is exact in float32.
LARGE_LOGITS = """
for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 4e-3)):
  for seed, unit in enumerate((1, 2**7, 2**12, -(2**12), 2**13)):
    generator = torch.Generator().manual_seed(seed)
    chosen = lambda *shape: torch.randint(0, 3, shape, generator=generator).double()
    q, k = torch.ones(1, 2, 48, 4, dtype=torch.float64), chosen(1, 2, 48, 4) * unit / 1024
    q[..., 0], k[..., 0] = 2**13, unit
    k[:, :, :6] = k[:, :, 5:6]  # of the first process
    if seed % 2:
        q[:, :, :24, 0] = 0  # the first process has no large logits
    bias = 32 * (abs(unit) > 2**7) * chosen(1, 1, 48, 48)
    v, weight, of_lse = (torch.randn(1, 2, 48, n, dtype=torch.float64, generator=generator) for n in (4, 4, 1))
    sink = torch.tensor([2.0**13 * unit, 2.0**13 * unit - 1], dtype=torch.float32).double()
    own = slice(48 * rank // ranks, 48 * (rank + 1) // ranks)
    for given, late in ((None, False), (None, True), (sink, True)):
        if device == "cpu" and late:  # as on a GPU that is still at work
            _keys.is_known_late, _shares.LargeRows.known = (lambda lse: True), (lambda self: False)
        found = []
        for call, part, kind in ((textbook, slice(None), torch.float64), (attention, own, dtype)):
            x = [one[:, :, part].to(device, kind).requires_grad_() for one in (q, k, v, bias)]
            sink_here = None if given is None else given.to(device, torch.promote_types(kind, torch.float32)).requires_grad_()
            out, lse = call(*x, sink_here)
            loss = (out * weight[:, :, part].to(out)).sum() + (lse * of_lse[:, :, part, 0].to(lse)).sum()
            found.append(torch.autograd.grad(loss, x + [sink_here] * (given is not None)))
        for name, one, true in zip("qkvbs", *reversed(found)):
            true = true if name == "s" else true[:, :, own]
            scale = true.abs().max().clamp_min(1e-30)
            torch.testing.assert_close(one.double() / scale, true / scale, rtol=0, atol=tolerance, msg=lambda line: f"{dtype} {unit} {name} {line}")
        _keys.is_known_late, _shares.LargeRows.known = known
"""
LARGE_LOGITS = (
    """
from anyflash.torch.distributed import _keys, _shares
known = _keys.is_known_late, _shares.LargeRows.known
def textbook(q, k, v, bias, sink):
    logits = (q @ k.mT + bias).masked_fill(torch.ones(48, 48, dtype=torch.bool, device=device).triu(1), -torch.inf)
    every = logits if sink is None else torch.cat([logits, sink.reshape(1, 2, 1, 1).expand(1, 2, 48, 1)], -1)
    return every.softmax(-1)[..., :48] @ v, every.logsumexp(-1)

of_parts = attention
def attention(q, k, v, bias, sink):
    return of_parts(q, k, v, bias=bias, sink=sink, rule=af.causal(), scale=1.0, return_lse=True, exchange="keys")
"""
    + LARGE_LOGITS
    + "attention = of_parts\n"
)

# One process has a loss of out, the other of lse: both take part in every exchange.
OTHER_LOSSES = """
x = torch.randn(1, 2 * ranks, 40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(device)
own = slice(40 * rank // ranks, 40 * (rank + 1) // ranks)
for exchange in ("keys", "heads"):
    whole, part = x.clone().requires_grad_(), x[:, :, own].clone().requires_grad_()
    loss = lambda results, rank: results[rank % 2].square().sum()
    loss(attention(part, part, part, rule=af.causal(), exchange=exchange, return_lse=True), rank).backward()
    parts = [slice(40 * i // ranks, 40 * (i + 1) // ranks) for i in range(ranks)]
    results = alone(whole, whole, whole, rule=af.causal(), return_lse=True)
    sum(loss([one[:, :, span] for one in results], i) for i, span in enumerate(parts)).backward()
    torch.testing.assert_close(part.grad, whole.grad[:, :, own])
"""

# Logits as low as a padding bias or -inf, beside sinks that are lower still or not, or NaN; second derivatives are
# refused, not dropped.
LOW_LOGITS = """
generator = torch.Generator().manual_seed(4)
x = torch.randn(1, 2, 24, 8, generator=generator).to(device)
bias = torch.zeros(1, 1, 24, 24, device=device)
own = slice(24 * rank // ranks, 24 * (rank + 1) // ranks)
lowest = torch.finfo(torch.float32).min
for number, low in ((-torch.inf, lowest), (-3e38, lowest), (0.5, lowest), (0.5, -torch.inf), (torch.nan, -torch.inf)):
    bias[:, :, ::2] = low
    sink = torch.full((2,), number, device=device)
    part = attention(x[:, :, own], x[:, :, own], x[:, :, own], bias=bias[:, :, own], sink=sink, return_lse=True, exchange="keys")
    for one, whole in zip(part, alone(x, x, x, bias=bias, sink=sink, return_lse=True)):
        torch.testing.assert_close(one, whole[:, :, own], equal_nan=True)
for exchange in ("keys", "heads"):
    y = x[:, :, own].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(attention(y, y, y, exchange=exchange).sum(), y, create_graph=True)
    try:
        torch.autograd.grad(gradient.sum(), y)
    except NotImplementedError:
        continue
    raise AssertionError(exchange)
"""

# What a backward pass would need is not kept without one, nor the gradients of a first pass during the second.
KEPT = """
import weakref
from anyflash.torch.distributed import _keys, _local, _shares
y = 100 * torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(rank)).to(device)
sink = torch.nn.Parameter(torch.zeros(2, device=device))
call = lambda y: attention(y, y, y, sink=sink, rule=af.causal(), exchange="keys", return_lse=True)
keeps, made = [], []
known = _keys.is_known_late, _shares.LargeRows.known
joined, gradients = _keys.Joined, _keys._gradients
_keys.Joined = lambda *given: keeps.append(given[-1]) or joined(*given)
_keys.is_known_late, _shares.LargeRows.known = (lambda lse: True), (lambda self: False)
with torch.no_grad():
    call(y)
out = call(y.requires_grad_())[0]
assert keeps == [False, True]
def counted(*given):
    made.append(sum(one() is not None for one in made[-1]) if made else 0)
    found = gradients(*given)
    made.append([weakref.ref(one) for one in found if one is not None])
    return found
_keys._gradients = counted
out.sum().backward()
assert len(made) == 4 and len(made[1]) == 4 and made[2] == 0, made  # two passes
_keys.Joined, _keys._gradients = joined, gradients
_keys.is_known_late, _shares.LargeRows.known = known
"""

# A NaN in a key and infinity in a value of another process are seen by nobody, and by some.
NOT_FINITE = """
k = torch.randn(1, 2 * ranks, 24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
q, v = k.clone(), k.flip(2).contiguous()
k[:, :, 20], v[:, :, 20] = float("nan"), float("inf")
ids = torch.arange(24) // 12
ids[20] = 7
own = slice(24 * rank // ranks, 24 * (rank + 1) // ranks)
for rule in (af.documents(ids), af.documents(ids) & af.causal(), af.full(), af.causal()):
    for exchange in ("keys", "heads"):
        found = []
        for call, part, more in ((attention, own, {"exchange": exchange}), (alone, slice(None), {})):
            x = [one[:, :, part].clone().requires_grad_() for one in (q, k, v)]
            made = call(*x, rule=rule, return_lse=True, **more)
            found.append([*made, *torch.autograd.grad(made[0], x, torch.ones_like(made[0]))])
        for one, other in zip(*found):
            torch.testing.assert_close(one, other[:, :, own], equal_nan=True)
bias = torch.zeros(1, 1, 24, 24, device=device)
bias[..., :18] = -torch.inf
for sink in (None, torch.zeros(q.shape[1], device=device)):
    part = attention(q[:, :, own], k[:, :, own], v[:, :, own], bias=bias[:, :, own], sink=sink, return_lse="lm", exchange="keys")
    for one, other in zip(part, alone(q, k, v, bias=bias, sink=sink, return_lse="lm")):
        torch.testing.assert_close(one, other[:, :, own], equal_nan=True)
"""

# Logits of -inf by infinities in the last process' keys, beside large ones: 0 times infinity shows in one channel of dq.
# And a query that sees no key adds nothing to the sink's gradient, whatever dout is there.
INFINITE_KEYS = """
own = slice(6 * rank, 6 * rank + 6)
for kind, sink in itertools.product((torch.float64, torch.float32), (None, 0.5)):
    generator = torch.Generator().manual_seed(2)
    q, k, v, dout = torch.rand(4, 1, 2, 6 * ranks, 4, generator=generator).to(device, kind)
    q[..., 0], k[..., 0], k[:, :, -6:, 1], dout[:, :, 0] = 200, 1, -torch.inf, torch.nan
    made = []
    for call, part, more in ((attention, own, {"exchange": "keys"}), (alone, slice(None), {})):
        given = [one[:, :, part].clone().requires_grad_() for one in (q, k, v)]
        if sink is not None:
            given.append(torch.full((2,), sink, device=device, requires_grad=True))
            more["sink"] = given[3]
        out = call(*given[:3], rule=af.full() & ~af.prefix_queries(1), **more)
        made.append(torch.autograd.grad(out, given, dout[:, :, part]))
    whole = [one[:, :, own] for one in made[1][:3]] + list(made[1][3:])
    assert whole[0][:, :, 1:, 1].isnan().all() and not whole[0][..., 0].isnan().any()
    assert all(one.isfinite().all() for one in whole[3:])
    for one, other in zip(made[0], whole, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-4, atol=1e-4)
"""

# Nobody asks the local calls for exact row maxima but a caller who gets them (on Hopper the others take less time).
NEAR_MAXIMA = """
from anyflash import _core
from anyflash.torch.distributed import _local
taken, of_part, of_call = [], _core.torch_part, _local._forward
_core.torch_part = lambda *given: taken.append("near") or of_part(*given)
_local._forward = lambda *given: taken.append("exact") or of_call(*given)
x = torch.randn(1, 1, 16, 8, device=device)
for return_lse, kind in ((False, "near"), (True, "near"), ("lm", "exact")):
    taken.clear()
    attention(x, x, x, exchange="keys", return_lse=return_lse, deterministic=True)
    assert taken == [kind] * ranks, (return_lse, taken)  # the own keys, and those of each other process
_core.torch_part, _local._forward = of_part, of_call
"""

# A group of NCCL has gloo beside it, by which processes agree. Here gloo's says that it has no CPU. New groups still get
# the same name everywhere, although only some processes have made that.
BESIDE = """
from anyflash.torch.distributed import _side
part, pair = dist.new_group([ranks - 1, 0], timedelta(seconds=77)), dist.new_group([2, 0])
of_gpus, known = (part, pair, dist.group.WORLD), dist.get_backend_config
_side.dist.get_backend_config = lambda group: "cuda:nccl" if group in of_gpus else known(group)
x = torch.randn(1, 1, 64, 8).to(device)
for group in (part, pair, part, None, None, pair):
    if dist.get_rank(group) >= 0:
        attention(x, x, x, rule=af.causal(), group=group)
    sum_of_all = torch.ones(1)
    dist.all_reduce(sum_of_all, group=dist.new_group(timeout=timedelta(seconds=20)))
    assert sum_of_all == ranks
assert len(_side._sides) == (3 if rank == 0 else 2 if rank > 1 else 1)
try:
    attention(x, x, x, rule=af.full() if rank == 0 else af.causal())
except ValueError as error:
    assert "in rank 1, expected full()" in str(error)
else:
    raise AssertionError
_side.dist.get_backend_config = known
"""

# A collective instead of messages tells the numbers to many processes.
BY_COLLECTIVE = """
_side._MOST_MESSAGES = 1
OF_ALL = [[rank, 7] for rank in range(ranks)]
assert _side.gathered(None, [rank, 7]) == OF_ALL
attention(x, x, x, rule=af.local(3))
_side._MOST_MESSAGES = 8
"""

# Messages of the program itself are under way.
OWN_MESSAGES = """
x = torch.randn(1, 2, 64, 8, generator=torch.Generator().manual_seed(rank))
call = lambda: attention(x, x, x, rule=af.causal(), exchange="keys")
expected = call()
for tag in range(4):
    mine = torch.full((x.numel(),), 9.0)
    sent = dist.isend(mine, 1, tag=tag) if rank == 0 else None
    assert torch.equal(call(), expected)
    if rank == 1:
        dist.recv(mine.zero_(), 0, tag=tag)
    assert (mine == 9).all()
    sent and sent.wait()
"""

# Outside of compiled graphs, and twice in checkpoints.
GRAPHS = """
from torch.utils.checkpoint import checkpoint
x = torch.randn(1, ranks, 64, 8, generator=torch.Generator().manual_seed(rank)).to(device).requires_grad_()
for exchange in ("keys", "heads"):
    call = lambda x: attention(x * 2, x, x, rule=af.causal(), exchange=exchange)
    ways = [call, lambda x: checkpoint(call, x, use_reentrant=False), torch.compile(call, backend="eager")]
    made = [[out, *torch.autograd.grad(out.sum(), x)] for out in (way(x) for way in ways)]
    for one in made[1:]:
        torch.testing.assert_close(one, made[0])
"""

# As many stages as there may be, and the same results.
MANY_STAGES = """
from anyflash.torch.distributed import _attention, _schedule
from distributed_cases import check
_schedule._seconds = lambda stages, *more: 1 / len(stages)
counts, old = [], _attention.schedule_of
def counted(*given):
    counts.append((len(old(*given[:-1]).stages), len(old(*given).stages)))
    return old(*given)
_attention.schedule_of = counted
for seed in range(3000, 3040): check(seed, tolerance=1e-9, device=device)
assert all(few <= many for few, many in counts) and sum(few < many for few, many in counts) > 10, counts
"""

FLOAT32 = """
from distributed_cases import check
for seed in range(2000, 2030): check(seed, torch.float32, 2e-4)
"""


# A process takes seconds to start: what it can do in one go is one test.
@pytest.mark.parametrize(
    "processes, programs",
    [
        (1, [GRAPHS]),
        (
            2,
            [
                FLOAT32,
                SAME_BITS,
                SHARD,
                ACCURACY,
                OTHER_LOSSES,
                LOW_LOGITS,
                LARGE_LOGITS,
                KEPT,
                INFINITE_KEYS,
                NEAR_MAXIMA,
                MANY_STAGES,
                OWN_MESSAGES,
                GRAPHS,
            ],
        ),
        (
            4,
            [
                GROUPS,
                ACCURACY,
                OTHER_LOSSES,
                LARGE_LOGITS,
                NOT_FINITE,
                INFINITE_KEYS,
                NEAR_MAXIMA,
                BESIDE,
                BY_COLLECTIVE,
                MANY_STAGES,
            ],
        ),
    ],
)
def test_accuracy_and_what_else_holds(processes, programs, tmp_path):
    run_processes(BEGIN + "\n".join(programs), tmp_path, processes)
