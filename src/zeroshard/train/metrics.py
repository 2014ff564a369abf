"""Metrics: the figures of one step, and the file a run leaves them in."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_TENSORBOARD_TAGS = {  # field of Metrics → tag in TensorBoard
    "loss": "loss/training",
    "validation_loss": "loss/held-out",
    "lr": "optimizer/learning rate",
    "grad_norm": "optimizer/gradient norm",
    "tokens_per_s": "speed/tokens per second",
    "communication": "speed/share of time in communication",
    "tflops": "speed/TFLOPS per device",
    "mfu": "speed/MFU",
}


@dataclass(frozen=True)
class StepMetrics:
    """The figures of one step.

    >>> metrics = StepMetrics(step=1, loss=5.8, lr=1e-3, grad_norm=None, tokens=4096, tokens_per_s=2e4, seconds=0.2)
    >>> metrics.mfu is None
    True
    """

    step: int
    """Steps done, this one included: the first is 1."""
    loss: float
    lr: float
    grad_norm: float | None
    """Norm of the gradient before clipping; None when not taken."""
    tokens: int
    """Tokens trained on so far, on all ranks."""
    tokens_per_s: float
    """Of all ranks together."""
    seconds: float
    """Since the run began."""
    communication: float | None = None
    """Share of the step's time spent waiting for communication, 0 to 1."""
    tflops: float | None = None
    """10¹² floating-point operations a second, per device."""
    mfu: float | None = None
    """Share of the device's peak that `tflops` is, 0 to 1."""


class MetricsFile:
    """A run's metrics as lines of JSON, one object a step: `metrics.jsonl`; on request as TensorBoard events too.

    A line has the fields of `Metrics`; an evaluation has a line of its own, {"step": …, "validation_loss": …}. JSON has
    no NaN: figures that are not finite are written as the strings "nan", "inf" and "-inf", which `float()` reads, while
    null stands for a figure that was not measured.

    Each line reaches the system in one write, so a crash leaves at most one cut line, the last. To continue a run give
    `resume_step`, the step of the checkpoint it resumes from (0 to start over): a cut last line and all lines of later
    steps are dropped, in a new file that then takes the old one's place. Without it, a file that has lines already is
    an error.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> with MetricsFile(path) as file:
    ...     file.write_evaluation(20, 5.901)
    ...     file.write_evaluation(40, float("nan"))
    >>> print(path.read_text(), end="")
    {"step": 20, "validation_loss": 5.901}
    {"step": 40, "validation_loss": "nan"}
    >>> MetricsFile(path, resume_step=20).close()
    >>> print(path.read_text(), end="")
    {"step": 20, "validation_loss": 5.901}
    """

    def __init__(self, path: Path, *, tensorboard: Path | None = None, resume_step: int | None = None) -> None:
        path = Path(path)
        writer = None if tensorboard is None else _import_writer()  # may be missing, so before the file is touched
        if resume_step is not None and path.exists():
            _truncate_after(path, resume_step)
        elif path.exists() and path.stat().st_size:
            raise FileExistsError(
                f"{path} holds the metrics of another run already: resume that run, or start in a new directory"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", newline="\n")
        purge = None if resume_step is None else resume_step + 1  # TensorBoard hides its former events from there on
        self._tensorboard = None if writer is None else writer(str(tensorboard), purge_step=purge)

    def write(self, metrics: StepMetrics) -> None:
        """Append the figures of a step."""
        self._append(asdict(metrics))

    def write_evaluation(self, step: int, validation_loss: float) -> None:
        """Append the held-out loss after `step` steps."""
        self._append({"step": step, "validation_loss": validation_loss})

    def close(self) -> None:
        """Close the file, and TensorBoard's."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _append(self, record: dict[str, Any]) -> None:
        strict = {key: _strict_json_value(value) for key, value in record.items()}
        self._file.write(json.dumps(strict, allow_nan=False) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for key, tag in _TENSORBOARD_TAGS.items():
                if record.get(key) is not None:
                    self._tensorboard.add_scalar(tag, record[key], record["step"])


def _strict_json_value(value: float | None) -> float | str | None:
    """A figure as strict JSON can hold it."""
    if value is None or isinstance(value, int):
        return value
    number = float(value)  # also of a tensor with one element
    return number if math.isfinite(number) else str(number)


def _truncate_after(path: Path, step: int) -> None:
    """Drop a cut last line and the lines of later steps."""
    lines = path.read_bytes().splitlines()
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            late = record["step"] > step
        except (ValueError, TypeError, KeyError):  # ValueError: cut, or not even text
            if number == len(lines):
                break
            raise ValueError(
                f"line {number} of {path} is {line[:80]!r}, but must be a JSON object with a step, as zeroshard writes "
                "them: remove the line, or move the file away"
            ) from None
        if not late:
            kept.append(line + b"\n")
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())  # before the rename, or a power cut could leave an empty file under the old name
    new.replace(path)


def _import_writer() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"TensorBoard events cannot be written without TensorBoard ({error}): pip install 'zeroshard[tensorboard]'"
        ) from error
    return SummaryWriter
