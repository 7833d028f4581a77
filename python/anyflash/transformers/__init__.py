"""`import anyflash.transformers`, then attn_implementation="anyflash" in Hugging Face Transformers (4.57 or newer).

    import anyflash.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="anyflash")

The logits are those of "eager", which stores the whole matrix of scores, except at padding positions: a query that sees
no key gives 0 here, but the mean of all values in "eager". Soft caps, sliding windows and chunks, sink logits, position
biases, chosen keys (indices, block_indices), caches and grouped heads are supported.

Unknown models and arguments are refused with a ValueError of one line: a model that computes its attention itself, when
it is made; an argument of a call that may change the result. Attention weights are not returned: output_attentions=True
is logged once. Dropout inside of attention is computed by Transformers' "sdpa", or with a soft cap or sinks by the
model's own "eager", which is logged once. Both are warnings of the logger "anyflash.transformers".
"""

from __future__ import annotations

import logging
import numbers
import sys
from typing import Any

import torch
import transformers
from torch import Tensor

from .. import _rules
from ..compat._checks import checked, traced
from ..torch import attention
from ..torch._attention import is_usual, plain_attention
from ..torch._rule import constant

if not hasattr(transformers.PreTrainedModel, "get_correct_attn_implementation"):
    raise ImportError(f"transformers: version {transformers.__version__}, expected 4.57 or newer")

from transformers import AttentionInterface, AttentionMaskInterface

from ._masks import known, make_mask
from ._models import NAME, is_no_flash_attention, refuse_the_others

_log = logging.getLogger(__name__)
_FULL, _CAUSAL = _rules.full(), _rules.causal()
_KNOWN: dict[str, Any] = {"": _FULL, "causal()": _CAUSAL}
_told: set[str] = set()

# Arguments that do not change the result, given the mask: models pass them on from their callers. A window is part of
# the mask that Transformers makes; "eager" applies no other window, although OLMoE passes one.
_WITHOUT_EFFECT = frozenset(
    """
    sliding_window position_ids cache_position use_cache logits_to_keep num_items_in_batch deterministic return_dict
    max_length_q max_length_k output_hidden_states output_router_logits input_ids inputs_embeds decoder_input_ids labels
    return_loss token_type_ids mm_token_type_ids pixel_values pixel_values_videos pixel_mask image_grid_thw grid_thw
    video_grid_thw image_sizes interpolate_pos_encoding input_values input_features input_features_mask bbox
    shift_labels ignore_index skip_logits seq_idx
""".split()
)


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
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """For Transformers' AttentionInterface: query (batch, heads, queries, channels), key and value (batch, heads of
    keys, keys, channels), attention_mask boolean or added, (batch, 1 or heads, queries, keys or more). Returns (batch,
    queries, heads, channels) and no weights. The mask includes windows. Without a mask, the queries of a causal module
    are aligned with the last keys.

    s_aux : (heads,), sink logits; sinks : (batch, heads, queries, 1), one for each query
    indices : (batch, queries, n), the keys that a query may see, if the mask allows them too; negative ones are ignored
    block_indices : (batch, a divisor of the heads, queries, n), likewise blocks of module.indexer.block_size keys
    cu_seq_lens_q, cu_seq_lens_k : (sequences + 1,), cumulative lengths; a query sees only keys of its own sequence

    Raises ValueError with one line for every other argument that may change the result.
    """
    for name, given in more.items():
        if given is not None and name not in _WITHOUT_EFFECT:
            _refuse(name, given)
    told = None if attention_mask is None else known(attention_mask, query, key)
    if (
        dropout == 0.0
        and indices is block_indices is position_bias is sinks is cu_seq_lens_q is cu_seq_lens_k is None
        and (attention_mask is None or told is not None)
    ):  # as what follows, in half the time
        if told is None:
            queries = query.shape[2]
            rule = _CAUSAL if queries > 1 and _is_causal(module, is_causal, queries, key.shape[2]) else _FULL
        else:
            rule, key, value = told.rule, key.narrow(2, 0, told.keys), value.narrow(2, 0, told.keys)
        if softcap is s_aux is None and is_usual(query, key, value, None, 0.0, scaling) and query.is_cpu:
            out = plain_attention(query, key, value, rule, scaling, align="none_end")
        else:
            out = attention(
                query, key, value, rule=rule, align="none_end", scale=scaling, softcap=softcap or 0.0, sink=s_aux
            )
        return out.transpose(1, 2), None
    if not isinstance(dropout, numbers.Real):
        raise TypeError(f"dropout: type {type(dropout).__name__}, expected a number")
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout: {dropout}, expected 0 to 1")
    (batch, heads, queries), keys = query.shape[:3], key.shape[2]
    _check_shape("sinks", sinks, (batch, heads, queries, 1))
    _check_shape("indices", indices, (batch, queries, None))
    _check_shape("block_indices", block_indices, (batch, None, queries, None))
    if block_indices is not None and heads % block_indices.shape[1]:
        raise ValueError(f"block_indices: {block_indices.shape[1]} heads, expected a divisor of {heads}")
    mask = None if attention_mask is None else attention_mask[..., :keys]
    causal = mask is None and query.shape[2] > 1 and _is_causal(module, is_causal, query.shape[2], keys)
    chosen = None
    if indices is not None or block_indices is not None:
        chosen = _chosen(module, query, key, indices, block_indices)
    packed = _packed(query, key, cu_seq_lens_q, cu_seq_lens_k)
    if dropout > 0.0:
        if packed is not None and packed[0].shape[0] > 2:
            raise ValueError(f"dropout: {dropout} with cu_seq_lens_q, expected 0; set attention_dropout=0")
        if causal:
            seen = torch.ones(1, 1, query.shape[2], keys, dtype=torch.bool, device=query.device)
            mask = seen.tril_(keys - query.shape[2])
        return _with_dropout(
            module,
            query,
            key,
            value,
            _both(mask, chosen),
            dropout=dropout,
            scaling=scaling,
            position_bias=position_bias,
            softcap=softcap,
            s_aux=s_aux,
            sinks=sinks,
        )
    if chosen is not None:
        told = None
    if told is not None:
        mask, keys = None, told.keys
        key, value = key[:, :, :keys], value[:, :, :keys]
    bias = None if position_bias is None else position_bias[..., :keys]
    text = "causal()" if causal else ""
    rule = told.rule if told is not None else _KNOWN[text]
    rule, tables, bias = _visible(rule, text, _both(mask, chosen), bias, packed, query.dtype)
    options: Any = dict(
        rule=rule, tables=tables, align="none_end", scale=scaling, softcap=softcap or 0.0, bias=bias, sink=s_aux
    )
    if sinks is None:
        out = attention(query, key, value, **options)
    else:  # one more key with value 0: the others keep the share exp(lse) / (exp(lse) + exp(sink))
        out, lse = attention(query, key, value, return_lse=True, **options)
        out = out * torch.sigmoid(lse.unsqueeze(-1) - sinks).to(out.dtype)
    return out.transpose(1, 2), None


