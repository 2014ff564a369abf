"""Convert plans to plain data for JSON: docs/planning.md has a table of the keys."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from zeroshard.config.offload import STATE_KINDS, Offload
from zeroshard.planner.plans import Plan, Plans
from zeroshard.utils.version import software_versions

JSON_VERSION = 1  # of what `zeroshard plan --json` and `simulate --json` write
_KIND_NAMES = {"landings": "reduction buffers"}
TIME_PARTS = ("compute", "tensor", "launch", "gather", "reduce", "update", "average")


def plans_to_dict(plans: Plans, *, model: str | None = None, tokens: int | None = None) -> dict[str, Any]:
    """Return all plans as plain data. ``model`` replaces the model's class name.

    >>> import torch, zeroshard
    >>> with torch.device("meta"):
    ...     layer = torch.nn.Linear(64, 64, bias=False)
    >>> plans = zeroshard.plan(layer, torch.empty(1, 64), devices=2, stage=3, micro_batch=4, offload=None)
    >>> data = plans_to_dict(plans)
    >>> data["plans"][data["chosen"]]["state_bytes"]["optimizer states"]
    16384
    """
    candidates, best = plans.candidates, plans.best
    indices = {id(plan): index for index, plan in enumerate(candidates)}
    return {
        "version": JSON_VERSION,
        "software": software_versions(),
        "model": plans.model if model is None else model,
        "parameters": plans.parameters,
        "devices": plans.devices,
        "machine": json.loads(plans.machine.to_json()),
        "precision": plans.precision,
        "tokens_per_sample": tokens,
        "reason": plans.reason,
        "chosen": None if best is None else indices[id(best)],
        "best_per_strategy": [indices[id(plan)] for plan in plans.best_per_strategy()],
        "plans": [plan_to_dict(plan, tokens=tokens) for plan in candidates],
    }


def plan_to_dict(plan: Plan, *, tokens: int | None = None) -> dict[str, Any]:
    """Return one plan as plain data."""
    footprint = plan.footprint
    offloaded: dict[str, dict[str, float]] = {}
    for (kind, tier), nbytes in footprint.offloaded.items():
        offloaded.setdefault(kind, {})[tier] = nbytes
    return {
        "description": plan.strategy.description,
        "strategy": {
            **{field.name: getattr(plan.strategy, field.name) for field in fields(plan.strategy)},
            "offload": _offload_to_dict(plan.strategy.offload),
        },
        "fits": plan.fits,
        "shortfall": plan.shortfall,
        "device_bytes": plan.memory,
        "state_bytes": footprint.states,
        "offloaded_bytes": offloaded,
        "between_steps_bytes": footprint.between_steps,
        "peak_bytes": {_KIND_NAMES.get(kind, kind): nbytes for kind, nbytes in footprint.peak.by_kind.items()},
        "peak_during": footprint.peak.label,
        "host_bytes": footprint.host,
        "disk_bytes": footprint.disk,
        "node_bytes": plan.node_bytes,
        "whole_parameters": _owners_to_dict(plan),
        "traffic_bytes": plan.step_time.traffic,
        "data_parallel_bytes_per_parameter_byte": plan.data_parallel_psi,
        "seconds": {name: getattr(plan.step_time, name) for name in ("step", *TIME_PARTS)},
        "samples_per_second": plan.samples_per_second,
        "tokens_per_second": None if tokens is None else plan.samples_per_second * tokens,
        "flops_per_second_per_device": plan.flops_per_second,
    }


def _owners_to_dict(plan: Plan) -> dict[str, dict[str, float]] | None:
    loads = plan.owner_loads
    if loads is None:
        return None
    by_owner = {"elements": loads.elements, "state_bytes": loads.state_bytes, "flops": loads.flops}
    return {name: {"largest": max(values), "mean": sum(values) / len(values)} for name, values in by_owner.items()}


def _offload_to_dict(offload: Offload | None) -> dict[str, dict[str, float]] | None:
    if offload is None:
        return None
    return {kind: dict(fractions) for kind in STATE_KINDS if (fractions := getattr(offload, kind))}
