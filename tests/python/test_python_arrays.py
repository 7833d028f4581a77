"""Arrays that are not NumPy's: any DLPack exporter, JAX, bfloat16; what comes back is of the same kind."""

import gc
import sys
import types
import weakref

import anyflash as af
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from anyflash import _arrays
from anyflash._arrays import aligned_empty
from python_helpers import Exporter, numbers


@pytest.fixture
def qkv():
    return [numbers(i, 1, 2, 17, 16) for i in range(3)]


@pytest.mark.parametrize("versioned", [True, False])
def test_any_exporter_is_read_and_gets_numpy(qkv, versioned):
    expected, expected_lse = af.attention(*qkv, return_lse=True)
    out, lse = af.attention(*(Exporter(x, versioned=versioned) for x in qkv), return_lse=True)
    assert type(out) is np.ndarray and type(lse) is np.ndarray
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)


def test_exporters_serve_for_every_argument(qkv):
    ids, bias, sink = np.arange(17, dtype=np.int32) // 5, numbers(5, 1, 2, 1, 17), numbers(6, 2)
    rule = af.documents(ids) & af.dense(np.tri(17, dtype=np.bool_))
    other_rule = af.documents(Exporter(ids)) & af.dense(Exporter(np.tri(17, dtype=np.bool_)))
    out, lse = af.attention(*qkv, rule=rule, bias=bias, sink=sink, return_lse=True)
    here = af.attention_backward(out, *qkv, out, lse, rule=rule, bias=bias, sink=sink)
    there = af.attention_backward(
        Exporter(out),
        *map(Exporter, qkv),
        Exporter(out),
        Exporter(lse),
        rule=other_rule,
        bias=Exporter(bias),
        sink=Exporter(sink),
    )
    for a, b in zip(here, there):
        np.testing.assert_array_equal(a, b)


def test_an_exporter_s_strides_are_kept(qkv):
    q, k, v = qkv
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in qkv]
    np.testing.assert_array_equal(af.attention(*map(Exporter, turned)), af.attention(q, k, v))


def test_an_exporter_can_be_written_into(qkv):
    memory = np.zeros((1, 2, 17, 16), np.float32)
    out = Exporter(memory)
    assert af.attention(*qkv, out=out) is out
    np.testing.assert_array_equal(memory, af.attention(*qkv))
    exporters = [Exporter(x) for x in qkv]
    both = af.attention(*exporters, out=out, return_lse=True)
    assert both[0] is out and type(both[1]) is np.ndarray


def test_jax_arrays_come_back_as_jax_arrays(qkv):
    expected, expected_lse = af.attention(*qkv, return_lse=True)
    out, lse = af.attention(*map(jnp.asarray, qkv), return_lse=True)
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    gradients = af.attention_backward(out, *map(jnp.asarray, qkv), out, lse)
    assert all(isinstance(x, jax.Array) for x in gradients[:3]) and gradients.dbias is None
    np.testing.assert_array_equal(gradients.dq, af.attention_backward(expected, *qkv, expected, expected_lse).dq)


def test_bfloat16_is_the_same_in_numpy_and_jax(qkv):
    halves = [x.astype(ml_dtypes.bfloat16) for x in qkv]
    out = af.attention(*halves)
    assert out.dtype == ml_dtypes.bfloat16
    from_jax = af.attention(*map(jnp.asarray, halves))
    assert from_jax.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(from_jax), out)
    into = np.zeros_like(out)
    assert af.attention(*halves, out=into) is into
    np.testing.assert_array_equal(into, out)


class BfloatExporter(Exporter):
    """As Exporter, of the bits of bfloat16 numbers."""

    def __dlpack__(self, **options):
        return af._core.as_bfloat16(self.array).__dlpack__(**options)


def test_bfloat16_of_any_exporter(qkv):
    halves = [x.astype(ml_dtypes.bfloat16) for x in qkv]
    out = af.attention(*(BfloatExporter(x.view(np.uint16)) for x in halves))
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(out, af.attention(*halves))


