"""Floating-point operations per token and peak rates of devices; together they give the MFU."""

from __future__ import annotations

import re

from torch import nn

# words of the device name → FLOP/s of dense matrix products by precision; the first match counts
_PEAK_FLOPS: tuple[tuple[tuple[str, ...], dict[str, float]], ...] = (
    (("b200",), {"bf16": 2250e12, "fp16": 2250e12}),
    (("h200",), {"bf16": 989e12, "fp16": 989e12}),
    (("h100", "pcie"), {"bf16": 756e12, "fp16": 756e12}),
    (("h100",), {"bf16": 989e12, "fp16": 989e12}),  # SXM, named "H100 80GB HBM3"
    (("a100",), {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12}),
    (("l40s",), {"bf16": 362e12, "fp16": 362e12}),
    (("l4",), {"bf16": 121e12, "fp16": 121e12}),
    (("a10",), {"bf16": 125e12, "fp16": 125e12}),
    (("rtx", "4090"), {"bf16": 165e12, "fp16": 165e12}),  # with fp32 accumulation, as in torch
    (("v100",), {"fp16": 125e12}),  # its tensor cores have no bf16
)
_VARIANT_WORDS = frozenset({"mig", "nvl", "laptop", "d"})  # mark other devices: partitions or slower variants


def count_matmul_params(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters that every token is multiplied with: (trained, frozen).

    Embedding tables that are only looked up do not count. In a mixture of experts all experts count, although a token
    uses only a few.

    >>> count_matmul_params(nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)))
    (800, 0)
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    used_elsewhere = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    counted = [
        p for p in model.parameters() if id(p) not in tables or id(p) in used_elsewhere
    ]  # a tied head is a matrix product
    trained = sum(p.numel() for p in counted if p.requires_grad)
    return trained, sum(p.numel() for p in counted) - trained


def flops_per_token(trained: int, frozen: int, layers: int, width: int, sequence: int) -> float:
    """Return the operations that forward and backward of a transformer need for one token.

    Each parameter of a matrix needs a multiplication and an addition, three times (forward, backward to inputs and
    backward to weights), or twice if it is frozen. Attention scores and the weighted sum add 12 · layers · width ·
    sequence. Recomputation by activation checkpointing does not count: the MFU measures the required work.

    >>> f"{flops_per_token(trained=124_000_000, frozen=0, layers=12, width=768, sequence=1024):.3g}"
    '8.57e+08'
    """
    return 6.0 * trained + 4.0 * frozen + 12.0 * layers * width * sequence


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return a device's peak FLOP/s in "bf16", "fp16" or "fp32" by its data sheet, None if unknown.

    `device_name` is the result of `torch.cuda.get_device_name()`.

    >>> peak_flops("NVIDIA A100-SXM4-80GB", "bf16"), peak_flops("Tesla T4", "fp16")
    (312000000000000.0, None)
    """
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    if words & _VARIANT_WORDS:
        return None
    for device_words, peaks in _PEAK_FLOPS:
        if words.issuperset(device_words):
            return peaks.get(precision)
    return None
