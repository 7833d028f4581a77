"""Checks and times the rungs of learn/gpu on a GPU: learn/climb --device cuda.

Each rung runs in a process of its own: if it hangs or fails, the climb goes on with the next.
"""

import argparse
import ctypes
import itertools
import json
import re
import shutil
import subprocess
import sys
import time

import climb
import ladder
from ladder import Case, Matmul, Softmax, pointer, random, unwritten

import cuda

MODULES = ladder.FOLDER.parent / "build-learn-cuda" / "learn" / "gpu"
SECONDS = 120  # for one rung: checks and times
TOKENS, HEADS, MATRIX = 4096, 32, 4096
ROWS = ((1024, 1024), (4096, 4096))
MASKS = {"words": (dict(window=256), 4096), "boxes": (dict(width=64, window=8), 4096)}  # the case and its tokens
TITLES = {
    "matmul": f"Matrix product, float32, {MATRIX} x {MATRIX} x {MATRIX}",
    "softmax": "Softmax of the rows of a matrix, float32",
    "attention": f"Attention, {HEADS} heads of {TOKENS} tokens; float16 from tensor cores on",
    "masks": "Masks, float16: useful operations alone count",
    "backward": f"Backward, {HEADS} heads of {TOKENS} tokens; float16 from tensor cores on",
}


# What learn/profile asks Nsight Compute for: the sections that learn/profiling.md reads.
SECTIONS = (
    "SpeedOfLight ComputeWorkloadAnalysis MemoryWorkloadAnalysis MemoryWorkloadAnalysis_Tables WarpStateStats "
    "LaunchStats Occupancy"
)
# The lines of a report that the page shows, as they begin.
LINES = (
    "Duration", "Compute (SM) Throughput", "Memory Throughput", "DRAM Throughput", "L1/TEX Cache Throughput",
    "L2 Cache Throughput", "Executed Ipc Active", "L1/TEX Hit Rate", "L2 Hit Rate", "Warp Cycles Per Issued Instruction",
    "Block Size", "Grid Size", "Registers Per Thread", "Dynamic Shared Memory Per Block", "Static Shared Memory Per Block",
    "Theoretical Occupancy", "Achieved Occupancy",
)  # fmt: skip


def calls(rung, axis, only=""):
    """{what: (arguments, work, their arrays)}. Work: operations, or bytes of a softmax. The library has several axes.
    only: those with this in their name."""
    if axis == "matmul":
        a, b, c = random(MATRIX, MATRIX), random(MATRIX, MATRIX, seed=1), unwritten((MATRIX, MATRIX))
        return {"": (Matmul(MATRIX, MATRIX, MATRIX, pointer(a), pointer(b), pointer(c)), 2 * MATRIX**3, (a, b, c))}
    if axis == "softmax":
        made = {}
        for rows, columns in ROWS:
            if only not in f"{rows} x {columns}":
                continue
            x, y = random(rows, columns), unwritten((rows, columns))
            arguments = Softmax(rows, columns, pointer(x), pointer(y))
            made[f"{rows} x {columns}"] = (arguments, 8 * rows * columns, (x, y))
        return made
    cases = {}
    for d, causal in itertools.product((64, 128), (False, True)):
        options = dict(causal=causal, backward=axis == "backward")
        cases[f"d{d} {'causal' if causal else 'full'}"] = (TOKENS, d, options)
    if axis == "masks":
        wanted = [mask for name, mask in MASKS.items() if name in rung.name or rung.axis == "library"]
        cases = {", ".join(f"{key} {x}" for key, x in options.items()): (n, 64, options) for options, n in wanted}
    made = {}
    for name, (tokens, d, options) in cases.items():
        if only not in name:
            continue
        case = Timed(tokens, tokens, d, HEADS, type=rung.type, **options)
        made[name] = (case.arguments(), case.operations(), case)
    return made


class Timed(Case):
    """Without the reference: its score matrices would take minutes. Any out and lse do for the time. All heads have the
    numbers of one, since to make 32 heads of them takes longer than most rungs."""

    def random(self, heads, *shape, seed):
        return ladder.np.tile(random(1, *shape, seed=seed).astype(self.type), (heads, 1, 1))

    def forward(self):
        return 0, 10

    def operations(self):
        one = Case(self.queries, self.keys, 8, 1, causal=self.causal, window=self.window, width=self.width)
        return (10 if self.backward else 4) * self.d * self.heads * int(one.sees().sum())


