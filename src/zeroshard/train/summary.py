"""What a run prints: the view, its description before the first step and after the last, and `--dry-run`."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

import zeroshard
from zeroshard.config.config import Config, check_inner_axis
from zeroshard.config.offload import TIERS
from zeroshard.planner import PredictedMemory, WholeParamSpec, find_whole_params, predict_memory
from zeroshard.train.auto_options import resolve_auto, target_machine
from zeroshard.train.models.language_model import (
    LanguageModel,
    find_output_layers,
    open_language_model,
    sequence_length,
)
from zeroshard.train.options import TrainOptions
from zeroshard.train.run_record import max_state_bytes
from zeroshard.train.run_view import PlainView, RunView
from zeroshard.train.training_setup import TrainingSetup, check_tensor_parallel, resolve_precision
from zeroshard.utils.format import format_bytes

STAGES = (0, 1, 2, 3)
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
    if log_every < 1:
        raise ValueError(f"log_every must be at least 1 (got {log_every})")
    stream = sys.stdout if stream is None else stream
    plain_view = PlainView(stream, total_steps=total_steps, start_step=start_step, log_every=log_every)
    is_unicode = (stream.encoding or "utf-8").lower().startswith("utf")
    if plain or not stream.isatty() or os.environ.get("TERM") == "dumb" or not is_unicode:
        return plain_view
    if importlib.util.find_spec("rich") is None:
        plain_view.show_message("the live view needs rich, which is not installed: pip install 'zeroshard[train]'")
        return plain_view
    from rich.console import Console

    from zeroshard.train.live_view import LiveView

    return LiveView(Console(file=stream, force_terminal=True), total_steps=total_steps, start_step=start_step)


def header_lines(setup: TrainingSetup, start_step: int) -> list[tuple[str, str]]:
    """Return the description of a run, as pairs of label and value."""
    options, batching, rank_info = setup.options, setup.batching, setup.rank_info
    start_note = f" from step {start_step}" if start_step else ""
    backwards_note = f", {batching.accumulate} backwards per step" if batching.accumulate > 1 else ""
    validation = setup.validation_loader
    validation_note = f", {len(validation.tokens):,} for validation" if validation is not None else ""
    groups_note = describe_tensor_groups(options, rank_info.world_size)
    report = zeroshard.report(setup.model)
    return [
        ("model", f"{setup.language_model.description}, {setup.record.facts.model['parameters']:,} parameters"),
        ("data", f"{len(setup.train_loader.tokens):,} tokens for training{validation_note}"),
        ("ranks", f"{rank_info.world_size} on {setup.record.facts.device} over {rank_info.backend}{groups_note}"),
        *([("plan", setup.plan_reason)] if setup.plan_reason else []),
        *describe_sharding(options, setup.precision),
        *([("float8", str(report.float8))] if report.float8 is not None else []),
        *((EIGHT_BIT_LABELS[option], str(params)) for option, params in report.eight_bits.items()),
        (options.training.optimizer, str(report.routing)),
        ("steps", f"{options.training.steps}{start_note}, {setup.tokens_per_step:,} tokens per step{backwards_note}"),
        *([("profile", _describe_profile(options, start_step))] if options.run.profile else []),
        ("run", str(setup.directory.path)),
    ]


def _describe_profile(options: TrainOptions, start_step: int) -> str:
    """Return which steps are profiled.

    >>> from zeroshard.train.options import RunOptions, StepOptions
    >>> _describe_profile(TrainOptions(run=RunOptions(profile=True), training=StepOptions(steps=5)), start_step=0)
    'steps 4 to 5: the run ends before step 6'
    """
    steps, last = options.profiled_steps(start_step), start_step + options.run.profile_steps[1]
    if not steps:
        return f"no step: the run ends before step {steps.start}, the first of --profile-steps"
    end_note = f": the run ends before step {last}" if steps[-1] < last else ""
    return f"steps {steps[0]} to {steps[-1]}{end_note}"


def describe_tensor_groups(options: TrainOptions, ranks: int) -> str:
    """Return how the ranks are grouped, as a suffix to their number; empty if they are not."""
    tensor, replicas = options.sharding.tensor, options.sharding.replicas
    text = f", in {ranks // tensor} tensor-parallel groups of {tensor}" if tensor > 1 else ""
    text = f"{text}, in {replicas} rows (partition {options.sharding.partition})" if replicas > 1 else text
    steps = options.sharding.local_steps
    return f"{text}, averaged every {steps} steps" if steps > 1 else text


def describe_sharding(options: TrainOptions, precision: str) -> list[tuple[str, str]]:
    """Return how states and activations are sharded and offloaded, as pairs of label and value.

    >>> describe_sharding(TrainOptions().with_configuration("C5"), "bf16")
    [('ZeRO', 'C5: stage 2, bf16'), ('blocks', 'recomputed from inputs kept in host memory (replicated: no --tensor)')]
    """
    sharding = options.sharding
    name = sharding.configuration
    changed = "" if name is None or options == options.with_configuration(name) else ", changed"
    keeps_copy = sharding.stage == 3 and precision in ("bf16", "fp16", "fp8") and not sharding.cast_on_gather
    description = f"stage {sharding.stage}, {precision}{' shards kept with the master weights' if keeps_copy else ''}"
    lines = [("ZeRO", (f"{name}{changed}: " if name else "") + description)]
    if sharding.offload != "device" and sharding.offload_fraction:
        fraction_note = "" if sharding.offload_fraction == 1 else f"{sharding.offload_fraction:.0%} of "
        lines.append(("offload", f"{fraction_note}optimizer states on {sharding.offload}, updated by the CPU"))
    if sharding.offload_parameters:
        lines.append(("", "parameters in host memory, copied to the device for each use"))
    if options.model.has_activation_checkpointing:
        location = "in host memory" if options.model.offload_activations else "on the device"
        lines.append(("blocks", f"recomputed from inputs kept {location}{_describe_activation_partitioning(options)}"))
    return lines


def _describe_activation_partitioning(options: TrainOptions) -> str:
    """Return how block inputs are partitioned; empty if neither --tensor nor a configuration sets it."""
    is_partitioned, tensor = options.model.partition_activations, options.sharding.tensor
    if tensor > 1:
        return f", 1/{tensor} on each rank" if is_partitioned else ", replicated"
    return " (replicated: no --tensor)" if is_partitioned and options.sharding.configuration is not None else ""


def footer_lines(setup: TrainingSetup, steps_done: int, report_path: Path | None) -> list[tuple[str, str]]:
    """Return the results of a run and the next commands, as pairs of label and value."""
    record, directory = setup.record, setup.directory
    lines = [("outcome", f"{record.outcome} after step {steps_done}")]
    if record.memory:
        held, ddp = sum(max_state_bytes(record.memory).values()), sum(record.facts.plain.values())
        ratio = f", {ddp / held:.1f} × less than the {format_bytes(ddp)} of plain data parallelism"
        lines.append(("memory", f"{format_bytes(held)} of model states per rank{ratio if held < ddp else ''}"))
    moved, needed = record.traffic_totals
    if moved and needed:
        average_note = ", with an average of the replicas" if "replica average" in (record.traffic or {}) else ""
        prediction = f"{moved / needed:.2f} × the {format_bytes(needed)} that these options need"
        lines.append(("traffic", f"{format_bytes(moved)} per rank in a step{average_note}, {prediction}"))
    if report_path is not None:
        lines.append(("report", str(report_path)))
    if record.checkpoints:
        lines.append(("checkpoint", str(directory.checkpoints_dir / record.checkpoints[-1])))
    if record.outcome != "finished":
        return [*lines, ("resume", resume_command(setup))]
    lines.append(("weights", str(directory.model_dir)))
    if setup.corpus.tokenizer_path is not None:
        lines.append(("generate", f"zeroshard generate {shlex.quote(str(directory.path))} --prompt 'Once'"))
    return lines


def resume_command(setup: TrainingSetup) -> str:
    """Return the command that resumes a run."""
    return f"zeroshard train --out {shlex.quote(str(setup.directory.path))} --resume"


# ------------------------------------------------------------------------------------------------ dry run


def dry_run(options: TrainOptions, ranks: int) -> str:
    """Describe a run on ``ranks`` ranks, and each rank's memory in every stage. It needs almost no memory itself.

    >>> print(dry_run(TrainOptions(), ranks=2).splitlines()[0])
    model     GPT, 4 layers, 4 heads, width 128, 1,071,872 parameters
    """
    options.batching(ranks)  # raises before the model is built
    language_model = open_language_model(options.model, options.data)
    check_tensor_parallel(options, language_model.module)
    sequence = sequence_length(options.model, language_model)
    device = "cuda" if options.sharding.device != "cpu" and torch.cuda.is_available() else "cpu"
    precision = resolve_precision(options, device)
    if options.sharding.auto and options.sharding.machine is not None:
        machine = target_machine(options.sharding, ranks)
        device = machine.kind
        precision = machine.default_precision if options.sharding.precision == "auto" else precision
    options, plan_reason = resolve_auto(options, language_model, precision, ranks)
    batching, training, sharding = options.batching(ranks), options.training, options.sharding
    if sharding.replicas > 1 and sharding.partition != "hybrid":
        check_inner_axis(
            Config(precision=precision, **sharding.shard_options), ranks // sharding.tensor // sharding.replicas
        )
    parameters = list(language_model.module.parameters())
    total = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    trained_note = "" if trained == total else f", {trained:,} of them trained"
    plural = "s" if batching.accumulate > 1 else ""
    steps = (
        f"{training.steps} of {batching.batch} sequences × {sequence} tokens: {batching.micro} per rank and backward, "
        f"{batching.accumulate} backward{plural} per step"
    )
    whole = find_whole_params(language_model.module, training.optimizer)
    muon_note = f" ({training.muon_lr:g} for Muon)" if training.muon_lr is not None else ""
    schedule = (
        f"{training.lr:g}{muon_note} after {training.warmup} steps, then cosine decay; clipped at {training.clip:g}"
    )
    rows = [
        ("model", f"{language_model.description}, {total:,} parameters{trained_note}"),
        ("data", ", ".join(options.data.data) or "Shakespeare, eight plays"),
        ("ranks", f"{ranks} on {device}{describe_tensor_groups(options, ranks)}"),
        *([("plan", plan_reason)] if plan_reason else []),
        *describe_sharding(options, precision),
        *([(training.optimizer, _describe_muon(parameters, whole))] if whole else []),
        ("steps", steps),
        ("rate", schedule),
        ("out", options.run.out or f"runs/{options.name}, with a number if it exists"),
    ]
    inputs_note = _describe_block_inputs(options, language_model, precision, tokens=batching.micro * sequence)
    return "\n".join(
        [
            *(f"{label:<10}{value}" for label, value in rows),
            "",
            f"memory per rank, without activations{inputs_note}",
            *_memory_table(options, language_model, ranks, precision, on_gpu=device == "cuda"),
        ]
    )


def _describe_muon(parameters: Sequence[torch.Tensor], whole: Mapping[str, WholeParamSpec]) -> str:
    """Say how many parameters are Muon's, and how many AdamW's."""
    trained = [parameter.numel() for parameter in parameters if parameter.requires_grad]
    matrix_numel = sum(spec.numel for spec in whole.values())
    return (
        f"{len(whole)} matrices of blocks, {matrix_numel:,} elements, each orthogonalized by one rank; AdamW for "
        f"{len(trained) - len(whole)} parameters, {sum(trained) - matrix_numel:,} elements"
    )


def _describe_block_inputs(options: TrainOptions, language_model: LanguageModel, precision: str, tokens: int) -> str:
    """Describe the memory of the saved block inputs; empty without activation checkpointing."""
    if not options.model.has_activation_checkpointing or not language_model.layers:
        return ""
    ranks = options.sharding.tensor if options.model.partition_activations else 1
    nbytes = -(-tokens * language_model.width // ranks) * language_model.layers * (4 if precision == "fp32" else 2)
    where = " in host memory" if options.model.offload_activations else ""
    return f"; inputs of blocks need {format_bytes(nbytes)}{where}"


def _memory_table(
    options: TrainOptions, language_model: LanguageModel, ranks: int, precision: str, on_gpu: bool
) -> list[str]:
    """Return a table of the memory per rank: one column for each stage that the mesh allows."""
    sharding = options.sharding

    def predict(stage: int) -> PredictedMemory:
        changes: dict[str, Any] = {"stage": stage}
        if stage != 3:
            changes |= {"gather_dtype": None, "offload": {**sharding.offload_config, "parameters": "device"}}
        if stage == 0:
            changes["reduce_wire"] = None
        return predict_memory(
            language_model.module,
            ranks=ranks,
            tensor=sharding.tensor,
            replicas=sharding.replicas,
            optimizer=options.training.optimizer,
            precision=precision,
            keep_bf16=find_output_layers(language_model.module),
            on_gpu=on_gpu,
            **{**sharding.shard_options, **changes},
        )

    predicted: dict[int, PredictedMemory] = {}
    for stage in STAGES:
        try:
            predicted[stage] = predict(stage)
        except ValueError:
            if stage == sharding.stage:
                raise
    stages = list(predicted.values())
    rows = {kind: [stage.states[kind] for stage in stages] for kind in stages[0].states}
    rows = {kind: sizes for kind, sizes in rows.items() if any(sizes)}
    rows["states"] = [stage.state_bytes for stage in stages]
    rows["peak in a step"] = [stage.peak_bytes for stage in stages]
    for tier in TIERS[1:]:
        sizes = [sum(size for (_, at), size in stage.offloaded.items() if at == tier) for stage in stages]
        if any(sizes):
            rows[f"states on {tier}"] = sizes
    titles = [f"stage {stage}" + (" ←" if stage == sharding.stage else "") for stage in predicted]
    cells = {"": titles} | {name: [format_bytes(size) for size in sizes] for name, sizes in rows.items()}
    return [(f"{name:<18}" + "".join(f"{cell:>13}" for cell in row)).rstrip() for name, row in cells.items()]
