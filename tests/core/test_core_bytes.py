"""Bytes held and sent by one of several ranks, alone over the fake backend, are the formulas; orders are learned."""

from __future__ import annotations

import contextlib
import functools
import gc
from typing import Any

import pytest
import round_trips
import torch
from core_runs import be_one_of, in_processes, new_core, no_sync
from core_runs import tested_core as tested_core
from live import Collectives, allocated_bytes, live_bytes, live_bytes_at_start
from pairs import every_stage
from plain import adamw, sharded, square_loss
from torch import nn
from zoo import Block, InOrder

WORLD = 4
WIDTH = 64
BUCKET = 1024  # elements
DEPTHS = (2, 8, 32)
ELEMENT = {None: 4, "bf16": 2}
every_precision = pytest.mark.parametrize("precision", ELEMENT)


def stack(layers: int) -> nn.Module:
    return InOrder(Block(WIDTH, hidden=2 * WIDTH) for _ in range(layers))


PSI = {layers: sum(p.numel() for p in stack(layers).parameters()) for layers in DEPTHS}
BLOCK = PSI[2] // 2


def per_parameter(stage: int, precision: str | None, ranks: int) -> tuple[float, float]:
    """Bytes of states under Adam, and of gradients. In bf16, stage 3 keeps no parameters beside the masters."""
    element = ELEMENT[precision]
    master = 4 if precision else 0
    parameters = element if stage < 3 else (0 if precision else element / ranks)
    states = (8 + master) / (ranks if stage else 1)
    return parameters + states, element / (ranks if stage > 1 else 1)


class Measured:
    """What one rank holds, allocates and sends for a model of some depth."""

    def __init__(self, layers: int, stage: int, precision: str | None, **options: Any) -> None:
        before = live_bytes_at_start()
        options |= {"stage": stage, "precision": precision, "bucket_size": BUCKET, "units": (Block,)}
        model, optimizer = sharded(stack(layers), functools.partial(adamw, fused=True), **options)
        x = torch.ones(1, WIDTH)

        def backward() -> None:
            square_loss(model, x).backward()

        def step() -> None:
            backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()

        for _ in range(3):  # to learn the order
            step()
            optimizer.zero_grad()
        with Collectives() as seen:
            backward()
            optimizer.step()
        self.sent = {kind: sum(seen.of(kind)) for kind in ("all-gather", "reduce-scatter", "all-reduce")}
        self.largest = max((nbytes for kind, nbytes in seen.events if kind in self.sent), default=0)
        gc.collect()
        self.with_gradients = live_bytes() - before
        optimizer.zero_grad()
        gc.collect()
        self.at_rest = live_bytes() - before
        parts = {"backward": backward, "clip": lambda: optimizer.clip_grad_norm_(1.0), "step": optimizer.step}
        self.peaks = {name: allocated_bytes(part)[0] for name, part in parts.items()}
        optimizer.zero_grad()
        self.step_peak, self.step_left = allocated_bytes(lambda: (step(), optimizer.zero_grad()))


def measure(rank: int, stage: int, precision: str | None) -> dict[int, dict[str, Any]]:
    be_one_of(WORLD)
    return {layers: vars(Measured(layers, stage, precision)) for layers in DEPTHS}


@functools.cache
def measured(stage: int, precision: str | None) -> dict[int, Any]:
    (found,) = in_processes(1, measure, stage, precision, fresh=True)
    return found


@every_precision
@every_stage
def test_states_are_those_of_the_formula(stage: int, precision: str | None) -> None:
    states, gradients = per_parameter(stage, precision, WORLD)
    for layers, found in measured(stage, precision).items():
        constant = 8 * 4 * BUCKET + 2 * 4 * BLOCK // WORLD  # a ring of buckets, alignment, small things
        assert states * PSI[layers] <= found["at_rest"] <= states * PSI[layers] * 1.02 + constant
        extra = found["with_gradients"] - found["at_rest"]
        assert ELEMENT[precision] / WORLD * PSI[layers] * 0.98 <= extra
        assert extra <= gradients * PSI[layers] * 1.02 + constant
    few, many = (measured(stage, precision)[layers]["at_rest"] for layers in (DEPTHS[0], DEPTHS[-1]))
    assert many - few == pytest.approx(states * (PSI[DEPTHS[-1]] - PSI[DEPTHS[0]]), rel=0.02)


@every_precision
@every_stage
def test_a_step_sends_what_the_formula_says(stage: int, precision: str | None) -> None:
    for layers, found in measured(stage, precision).items():
        psi, sent = ELEMENT[precision] * PSI[layers], found["sent"]
        wanted = {
            "all-gather": (0, 1, 1, 2)[stage] * psi,
            "reduce-scatter": (0, 1, 1, 1)[stage] * psi,
            "all-reduce": 2 * psi if stage == 0 else 0,
        }
        kept = ELEMENT[precision] * BLOCK if stage == 3 else 0  # the last unit of forward may stay for backward
        for kind, nbytes in wanted.items():
            assert nbytes - kept <= sent[kind] <= nbytes * 1.02 + 1024, kind
        assert found["largest"] <= 2 * ELEMENT[precision] * max(BUCKET, BLOCK) * 1.02


