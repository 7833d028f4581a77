#!/usr/bin/env python3
"""Builds, checks and times variants of the Hopper forward kernel in src/cuda/hopper/attention.cuh.

Examples, on a machine with an H100 or H200, nvcc and PyTorch:

    bench/hopper_forward/run.py --build --check --time
    bench/hopper_forward/run.py --build --time --rows "s8192" d128_n176_w2_s2_q1_full

A variant's name says what it is: head size (d), keys of a step (n), consumer warpgroups (w), pipeline stages of K and
of V (s), of Q (q), the mask, then perhaps half (float16 instead of bfloat16), unordered (warpgroups issue products in
any order), racecheck (for compute-sanitizer's racecheck).

--check compares with float64 on random shapes: rows of O by their norm and largest error, LSE, what is written beyond
the outputs, the bits of five runs.
--time prints 4 b h s sk d / time (causal: half) in TFLOP/s: medians of 7, all callables of a row in turns, from CUDA
graphs. Peers are FlashAttention-3 (PyPI: fa3-fwd), if it is installed, and cuDNN through PyTorch; in brackets is the
ratio to the faster one.
"""

import argparse
import ctypes
import math
import os
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
DEFAULT_VARIANTS = [
    "d64_n128_w3_s3_q2_full", "d64_n128_w3_s3_q2_causal", "d128_n192_w2_s1_q1_full", "d128_n128_w2_s2_q2_full",
    "d128_n128_w2_s2_q2_causal", "d256_n80_w2_s2_q1_full", "d256_n80_w2_s2_q1_causal",
]  # fmt: skip
NAME = re.compile(r"d(64|128|256)_n(\d+)_w([23])_s(\d)_q([12])_(full|causal)((?:_half|_unordered|_racecheck)*)")


def variant_name(text):
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text}, expected a name such as {DEFAULT_VARIANTS[0]}")
    return text


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", type=variant_name, metavar="VARIANT",
                        help="default: " + " ".join(DEFAULT_VARIANTS))  # fmt: skip
    parser.add_argument("--folder", type=Path, default=PROJECT / "build-hopper-forward", help="of the built variants")
    parser.add_argument("--build", action="store_true", help="with $CUDACXX or nvcc; fails on serialized wgmma")
    parser.add_argument("--check", action="store_true", help="compare with float64")
    parser.add_argument("--time", action="store_true", help="time beside peers")
    parser.add_argument("--once", action="store_true", help="three calls a row, no peers: for profilers")
    parser.add_argument("--rows", default="", metavar="PATTERN", help="only rows that match this")
    parser.add_argument("--rounds", type=int, default=7, help="that a median is of")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs")
    parser.add_argument("--no-peers", action="store_true", help="time no peers")
    options = parser.parse_args()
    options.variants = options.variants or DEFAULT_VARIANTS
    return options


def build(name, folder):
    """Compiles a variant. Returns its registers and spills, or raises with ptxas' warning or the compiler's error."""
    d, n, w, s, q, mask, rest = NAME.fullmatch(name).groups()
    macros = {"HEAD_SIZE": d, "KEYS": n, "WARPGROUPS": w, "STAGES": s, "QUERY_STAGES": q, "MASK": mask}
    macros |= {"TYPE": "__half" if "_half" in rest else "__nv_bfloat16", "ORDERED": int("_unordered" not in rest)}
    if "_racecheck" in rest:
        macros["ANYFLASH_FOR_RACECHECK"] = 1
    command = [os.environ.get("CUDACXX", "nvcc"), "-std=c++20", "-O3", "-gencode=arch=compute_90a,code=sm_90a",
               f"-I{PROJECT / 'src'}", "-Xptxas", "-v", "--shared", "-Xcompiler", "-fPIC",
               *(f"-D{macro}={value}" for macro, value in macros.items()),
               "-o", folder / f"{name}.so", PROJECT / "bench/hopper_forward/kernel.cu"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    wrong = re.search(r".*(?:error|C75\d\d).*", said)
    if done.returncode or wrong:
        raise SystemExit(f"{name}: {wrong[0] if wrong else said}")
    return f"{name}: " + ", ".join(re.search(what, said)[0] for what in (r"\d+ registers", r"\d+ bytes spill stores"))


class Variant:
    def __init__(self, name, folder):
        import torch

        self.name = name
        self.function = ctypes.CDLL(str(folder / f"{name}.so")).attention
        d, _, _, _, _, mask, rest = NAME.fullmatch(name).groups()
        self.d, self.causal = int(d), mask == "causal"
        self.type = torch.float16 if "_half" in rest else torch.bfloat16
        self.counter = torch.zeros(2, dtype=torch.int32, device="cuda")  # tasks given out; a result is not finite

    def __call__(self, q, k, v, out, lse, diagonal=0):
        import torch

        b, s, h, d = q.shape
        pointers = [ctypes.c_void_p(t.data_ptr() if t is not None else None) for t in (q, k, v, out, lse, self.counter)]
        status = self.function(*pointers, b, h, k.shape[2], s, k.shape[1], int(diagonal),
                               ctypes.c_double(1 / math.sqrt(d)),
                               ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))  # fmt: skip
        if status:
            raise SystemExit(f"{self.name}: step {status} of the launch failed")


