"""learn/python/triton_attention.py, forward and backward, against float64; without a GPU in Triton's interpreter, in a
process of its own: Triton reads that setting when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

CASES = [(1, 1, 16), (70, 33, 32), (5, 130, 64), (129, 65, 16), (3, 0, 16)]  # queries, keys, d


def check(queries, keys, d, causal):
    import torch
    import triton_attention

    generator, device = torch.Generator().manual_seed(queries), "cuda" if torch.cuda.is_available() else "cpu"
    random = lambda n: torch.randn(2, n, d, generator=generator).to(device)
    q, k, v, dout = random(queries), random(keys), random(keys), random(queries)
    out, lse = triton_attention.forward(q, k, v, causal)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    s = exact[0] @ exact[1].transpose(1, 2) / d**0.5
    if causal:
        hidden = torch.arange(queries)[:, None] < torch.arange(keys)[None]
        s = s.masked_fill(hidden.to(device), -torch.inf)
    expected = torch.softmax(s, -1) @ exact[2]
    gradients = triton_attention.backward(q, k, v, out, lse, dout, causal)
    results = [(out, expected), (lse, s.logsumexp(-1))]
    results += zip(gradients, torch.autograd.grad(expected, exact, dout.double(), retain_graph=True))
    for mine, right in results:
        torch.testing.assert_close(mine.double(), right.detach(), atol=2e-5, rtol=0)


def test_forward_and_backward():
    import torch

    environment = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("right") == 2 * len(CASES), done.stderr[-2000:]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "learn" / "python"))
    for case in CASES:
        for causal in (False, True):
            check(*case, causal)
            print("right", case, causal)
