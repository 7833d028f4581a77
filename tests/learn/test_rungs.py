"""Every rung of learn/ against float64: odd sizes, one key, no key, causal with unequal lengths, masks.

ANYFLASH_RUNGS names the folder of the built rungs (CMake option ANYFLASH_LEARN): build-release/learn by default.
"""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT / "learn"), str(PROJECT / "learn" / "python")]

import ladder
import numpy_attention

MODULES = Path(os.environ.get("ANYFLASH_RUNGS", PROJECT / "build-release" / "learn"))
CASES = [
    ladder.Case(*size, causal=causal, backward=backward)
    for size in ladder.SIZES
    for causal in (False, True)
    for backward in (False, True)
]
SINGLE = ["heads", "queries", "keys", "d", "causal"]


@pytest.mark.parametrize("rung", ladder.rungs(), ids=lambda rung: rung.name)
def test_a_rung_is_right(rung):
    assert rung.load(MODULES).wrong() is None


def test_the_backward_pass_on_many_threads():
    """64 threads, also more than pairs of key blocks: right, and no dQ for a thread that has nothing to do."""
    program = """if True:
        import resource, sys, ladder
        rung = ladder.Rung(ladder.FOLDER / "cpu" / "18_backward_threads.cpp").load(ladder.Path(sys.argv[1]))
        ladder.set_threads(64)
        assert rung.wrong() is None
        case = ladder.Case(2048, 1, 128, heads=9, backward=True)
        arguments, before = case.arguments(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rung(arguments)
        assert case.wrong() is None
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"""
    command = [sys.executable, "-c", program, MODULES]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ladder.FOLDER)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 200 * 1024  # KiB; 9 heads x 64 parts x 1 MiB would be 576 MiB


@pytest.mark.parametrize("rung", [rung for rung in ladder.rungs() if rung.axis != "matmul"], ids=lambda rung: rung.name)
def test_a_wrong_rung_is_found(rung, monkeypatch):
    """The same check with a rung that leaves out a last step."""
    monkeypatch.setattr(rung, "function", lambda arguments: None, raising=False)
    assert "is off by nan" in rung.wrong() or "not -infinity" in rung.wrong()


@pytest.mark.parametrize("rung", ladder.rungs(), ids=lambda rung: rung.name)
def test_a_rung_fits_into_a_head(rung):
    text = rung.path.read_text()
    assert text.count("\n") <= 200
    assert re.search(r"^// Measured(:| \()", text, re.M) and "not yet" not in text and "rung.h" in text


def test_the_shared_header_is_short():
    assert (PROJECT / "learn" / "rung.h").read_text().count("\n") <= 60


@pytest.mark.parametrize("name, backward", [("attention", False), ("attention", True), ("attention_rust", False)])
def test_c_and_rust(name, backward):
    library = ctypes.CDLL(str(MODULES / f"{name}.so"))  # Rust's is there if CMake found rustc
    for case in [case for case in CASES if case.backward == backward]:
        arguments = case.arguments()
        names = [*SINGLE, "q", "k", "v", "out", "lse"] + ["dout", "dq", "dk", "dv"] * backward
        function = library.attention_backward if backward else library.attention_forward
        function(*(getattr(arguments, name) for name in names))
        assert case.wrong() is None, case


@pytest.mark.parametrize("d", [0, 257, 320])
def test_c_refuses_a_head_size(d):
    library = ctypes.CDLL(str(MODULES / "attention.so"))
    case = ladder.Case(3, 5, d or 8, backward=True)
    case.out[:] = case.lse[:] = np.nan
    arguments = case.arguments()
    for function, more in ((library.attention_forward, []), (library.attention_backward, ["dout", "dq", "dk", "dv"])):
        given = [getattr(arguments, name) for name in [*SINGLE, "q", "k", "v", "out", "lse", *more]]
        given[3] = d
        assert function(*given) == 1
    assert all(np.isnan(x).all() for x in (case.out, case.lse, case.dq, case.dk, case.dv))


def test_climb_builds_what_it_calls():
    """The CPU's rungs, without those of the emulator."""
    build = MODULES.parent
    found = subprocess.run(
        ["ninja", "-C", build, "-t", "inputs", "learn_cpu"], capture_output=True, text=True, check=True
    )
    assert "19_library" in found.stdout and "00_peak" in found.stdout and "emulated_" not in found.stdout


@pytest.mark.parametrize("device", ["climb", "climb_cuda"])
@pytest.mark.parametrize(
    "wrong, words",
    [
        (["--wrong"], "unrecognized"),
        (["library"], "no rung has library in its name"),
        (["matmul", "nosuch"], "no rung has nosuch in its name"),
    ],
)
def test_climb_refuses_before_it_builds(device, wrong, words):
    command = [sys.executable, PROJECT / "learn" / f"{device}.py", "--only-parse", *wrong]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode and words in found.stderr and "26_library" not in found.stderr.split("rungs:")[-1]


@pytest.mark.parametrize("name", ["three_passes", "two_passes", "one_pass", "flash1", "flash2", "backward"])
def test_numpy(name):
    function = getattr(numpy_attention, name)
    for case in [case for case in CASES if case.backward == (name == "backward")]:
        for h in range(case.heads):
            given = (case.out[h], case.lse[h], case.dout[h]) if case.backward else ()
            results = function(case.q[h], case.k[h], case.v[h], *given, case.causal)
            for array, result in zip((case.dq, case.dk, case.dv) if case.backward else (case.out, case.lse), results):
                array[h] = result
        assert case.wrong() is None, case


def test_numpy_softmax():
    for columns in (1, 2, 100):
        x = np.random.default_rng(columns).standard_normal(columns) * 300
        right = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        np.testing.assert_allclose(numpy_attention.safe_softmax(x), right, atol=1e-15)
        np.testing.assert_allclose(numpy_attention.online_softmax(x), right, atol=1e-15)
