"""torch's Muon with its momentum on the shards: the bits of Muon on whole parameters, in every stage and mesh.

A class of one's own made from torch's Muon is stepped on whole parameters, each by its owner. It computes the same.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from one_pass import in_one_pass
from pairs import at_stages
from plain import (
    assert_close,
    assert_equal,
    batches,
    masters,
    mesh_of,
    net_loss,
    of,
    sharded,
    shares,
    split,
    take_step,
    token_step,
    train_step,
)
from ranks import run_threads, seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from zoo import Skips, built, make_net

import zeroshard
from zeroshard.comm import Traffic
from zeroshard.models import GPT, GPTConfig
from zeroshard.optim import MuonWithAdamW

BASE, DATA = make_net(blocks=2), batches(4)
SCALE = {"loss_scale": 1024.0}


class OwnMuon(torch.optim.Muon):
    """The same rule, on whole parameters."""


def muon(model: nn.Module, kind: type[torch.optim.Muon], **options: Any) -> torch.optim.Optimizer:
    """Two groups of all matrices that have elements."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    groups = [{"params": matrices[:2], "lr": 0.03, "weight_decay": 0.3}, {"params": matrices[2:], **options}]
    return kind(groups, lr=0.02)


def clipped(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
    """Two backwards a step, a clip in every other step, and a scheduler."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for number, batch in enumerate(data):
        for part in (batch, batch.flip(0)):
            optimizer.scale(net_loss(model, part) / 2).backward()
        if number % 2:
            optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        scheduler.step()
        if number != 1:  # else the clipped gradients stay, and the next ones are added
            optimizer.zero_grad()


def train(rank: int, world: int, kind: Any, mesh_shape: Any, groups: dict[str, Any], options: dict[str, Any]) -> Any:
    model = copy.deepcopy(BASE)
    mesh = None if mesh_shape is None else init_device_mesh("cpu", mesh_shape)
    model, optimizer = zeroshard.shard(model, muon(model, kind, **groups), mesh=mesh, elementwise=False, **options)
    clipped(model, optimizer, shares(DATA, rank, world))
    routing = zeroshard.report(model).routing
    assert routing is not None
    assert bool(routing.matrices) == (kind is torch.optim.Muon) == (not routing.whole)
    full = masters(model)
    gradients = {
        name: zeroshard.full_gradient(model, name) for name, p in model.named_parameters() if p.grad is not None
    }
    return full, gradients, optimizer.state_dict()


@pytest.mark.guarantee("Whole-parameter rules")
@pytest.mark.parametrize(
    ("world", "mesh_shape", "groups", "options"),
    [
        (1, None, {}, {}),
        (2, None, {"nesterov": False}, {"stage": 0}),
        (2, None, {"momentum": 0.3}, {"stage": 1}),
        (3, None, {"adjust_lr_fn": "match_rms_adamw"}, {"stage": 2, "bucket_size": 64}),
        (3, None, {"ns_steps": 2, "eps": 1e-3}, {"stage": 3, "precision": "bf16"}),
        (2, None, {}, {"stage": 2, "precision": "fp16", **SCALE}),
        (4, (2, 2), {}, {"stage": 3}),
        (4, (2, 2), {}, {"stage": 3, "partition": "full", "bucket_size": 100}),
        (4, (2, 2), {}, {"stage": 2, "partition": "hierarchical", "precision": "bf16"}),
    ],
    ids=str,
)
def test_parameters_gradients_and_states_are_those_of_whole_parameters(
    world: int, mesh_shape: Any, groups: dict[str, Any], options: dict[str, Any]
) -> None:
    ours, wanted = (
        run_threads(world, train, world, kind, mesh_shape, groups, options) for kind in (torch.optim.Muon, OwnMuon)
    )
    for (full, gradients, states), (other, other_gradients, other_states) in zip(ours, wanted, strict=True):
        assert_equal(full, other)
        assert_equal(gradients, other_gradients)
        assert states["state"].keys() == other_states["state"].keys() and len(states["state"]) > 3
        for number, state in other_states["state"].items():
            assert_equal(states["state"][number], state)
            assert state["momentum_buffer"].any() or not state["momentum_buffer"].numel()


class InTurn(nn.Module):
    """Matrices of two shapes, two by two: each of two owners has both shapes in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn((20, 12) if i % 4 < 2 else (12, 20)) for i in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(((i + x) * m).sin().sum() for i, m in enumerate(self.matrices))  # type: ignore[return-value]


def test_an_owner_of_shapes_in_turn_sends_each_result_to_its_place() -> None:
    def body(rank: int, kind: Any, bucket_size: int) -> Any:
        model, optimizer = sharded(built(InTurn), of(kind, lr=0.02), bucket_size=bucket_size, elementwise=False)
        for step in range(3):
            take_step(optimizer, model(torch.tensor(float(2 * step + rank))))
        routing = zeroshard.report(model).routing
        assert routing is not None
        owned = [name for name, param in (routing.matrices or routing.whole).items() if param.owner == 0]
        full = masters(model)
        assert [full[name].shape for name in owned] == 4 * [(20, 12), (12, 20)]
        return full

    for bucket_size in (10**6, 1000, 240):  # one exchange, two, and eight
        ours, wanted = (run_threads(2, body, kind, bucket_size)[0] for kind in (torch.optim.Muon, OwnMuon))
        assert_equal(ours, wanted)


def test_bf16_parameters_without_master_weights_are_whole() -> None:
    """A CPU rounds the last elements of a range of bf16 differently, so on shards they would not have torch's bits."""
    model = copy.deepcopy(BASE).bfloat16()
    model, _ = zeroshard.shard(model, muon(model, torch.optim.Muon))
    routing = zeroshard.report(model).routing
    assert routing is not None and len(routing.whole) == 7 and not routing.matrices


def test_two_bytes_travel_each_way_and_every_rank_has_its_part_of_the_momentum() -> None:
    def body(rank: int) -> Any:
        model, optimizer = sharded(
            nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))), of(torch.optim.Muon), stage=2
        )
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        momenta = [values for _, key, _, values in optimizer.local_states() if key == "momentum_buffer"]
        return sum(values.nbytes for values in momenta), zeroshard.report(model)

    elements = 8 * 64 * 64
    for nbytes, report in run_threads(4, body):
        assert report.collectives["all-to-all"] == Traffic(2, 2 * 2 * elements // 4)
        assert nbytes == report.memory["optimizer states", "device"].now == 4 * elements // 4
        assert report.memory["step", "device"].now == 0
        assert str(report.routing) == (
            "flat slices, orthogonalized each by one of 4 ranks: 8 parameters, 32,768 elements: the fullest has 1.00 × "
            "the mean's work"
        )


def test_owners_are_chosen_by_work() -> None:
    """By elements, the third matrix would be the largest."""

    def body(rank: int) -> Any:
        model, optimizer = sharded(
            nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in ((16, 16), (16, 2), (2, 200)))),
            of(torch.optim.Muon),
        )
        routing = zeroshard.report(model).routing
        assert routing is not None and optimizer is not None
        return routing

    routing = run_threads(2, body)[0]
    assert [matrix.owner for matrix in routing.matrices.values()] == [0, 1, 1]  # 400 elements, and little work
    assert routing.flops_by_owner() == [5 * (4 * 16**3 + 2 * 16**3), 5 * (4 * 4 * 16 + 16 + 4 * 4 * 200 + 16)]


