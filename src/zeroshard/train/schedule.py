"""Schedule: the learning rate of each step."""

from __future__ import annotations

import math

from zeroshard.train.options import StepOptions


def learning_rate(step: int, options: StepOptions) -> float:
    """The rate of a step, counted from 0: a linear rise, then half a cosine down to the lowest.

    >>> options = StepOptions(steps=100, warmup=10, lr=1.0, min_lr=0.1)
    >>> [round(learning_rate(step, options), 3) for step in (0, 9, 10, 55, 99)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    lowest = options.lr / 10 if options.min_lr is None else options.min_lr
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    done = (step - options.warmup) / max(options.steps - options.warmup, 1)
    return lowest + (options.lr - lowest) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
