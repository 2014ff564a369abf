"""A checkpoint of the main job is whole, plain, exact, and goes on with any stage and number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_processes, run_threads
from safetensors.torch import load_file, save_file
from torch import nn

import zeroshard
from zeroshard.models import GPT, GPTConfig
from zeroshard.train.checkpoint import Checkpoint, prune, save_checkpoint, whole_checkpoints
from zeroshard.train.weights import Entry, Weights, write_directory, write_file

CONFIG = GPTConfig(vocab_size=32, context=8, layers=2, heads=2, width=8, tied=True)


class WithBuffers(nn.Module):
    """A GPT beside a persistent and a passing buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(CONFIG)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def reset_parameters(self) -> None:
        self.seen.zero_()
        self.scratch.zero_()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.gpt(tokens, tokens)


def tokens(step: int, rows: slice) -> torch.Tensor:
    return torch.randint(32, (12, 8), generator=torch.Generator().manual_seed(step))[rows]


def sharded(stage: int, checkpoint: Checkpoint | None = None, **options: Any):
    with torch.device("meta"):
        model: nn.Module = WithBuffers()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    init_fn = checkpoint.init_fn(model, None) if checkpoint is not None else None
    model, optimizer = zeroshard.shard(model, adam, stage=stage, init_fn=init_fn, timeout=20, **options)
    if checkpoint is not None:
        checkpoint.load_optimizer(optimizer)
    return model, optimizer


def steps(model, optimizer, rank: int, ranks: int, which: range) -> None:
    share = 12 // ranks
    for step in which:
        optimizer.scale(model(tokens(step, slice(rank * share, (rank + 1) * share)))).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer) -> dict[str, torch.Tensor]:
    found = {name: zeroshard.full_parameter(model, name) for name, _ in model.named_parameters()}
    for name in list(found):
        found |= {f"{name}/{key}": torch.as_tensor(value) for key, value in optimizer.full_state(name).items()}
    return found


def write(rank: int, ranks: int, stage: int, parent: Path, options: dict[str, Any]):
    model, optimizer = sharded(stage, **options)
    steps(model, optimizer, rank, ranks, range(3))
    model.seen.fill_(7)
    path = save_checkpoint(parent, 3, model, optimizer, {"seconds": 1.5})
    saved = everything(model, optimizer)
    steps(model, optimizer, rank, ranks, range(3, 5))
    return path, saved, everything(model, optimizer)


def go_on(rank: int, ranks: int, stage: int, path: Path, options: dict[str, Any]):
    checkpoint = Checkpoint(path)
    model, optimizer = sharded(stage, checkpoint, **options)
    loaded = everything(model, optimizer)
    steps(model, optimizer, rank, ranks, range(checkpoint.step, checkpoint.step + 2))
    return loaded, everything(model, optimizer), model.seen.clone(), checkpoint.state


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], relative: float = 0.0) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if relative:
            torch.testing.assert_close(ours[name], value, rtol=relative, atol=relative)
        else:
            assert torch.equal(ours[name], value), name


