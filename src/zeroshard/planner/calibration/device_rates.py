"""Measure the rates of a device, one by one, and which fraction of them it sustains in training.

[Note: timing on the device]
A GPU runs kernels after the host has launched them. A kernel of a few microseconds ends before the host has launched
the next one, so a loop of such kernels would measure the host. Therefore the device is first kept busy for some
milliseconds while the host launches the runs; events around the runs then measure the device's own time.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.models import GPT, GPTConfig
from zeroshard.planner.machines.machine import Machine
from zeroshard.planner.step_time import TraceCost
from zeroshard.planner.tracing.op_cost import iter_tensors, op_kind
from zeroshard.planner.tracing.trace_model import trace_model

PRECISION_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MATMUL_SIZES = {"cuda": (512, 1024, 2048, 4096, 8192), "cpu": (64, 128, 256, 512, 1024)}  # of square matrices
ATTENTION_SHAPES = {"cuda": (4, 16, 1024, 128), "cpu": (1, 4, 256, 64)}  # batch, heads, sequence length, head size
CONVOLUTION_SHAPES = {"cuda": (64, 256, 56), "cpu": (2, 32, 28)}  # batch, channels, side
MOVED_BYTES = {"cuda": 2**28, "cpu": 2**26}  # much more than the caches hold
TRAINING_SHAPES = {  # a GPT and its batch, whose device time is much longer than their launch time
    "cuda": (GPTConfig(vocab_size=16384, context=1024, layers=4, heads=16, width=2048), 16),
    "cpu": (GPTConfig(vocab_size=512, context=64, layers=2, heads=4, width=128), 2),
}
SUSTAINED_RANGE = (0.2, 1.0)  # values outside come from something else, so they are clamped
MAX_RUNS_PER_ROUND = 32  # between two events: fewer than the host can launch while the device is busy
ROUND_SECONDS = 0.05  # enough time between two events
MAX_ROUNDS = 200  # rounds, or runs on a CPU
BUSY_KERNELS = 32  # multiplications of BUSY_NUMEL elements, 0.1 ms each, that keep a device busy
BUSY_NUMEL = 2**26


def host_seconds(run: Callable[[], object], seconds: float, max_runs: int = MAX_ROUNDS) -> float:
    """Return the median time of as many runs as fit in ``seconds``, at least one after the warm-up run.

    If the warm-up run takes longer than ``seconds``, its time is returned, because there is no time for a second run.

    >>> host_seconds(lambda: None, seconds=0.001) < 1
    True
    """
    begin = time.perf_counter()
    run()
    first = time.perf_counter() - begin
    times: list[float] = [] if first < seconds else [first]
    deadline = time.perf_counter() + seconds
    while first < seconds and len(times) < max_runs and (not times or time.perf_counter() < deadline):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def device_seconds(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the median time of a run on a device: see [Note: timing on the device].

    >>> device_seconds(lambda: torch.ones(3) + 1, torch.device("cpu"), seconds=0.001) > 0
    True
    """
    if device.type != "cuda":
        return host_seconds(run, seconds)
    run()  # loads kernels and selects algorithms
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    runs = max(1, min(MAX_RUNS_PER_ROUND, int(ROUND_SECONDS / (time.perf_counter() - start))))
    busy = torch.ones(BUSY_NUMEL, device=device)
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < MAX_ROUNDS and (len(times) < 2 or time.perf_counter() < deadline):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(BUSY_KERNELS):
            busy.mul_(1.0)
        begin.record()
        for _ in range(runs):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / runs)  # elapsed_time returns milliseconds
    return statistics.median(times)


@contextlib.contextmanager
def _restore_mkldnn_flags() -> Iterator[None]:
    """Restore the mkldnn flag: on a CPU without bf16, the first bf16 matmul switches the library for all matmuls."""
    before = torch.backends.mkldnn.enabled
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)  # type: ignore[no-untyped-call]


def time_matmuls(device: torch.device, precision: str, seconds: float) -> list[tuple[float, float]]:
    """Return (FLOPs, seconds) of square matmuls, smallest first, as many as fit in ``seconds``.

    The values are random, because a GPU multiplies zeros faster. The list is empty if the device has no such matmul.
    """
    times: list[tuple[float, float]] = []
    deadline, last = time.perf_counter() + seconds, 0.0
    sizes = MATMUL_SIZES[device.type]
    for sizes_left, n in zip(range(len(sizes), 0, -1), sizes, strict=True):
        now = time.perf_counter()
        # The next size takes 8 times as long (n³), and runs at least 3 times.
        if len(times) > 1 and now + 3 * 8 * last > deadline:
            break
        try:
            a, b = (torch.randn(n, n, device=device).to(PRECISION_DTYPES[precision]) for _ in range(2))
            out = torch.empty_like(a)
            with _restore_mkldnn_flags():
                last = device_seconds(partial(torch.mm, a, b, out=out), device, (deadline - now) / sizes_left)
        except RuntimeError:  # no such kernel, or not enough memory for this size
            break
        times.append((2.0 * n**3, last))
    return times


def attention_rate(device: torch.device, precision: str, seconds: float) -> float:
    """Return the FLOP/s of causal attention, forward and backward together."""
    batch, heads, length, width = ATTENTION_SHAPES[device.type]
    # Two matmuls in forward and five in backward; the causal mask halves them.
    flops = 7 * batch * heads * length**2 * width
    run = _attention_run(device, precision, ATTENTION_SHAPES[device.type])
    return flops / device_seconds(run, device, seconds)


