"""Other packages' interfaces on anyflash: flash_attn."""