def gathered_elements(rank: int) -> tuple[int, float]:
    """Return the parameters of a model whose ends are units of two layers, and how many a step gathers."""
    be_one_of(WORLD)
    ends = [[nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)] for _ in range(2)]
    model = nn.Sequential(*ends[0], stack(3), *ends[1])
    model, optimizer = sharded(model, adamw, stage=3)
    for _ in range(3):  # to learn the order
        square_loss(model, torch.ones(1, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with Collectives() as seen:
        square_loss(model, torch.ones(1, WIDTH)).backward()
    return sum(p.numel() for p in model.parameters()), sum(seen.of("all-gather")) / ELEMENT[None]


def test_a_unit_of_several_modules_is_gathered_once_for_all() -> None:
    ((psi, gathered),) = in_processes(1, gathered_elements, fresh=True)
    assert psi < gathered <= 2 * psi * 1.02


@every_precision
@every_stage
def test_buffers_do_not_grow_with_the_number_of_layers(stage: int, precision: str | None) -> None:
    """What a clip and a step allocate; and a backward, beside gradients and activations."""
    element, small = ELEMENT[precision], 8192  # small: norms of each layer
    found = measured(stage, precision)
    few = found[DEPTHS[0]]
    _, gradients = per_parameter(stage, precision, WORLD)
    for layers in DEPTHS[1:]:
        many, more = found[layers], layers - DEPTHS[0]
        for part in ("clip", "step"):
            assert many["peaks"][part] <= few["peaks"][part] + small, part
        activations = more * (2 * WIDTH + 2 * 2 * WIDTH + 64) * max(element, 4)
        unit = element * BLOCK  # of two layers none is gathered ahead while both have gradients
        growth = many["peaks"]["backward"] - few["peaks"]["backward"]
        assert growth <= gradients * more * BLOCK * 1.02 + activations + unit + small


@every_precision
@every_stage
def test_peak_of_a_step(stage: int, precision: str | None) -> None:
    """States' gradients, two gathered units, autograd's gradients of two, a ring of buckets, the step's gradients."""
    element = ELEMENT[precision]
    _, gradients = per_parameter(stage, precision, WORLD)
    for layers, found in measured(stage, precision).items():
        units = (4 if stage == 3 else 2) * element * BLOCK
        buckets = 3 * element * (BUCKET + BUCKET // WORLD) + 4 * 4 * BUCKET
        activations = layers * 34 * WIDTH * 4
        assert found["step_peak"] <= gradients * PSI[layers] + units + buckets + activations + 4096
        assert abs(found["step_left"]) <= 4096


def sent(rank: int, stage: int, counts: tuple[int, ...], silent: bool = False) -> list[tuple[int, int, int]]:
    """Return the bytes of each step: of gradients until its last backward ends, of gradients, of all collectives.

    Steps have these numbers of backwards in turn, all but the last in no_sync() where they are silent.
    """
    be_one_of(2)
    model, optimizer = sharded(stack(4), adamw, stage=stage, units=(Block,))
    kind = "all-reduce" if stage == 0 else "reduce-scatter"
    found = []
    for step in range(16):
        count = counts[step % len(counts)]
        with Collectives() as seen:
            for number in range(count):
                with no_sync(model) if silent and number < count - 1 else contextlib.nullcontext():
                    square_loss(model, torch.ones(1, WIDTH)).backward()
            in_backward = sum(seen.of(kind))
            optimizer.step()
            optimizer.zero_grad()
        found.append((in_backward, sum(seen.of(kind)), seen.communicated))
    return found


@pytest.mark.parametrize(
    ("stage", "silent", "times"),
    [(0, False, 2), (1, False, 2), (2, False, 5), (3, False, 12), (2, True, 2), (3, True, 9)],
)
def test_accumulation_sends_what_the_formula_says(stage: int, silent: bool, times: int) -> None:
    """Of four backwards, all but the last in no_sync() where it is silent."""
    psi = 4 * BLOCK * 4
    kept = psi if stage == 3 else 0  # the last unit of each forward may stay
    (found,) = in_processes(1, sent, stage, (4,), silent)
    for _, _, nbytes in found[3:]:
        assert times * psi - kept <= nbytes <= times * psi * 1.02 + 4096


def held_on_a_mesh(rank: int, stage: int, partition: str) -> int:
    be_one_of(WORLD)
    return Measured(32, stage, None, mesh=(2, 2), partition=partition).at_rest


@pytest.mark.parametrize(
    ("stage", "partition", "states"),
    [(1, "hybrid", 4 + 8 / 2), (2, "full", 4 + 8 / 4), (3, "hybrid", 12 / 2), (3, "full", 12 / 4)],
)
def test_states_on_a_mesh_of_two_axes(stage: int, partition: str, states: float) -> None:
    (held,) = in_processes(1, held_on_a_mesh, stage, partition, fresh=True)
    assert states * PSI[32] <= held <= states * PSI[32] * 1.02 + 16 * 4 * BUCKET


LIMITS = {"plain": 13, "accumulate 4": 15, "GPipe": 19, "1F1B": 21, "evaluation": 35, "GAN": 17, "uneven": 55}


@new_core
@pytest.mark.parametrize("name", LIMITS)
def test_round_trips_of_100_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_trips, "STEPS", 50)
    found = round_trips.round_trips(round_trips.LOOPS[name])
    assert found["first"] > 0  # they are counted
    assert found["first"] + found["next"] <= LIMITS[name]


@pytest.mark.parametrize("counts", [(1,), (4,), (1, 2), (4, 4, 4, 4, 2)])
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_are_reduced_once_a_step(counts: tuple[int, ...], stage: int) -> None:
    """And in its last backward, where each step has as many as the last two had."""
    psi = 4 * BLOCK * 4 * (2 if stage == 0 else 1)
    (found,) = in_processes(1, sent, stage, counts)
    for in_backward, total, _ in found[2 * len(counts) :]:
        assert psi <= total <= psi * 1.02 + 64, found
        assert in_backward == total or len(counts) > 1, found
