"""Gradients' memory comes and goes: see [Note: freeing gradients between steps]."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from live import live_bytes, live_bytes_at_start
from one_pass import in_one_pass
from pairs import at_stages
from plain import (
    ONE_BATCH,
    Tensors,
    adamw,
    assert_close,
    assert_equal,
    assert_same_training,
    batches,
    full_parameters,
    net_loss,
    of,
    run_plain,
    sgd,
    sharded,
    split,
    token_step,
    train_step,
    train_steps,
)
from ranks import run_processes, run_threads
from rules import Rule
from torch import nn
from zoo import InOrder, make_net

import zeroshard
from zeroshard.engine.flat_grad import assign_segments

NET = make_net()  # here: threads would draw from one generator
MODES = [(0, 1), (3, 1), *((stage, world) for world in (2, 3) for stage in (0, 1, 2, 3))]


def held(model: nn.Module) -> int:
    memory = zeroshard.report(model).memory
    return memory["gradients", "device"].now if ("gradients", "device") in memory else 0


def shard(stage: int) -> tuple[Any, Any]:
    return sharded(NET, adamw, stage=stage, bucket_size=64)


def assert_trains(loop: Any, world: int, stage: int) -> None:
    """A loop that treats gradients in its own way trains as the plain loop does."""
    options = {"plain_loop": train_steps, "stages": [stage], "bucket_size": 64}
    assert_same_training(world, NET, adamw, batches(3), loop, **options)


# ------------------------------------------------------------------------------------------------ given back


@pytest.mark.parametrize(("stage", "world"), MODES)
def test_zero_grad_gives_the_memory_back_and_backward_takes_it_again(stage: int, world: int) -> None:
    def body(rank: int) -> tuple[list[int], Tensors]:
        model, optimizer = shard(stage)
        found = []
        for batch in batches(4):
            token_step(model, split(batch, rank, world))
            found.append(held(model))
            optimizer.step()
            optimizer.zero_grad()
            found.append(held(model))
        return found, full_parameters(model)

    wanted = run_plain(NET, adamw, batches(4))
    least = 4 * sum(parameter.numel() for parameter in wanted.values()) // (world if stage > 1 else 1)
    for found, parameters in run_threads(world, body):
        assert all(now >= least for now in found[::2])
        assert found[1::2] == [0] * 4
        assert_close(parameters, wanted)


def taken(model: nn.Module) -> list[int]:
    """What gradients take in a backward, after each time that it becomes more."""
    with zeroshard.profile(model) as profile:
        model(torch.ones(1, 16)).sum().backward()
    found = [moment.held.get("gradients", 0) for moment in profile.moments]
    return [after for before, after in pairwise(found) if after > before]


def layers(stage: int, number: int = 16) -> tuple[Any, Any]:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(number)])
    return zeroshard.shard(model, sgd(model), stage=stage)


@pytest.mark.parametrize(("stage", "world", "pieces"), [(3, 1, 16), (1, 2, 16), (2, 2, 8), (2, 4, 4)])
def test_gradients_take_it_piece_by_piece(stage: int, world: int, pieces: int) -> None:
    """From the end of the model: the gradients of its first layers take none while most activations are there."""

    def body(rank: int) -> list[int]:
        model, optimizer = layers(stage)
        found = taken(model)
        optimizer.step()
        return found

    for found in run_threads(world, body):
        assert found == [number * found[-1] // pieces for number in range(1, pieces + 1)]


def test_a_piece_of_many_layers_is_at_most_as_large_as_one_layer_up_to_some_number_of_pieces() -> None:
    for layer, ranks, pieces in [(5, 64, 4), (24, 8, 4), (48, 8, 6), (96, 8, 12), (192, 8, 16), (3, 1, 3)]:
        assert len(set(assign_segments([7] * layer, shard_count=ranks))) == pieces


@at_stages(1, 3)
def test_whole_gradients_take_it_at_once_where_the_loss_has_left_room(stage: int) -> None:
    def body(rank: int) -> tuple[list[list[int]], list[torch.Tensor]]:
        model, optimizer = layers(stage, number=5)
        memory = model._zeroshard.engine.gradients.memory
        found, values = [], []
        for loss in (10**6, 0, 0, 10**6, 10**6):  # bytes that it gives back
            allocated = [10**7] * 2 + [10**7 - loss]  # when forward ends, backward begins, and the first gradient comes
            memory._allocated_bytes = iter(allocated).__next__
            found.append(taken(model))
            values.append(zeroshard.full_gradient(model, "0.0.weight").clone())
            optimizer.zero_grad()
        return found, values

    for found, values in [body(0)] if stage == 3 else run_threads(2, body):
        whole = found[0][-1]
        piecewise = [number * whole // 5 for number in range(1, 6)]
        assert found == [[whole], piecewise, piecewise, [whole], [whole]]
        assert all(torch.equal(value, values[0]) for value in values[1:])


def test_a_backward_whose_gradients_get_no_memory_leaves_no_buffers() -> None:
    def body(rank: int) -> int:
        model, optimizer = shard(3)
        loss = net_loss(model, split(ONE_BATCH, rank, 2))
        memory = model._zeroshard.engine.gradients.memory
        memory.allocate = no_memory
        with pytest.raises(torch.OutOfMemoryError, match="made up"):
            loss.backward()
        del memory.allocate
        optimizer.zero_grad()
        assert zeroshard.report(model).memory["buckets", "device"].peak > 0
        return zeroshard.report(model).memory["buckets", "device"].now

    assert run_threads(2, body) == [0, 0]


def no_memory(gradient: object) -> None:
    raise torch.OutOfMemoryError("made up")


def freed_by_zero_grad(rank: int, stage: int) -> tuple[int, int]:
    model, optimizer = shard(stage)
    for batch in batches(2):
        optimizer.zero_grad()
        token_step(model, split(batch, rank, 2))
        optimizer.step()
    before = live_bytes_at_start()
    optimizer.zero_grad()
    return before - live_bytes(), zeroshard.report(model).memory["gradients", "device"].peak


@at_stages(1, 3)
def test_live_tensors_say_so_too(stage: int) -> None:
    for freed, most in run_processes(2, freed_by_zero_grad, stage, fresh=True):
        assert 0 < most <= freed < most + 256  # gloo's threads let go of a few bytes of their own now and then


@pytest.mark.parametrize("world", [1, 2])
@at_stages(0, 3)
def test_gradients_cleared_one_by_one(stage: int, world: int) -> None:
    """On one rank that gives their memory back, too. Of several, each knows only which gradients it has made itself."""

    def body(rank: int) -> tuple[int, int, Tensors]:
        model, optimizer = shard(stage)
        parameters = list(model.parameters())

        def clear() -> None:
            for parameter in parameters:
                parameter.grad = None

        token_step(model, split(ONE_BATCH, rank, world))
        optimizer.clip_grad_norm_(1.0)
        before = held(model)
        clear()
        after = held(model)
        for batch in batches(2):
            token_step(model, split(batch, rank, world))
            optimizer.step()
            clear()
        return before, after, full_parameters(model)

    for before, after, parameters in run_threads(world, body):
        assert after == (0 if world == 1 else before)
        assert_close(parameters, run_plain(NET, adamw, batches(2)))


def test_a_clip_is_forgotten_with_the_gradients_cleared_one_by_one() -> None:
    """A step in one pass leaves it to be made good later: there is nothing to make good any more."""
    wanted = None
    for one_by_one in (False, True):
        with in_one_pass():
            model, optimizer = sharded(NET, partial(adamw, fused=True), precision="bf16")
            for batch in batches(3):
                token_step(model, batch)
                optimizer.clip_grad_norm_(0.1)
                optimizer.step()
                for parameter in model.parameters() if one_by_one else ():
                    parameter.grad = None
                if not one_by_one:
                    optimizer.zero_grad()
            assert held(model) == 0
        found = full_parameters(model)
        assert_equal(found, wanted or found)
        wanted = found


@pytest.mark.parametrize("stage", [0, 1, 2])  # in stage 3 all ranks run the same units
def test_what_another_rank_has_made_stays_when_ones_own_is_cleared(stage: int) -> None:
    """Each rank uses another layer, and both clear the first one's gradient."""
    net = InOrder(nn.Linear(8, 8) for _ in range(2))

    def body(rank: int) -> list[Tensors]:
        model: Any = copy.deepcopy(net)
        model, optimizer = zeroshard.shard(model, sgd(model), stage=stage)
        found = []
        for _ in range(2):
            model(torch.ones(1, 8), (rank,)).sum().backward()
            optimizer.clip_grad_norm_(1e9)
            for parameter in model.blocks[0].parameters():
                parameter.grad = None
            optimizer.step()
            found.append(full_parameters(model))
            for parameter in model.parameters():  # as model.zero_grad() does: of each that has one
                if stage or parameter.grad is not None:
                    parameter.grad = None
        return found

    first, second = run_threads(2, body)
    for ours, theirs in zip(first, second, strict=True):
        assert_equal(ours, theirs)
    moved = [not torch.equal(first[-1][name], value) for name, value in net.named_parameters()]
    assert moved == [False, False, True, True]
    distance = net.blocks[1].weight - first[-1]["blocks.1.weight"]
    torch.testing.assert_close(distance, torch.full_like(distance, 2 * 0.1 * 0.5))


