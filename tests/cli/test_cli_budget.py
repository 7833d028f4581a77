"""anyflash run on files that are larger than its memory, explain --plan, bench --calibrate."""

import json
import os
import signal
import subprocess
import sys
import time

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


def test_a_file_that_is_truncated_while_it_is_read(program, folder):
    """A page behind its new end would end the program with a signal."""
    (folder / "short.npy").write_bytes((folder / "k.npy").read_bytes())
    command = [program, "run", "--query", "q.npy", "--key", "short.npy", "--value", "v.npy", "--memory-budget", "24MiB"]
    with subprocess.Popen(
        [*command, "--output", "cut.npy", "--quiet"], cwd=folder, stderr=subprocess.PIPE, text=True
    ) as running:
        while running.poll() is None and not list(folder.glob("cut.npy.*")):
            time.sleep(0.001)
        os.truncate(folder / "short.npy", 4096)
        _, line = running.communicate()
    assert (running.returncode, line) == (1, "anyflash: short.npy: truncated while it was read\n")
    assert not list(folder.glob("cut.npy*"))


WRONG = {
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


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "qkv"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("output", ["out.npy", "out.npz"])
def test_too_little(anyflash, layout, backward, output):
    """The number that the first error names works; one less does not."""
    shape = {"bhsd": (1, 3, 1037, 40), "bshd": (1, 1037, 3, 40), "qkv": (3, 1037, 3, 40)}[layout]
    tensors = {"--qkv": "qkv"} if layout == "qkv" else {"--query": "q", "--key": "k", "--value": "v"}
    for i, name in enumerate(tensors.values()):
        x = normal(i, *shape)
        np.save(anyflash.folder / f"{name}.npy", np.asfortranarray(x) if name == "q" else x)
    np.save(anyflash.folder / "dout.npy", normal(4, *(shape[1:] if layout == "qkv" else shape)))
    run = ["run", "--rule", "causal()", "--layout", layout, "--output", output]
    run += [text for option, name in tensors.items() for text in (option, f"{name}.npy")]
    run += ["--dout", "dout.npy", "--backward"] if backward else []
    line = "memory_budget: {} bytes, expected at least {}"
    least = int(anyflash.fails(*run, "--memory-budget", "1").split()[-1])
    assert anyflash.fails(*run, "--memory-budget", least - 1) == line.format(least - 1, least)
    assert not [path for path in anyflash.folder.iterdir() if path.name.startswith("out")]
    anyflash.succeeds(*run, "--memory-budget", least)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_file(program, folder, tmp_path, number):
    command = [program, "run", "--query", folder / "q.npy", "--key", folder / "k.npy", "--value", folder / "v.npy"]
    command += ["--dout", folder / "dout.npy", "--backward", "--memory-budget", "24MiB", "--output", "out.npy"]
    # Tests may themselves have been started with a signal ignored, which processes inherit.
    with subprocess.Popen(command, cwd=tmp_path, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL)) as run:
        for _ in range(1000):
            if len(list(tmp_path.iterdir())) == 5:  # out, lse, dq, dk and dv
                break
            time.sleep(0.01)
        assert run.poll() is None
        run.send_signal(number)
        assert run.wait(30) == -number
    assert not list(tmp_path.iterdir())


def on_a_terminal(program, folder, *arguments):
    """What a run that fails shows where its progress is shown, too."""
    reader, writer = os.openpty()
    with os.fdopen(reader, "rb", 0) as terminal:
        ran = subprocess.run([program, *arguments], cwd=folder, stderr=writer, stdout=subprocess.DEVNULL)
        os.close(writer)
        assert ran.returncode == 1
        return terminal.read(4096).decode()


def test_backward_is_checked_before_forward(program, tmp_path):
    """dout, dlse or a gradient's file is wrong: no chunk of the forward pass is computed."""
    for i, name in enumerate(NAMES):
        np.save(tmp_path / f"{name}.npy", normal(i, 1, 1, 64, 8))
    np.save(tmp_path / "short.npy", normal(5, 1, 1, 63, 8))
    (tmp_path / "made.dv.npy").mkdir()
    run = ["run", "--query", "q.npy", "--key", "k.npy", "--value", "v.npy", "--backward", "--memory-budget", "64MiB"]
    wrong = {
        "dout: ": ["--output", "out.npy", "--dout", "short.npy"],
        "dlse: ": ["--output", "out.npy", "--dout", "dout.npy", "--dlse", "short.npy"],
        "made.dv.npy: is a directory": ["--output", "made.npy", "--dout", "dout.npy"],
    }
    for line, arguments in wrong.items():
        shown = on_a_terminal(program, tmp_path, *run, *arguments)
        assert line in shown and "chunks" not in shown
    assert {path.name for path in tmp_path.iterdir()} == {*(f"{n}.npy" for n in (*NAMES, "short")), "made.dv.npy"}


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
    made = json.loads(file.read_text())
    assert made["float32.forward_channel"] > 0
    monkeypatch.delenv("ANYFLASH_CALIBRATION", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert json.loads(explained(program, "--json"))["calibration"] == "built-in defaults"
    kept = tmp_path / "cache" / "anyflash" / "calibration.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("broken")  # that nobody named: ignored
    assert json.loads(explained(program, "--json"))["calibration"] == "built-in defaults"
    kept.write_text(file.read_text())
    fast = json.loads(explained(program, "--json"))
    assert fast["calibration"] == str(kept)
    slow = {name: number * (1 if name in ("threads", "parallel") else 1000) for name, number in made.items()}
    file.write_text(json.dumps(slow, indent=1))
    monkeypatch.setenv("ANYFLASH_CALIBRATION", str(file))
    shown = json.loads(explained(program, "--json"))
    assert shown["calibration"] == str(file)
    assert shown["candidates"][0]["compute_seconds"] > 100 * fast["candidates"][0]["compute_seconds"]


@pytest.mark.parametrize("text", [None, "", "broken", '{"step": 1}'])
def test_a_calibration_that_is_named_must_be_readable(anyflash, text):
    file = anyflash.folder / "named.json"
    if text is not None:
        file.write_text(text)
    done = anyflash("explain", "--shape", "64", "--plan", ANYFLASH_CALIBRATION=str(file))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"anyflash: calibration: {file}, ") and done.stderr.count("\n") == 1


def test_calibrate_makes_the_file_that_is_named(anyflash):
    file = anyflash.folder / "new" / "named.json"
    anyflash.succeeds("bench", "--calibrate", ANYFLASH_CALIBRATION=str(file))
    assert json.loads(file.read_text())["step"] > 0


@pytest.mark.parametrize("options", [[], ["--backward"], ["--memory-budget", "1MiB"], ["--device", "tiles"]])
def test_no_row_twice(anyflash, options):
    text = anyflash.succeeds("explain", "--rule", "causal()", "--shape", "4096", "--plan", *options)
    rows = [line[1:] for line in text.split("total\n")[1].splitlines()]
    assert len(rows) == len(set(rows)) > 1 and text.count("\n*") == 1
