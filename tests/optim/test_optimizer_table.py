"""Optimizer classes of torch, of public packages and of scripts: right or refused, never other numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bf16_products import Bf16ProductsInFp32
from plain import full_parameters, take_step
from ranks import run_threads
from rules import Lamb, ScriptMuon
from torch import nn
from transformers.optimization import Adafactor as HuggingFaceAdafactor
from zoo import built

import zeroshard
from zeroshard.optim import sharded_optimizer
from zeroshard.optim.elementwise_check import find_whole_param_groups

po = pytest.importorskip("pytorch_optimizer", reason="in the extra test-nightly")

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (11, 6),
    "first": (8, 6),
    "bias": (8,),
    "second": (6, 8),
    "convolution": (4, 3, 2, 2),
    "scale": (1,),
}
STEPS, WORLD = 8, 2


class Distance(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, factors: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (factors * (self.weight - target).square()).sum()


class Model(nn.Module):
    """The gradient of each element depends on that element alone, so all runs have gradients of the same bits."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.add_module(name, Distance(shape))

    def forward(self, batch: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        return torch.stack([module(*batch[name]) for name, module in self.named_children()]).sum()


def make_batch(seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.rand(shape, generator=generator) + 0.1, torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }


MODEL = built(Model)
BATCHES = [[make_batch(WORLD * step + rank) for rank in range(WORLD)] for step in range(STEPS)]


# ----------------------------------------------------------------------------------------------- copied into a script


class ClipsGlobally(torch.optim.SGD):
    """Clips by the norm of all gradients, inside the optimizer."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.5)
        return super().step(closure)


class SharpnessAware(torch.optim.SGD):
    """Goes to the worst point nearby, and steps with the gradient there."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError(CLOSURE)
        return super().step(closure)


class NoiseAfterSteps(torch.optim.SGD):
    """Adds noise, from step 500 on."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.count > 500:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad += torch.randn_like(p)
        return super().step(closure)


# ---------------------------------------------------------------------------------------------------------- the table

Make = Callable[[nn.Module], torch.optim.Optimizer]


def of_params(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **options)


def of_matrices(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    return lambda model: kind([p for p in model.parameters() if p.ndim == 2], **options)


def of_groups(kind: Callable[..., torch.optim.Optimizer], group: dict[str, Any], rest: dict[str, Any]) -> Make:
    """Matrices in a group with ``group``'s options, all others in one with ``rest``'s."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        matrices, others = (
            [p for p in model.parameters() if (p.ndim == 2) is is_matrix] for is_matrix in (True, False)
        )
        return kind([{"params": matrices, **group}, {"params": others, **rest}])

    return make


@dataclass
class Row:
    """What is expected of a class: how it is updated, or why it is refused."""

    make: Make
    expected: str  # elementwise, whole, mixed (a group of each), or the reason in ERRORS
    tolerance: float = 1e-6  # relative; 1e-3 if the rule computes in bf16


TOGETHER, RANDOM, CLOSURE = "reads several parameters at once", "draws random numbers", "needs a closure"
SPARSE, NO_PARAMETER = "needs sparse gradients", "keeps states that belong to no parameter"
WRAPS, FAILS = "holds another optimizer", "does not step the trial's tensors"
ERRORS = {  # what the error says
    TOGETHER: "reads more than one parameter at a time",
    RANDOM: "draws random numbers",
    CLOSURE: "[Cc]losure|evaluates the loss itself",
    SPARSE: "needs sparse gradients",
    NO_PARAMETER: r"which is not one of its parameters|its state_dict\(\) also has",
    WRAPS: r"holds a \w+, whose parameters it would still use",
    FAILS: r"step\(\) raises|steps changed nothing|infinite or NaN",
}
PROJECTED = {"rank": 2, "update_proj_gap": 3, "scale": 1.0, "projection_type": "std"}
muon_groups = partial(of_groups, group={"use_muon": True}, rest={"use_muon": False})

