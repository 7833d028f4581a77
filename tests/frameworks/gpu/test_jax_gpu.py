"""What is particular to a GPU in JAX's front end: the handlers on a stream, lengths that nobody waits for, memory.
Collected only where ANYFLASH_TEST_DEVICE is cuda; without a GPU they fail."""

import ctypes
import subprocess
import sys

import anyflash as af
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from anyflash import _core
from anyflash._options import constants
from anyflash.jax import attention
from anyflash.jax._call import Call

pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def structure(**fields):
    return type("Structure", (ctypes.Structure,), {"_fields_": list(fields.items())})


# As python/src/xla_ffi.h has them, each with its size and a place for extensions in front.
START = dict(struct_size=size, extensions=pointer)
Buffer = structure(**START, type=integer, data=pointer, rank=ctypes.c_int64, sizes=pointer)
Buffers = structure(**START, count=ctypes.c_int64, types=pointer, buffers=pointer)
Text = structure(data=ctypes.c_char_p, size=size)
Attributes = structure(**START, count=ctypes.c_int64, types=pointer, names=pointer, values=pointer)
Handler = ctypes.CFUNCTYPE(pointer, pointer)
Api = structure(
    **START,
    version_size=size,
    version_extensions=pointer,
    major=integer,
    minor=integer,
    internal=pointer,
    error_create=Handler,
    unused=pointer * 3,
    stream_get=Handler,
)
StreamGetArgs = structure(**START, context=pointer, stream=pointer)
ErrorCreateArgs = structure(**START, message=ctypes.c_char_p, code=integer)
CallFrame = structure(
    **START, api=pointer, context=pointer, stage=integer, arguments=Buffers, results=Buffers, attributes=Attributes
)
TYPES = {torch.float32: 11, torch.bfloat16: 16, torch.int32: 4, torch.int64: 5, torch.bool: 1}


def buffers_of(tensors, kept):
    made = (pointer * len(tensors))()
    for i, tensor in enumerate(tensors):
        sizes = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
        buffer = Buffer(48, None, TYPES[tensor.dtype], tensor.data_ptr(), tensor.dim(), ctypes.addressof(sizes))
        kept += [sizes, buffer]
        made[i] = ctypes.addressof(buffer)
    kept.append(made)
    return Buffers(40, None, len(tensors), None, ctypes.addressof(made))


def call_handler(results, operands, rule="full()", layout="bhsd"):
    """The forward handler as XLA calls it, on tensors of PyTorch's by name and on its current stream."""
    call = Call(tuple(operands), rule, tuple(constants(dict(align="none_end", layout=layout)).values()))
    text = call.text(tuple(results), tuple(operands)).encode()
    kept, lines = [], []

    def stream_get(args):
        of = ctypes.cast(args, ctypes.POINTER(StreamGetArgs))[0]
        of.stream = torch.cuda.current_stream().cuda_stream
        return None

    def error_create(args):
        lines.append(ctypes.cast(args, ctypes.POINTER(ErrorCreateArgs))[0].message)
        return 1

    api = Api(0, None, 0, None, 0, 3, None, Handler(error_create), (pointer * 3)(), Handler(stream_get))
    name, value = Text(b"call", 4), Text(text, len(text))
    names, values, types = (pointer * 1)(ctypes.addressof(name)), (pointer * 1)(ctypes.addressof(value)), integer(4)
    attributes = Attributes(48, None, 1, ctypes.addressof(types), ctypes.addressof(names), ctypes.addressof(values))
    frame = CallFrame(
        ctypes.sizeof(CallFrame),
        None,
        ctypes.addressof(api),
        None,
        3,
        buffers_of(list(operands.values()), kept),
        buffers_of(list(results.values()), kept),
        attributes,
    )
    capsule = _core.jax_handlers()["CUDA"]["anyflash_forward"]
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = pointer, (ctypes.py_object, ctypes.c_char_p)
    assert not Handler(get(capsule, None))(ctypes.addressof(frame)), lines


def on_gpu(numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype, device="cuda")


