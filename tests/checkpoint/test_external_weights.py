"""Tensors are written to safetensors files one by one, and read where they lie."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import at_stages
from ranks import run_threads
from safetensors.torch import load_file
from torch import nn

import zeroshard
from zeroshard.utils.safetensors_files import (
    SafetensorsWeights,
    TensorInfo,
    write_safetensors,
    write_safetensors_directory,
)


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_tensors_are_written_as_safetensors_reads_them(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4).to(torch.bfloat16),
        "nothing": torch.zeros(0, 3),
        "one": torch.tensor(2.5),
        "flags": torch.tensor([True, False]),
    }
    entries = [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_safetensors(tmp_path / "t.safetensors", entries, tensors.__getitem__, {"format": "pt"})
    read = load_file(tmp_path / "t.safetensors")
    assert_same(read, tensors)
    assert all(read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    with SafetensorsWeights(tmp_path / "t.safetensors") as weights:
        assert_same(dict(weights), tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]


def test_many_tensors_are_divided_over_files_with_an_index(tmp_path: Path) -> None:
    tensors = {f"w{number}": torch.full((10,), float(number)) for number in range(5)}
    entries = [TensorInfo(name, torch.float32, (10,)) for name in tensors]
    write_safetensors_directory(tmp_path, entries, tensors.__getitem__, {}, max_shard_bytes=80)
    assert len(list(tmp_path.glob("model-0000?-of-00003.safetensors"))) == 3
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    with SafetensorsWeights(tmp_path) as weights:
        assert_same(dict(weights), tensors)


def test_one_tensor_is_asked_for_at_a_time_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    asked = []

    def fetch(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.zeros(2)

    entries = [TensorInfo("a", torch.float32, (2,)), TensorInfo("b", torch.float32, (3,))]
    with pytest.raises(ValueError, match=r"'b' has shape \(2,\), expected \(3,\)"):
        write_safetensors(tmp_path / "t.safetensors", entries, fetch, {})
    assert asked == ["a", "b"]
    assert not (tmp_path / "t.safetensors").exists()
    write_safetensors(None, entries, fetch, {})  # a rank that only takes part
    assert asked == ["a", "b", "a", "b"]


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model.safetensors is missing"):
        SafetensorsWeights(tmp_path)


def load_from_memory(rank: int, plain: nn.Module, state: dict[str, Any]) -> tuple[dict[str, Any], Any, str]:
    model = copy.deepcopy(plain)
    adam = torch.optim.Adam(model.parameters())
    model, optimizer = zeroshard.shard(model, adam, stage=3)
    loaded = zeroshard.load(state, model, strict=False, rename=lambda name: name.removeprefix("module."))
    assert loaded.unexpected == ["other"] and loaded.missing == ["1.bias"]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(zeroshard.CheckpointError) as error:
        zeroshard.load({"0.weight": "a word"}, model)
    full = optimizer.state_dict()
    assert optimizer.state_dict(rank=1).keys() == (full.keys() if rank == 1 else set())
    received = optimizer.state_dict(rank=0)
    if rank == 0:
        torch.testing.assert_close(received, full, rtol=0, atol=0)
    return zeroshard.state_dict(model, rank=None), received, str(error.value)


def test_a_state_dict_in_memory_is_loaded_by_shards_and_states_are_read_on_one_rank() -> None:
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    source = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    state = {f"module.{name}": value for name, value in source.state_dict().items() if name != "1.bias"}
    (first, received, error), (second, nothing, _) = run_threads(
        2, load_from_memory, plain, {**state, "other": torch.ones(1)}
    )
    with torch.no_grad():
        source[1].bias.copy_(plain[1].bias)
    adam = torch.optim.Adam(source.parameters())
    source(torch.ones(1, 3)).sum().backward()
    adam.step()
    torch.testing.assert_close(first, dict(source.state_dict()))
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    torch.testing.assert_close(received, adam.state_dict())
    assert nothing == {} and "0.weight is a str, expected a tensor" in error


class SharedNorm(nn.Module):
    """A module with two names, and a buffer with two names."""

    def __init__(self, is_shared: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.again = self.norm if is_shared else nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("factor", self.scale if is_shared else torch.ones(2))


def load_shared(rank: int, state: dict[str, torch.Tensor], path: Path) -> list[dict[str, Any]]:
    model, _ = zeroshard.shard(SharedNorm(), stage=3)
    zeroshard.load(state, model)
    zeroshard.save(path, model)
    alone, _ = zeroshard.shard(SharedNorm(is_shared=False), stage=3)
    zeroshard.load(path, alone)
    return [zeroshard.state_dict(each, rank=None) for each in (model, alone)]


def test_buffers_with_several_names_load_with_and_without_the_tie(tmp_path: Path) -> None:
    plain = SharedNorm()
    plain.norm.running_mean.add_(3)  # type: ignore[operator, union-attr]
    plain.scale.add_(1)
    state = dict(plain.state_dict())
    for results in run_threads(2, load_shared, state, tmp_path / "step-1"):
        for ours in results:
            torch.testing.assert_close(ours, state, rtol=0, atol=0)


def load_own(rank: int, stage: int, state: dict[str, torch.Tensor], case: str) -> str:
    model, _ = zeroshard.shard(nn.Linear(3, 4), stage=stage)
    if case == "values":
        state = {**state, "weight": state["weight"] + rank}
    elif case == "names" and rank == 1:
        state = {}
    before = zeroshard.state_dict(model, rank=None)
    with pytest.raises(zeroshard.CheckpointError) as error:
        zeroshard.load(state, model, strict=False)
    torch.testing.assert_close(zeroshard.state_dict(model, rank=None), before, rtol=0, atol=0)
    return str(error.value)


@at_stages(0, 3)
@pytest.mark.parametrize(("case", "name"), [("values", "weight"), ("names", "bias")])
def test_state_dicts_that_differ_between_ranks_are_refused(stage: int, case: str, name: str) -> None:
    state = dict(nn.Linear(3, 4).state_dict())
    for message in run_threads(2, load_own, stage, state, case):
        assert f"{name!r} differs between ranks" in message
