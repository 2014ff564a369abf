"""Floating-point operations: what a token costs and what a device could do at most; together they make the MFU."""

from __future__ import annotations

import re

from torch import nn

_PEAK_FLOPS: tuple[
    tuple[tuple[str, ...], dict[str, float]], ...
] = (  # FLOP/s of dense matrices; the first match counts
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
_VARIANT_WORDS = frozenset(
    {"mig", "nvl", "laptop", "d"}
)  # words that make it another device: a slice of one, a slower one


def count_matmul_params(model: nn.Module) -> tuple[int, int]:
    """How many parameters every token is multiplied with: (trained, frozen).

    All but the tables that rows are only looked up in. Of a mixture of experts, which a token meets few of, all count.

    >>> count_matmul_params(nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)))
    (800, 0)
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    elsewhere = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    counted = [p for p in model.parameters() if id(p) not in tables or id(p) in elsewhere]  # a tied head multiplies
    trained = sum(p.numel() for p in counted if p.requires_grad)
    return trained, sum(p.numel() for p in counted) - trained


def flops_per_token(trained: int, frozen: int, layers: int, width: int, sequence: int) -> float:
    """Operations that forward and backward of a transformer need for one token.

    For each parameter of a matrix a multiplication and an addition, three times (forward, and backward to inputs and to
    weights), or twice where it is frozen; and 12 · layers · width · sequence for the scores of attention and what they
    weigh. What activation checkpointing computes a second time is not counted: the MFU asks for the work needed, not
    the work done.

    >>> f"{flops_per_token(trained=124_000_000, frozen=0, layers=12, width=768, sequence=1024):.3g}"
    '8.57e+08'
    """
    return 6.0 * trained + 4.0 * frozen + 12.0 * layers * width * sequence


def peak_flops(device_name: str, precision: str) -> float | None:
    """The most FLOP/s a device does in "bf16", "fp16" or "fp32" by its maker's data sheet, or None when not known here.

    `device_name` is what `torch.cuda.get_device_name()` says.

    >>> peak_flops("NVIDIA A100-SXM4-80GB", "bf16"), peak_flops("Tesla T4", "fp16")
    (312000000000000.0, None)
    """
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    if words & _VARIANT_WORDS:
        return None
    for wanted, peaks in _PEAK_FLOPS:
        if words.issuperset(wanted):
            return peaks.get(precision)
    return None
