"""Deepened: what a deep model takes, from two shallow ones that differ by one block.

[Note: straight lines in depth]
A block of a model like the others does what the others do. So of a model with n equal blocks everything is known from
two shallow ones: the events of a middle block, which the deeper of the two has and the other has not, are repeated.
The first and the last block, which may differ by what comes before and after them, stay as they are. Nothing is
assumed that can be checked: without its middle block the deeper model has to be the shallow one, event by event and
byte by byte, or :class:`UnevenError` says that the blocks are not alike. Tracing takes a tenth of a second a block, and
so a model of two hundred layers as long as one of three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeroshard.planner.memory import Holdings, UnitBytes
from zeroshard.planner.traces.trace import Mark, Op, Trace
from zeroshard.runs import longest_run


class UnevenError(ValueError):
    """Two models do not differ by one block that is like its neighbours."""


@dataclass(frozen=True)
class _Middle:
    """Where the units of a middle block stand in the deeper of two models."""

    begin: int
    count: int  # units of a block
    names: tuple[str, ...]  # of all units of the deeper model

    @classmethod
    def of(cls, shallow: Sequence[str], deeper: Sequence[str]) -> _Middle:
        """Found by the units' names."""
        count = len(deeper) - len(shallow)
        same = next(
            (i for i, pair in enumerate(zip(shallow, deeper, strict=False)) if pair[0] != pair[1]), len(shallow)
        )
        if count < 1 or same < 2 * count or tuple(deeper[same + count :]) != tuple(shallow[same:]):
            raise UnevenError(f"units {list(deeper)} are not {list(shallow)} and one block more, among others like it")
        return cls(same - count, count, tuple(deeper))

    def __contains__(self, unit: int) -> bool:
        return self.begin <= unit < self.begin + self.count

    def grown(self, extra: int) -> tuple[str, ...]:
        """Names of the units of a model with so many blocks more than the deeper one."""
        further = [self.name(unit, times) for times in range(2, extra + 2) for unit in self._numbers]
        end = self.begin + 2 * self.count
        return (*self.names[:end], *further, *self.names[end:])

    def name(self, unit: int, times: int) -> str:
        """Of a unit so many blocks behind one of the middle block's."""
        parts, next_parts = (self.names[unit + shift].split(".") for shift in (0, self.count))
        if len(parts) != len(next_parts):
            raise UnevenError(
                f"units {self.names[unit]!r} and {self.names[unit + self.count]!r} are not numbered alike"
            )
        pairs = zip(parts, next_parts, strict=True)
        return ".".join(a if a == b else _onward(a, b, times) for a, b in pairs)

    @property
    def _numbers(self) -> range:
        return range(self.begin, self.begin + self.count)


def _onward(part: str, following: str, times: int) -> str:
    if not (part.isdecimal() and following.isdecimal()):
        raise UnevenError(f"blocks are numbered, got {part!r} and then {following!r}")
    return str(int(part) + times * (int(following) - int(part)))


def deepened(shallow: Trace, deeper: Trace, extra: int) -> Trace:
    """The trace of a model with ``extra`` blocks more than ``deeper``, which has one more than ``shallow``.

    See [Note: straight lines in depth].

    >>> import torch
    >>> from zeroshard.models import GPT, GPTConfig
    >>> from zeroshard.planner.traces.tracing import trace
    >>> with torch.device("meta"):
    ...     models = [GPT(GPTConfig(layers=n, heads=2, width=64, vocab_size=256, context=32)) for n in (2, 3, 5)]
    >>> two, three, five = (trace(model, micro_batch=2) for model in models)
    >>> deepened(two, three, 2) == five
    True
    """
    middle = _Middle.of(shallow.units, deeper.units)
    names, half = middle.grown(extra), _half(deeper)
    forward, backward = deeper.events[:half], deeper.events[half:]
    without = (*_woven(forward, middle, -1, shallow.units), *_woven(backward, middle, -1, shallow.units, True))
    more = deeper.blocks - shallow.blocks
    if without != shallow.events or more not in (0, 1) or deeper.inputs != shallow.inputs:
        raise UnevenError("a block in the middle does not do what the others do: trace the whole model")
    return replace(
        deeper,
        events=(*_woven(forward, middle, extra, names), *_woven(backward, middle, extra, names, True)),
        units=names,
        kept=_kept(shallow.kept, deeper.kept, extra),
        blocks=deeper.blocks + extra * more,
        buffers=deeper.buffers + extra * (deeper.buffers - shallow.buffers),
    )


