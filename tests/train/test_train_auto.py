"""`zeroshard train --auto`: what is left to a plan is chosen once, told, kept, and fits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from live import allocated_bytes
from ranks import run_processes, run_threads

import zeroshard
from zeroshard.activations.checkpoint import CheckpointedForward
from zeroshard.planner import Strategy, traced_model
from zeroshard.planner.auto import NothingFitsError, PlanDecision
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.plans import plan
from zeroshard.train.commands.train import main, read_options
from zeroshard.train.models import LanguageModel, open_language_model
from zeroshard.train.options import TrainingError, TrainOptions
from zeroshard.train.rank import RankInfo
from zeroshard.train.summary import header_lines
from zeroshard.train.training_setup import make_optimizer, prepare_training, resolve_auto

pytestmark = pytest.mark.usefixtures("traced_once")

EVERY = ("stage", "offload", "recompute", "micro-batch")
SMALL = "--layers 2 --width 32 --sequence 16 --batch 16 --device cpu".split()
WORLD = 4
RANDOM_STATE = 5056  # bytes that torch keeps for each recomputed block: only small models notice


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A machine that has nothing but the bytes of tensors."""
    return machine_file(tmp_path, "1GB")


def machine_file(directory: Path, memory: int | str) -> str:
    path = directory / "machine.json"
    path.write_text(json.dumps({"like": "cpu", "context": 0, "memory": memory}))
    return str(path)


def text(directory: Path) -> list[str]:
    """Options of a little text, which is soon encoded."""
    path = directory / "text.txt"
    path.write_text("To be, or not to be, that is the question. " * 400)
    return ["--vocabulary", "300", "--data", str(path)]


# ------------------------------------------------------------------------------------------------- the flags


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ("", ()),
        ("--auto", EVERY),
        ("--auto --stage 2", ("offload", "recompute", "micro-batch")),
        ("--stage=2 --auto --micro_batch 4", ("offload", "recompute")),
        ("--auto stage micro-batch", ("stage", "micro-batch")),
        ("--auto recompute stage --lr 1e-3", ("stage", "recompute")),
        ("--micro_batch=2 --auto offload --device auto", ("offload",)),
        ("--auto --no-recompute", ("stage", "offload", "micro-batch")),
        ("--auto --offload-activations", ("stage", "offload", "micro-batch")),
        ("--auto --offload host --offload-fraction 0.5", ("stage", "recompute", "micro-batch")),
        ("--auto --offload-directory .", EVERY),
        ("--auto --accumulate 2", ("stage", "offload", "recompute")),
        ("--auto --configuration C4", ("offload", "micro-batch")),
        ("--configuration C4 --auto offload", ("offload",)),
    ],
)
def test_what_is_given_explicitly_is_not_left_open(flags: str, left: tuple[str, ...]) -> None:
    assert read_options(flags.split()).sharding.auto == left


