"""examples/digits: it learns, with local_2d as with TensorFlow's own operations."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import keras
import pytest
from anyflash.tensorflow import local_2d

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "digits" / "train.py"
spec = importlib.util.spec_from_file_location("digits", PROGRAM)  # another example has a train.py too
digits = importlib.util.module_from_spec(spec)
spec.loader.exec_module(digits)


def test_it_learns_as_with_tensorflow_s_operations():
    calls = []

    def near(q, k, v):
        calls.append(q.shape)
        return local_2d(q, k, v, digits.WINDOW, 0, False, "none_front")

    found = {}
    for attention in (near, digits.textbook):
        keras.utils.set_random_seed(0)
        found[attention] = digits.train(digits.make_model(attention), *digits.pictures(), 3)
    assert calls
    losses, shares = zip(*found[near])
    assert losses[-1] < 0.25 * losses[0] and shares[0] < shares[-1] and shares[-1] > 0.8
    for one, other in zip(found[near], found[digits.textbook]):
        assert one == pytest.approx(other, abs=0.03)


def test_program():
    run = subprocess.run([sys.executable, PROGRAM, "--epochs", "1"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].endswith("1437 pictures to learn, 360 for the test") and lines[1].startswith("epoch 1  loss ")
    assert len(lines) == 3 + 8 + 1 and len(lines[-1].split()) == 5
    run = subprocess.run([sys.executable, PROGRAM, "--epochs", "0"], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.splitlines()[-1].endswith("--epochs: 0, expected at least 1")
