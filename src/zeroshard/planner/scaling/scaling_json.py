"""Simulation records: sweeps, largest models and the paper, as plain data for JSON. Sizes are bytes, times seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from zeroshard.planner.plan_json import plan_to_dict, versions
from zeroshard.planner.scaling.largest_model import LargestModel
from zeroshard.planner.scaling.paper import PAPER_CURVE, PaperResult
from zeroshard.planner.scaling.simulate import ScalingPoint, ScalingSimulation, StageScaling


def simulation_to_dict(found: ScalingSimulation, model: str, tokens: int | None = None) -> dict[str, Any]:
    """A sweep: its points, each with all that `zeroshard plan` tells of a plan, and where stages stop to scale."""
    psi = found.parameters * (4 if found.precision == "fp32" else 2)
    return {
        "model": model,
        "parameters": found.parameters,
        "precision": found.precision,
        "machine": json.loads(found.machine.to_json()),
        "versions": versions(),
        "points": [_point_to_dict(point, psi, tokens) for point in found.points],
        "scaling": [_scaling_to_dict(one) for one in found.scaling],
    }


def _point_to_dict(point: ScalingPoint, psi: float, tokens: int | None) -> dict[str, Any]:
    return {
        "devices": point.devices,
        "stage": point.stage,
        "samples_per_second_and_device": point.samples_per_second_per_device,
        "tflops_per_device": point.tflops_per_device,
        "shares": point.time_fractions,
        "plan": plan_to_dict(point.plan, psi, tokens),
    }


def _scaling_to_dict(one: StageScaling) -> dict[str, Any]:
    return {
        "stage": one.stage,
        "fits_from": one.fits_from,
        "best": None if one.best is None else one.best.devices,
        "good_until": one.good_until,
        "under_90_percent": one.under_90_percent,
        "under_50_percent": one.under_50_percent,
    }


def largest_to_dict(found: dict[tuple[int, int], LargestModel]) -> list[dict[str, Any]]:
    """The largest models."""
    return [
        {
            "devices": devices,
            "stage": stage,
            "layers": one.layers,
            "parameters": one.parameters if one.layers else 0,
            "memory": one.memory,
            "limit": one.limit,
            "confirmed": one.confirmed,
        }
        for (devices, stage), one in found.items()
    ]


def paper_to_dict(exhibits: Iterable[PaperResult]) -> dict[str, Any]:
    """The paper's tables and figures, each number beside ours."""
    return {
        "versions": versions(),
        "curve": {"share": PAPER_CURVE.share, "half": PAPER_CURVE.half},
        "exhibits": [
            {
                "name": exhibit.name,
                "about": exhibit.about,
                "mean_error": exhibit.mean_error,
                "exact": exhibit.num_exact,
                "cells": [
                    {"row": c.row, "column": c.column, "paper": c.paper, "ours": c.ours, "error": c.error}
                    for c in exhibit.cells
                ],
            }
            for exhibit in exhibits
        ],
    }
