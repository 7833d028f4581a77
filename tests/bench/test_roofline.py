"""bench/roofline: wrong options, which rows are drawn and where, the picture, and what it says of itself in the page.
bench_kernels' place is taken by a script with its figures."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "bench"))

import page
import roofline


def row(what, unit, figure, intensity, peer="torch 1.0", **more):
    return (
        dict(
            what=what,
            unit=unit,
            figure=figure,
            intensity=intensity,
            peer=peer,
            peer_figure=figure / 2,
            type="float32",
            threads=1,
        )
        | more
    )


ROWS = [
    row("forward", "GFLOP/s", 60.0, 500.0),
    row("backward, batch 32 x 12 heads", "GFLOP/s", 50.0, 16.0, threads=2),
    row("decode, 32 / 8 heads, K and V read", "GB/s", 8.0, 2.0, "torch 1.0 math"),
    row("decode, 32 / 8 heads, beside reading memory", "GB/s", 8.0, 2.0, "reading memory"),
    row("forward, two threads", "GFLOP/s", 100.0, 500.0, "one thread"),
    row("forward", "GFLOP/s", 70.0, 500.0, type="bfloat16"),
    row("forward", "GFLOP/s", 900.0, 500.0, type="bfloat16", threads=2),
    row("forward local(8) 64x64, time a visible pair", "ns", 1.0, 9.0, "full() 64x64"),
    row("tiny forward from C++", "us", 3.0, None, ""),
]


@pytest.fixture
def kernels(tmp_path):
    """A program with 100 GFLOP/s and 10 GB/s a thread at best, and tiles on two threads."""
    program = tmp_path / "kernels"
    program.write_text(f"""#!{sys.executable}
import json, sys
threads = next(int(text.split("=")[1]) for text in sys.argv if text.startswith("--machine_threads="))
rows = [dict(run_type="iteration", run_name=name, **{{unit: threads * speed * part}}) for name, unit, speed in (
    ("read/real_time", "GB/s", 10), ("peak/float32/real_time", "GFLOP/s", 100)) for part in (0.9, 1.0, 0.8)]
print(json.dumps(dict(context=dict(pairs="tiles" if threads == 2 else "nothing"),
                      benchmarks=rows + [dict(run_type="aggregate", run_name="read/mean")])))
""")
    program.chmod(0o755)
    return program


def run(*arguments):
    return subprocess.run(
        [sys.executable, PROJECT / "bench" / "roofline.py", *map(str, arguments)], capture_output=True, text=True
    )


def test_points_are_rows_with_a_speed_of_arithmetic():
    assert [tuple(point.values()) for point in roofline.points(ROWS)] == [
        ("forward", "float32", 1, 500.0, 60.0, 30.0),
        ("backward", "float32", 2, 16.0, 50.0, 25.0),
        ("decode", "float32", 1, 2.0, 16.0, 8.0),
        ("forward", "bfloat16", 1, 500.0, 70.0, 35.0),
        ("forward", "bfloat16", 2, 500.0, 900.0, 450.0),
    ]


def test_the_picture(tmp_path, kernels):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    before = roofline.PAGE.read_text()
    done = run("--json", tmp_path / "rows.json", "--kernels", kernels, "--output", tmp_path / "picture")
    assert done.returncode == 0, done.stderr
    assert "1 thread: 10.0 GB/s read, peak float32 100 GFLOP/s\n" in done.stdout
    assert "2 threads: 20.0 GB/s read, peak float32 200 GFLOP/s, of pairs in tiles not measured\n" in done.stdout
    assert "forward  float32      500.0 operations a byte     60.0 of    100.0 GFLOP/s,   60 %" in done.stdout
    assert "decode   float32        2.0 operations a byte     16.0 of     20.0 GFLOP/s,   80 %" in done.stdout
    # Nothing multiplies pairs on the one thread: float32's peak is that of bfloat16 too.
    assert "forward  bfloat16     500.0 operations a byte     70.0 of    100.0 GFLOP/s,   70 %" in done.stdout
    assert "forward  bfloat16     500.0 operations a byte    900.0 GFLOP/s\n" in done.stdout
    svg = (tmp_path / "picture.svg").read_text()
    for text in ("float32: 100 GFLOP/s", "float32: 200 GFLOP/s", "20 GB/s", "2 threads", "PyTorch", "decode"):
        assert text in svg, text
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert roofline.PAGE.read_text() == before  # which shows the picture at its own place


def test_nothing_is_drawn_with_marks_above_their_roof(tmp_path, kernels):
    """In the plane too, where memory is the roof; PyTorch's marks too."""
    high = [row("forward", "GFLOP/s", 101.0, 500.0), row("decode, 32 / 8 heads", "GB/s", 10.1, 2.0, peer_figure=10.2)]
    (tmp_path / "rows.json").write_text(json.dumps(ROWS + high))
    done = run("--json", tmp_path / "rows.json", "--kernels", kernels, "--output", tmp_path / "picture")
    assert done.returncode == 1 and not list(tmp_path.glob("picture*"))
    assert done.stderr == (
        "bench/roofline: 3 marks above their roof, nothing written; the limits need a machine as "
        "quiet as the rows had: forward float32, 1 thread: 101.0 of 100.0 GFLOP/s\n"
    )


