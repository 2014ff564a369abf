"""Setup of all tests: the path of the rank harness, one torch thread, and no processes left at the end."""

import gc
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# for `from ranks import run_threads` and names that test files share, also in the harness's worker processes
sys.path.extend(sorted({str(path.parent) for path in Path(__file__).parent.glob("*/*.py")}))
import ranks

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each program that a test starts compiles the library again
sys.dont_write_bytecode = False  # and pytest rewrites the asserts of all test files again, for seconds in every worker
ranks.settle_torch()  # also during collection; one thread, so that ranks do not compete for cores


# Seconds of files that the marks of their tests do not show: many tests of half a second, or one set-up for all.
LONG_FILES = {
    "test_train_command": 60,
    "test_optimizer_table": 55,
    "test_transformers": 50,
    "test_hierarchical": 40,
    "test_local_steps": 35,
    **dict.fromkeys(("test_eight_bits", "test_whole_params", "test_sharded_muon"), 30),
    **dict.fromkeys(("test_lightning_optimizers", "test_trl", "test_auto", "test_prediction_vs_measured"), 20),
    **dict.fromkeys(("test_optimizers", "test_plan", "test_lightning", "test_lightning_habits"), 15),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in gpu/, and run the files that take longest first: pytest-xdist keeps this order.

    (With `--no-loadscope-reorder`. Started last, such a file would still run when all others are done.)
    """
    seconds: dict[Path, float] = defaultdict(float)
    for item in items:
        seconds[item.path] = seconds[item.path] or LONG_FILES.get(item.path.stem, 0.0)
        if item.path.parent.name == "gpu":
            item.add_marker("gpu")
        slow = item.get_closest_marker("slow")
        seconds[item.path] += 0.1 if slow is None else slow.kwargs.get("seconds", 1)
    items.sort(key=lambda item: -seconds[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Import the tests without garbage collection; it is enabled again also if an import raises.

    (pytest-xdist's controller collects nothing, so that pytest_collection_finish does not run there.)
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude the imported modules, with a million objects, from garbage collection and from counts of live tensors."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    """Reset torch's settings, so that sums are the same whatever ran before."""
    ranks.settle_torch()
    yield


_traces: dict[Any, Any] = {}


@pytest.fixture(scope="module")
def traced_once() -> Iterator[None]:
    """Cache traces of GPTs over all tests: a trace takes a second, and many tests plan for the same model."""
    from zeroshard.models import GPT
    from zeroshard.planner import traced_model

    trace = traced_model.trace_model

    def remembered(model: Any, inputs: Any = None, **options: Any) -> Any:
        touched = any("forward" in vars(module) for module in model.modules())  # e.g. by checkpoint_activations
        if type(model) is not GPT or touched or inputs is not None or options.get("loss") is not None:
            return trace(model, inputs, **options)
        held = tuple((name, p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters())
        key = (model.config, repr(model), model.training, held, repr(sorted(options.items())))
        if key not in _traces:
            _traces[key] = trace(model, inputs, **options)
        return _traces[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced_model, "trace_model", remembered)
        yield


@pytest.fixture(scope="module")
def tried_once() -> Iterator[None]:
    """Try each optimizer once, not on every rank and in every stage: a trial takes a second or more.

    For optimizers that their class, options and parameters describe.
    """
    from zeroshard.optim import sharded_optimizer

    find, lock = sharded_optimizer.find_whole_param_groups, threading.Lock()
    found: dict[str, list[bool]] = {}

    def remembered(optimizer: Any, *others: Any) -> Any:
        groups = [{**g, "params": [(p.shape, p.dtype, vars(p)) for p in g["params"]]} for g in optimizer.param_groups]
        key = repr((type(optimizer), groups, others))
        with lock:  # ranks are threads
            if key not in found:
                found[key] = find(optimizer, *others)
            return list(found[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_optimizer, "find_whole_param_groups", remembered)
        yield


@pytest.fixture(scope="module")
def native_kernels() -> Any:
    """Return the native CPU kernels."""
    from zeroshard.optim.cpu.kernels import load_kernels  # late: most tests do not need it

    found = load_kernels()
    if found is None:
        pytest.skip("no C compiler here: only the fall-back can be tested")
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    ranks.close_pool()
