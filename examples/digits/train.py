"""A small Transformer over pictures, trained in Keras to tell handwritten digits, whose pixels see their neighbours
alone: anyflash.tensorflow.local_2d.

    python examples/digits/train.py

The pictures are scikit-learn's, 1797 of 8 x 8 pixels; every fifth is kept for the test. Prints the loss and the share
of right answers as they change, then some pictures with their answers. --tensorflow computes the attention by
TensorFlow's own operations, with a mask, to compare.
"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"  # whose own operations the model takes

import keras
import numpy as np
import tensorflow as tf
from anyflash.tensorflow import local_2d
from keras import layers
from sklearn.datasets import load_digits

WIDTH, HEADS, LAYERS, WINDOW = 32, 4, 2, 3  # a window of 3 is 5 x 5 pixels


def textbook(q, k, v):
    """The same by TensorFlow's own operations, with the whole matrix of scores."""
    y, x = np.divmod(np.arange(q.shape[-2] * q.shape[-1]), q.shape[-1])
    far = np.maximum(abs(y[:, None] - y), abs(x[:, None] - x)) >= WINDOW
    rows = [tf.reshape(one, (-1, *one.shape[1:-2], one.shape[-2] * one.shape[-1])) for one in (q, k, v)]
    scores = tf.matmul(rows[0], rows[1], transpose_a=True) / q.shape[-3] ** 0.5 - 1e9 * tf.constant(far, q.dtype)
    return tf.reshape(tf.matmul(rows[2], tf.nn.softmax(scores), transpose_b=True), tf.shape(v))


class Neighbours(layers.Layer):
    """(batch, channels, rows, columns) to the same shape: each pixel sees those near it."""

    supports_jit = False  # XLA has no such op: TensorFlow runs it

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.qkv, self.out = Channels(3 * WIDTH), Channels(WIDTH)

    def call(self, x):
        parts = tf.reshape(self.qkv(x), (-1, 3, HEADS, WIDTH // HEADS, *x.shape[2:]))
        return self.out(tf.reshape(self.attention(*tf.unstack(parts, axis=1)), tf.shape(x)))


class Channels(layers.Layer):
    """A linear map of the channels, which come first."""

    def __init__(self, width, activation=None):
        super().__init__()
        self.width, self.activation = width, keras.activations.get(activation)

    def build(self, shape):
        self.matrix = self.add_weight(shape=(self.width, shape[1]), initializer="glorot_uniform")
        self.shift = self.add_weight(shape=(self.width, 1, 1), initializer="zeros")

    def call(self, x):
        return self.activation(tf.einsum("dc,bcyx->bdyx", self.matrix, x) + self.shift)


class Places(layers.Layer):
    """Adds what is learned of each place."""

    def build(self, shape):
        self.places = self.add_weight(shape=shape[1:], initializer=keras.initializers.RandomNormal(stddev=0.1))

    def call(self, x):
        return x + self.places


def make_model(attention):
    x = pixels = keras.Input((1, 8, 8))
    x = Places()(Channels(WIDTH)(x))
    for _ in range(LAYERS):
        x = x + Neighbours(attention)(layers.LayerNormalization(axis=1)(x))
        x = x + Channels(WIDTH)(Channels(2 * WIDTH, "gelu")(layers.LayerNormalization(axis=1)(x)))
    return keras.Model(pixels, layers.Dense(10)(layers.Flatten()(layers.LayerNormalization(axis=1)(x))))


def pictures():
    """(pictures, digits) to learn from, and the same of the test."""
    digits = load_digits()
    x, y = digits.images[:, None].astype(np.float32) / 16, digits.target.astype(np.int32)
    test = np.arange(len(y)) % 5 == 0
    return (x[~test], y[~test]), (x[test], y[test])


def train(model, learning, test, epochs):
    """Prints and returns [(loss, share of right answers in the test)], one of each epoch."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    found = []

    def show(epoch, logs):
        found.append((logs["loss"], logs["val_accuracy"]))
        print(f"epoch {epoch + 1}  loss {found[-1][0]:.3f}  right in the test {found[-1][1]:.1%}", flush=True)

    model.fit(
        *learning,
        batch_size=64,
        epochs=epochs,
        validation_data=test,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=show)],
    )
    return found


def drawn(picture, shades=" .:-=+*#%@"):
    return ["".join(shades[int(value * 9.99)] * 2 for value in row) for row in picture[0]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="how long to train (default: 6)")
    parser.add_argument("--tensorflow", action="store_true", help="with attention of TensorFlow's own operations")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error(f"--epochs: {arguments.epochs}, expected at least 1")

    keras.utils.set_random_seed(0)
    learning, test = pictures()
    near = lambda q, k, v: local_2d(q, k, v, WINDOW, 0, False, "none_front")
    model = make_model(textbook if arguments.tensorflow else near)
    print(f"{model.count_params():,} parameters, {len(learning[1])} pictures to learn, {len(test[1])} for the test")
    start = time.perf_counter()
    train(model, learning, test, arguments.epochs)
    print(f"{time.perf_counter() - start:.1f} s")
    answers = np.argmax(model.predict(test[0][:5], verbose=0), -1)
    for rows in zip(*(drawn(picture) for picture in test[0][:5])):
        print("   ".join(rows).rstrip())
    print("   ".join(f"{digit:^16}" for digit in answers).rstrip())


if __name__ == "__main__":
    main()
