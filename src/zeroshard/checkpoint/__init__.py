"""Checkpoints that load on any number of ranks, at any stage, precision and tensor-parallel degree."""

from zeroshard.checkpoint.async_save import Save
from zeroshard.checkpoint.export import copy_companion_files, export
from zeroshard.checkpoint.group import CheckpointError
from zeroshard.checkpoint.index import CheckpointIndex, is_checkpoint
from zeroshard.checkpoint.load import Loaded, load
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.retention import update_latest
from zeroshard.checkpoint.save import save

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
