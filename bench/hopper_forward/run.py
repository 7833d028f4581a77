#!/usr/bin/env python3
"""Builds, checks and times variants of the Hopper forward kernel in src/cuda/hopper/attention.cuh.

Examples, on a machine with an H100 or H200, nvcc and PyTorch:

    bench/hopper_forward/run.py --build --check --time
    bench/hopper_forward/run.py --build --time --rows "s8192" d128_n128_w2_s2_q2

A variant's name says what it is: head size (d), keys of a step (n), consumer warpgroups (w), pipeline stages of K and
of V (s), of Q (q), then perhaps half (float16 instead of bfloat16), general (any scale, soft cap), b3 (three thread
blocks on a multiprocessor), l2x8 (8 MiB of K and V at work at a
time), racecheck (for compute-sanitizer's racecheck).

--check compares with float64 on random shapes: O by its norm and largest error, LSE, what is written beyond the
outputs, the bits of five runs. Variants are checked beside one another, each in a process that is killed if it takes
longer than --limit; only those that are right are timed.
--time prints TFLOP/s, 4 d operations for each pair that is seen: medians of 7, all callables of a row in turns, from
CUDA graphs. Peers of full and causal masks are FlashAttention-3 (PyPI: fa3-fwd), if it is installed, and cuDNN through
PyTorch; in brackets is the ratio to the faster one.
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

import masks

PROJECT = Path(__file__).resolve().parents[2]
DEFAULT_VARIANTS = ["d64_n128_w3_s3_q2", "d128_n128_w2_s2_q2", "d256_n64_w2_s2_q1"]
NAME = re.compile(r"d(64|128|256)_n(\d+)_w([123])_s(\d)_q([12])((?:_half|_general|_b[234]|_l2x\d+|_racecheck)*)")


def variant_name(text):
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text}, expected a name such as {DEFAULT_VARIANTS[0]}")
    return text


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "variants", nargs="*", type=variant_name, metavar="VARIANT", help="default: " + " ".join(DEFAULT_VARIANTS)
    )
    parser.add_argument("--folder", type=Path, default=PROJECT / "build-hopper-forward", help="of the built variants")
    parser.add_argument("--build", action="store_true", help="with $CUDACXX or nvcc; fails on serialized wgmma")
    parser.add_argument("--check", action="store_true", help="compare with float64")
    parser.add_argument("--time", action="store_true", help="time beside peers")
    parser.add_argument("--once", action="store_true", help="three calls a row, no peers: for profilers")
    parser.add_argument("--rows", default="", metavar="PATTERN", help="only rows that match this")
    parser.add_argument("--rounds", type=int, default=7, help="that a median is of")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs")
    parser.add_argument("--quick", action="store_true", help="check no random shapes")
    parser.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="for the check of a variant")
    parser.add_argument("--no-peers", action="store_true", help="time no peers")
    options = parser.parse_args()
    options.variants = options.variants or DEFAULT_VARIANTS
    options.variants = list(dict.fromkeys(options.variants))
    return options


def build(name, folder):
    """Compiles a variant. Returns its registers and spills, or raises with ptxas' warning or the compiler's error."""
    d, n, w, s, q, rest = NAME.fullmatch(name).groups()
    macros = {
        "HEAD_SIZE": d,
        "KEYS": n,
        "WARPGROUPS": w,
        "STAGES": s,
        "QUERY_STAGES": q,
        "SCORE": "general" if "_general" in rest else "scale",
        "TYPE": "__half" if "_half" in rest else "__nv_bfloat16",
        "BLOCKS": (re.search(r"_b(\d)", rest) or (0, 1))[1],
        "SECTION_MIB": (re.search(r"_l2x(\d+)", rest) or (0, 0))[1],
    }
    if "_racecheck" in rest:
        macros["ANYFLASH_FOR_RACECHECK"] = 1
    command = [
        os.environ.get("CUDACXX", "nvcc"),
        "-std=c++20",
        "-O3",
        "-gencode=arch=compute_90a,code=sm_90a",
        f"-I{PROJECT / 'src'}",
        f"-I{PROJECT / 'include'}",
        "-Xptxas",
        "-v",
        "--shared",
        "-Xcompiler",
        "-fPIC",
        "-Xlinker",
        "--no-undefined",
        *(f"-D{macro}={value}" for macro, value in macros.items()),
        "-o",
        folder / f"{name}.so",
        PROJECT / "bench/hopper_forward/kernel.cu",
        PROJECT / "src/cuda/hopper/maps.cpp",
        PROJECT / "src/problem/tensor.cpp",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    wrong = re.search(r".*(?:error|C75\d\d).*", said)
    if done.returncode or wrong:
        raise SystemExit(f"{name}: {wrong[0] if wrong else said}")
    return f"{name}: " + ", ".join(re.search(what, said)[0] for what in (r"\d+ registers", r"\d+ bytes spill stores"))


class Call(ctypes.Structure):
    """As kernel.cu has it."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse", "sink", "counters", "groups")),
        *((name, ctypes.c_int) for name in ("batch", "heads", "heads_kv")),
        *((name, ctypes.c_int * 9) for name in ("query_grid", "key_grid")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


class Variant:
    def __init__(self, name, folder):
        import torch

        self.name = name
        self.function = ctypes.CDLL(str(folder / f"{name}.so")).attention
        d, _, _, _, _, rest = NAME.fullmatch(name).groups()
        self.d, self.general = int(d), "_general" in rest
        self.type = torch.float16 if "_half" in rest else torch.bfloat16
        self.counters = torch.zeros(2, dtype=torch.int32, device="cuda")  # tasks given out; a result is not finite

    def __call__(self, q, k, v, out, lse, mask, scale=None, softcap=0.0, sink=None):
        import torch

        b, _, h, d = q.shape
        tensors = (q, k, v, out, lse, sink, self.counters, mask.groups)
        pointers = [t.data_ptr() if t is not None else None for t in tensors]
        call = Call(
            *pointers,
            b,
            h,
            k.shape[2],
            mask.query_grid.numbers(),
            mask.key_grid.numbers(),
            1 / math.sqrt(d) if scale is None else scale,
            softcap,
        )
        status = self.function(ctypes.byref(call), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        if status:
            raise SystemExit(f"{self.name}: {('TMA', 'shared memory', 'launch')[status - 1]} failed")


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


def reference(q, k, v, mask, scale=None, softcap=0.0, sink=None):
    """O and LSE in float64."""
    import torch

    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(2, 3) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    sees = mask.dense()
    s.masked_fill_(~sees, -math.inf)
    lse = torch.logsumexp(s, -1)
    if sink is not None:
        lse = torch.where(sees.any(-1), torch.logaddexp(lse, sink.double()[:, None]), lse)
    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return (p @ v).transpose(1, 2), lse


def cases_of(variant, inputs, quick):
    """(mask, batch, heads, key heads) of the cases to check."""
    shapes = [
        (1, 1, 1, 1, 1),
        (1, 2, 1, 128, 128),
        (2, 3, 3, 257, 1),
        (1, 4, 2, 1, 1000),
        (2, 4, 2, 1000, 333),
        (1, 2, 2, 333, 1000),
        (1, 1, 1, 4001, 4001),
        (4, 40, 8, 300, 513),
    ]
    for _ in range(0 if quick else 12):
        heads_kv = inputs.integer(1, 3)
        shapes.append(
            (
                inputs.integer(1, 3),
                inputs.integer(1, 3) * heads_kv,
                heads_kv,
                inputs.integer(1, 700),
                inputs.integer(1, 1500),
            )
        )
    for b, h, heads_kv, queries, keys in shapes:
        yield from ((mask, b, h, heads_kv) for mask in masks.random_masks(queries, keys, inputs.generator))
    yield from ((mask, 1, 4, 2) for mask in masks.random_boxes(inputs.generator))


def right_variants(options):
    """Those of which a process of its own says in time that they are right."""

    def is_right(name):
        own = [sys.executable, __file__, name, "--check", "--limit", "0", "--folder", options.folder]
        own += ["--quick"] * options.quick + (["--seed", str(options.seed)] if options.seed is not None else [])
        try:
            return subprocess.run(own, timeout=options.limit).returncode == 0
        except subprocess.TimeoutExpired:
            print(f"WRONG {name}: not done after {options.limit:.0f} s", flush=True)
            return False

    with ThreadPoolExecutor(6) as pool:
        return [name for name, right in zip(options.variants, pool.map(is_right, options.variants)) if right]


def check(variant, inputs, quick):
    """Prints what was right, or the first thing that is wrong. Returns whether all is right."""
    try:
        check_all(variant, inputs, quick)
    except AssertionError as wrong:
        print("WRONG", wrong, flush=True)
        return False
    return True


def check_all(variant, inputs, quick):
    errors = [check_case(variant, inputs, *case) for case in cases_of(variant, inputs, quick)]
    outliers = [check_outlier(variant, inputs, factor) for factor in (5, 20, 100)]
    outliers.append(check_highest(variant))
    print(
        f"right {variant.name}: {len(errors)} cases, largest error of O's norm {max(errors):.1e}, "
        f"outliers {outliers}, seed {inputs.seed}",
        flush=True,
    )


def check_case(variant, inputs, mask, b, h, heads_kv):
    """The error of O, by norms."""
    import torch

    spread = (1.0, 8.0)[inputs.integer(0, 1)]
    q = inputs.normal((b, mask.queries, h, variant.d), variant.type, spread)
    k, v = (inputs.normal((b, mask.keys, heads_kv, variant.d), variant.type) for _ in range(2))
    score = {}
    if variant.general:
        score = {"scale": (-0.1, 0.05)[inputs.integer(0, 1)], "softcap": (0.0, 2.0)[inputs.integer(0, 1)]}
    if inputs.integer(0, 1):
        score["sink"] = inputs.normal((h,), torch.float32, 3)
    # NaN in the outputs and behind them shows what is not written, and what is written beyond.
    out = torch.full((q.numel() + 4096,), math.nan, dtype=variant.type, device="cuda")
    lse = torch.full((b * h * mask.queries + 64,), math.nan, device="cuda")
    o, row_lse = out[:-4096].view(q.shape), lse[:-64].view(b, h, mask.queries)
    variant(q, k, v, o, row_lse, mask, **score)
    torch.cuda.synchronize()
    expected, expected_lse = reference(q, k, v, mask, **score)
    error = ((o.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    largest = ((o.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
    same = (row_lse == expected_lse) | ((row_lse - expected_lse).abs() < 1e-4 * (1 + expected_lse.abs()))
    bound = 1.5e-3 if variant.type == torch.float16 else 8e-3
    what = f"{variant.name} {mask.name} {(b, h, heads_kv)} spread {spread} {[*score]} seed {inputs.seed}"
    assert variant.counters.tolist() == [0, 0], f"{what}: counters {variant.counters.tolist()}"
    assert out[-4096:].isnan().all() and lse[-64:].isnan().all(), f"{what}: written beyond the outputs"
    assert error < bound and largest < 3 * bound and same.all(), (
        f"{what}: error of the norm {error:.2e}, largest {largest:.2e}, {int((~same).sum())} LSE wrong"
    )
    for _ in range(5):
        again = torch.empty_like(o)
        variant(q, k, v, again, None, mask, **score)
        assert torch.equal(again, o), f"{what}: two runs differ"
    return error


def check_outlier(variant, inputs, factor):
    """A late score far above all others: right, or reported as not finite."""
    import torch

    mask = masks.Mask(300, 300, 0)
    q, k, v = (inputs.normal((1, 300, 2, variant.d), variant.type) for _ in range(3))
    k[:, 200] = q[:, 250] * factor / 4
    out = torch.empty_like(q)
    variant(q, k, v, out, None, mask)
    flagged = variant.counters.tolist()[1]
    variant.counters.zero_()
    error = ((out.double() - reference(q, k, v, mask)[0]).norm() / out.double().norm()).item()
    assert flagged or error < 8e-3, f"{variant.name}: a score {factor} times as large: error {error:.2e}"
    return "reported" if flagged else f"{error:.0e}"


def check_highest(variant):
    """A late score 2^126 times as large, after the exponential, as all before: right, or reported as not finite."""
    import torch

    mask = masks.Mask(300, 300, None)
    q, k, v = (torch.zeros((1, 300, 1, variant.d), dtype=variant.type, device="cuda") for _ in range(3))
    q[..., 0], k[:, 200, :, 0], v[:, 200] = 1, 87.5, 1
    out = torch.empty_like(q)
    variant(q, k, v, out, None, mask, scale=1.0)
    flagged = variant.counters.tolist()[1]
    variant.counters.zero_()
    assert flagged or (out == 1).all(), f"{variant.name}: a score 126 above the others: {out[0, 0, 0, 0].item()}, not 1"
    return "reported" if flagged else "right"


def rows():
    """(name, head size, batch, heads, key heads, mask); a mask is made when it is called."""

    def plain(name, d, b, h, heads_kv, queries, keys, causal):
        return name, d, b, h, heads_kv, lambda: masks.Mask(queries, keys, 0 if causal else None)

    for d in (128, 64, 256):
        for mask in ("full", "causal"):
            for s in (512, 1024, 2048, 8192, 16384):
                yield plain(f"d{d} {mask} s{s}", d, 16384 // s, 2048 // d, 2048 // d, s, s, mask == "causal")
    for mask in ("full", "causal"):
        yield plain(f"gqa d128 {mask} s8192", 128, 2, 32, 8, 8192, 8192, mask == "causal")
        yield plain(f"odd d128 {mask} s4001", 128, 4, 16, 16, 4001, 4001, mask == "causal")
    yield plain("cross d128 full s1024x16384", 128, 16, 16, 16, 1024, 16384, False)
    for d in (128, 64):
        for name, make in masks.patterns(16384).items():
            yield f"d{d} {name} s16384", d, 1, 2048 // d, 2048 // d, make


def peers(q, k, v, mask):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    t = [x.transpose(1, 2) for x in (q, k, v)]
    causal, grouped = mask.diagonal is not None, k.shape[2] != q.shape[2]

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(*t, is_causal=causal, enable_gqa=grouped)

    found = {"cuDNN": cudnn}
    try:
        from fa3_fwd_interface import flash_attn_func

        found["FA3"] = lambda: flash_attn_func(q, k, v, causal=causal)
    except ImportError:
        pass
    return found


def time_row(row, variants, inputs, options):
    import torch

    name, d, b, h, heads_kv, make = row
    mask = make()
    flop = 4.0 * b * h * mask.pairs() * d
    calls, beside = {}, {}
    for type in sorted({variant.type for variant in variants}, key=str):
        q = inputs.normal((b, mask.queries, h, d), type)
        k, v = (inputs.normal((b, mask.keys, heads_kv, d), type) for _ in range(2))
        out, lse = torch.empty_like(q), torch.empty((b, h, mask.queries), device="cuda")
        for variant in variants:
            if variant.type == type:
                calls[variant.name] = lambda variant=variant, tensors=(q, k, v, out, lse, mask): variant(*tensors)
        if type == torch.bfloat16 and mask.is_plain() and not (options.no_peers or options.once):
            beside = peers(q, k, v, mask)
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
        return False
    names = options.variants
    if options.check and options.limit:
        options.variants = right_variants(options)
    elif options.check:  # the process of one variant
        return not check(Variant(names[0], options.folder), Inputs(options.seed), options.quick)
    import torch

    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, flush=True)
    variants, inputs = [Variant(name, options.folder) for name in options.variants], Inputs(options.seed)
    for row in rows() if options.time or options.once else []:
        chosen = [variant for variant in variants if variant.d == row[1]]
        if chosen and re.search(options.rows, row[0]):
            time_row(row, chosen, inputs, options)
    return len(options.variants) < len(names)


if __name__ == "__main__":
    sys.exit(main())
