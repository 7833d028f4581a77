"""What is particular to a GPU: streams, graphs, devices that do not fit, several frameworks. Collected only where
ANYFLASH_TEST_DEVICE is cuda (tests/conftest.py); without a GPU they fail."""

import subprocess
import sys

import anyflash as af
import numpy as np
import pytest
import torch
from anyflash.torch import attention
from asleep import nobody_waits
from gpu_calls import close, gradients, reference, reference_gradients, tensors


def test_results_are_tensors_of_the_same_gpu():
    q, k, v = tensors()
    out, lse = af.attention(q, k, v, rule=af.causal(), return_lse=True)
    assert out.device == lse.device == q.device and out.dtype == q.dtype and lse.dtype == torch.float32
    assert close(out, reference(q, k, v))


def test_work_is_queued_on_the_current_stream():
    """A long copy on a side stream writes the queries; the call on that stream must come after it."""
    q, k, v = tensors(n=2000)
    late = torch.zeros_like(q)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out = af.attention(late, k, v, rule=af.causal())
    side.synchronize()
    assert close(out, reference(q, k, v))


@pytest.mark.parametrize("kept", [False, True])
def test_a_call_is_replayed_in_a_graph(kept):
    q, k, v = tensors()
    rule = af.documents(np.repeat([0, 1, 2], 100), np.repeat([0, 1, 2], 100)) if kept else af.causal()
    plan = af.plan(q, k, v, rule=rule) if kept else None
    out = torch.empty_like(q)
    af.attention(q, k, v, rule=rule, plan=plan, out=out)  # brings the plan to the GPU
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        af.attention(q, k, v, rule=rule, plan=plan, out=out)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    q.neg_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, af.attention(q, k, v, rule=rule))


@pytest.mark.parametrize("given", [False, True])
def test_a_graph_outlives_its_plan(given):
    """Other plans push it out of the cache and take the memory that it might have left; or the caller lets it go."""
    q, k, v = tensors()
    rule = af.causal() & af.local(131)
    plan = af.plan(q, k, v, rule=rule) if given else None
    out = torch.empty_like(q)
    af.attention(q, k, v, rule=rule, plan=plan, out=out)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        af.attention(q, k, v, rule=rule, plan=plan, out=out)
    del plan
    for window in range(2, 152):
        af.attention(q, k, v, rule=af.local(window))
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_tables_in_a_graph_need_a_plan():
    """Those of documents that nobody has asked for before."""
    q, k, v = tensors()
    rule = af.documents(np.repeat([17, 18, 19], 100))
    out = torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="^rule: with tables, key_lengths or .* in a captured stream, expected a plan"):
        with torch.cuda.graph(graph):
            af.attention(q, k, v, rule=rule, out=out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, dict(softcap=3.0)], ids=str)
def test_values_near_the_end_of_their_type(options, dtype):
    q, k, v = tensors(n=2048, dtype=dtype)
    v.fill_(torch.finfo(dtype).max * 0.9)
    out = af.attention(q * 0.1, k, v, rule=af.causal(), **options)
    assert torch.allclose(out, v, rtol=1e-4)


