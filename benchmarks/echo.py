"""Echo: a process group whose other ranks do not exist, and in which a collective is one operation.

torch's fake backend is the same but for its all-gather, which makes a copy of its own for each rank: with 64 of them,
most of what a small collective costs there is that. Over NCCL it is one kernel. Here, too: what is gathered is this
rank's own part, once for every rank, in one copy; what is reduced is its own part alone. Nothing passes a wire.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

WIDE = torch.complex128  # 16 bytes at a time: as bf16, a GPU makes these copies at a third of its bandwidth
NAME = "fake_echo"  # zeroshard looks for "fake" in it, where ranks would agree with each other


class Echo(dist.ProcessGroup):
    """One rank of many, the others of which say what it says.

    torch's dispatcher does not see what passes here, so who counts it is told: kind, group, tensors.
    """

    heard: Callable[[str, dist.ProcessGroup, Any], None] | None = None

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._ranks = size

    def getBackendName(self) -> str:
        """As torch asks for it."""
        return NAME

    @property
    def group_name(self) -> str:
        """What torch calls this group."""
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def pg_name(self) -> str:
        """The same, as other places ask for it."""
        return self.group_name

    def _allgather_base(self, output: Tensor, part: Tensor, opts: Any = None) -> Any:
        self._tell("all-gather", output)
        place, source = output.data_ptr(), part.data_ptr()
        if part.dim() != 1 or output.dim() != 1:
            output, part = output.view(-1), part.reshape(-1)
        if (part.nbytes | place | source) % WIDE.itemsize == 0:
            output, part = output.view(WIDE), part.view(WIDE)
        rows = output.view(self._ranks, -1)
        (rows[1:] if place == source else rows).copy_(part)  # in place is how FSDP2 gathers
        return DONE

    all_gather_single = _allgather_base  # as torch 2.13 calls it

    def allgather(self, outputs: list[list[Tensor]], parts: list[Tensor], opts: Any = None) -> Any:
        """Into a tensor for each rank: as a list it is no longer one copy."""
        self._tell("all-gather", outputs)
        for tensors, part in zip(outputs, parts, strict=True):
            torch._foreach_copy_(tensors, [part] * len(tensors))
        return DONE

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], parts: list[Tensor], opts: Any = None) -> Any:
        """Several at once."""
        for output, part in zip(outputs, parts, strict=True):
            self._allgather_base(output, part)
        return DONE

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        self._tell("reduce-scatter", whole)
        if output.data_ptr() != whole.data_ptr():
            output.view(-1).copy_(whole.view(-1)[: output.numel()])
        return DONE

    reduce_scatter_single = _reduce_scatter_base  # likewise

    def reduce_scatter(self, outputs: list[Tensor], wholes: list[list[Tensor]], opts: Any = None) -> Any:
        """From a tensor for each rank."""
        self._tell("reduce-scatter", wholes)
        for output, parts in zip(outputs, wholes, strict=True):
            output.copy_(parts[0])
        return DONE

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], wholes: list[Tensor], opts: Any = None) -> Any:
        """Several at once."""
        for output, whole in zip(outputs, wholes, strict=True):
            self._reduce_scatter_base(output, whole)
        return DONE

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """This rank's own values are the sum."""
        self._tell("all-reduce", tensors)
        return _done(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """This rank is the one that has them."""
        self._tell("broadcast", tensors)
        return DONE

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """As an all-reduce's."""
        self._tell("reduce", tensors)
        return DONE

    def _tell(self, kind: str, tensors: Any) -> None:
        if Echo.heard is not None:
            Echo.heard(kind, self, tensors)

    def _start_coalescing(self, device: torch.device) -> None:
        """What follows is launched at once: there is nothing to launch."""

    def _end_coalescing(self, device: torch.device) -> Any:
        return DONE

    def barrier(self, opts: Any = None) -> Any:
        """Nobody to wait for."""
        return DONE


def _done(result: list[Tensor] | None = None) -> Any:
    """A collective that is over. DDP wants its result; others know where it is."""
    future: Future[Any] = Future(devices=[tensor.device for tensor in result or () if tensor.is_cuda])
    future.set_result(result)
    return _create_work_from_future(future)


DONE = _done()  # one for all: making it anew took a quarter of what a collective takes here


def register() -> None:
    """Make `init_process_group("fake_echo")` known to torch."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, lambda _, rank, size, __: Echo(rank, size), devices=["cpu", "cuda"])
