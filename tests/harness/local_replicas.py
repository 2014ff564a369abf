"""A plain loop over copies of a model that are averaged every k steps: what local steps are compared with."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from plain import net_loss, split
from torch import nn

DILOCO = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
Outer = Callable[..., torch.optim.Optimizer] | None
Values = dict[str, torch.Tensor]


def mean_of(replicas: list[nn.Module]) -> list[torch.Tensor]:
    each = [[p.detach().clone() for p in replica.parameters()] for replica in replicas]
    return [torch.stack(values).mean(0) for values in zip(*each, strict=True)]


class PlainReplicas:
    """Independent copies of a model, averaged every k steps: what the sharded runs are compared with."""

    def __init__(self, model: nn.Module, make: Any, count: int, every: int, outer: Outer = None) -> None:
        self.models = [copy.deepcopy(model) for _ in range(count)]
        self.optimizers = [make(replica) for replica in self.models]
        self.every, self.steps = every, 0
        self.anchors = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        self.trained = [p.requires_grad for p in model.parameters()]
        self.outer = (
            outer([a for a, is_trained in zip(self.anchors, self.trained, strict=True) if is_trained])
            if outer
            else None
        )

    def step(self, batch: torch.Tensor, accumulate: int = 1, max_norm: float | None = None) -> list[float]:
        norms = []
        for number, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            for part in split(batch, number, len(self.models)).chunk(accumulate):
                net_loss(model, part).backward()
            if max_norm is not None:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        if self.steps % self.every == 0:
            self.average()
        return norms

    @torch.no_grad()
    def average(self) -> None:
        new = mean_of(self.models)
        if self.outer is not None:
            for anchor, mean in zip(self.anchors, new, strict=True):
                anchor.grad = anchor - mean
            self.outer.step()
            new = self.anchors
        for model in self.models:
            for parameter, value, is_trained in zip(model.parameters(), new, self.trained, strict=True):
                if is_trained:
                    parameter.copy_(value)

    def values(self, number: int) -> Values:
        return {name: p.detach().clone() for name, p in self.models[number].named_parameters()}
