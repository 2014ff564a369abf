"""zeroshard.state_dict(): what the plain model's state_dict() would give, whole, on the host of one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pairs import every_stage
from plain import ONE_BATCH, mesh_of, sgd, sharded, split, take_step, token_step
from ranks import RanksFailed, run_processes, run_threads
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from zoo import make_net

import zeroshard

OPTIONS: list[dict[str, Any]] = [{}, {"offload": "host"}, {"precision": "bf16"}]


class Halved(nn.Linear):
    """A layer that saves another value than its weight, and a second one."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach() / 2
        destination[prefix + "norm"] = self.weight.norm()

    def get_extra_state(self) -> Any:
        return {"made_by": "Halved"}


class Marked(nn.Parameter):
    """A parameter class of the user's, with an attribute."""


class Odd(nn.Module):
    """Ties, buffers, a frozen layer, channels last, hooks on state_dict()."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.halved = Halved(3, 3)
        self.short = nn.Linear(3, 2).bfloat16()
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.marked = Marked(torch.ones(3))
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_state_dict_post_hook(self._rename)

    @staticmethod
    def _rename(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["renamed.bias"] = state.pop("short.bias")
        state["scale"] = torch.tensor(module.marked.scale) * isinstance(module.marked, Marked)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.halved(self.frozen(self.norm(self.embedding(x)))) * self.marked
        return self.head(x) + self.short(x.bfloat16()).sum() + self.conv.weight.sum()


def trained(model: nn.Module, rank: int, world: int, **options: Any) -> tuple[nn.Module, Any]:
    model = copy.deepcopy(model)
    model.marked.scale = 4  # type: ignore[union-attr]
    parameters = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(parameters, lr=0.1), **options)
    for _ in range(2):
        take_step(optimizer, model(torch.arange(2) + rank).float().square().mean())
    return model, optimizer


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        if not isinstance(value, torch.Tensor):
            assert got[name] == value
            continue
        assert type(got[name]) is torch.Tensor and not got[name].requires_grad, name
        assert (got[name].dtype, got[name].device.type, got[name].stride()) == (value.dtype, "cpu", value.stride())
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@every_stage
def test_it_is_the_state_dict_of_the_unwrapped_model(stage: int, options: dict[str, Any]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = Odd()

    def body(rank: int) -> None:
        model, optimizer = trained(plain, rank, 2, stage=stage, **options)
        assert zeroshard.is_sharded(model) and zeroshard.is_sharded(torch.compile(model))
        assert not zeroshard.is_sharded(model.head) and not zeroshard.is_sharded(nn.Sequential(model))
        one, every = zeroshard.state_dict(model, 1), zeroshard.state_dict(model, None)
        adapter = zeroshard.state_dict(torch.compile(model), rank=1, trainable_only=True)
        model(torch.arange(2) + rank).float().mean().backward()  # still a working model, and the copies stay
        optimizer.zero_grad()
        wanted = every.copy()
        unwrapped = zeroshard.unwrap(model).state_dict()
        for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
            assert not torch.equal(unwrapped[name], wanted[name])
            unwrapped[name] = wanted[name]
        assert_same(every, unwrapped)
        assert every["head.weight"].data_ptr() == every["embedding.weight"].data_ptr()
        if rank == 1:
            assert_same(one, every)
            assert_same(adapter, {key: value for key, value in every.items() if not key.startswith("frozen.")})
        else:
            assert one == adapter == {}

    run_threads(2, body)


def test_tensor_parallel_shards_are_put_together() -> None:
    plain = make_net(width=8)
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}

    def body(rank: int) -> None:
        mesh = mesh_of((2, 2), "shard tensor")
        model, _ = sharded(plain, mesh=mesh, tensor_plan=plan)
        state = zeroshard.state_dict(model, rank=3)
        if rank == 3:
            assert_same(state, plain.state_dict())
        else:
            assert state == {}

    run_threads(4, body)


def over_gloo(rank: int) -> dict[str, torch.Tensor]:
    model, optimizer = sharded(make_net(), sgd, precision="bf16")
    token_step(model, split(ONE_BATCH, rank, 2))
    optimizer.step()
    before = zeroshard.report(model).memory["parameters", "device"].now
    state = zeroshard.state_dict(model)
    assert zeroshard.report(model).memory["parameters", "device"].now == before
    unwrapped = zeroshard.unwrap(model).state_dict()
    if rank == 0:
        assert_same(state, unwrapped)
    return state


def test_it_arrives_on_one_rank_over_gloo() -> None:
    state, nothing = run_processes(2, over_gloo)
    assert list(state) == list(make_net().state_dict()) and nothing == {}


def test_wrong_calls_raise() -> None:
    with pytest.raises(ValueError, match="this Linear is not a sharded model"):
        zeroshard.state_dict(nn.Linear(2, 2))

    def body(rank: int) -> None:
        model, _ = zeroshard.shard(make_net(), timeout=20)
        with pytest.raises(ValueError, match="0 to 1, or None for all ranks, got 2"):
            zeroshard.state_dict(model, rank=2)
        with zeroshard.gathered(model):
            nn.init.zeros_(model.head.weight)
            with pytest.raises(RuntimeError, match=r"'head[.]weight' was edited inside"):
                zeroshard.state_dict(model)
        zeroshard.state_dict(model)
        zeroshard.state_dict(model, rank=rank)

    with pytest.raises(RanksFailed, match="RanksDisagreeError"):
        run_threads(2, body)
