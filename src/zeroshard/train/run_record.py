"""Record: what a run was and what came of it, as ``run.json`` keeps it and the report shows it."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

import zeroshard
from zeroshard.memory.profile import Profile
from zeroshard.memory.report import Report
from zeroshard.planner.state_sizes import predict_memory
from zeroshard.sharding.placement import Placement
from zeroshard.tensor_parallel.plans import local_numels
from zeroshard.train.batching import Batching
from zeroshard.train.models.language_model import LanguageModel
from zeroshard.train.options import TrainOptions
from zeroshard.train.rank_info import RankInfo

MAX_TIMELINE_POINTS = 4000  # of a timeline; a step of a deep model has more, which no screen can show


@dataclass
class RunRecord:
    """Filled as the run goes on; :meth:`as_dict` is ``run.json``."""

    name: str
    settings: dict[str, Any]
    model: dict[str, Any]
    stage: int
    precision: str
    ranks: int
    tensor: int
    """How many of the ranks divide a layer."""
    backend: str
    device: str
    plain: dict[str, int]
    """Bytes by kind of state that plain data parallelism would hold on every rank."""
    paper_traffic: dict[str, Any]
    previous_seconds: float = 0.0
    """Seconds that earlier parts of a resumed run took."""
    outcome: str = "running"
    message: str = ""
    memory: list[dict[str, Any]] | None = None
    timeline: dict[str, Any] | None = None
    traffic: dict[str, Any] | None = None
    tensor_traffic: dict[str, Any] | None = None
    """What tensor parallelism itself, and P_a beside it, communicated in one step."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    _start_time: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long the run has taken, its earlier parts included."""
        return self.previous_seconds + time.monotonic() - self._start_time

    def resume_from(self, previous: Mapping[str, Any], seconds: float) -> None:
        """Take over what an earlier part of a resumed run has noted, until it is noted anew."""
        self.previous_seconds = seconds
        for key in ("started", "memory", "timeline", "traffic", "tensor_traffic", "samples", "checkpoints"):
            if previous.get(key) is not None:
                setattr(self, key, previous[key])

    def as_dict(self) -> dict[str, Any]:
        """All of it, as plain data."""
        versions = {
            "zeroshard": zeroshard.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": self.device,
        }
        kept = {
            key: value for key, value in vars(self).items() if key not in ("previous_seconds", "_start_time", "device")
        }
        return {**kept, "seconds": round(self.seconds, 3), "versions": versions}


def new_run_record(
    options: TrainOptions,
    rank_info: RankInfo,
    language_model: LanguageModel,
    precision: str,
    batching: Batching,
    sequence: int,
) -> RunRecord:
    """What is known of a run before its model is sharded."""
    module = language_model.module
    held = local_numels(module, rank_info.tp_size)  # on each rank, were nothing partitioned over the data ranks
    trained = sum(held[name] for name, parameter in module.named_parameters() if parameter.requires_grad)
    tokens = batching.micro * batching.accumulate * sequence  # a rank and step
    gathered = (
        options.model.has_activation_checkpointing and options.model.partition_activations and rank_info.tp_size > 1
    )
    return RunRecord(
        name=options.name,
        settings={**options.to_flat_dict(), **vars(batching)},
        model={"parameters": sum(p.numel() for p in module.parameters()), "description": language_model.description},
        stage=options.sharding.stage,
        precision=precision,
        ranks=rank_info.world_size,
        tensor=rank_info.tp_size,
        backend=rank_info.backend,
        device=torch.cuda.get_device_name(rank_info.device) if rank_info.device.type == "cuda" else "cpu",
        plain=predict_memory(module, ranks=rank_info.world_size, stage=0, precision=precision).states,
        paper_traffic=paper_traffic(
            options.sharding.stage,
            rank_info.dp_size,
            trained,
            frozen=sum(held.values()) - trained,
            itemsize=4 if precision == "fp32" else 2,
            accumulate=batching.accumulate,
            tensor=rank_info.tp_size,
            block_input_numel=language_model.layers * language_model.width * tokens if gathered else 0,
        ),
    )


