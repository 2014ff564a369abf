"""RunRecord: the facts and results of a run, as written to ``run.json`` and shown in the report."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

import zeroshard
from zeroshard.config.offload import Offload
from zeroshard.memory import Profile, Report
from zeroshard.planner import find_whole_params, predict_memory, predict_traffic
from zeroshard.sharding import Placement
from zeroshard.tensor_parallel import local_numels
from zeroshard.train.models.language_model import LanguageModel, find_output_layers, sequence_length
from zeroshard.train.options import TrainOptions
from zeroshard.train.rank import RankInfo
from zeroshard.train.report.run_charts import STATE_KINDS, expected_traffic, state_bytes

MAX_TIMELINE_POINTS = 4000  # a step of a deep model has more, which no screen can show


@dataclass(frozen=True)
class RunFacts:
    """What is known about a run before its first step."""

    name: str
    settings: dict[str, Any]
    model: dict[str, Any]
    stage: int
    precision: str
    ranks: int
    tensor: int
    """Number of tensor-parallel ranks."""
    backend: str
    device: str
    plain: dict[str, int]
    """Bytes by kind of state that DDP would hold on every rank."""
    paper_traffic: dict[str, Any]
    """The paper's formula for this stage, and its bytes per rank and step."""
    predicted_traffic: dict[str, dict[str, int]]
    """Bytes per rank that the options of this run need, by collective: in a "step", and in an "average" of replicas."""


