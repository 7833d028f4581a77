"""bench/compare --device tiles: the tile machine beside what others published, and the planner beside an exhaustive search.

Every figure is a prediction of the model: nothing is timed but the planning. The machines' constants come with the
library; what they are held against is in tiles_published.py.
"""

import itertools
import json
import math
import platform
import time
from dataclasses import replace

import anyflash as af
import tiles_published as published
from anyflash import tile_machine as tm

SEQUENCES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
HEADS = 4


class Rows:
    """Printed as they come. within: how far a figure may be from the published one, as a part of it or, of shares in
    percent, in points; least, most: of the figure."""

    def __init__(self, machine, date):
        self.rows, self.machine, self.date, self.part = [], machine, date, ""

    def add(self, what, figure, unit, *, source="", peer=None, within=None, points=None, least=None, most=None, **more):
        held = None
        if within is not None or points is not None:
            off = abs(figure - peer)
            held = off <= points if points is not None else off <= within * abs(peer)
        elif least is not None or most is not None:
            held = (least is None or figure >= least) and (most is None or figure <= most)
        row = dict(part=self.part, what=what, figure=figure, unit=unit, source=source, peer_figure=peer, within=within)
        row |= dict(points=points, least=least, most=most, held=held, device="tiles", machine=self.machine)
        self.rows.append(row | dict(date=self.date) | more)
        print(line(self.rows[-1]), flush=True)


def line(row):
    peer = "" if row["peer_figure"] is None else f"published {row['peer_figure']:9.4g}"
    verdict = {True: "", False: "MISSED", None: ""}[row["held"]]
    return f"{row['part']:<10} {row['what']:<62} {row['figure']:10.4g} {row['unit']:<10} {peer:<20} {verdict}".rstrip()


# ---- closed forms of the constants


def constants(rows):
    for name, what, figure, unit, peer, source in published.CONSTANTS:
        rows.add(f"{name}: {what}", figure(tm.machine(name)), unit, peer=peer, source=source, within=0.05)


# ---- matrix products


def phase_of_product(machine, dtype, m, n, k):
    """Cycles of one phase in which every tile multiplies its own operands."""
    return tm.product_cycles(machine, dtype, m, n, k) + machine.sync_cycles


def product(rows):
    bow = tm.machine("bow")
    for n, peer in published.BOW_PRODUCT.items():
        operations = 2 * n * 16 * 16 * bow.tiles
        figure = operations / phase_of_product(bow, "float16", n, 16, 16) * bow.clock_hz / 1e12
        rows.add(
            f"bow: {n} x 16 by 16 x 16 on every tile",
            figure,
            "TFLOP/s",
            peer=peer,
            source=published.BOW_PRODUCT_SOURCE,
            within=0.05,
        )


def square_product(machine, dtype, n):
    """TFLOP/s of n x n by n x n numbers spread over the tiles; None if they do not fit. The result is cut into a x b
    blocks. A block's sum goes in `steps` phases: a tile receives its operands of a step, multiplies, and adds."""
    size = 2 if dtype == "float16" else 4
    best = None
    sides = sorted({side for i in range(12) for side in (2**i, 3 * 2**i, 23 * 2**i) if side <= min(n, machine.tiles)})
    for a, b, steps in itertools.product(sides, sides, [2**i for i in range(10)]):
        if a * b > machine.tiles or steps > n:
            continue
        m_t, n_t, k_t = math.ceil(n / a), math.ceil(n / b), math.ceil(n / steps)
        received = (m_t + n_t) * k_t * size
        live = 2 * n * n * size / machine.tiles + received + m_t * n_t * 4
        if live > machine.memory_per_tile - machine.reserved_per_tile:
            continue
        cycles = phase_of_product(machine, dtype, m_t, n_t, k_t) + received / machine.exchange_bytes_per_cycle
        best = min(steps * cycles, best or math.inf)
    return None if best is None else 2 * n**3 / best * machine.clock_hz / 1e12


def square(rows):
    mk2 = tm.machine("ipu-mk2")
    for dtype in ("float32", "float16"):
        for n in (256, 512, 1024, 2048, 3072, 4096, 5120, 6144, 8192):
            figure = square_product(mk2, dtype, n)
            if figure is None:
                rows.add(f"ipu-mk2: {n} x {n} by {n} x {n}, {dtype}: does not fit", 0, "TFLOP/s")
            else:
                share = 1e12 * figure / mk2.peak(dtype)
                rows.add(f"ipu-mk2: {n} x {n} by {n} x {n}, {dtype}", figure, "TFLOP/s", share=share)


# ---- Tenstorrent's chunks of causal prefill


