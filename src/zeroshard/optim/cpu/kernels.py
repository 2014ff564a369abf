"""Native: Adam, AdamW and SGD on the host in one pass over memory, with 16 bits read and written on the way.

[Note: equal to torch to the bit]
Given the same fp32 gradient, an update here gives every bit that torch's own gives on the CPU: in all elements of a
tensor however long, subnormal, infinite and overflowing values included. Where a value is NaN it is NaN in both; which
of the NaNs is not promised. To that end `kernels.c` follows the roundings that ATen's kernels have as compiled for a
processor with FMA, which are fewer than their source shows: the compiler fuses a product into the sum it is used in.
In fp32, with g the gradient, p the parameter and one rounding for each operation, of which fma() is one:

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

Numbers that are the same for all elements are computed in double, as torch does, and rounded to fp32 once; for the
fused Adam of a GPU in fp32, from fp32, with the GPU's own powers of beta (``kernels.py``).

For-loop and `foreach` are the same operations and all plain. `fused=True` is plain in whole vectors and other in the
elements left over at a tensor's end, but for Adam on Arm, where it is other throughout. So a stretch of a fused
optimizer's tensor should be cut at multiples of 16 elements: then the elements left over are the tensor's own.

Not every torch does this on every processor. Without FMA (``ATEN_CPU_CAPABILITY=default``) fma(a, b, c) is a · b + c
with two roundings, everywhere. On x86-64 torch's for-loop and `foreach` take Adam's square root from MKL, which is not
always the correctly rounded one; `kernels.c` then calls the same function. Which of these this torch does here is
found by trying, and where it is none of them, torch's own update runs: [Note: found by trying] in ``rounding.py``.

Seen with torch 2.11 and 2.13 on x86-64 with AVX-512 (where torch's fused kernels use AVX2), with AVX2 and without
either; with torch 2.13 on aarch64 (NEON). tests/test_host_kernels.py asserts it wherever it runs.

On a GPU torch's `foreach` kernels, its default there, do what the lines for CUDA say and the same otherwise:
tests/test_offload_gpu.py asserts that an update which moves from the device to the host changes no bit. SGD's `fused`
kernel gives the same. Adam's rounds in its own way: the lines for it follow torch 2.11's. A later one may round
otherwise, and last bits would then differ with ``fused=True``. One line is not right: how that kernel rounds a decay
that is part of the gradient was not found. Neither one rounding nor two give all its bits.

A gradient of 16 bits is widened first, then multiplied by each factor, each with a rounding of its own: what torch
gives for ``gradient.float().mul_(factor)``. A copy in bf16 or fp16 is rounded to nearest, ties to even, as by
``Tensor.to``.

torch's fused Adam on a GPU computes them there, by a function whose last bits are its own. They decide over the last
bits of every parameter, so an update on the host asks the GPU for them: for many steps at once, since it has to wait.

[Note: from one update to the next]
Updates wait in line, in the order in which they were begun. A thread takes the next chunk of the first that has one
left; so the threads go from the last chunk of one update to the first of the next without a pause, if that was begun in
time, and none waits for another to end. A thread that finds nothing leaves: between updates there is nobody to end, and
an update that is begun then starts as many as it wants. What nobody could be started for is done by the thread that
begins it, so that no update ever waits for one that is not worked on.

Crews know nothing of each other, and there is nothing in the process that they share: ranks that are threads have their
own. A process that was forked has none of its parent's threads: it can drop what it has of a model, not train it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from zeroshard.optim.cpu.build import KernelBuildError, load_library

SUPPORTED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


@dataclass(frozen=True)
class AdamHyperparams:
    """The hyper-parameters of Adam and AdamW, as plain numbers: equal options compare equal.

    >>> AdamHyperparams(lr=1e-3) == AdamHyperparams(lr=1e-3, betas=(0.9, 0.999))
    True
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = True  # AdamW: the parameter decays; otherwise decay is added to the gradient
    maximize: bool = False
    fused: bool = False  # round as torch's fused kernel does on the CPU; with cuda, as the one on a GPU
    is_cuda_rounding: bool = False  # round as torch's foreach kernels do on a GPU


