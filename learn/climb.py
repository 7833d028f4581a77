"""Checks and times the rungs that learn/climb has built."""

import argparse
import itertools
import json
import os
import re
import sys
import time

import ladder
from ladder import Attention, Case, Matmul, Softmax, pointer, random, unwritten

RESULTS = ladder.FOLDER / "results"
PAGE = ladder.FOLDER / "README.md"
MODULES = ladder.FOLDER.parent / "build-learn" / "learn"
SIZE = 1024  # rows, columns and depth of matrices; tokens
HEADS = 4
# What each axis is timed with: a title, the unit and the calls, {name: a rung's arguments and the work in them}.
TITLES = {
    "matmul": f"Matrix product, {SIZE} x {SIZE} x {SIZE}, one thread",
    "softmax": f"Softmax of {SIZE} rows of {SIZE}, one thread",
    "attention": f"Attention, {HEADS} heads of {SIZE} tokens",
    "masks": "Masks: useful operations alone count",
    "backward": f"Backward, {HEADS} heads of {SIZE} tokens",
}
UNITS = {"softmax": "G numbers/s"}
MASKS = {"words": (dict(window=256), 4096), "boxes": (dict(width=64, window=8), 4096)}  # the case and its tokens


def calls(rung):
    """{what: (arguments, operations)} of a rung, timed one by one."""
    if rung.axis == "matmul":
        a, b, c = random(SIZE, SIZE), random(SIZE, SIZE), unwritten((SIZE, SIZE))
        return {"": (Matmul(SIZE, SIZE, SIZE, pointer(a), pointer(b), pointer(c)), 2 * SIZE**3, (a, b, c))}
    if rung.axis == "softmax":
        x, y = random(SIZE, SIZE), unwritten((SIZE, SIZE))
        return {"": (Softmax(SIZE, SIZE, pointer(x), pointer(y)), SIZE * SIZE, (x, y))}
    if rung.axis == "masks":
        options, tokens = next(case for name, case in MASKS.items() if name in rung.name)
        cases = {", ".join(f"{key} {value}" for key, value in options.items()): (tokens, 64, options)}
    else:
        backward = rung.axis == "backward"
        cases = {
            f"d{d} {'causal' if causal else 'full'}": (SIZE, d, dict(causal=causal, backward=backward))
            for d in (64, 128)
            for causal in (False, True)
        }
    made = {}
    for name, (tokens, d, options) in cases.items():
        case = Case(tokens, tokens, d, HEADS, **options)
        made[name] = (case.arguments(), case.operations(), case)
    return made


def threads_of(rung):
    return os.cpu_count() if "threads" in rung.name else 1


def climb(rungs, library, rounds=15):
    """A row for each rung and call, printed as they come."""
    rows, before = [], {}
    for number, rung in enumerate(rungs, 1):
        progress = f"[{number}/{len(rungs)}]"
        if reason := rung.load(MODULES).wrong():
            raise SystemExit(f"learn/climb: {rung.name} is wrong: {reason}")
        for what, (arguments, work, _) in calls(rung).items():
            ladder.set_threads(threads_of(rung))
            with_library = [library] * isinstance(arguments, Attention)
            rate, *of_library = (work / x / 1e9 for x in ladder.medians([rung, *with_library], arguments, rounds))
            row = dict(rung=rung.name, axis=rung.axis, call=what, rate=rate, threads=threads_of(rung))
            if of_library:
                row["library"] = of_library[0]
            key = (rung.axis, what)
            row["before"] = rate / before[key] if key in before else None
            if "peak" not in rung.name:
                before[key] = rate
            rows.append(row)
            beside = f", {100 * rate / row['library']:.0f} % of the library" if "library" in row else ""
            times = f", {row['before']:.2f} x the rung before" if row["before"] else ""
            print(
                f"{progress} {' '.join(filter(None, (rung.name, what)))}: right, {rate:.3g} {UNITS.get(rung.axis, 'GFLOP/s')}{times}{beside}",
                flush=True,
            )
    return rows


