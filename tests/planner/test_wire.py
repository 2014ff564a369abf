"""Collectives in 8 bits: what they move, hold and take in a plan, and when a plan uses them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from pairs import at_stages
from ranks import run_threads
from test_traffic import moved_bytes
from torch import nn

import zeroshard
from zeroshard.comm import payload_bytes
from zeroshard.config.config import Config
from zeroshard.models import GPT, GPTConfig
from zeroshard.planner import auto
from zeroshard.planner.footprint import MemoryConditions, footprint
from zeroshard.planner.machines.machine import Link, Machine
from zeroshard.planner.plans import LOSSY_SCORE_FACTOR, Plans, plan
from zeroshard.planner.state_sizes import StateSizes, predict_memory, state_sizes
from zeroshard.planner.step_time import StepConditions, StepTime, TraceCost, step_time
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.tracing.trace_model import trace_model

pytestmark = pytest.mark.usefixtures("traced_once")

SHAPE = GPTConfig(vocab_size=512, context=32, layers=4, heads=4, width=64)
FREE = Link(bandwidth=1e15, latency=0)
BOTH = {"gather_dtype": "int8", "reduce_wire": "int8"}
OPEN = {"checkpoint": "none", "offload": None, "tensor": 1}


def gpt(**changes: Any) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(**{**vars(SHAPE), **changes}))


def sizes_of(ranks: int = 4, replicas: int = 1, **options: Any) -> StateSizes:
    config = Config(**{"precision": "bf16", **options})
    return state_sizes(gpt(), config, ranks=ranks // replicas, replicas=replicas)


def simulated(machine: Machine, ranks: int = 4, replicas: int = 1, accumulate: int = 1, **options: Any) -> StepTime:
    cost = TraceCost.from_trace(trace_model(gpt(), micro_batch=2, precision="bf16"), machine)
    conditions = StepConditions(ranks=ranks, replicas=replicas, accumulate=accumulate)
    return step_time(cost, sizes_of(ranks, replicas, **options), machine, conditions)


def node(rate: float = 1e15, devices: int = 4, **changes: Any) -> Machine:
    """A node whose devices and links have no latency; ``rate``: between nodes."""
    links = {"inside": FREE, "outside": Link(bandwidth=rate, latency=0)}
    return Machine.resolve("h100", devices=devices, **links, **changes)


# -------------------------------------------------------------------------------------------------- bytes


def test_a_unit_moves_a_byte_per_element_and_a_scale_per_block() -> None:
    exact, both = sizes_of(), sizes_of(**BOTH)
    for plain, unit in zip(exact.units, both.units, strict=True):
        numel = plain.full_bytes // 2
        assert (plain.gather_bytes, plain.exact_reduce_bytes) == (plain.full_bytes, plain.reduce_bytes)
        payload = 4 * payload_bytes(numel // 4)  # of each rank
        assert unit.gather_bytes == unit.gather_payload_bytes == payload
        assert payload == pytest.approx(numel * (1 + 1 / 32), rel=0.01)
        assert (unit.reduce_payload_bytes, unit.exact_reduce_bytes) == ((payload,), 0)
        assert (unit.full_bytes, unit.reduce_bytes) == (plain.full_bytes, plain.reduce_bytes)
        # a shard of bf16 is read, and 8 bits written; all of these are read, and bf16 written
        assert unit.cast_bytes == plain.cast_bytes + 2 * numel // 4 + payload_bytes(numel // 4)
        assert unit.dequantize_bytes == payload + 2 * numel
    assert exact.states == both.states


def test_parameters_that_stay_in_fp32_are_gathered_in_fp32() -> None:
    units = sizes_of(gather_dtype="int8", keep_fp32=(nn.LayerNorm,)).units
    norms = sum(p.numel() for m in gpt().modules() if isinstance(m, nn.LayerNorm) for p in m.parameters())
    exact = sum(unit.gather_bytes - unit.gather_payload_bytes for unit in units)
    assert exact == pytest.approx(4 * norms, rel=0.5) and exact >= 4 * norms  # with padding


@at_stages(1, 2, 3)
def test_traffic_is_counted_as_payload(stage: int) -> None:
    machine, options = node(), {"reduce_wire": "int8"} | ({"gather_dtype": "int8"} if stage == 3 else {})
    exact, found = (simulated(machine, accumulate=2, stage=stage, **given) for given in ({}, options))
    share = (1 + 1 / 32) / 2
    assert found.traffic["reduce-scatter"] == pytest.approx(share * exact.traffic["reduce-scatter"], rel=0.01)
    gathers = share if stage == 3 else 1
    assert found.traffic["all-gather"] == pytest.approx(gathers * exact.traffic["all-gather"], rel=0.01)
    assert found.traffic.keys() == exact.traffic.keys()


def test_each_hop_moves_payload() -> None:
    machine, share = node(), (1 + 1 / 32) / 2
    for partition in ("full", "hierarchical"):
        given: dict[str, Any] = {"ranks": 8, "replicas": 2, "stage": 3, "partition": partition}
        exact, both = simulated(machine, **given), simulated(machine, **given, **BOTH)
        for kind in ("all-gather", "outer all-gather", "reduce-scatter", "outer reduce-scatter"):
            assert both.traffic[kind] == pytest.approx(share * exact.traffic[kind], rel=0.01), (partition, kind)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("stage", "ranks", "partition", "accumulate"),
    [
        (1, 3, None, 2),
        (2, 2, None, 2),
        (3, 3, None, 1),
        (3, 4, "full", 1),
        (3, 4, "hierarchical", 2),
        (3, 4, "hierarchical-gradients", 2),
        (2, 4, "full", 1),
    ],
)
def test_traffic_is_what_a_run_communicates(
    stage: int, ranks: int, partition: str | None, accumulate: int, precision: str
) -> None:
    config = GPTConfig(vocab_size=64, context=8, layers=2, heads=2, width=16)
    replicas = 1 if partition is None else 2
    options: dict[str, Any] = {"stage": stage, "partition": partition or "hybrid", "precision": precision}
    options |= {"reduce_wire": "int8", "gather_dtype": "int8" if stage == 3 else None}

    model, machine = GPT(config), Machine.resolve("cpu")
    trace = trace_model(model, micro_batch=2, device_kind="cpu", precision=precision)
    sizes = state_sizes(model, Config(**options), ranks=ranks // replicas, replicas=replicas, on_gpu=False)
    conditions = StepConditions(ranks=ranks, replicas=replicas, accumulate=accumulate)
    predicted = step_time(TraceCost.from_trace(trace, machine), sizes, machine, conditions).traffic
    mesh_shape = (ranks,) if partition is None else (replicas, ranks // replicas)
    for measured in moved_bytes(model, "adamw", mesh_shape, accumulate, **options):
        assert {kind: nbytes for kind, nbytes in predicted.items() if nbytes} == pytest.approx(measured, abs=300)


def test_replicas_that_are_summed_are_not_sent_in_8_bits() -> None:
    with pytest.raises(ValueError, match="but partition='hybrid' all-reduces them over the outer axis"):
        sizes_of(8, 2, reduce_wire="int8")
    assert sizes_of(8, 2, gather_dtype="int8").units[0].gather_payload_bytes > 0


# --------------------------------------------------------------------------------------------------- time


def test_a_slow_link_takes_the_time_of_fewer_bytes() -> None:
    """With nothing else to wait for, a step takes its bytes over the rate."""
    slow = node(2e6, devices=1)
    exact, gathers, both = (
        simulated(slow, **given) for given in ({}, {"gather_dtype": "int8"}, {"gather_dtype": "int8", **BOTH})
    )
    psi = 2 * sum(unit.full_bytes // 2 for unit in sizes_of().units)
    for found, expected in ((exact, 3.0), (gathers, 2 * 0.515625 + 1), (both, 3 * 0.515625)):
        assert found.step == pytest.approx(expected * psi * 3 / 4 / 2e6, rel=0.02)


def test_kernels_take_time_where_links_are_free() -> None:
    machine = node(bandwidth=1e9, op=0, unit=0, gap=0)  # memory is the limit
    exact, gathers, wire = (simulated(machine, **given) for given in ({}, *({name: "int8"} for name in BOTH)))
    units = sizes_of(**BOTH).units
    passed = 2 * sum(unit.cast_bytes + unit.dequantize_bytes for unit in units)  # in forward and in backward
    first = min(unit.dequantize_bytes for unit in units)  # nothing is computed before the first unit is there
    assert first <= (gathers.step - exact.step) * 1e9 <= passed
    assert wire.reduce > exact.reduce


# ------------------------------------------------------------------------------------------------- memory


def peak_of(**options: Any) -> Any:
    trace = trace_model(gpt(), micro_batch=2, precision="bf16")
    return footprint(trace, sizes_of(**options), MemoryConditions(), timeline=True)


def test_a_payload_is_held_while_a_unit_is_gathered() -> None:
    exact, gathers = peak_of(), peak_of(gather_dtype="int8")
    payloads = [unit.gather_payload_bytes for unit in sizes_of(gather_dtype="int8").units]
    differences = [after.total - before.total for before, after in zip(exact.timeline, gathers.timeline, strict=True)]
    assert min(differences) == 0 and 0 < max(differences) <= max(payloads)
    assert set(differences) & set(payloads)  # one unit at a time, the one in flight
    assert exact.timeline[-1].total == gathers.timeline[-1].total  # the step


def test_a_slot_of_the_ring_has_two_payloads() -> None:
    exact, wire = sizes_of(), sizes_of(reduce_wire="int8")
    longest = max(unit.reduce_bytes // 2 for unit in exact.units)
    added = wire.ring_bytes - exact.ring_bytes
    assert 2 * 2 * payload_bytes(longest) <= added <= 2 * 2 * payload_bytes(longest) * 4 / 3
    assert added == wire.receive_buffer_bytes and exact.receive_buffer_bytes == 0
    bucket = wire.units[1].buckets[0]
    assert bucket.receive_buffer_bytes >= 2 * payload_bytes(wire.units[1].reduce_bytes // 2)
    found = {
        name: predict_memory(gpt(), ranks=4, stage=3, precision="bf16", **given).transient
        for name, given in (("exact", {}), ("both", BOTH))
    }
    assert found["both"]["buckets"] - found["exact"]["buckets"] == added
    payload = max(unit.gather_payload_bytes for unit in sizes_of(**BOTH).units)
    assert found["both"]["gathered"] - found["exact"]["gathered"] == payload


def test_inner_shards_are_payloads() -> None:
    """Hierarchical: what a rank keeps of other nodes' parameters has 8 bits too."""
    exact, kept = (
        sizes_of(8, 2, partition="hierarchical", gather_dtype=given).states["parameters"] for given in (None, "int8")
    )
    psi = sum(unit.full_bytes for unit in sizes_of(8, 2, partition="hierarchical").units) // 2
    assert exact == 2 * psi // 4 and kept == pytest.approx(psi * (1 + 1 / 32) / 4, rel=0.01)


