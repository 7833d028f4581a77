"""anyflash next to its peers, in one run: speed, memory, and the limits that both are held to.

Timed calls are interleaved: in each round every call of a comparison runs once. Figures are medians over the rounds, a
spread is the slowest less the fastest over the median, and a ratio is the median of the rounds' ratios (above 1:
anyflash is faster), so it holds when the machine's speed drifts. GFLOP/s counts useful operations: 2 (d + d_v) for
each visible pair forward, 6 d + 4 d_v backward.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

import measure
import page
import tiles_page
from options import Parser, is_program
from table import Table

TYPES = ("float32", "float64", "bfloat16", "float16")
# In the order of the table: the module that measures each on a CPU, by a function of its name. docs/performance.md says
# what.
PARTS = {
    "calls": "parts_own",
    "torch": "parts_torch",
    "short": "parts_torch",
    "sizes": "parts_torch",
    "decode": "parts_torch",
    "masks": "parts_own",
    "scaling": "parts_own",
    "beside": "parts_torch",
    "rules": "parts_own",
    "long": "parts_own",
}
# Those of a GPU, in gpu.py.
GPU_PARTS = ("calls", "torch", "tf32", "decode", "few", "masks", "packed", "bias", "long")
# Those of the tile machine, in tiles.py.
TILE_PARTS = ("constants", "product", "square", "chunks", "flat", "fits", "search")
NEEDS = {"calls": "calls", "decode": "kernels"}  # a part's C++ program: the option that names it


def number(least, most):
    def parse(text):
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"'{text}', expected a whole number from {least} to {most}")
        return int(text)

    return parse


def parse_arguments():
    parser = Parser(
        "compare", description=__doc__, epilog="example: bench/compare --device cpu --json bench/results/cpu.json"
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda", "tiles"],
        default="cpu",
        help="cuda: not with --build, --threads, --heads, --sequence; minutes, most of them for the "
        "compilation of `masks`' peer. tiles: the simulated tile machine beside what others published",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the rows to FILE")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=list(dict.fromkeys([*PARTS, *GPU_PARTS, *TILE_PARTS])),
        metavar="PART",
        help=f"what to measure on a CPU: {', '.join(PARTS)}; on a GPU: "
        f"{', '.join(GPU_PARTS)}; on tiles: {', '.join(TILE_PARTS)} (default: all of the device's)",
    )
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep what --json's file has of other parts, and beside PyTorch of other types, as measured before",
    )
    parser.add_argument(
        "--gpus",
        type=number(2, 64),
        metavar="N",
        help="with --device cuda: measure attention of a sequence split over N GPUs beside one, and nothing else",
    )
    parser.add_argument("--build", action="store_true", help="on a CPU: also time a cold build (minutes)")
    parser.add_argument("--rounds", type=number(1, 1000), default=7, metavar="N", help="timed rounds a row (default 7)")
    parser.add_argument(
        "--types", nargs="+", choices=TYPES, default=TYPES, help="of the parts torch, tf32 and decode (default: all)"
    )
    parser.add_argument(
        "--threads",
        nargs="+",
        type=number(1, 1024),
        metavar="N",
        help="of the parts torch, short, decode and masks on a CPU (default: one, and all)",
    )
    parser.add_argument(
        "--heads",
        type=number(1, 1024),
        metavar="N",
        help="of the part torch on a CPU, alone: so many heads (default 4)",
    )
    parser.add_argument(
        "--sequence",
        type=number(1, 1 << 20),
        metavar="N",
        help="of the part torch on a CPU, alone: so many tokens (default 2048). A record with --heads "
        "or --sequence is published in a block of its own, if the CPU has AMX",
    )
    parser.add_argument(
        "--gpu-calls",
        metavar="PROGRAM",
        type=Path,
        default=measure.PROJECT / "build-gpu/bench/bench_gpu_calls",
        help="tiny calls from C++ on a GPU (default: the one that bench/compare builds)",
    )
    for name, what in (("calls", "tiny calls from C++"), ("kernels", "reading memory, in C++")):
        parser.add_argument(
            f"--{name}",
            metavar="PROGRAM",
            type=Path,
            default=measure.PROJECT / f"build-bench/bench/bench_{name}",
            help=f"{what} (default: the one that bench/compare builds)",
        )
    parser.add_argument(
        "--publish",
        metavar="FILE",
        type=Path,
        help="measure nothing: write the rows of this earlier --json file, of any device, into "
        "README.md and docs/performance.md, or docs/tile-machine.md",
    )
    parser.add_argument("--check", action="store_true", help="only check the options")
    arguments = parser.parse_args()
    offered = {"cuda": GPU_PARTS, "tiles": TILE_PARTS}.get(arguments.device, tuple(PARTS))
    if arguments.gpus and (arguments.device != "cuda" or arguments.parts or arguments.add):
        parser.error("--gpus: only with --device cuda, and without --parts and --add")
    arguments.parts = arguments.parts or list(offered)
    for part in arguments.parts:
        if part not in offered:
            parser.error(f"--parts: no '{part}' on {arguments.device}, expected one of {', '.join(offered)}")
    for option in ("build", "threads"):
        if arguments.device != "cpu" and getattr(arguments, option):
            parser.error(f"--{option}: only on a CPU")
    if arguments.add and arguments.device == "tiles":
        parser.error("--add: not with --device tiles")
    arguments.threads = arguments.threads or [1, os.cpu_count()]
    if (arguments.heads or arguments.sequence) and (arguments.device != "cpu" or arguments.parts != ["torch"]):
        parser.error("--heads, --sequence: only with --parts torch on a CPU")
    if arguments.add and not (arguments.json and arguments.json.exists()):
        parser.error("--add: needs --json with a file that is there")
    if arguments.add:
        page.read(arguments.json, to_publish=False)
    if arguments.json and (arguments.json.is_dir() or not os.access(arguments.json.parent, os.W_OK)):
        parser.error(f"--json: {arguments.json} cannot be written")
    return arguments


def measure_parts(table, arguments, measured):
    """measured: {part: the function that measures it}."""
    for part, function in measured.items():
        if part in arguments.parts:
            table.part = part
            function(table, arguments)
            if arguments.json:
                table.write(arguments.json)


def earlier_rows(arguments, machine):
    """Those of --json's file that are not measured anew: other parts, and other types beside PyTorch."""
    rows = page.read(arguments.json, to_publish=False)
    for row in rows:
        if row["machine"] != machine:
            raise SystemExit(f"bench/compare: --add: {arguments.json} has rows of {row['machine']}, this is {machine}")
    own = arguments.heads or arguments.sequence
    shape = page.shape_of(arguments.heads or page.HEADS, arguments.sequence or page.SEQUENCE) if own else None
    if any(row.get("shape") != shape for row in rows):
        raise SystemExit(f"bench/compare: --add: {arguments.json} has rows of other heads or another sequence")
    anew = [*arguments.parts, *["build"] * arguments.build]
    return [
        row for row in rows if row["part"] not in anew or row["part"] == "torch" and row["type"] not in arguments.types
    ]