def has_attention(device: torch.device, precision: str) -> bool:
    """Return whether torch can compute attention in this precision; some CPUs only support matmuls in it.

    One head selects the kernel that several do, and takes less than a second where bf16 is slow.
    """
    _, _, length, width = ATTENTION_SHAPES[device.type]
    try:
        _attention_run(device, precision, (1, 1, length, width))()
    except RuntimeError:
        return False
    return True


def _attention_run(device: torch.device, precision: str, shape: tuple[int, ...]) -> Callable[[], None]:
    dtype = PRECISION_DTYPES[precision]
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=device, dtype=dtype)

    def run() -> None:
        result = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(result, (query, key, value), gradient)

    return run


def convolution_rate(device: torch.device, precision: str, seconds: float) -> float:
    """Return the FLOP/s of a 3 × 3 convolution with equal in and out channels, forward and backward together."""
    batch, channels, side = CONVOLUTION_SHAPES[device.type]
    dtype = PRECISION_DTYPES[precision]
    images = torch.randn(batch, channels, side, side, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(channels, channels, 3, 3, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(images)

    def run() -> None:
        torch.autograd.grad(F.conv2d(images, weight, padding=1), (images, weight), gradient)

    return 3 * 2 * 9 * images.numel() * channels / device_seconds(run, device, seconds)


def memory_rate(device: torch.device, seconds: float, max_bytes: int) -> float:
    """Return the bytes/s of device memory that an addition reads and writes."""
    numel = min(MOVED_BYTES[device.type], max_bytes) // 4
    a, b, out = (torch.ones(numel, device=device) for _ in range(3))
    return 3 * out.nbytes / device_seconds(lambda: torch.add(a, b, out=out), device, seconds)


def kernel_gap(device: torch.device, seconds: float) -> float:
    """Return the device seconds of a nearly empty kernel; 0 on a CPU, where the launching thread runs the kernel."""
    if device.type != "cuda":
        return 0.0
    tensor = torch.ones(32, device=device)
    return device_seconds(lambda: tensor.add_(1.0), device, seconds)


def operation_seconds(device: torch.device, precision: str, seconds: float) -> float:
    """Return the host seconds per operation in forward and backward of a GPT too small to keep a device busy.

    Only operations that launch a kernel count, as in a trace. Their time includes views, allocations, Python and
    autograd itself.
    """
    config = GPTConfig(vocab_size=64, context=16, layers=4, heads=2, width=32)
    model = GPT(config).to(device, PRECISION_DTYPES[precision])
    tokens = torch.zeros(1, 8, dtype=torch.int64, device=device)

    def run() -> None:
        model(tokens, tokens).backward()
        model.zero_grad(set_to_none=True)

    def run_several() -> None:
        for _ in range(4):  # several, so that the final wait for the device matters less
            run()
        _synchronize(device)

    launches = LaunchCounter()
    with launches:
        run()
    _synchronize(device)
    run_several()  # warm-up: selects algorithms and fills the allocator's caches
    return host_seconds(run_several, seconds) / (4 * launches.count)


class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count operations that launch a kernel.

    >>> with LaunchCounter() as launches:
    ...     _ = torch.ones(2, 3).t() + torch.empty(3, 2)
    >>> launches.count
    2
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        input_storages = {tensor.untyped_storage().data_ptr() for tensor in iter_tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        allocates = any(tensor.untyped_storage().data_ptr() not in input_storages for tensor in iter_tensors(result))
        self.count += op_kind(func, allocates) != "nothing"
        return result


def copy_rate(device: torch.device, seconds: float, max_bytes: int) -> float:
    """Return the bytes/s between pinned host memory and a device, in the slower direction.

    On a CPU, return the rate of a copy within its memory.
    """
    nbytes = min(MOVED_BYTES[device.type], max_bytes)
    device_buffer = torch.ones(nbytes, dtype=torch.uint8, device=device)
    host_buffer = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu")
    to_host = device_seconds(lambda: host_buffer.copy_(device_buffer, non_blocking=True), device, seconds / 2)
    to_device = device_seconds(lambda: device_buffer.copy_(host_buffer, non_blocking=True), device, seconds / 2)
    return nbytes / max(to_host, to_device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sustained_fraction(machine: Machine, device: torch.device, seconds: float) -> float:
    """Train a few layers for ``seconds`` and return the step time predicted from the rates over the measured one.

    On a CPU the prediction includes the host time for launching, because one thread does both.
    """
    precision = max(machine.flops, key=lambda name: (machine.flops[name], name == "bf16"))
    config, batch = TRAINING_SHAPES[device.type]
    with torch.device(device):
        model = GPT(config).to(PRECISION_DTYPES[precision])
    tokens = torch.zeros(batch, config.context, dtype=torch.int64, device=device)
    trace_precision = None if precision == "fp32" else precision
    trace = trace_model(model, micro_batch=batch, device_kind=machine.kind, precision=trace_precision)
    cost = TraceCost.from_trace(trace, machine)
    predicted_seconds = sum(cost.device_seconds) + (sum(cost.host_seconds) if device.type == "cpu" else 0.0)
    runs, begin = 0, 0.0
    while runs < 2 or time.perf_counter() - begin < seconds:
        if runs == 1:  # the first run selects algorithms and fills the allocator's caches
            _synchronize(device)
            begin = time.perf_counter()
        model(tokens, tokens).backward()
        model.zero_grad()
        runs += 1
        if runs % 4 == 0:
            _synchronize(device)
    _synchronize(device)
    measured_seconds = (time.perf_counter() - begin) / (runs - 1)
    return min(max(predicted_seconds / measured_seconds, SUSTAINED_RANGE[0]), SUSTAINED_RANGE[1])
