"""GradNorms: norms of reduced gradients, over this rank's shards and over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist

from zeroshard.comm import CollectiveOrder, Communicator
from zeroshard.engine.flat_grad import FlatGrad, compute_norms
from zeroshard.engine.flat_param import FlatParam
from zeroshard.sharding import ParamRange

_DeviceAndDtype = tuple[torch.device, torch.dtype]


class GradNorms:
    """Norms of one model's reduced gradients as they are stored: not unscaled, not clipped.

    Gradients that are replicated over the tensor axis are counted by its first rank only.
    """

    def __init__(self, flat_grads: dict[FlatParam, FlatGrad], comm: Communicator, order: CollectiveOrder) -> None:
        self._flat_grads, self._comm, self._order = flat_grads, comm, order
        self._counts_replicated = comm.tensor_axis.rank == 0
        self.cache: dict[float, torch.Tensor] = {}  # of ``per_parameter``, by norm type, until a gradient changes

    def per_shard(self, norm_type: float) -> list[torch.Tensor]:
        """Return the norms of the gradient ranges that this rank counts, bucket by bucket, in fp32, on the device.

        The norms of offloaded gradients were computed before the copy off the device, by the same kernel and in the
        same order.
        """
        norms: list[torch.Tensor] = []
        pending: dict[_DeviceAndDtype, list[int]] = {}  # positions in ``norms`` that still hold gradients
        for g in self._flat_grads.values():
            for bucket_index in range(len(g.flat.shard_ranges)) if g.has_shard and g.shard is not None else ():
                bucket_norms = g.norms[norm_type].get(bucket_index)
                if bucket_norms is None and g.shard is not None:
                    g.wait_copy()
                    ranges = g.norm_ranges(bucket_index, self._counts_replicated)
                    bucket_norms = [g.shard[span.slice] for span in ranges]
                    positions = pending.setdefault((g.shard.device, g.shard.dtype), [])
                    positions += range(len(norms), len(norms) + len(bucket_norms))
                norms += bucket_norms or ()
        for positions in pending.values():  # few kernels for any number of gradients
            for i, norm in zip(positions, compute_norms([norms[i] for i in positions], norm_type), strict=True):
                norms[i] = norm.to(self._comm.device)
        return norms

    def per_parameter(self, norm_type: float) -> torch.Tensor:
        """Return the norm of each trainable parameter's full gradient, in fp64, in the order of the flats.

        All ranks call it together. It takes one all-reduce per axis; the norms are cached until a gradient changes.
        """
        if norm_type not in self.cache:
            self.cache[norm_type] = self._compute_per_parameter(norm_type)
        return self.cache[norm_type]

    def _compute_per_parameter(self, norm_type: float) -> torch.Tensor:
        is_inf_norm, device = abs(norm_type) == math.inf, self._comm.device
        views: dict[_DeviceAndDtype, list[torch.Tensor]] = {}
        param_positions: dict[_DeviceAndDtype, list[int]] = {}
        offsets, numel = {}, 0
        for flat_grad in self._flat_grads.values():
            offsets[flat_grad] = numel
            numel += len(flat_grad.is_param_used)
        for flat_grad, param_range, view in self._owned_views():
            if self._counts_replicated or flat_grad.flat.tp_shards[param_range.param_index] is not None:
                flat_grad.wait_copy()
                position = offsets[flat_grad] + param_range.param_index
                views.setdefault((view.device, view.dtype), []).append(view)
                param_positions.setdefault((view.device, view.dtype), []).append(position)
        total = torch.full((numel,), math.inf if norm_type == -math.inf else 0.0, dtype=torch.float64, device=device)
        has_nan = torch.zeros_like(total)  # > 0 where a value is NaN: a maximum over ranks may drop NaN
        for key, group in views.items():
            positions = torch.tensor(param_positions[key], device=device)
            norms = torch.stack(compute_norms(group, norm_type)).to(device, torch.float64)
            if is_inf_norm:
                has_nan.index_add_(0, positions, norms.isnan().double())
                reduction = "amax" if norm_type > 0 else "amin"
                total.scatter_reduce_(0, positions, norms.nan_to_num(nan=0.0, posinf=math.inf), reduction)
            else:
                total.index_add_(0, positions, norms if norm_type == 0 else norms**norm_type)
        sign = -1.0 if norm_type == -math.inf else 1.0
        reduced = torch.stack([sign * total, has_nan]) if is_inf_norm else total
        op = dist.ReduceOp.MAX if is_inf_norm else dist.ReduceOp.SUM
        what = "sum the norms of gradients"
        for axis in (self._comm.shard_axis, self._comm.tensor_axis):  # along the others, all ranks have the same values
            if axis.size > 1:
                self._order.check(what)
                self._comm.all_reduce(reduced, axis, what, op).wait()
        if is_inf_norm:
            return torch.where(reduced[1] > 0, math.nan, sign * reduced[0])
        return reduced if norm_type == 0 else reduced ** (1 / norm_type)

    def check_tp_replicated(self) -> None:
        """Raise if the gradient of a plain parameter differs between ranks of the tensor axis.

        If such a parameter is used between tensor-parallel layers (e.g. a norm of the heads), each rank has only its
        part of the sum. All ranks call it together.
        """
        comm, what = self._comm, "compare gradients over the tensor axis"
        names, squares = self._tp_replicated_square_sums()
        self._order.check(what)
        if comm.shard_axis.size > 1:
            comm.all_reduce(squares, comm.shard_axis, what).wait()
        largest, negated_smallest = squares.clone(), -squares
        for tensor in (largest, negated_smallest):
            comm.all_reduce(tensor, comm.tensor_axis, what, dist.ReduceOp.MAX).wait()
        is_different = largest + negated_smallest > 0.1 * largest  # a different summation order changes much less,
        is_different &= largest > 1e-6 * largest.sum()  # except in gradients that are only rounding errors
        found = is_different.any().float()
        comm.all_reduce_over_mesh(found, what, dist.ReduceOp.MAX)
        if bool(found):
            flags = zip(names, is_different.tolist(), strict=True)
            name = next((name for name, differs in flags if differs), "a parameter")
            raise RuntimeError(
                f"the gradient of {name!r} is not the same on all ranks of the tensor axis: it is used between "
                "tensor-parallel layers, where each rank has a part of the sum. Give its module a style in "
                "tensor_plan, so that it becomes a DTensor, or do not parallelize those layers"
            )

    def _tp_replicated_square_sums(self) -> tuple[list[str], torch.Tensor]:
        """Return the parameters that are not tensor-parallel, and the sum of squares of this rank's shard of each.

        The list is the same on all ranks. The positions of the parameter ranges differ, because TP shards may be
        uneven.
        """
        replicated = [
            (g, i) for g in self._flat_grads.values() for i, tp_param in enumerate(g.flat.tp_params) if tp_param is None
        ]
        positions = {place: position for position, place in enumerate(replicated)}
        squares = torch.zeros(len(replicated), device=self._comm.device)
        for flat_grad, param_range, view in self._owned_views():
            position = positions.get((flat_grad, param_range.param_index))
            if position is not None:
                flat_grad.wait_copy()
                squares[position] += view.float().square().sum().to(squares.device)
        return [flat_grad.flat.names[index] for flat_grad, index in replicated], squares

    def _owned_views(self) -> Iterator[tuple[FlatGrad, ParamRange, torch.Tensor]]:
        """Yield each range of a parameter in this rank's shards, with its values."""
        for flat_grad in self._flat_grads.values():
            if flat_grad.has_shard and flat_grad.shard is not None:
                for param_range in flat_grad.flat.owned_ranges:
                    numel = param_range.elements.numel
                    yield flat_grad, param_range, flat_grad.shard[param_range.offset : param_range.offset + numel]
