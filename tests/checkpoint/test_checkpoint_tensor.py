"""Checkpoints of models that are divided along a tensor axis: any tensor degree loads into any other, and into none."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import at_stages
from plain import adamw_in_groups, mesh_of, sharded, take_step
from ranks import run_processes, run_threads
from safetensors.torch import load_file, save_file
from test_checkpoint import everything, parameters
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel
from zoo import built

import zeroshard
from zeroshard.checkpoint import CheckpointError, CheckpointIndex, CheckpointReader, export
from zeroshard.checkpoint.flat_shards import ElementOrder, LocalTensor
from zeroshard.checkpoint.reader import LoadTarget
from zeroshard.checkpoint.train_state import ShardedTrainState, persistent_buffers
from zeroshard.cli.main import main
from zeroshard.models import GPT, GPTConfig
from zeroshard.sharding.layout import Range
from zeroshard.tensor_parallel.tp_shard import TPShard

Everything = dict[str, torch.Tensor]
Place = tuple[tuple[int, ...], int | None]  # the mesh, tensor degree last, and the stage; None: not sharded
Written = dict[Place, tuple[Path, Everything, list[float]]]

# ----------------------------------------------------------------------------------------------- orders of lines


@st.composite
def divided(draw: st.DrawFn) -> tuple[torch.Tensor, ElementOrder, TPShard]:
    """A whole tensor, the order of a line of it, and the share that the order came from."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dim, pieces = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
    shape[dim] *= pieces
    share = TPShard.split_evenly(shape, dim, draw(st.integers(1, 5)), 0, pieces)
    dims = draw(st.permutations(range(len(shape))))
    whole = torch.arange(prod(shape)).view(shape)
    return whole, ElementOrder.from_tensor(in_order(share.slice(whole), dims), share), share


