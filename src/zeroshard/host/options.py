"""Options: what the native updates are told of a parameter group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

SUPPORTED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


@dataclass(frozen=True)
class AdamHyperparams:
    """The hyper-parameters of Adam and AdamW, as plain numbers: equal options compare equal.

    >>> AdamHyperparams(lr=1e-3) == AdamHyperparams(lr=1e-3, betas=(0.9, 0.999))
    True
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = True  # AdamW: the parameter decays; otherwise decay is added to the gradient
    maximize: bool = False
    fused: bool = False  # round as torch's fused kernel does on the CPU; with cuda, as the one on a GPU
    is_cuda_rounding: bool = False  # round as torch's foreach kernels do on a GPU


@dataclass(frozen=True)
class SGDHyperparams:
    """The hyper-parameters of SGD, as plain numbers.

    >>> SGDHyperparams(lr=0.1, momentum=0.9).nesterov
    False
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    fused: bool = False  # round as torch's fused kernel does on the CPU


def hyperparams_from_group(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], is_cuda_rounding: bool = False
) -> AdamHyperparams | SGDHyperparams | None:
    """Return what the native update of a group needs; None: only torch's own update gives torch's numbers.

    ``cuda``: these are the numbers that torch gives on a GPU.

    Served are torch's Adam, AdamW and SGD themselves, of which a subclass may do anything, without ``amsgrad``,
    ``capturable`` and ``differentiable``. The learning rate may be a tensor, which is read: on a device, that waits.
    On the CPU torch's Adam computes with such a one in its own dtype, unless fused: that is left to torch.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> hyperparams_from_group(optimizer, optimizer.param_groups[0])
    SGDHyperparams(lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False, fused=False)
    """
    kind = type(optimizer)
    if kind not in SUPPORTED_OPTIMIZERS or any(group.get(key) for key in ("amsgrad", "capturable", "differentiable")):
        return None
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    maximize, fused = bool(group["maximize"]), bool(group.get("fused"))
    if isinstance(group["lr"], torch.Tensor) and kind is not torch.optim.SGD and not (fused or is_cuda_rounding):
        return None
    if kind is torch.optim.SGD:
        return SGDHyperparams(
            lr=lr,
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=weight_decay,
            nesterov=bool(group["nesterov"]),
            maximize=maximize,
            fused=fused and not is_cuda_rounding,  # on a GPU all are rounded alike
        )
    return AdamHyperparams(
        lr=lr,
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=float(group["eps"]),
        weight_decay=weight_decay,
        decoupled_weight_decay=bool(group.get("decoupled_weight_decay", kind is torch.optim.AdamW)),
        maximize=maximize,
        fused=fused,
        is_cuda_rounding=is_cuda_rounding,
    )
