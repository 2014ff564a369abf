"""What a run prints: the view, its description before the first step and after the last, and `--dry-run`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch

import zeroshard
from zeroshard.models import find_output_layers
from zeroshard.planner import predict_memory
from zeroshard.tensor_parallel import local_numels
from zeroshard.train.models import LanguageModel, open_language_model
from zeroshard.train.options import TrainOptions
from zeroshard.train.run_record import describe_model, state_bytes
from zeroshard.train.run_view import RunView
from zeroshard.train.training_setup import TrainingSetup, resolve_auto, resolve_precision, target_machine
from zeroshard.utils.format import format_bytes

EIGHT_BIT_LABELS = {"gather_dtype": "gathers", "reduce_wire": "reductions"}


def open_view(
    *, total_steps: int, start_step: int, stream: TextIO | None = None, plain: bool = False, log_every: int = 10
) -> RunView:
    """Return the view for `stream` (default: stdout): live on a terminal, otherwise, or if `plain`, lines.

    >>> from zeroshard.train.metrics import StepMetrics
    >>> view = open_view(total_steps=400, start_step=0)
    >>> metrics = StepMetrics(step=1, loss=5.812, lr=1e-3, grad_norm=1.02, tokens=4096, tokens_per_s=21300, seconds=1)
    >>> view.show_step(metrics)
    step    1/400  loss 5.812   lr 1.0e-03  norm 1.02   21.3k tokens/s  comm -     eta -:--
    """
    stream = sys.stdout if stream is None else stream
    plain_view = RunView(stream, total_steps=total_steps, start_step=start_step, log_every=log_every)
    is_unicode = (stream.encoding or "utf-8").lower().startswith("utf")
    if plain or not stream.isatty() or os.environ.get("TERM") == "dumb" or not is_unicode:
        return plain_view
    from rich.console import Console

    from zeroshard.train.live_view import LiveView

    return LiveView(Console(file=stream, force_terminal=True), total_steps=total_steps, start_step=start_step)


def option_lines(
    options: TrainOptions,
    model: Mapping[str, Any],
    precision: str,
    ranks: int,
    device: str,
    plan_reason: str,
    sequence: int,
) -> Iterator[tuple[str, str]]:
    """Yield what the options of a run mean, as pairs of label and value. ``model`` is that of its record.

    >>> model = {"description": "GPT", "parameters": 1000}
    >>> dict(option_lines(TrainOptions().with_configuration("C5"), model, "bf16", 2, "cpu", "", 128))["ZeRO"]
    'C5: stage 2, bf16'
    """
    sharding = options.sharding
    tensor = sharding.tensor
    batching = options.batching(ranks)
    groups = f", in {ranks // tensor} tensor-parallel groups of {tensor}" if tensor > 1 else ""
    rows = f", in {sharding.replicas} rows (partition {sharding.partition})" if sharding.replicas > 1 else ""
    averages = f", averaged every {sharding.local_steps} steps" if sharding.local_steps > 1 else ""
    name = f"{sharding.configuration}: " if sharding.configuration is not None else ""
    keeps_copy = sharding.stage == 3 and precision in ("bf16", "fp16", "fp8") and not sharding.cast_on_gather
    copy = " shards kept with the master weights" if keeps_copy else ""
    yield "model", f"{model['description']}, {model['parameters']:,} parameters"
    yield "ranks", f"{ranks} on {device}{groups}{rows}{averages}"
    yield "ZeRO", f"{name}stage {sharding.stage}, {precision}{copy}"
    if plan_reason:
        yield "plan", plan_reason
    if sharding.offload != "device" and sharding.offload_fraction:
        share = f"{sharding.offload_fraction:.0%} of optimizer states"
        yield "offload", f"{share} on {sharding.offload}, updated by the CPU"
    if sharding.offload_parameters:
        yield "offload", "parameters in host memory, copied to the device for each use"
    if options.model.has_activation_checkpointing:
        location = "in host memory" if options.model.offload_activations else "on the device"
        share = f", 1/{tensor} on each rank" if options.model.partition_activations and tensor > 1 else ""
        yield "blocks", f"recomputed from inputs kept {location}{share}"
    plural = "s" if batching.accumulate > 1 else ""
    yield (
        "steps",
        f"{options.training.steps} of {batching.batch} sequences × {sequence} tokens: {batching.micro} per rank and "
        f"backward, {batching.accumulate} backward{plural} per step",
    )


def header_lines(setup: TrainingSetup) -> Iterator[tuple[str, str]]:
    """Yield the description of a run, as pairs of label and value."""
    options, record = setup.options, setup.record
    validation = f", {len(setup.validation_loader.tokens):,} for validation" if setup.validation_loader else ""
    report = zeroshard.report(setup.model)
    yield from option_lines(
        options,
        record.model,
        record.precision,
        record.ranks,
        f"{record.device} over {record.backend}",
        setup.plan_reason,
        setup.train_loader.sequence,
    )
    yield "data", f"{len(setup.train_loader.tokens):,} tokens for training{validation}"
    for option, params in report.eight_bits.items():
        yield EIGHT_BIT_LABELS[option], str(params)
    yield options.training.optimizer, str(report.routing)
    if report.float8 is not None:
        yield "float8", str(report.float8)
    if setup.start_step:
        yield "resume", f"from step {setup.start_step}"
    if options.run.profile:
        steps = options.profiled_steps(setup.start_step)
        text = f"steps {steps[0]} to {steps[-1]}" if steps else f"no step: the run ends before step {steps.start}"
        yield "profile", text
    yield "run", str(setup.directory.path)


def footer_lines(setup: TrainingSetup, steps_done: int, report_path: Path | None) -> Iterator[tuple[str, str]]:
    """Yield the results of a run and the next commands, as pairs of label and value."""
    record, directory = setup.record, setup.directory
    yield "outcome", f"{record.outcome} after step {steps_done}"
    if record.memory_by_rank:
        held = max(sum(state_bytes(rank).values()) for rank in record.memory_by_rank)
        ddp = sum(record.ddp_state_bytes.values())
        ratio = f", {ddp / held:.1f} × less than the {format_bytes(ddp)} of plain data parallelism"
        yield "memory", f"{format_bytes(held)} of model states per rank{ratio if held < ddp else ''}"
    needed = sum(record.needed_bytes_per_step.values())
    if needed:
        moved = sum(traffic["bytes"] for traffic in record.collectives_per_step.values())
        prediction = f"{moved / needed:.2f} × the {format_bytes(needed)} that these options need"
        yield "traffic", f"{format_bytes(moved)} per rank in a step, {prediction}"
    if report_path is not None:
        yield "report", str(report_path)
    if record.checkpoints:
        yield "checkpoint", str(directory.checkpoints_dir / record.checkpoints[-1])
    if record.outcome != "finished":
        yield "resume", resume_command(setup)
        return
    yield "weights", str(directory.model_dir)
    if setup.corpus.tokenizer is not None:
        yield "generate", f"zeroshard generate {shlex.quote(str(directory.path))} --prompt 'Once'"


def resume_command(setup: TrainingSetup) -> str:
    """Return the command that resumes a run."""
    return f"zeroshard train --out {shlex.quote(str(setup.directory.path))} --resume"


def dry_run(options: TrainOptions, ranks: int) -> str:
    """Describe a run on ``ranks`` ranks, and each rank's memory in every stage. It needs almost no memory itself.

    >>> print(dry_run(TrainOptions(), ranks=2).splitlines()[0])
    model     GPT, 4 layers, 4 heads, width 128, 1,071,872 parameters
    """
    options.batching(ranks)  # raises before the model is built
    language_model = open_language_model(options.model, options.data)
    local_numels(language_model.module, options.sharding.tensor)  # raises if the layers cannot be split
    device = "cuda" if options.sharding.device != "cpu" and torch.cuda.is_available() else "cpu"
    precision = resolve_precision(options, device)
    if options.sharding.auto and options.sharding.machine is not None:
        machine = target_machine(options.sharding, ranks)
        device = machine.kind
        precision = machine.default_precision if options.sharding.precision == "auto" else precision
    options, plan_reason = resolve_auto(options, language_model, precision, ranks)
    model = describe_model(language_model)
    lines = [
        *option_lines(options, model, precision, ranks, device, plan_reason, language_model.sequence),
        ("data", ", ".join(options.data.data) or "Shakespeare, eight plays"),
        ("out", options.run.out or f"runs/{options.name}, with a number if it exists"),
    ]
    return "\n".join(
        [
            *(f"{label:<10}{value}" for label, value in lines),
            "\nmemory per rank, without activations",
            *_memory_table(options, language_model, ranks, precision, on_gpu=device == "cuda"),
        ]
    )


def _memory_table(
    options: TrainOptions, language_model: LanguageModel, ranks: int, precision: str, on_gpu: bool
) -> list[str]:
    """Return a table of the memory per rank: one column for each stage that the mesh allows."""
    sharding = options.sharding
    columns: dict[str, dict[str, int]] = {}
    for stage in range(4):
        changes: dict[str, Any] = {"stage": stage}
        if stage < 3:
            changes |= {"gather_dtype": None, "offload_parameters": False}
        if stage == 0:
            changes["reduce_wire"] = None
        try:
            predicted = predict_memory(
                language_model.module,
                ranks=ranks,
                tensor=sharding.tensor,
                replicas=sharding.replicas,
                optimizer=options.training.optimizer,
                precision=precision,
                keep_bf16=find_output_layers(language_model.module),
                on_gpu=on_gpu,
                **replace(sharding, **changes).shard_options,
            )
        except ValueError:
            if stage == sharding.stage:
                raise
            continue
        column = {**predicted.states, "states": predicted.state_bytes, "peak in a step": predicted.peak_bytes}
        for (_, tier), nbytes in predicted.offloaded.items():
            row = f"states on {tier}"
            column[row] = column.get(row, 0) + nbytes
        columns[f"stage {stage}" + (" ←" if stage == sharding.stage else "")] = column
    names = dict.fromkeys(name for column in columns.values() for name, nbytes in column.items() if nbytes)
    cells = {name: [format_bytes(column.get(name, 0)) for column in columns.values()] for name in names}
    return [
        (f"{name:<18}" + "".join(f"{cell:>13}" for cell in row)).rstrip()
        for name, row in {"": list(columns), **cells}.items()
    ]