def test_what_no_sync_has_summed_is_given_back_and_counted_once() -> None:
    def body(rank: int) -> list[int]:
        model, optimizer = shard(2)
        optimizer.inner.register_step_post_hook(lambda *_: None)  # it is shown the gradients
        found = []
        for batch in batches(3):
            token_step(model, split(batch, rank, 2))
            optimizer.step()
            with zeroshard.no_sync(model):
                token_step(model, split(batch, rank, 2))
            optimizer.zero_grad()
            found.append(held(model))
        return found

    for found in run_threads(2, body):
        assert found[0] == found[1] == found[2]


# ------------------------------------------------------------------------------------------------ kept


@pytest.mark.parametrize(("stage", "world"), MODES)
def test_gradients_that_are_there_when_a_forward_begins_keep_their_memory(stage: int, world: int) -> None:
    """Two backwards make a step: at the second one's loss they are there anyway."""

    def loop(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
        found = []
        for first, second in zip(data[::2], data[1::2], strict=True):
            token_step(model, first)
            train_step(model, optimizer, second)
            found.append(held(model) if zeroshard.is_sharded(model) else 1)
        assert found[0] > 0
        assert len(set(found)) == 1

    assert_same_training(world, NET, adamw, batches(6), loop, stages=[stage], bucket_size=64)


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (0, 2), (2, 2), (3, 2)])
def test_gradients_made_zero_are_added_to(stage: int, world: int) -> None:
    def loop(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
        optimizer.zero_grad(set_to_none=False)  # there are none
        for batch in data:
            token_step(model, batch)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    assert_trains(loop, world, stage)


# ------------------------------------------------------------------------------------------------ in other hands


@at_stages(0, 3)
def test_a_gradient_that_somebody_holds_is_theirs(stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = shard(stage)
        other = copy.deepcopy(NET)
        plainly = adamw(other)
        for first in (True, False):
            for one, its in ((model, optimizer), (other, plainly)):
                token_step(one, batches(2)[0 if first else 1])
                if first:
                    kept = {name: parameter.grad for name, parameter in one.named_parameters()}
                    copies = {name: gradient.clone() for name, gradient in kept.items()}
                its.zero_grad()
                if first:
                    assert held(model) == 0
                    one.kept, one.copies = kept, copies
        for one in (model, other):  # a backward has come since
            assert_equal(one.kept, one.copies)

    run_threads(1, body)


class Remembering(Rule):
    """Also uses the gradient before, and keeps no copy of it."""

    def update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        before = self.state[p].get("before")
        self.state[p]["before"] = grad
        return grad if before is None else grad + 0.5 * before


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 2), (3, 2)])
def test_an_optimizer_may_keep_the_gradients_it_was_given(stage: int, world: int) -> None:
    assert_same_training(world, NET, of(Remembering), batches(4), stages=[stage], bucket_size=64)


