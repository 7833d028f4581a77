"""anyflash for JAX: compiled by XLA with the rest of a program, differentiable, mapped.

    from anyflash.jax import attention
    out = attention(q, k, v, rule=af.causal())

It is a call through XLA's foreign function interface, registered when this package is imported. It needs JAX 0.5 or
newer; no version is linked.
"""

from ._attention import attention

__all__ = ["attention"]
