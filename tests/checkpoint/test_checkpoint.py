"""A checkpoint loads anywhere: any number of ranks, stage, precision, buckets, sharded or plain, whole or in part."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import threading
import unittest.mock
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live import allocated_bytes
from pairs import at_stages
from plain import (
    ONE_BATCH,
    Tensors,
    adamw,
    adamw_in_groups,
    batches,
    copied,
    masters,
    mesh_of,
    net_loss,
    of,
    sharded,
    split,
    take_step,
    token_step,
)
from ranks import run_processes, run_threads
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from zoo import Net, built, make_net

import zeroshard
from zeroshard.checkpoint.block_files import BLOCK_BYTES, BLOCKS_IN_FLIGHT
from zeroshard.checkpoint.flat_shards import LocalTensor
from zeroshard.checkpoint.json_codec import decode, encode

Everything = Tensors
PLAIN = None
WORLDS = {(world, stage) for world in (1, 2, 3, 4) for stage in (0, 1, 2, 3)}


def made(stage: int | None, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    model = make_net(0, blocks=1) if model is None else copy.deepcopy(model)
    optimizer = adamw_in_groups(model)
    return (model, optimizer) if stage is PLAIN else zeroshard.shard(model, optimizer, stage=stage, **options)


def steps(model: Any, optimizer: Any, rank: int, world: int, which: range) -> None:
    for batch in batches(which.stop)[which.start :]:
        loss = net_loss(model, split(batch, rank, world))
        take_step(optimizer, optimizer.scale(loss) if isinstance(optimizer, zeroshard.ShardedOptimizer) else loss)


def parameters(model: Any) -> Everything:
    """Every parameter, whole, as exact as it is held."""
    if hasattr(model, "_zeroshard"):
        return masters(model)
    return copied(model)


def everything(model: Any, optimizer: Any) -> Everything:
    """Every parameter and every state, in a form that a plain and a sharded run share."""
    found = parameters(model)
    if isinstance(optimizer, zeroshard.ShardedOptimizer):
        states = {
            name: zeroshard.full_state(optimizer, name) for group in optimizer.group_param_names for name in group
        }
    else:
        states = {name: optimizer.state.get(p, {}) for name, p in model.named_parameters()}
    for name, state in states.items():
        found |= {f"{name}/{key}": torch.as_tensor(value).clone() for key, value in state.items()}
    return found


def assert_same(ours: Everything, theirs: Everything, tolerance: float = 0.0) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if tolerance:
            torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, check_dtype=False)
        else:
            assert torch.equal(ours[name], value), name


# ------------------------------------------------------------------------------------------------ any to any


def write(rank: int, world: int, stage: int | None, path: Path, options: dict[str, Any]) -> tuple[Everything, ...]:
    model, optimizer = made(stage, **options)
    steps(model, optimizer, rank, world, range(3))
    zeroshard.save(path, model, optimizer, extra={"step": 3})
    saved = everything(model, optimizer)
    steps(model, optimizer, rank, world, range(3, 5))
    return saved, parameters(model)


def read(
    rank: int,
    world: int,
    stage: int | None,
    paths: list[Path],
    options: dict[str, Any],
    goes_on: Callable[[Path], bool] = lambda path: True,
) -> list[Any]:
    """Load one checkpoint after the other into the same model, and go on from some."""
    model, optimizer = made(stage, **options)
    found = []
    for path in paths:
        assert zeroshard.load(path, model, optimizer).extra == {"step": 3}
        loaded = everything(model, optimizer)
        if goes_on(path):
            steps(model, optimizer, rank, world, range(3, 5))
        found.append((loaded, parameters(model) if goes_on(path) else {}))
    return found


Source = tuple[int, int | None]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Source, tuple[Path, Everything, Everything]]:
    """A checkpoint of every world and stage, and of a plain run; what was saved, and what came two steps later."""
    parent = tmp_path_factory.mktemp("checkpoints")
    found = {}
    for world, stage in [*sorted(WORLDS), (1, PLAIN)]:
        path = parent / f"{world}-{stage}"
        saved, continued = run_threads(world, write, world, stage, path, {})[0]
        found[world, stage] = (path, saved, continued)
    return found


@pytest.mark.guarantee("Loads anywhere")
@pytest.mark.parametrize(("world", "stage"), [*sorted(WORLDS), (1, PLAIN)])
def test_every_checkpoint_loads_exactly_everywhere_and_training_goes_on(
    world: int, stage: int | None, written: dict[Source, tuple[Path, Everything, Everything]]
) -> None:
    # of every stage on as many ranks; of any other number where states are whole, where all is in parts, and as here
    sources = [source for source in written if source[0] == world or source[1] in (PLAIN, 0, 3, stage)]
    # on from every stage on as many ranks, and from two on others: what is loaded is the same, bit for bit
    starts = {written[source][0] for source in sources if source[0] == world or source in ((4, 3), (1, PLAIN))}
    paths = [written[source][0] for source in sources]
    for results in run_threads(world, read, world, stage, paths, {}, starts.__contains__):
        for source, (loaded, ours) in zip(sources, results, strict=True):
            path, saved, continued = written[source]
            assert_same(loaded, saved)
            if path not in starts:
                continue
            sums_alike = source[0] == world and (source[1] or 0) > 0 and (stage or 0) > 0
            # elsewhere gradients are summed over other ranks, or in another order, and round otherwise
            assert_same(ours, continued, 0.0 if sums_alike or source == (world, stage) else 2e-5)


def test_processes_other_buckets_and_units_and_a_hybrid_mesh(tmp_path: Path) -> None:
    saved, continued = run_processes(2, write, 2, 3, tmp_path / "a", {"bucket_size": 100})[0]
    for options in ({"bucket_size": 2**20}, {"units": (nn.Linear,)}):
        for [(loaded, ours)] in run_processes(2, read, 2, 3, [tmp_path / "a"], options):
            assert_same(loaded, saved)
            assert_same(ours, continued)
    hybrid, _ = run_processes(4, write_hybrid, tmp_path / "b")[0]
    for [(loaded, _)] in run_processes(3, read, 3, 2, [tmp_path / "b"], {}):
        assert_same(loaded, hybrid)
    shares = [sum(file.stat().st_size for file in (tmp_path / "b").glob(f"*-0000{rank}-*")) for rank in range(4)]
    assert max(shares) < 2 * min(shares)  # every rank writes, also where two hold the same


def write_hybrid(rank: int, path: Path) -> tuple[Everything, ...]:
    mesh = mesh_of((2, 2))
    return write(rank, 4, 3, path, {"mesh": mesh})


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(["fp32", "bf16", "fp16"], 2), ("fp16", "fp16")])
def test_precisions_change_and_masters_stay_exact(before: str, after: str, tmp_path: Path) -> None:
    saved, continued = run_threads(2, write, 2, 3, tmp_path / "a", {"precision": before})[0]
    for [(loaded, ours)] in run_threads(3, read, 3, 2, [tmp_path / "a"], {"precision": after}):
        assert_same(loaded, saved)
        assert {t.dtype for name, t in loaded.items() if not name.endswith("/step")} == {torch.float32}
        assert_same(ours, continued, 2e-2)


def fp16_scale(rank: int, path: Path, load: bool) -> list[float]:
    model, optimizer = made(3, precision="fp16", loss_scale=2.0**10 if load else 2.0**4)
    if load:
        zeroshard.load(path, model, optimizer)
    else:
        steps(model, optimizer, rank, 2, range(3))
        zeroshard.save(path, model, optimizer)
    return optimizer.loss_scale_state()


def test_the_loss_scale_is_kept(tmp_path: Path) -> None:
    assert run_threads(2, fp16_scale, tmp_path, False) == [[2.0**4, 3.0]] * 2
    assert run_threads(2, fp16_scale, tmp_path, True) == [[2.0**4, 3.0]] * 2


def half(rank: int, path: Path, dtype: torch.dtype, load: bool) -> set[torch.dtype]:
    """Without a master copy, in the dtype the parameters have."""
    model, optimizer = made(3, make_net(0, blocks=1).to(dtype))
    if load:
        zeroshard.load(path, model, optimizer)
        steps(model, optimizer, rank, 2, range(3, 4))
    else:
        steps(model, optimizer, rank, 2, range(2))
        zeroshard.save(path, model, optimizer)
    return {value.dtype for name, value in everything(model, optimizer).items() if not name.endswith("/step")}


def test_states_take_the_dtype_of_their_parameters_as_torch_does(tmp_path: Path) -> None:
    assert run_threads(2, half, tmp_path / "a", torch.bfloat16, False) == [{torch.bfloat16}] * 2
    assert run_threads(2, half, tmp_path / "a", torch.float32, True) == [{torch.float32}] * 2
    assert run_threads(2, half, tmp_path / "a", torch.bfloat16, True) == [{torch.bfloat16}] * 2


class Scaled(nn.Linear):
    """A layer times a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def step_scaled(model: Any, optimizer: Any, rank: int, world: int) -> None:
    for step in range(3):
        inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(step))
        take_step(optimizer, model(split(inputs, rank, world)).square().mean())


