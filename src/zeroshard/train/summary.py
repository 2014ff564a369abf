"""Summary: what is told of a run before its first step and after its last."""

from __future__ import annotations

import shlex
from pathlib import Path

from zeroshard.memory.report import size
from zeroshard.train.job import Job
from zeroshard.train.options import Options
from zeroshard.train.record import fullest


def header(job: Job, start: int) -> list[tuple[str, str]]:
    """What is about to be run, as pairs of label and value."""
    batching, world = job.batching, job.world
    begin = f" from step {start}" if start else ""
    accumulated = f", {batching.accumulate} backwards a step" if batching.accumulate > 1 else ""
    held_out = f", {len(job.held_out.tokens):,} held out" if job.held_out is not None else ""
    tokens = batching.batch * job.training.sequence
    return [
        ("model", f"{job.language_model.description}, {job.record.model['parameters']:,} parameters"),
        ("data", f"{len(job.training.tokens):,} tokens to train on{held_out}"),
        ("ranks", f"{world.ranks} on {job.record.device} over {world.backend}{groups(job.options, world.ranks)}"),
        *([("plan", job.why)] if job.why else []),
        *sharding(job.options, job.precision),
        ("steps", f"{job.options.training.steps}{begin}, {tokens:,} tokens a step{accumulated}"),
        ("run", str(job.directory.path)),
    ]


def groups(options: Options, ranks: int) -> str:
    """How the ranks share data and layers, to follow their number; nothing where none divide a layer."""
    tensor = options.sharding.tensor
    return f", in {ranks // tensor} groups of {tensor} that divide each layer" if tensor > 1 else ""


def sharding(options: Options, precision: str) -> list[tuple[str, str]]:
    """What becomes of states and activations, as pairs of label and value.

    >>> sharding(Options().configured("C5"), "bf16")
    [('ZeRO', 'C5: stage 2, bf16'), ('blocks', 'recomputed from inputs kept in host memory (whole: no --tensor)')]
    """
    name = options.sharding.configuration
    changed = "" if name is None or options == options.configured(name) else ", changed"
    kept = options.sharding.stage == 3 and precision in ("bf16", "fp16") and not options.sharding.cast_on_gather
    how = f"stage {options.sharding.stage}, {precision}{', kept beside the masters' if kept else ''}"
    lines = [("ZeRO", (f"{name}{changed}: " if name else "") + how)]
    if options.sharding.offload != "device" and options.sharding.offload_fraction:
        part = "" if options.sharding.offload_fraction == 1 else f"{options.sharding.offload_fraction:.0%} of "
        lines.append(("tiers", f"{part}optimizer states on {options.sharding.offload}, updated there"))
    if options.sharding.offload_parameters:
        lines.append(("", "parameters in host memory, brought for each use"))
    if options.model.recomputed:
        where = "in host memory" if options.model.offload_activations else "on the device"
        lines.append(("blocks", f"recomputed from inputs kept {where}{_parts(options)}"))
    return lines


def _parts(options: Options) -> str:
    """How much of the blocks' inputs a rank keeps, where something was said about it."""
    partitioned, tensor = options.model.partition_activations, options.sharding.tensor
    if tensor > 1:
        return f", 1/{tensor} on each rank" if partitioned else ", whole on each rank"
    return " (whole: no --tensor)" if partitioned and options.sharding.configuration is not None else ""


def footer(job: Job, done: int, page: Path | None) -> list[tuple[str, str]]:
    """What has come of it, and what can be done with it."""
    record, out = job.record, job.directory
    lines = [("outcome", f"{record.outcome} after step {done}")]
    if record.memory:
        most = sum(fullest(record.memory).values())
        plain = sum(record.plain.values())
        less = f", {plain / most:.1f} × less than the {size(plain)} of plain data parallelism" if most < plain else ""
        lines.append(("memory", f"{size(most)} of model states a rank{less}"))
    if page is not None:
        lines.append(("report", str(page)))
    if record.checkpoints:
        lines.append(("checkpoint", str(out.checkpoints / record.checkpoints[-1])))
    if record.outcome != "finished":
        return [*lines, ("go on", resuming(job))]
    lines.append(("weights", str(out.model)))
    if job.corpus.tokenizer is not None:
        lines.append(("use it", f"zeroshard generate {shlex.quote(str(out.path))} --prompt 'Once'"))
    return lines


def resuming(job: Job) -> str:
    """The command that goes on with a run."""
    return f"zeroshard train --out {shlex.quote(str(job.directory.path))} --resume"
