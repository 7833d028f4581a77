"""TensorFlow's GPU kernels. Collected only where ANYFLASH_TEST_DEVICE is cuda; without a GPU that TensorFlow finds they
fail."""

import numpy as np
import pytest
import tensorflow as tf
from anyflash.tensorflow import attention, causal_1d, local_2d

CALLS = {
    "causal_1d": ((2, 3, 16, 50), lambda q: causal_1d(q, q, q, "none_end")),
    "local_2d": ((2, 3, 16, 9, 11), lambda q: local_2d(q, q, q, 3, 0, False, "none_front")),
    "with tables": (
        (2, 3, 50, 16),
        lambda q: attention(
            q,
            q,
            q,
            rule="documents(a, a) & causal()",
            tables={"a": np.arange(50) // 20},
            key_lengths=np.array([50, 33]),
        ),
    ),
}


@pytest.fixture
def no_other_place():
    """An op without a kernel for the GPU is an error there."""
    before = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(False)
    yield
    tf.config.set_soft_device_placement(before)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_the_cpu_s(name, in_graph, no_other_place):
    shape, call = CALLS[name]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    def both(q):
        with tf.GradientTape() as tape:
            tape.watch(q)
            out = call(q)
            loss = tf.reduce_sum(tf.sin(out))
        return out, tape.gradient(loss, q)

    run = tf.function(both) if in_graph else both
    made = []
    for device in ("/CPU:0", "/GPU:0"):
        with tf.device(device):
            made.append(run(tf.constant(x)))
    assert all("GPU" in one.device for one in made[1])
    for one, other in zip(*made):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-5)
