"""dry_run: describe what `zeroshard train` would use, without running it."""

from __future__ import annotations

import torch
from torch import nn

from zeroshard.config.offload import TIERS
from zeroshard.planner import PredictedMemory, default_precision, predict_memory
from zeroshard.train.auto_options import resolve_auto, target_machine
from zeroshard.train.models.language_model import LanguageModel, open_language_model
from zeroshard.train.option_checks import resolve_batching
from zeroshard.train.options import ShardOptions, TrainOptions
from zeroshard.train.summary import describe_sharding, describe_tensor_groups
from zeroshard.train.training_setup import check_tensor_parallel, resolve_precision, sequence_length
from zeroshard.utils.format import format_bytes

STAGES = (0, 1, 2, 3)


def dry_run(options: TrainOptions, ranks: int) -> str:
    """Describe a run on ``ranks`` ranks, and each rank's memory in every stage. It needs almost no memory itself.

    >>> print(dry_run(TrainOptions(), ranks=2).splitlines()[0])
    model     GPT, 4 layers, 4 heads, width 128, 1,071,872 parameters
    """
    training, batching = options.training, resolve_batching(options, ranks)
    language_model = open_language_model(options.model, options.data)
    check_tensor_parallel(options, language_model.module)
    sequence = sequence_length(options, language_model)
    device = "cuda" if options.sharding.device != "cpu" and torch.cuda.is_available() else "cpu"
    precision = resolve_precision(options, device)
    if options.sharding.auto and options.sharding.machine is not None:
        device, precision = _target_device_and_precision(options, ranks)
    options, plan_reason = resolve_auto(options, batching, language_model, sequence, precision, ranks)
    batching = resolve_batching(options, ranks)
    parameters = list(language_model.module.parameters())
    total, trained = (
        sum(p.numel() for p in parameters if p.requires_grad or count_frozen) for count_frozen in (True, False)
    )
    trained_note = "" if trained == total else f", {trained:,} of them trained"
    plural = "s" if batching.accumulate > 1 else ""
    rows = [
        ("model", f"{language_model.description}, {total:,} parameters{trained_note}"),
        ("data", ", ".join(options.data.data) or "Shakespeare, eight plays"),
        ("ranks", f"{ranks} on {device}{describe_tensor_groups(options, ranks)}"),
        *([("plan", plan_reason)] if plan_reason else []),
        *describe_sharding(options, precision),
        (
            "steps",
            f"{training.steps} of {batching.batch} sequences × {sequence} tokens: {batching.micro} a rank and "
            f"backward, {batching.accumulate} backward{plural} a step",
        ),
        (
            "rate",
            f"{training.lr:g} after {training.warmup} steps, then down by a cosine; clipped at {training.clip:g}",
        ),
        ("out", options.run.out or f"runs/{options.name}, or with a number"),
    ]
    tokens = batching.micro * sequence  # per rank and backward
    lines = [f"{label:<10}{value}" for label, value in rows]
    lines += [
        "",
        f"memory a rank (activations come on top{_describe_block_inputs(options, language_model, precision, tokens)})",
    ]
    plans = {
        stage: _predict_stage_memory(language_model.module, options.sharding, stage, ranks, precision)
        for stage in STAGES
    }
    return "\n".join([*lines, *_memory_table(plans, options.sharding.stage)])


def _target_device_and_precision(options: TrainOptions, ranks: int) -> tuple[str, str]:
    """Return the device and the precision of a run on the machine that the options name."""
    machine, precision = target_machine(options, ranks), options.sharding.precision
    return machine.kind, default_precision(machine) if precision == "auto" else precision


def _predict_stage_memory(
    module: nn.Module, sharding: ShardOptions, stage: int, ranks: int, precision: str
) -> PredictedMemory:
    offload = sharding.offload_config if stage == 3 else {**sharding.offload_config, "parameters": "device"}
    return predict_memory(
        module,
        ranks=ranks,
        tensor=sharding.tensor,
        stage=stage,
        precision=precision,
        offload=offload,
        cast_on_gather=sharding.cast_on_gather,
    )


def _describe_block_inputs(options: TrainOptions, language_model: LanguageModel, precision: str, tokens: int) -> str:
    """Describe the memory of the saved block inputs; empty without activation checkpointing."""
    if not options.model.has_activation_checkpointing or not language_model.layers:
        return ""
    ranks = options.sharding.tensor if options.model.partition_activations else 1
    nbytes = -(-tokens * language_model.width // ranks) * language_model.layers * (4 if precision == "fp32" else 2)
    where = " in host memory" if options.model.offload_activations else ""
    return f", the blocks' inputs with {format_bytes(nbytes)}{where}"


def _memory_table(plans: dict[int, PredictedMemory], chosen: int) -> list[str]:
    kinds = [kind for kind in plans[0].states if any(plan.states[kind] for plan in plans.values())]
    rows = [(kind, [format_bytes(plan.states[kind]) for plan in plans.values()]) for kind in kinds]
    rows.append(("states", [format_bytes(plan.state_bytes) for plan in plans.values()]))
    rows.append(("most in a step", [format_bytes(plan.peak_bytes) for plan in plans.values()]))
    for tier in TIERS[1:]:
        offloaded = [
            sum(nbytes for (_, state_tier), nbytes in plan.offloaded.items() if state_tier == tier)
            for plan in plans.values()
        ]
        if any(offloaded):
            rows.append((f"states on {tier}", [format_bytes(nbytes) for nbytes in offloaded]))
    titles = [f"stage {stage}" + (" ←" if stage == chosen else "") for stage in plans]
    lines = [(" " * 18 + "".join(f"{title:>13}" for title in titles)).rstrip()]
    return lines + [f"{name:<18}" + "".join(f"{value:>13}" for value in values) for name, values in rows]
