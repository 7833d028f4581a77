"""The rows of bench/compare as lines, as a summary, as the tables of docs/performance.md, and as the README's charts
(chart.py)."""

import itertools
import json
import re
from pathlib import Path

import chart

PROJECT = Path(__file__).resolve().parents[1]
RECORD = PROJECT / "bench" / "results" / "cpu.json"
GPU_RECORD = PROJECT / "bench" / "results" / "cuda.json"
AMX_RECORD = PROJECT / "bench" / "results" / "cpu-amx.json"  # of a machine with AMX, and of a shape of its own
ZEN4_RECORD = PROJECT / "bench" / "results" / "cpu-zen4.json"  # there where somebody had such a machine
CPU_RECORDS = {"figures": RECORD, "Zen 4 figures": ZEN4_RECORD, "AMX figures": AMX_RECORD}  # and their blocks
PAGES = (PROJECT / "README.md", PROJECT / "docs" / "performance.md")
BLOCK = {
    name: re.compile(rf"(<!-- {name}:.*? -->\n).*?(<!-- end of {name} -->)", re.S)
    for name in (*CPU_RECORDS, "roofline", "GPU figures")
}
# Headings of the parts of bench/compare.
TITLES = {
    "calls": "Tiny calls",
    "torch": "Beside PyTorch",
    "tf32": "Where TF32 is allowed",
    "short": "Short sequences",
    "sizes": "Other head sizes",
    "decode": "Decoding",
    "few": "Few queries",
    "masks": "Masks given as rules",
    "scaling": "Two threads",
    "beside": "After PyTorch",
    "rules": "Time follows the rule",
    "long": "Long sequences",
    "packed": "Packed sequences",
    "bias": "A bias or a mask of any pairs",
    "build": "Cold build",
}
GPU_ORDER = ("calls", "torch", "tf32", "decode", "few", "masks", "packed", "bias", "long")
LIBRARIES = ("torch", "cuDNN", "FA3", "FA4", "FlexAttention")  # begins of peers' names
PRODUCT = "torch.mm"  # rows of PyTorch's matrix product beside the peak
HEADS, SEQUENCE = 4, 2048  # of the part torch, if options do not choose them
SHAPE = re.compile(r"1x[1-9]\d{0,8}x[1-9]\d{0,8}")  # if they do, of its rows
FULL_UNLESS_CAUSAL = (
    "torch",
    "cuDNN",
    "FA3",
    "FA4",
    "reading memory",
    "one thread",
    "by itself",
    "without pages",
)  # rows beside these peers
HEADER = (
    f"{'what':<59} {'type':<9}{'d':>4} {'mask':<7}{'sequence':>9}{'threads':>8} {'figure':>9} "
    f"{'unit':<14}{'spread':>7}  {'peer, figure, spread, ratio':<44}limit"
)


def shape(row):
    """The columns that say what a row is about; empty where they have no meaning."""
    named = re.search(r"\ba (tree|mask)\b", row["what"])  # a mask of its own
    mask = "causal" if row["causal"] else "full" if row["peer"].startswith(FULL_UNLESS_CAUSAL) and not named else ""
    return (row["type"], str(row["d"] or ""), mask, str(row["sequence"] or ""), str(row["threads"] or ""))


def percent(number):
    return "" if number is None else f"{100 * number:.0f} %"


def limit(row):
    least, most = row["least_ratio"], row["most"]
    text = f"at least {least:.3g} x" if least else f"at most {most:g}" if most else ""
    return text + (", MISSED" if not row["held"] else "")


def line(row):
    type_, d, mask, sequence, threads = shape(row)
    peer = ""
    if row["peer"]:
        peer = f"{row['peer']:<18}{row['peer_figure']:8.2f} {percent(row['peer_spread']):>6} {row['ratio']:6.2f} x"
    return (
        f"{row['what']:<59} {type_:<9}{d:>4} {mask:<7}{sequence:>9}{threads:>8} {row['figure']:9.2f} "
        f"{row['unit']:<14}"
        f"{percent(row['spread']):>7}  {peer:<44}{limit(row)}"
    ).rstrip()


