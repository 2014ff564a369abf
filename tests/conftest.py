"""Setup of all tests: the path of the rank harness, one torch thread, and no processes left at the end."""

import gc
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

# for `from ranks import run_threads` and names that test files share, also in the harness's worker processes
sys.path.extend(sorted({str(path.parent) for path in Path(__file__).parent.glob("*/*.py")}))
import combinations
import ranks

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each program that a test starts compiles the library again
sys.dont_write_bytecode = False  # and pytest rewrites the asserts of all test files again, for seconds in every worker
ranks.settle_torch()  # also during collection; one thread, so that ranks do not compete for cores


DURATIONS = Path(__file__).with_name("durations.json")  # made by `make durations`
SLOW_SECONDS = 0.4
SLOW_FIXTURE_SECONDS = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", default="all", help="run at most so many cases of each test function, and one second (default: all)"
    )
    parser.addoption("--record-durations", action="store_true", help="write durations.json and combinations.json")


def commit() -> str:
    """Return the commit of the sources, or nothing outside a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except OSError:  # no git
        return ""


def function_of(node_id: str) -> str:
    """Return a test function's name without its case.

    >>> function_of("tests/test_docs.py::test_links[a-b]")
    'tests/test_docs.py::test_links'
    """
    return node_id.partition("[")[0]


def choose_cases(node_ids: list[str], cases: int, seed: str, seconds: dict[str, float]) -> set[str]:
    """Choose one of each function and more, at most ``cases`` and a second of them; others for each ``seed``.

    >>> [len(choose_cases(["f[1]", "f[2]", "f[3]", "g"], 2, seed, {})) for seed in ("a commit", "the next")]
    [3, 3]
    >>> [len(choose_cases(["f[1]", "f[2]", "f[3]"], 3, "", {"f": seconds})) for seconds in (0.1, 0.5, 9)]
    [3, 2, 1]
    """
    by_function: dict[str, list[str]] = defaultdict(list)
    for node_id in sorted(node_ids, key=lambda node_id: hashlib.sha256((seed + node_id).encode()).digest()):
        by_function[function_of(node_id)].append(node_id)
    chosen = set()
    for function, group in by_function.items():
        chosen.update(group[: max(1, min(cases, int(1 / seconds.get(function, 0.1))))])
    return chosen


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Mark GPU tests and slow tests; of those that -m and -k select, choose cases; run the longest files first.

    (With `--no-loadscope-reorder`, pytest-xdist keeps this order. A long file that starts last would run alone.)
    """
    seconds: dict[str, float] = json.loads(DURATIONS.read_text())
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker("gpu")
        of_fixtures = [seconds.get(name, 0.0) for name in shared_fixtures(item)]
        if (
            seconds.get(function_of(item.nodeid), 0.0) >= SLOW_SECONDS
            or max(of_fixtures, default=0) >= SLOW_FIXTURE_SECONDS
        ):
            item.add_marker("slow")
    yield
    cases = config.getoption("cases")
    if cases != "all":
        chosen = choose_cases([item.nodeid for item in items], int(cases), commit(), seconds)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]
    of_file: dict[Path, float] = defaultdict(float)
    for item in items:
        of_file[item.path] += seconds.get(function_of(item.nodeid), 0.1)
    items.sort(key=lambda item: -of_file[item.path])


def shared_fixtures(item: pytest.Item) -> list[str]:
    """Return the fixtures that a test shares with others: the first of them that runs waits for these."""
    definitions = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    return [fixture_name(found[-1]) for found in definitions if found[-1].scope != "function"]


def fixture_name(definition: pytest.FixtureDef[Any]) -> str:
    """Return a fixture's name with its file."""
    return f"{definition.baseid}::{definition.argname}"


class DurationRecorder:
    """Writes the mean seconds of a case of each test function, and those of shared fixtures, above a tenth of a second.

    And which features the tests that passed ran together.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._shared_seconds = 0.0  # of fixtures that the present test has set up
        self._pairs: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        start = time.perf_counter()
        value = yield
        if fixturedef.scope != "function":
            elapsed = self._seconds[fixture_name(fixturedef)] = time.perf_counter() - start
            self._shared_seconds += elapsed
        return value

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration - self._shared_seconds
        self._shared_seconds = 0.0
        if report.when == "call" and report.passed:
            self._pairs.update(*dict(report.user_properties).values())

    def pytest_sessionfinish(self) -> None:
        by_function: dict[str, list[float]] = defaultdict(list)
        for node_id, seconds in self._seconds.items():
            by_function[function_of(node_id)].append(seconds)
        means = {name: round(mean(cases), 1) for name, cases in sorted(by_function.items())}
        DURATIONS.write_text(json.dumps({name: value for name, value in means.items() if value > 0.1}, indent=0) + "\n")
        combinations.RECORD.write_text(json.dumps(sorted(self._pairs), indent=0) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Record the features of a test that passes."""
    if not item.config.getoption("record_durations"):
        return (yield)
    with combinations.recorded() as pairs:
        yield
    item.user_properties.append(("combinations", sorted(pairs)))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecorder())


def pytest_report_header(config: pytest.Config) -> str:
    return f"cases of a function: {config.getoption('cases')}, chosen by commit {commit()[:9] or 'unknown'}"


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
