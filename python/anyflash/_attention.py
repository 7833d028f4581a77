"""attention, attention_backward and plan. Types with overloads are in _attention.pyi."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy import ndarray

from . import _core
from ._arrays import same_kind, settle, stream_of
from ._rules import full

_FULL = full()


class Gradients(NamedTuple):
    """What attention_backward gives; None for what was not asked for.

    dq, dk, dv: shape and type of q, k and v (layout "qkv": dq is the packed gradient of q, dk and dv are None).
    dbias: shape and type of bias, summed over the axes along which bias is broadcast. dsink: shape and type of sink.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsink: Any = None


def attention(
    q,
    k=None,
    v=None,
    *,
    rule=_FULL,
    align="none_front",
    layout="bhsd",
    scale=None,
    bias=None,
    softcap=0.0,
    alibi_slopes=None,
    sink=None,
    return_lse=False,
    deterministic=False,
    allow_tf32=False,
    plan=None,
    out=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    key_lengths=None,
    page_table=None,
    threads=0,
):
    """Exact attention: softmax over the keys that the rule shows of scale * q k^T, times v.

        S = scale * q k^T;  S = softcap * tanh(S / softcap) if softcap > 0;  S = S + bias
        P = softmax of S over the visible keys (and the sink logit);  out = P v;  lse = log of the sum of exp(S)

    A query that sees no key gives out 0 and lse -inf. No matrix of queries x keys is ever in memory.

    Arrays: NumPy, or anything with __dlpack__ on the CPU (PyTorch, JAX, CuPy, TensorFlow) or on an NVIDIA GPU (PyTorch,
    JAX, CuPy); the result is of q's kind. On a GPU the call is queued on the framework's current stream and returns
    before it is done (with JAX it waits); lengths, page tables and the tables of rules (not the ids of documents) are
    on the CPU or on that GPU, where nobody checks what they hold.
    All three of q, k and v have one type:
    float16, bfloat16 (ml_dtypes.bfloat16 in NumPy), both computed in float32, float32 or float64. Any strides; nothing
    is copied; the GIL is released. PyTorch tensors that require a gradient are for anyflash.torch.attention; here they
    are refused.

    Parameters
    ----------
    q, k, v : arrays, by layout
        "bhsd": (batch, heads, sequence..., channels), the sequence having 1, 2 or 3 axes;
        "bshd": (batch, sequence..., heads, channels);  "bhds": (batch, heads, channels, sequence...);
        "qkv": q is the packed (3, N, L, D) of N heads (the batch is 1), L tokens and D channels, k and v are None, out
        is (N, L, D), lse (N, L);
        "thd": (tokens, heads, channels), documents end to end, with cu_seqlens_q and cu_seqlens_k; lse is
        (heads, tokens).
        q and k have d_qk channels (1 to 256), v has d_v (1 to 512); the heads of k and v divide those of q.
    rule : Rule
        Which keys a query sees; see full, causal, local, window, prefix, prefix_queries, sink, documents,
        documents_packed, tiles, neighbourhood, blocks and dense, and & | ~.
    align : "none_front", "none_end", "scale_front" or "scale_end"
        Where entry c of a dimension with q_i queries and k_i keys sits, R_i = max(q_i, k_i): c; c + (R_i - size), as in
        decoding with a cache; c * step; (c + 1) * step - 1, with step = R_i // size.
    scale : float, optional
        1 / sqrt(d_qk) if not given.
    bias : array (batch or 1, heads or 1, queries or 1, keys or 1), optional
        Added to S, over the flattened sequences; any of the floating-point types. Like alibi_slopes and sink it is
        rounded to the type that the call computes in (float32, or float64 for float64): a float64 number beyond
        float32's range is an infinity in any other call.
    softcap : float
        0 for none.
    alibi_slopes : array (heads,) or (batch, heads), float32 or float64, optional
        S -= slope * sum over dimensions of |x_i - y_i| (ALiBi).
    sink : array (heads,), optional
        One more logit in each row's softmax, without a value.
    return_lse : False, True or "lm"
        True: (out, lse). "lm": (out, l, m) with m the row's maximum, l = sum of exp(S - m), lse = m + log(l).
        Each is (batch, heads, queries), float32, or float64 for float64.
    deterministic : bool
        Bitwise repeatable, and the same in any batch. So is everything else but dq on Hopper GPUs, and there in 16-bit
        types dbias of a bias that heads or batch entries share and, in another batch, calls of few queries; and, there,
        what is made again beside what is not finite. They then take longer.
    allow_tf32 : bool
        float32 on a GPU: products may keep 11 bits of each number (TF32), on Hopper 16, where that is faster. Else, and
        on the CPU, they are as exact as float32. Other types do not hear it.
    plan : Plan, optional
        Of anyflash.plan, for the same shapes and options. If not given, one is looked up or made.
    out : array, optional
        Where the result goes: writable, q's shape with d_v channels, q's type. It is then what is returned.
    cu_seqlens_q, cu_seqlens_k : arrays (documents + 1,), int32 or int64
        For "thd": where each document begins, and the end.
    key_lengths : array (batch,), int32 or int64, optional
        Keys from this length on do not exist (1-dimensional sequences).
    page_table : array (batch, pages of an entry), int32, optional
        k and v are then (pages, page size, heads, channels), and key_lengths must be given.
    threads : int
        0: all that OpenMP gives.

    Returns
    -------
    out, or (out, lse), or (out, l, m)

    Raises
    ------
    ValueError, TypeError, MemoryError
        One line: which argument, what came, what was expected. Nothing has been written to out then.

    Source: Dao, FlashAttention-2 (2023), algorithm 1.
    """
    others = (k, v, bias, alibi_slopes, sink, out, cu_seqlens_q, cu_seqlens_k, key_lengths, page_table,
              *getattr(rule, "_arrays", ()))  # fmt: skip
    options = (rule, align, layout, scale, bias, softcap, alibi_slopes, sink, deterministic, plan,
               cu_seqlens_q, cu_seqlens_k, key_lengths, page_table, allow_tf32,
               threads, stream_of(q, *others))  # fmt: skip
    result = _core.attention(q, k, v, out, return_lse, options)
    if isinstance(q, ndarray):
        return result
    settle(q, *others)
    if return_lse:
        first, *rest = result
        return (first if out is not None else same_kind(q, first), *(same_kind(q, one) for one in rest))
    return result if out is not None else same_kind(q, result)


