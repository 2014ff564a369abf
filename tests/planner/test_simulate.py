"""Scaling on paper: sweeps over devices and stages, the largest model, and the shallow traces that both stand on."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zeroshard.config.config import Config
from zeroshard.config.offload import Offload
from zeroshard.models import GPT, GPTConfig
from zeroshard.planner import predict_traffic
from zeroshard.planner.commands.simulate import main
from zeroshard.planner.commands.simulate_output import largest_table, simulation_table
from zeroshard.planner.depth_extrapolation import NonUniformBlocksError, extrapolate_state_sizes, extrapolate_trace
from zeroshard.planner.machines.machine import Link, Machine
from zeroshard.planner.plans import evaluate_strategy, plan
from zeroshard.planner.scaling import largest_model as searching
from zeroshard.planner.scaling.largest_model import (
    LargestModel,
    find_deepest_member,
    find_family,
    gpt_family,
)
from zeroshard.planner.scaling.sweep import ScalingPoint, ScalingSimulation, simulate
from zeroshard.planner.state_sizes import state_sizes
from zeroshard.planner.strategy import Strategy
from zeroshard.planner.traced_model import TracedModel
from zeroshard.planner.tracing.trace_model import trace_model

pytestmark = pytest.mark.usefixtures("traced_once")

SHAPE = GPTConfig(vocab_size=512, context=64, heads=4, width=256)
LARGER = GPTConfig(vocab_size=1024, context=256, heads=8, width=1024, layers=6)


def gpt(layers: int, shape: GPTConfig = SHAPE) -> GPT:
    with torch.device("meta"):
        return GPT(replace(shape, layers=layers))


# ------------------------------------------------------------------------------------------ deepened models


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tensor": 2, "checkpoint": "recompute", "precision": "fp16"},
        {"tensor": 4, "checkpoint": "recompute", "partition_activations": False},
        {"tensor": 2, "precision": "bf16", "device_kind": "cpu"},
    ],
)
def test_a_deepened_trace_is_the_deep_models_own(given: dict[str, Any]) -> None:
    two, three, six = (trace_model(gpt(layers), micro_batch=3, **given) for layers in (2, 3, 6))
    assert extrapolate_trace(two, three, 3) == six
    assert extrapolate_trace(two, three, 0) == three


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("bucket_size", [2**14, 2**20, 2**27])
def test_deepened_holdings_are_the_deep_models_own(precision: str, bucket_size: int) -> None:
    for stage in range(4):
        config = Config(stage=stage, precision=precision, bucket_size=bucket_size)
        two, three, seven = (state_sizes(gpt(layers), config, ranks=8, tensor=2) for layers in (2, 3, 7))
        assert extrapolate_state_sizes(two, three, 4, bucket_size) == seven


def test_a_family_has_the_models_that_its_shape_makes() -> None:
    family = find_family(gpt(5))
    assert family is not None
    ours, plain = family(5), gpt(5)
    assert [(n, p.shape) for n, p in ours.named_parameters()] == [(n, p.shape) for n, p in plain.named_parameters()]
    assert all(parameter.is_meta for parameter in ours.parameters())
    assert TracedModel.from_family(family, 5).parameters == sum(parameter.numel() for parameter in plain.parameters())
    assert find_family(nn.Linear(2, 2)) is None


def test_a_deep_subject_is_planned_as_the_model_itself() -> None:
    machine = Machine.resolve("dgx2")
    deep, plain = TracedModel.from_family(gpt_family(SHAPE), 5, precision="fp16"), TracedModel(gpt(5), precision="fp16")
    for stage, offload in ((0, None), (2, None), (3, None), (2, Offload(optimizer=("host", 0.5)))):
        choice = Strategy(stage=stage, tensor=2, checkpoint="recompute", micro_batch=3, offload=offload)
        ours, theirs = (evaluate_strategy(subject, choice, 32, machine) for subject in (deep, plain))
        assert ours.footprint == theirs.footprint and ours.useful_flops == pytest.approx(theirs.useful_flops)
        assert (
            ours.step_time.step == pytest.approx(theirs.step_time.step)
            and ours.step_time.traffic == theirs.step_time.traffic
        )


class Narrowing(nn.Module):
    """Blocks that differ: each is half as wide inside as the one before."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        widths = [512 >> layer for layer in range(layers)]
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, w), nn.ReLU(), nn.Linear(w, 64)) for w in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_blocks_that_differ_are_noticed() -> None:
    example = torch.empty(1, 64, device="meta")
    with torch.device("meta"):
        models = [Narrowing(2), Narrowing(3)]
    two, three = (trace_model(model, example, micro_batch=2) for model in models)
    with pytest.raises(NonUniformBlocksError, match="has other operations than the others"):
        extrapolate_trace(two, three, 1)
    held = [state_sizes(model, Config(stage=3), ranks=4) for model in models]
    with pytest.raises(NonUniformBlocksError, match="has other state sizes than the others"):
        extrapolate_state_sizes(held[0], held[1], 1, 2**25)
    with pytest.raises(NonUniformBlocksError, match="with one more block"):
        extrapolate_trace(three, two, 1)


