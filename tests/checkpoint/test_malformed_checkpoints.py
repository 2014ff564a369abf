"""Checkpoints from strangers: whatever an index with a right checksum says, it loads as it was saved or is refused."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import run_threads
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import zeroshard
from zeroshard import CheckpointError
from zeroshard.checkpoint.json_codec import decode, encode
from zeroshard.checkpoint.retention import list_checkpoints, lock_for_save
from zeroshard.cli.main import main

INDEX = "index.json"
Plain = dict[str, Any]


def made(step: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(step):
        optimizer.zero_grad()
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(number))).square().sum().backward()
        optimizer.step()
    return model, optimizer


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Plain:
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    described = optimizer.state_dict()
    for number, state in described["state"].items():
        values |= {f"{number}/{key}": torch.as_tensor(value).clone() for key, value in state.items()}
    options = [{k: v for k, v in group.items() if k != "params"} for group in described["param_groups"]]
    return {**values, "options": repr(options), "torch": torch.get_rng_state(), "python": hash(random.getstate())}


def same(left: Plain, right: Plain) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key]
        for key, value in left.items()
    )


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 2. Copied, never changed."""
    path = tmp_path_factory.mktemp("sound") / "step-2"
    extra = {"step": 2, "rate": 0.5, "kind": torch.float32, "pair": (1, 2), "tensor": torch.arange(5)}
    zeroshard.save(path, *made(2), extra=extra)
    return path


def rewrite(path: Path, change: Callable[[Plain], object]) -> None:
    """Change an index; its checksum is right."""
    plain = json.loads((path / INDEX).read_text())
    del plain["crc32"]
    change(plain)
    write(path, plain)


def write(path: Path, plain: Any) -> None:
    body = json.dumps(plain)[:-1]
    (path / INDEX).write_text(f'{body}, "crc32": "{zlib.crc32(body.encode()):08x}"}}')


def at(*steps: Any, to: Any) -> Callable[[Plain], None]:
    """A change of one value, found by steps from the top; ``to`` may be made of the old one."""

    def change(plain: Any) -> None:
        for step in steps[:-1]:
            plain = plain[step]
        plain[steps[-1]] = to(plain[steps[-1]]) if callable(to) else to

    return change


def without(*steps: Any) -> Callable[[Plain], None]:
    def change(plain: Any) -> None:
        for step in steps[:-1]:
            plain = plain[step]
        del plain[steps[-1]]

    return change


def no_counters(plain: Plain) -> None:
    plain["optimizer"]["scalars"] = {name: {} for name in plain["optimizer"]["scalars"]}


def of_a_huge_tensor(plain: Plain) -> None:
    """An extra of 10¹² elements, in a file that is said to have them."""
    number = len(plain["files"])
    plain["files"].append(
        {"name": "other-00009-00000000.safetensors", "nbytes": 4 * 10**12, "block_crc32": [0] * 953675}
    )
    plain["tensors"]["other/huge"] = {"shape": [10**12], "dtype": "F32", "shards": [[0, 10**12, number, 0]]}
    plain["extra"]["tensor"] = {"$tensor": "huge"}


