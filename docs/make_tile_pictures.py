"""The pictures of docs/tile-machine.md: reports of one call on the tile machine.

python docs/make_tile_pictures.py            writes docs/pictures/tiles-*.svg
python docs/make_tile_pictures.py --check    only says whether they are up to date (exit code 1 if not)

Needs anyflash. The pictures are predictions, so they do not depend on the machine that makes them.
"""

import argparse
import sys
from pathlib import Path

import anyflash as af
from anyflash import tile_machine as tm

PICTURES = Path(__file__).resolve().parent / "pictures"
SHAPE = (1, 16, 8192, 128)  # batch, heads, sequence, channels


def pictures():
    """{file: SVG}."""
    report = tm.predict(SHAPE, rule=af.causal(), trace=True)
    return {f"tiles-{kind}.svg": report.svg(kind) for kind in ("memory", "phases", "transfers", "live")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the pictures are up to date")
    check = parser.parse_args().check
    stale = []
    for name, svg in pictures().items():
        path = PICTURES / name
        if check and (not path.exists() or path.read_text() != svg):
            stale.append(name)
        elif not check:
            path.write_text(svg)
    if stale:
        sys.exit(f"docs/pictures: {', '.join(stale)} is not what docs/make_tile_pictures.py writes")


if __name__ == "__main__":
    main()
