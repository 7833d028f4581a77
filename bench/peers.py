"""One case of the grid, as calls of anyflash and of PyTorch's scaled_dot_product_attention."""

import torch

import anyflash as af

NAME = f"torch {torch.__version__.split('+')[0]}"


class Case:
    def __init__(self, type_, batch, heads, sequence, d, causal, threads):
        torch.manual_seed(0)
        self.shape = (batch, heads, sequence, d)
        self.causal, self.threads = causal, threads
        self.q, self.k, self.v, self.dout = (torch.randn(self.shape).to(getattr(torch, type_)) for _ in range(4))

    def flops(self, what):
        batch, heads, sequence, d = self.shape
        forward = 4 * batch * heads * sequence * sequence * d * (0.5 if self.causal else 1.0)
        return forward if what == "forward" else 2.5 * forward

    def calls(self, what):
        """(ours, the peer's): functions without arguments. The two must agree."""
        options = dict(rule=af.causal() if self.causal else af.full(), threads=self.threads)
        out, lse = af.attention(self.q, self.k, self.v, return_lse=True, **options)
        leaves = [x.detach().clone().requires_grad_(what == "backward") for x in (self.q, self.k, self.v)]

        def peer_forward():
            torch.set_num_threads(self.threads)
            return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=self.causal)

        peer_out = peer_forward()
        worst = (out.double() - peer_out.detach().double()).abs().max().item()
        assert worst < 0.05, f"results differ by {worst}"
        if what == "forward":
            return lambda: af.attention(self.q, self.k, self.v, **options), peer_forward
        return (lambda: af.attention_backward(self.dout, self.q, self.k, self.v, out, lse, **options),
                lambda: torch.autograd.grad(peer_out, leaves, self.dout, retain_graph=True))
