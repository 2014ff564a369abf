"""What Lightning's users do besides training: each habit has the numbers of DDP, or raises and says what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_runs import assert_close, be_rank, data, pl, trainer, weights
from ranks import run_processes
from torch import nn
from torch.nn import functional as F

import zeroshard
from zeroshard.integrations.lightning import ZeroStrategy

callbacks = pytest.importorskip("lightning.pytorch.callbacks")
STRATEGIES = ["ddp", "zeroshard_stage_1", "zeroshard_stage_3"]


def blocks(outputs: int = 1) -> nn.Sequential:
    inner = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)]
    return nn.Sequential(nn.Linear(4, 8), *inner, nn.Linear(8, outputs))


class Net(pl.LightningModule):  # type: ignore[misc]
    """A module as in Lightning's guides."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.net, self.lr = blocks(), lr
        self.seen: dict[str, list[float]] = {"loss": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out

    def loss(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.seen["loss"].append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def net(kind: type[Net] = Net, **options: Any) -> Net:
    torch.manual_seed(0)
    return kind(**options)


def result(model: Net, run: Any, **found: Any) -> dict[str, Any]:
    values = {name: value.clone() for name, value in weights(model).items()}
    return {**model.seen, **run.callback_metrics, "weights": values, "steps": run.global_step, **found}


# ----------------------------------------------------------------------------------------------------------- habits


def keep_the_best(strategy: str, folder: Path) -> dict[str, Any]:
    """Checkpoints of the two best epochs and of the last; stop when it gets worse; test the best; resume the last."""
    model = net(lr=0.3)
    best = callbacks.ModelCheckpoint(folder, monitor="val", save_top_k=2, save_last=True, filename="{epoch}-{val:.4f}")
    stop = callbacks.EarlyStopping("val", patience=1)
    run = trainer(strategy, max_epochs=8, enable_checkpointing=True, callbacks=[best, stop])
    run.fit(model, data(32, 4), data(8, 4, 1))
    assert run.current_epoch < 8
    found = result(model, run, score=best.best_model_score, epochs=run.current_epoch)
    found["tested"] = run.test(ckpt_path="best", dataloaders=data(8, 4, 1), verbose=False)
    again, last = net(lr=0.3), callbacks.ModelCheckpoint(folder, save_last=True)
    run = trainer(strategy, max_epochs=run.current_epoch + 1, enable_checkpointing=True, callbacks=[last])
    run.fit(again, data(32, 4), ckpt_path="last")
    run.strategy.barrier()
    return {**found, "resumed": result(again, run), "files": len(list(folder.iterdir()))}


def find_the_learning_rate(strategy: str, folder: Path) -> dict[str, Any]:
    """Lightning's finder trains, and then restores the weights from a checkpoint."""
    from lightning.pytorch.tuner import Tuner

    model, run = net(), trainer(strategy, max_epochs=1, default_root_dir=folder)
    finder = Tuner(run).lr_find(model, data(64, 4), num_training=6, early_stop_threshold=None)
    run.fit(model, data(32, 4))
    return result(model, run, losses=finder.results["loss"], lr=run.optimizers[0].param_groups[0]["lr"])


class Watched(Net):
    """Overrides what trains, and reads weights and gradients."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Callable[[], Any]) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, (self.trainer.global_step + 1) / 4)
        optimizer.step(closure=closure)

    def optimizer_zero_grad(self, epoch: int, index: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        self.seen.setdefault("norm", []).append(float(norm))

    def on_after_backward(self) -> None:
        gradients = [p.grad for p in self.parameters()]
        self.seen.setdefault("grad", []).extend(float(grad.norm()) for grad in gradients if grad is not None)

    def on_train_epoch_end(self) -> None:
        with zeroshard.gathered(self) if zeroshard.is_sharded(self) else torch.no_grad():
            self.seen.setdefault("weight", []).extend(float(p.detach().norm()) for p in self.parameters())


def override_hooks(strategy: str, folder: Path) -> dict[str, Any]:
    model, run = net(Watched), trainer(strategy, max_epochs=2)
    run.fit(model, data(24, 4))
    return result(model, run)


def accumulate_unevenly(strategy: str, folder: Path) -> dict[str, Any]:
    model, schedule = net(), callbacks.GradientAccumulationScheduler({0: 2, 1: 1, 2: 3})
    run = trainer(strategy, max_epochs=3, callbacks=[schedule], gradient_clip_val=0.1)
    run.fit(model, data(40, 4))
    return result(model, run)


def monitor_learning_rates(strategy: str, folder: Path) -> dict[str, Any]:
    from lightning.pytorch.loggers import CSVLogger

    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            sgd = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, factor=0.1, patience=0)
            return {"optimizer": sgd, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}

    found: dict[str, Any] = {}
    for kind in (Scheduled, Net):  # without a scheduler, the column has the optimizer's name
        model, monitor = net(kind), callbacks.LearningRateMonitor(log_momentum=True)
        run = trainer(strategy, max_epochs=4, logger=CSVLogger(folder), log_every_n_steps=1, callbacks=[monitor])
        run.fit(model, data(16, 4), data(8, 4, 1))
        found[kind.__name__] = result(model, run, lrs=monitor.lrs)
    return found


class Distilled(Net):
    """A frozen teacher in the module, one outside of it, and a compiled student."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.outside = blocks().requires_grad_(False), [blocks().requires_grad_(False)]
        self.net = torch.compile(self.net, backend="eager")  # type: ignore[assignment]

    def loss(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0]) + self.outside[0](batch[0])
        return F.mse_loss(self(batch[0]), target) + super().loss(batch)


def learn_from_a_teacher(strategy: str, folder: Path) -> dict[str, Any]:
    model, run = net(Distilled), trainer(strategy, max_epochs=2)
    before = run.test(model, data(8, 4, 1), verbose=False)
    run.fit(model, data(32, 4), data(8, 4, 1))
    return result(model, run, before=before)


class MovingTeacher(Distilled):
    """The teacher is an average of the student."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.net, self.rate = blocks(), rate
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        with zeroshard.gathered(self, write_rank=0) if zeroshard.is_sharded(self) else torch.no_grad():
            for average, parameter in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                average.data.lerp_(parameter.data.to(average.dtype), self.rate)


def move_the_teacher(strategy: str, folder: Path) -> dict[str, Any]:
    model, run = net(MovingTeacher), trainer(strategy, max_epochs=2)
    run.fit(model, data(32, 4), data(8, 4, 1))
    return result(model, run)


def unfreeze_between_fits(strategy: str, folder: Path) -> dict[str, Any]:
    """A phase with a frozen backbone, then one without; the second fit has a Trainer of its own."""
    model = net()
    model.net[0].requires_grad_(False)
    model.net[1].requires_grad_(False)
    first = trainer(strategy, max_epochs=1)
    first.fit(model, data(32, 4))
    model.net.requires_grad_(True)
    second = trainer(strategy, max_epochs=1)
    second.fit(model, data(32, 4))
    return result(model, second)


HABITS = [
    keep_the_best,
    find_the_learning_rate,
    override_hooks,
    accumulate_unevenly,
    monitor_learning_rates,
    learn_from_a_teacher,
    move_the_teacher,
    unfreeze_between_fits,
]


def run_habit(rank: int, number: int, folder: str) -> list[dict[str, Any]]:
    be_rank(rank)
    found = []
    for strategy in STRATEGIES:
        (own := Path(folder, strategy)).mkdir(exist_ok=True)
        found.append(HABITS[number](strategy, own))
    return found


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_a_habit_has_the_numbers_of_ddp(habit: Callable[..., Any], tmp_path: Path) -> None:
    for plain, *others in run_processes(2, run_habit, HABITS.index(habit), str(tmp_path)):
        for found in others:
            assert_close(found, plain)


def move_slowly(rank: int) -> list[dict[str, torch.Tensor]]:
    """Return how far the teacher has moved, in fp32 with DDP and with ``keep_fp32``, and in 16 bits."""
    be_rank(rank)
    found = []
    kept = [ZeroStrategy(stage=stage, keep_fp32=("teacher*",)) for stage in (1, 3)]
    for strategy in ["ddp", *kept, "zeroshard_stage_3"]:
        model, run = net(MovingTeacher, rate=1e-3), trainer(strategy, max_epochs=2, precision="bf16-mixed")
        first = {name: value.clone() for name, value in model.teacher.state_dict().items()}
        run.fit(model, data(32, 4))
        last = weights(model)
        found.append({name: last[f"teacher.{name}"] - value for name, value in first.items()})
    return found


def test_a_teacher_in_fp32_moves_as_with_ddp() -> None:
    plain, *kept, rounded = run_processes(2, move_slowly)[0]
    for name, moved in plain.items():
        for found in kept:
            assert float((found[name] - moved).norm() / moved.norm()) < 0.2
    assert any(float((rounded[name] - moved).norm() / moved.norm()) > 0.5 for name, moved in plain.items())
