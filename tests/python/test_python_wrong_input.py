"""Wrong calls from Python: each is answered in one line that names the argument, and `out` stays as it was."""

import inspect
import re

import anyflash as af
import jax.numpy as jnp
import numpy as np
import pytest
import wrong_calls
from python_helpers import FLOATS, INDICES, Exporter, RawExporter, check, k, q, v

lse = np.zeros((2, 4, 6), np.float32)


def i32(*values):
    return np.array(values, np.int32)


def misaligned():
    memory = np.zeros(q.nbytes + 4, np.uint8)
    start = -memory.ctypes.data % 4 + 1
    return memory[start : start + q.nbytes].view(np.float32).reshape(q.shape)


MOST = 2**31 - 1


def broadcast(*shape):
    return np.broadcast_to(np.float32(0), shape)


def half_elements():
    records = np.zeros(q.shape, np.dtype([("number", np.float32), ("rest", np.int16)]))
    return records["number"]


class Raising(Exporter):
    def __dlpack__(self, **options):
        raise RuntimeError("no memory\nof mine")


class Verbose(Exporter):
    def __dlpack__(self, **options):
        raise RuntimeError("x" * 1000)


class Lying(Exporter):
    def __dlpack__(self, **options):
        return "a capsule"


def read_only(shape=(2, 4, 6, 8)):
    array = np.zeros(shape, np.float32)
    array.flags.writeable = False
    return array


ARRAYS = {  # argument name in Python, what is passed, the error
    "a list": (dict(q=[1.0]), TypeError, "query: type list, expected an array (NumPy, or one with __dlpack__)"),
    "a number": (dict(k=3.0), TypeError, "key: type float, expected an array (NumPy, or one with __dlpack__)"),
    "a string": (dict(v="v"), TypeError, "value: type str, expected an array (NumPy, or one with __dlpack__)"),
    "a NumPy scalar": (
        dict(q=np.float32(1)),
        TypeError,
        "query: type float32, expected an array (NumPy, or one with __dlpack__)",
    ),
    "objects": (dict(q=q.astype(object)), TypeError, f"query: type object, {FLOATS}"),
    "integers": (dict(k=k.astype(np.int32)), TypeError, "key: type int32, expected float32 as in query"),
    "short integers": (dict(k=k.astype(np.int16)), TypeError, f"key: type int16, {FLOATS}"),
    "strings": (dict(v=v.astype("U4")), TypeError, f"value: type <U4, {FLOATS}"),
    "dates": (dict(v=v.astype("M8[s]")), TypeError, f"value: type datetime64[s], {FLOATS}"),
    "long doubles": (dict(q=q.astype(np.longdouble)), TypeError, f"query: type float128, {FLOATS}"),
    "swapped bytes": (dict(q=q.astype(">f4")), TypeError, f"query: type >f4 (bytes swapped), {FLOATS}"),
    "records": (dict(q=np.zeros(3, "f4,i4")), TypeError, f"query: type [('f0', '<f4'), ('f1', '<i4')], {FLOATS}"),
    "a masked array": (
        dict(k=np.ma.array(k)),
        TypeError,
        "key: type MaskedArray, expected a plain array (a mask goes into the rule)",
    ),
    "misaligned": (
        dict(q=misaligned()),
        ValueError,
        "query: data pointer misaligned, expected a multiple of 4 bytes for float32",
    ),
    "half elements": (
        dict(q=half_elements()),
        ValueError,
        "query: stride 6 bytes, expected a multiple of 4 for float32",
    ),
    "no key": (dict(k=None), ValueError, "key: not given"),
    "no value": (dict(v=None), ValueError, "value: not given"),
    "no query": (dict(q=None), ValueError, "query: not given"),
    "a device": (dict(q=Exporter(q, device=(10, 0))), ValueError, "query: on a ROCm device, expected the CPU or CUDA"),
    "an odd device": (
        dict(q=Exporter(q, device=(77, 0))),
        ValueError,
        "query: on a DLPack type 77 device, expected the CPU or CUDA",
    ),
    "an exporter that fails": (dict(k=Raising(k)), ValueError, "key: __dlpack__ failed: no memory"),
    "an exporter that lies": (dict(k=Lying(k)), TypeError, "key: its __dlpack__ gave no DLPack tensor"),
    "an odd name of a type": (
        dict(q=type("a\nb", (), {})()),
        TypeError,
        "query: type a\\x0ab, expected an array (NumPy, or one with __dlpack__)",
    ),
    "an endless name of a type": (
        dict(q=np.zeros(3, [("x" * 100, "f4"), ("y", "f4")])),
        TypeError,
        f"query: type [('{'x' * 37}..., {FLOATS}",
    ),
    "an exporter that fails at length": (dict(k=Verbose(k)), ValueError, f"key: __dlpack__ failed: {'x' * 200}..."),
    "lanes by DLPack": (
        dict(q=RawExporter((2, 4, 6, 2), lanes=4)),
        TypeError,
        f"query: type float32 of 4 lanes, {FLOATS}",
    ),
    "a size beyond all memory by DLPack": (
        dict(q=RawExporter((1, 1, 1 << 62, 1))),
        ValueError,
        "query: shape (1, 1, 4611686018427387904, 1), expected sizes from 0 to 2147483647",
    ),
    "a head size beyond what is offered": (
        dict(q=broadcast(1, 1, MOST, 1), k=broadcast(1, 1, 1, 1), v=broadcast(1, 1, 1, 4096)),
        ValueError,
        "value: head size 4096, expected 1 to 512",
    ),
    "integers by DLPack": (dict(q=Exporter(q.astype(np.int32))), TypeError, f"query: type int32, {FLOATS}"),
    "complex by DLPack": (dict(q=Exporter(q.astype(np.complex64))), TypeError, f"query: type complex64, {FLOATS}"),
}

