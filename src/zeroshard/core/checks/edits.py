"""Edits of parameters by the user's code: taken over where that is possible, else refused."""

from __future__ import annotations

import operator
from typing import Any

import torch

from zeroshard.core.checks.observers import Observer
from zeroshard.core.checks.structure import refuse_moved

FIRST_COMPARISONS = 2  # of a unit
_GET_VERSION = operator.attrgetter("_version")


class EditedMasters(Observer):
    """A replicated 16-bit value that differs from its master, cast, is the user's edit, and becomes the master.

    Units are compared if version counters have changed, or code outside a forward has used them. Neither tells of
    ``parameter.data.clamp_()`` inside a forward: so the first steps compare anyway, and go on while they find an edit.
    """

    def __init__(self) -> None:
        self._versions: dict[Any, list[int]] = {}
        self._comparisons: dict[Any, int] = {}  # that are left

    def on_used_outside(self, unit: Any) -> None:
        self._versions.pop(unit, None)

    @torch.no_grad()
    def on_step(self, engine: Any) -> None:
        for unit in engine.units:
            if not unit.is_sharded and any(flat.copies_master for flat in unit.flats):
                self._take_over(unit)

    def on_masters_used(self, engine: Any) -> None:
        if not engine.gathered_count:  # its end keeps or undoes the edits
            self.on_step(engine)

    def on_values_changed(self, engine: Any) -> None:
        for unit in engine.units:
            if not unit.is_sharded:
                self._versions[unit] = _versions(unit)

    def _take_over(self, unit: Any) -> None:
        versions = _versions(unit)
        is_known = versions == self._versions.get(unit)
        left = self._comparisons.setdefault(unit, FIRST_COMPARISONS)
        if is_known and not left:
            return
        unit.wait()
        edits = [flat.adopt_part(flat.kept_master) for flat in unit.flats if flat.copies_master]
        if is_known:
            self._comparisons[unit] = FIRST_COMPARISONS if any(edits) else left - 1
        unit.keep()
        self._versions[unit] = versions


class LostEdits(Observer):
    """An edit of gathered values would be lost when they are freed."""

    def __init__(self) -> None:
        self._versions: dict[Any, list[int]] = {}

    def on_unsharded(self, unit: Any) -> None:
        if unit.is_sharded:
            self._versions[unit] = _versions(unit)

    def on_reshard(self, unit: Any) -> None:
        is_same = list(map(torch.Tensor.is_set_to, unit.parameters, unit.views))
        if not all(is_same):
            refuse_moved(_names(unit)[is_same.index(False)])
        before = self._versions.pop(unit, None)
        if before is None or before == _versions(unit):
            return
        changed = [name for name, old, new in zip(_names(unit), before, _versions(unit), strict=True) if old != new]
        raise RuntimeError(
            f"{changed[0]!r} was changed while it was gathered, and the change would be lost: change parameters inside "
            "gathered(model, write_rank=0)"
        )


def _versions(unit: Any) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_GET_VERSION, unit.parameters))


def _names(unit: Any) -> list[str]:
    return [name for flat in unit.flats for name in flat.names]
