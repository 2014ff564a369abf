"""An export is what was saved, in a form that others read; `zeroshard inspect` tells what is in a checkpoint."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from live import allocated_bytes
from plain import Tensors, masters, take_step
from ranks import run_processes, run_threads
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from zoo import built

import zeroshard
from zeroshard.checkpoint.block_files import BLOCK_BYTES, BlockReader
from zeroshard.checkpoint.export_weights import export
from zeroshard.checkpoint.group import CheckpointError
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.retention import list_checkpoints
from zeroshard.checkpoint.train_state import persistent_buffers
from zeroshard.cli.main import main

RANKS = 3


class Net(nn.Module):
    """Something of everything: tied, frozen, turned, scalar and empty parameters; buffers that are kept and not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.convolution = nn.Conv2d(3, 5, (2, 3)).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        image = torch.ones(1, 3, 4, 4, dtype=self.convolution.weight.dtype)
        hidden = self.frozen(self.norm(self.embedding(tokens))) * self.scale
        return self.head(hidden).square().mean() + self.convolution(image).mean() + self.empty.sum()


def tokens(rank: int) -> torch.Tensor:
    return torch.randint(11, (8,), generator=torch.Generator().manual_seed(rank))


def train_and_save(model: nn.Module, loss: Callable[[nn.Module, int], torch.Tensor], path: Path, **options: Any):
    """Two steps on each rank, and a save; returns the whole parameters and persistent buffers."""

    def body(rank: int) -> Tensors:
        mine = copy.deepcopy(model)
        adam = torch.optim.AdamW([p for p in mine.parameters() if p.requires_grad], lr=1e-2)
        sharded, optimizer = zeroshard.shard(mine, adam, stage=3, bucket_size=100, timeout=20, **options)
        for step in range(2):
            take_step(optimizer, loss(sharded, RANKS * step + rank))
        zeroshard.save(path, sharded, optimizer, extra={"step": 2, "epoch": 0.5})
        whole = masters(sharded)
        return whole | {name: buffer.clone() for name, buffer in persistent_buffers(sharded)}

    return run_threads(RANKS, body)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    path = tmp_path_factory.mktemp("saved") / "step-2"
    net = built(Net)
    whole = train_and_save(net, lambda model, number: model(tokens(number)), path, precision="bf16")
    return path, whole


