"""Options and gradients that have to be equal on all ranks: a digest of them travels in an all-reduce of flags."""

from __future__ import annotations

import operator
from collections import deque
from typing import Any
from zlib import crc32

import torch

from zeroshard.comm.consistency import RanksDisagreeError
from zeroshard.memory.streams import record_blocking_event

Groups = list[tuple[dict[str, Any], list[int]]]  # of an optimizer, and the ids of their parameters
Answer = tuple[torch.Tensor, Any]  # the largest of each byte that the ranks have sent, and when it is there
DIGEST_BYTES = 4


def digest(optimizers: list[Groups], has_grad: list[list[bool]]) -> bytes:
    """Return digests and their complements: a byte and its complement add up to 255 if all ranks send the same.

    Of the options, those count that are numbers, and not on a GPU.

    >>> own, other = (digest([[({"lr": rate}, [])]], []) for rate in (0.1, 0.2))
    >>> [a + b for a, b in zip(own[4:8], own[12:], strict=True)], own[4:8] == other[4:8], own[:4] == other[:4]
    ([255, 255, 255, 255], True, False)
    """
    numbers = []
    for group, _ in (pair for groups in optimizers for pair in groups):
        for name, value in group.items():
            if isinstance(value, torch.Tensor) and value.is_cpu:
                value = value.tolist()
            if isinstance(value, (int, float)) or (isinstance(value, tuple) and isinstance(value[0], (int, float))):
                numbers.append((name, value))
    own = b"".join(crc32(repr(each).encode()).to_bytes(DIGEST_BYTES) for each in (numbers, has_grad))
    return own + bytes([255 - byte for byte in own])


def sent_to(device: torch.device, data: bytes) -> torch.Tensor:
    """Return bytes on a device, without waiting for it."""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def read_later(received: torch.Tensor) -> Answer:
    """Copy bytes to the host, without waiting for them."""
    if received.device.type != "cuda":
        return received, None
    host = torch.empty_like(received, device="cpu", pin_memory=True)
    host.copy_(received, non_blocking=True)
    return host, record_blocking_event(torch.cuda.current_stream())


def check_answers(answers: deque[Answer], optimizers: list[Groups], rank: int) -> None:
    """Raise if ranks have sent different digests. On a GPU the last answer is read in the next step."""
    while answers and (len(answers) > 1 or answers[0][1] is None):
        received, event = answers.popleft()
        if event is not None:
            event.synchronize()
        digests, complements = received.view(2, -1).tolist()
        is_equal = [total == 255 for total in map(operator.add, digests, complements)]
        if not all(is_equal):
            answers.clear()  # an error is raised once
        if not all(is_equal[:DIGEST_BYTES]):
            groups = [{**group, "params": len(ids)} for groups in optimizers for group, ids in groups]
            raise RanksDisagreeError(
                f"the hyper-parameters of the optimizer differ between ranks: rank {rank} has {groups}. "
                "Each rank updates its part of every parameter with its own values: set the same ones in "
                "optimizer.param_groups on all ranks"
            )
        if not all(is_equal):
            raise RanksDisagreeError(
                "some ranks have cleared gradients before the last backward, and others have not, but these are "
                "summed over the ranks already: call zero_grad(), or set parameter.grad = None, on all ranks or on none"
            )
