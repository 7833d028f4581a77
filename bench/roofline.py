"""The roofline: what calls reach in GFLOP/s, under what the machine can do at most.

The roof is the lower of two limits: the peak of multiply-adds whose operands stay in registers, and the speed of
reading memory times a call's useful operations for each byte that it must move. Both are measured here, by
bench_kernels. Calls are the rows of a file that bench/compare --json wrote, with PyTorch's beside them, or a few that
are timed here. Writes PREFIX.png and PREFIX.svg.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import measure
import page
from options import Parser, is_program

PICTURE = measure.PROJECT / "docs" / "pictures" / "roofline"
PAGE = measure.PROJECT / "docs" / "performance.md"
KERNELS = measure.PROJECT / "build-bench/bench/bench_kernels"
COLOURS = {"float32": "#1f77b4", "float64": "#2ca02c", "bfloat16": "#d62728", "float16": "#ff7f0e"}
MARKERS = {"forward": "^", "backward": "v", "decode": "o"}


def parse_arguments():
    parser = Parser("roofline", description=__doc__, epilog="example: bench/roofline --json bench/results/cpu.json")
    parser.add_argument("--json", metavar="FILE", type=Path, help="rows of bench/compare (default: a few timed here)")
    parser.add_argument(
        "--output",
        metavar="PREFIX",
        type=Path,
        default=PICTURE,
        help="default: docs/pictures/roofline, which docs/performance.md then shows",
    )
    parser.add_argument(
        "--kernels",
        metavar="PROGRAM",
        type=Path,
        default=KERNELS,
        help="the C++ benchmark (default: the one that bench/roofline builds)",
    )
    parser.add_argument("--check", action="store_true", help="only check the options")
    arguments = parser.parse_args()
    if arguments.json:
        read(arguments.json)
    if arguments.output.is_dir() or not os.access(arguments.output.parent, os.W_OK):
        parser.error(f"--output: {arguments.output} cannot be written")
    return arguments


def read(path):
    """The rows of a record that can be drawn, which must be of the machine whose limits are drawn with them."""
    here = measure.processor()
    try:
        record = json.loads(path.read_text())
        rows = points(record)
        others = {row.get("machine", here) for row in record} - {here}
    except OSError as error:
        raise SystemExit(f"bench/roofline: --json: {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise SystemExit(f"bench/roofline: --json: {path}: not a file that bench/compare --json wrote") from None
    if others:
        raise SystemExit(f"bench/roofline: --json: {path}: rows of {others.pop()}, this is {here}")
    if not rows:
        raise SystemExit(f"bench/roofline: --json: {path}: no rows with their operations for each byte; measure anew")
    return rows


def points(rows):
    """What is drawn of rows: [{kind, type, threads, intensity, ours, peers}], speeds in GFLOP/s; peers' may be None."""
    found = []
    for row in rows:
        kind = row["what"].split(",")[0].split()[0]
        intensity = row.get("intensity")
        per_unit = {"GFLOP/s": 1, "GB/s": intensity}.get(row["unit"])
        if not intensity or per_unit is None or kind not in MARKERS or row["peer"] in ("reading memory", "one thread"):
            continue
        torch = row["peer"].startswith("torch")
        found.append(
            dict(
                kind=kind,
                type=row["type"],
                threads=row["threads"],
                intensity=intensity,
                ours=row["figure"] * per_unit,
                peers=row["peer_figure"] * per_unit if torch else None,
            )
        )
    return found


def few_rows():
    """Rows of a few calls, on one thread and on all."""
    import timed_case
    from table import Table

    table = Table("cpu")
    for threads in sorted({1, os.cpu_count()}):
        for type_, d in ((type_, d) for type_ in ("float32", "float64") for d in (64, 128)):
            case = timed_case.Case(type=type_, d=d, threads=threads)
            for what in timed_case.DIRECTIONS:
                (seconds,) = measure.interleaved([case.call(what, reuse=True)], 5)
                table.add(
                    what,
                    case.flops(what) / statistics.median(seconds) / 1e9,
                    "GFLOP/s",
                    spread=measure.spread(seconds),
                    **case.columns(what),
                )
        case = timed_case.Case(heads=32, kv_heads=8, queries=(1,), keys=(65536,), d=128, threads=threads)
        (seconds,) = measure.interleaved([case.call("forward")], 5)
        table.add(
            "decode, 32 / 8 heads, K and V read",
            case.kv_bytes() / statistics.median(seconds) / 1e9,
            "GB/s",
            spread=measure.spread(seconds),
            **case.columns("forward"),
        )
    return points(table.rows)


def limits(program, threads):
    """({type of a loop: GFLOP/s}, GB/s) of the machine on so many threads: the best of a few times. Pairs that tiles
    multiply have a peak that is not measured: None."""
    speeds, pairs_by = measure.machine_speeds(program, threads)
    reading = max(speeds.pop("read"))
    peaks = {loop.removeprefix("peak/"): max(times) for loop, times in speeds.items()}
    if pairs_by == "instruction" and "pairs" not in peaks:
        raise SystemExit(f"bench/roofline: {program}: no peak of pairs, which bfloat16 needs; build it anew")
    return peaks | ({"pairs": None} if pairs_by == "tiles" else {}), reading


def roof_of(row, peaks, reading):
    """None if the peak of its type is not measured."""
    peak = measure.peak_of(row["type"], peaks)
    return None if peak is None else min(peak, row["intensity"] * reading)


