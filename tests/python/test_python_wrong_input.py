"""Wrong calls from Python: each is answered in one line that names the argument, and `out` stays as it was."""

import jax.numpy as jnp
import numpy as np
import pytest

import anyflash as af
from python_helpers import Exporter, numbers

q = numbers(1, 2, 4, 6, 8)
k = numbers(2, 2, 2, 5, 8)
v = numbers(3, 2, 2, 5, 8)
lse = np.zeros((2, 4, 6), np.float32)
FLOATS = "expected float16, bfloat16, float32 or float64"
INDICES = "expected int32 or int64"


def i32(*values):
    return np.array(values, np.int32)


def misaligned():
    memory = np.zeros(q.nbytes + 4, np.uint8)
    start = -memory.ctypes.data % 4 + 1
    return memory[start : start + q.nbytes].view(np.float32).reshape(q.shape)


def half_elements():
    records = np.zeros(q.shape, np.dtype([("number", np.float32), ("rest", np.int16)]))
    return records["number"]


class Raising(Exporter):
    def __dlpack__(self, **options):
        raise RuntimeError("no memory\nof mine")


class Lying(Exporter):
    def __dlpack__(self, **options):
        return "a capsule"


def read_only(shape=(2, 4, 6, 8)):
    array = np.zeros(shape, np.float32)
    array.flags.writeable = False
    return array


ARRAYS = {  # argument name in Python, what is passed, the error
    "a list": (dict(q=[1.0]), TypeError, "query: expected an array (NumPy, or one with __dlpack__), got list"),
    "a number": (dict(k=3.0), TypeError, "key: expected an array (NumPy, or one with __dlpack__), got float"),
    "a string": (dict(v="v"), TypeError, "value: expected an array (NumPy, or one with __dlpack__), got str"),
    "a NumPy scalar": (dict(q=np.float32(1)), TypeError, "query: expected an array (NumPy, or one with __dlpack__), got float32"),
    "objects": (dict(q=q.astype(object)), TypeError, f"query: element type object, {FLOATS}"),
    "integers": (dict(k=k.astype(np.int32)), TypeError, f"key: element type int32, {FLOATS}"),
    "short integers": (dict(k=k.astype(np.int16)), TypeError, f"key: element type int16, {FLOATS}"),
    "complex": (dict(v=v.astype(np.complex64)), TypeError, f"value: element type complex64, {FLOATS}"),
    "strings": (dict(v=v.astype("U4")), TypeError, f"value: element type <U4, {FLOATS}"),
    "dates": (dict(v=v.astype("M8[s]")), TypeError, f"value: element type datetime64[s], {FLOATS}"),
    "long doubles": (dict(q=q.astype(np.longdouble)), TypeError, f"query: element type float128, {FLOATS}"),
    "swapped bytes": (dict(q=q.astype(">f4")), TypeError, f"query: element type in swapped byte order (>f4), {FLOATS}"),
    "records": (dict(q=np.zeros(3, "f4,i4")), TypeError, f"query: element type [('f0', '<f4'), ('f1', '<i4')], {FLOATS}"),
    "a masked array": (dict(k=np.ma.array(k)), TypeError, "key: a masked array, expected a plain one (a mask goes into the rule)"),
    "types that differ": (dict(k=k.astype(np.float64)), TypeError, "?"),
    "misaligned": (dict(q=misaligned()), ValueError, "query: memory that is not aligned to its elements of 4 bytes"),
    "half elements": (dict(q=half_elements()), ValueError, "query: a stride of 6 bytes, expected a multiple of its elements' 4"),
    "too many axes": (dict(q=np.zeros((1,) * 9, np.float32)), ValueError, "query: 9 axes, expected at most 8"),
    "three axes": (dict(q=q[0]), ValueError, "?"),
    "no axes": (dict(q=np.float32(1).reshape(())), ValueError, "?"),
    "other ranks": (dict(k=k[..., None]), ValueError, "?"),
    "rank of v": (dict(v=v[0]), ValueError, "?"),
    "no key": (dict(k=None), ValueError, "?"),
    "no value": (dict(v=None), ValueError, "?"),
    "no query": (dict(q=None), ValueError, "?"),
    "batches": (dict(k=k[:1]), ValueError, "?"),
    "heads do not divide": (dict(k=k[:, :1].repeat(3, 1), v=v[:, :1].repeat(3, 1)), ValueError, "?"),
    "heads of v": (dict(v=v[:, :1]), ValueError, "?"),
    "head sizes": (dict(k=k[..., :7]), ValueError, "?"),
    "lengths": (dict(v=v[:, :, :4]), ValueError, "?"),
    "no channels": (dict(q=q[..., :0], k=k[..., :0]), ValueError, "?"),
    "too many channels": (dict(q=np.zeros((2, 4, 6, 257), "f4"), k=np.zeros((2, 2, 5, 257), "f4")), ValueError, "?"),
    "a device": (dict(q=Exporter(q, device=(2, 0))), ValueError, "query: on a CUDA device, expected the CPU"),
    "an odd device": (dict(q=Exporter(q, device=(77, 0))), ValueError, "query: on a DLPack type 77 device, expected the CPU"),
    "an exporter that fails": (dict(k=Raising(k)), ValueError, "key: __dlpack__ failed: no memory"),
    "an exporter that lies": (dict(k=Lying(k)), TypeError, "key: its __dlpack__ gave something that is not a DLPack tensor"),
    "integers by DLPack": (dict(q=Exporter(q.astype(np.int32))), TypeError, f"query: element type int32, {FLOATS}"),
    "complex by DLPack": (dict(q=Exporter(q.astype(np.complex64))), TypeError, f"query: element type complex64, {FLOATS}"),
}

