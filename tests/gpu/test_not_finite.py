"""What NaN and infinities that are seen do on a GPU: the same as on the CPU, wherever a key falls among warps and parts,
and rows whose scores are all -inf add nothing to gradients."""

import anyflash as af
import pytest
import torch

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def randoms(*shapes, dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def same(got, expected):
    """The same numbers are NaN and infinite, others differ by rounding."""
    got = got.cpu()
    bound = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-9}[got.dtype]
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound, equal_nan=True)


def check(q, k, v, dout=None, **options):
    """Forward, and backward if dout is given."""
    on_gpu = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    results = []
    for tensors, own in (((q, k, v), options), (tuple(x.cuda() for x in (q, k, v)), on_gpu)):
        out, lse = af.attention(*tensors, return_lse=True, **own)
        results.append([out, lse])
        if dout is not None:
            made = af.attention_backward(dout.to(out.device), *tensors, out, lse, **own)
            results[-1] += [x for x in made if x is not None]
    for one, other in zip(results[1], results[0]):
        same(one, other)
    return results[0]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("below", [101, 2000])
@pytest.mark.parametrize("keys, low", [(17, 1), (100, 1), (3000, 1), (3000, 64), (3000, 1024), (3000, 2990)])
@pytest.mark.parametrize("queries", [1, 3, 40, 70])
def test_a_value_of_weight_0(queries, keys, low, below, dtype):
    """Scores of the last keys are far below the others'; 0 times NaN is NaN. A warp or part may have none but such."""
    q, k, v = randoms((1, 2, queries, 64), (1, 2, keys, 64), (1, 2, keys, 64), dtype=dtype)
    q[...] = k[...] = 0
    q[..., 0], k[:, :, keys - low :, 0] = 1, -below
    v[0, 0, keys - 1, 3], v[0, 1, keys - low, 5] = torch.nan, torch.inf if below == 2000 else torch.nan
    out, _ = check(q, k, v, scale=1.0)
    assert out[0, 0, :, 3].isnan().all() and out[0, 1, :, 5].isnan().all() and out.isnan().sum() == 2 * queries


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("score", [87, 87.5, 88, 89])
def test_a_late_score_far_above_all_others(score, dtype):
    """Before it comes, exp of it nearly overflows: 2^125.5 to 2^128.4."""
    q, k, v = randoms((1, 2, 300, 64), (1, 2, 300, 64), (1, 2, 300, 64), dtype=dtype)
    q[...] = k[...] = 0
    q[..., 0], k[:, :, 200, 0] = 1, score
    out, _ = check(q, k, v, scale=1.0)
    assert torch.equal(out, v[:, :, 200:201].expand_as(out))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("keys", [1000, 3000])
@pytest.mark.parametrize("queries", [1, 3, 40, 70])
def test_values_under_a_far_higher_sink(queries, keys, dtype):
    """They weigh 0, and so do all others."""
    q, k, v = randoms((1, 2, queries, 64), (1, 2, keys, 64), (1, 2, keys, 64), dtype=dtype)
    v[0, 0, 70, 3] = v[0, 1, keys - 1, 5] = torch.nan
    out, _ = check(q, k, v, sink=torch.tensor([300.0, 2000.0]))
    assert out[0, 0, :, 3].isnan().all() and out[0, 1, :, 5].isnan().all() and out.isnan().sum() == 2 * queries


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("heads", [(2, 2), (8, 1)])
@pytest.mark.parametrize("keys", [100, 3000])
@pytest.mark.parametrize("queries", [1, 3, 40, 70])
def test_channels_that_overflow_beside_others(queries, keys, heads, dtype):
    """Sums of P V do; the row sees a NaN or an infinity in another channel, that of a P which is almost 0."""
    q, k, v = randoms(*[(1, h, n, 64) for h, n in zip((*heads, heads[1]), (queries, keys, keys))], dtype=dtype)
    q[...] = k[...] = 0
    q[..., 0], k[:, :, keys - 1, 0] = 1, -700 if dtype == torch.float64 else -80
    v[..., 1] = largest = torch.finfo(dtype).max * 0.98
    v[0, 0, 5, 3], v[0, -1, keys - 1, 5] = torch.nan, torch.inf
    out = af.attention(q.cuda(), k.cuda(), v.cuda(), scale=1.0).cpu()
    groups = heads[0] // heads[1]
    assert out[0, :groups, :, 3].isnan().all() and out[0, -groups:, :, 5].isinf().all()
    assert out.isfinite().sum() == out.numel() - 2 * groups * queries
    torch.testing.assert_close(out[..., 1].double() / largest, torch.ones_like(out[..., 1]).double(), rtol=0, atol=0.02)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("queries", [1, 40, 70])
