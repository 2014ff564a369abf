"""ZeroAccelerator: the numbers of Accelerate's own DDP run, checkpoints on any number of ranks, and clear errors."""

from __future__ import annotations

import inspect
import itertools
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    ProjectConfiguration,
)
from accelerate_state import as_launched, forget
from hugging_face import llama
from plain import Tensors, mesh_of, sgd
from ranks import run_processes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zeroshard
from zeroshard.integrations import accelerate as integration
from zeroshard.integrations.accelerate import ZeroAccelerator, ZeroOptimizer

STAGES = (0, 1, 3)


@pytest.fixture(autouse=True)
def no_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    forget()
    yield
    forget()


def make(zero: dict[str, Any] | None, **kwargs: Any) -> Accelerator:
    """Return a ZeroAccelerator, or without `zero` Accelerate's own, which wraps models in DDP."""
    forget()
    return Accelerator(**kwargs) if zero is None else ZeroAccelerator(zero=zero, **kwargs)


def net(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(16, 4))


def data(size: int, batch: int, seed: int = 0) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(seed)
    samples = torch.randn(size, 16, generator=draw), torch.randint(4, (size,), generator=draw)
    return DataLoader(TensorDataset(*samples), batch_size=batch)


def weights(accelerator: Accelerator, model: nn.Module) -> Tensors:
    """Return all weights, on rank 0."""
    state = accelerator.get_state_dict(model)
    return {name: value.clone() for name, value in state.items()} if accelerator.is_main_process else {}


def assert_close(got: Any, expected: Any, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------ against DDP


def finetune(zero: dict[str, Any] | None, **kwargs: Any) -> dict[str, Any]:
    """Train for two epochs with accumulation, clipping and a schedule, and evaluate after each."""
    accelerator = make(zero, gradient_accumulation_steps=2, **kwargs)
    assert accelerator.num_processes == 2
    model = net(seed=accelerator.process_index)  # as with DDP, rank 0's values count
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    loader, held_out = data(37, 4), data(11, 4, seed=1)  # a short last batch, which also ends an accumulation early
    model, optimizer, loader, held_out, schedule = accelerator.prepare(model, optimizer, loader, held_out, schedule)
    losses, norms, rates, logits = [], [], [], []
    for _ in range(2):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            rates.append(schedule.get_last_lr()[0])
        model.eval()
        for x, y in held_out:
            with torch.no_grad():
                logits.append(torch.cat(accelerator.gather_for_metrics((model(x), y.float()[:, None])), dim=1))
    return {
        "losses": torch.stack(losses),
        "norms": torch.stack(norms),
        "rates": torch.tensor(rates),
        "logits": torch.cat(logits),
        "weights": weights(accelerator, model),
        "states": optimizer.state_dict()["state"],  # whole, on all ranks
    }


def adversaries(zero: dict[str, Any] | None) -> dict[str, Any]:
    """Train two models against each other, each with its optimizer and schedule; clip one alone, and both together."""
    accelerator = make(zero)
    torch.manual_seed(2)
    maker, judge = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (maker, judge)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
    prepared = accelerator.prepare(maker, judge, *optimizers, *schedules, data(32, 4))
    maker, judge, make_step, judge_step, *schedules, loader = prepared
    norms = []
    for x, _ in loader:
        accelerator.backward(judge(maker(x)).mean() - judge(x).square().mean())
        norms.append(accelerator.clip_grad_norm_(judge.parameters(), 0.1))
        judge_step.step()
        judge_step.zero_grad()
        make_step.zero_grad()  # its gradients are of the judge's loss
        accelerator.backward(-judge(maker(x)).mean())
        norms.append(accelerator.clip_grad_norm_(itertools.chain(maker.parameters(), judge.parameters()), 0.2))
        accelerator.clip_grad_value_(maker.parameters(), 1e-3)
        make_step.step()
        judge_step.step()
        make_step.zero_grad()
        judge_step.zero_grad()
        for schedule in schedules:
            schedule.step()
    rates = torch.tensor([schedule.get_last_lr()[0] for schedule in schedules])
    return {"norms": torch.stack(norms), "rates": rates, "weights": [weights(accelerator, m) for m in (maker, judge)]}


def lora(zero: dict[str, Any] | None) -> dict[str, Any]:
    """Train adapters on a frozen Llama; the optimizer is made after the model was prepared."""
    import peft

    accelerator = make(zero)
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = peft.get_peft_model(llama(32, layers=2), config)
    model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(torch.arange(24 * 8).view(24, 8) % 31, batch_size=4))
    losses, norms = [], []
    for tokens in loader:
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    result = {"losses": torch.stack(losses), "norms": torch.stack(norms), "weights": weights(accelerator, model)}
    plain, more = accelerator.unwrap_model(model).eval(), 2 + 3 * accelerator.process_index  # uneven lengths
    return {**result, "said": plain.generate(input_ids=tokens[:1], max_new_tokens=more, do_sample=False)}


