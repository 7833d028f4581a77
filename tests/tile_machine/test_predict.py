"""tile_machine.predict knows what a call asks for: it takes the call's own arguments, and its report is the call's."""

import math

import anyflash as af
import numpy as np
import pytest
from anyflash import tile_machine as tm

MACHINE = tm.Machine(name="small", tiles=12, memory_per_tile=1 << 18, sync_cycles=20)
RULES = (af.full(), af.causal(), af.local(9), af.window(20, 3), af.sink(3) | af.local(4), af.prefix(20) | af.causal())


def shapes(rng, layout):
    """Of q and k, and the channels of v."""
    batch, kv_heads, each = (int(rng.integers(1, 4)) for _ in range(3))
    heads, (queries, keys), (d, d_v) = kv_heads * each, rng.integers(1, 150, 2), rng.integers(1, 40, 2)
    if layout == "qkv":
        return (3, heads, queries, d), None, None
    if layout == "thd":
        return (queries, heads, d), (keys, kv_heads, d), d_v
    if layout == "bshd":
        return (batch, queries, heads, d), (batch, keys, kv_heads, d), d_v
    if layout == "bhds":
        return (batch, heads, d, queries), (batch, kv_heads, d, keys), d_v
    return (batch, heads, queries, d), (batch, kv_heads, keys, d), d_v


def cut(rng, tokens, documents):
    ends = np.sort(rng.integers(0, tokens + 1, documents - 1))
    return np.concatenate(([0], ends, [tokens])).astype(np.int64)


def any_call(rng):
    """Arrays and options of a call."""
    layout = ("bhsd", "bshd", "bhds", "qkv", "thd")[rng.integers(5)]
    q_shape, k_shape, d_v = shapes(rng, layout)
    dtype = ("float16", "float32")[rng.integers(2)]
    draw = lambda shape: rng.standard_normal(shape).astype(dtype)
    q, k, v = draw(q_shape), None, None
    if k_shape is not None:
        v_shape = list(k_shape)
        v_shape[2 if layout == "bhds" else -1] = d_v
        k, v = draw(k_shape), draw(v_shape)
    heads, queries = {"bshd": (2, 1), "bhds": (1, 3), "thd": (1, 0)}.get(layout, (1, 2))
    options = dict(rule=RULES[rng.integers(len(RULES))], layout=layout, deterministic=bool(rng.integers(4) == 0))
    if rng.integers(3) == 0:
        options["softcap"] = 3.0
    if rng.integers(3) == 0:
        options["sink"] = rng.standard_normal(q_shape[heads]).astype(dtype)
    if rng.integers(3) == 0:
        options["alibi_slopes"] = rng.random(q_shape[heads]).astype(np.float32)
    if rng.integers(3) == 0 and layout != "thd":
        keys = q_shape[2] if k is None else k_shape[queries]
        options["bias"] = rng.standard_normal((1, q_shape[heads], q_shape[queries], keys)).astype(np.float32)
    if layout == "thd":
        documents = int(rng.integers(1, 4))
        options.update(cu_seqlens_q=cut(rng, len(q), documents), cu_seqlens_k=cut(rng, len(k), documents))
    elif layout != "qkv" and rng.integers(3) == 0:
        options["key_lengths"] = rng.integers(0, k_shape[queries] + 1, len(k)).astype(np.int32)
    return q, k, v, options


def predicted(q, k, v, options, **asked):
    d_v = None if v is None else v.shape[2 if options["layout"] == "bhds" else -1]
    k_shape = None if k is None else k.shape
    return tm.predict(q.shape, k_shape, d_v=d_v, dtype=str(q.dtype), machine=MACHINE, **options, **asked)


def check(got, used):
    assert math.isclose(got.cycles, used.report.cycles, rel_tol=0.05)
    assert got.peak_bytes == used.report.peak_bytes and got.num_chunks_kv == used.report.num_chunks_kv


def least(call):
    """The least memory_budget, which the error names."""
    with pytest.raises(ValueError) as error:
        call(memory_budget=0)
    return int(str(error.value).rsplit(" ", 1)[1])


@pytest.mark.parametrize("index", range(25))
def test_the_report_is_that_of_the_call(index):
    rng = np.random.default_rng(index)
    q, k, v, options = any_call(rng)
    exact, lse = af.attention(q, k, v, return_lse=True, **options)
    large = lse.copy()
    large.flat[rng.integers(large.size)] = 40
    dout = rng.standard_normal(exact.shape).astype(q.dtype)
    with tm.use(MACHINE) as used:
        of_forward = least(lambda **asked: predicted(q, k, v, options, **asked))
        of_backward = least(lambda **asked: predicted(q, k, v, options, backward=True, **asked))
        for times in (None, 1, 1 + rng.random(), 3):
            bound = {} if times is None else dict(memory_budget=int(times * of_forward))
            for return_lse in (False, True, "lm"):
                got = predicted(q, k, v, options, return_lse=return_lse, **bound)
                af.attention(q, k, v, return_lse=return_lse, **options, **bound)
                check(got, used)
            bound = {} if times is None else dict(memory_budget=int(times * of_backward))
            for dlse in (None, np.ones_like(lse)):
                for of_call in (lse, large):
                    asked = dict(dlse=dlse is not None, large_lse=of_call is large)
                    got = predicted(q, k, v, options, backward=True, **asked, **bound)
                    af.attention_backward(dout, q, k, v, exact, of_call, dlse=dlse, **options, **bound)
                    check(got, used)


def test_pages():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 3, 16)).astype(np.float32)
    k, v = rng.standard_normal((2, 5, 8, 2, 16)).astype(np.float32)
    options = dict(layout="bhsd", page_table=np.array([[4, 0], [2, 1]], np.int32), key_lengths=np.array([13, 9]))
    got = predicted(q, k, v, options)
    with tm.use(MACHINE) as used:
        af.attention(q, k, v, **options)
        check(got, used)


def test_candidates_take_the_same():
    asked = dict(machine=MACHINE, memory_budget=20_000, backward=True, dlse=True, large_lse=True, softcap=2.0)
    shape = (2, 64, 3, 16)
    best = tm.candidates(shape, layout="bshd", **asked)[0]
    assert best.cycles == tm.predict(shape, layout="bshd", **asked).cycles
    assert best.cycles > tm.candidates(shape, layout="bshd", **{**asked, "large_lse": False})[0].cycles
