"""The core selection under every instruction set that was compiled in and runs here."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import anyflash as af
import pytest

pytestmark = pytest.mark.slow  # quick runs have fewer sets
SETS = list(af._core.instruction_sets())


# What Linux must name in /proc/cpuinfo, beside all of the sets before, for Highway to run a set.
X86 = {
    "EMU128": "",
    "SSE4": "ssse3 sse4_1 sse4_2 aes pclmulqdq",
    "AVX2": "avx avx2 fma f16c bmi1 bmi2 abm",
    "AVX3": "avx512f avx512cd avx512bw avx512dq avx512vl",
}
# On top of AVX3.
BEYOND = {
    "AMX": "amx_tile amx_bf16",
    "AVX3_ZEN4": "avx512_vnni vpclmulqdq avx512vbmi avx512_vbmi2 vaes avx512_vpopcntdq avx512_bitalg gfni avx512_bf16",
}


def test_every_set_that_runs_here_is_there():
    if platform.machine() != "x86_64":
        assert len(SETS) >= 2 and "EMU128" in SETS
        return
    text = Path("/proc/cpuinfo").read_text()
    flags = set(re.search(r"^flags\s*:(.*)$", text, re.M)[1].split())
    needed, expected = set(), set()
    for name, more in X86.items():
        needed |= set(more.split())
        if needed <= flags:
            expected.add(name)
    for name, more in BEYOND.items():
        if "AVX3" in expected and set(more.split()) <= flags and (name != "AVX3_ZEN4" or "AuthenticAMD" in text):
            expected.add(name)
    assert set(SETS) == expected and len(SETS) == len(expected)


@pytest.mark.parametrize("isa", SETS[1:])  # test_core.py itself runs on the best
def test_core_selection(isa):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(Path(__file__).with_name("test_core.py")),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, env=environment | {"ANYFLASH_ISA": isa}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_asking_for_the_name_changes_nothing():
    """EMU128 sums in another order than the best set does, so its bits tell which one ran."""
    code = """if True:
        import sys, numpy as np, anyflash as af
        q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 100, 80), np.float32)
        if "ask" in sys.argv:
            af._core.instruction_set(), af._core.instruction_sets()
        print(af.attention(q, k, v).tobytes().hex())"""

    def bits(isa, *arguments):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=os.environ | {"ANYFLASH_ISA": isa},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    best = SETS[0]
    assert bits("EMU128") == bits("EMU128", "ask")
    assert best == "EMU128" or bits("EMU128") != bits(best)
