"""Rounding: how this torch rounds on this processor, found by trying.

[Note: found by trying]
An update on the host gives the bits of torch's own update. Those are not the same everywhere: torch compiles its
kernels several times, with and without FMA, and takes the one that the processor (or ``ATEN_CPU_CAPABILITY``) allows;
on x86-64 it takes square roots from MKL, which are not always the correctly rounded ones and differ between
processors. Versions differ, too. So nothing of this is assumed: the first update of a kind steps torch's own optimizer
functions on a few thousand numbers, does the same in each way that the native kernel can round, and keeps the way that
gives every bit. Where none does, updates of that kind are torch's own, which are slower and right by construction.

This is a promise for whole tensors because every element's bits depend on that element alone: torch's kernels give the
same bits at the start of a tensor, in its middle and at its end, in one thread and in many (``fused``, whose last
elements differ, is cut at multiples of its vectors: [Note: equal to torch to the bit]).
tests/test_host_kernels.py asserts that as well, of torch alone.

The trial takes some milliseconds, once in a process for each kind. It runs on a thread of its own, where no mode of the
caller's is on (inference, autocast, a default device, a dispatch mode), draws from no generator of the user's, and
calls functions, not an optimizer, so that no hook of the user's sees it.
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

from zeroshard.optim.cpu.kernels import (
    AdamHyperparams,
    CpuKernels,
    Rounding,
    SGDHyperparams,
    default_rounding,
    load_kernels,
)

OptimizerKind = Literal["adam", "sgd"]
# Tensors of so many elements: in one, enough to meet square roots that MKL rounds otherwise (0.6 % of them); the short
# ones show which elements are left over after whole vectors.
TRIAL_NUMELS = [4096, *[15] * 6]
TRIAL_TOTAL_NUMEL = sum(TRIAL_NUMELS)
TRIAL_STEPS = 3
FP32_ON_CPU: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
LANE_CANDIDATES = (4, 8, 16, 0)
# Large steps: the last bit of everything that is computed on the way decides a bit of the parameter.
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


@functools.cache  # ranks that are threads may try at once: they find the same
def detect_torch_rounding(kind: OptimizerKind, fused: bool) -> Rounding | None:
    """How torch rounds updates of ``kind``, Adam (and AdamW) or SGD, on this processor: [Note: found by trying].

    None: in no way that the native update knows, or there is no native update.

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
    tried = [dataclasses.replace(options, fused=fused) for options in TRIAL_HYPERPARAMS[kind]]
    numbers = [_trial_values(seed) for seed in range(1 + TRIAL_STEPS)]  # a parameter, and its gradients
    wanted = [
        (options, _run_torch(options, foreach, numbers))
        for options in tried
        for foreach in ((False,) if fused else (False, True))
    ]
    for way in _candidate_roundings(tried[0]):
        if all(_is_bitwise_equal(found, _run_native(native, options, way, numbers)) for options, found in wanted):
            return way
    return None


def _candidate_roundings(hyperparams: AdamHyperparams | SGDHyperparams) -> list[Rounding]:
    """All roundings that the kernel knows, the likelier first."""
    lanes = dict.fromkeys((default_rounding(hyperparams).vector_lanes, *(LANE_CANDIDATES if hyperparams.fused else ())))
    has_roots = isinstance(hyperparams, AdamHyperparams) and mkl_sqrt_address() is not None
    roots = (None, mkl_sqrt_address()) if hyperparams.fused else (mkl_sqrt_address(), None)
    return [Rounding(*way) for way in itertools.product((False, True), lanes, roots if has_roots else (None,))]


@functools.cache
def mkl_sqrt_address() -> int | None:
    """The address of the function from which torch takes square roots, where it was built with MKL.

    >>> mkl_sqrt_address() is None or mkl_sqrt_address() > 0
    True
    """
    for place in (str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"), None):
        try:
            return ctypes.cast(ctypes.CDLL(place).vmsSqrt, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def _trial_values(seed: int) -> torch.Tensor:
    """Numbers of many magnitudes, the same on every machine; zeros, subnormal and infinite ones come first."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def drawn(below: int) -> torch.Tensor:
        return torch.randint(below, (TRIAL_TOTAL_NUMEL,), generator=generator, dtype=torch.int32, device="cpu")

    found = (((115 + drawn(17)) << 23) + drawn(1 << 23)).view(torch.float32)  # from 2^-12 to 2^5
    found *= 2 * drawn(2) - 1
    special = torch.tensor([0.0, -0.0, 1e-40, -3e-42, 1e-22, 3e19, torch.inf], **FP32_ON_CPU)
    found[: special.numel()] = special.roll(seed)
    return found


def _run_torch(
    hyperparams: AdamHyperparams | SGDHyperparams, foreach: bool, values: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The parameter and its states after some steps of torch's own."""
    lines = _make_tensors(values)
    parameters, firsts, seconds = (list(torch.split(line, TRIAL_NUMELS)) for line in lines)
    ways: dict[str, Any] = {"foreach": foreach, "fused": hyperparams.fused, "maximize": hyperparams.maximize}
    if isinstance(hyperparams, AdamHyperparams):
        counted = [torch.zeros((), **FP32_ON_CPU) for _ in TRIAL_NUMELS]
        for gradient in values[1:]:
            adam(
                parameters,
                list(torch.split(gradient.clone(), TRIAL_NUMELS)),
                firsts,
                seconds,
                [],
                counted,
                decoupled_weight_decay=hyperparams.decoupled_weight_decay,
                amsgrad=False,
                beta1=hyperparams.betas[0],
                beta2=hyperparams.betas[1],
                lr=hyperparams.lr,
                weight_decay=hyperparams.weight_decay,
                eps=hyperparams.eps,
                **ways,
            )
        return lines
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
            **ways,
        )
    for first, buffer in zip(firsts, buffers, strict=True):
        if buffer is not None:
            first.copy_(buffer)
    return lines


def _run_native(
    native: CpuKernels, hyperparams: AdamHyperparams | SGDHyperparams, rounding: Rounding, values: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The same by the native update."""
    lines = _make_tensors(values)
    for step, gradient in enumerate(values[1:], 1):
        pieces = (torch.split(line, TRIAL_NUMELS) for line in (*lines, gradient))
        for parameter, first, second, g in zip(*pieces, strict=True):
            if isinstance(hyperparams, AdamHyperparams):
                states = parameter, first, second
                native.adam(*states, g, hyperparams, out=states, step=step, rounding=rounding)
            else:
                new = first if hyperparams.momentum else None
                old = new if step > 1 else None
                native.sgd(parameter, old, g, hyperparams, out=(parameter, new), rounding=rounding)
    return lines


def _make_tensors(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """A parameter and room for two states."""
    return [
        values[0].clone(),
        torch.zeros(TRIAL_TOTAL_NUMEL, **FP32_ON_CPU),
        torch.zeros(TRIAL_TOTAL_NUMEL, **FP32_ON_CPU),
    ]


def _is_bitwise_equal(wanted: list[torch.Tensor], got: list[torch.Tensor]) -> bool:
    """Whether all bits are equal. A NaN equals a NaN."""
    return all(
        bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())
        for a, b in zip(wanted, got, strict=True)
    )
