"""bench/overhead --framework tensorflow: the calls that it times do the same."""

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"
PROGRAM = """
import numpy as np
import overhead_tensorflow as overhead
calls = overhead.calls()
made = {name: call() for name, call in calls.items() if "addition" not in name}
expected = made.pop("NumPy, forward")
assert overhead.OURS in made and len(made) == 16
gradients = []
for name, results in made.items():
    if name.endswith(", forward"):
        np.testing.assert_allclose(results, expected, atol=1e-5, err_msg=name)
    else:
        gradients.append(results)
for results in gradients[1:]:
    for one, other in zip(results, gradients[0], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
"""


def test_the_calls_do_the_same():
    """In a process of its own: the calls set TensorFlow's threads."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=BENCH)
    assert done.returncode == 0, done.stderr
