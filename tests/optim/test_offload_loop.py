"""Updates ahead of the step: that they happen, that they count, and that every way of being wrong drops them exactly.

Each loop runs twice, with offloaded states and without; what a disturbance does between backward and step has to
leave the same bits in both.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded import Case, assert_same, everything
from plain import batches, net_loss, of, sharded, take_step, token_step
from zoo import make_net

import zeroshard
from zeroshard.checkpoint import CheckpointError
from zeroshard.optim.cpu.apply import ChunkUpdater
from zeroshard.optim.cpu.chunk import StateChunk
from zeroshard.optim.cpu.updates import CpuUpdates
from zeroshard.optim.cpu.worker import UpdateJob, UpdateWorker

STEPS, DISTURBED = 6, 4  # an update ahead is possible from step 2 on, counting from 0
NATIVE = {"optimizer": "Adam", "steps": STEPS}


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[StateChunk]:
    """The chunks whose speculative update was committed."""
    found: list[StateChunk] = []
    original = StateChunk.swap

    def noted(self: StateChunk, keys: list[str], states: Any) -> None:
        found.append(self)
        original(self, keys, states)

    monkeypatch.setattr(StateChunk, "swap", noted)
    return found


def let_ahead_finish(optimizer: Any) -> int:
    """Wait for what was begun ahead of the step, so that no test depends on how fast it is; returns how much it was."""
    host: CpuUpdates | None = optimizer._cpu_updates
    begun = [ahead.future for ahead in host._speculator.pending.values()] if host is not None else []
    wait([done for done in begun if not done.cancelled()])
    return len(begun)


def run(case: Case, offload: Any, disturb: Callable[..., Any] | None = None) -> tuple[dict[str, Any], list[int]]:
    """Run a case's loop on one rank; ``disturb`` takes the place of one step. Returns all numbers, and how many
    chunks were updated speculatively before each step."""
    model, optimizer = case.make(offload)
    begun, losses = [], []
    for number, batch in enumerate(batches(case.steps)):
        loss = net_loss(model, batch)
        losses.append(loss.item())
        optimizer.scale(loss * (1e38 if number == case.overflow else 1)).backward()
        begun.append(let_ahead_finish(optimizer))
        norm = case.clip[number % len(case.clip)]
        if norm is not None:
            losses.append(optimizer.clip_grad_norm_(norm).item())
        if disturb is not None and number == DISTURBED:
            losses.append(disturb(model, optimizer, batch))
        else:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, **everything(model, optimizer)}, begun


# ------------------------------------------------------------------------------------------------- it happens


@pytest.mark.parametrize("optimizer", ["Adam", "nesterov", "fused AdamW", "SGD"])
def test_from_the_third_step_on_every_granule_is_updated_ahead_and_confirmed(optimizer: str, exchanges) -> None:
    case = Case(optimizer=optimizer, steps=5, options={"stage": 2, "bucket_size": 500})
    ours, begun = run(case, "host")
    assert begun[:2] == [0, 0]
    assert len(set(begun[2:])) == 1 and begun[2] > 3
    assert len(exchanges) == sum(begun)
    assert_same(ours, run(case, None)[0])


def test_a_loop_of_several_backwards_is_ahead_in_the_last_alone(exchanges) -> None:
    case = Case(steps=5, accumulate=(3,), options={"stage": 2})

    def counted(offload: Any) -> tuple[Any, list[int]]:
        model, optimizer = case.make(offload)
        begun = []
        for batch in batches(5):
            for _ in range(3):
                token_step(model, batch)
                begun.append(let_ahead_finish(optimizer))
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer), begun

    ours, begun = counted("host")
    assert begun[:8] == [0] * 8 and begun[8] > 0
    assert [number % 3 for number, count in enumerate(begun) if count] == [2, 2, 2]
    assert len(exchanges) == sum(begun)
    assert_same(ours, counted(None)[0])


@pytest.mark.parametrize("clip", [1e6, math.inf])
def test_a_clip_that_changes_nothing_confirms(clip: float, exchanges) -> None:
    case = Case(steps=5, clip=(clip,), options={"stage": 2})
    ours, begun = run(case, "host")
    assert len(exchanges) == sum(begun) > 0
    assert_same(ours, run(case, None)[0])


def test_it_is_ahead_under_fp16_with_the_scale_of_the_backward(exchanges) -> None:
    case = Case(steps=4, options={"stage": 3, "precision": "fp16"})
    ours, begun = run(case, "host")
    assert len(exchanges) == sum(begun) > 0
    assert_same(ours, run(case, None)[0])


def test_one_that_has_not_begun_when_the_step_comes_is_made_then(monkeypatch: pytest.MonkeyPatch, exchanges) -> None:
    case = Case(steps=5, options={"stage": 2})
    wanted = run(case, None)[0]
    do = UpdateWorker.submit

    def never_ahead(self: UpdateWorker, job: UpdateJob) -> Any:
        if job.work.func.__name__ == "_run_speculative":  # type: ignore[attr-defined]
            job.future.cancel()  # as a step does with what is still in the queue
        return do(self, job)

    monkeypatch.setattr(UpdateWorker, "submit", never_ahead)
    ours, begun = run(case, "host")
    assert sum(begun) > 0 and not exchanges
    assert_same(ours, wanted)


@pytest.mark.parametrize(
    ("offload", "optimizer"),
    [
        ({"optimizer": "host", "speculate": False}, "AdamW"),
        ({"optimizer": "disk", "directory": tempfile.gettempdir()}, "AdamW"),
        ({"optimizer": "host", "host_bytes": 8 * 2**10}, "AdamW"),  # no room for it
        ({"optimizer": "host"}, "RMSprop"),  # by torch, in place
        ({"optimizer": "host"}, "Lion"),
    ],
)
def test_nothing_is_done_ahead_where_it_may_not_or_cannot_be(offload: Any, optimizer: str, exchanges) -> None:
    case = Case(optimizer=optimizer, steps=4, options={"stage": 2})
    ours, begun = run(case, offload)
    assert sum(begun) == 0 and not exchanges
    assert_same(ours, run(case, None)[0])


def test_without_the_native_update_nothing_is_done_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.optim.cpu.updates.load_kernels", lambda: None)
    case = Case(steps=4, options={"stage": 2})
    ours, begun = run(case, "host")
    assert sum(begun) == 0
    assert_same(ours, run(case, None)[0])


# --------------------------------------------------------------------------------------- every way to be wrong


def end(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def second_backward(model, optimizer, batch) -> None:
    token_step(model, batch.flip(0))
    end(optimizer)


def second_backward_alone(model, optimizer, batch) -> None:
    with zeroshard.no_sync(model):
        token_step(model, batch.flip(0))
    end(optimizer)


def clipped(model, optimizer, batch) -> float:
    norm = optimizer.clip_grad_norm_(1e-3)
    end(optimizer)
    return norm.item()


def clipped_twice(model, optimizer, batch) -> float:
    optimizer.clip_grad_norm_(1e-2)
    norm = optimizer.clip_grad_norm_(1e-3)
    end(optimizer)
    return norm.item()


def clipped_in_two_steps(model, optimizer, batch) -> float:
    optimizer.clip_grad_norm_(1e-2)
    optimizer.step()
    norm = optimizer.clip_grad_norm_(1e-3)
    end(optimizer)
    return norm.item()


def clipped_and_accumulated(model, optimizer, batch) -> float:
    optimizer.clip_grad_norm_(1e-3)
    optimizer.step()  # no zero_grad: the clipped gradient is added to
    token_step(model, batch.flip(0))
    norm = optimizer.clip_grad_norm_(1e9)
    end(optimizer)
    return norm.item()


def clipped_and_stepped_twice(model, optimizer, batch) -> float:
    optimizer.clip_grad_norm_(1e-3)
    optimizer.step()
    found = zeroshard.full_gradient(model, "head.weight").sum().item()
    optimizer.step()
    optimizer.zero_grad()
    return found


def slower(model, optimizer, batch) -> None:
    optimizer.param_groups[0]["lr"] /= 3
    end(optimizer)


def other_betas(model, optimizer, batch) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    end(optimizer)


def no_step(model, optimizer, batch) -> None:
    optimizer.zero_grad()


def step_without_gradient(model, optimizer, batch) -> None:
    optimizer.zero_grad()
    optimizer.step()


def step_with_zeros(model, optimizer, batch) -> None:
    optimizer.zero_grad(set_to_none=False)
    end(optimizer)


def two_steps(model, optimizer, batch) -> None:
    optimizer.step()
    end(optimizer)


def read_gradient(model, optimizer, batch) -> float:
    found = model.head.weight.grad.sum().item()
    end(optimizer)
    return found


def written_gradient(model, optimizer, batch) -> None:
    with torch.no_grad():
        model.head.weight.grad.mul_(2)
        model.blocks[0].up.weight.grad.add_(1)
    end(optimizer)


def written_and_clipped(model, optimizer, batch) -> float:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad.add_(1)
    norm = optimizer.clip_grad_norm_(0.5)
    end(optimizer)
    return norm.item()


def clipped_by_torch(model, optimizer, batch) -> float:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    again = optimizer.clip_grad_norm_(1e-3)
    end(optimizer)
    return norm.item() + again.item()


def one_gradient_cleared(model, optimizer, batch) -> float:
    model.head.weight.grad = None
    norm = optimizer.clip_grad_norm_(1e9)
    end(optimizer)
    return norm.item()


def loaded_optimizer(model, optimizer, batch) -> None:
    state = optimizer.state_dict()
    for one in state["state"].values():
        for value in one.values():
            value.mul_(2)
    optimizer.load_state_dict(state)
    end(optimizer)


def loaded_moments(model, optimizer, batch) -> None:
    """The same number of steps, so that nothing but the values tells."""
    state = optimizer.state_dict()
    for one in state["state"].values():
        one["exp_avg"].mul_(2)
    optimizer.load_state_dict(state)
    end(optimizer)


def fresh_optimizer(model, optimizer, batch) -> None:
    state = optimizer.state_dict()
    optimizer.load_state_dict({**state, "state": {}})
    end(optimizer)


def forgotten_states(model, optimizer, batch) -> None:
    end(optimizer)
    optimizer.state.clear()  # as some loops do between phases


def loaded_model(model, optimizer, batch) -> None:
    values = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(values)
    end(optimizer)


def written_model(model, optimizer, batch) -> None:
    with zeroshard.gathered(model, write_rank=0), torch.no_grad():
        model.head.weight.mul_(0.5)
    end(optimizer)


def gathered_model(model, optimizer, batch) -> float:
    with zeroshard.gathered(model):
        found = model.head.weight.sum().item()
    end(optimizer)
    return found


def saved(model, optimizer, batch) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.raises(CheckpointError, match="save after"):
        zeroshard.save(Path(directory) / "there", model, optimizer)
    end(optimizer)


def saved_and_loaded(model, optimizer, batch) -> None:
    end(optimizer)
    with tempfile.TemporaryDirectory() as directory:
        path = zeroshard.save(Path(directory) / "there", model, optimizer).path
        token_step(model, batch)
        end(optimizer)
        token_step(model, batch)
        let_ahead_finish(optimizer)
        zeroshard.load(path, model, optimizer)  # back by a step
        end(optimizer)


def loaded_weights(model, optimizer, batch) -> None:
    end(optimizer)
    with tempfile.TemporaryDirectory() as directory:
        path = zeroshard.save(Path(directory) / "there", model).path
        token_step(model, batch)
        end(optimizer)
        token_step(model, batch)
        let_ahead_finish(optimizer)
        zeroshard.load(path, model)
        end(optimizer)


def evaluated(model, optimizer, batch) -> float:
    with torch.no_grad():
        found = net_loss(model, batch.flip(0)).item()
    end(optimizer)
    return found


def failed_forward(model, optimizer, batch) -> None:
    with pytest.raises(Exception):  # noqa: B017
        model("no tokens")
    end(optimizer)


def failed_backward(model, optimizer, batch) -> None:
    """Half of the gradients have come when backward fails; the loop drops the batch and goes on."""
    optimizer.zero_grad()

    def refuse(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    def watch(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(refuse)

    handle = model.blocks[0].register_forward_hook(watch)
    loss = net_loss(model, batch.flip(0))
    handle.remove()
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    optimizer.zero_grad()


RIGHT = [gathered_model, saved, evaluated, failed_forward]  # nothing has changed: the update ahead counts
WRONG = [
    second_backward,
    second_backward_alone,
    clipped,
    clipped_twice,
    clipped_in_two_steps,
    clipped_and_accumulated,
    clipped_and_stepped_twice,
    slower,
    other_betas,
    no_step,
    step_without_gradient,
    step_with_zeros,
    two_steps,
    read_gradient,
    written_gradient,
    written_and_clipped,
    clipped_by_torch,
    one_gradient_cleared,
    loaded_optimizer,
    loaded_moments,
    fresh_optimizer,
    forgotten_states,
    loaded_model,
    written_model,
    saved_and_loaded,
    loaded_weights,
    failed_backward,
]


@pytest.mark.parametrize("disturb", WRONG + RIGHT, ids=lambda disturb: disturb.__name__)
def test_a_disturbed_step_leaves_the_bits_of_the_run_without_offload(disturb, exchanges) -> None:
    case = Case(**NATIVE, options={"stage": 2, "bucket_size": 500})
    wanted, _ = run(case, None, disturb)
    for offload in ({"optimizer": "host"}, {"optimizer": ("host", 0.6), "gradients": "device"}):
        ours, begun = run(case, offload, disturb)
        assert begun[DISTURBED] > 0, f"nothing was begun ahead of the step that is disturbed ({offload})"
        assert_same(ours, wanted, f"{offload}: ")


def test_another_loss_scale_since_the_backward_changes_no_number() -> None:
    def run(offload: Any) -> Any:
        model, optimizer = Case(options={"stage": 2, "precision": "fp16"}).make(offload)
        for batch in batches(4):
            optimizer.scale(net_loss(model, batch)).backward()
            let_ahead_finish(optimizer)
            optimizer.load_loss_scale([2.0**10, 0])
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_loss_scale([2.0**12, 0])
        return everything(model, optimizer)

    assert_same(run("host"), run(None))


def test_states_are_made_by_the_step_and_not_ahead_of_it() -> None:
    """torch's first momentum is the gradient itself, whatever the dampening: it shows whether there was one."""

    def run(offload: Any) -> Any:
        model = make_net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        model, optimizer = zeroshard.shard(model, sgd, stage=2, offload=offload)
        held = []
        for number, batch in enumerate(batches(5)):
            if number == 3:
                optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
            token_step(model, batch)
            let_ahead_finish(optimizer)
            held.append(sorted(zeroshard.full_state(optimizer, "head.bias")))
            optimizer.step()
            optimizer.zero_grad()
        return {"held": held, **everything(model, optimizer)}

    assert_same(run("host"), run(None))