def train_scaled(
    rank: int, world: int, stage: int | None, kind: Any, source: Path | None, target: Path | None
) -> Everything:
    model: Any = built(Scaled)
    optimizer = kind(model.parameters(), lr=0.01)
    if stage is not PLAIN:
        model, optimizer = zeroshard.shard(model, optimizer, stage=stage)
    if source is not None:
        zeroshard.load(source, model, optimizer)
    step_scaled(model, optimizer, rank, world)
    if target is not None:
        zeroshard.save(target, model, optimizer)
    return parameters(model)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_numbers_that_are_states_of_a_0_dim_parameter_load_everywhere(kind: Any, tmp_path: Path) -> None:
    places: list[tuple[int, int | None]] = [(1, PLAIN), (2, 0), (2, 3)]
    for world, stage in places:
        run_threads(world, train_scaled, world, stage, kind, None, tmp_path / f"{stage}")
    plain = run_threads(1, train_scaled, 1, PLAIN, kind, tmp_path / "None", None)[0]
    for (world, stage), (_, saved) in itertools.product(places, places):
        for ours in run_threads(world, train_scaled, world, stage, kind, tmp_path / f"{saved}", None):
            assert_same(ours, plain, 1e-6)


def continue_scaled(rank: int, world: int, kind: Any, states: tuple[Any, Any]) -> Everything:
    model, optimizer = sharded(Scaled(), of(kind, lr=0.01), stage=3)
    zeroshard.load(states[0], model)
    optimizer.load_state_dict(states[1])
    step_scaled(model, optimizer, rank, world)
    return parameters(model)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_a_state_dict_with_numbers_of_a_0_dim_parameter_is_loaded(kind: Any) -> None:
    plain = Scaled()
    optimizer = kind(plain.parameters(), lr=0.01)
    step_scaled(plain, optimizer, 0, 1)
    states = copy.deepcopy((plain.state_dict(), optimizer.state_dict()))
    step_scaled(plain, optimizer, 0, 1)
    for ours in run_threads(2, continue_scaled, 2, kind, states):
        assert_same(ours, parameters(plain), 1e-6)