def memory_by_kind(report: Report) -> dict[str, Any]:
    """One rank's bytes by kind of state, now and at peak; what is not on the device says where it is."""
    kinds: dict[str, Any] = {}
    for (kind, tier), held in (*report.memory.items(), (("total", "device"), report.total)):
        kinds[kind if tier == "device" else f"{kind} ({tier})"] = {"now": held.now, "peak": held.peak}
    return kinds


def max_state_bytes(memory: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes of model states by kind on the rank that holds most of each, the gradients as backward leaves them.

    >>> max_state_bytes([{"parameters": {"now": 2, "peak": 3}, "gradients": {"now": 0, "peak": 4}, "total": {}}])
    {'parameters': 2, 'gradients': 4}
    """
    kinds = {"parameters": "now", "gradients": "peak", "master weights": "now", "optimizer states": "now"}
    found = {kind: max(rank.get(kind, {}).get(when, 0) for rank in memory) for kind, when in kinds.items()}
    return {kind: nbytes for kind, nbytes in found.items() if nbytes}


def traffic_by_collective(report: Report) -> dict[str, Any]:
    """One step's collectives by kind."""
    return {kind: asdict(traffic) for kind, traffic in report.collectives.items()}


def tensor_parallel_traffic(report: Report) -> dict[str, Any] | None:
    """One step's collectives of tensor parallelism itself, and of P_a; None without a tensor axis."""
    if report.tensor_traffic is None or report.activation_traffic is None:
        return None
    return {"layers": asdict(report.tensor_traffic), "activations": asdict(report.activation_traffic)}


def memory_timeline(profile: Profile) -> dict[str, Any]:
    """What was held over one step, by kind."""
    stride = -(-len(profile.moments) // MAX_TIMELINE_POINTS)
    moments = profile.moments[::stride]
    kinds = dict.fromkeys(kind for moment in moments for kind in moment.held)
    allocated = [moment.allocated for moment in moments]
    return {
        "seconds": [round(moment.seconds, 6) for moment in moments],
        "kinds": {kind: [moment.held.get(kind, 0) for moment in moments] for kind in kinds},
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
) -> dict[str, Any]:
    """The volume of a step by the paper (section 7): 2Ψ, or 3Ψ where parameters are partitioned; more to accumulate.

    With ``tensor`` ranks that divide a layer, ``trained`` and ``frozen`` are what one of them has, and ``ranks`` those
    that share the batch. ``inputs`` are the elements of all blocks' inputs, where P_a gathers them (section 8).

    >>> paper_traffic(stage=3, ranks=2, trained=10, frozen=0, itemsize=2, accumulate=1)
    {'formula': '3Ψ', 'bytes': 60}
    >>> paper_traffic(stage=2, ranks=2, trained=6, frozen=0, itemsize=2, accumulate=1, tensor=2, block_input_numel=5)
    {'formula': '2Ψ/N_m + P_a', 'bytes': 34}
    """
    placement = Placement.from_stage(stage, ranks)
    whole = "Ψ/N_m" if tensor > 1 else "Ψ"
    times, psi = (f" × {accumulate}" if accumulate > 1 else ""), f"{whole} trained" if frozen else whole
    if placement.parameters:  # gathered in forward and backward, gradients reduced: for each of the backwards
        formula = f"2{whole}{times} + {psi}{times}" if frozen else f"3{whole}{times}"
        elements = (2 * (trained + frozen) + trained) * accumulate
    elif placement.gradients:  # reduced in each backward, new parameters gathered once
        formula, elements = f"{psi}{times} + {psi}" if times else f"2{psi}", trained * (accumulate + 1)
    else:
        formula, elements = f"2{psi}", 2 * trained if ranks > 1 else 0
    if block_input_numel:
        formula = f"{formula} + P_a" if elements else "P_a"
    return {"formula": formula, "bytes": (elements + block_input_numel) * itemsize}
