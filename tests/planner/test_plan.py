"""Plans: what every choice takes, which fit, and which is chosen."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from pairs import at_stages, every_stage
from test_traffic import moved_bytes
from torch import nn

from zeroshard.config.config import Config
from zeroshard.config.offload import Offload
from zeroshard.models import GPT, GPTConfig
from zeroshard.planner import traced_model
from zeroshard.planner.footprint import MemoryConditions, footprint
from zeroshard.planner.machines.machine import Link, Machine
from zeroshard.planner.plan_json import plans_to_dict
from zeroshard.planner.plans import Plan, Plans, evaluate_strategy, plan
from zeroshard.planner.state_sizes import state_sizes
from zeroshard.planner.step_time import (
    ADAM_BYTES_PER_PARAM,
    MAX_SIMULATED_BACKWARDS,
    TRANSFER_BYTES_PER_PARAM,
    StepConditions,
    TraceCost,
    step_time,
)
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.traced_model import TracedModel, TrainingLoop
from zeroshard.planner.tracing.trace_model import trace_model

pytestmark = pytest.mark.usefixtures("traced_once")

SMALL = GPTConfig(vocab_size=512, context=32, layers=4, heads=4, width=64)
NODE = Machine.resolve("h100", devices=4)


def gpt(**changes: Any) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(**{**vars(SMALL), **changes}))


def replayed(
    stage: int, ranks: int, machine: Machine = NODE, accumulate: int = 1, model: Any = None, **options: Any
) -> Any:
    model = model or gpt()
    work = TraceCost.from_trace(
        traced_model.trace_model(model, micro_batch=2, precision="bf16", device_kind=machine.kind), machine
    )
    held = state_sizes(model, Config(stage=stage, precision="bf16", **options), ranks=ranks)
    return step_time(work, held, machine, StepConditions(ranks=ranks, accumulate=accumulate))


# ------------------------------------------------------------------------------------------------ traffic


@every_stage
@pytest.mark.parametrize(
    ("ranks", "accumulate", "partition"),
    [
        (2, 1, None),
        (3, 2, None),
        (4, 2, "hybrid"),
        (4, 2, "hierarchical"),
        (4, 1, "full"),
        (4, 3, "hierarchical-gradients"),
        (4, 2, "inner-gradients"),
    ],
)
def test_traffic_is_what_a_run_communicates(stage: int, ranks: int, accumulate: int, partition: str | None) -> None:
    config = GPTConfig(vocab_size=64, context=8, layers=2, heads=2, width=16)
    replicas = 1 if partition is None else 2
    options = {"stage": stage, "partition": partition or "hybrid"}

    model = GPT(config)
    machine = Machine.resolve("cpu")
    work = TraceCost.from_trace(trace_model(model, micro_batch=2, device_kind="cpu"), machine)
    held = state_sizes(model, Config(**options), ranks=ranks // replicas, replicas=replicas, on_gpu=False)
    conditions = StepConditions(ranks=ranks, replicas=replicas, accumulate=accumulate)
    foretold = step_time(work, held, machine, conditions).traffic
    mesh_shape = (ranks,) if partition is None else (replicas, ranks // replicas)
    for measured in moved_bytes(model, "adamw", mesh_shape, accumulate, **options):
        assert {kind: nbytes for kind, nbytes in foretold.items() if nbytes} == pytest.approx(
            measured, rel=0.002, abs=400
        )  # flags and digests


def test_a_slow_link_between_nodes_is_crossed_once_a_step() -> None:
    """Of 3Ψ between nodes for each backward, a hierarchical partition leaves one gather and one reduction."""

    def best(outside: float, **options: Any) -> Strategy:
        machine = replace(NODE, outside=Link(bandwidth=outside, latency=0), inside=Link(bandwidth=200e9, latency=0))
        options = {"checkpoint": "none", "offload": None, "tensor": 1, "stage": 3, "batch": 128, **options}
        found = plan(gpt(), devices=16, machine=machine, micro_batch=2, **options).best
        assert found is not None
        return found.strategy

    slow = best(1e8)  # as fast as "hierarchical", with less traffic
    assert (slow.replicas, slow.partition, slow.accumulate) == (4, "hierarchical-gradients", 4)
    assert best(1e8, partition=["hybrid", "hierarchical", "full"]).partition == "hierarchical"
    assert best(1e6, stage=2).partition == "inner-gradients"
    assert best(1e6, batch=32).partition == "hierarchical"  # with one backward a step it is the same
    assert (best(1e13).replicas, best(1e8, replicas=1).replicas) == (1, 1)
    assert best(1e8, replicas=2, partition="full").partition == "full"
    with pytest.raises(ValueError, match="16 data-parallel ranks cannot be divided into 3 replicas"):
        best(1e8, replicas=3)
    with pytest.raises(ValueError, match=r"partition must be one of hybrid, hierarchical, full, .*, got 'node'"):
        best(1e8, partition="node")


def test_a_plan_has_no_partition_that_shard_rejects() -> None:
    """Stage 3 keeps inner shards on the device, and needs an inner axis of several ranks."""
    options: dict[str, Any] = {"devices": 8, "machine": NODE, "batch": 16, "checkpoint": "none", "tensor": 1}
    found = plan(gpt(), partition="hierarchical", replicas=2, **options).candidates
    assert {candidate.strategy.partition for candidate in found} == {"hierarchical"}
    offloads = [candidate.strategy.offload for candidate in found if candidate.strategy.stage == 3]
    assert any(offload is not None for offload in offloads)
    assert not any(offload is not None and offload.parameters for offload in offloads)
    found = plan(gpt(), partition="hierarchical", replicas=8, **options).candidates
    assert {candidate.strategy.stage for candidate in found} == {0, 1, 2}
    with pytest.raises(ValueError, match="no strategy of this search supports partition='hierarchical'"):
        plan(gpt(), partition="hierarchical", replicas=8, stage=3, **options)
    found = plan(gpt(), partition="hierarchical-gradients", replicas=8, **options).candidates
    assert {candidate.strategy.stage for candidate in found} == {0, 1}
    found = plan(gpt(), partition="inner-gradients", replicas=2, stage=3, **options).candidates
    offloads = [candidate.strategy.offload for candidate in found]
    assert any(offload is not None and offload.parameters for offload in offloads)


def test_inner_sums_take_memory_between_the_backwards_of_a_step() -> None:
    """With several backwards a device has 2Ψ/N_i bytes of inner sums at the loss, and 2Ψ/N of gradients at the step."""
    options: dict[str, Any] = {"devices": 16, "machine": NODE, "checkpoint": "none", "tensor": 1, "stage": 3}
    options |= {"offload": None, "micro_batch": 2, "replicas": 4, "precision": "bf16"}

    def peak(partition: str, batch: int) -> float:
        (found,) = plan(gpt(), partition=partition, batch=batch, **options).candidates
        return found.footprint.peak.total

    psi = sum(parameter.numel() for parameter in gpt().parameters())
    assert peak("hierarchical-gradients", 32) == peak("hierarchical", 32)
    more = peak("hierarchical-gradients", 128) - peak("hierarchical", 128)
    assert 2 * psi * (1 / 4 - 1 / 16) * 0.5 < more < 2 * psi / 4 * 1.1


def test_one_device_communicates_nothing() -> None:
    assert replayed(3, 1).traffic == {}
    assert replayed(2, 1).exposed_communication == 0


# ------------------------------------------------------------------------------------------------ time


def test_the_parts_of_a_step_add_up() -> None:
    for stage in range(4):
        for machine in (NODE, replace(NODE, op=1e-3), replace(NODE, inside=Link(bandwidth=1e6, latency=1e-4))):
            found = replayed(stage, 4, machine)
            parts = found.compute + found.exposed_communication + found.launch + found.update
            assert found.step == pytest.approx(parts, rel=0.05), (stage, machine)


def test_a_slow_wire_is_waited_for_and_a_fast_one_is_hidden() -> None:
    wide = gpt(width=1024, layers=6)
    fast, slow = (
        replayed(3, 4, replace(NODE, op=0.0, unit=0.0, inside=Link(bandwidth=rate, latency=0)), model=wide)
        for rate in (1e15, 1e9)
    )
    assert fast.exposed_communication < 0.03 * fast.step  # each gradient is packed, which no wire makes faster
    wire = 3 * 2 * sum(parameter.numel() for parameter in wide.parameters()) * 0.75 / 1e9
    assert wire * 0.9 < slow.step < 1.5 * (wire + fast.step)


def test_latencies_of_all_gathers_and_reductions_overlap() -> None:
    """They have streams of their own, and a collective that waits for a message does not use the network."""
    model, late = gpt(layers=12), Link(bandwidth=1e15, latency=1.0)
    machine = replace(NODE, op=0.0, unit=0.0, inside=late)
    units = len(state_sizes(model, Config(stage=3, precision="bf16"), ranks=2).units)
    assert 12 <= units <= 14
    stage3, stage2 = (replayed(stage, 2, machine, model=model).step for stage in (3, 2))
    assert stage3 == pytest.approx(2 * units, abs=4)  # backward gathers the next unit while it reduces the last one
    assert stage2 == pytest.approx(2 * units, abs=1)  # its all-gathers follow its reductions


@at_stages(0, 1)
def test_replicated_gradients_are_reduced_during_the_last_backward(stage: int) -> None:
    """All but the last unit's reductions overlap, if the wire is fast enough; once a step."""
    wide, wire = gpt(width=1024, layers=6), Link(bandwidth=2e12, latency=0)
    machine = replace(NODE, op=0.0, unit=0.0, inside=wire)
    work = TraceCost.from_trace(trace_model(wide, micro_batch=2, precision="bf16"), machine)
    held = state_sizes(wide, Config(stage=stage, precision="bf16"), ranks=4)
    for accumulate in (1, 3):
        inside, after = (
            step_time(
                work, held, machine, StepConditions(ranks=4, accumulate=accumulate, reduces_in_backward=in_backward)
            )
            for in_backward in (True, False)
        )
        assert inside.traffic == after.traffic
        assert 0 < inside.reduce < 0.5 * after.reduce
        assert inside.step + 0.9 * (after.reduce - inside.reduce) < after.step


