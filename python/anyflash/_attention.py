"""attention, attention_backward and plan. Types with overloads are in _attention.pyi."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy import ndarray

from . import _core
from ._arrays import same_kind, settle, stream_of
from ._options import TENSORS, check_names, with_scalars
from ._rules import full

_FULL = full()


class Gradients(NamedTuple):
    """The result of attention_backward.

    Attributes
    ----------
    dq, dk, dv : array
        Shape and type of q, k and v. With layout "qkv" dq is the packed gradient of q, and dk and dv are None.
    dbias : array or None
        Shape and type of bias, summed over the axes along which bias is broadcast. None without a bias.
    dsink : array or None
        Shape and type of sink. None without a sink.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsink: Any = None


def _options(function, scalars, **others):
    """As the extension takes them."""
    if scalars and not _core.plain_scalars(scalars):
        check_names(scalars, function)
    others.update(scalars)
    return others


def _others(options, *arrays):
    """What comes beside q: the arrays, and those of the options."""
    return *arrays, *map(options.get, TENSORS), *getattr(options["rule"], "_arrays", ())


@with_scalars
def attention(
    q,
    k=None,
    v=None,
    *,
    rule=_FULL,
    bias=None,
    alibi_slopes=None,
    sink=None,
    return_lse=False,
    plan=None,
    out=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    key_lengths=None,
    page_table=None,
    **scalars,
):
    """Exact attention: out = softmax(scale * q k^T) v, over the keys that the rule lets each query see.

        S = scale * q k^T
        S = softcap * tanh(S / softcap)        only if softcap > 0
        S = S + bias                           and ALiBi
        P = softmax of S over the visible keys, and the sink logit
        out = P v
        lse = log-sum-exp of S over the same

    A query that sees no key gives out 0 and lse -inf. No matrix of queries x keys is ever in memory.
    Source: Dao, FlashAttention-2 (2023), algorithm 1.

    **Arrays** are NumPy's, or any with `__dlpack__`: on the CPU PyTorch, JAX, CuPy and TensorFlow, on an NVIDIA GPU
    PyTorch, JAX and CuPy. The result is an array of q's framework. Any strides work; nothing is copied. The GIL is
    released. PyTorch tensors that require a gradient are refused here: use anyflash.torch.attention.

    **Types**: float16, bfloat16 (`ml_dtypes.bfloat16` in NumPy), float32 or float64, the same for q, k and v.
    Products of both 16-bit types are summed in float32.

    **On a GPU** the call is queued on the framework's current stream and returns before it is done. With JAX it waits.
    Lengths, page tables and the tables of rules are all on the CPU or all on that GPU. On a GPU their values are not
    checked. With key_lengths, document ids and lengths are both on the CPU.

    **Shapes**, by layout, with 1, 2 or 3 axes for the sequence:

        layout  q, k, v and out                            lse
        bhsd    (batch, heads, sequence..., channels)      (batch, heads, queries)
        bshd    (batch, sequence..., heads, channels)      (batch, heads, queries)
        bhds    (batch, heads, channels, sequence...)      (batch, heads, queries)
        qkv     q (3, heads, tokens, channels)             (heads, tokens)
                out (heads, tokens, channels)
        thd     (tokens, heads, channels)                  (heads, tokens)

    Parameters
    ----------
    q : array
        Queries, with 1 to 256 channels (d_qk). With layout "qkv" it holds keys and values too.
    k : array, optional
        Keys, with d_qk channels. Their heads divide those of q. None with layout "qkv".
    v : array, optional
        Values, with 1 to 512 channels (d_v) and as many heads as k. None with layout "qkv".
    rule : Rule
        Which keys a query sees; see full, causal, local, window, prefix, prefix_queries, sink, documents,
        documents_packed, tiles, neighbourhood, blocks and dense, and & | ~.
    align : {"none_front", "none_end", "scale_front", "scale_end"}
        The aligned coordinate of entry c of a sequence, in each dimension. With R = max(queries, keys) and
        step = R // size: c; c + (R - size), as in decoding with a cache; c * step; (c + 1) * step - 1.
    layout : {"bhsd", "bshd", "bhds", "qkv", "thd"}
        The order of the axes, as above. "thd" is documents end to end, and needs cu_seqlens_q and cu_seqlens_k.
    scale : float, optional
        1 / sqrt(d_qk) if not given.
    bias : array, optional
        (batch or 1, heads or 1, queries or 1, keys or 1), over the flattened sequences, of any floating-point type.
        Added to S. The call rounds bias, alibi_slopes and sink to the type that it computes in: float64 for float64,
        else float32. Values too large for float32 become infinite.
    softcap : float
        Scores become softcap * tanh(S / softcap). 0: no cap.
    alibi_slopes : array, optional
        (heads,) or (batch, heads), float32 or float64. ALiBi: S -= slope * distance. The distance is the sum over
        dimensions of |x_i - y_i|.
    sink : array, optional
        (heads,): one more logit in each row's softmax, without a value.
    return_lse : {False, True, "lm"}
        True returns (out, lse). "lm" returns (out, l, m): m is the row's maximum, l the sum of exp(S - m), and
        lse = m + log(l). All three have lse's shape, and are float32, or float64 for float64.
    deterministic : bool
        Gives the same bits in every run and in any batch. Only some calls on Hopper GPUs need it, and they then take
        longer: see the guide, Determinism.
    allow_tf32 : bool
        For float32 on a GPU: products may use fewer significant bits where that is faster: 11 (TF32), or 16 on
        Hopper. Without it, and on the CPU, they are as exact as float32. Other types are not affected.
    memory_budget : int, optional
        The most bytes of workspace that the call may use on the arrays' device. It is then computed in chunks where
        that needs less, with the same results. An error names the least that works. On the tile machine: the most bytes
        that are live on any tile, arrays included; MemoryError if the least that works is more than a tile has.
    num_chunks_q, num_chunks_kv : int, optional
        How many chunks the queries, and the keys, are computed in; divisors of their numbers. Not given: chosen so
        that the call fits memory_budget. Boundaries are those of blocks; on the tile machine chunks are equal.
    plan : Plan, optional
        From anyflash.plan, for the same shapes and options. Not given: it is taken from a cache, or made.
    out : array, optional
        The array to write the result to; it is then the result. Writable, of q's shape with d_v channels, of q's type.
    cu_seqlens_q, cu_seqlens_k : array, optional
        (documents + 1,), int32 or int64. For layout "thd": where each document begins, then the end.
    key_lengths : array, optional
        (batch,), int32 or int64. How many keys exist in each batch entry; the rest are hidden. For sequences of one
        dimension.
    page_table : array, optional
        (batch, pages of an entry), int32. k and v are then (pages, page size, heads, channels), and key_lengths must be
        given.
    threads : int
        How many threads compute on the CPU. 0: as many as OpenMP gives.

    Returns
    -------
    array or tuple of arrays
        out, or (out, lse), or (out, l, m), as return_lse says.

    Raises
    ------
    ValueError
        A shape, a value or a device is wrong. One line says which argument, what was passed and what was expected.
    TypeError
        An element type or an argument's type is wrong.
    MemoryError
        There is no memory left. After any of these errors, nothing has been written to out.
    """
    options = _options(
        attention,
        scalars,
        rule=rule,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sink=sink,
        plan=plan,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        key_lengths=key_lengths,
        page_table=page_table,
    )
    if isinstance(q, ndarray):
        return _core.attention(q, k, v, out, return_lse, options)
    others = _others(options, k, v, out)
    options["stream"] = stream_of(q, *others)
    result = _core.attention(q, k, v, out, return_lse, options)
    settle(q, *others)
    if return_lse:
        first, *rest = result
        return (first if out is not None else same_kind(q, first), *(same_kind(q, one) for one in rest))
    return result if out is not None else same_kind(q, result)


