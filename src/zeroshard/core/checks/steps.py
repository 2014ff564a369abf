"""Before each step: groups that were changed, and ranks that disagree.

A digest of what has to be equal on all ranks travels in the all-reduce of flags that a backward has anyway.
"""

from __future__ import annotations

import operator
from typing import Any
from zlib import crc32

import torch

from zeroshard.comm.consistency import RanksDisagreeError

Groups = list[tuple[dict[str, Any], list[int]]]  # of an optimizer, and the ids of their parameters
DIGEST_BYTES = 4


def digest(optimizers: list[Groups], has_grad: list[list[bool]], is_scaled: bool) -> bytes:
    """Return digests and their complements: a byte and its complement add up to 255 if all ranks send the same.

    Of the options, those count that are numbers, and not on a GPU.

    >>> own, other = (digest([[({"lr": rate}, [])]], [], False) for rate in (0.1, 0.2))
    >>> [a + b for a, b in zip(own[4:8], own[16:20], strict=True)], own[4:8] == other[4:8], own[:4] == other[:4]
    ([255, 255, 255, 255], True, False)
    """
    numbers = []
    for group, _ in (pair for groups in optimizers for pair in groups):
        for name, value in group.items():
            if isinstance(value, torch.Tensor) and value.is_cpu:
                value = value.tolist()
            values = value if isinstance(value, tuple) else [value]
            if all(isinstance(each, (int, float)) for each in values):
                numbers.append((name, value))
    own = b"".join(crc32(repr(each).encode()).to_bytes(DIGEST_BYTES) for each in (numbers, has_grad, is_scaled))
    return own + bytes([255 - byte for byte in own])


def check_step(known: Groups, groups: list[dict[str, Any]], engine: Any) -> None:
    """Raise if groups are others than shard() and add_param_group() have seen, or ranks have sent different digests.

    On a GPU the last answer is read in the next step, when it is there.
    """
    if [(id(group), list(map(id, group["params"]))) for group in groups] != [(id(group), ids) for group, ids in known]:
        raise RuntimeError(
            f"optimizer.param_groups had {len(known)} groups, and groups or parameters were added, removed, reordered "
            "or replaced, which has no effect: change groups in place (optimizer.param_groups[0]['lr'] = …), and call "
            "optimizer.add_param_group() to train more parameters"
        )
    while engine.answers and (len(engine.answers) > 1 or engine.answers[0][1] is None):
        received, event = engine.answers.popleft()
        if event is not None:
            event.synchronize()
        digests, complements = received.view(2, -1).tolist()
        is_equal = [total == 255 for total in map(operator.add, digests, complements)]
        if all(is_equal):
            continue
        engine.answers.clear()  # an error is raised once
        if not all(is_equal[2 * DIGEST_BYTES :]):
            raise RanksDisagreeError("a scaled loss on some ranks only: call optimizer.scale(loss) on all or on none")
        if all(is_equal[:DIGEST_BYTES]):
            raise RanksDisagreeError(
                "some ranks have cleared gradients before the last backward, and others have not, but these are "
                "summed over the ranks already: call zero_grad(), or set parameter.grad = None, on all ranks or on none"
            )
        options = [{**group, "params": len(ids)} for each in engine.groups for group, ids in each]
        raise RanksDisagreeError(
            f"the hyper-parameters of the optimizer differ between ranks: rank {engine.context.checker.rank} has "
            f"{options}. Each rank updates its part of every parameter with its own values: set the same ones in "
            "optimizer.param_groups on all ranks"
        )


def without_gradient(slices: list[Any], stepped: list[Any]) -> str:
    """Return which parameters a step leaves out, in words that are the same on all ranks."""
    names = [each.flat.names[index] for each in slices if each not in stepped for index in each.indices]
    return f" without gradients of {names[0]!r} and others ({len(names)}, {crc32(repr(names).encode()):x})"
