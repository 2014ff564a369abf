"""Call: one run of a checkpointed block, and the inputs that are kept to run it again.

[Note: P_a]
Along a tensor axis all ranks give a block the same inputs, so each of N ranks keeps one part of ``ceil(elements / N)``,
and an all-gather makes the whole just before the block runs again::

    input           | a b c d e f g |           7 elements, as they lie in memory
    3 ranks keep    | a b c | d e f | g · · |   the last part is filled up
    an all-gather   | a b c d e f g · · |       the block is given a view of the first 7

What no earlier block has made stays by reference: tensors without a gradient (masks, rotary tables, token ids) and
leaves. All blocks share those, and their owner has them anyway. A tensor that goes into several blocks (an encoder's
output) is kept once.

Backward is given a copy, never the kept bytes themselves: those are written again in the next forward, while somebody
may still hold the copy (a graph made by ``create_graph=True``, a hook that collects activations).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from zeroshard.activations.form import Form
from zeroshard.activations.keeper import Keeper
from zeroshard.activations.replicas import verify_same
from zeroshard.activations.store import Kept, Store
from zeroshard.comm import Axis, gather


@dataclass(frozen=True, eq=False)
class Reference:
    """An input that stays where it is."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, eq=False)
class Part:
    """What this rank keeps of an input."""

    store: Store
    kept: Kept
    form: Form
    axis: Axis
    spread: Spread | None  # of a DTensor
    whole: torch.Tensor | None = None  # the input itself, where all of it stays on the device


@dataclass(frozen=True)
class Spread:
    """How a DTensor lies on its mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spread | None:
        """Describe a DTensor; None for any other tensor."""
        if not isinstance(tensor, DTensor):
            return None
        return cls(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def around(self, local: torch.Tensor) -> DTensor:
        """The DTensor of which this rank has ``local``."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


class Call:
    """One run of a block: packs its inputs in forward, unpacks them in backward."""

    def __init__(self, name: str, keeper: Keeper, block: nn.Module) -> None:
        self._name = name
        self._keeper = keeper
        self._comm, self.axis = keeper.look_up(block)
        self._parts: list[Part] = []
        self._before, keeper.last = keeper.last, weakref.ref(self)

    def verify(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Refuse inputs that are not the same on all ranks of the axis; tell whether there were any to compare."""
        if self.axis.size == 1:
            return True
        divided = [tensor for tensor in inputs if not _stays(tensor)]
        for tensor in divided:
            if isinstance(tensor, DTensor) and not _is_replicated(tensor, self.axis):
                raise ValueError(
                    f"an input of block {self._name!r} is a DTensor with placements {tensor.placements}: the ranks it "
                    "would be divided over have different parts of it. checkpoint_activations(partition=…) needs "
                    "Replicate() there; otherwise give partition=False"
                )
        with torch.no_grad():
            verify_same(self._name, [_local(tensor) for tensor in divided], self.axis)
        return bool(divided)

    def pack(self, tensor: torch.Tensor) -> Reference | Part:
        """Keep an input."""
        if _stays(tensor):
            return Reference(tensor, _version(tensor))
        part = self._keeper.find(tensor)
        if part is None or part.axis != self.axis:
            part = self._keep(tensor)
            self._keeper.remember(tensor, part)
        self._parts.append(part)
        return part

    def unpack(self, packed: Reference | Part) -> torch.Tensor:
        """Give an input back."""
        if isinstance(packed, Reference):
            if packed.version != _version(packed.tensor):
                raise RuntimeError(f"{_changed(self._name)} before backward came to the block.")
            return packed.tensor
        if packed.whole is not None:
            return packed.whole.clone()
        near = list(self._near())
        packed.store.only(part.kept for part in near)
        for part in near:
            part.store.bring(part.kept)
        return self._whole(packed)

    def versions(self, inputs: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        """What :meth:`check_unchanged` compares with: the inputs that are copied, before the block runs."""
        return [(tensor, _version(tensor)) for tensor in inputs if not _stays(tensor)]

    def check_unchanged(self, versions: list[tuple[torch.Tensor, int]]) -> None:
        """Refuse a block that has written into its inputs."""
        if any(_version(tensor) != version for tensor, version in versions):
            raise RuntimeError(f"{_changed(self._name)} by the block itself.")

    def _near(self) -> Iterator[Part]:
        """What should be on the device: see [Note: near and far]."""
        before = self._before() if self._before is not None else None
        yield from self._parts
        yield from before._parts if before is not None else ()

    @torch.no_grad()
    def _keep(self, tensor: torch.Tensor) -> Part:
        local = _local(tensor).resolve_conj().resolve_neg()
        form, store = Form.of(local), self._keeper.store(local.device)
        if self.axis.size == 1 and local is tensor and form.dense and not store.offload:
            kept = store.keep_whole(local)  # few operations: most blocks are kept so
            return Part(store, kept, form, self.axis, None, kept.whole)
        length = -(-form.numel // self.axis.size)
        values = form.line(local)[length * self.axis.rank : length * (self.axis.rank + 1)]
        store.only(part.kept for part in self._near())
        kept = store.keep(values, length * local.itemsize)
        return Part(store, kept, form, self.axis, Spread.of(tensor))

    @torch.no_grad()
    def _whole(self, part: Part) -> torch.Tensor:
        mine, form, axis = part.store.read(part.kept), part.form, part.axis
        whole = mine.new_empty(axis.size * mine.numel())
        if axis.size == 1:
            whole.copy_(mine)
        elif self._comm is not None:
            self._comm.gather_activation(whole, mine, axis, f"gather the input of block {self._name!r}").wait()
        else:
            gather(whole, mine, axis)
        local = form.shaped(whole.view(form.dtype)[: form.numel])
        return local if part.spread is None else part.spread.around(local)


def _stays(tensor: torch.Tensor) -> bool:
    """Whether an input is kept by reference: see [Note: P_a]. So are kinds of tensors that have no plain memory."""
    plain = type(tensor) in (torch.Tensor, DTensor, AsyncCollectiveTensor) and tensor.layout is torch.strided
    return tensor.grad_fn is None or not plain or tensor.is_meta or tensor.numel() == 0


def _version(tensor: torch.Tensor) -> int:
    """How often it was changed in place. Parameters change under the engine's hands, and are no activations."""
    return 0 if tensor.is_inference() or isinstance(tensor, nn.Parameter) else tensor._version


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _is_replicated(tensor: DTensor, axis: Axis) -> bool:
    ranks = dist.get_process_group_ranks(axis.group)
    return all(
        placement.is_replicate() or dist.get_process_group_ranks(tensor.device_mesh.get_group(dim)) != ranks
        for dim, placement in enumerate(tensor.placements)
    )


def _changed(name: str) -> str:
    return (
        f"an input of block {name!r} cannot be used to run the block again, since it was changed in place: write "
        "`x = x + y` instead of `x += y`, or leave the block out of checkpoint_activations(). It was changed"
    )
