"""The rows of bench/compare --device tiles as the tables of docs/tile-machine.md."""

import json
import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PAGE = PROJECT / "docs" / "tile-machine.md"
RECORD = PROJECT / "bench" / "results" / "tiles.json"
BLOCK = {
    name: re.compile(rf"(<!-- {name}:.*? -->\n).*?(<!-- end of {name} -->)", re.S)
    for name in ("validation", "planner figures")
}
TITLES = {
    "constants": "Closed forms of the constants",
    "product": "A product on every tile of a Bow",
    "square": "Square products on an IPU Mk2",
    "chunks": "Tenstorrent's chunks",
    "flat": "FlatAttention",
    "fits": "Mappings of the planner, 4 heads",
    "search": "Beside the best of all mappings, on small machines",
}
VALIDATION, PLANNER = ("constants", "product", "square", "chunks", "flat"), ("fits", "search")


def is_record(path):
    try:
        rows = json.loads(Path(path).read_text())
        return isinstance(rows, list) and bool(rows) and rows[0]["device"] == "tiles"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def number(value):
    return "" if value is None else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def limit(row):
    if row["held"] is None:
        return ""
    if row["points"] is not None:
        words = f"within {row['points']:g} points"
    elif row["within"] is not None:
        words = f"within {100 * row['within']:g} %"
    else:
        words = f"at least {row['least']:g}" if row["least"] is not None else f"at most {row['most']:g}"
    return words if row["held"] else words + ", **missed**"


def table(rows, columns):
    """columns: {heading: cell of a row}."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows])


def beside_published(rows):
    return table(
        rows,
        {
            "what": lambda row: row["what"],
            "the model": lambda row: f"{number(row['figure'])} {row['unit']}".strip(),
            "published": lambda row: number(row["peer_figure"]),
            "limit": limit,
            "source": lambda row: row["source"],
        },
    )


def planner_table(rows):
    return table(
        rows,
        {
            "call": lambda row: row["what"],
            "runs without chunks": lambda row: "yes" if row.get("unchunked") else "no" if "unchunked" in row else "",
            "chunks of q, kv": lambda row: " x ".join(map(str, row.get("chunks", []))),
            "tiles a head": lambda row: " x ".join(map(str, row.get("grid", []))),
            "memory a tile": lambda row: f"{row['peak_bytes'] / 1024:.0f} KiB" if "peak_bytes" in row else "",
            "compute / exchange / sync": lambda row: (
                " / ".join(f"{100 * row[part]:.0f}" for part in ("compute", "exchange", "sync")) + " %"
                if "compute" in row
                else ""
            ),
            "utilisation": lambda row: f"{row['figure']:.3g} {row['unit']}".strip(),
            "ceiling": lambda row: f"{100 * row['ceiling']:.0f} %" if "ceiling" in row else "",
            "of the ceiling": lambda row: f"{row['figure'] / row['ceiling']:.0f} %" if "ceiling" in row else "",
            "planning": lambda row: f"{row['milliseconds']:.0f} ms" if "milliseconds" in row else "",
            "limit": limit,
        },
    )


def section(part, rows):
    if part == "fits":
        return planner_table(rows)
    if part == "search":
        worst = max(rows, key=lambda row: row["figure"])
        return (
            f"{len(rows)} calls. The planner's cycles over those of the best of all mappings whose chunk counts divide: "
            f"at most {worst['figure']:.3f} ({worst['what']})."
        )
    return beside_published(rows)


def block(rows, parts):
    text = f"{rows[0]['date']}."
    for part in parts:
        of_part = [row for row in rows if row["part"] == part]
        if of_part:
            text += f"\n\n### {TITLES[part]}\n\n{section(part, of_part)}"
    limits = [row["held"] for row in rows if row["part"] in parts and row["held"] is not None]
    return text + f"\n\nLimits: {sum(limits)} of {len(limits)} held."


def blocks(rows):
    return {"validation": block(rows, VALIDATION), "planner figures": block(rows, PLANNER)}


def publish(path, page=PAGE):
    text = page.read_text()
    for name, words in blocks(json.loads(Path(path).read_text())).items():
        text = BLOCK[name].sub(lambda found: found[1] + words + "\n" + found[2], text, count=1)
    page.write_text(text)