# --------------------------------------------------------------------------------------------------- sweeps


def swept(**given: Any) -> ScalingSimulation:
    chosen: dict[str, Any] = {"machine": "h100", "devices": (1, 8, 64, 512, 4096), "micro_batch": 2, **given}
    return simulate(gpt(LARGER.layers, LARGER), **chosen)


def data_traffic(point: ScalingPoint) -> float:
    return sum(nbytes for kind, nbytes in point.plan.step_time.traffic.items() if not kind.startswith("tensor"))


def test_stage_3_sends_half_as_much_again_as_the_others() -> None:
    found = swept(clip=False)
    for devices in (8, 4096):
        sent = {point.stage: data_traffic(point) for point in found.points if point.devices == devices}
        assert sent[3] == 1.5 * sent[2] and sent[2] == sent[1]
        assert sent[1] / sent[0] == pytest.approx(1, rel=0.03)  # parts of 4096 are rounded up


def test_a_steps_time_goes_somewhere() -> None:
    for point in swept().points:
        assert sum(point.time_fractions.values()) == pytest.approx(1)
        assert min(point.time_fractions.values()) >= 0 and point.time_fractions["tensor"] == 0
        assert point.samples_per_second_per_device * point.plan.step_time.step == pytest.approx(
            point.plan.strategy.micro_batch
        )
    alone = swept(devices=(1,)).points[0]
    assert alone.time_fractions["gather"] == alone.time_fractions["reduce"] == 0


def test_more_devices_never_do_more_each_where_links_are_the_limit() -> None:
    """Plain data parallelism anywhere; the other stages once a node is full and latency counts."""
    slow = Machine.resolve("h100", outside=Link(bandwidth=20e9, latency=2e-4))
    found = swept(machine=slow, devices=(1, 2, 8, 16, 64, 256, 1024, 4096, 16384))
    for stage in (0, 1, 2, 3):
        speeds = [
            point.samples_per_second_per_device
            for point in found.points_of_series(f"stage {stage}")
            if stage == 0 or point.devices >= 16
        ]
        assert all(later <= earlier for earlier, later in itertools.pairwise(speeds)), stage
    by_hand = found.points_of_series("stage 3")
    best = max(by_hand, key=lambda point: point.samples_per_second_per_device)
    (told,) = [one for one in found.scaling if one.stage == 3]
    assert told.best is best and told.under_50_percent is not None and told.under_90_percent is not None
    at = {
        point.devices: point.samples_per_second_per_device / best.samples_per_second_per_device
        for point in by_hand
        if point.devices > best.devices
    }
    assert told.under_90_percent == min(n for n, share in at.items() if share < 0.9)
    assert told.under_50_percent == min(n for n, share in at.items() if share < 0.5) > told.under_90_percent


def test_perfect_links_scale_for_ever() -> None:
    free = Link(bandwidth=1e18, latency=0)
    machine = Machine.resolve(
        "h100", inside=free, outside=free, unit=1e-12
    )  # nor does the host have to launch anything
    found = swept(machine=machine, stages=(0,), clip=False)
    first = found.points[0].samples_per_second_per_device
    assert [point.samples_per_second_per_device for point in found.points] == pytest.approx(
        [first] * len(found.points), rel=1e-6
    )
    assert found.scaling[0].under_90_percent is None