OPTIONS = {
    "rule of a wrong kind": (dict(rule="causal"), TypeError, "rule: expected a rule such as anyflash.causal(), got str"),
    "no rule": (dict(rule=None), TypeError, "rule: expected a rule such as anyflash.causal(), got NoneType"),
    "the function for the rule": (dict(rule=af.causal), TypeError, "rule: expected a rule such as anyflash.causal(), got function"),
    "alignment": (dict(align="end"), ValueError, "align: 'end', expected none_front, none_end, scale_front or scale_end"),
    "alignment of a wrong kind": (dict(align=1), TypeError, "align: expected a str, got int"),
    "layout": (dict(layout="bdhs"), ValueError, "layout: 'bdhs', expected bhsd, bshd, bhds, qkv or thd"),
    "scale of a wrong kind": (dict(scale="1"), TypeError, "scale: expected a number, got str"),
    "scale NaN": (dict(scale=float("nan")), ValueError, "?"),
    "scale too large": (dict(scale=10**400), ValueError, "scale: a number too large for float64"),
    "softcap": (dict(softcap=-1.0), ValueError, "?"),
    "softcap none": (dict(softcap=None), TypeError, "softcap: expected a number, got NoneType"),
    "threads": (dict(threads=-1), ValueError, "threads: -1, expected 0 (all) to 65536"),
    "threads of a wrong kind": (dict(threads=1.5), TypeError, "threads: expected an integer, got float"),
    "threads too large": (dict(threads=2**70), ValueError, "threads: an integer too large for 64 bits"),
    "return_lse": (dict(return_lse="both"), ValueError, "return_lse: 'both', expected True, False or 'lm'"),
    "return_lse a number": (dict(return_lse=2), ValueError, "return_lse: 2, expected True, False or 'lm'"),
    "plan": (dict(plan=af.causal()), TypeError, "plan: expected what anyflash.plan gives, got Rule"),
    "plan of other shapes": (dict(plan=af.plan(q[:, :, :3], k, v)), ValueError, "?"),
    "plan of another rule": (dict(plan=af.plan(q, k, v, rule=af.causal())), ValueError, "?"),
    "deterministic": (dict(deterministic=np.zeros(2)), TypeError, "?"),
    "bias heads": (dict(bias=np.zeros((2, 3, 6, 5), "f4")), ValueError, "?"),
    "bias rank": (dict(bias=np.zeros((6, 5), "f4")), ValueError, "?"),
    "bias type": (dict(bias=np.zeros((1, 1, 6, 5), "?")), TypeError, f"bias: element type bool, {FLOATS}"),
    "sink heads": (dict(sink=np.zeros(3, "f4")), ValueError, "?"),
    "alibi heads": (dict(alibi_slopes=np.zeros((2, 3), "f4")), ValueError, "?"),
    "key_lengths type": (dict(key_lengths=np.zeros(2)), TypeError, f"key_lengths: element type float64, {INDICES}"),
    "key_lengths size": (dict(key_lengths=i32(5)), ValueError, "?"),
    "key_lengths too long": (dict(key_lengths=i32(5, 6)), ValueError, "?"),
    "key_lengths negative": (dict(key_lengths=i32(-1, 5)), ValueError, "?"),
    "cu_seqlens without thd": (dict(cu_seqlens_q=i32(0, 6), cu_seqlens_k=i32(0, 5)), ValueError, "?"),
    "documents of another length": (dict(rule=af.documents(i32(0, 1), i32(0, 1))), ValueError, "?"),
    "documents end elsewhere": (dict(rule=af.documents_packed(i32(0, 6), i32(0, 4))), ValueError, "?"),
    "blocks of another size": (dict(rule=af.blocks(np.ones((2, 2), bool), 2, 3)), ValueError, "?"),
    "dense of another size": (dict(rule=af.dense(np.ones((6, 6), bool))), ValueError, "?"),
    "two dimensions for one": (dict(rule=af.window((1, 1), 0)), ValueError, "?"),
    "page table without pages": (dict(page_table=i32(0, 1, 2, 3).reshape(2, 2)), ValueError, "?"),
    "out read-only": (dict(out=read_only()), ValueError, "out: a read-only array, expected a writable one"),
    "out of another shape": (dict(out=np.zeros((2, 4, 6, 7), "f4")), ValueError, "?"),
    "out of another type": (dict(out=np.zeros((2, 4, 6, 8))), TypeError, "?"),
    "out of JAX": (dict(out=jnp.zeros((2, 4, 6, 8))), ValueError, "out: a JAX array cannot be written into, leave it out"),
    "out a list": (dict(out=[]), TypeError, "out: expected an array (NumPy, or one with __dlpack__), got list"),
}

