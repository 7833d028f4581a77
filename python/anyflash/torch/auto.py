"""After `import anyflash.torch.auto`, torch.nn.functional.scaled_dot_product_attention runs on anyflash for all calls
that anyflash supports; see anyflash.torch.scaled_dot_product_attention. undo() ends it. For one block of code use
anyflash.torch.sdpa()."""

import sys

from ._sdpa import switch_off, switch_on

switch_on()
_on = True


def undo() -> None:
    """Restores PyTorch's own torch.nn.functional.scaled_dot_product_attention; inside a block of sdpa(), when that
    block ends. A second call does nothing. `import anyflash.torch.auto` then switches anyflash on again. `from
    anyflash.torch import auto` does not, because it finds the old module in the package."""
    global _on
    if _on:
        _on = False
        switch_off()
        sys.modules.pop(__name__, None)
