"""The pictures of learn/README.md, computed from the same formulas as the rungs.

learn/pictures/make_pictures.py            writes them
learn/pictures/make_pictures.py --check    fails where one would change
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
COLOURS = ("#bee3f8", "#c6f6d5", "#fefcbf", "#fed7d7", "#e9d8fd", "#feebc8", "#b2f5ea", "#fbb6ce")
CELL = 24


class Picture:
    def __init__(self, width, height):
        self.width, self.height, self.parts = width, height, []

    def text(self, x, y, what, size=11, anchor="middle"):
        self.parts.append(f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}">{what}</text>')

    def cell(self, x, y, what, colour, width=CELL, height=CELL, size=10):
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}" stroke="#718096" stroke-width="0.5"/>'
        )
        if what != "":
            self.text(x + width / 2, y + height / 2 + 4, what, size)

    def svg(self):
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}"'
        back = f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>'
        return f'{head} font-family="sans-serif">{back}{"".join(self.parts)}</svg>\n'


def fragments():
    """Which lane has which number of mma's operands and result. One colour for each register."""
    picture = Picture(890, 470)

    def matrix(x, y, title, rows, columns, lane_and_register):
        picture.text(x + columns * CELL / 2, y - 8, title, 12)
        for row in range(rows):
            for column in range(columns):
                lane, register = lane_and_register(row, column)
                picture.cell(x + column * CELL, y + row * CELL, lane, COLOURS[register])

    matrix(10, 60, "A, 16 x 16: a[0] to a[3]", 16, 16, lambda r, k: (r % 8 * 4 + k % 8 // 2, r // 8 + k // 8 * 2))
    matrix(430, 60, "B, 16 x 8: b0, b1", 16, 8, lambda k, n: (n * 4 + k % 8 // 2, k // 8))
    matrix(660, 60, "C, 16 x 8: c[0], c[1]; c[2], c[3]", 16, 8, lambda r, n: (r % 8 * 4 + n // 2, r // 8))
    picture.text(10, 24, "mma.sync m16n8k16: the number in a cell is the lane that has it", 14, "start")
    names = ("a[0], b0, c[0..1]", "a[1], b1, c[2..3]", "a[2]", "a[3]")
    for n, name in enumerate(names):
        picture.cell(10 + 170 * n, 446, "", COLOURS[n], 14, 14)
        picture.text(30 + 170 * n, 458, name, 11, "start")
    return picture


def swizzle():
    """Eight rows of 128 bytes: where the 16 bytes number c lie, without a swizzle and with it."""
    picture = Picture(620, 310)
    for x, title, place in (
        (40, "plain: a column is one bank group", lambda r, c: c),
        (340, "swizzled: c ^ r", lambda r, c: c ^ r),
    ):
        picture.text(x + 4 * 28, 50, title, 12)
        for row in range(8):
            if x == 40:
                picture.text(24, 76 + row * 28, f"row {row}", 9)
            for column in range(8):
                at = place(row, column)
                picture.cell(x + at * 28, 58 + row * 28, column, COLOURS[column], 28, 28, 12)
        for group in range(8):
            picture.text(x + group * 28 + 14, 298, f"{group}", 10)
    picture.text(
        10,
        24,
        "Which 16 bytes of a row lie in which group of banks (0 to 7, below). A matrix is one colour.",
        13,
        "start",
    )
    return picture


def lanes_of_time(picture, rows, y, names):
    """rows: for each name a list of (begin, end, text, colour)."""
    for n, name in enumerate(names):
        picture.text(8, y + 34 * n + 17, name, 11, "start")
        for begin, end, what, colour in rows[n]:
            picture.cell(130 + begin, y + 34 * n, what, colour, end - begin, 26, 10)


def pipeline():
    """A producer, two buffers and consumers; and the phases of the barriers."""
    picture = Picture(760, 250)
    picture.text(
        10,
        24,
        "Two buffers. A phase of `full` ends when the bytes are there, one of `empty` when all warps have read.",
        13,
        "start",
    )
    copy, use, wait = COLOURS[0], COLOURS[1], "#edf2f7"
    producer, consumers, full, empty = [], [], ([], []), ([], [])
    arrived, free, ready = 0, [0, 0], 0
    for n in range(5):
        begin = max(arrived, free[n % 2])
        if begin > arrived:
            producer.append((arrived, begin, "wait", wait))
        arrived = begin + 60
        producer.append((begin, arrived, f"load {n}", copy))
        start = max(arrived, ready)
        if start > ready:
            consumers.append((ready, start, "wait", wait))
        ready = start + 100
        consumers.append((start, ready, f"use {n}", use))
        full[n % 2].append(arrived)
        empty[n % 2].append(ready)
        free[n % 2] = ready
    phases = []
    for ends in (full[0], empty[0]):
        edges = [0, *ends, 600]
        phases.append([(edges[i], edges[i + 1], f"parity {i % 2}", COLOURS[2 + i % 2]) for i in range(len(edges) - 1)])
    lanes_of_time(
        picture, [producer, consumers, *phases], 50, ["producer", "consumers", "phases of full[0]", "of empty[0]"]
    )
    picture.text(
        10,
        215,
        "The producer waits for empty[n % 2] with parity (n / 2) % 2 ^ 1: the first wait for each buffer passes at once.",
        11,
        "start",
    )
    picture.text(10, 233, "Consumers wait for full[n % 2] with parity (n / 2) % 2.", 11, "start")
    return picture


def overlap():
    """Who uses the tensor cores and who the exponentials, in rungs 16 and 18."""
    picture = Picture(760, 260)
    products, softmax, wait = COLOURS[0], COLOURS[5], "#edf2f7"
    picture.text(
        10,
        24,
        "Rung 16: both warpgroups do the same at the same time. The tensor cores rest during the softmax.",
        13,
        "start",
    )
    together = []
    for n in range(3):
        together += [
            (200 * n, 200 * n + 100, f"products {n}", products),
            (200 * n + 100, 200 * n + 200, f"softmax {n}", softmax),
        ]
    lanes_of_time(picture, [together, together], 38, ["warpgroup 0", "warpgroup 1"])
    picture.text(10, 150, "Rung 18: they take turns. One's products run beside the other's softmax.", 13, "start")
    second = [(0, 100, "wait", wait), *((b + 100, e + 100, what, colour) for b, e, what, colour in together[:-1])]
    lanes_of_time(picture, [together, second], 164, ["warpgroup 0", "warpgroup 1"])
    return picture


PICTURES = {"fragments": fragments, "swizzle": swizzle, "pipeline": pipeline, "overlap": overlap}


def main():
    changed = []
    for name, make in PICTURES.items():
        path, text = FOLDER / f"{name}.svg", make().svg()
        if not path.exists() or path.read_text() != text:
            changed.append(path.name)
        if "--check" not in sys.argv:
            path.write_text(text)
    if "--check" in sys.argv and changed:
        raise SystemExit(f"not today's: {', '.join(changed)}; learn/pictures/make_pictures.py makes them")


if __name__ == "__main__":
    main()
