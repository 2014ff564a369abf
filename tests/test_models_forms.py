"""Ways of writing a model or a loop: modules run twice, unused parameters, branches, outputs, losses, recomputation."""

from __future__ import annotations

import copy
import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_plain import adamw, assert_same, built, numbers, part, sgd, tokens, train_rank
from plain import Block, Net, assert_close, full_parameters
from ranks import RanksFailed, run_processes, run_threads
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import zeroshard

VOCABULARY = 11  # of plain.Net


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, ids)
    loss.backward()
    return loss


# ------------------------------------------------------------------------------------- modules that run more than once


class Repeated(Net):
    """Runs its blocks in an order with repetitions, next to each other and apart."""

    order = (0, 0, 1, 2, 0, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x) * self.temperature + self.nothing.sum()


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (2, 2), (3, 2), (3, 3)])
def test_modules_called_more_than_once_in_a_forward(stage: int, world: int) -> None:
    assert_same(built(Repeated), step, tokens(3, VOCABULARY), stage=stage, world=world)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_registered_under_two_names(stage: int) -> None:
    def make() -> nn.Module:
        model = Net()
        model.blocks.append(model.blocks[0])
        model.again = model.blocks[1]
        model.blocks.append(model.again)
        return model

    assert_same(built(make), step, tokens(2, VOCABULARY), stage=stage)


class Borrowing(Net):
    """Uses a parameter of one module in another's place: the embedding as a second head, a norm of a block."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        x = F.layer_norm(x, x.shape[-1:], self.blocks[0].norm.weight)
        return self.head(x) + x @ self.embedding.weight.T + self.temperature


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_used_outside_their_module(stage: int) -> None:
    assert_same(built(Borrowing), step, tokens(3, VOCABULARY), stage=stage)


# --------------------------------------------------------------------------------------- unused parameters and branches


class Branching(Net):
    """Runs a side block when a flag in its batch says so, and uses what it gives when another flag says so."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.side = nn.ModuleList([Block(7), Block(7)])
        self.never = nn.Linear(7, 7)
        self.blocks[0].spare = nn.Parameter(torch.ones(5))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.embedding(batch["ids"])
        for block, side in zip(self.blocks, self.side, strict=True):
            if batch["run"].any():
                y = side(x)
                x = x + y if batch["use"].any() else x
            x = block(x)
        return self.head(x) * self.temperature + self.nothing.sum()


def branching_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = F.cross_entropy(model(batch).flatten(0, 1), batch["ids"].flatten())
    loss.backward()
    return loss


