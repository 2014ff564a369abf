"""What docs/evidence.md shows of a section: a sentence with its result, its tables, and charts, all from its record."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.evidence import BASE, CONTROL, COUNTED, FEWER_BYTES, RESULTS
from benchmarks.harness.record import cell
from zeroshard.utils.chart import NUMBERED_COLORS, Chart, Line, Points, as_svg, line_chart

PAGE = "docs/evidence.md"
FOLDER = "docs/evidence"  # of the charts
POINTS = 100  # of a line: means, or the largest, of as many stretches
SHARE = "of FSDP2's"  # a column
Record = Mapping[str, Any]


def path_of(root: Path, name: str) -> Path:
    """Return the file of a section's record."""
    return root / RESULTS / f"{name}.json"


def read_section(root: Path, name: str) -> dict[str, Any] | None:
    """Return the record of a section, None if it was not measured."""
    path = path_of(root, name)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def missing(name: str) -> str:
    """Return what stands in the place of a section that was not measured."""
    return f"Not measured yet. The command is\n\n```\npython -m benchmarks evidence --sections {name}\n```"


def summarize(name: str, record: Record, root: Path) -> str:
    """Return a section's result in words, and its chart."""
    words = SUMMARIES[name](record, root)
    titles = {"kills": "Seconds until the error", "endurance": "What the processes hold"}
    title = "Loss curves" if SUMMARIES[name] is _curves else titles.get(name)
    return f"{words}\n\n![{title}](evidence/{name}.svg)" if title else words


def draw_charts(root: Path) -> dict[str, str]:
    """Return the charts of the sections that were measured, by path."""
    drawn = {}
    for name, draw in CHARTS.items():
        record = read_section(root, name)
        if record is not None:
            drawn[f"{FOLDER}/{name}.svg"] = as_svg(draw(record["results"]), columns=2)
    return drawn


# ------------------------------------------------------------------------------------------------ in words