def test_same_bits_in_every_run_and_batch():
    q, k, v = tensors(b=3, n=777)
    once = af.attention(q, k, v, rule=af.causal() & af.local(99))
    for _ in range(3):
        assert torch.equal(af.attention(q, k, v, rule=af.causal() & af.local(99)), once)
    assert torch.equal(af.attention(q[1:2], k[1:2], v[1:2], rule=af.causal() & af.local(99)), once[1:2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("rule", [af.full(), af.causal(), af.causal() & af.local(900)], ids=str)
def test_same_bits_of_many_keys(rule, d, dtype):
    """More queries than keys of a step, and no whole number of blocks; alone, and beside others."""
    q = torch.randn(3, 8, 1500, d, device="cuda").to(dtype)
    k, v = (torch.randn(3, 4, 1700, d, device="cuda").to(dtype) for _ in range(2))
    for options in ({}, dict(softcap=20.0), dict(sink=torch.randn(8, device="cuda"))):
        out, lse = af.attention(q, k, v, rule=rule, return_lse=True, **options)
        for _ in range(20):
            again, again_lse = af.attention(q, k, v, rule=rule, return_lse=True, **options)
            assert torch.equal(again, out) and torch.equal(again_lse, lse)
        assert torch.equal(af.attention(q[1:2], k[1:2], v[1:2], rule=rule, **options), out[1:2])


WRONG = {
    "keys on the cpu": (lambda q, k, v: dict(k=k.cpu()), "key: on cpu, expected cuda:0"),
    "NumPy values": (lambda q, k, v: dict(v=v.float().cpu().numpy()), "value: "),
    "bias on the cpu": (lambda q, k, v: dict(bias=torch.zeros(1, 1, 300, 300)), "bias: on cpu, expected cuda:0"),
    "out on the cpu": (
        lambda q, k, v: dict(out=torch.empty(2, 4, 300, 64, dtype=q.dtype)),
        "out: on cpu, expected cuda:0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_devices(name):
    q, k, v = tensors()
    change, line = WRONG[name]
    arguments = dict(q=q, k=k, v=v) | change(q, k, v)
    with pytest.raises((ValueError, TypeError)) as error:
        af.attention(**arguments)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_a_plan_is_for_one_device():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="^plan: made for cpu, the call has cuda:0$"):
        af.attention(q, k, v, plan=af.plan(q.cpu(), k.cpu(), v.cpu()))


def test_gradients_are_tensors_of_the_same_gpu():
    q, k, v = tensors()
    dout = torch.randn_like(q)
    made = gradients(q, k, v, dout, rule=af.causal())
    for got, expected in zip(made, reference_gradients(q, k, v, dout)):
        assert got.device == q.device and got.dtype == q.dtype
        assert (got.double() - expected).abs().max() < 2e-2 * expected.abs().max()
    assert made.dbias is None and made.dsink is None


def test_gradients_are_queued_on_the_current_stream():
    q, k, v = tensors(n=2000)
    dout = torch.randn_like(q)
    expected = gradients(q, k, v, dout, deterministic=True)
    late = torch.zeros_like(dout)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(dout)
        got = gradients(q, k, v, late, deterministic=True)
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got[:3], expected[:3]))


def replayed_gradients(q, k, v, **options):
    """Of a call in a graph, whose dout has become another one since, and those of that dout from a call of its own."""
    dout = torch.randn_like(q)
    out, lse = af.attention(q, k, v, return_lse=True, **options)
    backward = lambda: af.attention_backward(dout, q, k, v, out, lse, **options)
    backward()  # brings the plan to the GPU
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = backward()
    dout.neg_()
    graph.replay()
    torch.cuda.synchronize()
    return made, backward()


def test_gradients_are_replayed_in_a_graph():
    q, k, v = tensors()
    sink = torch.randn(q.shape[1], device="cuda")
    for got, expected in zip(*replayed_gradients(q, k, v, rule=af.causal(), sink=sink, deterministic=True)):
        assert (got is None and expected is None) or torch.equal(got, expected)


@pytest.mark.parametrize("heads", [None, 1, 4])
def test_gradients_in_any_order_are_replayed_in_a_graph(heads):
    """Without a bias, with one that all heads share, whose gradient is summed, and with one of each head."""
    q, k, v = tensors(n=320)
    bias = None if heads is None else torch.randn(2 if heads == 4 else 1, heads, 320, 320, device="cuda").bfloat16()
    made, expected_ones = replayed_gradients(q, k, v, rule=af.causal() & af.local(100), bias=bias)
    for got, expected in zip(made[:4], expected_ones):
        if expected is not None:
            assert (got.double() - expected.double()).abs().max() < 1e-2 * expected.double().abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("d", [8, 64])
def test_a_mask_that_a_batch_shares_gives_the_same_bits_in_every_batch(d, dtype):
    """One of the CPU's; the batch holds three copies of an entry."""
    one = [x[:, :1].contiguous() for x in tensors(b=1, n=777, d=d, dtype=dtype)]
    rule = af.dense(np.random.default_rng(d).random((777, 777)) < 0.5)

    def results(q, k, v):
        out, lse = af.attention(q, k, v, rule=rule, return_lse=True, deterministic=True)
        return out, lse, *af.attention_backward(q, q, k, v, out, lse, rule=rule, deterministic=True)[:3]

    for alone, together in zip(results(*one), results(*(x.repeat(3, 1, 1, 1) for x in one))):
        assert all(torch.equal(entry, alone[0]) for entry in together)


def test_nobody_waits_when_plans_come_and_go():
    """Windows of 70 widths, forward and backward: more plans than are kept, and those that go are in use still."""
    q, k, v = tensors(b=1, n=576)
    dout = torch.randn_like(q)

    def calls(n):
        made = []
        for width in range(1, 71):
            rule, given = af.local(width, causal=True), [x[:, :, :n] for x in (q, k, v)]
            out, lse = af.attention(*given, rule=rule, return_lse=True)
            made.append((out, *af.attention_backward(dout[:, :, :n], *given, out, lse, rule=rule)[:3]))
        return made

    found = nobody_waits(lambda: calls(512), lambda: calls(576))
    wide = [x[:, :, :512].double().requires_grad_() for x in (q, k, v)]
    back = torch.arange(512, device="cuda")[:, None] - torch.arange(512, device="cuda")
    for width, made in enumerate(found, 1):
        seen = (back >= 0) & (back < width)
        out = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=seen)
        for got, expected in zip(made, [out, *torch.autograd.grad(out, wide, dout[:, :, :512].double())]):
            # Of a query that sees itself alone dq and dk are 0 but for rounding.
            assert (got.double() - expected).abs().max() < 2e-2 * expected.abs().max().clamp(min=1)


