"""Recipe: what the native update of one run does. Equal recipes on equal values give equal results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.host.crew import Crew, Running
from zeroshard.host.native import DTYPES, Kernels, Rounding
from zeroshard.host.options import AdamOptions, SGDOptions, options_for
from zeroshard.host.powers import powers_on_gpu
from zeroshard.host.rounding import rounding_of_torch

ADAM = ("exp_avg", "exp_avg_sq")
SGD = ("momentum_buffer",)


@dataclass(frozen=True)
class Recipe:
    """The options of a run's group, and how many updates it has had, this one included."""

    options: AdamOptions | SGDOptions
    step: int
    powers: tuple[float, float] | None = None  # of Adam's betas, where a GPU's fused kernel is followed
    rounding: Rounding | None = None  # of this torch on this processor; None where a GPU is followed

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the states it keeps."""
        if isinstance(self.options, AdamOptions):
            return ADAM
        return SGD if self.options.momentum else ()

    def cook(
        self,
        kernels: Kernels,
        old: dict[str, torch.Tensor],
        new: dict[str, torch.Tensor],
        gradient: torch.Tensor,
        copy: torch.Tensor | None,
        factors: tuple[float, ...],
        threads: int,
        crew: Crew | None = None,
    ) -> Running:
        """Update: read ``old`` values, by key and under "" the parameter's, and write ``new`` ones.

        With a ``crew`` it is only begun: see :class:`Kernels`.
        """
        if isinstance(self.options, AdamOptions):
            states = (old[""], old[ADAM[0]], old[ADAM[1]])
            out = (new[""], new[ADAM[0]], new[ADAM[1]])
            return kernels.adam(
                *states,
                gradient,
                self.options,
                out=out,
                step=self.step,
                copy=copy,
                factors=factors,
                threads=threads,
                powers=self.powers,
                crew=crew,
                rounding=self.rounding,
            )
        momentum = old.get(SGD[0]) if self.step > 1 else None  # the first time it becomes the gradient
        return kernels.sgd(
            old[""],
            momentum,
            gradient,
            self.options,
            out=(new[""], new.get(SGD[0])),
            copy=copy,
            factors=factors,
            threads=threads,
            crew=crew,
            rounding=self.rounding,
        )


def recipe_for(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    state: dict[str, Any],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    cuda: bool = False,
) -> Recipe | None:
    """The recipe of a run's next update; None where only torch's own update will do.

    ``dtypes`` are those of the master, the gradient, and the parameters in computation; ``cuda``: these compute on a
    GPU, whose numbers the update is to give.
    """
    options = options_for(optimizer, group, cuda)
    if options is None or dtypes[0] != torch.float32 or any(dtype not in DTYPES for dtype in dtypes):
        return None
    rounding = None
    if not cuda:
        rounding = rounding_of_torch("adam" if isinstance(options, AdamOptions) else "sgd", options.fused)
        if rounding is None:
            return None  # no rounding that the native update knows gives this torch's bits
    held = {key for key, value in state.items() if value is not None}
    if isinstance(options, AdamOptions):
        if held - {"step", *ADAM}:
            return None  # of an optimizer with other options, before
        step = int(state.get("step", 0)) + 1
        powers = powers_on_gpu(options.betas, step) if options.fused and cuda else None
        return Recipe(options, step, powers, rounding)
    if held - set(SGD):
        return None
    return Recipe(options, 2 if SGD[0] in held else 1, rounding=rounding)