def test_bfloat16_has_a_roof_of_its_own(monkeypatch):
    """Where an instruction multiplies pairs, their peak is measured, or nothing is drawn."""
    speeds = {"read": [10.0], "peak/float32": [100.0], "peak/pairs": [180.0, 200.0]}
    monkeypatch.setattr(roofline.measure, "machine_speeds", lambda program, threads: (dict(speeds), "instruction"))
    machine = {1: roofline.limits("kernels", 1)}
    mark = dict(kind="forward", type="bfloat16", threads=1, intensity=500.0, ours=150.0, peers=None)
    assert roofline.roof_of(mark, *machine[1]) == 200 and not roofline.above([mark], machine)
    assert roofline.above([mark | dict(type="float32")], machine) and roofline.above([mark | dict(ours=201.0)], machine)
    del speeds["peak/pairs"]
    with pytest.raises(SystemExit, match="no peak of pairs"):
        roofline.limits("kernels", 1)


def recorded_limits():
    """What the page says of the machine, as roofline.limits gives it."""
    machine = {}
    text = page.BLOCK["roofline"].search(roofline.PAGE.read_text())[0]
    line = r"^- (\d+) threads?: peak (.*) GFLOP/s(.*); memory (\d+) GB/s$"
    for threads, peaks, tiles, reading in re.findall(line, text, re.M):
        # Half more than the rounded number: a mark may lie at the roof.
        peaks = {name: float(peak) + 0.5 for name, peak in re.findall(r"(\w+) (\d+)", peaks)}
        machine[int(threads)] = peaks | ({"pairs": None} if tiles else {}), int(reading) + 0.5
    return machine


@pytest.mark.parametrize("type_", ["float32", "float64", "float16", "bfloat16"])
def test_no_recorded_mark_lies_above_its_roof(type_):
    machine = recorded_limits()
    rows = [row for row in roofline.points(json.loads(page.RECORD.read_text())) if row["type"] == type_]
    assert rows and {row["threads"] for row in rows} <= set(machine)
    assert not roofline.above(rows, machine)


def test_the_page_has_a_place_for_it(tmp_path):
    """Between its marks; the rest stays as it is."""
    copy = tmp_path / "performance.md"
    copy.write_text(roofline.PAGE.read_text())
    before = page.BLOCK["roofline"].split(copy.read_text())
    machine = {1: ({"float32": 100.0, "pairs": 200.0}, 10.0), 2: ({"float32": 190.0, "pairs": None}, 15.0)}
    page.write_block(copy, "roofline", roofline.block("A machine, 2030-01-01", machine))
    text = copy.read_text()
    assert len(before) == 4 and page.BLOCK["roofline"].split(text) == before
    assert "![Roofline](pictures/roofline.svg)\n\nA machine, 2030-01-01:\n\n" in text
    assert "- 1 thread: peak float32 100, pairs 200 GFLOP/s; memory 10 GB/s\n" in text
    assert "- 2 threads: peak float32 190 GFLOP/s, of pairs in tiles not measured; memory 15 GB/s\n" in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--json", "no.json"], "--json: no.json: No such file or directory"),
        (["--json", __file__], "not a file that bench/compare --json wrote"),
        (["--json", "EMPTY"], "no rows with their operations for each byte; measure anew"),
        (["--output", "/no/where"], "--output: /no/where cannot be written"),
        (["--output", "."], "--output: . cannot be written"),
        (["--kernels", "/no/program"], "--kernels: no program /no/program"),
        (["--kernels", "/tmp"], "--kernels: no program /tmp"),
        (["--json", "ELSEWHERE"], "rows of Another, 64 threads, this is "),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_wrong_options(arguments, message, tmp_path):
    (tmp_path / "EMPTY").write_text("[]")
    elsewhere = row("forward", "GFLOP/s", 60.0, 500.0, machine="Another, 64 threads")
    (tmp_path / "ELSEWHERE").write_text(json.dumps([elsewhere]))
    done = run(*(tmp_path / argument if argument in ("EMPTY", "ELSEWHERE") else argument for argument in arguments))
    assert done.returncode == 1 and message in done.stderr, done.stderr
    assert done.stderr.startswith("bench/roofline: ") and done.stderr.count("\n") == 1
