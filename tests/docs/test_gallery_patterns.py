"""The gallery's recipes show what their patterns' definitions say, written out pair by pair."""

import sys
from pathlib import Path

import anyflash as af
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
from make_gallery import IMPORTS, KEY_SHAPES, PATTERNS, SIGNED_ALIBI, rule_of

RECIPES = {heading: (code, shape) for heading, code, shape, _ in PATTERNS}
IMAGES_SO_FAR = [0] * 8 + [1] * 20 + [2] * 12 + [3] * 24


def flamingo(x, y):
    """The image of key y is the last or the last but one before text token x."""
    return 0 <= IMAGES_SO_FAR[x[0]] - (1 + y[0] // 16) <= 1


DEFINITIONS = {
    "Dilated sliding window": lambda x, y: (x[0] - y[0]) % 4 == 0 and abs(x[0] - y[0]) <= 20,
    "Dilated window of any step": lambda x, y: (x[0] - y[0]) % 3 == 0 and abs(x[0] - y[0]) <= 15,
    "Longformer": lambda x, y: abs(x[0] - y[0]) <= 6 or x[0] < 4 or y[0] < 4,
    "StreamingLLM": lambda x, y: y[0] <= x[0] and (x[0] - y[0] < 16 or y[0] < 4),
    "Prefix LM": lambda x, y: y[0] <= x[0] or y[0] < 20,
    "Two-dimensional local": lambda x, y: abs(x[0] - y[0]) <= 2 and abs(x[1] - y[1]) <= 2,
    "Flamingo with overlapping intervals": flamingo,
    "Sparse VideoGen, spatial head": lambda x, y: abs(x[0] - y[0]) <= 1 or y[0] == 0,
    "Sparse VideoGen, temporal head": lambda x, y: (x[1] == y[1] and abs(x[2] - y[2]) <= 1) or y[0] == 0,
}


@pytest.mark.parametrize("heading", DEFINITIONS)
def test_visible_pairs(heading):
    code, shape = RECIPES[heading]
    keys = KEY_SHAPES.get(heading, shape)
    expected = [[DEFINITIONS[heading](x, y) for y in np.ndindex(keys)] for x in np.ndindex(shape)]
    np.testing.assert_array_equal(af.explain(rule_of(code), shape, keys).pattern, expected)


@pytest.mark.parametrize("step", [3, 5, 6, 7])
def test_dilated_windows_of_any_step_and_length(step):
    """The grid that a step cuts the sequence into, in words and tiles: against the pattern of a dense mask."""
    places = np.arange(300)
    distance = places[:, None] - places
    visible = (distance % step == 0) & (abs(distance) <= 10 * step) & (distance >= 0)
    q, k, v = np.random.default_rng(step).standard_normal((3, 1, 1, 300, 16))
    rule = af.neighbourhood(300, dilation=step) & af.window(10 * step, 10 * step) & af.causal()
    np.testing.assert_array_equal(af.explain(rule, 300).pattern, visible)
    np.testing.assert_allclose(
        af.attention(q, k, v, rule=rule), af.attention(q, k, v, rule=af.dense(visible)), rtol=1e-12, atol=1e-13
    )


def test_signed_alibi():
    names = {}
    exec(f"{IMPORTS}\n{SIGNED_ALIBI}", names)
    q, k, v = (names[name].astype(np.float64) for name in "qkv")
    distance = np.arange(64) - np.arange(64)[:, None]  # key - query
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(32) + names["slopes"][:, None, None] * distance
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(names["out"], weights / weights.sum(-1, keepdims=True) @ v, atol=1e-5)