@pytest.mark.parametrize(
    ("before", "after"),
    [((3, 2), (3, 2)), ((3, 2), (1, 2)), ((0, 1), (3, 4)), ((3, 4), (0, 1)), ((2, 3), (3, 2)), ((1, 2), (2, 3))],
)
def test_what_is_saved_is_loaded_exactly_and_goes_on_alike(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    path, saved, continued = run_threads(before[1], write, before[1], before[0], tmp_path, {})[0]
    for loaded, ours, seen, state in run_threads(after[1], go_on, after[1], after[0], path, {}):
        assert_same(loaded, saved)
        same_ranks = before[1] == after[1]
        assert_same(ours, continued, relative=0.0 if same_ranks else 1e-5)
        assert seen.tolist() == [7, 7, 7]
        assert state["seconds"] == 1.5


def test_in_processes_and_with_other_buckets_too(tmp_path: Path) -> None:
    path, saved, continued = run_processes(2, write, 2, 3, tmp_path, {"bucket_size": 100})[0]
    for loaded, ours, _, _ in run_processes(2, go_on, 2, 3, path, {"bucket_size": 2**20}):
        assert_same(loaded, saved)
        assert_same(ours, continued)


def test_under_fp16_the_master_and_the_loss_scale_are_kept(tmp_path: Path) -> None:
    options = {"precision": "fp16", "loss_scale": 2.0**4}
    path, saved, continued = run_threads(2, write, 2, 3, tmp_path, options)[0]
    stored = load_file(path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    for loaded, ours, _, state in run_threads(2, go_on, 2, 3, path, {"precision": "fp16"}):
        assert state["loss_scale"] == [2.0**4, 3.0]
        assert_same(loaded, saved)
        assert_same(ours, continued)


def test_the_files_are_plain(tmp_path: Path) -> None:
    path, saved, _ = run_threads(2, write, 2, 3, tmp_path, {})[0]
    model, states = load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors")
    assert "scratch" not in model and model["seen"].tolist() == [7, 7, 7]
    assert_same({**{k: v for k, v in model.items() if k != "seen"}, **states}, saved)
    assert json.loads((path / "state.json").read_text())["step"] == 3


def test_what_was_being_written_is_no_checkpoint_and_old_ones_go_last(tmp_path: Path) -> None:
    for name in ("step-000002", "step-000010", "step-000100", ".step-000200.partial"):
        (tmp_path / name).mkdir()
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["step-000002", "step-000010", "step-000100"]
    prune(tmp_path, keep=2)
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["step-000010", "step-000100"]
    prune(tmp_path, keep=5)
    assert len(whole_checkpoints(tmp_path)) == 2


def test_what_a_killed_run_left_half_written_is_written_over(tmp_path: Path) -> None:
    (tmp_path / ".step-000003.partial").mkdir()
    (tmp_path / ".step-000003.partial" / "model.safetensors").write_text("half")
    run_threads(1, write, 1, 0, tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "step-000001"
    path.mkdir()
    save_file({"gpt.tokens.weight": torch.zeros(2, 2), "other": torch.zeros(1)}, path / "model.safetensors")
    (path / "state.json").write_text('{"step": 1}')
    with torch.device("meta"):
        model = WithBuffers()
    with pytest.raises(ValueError, match=r"gpt.tokens.weight is \(2, 2\) there and \(32, 8\) in the model"):
        Checkpoint(path).init_fn(model, None)


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    path, _, _ = run_threads(1, write, 1, 0, tmp_path, {})[0]
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=r"model.safetensors is not a whole safetensors file"):
        Checkpoint(path)
    (path / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"state.json is not JSON"):
        Checkpoint(path)


# ------------------------------------------------------------------------------------------------ files of tensors


def test_tensors_are_written_as_safetensors_reads_them(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4).to(torch.bfloat16),
        "nothing": torch.zeros(0, 3),
        "one": torch.tensor(2.5),
        "flags": torch.tensor([True, False]),
    }
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_file(tmp_path / "t.safetensors", entries, tensors.__getitem__, {"format": "pt"})
    read = load_file(tmp_path / "t.safetensors")
    assert_same(read, tensors)
    assert all(read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    with Weights(tmp_path / "t.safetensors") as weights:
        assert_same(dict(weights), tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]


def test_many_tensors_are_divided_over_files_with_an_index(tmp_path: Path) -> None:
    tensors = {f"w{number}": torch.full((10,), float(number)) for number in range(5)}
    entries = [Entry(name, torch.float32, (10,)) for name in tensors]
    write_directory(tmp_path, entries, tensors.__getitem__, {}, limit=80)
    assert len(list(tmp_path.glob("model-0000?-of-00003.safetensors"))) == 3
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    with Weights(tmp_path) as weights:
        assert_same(dict(weights), tensors)


def test_one_tensor_is_asked_for_at_a_time_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    asked = []

    def fetch(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.zeros(2)

    entries = [Entry("a", torch.float32, (2,)), Entry("b", torch.float32, (3,))]
    with pytest.raises(ValueError, match=r"'b' has shape \(2,\), announced as \(3,\)"):
        write_file(tmp_path / "t.safetensors", entries, fetch, {})
    assert asked == ["a", "b"]
    assert not (tmp_path / "t.safetensors").exists()
    write_file(None, entries, fetch, {})  # a rank that only takes part
    assert asked == ["a", "b", "a", "b"]


def test_weights_that_are_missing_are_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model.safetensors is missing"):
        Weights(tmp_path)
