"""Checks of what users might do wrong, beside the mechanism. Right programs need none of them."""

from zeroshard.core.checks.edits import EditedMasters, LostEdits
from zeroshard.core.checks.observers import Observers
from zeroshard.core.checks.structure import ChangedModel

__all__ = ["default_observers"]


def default_observers() -> Observers:
    """Return the checks of a model."""
    return Observers([EditedMasters(), LostEdits(), ChangedModel()])