def test_error_feedback_takes_a_gradient() -> None:
    plain, kept = (sizes_of(stage=2, reduce_wire="int8", error_feedback=given) for given in (False, True))
    assert kept.states["error feedback"] == sum(unit.reduce_bytes for unit in kept.units)
    assert {kind: nbytes for kind, nbytes in kept.states.items() if kind != "error feedback"} == plain.states
    options: dict[str, Any] = {"stage": 2, "reduce_wire": "int8", "error_feedback": True, "precision": "bf16"}
    found = predict_memory(gpt(), ranks=4, **options)
    assert found.states["error feedback"] == kept.states["error feedback"]
    assert kept.units[0].reduce_kernel_bytes > plain.units[0].reduce_kernel_bytes
    candidates = planned(1e6, devices=4, allow_lossy=True, stage=2, replicas=1, error_feedback=True).candidates
    feedback = {one.strategy.wire_summary: one.footprint.states.get("error feedback", 0) for one in candidates}
    assert feedback == {"": 0, "int8 reductions": kept.states["error feedback"]}


# -------------------------------------------------------------------------------------------------- plans


def planned(rate: float, **given: Any) -> Plans:
    return plan(gpt(), **{"devices": 8, "machine": node(rate), "batch": 16, **OPEN, **given})


def test_nothing_lossy_is_tried_unless_it_is_allowed() -> None:
    assert not any(found.strategy.is_lossy for found in planned(1e6).candidates)
    wires = {found.strategy.wire_summary for found in planned(1e6, allow_lossy=True, stage=3).candidates}
    assert wires == {"", "int8 gathers", "int8 reductions", "int8 gathers, int8 reductions"}
    for stage, expected in ((0, {""}), (1, {"", "int8 reductions"}), (2, {"", "int8 reductions"})):
        found = planned(1e6, allow_lossy=True, stage=stage).candidates
        assert {one.strategy.wire_summary for one in found} == expected
    hybrid = planned(1e6, allow_lossy=True, stage=3, replicas=2, partition="hybrid").candidates
    assert {one.strategy.wire_summary for one in hybrid} == {"", "int8 gathers"}
    kept = planned(1e6, allow_lossy=True, stage=2, reduce_dtype="fp32").candidates
    assert not any(one.strategy.is_lossy for one in kept)
    assert not any(
        one.strategy.is_lossy for one in plan(gpt(), devices=1, allow_lossy=True, batch=2, **OPEN).candidates
    )


