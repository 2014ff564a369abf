"""States that are sent to host memory between phases, and come back byte for byte."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any

import pytest
import torch
from offloaded import Case, assert_same, everything, loop
from pairs import at_stages
from plain import ONE_BATCH, net_loss, split, token_step
from ranks import run_threads

import zeroshard
from zeroshard.memory.tracker import MODEL_STATE_KINDS
from zeroshard.optim.cpu.apply import ChunkUpdater

NEAR = [(kind, "device") for kind in MODEL_STATE_KINDS]
USES = {
    "forward": lambda model, optimizer: net_loss(model, ONE_BATCH),
    "step": lambda model, optimizer: optimizer.step(),
    "clip": lambda model, optimizer: optimizer.clip_grad_norm_(1.0),
    "full_parameter": lambda model, optimizer: zeroshard.full_parameter(model, "head.weight"),
    "full_gradient": lambda model, optimizer: zeroshard.full_gradient(model, "head.weight"),
    "full_state": lambda model, optimizer: zeroshard.full_state(optimizer, "head.weight"),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "gathered": lambda model, optimizer: zeroshard.gathered(model).__enter__(),
    "unwrap": lambda model, optimizer: zeroshard.unwrap(model),
}


def there_and_back(rank: int, world: int, case: Case, offload: Any, away: bool) -> dict[str, Any]:
    """A few steps, with the states away twice: between steps, and between backward and step."""
    model, optimizer = case.make(offload)
    told = loop(model, optimizer, case, rank, world)
    for _ in range(2):
        if away:
            zeroshard.offload_states(model)
            zeroshard.offload_states(model)  # once more does nothing
            assert not any(n.now for (kind, tier), n in zeroshard.report(model).memory.items() if (kind, tier) in NEAR)
            zeroshard.reload_states(model)
        loss = net_loss(model, split(ONE_BATCH, rank, world))
        optimizer.scale(loss).backward()
        if away:
            zeroshard.offload_states(model)
            zeroshard.reload_states(model)
        optimizer.step()
        told.append(loss.item())
    return {"steps": told, **everything(model, optimizer)}


@pytest.mark.parametrize(
    ("world", "case", "offload"),
    [
        (1, Case(steps=2, options={"stage": 0}), None),
        (2, Case(steps=2, options={"stage": 1, "precision": "bf16"}), None),
        (2, Case(steps=2, options={"stage": 2}, net="frozen", optimizer="momentum"), None),
        (3, Case(steps=2, options={"stage": 3, "precision": "fp16"}), None),
        (1, Case(steps=3, options={"stage": 3}), {"optimizer": ("host", 0.5), "gradients": ("host", 0.5)}),
    ],
)
def test_states_come_back_byte_for_byte(world: int, case: Case, offload: Any) -> None:
    plain = run_threads(world, there_and_back, world, case, offload, False)
    assert_same(run_threads(world, there_and_back, world, case, offload, True), plain)


@at_stages(2, 3)
@pytest.mark.parametrize("use", USES)
def test_what_is_away_cannot_be_used_and_is_unharmed(use: str, stage: int) -> None:
    case = Case(steps=1, options={"stage": stage})
    model, optimizer = case.make()
    loop(model, optimizer, case)
    before = everything(model, optimizer)
    zeroshard.offload_states(model)
    with pytest.raises(RuntimeError, match=r"reload_states\(model\)"):
        USES[use](model, optimizer)
    zeroshard.reload_states(model)
    assert_same(everything(model, optimizer), before)
    loop(model, optimizer, case)


def test_a_resident_parameter_that_is_away_says_so() -> None:
    model, _ = Case(options={"stage": 0}).make()
    head = model.head.weight
    zeroshard.offload_states(model)
    assert head.shape == (11, 7)
    with pytest.raises(RuntimeError, match=r"reload_states\(model\)"):
        head.sum()
    zeroshard.reload_states(model)
    assert torch.isfinite(head.sum())


@pytest.mark.parametrize("held_by", ["NumPy", "other processes"])
def test_memory_that_others_hold_is_refused_before_anything_is_moved(held_by: str) -> None:
    case = Case(steps=1, options={"stage": 1})
    model, optimizer = case.make()
    head = model.head.weight.detach()
    array = head.numpy() if held_by == "NumPy" else head.share_memory_()
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match=f"cannot be moved: the memory .* {held_by}"):
        zeroshard.offload_states(model)
    assert_same(everything(model, optimizer), before)
    loop(model, optimizer, case)
    del array


def test_the_ledger_follows() -> None:
    case = Case(steps=1, options={"stage": 2, "precision": "bf16"})
    model, optimizer = case.make()
    loop(model, optimizer, case)
    held = zeroshard.report(model)
    zeroshard.offload_states(model)
    away = zeroshard.report(model)
    assert away.total.now == 0
    assert away.memory["away", "host"].now >= held.total.now
    zeroshard.reload_states(model)
    back = zeroshard.report(model)
    assert back.total.now == held.total.now
    assert back.memory["away", "host"].now == 0


def test_states_wait_for_an_update_ahead_of_the_step_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(steps=3, options={"stage": 2})
    model, optimizer = case.make({"optimizer": "host", "gradients": "device"})
    loop(model, optimizer, case)
    began, ended, ahead = threading.Event(), threading.Event(), ChunkUpdater.speculate

    def slow(*arguments: Any) -> Generator[None, None, None]:
        began.set()
        ended.wait(0.2)  # nobody sets it: a use that does not wait for the update is surely too early
        yield from ahead(*arguments)
        ended.set()

    monkeypatch.setattr(ChunkUpdater, "speculate", slow)
    token_step(model, ONE_BATCH)
    assert began.wait(5)
    zeroshard.offload_states(model)
    assert ended.is_set()