def test_a_slow_host_is_the_limit() -> None:
    slow = replayed(3, 1, replace(NODE, op=1e-2))
    operations = sum(op.kind != "nothing" for op in trace_model(gpt(), micro_batch=2, precision="bf16").ops)
    assert slow.step == pytest.approx(operations * 1e-2, rel=0.1)
    assert slow.launch > 0.9 * slow.step


@pytest.mark.parametrize("offload", [None, "host"])
def test_many_backwards_are_as_many_replayed(offload: Any) -> None:
    """Beyond a few they are no longer replayed, and take what they would."""
    times = [replayed(2, 4, accumulate=n, offload=offload).step for n in range(1, MAX_SIMULATED_BACKWARDS + 3)]
    assert times[-1] - times[-2] == pytest.approx(
        times[MAX_SIMULATED_BACKWARDS - 1] - times[MAX_SIMULATED_BACKWARDS - 2]
    )
    assert times == sorted(times)


def test_the_hosts_updates_hide_as_far_as_they_can() -> None:
    model = gpt(width=1024, layers=8)
    psi = sum(parameter.numel() for parameter in model.parameters())
    near = replayed(3, 1, model=model).step
    for rate in (1e12, 3e9, 1e8):
        found = replayed(3, 1, replace(NODE, host_update=rate, pcie=1e14), model=model, offload="host").step
        busy = (
            psi / rate * (1 + TRANSFER_BYTES_PER_PARAM / ADAM_BYTES_PER_PARAM)
        )  # what passes its memory by itself takes its part of it
        assert max(0.9 * near, busy) <= found * 1.1
        assert found < 1.1 * near + busy
    half = replayed(3, 1, replace(NODE, host_update=1e8), model=model, offload={"optimizer": ("host", 0.5)}).step
    assert half < replayed(3, 1, replace(NODE, host_update=1e8), model=model, offload="host").step


