"""Strip: neighbouring elements of a run, and what a pass over them is told."""

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
)  # dtypes of gradients, and of parameters in computation


@dataclass(frozen=True)
class SliceTensors:
    """Elements that lie side by side everywhere: all tensors have one dimension and one length."""

    slice_index: int  # whose step count is its own
    gradient: torch.Tensor  # reduced, in its own dtype
    master: torch.Tensor  # fp32
    exp_avg: torch.Tensor  # fp32
    exp_avg_sq: torch.Tensor  # fp32
    compute_param: torch.Tensor | None  # the parameter in computation, in 16 bits; None: none is kept beside the master


@dataclass(frozen=True)
class GradScale:
    """What a step does to all gradients; on the device, without dimensions, fp32."""

    inv_scale: torch.Tensor | None = None  # of the loss scale
    clip_coef: torch.Tensor | None = None  # of a clip
    overflow: torch.Tensor | None = None  # 1 where nothing is to be updated


@dataclass(frozen=True)
class FusedAdamHyperparams:
    """A group's hyper-parameters."""

    lr: float | torch.Tensor  # a tensor is in fp32, on the device
    betas: tuple[float, float]
    eps: float
    weight_decay: float  # decoupled
    maximize: bool


def fused_hyperparams_from_group(
    optimizer_class: type, group: Mapping[str, Any], device: torch.device
) -> FusedAdamHyperparams | None:
    """What one pass is told of a group of an optimizer of class ``kind``; None: it is left to torch.

    Served are torch's fused Adam and AdamW, without decay or with a decoupled one: how the fused kernel rounds a decay
    that is added to the gradient is not known ([Note: equal to torch to the bit]).

    >>> optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.5, weight_decay=0.1, fused=True)
    >>> fused_hyperparams_from_group(torch.optim.AdamW, optimizer.param_groups[0], torch.device("cpu"))
    FusedAdamHyperparams(lr=0.5, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.1, maximize=False)
    >>> fused_hyperparams_from_group(torch.optim.SGD, {"fused": True}, torch.device("cpu"))
    """
    if optimizer_class not in SUPPORTED_OPTIMIZERS or not group.get("fused"):
        return None
    if any(group.get(key) for key in ("amsgrad", "capturable", "differentiable")):
        return None
    lr, betas, decay = group["lr"], group["betas"], group["weight_decay"]
    if decay and not group.get("decoupled_weight_decay", optimizer_class is torch.optim.AdamW):
        return None
    if any(isinstance(value, torch.Tensor) for value in (*betas, decay, group["eps"])):
        return None  # to read one might wait for the device
    if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
        if lr.device != device or lr.dtype != torch.float32 or lr.numel() != 1:
            return None
    else:
        lr = float(lr)
    return FusedAdamHyperparams(
        lr, (float(betas[0]), float(betas[1])), float(group["eps"]), float(decay), bool(group["maximize"])
    )


def is_supported(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether all groups of an optimizer can be updated in one pass on a GPU.

    >>> is_supported(torch.optim.AdamW([torch.zeros(1)], fused=True)), is_supported(torch.optim.AdamW([torch.zeros(1)]))
    (True, False)
    """
    if optimizer is None:
        return False
    groups, kind = optimizer.param_groups, type(optimizer)
    return all(
        fused_hyperparams_from_group(kind, {**group, "lr": 0.0}, torch.device("cpu")) is not None for group in groups
    )
