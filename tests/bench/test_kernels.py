"""bench_kernels: every loop runs on every instruction set and tells its operations and a speed; the machine's limits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# What multiplies pairs of bfloat16 on some instruction sets of x86; on others the program is believed.
PAIRS_BY = {
    "AMX": "tiles",
    "AVX3_SPR": "instruction",
    "AVX3_ZEN4": "instruction",
    "AVX3_DL": "nothing",
    "AVX3": "nothing",
    "AVX2": "nothing",
    "SSE4": "nothing",
    "SSSE3": "nothing",
    "SSE2": "nothing",
}
PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "bench"))

import measure


@pytest.fixture(scope="module")
def kernels():
    found = max(PROJECT.glob("build*/bench/bench_kernels"), key=lambda path: path.stat().st_mtime, default=None)
    if found is None:
        pytest.fail("bench_kernels is not built: cmake -B build -DANYFLASH_BENCH=ON && cmake --build build")
    return found


def rows(kernels, *options, **environment):
    done = subprocess.run(
        [kernels, "--benchmark_format=json", "--benchmark_min_time=0.001", *options],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def instruction_sets(program):
    named = subprocess.run([program, "devices", "--json"], capture_output=True, text=True, check=True).stdout
    return json.loads(named)[0]["instruction_sets"]


def test_every_kernel_on_every_instruction_set(kernels, instruction_sets):
    assert instruction_sets
    for name in instruction_sets:
        ran = rows(kernels, "--benchmark_filter=^(gemm|decode|exp|softmax|transpose)/", ANYFLASH_ISA=name)
        assert ran["context"]["instruction_set"] == name
        pairs_by = ran["context"]["pairs"]
        assert pairs_by == PAIRS_BY.get(name, pairs_by)
        speeds = {row["name"]: row for row in ran["benchmarks"]}
        types = {"float32", "float64"} | ({"pairs"} if pairs_by != "nothing" else set())
        products = ("gemm/scores", "gemm/values", "gemm/key_gradients", "decode/scores", "decode/values")
        loops = {f"{product}/d{d}" for product in products for d in (64, 128)} | {"exp", "softmax", "transpose"}
        assert set(speeds) == {f"{loop}/{type_}" for loop in loops for type_ in types} - {"exp/pairs"}
        for one, row in speeds.items():
            if one.startswith(("gemm/", "decode/")):
                rows_of_queries, d = 64 if one.startswith("gemm/") else 4, int(one.split("/")[2][1:])
                assert row["operations"] == 2 * rows_of_queries * 64 * d, (name, row)
            if one.startswith("transpose/"):
                assert row["GB/s"] > 0 and row["percent_of_copying"] > 0
            else:
                assert row["GFLOP/s"] > 0 and row["operations"] > 0, (name, row)
                in_tiles = one.endswith("/pairs") and pairs_by == "tiles"  # their peak is not known
                peak_known = not in_tiles or one.startswith(("decode/values", "softmax"))  # which compute in float32
                assert row.get("percent_of_peak", 0) > 0 if peak_known else "percent_of_peak" not in row, (name, row)


def test_the_machine_s_limits(kernels):
    """As bench/compare and bench/roofline ask for them."""
    speeds, pairs_by = measure.machine_speeds(kernels, 2)
    assert set(speeds) - {"peak/pairs"} == {"read", "peak/float32", "peak/float64"}
    assert ("peak/pairs" in speeds) == (pairs_by == "instruction")
    for loop, times in speeds.items():
        assert len(times) == 5 and all(1 < speed < 1e4 for speed in times), loop
    assert all(1 < speed < 1e4 for speed in measure.read_bandwidth(kernels, 1))


@pytest.mark.parametrize(
    "option, message",
    [
        ("--machine_threads=2x", "bench_kernels: --machine_threads=2x: expected a whole number from 1 to 1024"),
        ("--machine_threads=0", "bench_kernels: --machine_threads=0: expected a whole number from 1 to 1024"),
        ("--machine_threads=", "bench_kernels: --machine_threads=: expected a whole number from 1 to 1024"),
        ("--benchmark_filter=[", "bench_kernels: no benchmark has such a name"),
        ("--benchmark_filter=none", "bench_kernels: no benchmark has such a name"),
    ],
)
def test_a_wrong_number_or_name_is_told(kernels, option, message):
    done = subprocess.run([kernels, option], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == message


@pytest.mark.parametrize("program", ["bench_kernels", "bench_calls"])
def test_a_wrong_option_or_instruction_set_is_told(kernels, program):
    for arguments, environment in ((["--frobnicate"], {}), ([], dict(ANYFLASH_ISA="NOPE"))):
        done = subprocess.run(
            [kernels.with_name(program), *arguments], env=os.environ | environment, capture_output=True, text=True
        )
        assert done.returncode == 1 and ("frobnicate" in done.stderr or "NOPE" in done.stderr), done.stderr
