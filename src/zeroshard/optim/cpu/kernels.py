"""Native Adam, AdamW and SGD on the CPU in one pass over memory, which also reads and writes 16-bit values.

[Note: equal to torch to the bit]
Given the same fp32 gradient, the result is bitwise equal to torch's own update on the CPU: for all elements of a tensor
of any length, including subnormal, infinite and overflowing values. A NaN is a NaN in both; its bits may differ. For
this, `kernels.c` rounds as ATen's kernels do when compiled for a CPU with FMA. These round less often than their source
suggests, because the compiler fuses a product into the sum that uses it. In fp32, with g the gradient, p the parameter
and one rounding per operation, where fma() is one operation:

    weight decay in g       fma(p, weight_decay, g)
          CUDA, fused Adam  g + p · weight_decay
    decoupled decay         p · (1 - lr · weight_decay)
               CUDA, fused  fma(-(lr · weight_decay), p, p)
    exp_avg                 fma(1 - beta1, g - m, m); from the other end, fma(-beta1, g - m, g), where beta1 ≤ 1/2
               CUDA, fused  fma(beta1, m, fma(-beta1, g, g))
    exp_avg_sq       plain  fma((1 - beta2) · g, g, v · beta2)
                     other  fma(v, beta2, (1 - beta2) · g · g)
                     CUDA   fma(1 - beta2, g · g, v · beta2)
               CUDA, fused  fma(beta2, v, fma(-beta2, g · g, g · g))
    Adam's parameter        p + (-step_size · m) / (√v / correction + eps)
                     CUDA   fma(-step_size, m / (√v / correction + eps), p); fused, as on the CPU
    momentum         plain  fma(g, 1 - dampening, b · momentum); the first time it is g
                     other  fma(b, momentum, g · (1 - dampening))
    Nesterov's gradient     fma(b, momentum, g)
    SGD's parameter         fma(g, -lr, p)

Constants that are the same for all elements are computed in double, as in torch, and rounded to fp32 once. For the
fused Adam of a GPU they are computed in fp32 from fp32 values, with the GPU's own powers of beta (see below).

"plain" is the vector body of a kernel, "other" its vector remainder. The for-loop and `foreach` implementations do the
same operations and round all elements as plain. `fused=True` rounds full vectors as plain and the remainder at the end
of a tensor as other; only Adam on Arm rounds all elements as other. So split a fused optimizer's tensor at multiples
of 16 elements: then only the end of the tensor itself has a remainder.

Not every torch does this on every CPU. Without FMA (``ATEN_CPU_CAPABILITY=default``) every fma(a, b, c) is a · b + c
with two roundings. On x86-64, torch's for-loop and `foreach` take Adam's square root from MKL, which is not always
correctly rounded; `kernels.c` then calls the same function. A trial run detects what this torch does on this CPU. If it
is none of these, torch's own update runs: [Note: detecting torch's rounding] in ``rounding.py``.

Verified with torch 2.11 and 2.13 on x86-64 with AVX-512 (where torch's fused kernels use AVX2), with AVX2 and without
either, and with torch 2.13 on aarch64 (NEON). tests/optim/test_cpu_kernels.py asserts it on the machine that runs it.

On a GPU, torch's `foreach` kernels (the default there) round as in the lines for CUDA, else as on the CPU.
tests/gpu/test_offload_gpu.py asserts that moving an update from the device to the host changes no bit. SGD's `fused`
kernel gives the same bits. Adam's `fused` kernel rounds differently: its lines match torch 2.11. A later version may
round differently, and then last bits differ with ``fused=True``. One line is not exact: it is unknown how that kernel
rounds a weight decay that is added to the gradient. Neither one rounding nor two give all its bits.

A 16-bit gradient is converted to fp32 first, then multiplied by each factor, with one rounding per factor, like
``gradient.float().mul_(factor)`` in torch. A copy in bf16 or fp16 is rounded to nearest, ties to even, like
``Tensor.to``.

torch's fused Adam on a GPU computes the powers of beta on the GPU, with a function whose last bits are specific to it.
They affect the last bits of every parameter, so a CPU update gets the powers from the GPU: for many steps at once,
since each request is a host sync.

[Note: kernel threads]
Updates are queued in the order in which they were started. A thread takes the next chunk of the first update that has
one left. So threads go from the last chunk of one update directly to the first chunk of the next, if it was started in
time, and no thread waits for another. A thread that finds no chunk exits: between updates there are no idle threads to
stop, and the next update starts as many as it needs. If no thread can be started, the calling thread does the work, so
no update waits for work that no thread does.

``KernelThreads`` objects are independent and share nothing in the process: ranks that are threads each have their own.
A forked process has none of its parent's threads: it can free its copy of a model, but not train it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from zeroshard.optim.cpu.build import KernelBuildError, load_library
from zeroshard.optim.hyperparams import AdamHyperparams, SGDHyperparams

STEPS_PER_TABLE = 4096  # steps per request to the GPU


def beta_powers_on_gpu(betas: tuple[float, float], step: int) -> tuple[float, float]:
    """Return both betas to the power of ``step``, computed by this thread's current GPU."""
    table_index, index = divmod(step, STEPS_PER_TABLE)
    return _beta_power_table(betas[0], table_index)[index], _beta_power_table(betas[1], table_index)[index]


