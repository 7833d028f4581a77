"""Operations as TensorFlow's profiler counts them: 2 d + 2 d_v a visible pair forward, 6 d + 4 d_v backward."""

import anyflash as af
import pytest
import tensorflow as tf
from anyflash.tensorflow import attention, causal_1d, full_2d


def counted(call, *shapes):
    graph = tf.function(call).get_concrete_function(*[tf.TensorSpec(shape) for shape in shapes]).graph
    options = tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
    options["output"] = "none"
    found = tf.compat.v1.profiler.profile(graph, options=options)
    nodes = [child for child in found.children if "AnyflashAttention" in child.name]
    return sum(node.total_float_ops for node in nodes) if nodes else found.total_float_ops


X = (1, 12, 64, 64)
IDS = tf.constant([0, 0, 0, 1, 1, 1])
CALLS = {  # what is called, its shapes, its pairs, d + d_v
    "all": (lambda x: attention(x, x, x), [X], 12 * 64 * 64, 128),
    "a rule": (lambda x: attention(x, x, x, rule=af.causal()), [X], 12 * 65 * 32, 128),
    "bshd, other values": (
        lambda q, k, v: attention(q, k, v, layout="bshd"),
        [(2, 9, 6, 8), (2, 7, 3, 8), (2, 7, 3, 5)],
        2 * 6 * 9 * 7,
        13,
    ),
    "bhds": (lambda q, k, v: attention(q, k, v, layout="bhds"), [(2, 6, 8, 9), (2, 3, 8, 7), (2, 3, 5, 7)], 756, 13),
    "any batch shape": (lambda q, v: causal_1d(q, q, v, "none_front"), [(2, 3, 2, 8, 5), (2, 3, 2, 4, 5)], 12 * 15, 12),
    "images": (lambda q: full_2d(q, q, q), [(3, 8, 4, 5)], 3 * 400, 16),
    "packed sequences": (
        lambda x: attention(x, x, x, layout="thd", rule=af.causal(), cu_seqlens_q=[0, 4, 10], cu_seqlens_k=[0, 4, 10]),
        [(10, 2, 8)],
        2 * (10 + 21),
        16,
    ),
    "a table that is a constant": (
        lambda x: attention(x, x, x, rule="documents(a, a)", tables={"a": IDS}),
        [(1, 2, 6, 8)],
        2 * 18,
        16,
    ),
    "lengths that are not known": (
        lambda x, n: attention(x, x, x, key_lengths=tf.cast(n, tf.int32)),
        [(2, 2, 6, 8), (2,)],
        4 * 36,
        16,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_forward(name):
    call, shapes, pairs, channels = CALLS[name]
    assert counted(call, *shapes) == 2 * channels * pairs


@pytest.mark.parametrize("rule, pairs", [(af.full(), 12 * 64 * 64), (af.causal(), 12 * 65 * 32)])
def test_gradients_too(rule, pairs):
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = attention(x, x, x, rule=rule)
        return tape.gradient(out, x)

    assert counted(gradient, X) == (4 * 64 + 10 * 64) * pairs


def test_sizes_that_are_not_known_count_nothing():
    assert counted(lambda x: attention(x, x, x), (1, 12, None, 64)) == 0
