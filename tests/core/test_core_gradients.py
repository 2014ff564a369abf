"""parameter.grad reads, writes and is clipped as in the plain run, in every stage."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import plain
import pytest
import torch
import torch.distributed as dist
from core_runs import PARTITIONS, Habit, api, assert_same, in_processes, new_core, no_sync, on_ranks
from core_runs import tested_core as tested_core
from pairs import at_stages, every_stage, pairwise
from plain import batches, net_loss, sharded, shares
from torch import nn
from torch.nn import functional as F
from zoo import InOrder, TokenNet, built, make_net

NET = make_net()


INF = float("inf")
CLIPPED = "F0 B0 H S Z F0 B0 F1 B1 H S Z"
CLIPS = {  # what each returns are the norms
    "optimizer": "[clip(0.05)]",
    "torch": "[utils.clip_grad_norm_(ps, 0.05, kind)]",
    "parts": "[utils.clip_grad_norm_(part, 0.05, kind) for part in parts]",
    "total": "[total := utils.get_total_norm(gs, kind), utils.clip_grads_with_norm_(ps, 0.05, total)][:1]",
    "norm, value, norm": "[utils.clip_grad_norm_(ps, 0.05, kind), utils.clip_grad_value_(ps, 3e-3), clip(0.02)][::2]",
}


def clipping(way: str, kind: float = 2.0) -> Habit:
    def habit(model: Any, optimizer: Any) -> list[float]:
        def clip(max_norm: float) -> torch.Tensor:
            clip = optimizer.clip_grad_norm_ if api.is_sharded(model) else partial(nn.utils.clip_grad_norm_, ps)
            return clip(max_norm, norm_type=kind)

        ps = list(model.parameters())
        parts = [group["params"] for group in optimizer.param_groups] + [list(b.parameters()) for b in model.blocks]
        names = {"clip": clip, "ps": ps, "gs": [p.grad for p in ps if p.grad is not None], "parts": parts, "kind": kind}
        return [norm.item() for norm in eval(CLIPS[way], {"utils": nn.utils, **names})]

    return habit


# What loops do with gradients between backward and step. `ps` are all parameters, `w` a weight, `head` a layer.
HABITS = {
    "scale": "for p in ps: p.grad *= 0.5; p.grad += 0.25; p.grad /= 2",
    "assign": "w.grad = w.grad * 0.5; head.bias.grad = torch.linspace(0, 1, 11); ps[2].grad = zeros_like(ps[2].grad)",
    "assign after None": "w.grad = head.bias.grad = None; head.bias.grad = torch.linspace(0, 1, 11)",
    "assign clones": "for p in ps: g = p.grad.clone(); p.grad = None; p.grad = g.clamp(-0.01, 0.01); g.zero_()",
    "swap": "kept = v.grad.clone(); v.grad = w.grad.clone(); w.grad = kept",
    "in place": "for p in ps: p.grad.mul_(2.0).clamp_(-0.05, 0.05); p.grad.addcmul_(p.grad, ones(()), value=0.5)",
    "copy": "for p in ps: p.grad.copy_(p.grad.detach().clone().neg()); p.grad.nan_to_num_()",
    "operands": "w.grad.zero_(); head.weight.grad.add_(torch.arange(77.0).view(11, 7), alpha=1e-3)\n"
    "head.bias.grad.masked_fill_(torch.arange(11) % 2 == 0, 0.125); w.grad.sub_(w.grad.mean(0, keepdim=True))",
    "norm": "n = torch.stack([p.grad.norm() for p in ps]).norm() + 1e-3\nfor p in ps: p.grad.div_(n)",
    "foreach": "gs = [p.grad for p in ps]; n = torch._foreach_norm(gs); torch._foreach_mul_(gs, 0.5 + n[0].item())",
    "data in place": "for p in ps: p.grad.data.mul_(0.5); p.grad.detach().add_(0.125)",
    "data": "for p in ps: p.grad.data = p.grad.data * 0.5",
    "vector": "gs = [p.grad for p in ps]; utils.vector_to_parameters(utils.parameters_to_vector(gs) * 0.5, gs)",
    "rows": "w.grad[:3] = 0; w.grad[5] *= 2; ps[2].grad[torch.tensor([0, 2])] = 0.125",
    "views": "w.grad.view(-1)[2:9].zero_(); w.grad.t()[0].add_(1); head.weight.grad.select(1, 3).mul_(0.5)",
    "views of views": "part = head.weight.grad[1:][1:]; part.clamp_(0, 1); head.weight.grad.fill_diagonal_(0.5)",
    "out": "torch.mul(ones(()) / 2, w.grad, out=w.grad); torch.neg(head.weight.grad[0], out=head.weight.grad[0])",
}
OF_THE_NEW_CORE = ("data", "vector", "rows", "views", "views of views", "out")


def weight(model: Any) -> nn.Parameter:
    return model.blocks[1].down.weight


def changing(habit: str) -> Habit:
    def run(model: Any, optimizer: Any) -> None:
        ps = [p for p in model.parameters() if p.grad is not None]
        names = {"ps": ps, "w": weight(model), "v": model.blocks[0].down.weight, "head": model.head, "utils": nn.utils}
        exec(HABITS[habit], {"torch": torch, "ones": torch.ones, "zeros_like": torch.zeros_like, **names})

    return run


def norms(model: Any, optimizer: Any) -> list[float]:
    return [p.grad.norm().item() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("habit", [pytest.param(h, marks=new_core if h in OF_THE_NEW_CORE else ()) for h in HABITS])
def test_gradients_are_changed_as_in_the_plain_run(habit: str) -> None:
    program = "F0 B0 H S Z F0 B0 H F1 B1 H S z F0 B0 H F1 B1 S F0 B0 H S Z"
    assert_same(NET, program, plain.adamw, batches(1, rows=24), habit=changing(habit))


@pytest.mark.parametrize("habit", ["scale", "norm", "assign", pytest.param("rows", marks=new_core)])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_gradients_are_changed_in_no_sync_and_then_clipped(precision: str | None, habit: str) -> None:
    """What is read there is the mean of all ranks' sums until then."""

    def look_and_change(model: Any, optimizer: Any) -> list[float]:
        with no_sync(model):
            found = norms(model, optimizer)
            changing(habit)(model, optimizer)
        return found

    if precision and habit == "assign":
        pytest.skip("what is assigned has the dtype of the gradient")
    assert_same(NET, "F0 N0 H F1 N1 H F2 B2 C S Z", habit=look_and_change, precision=precision)


