"""Tensor parallelism: the same numbers as the undivided model on one rank, whatever mesh and stage."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import hugging_face
import pytest
import torch
from pairs import at_stages
from plain import Tensors, adamw, assert_close, decayed, masters, sharded, split, tokens, train_plainly
from ranks import run_processes, run_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from zoo import built

import zeroshard
from zeroshard.models import GPT, GPTConfig

VOCABULARY = 13  # two ranks do not divide it
AXES = {2: ("shard", "tensor"), 3: ("replicate", "shard", "tensor")}


def gpt(**options: Any) -> GPT:
    return GPT(GPTConfig(**{"vocab_size": VOCABULARY, "context": 8, "layers": 2, "heads": 4, "width": 16} | options))


def gpt_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = model(ids, ids)
    loss.backward()
    return loss  # type: ignore[no-any-return]


def hf_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
    loss.backward()
    return loss


def mesh_of(shape: tuple[int, ...]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=AXES[len(shape)])


def data_part(batch: Any, rank: int, shape: tuple[int, ...]) -> Any:
    """Ranks of one tensor axis get the same rows."""
    tensor = shape[-1]
    return split(batch, rank // tensor, torch.Size(shape).numel() // tensor)


def train(rank: int, model: nn.Module, step: Any, batches: Any, make: Any, shape: Any, clip: Any, options: Any) -> Any:
    model, optimizer = sharded(model, make, mesh=mesh_of(shape), timeout=20, **options)
    losses, norms = [], []
    for batch in batches:
        losses.append(step(model, data_part(batch, rank, shape)).item())
        if clip is not None:
            norms.append(optimizer.clip_grad_norm_(*clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, masters(model)


def compare(
    model: nn.Module,
    step: Any,
    shape: tuple[int, ...],
    *,
    make: Any = decayed,
    clip: tuple[float, float] | None = None,
    run: Any = run_threads,
    relative: float = 1e-5,
    **options: Any,
) -> None:
    """Train divided and on one rank, and compare losses, norms and every parameter."""
    batches = tokens(3, VOCABULARY, rows=4)
    norms: list[float] = []

    def clipping(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss = step(model, ids)
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), *clip)))
        return loss  # type: ignore[no-any-return]

    losses, parameters, _ = train_plainly(model, clipping, batches, make, 1)
    results = run(torch.Size(shape).numel(), train, model, step, batches, make, shape, clip, options)
    mean = torch.tensor([result[0] for result in results]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=relative, atol=relative)
    for _, theirs, ours in results:
        torch.testing.assert_close(theirs, norms, rtol=relative, atol=relative)
        assert_close(ours, parameters, relative)


@pytest.mark.guarantee("Tensor parallelism")
@pytest.mark.parametrize(
    ("shape", "stage"), [((2, 2), 0), ((2, 2), 1), ((2, 2), 2), ((2, 2), 3), ((1, 2), 0), ((1, 2), 3), ((2, 1, 2), 2)]
)
def test_a_divided_gpt_trains_as_on_one_rank(shape: tuple[int, ...], stage: int) -> None:
    model = built(lambda: gpt(tied=stage % 2 == 0))
    compare(model, gpt_step, shape, stage=stage, clip=(0.05, 2.0), make=adamw if stage > 1 else decayed)


def test_the_infinity_norm_is_that_of_the_whole_model() -> None:
    compare(built(gpt), gpt_step, (2, 2), stage=3, clip=(0.01, float("inf")))


def test_four_ranks_divide_a_gpt() -> None:
    compare(built(gpt), gpt_step, (1, 4), stage=2, clip=(0.05, 2.0))


@at_stages(0, 3)
def test_a_divided_gpt_trains_in_real_processes(stage: int) -> None:
    compare(built(gpt), gpt_step, (2, 2), stage=stage, clip=(0.05, 2.0), run=run_processes)


def llama() -> nn.Module:
    pytest.importorskip("transformers")
    return hugging_face.llama(VOCABULARY, layers=2)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "shape", "stage"),
    [(llama, (1, 2), 0), (llama, (2, 2), 3), (llama, (2, 1, 2), 2), (gpt2, (1, 2), 0), (gpt2, (2, 2), 3)],
)
def test_a_divided_hugging_face_model_trains_as_on_one_rank(make: Any, shape: tuple[int, ...], stage: int) -> None:
    compare(built(make), hf_step, shape, stage=stage, clip=(0.05, 2.0), relative=3e-5)


# -- what is divided, how much of it is held, and how it is undone ---------------------------------------------------


class Mlp(nn.Module):
    """A block whose norm works on a part of its rows, as sequence parallelism has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Sequence(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList([Mlp(), Mlp()])
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


SEQUENCE_PLAN: dict[str, Any] = {
    "blocks.*": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),)),
    "blocks.*.norm": SequenceParallel(sequence_dim=0, use_local_output=False),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(0)),
    "blocks.*.down": RowwiseParallel(),
}


