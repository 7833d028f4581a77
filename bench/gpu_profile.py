"""What the kernels of a call wait for: Nsight Compute's counters, a line for each kernel, as a table for docs/notes.

    bench/profile                              every call, forward: minutes
    bench/profile 'd256 full 512' local        those whose names have one of these texts in them
    bench/profile --peers --backward d128      also the peers of bench/compare that can be imported
    bench/profile --list                       the names

Wants ncu, and a GPU whose counters this user may read (learn/profiling.md). Calls are those of bench/compare in
bfloat16. ncu runs each kernel alone and holds the clock: compare the shares, not the times.
"""

import argparse
import csv
import functools
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MARK = "spin_kernel"  # of torch.cuda._sleep: in front of each call
METRICS = {  # ncu's name: our title
    "gpu__time_duration.sum": "us",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor pipe, %",
    "sm__issue_active.avg.pct_of_peak_sustained_elapsed": "issue, %",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM, %",
    "lts__t_sector_hit_rate.pct": "L2 hits, %",
    "launch__registers_per_thread": "registers",
}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
NOT_WAITING = ("selected", "not_selected")
SHORTEST = 2.0  # us; kernels that take less are left out


def dense(direction, peers, q_shape, kv_shape, causal):
    import gpu

    tensors = [gpu.random(*shape).transpose(1, 2) for shape in (q_shape, kv_shape, kv_shape, q_shape)]
    yield "anyflash", gpu.our_call(direction, *tensors, rule=gpu.af.causal() if causal else gpu.af.full())
    if peers:
        yield from gpu.peer_calls(direction, tensors, gpu.gpu_peers.functions("bfloat16", direction, causal)).items()


def masked(direction, peers, name, shape, heads, rule, mask):
    import gpu_masks

    flat, tensors, options = gpu_masks.our_case(name, shape, heads, rule())
    yield "anyflash", gpu_masks.our_call(direction, *tensors, **options)
    if peers:
        theirs = gpu_masks.peers(mask(), flat[0].shape[2]) | gpu_masks.windows(direction, name)
        yield from gpu_masks.peer_calls(direction, flat, theirs).items()


def packed(direction, peers, causal):
    import gpu

    tensors, ends = gpu.packed_case()
    ends = ends.cuda()
    yield "anyflash", gpu.packed_call(direction, tensors, ends, causal)
    if peers:
        theirs = gpu.gpu_peers.packed_functions(direction, ends, max(gpu.LENGTHS), causal)
        yield from gpu.peer_calls(direction, tensors, theirs).items()


def decode(direction, peers, b, h, h_kv, n, d):
    import gpu

    q, k, v = gpu.random(b, h, 1, d), gpu.random(b, h_kv, n, d), gpu.random(b, h_kv, n, d)
    yield "anyflash", functools.partial(gpu.af.attention, q, k, v)
    if peers:
        yield from gpu.peer_calls("forward", (q, k, v, q), gpu.gpu_peers.decode_functions()).items()


def few(direction, peers, b, queries):
    import gpu

    h, h_kv, n, d = gpu.FEW
    q, ours = gpu.few_call(b, queries, None)
    kv = gpu.random(b, h_kv, n, d), gpu.random(b, h_kv, n, d)
    yield "anyflash", functools.partial(ours, *kv)
    if peers:
        theirs = gpu.gpu_peers.few_query_functions(None, queries, n)
        yield from gpu.peer_calls("forward", (q, *kv, q), theirs).items()


def cases(direction):
    """{name: function of (direction, peers), which yields who and its call}"""
    import gpu
    import gpu_masks

    found, part, causals = {}, functools.partial, (("full", False), ("causal", True))
    for (b, h, s, d), (mask, causal) in itertools.product(gpu.shapes("bfloat16"), causals):
        found[f"d{d} {mask} {s}"] = part(dense, q_shape=(b, s, h, d), kv_shape=(b, s, h, d), causal=causal)
    for (what, q_shape, kv_shape), (mask, causal) in itertools.product(gpu.ODD, causals):
        if not (causal and q_shape[1] != kv_shape[1]):
            found[f"{what} {mask}"] = part(dense, q_shape=q_shape, kv_shape=kv_shape, causal=causal)
    for name, (shape, heads, _, rule, mask) in gpu_masks.rule_masks().items():
        found[name] = part(masked, name=name, shape=shape, heads=heads, rule=rule, mask=mask)
    for mask, causal in causals:
        found[f"packed {mask}, lengths on the GPU"] = part(packed, causal=causal)
    if direction == "forward":
        for shape in gpu.DECODE:
            found[f"decode {shape}"] = part(decode, **dict(zip(("b", "h", "h_kv", "n", "d"), shape)))
        for b, queries in itertools.product((1, 8), gpu.QUERIES):
            found[f"{queries} queries, batch {b}"] = part(few, b=b, queries=queries)
    return found