@pytest.mark.parametrize("world", [1, 3])
def test_a_matrix_without_gradient_is_not_decayed_and_has_no_momentum(world: int) -> None:
    with seeded(0):
        base, data = Skips(), [torch.randn(6, 16) for _ in range(4)]

    def body(rank: int, kind: Any, stage: int) -> Any:
        model = copy.deepcopy(base)
        model, optimizer = zeroshard.shard(
            model, kind([p for p in model.parameters() if p.dim() == 2], lr=0.02), stage=stage, elementwise=False
        )
        counts = []
        for number, x in enumerate(data):
            take_step(optimizer, model(x.chunk(world)[rank], number % 2 == 1).square().mean())
            counts.append(len(optimizer.state_dict()["state"]))
        assert counts[0] < counts[1]
        return masters(model)

    for stage in (1, 3):
        ours, wanted = (run_threads(world, body, kind, stage)[0] for kind in (torch.optim.Muon, OwnMuon))
        assert_equal(ours, wanted)


def test_a_group_that_is_added_later_is_on_the_shards_too() -> None:
    def body(rank: int, kind: Any) -> Any:
        model = copy.deepcopy(BASE)
        first, *others = [p for p in model.parameters() if p.dim() == 2]
        model, optimizer = zeroshard.shard(model, kind([first], lr=0.02), precision="bf16", elementwise=False)
        for number, batch in enumerate(DATA):
            train_step(model, optimizer, split(batch, rank, 2))
            if number == 1:
                optimizer.add_param_group({"params": others, "lr": 0.01})
        routing = zeroshard.report(model).routing
        assert routing is not None and len(routing.matrices or routing.whole) == 1 + len(others)
        return masters(model)

    ours, wanted = (run_threads(2, body, kind)[0] for kind in (torch.optim.Muon, OwnMuon))
    assert_equal(ours, wanted)