def sequence_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    return loss


@at_stages(0, 3)
def test_gradients_that_each_tensor_rank_has_a_part_of_are_summed(stage: int) -> None:
    compare(built(Sequence), sequence_step, (2, 2), stage=stage, clip=(0.05, 2.0), tensor_plan=SEQUENCE_PLAN)


def test_a_model_that_is_parallelised_already_keeps_its_parameters() -> None:
    model = built(Sequence)
    batch = tokens(1, VOCABULARY, rows=4)[0]
    losses, parameters, _ = train_plainly(model, sequence_step, [batch], decayed, 1)

    def body(rank: int) -> Any:
        ours, mesh = copy.deepcopy(model), mesh_of((2, 2))
        parallelize_module(ours, mesh["tensor"], SEQUENCE_PLAN)
        before = list(ours.parameters())
        ours, optimizer = zeroshard.shard(ours, decayed(ours), mesh=mesh, precision="fp32", timeout=20)
        assert all(a is b for a, b in zip(ours.parameters(), before, strict=True))
        loss = sequence_step(ours, data_part(batch, rank, (2, 2))).item()
        optimizer.step()
        whole = masters(ours)
        zeroshard.unwrap(ours)
        assert all(a is b for a, b in zip(ours.parameters(), before, strict=True))
        for name, parameter in ours.named_parameters():
            there = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            assert torch.equal(there, whole[name])
        ours(batch)
        return loss, whole

    results = run_threads(4, body)
    assert sum(loss for loss, _ in results) / 4 == pytest.approx(losses[0], rel=1e-5)
    for _, whole in results:
        assert_close(whole, parameters, 1e-5)


@at_stages(0, 3)
def test_unwrap_gives_the_undivided_model_back(stage: int) -> None:
    model = built(lambda: gpt(tied=True))
    batch = tokens(1, VOCABULARY, rows=4)[0]

    def body(rank: int) -> None:
        ours = copy.deepcopy(model)
        before = dict(ours.named_parameters())
        ours, optimizer = zeroshard.shard(
            ours, adamw(ours), mesh=mesh_of((2, 2)), stage=stage, precision="bf16", timeout=20
        )
        assert isinstance(ours.blocks[0].mlp.up.weight, DTensor)
        assert ours.head.weight is ours.tokens.weight
        assert bool(before["blocks.0.mlp.up.weight"].isnan().all())  # nobody trains the user's old parameter unnoticed
        gpt_step(ours, data_part(batch, rank, (2, 2)))
        optimizer.step()
        whole, state = masters(ours), zeroshard.full_state(optimizer, "blocks.1.attention.qkv.weight")
        ours, inner = zeroshard.unwrap(ours, optimizer)
        for name, parameter in ours.named_parameters():
            assert parameter is before[name]
            assert torch.equal(parameter, whole[name])
        qkv = ours.blocks[1].attention.qkv.weight
        assert torch.equal(inner.state[qkv]["exp_avg"], state["exp_avg"])
        plain = copy.deepcopy(model)
        plain.load_state_dict(ours.state_dict())
        assert torch.equal(ours(batch), plain(batch))
        zeroshard.shard(ours, mesh=mesh_of((2, 2)), timeout=20)  # and once more

    run_threads(4, body)


