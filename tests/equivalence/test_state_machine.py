"""Everything a user may call, in any order, compared with a plain model (see `lockstep.py`).

The test runs a short, fixed selection of sequences. A long run, by command:

    python tests/equivalence/test_state_machine.py --sequences 10000 --seed 1

It runs in child processes of `--chunk` sequences each, `--jobs` at a time, so that a sequence that ends the interpreter
is told as well. At a counterexample it prints the shortest sequence that hypothesis has found for it, and ends with
status 1; with `--keep-going` it goes on with the next seed. `--without edit,cast` leaves rules out, `--fix stage=3
offload=None` fixes options of `TrainOptions`, `--counts` tells how often each call went through or was refused.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from pairs import at_stages

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from lockstep import EDITS, LOOKS, OPTIMIZERS, Counterexample, Lockstep, Options, names_of
from ranks import settle_torch

from zeroshard.config.config import PARTITIONS

SEEDS = st.integers(0, 5)
NAMES = st.sampled_from(list(names_of(2)))
PARTS = st.none() | st.integers(0, 1)
LOOK = st.sampled_from(LOOKS)
DONE: Counter[str] = Counter()
REFUSED: Counter[str] = Counter()
GRAMMAR: dict[str, tuple[Callable[[Lockstep], Any], dict[str, st.SearchStrategy[Any]]]] = {}  # when, arguments
WITHOUT: set[str] = set()
FIXED: dict[str, Any] = {}
STARTED = Counter[str]()


def log(text: str) -> None:
    """Write what is about to be done where the parent of a long run finds it, should this be the last."""
    if path := os.environ.get("ZEROSHARD_STATE_MACHINE_LOG"):
        with open(path, "a") as file:
            file.write(text + "\n")


@st.composite
def sharded_models(draw: st.DrawFn) -> Options:
    """Draw a sharded model."""
    world = draw(st.sampled_from((1, 2, 1, 2, 4)))
    precision = draw(st.sampled_from((None, None, None, "bf16", "fp16")))
    sixteen = precision is not None
    eight_bits = draw(st.sampled_from((None, None, "int8"))) if world > 1 else None
    options = {
        "stage": draw(st.sampled_from((0, 1, 2, 3))),
        "world": world,
        "partition": draw(st.sampled_from(tuple(PARTITIONS))) if world == 4 else "hybrid",
        "precision": precision,
        "reduce_dtype": draw(st.sampled_from((None, "fp32"))) if sixteen else None,
        "offload": draw(st.sampled_from((None, None, None, "host", "host", "parameters", "disk"))),
        "eight_bits": eight_bits,
        "optimizer": draw(st.sampled_from(("sgd", "momentum") if sixteen or eight_bits else OPTIMIZERS)),
        "blocks": draw(st.sampled_from((2, 1, 3))),
        "frozen": draw(st.booleans()),
        "held_out": draw(st.booleans()),
        "checkpointed": draw(st.booleans()),
        "hook": draw(st.sampled_from((None, None, "own", "other", "gathered"))),
        "cast_on_gather": draw(st.booleans()) if sixteen else True,
        "backwards": draw(st.sampled_from((None, 1, 2))),
    }
    options |= FIXED
    return Options(**options)


class Machine(RuleBasedStateMachine):
    """The rules. Each is a method of `Lockstep`, followed by a look."""

    def __init__(self) -> None:
        super().__init__()
        self.both: Lockstep | None = None

    @initialize(options=sharded_models())
    def begin(self, options: Options) -> None:
        log(f"-- {options}")
        STARTED["sequences"] += 1
        settle_torch()
        self.both = Lockstep(options, log)

    def teardown(self) -> None:
        if self.both is None:
            return
        try:
            self.both.finish()
        finally:
            DONE.update(self.both.done)
            REFUSED.update(self.both.refused)
            self.both.close()
            log("-- end")

    def may(self, name: str, when: Callable[[Lockstep], Any]) -> bool:
        return self.both is not None and not self.both.over and name not in WITHOUT and bool(when(self.both))

    @rule()
    def rest(self) -> None:
        """So that there is a rule when no other may come."""


def add_rule(
    name: str,
    /,
    when: Callable[[Lockstep], Any] = lambda both: True,
    often: int = 1,
    **arguments: st.SearchStrategy[Any],
) -> None:
    """Make a rule of a method of `Lockstep`, or several, for what is to come more often than the rest."""
    GRAMMAR[name] = when, arguments

    def act(self: Machine, look: str, **given: Any) -> None:
        if self.both is None or not self.may(name, when):
            return
        STARTED["rules"] += 1
        try:
            self.both.act(name, given)
            self.both.look(look)
        except BaseException:
            self.both.over = True  # nothing that comes later is worth telling
            raise

    for number in range(often):
        called = name if number == 0 else f"{name}_{number + 1}"
        one = types.FunctionType(act.__code__, act.__globals__, called, act.__defaults__, act.__closure__)
        setattr(Machine, called, precondition(lambda self: self.may(name, when))(rule(look=LOOK, **arguments)(one)))


NUMBER = st.integers(-2, 1)
HABITS = (
    *(f"cast {how}" for how in ("to cpu", "cpu", "to same", "apply", "train")),
    *(f"cast {how}" for how in ("double", "to half", "to_empty", "share_memory", "replace")),
    *(f"duplicate {what}" for what in ("deepcopy", "save", "deepcopy optimizer", "pickle optimizer")),
    "report",
)
add_rule("train", seed=SEEDS, clear=st.sampled_from(("optimizer", "model")), often=3)
add_rule("forward", seed=SEEDS, route=st.integers(0, 2), part=PARTS, often=2)
add_rule("evaluate", seed=SEEDS, route=st.integers(0, 2), mode=st.booleans(), inference=st.booleans())
add_rule(
    "backward",
    when=lambda both: both.plain.graphs,
    often=3,
    which=NUMBER,
    retain=st.booleans(),
    both=st.booleans(),
    scaled=st.sampled_from((True, True, False)),
)
add_rule("step", closure=st.none() | SEEDS, often=2)
add_rule("zero_grad", by=st.sampled_from(("optimizer", "model")), set_to_none=st.booleans())
add_rule(
    "clip",
    by=st.sampled_from(("optimizer", "torch", "groups", "value", "value of groups")),
    most=st.sampled_from((0.05, 0.5, 100.0)),
    infinite=st.booleans(),
)
add_rule("fail_forward", where=st.sampled_from(("forward", "hook")), index=st.integers(0, 2), seed=SEEDS, only=PARTS)
add_rule("fail_backward", index=st.integers(0, 2), seed=SEEDS)
add_rule("step_original", when=lambda both: both.has_gradients)
add_rule("set_rate", group=st.integers(0, 2), rate=st.sampled_from((0.02, 0.05, 0.0)))
add_rule("add_group", when=lambda both: both.options.held_out)
add_rule("read_optimizer", keep=st.just(True))
add_rule("load_optimizer", when=lambda both: both.snapshots, which=NUMBER, plains=st.booleans())
add_rule("read_gradient", when=lambda both: both.has_gradients, name=NAMES, halve=st.booleans())
add_rule("assign_gradient", name=NAMES, seed=st.none() | SEEDS)
add_rule("freeze", name=NAMES, requires_grad=st.booleans())
add_rule("edit", name=NAMES, how=st.sampled_from(EDITS), seed=SEEDS, only_writer=st.booleans(), often=2)
add_rule("habit", what=st.sampled_from(HABITS))
add_rule("state_dict")
add_rule("load_state_dict", seed=SEEDS, assign=st.sampled_from((False, False, True)))
add_rule("enter", kind=st.sampled_from(("gathered", "gathered", "no_sync")), writer=PARTS, part=PARTS, often=2)
add_rule("leave", when=lambda both: both.opened, raising=st.booleans(), often=2)
add_rule("save", wait=st.booleans())
add_rule("load", when=lambda both: both.checkpoints, which=NUMBER, often=2)
add_rule("offload")
add_rule("reload", when=lambda both: both.away, often=3)
add_rule("reshard", stage=st.integers(0, 3), freeze=st.none() | NAMES, thaw=st.booleans())


def run_sequences(number: int, start: int | None, steps: int, quick: bool = False) -> None:
    """Run random sequences; without ``start`` always the same."""
    phases = [Phase.generate] if quick else [Phase.generate, Phase.shrink]
    chosen = settings(
        max_examples=number,
        stateful_step_count=steps,
        derandomize=start is None,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        verbosity=Verbosity.normal,
        print_blob=False,
    )

    class Chosen(Machine):
        pass

    machine = Chosen if start is None else seed(start)(Chosen)
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.guarantee("Random calls")
def test_a_sharded_model_stays_equal_to_a_plain_one() -> None:
    run_sequences(100, 1, 12)


def forward_after_a_backward_that_raised(both: Lockstep) -> None:
    both.forward(0)
    both.backward(retain=True)
    both.fail_backward(1, 2)
    both.look("full")
    both.backward()


def clear_after_a_backward_that_raised(both: Lockstep) -> None:
    both.forward(1)
    both.backward()
    both.fail_backward(1, 2)  # clears by model.zero_grad(), which alone reaches a parameter that is in no group


def load_by_assignment(both: Lockstep) -> None:
    both.load_state_dict(0, assign=True)
    both.train(0)


def load_directly(both: Lockstep) -> None:
    both.load_state_dict(0, assign=False)
    both.look("full")
    both.offload()
    both.load_state_dict(1, assign=False)


def load_over_loaded_values(both: Lockstep) -> None:
    both.save()
    both.load_state_dict(3, assign=False)
    both.load(0)


def clip_after_a_gradient_was_set_and_read(both: Lockstep) -> None:
    both.assign_gradient("scale", 1)
    both.look("full")
    both.assign_gradient("tail.weight", 2)
    both.clip("torch", 0.5)
    both.assign_gradient("scale", None)


def read_in_a_hook(both: Lockstep) -> None:
    both.train(0)
    both.fail_forward("hook", 1, 1)
    both.train(1)


def step_the_given_optimizer(both: Lockstep) -> None:
    both.assign_gradient("tail.weight", 1)
    both.step_original()


def backward_of_a_checkpointed_block_after_a_step(both: Lockstep) -> None:
    both.forward(4, part=0)
    both.step(4)
    both.backward(0)


def forward_after_one_rank_failed(both: Lockstep) -> None:
    both.train(1)
    both.fail_forward("hook", 0, 5, only=0)  # the other ranks pin what their forward has used
    both.train(0)


def fail_after_a_hook_has_read_a_later_block(both: Lockstep) -> None:
    both.train(3)
    both.fail_forward("forward", 1, 3, only=1)  # the other rank reshards that block, and gathers it again
    both.train(0)


def change_data_right_after_a_step(both: Lockstep) -> None:
    both.train(0)
    both.edit("blocks.0.up.bias", "data.mul_", 0)


def set_a_gradient_under_a_loss_scale(both: Lockstep) -> None:
    both.assign_gradient("scale", 3)
    both.look("full")
    both.train(2)


def give_a_frozen_parameter_a_gradient(both: Lockstep) -> None:
    both.assign_gradient("blocks.0.up.weight", 3)
    both.step_original()
    both.look("full")
    both.train(2, clear="model")
    both.train(1)


def write_nothing_before_a_backward(both: Lockstep) -> None:
    both.forward(0)
    both.enter("gathered", 0)
    both.leave()
    both.backward()


def edit_what_a_new_group_trains(both: Lockstep) -> None:
    both.add_group()
    both.edit("scale", "data.copy_", 0)


def fail_after_a_forward_inside_gathered(both: Lockstep) -> None:
    both.train(1)
    both.enter("gathered")
    both.forward(1)
    both.leave()
    both.fail_forward("forward", 0, 5, only=0)
    both.train(0)


def leave_an_outer_block_by_an_exception(both: Lockstep) -> None:
    both.enter("gathered", 0)
    both.enter("gathered", 0)
    both.edit("scale", "vector", 2)
    both.leave()
    both.leave(raising=True)


SEQUENCES = [
    set_a_gradient_under_a_loss_scale,
    give_a_frozen_parameter_a_gradient,
    write_nothing_before_a_backward,
    edit_what_a_new_group_trains,
    fail_after_a_forward_inside_gathered,
    leave_an_outer_block_by_an_exception,
    change_data_right_after_a_step,
    forward_after_one_rank_failed,
    fail_after_a_hook_has_read_a_later_block,
    backward_of_a_checkpointed_block_after_a_step,
    load_over_loaded_values,
    clip_after_a_gradient_was_set_and_read,
    read_in_a_hook,
    step_the_given_optimizer,
    load_directly,
    forward_after_a_backward_that_raised,
    clear_after_a_backward_that_raised,
    load_by_assignment,
]


SPECIAL: dict[Callable[[Lockstep], None], dict[str, Any]] = {
    forward_after_one_rank_failed: {"blocks": 1, "hook": "other"},
    fail_after_a_hook_has_read_a_later_block: {"blocks": 3, "hook": "other"},
    backward_of_a_checkpointed_block_after_a_step: {"checkpointed": True},
    change_data_right_after_a_step: {"offload": "host"},
    load_over_loaded_values: {"offload": "host"},
    set_a_gradient_under_a_loss_scale: {"precision": "fp16"},
    give_a_frozen_parameter_a_gradient: {"frozen": True},
    edit_what_a_new_group_trains: {"precision": "fp16"},
}


@pytest.mark.guarantee("Random calls")
@pytest.mark.parametrize("sequence", SEQUENCES)
@at_stages(1, 3)
def test_sequences_that_the_machine_has_found(sequence: Callable[[Lockstep], None], stage: int) -> None:
    for world in (1, 2):
        options = Options(stage=stage, world=world, held_out=True, hook="gathered")
        both = Lockstep(replace(options, **SPECIAL.get(sequence, {})))
        try:
            sequence(both)
            both.finish()
        finally:
            both.close()


# ------------------------------------------------------------------------------------------------- a long run


def _child(arguments: argparse.Namespace) -> int:
    faulthandler.enable()
    settle_torch()
    WITHOUT.update(filter(None, arguments.without.split(",")))
    if arguments.only:
        WITHOUT.update(GRAMMAR.keys() - set(arguments.only.split(",")))
    Lockstep.lenient = arguments.lenient
    for entry in arguments.fix:
        name, _, value = entry.partition("=")
        FIXED[name] = {"None": None, "True": True, "False": False}.get(value, int(value) if value.isdigit() else value)
    try:
        run_sequences(arguments.chunk, arguments.seed, arguments.steps, arguments.quick)
    except Counterexample as error:
        print(error, *getattr(error, "__notes__", ()), sep="\n")
        return 1
    finally:
        print(f"ran {STARTED['sequences']} sequences, {STARTED['rules']} rules", flush=True)
        if arguments.counts:
            print("done:", *(f"  {n:6d} {what}" for what, n in sorted(DONE.items())), sep="\n")
            print("refused:", *(f"  {n:6d} {what}" for what, n in sorted(REFUSED.items())), sep="\n", flush=True)
    return 0


def _last_sequence(path: Path) -> str:
    text = path.read_text() if path.exists() else ""
    return "-- " + text.rsplit("-- Options", 1)[-1] if "-- Options" in text else text[-3000:]


def _parent(arguments: argparse.Namespace) -> int:
    left, number, failures = arguments.sequences, arguments.seed, 0
    running: list[tuple[int, subprocess.Popen[str], Path]] = []
    began = time.monotonic()
    ran = 0
    with tempfile.TemporaryDirectory() as scratch:
        while left > 0 or running:
            while left > 0 and len(running) < arguments.jobs:
                chunk = min(arguments.chunk, left)
                left -= chunk
                path = Path(scratch) / f"log-{number}"
                command = [sys.executable, __file__, *sys.argv[1:], "--child", "--chunk", str(chunk)]
                command += ["--seed", str(number)]
                child = subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={**os.environ, "ZEROSHARD_STATE_MACHINE_LOG": str(path)},
                )
                running.append((number, child, path))
                number += 1
            first, child, path = running.pop(0)
            output, _ = child.communicate()
            if child.returncode == 0:
                ran += arguments.chunk
            else:
                failures += 1
                print(f"\n===== seed {first} (chunk {arguments.chunk}): status {child.returncode}\n{output[-9000:]}")
                if child.returncode < 0:
                    print(f"the interpreter was ended by signal {-child.returncode}, in\n{_last_sequence(path)}")
                if not arguments.keep_going:
                    left = 0
            path.unlink(missing_ok=True)
            if arguments.counts:
                print(output)
            seconds = time.monotonic() - began
            print(
                f"seed {first}: {ran} sequences without a counterexample, {failures} with; {seconds:.0f} s", flush=True
            )
    return 1 if failures else 0


def main() -> int:
    """The long run's command line."""
    parser = argparse.ArgumentParser(description="Run many sequences of calls and compare with a plain model.")
    parser.add_argument("--sequences", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=100, help="sequences of one process")
    parser.add_argument("--steps", type=int, default=14, help="the most rules of a sequence")
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--quick", action="store_true", help="do not shorten counterexamples")
    parser.add_argument("--counts", action="store_true", help="tell what was done and refused")
    parser.add_argument("--without", default="", help="rules to leave out, separated by commas")
    parser.add_argument("--only", default="", help="the only rules, separated by commas")
    parser.add_argument("--lenient", action="store_true", help="take refusals of what a plain loop does")
    parser.add_argument("--fix", nargs="*", default=[], metavar="OPTION=VALUE", help="options that are not drawn")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return _child(arguments) if arguments.child else _parent(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
