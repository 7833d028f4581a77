"""Gradients on the GPU, whose kernels of Hopper cut sequences in blocks, add up in any order and make a call again where
something is not finite: against PyTorch, the deterministic call, and the call without what is hidden."""

from functools import partial
from itertools import combinations

import anyflash as af
import numpy as np
import pytest
import torch
from anyflash.torch import attention
from gpu_calls import gradients, reference_gradients, tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradients_have_the_same_bits_in_every_run_and_batch(dtype):
    q, k, v = tensors(b=3, n=777, dtype=dtype)
    dout = torch.randn_like(q)
    same = partial(gradients, rule=af.causal() & af.local(99), deterministic=True)
    once = same(q, k, v, dout)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(same(q, k, v, dout)[:3], once[:3]))
    alone = same(q[1:2], k[1:2], v[1:2], dout[1:2])
    assert all(torch.equal(a, b[1:2]) for a, b in zip(alone[:3], once[:3]))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_many_blocks(d, causal):
    """Some thousand blocks of threads at once, each many steps long."""
    q, k, v = tensors(n=2000, d=d)
    dout = torch.randn_like(q)
    made = gradients(q, k, v, dout, rule=af.causal() if causal else af.full())
    for got, expected in zip(made, reference_gradients(q, k, v, dout, causal)):
        assert (got.double() - expected).abs().max() < 2e-2 * expected.abs().max()


