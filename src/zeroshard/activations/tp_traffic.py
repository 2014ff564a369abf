"""Count the traffic of tensor parallelism, to compare the overhead of P_a with the paper's 1/12."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.comm import Communicator, MeshAxis, Traffic


@contextmanager
def count_traffic(comm: Communicator) -> Iterator[tuple[Traffic, Traffic] | None]:
    """Count the traffic of tensor parallelism and of P_a inside the context; yield None without a tensor axis."""
    if comm.tensor_axis.size == 1:
        yield None
        return
    total, activations = comm.counters.total.setdefault("activation gather", Traffic()), Traffic()
    count, nbytes = total.count, total.bytes
    with TPTrafficMode(comm.tensor_axis) as mode:
        try:
            yield mode.traffic, activations
        finally:
            activations.count, activations.bytes = total.count - count, total.bytes - nbytes


class TPTrafficMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that DTensors issue over one axis while it is entered."""

    def __init__(self, axis: MeshAxis) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic = Traffic()
        self._group_name = axis.group.group_name if axis.group is not None else ""
        self._axis_size = axis.size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let the DTensor go first: its collectives are dispatched here afterwards
        if func.namespace == "_c10d_functional" and len(args) > 1 and args[-1] == self._group_name:
            tensors = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
            self.traffic.count += 1
            self.traffic.bytes += self._bytes_multiplier(func._schema.name) * sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))

    def _bytes_multiplier(self, name: str) -> int:
        """Return the weight of a collective's input bytes: see :class:`zeroshard.comm.collectives.Traffic`."""
        if "all_reduce" in name:
            return 2
        return self._axis_size if "all_gather" in name else 1
