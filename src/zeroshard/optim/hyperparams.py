"""The hyper-parameters of Adam, AdamW and SGD, for the native kernels of a CPU and the fused kernel of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

ADAM_CLASSES = (torch.optim.Adam, torch.optim.AdamW)
ADAM_STATE_KEYS = ("exp_avg", "exp_avg_sq")
SGD_STATE_KEYS = ("momentum_buffer",)


@dataclass(frozen=True)
class AdamHyperparams:
    """The hyper-parameters of Adam and AdamW, as plain numbers, so that equal ones compare equal.

    >>> AdamHyperparams(lr=1e-3) == AdamHyperparams(lr=1e-3, betas=(0.9, 0.999))
    True
    """

    lr: Any  # a number; the fused kernel of a GPU also takes an fp32 tensor on the device
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = True  # AdamW: decay the parameter; else add the decay to the gradient
    maximize: bool = False
    fused: bool = False  # round like torch's fused kernel: on the CPU, or with is_cuda_rounding on a GPU
    is_cuda_rounding: bool = False  # round like torch's foreach kernels on a GPU


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
    fused: bool = False  # round like torch's fused kernel on the CPU


def hyperparams_from_group(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], is_cuda_rounding: bool = False
) -> AdamHyperparams | SGDHyperparams | None:
    """Return the hyper-parameters for a native update of a group; None if only torch's own update is correct.

    ``is_cuda_rounding``: the update must give torch's results on a GPU.

    Supported are torch's Adam, AdamW and SGD, without ``amsgrad``, ``capturable`` and ``differentiable``; not their
    subclasses, which may do anything. The learning rate may be a tensor. It is read, which is a host sync if it is on a
    device. On the CPU, torch's Adam computes with a tensor learning rate in its dtype, unless fused: not supported.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> hyperparams_from_group(optimizer, optimizer.param_groups[0])
    SGDHyperparams(lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False, fused=False)
    """
    kind, fused = type(optimizer), bool(group.get("fused"))
    if kind not in (*ADAM_CLASSES, torch.optim.SGD) or _is_unsupported_variant(group):
        return None
    if kind is torch.optim.SGD:
        return SGDHyperparams(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
            fused=fused and not is_cuda_rounding,  # on a GPU all implementations round the same way
        )
    if isinstance(group["lr"], torch.Tensor) and not (fused or is_cuda_rounding):
        return None
    return _adam_hyperparams(kind, group, float(group["lr"]), is_cuda_rounding)


def fused_hyperparams_from_group(
    optimizer_class: type, group: Mapping[str, Any], device: torch.device
) -> AdamHyperparams | None:
    """Return the hyper-parameters for the fused kernel of a GPU, or None if torch must update the group.

    Supports torch's fused Adam and AdamW, without weight decay or with decoupled weight decay. If the decay is added to
    the gradient, it is not known how torch's fused kernel rounds it ([Note: equal to torch to the bit]).

    >>> optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.5, weight_decay=0.1, fused=True)
    >>> fused_hyperparams_from_group(torch.optim.AdamW, optimizer.param_groups[0], torch.device("cpu")).weight_decay
    0.1
    >>> fused_hyperparams_from_group(torch.optim.SGD, {"fused": True}, torch.device("cpu"))
    """
    if optimizer_class not in ADAM_CLASSES or not group.get("fused") or _is_unsupported_variant(group):
        return None
    if any(isinstance(value, torch.Tensor) for value in (*group["betas"], group["weight_decay"], group["eps"])):
        return None  # reading one could wait for the device
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
        if lr.device != device or lr.dtype != torch.float32 or lr.numel() != 1:
            return None
    else:
        lr = float(lr)
    hyperparams = _adam_hyperparams(optimizer_class, group, lr, is_cuda_rounding=True)
    return hyperparams if hyperparams.decoupled_weight_decay or not hyperparams.weight_decay else None


def is_supported(optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether the fused kernel can update all groups of an optimizer on a GPU.

    >>> is_supported(torch.optim.AdamW([torch.zeros(1)], fused=True)), is_supported(torch.optim.AdamW([torch.zeros(1)]))
    (True, False)
    """
    return optimizer is not None and all(
        fused_hyperparams_from_group(type(optimizer), {**group, "lr": 0.0}, torch.device("cpu")) is not None
        for group in optimizer.param_groups
    )


def _is_unsupported_variant(group: Mapping[str, Any]) -> bool:
    return any(group.get(key) for key in ("amsgrad", "capturable", "differentiable"))


def _adam_hyperparams(kind: type, group: Mapping[str, Any], lr: Any, is_cuda_rounding: bool) -> AdamHyperparams:
    return AdamHyperparams(
        lr=lr,
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled_weight_decay=bool(group.get("decoupled_weight_decay", kind is torch.optim.AdamW)),
        maximize=bool(group["maximize"]),
        fused=bool(group.get("fused")),
        is_cuda_rounding=is_cuda_rounding,
    )
