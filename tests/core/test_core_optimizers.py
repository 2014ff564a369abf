"""Optimizers of the user: whatever is right in a plain loop is right here, and what cannot be is refused by name."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import plain
import pytest
import torch
import torch.distributed as dist
from core_runs import api, assert_same, in_processes, new_core, on_ranks
from core_runs import tested_core as tested_core
from pairs import at_stages
from plain import batches, net_loss
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from zoo import make_net

import zeroshard
from zeroshard.core.fused_adam import FusedAdam
from zeroshard.core.slices import Slice

NET = make_net()


def shard(optimizer_of: Callable[[Any], Any], **options: Any) -> tuple[Any, Any, Any]:
    """Return a sharded model, its optimizer, and the one that shard() was given."""
    model = copy.deepcopy(NET)
    given = optimizer_of(model)
    model, optimizer = api.shard(model, given, timeout=60, **options)
    return model, optimizer, given


# ------------------------------------------------------------------------------- the optimizer that shard() was given


@at_stages(0, 1, 3)
@pytest.mark.parametrize("call", ["step", "zero_grad", "state_dict"])
def test_the_given_optimizer_names_the_one_to_use(call: str, stage: int) -> None:
    def body(rank: int) -> None:
        model, _, given = shard(plain.adamw, stage=stage)
        net_loss(model, batches(1)[0]).backward()
        with pytest.raises(RuntimeError, match=r"passed to zeroshard.shard\(\).*use the one that shard\(\) returned"):
            getattr(given, call)()

    on_ranks(2, body)


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.3),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=10),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.2, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[2],
    ),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
}


@pytest.mark.parametrize("kind", [plain.momentum, plain.adamw])
@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("is_before", [False, True])
def test_schedulers_made_before_and_after_shard(schedule: str, is_before: bool, kind: Any) -> None:
    def make(model: Any) -> Any:
        optimizer = kind(model)
        if is_before:
            optimizer.scheduler = SCHEDULERS[schedule](optimizer)
        return optimizer

    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> list[float]:
        scheduler = optimizer.scheduler if is_before else SCHEDULERS[schedule](optimizer)
        rates = []
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Detected call")
            warnings.filterwarnings("error", "Seems like")
            for batch in data:
                plain.take_step(optimizer, net_loss(model, batch))
                scheduler.step(*[1.0] if schedule == "ReduceLROnPlateau" else [])
                rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    assert_same(NET, loop, make, batches(5), stages=(1, 3))


# -------------------------------------------------------------------------------------------------------------- hooks


@at_stages(0, 1, 2)
def test_hooks_made_before_shard_see_the_models_parameters(stage: int) -> None:
    @torch.no_grad()
    def unit_grads(optimizer: Any, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad /= parameter.grad.norm()

    @torch.no_grad()
    def unit_rows(optimizer: Any, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.div_(parameter.norm(dim=-1, keepdim=True))

    def make(model: Any) -> Any:
        optimizer = plain.adamw(model)
        optimizer.register_step_pre_hook(unit_grads)
        optimizer.register_step_post_hook(unit_rows)
        return optimizer

    assert_same(NET, make=make, stages=(stage,))


@at_stages(0, 3)
@pytest.mark.parametrize("is_scheduled", [False, True])
def test_hooks_on_all_optimizers_run_once_a_step(is_scheduled: bool, stage: int) -> None:
    seen: list[Any] = []
    model, optimizer, _ = shard(plain.adamw, stage=stage)
    if is_scheduled:
        lr_scheduler.StepLR(optimizer, 1)
    handles = [
        register(lambda optimizer, *_: seen.append(optimizer))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    try:
        for batch in batches(2):
            plain.take_step(optimizer, net_loss(model, batch))
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) == 4
    assert all(each is optimizer for each in seen)


def test_a_replaced_step_is_refused() -> None:
    model = copy.deepcopy(NET)
    optimizer = plain.sgd(model)
    original = optimizer.step
    optimizer.step = lambda *args: original(*args)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"step\(\) of this SGD was replaced .* register_step_post_hook"):
        api.shard(model, optimizer)
    assert not api.is_sharded(model)


def closures(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for batch in data:

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net_loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        assert optimizer.step(closure).requires_grad


def test_closures() -> None:
    assert_same(NET, closures)


# ------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(
    "options",
    [
        {"foreach": True},
        {"foreach": False},
        {"fused": True},
        {"maximize": True},
        {"amsgrad": True},
        {"lr": torch.tensor(0.01)},
    ],
    ids=str,
)
def test_options_of_adamw(options: dict[str, Any], precision: str | None) -> None:
    assert_same(NET, make=lambda model: plain.adamw(model, **options), precision=precision, stages=(1, 3))


# ------------------------------------------------------------------------------------------ classes, and what is given


class Renamed(torch.optim.AdamW):
    """Overrides nothing of the update, and cannot be made as its base."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.parameters(), lr=0.01, eps=1e-3)


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})
        self.sign = torch.sign

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 1 - group["beta"])
                    parameter.sub_(self.sign(average + 0.01) * average.abs().sqrt(), alpha=group["lr"])


