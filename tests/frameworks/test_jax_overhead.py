"""bench/overhead --framework jax: the calls that it times do the same."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import overhead_jax


def test_the_calls_do_the_same():
    calls = overhead_jax.calls()
    made = {name: call() for name, call in calls.items()}
    expected = made.pop("NumPy, forward")
    assert overhead_jax.OURS in made and made.pop("an addition").shape == expected.shape
    for name, out in made.items():
        if name.endswith(", forward"):
            np.testing.assert_allclose(out, expected, atol=1e-5)
    ours, theirs = (gradients for name, gradients in made.items() if name.endswith("backward"))
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, atol=1e-5)
