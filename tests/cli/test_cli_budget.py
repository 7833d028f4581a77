"""anyflash run on files that are larger than its memory, explain --plan, bench --calibrate."""

import json
import subprocess
import sys

import numpy as np
import pytest
from cli_helpers import normal

RULE = "causal() & local(128)"
# In a small process of its own, because a child's peak begins with its parent's.
WAIT = """
import os, sys
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(child, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
NAMES = ("q", "k", "v", "dout")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    for i, name in enumerate(NAMES):
        np.save(folder / f"{name}.npy", normal(i, 1, 12, 8192, 64))
        np.save(folder / f"tiny-{name}.npy", normal(i, 1, 1, 8, 64))
    return folder


def peak(program, folder, prefix, *arguments):
    """The most memory of a run in bytes, as the system counts it."""
    options = {"q": "--query", "k": "--key", "v": "--value", "dout": "--dout"}
    names = NAMES if "--backward" in arguments else NAMES[:3]
    tensors = [text for name in names for text in (options[name], f"{prefix}{name}.npy")]
    command = [program, "run", *tensors, "--rule", RULE, "--quiet", *arguments]
    ran = subprocess.run([sys.executable, "-S", "-c", WAIT, *command], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout) * 1024


@pytest.mark.parametrize("mebibytes", [24, 32])
def test_files_larger_than_the_budget(program, folder, mebibytes):
    """Eight tensors of 25 MB, and at most the budget of them in memory beside what the program takes for tiny tensors."""
    budget = mebibytes << 20
    base = peak(program, folder, "tiny-", "--memory-budget", "32MiB", "--backward", "--output", "tiny.npy")
    arguments = ["--memory-budget", f"{mebibytes}MiB", "--output"]
    forward = peak(program, folder, "", *arguments, "forward.npy")
    backward = peak(program, folder, "", *arguments, "made.npy", "--backward")
    in_memory = peak(program, folder, "", "--output", "expected.npz", "--backward")
    assert in_memory - base > 5 * budget
    assert forward - base < 1.1 * budget
    assert backward - base < 1.1 * budget
    expected = np.load(folder / "expected.npz")
    np.testing.assert_array_equal(np.load(folder / "forward.npy"), expected["out"])
    np.testing.assert_array_equal(np.load(folder / "made.npy"), expected["out"])
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(np.load(folder / f"made.{name}.npy"), expected[name])


WRONG = {
    "too little": (["--memory-budget", "4KiB"], "memory_budget: 4096 bytes, expected at least "),
    "statistics": (["--memory-budget", "64MiB", "--lm"], "--lm: expected without --memory-budget and a .npy output"),
    "an input that cannot be mapped": (["--memory-budget", "64MiB", "--key", "all.npz:k"], "expected a .npy file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input(program, folder, name):
    arguments, line = WRONG[name]
    np.savez(folder / "all.npz", k=normal(0, 1, 1, 8, 64))
    key = [] if "--key" in arguments else ["--key", "tiny-k.npy"]
    command = ["run", "--query", "tiny-q.npy", "--value", "tiny-v.npy", *key, *arguments, "--output", "wrong.npy"]
    ran = subprocess.run([program, *command], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 1 and line in ran.stderr and ran.stderr.count("\n") == 1
    assert not [path for path in folder.iterdir() if path.name.startswith("wrong")]


def explained(program, *arguments):
    command = [program, "explain", "--rule", "causal()", "--heads", "4", "--plan", "--backward"]
    command += [] if "--shape" in arguments else ["--shape", "4096"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True).stdout


def test_candidates(program, tmp_path):
    shown = json.loads(explained(program, "--json", "--memory-budget", "2MiB"))
    chosen = [one for one in shown["candidates"] if one["chosen"]]
    assert len(chosen) == 1 and chosen[0]["fits"] and chosen[0]["bytes"] <= 2 << 20
    assert {one["fits"] for one in shown["candidates"]} == {True, False}
    assert all(one["exchange_seconds"] == 0 < one["total_seconds"] for one in shown["candidates"])
    text = explained(program, "--memory-budget", "2MiB", "--picture", str(tmp_path / "plan.svg"))
    assert "does not fit" in text and sum(line.startswith("*") for line in text.splitlines()) == 1
    assert (tmp_path / "plan.svg").read_text().count("<rect") > 5


def test_counts_are_what_is_chosen(program):
    shown = json.loads(explained(program, "--json", "--num-chunks-q", "4", "--num-chunks-kv", "8"))
    assert {(one["chunks_q"], one["chunks_kv"]) for one in shown["candidates"]} == {(4, 8)}


def test_mappings_of_the_tile_machine(program, tmp_path):
    tiles = ("--device", "tiles", "--type", "float16", "--shape", "1024")
    free, bounded = (
        json.loads(explained(program, *tiles, "--json", *budget)) for budget in ((), ("--memory-budget", "64KiB"))
    )
    for shown in (free, bounded):
        chosen = [one for one in shown["candidates"] if one["chosen"]]
        assert len(chosen) == 1 and chosen[0]["fits"] and chosen[0]["bytes"] >= shown["least_bytes"] * 0.9
        assert all(one["total_seconds"] >= chosen[0]["total_seconds"] for one in shown["candidates"] if one["fits"])
        for one in shown["candidates"]:
            assert 0 < one["grid_rows"] * one["grid_columns"] * one["groups"] <= 1472
            assert one["exchange_seconds"] > 0 and one["memory_seconds"] == 0
    assert "ipu-mk2" in free["calibration"]
    assert all(one["fits"] == (one["bytes"] <= 64 << 10) for one in bounded["candidates"])
    text = explained(program, *tiles, "--picture", str(tmp_path / "plan.svg"))
    assert "flight" in text and sum(line.startswith("*") for line in text.splitlines()) == 1
    assert "groups, tiles" in (tmp_path / "plan.svg").read_text()
    counts = json.loads(explained(program, *tiles, "--json", "--num-chunks-q", "4", "--num-chunks-kv", "8"))
    assert {(one["chunks_q"], one["chunks_kv"]) for one in counts["candidates"]} == {(4, 8)}


def test_calibration(program, tmp_path, monkeypatch):
    file = tmp_path / "calibration.json"
    subprocess.run([program, "bench", "--calibrate", "--output", file], check=True, capture_output=True)
    assert json.loads(file.read_text())["float32.forward_channel"] > 0
    assert "built-in" in explained(program) or "calibration.json" in explained(program)
    monkeypatch.setenv("ANYFLASH_CALIBRATION", str(file))
    assert str(file) in explained(program)
