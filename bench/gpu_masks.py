"""Masks given as rules beside PyTorch's FlexAttention, compiled for each of them, on one NVIDIA GPU: bfloat16, 128
channels. FlexAttention has two kernels: its own, and where `flash-attn-4` is installed that one's.

FlexAttention's masks are made before, and it is compiled before, which takes most of this part's time: each mask in a
process of its own, as many at once as the GPU has memory for; the compiler's results are then found in its cache.
Useful operations alone count, so both are paid for visible pairs.
"""

import functools
import itertools
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import anyflash as af
import gpu_peers
import numpy as np
import torch
from gpu import OPERATIONS, add_rates, beside_all, our_call, peer_calls, random
from torch.nn.attention import flex_attention as flex

D = 128
MEMORY_TO_COMPILE = 2**33  # bytes; 14 processes took 79 GiB
NEVER_KEPT = 80  # calls in turn, each with documents of its own: more than the library remembers


def coordinates(i, shape):
    """Of entry i of a sequence of that shape, row-major."""
    found = []
    for size in reversed(shape[1:]):
        found.insert(0, i % size)
        i = i // size
    return [i, *found]


def in_each_dimension(shape, sees):
    """A mask of pairs that sees(x, y, size) in every dimension."""

    def mask(b, h, i, j):
        visible = None
        for x, y, size in zip(coordinates(i, shape), coordinates(j, shape), shape):
            one = sees(x, y, size)
            visible = one if visible is None else visible & one
        return visible

    return mask


def clamped(x, low, high):
    return torch.clamp(x, low, high)


def documents(tokens, count):
    """Ids of so many documents in a row, of random lengths."""
    cuts = np.sort(np.random.default_rng(0).choice(np.arange(1, tokens), count - 1, replace=False))
    return np.searchsorted(cuts, np.arange(tokens), side="right").astype(np.int32)