def branching_batches(run: list[list[int]], use: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """Batches with each rank's flags at each step."""
    ids = tokens(len(run), VOCABULARY)
    flags = zip(ids, run, use, strict=True)
    return [{"ids": i, "run": torch.tensor(r).bool(), "use": torch.tensor(u).bool()} for i, r, u in flags]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_a_branch_that_changes_from_step_to_step(make_optimizer: Any, stage: int) -> None:
    """The plain optimizer skips what got no gradient: no decay, no momentum, no step counted. So does ours."""
    on_off = [[1, 1], [0, 0], [1, 1], [0, 0], [1, 1]]
    batches = branching_batches(run=on_off, use=[[1, 1]] * 5)
    assert_same(built(Branching), branching_step, batches, stage=stage, make_optimizer=make_optimizer, whole=False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_unused_everywhere_keep_their_values_and_have_no_state(stage: int) -> None:
    model = built(Branching)
    batches = branching_batches(run=[[1, 1]] * 2, use=[[0, 0]] * 2)

    def body(rank: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor | None], list[dict[str, Any]]]:
        mine = copy.deepcopy(model)
        mine, optimizer = zeroshard.shard(mine, adamw(mine), stage=stage, timeout=20)
        unused = [n for n, _ in mine.named_parameters() if n.startswith(("side", "never")) or n.endswith("spare")]
        for batch in batches:
            optimizer.zero_grad()
            branching_step(mine, part(batch, rank, 2))
            optimizer.step()
        gradients = [zeroshard.full_gradient(mine, name) for name in unused]
        states = [zeroshard.full_state(optimizer, name) for name in unused]
        return {n: p for n, p in full_parameters(mine).items() if n in unused}, gradients, states

    before = {name: p.detach() for name, p in model.named_parameters()}
    for parameters, gradients, states in run_threads(2, body):
        assert len(parameters) == 2 * 5 + 2 + 1
        assert_close(parameters, {name: before[name] for name in parameters}, 0.0)
        assert all(gradient is None for gradient in gradients)
        assert not any(states)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_outputs_used_on_one_rank_only_are_averaged_over_all(stage: int, world: int) -> None:
    """The side blocks run on all ranks; each step another rank's loss depends on them."""
    use = [[int(rank == step % world) for rank in range(world)] for step in range(3)]
    batches = branching_batches(run=[[1] * world] * 3, use=use)
    assert_same(built(Branching), branching_step, batches, stage=stage, world=world, whole=False, make_optimizer=adamw)


class Inside(Net):
    """The branch is inside a block, which is a unit as a whole."""

    class Branch(Block):
        def __init__(self) -> None:
            super().__init__(7)
            self.side = nn.Linear(7, 7)

        def forward(self, x: torch.Tensor, run: torch.Tensor | bool = True) -> torch.Tensor:
            return super().forward(x + self.side(x) if run else x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Branch() for _ in range(3))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.embedding(batch["ids"])
        for block in self.blocks:
            x = block(x, batch["run"].any())
        return self.head(x) * self.temperature + self.nothing.sum()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_branches_inside_a_unit_may_differ_from_rank_to_rank(stage: int) -> None:
    run = [[1, 0], [0, 1], [1, 1], [0, 0]]
    batches = branching_batches(run=run, use=run)
    assert_same(built(Inside), branching_step, batches, stage=stage, whole=False, make_optimizer=adamw)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_branches_around_a_unit_may_differ_from_rank_to_rank_while_parameters_are_whole(stage: int) -> None:
    run = [[1, 0], [0, 1], [1, 1], [0, 0]]
    batches = branching_batches(run=run, use=[[1, 1]] * 4)
    assert_same(built(Branching), branching_step, batches, stage=stage, whole=False, make_optimizer=adamw)


def test_branches_around_a_partitioned_unit_that_differ_from_rank_to_rank_are_an_error_that_names_it() -> None:
    batches = branching_batches(run=[[1, 1], [1, 0]], use=[[1, 1]] * 2)
    options = {"stage": 3, "timeout": 1}
    with pytest.raises(RanksFailed, match=r"(?s)RanksDisagreeError.*unit 'side\.0'"):
        run_threads(2, train_rank, 2, built(Branching), branching_step, batches, sgd, options)


# -------------------------------------------------------------------------------------------------------------- outputs


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    extra: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor


Named = namedtuple("Named", "x extra")


class Plain:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


SHAPES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (lambda x: {"x": x, "none": None}, lambda out: out["x"]),
    "tuple": (lambda x: (None, x, 3), lambda out: out[1]),
    "list in dict in tuple": (lambda x: ("a", {"b": [x]}), lambda out: out[1]["b"][0]),
    "named tuple": (lambda x: Named(x, None), lambda out: out.x),
    "dataclass": (Record, lambda out: out.x),
    "dataclass in dataclass": (lambda x: Record(x.detach(), Record(x)), lambda out: out.extra.x),
    "slotted dataclass": (Slotted, lambda out: out.x),
    "object": (Plain, lambda out: out.x),
}


