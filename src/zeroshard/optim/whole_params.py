"""WholeParams: parameters whose update rule reads all of them, each updated by the rank that owns its states.

[Note: whole parameters]
Muon orthogonalizes matrices, Adafactor averages over rows and columns, LAMB takes the norm of a tensor: such rules
cannot run on flat slices ([Note: optimizer slices]). Their parameters are stored like all others: values, master
weights and gradients stay sharded, in every stage and tier. Only the optimizer states are different: one rank of the
shard axis, the *owner*, has all of them, in the shapes that the optimizer gave them. A step:

    every rank    its shards of gradient and value   --all-to-all-->   whole tensors on the owner
    owner         the user's optimizer steps nn.Parameters of the true shapes
    every rank    its shards of the new value        <--all-to-all--   whole tensors on the owner

For Ψ elements on N ranks, a rank sends and receives about 3Ψ/N elements, next to nothing compared with an all-gather.
Owners are assigned over the whole model, the largest parameter first, each to the rank with the least so far. If the
shard axis has one rank (stage 0, or one rank in all), it owns everything, and nothing is sent.

The exchange moves values as they are, so all stages compute with the same bits, and the owner's optimizer sees what the
plain run's would see: parameters of the true shape, with a gradient or None.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from zeroshard.engine import Engine, FlatGrad, FlatParam, GradScale
from zeroshard.sharding import Range

EXCHANGE_LABEL = "exchange whole parameters"


def assign_owners(costs: Sequence[int], loads: list[int]) -> list[int]:
    """Return the owner of each item, the most expensive first, and add the costs to the ranks' ``loads``.

    >>> loads = [0, 0]
    >>> assign_owners([3, 5, 4, 2], loads), loads
    ([1, 0, 1, 0], [7, 7])
    """
    queue = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(queue)
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, rank = heapq.heappop(queue)
        owners[index], loads[rank] = rank, load + costs[index]
        heapq.heappush(queue, (loads[rank], rank))
    return owners


@dataclass(eq=False)
class WholeParam:
    """One whole parameter. Between steps ``parameter`` has its shape and no values."""

    flat: FlatParam
    index: int  # in the flat
    owner: int  # rank on the shard axis
    parameter: nn.Parameter = field(init=False)  # what the inner optimizer sees, on the owner

    def __post_init__(self) -> None:
        self.parameter = nn.Parameter(self._placeholder())

    @property
    def name(self) -> str:
        return self.flat.names[self.index]

    @property
    def numel(self) -> int:
        return self.flat.layout.numels[self.index]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it is updated."""
        return self.flat.dtype if self.flat.master is None else self.flat.master.dtype

    def rank_ranges(self, rank: int) -> list[Range]:
        """Return the elements that a rank of the shard axis has, in the order of its shard."""
        owned = self.flat.layout.owned_ranges(rank)
        return [param_range.elements for param_range in owned if param_range.param_index == self.index]

    def shape_as_param(self, flattened: torch.Tensor) -> torch.Tensor:
        """View its elements, in the order of the flat, in the shape and strides of the parameter."""
        return flattened.as_strided(self.flat.shapes[self.index], self.flat.strides[self.index])

    def set_values(self, values: torch.Tensor, gradient: torch.Tensor) -> None:
        """Give the parameter its values and gradient, for a step."""
        self.parameter.data = values
        self.parameter.grad = gradient

    def drop_values(self) -> None:
        """Leave the parameter its shape only."""
        self.parameter.data = self._placeholder()
        self.parameter.grad = None

    def _placeholder(self) -> torch.Tensor:
        """Return NaNs of the parameter's shape that take no memory."""
        return torch.full((), math.nan, dtype=self.dtype, device=self.flat.device).expand(self.flat.shapes[self.index])


