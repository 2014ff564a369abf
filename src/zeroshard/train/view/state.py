"""State: all that a view knows of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from zeroshard.train.metrics import Metrics

RECENT = 240  # losses in the sparkline
PACE = 50  # steps that the time left is reckoned from


@dataclass(frozen=True)
class State:
    """All that a view knows of the run. Frozen, so that the thread that draws sees all of a step or nothing."""

    total_steps: int
    start_step: int = 0
    metrics: Metrics | None = None
    """Of the last step."""
    losses: tuple[float, ...] = ()
    """The most recent."""
    pace: tuple[tuple[int, float], ...] = ()
    """(step, seconds) of the most recent steps."""
    communication: float | None = None
    """The share that was measured last: not every step's is."""
    held_out: tuple[int, float] | None = None
    """(step, loss) of the last evaluation."""
    held: Mapping[str, int] = field(default_factory=dict)
    plain: Mapping[str, int] = field(default_factory=dict)

    def after(self, metrics: Metrics) -> State:
        """The state when one more step is done."""
        losses = (*self.losses, metrics.loss)[-RECENT:]
        pace = (*self.pace, (metrics.step, metrics.seconds))[-PACE:]
        waited = self.communication if metrics.communication is None else metrics.communication
        return replace(self, metrics=metrics, losses=losses, pace=pace, communication=waited)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.start_step if self.metrics is None else self.metrics.step

    @property
    def left(self) -> float | None:
        """Seconds until the last step, by the pace of the recent ones; None before two are known."""
        if len(self.pace) < 2:
            return None
        (first, began), (last, ended) = self.pace[0], self.pace[-1]
        return max(0, self.total_steps - last) * (ended - began) / max(1, last - first)
