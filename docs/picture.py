"""Draw the terminal view of a finished run, for the README: python docs/picture.py runs/tiny docs/train.svg."""

import json
import sys
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

from rich.console import Console

from zeroshard.train.live_view import LiveView, render_panel
from zeroshard.train.metrics import StepMetrics
from zeroshard.train.run_view import RunProgress


def main() -> None:
    """Read what the run wrote and draw it."""
    run, target = map(Path, sys.argv[1:])
    record = json.loads((run / "run.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [StepMetrics(**line) for line in lines if "loss" in line]
    shares = [step.communication for step in steps if step.communication is not None]
    last = StepMetrics(**{**vars(steps[-1]), "communication": shares[-1]})
    evaluation = next(line for line in reversed(lines) if "validation_loss" in line)
    held = {
        kind: record["memory_by_rank"][0][kind]["peak_bytes"]
        for kind, plain in record["ddp_state_bytes"].items()
        if plain
    }
    save_live_view_svg(
        [*steps[:-1], last],
        path=target,
        header=[
            ("model", f"{record['model']['description']}, {record['model']['parameters']:,} parameters"),
            ("ranks", f"{record['ranks']} on {record['device']} over {record['backend']}"),
            ("ZeRO", f"stage {record['stage']}, {record['precision']}"),
        ],
        held_bytes=held,
        ddp_bytes={kind: plain for kind, plain in record["ddp_state_bytes"].items() if plain},
        evaluation=(evaluation["step"], evaluation["validation_loss"]),
    )


def save_live_view_svg(
    metrics: Sequence[StepMetrics],
    *,
    path: Path,
    total_steps: int | None = None,
    header: Sequence[tuple[str, str]] = (),
    held_bytes: Mapping[str, int] | None = None,
    ddp_bytes: Mapping[str, int] | None = None,
    evaluation: tuple[int, float] | None = None,
    columns: int = 100,
) -> None:
    """Draw the live view after the last of `metrics` as a self-contained SVG."""
    if not metrics:
        raise ValueError("metrics is empty: pass the metrics of at least one step")
    progress = RunProgress(
        total_steps or metrics[-1].step,
        last_evaluation=evaluation,
        held_bytes=held_bytes or {},
        ddp_bytes=ddp_bytes or {},
    )
    for step_metrics in metrics:
        progress = progress.with_step(step_metrics)
    console = Console(record=True, file=StringIO(), width=columns, force_terminal=True, color_system="truecolor")
    LiveView(console, total_steps=progress.total_steps, start_step=0).show_header([*header, ("", "")])
    console.print(render_panel(progress, 0.0, columns))
    console.save_svg(str(path), title="zeroshard train", code_format=_SVG_TEMPLATE)


# Template for rich's SVG export; rich's own template loads an external font.
_SVG_TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px Menlo, Consolas, "DejaVu Sans Mono", monospace }}
.{unique_id}-title {{ font: bold 18px sans-serif }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g clip-path="url(#{unique_id}-clip-terminal)" transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


if __name__ == "__main__":
    main()
