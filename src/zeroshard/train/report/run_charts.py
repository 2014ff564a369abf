"""The charts of a training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from zeroshard.page import (
    Chart,
    JsonObject,
    bar_rows,
    downsample,
    line_trace,
    memory_over_time,
    plot_axis,
    plot_layout,
    stacked_bars,
)
from zeroshard.utils.format import format_bytes

# in stacking order
STATE_KINDS = ("parameters", "gradients", "master weights", "optimizer states", "outer optimizer")
BUFFER_KINDS = ("gathered", "autograd", "buckets", "step", "activations", "staging")
COLLECTIVE_KINDS = (
    *("all-gather", "outer all-gather", "reduce-scatter", "outer reduce-scatter"),
    *("all-reduce", "all-to-all", "replica average", "activation gather"),
)
MAX_RANK_BARS = 8  # draw at most this many ranks individually


# ------------------------------------------------------------------------------------------------ series over the steps


def finite_or_none(value: object) -> float | None:
    """Return ``value`` if it is a finite number: the JSON of a diverged run also contains NaN and Infinity.

    >>> finite_or_none(2), finite_or_none(float("nan")), finite_or_none(None)
    (2.0, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def format_number(value: float) -> str:
    """Format a number for a table.

    >>> format_number(6.97123), format_number(0.00012), format_number(21034.7), format_number(0)
    ('6.971', '0.00012', '21,035', '0')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def extract_series(steps: Sequence[JsonObject], key: str) -> tuple[list[int], list[float]]:
    """Return the steps at which ``key`` is a finite number, and the numbers."""
    pairs = [(step["step"], value) for step in steps if (value := finite_or_none(step.get(key))) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def smooth(values: Sequence[float]) -> list[float]:
    """Average over a centered window of about a 25th of the run, so that a steep start is not delayed.

    >>> smooth([4, 3, 2, 1])
    [4.0, 3.0, 2.0, 1.5]
    """
    half_width, sums = max(1, len(values) // 50), [0.0]
    for value in values:
        sums.append(sums[-1] + value)

    def average(index: int) -> float:
        width = min(index, half_width)  # not wider on the right than on the left: the first value does not change
        first, last = index - width, min(len(values), index + width + 1)
        return (sums[last] - sums[first]) / (last - first)

    return [average(index) for index in range(len(values))]


# ------------------------------------------------------------------------------------------------ parts of a figure


def color_variable(kind: str) -> str:
    """Return the CSS variable for the color of a state, buffer or collective."""
    is_known = kind in (*STATE_KINDS, *BUFFER_KINDS, *COLLECTIVE_KINDS)
    return f"var(--{kind.replace(' ', '-')})" if is_known else "var(--other)"


def _colors(kinds: Iterable[str]) -> dict[str, str]:
    return {kind: color_variable(kind) for kind in kinds}


def _sort_kinds(kinds: Iterable[str], order: Sequence[str]) -> list[str]:
    """Sort known kinds by ``order``, then the others by name."""
    return sorted(set(kinds), key=lambda kind: (order.index(kind) if kind in order else len(order), kind))


def _step_axis(x: Sequence[int], **options: Any) -> JsonObject:
    options |= {"dtick": 1} if x and x[-1] - x[0] < 6 else {}  # no ticks between steps
    return plot_axis("step", tickformat=",d", unifiedhovertitle={"text": "step %{x}"}, **options)


def _raw_and_smoothed(x: Sequence[int], y: Sequence[float], width: float) -> list[JsonObject]:
    """Return the lines of a series: raw (light) and smoothed (strong)."""
    indices, smoothed = downsample(y), smooth(y)
    kept = [x[i] for i in indices]
    return [
        line_trace(kept, [y[i] for i in indices], "each step", "var(--training-light)", 1.2),
        line_trace(kept, [smoothed[i] for i in indices], "smoothed", "var(--training)", width),
    ]


def _describe_range(title: str, x: Sequence[int], y: Sequence[float], format_value: Callable[[float], str]) -> str:
    return f"{title}, from {format_value(y[0])} at step {x[0]} to {format_value(y[-1])} at step {x[-1]}."


def _evenly_spaced(count: int, rows: int = 20) -> list[int]:
    """Return at most ``rows`` evenly spaced indices below ``count``, including both ends."""
    return sorted({round(row * (count - 1) / max(1, rows - 1)) for row in range(min(rows, count))})


# ------------------------------------------------------------------------------------------------ lines over the steps


def loss_chart(steps: Sequence[JsonObject], evaluations: Sequence[tuple[int, float]]) -> Chart | None:
    """Draw the training loss, raw (light) and smoothed (strong), and the validation loss as points."""
    x, y = extract_series(steps, "loss")
    if not x and not evaluations:
        return None
    data, legend = [], []
    if x:
        data = _raw_and_smoothed(x, y, 2.5)
        legend = [("training, each step", "var(--training-light)"), ("training, smoothed", "var(--training)")]
    if evaluations:
        eval_steps, eval_losses = [step for step, _ in evaluations], [loss for _, loss in evaluations]
        points = line_trace(eval_steps, eval_losses, "held-out", "var(--held)", 1)
        marker = {"color": "var(--held)", "size": 9, "symbol": "diamond", "line": {"color": "var(--card)", "width": 1}}
        data.append(points | {"mode": "markers", "marker": marker})
        legend.append(("held-out", "var(--held)"))
    losses, validation, rows = dict(zip(x, y, strict=True)), dict(evaluations), []
    for step in sorted({x[i] for i in _evenly_spaced(len(x))} | validation.keys()):
        perplexity = f"{math.exp(min(validation[step], 700)):,.2f}" if step in validation else ""
        values = [f"{series[step]:.3f}" if step in series else "" for series in (losses, validation)]
        rows.append([f"{step:,}", *values, perplexity])
    label = _describe_range("Training loss", x, y, format_number) if x else ""
    if validation:
        label += f" Held-out loss, measured {len(validation)} times, best {format_number(min(validation.values()))}."
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
    if smoothed:
        data = _raw_and_smoothed(x, y, 2.2)
    else:
        indices = downsample(y)
        data = [line_trace([x[i] for i in indices], [y[i] for i in indices], "each step", "var(--training)", 2)]
    yaxis = plot_axis("", tickformat=tick_format, nticks=5, rangemode="tozero")
    layout = plot_layout(230, _step_axis(x, nticks=6), yaxis, hovermode="x unified")
    format_value = "{:.1%}".format if tick_format.endswith("%") else format_number
    rows = [[f"{x[i]:,}", format_value(y[i])] for i in _evenly_spaced(len(x))]
    figure = {"data": data, "layout": layout}
    label = _describe_range(title, x, y, format_value)
    return Chart(key.replace("_", "-"), label, figure, ["step", title.lower()], rows)


# ------------------------------------------------------------------------------------------------ memory


def state_bytes(rank: Mapping[str, Any]) -> dict[str, int]:
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
    shown = ranks
    if len(ranks) > MAX_RANK_BARS and max(totals) == min(totals):
        shown = [(f"each of {len(ranks)} ranks", ranks[0][1])]
    elif len(ranks) > MAX_RANK_BARS:
        largest, smallest = ranks[totals.index(max(totals))], ranks[totals.index(min(totals))]
        shown = [(f"most, {largest[0]}", largest[1]), (f"least, {smallest[0]}", smallest[1])]
    bars = ddp_row + shown
    kinds = [kind for kind in STATE_KINDS if any(nbytes.get(kind) for _, nbytes in bars)]
    opacity = [0.45 if ddp_bytes and index == 0 else 1.0 for index in range(len(bars))]
    figure = stacked_bars(bars, _colors(kinds), opacity=opacity)
    label = f"Model states of {len(ranks)} ranks, at most {format_bytes(max(totals))} per rank"
    if ddp_bytes:
        label += f"; plain data parallelism holds {format_bytes(sum(ddp_bytes.values()))} on every rank"
    rows = bar_rows(ddp_row + ranks, kinds)
    return Chart("states", f"{label}.", figure, ["", *kinds, "total"], rows, list(_colors(kinds).items()))


def buffers_chart(memory: Sequence[JsonObject]) -> Chart | None:
    """Draw the maximum over ranks of each temporary buffer, separately: they do not peak at the same time."""
    kinds = _sort_kinds([kind for rank in memory for kind in rank if kind not in (*STATE_KINDS, "total")], BUFFER_KINDS)
    peaks = {kind: max((rank[kind]["peak"] for rank in memory if rank.get(kind)), default=0) for kind in kinds}
    kinds = [kind for kind in kinds if peaks[kind]]
    if not kinds:
        return None
    rows = [
        [f"rank {index}", *(format_bytes(rank[kind]["peak"]) if rank.get(kind) else "" for kind in (*kinds, "total"))]
        for index, rank in enumerate(memory)
    ]
    figure = stacked_bars([(escape(kind), {kind: peaks[kind]}) for kind in kinds], _colors(kinds))
    label = "Peaks of temporary buffers: " + ", ".join(f"{kind} {format_bytes(peaks[kind])}" for kind in kinds) + "."
    return Chart("working", label, figure, ["peak of", *kinds, "total"], rows)


def timeline_chart(record: JsonObject | None) -> Chart | None:
    """Draw the memory of rank 0 over one step, stacked by kind, with the phases marked."""
    if not record:
        return None
    kinds = _sort_kinds(record.get("kinds") or {}, (*STATE_KINDS, *BUFFER_KINDS))
    memory = {kind: record["kinds"][kind] for kind in kinds if any(record["kinds"][kind])}
    if not memory:
        return None
    milliseconds = [seconds * 1000 for seconds in record["seconds"]]
    total = [sum(values) for values in zip(*memory.values(), strict=True)]
    peak = total.index(max(total))
    label = (
        f"Memory of rank 0 over one step: {format_bytes(total[0])} at its start, at most {format_bytes(total[peak])} "
        f"after {milliseconds[peak]:.3g} ms."
    )
    return memory_over_time(
        label,
        milliseconds,
        memory,
        _colors(memory),
        phases=record.get("phases") or [],
        time_title="milliseconds since the step began",
        allocated=record.get("allocated"),
    )


# ------------------------------------------------------------------------------------------------ communication


def expected_traffic(predicted: Mapping[str, Mapping[str, int]], traffic: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes that the options of a run need in a step like the one with this traffic, by collective.

    >>> predicted = {"step": {"all-gather": 8}, "average": {"all-gather": 4, "replica average": 6}}
    >>> expected_traffic(predicted, {"all-gather": {}}), expected_traffic(predicted, {"replica average": {}})
    ({'all-gather': 8}, {'all-gather': 12, 'replica average': 6})
    """
    parts = [predicted["step"], predicted["average"] if "replica average" in traffic else {}]
    return {kind: sum(part.get(kind, 0) for part in parts) for kind in {**parts[0], **parts[1]}}


def communication_chart(
    traffic: JsonObject, paper: JsonObject | None, predicted: JsonObject | None = None
) -> Chart | None:
    """Draw the bytes of one step by collective, compared with what the options need and with the paper's volume."""
    kinds = _sort_kinds([kind for kind in traffic if traffic[kind]["bytes"]], COLLECTIVE_KINDS)
    if not kinds:
        return None
    total_bytes = sum(traffic[kind]["bytes"] for kind in kinds)
    bars, colors = [("this run", {kind: traffic[kind]["bytes"] for kind in kinds})], _colors(kinds)
    legend = list(colors.items())
    rows = [[kind, str(traffic[kind]["count"]), format_bytes(traffic[kind]["bytes"])] for kind in kinds]
    rows.append(["total", str(sum(traffic[kind]["count"] for kind in kinds)), format_bytes(total_bytes)])
    label = f"One step communicated {format_bytes(total_bytes)}"
    if predicted:
        expected = expected_traffic(predicted, traffic)
        colors |= _colors(_sort_kinds(expected, COLLECTIVE_KINDS))
        bars.append(("predicted", expected))
        rows.append(["predicted", "", format_bytes(sum(expected.values()))])
        label += f"; {format_bytes(sum(expected.values()))} were predicted"
    if paper:
        bars.append((f"ZeRO paper: {escape(paper['formula'])}", {"paper": paper["bytes"]}))
        colors |= _colors(["paper"])
        rows.append([f"ZeRO paper: {paper['formula']}", "", format_bytes(paper["bytes"])])
        label += f"; the ZeRO paper counts {format_bytes(paper['bytes'])}"
    return Chart("traffic", f"{label}.", stacked_bars(bars, colors), ["collective", "count", "bytes"], rows, legend)
