"""A small language model in plain JAX, trained on paragraphs that are packed end to end: no padding, and none sees
another one.

    python examples/packed_text/train.py

Each step takes another pack of this project's documentation. Which byte belongs to which paragraph is an argument of
the compiled step, the table `ids` of the rule `documents(ids, ids) & causal()`. Prints the loss as it falls, then holds
the loss of a pack against that of its paragraphs one by one, which have to be the same.
"""

import argparse
import re
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from anyflash.jax import attention

PROJECT = Path(__file__).resolve().parents[2]
WIDTH, HEADS, LAYERS, PACK, LONGEST = 96, 4, 2, 1024, 512


def paragraphs_of(files):
    """Byte arrays, cut after LONGEST, without zeros, which fill up packs."""
    blocks = [block for file in files for block in re.split(rb"\n\s*\n", Path(file).read_bytes())]
    return [np.frombuffer(block[:LONGEST], np.uint8) for block in blocks if len(block) > 20 and b"\0" not in block]


def pack_of(paragraphs):
    """As many of the paragraphs as fit: bytes, their paragraph's number, and their place in it, (PACK,) each. What is
    left over is a paragraph of zeros."""
    room, chosen = PACK, []
    for one in paragraphs:
        if len(one) <= room:
            chosen.append(one)
            room -= len(one)
    chosen.append(np.zeros(room, np.uint8))
    ids = np.repeat(np.arange(len(chosen), dtype=np.int32), [len(one) for one in chosen])
    places = np.concatenate([np.arange(len(one), dtype=np.int32) % LONGEST for one in chosen])
    return np.concatenate(chosen), ids, places


def new_weights(key):
    def matrix(rows, columns, scale=None):
        nonlocal key
        key, own = jax.random.split(key)
        return jax.random.normal(own, (rows, columns)) * (scale or rows**-0.5)

    layers = [
        dict(
            qkv=matrix(WIDTH, 3 * WIDTH),
            out=matrix(WIDTH, WIDTH),
            wide=matrix(WIDTH, 4 * WIDTH),
            narrow=matrix(4 * WIDTH, WIDTH),
        )
        for _ in range(LAYERS)
    ]
    return dict(
        bytes=matrix(256, WIDTH, 0.1), places=matrix(LONGEST, WIDTH, 0.1), layers=layers, scores=matrix(WIDTH, 256)
    )


def norm(x):
    return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)


def seen_by(q, k, v, ids):
    return attention(q, k, v, layout="bshd", rule="documents(ids, ids) & causal()", tables={"ids": ids})


def seen_with_a_mask(q, k, v, ids):
    """The same by JAX's own attention, which needs a mask of all bytes by all."""
    mask = (ids[:, None] == ids) & jnp.tri(len(ids), dtype=bool)
    return jax.nn.dot_product_attention(q, k, v, mask=mask[None, None])


def loss_of(weights, text, ids, places, seen_by=seen_by):
    """The mean over all bytes that have another one of their paragraph behind them: nats for that one."""
    x = weights["bytes"][text] + weights["places"][places]
    for layer in weights["layers"]:
        q, k, v = jnp.moveaxis((norm(x) @ layer["qkv"]).reshape(1, len(text), 3, HEADS, -1), 2, 0)
        x = x + seen_by(q, k, v, ids).reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(norm(x) @ layer["wide"]) @ layer["narrow"]
    scores = jax.nn.log_softmax(norm(x) @ weights["scores"])
    nats = -jnp.take_along_axis(scores[:-1], text[1:, None], 1)[:, 0]
    counted = (ids[1:] == ids[:-1]) & (text[1:] != 0)
    return jnp.where(counted, nats, 0).sum() / counted.sum()


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def step(seen_by, weights, moments, count, *pack):
    """One of Adam's (Kingma and Ba 2015), with a rate that rises over the first 20."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, *pack, seen_by)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradients)
    square = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, moments[1], gradients)
    rate = 3e-3 * jnp.minimum(1, count / 20)
    update = lambda w, m, s: w - rate * (m / (1 - 0.9**count)) / (jnp.sqrt(s / (1 - 0.99**count)) + 1e-8)
    return jax.tree.map(update, weights, mean, square), (mean, square), loss


def train(paragraphs, steps, seed=0, seen_by=seen_by):
    """Prints the losses, the mean of each tenth of the steps; returns all of them, and the weights."""
    rng = np.random.default_rng(seed)
    weights = new_weights(jax.random.key(seed))
    moments = (jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights))
    losses, part = [], max(steps // 10, 1)
    for i in range(steps):
        pack = pack_of([paragraphs[j] for j in rng.permutation(len(paragraphs))])
        weights, moments, loss = step(seen_by, weights, moments, i + 1.0, *pack)
        losses.append(float(loss))
        if i == 0:
            start = time.perf_counter()  # it was compiled first
        if (i + 1) % part == 0:
            print(f"step {i + 1:4}  loss {np.mean(losses[-part:]):.3f}", flush=True)
    if steps > 1:
        print(f"{(time.perf_counter() - start) / (steps - 1) * 1e3:.0f} ms a step")
    return losses, weights


def packed_and_alone(weights, paragraphs):
    """The loss of a pack, and that of its paragraphs one by one, both over the same bytes."""
    text, ids, places = pack_of(paragraphs)
    alone = count = 0
    for i in range(ids[-1] + 1):
        own = text[ids == i]
        if len(own) > 1 and own.any():
            padded = pack_of([own])
            alone += float(jax.jit(loss_of)(weights, *padded)) * (len(own) - 1)
            count += len(own) - 1
    return float(jax.jit(loss_of)(weights, text, ids, places)), alone / count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="texts (default: this project's documents)")
    parser.add_argument("--steps", type=int, default=150, help="how long to train (default: 150)")
    parser.add_argument("--jax", action="store_true", help="with JAX's own attention and a mask")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps: {arguments.steps}, expected at least 1")
    try:
        paragraphs = paragraphs_of(arguments.files or sorted((PROJECT / "docs").glob("*.md")))
    except OSError as error:
        parser.error(f"files: {error.filename}: {error.strerror}")
    if not paragraphs:
        parser.error("files: no paragraphs of more than 20 bytes")
    print(f"{len(paragraphs)} paragraphs, {sum(map(len, paragraphs))} bytes")
    _, weights = train(paragraphs, arguments.steps, seen_by=seen_with_a_mask if arguments.jax else seen_by)
    packed, alone = packed_and_alone(weights, paragraphs)
    print(f"loss of a pack of paragraphs {packed:.6f}, of the same ones alone {alone:.6f}")
    if abs(packed - alone) > 1e-4:
        raise SystemExit("the two losses differ")


if __name__ == "__main__":
    main()
