"""Partitioned parameters: true to the eye, safe to touch, whole inside gathered()."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import at_stages, every_stage
from plain import (
    ONE_BATCH,
    adamw,
    assert_close,
    assert_equal,
    assert_same_training,
    batches,
    copied,
    full_gradients,
    full_parameters,
    net_loss,
    run_plain,
    sharded,
    split,
    token_step,
    train_step,
    train_steps,
)
from ranks import run_processes, run_threads
from torch import nn
from torch.distributed.algorithms.join import Join
from zoo import make_net

import zeroshard

NAME = "blocks.1.up.weight"
STAGES = [0, 1, 2, 3]


def shard(model: nn.Module, stage: int = 3, **options):
    return sharded(model, adamw, stage=stage, **options)


# ------------------------------------------------------------------------------------- what is true at rest


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("trained", [False, True])
def test_at_rest_metadata_is_that_of_the_plain_parameter(precision: str | None, trained: bool) -> None:
    plain = make_net()
    plain.head.bias.requires_grad_(False)

    def body(rank: int):
        model, optimizer = shard(plain, precision=precision)
        if trained:
            train_step(model, optimizer, split(ONE_BATCH, rank, 2))
        found = {}
        for name, p in model.named_parameters():
            assert isinstance(p, nn.Parameter)
            assert isinstance(p, torch.Tensor)
            assert p.size() == p.shape
            assert len(p) == p.shape[0]
            assert p.element_size() == p.dtype.itemsize
            assert p.is_leaf
            assert not p.is_meta
            assert p in {p}
            found[name] = (tuple(p.shape), p.numel(), p.dtype, p.device, p.requires_grad, p.dim(), p.stride(), p.ndim)
        return found

    dtype = torch.bfloat16 if precision else torch.float32
    wanted = {
        name: (tuple(p.shape), p.numel(), dtype, p.device, p.requires_grad, p.dim(), p.stride(), p.ndim)
        for name, p in plain.named_parameters()
    }
    for found in run_threads(2, body):
        assert found == wanted


def test_parameters_stay_the_same_objects_through_training() -> None:
    plain = make_net()

    def body(rank: int):
        model = copy.deepcopy(plain)
        before = dict(model.named_parameters())
        model, optimizer = zeroshard.shard(model, adamw(model), stage=3)
        for batch in batches(2):
            train_step(model, optimizer, split(batch, rank, 2))
        return all(after is before[name] for name, after in model.named_parameters())

    assert run_threads(2, body) == [True, True]


# ---------------------------------------------------------------------------- what is refused, by name of the way


def assign_item(p):
    p[0] = 1.0


def assign_data(p):
    p.data = torch.zeros(p.shape)


def augmented(p):
    with torch.no_grad():
        p += 1


def in_place(p):
    with torch.no_grad():
        p.add_(1)


def set_storage(p):
    with torch.no_grad():
        p.set_(torch.zeros(1))


def save(p):
    torch.save(p, io.BytesIO())


def out_argument(p):
    with torch.no_grad():
        torch.add(torch.ones(p.shape), 1, out=p)


def numpy_asarray(p):
    import numpy

    numpy.asarray(p)


WAYS = {
    "add": lambda p: p + 1,
    "reflected add": lambda p: 1 + p,
    "matmul": lambda p: torch.ones(1, p.shape[0]) @ p,
    "linear": lambda p: F.linear(torch.ones(1, p.shape[1]), p),
    "equals": lambda p: p == 0,
    "torch.equal": lambda p: torch.equal(p, p),
    "augmented assignment": augmented,
    "in-place method": in_place,
    "copy_": lambda p: p.detach().copy_(torch.zeros(p.shape)),
    "init": lambda p: nn.init.zeros_(p),
    "out=": out_argument,
    "assign item": assign_item,
    "read data": lambda p: p.data,
    "assign data": assign_data,
    "set_": set_storage,
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p[0, 0].item(),
    "numpy": lambda p: p.numpy(force=True),
    "asarray": numpy_asarray,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "torch.save": save,
    "pickle": pickle.dumps,
    "foreach norm": lambda p: torch._foreach_norm([p, p]),
    "foreach add": lambda p: torch._foreach_add([p], 1.0),
    "index": lambda p: p[0],
    "mask": lambda p: p[torch.ones(p.shape, dtype=torch.bool)],
    "iterate": lambda p: list(p),
    "unpack": lambda p: [*p],
    "contains": lambda p: 3.0 in p,
    "bool": lambda p: bool(p),
    "float": lambda p: float(p),
    "cpu": lambda p: p.cpu(),
    "to": lambda p: p.to(torch.float64),
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.T,
    "sum": lambda p: p.sum(),
    "norm": lambda p: torch.linalg.norm(p),
    "stack": lambda p: torch.stack([p, p]),
    "cat in a tuple": lambda p: torch.cat((p, torch.zeros(p.shape))),
    "einsum": lambda p: torch.einsum("ij->", p),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "data_ptr": lambda p: p.data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "storage": lambda p: p.storage(),
    "share_memory": lambda p: p.share_memory_(),
    "from_dlpack": lambda p: torch.from_dlpack(p),
    "torch.tensor of a list": lambda p: torch.tensor([p, p]),
    "new parameter": lambda p: nn.Parameter(p),
    "isnan": lambda p: p.isnan().any(),
    "print options": lambda p: torch._tensor_str._str(p),
    "autograd.grad": lambda p: torch.autograd.grad((p * 2).sum(), p),
}


def touch(rank: int) -> dict[str, tuple[str, str]]:
    """What comes of each way."""
    outcomes = {}
    for way, use in WAYS.items():
        model, optimizer = shard(make_net())
        parameter = model.get_parameter(NAME)
        try:
            result = use(parameter)
            outcomes[way] = "returned", repr(type(result))
        except Exception as error:
            outcomes[way] = type(error).__name__, str(error)
        train_step(model, optimizer, split(ONE_BATCH, rank, 2))  # and nothing is broken
    return outcomes


@pytest.fixture(scope="module")
def touched() -> list[dict[str, tuple[str, str]]]:
    """By rank. In processes: a crash is a failure of these tests alone, and its stack says which way it was."""
    return run_processes(2, touch)


@pytest.mark.parametrize("way", WAYS)
def test_using_absent_values_names_the_parameter_and_the_remedy(
    way: str, touched: list[dict[str, tuple[str, str]]]
) -> None:
    for kind, text in (outcomes[way] for outcomes in touched):
        assert kind == "RuntimeError", text
        assert NAME in text
        assert "zeroshard.gathered" in text


UNASKED = {
    "dlpack": lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p.requires_grad_(False))),
    "torch.tensor": lambda p: torch.tensor(p),
    "vmap": lambda p: torch.vmap(lambda row: row.sum())(p),
}


def read_unasked(rank: int, way: str) -> bool:
    model, optimizer = shard(make_net())
    train_step(model, optimizer, split(ONE_BATCH, rank, 2))
    values = UNASKED[way](model.get_parameter(NAME))
    model.get_parameter(NAME).requires_grad_(True)
    train_step(model, optimizer, split(ONE_BATCH, rank, 2))  # and nothing is broken
    return bool(values.isnan().all())


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("way", UNASKED)
def test_functions_that_never_ask_a_tensors_class_read_nan_and_do_not_crash(way: str) -> None:
    assert run_processes(2, read_unasked, way) == [True, True]


@pytest.mark.parametrize("show", [repr, str, "{}".format, "{!r}".format])
def test_showing_an_absent_parameter_tells_its_name_and_shape(show) -> None:
    def body(rank: int):
        model, _ = shard(make_net())
        return show(model.get_parameter(NAME)), show(model)

    for parameter, model in run_threads(2, body):
        assert NAME in parameter
        assert "(17, 7)" in parameter
        assert "Linear(in_features=7, out_features=17, bias=True)" in model


@pytest.mark.parametrize("way", ["deepcopy", "state_dict", "save", "functional_call"])
def test_using_a_whole_partitioned_model_says_what_to_do(way: str) -> None:
    ways = {
        "deepcopy": copy.deepcopy,
        "state_dict": lambda model: model.state_dict(),
        "save": lambda model: torch.save(model.state_dict(), io.BytesIO()),
        "functional_call": lambda model: torch.nn.utils.parameters_to_vector(model.parameters()),
    }

    def body(rank: int):
        model, _ = shard(make_net())
        with pytest.raises(RuntimeError) as caught:
            ways[way](model)
        return str(caught.value)

    for text in run_threads(2, body):
        assert "zeroshard.gathered" in text


# ---------------------------------------------------------------------- what would leave the model wrong, all stages


def assign(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: torch.zeros(p.shape) for name, p in make_net().state_dict().items()}, assign=True)


def post_hook(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.get_parameter(NAME).register_post_accumulate_grad_hook(lambda p: None)


WRONG = {  # a call, and what its error says
    "half": (lambda model, _: model.half(), "'temperature' is sharded as float32 on cpu.* float16 on cpu"),
    "a module's dtype": (lambda model, _: model.blocks[1].to(torch.float64), "'blocks.1.norm.weight' .* float64"),
    "to_empty": (lambda model, _: model.to_empty(device="cpu"), "would replace it by a new tensor"),
    "share_memory": (lambda model, _: model.share_memory(), "cannot be shared with other processes"),
    "share one": (lambda model, _: model.get_parameter(NAME).share_memory_(), f"{NAME}.* cannot be shared"),
    "post-accumulate-grad hook": (post_hook, f"{NAME}.* cannot be stepped inside backward"),
    "save model": (lambda model, _: torch.save(model, io.BytesIO()), r"zeroshard\.save\(path, model"),
    "pickle optimizer": (lambda _, optimizer: pickle.dumps(optimizer), r"zeroshard\.save\(path, model"),
    "copy optimizer": (lambda _, optimizer: copy.deepcopy(optimizer), r"deepcopy\(optimizer\.state_dict"),
    "join": (lambda model, _: Join([model]), "same number of batches"),
    "join optimizer": (lambda _, optimizer: Join([optimizer]), "same number of batches"),
    "assign": (assign, r"load_state_dict\(assign=True\) would replace"),
}


@every_stage
def test_calls_that_would_leave_the_model_wrong_are_refused_and_change_nothing(stage: int) -> None:
    def body(rank: int):
        model, optimizer = shard(make_net(), stage)
        for call, message in WRONG.values():
            train_step(model, optimizer, split(ONE_BATCH, rank, 2))
            with pytest.raises(RuntimeError, match=message):
                call(model, optimizer)
        train_step(model, optimizer, split(ONE_BATCH, rank, 2))

    run_threads(2, body)


@every_stage
def test_conversions_that_change_nothing_do_nothing(stage: int) -> None:
    plain = make_net()
    wanted = run_plain(plain, adamw, batches(2))

    def body(rank: int):
        model, optimizer = shard(plain, stage)
        for batch in batches(2):
            assert model.to("cpu").cpu().float().to(torch.float32) is model
            token_step(model, split(batch, rank, 2))
            model.cpu()  # with gradients
            optimizer.step()
            optimizer.zero_grad()
        values = full_parameters(model)
        assert {p.dtype for p in zeroshard.unwrap(model).half().parameters()} == {torch.float16}
        return values

    for values in run_threads(2, body):
        assert_close(values, wanted)


def replace_weight(model: nn.Module) -> None:
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(17, 7))


def replace_module(model: nn.Module) -> None:
    model.blocks[1].up = nn.Linear(7, 17)


def add_adapter(model: nn.Module) -> None:
    model.blocks[1].up.adapter = nn.Linear(7, 7)


@every_stage
@pytest.mark.parametrize("change", [replace_weight, replace_module, add_adapter])
def test_a_parameter_that_nobody_would_train_is_refused_by_name(change, stage: int) -> None:
    def body(rank: int):
        model, optimizer = shard(make_net(), stage)
        train_step(model, optimizer, split(ONE_BATCH, rank, 2))
        change(model)
        with pytest.raises(RuntimeError, match=r"'blocks\.1\.up\..*weight' is another nn\.Parameter"):
            net_loss(model, split(ONE_BATCH, rank, 2))

    run_threads(2, body)


def test_modules_around_the_same_parameters_are_no_change() -> None:
    def body(rank: int):
        model, optimizer = shard(make_net())
        model.blocks[1] = nn.Sequential(model.blocks[1])  # as torch.compile(model.blocks[1]) would
        own = {name: nn.Parameter(torch.zeros(p.shape)) for name, p in model.named_parameters()}
        assert torch.func.functional_call(model, own, (ONE_BATCH,)).abs().max() == 0
        return train_step(model, optimizer, split(ONE_BATCH, rank, 2))

    run_threads(2, body)


class Scale(nn.Parameter):
    """A user's own class of parameter."""


