"""examples/long_sequence: two processes learn as one does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.of_the_cpu

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "long_sequence" / "train.py"


def losses(*arguments):
    ran = subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", ran.stdout)], ran.stdout


def test_two_processes_learn_as_one():
    options = "--tokens", "600", "--steps", "10"
    one, _ = losses("--processes", "1", *options)
    two, shown = losses("--processes", "2", *options)
    assert len(one) == 5 and one[-1] < one[0]
    assert two == pytest.approx(one, abs=2e-3)
    assert shown.startswith("600 tokens, ") and "2 processes" in shown


def test_wrong_arguments():
    ran = subprocess.run([sys.executable, PROGRAM, "--steps", "0"], capture_output=True, text=True)
    assert ran.returncode == 2 and "must be at least 1" in ran.stderr