def test_disk_costs_its_bytes() -> None:
    model = gpt(width=512)
    psi = sum(parameter.numel() for parameter in model.parameters())
    slow = replace(NODE, disk_read=1e9, disk_write=1e9)
    found = replayed(3, 1, slow, model=model, offload={"optimizer": "disk", "directory": "."})
    assert found.step > 2 * 12 * psi / 1e9
    assert found.traffic["disk"] == pytest.approx(2 * 12 * psi, rel=0.05)


# ------------------------------------------------------------------------------------------------ memory


def test_the_timeline_ends_where_it_begins_and_has_the_peak() -> None:
    model = gpt()
    found = footprint(
        trace_model(model, micro_batch=4, precision="bf16"),
        state_sizes(model, Config(stage=3, precision="bf16"), ranks=4),
        timeline=True,
    )
    assert max(moment.total for moment in found.timeline) == found.peak.total
    assert found.timeline[-1].label == "step"
    assert found.timeline[-2].by_kind["activations"] == found.timeline[0].by_kind["activations"] == 0
    assert all(value >= 0 for moment in found.timeline for value in moment.by_kind.values())


def test_prefetch_costs_a_unit_and_stages_hold_less_and_less() -> None:
    model = gpt(width=256, vocab_size=64)
    traced = trace_model(model, micro_batch=1, precision="bf16")
    peaks = [
        footprint(traced, state_sizes(model, Config(stage=stage, precision="bf16"), ranks=64)).peak.total
        for stage in range(4)
    ]
    assert peaks == sorted(peaks, reverse=True)
    held = state_sizes(model, Config(stage=3, precision="bf16"), ranks=64)
    with_it, without = (
        footprint(traced, held, MemoryConditions(prefetch=on)).peak.by_kind["gathered"] for on in (True, False)
    )
    assert with_it == pytest.approx(2 * without)