class Edits(nn.Module):
    """Changes its weight in forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, Scale(torch.arange(1.0, 26).view(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.how == "data":
                self.weight.data.clamp_(max=0.5)
            elif self.how == "in place":
                self.weight.clamp_(max=0.5)
            elif self.how == "swapped rows":
                self.weight.copy_(self.weight.flip(0))
            elif self.how == "set to itself":
                self.weight.set_(self.weight)
        return x @ self.weight


@pytest.mark.parametrize("how", ["data", "in place", "swapped rows"])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"offload": "host"}])
def test_a_forward_that_changes_partitioned_weights_is_refused(how: str, options) -> None:
    def body(rank: int):
        model, _ = shard(nn.Sequential(*[nn.Sequential(Edits("")) for _ in range(2)]), **options)
        model(torch.ones(2, 5)).float().sum().backward()
        model[1][0].how = how
        with pytest.raises(RuntimeError, match=r"'1\.0\.weight' were changed in place during a forward"):
            model(torch.ones(2, 5)).float().sum().backward()

    run_threads(2, body)


def test_a_forward_may_set_a_frozen_partitioned_weight_to_itself() -> None:
    """As register_parametrization() does: the version counter grows, and the values stay."""

    def body(rank: int):
        model = nn.Sequential(nn.Sequential(nn.Linear(5, 5)), *[nn.Sequential(Edits("set to itself")) for _ in "ab"])
        model[1:].requires_grad_(False)
        model, _ = shard(model)
        for _ in range(4):  # more than there are comparisons of values
            model(torch.ones(2, 5)).sum().backward()

    run_threads(2, body)


class Momentum(nn.Module):
    """Averages the weights of one block in those of another, in forward, as momentum contrast does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.query, self.key = how, nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.how == "read":
                self.key.weight.data = self.key.weight.data * 0.9 + self.query.weight.data * 0.1
            elif self.how == "write":
                self.key.weight.data = torch.ones(4, 4)
            elif self.how == "in place":
                self.key.weight.data.lerp_(self.query.weight.data, 0.1)
        return self.query(x) + self.key(x)


