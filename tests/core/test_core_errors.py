"""After an error or Ctrl-C that a loop survives, all ranks go on with the same values, or raise."""

from __future__ import annotations

import contextlib
from typing import Any

import plain
import pytest
import torch
from core_runs import api, assert_same, new_core, on_ranks
from core_runs import tested_core as tested_core
from pairs import at_stages, every_stage
from plain import batches, net_loss, sharded, shares
from zoo import make_net

from zeroshard.core.axis import Steps
from zeroshard.core.transfers import Transfer, TransferQueue

NET = make_net()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@every_stage
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("write_rank", [None, 0, 1])
def test_nothing_is_kept_of_gathered_after_an_error(write_rank: int | None, precision: str | None, stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(NET, plain.adamw, stage=stage, precision=precision, timeout=20)
        plain.train_step(model, optimizer, batches(1)[0])
        before = plain.masters(model) | {f"{k} whole": v for k, v in plain.full_parameters(model).items()}
        with pytest.raises(KeyboardInterrupt), api.gathered(model, write_rank=write_rank):
            for parameter in model.parameters():
                parameter.data.mul_(2 + rank)
            raise KeyboardInterrupt
        after = plain.masters(model) | {f"{k} whole": v for k, v in plain.full_parameters(model).items()}
        plain.assert_equal(after, before)

    on_ranks(2, body)


def test_nothing_is_kept_of_a_failed_block_inside_another() -> None:
    def body(rank: int) -> None:
        model, _ = sharded(NET, plain.sgd, stage=3, timeout=20)
        before = plain.masters(model)
        outer = api.gathered(model, write_rank=0)
        with outer, pytest.raises(KeyboardInterrupt), api.gathered(model, write_rank=0):
            model.head.weight.data.zero_()
            raise KeyboardInterrupt
        plain.assert_equal(plain.masters(model), before)

    on_ranks(2, body)


PLACES = {
    "model": lambda model: model.register_forward_pre_hook,
    "block": lambda model: model.blocks[1].register_forward_pre_hook,
    "layer of a block": lambda model: model.blocks[1].up.register_forward_hook,
    "layer": lambda model: model.head.register_forward_hook,
}


@pytest.mark.parametrize("then", ["zero_grad", "forward", "evaluation"])
@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on_after_ctrl_c_in_a_forward(place: str, then: str) -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for number, batch in enumerate(data):
            if number % 2:
                handle = PLACES[place](model)(interrupt)
                with pytest.raises(KeyboardInterrupt):
                    net_loss(model, batch)
                handle.remove()
                if then == "zero_grad":
                    optimizer.zero_grad()
                elif then == "evaluation":
                    with torch.no_grad():
                        net_loss(model, batch)
            plain.train_step(model, optimizer, batch)
            if api.is_sharded(model):
                engine = model._zeroshard_core
                assert not engine.is_running and not any(unit.users for unit in engine.units)

    assert_same(NET, loop, data=batches(5))


@new_core
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_ranks_have_the_same_values_after_ctrl_c_in_a_step(precision: str | None) -> None:
    """What the step had updated by then counts."""

    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        name = "_step_inner" if api.is_sharded(model) else "step"
        step = getattr(optimizer, name)

        def step_and_interrupt(*args: Any) -> None:
            step(*args)
            interrupt()

        for number, batch in enumerate(data):
            net_loss(model, batch).backward()
            setattr(optimizer, name, step_and_interrupt if number % 2 else step)
            with pytest.raises(KeyboardInterrupt) if number % 2 else contextlib.nullcontext():
                optimizer.step()
            optimizer.zero_grad()

    assert_same(NET, loop, plain.momentum, data=batches(5), precision=precision)


@at_stages(0, 1, 3)
def test_states_of_a_parameter_are_not_read_from_the_optimizer(stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(NET, plain.adamw, stage=stage, timeout=20)
        plain.train_step(model, optimizer, shares(batches(1), rank, 2)[0])
        for parameter in model.parameters():
            with pytest.raises(RuntimeError, match="state_dict"):
                optimizer.state[parameter]["exp_avg"]
            with pytest.raises(RuntimeError, match="state_dict"):
                optimizer.state[parameter] = {}
        with pytest.raises(AttributeError):
            optimizer.state = {}

    on_ranks(2, body)


class LateQueue(TransferQueue):
    """Begins a transfer when somebody waits for it, as a side stream may."""

    def start(self, *steps: Steps, kept: object = None) -> Transfer:
        transfer = Transfer(steps, kept)
        self._pending.append(transfer)
        return transfer


@new_core
@at_stages(0, 1, 2)
def test_parameters_are_written_before_another_optimizer_may_write_next_to_them(stage: int) -> None:
    """A fused optimizer writes its part of a flat itself; no side stream may still copy masters of the whole flat."""

    def body(rank: int) -> None:
        model, optimizer = sharded(NET, plain.sgd, stage=stage, precision="bf16", timeout=20)
        for unit in model._zeroshard_core.units:
            unit._gathers = LateQueue(torch.device("cpu"))
        net_loss(model, batches(1)[0]).backward()
        optimizer.step()
        for flat in model._zeroshard_core.flats:
            assert torch.equal(flat.kept_master, flat.master.to(flat.dtype))

    on_ranks(2, body)
