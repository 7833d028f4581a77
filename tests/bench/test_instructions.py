"""bench/instructions: wrong options, its record, and that a count that has changed fails. valgrind's place is taken by
a script that says what it would."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "bench"))

import instructions

NAMES = [" ".join(case) for case in instructions.CASES]
VALGRIND = """#!/bin/sh
# callgrind's last line; the counts differ by the direction and the type that follow --direction and --type.
echo "$@" >>"$LOG"
case "$*" in
  *"toggle-collect=anyflash::forward("*float32*) refs=1,000,000 ;;
  *"toggle-collect=anyflash::backward("*float32*) refs=2,000,000 ;;
  *"toggle-collect=anyflash::forward("*) refs=3,000,000 ;;
  *) refs=4,000,000 ;;
esac
echo "==1== I   refs:      ${REFS:-$refs}" >&2
"""


@pytest.fixture
def run(tmp_path):
    """Runs the script with a program of GCC 12.2.0 and the counts above."""
    (tmp_path / "bin").mkdir()
    program, valgrind = tmp_path / "anyflash", tmp_path / "bin" / "valgrind"
    program.write_bytes(b"\x7fELF\0GCC: (Debian 12.2.0-14) 12.2.0\0GCC: (Debian 12.2.0-14) 12.2.0\0")
    valgrind.write_text(VALGRIND)
    program.chmod(0o755), valgrind.chmod(0o755)

    def call(*arguments, **environment):
        environment = dict(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", LOG=str(tmp_path / "log")) | environment
        return subprocess.run(
            [
                sys.executable,
                PROJECT / "bench" / "instructions.py",
                "--program",
                program,
                "--file",
                tmp_path / "record.json",
                *map(str, arguments),
            ],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )

    return call


def record(tmp_path, counts=(1000000, 2000000, 3000000, 4000000), compiler="GCC: (Debian 12.2.0-14) 12.2.0"):
    (tmp_path / "record.json").write_text(json.dumps({"compiler": compiler, "counts": dict(zip(NAMES, counts))}))


def test_the_record_holds_the_counts_and_the_compiler(run, tmp_path):
    done = run("--record")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "record.json").read_text()) == {
        "compiler": "GCC: (Debian 12.2.0-14) 12.2.0",
        "instruction_set": "AVX2",
        "counts": dict(zip(NAMES, (1000000, 2000000, 3000000, 4000000))),
    }
    assert run().returncode == 0
    assert "--threads 1" in (tmp_path / "log").read_text() and (tmp_path / "log").read_text().count("\n") == 8


@pytest.mark.parametrize(
    "counts, changed",
    [
        ((1029000, 2000000, 2920000, 4000000), 0),
        ((1000000, 2000000, 3000000, 3870000), 1),  # slower by 3.4 %
        ((1040000, 2000000, 3100000, 4000000), 2),  # faster by 3.8 and 3.2 %
    ],
)
def test_a_changed_count_fails(run, tmp_path, counts, changed):
    record(tmp_path, counts)
    done = run()
    assert done.returncode == (1 if changed else 0)
    assert done.stdout.count("CHANGED") == changed and len(done.stdout.splitlines()) == 4
    assert done.stderr == (
        f"bench/instructions: {changed} of 4 counts changed by more than 3 %; where that is right, "
        "bench/instructions --record writes the new ones\n"
        if changed
        else ""
    )


@pytest.mark.parametrize(
    "counts, changed",
    [
        ((1090000, 2000000, 2760000, 4000000), 0),  # faster by 8.3, slower by 8.7 %
        ((1000000, 1800000, 3000000, 4500000), 2),  # slower by 11.1, faster by 11.1 %
    ],
)
def test_counts_of_another_compiler_may_differ_more(run, tmp_path, counts, changed):
    record(tmp_path, counts, "GCC: (GNU) 14.1.0")
    done = run()
    assert done.returncode == (1 if changed else 0) and done.stdout.count("CHANGED") == changed
    assert done.stdout.startswith(
        "up to 10 % allowed: the record is of GCC: (GNU) 14.1.0, this program is of GCC: (Debian 12.2.0-14) 12.2.0\n"
    )
    assert ("changed by more than 10 %" in done.stderr) == bool(changed)


@pytest.mark.parametrize(
    "name, compiler",
    [
        (b"\0Debian clang version 14.0.6\0GCC: (GNU) 12.2.0\0", "Debian clang version 14.0.6, GCC: (GNU) 12.2.0"),
        (b"nothing", "unknown"),
    ],
)
def test_the_compiler_s_name_is_found(tmp_path, name, compiler):
    (tmp_path / "program").write_bytes(name)
    assert instructions.compiler_of(tmp_path / "program") == compiler


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--program", "/no/program"], "--program: no program /no/program"),
        (["--record", "--file", "/no/where.json"], "--file: /no/where.json cannot be written"),
        (
            ["--file", "/no/where.json"],
            "/no/where.json: No such file or directory; bench/instructions --record writes it",
        ),
        (["--file", __file__], "not a record of these cases"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_wrong_options(run, arguments, message):
    done = run(*arguments)
    assert done.returncode == 1 and message in done.stderr, done.stderr
    assert done.stderr.startswith("bench/instructions: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "environment, message",
    [
        (dict(REFS="42"), "42 instructions: the library's calls were not found in"),
        (dict(REFS="none"), "refs:      none"),
        (dict(PATH="/nowhere"), "valgrind is missing"),
    ],
)
def test_a_count_that_is_none_fails(run, tmp_path, environment, message):
    record(tmp_path)
    done = run(**environment)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


def test_the_record_is_of_these_cases():
    compiler, counts = instructions.read(instructions.RECORD)
    assert list(counts) == NAMES and all(count > 1000000 for count in counts.values()) and compiler.startswith("GCC")
