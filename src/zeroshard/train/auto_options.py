"""Settled: what a run's options leave to a plan, chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from zeroshard.config.offload import Offload
from zeroshard.models import GPT
from zeroshard.planner.auto import AUTO, JobTopology, PlanDecision, choose_plan, choose_plan_for_machine
from zeroshard.planner.free_memory import FreeMemory, machine_from_free_memory
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.tracing.inputs import Inputs, LossFn
from zeroshard.planner.tracing.trace_model import UntraceableError
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
    """Options of which nothing is left open, and why they are so in a line; the model recomputes as they say.

    ``place`` is where the run is: then all ranks call it, and the first decides. Or it is only a number of ranks, as on
    paper; then a machine that the options name has all the memory that it says.
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
    free = "micro-batch" in sharding.auto and options.training.accumulate is None
    question = {
        "stage": AUTO if "stage" in sharding.auto else sharding.stage,
        "offload": AUTO if "offload" in sharding.auto else sharding.offload_config,
        "checkpoint": AUTO if "recompute" in sharding.auto else None,
        "micro_batch": None if free else batching.micro,
        "batch": batching.batch,
        "sequence": sequence,
        "loss": loss,
        "precision": precision,
        "cast_on_gather": sharding.cast_on_gather,
        "directory": sharding.offload_directory,
    }
    try:
        chosen = _choose_plan(options, language_model, inputs, rank_info_or_world_size, question)
    except UntraceableError as error:
        raise ValueError(f"--auto: {error}. Leave --auto out, and say what is to be done") from error
    settled = _apply_decision(options, chosen, batching)
    if "recompute" in sharding.auto and settled.model.has_activation_checkpointing:
        language_model.checkpoint_activations(**settled.model.checkpoint_kwargs)
    return settled, chosen.reason


def _choose_plan(
    options: TrainOptions,
    language_model: LanguageModel,
    inputs: Inputs,
    rank_info_or_world_size: RankInfo | int,
    constraints: dict[str, Any],
) -> PlanDecision:
    sharding, module = options.sharding, language_model.module
    if isinstance(rank_info_or_world_size, RankInfo):
        site = JobTopology(rank_info_or_world_size.device, rank_info_or_world_size.world_size, sharding.tensor)
        told: dict[str, Any] = {name: getattr(sharding, name) for name in ("machine", "memory", "timeout")}
        return choose_plan(module, inputs, site, **told, **constraints)
    machine = target_machine(options, rank_info_or_world_size)
    return choose_plan_for_machine(
        module,
        inputs,
        JobTopology(torch.device(machine.kind), rank_info_or_world_size, sharding.tensor),
        machine,
        **constraints,
    )


def target_machine(options: TrainOptions, ranks: int) -> Machine:
    """What a run would be planned for that is not started: the machine that the options name, else this one."""
    sharding = options.sharding
    if sharding.machine is not None:
        changes = {} if sharding.memory is None else {"memory": sharding.memory}
        return Machine.resolve(sharding.machine, **changes)
    on_gpu = sharding.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    space = FreeMemory.measure(device, torch.nn.Module(), sharding.offload_directory)
    return machine_from_free_memory([space], ranks, memory=sharding.memory)


def _apply_decision(options: TrainOptions, decision: PlanDecision, batching: Batching) -> TrainOptions:
    """Options with what was chosen of them."""
    choice, names = decision.strategy, options.sharding.auto
    model, training, sharding = options.model, options.training, options.sharding
    if "recompute" in names:
        far = choice.checkpoint == "host"
        model = replace(model, recompute=choice.checkpoint != "none", offload_activations=far)
    if "micro-batch" in names:
        training = replace(training, batch=batching.batch, micro_batch=choice.micro_batch)
    changes: dict[str, Any] = {"auto": (), "stage": cast("Stage", choice.stage)}
    if "offload" in names:
        changes |= _offload_options(choice.offload)
    return replace(options, model=model, training=training, sharding=replace(sharding, **changes))


def _offload_options(offload: Offload | None) -> dict[str, Any]:
    """An offload of a plan's in the options' words.

    >>> _offload_options(Offload(optimizer=("host", 0.5), parameters="host"))
    {'offload': 'host', 'offload_fraction': 0.5, 'offload_parameters': True}
    """
    if offload is None:
        return {}
    ((tier, fraction),) = offload.optimizer.items()
    return {"offload": tier, "offload_fraction": fraction, "offload_parameters": bool(offload.parameters)}


def _tracing_inputs_and_loss(language_model: LanguageModel, sequence: int) -> tuple[Inputs, LossFn]:
    """What the loop calls a model with, and what it makes of the output."""
    if isinstance(language_model.module, GPT):
        return None, None  # a plan knows it

    def inputs(batch: int) -> dict[str, Any]:
        return {"input_ids": torch.zeros(batch, sequence, dtype=torch.int64, device="meta"), "use_cache": False}

    def loss(output: Any) -> torch.Tensor:
        tokens = torch.zeros(output.logits.shape[:2], dtype=torch.int64, device="meta")
        answer = _PrecomputedOutput(language_model.module, output)
        return language_model.loss(cast("torch.nn.Module", answer), tokens, tokens)

    return inputs, loss


class _PrecomputedOutput:
    """A model that has run already: the loss is taken of what it gave."""

    def __init__(self, module: torch.nn.Module, output: Any) -> None:
        self._module, self._output = module, output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Give it once more."""
        return self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
