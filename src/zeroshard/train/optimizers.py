"""MuonWithAdamW: torch's Muon for the matrices of blocks, and torch's AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroshard.sharding import find_block_matrices
from zeroshard.train.options import StepOptions

RULES: dict[str, type[torch.optim.Optimizer]] = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW}


class MuonWithAdamW(torch.optim.Optimizer):
    """Groups of Muon and groups of AdamW; the option "rule" of a group says which. Both classes are torch's own.

    A step gives each class its groups. So the numbers are those of two optimizers that are stepped one after the other.

    >>> weight, bias = nn.Parameter(torch.eye(2)), nn.Parameter(torch.zeros(2))
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
                part.step()
        return loss


def make_optimizer(module: nn.Module, options: StepOptions) -> torch.optim.Optimizer:
    """Return the optimizer of a run: AdamW, or Muon for the matrices of blocks with AdamW for the others.

    Only matrices have weight decay. Muon's updates are scaled to the size of AdamW's, so both can have the same
    learning rate.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    matrices = _muon_matrices(module) if options.optimizer == "muon" else []
    others = [parameter for name, parameter in trained.items() if name not in set(matrices)]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    non_empty_groups = [group for group in groups if group["params"]]
    adamw = None
    if non_empty_groups or not matrices:
        adamw = torch.optim.AdamW(non_empty_groups, lr=options.lr, betas=options.betas, fused=True)
    if not matrices:
        assert adamw is not None
        return adamw
    muon = torch.optim.Muon(
        [trained[name] for name in matrices],
        lr=options.lr if options.muon_lr is None else options.muon_lr,
        weight_decay=options.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonWithAdamW(muon, adamw)


def _muon_matrices(module: nn.Module) -> list[str]:
    """Return the names of the parameters for Muon; raise if there are none."""
    matrices = find_block_matrices(module)
    if not matrices:
        raise ValueError(
            f"--optimizer muon: {type(module).__name__} has no trained matrices in repeated blocks, which Muon would "
            "update (AdamW updates embeddings, head, norms and biases): use --optimizer adamw, or more --layers"
        )
    return matrices
