"""Charts: the pictures of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from zeroshard.memory.report import format_bytes
from zeroshard.page.chart import (
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

STATE_KINDS = ("parameters", "gradients", "optimizer states", "master weights")  # in the order they are stacked
BUFFER_KINDS = ("gathered", "autograd", "buckets", "step", "activations", "staging")
COLLECTIVE_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "activation gather")
MAX_RANK_BARS = 8  # most ranks that are drawn one by one


# ------------------------------------------------------------------------------------------------ parts of a figure


def color_variable(kind: str) -> str:
    """Name the custom property that holds the colour of a kind of state or of a collective."""
    return (
        f"var(--{kind.replace(' ', '-')})"
        if kind in (*STATE_KINDS, *BUFFER_KINDS, *COLLECTIVE_KINDS)
        else "var(--other)"
    )


def _sort_kinds(kinds: Iterable[str], order: Sequence[str]) -> list[str]:
    """Sort known kinds as ``order`` has them, and the others after them by name."""
    return sorted(set(kinds), key=lambda kind: (order.index(kind) if kind in order else len(order), kind))


def _step_axis(x: Sequence[int], **options: Any) -> JsonObject:
    options |= {"dtick": 1} if x and x[-1] - x[0] < 6 else {}  # there is no step 1.5
    return plot_axis("step", tickformat=",d", unifiedhovertitle={"text": "step %{x}"}, **options)


def _kind_bar(
    names: Sequence[str], values: Sequence[float], kind: str, opacity: float | Sequence[float] = 1.0
) -> JsonObject:
    return bar_trace(names, values, kind, color_variable(kind), opacity)


def _evenly_spaced(count: int, rows: int = 20) -> list[int]:
    """Choose about ``rows`` indices spread evenly over ``count``, both ends among them."""
    return sorted({round(row * (count - 1) / max(1, rows - 1)) for row in range(min(rows, count))})


# ------------------------------------------------------------------------------------------------ lines over the steps


def loss_chart(steps: Sequence[JsonObject], evaluations: Sequence[tuple[int, float]]) -> Chart | None:
    """Draw the training loss, light as it was and strong as smoothed, and the held-out loss as points."""
    x, y = extract_series(steps, "loss")
    if not x and not evaluations:
        return None
    kept, smoothed, data, legend = downsample(y), smooth(y), [], []
    if x:
        at, light, strong = [x[i] for i in kept], [y[i] for i in kept], [smoothed[i] for i in kept]
        data = [
            line_trace(at, light, "each step", "var(--training-light)", 1.2),
            line_trace(at, strong, "smoothed", "var(--training)", 2.5),
        ]
        legend = [("training, each step", "var(--training-light)"), ("training, smoothed", "var(--training)")]
    if evaluations:
        points = line_trace(
            [at for at, _ in evaluations], [value for _, value in evaluations], "held-out", "var(--held)", 1
        )
        marker = {"color": "var(--held)", "size": 9, "symbol": "diamond", "line": {"color": "var(--card)", "width": 1}}
        data.append(points | {"mode": "markers", "marker": marker})
        legend.append(("held-out", "var(--held)"))
    measured, rows = dict(evaluations), []
    losses = dict(zip(x, y, strict=True))
    for step in sorted({x[i] for i in _evenly_spaced(len(x))} | measured.keys()):
        rows.append([f"{step:,}", *(f"{of[step]:.3f}" if step in of else "" for of in (losses, measured))])
        rows[-1].append(f"{math.exp(min(measured[step], 700)):,.2f}" if step in measured else "")
    label = (
        f"Training loss, from {format_number(y[0])} at step {x[0]} to {format_number(y[-1])} at step {x[-1]}."
        if x
        else ""
    )
    if measured:
        label += f" Held-out loss, {len(measured)} times measured, at best {format_number(min(measured.values()))}."
    layout = plot_layout(380, _step_axis(x), plot_axis("loss (nats per token)"), hovermode="x unified")
    columns = ["step", "training loss", "held-out loss", "held-out perplexity"]
    return Chart("loss", label.strip(), {"data": data, "layout": layout}, columns, rows, legend)


def metric_chart(
    steps: Sequence[JsonObject], key: str, title: str, *, smoothed: bool = False, tick_format: str = "~g"
) -> Chart | None:
    """Draw one number of every step, small; ``form`` is how d3 writes it on the axis."""
    x, y = extract_series(steps, key)
    if not x:
        return None
    kept = downsample(y)
    at, hue = [x[i] for i in kept], "var(--training-light)" if smoothed else "var(--training)"
    data = [line_trace(at, [y[i] for i in kept], "each step", hue, 1.2 if smoothed else 2)]
    if smoothed:
        calm = smooth(y)
        data.append(line_trace(at, [calm[i] for i in kept], "smoothed", "var(--training)", 2.2))
    layout = plot_layout(
        230, _step_axis(x, nticks=6), plot_axis("", tickformat=tick_format, nticks=5, rangemode="tozero")
    )
    layout["hovermode"] = "x unified"
    write = "{:.1%}".format if tick_format.endswith("%") else format_number
    label = f"{title}, from {write(y[0])} at step {x[0]} to {write(y[-1])} at step {x[-1]}."
    rows = [[f"{x[i]:,}", write(y[i])] for i in _evenly_spaced(len(x))]
    name = key.replace("_", "-")
    return Chart(name, label, {"data": data, "layout": layout}, ["step", title.lower()], rows)


# ------------------------------------------------------------------------------------------------ memory


def state_bytes(rank: JsonObject) -> dict[str, int]:
    """Tell the bytes of each model state on a rank at rest. One that is freed between steps counts with its peak.

    >>> step = {"now": 0, "peak": 7}
    >>> state_bytes({"parameters": {"now": 5, "peak": 9}, "gradients": {"now": 0, "peak": 5}, "step": step})
    {'parameters': 5, 'gradients': 5}
    """
    return {kind: rank[kind]["now"] or rank[kind]["peak"] for kind in STATE_KINDS if rank.get(kind)}


def states_chart(memory: Sequence[JsonObject], ddp_bytes: JsonObject | None) -> Chart | None:
    """Draw the model states of every rank, stacked, under what plain data parallelism holds on each."""
    if not memory:
        return None
    ranks = [(f"rank {index}", state_bytes(rank)) for index, rank in enumerate(memory)]
    totals = [sum(of.values()) for _, of in ranks]
    first = [("plain data parallelism", ddp_bytes)] if ddp_bytes else []
    shown = first + ranks
    if len(ranks) > MAX_RANK_BARS and max(totals) == min(totals):
        shown = [*first, (f"each of {len(ranks)} ranks", ranks[0][1])]
    elif len(ranks) > MAX_RANK_BARS:
        most, least = ranks[totals.index(max(totals))], ranks[totals.index(min(totals))]
        shown = [*first, (f"the most, {most[0]}", most[1]), (f"the least, {least[0]}", least[1])]
    kinds = [kind for kind in STATE_KINDS if any(of.get(kind) for _, of in shown)]
    names, sums = [name for name, _ in shown], [sum(of.values()) for _, of in shown]
    fade = [0.45 if ddp_bytes and index == 0 else 1.0 for index in range(len(shown))]
    data = [_kind_bar(names, [of.get(kind, 0) for _, of in shown], kind, opacity=fade) for kind in kinds]
    label = f"Model states per rank ({len(ranks)} in all), at most {format_bytes(max(totals))}"
    label += (
        f"; plain data parallelism holds {format_bytes(sum(ddp_bytes.values()))} on every rank." if ddp_bytes else "."
    )
    rows = [
        [name, *(format_bytes(of.get(kind, 0)) for kind in kinds), format_bytes(sum(of.get(kind, 0) for kind in kinds))]
        for name, of in first + ranks
    ]
    figure = {"data": data, "layout": stacked_bar_layout(names, sums)}
    return Chart(
        "states", label, figure, ["", *kinds, "together"], rows, [(kind, color_variable(kind)) for kind in kinds]
    )


def buffers_chart(memory: Sequence[JsonObject]) -> Chart | None:
    """Draw the most that any rank held of each working buffer, each for itself: they do not peak at the same time."""
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
    """Draw what rank 0 held over one step, stacked by kind, with the phases marked."""
    if not record:
        return None
    every = _sort_kinds(record.get("kinds") or {}, (*STATE_KINDS, *BUFFER_KINDS))
    kinds = [kind for kind in every if any(record["kinds"][kind])]
    if not kinds:
        return None
    total = [sum(values) for values in zip(*(record["kinds"][kind] for kind in kinds), strict=True)]
    kept = downsample(total)
    at = [record["seconds"][i] * 1000 for i in kept]
    data = []
    for kind in kinds:
        area = line_trace(at, [record["kinds"][kind][i] for i in kept], escape(kind), color_variable(kind), 0)
        area["line"]["shape"] = "hv"  # memory is taken and given back at once
        data.append(area | {"stackgroup": "held", "fillcolor": color_variable(kind), "hovertemplate": "%{y:.3~s}B"})
    legend = [(kind, color_variable(kind)) for kind in kinds]
    if record.get("allocated"):
        whole = line_trace(at, [record["allocated"][i] for i in kept], "allocated in all", "var(--text)", 1.5)
        whole["line"]["dash"] = "dot"
        data.append(whole | {"hovertemplate": "%{y:.3~s}B"})
        legend.append(("allocated in all, activations included", "var(--text)"))
    xaxis = plot_axis("milliseconds since the step began", range=[at[0], at[-1]])
    xaxis["unifiedhovertitle"] = {"text": "%{x:.3~g} ms"}
    layout = plot_layout(380, xaxis, bytes_axis("bytes held"))
    layout |= {"hovermode": "x unified", **phase_markers(record.get("phases") or [], at[-1])}
    layout["margin"] = {"l": 8, "r": 16, "t": 40, "b": 8}
    peak = total.index(max(total))
    label = (
        f"Memory of rank 0 over one step: {format_bytes(total[0])} at its start, at most "
        f"{format_bytes(total[peak])} after "
    )
    label += f"{record['seconds'][peak] * 1000:.3g} ms."
    rows = [[kind, *(format_bytes(get(record["kinds"][kind])) for get in (lambda of: of[0], max))] for kind in kinds]
    rows = [[*row, format_bytes(record["kinds"][row[0]][peak])] for row in rows]
    rows.append(["together", format_bytes(total[0]), format_bytes(total[peak]), format_bytes(total[peak])])
    columns = ["", "at the start", "at most", "at the fullest moment"]
    return Chart("timeline", label, {"data": data, "layout": layout}, columns, rows, legend)


# ------------------------------------------------------------------------------------------------ communication


def communication_chart(traffic: JsonObject, paper: JsonObject | None) -> Chart | None:
    """Draw the bytes of one step by collective, against the paper's volume."""
    kinds = _sort_kinds([kind for kind in traffic if traffic[kind]["bytes"]], COLLECTIVE_KINDS)
    if not kinds:
        return None
    ours = sum(traffic[kind]["bytes"] for kind in kinds)
    names, sums = ["this run"], [ours]
    data = [_kind_bar(["this run"], [traffic[kind]["bytes"]], kind) for kind in kinds]
    legend = [(kind, color_variable(kind)) for kind in kinds]
    rows = [[kind, str(traffic[kind]["count"]), format_bytes(traffic[kind]["bytes"])] for kind in kinds]
    rows.append(["together", str(sum(traffic[kind]["count"] for kind in kinds)), format_bytes(ours)])
    label = f"One step communicated {format_bytes(ours)}"
    if paper:
        names.append(f"the paper: {escape(paper['formula'])}")
        sums.append(paper["bytes"])
        data.append(_kind_bar(names[1:], sums[1:], "paper"))
        rows.append([f"the paper: {paper['formula']}", "", format_bytes(paper["bytes"])])
        label += f", where the paper counts {format_bytes(paper['bytes'])}"
    figure = {"data": data, "layout": stacked_bar_layout(names, sums)}
    return Chart("traffic", label + ".", figure, ["collective", "count", "bytes"], rows, legend)
