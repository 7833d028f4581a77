"""The ends of the ranges of numbers and coordinates: what the formula gives there, by hand."""

import itertools

import anyflash as af
import ml_dtypes
import numpy as np
import pytest
from devices import from_device, to_device

FEW_OR_MANY = (1, 40)  # few queries go a way of their own


def on_device(call, *arrays, **options):
    moved = {name: to_device(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    return call(*map(to_device, arrays), **moved)


def attention(*arrays, **options):
    return map(from_device, on_device(af.attention, *arrays, **options))


def attention_backward(*arrays, **options):
    gradients = on_device(af.attention_backward, *arrays, **options)
    return type(gradients)(*map(from_device, gradients))


@pytest.mark.parametrize("queries", FEW_OR_MANY)
@pytest.mark.parametrize(
    "type, large, tiny, scale",
    [(np.float32, 2.0**17, 2.0**-100, 2.0**113), (np.float64, 2.0**33, 2.0**-1000, 2.0**993)],
)
def test_a_scale_that_only_products_can_bear(queries, type, large, tiny, scale):
    q, k = np.zeros((1, 1, queries, 64), type), np.zeros((1, 1, 40, 64), type)
    q[..., :2], k[..., 0], k[..., 1] = large, tiny, -tiny  # scale * q is more than the type holds, the scores are 0
    v = np.arange(40 * 8, dtype=type).reshape(1, 1, 40, 8)
    out, lse = attention(q, k, v, scale=scale, return_lse=True)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(2, keepdims=True), out.shape), rtol=1e-5)
    np.testing.assert_allclose(lse, np.log(40), rtol=1e-5)
    grads = attention_backward(np.ones_like(out), q, k, v, out, lse, scale=scale)
    np.testing.assert_allclose(grads.dv, queries / 40, rtol=1e-5)


@pytest.mark.parametrize("queries", FEW_OR_MANY)
@pytest.mark.parametrize(
    "type, size, scale, tolerance",
    [
        (np.float32, 2.0**63, 2.0**-127, 1e-5),
        (np.float64, 2.0**511, 2.0**-1023, 1e-12),
        (ml_dtypes.bfloat16, 2.0**63, 2.0**-127, 2e-2),
    ],
)
def test_the_smallest_scales(queries, type, size, scale, tolerance):
    q, k = np.zeros((1, 1, queries, 64), type), np.zeros((1, 1, 40, 64), type)
    weights = (np.arange(40) % 16 / 8).astype(type)  # scores are half of these
    q[..., 0], k[..., 0] = size, size * weights
    v = (np.arange(40 * 8).reshape(1, 1, 40, 8) % 32).astype(type)
    out, lse = attention(q, k, v, scale=scale, return_lse=True)
    p = np.exp(weights.astype(float) / 2)
    np.testing.assert_allclose(
        out.astype(float), np.broadcast_to(p @ v.astype(float) / p.sum(), out.shape), rtol=tolerance
    )
    np.testing.assert_allclose(lse, np.log(p.sum()), rtol=tolerance)
    grads = attention_backward(np.ones_like(out), q, k, v, out, lse, scale=scale)
    np.testing.assert_allclose(grads.dv[0, 0, :, 0].astype(float), queries * p / p.sum(), rtol=tolerance)