def test_a_model_of_small_blocks_is_simulated_as_it_is_planned() -> None:
    """Several of its blocks make a unit, which no shallow member has."""
    config = GPTConfig(vocab_size=64, context=16, layers=34, heads=2, width=16)
    choice = Strategy(stage=3, checkpoint="none", offload=Offload.from_option("host"), micro_batch=2)
    with torch.device("meta"):
        whole = TracedModel(GPT(config), precision="bf16")
    deep = TracedModel.from_family(gpt_family(config), 34, precision="bf16")
    assert len(deep.state_sizes(choice, 8, True).units) == len(whole.state_sizes(choice, 8, True).units) < 34
    assert (
        deep.step_time(choice, 8, Machine.resolve("h100")).step
        == whole.step_time(choice, 8, Machine.resolve("h100")).step
    )


def test_partitioned_memory_shrinks_with_devices() -> None:
    found = swept(devices=(1, 8, 64, 512))
    for stage in (1, 2, 3):
        needed = [point.plan.memory for point in found.points_of_series(f"stage {stage}")]
        assert needed == sorted(needed, reverse=True) and needed[0] > needed[-1]
    assert (
        len({point.plan.footprint.between_steps for point in found.points_of_series("stage 0")}) <= 2
    )  # alone, and with landings


def test_a_stage_that_does_not_fit_is_reported() -> None:
    found = swept(memory="1.7GB", devices=(1, 64), checkpoint="recompute")
    told = {one.stage: one.fits_from for one in found.scaling}
    assert told[0] is None and told[3] == 64
    assert "does not fit" in simulation_table(found) and "stage 0: fits on none of these" in simulation_table(found)


def test_one_batch_is_divided_over_more_and_more_devices() -> None:
    found = swept(batch=512, micro_batch=None, devices=(1, 8, 64, 512, 1024), stages=(3,), checkpoint="recompute")
    assert [point.devices for point in found.points] == [1, 8, 64, 512]  # 1024 have no sample each
    for point in found.points:
        assert point.plan.strategy.micro_batch * point.plan.strategy.accumulate * point.devices == 512


def test_layers_are_divided_over_a_tensor_axis() -> None:
    found = swept(tensor=8, devices=(1, 4, 8, 16, 24), stages=(2,))
    assert [point.devices for point in found.points] == [8, 16, 24]
    assert all(point.time_fractions["tensor"] > 0 for point in found.points)


def test_meshes_are_shown_beside_one_axis() -> None:
    """Between slow nodes, parameters that are gathered inside a node cost less time and more memory."""
    slow = Machine.resolve("h100", outside=Link(bandwidth=2e9, latency=1e-5))
    found = swept(machine=slow, devices=(8, 32, 64), stages=(3,), replicas=(1, "nodes"))
    assert found.series == ["stage 3", "stage 3, hybrid", "stage 3, hierarchical", "stage 3, full"]
    rows = {series: found.points_of_series(series) for series in found.series}
    assert [point.devices for point in rows["stage 3"]] == [8, 32, 64]
    for series in found.series[1:]:  # on one node there is one axis
        assert [(point.devices, point.plan.strategy.replicas) for point in rows[series]] == [(32, 4), (64, 8)]
    one, hybrid, hierarchical, full = (rows[series][-1].plan for series in found.series)
    # bytes between nodes with one backward a step: 6, 4 and 4 per parameter
    assert hybrid.step_time.step < 0.75 * one.step_time.step
    assert hierarchical.step_time.step == pytest.approx(hybrid.step_time.step, rel=0.05)
    assert full.step_time.step == pytest.approx(one.step_time.step * (7 / 8) / (63 / 64), rel=0.02)
    assert full.footprint.states == one.footprint.states
    assert sum(full.footprint.states.values()) < sum(hierarchical.footprint.states.values())
    assert sum(hierarchical.footprint.states.values()) < sum(hybrid.footprint.states.values())
    assert [one.series for one in found.scaling] == found.series and "stage 3, hybrid: fits" in simulation_table(found)


