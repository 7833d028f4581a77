"""`import anyflash.transformers`, then attn_implementation="anyflash" in Hugging Face Transformers (4.53 or newer).

    import anyflash.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="anyflash")

The logits are those of "eager", which holds the whole matrix of scores, except at places that are padding themselves: a
query whose every key is hidden gives 0 here, the mean of all values there. Soft caps, sliding windows, sink logits
(s_aux), position biases and grouped heads are covered. Attention weights are not returned. Dropout inside of attention
is left to Transformers' "sdpa", which is logged once, as a warning of the logger "anyflash.transformers".
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from . import _rules
from .torch import attention

_log = logging.getLogger(__name__)
_CAUSAL, _FULL = _rules.causal(), _rules.full()
_told = False


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Of Transformers' AttentionInterface: query (batch, heads, queries, channels), key and value (batch, heads of
    keys, keys, channels), attention_mask boolean or added, (batch, 1 or heads, queries, keys or more). Returns (batch,
    queries, heads, channels) and no weights. Windows are part of the mask.

    Raises ValueError with one line for dropout together with softcap or s_aux, and for paged caches.
    """
    if more.get("cache") is not None:
        raise ValueError(
            "cache: a paged cache, expected one of Transformers' own kinds; use generate, not generate_batch"
        )
    if dropout > 0.0:
        if softcap is not None or s_aux is not None:
            raise ValueError(f"dropout: {dropout} with a soft cap or sinks, expected 0: set attention_dropout=0")
        return _with_dropout(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                             is_causal=is_causal, position_bias=position_bias, **more)  # fmt: skip
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    keys = key.shape[2]
    rule: Any = _CAUSAL if causal and attention_mask is None and query.shape[2] > 1 else _FULL
    tables = None
    bias = None if position_bias is None else position_bias[..., :keys]
    if attention_mask is not None:
        mask = attention_mask[..., :keys]
        if mask.dtype != torch.bool:
            bias = mask if bias is None else bias + mask
        elif mask.is_cuda:  # added, as PyTorch does: faster there than a rule
            hidden = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
            bias = hidden if bias is None else bias + hidden
        else:
            rule, tables = "dense(mask)", {"mask": mask}
    out = attention(query, key, value, rule=rule, scale=scaling, softcap=softcap or 0.0, bias=bias, sink=s_aux,
                    tables=tables)  # fmt: skip
    return out.transpose(1, 2), None


def _with_dropout(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
    global _told
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not _told:
        _told = True
        _log.warning("attention left to Transformers' sdpa: dropout is not 0")
    return sdpa_attention_forward(*arguments, **options)  # type: ignore[no-any-return]


def _is_no_flash_attention() -> None:
    """Transformers 5 takes every name with "flash" in it for a kernel of the flash_attn package, which reads lengths in
    place of masks. Modules that are loaded already hold the function by its name; later ones find it here."""
    from transformers.utils import generic

    name_of_it = "is_flash_attention_requested"
    asked: Any = getattr(generic, name_of_it, None)
    if asked is None:
        return

    @functools.wraps(asked)
    def is_flash_attention_requested(config: Any = None, requested_attention_implementation: str | None = None,
                                     version: Any = None) -> Any:  # fmt: skip
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name != "anyflash" and asked(config, requested_attention_implementation, version)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name_of_it) is asked:
            setattr(module, name_of_it, is_flash_attention_requested)


_is_no_flash_attention()
AttentionInterface.register("anyflash", attention_forward)
AttentionMaskInterface.register("anyflash", sdpa_mask)
