"""Loops with two optimizers on one model, as lists of operations that run plain and sharded.

An operation is a tuple, its name first. ("backward", loss, batch) runs a forward and a backward; ("step", k),
("zero", k), ("clip", k, norm) and so on call optimizer k; ("fake", batch) is the inner part of a GAN's loop that keeps
the generator's graph over a step of the discriminator. Each run returns a trace: losses, norms, and, at ("look",) and
at the end, all gradients and weights. Plain, a backward runs on every rank's part of the batch, divided by their
number, as data parallelism averages.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from ranks import run_threads, seeded
from torch import nn
from torch.testing import assert_close

import zeroshard

Operation = tuple[Any, ...]
Trace = list[Any]
WIDTH, ROWS = 6, 6


class Pair(nn.Module):
    """A generator and a discriminator of two blocks each, and a scale that both use, outside of any module's call."""

    def __init__(self) -> None:
        super().__init__()
        self.gen = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)])
        self.disc = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)])
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.spare = nn.Linear(WIDTH, WIDTH)  # only the loss "spare" uses it

    def forward(self, batch: torch.Tensor, loss: str) -> torch.Tensor:
        fake = self.gen(batch) * self.scale
        if loss == "gen":
            return (self.disc(fake) - 1).square().mean()
        if loss == "disc":
            return (self.disc(fake.detach()) + 1).square().mean() + (self.disc(batch) - 1).square().mean()
        if loss == "spare":
            return self.disc(self.spare(fake)).square().mean()
        return (self.disc(fake) - batch).square().mean() + self.disc(batch).abs().mean()  # both


def split_modules(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of the generator and the scale; those of the discriminator."""
    named = dict(model.named_parameters())
    first = [p for name, p in named.items() if name.startswith(("gen", "scale"))]
    return first, [p for name, p in named.items() if name.startswith(("disc", "spare"))]


def split_shapes(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices, and the vectors: both in every unit."""
    return [p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() != 2]


def adam_and_sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, second = split_modules(model)
    sgd = torch.optim.SGD(second, lr=0.1, momentum=0.9, weight_decay=0.01)
    return [torch.optim.Adam(first, lr=0.02, eps=1e-3, weight_decay=0.01), sgd]


def mixed_units(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, second = split_shapes(model)
    return [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.AdamW(second, lr=0.02, eps=1e-3)]


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, second = split_shapes(model)
    return [torch.optim.Muon(first, lr=0.02), torch.optim.AdamW(second, lr=0.02, eps=1e-3)]


def three(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Three optimizers; the spare layer's bias is in none."""
    groups = [list(part.parameters()) for part in (model.gen, model.disc)]  # type: ignore[attr-defined]
    rest = [model.scale, model.spare.weight]  # type: ignore[attr-defined]
    sgd = torch.optim.SGD(groups[0], lr=0.1, momentum=0.5)
    return [sgd, torch.optim.Adam(groups[1], lr=0.02, eps=1e-3), torch.optim.Adagrad(rest, lr=0.05)]


MAKERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    maker.__name__: maker for maker in (adam_and_sgd, mixed_units, muon_and_adamw, three)
}


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(count)]


class PlainSide:
    """The model and its optimizers in one process."""

    def __init__(self, model: nn.Module, make: str, world: int) -> None:
        self.model: Any = copy.deepcopy(model)
        self.optimizers: Any = MAKERS[make](self.model)
        self.parts, self.schedulers = world, {}  # type: ignore[var-annotated]

    def chunks(self, batch: torch.Tensor) -> Sequence[torch.Tensor]:
        return batch.chunk(self.parts)

    def backward(self, losses: Sequence[torch.Tensor]) -> float:
        for loss in losses:
            (loss / len(losses)).backward()
        return sum(loss.item() for loss in losses) / len(losses)

    def no_sync(self) -> Any:
        return nullcontext()

    def clip_norm(self, k: int, norm: float) -> float:
        params = [p for group in self.optimizers[k].param_groups for p in group["params"]]
        return float(nn.utils.clip_grad_norm_(params, norm))

    def clip_value(self, k: int, value: float) -> None:
        params = [p for group in self.optimizers[k].param_groups for p in group["params"] if p.grad is not None]
        if params:  # torch raises without gradients
            nn.utils.clip_grad_value_(params, value)

    def look(self) -> Trace:
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in self.model.named_parameters()}
        return [grads, {name: p.detach().clone() for name, p in self.model.named_parameters()}]


