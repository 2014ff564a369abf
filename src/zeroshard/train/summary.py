"""Summary: what is told of a run before its first step and after its last."""

from __future__ import annotations

import shlex
from pathlib import Path

from zeroshard.memory.report import format_bytes
from zeroshard.train.options import TrainOptions
from zeroshard.train.run_record import max_state_bytes
from zeroshard.train.training_setup import TrainingSetup


def header_lines(setup: TrainingSetup, start_step: int) -> list[tuple[str, str]]:
    """What is about to be run, as pairs of label and value."""
    batching, world = setup.batching, setup.rank_info
    begin = f" from step {start_step}" if start_step else ""
    accumulated = f", {batching.accumulate} backwards a step" if batching.accumulate > 1 else ""
    held_out = f", {len(setup.validation_loader.tokens):,} held out" if setup.validation_loader is not None else ""
    tokens = batching.batch * setup.train_loader.sequence
    return [
        ("model", f"{setup.language_model.description}, {setup.record.model['parameters']:,} parameters"),
        ("data", f"{len(setup.train_loader.tokens):,} tokens to train on{held_out}"),
        (
            "ranks",
            f"{world.world_size} on {setup.record.device} over "
            f"{world.backend}{describe_tensor_groups(setup.options, world.world_size)}",
        ),
        *([("plan", setup.plan_reason)] if setup.plan_reason else []),
        *describe_sharding(setup.options, setup.precision),
        ("steps", f"{setup.options.training.steps}{begin}, {tokens:,} tokens a step{accumulated}"),
        ("run", str(setup.directory.path)),
    ]


def describe_tensor_groups(options: TrainOptions, ranks: int) -> str:
    """How the ranks share data and layers, to follow their number; nothing where none divide a layer."""
    tensor = options.sharding.tensor
    return f", in {ranks // tensor} groups of {tensor} that divide each layer" if tensor > 1 else ""


def describe_sharding(options: TrainOptions, precision: str) -> list[tuple[str, str]]:
    """What becomes of states and activations, as pairs of label and value.

    >>> describe_sharding(TrainOptions().with_configuration("C5"), "bf16")
    [('ZeRO', 'C5: stage 2, bf16'), ('blocks', 'recomputed from inputs kept in host memory (whole: no --tensor)')]
    """
    name = options.sharding.configuration
    changed = "" if name is None or options == options.with_configuration(name) else ", changed"
    kept = options.sharding.stage == 3 and precision in ("bf16", "fp16") and not options.sharding.cast_on_gather
    how = f"stage {options.sharding.stage}, {precision}{', kept beside the masters' if kept else ''}"
    lines = [("ZeRO", (f"{name}{changed}: " if name else "") + how)]
    if options.sharding.offload != "device" and options.sharding.offload_fraction:
        part = "" if options.sharding.offload_fraction == 1 else f"{options.sharding.offload_fraction:.0%} of "
        lines.append(("tiers", f"{part}optimizer states on {options.sharding.offload}, updated there"))
    if options.sharding.offload_parameters:
        lines.append(("", "parameters in host memory, brought for each use"))
    if options.model.has_activation_checkpointing:
        where = "in host memory" if options.model.offload_activations else "on the device"
        lines.append(("blocks", f"recomputed from inputs kept {where}{_describe_activation_partitioning(options)}"))
    return lines


def _describe_activation_partitioning(options: TrainOptions) -> str:
    """How much of the blocks' inputs a rank keeps, where something was said about it."""
    partitioned, tensor = options.model.partition_activations, options.sharding.tensor
    if tensor > 1:
        return f", 1/{tensor} on each rank" if partitioned else ", whole on each rank"
    return " (whole: no --tensor)" if partitioned and options.sharding.configuration is not None else ""


def footer_lines(setup: TrainingSetup, steps_done: int, page: Path | None) -> list[tuple[str, str]]:
    """What has come of it, and what can be done with it."""
    record, out = setup.record, setup.directory
    lines = [("outcome", f"{record.outcome} after step {steps_done}")]
    if record.memory:
        most = sum(max_state_bytes(record.memory).values())
        plain = sum(record.plain.values())
        less = (
            f", {plain / most:.1f} × less than the {format_bytes(plain)} of plain data parallelism"
            if most < plain
            else ""
        )
        lines.append(("memory", f"{format_bytes(most)} of model states a rank{less}"))
    if page is not None:
        lines.append(("report", str(page)))
    if record.checkpoints:
        lines.append(("checkpoint", str(out.checkpoints_dir / record.checkpoints[-1])))
    if record.outcome != "finished":
        return [*lines, ("go on", resume_command(setup))]
    lines.append(("weights", str(out.model_dir)))
    if setup.corpus.tokenizer_path is not None:
        lines.append(("use it", f"zeroshard generate {shlex.quote(str(out.path))} --prompt 'Once'"))
    return lines


def resume_command(setup: TrainingSetup) -> str:
    """The command that goes on with a run."""
    return f"zeroshard train --out {shlex.quote(str(setup.directory.path))} --resume"