OPTIONS = {
    "rule of a wrong kind": (
        dict(rule="causal"),
        TypeError,
        "rule: type str, expected a rule such as anyflash.causal(), or anyflash.parse_rule of the text",
    ),
    "no rule": (dict(rule=None), TypeError, "rule: type NoneType, expected a rule such as anyflash.causal()"),
    "the function for the rule": (
        dict(rule=af.causal),
        TypeError,
        "rule: type function, expected a rule such as anyflash.causal()",
    ),
    "alignment beyond a zero": (
        dict(align="none_end\0"),
        ValueError,
        "align: 'none_end\\x00', expected none_front, none_end, scale_front or scale_end, did you mean 'none_end'?",
    ),
    "layout of a megabyte": (
        dict(layout="x" * 2**20),
        ValueError,
        f"layout: '{'x' * 40}...', expected bhsd, bshd, bhds, qkv or thd",
    ),
    "alignment of a wrong kind": (dict(align=1), TypeError, "align: type int, expected str"),
    "layout": (
        dict(layout="bdhs"),
        ValueError,
        "layout: 'bdhs', expected bhsd, bshd, bhds, qkv or thd, did you mean 'bhds'?",
    ),
    "return_lse an array": (
        dict(return_lse=np.zeros((9, 9))),
        ValueError,
        "return_lse: array([[0., 0., 0., 0., 0., 0., 0., 0., ..., expected True, False or 'lm'",
    ),
    "plan": (dict(plan=af.causal()), TypeError, "plan: type Rule, expected what anyflash.plan gives"),
    "plan of other shapes": (
        dict(plan=af.plan(q[:, :, :3], k, v)),
        ValueError,
        "plan: made for 3 queries, the call has 6",
    ),
    "plan of another rule": (
        dict(plan=af.plan(q, k, v, rule=af.causal())),
        ValueError,
        "plan: made for rule causal(), the call has full()",
    ),
    "deterministic": (
        dict(deterministic=np.zeros(2)),
        TypeError,
        "deterministic: type ndarray, expected True or False",
    ),
    "bias type": (dict(bias=np.zeros((1, 1, 6, 5), "?")), TypeError, f"bias: type boolean, {FLOATS}"),
    "key_lengths type": (dict(key_lengths=np.zeros(2)), TypeError, f"key_lengths: type float64, {INDICES}"),
    "out read-only": (dict(out=read_only()), ValueError, "out: read-only, expected a writable array"),
    "out marked read-only in DLPack": (
        dict(out=Exporter(read_only())),
        ValueError,
        "out: read-only, expected a writable array",
    ),
    "out of another shape": (
        dict(out=np.zeros((2, 4, 6, 7), "f4")),
        ValueError,
        "out: shape (2, 4, 6, 7), expected (2, 4, 6, 8)",
    ),
    "out of another type": (
        dict(out=np.zeros((2, 4, 6, 8))),
        TypeError,
        "out: type float64, expected float32 as in query",
    ),
    "out of JAX": (
        dict(out=jnp.zeros((2, 4, 6, 8))),
        ValueError,
        "out: a JAX array cannot be written into, leave it out",
    ),
    "out a list": (dict(out=[]), TypeError, "out: type list, expected an array (NumPy, or one with __dlpack__)"),
}


BACKWARD = {
    "dout shape": (dict(dout=q[:, :, :5]), ValueError, "dout: shape (2, 4, 5, 8), expected (2, 4, 6, 8)"),
    "dout type": (dict(dout=q.astype(np.float64)), TypeError, "dout: type float64, expected float32 as in query"),
    "no dout": (dict(dout=None), ValueError, "dout: not given"),
    "no out": (dict(out=None), ValueError, "out: not given"),
    "no lse": (dict(lse=None), ValueError, "lse: not given"),
    "lse shape": (dict(lse=lse[:, :, :5]), ValueError, "lse: shape (2, 4, 5), expected (2, 4, 6)"),
    "lse type": (dict(lse=lse.astype(np.float64)), TypeError, "lse: type float64, expected float32"),
    "dlse shape": (dict(dlse=lse[:1]), ValueError, "dlse: shape (1, 4, 6), expected (2, 4, 6)"),
    "gradients beyond all memory": (
        dict(q=broadcast(1, 1, MOST, 8), k=broadcast(1, 1, 1, 8), v=broadcast(1, 1, 1, 8)),
        ValueError,
        "dout: shape (2, 4, 6, 8), expected (1, 1, 2147483647, 8)",
    ),
    "a rule with gradients beyond all memory": (
        dict(
            q=broadcast(1, 1, MOST, 8),
            k=broadcast(1, 1, 1, 8),
            v=broadcast(1, 1, 1, 8),
            out=broadcast(1, 1, MOST, 8),
            dout=broadcast(1, 1, MOST, 8),
            lse=broadcast(1, 1, MOST),
            rule=af.documents(i32(0), i32(0)),
        ),
        ValueError,
        "rule documents: ids_q has 1 entries, expected 2147483647 as the queries",
    ),
    "paged": (
        dict(page_table=i32(0, 1).reshape(2, 1), k=np.zeros((2, 5, 2, 8), "f4"), v=np.zeros((2, 5, 2, 8), "f4")),
        ValueError,
        "page_table: given to backward, expected keys and values without pages",
    ),
    "lse a list": (dict(lse=[0.0]), TypeError, "lse: type list, expected an array (NumPy, or one with __dlpack__)"),
}