def run_once(chosen, direction, peers, names):
    """Under ncu: each call once for its plan and memory, then once for the counters. names: a file for their names."""
    import torch

    for name, case in chosen.items():
        for who, call in case(direction, peers):
            call()
            torch.cuda.synchronize()
            with names.open("a") as file:
                file.write(f"{name}, {who}\n")
            torch.cuda.profiler.start()
            torch.cuda._sleep(1)
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        torch.cuda.empty_cache()


def rows(report, names):
    """(call, kernel, [a text for each of METRICS], stalls) of each kernel worth a line. report: ncu's CSV lines, raw page,
    in base units; names: of the calls, in order."""
    reader = csv.DictReader(line for line in report if line.startswith('"'))
    units, names, name = next(reader), iter(names), None
    assert units["gpu__time_duration.sum"] in ("ns", "nsecond"), units["gpu__time_duration.sum"]
    for kernel in reader:
        if MARK in kernel["Kernel Name"]:
            name = next(names)
            continue
        values = {metric: float(kernel[metric].replace(",", "")) for metric in METRICS}
        values["gpu__time_duration.sum"] /= 1e3
        if values["gpu__time_duration.sum"] < SHORTEST:
            continue
        found = ((STALL.fullmatch(column), value) for column, value in kernel.items())
        stalls = {match[1]: float(value.replace(",", "")) for match, value in found if match and value}
        waits = {reason: value for reason, value in stalls.items() if reason not in NOT_WAITING}
        longest = sorted(waits, key=waits.get, reverse=True)[:3]
        share = ", ".join(f"{reason} {100 * waits[reason] / sum(stalls.values()):.0f} %" for reason in longest)
        name_of_kernel = kernel["Kernel Name"].replace("(anonymous namespace)::", "")
        short = re.sub(r"<.*|\(.*", "", name_of_kernel).split("::")[-1]
        yield name, short, [f"{value:.1f}" if value % 1 else f"{value:.0f}" for value in values.values()], share


def main():
    parser = argparse.ArgumentParser(
        "profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="parts of names (default: every call)")
    parser.add_argument("--backward", action="store_true", help="the backward pass")
    parser.add_argument("--peers", action="store_true", help="also bench/compare's peers")
    parser.add_argument("--list", action="store_true", help="print the names and profile nothing")
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    direction = "backward" if arguments.backward else "forward"
    found = cases(direction)
    chosen = {name: found[name] for name in found if not arguments.texts or any(x in name for x in arguments.texts)}
    for text in arguments.texts:
        if not any(text in name for name in found):
            parser.error(f"no call has '{text}' in its name; --list prints them")
    if arguments.list:
        print(*chosen, sep="\n")
    elif arguments.once:
        run_once(chosen, direction, arguments.peers, arguments.once)
    else:
        profile(chosen, arguments)


def profile(chosen, arguments):
    ncu = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if not ncu:
        raise SystemExit("bench/profile: no ncu: install Nsight Compute (it is part of the CUDA toolkit)")
    with tempfile.TemporaryDirectory() as folder:
        names, report = Path(folder, "names"), Path(folder, "report.csv")
        command = [ncu, "--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base"]
        command += ["--section", "WarpStateStats", "--metrics", ",".join(METRICS), "--log-file", str(report)]
        command += [sys.executable, __file__, "--once", str(names)]
        command += ["--backward"] * arguments.backward + ["--peers"] * arguments.peers + arguments.texts
        done = subprocess.run(command)
        lines = report.read_text().splitlines() if report.exists() else []
        wrong = [line for line in lines if line.startswith("==ERROR==")]
        if done.returncode or wrong:
            raise SystemExit(f"bench/profile: {(wrong or [f'ncu ended with {done.returncode}'])[0]}")
        print("| call | kernel |", *(f"{title} |" for title in METRICS.values()), "waits, of a warp's cycles |")
        print("|---" * (3 + len(METRICS)) + "|")
        for name, kernel, values, stalls in rows(lines, names.read_text().splitlines()):
            print("|", " | ".join([name, kernel, *values, stalls]), "|")


if __name__ == "__main__":
    main()
