"""Styles: how a module is divided, for the layers that torch's own styles do not know.

torch's ``ColwiseParallel`` and ``RowwiseParallel`` take ``nn.Linear`` and ``nn.Embedding``, and give each rank one
stretch of a dimension. ``Columns`` also divides fused matrices (see [Note: shares]) and Hugging Face's ``Conv1D``, a
linear layer whose weight is transposed; ``Rows`` is its counterpart.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

PIECES = "_zeroshard_pieces"  # on a parameter: how many pieces are fused in its divided dimension


def _place(module: nn.Module, key: str, mesh: DeviceMesh, placement: Shard | Replicate, pieces: int = 1) -> None:
    """Make one parameter of a module a DTensor."""
    whole = getattr(module, key, None)
    if whole is None:
        return
    parameter = nn.Parameter(distribute_tensor(whole, mesh, [placement], src_data_rank=None), whole.requires_grad)
    setattr(parameter, PIECES, pieces)
    module.register_parameter(key, parameter)


def _is_transposed(module: nn.Module) -> bool:
    """Whether a module's weight is (inputs, outputs), as Hugging Face's Conv1D has it."""
    if isinstance(module, nn.Linear):
        return False
    if type(module).__name__ == "Conv1D":
        return True
    raise NotImplementedError(f"Columns and Rows divide nn.Linear and Conv1D, got {type(module).__name__}")


class Columns(ParallelStyle):
    """Divide a layer's outputs. Its input is the same on all ranks; ``pieces`` outputs are fused in it."""

    def __init__(self, pieces: int = 1) -> None:
        self.pieces = pieces

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        outputs = 1 if _is_transposed(module) else 0

        def partition(_: str, layer: nn.Module, mesh: DeviceMesh) -> None:
            _place(layer, "weight", mesh, Shard(outputs), self.pieces)
            _place(layer, "bias", mesh, Shard(0), self.pieces)

        return distribute_module(module, device_mesh, partition, _replicated, _to_local)


class Rows(ParallelStyle):
    """Divide a layer's inputs, which come divided from :class:`Columns`; its output is summed over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        inputs = 0 if _is_transposed(module) else 1

        def partition(_: str, layer: nn.Module, mesh: DeviceMesh) -> None:
            _place(layer, "weight", mesh, Shard(inputs))
            _place(layer, "bias", mesh, Replicate())

        return distribute_module(module, device_mesh, partition, _divided, _summed)


def _replicated(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return (_distributed(inputs[0], mesh, Replicate()), *inputs[1:])


def _divided(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return (_distributed(inputs[0], mesh, Shard(-1)), *inputs[1:])


def _distributed(tensor: Any, mesh: DeviceMesh, placement: Shard | Replicate) -> Any:
    return tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [placement], run_check=False)


def _to_local(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    return output.to_local()


def _summed(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    return output.redistribute(placements=[Replicate()]).to_local()
