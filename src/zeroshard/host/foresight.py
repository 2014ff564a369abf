"""Foresight: whether this backward is likely to be the last before the step."""

from __future__ import annotations

HOLD_OFF_STEPS = 8  # steps that nothing is done ahead, after a guess was wrong


class StepPredictor:
    """Learns from the loop how many backwards it runs for a step.

    >>> foresight = StepPredictor()
    >>> foresight.on_step(backwards=2)
    >>> foresight.on_step(backwards=2)
    >>> foresight.expects_step(1), foresight.expects_step(2)
    (False, True)
    >>> foresight.on_misprediction()
    >>> foresight.expects_step(2)
    False
    """

    def __init__(self) -> None:
        self._backwards_per_step = 0
        self._is_steady = False
        self._hold_off_steps_left = 0

    def expects_step(self, backward: int) -> bool:
        """Whether the step is expected after this backward, the how-many-eth since the last step."""
        return self._is_steady and not self._hold_off_steps_left and backward == self._backwards_per_step

    def on_step(self, backwards: int) -> None:
        """A step has come."""
        self._is_steady = backwards == self._backwards_per_step
        self._backwards_per_step = backwards
        self._hold_off_steps_left = max(0, self._hold_off_steps_left - 1)

    def on_misprediction(self) -> None:
        """What was done ahead was for nothing."""
        self._hold_off_steps_left = HOLD_OFF_STEPS
