"""The GPU's rungs of learn/ on the emulator: each against float64, the tests of device functions, and mistakes that the
emulator must find. Built with the other rungs (CMake option ANYFLASH_LEARN)."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "learn"))

import climb_cuda
import ladder

import cuda

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
    "no_barrier_between_warpgroups": None,
    "bulk_add_without_a_wait": "returns with a bulk_add that nothing waited for",
    "unwritten": "of shared memory was never written",
    "no_wait": None,
    "never_waits": "returns with a cp.async that nothing waited for",
    "barrier_not_initialized": "not initialized",
    "too_many_arrivals": "mbarrier: more than 1 arrivals in a phase",
    "bytes_that_never_come": "wait at an mbarrier of line",
    "nobody_waits": "returned with arrivals that nobody waited for",
    "no_barrier_fence": "TMA: no fence_barrier_init since an mbarrier was initialized",
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
    assert text.count("\n") < 200
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


def test_ldmatrix_has_no_bank_conflicts():
    """Of a whole call: the swizzle of every rung that uses it."""
    conflicts = {}
    for rung in (rung for rung in RUNGS if "ldmatrix(" in rung.path.read_text()):
        module = rung.load(MODULES).module
        module.emulator_conflicts.restype = ctypes.c_long
        before = module.emulator_conflicts()
        case = max(rung.cases(), key=lambda case: case.queries)
        rung(case.arguments())
        conflicts[rung.name] = module.emulator_conflicts() - before
    assert len(conflicts) == 6 and set(conflicts.values()) == {0}


def test_bank_conflicts_are_counted():
    """The test of fragments lays rows of 16 and 32 bytes without a swizzle."""
    module = ctypes.CDLL(str(MODULES / "test_fragments.so"))
    module.emulator_conflicts.restype = ctypes.c_long
    before = module.emulator_conflicts()
    module.test()
    assert module.emulator_conflicts() > before


def test_the_pictures_are_of_today():
    assert (
        subprocess.run([sys.executable, PROJECT / "learn" / "pictures" / "make_pictures.py", "--check"]).returncode == 0
    )


def test_the_shared_header_is_short():
    assert (PROJECT / "learn" / "gpu" / "device.h").read_text().count("\n") <= 60


def test_without_cute_rung_15_is_left_out(monkeypatch, capsys):
    sources = [rung.path for rung in ladder.rungs("gpu")]
    monkeypatch.setenv("CUTLASS_INCLUDE", "/include")
    assert str(cuda.cute_headers()) == "/include" and cuda.without_cute(sources) == sources
    monkeypatch.setattr(cuda, "cute_headers", lambda: None)
    assert {path.stem for path in set(sources) - set(cuda.without_cute(sources))} == {"15_cute"}
    assert capsys.readouterr().out.startswith(
        "rung 15 left out: no CuTe; install nvidia-cutlass, or set CUTLASS_INCLUDE"
    )


def test_climb_without_a_gpu_says_so_in_one_line(tmp_path):
    absent = tmp_path / "nvidia-smi"
    absent.write_text("#!/bin/sh\nexit 1\n")
    absent.chmod(0o755)
    found = subprocess.run(
        [PROJECT / "learn" / "climb", "--device", "cuda"],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert found.returncode == 1 and found.stdout == ""
    assert found.stderr == "climb: no NVIDIA GPU: nvidia-smi finds none\n"


def profiled(tmp_path, monkeypatch, ncu):
    """What learn/profile makes of an ncu that prints this."""
    (tmp_path / "ncu").write_text(f"#!/bin/sh\ncat <<'end'\n{ncu}\nend\n")
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(ladder, "FOLDER", tmp_path)
    (tmp_path / "profiling.md").write_text("<!-- 14_copies: written by learn/profile -->\nnothing\n<!-- end -->\n")
    climb_cuda.profile([rung for rung in RUNGS if "copies" in rung.name], "NVIDIA H200")
    return (tmp_path / "profiles" / "14_copies.txt").read_text()


def test_a_profile_is_ncu_s_text(tmp_path, monkeypatch):
    """The report whole; in the page its main lines and the largest stall."""
    report = """==PROF== Connected
  flash
    Section: GPU Speed Of Light Throughput
    DRAM Throughput                 %        12.50
    SM Active Cycles            cycle       99,000
    OPT   Est. Speedup: 40%
          On average, each warp of this workload spends 4.3 cycles being stalled waiting for
          a barrier. This is much."""
    text = profiled(tmp_path, monkeypatch, report)
    assert text.startswith("learn/profile 14_copies, NVIDIA H200, ") and "PROF" not in text
    assert text.endswith("a barrier. This is much.\n")
    stall = "On average, each warp of this workload spends 4.3 cycles being stalled waiting for a barrier."
    page = (tmp_path / "profiling.md").read_text().splitlines()
    assert page[3:6] == ["DRAM Throughput % 12.50", stall, "```"] and "nothing" not in page


def test_one_call_is_profiled(monkeypatch):
    """That of the largest size without a mask; here of small sizes, on the emulator."""
    sizes = dict(MODULES=MODULES, MATRIX=64, TOKENS=128, HEADS=2, ROWS=((8, 64), (2, 4096)))
    for name, value in sizes.items():
        monkeypatch.setattr(climb_cuda, name, value)
    called = []
    monkeypatch.setattr(ladder.Rung, "__call__", lambda rung, arguments: called.append(arguments))
    for name in ("02_matmul_tiled", "05_softmax_shared", "18_overlap"):
        climb_cuda.run_once(name)
    assert called[1].columns == 4096 and called[2].d == 128 and not called[2].causal and called[2].queries == 128


def test_a_timed_call_makes_the_numbers_of_one_head(monkeypatch):
    """Of 32 heads they took ten seconds a rung."""
    made = []
    monkeypatch.setattr(
        climb_cuda, "random", lambda *shape, seed: made.append(shape) or ladder.random(*shape, seed=seed)
    )
    case = climb_cuda.Timed(16, 16, 64, heads=8, type=ladder.np.float16)
    assert [shape[0] for shape in made] == [1] * 4
    assert case.q.shape == (8, 16, 64) and case.q.dtype == ladder.np.float16 and (case.k[0] == case.k[7]).all()


def test_a_profile_that_is_refused_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="^learn/profile: ERR_NVGPUCTRPERM: counters are not for this user; see"):
        profiled(tmp_path, monkeypatch, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")
    with pytest.raises(SystemExit, match="^learn/profile: 14_copies: ==ERROR== no kernels$"):
        profiled(tmp_path, monkeypatch, "==ERROR== no kernels")


def test_the_gpu_s_tables(tmp_path, monkeypatch):
    """From rows as a GPU gives them: the tables, and the figures that are written into README and rungs."""
    every = [ladder.Rung(shutil.copy(rung.path, tmp_path)) for rung in ladder.rungs("gpu")]
    rung, softmax = (next(x for x in every if name in x.name) for name in ("flash2", "softmax_online"))
    row = dict(rung=rung.name, axis="attention", rate=20.0, before=2.0, peer=5e-4, peak=50, seconds=1e-3, work=2e10)
    rows = [row | dict(call=call) for call in ("d64 full", "d64 causal")]
    rows.append(
        row | dict(rung=softmax.name, axis="softmax", call="1024 x 1024", seconds=9e-6, peer=9.9e-6, before=None)
    )
    page = tmp_path / "README.md"
    page.write_text("<!-- cuda: written by learn/climb --write -->\nnothing\n<!-- end of cuda -->\n")
    monkeypatch.setattr(climb_cuda.climb, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(climb_cuda.climb, "PAGE", page)
    climb_cuda.write(dict(machine="NVIDIA H200", date="2026-01-01", rows=rows), every)
    text = page.read_text()
    assert "| d64 full, TFLOP/s | d64 causal, TFLOP/s | times the rung before | of the library | of the peak |" in text
    assert (
        "| 20 | 20 | 2.00 | 50 % | 40 % |" in text
        and "| 9 |  | 1.10 |" in text
        and "|  | torch.softmax | 9.9 |  | 1 |" in text
        and "nothing" not in text
    )
    assert "// Measured (NVIDIA H200): d64 full 20; d64 causal 20 TFLOP/s." in rung.path.read_text()
    assert "// Measured (NVIDIA H200): 1024 x 1024 9 us." in softmax.path.read_text()
    assert (tmp_path / "results" / "nvidia-h200.json").exists() and (tmp_path / "results" / "nvidia-h200.svg").exists()
