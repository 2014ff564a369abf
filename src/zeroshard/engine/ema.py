"""EMA: an exponential moving average of the parameters, kept on the shards."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zeroshard.engine.engine import Engine
from zeroshard.engine.flat_param import FlatParam
from zeroshard.engine.model_checks import unwrap_compiled
from zeroshard.memory import TieredTensor, TierSegment

_KIND = "averages"  # in reports


class EMA:
    """An exponential moving average of a sharded model's trained parameters.

    It starts with the present values. Call :meth:`update` after each ``optimizer.step()``: average = decay · average +
    (1 − decay) · parameter. Each rank averages its own shard of the master weights, or of the parameters if there are
    none, in fp32 if these have 16 bits: 4Ψ/N bytes in stages 1 to 3. Averages are where the master weights are, on the
    device or in host memory (also if those are on disk). :func:`zeroshard.save` and :func:`zeroshard.load` take it as
    ``ema=``, for any number of ranks, stage and precision.

    Buffers are not averaged: inside :meth:`swapped` the model has its present ones, as torch's ``AveragedModel`` has
    without ``use_buffers``. Frozen parameters keep their values. All ranks call the methods together.

    >>> import zeroshard
    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=1.0))
    >>> ema = zeroshard.EMA(model, decay=0.75)
    >>> model(torch.ones(1, 1)).sum().backward()  # the gradient is 1
    >>> optimizer.step()
    >>> ema.update()
    >>> zeroshard.state_dict(model)["weight"].item()
    -1.0
    >>> with ema.swapped():
    ...     zeroshard.state_dict(model)["weight"].item()
    -0.25
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        model = unwrap_compiled(model)
        if "_zeroshard" not in vars(model):
            raise ValueError(
                f"this {type(model).__name__} is not a sharded model: pass what zeroshard.shard() returned, or use "
                "torch.optim.swa_utils.AveragedModel for a plain one"
            )
        self.decay = decay  # checked here; may be changed between updates
        self._model = weakref.ref(model)
        engine: Engine = model._zeroshard.engine  # type: ignore[union-attr, assignment]
        self._engine = weakref.ref(engine)
        self._prepare(engine, f"make an EMA with decay {decay}")
        self.number = engine.order.event_count  # the same on all ranks
        self._averages = [copy_of(values) for values in map(exact_values, _trained_flats(engine))]
        engine.state_guard.averages.add(self)
        tracker = engine.context.tracker
        for segment in self._segments():
            tier = "host" if segment.is_offloaded else "device"
            tracker.add(_KIND, segment.tensor.nbytes, tier)
            weakref.finalize(self, tracker.add, _KIND, -segment.tensor.nbytes, tier)

    @property
    def decay(self) -> float:
        """How much of the average an update keeps. Assign to it to follow a schedule, equally on all ranks."""
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
            raise ValueError(f"decay is {decay!r}, expected a number from 0 to 1, for example 0.999")
        self._decay = float(decay)

    @torch.no_grad()
    def update(self) -> None:
        """Average the present parameters in. Call it after ``optimizer.step()``."""
        engine = self._open_engine("ema.update()")
        self._prepare(engine, f"update the EMA with decay {self._decay}")
        for value, average in self._pairs(engine):
            average.lerp_(value.to(average.dtype), 1 - self._decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the model the averages inside the block, for evaluation, generation or ``zeroshard.state_dict()``.

        Afterwards it has its own values again, to the bit. Inside, calls that would train or replace the averages
        (backward, ``optimizer.step()``, ``update()``, ``zeroshard.load``) raise, and so does saving the optimizer.
        Needs no memory beyond one tensor, or a copy of this rank's shard if that has 16 bits and no master weights.
        """
        engine = self._open_engine("ema.swapped()")
        self._prepare(engine, "swap in the EMA")
        originals = self._exchange(engine)
        engine.state_guard.has_averages = True
        try:
            yield
        finally:
            engine.state_guard.has_averages = False
            self._exchange(engine, originals)  # without a check: after an exception, stage 3 needs no other rank

    def copy_to_model(self) -> None:
        """Give the model the averages for good, for example before ``unwrap()``. The average stays as it is."""
        engine = self._open_engine("ema.copy_to_model()")
        averages = [segment.tensor.clone() for segment in self._segments()]
        self._prepare(engine, "copy the EMA to the model")
        self._exchange(engine)
        for segment, average in zip(self._segments(), averages, strict=True):
            segment.tensor.copy_(average)

    def flat_averages(self) -> Iterator[tuple[FlatParam, TieredTensor]]:
        """Yield each trained flat of the model and the averages of this rank's shard, for a save or load."""
        engine = self._open_engine("a save or load of an EMA")
        return zip(_trained_flats(engine), self._averages, strict=True)

    def is_of(self, engine: Engine | None) -> bool:
        """Return whether it averages the model of this engine."""
        return engine is not None and self._engine() is engine

    def device_tensors(self) -> list[torch.Tensor]:
        """Return the averages on the device, which offload_states() moves."""
        return [segment.tensor for segment in self._segments() if not segment.is_offloaded]

    def _segments(self) -> list[TierSegment]:
        return [segment for average in self._averages for segment in average.segments]

    def _pairs(self, engine: Engine) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the same elements of the values and of the averages.

        By their ranges: add_param_group() may have given a flat master weights, in other segments than its parameters.
        """
        for flat, averages in zip(_trained_flats(engine), self._averages, strict=True):
            for segment in exact_values(flat).segments:
                for span, average in averages.views_in(segment.span):
                    yield segment.tensor[span.shift(-segment.span.start).slice], average

    def _open_engine(self, call: str) -> Engine:
        """Return the engine if the model is as it was when the average was made."""
        model, engine = self._model(), self._engine()
        sharded: Any = vars(model).get("_zeroshard") if model is not None else None
        if engine is None or sharded is None or sharded.engine is not engine:  # unwrapped, and perhaps sharded again
            raise RuntimeError(
                f"{call}: the model is gone or unwrapped. Before unwrap(), take the averages with "
                "`with ema.swapped(): zeroshard.state_dict(model)`, or keep them in the model with ema.copy_to_model()"
            )
        engine.state_guard.check_not_gathered(call)
        if engine.is_running:
            raise RuntimeError(f"{call} inside a forward or backward: call it between steps")
        return engine

    def _prepare(self, engine: Engine, what: str) -> None:
        engine.state_guard.prepare_read(what, "weights")
        engine.order.check(what)  # a rank that does not, or does something else, is found

    @torch.no_grad()
    def _exchange(
        self, engine: Engine, originals: list[torch.Tensor | None] | None = None
    ) -> list[torch.Tensor | None]:
        """Exchange parameters and averages. Return what does not fit into an average of another dtype.

        ``originals``, the result of the first exchange, are written back.
        """
        engine.state_guard.prepare_write()
        for flat in _trained_flats(engine):
            if flat.prefetcher is not None:
                flat.prefetcher.discard()
        replaced: list[torch.Tensor | None] = []
        for index, (value, average) in enumerate(self._pairs(engine)):
            original = originals[index] if originals is not None else None
            present = value.clone()
            value.copy_(average if original is None else original)
            if value.dtype == average.dtype:
                average.copy_(present)
            replaced.append(None if value.dtype == average.dtype else present)
        engine.finish_write()
        return replaced


def _trained_flats(engine: Engine) -> list[FlatParam]:
    return [flat for unit in engine.units for flat in unit.flats if flat.spec.is_trainable]


def exact_values(flat: FlatParam) -> TieredTensor:
    """Return this rank's shard in the highest precision: the master weights, or the parameters."""
    if flat.master is not None:
        return flat.master
    tier = flat.spec.tier_placement.parameters
    pairs = zip(flat.shard_ranges, flat.local_shards, strict=True)
    return TieredTensor([TierSegment(span, tier, shard) for span, shard in pairs], flat.dtype)


def copy_of(values: TieredTensor) -> TieredTensor:
    """Return a copy in fp32 or the dtype of the values, on the device or in host memory."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    return TieredTensor(
        [
            TierSegment(segment.span, "host" if segment.is_offloaded else "device", segment.tensor.to(dtype, copy=True))
            for segment in values.segments
        ],
        dtype,
    )
