"""The parts of bench/compare whose peer is PyTorch, or which need it."""

import math
import os
import statistics

import measure
import page
import peers
import timed_case
from options import is_program

SEQUENCE = page.SEQUENCE  # of the parts torch and sizes: batch 1
SHORT = (32, 12, (64, 128, 512))  # batch, heads, sequences
SIZES = ((40, 40), (72, 72), (80, 80), (96, 96), (112, 112), (192, 192), (256, 256), (128, 32))  # d_qk, d_v
DECODE_KEYS = (4096, 65536)
DECODE_CALLS = 8  # that follow one another
FAR = 512 << 20  # bytes: more than any cache holds
CAUSAL = (False, True)


def thread_counts(arguments):
    return sorted(set(arguments.threads))


def row(table, arguments, case, what, name, least, paths=None, **more):
    """A row of GFLOP/s."""
    ours, theirs, peer = case.beside(what, paths)
    mine, its = measure.interleaved([ours, theirs], arguments.rounds)
    table.rates(
        name, mine, its, case.flops(what) / 1e9, "GFLOP/s", peer=peer, least=least, **case.columns(what), **more
    )


def goal(type_, what, d, causal, amx=False):
    """How many times PyTorch's speed a row of the part torch is to reach; amx: on a processor with AMX's tiles."""
    if amx and type_ in ("float32", "bfloat16"):
        return 2.5 if (type_, what) == ("bfloat16", "backward") else 1.2
    if type_ == "float64":
        return 1.5
    if what == "backward":
        return {"float32": 1.45 if causal else 1.2, "bfloat16": 3, "float16": 25}[type_]
    if type_ == "float32" and d == 64:
        return 1.4 if causal else 1.15
    return 1.35 if causal else 1.1


def torch(table, arguments):
    heads, sequence, amx = arguments.heads or page.HEADS, arguments.sequence or SEQUENCE, measure.has_amx()
    more = dict(shape=page.shape_of(heads, sequence)) if arguments.heads or arguments.sequence else {}
    for threads in thread_counts(arguments):
        for type_, d, causal in ((t, d, c) for t in arguments.types for d in (64, 128) for c in CAUSAL):
            case = peers.Case(type=type_, heads=heads, queries=(sequence,), d=d, causal=causal, threads=threads)
            for what in timed_case.DIRECTIONS:
                least = goal(type_, what, d, causal, amx)
                if (type_, what) == ("float16", "backward"):  # 25 is beside the path that PyTorch takes by itself
                    row(table, arguments, case, what, what, least, [peers.NAME], **more)
                    row(table, arguments, case, what, f"{what}, beside its fastest path", 1, **more)
                else:
                    row(table, arguments, case, what, what, least, **more)
    if not more and is_program(arguments.kernels):
        products(table, arguments)


def products(table, arguments):
    """PyTorch's own matrix product beside the peak of multiply-adds, on one thread."""
    size = peers.PRODUCT
    peaks = measure.peaks(arguments.kernels, 1)
    for type_ in arguments.types:
        (seconds,) = measure.interleaved([peers.product(1, type_)], min(3, arguments.rounds))  # float16: seconds
        speed, peak = 2 * size**3 / 1e9 / statistics.median(seconds), measure.peak_of(type_, peaks)
        beside = (
            {}
            if peak is None
            else dict(peer="FMA peak", peer_figure=max(peak), peer_spread=measure.spread(peak), ratio=speed / max(peak))
        )
        table.add(
            f"{page.PRODUCT}, {size} x {size} x {size}",
            speed,
            "GFLOP/s",
            spread=measure.spread(seconds),
            type=type_,
            d=0,
            threads=1,
            **beside,
        )


def short(table, arguments):
    """Many short sequences, as in encoders."""
    batch, heads, sequences = SHORT
    for threads, sequence, causal in ((t, s, c) for t in thread_counts(arguments) for s in sequences for c in CAUSAL):
        case = peers.Case(batch=batch, heads=heads, queries=(sequence,), causal=causal, threads=threads)
        for what in timed_case.DIRECTIONS:
            row(table, arguments, case, what, f"{what}, batch {batch} x {heads} heads", 1.3)


def sizes(table, arguments):
    """Other head sizes, on one thread."""
    for (d, d_v), causal in ((s, c) for s in SIZES for c in CAUSAL):
        case = peers.Case(queries=(SEQUENCE,), d=d, d_v=d_v, causal=causal)
        for what in timed_case.DIRECTIONS:
            row(table, arguments, case, what, what if d == d_v else f"{what}, d_v {d_v}", 1.1)


def decode(table, arguments):
    """One query of 32 heads, 8 key heads. K and V lie in so many copies, taken in turn, that they come from memory; short
    calls follow one another, as those of a model's layers do: one alone after the peer's finds even its code cold."""
    types = [type_ for type_ in ("float32", "bfloat16") if type_ in arguments.types]
    for threads, type_, d, keys in (
        (n, t, d, k) for n in thread_counts(arguments) for t in types for d in (64, 128) for k in DECODE_KEYS
    ):
        copies = math.ceil(FAR / (2 * 8 * keys * d * timed_case.BYTES[type_]))
        case = peers.Case(
            type=type_, heads=32, kv_heads=8, queries=(1,), keys=(keys,), d=d, threads=threads, copies=copies
        )
        ours, theirs, peer = case.beside("forward")
        for _ in range(copies):
            ours()  # the first time that memory is read it is slower
        calls = min(DECODE_CALLS, copies)
        mine, its = (
            [seconds / calls for seconds in of]
            for of in measure.interleaved(
                [lambda call=call: [call() for _ in range(calls)] for call in (ours, theirs)], arguments.rounds
            )
        )
        columns, gigabytes = case.columns("forward"), case.kv_bytes() / 1e9
        table.rates("decode, 32 / 8 heads, K and V read", mine, its, gigabytes, "GB/s", peer=peer, least=3.5, **columns)
        reading = measure.read_bandwidth(arguments.kernels, threads)
        speed = gigabytes / statistics.median(mine)
        table.add(
            "decode, 32 / 8 heads, beside reading memory",
            speed,
            "GB/s",
            spread=measure.spread(mine),
            peer="reading memory",
            peer_figure=statistics.median(reading),
            peer_spread=measure.spread(reading),
            ratio=speed / statistics.median(reading),
            least=0.75,
            **columns,
        )


def beside(table, arguments):
    """A call on all threads right after an operation of PyTorch on all its threads, and by itself."""
    threads = os.cpu_count()
    product = peers.product(threads)
    for sequence, what in ((s, w) for s in (512, SEQUENCE) for w in timed_case.DIRECTIONS):
        case = timed_case.Case(queries=(sequence,), threads=threads)
        call = case.call(what, reuse=True)
        _, after, _, alone = measure.interleaved([product, call, call, call], arguments.rounds)
        table.times(
            f"{what}, right after a product of PyTorch's",
            after,
            alone,
            "ms",
            1e3,
            peer="by itself",
            least=1 / 1.05,
            **case.columns(what),
        )
