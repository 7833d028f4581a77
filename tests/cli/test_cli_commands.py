"""explain, check, bench, devices, --help and --version."""

import json
import os
import pty
import shlex
import subprocess
import xml.etree.ElementTree

import numpy as np
import pytest
from cli_helpers import TYPES, normal, save
from PIL import Image

COMMANDS = ("run", "check", "bench", "explain", "devices")


def test_version(anyflash):
    assert anyflash.succeeds("--version") == "anyflash 0.1.0\n"


def test_help_names_every_command(anyflash):
    text = anyflash.succeeds("--help")
    assert all(f"  {command} " in text for command in COMMANDS) and "Examples:" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_examples(anyflash, command):
    text = anyflash.succeeds(command, "--help")
    assert f"Usage: anyflash {command}" in text and f"\n  anyflash {command}" in text.split("Examples:")[1]


def examples(text):
    return [line.strip() for line in text.split("Examples:")[1].splitlines() if line.startswith("  anyflash")]


def test_examples_of_explain_work(anyflash, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(1000) // 300)
    found = examples(anyflash.succeeds("explain", "--help"))
    assert len(found) >= 4
    for line in found:
        anyflash.succeeds(*shlex.split(line)[1:])


def test_output_that_cannot_be_printed(anyflash):
    with open("/dev/full", "w") as full:
        done = subprocess.run([anyflash.path, "devices"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr == "anyflash: standard output cannot be written\n"


STEPS = {
    "run": (["--output", "out.npz", "--backward"], ["reading", "forward", "backward", "writing"]),
    "run quiet": (["--output", "out.npz", "--quiet"], []),
    "check": ([], ["reading", "comparing"]),
    "explain": (["--shape", "8"], ["counting", "drawing"]),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_terminal_is_told_the_step(anyflash, tmp_path, case):
    arguments, steps = STEPS[case]
    save(tmp_path / "in.npz", {n: normal(s, 1, 2, 9, 8) for s, n in enumerate(("q", "k", "v", "dout"))})
    ours, theirs = pty.openpty()
    command = [anyflash.path, case.split()[0], "--input", "in.npz", *arguments]
    subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs, check=True)
    os.write(theirs, b"end")
    shown = ""
    while not shown.endswith("end"):
        shown += os.read(ours, 10_000).decode()
    lines = [line for line in shown.split("\r\033[K") if line]  # each takes the place of the one before
    assert lines == [*(f"{step} ({i} of {len(steps)})" for i, step in enumerate(steps, 1)), "end"]


# --- explain


def figures(anyflash, *arguments):
    return json.loads(anyflash.succeeds("explain", "--json", *arguments))


def test_explain_counts(anyflash):
    found = figures(anyflash, "--rule", "causal()", "--shape", "1000", "--head-size", "32")
    assert found["visible_pairs"] == 500_500 and found["queries"] == found["keys"] == 1000
    assert found["forward_flops"] == 4 * 32 * 500_500 and found["backward_flops"] == 10 * 32 * 500_500
    assert found["bytes"] == 4 * (4 * 1000 * 32 + 1000)  # q, k, v, out and lse
    assert found["visited_pairs"] >= found["visible_pairs"]
    assert found["head_size"] == found["value_size"] == 32 and found["direction"] == "forward"


def test_explain_counts_values_of_another_size(anyflash):
    found = figures(anyflash, "--shape", "10", "--head-size", "32", "--value-size", "48")
    assert found["forward_flops"] == 2 * (32 + 48) * 100 and found["backward_flops"] == (6 * 32 + 4 * 48) * 100


def test_explain_of_two_dimensions_and_other_keys(anyflash):
    found = figures(
        anyflash, "--rule", "local(2)", "--shape", "5x6", "--keys", "5x3", "--align", "scale_end", "--backward"
    )
    y, x, j = np.arange(5), np.arange(6), (np.arange(3) + 1) * 2 - 1
    rows, columns = (abs(y[:, None] - y) < 2).sum(), (abs(x[:, None] - j) < 2).sum()
    assert found["visible_pairs"] == rows * columns and found["direction"] == "backward"
    assert found["query_shape"] == [5, 6] and found["key_shape"] == [5, 3] and found["align"] == "scale_end"


def test_explain_prints_the_same_and_draws(anyflash):
    text = anyflash.succeeds("explain", "--rule", "causal() & local(3)", "--shape", "8")
    assert "rule            causal() & local(3)\n" in text and "visible pairs   21 of 64" in text
    assert "bytes           8.0 KiB of q, k, v, out and lse, one head\n" in text
    picture = text.split("\n\n")[1].splitlines()
    assert len(picture) == 4 and all(len(line) == 8 for line in picture)
    assert picture[0][0] == "█" and picture[0][7] == " "
    assert "█" not in anyflash.succeeds("explain", "--rule", "causal()", "--shape", "8", "--picture", "none")


def test_explain_draws_png(anyflash, tmp_path):
    anyflash.succeeds("explain", "--rule", "causal()", "--shape", "40", "--picture", "rule.png")
    image = np.asarray(Image.open(tmp_path / "rule.png"))
    visible = (image == (0x1F, 0x4E, 0x9B)).all(-1)
    top, left = np.argwhere(visible)[0]  # 12 x 12 pixels for each pair
    assert (visible[top : top + 480, left : left + 480] == np.tri(40, dtype=bool).repeat(12, 0).repeat(12, 1)).all()


def test_explain_of_nothing(anyflash, tmp_path):
    text = anyflash.succeeds("explain", "--rule", "local(3)", "--shape", "0", "--picture", "rule.png")
    assert "visible pairs   0 of 0 (0 %)\n" in text and Image.open(tmp_path / "rule.png").width > 0
    for shape in (["0"], ["0x5"], ["5", "--keys", "0"]):
        text = anyflash.succeeds("explain", "--rule", "causal()", "--shape", *shape)
        assert text.endswith("\npicture         none: the pattern is empty\n")


def test_explain_names_the_densest_share(anyflash):
    text = anyflash.succeeds("explain", "--rule", "local(8)", "--shape", "4096", "--side", "64")
    assert "\npicture         full block: " in text and " % of its pairs visible, the densest\n" in text


def test_explain_draws_svg(anyflash, tmp_path):
    anyflash.succeeds("explain", "--rule", "local(2) & ~causal()", "--shape", "20", "--picture", "rule.svg", "--json")
    root = xml.etree.ElementTree.parse(tmp_path / "rule.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "local(2) & ~causal()" in "".join(root.itertext())


def test_explain_takes_tables(anyflash, tmp_path):
    mask = np.random.default_rng(1).random((30, 20)) < 0.3
    save(tmp_path / "tables.safetensors", {"mask": mask})
    for where in (["--input", "tables.safetensors"], ["--tensor", "mask=tables.safetensors"]):
        found = figures(anyflash, *where, "--rule", "dense(mask)", "--shape", "30", "--keys", "20")
        assert found["visible_pairs"] == mask.sum()


# --- check


@pytest.mark.parametrize("type", ["float16", "bfloat16", "float32", "float64"])
def test_check_passes(anyflash, type):
    text = anyflash.succeeds("check", "--quick", "--type", type)
    lines = text.splitlines()
    assert lines[0].split() == ["rule", "type", "checks", "worst", "max", "error", "bar", "share"]
    checks = [int(line.split(f" {type} ")[1].split()[0]) for line in lines[1:-1]]
    assert len(checks) >= 25 and lines[-1] == f"{sum(checks)} checks passed"


def test_check_of_one_rule_is_repeatable(anyflash):
    arguments = ["check", "--quick", "--rule", "causal() & ~local(4)", "--type", "float32", "--seed", "5"]
    first = anyflash.succeeds(*arguments)
    assert first == anyflash.succeeds(*arguments) != anyflash.succeeds(*arguments[:-1], "6")
    assert "3-D" in first and first.count("causal() & ~local(4)") == 3  # in 1, 2 and 3 dimensions


@pytest.mark.parametrize("type", ["float16", "bfloat16", "float32", "float64"])
def test_check_of_tensors(anyflash, tmp_path, type):
    arrays = {n: normal(s, 2, 2, 33, 16).astype(TYPES[type]) for s, n in enumerate("qkv")}
    save(tmp_path / "in.safetensors", {**arrays, "mask": np.random.default_rng(1).random((2, 2, 33, 33)) < 0.5})
    text = anyflash.succeeds("check", "--input", "in.safetensors", "--rule", "dense(mask) & causal()", "--seed", "3")
    assert [line.split(f" {type} ")[1].split()[1] for line in text.splitlines()[1:-1]] == [
        "out",
        "lse",
        "row_max",
        "row_max",
        "dq",
        "dk",
        "dv",
    ]
    assert text.endswith("7 checks passed\n")


def test_check_of_tensors_reads_what_run_reads(anyflash, tmp_path):
    save(
        tmp_path / "in.npz",
        {
            "q": normal(1, 20, 4, 8),
            "k": normal(2, 25, 2, 8),
            "v": normal(3, 25, 2, 16),
            "dout": normal(4, 20, 4, 16),
            "cu_seqlens_q": np.array([0, 5, 20]),
            "cu_seqlens_k": np.array([0, 15, 25]),
            "sink": normal(5, 4),
            "bias": normal(6, 1, 4, 20, 1),
            "alibi": abs(normal(7, 4)),
        },
    )
    text = anyflash.succeeds("check", "--input", "in.npz", "--layout", "thd", "--rule", "causal()", "--softcap", "3")
    assert text.endswith("9 checks passed\n") and "dsink" in text and "dbias" in text


def test_check_goes_by_the_rule_and_not_by_its_tables_names(anyflash, tmp_path):
    save(
        tmp_path / "in.npz",
        {
            **{n: normal(s, 1, 2, 9, 8) for s, n in enumerate("qkv")},
            "key_lengths": np.array([5]),
            "blocks_of_mine": np.random.default_rng(1).random((9, 9)) < 0.5,
            "bitmap": np.ones((1, 1), bool),
        },
    )
    check = ["check", "--input", "in.npz", "--rule"]
    assert anyflash.succeeds(*check, "dense(blocks_of_mine)").endswith("7 checks passed\n")
    line = anyflash.fails(*check, "blocks(bitmap, 16, 16)")
    assert line == "key_lengths: not checked together with blocks in the rule"


# --- bench, devices


def test_bench(anyflash, tmp_path):
    text = anyflash.succeeds(
        "bench",
        "--shape",
        "64",
        "--shape",
        "96",
        "--rule",
        "causal()",
        "--type",
        "float32",
        "--type",
        "float16",
        "--heads",
        "2",
        "--repetitions",
        "3",
        "--threads",
        "1",
        "--json",
        "bench.json",
    )
    rows = json.loads((tmp_path / "bench.json").read_text())
    assert len(rows) == 8 == len(text.splitlines()) - 1
    assert {row["direction"] for row in rows} == {"forward", "backward"} and {row["shape"] for row in rows} == {
        "64",
        "96",
    }
    row = rows[0]
    assert row["median_seconds"] > 0 and row["spread"] >= 0 and row["threads"] == 1 and row["heads"] == 2
    flops = 2 * 4 * 64 * 64 * 65 // 2
    assert row["gflops"] == pytest.approx(flops / row["median_seconds"] / 1e9)


def test_bench_takes_a_gpus_switches_and_says_so(anyflash, tmp_path):
    once = ["bench", "--shape", "16", "--rule", "full()", "--repetitions", "1", "--json", "bench.json"]
    for switches in ([], ["--deterministic"], ["--allow-tf32"]):
        anyflash.succeeds(*once, *switches)
        for row in json.loads((tmp_path / "bench.json").read_text()):
            assert row["deterministic"] == ("--deterministic" in switches)
            assert row["allow_tf32"] == ("--allow-tf32" in switches)


def test_bench_counts_values_of_another_size(anyflash, tmp_path):
    anyflash.succeeds(
        "bench",
        "--shape",
        "48",
        "--rule",
        "full()",
        "--head-size",
        "16",
        "--value-size",
        "24",
        "--heads",
        "1",
        "--repetitions",
        "1",
        "--json",
        "bench.json",
    )
    forward, backward = json.loads((tmp_path / "bench.json").read_text())
    assert forward["gflops"] * forward["median_seconds"] * 1e9 == pytest.approx(2 * (16 + 24) * 48 * 48)
    assert backward["gflops"] * backward["median_seconds"] * 1e9 == pytest.approx((6 * 16 + 4 * 24) * 48 * 48)


def test_devices(anyflash):
    (device,) = json.loads(anyflash.succeeds("devices", "--json"))
    assert device["device"] == "cpu" and device["threads"] >= 1
    assert device["instruction_set"] in device["instruction_sets"]
    text = anyflash.succeeds("devices")
    assert device["model"] in text and device["instruction_set"] in text
    for name in device["instruction_sets"]:
        assert json.loads(anyflash.succeeds("devices", "--json", ANYFLASH_ISA=name))[0]["instruction_set"] == name