W = ("tensors", "model/0.weight")
SHARDING = {"stage": 3, "precision": None, "tensor_parallel_degree": 1}
S = (*W, "shards", 0)
HOSTILE: dict[str, tuple[Callable[[Plain], object], str]] = {  # what is changed, and a word of the error
    "absolute name": (at("files", 0, "name", to="/etc/passwd"), r"files\[0\].name is '/etc/passwd'"),
    "name of a parent": (at("files", 0, "name", to="../model.safetensors"), "in the checkpoint's directory"),
    "name with NUL": (at("files", 0, "name", to="a\0b"), "in the checkpoint's directory"),
    "name of no text": (at("files", 0, "name", to=7), "in the checkpoint's directory"),
    "name of another file": (at("files", 0, "name", to=lambda old: old.replace("model", "mode1")), "is missing"),
    "size of no number": (at("files", 0, "nbytes", to="1"), r"files\[0\].nbytes"),
    "negative size": (at("files", 0, "nbytes", to=-1), r"files\[0\].nbytes"),
    "few sums": (at("files", 0, "block_crc32", to=[]), r"files\[0\].block_crc32"),
    "past the end": (at(*S, 3, to=10**6), r"model/0.weight has elements 0 to 24 of 24 at bytes 1000000 to"),
    "negative offset": (at(*S, 3, to=-4), "integers of at least 0"),
    "odd offset": (at(*S, 3, to=lambda old: old + 1), "overlap|multiple of 4"),
    "another place": (at(*S, 3, to=8), "the header of the file|overlap"),
    "file that is not there": (at(*S, 2, to=99), "one of 3 files"),
    "negative file": (at(*S, 2, to=-1), "integers of at least 0"),
    "overlap": (lambda plain: plain["tensors"][W[1]]["shards"].append([3, 2, 0, 8]), "element 3 twice"),
    "gap": (at(*S, 1, to=23), "model/0.weight has no values from element 23 of 24 on"),
    "too many elements": (at(*S, 1, to=25), "has elements 0 to 25 of 24"),
    "short stretch": (at(*S, to=lambda old: old[:3]), r"\[start, numel, file, offset\]"),
    "fraction": (at(*S, 1, to=24.0), "integers of at least 0"),
    "true": (at(*S, 0, to=False), "integers of at least 0"),
    "I32": (at(*W, "dtype", to="I32"), "the header of the file"),
    "F64": (at(*W, "dtype", to="F64"), "overlap|the header of the file|at bytes"),
    "BOOL": (at(*W, "dtype", to="BOOL"), "the header of the file"),
    "BF16": (at(*W, "dtype", to="BF16"), "the header of the file"),
    "no dtype": (at(*W, "dtype", to=["F32"]), "one of .*F32"),
    "another shape": (at(*W, "shape", to=[4, 6]), "the header of the file"),
    "negative shape": (at(*W, "shape", to=[-6, -4]), "sizes of at least 0"),
    "endless shape": (at(*W, "shape", to=[2**40, 2**40]), "at most"),
    "no order": (at(*W, "dim_order", to=[1, 1]), "a dim_order that is not a permutation"),
    "turned": (at(*W, "dim_order", to=[1, 0]), "the header of the file"),
    "swapped": (
        lambda plain: plain["tensors"].update(
            {"model/1.weight": plain["tensors"]["model/1.bias"], "model/1.bias": plain["tensors"]["model/1.weight"]}
        ),
        "the header of the file",
    ),
    "a tensor less": (without("tensors", "optimizer/0.weight/exp_avg"), "the header of the file has other tensors"),
    "a tensor more": (at("tensors", to=lambda old: {**old, "else/x": old[W[1]]}), "a name that begins with"),
    "huge": (of_a_huge_tensor, "other-00009-00000000.safetensors is missing"),
    "no counters": (no_counters, "0.weight has the optimizer states .* but no step"),
    "a counter that is text": (at("optimizer", "scalars", "0.weight", "step", to="2"), "has step '2'"),
    "a counter that is NaN": (
        at("optimizer", "scalars", "0.weight", "step", to={"$float": "nan"}),
        "step nan",
    ),
    "no table of counters": (without("optimizer", "scalars"), "optimizer"),
    "counters of a state": (at("optimizer", "scalars", "0.weight", "exp_avg", to=1.0), "exp_avg both"),
    "rate of text": (
        at("optimizer", "param_groups", 0, "options", "lr", to="0.1"),
        "lr '0.1' \\(a string\\), expected a number",
    ),
    "no rate": (without("optimizer", "param_groups", 0, "options", "lr"), "has no lr"),
    "rate not finite": (at("optimizer", "param_groups", 0, "options", "lr", to={"$float": "inf"}), "a finite number"),
    "one beta": (at("optimizer", "param_groups", 0, "options", "betas", to={"$tuple": [0.9]}), "betas"),
    "decay of nothing": (at("optimizer", "param_groups", 0, "options", "weight_decay", to=None), "cannot step"),
    "a name twice": (
        at("optimizer", "param_groups", 0, "param_names", to=lambda old: old + old[:1]),
        "in one group, once",
    ),
    "a scale of text": (at("optimizer", "loss_scale", to={"scale": "1", "growth_tracker": 0}), "optimizer.loss_scale"),
    "load as a dtype": (at("extra", "kind", "$dtype", to="load"), "extra.kind: .dtype is 'load'"),
    "a module as a dtype": (at("extra", "kind", to={"$scalar": 1, "dtype": "_C"}), "extra.kind: .scalar"),
    "unknown mark": (at("extra", "kind", to={"$run": "x"}), "the tag .* is unknown"),
    "bytes": (at("extra", "kind", to={"$bytes": "?"}), "base64"),
    "device": (at("extra", "kind", to={"$device": "moon"}), "a device"),
    "keys that are lists": (at("extra", "kind", to={"$items": [[[], 1]]}), "pairs"),
    "no tensor": (at("extra", "tensor", "$tensor", to="x"), "a tensor that is in the index"),
    "array of objects": (at("extra", "kind", to={"$array": {"$tensor": "extra.tensor"}, "dtype": "O"}), "array"),
    "no extra": (at("extra", to=None), "extra is None, expected a dict"),
    "own of nobody": (at("rank_data", to=[]), "a list of each rank's data"),
    "random of nobody": (at("rank_data", 0, "rng_states", to={}), r"rank_data\[0\].rng_states"),
    "random of others": (
        at("rank_data", 0, "rng_states", "torch", to={"$tensor": "extra.tensor"}),
        "the RNG state of torch",
    ),
    "replicas": (
        at("sharding", to={**SHARDING, "replicas": {"count": 0, "steps_since_average": []}}),
        "replicas",
    ),
    "parameters": (at("requires_grad", to=[]), "requires_grad is"),
    "ties": (at("tied_names", to={"0.weight": 3}), "tied_names is"),
    "a field less": (without("tied_names"), "has no tied_names: it is damaged, or was written before the first"),
    "files": (at("files", to={}), "files is"),
    "versions": (at("versions", to=None), "versions is"),
}