class ReplacesTensors(Lion):
    """Counts its steps, and puts new values into new tensors."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] / self.count * parameter.grad


def test_a_subclass_that_overrides_nothing_of_the_update() -> None:
    assert_same(NET, make=Renamed)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("kind", [Lion, ReplacesTensors])
def test_a_class_that_is_declared_elementwise(kind: Any, precision: str | None) -> None:
    assert_same(NET, make=plain.of(kind, lr=0.1), elementwise=True, precision=precision, bucket_size=100)


class Decays(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        (Lion, ValueError, "Lion is not known .* pass elementwise=True"),
        (Decays, ValueError, "Decays is not known .* pass elementwise=True"),
        (torch.optim.LBFGS, NotImplementedError, "LBFGS updates parameters as a whole"),
        (torch.optim.Adafactor, NotImplementedError, "Adafactor updates parameters as a whole"),
    ],
)
def test_other_classes_are_refused_before_anything_changes(kind: Any, error: Any, text: str) -> None:
    model = copy.deepcopy(NET)
    with pytest.raises(error, match=text):
        api.shard(model, kind(model.parameters(), lr=0.1))
    assert not api.is_sharded(model)
    if kind is torch.optim.LBFGS:
        with pytest.raises(error, match=text):
            api.shard(model, kind(model.parameters()), elementwise=True)


def test_optimizers_that_cannot_be_sharded_are_refused_by_name() -> None:
    model = copy.deepcopy(NET)
    holder = Lion(model.parameters())
    holder.first = model.temperature  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"Lion cannot run on shards: its attribute 'first' holds parameters"):
        api.shard(model, holder, elementwise=True)
    with pytest.raises(ValueError, match=r"'temperature' is in optimizer 0 \(SGD\) and in optimizer 1 \(AdamW\)"):
        api.shard(model, [plain.sgd(model), plain.adamw(model)])
    with pytest.raises(ValueError, match="the list of optimizers is empty"):
        api.shard(model, [])
    with pytest.raises(TypeError, match="got str"):
        api.shard(model, [plain.sgd(model), "adam"])
    with pytest.raises(ValueError, match=r"shape \(2,\) that is not in the model"):
        api.shard(model, torch.optim.SGD([nn.Parameter(torch.ones(2))]))
    assert not api.is_sharded(model)


# ------------------------------------------------------------------------------------------------ groups that change


CHANGES: dict[str, Callable[[Any], None]] = {
    "removed": lambda optimizer: optimizer.param_groups.pop(),
    "added": lambda optimizer: optimizer.param_groups.append({"params": [], "lr": 0.1}),
    "reversed": lambda optimizer: optimizer.param_groups.reverse(),
    "copied": lambda optimizer: setattr(optimizer, "param_groups", [dict(group) for group in optimizer.param_groups]),
    "emptied": lambda optimizer: optimizer.param_groups[1]["params"].clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_groups_that_are_changed_behind_its_back_are_refused(change: str) -> None:
    model, optimizer, _ = shard(plain.adamw_in_groups)
    net_loss(model, batches(1)[0]).backward()
    CHANGES[change](optimizer)
    with pytest.raises(RuntimeError, match="had 2 groups, and groups or parameters were added, removed"):
        optimizer.step()


def test_groups_in_another_list_are_the_same_groups() -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for batch in data:
            optimizer.param_groups = [*optimizer.param_groups]
            optimizer.param_groups[1]["lr"] *= 0.5
            plain.take_step(optimizer, net_loss(model, batch))

    assert_same(NET, loop, plain.adamw_in_groups)


def head_and_blocks(model: Any) -> list[Any]:
    return [torch.optim.SGD(model.head.parameters(), lr=0.1), torch.optim.Adam(model.blocks.parameters(), eps=1e-3)]


@pytest.mark.parametrize("is_named", [False, True])
def test_groups_that_are_added(is_named: bool) -> None:
    def make(model: Any) -> Any:
        return torch.optim.Adam(model.blocks.named_parameters() if is_named else model.blocks.parameters(), eps=1e-3)

    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for number, batch in enumerate(data):
            net_loss(model, batch).backward()
            optimizer.step()
            model.zero_grad()
            if number == 1:
                added = model.head.named_parameters() if is_named else model.head.parameters()
                optimizer.add_param_group({"params": added, "lr": 0.1})
            elif number == 2:
                added = ("temperature", model.temperature) if is_named else model.temperature
                optimizer.add_param_group({"params": [added] if is_named else added})

    assert_same(NET, loop, make, batches(5))


def test_groups_of_wrong_parameters_are_refused() -> None:
    model = copy.deepcopy(NET)
    model.blocks[0].requires_grad_(False)
    model, (one, two) = api.shard(model, head_and_blocks(model))
    for optimizer in one, two:
        with pytest.raises(ValueError, match=r"'head.weight' is already in a parameter group of optimizer 0"):
            optimizer.add_param_group({"params": [model.head.weight]})
        for wrong in nn.Parameter(torch.ones(2)), model.blocks[0].up.weight:
            with pytest.raises(ValueError, match="takes trainable parameters of the sharded model only"):
                optimizer.add_param_group({"params": wrong})
        assert len(optimizer.param_groups) == 1
    one.add_param_group({"params": model.temperature})
    with pytest.raises(ValueError, match=r"'temperature' is already in a parameter group of optimizer 0"):
        two.add_param_group({"params": model.temperature})


# ------------------------------------------------------------------------------------------------ ranks that disagree


def train(model: Any, optimizer: Any, rank: int, steps: int) -> None:
    for batch in batches(steps):
        plain.take_step(optimizer, net_loss(model, batch.chunk(2)[rank]))


def other_rates(rank: int, model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    train(model, optimizer, rank, 1)


def other_rates_after_the_backward(rank: int, model: Any, optimizer: Any) -> None:
    net_loss(model, batches(1)[0]).backward()
    optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    optimizer.step()
    train(model, optimizer, rank, 1)


def other_betas(rank: int, model: Any, optimizer: Any) -> None:
    optimizer.param_groups[1]["betas"] = (0.9, 0.99 - 0.1 * rank)
    train(model, optimizer, rank, 1)


def clear_alone(rank: int, model: Any, optimizer: Any) -> None:
    net_loss(model, batches(1)[0]).backward()
    if rank == 1:
        optimizer.zero_grad()
    optimizer.step()
    train(model, optimizer, rank, 1)


def clear_one_parameter_alone(rank: int, model: Any, optimizer: Any) -> None:
    net_loss(model, batches(1)[0]).backward()
    if rank == 1:
        model.blocks[1].up.weight.grad = None
    optimizer.step()
    train(model, optimizer, rank, 1)


def zeros_alone(rank: int, model: Any, optimizer: Any) -> None:
    net_loss(model, batches(1)[0]).backward()
    if rank == 1:
        optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    train(model, optimizer, rank, 1)


def keep_alone(rank: int, model: Any, optimizer: Any) -> None:
    net_loss(model, batches(1)[0]).backward()
    optimizer.step()
    if rank == 1:
        optimizer.zero_grad()
    train(model, optimizer, rank, 1)


def step_alone(rank: int, model: Any, optimizer: Any) -> None:
    net_loss(model, batches(1)[0]).backward()
    if rank == 1:
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, rank, 1)


def add_alone(rank: int, model: Any, optimizer: Any) -> None:
    if rank == 1:
        optimizer.add_param_group({"params": model.temperature})
    train(model, optimizer, rank, 1)


def add_in_another_order(rank: int, model: Any, optimizer: Any) -> None:
    for parameter in [model.temperature, model.head.bias][:: 1 - 2 * rank]:
        optimizer.add_param_group({"params": parameter})
    train(model, optimizer, rank, 1)


DISAGREEMENTS = {
    other_rates: r"hyper-parameters of the optimizer differ between ranks: rank \d has .*'lr': 0.[12]",
    other_rates_after_the_backward: "hyper-parameters of the optimizer differ between ranks",
    other_betas: "hyper-parameters of the optimizer differ between ranks",
    clear_alone: "start step of optimizer 0 without gradients of '",
    clear_one_parameter_alone: r"start step of optimizer 0 without gradients of '.* and others \(\d+,",
    zeros_alone: "set gradients to zero of optimizer 0",
    keep_alone: "some ranks have cleared gradients before the last backward",
    step_alone: "start step of optimizer 0",
    add_alone: "add a group of .'temperature'., of optimizer 0",
    add_in_another_order: "add a group of .'head.bias'., of optimizer 0",
}


def without_some(model: Any) -> Any:
    named = {name: p for name, p in model.named_parameters() if name not in ("temperature", "head.bias")}
    groups = [[p for p in named.values() if p.dim() == 2], [p for p in named.values() if p.dim() != 2]]
    return torch.optim.AdamW([{"params": group} for group in groups], lr=0.01)


def disagree(rank: int, habit: Any, stage: int) -> None:
    model, optimizer, _ = shard(without_some, stage=stage, backwards=1)
    train(model, optimizer, rank, 3)
    with pytest.raises(RuntimeError, match=DISAGREEMENTS[habit]) as error:
        habit(rank, model, optimizer)
    assert isinstance(error.value, zeroshard.RanksDisagreeError)


@at_stages(0, 1, 2, 3)
@pytest.mark.parametrize("habit", DISAGREEMENTS, ids=lambda habit: habit.__name__)
def test_ranks_that_disagree_are_told(habit: Any, stage: int) -> None:
    in_processes(2, disagree, habit, stage, fresh=True)


def groups_of_another_order(rank: int) -> None:
    model = copy.deepcopy(NET)
    optimizer = plain.adamw_in_groups(model)
    groups = optimizer.param_groups[:: 1 - 2 * rank]
    with pytest.raises(RuntimeError, match="has another model, optimizer or options"):
        api.shard(model, torch.optim.AdamW(groups), timeout=20)


def test_ranks_with_other_groups_are_told() -> None:
    on_ranks(2, groups_of_another_order)


def disagree_once(rank: int) -> None:
    model, optimizer, _ = shard(plain.adamw, stage=1)
    train(model, optimizer, rank, 1)
    optimizer.param_groups[0]["lr"] = 0.1 * rank
    net_loss(model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="hyper-parameters"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.zero_grad()
    train(model, optimizer, rank, 2)


def test_a_difference_is_reported_once() -> None:
    on_ranks(2, disagree_once)


# -------------------------------------------------------------------------------------------------- several optimizers


class LateGather:
    """An all-gather of gloo: it sends what is there when its turn comes, and writes all of the output."""

    pending = threading.local()

    def __init__(self, output: torch.Tensor, part: torch.Tensor, group: Any) -> None:
        self.output, self.part, self.group = output, part, group
        self.is_first = not getattr(self.pending, "count", 0)
        self.pending.count = getattr(self.pending, "count", 0) + 1
        if self.is_first:
            self.part = part.clone()

    def wait(self, timeout: Any = None) -> None:
        self.pending.count -= 1
        found = torch.empty_like(self.output)
        dist.all_gather_into_tensor(found, self.part.clone(), group=self.group)
        self.output.copy_(found)


@at_stages(1, 2)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_step_waits_for_the_refresh_of_another(precision: Any, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "zeroshard.core.axis._all_gather", lambda output, part, group, async_op: LateGather(output, part, group)
    )

    def make(model: Any) -> Any:
        return two_optimizers_of_every_unit(model)

    def loop(model: Any, optimizers: Any, data: list[torch.Tensor]) -> None:
        for batch in data:
            net_loss(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in reversed(optimizers):
                optimizer.zero_grad()

    assert_same(NET, loop, make, stages=(stage,), precision=precision)


def two_optimizers_of_every_unit(model: Any) -> list[Any]:
    matrices, vectors = ([p for p in model.parameters() if (p.dim() == 2) is is_matrix] for is_matrix in (True, False))
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(vectors, lr=0.01, eps=1e-3)]


def turns(model: Any, optimizers: Any, data: list[torch.Tensor]) -> None:
    """Step and clear in every order, and not always all."""
    for number, batch in enumerate(data):
        net_loss(model, batch).backward()
        one, two = optimizers[:: 1 if number % 2 else -1]
        one.step()
        if number % 3 == 0:
            one.zero_grad()
            two.step()
        elif number % 3 == 1:
            two.step()
            one.step()
        two.zero_grad()
        if number % 3:
            one.zero_grad()


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("make", [two_optimizers_of_every_unit, head_and_blocks])
def test_two_optimizers_in_every_order(make: Any, precision: str | None) -> None:
    assert_same(NET, turns, make, batches(7), precision=precision, identical=False)


def step_in_turn(rank: int, stage: int, what: str) -> None:
    model, optimizers, _ = shard(two_optimizers_of_every_unit, stage=stage)
    for _ in range(2):
        net_loss(model, batches(1)[0]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    wanted = "of optimizer" if what == "step" else "some ranks have cleared"
    with pytest.raises(zeroshard.RanksDisagreeError, match=wanted):
        net_loss(model, batches(1)[0]).backward()
        if what == "step":
            optimizers[rank].step()
        optimizers[rank].zero_grad()
        net_loss(model, batches(1)[0]).backward()
        optimizers[0].step()


@at_stages(0, 1, 3)
@pytest.mark.parametrize("what", ["step", "zero"])
def test_ranks_that_step_or_clear_different_optimizers_are_told(what: str, stage: int) -> None:
    in_processes(2, step_in_turn, stage, what, fresh=True)


@at_stages(0, 1)
def test_gradients_of_two_optimizers_are_reduced_in_the_backward(stage: int) -> None:
    def body(rank: int) -> list[bool]:
        model, optimizers, _ = shard(two_optimizers_of_every_unit, stage=stage)
        found = []
        for batch in batches(4):
            net_loss(model, batch).backward()
            found.append(any(gradient.is_pending for gradient in model._zeroshard_core.gradients))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return found

    assert on_ranks(2, body) == [[True, True, False, False]] * 2


# ------------------------------------------------------------------------------------------------------------- states


def clear_states(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for number, batch in enumerate(data):
        if number == 2:
            optimizer.state.clear()
        plain.take_step(optimizer, net_loss(model, batch))


def test_states_that_are_cleared_begin_again() -> None:
    assert_same(NET, clear_states, plain.adamw, batches(4))


ACCESSES: dict[str, Callable[[Any, Any], object]] = {
    "get": lambda state, parameter: state.get(parameter, {}),
    "in": lambda state, parameter: parameter in state,
    "read": lambda state, parameter: state[parameter],
    "pop": lambda state, parameter: state.pop(parameter, None),
    "set": lambda state, parameter: state.__setitem__(parameter, {}),
}


@pytest.mark.parametrize("access", ACCESSES)
def test_states_are_not_read_by_parameter(access: str) -> None:
    model, optimizer, _ = shard(plain.adamw)
    plain.take_step(optimizer, net_loss(model, batches(1)[0]))
    with pytest.raises(RuntimeError, match="has no states of whole parameters"):
        ACCESSES[access](optimizer.state, model.temperature)


class TwoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(64))
        self.second = nn.Parameter(torch.ones(64))

    def forward(self, names: tuple[str, ...]) -> torch.Tensor:
        return torch.stack([getattr(self, name).sum() for name in names]).sum()


class Launches:
    """A kernel that notes which elements it would update."""

    def prepare(self, tensors: Any, slice_count: int) -> Any:
        return [(row.slice_index, row.master.numel()) for row in tensors], slice_count

    def run(self, launch: Any, steps: Any, *_: Any) -> None:
        rows, slice_count = launch
        assert slice_count == len(steps)
        self.updated = sum(numel for _, numel in rows)


@new_core
def test_a_fused_step_updates_what_has_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are divided when a parameter has no gradient: the first piece begins where the whole has begun."""
    memory = torch.zeros(128)  # as if gradients were always in the same place

    def gradient(self: Slice, gradients: Any) -> torch.Tensor:
        return memory[self.span_of(self.flat.grad_span, self.indices)]

    monkeypatch.setattr(Slice, "gradient", gradient)
    model: Any = TwoWeights()
    model, optimizer = api.shard(model, torch.optim.AdamW(model.parameters()), stage=1)
    kernel = Launches()
    fused = FusedAdam(optimizer._inner, model._zeroshard_core, kernel)  # type: ignore[arg-type]
    fused.can_step = lambda: True  # type: ignore[method-assign]
    optimizer._fused = fused
    for names in (("first", "second"), ("first",)):
        model(names).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert kernel.updated == 64 * len(names)
