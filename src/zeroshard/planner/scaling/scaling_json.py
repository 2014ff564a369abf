"""Convert sweeps, largest models and the paper's results to plain data for JSON, with bytes and seconds as units."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from zeroshard.planner.plan_json import plan_to_dict, versions
from zeroshard.planner.scaling.largest_model import LargestModel
from zeroshard.planner.scaling.paper import PAPER_CURVE, PaperResult
from zeroshard.planner.scaling.simulate import ScalingPoint, ScalingSimulation, StageScaling


def simulation_to_dict(found: ScalingSimulation, model: str, tokens: int | None = None) -> dict[str, Any]:
    """Return a sweep: its points, each with its plan as in `zeroshard plan`, and where stages stop scaling."""
    psi = found.parameters * (4 if found.precision == "fp32" else 2)
    return {
        "model": model,
        "parameters": found.parameters,
        "precision": found.precision,
        "machine": json.loads(found.machine.to_json()),
        "versions": versions(),
        "points": [_point_to_dict(point, psi, tokens) for point in found.points],
        "scaling": [_scaling_to_dict(stage_scaling) for stage_scaling in found.scaling],
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
    """Return the largest models, one record per number of devices and stage."""
    return [
        {
            "devices": devices,
            "stage": stage,
            "layers": largest.layers,
            "parameters": largest.parameters if largest.layers else 0,
            "memory": largest.memory,
            "limit": largest.limit,
            "confirmed": largest.confirmed,
        }
        for (devices, stage), largest in found.items()
    ]


def paper_to_dict(exhibits: Iterable[PaperResult]) -> dict[str, Any]:
    """Return the paper's tables and figures, each number with zeroshard's prediction."""
    return {
        "versions": versions(),
        "curve": {"share": PAPER_CURVE.share, "half": PAPER_CURVE.half},
        "exhibits": [
            {
                "name": result.name,
                "about": result.about,
                "mean_error": result.mean_error,
                "exact": result.num_exact,
                "cells": [
                    {
                        "row": cell.row,
                        "column": cell.column,
                        "paper": cell.paper,
                        "ours": cell.ours,
                        "error": cell.error,
                    }
                    for cell in result.cells
                ],
            }
            for result in exhibits
        ],
    }
