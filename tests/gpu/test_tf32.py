"""float32 where TF32 is allowed. Hopper's kernels multiply numbers with 16 bits; what those leave to the portable ones
stays as exact as float32. On other GPUs, and with the code of others, numbers are TF32. Results are as near to float64's
as that gives, and not as near as float32's, which come without asking; all else is as ever.
Collected only where ANYFLASH_TEST_DEVICE is cuda (tests/conftest.py)."""

import os

import anyflash as af
import pytest
import torch

COMPILED = os.environ.get("ANYFLASH_CUDA_ARCHITECTURES", "90a")  # as scripts/test --gpu takes it
HOPPER = torch.cuda.get_device_capability()[0] == 9 and "90a" in COMPILED
ALLOWED, EXACT = 2.0**-15 if HOPPER else 2.0**-8, 2.0**-18


def numbers(*shape, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator)


def inputs(n, m, d, d_v, heads=2):
    """dout, q, k, v"""
    return (numbers(1, heads, n, d_v), numbers(1, heads, n, d, seed=1), numbers(1, heads, m, d, seed=2),
            numbers(1, heads, m, d_v, seed=3))  # fmt: skip


def all_results(tensors, dtype, **options):
    """out, lse, dq, dk, dv"""
    dout, *rest = (x.to(dtype) for x in tensors)
    out, lse = af.attention(*rest, return_lse=True, **options)
    gradients = af.attention_backward(dout, *rest, out, lse, **options)
    return out, lse, gradients.dq, gradients.dk, gradients.dv


def errors(got, truth):
    """The largest, relative to the largest number; -inf where a query sees no key is right."""
    largest = truth[truth.isfinite()].abs().max()
    return (torch.where(got == truth, 0.0, (got.double() - truth).abs()).max() / largest).item()


# queries, keys, channels, those of values; do Hopper's kernels take them?
SHAPES = [((300, 333, 64, 64), True), ((257, 130, 128, 128), True), ((70, 500, 40, 100), True),
          ((200, 190, 256, 300), False)]  # fmt: skip
OPTIONS = {
    "plain": (dict(rule=af.causal()), True),
    "scores that need more": (dict(rule=af.local(90), softcap=8.0), True),
    "slopes": (dict(rule=af.causal(), alibi_slopes=True), False),
    "deterministic": (dict(rule=af.causal(), deterministic=True), True),
    "rows that see nothing": (dict(rule=af.window(20, 10) & ~af.prefix(64)), True),
}


@pytest.mark.parametrize("shape, hoppers_shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_as_exact_as_is_allowed(name, shape, hoppers_shape):
    (options, hoppers), tensors = OPTIONS[name], inputs(*shape)
    if "alibi_slopes" in options:
        options = options | dict(alibi_slopes=torch.tensor([0.5, 0.01], device="cuda"))
    truth = all_results(tensors, torch.float64, **options)
    allowed = all_results(tensors, torch.float32, allow_tf32=True, **options)
    exact = all_results(tensors, torch.float32, **options)
    for what, a, e, t in zip(("out", "lse", "dq", "dk", "dv"), allowed, exact, truth):
        assert errors(e, t) < EXACT, what
        assert errors(a, t) < ALLOWED, what
    if HOPPER and not (hoppers and hoppers_shape):
        assert torch.equal(allowed[0], exact[0])
    else:
        assert errors(allowed[0], truth[0]) > 2 * errors(exact[0], truth[0])  # it is heard


@pytest.mark.parametrize("d", [64, 128])
def test_what_nobody_sees_changes_no_bit(d):
    """But where a hidden value is not finite Hopper's results are made again, as exact as float32."""
    tensors = inputs(200, 300, d, d)
    options = dict(rule=af.prefix(250), allow_tf32=True)
    out = af.attention(*tensors[1:], **options)
    exact = af.attention(*tensors[1:], rule=af.prefix(250))
    tensors[2][:, :, 250:] = tensors[3][:, :, 250:] = 1e6
    assert torch.equal(af.attention(*tensors[1:], **options), out)
    tensors[2][:, :, 250:] = tensors[3][:, :, 250:] = torch.nan
    assert torch.equal(af.attention(*tensors[1:], **options), exact if HOPPER else out)


def test_large_numbers_stay_finite():
    """Rounded to TF32 they would become infinite."""
    dout, q, k, v = inputs(100, 120, 64, 64)
    v[:] = torch.finfo(torch.float32).max * (1 - 2**-13)
    out = af.attention(q, k, v, allow_tf32=True)
    assert out.isfinite().all() and (out > v.max() * 0.99).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_do_not_hear_it(dtype):
    q, k, v = (x.to(dtype) for x in inputs(100, 120, 64, 64)[1:])
    assert torch.equal(af.attention(q, k, v, allow_tf32=True), af.attention(q, k, v))


def test_plans_are_for_both():
    tensors = inputs(500, 500, 64, 64)
    plans = [af.plan(*tensors[1:], rule=af.causal(), allow_tf32=allow) for allow in (False, True)]
    for plan in plans:
        for allow in (False, True):
            got = af.attention(*tensors[1:], rule=af.causal(), plan=plan, allow_tf32=allow)
            assert torch.equal(got, af.attention(*tensors[1:], rule=af.causal(), allow_tf32=allow))