# ------------------------------------------------------------------------------------------------ left in the middle


class Fails(torch.autograd.Function):
    """Raises in backward, when told to."""

    on = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if Fails.on:
            raise ValueError("on purpose")
        return gradient


def left_in_the_middle(rank: int, stage: int, world: int, away: bool) -> Tensors:
    model, optimizer = shard(stage)
    model.blocks[0].register_forward_hook(lambda module, inputs, output: Fails.apply(output))
    for number, batch in enumerate(batches(4)):
        Fails.on = number in (0, 2)
        try:
            token_step(model, split(batch, rank, world))
            optimizer.step()
        except ValueError:
            if away:
                zeroshard.offload_states(model)
                with torch.no_grad(), pytest.raises(RuntimeError, match="reload_states"):
                    net_loss(model, batch)  # the pass that was left is not gone on with, either
                zeroshard.reload_states(model)
        optimizer.zero_grad()
    return full_parameters(model)


@pytest.mark.parametrize(
    ("stage", "world", "away"), [(0, 1, False), (1, 2, True), (2, 2, False), (3, 2, True), (3, 3, False)]
)
def test_a_backward_that_was_left_leaves_nothing_that_writes(stage: int, world: int, away: bool) -> None:
    """Its reductions may be under way when zero_grad(), or offload_states(), takes the memory away."""
    for parameters in run_processes(world, left_in_the_middle, stage, world, away):
        assert_close(parameters, run_plain(NET, adamw, batches(4)[1::2]))


@at_stages(0, 2, 3)
def test_no_gradient_is_cleared_and_no_forward_begun_while_states_are_away(stage: int) -> None:
    def loop(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
        for batch in data:
            token_step(model, batch)
            zeroshard.offload_states(model)
            for use in (
                optimizer.zero_grad,
                lambda: setattr(next(iter(model.parameters())), "grad", None),
                lambda b=batch: net_loss(model, b),
            ):
                with pytest.raises(RuntimeError, match="reload_states"):
                    use()
            assert held(model) == 0
            zeroshard.reload_states(model)
            optimizer.step()
            optimizer.zero_grad()
            zeroshard.offload_states(model)
            optimizer.zero_grad()  # there are none
            zeroshard.reload_states(model)

    assert_trains(loop, 2, stage)


@pytest.mark.parametrize("there", [False, True])
def test_states_go_away_and_come_back_with_and_without_gradients(there: bool) -> None:
    def loop(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
        for batch in data:
            token_step(model, batch)
            if there:
                zeroshard.offload_states(model)
                zeroshard.reload_states(model)
            optimizer.step()
            optimizer.zero_grad()
            if not there:
                zeroshard.offload_states(model)
                zeroshard.reload_states(model)
        assert held(model) == 0

    assert_trains(loop, 2, 2)
