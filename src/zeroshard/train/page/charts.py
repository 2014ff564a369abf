"""Charts: the pictures of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from zeroshard.memory.report import size
from zeroshard.page.chart import Chart, axis, bar, bars, bytes_axis, frame, line, phases
from zeroshard.train.page.series import Record, series, short, smooth, thin

STATES = ("parameters", "gradients", "optimizer states", "master weights")  # in the order they are stacked
WORKING = ("gathered", "autograd", "buckets", "step", "activations", "staging")
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "activation gather")
BARS = 8  # most ranks that are drawn one by one


# ------------------------------------------------------------------------------------------------ parts of a figure


def colour(kind: str) -> str:
    """Name the custom property that holds the colour of a kind of state or of a collective."""
    return f"var(--{kind.replace(' ', '-')})" if kind in (*STATES, *WORKING, *COLLECTIVES) else "var(--other)"


def _ordered(kinds: Iterable[str], order: Sequence[str]) -> list[str]:
    """Sort known kinds as ``order`` has them, and the others after them by name."""
    return sorted(set(kinds), key=lambda kind: (order.index(kind) if kind in order else len(order), kind))


def _steps(x: Sequence[int], **options: Any) -> Record:
    options |= {"dtick": 1} if x and x[-1] - x[0] < 6 else {}  # there is no step 1.5
    return axis("step", tickformat=",d", unifiedhovertitle={"text": "step %{x}"}, **options)


def _kind(names: Sequence[str], values: Sequence[float], kind: str, opacity: float | Sequence[float] = 1.0) -> Record:
    return bar(names, values, kind, colour(kind), opacity)


def _pick(count: int, rows: int = 20) -> list[int]:
    """Choose about ``rows`` indices spread evenly over ``count``, both ends among them."""
    return sorted({round(row * (count - 1) / max(1, rows - 1)) for row in range(min(rows, count))})


# ------------------------------------------------------------------------------------------------ lines over the steps


def loss(steps: Sequence[Record], evaluations: Sequence[tuple[int, float]]) -> Chart | None:
    """Draw the training loss, light as it was and strong as smoothed, and the held-out loss as points."""
    x, y = series(steps, "loss")
    if not x and not evaluations:
        return None
    kept, smoothed, data, legend = thin(y), smooth(y), [], []
    if x:
        at, light, strong = [x[i] for i in kept], [y[i] for i in kept], [smoothed[i] for i in kept]
        data = [
            line(at, light, "each step", "var(--training-light)", 1.2),
            line(at, strong, "smoothed", "var(--training)", 2.5),
        ]
        legend = [("training, each step", "var(--training-light)"), ("training, smoothed", "var(--training)")]
    if evaluations:
        points = line([at for at, _ in evaluations], [value for _, value in evaluations], "held-out", "var(--held)", 1)
        marker = {"color": "var(--held)", "size": 9, "symbol": "diamond", "line": {"color": "var(--card)", "width": 1}}
        data.append(points | {"mode": "markers", "marker": marker})
        legend.append(("held-out", "var(--held)"))
    measured, rows = dict(evaluations), []
    losses = dict(zip(x, y, strict=True))
    for step in sorted({x[i] for i in _pick(len(x))} | measured.keys()):
        rows.append([f"{step:,}", *(f"{of[step]:.3f}" if step in of else "" for of in (losses, measured))])
        rows[-1].append(f"{math.exp(min(measured[step], 700)):,.2f}" if step in measured else "")
    label = f"Training loss, from {short(y[0])} at step {x[0]} to {short(y[-1])} at step {x[-1]}." if x else ""
    if measured:
        label += f" Held-out loss, {len(measured)} times measured, at best {short(min(measured.values()))}."
    layout = frame(380, _steps(x), axis("loss (nats per token)"), hovermode="x unified")
    columns = ["step", "training loss", "held-out loss", "held-out perplexity"]
    return Chart("loss", label.strip(), {"data": data, "layout": layout}, columns, rows, legend)


def curve(steps: Sequence[Record], key: str, title: str, *, smoothed: bool = False, form: str = "~g") -> Chart | None:
    """Draw one number of every step, small; ``form`` is how d3 writes it on the axis."""
    x, y = series(steps, key)
    if not x:
        return None
    kept = thin(y)
    at, hue = [x[i] for i in kept], "var(--training-light)" if smoothed else "var(--training)"
    data = [line(at, [y[i] for i in kept], "each step", hue, 1.2 if smoothed else 2)]
    if smoothed:
        calm = smooth(y)
        data.append(line(at, [calm[i] for i in kept], "smoothed", "var(--training)", 2.2))
    layout = frame(230, _steps(x, nticks=6), axis("", tickformat=form, nticks=5, rangemode="tozero"))
    layout["hovermode"] = "x unified"
    write = "{:.1%}".format if form.endswith("%") else short
    label = f"{title}, from {write(y[0])} at step {x[0]} to {write(y[-1])} at step {x[-1]}."
    rows = [[f"{x[i]:,}", write(y[i])] for i in _pick(len(x))]
    name = key.replace("_", "-")
    return Chart(name, label, {"data": data, "layout": layout}, ["step", title.lower()], rows)


# ------------------------------------------------------------------------------------------------ memory


def held(rank: Record) -> dict[str, int]:
    """Tell the bytes of each model state on a rank at rest. One that is freed between steps counts with its peak.

    >>> held({"parameters": {"now": 5, "peak": 9}, "gradients": {"now": 0, "peak": 5}, "step": {"now": 0, "peak": 7}})
    {'parameters': 5, 'gradients': 5}
    """
    return {kind: rank[kind]["now"] or rank[kind]["peak"] for kind in STATES if rank.get(kind)}


def states(memory: Sequence[Record], plain: Record | None) -> Chart | None:
    """Draw the model states of every rank, stacked, under what plain data parallelism holds on each."""
    if not memory:
        return None
    ranks = [(f"rank {index}", held(rank)) for index, rank in enumerate(memory)]
    totals = [sum(of.values()) for _, of in ranks]
    first = [("plain data parallelism", plain)] if plain else []
    shown = first + ranks
    if len(ranks) > BARS and max(totals) == min(totals):
        shown = [*first, (f"each of {len(ranks)} ranks", ranks[0][1])]
    elif len(ranks) > BARS:
        most, least = ranks[totals.index(max(totals))], ranks[totals.index(min(totals))]
        shown = [*first, (f"the most, {most[0]}", most[1]), (f"the least, {least[0]}", least[1])]
    kinds = [kind for kind in STATES if any(of.get(kind) for _, of in shown)]
    names, sums = [name for name, _ in shown], [sum(of.values()) for _, of in shown]
    fade = [0.45 if plain and index == 0 else 1.0 for index in range(len(shown))]
    data = [_kind(names, [of.get(kind, 0) for _, of in shown], kind, opacity=fade) for kind in kinds]
    label = f"Model states per rank ({len(ranks)} in all), at most {size(max(totals))}"
    label += f"; plain data parallelism holds {size(sum(plain.values()))} on every rank." if plain else "."
    rows = [
        [name, *(size(of.get(kind, 0)) for kind in kinds), size(sum(of.get(kind, 0) for kind in kinds))]
        for name, of in first + ranks
    ]
    figure = {"data": data, "layout": bars(names, sums)}
    return Chart("states", label, figure, ["", *kinds, "together"], rows, [(kind, colour(kind)) for kind in kinds])


def working(memory: Sequence[Record]) -> Chart | None:
    """Draw the most that any rank held of each working buffer, each for itself: they do not peak at the same time."""
    kinds = _ordered([kind for rank in memory for kind in rank if kind not in (*STATES, "total")], WORKING)
    peaks = {kind: max((rank[kind]["peak"] for rank in memory if rank.get(kind)), default=0) for kind in kinds}
    kinds = [kind for kind in kinds if peaks[kind]]
    if not kinds:
        return None
    data = [_kind([escape(kind)], [peaks[kind]], kind) for kind in kinds]
    rows = [
        [f"rank {index}", *(size(rank[kind]["peak"]) if rank.get(kind) else "" for kind in (*kinds, "total"))]
        for index, rank in enumerate(memory)
    ]
    figure = {"data": data, "layout": bars([escape(kind) for kind in kinds], [peaks[kind] for kind in kinds])}
    label = "Working buffers at their peak: " + ", ".join(f"{kind} {size(peaks[kind])}" for kind in kinds) + "."
    return Chart("working", label, figure, ["peak of", *kinds, "everything at once"], rows)


def timeline(record: Record | None) -> Chart | None:
    """Draw what rank 0 held over one step, stacked by kind, with the phases marked."""
    if not record:
        return None
    every = _ordered(record.get("kinds") or {}, (*STATES, *WORKING))
    kinds = [kind for kind in every if any(record["kinds"][kind])]
    if not kinds:
        return None
    total = [sum(values) for values in zip(*(record["kinds"][kind] for kind in kinds), strict=True)]
    kept = thin(total)
    at = [record["seconds"][i] * 1000 for i in kept]
    data = []
    for kind in kinds:
        area = line(at, [record["kinds"][kind][i] for i in kept], escape(kind), colour(kind), 0)
        area["line"]["shape"] = "hv"  # memory is taken and given back at once
        data.append(area | {"stackgroup": "held", "fillcolor": colour(kind), "hovertemplate": "%{y:.3~s}B"})
    legend = [(kind, colour(kind)) for kind in kinds]
    if record.get("allocated"):
        whole = line(at, [record["allocated"][i] for i in kept], "allocated in all", "var(--text)", 1.5)
        whole["line"]["dash"] = "dot"
        data.append(whole | {"hovertemplate": "%{y:.3~s}B"})
        legend.append(("allocated in all, activations included", "var(--text)"))
    xaxis = axis("milliseconds since the step began", range=[at[0], at[-1]])
    xaxis["unifiedhovertitle"] = {"text": "%{x:.3~g} ms"}
    layout = frame(380, xaxis, bytes_axis("bytes held"))
    layout |= {"hovermode": "x unified", **phases(record.get("phases") or [], at[-1])}
    layout["margin"] = {"l": 8, "r": 16, "t": 40, "b": 8}
    peak = total.index(max(total))
    label = f"Memory of rank 0 over one step: {size(total[0])} at its start, at most {size(total[peak])} after "
    label += f"{record['seconds'][peak] * 1000:.3g} ms."
    rows = [[kind, *(size(get(record["kinds"][kind])) for get in (lambda of: of[0], max))] for kind in kinds]
    rows = [[*row, size(record["kinds"][row[0]][peak])] for row in rows]
    rows.append(["together", size(total[0]), size(total[peak]), size(total[peak])])
    columns = ["", "at the start", "at most", "at the fullest moment"]
    return Chart("timeline", label, {"data": data, "layout": layout}, columns, rows, legend)


# ------------------------------------------------------------------------------------------------ communication


def communication(traffic: Record, paper: Record | None) -> Chart | None:
    """Draw the bytes of one step by collective, against the paper's volume."""
    kinds = _ordered([kind for kind in traffic if traffic[kind]["bytes"]], COLLECTIVES)
    if not kinds:
        return None
    ours = sum(traffic[kind]["bytes"] for kind in kinds)
    names, sums = ["this run"], [ours]
    data = [_kind(["this run"], [traffic[kind]["bytes"]], kind) for kind in kinds]
    legend = [(kind, colour(kind)) for kind in kinds]
    rows = [[kind, str(traffic[kind]["count"]), size(traffic[kind]["bytes"])] for kind in kinds]
    rows.append(["together", str(sum(traffic[kind]["count"] for kind in kinds)), size(ours)])
    label = f"One step communicated {size(ours)}"
    if paper:
        names.append(f"the paper: {escape(paper['formula'])}")
        sums.append(paper["bytes"])
        data.append(_kind(names[1:], sums[1:], "paper"))
        rows.append([f"the paper: {paper['formula']}", "", size(paper["bytes"])])
        label += f", where the paper counts {size(paper['bytes'])}"
    figure = {"data": data, "layout": bars(names, sums)}
    return Chart("traffic", label + ".", figure, ["collective", "count", "bytes"], rows, legend)
