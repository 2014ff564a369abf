"""Convert plans to plain data for JSON. Keys are stable; new ones may be added.

[Note: a plan as JSON]
Sizes are in bytes, times in seconds, rates per second; all for one device (one rank) unless noted otherwise::

    why, fits                         one line; whether anything fits
    model, parameters, devices        the model, its number of elements, and the number of devices
    precision, tokens                 of computation; tokens per sample, or null if samples are not text
    machine                           as in a machine's JSON file
    versions                          of zeroshard, torch and Python
    best                              index of the chosen plan in "plans", or null
    rows                              indices of the best plan of each stage, mesh, offload and checkpoint mode
    plans                             every plan that was evaluated, each:
        words                         the strategy in one line
        choice                        stage, replicas, partition, gather_dtype and reduce_wire (8-bit collectives, or
                                      null), local_steps, tensor, checkpoint, offload (fractions by kind and tier, or
                                      null), micro_batch (samples per data-parallel rank and backward), accumulate
        fits, lacks                   whether it fits, and which memory is too small
        memory                        what a device needs: peak, the allocator's overhead and the runtime's context
        states                        on the device after a backward, by kind of state
        far                           offloaded, by kind of state and tier
        at_rest                       on the device between zero_grad() and the next forward
        peak                          moment (what runs then), total, by_kind; its "states" is the sum of the states
                                      above without gradients, which are listed separately
        host, disk                    host memory and disk of one rank
        node                          host and disk of all ranks of a node
        owners                        null if all parameters are updated on flat slices; else elements, state_bytes
                                      and flops of a step, each with those of the fullest owner and the mean
        traffic                       bytes per step by kind: data-parallel collectives by name, tensor-parallel ones
                                      with the prefix "tensor ", "pcie" and "disk" for the tiers
        psi                           data-parallel traffic as a multiple of Ψ, the bytes of all parameters
        seconds                       step, and its parts: compute, tensor (its collectives), launch (the device
                                      waits for the host), gather, reduce, update (the device waits for these),
                                      average (of replicas that train alone, divided by their local steps)
        samples_per_second            of all devices
        tokens_per_second             the same in tokens, or null
        flops_per_second              useful FLOPs of one device, without recomputation
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from zeroshard.config.offload import STATE_KINDS, Offload
from zeroshard.planner.plans import Plan, Plans
from zeroshard.utils.version import software_versions

TIME_PARTS = ("compute", "tensor", "launch", "gather", "reduce", "update", "average")


def plans_to_dict(plans: Plans, *, model: str | None = None, tokens: int | None = None) -> dict[str, Any]:
    """Return all plans as plain data: [Note: a plan as JSON]. ``model`` replaces the model's class name.

    >>> import torch, zeroshard
    >>> with torch.device("meta"):
    ...     layer = torch.nn.Linear(64, 64, bias=False)
    >>> plans = zeroshard.plan(layer, torch.empty(1, 64), devices=2, stage=3, micro_batch=4, offload=None)
    >>> data = plans_to_dict(plans)
    >>> data["plans"][data["best"]]["states"]["optimizer states"]
    16384
    """
    candidates, best = plans.candidates, plans.best
    indices = {id(plan): index for index, plan in enumerate(candidates)}
    return {
        "why": plans.reason,
        "fits": best is not None,
        "model": plans.model if model is None else model,
        "parameters": plans.parameters,
        "devices": plans.devices,
        "precision": plans.precision,
        "tokens": tokens,
        "machine": json.loads(plans.machine.to_json()),
        "versions": software_versions(),
        "best": None if best is None else indices[id(best)],
        "rows": [indices[id(plan)] for plan in plans.best_per_strategy()],
        "plans": [plan_to_dict(plan, tokens=tokens) for plan in candidates],
    }


def plan_to_dict(plan: Plan, *, tokens: int | None = None) -> dict[str, Any]:
    """Return one plan as plain data."""
    footprint = plan.footprint
    offloaded: dict[str, dict[str, float]] = {}
    for (kind, tier), nbytes in footprint.offloaded.items():
        offloaded.setdefault(kind, {})[tier] = nbytes
    return {
        "words": plan.strategy.description,
        "choice": {
            **{field.name: getattr(plan.strategy, field.name) for field in fields(plan.strategy)},
            "offload": _offload_to_dict(plan.strategy.offload),
        },
        "fits": plan.fits,
        "lacks": plan.shortfall,
        "memory": plan.memory,
        "states": dict(footprint.states),
        "far": offloaded,
        "at_rest": footprint.between_steps,
        "peak": {
            "moment": footprint.peak.label,
            "total": footprint.peak.total,
            "by_kind": dict(footprint.peak.by_kind),
        },
        "host": footprint.host,
        "disk": footprint.disk,
        "node": plan.node_bytes,
        "owners": _owners_to_dict(plan),
        "traffic": dict(plan.step_time.traffic),
        "psi": plan.data_parallel_psi,
        "seconds": {name: getattr(plan.step_time, name) for name in ("step", *TIME_PARTS)},
        "samples_per_second": plan.samples_per_second,
        "tokens_per_second": None if tokens is None else plan.samples_per_second * tokens,
        "flops_per_second": plan.flops_per_second,
    }


def _owners_to_dict(plan: Plan) -> dict[str, dict[str, float]] | None:
    loads = plan.owner_loads
    if loads is None:
        return None
    by_owner = {"elements": loads.elements, "state_bytes": loads.state_bytes, "flops": loads.flops}
    return {name: {"fullest": max(values), "mean": sum(values) / len(values)} for name, values in by_owner.items()}


def _offload_to_dict(offload: Offload | None) -> dict[str, dict[str, float]] | None:
    if offload is None:
        return None
    return {kind: dict(fractions) for kind in STATE_KINDS if (fractions := getattr(offload, kind))}
