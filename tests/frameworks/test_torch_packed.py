"""flash_attention_qkv_packed: causal, without a scale, in as much memory as its chunks allow."""

import subprocess
import sys

import anyflash.torch._packed as packed
import pytest
import torch
from anyflash import _core
from anyflash.torch import flash_attention_qkv_packed
from anyflash.torch._attention import plain_options
from devices import DEVICE

BOUNDS = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 1e-1, torch.float16: 2e-2}
OPTIONS = plain_options(packed._CAUSAL, 1.0, "qkv")
CHUNKS = [(1, 1), (4, 3), (3, 8), (6, 2), (48, 1), (1, 48)]


def textbook(qkv):
    q, k, v = qkv
    scores = (q @ k.mT).masked_fill(torch.ones(q.shape[1], q.shape[1], device=DEVICE).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ v


def in_chunks_of_any_size(monkeypatch):
    """Every call takes as little memory as it can."""
    monkeypatch.setattr(
        packed, "_budget", lambda qkv, _: packed._core.torch_least_budget(qkv.detach(), None, None, OPTIONS)
    )


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_values_and_gradients(numbers, monkeypatch, dtype, chunks, in_chunks):
    if in_chunks:  # small calls fit as they are
        in_chunks_of_any_size(monkeypatch)
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


@pytest.mark.of_the_cpu
def test_chunks_change_no_bit(numbers):
    qkv, dout = numbers(3, 3, 720, 32).requires_grad_(), numbers(3, 720, 32)
    made = []
    for chunks in (1, 2, 8, 720):
        out = flash_attention_qkv_packed(qkv, chunks, chunks)
        made.append((out, torch.autograd.grad(out, qkv, dout)[0]))
    assert all(torch.equal(x, y) for one in made[1:] for x, y in zip(one, made[0], strict=True))


def bytes_worked_in(monkeypatch, qkv, chunks):
    """By the backward pass, beside its tensors: the most that one of its calls takes, with that call's results where
    they are not the pass's own; every other tensor that it makes."""
    taken = [0]
    backward, empty_like = _core.torch_attention_backward, torch.empty_like

    def call(dout, q, k, v, out, lse, dlse, options, wanted):
        made = backward(dout, q, k, v, out, lse, dlse, options, wanted)
        results = sum(x.nbytes for x in made if x is not None) if k is not None else 0
        taken.append(_core.torch_backward_workspace(q, k, v, options, wanted) + results)
        return made

    def only_the_result(x, **options):
        assert x.shape == qkv.shape and options.get("dtype", x.dtype) == qkv.dtype
        return empty_like(x)

    out = flash_attention_qkv_packed(qkv, chunks, chunks)
    with monkeypatch.context() as patched:
        patched.setattr(packed._core, "torch_attention_backward", call)
        patched.setattr(torch, "empty_like", only_the_result)
        for name in ("empty", "zeros", "zeros_like"):
            patched.setattr(torch, name, None)
        torch.autograd.grad(out, qkv, out.detach())
    return max(taken)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(3, 2, 2048, 32), (3, 1, 1536, 64), (3, 3, 256, 16)])
def test_more_chunks_never_take_more_memory(monkeypatch, shape, dtype):
    qkv = torch.zeros(shape, dtype=dtype, device=DEVICE, requires_grad=True)
    _, heads, length, _ = shape
    counts = [chunks for chunks in (1, 2, 4, 8, 16, 32, 64, 128, 256) if length % chunks == 0]
    taken = [bytes_worked_in(monkeypatch, qkv, chunks) for chunks in counts]
    assert taken == sorted(taken, reverse=True)
    number = 8 if dtype == torch.float64 else 4
    bounds = [heads * (length // chunks) ** 2 * number for chunks in counts]
    assert all(bytes <= max(bound, taken[-1]) for bytes, bound in zip(taken, bounds))


@pytest.mark.of_the_cpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_of_the_process(dtype):
    """Of 4 heads of 8192 tokens, in KiB: a quarter of their float32 numbers at most, with 64 chunks as with one."""
    program = f"""
import re, torch
from pathlib import Path
from anyflash.torch import flash_attention_qkv_packed

def kilobytes(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def peak(chunks, qkv):
    dout = torch.ones_like(qkv[0])
    out = flash_attention_qkv_packed(qkv, chunks, chunks)
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("VmRSS")
    made = torch.autograd.grad(out, qkv, dout)
    return kilobytes("VmHWM") - before

torch.set_num_threads(1)
peak(64, torch.randn(3, 4, 512, 64, dtype=torch.{dtype}, requires_grad=True))
qkv = torch.zeros(3, 4, 8192, 64, dtype=torch.{dtype}, requires_grad=True)
print(peak(64, qkv) - qkv.nbytes / 1024, peak(1, qkv) - qkv.nbytes / 1024)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    many, one = map(float, ran.stdout.split())
    assert max(many, one) < 3 * 8192 * 64 * 4 / 1024


def test_other_strides(numbers):
    qkv = numbers(2, 24, 3, 8).permute(2, 0, 1, 3)
    torch.testing.assert_close(flash_attention_qkv_packed(qkv, 4, 6), textbook(qkv))


def test_chunks_under_autocast(numbers, monkeypatch):
    """Both passes take the same numbers."""
    in_chunks_of_any_size(monkeypatch)
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