@pytest.mark.parametrize("world", [1, 3])
@every_stage
def test_gradients_read_as_full_ones(stage: int, world: int) -> None:
    plain_net, close = copy.deepcopy(NET), plain.assert_close
    net_loss(plain_net, plain.ONE_BATCH).backward()

    def body(rank: int) -> None:
        model, optimizer = sharded(NET, plain.sgd, stage=stage, timeout=20)
        net_loss(model, plain.split(plain.ONE_BATCH, rank, world)).backward()
        for (name, parameter), other in zip(model.named_parameters(), plain_net.parameters(), strict=True):
            gradient, wanted, full = parameter.grad, other.grad, api.full_gradient(model, name)
            assert gradient is not None and wanted is not None
            assert (gradient.shape, gradient.dtype, gradient.requires_grad) == (wanted.shape, wanted.dtype, False)
            close({"clone": gradient.clone(), "full": full}, {"clone": wanted, "full": wanted})
            close({"norm": gradient.norm(), "double": 2 * gradient}, {"norm": wanted.norm(), "double": 2 * wanted})
            assert torch.equal(copy.deepcopy(gradient), full)
            if wanted.dim() > 1 and wanted.numel():
                close({"row": gradient[1] + 0, "t": gradient.t() + 0}, {"row": wanted[1], "t": wanted.t()})
                assert gradient.tolist() == full.tolist()
                assert (gradient.detach().numpy() == full.numpy()).all()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())

    on_ranks(world, body)