TABLE: dict[str, Row] = {
    "torch.optim.SGD": Row(of_params(torch.optim.SGD, lr=0.1, momentum=0.9), "elementwise"),
    "torch.optim.Adam": Row(of_params(torch.optim.Adam), "elementwise"),
    "torch.optim.AdamW": Row(of_params(torch.optim.AdamW, amsgrad=True), "elementwise"),
    "torch.optim.NAdam": Row(of_params(torch.optim.NAdam), "elementwise"),
    "torch.optim.RAdam": Row(of_params(torch.optim.RAdam), "elementwise"),
    "torch.optim.Adamax": Row(of_params(torch.optim.Adamax), "elementwise"),
    "torch.optim.Adagrad": Row(of_params(torch.optim.Adagrad), "elementwise"),
    "torch.optim.Adadelta": Row(of_params(torch.optim.Adadelta), "elementwise"),
    "torch.optim.ASGD": Row(of_params(torch.optim.ASGD, t0=2), "elementwise"),
    "torch.optim.RMSprop": Row(of_params(torch.optim.RMSprop, centered=True), "elementwise"),
    "torch.optim.Rprop": Row(of_params(torch.optim.Rprop), "elementwise"),
    "torch.optim.Adafactor": Row(of_params(torch.optim.Adafactor), "whole"),
    "torch.optim.Muon": Row(of_matrices(torch.optim.Muon, lr=0.02), "whole", 1e-3),
    "torch.optim.LBFGS": Row(of_params(torch.optim.LBFGS), CLOSURE),
    "torch.optim.SparseAdam": Row(of_params(torch.optim.SparseAdam), SPARSE),
    "transformers.Adafactor": Row(of_params(HuggingFaceAdafactor), "whole"),
    "a script's Muon": Row(of_params(ScriptMuon), "whole"),
    "a script's LAMB": Row(of_params(Lamb), "whole"),
    "a script's global clipping": Row(of_params(ClipsGlobally, lr=0.1), TOGETHER),
    "a script's SAM": Row(of_params(SharpnessAware, lr=0.1), CLOSURE),
    "a script's late noise": Row(of_params(NoiseAfterSteps), RANDOM),
    "pytorch_optimizer.A2Grad": Row(of_params(po.A2Grad, lr=0.01), "whole"),
    "pytorch_optimizer.AdaBelief": Row(of_params(po.AdaBelief), "elementwise"),
    "pytorch_optimizer.AdaGC": Row(of_params(po.AdaGC), TOGETHER),
    "pytorch_optimizer.AdaHessian": Row(of_params(po.AdaHessian), RANDOM),
    "pytorch_optimizer.Adai": Row(of_params(po.Adai), TOGETHER),
    "pytorch_optimizer.Adalite": Row(of_params(po.Adalite), "whole"),
    "pytorch_optimizer.AdamP": Row(of_params(po.AdamP), "whole"),
    "pytorch_optimizer.Adan": Row(of_params(po.Adan), "elementwise"),
    "pytorch_optimizer.AdaMuon": Row(muon_groups(po.AdaMuon), "mixed", 1e-3),
    "pytorch_optimizer.AdEMAMix": Row(of_params(po.AdEMAMix), "elementwise"),
    "pytorch_optimizer.ADOPT": Row(of_params(po.ADOPT), "elementwise"),
    "pytorch_optimizer.AggMo": Row(of_params(po.AggMo), "whole"),
    "pytorch_optimizer.AliG": Row(of_params(po.AliG), CLOSURE),
    "pytorch_optimizer.APOLLO": Row(of_groups(po.APOLLO, {**PROJECTED, "scale_type": "tensor"}, {}), RANDOM),
    "pytorch_optimizer.ASGD": Row(of_params(po.ASGD), TOGETHER),
    "pytorch_optimizer.CAME": Row(of_params(po.CAME), "whole"),
    "pytorch_optimizer.Conda": Row(of_groups(po.Conda, {"update_proj_gap": 3, "scale": 1.0}, {}), "whole"),
    "pytorch_optimizer.DAdaptAdam": Row(of_params(po.DAdaptAdam), TOGETHER),
    "pytorch_optimizer.DAdaptLion": Row(of_params(po.DAdaptLion), TOGETHER),
    "pytorch_optimizer.DAdaptSGD": Row(of_params(po.DAdaptSGD), TOGETHER),
    "pytorch_optimizer.EmoNavi": Row(of_params(po.EmoNavi), NO_PARAMETER),
    "pytorch_optimizer.Fromage": Row(of_params(po.Fromage), "whole"),
    "pytorch_optimizer.GaLore": Row(of_groups(po.GaLore, PROJECTED, {}), "mixed"),
    "pytorch_optimizer.Grams": Row(of_params(po.Grams), "elementwise"),
    "pytorch_optimizer.Gravity": Row(of_params(po.Gravity), RANDOM),
    "pytorch_optimizer.Kron": Row(of_params(po.Kron), RANDOM),
    "pytorch_optimizer.Lamb": Row(of_params(po.Lamb), "whole"),
    "pytorch_optimizer.LARS": Row(of_params(po.LARS), "whole"),
    "pytorch_optimizer.Lion": Row(of_params(po.Lion), "elementwise"),
    "pytorch_optimizer.Lookahead": Row(lambda m: po.Lookahead(po.AdamW(m.parameters()), k=3), WRAPS),
    "pytorch_optimizer.LoRARite": Row(of_params(po.LoRARite), FAILS),
    "pytorch_optimizer.MADGRAD": Row(of_params(po.MADGRAD), NO_PARAMETER),
    "pytorch_optimizer.MARS": Row(of_params(po.MARS), "whole"),
    "pytorch_optimizer.Muon": Row(muon_groups(po.Muon), "mixed", 1e-3),
    "pytorch_optimizer.Nero": Row(of_params(po.Nero), "whole"),
    "pytorch_optimizer.NovoGrad": Row(of_params(po.NovoGrad), "whole"),
    "pytorch_optimizer.PID": Row(of_params(po.PID), "elementwise"),
    "pytorch_optimizer.Prodigy": Row(of_params(po.Prodigy), TOGETHER),
    "pytorch_optimizer.Ranger": Row(of_params(po.Ranger, k=3), "whole"),
    "pytorch_optimizer.SaRA": Row(of_params(po.SaRA), FAILS),
    "pytorch_optimizer.ScalableShampoo": Row(of_params(po.ScalableShampoo, preconditioning_compute_steps=3), RANDOM),
    "pytorch_optimizer.ScalableShampoo(use_svd=True)": Row(
        of_params(po.ScalableShampoo, preconditioning_compute_steps=3, start_preconditioning_step=3, use_svd=True),
        "whole",
    ),
    "pytorch_optimizer.ScheduleFreeAdamW": Row(of_params(po.ScheduleFreeAdamW), "elementwise"),
    "pytorch_optimizer.ScheduleFreeSGD": Row(of_params(po.ScheduleFreeSGD), "elementwise"),
    "pytorch_optimizer.SCION": Row(of_params(po.SCION), "whole"),
    "pytorch_optimizer.Shampoo": Row(of_params(po.Shampoo, preconditioning_compute_steps=3), "whole"),
    "pytorch_optimizer.SM3": Row(of_params(po.SM3), "whole"),
    "pytorch_optimizer.SOAP": Row(of_params(po.SOAP, precondition_frequency=3), "whole"),
    "pytorch_optimizer.SophiaH": Row(of_params(po.SophiaH), RANDOM),
    "pytorch_optimizer.SPlus": Row(of_params(po.SPlus, inverse_steps=3), "whole"),
    "pytorch_optimizer.StableAdamW": Row(of_params(po.StableAdamW), "whole"),
    "pytorch_optimizer.StableSPAM": Row(of_params(po.StableSPAM), NO_PARAMETER),
    "pytorch_optimizer.Yogi": Row(of_params(po.Yogi), "elementwise"),
}
OUTCOMES = ("elementwise", "whole", "mixed")


