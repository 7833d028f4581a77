"""anyflash next to its peers, in one run.

Every row is timed in pairs, ours then the peer's, after a warm-up; figures are medians and the ratio is the median of the
pairs' ratios, so it holds when the machine's speed drifts. Figures: useful GFLOP/s, 4 * b * h * pairs * d forward and 2.5
times that backward, where pairs counts the visible (query, key) pairs only (causal: half of the square).
"""

import argparse
import json
import os
import statistics
import sys
import time

import measure


def parse_arguments():
    parser = argparse.ArgumentParser(prog="bench/compare", description=__doc__.split("\n")[0],
                                     epilog="example: bench/compare --device cpu --json cpu.json")
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--only", default="", metavar="WORD", help="only rows whose description contains WORD")
    parser.add_argument("--pairs", type=int, default=7, help="timed pairs a row (default 7)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count()], help="thread counts (default: one, all)")
    parser.add_argument("--quick", action="store_true", help="float32, one thread, no long sequences")
    return parser.parse_args()


def grid(arguments):
    """(type, head size, causal, threads) of the 1x4x2048 rows."""
    threads = [1] if arguments.quick else sorted(set(arguments.threads))
    types = ["float32"] if arguments.quick else ["float32", "float64", "bfloat16", "float16"]
    return [(type_, d, causal, n) for n in threads for type_ in types for d in (64, 128) for causal in (False, True)]


def compare_with_torch(arguments, rows):
    import peers

    for type_, d, causal, threads in grid(arguments):
        case = peers.Case(type_, 1, 4, 2048, d, causal, threads)
        for what in ("forward", "backward"):
            name = f"{what} {type_} d{d} {'causal' if causal else 'full'} {threads} thread{'s' * (threads > 1)}"
            if arguments.only not in name:
                continue
            ours, theirs = case.calls(what)
            seconds, peer_seconds, ratio = measure.pairs(ours, theirs, arguments.pairs)
            flops = case.flops(what)
            add(rows, what=f"{what}, {threads} thread{'s' * (threads > 1)}", device="cpu", type=type_, d=d, causal=causal,
                sequence=2048, figure=flops / seconds / 1e9, unit="GFLOP/s", peer=peers.NAME,
                peer_figure=flops / peer_seconds / 1e9, ratio=ratio)


def local_lengths(arguments, rows):
    """One head, local(256), 16k to 128k tokens, in processes of their own: time and memory are to grow linearly."""
    if arguments.quick or arguments.only not in "local(256)":
        return
    lengths = [16384, 32768, 65536, 131072]
    for what in ("forward", "backward"):
        first = None
        for length in lengths:
            seconds, memory = measure.local_in_own_process(what, length)
            first = first or seconds / length
            common = dict(device="cpu", type="float32", d=64, causal=False, sequence=length)
            add(rows, what=f"{what} local(256), time a token over that at 16384", figure=seconds / length / first, unit="x",
                peer="", peer_figure=None, ratio=None, **common)
            add(rows, what=f"{what} local(256), memory beyond inputs and outputs", figure=memory, unit="MB", peer="",
                peer_figure=None, ratio=None, **common)


def small_calls(arguments, rows):
    if arguments.only not in "tiny call import":
        return
    common = dict(device="cpu", type="float32", d=16, causal=False, peer="", peer_figure=None, ratio=None)
    add(rows, what="tiny call 1x1x8x16 from Python", figure=measure.tiny_call() * 1e6, unit="us", sequence=8, **common)
    add(rows, what="import anyflash, NumPy included", figure=measure.import_time(), unit="s", sequence=0, **common)


def add(rows, **row):
    rows.append(row)
    peer = f"{row['peer_figure']:10.1f} {row['peer']:<16} {row['ratio']:6.2f} x" if row["ratio"] else ""
    shape = f"d{row['d']} {'causal' if row['causal'] else 'full'} {row['sequence']}"
    print(f"{row['what']:<52} {row['type']:<9} {shape:<18} {row['figure']:10.2f} {row['unit']:<8} {peer}", flush=True)


def main():
    arguments = parse_arguments()
    rows = []
    print(f"{time.strftime('%Y-%m-%d')}  {measure.processor()}, {os.cpu_count()} threads")
    small_calls(arguments, rows)
    compare_with_torch(arguments, rows)
    local_lengths(arguments, rows)
    compared = [row for row in rows if row["ratio"]]
    if compared:
        worst = min(compared, key=lambda row: row["ratio"])
        median = statistics.median(row["ratio"] for row in compared)
        print(f"\n{len(compared)} rows compared, median ratio {median:.2f}; worst {worst['ratio']:.2f}: {worst['what']} "
              f"{worst['type']} d{worst['d']} {'causal' if worst['causal'] else 'full'}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
