"""ALiBi on the GPU, in Hopper's kernels where coordinates differ by query - key and a constant, else in portable ones:
values and gradients against float64. alibi_offset_test.cpp asks where."""

import anyflash as af
import pytest
import torch
from gpu_calls import gradients

CALLS = {  # (queries, keys, alignment, the pairs that are seen: x - y of each, the rule)
    "full": (333, 333, "none_front", None, af.full()),
    "causal": (1000, 1000, "none_front", lambda gap: gap >= 0, af.causal()),
    "more keys, at the end": (130, 777, "none_end", lambda gap: gap >= 0, af.causal()),
    "more queries, at the end": (777, 130, "none_end", None, af.full()),
    "a window": (900, 900, "none_front", lambda gap: gap.abs() < 200, af.local(200)),
    "every third": (200, 600, "scale_end", lambda gap: gap >= 0, af.causal()),
    "a rule with steps": (1000, 1000, "none_front", lambda gap: (gap % 4 == 0) & (gap.abs() < 80), af.local(20, 2)),
}


def coordinates(n, size, align):
    at = torch.arange(n, device="cuda")
    return (at + 1) * (size // n) - 1 if align == "scale_end" else at + (size - n if align == "none_end" else 0)


def expected(q, k, v, dout, slopes, softcap, bias, gap, sees):
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    wide = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)]
    s = q @ wide[0].mT / q.shape[-1] ** 0.5
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s + (0 if bias is None else bias.double()) - slopes.double()[..., None, None] * gap.abs()
    out = (s if sees is None else s.masked_fill(~sees(gap), -torch.inf)).softmax(-1) @ wide[1]
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("d", [64, 72, 128, 256])
@pytest.mark.parametrize("extras", ["alone", "soft cap", "bias"])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name, extras, d, dtype):
    queries, keys, align, sees, rule = CALLS[name]
    generator = torch.Generator("cuda").manual_seed(d)
    random = lambda *shape: torch.randn(shape, device="cuda", dtype=dtype, generator=generator)
    q, dout, k, v = random(2, 4, queries, d), random(2, 4, queries, d), random(2, 2, keys, d), random(2, 2, keys, d)
    slopes = torch.rand(2, 4, device="cuda", generator=generator) / 8
    softcap, bias = 3.0 * (extras == "soft cap"), random(1, 4, queries, keys) if extras == "bias" else None
    size = max(queries, keys)
    gap = coordinates(queries, size, align)[:, None] - coordinates(keys, size, align)
    options = dict(rule=rule, align=align, alibi_slopes=slopes, softcap=softcap, bias=bias)
    wanted = expected(q, k, v, dout, slopes, softcap, bias, gap, sees)
    found = af.attention(q, k, v, **options), *gradients(q, k, v, dout, **options)[:3]
    for got, want in zip(found, wanted):
        assert (got.double() - want).abs().max() < (1e-4 if dtype == torch.float32 else 2e-2) * want.abs().max()


def test_slopes_so_large_that_one_key_is_left():
    q, k, v = (torch.randn(1, 2, 300, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    dout, options = torch.randn_like(q), dict(alibi_slopes=torch.full((2,), 1e30, device="cuda"))
    assert torch.equal(af.attention(q, k, v, **options), v)
    dv = gradients(q, k, v, dout, **options)[2]
    assert (dv - dout).abs().max() < 2e-2 * dout.abs().max()
