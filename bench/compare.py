"""anyflash next to its peers, in one run: speed, memory, and the limits that both are held to.

Timed calls are interleaved: in each round every call of a comparison runs once. Figures are medians over the rounds, a
spread is the slowest less the fastest over the median, and a ratio is the median of the rounds' ratios (above 1:
anyflash is faster), so it holds when the machine's speed drifts. GFLOP/s counts useful operations: 4 d a visible pair
forward, 10 d backward.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import measure
import page

TYPES = ("float32", "float64", "bfloat16", "float16")
PARTS = ("calls", "torch", "rules", "long")
# Rules whose time is to follow the visible area: (rule, sequence, most visited pairs for a visible one).
RULES = (("local(8)", (512, 512), 4), ("local(16)", (512, 512), 2.6), ("local(64, log2_stride=2)", (16384,), 2.5),
         ("causal()", (16384,), 1.1))  # fmt: skip
LENGTHS = (16384, 32768, 65536, 131072)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise SystemExit(f"bench/compare: {message}")


def number(least, most):
    def parse(text):
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"'{text}', expected a whole number from {least} to {most}")
        return int(text)

    return parse


def parse_arguments():
    parser = Parser(prog="bench/compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    epilog="example: bench/compare --device cpu --json bench/results/cpu.json", allow_abbrev=False)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu",
                        help="cuda: the rows beside PyTorch's kernels alone, with --rounds and --types")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the rows to FILE")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--build", action="store_true", help="also time a cold build (minutes)")
    parser.add_argument("--rounds", type=number(1, 1000), default=7, metavar="N", help="timed rounds a row (default 7)")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES,
                        help="of the rows beside PyTorch (default: all)")
    parser.add_argument("--threads", nargs="+", type=number(1, 1024), metavar="N",
                        default=[1, os.cpu_count()],
                        help="of the rows beside PyTorch (default: one, and all)")  # fmt: skip
    parser.add_argument("--calls", metavar="PROGRAM", type=Path,
                        default=measure.PROJECT / "build-bench/bench/bench_calls",
                        help="the C++ benchmark (default: the one that bench/compare builds)")  # fmt: skip
    parser.add_argument("--publish", metavar="FILE", type=Path,
                        help="measure nothing: write the rows of this earlier --json file into README.md and "
                             "docs/performance.md")
    parser.add_argument("--check", action="store_true", help="only check the options")
    arguments = parser.parse_args()
    if arguments.json and (arguments.json.is_dir() or not os.access(arguments.json.parent, os.W_OK)):
        parser.error(f"--json: {arguments.json} cannot be written")
    return arguments


class Table:
    """Collects the rows and prints each as it comes."""

    def __init__(self, device, machine):
        self.rows, self.device, self.machine, self.date = [], device, machine, time.strftime("%Y-%m-%d")
        print(f"{self.date}  {self.machine}\n{page.HEADER}", flush=True)

    def add(self, what, figure, unit, *, type="float32", d=64, causal=False, sequence=0, threads=0, spread=None,
            peer="", peer_figure=None, peer_spread=None, ratio=None, least=None, most=None):  # fmt: skip
        """least: of the ratio; most: of the figure."""
        held = (least is None or ratio >= least) and (most is None or figure <= most)
        self.rows.append(dict(what=what, device=self.device, type=type, d=d, causal=causal, sequence=sequence,
                              figure=figure, unit=unit, peer=peer, peer_figure=peer_figure, ratio=ratio,
                              threads=threads, spread=spread, peer_spread=peer_spread, least_ratio=least, most=most,
                              held=held, machine=self.machine, date=self.date))  # fmt: skip
        print(page.line(self.rows[-1]), flush=True)

    def compare(self, what, ours, theirs, work, **columns):
        """A row of work / seconds (an amount a second) beside a peer's."""
        median = statistics.median
        self.add(what, work / median(ours), "GFLOP/s", peer_figure=work / median(theirs), spread=measure.spread(ours),
                 peer_spread=measure.spread(theirs), ratio=measure.median_ratio(ours, theirs), **columns)  # fmt: skip


def small_calls(table, arguments):
    add = lambda what, seconds, unit, scale, most, **more: table.add(
        what, statistics.median(seconds) * scale, unit, spread=measure.spread(seconds), most=most, **more)  # fmt: skip
    tiny = dict(d=16, sequence=8, causal=True, threads=os.cpu_count())
    if not os.access(arguments.calls, os.X_OK):
        raise SystemExit(f"bench/compare: --calls: no program {arguments.calls}; bench/compare builds it")
    for what, seconds in measure.tiny_calls_from_cpp(arguments.calls).items():
        add(f"tiny {what} from C++", seconds, "us", 1e6, 5 if what == "forward" else None, **tiny)
    add("tiny forward from Python", measure.tiny_call(), "us", 1e6, 15, **tiny)
    add("import anyflash, NumPy included", measure.import_time(), "s", 1, 0.3, type="", d=0)