RULES = {
    "local window": (lambda: af.local(0), ValueError, "?"),
    "local stride": (lambda: af.local(2, 31), ValueError, "log2_stride: 31, expected 0 to 30"),
    "local of a float": (lambda: af.local(1.5), TypeError, "window: expected an integer, got float"),
    "window numbers": (lambda: af.window((1, 2, 3, 4), 0), ValueError, "left: 4 numbers, expected 1 to 3"),
    "window of nothing": (lambda: af.window((), 0), ValueError, "left: 0 numbers, expected 1 to 3"),
    "window of words": (lambda: af.window(1, "right"), TypeError, "right: expected an integer or a tuple of 1 to 3, got str"),
    "prefix": (lambda: af.prefix(-1), ValueError, "?"),
    "sink": (lambda: af.sink(-2), ValueError, "?"),
    "documents of floats": (lambda: af.documents(np.zeros(4)), TypeError, f"ids_q: element type float64, {INDICES}"),
    "documents of a list": (lambda: af.documents([0, 1]), TypeError, "ids_q: expected an array (NumPy, or one with __dlpack__), got list"),
    "documents of None": (lambda: af.documents(None), TypeError, "ids_q: expected an array, got None"),
    "tiles kernel": (lambda: af.tiles(2, 2), ValueError, "?"),
    "tiles shape": (lambda: af.tiles(0, 1), ValueError, "?"),
    "neighbourhood kernel": (lambda: af.neighbourhood(0), ValueError, "?"),
    "neighbourhood dilation": (lambda: af.neighbourhood(3, 0), ValueError, "?"),
    "blocks size": (lambda: af.blocks(np.ones((2, 2), bool), 0, 4), ValueError, "?"),
    "blocks type": (lambda: af.blocks(np.ones((2, 2)), 4, 4), TypeError, "bitmap: element type float64, expected bool or uint8"),
    "dense type": (lambda: af.dense(np.ones((2, 2), np.int64)), TypeError, "mask: element type int64, expected bool or uint8"),
    "dense rank": (lambda: af.dense(np.ones(4, bool)), ValueError, "?"),
    "parse": (lambda: af.parse_rule("causal() &"), ValueError, "?"),
    "parse of a number": (lambda: af.parse_rule(3), TypeError, "text: expected a str, got int"),
    "explain of words": (lambda: af.explain(af.full(), "12"), TypeError, "q_shape: expected an integer or a tuple of 1 to 3, got str"),
    "explain in four dimensions": (lambda: af.explain(af.full(), (1, 2, 3, 4)), ValueError, "?"),
    "explain of dimensions that differ": (lambda: af.explain(af.full(), (4, 4), 16), ValueError, "?"),
    "explain of a negative size": (lambda: af.explain(af.full(), -1), ValueError, "?"),
    "explain of no rule": (lambda: af.explain(None, 4), TypeError, "rule: expected a rule such as anyflash.causal(), got NoneType"),
    "explain's type": (lambda: af.explain(af.full(), 4, dtype="int8"), TypeError, f"dtype: int8, {FLOATS}"),
    "pattern too large": (lambda: af.explain(af.full(), 1 << 20).pattern, ValueError, "?"),
    "picture's side": (lambda: af.explain(af.full(), 4).grey(0), ValueError, "side: 0, expected 1 to 16384"),
}

