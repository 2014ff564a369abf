"""What a change of the code inside must not change: the public names, and how much code one step runs through."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from ranks import run_threads
from torch import nn
from torch.utils._device import _device_constructors

import zeroshard

SOURCES = str(Path(zeroshard.__file__).parent)
FUNCTIONS = {
    "average_replicas": "model",
    "checkpoint_activations": "model blocks=None partition=None offload=False policy=None",
    "full_gradient": "model name",
    "full_parameter": "model name",
    "full_state": "optimizer name",
    "gathered": "module write_rank=None",
    "is_sharded": "model",
    "load": "path model optimizer=None ema=None extra=None weights=True strict=True random=None rename=None",
    "no_sync": "model",
    "offload_states": "model",
    "plan": "model inputs=None devices machine='h100' memory=None batch=None micro_batch=None sequence=None loss=None "
    "stage=(0, 1, 2, 3) partition=None gather_dtype=None reduce_wire=None allow_lossy=False local_steps=1 tensor=None "
    "checkpoint=('none', 'recompute', 'host') offload='every' optimizer='adamw' "
    "optimizer_states=2 one_pass=True scratch=0.0 clip=True replicas=None options",
    "profile": "model trace=None",
    "register_forward_method": "module name",
    "reload_states": "model",
    "report": "model",
    "save": "path model optimizer=None ema=None extra=None rank_extra=None weights=True frozen=True keep=None "
    "wait=True",
    "shard": "model optimizer=None mesh=None tensor_plan=None checkpoint=None inputs=None planning=None "
    "allow_lossy=False config=None options",
    "state_dict": "model rank=0 trainable_only=False",
    "unshard": "model optimizer=None",
    "unwrap": "model optimizer=None",
}
FIELDS = {
    "Config": "stage=3 partition='hybrid' local_steps=1 outer_optimizer=None precision=None reduce_dtype=None "
    "gather_dtype=None reduce_wire=None error_feedback=False keep_fp32=() keep_bf16=() cast_inputs=True "
    "cast_on_gather=True units=None bucket_size=134217728 ring=2 backwards=None prefetch=True "
    "broadcast_buffers=True defragment=True offload=None "
    "elementwise=None init_fn=None timeout=None heartbeat_timeout=8.0 loss_scale=65536.0",
    "Loaded": "path extra rank_extra missing unexpected",
    "Offload": "optimizer='device' gradients=None parameters='device' host_bytes=None disk_bytes=None directory=None "
    "speculate=True threads=None",
    "Report": "rank ranks parameters memory total collectives tensor_traffic=None activation_traffic=None chosen='' "
    "routing=None float8=None eight_bits",
}
METHODS = {
    "CheckpointError": "",
    "Config": "from_deepspeed",
    "EMA": "copy_to_model decay swapped update",
    "Profile": "held device moments phases seconds trace waited",
    "RanksDisagreeError": "",
    "Report": "activation_share communicated states",
    "Save": "done wait",
    "ShardedOptimizer": "add_param_group clip_grad_norm_ clip_grad_value_ load_state_dict loss_scale scale state_dict "
    "step zero_grad",
}
# A folder imports only from those before it.
FOLDERS = (
    "utils config models presets comm sharding memory tensor_parallel float8 engine optim activations checkpoint api "
    "planner auto train cli rehearse integrations __main__"
).split()
# Others import these folders' names from the folder itself. (The modules of utils and config are imported one by one:
# the command line reads its options before it imports torch.)
FACES = (
    "activations checkpoint comm engine float8 memory models optim planner planner.auto planner.scaling sharding "
    "tensor_parallel train"
).split()
# (files, functions, classes, calls) of zeroshard that one event runs through, with four blocks on two ranks: not more
BUDGETS = {
    "forward": (13, 109, 20, 444),
    "backward": (17, 135, 26, 532),
    "step": (16, 102, 22, 152),
    "zero_grad": (8, 18, 8, 43),
}


def shown(parameters: list[tuple[str, Any]], none: object) -> str:
    return " ".join(name if default is none else f"{name}={default!r}" for name, default in parameters)


def test_the_public_names_are_these() -> None:
    assert set(zeroshard.__all__) == FUNCTIONS.keys() | FIELDS.keys() | METHODS.keys()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_has_these_parameters(name: str) -> None:
    parameters = inspect.signature(getattr(zeroshard, name)).parameters.values()
    assert shown([(p.name, p.default) for p in parameters], inspect.Parameter.empty) == FUNCTIONS[name]


@pytest.mark.parametrize("name", FIELDS)
def test_a_public_class_has_these_fields(name: str) -> None:
    found = [(field.name, field.default) for field in dataclasses.fields(getattr(zeroshard, name))]
    assert shown(found, dataclasses.MISSING) == FIELDS[name]


@pytest.mark.parametrize("name", METHODS)
def test_a_public_class_has_these_methods(name: str) -> None:
    cls = getattr(zeroshard, name)
    there = {*dir(cls), *inspect.get_annotations(cls)}
    assert not set(METHODS[name].split()) - there


class Walk:
    """The files, functions, classes and calls of zeroshard that this thread runs through."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[Any] = set()
        self.classes: set[str] = set()
        self.calls = 0

    def __enter__(self) -> Walk:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCES):
            self.calls += 1
            self.files.add(code.co_filename)
            self.functions.add(code)
            if "." in code.co_qualname and "<" not in code.co_qualname:
                self.classes.add(f"{code.co_filename}:{code.co_qualname.rsplit('.', 1)[0]}")

    @property
    def found(self) -> tuple[int, int, int, int]:
        return len(self.files), len(self.functions), len(self.classes), self.calls