# ------------------------------------------------------------------------------------------------ choosing


def plans(memory: str = "80GB", devices: int = 4, **options: Any) -> Plans:
    return plan(gpt(**options.pop("model", {})), devices=devices, machine=NODE, memory=memory, sequence=32, **options)


def test_every_choice_is_looked_at() -> None:
    found = plans(batch=64)
    chosen = [row.strategy for row in found.fastest_per_strategy()]
    assert {choice.stage for choice in chosen} == {0, 1, 2, 3}
    assert {choice.tensor for choice in chosen} == {1, 2, 4}
    assert {choice.checkpoint for choice in chosen} == {"none", "recompute", "host"}
    assert {"nothing", "optimizer host", "optimizer host, parameters host"} <= {
        choice.offload_summary for choice in chosen
    }
    assert all(
        one.strategy.micro_batch * one.strategy.accumulate * 4 // one.strategy.tensor == 64 for one in found.candidates
    )


@pytest.fixture(scope="module")
def less_and_less() -> list[Plans]:
    """The plans for devices with less and less memory."""
    return [plans(memory, batch=32, tensor=1) for memory in ("80GB", "900MB", "750MB")]


def test_the_best_is_as_fast_as_any_that_fits_and_says_so(less_and_less: list[Plans]) -> None:
    for found in less_and_less:
        best, fastest = found.best, found.fitting[0]
        assert best is not None and best.memory <= found.machine.memory
        assert all(other.score * 0.99 <= best.score for other in found.fitting)
        assert found.reason.startswith(f"{best.strategy.description}: ")
        says_fastest = ": the fastest of" in found.reason
        assert says_fastest == (best.samples_per_second == fastest.samples_per_second)


def altered(base: Plan, step: float, traffic: float = 1.0, memory: float = 0.0, **strategy: Any) -> Plan:
    """A plan whose step, traffic and memory are other than those of ``base``."""
    peak = replace(base.footprint.peak, by_kind={"states": base.footprint.peak.total + memory})
    footprint = replace(base.footprint, peak=peak)
    found = replace(base, strategy=replace(base.strategy, **strategy), footprint=footprint)
    kinds = {kind: traffic * nbytes for kind, nbytes in base.step_time.traffic.items()}
    vars(found)["step_time"] = replace(base.step_time, step=step * base.step_time.step, traffic=kinds)
    return found


