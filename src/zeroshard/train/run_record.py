"""RunRecord: the facts and results of a run, as written to ``run.json`` and shown in the report."""

from __future__ import annotations

import platform
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from zeroshard.memory import Profile, Report
from zeroshard.models import find_output_layers
from zeroshard.planner import PredictedTraffic, predict_memory, predict_traffic
from zeroshard.train.models import LanguageModel
from zeroshard.train.options import TrainOptions
from zeroshard.train.rank import RankInfo
from zeroshard.utils.version import software_versions

FORMAT = {"format": "zeroshard run", "version": 1}
STATE_KINDS = ("parameters", "gradients", "master weights", "optimizer states", "outer optimizer")  # in stacking order
RESULTS = (  # what a resumed run takes over
    *("id", "started", "samples", "checkpoints", "memory_by_rank", "memory_over_step"),
    *("collectives_per_step", "needed_bytes_per_step"),
)
MAX_TIMELINE_POINTS = 4000  # a step of a deep model has more, which no screen can show


@dataclass(kw_only=True)
class RunRecord:
    """A run's facts, and its results, filled while it trains: the fields of ``run.json``."""

    name: str
    options: dict[str, Any]
    model: dict[str, Any]
    """Its ``description``, and its number of ``parameters``."""
    stage: int
    precision: str
    ranks: int
    tensor_parallel_ranks: int
    backend: str
    device: str
    ddp_state_bytes: dict[str, int]
    """What DDP would hold on every rank, by kind of state."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The same after a resume."""
    outcome: str = "running"
    message: str = ""
    memory_by_rank: list[dict[str, Any]] = field(default_factory=list)
    """``now_bytes`` between steps and ``peak_bytes``, by kind, on each rank."""
    memory_over_step: dict[str, Any] = field(default_factory=dict)
    """``moments`` of rank 0 in one step, and when its ``phases`` start."""
    collectives_per_step: dict[str, Any] = field(default_factory=dict)
    """``count`` and ``bytes`` of a rank, by kind of collective."""
    needed_bytes_per_step: dict[str, int] = field(default_factory=dict)
    """What the options of the run need in the recorded step, by kind of collective."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    predicted: PredictedTraffic
    """Bytes that the options need in a step, and in an average of replicas. Not in the file."""
    start_time: float = field(default_factory=time.monotonic)
    """Less by the earlier parts of a resumed run. Not in the file."""

    @property
    def seconds(self) -> float:
        """Seconds the run has taken, including its earlier parts."""
        return time.monotonic() - self.start_time

    def resume_from(self, previous: Mapping[str, Any], seconds: float) -> None:
        """Take over id and results of the earlier part of a resumed run, until they are recorded again."""
        self.start_time -= seconds
        if previous:
            check_format(previous, Path("run.json"))
        vars(self).update((name, value) for name, value in previous.items() if name in RESULTS)

    def set_step(self, memory: list[dict[str, Any]], report: Report) -> None:
        """Store the memory of all ranks and the traffic of a step."""
        self.memory_by_rank = memory
        self.collectives_per_step = {kind: asdict(traffic) for kind, traffic in report.collectives.items()}
        needed = Counter(self.predicted.step)
        if "replica average" in report.collectives:
            needed.update(self.predicted.average)
        self.needed_bytes_per_step = dict(needed)

    def as_dict(self) -> dict[str, Any]:
        """Return the contents of ``run.json``."""
        fields = {name: value for name, value in vars(self).items() if name not in ("predicted", "start_time")}
        versions = {**software_versions(), "platform": platform.platform()}
        return {**FORMAT, **fields, "seconds": round(self.seconds, 3), "versions": versions}


def check_format(record: Mapping[str, Any], path: Path) -> None:
    """Raise if ``run.json`` was written by another version of zeroshard, or by something else.

    >>> check_format({"format": "zeroshard run", "version": 1}, Path("run.json"))
    """
    if any(record.get(key) != value for key, value in FORMAT.items()):
        raise ValueError(
            f"{path} is not of format {FORMAT['format']!r}, version {FORMAT['version']} (got {record.get('format')!r}, "
            f"version {record.get('version')!r}): use the zeroshard that wrote it, or move the file away"
        )


def describe_run(
    options: TrainOptions, rank_info: RankInfo, language_model: LanguageModel, precision: str
) -> RunRecord:
    """Return the record of a run whose model is not sharded yet."""
    module = language_model.module
    batching = options.batching(rank_info.world_size)
    common: dict[str, Any] = {
        "ranks": rank_info.world_size,
        "optimizer": options.training.optimizer,
        "precision": precision,
    }
    predicted = predict_traffic(
        module,
        tensor=rank_info.tp_size,
        replicas=options.sharding.replicas,
        accumulate=batching.accumulate,
        on_gpu=rank_info.device.type == "cuda",
        keep_bf16=find_output_layers(module),
        **common,
        **options.sharding.shard_options,
    )
    if options.model.has_activation_checkpointing and options.model.partition_activations and rank_info.tp_size > 1:
        tokens = batching.micro * batching.accumulate * language_model.sequence
        inputs_numel = language_model.layers * language_model.width * tokens
        predicted.step["activation gather"] = inputs_numel * (4 if precision == "fp32" else 2)
    return RunRecord(
        name=options.name,
        options={**options.to_flat_dict(), **vars(batching)},
        model=describe_model(language_model),
        stage=options.sharding.stage,
        precision=precision,
        ranks=rank_info.world_size,
        tensor_parallel_ranks=rank_info.tp_size,
        backend=rank_info.backend,
        device=torch.cuda.get_device_name(rank_info.device) if rank_info.device.type == "cuda" else "cpu",
        ddp_state_bytes=predict_memory(module, stage=0, **common).states,
        predicted=predicted,
    )


def describe_model(language_model: LanguageModel) -> dict[str, Any]:
    """Return a model's ``description`` and its number of ``parameters``."""
    parameters = sum(parameter.numel() for parameter in language_model.module.parameters())
    return {"description": language_model.description, "parameters": parameters}


def memory_by_kind(report: Report) -> dict[str, Any]:
    """Return one rank's bytes by kind of state, now and at peak; the name of offloaded states includes the tier."""
    kinds = {}
    for (kind, tier), usage in (*report.memory.items(), (("total", "device"), report.total)):
        name = kind if tier == "device" else f"{kind} ({tier})"
        kinds[name] = {"now_bytes": usage.now, "peak_bytes": usage.peak}
    return kinds


def state_bytes(rank: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of each model state on a rank between steps. A state freed between steps counts with its peak.

    >>> step = {"now_bytes": 0, "peak_bytes": 7}
    >>> state_bytes({"parameters": {"now_bytes": 5, "peak_bytes": 9}, "gradients": step, "step": step})
    {'parameters': 5, 'gradients': 7}
    """
    return {kind: rank[kind]["now_bytes"] or rank[kind]["peak_bytes"] for kind in STATE_KINDS if kind in rank}


def memory_timeline(profile: Profile) -> dict[str, Any]:
    """Return the bytes held over one step, by kind, downsampled."""
    moments = profile.moments[:: -(-len(profile.moments) // MAX_TIMELINE_POINTS)]
    return {
        "moments": [
            {"seconds": round(moment.seconds, 6), "bytes_by_kind": moment.held, "allocated_bytes": moment.allocated}
            for moment in moments
        ],
        "phases": [{"name": name, "start_seconds": seconds} for name, seconds in profile.phases],
    }
