"""Where the tests find the program: ANYFLASH_PROGRAM, or the newest build*/src/cli/anyflash of this checkout. They
fail, and are not skipped, where there is none."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def find_program():
    named = os.environ.get("ANYFLASH_PROGRAM")
    if named:
        return Path(named)
    return max(ROOT.glob("build*/src/cli/anyflash"), key=lambda path: path.stat().st_mtime, default=None)


@pytest.fixture(scope="session")
def program():
    path = find_program()
    if path is None or not path.is_file():
        pytest.fail("the anyflash program is not built: cmake -B build && cmake --build build, or set ANYFLASH_PROGRAM")
    return path.resolve()


class Program:
    """Runs the program in a folder of its own."""

    def __init__(self, path, folder):
        self.path, self.folder = path, folder

    def __call__(self, *arguments, **environment):
        return subprocess.run(
            [self.path, *map(str, arguments)],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **environment},
        )

    def succeeds(self, *arguments, **environment):
        done = self(*arguments, **environment)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    def fails(self, *arguments):
        """One line on stderr, nothing on stdout, exit code 1; returns the line."""
        done = self(*arguments)
        assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
        assert done.stdout == ""
        assert done.stderr.startswith("anyflash: ") and done.stderr.endswith("\n")
        assert done.stderr.count("\n") == 1 and done.stderr[:-1].isprintable(), repr(done.stderr)
        return done.stderr[len("anyflash: ") : -1]


@pytest.fixture
def anyflash(program, tmp_path):
    return Program(program, tmp_path)
