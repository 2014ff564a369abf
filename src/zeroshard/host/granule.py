"""Granule: a stretch of optimizer states outside the device, updated and brought back at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zeroshard.engine.flat import Flat
from zeroshard.layout import Range
from zeroshard.memory.spread import Stretch
from zeroshard.memory.tiers import Tiers
from zeroshard.runs import Run, is_elementwise

MASTER = ""  # the key of the values that are updated, beside the optimizer's own names of its states


class Granule:
    """The master's values of one stretch, in ``stretch``, and the states that belong to them, each in one tensor.

    [Note: beside the old values]
    An update ahead of ``step()`` may turn out to be wrong: another backward may come, the gradients may be clipped or
    overflow, a hyper-parameter may change. So it is written to tensors of its own, ``beside``, and leaves the old
    values as they are. To confirm it, old and new change places; to drop it, nothing has to be done: so it is exact.
    """

    def __init__(self, flat: Flat, stretch: Stretch) -> None:
        self.flat, self.stretch = flat, stretch
        homes = enumerate(flat.homes)
        self._number = next(number for number, home in homes if home.meet(stretch.span) is not None)
        self.states: dict[str, torch.Tensor] = {}
        self.beside: dict[str, torch.Tensor] = {}  # by the same keys, and MASTER
        self.copy: torch.Tensor | None = None  # new parameters in the dtype of computation, ahead of the step
        self.runs: list[Run] = []
        self.whole = False  # whether these are all it holds

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stretch.span.numel

    @property
    def tier(self) -> str:
        """Where it rests."""
        return self.stretch.tier

    @property
    def lines(self) -> dict[str, torch.Tensor]:
        """The values and their states where they rest, by key."""
        return {MASTER: self.stretch.tensor, **self.states}

    @property
    def place(self) -> torch.Tensor:
        """The same stretch of the parameters in computation."""
        home = self.flat.homes[self._number]
        span = self.stretch.span.moved(-home.start)
        return self.flat.owned[self._number][span.start : span.end]

    def within(self, run: Run) -> Range:
        """Where a run lies in the granule."""
        return run.parts[0].span.moved(-self.stretch.span.start)

    def covered(self, runs: list[Run]) -> bool:
        """Whether these runs are all that the granule holds, alignment aside."""
        span = self.stretch.span
        pieces = [Range(piece.at, piece.at + piece.within.numel).meet(span) for piece in self.flat.segments]
        wanted = sum(piece.numel for piece in pieces if piece is not None)
        return wanted == sum(within.numel for run in runs for _, _, within, _ in run.places())

    def room(self, run: Run, key: str, dtype: torch.dtype, tiers: Tiers) -> torch.Tensor:
        """Where a state of a run belongs."""
        line = self.states.get(key)
        if line is None or line.dtype != dtype:
            line = self.states[key] = tiers.zeros(None, self.tier, self.numel, dtype)
        return line[self.within(run).slice]

    def house(
        self, run: Run, state: dict[str, Any], tiers: Tiers, lines: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Bring states of a run that were made or loaded elsewhere into the granule's own tensors.

        ``lines`` are the buffers that tensors on disk were read into and will be written from: what is in them counts.
        """
        for key, value in state.items():
            if not is_elementwise(key, value, run.parameter.shape):
                continue
            line = None if lines is None else lines.get(key)
            if line is not None and line.dtype == value.dtype:
                view = line[self.within(run).slice]
            else:
                view = self.room(run, key, value.dtype, tiers)
            if value.data_ptr() != view.data_ptr():
                view.copy_(value)
                state[key] = view

    def open_beside(self, tiers: Tiers, keys: list[str]) -> None:
        """Make room beside the old values, and for the parameters in computation."""
        for key in (MASTER, *keys):
            if key not in self.beside:
                dtype = self.stretch.tensor.dtype if key == MASTER else self.states[key].dtype
                self.beside[key] = tiers.zeros("ahead of the step", "host", self.numel, dtype)
        if self.copy is None:
            self.copy = tiers.zeros("ahead of the step", "host", self.numel, self.flat.dtype, pinned=True)

    def exchange(self, keys: list[str], states: dict[Run, dict[str, Any]]) -> None:
        """Let old and new values change places."""
        old, self.stretch.tensor = self.stretch.tensor, self.beside[MASTER]
        self.beside[MASTER] = old
        for key in keys:
            self.states[key], self.beside[key] = self.beside[key], self.states[key]
        for run, state in states.items():
            within = self.within(run)
            run.parameter.data = self.stretch.tensor[within.start : within.end]
            for key in keys:
                state[key] = self.states[key][within.start : within.end]
