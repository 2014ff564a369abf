"""Checkpoints that load on any number of ranks, at any stage, precision and tensor-parallel degree."""

from zeroshard.checkpoint.async_save import Save
from zeroshard.checkpoint.checkpoint_reader import CheckpointReader
from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.export import CONFIG_FILE, export
from zeroshard.checkpoint.index import CheckpointIndex, is_checkpoint
from zeroshard.checkpoint.load import Loaded, load
from zeroshard.checkpoint.retention import update_latest
from zeroshard.checkpoint.safetensors_files import (
    DTYPE_NAMES,
    SAFETENSORS_FILE,
    SAFETENSORS_INDEX_FILE,
    SafetensorsWeights,
    TensorInfo,
    write_safetensors,
    write_safetensors_directory,
)
from zeroshard.checkpoint.save import save

__all__ = [
    "CONFIG_FILE",
    "DTYPE_NAMES",
    "SAFETENSORS_FILE",
    "SAFETENSORS_INDEX_FILE",
    "CheckpointError",
    "CheckpointIndex",
    "CheckpointReader",
    "Loaded",
    "SafetensorsWeights",
    "Save",
    "TensorInfo",
    "export",
    "is_checkpoint",
    "load",
    "save",
    "update_latest",
    "write_safetensors",
    "write_safetensors_directory",
]