class Counting(nn.Linear):
    """Has a state that is neither a parameter nor a buffer."""

    def __init__(self, value: Any) -> None:
        super().__init__(2, 2)
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def counting(rank: int, values: list[Any], stage: int | None) -> Any:
    model = built(lambda: nn.Sequential(*[Counting(value) for value in values], nn.Linear(2, 1)))
    if stage is None:
        return model
    return zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)[0]


@pytest.mark.parametrize(("saved_stage", "loaded_stage"), [(3, 0), (0, 3), (None, 2), (2, None)])
def test_extra_states_of_modules_are_the_first_ranks(
    saved_stage: int | None, loaded_stage: int | None, tmp_path: Path
) -> None:
    state = {"scale": torch.arange(3.0), "history": (1, 2.5)}

    def save(rank: int) -> None:
        zeroshard.save(tmp_path / "step-1", counting(rank, [3 + rank, state], saved_stage))

    def load(rank: int) -> list[Any]:
        model = counting(rank, [None, None], loaded_stage)
        zeroshard.load(tmp_path / "step-1", model)
        return [model[0].value, model[1].value]

    run_threads(1 if saved_stage is None else 2, save)
    for count, loaded in run_threads(1 if loaded_stage is None else 2, load):
        assert count == 3 and loaded["history"] == (1, 2.5) and torch.equal(loaded["scale"], state["scale"])


def test_extra_states_that_only_one_side_has(tmp_path: Path) -> None:
    path, model = tmp_path / "step-1", counting(0, [7, 8], None)
    with pytest.warns(UserWarning, match=r"of 1 modules are not in the checkpoint, for example that of '1' .*object"):
        zeroshard.save(path, counting(0, [3, object()], None))
    with pytest.warns(UserWarning, match=r"no extra state .* of 1 modules, which keep theirs: 1._extra_state"):
        assert zeroshard.load(path, model).missing == ["1._extra_state"]
    assert [model[0].value, model[1].value] == [3, 8]
    plain = nn.Sequential(*[nn.Linear(2, 2) for _ in range(2)], nn.Linear(2, 1))
    with pytest.raises(zeroshard.CheckpointError, match=r"only in the file: 0\._extra_state"):
        zeroshard.load(path, plain)
    assert zeroshard.load(path, plain, strict=False).unexpected == ["0._extra_state"]
    zeroshard.save(path, plain)  # as all checkpoints were before extra states were saved
    with pytest.warns(UserWarning, match="of 2 modules, which keep theirs"):
        zeroshard.load(path, model)
    zeroshard.save(path, model, torch.optim.SGD(model.parameters(), lr=0.1), weights=False)


class Forms(nn.Module):
    """A tied weight, a frozen one, a channels-last convolution, buffers, batch norm, an unused parameter."""

    def __init__(self, last: bool = True, tied: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 2)
        if last:
            self.conv.to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.inner = nn.Linear(5, 5, bias=False)
        self.outer = nn.Linear(5, 5, bias=False)
        if tied:
            self.outer.weight = self.inner.weight
        self.frozen = nn.Linear(5, 4).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.frozen(self.outer(self.inner(self.norm(self.conv(x)).mean((2, 3))))).square().mean()


def forms(last: bool = True, tied: bool = True) -> Forms:
    return built(lambda: Forms(last, tied))


