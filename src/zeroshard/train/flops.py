"""Floating-point operations: what a token costs and what a device could do at most; together they make the MFU."""

from __future__ import annotations

import re

_PEAKS: tuple[tuple[tuple[str, ...], dict[str, float]], ...] = (  # FLOP/s of dense matrices; the first match counts
    (("b200",), {"bf16": 2250e12, "fp16": 2250e12}),
    (("h200",), {"bf16": 989e12, "fp16": 989e12}),
    (("h100", "pcie"), {"bf16": 756e12, "fp16": 756e12}),
    (("h100",), {"bf16": 989e12, "fp16": 989e12}),  # SXM, whose name says "H100 80GB HBM3"
    (("a100",), {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12}),
    (("l40s",), {"bf16": 362e12, "fp16": 362e12}),
    (("l4",), {"bf16": 121e12, "fp16": 121e12}),
    (("a10",), {"bf16": 125e12, "fp16": 125e12}),
    (("rtx", "4090"), {"bf16": 165e12, "fp16": 165e12}),  # summed in fp32, as torch does
    (("v100",), {"fp16": 125e12}),  # no bf16 in its matrix units
)
_OTHERS = frozenset({"mig", "nvl", "laptop", "d"})  # words that make it another device: a slice of one, a slower one


def flops_per_token(parameters: int, layers: int, width: int, sequence: int) -> float:
    """Operations that forward and backward of a transformer need for one token.

    6Ψ for the matrices (a multiplication and an addition for each parameter, three times: forward, and backward to
    inputs and to weights) and 12 · layers · width · sequence for the scores of attention and what they weigh. What
    activation checkpointing computes a second time is not counted: the MFU asks for the work needed, not the work done.

    >>> f"{flops_per_token(parameters=124_000_000, layers=12, width=768, sequence=1024):.3g}"
    '8.57e+08'
    """
    return 6.0 * parameters + 12.0 * layers * width * sequence


def peak_flops(device_name: str, precision: str) -> float | None:
    """The most FLOP/s a device does in "bf16", "fp16" or "fp32" by its maker's data sheet, or None when not known here.

    `device_name` is what `torch.cuda.get_device_name()` says.

    >>> peak_flops("NVIDIA A100-SXM4-80GB", "bf16"), peak_flops("Tesla T4", "fp16")
    (312000000000000.0, None)
    """
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    if words & _OTHERS:
        return None
    for wanted, peaks in _PEAKS:
        if words.issuperset(wanted):
            return peaks.get(precision)
    return None