def in_order(tensor: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """The same tensor with its dimensions in this order in memory."""
    back = [dims.index(dimension) for dimension in range(len(dims))]
    return tensor.permute(dims).contiguous().permute(back)


@settings(max_examples=200, deadline=None)
@given(divided())
def test_a_line_is_the_ranks_parts_one_behind_the_other_and_gives_the_tensor_back(
    case: tuple[torch.Tensor, ElementOrder, TPShard],
) -> None:
    whole, order, share = case
    parts = [share.slice(whole, rank).permute(order.dim_order).flatten() for rank in range(len(share.rank_ranges))]
    line = order.flatten(whole, Range(0, whole.numel()))
    assert line.tolist() == torch.cat(parts).tolist()
    assert torch.equal(order.unflatten(line, whole.shape), whole)
    for rank, part in enumerate(parts):
        start = share.offset_of_rank(rank)
        assert order.flatten(whole, Range(start, start + part.numel())).tolist() == part.tolist()
    same = line.tolist() == whole.permute(order.dim_order).flatten().tolist()
    assert order.tp_dim is None if same else order.tp_ranges


@settings(max_examples=100, deadline=None)
@given(divided())
def test_an_order_goes_through_the_index(case: tuple[torch.Tensor, ElementOrder, TPShard]) -> None:
    whole, order, _ = case
    assert ElementOrder.from_json(json.loads(json.dumps(order.to_json())), whole.shape) == order


@settings(max_examples=100, deadline=None)
@given(divided(), st.data())
def test_a_tensor_is_turned_from_any_order_into_any_other(
    case: tuple[torch.Tensor, ElementOrder, TPShard], data: st.DataObject
) -> None:
    whole, saved, _ = case
    dim = data.draw(st.integers(0, whole.dim() - 1))
    share = TPShard.split_evenly(whole.shape, dim, data.draw(st.integers(1, 4)), 0)
    rank = data.draw(st.integers(0, len(share.rank_ranges) - 1))
    part, start = share.slice(whole, rank).flatten(), share.offset_of_rank(rank)
    cut = data.draw(st.integers(0, part.numel()))  # what the rank holds is two stretches of its part
    ends = [(0, cut), (cut, part.numel())]
    parts = [(Range(start + a, start + b), torch.zeros(b - a)) for a, b in ends if a < b]
    order = ElementOrder.from_tensor(share.slice(whole), share)
    target = LocalTensor(tuple(whole.shape), whole.dtype, order, parts)
    target.copy_from(saved.unflatten(saved.flatten(whole, Range(0, whole.numel())), whole.shape))
    if parts:
        assert torch.cat([values for _, values in parts]).tolist() == part.tolist()


def test_the_division_that_leaves_the_line_as_it_is_is_not_recorded() -> None:
    rows, columns = torch.empty(2, 8), torch.empty(4, 4)
    assert ElementOrder.from_tensor(rows, TPShard.split_evenly((4, 8), 0, 2, 1)) == ElementOrder((0, 1))
    assert ElementOrder.from_tensor(columns, TPShard.split_evenly((4, 8), 1, 2, 1)) == ElementOrder(
        (0, 1), 1, ((Range(0, 4),), (Range(4, 8),))
    )
    fused = TPShard.split_evenly((12, 8), 0, 2, 1, num_fused=3)
    assert ElementOrder.from_tensor(torch.empty(6, 8), fused).tp_ranges[0] == (Range(0, 2), Range(4, 6), Range(8, 10))
    assert ElementOrder.from_tensor(
        torch.empty(12, 8), TPShard.split_evenly((12, 8), 0, 1, 0, num_fused=3)
    ).is_row_major  # one rank has all of it
    assert (
        ElementOrder.from_tensor(
            torch.empty(2, 2, 2, 3).permute(0, 3, 1, 2), TPShard.split_evenly((4, 3, 2, 2), 0, 2, 0)
        ).tp_dim
        is None
    )
    three = TPShard.split_evenly((1, 3), 1, 4, 0)  # and a fourth rank that has nothing
    assert ElementOrder.from_tensor(torch.empty(1, 1), three).is_row_major


NONSENSE: dict[str, Any] = {
    "dimension twice": {"dim_order": [0, 0]},
    "too few dimensions": {"dim_order": [0]},
    "no list": {"dim_order": "01"},
    "fractions": {"dim_order": [0.0, 1.0]},
    "no object": {"tensor_parallel": [[[0, 2]], [[2, 4]]]},
    "no dimension": {"tensor_parallel": {"ranges": [[[0, 2]], [[2, 4]]]}},
    "dimension beyond": {"tensor_parallel": {"dim": 2, "ranges": [[[0, 2]], [[2, 4]]]}},
    "no ranges": {"tensor_parallel": {"dim": 1}},
    "a gap": {"tensor_parallel": {"dim": 1, "ranges": [[[0, 2]], [[3, 4]]]}},
    "an overlap": {"tensor_parallel": {"dim": 1, "ranges": [[[0, 3]], [[2, 4]]]}},
    "too short": {"tensor_parallel": {"dim": 1, "ranges": [[[0, 2]], [[2, 3]]]}},
    "too long": {"tensor_parallel": {"dim": 1, "ranges": [[[0, 2]], [[2, 5]]]}},
    "backwards": {"tensor_parallel": {"dim": 1, "ranges": [[[0, 4], [4, 2], [2, 4]]]}},
    "below zero": {"tensor_parallel": {"dim": 1, "ranges": [[[-1, 4]]]}},
    "not of two": {"tensor_parallel": {"dim": 1, "ranges": [[[0, 2, 4]]]}},
    "not deep enough": {"tensor_parallel": {"dim": 1, "ranges": [[0, 4]]}},
    "texts": {"tensor_parallel": {"dim": 1, "ranges": [[["0", "4"]]]}},
    "mixed": {"tensor_parallel": {"dim": 1, "ranges": [[[0, "4"], ["a", 2]]]}},
}


@pytest.mark.parametrize("what", NONSENSE)
def test_an_order_that_cannot_be_is_refused(what: str) -> None:
    with pytest.raises(
        ValueError, match=r"order that is not a permutation|TP dimension that is not|TP ranges that do not cover"
    ):
        ElementOrder.from_json(NONSENSE[what], (2, 4))


# ------------------------------------------------------------------------------------------------ any to any

CONFIG = GPTConfig(vocab_size=33, context=8, layers=1, heads=4, width=8, tied=True)  # 33 rows: uneven shares
PLAIN = None


def gpt(seed: int = 0, **options: Any) -> GPT:
    return built(lambda: GPT(GPTConfig(**{**CONFIG.__dict__, **options})), seed=seed)


def made(place: Place, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    model = gpt() if model is None else model
    optimizer = adamw_in_groups(model)
    if place[1] is PLAIN:
        return model, optimizer
    names = ("replicate", "shard", "tensor")[-len(place[0]) :]
    mesh = init_device_mesh("cpu", place[0], mesh_dim_names=names)
    return zeroshard.shard(model, optimizer, mesh=mesh, stage=place[1], **options)


def step(model: Any, optimizer: Any, place: Place, rank: int, seed: int) -> float:
    """One step on this rank's rows, the same for all ranks of a tensor axis; returns their loss."""
    *data, tensor = place[0]
    tokens = torch.randint(33, (4, 6), generator=torch.Generator().manual_seed(seed))
    rows = tokens.chunk(prod(data))[rank // tensor]
    return take_step(optimizer, model(rows[:, :-1], rows[:, 1:]))


def mean(losses: Iterable[list[float]]) -> list[float]:
    """The losses of a global batch, from those of its ranks."""
    return [sum(losses) / len(losses) for losses in zip(*losses, strict=True)]


def assert_same(ours: Everything, theirs: Everything) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def write(rank: int, place: Place, path: Path, options: dict[str, Any]) -> tuple[Everything, list[float]]:
    """Two steps and a save; returns what was saved, and the losses of two steps more."""
    model, optimizer = made(place, **options)
    for seed in range(2):
        step(model, optimizer, place, rank, seed)
    zeroshard.save(path, model, optimizer, extra={"step": 2})
    return everything(model, optimizer), [step(model, optimizer, place, rank, seed) for seed in (2, 3)]


def read(rank: int, place: Place, paths: list[Path], options: dict[str, Any]) -> tuple[list[Everything], list[float]]:
    """Load one checkpoint after the other into the same model, and go on from the last."""
    model, optimizer = made(place, gpt(seed=5), **options)
    found = []
    for path in paths:
        assert zeroshard.load(path, model, optimizer).extra == {"step": 2}
        found.append(everything(model, optimizer))
    return found, [step(model, optimizer, place, rank, seed) for seed in (2, 3)]


def pass_on(rank: int, place: Place, source: Path, target: Path) -> Everything:
    """Load and save, which is quicker than training."""
    model, optimizer = made(place, gpt(seed=5))
    zeroshard.save(target, model, optimizer, extra=zeroshard.load(source, model, optimizer).extra)
    return everything(model, optimizer)


ROUTES: dict[Place, list[Place]] = {  # where to, and from where: every tensor degree comes to every other
    ((1, 1), PLAIN): [((2, 4), 3), ((1, 2), 0)],
    ((2, 1), 3): [((1, 1), PLAIN), ((2, 1, 2), 3), ((1, 4), 2)],
    ((1, 2), 0): [((2, 2), 1), ((1, 4), 2), ((2, 1), 3)],
    ((2, 2), 1): [((2, 1), 3), ((1, 2), 0), ((2, 4), 3)],
    ((1, 4), 2): [((2, 4), 3), ((1, 1), PLAIN), ((2, 2), 1)],
}
PASSED_ON: dict[Place, Place] = {((2, 4), 3): ((2, 2), 1), ((2, 1, 2), 3): ((1, 4), 2)}  # the last: with replicas


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A checkpoint of every place; what was saved, and the losses of the next two steps."""
    parent = tmp_path_factory.mktemp("checkpoints")
    found: Written = {}
    for place in ROUTES:
        path = parent / f"step-{len(found)}"
        results = run_threads(prod(place[0]), write, place, path, {})
        found[place] = (path, results[0][0], mean(losses for _, losses in results))
    for place, source in PASSED_ON.items():
        path = parent / f"step-{len(found)}"
        for loaded in run_threads(prod(place[0]), pass_on, place, found[source][0], path):
            assert_same(loaded, found[source][1])
        found[place] = (path, *found[source][1:])
    return found


@pytest.mark.parametrize("place", ROUTES, ids=str)
def test_a_checkpoint_loads_exactly_at_any_tensor_degree_and_training_goes_on(place: Place, written: Written) -> None:
    sources = [written[source] for source in ROUTES[place]]
    results = run_threads(prod(place[0]), read, place, [path for path, _, _ in sources], {})
    for loaded, _ in results:
        for ours, (_, saved, _) in zip(loaded, sources, strict=True):
            assert_same(ours, saved)
    torch.testing.assert_close(mean(losses for _, losses in results), sources[-1][2], rtol=1e-5, atol=0)


def test_the_same_tensor_degree_loads_stretch_by_stretch(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the data-parallel ranks: nothing is read whole and turned."""
    path, saved, _ = written[(2, 2), 1]
    monkeypatch.setattr(LocalTensor, "copy_from", None)
    for loaded in run_threads(2, loaded_parameters, ((1, 2), 3), path):
        assert_same(loaded, {name: value for name, value in saved.items() if "/" not in name})
    with pytest.raises(RuntimeError, match="'NoneType' object is not callable"):
        run_threads(1, loaded_parameters, ((1, 1), 3), path)


def test_a_rank_without_elements_of_a_tensor_reads_nothing_of_it(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroshard.checkpoint.reader.read_ranges", None)
    with CheckpointReader(written[(1, 2), 0][0]) as reader:
        name = "model/blocks.0.mlp.down.weight"
        saved = reader.index.tensors[name]
        assert not saved.element_order.is_row_major
        for order in (saved.element_order, ElementOrder((0, 1))):
            reader.load([LoadTarget(name, LocalTensor(saved.shape, saved.dtype, order))])
        elements = [(Range(0, 1), torch.zeros(1))]
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):
            reader.load([LoadTarget(name, LocalTensor(saved.shape, saved.dtype, ElementOrder((0, 1)), elements))])


def loaded_parameters(rank: int, place: Place, path: Path, **options: Any) -> Everything:
    model, _ = made(place, gpt(seed=5))
    zeroshard.load(path, model, **options)
    return parameters(model)


class Few(nn.Module):
    """Fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Linear(4, 3)
        self.more = nn.Linear(4, 5)

    def forward(self) -> torch.Tensor:
        return (self.few(torch.ones(4)).sum() + self.more(torch.ones(4)).sum()).square()


def pass_through(rank: int, source: Path, target: Path) -> Everything:
    mesh = mesh_of((1, 4), "shard tensor")
    model = built(Few, seed=1)
    plan = {"few": ColwiseParallel()}
    sharded, optimizer = zeroshard.shard(model, adamw_in_groups(model), mesh=mesh, stage=1, tensor_plan=plan)
    zeroshard.load(source, sharded, optimizer)
    zeroshard.save(target, sharded, optimizer)
    return everything(sharded, optimizer)


def test_a_rank_may_have_nothing_of_a_parameter(tmp_path: Path) -> None:
    plain = Few()
    optimizer = adamw_in_groups(plain)
    plain().backward()
    optimizer.step()
    zeroshard.save(tmp_path / "a", plain, optimizer)
    saved = everything(plain, optimizer)
    for loaded in run_threads(4, pass_through, tmp_path / "a", tmp_path / "b"):
        assert_same(loaded, saved)
    other = Few()
    optimizer = adamw_in_groups(other)
    zeroshard.load(tmp_path / "b", other, optimizer)
    assert_same(everything(other, optimizer), saved)


def test_processes_write_and_go_on_as_if_nothing_had_happened(written: Written, tmp_path: Path) -> None:
    place: Place = ((1, 2), 3)
    (saved, losses), _ = run_processes(2, write, place, tmp_path, {"bucket_size": 100})
    path, by_threads, _ = written[(2, 1, 2), 3]
    for loaded, ours in run_processes(2, read, place, [path, tmp_path], {"bucket_size": 100}):
        assert_same(loaded[0], by_threads)
        assert_same(loaded[1], saved)
        assert ours == losses


# ---------------------------------------------------------------------------------------------- the same seam


@pytest.mark.parametrize("form", ["safetensors", "pt"])
def test_weights_of_others_are_divided_as_they_are_read(form: str, tmp_path: Path) -> None:
    whole = {name: p.detach() for name, p in gpt().named_parameters()}
    path = tmp_path / f"weights.{form}"
    named = {f"module.{name}": tensor for name, tensor in whole.items()}
    save_file(named, path) if form == "safetensors" else torch.save(named, path)
    load = partial(loaded_parameters, rename=lambda name: name.removeprefix("module."))
    for place in (((2, 2), 3), ((1, 4), 0)):
        for loaded in run_threads(4, load, place, path):
            assert_same(loaded, whole)


def parts(rank: int, path: Path) -> dict[str, Any]:
    """Load in part: weights alone, states alone, what only one side has."""
    model, optimizer = made(((1, 2), 2), gpt(seed=5))
    zeroshard.load(path, model)
    found = {"weights": everything(model, optimizer)}
    model, optimizer = made(((1, 2), 2), gpt(seed=5))
    zeroshard.load(path, model, optimizer, weights=False)
    found["states"] = everything(model, optimizer)
    model, optimizer = made(((1, 2), 2), gpt(seed=5, bias=False, tied=False))
    with pytest.raises(CheckpointError, match=r"only in the file: .*qkv\.bias"):
        zeroshard.load(path, model, optimizer)
    result = zeroshard.load(path, model, optimizer, strict=False)
    return found | {"loose": everything(model, optimizer), "missing": result.missing, "unexpected": result.unexpected}


def test_loads_in_part(written: Written) -> None:
    path, saved, _ = written[(1, 4), 2]
    fresh = {name: p.detach() for name, p in gpt(seed=5).named_parameters()}
    for found in run_threads(2, parts, path):
        assert_same(found["weights"], {name: value for name, value in saved.items() if "/" not in name})
        assert_same(found["states"], saved | fresh)
        loose = {name: value for name, value in saved.items() if "bias" not in name}
        assert_same(found["loose"], loose | {"head.weight": saved["tokens.weight"]})  # tied then, not tied now
        assert found["missing"] == ["head.weight (optimizer)"]
        assert {name for name in found["unexpected"] if not name.endswith(" (optimizer)")} == {
            name for name in fresh if "bias" in name
        }


def save_frozen(rank: int, path: Path) -> Everything:
    """Train the MLPs alone, in bf16, and save them while training goes on."""
    model = gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp." in name)
    place: Place = ((1, 2), 3)
    model, optimizer = made(place, model, precision="bf16")
    step(model, optimizer, place, rank, 0)
    handle = zeroshard.save(path, model, optimizer, frozen=False, wait=False)
    saved = everything(model, optimizer)
    step(model, optimizer, place, rank, 1)
    handle.wait()
    return saved


def read_frozen(rank: int, path: Path) -> Everything:
    model = gpt(seed=5)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp." in name)
    model, optimizer = made(((1, 4), 1), model)
    zeroshard.load(path, model, optimizer)
    return everything(model, optimizer)


def test_saves_during_training_without_what_is_frozen_from_masters(tmp_path: Path) -> None:
    saved = run_processes(2, save_frozen, tmp_path / "a")[0]
    assert saved["blocks.0.mlp.down.weight"].dtype == torch.float32
    kept = {name: p.detach() for name, p in gpt(seed=5).named_parameters() if "mlp." not in name}
    for loaded in run_threads(4, read_frozen, tmp_path / "a"):
        assert_same(loaded, saved | kept)


# --------------------------------------------------------------------------------------------- who writes what


def test_every_element_is_written_once(written: Written) -> None:
    for path, saved, _ in written.values():
        index = CheckpointIndex.read(path)
        names = [*index.tensors_of_kind("model"), *index.tensors_of_kind("optimizer")]
        assert sorted(names) == sorted(name for name in saved if not name.endswith("/step"))
        for fqn, tensor in index.tensors.items():
            assert sum(stretch.numel for stretch in tensor.shards) == tensor.numel, fqn
        assert index.optimizer is not None and len(index.optimizer["scalars"]) == len(index.requires_grad)


class Wide(nn.Module):
    """Mostly undivided. What is divided is so unevenly, and goes before what is not: ranks cut that at other places."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 128, bias=False).requires_grad_(False)
        shapes = [(512, 3), *[(64, 64)] * 4]
        self.layers = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes)


def write_wide(rank: int, stage: int, path: Path) -> tuple[Everything, list[Range]]:
    model, _ = sharded(
        built(Wide),
        mesh=mesh_of((2, 2), "shard tensor"),
        stage=stage,
        tensor_plan={"layers.0": ColwiseParallel()},
        units=("layers",),
    )
    zeroshard.save(path, model)
    held = ShardedTrainState(model._zeroshard.engine, []).parameters()["layers.2.weight"]
    return parameters(model), [stretch for stretch, _ in held.shards]


@at_stages(0, 3)
def test_what_is_not_divided_is_shared_out_over_tensor_ranks_and_replicas(stage: int, tmp_path: Path) -> None:
    (saved, held), (_, others), *_ = run_threads(4, write_wide, stage, tmp_path)
    assert stage == 0 or held != others  # two ranks of one tensor axis
    index = CheckpointIndex.read(tmp_path)
    by_rank: Counter[int] = Counter()  # elements of all parameters
    by_tensor_rank: Counter[int] = Counter()  # of the trained layers that are not divided
    for tensor in index.tensors_of_kind("model").values():
        for stretch in tensor.shards:
            writer = int(index.files[stretch.file_number].name.split("-")[1])
            by_rank[writer] += stretch.numel
            by_tensor_rank[writer % 2] += stretch.numel if tensor.shape == (64, 64) else 0
    assert len(by_rank) == 4 and max(by_rank.values()) <= 2.5 * min(by_rank.values())
    assert by_tensor_rank == {0: 2 * 64 * 64, 1: 2 * 64 * 64}
    plain = Wide()
    zeroshard.load(tmp_path, plain)
    assert_same(parameters(plain), saved)


# ------------------------------------------------------------------------------------- without ranks, and the index


def test_an_export_is_the_plain_models_weights(written: Written, tmp_path: Path) -> None:
    path, saved, losses = written[(2, 4), 3]
    exported = load_file(export(path, tmp_path / "model") / "model.safetensors")
    assert_same(exported, {name: value for name, value in saved.items() if "/" not in name})
    plain = gpt(seed=5)
    plain.load_state_dict(exported, strict=False)  # a tied weight stands there once
    tokens = torch.randint(33, (4, 6), generator=torch.Generator().manual_seed(2))
    assert plain(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(losses[0], rel=1e-5)


def test_inspect_tells_the_tensor_degree(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    path, saved, _ = written[(2, 4), 3]
    assert main(["inspect", str(path), "--verify"]) == 0
    told = capsys.readouterr().out
    assert "8, stage 3, precision None, tensor parallel over 4\n" in told and "files verified" in told
    assert main(["inspect", str(path), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["tensor"] == 4
    assert {row["name"]: row["shape"] for row in plain["tensors"]} == {
        name: list(value.shape) for name, value in saved.items() if "/" not in name
    }
    for other, degree in ((((2, 1), 3), 1), (((1, 1), PLAIN), None)):
        assert main(["inspect", str(written[other][0]), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tensor"] == degree


def test_the_index_has_the_tensor_parallel_ranges_of_column_shards(written: Written) -> None:
    for place, (path, _, _) in written.items():
        index = json.loads((path / "index.json").read_text())
        orders = {name: saved["dim_order"] for name, saved in index["tensors"].items() if "tensor_parallel" in saved}
        divided = ("attention.qkv", "attention.out.weight", "mlp.down.weight") if place[0][-1] > 1 else ()
        assert {name for name in orders if name.startswith("model/")} == {
            f"model/{name}" for name in index["requires_grad"] if any(part in name for part in divided)
        }  # not the rows of the vocabulary, nor mlp.up: their line is the plain one


class Convolution(nn.Conv2d):
    """In channels-last format."""

    def __init__(self) -> None:
        super().__init__(2, 3, 2, bias=False)
        self.to(memory_format=torch.channels_last)


def test_the_index_has_the_dim_order_of_channels_last_tensors(tmp_path: Path) -> None:
    model = Convolution()
    zeroshard.save(tmp_path, model)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["version"] == 1 and index["tensors"]["model/weight"]["dim_order"] == [0, 2, 3, 1]
    other = nn.Conv2d(2, 3, 2, bias=False)
    zeroshard.load(tmp_path, other)
    assert torch.equal(model.weight, other.weight)


def rewritten(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A checkpoint with another index, whose checksum is right; its files are those of the first."""
    target.mkdir()
    for file in source.glob("*.safetensors"):
        (target / file.name).symlink_to(file)
    plain = json.loads((source / "index.json").read_text())
    del plain["crc32"]
    change(plain)
    body = json.dumps(plain)[:-1]
    (target / "index.json").write_text(f'{body}, "crc32": "{zlib.crc32(body.encode()):08x}"}}')
    return target


def test_an_index_with_a_division_that_cannot_be_is_refused(
    written: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "model/blocks.0.mlp.down.weight"

    def shorten(plain: dict[str, Any]) -> None:
        plain["tensors"][name]["tensor_parallel"]["ranges"][1][0][1] -= 1

    path = rewritten(written[(1, 2), 0][0], tmp_path / "step-1", shorten)
    wanted = f"index.json is damaged: {name} has TP ranges that do not cover dimension 1"
    with pytest.raises(CheckpointError, match=wanted):
        zeroshard.load(path, gpt())
    with pytest.raises(RuntimeError, match=wanted):
        run_threads(2, loaded_parameters, ((1, 2), 0), path)
    assert main(["inspect", str(path)]) == 1 and wanted in capsys.readouterr().err
    sound = rewritten(written[(1, 2), 0][0], tmp_path / "step-2", lambda plain: None)
    zeroshard.load(sound, gpt())


# ------------------------------------------------------------------------------------------------ what is refused


def refused(rank: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    for call in (partial(zeroshard.save, path / "a"), partial(zeroshard.load, path / "b")):
        with pytest.raises(CheckpointError, match=r"'weight' is a DTensor, but this Linear is not sharded.*shard\(\)"):
            call(model)
    assert not (path / "a").exists()
    model = nn.BatchNorm1d(4)
    model.running_mean = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
    found = dict(persistent_buffers(model))["running_mean"]
    assert not isinstance(found, DTensor) and found.tolist() == [0, 1, 2, 3]
    found.fill_(7)  # as a load does
    assert model.running_mean.full_tensor().tolist() == [7] * 4
    model.running_mean = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    with pytest.raises(
        CheckpointError, match=r"buffer 'running_mean' is a DTensor with placements \(Shard\(dim=0\),\)"
    ):
        zeroshard.save(path / "a", model)


def test_models_that_others_divided_are_refused(tmp_path: Path) -> None:
    zeroshard.save(tmp_path / "b", nn.Linear(4, 4))
    run_threads(2, refused, tmp_path)
