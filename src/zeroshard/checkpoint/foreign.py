"""Foreign weights: Hugging Face's safetensors directories and plain ``torch.save`` files, read straight into shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import ReadItem

from zeroshard.checkpoint.errors import CheckpointError
from zeroshard.checkpoint.index import Saved, Stretch
from zeroshard.checkpoint.order import Order
from zeroshard.checkpoint.reader import LoadPlans, TensorReader
from zeroshard.checkpoint.weights import INDEX, SINGLE, Weights

PICKLED = (".pt", ".pth", ".bin", ".ckpt")


def is_foreign(path: Path) -> bool:
    """Whether a path looks like weights that others wrote."""
    if path.is_dir():
        return (path / INDEX).is_file() or (path / SINGLE).is_file()
    return path.suffix in (".safetensors", *PICKLED)


def open_foreign(path: Path, rename: Callable[[str], str] | None) -> Mapping[str, torch.Tensor]:
    """Open weights by name. Tensors are mapped from the files: memory is read where it is touched."""
    try:
        tensors = _pickled(path) if path.suffix in PICKLED and path.is_file() else Weights(path)
    except (ValueError, FileNotFoundError) as error:
        raise CheckpointError(str(error)) from error
    if rename is None:
        return tensors
    names = {rename(name): name for name in tensors}
    if len(names) != len(tensors):
        raise CheckpointError(f"rename gives several tensors of {path} the same name")
    return _Renamed(tensors, names)


def _pickled(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read as a torch.save of tensors alone: {first_line}") from error
    if isinstance(loaded, Mapping) and loaded and all(isinstance(value, torch.Tensor) for value in loaded.values()):
        for name, tensor in loaded.items():
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
                kind = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
                raise CheckpointError(f"{path}: {name} is {kind}, expected a dense tensor with values: save it as one")
        return loaded
    kind = f"a dict of {sorted(map(str, loaded))[:8]}" if isinstance(loaded, Mapping) else type(loaded).__name__
    raise CheckpointError(
        f"{path} holds {kind}, not a state dict of tensors by name: save the state dict alone, "
        "torch.save(model.state_dict(), path)"
    )


class _Renamed(Mapping[str, torch.Tensor]):
    """Weights under other names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: dict[str, str]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def saved_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Saved]:
    """Describe foreign weights as a checkpoint's: each tensor is one stretch, in the order of its dimensions."""
    described = {}
    for name, tensor in tensors.items():
        order = Order(tuple(range(tensor.dim())))
        stretches = [Stretch(0, tensor.numel(), 0, 0)] if tensor.numel() else []
        described[f"model/{name}"] = Saved(tuple(tensor.shape), tensor.dtype, order, stretches)
    return described


class ForeignReader(TensorReader):
    """Reads foreign weights: each rank touches only the elements it holds."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(saved_of(tensors))
        self._source = tensors

    def read(self, items: Sequence[ReadItem], planner: LoadPlans) -> None:
        """Copy out of the mapped files."""
        for item in items:
            tensor = self._source[self.saved_name(item).removeprefix("model/")]
            start, numel = item.storage_offsets[0], item.lengths[0]
            planner.resolve_tensor(item).copy_(tensor.reshape(-1)[start : start + numel])
            planner.commit_tensor(item, tensor)
