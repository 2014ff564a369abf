"""Record: what a run was and what came of it, as ``run.json`` keeps it and the report shows it."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

import zeroshard
from zeroshard.memory.profile import Profile
from zeroshard.memory.report import Report
from zeroshard.placement import Placement

MOST_MOMENTS = 4000  # of a timeline; a step of a deep model has more, which no screen can show


@dataclass
class Record:
    """Filled as the run goes on; :meth:`as_dict` is ``run.json``."""

    name: str
    settings: dict[str, Any]
    model: dict[str, Any]
    stage: int
    precision: str
    ranks: int
    backend: str
    device: str
    plain: dict[str, int]
    """Bytes by kind of state that plain data parallelism would hold on every rank."""
    paper_traffic: dict[str, Any]
    before: float = 0.0
    """Seconds that earlier parts of a resumed run took."""
    outcome: str = "running"
    message: str = ""
    memory: list[dict[str, Any]] | None = None
    timeline: dict[str, Any] | None = None
    traffic: dict[str, Any] | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long the run has taken, its earlier parts included."""
        return self.before + time.monotonic() - self._began

    def go_on(self, earlier: Mapping[str, Any], seconds: float) -> None:
        """Take over what an earlier part of a resumed run has noted, until it is noted anew."""
        self.before = seconds
        for key in ("started", "memory", "timeline", "traffic", "samples", "checkpoints"):
            if earlier.get(key) is not None:
                setattr(self, key, earlier[key])

    def as_dict(self) -> dict[str, Any]:
        """All of it, as plain data."""
        versions = {
            "zeroshard": zeroshard.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": self.device,
        }
        kept = {key: value for key, value in vars(self).items() if key not in ("before", "_began", "device")}
        return {**kept, "seconds": round(self.seconds, 3), "versions": versions}


def memory_of(report: Report) -> dict[str, Any]:
    """One rank's bytes by kind of state, now and at peak."""
    kinds: dict[str, Any] = {}
    for (kind, _), held in (*report.memory.items(), (("total", ""), report.total)):
        kinds[kind] = {"now": held.now, "peak": held.peak}
    return kinds


def fullest(memory: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes of model states by kind on the rank that holds most of each, the gradients as backward leaves them.

    >>> fullest([{"parameters": {"now": 2, "peak": 3}, "gradients": {"now": 0, "peak": 4}, "total": {}}])
    {'parameters': 2, 'gradients': 4}
    """
    kinds = {"parameters": "now", "gradients": "peak", "master weights": "now", "optimizer states": "now"}
    found = {kind: max(rank.get(kind, {}).get(when, 0) for rank in memory) for kind, when in kinds.items()}
    return {kind: nbytes for kind, nbytes in found.items() if nbytes}


def traffic_of(report: Report) -> dict[str, Any]:
    """One step's collectives by kind."""
    return {kind: {"count": traffic.count, "bytes": traffic.bytes} for kind, traffic in report.collectives.items()}


def timeline_of(profile: Profile) -> dict[str, Any]:
    """What was held over one step, by kind."""
    stride = -(-len(profile.moments) // MOST_MOMENTS)
    moments = profile.moments[::stride]
    kinds = dict.fromkeys(kind for moment in moments for kind in moment.held)
    allocated = [moment.allocated for moment in moments]
    return {
        "seconds": [round(moment.seconds, 6) for moment in moments],
        "kinds": {kind: [moment.held.get(kind, 0) for moment in moments] for kind in kinds},
        "allocated": allocated if any(value is not None for value in allocated) else None,
        "phases": [list(phase) for phase in profile.phases],
    }


def paper_traffic(stage: int, ranks: int, trained: int, frozen: int, itemsize: int, accumulate: int) -> dict[str, Any]:
    """The volume of a step by the paper (section 7): 2Ψ, or 3Ψ where parameters are partitioned; more to accumulate.

    >>> paper_traffic(stage=3, ranks=2, trained=10, frozen=0, itemsize=2, accumulate=1)
    {'formula': '3Ψ', 'bytes': 60}
    """
    placement = Placement.of_stage(stage, ranks)
    times, psi = (f" × {accumulate}" if accumulate > 1 else ""), "Ψ trained" if frozen else "Ψ"
    if placement.parameters:  # gathered in forward and backward, gradients reduced: for each of the backwards
        formula = f"2Ψ{times} + {psi}{times}" if frozen else f"3Ψ{times}"
        elements = (2 * (trained + frozen) + trained) * accumulate
    elif placement.gradients:  # reduced in each backward, new parameters gathered once
        formula, elements = f"{psi}{times} + {psi}" if times else f"2{psi}", trained * (accumulate + 1)
    else:
        formula, elements = f"2{psi}", 2 * trained if ranks > 1 else 0
    return {"formula": formula, "bytes": elements * itemsize}
