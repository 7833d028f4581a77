"""Processes that do not make the same call, or are gone: an error in each of them, never a wait without end."""

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import begin, run_processes

pytestmark = pytest.mark.of_the_cpu

BEGIN = """
import time
import anyflash as af
from anyflash.torch.distributed import attention, plan_sharding
x = torch.randn(1, 2, 12, 8).to(device)
d = {"q": x, "k": x, "v": x}

def refused(line, **given):
    for name, one in given.items():
        d_of_rank = one[rank] if isinstance(one, tuple) else one
        given[name] = d_of_rank
    call = d | given
    try:
        attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)
    except (ValueError, TypeError) as error:
        text = str(error)
        expected = line[rank] if isinstance(line, tuple) else line
        assert expected in text and "\\n" not in text, (expected, text)
    else:
        raise AssertionError(line)
"""

MISMATCHES = """
refused("rule: causal() with tables", rule=(af.full(), af.causal()))
refused("in rank 1, expected full()", rule=(af.full(), af.causal()))
refused("rule: documents((24)", rule=tuple(af.documents(torch.arange(24) // n) for n in (6, 8)))
refused("query: torch.float64", q=(x, x.double()), k=(x, x.double()), v=(x, x.double()))
refused("query: torch.float32, 1 batch entries, 4 heads", q=(x, x.repeat(1, 2, 1, 1)))
refused("options: ", softcap=(0.0, 2.0))
refused("options: ", align=("none_front", "none_end"))
refused("options: ", exchange=("keys", "heads"))
refused("bias: torch.float32 (1, 1, 24) in rank 1, expected none as in rank 0", bias=(None, torch.zeros(1, 1, 12, 24).to(device)))
refused("sink: none in rank 1", sink=(torch.zeros(2).to(device), None))
refused("key_lengths: [3] in rank 1, expected [5]", key_lengths=(torch.tensor([5]), torch.tensor([3])))
refused("gradients: ", q=(x, x.clone().requires_grad_()))
refused("options: exchange=auto, return_lse=lm in rank 1, expected exchange=auto, return_lse=True as in rank 0", return_lse=(True, "lm"))
refused("options: memory_budget=2000000, exchange", memory_budget=(1000000, 2000000))
masks = torch.ones(24, 24, dtype=torch.bool), torch.ones(24, 24, dtype=torch.bool).tril()
refused("rule: the dense mask sees other keys in rank 1, expected those of rank 0", rule=tuple(map(af.dense, masks)), exchange="keys")
s = plan_sharding(af.causal(), 24)
refused("sharding: none in rank 1", sharding=(s, None))
"""

REFUSALS = """
line = "key: head size 4, expected 8 as in query"
refused(("rank 1 refused its part of the call: " + line, line), k=(x, x[..., :4]))
line = "query: type NoneType, expected a torch.Tensor"
refused((line, "rank 0 refused its part of the call: " + line), q=(None, x))
refused("page_table: given to distributed attention, expected none there", page_table=torch.zeros(1, 1, dtype=torch.int32))
refused("dropout_p: given to distributed attention", dropout_p=0.1)
refused("unexpected keyword argument 'causal', use rule=anyflash.causal()", causal=True)
refused("bias: 7 keys, expected all 24 of the sequence, or 1", bias=torch.zeros(1, 1, 12, 7).to(device))
refused("bias: 5 queries, expected 12 as in query, or 1", bias=torch.zeros(1, 1, 5, 24).to(device))
refused(", expected their queries [12, 12], or 1 in all", bias=(torch.zeros(1, 1, 1, 24).to(device), torch.zeros(1, 1, 12, 24).to(device)))
refused("key_lengths: [25], expected 0 to 24", key_lengths=torch.tensor([25]))
refused("key_lengths: type float32, expected int32 or int64", key_lengths=torch.tensor([5.0]))
refused("key_lengths: rank 2, expected 1", key_lengths=torch.tensor([[5]]))
refused("group: type str, expected a process group", group="world")
refused("num_chunks_q: given to distributed attention, expected memory_budget instead", num_chunks_q=2)
refused("rule documents: ids_q has 12 entries, expected 24 as the queries", rule=af.documents(torch.arange(12)))
refused("exchange: 'heads' with 3 heads", **{name: torch.zeros(1, 3, 12, 8).to(device) for name in "qkv"}, exchange="heads")
refused("exchange: 'ring'", exchange="ring")
refused("sharding: type str", sharding="zigzag")
refused("expected (10, ) as in sharding".replace(", )", ",)"), sharding=plan_sharding(af.causal(), 20))
refused("layout", layout="sbhd")
refused("cu_seqlens_q, cu_seqlens_k: expected both with layout thd", layout="thd", q=x[0], k=x[0], v=x[0])
out = attention(x, x, x)  # the group is as good as before
assert out.shape == x.shape
"""


