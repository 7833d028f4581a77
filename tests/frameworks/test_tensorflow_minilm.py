"""examples/minilm/on_tensorflow.py: the same attention as without it."""

import sys
from pathlib import Path

import numpy as np

import anyflash as af

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "minilm"))

from on_tensorflow import attention_of  # noqa: E402


def test_it_computes_the_same():
    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(4, dtype=np.int32), [5, 9, 1, 6])
    q, k, v = (rng.standard_normal((21, 12, 32), np.float32).transpose(1, 0, 2) for _ in range(3))
    for given, rule in ((ids, af.documents(ids, ids)), (None, af.full())):
        expected = af.attention(q[None], k[None], v[None], rule=rule)[0]
        np.testing.assert_array_equal(attention_of(given)(q, k, v), expected)
