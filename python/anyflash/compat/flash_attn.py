"""The functions of the flash_attn package on anyflash, on CPUs too: code written for it runs by changing one import.

    from anyflash.compat.flash_attn import flash_attn_func

or no import: after install(), `import flash_attn` imports this module where the package is not installed. See also
anyflash.compat.bert_padding, and anyflash.compat.flash_attn_interface for the functions of FlashAttention-3.

Signatures and meaning are those of flash_attn 2 (Dao-AILab/flash-attention): tensors are (batch, sequence, heads,
channels); causal and windows are bottom-right aligned, the last query at the last key; a query that sees no key gives
0. float32 and float64 work too, and head sizes up to 256. The differences are:

- dropout_p other than 0 raises ValueError;
- softmax_lse of a query that sees no key is -inf;
- S_dmask, the third result with return_attn_probs=True, is empty, as flash_attn's is without dropout;
- num_splits changes nothing. Results are repeatable to the bit, except for dq on Hopper GPUs (float32 and float64: up
  to 128 channels), which needs deterministic=True for that;
- lengths (cu_seqlens, cache_seqlens) and page tables may be on the CPU while tensors are on a GPU. They are then
  checked, and on Hopper GPUs more kernels support the call.

Calls with lengths and tables on a GPU do not wait for their values and may be captured in a CUDA graph. The values are
not checked but clamped: lengths to the nearest possible ones, and page numbers to the nearest pages that exist. New
keys beyond a cache overwrite its last entry. So a batch entry that is not used needs a page of its own.

All of it works in torch.compile(fullgraph=True), where lengths and tables on the CPU are checked when the call runs.
Wrong input raises ValueError or TypeError with one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._frontend import truth
from ..torch import attention
from ._install import install
from ._kvcache import flash_attn_with_kvcache
from ._shared import check_tensor, options, with_no_probabilities
from ._varlen import flash_attn_varlen_func

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (batch, queries, heads, channels) to k and v (batch, keys, heads of keys, channels).

    causal: query i sees keys up to i + keys - queries. window_size (left, right): and those from i + keys - queries -
    left to i + keys - queries + right, -1 for no bound. alibi_slopes: (heads,) or (batch, heads), float32.

    Returns out as q, or (out, softmax_lse (batch, heads, queries), S_dmask) if return_attn_probs. Differentiable.
    """
    call = options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    made = attention(
        q,
        k,
        v,
        layout="bshd",
        alibi_slopes=alibi_slopes,
        return_lse=truth("return_attn_probs", return_attn_probs),
        **call,
    )
    return with_no_probabilities(made)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of qkv (batch, sequence, 3, heads, channels), without copies."""
    q, k, v = _parts(qkv, "qkv", 5, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of q and kv (batch, keys, 2, heads of keys, channels), without copies."""
    k, v = _parts(kv, "kv", 5, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func of qkv (tokens, 3, heads, channels), without copies."""
    q, k, v = _parts(qkv, "qkv", 4, 3)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func of q and kv (keys, 2, heads of keys, channels), without copies."""
    k, v = _parts(kv, "kv", 4, 2)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def _parts(packed: Tensor, name: str, rank: int, count: int) -> tuple[Tensor, ...]:
    check_tensor(name, packed)
    if packed.dim() != rank or packed.shape[-3] != count:
        raise ValueError(
            f"{name}: shape {tuple(packed.shape)}, expected rank {rank} with {count} at the third axis from the end"
        )
    return tuple(packed.unbind(-3))