def attention_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    *,
    dlse=None,
    rule=_FULL,
    align="none_front",
    layout="bhsd",
    scale=None,
    bias=None,
    softcap=0.0,
    alibi_slopes=None,
    sink=None,
    deterministic=False,
    allow_tf32=False,
    plan=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    key_lengths=None,
    page_table=None,
    threads=0,
):
    """The exact derivative of attention.

    Parameters
    ----------
    dout : array, shape and type of out
        The gradient of the result.
    q, k, v : arrays
        As in attention; layout "qkv": k and v are None.
    out, lse : arrays
        What attention(..., return_lse=True) gave.
    dlse : array, shape and type of lse, optional
        The gradient of lse, if anything was made of it.
    rule, align, layout, scale, bias, softcap, alibi_slopes, sink, deterministic, allow_tf32, plan, cu_seqlens_q,
    cu_seqlens_k, key_lengths, threads
        As in attention, with the same values: the arrays among them, a rule's tables too, are read again, and nothing
        tells that they have changed since. page_table is refused: caches are for forward calls only.

    Returns
    -------
    Gradients
        dq, dk, dv, and dbias and dsink if bias and sink were given, else None; new arrays of the kind, shape and type
        of what they belong to. A query that sees no key contributes nothing to any of them.

    Raises
    ------
    ValueError, TypeError, MemoryError
        One line: which argument, what came, what was expected.

    Source: Dao, FlashAttention-2 (2023), algorithm 2.
    """
    others = (k, v, bias, alibi_slopes, sink, dout, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, key_lengths,
              *getattr(rule, "_arrays", ()))  # fmt: skip
    options = (rule, align, layout, scale, bias, softcap, alibi_slopes, sink, deterministic, plan,
               cu_seqlens_q, cu_seqlens_k, key_lengths, page_table, allow_tf32,
               threads, stream_of(q, *others))  # fmt: skip
    made = _core.attention_backward(dout, q, k, v, out, lse, dlse, options)
    settle(q, *others)
    owners = (q, k, v, bias, sink)
    return Gradients(*(
        one if one is None or isinstance(owner, ndarray) else same_kind(owner, one)
        for one, owner in zip(made, owners)
    ))  # fmt: skip


def plan(
    q,
    k=None,
    v=None,
    *,
    rule=_FULL,
    align="none_front",
    layout="bhsd",
    scale=None,
    bias=None,
    softcap=0.0,
    alibi_slopes=None,
    sink=None,
    deterministic=False,
    allow_tf32=False,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    key_lengths=None,
    page_table=None,
    threads=0,
):
    """Makes the plan of a call (which blocks meet which, and on how many threads), to be passed to attention and
    attention_backward as `plan`. Worth it for many calls under a rule with tables (documents, blocks, dense), with
    cu_seqlens or with key_lengths: the plans of all other calls are remembered anyway, if they take at most 64 MiB.

    Parameters as in attention; q, k and v give shapes and types, their data is not read. That of the rule's tables,
    cu_seqlens and key_lengths is: a plan holds for the values they have now. A call raises ValueError where document
    ids, lengths or a blocks bitmap have changed since. A dense mask is not looked at again, since that would cost as
    much as a call may: while a plan of it is in use it must stay as it was. Lengths and tables on a GPU are read by
    each call and may change.

    Returns a Plan, which keeps its rule alive. Raises ValueError or TypeError, as attention would.
    """
    options = (rule, align, layout, scale, bias, softcap, alibi_slopes, sink, deterministic, None,
               cu_seqlens_q, cu_seqlens_k, key_lengths, page_table, allow_tf32, threads, stream_of(q))  # fmt: skip
    return _core.plan(q, k, v, options)
