"""anyflash for PyTorch: differentiable, in graphs, on PyTorch's own streams.

    from anyflash.torch import attention
    out = attention(q, k, v, rule=af.causal())

`import anyflash.torch.auto` makes torch.nn.functional.scaled_dot_product_attention use it. It needs PyTorch 2.4 or
newer, and 2.7 for torch.compile and torch.export; no version is linked.
"""

from . import _flops  # noqa: F401 - registers its formulas
from ._attention import attention
from ._packed import flash_attention_qkv_packed
from ._sdpa import scaled_dot_product_attention, sdpa

__all__ = ["attention", "flash_attention_qkv_packed", "scaled_dot_product_attention", "sdpa"]