def test_a_torch_like_framework_gets_its_own_kind(qkv, monkeypatch):
    """The way PyTorch's tensors go, on a stand-in: what from_dlpack of its module makes is returned."""
    torch = types.ModuleType("torch")
    torch.strided, torch.is_grad_enabled = object(), lambda: True
    members = {"__module__": "torch", "requires_grad": False, "is_nested": False, "is_meta": False, "negated": False}
    members |= {"layout": torch.strided, "is_neg": lambda self: self.negated}
    tensor = type("Tensor", (Exporter,), members)
    torch.from_dlpack = lambda exporter: tensor(np.from_dlpack(exporter))
    monkeypatch.setitem(sys.modules, "torch", torch)
    out, lse = af.attention(*map(tensor, qkv), return_lse=True)
    assert type(out) is tensor and type(lse) is tensor
    np.testing.assert_array_equal(out.array, af.attention(*qkv))
    derived = type("MyTensor", (tensor,), {"__module__": "my_project"})
    assert type(af.attention(*map(derived, qkv))) is tensor
    needs_gradient = tensor(qkv[1])
    needs_gradient.requires_grad = True
    with pytest.raises(ValueError) as caught:
        af.attention(tensor(qkv[0]), needs_gradient, tensor(qkv[2]))
    assert str(caught.value) == (
        "key: requires a gradient, and this call records none; use anyflash.torch.attention, or pass key.detach() and "
        "use attention_backward"
    )
    for kind in (tensor, derived):
        negated = kind(qkv[1])
        negated.negated = True
        with pytest.raises(ValueError) as caught:
            af.attention(tensor(qkv[0]), negated, tensor(qkv[2]))
        assert str(caught.value) == "key: negated lazily, expected plain memory; pass key.resolve_neg()"


def test_a_tensorflow_like_framework_goes_by_capsules(qkv, monkeypatch):
    """TensorFlow's tensors may lack __dlpack__: its own functions give and take the capsule. Shown on a stand-in."""

    class EagerTensor:
        __module__ = "tensorflow.python.framework.ops"

        def __init__(self, array):
            self.array, self.dtype = array, "float32"

    taken = []
    dlpack = types.SimpleNamespace(
        to_dlpack=lambda tensor: tensor.array.__dlpack__(),
        from_dlpack=lambda capsule: taken.append(capsule) or EagerTensor(capsule),
    )
    tensorflow = types.ModuleType("tensorflow")
    tensorflow.experimental, tensorflow.Tensor = types.SimpleNamespace(dlpack=dlpack), EagerTensor
    tensorflow.string, tensorflow.variant, tensorflow.resource = "string", "variant", "resource"
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
    out = af.attention(*map(EagerTensor, qkv))
    assert type(out) is EagerTensor and type(taken[0]).__name__ == "PyCapsule"
    with pytest.raises(ValueError, match="^out: a TensorFlow array cannot be written into, leave it out$"):
        af.attention(*qkv, out=EagerTensor(qkv[0]))


def test_exporters_are_let_go_after_the_call(qkv):
    exporters = [Exporter(x.copy()) for x in qkv]
    gone = [weakref.ref(x.array) for x in exporters]
    af.attention(*exporters)
    del exporters
    gc.collect()
    assert all(reference() is None for reference in gone)


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 7)])
def test_memory_for_other_frameworks_starts_on_a_boundary(shape):
    made = aligned_empty(shape, np.dtype("float32"))
    assert made.shape == shape and made.flags.c_contiguous
    assert made.size == 0 or made.ctypes.data % 64 == 0  # NumPy may give an empty array any address


@pytest.fixture
def cupy(monkeypatch):
    """What of CuPy is asked for, with arrays that are on a GPU by their own account alone: their calls are noted."""
    module, calls = types.ModuleType("cupy"), []

    class ndarray:
        device, dtype = types.SimpleNamespace(id=1), np.dtype(np.float32)

        def __dlpack_device__(self):
            return 2, 1

        def __dlpack__(self, stream=None):  # as before CuPy 14
            calls.append(stream)

    class Device:
        def __init__(self, index):
            calls.append(index)

        __enter__ = __exit__ = lambda *_: None

    ndarray.__module__ = "cupy"
    module.ndarray, module.calls, module.empty = ndarray, calls, np.empty
    stream = lambda gpu: types.SimpleNamespace(ptr=6 + gpu)
    module.cuda = types.SimpleNamespace(Device=Device, get_current_stream=stream)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(_arrays._core, "synchronize", lambda *place: calls.append(place))
    return module


def test_cupy_s_arrays_go_to_their_gpu_s_current_stream_and_nobody_waits(cupy):
    array = cupy.ndarray()
    assert _arrays.stream_of(array, array, None, np.zeros(3)) == 7
    _arrays.settle(array, array, None, np.zeros(3))
    _arrays.capsule_of(array, "query", False)
    assert cupy.calls == [-1]
    assert _arrays.device_empty("out", array, 1, (2, 3), "float16").dtype == np.float16
    assert _arrays.device_empty("out", array, 1, (2, 3), "bfloat16").dtype == array.dtype
    assert cupy.calls == [-1, 1, 1]


def test_where_frameworks_meet_on_a_gpu_calls_wait_for_each_other(cupy):
    array, other = cupy.ndarray(), Exporter(np.zeros(3), device=(2, 1))
    assert _arrays.stream_of(array, None, other) == 0
    assert cupy.calls == [(1, 7)]  # what CuPy has queued
    _arrays.settle(array, None, other)
    assert cupy.calls == [(1, 7), (1, 0)]
    assert _arrays.stream_of(other, array) == 0 and cupy.calls[2:] == [(1, 7)]
