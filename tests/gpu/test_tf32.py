"""float32 where TF32 is allowed. Hopper's kernels keep 16 bits of each number; what they leave to the portable ones
stays as exact as float32. On other GPUs, and on Hopper without code of its own (sm_90a), the portable ones keep 11;
before sm_80 nothing is TF32.
Results are as near to float64's as that gives, and not as near as float32's, which come without asking; all else is as
ever.
Collected only where ANYFLASH_TEST_DEVICE is cuda (tests/conftest.py)."""

import os

import anyflash as af
import pytest
import torch

CAPABILITY = torch.cuda.get_device_capability()
# What kernels these are, by what scripts/test --gpu was told to compile.
HOPPER = CAPABILITY[0] == 9 and "90a" in os.environ.get("ANYFLASH_CUDA_ARCHITECTURES", "90a")
TURING = CAPABILITY < (8, 0) or os.environ.get("ANYFLASH_CUDA_SMALL_TILES", "OFF") != "OFF"
ALLOWED, EXACT = 2.0**-15 if HOPPER else 2.0**-8, 2.0**-18
NAMES = ("out", "lse", "dq", "dk", "dv")


def numbers(*shape, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator)


def inputs(n, m, d, d_v, heads=2):
    """dout, q, k, v"""
    return (
        numbers(1, heads, n, d_v),
        numbers(1, heads, n, d, seed=1),
        numbers(1, heads, m, d, seed=2),
        numbers(1, heads, m, d_v, seed=3),
    )


def gradients(tensors, out, lse, **options):
    return af.attention_backward(*tensors, out, lse, **options)[:3]


def all_results(tensors, dtype, **options):
    """out, lse, dq, dk, dv"""
    tensors = [x.to(dtype) for x in tensors]
    out, lse = af.attention(*tensors[1:], return_lse=True, **options)
    return out, lse, *gradients(tensors, out, lse, **options)


def error(got, truth):
    """The largest, relative to the largest number; -inf where a query sees no key is right."""
    largest = truth[truth.isfinite()].abs().max()
    return (torch.where(got == truth, 0.0, (got.double() - truth).abs()).max() / largest).item()


# Queries, keys, channels, those of values; whether Hopper's kernels take them. Above 128 channels not all GPUs have the
# shared memory for others'.
SHAPES = [
    ((300, 333, 64, 64), True),
    ((257, 130, 128, 128), True),
    ((70, 500, 40, 100), True),
    ((200, 190, 256, 300), False),
]
# Whether they take these: forward, backward.
OPTIONS = {
    "plain": (dict(rule=af.causal()), (True, True)),
    "scores that need more": (dict(rule=af.local(90), softcap=8.0), (True, False)),
    "slopes": (dict(rule=af.causal(), alibi_slopes=True), (False, False)),
    "deterministic": (dict(rule=af.causal(), deterministic=True), (False, False)),
    "rows that see nothing": (dict(rule=af.window(20, 10) & ~af.prefix(64)), (True, True)),
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
    for what, a, e, t in zip(NAMES, allowed, exact, truth):
        assert error(e, t) < EXACT, what
        assert error(a, t) < ALLOWED, what
    # Backward of the same out and lse, so that what differs is its own doing; of dk, which is not summed in any order.
    heard = (
        not torch.equal(allowed[0], exact[0]),
        not torch.equal(gradients(tensors, *exact[:2], allow_tf32=True, **options)[1], exact[3]),
    )
    if HOPPER:
        assert heard == tuple(hoppers_shape and one for one in hoppers)
    elif TURING:
        assert heard == (False, False)
    elif max(shape[2:]) <= 128:
        assert heard == (True, True)


@pytest.mark.parametrize("queries, heads", [(1, 2), (20, 2), (16, 4)])
def test_few_queries_are_exact(queries, heads):
    tensors = inputs(queries, 300, 64, 64, heads)
    tensors = *tensors[:2], *(x[:, :1].contiguous() for x in tensors[2:])
    exact, allowed = (
        all_results(tensors, torch.float32, deterministic=True, allow_tf32=allow) for allow in (False, True)
    )
    assert all(torch.equal(a, e) for a, e in zip(allowed, exact))


@pytest.mark.parametrize("d", [64, 128])
def test_what_nobody_sees_changes_no_bit(d):
    """But where a hidden value is not finite Hopper's results are made again, as exact as float32."""
    tensors = inputs(200, 300, d, d)
    options = dict(rule=af.prefix(250), allow_tf32=True)
    out = af.attention(*tensors[1:], **options)
    exact = af.attention(*tensors[1:], rule=af.prefix(250))
    of_batch = af.attention(*tensors[1:], **options, deterministic=True)
    tensors[2][:, :, 250:] = tensors[3][:, :, 250:] = 1e6
    assert torch.equal(af.attention(*tensors[1:], **options), out)
    tensors[2][:, :, 250:] = tensors[3][:, :, 250:] = torch.nan
    assert torch.equal(af.attention(*tensors[1:], **options), exact if HOPPER else out)
    assert torch.equal(af.attention(*tensors[1:], **options, deterministic=True), of_batch)


@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
def test_large_numbers_stay_finite(which):
    """Rounded to TF32 they would become infinite; what they are multiplied with is small."""
    dout, q, k, v = inputs(100, 120, 64, 64)
    dout *= 2.0**-6  # dq and dk are multiplied by the scale last, and are to fit before that too
    large, small = dict(q=(q, k), k=(k, q), v=(v, dout), dout=(dout, v))[which]
    large[..., 3] = torch.finfo(torch.float32).max * (1 - 2**-13) * large[..., 3].sign()
    small[..., 3] = 2e-38 * small[..., 3].sign()
    truth = all_results((dout, q, k, v), torch.float64)
    for what, got, expected in zip(NAMES, all_results((dout, q, k, v), torch.float32, allow_tf32=True), truth):
        fits = expected.abs() < torch.finfo(torch.float32).max
        assert error(got[fits], expected[fits]) < 2.0**-6, what  # of numbers that small a piece has few bits


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
