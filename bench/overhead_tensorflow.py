"""The calls that bench/overhead times with TensorFlow, eager and in tf.function, beside TensorFlow's own operations,
Keras' attention, and an addition, which is what any call takes."""

LIMIT = 30.0  # microseconds over the call from C++, or from NumPy where that was not built
OURS = "causal_1d, eager, forward"
MODULE, FRAMEWORK = "anyflash.tensorflow", "tensorflow"


def calls():
    """{name: call without arguments}."""
    import anyflash as af
    import keras
    import numpy as np
    import tensorflow as tf
    from anyflash.tensorflow import attention, causal_1d

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 1, 16, 8), np.float32) for _ in range(3)]  # channels first
    given = [tf.constant(x) for x in arrays]
    rule, seen = af.causal(), tf.constant(np.tri(8, dtype=bool))

    def ours(q, k, v):
        return causal_1d(q, k, v, "none_front")

    def general(q, k, v):
        return attention(q, k, v, rule=rule, layout="bhds", threads=1)

    def textbook(q, k, v):
        scores = tf.where(seen, tf.matmul(q, k, transpose_a=True) * 0.25, -np.inf)
        return tf.matmul(v, tf.nn.softmax(scores), transpose_b=True)

    def of_keras(q, k, v):  # of one head, channels last
        q, k, v = (tf.transpose(x, (0, 3, 1, 2)) for x in (q, k, v))
        return tf.transpose(keras.ops.dot_product_attention(q, k, v, mask=seen[None, None]), (0, 2, 3, 1))

    def both(call):
        def run(*tensors):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                out = call(*tensors)
            return tape.gradient(out, tensors)

        return run

    found = {"NumPy, forward": lambda: af.attention(*arrays, rule=rule, layout="bhds", threads=1)}
    named = {"causal_1d": ours, "attention": general, "TensorFlow's operations": textbook, "Keras' attention": of_keras}
    for name, call in named.items():
        for how, wrap in (("eager", lambda one: one), ("function", tf.function)):
            forward, backward = wrap(call), wrap(both(call))
            found |= {
                f"{name}, {how}, forward": lambda call=forward: call(*given),
                f"{name}, {how}, forward and backward": lambda call=backward: call(*given),
            }
    add = tf.function(lambda q, k, v: q + k + v)
    return found | {"an addition, eager": lambda: given[0] + given[1], "additions, function": lambda: add(*given)}