def _visible(
    rule: Any,
    text: str,
    mask: Tensor | None,
    bias: Tensor | None,
    packed: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> tuple[Any, Any, Tensor | None]:
    """(rule, tables, bias) of a call, from its rule (also as text) and the mask, within each packed sequence."""
    tables: dict[str, Tensor] = {}
    if mask is not None and mask.dtype == torch.bool:
        if mask.is_cuda:  # added, as in PyTorch: here faster than a rule
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
        else:
            rule, tables["mask"], mask = f"{text} & dense(mask)" if text else "dense(mask)", mask, None
    if mask is not None:
        bias = mask if bias is None else bias + mask
    if packed is not None and isinstance(rule, str):
        rule += " & documents_packed(cu_q, cu_k)"
        tables["cu_q"], tables["cu_k"] = packed
    elif packed is not None:
        rule = rule & _rules.documents_packed(*packed)
    return rule, tables or None, bias


def _check_shape(name: str, given: Any, shape: tuple[int | None, ...]) -> None:
    """Each size is the shape's or 1; None: any."""
    if given is None:
        return
    if not isinstance(given, Tensor):
        raise TypeError(f"{name}: type {type(given).__name__}, expected a torch.Tensor")
    if given.dim() != len(shape) or any(b is not None and a not in (1, b) for a, b in zip(given.shape, shape)):
        wanted = ", ".join("n" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: shape {tuple(given.shape)}, expected ({wanted})")


def _refuse(name: str, given: Any) -> None:
    """Raises for an argument that is not in _WITHOUT_EFFECT, unless its value has no effect."""
    if name == "output_attentions":
        if given:
            _tell('attention weights are not returned: output_attentions=True needs attn_implementation="eager"')
    elif name == "cache":
        raise ValueError(
            "cache: a paged cache, expected one of Transformers' own kinds; use generate, not generate_batch"
        )
    else:
        raise ValueError(
            f'{name}: an argument that "{NAME}" does not know; leave it out or use attn_implementation="eager"'
        )


def _is_causal(module: Any, is_causal: bool | None, queries: int, keys: int) -> bool:
    """Whether a call without a mask is causal."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
        if is_causal is None:
            name = type(module).__name__
            raise ValueError(f"is_causal: not told by {name}, and there is no mask; pass a mask or is_causal")
    if is_causal and queries > keys:
        raise ValueError(f"attention_mask: None for {queries} queries and {keys} keys of a causal module; pass a mask")
    return is_causal


def _packed(query: Tensor, key: Tensor, cu_q: Any, cu_k: Any) -> tuple[Tensor, Tensor] | None:
    """Cumulative lengths of sequences that lie end to end; None where they are known to be of one sequence."""
    for name, given in (("cu_seq_lens_q", cu_q), ("cu_seq_lens_k", cu_k)):
        if given is None:
            continue
        if not isinstance(given, Tensor) or given.dim() != 1 or given.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name}: expected a tensor of rank 1 of int32 or int64, the cumulative lengths")
    if cu_q is None and cu_k is None:
        return None
    cu_q, cu_k = cu_k if cu_q is None else cu_q, cu_q if cu_k is None else cu_k
    if cu_q.shape != cu_k.shape:
        raise ValueError(f"cu_seq_lens_k: {cu_k.shape[0]} numbers, expected {cu_q.shape[0]} as cu_seq_lens_q")
    if cu_q.shape[0] < 2:
        raise ValueError(f"cu_seq_lens_q: {cu_q.shape[0]} numbers, expected sequences + 1")
    if query.shape[0] != 1:
        raise ValueError(
            f"cu_seq_lens_q: given with a batch of {query.shape[0]}, expected 1; pad the sequences instead"
        )
    cu_q = checked("cu_seq_lens_q", cu_q, sizes=query.shape[2:3])
    cu_k = checked("cu_seq_lens_k", cu_k, sizes=key.shape[2:3])
    return None if cu_q.shape[0] == 2 and cu_q.is_cpu and cu_k.is_cpu and not traced() else (cu_q, cu_k)


def _chosen(
    module: Any, query: Tensor, key: Tensor, indices: Tensor | None, block_indices: Tensor | None
) -> Tensor | None:
    """The keys that indices and block_indices choose, as a mask."""
    keys = key.shape[2]
    out = None if indices is None else _one_hot("indices", indices, keys).unsqueeze(1)
    if block_indices is not None:
        size = getattr(getattr(module, "indexer", None), "block_size", None)
        if size is None:
            raise ValueError(f"block_indices: {type(module).__name__} has no indexer.block_size; pass a mask")
        blocks = _one_hot("block_indices", block_indices, -(-keys // size)).repeat_interleave(size, -1)[..., :keys]
        blocks = blocks.repeat_interleave(query.shape[1] // blocks.shape[1], 1)
        out = blocks if out is None else out & blocks
    return out


def _one_hot(name: str, indices: Tensor, size: int) -> Tensor:
    """True at each index of the last axis; negative indices are ignored. On a GPU, where values are not read, so are
    indices that are too large."""
    if indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: {indices.dtype}, expected torch.int32 or torch.int64")
    if indices.is_cpu and not torch.compiler.is_compiling() and indices.numel() and int(indices.max()) >= size:
        raise ValueError(f"{name}: {int(indices.max())}, expected at most {size - 1}")
    out = torch.zeros(*indices.shape[:-1], size + 1, dtype=torch.bool, device=indices.device)
    none = (indices < 0) | (indices >= size)
    return out.scatter_(-1, torch.where(none, size, indices).long(), True)[..., :size]


def _both(mask: Tensor | None, chosen: Tensor | None) -> Tensor | None:
    if mask is None or chosen is None:
        return chosen if mask is None else mask
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, float("-inf"))


def _with_dropout(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    scaling: float | None,
    position_bias: Tensor | None,
    **special: Any,
) -> tuple[Tensor, None]:
    """Runs Transformers' own functions: "sdpa", or the model's "eager" for a soft cap and sinks."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    special = {name: given for name, given in special.items() if given is not None}
    options = dict(dropout=dropout, scaling=scaling, position_bias=position_bias)
    if not special:
        _tell("attention left to Transformers' sdpa: dropout is not 0")
        return sdpa_attention_forward(module, query, key, value, mask, is_causal=False, **options)[0], None
    eager = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    if eager is None:
        raise ValueError(f"dropout: {dropout} with {', '.join(special)}, expected 0; set attention_dropout=0")
    _tell("attention left to the model's eager: dropout is not 0")
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    options["scaling"] = query.shape[-1] ** -0.5 if scaling is None else scaling
    return eager(module, query, key, value, mask, **options, **special)[0], None


@constant  # a graph's maker is told
def _tell(what: str) -> None:
    if what not in _told:
        _told.add(what)
        _log.warning(what)


is_no_flash_attention()
refuse_the_others()
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, make_mask)