def _half(trace: Trace) -> int:
    """Where backward begins."""
    return next(i for i, e in enumerate(trace.events) if isinstance(e, Mark) and e.moment == "end forward")


def _woven(
    events: Sequence[Op | Mark], middle: _Middle, extra: int, names: Sequence[str], backward: bool = False
) -> list[Op | Mark]:
    """A pass with so many middle blocks more; with one fewer, for -1. ``names`` are those of the units then."""
    begin, end = _cut(events, middle)
    before, block, after = events[:begin], events[begin:end], events[end:]
    copies = [[_moved(event, number * middle.count, names) for event in block] for number in range(extra + 1)]
    if backward:  # comes from the last block to the first
        before = [_behind(event, middle, extra, names) for event in before]
        copies.reverse()
    else:
        after = [_behind(event, middle, extra, names) for event in after]
    return [*before, *(event for copy in copies for event in copy), *after]


def _cut(events: Sequence[Op | Mark], middle: _Middle) -> tuple[int, int]:
    """From where the middle block is brought to where another is."""
    brought = [(i, e.unit) for i, e in enumerate(events) if isinstance(e, Mark) and e.moment == "bring"]
    begin = next((i for i, unit in brought if unit in middle), None)
    if begin is None:
        raise UnevenError("the middle block is never brought: trace the whole model")
    return begin, next((i for i, unit in brought if i > begin and unit not in middle), len(events))


def _behind(event: Op | Mark, middle: _Middle, blocks: int, names: Sequence[str]) -> Op | Mark:
    """An event of what comes behind the middle block, when so many blocks are put in between."""
    unit = event.unit if isinstance(event, Mark) else _unit(event, middle)
    if unit < middle.begin + middle.count:
        return event  # what is there from the beginning to the end, and the moments of no unit
    return _moved(event, blocks * middle.count, names, unit)


def _moved(event: Op | Mark, by: int, names: Sequence[str], unit: int | None = None) -> Op | Mark:
    """The same event of a unit so many places behind."""
    if by == 0:
        return event
    if isinstance(event, Mark):
        return Mark(event.moment, event.unit + by, event.nbytes) if event.unit >= 0 else event
    if unit is None:
        unit = names.index(event.where) if event.where in names else -1
    if unit < 0:
        return event
    return replace(event, where=names[unit + by])


def _unit(op: Op, middle: _Middle) -> int:
    return middle.names.index(op.where) if op.where in middle.names else -1


def _kept(shallow: tuple[float, ...], deeper: tuple[float, ...], extra: int) -> tuple[float, ...]:
    """Of bytes that each block keeps, those with so many blocks more."""
    count = len(deeper) - len(shallow)
    if deeper[count:] != shallow:
        raise UnevenError("a block in the middle does not keep what the others keep: trace the whole model")
    return deeper[:count] * (extra + 1) + shallow


def deepened_holdings(shallow: Holdings, deeper: Holdings, extra: int, bucket_size: int) -> Holdings:
    """The same for what the library holds on the device. Where states rest elsewhere, it is not a straight line."""
    if shallow.far or deeper.far:
        raise UnevenError("states outside the device are divided over all blocks at once: hold the whole model")
    middle = _Middle.of([unit.name for unit in shallow.units], [unit.name for unit in deeper.units])
    begin, end = middle.begin, middle.begin + middle.count
    kept = [
        replace(u, name=s.name) for u, s in zip(deeper.units[:begin] + deeper.units[end:], shallow.units, strict=True)
    ]
    buffers = [(one.rings, one.landings) for one in (shallow, deeper)]
    if kept != shallow.units or buffers[0] != buffers[1]:
        raise UnevenError("a block in the middle does not hold what the others hold: hold the whole model")
    block = deeper.units[begin:end]
    copies = [replace(unit) for _ in range(extra + 1) for unit in block]
    units = deeper.units[:begin] + copies + deeper.units[end:]
    units = [replace(unit, name=name) for unit, name in zip(units, middle.grown(extra), strict=True)]
    states = {kind: nbytes + extra * (nbytes - shallow.states[kind]) for kind, nbytes in deeper.states.items()}
    return replace(deeper, units=units, states=states, step=_step(deeper, units, bucket_size))


def _step(deeper: Holdings, units: Sequence[UnitBytes], bucket_size: int) -> int:
    """The buffer of the update: 4 bytes an element of this rank's shards, up to those of a bucket."""
    trained = min(sum(unit.trained for unit in deeper.units), longest_run(bucket_size))
    return deeper.step // max(trained, 1) * min(sum(unit.trained for unit in units), longest_run(bucket_size))
