"""Instructions of four fixed calls, counted by callgrind: a guard against slower code that a noisy machine cannot hide.

Each case is a run of the anyflash program under valgrind, with AVX2 and one thread; only what happens inside the
library's forward or backward calls is counted: three calls, the first of which makes the plan.
Compared with the record, a count may differ by 3 %. More is an error in either direction: a gain is to be recorded, or
the next loss would hide behind it. Where another compiler made the program, a count may differ by 10 %.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from options import Parser, is_program

PROJECT = Path(__file__).resolve().parents[1]
RECORD = PROJECT / "bench" / "results" / "instructions.json"
PROGRAM = PROJECT / "build-release" / "src" / "cli" / "anyflash"
TOLERANCE, OF_ANOTHER_COMPILER = 0.03, 0.10
INSTRUCTION_SET = "AVX2"
# direction, type, rule, sequence; head size 64, one head.
CASES = (
    ("forward", "float32", "full()", "192"),
    ("backward", "float32", "full()", "192"),
    ("forward", "bfloat16", "local(4)", "24x24"),
    ("backward", "bfloat16", "local(4)", "16x16"),
)
COMPILER = re.compile(rb"GCC: \([^)\0]*\) [0-9.]+|[ -~]*clang version [ -~]+")


def fail(message):
    raise SystemExit(f"bench/instructions: {message}")


def parse_arguments():
    parser = Parser("instructions", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the counts to the record, compare nothing")
    parser.add_argument(
        "--program",
        metavar="FILE",
        type=Path,
        default=PROGRAM,
        help="the anyflash program, a release build (default: build-release/src/cli/anyflash)",
    )
    parser.add_argument(
        "--file",
        metavar="FILE",
        type=Path,
        default=RECORD,
        help="the record (default: bench/results/instructions.json)",
    )
    parser.add_argument("--check", action="store_true", help="only check the options")
    arguments = parser.parse_args()
    if not is_program(arguments.program):
        fail(f"--program: no program {arguments.program}")
    if arguments.record and (arguments.file.is_dir() or not os.access(arguments.file.parent, os.W_OK)):
        fail(f"--file: {arguments.file} cannot be written")
    return arguments


def compiler_of(program):
    """What the compilers left of their names in the program, e.g. GCC: (Debian 12.2.0-14) 12.2.0."""
    found = {name.decode().strip() for name in COMPILER.findall(program.read_bytes())}
    return ", ".join(sorted(found)) or "unknown"


def read(path):
    try:
        record = json.loads(path.read_text())
        return record["compiler"], {" ".join(case): int(record["counts"][" ".join(case)]) for case in CASES}
    except OSError as error:
        fail(f"{path}: {error.strerror}; bench/instructions --record writes it")
    except (ValueError, LookupError, TypeError):
        fail(f"{path}: not a record of these cases; bench/instructions --record writes one")


def count(program, case):
    """The instructions that one case takes inside the library's calls."""
    direction, type_, rule, shape = case
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={folder}/out",
            "--collect-atstart=no",
            f"--toggle-collect=anyflash::{direction}(*Options const&)",
            program,
            "bench",
            "--direction",
            direction,
            "--type",
            type_,
            "--rule",
            rule,
            "--shape",
            shape,
            "--heads",
            "1",
            "--threads",
            "1",
            "--repetitions",
            "1",
        ]
        try:
            run = subprocess.run(
                command, env=os.environ | {"ANYFLASH_ISA": INSTRUCTION_SET}, capture_output=True, text=True
            )
        except FileNotFoundError:
            fail("valgrind is missing, please install it")
    found = re.search(r"refs: +([\d,]+)", run.stderr)
    if run.returncode != 0 or not found:
        fail(f"{' '.join(case)}: {(run.stderr or run.stdout).strip().splitlines()[-1]}")
    instructions = int(found[1].replace(",", ""))
    if instructions < 100000:
        fail(f"{' '.join(case)}: {instructions} instructions: the library's calls were not found in {program}")
    return instructions


def main():
    arguments = parse_arguments()
    if arguments.check:
        return
    compiler = compiler_of(arguments.program)
    recorded, tolerance = {}, TOLERANCE
    if not arguments.record:
        by, recorded = read(arguments.file)
        if by != compiler:
            tolerance = OF_ANOTHER_COMPILER
            print(f"up to {100 * tolerance:.0f} % allowed: the record is of {by}, this program is of {compiler}")
    counts, changed = {}, 0
    for case in CASES:
        name = " ".join(case)
        counts[name] = count(arguments.program, case)
        line = f"{name:<36}{counts[name]:>14,} instructions"
        if name in recorded:
            change = counts[name] / recorded[name] - 1
            line += f"{recorded[name]:>14,} recorded {100 * change:+7.2f} %"
            if abs(change) > tolerance:
                changed += 1
                line += "  CHANGED"
        print(line, flush=True)
    if arguments.record:
        arguments.file.write_text(
            json.dumps({"compiler": compiler, "instruction_set": INSTRUCTION_SET, "counts": counts}, indent=1) + "\n"
        )
    if changed:
        fail(
            f"{changed} of {len(CASES)} counts changed by more than {100 * tolerance:.0f} %; "
            "where that is right, bench/instructions --record writes the new ones"
        )


if __name__ == "__main__":
    sys.exit(main())