def test_what_is_named_is_allowed_and_restricts_the_search() -> None:
    found = planned(1e6, gather_dtype="fp8").candidates
    assert {(one.strategy.stage, one.strategy.wire_summary) for one in found} == {(3, "fp8 gathers")}
    found = planned(1e6, gather_dtype=("none", "int8"), reduce_wire="int8", stage=3, replicas=1).candidates
    assert {one.strategy.wire_summary for one in found} == {"int8 reductions", "int8 gathers, int8 reductions"}
    found = planned(1e6, allow_lossy=True, gather_dtype="none", stage=3).candidates
    assert {one.strategy.wire_summary for one in found} == {"", "int8 reductions"}


def test_8_bits_are_chosen_for_a_slow_link_and_the_reason_is_told() -> None:
    slow = planned(1e6, allow_lossy=True, stage=3, replicas=1, machine=node(1e6, devices=1))
    exact = planned(1e6, stage=3, replicas=1, machine=node(1e6, devices=1))
    assert slow.best is not None and slow.best.strategy.wire_summary == "int8 gathers, int8 reductions"
    assert exact.best is not None
    gain = f"{slow.best.samples_per_second / exact.best.samples_per_second:.2f}"
    assert gain == "1.94"  # 2 bytes to 1 and 1/32
    assert f"reductions change the numbers, and are {gain} × as fast as the best without (stage 3, mic" in slow.reason
    fast = planned(1e14, allow_lossy=True, stage=3, replicas=1)
    assert fast.best is not None and not fast.best.strategy.is_lossy
    assert "change the numbers" not in fast.reason
    assert "numbers" not in planned(1e6).reason