def case_of(name):
    """Operands by name, options, and other numbers for one of the tables."""
    q, k, v = (torch.randn(2, 4, 100, 64, device="cuda") for _ in range(3))
    if name == "plain":
        return dict(q=q, k=k, v=v), dict(rule="causal()"), {}
    if name == "lengths":
        return dict(q=q, k=k, v=v, key_lengths=on_gpu([100, 7])), {}, dict(key_lengths=[3, 99])
    if name == "pages":
        k, v = (torch.randn(20, 16, 4, 64, device="cuda") for _ in "kv")
        table = torch.randperm(20, device="cuda").int().reshape(2, 10)
        return dict(q=q, k=k, v=v, key_lengths=on_gpu([160, 7]), page_table=table), {}, dict(key_lengths=[90, 99])
    if name == "documents end to end":
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        ends = dict(cu_seqlens_q=on_gpu([0, 30, 100]), cu_seqlens_k=on_gpu([0, 30, 100]))
        return dict(q=q, k=k, v=v, **ends), dict(layout="thd"), dict(cu_seqlens_q=[0, 70, 100])
    mask = torch.rand(100, 100, device="cuda") < 0.5
    return dict(q=q, k=k, v=v) | {":t0": mask}, dict(rule="dense(t0) | sink(1)"), {":t0": (~mask).tolist()}


NAMES = ["plain", "lengths", "pages", "documents end to end", "a mask"]


def expected_of(operands, options):
    given = {name: x for name, x in operands.items() if name not in "qkv" and name[0] != ":"}
    tables = {name[1:]: x for name, x in operands.items() if name[0] == ":"}
    rule = af.parse_rule(options.get("rule", "full()"), tables)
    layout = options.get("layout", "bhsd")
    return af.attention(*(operands[name] for name in "qkv"), rule=rule, layout=layout, align="none_end", **given)


@pytest.mark.parametrize("name", NAMES)
def test_nobody_waits(name):
    operands, options, _ = case_of(name)
    out = torch.empty_like(operands["q"])
    expected = expected_of(operands, options)
    call_handler({"out": out}, operands, **options)
    assert torch.equal(out, expected)
    out.zero_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        call_handler({"out": out}, operands, **options)
        done = torch.cuda.Event()
        done.record()
    assert not done.query()
    side.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", NAMES)