def image_steps(model: Any, optimizer: Any, rank: int, world: int, count: int) -> None:
    for seed in range(count):
        x = torch.randn(12, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
        take_step(optimizer, model(x.chunk(world)[rank]))


def write_forms(rank: int, world: int, path: Path) -> tuple[Everything, Everything]:
    model, optimizer = made(3, forms())
    image_steps(model, optimizer, rank, world, 3)
    zeroshard.save(path, model, optimizer)
    return everything(model, optimizer), dict(model.named_buffers())


def read_forms(rank: int, world: int, stage: int | None, path: Path, last: bool, tied: bool) -> Any:
    model, optimizer = made(stage, forms(last, tied))
    with torch.no_grad(), nullcontext() if stage is PLAIN else zeroshard.gathered(model, write_rank=0):
        for parameter in model.parameters():
            parameter.fill_(7)
    result = zeroshard.load(path, model, optimizer, strict=tied)
    found = everything(model, optimizer)
    image_steps(model, optimizer, rank, world, 1)
    return found, dict(model.named_buffers()), result.missing


@pytest.mark.parametrize(("world", "stage", "last"), [(3, 3, True), (3, 3, False), (2, 1, False), (1, PLAIN, False)])
def test_ties_frozen_weights_buffers_unused_parameters_and_memory_formats(
    world: int, stage: int | None, last: bool, tmp_path: Path
) -> None:
    saved, buffers = run_threads(2, write_forms, 2, tmp_path)[0]
    assert "unused.weight/step" not in saved
    for loaded, found, missing in run_threads(world, read_forms, world, stage, tmp_path, last, True):
        assert_same(loaded, saved)
        assert float(found["seen"]) == 4 and missing == []
        assert buffers["norm.running_mean"].abs().sum() > 0
    loaded, _, missing = run_threads(1, read_forms, 1, PLAIN, tmp_path, last, False)[0]
    assert torch.equal(loaded["outer.weight"], saved["inner.weight"])  # tied then, not tied now
    assert missing == ["outer.weight (optimizer)"]


# ------------------------------------------------------------------------------------------------ the files


def keys_of(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def test_files_are_safetensors_and_json_and_nothing_is_pickled(
    written: dict[Source, tuple[Path, Everything, Everything]],
) -> None:
    path, saved, _ = written[2, 3]
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    index = json.loads((path / "index.json").read_text())
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for key in keys_of(file):
                name, _, stretch = key.partition("[") if file.name[:5] in ("model", "optim") else (key, "", "")
                start = int(stretch.partition(":")[0]) if stretch else 0
                found.setdefault(name, []).append((start, opened.get_tensor(key)))
    for name, tensor in saved.items():
        if not name.endswith("/step") and tensor.numel():
            line = torch.cat([part.flatten() for _, part in sorted(found[name], key=lambda pair: pair[0])])
            assert torch.equal(line, tensor.flatten()), name
    assert len(index["rank_data"]) == 2
    assert index["sharding"] == {"stage": 3, "precision": None, "tensor_parallel_degree": 1}
    assert (path.parent / "latest").read_text().strip() in {p.name for p, _, _ in written.values()}


def test_a_plain_checkpoint_is_a_state_dict_for_any_tool(tmp_path: Path) -> None:
    model, optimizer = made(PLAIN)
    zeroshard.save(tmp_path, model, optimizer)
    (file,) = tmp_path.glob("model-*.safetensors")
    with safe_open(file, "pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in keys_of(file)}
    assert all(torch.equal(tensors[name], p) for name, p in model.named_parameters() if p.numel())


# ------------------------------------------------------------------------------------------------ what goes with it


class Position:
    """A data loader that keeps where it is."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": {3, 1}, 5: (1, math.inf)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"] == {1, 3} and state[5] == (1, math.inf)
        self.at = state["at"]


def extras(rank: int, path: Path, load: bool) -> Any:
    model, optimizer = made(3)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5),
        ],
        milestones=[2],
    )
    position, generator = Position(rank if load else 40 + rank), torch.Generator().manual_seed(rank if load else 9)
    if not load:
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        random.gauss(0, 1)
        zeroshard.save(
            path,
            model,
            optimizer,
            extra={"scheduler": scheduler, "data": [position], "generator": generator, "note": "ä"},
            rank_extra={"rank": rank},
        )
        result = None
    else:
        given = {"scheduler": scheduler, "data": [position], "generator": generator}
        result = zeroshard.load(path, model, optimizer, extra=given)
    rates = []
    for _ in range(4):
        optimizer.step()
        scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    drawn = (random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(2).tolist())
    return rates, position.at, torch.rand(1, generator=generator).item(), drawn, result and result.rank_extra


def test_schedulers_random_states_data_positions_and_plain_data(tmp_path: Path) -> None:
    before = run_processes(2, extras, tmp_path, False)
    after = run_processes(2, extras, tmp_path, True)
    for rank in range(2):
        assert after[rank][0] == before[rank][0]
        assert after[rank][1] == 40  # the first rank's
        assert after[rank][2] == before[0][2]
        assert after[rank][3] == before[rank][3]  # each rank's own
        assert after[rank][4] == [{"rank": 0}, {"rank": 1}]


def test_plain_data_comes_back_as_it_went() -> None:
    value = {
        "a": [1, 2.5, None, True, "ü", b"\x00\xff", -math.inf],
        "b": (1, (2,)),
        3: {"$x": 1},
        "c": Counter({2: 1, 4: 2}),
        "d": {1, 2},
        "e": torch.arange(3),
        "f": torch.tensor(2.5),
        "g": np.arange(4, dtype=np.uint16),
        "h": np.float64(1.5),
        "i": OrderedDict(a=1),
        "j": torch.bfloat16,
        "k": torch.device("cpu"),
        "l": torch.tensor(float("nan")),
        "m": torch.Size([1, 2]),
        "n": torch.tensor(0.1, dtype=torch.float64),
    }
    tensors: Tensors = {}
    text = json.dumps(encode(value, tensors), allow_nan=False)
    back = decode(json.loads(text), tensors.__getitem__)
    assert back["b"] == (1, (2,)) and back[3] == {"$x": 1} and back["d"] == {1, 2} and back["a"] == value["a"]
    assert isinstance(back["c"], Counter) and back["c"] == value["c"] and back["h"] == 1.5 and back["i"] == {"a": 1}
    assert (
        torch.equal(back["e"], value["e"]) and torch.equal(back["f"], value["f"]) and back["f"].dtype == torch.float32
    )
    assert back["g"].dtype == np.uint16 and back["g"].tolist() == [0, 1, 2, 3]
    assert back["j"] is torch.bfloat16 and back["k"] == torch.device("cpu") and back["l"].isnan()
    assert isinstance(back["m"], torch.Size) and torch.equal(back["n"], value["n"])
    with pytest.raises(TypeError, match=r"extra.x\[1\] has type Position, which cannot be saved"):
        encode({"x": [1, Position(1)]}, {})


# ------------------------------------------------------------------------------------------------ parts


def parts(rank: int, path: Path) -> None:
    model, optimizer = made(3)
    steps(model, optimizer, rank, 2, range(3))
    zeroshard.save(path / "whole", model, optimizer)
    zeroshard.save(path / "weights", model)
    zeroshard.save(path / "optimizer", model, optimizer, weights=False)
    saved = everything(model, optimizer)

    weights, fresh = made(2)
    zeroshard.load(path / "whole", weights)
    assert_same(everything(weights, fresh), {name: value for name, value in saved.items() if "/" not in name})
    zeroshard.load(path / "optimizer", weights, fresh, weights=False)
    assert_same(everything(weights, fresh), saved)

    other, states = made(1)
    before = {name: value for name, value in everything(other, states).items() if "/" not in name}
    zeroshard.load(path / "whole", other, states, weights=False)
    after = everything(other, states)
    assert_same(after, {**saved, **before})
    with pytest.raises(
        zeroshard.CheckpointError, match=r"weights contains no optimizer states: use load\(path, model\)"
    ):
        zeroshard.load(path / "weights", other, states)
    with pytest.raises(zeroshard.CheckpointError, match=r"not in the file: temperature, nothing, emb"):
        zeroshard.load(path / "optimizer", other)


def test_weights_alone_and_optimizer_alone(tmp_path: Path) -> None:
    run_threads(2, parts, tmp_path)


class More(Net):
    """A net that has lost its head and got another."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        del self.head
        self.top = nn.Linear(7, 11)
        self.extra = nn.Parameter(torch.zeros(3))


def unlike(rank: int, path: Path) -> None:
    model, optimizer = made(3)
    steps(model, optimizer, rank, 2, range(2))
    zeroshard.save(path, model, optimizer)
    saved = everything(model, optimizer)
    more = built(More, seed=1)
    other, states = made(3, more)
    start = everything(other, states)
    with pytest.raises(zeroshard.CheckpointError) as told:
        zeroshard.load(path, other)
    for name in ("not in the file: extra, top.weight, top.bias", "only in the file: head.weight, head.bias"):
        assert name in str(told.value)
    with pytest.raises(zeroshard.CheckpointError, match=r"top.bias \(optimizer\)"):
        zeroshard.load(path, other, states)
    assert_same(everything(other, states), start)  # nothing has changed
    result = zeroshard.load(path, other, states, strict=False)
    assert result.missing[:3] == ["extra", "top.weight", "top.bias"] and result.unexpected[:1] == ["head.weight"]
    loaded = everything(other, states)
    assert torch.equal(loaded["blocks.0.up.weight/exp_avg"], saved["blocks.0.up.weight/exp_avg"])
    assert torch.equal(loaded["top.weight"], start["top.weight"]) and "top.weight/step" not in loaded

    wide, _ = made(3, make_net(0, width=8, blocks=1))
    with pytest.raises(zeroshard.CheckpointError, match=r"embedding.weight has shape \[11, 7\], expected \[11, 8\]"):
        zeroshard.load(path, wide, strict=False)
    sgd = sharded(make_net(0, blocks=1), of(torch.optim.SGD, lr=1.0))
    with pytest.raises(zeroshard.CheckpointError, match=r"saved with the optimizer AdamW, expected SGD"):
        zeroshard.load(path, *sgd)
    one_group = sharded(make_net(0, blocks=1), partial(adamw, lr=1.0))
    with pytest.raises(zeroshard.CheckpointError, match=r"has other param groups \(\[\d+, \d+\] parameters\)"):
        zeroshard.load(path, *one_group)
    zeroshard.load(path, *one_group, strict=False)
    assert_same(everything(*one_group), saved)
    assert one_group[1].param_groups[0]["lr"] == 1.0


def test_new_and_missing_parameters_are_listed_and_left_out_on_request(tmp_path: Path) -> None:
    run_threads(2, unlike, tmp_path)


def without_frozen(rank: int, path: Path) -> None:
    model, optimizer = made(3, forms())
    image_steps(model, optimizer, rank, 2, 2)
    zeroshard.save(path, model, optimizer, frozen=False)
    saved = everything(model, optimizer)
    other, states = made(3, forms())
    with torch.no_grad(), zeroshard.gathered(other, write_rank=0):
        other.frozen.weight.fill_(3)
    assert zeroshard.load(path, other, states).missing == []
    loaded = everything(other, states)
    assert loaded.pop("frozen.weight").unique().tolist() == [3]
    assert_same(loaded, {name: value for name, value in saved.items() if name != "frozen.weight"})


def test_what_is_not_trained_may_be_left_out(tmp_path: Path) -> None:
    run_threads(2, without_frozen, tmp_path)
    assert not any("frozen" in key for file in tmp_path.glob("model-*") for key in keys_of(file))


def at_wrong_moments(rank: int, path: Path) -> None:
    model, optimizer = made(3)
    loss = net_loss(model, split(ONE_BATCH, rank, 2))
    loss.backward()
    with pytest.raises(zeroshard.CheckpointError, match=r"gradients of 1 backwards since the last step.*step\(\)"):
        zeroshard.save(path, model, optimizer)
    optimizer.step()
    zeroshard.save(path, model, optimizer)  # gradients that have been used are not lost
    token_step(model, split(ONE_BATCH, rank, 2))
    optimizer.zero_grad()
    zeroshard.save(path, model, optimizer)
    with pytest.raises(zeroshard.CheckpointError, match=r"the optimizer is not: pass the optimizer that shard\(\)"):
        zeroshard.save(path, model, optimizer.inner)
    with pytest.raises(zeroshard.CheckpointError, match=r"extra.f has type function"):
        zeroshard.save(path, model, extra={"f": at_wrong_moments})
    with pytest.raises(ValueError, match="saves only optimizer states, but no optimizer was given"):
        zeroshard.save(path, model, weights=False)
    with pytest.raises(ValueError, match="loads only optimizer states, but no optimizer was given"):
        zeroshard.load(path, model, weights=False)
    with pytest.raises(ValueError, match=r"keep is 0, expected a number of checkpoints of at least 1"):
        zeroshard.save(path, model, keep=0)
    zeroshard.load(path, model, optimizer)


def test_mid_accumulation_and_wrong_pairs_are_refused_on_all_ranks(tmp_path: Path) -> None:
    run_threads(2, at_wrong_moments, tmp_path)


def adversarial_loop(rank: int, path: Path, stage: int, clears: str) -> None:
    """The usual loop of a GAN: the maker's loss leaves gradients in the judge, which clears them before its own."""
    maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    maker, make_step = zeroshard.shard(maker, torch.optim.SGD(maker.parameters(), lr=0.1), stage=stage)
    judge, judge_step = zeroshard.shard(judge, torch.optim.SGD(judge.parameters(), lr=0.1), stage=stage)
    loss_net, _ = zeroshard.shard(nn.Linear(1, 1), stage=stage)  # has gradients, and no optimizer
    for number in range(3):
        judge_step.zero_grad() if clears == "optimizer" else judge.zero_grad()
        judge(maker(torch.ones(2, 4)).detach()).sum().backward()
        judge_step.step()
        make_step.zero_grad()
        loss_net(judge(maker(torch.ones(2, 4)))).sum().backward()
        make_step.step()
        if number:
            zeroshard.save(path / f"judge-{number}", judge, judge_step)
        zeroshard.save(path / "loss", loss_net)
    judge_step.zero_grad()
    for _ in range(2):  # a loop that accumulates
        judge(torch.ones(2, 4)).sum().backward()
        take_step(judge_step, judge(torch.ones(2, 4)).sum())
    judge(torch.ones(2, 4)).sum().backward()
    with pytest.raises(zeroshard.CheckpointError, match=r"gradients of 1 backwards since the last step"):
        zeroshard.save(path / "early", judge, judge_step)


@at_stages(0, 1, 3)
@pytest.mark.parametrize("clears", ["optimizer", "model"])
def test_gradients_that_the_loop_clears_do_not_prevent_a_save(clears: str, stage: int, tmp_path: Path) -> None:
    run_threads(2, adversarial_loop, tmp_path, stage, clears)


class Views(nn.Module):
    """Buffers that are views of each other."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(8.0)
        self.register_buffer("whole", whole)
        self.register_buffer("some", whole[:4])
        self.weight = nn.Parameter(torch.arange(6.0).view(3, 2))


@pytest.mark.parametrize("wait", [True, False])
def test_tensors_that_share_memory_are_each_kept_whole(wait: bool, tmp_path: Path) -> None:
    model = Views()
    other = Views()
    with torch.no_grad():
        other.weight.zero_()
        other.whole.zero_()
    zeroshard.save(tmp_path, model, extra={"rows": model.weight[:1]}, wait=wait).wait()
    result = zeroshard.load(tmp_path, other)
    assert torch.equal(other.whole, model.whole) and torch.equal(other.some, model.some)
    assert torch.equal(other.weight, model.weight) and torch.equal(result.extra["rows"], model.weight[:1])


@pytest.mark.parametrize(
    "value",
    [
        {frozenset({1}): 2},
        {frozenset({1}), frozenset({2, 3})},
        frozenset({1}),
        torch.ones(3, dtype=torch.complex64).conj(),
        np.arange(3, dtype=">i4"),
    ],
    ids=["frozenset as a key", "set of frozensets", "frozenset", "conjugate tensor", "big-endian array"],
)
def test_what_is_saved_as_extra_loads_with_its_type(value: Any, tmp_path: Path) -> None:
    zeroshard.save(tmp_path, nn.Linear(1, 1), extra={"value": value})
    back = zeroshard.load(tmp_path, nn.Linear(1, 1)).extra["value"]
    assert type(back) is type(value) and repr(back) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        np.ma.array([1, 2], mask=[False, True]),
        np.datetime64("2024-01-01", "ns"),
        np.timedelta64(5, "ns"),
        np.longdouble(1.5),
        np.ones(2, dtype=np.longdouble),
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
    ],
    ids=["masked array", "datetime64", "timedelta64", "longdouble", "longdouble array", "sparse", "meta"],
)
def test_extra_that_would_change_is_refused_by_its_place(value: Any, tmp_path: Path) -> None:
    with pytest.raises(zeroshard.CheckpointError, match=r"extra\.a\[1\] (has type|is a sparse)"):
        zeroshard.save(tmp_path, nn.Linear(1, 1), extra={"a": [0, value]})


def test_keys_of_extra_that_print_equally_stay_apart(tmp_path: Path) -> None:
    zeroshard.save(tmp_path, nn.Linear(1, 1), extra={"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}})
    extra = zeroshard.load(tmp_path, nn.Linear(1, 1)).extra
    assert extra["a.b"].tolist() == [1, 1] and extra["a"]["b"].tolist() == [0, 0]


def what_is_refused(rank: int, path: Path) -> None:
    model, optimizer = made(2, precision="bf16")
    steps(model, optimizer, rank, 2, range(1))
    zeroshard.save(path, model, optimizer)
    with pytest.raises(
        zeroshard.CheckpointError, match="this Linear is a part of a sharded model: pass the whole model"
    ):
        zeroshard.save(path, model.head)
    with pytest.raises(zeroshard.CheckpointError, match="a sharded ShardedOptimizer cannot be saved as extra data"):
        zeroshard.save(path, model, extra={"optimizer": optimizer})
    wide, states = made(3, make_net(0, width=8, blocks=1))
    with pytest.raises(
        zeroshard.CheckpointError, match=r"embedding.weight/exp_avg has shape \[11, 7\], expected \[11, 8\]"
    ):
        zeroshard.load(path, wide, states, weights=False)
    sgd = sharded(make_net(0, blocks=1), of(torch.optim.SGD, lr=0.5, momentum=0.9))
    result = zeroshard.load(path, *sgd, strict=False)
    assert "head.bias (optimizer)" in result.unexpected and sgd[1].param_groups[0]["lr"] == 0.5
    steps(*sgd, rank, 2, range(1))
    zeroshard.save(path / "compiled", torch.compile(model), optimizer)
    assert not zeroshard.load(path / "compiled", torch.compile(model), optimizer).missing


def test_what_would_load_as_something_else_is_refused(tmp_path: Path) -> None:
    run_threads(2, what_is_refused, tmp_path)
    torch.save({"weight": torch.zeros(1, 1, dtype=torch.complex64), "bias": torch.zeros(1)}, tmp_path / "complex.pt")
    with pytest.raises(zeroshard.CheckpointError, match=r"weight has dtype torch.complex64, expected torch.float32"):
        zeroshard.load(tmp_path / "complex.pt", nn.Linear(1, 1))


def test_a_rate_that_is_a_tensor_loads_into_one_that_is_not_and_back(tmp_path: Path) -> None:
    for kinds in ((torch.tensor, float), (float, torch.tensor)):
        for number, kind in enumerate(kinds):
            model = nn.Linear(2, 2)
            optimizer = torch.optim.Adam(model.parameters(), lr=kind(0.5 if number == 0 else 0.25), foreach=False)
            if number == 0:
                zeroshard.save(tmp_path, model, optimizer)
            else:
                zeroshard.load(tmp_path, model, optimizer)
                rate = optimizer.param_groups[0]["lr"]
                assert float(rate) == 0.5 and torch.is_tensor(rate) == (kind is torch.tensor)


def test_only_a_series_of_checkpoints_is_pruned(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    for name in ("disc-1", "gen-1", "pp0-step-1", "pp1-step-1", "gen-2"):
        zeroshard.save(tmp_path / name, model)
    (tmp_path / "best").symlink_to(tmp_path / "gen-1")
    (tmp_path / "gen-9-notes").mkdir()
    zeroshard.save(tmp_path / "gen-3", model, keep=2)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"latest", "best", "disc-1", "pp0-step-1", "pp1-step-1", "gen-2", "gen-3", "gen-9-notes"}


def test_weights_alone_leave_the_random_states(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    zeroshard.save(tmp_path, model)
    before = torch.get_rng_state()
    torch.rand(1)
    zeroshard.load(tmp_path, model)
    assert not torch.equal(torch.get_rng_state(), before)
    zeroshard.load(tmp_path, model, random=True)
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------ memory


def big(stage: int) -> tuple[Any, Any]:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))  # 96 MiB
    return zeroshard.shard(model, torch.optim.Adam(model.parameters(), fused=True), stage=stage, precision="fp32")


def bounded(rank: int, path: Path) -> list[int]:
    model, optimizer = big(3)
    take_step(optimizer, model(torch.ones(1, 1024)).sum())
    saving, _ = allocated_bytes(lambda: zeroshard.save(path, model, optimizer))
    model, optimizer = big(3)
    loading, left = allocated_bytes(lambda: zeroshard.load(path, model, optimizer))
    return [saving, loading, left]


def test_saving_and_loading_take_one_bounded_buffer_besides_the_shards(tmp_path: Path) -> None:
    for saving, loading, left in run_processes(2, bounded, tmp_path, fresh=True):  # shards of 48 MiB each
        assert saving <= (BLOCKS_IN_FLIGHT + 1) * BLOCK_BYTES
        assert 0 <= left - 2 * 48 * 2**20 <= 2**16  # the optimizer's states, which are there now
        assert loading <= left + (BLOCKS_IN_FLIGHT + 1) * BLOCK_BYTES


# ------------------------------------------------------------------------------------------------ weights of others


def import_weights(rank: int, path: Path, expected: Everything, options: dict[str, Any]) -> None:
    for stage in (3, 1, PLAIN):
        model, optimizer = made(stage, forms(last=stage == 3))
        zeroshard.load(path, model, **options)
        assert_same({k: v for k, v in everything(model, optimizer).items() if "/" not in k}, expected)


def test_weights_of_torch_save_and_safetensors_are_read_into_shards(tmp_path: Path) -> None:
    model = built(Forms, seed=5)
    expected = copied(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    whole = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "outer.weight"}
    save_file(whole, tmp_path / "one.safetensors")
    (tmp_path / "many").mkdir()
    homes = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(whole)}
    for file in set(homes.values()):
        save_file({name: whole[name] for name in whole if homes[name] == file}, tmp_path / "many" / file)
    (tmp_path / "many" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    torch.save({f"module.{name}": tensor for name, tensor in whole.items()}, tmp_path / "ddp.pt")
    for name, options in (
        ("model.pt", {}),
        ("one.safetensors", {}),
        ("many", {}),
        ("ddp.pt", {"rename": strip}),
    ):
        run_threads(2, import_weights, tmp_path / name, expected, options)


def strip(name: str) -> str:
    return name.removeprefix("module.")


def test_only_what_a_rank_needs_is_read(tmp_path: Path) -> None:
    """Weights are mapped: a rank of two touches half of them, and allocates nothing."""
    save_file(nn.Linear(1024, 8192, bias=False).state_dict(), tmp_path / "m.safetensors")  # 32 MiB
    for mapped, anonymous in run_processes(2, imported, tmp_path / "m.safetensors"):
        assert 15 * 2**20 <= mapped <= 24 * 2**20  # the kernel maps some megabytes at a time
        assert anonymous <= 12 * 2**20  # not the 16 MiB that were read


def resident(kind: str) -> int:
    """Bytes of this process in memory: of mapped files (RssFile), or its own (RssAnon)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def imported(rank: int, path: Path) -> tuple[int, int]:
    with torch.device("meta"):
        model = nn.Linear(1024, 8192, bias=False)
    model, _ = zeroshard.shard(model)
    before = resident("RssFile"), resident("RssAnon")
    most = list(before)

    copy_from = LocalTensor.copy_from

    def watched(self: LocalTensor, full_tensor: torch.Tensor) -> None:
        copy_from(self, full_tensor)
        most[:] = max(most[0], resident("RssFile")), max(most[1], resident("RssAnon"))

    with unittest.mock.patch.object(LocalTensor, "copy_from", watched):
        zeroshard.load(path, model)
    return most[0] - before[0], most[1] - before[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda path: torch.save({"model": {}, "step": 3}, path),
            r"contains a dict of \['model', 'step'\], expected a state",
        ),
        (lambda path: path.write_bytes(b"no zip"), r"x.pt cannot be read, expected a file by torch.save"),
        (lambda path: torch.save(nn.Linear(1, 1), path), r"x.pt cannot be read, expected a file by torch.save"),
        (lambda path: None, r"x.pt cannot be read, expected|x.pt is missing"),
    ],
)
def test_foreign_files_that_are_no_weights_are_refused_by_name(make: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path / "x.pt")
    with pytest.raises(zeroshard.CheckpointError, match=message):
        zeroshard.load(tmp_path / "x.pt", make_net(0, blocks=1))


def test_a_path_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zeroshard.CheckpointError, match=r"nothing does not exist: pass a checkpoint"):
        zeroshard.load(tmp_path / "nothing", make_net(0, blocks=1))
    with pytest.raises(zeroshard.CheckpointError, match=r"is neither a checkpoint nor a directory with a complete one"):
        zeroshard.load(tmp_path, make_net(0, blocks=1))


