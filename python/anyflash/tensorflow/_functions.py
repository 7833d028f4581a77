"""Full, causal and local attention on channel-first tensors of any batch shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import tensorflow as tf

from .._frontend import refuse_tile_machine, truth, unexpected
from .._options import constants, text_of
from ._ops import check_tensors, integer, invalid, of_dimensions, one_line, one_of, query, rows_type

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Chunks(TypedDict, total=False):
    """How a call is bounded, as in anyflash.attention."""

    memory_budget: int | None
    num_chunks_q: int | None
    num_chunks_kv: int | None


_SYNC_MODES = ["none_front", "none_end", "scale_front", "scale_end"]


def full_1d(
    Q: Any, K: Any, V: Any, sync_mode: str = "none_front", returning_l_m: bool = False, **chunks: Unpack[Chunks]
) -> Any:
    """Attention of every query to every key, in sequences of one dimension: softmax(Q^T K / sqrt(channels)) V.

    Gradients of Q, K and V go through O, l and m. A query that sees no key has O = 0, l = 0 and m = -inf.

    Parameters
    ----------
    Q : tensor
        batch_shape + (channels, queries), float16, bfloat16, float32 or float64. batch_shape has any number of axes,
        heads among them.
    K : tensor
        batch_shape + (channels, keys), of Q's type.
    V : tensor
        batch_shape + (channels of values, keys), of Q's type.
    sync_mode : {"none_front", "none_end", "scale_front", "scale_end"}
        The coordinates of the two sequences' entries, as `align` of anyflash.attention. No key is hidden here, so it
        changes nothing.
    returning_l_m : bool
        Also return l, the sum of exp(S - m), and m, the maximum of the scores S.
    **chunks : int, optional
        memory_budget, num_chunks_q and num_chunks_kv, as in anyflash.attention. All these functions take them.

    Returns
    -------
    tensor or tuple of tensors
        O, batch_shape + (channels of values, queries), or (O, l, m). l and m are batch_shape + (queries,), float32, or
        float64 for float64.

    Raises
    ------
    tf.errors.InvalidArgumentError
        One line: which argument, what was passed, what was expected.
    TypeError
        For an option of another type, and for a value that cannot become a tensor.
    """
    return _attend(1, Q, K, V, "full()", sync_mode, returning_l_m, chunks)


def causal_1d(Q: Any, K: Any, V: Any, sync_mode: str, returning_l_m: bool = False, **chunks: Unpack[Chunks]) -> Any:
    """As full_1d, but a query at x sees the keys at y <= x. sync_mode gives the coordinates."""
    return _attend(1, Q, K, V, "causal()", sync_mode, returning_l_m, chunks)


def local_1d(
    Q: Any,
    K: Any,
    V: Any,
    window_size: int,
    log2_stride_size: int,
    is_causal: bool,
    sync_mode: str,
    returning_l_m: bool = False,
    **chunks: Unpack[Chunks],
) -> Any:
    """As full_1d, but a query at x sees the keys at y near it. sync_mode gives the coordinates.

    With s = 2^log2_stride_size: abs(x - y) is a multiple of s, abs(x - y) / s < window_size, and y <= x if is_causal.
    """
    return _attend(1, Q, K, V, _local(window_size, log2_stride_size, is_causal), sync_mode, returning_l_m, chunks)


def full_2d(
    Q: Any, K: Any, V: Any, sync_mode: str = "none_front", returning_l_m: bool = False, **chunks: Unpack[Chunks]
) -> Any:
    """As full_1d, in sequences of two dimensions.

    Q, K and V are batch_shape + (channels, rows, columns). O is batch_shape + (channels of values, rows, columns).
    l and m are batch_shape + (rows, columns).
    """
    return _attend(2, Q, K, V, "full()", sync_mode, returning_l_m, chunks)


def causal_2d(Q: Any, K: Any, V: Any, sync_mode: str, returning_l_m: bool = False, **chunks: Unpack[Chunks]) -> Any:
    """As full_2d, but a query sees the keys up to its own coordinate in row-major order, as sync_mode defines it."""
    return _attend(2, Q, K, V, "causal()", sync_mode, returning_l_m, chunks)


def local_2d(
    Q: Any,
    K: Any,
    V: Any,
    window_size: int,
    log2_stride_size: int,
    is_causal: bool,
    sync_mode: str,
    returning_l_m: bool = False,
    **chunks: Unpack[Chunks],
) -> Any:
    """As full_2d, but a query sees the keys near it: the conditions of local_1d hold in each dimension.

    If is_causal, the key also comes no later than the query in row-major order.
    """
    return _attend(2, Q, K, V, _local(window_size, log2_stride_size, is_causal), sync_mode, returning_l_m, chunks)


def _local(window_size: Any, log2_stride_size: Any, is_causal: Any) -> str:
    window, log2_stride = integer("window_size", window_size), integer("log2_stride_size", log2_stride_size)
    return f"local({window}, {log2_stride}, {int(truth('is_causal', is_causal))})"


def _text(chunks: Chunks) -> str:
    for name in chunks:
        if name not in Chunks.__annotations__:
            raise unexpected("", name, [*Chunks.__annotations__])
    try:
        return text_of(constants(chunks))
    except ValueError as error:
        raise invalid(str(error)) from None


def _attend(dimensions: int, q: Any, k: Any, v: Any, rule: str, align: str, returning_l_m: bool, chunks: Chunks) -> Any:
    q = query(q)
    refuse_tile_machine("tensorflow")
    returning_l_m = truth("returning_l_m", returning_l_m)
    call = f"rule={rule}; align={one_of('sync_mode', align, _SYNC_MODES)}; dimensions={dimensions}"
    if chunks:
        call += _text(chunks)
    try:
        out, rows = of_dimensions[dimensions](q, k, v, call, 2 if returning_l_m else 1, rows_type(q, k, v))
    except tf.errors.OpError as error:
        raise one_line(error) from None
    except Exception:
        check_tensors(q, k, v)
        raise
    return (out, *rows) if returning_l_m else out