class ShardedSide(PlainSide):
    """One rank of the sharded model."""

    def __init__(self, model: nn.Module, make: str, world: int, rank: int, options: dict[str, Any]) -> None:
        super().__init__(model, make, world)
        self.rank = rank
        self.model, self.optimizers = zeroshard.shard(self.model, self.optimizers, **{"timeout": 20, **options})

    def chunks(self, batch: torch.Tensor) -> Sequence[torch.Tensor]:
        return [super().chunks(batch)[self.rank]]

    def no_sync(self) -> Any:
        return zeroshard.no_sync(self.model)

    def clip_norm(self, k: int, norm: float) -> float:
        return float(self.optimizers[k].clip_grad_norm_(norm))

    def clip_value(self, k: int, value: float) -> None:
        self.optimizers[k].clip_grad_value_(value)

    def look(self) -> Trace:
        names = [name for name, _ in self.model.named_parameters()]
        grads = {name: zeroshard.full_gradient(self.model, name) for name in names}
        return [grads, {name: zeroshard.full_parameter(self.model, name) for name in names}]


@contextmanager
def only_trained(side: PlainSide, k: int) -> Iterator[None]:
    """Freeze the parameters of the other optimizers meanwhile, as Lightning's toggle_optimizer() does."""
    others = [
        p
        for number, optimizer in enumerate(side.optimizers)
        for group in optimizer.param_groups
        for p in group["params"]
        if number != k
    ]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


def run(side: PlainSide, operations: Sequence[Operation]) -> Trace:
    """Run the operations on one side."""
    trace: Trace = []
    for name, *args in operations:
        if name == "backward":
            loss, batch, *mode = args
            with side.no_sync() if "no_sync" in mode else nullcontext():
                trace.append(side.backward([side.model(part, loss) for part in side.chunks(batch)]))
        elif name == "toggled":
            k, loss, batch = args
            with only_trained(side, k):
                trace.append(side.backward([side.model(part, loss) for part in side.chunks(batch)]))
        elif name == "fake":
            k, batch = args
            fakes = [side.model.gen(part) for part in side.chunks(batch)]
            trace.append(side.backward([(side.model.disc(fake.detach()) + 1).square().mean() for fake in fakes]))
            side.optimizers[k].step()
            trace.append(side.backward([(side.model.disc(fake) - 1).square().mean() for fake in fakes]))
        elif name == "step":
            side.optimizers[args[0]].step()
        elif name == "closure":
            k, loss, batch = args

            def closure(k: int = k, loss: str = loss, batch: torch.Tensor = batch) -> float:
                side.optimizers[k].zero_grad()
                return side.backward([side.model(part, loss) for part in side.chunks(batch)])

            trace.append(side.optimizers[k].step(closure))
        elif name == "zero":
            side.optimizers[args[0]].zero_grad()
        elif name == "zeros":
            side.optimizers[args[0]].zero_grad(set_to_none=False)
        elif name == "model_zero":
            side.model.zero_grad()
        elif name == "clip":
            trace.append(side.clip_norm(*args))
        elif name == "clip_value":
            side.clip_value(*args)
        elif name == "lr":
            side.optimizers[args[0]].param_groups[0]["lr"] *= args[1]
        elif name == "evaluate":
            with torch.no_grad():
                values = [side.model(part, "both").item() for part in side.chunks(args[0])]
            trace.append(sum(values) / len(values))
        else:
            assert name == "look"
            trace.append(side.look())
    return [*trace, side.look()]


