"""Models built on the meta device come to life unit by unit, in their partitions."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from live import allocated_bytes, live_beyond, live_bytes_at_start
from pairs import at_stages, every_stage
from plain import (
    adamw,
    assert_close,
    assert_equal,
    copied,
    copied_buffers,
    full_parameters,
    momentum,
    sharded,
    train_steps,
)
from ranks import run_processes, run_threads, seeded
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from zoo import built

import zeroshard
from zeroshard.models.gpt import GPT, GPTConfig

STAGES = [0, 1, 2, 3]
SMALL = GPTConfig(vocab_size=50, context=8, layers=3, heads=2, width=16)
LARGE = GPTConfig(vocab_size=2000, context=64, layers=6, heads=4, width=128)  # 1.7 M parameters
UNIT = (LARGE.vocab_size + LARGE.context) * LARGE.width + 2 * LARGE.width  # the largest
ALIGNMENT = 0.005


def on_meta(make, *args):
    with torch.device("meta"):
        return make(*args)


def gpt_batches(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(50, (4, 8), generator=generator) for _ in range(steps)]


def gpt_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, tokens)


# --------------------------------------------------------------------------------------------- it is a model


@pytest.mark.parametrize("tied", [False, True])
@every_stage
def test_a_model_from_meta_trains_like_the_plain_model_of_the_same_values(stage: int, tied: bool) -> None:
    config = GPTConfig(vocab_size=50, context=8, layers=3, heads=2, width=16, tied=tied)
    data = gpt_batches(3)

    def body(rank: int):
        model, optimizer = sharded(on_meta(GPT, config), momentum, stage=stage)
        assert not any(p.is_meta for p in model.parameters())
        assert (model.head.weight is model.tokens.weight) == tied
        first = full_parameters(model)
        train_steps(model, optimizer, [tokens.chunk(2)[rank] for tokens in data], gpt_loss)
        return first, full_parameters(model)

    for first, last in run_threads(2, body):
        plain = GPT(config)
        state = dict(plain.named_parameters())
        with torch.no_grad():
            for name, value in first.items():
                state[name].copy_(value)
        train_steps(plain, momentum(plain), data, gpt_loss)
        assert_close(last, copied(plain))


def test_values_come_from_the_modules_own_reset_parameters() -> None:
    def body(rank: int):
        model, _ = zeroshard.shard(on_meta(GPT, LARGE), stage=3)
        return full_parameters(model)

    for values in run_threads(2, body):
        assert values["blocks.0.attention_norm.weight"].eq(1).all()
        assert values["blocks.2.mlp.up.bias"].eq(0).all()
        assert values["tokens.weight"].std().item() == pytest.approx(0.02, rel=0.05)
        residual = 0.02 / (2 * LARGE.layers) ** 0.5
        assert values["blocks.1.mlp.down.weight"].std().item() == pytest.approx(residual, rel=0.05)


@pytest.mark.parametrize("precision", [None, "bf16"])
@every_stage
def test_ranks_that_draw_differently_all_get_rank_0_s_values(stage: int, precision: str | None) -> None:
    def body(rank: int):
        def init(module: nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                nn.init.constant_(parameter, rank + 1.25)

        model, _ = sharded(on_meta(GPT, SMALL), adamw, stage=stage, precision=precision, init_fn=init)
        whole = full_parameters(model)
        return whole, {n: p.detach() for n, p in zeroshard.unwrap(model).named_parameters()}

    for whole, plain in run_threads(3, body):
        for value in (*whole.values(), *plain.values()):
            assert value.eq(1.25).all()


def values_of_differently_seeded_ranks(rank: int):
    torch.manual_seed(rank)
    model, _ = zeroshard.shard(on_meta(GPT, SMALL), stage=3)
    return full_parameters(model)


def test_differently_seeded_processes_end_with_one_model() -> None:
    first, second = run_processes(2, values_of_differently_seeded_ranks)
    assert_equal(second, first)


def test_differently_seeded_real_models_end_with_rank_0_s_values() -> None:
    def body(rank: int):
        model, _ = sharded(built(lambda: GPT(SMALL), seed=rank), stage=3)
        return full_parameters(model)

    with seeded(0):
        wanted = dict(GPT(SMALL).named_parameters())
    for values in run_threads(2, body):
        assert_equal(values, wanted)


def test_real_modules_keep_their_values_next_to_modules_from_meta() -> None:
    real = nn.Linear(4, 4)

    def body(rank: int):
        model, _ = sharded(nn.Sequential(copy.deepcopy(real), on_meta(nn.Linear, 4, 4)), stage=3)
        return full_parameters(model)

    for values in run_threads(2, body):
        assert torch.equal(values["0.weight"], real.weight)
        assert values["1.weight"].abs().max() <= 0.5  # drawn within 1/√4, not left as it was found


# --------------------------------------------------------------------------------------------- buffers, init_fn


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.plain_norm = nn.BatchNorm1d(2, affine=False)  # buffers and no parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain_norm(self.layers(x))


@pytest.mark.parametrize("precision", [None, "bf16"])
@every_stage
def test_batch_norm_buffers_are_initialised_and_used(stage: int, precision: str | None) -> None:
    def body(rank: int):
        model, optimizer = sharded(on_meta(Normed), adamw, stage=stage, precision=precision)
        before = copied_buffers(model)
        model(torch.ones(3, 6) * torch.arange(3)[:, None]).float().square().sum().backward()
        optimizer.step()
        return before, copied_buffers(model)

    for before, after in run_threads(2, body):
        assert_equal(before, dict(Normed().named_buffers()))
        assert after["layers.1.num_batches_tracked"] == 1
        assert after["layers.1.running_var"].isfinite().all()
        assert not torch.equal(after["layers.1.running_mean"], before["layers.1.running_mean"])


class Bare(nn.Module):
    """Owns a parameter and cannot initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Table(nn.Module):
    """Owns a buffer, no parameter, and cannot initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.ones(4))


@pytest.mark.parametrize("kind", [Bare, Table])
def test_a_module_that_cannot_initialise_itself_is_an_error_naming_it(kind: type[nn.Module]) -> None:
    def body(rank: int):
        model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), kind())))
        with pytest.raises(ValueError) as caught:
            zeroshard.shard(model, stage=3)
        return str(caught.value)

    for text in run_threads(2, body):
        assert "'1.1'" in text
        assert kind.__name__ in text
        assert "init_fn" in text


def test_init_fn_serves_a_module_without_reset_parameters() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, Bare):
            nn.init.constant_(module.scale, 3.0)
        elif isinstance(module, Table):
            module.frequencies.fill_(2.0)
        else:
            module.reset_parameters()

    def body(rank: int):
        model, _ = sharded(on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Bare(), Table())), stage=3, init_fn=init)
        return full_parameters(model), model[2].frequencies.clone()

    for values, frequencies in run_threads(2, body):
        assert values["1.scale"].eq(3).all()
        assert frequencies.eq(2).all()
        assert values["0.weight"].abs().max() <= 0.5


@pytest.mark.parametrize("initialised", ["once", "not at all"])
def test_init_fn_is_called_once_for_each_module_from_meta_and_never_for_a_real_one(initialised: str) -> None:
    calls: list[str] = []

    def init(module: nn.Module) -> None:
        calls.append(type(module).__name__)
        module.reset_parameters()

    model = GPT(SMALL) if initialised == "not at all" else on_meta(GPT, SMALL)
    zeroshard.shard(model, init_fn=init)
    owners = [type(m).__name__ for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    assert sorted(calls) == ([] if initialised == "not at all" else sorted(owners))


class TiedWithBias(nn.Module):
    """The head owns a bias and borrows the embedding's weight, which is in another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(32, 40)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_borrowed_weight_with_an_own_bias_works_or_is_an_error_naming_the_module() -> None:
    def body(rank: int):
        model = on_meta(TiedWithBias)
        try:
            model, _ = zeroshard.shard(model, stage=3)
        except ValueError as error:
            return str(error)
        values = full_parameters(model)
        assert values["embedding.weight"].isfinite().all()
        assert values["head.bias"].abs().max() <= 1
        return "'head' works"

    for text in run_threads(2, body):
        assert "'head'" in text


