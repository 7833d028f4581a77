"""Gradients by finite differences in float64, for every option, and what has none."""

import weakref

import anyflash as af
import pytest
import torch
from anyflash.torch import attention, flash_attention_qkv_packed
from devices import DEVICE
from small_rules import small_rules


def on_device(numbers, **options):
    return torch.tensor(numbers, device=DEVICE, **options)


RULES = small_rules(on_device, torch.tensor)


def check(call, *tensors):
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(call, tensors)


@pytest.fixture
def qkv(numbers):
    """Five queries of four heads, six keys of two."""
    return numbers(2, 4, 5, 3), numbers(2, 2, 6, 3), numbers(2, 2, 6, 4)


@pytest.mark.parametrize("name", RULES)
def test_every_rule(qkv, name):
    check(lambda *x: attention(*x, rule=RULES[name]), *qkv)


@pytest.mark.parametrize("align", ["none_front", "none_end", "scale_front", "scale_end"])
def test_every_alignment(qkv, align):
    check(lambda *x: attention(*x, rule=af.causal(), align=align, return_lse=True), *qkv)


OPTIONS = {
    "scale": dict(scale=0.3),
    "softcap": dict(softcap=0.7),
    "alibi": dict(alibi_slopes=on_device([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)),
    "key_lengths": dict(key_lengths=on_device([4, 6], dtype=torch.int32)),
    "lse": dict(return_lse=True),
    "text": dict(rule="documents(a, b) & causal()", tables={"a": torch.arange(5) // 3, "b": torch.arange(6) // 3}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(qkv, name):
    check(lambda *x: attention(*x, **OPTIONS[name]), *qkv)


@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (1, 4, 5, 6), (2, 1, 1, 6), (1, 1, 5, 1), (1, 4, 1, 1)])
def test_bias(qkv, numbers, shape):
    check(lambda q, k, v, bias: attention(q, k, v, bias=bias, return_lse=True), *qkv, numbers(*shape))


def test_sink_and_everything_else(qkv, numbers):
    def call(q, k, v, bias, sink):
        return attention(
            q,
            k,
            v,
            rule=af.causal(),
            bias=bias,
            sink=sink,
            softcap=2.0,
            scale=0.4,
            return_lse=True,
            align="none_end",
            alibi_slopes=on_device([[0.1] * 4] * 2, dtype=torch.float64),
        )

    check(call, *qkv, numbers(1, 4, 5, 6), numbers(4))


def test_every_layout(numbers):
    check(lambda *x: attention(*x, layout="bshd"), numbers(2, 5, 4, 3), numbers(2, 6, 2, 3), numbers(2, 6, 2, 3))
    check(lambda *x: attention(*x, layout="bhds"), numbers(2, 4, 3, 5), numbers(2, 2, 3, 6), numbers(2, 2, 4, 6))
    check(lambda x: attention(x, layout="qkv", rule=af.causal(), return_lse=True), numbers(3, 2, 5, 3))
    ends = dict(cu_seqlens_q=on_device([0, 2, 5]), cu_seqlens_k=on_device([0, 3, 6]))
    check(lambda *x: attention(*x, layout="thd", **ends), numbers(5, 4, 3), numbers(6, 2, 3), numbers(6, 2, 3))
    pixels = [numbers(1, 2, 3, 4, 3) for _ in range(3)]
    check(lambda *x: attention(*x, rule=af.neighbourhood(3)), *pixels)


def test_one_tensor_in_every_place(numbers):
    check(lambda x: attention(x, x, x, bias=x @ x.mT), numbers(1, 2, 5, 3))


@pytest.mark.parametrize("chunks", [(1, 1), (2, 3), (6, 6), (1, 6)])
def test_packed_in_chunks(numbers, chunks):
    check(lambda x: flash_attention_qkv_packed(x, *chunks), numbers(3, 2, 6, 4))


def test_only_what_is_asked_for(qkv):
    q, k, v = qkv
    v.requires_grad_()
    out, lse = attention(q, k, v, return_lse=True)
    lse.sum()  # of no use to v
    (dv,) = torch.autograd.grad(out.sum(), v)
    assert dv.shape == v.shape and q.grad is None and k.grad is None


def test_gradient_of_lse_alone(qkv):
    q, k, v = (x.requires_grad_() for x in qkv)
    attention(q, k, v, return_lse=True)[1].sum().backward()
    expected = torch.autograd.grad((q @ k.repeat_interleave(2, 1).mT / 3**0.5).logsumexp(-1).sum(), [q, k])
    torch.testing.assert_close([q.grad, k.grad], list(expected))
    assert v.grad is None or not v.grad.any()


@pytest.mark.parametrize("chunks", [None, 1, 5])
def test_gradients_that_autograd_has_not_written_out(numbers, chunks):
    """It negates that of an imaginary part by name alone; others may be sparse, or zero without memory."""
    qkv = numbers(3, 2, 5, 8).requires_grad_()
    call = lambda: attention(qkv, layout="qkv") if chunks is None else flash_attention_qkv_packed(qkv, chunks, chunks)
    out = call().detach()
    expected = torch.autograd.grad(-call().sum(), qkv)[0]
    got = torch.autograd.grad(torch.complex(out, call()).conj().imag.sum(), qkv)[0]
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(call(), qkv, -torch.ones_like(out).to_sparse())[0], expected)
    nothing = torch._efficientzerotensor(out.shape, dtype=out.dtype, device=DEVICE)
    assert not torch.autograd.grad(call(), qkv, nothing)[0].any()


@pytest.mark.parametrize("call", [attention, lambda q, k, v: flash_attention_qkv_packed(torch.stack([q[0]] * 3), 5, 5)])
def test_no_second_derivative(qkv, call):
    q, k, v = (x.requires_grad_() for x in qkv)
    (dq,) = torch.autograd.grad(call(q, k, v).sin().sum(), q, create_graph=True)
    plain = torch.autograd.grad(call(q, k, v).sin().sum(), q)[0]
    assert torch.equal(dq, plain)  # create_graph alone is no error
    with pytest.raises(NotImplementedError, match="^anyflash.torch.attention: a second derivative was asked for"):
        dq.sum().backward()


def test_no_gradient_of_slopes(qkv):
    slopes = torch.ones(4, requires_grad=True, device=DEVICE)
    with pytest.raises(ValueError, match="^alibi_slopes: requires a gradient"):
        attention(*(x.requires_grad_() for x in qkv), alibi_slopes=slopes)


CHANGED = {
    "alibi_slopes": (lambda: torch.ones(4, dtype=torch.float64, device=DEVICE), {}),
    "key_lengths": (lambda: torch.tensor([3, 5]), {}),
    "ids": (lambda: torch.arange(7) // 3, dict(rule="documents(ids, ids)")),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_changed_before_backward_is_found_out(numbers, name):
    make, options = CHANGED[name]
    q, given = numbers(2, 4, 7, 8).requires_grad_(), make()
    options = options | ({"tables": {name: given}} if "rule" in options else {name: given})
    out = attention(q, q, q, **options)
    given.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_cumulative_lengths_that_are_changed_before_backward_are_found_out(numbers, name):
    q = numbers(7, 4, 8).requires_grad_()
    given = {side: torch.tensor([0, 3, 7]) for side in ("cu_seqlens_q", "cu_seqlens_k")}
    out = attention(q, q, q, layout="thd", **given)
    given[name][1] = 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


COPIED = CHANGED | {
    "bias": (lambda: torch.ones(1, 4, 7, 1, dtype=torch.float64, device=DEVICE).cumsum(1), {}),
    "sink": (lambda: torch.ones(4, dtype=torch.float64, device=DEVICE), {}),
}


@pytest.mark.parametrize("name", COPIED)
def test_the_backward_pass_reads_what_hooks_have_copied(numbers, name):
    make, options = COPIED[name]
    q, given = numbers(2, 4, 7, 8).requires_grad_(), make()
    options = options | ({"tables": {name: given}} if "rule" in options else {name: given})
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copy: copy):
        loss = attention(q, q, q, **options).sin().sum()
    expected = torch.autograd.grad(loss, q, retain_graph=True)[0]
    given[..., 0] += 3
    torch.testing.assert_close(torch.autograd.grad(loss, q)[0], expected, rtol=0, atol=0)


def test_the_backward_pass_reads_the_cumulative_lengths_that_hooks_have_copied(numbers):
    q, lengths = numbers(7, 4, 8).requires_grad_(), torch.tensor([0, 3, 7])
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copy: copy):
        loss = attention(q, q, q, layout="thd", cu_seqlens_q=lengths, cu_seqlens_k=lengths).sin().sum()
    expected = torch.autograd.grad(loss, q, retain_graph=True)[0]
    lengths[1] = 5
    torch.testing.assert_close(torch.autograd.grad(loss, q)[0], expected, rtol=0, atol=0)


KEPT = {
    "bias": (lambda: torch.randn(2, 4, 7, 7, device=DEVICE), lambda x: dict(bias=x)),
    "sink": (lambda: torch.randn(4, device=DEVICE), lambda x: dict(sink=x)),
    "alibi_slopes": (lambda: torch.randn(4, device=DEVICE), lambda x: dict(alibi_slopes=x)),
    "key_lengths": (lambda: torch.tensor([3, 5]), lambda x: dict(key_lengths=x)),
    "a mask": (lambda: torch.rand(7, 7) > 0.3, lambda x: dict(rule="dense(mask)", tables={"mask": x})),
}


@pytest.mark.parametrize("name", KEPT)
def test_the_backward_pass_lets_go_of_what_was_saved(numbers, name):
    make, options = KEPT[name]
    q, given = numbers(2, 4, 7, 8).requires_grad_(), make()
    out = attention(q, q, q, **options(given))
    kept = weakref.ref(given)
    del given
    assert kept() is not None
    out.sum().backward()
    assert kept() is None and out.requires_grad


def test_writing_to_out_is_found_out(numbers):
    q, weight = numbers(1, 2, 5, 8), numbers(1).requires_grad_()
    out = torch.ones_like(q)
    loss = (weight * out).sum()
    attention(q, q, q, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        attention(q, q, q, out=torch.empty_like(q))


@pytest.mark.parametrize("direct", [True, False])
def test_beside_l_and_m_the_gradients_are_the_same(numbers, monkeypatch, direct):
    """Through the operator too."""
    qkv = [numbers(2, 2, 9, 8).requires_grad_() for _ in "qkv"]
    expected = torch.autograd.grad(attention(*qkv).sin().sum(), qkv)
    if not direct:
        monkeypatch.setattr("anyflash.torch._attention.is_direct", lambda *tensors: False)
    made = torch.autograd.grad(attention(*qkv, return_lse="lm")[0].sin().sum(), qkv)
    for one, other in zip(made, expected):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
