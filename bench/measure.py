"""Timing and memory: interleaved in one process, or in processes of their own."""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


def once(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(calls, repeats):
    """For each call its seconds, one a round; in a round each call runs once, after a round to warm up."""
    for call in calls:
        call()
    return list(zip(*([once(call) for call in calls] for _ in range(repeats))))


def spread(seconds):
    """The slowest less the fastest, over the median; None of a single time."""
    return (max(seconds) - min(seconds)) / statistics.median(seconds) if len(seconds) > 1 else None


def median_ratio(ours, theirs):
    """Over the rounds, theirs / ours: above 1, ours is faster. Holds where the machine's speed drifts."""
    return statistics.median(b / a for a, b in zip(ours, theirs))


class LongCalls:
    """One head of 64 channels under local(256): forward and backward as functions without arguments."""

    def __init__(self, length):
        import anyflash as af
        import numpy as np

        rng = np.random.default_rng(0)
        rule = af.local(256)
        q, k, v, dout, out = (rng.standard_normal((1, 1, length, 64), np.float32) for _ in range(5))
        lse = np.full((1, 1, length), 5, np.float32)  # any out and lse will do for time and memory
        self.forward = lambda: af.attention(q, k, v, rule=rule)
        self.backward = lambda: af.attention_backward(dout, q, k, v, out, lse, rule=rule)
        self.output_bytes = {"forward": q.nbytes, "backward": 3 * q.nbytes}


def peak_memory(what, length):
    """MB that a LongCalls' first call takes beyond its inputs and outputs; for a process that does nothing else."""
    calls = LongCalls(length)
    megabytes = lambda field: (
        int(re.search(field + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1e6 * 1024
    )
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is now
    before = megabytes("VmRSS")
    getattr(calls, what)()
    return megabytes("VmHWM") - before - calls.output_bytes[what] / 1e6


def peak_memory_in_own_process(what, length):
    run = subprocess.run([sys.executable, __file__, what, str(length)], capture_output=True, text=True, check=True)
    return float(run.stdout)


def tiny_call():
    """Seconds of a causal call on 1x1x8x16 float32 NumPy arrays, several times: what bench/calls.cpp times from C++."""
    import anyflash as af
    import numpy as np

    q = np.ones((1, 1, 8, 16), np.float32)
    rule, loops = af.causal(), 2000

    def many():
        for _ in range(loops):
            af.attention(q, q, q, rule=rule)

    (seconds,) = interleaved([many], 7)
    return [s / loops for s in seconds]


def report_of_program(program, *options):
    """What a program on Google Benchmark measured: its rows, several of each benchmark, and what it says of itself."""
    try:
        run = subprocess.run([program, "--benchmark_format=json", *options], capture_output=True, text=True)
        if run.returncode != 0:
            said = run.stderr.strip().splitlines()
            raise SystemExit(f"{program} failed: {said[0] if said else f'status {run.returncode}'}")
        report = json.loads(run.stdout)
        return [row for row in report["benchmarks"] if row["run_type"] == "iteration"], report["context"]
    except OSError as error:
        raise SystemExit(f"{program}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError):
        raise SystemExit(f"{program}: not a program on Google Benchmark: it gave no report") from None


def tiny_calls_from_cpp(program):
    """{forward or backward: seconds, several times} of bench/calls.cpp."""
    seconds = {}
    for row in report_of_program(program, "--benchmark_repetitions=7")[0]:
        seconds.setdefault(row["run_name"].removeprefix("tiny_"), []).append(row["real_time"] * 1e-6)
    return seconds


def machine_speeds(program, threads, loops="read|peak"):
    """What bench/kernels.cpp measures of the machine on so many threads: {loop, e.g. peak/float32: its GB/s or GFLOP/s,
    several times}; and what multiplies pairs: an instruction, tiles or nothing."""
    rows, context = report_of_program(
        program,
        f"--benchmark_filter=^({loops})/",
        f"--machine_threads={threads}",
        "--benchmark_repetitions=5",
        "--benchmark_min_time=0.1",
    )
    speeds = {}
    for row in rows:
        loop = row["run_name"].split("/real_time")[0]
        speeds.setdefault(loop, []).append(row["GB/s" if loop == "read" else "GFLOP/s"])
    return speeds, context["pairs"]


def peaks(program, threads):
    """{type of a loop: GFLOP/s of multiply-adds, several times} on so many threads. Pairs that tiles multiply have a peak
    that is not measured: None."""
    speeds, pairs_by = machine_speeds(program, threads, "peak")
    return {loop.removeprefix("peak/"): figures for loop, figures in speeds.items()} | (
        {"pairs": None} if pairs_by == "tiles" else {}
    )


def peak_of(type_, peaks):
    """Of multiply-adds in that type; None if it is not measured. float16 is computed in float32, and so is bfloat16 where
    nothing multiplies pairs."""
    return peaks.get({"float16": "float32", "bfloat16": "pairs"}.get(type_, type_), peaks["float32"])


def read_bandwidth(program, threads):
    """GB/s, several times."""
    return machine_speeds(program, threads, "read")[0]["read"]


def import_time():
    """Seconds of `import anyflash`, NumPy included, in fresh interpreters."""
    code = "import time; start = time.perf_counter(); import anyflash; print(time.perf_counter() - start)"
    run = lambda: subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    run()
    return [float(run().stdout) for _ in range(7)]


def build_time():
    """Seconds to configure and build the library and the program from nothing, two jobs, no compiler cache. Highway's
    sources lie there already."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CMAKE_")}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        configure = ["cmake", "-S", PROJECT, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
        for command in ([*configure, "-DANYFLASH_CUDA=OFF"], ["cmake", "--build", folder, "-j", "2"]):
            run = subprocess.run(command, env=environment | {"CCACHE_DISABLE": "1"}, capture_output=True, text=True)
            if run.returncode != 0:
                raise SystemExit(f"bench/compare: the cold build failed: {(run.stderr or run.stdout).strip()[-300:]}")
        return time.perf_counter() - start


def processor():
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return f"{names[0] if names else 'unknown processor'}, {os.cpu_count()} threads"


# (vendor, family): [(models up to, generation)], ascending. Names of processors leave it out on virtual machines.
GENERATIONS = {
    ("AuthenticAMD", 23): [(0x2F, "Zen"), (0xFF, "Zen 2")],
    ("AuthenticAMD", 25): [(0x0F, "Zen 3"), (0x1F, "Zen 4"), (0x5F, "Zen 3"), (0xAF, "Zen 4")],
    ("AuthenticAMD", 26): [(0x4F, "Zen 5"), (0x5F, None), (0x7F, "Zen 5")],
    ("GenuineIntel", 6): [
        (84, None),
        (85, "Skylake or Cascade Lake"),
        (105, None),
        (108, "Ice Lake"),
        (142, None),
        (143, "Sapphire Rapids"),
        (172, None),
        (174, "Granite Rapids"),
        (206, None),
        (207, "Emerald Rapids"),
    ],
}


def generation(cpuinfo=None):
    """Of the processor's cores, by the family and the model that cpuinfo's text (of this machine if not given) names."""
    text = cpuinfo if cpuinfo is not None else Path("/proc/cpuinfo").read_text()
    fields = dict(re.findall(r"^(vendor_id|cpu family|model)\s*: (\S+)$", text, re.M)[::-1])
    if len(fields) < 3:
        return "unknown generation"
    vendor, family, model = fields["vendor_id"], int(fields["cpu family"]), int(fields["model"])
    known = next((name for last, name in GENERATIONS.get((vendor, family), ()) if model <= last), None)
    return known or f"{vendor} family {family} model {model}"


def has_amx():
    """Whether the processor multiplies tiles of bfloat16."""
    return " amx_bf16 " in Path("/proc/cpuinfo").read_text().replace("\n", " ")


if __name__ == "__main__":
    print(peak_memory(sys.argv[1], int(sys.argv[2])))
