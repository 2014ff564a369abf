"""Run the same training step sharded, on every rank's part of a batch, and plain, on the global batch.

A step is a function of a model and a part of a batch: it runs forward and backward like a user's loop and returns the
loss. Sharded, rank r runs it on part r. Plain, it runs on the full batch. If the mean over the batch is not the mean
over the parts (batch norm, routers, parameters that only one part uses), it runs on one part after the other and
averages the gradients, as data parallelism does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from plain import assert_close, full_parameters
from ranks import run_threads, seeded
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import zeroshard

Step = Callable[[Any, Any], torch.Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
Result = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]  # losses, parameters, buffers


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum and weight decay. Its update is proportional to the gradient, so a wrong scale shows."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with an epsilon above the rounding errors of gradients, which it would scale up to a full step."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)


def built(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    """Build a model from a seed."""
    with seeded(seed):
        return make()


def tokens(steps: int, vocabulary: int, rows: int = 6, length: int = 5) -> list[torch.Tensor]:
    """Return global batches of random tokens; 6 rows can be split over 2 and 3 ranks."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (rows, length), generator=generator) for _ in range(steps)]


def numbers(steps: int, *shape: int, seed: int = 2) -> list[torch.Tensor]:
    """Return global batches of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def token_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Predict each token from itself."""
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def token_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Run one forward and one backward."""
    loss = token_loss(model, ids)
    loss.backward()
    return loss


def backwards_in_turn(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Run two forwards, then their backwards in the same order."""
    first, second = token_loss(model, ids), token_loss(model, ids.flip(1))
    first.backward()
    second.backward()
    return first + second


def backwards_in_reverse(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Run two forwards, then their backwards in reverse order."""
    first, second = token_loss(model, ids), token_loss(model, ids.flip(1))
    second.backward()
    first.backward()
    return first + second


def part(batch: Any, rank: int, world: int) -> Any:
    """Return one rank's rows of every tensor in a batch."""
    return pytree.tree_map(lambda tensor: tensor.chunk(world)[rank], batch)


def copied_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the buffers."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def copied(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return copies of a plain model's parameters and buffers."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}, copied_buffers(model)


def train_plainly(
    model: nn.Module, step: Step, batches: Sequence[Any], make_optimizer: MakeOptimizer, parts: int
) -> Result:
    """Train a copy on the global batches, split into ``parts``. The buffers of the first part are kept."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model)
    losses = []
    for batch in batches:
        buffers = copied_buffers(model)
        loss = 0.0
        for number in reversed(range(parts)):
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
            loss += step(model, part(batch, number, parts)).item() / parts
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= parts
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, *copied(model)


def train_rank(
    rank: int,
    world: int,
    model: nn.Module,
    step: Step,
    batches: Sequence[Any],
    make_optimizer: MakeOptimizer,
    options: dict[str, Any],
) -> Result:
    """Train a sharded copy on this rank's parts of the batches."""
    model = copy.deepcopy(model)
    model, optimizer = zeroshard.shard(model, make_optimizer(model), **{"timeout": 20, **options})
    losses = []
    for batch in batches:
        losses.append(step(model, part(batch, rank, world)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, full_parameters(model), copied_buffers(model)


def assert_same(
    model: nn.Module,
    step: Step,
    batches: Sequence[Any],
    *,
    world: int = 2,
    whole: bool = True,
    run: Callable[..., list[Result]] = run_threads,
    make_optimizer: MakeOptimizer = sgd,
    relative: float = 1e-6,
    **options: Any,
) -> None:
    """Train both ways; compare losses, parameters and rank 0's buffers within ``relative`` of their largest value."""
    losses, parameters, buffers = train_plainly(model, step, batches, make_optimizer, 1 if whole else world)
    results = run(world, train_rank, world, model, step, batches, make_optimizer, options)
    mean = torch.tensor([result[0] for result in results]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=relative, atol=relative)
    for _, ours, _ in results:
        assert_close(ours, parameters, relative)
    assert_close(results[0][2], buffers, relative)
    before = copied(model)[0]
    assert any(not torch.equal(value, before[name]) for name, value in parameters.items()), "nothing was trained"
