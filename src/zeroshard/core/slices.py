"""Slice: this rank's part of neighbouring parameters, as one parameter of the private optimizer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from torch import nn

from zeroshard.core.flat import Flat
from zeroshard.core.gradient import Gradient

SCALARS = frozenset(("step", "eta", "mu", "mu_product"))  # states that are not of elements
States = dict[Any, dict[str, Any]]  # the state of an optimizer


class Slice:
    """This rank's part of parameters that follow each other in a flat, are in one group and have equal states."""

    def __init__(self, group: int, flat: Flat, indices: range) -> None:
        self.group = group
        self.flat = flat
        self.indices = indices
        self.values = nn.Parameter(flat.master[self.span_of(flat.state_span, indices)])

    def span_of(self, span: slice, indices: range) -> slice:
        """Return where some of its parameters are in a buffer with the elements ``span`` of the flat."""
        return slice(self.flat.part(span, indices[0]).start, self.flat.part(span, indices[-1]).stop)

    def gradient(self, gradients: Mapping[Flat, Gradient]) -> torch.Tensor:
        """Return its reduced gradient, which is placed like the states."""
        reduced = gradients[self.flat].reduced
        assert reduced is not None
        return reduced[self.span_of(self.flat.grad_span, self.indices)]

    def set_gradient(self, gradients: Mapping[Flat, Gradient]) -> None:
        """Let the private optimizer see its gradient, in the dtype of the master."""
        gradient = gradients[self.flat]
        if gradient.factor is not None and self.flat.dtype == self.values.dtype:
            gradient.set_factor(None)
        exact = self.gradient(gradients).to(self.values.dtype)
        self.values.grad = exact if gradient.factor is None else exact.mul_(gradient.factor)

    def take_back(self) -> None:
        """Write what the private optimizer has put into another tensor to the master."""
        master = self.flat.master[self.span_of(self.flat.state_span, self.indices)]
        if self.values.data_ptr() != master.data_ptr():
            self.values.data = master.copy_(self.values.data)

    def _has_elements(self, value: Any) -> bool:
        """Return whether a state has a value for each element."""
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == self.values.shape

    def cut(self, state: Mapping[str, Any], indices: range) -> dict[str, Any]:
        """Return the state of some of its parameters."""
        origin = self.span_of(self.flat.state_span, self.indices).start
        own = self.span_of(self.flat.state_span, indices)
        part = slice(own.start - origin, own.stop - origin)
        return {
            name: value[part] if self._has_elements(value) else copy.deepcopy(value) for name, value in state.items()
        }

    def cut_whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of the state of a whole parameter, the only one of this slice."""
        index = self.indices[0]
        shape = self.flat.shapes[index]
        found = {}
        for name, value in state.items():
            is_whole = isinstance(value, torch.Tensor) and value.shape == shape and name not in SCALARS
            found[name] = self.flat.part_of(value, self.flat.state_span, index) if is_whole else value
        return found

    def can_join(self, other: Slice, states: States) -> bool:
        """Return whether a slice follows this one, and has an equal state."""
        if (self.group, self.flat, self.indices.stop) != (other.group, other.flat, other.indices.start):
            return False
        own = states.get(self.values, {})
        theirs = states.get(other.values, {})
        if own.keys() != theirs.keys():
            return False
        return all(self._has_elements(value) or _is_equal(value, theirs[name]) for name, value in own.items())


def joined(slices: list[Slice], flats: list[Flat], states: States) -> list[Slice]:
    """Join slices that follow each other."""
    order = {flat: number for number, flat in enumerate(flats)}
    runs: list[list[Slice]] = []
    for each in sorted(slices, key=lambda each: (order[each.flat], each.indices.start)):
        if runs and runs[-1][-1].can_join(each, states):
            runs[-1].append(each)
        else:
            runs.append([each])
    return [_join(run, states) for run in runs]


def _join(run: list[Slice], states: States) -> Slice:
    first = run[0]
    if len(run) == 1:
        return first
    whole = Slice(first.group, first.flat, range(first.indices.start, run[-1].indices.stop))
    parts = [states.pop(each.values, {}) for each in run]
    state = {}
    for name, value in parts[0].items():
        if first._has_elements(value):
            buffer = torch.zeros_like(whole.values.data, dtype=value.dtype)
            for each, part in zip(run, parts, strict=True):
                origin = whole.span_of(whole.flat.state_span, whole.indices).start
                own = each.span_of(whole.flat.state_span, each.indices)
                buffer[own.start - origin : own.stop - origin] = part[name]
            state[name] = buffer
        else:
            state[name] = value
    if state:
        states[whole.values] = state
    return whole


def split_by_gradient(slices: list[Slice], gradients: Mapping[Flat, Gradient], states: States) -> list[Slice]:
    """Divide slices of which some parameters have a gradient, and others have none."""
    found = []
    for each in slices:
        has_grad = gradients[each.flat].has_grad
        runs = [list(run) for _, run in groupby(each.indices, key=has_grad.__getitem__)]
        if len(runs) == 1:
            found.append(each)
            continue
        state = states.pop(each.values, {})
        for run in runs:
            piece = Slice(each.group, each.flat, range(run[0], run[-1] + 1))
            if state:
                states[piece.values] = each.cut(state, piece.indices)
            found.append(piece)
    return found


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.dim() == 0 and other.dim() == 0 and bool(value == other)
    return bool(value == other)
