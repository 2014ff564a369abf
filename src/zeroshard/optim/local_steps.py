"""LocalSteps: replicas that train alone for some steps, then average their parameters.

[Note: local steps]
With ``Config.local_steps=k`` the outer data axis of the mesh is ``Communicator.average_axis``, and none of the data
axes: gradients, their norm and the unused parameters are those of one replica. After every k-th step of an optimizer
the ranks that hold the same shard in all replicas average it: the master weights, or the parameters if there are none.
Each sends what it would send for one gradient in fp32, every k steps. Optimizer states are never averaged, nor are
parameters in no group, even if they are stored with others.

Without an outer optimizer the mean is the new value (local SGD). With one (DiLoCo), the values at the start of the
local steps are its parameters, and their difference to the mean is its gradient; what it makes of them is the new
value. It runs on the shards, piece by piece, so it has to be elementwise, and equal on all replicas without a message.

What keeps replicas in step:

- A call of ``step()`` counts, whether or not it changes anything. With fp16 all replicas skip a step if one of them
  overflows: that takes one small all-reduce over the slow link per step, and the loss scale is the same for all.
- ``CollectiveOrder`` compares the ranks of all replicas. The average is a pass of its own, which follows every k-th
  step, so the ranks confirm twice in k steps.
- Hyper-parameters are compared when replicas are averaged.

EMAs are averaged with the parameters. An EMA is linear in the parameters, so the mean of the replicas' EMAs is the EMA
of their mean. Buffers (running statistics) are copied from the first replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zeroshard.comm import CollectiveWork, MeshAxis
from zeroshard.config.config import Config
from zeroshard.engine import EMA, NO_HISTORY, Engine, FlatParam, exact_values
from zeroshard.memory import TieredTensor, TierSegment
from zeroshard.optim.param_groups import ParamGroups, StepChecker
from zeroshard.optim.slices import is_elementwise
from zeroshard.optim.state_dict import allocate_state
from zeroshard.optim.step import ELEMENTWISE_OPTIMIZERS
from zeroshard.sharding import Range
from zeroshard.utils.profiling import label

ANCHOR = "anchor"  # the name of anchors in checkpoints


def mark_local_axis(
    axes: list[MeshAxis], config: Config, optimizers: Sequence[torch.optim.Optimizer]
) -> list[MeshAxis]:
    """Return the data axes, the outer one marked if its replicas train alone; raise if that is not possible."""
    if config.local_steps == 1:
        return axes
    steps = f"local_steps={config.local_steps}"
    if len(axes) == 1 and config.stage > 0:
        raise ValueError(
            f"{steps} averages replicas, and stage {config.stage} on a mesh with one data axis has none: pass a mesh "
            'with two, such as init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard")), or use stage=0'
        )
    if not optimizers:
        raise ValueError(f"{steps} counts the steps of an optimizer, and shard() got none: pass it, or local_steps=1")
    for optimizer in optimizers:
        if callable(getattr(optimizer, "train", None)) or callable(getattr(optimizer, "eval", None)):
            raise ValueError(
                f"{steps} with {type(optimizer).__name__}, whose train() and eval() change the parameters by states "
                "that are not averaged: use another optimizer, or local_steps=1"
            )
    if config.outer_optimizer is not None:
        outer = config.outer_optimizer([torch.nn.Parameter(torch.zeros(1, device="cpu"))])
        if type(outer) not in ELEMENTWISE_OPTIMIZERS:
            known = ", ".join(sorted(each.__name__ for each in ELEMENTWISE_OPTIMIZERS))
            raise ValueError(
                f"outer_optimizer runs on shards and must be one of torch's elementwise optimizers ({known}), got "
                f"{type(outer).__name__}"
            )
    return [replace(axes[0], has_local_steps=True), *axes[1:]]


class _Piece(NamedTuple):
    """One bucket's shard of a flat: what one collective averages."""

    flat: FlatParam
    bucket: int
    values: TieredTensor  # the exact values, or an EMA's averages, of the flat's shard

    @property
    def span(self) -> Range:
        return self.flat.shard_ranges[self.bucket]


def _pieces(flat: FlatParam, values: TieredTensor) -> Iterator[_Piece]:
    return (_Piece(flat, index, values) for index, span in enumerate(flat.shard_ranges) if span.numel)