@pytest.mark.guarantee("Hostile indexes")
@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_index_is_refused_before_anything_changes(what: str, sound: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(sound, tmp_path / "step-2"))
    change, word = HOSTILE[what]
    rewrite(path, change)
    model, optimizer = made(1)
    before = values_of(model, optimizer)
    with pytest.raises(CheckpointError, match=word) as caught:
        zeroshard.load(path, model, optimizer)
    assert str(path) in str(caught.value)
    assert same(values_of(model, optimizer), before)


def refused_on_ranks(rank: int, path: Path, word: str, pair: Any) -> None:
    before = values_of(*pair)
    model, optimizer = zeroshard.shard(*copy.deepcopy(pair), stage=3, offload="host")
    with pytest.raises(CheckpointError, match=word):
        zeroshard.load(path, model, optimizer)
    model, plain = zeroshard.unwrap(model, optimizer)
    found = values_of(model, plain)
    assert same({**found, "options": 0, "torch": 0, "python": 0}, {**before, "options": 0, "torch": 0, "python": 0})


@pytest.mark.parametrize("what", ["past the end", "I32", "no counters", "rate of text", "load as a dtype"])
def test_a_hostile_index_is_refused_on_every_rank(what: str, sound: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(sound, tmp_path / "step-2"))
    change, word = HOSTILE[what]
    rewrite(path, change)
    run_threads(2, refused_on_ranks, path, word, made(1))


# --------------------------------------------------------------------------------------------- any change at all

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 40),
    st.floats(),
    st.sampled_from(["", "..", "/", "lr", "F64", "I32", "BOOL", "load", "0.weight", "model/0.weight", "extra.tensor"]),
    st.sampled_from([[], {}, [0], [[]], {"$tuple": 1}, {"$tensor": "extra.tensor"}, {"$dtype": "_C"}, {"a": 1}]),
)


