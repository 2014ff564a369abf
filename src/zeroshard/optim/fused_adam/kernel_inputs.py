"""Inputs of the fused Adam kernel: tensors of a slice, and hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

SUPPORTED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW)
ADAM_STATE_KEYS = ("exp_avg", "exp_avg_sq")
SUPPORTED_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
)  # of gradients and of compute parameters


@dataclass(frozen=True)
class SliceTensors:
    """Elements of a slice that are contiguous in every tensor: all tensors are 1-D and have the same length."""

    slice_index: int  # of the slice, which has its own step count
    gradient: torch.Tensor  # reduced, in its own dtype
    master: torch.Tensor  # fp32
    exp_avg: torch.Tensor  # fp32
    exp_avg_sq: torch.Tensor  # fp32
    compute_param: torch.Tensor | None  # in 16 bits; None: only the master weight is kept


@dataclass(frozen=True)
class FusedAdamHyperparams:
    """Hyperparameters of one parameter group."""

    lr: float | torch.Tensor  # a tensor is fp32 and on the device
    betas: tuple[float, float]
    eps: float
    weight_decay: float  # decoupled
    maximize: bool


def fused_hyperparams_from_group(
    optimizer_class: type, group: Mapping[str, Any], device: torch.device
) -> FusedAdamHyperparams | None:
    """Return the hyperparameters of a group of an ``optimizer_class``, or None if torch must update the group.

    Supports torch's fused Adam and AdamW, without weight decay or with decoupled weight decay. If the decay is added to
    the gradient, it is not known how torch's fused kernel rounds it ([Note: equal to torch to the bit]).

    >>> optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.5, weight_decay=0.1, fused=True)
    >>> fused_hyperparams_from_group(torch.optim.AdamW, optimizer.param_groups[0], torch.device("cpu"))
    FusedAdamHyperparams(lr=0.5, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.1, maximize=False)
    >>> fused_hyperparams_from_group(torch.optim.SGD, {"fused": True}, torch.device("cpu"))
    """
    if optimizer_class not in SUPPORTED_OPTIMIZERS or not group.get("fused"):
        return None
    if any(group.get(key) for key in ("amsgrad", "capturable", "differentiable")):
        return None
    lr, betas, weight_decay = group["lr"], group["betas"], group["weight_decay"]
    if weight_decay and not group.get("decoupled_weight_decay", optimizer_class is torch.optim.AdamW):
        return None
    if any(isinstance(value, torch.Tensor) for value in (*betas, weight_decay, group["eps"])):
        return None  # reading one could wait for the device
    if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
        if lr.device != device or lr.dtype != torch.float32 or lr.numel() != 1:
            return None
    else:
        lr = float(lr)
    return FusedAdamHyperparams(
        lr, (float(betas[0]), float(betas[1])), float(group["eps"]), float(weight_decay), bool(group["maximize"])
    )


def is_supported(optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether the fused kernel can update all groups of an optimizer on a GPU.

    >>> is_supported(torch.optim.AdamW([torch.zeros(1)], fused=True)), is_supported(torch.optim.AdamW([torch.zeros(1)]))
    (True, False)
    """
    if optimizer is None:
        return False
    groups, optimizer_class = optimizer.param_groups, type(optimizer)
    return all(
        fused_hyperparams_from_group(optimizer_class, {**group, "lr": 0.0}, torch.device("cpu")) is not None
        for group in groups
    )