def test_8_bits_and_networks_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = {"gather_dtype": ("none", "int8"), "reduce_wire": ("none", "int8")}
    found = swept(devices=(32,), stages=(2, 3), replicas="nodes", partition="full", **both)
    assert found.series == [
        "stage 2, full",
        "stage 2, full, int8 reductions",
        "stage 3, full",
        "stage 3, full, int8 reductions",
        "stage 3, full, int8 gathers",
        "stage 3, full, int8 gathers, int8 reductions",
    ]
    slow, slower = found.with_network(10), found.with_network(1)
    assert slow.machine.outside.bandwidth == 0.9 * 10e9 / 8 and slow.series == found.series
    for earlier, later in ((found, slow), (slow, slower)):
        for before, after in zip(earlier.points, later.points, strict=True):
            assert before.plan.step_time.step < after.plan.step_time.step
            assert before.plan.step_time.traffic == after.plan.step_time.traffic
    steps = {point.series: point.plan.step_time.step for point in slower.points}
    assert steps["stage 3, full"] / steps["stage 3, full, int8 gathers, int8 reductions"] == pytest.approx(1.94, 0.02)
    path = tmp_path / "networks.json"
    words = "tiny --devices 16 --stage 1,3 --gather-dtype int8,none --network 10,2.5 --micro-batch 2 --json".split()
    assert main([*words, str(path)]) == 0
    out = capsys.readouterr().out
    assert "a step on 16 devices   10 Gb/s  2.5 Gb/s" in out and "stage 3, int8 gathers" in out
    told = json.loads(path.read_text())["networks"]
    assert [network["gigabits_per_second"] for network in told] == [10, 2.5] and len(told[0]["points"]) == 3


def test_a_mesh_is_simulated_as_it_is_planned() -> None:
    (point,) = swept(devices=(16,), stages=(2,), replicas=4, partition="full").points
    assert point.series == "stage 2, full over 4 replicas"
    planned = plan(
        gpt(LARGER.layers, LARGER),
        devices=16,
        micro_batch=2,
        stage=2,
        replicas=4,
        partition="full",
        tensor=1,
        checkpoint="none",
        offload=None,
    )
    assert planned.best is not None and planned.best.strategy == point.plan.strategy
    assert planned.best.step_time == point.plan.step_time


def test_models_of_any_kind_are_swept() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.LazyLinear(10))
        model(torch.empty(1, 3, 16, 16))
    found = simulate(model, torch.empty(1, 3, 16, 16), devices=(1, 16), micro_batch=32, machine="a100")
    assert len(found.points) == 8 and found.model == "Sequential"
    with pytest.raises(ValueError, match="no tensor-parallel plan is known"):
        simulate(model, torch.empty(1, 3, 16, 16), devices=(16,), tensor=2, micro_batch=32)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"devices": (0,)}, "devices must be integers of at least 1, got 0"),
        ({"devices": ()}, "devices is empty"),
        ({"stages": ()}, "stages is empty"),
        ({"stages": (4,)}, "stage must be one of 0, 1, 2, 3, got 4"),
        ({"machine": "h1000"}, "did you mean 'h100'"),
        ({"machine": "dgx2", "precision": "bf16"}, "does not support bf16, only fp32 and fp16"),
        ({"tensor": 0}, "tensor must be a positive integer"),
        ({"tensor": 8, "devices": (4, 12)}, r"no number of devices is a multiple of the tensor degree \(8\)"),
        ({"tensor": 16, "devices": (16,)}, "do not divide the model's 8 heads"),
        ({"micro_batch": 0}, "micro_batch must be a positive integer, got 0"),
        ({"batch": 3, "devices": (2, 4)}, "must divide the batch"),
        ({"batch": 0}, "batch must be a positive integer"),
        ({"checkpoint": "some"}, "checkpoint must be one of"),
        ({"replicas": "node"}, "replicas must be a positive integer, got 'node'"),
        ({"replicas": ()}, "replicas is empty"),
        ({"replicas": 3, "devices": (8, 16)}, "and replicas divide them"),
        ({"gather_dtype": "int8", "stages": [1], "devices": (8,)}, "8-bit collectives: gather_dtype needs stage 3"),
        ({"partition": "both", "replicas": 2, "devices": (8,)}, "partition must be one of"),
    ],
)
def test_bad_sweeps_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        swept(**given)


# --------------------------------------------------------------------------------------------- the largest model


@pytest.fixture(scope="module")
def family() -> TracedModel:
    """A family whose traces all searches share."""
    return TracedModel.from_family(gpt_family(LARGER), 3, precision="bf16")