def differences(losses: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return how far two curves are apart in each step; infinitely, where a loss is not a number."""
    apart = (abs(loss - other) for loss, other in zip(losses, others, strict=True))
    return [value if math.isfinite(value) else math.inf for value in apart]


def _compared_with(results: Sequence[Record]) -> tuple[str, str]:
    """Return the curve with which the others are compared, and the one that must differ."""
    if any(each["variant"] in FEWER_BYTES for each in results):
        names = list(FEWER_BYTES)
        return names[0], names[-1]
    return BASE, CONTROL


def _curves(record: Record, root: Path) -> str:
    found = {each["variant"]: each for each in record["results"] if "losses" in each}
    first, control_name = _compared_with(record["results"])
    base = found.get(first)
    if base is None:
        return f"{first}'s own curve is missing, and so nothing can be compared."
    apart = {name: max(differences(each["losses"], base["losses"])) for name, each in found.items() if name != first}
    control, ours = apart.pop(control_name, None), dict(sorted(apart.items(), key=lambda pair: -pair[1]))
    text = f"{base['steps']:,} steps of a GPT with {base['parameters']:,} parameters. "
    if ours:
        name, largest = next(iter(ours.items()))
        text += f"The largest difference from {first}'s loss, of any curve in any step, is {cell(largest)} ({name})"
    if control is not None:
        text += f"; with a learning rate 1 % higher, {first} itself differs by {cell(control)}"
    failed = [each["variant"] for each in record["results"] if "losses" not in each]
    missing = f" No curve: {', '.join(failed)}." if failed else ""
    return f"{text}. {first}'s loss at the end is {cell(fmean(base['losses'][-100:]))}.{missing}"


def _rows(record: Record, table: str) -> list[dict[str, Any]]:
    found = record["tables"][table]
    return [dict(zip(found["heads"], row, strict=True)) for row in found["rows"]]


def _titan(record: Record, root: Path) -> str:
    rows, texts = _rows(record, "llama"), []
    for kind in ("eager", "compiled"):
        by = {row["variant"]: row for row in rows if row[""] == kind and not row["note"]}
        if "FSDP2" in by and "zeroshard 3" in by:
            ours, theirs = by["zeroshard 3"], by["FSDP2"]
            memory = f"{cell(ours['reserved GiB'])} GiB reserved where FSDP2 reserves {cell(theirs['reserved GiB'])}"
            texts.append(f"{kind.capitalize()}: {cell(ours[SHARE])} of FSDP2's time, {memory}.")
    return f"**No wire.** {' '.join(texts) or 'No variant ran.'}"


def _predictions(record: Record, root: Path) -> str:
    own = _rows(record, "own")[0]
    predicted = f"{cell(own['tokens/s'])} tokens/s and {cell(own['reserved GiB'])} GiB reserved"
    text = f"One rank of 8 of the Llama above, eager, on an H200 without a wire, was predicted at {predicted}"
    measured = read_section(root, "titan")
    if measured is None:
        return f"{text}; it is not measured yet."
    found = [row for row in _rows(measured, "llama") if (row["variant"], row[""]) == ("zeroshard 3", "eager")]
    if not found or found[0]["tokens/s"] is None:
        return f"{text}; the run failed."
    return f"{text}; measured: {cell(found[0]['tokens/s'])} tokens/s and {cell(found[0]['reserved GiB'])} GiB."


def _kills(record: Record, root: Path) -> str:
    kills = [each for each in record["results"] if "died_in" in each]
    named, same = sum(not each["error"] for each in kills), sum(each["same_bits"] for each in kills)
    seconds = [each["seconds"] for each in kills if each["seconds"] is not None]
    longest = f", after {cell(max(seconds))} s at the most" if seconds else ""
    text = f"{len(kills)} kills. The other rank got an error in {len(seconds)}{longest}; in {named} it was "
    text += f"`RanksDisagreeError` with the number of the killed rank. {same} times the next start found a checkpoint "
    lost = max((each["lost_steps"] or 0 for each in kills), default=0)
    return f"{text}and went on with the same bits; at most {lost} {'step was' if lost == 1 else 'steps were'} lost."


def _endurance(record: Record, root: Path) -> str:
    texts = []
    for each in record["results"]:
        if "samples" in each:
            growth = (f"{name} {_signed(_growth(each['samples'], key))}" for key, name in COUNTED.items())
            texts.append(f"{each['kind']}, {each['steps']:,} steps: from half way to the end, {', '.join(growth)}.")
        else:
            texts.append(f"{each['kind']}: failed.")
    return "\n".join(f"- {text}" for text in texts)


def _growth(ranks: Sequence[Sequence[dict[str, float]]], key: str) -> float:
    """Return by how much a count has grown in the second half, on the rank where it is most.

    Compared are the medians of a tenth of the samples: threads, for one, come and go.
    """
    grown = []
    for samples in ranks:
        values, tenth, half = [each[key] for each in samples], max(1, len(samples) // 10), len(samples) // 2
        grown.append(median(values[-tenth:]) - median(values[half : half + tenth]))
    return max(grown)


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else '−' if value < 0 else '±'}{cell(abs(value))}"


SUMMARIES: dict[str, Callable[[Record, Path], str]] = {
    "curves": _curves,
    "fewer_bytes": _curves,
    "titan": _titan,
    "predictions": _predictions,
    "kills": _kills,
    "endurance": _endurance,
}

# ------------------------------------------------------------------------------------------------ charts


def _thin(values: Sequence[float], reduce: Callable[[Sequence[float]], float]) -> Points:
    """Return points with one value for each stretch of steps."""
    size = max(1, len(values) // POINTS)
    return [(begin + 1, reduce(values[begin : begin + size])) for begin in range(0, len(values), size)]


def _draw(title: str, x: str, lines: Mapping[str, Points]) -> Chart:
    """Return a chart of lines; one that is covered by others shows at its edges."""
    drawn = []
    for number, (name, points) in enumerate(lines.items()):
        finite = [point for point in points if all(map(math.isfinite, point))]
        color = NUMBERED_COLORS[number % len(NUMBERED_COLORS)]
        drawn.append(Line(name, finite or [(0.0, 0.0)], color, width=1.5 + 0.8 * (len(lines) - 1 - number)))
    return line_chart(title, drawn, x_title=x)


def _draw_curves(results: Sequence[Record]) -> list[Chart]:
    losses = {each["variant"]: each["losses"] for each in results if "losses" in each}
    curves = {name: _thin(values, fmean) for name, values in losses.items()}
    first, _ = _compared_with(results)
    base = losses.get(first, [])
    apart = {name: _thin(differences(values, base), max) for name, values in losses.items() if base}
    floor = min((y for line in apart.values() for _, y in line if y > 0), default=1.0)
    powers = {name: [(x, math.log10(max(y, floor))) for x, y in line] for name, line in apart.items()}
    title = f"Difference from {first}'s loss, as a power of ten"
    return [_draw("Loss, mean of both ranks", "step", curves), _draw(title, "step", powers)]


def _draw_kills(results: Sequence[Record]) -> list[Chart]:
    lines: dict[str, Points] = {}
    for backend in ("gloo", "nccl"):
        seconds = sorted(each["seconds"] for each in results if each["backend"] == backend and each.get("seconds"))
        if seconds:
            shares = [(value, 100 * (index + 1) / len(seconds)) for index, value in enumerate(seconds)]
            lines[backend] = [(0.0, 0.0), *shares]
    return [_draw("Kills after which the other rank has an error, in %", "seconds after the kill", lines)]


def _draw_endurance(results: Sequence[Record]) -> list[Chart]:
    kinds = [each for each in results if "samples" in each]
    panels = []
    for key in ("reserved", "resident", "files", "threads"):
        lines = {
            f"{each['kind']}, rank {rank}": [(sample["step"], sample[key]) for sample in samples]
            for each in kinds
            for rank, samples in enumerate(each["samples"])
        }
        panels.append(_draw(COUNTED[key], "step", lines))
    return panels


CHARTS: dict[str, Callable[[Sequence[Record]], list[Chart]]] = {
    "curves": _draw_curves,
    "fewer_bytes": _draw_curves,
    "kills": _draw_kills,
    "endurance": _draw_endurance,
}
