"""Styles: how a module is divided, for the layers that torch's own styles do not know.

torch's ``ColwiseParallel`` and ``RowwiseParallel`` take ``nn.Linear`` and ``nn.Embedding``, and give each rank one
stretch of a dimension. ``FusedColwiseParallel`` also divides fused matrices (see [Note: shares]) and Hugging Face's
``Conv1D``, a linear layer whose weight is transposed; ``Conv1DRowwiseParallel`` is its counterpart.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

NUM_FUSED_ATTR = "_zeroshard_pieces"  # on a parameter: how many pieces are fused in its divided dimension


def _distribute_param(
    module: nn.Module, key: str, mesh: DeviceMesh, placement: Shard | Replicate, num_fused: int = 1
) -> None:
    """Make one parameter of a module a DTensor."""
    whole = getattr(module, key, None)
    if whole is None:
        return
    parameter = nn.Parameter(distribute_tensor(whole, mesh, [placement], src_data_rank=None), whole.requires_grad)
    setattr(parameter, NUM_FUSED_ATTR, num_fused)
    module.register_parameter(key, parameter)


def _has_transposed_weight(module: nn.Module) -> bool:
    """Whether a module's weight is (inputs, outputs), as Hugging Face's Conv1D has it."""
    if isinstance(module, nn.Linear):
        return False
    if type(module).__name__ == "Conv1D":
        return True
    raise NotImplementedError(f"Columns and Rows divide nn.Linear and Conv1D, got {type(module).__name__}")


class FusedColwiseParallel(ParallelStyle):
    """Divide a layer's outputs. Its input is the same on all ranks; ``pieces`` outputs are fused in it."""

    def __init__(self, num_fused: int = 1) -> None:
        self.num_fused = num_fused

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        outputs = 1 if _has_transposed_weight(module) else 0

        def partition(_: str, layer: nn.Module, mesh: DeviceMesh) -> None:
            _distribute_param(layer, "weight", mesh, Shard(outputs), self.num_fused)
            _distribute_param(layer, "bias", mesh, Shard(0), self.num_fused)

        return distribute_module(module, device_mesh, partition, _replicate_input, _output_to_local)


class Conv1DRowwiseParallel(ParallelStyle):
    """Split a layer's inputs, which :class:`FusedColwiseParallel` has split; the ranks' outputs are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        inputs = 0 if _has_transposed_weight(module) else 1

        def partition(_: str, layer: nn.Module, mesh: DeviceMesh) -> None:
            _distribute_param(layer, "weight", mesh, Shard(inputs))
            _distribute_param(layer, "bias", mesh, Replicate())

        return distribute_module(module, device_mesh, partition, _shard_input, _all_reduce_output)


def _replicate_input(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return (_to_dtensor(inputs[0], mesh, Replicate()), *inputs[1:])


def _shard_input(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return (_to_dtensor(inputs[0], mesh, Shard(-1)), *inputs[1:])


def _to_dtensor(tensor: Any, mesh: DeviceMesh, placement: Shard | Replicate) -> Any:
    return tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [placement], run_check=False)


def _output_to_local(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    return output.to_local()


def _all_reduce_output(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    return output.redistribute(placements=[Replicate()]).to_local()
