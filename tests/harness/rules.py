"""Optimizers that are not torch's, as scripts have them: the loop over parameters once, and rules to step them by."""

from __future__ import annotations

from typing import Any

import torch


class Rule(torch.optim.Optimizer):
    """Steps each parameter that has a gradient by the learning rate times ``update()``."""

    def __init__(self, params: Any, lr: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.update(group, p, p.grad))


class Lamb(Rule):
    """Adam's direction at the norm of the parameter; its states are tensors, numbers and a list."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, lr)

    def update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p), norms=[])
        state["step"] += 1
        state["norms"] = [*state["norms"][-1:], p.norm() * torch.ones(2, device=p.device)]
        m, v = state["m"].lerp_(grad, 0.1), state["v"].lerp_(grad.square(), 0.02)
        direction = m / (v.sqrt() + 1e-2) + 0.01 * p
        return direction * ((p.norm() + 0.1) / (direction.norm() + 0.1))


class Blend(Rule):
    """Orthogonalizes matrices in groups with ``ortho``, in the dtype of the parameter; momentum for all others."""

    def __init__(self, params: Any, lr: float = 0.03) -> None:
        super().__init__(params, lr, ortho=False)

    def update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(grad)
        if not group["ortho"]:
            return momentum
        update = momentum / (momentum.norm() + 0.1)
        for _ in range(3):
            update = 1.5 * update - 0.5 * update @ update.T @ update
        return update


class ScriptMuon(Rule):
    """Muon as in many training scripts: matrices are orthogonalized, everything else is updated by Adam."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, lr)

    def update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state.update(step=0, first=torch.zeros_like(p))
            if p.ndim != 2:
                state["second"] = torch.zeros_like(p)
        state["step"] += 1
        state["first"].lerp_(grad, 0.1)
        if p.ndim != 2:
            state["second"].lerp_(grad.square(), 0.05)
            return 0.1 * state["first"] / (state["second"].sqrt() + 1e-8)
        update = grad.lerp(state["first"], 0.95)
        update = update / (update.norm() + 1e-7)
        for _ in range(5):
            gram = update @ update.T
            update = 3.4445 * update + (-4.775 * gram + 2.0315 * gram @ gram) @ update
        return update * max(1.0, p.size(0) / p.size(1)) ** 0.5
