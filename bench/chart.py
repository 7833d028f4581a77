"""The two charts of README.md, drawn from the rows of bench/compare, and the words below them. `bench/compare --publish`
writes them. A dot is a row: its ratio to its peer, on a logarithmic axis. Rows that lose are drawn as all others."""

import math
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, STEP = 860, 210, 650, 24  # pixels: the plot from LEFT to RIGHT, STEP for each line
TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 8, 12, 20)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#8c564b")
TYPES = ("float32", "bfloat16", "float16", "float64")
DIRECTIONS = ("forward", "backward")
FASTEST = "backward, beside its fastest path"  # a row beside the better one of two paths of the peer


def cpu_lines(records):
    """[(label, [(ratio, generation)])]: rows beside PyTorch on the fewest threads of each record."""
    lines = []
    for type_ in TYPES:
        for direction in DIRECTIONS:
            dots = []
            for rows in records:
                found = [row for row in rows if of_torch(row) and row["type"] == type_]
                fewest = min((row["threads"] for row in found), default=0)
                found = [row for row in found if row["threads"] == fewest]
                better = [row for row in found if row["what"] == FASTEST] if direction == "backward" else []
                cases = [(row["d"], row["causal"]) for row in better]
                found = [r for r in found if r["what"] == direction and (r["d"], r["causal"]) not in cases] + better
                dots += [(row["ratio"], row.get("generation", "unknown generation")) for row in found]
            lines.append((f"{type_}, {direction}", dots))
    return [line for line in lines if line[1]]


def of_torch(row):
    return (
        row["what"] in (*DIRECTIONS, FASTEST)
        and row["peer"].startswith("torch")
        and row["d"] in (64, 128)
        and row.get("part", "torch") == "torch"
        and bool(row["least_ratio"])
    )


def peer_of(row):
    """The name of its colour. Rows with `peers` are beside the fastest of several."""
    return row["peer"].removeprefix("torch ") if row["peer"] == "torch cuDNN" else row["peer"]


def gpu_lines(rows):
    """[(label, [(ratio, peer)])]: every row that has another library as its peer."""

    def line(label, part, **wanted):
        direction = wanted.pop("direction", None)
        found = [
            (row["ratio"], peer_of(row))
            for row in rows
            if row["part"] == part
            and row["ratio"]
            and not row["peer"].startswith(("without", "the same"))  # anyflash itself
            and (direction is None or row["what"].split(",")[0] == direction)
            and all(row[key] == value for key, value in wanted.items())
        ]
        return (label, found)

    both = DIRECTIONS
    lines = [
        line(f"dense d{d}, {direction}", "torch", type="bfloat16", d=d, direction=direction)
        for direction in both
        for d in sorted({row["d"] for row in rows if row["part"] == "torch" and row["type"] == "bfloat16"})
    ]
    for name, part in (("mask rules", "masks"), ("packed documents", "packed"), ("bias or any mask", "bias")):
        lines += [line(f"{name}, {direction}", part, direction=direction) for direction in both]
    lines += [line("decoding", "decode"), line("4, 16 or 64 queries", "few"), line("a million tokens", "long")]
    for type_ in ("float16", "float32", "float64"):
        lines += [line(f"{type_}, {direction}", "torch", type=type_, direction=direction) for direction in both]
    lines += [line(f"TF32, {direction}", "tf32", direction=direction) for direction in both]
    return [one for one in lines if one[1]]


