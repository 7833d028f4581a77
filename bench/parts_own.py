"""The parts of bench/compare without a peer, or whose peer is anyflash itself."""

import itertools
import math
import os
import statistics

import anyflash as af
import measure
import numpy as np
import timed_case

# Rules whose time is to follow the visible area: (rule, sequence, most visited pairs for a visible one).
RULES = (
    ("local(8)", (512, 512), 4),
    ("local(16)", (512, 512), 2.6),
    ("local(64, log2_stride=2)", (16384,), 2.5),
    ("causal()", (16384,), 1.1),
)
# Rules that elsewhere are given as a boolean mask: (rule or length of documents, sequence).
MASKS = (
    ("causal()", (2048,)),
    ("local(256, causal=true)", (2048,)),
    (200, (2048,)),
    ("local(8)", (64, 64)),
    ("local(16)", (64, 64)),
)
LENGTHS = (16384, 32768, 65536, 131072)
MOST_TIME = 1.25  # of what full() takes for as many pairs
MOST_GROWTH = 1.05  # of the time of a token where there are twice as many


def calls(table, arguments):
    add = lambda what, seconds, unit, scale, most, **more: table.add(
        what, statistics.median(seconds) * scale, unit, spread=measure.spread(seconds), most=most, **more
    )
    tiny = dict(d=16, sequence=8, causal=True, threads=os.cpu_count())
    for what, seconds in measure.tiny_calls_from_cpp(arguments.calls).items():
        add(f"tiny {what} from C++", seconds, "us", 1e6, 5 if what == "forward" else None, **tiny)
    add("tiny forward from Python", measure.tiny_call(), "us", 1e6, 15, **tiny)
    add("import anyflash, NumPy included", measure.import_time(), "s", 1, 0.3, type="", d=0)


def row_of_pairs(table, arguments, name, what, case, pairs, full, full_pairs):
    """A row of nanoseconds a pair (of one head), beside those of the case `full`."""
    mine, its = measure.interleaved([case.call(what, reuse=True), full.call(what, reuse=True)], arguments.rounds)
    mine, its = [s / pairs for s in mine], [s / full_pairs for s in its]
    table.times(
        name,
        mine,
        its,
        "ns",
        1e9,
        peer=f"full() {'x'.join(map(str, full.queries))}",
        least=1 / MOST_TIME,
        **case.columns(what),
    )


def rules(table, arguments):
    """Time for each visited pair, beside that under full(): one head, 64 channels, one thread."""
    full = timed_case.Case(heads=1, queries=(8192,))
    for text, shape, most_visited in RULES:
        case = timed_case.Case(heads=1, queries=shape, rule=af.parse_rule(text), causal=text == "causal()")
        name = f"{text} {'x'.join(map(str, shape))}"
        for what in timed_case.DIRECTIONS:
            explained = case.explained(what)
            table.add(
                f"{what} {name}, visited pairs",
                explained.visited_pairs / explained.visible_pairs,
                "a visible one",
                most=most_visited,
                **case.columns(what),
            )
            row_of_pairs(
                table,
                arguments,
                f"{what} {name}, time a visited pair",
                what,
                case,
                explained.visited_pairs,
                full,
                full.explained(what).visited_pairs,
            )


def masks(table, arguments):
    """Time for each visible pair, beside that of full() on the same shape: 1x4, 64 channels."""
    for threads in sorted(set(arguments.threads)):
        for rule, shape in MASKS:
            text = f"documents of {rule}" if isinstance(rule, int) else rule
            made = af.documents(np.arange(math.prod(shape)) // rule) if isinstance(rule, int) else af.parse_rule(rule)
            case = timed_case.Case(queries=shape, rule=made, causal=text == "causal()", threads=threads)
            full = timed_case.Case(queries=shape, threads=threads)
            for what in timed_case.DIRECTIONS:
                pairs = [case.heads * one.explained(what).visible_pairs for one in (case, full)]
                row_of_pairs(
                    table,
                    arguments,
                    f"{what} {text} {'x'.join(map(str, shape))}, time a visible pair",
                    what,
                    case,
                    pairs[0],
                    full,
                    pairs[1],
                )


def scaling(table, arguments):
    """Two threads beside one."""
    if os.cpu_count() < 2:
        print("scaling: left out, this machine runs one thread at a time", flush=True)
        return
    for d, causal in ((64, False), (64, True), (128, False), (128, True)):
        one, two = (timed_case.Case(d=d, causal=causal, threads=threads) for threads in (1, 2))
        for what in timed_case.DIRECTIONS:
            alone, both = measure.interleaved([case.call(what, reuse=True) for case in (one, two)], arguments.rounds)
            table.rates(
                f"{what}, two threads",
                both,
                alone,
                two.flops(what) / 1e9,
                "GFLOP/s",
                peer="one thread",
                least=1.95,
                **two.columns(what),
            )


def long(table, arguments):
    """One head, 64 channels, local(256): time linear in the length, memory beyond inputs and outputs small."""
    columns = dict(threads=os.cpu_count())
    calls = [measure.LongCalls(length) for length in LENGTHS]
    for what in timed_case.DIRECTIONS:
        times = measure.interleaved([getattr(call, what) for call in calls], arguments.rounds)
        a_token = {length: [s / length for s in seconds] for length, seconds in zip(LENGTHS, times)}
        name, first = f"{what} local(256), time a token", a_token[LENGTHS[0]]
        table.add(
            name, statistics.median(first) * 1e9, "ns", spread=measure.spread(first), sequence=LENGTHS[0], **columns
        )
        for shorter, length in itertools.pairwise(LENGTHS):
            table.times(
                name,
                a_token[length],
                a_token[shorter],
                "ns",
                1e9,
                sequence=length,
                peer=f"{shorter} tokens",
                least=1 / MOST_GROWTH,
                **columns,
            )
        for length in (LENGTHS[0], LENGTHS[-1]):
            table.add(
                f"{what} local(256), memory beside tensors",
                measure.peak_memory_in_own_process(what, length),
                "MB",
                sequence=length,
                most=250,
                **columns,
            )
