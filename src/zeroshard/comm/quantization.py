"""Quantizer: tensors as 8-bit values with a scale per block, as ``Config.gather_dtype`` and ``reduce_wire`` send them.

[Note: 8-bit payloads]
The payload of n elements has a byte for each, and a scale in bf16 for each block of 64; it is padded to 16 bytes::

    | value 0 | value 1 | …      | value n-1 | scale of block 0 | scale of block 1 | …    | padding |

Parameters and shards start at multiples of 64 elements. So a block never spans two parameters or two ranks, and for
both n is a multiple of 64. The scale of a block is its largest magnitude m, divided by the largest 8-bit value and
rounded up to bf16, so that no value overflows. An element x is restored with an error of at most

    int8           m / 254 · (1 + 2**-7)                              half a step
    fp8 (e4m3)     max(|x| / 16, m / 448 · 2**-10 · (1 + 2**-7))      half a step, which is larger for larger values

plus the rounding to the dtype that it is restored in. A block with NaN or infinity is restored as NaN: an overflow is
never hidden. Blocks of zeros are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from zeroshard.utils.kernel_loader import KernelLoader

BLOCK_NUMEL = 64  # elements per scale
SCALE_BYTES = 2
_ALIGN_BYTES = 16  # of a payload, for vector loads
_CHUNK_NUMEL = 2**18  # elements that torch's operations handle at once: their fp32 copies stay in the cache
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def payload_bytes(numel: int) -> int:
    """Return the bytes of a payload: see [Note: 8-bit payloads].

    >>> payload_bytes(64), payload_bytes(2**20) / 2**20
    (80, 1.03125)
    """
    return -(-(numel + numel // BLOCK_NUMEL * SCALE_BYTES) // _ALIGN_BYTES) * _ALIGN_BYTES


class Quantizer:
    """Converts between tensors and payloads. Triton on a GPU, torch's operations elsewhere.

    >>> quantizer = Quantizer("int8", torch.device("cpu"))
    >>> values, restored = torch.linspace(-1, 1, 64), torch.empty(64)
    >>> payloads = torch.empty(1, payload_bytes(64), dtype=torch.uint8)
    >>> quantizer.quantize(payloads, values)
    >>> quantizer.dequantize(restored, payloads)
    >>> bool((values - restored).abs().max() <= 1 / 254 * (1 + 2**-7))
    True
    """

    def __init__(self, dtype: str, device: torch.device) -> None:
        self.dtype = dtype
        self._kernels = _find_kernels(dtype, device)

    @property
    def next_hop(self) -> Quantizer:
        """The quantizer of a second hop."""
        return self

    def quantize(self, payloads: torch.Tensor, values: torch.Tensor) -> None:
        """Write the payloads of consecutive parts of ``values``, one per row of ``payloads``."""
        if kernels := self._kernels_for(payloads):
            kernels.quantize(payloads, values)
            return
        for part, bytes_, scales in self._chunks(payloads, values):
            blocks = part.view(-1, BLOCK_NUMEL).float()
            largest = blocks.abs().amax(1)
            quotient = (largest / _LARGEST[self.dtype]).view(torch.int32)
            rounded_up = ((quotient + 0xFFFF) & ~0xFFFF).view(torch.float32)
            scale = torch.where(largest.isfinite(), rounded_up, float("nan"))
            scales.copy_(scale)
            scaled = blocks / torch.where(scale == 0, 1.0, scale).unsqueeze(1)
            bytes_.copy_((scaled.round_() if self.dtype == "int8" else scaled).view(-1))

    def dequantize(self, values: torch.Tensor, payloads: torch.Tensor) -> None:
        """Restore consecutive parts of ``values``, one from each row of ``payloads``."""
        if kernels := self._kernels_for(payloads):
            kernels.dequantize(values, payloads)
            return
        largest = torch.finfo(values.dtype).max
        for part, bytes_, scales in self._chunks(payloads, values):
            # the step of a rounded scale may lead beyond the range of fp16
            part.copy_(self._restore(bytes_, scales).clamp_(-largest, largest))

    def sum(self, output: torch.Tensor, payloads: torch.Tensor, factor: float) -> None:
        """Write ``factor`` times the sum of all rows' values. Summed in fp32, in the order of the rows."""
        if kernels := self._kernels_for(payloads):
            kernels.sum(output, payloads, factor)
            return
        rows = [list(self._chunks(row.unsqueeze(0), output)) for row in payloads]
        for chunks in zip(*rows, strict=True):
            total = self._restore(*chunks[0][1:])
            for _, bytes_, scales in chunks[1:]:
                total += self._restore(bytes_, scales)
            chunks[0][0].copy_(total * factor)

    def _kernels_for(self, payloads: torch.Tensor) -> Any:
        """Return the kernels, or None where torch's operations have to do; kernels index a part with 32 bits."""
        return self._kernels if payloads.is_cuda and payloads.shape[1] < 2**31 else None

    def _chunks(
        self, payloads: torch.Tensor, values: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield corresponding chunks of the values, of their bytes and of their scales."""
        parts = values.view(len(payloads), -1)
        numel = parts.shape[1]
        for part, payload in zip(parts, payloads, strict=True):
            bytes_ = payload[:numel].view(_DTYPES[self.dtype])
            scales = payload[numel : numel + numel // BLOCK_NUMEL * SCALE_BYTES].view(torch.bfloat16)
            yield from zip(
                part.split(_CHUNK_NUMEL),
                bytes_.split(_CHUNK_NUMEL),
                scales.split(_CHUNK_NUMEL // BLOCK_NUMEL),
                strict=True,
            )

    @staticmethod
    def _restore(bytes_: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (bytes_.float().view(-1, BLOCK_NUMEL) * scales.float().unsqueeze(1)).view(-1)

    def exchange_buffers(self, buffer: torch.Tensor, numel: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return payloads to send and payloads to receive, [parts, bytes], of ``numel`` elements, in a buffer."""
        nbytes = parts * payload_bytes(numel // parts)
        sent, received = buffer.view(torch.uint8)[: 2 * nbytes].view(2, parts, -1)
        return sent, received


class ErrorFeedback(Quantizer):
    """A quantizer of one tensor that adds what its last payload could not express to the next one.

    Parts of the tensor that have no values this time are sent as zeros, and keep what they have left: a parameter that
    no rank uses must not get a gradient, which would count in the norm, and which no step would apply.

    >>> feedback = ErrorFeedback("int8", torch.zeros(64))
    >>> values, payloads = torch.linspace(-1, 1, 64), torch.empty(1, payload_bytes(64), dtype=torch.uint8)
    >>> restored, total = torch.empty(64), torch.zeros(64)
    >>> for _ in range(100):
    ...     feedback.quantize(payloads, values.clone())
    ...     feedback.dequantize(restored, payloads)
    ...     total += restored
    >>> bool((total / 100 - values).abs().max() < 1e-4)
    True
    """

    def __init__(self, dtype: str, residual: torch.Tensor, find_absent: Callable[[], list[slice]] = list) -> None:
        """``find_absent`` returns the parts that have no values; they share no block with the others."""
        super().__init__(dtype, residual.device)
        self.residual, self._find_absent = residual, find_absent

    @property
    def next_hop(self) -> Quantizer:
        """The quantizer of the sums."""
        return Quantizer(self.dtype, self.residual.device)

    def quantize(self, payloads: torch.Tensor, values: torch.Tensor) -> None:
        """Write the payloads of ``values``, which get the residual added; keep the new residual."""
        absent = self._find_absent()
        values.add_(self.residual)
        for part in absent:
            values[part].zero_()
        super().quantize(payloads, values)
        for part in absent:  # what is left of it stays
            values[part].copy_(self.residual[part])
        self.dequantize(self.residual, payloads)
        # a gradient that is not finite is seen by all ranks, and does not come back in later steps
        torch.sub(values, self.residual, out=self.residual).nan_to_num_(0.0, 0.0, 0.0)


def exchange_numel(numel: int, parts: int, dtype: torch.dtype) -> int:
    """Return the elements of a buffer in ``dtype`` for :meth:`Quantizer.exchange_buffers`.

    >>> exchange_numel(2**20, 4, torch.bfloat16) / 2**20
    1.03125
    """
    return -(-2 * parts * payload_bytes(numel // parts) // dtype.itemsize)


def _find_kernels(dtype: str, device: torch.device) -> Any:
    """Return the Triton kernels, or None where torch's operations have to do."""
    if device.type != "cuda" or (dtype == "fp8" and torch.cuda.get_device_capability(device) < (8, 9)):
        return None
    return KERNEL_LOADERS[dtype].load(device)


def _build_kernels(device: torch.device, dtype: str) -> Any:
    from zeroshard.comm.quantization_kernels import QuantizationKernels  # imported here because it imports Triton

    return QuantizationKernels(device, _LARGEST[dtype], is_fp8=dtype == "fp8")


def _self_test(kernels: Any, device: torch.device, dtype: str) -> None:
    """Raise if kernels do not compile, or their results differ from torch's."""
    values = torch.linspace(-1, 3, 6 * BLOCK_NUMEL, device=device).bfloat16()
    found = []
    for each in (kernels, Quantizer(dtype, torch.device("cpu"))):  # the latter computes by torch on any device
        payloads = torch.zeros(2, payload_bytes(values.numel() // 2), dtype=torch.uint8, device=device)
        restored, total = torch.zeros_like(values), torch.zeros_like(values[: values.numel() // 2])
        each.quantize(payloads, values)
        each.dequantize(restored, payloads)
        each.sum(total, payloads, 0.5)
        found.append([payloads, restored, total])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


KERNEL_LOADERS = {
    dtype: KernelLoader(f"{dtype} collectives", partial(_build_kernels, dtype=dtype), partial(_self_test, dtype=dtype))
    for dtype in _DTYPES
}