@pytest.mark.parametrize("name", wrong_calls.CALLS)
def test_what_every_front_end_refuses(name):
    kind, line, _ = wrong_calls.CALLS[name]
    arrays, options = wrong_calls.arguments(name, np.asarray)

    def call(function, **result):
        given = dict(options)
        if "rule" in given:
            given["rule"] = af.parse_rule(given["rule"], given.pop("tables", None))
        function(*arrays, **given, **result)

    out = np.full((2, 4, 6, 8), 7.0, np.float32)
    check(lambda: call(af.attention, out=out), kind, line)
    assert (out == 7.0).all()
    check(lambda: call(af.attention), kind, line)
    if "return_lse" not in options:
        check(lambda: call(af.plan), kind, line)


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


@pytest.mark.parametrize("name", list(BACKWARD))
def test_backward(name):
    changes, kind, line = BACKWARD[name]
    check(
        lambda: af.attention_backward(**{"dout": q, "q": q, "k": k, "v": v, "out": q, "lse": lse, **changes}),
        kind,
        line,
    )


class Wrong:
    """Nothing that any option could be."""

    def __bool__(self):
        raise RuntimeError


@pytest.mark.parametrize("call", [af.attention, af.attention_backward, af.plan])
def test_each_option_arrives_under_its_name(call):
    arrays = dict(dout=q, q=q, k=k, v=v, out=q, lse=lse)
    parameters = inspect.signature(call).parameters
    options = [name for name in parameters if name not in (*arrays, "dlse", "return_lse")]
    assert len(options) == (18 if call is af.plan else 19)
    for option in options:
        with pytest.raises(TypeError, match=f"^{option}: type Wrong, expected "):
            call(**{name: array for name, array in arrays.items() if name in parameters}, **{option: Wrong()})


def test_results_beyond_all_memory():
    many = 2**15
    thin, wide = (broadcast(many, many, many, channels) for channels in (1, 256))
    thin_keys, wide_keys = (broadcast(many, many, 1, channels) for channels in (1, 256))
    line = "not enough memory for float32 of shape (32768, 32768, 32768, 256)"
    for kind in (np.asarray, Exporter):
        with pytest.raises(MemoryError, match=f"^out: {re.escape(line)}$"):
            af.attention(*map(kind, (thin, thin_keys, wide_keys)))
    with pytest.raises(MemoryError, match=f"^dq: {re.escape(line)}$"):
        af.attention_backward(thin, wide, wide_keys, thin_keys, thin, broadcast(many, many, many))


def test_arguments_that_do_not_exist():
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        af.attention(q, k, v, mask=None)
    with pytest.raises(TypeError, match="takes from 1 to 3 positional arguments but 4"):
        af.attention(q, k, v, af.full())


def test_a_plan_made_before_a_table_was_changed():
    ids, map = np.array([0, 0, 1, 1, 1, 0]), np.eye(2, dtype=bool)
    q = np.ones((1, 1, 6, 8), np.float32)
    for rule, table in ((af.documents(ids) & af.causal(), ids), (af.blocks(map, 3, 3), map)):
        plan = af.plan(q, q, q, rule=rule)
        af.attention(q, q, q, rule=rule, plan=plan)
        table[0] = 1
        check(
            lambda: af.attention(q, q, q, rule=rule, plan=plan),
            ValueError,
            f"plan: made before a table of rule {rule} was changed",
        )


class Broken:
    """Claims to speak DLPack, and does not."""

    def __init__(self, answer):
        self.answer = answer

    def __dlpack_device__(self):
        return self.answer()

    def __dlpack__(self, **_):
        raise RuntimeError("line 1\nline 2")


@pytest.mark.parametrize("answer", [lambda: 1 / 0, lambda: "x", lambda: (1, 0)])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_an_array_that_breaks_while_it_is_asked(name, answer):
    arrays = {"query": q, "key": k, "value": v} | {name: Broken(answer)}
    with pytest.raises((ValueError, TypeError)) as caught:
        af.attention(*arrays.values())
    assert str(caught.value).startswith(f"{name}: ") and "\n" not in str(caught.value)
