"""TensorFlow's ops of this package, and their gradients. The ops' source is python/src/tensorflow; call.h there
describes the text of a call."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import tensorflow as tf

from .._core import check_name, echoed
from .._frontend import refuse_masked
from .._options import integer_of_64_bits

_library = tf.load_op_library(str(Path(__file__).with_name("libanyflash_tensorflow.so")))
of_dimensions = {1: _library.anyflash_attention1d, 2: _library.anyflash_attention2d}
channels_last, bhds = _library.anyflash_attention_last, _library.anyflash_attention_bhds
_EXTRAS = ("AnyflashAttentionLast", "AnyflashAttentionBhds")
_DIMENSIONS = {"AnyflashAttention1D": 1, "AnyflashAttention2D": 2}
_FLOAT32 = tf.float32
FLOATS = (tf.float16, tf.bfloat16, _FLOAT32, tf.float64)
_NOT_REAL = tuple("cOSUMm")  # kinds of NumPy's types: complex numbers, objects, texts, times
INTEGERS, TABLES = (tf.int32, tf.int64), (tf.bool, tf.uint8, tf.int32, tf.int64)
_SECOND = "anyflash.tensorflow: a second derivative, or one forwards, was asked for, expected first ones backwards"


def invalid(line: str) -> tf.errors.InvalidArgumentError:
    return tf.errors.InvalidArgumentError(None, None, line)


def integer(name: str, value: Any) -> int:
    try:
        return integer_of_64_bits(name, value)
    except ValueError as error:
        raise invalid(str(error)) from None


def word(name: str, value: Any) -> str:
    """One that does not end its place in the text."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: type {type(value).__name__}, expected a word")
    if ";" in value:
        raise invalid(f"{name}: {echoed(repr(value))}, expected no ';'")
    return value


def one_of(name: str, value: Any, known: list[str]) -> str:
    """One of the known words."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: type {type(value).__name__}, expected a word")
    try:
        check_name(name, value, known)
    except ValueError as error:
        raise invalid(str(error)) from None
    return value


def query(q: Any) -> Any:
    """As a tensor, with its own type: an op would cast NumPy arrays to the type of its other inputs."""
    own = getattr(q, "dtype", None)
    return q if own is _FLOAT32 or isinstance(own, tf.DType) else tensor("query", q)


def tensor(name: str, value: Any, dtype: Any = None) -> Any:
    """The value as a tensor; TypeError with its name if it cannot become one."""
    refuse_masked(name, value)
    try:
        return tf.convert_to_tensor(value, dtype)
    except tf.errors.OpError:
        raise
    except Exception as error:  # includes errors raised by the value itself
        raise TypeError(f"{name}: type {echoed(type(value).__name__)}, expected a tensor") from error


def check_tensors(q: Any, k: Any, v: Any) -> None:
    """Checks q, k and v here, because an op's own messages name no argument and take several lines."""
    for name, one in (("query", q), ("key", k), ("value", v)):
        tensor(name, one, q.dtype.base_dtype)


def check_type(name: str, given: Any, types: Any = FLOATS) -> None:
    kind = given.dtype.base_dtype  # TensorFlow 1 variables have types of their own
    if kind not in types:
        *others, last = (type.name for type in types)
        raise invalid(f"{name}: type {kind.name}, expected {', '.join(others)} or {last}")


def rows_type(q: Any, k: Any, v: Any) -> Any:
    """The type of lse, l and m. InvalidArgumentError if the operands' types differ; an op casts NumPy's real
    numbers."""
    own = q.dtype
    if own is not _FLOAT32:  # `in` and == on types take microseconds
        check_type("query", q)
        own = own.base_dtype
    for name, other in (("key", k), ("value", v)):
        of_other = getattr(other, "dtype", own)
        if of_other is own:
            continue
        refuse_masked(name, other)
        if isinstance(of_other, str):  # Keras variables have their types as names
            of_other = tf.as_dtype(of_other)
        if of_other.base_dtype != own if isinstance(of_other, tf.DType) else getattr(of_other, "kind", "") in _NOT_REAL:
            raise invalid(f"{name}: type {of_other.name}, expected {own.name} as in query")
    return tf.float64 if own is not _FLOAT32 and own == tf.float64 else _FLOAT32


def one_line(error: Any) -> Any:
    """The library's own line, without the text that TensorFlow adds in an eager call."""
    line = re.sub(r"^\{\{function_node .*?\}\} ", "", error.message.partition("\n")[0])
    return type(error)(error.node_def, error.op, re.sub(r" \[Op:\w+\].*$", "", line))


def _backward(*inputs: Any, call: Any) -> Any:
    """dquery, dkey, dvalue and a list of dterms."""
    try:
        return _library.anyflash_attention_backward(*inputs, call=call)
    except tf.errors.OpError as error:
        raise one_line(error) from None


