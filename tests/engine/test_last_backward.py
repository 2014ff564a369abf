"""Stages 0 and 1 reduce gradients inside the last backward of a step: see [Note: reducing in the last backward]."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pairs import at_stages, pairwise
from plain import adamw, assert_close, assert_equal, copied, full_parameters, mesh_of, sharded, square_loss, take_step
from ranks import run_processes, run_threads, seeded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from zoo import InOrder, Mlp, built

import zeroshard
from zeroshard.engine.last_backward import HOLD_OFF_STEPS, LastBackward

every_stage = pytest.mark.parametrize("stage", [0, 1])
BLOCKS = 4
Grads = dict[str, torch.Tensor | None]


class Block(Mlp):
    """A residual block that calls ``on_grad`` when a gradient arrives at its output."""

    def __init__(self) -> None:
        super().__init__(6, 9)
        self.on_grad: Callable[[torch.Tensor], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.on_grad is not None and x.requires_grad:
            x.register_hook(self.on_grad)
        return x


class Stack(InOrder):
    """Blocks, run in another order than they are defined in."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        super().__init__((Block() for _ in range(BLOCKS)), order)


STACK = built(Stack)
fine_adamw = partial(adamw, lr=0.05)


def shard(stage: int, model: nn.Module = STACK, mesh: Any = None, **options: Any) -> tuple[Any, Any]:
    return sharded(model, fine_adamw, mesh=mesh, stage=stage, **{"units": (Block,), **options})