# ------------------------------------------------------------------------------------------------ during training


def asynchronous(rank: int, world: int, path: Path, stage: int) -> tuple[Everything, Everything]:
    model, optimizer = made(stage)
    steps(model, optimizer, rank, world, range(2))
    saved = []
    for number in range(3):
        saved.append(everything(model, optimizer))
        handle = zeroshard.save(path / f"step-{number}", model, optimizer, extra={"step": number}, keep=2, wait=False)
        steps(model, optimizer, rank, world, range(2))  # while the write runs
    assert handle.wait() == path / "step-2"
    assert sorted(p.name for p in path.iterdir()) == ["latest", "step-1", "step-2"]
    assert zeroshard.load(path, model, optimizer).extra == {"step": 2}
    return everything(model, optimizer), saved[-1]


@at_stages(0, 1, 3)
def test_training_goes_on_while_a_checkpoint_is_written(stage: int, tmp_path: Path) -> None:
    for loaded, saved in run_processes(2, asynchronous, 2, tmp_path, stage):
        assert_same(loaded, saved)


def copied_late(rank: int, path: Path) -> tuple[bool, Everything, Everything]:
    """The copy is made during the next forward and backward; the step waits for it."""
    from zeroshard.checkpoint import async_save

    model, optimizer = made(3)
    steps(model, optimizer, rank, 2, range(2))
    saved = everything(model, optimizer)
    finish, may_copy = async_save.Snapshot.finish, threading.Event()

    def late(self: Any) -> None:
        may_copy.wait()
        finish(self)

    async_save.Snapshot.finish = late  # type: ignore[method-assign]
    try:
        handle = zeroshard.save(path, model, optimizer, wait=False)
    finally:
        async_save.Snapshot.finish = finish  # type: ignore[method-assign]
    token_step(model, split(ONE_BATCH, rank, 2))
    waiting = not handle.done
    may_copy.set()
    optimizer.step()
    handle.wait()
    zeroshard.load(path, model, optimizer)
    return waiting, everything(model, optimizer), saved


def test_a_step_does_not_wait_for_a_save_that_failed_before_the_copy(tmp_path: Path) -> None:
    model, optimizer = made(3)
    steps(model, optimizer, 0, 1, range(1))
    with unittest.mock.patch("zeroshard.checkpoint.writer._RankWriter", side_effect=OSError("early")):
        handle = zeroshard.save(tmp_path, model, optimizer, wait=False)
        steps(model, optimizer, 0, 1, range(1))
        with pytest.raises(zeroshard.CheckpointError, match="early"):
            handle.wait()


def test_a_step_waits_for_the_copy_of_what_it_changes(tmp_path: Path) -> None:
    for waiting, loaded, saved in run_processes(2, copied_late, tmp_path):
        assert waiting
        assert_same(loaded, saved)
