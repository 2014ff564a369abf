"""Checkpoint: a run at one step, whole and in plain files, so that it goes on with any stage and number of ranks.

[Note: a checkpoint's files]
``checkpoints/step-000200/`` holds ``model.safetensors`` (every parameter under its plain name, the master's value where
there is one, and every persistent buffer), ``optimizer.safetensors`` (``NAME/exp_avg`` and so on) and ``state.json``.
Tensors are gathered one by one and written by rank 0, so no rank holds more than its shards and one whole tensor. The
directory gets its name when everything in it is on disk: a checkpoint is whole or not there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from zeroshard.train.directory import read_json, write_json
from zeroshard.train.weights import Entry, Weights, write_file

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


def save_checkpoint(
    parent: Path, step: int, model: nn.Module, optimizer: zeroshard.ShardedOptimizer, state: Mapping[str, Any]
) -> Path:
    """Write the checkpoint of ``step``; ``state`` is plain data that goes with it. All ranks call it together."""
    first = dist.get_rank() == 0
    path = parent / f"step-{step:06d}"
    partial = parent / f".step-{step:06d}.partial"
    if first:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
        partial.mkdir(parents=True)
    try:
        _save_model(partial / MODEL if first else None, model)
        _save_optimizer(partial / OPTIMIZER if first else None, model, optimizer)
        scale = optimizer.loss_scale_state()
        if first:
            write_json(partial / STATE, {"step": step, "loss_scale": scale, **state})
            if path.exists():  # the same step again, after a resume from before it
                shutil.rmtree(path)
            partial.rename(path)
            _sync(parent)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk, room for what is still to be written
        raise
    dist.barrier()
    return path


def _save_model(path: Path | None, model: nn.Module) -> None:
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    buffers = dict(persistent_buffers(model))
    entries = []
    for name, parameter in model.named_parameters():
        widened = name in trainable and parameter.dtype in (torch.bfloat16, torch.float16)  # as its master copy is
        entries.append(Entry(name, torch.float32 if widened else parameter.dtype, tuple(parameter.shape)))
    entries += [Entry(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()]

    def fetch(name: str) -> torch.Tensor:
        return buffers[name] if name in buffers else zeroshard.full_parameter(model, name)

    write_file(path, entries, fetch, {"format": "pt"})


def _save_optimizer(path: Path | None, model: nn.Module, optimizer: zeroshard.ShardedOptimizer) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    entries, counters = [], {}
    for name, states in optimizer.describe_states().items():
        for key, value in states.items():
            if isinstance(value, torch.dtype):
                entries.append(Entry(f"{name}/{key}", value, shapes[name]))
            else:
                counters[f"{name}/{key}"] = counter = torch.as_tensor(value)
                entries.append(Entry(f"{name}/{key}", counter.dtype, tuple(counter.shape)))
    whole: dict[str, dict[str, Any]] = {}  # of one parameter at a time

    def fetch(entry: str) -> torch.Tensor:
        if entry in counters:
            return counters[entry]
        name, _, key = entry.rpartition("/")
        if name not in whole:
            whole.clear()
            whole[name] = zeroshard.full_state(optimizer, name)
        tensor: torch.Tensor = whole[name][key]
        return tensor

    write_file(path, entries, fetch, {})


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that belong to a model's state, by name."""
    for prefix, module in model.named_modules():
        for key, buffer in module.named_buffers(prefix, recurse=False):
            if key.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield key, buffer


class Checkpoint:
    """A checkpoint to go on from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = read_json(path / STATE)
        self._model = Weights(path / MODEL)

    @property
    def step(self) -> int:
        """How many steps were done."""
        return int(self.state["step"])

    def init_fn(self, model: nn.Module, before: Callable[[nn.Module], None] | None) -> Callable[[nn.Module], None]:
        """What fills the modules of a model on the meta device: ``before`` (what would fill a new one), then this."""
        self.verify(model)
        names = {module: name for name, module in model.named_modules()}

        def fill(module: nn.Module) -> None:
            if before is not None:
                before(module)
            elif callable(reset := getattr(module, "reset_parameters", None)):
                reset()
            prefix = names[module]
            tensors = [*module.named_parameters(prefix, recurse=False), *module.named_buffers(prefix, recurse=False)]
            with torch.no_grad():
                for name, tensor in tensors:
                    if name in self._model:
                        tensor.copy_(self._model[name])

        return fill

    def load_optimizer(self, optimizer: zeroshard.ShardedOptimizer) -> None:
        """Give the optimizer its states back: each rank reads its own part."""
        with Weights(self.path / OPTIMIZER) as weights:
            states: dict[str, dict[str, torch.Tensor]] = {}
            for entry in weights:
                name, _, key = entry.rpartition("/")
                states.setdefault(name, {})[key] = weights[entry]
            numbers = {name: number for number, name in enumerate(n for group in optimizer.names for n in group)}
            whole = {
                "state": {numbers[name]: state for name, state in states.items()},
                "param_groups": [{"params": [numbers[name] for name in group]} for group in optimizer.names],
            }
            if self.state["loss_scale"] is not None:
                whole["loss_scale"] = self.state["loss_scale"]
            optimizer.load_state_dict(whole)

    def verify(self, model: nn.Module) -> None:
        """Refuse a checkpoint of another model, with what differs."""
        wanted = {name: tuple(p.shape) for name, p in (*model.named_parameters(), *persistent_buffers(model))}
        found = {name: tuple(self._model[name].shape) for name in self._model}
        unlike = [
            f"{name} is {found.get(name, 'missing')} there and {wanted.get(name, 'missing')} in the model"
            for name in sorted({*wanted, *found}, key=lambda name: (name not in wanted or name not in found, name))
            if wanted.get(name) != found.get(name)
        ]
        if unlike:
            more = f"; and {len(unlike) - 8} more" if len(unlike) > 8 else ""
            raise ValueError(f"{self.path} is a checkpoint of another model: {'; '.join(unlike[:8])}{more}")


def whole_checkpoints(parent: Path) -> list[Path]:
    """The checkpoints of a run, the newest last."""
    named = [path for path in parent.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(named, key=step_of)


def step_of(path: Path) -> int:
    """The step of a checkpoint by its name."""
    return int(path.name.removeprefix("step-"))


def set_aside(path: Path) -> None:
    """Make a checkpoint none that a run goes on from, without deleting it."""
    path.rename(path.with_name(f"{path.name}.diverged"))


def prune(parent: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints."""
    for path in whole_checkpoints(parent)[:-keep]:
        gone = path.with_name(f".{path.name}.partial")  # not a checkpoint any more from this moment on
        path.rename(gone)
        shutil.rmtree(gone)


def _sync(directory: Path) -> None:
    """Make a rename in a directory outlive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
