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
fused Adam of a GPU in fp32, from fp32, with the GPU's own powers of beta (``powers.py``).

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
"""

from __future__ import annotations

import ctypes
import functools
import math
import platform
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from zeroshard.host.crew import Crew, Running
from zeroshard.host.library import NotBuiltError, load_library
from zeroshard.host.options import AdamOptions, SGDOptions

SOURCE = Path(__file__).with_name("kernels.c")
LANES = 8 if platform.machine() in ("x86_64", "AMD64") else 4  # fp32 elements of a vector in torch's fused kernels
DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # as kernels.c numbers them
FACTORS = 2
_building = threading.Lock()


class _Update(ctypes.Structure):
    """kernels.c's ``struct update``."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("parameter", "first", "second", "gradient")),
        *((name, ctypes.c_void_p) for name in ("parameter_out", "first_out", "second_out", "copy")),
        *((name, ctypes.c_int64) for name in ("numel", "plain")),
        *((name, ctypes.c_int32) for name in ("gradient_dtype", "copy_dtype")),
        ("factor", ctypes.c_float * FACTORS),
        *((name, ctypes.c_float) for name in ("sign", "l2", "decay", "rate")),
        *((name, ctypes.c_float) for name in ("beta1", "weight", "beta2", "weight2", "correction2", "eps")),
        *((name, ctypes.c_float) for name in ("momentum", "undamped")),
        *((name, ctypes.c_int32) for name in ("begins", "nesterov", "cuda", "separate")),
        ("roots", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Rounding:
    """Where an update rounds: what differs between the kernels of one torch and another, and between processors."""

    separate: bool = False
    """Products are rounded before they are added: torch uses no FMA."""
    lanes: int = 1
    """Of `fused`: elements after the last multiple of it are "other", and with 0 all are."""
    roots: int | None = None
    """The address of the function that takes Adam's square roots (MKL's); None: they are correctly rounded."""


class Kernels:
    """The native updates. Calls let other Python threads run, and use as many threads as they are told.

    ``out`` is where the new values go: the tensors they are computed from, or others. Old values are left as they are
    in the second case, so an update may be dropped. ``copy`` receives the new parameter in its own dtype as well.

    With a ``crew`` a call only begins the update, behind those that the crew was given before: it reads and writes
    until the ``end()`` of what is returned. Without, it is over when the call returns.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for function in (library.zeroshard_adam, library.zeroshard_sgd):
            function.argtypes, function.restype = (ctypes.POINTER(_Update), ctypes.c_int), None
        for function in (library.zeroshard_adam_begin, library.zeroshard_sgd_begin):
            function.argtypes = ctypes.c_void_p, ctypes.POINTER(_Update), ctypes.c_int
            function.restype = ctypes.c_void_p

    def crew(self) -> Crew:
        """A new crew, for updates that are begun one after the other."""
        return Crew(self._library)

    def adam(
        self,
        parameter: torch.Tensor,  # fp32, as the two moments
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        gradient: torch.Tensor,  # fp32, bf16 or fp16
        options: AdamOptions,
        *,
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        step: int,
        copy: torch.Tensor | None = None,
        factors: Sequence[float] = (),
        threads: int = 1,
        powers: tuple[float, float] | None = None,
        crew: Crew | None = None,
        rounding: Rounding | None = None,
    ) -> Running:
        """Update one stretch. ``step`` counts this update too: 1 for the first.

        ``powers``: both betas to the power of ``step`` as a GPU has them in fp32, for what is fused there.
        ``rounding``: as ``rounding.py`` found it; without, square roots are correctly rounded and sums are fused.

        >>> p, m, v = torch.ones(3), torch.zeros(3), torch.zeros(3)
        >>> new, half = tuple(torch.empty(3) for _ in range(3)), torch.empty(3, dtype=torch.bfloat16)
        >>> if found := kernels():
        ...     begun = found.adam(p, m, v, torch.ones(3), AdamOptions(lr=0.5), out=new, step=1, copy=half)
        ...     print(half.tolist(), p.tolist())
        [0.5, 0.5, 0.5] [1.0, 1.0, 1.0]
        """
        if step < 1:
            raise ValueError(f"step is {step}; it counts this update too, so the first is 1")
        update = _update((parameter, exp_avg, exp_avg_sq), out, gradient, copy, factors, options, rounding)
        update.l2 = 0.0 if options.decoupled else options.weight_decay
        update.eps = options.eps
        if options.cuda and options.fused:
            _constants_of_a_gpu(update, options, powers)
        else:
            _constants(update, options, step)
        tensors = (parameter, exp_avg, exp_avg_sq, gradient, copy, *out)
        return self._run("zeroshard_adam", update, _positive(threads), crew, tensors)

    def sgd(
        self,
        parameter: torch.Tensor,  # fp32, as the momentum
        momentum: torch.Tensor | None,
        gradient: torch.Tensor,  # fp32, bf16 or fp16
        options: SGDOptions,
        *,
        out: tuple[torch.Tensor, torch.Tensor | None],
        copy: torch.Tensor | None = None,
        factors: Sequence[float] = (),
        threads: int = 1,
        crew: Crew | None = None,
        rounding: Rounding | None = None,
    ) -> Running:
        """Update one stretch. ``momentum`` is None without momentum, and the first time, when it becomes the gradient.

        >>> p, buffer = torch.ones(3), torch.empty(3)
        >>> if found := kernels():
        ...     begun = found.sgd(p, None, torch.ones(3), SGDOptions(lr=0.5, momentum=0.9), out=(p, buffer))
        ...     print(p.tolist(), buffer.tolist())
        [0.5, 0.5, 0.5] [1.0, 1.0, 1.0]
        """
        if (out[1] is not None) != (options.momentum != 0):
            wanted = "a tensor for the momentum" if options.momentum else "None in its place, as nothing is kept"
            got = "None" if out[1] is None else "a tensor"
            raise ValueError(f"out[1] is {got}; momentum {options.momentum} wants {wanted}")
        if momentum is not None and out[1] is None:
            raise ValueError("got a momentum tensor with momentum 0; give None")
        update = _update((parameter, momentum), out, gradient, copy, factors, options, rounding)
        update.l2, update.decay, update.rate = options.weight_decay, 1.0, -options.lr
        update.momentum, update.undamped = options.momentum, 1 - options.dampening
        update.begins, update.nesterov = momentum is None, options.nesterov
        tensors = (parameter, momentum, gradient, copy, *out)
        return self._run("zeroshard_sgd", update, _positive(threads), crew, tensors)

    def _run(
        self, name: str, update: _Update, threads: int, crew: Crew | None, tensors: tuple[torch.Tensor | None, ...]
    ) -> Running:
        if crew is None:
            getattr(self._library, name)(ctypes.byref(update), threads)
            return Running()
        call = getattr(self._library, f"{name}_begin")(crew.handle, ctypes.byref(update), threads)
        return Running(crew, call, tensors)


def kernels() -> Kernels | None:
    """Return the native updates, built at the first call; None where they cannot be, with one warning.

    >>> kernels() is kernels()
    True
    """
    with _building:  # ranks may be threads: one builds, and one warns
        return _kernels()


@functools.cache
def _kernels() -> Kernels | None:
    try:
        return Kernels(load_library(SOURCE))
    except NotBuiltError as error:
        warnings.warn(
            f"zeroshard's host kernels could not be built, so torch's own slower update runs on the host: {error}. "
            "Install a C compiler (gcc or clang, with the C library's headers), or name one in $CC",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def usual_rounding(options: AdamOptions | SGDOptions) -> Rounding:
    """How torch rounds on a processor with FMA, where its square roots are correctly rounded; and on every GPU.

    >>> usual_rounding(SGDOptions(lr=0.1))
    Rounding(separate=False, lanes=1, roots=None)
    """
    if not options.fused:
        return Rounding()
    return Rounding(lanes=0 if LANES == 4 and isinstance(options, AdamOptions) else LANES)  # Arm


def _update(
    states: Sequence[torch.Tensor | None],  # parameter, first and second state
    out: Sequence[torch.Tensor | None],
    gradient: torch.Tensor,
    copy: torch.Tensor | None,
    factors: Sequence[float],
    options: AdamOptions | SGDOptions,
    rounding: Rounding | None,
) -> _Update:
    """Check the tensors, and fill in what both optimizers have."""
    if len(factors) > FACTORS:
        raise ValueError(f"got {len(factors)} factors of the gradient, at most {FACTORS} are applied")
    if len(out) != len(states):
        raise ValueError(f"out has {len(out)} tensors; one is wanted for each of {len(states)} states")
    update, parameter = _Update(), states[0]
    assert parameter is not None
    update.numel = parameter.numel()
    if rounding is None:
        rounding = usual_rounding(options)
    update.plain = update.numel - update.numel % rounding.lanes if rounding.lanes else 0
    update.separate, update.roots = rounding.separate, rounding.roots
    for field, tensor in zip(("parameter", "first", "second"), states, strict=False):
        setattr(update, field, _address(field, tensor, parameter, (torch.float32,)))
    for field, tensor in zip(("parameter_out", "first_out", "second_out"), out, strict=False):
        setattr(update, field, _address(field, tensor, parameter, (torch.float32,)))
    update.gradient = _address("gradient", gradient, parameter, tuple(DTYPES))
    update.copy = _address("copy", copy, parameter, tuple(DTYPES))
    update.gradient_dtype, update.copy_dtype = DTYPES[gradient.dtype], 0 if copy is None else DTYPES[copy.dtype]
    update.factor[:] = [*factors, *(1.0 for _ in range(FACTORS - len(factors)))]
    update.sign = -1.0 if options.maximize else 1.0
    return update


def _constants(update: _Update, options: AdamOptions, step: int) -> None:
    """Adam's numbers that are the same for all elements, in double."""
    beta1, beta2 = options.betas
    correction1, correction2 = 1 - beta1 ** float(step), 1 - beta2 ** float(step)
    update.decay = 1 - options.lr * options.weight_decay if options.decoupled else 1.0
    update.rate = -(options.lr / correction1)
    update.weight, update.beta2, update.weight2 = 1 - beta1, beta2, 1 - beta2
    update.correction2 = math.sqrt(correction2) if options.fused else correction2**0.5  # as torch has them
    update.cuda = options.cuda


def _constants_of_a_gpu(update: _Update, options: AdamOptions, powers: tuple[float, float] | None) -> None:
    """The same in fp32: one operation in double on fp32 numbers, rounded to fp32, is that operation in fp32."""
    if powers is None:
        raise ValueError("fused Adam as on a GPU wants powers: both betas to the power of step, as the GPU has them")
    beta1, beta2, lr = (_fp32(value) for value in (*options.betas, options.lr))
    correction1, correction2 = (_fp32(1 - power) for power in powers)
    update.decay = -_fp32(lr * _fp32(options.weight_decay)) if options.decoupled else 0.0
    update.rate = -_fp32(lr / correction1)
    update.beta1, update.beta2 = beta1, beta2
    update.correction2 = math.sqrt(correction2)
    update.cuda = 2


def _fp32(value: float) -> float:
    return ctypes.c_float(value).value


def _address(
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


def _positive(threads: int) -> int:
    if threads < 1:
        raise ValueError(f"threads is {threads}; at least 1 is wanted")
    return threads
