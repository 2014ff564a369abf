"""Format sweeps, largest models and the paper's results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.planner.scaling.largest_model import LargestModel
from zeroshard.planner.scaling.paper import PaperResult, mean_error
from zeroshard.planner.scaling.simulate import WAIT_KINDS, ScalingPoint, ScalingSimulation, StageScaling
from zeroshard.utils.format import format_bytes

TABLE_HEADERS = ("devices", "micro-batch", "memory", "samples/s", "TFLOPS", "compute", *WAIT_KINDS, "step", "")


def align_columns(rows: Sequence[Sequence[str]], left_aligned: Sequence[int] = ()) -> str:
    """Return rows of text in columns, right-aligned except the columns in ``left_aligned``.

    >>> print(align_columns([("a", "n"), ("bc", "10")], left_aligned=(0,)))
    a    n
    bc  10
    """
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = [
        "  ".join(
            f"{cell:<{width}}" if index in left_aligned else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def simulation_table(found: ScalingSimulation) -> str:
    """Return a sweep: the rows of each stage, then where each stage stops scaling."""
    sections = []
    for stage in found.stages:
        rows = [TABLE_HEADERS, *(_point_row(point) for point in found.points_of_stage(stage))]
        shown = [
            index
            for index, header in enumerate(TABLE_HEADERS)
            if header not in WAIT_KINDS or any(row[index] != "-" for row in rows[1:])
        ]
        sections.append(
            f"stage {stage}\n"
            + align_columns([[row[index] for index in shown] for row in rows], left_aligned=(len(shown) - 1,))
        )
    return "\n\n".join([*sections, "\n".join(scaling_line(stage_scaling) for stage_scaling in found.scaling)])


def _point_row(point: ScalingPoint) -> list[str]:
    strategy, fractions = point.plan.strategy, point.time_fractions
    micro = f"{strategy.micro_batch}" + (f" × {strategy.accumulate}" if strategy.accumulate > 1 else "")
    waits = [f"{fractions[name]:.1%}" if fractions[name] >= 0.0005 else "-" for name in WAIT_KINDS]
    return [
        f"{point.devices:,}",
        micro,
        format_bytes(int(point.plan.memory)),
        f"{point.samples_per_second_per_device:.4g}",
        f"{point.tflops_per_device:.1f}",
        f"{fractions['compute']:.1%}",
        *waits,
        f"{point.plan.step_time.step:.3g} s",
        "" if point.fits else "does not fit",
    ]


def scaling_line(one: StageScaling) -> str:
    """Describe in one line where a stage stops scaling.

    >>> scaling_line(StageScaling(0, None, None, None, None, None))
    'stage 0: fits none of these'
    """
    if one.best is None:
        return f"stage {one.stage}: fits none of these"
    best_text = (
        f"each device does most on {one.best.devices:,} ({one.best.samples_per_second_per_device:.4g} samples/s)"
    )
    clauses = [f"stage {one.stage}: fits from {one.fits_from:,} on; {best_text}"]
    if one.under_90_percent is not None:
        clauses.append(f"under 90 % of it from {one.under_90_percent:,} on")
        clauses.append(
            "never under 50 %" if one.under_50_percent is None else f"under 50 % from {one.under_50_percent:,} on"
        )
    elif one.good_until != one.best.devices:
        clauses.append(f"and over 90 % of it up to {one.good_until:,}")
    return ", ".join(clauses)


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
    return f"{'' if one.confirmed else '≈ '}{size} ({one.layers:,} layers{limit_text})"


def paper_table(exhibit: PaperResult) -> str:
    """Return a table or figure of the paper, with zeroshard's prediction next to each number."""
    error = exhibit.mean_error
    if error is None:
        summary = f"{exhibit.num_exact} of {len(exhibit.cells)} as printed"
        return f"{exhibit.name}: {exhibit.about}\n{_printed_table(exhibit)}\n{summary}"
    rows = [["", "", "paper", "ours", "error"]]
    rows += [[c.row, c.column, f"{c.paper:g}", f"{c.ours:.1f}", f"{c.error:+.0%}"] for c in exhibit.cells]
    means = [f"mean error {error:.0%}"]
    kinds = list(dict.fromkeys(cell.column for cell in exhibit.cells))
    if set(kinds) == {"ZeRO", "baseline"}:
        means += [f"{kind} {mean_error([c for c in exhibit.cells if c.column == kind]):.0%}" for kind in kinds]
    return f"{exhibit.name}: {exhibit.about}\n{align_columns(rows, left_aligned=(0, 1))}\n{', '.join(means)}"


def _printed_table(exhibit: PaperResult) -> str:
    """Return a table in the paper's form; a cell that differs from the printed text shows both."""
    headers = list(dict.fromkeys(cell.column for cell in exhibit.cells))
    rows = [["", *headers]]
    for name in dict.fromkeys(cell.row for cell in exhibit.cells):
        cells = {cell.column: cell for cell in exhibit.cells if cell.row == name}
        shown = [cells[header] for header in headers]
        rows.append([name, *(str(c.ours) if c.ours == c.paper else f"{c.ours}, printed {c.paper}" for c in shown)])
    return align_columns(rows, left_aligned=(0,))