BACKWARD = {
    "dout shape": (dict(dout=q[:, :, :5]), ValueError, "?"),
    "dout type": (dict(dout=q.astype(np.float64)), TypeError, "?"),
    "no dout": (dict(dout=None), ValueError, "?"),
    "no out": (dict(out=None), ValueError, "?"),
    "no lse": (dict(lse=None), ValueError, "?"),
    "lse shape": (dict(lse=lse[:, :, :5]), ValueError, "?"),
    "lse type": (dict(lse=lse.astype(np.float64)), TypeError, "?"),
    "dlse shape": (dict(dlse=lse[:1]), ValueError, "?"),
    "paged": (dict(page_table=i32(0, 1).reshape(2, 1), k=np.zeros((2, 5, 2, 8), "f4"), v=np.zeros((2, 5, 2, 8), "f4")), ValueError, "?"),
    "lse a list": (dict(lse=[0.0]), TypeError, "lse: expected an array (NumPy, or one with __dlpack__), got list"),
}


def check(call, kind, line):
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert type(caught.value) is kind
    assert str(caught.value) == line


@pytest.mark.parametrize("name", [*ARRAYS, *OPTIONS])
def test_attention(name):
    changes, kind, line = (ARRAYS | OPTIONS)[name]
    out = np.full((2, 4, 6, 8), 7.0, np.float32)
    check(lambda: af.attention(**{"q": q, "k": k, "v": v, "out": out, **changes}), kind, line)
    assert (out == 7.0).all()
    other = changes.get("out")
    assert not isinstance(other, np.ndarray) or (other == 0).all()


@pytest.mark.parametrize("name", list(ARRAYS))
def test_attention_that_makes_its_own_result(name):
    changes, kind, line = ARRAYS[name]
    check(lambda: af.attention(**{"q": q, "k": k, "v": v, **changes}), kind, line)


@pytest.mark.parametrize("name", list(ARRAYS))
def test_plan(name):
    changes, kind, line = ARRAYS[name]
    check(lambda: af.plan(**{"q": q, "k": k, "v": v, **changes}), kind, line)


@pytest.mark.parametrize("name", list(RULES))
def test_rules_and_explain(name):
    check(*RULES[name])


@pytest.mark.parametrize("name", list(BACKWARD))
def test_backward(name):
    changes, kind, line = BACKWARD[name]
    check(lambda: af.attention_backward(**{"dout": q, "q": q, "k": k, "v": v, "out": q, "lse": lse, **changes}), kind, line)


def test_arguments_that_do_not_exist():
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        af.attention(q, k, v, mask=None)
    with pytest.raises(TypeError, match="takes from 1 to 3 positional arguments but 4"):
        af.attention(q, k, v, af.full())
