"""Takes each barrier, wait and fence out of the GPU's rungs, one at a time, and asks whether the emulator notices.

    tests/learn/without_barriers.py [RUNG ...]    part of a rung's name (default: all); some minutes

A statement that nobody misses is either needless or one that the emulator cannot judge: KNOWN says which and why.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "learn"))

import ladder

FLAGS = "-std=c++20 -O1 -fPIC -shared -x c++ -fsanitize=alignment,bounds -fsanitize-undefined-trap-on-error".split()
FLAGS += ["-U_FORTIFY_SOURCE", "-fno-gnu-unique", "-Wno-unknown-pragmas"]
STATEMENT = re.compile(
    r"(?<=[\s,])(__syncthreads\(\)|__syncwarp\(\)|copies_(?:wait<\d>|commit)\(\)|wgmma_(?:fence|commit)\(\)"
    r"|wgmma_wait<\d>\(\w+\)|(?:\w+\.)*\w+(?:\[[^\]]*\])?\.wait\([^;]*\)|(?:wait|pass)_turn\(\)|fence_barrier_init\(\)|fence_async_proxy\(\)|bulk_wait\(\)|named_sync\([^)]*\)"
    r"|(?:\w+\.)+release\([^)]*\));"
)
KNOWN = {
    ("10_flash1", "__syncwarp()"): "the shuffles before it happen to order the lanes here",
    ("25_backward_wgmma", "wgmma_wait<0>(dk)"): "each of the two is for both; the other tells the compiler only",
    ("25_backward_wgmma", "wgmma_wait<0>(dv)"): "each of the two is for both; the other tells the compiler only",
}


def without(rung, found):
    """The rung without one statement: what is wrong with it, or None."""
    text = rung.path.read_text()
    with tempfile.TemporaryDirectory() as folder:
        gpu = Path(folder) / "gpu"
        gpu.mkdir()
        shutil.copy(PROJECT / "learn" / "rung.h", folder)
        for header in (PROJECT / "learn" / "gpu").glob("*.h"):
            shutil.copy(header, gpu)
        source = gpu / rung.path.name
        source.write_text(f"{text[: found.start()]}(void)0;{text[found.end() :]}")
        built = subprocess.run(["g++", *FLAGS, "-o", gpu / f"{rung.name}.so", source], capture_output=True, text=True)
        if built.returncode:
            return f"does not compile: {built.stderr.splitlines()[-1]}"
        call = (
            f"import sys; sys.path.insert(0, {str(PROJECT / 'learn')!r}); import ladder; from pathlib import Path; "
            f"print(ladder.Rung(Path({str(source)!r})).load(Path({str(gpu)!r})).wrong() or '')"
        )
        run = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True)
        return run.stdout.strip() or run.stderr.strip() or None


def main():
    asked, jobs = sys.argv[1:], []
    for rung in ladder.rungs("gpu"):
        if rung.emulated and (not asked or any(x in rung.name for x in asked)):
            statements = STATEMENT.finditer(rung.path.read_text())
            jobs += [(rung, one) for one in statements if one[1].count("(") == one[1].count(")")]  # not an argument
    missed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (rung, found), wrong in zip(jobs, pool.map(lambda job: without(*job), jobs)):
            line = rung.path.read_text().count("\n", 0, found.start()) + 1
            known = KNOWN.get((rung.name, found[1]))
            missed += not wrong and not known
            said = wrong.splitlines()[-1][:90] if wrong else f"not noticed; {known}" if known else "NOT NOTICED"
            print(f"{rung.path.name}:{line} without {found[1]}: {said}", flush=True)
    print(f"{len(jobs)} statements, {missed} not noticed")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