def train(model: Any, optimizer: Any, ranks: range) -> None:
    if hasattr(optimizer, "train"):
        optimizer.train()
    for batches in BATCHES:
        for rank in ranks:
            (model(batches[rank]) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(actual: Any, expected: Any, tolerance: float, where: str) -> None:
    """Compare what optimizers store: tensors, numbers, containers and objects that hold these."""
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape, where
        scale = float(expected.abs().max()) if expected.numel() and expected.is_floating_point() else 0.0
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=tolerance * scale, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_equal(actual[key], expected[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_equal(*pair, tolerance, f"{where}[{index}]")
    elif hasattr(expected, "__dict__"):
        assert_equal(vars(actual), vars(expected), tolerance, where)
    else:
        assert actual == (pytest.approx(expected, rel=tolerance) if isinstance(expected, float) else expected), where


def without_empty(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Drop states without entries: a class may have looked one up and stored nothing."""
    return {**state_dict, "state": {key: state for key, state in state_dict["state"].items() if state}}


def test_the_table_is_in_the_documentation() -> None:
    """Print the rows that should be there, if they are not."""
    found = {"elementwise": "right, on flat slices", "whole": "right, on whole parameters", "mixed": "right, on both"}
    rows = []
    for expected in (*OUTCOMES, *ERRORS):
        names = [name for name, row in TABLE.items() if row.expected == expected]
        by_package: dict[str, list[str]] = {}
        for name in names:
            package, _, kind = name.rpartition(".")
            by_package.setdefault(package, []).append(f"`{kind}`" if package else kind)
        listed = "; ".join(
            ", ".join(kinds) if not key else f"{key}: {', '.join(kinds)}" for key, kinds in by_package.items()
        )
        rows.append(f"| {found.get(expected, f'rejected: {expected}')} | {listed} |")
    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    assert len(TABLE) >= 40 and all(row in text for row in rows), "\n".join(rows)


@pytest.mark.guarantee("Any optimizer class")
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.usefixtures("tried_once")
def test_a_class_is_right_or_refused(name: str) -> None:
    row = TABLE[name]
    warnings.simplefilter("ignore")
    model = copy.deepcopy(MODEL)
    optimizer = row.make(model)
    if row.expected not in OUTCOMES:
        with pytest.raises(ValueError, match=ERRORS[row.expected]):
            find_whole_param_groups(optimizer, None, None)
        return
    with Bf16ProductsInFp32():  # a trial has matrices large enough to take half a minute otherwise
        needs_whole = sharded_optimizer.find_whole_param_groups(optimizer, None, None)
    found = "mixed" if len(set(needs_whole)) > 1 else "whole" if needs_whole[0] else "elementwise"
    assert found == row.expected
    train(model, optimizer, range(WORLD))
    expected, states = dict(model.named_parameters()), without_empty(optimizer.state_dict())

    def body(rank: int) -> tuple[Any, Any]:
        ours = copy.deepcopy(MODEL)
        ours, sharded = zeroshard.shard(ours, row.make(ours), stage=2)
        train(ours, sharded, range(rank, rank + 1))
        return full_parameters(ours), without_empty(sharded.state_dict())

    for parameters, sharded_states in run_threads(WORLD, body):
        for param_name, parameter in expected.items():
            assert_equal(parameters[param_name], parameter.detach(), row.tolerance, param_name)
        assert_equal(sharded_states, states, row.tolerance, "state_dict()")


@pytest.mark.parametrize(
    "name",
    [
        *("transformers.Adafactor", "a script's LAMB", "pytorch_optimizer.AggMo", "pytorch_optimizer.CAME"),
        *("pytorch_optimizer.ScheduleFreeAdamW", "pytorch_optimizer.Shampoo", "pytorch_optimizer.SOAP"),
        "pytorch_optimizer.SPlus",
    ],
)
def test_a_run_resumed_in_another_layout_has_the_same_bits(name: str, tmp_path: Path) -> None:
    """Lists, numbers of groups, and matrices that are stored column by column are restored as they were."""
    row = TABLE[name]
    warnings.simplefilter("ignore")

    def step(model: Any, optimizer: Any, first: int, last: int) -> None:
        if hasattr(optimizer, "train"):
            optimizer.train()
        for batches in BATCHES[first:last]:
            # the same on all ranks, so 2 and 4 ranks have gradients of the same bits
            take_step(optimizer, model(batches[0]))

    def body(rank: int, stage: int, is_load: bool) -> Any:
        model = copy.deepcopy(MODEL)
        is_elementwise = row.expected == "elementwise"  # do not try again
        model, optimizer = zeroshard.shard(model, row.make(model), stage=stage, elementwise=is_elementwise)
        if is_load:
            zeroshard.load(tmp_path / "a", model, optimizer)
        else:
            step(model, optimizer, 0, 4)
            zeroshard.save(tmp_path / "a", model, optimizer)
        step(model, optimizer, 4, STEPS)
        return full_parameters(model), without_empty(optimizer.state_dict())

    parameters, states = run_threads(2, body, 2, False)[0]
    resumed, resumed_states = run_threads(4, body, 3, True)[0]
    assert_equal(resumed, parameters, 0.0, "parameters")
    assert_equal(resumed_states, states, 0.0, "state_dict()")
