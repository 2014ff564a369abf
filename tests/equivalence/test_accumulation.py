"""Gradients sum over any number of backwards until zero_grad(), in every stage, as in plain PyTorch."""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from pairs import at_stages, every_stage, pairwise
from plain import (
    ONE_BATCH,
    Tensors,
    adamw,
    assert_close,
    assert_same_training,
    batches,
    clip,
    decayed,
    full_gradients,
    full_parameters,
    net_loss,
    sgd,
    sharded,
    shares,
    split,
    take_step,
    token_step,
    train_step,
)
from ranks import run_processes, run_threads
from torch import nn
from zoo import built, make_net

import zeroshard

Loop = Callable[[nn.Module, torch.optim.Optimizer, list[torch.Tensor]], None]


@functools.cache
def net() -> nn.Module:
    return make_net()


def accumulate(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor], parts: int, silent: bool = False
) -> None:
    """Each batch in ``parts`` backwards, all but the last inside no_sync() where ``silent``."""
    for batch in data:
        micro = batch.chunk(parts)
        for number, part in enumerate(micro):
            inside = silent and isinstance(optimizer, zeroshard.ShardedOptimizer) and number < len(micro) - 1
            with zeroshard.no_sync(model) if inside else nullcontext():
                (net_loss(model, part) / len(micro)).backward()
        optimizer.step()
        optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("world", "parts", "silent"),
    [(1, 4, False), (1, 4, True), (2, 2, False), (2, 3, True), (3, 4, True), (4, 3, False)],
)
def test_backwards_sum_to_one_large_batch(world: int, parts: int, silent: bool) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
        sharded = isinstance(optimizer, zeroshard.ShardedOptimizer)
        accumulate(model, optimizer, data, parts if sharded else 1, silent)

    data = batches(3, rows=24)
    assert_same_training(world, net(), decayed, data, loop, identical=False, bucket_size=100)


def test_processes_over_gloo_sum_to_one_large_batch() -> None:
    options = {"identical": False, "run": run_processes, "bucket_size": 100}
    assert_same_training(3, net(), decayed, batches(2, rows=24), in_four_parts, **options)