def run_one(name):
    """In the process of one rung: a line of JSON for each call, or a line that says what is wrong."""
    rung = next(rung for rung in ladder.rungs("gpu") if rung.name == name).load(MODULES)
    if reason := rung.wrong():
        print(json.dumps(dict(wrong=reason)), flush=True)
        return
    axes = ("attention", "masks", "backward") if rung.axis == "library" else (rung.axis,)
    for axis in axes:
        for what, (arguments, work, _) in calls(rung, axis).items():
            print(json.dumps(dict(axis=axis, call=what, seconds=rung.seconds(arguments, 7), work=work)), flush=True)
        ladder.memory.release()  # the results of timed calls are not wanted


def run_once(name):
    """For Nsight Compute: one call, of the largest size without a mask."""
    rung = next(rung for rung in ladder.rungs("gpu") if rung.name == name).load(MODULES)
    only = {"softmax": "4096", "attention": "d128 full", "backward": "d128 full"}.get(rung.axis, "")
    made = calls(rung, rung.axis, only)
    rung(next(iter(made.values()))[0])
    ladder.memory.fetch()


def excerpt(report):
    """The lines of a report that learn/profiling.md shows: those of LINES, and the sentence about the largest stall."""
    kept = [" ".join(line.split()) for line in report if line.strip().startswith(LINES)]
    words = " ".join(" ".join(report).split())
    stall = re.search(
        r"On average, each warp of this (?:kernel|workload) spends [\d.]+ cycles being stalled [^.]*\.", words
    )
    return kept + ([stall[0].strip()] if stall else [])


def profile(rungs, card):
    """learn/profiles/RUNG.txt of each: Nsight Compute's report, as text. Its main lines also go into profiling.md."""
    ncu = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if not ncu:
        raise SystemExit("learn/profile: no ncu: install Nsight Compute (it is part of the CUDA toolkit)")
    folder = ladder.FOLDER / "profiles"
    folder.mkdir(exist_ok=True)
    for rung in rungs:
        command = [ncu, *(word for section in SECTIONS.split() for word in ("--section", section))]
        command += [sys.executable, __file__, "--once", rung.name]
        found = subprocess.run(command, capture_output=True, text=True)
        if "ERR_NVGPUCTRPERM" in found.stdout + found.stderr:
            raise SystemExit("learn/profile: ERR_NVGPUCTRPERM: counters are not for this user; see learn/profiling.md")
        lines = found.stdout.splitlines()
        report = [line.rstrip() for line in lines if not line.startswith("==")]
        if found.returncode or not any("Speed Of Light" in line for line in report):
            wrong = (found.stderr + found.stdout).strip().splitlines() or [f"exit status {found.returncode}"]
            raise SystemExit(f"learn/profile: {rung.name}: {wrong[-1]}")
        path = folder / f"{rung.name}.txt"
        title = f"learn/profile {rung.name}, {card}, {time.strftime('%Y-%m-%d')}"
        path.write_text("\n".join([title, *report]) + "\n")
        shown = f"<!-- {rung.name}: written by learn/profile -->\n"
        pattern = re.compile(rf"({re.escape(shown)}).*?(<!-- end -->)", re.S)
        block = "```\n" + "\n".join([title, *excerpt(report)]) + "\n```\n"
        page = ladder.FOLDER / "profiling.md"
        page.write_text(pattern.sub(lambda found: found[1] + block + found[2], page.read_text()))
        print(f"{path.relative_to(ladder.FOLDER.parent)}: {len(report)} lines", flush=True)


def test_function(path):
    """In the process of one test of a device function."""
    module = ctypes.CDLL(str(MODULES / f"{path}.so"))
    module.test.restype = ctypes.c_char_p
    found = module.test()
    print(json.dumps(dict(wrong=found.decode()) if found else dict(axis="test", call=path)), flush=True)


def run_torch():
    """The same calls by PyTorch: torch.softmax, and cuBLAS in float32 behind torch.matmul."""
    import torch

    def seconds(function):
        times = []
        for _ in range(10):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(20):
                function()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 20e3)
        return sorted(times)[5]

    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda") for _ in range(2))
    print(json.dumps(dict(axis="matmul", call="", seconds=seconds(lambda: torch.matmul(a, b)), work=2 * MATRIX**3)))
    for rows, columns in ROWS:
        x = torch.randn(rows, columns, device="cuda")
        time_of = seconds(lambda: torch.softmax(x, -1))
        print(json.dumps(dict(axis="softmax", call=f"{rows} x {columns}", seconds=time_of, work=8 * rows * columns)))