def name(row):
    threads = f"{row['threads']} thread{'s' * (row['threads'] > 1)}" if row["threads"] else ""
    return " ".join(part for part in (row["what"], *shape(row)[:4]) if part) + f", {threads}" * bool(threads)


def worst(rows):
    beside = [row for row in rows if row["peer"].startswith(LIBRARIES)]
    return min(beside, key=lambda row: row["ratio"], default=None)


def limits_held(rows):
    limits = [row["held"] for row in rows if row["least_ratio"] or row["most"]]
    return f"{sum(limits)} of {len(limits)} held"


def summary(rows):
    lines = ["", f"limits: {limits_held(rows)}"]
    lines += [f"  missed: {name(row)}" for row in rows if not row["held"]]
    if found := worst(rows):
        lines.append(f"worst ratio: {found['ratio']:.2f} x {found['peer']}, {name(found)}")
    return "\n".join(lines)


def of_readme(rows):
    """The rows that the README compares over generations: float32 beside PyTorch, head sizes 64 and 128, on the fewest
    threads of the record."""
    found = [
        row
        for row in rows
        if row["least_ratio"]
        and row["peer"].startswith("torch")
        and row["type"] == "float32"
        and row["what"] in ("forward", "backward")
        and row["d"] in (64, 128)
        and (row["sequence"] == SEQUENCE or row.get("shape"))
    ]
    fewest = min((row["threads"] for row in found), default=0)
    return [row for row in found if row["threads"] == fewest]


def short(rows):
    """Those of a record without a shape of its own: one thread, 1x4x2048."""
    return [row for row in of_readme(rows) if row["threads"] == 1 and not row.get("shape")]


def in_order(rows):
    """By the order of their parts, which may have been measured one by one."""
    order = GPU_ORDER if on_gpu(rows) else tuple(TITLES)
    return sorted(rows, key=lambda row: order.index(row["part"]))


def of_own_shape(rows):
    """Whether options chose the heads and the tokens."""
    return bool(rows) and any(row.get("shape") for row in rows)


def shape_of(heads, sequence):
    return f"1x{heads}x{sequence}"


def on_gpu(rows):
    return bool(rows) and rows[0]["device"] == "cuda"