def test_a_divided_model_begins_as_the_undivided_one_from_the_meta_device() -> None:
    undivided = run_processes(1, _values_from_meta, None)[0]
    for shape in ((1, 2), (2, 2)):
        for ours in run_processes(torch.Size(shape).numel(), _values_from_meta, shape):
            assert all(torch.equal(ours[name], value) for name, value in undivided.items())


def _values_from_meta(rank: int, shape: tuple[int, ...] | None) -> Tensors:
    with torch.device("meta"):
        model = gpt(tied=True)
    torch.manual_seed(3)
    zeroshard.shard(model, mesh=None if shape is None else mesh_of(shape), timeout=20)
    return masters(model)


def test_each_rank_holds_its_part_of_its_part() -> None:
    model = built(lambda: gpt(width=64, vocab_size=128))
    whole = sum(p.numel() for p in model.parameters())
    alike = sum(p.numel() for n, p in model.named_parameters() if "norm" in n or "positions" in n)
    alike += sum(p.numel() for n, p in model.named_parameters() if n.endswith(("out.bias", "down.bias")))

    def body(rank: int) -> int:
        ours, _ = zeroshard.shard(copy.deepcopy(model), mesh=mesh_of((2, 2)), timeout=20)
        return zeroshard.report(ours).states

    for states in run_threads(4, body):
        assert states == pytest.approx(4 * (alike + (whole - alike) / 2) / 2, rel=0.02)  # fp32; alignment


def test_an_absent_part_is_refused_by_name_and_comes_with_gathered() -> None:
    model = built(gpt)

    def body(rank: int) -> None:
        ours, _ = zeroshard.shard(copy.deepcopy(model), mesh=mesh_of((2, 2)), timeout=20)
        weight = ours.blocks[0].mlp.up.weight
        assert weight.shape == (64, 16)
        assert isinstance(weight, nn.Parameter)
        with pytest.raises(RuntimeError, match=r"blocks\.0\.mlp\.up\.weight.*gathered"):
            weight.sum()
        for method in (weight.to_local, weight.full_tensor):
            with pytest.raises(RuntimeError, match=r"blocks\.0\.mlp\.up\.weight.*gathered"):
                method()
        assert "partitioned" in repr(weight)
        with zeroshard.gathered(ours):
            assert torch.equal(weight.full_tensor(), model.blocks[0].mlp.up.weight)
        with zeroshard.gathered(ours, write_rank=0), torch.no_grad():
            weight.to_local().fill_(rank // 2 + 1.0)
        assert zeroshard.full_parameter(ours, "blocks.0.mlp.up.weight").eq(1.0).all()

    run_threads(4, body)


def test_accumulation_and_frozen_parameters() -> None:
    model = built(gpt)
    model.tokens.requires_grad_(False)
    model.blocks[0].mlp.requires_grad_(False)

    def twice(model: Any, ids: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            loss = gpt_step(model, ids)
        return loss

    for stage in (1, 3):
        compare(model, twice, (2, 2), stage=stage, clip=(0.05, 2.0))


def test_an_overflow_on_one_tensor_rank_skips_the_step_on_all() -> None:
    model = built(gpt)
    batch = tokens(1, VOCABULARY, rows=4)[0]

    def body(rank: int) -> Any:
        ours, optimizer = sharded(model, decayed, mesh=mesh_of((2, 2)), precision="fp16", timeout=20)
        before = masters(ours)
        optimizer.scale(ours(data_part(batch, rank, (2, 2))).float().sum()).backward()
        engine = ours._zeroshard.engine
        if rank == 1:  # a part of a divided parameter, on one rank of four
            next(iter(engine.gradients.flat_grads.values())).shard.view(-1)[:1] = float("inf")
        optimizer.step()
        after = masters(ours)
        return optimizer.loss_scale.item(), all(torch.equal(after[name], value) for name, value in before.items())

    assert run_threads(4, body) == [(2.0**15, True)] * 4


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options", "complaint"),
    [
        (Sequence, {}, r"no plan is known for Sequence: pass shard\(tensor_plan="),
        (lambda: gpt(heads=1), {}, "2 ranks, which do not divide the model's 1 heads"),
        (Sequence, {"tensor_plan": {"blocks.*.upp": ColwiseParallel()}}, "'blocks.*.upp'] matches no module"),
        (Sequence, {"tensor_plan": {"blocks.*.up": "colwise"}}, "got str"),
        (lambda: gpt(tied=True), {"tensor_plan": {"head": ColwiseParallel()}}, "does not shard it in the same way"),
        (Sequence, {"tensor_plan": {}}, "shards no parameter"),
    ],
)
def test_what_cannot_be_divided_is_refused_and_left_as_it_was(make: Any, options: Any, complaint: str) -> None:
    model = built(make)

    def body(rank: int) -> None:
        ours = copy.deepcopy(model)
        before = dict(ours.named_parameters())
        with pytest.raises((ValueError, TypeError)) as refused:
            zeroshard.shard(ours, mesh=mesh_of((1, 2)), timeout=20, **options)
        assert complaint.replace("\\", "") in str(refused.value)
        assert all(parameter is before[name] for name, parameter in ours.named_parameters())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in ours.modules())

    run_threads(2, body)