@dataclass
class RunRecord:
    """A run's facts, and its results, filled while it trains; :meth:`as_dict` returns the contents of ``run.json``."""

    facts: RunFacts
    previous_seconds: float = 0.0
    """Seconds of the earlier parts of a resumed run."""
    outcome: str = "running"
    message: str = ""
    memory: list[dict[str, Any]] | None = None
    """Bytes by kind, on each rank."""
    timeline: dict[str, Any] | None = None
    traffic: dict[str, Any] | None = None
    """Collectives of one step, by kind."""
    tensor_traffic: dict[str, Any] | None = None
    """Collectives of tensor parallelism itself, and of P_a, in one step."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    _start_time: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds the run has taken, including its earlier parts."""
        return self.previous_seconds + time.monotonic() - self._start_time

    def resume_from(self, previous: Mapping[str, Any], seconds: float) -> None:
        """Take over the results of the earlier part of a resumed run, until they are recorded again."""
        self.previous_seconds = seconds
        for key in ("started", "memory", "timeline", "traffic", "tensor_traffic", "samples", "checkpoints"):
            if previous.get(key) is not None:
                setattr(self, key, previous[key])

    def set_step(self, memory: list[dict[str, Any]], report: Report) -> None:
        """Store the memory of all ranks and the traffic of a step."""
        self.memory = memory
        self.traffic = {kind: asdict(traffic) for kind, traffic in report.collectives.items()}
        self.tensor_traffic = None
        if report.tensor_traffic is not None and report.activation_traffic is not None:
            layers, activations = asdict(report.tensor_traffic), asdict(report.activation_traffic)
            self.tensor_traffic = {"layers": layers, "activations": activations}

    @property
    def traffic_totals(self) -> tuple[int, int]:
        """The bytes that the recorded step moved, and those that its options need; zeros if none is recorded."""
        traffic = self.traffic or {}
        expected = expected_traffic(self.facts.predicted_traffic, traffic) if traffic else {}
        return sum(kind["bytes"] for kind in traffic.values()), sum(expected.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain data."""
        versions = {
            "zeroshard": zeroshard.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": self.facts.device,
        }
        facts = {key: value for key, value in vars(self.facts).items() if key != "device"}
        results = {
            key: value for key, value in vars(self).items() if key not in ("facts", "previous_seconds", "_start_time")
        }
        return {**facts, **results, "seconds": round(self.seconds, 3), "versions": versions}


def describe_run(options: TrainOptions, rank_info: RankInfo, language_model: LanguageModel, precision: str) -> RunFacts:
    """Return the facts of a run whose model is not sharded yet."""
    module, batching = language_model.module, options.batching(rank_info.world_size)
    itemsize = 4 if precision == "fp32" else 2
    numels = local_numels(module, rank_info.tp_size)  # elements per rank without sharding over the data-parallel ranks
    trained = sum(numels[name] for name, parameter in module.named_parameters() if parameter.requires_grad)
    # per rank and step
    tokens = batching.micro * batching.accumulate * sequence_length(options.model, language_model)
    has_partitioned_inputs = (
        options.model.has_activation_checkpointing and options.model.partition_activations and rank_info.tp_size > 1
    )
    predicted = predict_traffic(
        module,
        ranks=rank_info.world_size,
        tensor=rank_info.tp_size,
        replicas=options.sharding.replicas,
        accumulate=batching.accumulate,
        optimizer=options.training.optimizer,
        on_gpu=rank_info.device.type == "cuda",
        precision=precision,
        keep_bf16=find_output_layers(module),
        **options.sharding.shard_options,
    )
    block_input_numel = language_model.layers * language_model.width * tokens if has_partitioned_inputs else 0
    block_input_bytes = {"activation gather": block_input_numel * itemsize} if block_input_numel else {}
    # with local steps, the traffic of one replica
    alone, replicas = options.sharding.local_steps > 1, options.sharding.replicas
    replicas = rank_info.dp_size if alone and replicas == 1 else replicas
    return RunFacts(
        name=options.name,
        settings={**options.to_flat_dict(), **vars(batching)},
        model={"parameters": sum(p.numel() for p in module.parameters()), "description": language_model.description},
        stage=options.sharding.stage,
        precision=precision,
        ranks=rank_info.world_size,
        tensor=rank_info.tp_size,
        backend=rank_info.backend,
        device=torch.cuda.get_device_name(rank_info.device) if rank_info.device.type == "cuda" else "cpu",
        plain=predict_memory(
            module, ranks=rank_info.world_size, stage=0, precision=precision, optimizer=options.training.optimizer
        ).states,
        paper_traffic=paper_traffic(
            options.sharding.stage,
            rank_info.dp_size // replicas if alone else rank_info.dp_size,
            trained,
            frozen=sum(numels.values()) - trained,
            itemsize=itemsize,
            accumulate=batching.accumulate,
            tensor=rank_info.tp_size,
            block_input_numel=block_input_numel,
            muon=sum(numels[name] for name in find_whole_params(module, options.training.optimizer)),
            is_offloaded=Offload.from_option(options.sharding.offload_config) is not None,
            replicas=1 if alone else replicas,
            partition=options.sharding.partition,
        ),
        predicted_traffic={"step": predicted.step | block_input_bytes, "average": predicted.average},
    )


def memory_by_kind(report: Report) -> dict[str, Any]:
    """Return one rank's bytes by kind of state, now and at peak; the name of offloaded states includes the tier."""
    kinds: dict[str, Any] = {}
    for (kind, tier), usage in (*report.memory.items(), (("total", "device"), report.total)):
        kinds[kind if tier == "device" else f"{kind} ({tier})"] = {"now": usage.now, "peak": usage.peak}
    return kinds


def max_state_bytes(memory: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the maximum over ranks of each model state's bytes.

    >>> max_state_bytes([{"parameters": {"now": 2, "peak": 3}, "gradients": {"now": 0, "peak": 4}, "total": {}}])
    {'parameters': 2, 'gradients': 4}
    """
    ranks = [state_bytes(rank) for rank in memory]
    largest = {kind: max(rank.get(kind, 0) for rank in ranks) for kind in STATE_KINDS}
    return {kind: nbytes for kind, nbytes in largest.items() if nbytes}


def memory_timeline(profile: Profile) -> dict[str, Any]:
    """Return the bytes held over one step, by kind, downsampled."""
    stride = -(-len(profile.moments) // MAX_TIMELINE_POINTS)
    points = profile.moments[::stride]
    kinds = dict.fromkeys(kind for point in points for kind in point.held)
    allocated = [point.allocated for point in points]
    return {
        "seconds": [round(point.seconds, 6) for point in points],
        "kinds": {kind: [point.held.get(kind, 0) for point in points] for kind in kinds},
        "allocated": allocated if any(value is not None for value in allocated) else None,
        "phases": [list(phase) for phase in profile.phases],
    }


def paper_traffic(
    stage: int,
    ranks: int,
    trained: int,
    frozen: int,
    itemsize: int,
    accumulate: int,
    tensor: int = 1,
    block_input_numel: int = 0,
    muon: int = 0,
    is_offloaded: bool = False,
    replicas: int = 1,
    partition: str = "hybrid",
) -> dict[str, Any]:
    """Return the paper's traffic per step (section 7): 2Ψ, or 3Ψ with partitioned parameters; more with accumulation.

    With ``tensor`` tensor-parallel ranks, ``trained`` and ``frozen`` count one rank's elements, and ``ranks`` are the
    data-parallel ranks. ``block_input_numel`` counts the elements of all block inputs that P_a gathers (section 8).
    ``muon`` counts those of Muon's matrices, which are not in the paper: their updates go to the owners, and come back
    orthogonalized, both in bf16; if states are offloaded, gradients and fp32 values go there, and new values come back.
    Neither are the ``replicas`` of a 2-D mesh: N_i ranks gather and reduce as in the paper, and what goes over the
    outer axis is added.

    >>> paper_traffic(stage=3, ranks=2, trained=10, frozen=0, itemsize=2, accumulate=1)
    {'formula': '3Ψ', 'bytes': 60}
    >>> paper_traffic(stage=2, ranks=2, trained=6, frozen=0, itemsize=2, accumulate=1, tensor=2, block_input_numel=5)
    {'formula': '2Ψ/N_m + P_a', 'bytes': 34}
    >>> paper_traffic(stage=3, ranks=2, trained=10, frozen=0, itemsize=2, accumulate=1, muon=8)
    {'formula': '3Ψ + 2Ψ_Muon/N', 'bytes': 76}
    >>> paper_traffic(3, 4, trained=20, frozen=0, itemsize=2, accumulate=1, replicas=2, partition="hierarchical")
    {'formula': '3Ψ + 2Ψ/N_i', 'bytes': 160}
    >>> paper_traffic(3, 4, 20, 0, itemsize=2, accumulate=5, replicas=2, partition="hierarchical-gradients")
    {'formula': '3Ψ × 5 + 2Ψ/N_i', 'bytes': 640}
    """
    placement = Placement.from_stage(stage, ranks, partition=partition if replicas > 1 else "hybrid")
    psi_total = "Ψ/N_m" if tensor > 1 else "Ψ"
    times, psi_trained = (f" × {accumulate}" if accumulate > 1 else ""), f"{psi_total} trained" if frozen else psi_total
    gathers, reductions = placement.collectives_per_step(accumulate)
    gathered = trained + frozen if placement.parameters else trained
    elements = gathers * gathered + reductions * trained if ranks > 1 else 0
    formula = f"2{psi_trained}"
    if placement.parameters:
        formula = f"2{psi_total}{times} + {psi_trained}{times}" if frozen else f"3{psi_total}{times}"
    elif placement.gradients and times:
        formula = f"{psi_trained}{times} + {psi_trained}"
    if block_input_numel:
        formula = f"{formula} + P_a" if elements else "P_a"
    if replicas > 1:
        inner_ranks = ranks // replicas if placement.optimizer else 1
        elements = elements if inner_ranks > 1 or not placement.optimizer else 0
        if partition == "hybrid" or not placement.optimizer:  # an all-reduce
            outer, outer_elements = 2 * reductions, 2 * reductions * trained
        else:
            gathers, reductions = placement.outer_collectives_per_step(accumulate)
            gathered = trained if placement.keeps_inner_shards else gathered
            outer, outer_elements = reductions + gathers, reductions * trained + gathers * gathered
        elements += outer_elements // inner_ranks
        formula += f" + {outer}{psi_total}" + ("/N_i" if placement.optimizer else "")
    nbytes = (elements + block_input_numel) * itemsize
    if muon and placement.optimizer:
        formula = f"{formula} + {3 if is_offloaded else 2}Ψ_Muon/N"
        nbytes += muon * (itemsize + 2 * 4 if is_offloaded else 2 * 2) // ranks
    return {"formula": formula, "bytes": nbytes}