# --------------------------------------------------------------------------------------------------- memory


def held(stage: int, ranks: int, precision: str | None) -> float:
    """Bytes of what a rank keeps of the parameters before the first step."""
    computed, master = (2, 4) if precision == "bf16" else (4, 0)
    computed = (0 if master else computed / ranks) if stage == 3 else computed
    master = master / ranks if stage > 0 else master
    return (computed + master) * LARGE.parameters


def allocations_of_shard(rank: int, stage: int, world: int, precision: str | None):
    """One rank of ``world`` over the fake backend, which allocates nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    kept = []

    def build() -> None:
        model = on_meta(GPT, LARGE)
        kept.extend(zeroshard.shard(model, adamw(model), stage=stage, precision=precision))

    most, left = allocated_bytes(build)
    return zeroshard.report(kept[0]).total.peak, most, left


@functools.cache
def allocations(stage: int, world: int, precision: str | None):
    (found,) = run_processes(1, allocations_of_shard, stage, world, precision, fresh=True)
    return found


@pytest.mark.guarantee("Meta device")
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 4), (2, 4), (3, 2), (3, 4)])
def test_a_rank_never_allocates_more_than_its_shards_and_one_unit(
    stage: int, world: int, precision: str | None
) -> None:
    ledger, most, left = allocations(stage, world, precision)
    kept = held(stage, world, precision)
    assert kept <= left < kept * (1 + ALIGNMENT) + 2**14
    for peak in (ledger, most):
        assert kept < peak <= (kept + 4 * UNIT) * (1 + ALIGNMENT) + 2**14


def excess_while_initialising(rank: int, by: str):
    """Bytes of Python tensors beyond the shards and one unit, inside modules' initialisation."""
    limit = live_bytes_at_start() + int((held(3, 2, None) + 4 * UNIT) * (1 + ALIGNMENT)) + 2**14
    seen: list[int] = []

    def init(module: nn.Module) -> None:
        module.reset_parameters()
        if isinstance(module, (nn.LayerNorm, nn.Embedding)):
            seen.append(live_beyond(limit))

    class Counted(nn.LayerNorm):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            if not self.weight.is_meta:
                seen.append(live_beyond(limit))

    model = on_meta(GPT, LARGE)
    if by == "reset_parameters":
        for block in model.blocks:
            block.mlp_norm = on_meta(Counted, LARGE.width)
    zeroshard.shard(model, adamw(model), stage=3, init_fn=init if by == "init_fn" else None)
    return seen