def in_process(*what):
    """The rows that another process prints, and what is wrong with it, or None."""
    process = subprocess.Popen(
        [sys.executable, __file__, *what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, error = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, error = process.communicate()
        error = f"not done after {SECONDS} s"
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    wrong = next((row["wrong"] for row in rows if "wrong" in row), None)
    if not wrong and process.returncode:
        wrong = (error.strip() or f"exit status {process.returncode}").splitlines()[-1]
    return [row for row in rows if "wrong" not in row], wrong


def described(row):
    if row["axis"] == "softmax":
        beside = f", torch.softmax {1e6 * row['peer']:.1f} us" if row.get("peer") else ""
        return f"{1e6 * row['seconds']:.1f} us, {row['work'] / row['seconds'] / 1e9:.0f} GB/s{beside}"
    text = f"{row['rate']:.3g} TFLOP/s"
    if row.get("peer"):
        text += (
            f", {100 * row['peer'] / row['seconds']:.0f} % of {'cuBLAS' if row['axis'] == 'matmul' else 'the library'}"
        )
    return text + (f", {100 * row['rate'] / row['peak']:.0f} % of the peak" if row["peak"] else "")


def climb_all(rungs, card, peers):
    """Rows of all rungs, printed as they come."""
    rows, before, failed = [], {}, 0
    for number, rung in enumerate(rungs, 1):
        found, wrong = in_process("--one", rung.name)
        for row in found:
            rate, key = row["work"] / row["seconds"] / 1e12, (row["axis"], row["call"])
            row |= dict(rung=rung.name, rate=rate, before=rate / before[key] if key in before else None)
            row |= dict(peer=peers.get(key), peak=cuda.peak(card, rung.type is not ladder.np.float32))
            before[key] = rate
            rows.append(row)
            times = f", {row['before']:.2f} x the rung before" if row["before"] else ""
            print(
                f"[{number}/{len(rungs)}] {' '.join(filter(None, (rung.name, row['call'])))}: right, {described(row)}{times}",
                flush=True,
            )
        if wrong:
            failed += 1
            print(f"[{number}/{len(rungs)}] {rung.name} is wrong: {wrong}", flush=True)
    return rows, failed


def table(axis, rows, rungs):
    what = list(dict.fromkeys(row["call"] for row in rows))
    unit = "us" if axis == "softmax" else "TFLOP/s"
    peer = {"matmul": "of cuBLAS", "softmax": "times as fast as torch"}.get(axis, "of the library")
    heads = ["rung", "what changed", *(f"{call}, {unit}".strip(", ") for call in what), "times the rung before", peer]
    heads += ["of the peak"] * (axis != "softmax")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, of_rung in itertools.groupby(rows, lambda row: row["rung"]):
        by_call, rung = {row["call"]: row for row in of_rung}, next(r for r in rungs if r.name == name)
        some = [by_call[call] for call in what if call in by_call]
        figures = {row["call"]: 1e6 * row["seconds"] if axis == "softmax" else row["rate"] for row in some}
        cells = [f"[{name}](gpu/{rung.path.name})", rung.changed.rstrip(".").split(": ")[0]]
        cells += [climb.figure(figures[call]) if call in figures else "" for call in what]
        cells.append(climb.span([row["before"] for row in some if row["before"]], "{:.2f}"))
        shares = [row["peer"] / row["seconds"] for row in some if row["peer"]]
        cells.append(
            climb.span(shares, "{:.2f}") if axis == "softmax" else climb.span([100 * x for x in shares], "{:.0f}", " %")
        )
        if axis != "softmax":
            cells.append(climb.span([100 * row["rate"] / row["peak"] for row in some if row["peak"]], "{:.0f}", " %"))
        lines.append("| " + " | ".join(cells) + " |")
    peers = {row["call"]: row["peer"] for row in rows if row["peer"]}
    if axis == "softmax" and peers:
        cells = ["", "torch.softmax", *(climb.figure(1e6 * peers[call]) for call in what), "", "1"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(record, path):
    rows = [row for row in record["rows"] if row["call"] in ("d64 full", "") and row["axis"] != "softmax"]
    bars = [(row["rung"], row["rate"], row["axis"]) for row in rows]
    climb.draw_bars(bars, f"TFLOP/s, 64 channels, full; {record['machine']}, {record['date']}", path)


def write(record, rungs):
    """learn/results/DEVICE.json and .svg, the tables of learn/README.md, and the figure in each rung."""
    name = re.sub(r"[^a-z0-9]+", "-", record["machine"].lower()).strip("-")
    climb.RESULTS.mkdir(exist_ok=True)
    (climb.RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(record, climb.RESULTS / f"{name}.svg")
    text = f"{record['machine']}, {record['date']}. The library's calls are float16 throughout.\n\n![TFLOP/s of each rung](results/{name}.svg)\n"
    for axis, title in TITLES.items():
        if rows := [row for row in record["rows"] if row["axis"] == axis]:
            text += f"\n### {title}\n\n{table(axis, rows, rungs)}\n"
    pattern = re.compile(r"(<!-- cuda: written by learn/climb --write -->\n).*?(<!-- end of cuda -->)", re.S)
    climb.PAGE.write_text(pattern.sub(lambda found: found[1] + text + found[2], climb.PAGE.read_text()))
    for rung in rungs:
        rows = [row for row in record["rows"] if row["rung"] == rung.name]
        if rows:
            soft = rung.axis == "softmax"
            figures = "; ".join(
                f"{row['call']} {climb.figure(1e6 * row['seconds'] if soft else row['rate'])}".strip() for row in rows
            )
            line = f"// Measured ({record['machine']}): {figures} {'us' if soft else 'TFLOP/s'}."
            rung.path.write_text(re.sub(r"// Measured.*", lambda found: line, rung.path.read_text(), count=1))


def build(rungs, tests, capability):
    """Compiles them; those that need Hopper only there. The rungs and tests that can run."""
    hopper = capability == 90
    sources = [path for path in [rung.path for rung in rungs] + tests if hopper or not cuda.needs_hopper(path)]
    sources = cuda.without_cute(sources)
    failed = cuda.compile_all(sources, MODULES, lambda source: "sm_90a" if hopper else f"sm_{capability}")
    for source, words in failed.items():
        print(f"{source.name} does not compile:\n{words}", flush=True)
    left = [path for path in sources if path not in failed]
    return [rung for rung in rungs if rung.path in left], [path for path in tests if path in left]


def main():
    parser = argparse.ArgumentParser(
        "learn/climb --device cuda", description="Checks and times the rungs of learn/gpu."
    )
    parser.add_argument("rungs", nargs="*", metavar="RUNG", help="part of a rung's name (default: all)")
    parser.add_argument("--device", choices=["cuda"], default="cuda")
    parser.add_argument("--write", action="store_true", help="write figures, tables and plots into learn/")
    parser.add_argument(
        "--without-library", action="store_true", help="no share of the library, whose build takes long"
    )
    parser.add_argument("--profile", action="store_true", help="instead, Nsight Compute's reports into learn/profiles")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    parser.add_argument("--only-parse", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.write and asked.rungs:
        parser.error("--write: only with all rungs")
    every = ladder.rungs("gpu")
    chosen = climb.choose(every, asked.rungs)
    if asked.only_parse:
        return None
    ladder.memory = cuda.open_host(MODULES) if not asked.one and not asked.once else ladder.memory
    if asked.one == "torch":
        return run_torch()
    if asked.one:
        ladder.memory = cuda.CudaMemory(ctypes.CDLL(str(MODULES / "host.so")))
        return test_function(asked.one) if asked.one.startswith("test_") else run_one(asked.one)
    if asked.once:
        ladder.memory = cuda.CudaMemory(ctypes.CDLL(str(MODULES / "host.so")))
        return run_once(asked.once)
    card = ladder.memory.host.card().decode()
    rungs, tests = build(
        chosen, [] if asked.profile else sorted(cuda.SOURCES.glob("test_*.cu")), ladder.memory.host.capability()
    )
    if asked.profile:
        return profile(rungs, card)
    print(f"{card}: {len(rungs)} rungs, {len(tests)} tests of device functions", flush=True)
    for path in tests:
        _, wrong = in_process("--one", path.stem)
        print(f"{path.stem}: {wrong or 'right'}", flush=True)
    peers = {}
    for peer in ["torch"] + ["26_library"] * (not asked.without_library):
        found, wrong = in_process("--one", peer)
        peers |= {(row["axis"], row["call"]): row["seconds"] for row in found}
        figures = [f"{row['axis']} {row['call']} {1e6 * row['seconds']:.1f} us" for row in found]
        print(f"{peer}: {wrong or '; '.join(figures)}", flush=True)
    rows, failed = climb_all(rungs, card, peers)
    if asked.write:
        write(dict(machine=card, date=time.strftime("%Y-%m-%d"), rows=rows), every)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
