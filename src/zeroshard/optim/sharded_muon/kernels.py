"""The elementwise parts of Muon on shards: momentum and update before the exchange, decay and addition after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from zeroshard.engine import GradScale
from zeroshard.optim.muon import MuonOptions

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of gradients, in Triton


class MomentumPart(NamedTuple):
    """What is known of some elements before the exchange; all tensors are 1-D and have the same length."""

    gradient: torch.Tensor  # reduced, in its own dtype
    momentum: torch.Tensor
    update: torch.Tensor  # bf16, to be written


class ValuePart(NamedTuple):
    """What is known of some elements after the exchange; both tensors are 1-D and have the same length."""

    update: torch.Tensor  # bf16, orthogonalized
    values: torch.Tensor


class MuonKernels(Protocol):
    """Two passes over a rank's shards."""

    def update_momenta(self, parts: Sequence[MomentumPart], options: MuonOptions, grad_scale: GradScale) -> int:
        """Update the momenta, write the updates in bf16; return the bytes of temporary memory."""

    def update_values(self, parts: Sequence[ValuePart], decay: float, alpha: float) -> None:
        """Multiply the values by ``decay``, and add ``alpha`` times the updates."""


class TorchKernels:
    """By torch's own operations, in the order of its Muon, so with its bits."""

    def update_momenta(self, parts: Sequence[MomentumPart], options: MuonOptions, grad_scale: GradScale) -> int:
        """Update the momenta, write the updates in bf16; return the bytes of temporary memory."""
        grads, momenta = [part.gradient for part in parts], [part.momentum for part in parts]
        scratch_bytes = 0
        if grad_scale.factors or any(part.gradient.dtype != part.momentum.dtype for part in parts):
            copies = [torch.empty_like(momentum) for momentum in momenta]
            torch._foreach_copy_(copies, grads)
            for factor in grad_scale.factors:
                torch._foreach_mul_(copies, factor)
            grads, scratch_bytes = copies, sum(copy.nbytes for copy in copies)
        torch._foreach_lerp_(momenta, grads, 1 - options.momentum)
        updates = momenta
        if options.nesterov:
            updates = list(torch._foreach_lerp(grads, momenta, options.momentum))
            scratch_bytes += sum(update.nbytes for update in updates)
        torch._foreach_copy_([part.update for part in parts], updates)
        return scratch_bytes

    def update_values(self, parts: Sequence[ValuePart], decay: float, alpha: float) -> None:
        """Multiply the values by ``decay``, and add ``alpha`` times the updates."""
        values = [part.values for part in parts]
        torch._foreach_mul_(values, decay)
        torch._foreach_add_(values, [part.update for part in parts], alpha=alpha)
