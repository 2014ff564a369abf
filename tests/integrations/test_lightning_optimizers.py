"""Several optimizers of one model in Lightning's Trainer and Fabric: the same numbers as with their own DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_runs import STAGES, assert_close, be_rank, data, pl, trainer, weights
from ranks import run_processes
from torch import nn
from torch.nn import functional as F

pytest.importorskip("lightning.pytorch")

from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins import MixedPrecision

from zeroshard.integrations.lightning import ZeroFabricStrategy, ZeroStrategy

DDP = "ddp_find_unused_parameters_true"  # a GAN's losses do not use all parameters


def blocks(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 8), *[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)], nn.Linear(8, outputs)
    )


class GAN(pl.LightningModule):  # type: ignore[misc]
    """The loop of a GAN; ``kind`` says how it separates the gradients of its optimizers."""

    def __init__(self, kind: str = "toggle") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kind, self.automatic_optimization = kind, False
        self.generator, self.discriminator = blocks(4, 4), blocks(4, 1)
        self.seen: dict[str, list[float]] = {"loss": [], "lr": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.generator(x)
        return out

    def judge(self, x: torch.Tensor, real: float) -> torch.Tensor:
        logits = self.discriminator(x)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))

    def training_step(self, batch: Any, index: int) -> None:
        (x, _), (first, second), schedules = batch, self.optimizers(), self.lr_schedulers()
        if self.kind == "toggle model":
            with first.toggle_model(sync_grad=index % 2 == 1):
                self.backward_and_step(first, self.judge(self(x), 1.0), index % 2 == 1)
            with second.toggle_model():
                self.backward_and_step(second, self.discriminator_loss(x, self(x).detach()))
        elif self.kind in ("toggle", "unclipped"):  # Lightning's own fp16 would clip scaled gradients
            self.toggle_optimizer(first)
            fake = self(x)
            self.backward_and_step(first, self.judge(fake, 1.0))
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
            self.backward_and_step(second, self.discriminator_loss(x, self(x).detach()))
            self.untoggle_optimizer(second)
        elif self.kind == "closures":
            first.step(closure=lambda: self.backward_closure(first, self.judge(self(x), 1.0)))
            second.step(closure=lambda: self.backward_closure(second, self.discriminator_loss(x, self(x).detach())))
        else:  # both have gradients of one loss
            loss = self.judge(self(x), 1.0) + self.judge(x, 1.0)
            self.seen["loss"].append(loss.item())
            self.manual_backward(loss)
            for optimizer in (first, second):
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
        schedules[index % 2].step()
        self.seen["lr"] += [optimizer.param_groups[0]["lr"] for optimizer in self.trainer.optimizers]

    def discriminator_loss(self, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        return (self.judge(real, 1.0) + self.judge(fake, 0.0)) / 2

    def backward_closure(self, optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
        self.seen["loss"].append(loss.item())
        optimizer.zero_grad()
        self.manual_backward(loss)
        return loss

    def backward_and_step(self, optimizer: Any, loss: torch.Tensor, steps: bool = True) -> None:
        self.seen["loss"].append(loss.item())
        self.manual_backward(loss)
        if steps and self.kind != "unclipped":
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        if steps:
            optimizer.step()
            optimizer.zero_grad()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.judge(self(batch[0]), 1.0), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.kind == "muon":
            named = [(p.dim() == 2, p) for p in self.parameters()]
            matrices, vectors = ([p for is_matrix, p in named if is_matrix is wanted] for wanted in (True, False))
            optimizers = [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(vectors, lr=3e-2)]
        else:
            adam = torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
            optimizers = [adam, torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]


def gan(kind: str) -> GAN:
    torch.manual_seed(0)
    return GAN(kind)


def fit_gans(rank: int, runs: dict[str, list[str]]) -> dict[str, list[Any]]:
    be_rank(rank)
    found: dict[str, list[Any]] = {}
    for kind, strategies in runs.items():
        for strategy in strategies:
            model, run = gan(kind), trainer(strategy, max_epochs=2)
            run.fit(model, data(32, 4), data(8, 4, 1))
            found.setdefault(kind, []).append({**model.seen, **run.callback_metrics, "weights": weights(model)})
    return found


def test_loops_with_two_optimizers_have_the_numbers_of_ddp() -> None:
    offload = "zeroshard_stage_2_offload"
    runs = {  # the way to separate gradients is one for all stages: each in stage 3 and another
        "toggle": [DDP, *STAGES, offload],
        "toggle model": [DDP, "zeroshard_stage_3", offload],
        "closures": [DDP, "zeroshard_stage_3", "zeroshard_stage_1"],
        "one loss": [DDP, "zeroshard_stage_3", "zeroshard_stage_0"],
        "muon": [DDP, "zeroshard_stage_3", offload],
    }
    for rank in run_processes(2, fit_gans, runs):
        for plain, *others in rank.values():
            assert len(set(plain["loss"])) == len(plain["loss"]) >= 8 and len(set(plain["lr"])) > 3
            for found in others:
                assert_close(found, plain)


# -------------------------------------------------------------------------------------------------------- precision


def fit_precisions(rank: int, folder: str) -> dict[str, Any]:
    be_rank(rank)
    found: dict[str, Any] = {}
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    fp16 = {"plugins": [MixedPrecision("16-mixed", "cpu")]}
    for name, strategy, options in [
        ("ddp", DDP, {"precision": "bf16-mixed"}),
        ("fp32 weights", ZeroStrategy(stage=3, precision="fp32"), {"precision": "bf16-mixed"}),
        ("bf16", "zeroshard_stage_3", {"precision": "bf16-mixed"}),
        ("bf16 offload", "zeroshard_stage_1_offload", {"precision": "bf16-mixed"}),
        ("ddp true", DDP, {"precision": "bf16-true"}),
        ("true", "zeroshard_stage_3", {"precision": "bf16-true"}),
        ("ddp fp16", DDP, {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}),
        ("fp16", ZeroStrategy(stage=1, loss_scale=64.0), fp16),
    ]:
        model, run = gan("unclipped" if "fp16" in name else "toggle"), trainer(strategy, max_epochs=1, **options)
        run.fit(model, data(32, 4), data(8, 4, 1))
        run.save_checkpoint(f"{folder}/{name}")
        found[name] = {**model.seen, **run.callback_metrics, "weights": weights(model)}
    for source in ("ddp fp16", "fp16"):
        run = trainer("zeroshard_stage_3", max_epochs=1, plugins=[MixedPrecision("16-mixed", "cpu")])
        run.fit(gan("unclipped"), data(32, 4), ckpt_path=f"{folder}/{source}")
        found[f"scale of {source}"] = [float(optimizer.loss_scale) for optimizer in run.optimizers]
    return found


def test_precisions_have_the_numbers_of_ddp(tmp_path: Path) -> None:
    found = run_processes(2, fit_precisions, str(tmp_path))[0]
    assert_close(found["fp32 weights"], found["ddp"])
    assert {value.dtype for value in found["bf16"]["weights"].values()} == {torch.float32}
    pairs = [("bf16", "ddp"), ("bf16 offload", "ddp"), ("true", "ddp true"), ("fp16", "ddp fp16")]
    for name, plain in pairs:  # other roundings
        for what in ("loss", "weights"):
            assert_close(found[name][what], found[plain][what], 0.02)
    saved = torch.load(tmp_path / "ddp fp16", weights_only=True)["MixedPrecision"]
    own = torch.load(tmp_path / "fp16", weights_only=True)["MixedPrecision"]
    assert {**own, "growth_interval": 0} == {**saved, "growth_interval": 0}
    assert found["scale of ddp fp16"] == found["scale of fp16"] == [64.0, 64.0]


# ------------------------------------------------------------------------------------------------------ checkpoints


def resume_gans(rank: int, folder: str, runs: list[tuple[str, str | None, str | None]]) -> list[dict[str, Any]]:
    """Fit for an epoch and save, or resume for one more."""
    be_rank(rank)
    found = []
    for strategy, source, target in runs:
        model, run = gan("one loss"), trainer(strategy, max_epochs=1 if source is None else 2)
        path = None if source is None else f"{folder}/{source}"
        run.fit(model, data(32, 8 // dist.get_world_size()), ckpt_path=path)
        if target is not None:
            run.save_checkpoint(f"{folder}/{target}")
        found.append({"lr": model.seen["lr"], "weights": weights(model)})
    return found


def test_a_run_with_two_optimizers_resumes_on_another_world_stage_and_strategy(tmp_path: Path) -> None:
    first = [("ddp", None, "ddp"), ("zeroshard_stage_3", None, "three"), ("ddp", "ddp", "end of ddp")]
    crossed = [("ddp", "three", None), ("zeroshard_stage_1", "ddp", None), ("zeroshard_stage_3", "three", "end")]
    _, _, expected, *found = run_processes(2, resume_gans, str(tmp_path), first + crossed)[0]
    alone = [("zeroshard_stage_3", "ddp", None), ("zeroshard_stage_0", "three", None), ("ddp", "three", None)]
    found += run_processes(1, resume_gans, str(tmp_path), alone)[0]
    for state in found:
        assert_close(state, expected)
    plain, saved = (torch.load(tmp_path / name, weights_only=True) for name in ("end of ddp", "end"))
    assert saved.keys() == plain.keys() and len(plain["optimizer_states"]) == len(plain["lr_schedulers"]) == 2
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_close(saved[key], plain[key])
    assert saved["loops"] == plain["loops"]
    model = GAN.load_from_checkpoint(tmp_path / "end", weights_only=True)
    assert_close(dict(model.state_dict()), expected["weights"])
    for optimizer, state in zip(model.configure_optimizers()[0], saved["optimizer_states"], strict=True):
        optimizer.load_state_dict(state)  # a plain optimizer takes it


# ----------------------------------------------------------------------------------------------------------- Fabric


class Both(nn.Module):
    """A generator and a discriminator in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = blocks(4, 4), blocks(4, 1)

    def forward(self, x: torch.Tensor, loss: str) -> torch.Tensor:
        fake = self.generator(x)
        if loss == "generator":
            return F.softplus(-self.discriminator(fake)).mean()
        return F.softplus(self.discriminator(fake.detach())).mean() + F.softplus(-self.discriminator(x)).mean()