@functools.lru_cache(maxsize=64)
def _beta_power_table(beta: float, table_index: int, device: str = "cuda") -> list[float]:
    """Return powers of one beta from step ``table_index * STEPS_PER_TABLE`` on.

    This temporarily takes 4 kB of GPU memory per thousand steps.
    """
    steps = torch.arange(
        table_index * STEPS_PER_TABLE, (table_index + 1) * STEPS_PER_TABLE, dtype=torch.float32, device=device
    )
    powers: list[float] = torch.pow(torch.full_like(steps, beta), steps).tolist()
    return powers


class KernelThreads:
    """Threads that run updates in the order in which they were started: see [Note: kernel threads].

    ``library`` is the compiled ``kernels.c``. Use :meth:`CpuKernels.make_threads` to create an object.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        library.zeroshard_threads_new.argtypes, library.zeroshard_threads_new.restype = (), ctypes.c_void_p
        for function in (library.zeroshard_wait, library.zeroshard_threads_free):
            function.argtypes, function.restype = (ctypes.c_void_p,), None
        self.library, self._pid = library, os.getpid()
        self.handle: int | None = library.zeroshard_threads_new()
        if self.handle is None:
            raise MemoryError("no memory for the threads of the CPU kernels")

    def __del__(self) -> None:
        if self.handle is not None and self._pid == os.getpid():  # a fork does not have the threads
            self.library.zeroshard_threads_free(self.handle)


class KernelHandle:
    """A started update, and the tensors that it reads and writes until :meth:`wait` returns.

    The destructor waits as well: otherwise the update could write into freed memory.

    >>> KernelHandle().wait()  # done from the start
    """

    def __init__(
        self,
        kernel_threads: KernelThreads | None = None,
        call: int | None = None,
        tensors: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self._kernel_threads, self._call, self._tensors = kernel_threads, call, tensors
        self._pid = os.getpid()

    def wait(self) -> None:
        """Wait for the end of the update."""
        threads, call, self._call = self._kernel_threads, self._call, None
        if threads is not None and call is not None and self._pid == os.getpid():  # a fork does not have the threads
            threads.library.zeroshard_wait(call)
        self._kernel_threads, self._tensors = None, ()

    def __del__(self) -> None:
        self.wait()


KERNELS_SOURCE = Path(__file__).with_name("kernels.c")
# fp32 elements per vector in torch's fused kernels
FUSED_VECTOR_LANES = 8 if platform.machine() in ("x86_64", "AMD64") else 4
DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # as kernels.c numbers them
MAX_GRAD_FACTORS = 2
_build_lock = threading.Lock()


class _UpdateStruct(ctypes.Structure):
    """``struct update`` of kernels.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("parameter", "first", "second", "gradient")),
        *((name, ctypes.c_void_p) for name in ("parameter_out", "first_out", "second_out", "copy")),
        *((name, ctypes.c_int64) for name in ("numel", "plain")),
        *((name, ctypes.c_int32) for name in ("gradient_dtype", "copy_dtype")),
        ("factor", ctypes.c_float * MAX_GRAD_FACTORS),
        *((name, ctypes.c_float) for name in ("sign", "l2", "decay", "rate")),
        *((name, ctypes.c_float) for name in ("beta1", "weight", "beta2", "weight2", "correction2", "eps")),
        *((name, ctypes.c_float) for name in ("momentum", "undamped")),
        *((name, ctypes.c_int32) for name in ("begins", "nesterov", "cuda", "separate")),
        ("roots", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Rounding:
    """How an update rounds, as far as this differs between torch versions and CPUs."""

    is_fma_free: bool = False
    """Round products before they are added: torch uses no FMA."""
    vector_lanes: int = 1
    """For `fused`: elements after its last multiple are rounded as "other"; with 0, all elements are."""
    sqrt_address: int | None = None
    """The address of MKL's function for Adam's square roots; None: they are correctly rounded."""


class CpuKernels:
    """The native CPU kernels. Calls release the GIL and use ``threads`` threads.

    ``out`` receives the new values: the input tensors or other ones. Other tensors keep the old values, so the update
    can be discarded. ``copy`` also receives the new parameter, in its own dtype.

    With ``kernel_threads`` a call only starts the update, queued after those started before: it reads and writes until
    ``wait()`` of the returned handle. Without, the update is done when the call returns.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for function in (library.zeroshard_adam, library.zeroshard_sgd):
            function.argtypes, function.restype = (ctypes.POINTER(_UpdateStruct), ctypes.c_int), None
        for function in (library.zeroshard_adam_start, library.zeroshard_sgd_start):
            function.argtypes = ctypes.c_void_p, ctypes.POINTER(_UpdateStruct), ctypes.c_int
            function.restype = ctypes.c_void_p

    def make_threads(self) -> KernelThreads:
        """Return new kernel threads, for a queue of updates."""
        return KernelThreads(self._library)

    def adam(
        self,
        parameter: torch.Tensor,  # fp32, as the two moments
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        gradient: torch.Tensor,  # fp32, bf16 or fp16
        hyperparams: AdamHyperparams,
        *,
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        step: int,
        copy: torch.Tensor | None = None,
        grad_factors: Sequence[float] = (),
        threads: int = 1,
        beta_powers: tuple[float, float] | None = None,
        kernel_threads: KernelThreads | None = None,
        rounding: Rounding | None = None,
    ) -> KernelHandle:
        """Update one range. ``step`` includes this update: it is 1 for the first.

        ``beta_powers``: both betas to the power of ``step``, from a GPU in fp32; needed to match its fused kernel.
        ``rounding``: as detected by ``rounding.py``; None: square roots are correctly rounded and sums use FMA.

        >>> p, m, v = torch.ones(3), torch.zeros(3), torch.zeros(3)
        >>> new, half = tuple(torch.empty(3) for _ in range(3)), torch.empty(3, dtype=torch.bfloat16)
        >>> if found := load_kernels():
        ...     handle = found.adam(p, m, v, torch.ones(3), AdamHyperparams(lr=0.5), out=new, step=1, copy=half)
        ...     print(half.tolist(), p.tolist())
        [0.5, 0.5, 0.5] [1.0, 1.0, 1.0]
        """
        if step < 1:
            raise ValueError(f"step must be at least 1, got {step}: it includes this update")
        update = _make_update(
            (parameter, exp_avg, exp_avg_sq), out, gradient, copy, grad_factors, hyperparams, rounding
        )
        update.l2 = 0.0 if hyperparams.decoupled_weight_decay else hyperparams.weight_decay
        update.eps = hyperparams.eps
        if hyperparams.is_cuda_rounding and hyperparams.fused:
            _set_cuda_fused_adam_constants(update, hyperparams, beta_powers)
        else:
            _set_adam_constants(update, hyperparams, step)
        tensors = (parameter, exp_avg, exp_avg_sq, gradient, copy, *out)
        return self._launch("zeroshard_adam", update, threads, kernel_threads, tensors)

    def sgd(
        self,
        parameter: torch.Tensor,  # fp32, as the momentum
        momentum: torch.Tensor | None,
        gradient: torch.Tensor,  # fp32, bf16 or fp16
        hyperparams: SGDHyperparams,
        *,
        out: tuple[torch.Tensor, torch.Tensor | None],
        copy: torch.Tensor | None = None,
        grad_factors: Sequence[float] = (),
        threads: int = 1,
        kernel_threads: KernelThreads | None = None,
        rounding: Rounding | None = None,
    ) -> KernelHandle:
        """Update one range. ``momentum`` is None without momentum and in the first step, which sets it to the gradient.

        >>> p, buffer = torch.ones(3), torch.empty(3)
        >>> if found := load_kernels():
        ...     handle = found.sgd(p, None, torch.ones(3), SGDHyperparams(lr=0.5, momentum=0.9), out=(p, buffer))
        ...     print(p.tolist(), buffer.tolist())
        [0.5, 0.5, 0.5] [1.0, 1.0, 1.0]
        """
        if (out[1] is not None) != (hyperparams.momentum != 0):
            expected = "a tensor" if hyperparams.momentum else "None"
            got = "None" if out[1] is None else "a tensor"
            raise ValueError(f"out[1] must be {expected} with momentum {hyperparams.momentum}, got {got}")
        if momentum is not None and out[1] is None:
            raise ValueError("the momentum tensor must be None with momentum 0")
        update = _make_update((parameter, momentum), out, gradient, copy, grad_factors, hyperparams, rounding)
        update.l2, update.decay, update.rate = hyperparams.weight_decay, 1.0, -hyperparams.lr
        update.momentum, update.undamped = hyperparams.momentum, 1 - hyperparams.dampening
        update.begins, update.nesterov = momentum is None, hyperparams.nesterov
        tensors = (parameter, momentum, gradient, copy, *out)
        return self._launch("zeroshard_sgd", update, threads, kernel_threads, tensors)

    def _launch(
        self,
        name: str,
        update: _UpdateStruct,
        threads: int,
        kernel_threads: KernelThreads | None,
        tensors: tuple[torch.Tensor | None, ...],
    ) -> KernelHandle:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        if kernel_threads is None:
            getattr(self._library, name)(ctypes.byref(update), threads)
            return KernelHandle()
        call = getattr(self._library, f"{name}_start")(kernel_threads.handle, ctypes.byref(update), threads)
        return KernelHandle(kernel_threads, call, tensors)


def load_kernels() -> CpuKernels | None:
    """Return the native kernels, built at the first call; None, with one warning, if the build fails.

    >>> load_kernels() is load_kernels()
    True
    """
    with _build_lock:  # ranks may be threads: only one builds or warns
        return _load_kernels()


@functools.cache
def _load_kernels() -> CpuKernels | None:
    try:
        return CpuKernels(load_library(KERNELS_SOURCE))
    except KernelBuildError as error:
        warnings.warn(
            f"zeroshard's CPU kernels could not be built, so torch's slower update runs on the CPU: {error}. "
            "Install a C compiler (gcc or clang, with the C library's headers), or set $CC",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def default_rounding(hyperparams: AdamHyperparams | SGDHyperparams) -> Rounding:
    """Return how torch rounds on a CPU with FMA if its square roots are correctly rounded, and on every GPU.

    >>> default_rounding(SGDHyperparams(lr=0.1))
    Rounding(is_fma_free=False, vector_lanes=1, sqrt_address=None)
    """
    if not hyperparams.fused:
        return Rounding()
    is_adam_on_arm = FUSED_VECTOR_LANES == 4 and isinstance(hyperparams, AdamHyperparams)
    return Rounding(vector_lanes=0 if is_adam_on_arm else FUSED_VECTOR_LANES)


def _make_update(
    states: Sequence[torch.Tensor | None],  # parameter, first and second state
    out: Sequence[torch.Tensor | None],
    gradient: torch.Tensor,
    copy: torch.Tensor | None,
    grad_factors: Sequence[float],
    hyperparams: AdamHyperparams | SGDHyperparams,
    rounding: Rounding | None,
) -> _UpdateStruct:
    """Check the tensors, and set the fields that both optimizers share."""
    if len(grad_factors) > MAX_GRAD_FACTORS:
        raise ValueError(f"at most {MAX_GRAD_FACTORS} gradient factors are supported, got {len(grad_factors)}")
    if len(out) != len(states):
        raise ValueError(f"out must have a tensor for each of {len(states)} states, got {len(out)}")
    update, parameter = _UpdateStruct(), states[0]
    assert parameter is not None
    update.numel = parameter.numel()
    if rounding is None:
        rounding = default_rounding(hyperparams)
    update.plain = update.numel - update.numel % rounding.vector_lanes if rounding.vector_lanes else 0
    update.separate, update.roots = rounding.is_fma_free, rounding.sqrt_address
    for field, old, new in zip(("parameter", "first", "second"), states, out, strict=False):
        setattr(update, field, _checked_address(field, old, parameter, (torch.float32,)))
        setattr(update, f"{field}_out", _checked_address(f"{field}_out", new, parameter, (torch.float32,)))
    update.gradient = _checked_address("gradient", gradient, parameter, tuple(DTYPE_CODES))
    update.copy = _checked_address("copy", copy, parameter, tuple(DTYPE_CODES))
    update.gradient_dtype = DTYPE_CODES[gradient.dtype]
    update.copy_dtype = 0 if copy is None else DTYPE_CODES[copy.dtype]
    update.factor[:] = [*grad_factors, *(1.0 for _ in range(MAX_GRAD_FACTORS - len(grad_factors)))]
    update.sign = -1.0 if hyperparams.maximize else 1.0
    return update


def _set_adam_constants(update: _UpdateStruct, hyperparams: AdamHyperparams, step: int) -> None:
    """Set Adam's constants, computed in double."""
    beta1, beta2 = hyperparams.betas
    correction1, correction2 = 1 - beta1 ** float(step), 1 - beta2 ** float(step)
    update.decay = 1 - hyperparams.lr * hyperparams.weight_decay if hyperparams.decoupled_weight_decay else 1.0
    update.rate = -(hyperparams.lr / correction1)
    update.weight, update.beta2, update.weight2 = 1 - beta1, beta2, 1 - beta2
    update.correction2 = math.sqrt(correction2) if hyperparams.fused else correction2**0.5  # as torch computes them
    update.cuda = hyperparams.is_cuda_rounding


def _set_cuda_fused_adam_constants(
    update: _UpdateStruct, hyperparams: AdamHyperparams, beta_powers: tuple[float, float] | None
) -> None:
    """Set Adam's constants, computed in fp32.

    One double operation on fp32 values, rounded to fp32, is equal to that operation in fp32.
    """
    if beta_powers is None:
        raise ValueError("a GPU's fused Adam needs beta_powers: both betas to the power of step, computed by the GPU")
    beta1, beta2, lr = (_round_to_fp32(value) for value in (*hyperparams.betas, hyperparams.lr))
    correction1, correction2 = (_round_to_fp32(1 - power) for power in beta_powers)
    update.decay = (
        -_round_to_fp32(lr * _round_to_fp32(hyperparams.weight_decay)) if hyperparams.decoupled_weight_decay else 0.0
    )
    update.rate = -_round_to_fp32(lr / correction1)
    update.beta1, update.beta2 = beta1, beta2
    update.correction2 = math.sqrt(correction2)
    update.cuda = 2


def _round_to_fp32(value: float) -> float:
    return ctypes.c_float(value).value


def _checked_address(
    name: str, tensor: torch.Tensor | None, parameter: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> int | None:
    if tensor is None:
        return None
    is_valid = tensor.device.type == "cpu" and tensor.dim() == 1 and tensor.is_contiguous() and tensor.dtype in dtypes
    if not is_valid or tensor.numel() != parameter.numel():
        got = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, strides {tensor.stride()}"
        expected = f"({parameter.numel()},) {' or '.join(map(str, dtypes))} on cpu, contiguous"
        raise ValueError(f"{name} must be {expected}; got {got}")
    return tensor.data_ptr()
