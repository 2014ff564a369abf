"""Collectives of a rank whose other ranks do not exist, and a count of what a step communicates.

torch's fake backend does the same as `Echo`, but its all-gather makes a copy for each rank: with 64 ranks that is most
of what a small collective costs. Over NCCL it is one kernel, and so it is here: what is gathered is this rank's shard
once for every rank, in one copy; what is reduced is its own input. Nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WIDE = torch.complex128  # 16 bytes at a time: as bf16, a GPU makes these copies at a third of its bandwidth
ECHO = "fake_echo"  # zeroshard does not compare ranks on backends with "fake" in their name


class Echo(dist.ProcessGroup):
    """One rank of many, where all others have the same data.

    torch's dispatcher does not see these collectives, so ``on_collective`` is called with kind, group and tensors.
    """

    on_collective: Callable[[str, dist.ProcessGroup, Any], None] | None = None

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._ranks = size

    def getBackendName(self) -> str:
        return ECHO

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    pg_name = group_name

    def _allgather_base(self, output: Tensor, part: Tensor, opts: Any = None) -> Any:
        self._count("all-gather", output)
        place, source = output.data_ptr(), part.data_ptr()
        if part.dim() != 1 or output.dim() != 1:
            output, part = output.view(-1), part.reshape(-1)
        if (part.nbytes | place | source) % WIDE.itemsize == 0:
            output, part = output.view(WIDE), part.view(WIDE)
        rows = output.view(self._ranks, -1)
        (rows[1:] if place == source else rows).copy_(part)  # FSDP2 gathers in place
        return DONE

    all_gather_single = _allgather_base  # the name in torch 2.13

    def allgather(self, outputs: list[list[Tensor]], parts: list[Tensor], opts: Any = None) -> Any:
        self._count("all-gather", outputs)
        for tensors, part in zip(outputs, parts, strict=True):
            torch._foreach_copy_(tensors, [part] * len(tensors))
        return DONE

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], parts: list[Tensor], opts: Any = None) -> Any:
        for output, part in zip(outputs, parts, strict=True):
            self._allgather_base(output, part)
        return DONE

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        self._count("reduce-scatter", whole)
        if output.data_ptr() != whole.data_ptr():
            output.view(-1).copy_(whole.view(-1)[: output.numel()])
        return DONE

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter(self, outputs: list[Tensor], wholes: list[list[Tensor]], opts: Any = None) -> Any:
        self._count("reduce-scatter", wholes)
        for output, parts in zip(outputs, wholes, strict=True):
            output.copy_(parts[0])
        return DONE

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], wholes: list[Tensor], opts: Any = None) -> Any:
        for output, whole in zip(outputs, wholes, strict=True):
            self._reduce_scatter_base(output, whole)
        return DONE

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        self._count("all-reduce", tensors)
        return _finished(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        self._count("broadcast", tensors)
        return DONE

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        self._count("reduce", tensors)
        return DONE

    def _count(self, kind: str, tensors: Any) -> None:
        if Echo.on_collective is not None:
            Echo.on_collective(kind, self, tensors)

    def _start_coalescing(self, device: torch.device) -> None: ...

    def _end_coalescing(self, device: torch.device) -> Any:
        return DONE

    def barrier(self, opts: Any = None) -> Any:
        return DONE


def _finished(result: list[Tensor] | None = None) -> Any:
    """Return the work of a finished collective. Only DDP reads its result."""
    future: Future[Any] = Future(devices=[tensor.device for tensor in result or () if tensor.is_cuda])
    future.set_result(result)
    return _create_work_from_future(future)


DONE = _finished()  # one for all: creating it took a quarter of the time of a collective here


def register_echo() -> None:
    """Make `init_process_group("fake_echo")` known to torch."""
    if ECHO not in dist.Backend.backend_list:
        dist.Backend.register_backend(ECHO, lambda _, rank, size, __: Echo(rank, size), devices=["cpu", "cuda"])


KINDS = (  # how the name of an operation begins → its kind, and which of its arguments is counted
    *(("allreduce", "all-reduce", 0), ("reduce_scatter", "reduce-scatter", 1), ("allgather", "all-gather", 0)),
    *(("broadcast", "broadcast", 0), ("alltoall", "all-to-all", 1), ("reduce", "reduce", 0)),
)


class Traffic(TorchDispatchMode):
    """Counts the collectives that run while it is active: by kind, their number, elements and bytes.

    All libraries communicate through operations of torch's dispatcher, from Python or C++, on any thread. Bytes are the
    paper's: an all-gather by its output, a reduce-scatter by its input, an all-reduce twice. A group of one rank counts
    as a collective, which the host has to launch, of no bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, dict[str, int]] = {}

    @property
    def total(self) -> dict[str, int]:
        return {key: sum(kind[key] for kind in self.kinds.values()) for key in ("collectives", "elements", "bytes")}

    def __enter__(self) -> Traffic:
        Echo.on_collective = lambda kind, group, tensors: self._add(kind, group.size(), tensors)
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        Echo.on_collective = None
        super().__exit__(*failure)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.strip("_")
            for begin, kind, place in KINDS:
                if name.startswith(begin):
                    self._add(kind, _group_size(args), args[place])
                    break
        return result

    def _add(self, kind: str, ranks: int | None, given: Any) -> None:
        tensors = [value for value in tree_leaves(given) if isinstance(value, Tensor)]
        times = 0 if ranks == 1 else 2 if kind == "all-reduce" else 1
        counted = self.kinds.setdefault(kind, {"collectives": 0, "elements": 0, "bytes": 0})
        counted["collectives"] += 1
        counted["elements"] += times * sum(tensor.numel() for tensor in tensors)
        counted["bytes"] += times * sum(tensor.nbytes for tensor in tensors)


def _group_size(args: tuple[Any, ...]) -> int | None:
    """Return the number of ranks in the group of a collective, None if it is not known."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return int(dist.ProcessGroup.unbox(value).size())
            except RuntimeError:  # another kind of object, such as the reduction operator
                continue
    return None