def test_replayed_in_a_graph(name):
    """Whatever waits for a stream, or copies to the CPU, is an error while the stream is captured."""
    operands, options, changes = case_of(name)
    out = torch.empty_like(operands["q"])
    call_handler({"out": out}, operands, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call_handler({"out": out}, operands, **options)
    operands["q"].neg_()
    for table, numbers in changes.items():
        operands[table].copy_(torch.tensor(numbers))
    graph.replay()
    assert torch.equal(out, expected_of(operands, options))


def test_tables_of_all_sorts_in_compiled_functions():
    """Those that stay on the GPU, those that a rule needs on the CPU, and both together."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 90, 16)).astype(np.float32)
    ids, ends = np.arange(90) // 40, np.array([0, 40, 80, 90])
    mask, bits = rng.random((90, 90)) < 0.5, rng.random((2, 1, 9, 9)) < 0.5
    lengths = np.array([90, 33], np.int32)
    for rule in (
        af.documents(ids),
        af.documents_packed(ends),
        af.dense(mask),
        af.blocks(bits, 10, 10),
        af.documents(ids) & af.dense(mask),
        af.documents_packed(ends) | af.dense(mask),
    ):
        for given in ({}, dict(key_lengths=lengths)):
            text, tables = rule._parts
            call = jax.jit(lambda q, tables, given, text=text: attention(q, q, q, rule=text, tables=tables, **given))
            got = call(q, tables, given)
            expected = af.attention(q, q, q, rule=rule, **given)
            np.testing.assert_allclose(got, expected, atol=5e-6, err_msg=f"{rule} {given}")


def test_whatever_lengths_hold_does_no_harm():
    x = jax.random.normal(jax.random.key(0), (2, 2, 30, 16))
    call = jax.jit(lambda lengths: attention(x, x, x, key_lengths=lengths))
    np.testing.assert_array_equal(call(jnp.array([-5, 10**6])), call(jnp.array([0, 30])))
    flat = x.reshape(120, 1, 16)
    thd = jax.jit(
        jax.grad(lambda x, ends: attention(x, x, x, layout="thd", cu_seqlens_q=ends, cu_seqlens_k=ends).sum())
    )
    for bad in ([0, 100, 3, 120], [-7, 10**9, -3, 50]):
        jax.block_until_ready(thd(flat, jnp.array(bad)))
    assert np.isfinite(call(jnp.array([30, 1]))).all()


def test_shard_map_over_all_gpus():
    """Batch split over the GPUs there are: results, gradients, and no communication."""
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = jax.devices()
    assert devices[0].platform == "gpu"
    mesh = Mesh(np.array(devices).reshape(len(devices), 1), ("batch", "heads"))
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2 * len(devices), heads, 70, 16)), jnp.float32) for heads in (8, 4, 4))
    parts = P("batch", "heads")
    rule = af.causal() & af.documents(np.arange(70) // 30)
    call = lambda q, k, v: attention(q, k, v, rule=rule, return_lse=True)
    split = jax.shard_map(call, mesh=mesh, in_specs=(parts,) * 3, out_specs=(parts, parts))
    placed = [jax.device_put(x, NamedSharding(mesh, parts)) for x in (q, k, v)]
    compiled = jax.jit(split).lower(*placed).compile()
    assert not [word for word in ("all-reduce", "all-gather", "collective") if word in compiled.as_text()]
    for got, expected in zip(compiled(*placed), call(q, k, v)):
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, P(*parts[: got.ndim])), got.ndim)
        assert np.array_equal(got, expected)
    loss = lambda f: lambda *x: sum(jnp.sin(y).sum() for y in f(*x))
    got = jax.jit(jax.grad(loss(split), (0, 1, 2)))(*placed)
    for a, b in zip(got, jax.grad(loss(call), (0, 1, 2))(q, k, v)):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_no_copies():
    """Peak memory of compiled calls: operands, results, and far less than a copy of an operand."""
    program = """
import jax, numpy as np
from anyflash.jax import attention

gpu = jax.devices()[0]
options = dict(rule="local(16)", layout="bshd")
forward = jax.jit(lambda *x: attention(*x, **options, return_lse=True))
backward = jax.jit(lambda dout, *x: jax.vjp(lambda *x: attention(*x, **options), *x)[1](dout))
x = jax.device_put([np.random.default_rng(i).standard_normal((2, 8192, 8, 64), np.float32) for i in range(4)], gpu)
compiled = forward.lower(*x[:3]).compile(), backward.lower(*x).compile()
print(gpu.memory_stats()["peak_bytes_in_use"])
jax.block_until_ready(compiled[0](*x[:3]))
print(gpu.memory_stats()["peak_bytes_in_use"])
jax.block_until_ready(compiled[1](*x))
print(gpu.memory_stats()["peak_bytes_in_use"])
for one in compiled:
    print(one.memory_analysis().temp_size_in_bytes)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one = 2 * 8 * 8192 * 64 * 4  # bytes of q, of out, of each gradient
    start, forward, backward, forward_temporary, backward_temporary = (int(x) / one for x in done.stdout.split())
    assert 4 <= start < 4.3
    assert 4.9 < forward < 5.5 and forward_temporary < 0.1  # out
    assert 7.9 < backward < 8.6 and backward_temporary < 1.2  # dq, dk and dv, and the out that they are made from


def test_tf32():
    """Heard where it is allowed, forward and backward: what the library gives then, to the bit."""
    arrays = [np.random.default_rng(n).standard_normal((1, 2, 200, 64), np.float32) for n in range(3)]
    tensors = [torch.from_numpy(x).cuda() for x in arrays]
    made, pull = jax.vjp(jax.jit(lambda *x: attention(*x, allow_tf32=True)), *arrays)
    _, dk, dv = pull(arrays[0])
    out, lse = af.attention(*tensors, return_lse=True, allow_tf32=True)
    heard = not torch.equal(out, af.attention(*tensors))  # what has to be is said by tests/gpu/test_tf32.py
    assert np.array_equal(made, out.cpu()) and np.array_equal(made, attention(*arrays)) != heard
    for allow in (True, False):  # dq is summed in no order
        expected = af.attention_backward(tensors[0], *tensors, out, lse, allow_tf32=allow)
        same = np.array_equal(dk, expected.dk.cpu()), np.array_equal(dv, expected.dv.cpu())
        assert same == 2 * (allow or not heard,)