def imported(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(
            f"bench/compare: {str(error).splitlines()[0]}; bench/compare (not compare.py) sets up what it needs"
        ) from None


def function_of(part):
    return getattr(imported(PARTS[part]), part)


def main():
    arguments = parse_arguments()
    if arguments.check:
        return
    if arguments.publish:
        if tiles_page.is_record(arguments.publish):
            tiles_page.publish(arguments.publish)
        else:
            page.publish(page.read(arguments.publish))
        return
    if arguments.device == "tiles":
        imported("tiles").measure(arguments)
        return
    if arguments.gpus:
        options = ["--gpus", str(arguments.gpus), "--rounds", str(arguments.rounds)]
        imported("gpus").main([*options, "--json", str(arguments.json or "")])
        return
    on_gpu = arguments.device == "cuda"
    for part, option in NEEDS.items():
        program = getattr(arguments, option)
        if not on_gpu and part in arguments.parts and not is_program(program):
            raise SystemExit(f"bench/compare: --{option}: no program {program}; bench/compare builds it")
    if on_gpu:
        gpu = imported("gpu")
        table, measured = Table(arguments.device, gpu.name()), gpu.PARTS
    else:
        measured = {part: function_of(part) for part in PARTS if part in arguments.parts}
        table = Table(arguments.device)
        table.kernels = arguments.kernels if is_program(arguments.kernels) else None
    if arguments.add:
        table.earlier = earlier_rows(arguments, table.machine)
    measure_parts(table, arguments, measured)
    if arguments.build:
        table.part = "build"
        table.add(
            "cold build of library and program, two jobs", measure.build_time(), "s", type="", d=0, threads=2, most=120
        )
    if arguments.json:
        table.write(arguments.json)
    print(page.summary(table.rows))


if __name__ == "__main__":
    sys.exit(main())