@dataclass(frozen=True)
class SGDHyperparams:
    """The hyper-parameters of SGD, as plain numbers.

    >>> SGDHyperparams(lr=0.1, momentum=0.9).nesterov
    False
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    fused: bool = False  # round as torch's fused kernel does on the CPU


def hyperparams_from_group(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], is_cuda_rounding: bool = False
) -> AdamHyperparams | SGDHyperparams | None:
    """Return what the native update of a group needs; None: only torch's own update gives torch's numbers.

    ``cuda``: these are the numbers that torch gives on a GPU.

    Served are torch's Adam, AdamW and SGD themselves, of which a subclass may do anything, without ``amsgrad``,
    ``capturable`` and ``differentiable``. The learning rate may be a tensor, which is read: on a device, that waits.
    On the CPU torch's Adam computes with such a one in its own dtype, unless fused: that is left to torch.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> hyperparams_from_group(optimizer, optimizer.param_groups[0])
    SGDHyperparams(lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False, fused=False)
    """
    kind = type(optimizer)
    if kind not in SUPPORTED_OPTIMIZERS or any(group.get(key) for key in ("amsgrad", "capturable", "differentiable")):
        return None
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    maximize, fused = bool(group["maximize"]), bool(group.get("fused"))
    if isinstance(group["lr"], torch.Tensor) and kind is not torch.optim.SGD and not (fused or is_cuda_rounding):
        return None
    if kind is torch.optim.SGD:
        return SGDHyperparams(
            lr=lr,
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=weight_decay,
            nesterov=bool(group["nesterov"]),
            maximize=maximize,
            fused=fused and not is_cuda_rounding,  # on a GPU all are rounded alike
        )
    return AdamHyperparams(
        lr=lr,
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=float(group["eps"]),
        weight_decay=weight_decay,
        decoupled_weight_decay=bool(group.get("decoupled_weight_decay", kind is torch.optim.AdamW)),
        maximize=maximize,
        fused=fused,
        is_cuda_rounding=is_cuda_rounding,
    )


STEPS_PER_TABLE = 4096  # steps asked for at once


def beta_powers_on_gpu(betas: tuple[float, float], step: int) -> tuple[float, float]:
    """Both betas to the power of ``step``, by this thread's current GPU."""
    span, within = divmod(step, STEPS_PER_TABLE)
    return _beta_power_table(betas[0], span)[within], _beta_power_table(betas[1], span)[within]


@functools.lru_cache(maxsize=64)
def _beta_power_table(beta: float, table_index: int, device: str = "cuda") -> list[float]:
    """Powers of one beta from ``span * SPAN`` on: 4 kB on the GPU for each thousand steps, for a moment."""
    steps = torch.arange(
        table_index * STEPS_PER_TABLE, (table_index + 1) * STEPS_PER_TABLE, dtype=torch.float32, device=device
    )
    found: list[float] = torch.pow(torch.full_like(steps, beta), steps).tolist()
    return found


class KernelThreads:
    """Threads that do updates in the order in which they are begun: see [Note: from one update to the next].

    ``library`` is that of ``kernels.c``; :meth:`CpuKernels.make_threads` makes one.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        library.zeroshard_crew.argtypes, library.zeroshard_crew.restype = (), ctypes.c_void_p
        for function in (library.zeroshard_end, library.zeroshard_dismiss):
            function.argtypes, function.restype = (ctypes.c_void_p,), None
        self.library, self._pid = library, os.getpid()
        self.handle: int | None = library.zeroshard_crew()
        if self.handle is None:
            raise MemoryError("no memory for the threads of the host's updates")

    def __del__(self) -> None:
        if self.handle is not None and self._pid == os.getpid():  # a fork does not have the threads
            self.library.zeroshard_dismiss(self.handle)


class KernelHandle:
    """An update that was begun, and the tensors that it reads and writes until :meth:`end` has returned.

    One that is dropped is ended, or it would write into memory that is another's by then.

    >>> KernelHandle().wait()  # over from the beginning
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
        """Return when it is over."""
        crew, call, self._call = self._kernel_threads, self._call, None
        if crew is not None and call is not None and self._pid == os.getpid():  # a fork does not have the threads
            crew.library.zeroshard_end(call)
        self._kernel_threads, self._tensors = None, ()

    def __del__(self) -> None:
        self.wait()


KERNELS_SOURCE = Path(__file__).with_name("kernels.c")
FUSED_VECTOR_LANES = (
    8 if platform.machine() in ("x86_64", "AMD64") else 4
)  # fp32 elements of a vector in torch's fused kernels
DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # as kernels.c numbers them
MAX_GRAD_FACTORS = 2
_build_lock = threading.Lock()


class _UpdateStruct(ctypes.Structure):
    """kernels.c's ``struct update``."""

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
    """Where an update rounds: what differs between the kernels of one torch and another, and between processors."""

    is_fma_free: bool = False
    """Products are rounded before they are added: torch uses no FMA."""
    vector_lanes: int = 1
    """Of `fused`: elements after the last multiple of it are "other", and with 0 all are."""
    sqrt_address: int | None = None
    """The address of the function that takes Adam's square roots (MKL's); None: they are correctly rounded."""