MANY_PLANS = """
import threading, time
import anyflash as af, cupy, torch
q = torch.randn(1, 1, 70, 64, device="cuda", dtype=torch.float16)
streams = [torch.cuda.Stream(), torch.cuda.Stream()]
torch.cuda.synchronize()
plans = []
for i in range(1, 1301):
    rule = af.window(i // 40, i % 40)
    plans.append(af.plan(q, q, q, rule=rule))
    for stream in streams:
        with torch.cuda.stream(stream):
            af.attention(q, q, q, rule=rule, plan=plans[-1])
begun, ended = threading.Event(), threading.Event()
def wait(_):
    begun.set()
    time.sleep(0.5)
    ended.set()
cupy.cuda.ExternalStream(streams[0].cuda_stream).launch_host_func(wait, None)
begun.wait()
plans.clear()
assert ended.is_set()
"""


def test_many_plans_go_while_a_stream_waits_for_python():
    """What they leave is given back behind a wait for the GPU: for a call of Python's too, which needs Python's lock."""
    subprocess.run([sys.executable, "-c", MANY_PLANS], check=True, timeout=120)


WRONG_BACKWARD = {
    "dout on the cpu": (lambda t: dict(dout=t["dout"].cpu()), "dout: on cpu, expected cuda:0"),
    "out on the cpu": (lambda t: dict(out=t["out"].cpu()), "out: on cpu, expected cuda:0"),
    "lse on the cpu": (lambda t: dict(lse=t["lse"].cpu()), "lse: on cpu, expected cuda:0"),
    "lse of another shape": (lambda t: dict(lse=t["lse"][:, :1]), "lse: "),
    "dlse on the cpu": (lambda t: dict(dlse=t["lse"].cpu()), "dlse: on cpu, expected cuda:0"),
    "pages": (lambda t: dict(page_table=np.zeros((2, 1), np.int32)), "page_table: "),
}


@pytest.mark.parametrize("name", WRONG_BACKWARD)
def test_wrong_arguments_of_backward(name):
    q, k, v = tensors()
    out, lse = af.attention(q, k, v, return_lse=True)
    arguments = dict(dout=out, q=q, k=k, v=v, out=out, lse=lse)
    change, line = WRONG_BACKWARD[name]
    with pytest.raises((ValueError, TypeError)) as error:
        af.attention_backward(**arguments | change(arguments))
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_tables_in_a_graph_need_a_plan_backward():
    q, k, v = tensors()
    rule = af.documents(np.repeat([27, 28, 29], 100))
    out, lse = af.attention(q, k, v, rule=rule, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="^rule: with tables, key_lengths or .* in a captured stream, expected a plan"):
        with torch.cuda.graph(graph):
            af.attention_backward(out, q, k, v, out, lse, rule=rule)


def test_a_plan_too_large_to_be_remembered_comes_with_each_call():
    """Of millions of tiles that are visible in part: over 64 MiB."""
    q, k, v = (x.reshape(1, 1, 192, 192, 192, 16) for x in tensors(b=1, h=1, n=192**3, d=16))
    rule, dout = af.local(8), torch.randn_like(q)
    plan = af.plan(q, k, v, rule=rule)
    without, given = gradients(q, k, v, dout, rule=rule), gradients(q, k, v, dout, rule=rule, plan=plan)
    assert torch.equal(without.dk, given.dk) and torch.equal(without.dv, given.dv)  # dq's sums are made in no order
    assert (without.dq - given.dq).abs().max() < 1e-2 * given.dq.abs().max()
    out, lse = af.attention(q, k, v, rule=rule, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="^rule: .* or more than 64 MiB of plan in a captured stream, expected a plan"):
        with torch.cuda.graph(graph):
            af.attention_backward(dout, q, k, v, out, lse, rule=rule)


def test_memory_of_backward_is_linear_in_the_sequence():
    """A bias along the queries, one along the keys; a queries x keys matrix of float32 would take 17 GB. At most some 300
    bytes a query: Hopper's kernels keep the sums of dq, others only their numbers."""
    rule, sizes = af.local(256), {}
    for n in (32_768, 65_536):
        q, k, v = tensors(b=1, h=1, n=n)
        for shape in ((1, 1, n, 1), (1, 1, 1, n)):
            bias = torch.randn(shape, device="cuda")
            sizes[n] = af.plan(q, k, v, rule=rule, bias=bias).backward_workspace
            assert 0 < sizes[n] < 400 * n
            gradients(q, k, v, torch.randn_like(q), rule=rule, bias=bias)
    assert sizes[65_536] < 2.1 * sizes[32_768]


