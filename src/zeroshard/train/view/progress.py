"""State: all that a view knows of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from zeroshard.train.metrics import StepMetrics

SPARKLINE_STEPS = 240  # losses in the sparkline
ETA_WINDOW_STEPS = 50  # steps that the time left is reckoned from


@dataclass(frozen=True)
class RunProgress:
    """All that a view knows of the run. Frozen, so that the thread that draws sees all of a step or nothing."""

    total_steps: int
    start_step: int = 0
    metrics: StepMetrics | None = None
    """Of the last step."""
    losses: tuple[float, ...] = ()
    """The most recent."""
    recent_times: tuple[tuple[int, float], ...] = ()
    """(step, seconds) of the most recent steps."""
    communication: float | None = None
    """The share that was measured last: not every step's is."""
    last_evaluation: tuple[int, float] | None = None
    """(step, loss) of the last evaluation."""
    held_bytes: Mapping[str, int] = field(default_factory=dict)
    ddp_bytes: Mapping[str, int] = field(default_factory=dict)

    def with_step(self, metrics: StepMetrics) -> RunProgress:
        """The state when one more step is done."""
        losses = (*self.losses, metrics.loss)[-SPARKLINE_STEPS:]
        pace = (*self.recent_times, (metrics.step, metrics.seconds))[-ETA_WINDOW_STEPS:]
        waited = self.communication if metrics.communication is None else metrics.communication
        return replace(self, metrics=metrics, losses=losses, recent_times=pace, communication=waited)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.start_step if self.metrics is None else self.metrics.step

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step, by the pace of the recent ones; None before two are known."""
        if len(self.recent_times) < 2:
            return None
        (first, began), (last, ended) = self.recent_times[0], self.recent_times[-1]
        return max(0, self.total_steps - last) * (ended - began) / max(1, last - first)
