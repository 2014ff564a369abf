"""shard(): the call that every user makes. Options that are "auto" are chosen by a plan first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from zeroshard.api import ChosenConfig, shard_model
from zeroshard.comm import ConsistencyChecker
from zeroshard.config.config import Config
from zeroshard.utils.version import check_version

LOSSY_OPTIONS = ("gather_dtype", "reduce_wire")


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    tensor_plan: Mapping[str, ParallelStyle] | None = None,
    checkpoint: str | None = None,
    inputs: Any = None,
    planning: Mapping[str, Any] | None = None,
    allow_lossy: bool = False,
    config: Config | None = None,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """Partition a model's training states over the data-parallel ranks, in place.

    ``options`` are the fields of :class:`zeroshard.Config`: ``stage``, ``precision`` and so on; ``config`` has them
    all, and ``options`` come before it. ``mesh`` has one axis (shard) or two (replicate, shard); without it all ranks
    of the job share the states. Returns the same model and a :class:`ShardedOptimizer` around the given optimizer (None
    without one). All ranks call it together.

    A list or tuple of optimizers, each for a part of the parameters and stepped on its own, returns one of sharded
    optimizers in the same order.

    A last mesh axis named "tensor" shards the model's layers by tensor parallelism; ZeRO then partitions each rank's TP
    shards over the other axes. ``tensor_plan`` is what ``torch.distributed.tensor.parallel.parallelize_module`` takes.
    It is known for zeroshard's GPT and Hugging Face's Llama and GPT-2, and not needed if the model is already
    parallelized over ``mesh["tensor"]``. The ranks of one tensor axis must get the same data.

    ``stage="auto"``, ``partition="auto"``, ``offload="auto"`` and ``checkpoint="auto"`` (whether to call
    :func:`zeroshard.checkpoint_activations`) let the planner choose the fastest options that fit in the free memory;
    :func:`report` says why. ``inputs`` is an example of the arguments of one forward; known language models need none.
    ``planning`` describes the loop and the machine, with the fields of
    :class:`zeroshard.planner.PlanningOptions`: ``loss``, ``micro_batch``, ``accumulate``, ``memory`` and others. With
    ``allow_lossy=True`` it may also choose collectives in 8 bits (``gather_dtype``, ``reduce_wire``), which change the
    numbers; without it, it never does.

    >>> import zeroshard
    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = zeroshard.shard(model, optimizer, stage=3)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    """
    check_version("torch")
    if config is not None:
        if not isinstance(config, Config):
            raise TypeError(f"config must be a zeroshard.Config, got {type(config).__name__}: pass options by name")
        options = {**vars(config), **options}
    left_to_plan = _auto_options(options, checkpoint, inputs, planning, allow_lossy)
    config = Config(**{name: value for name, value in options.items() if name not in left_to_plan})
    if not left_to_plan:
        return shard_model(model, optimizer, config, mesh=mesh, tensor_plan=tensor_plan)
    if isinstance(optimizer, (list, tuple)):
        raise ValueError(
            f"{left_to_plan[0]}='auto' plans for one optimizer, got {len(optimizer)}: with several, set stage and "
            "offload yourself"
        )
    from zeroshard.planner.auto import JobTopology, choose_for_shard  # here: most calls do not need the planner

    def choose(
        config: Config,
        consistency: ConsistencyChecker,
        device: torch.device,
        mesh_sizes: tuple[int, int, int],
        needs_whole: list[bool],
    ) -> ChosenConfig:
        replicas, shard_size, tensor = mesh_sizes
        topology = JobTopology(device, replicas * shard_size * tensor, tensor, replicas)
        assert optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
        partition = "auto" if "partition" in left_to_plan else config.partition
        asked = {**options, "partition": partition, "checkpoint": checkpoint, "allow_lossy": allow_lossy}
        decision = choose_for_shard(model, optimizer, inputs, planning, topology, consistency, needs_whole, **asked)
        chosen = {name: value for name, value in decision.strategy.shard_options.items() if name in left_to_plan}
        checkpointing = decision.apply_checkpointing if "checkpoint" in left_to_plan else None
        return ChosenConfig(replace(config, **chosen), decision.reason, checkpointing)

    return shard_model(model, optimizer, config, mesh=mesh, tensor_plan=tensor_plan, choose=choose)


def _auto_options(
    options: Mapping[str, Any],
    checkpoint: str | None,
    inputs: Any,
    planning: Mapping[str, Any] | None,
    allow_lossy: bool,
) -> list[str]:
    """Return the options that are left to the planner; reject planner arguments if none is."""
    if checkpoint not in (None, "auto"):
        raise ValueError(
            f"checkpoint is None or 'auto', got {checkpoint!r}: to say which blocks are recomputed, call "
            "zeroshard.checkpoint_activations"
        )
    given = {**options, "checkpoint": checkpoint}
    if given.get("stage") == "auto" and given.get("local_steps", 1) == 1:  # local steps need replicas
        given.setdefault("partition", "auto")
    wanted = [name for name in ("stage", "partition", "offload", "checkpoint") if given.get(name) == "auto"]
    given_to_plan = {"inputs": inputs, "planning": planning, "allow_lossy": allow_lossy or None}
    what = next((name for name, value in given_to_plan.items() if value is not None), None)
    if not wanted and what is not None:
        raise ValueError(f"{what} is for planning, and nothing is left to a plan: give stage='auto', or leave it out")
    return wanted + [name for name in LOSSY_OPTIONS if allow_lossy and options.get(name) is None]