@at_stages(0, 3)
def test_a_group_that_goes_over_to_adamw_is_updated_by_it(stage: int) -> None:
    def train(model: nn.Module, optimizer: Any) -> None:
        adamw = torch.optim.AdamW([torch.zeros(1)], lr=0.01, eps=1e-3).param_groups[0]
        for number in range(4):
            net_loss(model, DATA[0]).backward()  # the same on all ranks
            if number == 2:
                optimizer.state.clear()
                optimizer.param_groups[0].update({k: v for k, v in adamw.items() if k != "params"}, rule="adamw")
            optimizer.step()
            optimizer.zero_grad()

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return MuonWithAdamW(torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02), None)

    def body(rank: int) -> Any:
        model, optimizer = sharded(BASE, make, stage=stage)
        train(model, optimizer)
        return masters(model)

    plain = copy.deepcopy(BASE)
    train(plain, make(plain))
    assert_close(run_threads(2, body)[0], {name: p.detach() for name, p in plain.named_parameters()})


def test_a_group_that_muon_cannot_update_is_refused() -> None:
    model = copy.deepcopy(BASE)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    model, muon = zeroshard.shard(model, torch.optim.Muon(matrices, lr=0.02))
    with pytest.raises(ValueError, match=r"Muon updates matrices, .* has the shape \(17,\)"):
        muon.add_param_group({"params": [model.blocks[0].up.bias]})
    assert len(muon.param_groups) == len(muon.inner.param_groups) == 1


def test_a_group_without_a_known_rule_is_refused() -> None:
    model = copy.deepcopy(BASE)
    both = MuonWithAdamW(torch.optim.Muon([model.head.weight]), torch.optim.AdamW([model.head.bias]))
    model, optimizer = zeroshard.shard(model, both)
    with pytest.raises(ValueError, match=r'needs the option "rule", .* got None'):
        optimizer.add_param_group({"params": [model.blocks[0].up.weight]})
    token_step(model, DATA[0])
    optimizer.param_groups[1]["rule"] = "adam"
    with pytest.raises(ValueError, match=r"needs the option .rule., .* got 'adam'"):
        optimizer.step()


