"""Summary: what is told of a run before its first step and after its last."""

from __future__ import annotations

import shlex
from pathlib import Path

from zeroshard.memory.report import size
from zeroshard.train.job import Job
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
        ("ranks", f"{world.ranks} on {job.record.device} over {world.backend}"),
        ("ZeRO", f"stage {job.record.stage}, {job.precision}"),
        ("steps", f"{job.options.training.steps}{begin}, {tokens:,} tokens a step{accumulated}"),
        ("run", str(job.directory.path)),
    ]


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
