"""No queries x keys buffer sneaks in: peak memory of long calls in a process of their own."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import numpy as np
import anyflash as af

n, bias_kind = int(sys.argv[1]), sys.argv[2]
rng = np.random.default_rng(0)

def tensors(n):
    q, k, v, dout = (rng.standard_normal((1, 1, n, 64)).astype(np.float32) for _ in range(4))
    shape = {"keys": (1, 1, 1, n), "queries": (1, 1, n, 1)}.get(bias_kind)
    return q, k, v, dout, None if shape is None else rng.standard_normal(shape).astype(np.float32)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

options = dict(rule=af.local(256), threads=2, softcap=5.0 if bias_kind == "softcap" else 0.0)
for length in (512, n):
    q, k, v, dout, bias = tensors(length)
    before = peak()
    out, lse = af.attention(q, k, v, bias=bias, return_lse=True, **options)
    forward = peak()
    gradients = af.attention_backward(dout, q, k, v, out, lse, bias=bias, **options)
    backward = peak()
outputs = (out.nbytes + lse.nbytes) / 2**20
results = sum(g.nbytes for g in gradients if g is not None) / 2**20
print(forward - before - outputs, backward - forward - results)
"""


@pytest.mark.parametrize("n", [16_384, 32_768])
@pytest.mark.parametrize("bias", ["none", "softcap", "keys", "queries"])
def test_memory_is_linear(n, bias):
    """A boolean n x n matrix would take 256 MB and 1 GB. Panels of a few hundred rows a thread take a few MB."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(n), bias], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    forward, backward = map(float, done.stdout.split())
    assert forward < 24 * n / 16_384, f"forward: {forward:.1f} MB beside inputs and outputs"
    assert backward < 48 * n / 16_384, f"backward: {backward:.1f} MB beside inputs and outputs"
