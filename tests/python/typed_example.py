"""A small program that mypy --strict must accept, and whose types must be the right ones (test_python_package.py)."""

import anyflash as af
import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

q: NDArray[np.float32] = np.zeros((1, 2, 8, 16), np.float32)
rule = af.causal() & ~af.local(4, causal=True) | af.window((1,), 3) | af.documents(np.zeros(8, np.int32))
assert_type(rule, af.Rule)
assert_type(af.attention(q, q, q, rule=rule), NDArray[np.float32])
assert_type(af.attention(q, q, q, return_lse=True), tuple[NDArray[np.float32], NDArray[np.float32]])
assert_type(len(af.attention(q, q, q, return_lse="lm")), int)
out, lse = af.attention(q, q, q, align="none_end", scale=0.5, return_lse=True)
gradients = af.attention_backward(out, q, q, q, out, lse, align="none_end", scale=0.5)
assert_type(gradients, af.Gradients)
plan = af.plan(q, q, q, rule=rule)
assert_type(plan, af.Plan)
seen = af.explain(rule, (8,), align="none_end")
assert_type(seen.visible_pairs, int)
assert_type(seen.pattern, NDArray[np.bool_])
print(seen, seen.svg())