def test_values_behind_a_bias_of_minus_infinity(queries, dtype):
    """Its pairs are seen."""
    q, k, v = randoms((1, 2, queries, 64), (1, 2, 1000, 64), (1, 2, 1000, 64), dtype=dtype)
    bias = torch.zeros(1, 1, 1, 1000)
    bias[..., 64:128] = -torch.inf
    v[0, 0, 70, 3] = torch.nan
    out, _ = check(q, k, v, bias=bias)
    assert out[0, 0, :, 3].isnan().all() and out.isnan().sum() == queries
    bias[...] = -torch.inf
    out, lse = check(q, k, v, bias=bias)  # but rows that are left with nothing are 0
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("queries", [1, 40, 128])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("side", ["q", "k"])
def test_rows_whose_scores_are_all_minus_infinity(side, d, queries, dtype):
    q, k, v = randoms((1, 2, queries, d), (1, 2, 128, d), (1, 2, 128, d), dtype=dtype)
    (dout,) = randoms((1, 2, queries, d), dtype=dtype)
    k[..., 0], q[..., 0] = 1, 1
    if side == "q":
        q[0, 0, min(5, queries - 1), 0] = -torch.inf
    else:
        k[0, 0, :, 0] = -torch.inf
    out, lse, *gradients = check(q, k, v, dout)
    assert (lse == -torch.inf).any() and all(x.isfinite().all() for x in (out, *gradients))
    dout[lse == -torch.inf] = torch.nan
    assert all(x.isfinite().all() for x in check(q, k, v, dout)[2:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_infinite_keys_under_a_soft_cap(dtype):
    """An odd number of blocks of queries."""
    q, k, v, dout = randoms((1, 2, 64, 64), (1, 2, 128, 64), (1, 2, 128, 64), (1, 2, 64, 64), dtype=dtype)
    k[0, 0, 7, 0] = torch.inf
    check(q, k, v, dout, softcap=2.0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("keys", [1000, 3000])
@pytest.mark.parametrize("queries", [1, 40, 70])
def test_a_sink_that_is_nan(queries, keys, dtype):
    q, k, v = randoms((1, 2, queries, 64), (1, 2, keys, 64), (1, 2, keys, 64), dtype=dtype)
    q[..., 0] = 1
    sink = torch.tensor([torch.nan, 0.5])
    check(q, k, v, sink=sink)
    bias = torch.full((1, 1, 1, 1), -torch.inf)
    for keys, options in ((k, dict(bias=bias)), (torch.full_like(k, -torch.inf), {})):
        out, lse = check(q.abs(), keys, v, sink=sink, **options)
        assert out[0, 0].isnan().all() and lse[0, 0].isnan().all() and lse[0, 1].isfinite().all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("d", [64, 65])  # 65: on Hopper, too, the portable kernels
@pytest.mark.parametrize("queries, keys", [(1, 255), (1, 3000), (40, 255), (300, 255), (300, 3000)])
def test_a_mean_of_the_largest_number(queries, keys, d, dtype):
    """Weights are rounded, their sum is that of others."""
    q, k = randoms((1, 2, queries, d), (1, 2, keys, d), dtype=dtype)
    v = torch.full((1, 2, keys, d), torch.finfo(dtype).max, dtype=dtype)
    v[..., 1] *= -1
    for scale in (0.0, 0.3, 0.8):
        out = af.attention(q.cuda(), k.cuda(), v.cuda(), scale=scale).cpu().double() / v[0, 0, 0].double()
        torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=max(1e-5, 2 * torch.finfo(dtype).eps))


@pytest.mark.parametrize("queries", [8, 40, 70])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("of_values, of_dout", [(5e17, 5e18), (3e36, 1.0), (1e-3, 1e37)])
def test_large_gradients(of_values, of_dout, d, queries):
    """Of float32, whose pieces do not reach so far."""
    q, k, v, dout = randoms(*[(1, 2, n, d) for n in (queries, 8, 8, queries)], dtype=torch.float32)
    v, dout = v * of_values, dout * of_dout
    q, k = q / 8, k / 8
    results = []
    for device in ("cpu", "cuda"):
        tensors = [x.to(device) for x in (q, k, v)]
        out, lse = af.attention(*tensors, return_lse=True)
        made = af.attention_backward(dout.to(device), *tensors, out, lse)
        results.append([x.cpu().double() for x in (out, *made[:3])])
    for one, other in zip(results[1], results[0]):
        assert other.isfinite().all() and (one - other).abs().max() <= 2e-5 * other.abs().max()


@pytest.mark.parametrize("queries", [8, 100])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("exponent", [-118, -105])
def test_what_is_hidden_changes_nothing_of_the_smallest_numbers(exponent, name, queries):
    tensors = dict(
        zip(
            ("q", "k", "v", "dout"),
            randoms(*[(1, 2, n, 64) for n in (queries, 100, 100, queries)], dtype=torch.float32),
        )
    )
    tensors[name] = tensors[name] * 2.0**exponent
    if name in "qk":
        tensors["k" if name == "q" else "q"] *= 2.0 ** -(exponent + 4)
    rule = af.causal() & af.local(200)
    results = []
    for hidden in (False, True):
        q, k, v, dout = (x.cuda() for x in tensors.values())
        if hidden:
            k[0, 0, 99] = v[0, 1, 99] = torch.nan
        align = "none_front"  # the last query does not see the last key, but where there are as many
        q, dout = q[:, :, : min(queries, 99)], dout[:, :, : min(queries, 99)]
        out, lse = af.attention(q, k, v, rule=rule, align=align, return_lse=True)
        made = af.attention_backward(dout, q, k, v, out, lse, rule=rule, align=align)
        results.append([x.double() for x in (out, lse, *made[:3])])
    for one, other in zip(results[1], results[0]):
        assert other.isfinite().all() and (one - other).abs().max() <= 1e-6 * other.abs().max()
