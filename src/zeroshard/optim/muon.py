"""MuonWithAdamW: torch's Muon for some groups, and torch's AdamW for the others, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
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
                part.step()
        return loss