def deepest_in(family: TracedModel, devices: int, stage: int, memory: str = "1.5GB", **given: Any) -> LargestModel:
    choice = Strategy(stage=stage, checkpoint="recompute", micro_batch=2, **given)
    return find_deepest_member(family, choice, devices, Machine.resolve("h100", memory=memory))


@pytest.mark.parametrize(("stage", "memory"), [(0, "2.5GB"), (1, "2GB"), (2, "1.5GB"), (3, "1.5GB")])
def test_the_largest_model_fits_and_a_deeper_one_does_not(family: TracedModel, stage: int, memory: str) -> None:
    found = deepest_in(family, 4, stage, memory)
    choice, machine = (
        Strategy(stage=stage, checkpoint="recompute", micro_batch=2),
        Machine.resolve("h100", memory=memory),
    )
    fits, fails = (evaluate_strategy(family.with_layers(found.layers + more), choice, 4, machine) for more in (0, 1))
    assert fits.fits and not fails.fits and not found.may_be_deeper and found.limit == "device"
    assert found.memory == pytest.approx(fits.memory)
    assert found.parameters == replace(LARGER, layers=found.layers).parameters


def test_the_search_ends_at_a_limit_that_it_names(family: TracedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert deepest_in(family, 16, 3, "2GB").layers > 64
    monkeypatch.setattr(searching, "MAX_LAYERS", 64)
    found = deepest_in(family, 16, 3, "2GB")
    assert found.layers == 64 and found.may_be_deeper and largest_table({(16, 3): found}).endswith("(64 layers)")
    assert "≥ " in largest_table({(16, 3): found})


def test_largest_models_grow_with_stage_devices_and_offload(family: TracedModel) -> None:
    layers = [deepest_in(family, 16, stage).layers for stage in (0, 1, 2, 3)]
    assert layers == sorted(set(layers)) and layers[-1] < deepest_in(family, 32, 3).layers
    assert layers[1] < deepest_in(family, 16, 1, offload=Offload(optimizer="host")).layers
    small = Machine.resolve("h100", memory="1.5GB", host_memory="1GB")
    far = Strategy(stage=1, checkpoint="recompute", micro_batch=2, offload=Offload(optimizer="host"))
    found, roomier = (
        find_deepest_member(family, far, 16, small),
        find_deepest_member(family, far, 16, replace(small, host_memory=2 * 10**9)),
    )
    assert found.limit == "host" and roomier.limit == "device" and found.layers < roomier.layers
    nothing = deepest_in(family, 1, 3, "1GB")
    assert nothing.layers == 0 and nothing.limit == "device" and nothing.memory > 1e9


def test_bad_searches_are_refused(family: TracedModel) -> None:
    with pytest.raises(ValueError, match="devices must be a positive integer, got 0"):
        deepest_in(family, 0, 3)
    with pytest.raises(ValueError, match=r"devices \(12\) must be a multiple of the tensor degree \(8\)"):
        deepest_in(family, 12, 3, tensor=8)
    with pytest.raises(ValueError, match="layers must be a positive integer, got 0"):
        TracedModel.from_family(gpt_family(SHAPE), 0)


# ------------------------------------------------------------------------------------------------- the command


def test_the_command_prints_tables_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "tiny",
        "--devices",
        "1,8-64",
        "--stage",
        "0,3",
        "--micro-batch",
        "4",
        "--json",
        str(tmp_path / "s.json"),
    ]
    assert main(arguments) == 0
    said, told = capsys.readouterr().out, json.loads((tmp_path / "s.json").read_text())
    assert "GPT, 4 layers, 4 heads, width 128" in said and "stage 3: fits from 1 on" in said
    assert [(point["series"], point["devices"]) for point in told["points"]] == [
        (f"stage {stage}", devices) for stage in (0, 3) for devices in (1, 8, 16, 32, 64)
    ]
    assert told["series"][1]["stage"] == 3 and told["machine"]["name"] == "h100" and told["version"] == 1
    for point in told["points"]:
        assert point["plan"]["strategy"]["micro_batch"] == 4
        assert sum(point["time_fractions"].values()) == pytest.approx(1)


