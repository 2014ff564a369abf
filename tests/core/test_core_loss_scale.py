"""fp16: one loss scale, wherever gradients are added, read, clipped or skipped."""

from __future__ import annotations

import warnings
from typing import Any

import plain
import pytest
import torch
from core_runs import MAX_NORM, on_ranks
from core_runs import tested_core as tested_core
from pairs import at_stages, every_stage
from plain import batches, net_loss, sharded, shares
from torch import nn
from zoo import built, make_net

import zeroshard

NET = make_net()
FP16: dict[str, Any] = {"precision": "fp16", "loss_scale": 1024.0, "timeout": 20}


def assert_about_as_plain(loop: Any, base: nn.Module = NET, world: int = 2, **options: Any) -> None:
    """Assert that a loop trains about as the plain run in fp32 does: within a tenth of what a parameter moves."""
    data = batches(6, rows=24)
    wanted = plain.run_plain(base, plain.sgd, data, loop)
    start = plain.copied(base)

    def body(rank: int) -> plain.Tensors:
        model, optimizer = sharded(base, plain.sgd, **FP16, **options)
        numbers = loop(model, optimizer, shares(data, rank, world))
        return plain.outcome(plain.masters(model), numbers)

    for found in on_ranks(world, body):
        for name, value in wanted.items():
            moved = (value - start[name] if name in start else value).norm()
            assert (found[name] - value).norm() <= 0.1 * moved + 1e-4, name


def scaled(optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
    return optimizer.scale(loss) if hasattr(optimizer, "scale") else loss


def set_scale(optimizer: Any, value: float) -> None:
    if hasattr(optimizer, "scale"):
        optimizer.load_loss_scale([value, 0])


def accumulate_over_a_change(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    """The scale changes between two backwards whose gradients are added."""
    for first, second in zip(data[::2], data[1::2], strict=True):
        for batch, scale in ((first, 1024.0), (second, 64.0)):
            set_scale(optimizer, scale)
            scaled(optimizer, net_loss(model, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


def scale_one_of_two(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        net_loss(model, first).backward()
        scaled(optimizer, net_loss(model, second)).backward()
        optimizer.step()
        optimizer.zero_grad()


def read_between(model: Any, optimizer: Any, data: list[torch.Tensor]) -> list[float]:
    """Read, change and clip gradients between the backwards of a step."""
    norms = []
    for first, second in zip(data[::2], data[1::2], strict=True):
        scaled(optimizer, net_loss(model, first)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        scaled(optimizer, net_loss(model, second)).backward()
        norms.append(plain.clip(model, optimizer, MAX_NORM).item())
        optimizer.step()
        norms.append(sum(parameter.grad.float().square().sum().item() for parameter in model.parameters()))
        optimizer.zero_grad()
    return norms


def assign(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
    """A gradient that the user assigns beside scaled ones has no scale."""
    for batch in data:
        scaled(optimizer, net_loss(model, batch)).backward()
        for parameter in list(model.parameters())[::2]:
            parameter.grad = parameter.grad * 2
        optimizer.step()
        optimizer.zero_grad()


@every_stage
@pytest.mark.parametrize("loop", [accumulate_over_a_change, scale_one_of_two, read_between, assign])
@pytest.mark.filterwarnings("ignore:precision=")
def test_gradients_of_scaled_losses_are_added_as_those_of_others(loop: Any, stage: int) -> None:
    assert_about_as_plain(loop, stage=stage)


class WithScalar(nn.Module):
    """A parameter that only the loss uses: its gradient arrives before those of the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.scalar = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(ids)
        return found


@at_stages(0, 1, 2)
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_gradient_that_arrives_before_those_of_modules_has_their_scale(backwards: int, stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for batch in data:
            for _ in range(backwards):
                scaled(optimizer, net_loss(model, batch) + model.scalar.square().sum() * 0.01).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_about_as_plain(loop, built(WithScalar), stage=stage)


@every_stage
def test_an_overflow_on_one_rank_skips_the_step_on_all(stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(NET, plain.adamw, stage=stage, **FP16)
        for number, batch in enumerate(shares(batches(4), rank, 2)):
            before = plain.masters(model)
            loss = net_loss(model, batch) * (float("inf") if (rank, number) == (1, 1) else 1.0)
            optimizer.scale(loss).backward()
            assert optimizer.clip_grad_norm_(1.0).isfinite() == (number != 1)
            optimizer.step()
            optimizer.zero_grad()
            after = plain.masters(model)
            assert all(torch.equal(after[name], before[name]) for name in before) == (number == 1)
            assert optimizer.loss_scale.item() == (1024.0 if number == 0 else 512.0)

    on_ranks(2, body)


@every_stage
def test_a_loss_that_nobody_scales_warns_once(stage: int) -> None:
    model, optimizer = sharded(NET, plain.sgd, stage=stage, **FP16)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for batch in batches(2):
            net_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [str(one.message)[:16] for one in found if "fp16" in str(one.message)] == ['precision="fp16"']
    assert optimizer.loss_scale.item() == 1024.0


def test_losses_with_and_without_a_scale_in_one_backward_are_refused() -> None:
    model, optimizer = sharded(NET, plain.sgd, stage=2, **FP16)
    first, second = batches(2)
    loss = optimizer.scale(net_loss(model, first)) + net_loss(model, second)
    with pytest.raises(RuntimeError, match=r"call optimizer\.scale\(\) on the sum"):
        loss.backward()


@every_stage
def test_a_rank_that_does_not_scale_is_noticed(stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(NET, plain.sgd, stage=stage, **FP16)
        loss = net_loss(model, batches(1)[0])
        with pytest.raises(zeroshard.RanksDisagreeError, match="scaled loss"):
            (optimizer.scale(loss) if rank else loss).backward()
            optimizer.step()

    on_ranks(2, body)


def test_a_loaded_scale_forgets_overflows() -> None:
    model, optimizer = sharded(NET, plain.sgd, stage=1, **FP16)
    for factor in (float("inf"), 1.0):
        optimizer.scale(net_loss(model, batches(1)[0]) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.loss_scale_state() == ([512.0, 0.0] if factor != 1.0 else [512.0, 1.0])
        optimizer.load_loss_scale(optimizer.loss_scale_state())
