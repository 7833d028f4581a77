"""bench/compare: wrong options, its rows, its summary, and the tables it writes into the documents."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "bench"))

import chart
import compare
import measure
import page
from table import Table

COLUMNS = {"what", "device", "type", "d", "causal", "sequence", "figure", "unit", "peer", "peer_figure", "ratio"}


def run(*arguments):
    return subprocess.run(
        [sys.executable, PROJECT / "bench" / "compare.py", *map(str, arguments)], capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--rounds", "0"], "argument --rounds: '0', expected a whole number from 1 to 1000"),
        (["--rounds", "2.5"], "argument --rounds: '2.5', expected a whole number"),
        (["--threads", "-1"], "argument --threads: "),
        (["--threads", "1", "9999"], "argument --threads: '9999', expected a whole number from 1 to 1024"),
        (["--types", "int8"], "argument --types: invalid choice: 'int8'"),
        (["--parts", "all"], "argument --parts: invalid choice: 'all'"),
        (
            ["--device", "cuda", "--parts", "scaling"],
            "--parts: no 'scaling' on cuda, expected one of calls, torch, tf32",
        ),
        (["--parts", "packed"], "--parts: no 'packed' on cpu, expected one of calls, torch, short"),
        (["--device", "tiles", "--parts", "torch"], "--parts: no 'torch' on tiles, expected one of constants, product"),
        (["--device", "tiles", "--threads", "2"], "--threads: only on a CPU"),
        (["--device", "tiles", "--add", "--json", __file__], "--add: not with --device tiles"),
        (["--device", "cuda", "--build"], "--build: only on a CPU"),
        (["--gpus", "2"], "--gpus: only with --device cuda, and without --parts and --add"),
        (["--device", "cuda", "--gpus", "1"], "argument --gpus: '1', expected a whole number from 2 to 64"),
        (["--threads", "4", "--device", "cuda"], "--threads: only on a CPU"),
        (["--heads", "0", "--parts", "torch"], "argument --heads: '0', expected a whole number from 1 to 1024"),
        (["--heads", "16"], "--heads, --sequence: only with --parts torch on a CPU"),
        (["--sequence", "4096", "--parts", "torch", "short"], "--heads, --sequence: only with --parts torch on a CPU"),
        (["--sequence", "64", "--parts", "torch", "--device", "cuda"], "--sequence: only with --parts torch on a CPU"),
        (["--add"], "--add: needs --json with a file that is there"),
        (["--json", "no/where.json"], "--json: no/where.json cannot be written"),
        (["--json", "/"], "--json: / cannot be written"),
        (["--calls", "/no/program", "--parts", "calls"], "--calls: no program /no/program"),
        (["--calls", "/tmp", "--parts", "calls"], "--calls: no program /tmp"),
        (["--add", "--json", __file__], "not a file that bench/compare --json wrote"),
        (["--kernels", "/no/program", "--parts", "decode"], "--kernels: no program /no/program"),
        (["--publish", "no.json"], "no.json: No such file or directory"),
        (["--publish", __file__], "not a file that bench/compare --json wrote"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_wrong_options(arguments, message):
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("bench/compare: ") and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("option", [["--device", "cuda"], ["--device=cuda"]], ids=" ".join)
def test_a_gpu_is_measured_with_the_interpreter_for_gpus(option):
    env = os.environ | {"ANYFLASH_TEST_PYTHON": "/no/python", "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        [PROJECT / "bench" / "compare", *option], env=env, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (1, "compare: no interpreter /no/python\n")


@pytest.mark.parametrize(
    "module, arguments",
    [("torch", ["--parts", "torch"]), ("anyflash", ["--parts", "masks"]), ("torch", ["--device", "cuda"])],
)
def test_a_missing_module_is_told_in_one_line(tmp_path, module, arguments):
    """Its place is taken by one that cannot be imported."""
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{module}'\")")
    environment = os.environ | dict(PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    done = subprocess.run(
        [sys.executable, PROJECT / "bench" / "compare.py", *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1 and done.stderr == (
        f"bench/compare: No module named '{module}'; bench/compare (not compare.py) sets up what it needs\n"
    )


@pytest.mark.parametrize("text", ["[" * 100000, "[]", "{}", "[1]"], ids=["deep", "empty", "an object", "numbers"])
def test_a_record_that_is_none(tmp_path, text):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(SystemExit) as caught:
        page.read(tmp_path / "rows.json", to_publish=False)
    assert str(caught.value) == f"bench/compare: {tmp_path / 'rows.json'}: not a file that bench/compare --json wrote"


@pytest.mark.parametrize(
    "script, reason",
    [
        ("echo no report", "not a program on Google Benchmark: it gave no report"),
        ("echo '{}'", "not a program on Google Benchmark: it gave no report"),
        ("echo one >&2; echo two >&2; exit 3", "failed: one"),
        ("exit 3", "failed: status 3"),
    ],
)
def test_a_program_that_gives_no_report_is_told_in_one_line(tmp_path, script, reason):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with pytest.raises(SystemExit) as caught:
        measure.report_of_program(program)
    assert str(caught.value) in (f"{program}: {reason}", f"{program} {reason}")


def test_rows_of_long_sequences(tmp_path):
    """Also that one head of 131,072 tokens takes under 250 MB beside its tensors."""
    done = run("--parts", "long", "--rounds", "1", "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 12 and all(COLUMNS <= set(row) for row in rows)
    growth = {row["sequence"]: row["peer"] for row in rows if row["unit"] == "ns"}
    assert growth == {16384: "", 32768: "16384 tokens", 65536: "32768 tokens", 131072: "65536 tokens"}
    memory = {(row["what"].split()[0], row["sequence"]): row["figure"] for row in rows if row["unit"] == "MB"}
    assert set(memory) == {(what, length) for what in ("forward", "backward") for length in (16384, 131072)}
    assert all(1 < megabytes < 250 for megabytes in memory.values())
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:14]] == [row["what"].split()[:2] for row in rows]


def row(ratio, least=None, **more):
    return (
        dict(
            what="forward",
            device="cpu",
            type="float32",
            d=64,
            causal=False,
            sequence=2048,
            figure=100.0,
            unit="GFLOP/s",
            peer="torch 1.0",
            peer_figure=100 / ratio,
            ratio=ratio,
            threads=1,
            spread=0.05,
            peer_spread=None,
            least_ratio=least,
            most=None,
            held=least is None or ratio >= least,
            machine="A machine, 2 threads",
            date="2030-01-01",
        )
        | more
    )


ROWS = [
    row(0.8, 0.7),
    row(0.5, 0.6, what="backward", causal=True),
    row(0.25, 0.8, what="local(8)", peer="full()"),
    row(1, what="memory", figure=260.0, unit="MB", most=250, held=False) | dict(peer="", peer_figure=None, ratio=None),
]


def blocks(rows, records=None):
    """The README's and docs/performance.md's, without what is recorded here."""
    return [text for _, _, text in page.blocks(rows, records or {})]


def test_the_summary_ends_with_the_worst_ratio():
    lines = page.summary(ROWS).splitlines()
    assert "limits: 1 of 4 held" in lines and sum("missed:" in line for line in lines) == 3
    assert lines[-1] == "worst ratio: 0.50 x torch 1.0, backward float32 64 causal 2048, 1 thread"


def test_the_tables_are_written_between_the_marks(tmp_path):
    pages = [Path(shutil.copy(path, tmp_path)) for path in page.PAGES]
    before = [page.BLOCK["figures"].split(path.read_text()) for path in pages]
    for _ in range(2):  # twice gives the same
        page.publish(ROWS, pages)
        readme, performance = (path.read_text() for path in pages)
        assert "docs/pictures/speed-cpu.svg" in readme and "A machine" in readme
        assert "0.50" in (tmp_path / "pictures" / "speed-cpu.svg").read_text()
        assert "| memory | float32 | 64 |  | 2048 | 1 | 260 MB (5 %) |  |  |  |  | at most 250, MISSED |" in performance
        assert "worst ratio: 0.50" in performance
        assert [page.BLOCK["figures"].split(path.read_text()) for path in pages] == before


@pytest.mark.parametrize(
    "rows, reason",
    [
        ([], "no rows beside PyTorch in float32 on one thread, which the README shows"),
        (ROWS[2:], "no rows beside PyTorch in float32 on one thread, which the README shows"),
        ([row(0.8)], "no rows beside PyTorch in float32 on one thread, which the README shows"),
        (ROWS + [{}], "not a file that bench/compare --json wrote"),
        (
            [{name: value for name, value in row(0.8, 0.7).items() if name != "machine"}],
            "not a file that bench/compare --json wrote",
        ),
    ],
)
def test_a_file_without_the_rows_to_show_is_not_published(tmp_path, rows, reason):
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with pytest.raises(SystemExit) as caught:
        page.read(tmp_path / "rows.json")
    assert str(caught.value) == f"bench/compare: {tmp_path / 'rows.json'}: {reason}"


def test_a_record_with_parts_has_a_table_for_each():
    rows = [
        row(1.2, 1.15, part="torch"),
        row(9, 1.15, part="torch", peer="torch 1.0 math", causal=True),
        row(9, 1.3, part="short", sequence=64),
        row(9, 1.1, part="sizes", d=40),
    ]
    readme, performance = blocks(rows)
    assert [line for line in performance.splitlines() if line.startswith("##")] == [
        "### Beside PyTorch",
        "### Short sequences",
        "### Other head sizes",
    ]
    assert performance.count("| what | type |") == 3 and "| at least 1.15 x |" in performance
    assert "torch 1.0" in readme and "math" not in readme
    assert chart.cpu_lines([rows]) == [("float32, forward", [(1.2, "unknown generation"), (9, "unknown generation")])]


GENERATIONS = {
    "Zen 4 figures": [row(1.2, 1.15, generation="Zen 4", peak=117.0)],
    "AMX figures": [row(1.5, 1.2, sequence=4096, threads=16, shape="1x16x4096", machine="A server", amx=True)],
}


def test_the_readme_has_a_dot_for_each_generation():
    rows = [row(2.2, 1.15, part="torch", generation="Zen 5", peak=250.0), row(3, 1.15, part="torch", causal=True)]
    readme, performance = blocks(rows, GENERATIONS)
    assert "- Zen 5: A machine, 2 threads; measured on 1 thread, 1x4x2048 (batch x heads x tokens)" in readme
    assert "- Zen 4: A machine" in readme and "; measured on 16 threads, 1x16x4096" in readme
    ((label, dots),) = chart.cpu_lines([rows, *GENERATIONS.values()])
    assert label == "float32, forward" and [ratio for ratio, _ in dots] == [2.2, 3, 1.2, 1.5]
    assert performance.startswith("A machine, 2 threads, 2030-01-01. Zen 5, peak on 1 thread: float32 250 GFLOP/s.\n")
    assert "| 100 GFLOP/s (5 %) | 40 % | torch 1.0 |" in performance
    assert [name for _, name, _ in page.blocks(GENERATIONS["Zen 4 figures"], {"figures": rows})] == [
        "figures",
        "Zen 4 figures",
    ]


def test_the_chart_takes_the_faster_path_of_a_peer():
    case = dict(part="torch", type="float16")
    rows = [row(20, 1, what="backward", **case), row(2, 1, what="backward, beside its fastest path", **case)]
    assert chart.cpu_lines([rows]) == [("float16, backward", [(2, "unknown generation")])]


@pytest.mark.parametrize(
    "vendor, family, model, named",
    [
        ("AuthenticAMD", 26, 2, "Zen 5"),
        ("AuthenticAMD", 25, 17, "Zen 4"),
        ("AuthenticAMD", 25, 1, "Zen 3"),
        ("AuthenticAMD", 25, 97, "Zen 4"),
        ("AuthenticAMD", 23, 49, "Zen 2"),
        ("GenuineIntel", 6, 143, "Sapphire Rapids"),
        ("GenuineIntel", 6, 207, "Emerald Rapids"),
        ("GenuineIntel", 6, 999, "GenuineIntel family 6 model 999"),
        ("AuthenticAMD", 27, 1, "AuthenticAMD family 27 model 1"),
    ],
)
def test_the_generation_of_a_processor(vendor, family, model, named):
    one = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: A CPU\n"
    assert measure.generation(one + one.replace("processor\t: 0", "processor\t: 1")) == named
    assert measure.generation("Processor: of another kind\n") == "unknown generation"


def test_a_row_says_the_peak_of_its_type(monkeypatch):
    """Measured once for a number of threads, and only where a program measures it."""
    asked = []
    monkeypatch.setattr(
        measure,
        "peaks",
        lambda program, threads: (
            asked.append(threads) or {"float32": [threads * 1e2, threads * 2e2], "float64": [50.0], "pairs": None}
        ),
    )
    monkeypatch.setattr(measure, "generation", lambda: "Zen 9")
    table = Table("cpu", "A machine")
    table.add("forward", 70.0, "GFLOP/s", threads=1)
    table.kernels = Path("a program")
    for type_, threads in (("float32", 1), ("float64", 1), ("bfloat16", 1), ("float16", 2), ("float32", 2)):
        table.add("forward", 70.0, "GFLOP/s", type=type_, threads=threads)
    table.add("decode", 7.0, "GB/s", threads=1)
    assert [row.get("peak") for row in table.rows] == [None, 200, 50, None, 400, 400, None] and asked == [1, 2]
    assert {row["generation"] for row in table.rows} == {"Zen 9"}


GPU = dict(device="cuda", type="bfloat16", unit="TFLOP/s", threads=0, machine="A GPU, PyTorch 3.0")
GPU_ROWS = [
    row(1.2, 1.1, part="torch", peer="torch flash", figure=600.0, **GPU),
    row(1.5, 1.1, part="torch", peer="torch flash", figure=500.0, **GPU),
    row(1.3, 1.1, part="torch", peer="torch flash", what="backward", figure=550.0, **GPU),
    row(0.9, 1, part="masks", peer="FlexAttention", what="forward, a rule", **GPU),
]


def test_rows_of_a_gpu_have_blocks_of_their_own(tmp_path):
    pages = [Path(shutil.copy(path, tmp_path)) for path in page.PAGES]
    page.publish(ROWS, pages)
    page.publish(GPU_ROWS, pages)
    readme, performance = (path.read_text() for path in pages)
    assert "docs/pictures/speed-gpu.svg" in readme and "A GPU, PyTorch 3.0" in readme
    picture = (tmp_path / "pictures" / "speed-gpu.svg").read_text()
    assert picture.count("<circle") == 4 + 2 and "1.20 to 1.50" in picture, "a dot for each row and each peer"
    assert "### Masks given as rules, on a GPU" in performance and "at least 1 x, MISSED |" in performance
    assert "| memory | float32 | 64 |  | 2048 | 1 | 260 MB (5 %) |  |" in performance, "the rows of the CPU stay"


@pytest.mark.parametrize("best", [["FA3", "FA4"], ["FA3"], []])
def test_the_readme_says_which_of_the_best_peers_are_missing(best):
    peers = dict.fromkeys(["cuDNN", "torch flash", *best], 2.0)
    rows = [row(0.7, 1.1, part="torch", peer="torch flash", peers=peers, **GPU | dict(type="bfloat16"))]
    words = page.blocks(rows)[0][2]
    assert f"the fastest of {', '.join(peers)} in the same run" in words
    missing = " and ".join(sorted({"FA3", "FA4"}.difference(best)))
    assert (f"Not in the run: {missing}" in words) if missing else ("Not in the run" not in words)


AMX_ROWS = [
    row(1.4, 1.2, part="torch", type=type_, sequence=4096, threads=16, shape="1x16x4096", machine="A server", amx=True)
    for type_ in ("bfloat16", "float32")
]


def test_rows_of_another_shape_have_a_block_of_their_own(tmp_path, monkeypatch):
    """Beside those of the CPU; of theirs the README shows the range."""
    records = {"figures": tmp_path / "cpu.json"}
    records["figures"].write_text(json.dumps(ROWS))
    monkeypatch.setattr(page, "CPU_RECORDS", records)
    pages = [Path(shutil.copy(path, tmp_path)) for path in page.PAGES]
    page.publish(ROWS, pages)
    readme, before = (path.read_text() for path in pages)
    (tmp_path / "rows.json").write_text(json.dumps(AMX_ROWS))
    page.publish(page.read(tmp_path / "rows.json"), pages)
    assert pages[0].read_text() == readme.replace(
        "torch 1.0, 2030-01-01\n<!-- end of figures",
        "torch 1.0, 2030-01-01\n- unknown generation: A server; measured on 16 threads, 1x16x4096 (batch x heads x tokens), "
        "beside torch 1.0, 2030-01-01\n<!-- end of figures",
    )
    performance = pages[1].read_text()
    found = page.BLOCK["AMX figures"].search(performance)
    assert "A server, 2030-01-01. unknown generation, peak not recorded.\n\n### Beside PyTorch, 1x16x4096\n" in found[0]
    assert found[0].count("| forward | ") == 2 and "| 1.40 | at least 1.2 x |" in found[0]
    assert page.BLOCK["AMX figures"].split(performance) == page.BLOCK["AMX figures"].split(before)
    assert "A machine" in page.BLOCK["figures"].search(performance)[0]


def test_rows_of_another_shape_of_a_cpu_without_amx_are_not_published(tmp_path):
    without = [{name: value for name, value in row.items() if name != "amx"} for row in AMX_ROWS]
    for rows in without, AMX_ROWS[:1] + without[1:], [row | {"amx": False} for row in AMX_ROWS]:
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        done = run("--publish", tmp_path / "rows.json")
        assert done.returncode == 1 and done.stderr == (
            f"bench/compare: {tmp_path / 'rows.json'}: rows with --heads or --sequence, which the documents show of a "
            "CPU with AMX alone\n"
        )
    assert len(page.read(tmp_path / "rows.json", to_publish=False)) == 2, "rows may be added to it"


@pytest.mark.parametrize(
    "change",
    [dict(shape=shape) for shape in ("foo", "1xx4096", [1, 2], "1x" + "9" * 5000 + "x1")] + [dict(device="cuda")],
    ids=range(5),
)
@pytest.mark.parametrize("to_publish", [False, True])
def test_no_such_shape(tmp_path, change, to_publish):
    (tmp_path / "rows.json").write_text(json.dumps([row | change for row in AMX_ROWS]))
    with pytest.raises(SystemExit, match="not a file that bench/compare --json wrote"):
        page.read(tmp_path / "rows.json", to_publish)


@pytest.mark.parametrize("device, has_amx, said", [("cpu", True, True), ("cpu", False, None), ("cuda", True, None)])
def test_a_row_says_if_the_cpu_has_amx(monkeypatch, device, has_amx, said):
    monkeypatch.setattr(measure, "has_amx", lambda: has_amx)
    table = Table(device, "A machine")
    table.add("forward", 700.0, "GFLOP/s")
    assert table.rows[0].get("amx") is said


def test_a_row_beside_a_peer_says_its_rounds():
    table = Table("cpu", "A machine")
    table.rates("forward", [1, 2, 3], [2, 3, 4], 1, "GFLOP/s")
    table.times("forward", [1, 2], [2, 3], "ms", 1e3)
    table.add("memory", 1.0, "MB")
    assert [row.get("rounds") for row in table.rows] == [3, 2, None]


def test_a_row_shows_all_peers_and_its_share_of_a_product():
    dense = row(
        0.9, 1, part="torch", peer="FA3", figure=300.0, peers={"FA3": 333.0, "cuDNN": 321.4}, product=600.0, **GPU
    )
    block = page.performance_block([dense])
    assert "| 50 % | FA3 (cuDNN 321) |" in block and "| of a product |" in block
    assert "| FlexAttention |" in page.performance_block([GPU_ROWS[3]])


def test_the_parts_of_each_device_are_in_the_help():
    parts = "on a CPU: " + ", ".join(compare.PARTS) + "; on a GPU: " + ", ".join(compare.GPU_PARTS)
    assert parts in " ".join(run("--help").stdout.split())


def test_parts_of_a_gpu_that_are_measured_anew(tmp_path):
    table = Table("cuda", "A GPU")
    table.part, table.earlier = "torch", [GPU_ROWS[3]]
    table.add("forward", 700.0, "TFLOP/s", ratio=1.6)
    table.write(tmp_path / "rows.json")
    assert [(row["part"], row["figure"]) for row in page.read(tmp_path / "rows.json")] == [
        ("torch", 700),
        ("masks", 100),
    ]


def earlier_of(
    tmp_path, rows, parts, build=False, machine="A machine, 2 threads", types=compare.TYPES, heads=None, sequence=None
):
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    given = SimpleNamespace(
        json=tmp_path / "rows.json", parts=parts, build=build, types=types, heads=heads, sequence=sequence
    )
    return [row["part"] for row in compare.earlier_rows(given, machine)]


def test_what_is_kept_of_parts_measured_before(tmp_path):
    """Rows beside PyTorch need not be among them; a cold build counts as a part."""
    rows = [row(1, part="masks"), row(1, part="rules"), row(1, part="build")]
    assert earlier_of(tmp_path, rows, ["masks"]) == ["rules", "build"]
    assert earlier_of(tmp_path, rows, ["masks"], build=True) == ["rules"]
    with pytest.raises(SystemExit) as caught:
        earlier_of(tmp_path, rows, ["masks"], machine="Another, 64 threads")
    assert str(caught.value) == (
        f"bench/compare: --add: {tmp_path / 'rows.json'} has rows of A machine, 2 threads, this is Another, 64 threads"
    )


def test_types_beside_torch_that_are_not_measured_anew_are_kept(tmp_path):
    rows = [row(1, part="torch"), row(1, part="torch", type="bfloat16"), row(1, part="decode")]
    assert earlier_of(tmp_path, rows, ["torch"], types=("float32",)) == ["torch", "decode"]
    assert earlier_of(tmp_path, rows, ["torch", "decode"], types=("float64",)) == ["torch", "torch"]


def test_rows_of_two_shapes_are_not_put_together(tmp_path):
    kept = earlier_of(tmp_path, AMX_ROWS, ["torch"], machine="A server", types=("float32",), heads=16, sequence=4096)
    assert kept == ["torch"]
    usual = [row | {"shape": "1x4x4096"} for row in AMX_ROWS]
    assert earlier_of(tmp_path, usual, ["torch"], machine="A server", types=("float32",), sequence=4096) == ["torch"]
    plain = [row(1, part="torch")]
    for rows, machine, heads in (
        (AMX_ROWS, "A server", None),
        (AMX_ROWS, "A server", 8),
        (AMX_ROWS, "A server", 16),
        (plain, "A machine, 2 threads", 16),
        ([*plain, *AMX_ROWS], None, 16),
    ):
        with pytest.raises(SystemExit) as caught:
            earlier_of(tmp_path, rows, ["torch"], machine=machine, heads=heads)
        assert str(caught.value).endswith(
            "rows.json has rows of other heads or another sequence"
            if machine
            else "not a file that bench/compare --json wrote"
        )
    with pytest.raises(SystemExit, match="has rows of other heads"):
        earlier_of(tmp_path, AMX_ROWS, ["torch"], machine="A server", sequence=4096)


def test_parts_stand_in_their_order_with_all_their_days():
    rows = page.in_order([row(1, part="build"), row(1, part="masks", date="2030-01-02"), row(1.2, 1.15, part="torch")])
    assert [row["part"] for row in rows] == ["torch", "masks", "build"]
    readme, performance = blocks(rows)
    assert performance.startswith("A machine, 2 threads, 2030-01-01 and 2030-01-02. unknown generation, peak not rec")
    assert "- unknown generation: A machine, 2 threads; measured on 1 thread, 1x4x2048" in readme


def test_a_file_with_the_rows_is_read(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    assert page.read(tmp_path / "rows.json") == ROWS


def test_the_gpu_chart_has_a_dot_for_each_row_beside_another_library():
    rows = page.read(page.GPU_RECORD)
    own = ("without", "the same")  # without pages, the same tiles: anyflash itself
    wanted = [row["ratio"] for row in rows if row["ratio"] and not row["peer"].startswith(own)]
    assert sorted(ratio for _, dots in chart.gpu_lines(rows) for ratio, _ in dots) == sorted(wanted)


@pytest.mark.parametrize(
    "what, mask", [("forward", "full"), ("forward, a mask of half the pairs", ""), ("64 queries, a tree, batch 1", "")]
)
def test_a_row_whose_mask_is_its_own_is_not_called_full(what, mask):
    assert page.shape(row(1, 1, what=what, peer="torch cuDNN"))[2] == mask


def test_the_documents_show_the_record():
    texts = [path.read_text() for path in page.PAGES]
    for record in [path for path in (*page.CPU_RECORDS.values(), page.GPU_RECORD) if path.exists()]:
        for number, _, block in page.blocks(page.read(record)):
            assert block in texts[number], f"run bench/compare --publish {record.relative_to(PROJECT)}"
        name, picture, _ = page.of_readme_chart(page.read(record))
        assert (PROJECT / "docs/pictures" / name).read_text() == picture, f"run bench/compare --publish {record}"
