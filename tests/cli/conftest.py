"""The program, run in a folder of its own."""

import os
import subprocess

import pytest


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
