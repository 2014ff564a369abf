"""The command `zeroshard report`: write the report of a run again from its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class ReportOptions:
    """Write report.html and charts/*.svg of a run, finished or still running."""

    run: Annotated[Path, tyro.conf.Positional]
    """directory of the run"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status."""
    options = tyro.cli(ReportOptions, args=list(argv), prog="zeroshard report")
    from zeroshard.train import write_html_report

    print(write_html_report(options.run))
    return 0
