"""`import anyflash.torch.auto`: from then on torch.nn.functional.scaled_dot_product_attention runs on anyflash wherever
that covers the call; see anyflash.torch.scaled_dot_product_attention, and anyflash.torch.sdpa() for a block alone."""

from ._sdpa import switch_on

switch_on()