@with_scalars
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
    bias=None,
    alibi_slopes=None,
    sink=None,
    plan=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    key_lengths=None,
    page_table=None,
    **scalars,
):
    """The exact derivative of attention.

    The options are those of the forward call, with the same values: rule, align, layout, scale, bias, softcap,
    alibi_slopes, sink, deterministic, allow_tf32, plan, cu_seqlens_q, cu_seqlens_k, key_lengths and threads.
    memory_budget, num_chunks_q and num_chunks_kv bound this call and may differ. Arrays among the options, and a rule's
    tables, are read again. They must have the same values as in the forward call; this is not checked. page_table is
    refused: caches are for forward calls only.

    Source: Dao, FlashAttention-2 (2023), algorithm 2.

    Parameters
    ----------
    dout : array
        The gradient of out, of its shape and type.
    q, k, v : array
        As in attention. With layout "qkv" k and v are None.
    out, lse : array
        The results of attention(..., return_lse=True).
    dlse : array, optional
        The gradient of lse, of its shape and type, if the loss depends on it.

    Returns
    -------
    Gradients
        New arrays, each with the framework, shape and type of its argument. A query that sees no key contributes
        nothing to any of them.

    Raises
    ------
    ValueError
        Also TypeError and MemoryError: one line, as in attention.
    """
    options = _options(
        attention_backward,
        scalars,
        rule=rule,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sink=sink,
        plan=plan,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        key_lengths=key_lengths,
        page_table=page_table,
    )
    others = _others(options, k, v, dout, out, lse, dlse)
    options["stream"] = stream_of(q, *others)
    made = _core.attention_backward(dout, q, k, v, out, lse, dlse, options)
    settle(q, *others)
    owners = (q, k, v, bias, sink)
    return Gradients(
        *(
            one if one is None or isinstance(owner, ndarray) else same_kind(owner, one)
            for one, owner in zip(made, owners)
        )
    )


@with_scalars
def plan(
    q,
    k=None,
    v=None,
    *,
    rule=_FULL,
    bias=None,
    alibi_slopes=None,
    sink=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    key_lengths=None,
    page_table=None,
    **scalars,
):
    """Makes the plan of a call: which blocks of keys each block of queries visits, and on how many threads.

    Pass it to attention and attention_backward as `plan`. This saves time in many calls with the same rule with tables
    (documents, blocks, dense), cu_seqlens or key_lengths. Other plans of up to 64 MiB are cached anyway.

    A plan reads a rule's tables, cu_seqlens and key_lengths when it is made, and is valid for those values. A call
    raises ValueError where document ids, lengths or a blocks bitmap have changed since. A dense mask is not compared,
    since that could cost as much as the call: it must not change. Lengths and tables on a GPU are read by each call
    and may change.

    The arguments are those of attention. Of q, k and v only shapes and types are read.

    Returns
    -------
    Plan
        It keeps its rule alive.

    Raises
    ------
    ValueError
        Also TypeError and MemoryError: one line, as in attention.
    """
    options = _options(
        plan,
        scalars,
        rule=rule,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sink=sink,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        key_lengths=key_lengths,
        page_table=page_table,
    )
    options["stream"] = stream_of(q)
    return _core.plan(q, k, v, options)
