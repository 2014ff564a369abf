"""MuonWithAdamW: torch's Muon for some groups, and torch's AdamW for the others, as one optimizer; Muon in batches."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from zeroshard.optim.newton_schulz.orthogonalize import orthogonalize

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
        groups = [{**group, "rule": name} for name, part in parts.items() for group in part.param_groups]
        super().__init__(groups, {"rule": ""})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with all options of its rule."""
        _check_rule(param_group)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _check_rule(group)
        for name, rule in RULES.items():
            groups = [group for group in self.param_groups if group["rule"] == name]
            if groups:
                part = rule.__new__(rule)  # like a copy, which shares the groups and states with this optimizer
                part.__setstate__({"state": self.state, "param_groups": groups, "defaults": {}})
                step_in_batches(part)
        return loss


def _check_rule(group: Mapping[str, Any]) -> None:
    if group.get("rule") not in RULES:
        raise ValueError(
            'each group of MuonWithAdamW needs the option "rule", "muon" or "adamw", and all options of that rule: got '
            f"{group.get('rule')!r}"
        )


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
    return all(is_known_group(group, {p.dtype for p in group["params"]}) for group in optimizer.param_groups)


def is_known_group(group: Mapping[str, Any], dtypes: set[torch.dtype]) -> bool:
    """Return whether the rule of a group of torch's Muon, with parameters of these dtypes, is the one in this file."""
    if set(inspect.signature(torch.optim.Muon).parameters) != {"params", *_KNOWN_OPTIONS}:  # of a later torch
        return False
    # Without Nesterov's momentum, torch orthogonalizes a bf16 momentum in place, and so changes it.
    changes_momentum = not group["nesterov"] and torch.bfloat16 in dtypes
    return group["adjust_lr_fn"] in _KNOWN_LR_ADJUSTMENTS and not changes_momentum


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
    options = MuonOptions.from_group(group)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for parameter, grad in zip(parameters, grads, strict=True):
        if "momentum_buffer" not in states[parameter]:
            states[parameter]["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
    buffers = [states[parameter]["momentum_buffer"] for parameter in parameters]
    torch._foreach_lerp_(buffers, grads, 1 - options.momentum)
    updates = torch._foreach_lerp(grads, buffers, options.momentum) if options.nesterov else buffers
    updates = orthogonalize(updates, *options.newton_schulz)
    torch._foreach_mul_(parameters, options.decay)
    torch._foreach_add_(parameters, updates, alpha=options.alpha(parameters[0].shape))


class MuonOptions(NamedTuple):
    """The options of a group of Muon.

    >>> MuonOptions.from_group(torch.optim.Muon([torch.ones(4, 1)], lr=0.5).param_groups[0]).alpha(torch.Size([4, 1]))
    -1.0
    """

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    newton_schulz: tuple[tuple[float, float, float], int, float]  # coefficients, iterations, epsilon
    lr_adjustment: str | None

    @classmethod
    def from_group(cls, group: Mapping[str, Any]) -> MuonOptions:
        a, b, c = group["ns_coefficients"]
        newton_schulz = ((a, b, c), group["ns_steps"], group["eps"])
        numbers = float(group["lr"]), group["weight_decay"], group["momentum"], group["nesterov"]
        return cls(*numbers, newton_schulz, group["adjust_lr_fn"])

    @property
    def decay(self) -> float:
        """The factor of the old values."""
        return 1 - self.lr * self.weight_decay

    def alpha(self, shape: torch.Size) -> float:
        """Return the factor of the orthogonalized update: the learning rate, adjusted for the shape."""
        rows, columns = shape
        if self.lr_adjustment == "match_rms_adamw":
            return -self.lr * (0.2 * math.sqrt(max(rows, columns)))
        return -self.lr * math.sqrt(max(1, rows / columns))
