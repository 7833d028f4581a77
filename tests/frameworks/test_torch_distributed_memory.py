"""Memory of distributed attention: memory_budget, and the peak of all tensors that a call makes."""

import pytest
from processes import run_processes

pytestmark = pytest.mark.of_the_cpu

BEGIN = """
import anyflash as af
from anyflash.torch import attention as alone
from anyflash.torch.distributed import attention, plan_sharding
"""

BUDGET = """
from anyflash import _core
for rule, shape in ((af.causal(), (700,)), (af.local(9), (40, 20)), (af.documents(torch.arange(1000) // 90), (1000,))):
    for kv in (1, 4):
        torch.manual_seed(0)
        x = [torch.randn(2, n, *shape, 16, dtype=torch.float64, requires_grad=True) for n in (4, kv, kv)]
        s = plan_sharding(rule, shape)
        own = [s.shard(a.detach(), dim=2).contiguous().requires_grad_() for a in x]
        call = lambda budget: attention(*own, rule=rule, sharding=s, exchange="keys", memory_budget=budget)

        def refused(budget):
            try:
                call(budget)
            except ValueError as error:
                line = str(error)
                assert line.startswith(f"memory_budget: {budget} bytes, expected at least ") and " as rank " in line
                return int(line.split("at least ")[1].split()[0])
            raise AssertionError(budget)

        least = refused(1)
        assert refused(least - 1) == least
        expected = alone(*x, rule=rule)
        expected = expected, *torch.autograd.grad(expected, x, torch.ones_like(expected))
        for budget in (least, 2 * least):
            out = call(budget)
            made = out, *torch.autograd.grad(out, own, torch.ones_like(out))
            for a, b in zip(made, expected):
                torch.testing.assert_close(a, s.shard(b, dim=2))
# Plans that are kept are of both passes, with the sink. A process without queries needs less than the others.
for needs_gradient, has_sink, has_bias, lengths in ((False, False, True, (64, 64)), (True, True, False, (64, 64)), (True, True, True, (0, 64))):
    n = lengths[rank]
    q, k = (torch.randn(1, 4, length, 16, requires_grad=needs_gradient) for length in (n, 64))
    rule = af.documents(torch.arange(sum(lengths)) // 40, torch.arange(128) // 40)
    more = dict(bias=torch.zeros(1, 4, n, 128)) if has_bias else {}
    more |= dict(sink=torch.zeros(4)) if has_sink else {}
    call = lambda budget: attention(q, k, k, rule=rule, exchange="keys", memory_budget=budget, **more)
    out = call(refused(0))
    if needs_gradient:
        out.sum().backward()
# One process alone cannot plan its part.
from anyflash.torch.distributed import _local
plan, rule = _local._core.plan, af.documents(torch.arange(128) // 30)
q = torch.randn(1, 4, 64, 16)
def fails(*given):
    raise MemoryError("no room for a plan")
if rank == 1:
    _local._core.plan = fails
try:
    attention(q, q, q, rule=rule, exchange="keys", memory_budget=1 << 20)
except (ValueError if rank == 0 else MemoryError) as error:
    assert str(error) == ("rank 1 refused its part of the call: " if rank == 0 else "") + "no room for a plan"
else:
    raise AssertionError
_local._core.plan = plan
attention(q, q, q, rule=rule, exchange="keys", memory_budget=1 << 20)
x = torch.randn(1, 2, 64, 16)
try:
    attention(x, x, x, exchange="heads", memory_budget=1)
except ValueError as error:
    assert str(error).startswith("memory_budget: 1 bytes, expected at least ")
else:
    raise AssertionError
"""

# In multiples of the own part of q. Keys come in ranks - 1 stages: no more than three of them may be there at once.
PEAK = """
from anyflash.torch.distributed import _schedule
_schedule._AT_ONCE = 0
from torch.profiler import ProfilerActivity, profile

def peak(length, backward):
    x = [torch.randn(1, 1, length, 32, requires_grad=backward) for _ in range(3)]

    def run():
        out = attention(*x, rule=af.full(), exchange="keys")
        if backward:
            torch.autograd.grad(out, x, out.detach())

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        run()
    alive = most = 0
    events = [one for one in made.profiler.kineto_results.events() if one.name() == "[memory]"]
    for one in sorted(events, key=lambda one: one.start_ns()):
        alive += one.nbytes()
        most = max(most, alive)
    return most / x[0].nbytes

for backward, most in ((False, 12), (True, 23)):
    found = [peak(length, backward) for length in (512, 1024)]
    assert all(4 < one < most for one in found), (found, most)
"""


def test_budget_of_local_calls(tmp_path):
    run_processes(BEGIN + BUDGET, tmp_path, 2)


@pytest.mark.parametrize("processes", [4, 7])
def test_peak_is_that_of_two_stages(processes, tmp_path):
    run_processes(BEGIN + PEAK, tmp_path, processes)
