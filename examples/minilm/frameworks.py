"""The encoder's layers in a framework's own arrays, every attention by anyflash's front end for it: what --framework of
the demo chooses. A framework is a class with the eight functions of the others and an entry in FRAMEWORKS.
"""

import functools

import anyflash as af


class Torch:
    def __init__(self):
        import anyflash.torch
        import torch

        self.array, self.numpy = torch.from_numpy, lambda x: x.numpy()
        self.gelu = torch.nn.functional.gelu
        self.mean = lambda x: x.mean(-1, keepdim=True)
        self.reshape, self.linear = torch.reshape, torch.nn.functional.linear
        self.attention = functools.partial(anyflash.torch.attention, layout="bshd")
        self.compiled = lambda layer: layer


class TensorFlow:
    def __init__(self):
        import anyflash.tensorflow
        import tensorflow as tf

        self.array, self.numpy = tf.constant, lambda x: x.numpy()
        self.gelu = tf.nn.gelu
        self.mean = lambda x: tf.reduce_mean(x, -1, keepdims=True)
        self.reshape = tf.reshape
        self.linear = lambda x, weight, bias: tf.matmul(x, weight, transpose_b=True) + bias
        self.attention = functools.partial(anyflash.tensorflow.attention, layout="bshd")
        self.compiled = functools.partial(tf.function, autograph=False)


class Jax:
    def __init__(self):
        import anyflash.jax
        import jax
        import numpy

        self.array, self.numpy = jax.numpy.asarray, numpy.asarray
        self.gelu = functools.partial(jax.nn.gelu, approximate=False)
        self.mean = lambda x: x.mean(-1, keepdims=True)
        self.reshape, self.linear = jax.numpy.reshape, lambda x, weight, bias: x @ weight.T + bias
        self.attention = functools.partial(anyflash.jax.attention, layout="bshd")
        self.compiled = jax.jit


FRAMEWORKS = {"torch": Torch, "tensorflow": TensorFlow, "jax": Jax}


def encode(encoder, token_lists, ids, framework, bar):
    """As Encoder.encode, the texts kept apart by the rule documents(ids, ids)."""
    own = FRAMEWORKS[framework]()
    rule = af.documents(ids, ids)

    def norm(x, weight, bias):
        x = x - own.mean(x)
        return x / (own.mean(x * x) + encoder.epsilon) ** 0.5 * weight + bias

    @own.compiled
    def layer(x, w):
        linear = lambda x, name: own.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])
        after = lambda x, name: norm(x, w[f"{name}.weight"], w[f"{name}.bias"])
        q, k, v = (
            own.reshape(linear(x, f"attention.self.{part}"), (1, len(ids), encoder.heads, -1))
            for part in ("query", "key", "value")
        )
        seen = own.reshape(own.attention(q, k, v, rule=rule), (len(ids), -1))
        x = after(x + linear(seen, "attention.output.dense"), "attention.output.LayerNorm")
        inner = own.gelu(linear(x, "intermediate.dense"))
        return after(x + linear(inner, "output.dense"), "output.LayerNorm")

    x = own.array(encoder.embedded(token_lists))
    for i in range(encoder.layers):
        start = f"encoder.layer.{i}."
        parts = {
            name[len(start) :]: own.array(array) for name, array in encoder.weights.items() if name.startswith(start)
        }
        x = layer(x, parts)
        bar.update(len(token_lists) * (i + 1) // encoder.layers - bar.n)
    return encoder.pooled(own.numpy(x), token_lists)