@pytest.mark.parametrize("how", ["read", "write"])
@every_stage
def test_a_forward_that_replaces_data_is_refused(stage: int, how: str) -> None:
    def body(rank: int):
        model, optimizer = shard(Momentum(""), stage, units=("query", "key"))
        with pytest.raises(RuntimeError, match=r"the data of 'key\.weight' was replaced after zeroshard"):
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                model.how = how

    run_threads(2, body)


def test_a_forward_that_changes_partitioned_weights_is_refused_however_late() -> None:
    def body(rank: int):
        model, _ = shard(Momentum(""), units=("query", "key"))
        with torch.no_grad():
            for _ in range(8):  # more than there are comparisons of values
                model(torch.ones(2, 4))
        model.how = "in place"
        with pytest.raises(RuntimeError, match=r"'key\.weight'.* were changed in place during a forward"):
            model(torch.ones(2, 4)).sum().backward()

    run_threads(2, body)


@every_stage
def test_a_parameter_is_an_instance_of_its_own_class_at_all_times(stage: int) -> None:
    def body(rank: int):
        model, optimizer = shard(nn.Sequential(*[nn.Sequential(Edits("")) for _ in range(2)]), stage)
        seen = [isinstance(p, Scale) for p in model.parameters()]
        model(torch.ones(2, 5)).sum().backward()
        seen += [isinstance(p, Scale) for p in model.parameters()]
        optimizer.step()
        seen += [isinstance(p, Scale) for p in model.parameters()]
        assert {type(p) for p in zeroshard.unwrap(model).parameters()} == {Scale}
        return all(seen)

    assert run_threads(2, body) == [True, True]