# A call that was agreed on before takes a short way; another one, or one of other lengths, must not.
KNOWN = """
rule = af.documents(torch.arange(24) // 12)
for rule, sharding in ((rule, plan_sharding(rule, 24)), (af.causal(), plan_sharding(af.causal(), 24)), (af.causal(), None)):
    first = attention(x, x, x, rule=rule, sharding=sharding)
    for _ in range(2): assert torch.equal(attention(x, x, x, rule=rule, sharding=sharding), first)
    refused("options: ", rule=rule, sharding=sharding, softcap=(0.0, 2.0))
    attention(x, x, x, rule=rule, sharding=sharding, softcap=2.0)
    refused("options: ", rule=rule, sharding=sharding, softcap=(0.0, 2.0))  # each knows its own call
    refused(("rank 1 refused its part", "softcap"), rule=rule, sharding=sharding, softcap=(0.0, -1.0))
    refused("rule: ", rule=(rule, af.full()), sharding=sharding)
    refused("query: torch.float64", q=(x, x.double()), k=(x, x.double()), v=(x, x.double()), rule=rule, sharding=sharding)
    refused(("rank 1 refused its part", "sharding"), q=(x, x[:, :, :5]), k=(x, x[:, :, :5]), v=(x, x[:, :, :5]), sharding=sharding, rule=rule) if sharding else None
    assert torch.equal(attention(x, x, x, rule=rule, sharding=sharding), first)
every = {}
for turn in range(3):  # rank 0's lengths are always the same
    for length in (12, 5, 7):
        y = x if rank == 0 else x[:, :, :length]
        out = attention(y, y, y, rule=af.causal(), exchange="keys")
        assert torch.equal(every.setdefault(length, out), out)
ids = torch.arange(24) // 12
before = attention(x, x, x, rule=af.documents(ids))
ids[:] = 0  # a table whose numbers change is another rule
assert torch.allclose(attention(x, x, x, rule=af.documents(ids)), attention(x, x, x))
assert not torch.equal(attention(x, x, x, rule=af.documents(ids)), before)
"""

# Backward passes, and unshard, are agreed on as calls are.
OTHER_STEPS = """
from contextlib import contextmanager
@contextmanager
def told(*parts):
    try:
        yield
    except ValueError as error:
        assert all(part in str(error) for part in parts) and "\\n" not in str(error), error
    else:
        raise AssertionError(parts)

y = torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(rank)).to(device).requires_grad_()
s = plan_sharding(af.causal(), 24)
kind = torch.device(device).type
for exchange in ("keys", "heads"):
    call = lambda: attention(y, y * 2, y * 3, rule=af.causal(), exchange=exchange)
    gradient = lambda out: torch.autograd.grad(out.sum(), y, retain_graph=True)[0]
    first, second = call(), 2 * call()
    expected = gradient(first)
    for _ in range(2):
        with told("call: the backward pass of call ", " in rank 1, expected the backward pass of call "):
            gradient((first, second)[rank])
        with told("call: a forward pass in rank 1, expected the backward pass of call "):
            gradient(first) if rank == 0 else call()
        with told(f"call: unshard of query, torch.float32 on {kind}, axis 2, other sizes (1, 2, 8), plan ", " in rank 1, expected the backward"):
            gradient(first) if rank == 0 else s.unshard(y, dim=2)
        torch.testing.assert_close(gradient(first), expected)
        torch.testing.assert_close(gradient(second), 2 * expected)
    q, k = (y.detach().clone().requires_grad_() for _ in range(2))
    out = attention(q, k, k, rule=af.causal(), exchange=exchange)
    every = torch.autograd.grad(out.sum(), (q, k), retain_graph=True)
    (alone,) = torch.autograd.grad(out.sum(), (q,), retain_graph=True) if rank else torch.autograd.grad(out.sum(), (q, k))[:1]
    torch.testing.assert_close(alone, every[0])
with told("other sizes (1, 2, 8), plan ", f" in rank 1, expected unshard of query, torch.float32 on {kind}, axis 2, other sizes (1, 2, 5), plan "):
    s.unshard(x if rank else x[..., :5], dim=2)
with told("x: 5 entries along axis 2, expected the 12 of this process"):
    s.unshard(x if rank else x[:, :, :5], dim=2)
with told("plan ", " in rank 1, expected unshard of query"):
    (s if rank else plan_sharding(af.full(), 24)).unshard(x, dim=2)
with told("side: 'foo', expected 'query' or 'key'"):
    s.unshard(x, side="foo" if rank else "query", dim=2)
assert s.unshard(x, dim=2).shape == (1, 2, 24, 8)
with told("distributed attention: in a trace, transform or dispatch mode, expected a plain call"):
    torch.func.grad(lambda x: attention(x, x, x).sum())(x)
"""