def batch_of(step: int, number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
    return torch.randn(3, 6, generator=generator)


class Reductions:
    """Counts the reductions of this rank's gradients, and notes how many a backward has started at each block."""

    def __init__(self, model: Any) -> None:
        self._counters = model._zeroshard.engine.comm.counters
        self.at_blocks: list[int] = []
        for block in model.blocks:
            block.on_grad = self._on_grad

    @property
    def count(self) -> int:
        kinds = self._counters.total
        large = [kinds[kind].count for kind in ("reduce-scatter", "all-reduce", "activation gather") if kind in kinds]
        return sum(large)

    def _on_grad(self, gradient: torch.Tensor) -> None:
        self.at_blocks.append(self.count)

    def backward(self, loss: torch.Tensor) -> list[int]:
        """Run a backward; return the reductions when it reached each block, and at its end."""
        before, self.at_blocks = self.count, []
        loss.backward()
        return [number - before for number in (*self.at_blocks, self.count)]


def count_in_backwards(
    rank: int, stage: int, plan: list[int], options: dict[str, Any], silent: bool = False
) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """Train; return what Reductions.backward() found in each backward, and the parameters."""
    model, optimizer = shard(stage, **options)
    reductions, found = Reductions(model), []
    for step, backwards in enumerate(plan):
        for number in range(backwards):
            with zeroshard.no_sync(model) if silent and number < backwards - 1 else nullcontext():
                found.append(reductions.backward(square_loss(model, batch_of(step, number, rank))))
        optimizer.step()
        optimizer.zero_grad()
    return found, full_parameters(model)


def plainly(plan: list[int], world: int) -> dict[str, torch.Tensor]:
    """The same training by one plain process."""
    model = copy.deepcopy(STACK)
    optimizer = fine_adamw(model)
    for step, backwards in enumerate(plan):
        for number in range(backwards):
            sum(square_loss(model, batch_of(step, number, rank)) / world for rank in range(world)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return copied(model)


NONE, ALL = [0] * (BLOCKS + 1), [0, 1, 2, 3, 4]  # when backward reaches a block, those after it are done


# ------------------------------------------------------------------------------------------------ inside backward


@pytest.mark.guarantee("Reduced early")
@pytest.mark.parametrize("run", [run_threads, run_processes])
@every_stage
def test_each_unit_is_reduced_when_it_is_done_once_two_steps_were_alike(stage: int, run: Any) -> None:
    for plan, wanted in (
        ([1, 1, 1, 1], [NONE, NONE, ALL, ALL]),
        ([2, 2, 2], [NONE, NONE, NONE, NONE, NONE, ALL]),
        ([1, 2, 1, 1, 1], [NONE, NONE, NONE, NONE, NONE, ALL]),
    ):
        parameters = plainly(plan, 2)
        for found, result in run(2, count_in_backwards, stage, plan, {}):
            assert found == wanted
            assert_close(result, parameters)


@every_stage
def test_the_number_can_be_said(stage: int) -> None:
    for backwards, plan, wanted in (
        (1, [1, 1], [ALL, ALL]),
        (2, [2, 2], [NONE, ALL, NONE, ALL]),
        (0, [1, 1, 1, 1], [NONE] * 4),
        (2, [1, 1, 1, 1], [NONE] * 4),
    ):
        for found, result in run_threads(2, count_in_backwards, stage, plan, {"backwards": backwards}):
            assert found == wanted
            assert_close(result, plainly(plan, 2))


@every_stage
def test_backwards_inside_no_sync_reduce_nothing_and_the_one_after_them_is_the_last(stage: int) -> None:
    plan = [3, 2, 4, 1]  # other numbers, but each with one backward outside
    wanted = [NONE] * (3 + 2) + [NONE] * 3 + [ALL] + [ALL]
    for found, result in run_threads(2, count_in_backwards, stage, plan, {}, True):
        assert found == wanted
        assert_close(result, plainly(plan, 2))


@every_stage
def test_units_are_reduced_in_the_order_in_which_backward_finishes_them(stage: int) -> None:
    model = built(lambda: Stack((2, 0, 3, 1)), seed=1)

    def body(rank: int) -> list[list[int]]:
        ours, optimizer = shard(stage, model)
        reductions, found = Reductions(ours), []
        for step in range(3):
            found.append(reductions.backward(square_loss(ours, batch_of(step, 0, rank))))
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert run_threads(2, body) == [[NONE, NONE, ALL]] * 2


def test_one_rank_alone_has_nothing_to_reduce() -> None:
    for stage in (0, 1):
        assert count_in_backwards(0, stage, [1] * 4, {})[0] == [NONE] * 4


# ----------------------------------------------------------------------------------------------------- same numbers


OPTIONS = [
    {},
    {"bucket_size": 20},
    {"bucket_size": 20, "ring": 1},
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"offload": "host"},
    {"reduce_dtype": "fp32", "precision": "bf16"},
]


def train(rank: int, world: int, stage: int, options: dict[str, Any], mesh: tuple[int, int] | None = None) -> Any:
    """Train with each number of backwards; clip, read gradients, keep them, and leave out parameters on some ranks."""
    shape = None if mesh is None else mesh_of(mesh)
    model, optimizer = shard(stage, mesh=shape, **options)
    norms, reads = [], []
    for step, backwards in enumerate([3, 3, 3, 2, 2, 2, 1, 1, 1, 1]):
        for number in range(backwards):
            rows = 1 + (rank + step) % 3  # ranks have batches of different sizes
            optimizer.scale(square_loss(model, batch_of(step, number, rank)[:rows])).backward()
        if step % 3 == 2:
            norms.append(optimizer.clip_grad_norm_(0.5))
        if step % 4 == 3:
            reads.append(zeroshard.full_gradient(model, "blocks.1.up.weight").clone())
        optimizer.step()
        if step % 5 != 4:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    return full_parameters(model), norms, reads


@pytest.mark.guarantee("Reduced early")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@every_stage
def test_the_numbers_are_those_of_reducing_in_the_step(stage: int, options: dict[str, Any]) -> None:
    wanted = run_threads(2, train, 2, stage, {**options, "backwards": 0})
    found = run_threads(2, train, 2, stage, options)
    for (parameters, norms, reads), (ours, our_norms, our_reads) in zip(wanted, found, strict=True):
        assert_equal(ours, parameters)
        assert all(map(torch.equal, norms, our_norms)) and all(map(torch.equal, reads, our_reads))


@every_stage
def test_the_numbers_over_gloo_and_on_a_mesh_of_replicas(stage: int) -> None:
    for world, mesh in ((2, None), (3, None), (4, (2, 2))):
        wanted = run_processes(world, train, world, stage, {"backwards": 0}, mesh)
        for (parameters, *_), (ours, *_) in zip(
            wanted, run_processes(world, train, world, stage, {}, mesh), strict=True
        ):
            assert_equal(ours, parameters)


@every_stage
def test_memory_is_that_of_reducing_in_the_step(stage: int) -> None:
    def body(rank: int, backwards: int | None) -> dict[Any, int]:
        model, optimizer = shard(stage, bucket_size=40, backwards=backwards)
        for step in range(4):
            take_step(optimizer, square_loss(model, batch_of(step, 0, rank)))
        return {kind: held.peak for kind, held in zeroshard.report(model).memory.items()}

    assert run_threads(2, body, None) == run_threads(2, body, 0)


# ------------------------------------------------------------------------------------------------- wrong predictions


@every_stage
def test_more_and_fewer_backwards_than_predicted_train_as_plain_pytorch(stage: int) -> None:
    plan = [1, 1, 3, 1, 1, 1]
    parameters = plainly(plan, 2)
    for found, result in run_threads(2, count_in_backwards, stage, plan, {}):
        assert found == [NONE, NONE, ALL, *[NONE] * 5]  # once wrong, it waits longer
        assert_close(result, parameters)
    for said, plan in ((2, [3, 1, 2, 4]), (1, [2, 2])):
        for _, result in run_threads(2, count_in_backwards, stage, plan, {"backwards": said}):
            assert_close(result, plainly(plan, 2))


def predictions(steps: list[int], prediction: LastBackward) -> list[int]:
    """Return after how many backwards of each step a step is predicted; 0: not at all."""
    found = []
    for backwards in steps:
        predicted = [prediction.on_backward(number, True) for number in range(1, backwards + 1)]
        found.append(predicted.index(True) + 1 if True in predicted else 0)
        prediction.on_step(optimizer=0, has_backwards=True)
    return found


def test_each_wrong_prediction_makes_the_next_wait_twice_as_long() -> None:
    prediction = LastBackward(None)
    assert predictions([2, 2, 2, 3], prediction) == [0, 0, 2, 2]
    again = predictions([2] * 30, prediction)
    assert again.index(2) == HOLD_OFF_STEPS - 1
    assert predictions([3], prediction) == [2]
    assert predictions([2] * 30, prediction).index(2) == 2 * HOLD_OFF_STEPS - 1


def test_a_backward_inside_no_sync_after_the_others_is_not_overlooked() -> None:
    prediction = LastBackward(None)
    for _ in range(4):
        assert not prediction.on_backward(1, True)
        assert not prediction.on_backward(2, False)
        prediction.on_step(optimizer=0, has_backwards=True)


# ------------------------------------------------------------------------------------------------------- habits


class Penalty(nn.Module):
    """A penalty on a weight, computed before the blocks run: its gradient arrives after its block is done."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = copy.deepcopy(STACK)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = self.stack.blocks[3].up.weight.square().sum()
        return self.stack(x).square().mean() + penalty


class Frozen(nn.Module):
    """A part that is not trained, and a block that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.unused = copy.deepcopy(STACK), Block()
        self.stack.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(x).square().mean()


def once(model: nn.Module, optimizer: Any, batches: Callable[[int], torch.Tensor]) -> None:
    model(batches(0)).backward()


def same_graph_twice(model: nn.Module, optimizer: Any, batches: Callable[[int], torch.Tensor]) -> None:
    loss = model(batches(0))
    loss.backward(retain_graph=True)
    loss.backward()


def gradient_of_gradient(model: nn.Module, optimizer: Any, batches: Callable[[int], torch.Tensor]) -> None:
    x = batches(0).requires_grad_()
    (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
    (model(x) + len(x) * slope.square().sum()).backward()


def zero_between(model: nn.Module, optimizer: Any, batches: Callable[[int], torch.Tensor]) -> None:
    model(batches(0)).backward()
    optimizer.zero_grad()
    model(batches(1)).backward()


def clear_one(model: nn.Module, optimizer: Any, batches: Callable[[int], torch.Tensor]) -> None:
    model(batches(0)).backward()
    next(p for name, p in model.named_parameters() if name.endswith("blocks.2.up.weight")).grad = None


def set_by_hand(model: nn.Module, optimizer: Any, batches: Callable[[int], torch.Tensor]) -> None:
    weight = next(p for name, p in model.named_parameters() if name.endswith("blocks.2.up.weight"))
    if "was_set" not in model.__dict__:  # later it would be a full gradient
        weight.grad, model.was_set = torch.full_like(weight, 0.1), True
    model(batches(0)).backward()


def several_parts(model: nn.Module, optimizer: Any, batches: Callable[[int], torch.Tensor]) -> None:
    blocks = model.stack.blocks
    x = blocks[0](batches(0))
    x.square().mean().backward()
    blocks[2](batches(1)).square().mean().backward()


def raising(model: nn.Module, optimizer: Any, batches: Callable[[int], torch.Tensor]) -> None:
    """A backward that raises after some blocks are done; then the whole one."""

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("made up")

    model.stack.blocks[1].on_grad = fail
    loss = model(batches(0))
    model.stack.blocks[1].on_grad = None
    with pytest.raises(KeyError, match="made up"):
        loss.backward()


def raising_then_backward(model: nn.Module, optimizer: Any, batches: Callable[[int], torch.Tensor]) -> None:
    raising(model, optimizer, batches)
    model(batches(1)).backward()


HABITS = (once, same_graph_twice, gradient_of_gradient, zero_between, clear_one, set_by_hand, several_parts, raising)


def follow(
    model: nn.Module, habit: Any, optimizer: torch.optim.Optimizer, ranks: list[int], keep: bool
) -> list[torch.Tensor]:
    """Train by a habit; a plain process stands for all ranks. Return what one gradient is before each step."""
    found = []
    for step in range(4):

        def batches(number: int, step: int = step) -> torch.Tensor:
            return torch.cat([batch_of(step, number, rank) for rank in ranks])

        habit(model, optimizer, batches)
        read = next(p for name, p in model.named_parameters() if name.endswith("blocks.3.up.weight")).grad
        found.append(torch.zeros(()) if read is None or step == 1 else read.clone())
        optimizer.step()
        if not keep:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    return found


@pytest.mark.guarantee("Reduced early")
@pytest.mark.parametrize(
    ("habit", "make", "backwards"), pairwise([*HABITS, raising_then_backward], [Penalty, Frozen], [None, 1])
)
def test_loops_train_as_in_plain_pytorch(habit: Any, make: type[nn.Module], backwards: int | None) -> None:
    with seeded(3):
        base = make()
    momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    for keep in (False, True) if habit is once else (False,):
        plain = copy.deepcopy(base)
        trained = [p for p in plain.parameters() if p.requires_grad]
        reads = follow(plain, habit, momentum(trained), [0, 1], keep)

        def body(rank: int, stage: int, keep: bool = keep) -> Any:
            model = copy.deepcopy(base)
            optimizer = momentum([p for p in model.parameters() if p.requires_grad])
            model, sharded = zeroshard.shard(model, optimizer, stage=stage, units=(Block,), backwards=backwards)
            return follow(model, habit, sharded, [rank], keep), full_parameters(model)

        for stage in (0, 1):
            for found, parameters in run_threads(2, body, stage):
                assert_close(parameters, dict(plain.named_parameters()), 1e-5)
                for read, wanted in zip(found, reads, strict=True):
                    torch.testing.assert_close(read, wanted, rtol=1e-4, atol=1e-6)


def assert_as_in_the_step(stage: int, steps: int, backward: Callable[[Any, int, int], None]) -> None:
    """Assert that steps after `backward(model, step, rank)` give the same weights, wherever they reduce."""

    def body(rank: int, backwards: int) -> dict[str, torch.Tensor]:
        model, optimizer = shard(stage, backwards=backwards)
        for step in range(steps):
            backward(model, step, rank)
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(model)

    for ours, wanted in zip(run_threads(2, body, 1), run_threads(2, body, 0), strict=True):
        assert_equal(ours, wanted)


@every_stage
def test_a_rank_without_gradients_of_a_unit_contributes_zeros(stage: int) -> None:
    def backward(model: Any, step: int, rank: int) -> None:
        model.order = (0, 1, 2, 3) if rank == 0 else (0, 3)
        square_loss(model, batch_of(step, 0, rank)).backward()

    assert_as_in_the_step(stage, 3, backward)


@every_stage
def test_recomputed_blocks_are_reduced_inside_backward(stage: int) -> None:
    def body(rank: int) -> list[list[int]]:
        model = copy.deepcopy(STACK)
        zeroshard.checkpoint_activations(model, blocks=(Block,))
        ours, optimizer = shard(stage, model)
        reductions, found = Reductions(ours), []
        for step in range(3):
            found.append(reductions.backward(square_loss(ours, batch_of(step, 0, rank)))[-1:])
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert run_threads(2, body) == [[[0], [0], [BLOCKS]]] * 2


def test_two_models_in_one_loss_are_reduced_in_one_backward() -> None:
    def body(rank: int) -> tuple[list[list[int]], list[dict[str, torch.Tensor]]]:
        pairs = [shard(stage) for stage in (0, 1)]
        found = []
        for step in range(4):
            counts = [Reductions(model).count for model, _ in pairs]
            first, second = pairs[0][0], pairs[1][0]
            square_loss(second, first(batch_of(step, 0, rank))).backward()
            found.append([Reductions(model).count - count for (model, _), count in zip(pairs, counts, strict=True)])
            for _, optimizer in pairs:
                optimizer.step()
                optimizer.zero_grad()
        return found, [full_parameters(model) for model, _ in pairs]

    (found, ours), (again, others) = run_threads(2, body)
    assert found == again == [[0, 0], [0, 0], [BLOCKS, BLOCKS], [BLOCKS, BLOCKS]]
    for mine, theirs in zip(ours, others, strict=True):
        assert_equal(mine, theirs)


# ------------------------------------------------------------------------------------------------ ranks that differ


@every_stage
def test_where_only_one_rank_reduces_inside_backward_the_other_reduces_in_the_step(stage: int) -> None:
    """Ranks use no_sync() differently: what they predict differs, what they sum does not."""

    def backward(model: Any, step: int, rank: int) -> None:
        with zeroshard.no_sync(model) if rank == step % 2 else nullcontext():
            square_loss(model, batch_of(step, 0, rank)).backward()

    assert_as_in_the_step(stage, 6, backward)


@every_stage
def test_where_a_backward_raises_on_one_rank_it_reduces_the_rest_in_the_step(stage: int) -> None:
    def backward(model: Any, step: int, rank: int) -> None:
        loss = square_loss(model, batch_of(step, 0, rank))
        if rank == 1 and step == 2:
            handle = model.blocks[1].up.weight.register_hook(fail)
            with pytest.raises(KeyError, match="made up"):
                loss.backward()
            handle.remove()
        else:
            loss.backward()

    assert_as_in_the_step(stage, 4, backward)


def fail(gradient: torch.Tensor) -> None:
    raise KeyError("made up")


@every_stage
def test_all_ranks_may_clear_a_gradient_that_only_one_has_got(stage: int) -> None:
    def body(rank: int) -> dict[str, torch.Tensor]:
        model, optimizer = shard(stage, backwards=1)
        for step in range(3):
            model.order = (0, 1, 2, 3) if rank == 0 else (0, 3)
            square_loss(model, batch_of(step, 0, rank)).backward()
            for _ in range(1 + rank):
                model.blocks[1].up.weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(model)

    first, second = run_threads(2, body)
    assert_equal(first, second)


def clear_alone(rank: int, stage: int, how: str) -> str:
    model, optimizer = shard(stage, backwards=1)
    for step in range(2):
        square_loss(model, batch_of(step, 0, rank)).backward()
        if rank == 1 and step == 1:
            if how == "parameter":
                model.blocks[0].up.weight.grad = None
            else:
                optimizer.zero_grad(set_to_none=how == "None")
        try:
            optimizer.step()
        except RuntimeError as error:
            return f"step {step}: {error}"
        optimizer.zero_grad()
    return "no error"


@pytest.mark.guarantee("Gradients cleared alone")
@pytest.mark.parametrize("how", ["None", "zero", "parameter"])
@every_stage
def test_a_rank_that_clears_reduced_gradients_alone_is_told(stage: int, how: str) -> None:
    for text in run_threads(2, clear_alone, stage, how):
        assert text.startswith("step 1: some ranks have cleared gradients between backward and step")


def clear_one_parameter_everywhere(rank: int, stage: int, backwards: int) -> dict[str, torch.Tensor]:
    model, optimizer = shard(stage, **({} if stage > 1 else {"backwards": backwards}))
    block = model.blocks[2]
    for step in range(3):
        model.order = (0, 1, 2, 3) if rank == 0 or step == 2 else (0, 1, 3)
        square_loss(model, batch_of(step, 0, rank)).backward()
        for parameter in [block.up.weight, block.up.bias][:: 1 if rank == 0 else -1]:
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


@at_stages(0, 1, 2)
def test_all_ranks_may_clear_a_gradient_whatever_order_they_clear_in_and_whether_they_have_it(stage: int) -> None:
    wanted = run_threads(2, clear_one_parameter_everywhere, 1, 0)
    for ours, theirs in zip(run_threads(2, clear_one_parameter_everywhere, stage, 1), wanted, strict=True):
        assert_close(ours, theirs)


@every_stage
def test_a_gradient_that_ranks_clear_after_different_reductions_is_an_error(stage: int) -> None:
    def body(rank: int) -> str:
        model, optimizer = shard(stage, backwards=1)
        for number in range(2):
            square_loss(model, batch_of(0, number, rank)).backward()
            optimizer.clip_grad_norm_(1.0)  # reduces what is left
            if number == rank:
                model.blocks[2].up.weight.grad = None
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        return "no error"

    for text in run_threads(2, body):
        assert text.startswith("some ranks have cleared gradients between backward and step")


def skip_together(rank: int, stage: int, backwards: int) -> dict[str, torch.Tensor]:
    """If a backward raises on one rank, all ranks agree to leave out the step."""
    model, optimizer = shard(stage, backwards=backwards, timeout=10)
    for step in range(4):
        loss, failed = square_loss(model, batch_of(step, 0, rank)), torch.zeros(1)
        handle = model.blocks[(3, 1)[step % 2]].up.weight.register_hook(fail) if rank == 1 and step in (1, 2) else None
        try:
            loss.backward()
        except KeyError:
            failed += 1
        if handle is not None:
            handle.remove()
        dist.all_reduce(failed)
        if not failed:
            optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


@every_stage
def test_where_a_backward_raises_on_one_rank_all_can_agree_to_leave_out_the_step(stage: int) -> None:
    wanted = run_threads(2, skip_together, stage, 0)
    for ours, theirs in zip(run_threads(2, skip_together, stage, 1), wanted, strict=True):
        assert_equal(ours, theirs)


class AverageGrads(torch.autograd.Function):
    """Averages gradients over the ranks of a group inside backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient / 2, None


class Averaged(Stack):
    """Blocks, with a collective of the user's between the first and the next in backward."""

    group: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
            if index == 0:
                x = AverageGrads.apply(x, self.group)
        return x


def use_own_collectives(rank: int, stage: int, groups: str) -> dict[str, torch.Tensor]:
    """Train with collectives of the user's over the group that the model is sharded on: the default one, or another."""
    mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu") if groups == "mesh" else None
    with seeded(4):
        model, optimizer = shard(stage, Averaged(), mesh=mesh)
    model.group = dist.group.WORLD if mesh is None else mesh.get_group()
    for step in range(5):
        model.order = (0, 1, 2, 3) if rank == 0 or step < 3 else (0, 3)
        rows = torch.randn(21, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        take_step(optimizer, square_loss(model, rows))
    return full_parameters(model)


@pytest.mark.guarantee("Several models in one loss")
def test_reductions_are_not_mixed_up_with_collectives_of_the_user_inside_backward() -> None:
    """Ranks that use other units reduce these sooner or later than the user's collective."""
    kinds = [(stage, groups) for groups in ("default", "mesh") for stage in (0, 1)]
    first, *others = [result for kind in kinds for result in run_processes(2, use_own_collectives, *kind)]
    for result in others:
        assert_close(result, first)


class PartlyUsed(Stack):
    """Blocks, whose first one may have no gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = self.blocks
        y = first(x)
        x = y if 0 in self.order else x
        for block in rest:
            x = block(x)
        return x


def train_in_one_loss(rank: int, stage: int, models: int) -> list[torch.Tensor]:
    """Train two stacks behind each other, sharded as two models or as one; ranks use other blocks of the second."""
    with seeded(5):
        stacks = PartlyUsed(), PartlyUsed()
    parts = [nn.Sequential(*stacks)] if models == 1 else [nn.Sequential(stack) for stack in stacks]
    pairs = [shard(stage, part, bucket_size=8) for part in parts]
    for step in range(5):
        pairs[-1][0][-1].order = (0,) if rank == 0 or step < 3 else ()
        output = batch_of(step, 0, rank)
        for model, _ in pairs:
            output = model(output)
        output.square().mean().backward()
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    return [value for model, _ in pairs for value in full_parameters(model).values()]


@pytest.mark.guarantee("Several models in one loss")
@pytest.mark.parametrize("stage", range(4))
def test_reductions_of_two_models_in_one_loss_are_not_mixed_up(stage: int) -> None:
    """A rank that has no gradient of a unit reduces it after the other model's units."""
    wanted = run_processes(2, train_in_one_loss, stage, 1)[0]
    for found in run_processes(2, train_in_one_loss, stage, 2):
        torch.testing.assert_close(found, wanted)


@every_stage
def test_a_rank_with_another_number_of_backwards_is_named(stage: int) -> None:
    for numbers in ((1, 2), (2, 1)):
        for text in run_processes(2, uneven, stage, numbers):
            assert "RanksDisagreeError" in text and f"after {numbers[1]} backwards" in text


def uneven(rank: int, stage: int, numbers: tuple[int, int]) -> str:
    model, optimizer = shard(stage, timeout=20)
    try:
        for step in range(4):
            for number in range(numbers[0] if step < 3 or rank == 0 else numbers[1]):
                square_loss(model, batch_of(step, number, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except zeroshard.RanksDisagreeError as error:
        return f"RanksDisagreeError: {error}"
    return "no error"
