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
from zeroshard.offload import KINDS, Offload
from zeroshard.planner.plan import Plan, Plans

PARTS = ("compute", "tensor", "launch", "gather", "reduce", "update")
TIERS = ("pcie", "disk")  # traffic that is no collective's


def record(plans: Plans, *, model: str | None = None, tokens: int | None = None) -> dict[str, Any]:
    """Everything in plain data: [Note: the record of a plan]. ``model`` describes it, if its class does too little.

    >>> from torch import nn
    >>> with torch.device("meta"):
    ...     layer = nn.Linear(64, 64, bias=False)
    >>> told = record(zeroshard.plan(layer, torch.empty(1, 64), devices=2, stage=3, micro_batch=4, offload=None))
    >>> told["plans"][told["best"]]["states"]["optimizer states"]
    16384
    """
    every, best = plans.every, plans.best
    places = {id(plan): place for place, plan in enumerate(every)}
    return {
        "why": plans.why,
        "fits": best is not None,
        "model": plans.model if model is None else model,
        "parameters": plans.parameters,
        "devices": plans.devices,
        "precision": plans.precision,
        "tokens": tokens,
        "machine": json.loads(plans.machine.to_json()),
        "versions": versions(),
        "best": None if best is None else places[id(best)],
        "rows": [places[id(plan)] for plan in standing(plans)],
        "plans": [record_plan(plan, psi_bytes(plans), tokens) for plan in every],
    }


def record_plan(plan: Plan, psi: float, tokens: int | None = None) -> dict[str, Any]:
    """One plan in plain data; ``psi`` are the bytes of all parameters."""
    held, here = plan.footprint, min(plan.devices, plan.machine.devices)
    far: dict[str, dict[str, float]] = {}
    for (kind, tier), nbytes in held.far.items():
        far.setdefault(kind, {})[tier] = nbytes
    return {
        "words": plan.choice.words,
        "choice": {
            "stage": plan.choice.stage,
            "tensor": plan.choice.tensor,
            "checkpoint": plan.choice.checkpoint,
            "offload": _offload(plan.choice.offload),
            "micro_batch": plan.choice.micro_batch,
            "accumulate": plan.choice.accumulate,
        },
        "fits": plan.fits,
        "lacks": plan.lacks,
        "memory": plan.memory,
        "states": dict(held.states),
        "far": far,
        "at_rest": held.at_rest,
        "peak": {"moment": held.peak.what, "total": held.peak.total, "by_kind": dict(held.peak.held)},
        "host": held.host,
        "disk": held.disk,
        "node": {"host": held.host * here, "disk": held.disk * here},
        "traffic": dict(plan.pace.traffic),
        "psi": data_traffic(plan) / psi,
        "seconds": {name: getattr(plan.pace, name) for name in ("step", *PARTS)},
        "samples_per_second": plan.samples,
        "tokens_per_second": None if tokens is None else plan.samples * tokens,
        "flops_per_second": plan.flops,
    }


def standing(plans: Plans) -> list[Plan]:
    """The plans that stand for a stage, tensor degree, offload and checkpointing each; the chosen one for its own."""
    best = plans.best  # of two as fast, the smaller: not always its way's fastest
    return [best if best is not None and plan.choice.way == best.choice.way else plan for plan in plans.rows()]


def versions() -> dict[str, str]:
    """Of what the plans were made with."""
    return {"zeroshard": zeroshard.__version__, "torch": torch.__version__, "python": platform.python_version()}


def psi_bytes(plans: Plans) -> float:
    """Ψ in bytes: all parameters in the precision of computation."""
    return plans.parameters * (2 if plans.precision in ("bf16", "fp16") else 4)


def data_traffic(plan: Plan) -> float:
    """Bytes a step of the data axis's collectives."""
    return sent(plan) - sum(nbytes for kind, nbytes in plan.pace.traffic.items() if kind.startswith("tensor "))


def sent(plan: Plan) -> float:
    """Bytes a step of all collectives."""
    return sum(nbytes for kind, nbytes in plan.pace.traffic.items() if kind not in TIERS)


def _offload(offload: Offload | None) -> dict[str, dict[str, float]] | None:
    if offload is None:
        return None
    return {kind: dict(fractions) for kind in KINDS if (fractions := getattr(offload, kind))}