def test_meshes_and_models_that_do_not_go_together_are_refused() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
        with pytest.raises(ValueError, match="last axis is named 'tensor'"):
            zeroshard.shard(built(Sequence), tensor_plan=SEQUENCE_PLAN)
        ours = built(Sequence)
        parallelize_module(ours, mesh, SEQUENCE_PLAN)
        with pytest.raises(ValueError, match="is a DTensor: give shard"):
            zeroshard.shard(ours)
        with pytest.raises(ValueError, match="do not pass tensor_plan"):
            zeroshard.shard(ours, mesh=mesh, tensor_plan=SEQUENCE_PLAN)
        with pytest.raises(ValueError, match="as its last axis"):
            zeroshard.shard(built(gpt), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("tensor", "shard")))
        unnamed = init_device_mesh("cpu", (2, 1, 1))
        with pytest.raises(ValueError, match="optionally a last one named 'tensor'"):
            zeroshard.shard(built(gpt), mesh=unnamed)

    run_threads(2, body)


def test_a_tensor_axis_of_one_rank_divides_nothing() -> None:
    def body(rank: int) -> None:
        ours, _ = zeroshard.shard(built(Sequence), mesh=mesh_of((2, 1)), timeout=20)
        assert not any(isinstance(parameter, DTensor) for parameter in ours.parameters())

    run_threads(2, body)