def read(path, to_publish=True):
    """The rows of a record. to_publish: it must have those that the README shows."""
    try:
        rows = json.loads(Path(path).read_text())
        if of_own_shape(rows) and (on_gpu(rows) or not all(SHAPE.fullmatch(row["shape"]) for row in rows)):
            raise ValueError
        if to_publish and not on_gpu(rows) and not of_own_shape(rows) and not short(rows):
            raise SystemExit(
                f"bench/compare: {path}: no rows beside PyTorch in float32 on one thread, which the README shows"
            )
        if to_publish and of_own_shape(rows) and not all(row.get("amx") is True for row in rows):
            raise SystemExit(
                f"bench/compare: {path}: rows with --heads or --sequence, which the documents show of a "
                "CPU with AMX alone"
            )
        blocks(rows) if to_publish else performance_block(rows)
        return rows
    except OSError as error:
        raise SystemExit(f"bench/compare: {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise SystemExit(f"bench/compare: {path}: not a file that bench/compare --json wrote") from None


def measured(rows):
    """Where and when: parts may be of several days."""
    return f"{rows[0]['machine']}, {' and '.join(sorted({row['date'] for row in rows}))}"


def table(rows, columns):
    """columns: {heading: cell of a row}."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows])


def figure(key, spread):
    return lambda row: (
        ""
        if row[key] is None
        else (
            f"{row[key]:.{'0f' if row[key] >= 1000 else '3g'}} {row['unit']}"
            + (f" ({percent(row[spread])})" if row[spread] else "")
        )
    )


def share(row):
    """Of the peak of multiply-adds in the row's type on as many threads; on a GPU of a large matrix product's rate."""
    most = row.get("peak") or row.get("product")
    return percent(row["figure"] / most) if most else ""


def peer_names(row):
    """The row's peer, and in brackets all others with their figures."""
    others = {name: rate for name, rate in row.get("peers", {}).items() if name != row["peer"]}
    return row["peer"] + (f" ({', '.join(f'{name} {rate:.0f}' for name, rate in others.items())})" if others else "")


def generation(rows):
    return rows[0].get("generation", "unknown generation")


def peaks(rows):
    """The machine's peaks in words, on the fewest threads that the rows have them of."""
    known = [row for row in rows if row.get("peak")]
    if not known:
        return "peak not recorded"
    threads = min(row["threads"] for row in known)
    figures = {row["type"]: row["peak"] for row in known if row["threads"] == threads}
    return (
        f"peak on {threads} thread{'s' * (threads > 1)}: "
        + ", ".join(f"{type_} {peak:.0f}" for type_, peak in sorted(figures.items()))
        + " GFLOP/s"
    )


def performance_block(rows):
    """A table for each part; one for all rows of a record that tells no parts apart."""
    keys = ("type", "d", "mask", "sequence", "threads")
    columns = {
        "what": lambda row: row["what"].replace("|", "\\|"),
        **{key: lambda row, i=i: shape(row)[i] for i, key in enumerate(keys) if key != "threads" or not on_gpu(rows)},
        "figure (spread)": figure("figure", "spread"),
        ("of a product" if on_gpu(rows) else "of the peak"): share,
        "peer": peer_names,
        "its figure (spread)": figure("peer_figure", "peer_spread"),
        "ratio": lambda row: f"{row['ratio']:.2f}" if row["ratio"] else "",
        "limit": limit,
    }
    text = f"{measured(rows)}." if on_gpu(rows) else f"{measured(rows)}. {generation(rows)}, {peaks(rows)}."
    for part, group in itertools.groupby(rows, lambda row: row.get("part")):
        title = f"{TITLES[part]}, on a GPU" if on_gpu(rows) else TITLES.get(part)
        group = list(group)
        if of_own_shape(rows):
            title += f", {' and '.join(sorted({row['shape'] for row in group}))}"
        text += (f"\n\n### {title}" if part else "") + f"\n\n{table(group, columns)}"
    return f"{text}\n\n```text{summary(rows)}\n```"


def name_of(rows):
    """Of the block that shows a record."""
    if on_gpu(rows):
        return "GPU figures"
    return "AMX figures" if of_own_shape(rows) else "Zen 4 figures" if generation(rows) == "Zen 4" else "figures"


def of_readme_chart(rows, records=None):
    """(picture's name, picture, words below it) of a record. records: {name: rows} of the other CPUs', all that there are
    if not given: the chart of CPUs has a dot for each."""
    if on_gpu(rows):
        return ("speed-gpu.svg", *chart.gpu(rows))
    if records is None:
        records = {name: json.loads(path.read_text()) for name, path in CPU_RECORDS.items() if path.exists()}
    records = records | {name_of(rows): rows}
    return ("speed-cpu.svg", *chart.cpu(list(records.values())))


def blocks(rows, records=None):
    """[(page's number, block's name, text)] of a record; records as in of_readme_chart."""
    name, _, words = of_readme_chart(rows, records)
    device = "GPU" if on_gpu(rows) else "CPU"
    readme = f"![Speed on {device}s beside the best peer that was measured](docs/pictures/{name})\n\n{words}"
    return [(0, "GPU figures" if on_gpu(rows) else "figures", readme), (1, name_of(rows), performance_block(rows))]


def write_block(path, name, block):
    """Puts `block` between a page's marks of that name."""
    path.write_text(BLOCK[name].sub(lambda found: found[1] + block + "\n" + found[2], path.read_text(), count=1))


def publish(rows, pages=PAGES):
    for number, name, block in blocks(rows):
        write_block(pages[number], name, block)
    name, picture, _ = of_readme_chart(rows)
    folder = pages[1].parent / "pictures"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(picture)