def test_too_little_memory_for_a_workspace_is_an_error_and_no_more():
    """What the parts of a query's keys leave, of batch entries that share all in memory: 64 parts of 64 numbers, their
    maxima and sums, a quarter more than the GPU has. Nothing has been written then."""
    batch = torch.cuda.mem_get_info()[1] * 5 // 4 // (64 * 64 * 4)
    q, k = (torch.ones(1, 1, n, 64, device="cuda", dtype=torch.bfloat16).expand(batch, 1, n, 64) for n in (1, 2**17))
    out = torch.full(q.shape, 7.0, device="cuda", dtype=q.dtype)
    with pytest.raises(MemoryError, match="^cuda: allocating device memory failed: "):
        af.attention(q, k, k, out=out, deterministic=True)
    assert (out == 7).all()
    q, k, v = tensors()
    assert close(af.attention(q, k, v, rule=af.causal()), reference(q, k, v))


def test_too_little_memory_is_an_error_and_no_more():
    q = torch.zeros(1, 1, 1, 256, device="cuda", dtype=torch.float64).expand(1, 2**15, 2**16, 256)
    with pytest.raises(MemoryError, match="^out: "):
        af.attention(q, q[:, :, :1], q[:, :, :1])
    q, k, v = tensors()
    assert close(af.attention(q, k, v, rule=af.causal()), reference(q, k, v))


@pytest.mark.parametrize("call", [af.attention, attention])
@pytest.mark.parametrize("where", ["rule", "lengths"])
def test_what_another_framework_still_writes_is_waited_for(call, where):
    """A long sleep on CuPy's stream, then a mask or lengths."""
    import cupy

    q, k, v = tensors(n=200)
    if where == "rule":
        late, last = cupy.zeros((200, 200), "uint8"), 1
        options = dict(rule=af.dense(late))
    else:
        late, last = cupy.zeros(2, "int32"), 200
        options = dict(key_lengths=late)
    late[...] = 0  # so that CuPy has compiled it
    torch.cuda.synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(200_000_000)
        late[...] = last
        found = call(q, k, v, **options)
    assert close(found, reference(q, k, v, causal=False))


def test_what_another_framework_still_reads_is_waited_for():
    """out is CuPy's, and its stream copies it behind a long sleep before it is written."""
    import cupy

    q, k, v = tensors(n=200, dtype=torch.float16)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out = cupy.full(tuple(q.shape), 7, "float16")
        read = cupy.zeros_like(out)
        read[...] = out  # so that CuPy has compiled it
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(200_000_000)
        read[...] = out
        attention(q, k, v, out=out)
        written = out.copy()
    assert (read == 7).all()
    assert close(torch.as_tensor(written), reference(q, k, v, causal=False))


def test_cupy_arrays():
    import cupy

    q, k, v = (cupy.random.standard_normal((1, 2, 100, 32)).astype("float32") for _ in range(3))
    out = af.attention(q, k, v, rule=af.causal())
    assert isinstance(out, cupy.ndarray)
    assert close(torch.as_tensor(out), reference(*(torch.as_tensor(x) for x in (q, k, v))))
    made = gradients(q, k, v, v, rule=af.causal())
    assert all(isinstance(one, cupy.ndarray) for one in made[:3])
    expected = reference_gradients(*(torch.as_tensor(x) for x in (q, k, v, v)))
    assert all(close(torch.as_tensor(a), b) for a, b in zip(made, expected))


def test_jax_arrays():
    import jax

    q, k, v = (jax.random.normal(jax.random.key(i), (1, 2, 100, 32)) for i in range(3))
    out = af.attention(q, k, v, rule=af.causal())
    assert isinstance(out, jax.Array) and out.devices() == q.devices()
    assert close(torch.tensor(np.array(out)), reference(*(torch.tensor(np.array(x)) for x in (q, k, v))))
    made = gradients(q, k, v, v, rule=af.causal())
    assert all(isinstance(one, jax.Array) and one.devices() == q.devices() for one in made[:3])
    expected = reference_gradients(*(torch.tensor(np.array(x)) for x in (q, k, v, v)))
    assert all(close(torch.tensor(np.array(a)), b) for a, b in zip(made, expected))


def test_empty_calls():
    q, k, v = tensors()
    out, lse = af.attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()
    assert af.attention(q[:, :, :0], k, v).shape == (2, 4, 0, 64)
    assert not any(one.any() for one in gradients(q, k[:, :, :0], v[:, :, :0], q)[:3])
    assert not any(one.any() for one in gradients(q[:, :, :0], k, v, q[:, :, :0])[:3])
