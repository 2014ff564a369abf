"""The numbers of a step: all-reduced over the ranks, as FLOPS and MFU, and written to a file."""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.utils.atomic_file import write_atomic

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
        writer = None if tensorboard is None else _import_writer()  # may fail: before the file is changed
        if resume_step is not None and path.exists():
            _truncate_after(path, resume_step)
        elif path.exists() and path.stat().st_size:
            raise FileExistsError(f"{path} already has metrics: resume that run, or start in a new directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", newline="\n")
        purge_step = None if resume_step is None else resume_step + 1  # TensorBoard hides earlier events from here on
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

    def __exit__(self, *_: object) -> None:
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
            is_later = json.loads(line)["step"] > step
        except (ValueError, TypeError, KeyError):  # ValueError: truncated, or not even text
            if number == len(lines):
                break
            raise ValueError(
                f"line {number} of {path} is not a JSON object with a step (got {line[:80]!r}): remove the line, or "
                "move the file away"
            ) from None
        if not is_later:
            kept.append(line + b"\n")
    write_atomic(path, b"".join(kept))


def _import_writer() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(f"TensorBoard is not installed ({error}): pip install 'zeroshard[tensorboard]'") from error
    return SummaryWriter


# ------------------------------------------------------------------------------------------ reduced over the ranks


@dataclass(frozen=True)
class StepStats:
    """Numbers of a step that are the same on all ranks, except its duration."""

    step: int
    loss: float
    """Mean over the ranks."""
    grad_norm: float | None
    """Norm of the gradients; None if it was not requested."""
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
        self._pending: deque[tuple[int, bool, torch.Tensor, _DeviceTimestamp, _DeviceTimestamp]] = deque()
        self._step_start = _DeviceTimestamp(device)

    def restart_timer(self) -> None:
        """Start timing the next step now, to exclude preceding work such as an evaluation."""
        self._step_start = _DeviceTimestamp(self._device)

    def start_reduce(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor | None, stop_requested: bool) -> None:
        """Start the all-reduce of this rank's numbers for a step that is in progress."""
        norm = grad_norm if grad_norm is not None else torch.zeros((), device=self._device)
        values = torch.stack(
            [loss.detach().float(), norm.float(), torch.full((), float(stop_requested), device=self._device)]
        )
        dist.all_reduce(values)
        values /= dist.get_world_size()
        if self._device.type == "cuda":
            values = torch.empty(3, pin_memory=True, device="cpu").copy_(values, non_blocking=True)
        now = _DeviceTimestamp(self._device)
        self._pending.append((step, grad_norm is not None, values, self._step_start, now))
        self._step_start = now

    def read_ready(self, flush: bool = False) -> Iterator[StepStats]:
        """Yield the steps whose numbers are ready: on a GPU all but the last, unless ``flush``."""
        num_pending = 1 if self._device.type == "cuda" and not flush else 0
        while len(self._pending) > num_pending:
            step, has_norm, values, start, end = self._pending.popleft()
            seconds = end.seconds_since(start)
            loss, norm, stop = values.tolist()
            yield StepStats(step, loss, norm if has_norm else None, stop > 0, seconds)


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


# words of the device name → FLOP/s of dense matrix products by precision; the first match counts
_PEAK_FLOPS: tuple[tuple[tuple[str, ...], dict[str, float]], ...] = (
    (("b200",), {"bf16": 2250e12, "fp16": 2250e12}),
    (("h200",), {"bf16": 989e12, "fp16": 989e12}),
    (("h100", "pcie"), {"bf16": 756e12, "fp16": 756e12}),
    (("h100",), {"bf16": 989e12, "fp16": 989e12}),  # SXM, named "H100 80GB HBM3"
    (("a100",), {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12}),
    (("l40s",), {"bf16": 362e12, "fp16": 362e12}),
    (("l4",), {"bf16": 121e12, "fp16": 121e12}),
    (("a10",), {"bf16": 125e12, "fp16": 125e12}),
    (("rtx", "4090"), {"bf16": 165e12, "fp16": 165e12}),  # with fp32 accumulation, as in torch
    (("v100",), {"fp16": 125e12}),  # its tensor cores have no bf16
)
_VARIANT_WORDS = frozenset({"mig", "nvl", "laptop", "d"})  # mark other devices: partitions or slower variants


def count_matmul_params(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters that every token is multiplied with: (trained, frozen).

    Embedding tables that are only looked up do not count. In a mixture of experts all experts count, although a token
    uses only a few.

    >>> count_matmul_params(nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)))
    (800, 0)
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    used_elsewhere = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    # a table that is tied to the head is used in a matrix product
    counted = [p for p in model.parameters() if id(p) not in tables or id(p) in used_elsewhere]
    trained = sum(p.numel() for p in counted if p.requires_grad)
    return trained, sum(p.numel() for p in counted) - trained


def flops_per_token(trained: int, frozen: int, layers: int, width: int, sequence: int) -> float:
    """Return the operations that forward and backward of a transformer need for one token.

    Each parameter of a matrix needs a multiplication and an addition, three times (forward, backward to inputs and
    backward to weights), or twice if it is frozen. Attention scores and the weighted sum add 12 · layers · width ·
    sequence. Recomputation by activation checkpointing does not count: the MFU measures the required work.

    >>> f"{flops_per_token(trained=124_000_000, frozen=0, layers=12, width=768, sequence=1024):.3g}"
    '8.57e+08'
    """
    return 6.0 * trained + 4.0 * frozen + 12.0 * layers * width * sequence


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return a device's peak FLOP/s in "bf16", "fp16" or "fp32" by its data sheet, None if unknown.

    `device_name` is the result of `torch.cuda.get_device_name()`.

    >>> peak_flops("NVIDIA A100-SXM4-80GB", "bf16"), peak_flops("Tesla T4", "fp16")
    (312000000000000.0, None)
    """
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    if words & _VARIANT_WORDS:
        return None
    for device_words, peaks in _PEAK_FLOPS:
        if words.issuperset(device_words):
            return peaks.get(precision)
    return None