@pytest.fixture
def copied(saved: tuple[Path, Any], tmp_path: Path) -> Path:
    """The same checkpoint, to be damaged."""
    path = tmp_path / "copied" / "step-2"
    path.mkdir(parents=True)
    for file in saved[0].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def damage(path: Path, kind: str) -> Path:
    """Turn one bit at the end of a file."""
    file = sorted(path.glob(f"{kind}-*.safetensors"))[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file


def load_all(directory: Path) -> Tensors:
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


# ----------------------------------------------------------------------------------------------------- export


def test_an_export_holds_every_parameter_and_buffer_as_the_ranks_had_them(saved: Any, tmp_path: Path) -> None:
    path, whole = saved
    exported = export(path, tmp_path / "out")
    assert [file.name for file in exported.iterdir()] == ["model.safetensors"]
    assert "head.weight" not in whole and whole["embedding.weight"].dtype == torch.float32
    assert not whole["convolution.weight"].is_contiguous()
    assert_same(load_all(exported), whole)
    with safe_open(exported / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    missing, unexpected = Net().load_state_dict(load_all(exported), strict=False)
    assert missing == ["head.weight"] and not unexpected  # tied to the embedding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_only_floating_point_tensors_are_cast(saved: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    path, whole = saved
    wanted = {name: t.to(dtype) if t.is_floating_point() else t for name, t in whole.items()}
    assert wanted["norm.num_batches_tracked"].dtype == torch.int64
    assert_same(load_all(export(path, tmp_path / "out", dtype=dtype)), wanted)


def test_values_that_fp16_cannot_hold_are_reported(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 1e6)
    path = zeroshard.save(tmp_path / "saved", model).path
    with pytest.warns(UserWarning, match="weight has values beyond ±65504"):
        export(path, tmp_path / "out", dtype=torch.float16)


def test_several_files_have_an_index(saved: Any, tmp_path: Path) -> None:
    path, whole = saved
    exported = export(path, tmp_path / "out", max_shard=300)
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(exported / file)[name], whole[name])
    for file in exported.glob("*.safetensors"):
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 300
    assert index["weight_map"].keys() == whole.keys()


def test_tensors_lie_at_multiples_of_their_elements(saved: Any, tmp_path: Path) -> None:
    """Readers that map a file into memory want it."""
    file = export(saved[0], tmp_path / "out") / "model.safetensors"
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    sizes = {"I64": 8, "F32": 4, "BF16": 2}
    header.pop("__metadata__")
    assert len({entry["dtype"] for entry in header.values()}) > 1
    assert all((8 + length + entry["data_offsets"][0]) % sizes[entry["dtype"]] == 0 for entry in header.values())


def test_a_directory_of_checkpoints_and_a_run_mean_their_latest(saved: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "step-2").symlink_to(saved[0])
    assert_same(load_all(export(saved[0].parent, tmp_path / "a")), saved[1])
    assert_same(load_all(export(run, tmp_path / "b")), saved[1])
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        export(tmp_path / "nowhere", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def memory_of_export(rank: int, path: Path, target: Path, dtype: torch.dtype | None) -> tuple[int, int]:
    return allocated_bytes(lambda: export(path, target, dtype=dtype))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_memory_is_that_of_the_largest_tensor(tmp_path: Path, dtype: torch.dtype | None) -> None:
    """4 blocks: those read ahead, and the last of the file, which is kept."""
    model = nn.Sequential(nn.Linear(1024, 2048, bias=False), *(nn.Linear(1024, 1024, bias=False) for _ in range(7)))
    path = zeroshard.save(tmp_path / "saved", model).path
    largest = 1024 * 2048 * (dtype or torch.float32).itemsize
    assert (
        sum(parameter.nbytes for parameter in model.parameters()) > largest + 5 * BLOCK_BYTES
    )  # else nothing is shown
    ((most, left),) = run_processes(1, memory_of_export, path, tmp_path / "out", dtype, fresh=True)
    assert largest <= most <= largest + 4 * BLOCK_BYTES + 10_000
    assert left == 0


def test_every_block_is_read_once_however_small_the_tensors(
    tmp_path: Path, saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: Counter[tuple[str, int]] = Counter()
    fetch = BlockReader._read_block

    def counted(reader: BlockReader, number: int, buffer: torch.Tensor) -> int:
        fetched[reader._path.name, number] += 1
        return fetch(reader, number, buffer)

    monkeypatch.setattr(BlockReader, "_read_block", counted)
    export(saved[0], tmp_path / "out")
    assert fetched == Counter({(file.name, 0): 1 for file in saved[0].glob("model-*")})


def test_no_more_files_are_open_than_said(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.checkpoint.reader.MAX_OPEN_FILES", 1)
    path, whole = saved
    with CheckpointReader(path) as contents:
        for name, tensor in whole.items():
            assert torch.equal(contents.read_tensor(f"model/{name}"), tensor)
            assert len(contents._open_files) <= 1


# ------------------------------------------------------------------------------------- exports that are refused


@pytest.mark.parametrize("there", [False, True], ids=["new", "empty"])
def test_a_damaged_file_is_named_and_nothing_is_left(copied: Path, tmp_path: Path, there: bool) -> None:
    file = damage(copied, "model")
    target = tmp_path / "somewhere" / "out"
    target.parent.mkdir()
    if there:
        target.mkdir()
    with pytest.raises(CheckpointError, match=f"{file.name} is damaged"):
        export(copied, target)
    assert list(target.parent.iterdir()) == ([target] if there else [])
    assert not there or not list(target.iterdir())


def test_damage_of_optimizer_states_does_not_matter(copied: Path, saved: Any, tmp_path: Path) -> None:
    damage(copied, "optimizer")
    assert_same(load_all(export(copied, tmp_path / "out")), saved[1])


def test_values_that_no_rank_has_written_are_missed(copied: Path, tmp_path: Path) -> None:
    with CheckpointReader(copied) as contents:
        contents.index.tensors["model/frozen.weight"].shards.pop()
        with pytest.raises(ValueError, match=r"model/frozen\.weight has no values from element \d+ of 36 on"):
            contents.index.write(copied)
    export(copied, tmp_path / "out")  # what was there is whole


def test_the_target_is_empty_or_not_there(saved: Any, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="full is not empty: pass an empty directory"):
        export(saved[0], tmp_path / "full")
    with pytest.raises(FileExistsError, match=r"notes\.txt is a file"):
        export(saved[0], tmp_path / "full" / "notes.txt")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["notes.txt"]
    for leftover in (tmp_path / "empty" / ".partial", tmp_path / ".new.partial"):  # of exports that were killed
        leftover.mkdir(parents=True)
        (leftover / "model-00001-of-00002.safetensors").write_text("half")
    for name in ("empty", "new"):
        exported = export(saved[0], tmp_path / name)
        assert [file.name for file in exported.iterdir()] == ["model.safetensors"]
        assert_same(load_all(exported), saved[1])
    assert not (tmp_path / ".new.partial").exists()


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    path = zeroshard.save(tmp_path / "saved", model, torch.optim.Adam(model.parameters()), weights=False).path
    with pytest.raises(CheckpointError, match=r"contains no weights: it was saved with weights=False"):
        export(path, tmp_path / "out")


@pytest.mark.parametrize("wrong", [{"max_shard": 0}, {"dtype": torch.int8}])
def test_options_that_cannot_be_meant_are_refused(saved: Any, tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        export(saved[0], tmp_path / "out", **wrong)


# ------------------------------------------------------------------------------------------------ Hugging Face


def test_transformers_loads_an_export_as_the_model_it_was(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = built(
        lambda: LlamaForCausalLM(LlamaConfig(vocab_size=11, tie_word_embeddings=True, dtype="float32", **sizes))
    )

    def loss(sharded: nn.Module, number: int) -> torch.Tensor:
        row = tokens(number)[None]
        return sharded(input_ids=row, labels=row, use_cache=False).loss

    whole = train_and_save(model, loss, tmp_path / "saved", precision="bf16")
    missing, _ = model.load_state_dict(whole, strict=False)
    assert missing == ["lm_head.weight"]
    read: Callable[..., Any] = functools.partial(AutoModelForCausalLM.from_pretrained, local_files_only=True)
    row = tokens(7)[None]
    exported = read(export(tmp_path / "saved", tmp_path / "several", max_shard=5_000))
    assert exported.dtype == torch.float32 and exported.lm_head.weight is exported.model.embed_tokens.weight
    assert (tmp_path / "several" / "model.safetensors.index.json").is_file()
    assert torch.equal(exported(row).logits, model(row).logits)
    half = read(export(tmp_path / "saved", tmp_path / "half", dtype=torch.bfloat16))
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert_same(half.state_dict(), {name: tensor.bfloat16() for name, tensor in model.state_dict().items()})


def test_config_and_tokenizer_come_from_a_model_that_is_like_it(saved: Any, tmp_path: Path) -> None:
    like = tmp_path / "like"
    like.mkdir()
    with pytest.raises(FileNotFoundError, match=r"like has no config\.json"):
        export(saved[0], tmp_path / "out", like=like)
    (like / "config.json").write_text('{"model_type": "net", "torch_dtype": "float16", "name": "é"}')
    beside = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"]
    for name in [*beside, "model.safetensors", "README.md"]:
        (like / name).write_text(f"of {name}")
    exported = export(saved[0], tmp_path / "out", like=like)
    assert {file.name for file in exported.iterdir()} == {*beside, "config.json", "model.safetensors"}
    assert all((exported / name).read_text() == f"of {name}" for name in beside)
    config = json.loads((exported / "config.json").read_text())
    assert config == {"model_type": "net", "torch_dtype": "float32", "name": "é"}
    assert_same(load_all(exported), saved[1])
    (like / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        export(saved[0], tmp_path / "again", like=like)


# ------------------------------------------------------------------------------------------------ the commands


def test_the_export_command(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["export", str(saved[0]), str(out), "--dtype", "bf16", "--max-shard", "0.3kB"]) == 0
    told = capsys.readouterr()
    assert str(out) in told.out and "no config.json" in told.out and not told.err
    assert load_all(out)["embedding.weight"].dtype == torch.bfloat16
    assert (out / "model.safetensors.index.json").is_file()
    assert main(["export", str(saved[0]), str(out)]) == 1
    told = capsys.readouterr()
    assert told.err == f"zeroshard export: {out} is not empty: pass an empty directory, or one that does not exist\n"
    assert main(["export", str(saved[0]), str(out), "--max-shard", "many"]) == 1
    assert "--max-shard is a number of bytes, or one with a unit as in '64GB'" in capsys.readouterr().err


def test_inspect_tells_what_is_there(saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = saved
    assert main(["inspect", str(path.parent)]) == 0
    told = capsys.readouterr().out
    lines = {line.split()[0]: line for line in told.splitlines() if line}
    assert told.splitlines()[0] == str(path)
    assert f"zeroshard {zeroshard.__version__}, torch {torch.__version__}" in lines["written"]
    assert lines["ranks"].split(None, 1)[1] == f"{RANKS}, stage 3, precision bf16"
    assert lines["step"].split() == ["step", "2"]
    assert lines["extra"].split(None, 1)[1] == "step, epoch"
    assert lines["parameters"].split(None, 1)[1] == "216: 174 trained, 42 frozen"
    assert lines["optimizer"].split() == ["optimizer", "AdamW"]
    assert "7 parameters, lr 0.01, betas [0.9, 0.999]" in lines["group"]
    states = "exp_avg F32, exp_avg_sq F32"
    row = f"embedding.weight [11, 6] F32 264 B trained {states} (also head.weight)"
    assert lines["embedding.weight"].split() == row.split()
    assert lines["convolution.weight"].endswith(f"trained  {states}")
    assert lines["frozen.weight"].endswith("frozen")
    assert lines["norm.num_batches_tracked"].split() == "norm.num_batches_tracked [] I64 8 B buffer".split()
    columns = {lines[name].rindex(kind) for name, kind in (("embedding.weight", "trained"), ("frozen.bias", "frozen"))}
    assert len(columns) == 1  # the table is one


def test_inspect_as_json(saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path, whole = saved
    assert main(["inspect", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["path"] == str(path) and (told["ranks"], told["stage"], told["precision"]) == (RANKS, 3, "bf16")
    assert (
        told["step"] == 2 and told["extra"] == ["step", "epoch"] and told["ties"] == {"head.weight": "embedding.weight"}
    )
    assert told["bytes"] == sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert told["bytes_by_kind"]["model"] == sum(tensor.nbytes for tensor in whole.values())
    assert {tensor["name"]: tuple(tensor["shape"]) for tensor in told["tensors"]} == {
        name: tuple(tensor.shape) for name, tensor in whole.items()
    }
    assert told["optimizer"]["groups"][0]["lr"] == 0.01 and "damages" not in told


@pytest.mark.parametrize("double", [False, True], ids=["fp32", "fp64"])
def test_inspect_of_states_alone_without_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], double: bool
) -> None:
    """Adam counts its steps in the default dtype, and counts in fp64 lie in a file."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if double else before)
    try:
        model = nn.Linear(2, 1)
        adam = torch.optim.Adam(model.parameters())
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            adam.step()
        path = zeroshard.save(tmp_path / "saved", model, adam, weights=False, extra={(1, 2): "a"}, rank_extra=7).path
    finally:
        torch.set_default_dtype(before)
    assert main(["inspect", str(path)]) == 0
    told = capsys.readouterr().out
    assert "step        3\n" in told and "not sharded" in told and "parameters  3: 3 trained" in told
    assert "[1, 2]  not saved" in told and "extra       [1, 2]" in told and "rank_extra" in told


def test_verify_reads_everything(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(copied), "--verify"]) == 0
    told = capsys.readouterr()
    assert f"intact: all {len(list(copied.glob('*.safetensors')))} files verified" in told.out and not told.err
    first, second = damage(copied, "optimizer"), damage(copied, "other")
    assert main(["inspect", str(copied)]) == 0  # the index is whole
    capsys.readouterr()
    assert main(["inspect", str(copied), "--verify", "--json"]) == 1
    told = capsys.readouterr()
    damages = json.loads(told.out)["damages"]
    assert [name for damaged in damages for name in (first.name, second.name) if name in damaged] == [
        first.name,
        second.name,
    ]
    assert told.err == "".join(f"zeroshard inspect: {damaged}\n" for damaged in damages)
    first.unlink()
    assert main(["inspect", str(copied), "--verify"]) == 1
    assert f"{first.name} is missing" in capsys.readouterr().err


def test_anything_but_a_checkpoint_is_reported_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not list_checkpoints(tmp_path)
    for command in (["inspect", str(tmp_path)], ["export", str(tmp_path), str(tmp_path / "out")]):
        assert main(command) == 1
        told = capsys.readouterr().err
        assert told.startswith(f"zeroshard {command[0]}: {tmp_path} is neither a checkpoint") and told.count("\n") == 1


def test_help_needs_neither_torch_nor_tyro() -> None:
    code = "import sys; from zeroshard.cli.main import main\nmain(['--help'])\n"
    for command in ("export", "inspect"):
        code += f"try: main(['{command}', '--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'tyro', 'rich')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--max-shard" in done.stdout and "--verify" in done.stdout
    assert "  export " in done.stdout and "  inspect " in done.stdout