def model_of_seed() -> Pair:
    with seeded(0):
        return Pair()


def assert_same_trace(plain: Trace, ranks: Sequence[Trace], rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Compare losses (their mean over the ranks), norms, gradients and weights."""
    for number, expected in enumerate(plain):
        found = [trace[number] for trace in ranks]
        if isinstance(expected, float):
            mean = sum(found) / len(found)  # a norm is the same on all ranks
            assert abs(mean - expected) <= rtol * abs(expected) + atol, (number, mean, expected)
            continue
        for grads, weights in found:
            for name, grad in expected[0].items():
                assert (grad is None) == (grads[name] is None), (number, name, grad, grads[name])
            have = {name: grad for name, grad in expected[0].items() if grad is not None}
            assert_close({name: grads[name] for name in have}, have, rtol=rtol, atol=atol)
            assert_close(weights, expected[1], rtol=rtol, atol=atol)


def assert_same_as_plain(make: str, operations: Sequence[Operation], world: int, **options: Any) -> None:
    model = model_of_seed()
    plain = run(PlainSide(model, make, world), operations)
    found = run_threads(world, lambda rank: run(ShardedSide(model, make, world, rank, options), operations))
    assert_same_trace(plain, found)


def gan_loop(rounds: int, clips: bool = False) -> list[Operation]:
    """The common order: the generator's loss also adds to the discriminator's gradients, which are cleared later."""
    found: list[Operation] = []
    for batch in batches(rounds):
        found += [("zero", 1), ("backward", "disc", batch), *([("clip", 1, 0.1)] if clips else []), ("step", 1)]
        found += [("zero", 0), ("backward", "gen", batch), *([("clip", 0, 0.05)] if clips else []), ("step", 0)]
        found += [("look",)] if batch is not None else []
    return found


def together_loop(rounds: int) -> list[Operation]:
    """Both after every backward; they clear their gradients in turn."""
    steps: list[Operation] = [("clip", 0, 0.1), ("step", 0), ("step", 1), ("look",), ("zero", 0), ("zero", 1)]
    return [operation for batch in batches(rounds) for operation in [("backward", "both", batch), *steps]]


def rare_loop(rounds: int) -> list[Operation]:
    """The second optimizer is stepped every third time, and accumulates meanwhile."""
    found: list[Operation] = []
    for number, batch in enumerate(batches(rounds), 1):
        found += [("backward", "both", batch, "no_sync"), ("backward", "gen", batch), ("step", 0), ("zero", 0)]
        found += [("clip_value", 1, 0.02), ("step", 1), ("look",), ("zero", 1)] if number % 3 == 0 else [("look",)]
    return found


def random_loop(seed: int, length: int, optimizers: int = 2) -> list[Operation]:
    """Any order, mostly sensible."""
    rng = random.Random(seed)
    data = batches(4)
    names = ["backward"] * 8 + ["step"] * 8 + ["zero"] * 6 + ["clip"] * 3 + ["look"] * 2
    names += ["zeros", "clip_value", "model_zero", "lr", "evaluate", "fake", "closure", "no_sync", "toggled"]
    found: list[Operation] = []
    for _ in range(length):
        name, k, batch = rng.choice(names), rng.randrange(optimizers), rng.choice(data)
        loss = rng.choice(["gen", "disc", "both", "spare"])
        if name in ("backward", "no_sync"):
            found.append(("backward", loss, batch, *(["no_sync"] if name == "no_sync" else [])))
        elif name in ("closure", "toggled"):
            found.append((name, k, loss, batch))
        elif name in ("fake", "evaluate"):
            found.append((name, *([k] if name == "fake" else []), batch))
        elif name in ("clip", "clip_value"):
            found.append((name, k, rng.choice([0.01, 0.1, 10.0])))
        elif name == "lr":
            found.append((name, k, rng.choice([0.5, 2.0])))
        else:
            found.append((name,) if name in ("look", "model_zero") else (name, k))
    return found