class Heads(nn.Module):
    """A block with a norm between a layer that is divided by columns and one that is divided by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 12), nn.Parameter(torch.ones(1)), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.norm)  # type: ignore[no-any-return]


def test_a_plain_parameter_between_divided_layers_is_refused() -> None:
    plan: dict[str, Any] = {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()}
    model = built(lambda: nn.Sequential(Heads()))

    def body(rank: int, stage: int) -> None:
        ours, optimizer = sharded(model, decayed, mesh=mesh_of((2, 2)), tensor_plan=plan, stage=stage, timeout=20)
        ours(torch.arange(8.0)).square().sum().backward()
        with pytest.raises(RuntimeError, match=r"0\.norm' is not the same on all ranks of the tensor axis"):
            optimizer.step()

    for stage in (0, 3):
        run_threads(4, body, stage)


@at_stages(0, 1, 3)
def test_what_tensor_ranks_replicate_stays_equal_when_one_rank_writes(stage: int) -> None:
    model = built(gpt)

    def body(rank: int) -> torch.Tensor:
        ours, _ = zeroshard.shard(copy.deepcopy(model), mesh=mesh_of((2, 2)), stage=stage, timeout=20)
        with zeroshard.gathered(ours, write_rank=1), torch.no_grad():
            if rank == 2:  # the first tensor rank of the second data rank
                ours.norm.weight.fill_(5.0)
        return zeroshard.full_parameter(ours, "norm.weight")

    for values in run_threads(4, body):
        assert values.eq(5.0).all()


def test_ranks_with_different_plans_raise() -> None:
    plans: list[dict[str, Any]] = [
        {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()},
        {"blocks.*.up": ColwiseParallel(output_layouts=Replicate())},
    ]

    def body(rank: int) -> None:
        with pytest.raises(zeroshard.RanksDisagreeError, match="different tensor plans"):
            zeroshard.shard(built(Sequence), mesh=mesh_of((1, 2)), tensor_plan=plans[rank], timeout=20)

    run_threads(2, body)


class Counted(nn.Linear):
    """A linear layer that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_buffers_and_layers_without_parameters_come_and_go_with_the_plan() -> None:
    plan: dict[str, Any] = {"0": ColwiseParallel(output_layouts=Replicate()), "1": SequenceParallel()}
    model = built(lambda: nn.Sequential(Counted(), nn.Dropout(0.0)))

    def body(rank: int) -> None:
        ours = copy.deepcopy(model)
        for count in (1.0, 2.0):  # twice: torch's own marks are gone in between
            zeroshard.shard(ours, mesh=mesh_of((2, 2)), tensor_plan={"0": plan["0"]}, timeout=20)
            ours(torch.ones(2, 4)).sum().backward()
            zeroshard.unwrap(ours)
            assert ours[0].calls.item() == count
        parallel, _ = zeroshard.shard(ours, mesh=mesh_of((2, 2)), tensor_plan=plan, timeout=20)
        zeroshard.unwrap(parallel)
        zeroshard.shard(parallel, mesh=mesh_of((2, 2)), tensor_plan=plan, timeout=20)

    run_threads(4, body)


def test_an_optimizers_states_go_into_and_out_of_a_model_that_was_parallelised_already() -> None:
    model = built(Sequence)
    batch = tokens(1, VOCABULARY, rows=4)[0]

    def body(rank: int) -> None:
        ours, mesh = copy.deepcopy(model), mesh_of((2, 2))
        parallelize_module(ours, mesh["tensor"], SEQUENCE_PLAN)
        optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01, foreach=False)
        for _ in range(2):
            sequence_step(ours, batch)
            optimizer.step()
            before = {id(p): optimizer.state[p]["exp_avg"] for p in ours.parameters()}
            ours, sharded = zeroshard.shard(ours, optimizer, mesh=mesh, timeout=20)
            sequence_step(ours, data_part(batch, rank, (2, 2)))
            ours, optimizer = zeroshard.unwrap(ours, sharded)
            for parameter in ours.parameters():
                ours_now, then = optimizer.state[parameter]["exp_avg"], before[id(parameter)]
                assert type(ours_now) is type(then)
                assert torch.equal(*((t.to_local() if isinstance(t, DTensor) else t) for t in (ours_now, then)))

    run_threads(4, body)


def test_a_forward_that_changes_a_divided_parameter_is_told_in_any_step() -> None:
    for message in run_threads(4, _told_of_a_change):
        assert "qkv.weight' were changed in place during a forward" in message


def _told_of_a_change(rank: int) -> str:
    model, _ = zeroshard.shard(gpt(), mesh=mesh_of((2, 2)))
    ids = torch.zeros(1, 8, dtype=torch.long)
    for _ in range(4):
        gpt_step(model, ids)
    divided = next(m for m in model.modules() if isinstance(m, nn.Linear) and isinstance(m.weight, DTensor))

    def change(module: nn.Linear, args: object, output: object) -> None:
        module.weight.mul_(2)

    divided.register_forward_hook(change)
    with torch.no_grad(), pytest.raises(RuntimeError) as error:
        model(ids, ids)
    return str(error.value)


def test_a_divided_model_goes_with_its_last_reference() -> None:
    assert run_processes(2, _is_gone) == [True, True]


def _is_gone(rank: int) -> bool:
    model, optimizer = zeroshard.shard(model := gpt(), decayed(model), mesh=mesh_of((1, 2)), timeout=20)
    gpt_step(model, tokens(1, VOCABULARY, rows=4)[0])
    optimizer.step()
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model, optimizer
        return gone() is None
    finally:
        gc.enable()