def rule_masks():
    """{name: (shape, heads, least ratio, the rule, FlexAttention's mask)}; those that need tensors make them when they
    are asked for."""
    text, picture, large, volume = (16384,), (128, 128), (512, 512), (32, 32, 32)
    near = lambda w: lambda x, y, size: (x - y < w) & (y - x < w)

    def window(w):
        return text, 16, 1, lambda: af.local(w, causal=True), lambda: lambda b, h, i, j: (i >= j) & (i - j < w)

    def local(shape, heads, w):
        return shape, heads, 3, lambda: af.local(w), lambda: in_each_dimension(shape, near(w))

    def of_documents():
        ids = torch.from_numpy(documents(text[0], 12)).cuda()
        return lambda b, h, i, j: ids[i] == ids[j]

    def of_blocks():
        allowed = torch.from_numpy(bitmap()).cuda()
        return lambda b, h, i, j: allowed[i // 128, j // 128]

    def bitmap():
        return np.random.default_rng(1).random((128, 128)) < 0.25

    def tile(x, y, size):
        return (y // 8 - clamped(x // 8, 1, size // 8 - 2)).abs() <= 1

    def neighbour(x, y, size):
        first = clamped(x - 6, 0, size - 13)
        return (y >= first) & (y < first + 13)

    return {
        **{f"causal window {w}": window(w) for w in (256, 1024, 4096)},
        "12 documents": (text, 16, 1, lambda: af.documents(documents(text[0], 12)), of_documents),
        "prefix 4096, else causal": (
            text,
            16,
            1,
            lambda: af.prefix(4096) | af.causal(),
            lambda: lambda b, h, i, j: (j < 4096) | (i >= j),
        ),
        "bitmap, 25 % of 128 x 128": (text, 16, 1, lambda: af.blocks(bitmap(), 128, 128), of_blocks),
        "local(8), 128x128": local(picture, 16, 8),
        "local(16), 128x128": local(picture, 16, 16),
        "local(8), 512x512": local(large, 4, 8),
        "local(16), 512x512": local(large, 4, 16),
        "local(64, log2_stride=2)": (
            text,
            16,
            3,
            lambda: af.local(64, log2_stride=2),
            lambda: lambda b, h, i, j: ((i - j) % 4 == 0) & (i - j < 256) & (j - i < 256),
        ),
        "local(4), 32x32x32": local(volume, 16, 4),
        "tiles((8, 8), (3, 3)), 128x128": (
            picture,
            16,
            3,
            lambda: af.tiles((8, 8), (3, 3)),
            lambda: in_each_dimension(picture, tile),
        ),
        "neighbourhood((13, 13)), 128x128": (
            picture,
            16,
            3,
            lambda: af.neighbourhood((13, 13)),
            lambda: in_each_dimension(picture, neighbour),
        ),
    }


def peers(mask, tokens):
    """{name: FlexAttention under a mask, compiled} by each of its kernels; q, k, v: (1, heads, tokens, d)."""
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # else a graph's gradients can be asked for once
    blocks = flex.create_block_mask(mask, None, None, tokens, tokens, device="cuda", _compile=tokens > 32768)
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    found = {"FlexAttention": {}}
    if gpu_peers.package("FA4"):
        found["FlexAttention, FA4"] = dict(kernel_options=dict(BACKEND="FLASH"))
    return {
        name: lambda q, k, v, options=options: compiled(q, k, v, block_mask=blocks, **options)
        for name, options in found.items()
    }


def windows(direction, name):
    """As peers(): the windows that FlashAttention-3 and -4 have themselves."""
    if not name.startswith("causal window "):
        return {}
    return gpu_peers.by_packages(direction, causal=True, window_size=(int(name.split()[-1]) - 1, 0))


def compile_all(names):
    """Fills the compiler's cache. A process that fails says why; the part then compiles that mask itself."""

    def compile_apart(name):
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True)
        if done.returncode != 0:
            print(f"bench/compare: FlexAttention, {name}: {done.stderr.strip().splitlines()[-1]}", flush=True)

    with ThreadPoolExecutor(max(1, torch.cuda.mem_get_info()[0] // MEMORY_TO_COMPILE)) as at_once:
        list(at_once.map(compile_apart, names))


def compile_one(name):
    shape, heads, _, _, mask = rule_masks()[name]
    tensors = [random(1, heads, math.prod(shape), D) for _ in range(4)]
    peer_calls("backward", tensors, peers(mask(), math.prod(shape)))
    torch.cuda.synchronize()


def calls_of_documents(direction, q, k, v, dout, count, place):
    """Without a plan; of the same documents under other ids."""
    ids = [torch.from_numpy(documents(q.shape[2], 12) + n).to(place) for n in range(count)]
    rules = [af.documents(one) for one in ids]
    out, lse = af.attention(q, k, v, rule=rules[0], return_lse=True)
    if direction == "forward":
        return [functools.partial(af.attention, q, k, v, rule=rule, out=out) for rule in rules]
    return [functools.partial(af.attention_backward, dout, q, k, v, out, lse, rule=rule) for rule in rules]


def our_case(name, shape, heads, rule):
    """q, k, v and dout with their tokens in a row, the same in the rule's shape, and the options of a call."""
    flat = [random(1, heads, math.prod(shape), D) for _ in range(4)]
    tensors = [x.view(1, heads, *shape, D) for x in flat]
    has_tables = name.startswith(("12 documents", "bitmap"))
    return flat, tensors, dict(rule=rule) | (dict(plan=af.plan(*tensors[:3], rule=rule)) if has_tables else {})


def masks(table, arguments):
    rules = rule_masks()
    compile_all(rules)
    for name, (shape, heads, least, rule, mask) in rules.items():
        tokens, rule = math.prod(shape), rule()
        flat, tensors, options = our_case(name, shape, heads, rule)
        theirs = peers(mask(), tokens)
        pairs = af.explain(rule, shape, shape, d_qk=D, d_v=D).visible_pairs
        columns = dict(type="bfloat16", d=D, sequence=tokens, least=least)
        for direction in OPERATIONS:
            calls = peer_calls(direction, flat, theirs | windows(direction, name))
            ours = our_call(direction, *tensors, **options)
            beside_all(table, name, direction, ours, calls, heads * D * pairs, arguments, **columns)
            if name == "12 documents":
                for what, count, place in (
                    ("without a plan", 1, "cpu"),
                    ("new ones in each call", NEVER_KEPT, "cpu"),
                    ("new ones in each call, on the GPU", NEVER_KEPT, "cuda"),
                ):
                    many = itertools.cycle(calls_of_documents(direction, *tensors, count, place))
                    add_rates(
                        table,
                        f"{name}, {what}",
                        direction,
                        [lambda: next(many)(), calls["FlexAttention"]],
                        heads * D * pairs,
                        arguments,
                        idle=True,
                        peer="FlexAttention",
                        **columns | dict(least=least if count == 1 else None),
                    )
        torch.cuda.empty_cache()
    masked_tiles(table, arguments)


def masked_tiles(table, arguments):
    """What masking the tiles on the diagonal costs: causal, beside the same tiles, all of whose pairs are visible."""
    heads, tokens, tile = 16, 16384, 128
    tensors = [random(1, heads, tokens, D) for _ in range(4)]
    unmasked = af.blocks(np.tri(tokens // tile, dtype=bool), tile, tile)
    calls = [
        our_call("forward", *tensors, rule=af.causal()),
        our_call("forward", *tensors, rule=unmasked, plan=af.plan(*tensors[:3], rule=unmasked)),
    ]
    add_rates(
        table,
        "tiles masked",
        "forward",
        calls,
        heads * D * tokens**2 / 2,
        arguments,
        type="bfloat16",
        d=D,
        causal=True,
        sequence=tokens,
        same=False,
        peer="the same tiles, unmasked",
        least=0.97,
    )


if __name__ == "__main__":
    compile_one(sys.argv[1])
