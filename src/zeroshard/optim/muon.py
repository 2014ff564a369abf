"""MuonWithAdamW: torch's Muon for some groups, and torch's AdamW for the others, as one optimizer.

[Note: Muon in batches]
torch's Muon orthogonalizes one matrix after the other, by about 20 kernels each. On a GPU, kernels for small matrices
leave most of it idle, and the host cannot start them fast enough. So on a GPU the matrices of one shape are stacked,
and each product of the Newton–Schulz iteration is one kernel for all of them. The operations are torch's, in the same
order and dtypes; only the rounding inside a product may differ.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

RULES: dict[str, type[torch.optim.Optimizer]] = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW}


class MuonWithAdamW(torch.optim.Optimizer):
    """Groups of Muon and groups of AdamW; the option "rule" of a group says which. Both classes are torch's own.

    A step gives each class its groups. So the numbers are those of two optimizers that are stepped one after the other.

    >>> weight, bias = torch.nn.Parameter(torch.eye(2)), torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = MuonWithAdamW(torch.optim.Muon([weight]), torch.optim.AdamW([bias]))
    >>> [(group["rule"], len(group["params"])) for group in optimizer.param_groups]
    [('muon', 1), ('adamw', 1)]
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW | None) -> None:
        parts = {"muon": muon, **({"adamw": adamw} if adamw is not None else {})}
        super().__init__([{**group, "rule": name} for name, part in parts.items() for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, rule in RULES.items():
            groups = [group for group in self.param_groups if group["rule"] == name]
            if groups:
                part = rule.__new__(rule)  # like a copy, which shares the groups and states with this optimizer
                part.__setstate__({"state": self.state, "param_groups": groups, "defaults": {}})
                step_in_batches(part)
        return loss


# ------------------------------------------------------------------------------------------------ Muon in batches

MAX_STACKED_NUMEL = 2**25  # elements of a stack of matrices, unless a single one is larger
_KNOWN_OPTIONS = {"lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"}
_KNOWN_LR_ADJUSTMENTS = (None, "original", "match_rms_adamw")


def step_in_batches(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer: torch's Muon on a GPU as in [Note: Muon in batches], any other by its own step()."""
    if is_known_muon(optimizer) and all(p.is_cuda for group in optimizer.param_groups for p in group["params"]):
        step_muon(optimizer)
    else:
        optimizer.step()


def is_known_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether :func:`step_muon` does what the optimizer's own step does.

    >>> is_known_muon(torch.optim.Muon([torch.ones(2, 2)])), is_known_muon(torch.optim.SGD([torch.ones(2, 2)]))
    (True, False)
    """
    if type(optimizer) is not torch.optim.Muon:
        return False
    if set(inspect.signature(torch.optim.Muon).parameters) != {"params", *_KNOWN_OPTIONS}:  # of a later torch
        return False
    for group in optimizer.param_groups:
        # Without Nesterov's momentum, torch orthogonalizes a bf16 momentum in place, and so changes it.
        changes_momentum = not group["nesterov"] and any(p.dtype == torch.bfloat16 for p in group["params"])
        if group["adjust_lr_fn"] not in _KNOWN_LR_ADJUSTMENTS or changes_momentum:
            return False
    return True


@torch.no_grad()
def step_muon(optimizer: torch.optim.Optimizer, max_numel: int = MAX_STACKED_NUMEL) -> None:
    """Do what ``torch.optim.Muon.step`` does, with the matrices of one shape at once, up to ``max_numel`` elements.

    >>> parameter = torch.nn.Parameter(torch.eye(2))
    >>> optimizer = torch.optim.Muon([parameter], lr=0.1, weight_decay=0.0)
    >>> parameter.grad = torch.eye(2)
    >>> step_muon(optimizer)
    >>> bool((parameter.diagonal() < 0.95).all())
    True
    """
    for group in optimizer.param_groups:
        by_shape: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape[parameter.shape, parameter.dtype, parameter.device].append(parameter)
        for parameters in by_shape.values():
            for batch in _split(parameters, max_numel):
                _update_matrices(batch, group, optimizer.state)
    vars(optimizer)["_opt_called"] = True  # an LR scheduler wraps step() to record this, and warns if it is missing


def _split(parameters: list[torch.Tensor], max_numel: int) -> Iterator[list[torch.Tensor]]:
    size = max(1, max_numel // max(1, parameters[0].numel()))
    for first in range(0, len(parameters), size):
        yield parameters[first : first + size]


def _update_matrices(parameters: list[torch.Tensor], group: dict[str, Any], states: Any) -> None:
    """Update matrices of one shape."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for parameter, grad in zip(parameters, grads, strict=True):
        if "momentum_buffer" not in states[parameter]:
            states[parameter]["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
    buffers = [states[parameter]["momentum_buffer"] for parameter in parameters]
    lr = float(group["lr"])
    torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
    updates = torch._foreach_lerp(grads, buffers, group["momentum"]) if group["nesterov"] else buffers
    updates = orthogonalize(updates, group["ns_coefficients"], group["ns_steps"], group["eps"])
    torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
    torch._foreach_add_(parameters, updates, alpha=-lr * _lr_ratio(parameters[0].shape, group["adjust_lr_fn"]))


def orthogonalize(
    matrices: Sequence[torch.Tensor], coefficients: tuple[float, float, float], steps: int, eps: float
) -> list[torch.Tensor]:
    """Orthogonalize matrices of one shape by a Newton–Schulz iteration in bf16.

    >>> left, right = orthogonalize([torch.eye(4), 2 * torch.eye(4)], (2.0, -1.5, 0.5), 8, 1e-7)
    >>> bool((left.float() - torch.eye(4)).abs().max() < 0.02), torch.equal(left, right)
    (True, True)
    """
    a, b, c = coefficients
    rows, columns = matrices[0].shape
    stack = torch.empty((len(matrices), rows, columns), dtype=torch.bfloat16, device=matrices[0].device)
    torch._foreach_copy_(list(stack.unbind()), list(matrices))
    stack /= torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        # torch transposes tall matrices; the products in the other order are the transposes of its own.
        gram = torch.bmm(stack.mT, stack) if rows > columns else torch.bmm(stack, stack.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factors = (stack, gram) if rows > columns else (gram, stack)
        stack = torch.baddbmm(stack, *factors, beta=a)
    return list(stack.unbind())


def _lr_ratio(shape: torch.Size, adjustment: str | None) -> float:
    """Return the factor of the learning rate that makes the updates of all shapes equally large."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if adjustment == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
