"""Traffic: what a step communicates, counted alike for every library.

Whoever communicates, in Python (zeroshard, FSDP2, DeepSpeed) or in C++ (DDP's reducer), does it through operations of
torch's dispatcher, and a mode around the step sees each of them, autograd's thread included. Bytes are the paper's: an
all-gather by its output, a reduce-scatter by its input, an all-reduce twice. A group of one rank counts as a
collective, which the host has to launch, of no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.echo import Echo

KINDS = (  # how an operation's name begins → what it is, and which of its arguments is counted
    ("allreduce", "all-reduce", 0),
    ("reduce_scatter", "reduce-scatter", 1),
    ("allgather", "all-gather", 0),
    ("broadcast", "broadcast", 0),
    ("alltoall", "all-to-all", 1),
    ("gather", "gather", 1),
    ("scatter", "scatter", 0),
    ("reduce", "reduce", 0),
    ("send", "send", 0),
    ("recv", "receive", 0),
)


class Traffic(TorchDispatchMode):
    """Counts collectives while it is entered.

    `kinds` has, by kind, how many there were, and their elements and bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, dict[str, int]] = {}

    @property
    def total(self) -> dict[str, int]:
        """Over all kinds."""
        each = self.kinds.values()
        return {key: sum(kind[key] for kind in each) for key in ("collectives", "elements", "bytes")}

    def __enter__(self) -> Traffic:
        """Begin to count."""
        Echo.heard = lambda kind, group, tensors: self._add(kind, group.size(), tensors)
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        """Count no more."""
        Echo.heard = None
        super().__exit__(*failure)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See one operation of torch, and let it run."""
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.strip("_")
            for begin, kind, place in KINDS:
                if name.startswith(begin):
                    self._add(kind, _ranks(args), args[place])
                    break
        return result

    def _add(self, kind: str, ranks: int | None, given: Any) -> None:
        tensors = [value for value in tree_leaves(given) if isinstance(value, Tensor)]
        times = 0 if ranks == 1 else 2 if kind == "all-reduce" else 1
        counted = self.kinds.setdefault(kind, {"collectives": 0, "elements": 0, "bytes": 0})
        counted["collectives"] += 1
        counted["elements"] += times * sum(tensor.numel() for tensor in tensors)
        counted["bytes"] += times * sum(tensor.nbytes for tensor in tensors)


def _ranks(args: tuple[Any, ...]) -> int | None:
    """How many ranks a collective's group has; None where that is not told."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return int(dist.ProcessGroup.unbox(value).size())
            except RuntimeError:  # another kind of object, such as the operator to reduce with
                continue
    return None