def _of_dimensions(op: Any, dout: Any, *drows: Any) -> list[Any]:
    q, k, v = op.inputs
    out, *rows = op.outputs
    call, dimensions = op.get_attr("call"), _DIMENSIONS[op.type]
    if len(rows) == 1:
        return list(_backward(q, k, v, [], [], [], dout, out, rows[0], [], call=call)[:3])
    (l, m), (dl, dm) = rows, drows
    dlse = tf.math.multiply_no_nan(dl, l)  # tf.where supports at most eight axes
    dq, dk, dv, _ = _backward(q, k, v, [], [], [], dout, out, m + tf.math.log(l), [dlse], call=call)
    weight = tf.math.multiply_no_nan(dm - dlse, tf.cast(l > 0, l.dtype))
    return [*_through_maximum(dimensions, call, q, k, m, weight, dq, dk), dv]


for _name in _DIMENSIONS:
    tf.RegisterGradient(_name)(_of_dimensions)


def _with_extras(op: Any, dout: Any, *drows: Any) -> list[Any]:
    count = len(op.get_attr("term_types"))
    slopes = count + len(op.get_attr("slope_types"))
    q, k, v, *extras = op.inputs
    out, *rows = op.outputs
    call = op.get_attr("call")
    lse = rows[0] if len(rows) == 1 else rows[1] + tf.math.log(rows[0])
    dlse = list(drows) if "returns=lse" in tf.compat.as_str(call) else []
    made = _backward(q, k, v, extras[:count], extras[count:slopes], extras[slopes:], dout, out, lse, dlse, call=call)
    return [*made[:3], *made[3], *[None] * (len(extras) - count)]


for _name in _EXTRAS:
    tf.RegisterGradient(_name)(_with_extras)


def _refuse(op: Any, *grads: Any) -> Any:
    raise NotImplementedError(_SECOND)


tf.RegisterGradient("AnyflashAttentionBackward")(_refuse)


# l = sum_j exp(S_j - m) and m = max_j S_j, so dS_j = dl l P_j + (dm - dl l) H_j. H_j is 1 at the maximum and 0
# elsewhere, shared equally among equal maxima. The first term is a gradient of lse. H is the limit of P as the scale
# grows, so the second term is computed by calls with a large scale: H K by forward, and H^T Q as a gradient of values.
def _through_maximum(dimensions: int, call: Any, q: Any, k: Any, m: Any, weight: Any, dq: Any, dk: Any) -> Any:
    """Adds the second term to dq and dk. `weight` is dm - dl l: zero where l and m are only used as l exp(m)."""
    # With two tapes, or a persistent one, TensorFlow derives a cond's gradient as it builds it: here that would be a
    # second derivative.
    q, k, m, weight = map(tf.stop_gradient, (q, k, m, weight))

    def through() -> Any:
        sharp = f"{tf.compat.as_str(call)}; sharpening={2.0**600 if q.dtype == tf.float64 else 2.0**70}"
        channel = -dimensions - 1
        even, even_k = _evened(q, k, m, channel)
        k_at, (count, top) = of_dimensions[dimensions](even, even_k, k, call=sharp, rows=2, S=weight.dtype)
        root = tf.sqrt(tf.cast(tf.shape(q)[channel], weight.dtype))
        each = tf.expand_dims(weight / root, channel)
        to_q = tf.cast(each * tf.cast(k_at, weight.dtype), q.dtype)
        dout = tf.cast(each * tf.cast(q, weight.dtype), q.dtype)
        lse = top + tf.math.log(count)  # the logarithm vanishes beside a huge m: then P is summed instead
        to_k = _backward(even, even_k, k, [], [], [], dout, k_at, lse, [], call=sharp)[2]
        return to_q, to_k

    to_q, to_k = tf.cond(tf.reduce_any(weight != 0), through, lambda: (tf.zeros_like(q), tf.zeros_like(k)))
    return dq + to_q, dk + to_k


def _evened(q: Any, k: Any, m: Any, channel: int) -> Any:
    """Queries and keys times powers of two, each query's own and the same for all keys of a sequence, which leave a
    row's maximum where it is: those that bring the query's greatest number, the keys' if they are small, and then the
    maximum near 1, as far as nothing overflows or gets lost."""
    wide = m.dtype == tf.float64
    most = 900 if wide else 14 if q.dtype == tf.float16 else 100
    of_q = _power_of_two(_greatest(q, [channel], m.dtype), most, most)
    if q.dtype == tf.float16:  # the smallest float16 numbers are within reach
        return q / tf.cast(tf.minimum(of_q, 1), q.dtype), k
    of_k = _power_of_two(_greatest(k, list(range(channel, 0)), m.dtype), most, 0)
    of_m = _power_of_two(tf.abs(tf.expand_dims(m, channel) / of_q / of_k), *((200, 400) if wide else (30, 60)))
    return q / tf.cast(of_q, q.dtype) / tf.cast(of_m, q.dtype), k / tf.cast(of_k, k.dtype)


def _greatest(numbers: Any, axes: list[int], type: Any) -> Any:
    return tf.cast(tf.reduce_max(tf.abs(numbers), axes, True), type)


def _power_of_two(numbers: Any, down: int, up: int) -> Any:
    """The greatest power of two that is not above the number, from 2^-down to 2^up."""
    bits, exponent = (tf.int64, 0x7FF << 52) if numbers.dtype == tf.float64 else (tf.int32, 0xFF << 23)
    power = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(numbers, bits), tf.constant(exponent, bits)), numbers.dtype)
    return tf.clip_by_value(power, 2.0**-down, 2.0**up)
