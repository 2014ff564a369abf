"""Trackers: services that show the metrics of many runs. ``--tracker`` names them; rank 0 logs to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

TrackerName = Literal["tensorboard", "wandb", "trackio"]
PROJECT = "zeroshard"  # in which a run is shown


class Tracker(Protocol):
    """What a run needs of a service: ``wandb.Run`` and ``trackio.Run`` are trackers as they are."""

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Show metrics after a step."""

    def finish(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Writes TensorBoard events; those of later steps, from before a resume, are hidden.

    >>> import tempfile
    >>> tracker = TensorBoard(Path(tempfile.mkdtemp()), start_step=0)
    >>> tracker.log({"loss": 5.8}, step=1)
    >>> tracker.finish()
    """

    def __init__(self, directory: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=start_step + 1)

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Write one point for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Write what is left, and close the file."""
        self._writer.close()


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raise if the package of a tracker is missing.

    >>> check_trackers([])
    """
    for name in names:
        if find_spec(name) is None:
            raise ImportError(f"--tracker {name}: not installed, run pip install {name}, or omit the option")


def start_tracker(name: TrackerName, record: Mapping[str, Any], directory: Path, start_step: int) -> Tracker:
    """Start a tracker for the run of ``record``, or continue that of the earlier part: its ``id`` names the run."""
    if name == "tensorboard":
        return TensorBoard(directory / name, start_step)
    options = {"project": PROJECT, "name": f"{record['name']}-{record['id'][:8]}", "config": record["options"]}
    if name == "wandb":
        options |= {"id": record["id"], "dir": str(directory)}
    tracker: Tracker = import_module(name).init(**options, resume="allow")
    return tracker