@pytest.mark.parametrize("way", ["hook", "step"])
def test_a_hook_or_a_replaced_step_sees_matrices(way: str) -> None:
    """Whenever it comes: the momentum goes to the owners, and the numbers are those of whole parameters."""

    def body(rank: int, kind: Any) -> Any:
        model = copy.deepcopy(BASE)
        model, optimizer = zeroshard.shard(model, muon(model, kind), stage=3, elementwise=False)
        shapes: set[Any] = set()

        def decay(inner: torch.optim.Optimizer, *_: Any) -> None:
            for group in inner.param_groups:
                for parameter in group["params"]:
                    shapes.add(tuple(parameter.shape))
                    parameter.data.mul_(0.9)

        own_step = optimizer.inner.step

        def replaced() -> None:
            own_step()
            decay(optimizer.inner)

        for number, batch in enumerate(DATA):
            if number == 2 and way == "hook":
                optimizer.inner.register_step_post_hook(decay)
            if number == 2 and way == "step":
                optimizer.inner.step = replaced
            train_step(model, optimizer, split(batch, rank, 2))
        assert shapes and all(len(shape) == 2 for shape in shapes)
        full = masters(model)
        return full, optimizer.state_dict()["state"]

    ours, wanted = (run_threads(2, body, kind)[0] for kind in (torch.optim.Muon, OwnMuon))
    assert_equal(ours[0], wanted[0])
    for number, state in wanted[1].items():
        assert_equal(ours[1][number], state)


class FailsOnce:
    """Kernels of which one pass raises, once."""

    def __init__(self, kernels: Any, name: str, call: int) -> None:
        self._kernels, self._name, self._calls_left = kernels, name, call

    def __getattr__(self, name: str) -> Any:
        return partial(self._run, name)

    def _run(self, name: str, *args: Any) -> Any:
        self._calls_left -= name == self._name
        if name == self._name and self._calls_left == 0:
            raise MemoryError
        return getattr(self._kernels, name)(*args)


