"""What a device computes and moves, measured."""

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
ATTENTION_SHAPES = {"cuda": (4, 16, 1024, 128), "cpu": (1, 4, 256, 64)}  # batch, heads, sequence, width of a head
CONVOLUTION_SHAPES = {"cuda": (64, 256, 56), "cpu": (2, 32, 28)}  # batch, channels, side
MOVED_BYTES = {"cuda": 2**28, "cpu": 2**26}  # bytes: far more than caches hold


@contextlib.contextmanager
def _restore_mkldnn_flags() -> Iterator[None]:
    """Leave torch as it is: on a CPU without bf16 its first product in bf16 changes the library for all products."""
    before = torch.backends.mkldnn.enabled
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)  # type: ignore[no-untyped-call]


def time_matmuls(device: torch.device, precision: str, seconds: float) -> list[tuple[float, float]]:
    """(FLOPs, seconds) of square products, the smallest first, as far as they fit in ``seconds``.

    Values are random: a GPU multiplies zeros faster. Nothing where the device has no such product.
    """
    seen: list[tuple[float, float]] = []
    deadline, last = time.perf_counter() + seconds, 0.0
    sizes = MATMUL_SIZES[device.type]
    for left, n in zip(range(len(sizes), 0, -1), sizes, strict=True):
        now = time.perf_counter()
        if len(seen) > 1 and now + 3 * 8 * last > deadline:  # n³: the next takes 8 times as long, three times
            break
        try:
            a, b = (torch.randn(n, n, device=device).to(PRECISION_DTYPES[precision]) for _ in range(2))
            out = torch.empty_like(a)
            with _restore_mkldnn_flags():
                last = device_seconds(partial(torch.mm, a, b, out=out), device, (deadline - now) / left)
        except RuntimeError:  # no such kernel, or no memory for a product of this size
            break
        seen.append((2.0 * n**3, last))
    return seen


def attention_rate(device: torch.device, precision: str, seconds: float) -> float:
    """FLOP/s of causal attention, forward and backward together."""
    batch, heads, length, width = ATTENTION_SHAPES[device.type]
    # Two products forward and five backward, of which the mask spares one half.
    flops = 7 * batch * heads * length**2 * width
    return flops / device_seconds(_attention_run(device, precision), device, seconds)


def has_attention(device: torch.device, precision: str) -> bool:
    """Return whether torch can compute attention in this precision, which some CPUs can only multiply in."""
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
    """FLOP/s of a convolution of 3 × 3 over as many channels as it makes, forward and backward together."""
    batch, channels, side = CONVOLUTION_SHAPES[device.type]
    dtype = PRECISION_DTYPES[precision]
    images = torch.randn(batch, channels, side, side, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(channels, channels, 3, 3, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(images)

    def run() -> None:
        torch.autograd.grad(F.conv2d(images, weight, padding=1), (images, weight), gradient)

    return 3 * 2 * 9 * images.numel() * channels / device_seconds(run, device, seconds)


def memory_rate(device: torch.device, seconds: float, max_bytes: int | None = None) -> float:
    """Bytes/s of device memory that an addition reads and writes."""
    numel = min(MOVED_BYTES[device.type], max_bytes or MOVED_BYTES[device.type]) // 4
    a, b, out = (torch.ones(numel, device=device) for _ in range(3))
    return 3 * out.nbytes / device_seconds(lambda: torch.add(a, b, out=out), device, seconds)


def kernel_gap(device: torch.device, seconds: float) -> float:
    """Seconds that a device takes for a kernel with nothing to do. A CPU has none: its thread launches and runs."""
    if device.type != "cuda":
        return 0.0
    few = torch.ones(32, device=device)
    return device_seconds(lambda: few.add_(1.0), device, seconds)


def operation_seconds(device: torch.device, precision: str, seconds: float) -> float:
    """Seconds of the host for an operation, over forward and backward of a GPT too small to keep a device busy.

    Counted are operations that launch a kernel, as a trace counts them; views, allocations, Python and autograd itself
    are part of what these take.
    """
    config = GPTConfig(vocab_size=64, context=16, layers=4, heads=2, width=32)
    model = GPT(config).to(device, PRECISION_DTYPES[precision])
    tokens = torch.zeros(1, 8, dtype=torch.int64, device=device)

    def run() -> None:
        model(tokens, tokens).backward()
        model.zero_grad(set_to_none=True)

    def several() -> None:
        for _ in range(4):  # the device's last operations, which are waited for, matter less
            run()
        _synchronize(device)

    launches = LaunchCounter()
    with launches:
        run()
    _synchronize(device)
    several()  # chooses algorithms, fills the allocator's caches
    return host_seconds(several, seconds) / (4 * launches.count)


class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that launch a kernel.

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
        given = {tensor.untyped_storage().data_ptr() for tensor in iter_tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        made = any(tensor.untyped_storage().data_ptr() not in given for tensor in iter_tensors(result))
        self.count += op_kind(func, made) != "nothing"
        return result


def copy_rate(device: torch.device, seconds: float, max_bytes: int | None = None) -> float:
    """Bytes/s between pinned host memory and a device, the slower way; on a CPU, of a copy within its memory."""
    nbytes = min(MOVED_BYTES[device.type], max_bytes or MOVED_BYTES[device.type])
    near = torch.ones(nbytes, dtype=torch.uint8, device=device)
    far = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    down = device_seconds(lambda: far.copy_(near, non_blocking=True), device, seconds / 2)
    up = device_seconds(lambda: near.copy_(far, non_blocking=True), device, seconds / 2)
    return nbytes / max(down, up)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
