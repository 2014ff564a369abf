"""The fraction of its peak that a device reaches, by the size of a matmul.

[Note: the efficiency curve]
A matmul of x FLOPs takes a constant overhead (filling the device, and the last wave of tiles, which is only partly
used) plus a time proportional to x. So it reaches this fraction of the peak:

    share · x / (x + half)

``share`` is the fraction that very large matmuls reach, and ``half`` the FLOPs at which a matmul reaches half of it.
Two numbers describe a whole generation of devices. The overhead is a time: a slower precision has the same overhead in
seconds, not in FLOPs (:meth:`zeroshard.planner.machines.machine.Machine.matmul_seconds`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EfficiencyCurve:
    """The fraction of the peak that one matmul reaches: [Note: the efficiency curve].

    >>> curve = EfficiencyCurve(share=0.8, half=1e9)
    >>> curve(1e9), round(curve(1e15), 3)
    (0.4, 0.8)
    """

    share: float
    """Fraction of the peak that very large matmuls reach: above 0, at most 1."""
    half: float
    """FLOPs of the matmul that reaches half of ``share``."""

    def __post_init__(self) -> None:
        """Check and convert the values."""
        for name, minimum, maximum in (("share", 0.0, 1.0), ("half", 0.0, math.inf)):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or not minimum <= value <= maximum or (name == "share" and value == 0):
                wanted = "a number above 0 and at most 1" if name == "share" else "a number of FLOPs from 0 up"
                raise ValueError(f"efficiency's {name} is {wanted}, got {value!r}")
            object.__setattr__(self, name, float(value))

    def __call__(self, flops: float) -> float:
        """Return the fraction of the peak that a matmul of ``flops`` reaches."""
        return self.share * (flops / (flops + self.half)) if flops > 0 else 0.0

    @classmethod
    def fit(cls, measured: Sequence[tuple[float, float]], peak: float) -> EfficiencyCurve:
        """Fit a curve to measured (FLOPs, seconds) of a device with this peak.

        Errors are relative to the measured time, so small matmuls weigh as much as large ones.

        >>> EfficiencyCurve.fit([(1e9, 3e-3), (4e9, 6e-3)], peak=2e12)
        EfficiencyCurve(share=0.5, half=2000000000.0)
        """
        if not measured:
            raise ValueError("no product was measured, and a curve needs at least one")
        # Least squares of lost + slope · x against the seconds t, each divided by t: lost/t + slope · x/t = 1.
        constants, slopes = [1 / t for _, t in measured], [x / t for x, t in measured]
        cc, ss = sum(c * c for c in constants), sum(s * s for s in slopes)
        cs = sum(c * s for c, s in zip(constants, slopes, strict=True))
        determinant = cc * ss - cs * cs
        lost, slope = 0.0, sum(slopes) / ss  # the best fit without overhead
        if len(measured) > 1 and determinant > 1e-9 * cc * ss:
            fitted_lost = (ss * sum(constants) - cs * sum(slopes)) / determinant
            fitted_slope = (cc * sum(slopes) - cs * sum(constants)) / determinant
            if fitted_lost > 0 and fitted_slope > 0:
                lost, slope = fitted_lost, fitted_slope
        slope = max(slope, 1 / peak)  # nothing is faster than its peak, except by measurement error
        return cls(share=_round_measurement(1 / (slope * peak)), half=_round_measurement(lost / slope))


def _round_measurement(value: float) -> float:
    """Round to six digits: a measurement has no more."""
    return float(f"{value:.6g}")
