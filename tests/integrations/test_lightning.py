"""Lightning's Trainer and Fabric on two ranks: the same numbers as with their own DDP strategy."""

from __future__ import annotations

import gc
import os
import re
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_processes
from torch import nn
from torch.nn import functional as F

import zeroshard

pl = pytest.importorskip("lightning.pytorch")

import lightning.pytorch.callbacks as callbacks  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.utilities import grad_norm  # noqa: E402
from lightning_runs import STAGES, assert_close, be_rank, data, trainer, weights  # noqa: E402

from zeroshard.integrations import lightning as integration  # noqa: E402
from zeroshard.integrations.lightning import ZeroFabricStrategy, ZeroStrategy  # noqa: E402

WIDTH = 8


class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Blocks, a frozen layer, and a parameter that the steps use directly."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kind = kind
        if "meta" not in kind:
            self.build()
        self.automatic_optimization = "manual" not in kind
        self.seen: dict[str, list[float]] = {"loss": [], "norm": [], "val": [], "lr": []}

    def build(self) -> None:
        self.frozen = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(WIDTH) if "batch norm" in self.kind else nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.full((1,), 1.5, device="cpu"))
        self.frozen.requires_grad_(False)
        if "lora" in self.kind:
            import peft

            self.blocks.requires_grad_(False)
            peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["0.0", "0.2", "1.0"]), self.blocks)

    def configure_model(self) -> None:
        if "meta" in self.kind and not hasattr(self, "out"):
            with torch.device("meta"):
                self.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.frozen(x))
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.out(x)
        return out * self.scale if "manual" in self.kind else out

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        if "penalty" in self.kind:
            x = x.requires_grad_()
        out = self(x)
        loss = F.mse_loss(out if "manual" in self.kind else out * self.scale, y)
        if "penalty" in self.kind and torch.is_grad_enabled():
            (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = loss + gradient.pow(2).mean()
        return loss

    def training_step(self, batch: Any, index: int) -> Any:
        if not self.automatic_optimization:
            return self.manual_step(batch, index)
        loss = self.loss(batch)
        self.log("train", loss)
        self.seen["loss"].append(loss.item())
        return {"loss": loss, "extra": loss.detach()}

    def manual_step(self, batch: Any, index: int) -> None:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        with optimizer.toggle_model(sync_grad=index % 2 == 1):
            loss = self.loss(batch)
            self.seen["loss"].append(loss.item())
            self.manual_backward(loss / 2)
        if index % 2 == 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    def validation_step(self, batch: Any, index: int) -> None:
        loss = self.loss(batch)
        self.log("val", loss, sync_dist=True)
        self.seen["val"].append(loss.item())

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen["norm"].append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))
        self.seen["norm"].append(float(self.scale.grad))

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen["lr"].append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        adamw = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=3e-2)
        schedule = torch.optim.lr_scheduler.StepLR(adamw, 2, 0.5)
        return {"optimizer": adamw, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def net(kind: str = "") -> Net:
    torch.manual_seed(0)
    return Net(kind)


# ------------------------------------------------------------------------------------------------------- the Trainer

FIT: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def fit_all(rank: int, folder: str, strategies: list[str]) -> dict[str, Any]:
    """Fit, with accumulation, clipping, validation and callbacks; save; test and predict."""
    be_rank(rank)
    found: dict[str, Any] = {}
    for name in strategies:
        model = net("batch norm")
        best = callbacks.ModelCheckpoint(dirpath=f"{folder}/{name}", monitor="val", save_weights_only=True)
        stopping = callbacks.EarlyStopping("val", patience=50)
        run = trainer(name, max_epochs=2, **FIT, enable_checkpointing=True, callbacks=[best, stopping])
        run.fit(model, data(32, 4), data(8, 4, 1))
        run.save_checkpoint(f"{folder}/{name}.ckpt")
        found[name] = {
            **model.seen,
            "tested": run.test(model, data(8, 4, 1), verbose=False)[0]["val"],
            "predicted": torch.cat(run.predict(model, data(8, 4, 1))),
            "weights": weights(model),
            "best": run.test(model, data(8, 4, 1), ckpt_path="best", verbose=False)[0]["val"],
        }
        assert run.strategy.broadcast(rank) == 0 and run.strategy.reduce_boolean_decision(rank == 0, all=False)
        run.strategy.barrier()
    return found


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("lightning")
    return folder, run_processes(2, fit_all, str(folder), ["ddp", *STAGES, "zeroshard_stage_2_offload"])


@pytest.mark.parametrize("name", [*STAGES, "zeroshard_stage_2_offload"])
def test_a_fit_has_the_numbers_of_ddp(name: str, fitted: tuple[Path, list[dict[str, Any]]]) -> None:
    for found in fitted[1]:
        plain = found["ddp"]
        assert len(plain["loss"]) == 8 and len(plain["norm"]) == 8 and len(set(plain["lr"])) > 1
        assert_close(found[name], plain)


def test_a_checkpoint_is_lightnings_own(fitted: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = fitted
    plain = torch.load(folder / "ddp.ckpt", weights_only=True)
    for name in STAGES:
        saved = torch.load(folder / f"{name}.ckpt", weights_only=True)
        assert saved.keys() == plain.keys()
        assert_close(saved["state_dict"], plain["state_dict"])
        assert_close(saved["optimizer_states"], plain["optimizer_states"])
        assert saved["loops"] == plain["loops"]
        assert_close(saved["lr_schedulers"], plain["lr_schedulers"])
        model = Net.load_from_checkpoint(folder / f"{name}.ckpt", weights_only=True)
        assert_close(dict(model.state_dict()), found[0]["ddp"]["weights"])
        (best,) = (folder / name).glob("*.ckpt")
        assert "optimizer_states" not in torch.load(best, weights_only=True)


def resume_all(rank: int, folder: str, runs: list[tuple[str, str | None, str | None]]) -> list[dict[str, Any]]:
    """Fit for an epoch and save, or resume for one more."""
    be_rank(rank)
    found = []
    for strategy, source, target in runs:
        model = net()
        run = trainer(strategy, max_epochs=1 if source is None else 2, **FIT)
        path = None if source is None else f"{folder}/{source}"
        run.fit(model, data(32, 8 // dist.get_world_size()), ckpt_path=path)
        if target is not None:
            run.save_checkpoint(f"{folder}/{target}")
        found.append(weights(model))
    return found


def test_a_run_resumes_on_another_world_stage_and_strategy(tmp_path: Path) -> None:
    first = [("ddp", None, "ddp"), ("zeroshard_stage_3", None, "three"), ("ddp", "ddp", None)]
    crossed = [("ddp", "three", None), ("zeroshard_stage_1", "ddp", None), ("zeroshard_stage_3", "three", None)]
    _, _, expected, *found = run_processes(2, resume_all, str(tmp_path), first + crossed)[0]
    alone = [("zeroshard_stage_3", "ddp", None), ("zeroshard_stage_0", "three", None), ("ddp", "three", None)]
    found += run_processes(1, resume_all, str(tmp_path), alone)[0]
    for state in found:
        assert_close(state, expected)


def fit_kinds(rank: int, cases: list[tuple[str, str]]) -> list[Any]:
    be_rank(rank)
    found = []
    for kind, strategy in cases:
        torch.manual_seed(rank if "own seed" in kind else 0)  # rank 0's weights count
        model = Net(kind)
        options = {} if "manual" in kind else {**FIT, "gradient_clip_algorithm": "value"}
        local = ZeroStrategy(stage=3, accumulate_locally=True)
        run = trainer(local if strategy == "local" else strategy, max_epochs=2, **options)
        before = run.validate(model, data(8, 4, 1), verbose=False)
        run.fit(model, data(16, 4), data(8, 4, 1))
        if "twice" in kind:
            run.fit_loop.max_epochs = 3
            run.fit(model, data(16, 4), data(8, 4, 1))
        found.append({**model.seen, "before": before, "weights": weights(model)})
    return found


@pytest.mark.parametrize("kind", ["lora", "penalty", "manual", "twice, own seed"])
def test_kinds_of_modules_have_the_numbers_of_ddp(kind: str) -> None:
    for rank in run_processes(2, fit_kinds, [(kind, name) for name in ("ddp", *STAGES, "local")]):
        for found in rank[1:]:
            assert_close(found, rank[0])


def validate_with_local_steps(rank: int) -> float:
    be_rank(rank)
    strategy = ZeroStrategy(stage=0, local_steps=4, outer_optimizer=partial(torch.optim.SGD, lr=0.7))
    (metrics,) = trainer(strategy, max_epochs=1).validate(Net("lora"), data(8, 4, 1), verbose=False)
    return next(iter(metrics.values()))


def test_a_module_without_an_optimizer_has_no_local_steps() -> None:
    assert all(found > 0 for found in run_processes(2, validate_with_local_steps))


def fit_meta(rank: int, folder: str) -> list[dict[str, torch.Tensor]]:
    be_rank(rank)
    found = []
    for source in (None, f"{folder}/meta"):
        model = net("meta")
        run = trainer("zeroshard_stage_3", max_epochs=1 if source is None else 2)
        run.fit(model, data(16, 4), ckpt_path=source)
        if source is None:
            assert len({round(float(value.std()), 6) for value in weights(model).values() if value.dim() > 1}) > 4
            run.save_checkpoint(f"{folder}/meta")
        found.append(weights(model))
    plain = net()
    with (run := trainer("zeroshard_stage_3", max_epochs=2)).init_module(empty_init=True):
        empty = Net()
    assert empty.out.weight.is_meta
    run.fit(empty, data(16, 4), ckpt_path=f"{folder}/meta")
    found.append(weights(empty))
    run = trainer("ddp", max_epochs=2)
    run.fit(plain, data(16, 4), ckpt_path=f"{folder}/meta")
    return [*found, dict(plain.state_dict())]


def test_a_module_on_the_meta_device_is_initialised_and_resumed(tmp_path: Path) -> None:
    first, second = run_processes(2, fit_meta, str(tmp_path))
    assert_close(first, second, 0)
    assert_close(first[1], first[3])
    assert_close(first[2], first[3])


# -------------------------------------------------------------------------------------------------------- precision


def fit_precisions(rank: int, folder: str) -> dict[str, Any]:
    be_rank(rank)
    found: dict[str, Any] = {}
    fp16, scaler = [MixedPrecision("16-mixed", "cpu")], torch.amp.GradScaler("cpu", init_scale=64.0)
    for name, strategy, options in [
        ("ddp", "ddp", {"precision": "bf16-mixed"}),
        ("fp32 weights", ZeroStrategy(stage=3, precision="fp32"), {"precision": "bf16-mixed"}),
        ("bf16", "zeroshard_stage_3", {"precision": "bf16-mixed"}),
        ("ddp true", "ddp", {"precision": "bf16-true"}),
        ("true", "zeroshard_stage_3", {"precision": "bf16-true"}),
        ("ddp fp16", "ddp", {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}),
        ("fp16", ZeroStrategy(stage=1, loss_scale=64.0), {"plugins": fp16}),
    ]:
        model = net()
        run = trainer(strategy, max_epochs=2, **FIT, **options)
        run.fit(model, data(16, 4), data(8, 4, 1))
        run.save_checkpoint(f"{folder}/{name}")
        found[name] = {**model.seen, "weights": weights(model)}
    for source in ("ddp fp16", "fp16"):
        run = trainer("zeroshard_stage_3", max_epochs=3, plugins=[MixedPrecision("16-mixed", "cpu")])
        run.fit(net(), data(16, 4), ckpt_path=f"{folder}/{source}")
        found[f"scale of {source}"] = float(run.optimizers[0].loss_scale)
    return found


def test_precisions_have_the_numbers_of_ddp(tmp_path: Path) -> None:
    found = run_processes(2, fit_precisions, str(tmp_path))[0]
    assert_close(found["fp32 weights"], found["ddp"])
    assert {value.dtype for value in found["bf16"]["weights"].values()} == {torch.float32}
    assert found["true"]["weights"]["out.weight"].dtype == torch.bfloat16
    for name, plain in (("bf16", "ddp"), ("true", "ddp true"), ("fp16", "ddp fp16")):  # other roundings
        for what in ("loss", "norm", "val"):
            assert_close(found[name][what], found[plain][what], 0.05)
    saved = torch.load(tmp_path / "ddp fp16", weights_only=True)["MixedPrecision"]
    assert torch.load(tmp_path / "fp16", weights_only=True)["MixedPrecision"].keys() == saved.keys()
    assert found["scale of ddp fp16"] == found["scale of fp16"] == saved["scale"]


# ----------------------------------------------------------------------------------------------------------- Fabric


class Loss(nn.Module):
    """A model whose loss is computed by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)])
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(x))

    def compute_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.out(self.blocks(x)), y)


def loop(rank: int, folder: str, runs: list[tuple[Any, dict[str, Any]]], source: str | None = None) -> list[Any]:
    be_rank(rank)
    found = []
    for number, (strategy, options) in enumerate(runs):
        fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **options)
        fabric.launch()
        torch.manual_seed(0)
        plain = Loss()
        adamw = torch.optim.AdamW(plain.parameters(), lr=3e-2)
        schedule = torch.optim.lr_scheduler.StepLR(adamw, 2, 0.5)
        model, optimizer = fabric.setup(plain, adamw)
        model.mark_forward_method("compute_loss")
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
        if source is not None:
            fabric.load(f"{folder}/{source}", state)
        seen: dict[str, list[float]] = {"loss": [], "norm": []}
        loader = fabric.setup_dataloaders(data(32, 8 // dist.get_world_size()))
        for index, (x, y) in enumerate(loader):
            is_last = index % 2 == 1
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = model.compute_loss(x, y) if is_last else F.mse_loss(model(x), y)
                fabric.backward(loss / 2)
            seen["loss"].append(loss.item())
            if is_last:
                seen["norm"].append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
                fabric.clip_gradients(model, optimizer, clip_val=0.1)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                state["step"] += 1
        if source is None:
            fabric.save(f"{folder}/{number}", state)
        found.append({**seen, "step": state["step"], "weights": weights(model.module)})
    return found


def test_fabric_has_the_numbers_of_ddp(tmp_path: Path) -> None:
    strategies: list[Any] = [(name, {}) for name in ("ddp", *STAGES)]
    first = run_processes(2, loop, str(tmp_path), strategies)
    for rank in first:
        for found in rank[1:]:
            assert_close(found, rank[0])
    (expected,), _ = run_processes(2, loop, str(tmp_path), strategies[:1], "0")
    assert expected["step"] == 4
    resumed = [*run_processes(2, loop, str(tmp_path), strategies, "3")[0]]
    alone = (
        run_processes(1, loop, str(tmp_path), strategies, "0")[0]
        + run_processes(1, loop, str(tmp_path), strategies, "3")[0]
    )
    for found in resumed:
        assert_close(found, expected)
    for found in alone:
        assert_close(found["weights"], expected["weights"])


def test_fabric_precisions_have_the_numbers_of_ddp(tmp_path: Path) -> None:
    mixed: list[Any] = [
        ("ddp", {"precision": "bf16-mixed"}),
        (ZeroFabricStrategy(stage=3, precision="fp32"), {"precision": "bf16-mixed"}),
        ("zeroshard_stage_3", {"precision": "bf16-mixed"}),
        ("ddp", {"precision": "bf16-true"}),
        ("zeroshard_stage_1", {"precision": "bf16-true"}),
        (ZeroFabricStrategy(loss_scale=64.0), {"plugins": [FabricMixedPrecision("16-mixed", "cpu")]}),
    ]
    plain, fp32, bf16, plain_true, true, fp16 = run_processes(2, loop, str(tmp_path), mixed)[0]
    assert_close(fp32, plain)
    for found, expected in ((bf16, plain), (true, plain_true), (fp16, plain)):  # other roundings
        assert_close(found["loss"], expected["loss"], 0.05)
        assert_close(found["norm"], expected["norm"], 0.05)


def set_up_twice(rank: int) -> list[bool]:
    """Train a model in fp16, drop it, train another; return whether each is gone."""
    be_rank(rank)
    precision = FabricMixedPrecision("16-mixed", "cpu")
    fabric = Fabric(accelerator="cpu", devices=2, strategy="zeroshard_stage_3", plugins=[precision])
    fabric.launch()
    dropped = []
    for _ in range(2):
        plain = nn.Linear(4, 1)
        dropped.append(weakref.ref(plain))
        model, sgd = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        fabric.backward(model(torch.ones(2, 4)).sum())
        sgd.step()
        del plain, model, sgd
        gc.collect()
    return [model() is None for model in dropped]


def test_fabric_forgets_a_model_that_was_dropped() -> None:
    assert run_processes(2, set_up_twice) == [[True, True]] * 2


# ------------------------------------------------------------------------------------------------- errors and names


def fail(rank: int) -> list[str]:
    be_rank(rank)
    told = []

    def tell(action: Any) -> None:
        with pytest.raises(Exception) as error:
            action()
        told.append(f"{type(error.value).__name__}: {error.value}")

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="zeroshard_stage_3")
    fabric.launch()
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    fabric.setup_module(model)
    tell(lambda: fabric.setup_optimizers(sgd))
    return told


def test_what_cannot_be_done_says_so() -> None:
    (separate,) = run_processes(2, fail)[0]
    assert "fabric.setup(model, optimizer)" in separate
    with pytest.raises(ValueError, match="give it to the Trainer"):
        ZeroStrategy(precision="bf16")
    with pytest.raises(ValueError, match="mesh is not supported"):
        ZeroFabricStrategy(mesh=object())
    with pytest.raises(TypeError, match="did you mean 'stage'"):
        ZeroStrategy(stagee=1)
    with pytest.raises(TypeError, match="TransformerEnginePrecision cannot"):
        ZeroStrategy().precision_plugin = object.__new__(pl.plugins.TransformerEnginePrecision)
    with pytest.raises(ValueError, match="no loss scale"):
        ZeroStrategy(precision="fp32").precision_plugin = MixedPrecision("16-mixed", "cpu")
    ZeroStrategy(precision="fp8").precision_plugin = MixedPrecision("bf16-mixed", "cpu")
    with pytest.raises(ValueError, match="'bf16-mixed', got '16-mixed'"):
        ZeroStrategy(precision="fp8").precision_plugin = MixedPrecision("16-mixed", "cpu")


def test_the_parts_of_lightning_that_the_strategies_use_are_there() -> None:
    """Private names, and methods whose override would otherwise have no effect any more."""
    from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import DDPStrategy, Strategy

    for strategy, base in ((ZeroStrategy, DDPStrategy), (ZeroFabricStrategy, integration.FabricDDPStrategy)):
        own = {"options", "stage", "accumulate_locally", "_module", "_run_step"}
        overridden = {name for name in vars(strategy) if not name.startswith("__")} - own - {"_abc_impl"}
        assert len(overridden) > 10 and [name for name in overridden if not hasattr(base, name)] == []
    trainer_side, fabric_side = ZeroStrategy(), ZeroFabricStrategy()
    for name in ("_precision_plugin", "_layer_sync", "_reset_optimizers_and_schedulers"):
        assert hasattr(trainer_side, name)
    assert {"_precision", "_backward_sync_control"} <= vars(fabric_side).keys()
    assert hasattr(FabricStrategy, "_convert_stateful_objects_in_state") and hasattr(Strategy, "precision_plugin")
    sgd = torch.optim.SGD([torch.zeros(1)])
    assert LightningOptimizer(sgd)._optimizer is sgd
    for plugin in integration._TRAINER_PLUGINS:
        assert hasattr(plugin, "clip_grad_by_norm") and hasattr(plugin, "clip_grad_by_value")
    assert isinstance(nn.Linear(1, 1)._load_state_dict_pre_hooks, dict)


GUIDE = Path(__file__).parents[2] / "docs" / "lightning.md"


class LossNet(nn.Module):
    """Returns a loss, as the model of the guide's loop does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Loss()

    def forward(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])


def run_guide(rank: int, folder: str) -> None:
    be_rank(rank)
    os.chdir(folder)
    loss_net = LossNet()
    adamw = torch.optim.AdamW(loss_net.parameters())
    for section, model in (("Trainer", net()), ("Fabric", loss_net)):
        text = re.split(r"^## ", GUIDE.read_text(encoding="utf-8"), flags=re.M)
        (chosen,) = (part for part in text if part.startswith(section))
        names = {"torch": torch, "zeroshard": zeroshard, "model": model, "optimizer": adamw}
        names |= {"train_loader": data(16, 4), "val_loader": data(8, 4)}
        for block in re.findall(r"^```python\n(.*?)^```", chosen, re.M | re.S):
            exec(block, names)


def test_the_guide_runs(tmp_path: Path) -> None:
    run_processes(2, run_guide, str(tmp_path))
    assert torch.load(tmp_path / "weights.pt").keys() == net().state_dict().keys()
    assert torch.load(tmp_path / "fabric.ckpt").keys() == {"model", "optimizer"}


def test_callbacks_that_change_parameters_and_own_scalers_are_rejected() -> None:
    for callback, message in [
        (callbacks.StochasticWeightAveraging(1e-2), r"StochasticWeightAveraging copies the model.*zeroshard.EMA"),
        (callbacks.EMAWeightAveraging(), r"EMAWeightAveraging copies the model.*zeroshard.EMA"),
        (callbacks.BackboneFinetuning(), r"BackboneFinetuning unfreezes parameters.*fit\(\) once for each phase"),
        (callbacks.ModelPruning("l1_unstructured"), r"ModelPruning replaces parameters.*prune the plain model"),
    ]:
        with pytest.raises(ValueError, match=message):
            integration._check_callbacks([callbacks.EarlyStopping("val"), callback])
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    with pytest.raises(ValueError, match="a GradScaler of its own"):
        ZeroStrategy(stage=1).precision_plugin = plugin