def pairs_of_core(queries, sequence, heads, cores):
    """Pairs of a light and a heavy query chunk on the core that sets the time: the kernel hands out whole pairs."""
    return math.ceil(sequence // queries * heads / 2 / cores)


def causal_chunks(machine, queries, keys, *, sequence=4096, heads=32, d=128, bytes_per_number=1.0625):
    """(cycles of the call, cycles of its products) on the core that sets the time. For each query chunk the core reads
    all key chunks up to the diagonal from the shared memory while it computes; the last one is computed in part."""
    chunks = sequence // queries
    pairs = pairs_of_core(queries, sequence, heads, machine.tiles)
    readers = min(machine.tiles, chunks * heads // 2)
    read = 2 * keys * d * bytes_per_number * readers / machine.memory_bytes_per_cycle

    def step(visible):
        both = tm.step_cycles(machine, "float16", queries, visible, d, d)
        return max(both.total, read) + machine.sync_cycles, both.products

    def chunk(i):
        """Of query chunk i: queries i * queries to (i + 1) * queries."""
        end = (i + 1) * queries
        steps = [step(min(keys, end - first)) for first in range(0, end, keys)]
        return sum(cycles for cycles, _ in steps), sum(products for _, products in steps)

    found = [tuple(map(sum, zip(chunk(i), chunk(chunks - 1 - i)))) for i in range(chunks // 2)]
    cycles, products = max(found)
    return pairs * cycles, pairs * products


def blackhole_hifi4(machine):
    rate = machine.multiply_adds_float16 / 2
    return replace(machine, tiles=64, mesh_rows=8, mesh_columns=8, multiply_adds_float16=rate)


def chunks(rows):
    blackhole = tm.machine("blackhole")
    cases = [(blackhole, chunk, share) for chunk, share in published.BLACKHOLE_CAUSAL.items()]
    cases += [(blackhole_hifi4(blackhole), chunk, share) for chunk, share in published.BLACKHOLE_CAUSAL_HIFI4.items()]
    found = []
    for machine, chunk, share in cases:
        cycles, products = causal_chunks(machine, *chunk)
        found.append(products / cycles)
        note = "" if machine is blackhole else ", HiFi4, 64 cores"
        rows.add(
            f"blackhole: {chunk[0]} x {chunk[1]}{note}",
            100 * found[-1],
            "%",
            peer=100 * share,
            source=published.BLACKHOLE_SOURCE,
        )
    ours = sorted(range(len(found)), key=lambda i: found[i])
    theirs = sorted(range(len(found)), key=lambda i: cases[i][2])
    rows.add("blackhole: places that differ in the ranking", sum(a != b for a, b in zip(ours, theirs)), "", most=0)
    for chunk, peer in published.BLACKHOLE_MICROSECONDS.items():
        cycles, _ = causal_chunks(blackhole, *chunk)
        rows.add(
            f"blackhole: time of {chunk[0]} x {chunk[1]}",
            1e6 * cycles / blackhole.clock_hz,
            "us",
            peer=peer,
            source=published.BLACKHOLE_MICROSECONDS_SOURCE,
            within=0.2,
        )


# ---- FlatAttention


def flat(rows):
    machine = tm.machine("flatattention-32x32")
    own = 0
    for (d, sequence, batch, heads, side), share in published.FLAT.items():
        shape = (batch, heads, sequence, d)
        report = tm.predict(shape, machine=machine, choice=tm.Choice(grid_rows=side, grid_columns=side))
        rows.add(
            f"flatattention-32x32: d {d}, {sequence} tokens, groups of {side} x {side}",
            100 * report.utilisation,
            "%",
            peer=100 * share,
            source=published.FLAT_SOURCE,
            points=5,
        )
        own = max(own, tm.predict(shape, machine=machine).utilisation)
    rows.add(
        "flatattention-32x32: best, the planner's own mapping",
        100 * own,
        "%",
        peer=100 * published.FLAT_BEST,
        source=published.FLAT_SOURCE,
        points=5,
    )
    ideal = 16 * 16 * 128 / machine.multiply_adds_float16
    active = replace(machine, unit_start_cycles=0)
    padded = sum(tm.product_cycles(active, "float16", 16, *sizes) for sizes in ((16, 128), (128, 16)))
    rows.add(
        "flatattention-32x32: matrix unit while active, slices of 16 x 16",
        100 * 2 * ideal / padded,
        "%",
        peer=100 * published.FLAT_SMALL_SLICES,
        source=published.FLAT_SOURCE,
        points=5,
    )


# ---- the planner


RULES = {"full": af.full(), "causal": af.causal(), "local(256)": af.local(256)}


def unchunked_runs(shape, **options):
    """One chunk of queries and one of keys for each head: a tile holds a whole head."""
    try:
        tm.predict(shape, num_chunks_q=1, num_chunks_kv=1, **options)
        return True
    except MemoryError:
        return False


def planned(shape, **options):
    """(report or the error that says that nothing fits, milliseconds of this process)."""
    start = time.process_time()
    try:
        report = tm.predict(shape, **options)
    except MemoryError as error:
        report = error
    return report, 1e3 * (time.process_time() - start)


def ceiling(machine, dtype, shape, multiply_adds):
    """No mapping can have a higher utilisation: the share of products in a large step, and the time in which the shared
    memory, if there is one, gives q, k and v and takes the results."""
    d = shape[3]
    step = tm.step_cycles(machine, dtype, 12 * 128, 128, d, d)
    most = step.products / step.total
    if machine.memory_bytes_per_cycle:
        size = 2 if dtype == "float16" else 4
        moving = 4 * size * math.prod(shape) / machine.memory_bytes_per_cycle
        rate = machine.multiply_adds_float16 if dtype == "float16" else machine.multiply_adds_float32
        most = min(most, multiply_adds / (machine.tiles * rate) / moving)
    return most


def add_planned(rows, machine, dtype, d, name, sequence, backward=False, **limit):
    rule, shape = RULES[name], (1, HEADS, sequence, d)
    report, milliseconds = planned(shape, rule=rule, dtype=dtype, machine=machine, backward=backward)
    what = f"{machine.name}, {dtype}, d {d}, {name}, {sequence} tokens" + (", backward" if backward else "")
    if isinstance(report, MemoryError):
        rows.add(f"{what}: nothing fits", 0, "%", milliseconds=milliseconds, error=str(report), **limit)
        return
    rows.add(
        what,
        100 * report.utilisation,
        "%",
        unchunked=unchunked_runs(shape, rule=rule, dtype=dtype, machine=machine, backward=backward),
        chunks=[report.num_chunks_q, report.num_chunks_kv],
        grid=[report.grid_rows, report.grid_columns],
        peak_bytes=report.peak_bytes,
        compute=report.compute_cycles / report.cycles,
        exchange=report.exchange_cycles / report.cycles,
        sync=report.sync_cycles / report.cycles,
        busy=report.busy,
        milliseconds=milliseconds,
        **({} if backward else dict(ceiling=ceiling(machine, dtype, shape, report.multiply_adds))),
        **limit,
    )


def fits(rows):
    """Each call with the planner's mapping and without chunks, on the IPU, both passes; and 16,384 tokens on others."""
    mk2, flat = tm.machine("ipu-mk2"), tm.machine("flatattention-32x32")
    for d, name, sequence in itertools.product((64, 128), RULES, SEQUENCES):
        add_planned(rows, mk2, "float16", d, name, sequence, **(dict(least=85) if sequence == 16384 else {}))
    for d, name, sequence in itertools.product((64, 128), RULES, SEQUENCES):
        add_planned(rows, mk2, "float16", d, name, sequence, backward=True)
    for machine, dtype in ((mk2, "float32"), (flat, "float16")):
        for d, name in itertools.product((64, 128), RULES):
            add_planned(rows, machine, dtype, d, name, 16384, least=85)
    times = [(row["milliseconds"], row["what"]) for row in rows.rows if "milliseconds" in row]
    rows.add(f"longest planning: {max(times)[1]}", max(times)[0], "ms", most=50)
    missing = [row for row in rows.rows if "unchunked" in row and row["unchunked"]]
    rows.add("calls that run without chunks", len(missing), "")


def divisors(n):
    return [i for i in range(1, n + 1) if n % i == 0]


def exhaustive(machine, shape, rule, dtype="float16", sides=None):
    """The fewest cycles of all mappings that fit: every pair of chunk counts, every grid, every number in flight."""
    sequence = shape[2]
    best = None
    grids = [(r, c) for r in range(1, machine.tiles + 1) for c in range(1, machine.tiles + 1) if r * c <= machine.tiles]
    for q, kv, (r, c) in itertools.product(divisors(sequence), divisors(sequence), grids):
        if c > kv or q * shape[1] < r:
            continue
        for flight in divisors(-(-kv // c)):
            try:
                report = tm.predict(
                    shape,
                    rule=rule,
                    dtype=dtype,
                    machine=machine,
                    choice=tm.Choice(r, c, flight),
                    num_chunks_q=q,
                    num_chunks_kv=kv,
                )
            except (ValueError, MemoryError):
                continue
            if best is None or report.cycles < best.cycles:
                best = report
    return best


def small_machines():
    mk2, flat = tm.machine("ipu-mk2"), tm.machine("flatattention-32x32")
    yield replace(mk2, name="4 tiles of 64 KiB", tiles=4, memory_per_tile=64 * 1024)
    yield replace(mk2, name="8 tiles of 32 KiB", tiles=8, memory_per_tile=32 * 1024)
    yield replace(flat, name="2 x 4 tiles and HBM", tiles=8, mesh_rows=2, mesh_columns=4, memory_bytes_per_cycle=64)


def search(rows):
    shape = (1, 2, 128, 64)
    for machine in small_machines():
        for name, rule in (("full", af.full()), ("causal", af.causal()), ("local(32)", af.local(32))):
            best = exhaustive(machine, shape, rule)
            ours = tm.predict(shape, rule=rule, machine=machine)
            rows.add(f"{machine.name}: 2 x 128 x 64, {name}", ours.cycles / best.cycles, "x", most=1.1)


PARTS = dict(constants=constants, product=product, square=square, chunks=chunks, flat=flat, fits=fits, search=search)


def measure(arguments):
    """The parts of bench/compare --device tiles."""
    rows = Rows(platform.machine(), time.strftime("%Y-%m-%d"))
    for part, function in PARTS.items():
        if part in arguments.parts:
            rows.part = part
            function(rows)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows.rows, indent=1) + "\n")
    limits = [row["held"] for row in rows.rows if row["held"] is not None]
    print(f"\nlimits: {sum(limits)} of {len(limits)} held")