def forward_alone(rank: int) -> str:
    model, _ = shard(make_net())
    with pytest.raises(RuntimeError) as caught:
        model.forward(ONE_BATCH)
    return str(caught.value)


def test_calling_forward_itself_says_to_call_the_model() -> None:
    for text in run_threads(2, forward_alone):
        assert "'temperature'" in text and "call the model or one of its modules as model(x)" in text


def test_a_parameter_outside_its_module_is_brought_when_forward_needs_it() -> None:
    class Reuse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.second = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.second(self.first(x)), self.first[0].weight)  # after its unit has gone

    plain = Reuse()
    x = torch.randn(2, 4)
    plain(x).sum().backward()

    def body(rank: int):
        model, _ = sharded(plain, stage=3, units=(nn.Sequential,))
        model(x).sum().backward()
        return full_gradients(model)

    for gradients in run_threads(2, body):
        assert_close(gradients, {name: p.grad for name, p in plain.named_parameters()})


# ------------------------------------------------------------------------------------------------- gathered


@every_stage
def test_gathered_gives_the_full_values_on_all_ranks_and_frees_them(stage: int) -> None:
    plain = make_net()

    def body(rank: int):
        model, _ = shard(plain, stage)
        held = zeroshard.report(model).total.now
        with zeroshard.gathered(model):
            inside = copied(model)
            assert isinstance(model.get_parameter(NAME), nn.Parameter)
        assert zeroshard.report(model).total.now == held
        if stage == 3:
            with pytest.raises(RuntimeError, match=r"zeroshard\.gathered"):
                model.get_parameter(NAME).sum()
        return inside

    for inside in run_threads(2, body):
        assert_equal(inside, dict(plain.named_parameters()))