def test_what_is_left_open_is_as_if_nothing_had_been_said(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('stage = 1\nmicro_batch = 4\nrecompute = true\noffload = "host"\nbatch = 32\n')
    options = read_options(["--config", str(file), "--auto"])
    assert options.sharding.auto == EVERY
    assert (options.training.batch, options.training.micro_batch) == (32, None)
    assert not options.model.has_activation_checkpointing and options.sharding.offload == "device"
    options = read_options(["--config", str(file), "--auto", "offload"])
    assert options.sharding.auto == ("offload",) and options.sharding.stage == 1 and options.model.recompute


@pytest.mark.parametrize("line", ["auto = true", 'auto = ["stage"]'])
def test_a_file_can_leave_it_open_and_flags_count_more(line: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(line + "\n")
    assert "stage" in read_options(["--config", str(file)]).sharding.auto
    options = read_options(["--config", str(file), "--stage", "1"])
    assert "stage" not in options.sharding.auto and options.sharding.stage == 1


@pytest.mark.parametrize("line", ["auto = []", "auto = false"])
def test_nothing_in_a_file_leaves_nothing_open(line: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(line + "\nstage = 1\n")
    options = read_options(["--config", str(file)])
    assert options.sharding.auto == () and options.sharding.stage == 1
    assert read_options(["--config", str(file), "--auto"]).sharding.auto == EVERY


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--memory 40GB", "memory has no effect without auto"),
        ("--machine h100 --dry-run", "machine has no effect without auto"),
        ("--allow-lossy", "allow_lossy has no effect without auto"),
    ],
)
def test_what_only_a_plan_looks_at_is_refused_without_one(flags: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        read_options(flags.split())
    file = tmp_path / "run.toml"
    file.write_text('machine = "h100"\n')
    assert read_options(["--config", str(file), "--auto", "stage"]).sharding.machine == "h100"
    with pytest.raises(ValueError, match="machine has no effect without auto"):
        read_options(["--config", str(file)])


def test_flags_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="stage is set explicitly and in --auto: omit one of them"):
        read_options("--auto stage --stage 2".split())
    with pytest.raises(ValueError, match="memory is a number of bytes"):
        read_options("--auto --memory much".split())
    with pytest.raises(SystemExit):
        read_options("--auto everything".split())


# --------------------------------------------------------------------------------------- what is chosen fits


def settled(
    options: TrainOptions, ranks: int = WORLD, precision: str = "fp32"
) -> tuple[TrainOptions, str, LanguageModel]:
    language_model = open_language_model(options.model, options.data)
    found, why = resolve_auto(options, language_model, precision, ranks)
    return found, why, language_model


def measured_under_limits(rank: int, flags: list[str], directory: str) -> list[tuple[int, int, str]]:
    """For several limits: (the limit, the most that a step of one rank of four took, what was chosen)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    options, known = read_options([*flags, "--auto", "--machine", machine_file(Path(directory), "1GB")]), {}
    tracing = traced_model.trace_model

    def remembered(model: Any, inputs: Any, **more: Any) -> Any:
        key = (more["checkpoint"], more["micro_batch"])
        known[key] = known.get(key) or tracing(model, inputs, **more)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced_model, "trace_model", remembered)
        module = open_language_model(options.model, options.data).module
        machine = Machine.resolve(options.sharding.machine or "cpu")
        every = plan(
            module, devices=WORLD, machine=machine, batch=16, tensor=1, precision="fp32", offload=None
        ).candidates
        needs = sorted({int(found.memory) + 1 for found in every})
        outcomes = []
        for limit in [*needs[:: len(needs) // 5], needs[-1]]:
            machine_file(Path(directory), limit)
            chosen, why, language_model = settled(options)
            outcomes.append((limit, peak_of(chosen, language_model), why))
        machine_file(Path(directory), needs[0] - 2)
        with pytest.raises(NothingFitsError, match="nothing fits"):
            settled(options)
    return outcomes


def peak_of(options: TrainOptions, language_model: LanguageModel) -> int:
    """What steps as the trainer takes them hold at most."""
    assert options.sharding.auto == ()
    batching, sequence = options.batching(WORLD), language_model.sequence
    assert batching.batch == 16

    def steps() -> None:
        module, sharding = language_model.module, options.sharding
        inner = make_optimizer(module, options.training)
        model, optimizer = zeroshard.shard(module, inner, precision="fp32", **sharding.shard_options)
        for _ in range(3):
            for _ in range(batching.accumulate):
                tokens = torch.zeros(batching.micro, sequence, dtype=torch.int64)
                loss = language_model.loss(model, tokens, tokens) / batching.accumulate
                torch.autograd.backward(optimizer.scale(loss))
            optimizer.clip_grad_norm_(options.training.clip or math.inf)
            optimizer.step()
            optimizer.zero_grad()

    most, _ = allocated_bytes(steps)
    blocks = [m for m in language_model.module.modules() if isinstance(m.__dict__.get("forward"), CheckpointedForward)]
    assert bool(blocks) == options.model.has_activation_checkpointing
    return most - RANDOM_STATE * len(blocks)


@pytest.mark.parametrize("shape", ["--layers 3 --width 16 --heads 2 --sequence 64"])
def test_a_run_never_takes_more_than_it_may(shape: str, tmp_path: Path) -> None:
    flags = [*shape.split(), *"--vocabulary 128 --batch 16 --device cpu".split()]
    (outcomes,) = run_processes(1, measured_under_limits, flags, str(tmp_path), fresh=True)
    for limit, most, _ in outcomes:
        assert most <= limit
    chosen = {why.partition(":")[0] for *_, why in outcomes}
    assert len(chosen) >= 3 and any("recomputing" in words for words in chosen)
    assert any("backwards a step" in words for words in chosen)  # a smaller micro-batch, where that alone fits
    assert any(most > 0.85 * limit for limit, most, _ in outcomes)


def test_what_is_given_narrows_the_choice(tiny: str) -> None:
    flags = [*SMALL, "--auto", "--machine", tiny]
    for more in ("--stage 1", "--micro-batch 2", "--recompute", "--accumulate 4", "--offload host --stage 3"):
        given = read_options([*flags, *more.split()])
        found, why, _ = settled(given)
        assert found.sharding.auto == () and "fit" in why
        for name, value in found.to_flat_dict().items():
            if "--" + name.replace("_", "-") in more.split():
                assert value == given.to_flat_dict()[name]
        if "--recompute" in more:
            assert why.startswith("stage") and "recomputing" in why
    found, _, _ = settled(read_options([*flags, "--micro-batch", "2"]))
    assert found.batching(WORLD).accumulate == 2
    with pytest.raises(ValueError, match="assumes partitioned activations"):
        settled(read_options([*flags, "--tensor", "2", "--no-partition-activations"]))


def test_8_bits_are_chosen_only_if_they_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    link = {"bandwidth": 1e5, "latency": 0.0}
    path.write_text(json.dumps({"like": "cpu", "context": 0, "memory": "1GB", "inside": link, "outside": link}))
    for flags, wire in (([], None), (["--allow-lossy"], "int8")):
        options = read_options([*SMALL, "--auto", "--machine", str(path), "--no-recompute", *flags])
        resolved, why, _ = settled(options)
        assert resolved.sharding.reduce_wire == wire and ("change the numbers" in why) == (wire is not None)
        assert not resolved.sharding.auto and not resolved.sharding.allow_lossy
    options = read_options([*SMALL, "--auto", "--machine", str(path), "--no-recompute", "--gather-dtype", "fp8"])
    resolved, _, _ = settled(options)
    assert (resolved.sharding.stage, resolved.sharding.gather_dtype, resolved.sharding.reduce_wire) == (3, "fp8", None)


def test_the_layer_that_a_run_keeps_in_bf16_is_planned_so(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []

    def choose(*_: Any, **given: Any) -> PlanDecision:
        planned.append(given["keep_bf16"])
        return PlanDecision(Strategy(stage=3), "")

    monkeypatch.setattr("zeroshard.train.training_setup.choose_plan_for_machine", choose)
    assert main([*SMALL, "--auto", "stage", "--precision", "fp8", "--machine", "h100", "--dry-run"]) == 0
    assert planned == [("head",)]


def test_offload_is_said_in_the_options_own_words() -> None:
    flags = "--model 1.4b --layers 3 --auto --machine h100 --batch 4 --precision bf16 --ranks 1".split()
    found, why, _ = settled(read_options([*flags, "--memory", "4GB"]), ranks=1, precision="bf16")
    assert found.sharding.offload == "host" and found.sharding.offload_config["optimizer"][1] in (0.5, 1.0)
    assert found.sharding.offload_parameters == ("parameters host" in why)
    found, _, _ = settled(read_options(flags), ranks=1, precision="bf16")
    assert found.sharding.offload == "device"


def test_hugging_face_models_and_adapters_are_chosen_for(tmp_path: Path, tiny: str) -> None:
    config = transformers.LlamaConfig(
        vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    config.bos_token_id = config.eos_token_id = None
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    flags = [
        "--model",
        str(tmp_path / "llama"),
        *"--sequence 16 --batch 16 --device cpu --auto --machine".split(),
        tiny,
    ]
    whole, why, _ = settled(read_options(flags))
    assert whole.sharding.auto == () and "plans that fit" in why
    _, lighter, _ = settled(read_options([*flags, "--lora", "--stage", "0", "--micro-batch", "4", "--no-recompute"]))
    _, full, _ = settled(read_options([*flags, "--stage", "0", "--micro-batch", "4", "--no-recompute"]))
    needed = [float(why.rpartition("samples/s, ")[2].split()[0]) for why in (lighter, full)]
    assert needed[0] < needed[1]  # frozen parameters have no states
    tight = read_options([*flags, "--memory", "420kB"])
    found, _, language_model = settled(tight)
    assert found.model.has_activation_checkpointing
    assert any(isinstance(m.__dict__.get("forward"), CheckpointedForward) for m in language_model.module.modules())


# ------------------------------------------------------------------------------------------------- a whole run


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_run_chooses_once_says_why_and_goes_on_with_it(tensor: int, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    flags = [*SMALL, *text(tmp_path), "--out", out, "--machine", machine_file(tmp_path, "700kB")]
    options = read_options([*flags, "--auto", "--tensor", str(tensor)])

    def body(rank: int) -> tuple[TrainOptions, str, dict[str, str], dict[str, Any]]:
        job = prepare_training(options, RankInfo(rank, 4, torch.device("cpu"), "gloo"))
        return job.options, job.plan_reason, dict(header_lines(job)), job.record.options

    found = run_threads(4, body)
    assert all(one == found[0] for one in found)
    chosen, why, told, settings = found[0]
    assert chosen.sharding.auto == () and ("tensor 2" in why) == (tensor == 2)
    assert told["plan"] == why and "plans that fit" in why and "of 700.00 kB a device" in why and "\n" not in why
    assert told["ZeRO"].startswith(f"stage {chosen.sharding.stage},") and f"stage {chosen.sharding.stage}," in why
    assert ("recomputing" in why) == chosen.model.has_activation_checkpointing
    assert settings["stage"] == chosen.sharding.stage and f"micro-batch {settings['micro']}" in why
    assert settings["micro"] * settings["accumulate"] * 4 // tensor == 16
    resumed = read_options(["--out", out, "--resume"])
    for name in ("stage", "micro_batch", "recompute", "offload_activations", "offload", "batch", "tensor", "auto"):
        assert resumed.to_flat_dict()[name] == chosen.to_flat_dict()[name]
    assert resumed.sharding.machine is None  # it was for planning alone
    again = read_options(["--out", out, "--resume", "--auto"])
    assert again.sharding.auto == EVERY and again.training.micro_batch is None and again.training.batch == 16


def test_a_run_that_fits_nowhere_leaves_nothing_behind(tmp_path: Path, tiny: str) -> None:
    flags = [*SMALL, *text(tmp_path), "--out", str(tmp_path / "run"), "--machine", tiny]
    options = read_options([*flags, "--auto", "--memory", "1kB"])

    def refused(rank: int) -> str:
        with pytest.raises(TrainingError, match="nothing fits") as caught:
            prepare_training(options, RankInfo(rank, 4, torch.device("cpu"), "gloo"))
        return str(caught.value)

    assert len(set(run_threads(4, refused))) == 1
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--model 7.6b --layers 4 --ranks 8 --batch 64 --auto --machine h100 --dry-run".split()
    assert main(flags) == 0
    said = capsys.readouterr().out
    assert "ranks     8 on cuda" in said and ", bf16" in said
    assert "plan      stage" in said and "of 85.00 GB a device" in said
    assert main([*flags, "--memory", "1GB"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("zeroshard train: nothing fits: even with stage 3") and "Try more ranks" in told
    assert main([*SMALL, "--ranks", "2", "--auto", "stage", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "ranks     2 on cpu" in said and "plan      stage" in said
    assert main([*SMALL, "--ranks", "2", "--auto", "--machine", "h1000", "--dry-run"]) == 1
    assert "unknown machine 'h1000': did you mean 'h100'?" in capsys.readouterr().err
