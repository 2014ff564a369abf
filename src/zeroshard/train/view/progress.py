"""RunProgress: the state of a run that a view shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from zeroshard.train.metrics import StepMetrics

SPARKLINE_STEPS = 240  # losses in the sparkline
ETA_WINDOW_STEPS = 50  # steps used to estimate the remaining time


@dataclass(frozen=True)
class RunProgress:
    """The state of a run that a view shows. Frozen, so the drawing thread never sees a partial update."""

    total_steps: int
    start_step: int = 0
    metrics: StepMetrics | None = None
    """Metrics of the last step."""
    losses: tuple[float, ...] = ()
    """The most recent losses."""
    recent_times: tuple[tuple[int, float], ...] = ()
    """(step, seconds) of the most recent steps."""
    communication: float | None = None
    """The fraction measured last; not every step is profiled."""
    last_evaluation: tuple[int, float] | None = None
    """(step, loss) of the last evaluation."""
    held_bytes: Mapping[str, int] = field(default_factory=dict)
    ddp_bytes: Mapping[str, int] = field(default_factory=dict)

    def with_step(self, metrics: StepMetrics) -> RunProgress:
        """Return the state after one more step."""
        losses = (*self.losses, metrics.loss)[-SPARKLINE_STEPS:]
        recent_times = (*self.recent_times, (metrics.step, metrics.seconds))[-ETA_WINDOW_STEPS:]
        communication = self.communication if metrics.communication is None else metrics.communication
        return replace(self, metrics=metrics, losses=losses, recent_times=recent_times, communication=communication)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.start_step if self.metrics is None else self.metrics.step

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step, estimated from recent steps; None until two are known."""
        if len(self.recent_times) < 2:
            return None
        (first, start_seconds), (last, end_seconds) = self.recent_times[0], self.recent_times[-1]
        return max(0, self.total_steps - last) * (end_seconds - start_seconds) / max(1, last - first)