class CpuKernels:
    """The native updates. Calls let other Python threads run, and use as many threads as they are told.

    ``out`` is where the new values go: the tensors they are computed from, or others. Old values are left as they are
    in the second case, so an update may be dropped. ``copy`` receives the new parameter in its own dtype as well.

    With a ``crew`` a call only begins the update, behind those that the crew was given before: it reads and writes
    until the ``end()`` of what is returned. Without, it is over when the call returns.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for function in (library.zeroshard_adam, library.zeroshard_sgd):
            function.argtypes, function.restype = (ctypes.POINTER(_UpdateStruct), ctypes.c_int), None
        for function in (library.zeroshard_adam_begin, library.zeroshard_sgd_begin):
            function.argtypes = ctypes.c_void_p, ctypes.POINTER(_UpdateStruct), ctypes.c_int
            function.restype = ctypes.c_void_p

    def make_threads(self) -> KernelThreads:
        """A new crew, for updates that are begun one after the other."""
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
        """Update one stretch. ``step`` counts this update too: 1 for the first.

        ``powers``: both betas to the power of ``step`` as a GPU has them in fp32, for what is fused there.
        ``rounding``: as ``rounding.py`` found it; without, square roots are correctly rounded and sums are fused.

        >>> p, m, v = torch.ones(3), torch.zeros(3), torch.zeros(3)
        >>> new, half = tuple(torch.empty(3) for _ in range(3)), torch.empty(3, dtype=torch.bfloat16)
        >>> if found := load_kernels():
        ...     begun = found.adam(p, m, v, torch.ones(3), AdamHyperparams(lr=0.5), out=new, step=1, copy=half)
        ...     print(half.tolist(), p.tolist())
        [0.5, 0.5, 0.5] [1.0, 1.0, 1.0]
        """
        if step < 1:
            raise ValueError(f"step is {step}; it counts this update too, so the first is 1")
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
        return self._launch("zeroshard_adam", update, _check_threads(threads), kernel_threads, tensors)

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
        """Update one stretch. ``momentum`` is None without momentum, and the first time, when it becomes the gradient.

        >>> p, buffer = torch.ones(3), torch.empty(3)
        >>> if found := load_kernels():
        ...     begun = found.sgd(p, None, torch.ones(3), SGDHyperparams(lr=0.5, momentum=0.9), out=(p, buffer))
        ...     print(p.tolist(), buffer.tolist())
        [0.5, 0.5, 0.5] [1.0, 1.0, 1.0]
        """
        if (out[1] is not None) != (hyperparams.momentum != 0):
            wanted = "a tensor for the momentum" if hyperparams.momentum else "None in its place, as nothing is kept"
            got = "None" if out[1] is None else "a tensor"
            raise ValueError(f"out[1] is {got}; momentum {hyperparams.momentum} wants {wanted}")
        if momentum is not None and out[1] is None:
            raise ValueError("got a momentum tensor with momentum 0; give None")
        update = _make_update((parameter, momentum), out, gradient, copy, grad_factors, hyperparams, rounding)
        update.l2, update.decay, update.rate = hyperparams.weight_decay, 1.0, -hyperparams.lr
        update.momentum, update.undamped = hyperparams.momentum, 1 - hyperparams.dampening
        update.begins, update.nesterov = momentum is None, hyperparams.nesterov
        tensors = (parameter, momentum, gradient, copy, *out)
        return self._launch("zeroshard_sgd", update, _check_threads(threads), kernel_threads, tensors)

    def _launch(
        self,
        name: str,
        update: _UpdateStruct,
        threads: int,
        kernel_threads: KernelThreads | None,
        tensors: tuple[torch.Tensor | None, ...],
    ) -> KernelHandle:
        if kernel_threads is None:
            getattr(self._library, name)(ctypes.byref(update), threads)
            return KernelHandle()
        call = getattr(self._library, f"{name}_begin")(kernel_threads.handle, ctypes.byref(update), threads)
        return KernelHandle(kernel_threads, call, tensors)


def load_kernels() -> CpuKernels | None:
    """Return the native updates, built at the first call; None where they cannot be, with one warning.

    >>> load_kernels() is load_kernels()
    True
    """
    with _build_lock:  # ranks may be threads: one builds, and one warns
        return _load_kernels()


@functools.cache
def _load_kernels() -> CpuKernels | None:
    try:
        return CpuKernels(load_library(KERNELS_SOURCE))
    except KernelBuildError as error:
        warnings.warn(
            f"zeroshard's host kernels could not be built, so torch's own slower update runs on the host: {error}. "
            "Install a C compiler (gcc or clang, with the C library's headers), or name one in $CC",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def default_rounding(hyperparams: AdamHyperparams | SGDHyperparams) -> Rounding:
    """How torch rounds on a processor with FMA, where its square roots are correctly rounded; and on every GPU.

    >>> default_rounding(SGDHyperparams(lr=0.1))
    Rounding(is_fma_free=False, vector_lanes=1, sqrt_address=None)
    """
    if not hyperparams.fused:
        return Rounding()
    return Rounding(
        vector_lanes=0 if FUSED_VECTOR_LANES == 4 and isinstance(hyperparams, AdamHyperparams) else FUSED_VECTOR_LANES
    )  # Arm


def _make_update(
    states: Sequence[torch.Tensor | None],  # parameter, first and second state
    out: Sequence[torch.Tensor | None],
    gradient: torch.Tensor,
    copy: torch.Tensor | None,
    grad_factors: Sequence[float],
    hyperparams: AdamHyperparams | SGDHyperparams,
    rounding: Rounding | None,
) -> _UpdateStruct:
    """Check the tensors, and fill in what both optimizers have."""
    if len(grad_factors) > MAX_GRAD_FACTORS:
        raise ValueError(f"got {len(grad_factors)} factors of the gradient, at most {MAX_GRAD_FACTORS} are applied")
    if len(out) != len(states):
        raise ValueError(f"out has {len(out)} tensors; one is wanted for each of {len(states)} states")
    update, parameter = _UpdateStruct(), states[0]
    assert parameter is not None
    update.numel = parameter.numel()
    if rounding is None:
        rounding = default_rounding(hyperparams)
    update.plain = update.numel - update.numel % rounding.vector_lanes if rounding.vector_lanes else 0
    update.separate, update.roots = rounding.is_fma_free, rounding.sqrt_address
    for field, tensor in zip(("parameter", "first", "second"), states, strict=False):
        setattr(update, field, _checked_address(field, tensor, parameter, (torch.float32,)))
    for field, tensor in zip(("parameter_out", "first_out", "second_out"), out, strict=False):
        setattr(update, field, _checked_address(field, tensor, parameter, (torch.float32,)))
    update.gradient = _checked_address("gradient", gradient, parameter, tuple(DTYPE_CODES))
    update.copy = _checked_address("copy", copy, parameter, tuple(DTYPE_CODES))
    update.gradient_dtype, update.copy_dtype = (
        DTYPE_CODES[gradient.dtype],
        0 if copy is None else DTYPE_CODES[copy.dtype],
    )
    update.factor[:] = [*grad_factors, *(1.0 for _ in range(MAX_GRAD_FACTORS - len(grad_factors)))]
    update.sign = -1.0 if hyperparams.maximize else 1.0
    return update


def _set_adam_constants(update: _UpdateStruct, hyperparams: AdamHyperparams, step: int) -> None:
    """Adam's numbers that are the same for all elements, in double."""
    beta1, beta2 = hyperparams.betas
    correction1, correction2 = 1 - beta1 ** float(step), 1 - beta2 ** float(step)
    update.decay = 1 - hyperparams.lr * hyperparams.weight_decay if hyperparams.decoupled_weight_decay else 1.0
    update.rate = -(hyperparams.lr / correction1)
    update.weight, update.beta2, update.weight2 = 1 - beta1, beta2, 1 - beta2
    update.correction2 = math.sqrt(correction2) if hyperparams.fused else correction2**0.5  # as torch has them
    update.cuda = hyperparams.is_cuda_rounding


def _set_cuda_fused_adam_constants(
    update: _UpdateStruct, hyperparams: AdamHyperparams, beta_powers: tuple[float, float] | None
) -> None:
    """The same in fp32: one operation in double on fp32 numbers, rounded to fp32, is that operation in fp32."""
    if beta_powers is None:
        raise ValueError("fused Adam as on a GPU wants powers: both betas to the power of step, as the GPU has them")
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
    right = tensor.device.type == "cpu" and tensor.dim() == 1 and tensor.is_contiguous() and tensor.dtype in dtypes
    if not right or tensor.numel() != parameter.numel():
        got = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, strides {tensor.stride()}"
        wanted = f"({parameter.numel()},) {' or '.join(map(str, dtypes))} on cpu, contiguous"
        raise ValueError(f"{name} is {got}; wanted is {wanted}")
    return tensor.data_ptr()


def _check_threads(threads: int) -> int:
    if threads < 1:
        raise ValueError(f"threads is {threads}; at least 1 is wanted")
    return threads
