"""Memory budgets on a GPU: fewer groups at once, then the portable kernels; lengths, page tables and the tables of rules
in the GPU's memory are divided too."""

import anyflash as af
import numpy as np
import pytest
import torch
from budgets import least_of

BARS = {torch.bfloat16: 2e-2, torch.float16: 6e-3, torch.float32: 2e-5, torch.float64: 1e-11}


def randoms(*shapes, dtype=torch.bfloat16):
    generator = torch.Generator(device="cuda").manual_seed(0)
    return [torch.randn(shape, device="cuda", dtype=dtype, generator=generator) for shape in shapes]


def same(one, other):
    for a, b in zip(one, other):
        bar = BARS[one[0].dtype] * max(1.0, b[b.isfinite()].abs().max().item() if b.isfinite().any() else 1.0)
        assert torch.equal(a.isinf(), b.isinf())
        assert torch.allclose(a.double(), b.double(), rtol=0, atol=bar)


def check(call):
    """The call with the least budget and with some above it gives the results of the call without; the least is divided
    into all groups."""
    expected, least = call(), least_of(call)
    if least > 0:
        with pytest.raises(ValueError, match=f"expected at least {least}$"):
            call(memory_budget=least - 1)
    for budget in (least, 2 * least, 1 << 18, 1 << 22):
        if budget >= least:
            same(call(memory_budget=budget), expected)
    return least


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("rule", [af.full(), af.causal(), af.window(70, 3)], ids=str)
def test_both_passes(rule, d, dtype):
    q, dout = randoms((2, 4, 700, d), (2, 4, 700, d), dtype=dtype)
    k, v = randoms((2, 2, 700, d), (2, 2, 700, d), dtype=dtype)
    out, lse = af.attention(q, k, v, rule=rule, return_lse=True)
    assert check(lambda **budget: af.attention(q, k, v, rule=rule, return_lse=True, **budget)) == 0
    check(lambda **budget: af.attention_backward(dout, q, k, v, out, lse, rule=rule, **budget)[:3])


def test_the_portable_kernels_need_less():
    """Hopper's backward pass adds dQ in float32: 4 d bytes a row. The portable one has a few numbers a row."""
    q, k, v, dout = randoms(*[(1, 1, 4096, 128)] * 4)
    out, lse = af.attention(q, k, v, return_lse=True)
    least = least_of(lambda **budget: af.attention_backward(dout, q, k, v, out, lse, **budget))
    assert 0 < least < 4096 * 64


@pytest.mark.parametrize("queries", [1, 3, 200])
@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_lengths_on_the_gpu(name, queries):
    rule = {"full": af.full(), "causal": af.causal(), "window": af.window(70, 3)}[name]
    q, k, v = randoms((4, 4, queries, 64), (4, 2, 500, 64), (4, 2, 500, 64))
    lengths = torch.tensor([500, 0, 1, 333], dtype=torch.int32, device="cuda")
    options = dict(rule=rule, align="none_end", key_lengths=lengths)
    check(lambda **budget: af.attention(q, k, v, return_lse=True, **options, **budget))
    for budget in (1 << 16, 1 << 20):
        out, lse = af.attention(q, k, v, return_lse=True, **options)
        backward = lambda **budget: af.attention_backward(out, q, k, v, out, lse, **options, **budget)[:3]
        same(backward(memory_budget=max(budget, least_of(backward))), backward())


@pytest.mark.parametrize("queries", [1, 5, 100])
def test_page_tables_on_the_gpu(queries):
    pages = -(-300 // 16)
    q, k, v = randoms((2, 6, queries, 64), (2 * pages, 16, 2, 64), (2 * pages, 16, 2, 72))
    order = np.random.default_rng(1).permutation(2 * pages).astype(np.int32).reshape(2, pages)
    options = dict(
        page_table=torch.tensor(order, device="cuda"),
        key_lengths=torch.tensor([300, 17], dtype=torch.int32, device="cuda"),
    )
    check(lambda **budget: [af.attention(q, k, v, rule=af.causal(), align="none_end", **options, **budget)])


@pytest.mark.parametrize("batch, heads", [(1, 1), (3, 1), (1, 4), (3, 4)])
def test_masks_on_the_gpu(batch, heads):
    """A part's masks are those of its own batch entries and heads."""
    q, k, v = randoms((3, 4, 200, 64), (3, 2, 150, 64), (3, 2, 150, 64))
    generator = torch.Generator(device="cuda").manual_seed(1)
    mask = torch.rand((batch, heads, 200, 150), device="cuda", generator=generator) < 0.7
    rule = af.dense(mask)
    check(lambda **budget: af.attention(q, k, v, rule=rule, return_lse=True, **budget))
    for parts in (2, 8):  # whatever they need
        made = af.attention(q, k, v, rule=rule, return_lse=True, num_chunks_q=parts)
        same(made, af.attention(q, k, v, rule=rule, return_lse=True))


@pytest.mark.parametrize("entry", [0, 2])
@pytest.mark.parametrize("budget", [1 << 19, 3 << 20, 1 << 28])
def test_deterministic_results_are_those_of_the_entry_alone(budget, entry):
    """Hopper's backward pass of an entry needs 1.4 MiB, of all 5.6 MiB."""
    q, k, v, dout = randoms(*[(4, 4, 700, 128)] * 4)
    options = dict(rule=af.causal(), deterministic=True, memory_budget=budget)
    out, lse = af.attention(q, k, v, return_lse=True, **options)
    gradients = af.attention_backward(dout, q, k, v, out, lse, **options)[:3]
    of = slice(entry, entry + 1)
    alone, lse_alone = af.attention(q[of], k[of], v[of], return_lse=True, **options)
    assert torch.equal(alone, out[of]) and torch.equal(lse_alone, lse[of])
    made = af.attention_backward(dout[of], q[of], k[of], v[of], out[of], lse[of], **options)[:3]
    for got, expected in zip(made, gradients):
        assert torch.equal(got, expected[of])