@pytest.mark.parametrize(("name", "call"), [("update_momenta", 2), ("update_values", 1)])
@pytest.mark.parametrize(("world", "bucket_size"), [(1, 240), (2, 240), (2, 1000)])
def test_a_step_that_raises_leaves_no_memory_behind(name: str, call: int, world: int, bucket_size: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(built(InTurn), of(torch.optim.Muon, lr=0.02), bucket_size=bucket_size)
        updater = optimizer._step_runner.muon
        for number in range(3):
            model(torch.tensor(float(number))).backward()
            if number == 1:
                kernels, updater._kernels = updater._kernels, FailsOnce(updater._kernels, name, call)
                with pytest.raises(MemoryError):
                    optimizer.step()
                updater._kernels = kernels
                assert zeroshard.report(model).memory["step", "device"].now == 0
            optimizer.step()
            optimizer.zero_grad()
        assert zeroshard.report(model).memory["step", "device"].now == 0

    run_threads(world, body)


# ------------------------------------------------------------------------------------------ tensor axis, checkpoints


def gpt(rank: int, shape: tuple[int, ...], kind: Any, data: list[torch.Tensor], **options: Any) -> tuple[Any, Any]:
    mesh = mesh_of(shape, "replicate shard tensor")
    model: Any = built(lambda: GPT(GPTConfig(vocab_size=11, context=8, layers=1, heads=2, width=8)))
    inner = kind([p for p in model.blocks.parameters() if p.dim() == 2], lr=0.02)
    model, optimizer = zeroshard.shard(model, inner, mesh=mesh, timeout=20, elementwise=False, **options)
    tensor, world = shape[-1], torch.Size(shape).numel()
    for ids in data:
        part = split(ids, rank // tensor, world // tensor)
        take_step(optimizer, model(part, part))
    return model, optimizer


@pytest.mark.parametrize(
    ("shape", "options"),
    [((2, 2), {"stage": 3}), ((2, 2), {"stage": 0}), ((1, 2), {"stage": 2}), ((2, 1, 2), {"stage": 1})],
)
def test_a_matrix_that_is_divided_over_the_tensor_axis_is_put_together(shape: Any, options: Any) -> None:
    def body(rank: int, kind: Any) -> Any:
        model, optimizer = gpt(rank, shape, kind, DATA, **options)
        assert zeroshard.report(model).memory["step", "device"].now == 0
        full = masters(model)
        return full, optimizer.state_dict()["state"]

    world = torch.Size(shape).numel()
    for ours, wanted in zip(*(run_threads(world, body, kind) for kind in (torch.optim.Muon, OwnMuon)), strict=True):
        assert_equal(ours[0], wanted[0])
        for number, state in wanted[1].items():
            assert_equal(ours[1][number], state)


class Branches(nn.Module):
    """Of 5, 8 and 6 rows: two tensor ranks have 3 and 2 of 5, so on one of them alone two TP shards have one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, rows, bias=False) for rows in (5, 8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], -1).tanh()


@at_stages(0, 3)
def test_matrices_whose_tp_shards_differ_in_size_are_put_together(stage: int) -> None:
    def body(rank: int, kind: Any) -> Any:
        plan = {"branches.*": ColwiseParallel(output_layouts=Replicate())}
        model, optimizer = sharded(
            built(Branches),
            of(kind, lr=0.05),
            mesh=mesh_of((1, 2), "shard tensor"),
            stage=stage,
            tensor_plan=plan,
            elementwise=False,
        )
        for batch in DATA:
            take_step(optimizer, model(batch[:, :4] / 11).square().sum())
        return masters(model)

    for ours, wanted in zip(*(run_threads(2, body, kind) for kind in (torch.optim.Muon, OwnMuon)), strict=True):
        assert_equal(ours, wanted)


# each mesh, and each place of the momentum, once before the other mesh and once after it
@pytest.mark.parametrize(("there", "on_host_first"), [(((1, 2), 3), True), (((3, 1), 2), False)], ids=str)
def test_momentum_is_loaded_from_owners_and_by_owners(there: Any, on_host_first: bool, tmp_path: Path) -> None:
    """With states on the host, owners have the momentum, as they all had before it was on the shards."""

    def run(rank: int, shape: Any, stage: int, on_host: bool, is_saving: bool) -> Any:
        options = {"stage": stage, "offload": "host" if on_host else None}
        model, optimizer = gpt(rank, shape, torch.optim.Muon, DATA[: 2 if is_saving else 1], **options)
        (zeroshard.save if is_saving else zeroshard.load)(tmp_path / "saved", model, optimizer)
        return optimizer.state_dict()["state"]

    ways = (((2, 2), 2), there, on_host_first), (there, ((2, 2), 1), not on_host_first)
    for first, second, saved_on_host in ways:
        saved = run_threads(torch.Size(first[0]).numel(), run, *first, saved_on_host, True)[0]
        for loaded in run_threads(torch.Size(second[0]).numel(), run, *second, not saved_on_host, False):
            assert loaded.keys() == saved.keys() and loaded
            for number, state in saved.items():
                assert_equal(loaded[number], state)


# ------------------------------------------------------------------------------------------------------ next to AdamW


@pytest.mark.parametrize("offload", [None, {"optimizer": ("host", 0.5)}])
def test_adamw_next_to_muon_is_updated_in_one_pass(offload: Any) -> None:
    """The fused kernel also writes the parameters of 16 bits; those of Muon's matrices are copied from the masters."""

    def body(rank: int, stage: int) -> Any:
        model = copy.deepcopy(BASE)
        matrices, others = ([p for p in model.parameters() if (p.dim() == 2) is is_it] for is_it in (True, False))
        inner = MuonWithAdamW(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02, fused=True))
        model, optimizer = zeroshard.shard(model, inner, stage=stage, precision="bf16", offload=offload)
        for batch in DATA:
            take_step(optimizer, net_loss(model, split(batch, rank, 2)), 0.5)
        with zeroshard.gathered(model):
            found = {name: p.detach().clone() for name, p in model.named_parameters()}
        return found | {f"{name} master": zeroshard.full_parameter(model, name) for name in list(found)}

    for stage in (1, 3):
        wanted = run_threads(2, body, stage)
        with in_one_pass() as kernels:
            ours = run_threads(2, body, stage)
        assert offload or all(kernel.runs for kernel in kernels)
        for mine, other in zip(ours, wanted, strict=True):
            assert_equal(mine, other)