class Net(nn.Module):
    """Four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def walked(rank: int) -> dict[str, tuple[int, int, int, int]]:
    """How much each event of a step runs through, the steps before it having warmed everything up."""
    torch.manual_seed(0)
    net = Net()
    adam = torch.optim.AdamW(net.parameters())
    model, optimizer = zeroshard.shard(net, adam, precision="bf16", units=[nn.Sequential])
    x, found = torch.ones(2, 64), {}
    for _ in range(4):
        walks = {event: Walk() for event in ("forward", "backward", "step", "zero_grad")}
        with walks["forward"]:
            loss = model(x).float().mean()
        with walks["backward"]:
            loss.backward()
        with walks["step"]:
            optimizer.step()
        with walks["zero_grad"]:
            optimizer.zero_grad()
        found = {event: walk.found for event, walk in walks.items()}
    return found


def test_a_step_runs_through_no_more_code_than_this() -> None:
    """Budgets for a reader who follows one step: the places to look at. Lower them, never raise."""
    for found in run_threads(2, walked):
        for event, most in BUDGETS.items():
            assert all(number <= limit for number, limit in zip(found[event], most, strict=True)), (event, found[event])


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The library's modules by name."""
    root = Path(SOURCES)
    paths = {path: ".".join(path.relative_to(root.parent).with_suffix("").parts) for path in root.rglob("*.py")}
    return {name.removesuffix(".__init__"): ast.parse(path.read_text()) for path, name in paths.items()}


def imports(tree: ast.Module, known: dict[str, ast.Module]) -> set[str]:
    """The library's modules that a module imports, for types only or when it is called included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    found = {name if name in known else name.rpartition(".")[0] for name in found}
    return {name for name in found if name in known and name != "zeroshard"}


@pytest.mark.slow
def test_folders_import_in_one_direction() -> None:
    known = modules()
    order = {folder: number for number, folder in enumerate(FOLDERS)}
    assert {name.split(".")[1] for name in known if "." in name} == order.keys()
    upward = {
        (name, other)
        for name, tree in known.items()
        for other in imports(tree, known)
        if name != "zeroshard" and order[other.split(".")[1]] > order[name.split(".")[1]]
    }
    assert upward == set()


@pytest.mark.slow
def test_folders_are_imported_by_their_public_names() -> None:
    found = [
        (name, node.module)
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("zeroshard.")
        if name.split(".")[1:2] != node.module.split(".")[1:2] and name != "zeroshard"
        if node.module.split(".")[1] in FACES and node.module.removeprefix("zeroshard.") not in FACES
    ]
    assert found == []


def test_no_two_modules_import_each_other() -> None:
    known = modules()
    arrows = {name: imports(tree, known) - {name} for name, tree in known.items() if name != "zeroshard"}
    done: set[str] = set()
    while ready := [name for name in arrows if name not in done and arrows[name] <= done]:
        done.update(ready)
    assert sorted(arrows.keys() - done) == []


@pytest.mark.slow
def test_no_class_name_means_two_things() -> None:
    trees = modules().values()
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, number in names.items() if number > 1] == []


MAX_CLASS_LINES, MAX_ATTRIBUTES, MAX_ARGUMENTS = 265, 16, 5  # about 250 and 15 are enough for one mechanism


def attributes(cls: ast.ClassDef) -> set[str]:
    """Return the names of attributes that a class assigns to self."""
    stored = (node for node in ast.walk(cls) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}


def constructor_arguments(cls: ast.ClassDef) -> int:
    """Return the number of arguments of a class's own constructor."""
    own = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return sum(len(node.args.args) + len(node.args.kwonlyargs) - 1 for node in own)


def test_a_class_can_be_read_in_one_sitting() -> None:
    classes = [node for tree in modules().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = {
        cls.name: ((cls.end_lineno or 0) - cls.lineno + 1, len(attributes(cls)), constructor_arguments(cls))
        for cls in classes
        if (cls.end_lineno or 0) - cls.lineno >= MAX_CLASS_LINES
        or len(attributes(cls)) > MAX_ATTRIBUTES
        or constructor_arguments(cls) > MAX_ARGUMENTS
    }
    assert found == {}


def test_no_tensor_is_created_on_the_default_device() -> None:
    """Users may set it, with ``torch.set_default_device()`` or ``with torch.device(…)``; pinned memory would fail."""
    factories = {function.__name__ for function in _device_constructors()}
    found = []
    for path in sorted(Path(SOURCES).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in factories:
                names = {keyword.arg for keyword in node.keywords}
                if ast.unparse(node.func.value) == "torch" and not names & {"device", None}:
                    found.append(f"{path.relative_to(SOURCES)}:{node.lineno}: {ast.unparse(node)}")
    assert not found