class Inputs:
    """Random tensors on the GPU, (batch, sequence, heads, channels)."""

    def __init__(self, seed):
        import torch

        self.seed = torch.seed() % 100000 if seed is None else seed
        self.generator = torch.Generator("cuda").manual_seed(self.seed)

    def normal(self, shape, type, scale=1.0):
        import torch

        return (torch.randn(shape, generator=self.generator, device="cuda") * scale).to(type)

    def integer(self, low, high):
        import torch

        return int(torch.randint(low, high + 1, (1,), generator=self.generator, device="cuda"))


def reference(q, k, v, diagonal):
    """O and LSE in float64. diagonal: query i sees keys 0 .. i + diagonal; None: all."""
    import torch

    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    if diagonal is not None:
        i, j = torch.arange(s.shape[2], device="cuda")[:, None], torch.arange(s.shape[3], device="cuda")
        s.masked_fill_(j > i + diagonal, -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return (p @ v).transpose(1, 2), lse


def check(variant, inputs):
    import torch

    shapes = [(1, 1, 1, 1, 1), (1, 2, 1, 128, 128), (2, 3, 3, 257, 1), (1, 4, 2, 1, 1000), (2, 4, 2, 1000, 333),
              (1, 2, 2, 333, 1000), (1, 1, 1, 4001, 4001), (4, 40, 8, 300, 513)]  # fmt: skip
    for _ in range(12):
        heads_kv = inputs.integer(1, 3)
        shapes.append((inputs.integer(1, 3), inputs.integer(1, 3) * heads_kv, heads_kv, inputs.integer(1, 700),
                       inputs.integer(1, 1500)))  # fmt: skip
    cases = [(shape, diagonal) for shape in shapes
             for diagonal in ([0, shape[4] - shape[3]] if variant.causal else [None])]  # fmt: skip
    worst = max(check_case(variant, inputs, *case) for case in cases)
    outliers = [check_outlier(variant, inputs, factor) for factor in (5, 20, 100)]
    print(f"right {variant.name}: {len(cases)} cases, largest error of O's norm {worst:.1e}, outliers {outliers}, "
          f"seed {inputs.seed}", flush=True)  # fmt: skip


def check_case(variant, inputs, shape, diagonal):
    """The error of O, by norms."""
    import torch

    b, h, heads_kv, queries, keys = shape
    spread = (1.0, 8.0)[inputs.integer(0, 1)]
    q = inputs.normal((b, queries, h, variant.d), variant.type, spread)
    k, v = (inputs.normal((b, keys, heads_kv, variant.d), variant.type) for _ in range(2))
    # NaN in the outputs and behind them shows what is not written, and what is written beyond.
    out = torch.full((q.numel() + 4096,), math.nan, dtype=variant.type, device="cuda")
    lse = torch.full((b * h * queries + 64,), math.nan, device="cuda")
    o, row_lse = out[:-4096].view(q.shape), lse[:-64].view(b, h, queries)
    variant(q, k, v, o, row_lse, diagonal or 0)
    torch.cuda.synchronize()
    expected, expected_lse = reference(q, k, v, diagonal)
    error = ((o.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    largest = ((o.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
    same = (row_lse == expected_lse) | ((row_lse - expected_lse).abs() < 1e-4 * (1 + expected_lse.abs()))
    bound = 1.5e-3 if variant.type == torch.float16 else 8e-3
    what = f"{variant.name} {shape} diagonal {diagonal} spread {spread} seed {inputs.seed}"
    assert variant.counter.tolist() == [0, 0], f"{what}: counters {variant.counter.tolist()}"
    assert out[-4096:].isnan().all() and lse[-64:].isnan().all(), f"{what}: written beyond the outputs"
    assert error < bound and largest < 3 * bound and same.all(), (
        f"{what}: error of the norm {error:.2e}, largest {largest:.2e}, {int((~same).sum())} of {same.numel()} LSE wrong")
    for _ in range(5):
        again = torch.empty_like(o)
        variant(q, k, v, again, None, diagonal or 0)
        assert torch.equal(again, o), f"{what}: two runs differ"
    return error


def check_outlier(variant, inputs, factor):
    """A late score far above all others: right, or reported as not finite."""
    import torch

    q, k, v = (inputs.normal((1, 300, 2, variant.d), variant.type) for _ in range(3))
    k[:, 200] = q[:, 250] * factor / 4
    out = torch.empty_like(q)
    variant(q, k, v, out, None)
    flagged = variant.counter.tolist()[1]
    variant.counter.zero_()
    expected = reference(q, k, v, 0 if variant.causal else None)[0]
    error = ((out.double() - expected).norm() / expected.norm()).item()
    assert flagged or error < 8e-3, f"{variant.name}: a score {factor} times as large: error {error:.2e}"
    return "reported" if flagged else f"{error:.0e}"


def rows():
    """(name, head size, causal, batch, heads, key heads, queries, keys)"""
    for d in (128, 64, 256):
        for causal in (False, True):
            for s in (512, 2048, 8192, 16384):
                mask = "causal" if causal else "full"
                yield f"d{d} {mask} s{s}", d, causal, 16384 // s, 2048 // d, 2048 // d, s, s
    for causal in (False, True):
        mask = "causal" if causal else "full"
        yield f"gqa d128 {mask} s8192", 128, causal, 2, 32, 8, 8192, 8192
        yield f"odd d128 {mask} s4001", 128, causal, 4, 16, 16, 4001, 4001
    yield "cross d128 full s1024x16384", 128, False, 16, 16, 16, 1024, 16384


def peers(q, k, v, causal):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    t = [x.transpose(1, 2) for x in (q, k, v)]

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(*t, is_causal=causal, enable_gqa=k.shape[2] != q.shape[2])

    found = {"cuDNN": cudnn}
    try:
        from fa3_fwd_interface import flash_attn_func

        found["FA3"] = lambda: flash_attn_func(q, k, v, causal=causal)
    except ImportError:
        pass
    return found


def time_row(row, variants, inputs, options):
    import torch

    name, d, causal, b, h, heads_kv, queries, keys = row
    flop = 4.0 * b * h * queries * keys * d * (0.5 if causal else 1)
    calls, beside = {}, {}
    for type in sorted({variant.type for variant in variants}, key=str):
        q = inputs.normal((b, queries, h, d), type)
        k, v = (inputs.normal((b, keys, heads_kv, d), type) for _ in range(2))
        out, lse = torch.empty_like(q), torch.empty((b, h, queries), device="cuda")
        for variant in variants:
            if variant.type == type:
                calls[variant.name] = lambda variant=variant, tensors=(q, k, v, out, lse): variant(*tensors)
        if type == torch.bfloat16 and not options.no_peers and not options.once:
            beside = peers(q, k, v, causal)
    calls |= beside
    if options.once:
        for call in [*calls.values()] * 3:
            call()
        return torch.cuda.synchronize()
    count = max(2, int(5e-3 / (flop / 6e14)))  # some 5 ms
    speeds = {c: flop / t / 1e12 for c, t in times_of(calls, count, options.rounds).items()}
    best = max((speeds[c] for c in beside), default=None)
    ratio = {c: f" ({x / best:.3f})" if best and c not in beside else "" for c, x in speeds.items()}
    print(f"{name}: " + "  ".join(f"{c} {x:.0f}{ratio[c]}" for c, x in speeds.items()), flush=True)


def times_of(calls, count, rounds):
    """Median seconds of each call, in graphs of `count` calls: the host's time does not count."""
    import torch

    graphs, times = {}, {c: [] for c in calls}
    for c, call in calls.items():
        call()
        torch.cuda.synchronize()
        graphs[c] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[c]):
            for _ in range(count):
                call()
    for n in range(rounds + 1):  # the first warms up
        for c, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if n:
                times[c].append(begin.elapsed_time(end) / count * 1e-3)
    return {c: statistics.median(t) for c, t in times.items()}


def main():
    options = arguments()
    if options.build:
        options.folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for line in pool.map(lambda name: build(name, options.folder), options.variants):
                print(line, flush=True)
    if not (options.check or options.time or options.once):
        return
    import torch

    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, flush=True)
    variants, inputs = [Variant(name, options.folder) for name in options.variants], Inputs(options.seed)
    if options.check:
        for variant in variants:
            check(variant, inputs)
    for row in rows() if options.time or options.once else []:
        chosen = [variant for variant in variants if (variant.d, variant.causal) == row[1:3]]
        if chosen and re.search(options.rows, row[0]):
            time_row(row, chosen, inputs, options)


if __name__ == "__main__":
    sys.exit(main())
