"""The GPU's rungs of learn/ on the emulator: each against float64, the tests of device functions, and mistakes that the
emulator must find. Built with the other rungs (CMake option ANYFLASH_LEARN)."""

import ctypes
import os
import re
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "learn"))

import ladder

MODULES = Path(os.environ.get("ANYFLASH_RUNGS", PROJECT / "build-release" / "learn")) / "gpu"
RUNGS = [rung for rung in ladder.rungs("gpu") if rung.emulated]
FUNCTIONS = sorted((PROJECT / "learn" / "gpu").glob("test_*.cu"))
FAULTS = {
    "divergence": "divergence: __syncthreads of line",
    "absent_threads": "deadlock in block (0, 0, 0): threads 0 to 31 wait at __syncthreads of line",
    "absent_lanes": "wait at __shfl_xor_sync of line",
    "different_instructions": "but other threads of its warp are at",
    "misaligned": "misaligned or out of bounds",
    "beyond_shared_memory": "misaligned or out of bounds",
    "beyond_an_array": "misaligned or out of bounds",
    "no_barrier": None,  # a wrong result
    "unwritten": "of shared memory was never written",
    "no_wait": None,
    "never_waits": "returns with a cp.async that nothing waited for",
    "barrier_not_initialized": "not initialized",
    "too_many_arrivals": "mbarrier: more than 1 arrivals in a phase",
    "bytes_that_never_come": "wait at an mbarrier of line",
    "no_proxy_fence": "of shared memory was never written",
    "no_wgmma_fence": "no wgmma_fence since the products before",
    "result_before_the_wait": None,
}


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_a_rung_is_right(rung):
    assert rung.load(MODULES).wrong() is None


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung.axis != "matmul"], ids=lambda rung: rung.name)
def test_a_wrong_rung_is_found(rung, monkeypatch):
    """The same check with a rung that does nothing."""
    rung.load(MODULES)
    monkeypatch.setattr(rung, "function", lambda arguments: None)
    assert "is off by nan" in rung.wrong() or "not -infinity" in rung.wrong()


@pytest.mark.parametrize("rung", ladder.rungs("gpu"), ids=lambda rung: rung.name)
def test_a_rung_fits_into_a_head(rung):
    text = rung.path.read_text()
    assert text.count("\n") <= 200
    assert re.search(r"^// Measured(:| \()", text, re.M) and re.search(r"^// (Expected:|What it adds)", text, re.M)


@pytest.mark.parametrize("path", FUNCTIONS, ids=lambda path: path.stem)
def test_a_device_function(path):
    module = ctypes.CDLL(str(MODULES / f"{path.stem}.so"))
    module.test.restype = ctypes.c_char_p
    assert module.test() is None
    assert ladder.emulator_error(module) is None


@pytest.fixture(scope="module")
def faults():
    return ctypes.CDLL(str(MODULES / "faults.so"))


def call(faults, name):
    function = getattr(faults, f"fault_{name}")
    function.restype = ctypes.c_bool
    return function(), ladder.emulator_error(faults)


@pytest.mark.parametrize("name", FAULTS)
def test_a_mistake_is_found(faults, name):
    right, error = call(faults, name)
    assert not right
    assert FAULTS[name] in error and "\n" not in error if FAULTS[name] else error is None


@pytest.mark.parametrize("name", ["without_a_mistake", "wgmma_without_a_mistake"])
def test_what_is_right_is_no_mistake(faults, name):
    assert call(faults, name) == (True, None)


def test_the_swizzle_avoids_bank_conflicts():
    """Rungs that lay their rows without a swizzle have conflicts at ldmatrix; those with one have none."""
    conflicts = {}
    for rung in (rung for rung in RUNGS if "ldmatrix(" in rung.path.read_text()):
        module = rung.load(MODULES).module
        module.emulator_conflicts.restype = ctypes.c_long
        before = module.emulator_conflicts()
        case = ladder.Case(64, 64, 64, type=rung.type, backward=rung.axis == "backward")
        rung(case.arguments())
        conflicts[rung.name] = module.emulator_conflicts() - before
    assert conflicts and set(conflicts.values()) == {0}