@dataclass(eq=False)
class _Anchor:
    """The values of a piece at the start of the local steps."""

    span: Range
    tier: str
    parameter: torch.nn.Parameter


class OuterOptimizer:
    """The outer optimizer, on this rank's shards, and the values that it updates: see [Note: local steps]."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], engine: Engine) -> None:
        self.make, self._engine = make, engine
        self._optimizer: torch.optim.Optimizer | None = None  # made with the first anchors
        self._anchors: dict[FlatParam, dict[int, _Anchor]] = {}  # by number of the bucket
        self._tracked_bytes = {"device": 0, "host": 0}

    def take_anchors(self, pieces: Iterable[_Piece], is_start: bool) -> None:
        """Copy the present values of pieces that have no anchor yet; at the start of the local steps, of all."""
        new: list[torch.nn.Parameter] = []
        for piece in pieces:
            anchors = self._anchors.setdefault(piece.flat, {})
            if piece.bucket not in anchors:
                anchors[piece.bucket] = self._allocate(piece)
                new.append(anchors[piece.bucket].parameter)
            elif not is_start:
                continue
            parameter = anchors[piece.bucket].parameter
            parameter.detach().copy_(piece.values.read(piece.span, parameter.device))
        if new and self._optimizer is None:
            self._optimizer = self.make(new)
        if new:
            self.track_bytes()

    def _allocate(self, piece: _Piece) -> _Anchor:
        is_offloaded = any(segment.is_offloaded for segment, _ in piece.values.segments_in(piece.span))
        device = torch.device("cpu") if is_offloaded else self._engine.comm.device
        with self._engine.context.pool:
            dtype = torch.promote_types(piece.values.dtype, torch.float32)
            values = torch.empty(piece.span.numel, dtype=dtype, device=device)
        return _Anchor(piece.span, "host" if is_offloaded else "device", torch.nn.Parameter(values))

    def step(self, piece: _Piece, mean: torch.Tensor, averaged: Sequence[Range]) -> torch.Tensor:
        """Update a piece's anchor with its difference to the mean as the gradient; return the new values.

        Only those of ``averaged`` ranges of the piece count: the others start without states, once they count.
        """
        assert self._optimizer is not None
        anchor = self._anchors[piece.flat][piece.bucket]
        parameter = anchor.parameter
        parameter.grad = parameter.detach() - mean.to(parameter.device)
        self._optimizer.param_groups[0]["params"] = [parameter]  # a step would look at all others, too
        self._optimizer.step()
        parameter.grad = None
        ends = [0, *(end for span in averaged for end in (span.start, span.end)), piece.span.numel]
        for start, end in zip(ends[::2], ends[1::2], strict=True):  # between the ranges
            for key, value in self._state(anchor).items() if start < end else ():
                if is_elementwise(key, value, parameter.shape):
                    value[start:end] = 0
        return parameter.detach()

    # -- for checkpoints ------------------------------------------------------------------------------------------

    def flats(self) -> list[FlatParam]:
        """Return the flats that have anchors."""
        return list(self._anchors)

    def states(self, flat: FlatParam, with_anchors: bool) -> dict[str, TieredTensor]:
        """Return the elementwise states of a flat's shard by name, and its anchors as "anchor"."""
        found: dict[str, list[TierSegment]] = {}
        for anchor in self._anchors[flat].values():
            state = self._state(anchor) | ({ANCHOR: anchor.parameter.detach()} if with_anchors else {})
            for key, value in state.items():
                if is_elementwise(key, value, anchor.parameter.shape):
                    found.setdefault(key, []).append(TierSegment(anchor.span, anchor.tier, value))
        return {key: TieredTensor(segments, segments[0].tensor.dtype) for key, segments in found.items()}

    def scalars(self, flat: FlatParam) -> dict[str, Any]:
        """Return the states of a flat that are not elementwise, such as step counts."""
        for anchor in self._anchors[flat].values():  # all have the same
            shape = anchor.parameter.shape
            return {key: value for key, value in self._state(anchor).items() if not is_elementwise(key, value, shape)}
        return {}

    def allocate_states(self, flat: FlatParam, dtypes: Mapping[str, torch.dtype], scalars: Mapping[str, Any]) -> None:
        """Replace the states of a flat: zeros for elementwise ones, copies of scalars."""
        assert self._optimizer is not None
        for anchor in self._anchors[flat].values():
            values, group = anchor.parameter.detach(), self._optimizer.param_groups[0]
            self._optimizer.state[anchor.parameter] = {
                key: allocate_state(key, value, values, group)
                for key, value in {**dtypes, **scalars}.items()
                if key != ANCHOR
            }
        self.track_bytes()

    def clear(self) -> None:
        """Forget all anchors and states."""
        self._optimizer, self._anchors = None, {}
        self.track_bytes()

    # -- memory ---------------------------------------------------------------------------------------------------

    def device_tensors(self) -> list[torch.Tensor]:
        """Return anchors and states on the device, which offload_states() moves."""
        anchors = [a for by_index in self._anchors.values() for a in by_index.values() if a.tier == "device"]
        return [tensor for anchor in anchors for tensor in self._tensors(anchor) if tensor.dim()]

    def track_bytes(self) -> None:
        """Record how many bytes anchors and states take."""
        found = {"device": 0, "host": 0}
        for anchor in (anchor for by_index in self._anchors.values() for anchor in by_index.values()):
            found[anchor.tier] += sum(tensor.nbytes for tensor in self._tensors(anchor))
        for tier, nbytes in found.items():
            if nbytes != self._tracked_bytes[tier]:
                self._engine.context.tracker.add("outer optimizer", nbytes - self._tracked_bytes[tier], tier)
        self._tracked_bytes = found

    def _tensors(self, anchor: _Anchor) -> list[torch.Tensor]:
        return [anchor.parameter.detach(), *(v for v in self._state(anchor).values() if torch.is_tensor(v))]

    def _state(self, anchor: _Anchor) -> dict[str, Any]:
        return self._optimizer.state.get(anchor.parameter, {}) if self._optimizer is not None else {}


