"""What a change of the code inside must not change: the public names, the import direction, and the budgets."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import measure
import pytest
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
    "utils config models comm sharding memory tensor_parallel float8 engine optim core activations checkpoint api "
    "integrations planner shard train rehearse cli __main__"
).split()
# Others import these folders' names from the folder itself. (The modules of utils and config are imported one by one:
# the command line reads its options before it imports torch.)
FACES = (
    "activations checkpoint comm engine float8 memory models optim planner planner.auto planner.scaling sharding "
    "tensor_parallel train"
).split()


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


@pytest.mark.skipif(not measure.HAS_PYTHON, reason="other versions of Python than 3.11 count other tokens and calls")
def test_nothing_that_is_measured_has_grown() -> None:
    """One test, not a case for each table: of cases, CI chooses some."""
    is_clone = (measure.ROOT / ".git").exists()  # which files belong to the repository is known there only
    tables = [table for table in measure.MEASURES if is_clone or table != "repository"]
    assert measure.exceeded({table: measure.MEASURES[table]() for table in tables}) == []


@pytest.mark.skipif(not measure.HAS_PYTHON, reason="other versions of Python than 3.11 count other tokens")
def test_sizes_count_decisions_and_names_and_no_comments() -> None:
    size = measure.Size()
    size.add('"""Docs."""\n\ndef f(x):  # why\n    """Docs."""\n    a, b = x, [y for y in x if y and x]\n')
    assert (size.row(), size.statements) == ({"tokens": 23, "branches": 3, "names": 2, "tuples": 1}, 4)


def test_a_number_that_falls_lowers_its_budget_and_none_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "BUDGETS", tmp_path / "budgets.toml")
    measure.write({"src": {"gone": {"tokens": 1}, "there": {"tokens": 5}, "total": {"tokens": 6}}}, [])
    found: measure.Rows = {"there": {"tokens": 7}, "new": {"tokens": 1}, "total": {"tokens": 4}}
    measure.write({"src": found}, [])
    assert measure.budgets() == {"src": {"there": {"tokens": 5}, "total": {"tokens": 4}}}
    assert [line.split(":")[0] for line in measure.exceeded({"src": found})] == [
        "src 'there' has 7 tokens, more than its budget of 5 in tests/budgets.toml",
        "src 'new' has no budget in tests/budgets.toml",
    ]
    measure.write({"src": found}, ["new", "there"])
    assert measure.budgets() == {"src": found}


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


def test_folders_are_imported_by_their_public_names() -> None:
    found = [
        (name, node.module)
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("zeroshard.")
        if name.split(".")[1:2] != node.module.split(".")[1:2] and name != "zeroshard"
        if name.split(".")[1] != "core"  # the leaves that it imports move into it when it replaces the old core
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


def test_no_class_name_means_two_things() -> None:
    trees = [tree for name, tree in modules().items() if not name.startswith("zeroshard.core")]  # beside the old core
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, number in names.items() if number > 1] == []


def test_a_constructor_has_at_most_five_arguments() -> None:
    found = {
        (cls.name, method.name)
        for tree in modules().values()
        for cls in ast.walk(tree)
        if isinstance(cls, ast.ClassDef)
        for method in cls.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        if len(method.args.args) + len(method.args.kwonlyargs) > 6
    }
    assert found == set()


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