@pytest.mark.parametrize("by", ["init_fn", "reset_parameters"])
def test_live_tensors_inside_initialisation_are_the_shards_and_one_unit(by: str) -> None:
    for seen in run_processes(2, excess_while_initialising, by, fresh=True):
        assert len(seen) >= LARGE.layers
        assert set(seen) == {0}


# ------------------------------------------------------------------------------------------- what is refused


def small() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)) for _ in range(2)])


def with_part(part) -> nn.Module:
    """A model one of whose blocks is something else."""
    model = small()
    model[1] = part(model[1])
    return model


def with_attribute(made) -> nn.Module:
    model = small()
    model[1].kept = made(model[0][0].weight)
    return model


def two_over_one_memory() -> nn.Module:
    model = small()
    model[1][0].weight = nn.Parameter(model[0][0].weight.data)
    return model


def stepped_in_backward() -> nn.Module:
    model = small()
    model[0][2].weight.register_post_accumulate_grad_hook(lambda p: None)
    return model


def traced(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        return torch.jit.trace(module, torch.zeros(4, 6))


def scripted(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


REFUSED = {
    "traced": (lambda: with_part(traced), "module '1' is a ScriptModule"),
    "scripted": (lambda: with_part(scripted), "module '1' is a ScriptModule"),
    "data parallel": (lambda: with_part(nn.DataParallel), "module '1' is wrapped by DataParallel"),
    "sharded": (lambda: with_part(lambda m: zeroshard.shard(m)[0]), "module '1' is sharded already"),
    "sharded model": (lambda: zeroshard.shard(small())[0], "the model is sharded already"),
    "hook": (stepped_in_backward, r"'0\.2\.weight' has a post-accumulate-grad hook"),
    "view": (lambda: with_attribute(lambda w: w.data[1:3]), r"'1\.kept' views the memory of parameter '0\.0\.weight'"),
    "view in a list": (lambda: with_attribute(lambda w: [w.t()]), r"'1\.kept' views the memory"),
    "one memory": (two_over_one_memory, r"'0\.0\.weight' and '1\.0\.weight' are two parameters over one memory"),
}


@pytest.mark.guarantee("Other wrappers")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_right_afterwards_is_refused_by_name(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        zeroshard.shard(make())


def test_attributes_that_are_no_views_are_not_refused() -> None:
    zeroshard.shard(with_attribute(lambda w: [w, w.detach().clone()]))
    zeroshard.shard(with_part(lambda m: nn.Sequential(nn.utils.spectral_norm(m[0]), nn.LSTM(9, 6))))


@every_stage
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_renormalise_are_refused_unless_one_rank_updates_the_very_weight(kind, stage: int) -> None:
    def body(rank: int):
        with pytest.raises(ValueError, match=r"'0' \(Embedding(Bag)?\) has max_norm=0\.5"):
            zeroshard.shard(nn.Sequential(kind(5, 4, max_norm=0.5)), stage=stage)

    run_threads(2, body)
    for options in ({"precision": "bf16"}, {"offload": "host"}):
        with pytest.raises(ValueError, match="max_norm"):
            zeroshard.shard(nn.Sequential(kind(5, 4, max_norm=0.5)), stage=stage, **options)
    model, _ = zeroshard.shard(nn.Sequential(kind(5, 4, max_norm=0.5)), stage=stage)
    model(torch.arange(5)[None]).sum().backward()
    assert zeroshard.full_parameter(model, "0.weight").norm(dim=1).max() <= 0.5 + 1e-6


def refused_wrappers(rank: int, stage: int) -> list[str]:
    """What is said about other wrappers inside the model, around it, and around a model that holds it."""

    class Holding(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.last = inner, nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.inner(x))

    mesh = init_device_mesh("cpu", (2,))
    inside = [DistributedDataParallel, lambda m: fully_shard(m, mesh=mesh)]
    inside += [lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu"))]
    around = [DistributedDataParallel, lambda m: DistributedDataParallel(Holding(m)), replicate, *inside[1:]]
    said = []
    for wrap in inside:
        with pytest.raises(ValueError) as refused:
            zeroshard.shard(nn.Sequential(small(), wrap(small())), stage=stage)
        said.append(str(refused.value))
    for wrap in around:
        model, _ = zeroshard.shard(small(), stage=stage)
        with pytest.raises(RuntimeError) as caught:
            wrap(model)(torch.ones(2, 6))
        said.append(str(caught.value))
    return said


@pytest.mark.guarantee("Other wrappers")
@at_stages(0, 3)
def test_other_wrappers_inside_and_around_are_refused(stage: int) -> None:
    for said in run_processes(2, refused_wrappers, stage):
        names = ["DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"]
        assert all(f"module '1' is wrapped by {name}" in text for name, text in zip(names, said, strict=False))
        assert "DistributedDataParallel would reduce the gradients" in said[3]
        assert ("would reduce the gradients" if stage == 0 else "partitioned over the ranks") in said[4]
        assert "replicate() would reduce the gradients" in said[5]
        assert all(("another nn.Parameter" if stage == 0 else "partitioned over the ranks") in t for t in said[6:])


@pytest.mark.guarantee("Missing process group")
@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_rank_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """Started by torchrun, srun or mpirun, every rank would train a model of its own."""
    monkeypatch.setenv(variable, "2")
    text = rf"one of 2 ranks \({variable}\).* call torch\.distributed\.init_process_group\(\) before"
    with pytest.raises(RuntimeError, match=text):
        zeroshard.shard(nn.Linear(2, 2))
    monkeypatch.setenv(variable, "1")
    model, _ = zeroshard.shard(nn.Linear(2, 2))
    assert zeroshard.report(model).ranks == 1


def train_with_a_default_device(rank: int, offload: str | None, directory: str) -> None:
    model, optimizer = sharded(built(lambda: GPT(SMALL)), adamw, precision="fp16", offload=offload)
    with torch.device("meta"):  # stands for a GPU: where a host tensor is meant, any other device fails
        optimizer.scale(model(*(2 * [torch.zeros(2, 8, dtype=torch.int64, device="cpu")]))).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        zeroshard.save(f"{directory}/saved", model, optimizer)
        zeroshard.load(f"{directory}/saved", model, optimizer)
        assert zeroshard.full_parameter(model, "head.weight").device.type == "cpu"


@pytest.mark.parametrize("offload", [None, "host"])
def test_a_default_device_of_the_user_changes_nothing(offload, tmp_path) -> None:
    run_threads(2, train_with_a_default_device, offload, str(tmp_path))


# ---------------------------------------------------------------------------- memory of parameters held elsewhere

HOLDERS: dict[str, Callable[[nn.Module], object]] = {
    "state_dict": lambda model: model.state_dict(),
    "data": lambda model: [p.data for p in model.parameters()],
    "view": lambda model: {"rows": next(model.parameters()).detach()[:1]},
    "graph": lambda model: model(torch.ones(1, 6)).sum(),
    "numpy": lambda model: next(model.parameters()).detach().numpy(),
    "closure": lambda model: functools.partial(torch.clamp_, next(model.parameters()).data.view(-1)),
}


@pytest.mark.guarantee("Parameters' memory used elsewhere")
@at_stages(1, 3)
@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_of_parameters_that_is_also_used_elsewhere_is_told(holder: str, stage: int) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    held = HOLDERS[holder](model)
    with pytest.warns(UserWarning, match=r"memory of '[01]\.weight' is also used elsewhere"):
        zeroshard.shard(model, stage=stage)
    assert held is not None


def test_other_models_are_sharded_without_a_word() -> None:
    """After a step, tied, recurrent, parametrized, loaded and on the meta device."""
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    tied[2].weight = tied[0].weight
    tied(torch.ones(2, 6)).square().sum().backward()
    trained = torch.optim.Adam(tied.parameters())
    trained.step()
    loaded, parametrized = nn.Linear(6, 6), nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    loaded.load_state_dict({name: value.clone() for name, value in loaded.state_dict().items()}, assign=True)
    one = torch.zeros(42)
    together = nn.Linear(6, 6)
    together.weight = nn.Parameter(one[:36].view(6, 6))
    together.bias = nn.Parameter(one[36:])
    models = [tied, nn.LSTM(6, 6, 2), loaded, parametrized, together, nn.TransformerEncoderLayer(6, 2)]
    with warnings.catch_warnings(action="error"):
        for model in models:
            zeroshard.shard(model, trained if model is tied else None, stage=3)
        with torch.device("meta"):
            meta = nn.Linear(6, 6)
        zeroshard.shard(meta, stage=3)