def fabric_gans(rank: int, folder: str, runs: list[tuple[Any, dict[str, Any]]], source: str | None) -> list[Any]:
    be_rank(rank)
    found = []
    for number, (strategy, options) in enumerate(runs):
        fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **options)
        fabric.launch()
        torch.manual_seed(0)
        plain = Both()
        adam = torch.optim.Adam(plain.generator.parameters(), lr=1e-2)
        sgd = torch.optim.SGD(plain.discriminator.parameters(), lr=0.1, momentum=0.9)
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in (adam, sgd)]
        model, first, second = fabric.setup(plain, adam, sgd)
        state: dict[str, Any] = {"model": model, "generator": first, "discriminator": second, "step": 0}
        if source is not None:
            fabric.load(f"{folder}/{source}", state)
        seen: dict[str, list[float]] = {"loss": [], "norm": [], "lr": []}
        for x, _ in fabric.setup_dataloaders(data(32, 8 // dist.get_world_size())):
            for name, optimizer, schedule in zip(
                ("generator", "discriminator"), (first, second), schedules, strict=True
            ):
                optimizer.zero_grad()
                loss = model(x, name)
                seen["loss"].append(loss.item())
                fabric.backward(loss)
                seen["norm"].append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1)))
                optimizer.step()
                schedule.step()
                seen["lr"].append(optimizer.param_groups[0]["lr"])
            state["step"] += 1
        if source is None:
            fabric.save(f"{folder}/{number}", state)
        found.append({**seen, "step": state["step"], "weights": weights(model.module)})
    return found


