"""Record: plans as plain data, for JSON. Keys stay; new ones may come.

[Note: the record of a plan]
Sizes are bytes, times seconds, rates a second; all of one device (one rank) unless the key says otherwise::

    why, fits                         one line; whether anything fits
    model, parameters, devices        what was planned, its elements, and for how many devices
    precision, tokens                 of computation; tokens a sample, or null where samples are no text
    machine                           as a machine's JSON file has it
    versions                          of zeroshard, torch and Python
    best                              the chosen plan's place in "plans", or null
    rows                              places of the plans that stand for a stage, tensor degree, offload and
                                      checkpointing
    plans                             all that were looked at, each:
        words                         the choice in a line
        choice                        stage, tensor, checkpoint, offload (fractions by kind and tier, or null),
                                      micro_batch (samples a data-parallel rank and backward), accumulate
        fits, lacks                   whether it fits, and into what it does not
        memory                        what a device needs: peak, the allocator's rounding and the runtime's own
        states                        on the device after a backward, by kind of state
        far                           outside it, by kind of state and tier
        at_rest                       on the device between zero_grad() and the next forward
        peak                          moment (what runs then), total, by_kind, of which "states" is the sum of those
                                      above but for gradients, which are by themselves
        host, disk                    host memory and disk of one rank
        node                          host and disk of a node's ranks together
        traffic                       bytes a step by kind: collectives of the data axis under their names, of the
                                      tensor axis with "tensor " before it, "pcie" and "disk" for the tiers
        psi                           traffic of the data axis as a multiple of Ψ, the bytes of all parameters
        seconds                       step, and what it goes to: compute, tensor (its collectives), launch (the device
                                      waits for the host), gather, reduce, update (waiting for these)
        samples_per_second            of all devices
        tokens_per_second             the same in tokens, or null
        flops_per_second              useful operations of one device, without recomputation
"""

from __future__ import annotations

import json
import platform
from typing import Any

import torch

import zeroshard
from zeroshard.config.offload import STATE_KINDS, Offload
from zeroshard.planner.plan import Plan, Plans

TIME_PARTS = ("compute", "tensor", "launch", "gather", "reduce", "update")
TIER_TRAFFIC = ("pcie", "disk")  # traffic that is no collective's


def plans_to_dict(plans: Plans, *, model: str | None = None, tokens: int | None = None) -> dict[str, Any]:
    """Everything in plain data: [Note: the record of a plan]. ``model`` describes it, if its class does too little.

    >>> from torch import nn
    >>> with torch.device("meta"):
    ...     layer = nn.Linear(64, 64, bias=False)
    >>> told = plans_to_dict(zeroshard.plan(layer, torch.empty(1, 64), devices=2, stage=3, micro_batch=4, offload=None))
    >>> told["plans"][told["best"]]["states"]["optimizer states"]
    16384
    """
    every, best = plans.candidates, plans.best
    places = {id(plan): place for place, plan in enumerate(every)}
    return {
        "why": plans.reason,
        "fits": best is not None,
        "model": plans.model if model is None else model,
        "parameters": plans.parameters,
        "devices": plans.devices,
        "precision": plans.precision,
        "tokens": tokens,
        "machine": json.loads(plans.machine.to_json()),
        "versions": versions(),
        "best": None if best is None else places[id(best)],
        "rows": [places[id(plan)] for plan in best_per_strategy(plans)],
        "plans": [plan_to_dict(plan, psi_bytes(plans), tokens) for plan in every],
    }


def plan_to_dict(plan: Plan, psi: float, tokens: int | None = None) -> dict[str, Any]:
    """One plan in plain data; ``psi`` are the bytes of all parameters."""
    held, here = plan.footprint, min(plan.devices, plan.machine.devices)
    far: dict[str, dict[str, float]] = {}
    for (kind, tier), nbytes in held.offloaded.items():
        far.setdefault(kind, {})[tier] = nbytes
    return {
        "words": plan.strategy.description,
        "choice": {
            "stage": plan.strategy.stage,
            "tensor": plan.strategy.tensor,
            "checkpoint": plan.strategy.checkpoint,
            "offload": _offload_to_dict(plan.strategy.offload),
            "micro_batch": plan.strategy.micro_batch,
            "accumulate": plan.strategy.accumulate,
        },
        "fits": plan.fits,
        "lacks": plan.shortfall,
        "memory": plan.memory,
        "states": dict(held.states),
        "far": far,
        "at_rest": held.between_steps,
        "peak": {"moment": held.peak.label, "total": held.peak.total, "by_kind": dict(held.peak.by_kind)},
        "host": held.host,
        "disk": held.disk,
        "node": {"host": held.host * here, "disk": held.disk * here},
        "traffic": dict(plan.step_time.traffic),
        "psi": data_parallel_traffic(plan) / psi,
        "seconds": {name: getattr(plan.step_time, name) for name in ("step", *TIME_PARTS)},
        "samples_per_second": plan.samples_per_second,
        "tokens_per_second": None if tokens is None else plan.samples_per_second * tokens,
        "flops_per_second": plan.flops_per_second,
    }


def best_per_strategy(plans: Plans) -> list[Plan]:
    """The plans that stand for a stage, tensor degree, offload and checkpointing each; the chosen one for its own."""
    best = plans.best  # of two as fast, the smaller: not always its way's fastest
    return [
        best if best is not None and plan.strategy.key == best.strategy.key else plan
        for plan in plans.fastest_per_strategy()
    ]


def versions() -> dict[str, str]:
    """Of what the plans were made with."""
    return {"zeroshard": zeroshard.__version__, "torch": torch.__version__, "python": platform.python_version()}


def psi_bytes(plans: Plans) -> float:
    """Ψ in bytes: all parameters in the precision of computation."""
    return plans.parameters * (2 if plans.precision in ("bf16", "fp16") else 4)


def data_parallel_traffic(plan: Plan) -> float:
    """Bytes a step of the data axis's collectives."""
    return collective_traffic(plan) - sum(
        nbytes for kind, nbytes in plan.step_time.traffic.items() if kind.startswith("tensor ")
    )


def collective_traffic(plan: Plan) -> float:
    """Bytes a step of all collectives."""
    return sum(nbytes for kind, nbytes in plan.step_time.traffic.items() if kind not in TIER_TRAFFIC)


def _offload_to_dict(offload: Offload | None) -> dict[str, dict[str, float]] | None:
    if offload is None:
        return None
    return {kind: dict(fractions) for kind in STATE_KINDS if (fractions := getattr(offload, kind))}
