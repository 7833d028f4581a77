"""The reference itself: the specification's own examples, and its gradients against finite differences."""

import numpy as np
import pytest
from bar import unit_in_last_place
from reference import Call, Exact, attention
from reference_rules import places, visible


@pytest.mark.parametrize(
    "align, expected",
    [("none_front", [0, 1, 2]), ("none_end", [3, 4, 5]), ("scale_front", [0, 2, 4]), ("scale_end", [1, 3, 5])],
)
def test_three_keys_of_six_queries(align, expected):
    assert places((6,), (3,), align).y[:, 0].tolist() == expected


@pytest.mark.parametrize(
    "rule, expected",
    [
        (("causal",), ["1000", "1100", "1110", "1111"]),
        (("local", 2, 0, True), ["1000", "1100", "0110", "0011"]),
        (("local", 2, 1, False), ["1010", "0101", "1010", "0101"]),
        (("window", 1, 0), ["1000", "1100", "0110", "0011"]),
        (("prefix", 2), ["1100"] * 4),
        (("prefix_queries", 2), ["1111", "1111", "0000", "0000"]),
        (("tiles", 2, 1), ["1100", "1100", "0011", "0011"]),
        (("neighbourhood", 3, 1, False), ["1110", "1110", "0111", "0111"]),
        (("neighbourhood", 2, 2, True), ["1000", "0100", "1010", "0101"]),
        (("documents", [5, 5, 7, 5], [5, 7, 7, 5]), ["1001", "1001", "0110", "1001"]),
        (("and", ("causal",), ("documents_packed", [0, 1, 4], [0, 3, 4])), ["1000", "0001", "0001", "0001"]),
        (("blocks", np.eye(2), 2, 2), ["1100", "1100", "0011", "0011"]),
    ],
)
def test_patterns_by_hand(rule, expected):
    mask = visible(rule, (4,), (4,), "none_front")[0][0, 0]
    assert ["".join(map(str, row)) for row in mask.astype(int)] == expected


def test_gradients_are_the_derivative():
    rng = np.random.default_rng(0)
    given = {
        "q": rng.standard_normal((2, 2, 4, 3)),
        "k": rng.standard_normal((2, 1, 5, 3)),
        "v": rng.standard_normal((2, 1, 5, 2)),
        "bias": rng.standard_normal((1, 2, 1, 5)),
        "sink": rng.standard_normal(2),
    }
    mask = rng.random((2, 2, 4, 5)) < 0.6
    mask[0, 1, 2] = False
    dout, dlse = rng.standard_normal((2, 2, 4, 2)), rng.standard_normal((2, 2, 4))

    def result(**changes):
        t = given | changes
        return attention(
            Call(t["q"], t["k"], t["v"], mask, 0.7, 2.0, t["bias"], None, t["sink"], dout, dlse), Exact(np.float64)
        )

    def loss(**changes):
        r = result(**changes)
        return (r.out * dout).sum() + np.where(np.isfinite(r.lse), r.lse * dlse, 0).sum()

    gradients = result()
    for name, value in given.items():
        for index in np.ndindex(value.shape):
            step = np.zeros_like(value)
            step[index] = 1e-5
            slope = (loss(**{name: value + step}) - loss(**{name: value - step})) / 2e-5
            assert abs(slope - getattr(gradients, "d" + name)[index]) < 1e-8, (name, index)


@pytest.mark.parametrize(
    "name, value, unit", [("float32", 1.0, 2**-23), ("bfloat16", 3.9, 2**-6), ("float16", 1e-9, 2**-24)]
)
def test_unit_in_last_place(name, value, unit):
    assert unit_in_last_place(value, name) == unit
