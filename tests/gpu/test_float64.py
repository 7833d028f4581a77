"""float64 on the GPU, whose kernels of Hopper take blocks of 128 queries and 32 keys at a time: forward results and
statistics against the formulas in PyTorch, where sizes and rules cut those in every way; and the gradients of keys that
many heads share. Collected only where ANYFLASH_TEST_DEVICE is cuda (tests/conftest.py)."""

import anyflash as af
import numpy as np
import pytest
import torch


def numbers(*shape, seed=0, by=1.0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return by * torch.randn(shape, device="cuda", dtype=torch.float64, generator=generator)


def formulas(q, k, v, visible, sink=None):
    """out, lse, l and m."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    m = scores.amax(-1, keepdim=True)
    if sink is not None:
        m = torch.where(visible.any(-1, keepdim=True), torch.maximum(m, sink[:, None, None]), m)
    shift = torch.where(m == -torch.inf, 0.0, m)
    p = torch.exp(scores - shift)
    l = p.sum(-1, keepdim=True)
    if sink is not None:
        l = l + torch.where(m == -torch.inf, 0.0, torch.exp(sink[:, None, None] - shift))
    out = torch.where(l > 0, p @ v / l, 0.0)
    return out, (m + torch.log(l))[..., 0], l[..., 0], m[..., 0]


def ids(n):
    return np.arange(n) * 7 // 500


RULES = {
    "full": (lambda n, m: af.full(), lambda i, j: i >= 0),
    "causal": (lambda n, m: af.causal(), lambda i, j: i >= j),
    "window": (lambda n, m: af.window(50, 9), lambda i, j: (j - i >= -50) & (j - i <= 9)),
    "prefix": (lambda n, m: af.causal() | af.prefix(70), lambda i, j: (i >= j) | (j < 70)),
    "holes": (lambda n, m: ~af.local(100), lambda i, j: (i - j).abs() >= 100),
    "documents": (lambda n, m: af.documents(ids(n), ids(m)), lambda i, j: i * 7 // 500 == j * 7 // 500),
    "nothing": (lambda n, m: ~af.full(), lambda i, j: i < 0),
}
# batch, heads, heads of keys, queries, keys, channels, those of values
SHAPES = [
    (1, 1, 1, 128, 32, 64, 64),
    (2, 4, 2, 300, 333, 64, 64),
    (1, 2, 2, 129, 65, 128, 128),
    (2, 4, 1, 500, 290, 128, 72),
    (1, 3, 3, 700, 96, 100, 128),
    (1, 2, 1, 257, 513, 2, 6),
]


def close(got, expected, by=1e-14):
    """Infinities in the same places, errors by the largest number."""
    same = got == expected
    largest = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 1.0
    return bool((same | ((got - expected).abs() <= by * max(largest, 1e-300))).all())


@pytest.mark.parametrize("spread", [1.0, 6.0])  # of q and k: with the second a row's maximum rises often
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_forward(name, shape, spread):
    b, h, hk, n, m, d, dv = shape
    q, k, v = numbers(b, h, n, d, by=spread), numbers(b, hk, m, d, seed=1, by=spread), numbers(b, hk, m, dv, seed=2)
    make, sees = RULES[name]
    visible = sees(torch.arange(n, device="cuda")[:, None], torch.arange(m, device="cuda"))
    by = 1e-14 * spread**2  # scores are as exact as the largest of them
    for sink in (None, numbers(h, seed=3, by=3.0)):
        options = dict(rule=make(n, m), sink=sink, align="none_front")
        expected = formulas(q, k, v, visible, sink)
        out, lse = af.attention(q, k, v, return_lse=True, **options)
        again, l, top = af.attention(q, k, v, return_lse="lm", **options)
        assert torch.equal(out, again)
        for got, wanted in zip((out, lse, l, top), expected):
            assert close(got, wanted, by)


def test_layouts_and_scales():
    """Rows with gaps, rows that do not begin on 16 bytes, scales that other kernels take."""
    q, k, v = (numbers(2, 300, 4, 66, seed=n) for n in range(3))
    visible = torch.ones(300, 300, dtype=torch.bool, device="cuda").tril()
    for lay in (lambda x: x[..., :64], lambda x: x[..., 1:65], lambda x: x[..., 1:64]):
        a = [lay(x) for x in (q, k, v)]
        for scale in (None, 3.0, 1e-30, -0.5, 0.0):
            out = af.attention(*a, rule=af.causal(), layout="bshd", scale=scale)
            d = a[0].shape[-1]
            scaled = a[0].transpose(1, 2) * (1 if scale is None else scale * d**0.5)
            expected = formulas(scaled, a[1].transpose(1, 2), a[2].transpose(1, 2), visible)[0]
            assert close(out.transpose(1, 2), expected, 1e-13)


@pytest.mark.parametrize("d", [64, 128])
def test_what_is_not_finite(d):
    """Hidden numbers that are not finite do nothing; seen ones, and scores of -inf, do what the formulas say."""
    n = 300
    q, k, v = (numbers(1, 2, n, d, seed=seed) for seed in range(3))
    visible = torch.ones(n, n, dtype=torch.bool, device="cuda").tril()
    expected = formulas(q, k, v, visible)[0]
    for what in (torch.nan, torch.inf, -torch.inf):
        for tensor in (k, v):
            held = tensor[:, :, 200].clone()
            tensor[:, :, 200] = what
            out = af.attention(q, k, v, rule=af.causal())
            assert close(out[:, :, :200], expected[:, :, :200])
            if tensor is v:
                assert not out[:, :, 200:].isfinite().any()
            tensor[:, :, 200] = held
    k[..., 0], q[..., 0] = -torch.inf, 1.0  # all scores
    out, lse = af.attention(q, k, v, rule=af.causal(), return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("queries, keys, align", [(300, 333, "none_front"), (400, 290, "none_end")])
def test_what_nobody_sees_changes_no_bit(queries, keys, align, d):
    q, k, v = (numbers(1, 2, n, d, seed=seed) for seed, n in enumerate((queries, keys, keys)))
    options = dict(rule=af.causal(), align=align, return_lse=True)
    expected = af.attention(q, k, v, **options)
    q[:, :, : max(0, queries - keys)] = torch.nan
    k[:, :, queries:] = v[:, :, queries:] = torch.nan
    got = af.attention(q, k, v, **options)
    assert q.isnan().any() or (k.isnan().any() and v.isnan().any())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("d", [64, 128])
def test_the_same_bits_again_and_alone(d):
    """Without `deterministic`, too, if nothing is made again."""
    q, k, v = (numbers(3, 4, n, d, seed=seed) for seed, n in enumerate((300, 333, 333)))
    options = dict(rule=af.window(100, 20), return_lse="lm")
    expected = af.attention(q, k, v, **options)
    for entry in (slice(0, 3), slice(0, 3), slice(1, 2)):
        got = af.attention(q[entry], k[entry], v[entry], **options)
        assert all(torch.equal(a, b[entry]) for a, b in zip(got, expected, strict=True))


def test_large_scores():
    """A row's maximum leaps: the largest score's P is 1 to the bit, whatever comes before and behind."""
    n, d = 300, 64
    q, k, v = (numbers(1, 1, n, d, seed=seed) for seed in range(3))
    k[0, 0, ::37] *= 1e9
    expected = formulas(q, k, v, torch.ones(n, n, dtype=torch.bool, device="cuda"))
    out, lse = af.attention(q, k, v, return_lse=True)
    assert close(out, expected[0], 1e-12) and close(lse, expected[1])


@pytest.mark.parametrize("far", [750.0, 2000.0, 1e6])
@pytest.mark.parametrize("queries", [1, 128])
@pytest.mark.parametrize("d", [64, 128, 200])
def test_a_weight_of_0_adds_nothing(d, queries, far):
    """Where exp is 0 nothing is added, however large the key's value."""
    q, k, v = numbers(1, 1, queries, d, by=0), numbers(1, 1, 64, d, by=0), numbers(1, 1, 64, d, by=0)
    q[..., 0], k[:, :, 1:, 0] = 1, -far
    v[:, :, 0], v[:, :, 1] = 1, 1e308
    out, lse = af.attention(q, k, v, scale=1.0, return_lse=True)
    assert (out == 1).all() and not lse.any()


@pytest.mark.parametrize("d", [64, 128, 200])
def test_gradients_of_keys_that_many_heads_share(d):
    """One chain of sums over all heads would lose four times as much as sums of each head do."""
    n, h = 500, 16
    q, dout = (numbers(1, h, n, d, seed=seed) for seed in range(2))
    k, v = (numbers(1, 1, n, d, seed=seed) for seed in (2, 3))
    out, lse = af.attention(q, k, v, return_lse=True)
    for deterministic in (False, True):
        made = af.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic)
        apart = [
            af.attention_backward(dout[:, [i]], q[:, [i]], k, v, out[:, [i]], lse[:, [i]], deterministic=deterministic)
            for i in range(h)
        ]
        for name in ("dk", "dv"):
            got, of_heads = getattr(made, name), torch.stack([getattr(one, name) for one in apart]).sum(0)
            error = (got - of_heads).square().mean().sqrt() / of_heads.square().mean().sqrt()
            assert error < 1.5e-15, f"{name}, deterministic {deterministic}: {error}"