def in_four_parts(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
    accumulate(model, optimizer, data, parts=4 if zeroshard.is_sharded(model) else 1, silent=True)


def all_inside_no_sync(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    """No backward outside: the step itself has to reduce."""
    for batch in data:
        with zeroshard.no_sync(model) if isinstance(optimizer, zeroshard.ShardedOptimizer) else nullcontext():
            token_step(model, batch)
            token_step(model, batch.flip(0))
        optimizer.step()
        optimizer.zero_grad()


def sync_then_no_sync(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    """A reduced gradient is there when backwards inside no_sync() add to it."""
    for batch in data:
        token_step(model, batch)
        with zeroshard.no_sync(model) if isinstance(optimizer, zeroshard.ShardedOptimizer) else nullcontext():
            token_step(model, batch.flip(1))
        optimizer.step()
        optimizer.zero_grad()


def no_zero_grad(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    """Gradients of earlier steps stay and are added to."""
    for number, batch in enumerate(data):
        token_step(model, batch)
        optimizer.step()
        if number == 1:
            optimizer.zero_grad()


def second_step(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    """A step without a new backward uses the same gradients again."""
    for batch in data:
        token_step(model, batch)
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


def step_without_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    """A step when there are none leaves all as it is: no decay, no momentum."""
    for batch in data:
        train_step(model, optimizer, batch)
        optimizer.step()


def zero_to_zero(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    """Gradients that are zero, not None: the second step decays and keeps its momentum."""
    for batch in data:
        token_step(model, batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()


def zero_between_backwards(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    """What is cleared before any step is gone."""
    for number, batch in enumerate(data):
        token_step(model, batch)
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        train_step(model, optimizer, batch.flip(1))


def same_graph_twice(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    """Two backwards through one forward."""
    for batch in data:
        loss = net_loss(model, batch)
        loss.backward(retain_graph=True)
        take_step(optimizer, loss)


def forwards_before_backwards(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    """Two graphs live at once; the later one goes backward first, then two at once."""
    for batch in data:
        first, second = net_loss(model, batch), net_loss(model, batch.flip(1))
        second.backward()
        first.backward()
        take_step(optimizer, net_loss(model, batch) + net_loss(model, batch.flip(0)))


def clip_then_backward(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    """What was clipped stays clipped; what comes after is not."""
    for batch in data:
        token_step(model, batch)
        clip(model, optimizer, 0.05)
        train_step(model, optimizer, batch.flip(1))


def clip_step_and_go_on(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    """The gradients that stay after the step are the clipped ones."""
    for batch in data:
        token_step(model, batch)
        clip(model, optimizer, 0.05)
        optimizer.step()


def clip_twice(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    """The second norm is that of the clipped gradients."""
    for batch in data:
        token_step(model, batch)
        clip(model, optimizer, 0.05)
        assert clip(model, optimizer, 0.02).item() == pytest.approx(0.05, rel=1e-3)
        optimizer.step()
        optimizer.zero_grad()


ALONE = (all_inside_no_sync, zero_to_zero, same_graph_twice, clip_then_backward)  # also where nothing is reduced


@pytest.mark.parametrize(
    "loop",
    [
        all_inside_no_sync,
        sync_then_no_sync,
        no_zero_grad,
        second_step,
        step_without_gradients,
        zero_to_zero,
        zero_between_backwards,
        same_graph_twice,
        forwards_before_backwards,
        clip_then_backward,
        clip_step_and_go_on,
        clip_twice,
    ],
)
def test_gradients_live_as_in_plain_pytorch(loop: Loop) -> None:
    for world in (1, 2) if loop in ALONE else (2,):
        assert_same_training(world, net(), decayed, batches(3), loop, identical=False, bucket_size=100)


# ------------------------------------------------------------------------------------------- unused parameters


class Branches(nn.Module):
    """Two branches of several blocks; a run uses one of them, or both, and always the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 9)
        self.left = nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 9))
        self.right = nn.Sequential(nn.Linear(9, 13), nn.Tanh(), nn.Linear(13, 9))
        self.head = nn.Linear(9, 11)

    def forward(self, tokens: torch.Tensor, use: str) -> torch.Tensor:
        x = self.embedding(tokens)
        y = x
        if "l" in use:
            y = y + self.left(x)
        if "r" in use:
            y = y + self.right(x)
        return self.head(y)


@functools.cache
def branches() -> nn.Module:
    return built(lambda: nn.ModuleDict({"body": Branches()}), seed=5)


def branch_loss(model: nn.Module, tokens: torch.Tensor, use: str) -> torch.Tensor:
    return nn.functional.cross_entropy(model["body"](tokens, use).flatten(0, 1), tokens.flatten())


# Each string is one step: its words are backwards, their parts by "/" what each of the two ranks uses. "!" reads the
# norm in between, so that what there is must be reduced; "_" keeps the gradients after the step.
PLANS = {
    "one branch in one backward": ["lr lr", "l lr", "lr r", "l r"],
    "never the other branch": ["l l", "l", "l l"],
    "other ranks, other branches": ["l/r", "l/r lr", "lr r/l", "l/lr"],
    "reduced in between": ["lr ! l", "l ! r", "lr ! r ! l"],
    "reduced in between on ranks that differ": ["lr ! l", "l ! r", "lr ! l/r ! l", "l/r ! r/l"],
    "without zero_grad": ["lr _", "l _", "r", "l/r _", "l/r"],
    "unused at first": ["l", "lr", "lr", "r"],
}


def follow(model: nn.Module, optimizer: torch.optim.Optimizer, plan: list[str], rank: int | None) -> None:
    """Go through a plan on one rank of two, or, where ``rank`` is None, as one process that stands for both."""
    generator = torch.Generator().manual_seed(4)
    for step in plan:
        for word in step.split():
            batch = torch.randint(11, (8, 3), generator=generator)
            if word == "_":
                continue
            if word == "!":
                clip(model, optimizer, 1e9)
                continue
            uses = (word.split("/") * 2)[:2]
            if rank is None:
                sum(branch_loss(model, split(batch, r, 2), uses[r]) / 2 for r in (0, 1)).backward()
            else:
                branch_loss(model, split(batch, rank, 2), uses[rank]).backward()
        optimizer.step()
        if not step.endswith("_"):
            optimizer.zero_grad()


@pytest.mark.parametrize(("stage", "plan", "make_optimizer"), pairwise([0, 1, 2, 3], PLANS, [decayed, adamw]))
def test_parameters_without_gradient_are_skipped_and_others_summed(stage: int, plan: str, make_optimizer: Any) -> None:
    plain = copy.deepcopy(branches())
    follow(plain, make_optimizer(plain), PLANS[plan], None)

    def body(rank: int) -> Tensors:
        # Ranks must gather the same units: where they use different branches, one unit holds both.
        units = ("body",) if any("/" in step for step in PLANS[plan]) else ("body.left", "body.right")
        model, optimizer = sharded(branches(), make_optimizer, stage=stage, units=units)
        follow(model, optimizer, PLANS[plan], rank)
        return full_parameters(model)

    for result in run_threads(2, body):
        assert_close(result, dict(plain.named_parameters()))


# ------------------------------------------------------------------------------------------------ model.zero_grad


def do_nothing(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    """Straight after backward."""


def after_a_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.step()


def after_evaluation(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    with torch.no_grad():
        model(batch)


def after_a_forward(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model.kept = net_loss(model, batch)


def after_reading_parameters(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.step()
    with zeroshard.gathered(model):
        for parameter in model.parameters():
            parameter.sum()


MOMENTS = [do_nothing, after_a_step, after_evaluation, after_a_forward, after_reading_parameters]


@pytest.mark.parametrize(("stage", "moment", "set_to_none"), pairwise([0, 1, 2, 3], MOMENTS, [True, False]))
def test_model_zero_grad_clears_or_says_what_does(stage: int, moment: Any, set_to_none: bool) -> None:
    data = batches(2)

    def body(rank: int) -> str:
        first, second = (split(batch, rank, 2) for batch in data)
        model, optimizer = sharded(net(), partial(sgd, lr=0.0), stage=stage)
        token_step(model, first)
        moment(model, optimizer, second)
        try:
            model.zero_grad(set_to_none)
        except RuntimeError as error:
            assert "optimizer.zero_grad()" in str(error)
            return "refused"
        loss = model.kept if moment is after_a_forward else net_loss(model, second)
        loss.backward()
        gradients = full_gradients(model)
        assert_close(gradients, wanted)
        return "cleared"

    plain = copy.deepcopy(net())
    token_step(plain, data[1])
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    assert len(set(run_threads(2, body))) == 1


# ------------------------------------------------------------------------------------------------------ traffic


def traffic(stage: int, parts: int, silent: bool = False) -> dict[str, int]:
    """How many collectives of each kind the third step takes."""

    def body(rank: int) -> dict[str, int]:
        model, optimizer = sharded(net(), decayed, stage=stage, bucket_size=256)
        data = shares(batches(3, rows=24), rank, 2)
        accumulate(model, optimizer, data, parts, silent)
        return {kind: counted.count for kind, counted in zeroshard.report(model).collectives.items()}

    first, second = run_threads(2, body)
    assert first == second
    return first


@pytest.mark.parametrize("parts", [2, 4])
@at_stages(0, 1)
def test_replicated_gradients_are_reduced_once_a_step_however_many_backwards(stage: int, parts: int) -> None:
    once = traffic(stage, 1)
    assert once["all-reduce" if stage == 0 else "reduce-scatter"] > 0
    assert traffic(stage, parts) == once


@at_stages(2, 3)
def test_partitioned_gradients_are_reduced_by_every_backward(stage: int) -> None:
    assert traffic(stage, 4)["reduce-scatter"] == 4 * traffic(stage, 1)["reduce-scatter"] > 0


@every_stage
def test_no_sync_skips_the_reductions_of_all_backwards_inside(stage: int) -> None:
    once, silent = traffic(stage, 1), traffic(stage, 4, silent=True)
    assert silent.get("reduce-scatter") == once.get("reduce-scatter")
    assert silent["all-reduce"] == once["all-reduce"]


def test_no_sync_communicates_nothing_where_parameters_are_replicated() -> None:
    def body(rank: int, stage: int) -> int:
        model, optimizer = sharded(net(), decayed, stage=stage)
        accumulate(model, optimizer, shares(batches(2), rank, 2), 1)
        net_loss(model, ONE_BATCH)  # the parameters of the step have arrived
        counters = model._zeroshard.engine.comm.counters
        before = {kind: counted.count for kind, counted in counters.current_step.items()}
        with zeroshard.no_sync(model):
            token_step(model, ONE_BATCH)
        after = {kind: counted.count for kind, counted in counters.current_step.items()}
        return sum(after.values()) - sum(before.values())

    for stage in (0, 1, 2):
        assert run_threads(2, partial(body, stage=stage)) == [0, 0]


def test_no_sync_ends_with_its_block_even_by_an_exception() -> None:
    model, optimizer = zeroshard.shard(copy.deepcopy(net()))
    assert optimizer is None
    with pytest.raises(KeyError), zeroshard.no_sync(model):
        raise KeyError
    assert model._zeroshard.engine.executor.needs_grad_sync
    with pytest.raises(ValueError, match="not a sharded model"), zeroshard.no_sync(nn.Linear(1, 1)):
        pass
