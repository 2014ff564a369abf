"""The one driver beside the plain run: train sharded, on every rank's part of the data, and plain, on all of it.

A *loop* is a function of a model, its optimizer and data, written like a user's: it works for plain and for sharded
models. `assert_same_training` runs one on every rank in every stage and once without sharding, and compares the final
parameters. Tests that look at more shard with `sharded`, train with `train_steps` or `take_step`, and compare with
`run_plain`.

A *step* is a function of a model and one batch: it runs forward and backward and returns the loss. `assert_same` trains
with one both ways, and also compares losses and buffers. If the mean over the batch is not the mean over the parts
(batch norm, routers, parameters that only one part uses), it runs the plain model on one part after the other and
averages the gradients, as data parallelism does (`whole=False`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from ranks import run_threads
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

import zeroshard
from zeroshard.models.gpt import GPT, GPTConfig

Tensors = dict[str, torch.Tensor]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]
Step = Callable[[Any, Any], torch.Tensor]
MakeOptimizer = Callable[[Any], Any]

# --------------------------------------------------------------------------------------------------- data and losses


def batches(steps: int, rows: int = 12, length: int = 5, vocabulary: int = 11, seed: int = 1) -> list[torch.Tensor]:
    """Return global batches of tokens; 12 rows can be split over 1, 2, 3 and 4 ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (rows, length), generator=generator) for _ in range(steps)]


ONE_BATCH = batches(1)[0]


def tokens(steps: int, vocabulary: int, rows: int = 6, length: int = 5) -> list[torch.Tensor]:
    """Return global batches of tokens of any vocabulary; 6 rows can be split over 2 and 3 ranks."""
    return batches(steps, rows, length, vocabulary)


def numbers(steps: int, *shape: int, seed: int = 2) -> list[torch.Tensor]:
    """Return global batches of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def split(batch: Any, rank: int, world: int) -> Any:
    """Return one rank's rows of every tensor in a global batch."""
    return pytree.tree_map(lambda tensor: tensor.chunk(world)[rank], batch)


def shares(data: Iterable[Any], rank: int, world: int) -> list[Any]:
    """Return one rank's rows of each global batch."""
    return [split(batch, rank, world) for batch in data]


def net_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Predict each token from itself."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def square_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Make outputs small."""
    return model(x).float().square().mean()


def token_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Run one forward and one backward."""
    loss = net_loss(model, ids)
    loss.backward()
    return loss


def backwards_in_turn(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Run two forwards, then their backwards in the same order."""
    first, second = net_loss(model, ids), net_loss(model, ids.flip(1))
    first.backward()
    second.backward()
    return first + second


