"""FlashAttention-3's functions (the module flash_attn_interface of Dao-AILab/flash-attention's folder hopper) on
anyflash, on CPUs too. Signatures, meaning and results are FlashAttention-3's. What they share with version 2 is as in
anyflash.compat.flash_attn, the differences too. Beyond it:

- s_aux (heads,), by keyword alone: a sink's logit of each head, as builds of version 3 with sinks name it, with its
  gradient;
- qv, q_descale, k_descale, v_descale, attention_chunk, cu_seqlens_q and cu_seqlens_k_new of a cache, rotary_seqlens and
  scheduler_metadata are refused where they would have an effect;
- num_splits, pack_gqa and sm_margin are ignored, since they change no result;
- the types are those of anyflash, without float8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._frontend import truth
from ..torch import attention
from ._checks import checked_sink, with_s_aux
from ._kvcache import with_cache
from ._shared import check_tensor, options
from ._varlen import attend

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention of q (batch, queries, heads, channels) to k and v (batch, keys, heads of keys, channels); v may have
    other channels. causal and window_size as in anyflash.compat.flash_attn.

    Returns out, or (out, softmax_lse (batch, heads, queries)) if return_attn_probs. Differentiable.
    """
    _refuse(attention_chunk, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    call = options(0.0, softmax_scale, causal, window_size, softcap, deterministic)
    return with_s_aux(
        attention,
        q,
        k,
        v,
        layout="bshd",
        sink=checked_sink(s_aux, q),
        return_lse=truth("return_attn_probs", return_attn_probs),
        **call,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of qkv (batch, sequence, 3, heads, channels), or (batch, sequence, heads of q, of k and of v,
    channels) with num_heads_q, without copies."""
    check_tensor("qkv", qkv)
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif qkv.dim() == 4 and num_heads_q in range(qkv.shape[2] - 2, 0, -2):
        of_keys = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, of_keys, of_keys], 2)
    else:
        raise ValueError(
            f"qkv: shape {tuple(qkv.shape)} with num_heads_q {num_heads_q}, expected (batch, sequence, 3, heads, "
            "channels), or rank 4 with num_heads_q heads before those of keys and values"
        )
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention inside sequences that lie end to end, as anyflash.compat.flash_attn has it. seqused_q and seqused_k
    (batch,): how many tokens of each sequence are in use, from its first on. The others are in no sequence, as those
    after the last cumulative length: out 0, lse -inf, gradients 0. The lengths say the longest: max_seqlen may be any.

    Returns out, or (out, softmax_lse (heads, queries)) if return_attn_probs. Differentiable.
    """
    _refuse(attention_chunk, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    call = options(0.0, softmax_scale, causal, window_size, softcap, deterministic)
    call |= dict(alibi_slopes=None, sink=checked_sink(s_aux, q))
    return with_s_aux(
        attend,
        q,
        k,
        v,
        (cu_seqlens_q, cu_seqlens_k),
        (max_seqlen_q, max_seqlen_k),
        None,
        truth("return_attn_probs", return_attn_probs),
        call,
        (seqused_q, seqused_k),
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention to a cache, as anyflash.compat.flash_attn has it; page_table is its block_table.

    Returns out, or (out, softmax_lse (batch, heads, queries), and two empty tensors in place of the parts that
    num_splits makes there) if return_softmax_lse. A backward call raises NotImplementedError.
    """
    _refuse(
        attention_chunk,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_seqlens=rotary_seqlens,
        scheduler_metadata=scheduler_metadata,
    )
    made = with_s_aux(
        with_cache,
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        page_table,
        softmax_scale,
        causal,
        window_size,
        softcap,
        rotary_interleaved,
        None,
        return_softmax_lse,
        checked_sink(s_aux, q),
        "page_table",
    )
    return (*made, made[0].new_empty(0), made[0].new_empty(0)) if isinstance(made, tuple) else made


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The attention whose keys were split: of out_partial (splits, batch, sequence, heads, channels) and lse_partial
    (splits, batch, sequence, heads), its out (batch, sequence, heads, channels) in out_dtype, which is written to `out`
    if given, and its lse (batch, sequence, heads). A part whose lse is -inf counts nothing."""
    check_tensor("out_partial", out_partial)
    check_tensor("lse_partial", lse_partial)
    if out_partial.dim() != 5 or out_partial.shape[:4] != lse_partial.shape:
        raise ValueError(
            f"lse_partial: shape {tuple(lse_partial.shape)}, expected {tuple(out_partial.shape[:4])} as out_partial, "
            "(splits, batch, sequence, heads, channels), begins"
        )
    lse = lse_partial.logsumexp(0)
    weights = (lse_partial - lse).exp().masked_fill(lse_partial.isneginf(), 0)
    whole = (weights[..., None] * out_partial).masked_fill(weights[..., None] == 0, 0).sum(0)
    whole = whole.to(out_dtype or out_partial.dtype)
    if out is None:
        return whole, lse
    check_tensor("out", out)
    if out.shape != whole.shape or out.dtype != whole.dtype:
        expected = f"{whole.dtype} of {tuple(whole.shape)}"
        raise ValueError(f"out: {out.dtype} of shape {tuple(out.shape)}, expected {expected}")
    return out.copy_(whole), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> None:
    """None, which flash_attn_with_kvcache takes as scheduler_metadata: anyflash plans its calls itself."""


def _refuse(attention_chunk: int, **given: Any) -> None:
    """What is not offered, unless it says nothing."""
    if attention_chunk != 0:
        raise ValueError(f"attention_chunk: {attention_chunk}, expected 0: chunks are not offered; take window_size")
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}: given, expected None: {_INSTEAD.get(name, 'it is not offered')}")


_INSTEAD = {
    **{f"{name}_descale": "float8 is not offered; scale the tensors before the call" for name in "qkv"},
    "cu_seqlens_q": "it is not offered; anyflash.compat.flash_attn.flash_attn_varlen_func takes it with block_table",
    "cu_seqlens_k_new": "it is not offered; new keys are (batch, new, heads, channels)",
    "rotary_seqlens": "it is not offered; keys and queries are rotated at cache_seqlens",
    "scheduler_metadata": "anyflash plans its calls itself",
}
