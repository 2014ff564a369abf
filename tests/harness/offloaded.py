"""One training run with states in far tiers, to be held against the same run without: nets, optimizers and the loop."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from plain import batches, net_loss, split
from ranks import seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zoo import Block, make_net

import zeroshard


class Lion(torch.optim.Optimizer):
    """An optimizer that is not torch's: the sign of a momentum, and a count of its own calls."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.add_(torch.sign(momentum * group["beta"] + p.grad), alpha=-group["lr"] / self.calls)
                    momentum.lerp_(p.grad, 1 - group["beta"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "dampened": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "fused SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "Lion": Lion,
}


def grouped(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not; a third-party optimizer has no such option."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "Lion":
        return OPTIMIZERS[kind](trained)
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    return OPTIMIZERS[kind]([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])


class Fickle(nn.Module):
    """A net with a block that only every other batch uses, and a parameter that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.never = nn.Parameter(torch.ones(70))
        self.head = nn.Linear(8, 11)
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number != 1 or self.calls % 2:
                x = block(x)
        self.calls += 1
        return self.head(x)


def tied(model: nn.Module) -> nn.Module:
    model.head.weight = model.embedding.weight  # type: ignore[union-attr,assignment]
    return model


def frozen(model: nn.Module) -> nn.Module:
    model.embedding.requires_grad_(False)  # type: ignore[union-attr,operator]
    model.blocks[1].up.requires_grad_(False)  # type: ignore[index,union-attr]
    return model


def make_fickle() -> Fickle:
    with seeded(0):
        return Fickle()


NETS: dict[str, Callable[[], nn.Module]] = {
    "net": lambda: make_net(blocks=2),
    "wide": lambda: make_net(width=16, blocks=3),
    "fickle": make_fickle,
    "tied": lambda: tied(make_net(blocks=2)),
    "frozen": lambda: frozen(make_net(blocks=2)),
}


@dataclass
class Case:
    """A loop, and everything that may change its numbers."""

    net: str = "net"
    optimizer: str = "AdamW"
    groups: bool = False
    steps: int = 5
    accumulate: Sequence[int] = (1,)  # backwards of each step, in turn
    clip: Sequence[float | None] = (None,)  # the largest norm of each step, in turn
    overflow: int | None = None  # the step whose loss is infinite
    unsynchronised: bool = False  # the first backwards of a step inside no_sync()
    mesh: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"stage": 3})

    def make(self, offload: Any = None) -> tuple[Any, Any]:
        """The sharded pair."""
        with seeded(0):  # in threads, too
            model = NETS[self.net]()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = grouped(model, self.optimizer) if self.groups else OPTIMIZERS[self.optimizer](trained)
        mesh = None if self.mesh is None else init_device_mesh("cpu", self.mesh)
        return zeroshard.shard(model, optimizer, mesh=mesh, offload=offload, timeout=20, **self.options)


Outcome = dict[str, Any]


def train(rank: int, world: int, case: Case, offload: Any = None) -> Outcome:
    """Run a case on one rank; return all its numbers."""
    model, optimizer = case.make(offload)
    return {"steps": loop(model, optimizer, case, rank, world), **everything(model, optimizer)}


def loop(model: Any, optimizer: Any, case: Case, rank: int = 0, world: int = 1, first: int = 0) -> list[Any]:
    """The case's steps from ``first`` on; returns losses and norms."""
    told: list[Any] = []
    for number, batch in enumerate(batches(case.steps)[first:], first):
        backwards = case.accumulate[number % len(case.accumulate)]
        for backward in range(backwards):
            last = backward == backwards - 1
            apart = zeroshard.no_sync(model) if case.unsynchronised and not last else contextlib.nullcontext()
            with apart:
                loss = net_loss(model, split((batch + backward) % 11, rank, world))  # each backward has other data
                told.append(loss.item())
                loss = loss * (1e38 if number == case.overflow else 1 / backwards)
                optimizer.scale(loss).backward()
        norm = case.clip[number % len(case.clip)]
        if norm is not None:
            told.append(optimizer.clip_grad_norm_(norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return told


def everything(model: Any, optimizer: Any) -> Outcome:
    """Every parameter, every state of every parameter, and the loss scale."""
    names = [name for name, _ in model.named_parameters()]
    trained = [name for group in optimizer.group_param_names for name in group]
    return {
        "parameters": {name: zeroshard.full_parameter(model, name) for name in names},
        "states": {name: copy.deepcopy(zeroshard.full_state(optimizer, name)) for name in trained},
        "scale": optimizer.loss_scale_state(),
    }


def assert_same(ours: Any, wanted: Any, where: str = "") -> None:
    """Bit for bit, through dictionaries and lists; NaN equals NaN, and a tensor its copy on another device."""
    assert type(ours) is type(wanted), where
    if isinstance(wanted, dict):
        assert ours.keys() == wanted.keys(), where
        for key in wanted:
            assert_same(ours[key], wanted[key], f"{where}/{key}")
    elif isinstance(wanted, list):
        assert len(ours) == len(wanted), where
        for number, (one, other) in enumerate(zip(ours, wanted, strict=True)):
            assert_same(one, other, f"{where}/{number}")
    elif isinstance(wanted, torch.Tensor):
        assert ours.dtype == wanted.dtype and ours.shape == wanted.shape, where
        ours, wanted = ours.cpu(), wanted.cpu()
        assert torch.equal(ours.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0)), f"{where} differs"
    elif isinstance(wanted, float):
        assert ours == wanted or (ours != ours and wanted != wanted), f"{where}: {ours} is not {wanted}"
    else:
        assert ours == wanted, where
