"""The pictures of docs/design.md, the house and one call's way through it, and of docs/hopper.md, one tile's way.

python docs/make_diagrams.py            writes house.svg, call.svg and hopper.svg to docs/pictures
python docs/make_diagrams.py --check    only says whether they are up to date (exit code 1 if not)
"""

import argparse
import sys
from pathlib import Path
from xml.sax.saxutils import escape

PICTURES = Path(__file__).resolve().parent / "pictures"
BLUE, GREEN, YELLOW, RED, GREY = "#dbe9f6", "#dcefdc", "#fbf0cf", "#f8dfda", "#eeeeee"


class Picture:
    def __init__(self, width, height, title):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#444"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def text(self, x, y, words, size=13, anchor="middle", style=""):
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="#222" {style}>'
            f"{escape(words)}</text>"
        )

    def box(self, x, y, width, height, colour, name, *lines):
        """A room: its name, and under it what is in it."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" stroke="#666"/>'
        )
        top = y + height / 2 - 8 * len(lines) + 5
        self.text(x + width / 2, top, name, 14, style='font-weight="bold"')
        for n, line in enumerate(lines, 1):
            self.text(x + width / 2, top + 16 * n, line, 11.5)

    def arrow(self, *points, words="", at=None, dashed=False):
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="#444" stroke-width="1.5"{dash} marker-end="url(#tip)"/>'
        )
        if words:
            self.text(*at, words, 11.5, anchor="start")

    def svg(self):
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def house():
    p = Picture(900, 560, "The house: front ends, public headers, problem and rules, plan, backends")
    for n, name in enumerate(("NumPy", "PyTorch", "Transformers", "JAX", "TensorFlow")):
        p.box(20 + 115 * n, 20, 110, 36, BLUE, name)
    p.box(20, 76, 570, 48, BLUE, "python/", "anyflash/: thin front ends; src/: the compiled modules")
    p.box(610, 76, 125, 48, BLUE, "src/c_api", "the C API")
    p.box(755, 76, 125, 48, BLUE, "src/cli", "the program")
    for x in (305, 672, 817):
        p.arrow((x, 124), (x, 149))
    p.box(20, 150, 860, 44, GREY, "include/anyflash", "all that a C++ or C user includes: tensors, rules, calls, plans")
    p.box(
        20, 230, 410, 60, GREEN, "src/problem", "every check of tensors;", "a call becomes plain numbers and pointers"
    )
    p.box(470, 230, 410, 60, GREEN, "src/rules", "a rule becomes a small program:", "mask words, tile classes")
    p.box(20, 320, 860, 50, GREEN, "src/plan", "boxes, runs of visible tiles, the cache of plans; explain")
    p.box(20, 400, 860, 40, GREY, "src/backends.*", "one entry a kind of device")
    p.box(20, 465, 165, 75, YELLOW, "src/cpu", "Highway kernels,", "every instruction set; AMX")
    p.box(193, 465, 135, 75, YELLOW, "src/tile_machine", "a simulated processor", "of many tiles")
    p.box(336, 465, 132, 75, RED, "cuda/common", "streams, memory,", "device masks")
    p.box(476, 465, 132, 75, RED, "cuda/portable", "sm_75 and newer,", "every type")
    p.box(616, 465, 132, 75, RED, "cuda/hopper", "sm_90a:", "TMA, wgmma")
    p.box(756, 465, 124, 75, RED, "cuda/tile", "parts of Hopper", "kernels, as tiles")
    p.arrow((225, 194), (225, 229), words="views", at=(232, 216))
    p.arrow((675, 194), (675, 229), words="rules", at=(682, 216))
    p.arrow((225, 290), (225, 319), words="Problem", at=(232, 309))
    p.arrow((675, 290), (675, 319), words="programs", at=(682, 309))
    p.arrow((450, 370), (450, 399), words="Problem, Plan, workspace", at=(457, 389))
    for x in (102, 260, 542, 682):
        p.arrow((x, 440), (x, 464))
    return p.svg()


def call():
    p = Picture(900, 620, "One call's way, from the front end to the result")
    steps = [
        (
            BLUE,
            "Front end",
            "arrays become tensor views;",
            "options become Options",
            "python/src/arrays.cpp, calls.cpp",
        ),
        (GREEN, "Problem", "all tensors are checked;", "nothing is written before", "src/problem/problem.cpp"),
        (
            GREEN,
            "Rule",
            "checked against the shapes,",
            "compiled to atoms and postfix",
            "src/rules/check.cpp, compile.cpp",
        ),
        (GREEN, "Plan", "given, cached, or made:", "boxes, then runs of tiles", "src/plan/plan.cpp, runs.cpp"),
        (GREY, "Backend", "by the query's device;", "workspace is allocated", "src/attention.cpp, backends.cpp"),
    ]
    for n, (colour, name, *lines, files) in enumerate(steps):
        y = 20 + 124 * n
        p.box(20, y, 290, 84, colour, name, *lines, files)
        if n:
            p.arrow((165, y - 40), (165, y - 1))
    p.box(
        390,
        40,
        490,
        78,
        RED,
        "Which kernel?",
        "few queries: decode. Hopper, and the call is one it serves: Hopper's.",
        "Otherwise: portable. On a CPU: few rows, or blocks of rows.",
    )
    p.arrow((310, 558), (350, 558), (350, 79), (389, 79))
    p.parts.append('<rect x="390" y="160" width="490" height="290" rx="6" fill="none" stroke="#666"/>')
    p.text(
        405, 182, "for each query block, for each run of its key blocks", 13, anchor="start", style='font-weight="bold"'
    )
    rows = [
        ("load K and V", "packed on a CPU; TMA or cp.async on a GPU"),
        ("S = Q K^T", "the first product"),
        ("score_mod", "scale, soft cap, bias, ALiBi"),
        ("mask", "partial tiles only: one 64-bit word a row and cell"),
        ("online softmax", "row_max, P = exp(S - row_max), row_sum, rescale"),
        ("O += P V", "the second product"),
    ]
    for n, (name, words) in enumerate(rows):
        y = 196 + 41 * n
        p.parts.append(f'<rect x="405" y="{y}" width="460" height="33" rx="4" fill="{YELLOW}" stroke="#999"/>')
        p.text(415, y + 21, name, 13, anchor="start", style='font-weight="bold"')
        p.text(540, y + 21, words, 12, anchor="start")
    p.arrow((635, 118), (635, 159))
    p.box(390, 486, 290, 60, GREEN, "out = O / row_sum, lse", "into the caller's own tensors")
    p.arrow((535, 450), (535, 485))
    p.box(710, 486, 170, 60, RED, "not finite?", "the fallback", "computes it again")
    p.arrow((680, 516), (709, 516), dashed=True)
    p.text(635, 578, "The backward pass goes the same way.", 12)
    p.text(635, 596, "It computes S and P again from lse, then dV, dP, dS, dK and dQ.", 12)
    return p.svg()


def hopper():
    p = Picture(900, 640, "One tile's way on Hopper: global memory, TMA, shared memory, wgmma, registers, and back")
    p.text(20, 28, "Where it is", 15, anchor="start", style='font-weight="bold"')
    p.box(20, 45, 150, 120, GREY, "Global memory", "Q, K, V", "runs and words", "O, lse")
    p.box(250, 45, 300, 120, BLUE, "Shared memory", "Q: 2 stages, 64 rows a warpgroup", "K, V: 2 stages each, 128 keys")
    p.text(400, 150, "words of partial blocks, beside K", 11.5)
    p.box(640, 45, 240, 120, YELLOW, "Registers of a warpgroup", "S 64 x 128, float32", "P 64 x 128, 16 bits")
    p.text(760, 150, "O 64 x 128, float32", 11.5)
    p.arrow((170, 85), (249, 85), words="TMA", at=(192, 79))
    p.arrow((550, 85), (639, 85), words="wgmma", at=(572, 79))
    p.arrow((760, 165), (760, 195), (95, 195), (95, 166), words="O: divided, rounded, stored by TMA", at=(330, 189))
    p.text(
        20, 240, "When, for two warpgroups (d 128, steps of 128 keys)", 15, anchor="start", style='font-weight="bold"'
    )
    left, wide, high = 150, 118, 46
    lanes = ("Producer warps", "Tensor cores", "Warpgroup 0", "Warpgroup 1")
    for n, name in enumerate(lanes):
        p.text(left - 12, 296 + 68 * n, name, 13, anchor="end")
        p.parts.append(f'<line x1="{left}" y1="{320 + 68 * n}" x2="885" y2="{320 + 68 * n}" stroke="#ccc"/>')

    def piece(lane, start, length, colour, name, *lines):
        p.box(left + wide * start, 268 + 68 * lane, wide * length - 4, high, colour, name, *lines)

    for n, name in enumerate(("K2, V1", "K3, V2", "K4, V3")):
        piece(0, 0.1 + 2 * n, 1.2, BLUE, name, "into free stages")
    for n in range(6):
        step = n // 2
        piece(1, n, 1, RED if n % 2 else GREEN, f"S{step + 1}, P{step} V{step}", f"of warpgroup {n % 2}")
    for n in range(3):
        piece(2, 1 + 2 * n, 1, GREEN, f"softmax of S{n + 1}", "mask, exp2, sums")
        if n < 2:
            piece(3, 2 + 2 * n, 1, RED, f"softmax of S{n + 1}", "mask, exp2, sums")
    p.text(450, 566, "A warpgroup issues S = Q K^T and O += P V, passes the turn on, and waits for S alone.", 12)
    p.text(450, 586, "While its exponentials run, the tensor cores work for the other one.", 12)
    p.text(450, 606, "The first S of the next task is issued behind the last O += P V, and made while O is stored.", 12)
    return p.svg()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the pictures are up to date")
    check = parser.parse_args().check
    stale = []
    for path, svg in (
        (PICTURES / "house.svg", house()),
        (PICTURES / "call.svg", call()),
        (PICTURES / "hopper.svg", hopper()),
    ):
        if check and (not path.exists() or path.read_text() != svg):
            stale.append(path.name)
        elif not check:
            path.write_text(svg)
    if stale:
        sys.exit(f"docs/pictures: {', '.join(stale)} is not what docs/make_diagrams.py writes")


if __name__ == "__main__":
    main()