class WholeParams:
    """The whole parameters of one optimizer, and the exchange with their owners: see [Note: whole parameters]."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._axis = engine.comm.shard_axis
        self._loads = [0] * self._axis.size  # elements by owner
        self.params: list[WholeParam] = []  # in the order of the groups, the same on all ranks

    def add(self, names: Sequence[str]) -> list[WholeParam]:
        """Assign owners to the named parameters; return those that this rank owns."""
        places = {name: (flat, i) for flat in self._engine.gradients.flat_grads for i, name in enumerate(flat.names)}
        found = [places[name] for name in names if name in places]
        owners = assign_owners([flat.layout.numels[index] for flat, index in found], self._loads)
        added = [WholeParam(flat, index, owner) for (flat, index), owner in zip(found, owners, strict=True)]
        self.params += added
        return self.owned(added)

    def owned(self, params: Iterable[WholeParam] | None = None) -> list[WholeParam]:
        """Return those that this rank owns, of all or of ``params``."""
        return [param for param in (self.params if params is None else params) if param.owner == self._axis.rank]

    # -- a step -----------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, grad_scale: GradScale) -> Iterator[None]:
        """Give the parameters that this rank owns their values and gradients; write the new values to the shards.

        The gradients are unscaled and clipped; the stored ones are not. All ranks call it together.
        """
        flat_grads = self._engine.gradients.flat_grads
        stepped = [
            param
            for param in self.params
            if flat_grads[param.flat].has_shard and flat_grads[param.flat].is_param_used[param.index]
        ]
        if not stepped:
            yield
            return
        self._engine.gradients.wait_offloaded()
        by_dtype = {dtype: [p for p in stepped if p.dtype == dtype] for dtype in {p.dtype: None for p in stepped}}
        try:
            for dtype, params in by_dtype.items():
                self._gather(params, dtype)
            gradients = [p.parameter.grad for p in self.owned(stepped) if p.parameter.grad is not None]
            for factor in grad_scale.factors:
                self._engine.gradients.scaling.multiply(gradients, factor)
            yield
            for dtype, params in by_dtype.items():
                self._scatter(params, dtype)
        finally:
            for param in self.owned(stepped):
                param.drop_values()
        if grad_scale.clip_coef is not None:
            shards = [shard for param in stepped for shard in _grad_shards(flat_grads[param.flat], param)]
            self._engine.gradients.scaling.defer(shards, grad_scale.clip_coef)

    def _gather(self, params: list[WholeParam], dtype: torch.dtype) -> None:
        flat_grads = self._engine.gradients.flat_grads
        by_owner = [[param for param in params if param.owner == rank] for rank in range(self._axis.size)]
        sent = [
            [
                *(shard for param in owned for shard in _grad_shards(flat_grads[param.flat], param)),
                *(shard for param in owned for shard in _value_shards(param)),
            ]
            for owned in by_owner
        ]
        owned = by_owner[self._axis.rank]
        gradients, values = (
            [torch.empty(param.numel, dtype=dtype, device=self._engine.comm.device) for param in owned]
            for _ in range(2)
        )
        received = [[*_views(owned, gradients, rank), *_views(owned, values, rank)] for rank in range(self._axis.size)]
        self._exchange(sent, received, dtype)
        for param, value, gradient in zip(owned, values, gradients, strict=True):
            param.set_values(param.shape_as_param(value), param.shape_as_param(gradient))

    def _scatter(self, params: list[WholeParam], dtype: torch.dtype) -> None:
        owned = self.owned(params)
        values = [param.flat.flatten(param.parameter.data, param.index) for param in owned]
        sent = [_views(owned, values, rank) for rank in range(self._axis.size)]
        received = [
            [shard for param in params if param.owner == rank for shard in _value_shards(param)]
            for rank in range(self._axis.size)
        ]
        self._exchange(sent, received, dtype)

    def _exchange(self, sent: list[list[torch.Tensor]], received: list[list[torch.Tensor]], dtype: torch.dtype) -> None:
        """Send tensors to each rank of the shard axis, and receive tensors from each; both lists are by rank."""
        comm = self._engine.comm
        send_numels, receive_numels = (
            [sum(tensor.numel() for tensor in tensors) for tensors in by_rank] for by_rank in (sent, received)
        )
        send_buffer = torch.empty(sum(send_numels), dtype=dtype, device=comm.device)
        _copy(_split_like(send_buffer, sent), [tensor for tensors in sent for tensor in tensors])
        receive_buffer = send_buffer
        nbytes = send_buffer.nbytes
        if self._axis.size > 1:
            receive_buffer = torch.empty(sum(receive_numels), dtype=dtype, device=comm.device)
            nbytes += receive_buffer.nbytes
            self._engine.order.check(EXCHANGE_LABEL)
            comm.all_to_all(receive_buffer, send_buffer, receive_numels, send_numels, EXCHANGE_LABEL).wait()
        self._engine.context.tracker.record_transient("step", nbytes)
        _copy([tensor for tensors in received for tensor in tensors], _split_like(receive_buffer, received))


def _grad_shards(flat_grad: FlatGrad, param: WholeParam) -> list[torch.Tensor]:
    """Return this rank's shards of the parameter's reduced gradient."""
    return [values for _, values in flat_grad.param_shards(param.index)]


def _value_shards(param: WholeParam) -> list[torch.Tensor]:
    """Return this rank's shards of the parameter, in its master weight if it has one."""
    return [values for index, _, values in param.flat.owned_slices() if index == param.index]


def _views(params: list[WholeParam], tensors: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """Return the ranges of flattened whole tensors that a rank has shards of."""
    return [
        tensor[elements.slice]
        for param, tensor in zip(params, tensors, strict=True)
        for elements in param.rank_ranges(rank)
    ]


def _split_like(buffer: torch.Tensor, tensors_by_rank: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return list(torch.split(buffer, [tensor.numel() for tensors in tensors_by_rank for tensor in tensors]))


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
