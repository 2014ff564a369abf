"""Checkpoints that load on any number of ranks, at any stage, precision and tensor-parallel degree.

Names are imported on first use, so that ``--help`` of the commands does not import torch.
"""

from typing import TYPE_CHECKING

from zeroshard.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from zeroshard.checkpoint.async_save import Save
    from zeroshard.checkpoint.export_weights import copy_companion_files, export
    from zeroshard.checkpoint.group import CheckpointError
    from zeroshard.checkpoint.index import CheckpointIndex, is_checkpoint
    from zeroshard.checkpoint.load_checkpoint import Loaded, load
    from zeroshard.checkpoint.reader import CheckpointReader
    from zeroshard.checkpoint.retention import update_latest
    from zeroshard.checkpoint.save_checkpoint import save

__all__ = [
    "CheckpointError",
    "CheckpointIndex",
    "CheckpointReader",
    "Loaded",
    "Save",
    "copy_companion_files",
    "export",
    "is_checkpoint",
    "load",
    "save",
    "update_latest",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "async_save": "Save",
        "export_weights": "copy_companion_files export",
        "group": "CheckpointError",
        "index": "CheckpointIndex is_checkpoint",
        "load_checkpoint": "Loaded load",
        "reader": "CheckpointReader",
        "retention": "update_latest",
        "save_checkpoint": "save",
    },
)
