"""scripts/common.sh installs Debian packages: what it prints, and its one line where it cannot (apt-get is a stand-in);
and makes the virtual environment."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

COMMON = Path(__file__).resolve().parents[2] / "scripts" / "common.sh"
STANDS = {
    "sudo": 'exec "$@"',
    "dpkg-query": 'case ${!#} in there) echo "install ok installed";; *) exit 1;; esac',
    "apt-get": """
case $2 in
  update) echo "Hit:1 http://mirror/debian bookworm InRelease" ;;
  install)
    [[ $DEBIAN_FRONTEND == noninteractive ]] || exit 3
    echo "Get:1 http://mirror/debian bookworm/main amd64 wanted amd64 2:1.4-1 [5,314 kB]"
    echo "debconf: delaying package configuration" >&2
    echo "Selecting previously unselected package wanted."
    echo "Setting up wanted (2:1.4-1) ..." ;;
esac""",
}


@pytest.fixture
def packages(tmp_path):
    def call(*names, **stands):
        for name, text in (STANDS | stands).items():
            program = tmp_path / name
            program.write_text(f"#!/bin/bash\n{text}\n")
            program.chmod(0o755)
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = ["bash", "-c", 'source "$1"; shift; packages "$@"', "demo", COMMON, *names]
        return subprocess.run(command, env=os.environ | path, capture_output=True, text=True)

    return call


def test_a_line_for_each_package(packages):
    done = packages("there", "wanted")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines() == [
        "",
        "== installing wanted",
        "  package list bookworm InRelease",
        "  fetching wanted [5,314 kB]",
        "  installed wanted",
    ]


def test_nothing_to_do(packages):
    done = packages("there", **{"apt-get": "exit 1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("command", ["update", "install"])
def test_one_line_where_it_cannot_install(packages, command):
    failing = f"[[ $2 == {command} ]] || exit 0; printf '%s\\n' 'W: old' 'E: no network' 'E: more' >&2; exit 100"
    done = packages("there", "wanted", **{"apt-get": failing})
    assert done.returncode == 1
    assert done.stderr == f"demo: apt-get {command} failed: E: no network; please install: wanted\n"


def test_an_environment_that_was_interrupted_is_made_anew(tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(COMMON, tmp_path / "scripts")
    for folder in ("bench", "docs", "examples", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tests" / "requirements.txt").touch()
    subprocess.run(["python3", "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    (tmp_path / ".venv" / "of-before").touch()
    call = 'source scripts/common.sh; environment .venv tests/requirements.txt; "$python" -m pip --version'
    for _ in range(2):
        done = subprocess.run(["bash", "-c", call], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and str(tmp_path) in done.stdout, done.stdout + done.stderr
        assert not (tmp_path / ".venv" / "of-before").exists()
        (tmp_path / ".venv" / "of-after").touch()
    assert (tmp_path / ".venv" / "of-after").exists()


def script(text):
    """What a script that begins with common.sh prints and how it ends."""
    return subprocess.run(["bash", "-c", f'source "$1"; {text}', "test", COMMON], capture_output=True, text=True)


def test_each_part_s_time():
    done = script("part One; sleep 1.1; part Two; say more; parts_end")
    assert done.returncode == 0 and done.stderr == ""
    seconds = [int(line.split()[0]) for line in done.stdout.split("== time by parts\n")[1].splitlines()]
    assert done.stdout.split("== time by parts\n")[1].split("\n")[0].endswith(" s  One")
    assert len(seconds) == 3 and seconds[0] >= 1 and seconds[2] >= seconds[0] + seconds[1]
    assert done.stdout.startswith("\n== One (after 0 s)\n") and "\n== more\n" in done.stdout


def test_a_command_in_the_background():
    done = script('in_background Late eval "sleep 1; echo made"; echo first; await Late; echo last')
    assert (done.returncode, done.stdout, done.stderr) == (0, "first\nmade\nlast\n", "")


def test_a_command_in_the_background_that_fails():
    done = script("in_background Late eval 'echo why; exit 3'; await Late; echo last")
    assert (done.returncode, done.stdout, done.stderr) == (1, "why\n", "test: Late failed\n")


def test_what_runs_in_the_background_ends_with_the_script():
    done = script('in_background Late eval "sleep 60; true"; echo "${background[Late]}"; die enough')
    group, log = done.stdout.split()
    assert done.returncode == 1 and done.stderr == "test: enough\n" and not Path(log).exists()
    for _ in range(100):
        if subprocess.run(["pgrep", "-g", group, "-r", "D,R,S,T"], stdout=subprocess.DEVNULL).returncode:
            return  # nothing runs; a zombie may wait for its parent
        time.sleep(0.1)
    pytest.fail("it runs on")
