"""Figures that others published of machines of many tiles, each with its source: what the tile machine is held against.

Nothing here is an input of the model. The machines' constants are in src/tile_machine/machines, with sources of their own.
"""

# A matrix product of N x 16 by 16 x 16 on every tile, float16, on one Bow IPU: {N: TFLOP/s}.
BOW_PRODUCT = {16: 55.49, 32: 96.71, 64: 152.80, 128: 211.12, 256: 264.01, 512: 299.78, 1024: 318.91, 2048: 334.94}
BOW_PRODUCT_SOURCE = "graphcore-research/tessellate-ipu, notebooks/IPU Peak Flops.ipynb"
BOW_PEAK = 348.57  # TFLOP/s, there

# Busy time of the math units over the time of the call: causal prefill of 4096 tokens, 32 query heads on 8 key heads,
# head size 128, bfp8, HiFi2, on 110 cores of a p100a. {(queries, keys of a chunk): share}
BLACKHOLE_CAUSAL = {
    (64, 128): 0.22,
    (128, 512): 0.29,
    (128, 256): 0.33,
    (128, 128): 0.37,
    (256, 128): 0.58,
    (512, 128): 0.60,
    (512, 512): 0.72,
}
# The same with HiFi4 (half the rate of multiply-adds) on 64 of the cores, and an accurate exponential.
BLACKHOLE_CAUSAL_HIFI4 = {(256, 256): 0.81}
BLACKHOLE_SOURCE = "tenstorrent/tt-metal, issue 55758"
# Its time, where issues give it: cycles of the call of (128, 128), and of (256, 256) on HiFi2, microseconds.
BLACKHOLE_CYCLES = {(128, 128): 2562642}
BLACKHOLE_CYCLES_SOURCE = "tenstorrent/tt-metal, issue 56691"
BLACKHOLE_MICROSECONDS = {(128, 128): 1835.0, (256, 256): 1284.0, (512, 512): 1357.0, (256, 128): 1347.0}
BLACKHOLE_MICROSECONDS_SOURCE = "tenstorrent/tt-metal, issues 55756 and 56692"

# Utilisation of FlatAttention on 32 x 32 tiles: {(head size, sequence, batch, heads, group side): share}.
FLAT_BEST = 0.893  # "up to"
FLAT = {(128, 4096, 4, 32, 16): 0.88, (128, 4096, 4, 32, 32): 0.87}
FLAT_SOURCE = "arXiv 2505.18824, abstract and section V-B"
FLAT_SMALL_SLICES = 0.23  # of the matrix unit while it is active: 512 tokens in groups of 32 x 32

GRAPHCORE = "Graphcore, GC200: 250 TFLOP/s of float16, 62.5 of float32, 900 MB"
# (machine, what, its closed form, unit, published, source)
CONSTANTS = [
    ("ipu-mk2", "peak, float16", lambda m: m.peak("float16") / 1e12, "TFLOP/s", 250, GRAPHCORE),
    ("ipu-mk2", "peak, float32", lambda m: m.peak("float32") / 1e12, "TFLOP/s", 62.5, GRAPHCORE),
    ("ipu-mk2", "memory", lambda m: m.tiles * m.memory_per_tile / 1e6, "MB", 900, GRAPHCORE),
    ("bow", "peak, float16", lambda m: m.peak("float16") / 1e12, "TFLOP/s", BOW_PEAK, BOW_PRODUCT_SOURCE),
    (
        "flatattention-32x32",
        "peak, float16",
        lambda m: m.peak("float16") / 1e12,
        "TFLOP/s",
        1024,
        "arXiv 2505.18824, table I",
    ),
    (
        "flatattention-32x32",
        "HBM",
        lambda m: m.memory_bytes_per_cycle * m.clock_hz / 1e12,
        "TB/s",
        2,
        "arXiv 2505.18824, table I",
    ),
    (
        "flatattention-32x32",
        "memory of a tile",
        lambda m: m.memory_per_tile / 1024,
        "KB",
        384,
        "arXiv 2505.18824, table I",
    ),
]