def test_of_equally_fast_plans_the_least_traffic_then_the_least_memory_is_chosen() -> None:
    found = plans(batch=32, tensor=1, stage=3, checkpoint="none", offload=None, micro_batch=8)
    base = found.candidates[0]
    loud, large = altered(base, 0.995, traffic=2, stage=2), altered(base, 1.0, traffic=1.005, memory=1e6, stage=1)
    same = altered(base, 1.0, stage=0)
    for candidates in itertools.permutations((base, loud, large, same)):
        chosen = replace(found, candidates=candidates)
        assert chosen.best is same  # as base, but for its description, the last word
        assert "the one with the least traffic, then memory, within 1% of the best speed (stage 2, " in chosen.reason
        assert "is 1.005 × as fast)" in chosen.reason and "the fastest" not in chosen.reason
        data = plans_to_dict(chosen)
        assert candidates[data["chosen"]] is same and data["reason"] == chosen.reason
    fast, far = altered(base, 0.98), altered(base, 0.97, offload=Offload(optimizer="host"))
    assert replace(found, candidates=(base, fast, loud)).best is fast
    assert ": the fastest of 3 plans that fit (0 do not), " in replace(found, candidates=(base, fast, loud)).reason
    assert "is 1.031 × as fast, but counts with 95% of that)" in replace(found, candidates=(base, far)).reason
    assert ": as fast as any of 2 plans" in replace(found, candidates=(base, altered(base, 0.9999, 2))).reason


def test_a_batch_that_is_huge_is_planned() -> None:
    found = plans(batch=4 * 10**12, tensor=1, stage=3, checkpoint="none", offload=None, micro_batch=None)
    assert found.best is not None and found.best.batch == 4 * 10**12


def test_less_memory_never_makes_it_faster(less_and_less: list[Plans]) -> None:
    samples = [found.best.score for found in less_and_less if found.best is not None]
    assert samples == sorted(samples, reverse=True)


def test_nothing_fits() -> None:
    found = plans("640MB", batch=32, tensor=1, model={"width": 256, "layers": 8})
    assert found.best is None
    assert found.reason.startswith("nothing fits: even with stage 3")
    assert "per device, but a device has 640.00 MB" in found.reason


def test_the_hosts_memory_and_the_disk_are_limits_too() -> None:
    traced_model = TracedModel(gpt(width=512), precision="bf16")
    small = replace(NODE, host_memory=10**6, disk=10**6)
    far = Strategy(stage=3, offload=Offload(optimizer="host"))
    assert "of host memory" in evaluate_strategy(traced_model, far, 4, small).shortfall
    disk = Strategy(stage=3, offload=Offload(optimizer="disk", directory="."))
    assert "of disk" in evaluate_strategy(traced_model, disk, 4, replace(small, host_memory=10**12)).shortfall
    assert evaluate_strategy(traced_model, far, 4, NODE).fits


def test_what_is_given_is_kept_to() -> None:
    found = plans(batch=32, stage=2, tensor=2, checkpoint="recompute", offload=None, micro_batch=[2, 4])
    chosen = [one.strategy for one in found.candidates]
    assert {(c.stage, c.tensor, c.checkpoint, c.offload) for c in chosen} == {(2, 2, "recompute", None)}
    assert [c.micro_batch for c in chosen] == [2, 4]


def test_a_model_without_blocks_or_a_plan() -> None:
    found = plan(nn.Linear(8, 8), torch.empty(1, 8), devices=2, machine=NODE, batch=4)
    assert {(one.strategy.tensor, one.strategy.checkpoint) for one in found.candidates} == {(1, "none")}


def test_a_cpu_is_a_machine_too() -> None:
    found = plan(gpt(), devices=2, machine="cpu", batch=8, sequence=32)
    assert found.precision == "fp32"
    assert found.best is not None and found.best.strategy.offload is None


