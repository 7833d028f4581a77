"""The accuracy bar: errors against the truth, held against those of the textbook formula in the inputs' type.

    largest error <= 2 * (the textbook's largest) + 1 unit in the last place of the largest true value
    root mean square <= (1.5 + 4 / sqrt(n)) * (the textbook's) + a tenth of that unit, of n errors

The first is the specification's. The largest of a few errors is a matter of chance, so it is decided over many draws,
and the largest of many could hide that every error has doubled. The second shows that; of few errors it is chance too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from reference import LEAST_EXPONENT, MANTISSA


def unit_in_last_place(value, name):
    if not np.isfinite(value) or value == 0:
        return 2.0 ** (LEAST_EXPONENT[name] - MANTISSA[name])
    exponent = max(int(np.floor(np.log2(np.longdouble(value)))), LEAST_EXPONENT[name])
    return 2.0 ** (exponent - MANTISSA[name])


@dataclass
class Errors:
    largest: float
    squares: np.longdouble  # their sum
    count: int

    @staticmethod
    @np.errstate(all="ignore")
    def of(got, truth):
        got = got.astype(truth.dtype)
        same = (got == truth) | (np.isnan(got) & np.isnan(truth))
        errors = np.where(same, 0, np.abs(got - truth)).astype(np.longdouble)
        return Errors(float(errors.max(initial=0)), (errors * errors).sum(), np.count_nonzero(np.isfinite(truth)))

    @property
    def mean(self):
        """Root mean square."""
        return float(np.sqrt(self.squares / max(self.count, 1)))


@dataclass
class Measured:
    """A result's errors and the textbook's, over one draw or many."""

    ours: Errors
    textbook: Errors
    unit: float

    def miss(self):
        """What is over the bar, or None."""
        bars = {
            "largest error": (self.ours.largest, self.textbook.largest, 2, 1),
            "root mean square": (self.ours.mean, self.textbook.mean, 1.5 + 4 / max(self.ours.count, 1) ** 0.5, 0.1),
        }
        for what, (ours, textbook, factor, units) in bars.items():
            bar = factor * textbook + units * self.unit
            if not ours <= bar:
                return f"{what} {ours:.3g}, bar {bar:.3g} (textbook {textbook:.3g}, unit {self.unit:.3g})"
        return None


def _all(errors):
    errors = list(errors)
    return Errors(
        float(np.max([e.largest for e in errors])), sum(e.squares for e in errors), sum(e.count for e in errors)
    )


def together(draws):
    """The same result's errors in several draws."""
    return Measured(_all(d.ours for d in draws), _all(d.textbook for d in draws), max(d.unit for d in draws))


def compare(label, got, truth, textbooks, name):
    """Measures a result of element type `name`; of several textbooks the worst counts. Raises AssertionError unless
    shapes and non-finite values are the same."""
    got = np.asarray(got)
    assert got.shape == truth.shape, f"{label}: shape {got.shape}, expected {truth.shape}"
    got = got.astype(truth.dtype)
    for what, test in (("NaN", np.isnan), ("infinity", np.isinf)):
        wrong = test(got) != test(truth)
        assert not wrong.any(), f"{label}: {what} differs at {np.argwhere(wrong)[0]}, {np.count_nonzero(wrong)} places"
    finite = np.abs(truth[np.isfinite(truth)])
    unit = unit_in_last_place(float(finite.max(initial=0)), name)
    others = [Errors.of(textbook, truth) for textbook in textbooks]
    worst = Errors(max(o.largest for o in others), max(o.squares for o in others), others[0].count)
    return Measured(Errors.of(got, truth), worst, unit)