def test_gathered_takes_one_module_and_leaves_the_others_partitioned() -> None:
    plain = make_net()

    def body(rank: int):
        model, _ = shard(plain)
        with zeroshard.gathered(model.blocks[1]):
            inside = {name: p.detach().clone() for name, p in model.blocks[1].named_parameters()}
            with pytest.raises(RuntimeError, match=r"zeroshard\.gathered"):
                model.blocks[0].up.weight.sum()
        return inside

    for inside in run_threads(2, body):
        assert_equal(inside, dict(plain.blocks[1].named_parameters()))


@pytest.mark.parametrize("precision", [None, "bf16"])
@every_stage
def test_edits_without_a_writing_rank_are_undone(stage: int, precision: str | None) -> None:
    plain = make_net()

    def body(rank: int):
        model, _ = shard(plain, stage, precision=precision)
        before = full_parameters(model)
        with zeroshard.gathered(model), torch.no_grad():
            for p in model.parameters():
                p.fill_(7 + rank)
        after = full_parameters(model)
        return before, after, {n: p.detach() for n, p in zeroshard.unwrap(model).named_parameters()}

    for before, after, exact in run_threads(2, body):
        assert_equal(after, before)
        assert_equal(exact, dict(plain.named_parameters()))


@pytest.mark.parametrize("precision", [None, "bf16"])
@every_stage
def test_edits_of_the_writing_rank_count_on_all_ranks_and_in_the_master(stage: int, precision: str | None) -> None:
    def body(rank: int, plain):
        model, _ = shard(plain, stage, precision=precision)
        with zeroshard.gathered(model, write_rank=1), torch.no_grad():
            for p in model.parameters():
                p.fill_(rank + 0.5)
        after = full_parameters(model)
        return after, {n: p.detach() for n, p in zeroshard.unwrap(model).named_parameters()}

    for after, exact in run_threads(3, body, make_net()):
        for value in (*after.values(), *exact.values()):
            assert torch.equal(value, torch.full_like(value, 1.5))