def test_an_overflow_is_seen_in_gradients_that_were_changed_where_they_rest() -> None:
    def run(offload: Any) -> Any:
        model, optimizer = Case(options={"stage": 2, "precision": "fp16"}).make(offload)
        for number, batch in enumerate(batches(3)):
            optimizer.scale(net_loss(model, batch) * (1e38 if number == 1 else 1)).backward()
            model.head.bias.grad = None  # of a flat whose other gradients are infinite
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer)

    assert_same(run("host"), run(None))


@pytest.mark.parametrize("disturb", RIGHT, ids=lambda disturb: disturb.__name__)
def test_what_changes_nothing_leaves_the_update_ahead_in_force(disturb, exchanges) -> None:
    case = Case(**NATIVE, options={"stage": 2})
    _, begun = run(case, "host", disturb)
    assert len(exchanges) == sum(begun)


class Borrowing(torch.nn.Module):
    """Uses its child's weight before, and apart from, the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = torch.nn.Linear(8, 8)
        self.idle = torch.nn.Linear(8, 8)  # in the optimizer, and in no forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(torch.nn.functional.linear(x, self.child.weight))


@pytest.mark.parametrize("read", [False, True], ids=["by the model", "between steps"])
def test_any_use_of_a_parameter_that_is_being_updated_waits_for_it(read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(offload: Any) -> list[float]:
        torch.manual_seed(0)
        model, optimizer = sharded(Borrowing(), of(torch.optim.SGD, lr=0.1), offload=offload)
        told = []
        for _ in range(4):
            loss = model(torch.ones(2, 8)).square().sum()
            take_step(optimizer, loss)
            told += [loss.item(), *([model.child.weight.sum().item()] if read else [])]
        return told

    plain, update = train(None), ChunkUpdater.update

    def late(*arguments: Any) -> Any:
        time.sleep(0.05)  # a use that does not wait is surely too early
        return update(*arguments)

    monkeypatch.setattr(ChunkUpdater, "update", late)
    assert train({"optimizer": "host", "speculate": False}) == plain
