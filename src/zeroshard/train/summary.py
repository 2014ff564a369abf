"""The lines shown before the first step of a run and after its last."""

from __future__ import annotations

import shlex
from pathlib import Path

from zeroshard.train.options import TrainOptions
from zeroshard.train.run_record import max_state_bytes
from zeroshard.train.training_setup import TrainingSetup
from zeroshard.utils.format import format_bytes


def header_lines(setup: TrainingSetup, start_step: int) -> list[tuple[str, str]]:
    """Return the description of a run, as pairs of label and value."""
    batching, rank_info = setup.batching, setup.rank_info
    start_note = f" from step {start_step}" if start_step else ""
    accumulation_note = f", {batching.accumulate} backwards a step" if batching.accumulate > 1 else ""
    validation_note = (
        f", {len(setup.validation_loader.tokens):,} held out" if setup.validation_loader is not None else ""
    )
    tokens = batching.batch * setup.train_loader.sequence
    return [
        ("model", f"{setup.language_model.description}, {setup.record.model['parameters']:,} parameters"),
        ("data", f"{len(setup.train_loader.tokens):,} tokens to train on{validation_note}"),
        (
            "ranks",
            f"{rank_info.world_size} on {setup.record.device} over "
            f"{rank_info.backend}{describe_tensor_groups(setup.options, rank_info.world_size)}",
        ),
        *([("plan", setup.plan_reason)] if setup.plan_reason else []),
        *describe_sharding(setup.options, setup.precision),
        ("steps", f"{setup.options.training.steps}{start_note}, {tokens:,} tokens a step{accumulation_note}"),
        ("run", str(setup.directory.path)),
    ]


def describe_tensor_groups(options: TrainOptions, ranks: int) -> str:
    """Return how the ranks are grouped for tensor parallelism, as a suffix to their number; empty without it."""
    tensor = options.sharding.tensor
    return f", in {ranks // tensor} groups of {tensor} that divide each layer" if tensor > 1 else ""


def describe_sharding(options: TrainOptions, precision: str) -> list[tuple[str, str]]:
    """Return how states and activations are sharded and offloaded, as pairs of label and value.

    >>> describe_sharding(TrainOptions().with_configuration("C5"), "bf16")
    [('ZeRO', 'C5: stage 2, bf16'), ('blocks', 'recomputed from inputs kept in host memory (whole: no --tensor)')]
    """
    name = options.sharding.configuration
    changed = "" if name is None or options == options.with_configuration(name) else ", changed"
    keeps_copy = options.sharding.stage == 3 and precision in ("bf16", "fp16") and not options.sharding.cast_on_gather
    description = f"stage {options.sharding.stage}, {precision}{', kept beside the masters' if keeps_copy else ''}"
    lines = [("ZeRO", (f"{name}{changed}: " if name else "") + description)]
    if options.sharding.offload != "device" and options.sharding.offload_fraction:
        fraction_note = "" if options.sharding.offload_fraction == 1 else f"{options.sharding.offload_fraction:.0%} of "
        lines.append(("tiers", f"{fraction_note}optimizer states on {options.sharding.offload}, updated there"))
    if options.sharding.offload_parameters:
        lines.append(("", "parameters in host memory, brought for each use"))
    if options.model.has_activation_checkpointing:
        location = "in host memory" if options.model.offload_activations else "on the device"
        lines.append(("blocks", f"recomputed from inputs kept {location}{_describe_activation_partitioning(options)}"))
    return lines


def _describe_activation_partitioning(options: TrainOptions) -> str:
    """Return how block inputs are partitioned; empty if neither --tensor nor a configuration sets it."""
    is_partitioned, tensor = options.model.partition_activations, options.sharding.tensor
    if tensor > 1:
        return f", 1/{tensor} on each rank" if is_partitioned else ", whole on each rank"
    return " (whole: no --tensor)" if is_partitioned and options.sharding.configuration is not None else ""


def footer_lines(setup: TrainingSetup, steps_done: int, page: Path | None) -> list[tuple[str, str]]:
    """Return the results of a run and the next commands, as pairs of label and value."""
    record, directory = setup.record, setup.directory
    lines = [("outcome", f"{record.outcome} after step {steps_done}")]
    if record.memory:
        max_bytes = sum(max_state_bytes(record.memory).values())
        ddp_bytes = sum(record.plain.values())
        saving_note = (
            f", {ddp_bytes / max_bytes:.1f} × less than the {format_bytes(ddp_bytes)} of plain data parallelism"
            if max_bytes < ddp_bytes
            else ""
        )
        lines.append(("memory", f"{format_bytes(max_bytes)} of model states a rank{saving_note}"))
    if page is not None:
        lines.append(("report", str(page)))
    if record.checkpoints:
        lines.append(("checkpoint", str(directory.checkpoints_dir / record.checkpoints[-1])))
    if record.outcome != "finished":
        return [*lines, ("go on", resume_command(setup))]
    lines.append(("weights", str(directory.model_dir)))
    if setup.corpus.tokenizer_path is not None:
        lines.append(("use it", f"zeroshard generate {shlex.quote(str(directory.path))} --prompt 'Once'"))
    return lines


def resume_command(setup: TrainingSetup) -> str:
    """Return the command that resumes a run."""
    return f"zeroshard train --out {shlex.quote(str(setup.directory.path))} --resume"