def test_bad_input_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="devices must be an integer of at least 1, got 0"):
        plans(devices=0)
    with pytest.raises(ValueError, match="unknown machine 'h10': did you mean 'h100'"):
        plan(gpt(), devices=1, machine="h10")
    with pytest.raises(ValueError, match="stage must be one of 0, 1, 2, 3, got 4"):
        plans(stage=4)
    with pytest.raises(ValueError, match="checkpoint must be one of none, recompute, host, got 'some'"):
        plans(checkpoint="some")
    with pytest.raises(ValueError, match="devices \\(4\\) must be a multiple of the tensor degree \\(3\\)"):
        plans(tensor=3)
    with pytest.raises(ValueError, match="batch must be a positive integer, got 0"):
        plans(batch=0)
    with pytest.raises(ValueError, match="'dgx2' does not support bf16, only fp32 and fp16"):
        plan(gpt(), devices=1, machine="dgx2", precision="bf16")
    with pytest.raises(ValueError, match="memory is a number of bytes, or one with a unit"):
        plans("lots")
    with pytest.raises(ValueError, match="batch 7 cannot be divided over 4 devices"):
        plans(batch=7, tensor=1)


# ------------------------------------------------------------------------------------------------ deep models


def test_a_deep_model_is_traced_by_a_few_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    depths = []
    real = trace_model

    def noted(model: Any, *args: Any, **given: Any) -> Any:
        depths.append(len(model.blocks))
        return real(model, *args, **given)

    monkeypatch.setattr("zeroshard.planner.traced_model.trace_model", noted)
    deep = gpt(layers=12)
    found = plan(
        deep, devices=2, machine=NODE, batch=8, sequence=32, stage=3, checkpoint="none", offload=None, tensor=1
    )
    assert depths.count(12) == 1  # to confirm the choice
    assert set(depths) == {2, 3, 12}
    shallow = TracedModel(deep, TrainingLoop(sequence=32, has_clipping=True), precision="bf16")
    shallow._extrapolated_depth = 0
    for one in found.candidates:
        assert evaluate_strategy(shallow, one.strategy, 2, NODE).footprint.peak == one.footprint.peak
        assert evaluate_strategy(shallow, one.strategy, 2, NODE).step_time == one.step_time


class Uneven(nn.Module):
    """Blocks that look equal; the seventh does more."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x) if number != 6 else block(torch.cat([x] * 16)).chunk(16)[0]
        return x.sum()


def test_a_model_whose_blocks_differ_is_traced_whole() -> None:
    found = plan(Uneven(), torch.empty(1, 64), devices=1, machine=NODE, batch=64, micro_batch=64, checkpoint="none")
    assert found.best is not None
    traced = trace_model(Uneven(), torch.empty(1, 64), micro_batch=64, precision="bf16")
    assert found.best.footprint.peak.by_kind["activations"] == max(
        moment.by_kind["activations"]
        for moment in footprint(
            traced, state_sizes(Uneven(), Config(precision="bf16", stage=3), ranks=1), timeline=True
        ).timeline
    )


class Contrast(nn.Module):
    """Compares every sample with every other: memory grows with the square of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.linear(x)
        return torch.logsumexp(z @ z.t(), dim=1).sum()


def test_what_is_chosen_fits_though_memory_is_not_linear() -> None:
    machine = replace(Machine.resolve("cpu", memory="40MB", context=0), devices=1)
    found = plan(Contrast(), torch.empty(1, 64), devices=1, machine=machine)
    best = found.best
    assert best is not None and best.strategy.micro_batch > 64
    traced = trace_model(Contrast(), torch.empty(1, 64), micro_batch=best.strategy.micro_batch, device_kind="cpu")
    held = state_sizes(Contrast(), Config(stage=3), ranks=1, on_gpu=False)
    real = footprint(traced, held, MemoryConditions(on_gpu=False)).peak.total
    assert real == best.footprint.peak.total <= 40e6


def test_choices_that_are_none_are_refused() -> None:
    for name, value, words in (
        ("micro_batch", 0, "micro_batch must be a positive integer, got 0"),
        ("micro_batch", [], "micro_batch is empty"),
        ("stage", [], "stage is empty"),
        ("checkpoint", [], "checkpoint is empty"),
        ("offload", [], "offload is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            plans(**{name: value})


def test_stages_that_cannot_offload_what_is_asked_are_left_out() -> None:
    far = {"optimizer": "host", "parameters": "host"}
    assert {one.strategy.stage for one in plans(batch=16, tensor=1, offload=far).candidates} == {3}
    with pytest.raises(ValueError, match="stage 1 keeps full parameters on every rank"):
        plans(batch=16, tensor=1, offload=far, stage=1)
