"""The bar itself: what must be over it is, and what need not be is not."""

import cases
import numpy as np
import pytest
from bar import Errors, Measured, compare, together
from cases import Case, check, result_type
from reference import MANTISSA, TYPES, Result, Textbook, attention, exact_for
from strategies import FLOATS

CALL = Case(q_shape=(60,), k_shape=(60,), d_qk=64, d_v=64, rule=("causal",))


def errs_by(factor):
    """In place of the library: the textbook in its other order, with its errors times `factor`."""

    def run(case, tensors=None, backward=True, **changes):
        call = case.call(tensors, backward)
        truth = attention(call, exact_for(case.type))
        made = attention(call, Textbook(case.type, fused=True))
        results = {}
        for name, value in made.items():
            right = getattr(truth, name)
            results[name] = (right + factor * (value - right)).astype(TYPES[result_type(case, name)])
        return Result(**results)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("type", ["float32", "float64"])
def test_doubled_errors_are_a_miss(type, monkeypatch):
    """Though the largest of them are not."""
    monkeypatch.setattr(cases, "run", errs_by(1))
    check(CALL.but(type=type))
    monkeypatch.setattr(cases, "run", errs_by(2))
    with pytest.raises(AssertionError, match="^over 128 draws: .*root mean square"):
        check(CALL.but(type=type))


@pytest.mark.slow
@pytest.mark.parametrize("type", FLOATS)
def test_errors_of_three_times_the_textbook_s_are_a_miss(type, monkeypatch):
    monkeypatch.setattr(cases, "run", errs_by(3))
    with pytest.raises(AssertionError, match="^over 128 draws: "):
        check(CALL.but(type=type))


def draw(seed, factor, count, outlier=0.0):
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(count)
    ours, textbook = (truth + 1e-5 * f * rng.standard_normal(count) for f in (factor, 1))
    textbook[0] += outlier
    return compare("out", ours, truth, [textbook], "float32")


@pytest.mark.parametrize("count, draws", [(10_000, 1), (300, 32), (20, 32)])
def test_the_mean_sees_what_one_outlier_of_the_textbook_hides(count, draws):
    assert together([draw(seed, 1.0, count) for seed in range(draws)]).miss() is None
    hidden = together([draw(seed, 2.5, count, 1e-4 * (seed == 0)) for seed in range(draws)])
    assert hidden.ours.largest < 2 * hidden.textbook.largest
    assert hidden.miss().startswith("root mean square ")


def draw_of_some_size(seed, factor, relative):
    """One number of a size that goes by exp of a normal number."""
    rng = np.random.default_rng(seed)
    size = np.exp(3 * rng.standard_normal(1))
    truth = size * rng.standard_normal(1)
    ours, textbook = (truth + 1e-3 * f * size * rng.standard_normal(1) for f in (factor, 1))
    return compare("dsink", ours, truth, [textbook], "float32", size if relative else None)


def test_no_draw_decides_for_all_of_other_sizes():
    def misses(factor, relative):
        firsts = range(0, 50 * 128, 128)
        draws = ([draw_of_some_size(first + i, factor, relative) for i in range(128)] for first in firsts)
        return sum(together(of_one).miss() is not None for of_one in draws)

    assert misses(1, False) > 5 and misses(2.5, False) < 45
    assert misses(1, True) == 0 and misses(2.5, True) == 50


def test_one_large_error_among_many_is_a_miss():
    truth = np.ones(100_000)
    ours = truth.copy()
    ours[7] += 1e-5
    measured = compare("out", ours, truth, [truth + 1e-6], "float32")
    assert measured.ours.mean < measured.textbook.mean
    assert measured.miss().startswith("largest error 1e-05, bar 2.12e-06 ")


def test_nothing_is_no_miss():
    assert compare("out", np.zeros((0, 3)), np.zeros((0, 3)), [np.zeros((0, 3))], "float32").miss() is None
    assert (
        Measured(Errors(np.nan, np.nan, 1, np.nan, 1), Errors(0.0, 0.0, 1, 0.0, 1), 1.0, "float32")
        .miss()
        .startswith("largest error nan")
    )


@pytest.mark.parametrize("type", ["float16", "bfloat16"])
def test_a_common_factor_is_a_miss(type):
    """Less than numbers that are cut off would have, and more than the other two see."""
    truth = np.random.default_rng(1).standard_normal(20_000)
    textbook = truth.astype(TYPES[type]).astype(np.float64)
    assert compare("out", textbook, truth, [textbook], type).miss() is None
    shrunk = textbook * (1 - 0.3 * 2.0 ** -MANTISSA[type])
    assert compare("out", shrunk, truth, [textbook], type).miss().startswith("common factor ")


def draw_with_one_factor(seed, shift):
    """All errors of a draw are one relative error, ours and the textbook's another; shift: of ours, in every draw."""
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(50)
    ours, textbook = (truth * (1 + factor) for factor in 1e-5 * rng.standard_normal(2) + (1e-5 * shift, 0))
    return compare("out", ours, truth, [textbook], "float32")


def test_errors_that_hang_together_in_a_draw_are_no_common_factor_of_all():
    for first in range(0, 640, 32):
        assert together([draw_with_one_factor(first + i, 0) for i in range(32)]).miss() is None
    shifted = together([draw_with_one_factor(i, 1.2) for i in range(128)])
    assert shifted.miss().startswith("common factor ")