def drawn(title, lines):
    """The chart as SVG."""
    keys = list(dict.fromkeys(key for _, dots in lines for _, key in dots))
    colour = {key: COLOURS[n % len(COLOURS)] for n, key in enumerate(keys)}
    legend, across, down = [], 12.0, 40
    for key in keys:
        if across + 20 + 6.4 * len(key) > WIDTH:
            across, down = 12.0, down + 20
        legend.append((across, down, key))
        across += 30 + 6.4 * len(key)
    top = down + 36
    ratios = [ratio for _, dots in lines for ratio, _ in dots]
    least, most = min(*ratios, 0.7) / 1.08, max(*ratios, 1.5) * 1.08
    place = lambda ratio: LEFT + (RIGHT - LEFT) * math.log(ratio / least) / math.log(most / least)
    bottom = top + STEP * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 30}" width="{WIDTH}" '
        f'height="{bottom + 30}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" fill="#222">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{bottom + 30}" fill="white"/>',
    ]

    def text(x, y, words, anchor="start", size=12.5, style=""):
        parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" {style}>{escape(words)}</text>'
        )

    def dot(x, y, key):
        look = f'fill="{colour[key]}" fill-opacity="0.8" stroke="white" stroke-width="0.7"'
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {look}/>')

    text(12, 20, title, size=14.5, style='font-weight="bold"')
    for x, y, key in legend:
        dot(x + 5, y, key)
        text(x + 14, y + 4, key, size=12)
    text(place(1) - 10, top - 10, "\u2190 peer faster", "end", 11.5)
    text(place(1) + 10, top - 10, "anyflash faster \u2192", size=11.5)
    for tick in TICKS:
        if least < tick < most:
            style = 'stroke="#333" stroke-width="1.6"' if tick == 1 else 'stroke="#ddd"'
            x = place(tick)
            parts.append(f'<line x1="{x:.1f}" y1="{top - 4}" x2="{x:.1f}" y2="{bottom}" {style}/>')
            text(x, bottom + 16, f"{tick:g} x", "middle", 11.5)
    for n, (label, dots) in enumerate(lines):
        y = top + STEP * n + STEP / 2
        shares = sorted(ratio for ratio, _ in dots)
        text(LEFT - 12, y + 4, label, "end")
        parts.append(
            f'<line x1="{place(shares[0]):.1f}" y1="{y}" x2="{place(shares[-1]):.1f}" y2="{y}" '
            'stroke="#bbb" stroke-width="5" stroke-linecap="round"/>'
        )
        for ratio, key in dots:
            dot(place(ratio), y, key)
        one = f"{shares[0]:.2f}" == f"{shares[-1]:.2f}"
        text(RIGHT + 14, y + 4, f"{shares[0]:.2f}" + ("" if one else f" to {shares[-1]:.2f}"), size=12)
        text(RIGHT + 110, y + 4, f"{len(dots)} row" + "s" * (len(dots) > 1), size=12, style='fill-opacity="0.65"')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def cpu(records):
    """(picture, words) of the records of CPUs, a list of lists of rows."""
    lines = cpu_lines(records)
    machines = []
    for rows in records:
        found = [row for row in rows if of_torch(row)]
        if not found:
            continue
        threads = min(row["threads"] for row in found)
        machines.append(
            f"- {found[0].get('generation', 'unknown generation')}: {found[0]['machine']}; measured on {threads} "
            f"thread{'s' * (threads > 1)}, {found[0].get('shape', '1x4x2048')} (batch x heads x tokens), beside "
            f"{found[0]['peer'].removesuffix(' math')}, {' and '.join(sorted({row['date'] for row in found}))}"
        )
    words = (
        "A dot is one case: head size 64 or 128, full or causal. To the right of 1 x anyflash is faster.\n"
        "Other generations of CPUs are not in the record.\n\n" + "\n".join(machines)
    )
    return drawn("CPU: speed of anyflash as a multiple of PyTorch's", lines), words


def gpu(rows):
    """(picture, words) of the record of a GPU."""
    lines = gpu_lines(rows)
    words = (
        f"{rows[0]['machine']}, {' and '.join(sorted({row['date'] for row in rows}))}. bfloat16 unless another type is "
        "named.\nA dot is one row of [docs/performance.md](docs/performance.md). Left of 1 x the peer is faster."
    )
    dense = [row for row in rows if row["part"] == "torch" and row["type"] == "bfloat16"]
    together = list(dict.fromkeys(peer for row in dense for peer in row.get("peers", {})))
    if together:
        words += f"\nThe peer of a dense row is the fastest of {', '.join(together)} in the same run."
    if missing := [name for name in ("FA3", "FA4") if name not in together]:
        words += f" **Not in the run: {' and '.join(missing)}**, which are faster than PyTorch's own kernels on Hopper."
    return drawn("GPU: speed of anyflash as a multiple of its peer's", lines), words
