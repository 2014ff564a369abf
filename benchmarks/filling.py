"""Filling: where a model's states rest so that device, host and disk are filled alike. Pure arithmetic.

Under bf16 with Adam a parameter takes 16 bytes: 2 in computation, 2 of gradient, 12 of its fp32 master copy and two
moments. A tier of S bytes, of which W are taken for other things, has room for s·S - W bytes of states when it is
filled to a share s. Together the tiers have room for all 16Ψ at

    s = (16Ψ + ΣW) / ΣS

and from the rooms follows what rests where. The disk takes optimizer states alone. The device keeps the parameters in
computation, as far as they fit, and of the rest what it has room for, gradients with their optimizer states. The host
has what is left, and the gradients of what is on disk: they are worked on there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zeroshard.presets import GPTPreset

PARAMETER, GRADIENT, OPTIMIZER = 2, 2, 12  # bytes of each
EACH = PARAMETER + GRADIENT + OPTIMIZER
TIERS = ("device", "host", "disk")
MOST = {"device": 0.98, "host": 0.97, "disk": 1.0}  # of a tier that may be filled; a process without memory is killed
BUCKET, RING, GRANULE, SLOTS = 2**27, 2, 2**26, 3  # zeroshard's defaults, in elements and buffers
DISK_GRANULE = 2**24  # the same for states on disk
LIBRARIES = 1e9  # bytes of a GPU that NCCL and others take beside torch, the context itself not counted
PROCESS = 2e9  # bytes of the host that a process still takes once it has opened a GPU; 1.7 were seen


@dataclass(frozen=True)
class Filling:
    """Fractions of states by tier, and the bytes that each tier then holds, what is taken for other things included."""

    share: float
    optimizer: dict[str, float]  # by tier, the device's left out
    parameters: dict[str, float]
    held: dict[str, float]

    def too_large(self, space: Mapping[str, float]) -> str | None:
        """Say which tier would be overfilled, if one would."""
        for tier in TIERS:
            most = MOST[tier] * space.get(tier, 0.0)
            if self.held[tier] > most:
                return f"{self.held[tier] / 1e9:.4g} GB are needed on {tier}, at most {most / 1e9:.4g} may be taken"
        return None


def fill(parameters: int, space: Mapping[str, float], taken: Mapping[str, float]) -> Filling:
    """Say what rests where; ``space`` and ``taken`` are bytes by tier."""
    share = (EACH * parameters + sum(taken.values())) / sum(space.values())
    room = {tier: max(0.0, share * space.get(tier, 0.0) - taken.get(tier, 0.0)) for tier in TIERS}
    disk = min(1.0, room["disk"] / (OPTIMIZER * parameters))
    outside = max(0.0, 1 - room["device"] / (PARAMETER * parameters))  # of the parameters in computation
    left = room["device"] - (1 - outside) * PARAMETER * parameters
    device = min(1 - disk, max(0.0, left / ((GRADIENT + OPTIMIZER) * parameters)))
    host = max(0.0, 1 - disk - device)
    each = {  # bytes of a parameter
        "device": (1 - outside) * PARAMETER + device * (GRADIENT + OPTIMIZER),
        "host": outside * PARAMETER + (1 - device) * GRADIENT + host * OPTIMIZER,
        "disk": disk * OPTIMIZER,
    }
    held = {tier: parameters * each[tier] + taken.get(tier, 0.0) for tier in TIERS}
    optimizer = {tier: part for tier, part in (("host", host), ("disk", disk)) if part > 1e-9}
    return Filling(share, optimizer, {"host": outside} if outside > 1e-9 else {}, held)


def taken_beside(shape: GPTPreset, batch: int, on_gpu: bool) -> dict[str, float]:
    """Bytes beside the states, by tier: what computing a GPT of this shape takes, and buffers.

    On the device: every block's input; one block's activations as they are recomputed and their gradients, 64 bytes for
    each element of the stream; the logits of one sequence, 16 bytes each; of the largest unit two in computation and
    two as gradients; the ring, and one batch of gradients in fp32. On the host: what states travel through.
    """
    unit = max(12 * shape.width**2 + 13 * shape.width, (shape.vocabulary + shape.context) * shape.width)
    bucket = min(BUCKET, unit)
    stream = batch * shape.context * shape.width
    device = (2 * shape.layers + 64) * stream + 16 * shape.context * shape.vocabulary
    device += 8 * unit + RING * bucket * 2 * GRADIENT + 4 * bucket
    host = SLOTS * (min(GRANULE, unit) * (PARAMETER + GRADIENT) + min(DISK_GRANULE, unit) * OPTIMIZER)
    return {"device": device + on_gpu * LIBRARIES, "host": host + on_gpu * PROCESS}