def held_in_no_sync() -> int:
    """Return the bytes of gradients that a rank holds after a backward in `no_sync`, in stage 3."""
    accelerator, model = make({"stage": 3}), nn.Linear(128, 128, bias=False)
    accelerator.prepare(model, sgd(model))
    with accelerator.no_sync(model):
        accelerator.backward(model(torch.ones(2, 128)).sum())
    return sum(held.now for (kind, _), held in zeroshard.report(model).memory.items() if kind == "gradients")


def compare(rank: int) -> Any:
    """Run everything with DDP and in each stage."""
    with as_launched(rank, 2):
        found = {
            run.__name__: [run(zero) for zero in (None, *({"stage": stage} for stage in STAGES))]
            for run in (finetune, adversaries, lora)
        }
        mixed = [finetune(zero, mixed_precision="bf16") for zero in (None, {"stage": 3}, {"stage": 1})]
        return found, mixed, held_in_no_sync()


@pytest.mark.guarantee("Accelerate")
def test_every_stage_trains_as_accelerates_own_ddp() -> None:
    (found, mixed, held), _ = run_processes(2, compare)
    for reference, *others in found.values():
        for result in others:
            assert_close(result, reference)
    assert found["finetune"][0]["logits"].shape == (22, 5)  # no sample twice
    assert len(found["finetune"][0]["norms"]) == 6  # 5 batches an epoch: 2 + 2 + 1
    assert held == 4 * 128 * 128 / 2  # a rank's half
    reference, *others = mixed
    for result in others:
        assert_close(result["losses"], reference["losses"], 5e-3)
        assert_close(result["norms"], reference["norms"], 5e-2)
        assert result["logits"].dtype == torch.float32
        assert {value.dtype for value in result["weights"].values()} == {torch.float32}


# ------------------------------------------------------------------------------------------------ checkpoints


