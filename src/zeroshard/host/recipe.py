"""Recipe: what the native update of one run does. Equal recipes on equal values give equal results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.host.crew import KernelHandle, KernelThreads
from zeroshard.host.native import DTYPE_CODES, CpuKernels, Rounding
from zeroshard.host.options import AdamHyperparams, SGDHyperparams, hyperparams_from_group
from zeroshard.host.powers import beta_powers_on_gpu
from zeroshard.host.rounding import detect_torch_rounding

ADAM_STATE_KEYS = ("exp_avg", "exp_avg_sq")
SGD_STATE_KEYS = ("momentum_buffer",)


@dataclass(frozen=True)
class UpdateSpec:
    """The options of a run's group, and how many updates it has had, this one included."""

    hyperparams: AdamHyperparams | SGDHyperparams
    step: int
    beta_powers: tuple[float, float] | None = None  # of Adam's betas, where a GPU's fused kernel is followed
    rounding: Rounding | None = None  # of this torch on this processor; None where a GPU is followed

    @property
    def state_keys(self) -> tuple[str, ...]:
        """The names of the states it keeps."""
        if isinstance(self.hyperparams, AdamHyperparams):
            return ADAM_STATE_KEYS
        return SGD_STATE_KEYS if self.hyperparams.momentum else ()

    def apply(
        self,
        kernels: CpuKernels,
        old: dict[str, torch.Tensor],
        new: dict[str, torch.Tensor],
        gradient: torch.Tensor,
        copy: torch.Tensor | None,
        grad_factors: tuple[float, ...],
        threads: int,
        kernel_threads: KernelThreads | None = None,
    ) -> KernelHandle:
        """Update: read ``old`` values, by key and under "" the parameter's, and write ``new`` ones.

        With a ``crew`` it is only begun: see :class:`CpuKernels`.
        """
        if isinstance(self.hyperparams, AdamHyperparams):
            states = (old[""], old[ADAM_STATE_KEYS[0]], old[ADAM_STATE_KEYS[1]])
            out = (new[""], new[ADAM_STATE_KEYS[0]], new[ADAM_STATE_KEYS[1]])
            return kernels.adam(
                *states,
                gradient,
                self.hyperparams,
                out=out,
                step=self.step,
                copy=copy,
                grad_factors=grad_factors,
                threads=threads,
                beta_powers=self.beta_powers,
                kernel_threads=kernel_threads,
                rounding=self.rounding,
            )
        momentum = old.get(SGD_STATE_KEYS[0]) if self.step > 1 else None  # the first time it becomes the gradient
        return kernels.sgd(
            old[""],
            momentum,
            gradient,
            self.hyperparams,
            out=(new[""], new.get(SGD_STATE_KEYS[0])),
            copy=copy,
            grad_factors=grad_factors,
            threads=threads,
            kernel_threads=kernel_threads,
            rounding=self.rounding,
        )


def make_update_spec(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    state: dict[str, Any],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    is_cuda_rounding: bool = False,
) -> UpdateSpec | None:
    """The recipe of a run's next update; None where only torch's own update will do.

    ``dtypes`` are those of the master, the gradient, and the parameters in computation; ``cuda``: these compute on a
    GPU, whose numbers the update is to give.
    """
    options = hyperparams_from_group(optimizer, group, is_cuda_rounding)
    if options is None or dtypes[0] != torch.float32 or any(dtype not in DTYPE_CODES for dtype in dtypes):
        return None
    rounding = None
    if not is_cuda_rounding:
        rounding = detect_torch_rounding("adam" if isinstance(options, AdamHyperparams) else "sgd", options.fused)
        if rounding is None:
            return None  # no rounding that the native update knows gives this torch's bits
    held = {key for key, value in state.items() if value is not None}
    if isinstance(options, AdamHyperparams):
        if held - {"step", *ADAM_STATE_KEYS}:
            return None  # of an optimizer with other options, before
        step = int(state.get("step", 0)) + 1
        powers = beta_powers_on_gpu(options.betas, step) if options.fused and is_cuda_rounding else None
        return UpdateSpec(options, step, powers, rounding)
    if held - set(SGD_STATE_KEYS):
        return None
    return UpdateSpec(options, 2 if SGD_STATE_KEYS[0] in held else 1, rounding=rounding)
