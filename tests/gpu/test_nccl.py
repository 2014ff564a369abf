"""Several real NCCL ranks, on one GPU if there are no more: every stage, precision, mesh and tier against DDP.

Every case trains the same model on the same data twice, with DDP and with zeroshard, and compares losses, gradient
norms and weights. Without a GPU, ZEROSHARD_TEST_GLOO=1 runs the cases over gloo, to debug them.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from pairs import every_stage
from plain import Tensors, assert_close, assert_equal
from ranks import run_nccl, run_processes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from zoo import Adapted

import zeroshard
from zeroshard.models import GPT, GPTConfig

ON_GLOO = os.environ.get("ZEROSHARD_TEST_GLOO") == "1"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or ON_GLOO), reason="needs a GPU, which several NCCL ranks can share"
)
run = run_processes if ON_GLOO else run_nccl

STEPS, ROWS, LENGTH, VOCABULARY = 4, 3, 16, 64
SHAPE = GPTConfig(vocab_size=VOCABULARY, context=LENGTH, layers=3, heads=4, width=64)
WORLDS = [2, 4]


class Experts(nn.Module):
    """Each token goes to one of four experts, so that ranks use different ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.gate(tokens[:1]).softmax(-1).max(-1)  # by the first token: one expert for all
        expert = self.experts[int(chosen)]
        return x + (weight * expert(tokens)).view_as(x)


class Routed(nn.Module):
    """Two layers of experts around an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(Experts(32) for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def lora_gpt() -> nn.Module:
    """Return a GPT of which only updates of low rank are trained."""
    model = GPT(SHAPE).requires_grad_(False)
    for parent in list(model.blocks.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, nn.Linear):
                setattr(parent, name, Adapted(module, rank=4))
    return model


MODELS = {
    "gpt": lambda: GPT(SHAPE),
    "tied": lambda: GPT(replace(SHAPE, tied=True)),
    "lora": lora_gpt,
    "experts": Routed,
}


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    model: str = "gpt"
    options: dict[str, Any] = field(default_factory=dict)  # of shard()
    mesh: tuple[tuple[str, int], ...] = ()  # names and sizes; the default is all ranks on the shard axis
    checkpointed: dict[str, Any] | None = None  # options of checkpoint_activations()
    compiled: str = ""  # "blocks" or "model"
    backwards: int = 1
    clip: float | None = None
    uneven: bool = False  # whether the last batch is smaller on some ranks
    spoilt: bool = False  # whether one rank's gradient is changed on purpose


Result = tuple[list[float], list[float], Tensors]  # losses, gradient norms, weights


def tokens_of(step: int, micro: int, rank: int, uneven: bool) -> torch.Tensor:
    """Return one rank's rows of a micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    rows = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    is_last = step == STEPS - 1
    return (rows[: 1 + rank % ROWS] if uneven and is_last else rows).to(ranks.device())


def make_mesh(case: Case) -> DeviceMesh | None:
    """Return the mesh of a case."""
    names, sizes = [name for name, _ in case.mesh], tuple(size for _, size in case.mesh)
    return init_device_mesh(ranks.device().type, sizes, mesh_dim_names=tuple(names)) if names else None


def make_model(case: Case) -> nn.Module:
    """Return the model of a case, the same on all ranks."""
    torch.manual_seed(0)
    return MODELS[case.model]().to(ranks.device())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with an epsilon above the rounding errors of gradients, which it would scale up to a full step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, eps=1e-3)


