"""Dry run: what `zeroshard train` would use, told without using it."""

from __future__ import annotations

import torch
from torch import nn

from zeroshard.memory.report import size
from zeroshard.offload import TIERS
from zeroshard.planner.memory import Memory, predict_memory
from zeroshard.planner.plan import precision_for
from zeroshard.train.check import batching_of
from zeroshard.train.job import check_tensor, chosen_precision, sequence_length
from zeroshard.train.models.language_model import LanguageModel, open_language_model
from zeroshard.train.options import Options, ShardOptions
from zeroshard.train.settled import machine_on_paper, settle
from zeroshard.train.summary import groups, sharding

STAGES = (0, 1, 2, 3)


def dry_run(options: Options, ranks: int) -> str:
    """Say what a run on ``ranks`` ranks would be, and what each would hold in every stage. Takes no memory to speak of.

    >>> print(dry_run(Options(), ranks=2).splitlines()[0])
    model     GPT, 4 layers, 4 heads, width 128, 1,071,872 parameters
    """
    training, batching = options.training, batching_of(options, ranks)
    language_model = open_language_model(options.model, options.data)
    check_tensor(options, language_model.module)
    sequence = sequence_length(options, language_model)
    device = "cuda" if options.sharding.device != "cpu" and torch.cuda.is_available() else "cpu"
    precision = chosen_precision(options, device)
    if options.sharding.auto and options.sharding.machine is not None:
        device, precision = _elsewhere(options, ranks)
    options, why = settle(options, batching, language_model, sequence, precision, ranks)
    batching = batching_of(options, ranks)
    parameters = list(language_model.module.parameters())
    total, trained = (sum(p.numel() for p in parameters if p.requires_grad or every) for every in (True, False))
    share = "" if trained == total else f", {trained:,} of them trained"
    passes = "s" if batching.accumulate > 1 else ""
    pairs = [
        ("model", f"{language_model.description}, {total:,} parameters{share}"),
        ("data", ", ".join(options.data.data) or "Shakespeare, eight plays"),
        ("ranks", f"{ranks} on {device}{groups(options, ranks)}"),
        *([("plan", why)] if why else []),
        *sharding(options, precision),
        (
            "steps",
            f"{training.steps} of {batching.batch} sequences × {sequence} tokens: {batching.micro} a rank and "
            f"backward, {batching.accumulate} backward{passes} a step",
        ),
        (
            "rate",
            f"{training.lr:g} after {training.warmup} steps, then down by a cosine; clipped at {training.clip:g}",
        ),
        ("out", options.run.out or f"runs/{options.name}, or with a number"),
    ]
    tokens = batching.micro * sequence  # a rank and backward
    lines = [f"{label:<10}{value}" for label, value in pairs]
    lines += ["", f"memory a rank (activations come on top{_inputs(options, language_model, precision, tokens)})"]
    plans = {stage: _planned(language_model.module, options.sharding, stage, ranks, precision) for stage in STAGES}
    return "\n".join([*lines, *_table(plans, options.sharding.stage)])


def _elsewhere(options: Options, ranks: int) -> tuple[str, str]:
    """The device and the precision of a run on the machine that the options name."""
    machine, precision = machine_on_paper(options, ranks), options.sharding.precision
    return machine.kind, precision_for(machine) if precision == "auto" else precision


def _planned(module: nn.Module, chosen: ShardOptions, stage: int, ranks: int, precision: str) -> Memory:
    offload = chosen.offloaded if stage == 3 else {**chosen.offloaded, "parameters": "device"}
    return predict_memory(
        module,
        ranks=ranks,
        tensor=chosen.tensor,
        stage=stage,
        precision=precision,
        offload=offload,
        cast_on_gather=chosen.cast_on_gather,
    )


def _inputs(options: Options, language_model: LanguageModel, precision: str, tokens: int) -> str:
    """What the blocks' inputs take, where these are all that is kept of the blocks."""
    if not options.model.recomputed or not language_model.layers:
        return ""
    ranks = options.sharding.tensor if options.model.partition_activations else 1
    kept = -(-tokens * language_model.width // ranks) * language_model.layers * (4 if precision == "fp32" else 2)
    where = " in host memory" if options.model.offload_activations else ""
    return f", the blocks' inputs with {size(kept)}{where}"


def _table(plans: dict[int, Memory], chosen: int) -> list[str]:
    kinds = [kind for kind in plans[0].states if any(plan.states[kind] for plan in plans.values())]
    rows = [(kind, [size(plan.states[kind]) for plan in plans.values()]) for kind in kinds]
    rows.append(("states", [size(plan.at_rest) for plan in plans.values()]))
    rows.append(("most in a step", [size(plan.peak) for plan in plans.values()]))
    for tier in TIERS[1:]:
        far = [sum(nbytes for (_, there), nbytes in plan.far.items() if there == tier) for plan in plans.values()]
        if any(far):
            rows.append((f"states on {tier}", [size(nbytes) for nbytes in far]))
    titles = [f"stage {stage}" + (" ←" if stage == chosen else "") for stage in plans]
    lines = [(" " * 18 + "".join(f"{title:>13}" for title in titles)).rstrip()]
    return lines + [f"{name:<18}" + "".join(f"{value:>13}" for value in values) for name, values in rows]
