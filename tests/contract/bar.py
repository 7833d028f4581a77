"""The accuracy bar: errors against the truth, held against those of the textbook formula in the inputs' type.

    largest error <= 2 * (the textbook's largest) + 1 unit in the last place of the largest true value
    root mean square <= (1.5 + 4 / sqrt(n)) * (the textbook's) + a tenth of that unit, of n errors (of lse, l and m of
                        bfloat16 on a GPU 0.35: up to 2.4 times the textbook's were measured there)
    common factor <= 2 * (the textbook's) + 5 standard errors + a quarter of the type's epsilon (two in float32 and float64)

The first is the specification's. The largest of a few errors is a matter of chance, so it is decided over many draws,
and the largest of many could hide that every error has doubled. The second shows that; of few errors it is chance too.
The third is what all errors have in common, relative to the results: numbers cut off in place of rounded show there.
Errors of one draw may hang together (one rounded number in all of them), so the standard error is also that of the
draws' factors. Where the size of a result differs by orders of magnitude from draw to draw, one draw would decide for all:
such errors are taken relative to sizes.
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
    along: np.longdouble  # the sum of errors times results
    power: np.longdouble  # the sum of squared results
    spread: float = 0.0  # the standard error of `factor`, by how it differs from draw to draw

    @staticmethod
    @np.errstate(all="ignore")
    def of(got, truth, sizes=1):
        got = got.astype(truth.dtype)
        same = (got == truth) | (np.isnan(got) & np.isnan(truth))
        errors = np.where(same, 0, got - truth).astype(np.longdouble) / sizes
        finite = np.where(np.isfinite(truth), truth, 0) / sizes
        return Errors(
            float(np.abs(errors).max(initial=0)),
            (errors * errors).sum(),
            np.count_nonzero(np.isfinite(truth)),
            (errors * finite).sum(),
            (finite * finite).sum(),
        )

    @property
    def mean(self):
        """Root mean square."""
        return float(np.sqrt(self.squares / max(self.count, 1)))

    @property
    def factor(self):
        """The least squares fit of errors = factor * results."""
        return float(abs(self.along) / self.power) if self.power else 0.0

    @property
    def factor_error(self):
        return max(self.spread, self.mean / float(np.sqrt(self.power))) if self.power else 0.0


@dataclass
class Measured:
    """A result's errors and the textbook's, over one draw or many."""

    ours: Errors
    textbook: Errors
    unit: float
    name: str  # the type's
    slack: float = 0.1  # of the root mean square, in units

    @property
    def epsilon(self):
        mantissa = MANTISSA[self.name]
        return (0.25 if mantissa <= 10 else 2) * 2.0**-mantissa

    def miss(self):
        """What is over the bar, or None."""
        bars = {
            "largest error": (self.ours.largest, self.textbook.largest, 2, 1),
            "root mean square": (
                self.ours.mean,
                self.textbook.mean,
                1.5 + 4 / max(self.ours.count, 1) ** 0.5,
                self.slack,
            ),
        }
        for what, (ours, textbook, factor, units) in bars.items():
            bar = factor * textbook + units * self.unit
            if not ours <= bar:
                return f"{what} {ours:.3g}, bar {bar:.3g} (textbook {textbook:.3g}, unit {self.unit:.3g})"
        ours, textbook = self.ours.factor, self.textbook.factor
        bar = 2 * textbook + 5 * (self.ours.factor_error + self.textbook.factor_error) + self.epsilon
        return None if ours <= bar else f"common factor {ours:.3g}, bar {bar:.3g} (textbook {textbook:.3g})"


def _all(errors):
    errors = list(errors)
    squares, count, along, power = (
        sum(getattr(e, name) for e in errors) for name in ("squares", "count", "along", "power")
    )
    apart = sum((e.along - along / power * e.power) ** 2 for e in errors) if power else 0
    return Errors(
        float(np.max([e.largest for e in errors])),
        squares,
        count,
        along,
        power,
        float(np.sqrt(apart) / power) if power else 0.0,
    )


def together(draws):
    """The same result's errors in several draws."""
    return Measured(
        _all(d.ours for d in draws),
        _all(d.textbook for d in draws),
        max(d.unit for d in draws),
        draws[0].name,
        draws[0].slack,
    )


def compare(label, got, truth, textbooks, name, sizes=None, slack=0.1):
    """Measures a result of element type `name`; of several textbooks the worst counts. sizes: one for each number, that
    errors are relative to; slack: of the root mean square, in units. Raises AssertionError unless shapes and non-finite
    values are the same."""
    got = np.asarray(got)
    assert got.shape == truth.shape, f"{label}: shape {got.shape}, expected {truth.shape}"
    got = got.astype(truth.dtype)
    for what, test in (("NaN", np.isnan), ("infinity", np.isinf)):
        wrong = test(got) != test(truth)
        assert not wrong.any(), f"{label}: {what} differs at {np.argwhere(wrong)[0]}, {np.count_nonzero(wrong)} places"
    if sizes is None:
        sizes = 1
        unit = unit_in_last_place(float(np.abs(truth[np.isfinite(truth)]).max(initial=0)), name)
    else:
        units = [unit_in_last_place(abs(float(x)), name) / size for x, size in zip(truth.flat, sizes.flat)]
        unit = max(units, default=0.0)
    others = [Errors.of(textbook, truth, sizes) for textbook in textbooks]
    worst = Errors(
        max(o.largest for o in others),
        max(o.squares for o in others),
        others[0].count,
        max((o.along for o in others), key=abs),
        others[0].power,
    )
    return Measured(Errors.of(got, truth, sizes), worst, unit, name, slack)