def test_with_fp8_the_output_layer_stays_in_bf16_as_in_training(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    given = "tiny --devices 2 --stage 3 --sequence 16 --micro-batch 1 --machine h100 --precision fp8".split()
    assert main([*given, "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["points"]
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=1024, context=16, layers=4, heads=4, width=128))
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_057_536
    sent = [
        predict_traffic(model, ranks=2, stage=3, precision="fp8", keep_bf16=kept).step["all-gather"]
        for kept in ("head", ())
    ]
    assert sent[1] < 0.95 * sent[0]
    assert found["plan"]["traffic_bytes"]["all-gather"] == pytest.approx(sent[0], rel=0.001)


def test_the_command_finds_the_largest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "largest.json"
    shape = ["tiny", "--width", "1024", "--heads", "8"]
    assert (
        main([*shape, "--largest", "--devices", "1,4", "--stage", "1,3", "--memory", "2GB", "--json", str(file)]) == 0
    )
    rows = json.loads(file.read_text())["largest_models"]
    assert [(row["devices"], row["stage"]) for row in rows] == [(1, 1), (1, 3), (4, 1), (4, 3)]
    assert rows[0]["layers"] < rows[1]["layers"] < rows[2]["layers"] < rows[3]["layers"]
    assert f"({rows[3]['layers']} layers)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--largest --batch 64", "--largest does not depend on --batch"),
        ("--partition full", "--partition has no effect without the rows of a mesh"),
        ("--partition full --replicas nodes", "--partition has no effect without the rows of a mesh"),
    ],
)
def test_options_without_effect_are_refused(argv: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny", "--devices", "4", *argv.split()]) == 2
    assert words in capsys.readouterr().err


def test_the_largest_is_offloaded_whatever_the_stage(tmp_path: Path) -> None:
    file = tmp_path / "largest.json"
    shape = "tiny --width 1024 --heads 8 --largest --devices 4 --stage 0 --memory 2GB --json".split()
    found = []
    for offload in ("none", "host"):
        assert main([*shape, str(file), "--offload", offload]) == 0
        found.append(json.loads(file.read_text())["largest_models"][0]["layers"])
    assert found[0] < found[1]


@pytest.mark.parametrize("largest", [[], ["--largest"]])
def test_json_on_standard_output_is_alone_there(capsys: pytest.CaptureFixture[str], largest: list[str]) -> None:
    assert main([*"tiny --devices 2 --stage 3 --micro-batch 1 --memory 2GB --json -".split(), *largest]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["machine"]["name"] == "h100"
    assert "1,071,872 parameters" in err and "devices" in err


def test_targets_are_looked_at_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny", "--json", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"cannot write {tmp_path}: it is a directory" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tinny"], "did you mean 'tiny'"),
        (
            ["tiny", "--layers", "100000"],
            "a GPT has at most 4,096 layers and 100,000,000,000,000 parameters, got 100,000",
        ),
        (["tiny", "--width", "10000000", "--heads", "4"], "layers and 100,000,000,000,000 parameters, got 4 and 4,800"),
        (["tiny", "--memory", "1kB"], "memory must be more than the 629145600 bytes"),
        (["tiny", "--machine", "dgx3"], "did you mean 'dgx2'"),
        (["tiny", "--machine", "dgx2", "--precision", "bf16"], "use precision='fp16'"),
        (["tiny", "--tensor", "3", "--devices", "4"], "no number of devices is a multiple of the tensor degree (3)"),
        (["tiny", "--largest", "--replicas", "nodes"], "does not depend on --replicas"),
        (["tiny", "--network", "10", "--devices", "8"], "--network is between nodes of 8 devices"),
        (["torch:nn.Identity", "--largest"], "cannot change the depth of Identity"),
        (["tiny", "--json", "/nowhere/at/all.json", "--devices", "1", "--micro-batch", "1"], "/nowhere/at/all.json"),
    ],
)
def test_the_command_refuses_in_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and said.startswith("zeroshard simulate: ")


@pytest.mark.parametrize("devices", ["0", "", "8-4", "a", "1,,2"])
def test_the_command_refuses_numbers_that_are_none(devices: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["tiny", "--devices", devices])
    assert stopped.value.code == 2 and "--devices" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    look = "import sys; from zeroshard.cli.main import main; code = main(['simulate', '--help'])"
    after = "print('torch' in sys.modules)"
    code = f"import sys\ntry:\n    exec({look!r})\nexcept SystemExit:\n    {after}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: zeroshard simulate" in result.stdout and result.stdout.endswith("False\n")
