"""Sweeps and largest models as tables for a terminal, and as plain data for JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from zeroshard.planner import JSON_VERSION, Machine, plan_to_dict
from zeroshard.planner.commands.plan_text import align_columns, format_batch, format_seconds
from zeroshard.planner.scaling import (
    WAIT_KINDS,
    LargestModel,
    ScalingPoint,
    ScalingSimulation,
    StageScaling,
)
from zeroshard.utils.format import format_bytes
from zeroshard.utils.version import software_versions

TABLE_HEADERS = ("devices", "micro-batch", "memory", "samples/s", "TFLOPS", "compute", *WAIT_KINDS, "step", "")


def simulation_table(found: ScalingSimulation) -> str:
    """Return a sweep: the rows of each series, then where each series stops scaling."""
    sections = []
    for series in found.series:
        rows = [TABLE_HEADERS, *(_point_row(point) for point in found.points_of_series(series))]
        shown = [
            index
            for index, header in enumerate(TABLE_HEADERS)
            if header not in WAIT_KINDS or any(row[index] != "-" for row in rows[1:])
        ]
        sections.append(
            f"{series}\n"
            + align_columns([[row[index] for index in shown] for row in rows], left_aligned=(len(shown) - 1,))
        )
    return "\n\n".join([*sections, "\n".join(scaling_line(stage_scaling) for stage_scaling in found.scaling)])


def _point_row(point: ScalingPoint) -> list[str]:
    strategy, fractions = point.plan.strategy, point.time_fractions
    waits = [f"{fractions[name]:.1%}" if fractions[name] >= 0.0005 else "-" for name in WAIT_KINDS]
    return [
        f"{point.devices:,}",
        format_batch(strategy),
        format_bytes(int(point.plan.memory)),
        f"{point.samples_per_second_per_device:.4g}",
        f"{point.tflops_per_device:.1f}",
        f"{fractions['compute']:.1%}",
        *waits,
        f"{point.plan.step_time.step:.3g} s",
        "" if point.fits else "does not fit",
    ]


def scaling_line(one: StageScaling) -> str:
    """Describe in one line where a series stops scaling.

    >>> scaling_line(StageScaling(0, None, None, None, None, "stage 0"))
    'stage 0: fits on none of these'
    """
    if one.best is None:
        return f"{one.series}: fits on none of these"
    best_text = f"fastest per device on {one.best.devices:,} ({one.best.samples_per_second_per_device:.4g} samples/s)"
    clauses = [f"{one.series}: fits from {one.fits_from:,} on; {best_text}"]
    if one.under_90_percent is not None:
        clauses.append(f"under 90 % of that from {one.under_90_percent:,} on")
        clauses.append(
            "never under 50 %" if one.under_50_percent is None else f"under 50 % from {one.under_50_percent:,} on"
        )
    return ", ".join(clauses)


def network_table(found: Mapping[float, ScalingSimulation]) -> str:
    """Return a row for each series and a column for each network, in Gb/s: step time, and samples/s of one device."""
    first = next(iter(found.values()))
    sections = []
    for devices in dict.fromkeys(point.devices for point in first.points):
        for title, cell in (
            (f"a step on {devices:,} devices", lambda point: format_seconds(point.plan.step_time.step)),
            ("samples/s of one device", lambda point: f"{point.samples_per_second_per_device:.4g}"),
        ):
            rows = [[title, *(f"{gigabits:g} Gb/s" for gigabits in found)]]
            for series in first.series:
                points = [_find_point(simulation, series, devices) for simulation in found.values()]
                if any(points):
                    rows.append([series, *(_network_cell(point, cell) for point in points)])
            sections.append(align_columns(rows, left_aligned=(0,)))
    return "\n\n".join(sections)


def _find_point(found: ScalingSimulation, series: str, devices: int) -> ScalingPoint | None:
    return next((point for point in found.points_of_series(series) if point.devices == devices), None)


def _network_cell(point: ScalingPoint | None, cell: Callable[[ScalingPoint], str]) -> str:
    return "-" if point is None else cell(point) if point.fits else "does not fit"


def largest_table(found: dict[tuple[int, int], LargestModel]) -> str:
    """Return the table of the largest models, by (devices, stage)."""
    stages = sorted({stage for _, stage in found})
    rows = [["devices", *(f"stage {stage}" for stage in stages)]]
    for devices in sorted({devices for devices, _ in found}):
        rows.append([f"{devices:,}", *(_largest_text(found.get((devices, stage))) for stage in stages)])
    return align_columns(rows)


def _largest_text(one: LargestModel | None) -> str:
    if one is None:
        return "-"
    if not one.layers:
        return "nothing fits"
    billions = one.parameters / 1e9
    size = f"{billions / 1000:.3g}T" if billions >= 1000 else f"{billions:.3g}B"
    limit_text = "" if one.limit == "device" else f", {one.limit} full"
    return f"{'≥ ' if one.may_be_deeper else ''}{size} ({one.layers:,} layers{limit_text})"


def simulation_to_dict(found: ScalingSimulation, model: str, tokens: int | None = None) -> dict[str, Any]:
    """Return a sweep: its points, each with its plan as in `zeroshard plan`, and where series stop scaling."""
    return {
        **_head(model, found.machine),
        "parameters": found.parameters,
        "precision": found.precision,
        "points": [_point_to_dict(point, tokens) for point in found.points],
        "series": [_series_to_dict(one) for one in found.scaling],
    }


def _head(model: str, machine: Machine) -> dict[str, Any]:
    return {
        "version": JSON_VERSION,
        "software": software_versions(),
        "model": model,
        "machine": json.loads(machine.to_json()),
    }


def _point_to_dict(point: ScalingPoint, tokens: int | None) -> dict[str, Any]:
    return {
        "series": point.series,
        "devices": point.devices,
        "samples_per_second_per_device": point.samples_per_second_per_device,
        "time_fractions": point.time_fractions,
        "plan": plan_to_dict(point.plan, tokens=tokens),
    }


def _series_to_dict(one: StageScaling) -> dict[str, Any]:
    return {
        "name": one.series,
        "stage": one.stage,
        "fits_from_devices": one.fits_from,
        "fastest_devices": None if one.best is None else one.best.devices,
        "under_90_percent_from_devices": one.under_90_percent,
        "under_50_percent_from_devices": one.under_50_percent,
    }


def largest_to_dict(found: dict[tuple[int, int], LargestModel], model: str, machine: Machine) -> dict[str, Any]:
    """Return the largest models, one record per number of devices and stage."""
    records = [
        {
            "devices": devices,
            "stage": stage,
            "layers": largest.layers,
            "parameters": largest.parameters if largest.layers else 0,
            "device_bytes": largest.memory,
            "limited_by": largest.limit,
            "may_be_deeper": largest.may_be_deeper,
        }
        for (devices, stage), largest in found.items()
    ]
    return {**_head(model, machine), "largest_models": records}