@every_stage
def test_training_goes_on_from_what_was_written(stage: int) -> None:
    def loop(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
        writing = zeroshard.gathered(model, write_rank=0) if zeroshard.is_sharded(model) else nullcontext()
        with writing, torch.no_grad():
            model.get_parameter(NAME).mul_(-2)
        train_steps(model, optimizer, data)

    assert_same_training(2, make_net(), adamw, batches(2), loop, stages=[stage])


@every_stage
def test_writing_leaves_the_masters_of_what_was_not_edited_exact(stage: int) -> None:
    """The bf16 values are a rounded copy: taking them back unasked would throw master bits away."""
    plain = make_net()

    def body(rank: int):
        model, _ = shard(plain, stage, precision="bf16")
        with zeroshard.gathered(model, write_rank=0), torch.no_grad():
            model.head.bias.zero_()
        return {n: p.detach() for n, p in zeroshard.unwrap(model).named_parameters()}

    wanted = {n: torch.zeros_like(p) if n == "head.bias" else p.detach() for n, p in plain.named_parameters()}
    for exact in run_threads(2, body):
        assert_equal(exact, wanted)


@pytest.mark.parametrize("write_rank", [None, 0])
@every_stage
def test_an_exception_inside_gathered_frees_and_changes_nothing(stage: int, write_rank: int | None) -> None:
    plain = make_net()

    def body(rank: int):
        model, optimizer = shard(plain, stage)
        held = zeroshard.report(model).total.now
        entered = zeroshard.gathered(model, write_rank=write_rank)
        with pytest.raises(ZeroDivisionError), entered, torch.no_grad():
            model.get_parameter(NAME).zero_()
            _ = 1 / 0
        assert zeroshard.report(model).total.now == held
        after = full_parameters(model)
        train_step(model, optimizer, split(ONE_BATCH, rank, 2))
        return after

    for after in run_threads(2, body):
        assert_equal(after, dict(plain.named_parameters()))


@every_stage
def test_a_state_dict_taken_inside_gathered_is_plain_and_stays_valid(stage: int) -> None:
    plain = make_net()

    def body(rank: int):
        model, optimizer = shard(plain, stage)
        with zeroshard.gathered(model):
            taken = model.state_dict()
        if stage == 3:  # its parameters come and go; where they stay, a state dict follows them as under plain torch
            for batch in batches(2):
                train_step(model, optimizer, split(batch, rank, 2))
        return taken

    for taken in run_threads(2, body):
        assert list(taken) == list(plain.state_dict())
        assert_equal(taken, plain.state_dict())


@at_stages(0, 1, 2)
def test_resident_parameters_give_a_state_dict_any_time(stage: int) -> None:
    plain, data = make_net(), batches(2)

    def body(rank: int):
        model, optimizer = shard(plain, stage)
        for batch in data:
            train_step(model, optimizer, split(batch, rank, 2))
        return {name: value.clone() for name, value in model.state_dict().items()}

    wanted = run_plain(plain, adamw, data)
    for state in run_threads(2, body):
        assert_close(state, wanted)


@pytest.mark.parametrize("precision", [None, "bf16"])
@every_stage
def test_load_state_dict_inside_gathered_loads_into_all_ranks(stage: int, precision: str | None) -> None:
    plain, other = make_net(0), make_net(5)

    def body(rank: int):
        model, optimizer = shard(plain, stage, precision=precision)
        state = other.state_dict() if rank == 0 else {n: torch.zeros_like(p) for n, p in other.state_dict().items()}
        with zeroshard.gathered(model, write_rank=0):
            model.load_state_dict(state)
        after = full_parameters(model)
        train_step(model, optimizer, split(ONE_BATCH, rank, 2))
        return after

    for after in run_threads(2, body):
        for name, value in other.named_parameters():
            assert torch.equal(after[name], value.to(after[name].dtype)), name


@every_stage
def test_load_state_dict_says_that_it_rounds_master_weights(stage: int) -> None:
    """`zeroshard.load` does not round them; and what is exact in bf16 loads without a warning."""
    exact = make_net(5).state_dict()
    rounded = {name: value.bfloat16().to(value.dtype) for name, value in exact.items()}
    model, _ = shard(make_net(0), stage, precision="bf16")
    with zeroshard.gathered(model, write_rank=0):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.load_state_dict(rounded)
        with pytest.warns(UserWarning, match=r"rounds '.*', and so its master weight.*zeroshard.load") as found:
            model.load_state_dict(exact)
        assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zeroshard.load(exact, model)


@pytest.mark.parametrize("wrong", [-1, 2])
def test_a_write_rank_that_does_not_exist_is_refused(wrong: int) -> None:
    def body(rank: int):
        model, _ = shard(make_net())
        with pytest.raises(ValueError, match="write_rank"), zeroshard.gathered(model, write_rank=wrong):
            pass

    run_threads(2, body)


def test_gathered_refuses_a_plain_module() -> None:
    with pytest.raises(ValueError, match="sharded model"), zeroshard.gathered(nn.Linear(2, 2)):
        pass


@every_stage
def test_gathered_may_be_nested_and_entered_between_backward_and_step(stage: int) -> None:
    def loop(model: Any, optimizer: Any, data: list[torch.Tensor]) -> None:
        for batch in data:
            token_step(model, batch)
            with zeroshard.gathered(model), zeroshard.gathered(model.blocks[0]):
                model.blocks[0].up.weight.sum()
                model.get_parameter(NAME).sum()
            optimizer.step()
            optimizer.zero_grad()

    assert_same_training(2, make_net(), adamw, batches(2), loop, stages=[stage], plain_loop=train_steps)


# ------------------------------------------------------------------------------- one parameter's states by name


@every_stage
def test_full_gradient_and_full_state_by_name_are_the_plain_ones(stage: int) -> None:
    plain, data = make_net(), batches(2)

    def body(rank: int):
        model, optimizer = shard(plain, stage)
        train_step(model, optimizer, split(data[0], rank, 2))
        token_step(model, split(data[1], rank, 2))
        gradients = full_gradients(model)
        optimizer.step()
        return gradients, {name: zeroshard.full_state(optimizer, name) for name, _ in model.named_parameters()}

    expected = copy.deepcopy(plain)
    optimizer = adamw(expected)
    train_step(expected, optimizer, data[0])
    token_step(expected, data[1])
    wanted = {name: p.grad.clone() for name, p in expected.named_parameters()}
    optimizer.step()
    for gradients, states in run_threads(2, body):
        assert_close(gradients, wanted)
        for name, p in expected.named_parameters():
            assert states[name].keys() == optimizer.state[p].keys(), name
            for key, value in optimizer.state[p].items():
                torch.testing.assert_close(states[name][key], value, rtol=1e-4, atol=1e-7)


def test_an_unknown_name_is_an_error_with_the_nearest_right_one() -> None:
    def body(rank: int):
        model, optimizer = shard(make_net())
        with pytest.raises(KeyError, match=r"did you mean 'blocks\.1\.up\.weight'"):
            zeroshard.full_gradient(model, "block.1.up.weight")
        with pytest.raises(KeyError, match=r"did you mean 'blocks\.1\.up\.weight'"):
            zeroshard.full_state(optimizer, "block.1.up.weight")

    run_threads(2, body)


@every_stage
def test_full_gradient_is_none_before_backward_and_after_zero_grad(stage: int) -> None:
    def body(rank: int):
        model, optimizer = shard(make_net(), stage)
        before = zeroshard.full_gradient(model, NAME)
        token_step(model, ONE_BATCH)
        between = zeroshard.full_gradient(model, NAME)
        optimizer.zero_grad()
        return before, between is None, zeroshard.full_gradient(model, NAME)

    assert run_threads(2, body) == [(None, False, None)] * 2