SOME_RULES = {
    "full": (af.full(), (2000,)),
    "causal": (af.causal(), (2000,)),
    "window": (af.causal() & af.local(99), (1999,)),
    "documents": (af.documents(np.arange(2000) // 301, np.arange(2000) // 301) & af.causal(), (2000,)),
    "picture": (af.local(8), (40, 50)),
    "volume": (af.local(3) | af.prefix(70), (10, 10, 20)),
    "holes": (~af.local(500), (2000,)),
    "steps": (af.local(20, log2_stride=2), (2000,)),
    "steps that leave a rest": (af.local(20, log2_stride=3), (1999,)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("d", [64, 72, 128, 200, 256])
@pytest.mark.parametrize("name", SOME_RULES)
def test_gradients_are_the_deterministic_ones_but_for_rounding(name, d, dtype):
    """Where the sums of dq are made in no order; grouped heads, every second of them missing from the keys."""
    rule, shape = SOME_RULES[name]
    q, k, v = tensors(b=2, h=4, n=int(np.prod(shape)), d=d, dtype=dtype)
    q, k, v = (x.reshape(*x.shape[:2], *shape, d) for x in (q, k[:, :2].contiguous(), v[:, :2].contiguous()))
    dout = torch.randn_like(q)
    one, other = (gradients(q, k, v, dout, rule=rule, deterministic=x) for x in (False, True))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-2
    for got, expected in zip(one[:3], other[:3]):
        assert (got.double() - expected.double()).abs().max() < tolerance * expected.double().abs().max()


def islands():
    """Blocks of 64 x 64, a quarter of them visible; some key blocks, neighbours or alone, are seen by nobody."""
    seen = np.random.default_rng(3).random((32, 32)) < 0.25
    seen[:, [2, 3, 9, 30, 31]] = False
    return af.blocks(seen, 64, 64)


NARROW_RULES = {
    "picture": (af.local(6), (40, 50)),
    "volume": (af.local(3), (10, 10, 20)),
    "steps": (af.local(20, log2_stride=2), (2000,)),
    "islands": (islands(), (2000,)),
}


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", NARROW_RULES)
def test_gradients_where_blocks_of_threads_take_several_short_tasks(name, d):
    rule, shape = NARROW_RULES[name]
    q, k, v = (x.reshape(2, 24, *shape, d) for x in tensors(b=2, h=24, n=int(np.prod(shape)), d=d))
    dout = torch.randn_like(q)
    one, again, other = (gradients(q, k, v, dout, rule=rule, deterministic=x) for x in (False, False, True))
    assert torch.equal(one.dk, again.dk) and torch.equal(one.dv, again.dv)  # dq's sums are made in no order
    for got, expected in zip(one[:3], other[:3]):
        assert (got.double() - expected.double()).abs().max() < 1e-2 * expected.double().abs().max()


def biased_gradients(q, k, v, bias, dout, visible):
    """dq, dk, dv and dbias by PyTorch in float64."""
    inputs = [x.double().requires_grad_() for x in (q, k, v, bias)]
    q, k, v, bias = inputs
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5 + bias).masked_fill(~visible, -torch.inf)
    return torch.autograd.grad(torch.softmax(scores, -1).nan_to_num(0) @ v, inputs, dout.double())


# Of a bias: are its numbers one for each batch entry, head, query and key?
BIASES = {
    "own": (1, 1, 1, 1),
    "of heads": (0, 1, 1, 1),
    "of batch entries": (1, 0, 1, 1),
    "shared": (0, 0, 1, 1),
    "of keys": (1, 0, 0, 1),
    "of queries": (0, 1, 1, 0),
}


@pytest.mark.parametrize("d", [64, 72, 128, 200, 256])
@pytest.mark.parametrize("type_", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", BIASES)
def test_gradients_of_a_bias(name, type_, d):
    """Sizes whose rows begin on 16 bytes and others, more and fewer queries than keys, one query, rules that leave blocks
    out; the inputs bfloat16, one key head for two heads."""
    for n, m, rule, visible in (
        (256, 448, af.full(), lambda i, j: i >= 0),
        (323, 200, af.full(), lambda i, j: i >= 0),
        (448, 448, af.causal(), lambda i, j: i >= j),
        (520, 392, af.local(70), lambda i, j: abs(i - j) < 70),
        (1, 448, af.local(70), lambda i, j: abs(i - j) < 70),
    ):
        q, dout = (x[:, :, :n].contiguous() for x in tensors(b=3, n=n, d=d)[:2])
        k, v = (x.contiguous() for x in tensors(b=3, h=2, n=m, d=d, seed=1)[:2])
        shape = [size if own else 1 for size, own in zip((3, 4, n, m), BIASES[name])]
        bias = torch.randn(shape, device="cuda").to(type_)
        made = gradients(q, k, v, dout, rule=rule, bias=bias)
        pairs = visible(torch.arange(n, device="cuda")[:, None], torch.arange(m, device="cuda"))
        for got, expected in zip(made, biased_gradients(q, k, v, bias, dout, pairs)):
            assert got.shape == expected.shape
            largest = expected.abs().max()
            if got is made.dbias and name == "of queries":
                largest = dout.abs().max()  # it is 0 but for the rounding of `out`
            assert (got.double() - expected).abs().max() < 2e-2 * largest
        assert not made.dbias[(~pairs).expand(shape)].any() if made.dbias.shape[2:] == pairs.shape else True


@pytest.mark.parametrize("first", [0, 8, 3])
def test_gradient_of_a_bias_that_is_a_part_of_a_tensor(first):
    q, dout, v = tensors(n=512)
    k, v = (x[:, :, :448].contiguous() for x in (dout.flip(2), v))
    bias = torch.randn(2, 5, 600, 520, device="cuda").bfloat16()[:, 1:, 16:528, first : first + 448]
    made, expected = (gradients(q, k, v, dout, bias=x, rule=af.causal()) for x in (bias, bias.contiguous()))
    for got, whole in zip(made[:4], expected):
        assert (got.double() - whole.double()).abs().max() < 1e-2 * whole.double().abs().max()


@pytest.mark.parametrize("inner", [0, 1])
def test_gradient_of_a_bias_whose_axes_lie_in_another_order(inner):
    q, k, v = tensors(n=512)
    bias = torch.randn(2, 4, 512, 512, device="cuda").bfloat16()
    other = bias.transpose(inner, 2).contiguous().transpose(inner, 2).requires_grad_()
    expected = gradients(q, k, v, v, bias=bias, rule=af.causal()).dbias
    (made,) = torch.autograd.grad(attention(q, k, v, bias=other, rule=af.causal()), [other], v)
    assert made.stride() == other.stride()
    assert (made.double() - expected.double()).abs().max() < 1e-2 * expected.double().abs().max()


@pytest.mark.parametrize("d", [64, 128, 256])
def test_queries_that_a_bias_hides_from_all_keys(d):
    """Even if they hold NaN themselves; every tile is full."""
    q, k, v = tensors(n=256, d=d)
    dout, bias = torch.randn_like(q), torch.randn(2, 4, 256, 256, device="cuda").bfloat16()
    bias[:, :, 100:120] = -torch.inf
    clean = gradients(q, k, v, dout, bias=bias)
    out, lse = af.attention(q, k, v, bias=bias, return_lse=True)
    dout[:, :, 100:120] = torch.nan
    made = af.attention_backward(dout, q, k, v, out, lse, bias=bias)
    for got, expected in zip(made, clean):
        if expected is not None:
            assert (got.double() - expected.double()).abs().max() < 1e-2 * expected.double().abs().max()
    assert not made.dbias[:, :, 100:120].any() and not made.dq[:, :, 100:120].any()


@pytest.mark.parametrize("d", [64, 128, 256])
def test_gradient_of_a_bias_does_not_show_what_is_hidden(d):
    q, k, v = tensors(n=700, d=d)
    dout, bias = torch.randn_like(q), torch.randn(1, 4, 700, 700, device="cuda").bfloat16()
    visible = torch.arange(700, device="cuda") < 500
    rule = af.dense(visible.expand(700, 700).cpu().numpy())
    expected = gradients(q, k, v, dout, rule=rule, bias=bias)
    k[:, :, 500:] = float("nan")
    v[:, :, 500:] = float("inf")
    for got, clean in zip(gradients(q, k, v, dout, rule=rule, bias=bias)[:4], expected):
        assert (got.double() - clean.double()).abs().max() < 1e-2 * clean.double().abs().max()


@pytest.mark.parametrize("d", [64, 72, 128, 256])
@pytest.mark.parametrize("entries", [1, 2])  # of the bias
@pytest.mark.parametrize("wanted", [some for n in range(1, 5) for some in combinations("qkvb", n)], ids="".join)
def test_some_gradients_do_not_show_what_is_hidden(d, entries, wanted):
    q, k, v = tensors(n=300, d=d)
    dout, bias = torch.randn_like(q), torch.randn(entries, 4, 300, 300, device="cuda").bfloat16()
    rule = af.dense((torch.arange(300) < 200).expand(300, 300).numpy())

    def found():
        given = {name: x.clone().requires_grad_(name in wanted) for name, x in zip("qkvb", (q, k, v, bias))}
        out = attention(given["q"], given["k"], given["v"], rule=rule, bias=given["b"])
        return torch.autograd.grad(out, [given[name] for name in wanted], dout)

    expected = found()
    k[:, :, 200:] = v[:, :, 200:] = float("nan")
    for got, clean in zip(found(), expected):
        assert (got.double() - clean.double()).abs().max() < 1e-2 * clean.double().abs().max()


def test_a_sum_of_sinks_and_gradients_of_lse():
    """Of 16-bit types, whose rows are prepared by a kernel of their own, beside the deterministic call's."""
    q, k, v = tensors(n=700, d=128)
    sink = torch.randn(4, device="cuda")
    out, lse = af.attention(q, k, v, rule=af.causal(), sink=sink, return_lse=True)
    dout, dlse = torch.randn_like(q), torch.randn_like(lse)
    one, other = (
        af.attention_backward(dout, q, k, v, out, lse, rule=af.causal(), sink=sink, dlse=dlse, deterministic=x)
        for x in (False, True)
    )
    for got, expected in zip((*one[:3], one.dsink), (*other[:3], other.dsink)):
        assert (got.double() - expected.double()).abs().max() < 1e-2 * expected.double().abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("more", ["plain", "softcap", "bias", "sink"])
def test_what_is_hidden_changes_no_bit(d, dtype, more):
    """Nor does it in another head or batch entry, for which a call may be made again, on Hopper by another kernel; of
    float64 and of gradients that one rounds otherwise, so they are asked for with `deterministic`. Of 16-bit types it
    makes query blocks again whose keys are hidden, and they may differ by a rounding."""
    narrow = dtype in (torch.float16, torch.bfloat16)
    n = 1704 if narrow else 700
    q, k, v = tensors(n=n, d=d, dtype=dtype)
    options = dict(rule=af.causal())
    if more == "softcap":
        options["softcap"] = 5.0
    elif more == "bias":
        options["bias"] = torch.randn(1, q.shape[1], n, n, device="cuda", dtype=dtype)
    elif more == "sink":
        options["sink"] = torch.randn(q.shape[1], device="cuda")
    dout = torch.randn_like(q)

    def results():
        out, lse = af.attention(q, k, v, return_lse=True, deterministic=dtype == torch.float64, **options)
        return out, lse, *af.attention_backward(dout, q, k, v, out, lse, deterministic=True, **options)[:3]

    expected = results()
    k[0, :2, 500:] = v[0, :2, 500:] = float("nan")
    for i, (got, clean) in enumerate(zip(results(), expected)):
        assert torch.equal(got[1], clean[1])
        if i <= 2 and narrow:
            one, other = got[0, :, :500].double(), clean[0, :, :500].double()
            assert (one - other).abs().max() <= 2 * torch.finfo(dtype).eps * other.abs().max()
        else:
            assert i > 2 or torch.equal(got[0, :, :500], clean[0, :, :500])  # later queries see it: not in dk and dv


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_gradients_do_not_show_what_is_hidden(d, dtype):
    q, k, v = tensors(n=700, d=d, dtype=dtype)
    dout = torch.randn_like(q[:, :, :500])
    call = lambda: gradients(q[:, :, :500], k, v, dout, rule=af.causal())
    expected = call()
    k[:, :, 500:] = float("nan")
    v[:, :, 500:] = float("inf")
    for got, clean in zip(call()[:3], expected[:3]):
        assert (got.double() - clean.double()).abs().max() < 1e-2 * clean.double().abs().max()