def places(value: Any, steps: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in plain data."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([steps] if steps else []), *(place for key, child in children for place in places(child, (*steps, key)))]


@pytest.mark.guarantee("Hostile indexes")
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_an_index_loads_the_same_values_or_is_refused(data: Any, sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "step-2"
    if not path.exists():
        shutil.copytree(sound, path)
    plain = json.loads((sound / INDEX).read_text())
    del plain["crc32"], plain["huggingface_config"]  # a model's description, which is its own
    plain["huggingface_config"] = None
    drawn = [place for place in places(plain) if "block_crc32" not in place or place[-1] == "block_crc32"]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(drawn))
        action = data.draw(st.sampled_from(["delete", "replace", "replace", "duplicate"]))
        holder = plain
        try:
            for step in place[:-1]:
                holder = holder[step]
            if action == "delete":
                del holder[place[-1]]
            elif action == "duplicate" and isinstance(holder, list):
                holder.append(holder[place[-1]])
            else:
                holder[place[-1]] = data.draw(ODD)
        except (KeyError, IndexError, TypeError):
            continue  # the first change took the place of the second away
    write(path, plain)
    model, optimizer = made(1)
    before, whole = values_of(model, optimizer), made(1)
    zeroshard.load(sound, *whole, random=False)
    wanted = values_of(*whole)
    try:
        zeroshard.load(path, model, optimizer, random=False)
    except CheckpointError:
        assert same(values_of(model, optimizer), before)
    else:
        found = values_of(model, optimizer)
        ours = {key for key in wanted if key.partition("/")[2] != "step" and isinstance(wanted[key], torch.Tensor)}
        assert all(torch.equal(found[key], wanted[key]) for key in ours)
    for command in (["inspect", str(path)], ["export", str(path), str(tmp_path / f"out-{data.draw(st.uuids())}")]):
        assert main(command) in (0, 1)  # and raises nothing


# ------------------------------------------------------------------------------------------------ other files


@pytest.mark.parametrize("name", ["../elsewhere/step-2", "ABSOLUTE", "step-2/../../elsewhere/step-2", "a\0b"])
def test_latest_names_a_checkpoint_next_to_it(name: str, sound: Path, tmp_path: Path) -> None:
    elsewhere = Path(shutil.copytree(sound, tmp_path / "elsewhere" / "step-2"))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "latest").write_text(str(elsewhere) if name == "ABSOLUTE" else name)
    with pytest.raises(CheckpointError, match=r"latest names .*expected the name of a checkpoint in"):
        zeroshard.load(tmp_path / "here", *made())


