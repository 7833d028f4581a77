"""bench_kernels: every loop runs on every instruction set and tells a speed that is possible; its peak is one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "bench"))

import measure  # noqa: E402


@pytest.fixture(scope="module")
def kernels():
    found = max(PROJECT.glob("build*/bench/bench_kernels"), key=lambda path: path.stat().st_mtime, default=None)
    if found is None:
        pytest.fail("bench_kernels is not built: cmake -B build -DANYFLASH_BENCH=ON && cmake --build build")
    return found


def rows(kernels, *options, **environment):
    done = subprocess.run([kernels, "--benchmark_format=json", "--benchmark_min_time=0.001", *options],
                          env=os.environ | environment, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def instruction_sets(program):
    named = subprocess.run([program, "devices", "--json"], capture_output=True, text=True, check=True).stdout
    return json.loads(named)[0]["instruction_sets"]


def test_every_kernel_on_every_instruction_set(kernels, instruction_sets):
    assert instruction_sets
    for name in instruction_sets:
        ran = rows(kernels, "--benchmark_filter=^(gemm|exp|softmax|transpose)/", ANYFLASH_ISA=name)
        assert ran["context"]["instruction_set"] == name
        speeds = {row["name"]: row for row in ran["benchmarks"]}
        for type_ in ("float32", "float64"):
            assert {f"exp/{type_}", f"softmax/{type_}", f"transpose/{type_}"} <= set(speeds)
            assert sum(one.startswith("gemm/") and one.endswith(type_) for one in speeds) == 8
        for one, row in speeds.items():
            if one.startswith("transpose/"):
                assert row["GB/s"] > 0 and row["percent_of_copying"] > 0
            else:  # the peak is a limit; a little over it is noise, a lot a wrong count
                assert row["GFLOP/s"] > 0 and 0 < row.get("percent_of_peak", 1) < 300, (name, row)


def test_the_machine_s_limits(kernels):
    """As bench/compare and bench/roofline ask for them."""
    assert all(1 < speed < 1e4 for speed in measure.read_bandwidth(kernels, 1))
    ran = rows(kernels, "--benchmark_filter=^peak/", "--machine_threads=1")["benchmarks"]
    assert {"peak/float32/real_time/threads:1", "peak/float64/real_time/threads:1"} <= {row["name"] for row in ran}
    assert all(row["GFLOP/s"] > 1 for row in ran)


def test_a_wrong_option_or_instruction_set_is_told(kernels):
    for arguments, environment in ((["--frobnicate"], {}), ([], dict(ANYFLASH_ISA="NOPE"))):
        done = subprocess.run([kernels, *arguments], env=os.environ | environment, capture_output=True, text=True)
        assert done.returncode == 1 and ("frobnicate" in done.stderr or "NOPE" in done.stderr), done.stderr