class Count:
    """Something of the user's that is registered for checkpoints."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Run:
    """A training run whose global batches are the same on 1, 2 and 3 ranks: Accelerate splits each of 12 samples."""

    def __init__(self, zero: dict[str, Any] | None, project: Path) -> None:
        self.accelerator = make(
            zero,
            gradient_accumulation_steps=2,
            dataloader_config=DataLoaderConfiguration(split_batches=True),
            project_config=ProjectConfiguration(str(project), automatic_checkpoint_naming=True, total_limit=2),
        )
        model, self.frozen = net(), net(seed=7).requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        prepared = self.accelerator.prepare(model, optimizer, schedule, data(12 * 7, 12))
        self.model, self.optimizer, self.schedule, self.loader = prepared
        if zero is not None:  # DDP has nothing to wrap
            self.frozen = self.accelerator.prepare(self.frozen)
        self.count = Count()
        self.accelerator.register_for_checkpointing(self.count)

    def train(self, batches: Any, saves: tuple[int, ...] = ()) -> list[float]:
        """Train on all batches, and save after some of them."""
        losses = []
        for number, (x, y) in enumerate(batches, 1):
            with self.accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(x) + self.frozen(x), y)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
            self.count.value += 1
            for _ in range(saves.count(number)):
                self.accelerator.save_state()
        return losses

    def result(self, losses: list[float]) -> dict[str, Any]:
        return {"losses": losses, "count": self.count.value, "weights": weights(self.accelerator, self.model)}


def first_part(rank: int, zero: dict[str, Any] | None, project: Path) -> dict[str, Any]:
    """Train for two epochs, and save three times in the first one; return what came after."""
    with as_launched(rank, 2):
        run = Run(zero, project)
        calls: list[Any] = []
        run.accelerator.register_save_state_pre_hook(lambda *given: calls.append(given))
        result = run.result([*run.train(run.loader, saves=(2, 4, 4)), *run.train(run.loader)][4:])
        if zero is not None:
            models, states, path = calls[-1]
            assert models == [run.model, run.frozen] and path.endswith("checkpoint_2")
            assert [set(state) for state in states] == ([{*net().state_dict()}] * 2 if rank == 0 else [set()] * 2)
            run.accelerator.register_save_state_pre_hook(lambda _, states, __: states.clear() if rank == 0 else None)
            run.accelerator.project_configuration.automatic_checkpoint_naming = False
            run.accelerator.save_state(project / "cleared")  # one rank's hook decides for all
            assert "model/" not in (project / "cleared" / "zeroshard" / "index.json").read_text()
            assert not (project / "cleared" / "zeroshard_1").exists()
            run.accelerator.save_model(run.model, project / "plain", max_shard_size="2KB")
        return result


def second_part(rank: int, world: int, zero: dict[str, Any], project: Path) -> dict[str, Any]:
    """Load the latest checkpoint, and train the rest of the two epochs."""
    with as_launched(rank, world):
        run = Run(zero, project)
        for model in (run.model, run.frozen):
            with zeroshard.gathered(model, write_rank=0), torch.no_grad():
                next(model.parameters()).zero_()
        run.accelerator.load_state()
        assert run.accelerator.step == 4  # also on a rank that has not saved
        return run.result(run.train(run.accelerator.skip_first_batches(run.loader, 4)) + run.train(run.loader))


@pytest.mark.guarantee("Accelerate")
def test_a_checkpoint_is_resumed_on_any_number_of_ranks_at_any_stage(tmp_path: Path) -> None:
    expected, _ = run_processes(2, first_part, {"stage": 3}, tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    model = net(seed=3)
    assert len(list((tmp_path / "plain").glob("*.safetensors"))) > 1  # as Accelerate splits it
    zeroshard.load(tmp_path / "plain", model)
    assert_close(dict(model.state_dict()), expected["weights"], 0)
    for world, stage in ((1, 3), (3, 3), (2, 1)):
        resumed, *_ = run_processes(world, second_part, world, {"stage": stage}, tmp_path)
        assert_close(resumed, expected, 1e-5)


def test_a_checkpoint_of_accelerates_own_ddp_run_is_continued(tmp_path: Path) -> None:
    expected, _ = run_processes(2, first_part, None, tmp_path)
    resumed, _ = run_processes(2, continue_ddp, tmp_path)
    assert_close(resumed, expected, 1e-5)


def continue_ddp(rank: int, project: Path) -> dict[str, Any]:
    with as_launched(rank, 2):
        run = Run({"stage": 3}, project)
        run.accelerator._models.remove(run.frozen)  # DDP had not prepared it
        run.accelerator.load_state()
        return run.result(run.train(run.accelerator.skip_first_batches(run.loader, 4)) + run.train(run.loader))


# ------------------------------------------------------------------------------------------------ fp16


def alternate(zero: dict[str, Any] | None, skipped: list[bool] | None, **kwargs: Any) -> dict[str, Any]:
    """Train two models in turn; return losses, weights, and which steps were skipped (those given, if any)."""
    accelerator = make(zero, **kwargs)
    models = [net(), net(seed=2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    *prepared, loader = accelerator.prepare(*models, *optimizers, *schedules, data(8 * 10, 4))
    losses, found = [], []
    for x, y in loader:
        for model, optimizer, schedule in zip(prepared[:2], prepared[2:4], prepared[4:], strict=True):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            if skipped is None or not skipped[len(losses)]:
                optimizer.step()
                schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            found.append(optimizer.step_was_skipped)
    rates = [schedule.get_last_lr()[0] for schedule in prepared[4:]]
    return {"losses": losses, "rates": rates, "skipped": found}


def half(rank: int) -> Any:
    with pytest.raises(ValueError, match="Accelerate counts 1 processes, but the process group has 2 ranks"):
        make({"stage": 3})  # Accelerate was not told about the ranks
    with as_launched(rank, 2):
        handlers = [GradScalerKwargs(init_scale=2.0**18)]  # overflows
        found = alternate({"stage": 3}, None, mixed_precision="fp16", kwargs_handlers=handlers)
        return found, alternate(None, found["skipped"])


def test_fp16_skips_the_steps_and_schedules_that_overflow() -> None:
    found, expected = run_processes(2, half)[0]
    skipped = found["skipped"]
    assert skipped[0] and skipped[1] and not any(skipped[-6:])  # each optimizer finds its own overflow
    assert_close(found["losses"], expected["losses"], 5e-3)
    assert found["rates"] == expected["rates"]


# ------------------------------------------------------------------------------------------------ on one rank


def test_an_optimizer_may_be_prepared_after_its_model_without_loss_of_precision() -> None:
    together, apart = net(), net()
    accelerator = make({"stage": 3}, mixed_precision="bf16")
    accelerator.prepare(together, sgd(together))
    accelerator.prepare(apart)
    optimizer = accelerator.prepare(sgd(apart))
    assert isinstance(optimizer, ZeroOptimizer)
    assert_close(accelerator.get_state_dict(apart), accelerator.get_state_dict(together), 0)
    assert_close(accelerator.get_state_dict(apart), dict(net().state_dict()), 0)  # not rounded to bf16
    assert accelerator.prepare(apart, optimizer) == (apart, optimizer)  # prepared twice, sharded once
    assert len(accelerator._models) == len(accelerator._optimizers) == 2


def test_one_process_builds_a_model_of_the_meta_device() -> None:
    accelerator = make({"stage": 3})
    with torch.device("meta"):
        model: nn.Module = nn.Linear(16, 4)
    model, optimizer = accelerator.prepare(model, sgd(model))
    accelerator.backward(model(torch.ones(2, 16)).sum())
    optimizer.step()
    assert accelerator.get_state_dict(model)["weight"].isfinite().all()


def test_a_model_without_an_optimizer_has_no_local_steps() -> None:
    outer = partial(torch.optim.SGD, lr=0.7)
    accelerator: Any = make({"stage": 0, "local_steps": 4, "outer_optimizer": outer})
    model = accelerator.prepare(net())
    assert model(torch.ones(2, 16)).shape == (2, 4)
    optimizer = accelerator.prepare(sgd(model))
    assert optimizer.optimizer.local_steps is not None


def prepare_teacher(rank: int) -> tuple[int, ...]:
    with as_launched(rank, 2):
        mesh = mesh_of((2, 1))
        options = {"local_steps": 2, "reduce_wire": "int8", "error_feedback": True}
        accelerator: Any = make({"stage": 3, "mesh": mesh, **options})
        student, teacher = net(1), net(2)
        *_, teacher = accelerator.prepare(student, sgd(student), teacher)
        return tuple(teacher(torch.ones(2, 16)).shape)


def test_a_model_without_an_optimizer_beside_replicas_that_reduce_in_8_bits() -> None:
    """Without local steps, a mesh of replicas refuses reductions in 8 bits; but it has none."""
    assert run_processes(2, prepare_teacher) == [(2, 4)] * 2


def test_a_model_without_an_optimizer_is_sharded_and_an_unprepared_optimizer_cannot_step_it() -> None:
    accelerator = make({"stage": 3})
    model = accelerator.prepare(net())
    optimizer = sgd(model)
    accelerator.backward(model(torch.ones(2, 16)).sum())
    with pytest.raises(RuntimeError, match=r"given .* of a sharded model"):
        optimizer.step()


def test_a_model_gets_another_optimizer_after_free_memory() -> None:
    accelerator, model = make({"stage": 3}), net()
    first, second = (sgd(model) for _ in range(2))
    model, optimizer = accelerator.prepare(model, first)
    accelerator.backward(model(torch.ones(2, 16)).sum())
    optimizer.step()
    trained = accelerator.get_state_dict(model)
    with pytest.raises(ValueError, match="SGD updates the same Sequential as an optimizer that was prepared before"):
        accelerator.prepare(second)
    accelerator.free_memory()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    assert_close(accelerator.get_state_dict(model), trained, 0)
    assert accelerator._models == [model] and accelerator._optimizers == [optimizer]


def test_hooks_save_and_load_what_they_take_and_options_pass_through(tmp_path: Path) -> None:
    accelerator, model = make({"stage": 3}), net()
    model[0].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained))

    def step() -> Tensors:
        accelerator.backward(model(torch.ones(2, 16)).sum())
        optimizer.step()
        optimizer.zero_grad()
        return weights(accelerator, model)

    before = step()
    accelerator.save_state(tmp_path / "some", frozen=False)
    assert "model/0.0.weight" not in (tmp_path / "some" / "zeroshard" / "index.json").read_text()
    hook = accelerator.register_save_state_pre_hook(
        lambda models, states, path: torch.save(states.pop(), f"{path}/own.pt")
    )
    accelerator.save_state(tmp_path / "own")
    assert "model/" not in (tmp_path / "own" / "zeroshard" / "index.json").read_text()
    hook.remove()
    for name in ("some", "own"):
        step()
        accelerator.load_state(tmp_path / name)
        assert_close(weights(accelerator, model), before, 0)
        assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {1.0}
        accelerator.register_load_state_pre_hook(lambda models, path: zeroshard.load(f"{path}/own.pt", models.pop()))


def test_an_ema_is_saved_with_its_own_model(tmp_path: Path) -> None:
    accelerator, teacher, model = make({"stage": 3}), net(seed=2), net()
    optimizer = sgd(model)
    teacher, model, optimizer = accelerator.prepare(teacher, model, optimizer)
    ema = zeroshard.EMA(model, decay=0.5)

    def averages() -> Tensors:
        accelerator.backward(model(torch.ones(2, 16)).sum() + teacher(torch.ones(2, 16)).sum().detach())
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        with ema.swapped():
            return accelerator.get_state_dict(model)

    before = averages()
    accelerator.save_state(tmp_path / "all", ema=ema)
    after = averages()
    assert not torch.equal(after["3.weight"], before["3.weight"])
    accelerator.load_state(tmp_path / "all", ema=ema)
    assert_close(averages(), after, 0)  # goes on from the averages of the checkpoint
    with pytest.raises(ValueError, match="total_limit"):
        accelerator.save_state(tmp_path / "all", keep=1)
    accelerator.free_memory()
    accelerator.prepare(net(seed=3))
    with pytest.raises(ValueError, match="averages none of the prepared models"):
        accelerator.save_state(tmp_path / "all", ema=ema)


def refused(zero: Any, match: str, error: type[Exception] = ValueError, **kwargs: Any) -> None:
    with pytest.raises(error, match=match):
        ZeroAccelerator(zero=zero, **kwargs)
    forget()


def test_what_cannot_be_right_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    refused({"stagee": 3}, "unknown option 'stagee': did you mean 'stage'", TypeError)
    refused(3, "zero is a dictionary", TypeError)
    refused({"precision": "fp16"}, "precision 'fp16', but mixed_precision is 'bf16'", mixed_precision="bf16")
    refused({"tensor_plan": {}}, "zero has a tensor axis")
    refused({}, "got fsdp_plugin=", fsdp_plugin=object())
    refused({}, "comm_hook", kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="fp16")])
    refused({}, "of GradScalerKwargs only init_scale", kwargs_handlers=[GradScalerKwargs(growth_interval=10)])
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    refused({}, "got ACCELERATE_USE_DEEPSPEED=true, which `accelerate launch` has set")
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")

    accelerator, model, other = ZeroAccelerator(zero={"stage": 3}), net(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()])
    with pytest.raises(ValueError, match=r"updates 2 parameters that are in no prepared model, the first of shape"):
        accelerator.prepare(model, optimizer)
    with pytest.raises(ValueError, match="updates the parameters of Sequential and Linear"):
        accelerator.prepare(model, optimizer, other)
    assert not zeroshard.is_sharded(model)
    with pytest.raises(NotImplementedError, match="even_batches"), accelerator.join_uneven_inputs([model], False):
        pass


def test_two_models_that_share_a_module_are_refused_before_one_is_sharded() -> None:
    accelerator, shared = ZeroAccelerator(), nn.Linear(2, 2)
    first, second = nn.Sequential(shared, nn.Linear(2, 1)), nn.Sequential(nn.ReLU(), shared)
    optimizer = sgd(first)
    with pytest.raises(ValueError, match=r"'0\.weight' of Sequential is also '1\.weight' .* one nn\.ModuleList"):
        accelerator.prepare(first, second, optimizer)
    assert not zeroshard.is_sharded(first)
    accelerator.prepare(first, optimizer)
    with pytest.raises(ValueError, match=r"'0\.weight' of Sequential is also 'weight' of Linear.*only the larger one"):
        accelerator.prepare(shared)


def test_mixed_precision_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    accelerator, model = ZeroAccelerator(), net()
    assert accelerator.zero == {"precision": "bf16"}
    model, _ = accelerator.prepare(model, sgd(model))
    assert model(torch.ones(2, 16)).dtype == torch.float32
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    assert model(torch.ones(2, 16)).dtype == torch.bfloat16


def test_without_autocast_the_model_computes_in_fp32_as_with_ddp() -> None:
    accelerator, model = make({}, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)]), net()
    model, _ = accelerator.prepare(model, sgd(model))
    assert_close(model(torch.full((2, 16), 0.1)), net()(torch.full((2, 16), 0.1)), 1e-7)


def test_zero_may_be_a_config_whose_precision_is_compared_too() -> None:
    config = zeroshard.Config(stage=2, precision="bf16", bucket_size=1024)
    for zero in (config, {"config": config}):
        assert ZeroAccelerator(zero=zero).zero == {"stage": 2, "precision": "bf16", "bucket_size": 1024}
        forget()
    refused(config, "precision 'bf16', but mixed_precision is 'fp16'", mixed_precision="fp16")
    refused({"config": {}}, "config must be a zeroshard.Config", TypeError)
    accelerator = ZeroAccelerator(zero=zeroshard.Config(stage=1), mixed_precision="bf16")
    assert accelerator.zero == {"stage": 1, "precision": "bf16"}


def test_an_accelerator_of_another_library_is_adopted() -> None:
    accelerator, model = Accelerator(), net()
    assert ZeroAccelerator.adopt(accelerator, {"stage": 2}) is accelerator
    model, optimizer = accelerator.prepare(model, sgd(model))
    assert zeroshard.is_sharded(model) and isinstance(optimizer, ZeroOptimizer)
    with pytest.raises(ValueError, match="has prepared a model"):
        ZeroAccelerator.adopt(accelerator)


ATTRIBUTES = (
    "_models _optimizers _save_model_state_pre_hook _load_model_state_pre_hook native_amp scaler autocast_handler "
    "ddp_handler scaler_handler step device_placement even_batches"
)


def test_what_is_overridden_exists_in_this_version_of_accelerate() -> None:
    accelerator = Accelerator()
    assert [name for name in ATTRIBUTES.split() if not hasattr(accelerator, name)] == []
    own = {"__init__", "adopt", "_configure", "_shard_pairs", "_shard", "_sharded_optimizers", "_find_optimizer"}
    own |= {"_without_sharded"}
    for cls in (ZeroAccelerator, ZeroOptimizer):
        for name, method in vars(cls).items():
            if not inspect.isfunction(method) or name in own:
                continue
            theirs = list(inspect.signature(getattr(cls.__base__, name)).parameters)
            ours = list(inspect.signature(method).parameters)
            assert len(ours) == len(theirs) and ours[:-1] == theirs[:-1], name  # the last may be **options
    sources = inspect.getsource(Accelerator.save_state), inspect.getsource(Accelerator.load_state)
    assert "hook(self._models, weights, output_dir)" in sources[0] and "hook(models, input_dir)" in sources[1]


# ------------------------------------------------------------------------------------------------ the guide


def follow_guide(rank: int, directory: Path) -> list[str]:
    """Run the Python blocks of the page one after the other; return the files that they leave."""
    page = (Path(__file__).parents[2] / "docs" / "accelerate.md").read_text("utf-8")
    os.chdir(directory)
    names: dict[str, Any] = {"Net": net, "loader": data(24, 4)}
    with as_launched(rank, 2):
        for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
            exec(block, names)
        assert names["loss"].isfinite() and len(names["state_dict"]) == (14 if rank == 0 else 0)
    os.chdir("/")
    return sorted(path.name for path in directory.glob("*/*"))


def test_the_code_of_the_guide_runs(tmp_path: Path) -> None:
    files, _ = run_processes(2, follow_guide, tmp_path)
    assert {"zeroshard", "scheduler.bin", "random_states_1.pkl", "model.safetensors"} <= {*files}


def flags_of_the_first(rank: int) -> list[bool]:
    """Exchange what hooks have left; nothing that another rank sends is unpickled."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a rank unpickles what it gets: that may be code of whoever reaches its port")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_unpickler", refuse)
        return integration._on_first_rank([rank == 0, rank == 1])


def test_ranks_send_what_hooks_have_left_as_data() -> None:
    assert run_processes(2, flags_of_the_first) == [[True, False]] * 2
