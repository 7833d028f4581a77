"""The core selection under every instruction set that was compiled in and runs here."""

import os
import subprocess
import sys
from pathlib import Path

import anyflash as af
import pytest

SETS = list(af._core.instruction_sets())


def test_there_is_more_than_the_best():
    assert len(SETS) >= 2, SETS


@pytest.mark.parametrize("isa", SETS)
def test_core_selection(isa):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist",
               str(Path(__file__).with_name("test_core.py"))]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, env=environment | {"ANYFLASH_ISA": isa}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