@pytest.mark.parametrize("queries", (3, 100))
@pytest.mark.parametrize("type, tolerance", [(np.float32, 1e-5), (np.float16, 2e-3), (ml_dtypes.bfloat16, 1e-2)])
@pytest.mark.parametrize("causal", (False, True))
def test_a_scale_that_rounds_to_0(queries, type, tolerance, causal):
    """1e-46 is no number of float32 that is computed in: all scores are 0, and every visible key counts alike."""
    rng = np.random.default_rng(queries)
    q, k, v, dout = (rng.standard_normal((1, 2, n, 64)).astype(type) for n in (queries, 40, 40, queries))
    options = dict(rule=af.causal() if causal else af.full(), scale=1e-46)
    out, lse = attention(q, k, v, return_lse=True, **options)
    grads = attention_backward(dout, q, k, v, out, lse, **options)
    mask = np.tri(queries, 40) if causal else np.ones((queries, 40))
    p = mask / mask.sum(1, keepdims=True)
    bound = dict(rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(out.astype(float), p @ v.astype(float), **bound)
    np.testing.assert_allclose(lse, np.broadcast_to(np.log(mask.sum(1)), lse.shape), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads.dv.astype(float), p.T @ dout.astype(float), **bound)
    for x in (grads.dq, grads.dk):
        np.testing.assert_allclose(x.astype(float), 0, atol=1e-40)


@pytest.mark.parametrize("queries", FEW_OR_MANY)
@pytest.mark.parametrize("type, tolerance", [(np.float32, 1e-4), (ml_dtypes.bfloat16, 3e-2)])
def test_the_largest_scale(queries, type, tolerance):
    scale = float(np.finfo(np.float32).max)
    q, k = np.zeros((1, 1, queries, 64), type), np.zeros((1, 1, 40, 64), type)
    weights = 1 + np.arange(40) % 16 / 8
    q[..., 0], k[..., 0] = 2.0**-63, (2.0**-62 * weights).astype(type)
    v = (np.arange(40 * 8).reshape(1, 1, 40, 8) % 32).astype(type)
    out, lse = attention(q, k, v, scale=scale, return_lse=True)
    scores = scale * 2.0**-125 * weights
    p = np.exp(scores - scores.max())
    np.testing.assert_allclose(
        out.astype(float), np.broadcast_to(p @ v.astype(float) / p.sum(), out.shape), rtol=tolerance
    )
    np.testing.assert_allclose(lse, scores.max() + np.log(p.sum()), rtol=tolerance)


@pytest.mark.parametrize("queries", (8, 40))
def test_distances_far_from_the_origin(queries):
    """ALiBi's distances are small beyond 2^24, where float32 has no odd numbers any more."""
    keys = 2**24 + 9
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 1, queries, 1), np.float32)
    k, v = (np.broadcast_to(rng.standard_normal((1, 1, 1, 1), np.float32), (1, 1, keys, 1)).copy() for _ in range(2))
    v[0, 0, -50:, 0] = rng.standard_normal(50)
    out, lse = attention(
        q, k, v, rule=af.local(5), align="none_end", alibi_slopes=np.ones(1, np.float32), scale=0, return_lse=True
    )
    x, y = np.arange(keys - queries, keys), np.arange(keys)
    for i in range(queries):
        near = y[max(0, x[i] - 4) : x[i] + 5]
        weight = np.exp(-np.abs(near - x[i]).astype(float))
        np.testing.assert_allclose(out[0, 0, i, 0], weight @ v[0, 0, near, 0] / weight.sum(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse[0, 0, i], np.log(weight.sum()), rtol=1e-5)


@pytest.mark.parametrize("queries", FEW_OR_MANY)
@pytest.mark.parametrize("type", (np.float32, np.float64))
def test_a_sink_above_scores_of_minus_infinity(queries, type):
    """Query 0 sees keys whose bias is -inf: the sink is all its softmax holds. The last query sees no key at all."""
    q, k, v = (np.ones((1, 1, n, 4), type) for n in (queries, 70, 70))
    bias = np.zeros((1, 1, queries, 70), type)
    bias[0, 0, 0] = -np.inf
    sink = np.array([2], type)
    mask = np.ones((queries, 70), bool)
    if queries > 1:
        mask[-1] = False
    options = dict(bias=bias, sink=sink, rule=af.dense(mask))
    out, row_sum, row_max = attention(q, k, v, return_lse="lm", **options)
    assert np.all(out[0, 0, 0] == 0) and row_sum[0, 0, 0] == 1 and row_max[0, 0, 0] == 2
    out, lse = attention(q, k, v, return_lse=True, **options)
    assert lse[0, 0, 0] == 2
    dlse = np.zeros_like(lse)
    dlse[0, 0, 0] = 3
    if queries > 1:
        assert lse[0, 0, -1] == -np.inf and np.all(out[0, 0, -1] == 0)
        dlse[0, 0, -1] = 5
    grads = attention_backward(np.zeros_like(out), q, k, v, out, lse, dlse=dlse, **options)
    assert grads.dsink[0] == 3
    assert np.all(grads.dq == 0) and np.all(grads.dk == 0) and np.all(grads.dv == 0) and np.all(grads.dbias == 0)


def test_scores_and_sink_of_minus_infinity():
    q = np.ones((1, 1, 3, 4), np.float32)
    infinite = np.full((1, 1, 1, 1), -np.inf, np.float32)
    out, lse = attention(q, q, q, bias=infinite, sink=np.array([-np.inf], np.float32), return_lse=True)
    assert np.all(out == 0) and np.all(lse == -np.inf)


@pytest.mark.parametrize("type", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("queries", FEW_OR_MANY)
def test_scores_of_minus_infinity_and_a_sink_that_is_nan(queries, type):
    q, k = np.zeros((1, 2, queries, 8), type), np.zeros((1, 2, 100, 8), type)
    sink = np.array([np.nan, 2], np.float32)
    out, lse = attention(q, k, k, bias=np.full((1, 1, 1, 1), -np.inf, np.float32), sink=sink, return_lse=True)
    assert np.isnan(out[0, 0]).all() and np.isnan(lse[0, 0]).all()
    assert not out[0, 1].any() and (lse[0, 1] == 2).all()


def exactly(q, k, v, sink, mask):
    """Attention in longdouble, scale 1: out, what its terms come to without their signs, row_sum, row_max."""
    q, k, v, sink = (x.astype(np.longdouble) for x in (q, k, v, sink))
    group = q.shape[1] // k.shape[1]
    scores = np.where(mask, np.einsum("bhid,bhjd->bhij", q, k.repeat(group, 1)), -np.inf)
    largest = np.maximum(scores.max(-1), sink[:, None])
    p = np.exp(scores - largest[..., None])
    total = p.sum(-1) + np.exp(sink[:, None] - largest)
    p, v = p / total[..., None], v.repeat(group, 1)
    return p @ v, p @ np.abs(v), total, largest


@pytest.mark.parametrize("queries", (1, 3, 70))
@pytest.mark.parametrize("type, tolerance", [(np.float32, 1e-5), (np.float64, 1e-13), (ml_dtypes.bfloat16, 2e-2)])
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("columns", (slice(None), slice(0, 1), slice(-1, None)))
def test_values_near_the_largest_number(queries, type, tolerance, causal, columns):
    """Sums of P V, before they are divided, are more than the type holds: in some rows, whose scores are alike, and not
    in others, whose scores are far apart."""
    keys, rng = 2500, np.random.default_rng(queries)
    draw = lambda *shape: rng.standard_normal(shape).astype(type)
    q, k, v = draw(2, 4, queries, 8), draw(2, 2, keys, 8), draw(2, 2, keys, 40)
    q *= rng.choice([0, 1, 6], (2, 4, queries, 1)).astype(type)
    v[..., columns] = np.float64(ml_dtypes.finfo(type).max) * 0.98
    v[..., 1] *= np.resize([1, -1], keys).astype(type)
    sink = np.array([-2, 3, 9, 40], np.float32 if type == ml_dtypes.bfloat16 else type)
    mask = np.tri(queries, keys, keys - queries, bool) if causal else np.ones((queries, keys), bool)
    rule = af.causal() if causal else af.full()
    out, row_sum, row_max = attention(q, k, v, rule=rule, align="none_end", scale=1.0, sink=sink, return_lse="lm")
    exact, size, total, largest = exactly(q, k, v, sink, mask)
    np.testing.assert_allclose(row_max, largest.astype(float), rtol=1e-5)
    np.testing.assert_allclose(row_sum, total.astype(float), rtol=1e-4)
    assert np.all(np.abs(out.astype(np.longdouble) - exact) <= tolerance * size)


@pytest.mark.parametrize("queries", FEW_OR_MANY)
@pytest.mark.parametrize("score", (1e3, 1e5, 1e8, 1e10, -1e30))
def test_values_near_the_largest_number_at_large_scores(queries, score):
    """No number a little above their LSE is near it."""
    q, k = np.full((1, 1, queries, 1), score, np.float32), np.ones((1, 1, 50, 1), np.float32)
    v = np.full((1, 1, 50, 3), np.finfo(np.float32).max * 0.999, np.float32)
    out = from_device(on_device(af.attention, q, k, v, scale=1.0))
    np.testing.assert_allclose(out, np.full_like(out, v[0, 0, 0, 0]), rtol=1e-5)


@pytest.mark.parametrize("queries", FEW_OR_MANY)
@pytest.mark.parametrize("keys", (2, 3, 40, 255, 1000))
@pytest.mark.parametrize("type_", (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
def test_a_mean_of_the_largest_number(queries, keys, type_):
    """However its weights are rounded, it is no infinity."""
    rng, info = np.random.default_rng(keys), ml_dtypes.finfo(type_)
    q, k = (rng.standard_normal((1, 2, n, 8)).astype(type_) for n in (queries, keys))
    v = np.full((1, 2, keys, 8), info.max, type_)
    v[..., 1] *= type_(-1)
    for scale in (0.0, 0.3, 3.0):
        out = from_device(on_device(af.attention, q, k, v, scale=scale)).astype(np.float64)
        expected = np.broadcast_to(v[:, :, :1], out.shape).astype(np.float64)
        np.testing.assert_allclose(out, expected, rtol=(2 if info.bits == 16 else 100) * float(info.eps))


@pytest.mark.parametrize("queries", (3, 40))
@pytest.mark.parametrize("value", (np.nan, np.inf, 3e38))
def test_what_stands_beside_a_number_that_overflows(queries, value):
    """Only query 1 sees the values that are not finite, or whose sum is not: the others keep their bits."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 1, n, 30), np.float32) for n in (queries, 1000, 1000))
    mask = rng.random((queries, 1000)) < 0.5
    mask[:, 500:600] = False
    mask[1] = True
    mask = af.dense(mask)
    clean, clean_lse = attention(q, k, v, rule=mask, return_lse=True)
    v[..., 500:600, 3] = value
    out, lse = attention(q, k, v, rule=mask, return_lse=True)
    assert np.array_equal(lse, clean_lse)
    assert np.isfinite(value) == np.isfinite(out[0, 0, 1, 3])
    out[0, 0, 1, 3] = clean[0, 0, 1, 3]
    np.testing.assert_allclose(out[0, 0, 1], clean[0, 0, 1], rtol=0, atol=1e-6)
    out[0, 0, 1] = clean[0, 0, 1]
    assert np.array_equal(out, clean)


@pytest.mark.parametrize("queries", FEW_OR_MANY)
@pytest.mark.parametrize("type_", (np.float32, ml_dtypes.bfloat16))
def test_an_infinity_with_a_small_weight(queries, type_):
    """A second walk, in which the weight 1.6e-38 may count as 0, takes nothing from what the first one found."""
    q, k, v = (np.zeros((1, 1, *shape), np.float32) for shape in ((queries, 1), (9, 1), (9, 2)))
    q[:] = 1
    k[0, 0, 0], v[0, 0, 1, 0], v[..., 1] = 87, np.inf, 1e33
    v[0, 0, 0, 1] = 0
    out = from_device(on_device(af.attention, *(x.astype(type_) for x in (q, k, v)), scale=1.0)).astype(np.float64)
    assert np.all(np.isposinf(out[..., 0]))
    np.testing.assert_allclose(out[..., 1], 8e33 * np.exp(-87.0), rtol=1e-4 if type_ == np.float32 else 2e-2)


@pytest.mark.parametrize("queries", FEW_OR_MANY)
@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
def test_values_that_are_not_finite_under_the_lowest_bias(queries, value):
    """As models mask rows that are padding: all scores are the type's lowest number, and every key counts alike."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 1, n, 8), np.float32) for n in (queries, 70, 70))
    bias = np.full((1, 1, queries, 70), np.finfo(np.float32).min, np.float32)
    v[0, 0, 5, 3] = value
    out = from_device(on_device(af.attention, q, k, v, bias=bias))
    assert np.array_equal(out[..., 3], np.full_like(out[..., 3], value), equal_nan=True)
    out, v = (np.delete(x, 3, -1) for x in (out, v))
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(2, keepdims=True), out.shape), rtol=0, atol=1e-5)


@pytest.mark.parametrize("queries", (1, 40, 130))
@pytest.mark.parametrize(
    "type_, by_bias", [(np.float16, True), *itertools.product((ml_dtypes.bfloat16, np.float32), (True, False))]
)
def test_rows_of_scores_near_the_lowest_number(queries, type_, by_bias):
    """Where all keys of a row have them, they count alike. Where some have, they weigh nothing."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((1, 2, n, 64)).astype(type_) for n in (queries, 304, 304))
    q *= type_(0.125)
    q[..., 0], k[..., 0] = 0, 0
    low = np.zeros((queries, 304), bool)
    low[::3] = True
    options = {}
    if by_bias:
        low[:, :200] = True
        options["bias"] = np.where(low, np.finfo(np.float32).min, 0).astype(np.float32)[None, None]
    else:
        q[:, :, ::3, 0], k[..., 0] = 2.0**64, -1.75 * 2.0**63
    out, lse = attention(q, k, v, scale=1.0, return_lse=True, **options)
    scores = np.where(low, -3e38, np.einsum("bhid,bhjd->bhij", q.astype(float), k.astype(float)))
    largest = scores.max(-1, keepdims=True)
    p = np.exp(scores - largest)
    total = p.sum(-1, keepdims=True)
    tolerance = 1e-5 if type_ == np.float32 else 2e-2
    np.testing.assert_allclose(out.astype(float), p / total @ v.astype(float), rtol=0, atol=tolerance)
    expected = (largest + np.log(total))[..., 0]
    np.testing.assert_allclose(lse, np.where(low.all(-1), lse, expected), rtol=0, atol=tolerance)
    assert (lse[:, :, ::3] < -2.9e38).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("queries", (1, 130))
@pytest.mark.parametrize("type_", (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
@pytest.mark.parametrize("size", (0, 512, 1024, 8192))
@pytest.mark.parametrize("rise", (12, 16, 24))
def test_scores_that_rise_from_large_ones(queries, type_, size, rise):
    """The maximum is raised while earlier keys still weigh something. Values of +1 and -1 in equal numbers cancel."""
    q, k, v = (np.zeros((1, 1, n, 64), type_) for n in (queries, 768, 768))
    q[..., 0], k[..., 0], q[..., 1], k[:, :, 128:, 1] = size, size, 1, rise
    v[:, :, 128:], v[:, :, 448:] = 1, -1
    out, lse = attention(q, k, v, scale=1.0, return_lse=True)
    np.testing.assert_allclose(out.astype(float), 0, atol=1e-3 if np.dtype(type_).itemsize == 2 else 1e-5)
    np.testing.assert_allclose(lse, size**2 + rise + np.log(640 + 128 * np.exp(-rise)), rtol=3e-7)


@pytest.mark.parametrize("queries", (1, 130))
@pytest.mark.parametrize("type_", (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
def test_a_sink_that_equals_a_large_score(queries, type_):
    q, k, v = (np.zeros((1, 1, n, 64), type_) for n in (queries, 200, 200))
    q[..., 0], k[:, :, 150, 0], v[:, :, 150] = 4096, 2048, 3
    sink = np.array([2.0**23], np.float64 if type_ == np.float64 else np.float32)
    out, row_sum, row_max = attention(q, k, v, scale=1.0, sink=sink, return_lse="lm")
    np.testing.assert_allclose(out.astype(float), 1.5, rtol=1e-5)
    np.testing.assert_allclose(row_max + np.log(row_sum), 2.0**23 + np.log(2), rtol=1e-7)


@pytest.mark.parametrize("queries", (1, 130))
@pytest.mark.parametrize("type_", (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
@pytest.mark.parametrize("size, rise", [(8192, 80), (10240, 80), (10240, 88), (14336, 88), (14336, 96)])
def test_a_rise_over_what_factors_can_say(queries, type_, size, rise):
    """By some 126 powers of two, where differences of scores are rounded to multiples of 8."""
    q, k, v = (np.zeros((1, 1, n, 64), type_) for n in (queries, 256, 256))
    q[..., 0], q[..., 1], k[..., 0], k[:, :, 200, 1], v[...], v[:, :, 200] = 8192, 1, size, rise, 1, 2
    out, lse = attention(q, k, v, scale=1.0, return_lse=True)
    assert (out == 2).all() and (lse == 8192 * size + rise).all()


@pytest.mark.parametrize("queries", (1, 130))
@pytest.mark.parametrize("type_", (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
@pytest.mark.parametrize("size", (5e9, 1e12, 1e30, 3.3e38))
def test_sinks_of_all_sizes(queries, type_, size):
    q, k, v = np.zeros((1, 2, queries, 64), type_), np.zeros((1, 2, 200, 64), type_), np.ones((1, 2, 200, 64), type_)
    options = dict(sink=np.array([size, -size], np.float32), return_lse=True)
    out, lse = attention(q, k, v, **options)
    assert (lse[:, 0] == np.float32(size)).all() and not out[:, 0].any() and (out[:, 1] == 1).all()
    np.testing.assert_allclose(lse[:, 1], np.log(200), rtol=1e-6)
    out, lse = attention(q, k, v, bias=np.full((1, 1, 1, 1), -np.inf, np.float32), **options)
    assert (lse == options["sink"][:, None]).all() and not out.any()


@pytest.mark.parametrize("queries", FEW_OR_MANY)
@pytest.mark.parametrize("type_, tolerance", [(np.float32, 2e-5), (np.float64, 2e-13), (ml_dtypes.bfloat16, 2e-2)])
@pytest.mark.parametrize("score", (0, 1e3, -1e4, 1e7, -1e9, "lowest"))
def test_gradients_at_large_scores(queries, type_, tolerance, score):
    """The scores are whole numbers and the bias of a row alike: P is known but for the rounding of the largest."""
    rng = np.random.default_rng(3)
    q, k, dout = (rng.integers(-3, 4, (2, h, n, 8)).astype(type_) for h, n in ((4, queries), (2, 70), (4, queries)))
    v = rng.standard_normal((2, 2, 70, 8)).astype(type_)
    computed_in = np.float64 if type_ == np.float64 else np.float32
    bias = np.full((1, 1, 1, 1), np.finfo(computed_in).min if score == "lowest" else score, computed_in)
    sink = np.full(4, bias.item(), computed_in)
    mask = np.tri(queries, 70, 70 - queries, bool)
    options = dict(scale=1.0, bias=bias, sink=sink, rule=af.causal(), align="none_end")
    out, lse = attention(q, k, v, return_lse=True, **options)
    grads = attention_backward(dout, q, k, v, out, lse, **options)
    q, k, v, dout = (x.astype(computed_in) for x in (q, k, v, dout))
    shared, k, v = k, k.repeat(2, 1), v.repeat(2, 1)
    scores = np.where(mask, (q @ np.swapaxes(k, -1, -2) + bias).astype(np.float64), -np.inf)
    largest = np.maximum(scores.max(-1, keepdims=True), bias.item())
    p, p_sink = np.exp(scores - largest), np.exp(bias.item() - largest)
    total = p.sum(-1, keepdims=True) + p_sink
    p, p_sink = p / total, p_sink / total
    dp = dout.astype(np.float64) @ np.swapaxes(v, -1, -2)
    delta = (p * dp).sum(-1, keepdims=True)
    ds = p * (dp - delta)
    of_group = lambda x: x.reshape(2, 2, 2, *x.shape[2:]).sum(2)
    expected = dict(
        dq=ds @ k,
        dk=of_group(np.swapaxes(ds, -1, -2) @ q),
        dv=of_group(np.swapaxes(p, -1, -2) @ dout),
        dsink=-(p_sink * delta).sum((0, 2, 3)),
    )
    assert expected["dk"].shape == shared.shape
    for name, x in expected.items():
        error = np.abs(getattr(grads, name).astype(np.float64) - x).max()
        assert error <= tolerance * max(np.abs(x).max(), 1), name


@pytest.mark.parametrize("keys", (1025, 100_000))
@pytest.mark.parametrize("type_", (np.float32, np.float64))
def test_gradients_of_many_keys_at_large_scores(keys, type_):
    """All keys weigh the same. A sum of P that rounds as lse does would repair nothing."""
    q, k, v = (np.zeros((1, 1, n, 1), type_) for n in (1, keys, keys))
    bias = np.full((1, 1, 1, 1), 1e4, type_)
    out, lse = attention(q, k, v, bias=bias, return_lse=True)
    dv = attention_backward(np.ones_like(out), q, k, v, out, lse, bias=bias).dv
    np.testing.assert_allclose(dv, 1 / keys, rtol=20 * np.finfo(type_).eps)


@pytest.mark.parametrize("queries", (40, 130))
@pytest.mark.parametrize("type_, tolerance", [(np.float32, 2e-5), (np.float64, 2e-13), (ml_dtypes.bfloat16, 2e-2)])
@pytest.mark.parametrize("score", (1e3, -1e4, 1e5))
def test_gradients_at_large_products(queries, type_, tolerance, score):
    """The same without a bias: one channel makes the scores large. In the last quarter of the queries it is 0."""
    rng = np.random.default_rng(5)
    q, k, dout = (rng.integers(-3, 4, (1, 2, n, 16)).astype(type_) for n in (queries, 150, queries))
    v = rng.standard_normal((1, 2, 150, 16)).astype(type_)
    q[..., 8:], k[..., 8:] = 0, 0
    q[..., : queries * 3 // 4, 8], k[..., 8] = score, 1
    out, lse = attention(q, k, v, scale=1.0, return_lse=True)
    grads = attention_backward(dout, q, k, v, out, lse, scale=1.0)
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    p = q @ np.swapaxes(k, -1, -2)
    p = np.exp(p - p.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = dout @ np.swapaxes(v, -1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    expected = dict(dq=ds @ k, dk=np.swapaxes(ds, -1, -2) @ q[..., :8], dv=np.swapaxes(p, -1, -2) @ dout)
    for name, x in expected.items():
        error = np.abs(getattr(grads, name)[..., : x.shape[-1]].astype(np.float64) - x).max()
        assert error <= tolerance * max(np.abs(x).max(), 1), name


def test_gradients_by_a_share_of_the_keys():
    """lse is of all keys, the call about half of them, as where a sequence is spread over machines."""
    rng = np.random.default_rng(4)
    q, k, v, dout = (rng.standard_normal((1, 2, 40, 16), np.float32) for _ in range(4))
    bias = np.full((1, 1, 1, 1), 200, np.float32)
    out, lse = attention(q, k, v, bias=bias, return_lse=True)
    whole = attention_backward(dout, q, k, v, out, lse, bias=bias)
    for share in (slice(0, 10), slice(10, 40)):
        part = attention_backward(dout, q, k[:, :, share], v[:, :, share], out, lse, bias=bias)
        np.testing.assert_allclose(part.dv, whole.dv[:, :, share], rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(part.dk, whole.dk[:, :, share], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("others", (2, 5, 50))
def test_gradients_by_a_share_with_most_of_the_weight(others):
    """The other keys weigh so many units in the last place of lse: it is not to be taken for rounded."""
    lse, unit = np.full((1, 1, 1), 1000, np.float32), float(np.spacing(np.float32(1000)))
    q, k = np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 64, 1), np.float32)
    v, out = np.zeros((1, 1, 64, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32)
    bias = np.full((1, 1, 1, 1), 1000 - np.log(64) - others * unit, np.float32)
    dv = attention_backward(np.ones_like(out), q, k, v, out, lse, bias=bias).dv
    np.testing.assert_allclose(dv, np.exp(bias.item() - 1000.0), rtol=1e-6)


@pytest.mark.parametrize("exponent", (-136, -118, 50, 100))
@pytest.mark.parametrize("name", ("q", "k", "v", "dout"))
@pytest.mark.parametrize("d", (64, 100))
def test_tensors_of_any_size(name, exponent, d):
    """A tensor that is 2^exponent times as large gives the same results, or such that are as many times larger. Where
    float32 is multiplied in pieces, they must neither vanish nor overflow."""
    rng = np.random.default_rng(2)
    rows = {"q": 130, "k": 150, "v": 150, "dout": 130}
    tensors = {key: rng.standard_normal((1, 2, n, d), np.float32) for key, n in rows.items()}
    factor = np.float32(2.0**exponent)
    tensors[name] = tensors[name] * factor / factor  # what is left of its bits when it is so small

    def results(q, k, v, dout, scale):
        out, lse = attention(q, k, v, scale=scale, return_lse=True)
        grads = attention_backward(dout, q, k, v, out, lse, scale=scale)
        return {"out": out, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}

    expected = results(**tensors, scale=0.125)
    scale, larger = 0.125, {"v": ("out", "dq", "dk"), "dout": ("dq", "dk", "dv")}.get(name, ())
    if name in "qk":  # the scale makes up for it, and the other tensor for what a scale cannot
        other = max(-exponent - 110, 0)
        tensors["k" if name == "q" else "q"] *= np.float32(2.0**other)
        scale *= 2.0 ** -(exponent + other)
        del expected["dq"], expected["dk"]
    tensors[name] = tensors[name] * factor
    got = results(**tensors, scale=scale)
    for key, value in expected.items():
        truth = value.astype(np.float64) * (2.0**exponent if key in larger else 1)
        tolerance = 2e-6 * np.abs(truth).max() + 2.0**-141  # sums of numbers that are multiples of 2^-149
        np.testing.assert_allclose(got[key], truth, rtol=0, atol=tolerance, err_msg=key)


@pytest.mark.parametrize("type_", (np.float16, ml_dtypes.bfloat16, np.float32))
@pytest.mark.parametrize("d", (64, 128, 256))
@pytest.mark.parametrize("name", ("dout", "k"))
def test_not_finite_beside_whole_tiles_of_others(type_, d, name):
    """Blocks of 64 see themselves alone: no tile is partial, but a kernel may take several blocks at once."""
    rng = np.random.default_rng(d)
    q, k, v, dout = (rng.standard_normal((1, 2, 320, d)).astype(type_) for _ in range(4))
    rule = af.blocks(np.eye(5, dtype=bool), 64, 64)

    def gradients():
        out, lse = attention(q, k, v, rule=rule, return_lse=True)
        return [x.astype(np.float64) for x in attention_backward(dout, q, k, v, out, lse, rule=rule)[:3]]

    clean = gradients()
    others = np.arange(320) // 64 != 1
    {"dout": dout, "k": k}[name][:, :, 64:128] = np.nan
    for one, before in zip(gradients(), clean):
        np.testing.assert_allclose(one[:, :, others], before[:, :, others], rtol=2e-2, atol=2e-2)
        assert np.isnan(one[:, :, ~others]).any()
