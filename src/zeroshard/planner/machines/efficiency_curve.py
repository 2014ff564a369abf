"""Curve: how much of its peak a device reaches, by the size of the product that it computes.

[Note: the efficiency curve]
A product of x FLOPs takes a time that is lost whatever its size (filling the device, its last and only partly used
round of tiles) and then a time in proportion to x. So the share of the peak that it reaches is

    share · x / (x + half)

with ``share`` what very large products reach and ``half`` the FLOPs at which it is half of that. Two numbers serve a
whole generation of devices. What is lost is a time: in a slower precision it is the same time, not the same FLOPs
(:meth:`zeroshard.planner.machines.machine.Machine.matmul_seconds`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EfficiencyCurve:
    """The share of the peak that one matrix product reaches: [Note: the efficiency curve].

    >>> curve = EfficiencyCurve(share=0.8, half=1e9)
    >>> curve(1e9), round(curve(1e15), 3)
    (0.4, 0.8)
    """

    share: float
    """Of the peak, that very large products reach: above 0, at most 1."""
    half: float
    """FLOPs of the product that reaches half of that."""

    def __post_init__(self) -> None:
        """Refuse what is no curve."""
        for name, least, most in (("share", 0.0, 1.0), ("half", 0.0, math.inf)):
            value = getattr(self, name)
            right = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not right or not least <= value <= most or (name == "share" and value == 0):
                wanted = "a number above 0 and at most 1" if name == "share" else "a number of FLOPs from 0 up"
                raise ValueError(f"efficiency's {name} is {wanted}, got {value!r}")
            object.__setattr__(self, name, float(value))

    def __call__(self, flops: float) -> float:
        """The share that a product of so many FLOPs reaches."""
        return self.share * (flops / (flops + self.half)) if flops > 0 else 0.0

    @classmethod
    def fit(cls, measured: Sequence[tuple[float, float]], peak: float) -> EfficiencyCurve:
        """The curve nearest to measured (FLOPs, seconds) of a device with this peak, all sizes counted alike.

        Errors count in parts of the measured time, so that the many small products weigh as much as the large ones.

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
        lost, slope = 0.0, sum(slopes) / ss  # the best without a loss
        if len(measured) > 1 and determinant > 1e-9 * cc * ss:
            with_loss = (ss * sum(constants) - cs * sum(slopes)) / determinant
            its_slope = (cc * sum(slopes) - cs * sum(constants)) / determinant
            if with_loss > 0 and its_slope > 0:
                lost, slope = with_loss, its_slope
        slope = max(slope, 1 / peak)  # nothing is faster than its peak, clocks that were measured badly apart
        return cls(share=_round_measurement(1 / (slope * peak)), half=_round_measurement(lost / slope))


def _round_measurement(value: float) -> float:
    """Six digits: a measurement has no more."""
    return float(f"{value:.6g}")
