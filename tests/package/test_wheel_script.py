"""scripts/wheel where it builds nothing: its options, and what it says of interpreters and wheels that are not there."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def wheel(tmp_path):
    shutil.copytree(PROJECT / "scripts", tmp_path / "scripts")
    (tmp_path / "tests" / "package").mkdir(parents=True)
    shutil.copy(PROJECT / "tests" / "package" / "versions.txt", tmp_path / "tests" / "package")
    (tmp_path / "dist" / "cpu").mkdir(parents=True)

    def call(*arguments):
        return subprocess.run([tmp_path / "scripts" / "wheel", *arguments], capture_output=True, text=True)

    return call


def test_help(wheel):
    done = wheel("--help")
    assert done.returncode == 0 and done.stdout.startswith("scripts/wheel: ")
    assert done.stdout.endswith("docs/notes/build-and-tests.md.\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu"], "unknown option --gpu; scripts/wheel --help lists them"),
        (["--cpu", "/nowhere/python3.12"], "/nowhere/python3.12 does not run"),
        (["--cpu", "/bin/false"], "/bin/false does not run"),
        (["--try", "/nowhere/python3.12"], "/nowhere/python3.12 does not run"),
    ],
)
def test_one_line(wheel, arguments, message):
    done = wheel(*arguments)
    assert (done.returncode, done.stderr) == (1, f"wheel: {message}\n")


def test_trying_says_which_wheel_is_missing_and_what_is_left_out(wheel):
    version = ".".join(map(str, sys.version_info[:2]))
    rows = (PROJECT / "tests" / "package" / "versions.txt").read_text().splitlines()[1:]
    mine = [row.split()[0] == version for row in rows]
    done = wheel("--try", sys.executable)
    assert done.returncode == 1
    if any(mine):
        assert done.stderr == f"wheel: no wheel for Python {version} in dist/cpu: scripts/wheel --cpu builds it\n"
        assert done.stdout.count("not tried, there is no such interpreter") == mine.index(True)
    else:
        assert done.stderr == "wheel: nothing was tried\n"