@pytest.mark.parametrize("name", ["../a.safetensors", "ABSOLUTE", "", 3])
def test_a_weight_map_names_files_next_to_it(name: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    (tmp_path / "hf").mkdir()
    home = str(tmp_path / "a.safetensors") if name == "ABSOLUTE" else name
    index = tmp_path / "hf" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": home}}))
    model = nn.Linear(2, 2, bias=False)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match="expected the name of a file in"):
        zeroshard.load(tmp_path / "hf", model)
    for text in ("[", "{}", '{"weight_map": 3}', "[" * 100_000):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            zeroshard.load(tmp_path / "hf", model)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_weights_of_another_kind_of_number_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    before = model.weight.clone()
    torch.save({"weight": torch.ones(2, 2).to(dtype)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=f"weight has dtype {dtype}, expected torch.float32"):
        zeroshard.load(tmp_path / "a.pt", model)
    assert torch.equal(model.weight, before)
    torch.save({"weight": torch.ones(2, 2).to_sparse()}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match=r"b\.pt: weight is torch\.sparse"):
        zeroshard.load(tmp_path / "b.pt", model)


def test_commands_tell_a_hostile_index_in_a_line(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for what in ("absolute name", "past the end", "huge", "load as a dtype", "I32"):
        path = Path(shutil.copytree(sound, tmp_path / what))
        rewrite(path, HOSTILE[what][0])
        assert main(["inspect", str(path), "--verify"]) == 1
        assert "zeroshard inspect: " in capsys.readouterr().err
        if what != "huge":  # which is not a weight
            assert main(["export", str(path), str(tmp_path / f"{what} out")]) == 1
            assert capsys.readouterr().err.startswith("zeroshard export: ")
        assert not (tmp_path / f"{what} out").exists()


# ------------------------------------------------------------------------------------- which are kept, and by whom


@pytest.mark.guarantee("Kept checkpoints")
def test_checkpoints_go_by_step_whatever_the_clock_says(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for step in (100, 200):
        zeroshard.save(tmp_path / f"step-{step}", model, extra={"k": step})
        os.utime(tmp_path / f"step-{step}" / INDEX, (4e9 + step, 4e9 + step))
    for step in (300, 400):
        zeroshard.save(tmp_path / f"step-{step}", model, extra={"k": step}, keep=2)
    assert {path.name for path in list_checkpoints(tmp_path)} == {"step-300", "step-400"}
    zeroshard.save(tmp_path / "last", model, extra={"k": 350, "step": 350})
    os.remove(tmp_path / "latest")
    assert zeroshard.load(tmp_path, model).extra == {"k": 400}
    zeroshard.save(tmp_path / "last", model, extra={"k": 450, "step": 450})
    os.remove(tmp_path / "latest")
    assert zeroshard.load(tmp_path, model).extra["k"] == 450


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    zeroshard.save(tmp_path / "step-1", model)
    plain_unlink = Path.unlink

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "step-1":
            raise PermissionError(13, "Permission denied", str(path))
        plain_unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)
    with pytest.warns(UserWarning, match=r"step-1 of an earlier save cannot be removed: Permission denied"):
        zeroshard.save(tmp_path / "step-2", model, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-1", "step-2"]
    assert (tmp_path / "latest").read_text() == "step-2\n"


@pytest.mark.guarantee("Kept checkpoints")
def test_a_save_under_way_is_not_pruned_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    zeroshard.save(tmp_path / "step-1", model)
    with lock_for_save(tmp_path / "step-2"):  # as another process has it
        (tmp_path / "step-2" / "model-00000-00000000.safetensors").write_bytes(b"some")
        zeroshard.save(tmp_path / "step-3", model, keep=1)
        assert (tmp_path / "step-2" / "model-00000-00000000.safetensors").exists()
        assert not (tmp_path / "step-1").exists()
        monkeypatch.setattr("zeroshard.checkpoint.retention.LOCK_TIMEOUT_SECONDS", 0.1)
        with pytest.raises(CheckpointError, match=r"another process is saving into .*step-2"):
            zeroshard.save(tmp_path / "step-2", model)
    zeroshard.save(tmp_path / "step-4", model, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-4"]


def test_saves_of_two_runs_into_one_directory_are_whole(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def run(first: int) -> None:
        try:
            for step in range(first, 40, 2):
                zeroshard.save(tmp_path / f"step-{step}", nn.Linear(20, 20), keep=2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert list_checkpoints(tmp_path)[-1].name in ("step-38", "step-39")
    for path in list_checkpoints(tmp_path):
        zeroshard.load(path, nn.Linear(20, 20))


def test_tensor_subclasses_are_made_only_of_imported_tensor_classes() -> None:
    good = encode(TwoTensor(torch.ones(2, 3), torch.zeros(2, 3)), tensors := {})
    loaded = decode(good, tensors.__getitem__)
    assert type(loaded) is TwoTensor and torch.equal(loaded.a, torch.ones(2, 3)) and not loaded.b.any()
    for name in ("os:system", "builtins:dict", "torch:Tensor", "not_imported.module:Kind", "torch"):
        content = {**good["$subclass"], "class": name}
        with pytest.raises(
            ValueError, match=r"expected a tensor subclass that is imported \(import .* before loading\)"
        ):
            decode({"$subclass": content}, tensors.__getitem__)
    for bad in ({}, {"tensor": 1, "dims": [0]}, {"tensor": {"$tensor": "extra.a"}, "dims": [0, 0]}, []):
        with pytest.raises(ValueError, match="expected a tensor and the order of its dimensions"):
            decode({"$permuted": bad}, {"extra.a": torch.ones(2, 2)}.__getitem__)