def table(rows, rungs, peak):
    """The table of one axis: a line for each rung."""
    with_library = "library" in rows[0]
    what = list(dict.fromkeys(row["call"] for row in rows))
    several = [name for name in what if name]
    unit = UNITS.get(rows[0]["axis"], "GFLOP/s")
    heads = ["rung", "what changed", *([f"{name}, {unit}" for name in several] or [unit]), "times the rung before"]
    heads += ["of the library"] * with_library + ["of the peak"] * (rows[0]["axis"] != "softmax")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, of_rung in itertools.groupby(rows, lambda row: row["rung"]):
        by_call, rung = {row["call"]: row for row in of_rung}, next(r for r in rungs if r.name == name)
        ordered = [by_call.get(call) for call in what]
        cells = [f"[{name}](cpu/{rung.path.name})", rung.changed.rstrip(".").split(": ")[0]]
        cells += [f"{row['rate']:.3g}" if row else "" for row in ordered]
        some = [row for row in ordered if row]
        cells.append(span([row["before"] for row in some if row["before"]], "{:.2f}"))
        if with_library:
            cells.append(span([100 * row["rate"] / row["library"] for row in some], "{:.0f}", " %"))
        if rows[0]["axis"] != "softmax":
            cells.append(span([100 * row["rate"] / peak / row["threads"] for row in some], "{:.0f}", " %"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure(x):
    """Three digits, or all before the point."""
    return f"{x:.0f}" if x >= 1000 else f"{x:.3g}"


def span(numbers, form, unit=""):
    if not numbers:
        return ""
    low, high = form.format(min(numbers)), form.format(max(numbers))
    return (low if low == high else f"{low} to {high}") + unit


def tables(record, rungs):
    text = f"{record['machine']}, {record['date']}; peak of one thread {record['peak']:.0f} GFLOP/s.\n"
    for axis, title in TITLES.items():
        if rows := [row for row in record["rows"] if row["axis"] == axis]:
            text += f"\n### {title}\n\n{table(rows, rungs, record['peak'])}\n"
    return text


def plot(record):
    """Bars of the attention and backward rungs at d64 full, one thread or all, as learn/results/cpu.svg."""
    axes = ("matmul", "attention", "backward")
    shown = [row for row in record["rows"] if row["call"] in ("d64 full", "") and row["axis"] in axes]
    bars = [(row["rung"], row["rate"], row["axis"]) for row in shown]
    text = f"GFLOP/s, float32, 64 channels, full; {record['machine']}, {record['date']}"
    draw_bars(bars, text, RESULTS / "cpu.svg")


def draw_bars(bars, text, path):
    """bars: (rung, rate, axis)."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "anyflash"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.28 * len(bars) + 1), layout="constrained")
    colours = {"matmul": "#888888", "attention": "#2b6cb0", "backward": "#c05621"}
    axes.barh([x[0] for x in bars], [x[1] for x in bars], color=[colours.get(x[2], "#2f855a") for x in bars])
    for n, bar in enumerate(bars):
        axes.text(bar[1], n, f" {bar[1]:.3g}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(text)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def write(record, rungs):
    """The tables and the plot of learn/README.md, and the figure in each rung."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "cpu.json").write_text(json.dumps(record, indent=1) + "\n")
    pattern = re.compile(r"(<!-- cpu: written by learn/climb --write -->\n).*?(<!-- end of cpu -->)", re.S)
    PAGE.write_text(pattern.sub(lambda found: found[1] + tables(record, rungs) + found[2], PAGE.read_text()))
    plot(record)
    for rung in rungs:
        rows = [row for row in record["rows"] if row["rung"] == rung.name]
        if rows:
            figures = "; ".join(f"{row['call']} {row['rate']:.3g}".strip() for row in rows)
            line = f"// Measured ({record['machine']}): {figures} {UNITS.get(rung.axis, 'GFLOP/s')}."
            rung.path.write_text(re.sub(r"// Measured.*", lambda found: line, rung.path.read_text(), count=1))


def arguments():
    parser = argparse.ArgumentParser("learn/climb", description="Checks and times the rungs of learn/.")
    parser.add_argument("rungs", nargs="*", metavar="RUNG", help="part of a rung's name (default: all)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--write", action="store_true", help="write tables and plots into learn/; of all rungs alone")
    parser.add_argument("--only-parse", action="store_true", help=argparse.SUPPRESS)
    found = parser.parse_args()
    if found.write and found.rungs:
        parser.error("--write: only with all rungs")
    return found


def choose(every, parts):
    """The rungs to time: those with one of the parts in their name, or all. The library is timed beside each."""
    own = [rung for rung in every if rung.axis != "library"]
    chosen = [rung for rung in own if not parts or any(x in rung.name for x in parts)]
    if unknown := [x for x in parts if not any(x in rung.name for rung in own)]:
        names = ", ".join(rung.name for rung in own)
        raise SystemExit(f"learn/climb: no rung has {' or '.join(unknown)} in its name; the rungs: {names}")
    return chosen


def main():
    asked, every = arguments(), ladder.rungs()
    chosen = choose(every, asked.rungs)
    if asked.only_parse:
        return
    library = next(rung for rung in every if rung.axis == "library").load(MODULES)
    if reason := library.wrong():
        raise SystemExit(f"learn/climb: {library.name} is wrong: {reason}")
    rows = climb(chosen, library)
    if asked.write:
        sys.path.insert(0, str(ladder.FOLDER.parent / "bench"))
        import measure

        peak = next(row["rate"] for row in rows if "peak" in row["rung"])
        machine = f"{measure.processor()}, {measure.generation()}"
        write(dict(machine=machine, date=time.strftime("%Y-%m-%d"), peak=peak, rows=rows), every)


if __name__ == "__main__":
    sys.exit(main())
