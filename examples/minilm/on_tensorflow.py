"""The search's attention through TensorFlow: q, k and v of (heads, tokens, channels) as NumPy arrays."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from anyflash.tensorflow import attention


def attention_of(ids):
    """attention(q, k, v) of a packed sequence, each token of which sees those with its own number in ids alone; ids
    None: one text."""
    rule, tables = ("full()", None) if ids is None else ("documents(ids, ids)", {"ids": tf.constant(ids)})

    @tf.function(input_signature=[tf.TensorSpec([1, None, None, None])] * 3)
    def attend(q, k, v):
        return attention(q, k, v, rule=rule, tables=tables)

    return lambda q, k, v: attend(*(x[None] for x in (q, k, v)))[0].numpy()