class LocalSteps:
    """Counts the steps of one optimizer, and averages its parameters over the replicas: see [Note: local steps]."""

    def __init__(self, engine: Engine, groups: ParamGroups) -> None:
        config = engine.context.config
        self._engine, self._groups, self._every, self._ring = engine, groups, config.local_steps, config.ring
        self.outer = None if config.outer_optimizer is None else OuterOptimizer(config.outer_optimizer, engine)
        self._step_checker = StepChecker(engine.comm.device)
        self.count = 0

    @classmethod
    def of(cls, engine: Engine, groups: ParamGroups) -> LocalSteps | None:
        """Return the counter of an optimizer; None if there are no local steps."""
        return cls(engine, groups) if engine.context.config.local_steps > 1 else None

    @property
    def number(self) -> int:
        """The number of the optimizer."""
        return self._groups.member.number

    @property
    def count(self) -> int:
        """The number of steps since the last average."""
        return self._engine.state_guard.replica_steps[self.number]

    @count.setter
    def count(self, count: int) -> None:
        self._engine.state_guard.replica_steps[self.number] = count

    def begin_step(self) -> None:
        """Prepare for a step, whose update has not begun."""
        if self.outer is not None:
            self._engine.state_guard.sync_user_edits()  # anchors have them too
            self.take_anchors(is_start=not self.count)

    def end_step(self) -> None:
        """Count a step that has been started, and average if it is the last of the local steps."""
        self.count += 1
        if self.count >= self._every:  # more, if a checkpoint of a run with more local steps was loaded
            self.average()

    def take_anchors(self, is_start: bool) -> None:
        """Let the outer optimizer copy the present values: see :meth:`OuterOptimizer.take_anchors`."""
        assert self.outer is not None
        self.outer.take_anchors((piece for flat in self._groups.own.flats for piece in self._exact(flat)), is_start)

    @torch.no_grad()
    def average(self) -> None:
        """Average the parameters over the replicas, if there were steps since the last average."""
        if not self.count:
            return
        engine, own, guard = self._engine, self._groups.own, self._engine.state_guard
        engine.order.begin_pass(f"average of replicas{self._groups.member.label}")
        with label("average replicas"):
            guard.prepare_write()
            engine.release_retained()
            engine.order.check(f"average the replicas after {self.count} steps")  # a rank with another count is found
            self._compare_options()
            for flat in own.flats:
                if flat.prefetcher is not None:
                    flat.prefetcher.discard()
            guard.begin_update(own.units, own.flats)
            self._average((piece for flat in own.flats for piece in self._exact(flat)), self.outer)
            self._average_emas(guard.averages)
            if engine.buffer_broadcaster is not None:
                engine.buffer_broadcaster.copy_from_first_replica()
            guard.copy_masters(own.flats)
            guard.on_values_changed(own.params)
            guard.start_param_refresh(own.units)
        self.count = 0
        if self.outer is not None:
            self.outer.track_bytes()

    @torch.no_grad()
    def restore_count(self, count: int, loaded: EMA | None) -> None:
        """Set the number of steps after a load of parameters; ``loaded`` is the EMA that was loaded with them.

        If it ends the local steps, the other EMAs are averaged, because no average will: the replicas count as equal.
        """
        emas = [ema for ema in self._engine.state_guard.averages if ema is not loaded] if self.count else []
        if emas and not count:
            self._engine.order.begin_pass(f"average of EMAs{self._groups.member.label} after a load")
            self._average_emas(emas)
        self.count = count

    def _average_emas(self, emas: Iterable[EMA]) -> None:
        """Average this optimizer's parameters in some EMAs."""
        flats = self._groups.own.flats
        for ema in sorted(emas, key=lambda ema: ema.number):
            self._engine.order.check(f"average the EMA that was made at event {ema.number}")
            averages = [(flat, values) for flat, values in ema.flat_averages() if flat in flats]
            self._average((piece for pair in averages for piece in _pieces(*pair)), None)

    def _exact(self, flat: FlatParam) -> Iterator[_Piece]:
        return _pieces(flat, exact_values(flat))

    def _average(self, pieces: Iterable[_Piece], outer: OuterOptimizer | None) -> None:
        """Average pieces one after the other; some collectives are in flight at once."""
        comm, tracker, axis = self._engine.comm, self._engine.context.tracker, self._engine.comm.average_axis
        running: deque[tuple[_Piece, torch.Tensor, CollectiveWork | None]] = deque()

        def finish() -> None:
            piece, mean, work = running.popleft()
            if work is not None:
                work.wait()
            mean.div_(axis.size)
            averaged = self._averaged_ranges(piece)
            new = mean if outer is None else outer.step(piece, mean, averaged)
            for span in averaged:
                piece.values.write(span.shift(piece.span.start), new[span.slice])
            tracker.add("step", -mean.nbytes)

        for piece in pieces:
            if len(running) == self._ring:
                finish()
            dtype = torch.promote_types(piece.values.dtype, torch.float32)
            mean = piece.values.read(piece.span, comm.device).to(dtype, copy=True)
            tracker.add("step", mean.nbytes)
            work = None
            if axis.size > 1:
                work = comm.all_reduce(mean, axis, "average the replicas", kind="replica average")
            running.append((piece, mean, work))
        while running:
            finish()

    def _averaged_ranges(self, piece: _Piece) -> list[Range]:
        """Return the ranges of a piece that are averaged: all, but for parameters in no group that are stored there."""
        flat, own = piece.flat, self._groups.own
        if own.flats[flat]:
            return [Range(0, piece.span.numel)]
        names, shard_axis = self._groups.member.names, self._engine.comm.shard_axis
        parts = flat.layout.owned_ranges_in_bucket(flat.layout.buckets[piece.bucket], shard_axis.rank)
        grouped = [part for part in parts if flat.names[part.param_index] in names]
        return [Range(part.offset, part.offset + part.elements.numel) for part in grouped]

    def _compare_options(self) -> None:
        """Raise if the replicas' optimizers have different hyper-parameters."""
        comm = self._engine.comm
        if comm.average_axis.size > 1 and comm.consistency.is_distributed:
            digest = self._step_checker.local_digest(self._groups.inner.param_groups, NO_HISTORY).clone()
            comm.all_reduce(digest, comm.average_axis, "compare the replicas' options", dist.ReduceOp.MAX).wait()
            self._step_checker.compare(digest, comm.consistency.rank)
