"""Parallel styles for layers that torch's own styles do not support.

torch's ``ColwiseParallel`` and ``RowwiseParallel`` support ``nn.Linear`` and ``nn.Embedding``, and give each rank one
range of a dimension. ``FusedColwiseParallel`` also shards fused matrices (see [Note: tensor-parallel shards]) and
Hugging Face's ``Conv1D``, a linear layer whose weight is transposed; ``Conv1DRowwiseParallel`` is its counterpart.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

NUM_FUSED_ATTR = "_zeroshard_pieces"  # parameter attribute: number of matrices fused in the sharded dimension


def _distribute_param(
    module: nn.Module, key: str, mesh: DeviceMesh, placement: Shard | Replicate, num_fused: int = 1
) -> None:
    """Replace one parameter of a module by a DTensor."""
    full = getattr(module, key, None)
    if full is None:
        return
    parameter = nn.Parameter(distribute_tensor(full, mesh, [placement], src_data_rank=None), full.requires_grad)
    setattr(parameter, NUM_FUSED_ATTR, num_fused)
    module.register_parameter(key, parameter)


def _has_transposed_weight(module: nn.Module) -> bool:
    """Return whether a module's weight is (inputs, outputs), as in Hugging Face's Conv1D."""
    if isinstance(module, nn.Linear):
        return False
    if type(module).__name__ == "Conv1D":
        return True
    raise NotImplementedError(f"these styles support nn.Linear and Conv1D, got {type(module).__name__}")


class FusedColwiseParallel(ParallelStyle):
    """Shard a layer's outputs. The input is replicated; ``num_fused`` matrices are fused in the output dimension."""

    def __init__(self, num_fused: int = 1) -> None:
        self.num_fused = num_fused

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        output_dim = 1 if _has_transposed_weight(module) else 0

        def partition(_: str, layer: nn.Module, mesh: DeviceMesh) -> None:
            _distribute_param(layer, "weight", mesh, Shard(output_dim), self.num_fused)
            _distribute_param(layer, "bias", mesh, Shard(0), self.num_fused)

        return distribute_module(module, device_mesh, partition, _replicate_input, _output_to_local)


class Conv1DRowwiseParallel(ParallelStyle):
    """Shard a layer's inputs, the outputs of :class:`FusedColwiseParallel`; the ranks' outputs are all-reduced."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        input_dim = 0 if _has_transposed_weight(module) else 1

        def partition(_: str, layer: nn.Module, mesh: DeviceMesh) -> None:
            _distribute_param(layer, "weight", mesh, Shard(input_dim))
            _distribute_param(layer, "bias", mesh, Replicate())

        return distribute_module(module, device_mesh, partition, _shard_input, _all_reduce_output)


COLWISE_STYLES = (ColwiseParallel, FusedColwiseParallel)  # shard a layer's outputs
ROWWISE_STYLES = (RowwiseParallel, Conv1DRowwiseParallel)  # shard a layer's inputs


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
