"""resolve_auto: let the planner choose the options that a run leaves to auto."""

from __future__ import annotations

from typing import Any

import torch

import zeroshard
from zeroshard.models import GPT, find_output_layers
from zeroshard.planner import Inputs, LossFn, Machine, Strategy, UntraceableError
from zeroshard.planner.auto import AUTO, JobTopology, choose_plan, choose_plan_for_machine, local_machine
from zeroshard.train.models.huggingface import output_loss
from zeroshard.train.models.language_model import LanguageModel, sequence_length
from zeroshard.train.options import Batching, ShardOptions, TrainOptions
from zeroshard.train.rank import RankInfo


def resolve_auto(
    options: TrainOptions, language_model: LanguageModel, precision: str, target: RankInfo | int
) -> tuple[TrainOptions, str]:
    """Return options without auto and a one-line reason; set up the model's activation checkpointing accordingly.

    With a RankInfo as ``target``, all ranks call it and rank 0 decides. With a world size alone, nothing is started,
    and a machine named by the options has all its memory free.
    """
    sharding, auto = options.sharding, options.sharding.auto
    if not auto:
        return options, ""
    if "recompute" in auto and sharding.tensor > 1 and not options.model.partition_activations:
        raise ValueError(
            "--auto with --tensor assumes partitioned activations: omit --no-partition-activations, or add --recompute "
            "or --no-recompute"
        )
    ranks = target.world_size if isinstance(target, RankInfo) else target
    batching, sequence = options.batching(ranks), sequence_length(options.model, language_model)
    inputs, loss = _tracing_inputs_and_loss(language_model, sequence)
    is_micro_batch_free = "micro-batch" in auto and options.training.accumulate is None
    constraints: dict[str, Any] = {
        **sharding.shard_options,
        **dict.fromkeys({"stage", "offload"} & set(auto), AUTO),
        "allow_lossy": sharding.allow_lossy,
        "checkpoint": AUTO if "recompute" in auto else None,
        "micro_batch": None if is_micro_batch_free else batching.micro,
        "batch": batching.batch,
        "sequence": sequence,
        "loss": loss,
        "precision": precision,
        "keep_bf16": find_output_layers(language_model.module),
        "optimizer": options.training.optimizer,
        "directory": sharding.offload_directory,
    }
    module = language_model.module
    try:
        if isinstance(target, RankInfo):
            limits: dict[str, Any] = {name: getattr(sharding, name) for name in ("machine", "memory", "timeout")}
            topology = JobTopology(target.device, ranks, sharding.tensor, sharding.replicas)
            decision = choose_plan(module, inputs, topology, **limits, **constraints)
        else:
            machine = target_machine(sharding, ranks)
            topology = JobTopology(torch.device(machine.kind), ranks, sharding.tensor, sharding.replicas)
            decision = choose_plan_for_machine(module, inputs, topology, machine, **constraints)
    except UntraceableError as error:
        raise ValueError(f"--auto: {error}. Omit --auto and set the options explicitly") from error
    resolved = _apply_decision(options, decision.strategy, batching)
    if "recompute" in auto and resolved.model.has_activation_checkpointing:
        zeroshard.checkpoint_activations(module, language_model.blocks, **resolved.model.checkpoint_kwargs)
    return resolved, decision.reason


def target_machine(sharding: ShardOptions, ranks: int) -> Machine:
    """Return the machine to plan for without starting a run: the one that the options name, or this one."""
    if sharding.machine is not None:
        changes = {} if sharding.memory is None else {"memory": sharding.memory}
        return Machine.resolve(sharding.machine, **changes)
    on_gpu = sharding.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    return local_machine(device, ranks, sharding.memory, sharding.offload_directory)


def _apply_decision(options: TrainOptions, strategy: Strategy, batching: Batching) -> TrainOptions:
    """Return the options with the planner's decision applied."""
    auto = options.sharding.auto
    changes: dict[str, Any] = {"auto": (), "allow_lossy": False}
    changes |= {name: getattr(strategy, name) for name in ("stage", "gather_dtype", "reduce_wire")}
    if "recompute" in auto:
        changes["recompute"] = strategy.checkpoint != "none"
        changes["offload_activations"] = strategy.checkpoint == "host"
    if "micro-batch" in auto:
        changes |= {"batch": batching.batch, "micro_batch": strategy.micro_batch}
    if "offload" in auto and strategy.offload is not None:
        ((tier, fraction),) = strategy.offload.optimizer.items()
        changes |= {"offload": tier, "offload_fraction": fraction}
        changes["offload_parameters"] = bool(strategy.offload.parameters)
    return options.with_values(changes)


def _tracing_inputs_and_loss(language_model: LanguageModel, sequence: int) -> tuple[Inputs, LossFn]:
    """Return the inputs that the training loop passes to the model, and its loss function."""
    if isinstance(language_model.module, GPT):
        return None, None  # the planner knows this model

    def inputs(batch: int) -> dict[str, Any]:
        return {"input_ids": torch.zeros(batch, sequence, dtype=torch.int64, device="meta"), "use_cache": False}

    def loss(output: Any) -> torch.Tensor:
        targets = torch.zeros(output.logits.shape[:2], dtype=torch.int64, device="meta")
        return output_loss(language_model.module, output, targets)

    return inputs, loss
