"""Detect how this torch rounds on this CPU, by a trial run.

[Note: detecting torch's rounding]
A CPU update here is bitwise equal to torch's own. Torch's bits are not the same everywhere: torch compiles its kernels
several times, with and without FMA, and takes the variant that the CPU (or ``ATEN_CPU_CAPABILITY``) allows. On x86-64
it takes square roots from MKL, which are not always correctly rounded and differ between CPUs. Torch versions differ,
too. So nothing is assumed. The first update of a kind steps torch's own optimizer functions on a few thousand numbers,
repeats this with each rounding that the native kernel supports, and keeps the one that gives every bit. If none does,
torch's own updates are used for that kind: slower, but correct by construction.

The result holds for tensors of any size, because the bits of an element depend on that element alone: torch's kernels
give the same bits at the start, in the middle and at the end of a tensor, with one thread and with many. (``fused``,
whose last elements differ, is split at multiples of its vectors: [Note: equal to torch to the bit].)
tests/optim/test_cpu_kernels.py asserts this as well, for torch alone.

The trial takes some milliseconds, once per process and kind. It runs on a separate thread, where none of the caller's
modes is active (inference, autocast, default device, dispatch mode). It does not use the user's random generators, and
it calls functions, not an optimizer, so that no user hook sees it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from zeroshard.optim.cpu.kernels import CpuKernels, Rounding, default_rounding, load_kernels
from zeroshard.optim.hyperparams import AdamHyperparams, SGDHyperparams

OptimizerKind = Literal["adam", "sgd"]
# Elements of the trial tensors: the long one has enough for square roots that MKL rounds differently (0.6 % of them);
# the short ones show which elements are the remainder after full vectors.
TRIAL_NUMELS = [4096, *[15] * 6]
TRIAL_TOTAL_NUMEL = sum(TRIAL_NUMELS)
TRIAL_STEPS = 3
FP32_ON_CPU: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
LANE_CANDIDATES = (4, 8, 16, 0)
# Large learning rates, so that the last bit of every intermediate value affects a bit of the parameter.
TRIAL_HYPERPARAMS: dict[OptimizerKind, tuple[AdamHyperparams | SGDHyperparams, ...]] = {
    "adam": (
        AdamHyperparams(lr=0.7, weight_decay=0.1),
        AdamHyperparams(lr=0.7, betas=(0.3, 0.99), weight_decay=0.1, decoupled_weight_decay=False, maximize=True),
    ),
    "sgd": (
        SGDHyperparams(lr=0.7, weight_decay=0.1),
        SGDHyperparams(lr=0.7, momentum=0.9, dampening=0.3, weight_decay=0.1, maximize=True),
        SGDHyperparams(lr=0.7, momentum=0.9, nesterov=True),
    ),
}


@functools.cache  # ranks that are threads may run it concurrently: the results are equal
def detect_torch_rounding(kind: OptimizerKind, fused: bool) -> Rounding | None:
    """Return how torch rounds updates of ``kind`` on this CPU: [Note: detecting torch's rounding].

    None: the native kernels do not support this rounding, or there are no native kernels.

    >>> load_kernels() is None or detect_torch_rounding("sgd", fused=False) in (Rounding(), Rounding(is_fma_free=True))
    True
    """
    native = load_kernels()
    if native is None:
        return None
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_detect, native, kind, fused).result()


@torch.no_grad()
def _detect(native: CpuKernels, kind: OptimizerKind, fused: bool) -> Rounding | None:
    trials = [dataclasses.replace(hyperparams, fused=fused) for hyperparams in TRIAL_HYPERPARAMS[kind]]
    values = [_trial_values(seed) for seed in range(1 + TRIAL_STEPS)]  # a parameter and its gradients
    expected = [
        (hyperparams, _run_torch(hyperparams, foreach, values))
        for hyperparams in trials
        for foreach in ((False,) if fused else (False, True))
    ]
    for rounding in _candidate_roundings(trials[0]):
        if all(
            _is_bitwise_equal(results, _run_native(native, hyperparams, rounding, values))
            for hyperparams, results in expected
        ):
            return rounding
    return None


def _candidate_roundings(hyperparams: AdamHyperparams | SGDHyperparams) -> list[Rounding]:
    """Return all roundings that the kernel supports, the most likely first."""
    lanes = dict.fromkeys((default_rounding(hyperparams).vector_lanes, *(LANE_CANDIDATES if hyperparams.fused else ())))
    has_mkl_sqrt = isinstance(hyperparams, AdamHyperparams) and mkl_sqrt_address() is not None
    sqrt_addresses = (None, mkl_sqrt_address()) if hyperparams.fused else (mkl_sqrt_address(), None)
    return [
        Rounding(*fields)
        for fields in itertools.product((False, True), lanes, sqrt_addresses if has_mkl_sqrt else (None,))
    ]


@functools.cache
def mkl_sqrt_address() -> int | None:
    """Return the address of MKL's square root function, which torch uses if it was built with MKL; else None.

    >>> mkl_sqrt_address() is None or mkl_sqrt_address() > 0
    True
    """
    for path in (str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"), None):
        try:
            return ctypes.cast(ctypes.CDLL(path).vmsSqrt, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def _trial_values(seed: int) -> torch.Tensor:
    """Return numbers of many magnitudes, equal on all machines; zeros, subnormals and infinities come first."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(below: int) -> torch.Tensor:
        return torch.randint(below, (TRIAL_TOTAL_NUMEL,), generator=generator, dtype=torch.int32, device="cpu")

    values = (((115 + draw(17)) << 23) + draw(1 << 23)).view(torch.float32)  # from 2^-12 to 2^5
    values *= 2 * draw(2) - 1
    special = torch.tensor([0.0, -0.0, 1e-40, -3e-42, 1e-22, 3e19, torch.inf], **FP32_ON_CPU)
    values[: special.numel()] = special.roll(seed)
    return values


def _run_torch(
    hyperparams: AdamHyperparams | SGDHyperparams, foreach: bool, values: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the parameter and its states after some steps with torch."""
    tensors = _make_tensors(values)
    parameters, firsts, seconds = (list(torch.split(tensor, TRIAL_NUMELS)) for tensor in tensors)
    options: dict[str, Any] = {"foreach": foreach, "fused": hyperparams.fused, "maximize": hyperparams.maximize}
    if isinstance(hyperparams, AdamHyperparams):
        steps = [torch.zeros((), **FP32_ON_CPU) for _ in TRIAL_NUMELS]
        for gradient in values[1:]:
            adam(
                parameters,
                list(torch.split(gradient.clone(), TRIAL_NUMELS)),
                firsts,
                seconds,
                [],
                steps,
                decoupled_weight_decay=hyperparams.decoupled_weight_decay,
                amsgrad=False,
                beta1=hyperparams.betas[0],
                beta2=hyperparams.betas[1],
                lr=hyperparams.lr,
                weight_decay=hyperparams.weight_decay,
                eps=hyperparams.eps,
                **options,
            )
        return tensors
    buffers: list[torch.Tensor | None] = [None for _ in TRIAL_NUMELS]
    for gradient in values[1:]:
        sgd(
            parameters,
            list(torch.split(gradient.clone(), TRIAL_NUMELS)),
            buffers,
            weight_decay=hyperparams.weight_decay,
            momentum=hyperparams.momentum,
            lr=hyperparams.lr,
            dampening=hyperparams.dampening,
            nesterov=hyperparams.nesterov,
            **options,
        )
    for first, buffer in zip(firsts, buffers, strict=True):
        if buffer is not None:
            first.copy_(buffer)
    return tensors


def _run_native(
    native: CpuKernels, hyperparams: AdamHyperparams | SGDHyperparams, rounding: Rounding, values: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the parameter and its states after the same steps with the native kernels."""
    tensors = _make_tensors(values)
    for step, gradient in enumerate(values[1:], 1):
        pieces = (torch.split(tensor, TRIAL_NUMELS) for tensor in (*tensors, gradient))
        for parameter, first, second, g in zip(*pieces, strict=True):
            if isinstance(hyperparams, AdamHyperparams):
                states = parameter, first, second
                native.adam(*states, g, hyperparams, out=states, step=step, rounding=rounding)
            else:
                new = first if hyperparams.momentum else None
                old = new if step > 1 else None
                native.sgd(parameter, old, g, hyperparams, out=(parameter, new), rounding=rounding)
    return tensors


def _make_tensors(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a parameter and zeros for two states."""
    return [
        values[0].clone(),
        torch.zeros(TRIAL_TOTAL_NUMEL, **FP32_ON_CPU),
        torch.zeros(TRIAL_TOTAL_NUMEL, **FP32_ON_CPU),
    ]


def _is_bitwise_equal(wanted: list[torch.Tensor], got: list[torch.Tensor]) -> bool:
    """Whether all bits are equal. Any two NaNs are equal."""
    return all(
        bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())
        for a, b in zip(wanted, got, strict=True)
    )