def backwards_in_reverse(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Run two forwards, then their backwards in reverse order."""
    first, second = net_loss(model, ids), net_loss(model, ids.flip(1))
    second.backward()
    first.backward()
    return first + second


# --------------------------------------------------------------------------------------------------------- optimizers


def of(kind: Callable[..., Any], **options: Any) -> MakeOptimizer:
    """Return what makes an optimizer of this kind for all parameters of a model."""
    return partial(_make, kind, options)


def _make(kind: Callable[..., Any], options: dict[str, Any], model: nn.Module) -> Any:
    return kind(model.parameters(), **options)


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    """Return SGD. Its update is proportional to the gradient, so a wrong scale shows."""
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def momentum(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum of the parameters that are trained."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, **options)


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum and weight decay, of the parameters that are trained."""
    return momentum(model, weight_decay=0.01)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return AdamW with an epsilon above the rounding errors of gradients, which it would scale up to a full step.

    With torch's epsilon a step has one size whatever the gradient's is, and a wrong scale would not show.
    """
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3, **options})


def adamw_in_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with two groups of parameters, of which one decays."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)


# ------------------------------------------------------------------------------------------------ sharding and loops


def mesh_of(shape: tuple[int, ...], names: str = "replicate shard") -> DeviceMesh:
    """Return a mesh of this shape; with fewer axes than names, the last names."""
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(names.split()[-len(shape) :]))


def sharded(base: nn.Module, make: MakeOptimizer | None = None, mesh: Any = None, **options: Any) -> tuple[Any, Any]:
    """Shard a copy of a model with an optimizer made for the copy; a mesh may be given by its shape."""
    model = copy.deepcopy(base)
    optimizer = None if make is None else make(model)
    mesh = mesh_of(mesh) if isinstance(mesh, tuple) else mesh
    return zeroshard.shard(model, optimizer, mesh=mesh, **options)


def sharded_gpt(config: GPTConfig, mesh: Any = None, **options: Any) -> tuple[Any, Any]:
    """Shard a GPT of zeros in bf16 with fused AdamW, for tests of what is held and sent: no number is looked at."""
    with torch.device("meta"):
        model = GPT(config)
    options = {"precision": "bf16", "init_fn": lambda module: None, **options}
    return sharded(model, partial(adamw, fused=True), mesh, **options)


def scaled(optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
    """Return the loss, times the loss scale if the optimizer has one."""
    return optimizer.scale(loss) if isinstance(optimizer, zeroshard.ShardedOptimizer) else loss


def clip(model: nn.Module, optimizer: Any, max_norm: float) -> torch.Tensor:
    """Clip by the norm of all gradients; return it."""
    if isinstance(optimizer, zeroshard.ShardedOptimizer):
        return optimizer.clip_grad_norm_(max_norm)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def take_step(optimizer: Any, loss: torch.Tensor, max_norm: float | None = None) -> float:
    """Run backward, clip if there is a limit, update and clear the gradients; return the loss."""
    loss.backward()
    if max_norm is not None:
        optimizer.clip_grad_norm_(max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train_step(model: nn.Module, optimizer: Any, batch: Any, loss_of: Loss = net_loss) -> float:
    """Run one step; return the loss."""
    return take_step(optimizer, loss_of(model, batch))


def train_losses(model: nn.Module, optimizer: Any, data: Iterable[Any], loss_of: Loss = net_loss) -> list[float]:
    """Run one step per batch; return the losses."""
    return [train_step(model, optimizer, batch, loss_of) for batch in data]


def train_steps(model: nn.Module, optimizer: Any, data: Iterable[Any], loss_of: Loss = net_loss) -> None:
    """Run one step per batch."""
    train_losses(model, optimizer, data, loss_of)


square_steps = partial(train_steps, loss_of=square_loss)


def clipped_steps(
    model: nn.Module, optimizer: Any, data: Iterable[Any], max_norm: float | None, loss_of: Loss = net_loss
) -> list[float]:
    """Run one step per batch, with scaled losses; return the norms of gradients, which are clipped if there is a limit.

    Like any loop that the driver runs, it returns numbers that are the same on all ranks.
    """
    norms = []
    for batch in data:
        scaled(optimizer, loss_of(model, batch)).backward()
        if max_norm is not None:
            norms.append(clip(model, optimizer, max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def copied(model: nn.Module) -> Tensors:
    """Return copies of a plain model's parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def copied_buffers(model: nn.Module) -> Tensors:
    """Return copies of the buffers."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def full_parameters(model: nn.Module) -> Tensors:
    """Return copies of the full parameters of a sharded model, as it computes with them."""
    with zeroshard.gathered(model):
        return copied(model)


def masters(model: nn.Module) -> Tensors:
    """Return the full parameters of a sharded model, as they are updated."""
    return {name: zeroshard.full_parameter(model, name).clone() for name, _ in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the full gradients of a sharded model."""
    return {name: zeroshard.full_gradient(model, name) for name, _ in model.named_parameters()}


def whole_states(model: nn.Module, optimizer: Any) -> Tensors:
    """Return parameters as they compute and as they are updated, and their states."""
    found = full_parameters(model)
    for name in list(found):
        found[f"{name} exact"] = zeroshard.full_parameter(model, name)
        for key, value in zeroshard.full_state(optimizer, name).items():
            found[f"{name} {key}"] = torch.as_tensor(value).clone()
    return found


# --------------------------------------------------------------------------------------------------------- comparing


def assert_close(ours: Tensors, plain: Tensors, relative: float = 1e-6) -> None:
    """Assert that each tensor equals the plain one within ``relative`` of its largest value.

    A tensor that started at zero is as small as the steps it took, and Adam amplifies the summation order of gradients
    that nearly cancel. So the largest value counts as at least 0.25.
    """
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        largest = max(value.abs().max().item(), 0.25) if value.numel() else 1.0
        torch.testing.assert_close(
            ours[name], value, rtol=0, atol=relative * largest, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_equal(ours: Tensors, other: Tensors) -> None:
    """Assert that the tensors are bitwise equal."""
    assert ours.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(ours[name], value), name


def assert_moved(base: nn.Module, trained: Tensors) -> None:
    """Assert that a plain run has trained something: a comparison with it would say nothing otherwise."""
    assert any(not torch.equal(value, trained[name]) for name, value in base.named_parameters()), "nothing was trained"


# --------------------------------------------------------------------------------------------------------- both runs

Loop = Callable[[Any, Any, list[Any]], Iterable[float] | None]  # what it returns is the same on all ranks


def outcome(parameters: Tensors, told: Iterable[float] | None) -> Tensors:
    """Return what is compared: the final parameters, and the numbers that the loop returned."""
    return parameters | {f"number {index}": torch.tensor(number) for index, number in enumerate(told or ())}


def run_plain(base: nn.Module, make: MakeOptimizer, data: list[Any], loop: Loop = train_steps) -> Tensors:
    """Run a loop without sharding on global batches; return its outcome."""
    model = copy.deepcopy(base)
    told = loop(model, make(model), data)
    return outcome(copied(model), told)


def run_rank(
    rank: int, world: int, base: nn.Module, make: MakeOptimizer, data: list[Any], loop: Loop, options: dict[str, Any]
) -> Tensors:
    """Run a loop on one rank's part of each batch; return its outcome, with the full parameters."""
    model, optimizer = sharded(base, make, **options)
    told = loop(model, optimizer, shares(data, rank, world))
    return outcome(full_parameters(model), told)


def run_ranks(
    world: int,
    base: nn.Module,
    make: MakeOptimizer,
    data: list[Any],
    loop: Loop = train_steps,
    run: Callable[..., list[Tensors]] = run_threads,
    **options: Any,
) -> Tensors:
    """Run a loop on every rank; return its outcome, which is bitwise equal on all of them."""
    first, *others = run(world, run_rank, world, base, make, data, loop, options)
    for other in others:
        assert_equal(other, first)
    return first


def run_stages(
    world: int,
    base: nn.Module,
    make: MakeOptimizer,
    data: list[Any],
    loop: Loop = train_steps,
    stages: Sequence[int] = (0, 1, 2, 3),
    **options: Any,
) -> dict[int, Tensors]:
    """Run a loop in each stage; return the outcomes by stage."""
    return {stage: run_ranks(world, base, make, data, loop, stage=stage, **options) for stage in stages}


def assert_same_training(
    world: int,
    base: nn.Module,
    make: MakeOptimizer,
    data: list[Any],
    loop: Loop = train_steps,
    stages: Sequence[int] = (0, 1, 2, 3),
    identical: bool = True,
    relative: float = 1e-6,
    plain_loop: Loop | None = None,
    **options: Any,
) -> None:
    """Assert that every stage ends as the plain run does, and that stages 1, 2 and 3 are bitwise equal.

    A loop that only sharded models can run is compared with a ``plain_loop`` of the same numbers.
    """
    plain = run_plain(base, make, data, plain_loop or loop)
    assert_moved(base, plain)
    results = run_stages(world, base, make, data, loop, stages, **options)
    for stage, result in results.items():
        try:
            assert_close(result, plain, relative)
        except AssertionError as error:
            raise AssertionError(f"stage {stage} differs from the plain run: {error}") from error
    for stage in {2, 3}.intersection(stages) if identical and 1 in stages else ():
        assert_equal(results[stage], results[1])


Result = tuple[list[float], Tensors, Tensors]  # losses, parameters, buffers


def train_plainly(model: nn.Module, step: Step, data: Sequence[Any], make: MakeOptimizer, parts: int) -> Result:
    """Train a copy on the global batches, split into ``parts``. The buffers of the first part are kept."""
    model = copy.deepcopy(model)
    optimizer = make(model)
    losses = []
    for batch in data:
        buffers = copied_buffers(model)
        loss = 0.0
        for number in reversed(range(parts)):
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
            loss += step(model, split(batch, number, parts)).item() / parts
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= parts
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, copied(model), copied_buffers(model)


def train_rank(
    rank: int,
    world: int,
    model: nn.Module,
    step: Step,
    data: Sequence[Any],
    make: MakeOptimizer,
    options: dict[str, Any],
) -> Result:
    """Train a sharded copy on this rank's parts of the batches."""
    model, optimizer = sharded(model, make, **{"timeout": 20, **options})
    losses = []
    for batch in shares(data, rank, world):
        losses.append(step(model, batch).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, full_parameters(model), copied_buffers(model)


def assert_same(
    model: nn.Module,
    step: Step,
    data: Sequence[Any],
    *,
    world: int = 2,
    whole: bool = True,
    run: Callable[..., list[Result]] = run_threads,
    make: MakeOptimizer = decayed,
    relative: float = 1e-6,
    **options: Any,
) -> None:
    """Train both ways; compare losses, parameters and rank 0's buffers within ``relative`` of their largest value."""
    losses, parameters, buffers = train_plainly(model, step, data, make, 1 if whole else world)
    assert_moved(model, parameters)
    results = run(world, train_rank, world, model, step, data, make, options)
    mean = torch.tensor([result[0] for result in results]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=relative, atol=relative)
    for _, ours, _ in results:
        assert_close(ours, parameters, relative)
    assert_close(results[0][2], buffers, relative)
