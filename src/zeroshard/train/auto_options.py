"""resolve_auto: let the planner choose the options that a run leaves to auto."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from zeroshard.config.offload import Offload
from zeroshard.models import GPT
from zeroshard.planner import (
    AUTO,
    FreeMemory,
    Inputs,
    JobTopology,
    LossFn,
    Machine,
    PlanDecision,
    UntraceableError,
    choose_plan,
    choose_plan_for_machine,
    machine_from_free_memory,
)
from zeroshard.train.batching import Batching
from zeroshard.train.models.language_model import LanguageModel
from zeroshard.train.options import Stage, TrainOptions
from zeroshard.train.rank_info import RankInfo


def resolve_auto(
    options: TrainOptions,
    batching: Batching,
    language_model: LanguageModel,
    sequence: int,
    precision: str,
    rank_info_or_world_size: RankInfo | int,
) -> tuple[TrainOptions, str]:
    """Return options without auto and a one-line reason; set up the model's activation checkpointing accordingly.

    With a RankInfo, all ranks call it and rank 0 decides. With a world size alone, nothing is started, and a machine
    named by the options has all its memory free.
    """
    sharding = options.sharding
    if not sharding.auto:
        return options, ""
    if "recompute" in sharding.auto and sharding.tensor > 1 and not options.model.partition_activations:
        raise ValueError(
            "--auto plans with partitioned activations: leave --no-partition-activations out, or say "
            "whether to recompute, with --recompute or --no-recompute"
        )
    inputs, loss = _tracing_inputs_and_loss(language_model, sequence)
    is_micro_batch_free = "micro-batch" in sharding.auto and options.training.accumulate is None
    constraints = {
        "stage": AUTO if "stage" in sharding.auto else sharding.stage,
        "offload": AUTO if "offload" in sharding.auto else sharding.offload_config,
        "checkpoint": AUTO if "recompute" in sharding.auto else None,
        "micro_batch": None if is_micro_batch_free else batching.micro,
        "batch": batching.batch,
        "sequence": sequence,
        "loss": loss,
        "precision": precision,
        "cast_on_gather": sharding.cast_on_gather,
        "directory": sharding.offload_directory,
    }
    try:
        decision = _choose_plan(options, language_model, inputs, rank_info_or_world_size, constraints)
    except UntraceableError as error:
        raise ValueError(f"--auto: {error}. Leave --auto out, and say what is to be done") from error
    resolved = _apply_decision(options, decision, batching)
    if "recompute" in sharding.auto and resolved.model.has_activation_checkpointing:
        language_model.checkpoint_activations(**resolved.model.checkpoint_kwargs)
    return resolved, decision.reason


def _choose_plan(
    options: TrainOptions,
    language_model: LanguageModel,
    inputs: Inputs,
    rank_info_or_world_size: RankInfo | int,
    constraints: dict[str, Any],
) -> PlanDecision:
    sharding, module = options.sharding, language_model.module
    if isinstance(rank_info_or_world_size, RankInfo):
        topology = JobTopology(rank_info_or_world_size.device, rank_info_or_world_size.world_size, sharding.tensor)
        planner_options: dict[str, Any] = {name: getattr(sharding, name) for name in ("machine", "memory", "timeout")}
        return choose_plan(module, inputs, topology, **planner_options, **constraints)
    machine = target_machine(options, rank_info_or_world_size)
    return choose_plan_for_machine(
        module,
        inputs,
        JobTopology(torch.device(machine.kind), rank_info_or_world_size, sharding.tensor),
        machine,
        **constraints,
    )


def target_machine(options: TrainOptions, ranks: int) -> Machine:
    """Return the machine to plan for without starting a run: the one that the options name, or this one."""
    sharding = options.sharding
    if sharding.machine is not None:
        changes = {} if sharding.memory is None else {"memory": sharding.memory}
        return Machine.resolve(sharding.machine, **changes)
    on_gpu = sharding.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    free_memory = FreeMemory.measure(device, torch.nn.Module(), sharding.offload_directory)
    return machine_from_free_memory([free_memory], ranks, memory=sharding.memory)


def _apply_decision(options: TrainOptions, decision: PlanDecision, batching: Batching) -> TrainOptions:
    """Return the options with the planner's decision applied."""
    strategy, names = decision.strategy, options.sharding.auto
    model, training, sharding = options.model, options.training, options.sharding
    if "recompute" in names:
        is_offloaded = strategy.checkpoint == "host"
        model = replace(model, recompute=strategy.checkpoint != "none", offload_activations=is_offloaded)
    if "micro-batch" in names:
        training = replace(training, batch=batching.batch, micro_batch=strategy.micro_batch)
    changes: dict[str, Any] = {"auto": (), "stage": cast("Stage", strategy.stage)}
    if "offload" in names:
        changes |= _offload_options(strategy.offload)
    return replace(options, model=model, training=training, sharding=replace(sharding, **changes))


def _offload_options(offload: Offload | None) -> dict[str, Any]:
    """Return a plan's offload as options.

    >>> _offload_options(Offload(optimizer=("host", 0.5), parameters="host"))
    {'offload': 'host', 'offload_fraction': 0.5, 'offload_parameters': True}
    """
    if offload is None:
        return {}
    ((tier, fraction),) = offload.optimizer.items()
    return {"offload": tier, "offload_fraction": fraction, "offload_parameters": bool(offload.parameters)}


def _tracing_inputs_and_loss(language_model: LanguageModel, sequence: int) -> tuple[Inputs, LossFn]:
    """Return the inputs that the training loop passes to the model, and its loss function."""
    if isinstance(language_model.module, GPT):
        return None, None  # the planner knows this model

    def inputs(batch: int) -> dict[str, Any]:
        return {"input_ids": torch.zeros(batch, sequence, dtype=torch.int64, device="meta"), "use_cache": False}

    def loss(output: Any) -> torch.Tensor:
        tokens = torch.zeros(output.logits.shape[:2], dtype=torch.int64, device="meta")
        model = _PrecomputedOutput(language_model.module, output)
        return language_model.loss(cast("torch.nn.Module", model), tokens, tokens)

    return inputs, loss


class _PrecomputedOutput:
    """A stand-in for a model that has already run: a call returns the recorded output."""

    def __init__(self, module: torch.nn.Module, output: Any) -> None:
        self._module, self._output = module, output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the recorded output."""
        return self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
