"""flash_attention_qkv_packed: causal, without a scale, in as much memory as its chunks allow."""

import pytest
import torch
from devices import DEVICE

import anyflash.torch._packed as packed
from anyflash.torch import flash_attention_qkv_packed

BOUNDS = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 1e-1, torch.float16: 2e-2}
CHUNKS = [(1, 1), (4, 3), (3, 8), (6, 2), (48, 1), (1, 48)]


def textbook(qkv):
    q, k, v = qkv
    scores = (q @ k.mT).masked_fill(torch.ones(q.shape[1], q.shape[1], device=DEVICE).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_values_and_gradients(numbers, monkeypatch, dtype, chunks, in_chunks):
    if in_chunks:  # small calls fit as they are
        monkeypatch.setattr(packed, "_fits", lambda *call: False)
    qkv, dout = numbers(3, 2, 48, 16, dtype=dtype), numbers(2, 48, 16, dtype=dtype)
    qkv[0] *= 0.3
    wide = qkv.double().requires_grad_()
    expected = textbook(wide)
    expected.backward(dout.double())
    qkv.requires_grad_()
    out = flash_attention_qkv_packed(qkv, *chunks)
    out.backward(dout)
    assert out.shape == (2, 48, 16) and out.dtype == dtype == qkv.grad.dtype
    bound = BOUNDS[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=bound)
    torch.testing.assert_close(qkv.grad.double(), wide.grad, rtol=bound, atol=2 * bound)


@pytest.mark.parametrize("chunks, fits", [(1, True), (512, False)])
def test_the_chunks_decide(chunks, fits):
    qkv = torch.empty(3, 2, 8192, 64, device=DEVICE)
    assert packed._fits(qkv, chunks * chunks) == fits


def test_other_strides(numbers):
    qkv = numbers(2, 24, 3, 8).permute(2, 0, 1, 3)
    torch.testing.assert_close(flash_attention_qkv_packed(qkv, 4, 6), textbook(qkv))


def test_chunks_under_autocast(numbers, monkeypatch):
    """Both passes take the same numbers."""
    monkeypatch.setattr("anyflash.torch._packed._fits", lambda *_: False)
    qkv = (numbers(3, 2, 12, 8).float() * 3).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        out = flash_attention_qkv_packed(qkv, 3, 2)
    expected = flash_attention_qkv_packed(qkv.bfloat16(), 3, 2)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    (made,), (wanted,) = (torch.autograd.grad(x.float().sin().sum(), qkv) for x in (out, expected))
    assert torch.equal(made, wanted)


@pytest.mark.of_the_cpu
def test_what_has_no_plain_memory_is_named():
    for qkv in (torch.randn(3, 4, 6, 8, dtype=torch.complex64).conj().imag, torch._efficientzerotensor((3, 4, 6, 8))):
        with pytest.raises(ValueError, match="^qkv: negated lazily or of zeros without memory"):
            flash_attention_qkv_packed(qkv, 1, 1)
