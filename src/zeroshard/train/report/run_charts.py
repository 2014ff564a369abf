"""The charts of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from zeroshard.page import (
    Chart,
    bar_trace,
    bytes_axis,
    line_trace,
    phase_markers,
    plot_axis,
    plot_layout,
    stacked_bar_layout,
)
from zeroshard.train.report.series import JsonObject, downsample, extract_series, format_number, smooth
from zeroshard.utils.format import format_bytes

STATE_KINDS = ("parameters", "gradients", "optimizer states", "master weights")  # in stacking order
BUFFER_KINDS = ("gathered", "autograd", "buckets", "step", "activations", "staging")
COLLECTIVE_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "activation gather")
MAX_RANK_BARS = 8  # draw at most this many ranks individually


# ------------------------------------------------------------------------------------------------ parts of a figure


def color_variable(kind: str) -> str:
    """Return the CSS variable for the color of a state, buffer or collective."""
    return (
        f"var(--{kind.replace(' ', '-')})"
        if kind in (*STATE_KINDS, *BUFFER_KINDS, *COLLECTIVE_KINDS)
        else "var(--other)"
    )


def _sort_kinds(kinds: Iterable[str], order: Sequence[str]) -> list[str]:
    """Sort known kinds by ``order``, then the others by name."""
    return sorted(set(kinds), key=lambda kind: (order.index(kind) if kind in order else len(order), kind))


def _step_axis(x: Sequence[int], **options: Any) -> JsonObject:
    options |= {"dtick": 1} if x and x[-1] - x[0] < 6 else {}  # no ticks between steps
    return plot_axis("step", tickformat=",d", unifiedhovertitle={"text": "step %{x}"}, **options)


def _kind_bar(
    names: Sequence[str], values: Sequence[float], kind: str, opacity: float | Sequence[float] = 1.0
) -> JsonObject:
    return bar_trace(names, values, kind, color_variable(kind), opacity)


def _evenly_spaced(count: int, rows: int = 20) -> list[int]:
    """Return at most ``rows`` evenly spaced indices below ``count``, including both ends."""
    return sorted({round(row * (count - 1) / max(1, rows - 1)) for row in range(min(rows, count))})


# ------------------------------------------------------------------------------------------------ lines over the steps


def loss_chart(steps: Sequence[JsonObject], evaluations: Sequence[tuple[int, float]]) -> Chart | None:
    """Draw the training loss, raw (light) and smoothed (strong), and the validation loss as points."""
    x, y = extract_series(steps, "loss")
    if not x and not evaluations:
        return None
    indices, smoothed, data, legend = downsample(y), smooth(y), [], []
    if x:
        x_kept, raw, smooth_kept = [x[i] for i in indices], [y[i] for i in indices], [smoothed[i] for i in indices]
        data = [
            line_trace(x_kept, raw, "each step", "var(--training-light)", 1.2),
            line_trace(x_kept, smooth_kept, "smoothed", "var(--training)", 2.5),
        ]
        legend = [("training, each step", "var(--training-light)"), ("training, smoothed", "var(--training)")]
    if evaluations:
        points = line_trace(
            [x_kept for x_kept, _ in evaluations], [value for _, value in evaluations], "held-out", "var(--held)", 1
        )
        marker = {"color": "var(--held)", "size": 9, "symbol": "diamond", "line": {"color": "var(--card)", "width": 1}}
        data.append(points | {"mode": "markers", "marker": marker})
        legend.append(("held-out", "var(--held)"))
    validation, rows = dict(evaluations), []
    losses = dict(zip(x, y, strict=True))
    for step in sorted({x[i] for i in _evenly_spaced(len(x))} | validation.keys()):
        rows.append(
            [f"{step:,}", *(f"{series[step]:.3f}" if step in series else "" for series in (losses, validation))]
        )
        rows[-1].append(f"{math.exp(min(validation[step], 700)):,.2f}" if step in validation else "")
    label = (
        f"Training loss, from {format_number(y[0])} at step {x[0]} to {format_number(y[-1])} at step {x[-1]}."
        if x
        else ""
    )
    if validation:
        label += f" Held-out loss, {len(validation)} times measured, at best {format_number(min(validation.values()))}."
    layout = plot_layout(380, _step_axis(x), plot_axis("loss (nats per token)"), hovermode="x unified")
    columns = ["step", "training loss", "held-out loss", "held-out perplexity"]
    return Chart("loss", label.strip(), {"data": data, "layout": layout}, columns, rows, legend)


def metric_chart(
    steps: Sequence[JsonObject], key: str, title: str, *, smoothed: bool = False, tick_format: str = "~g"
) -> Chart | None:
    """Draw a small chart of one metric over the steps; ``tick_format`` is the d3 format of the axis."""
    x, y = extract_series(steps, key)
    if not x:
        return None
    indices = downsample(y)
    x_kept, color = [x[i] for i in indices], "var(--training-light)" if smoothed else "var(--training)"
    data = [line_trace(x_kept, [y[i] for i in indices], "each step", color, 1.2 if smoothed else 2)]
    if smoothed:
        smooth_values = smooth(y)
        data.append(line_trace(x_kept, [smooth_values[i] for i in indices], "smoothed", "var(--training)", 2.2))
    layout = plot_layout(
        230, _step_axis(x, nticks=6), plot_axis("", tickformat=tick_format, nticks=5, rangemode="tozero")
    )
    layout["hovermode"] = "x unified"
    format_value = "{:.1%}".format if tick_format.endswith("%") else format_number
    label = f"{title}, from {format_value(y[0])} at step {x[0]} to {format_value(y[-1])} at step {x[-1]}."
    rows = [[f"{x[i]:,}", format_value(y[i])] for i in _evenly_spaced(len(x))]
    name = key.replace("_", "-")
    return Chart(name, label, {"data": data, "layout": layout}, ["step", title.lower()], rows)


# ------------------------------------------------------------------------------------------------ memory


def state_bytes(rank: JsonObject) -> dict[str, int]:
    """Return the bytes of each model state on a rank between steps. A state freed between steps counts with its peak.

    >>> step = {"now": 0, "peak": 7}
    >>> state_bytes({"parameters": {"now": 5, "peak": 9}, "gradients": {"now": 0, "peak": 5}, "step": step})
    {'parameters': 5, 'gradients': 5}
    """
    return {kind: rank[kind]["now"] or rank[kind]["peak"] for kind in STATE_KINDS if rank.get(kind)}


def states_chart(memory: Sequence[JsonObject], ddp_bytes: JsonObject | None) -> Chart | None:
    """Draw the model states of every rank as stacked bars, below those of DDP."""
    if not memory:
        return None
    ranks = [(f"rank {index}", state_bytes(rank)) for index, rank in enumerate(memory)]
    totals = [sum(nbytes.values()) for _, nbytes in ranks]
    ddp_row = [("plain data parallelism", ddp_bytes)] if ddp_bytes else []
    bars = ddp_row + ranks
    if len(ranks) > MAX_RANK_BARS and max(totals) == min(totals):
        bars = [*ddp_row, (f"each of {len(ranks)} ranks", ranks[0][1])]
    elif len(ranks) > MAX_RANK_BARS:
        largest, smallest = ranks[totals.index(max(totals))], ranks[totals.index(min(totals))]
        bars = [*ddp_row, (f"the most, {largest[0]}", largest[1]), (f"the least, {smallest[0]}", smallest[1])]
    kinds = [kind for kind in STATE_KINDS if any(nbytes.get(kind) for _, nbytes in bars)]
    names, bar_totals = [name for name, _ in bars], [sum(nbytes.values()) for _, nbytes in bars]
    opacity = [0.45 if ddp_bytes and index == 0 else 1.0 for index in range(len(bars))]
    data = [_kind_bar(names, [nbytes.get(kind, 0) for _, nbytes in bars], kind, opacity=opacity) for kind in kinds]
    label = f"Model states per rank ({len(ranks)} in all), at most {format_bytes(max(totals))}"
    label += (
        f"; plain data parallelism holds {format_bytes(sum(ddp_bytes.values()))} on every rank." if ddp_bytes else "."
    )
    rows = [
        [
            name,
            *(format_bytes(nbytes.get(kind, 0)) for kind in kinds),
            format_bytes(sum(nbytes.get(kind, 0) for kind in kinds)),
        ]
        for name, nbytes in ddp_row + ranks
    ]
    figure = {"data": data, "layout": stacked_bar_layout(names, bar_totals)}
    return Chart(
        "states", label, figure, ["", *kinds, "together"], rows, [(kind, color_variable(kind)) for kind in kinds]
    )


def buffers_chart(memory: Sequence[JsonObject]) -> Chart | None:
    """Draw the maximum over ranks of each temporary buffer, separately: they do not peak at the same time."""
    kinds = _sort_kinds([kind for rank in memory for kind in rank if kind not in (*STATE_KINDS, "total")], BUFFER_KINDS)
    peaks = {kind: max((rank[kind]["peak"] for rank in memory if rank.get(kind)), default=0) for kind in kinds}
    kinds = [kind for kind in kinds if peaks[kind]]
    if not kinds:
        return None
    data = [_kind_bar([escape(kind)], [peaks[kind]], kind) for kind in kinds]
    rows = [
        [f"rank {index}", *(format_bytes(rank[kind]["peak"]) if rank.get(kind) else "" for kind in (*kinds, "total"))]
        for index, rank in enumerate(memory)
    ]
    figure = {
        "data": data,
        "layout": stacked_bar_layout([escape(kind) for kind in kinds], [peaks[kind] for kind in kinds]),
    }
    label = "Working buffers at their peak: " + ", ".join(f"{kind} {format_bytes(peaks[kind])}" for kind in kinds) + "."
    return Chart("working", label, figure, ["peak of", *kinds, "everything at once"], rows)


def timeline_chart(record: JsonObject | None) -> Chart | None:
    """Draw the memory of rank 0 over one step, stacked by kind, with the phases marked."""
    if not record:
        return None
    all_kinds = _sort_kinds(record.get("kinds") or {}, (*STATE_KINDS, *BUFFER_KINDS))
    kinds = [kind for kind in all_kinds if any(record["kinds"][kind])]
    if not kinds:
        return None
    total = [sum(values) for values in zip(*(record["kinds"][kind] for kind in kinds), strict=True)]
    indices = downsample(total)
    milliseconds = [record["seconds"][i] * 1000 for i in indices]
    data = []
    for kind in kinds:
        area = line_trace(
            milliseconds, [record["kinds"][kind][i] for i in indices], escape(kind), color_variable(kind), 0
        )
        area["line"]["shape"] = "hv"  # memory changes in steps
        data.append(area | {"stackgroup": "held", "fillcolor": color_variable(kind), "hovertemplate": "%{y:.3~s}B"})
    legend = [(kind, color_variable(kind)) for kind in kinds]
    if record.get("allocated"):
        allocated = line_trace(
            milliseconds, [record["allocated"][i] for i in indices], "allocated in all", "var(--text)", 1.5
        )
        allocated["line"]["dash"] = "dot"
        data.append(allocated | {"hovertemplate": "%{y:.3~s}B"})
        legend.append(("allocated in all, activations included", "var(--text)"))
    xaxis = plot_axis("milliseconds since the step began", range=[milliseconds[0], milliseconds[-1]])
    xaxis["unifiedhovertitle"] = {"text": "%{x:.3~g} ms"}
    layout = plot_layout(380, xaxis, bytes_axis("bytes held"))
    layout |= {"hovermode": "x unified", **phase_markers(record.get("phases") or [], milliseconds[-1])}
    layout["margin"] = {"l": 8, "r": 16, "t": 40, "b": 8}
    peak = total.index(max(total))
    label = (
        f"Memory of rank 0 over one step: {format_bytes(total[0])} at its start, at most "
        f"{format_bytes(total[peak])} after "
    )
    label += f"{record['seconds'][peak] * 1000:.3g} ms."
    rows = [
        [kind, *(format_bytes(reduce(record["kinds"][kind])) for reduce in (lambda values: values[0], max))]
        for kind in kinds
    ]
    rows = [[*row, format_bytes(record["kinds"][row[0]][peak])] for row in rows]
    rows.append(["together", format_bytes(total[0]), format_bytes(total[peak]), format_bytes(total[peak])])
    columns = ["", "at the start", "at most", "at the fullest moment"]
    return Chart("timeline", label, {"data": data, "layout": layout}, columns, rows, legend)


# ------------------------------------------------------------------------------------------------ communication


def communication_chart(traffic: JsonObject, paper: JsonObject | None) -> Chart | None:
    """Draw the bytes of one step by collective, compared with the paper's volume."""
    kinds = _sort_kinds([kind for kind in traffic if traffic[kind]["bytes"]], COLLECTIVE_KINDS)
    if not kinds:
        return None
    total_bytes = sum(traffic[kind]["bytes"] for kind in kinds)
    names, bar_totals = ["this run"], [total_bytes]
    data = [_kind_bar(["this run"], [traffic[kind]["bytes"]], kind) for kind in kinds]
    legend = [(kind, color_variable(kind)) for kind in kinds]
    rows = [[kind, str(traffic[kind]["count"]), format_bytes(traffic[kind]["bytes"])] for kind in kinds]
    rows.append(["together", str(sum(traffic[kind]["count"] for kind in kinds)), format_bytes(total_bytes)])
    label = f"One step communicated {format_bytes(total_bytes)}"
    if paper:
        names.append(f"the paper: {escape(paper['formula'])}")
        bar_totals.append(paper["bytes"])
        data.append(_kind_bar(names[1:], bar_totals[1:], "paper"))
        rows.append([f"the paper: {paper['formula']}", "", format_bytes(paper["bytes"])])
        label += f", where the paper counts {format_bytes(paper['bytes'])}"
    figure = {"data": data, "layout": stacked_bar_layout(names, bar_totals)}
    return Chart("traffic", label + ".", figure, ["collective", "count", "bytes"], rows, legend)