def above(rows, machine):
    """Marks that lie above their roof, each in a line: then the limits were measured on a slower machine."""
    lines = []
    for row in rows:
        roof = roof_of(row, *machine[row["threads"]])
        for whose, speed in (("", row["ours"]), ("PyTorch's ", row["peers"])):
            if roof is not None and speed is not None and speed > roof:
                threads = f"{row['threads']} thread{'s' * (row['threads'] > 1)}"
                lines.append(f"{whose}{row['kind']} {row['type']}, {threads}: {speed:.1f} of {roof:.1f} GFLOP/s")
    return lines


def in_words(peaks):
    text = ", ".join(f"{name} {peak:.0f}" for name, peak in peaks.items() if peak is not None)
    return f"{text} GFLOP/s" + ", of pairs in tiles not measured" * (None in peaks.values())


def draw_panel(axes, threads, rows, peaks, reading):
    """One number of threads."""
    ends = [min(1, *(row["intensity"] for row in rows)) / 2, max(row["intensity"] for row in rows) * 2]
    for name, peak in ((name, peak) for name, peak in peaks.items() if peak is not None):
        corner = peak / reading
        axes.plot(
            [min(ends[0], corner), corner, max(ends[1], corner)],
            [min(ends[0], corner) * reading, peak, peak],
            color=COLOURS["bfloat16" if name == "pairs" else name],
            linewidth=1,
            zorder=1,
        )
        axes.annotate(
            f"{'bfloat16 pairs' if name == 'pairs' else name}: {peak:.0f} GFLOP/s",
            (corner * 0.9, peak),
            ha="right",
            va="center",
            fontsize=8,
            color="#555",
        )
    axes.annotate(
        f"memory:\n{reading:.0f} GB/s", (ends[0], ends[0] * reading), ha="left", va="top", fontsize=8, color="#555"
    )
    for row in rows:
        style = dict(color=COLOURS[row["type"]], marker=MARKERS[row["kind"]], linestyle="none", markersize=6)
        axes.plot(row["intensity"], row["ours"], **style)
        if row["peers"] is not None:
            axes.plot(row["intensity"], row["peers"], fillstyle="none", alpha=0.6, **style)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="useful operations for each byte that must be moved",
        title=f"{threads} thread{'s' * (threads > 1)}",
    )
    axes.grid(True, which="both", linewidth=0.3, alpha=0.5)


def draw(rows, machine, title, output):
    """machine: {threads: (peaks, reading)}; a panel for each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "anyflash", "svg.fonttype": "none"}  # the same picture is the same file
    figure, panels = plt.subplots(1, len(machine), figsize=(6 * len(machine), 5), sharey=True, squeeze=False)
    for axes, (threads, (peaks, reading)) in zip(panels[0], sorted(machine.items())):
        draw_panel(axes, threads, [row for row in rows if row["threads"] == threads], peaks, reading)
    panels[0][0].set_ylabel("GFLOP/s")
    marks = [
        plt.Line2D([], [], color=colour, marker="s", linestyle="none", label=type_)
        for type_, colour in COLOURS.items()
        if any(row["type"] == type_ for row in rows)
    ]
    marks += [
        plt.Line2D([], [], color="#333", marker=marker, linestyle="none", label=kind)
        for kind, marker in MARKERS.items()
        if any(row["kind"] == kind for row in rows)
    ]
    if any(row["peers"] is not None for row in rows):
        marks.append(plt.Line2D([], [], color="#333", marker="^", fillstyle="none", linestyle="none", label="PyTorch"))
    figure.legend(handles=marks, fontsize=8, loc="lower center", ncols=len(marks))
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(output.with_name(output.name + ".svg"), metadata={"Date": None})
    figure.savefig(output.with_name(output.name + ".png"), dpi=150, metadata={"Software": None})


def block(title, machine):
    """What docs/performance.md shows of the picture: its limits in words."""
    lines = [f"![Roofline](pictures/{PICTURE.name}.svg)", "", f"{title}:", ""]
    for threads, (peaks, reading) in sorted(machine.items()):
        lines.append(f"- {threads} thread{'s' * (threads > 1)}: peak {in_words(peaks)}; memory {reading:.0f} GB/s")
    return "\n".join(lines)


def line(row, peaks, reading):
    """What main prints of a row: without a part of the roof where its peak is not measured."""
    text = f"  {row['kind']:<9}{row['type']:<9}{row['intensity']:9.1f} operations a byte {row['ours']:8.1f}"
    roof = roof_of(row, peaks, reading)
    if roof is None:
        return f"{text} GFLOP/s"
    return f"{text} of {roof:8.1f} GFLOP/s, {100 * row['ours'] / roof:4.0f} %"


def main():
    arguments = parse_arguments()
    if arguments.check:
        return
    if not is_program(arguments.kernels):
        raise SystemExit(f"bench/roofline: --kernels: no program {arguments.kernels}; bench/roofline builds it")
    rows = read(arguments.json) if arguments.json else few_rows()
    machine = {}
    for threads in sorted({row["threads"] for row in rows}):
        machine[threads] = peaks, reading = limits(arguments.kernels, threads)
        print(f"{threads} thread{'s' * (threads > 1)}: {reading:.1f} GB/s read, peak {in_words(peaks)}", flush=True)
        for row in (row for row in rows if row["threads"] == threads):
            print(line(row, peaks, reading), flush=True)
    if found := above(rows, machine):
        raise SystemExit(
            f"bench/roofline: {len(found)} marks above their roof, nothing written; the limits need a "
            f"machine as quiet as the rows had: {found[0]}"
        )
    title = f"{measure.processor()}, {time.strftime('%Y-%m-%d')}"
    draw(rows, machine, title, arguments.output)
    print(f"wrote {arguments.output}.svg and {arguments.output}.png")
    if arguments.output == PICTURE:
        page.write_block(PAGE, "roofline", block(title, machine))


if __name__ == "__main__":
    sys.exit(main())
