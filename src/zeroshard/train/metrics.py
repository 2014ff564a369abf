"""The numbers of a step: all-reduced over the ranks, as FLOPS and MFU, and written to a file."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.train.options import TrackerName
from zeroshard.utils.atomic_file import write_atomic


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
    """Writes a run's metrics to `metrics.jsonl`, one JSON object per step, and to trackers.

    A line has the fields of `StepMetrics`; an evaluation has its own line, {"step": …, "validation_loss": …}. JSON has
    no NaN: values that are not finite are written as the strings "nan", "inf" and "-inf", which `float()` reads. null
    means that a value was not measured.

    Each line is written in one system call, so a crash truncates at most the last line. What a resumed run has recorded
    after `start_step`, the step of its checkpoint, is dropped, in a new file that then replaces the old one.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> with MetricsFile(path, start_step=0) as file:
    ...     file.write_evaluation(20, 5.901)
    ...     file.write_evaluation(40, float("nan"))
    >>> print(path.read_text(), end="")
    {"step": 20, "validation_loss": 5.901}
    {"step": 40, "validation_loss": "nan"}
    >>> MetricsFile(path, start_step=20).close()
    >>> read_metrics(path)
    [{'step': 20, 'validation_loss': 5.901}]
    """

    def __init__(self, path: Path, start_step: int, trackers: Sequence[Tracker] = ()) -> None:
        kept = [json.dumps(entry) + "\n" for entry in read_metrics(path) if entry["step"] <= start_step > 0]
        write_atomic(path, "".join(kept).encode())
        self._file = path.open("a", encoding="utf-8", newline="\n")
        self._trackers = trackers

    def write(self, metrics: StepMetrics) -> None:
        """Append the metrics of a step."""
        self._append(**asdict(metrics))

    def write_evaluation(self, step: int, validation_loss: float) -> None:
        """Append the validation loss after `step` steps."""
        self._append(step=step, validation_loss=validation_loss)

    def close(self) -> None:
        """Close the file and finish the trackers."""
        self._file.close()
        for tracker in self._trackers:
            tracker.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, step: int, **values: float | None) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        strict = {name: value if math.isfinite(value) else str(value) for name, value in known.items()}
        self._file.write(json.dumps({"step": step, **values, **strict}, allow_nan=False) + "\n")
        self._file.flush()
        for tracker in self._trackers:
            tracker.log(known, step=step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of `metrics.jsonl`, without those that a crash has cut. No file means no lines."""
    entries = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries.append(entry)
    return entries


# ------------------------------------------------------------------------------------------ trackers


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
    options = {"project": "zeroshard", "name": f"{record['name']}-{record['id'][:8]}", "config": record["options"]}
    if name == "wandb":
        options |= {"id": record["id"], "dir": str(directory)}
    tracker: Tracker = import_module(name).init(**options, resume="allow")
    return tracker


# ------------------------------------------------------------------------------------------ reduced over the ranks


@dataclass(frozen=True)
class StepStats:
    """Numbers of a step that are the same on all ranks, except its duration."""

    step: int
    loss: float
    """Mean over the ranks."""
    grad_norm: float
    has_stop_request: bool
    """Whether any rank received a stop signal."""
    seconds: float
    """Duration of the step on this rank; on a GPU, by the device's clock."""


class StepStatsReducer:
    """All-reduces loss, norm and stop request in one small collective, so that all ranks decide the same.

    On a GPU the result is read one step later, when the device has finished it anyway, so the host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: deque[tuple[int, torch.Tensor, _DeviceTimestamp, _DeviceTimestamp]] = deque()
        self._step_start = _DeviceTimestamp(device)

    def restart_timer(self) -> None:
        """Start timing the next step now, to exclude preceding work such as an evaluation."""
        self._step_start = _DeviceTimestamp(self._device)

    def start_reduce(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, stop_requested: bool) -> None:
        """Start the all-reduce of this rank's numbers for a step that is in progress."""
        stop = torch.full((), float(stop_requested), device=self._device)
        values = torch.stack([loss.detach().float(), grad_norm.float(), stop])
        dist.all_reduce(values)
        values /= dist.get_world_size()
        if self._device.type == "cuda":
            values = torch.empty(3, pin_memory=True, device="cpu").copy_(values, non_blocking=True)
        now = _DeviceTimestamp(self._device)
        self._pending.append((step, values, self._step_start, now))
        self._step_start = now

    def read_ready(self, flush: bool = False) -> Iterator[StepStats]:
        """Yield the steps whose numbers are ready: on a GPU all but the last, unless ``flush``."""
        num_pending = 1 if self._device.type == "cuda" and not flush else 0
        while len(self._pending) > num_pending:
            step, values, start, end = self._pending.popleft()
            seconds = end.seconds_since(start)
            loss, norm, stop = values.tolist()
            yield StepStats(step, loss, norm, stop > 0, seconds)


class _DeviceTimestamp:
    """The time at which the device reaches this point of the stream."""

    def __init__(self, device: torch.device) -> None:
        self._host_seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def seconds_since(self, start: _DeviceTimestamp) -> float:
        """Return the seconds since an earlier timestamp. Waits until the device reaches this one."""
        if self._event is None or start._event is None:
            return self._host_seconds - start._host_seconds
        self._event.synchronize()
        return float(start._event.elapsed_time(self._event)) / 1e3


# ------------------------------------------------------------------------------------------ FLOPS


def count_matmul_params(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters that every token is multiplied with: (trained, frozen).

    Embedding tables that are only looked up do not count. In a mixture of experts all experts count, although a token
    uses only a few.

    >>> count_matmul_params(nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)))
    (800, 0)
    """
    counted = {
        parameter
        for module in model.modules()
        if not isinstance(module, nn.Embedding)  # a table that is tied to the head is also the head's
        for parameter in module.parameters(recurse=False)
    }
    trained = sum(parameter.numel() for parameter in counted if parameter.requires_grad)
    return trained, sum(parameter.numel() for parameter in counted) - trained


def flops_per_token(trained: int, frozen: int, layers: int, width: int, sequence: int) -> float:
    """Return the operations that forward and backward of a transformer need for one token.

    Each parameter of a matrix needs a multiplication and an addition, three times (forward, backward to inputs and
    backward to weights), or twice if it is frozen. Attention scores and the weighted sum add 12 · layers · width ·
    sequence. Recomputation by activation checkpointing does not count: the MFU measures the required work.

    >>> f"{flops_per_token(trained=124_000_000, frozen=0, layers=12, width=768, sequence=1024):.3g}"
    '8.57e+08'
    """
    return 6.0 * trained + 4.0 * frozen + 12.0 * layers * width * sequence