def loop(rank: int, case: Case, model: Any, optimizer: Any, is_ddp: bool) -> tuple[list[float], list[float]]:
    """Train; return losses and gradient norms."""
    losses, norms = [], []
    data_rank = rank // dict(case.mesh).get("tensor", 1)  # ranks of one tensor axis have the same data
    for step in range(STEPS):
        for micro in range(case.backwards):
            tokens = tokens_of(step, micro, data_rank, case.uneven)
            is_last = micro == case.backwards - 1
            with nullcontext() if is_last or not is_ddp else model.no_sync():
                loss = model(tokens, tokens) / case.backwards
                (loss if is_ddp else optimizer.scale(loss)).backward()
            losses.append(loss.item())
        if is_ddp:
            limit = case.clip if case.clip is not None else float("inf")
            norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], limit)
            norms.append(norm.item())
        else:
            norms.append(optimizer.clip_grad_norm_(case.clip if case.clip is not None else float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def train_ddp(rank: int, case: Case) -> Result:
    """Train with DDP."""
    model = make_model(case)
    wrapped = DistributedDataParallel(model, find_unused_parameters=case.model == "experts")
    losses, norms = loop(rank, case, wrapped, adamw(model), is_ddp=True)
    return losses, norms, {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def shard_model(case: Case) -> tuple[Any, Any]:
    """Return the model of a case, sharded, checkpointed and compiled, and its optimizer."""
    model = make_model(case)
    if case.compiled == "blocks":
        for index, block in enumerate(model.blocks):  # type: ignore[arg-type]
            model.blocks[index] = torch.compile(block)  # type: ignore[index]
    model, optimizer = zeroshard.shard(model, adamw(model), mesh=make_mesh(case), timeout=60, **case.options)
    if case.checkpointed is not None:
        zeroshard.checkpoint_activations(model, **case.checkpointed)
    return torch.compile(model) if case.compiled == "model" else model, optimizer


def full_weights(model: nn.Module) -> Tensors:
    """Return the full weights in their original names, from the masters."""
    names = [name for name, _ in model.named_parameters()]
    values = {name: zeroshard.full_parameter(model, name).cpu() for name in names}
    return {name.replace("_orig_mod.", ""): value for name, value in values.items()}


def train_sharded(rank: int, case: Case) -> Result:
    """Train with zeroshard."""
    model, optimizer = shard_model(case)
    if case.spoilt and rank == 1:
        model.head.weight.register_hook(lambda grad: 1.01 * grad)
    losses, norms = loop(rank, case, model, optimizer, is_ddp=False)
    return losses, norms, full_weights(getattr(model, "_orig_mod", model))


_ddp_results: dict[Any, list[Result]] = {}


def ddp_results(world: int, case: Case) -> list[Result]:
    """Return DDP's results; the same for all cases that train the same model on the same data."""
    tensor = dict(case.mesh).get("tensor", 1)
    plain = Case(case.model, backwards=case.backwards, clip=case.clip, uneven=case.uneven)
    key = (world // tensor, case.model, case.backwards, case.clip, case.uneven)
    if key not in _ddp_results:
        _ddp_results[key] = run(world // tensor, train_ddp, plain)
    return _ddp_results[key]


def compare(world: int, case: Case, relative: float = 2e-5) -> list[Result]:
    """Train both ways and compare losses, norms and weights; return zeroshard's results."""
    expected, found = ddp_results(world, case), run(world, train_sharded, case)
    tensor = dict(case.mesh).get("tensor", 1)
    for rank, (losses, norms, weights) in enumerate(found):
        ddp_losses, ddp_norms, ddp_weights = expected[rank // tensor]
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(ddp_losses), rtol=relative, atol=relative)
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(ddp_norms), rtol=5 * relative, atol=relative)
        assert_close(weights, ddp_weights, relative)
    return found


@pytest.mark.guarantee("NCCL")
@pytest.mark.parametrize("world", WORLDS)
@every_stage
def test_fp32_equals_ddp(stage: int, world: int) -> None:
    compare(world, Case(options={"stage": stage}))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_training_is_close_to_ddp_and_the_same_bits_in_stages_1_to_3(precision: str, world: int) -> None:
    options = {"precision": precision, "loss_scale": 1024.0}
    found = {stage: compare(world, Case(options={"stage": stage, **options}), 2e-2) for stage in (0, 1, 2, 3)}
    for stage in (2, 3):
        for (losses, norms, weights), (first_losses, first_norms, first_weights) in zip(
            found[stage], found[1], strict=True
        ):
            assert (losses, norms) == (first_losses, first_norms)
            assert_equal(weights, first_weights)


@pytest.mark.parametrize("world", WORLDS)
@every_stage
def test_accumulation_clipping_and_an_uneven_last_batch_equal_ddp(stage: int, world: int) -> None:
    compare(world, Case(options={"stage": stage}, backwards=3, clip=0.5, uneven=True))


MESHES = {
    "hybrid": (("replicate", 2), ("shard", 2)),
    "tensor": (("shard", 2), ("tensor", 2)),
}


@pytest.mark.parametrize(
    ("mesh", "checkpointed"),
    [("hybrid", None), ("tensor", None), ("tensor", {}), ("tensor", {"offload": True})],
    ids=["hybrid", "tensor", "P_a", "P_a+cpu"],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_meshes_and_partitioned_activations_equal_ddp(stage: int, mesh: str, checkpointed: Any) -> None:
    compare(4, Case(options={"stage": stage}, mesh=MESHES[mesh], checkpointed=checkpointed, clip=0.5))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "partition"), [(1, "full"), (2, "full"), (3, "full"), (3, "hierarchical")])
def test_partitions_over_both_axes_of_a_mesh_equal_ddp(stage: int, partition: str, precision: str) -> None:
    options = {"stage": stage, "partition": partition, "precision": precision}
    compare(4, Case(options=options, mesh=MESHES["hybrid"], clip=0.5), 2e-5 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("more", [{}, {"offload": "host"}, {"backwards": 3}, {"reduce_wire": "int8"}], ids=str)
@pytest.mark.parametrize(
    ("stage", "partition"), [(2, "inner-gradients"), (3, "inner-gradients"), (3, "hierarchical-gradients")]
)
def test_gradients_over_the_inner_axis_equal_ddp(
    stage: int, partition: str, more: dict[str, Any], backwards: int
) -> None:
    options = {"stage": stage, "partition": partition, "precision": "bf16", **more}
    compare(4, Case(options=options, mesh=MESHES["hybrid"], backwards=backwards, clip=0.5), 2e-2)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_offloaded_states_equal_ddp(tier: str, stage: int, world: int, tmp_path: Path) -> None:
    offload: dict[str, Any] = {"optimizer": tier}
    if tier == "disk":
        offload["directory"] = str(tmp_path)
    if stage == 3:
        offload["parameters"] = tier
    compare(world, Case(options={"stage": stage, "offload": offload}, backwards=2, clip=0.5))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("offload", [False, True])
def test_recomputation_equals_ddp(offload: bool, world: int) -> None:
    compare(world, Case(checkpointed={"offload": offload}))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("model", ["lora", "experts", "tied"])
def test_other_models_equal_ddp(model: str, stage: int, world: int) -> None:
    compare(world, Case(model, options={"stage": stage}))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("compiled", ["blocks", "model"])
def test_compiled_models_equal_ddp(compiled: str, stage: int) -> None:
    compare(2, Case(options={"stage": stage}, compiled=compiled), 1e-4)


def other_buffers(rank: int) -> str:
    if rank == 1:
        os.environ["NCCL_BUFFSIZE"] = "1048576"  # the harness restores it
    try:
        shard_model(Case())
    except zeroshard.RanksDisagreeError as error:
        return str(error)
    return "no error"


@pytest.mark.skipif(ON_GLOO, reason="gloo does not read NCCL's variables")
def test_different_nccl_settings_are_an_error_on_every_rank() -> None:
    for text in run(2, other_buffers):
        assert "NCCL_BUFFSIZE is 1048576 here and" in text


@pytest.mark.guarantee("NCCL")
@pytest.mark.parametrize("stage", [0, 3])
def test_a_spoilt_gradient_on_one_rank_is_found(stage: int) -> None:
    with pytest.raises(AssertionError, match="not close"):
        compare(2, Case(options={"stage": stage}, spoilt=True))


def save_run(rank: int, case: Case, path: str, wait: bool) -> Result:
    """Train, save, and train on."""
    model, optimizer = shard_model(case)
    loop(rank, case, model, optimizer, is_ddp=False)
    save = zeroshard.save(path, model, optimizer, wait=wait)
    losses, norms = loop(rank, case, model, optimizer, is_ddp=False)
    save.wait()
    return losses, norms, full_weights(model)


def load_run(rank: int, case: Case, path: str) -> Result:
    """Load, and train on."""
    model, optimizer = shard_model(case)
    zeroshard.load(path, model, optimizer)
    losses, norms = loop(rank, case, model, optimizer, is_ddp=False)
    return losses, norms, full_weights(model)


@pytest.mark.parametrize("wait", [True, False], ids=["at once", "in the background"])
@pytest.mark.parametrize(
    ("saved", "saved_world", "loaded", "loaded_world"),
    [
        (Case(options={"stage": 3}), 2, Case(options={"stage": 1}), 2),
        (Case(options={"stage": 1}), 2, Case(options={"stage": 3}, mesh=MESHES["tensor"]), 4),
        (Case(options={"stage": 2}, mesh=MESHES["hybrid"]), 4, Case(options={"stage": 3, "offload": "host"}), 2),
    ],
)
def test_a_checkpoint_loads_in_another_stage_world_and_mesh(
    saved: Case, saved_world: int, loaded: Case, loaded_world: int, wait: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    went_on = run(saved_world, save_run, saved, path, wait)
    found = run(loaded_world, load_run, loaded, path)
    data = saved_world // dict(saved.mesh).get("tensor", 1), loaded_world // dict(loaded.mesh).get("tensor", 1)
    if data[0] == data[1]:  # the same global batches
        assert_close(found[0][2], went_on[0][2], 2e-5)
        torch.testing.assert_close(torch.tensor(found[0][0]), torch.tensor(went_on[0][0]), rtol=2e-5, atol=2e-5)
    plain = run(loaded_world, load_run, replace(loaded, options={"stage": 0}, mesh=()), path)
    if not loaded.mesh or "tensor" not in dict(loaded.mesh):
        assert_close(found[0][2], plain[0][2], 2e-5)


def generate(rank: int, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate from this rank's prompt, plain and sharded. With replicated parameters, lengths differ by rank."""
    prompt = tokens_of(0, 0, rank, False)[:1, :4]
    length = 6 + (0 if case.options["stage"] == 3 else 2 * rank)
    plain = make_model(case)
    expected = plain.generate(prompt, length)  # type: ignore[operator]
    model, _ = shard_model(case)
    return model.generate(prompt, length).cpu(), expected.cpu()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_rank_generates_as_the_plain_model(stage: int) -> None:
    for ours, plain in run(2, generate, Case(options={"stage": stage})):
        assert torch.equal(ours, plain)
