"""The backward pass against central differences of the library's own forward pass, in float64, one option at a time."""

import anyflash as af
import numpy as np
import pytest
from cases import Case, Laid
from devices import from_device

BASE = Case(type="float64", batch=2, heads_q=2, heads_kv=1, q_shape=(4,), k_shape=(5,), d_qk=3, d_v=2, seed=3)
OPTIONS = {
    "plain": {},
    "scale": dict(scale=-0.8),
    "softcap": dict(softcap=0.7),
    "bias": dict(bias=("float64", (True, True, True, True))),
    "bias over batch and keys": dict(bias=("float64", (False, True, True, False))),
    "bias of keys": dict(bias=("float64", (False, False, False, True))),
    "bias of heads": dict(bias=("float64", (False, True, False, False))),
    "alibi": dict(alibi=("float64", True)),
    "sink": dict(sink="float64"),
    "without dlse": dict(dlse=False, sink="float64"),
    "causal": dict(rule=("causal",), align="none_end"),
    "masked rows": dict(rule=("causal",), align="none_end", q_shape=(7,), sink="float64"),
    "nothing visible": dict(rule=("not", ("full",)), sink="float64", bias=("float64", (True,) * 4)),
    "local, stride": dict(rule=("local", 2, 1, False), align="scale_end"),
    "key lengths": dict(key_lengths=(2, 5)),
    "documents": dict(rule=("and", ("causal",), ("documents", np.array([1, 1, 2, 2]), np.array([1, 2, 2, 1, 1])))),
    "two dimensions": dict(q_shape=(2, 2), k_shape=(3, 2), rule=("local", 2, 0, False), layout="bhds"),
    "ragged": dict(batch=1, layout="thd", cu_q=(0, 3, 4), cu_k=(0, 1, 5)),
    "packed": dict(batch=1, heads_kv=2, layout="qkv", k_shape=(4,), d_v=3),
    "all together": dict(
        scale=0.9,
        softcap=1.5,
        bias=("float64", (True, False, True, True)),
        alibi=("float64", False),
        sink="float64",
        rule=("or", ("causal",), ("sink", 2)),
        align="none_end",
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_central_differences(option):
    case = BASE.but(**OPTIONS[option])
    laid = Laid(case)
    gradients = laid.run()
    dlse = case.tensors.get("dlse")

    def loss(tensors):
        moved = Laid(case, tensors)
        out, lse = map(from_device, af.attention(moved.q, moved.k, moved.v, return_lse=True, **moved.options))
        total = (moved.from_layout(out) * case.tensors["dout"]).sum()
        lse = moved.statistic_from_layout(lse)
        return total if dlse is None else total + np.where(np.isfinite(lse), lse * dlse, 0).sum()

    step = 1e-5
    for name in ("q", "k", "v", "bias", "sink"):
        if name not in case.tensors:
            continue
        value, gradient = case.tensors[name], getattr(gradients, "d" + name)
        assert gradient.shape == value.shape
        for index in np.ndindex(value.shape):
            losses = []
            for sign in (1, -1):
                changed = value.copy()
                changed[index] += sign * step
                losses.append(loss(case.tensors | {name: changed}))
            slope = (losses[0] - losses[1]) / (2 * step)
            assert abs(slope - gradient[index]) < 2e-9, f"d{name}{index}: {gradient[index]}, differences give {slope}"
