"""Powers: Adam's betas to the power of a step, as a GPU has them in fp32.

torch's fused Adam on a GPU computes them there, by a function whose last bits are its own. They decide over the last
bits of every parameter, so an update on the host asks the GPU for them: for many steps at once, since it has to wait.
"""

from __future__ import annotations

import functools

import torch

STEPS_PER_TABLE = 4096  # steps asked for at once


def beta_powers_on_gpu(betas: tuple[float, float], step: int) -> tuple[float, float]:
    """Both betas to the power of ``step``, by this thread's current GPU."""
    span, within = divmod(step, STEPS_PER_TABLE)
    return _beta_power_table(betas[0], span)[within], _beta_power_table(betas[1], span)[within]


@functools.lru_cache(maxsize=64)
def _beta_power_table(beta: float, table_index: int, device: str = "cuda") -> list[float]:
    """Powers of one beta from ``span * SPAN`` on: 4 kB on the GPU for each thousand steps, for a moment."""
    steps = torch.arange(
        table_index * STEPS_PER_TABLE, (table_index + 1) * STEPS_PER_TABLE, dtype=torch.float32, device=device
    )
    found: list[float] = torch.pow(torch.full_like(steps, beta), steps).tolist()
    return found
