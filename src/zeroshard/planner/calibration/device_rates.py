"""Measure the compute and copy rates of a device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.models import GPT, GPTConfig
from zeroshard.planner.calibration.timing import device_seconds, host_seconds
from zeroshard.planner.tracing.op_cost import iter_tensors, op_kind

PRECISION_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MATMUL_SIZES = {"cuda": (512, 1024, 2048, 4096, 8192), "cpu": (64, 128, 256, 512, 1024)}  # of square matrices
ATTENTION_SHAPES = {"cuda": (4, 16, 1024, 128), "cpu": (1, 4, 256, 64)}  # batch, heads, sequence length, head size
CONVOLUTION_SHAPES = {"cuda": (64, 256, 56), "cpu": (2, 32, 28)}  # batch, channels, side
MOVED_BYTES = {"cuda": 2**28, "cpu": 2**26}  # much more than the caches hold


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
    return flops / device_seconds(_attention_run(device, precision), device, seconds)


def has_attention(device: torch.device, precision: str) -> bool:
    """Return whether torch can compute attention in this precision; some CPUs only support matmuls in it."""
    try:
        _attention_run(device, precision)()
    except RuntimeError:
        return False
    return True


def _attention_run(device: torch.device, precision: str) -> Callable[[], None]:
    shape, dtype = ATTENTION_SHAPES[device.type], PRECISION_DTYPES[precision]
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


def memory_rate(device: torch.device, seconds: float, max_bytes: int | None = None) -> float:
    """Return the bytes/s of device memory that an addition reads and writes."""
    numel = min(MOVED_BYTES[device.type], max_bytes or MOVED_BYTES[device.type]) // 4
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
        """Run an operation and count it."""
        input_storages = {tensor.untyped_storage().data_ptr() for tensor in iter_tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        allocates = any(tensor.untyped_storage().data_ptr() not in input_storages for tensor in iter_tensors(result))
        self.count += op_kind(func, allocates) != "nothing"
        return result


def copy_rate(device: torch.device, seconds: float, max_bytes: int | None = None) -> float:
    """Return the bytes/s between pinned host memory and a device, in the slower direction.

    On a CPU, return the rate of a copy within its memory.
    """
    nbytes = min(MOVED_BYTES[device.type], max_bytes or MOVED_BYTES[device.type])
    device_buffer = torch.ones(nbytes, dtype=torch.uint8, device=device)
    host_buffer = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    to_host = device_seconds(lambda: host_buffer.copy_(device_buffer, non_blocking=True), device, seconds / 2)
    to_device = device_seconds(lambda: device_buffer.copy_(host_buffer, non_blocking=True), device, seconds / 2)
    return nbytes / max(to_host, to_device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
