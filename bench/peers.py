"""PyTorch's scaled_dot_product_attention beside anyflash: the path that it takes by itself, and its math path."""

import timed_case
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

PRODUCT = 1024  # rows and columns of the factors of product()
NAME = f"torch {torch.__version__.split('+')[0]}"


class Case(timed_case.Case):
    """A case whose arrays are PyTorch's, and whose peer PyTorch is. No rule: full, or causal."""

    def array(self, numbers):
        return torch.tensor(numbers, dtype=getattr(torch, self.type))

    def numbers(self, array):
        return array.detach().double().numpy()

    def peer_calls(self, what):
        torch.set_num_threads(self.threads)
        return {NAME: self.peer_call(what), f"{NAME} math": self.peer_call(what, SDPBackend.MATH)}

    def peer_call(self, what, backend=None):
        """backend: None for PyTorch's own choice. Backward is the gradients alone, without the forward pass."""
        attention = torch.nn.functional.scaled_dot_product_attention
        options = dict(is_causal=self.causal, enable_gqa=self.heads != self.kv_heads)

        def forward(q, k, v):
            if backend is None:
                return attention(q, k, v, **options)
            with sdpa_kernel(backend):
                return attention(q, k, v, **options)

        if what == "forward":
            turn = self.in_turn(len(self.kv) // 2)  # not what anyflash has just read
            return lambda: forward(self.q, *next(turn))
        leaves = [x.detach().clone().requires_grad_() for x in (self.q, *self.kv[0])]
        out = forward(*leaves)
        return lambda: torch.autograd.grad(out, leaves, self.dout, retain_graph=True)


def product(threads, type="float32"):
    """An operation of PyTorch's own on so many threads, as a model has between two attentions."""
    torch.set_num_threads(threads)
    a = torch.ones(PRODUCT, PRODUCT, dtype=getattr(torch, type))
    return lambda: torch.mm(a, a)