# A process raises in a backward pass, after its last message, where the others then ask whether they make the pass again.
RAISES_LATE = """
from anyflash.torch.distributed import _keys, _local, _shares
known, backward = (_keys.is_known_late, _shares.LargeRows.known), _local.Local.backward
_keys.is_known_late, _shares.LargeRows.known = (lambda lse: True), (lambda self: False)
for scale in (1, 100):  # without and with large logits
    for kind in (MemoryError, KeyboardInterrupt):  # the second one is not told to the others
        y = (scale * x).requires_grad_()
        call = lambda: attention(y, y, y, rule=af.causal(), exchange="keys")
        out, calls = call(), []
        def raises(self, *given):
            calls.append(1)
            if rank == 1 and len(calls) == 2:
                raise kind("in rank 1")
            return backward(self, *given)
        _local.Local.backward = raises
        begun = time.monotonic()
        try:
            out.sum().backward()
            said = None
        except kind if rank == 1 else RuntimeError as error:
            said, held = str(error), error  # with its messages, which are under way
        _local.Local.backward = backward
        if kind is KeyboardInterrupt and rank == 1:
            assert said == "in rank 1"
            try:
                call()
            except ValueError as error:
                said = str(error)
        why = "rank 1 refused its part of the call: in rank 1" if kind is MemoryError else "call: a forward pass in rank 1, expected the end of the backward pass of call "
        assert said is not None and (said == "in rank 1" if kind is MemoryError and rank == 1 else why in said), said
        assert time.monotonic() - begun < 60
        (expected,) = torch.autograd.grad(call().sum(), y)
        (again,) = torch.autograd.grad(call().sum(), y)
        assert torch.equal(expected, again)
_keys.is_known_late, _shares.LargeRows.known = known
"""

# A group for GPUs takes no tensors on the CPU. What is beside it ends with it.
FOR_GPUS = """
import gc
from anyflash.torch.distributed import _side
group = dist.new_group(backend="cuda:gloo")
refused("query: on cpu, expected a device of the group's backend, cuda:gloo", group=group)
assert len(_side._sides) == 1
dist.destroy_process_group(group)
group = None
gc.collect()
assert not len(_side._sides)
"""


# What is kept of calls is bounded by the bytes of their tables.
KEPT = """
from anyflash.torch.distributed import _attention
_attention._MOST_BYTES, known = 3000, _attention._programs[dist.group.WORLD]
for n in range(2, 9):
    rule = af.documents(torch.arange(24) // n)
    assert torch.equal(attention(x, x, x, rule=rule), attention(x, x, x, rule=rule))
assert 0 < sum(one.bytes for one in known.values()) <= 3000
"""


def test_errors_in_every_process(tmp_path):
    run_processes(BEGIN + MISMATCHES + REFUSALS + KNOWN + OTHER_STEPS + RAISES_LATE + FOR_GPUS + KEPT, tmp_path)


GONE = """
import faulthandler, os, resource, sys, torch, torch.distributed as dist
from datetime import timedelta
faulthandler.dump_traceback_later(60)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a process that the watchdog aborts is gone at once
def say(what): print(what, file=sys.stderr, flush=True)
store, rank, ranks, device, when = sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:]
torch.set_num_threads(1)
if device == "cuda":
    torch.cuda.set_device(rank)
backend = "gloo" if device == "cpu" else "nccl"
dist.init_process_group(backend, init_method="file://" + store, rank=rank, world_size=ranks, timeout=timedelta(seconds=15))
from anyflash.torch.distributed import attention, _exchange
x = torch.randn(1, 1, 64, 8, device=device, requires_grad=True)
attention(x, x, x, exchange="keys").sum().backward()
if device == "cuda": torch.cuda.synchronize()
say("one call is done")
if rank == 1:
    def gone(self, messages):
        say("rank 1 is gone")
        os._exit(7)
    if when == "before": os._exit(7)
    if when == "during": _exchange.Exchange._start = gone
try:
    out = attention(x, x, x, exchange="keys")
    if rank == 1: _exchange.Exchange._start = gone
    say("forward is queued")
    out.sum().backward()
    say("backward is queued")
    if device == "cuda": torch.cuda.synchronize()
except RuntimeError as error:
    line = str(error)
    say(line)
    if device == "cpu" or when == "before":
        assert line.startswith("anyflash.torch.distributed: another process of the group is gone or late: "), line
        assert "\\n" not in line
    print("told", flush=True)
    os._exit(0)
os._exit(3)
"""


def run_until_one_dies(when, folder, count=3, device="cpu"):
    """Rank 1 dies. With gloo all others are told. With NCCL PyTorch's watchdog may end them, if they were told nothing
    before: exit codes, what they printed, and when."""
    ran = [begin(GONE, str(folder / "store"), str(rank), str(count), device, when) for rank in range(count)]
    with ThreadPoolExecutor(count) as pool:
        said = [pool.submit(timed_lines, one.stderr) for one in ran]
        try:
            ended = time.monotonic() + 90
            for one in ran:
                one.wait(max(0.1, ended - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        for one in ran:
            one.kill()
    lines = [one.result() for one in said]
    assert ran[1].returncode == 7, lines
    return [(ran[rank].wait(), ran[rank].stdout.read(), lines[rank]) for rank in range(count) if rank != 1]


def timed_lines(stream):
    begun = time.monotonic()
    return "".join(f"{time.monotonic() - begun:5.1f} s  {line}" for line in stream)


@pytest.mark.parametrize("when", ["before", "during", "backward"])
def test_a_process_that_dies(when, tmp_path):
    begun = time.monotonic()
    for code, out, error in run_until_one_dies(when, tmp_path):
        assert (code, out) == (0, "told\n"), error
    assert time.monotonic() - begun < 100