def loss_of_a_layer(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.blocks[1].up(x).square().mean()


def loss_of_a_function(model: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(F.linear(x, model.blocks[1].up.weight), weight(model)).square().mean()


LOOKS = {"optimizer": clipping("optimizer"), "torch": clipping("torch"), "read": norms, "change": changing("scale")}


@pytest.mark.parametrize("look", [*LOOKS, "step"])
@pytest.mark.parametrize("loss_of", [loss_of_a_layer, loss_of_a_function])
def test_gradients_of_a_backward_that_no_hook_saw_are_those_of_all_ranks(loss_of: Any, look: str) -> None:
    program = "F0 B0 S Z F0 B0 F1 B1 S Z" if look == "step" else "F0 B0 H S Z F0 B0 F1 B1 H S Z"
    options: dict[str, Any] = {"loss_of": loss_of, "habit": LOOKS.get(look), "stages": (0, 1, 2)}
    assert_same(NET, program, data=plain.numbers(2, 24, 7), **options)


@pytest.mark.parametrize("program", ["F0 A0 S Z", "F0 A0 C S Z", "F0 A0 F1 B1 S Z"])
def test_gradients_of_autograd_grad_can_be_assigned(program: str) -> None:
    assert_same(NET, program, habit=norms)


@every_stage
def test_autograd_grad_returns_the_gradients_of_this_rank(stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer = sharded(NET, plain.sgd, stage=stage, timeout=20)
        for number, batch in enumerate(shares(batches(3), rank, 2)):
            twin = copy.deepcopy(NET)
            twin.load_state_dict(api.state_dict(model, rank=None))
            names, parameters = zip(*model.named_parameters(), strict=True)
            found = torch.autograd.grad(net_loss(model, batch), parameters)
            wanted = torch.autograd.grad(net_loss(twin, batch), list(twin.parameters()))
            plain.assert_close(dict(zip(names, found, strict=True)), dict(zip(names, wanted, strict=True)))
            assert all(parameter.grad is None for parameter in parameters)
            some = parameters[2 + number]
            net_loss(model, batch).backward(inputs=[some])
            assert [parameter is some for parameter in parameters] == [p.grad is not None for p in parameters]
            optimizer.step()
            optimizer.zero_grad()

    on_ranks(2, body)


def collectives(rank: int, stage: int) -> None:
    model, optimizer = sharded(NET, plain.sgd, stage=stage)
    net_loss(model, shares([plain.ONE_BATCH], rank, 2)[0]).backward()
    parameter = weight(model)
    gradient, full = parameter.grad, api.full_gradient(model, "blocks.1.down.weight")
    assert gradient is not None
    part, sends = torch.zeros(3), [dist.all_reduce, partial(dist.broadcast, src=0)]
    calls = [partial(send, tensor) for send in sends for tensor in (gradient, gradient.data)]
    calls += [partial(dist.reduce_scatter_tensor, part, gradient), partial(dist.all_gather_into_tensor, gradient, part)]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"blocks\.1\.down\.weight"):
            call()
        assert torch.equal(parameter.grad.clone(), full)
    optimizer.step()


@at_stages(1, 3)
def test_a_collective_over_a_gradient_raises_and_changes_nothing(stage: int) -> None:
    in_processes(2, collectives, stage)


@every_stage
def test_a_gradient_that_only_another_rank_has_made_is_there_on_all(stage: int) -> None:
    net, x = nn.Sequential(InOrder(nn.Linear(4, 4) for _ in range(2))), plain.numbers(1, 3, 4)[0]

    def body(rank: int) -> None:
        model, _ = sharded(net, plain.sgd, stage=stage, units=("0",), timeout=20)
        model[0].order = (rank,)
        model(x).sum().backward()
        for layer in model[0].blocks:
            torch.testing.assert_close(layer.weight.grad.clone(), x.sum(0).expand(4, 4) / 2)

    on_ranks(2, body)


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *((way, kind) for kind in (2.0, INF) for way in CLIPS),
        *((way, 1.0) for way in ("torch", "parts", "total")),
        *(pytest.param(way, 1.0, marks=new_core) for way in ("optimizer", "norm, value, norm")),
    ],
)
def test_norms_and_clipped_gradients_are_the_plain_runs(way: str, kind: float) -> None:
    net = built(TokenNet)  # torch knows no maximum of no elements
    assert_same(net, CLIPPED, plain.adamw_in_groups, habit=clipping(way, kind))


@pytest.mark.parametrize(("partition", "way", "stage"), pairwise(PARTITIONS, ["torch", "norm, value, norm"], (1, 2, 3)))
def test_clipping_over_both_axes_of_a_mesh(partition: str, way: str, stage: int) -> None:
    options: dict[str, Any] = {"mesh": (2, 2), "partition": partition, "stages": (stage,)}
    assert_same(NET, CLIPPED, plain.adamw_in_groups, world=4, habit=clipping(way), **options)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(
    "program",
    [
        "F0 B0 C F1 B1 S Z",
        "F0 B0 C S F1 B1 S Z",
        "F0 B0 C C S S Z",
        "F0 B0 C H S Z",
        "F0 B0 C N1 S Z",
        "F0 B0 C V S C S Z",
    ],
)
def test_what_comes_after_a_clip_finds_clipped_gradients(program: str, precision: str | None) -> None:
    """A clip leaves the multiplication to whoever reads gradients next."""
    program = program.replace("N1", "F1 N1")

    def read(model: Any, optimizer: Any) -> list[float]:
        return [parameter.grad.double().sum().item() for parameter in model.parameters() if parameter.grad is not None]

    assert_same(NET, program, plain.adamw, precision=precision, habit=None if precision else read)


@every_stage
@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_norms_that_are_not_finite(bad: float, stage: int) -> None:
    """One rank's bad element makes the norm of all ranks bad; an error is raised where it is asked for."""

    def body(rank: int) -> None:
        model, optimizer = sharded(NET, plain.sgd, stage=stage, timeout=20)
        assert optimizer.clip_grad_norm_(1.0) == 0  # of no gradients
        for kind in (0, -1, -INF, float("nan")):
            with pytest.raises(ValueError, match="norm_type is a positive number or infinity"):
                optimizer.clip_grad_norm_(1.0, kind)
        (net_loss(model, plain.ONE_BATCH) * (bad if rank == 1 else 1.0)).backward()
        with pytest.raises(RuntimeError, match="norm"):
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        assert not optimizer.clip_grad_norm_(1.0).isfinite()
        optimizer.zero_grad()
        for batch in batches(2):
            net_loss(model, batch).backward()
            assert optimizer.clip_grad_norm_(1.0).isfinite()
            optimizer.step()
            optimizer.zero_grad()

    on_ranks(2, body)