def test_an_all_to_all_leaves_nodes_once_if_it_has_two_hops() -> None:
    """Over one axis every device of a node sends its own values to other nodes; a ring has summed them before."""
    one_axis = planned(1e6, allow_lossy=True, stage=3, replicas=1)
    assert one_axis.best is not None and one_axis.best.strategy.wire_summary == "int8 gathers"
    meshes = {one.strategy.partition for one in planned(1e6, allow_lossy=True, stage=2).candidates}
    assert meshes == {"hybrid", "full", "inner-gradients"}
    assert {one.strategy.partition for one in planned(1e6, stage=2).candidates} == {"hybrid", "inner-gradients"}
    two_hops = planned(1e6, allow_lossy=True, stage=3, replicas=2, partition="full")
    assert two_hops.best is not None and two_hops.best.strategy.wire_summary == "int8 gathers, int8 reductions"


def test_a_small_gain_does_not_change_the_numbers() -> None:
    exact, lossy = (planned(1e6, stage=3, replicas=1, micro_batch=2, **given).candidates[0] for given in ({}, BOTH))
    assert lossy.score == pytest.approx(lossy.samples_per_second * LOSSY_SCORE_FACTOR**2)
    assert exact.score == exact.samples_per_second


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gather_dtype": "int4"}, "gather_dtype must be one of none, int8, fp8, got 'int4'"),
        ({"reduce_wire": ()}, "reduce_wire is empty"),
        ({"gather_dtype": "int8", "stage": 2}, "no strategy of this search supports these 8-bit collectives"),
        ({"reduce_wire": "int8", "reduce_dtype": "fp32"}, "no reduce_dtype='fp32'"),
        ({"reduce_wire": "int8", "stage": 3, "replicas": 2, "partition": "hybrid"}, "no replicas of partition"),
    ],
)
def test_8_bits_that_shard_rejects_are_not_planned(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        planned(1e6, **given)


# --------------------------------------------------------------------------------------------------- auto


def sharded(machine: Machine, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[Config], str, Plans]:
    """The options that two ranks choose, why, and all plans that were tried."""
    tried: list[Plans] = []
    monkeypatch.setattr(auto, "plan", lambda *args, **kwargs: tried.append(plan(*args, **kwargs)) or tried[-1])
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    model = GPT(replace(SHAPE, vocab_size=64, context=8, layers=2, width=16))

    def body(rank: int) -> tuple[Config, str]:
        mine = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(mine.parameters())
        asked = {"stage": "auto", "inputs": (tokens, tokens), "planning": {"machine": machine}, **options}
        mine, _ = zeroshard.shard(mine, optimizer, **asked)
        return mine._zeroshard.engine.context.config, zeroshard.report(mine).chosen

    found = run_threads(2, body)
    return [config for config, _ in found], found[0][1], tried[0]


SLOW_CPU = Machine.resolve(
    "cpu", inside=Link(bandwidth=1e5, latency=0), outside=Link(bandwidth=1e5, latency=0), name="slow"
)


def test_auto_uses_8_bits_only_if_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    configs, why, plans = sharded(SLOW_CPU, monkeypatch)
    assert all((config.gather_dtype, config.reduce_wire) == (None, None) for config in configs)
    assert not any(found.strategy.is_lossy for found in plans.candidates) and "int8" not in why
    configs, why, plans = sharded(SLOW_CPU, monkeypatch, allow_lossy=True)
    assert {config.reduce_wire for config in configs} == {"int8"} and "change the numbers" in why
    assert plans.best is not None and {config.stage for config in configs} == {plans.best.strategy.stage}


def test_auto_keeps_8_bits_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    configs, _, plans = sharded(SLOW_CPU, monkeypatch, gather_dtype="int8")
    assert {found.strategy.stage for found in plans.candidates} == {3}
    assert {(config.stage, config.gather_dtype, config.reduce_wire) for config in configs} == {(3, "int8", None)}


def test_to_allow_without_a_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="allow_lossy is for planning, and nothing is left to a plan"):
        zeroshard.shard(nn.Linear(4, 4), stage=3, allow_lossy=True)


def test_a_decision_has_the_8_bits() -> None:
    decision = auto.PlanDecision(Strategy(gather_dtype="int8", reduce_wire="fp8"), "it is fast")
    assert auto.PlanDecision.from_json(decision.as_json) == decision
