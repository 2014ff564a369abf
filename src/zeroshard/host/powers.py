"""Powers: Adam's betas to the power of a step, as a GPU has them in fp32.

torch's fused Adam on a GPU computes them there, by a function whose last bits are its own. They decide over the last
bits of every parameter, so an update on the host asks the GPU for them: for many steps at once, since it has to wait.
"""

from __future__ import annotations

import functools

import torch

SPAN = 4096  # steps asked for at once


def powers_on_gpu(betas: tuple[float, float], step: int) -> tuple[float, float]:
    """Both betas to the power of ``step``, by this thread's current GPU."""
    span, within = divmod(step, SPAN)
    return _table(betas[0], span)[within], _table(betas[1], span)[within]


@functools.lru_cache(maxsize=64)
def _table(beta: float, span: int, device: str = "cuda") -> list[float]:
    """Powers of one beta from ``span * SPAN`` on: 4 kB on the GPU for each thousand steps, for a moment."""
    steps = torch.arange(span * SPAN, (span + 1) * SPAN, dtype=torch.float32, device=device)
    found: list[float] = torch.pow(torch.full_like(steps, beta), steps).tolist()
    return found
