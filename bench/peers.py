"""One case of the grid, as calls of anyflash and of PyTorch's scaled_dot_product_attention."""

import torch

import anyflash as af

NAME = f"torch {torch.__version__.split('+')[0]}"
# What results may differ by, relative to the largest: a few units in the last place of the type, as both sides round.
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-12}


class Case:
    def __init__(self, type_, batch, heads, sequence, d, causal, threads):
        torch.manual_seed(0)
        self.type, self.shape, self.causal, self.threads = type_, (batch, heads, sequence, d), causal, threads
        self.q, self.k, self.v, self.dout = (torch.randn(self.shape).to(getattr(torch, type_)) for _ in range(4))
        self.rule = af.causal() if causal else af.full()

    def flops(self, what):
        batch, heads, sequence, d = self.shape
        explained = af.explain(self.rule, sequence, d_qk=d, d_v=d)
        return batch * heads * (explained.forward_flops if what == "forward" else explained.backward_flops)

    def calls(self, what):
        """(ours, the peer's): functions without arguments. Their results are compared first."""
        options = dict(rule=self.rule, threads=self.threads)
        out, lse = af.attention(self.q, self.k, self.v, return_lse=True, **options)
        leaves = [x.detach().clone().requires_grad_(what == "backward") for x in (self.q, self.k, self.v)]

        def peer_forward():
            torch.set_num_threads(self.threads)
            return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=self.causal)

        peer_out = peer_forward()
        self.same("out", out, peer_out)
        if what == "forward":
            return lambda: af.attention(self.q, self.k, self.v, **options), peer_forward

        def backward():
            return af.attention_backward(self.dout, self.q, self.k, self.v, out, lse, **options)

        def peer_backward():
            return torch.autograd.grad(peer_out, leaves, self.dout, retain_graph=True)

        gradients = backward()
        for name, ours, theirs in zip(("dq", "dk", "dv"), (gradients.dq, gradients.dk, gradients.dv), peer_backward()):
            self.same(name, ours, theirs)
        return backward, peer_backward

    def same(self, name, ours, theirs):
        ours, theirs = ours.double(), theirs.detach().double()
        difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        if not difference <= TOLERANCE[self.type]:
            raise SystemExit(f"bench/compare: {name} of {self.type} {self.shape}, causal {self.causal}: "
                             f"differs from {NAME} by "
                             f"{difference:.1e} of its largest, expected at most {TOLERANCE[self.type]:.0e}")