def beside_torch(table, arguments):
    import peers

    for threads in sorted(set(arguments.threads)):
        for type_, d, causal in ((t, d, c) for t in arguments.types for d in (64, 128) for c in (False, True)):
            case = peers.Case(type_, 1, 4, 2048, d, causal, threads)
            for what, least in (("forward", 0.7), ("backward", 0.6)):
                ours, theirs = measure.interleaved(case.calls(what), arguments.rounds)
                table.compare(what, ours, theirs, case.flops(what) / 1e9, type=type_, d=d, causal=causal, sequence=2048,
                              threads=threads, peer=peers.NAME,
                              least=least if type_ == "float32" and threads == 1 else None)  # fmt: skip


def time_follows_rules(table, arguments):
    """Nanoseconds a visited pair under a rule, beside those under full(): one head, 64 channels, one thread."""
    import numpy as np

    import anyflash as af

    def calls(rule, shape):
        q, k, v, dout = (np.random.default_rng(i).standard_normal((1, 1, *shape, 64), np.float32) for i in range(4))
        options = dict(rule=rule, threads=1)
        out, lse = af.attention(q, k, v, return_lse=True, **options)
        return {"forward": lambda: af.attention(q, k, v, out=out, **options),  # as in C++: no new pages
                "backward": lambda: af.attention_backward(dout, q, k, v, out, lse, **options)}  # fmt: skip

    full_shape = (8192,)
    full_calls = calls(af.full(), full_shape)
    for text, shape, most_visited in RULES:
        rule = af.parse_rule(text)
        rule_calls = calls(rule, shape)
        columns = dict(causal=text == "causal()", sequence=int(np.prod(shape)), threads=1)
        name = f"{text} {'x'.join(map(str, shape))}"
        for what in rule_calls:
            explained = af.explain(rule, shape, backward=what == "backward")
            table.add(f"{what} {name}, visited pairs", explained.visited_pairs / explained.visible_pairs,
                      "a visible one", most=most_visited, **columns)  # fmt: skip
            ours, theirs = measure.interleaved([rule_calls[what], full_calls[what]], arguments.rounds)
            full_pairs = af.explain(af.full(), full_shape, backward=what == "backward").visited_pairs
            mine, full = ([s / pairs * 1e9 for s in seconds]
                          for seconds, pairs in ((ours, explained.visited_pairs), (theirs, full_pairs)))  # fmt: skip
            table.add(f"{what} {name}, time a visited pair", statistics.median(mine), "ns", peer="full() 8192",
                      peer_figure=statistics.median(full), spread=measure.spread(mine),
                      peer_spread=measure.spread(full), ratio=measure.median_ratio(mine, full), least=1 / 1.25,
                      **columns)  # fmt: skip


def long_sequences(table, arguments):
    """One head, 64 channels, local(256): time linear in the length, memory beyond inputs and outputs small."""
    columns = dict(threads=os.cpu_count())
    calls = [measure.LongCalls(length) for length in LENGTHS]
    for what in ("forward", "backward"):
        times = measure.interleaved([getattr(call, what) for call in calls], arguments.rounds)
        for length, seconds in zip(LENGTHS, times):
            a_token = [s / length * 1e9 for s in seconds]
            first = [s / LENGTHS[0] * 1e9 for s in times[0]]
            table.add(f"{what} local(256), time a token", statistics.median(a_token), "ns", sequence=length,
                      spread=measure.spread(a_token), peer="16384 tokens", peer_figure=statistics.median(first),
                      peer_spread=measure.spread(first), ratio=measure.median_ratio(a_token, first), least=1 / 1.25,
                      **columns)  # fmt: skip
        for length in (LENGTHS[0], LENGTHS[-1]):
            table.add(f"{what} local(256), memory beside tensors", measure.peak_memory_in_own_process(what, length),
                      "MB", sequence=length, most=250, **columns)  # fmt: skip


def main():
    arguments = parse_arguments()
    if arguments.check:
        return
    if arguments.publish:
        page.publish(page.read(arguments.publish))
        return
    if arguments.device == "cuda":
        import gpu

        table, parts = Table("cuda", gpu.name()), dict(torch=gpu.beside_torch)
        arguments.parts = [name for name in arguments.parts if name in parts]
    else:
        table = Table("cpu", measure.processor())
        parts = dict(calls=small_calls, torch=beside_torch, rules=time_follows_rules, long=long_sequences)
    for name in PARTS:
        if name in arguments.parts:
            parts[name](table, arguments)
    if arguments.build:
        table.add("cold build of library and program, two jobs", measure.build_time(), "s", type="", d=0, threads=2,
                  most=120)
    if arguments.json:
        arguments.json.write_text(json.dumps(table.rows, indent=1) + "\n")
    print(page.summary(table.rows))


if __name__ == "__main__":
    sys.exit(main())