class Wrapping(Net):
    """Its blocks, and it itself, give their outputs wrapped up."""

    class Wrapped(Block):
        def __init__(self, shape: str) -> None:
            super().__init__(7)
            self.shape = shape

        def forward(self, x: Any) -> Any:
            wrap, unwrap = SHAPES[self.shape]
            return wrap(super().forward(unwrap(x)))

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape = shape
        self.blocks = nn.ModuleList(self.Wrapped(shape) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> Any:
        wrap, unwrap = SHAPES[self.shape]
        x = wrap(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        return wrap(self.head(unwrap(x)) * self.temperature)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_of_any_shape(shape: str, stage: int) -> None:
    def wrapped_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
        logits = SHAPES[shape][1](model(ids))
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        return loss

    assert_same(built(lambda: Wrapping(shape)), wrapped_step, tokens(2, VOCABULARY), stage=stage)


# --------------------------------------------------------------------------------------------------------------- losses


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(7, VOCABULARY)
        self.deep = Block(7)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(ids)
        for block in self.blocks[:2]:
            x = block(x)
        first = self.other(self.deep(x))
        return first, self.head(self.blocks[2](x)) * self.temperature


def several_forwards(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = sum(loss_of(model, (ids + shift) % VOCABULARY) for shift in range(3))
    loss.backward()
    return loss


def backwards_in_turn(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Two forwards, then their backwards, the first one first."""
    first, second = loss_of(model, ids), loss_of(model, ids.flip(1))
    first.backward()
    second.backward()
    return first + second


def backwards_in_reverse(model: Any, ids: torch.Tensor) -> torch.Tensor:
    first, second = loss_of(model, ids), loss_of(model, ids.flip(1))
    second.backward()
    first.backward()
    return first + second


def retained(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Two backwards through one graph."""
    loss = loss_of(model, ids)
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    return loss


def evaluation_between(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """A forward without gradients, and one whose gradients nobody asks for, between a forward and its backward."""
    loss = loss_of(model, ids)
    with torch.no_grad():
        loss_of(model, ids.flip(0))
    with torch.inference_mode():
        loss_of(model, ids.flip(0))
    loss_of(model, ids.flip(1))
    loss.backward()
    return loss


LOSSES = [several_forwards, backwards_in_turn, backwards_in_reverse, retained, evaluation_between]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [Net, Repeated])
@pytest.mark.parametrize("form", LOSSES)
def test_several_forwards_and_backwards_in_one_step(form: Any, kind: Any, stage: int) -> None:
    assert_same(built(kind), form, tokens(3, VOCABULARY), stage=stage)


def both_at_once(model: Any, ids: torch.Tensor) -> torch.Tensor:
    first, second = (F.cross_entropy(logits.flatten(0, 1), ids.flatten()) for logits in model(ids))
    (first + 2 * second).backward()
    return first + second


def one_after_the_other(model: Any, ids: torch.Tensor) -> torch.Tensor:
    first, second = (F.cross_entropy(logits.flatten(0, 1), ids.flatten()) for logits in model(ids))
    first.backward(retain_graph=True)
    (2 * second).backward()
    return first + second


def one_of_two(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The second head runs and gets no gradient."""
    first, second = (F.cross_entropy(logits.flatten(0, 1), ids.flatten()) for logits in model(ids))
    first.backward()
    return first + second


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("form", [both_at_once, one_after_the_other, one_of_two])
def test_one_forward_with_two_losses(form: Any, stage: int) -> None:
    assert_same(built(TwoHeads), form, tokens(3, VOCABULARY), stage=stage)


class SideLoss(Net):
    """Keeps a penalty as an attribute, from inside its blocks, and gives it back nowhere."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        self.penalty = x.new_zeros(())
        for block in self.blocks:
            x = block(x)
            self.penalty = self.penalty + (block.up(x)).square().mean()
        return self.head(x)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_kept_as_an_attribute(stage: int) -> None:
    def side_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, ids) + model.penalty
        loss.backward()
        return loss

    assert_same(built(SideLoss), side_step, tokens(2, VOCABULARY), stage=stage)


def numbers_unused() -> None:
    numbers(1, 1)
    run_processes
    checkpoint
    checkpoint_sequential