def test_fabric_has_the_numbers_of_ddp(tmp_path: Path) -> None:
    runs: list[Any] = [(name, {}) for name in (DDP, *STAGES)]
    for rank in run_processes(2, fabric_gans, str(tmp_path), runs, None):
        assert len(rank[0]["loss"]) == 8
        for found in rank[1:]:
            assert_close(found, rank[0])
    expected, *resumed = run_processes(2, fabric_gans, str(tmp_path), runs, "0")[0]
    resumed += run_processes(2, fabric_gans, str(tmp_path), runs, "3")[0]
    for found in resumed:
        assert_close(found, expected)
    for found in run_processes(1, fabric_gans, str(tmp_path), runs[1:], "3")[0]:
        assert_close(found["weights"], expected["weights"])


def test_fabric_precisions_have_the_numbers_of_ddp(tmp_path: Path) -> None:
    runs: list[Any] = [
        (DDP, {"precision": "bf16-mixed"}),
        (ZeroFabricStrategy(stage=3, precision="fp32"), {"precision": "bf16-mixed"}),
        ("zeroshard_stage_3", {"precision": "bf16-mixed"}),
        (ZeroFabricStrategy(loss_scale=64.0), {"plugins": [FabricMixedPrecision("16-mixed", "cpu")]}),
        (ZeroFabricStrategy(stage=1, loss_scale=64.0), {"plugins": [FabricMixedPrecision("16-mixed", "cpu")]}),
        (DDP, {"precision": "bf16-true"}),
        ("zeroshard_stage_1", {"precision": "bf16-true"}),
    ]
    plain, fp32, *mixed, plain_true, true = run_processes(2, fabric_gans, str(tmp_path), runs, None)[0]
    assert_close(fp32, plain)
    for found, expected in [*[(found, plain) for found in mixed], (true, plain_true)]:  # other roundings
        for what in ("loss", "norm", "weights"):
            assert_close(found[what], expected[what], 0.02)


