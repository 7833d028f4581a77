"""af.attention, af.attention_backward and af.plan as a Python program sees them."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import anyflash as af
import ml_dtypes
import numpy as np
import pytest
from python_helpers import numbers, textbook, textbook_gradients


@pytest.fixture
def qkv():
    return numbers(1, 2, 3, 33, 24), numbers(2, 2, 3, 41, 24), numbers(3, 2, 3, 41, 20)


def close(got, expected, tolerance=2e-6):
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance)


def test_the_result_is_the_textbook_s(qkv):
    out, lse = af.attention(*qkv, return_lse=True)
    expected_out, expected_lse = textbook(*qkv)
    assert out.dtype == np.float32 and lse.dtype == np.float32 and lse.shape == (2, 3, 33)
    close(out, expected_out)
    close(lse, expected_lse)


def test_l_and_m_make_up_lse(qkv):
    out, lse = af.attention(*qkv, return_lse=True)
    same, row_sum, row_max = af.attention(*qkv, return_lse="lm")
    np.testing.assert_array_equal(out, same)
    close(row_max + np.log(row_sum), lse)


@pytest.mark.parametrize(
    "dtype, tolerance, statistics",
    [
        ("float16", 2e-3, "float32"),
        (ml_dtypes.bfloat16, 2e-2, "float32"),
        ("float32", 2e-6, "float32"),
        ("float64", 1e-14, "float64"),
    ],
)
def test_every_type_comes_back_as_itself(qkv, dtype, tolerance, statistics):
    q, k, v = (x.astype(dtype) for x in qkv)
    out, lse = af.attention(q, k, v, return_lse=True)
    assert out.dtype == np.dtype(dtype) and lse.dtype == np.dtype(statistics)
    close(out, textbook(q, k, v)[0], tolerance)
    gradients = af.attention_backward(out, q, k, v, out, lse)
    expected = textbook_gradients(out, q, k, v)
    for got, wanted, like in zip(gradients[:3], expected, (q, k, v)):
        assert got.dtype == np.dtype(dtype) and got.shape == like.shape
        close(got, wanted, 5 * tolerance)


def test_gradients_that_nobody_asked_for_are_none(qkv):
    q, k, v = qkv
    out, lse = af.attention(q, k, v, return_lse=True)
    gradients = af.attention_backward(out, q, k, v, out, lse)
    assert isinstance(gradients, af.Gradients) and gradients._fields == ("dq", "dk", "dv", "dbias", "dsink")
    assert gradients.dbias is None and gradients.dsink is None
    bias, sink = numbers(5, 1, 3, 33, 41), numbers(6, 3)
    out, lse = af.attention(q, k, v, bias=bias, sink=sink, return_lse=True)
    gradients = af.attention_backward(out, q, k, v, out, lse, bias=bias, sink=sink)
    assert gradients.dbias.shape == bias.shape and gradients.dsink.shape == sink.shape


def test_the_gradient_through_lse_is_that_of_the_formula(qkv):
    q, k, v = (x.astype(np.float64) for x in qkv)
    dlse = numbers(7, 2, 3, 33, dtype=np.float64)
    out, lse = af.attention(q, k, v, return_lse=True)
    dq = af.attention_backward(np.zeros_like(out), q, k, v, out, lse, dlse=dlse).dq
    step = 1e-6
    direction = numbers(8, *q.shape, dtype=np.float64)
    ahead, behind = (textbook(q + s * direction, k, v)[1] for s in (step, -step))
    close((dq * direction).sum(), ((ahead - behind) * dlse).sum() / (2 * step), 1e-6)


@pytest.mark.parametrize("layout", ["bshd", "bhds"])
@pytest.mark.parametrize("sequence", [(12,), (3, 4), (2, 3, 2)])
def test_layouts_are_the_same_numbers_in_other_places(layout, sequence):
    plain = [numbers(i, 2, 3, *sequence, 8) for i in range(3)]
    heads, channels = {"bshd": (-2, -1), "bhds": (1, 2)}[layout]

    def there(x):
        return np.ascontiguousarray(np.moveaxis(x, (1, -1), (heads, channels)))

    out, lse = af.attention(*plain, rule=af.causal(), return_lse=True)
    moved, moved_lse = af.attention(*map(there, plain), rule=af.causal(), layout=layout, return_lse=True)
    assert moved.shape == there(out).shape
    close(moved, there(out))
    close(moved_lse, lse)
    gradients = af.attention_backward(out, *plain, out, lse, rule=af.causal())
    elsewhere = af.attention_backward(moved, *map(there, plain), moved, moved_lse, rule=af.causal(), layout=layout)
    for got, expected in zip(elsewhere[:3], gradients[:3]):
        close(got, there(expected), 1e-5)


def test_packed_qkv():
    qkv = numbers(1, 3, 4, 19, 16)
    out, lse = af.attention(qkv, layout="qkv", rule=af.causal(), return_lse=True)
    expected, expected_lse = textbook(*qkv[:, :, None], np.tri(19, dtype=bool))
    assert out.shape == (4, 19, 16) and lse.shape == (4, 19)
    close(out, expected[:, 0])
    close(lse, expected_lse[:, 0])
    gradients = af.attention_backward(out, qkv, None, None, out, lse, layout="qkv", rule=af.causal())
    assert gradients.dq.shape == qkv.shape and gradients.dk is None and gradients.dv is None
    close(gradients.dq[:, :, None], textbook_gradients(out[:, None], *qkv[:, :, None], np.tri(19, dtype=bool)), 1e-5)


def test_documents_end_to_end():
    lengths = np.array([0, 5, 5, 18], np.int32)
    q, k, v = (numbers(i, 18, 2, 8) for i in range(3))
    out, lse = af.attention(q, k, v, layout="thd", cu_seqlens_q=lengths, cu_seqlens_k=lengths, return_lse=True)
    assert out.shape == (18, 2, 8) and lse.shape == (2, 18)
    for first, last in ((0, 5), (5, 18)):
        one = [x[first:last].transpose(1, 0, 2)[None] for x in (q, k, v)]
        expected, expected_lse = textbook(*one)
        close(out[first:last].transpose(1, 0, 2)[None], expected)
        close(lse[None, :, first:last], expected_lse)


def test_a_paged_cache_is_the_keys_it_holds():
    q, k, v = numbers(1, 2, 2, 3, 8), numbers(2, 2, 2, 16, 8), numbers(3, 2, 2, 16, 8)
    table = np.array([[3, 0, 2, 1], [4, 7, 5, 6]], np.int32)
    pages_k, pages_v = np.empty((8, 4, 2, 8), np.float32), np.empty((8, 4, 2, 8), np.float32)
    for b in range(2):
        for page in range(4):
            pages_k[table[b, page]] = k[b, :, 4 * page : 4 * page + 4].swapaxes(0, 1)
            pages_v[table[b, page]] = v[b, :, 4 * page : 4 * page + 4].swapaxes(0, 1)
    lengths = np.array([16, 9], np.int32)
    out = af.attention(q, pages_k, pages_v, page_table=table, key_lengths=lengths)
    close(out, textbook(q, k, v, np.arange(16) < lengths[:, None, None, None])[0])


def test_strides_of_every_kind(qkv):
    q, k, v = qkv
    expected = af.attention(q, k, v)
    close(af.attention(q[..., ::-1][..., ::-1], k.swapaxes(1, 2).copy().swapaxes(1, 2), v[::-1].copy()[::-1]), expected)
    wide = np.zeros((2, 3, 82, 24), np.float32)
    wide[:, :, ::2] = k
    close(af.attention(q, wide[:, :, ::2], v), expected)
    backwards = np.ascontiguousarray(k[:, :, ::-1])[:, :, ::-1]
    close(af.attention(q, backwards, v), expected)
    one_head = np.broadcast_to(k[:, :1], k.shape)
    close(af.attention(q, one_head, v), textbook(q, one_head, v)[0])


def test_read_only_arrays_are_read(qkv):
    expected = af.attention(*qkv)
    for x in qkv:
        x.flags.writeable = False
    np.testing.assert_array_equal(af.attention(*qkv), expected)


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 0, 5, 8), (2, 2, 0, 8)])
def test_nothing_in_gives_nothing_out(shape):
    q = np.zeros(shape, np.float32)
    out, lse = af.attention(q, q, q, return_lse=True)
    assert out.shape == shape and lse.shape == shape[:3]
    assert af.attention_backward(out, q, q, q, out, lse).dq.shape == shape


def test_no_keys_give_zero():
    q, none = numbers(1, 1, 2, 5, 8), np.zeros((1, 2, 0, 8), np.float32)
    out, lse = af.attention(q, none, none, return_lse=True)
    assert (out == 0).all() and (lse == -np.inf).all()


def test_out_is_written_and_returned(qkv):
    out = np.full((2, 3, 33, 20), np.nan, np.float32)
    assert af.attention(*qkv, out=out) is out
    close(out, textbook(*qkv)[0])
    holder = np.full((2, 33, 3, 40), np.nan, np.float32)
    view = holder.swapaxes(1, 2)[..., ::2]
    both = af.attention(*qkv, out=view, return_lse=True)
    assert both[0] is view and np.isnan(holder[..., 1::2]).all()
    np.testing.assert_array_equal(view, out)


def test_a_plan_gives_the_same_result_again(qkv):
    rule = af.causal() & af.local(7)
    plan = af.plan(*qkv, rule=rule, align="none_end")
    assert "causal()" in repr(plan)
    plain = af.attention(*qkv, rule=rule, align="none_end", return_lse=True)
    planned = af.attention(*qkv, rule=rule, align="none_end", plan=plan, return_lse=True)
    for a, b in zip(plain, planned):
        np.testing.assert_array_equal(a, b)
    first = af.attention_backward(plain[0], *qkv, *plain, rule=rule, align="none_end")
    second = af.attention_backward(plain[0], *qkv, *plain, rule=rule, align="none_end", plan=plan)
    for a, b in zip(first[:3], second[:3]):
        np.testing.assert_array_equal(a, b)


def test_a_plan_serves_the_same_rule_written_anew():
    lengths = np.array([0, 5, 18], np.int32)
    q = numbers(1, 18, 2, 8)
    call = dict(layout="thd", cu_seqlens_q=lengths, cu_seqlens_k=lengths)
    plan = af.plan(q, q, q, rule=af.causal(), **call)
    expected = af.attention(q, q, q, rule=af.causal(), **call)
    np.testing.assert_array_equal(af.attention(q, q, q, rule=af.causal(), plan=plan, **call), expected)
    with pytest.raises(ValueError, match="^plan: made for rule causal"):
        af.attention(q, q, q, rule=af.local(2), plan=plan, **call)
    with pytest.raises(ValueError, match="^plan: made for other cu_seqlens_q"):
        af.attention(q, q, q, rule=af.causal(), plan=plan, **call | dict(cu_seqlens_q=np.array([0, 6, 18], np.int32)))


def test_a_plan_keeps_the_tables_of_its_rule_alive():
    q = numbers(1, 1, 1, 64, 8)
    mask = np.random.default_rng(0).random((64, 64)) < 0.5
    mask[:, 0] = True
    rule = af.dense(mask)
    expected = af.attention(q, q, q, rule=rule)
    gone = weakref.ref(mask)
    plan = af.plan(q, q, q, rule=rule)
    del mask, rule
    gc.collect()
    assert gone() is not None
    np.testing.assert_array_equal(af.attention(q, q, q, rule=af.dense(gone())), expected)
    del plan
    gc.collect()
    assert gone() is None


def test_a_result_is_its_own_memory(qkv):
    q, k, v = qkv
    expected, _ = textbook(q, k, v)
    out = af.attention(q, k, v)
    for x in (q, k, v):
        x.fill(np.nan)
    assert out.base is None and not any(np.shares_memory(out, x) for x in (q, k, v))
    close(out, expected)


def test_a_call_leaves_no_references():
    q = numbers(1, 1, 1, 8, 8)
    gone = weakref.ref(q)
    out, lse = af.attention(q, q, q, return_lse=True)
    af.attention_backward(out, q, q, q, out, lse)
    with pytest.raises(TypeError):
        af.attention(q, q, "v")
    del q
    gc.collect()
    assert gone() is None


def test_threads_do_not_change_a_bit(qkv):
    one = af.attention(*qkv, threads=1)
    np.testing.assert_array_equal(one, af.attention(*qkv, threads=2))
    np.testing.assert_array_equal(one, af.attention(*qkv, threads=7, deterministic=True))


def test_calls_from_many_threads_do_not_disturb_each_other():
    inputs = [numbers(i, 1, 2, 20 + i, 16) for i in range(24)]
    rule = af.causal() | af.sink(2)

    def both_ways(x):
        out, lse = af.attention(x, x, x, rule=rule, return_lse=True, threads=1)
        return out, *af.attention_backward(out, x, x, x, out, lse, rule=rule, threads=1)[:3]

    alone = [both_ways(x) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        for expected, got in zip(alone * 4, pool.map(both_ways, inputs * 4)):
            for a, b in zip(expected, got):
                np.testing.assert_array_equal(a, b)


def test_other_threads_run_during_a_call():
    q = numbers(1, 1, 4, 4096, 64)
    worker = threading.Thread(target=lambda: [af.attention(q, q, q, threads=1) for _ in range(3)])
    worker.start()
    turns = 0
    while worker.is_alive():
        time.sleep(0.0005)
        turns += 1
    assert turns > 20, "the interpreter stood still during the calls"  # one turn a call, if it were locked


@pytest.mark.parametrize("queries", (2, 40))
def test_a_row_whose_scores_are_minus_infinity_is_empty_beside_a_nan_too(queries):
    q, k, v = np.ones((1, 1, queries, 8), np.float32), *np.ones((2, 1, 1, 70, 8), np.float32)
    v[0, 0, 3] = np.nan
    bias = np.full((1, 1, 1, 70), -np.inf, np.float32)
    out, lse = af.attention(q, k, v, bias=bias, return_lse=True)
    assert not out.any() and (lse == -np.inf).all()
    bias[..., 5] = 0
    assert np.isnan(af.attention(q, k, v, bias=bias)).all()
