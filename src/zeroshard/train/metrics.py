"""StepMetrics and MetricsFile: the metrics of one step, and the file that a run writes them to."""

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

_TENSORBOARD_TAGS = {  # field of StepMetrics → tag in TensorBoard
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
    """The metrics of one step.

    >>> metrics = StepMetrics(step=1, loss=5.8, lr=1e-3, grad_norm=None, tokens=4096, tokens_per_s=2e4, seconds=0.2)
    >>> metrics.mfu is None
    True
    """

    step: int
    """Steps done, including this one: the first is 1."""
    loss: float
    lr: float
    grad_norm: float | None
    """Norm of the gradient before clipping; None if not computed."""
    tokens: int
    """Tokens trained on so far, on all ranks."""
    tokens_per_s: float
    """Tokens per second of all ranks together."""
    seconds: float
    """Seconds since the run started."""
    communication: float | None = None
    """Fraction of the step's time spent waiting for communication, 0 to 1."""
    tflops: float | None = None
    """10¹² floating-point operations per second and device."""
    mfu: float | None = None
    """`tflops` as a fraction of the device's peak, 0 to 1."""


class MetricsFile:
    """Writes a run's metrics to `metrics.jsonl`, one JSON object per step; optionally also as TensorBoard events.

    A line has the fields of `StepMetrics`; an evaluation has its own line, {"step": …, "validation_loss": …}. JSON has
    no NaN: values that are not finite are written as the strings "nan", "inf" and "-inf", which `float()` reads. null
    means that a value was not measured.

    Each line is written in one system call, so a crash truncates at most the last line. To resume a run, pass
    `resume_step`, the step of the checkpoint (0 to start over): a truncated last line and all lines of later steps are
    dropped, in a new file that then replaces the old one. Without it, a file that already has lines is an error.

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
        writer = (
            None if tensorboard is None else _import_writer()
        )  # may be missing: import it before the file is changed
        if resume_step is not None and path.exists():
            _truncate_after(path, resume_step)
        elif path.exists() and path.stat().st_size:
            raise FileExistsError(
                f"{path} holds the metrics of another run already: resume that run, or start in a new directory"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", newline="\n")
        purge_step = (
            None if resume_step is None else resume_step + 1
        )  # TensorBoard hides older events from this step on
        self._tensorboard = None if writer is None else writer(str(tensorboard), purge_step=purge_step)

    def write(self, metrics: StepMetrics) -> None:
        """Append the metrics of a step."""
        self._append(asdict(metrics))

    def write_evaluation(self, step: int, validation_loss: float) -> None:
        """Append the validation loss after `step` steps."""
        self._append({"step": step, "validation_loss": validation_loss})

    def close(self) -> None:
        """Close the file and the TensorBoard writer."""
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
    """Return a value as strict JSON can represent it."""
    if value is None or isinstance(value, int):
        return value
    number = float(value)  # also converts a tensor with one element
    return number if math.isfinite(number) else str(number)


def _truncate_after(path: Path, step: int) -> None:
    """Drop a truncated last line and the lines of later steps."""
    lines = path.read_bytes().splitlines()
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            is_later = record["step"] > step
        except (ValueError, TypeError, KeyError):  # ValueError: truncated, or not even text
            if number == len(lines):
                break
            raise ValueError(
                f"line {number} of {path} is {line[:80]!r}, but must be a JSON object with a step, as zeroshard writes "
                "them: remove the line, or move the file away"
            ) from None
        if not is_later:
            kept.append(line + b"\n")
    new_path = path.with_name(path.name + ".new")
    with new_path.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())  # before the rename, or a power cut could leave an empty file under the old name
    new_path.replace(path)


def _import_writer() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"TensorBoard events cannot be written without TensorBoard ({error}): pip install 'zeroshard[tensorboard]'"
        ) from error
    return SummaryWriter