# ----------------------------------------------------------------------------------------------------------- errors


class Wrong(GAN):
    """Mistakes in configure_optimizers."""

    def configure_optimizers(self) -> Any:
        if self.kind == "shared":
            return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.generator.parameters(), lr=0.1)]
        first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.discriminator))
        return first if self.kind == "fewer" else [first, second]


def fail(rank: int, folder: str) -> list[str]:
    be_rank(rank)
    told = []
    (run := trainer("zeroshard_stage_1", max_epochs=1)).fit(gan("toggle"), data(8, 4))
    run.save_checkpoint(f"{folder}/two")
    run.strategy.barrier()
    for kind, strategy in [
        ("shared", "zeroshard_stage_3"),
        ("auto", ZeroStrategy(stage="auto")),
        ("automatic", "zeroshard_stage_3"),
        ("fewer", "zeroshard_stage_3"),
    ]:
        model = Wrong(kind)
        model.automatic_optimization = kind == "automatic"
        with pytest.raises(Exception) as error:
            source = f"{folder}/two" if kind == "fewer" else None
            trainer(strategy, max_epochs=2).fit(model, data(8, 4), ckpt_path=source)
        told.append(str(error.value))
    return told


def test_what_cannot_be_done_says_so(tmp_path: Path) -> None:
    shared, auto, automatic, fewer = run_processes(2, fail, str(tmp_path))[0]
    assert "'generator.0.weight' is in optimizer 0 (SGD) and in optimizer 1 (SGD)" in shared
    assert "stage='auto' plans for one optimizer, got 2" in auto
    assert "manual optimization" in automatic
    assert "the states of 2 optimizers, and configure_optimizers() has made 1" in fewer
