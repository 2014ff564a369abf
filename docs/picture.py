"""Draw the terminal view of a finished run, for the README: python docs/picture.py runs/tiny docs/train.svg."""

import json
import sys
from pathlib import Path

from zeroshard.train.live_view import save_live_view_svg
from zeroshard.train.metrics import StepMetrics


def main() -> None:
    """Read what the run wrote and draw it."""
    run, target = map(Path, sys.argv[1:])
    record = json.loads((run / "run.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [StepMetrics(**line) for line in lines if "loss" in line]
    shares = [step.communication for step in steps if step.communication is not None]
    last = StepMetrics(**{**vars(steps[-1]), "communication": shares[-1]})
    evaluation = next(line for line in reversed(lines) if "validation_loss" in line)
    held = {kind: record["memory"][0][kind]["peak"] for kind, plain in record["plain"].items() if plain}
    save_live_view_svg(
        [*steps[:-1], last],
        path=target,
        header=[
            ("model", f"{record['model']['description']}, {record['model']['parameters']:,} parameters"),
            ("ranks", f"{record['ranks']} on {record['versions']['device']} over {record['backend']}"),
            ("ZeRO", f"stage {record['stage']}, {record['precision']}"),
        ],
        held_bytes=held,
        ddp_bytes={kind: plain for kind, plain in record["plain"].items() if plain},
        evaluation=(evaluation["step"], evaluation["validation_loss"]),
    )


if __name__ == "__main__":
    main()
