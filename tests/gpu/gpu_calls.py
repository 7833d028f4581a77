"""Tensors on the GPU, calls on them, and the same in float64 by PyTorch."""

import anyflash as af
import torch


def tensors(b=2, h=4, n=300, d=64, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(b, h, n, d, device="cuda", dtype=dtype, generator=generator) for _ in range(3)]


def reference(q, k, v, causal=True):
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)


def close(out, expected):
    return (out.double() - expected).abs().max().item() < 2e-2


def gradients(q, k, v, dout, **options):
    out, lse = af.attention(q, k, v, return_lse=True, **options)
    return af.attention_backward(dout, q, k, v, out, lse, **options)


def reference_gradients(q, k, v, dout, causal=True):
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(reference(*inputs, causal), inputs, dout.double())
