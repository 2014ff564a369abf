"""Apply the same calls to a sharded model and a plain one, and check after each that they stay equal.

`Lockstep` holds both sides. Each of its methods does one thing that a user may do, first to the sharded model on every
rank, then to the plain model. It raises `Counterexample` unless one of these is the result:

- both succeeded with the same numbers (within the tolerance of `Lockstep.same`);
- the sharded side raised one of zeroshard's own errors on all ranks. The plain side then skips the call, so later
  comparisons show that the rejected call changed nothing;
- both raised, and the error is torch's own (a freed graph, a saved tensor that was modified) or the test's (`Trouble`).

An error is zeroshard's own if the innermost frame is a `raise` statement inside zeroshard and its text does not quote
torch internals. A call that a plain loop makes in every step must not be rejected at all (`must`).

[Note: the plain side]
There is one plain model for any number of ranks: it computes each rank's loss and accumulates their mean. Under bf16
and fp16 its parameters are the fp32 master weights, and each forward casts them. Buffers are kept per rank, and rank
0's are copied to all before a forward, as in DDP.

[Note: what is read when]
Reading everything after each call would hide stale values, because reads wait for updates and all-gather. So after each
call a random kind of read follows, often none; the last one reads everything.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import linecache
import pickle
import re
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from ranks import RanksFailed, ThreadTeam, seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call
from torch.nn import functional as F
from zoo import Mlp

import zeroshard

WIDTH, HIDDEN, BATCH = 4, 6, 3
PACKAGE = str(Path(zeroshard.__file__).parent)
RAW = (  # parts of low-level errors that users should not see
    "setStorage",
    "resize storage",
    "out of bounds for storage",
    "data pointer",
    "KeyError",
    "NoneType",
    "has no attribute",
    "list index",
    "tuple index",
)
TORCHS_OWN = (  # parts of errors that a plain model raises too
    "backward through the graph a second time",
    "modified by an inplace operation",
    "does not require grad",
    "norm of order",
    "The total norm",
)
LOOKS = ("none", "none", "direct", "numpy", "full", "gathered", "optimizer")


class Counterexample(AssertionError):
    """The two sides differ, or an error is not one of zeroshard's own."""


class Trouble(Exception):
    """Raised by the test itself, in the middle of a forward, backward or hook."""


@dataclass(frozen=True)
class Options:
    """How the model is built and sharded."""

    stage: int = 0
    world: int = 1
    partition: str = "hybrid"  # on a mesh of 2 × 2, with 4 ranks
    precision: str | None = None
    reduce_dtype: str | None = None
    offload: str | None = None  # "host", "disk", "parameters"
    optimizer: str = "sgd"
    blocks: int = 2
    frozen: bool = False  # a weight is frozen when shard() is called
    held_out: bool = False  # a parameter is in no group until add_param_group()
    checkpointed: bool = False
    hook: str | None = None  # "own", "other", "gathered": what a forward hook of the first block reads
    cast_on_gather: bool = True
    backwards: int | None = None
    eight_bits: str | None = None  # "int8": of gathers in stage 3, and of reductions where they can be

    @property
    def is_exact(self) -> bool:
        """Whether computations are in fp32, with parameters and gradients that were not rounded."""
        return self.precision is None and self.eight_bits is None

    @property
    def dtype(self) -> torch.dtype | None:
        return {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]

    def shard_options(self, scratch: str) -> dict[str, Any]:
        offload: Any = self.offload
        if self.offload == "disk":
            offload = {"optimizer": "disk", "directory": scratch}
        elif self.offload == "parameters":  # which can only be offloaded in stage 3, without inner shards
            can_offload = self.stage == 3 and not self.partition.startswith("hierarchical")
            offload = {"optimizer": "host", "parameters": "host"} if can_offload else "host"
        mesh, partition = None, self.partition if self.stage > 0 else "hybrid"
        reduces = self.world > 1 and self.stage > 0 and self.reduce_dtype is None
        if self.world == 4:
            reduces = reduces and partition != "hybrid"
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return {
            "stage": self.stage,
            "mesh": mesh,
            "partition": partition,
            "gather_dtype": self.eight_bits if self.stage == 3 else None,
            "reduce_wire": self.eight_bits if reduces else None,
            "precision": self.precision,
            "reduce_dtype": self.reduce_dtype,
            "offload": offload,
            "cast_on_gather": self.cast_on_gather,
            "backwards": self.backwards,
            "loss_scale": 64.0,
            "timeout": 10.0,
        }


class Net(nn.Module):
    """Blocks, a root parameter, a weight used outside its module, a layer that few batches use, and buffers."""

    mean: torch.Tensor
    calls: torch.Tensor

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(WIDTH, HIDDEN) for _ in range(blocks))
        self.tail = nn.Linear(WIDTH, WIDTH, bias=False)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.trouble: tuple[str, int] | None = None
        self.noted: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.float().mean(0), 0.1)
                self.calls += 1
        for index, block in enumerate(self.blocks):
            if self.trouble == ("forward", index):
                raise Trouble
            if route == 1 and index == 1:
                continue
            x = block(x)
            if self.trouble == ("backward", index) and x.requires_grad:
                x.register_hook(_fail)
        if route == 2:
            x = x + self.spare(x)
        x = x + 0.1 * F.linear(x, self.tail.weight)
        return x * self.scale


def _fail(gradient: torch.Tensor) -> None:
    raise Trouble


def _watch(net: Net, what: str | None, sharded: bool) -> None:
    """Register hooks that read parameters, or raise."""

    def note(module: nn.Module, args: Any, output: Any) -> None:
        reading = zeroshard.gathered(net) if what == "gathered" and sharded else contextlib.nullcontext()
        with reading, torch.no_grad():
            block = net.blocks[-1 if what == "other" else 0]
            read = list(net.parameters()) if what == "gathered" else [block.up.weight, block.down.bias]
            net.noted.append(torch.stack([p.detach().float().norm() for p in read]))

    def raise_in_hook(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if net.trouble == ("hook", index):
                raise Trouble

        return hook

    if what is not None:
        net.blocks[0].register_forward_hook(note)
    for index, block in enumerate(net.blocks):
        block.register_forward_hook(raise_in_hook(index))


def data(seed: int, rank: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1000 * seed + rank))


def values(seed: int, shape: torch.Size) -> torch.Tensor:
    """New values for a parameter or a gradient."""
    return 0.4 * torch.randn(shape, generator=torch.Generator().manual_seed(77 + seed))


def make_optimizer(kind: str, net: Net, held_out: bool) -> torch.optim.Optimizer:
    inner = [p for block in net.blocks for p in block.parameters()]
    outer = [*net.tail.parameters(), *net.spare.parameters(), *(() if held_out else (net.scale,))]
    groups: list[dict[str, Any]] = [{"params": inner, "lr": 0.1}, {"params": outer, "lr": 0.2}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.1)
    if kind == "momentum":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.5, weight_decay=0.01)
    for group in groups:
        group["lr"] /= 4
    if kind == "adam":
        return torch.optim.Adam(groups, eps=0.02)
    if kind == "adamw":
        return torch.optim.AdamW(groups, eps=0.02, weight_decay=0.1)
    if kind == "amsgrad":
        return torch.optim.Adam(groups, eps=0.02, amsgrad=True)
    return torch.optim.RMSprop(groups, eps=0.02)


OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "amsgrad", "rmsprop")


@dataclass
class Side:
    """One rank's model and optimizer, or the plain ones."""

    model: Net
    optimizer: Any
    rank: int = 0
    original: Any = None  # the optimizer that was passed to shard()
    graphs: dict[int, torch.Tensor] = field(default_factory=dict)
    contexts: list[Any] = field(default_factory=list)
    saves: list[zeroshard.Save] = field(default_factory=list)

    def parameter(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name)


@dataclass
class Saved:
    """A snapshot of the plain side."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


@dataclass
class Opened:
    """An open `gathered()` or `no_sync()` context."""

    kind: str
    writes: bool = False
    writer: int = 0
    names: tuple[str, ...] = ()
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    edited: bool = False
    apart: bool = False  # only the writing rank has the edit


class Plain:
    """The plain side: see [Note: the plain side]."""

    def __init__(self, net: Net, options: Options) -> None:
        self.model = net
        self.world = options.world
        self.dtype = options.dtype
        self.optimizer = make_optimizer(options.optimizer, net, options.held_out)
        self.graphs: dict[int, list[torch.Tensor]] = {}
        self.versions: dict[int, list[int]] = {}  # version counters of the parameters when each graph was created
        self.buffers = [{k: b.clone() for k, b in net.named_buffers()} for _ in range(self.world)]

    def parameter(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name)

    def _computed(self, module: nn.Module, *args: Any) -> torch.Tensor:
        if self.dtype is None:
            return module(*args)
        cast = {name: p.to(self.dtype) for name, p in module.named_parameters()}
        first = args[0].to(self.dtype)
        return functional_call(module, cast, (first, *args[1:]))

    def run(self, body: Callable[[Callable[..., torch.Tensor], int], Any]) -> list[Any]:
        """Call ``body`` for each rank with its buffers; afterwards raise the first `Trouble`, if any."""
        found, raised = [], []
        for mine in self.buffers[1:]:
            for key, buffer in mine.items():
                buffer.copy_(self.buffers[0][key])
        for rank in range(self.world):
            self._take(self.buffers[rank])
            try:
                found.append(body(self._computed, rank))
            except Trouble as error:
                raised.append(error)
            for key, buffer in self.model.named_buffers():
                self.buffers[rank][key].copy_(buffer)
        self._take(self.buffers[0])
        if raised:
            raise raised[0]
        return found

    def _take(self, buffers: dict[str, torch.Tensor]) -> None:
        for key, buffer in self.model.named_buffers():
            buffer.copy_(buffers[key])

    @torch.no_grad()
    def set(self, name: str, new: torch.Tensor) -> None:
        self.parameter(name).copy_(new)

    def version(self) -> list[int]:
        return [parameter._version for parameter in self.model.parameters()]

    def computed_value(self, name: str) -> torch.Tensor:
        value = self.parameter(name).detach()
        return value if self.dtype is None else value.to(self.dtype).float()

    def save(self) -> Saved:
        return Saved(
            {k: p.detach().clone() for k, p in self.model.named_parameters()},
            {k: b.clone() for k, b in self.buffers[0].items()},
            copy.deepcopy(self.optimizer.state_dict()),
        )

    def load(self, saved: Saved, optimizer: bool = True) -> None:
        for name, value in saved.parameters.items():
            self.set(name, value)
        for mine in self.buffers:
            for key, value in saved.buffers.items():
                mine[key].copy_(value)
        self._take(self.buffers[0])
        if optimizer:
            self.optimizer.load_state_dict(copy.deepcopy(saved.optimizer))


def is_clear(error: BaseException) -> bool:
    """Return whether zeroshard itself raised the error, with its own text."""
    if isinstance(error, (KeyError, IndexError, AttributeError, AssertionError, Trouble)):
        return False
    if any(raw in str(error) for raw in RAW):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not str(frames[-1].filename).startswith(PACKAGE):
        return False
    last = frames[-1]
    return linecache.getline(last.filename, last.lineno or 0).strip().startswith("raise")


def told(error: BaseException | None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error)[-6:])[-1800:]


class Lockstep:
    """Both sides: see the top of the file."""

    lenient = False  # whether calls that a plain loop makes in every step may be rejected

    def __init__(self, options: Options, log: Callable[[str], None] = lambda text: None) -> None:
        self.options = options
        self.log = log
        self.refused: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.over = False  # the sharded model cannot be used any more, as expected
        self.away = False
        self.opened: list[Opened] = []
        self.checkpoints: list[tuple[str, Saved]] = []
        self.snapshots: list[tuple[list[Any], Saved]] = []  # optimizer state dicts: (of each rank, plain)
        self.thawed: set[str] = set()
        self.by_hand = False  # gradients were set by hand, without the loss scale
        self._last: dict[tuple[str, ...], tuple[int, int | None]] = {}  # last forward, by gathered parameters
        self._ids = itertools.count()
        self._scratch = contextlib.ExitStack()
        self.scratch = self._scratch.enter_context(tempfile.TemporaryDirectory())
        with seeded(3):
            net = Net(options.blocks)
        if options.frozen:
            net.blocks[0].up.weight.requires_grad_(False)
        self.frozen_at_shard = {name for name, p in net.named_parameters() if not p.requires_grad}
        self.plain = Plain(copy.deepcopy(net), options)
        _watch(self.plain.model, options.hook, sharded=False)
        self.sides: list[Side] = [None] * options.world
        self._team = ThreadTeam(options.world) if options.world > 1 else None
        try:
            self._call("shard", lambda rank: self._build(rank, copy.deepcopy(net)))
        except BaseException:
            self.close()
            raise
        self.names = [name for name, _ in net.named_parameters()]

    def _build(self, rank: int, net: Net) -> None:
        options = self.options
        _watch(net, options.hook, sharded=True)
        if options.checkpointed:
            zeroshard.checkpoint_activations(net, ["blocks.*"])
        original = make_optimizer(options.optimizer, net, options.held_out)
        model, optimizer = zeroshard.shard(net, original, **options.shard_options(self.scratch))
        self.sides[rank] = Side(model, optimizer, rank, original)

    def close(self) -> None:
        try:
            if self._team is not None:
                self._team.close()
        finally:
            self._scratch.close()

    def act(self, method: str, given: dict[str, Any]) -> None:
        """Call a method by name; a parameter of a block that this model lacks is one of the first block."""
        if "name" in given and given["name"] not in self.names:
            given = {**given, "name": given["name"].replace("blocks.1", "blocks.0")}
        getattr(self, method)(**given)

    # -- both sides -----------------------------------------------------------------------------------------------

    def _call(self, title: str, act: Callable[[int], Any]) -> list[Any]:
        """Call ``act`` on every rank; any error is a counterexample."""
        outcomes = self._outcomes(title, act)
        for _, error in outcomes:
            if error is not None:
                raise Counterexample(f"{title}: {told(error)}") from error
        return [value for value, _ in outcomes]

    def _outcomes(self, title: str, act: Callable[[int], Any]) -> list[tuple[Any, BaseException | None]]:
        self.log(title)
        if self._team is None:
            try:
                return [(act(0), None)]
            except Exception as error:
                return [(None, error)]
        try:
            return self._team.call(act)
        except RanksFailed as error:
            self.over = True
            raise Counterexample(f"{title}: ranks stuck or apart\n{error}") from error

    def _do(
        self,
        title: str,
        act: Callable[[Side], Any],
        plain: Callable[[], Any],
        must: bool = False,
        stale: bool = False,
    ) -> tuple[list[Any], Any] | None:
        """Run a call on both sides; return None if it was rejected or both raised.

        ``stale``: torch's error about parameters modified in place is correct, whatever the plain side does.
        """
        outcomes = self._outcomes(title, lambda rank: act(self.sides[rank]))
        errors = [error for _, error in outcomes if error is not None]
        if not errors:
            try:
                expected = plain()
            except Exception as error:
                raise Counterexample(f"{title} went through; the plain model raises {error!r}") from error
            self.done[title.split("(")[0]] += 1
            return [value for value, _ in outcomes], expected
        if len(errors) < len(outcomes):
            raise Counterexample(f"{title}: only some ranks raised: {told(errors[0])}") from errors[0]
        if all(map(is_clear, errors)):
            if must and self.ordinary:
                raise Counterexample(
                    f"{title} was refused, though a plain loop does it: {told(errors[0])}"
                ) from errors[0]
            words = re.sub(r"'[a-z0-9_.]+'", "…", str(errors[0]))
            self.refused[f"{title.split('(')[0]}: {words[:70]}"] += 1
            return None
        if stale and all("modified by an inplace operation" in str(error) for error in errors):
            self.done[f"{title.split('(')[0]} (stale)"] += 1
            return None
        gradients = {name: _copied(self.plain.parameter(name).grad) for name in self.names}
        try:
            plain()
        except Exception as error:
            for name, gradient in gradients.items():
                self.plain.parameter(name).grad = gradient
            for mine in errors:
                same = isinstance(error, Trouble) and isinstance(mine, Trouble)
                same = same or (type(mine) is type(error) and str(mine) == str(error))
                torchs = any(words in str(mine) and words in str(error) for words in TORCHS_OWN)
                if not (same or torchs or is_clear(mine)):
                    raise Counterexample(f"{title}: the plain model raises {error!r}, but here {told(mine)}") from mine
            self.done[f"{title.split('(')[0]} (both raised)"] += 1
            return None
        raise Counterexample(f"{title}: an error that is not clear: {told(errors[0])}") from errors[0]

    @property
    def ordinary(self) -> bool:
        """Return whether the model is in its normal state, in which calls of a plain loop must not be rejected."""
        return not (
            self.lenient
            or self.away
            or self.over
            or self.thawed
            or self.gathered
            or self._given_to_frozen
            or (self.options.precision == "fp16" and self.by_hand)
        )

    @property
    def gathered(self) -> tuple[str, ...]:
        """Return the names of the parameters that are gathered now."""
        return tuple(sorted({name for o in self.opened if o.kind == "gathered" for name in o.names}))

    @property
    def _given_to_frozen(self) -> bool:
        """Return whether a parameter that was frozen at shard() has a gradient: then step() raises."""
        return any(self.plain.parameter(name).grad is not None for name in self.frozen_at_shard)

    @property
    def has_gradients(self) -> bool:
        return any(self.plain.parameter(name).grad is not None for name in self.names)

    def habit(self, what: str) -> None:
        """Do something that plain models allow: a conversion, a copy, a print."""
        kind, _, how = what.partition(" ")
        if kind == "cast":
            self.cast(how)
        elif kind == "duplicate":
            self.duplicate(how)
        else:
            self.report()

    # -- comparing ------------------------------------------------------------------------------------------------

    def same(self, what: str, got: Any, expected: Any, loose: float = 1.0) -> None:
        """Compare numbers within the tolerance of the precision."""
        if got is None or expected is None:
            if got is not expected:
                raise Counterexample(f"{what}: {got} instead of {expected}")
            return
        one = torch.as_tensor(got).detach().float()
        other = torch.as_tensor(expected).detach().float()
        if one.shape != other.shape:
            raise Counterexample(f"{what}: shape {tuple(one.shape)} instead of {tuple(other.shape)}")
        near, far = (2e-5, 2e-4) if self.options.is_exact else (5e-3, 2e-2)
        size = float(other.abs().max()) if other.numel() else 0.0
        off = float((one - other).abs().max()) if other.numel() else 0.0
        if not off <= loose * (near + far * size):
            raise Counterexample(f"{what}: off by {off:.3g} of {size:.3g}\n{one.flatten()[:6]}\n{other.flatten()[:6]}")

    def look(self, kind: str) -> None:
        """Read the states in one way and compare them."""
        if self.over or self.away or kind == "none":
            return
        if kind in ("direct", "numpy"):
            self._look_direct(kind == "numpy")
        elif kind == "gathered" and not self.opened:
            self._look_gathered()
        elif kind == "full":
            self._look_full()
        elif kind == "optimizer":
            self.read_optimizer()

    def _look_direct(self, numpy: bool = False) -> None:
        """Read parameters directly, as user code for averages or histograms does."""
        apart = [o for o in self.opened if o.apart]
        for name in self.names:
            done = self._do(
                f"read({name})",
                lambda side, name=name: _read(side.parameter(name), numpy),
                lambda: None,
            )
            for rank, value in enumerate(done[0] if done is not None else ()):
                if not apart or rank == apart[0].writer:
                    self.same(f"{name} as rank {rank} reads it", value, self.plain.computed_value(name))

    def _look_gathered(self) -> None:
        def read(side: Side) -> dict[str, torch.Tensor]:
            with zeroshard.gathered(side.model):
                return {name: _read(side.parameter(name)) for name in self.names}

        done = self._do("gathered(read)", read, lambda: None, must=True)
        for rank, found in enumerate(done[0] if done is not None else ()):
            for name, value in found.items():
                self.same(f"{name} gathered on rank {rank}", value, self.plain.computed_value(name))

    def _look_full(self) -> None:
        edited = any(o.edited for o in self.opened)
        for name in self.names if not edited else ():
            done = self._do(
                f"full_parameter({name})",
                lambda side, name=name: zeroshard.full_parameter(side.model, name),
                lambda: None,
                must=True,
            )
            for value in done[0] if done is not None else ():
                self.same(f"full_parameter {name}", value, self.plain.parameter(name))
            if done is not None and not self.options.is_exact:  # so that rounding errors do not accumulate
                self.plain.parameter(name).data.copy_(done[0][0])
        for name in self.names:
            done = self._do(
                f"full_gradient({name})",
                lambda side, name=name: zeroshard.full_gradient(side.model, name),
                lambda: None,
                must=True,
            )
            for value in done[0] if done is not None else ():
                self.same(f"full_gradient {name}", value, self.plain.parameter(name).grad, loose=2)
        for key, buffer in self.sides[0].model.named_buffers():
            self.same(f"buffer {key}", buffer, self.plain.buffers[0][key])
        self.read_optimizer()

    def read_optimizer(self, keep: bool = False) -> None:
        done = self._do(
            "optimizer.state_dict", lambda side: side.optimizer.state_dict(), self.plain.optimizer.state_dict, must=True
        )
        if done is None:
            return
        for found in done[0]:
            self._same_states(found, done[1])
        if keep:
            self.snapshots.append((done[0], self.plain.save()))

    def _same_states(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        for number, (one, other) in enumerate(zip(found["param_groups"], expected["param_groups"], strict=True)):
            if one != other:
                raise Counterexample(f"group {number}: {one} instead of {other}")
        if found["state"].keys() != expected["state"].keys():
            raise Counterexample(f"states of {sorted(found['state'])} instead of {sorted(expected['state'])}")
        for number, state in expected["state"].items():
            mine = found["state"][number]
            if mine.keys() != state.keys():
                raise Counterexample(f"state {number} has {sorted(mine)} instead of {sorted(state)}")
            for key, value in state.items():
                self.same(f"state {key!r} of parameter {number}", mine[key], value, loose=2)

    # -- forward and backward -------------------------------------------------------------------------------------

    def forward(self, seed: int, route: int = 0, part: int | None = None) -> None:
        """Run a forward with a graph, of the full model or one block."""
        number = next(self._ids)
        apart = any(o.apart for o in self.opened)
        if apart:
            return

        def act(side: Side) -> tuple[float, list[torch.Tensor]]:
            side.model.noted.clear()
            side.graphs[number] = self._loss(lambda m, *args: m(*args), side.model, side.rank, seed, route, part)
            return side.graphs[number].item(), list(side.model.noted)

        def plain() -> list[tuple[float, list[torch.Tensor]]]:
            def body(run: Callable[..., torch.Tensor], rank: int) -> tuple[float, list[torch.Tensor]]:
                self.plain.model.noted.clear()
                loss = self._loss(run, self.plain.model, rank, seed, route, part)
                self.plain.graphs.setdefault(number, []).append(loss)
                self.plain.versions[number] = self.plain.version()
                return loss.item(), list(self.plain.model.noted)

            return self.plain.run(body)

        # for zeroshard, a block that is not a unit ends with its last layer, before its own hooks run
        alone = part is not None and self.options.blocks == 1 and self.options.hook is not None
        done = self._do(f"forward({seed}, route={route}, part={part})", act, plain, must=not alone)
        if done is None:
            self._drop(number)
            return
        self._last[self.gathered] = (route, part)
        self._same_outputs("loss", done)
        if not self.plain.graphs[number][0].requires_grad:
            self._drop(number)
        for old in list(self.plain.graphs)[:-2]:
            self._drop(old)

    def _loss(
        self,
        run: Callable[..., torch.Tensor],
        net: Net,
        rank: int,
        seed: int,
        route: int,
        part: int | None,
    ) -> torch.Tensor:
        x = data(seed, rank)
        if part is None:
            output = run(net, x, route)
        else:
            block = net.blocks[part % len(net.blocks)]
            output = run(block, x if self.options.dtype is None else x.to(self.options.dtype))
        return output.float().pow(2).mean()

    def _same_outputs(self, what: str, done: tuple[list[Any], Any]) -> None:
        for rank, (mine, theirs) in enumerate(zip(done[0], done[1], strict=True)):
            self.same(f"{what} on rank {rank}", mine[0], theirs[0], loose=2)
            if len(mine[1]) != len(theirs[1]):
                raise Counterexample(f"hooks noted {len(mine[1])} times instead of {len(theirs[1])}")
            for one, other in zip(mine[1], theirs[1], strict=True):
                self.same(f"what a hook read on rank {rank}", one, other, loose=2)

    def _drop(self, number: int) -> None:
        self.plain.graphs.pop(number, None)
        self._call("drop a graph", lambda rank: self.sides[rank].graphs.pop(number, None) and None)

    def drop_graphs(self) -> None:
        for number in list(self.plain.graphs):
            self._drop(number)

    def evaluate(self, seed: int, route: int = 0, mode: bool = False, inference: bool = False) -> None:
        """Run a forward without a graph."""
        if any(o.apart for o in self.opened):
            return
        quiet = torch.inference_mode if inference else torch.no_grad

        def act(side: Side) -> tuple[float, list[torch.Tensor]]:
            side.model.noted.clear()
            side.model.train(mode)
            try:
                with quiet():
                    loss = self._loss(lambda m, *args: m(*args), side.model, side.rank, seed, route, None)
                    return loss.item(), list(side.model.noted)
            finally:
                side.model.train()

        def plain() -> list[tuple[float, list[torch.Tensor]]]:
            def body(run: Callable[..., torch.Tensor], rank: int) -> tuple[float, list[torch.Tensor]]:
                self.plain.model.noted.clear()
                with torch.no_grad():
                    loss = self._loss(run, self.plain.model, rank, seed, route, None)
                return loss.item(), list(self.plain.model.noted)

            self.plain.model.train(mode)
            try:
                return self.plain.run(body)
            finally:
                self.plain.model.train()

        done = self._do(f"evaluate({seed}, route={route}, train={mode}, inference={inference})", act, plain, must=True)
        if done is not None:
            self._same_outputs("evaluation", done)

    def fail_forward(self, where: str, index: int, seed: int, only: int | None = None) -> None:
        """Raise in a forward or in one of its hooks, on all ranks or on one; the batch is skipped.

        On one rank only if the previous forward was the same: otherwise the rank cannot know what the others expect.
        """
        if any(o.apart for o in self.opened):
            return
        only = only if self._last.get(self.gathered) == (0, None) else None
        index %= self.options.blocks

        def troubled(rank: int) -> tuple[str, int] | None:
            return (where, index) if only is None or only % self.options.world == rank else None

        def act(side: Side) -> None:
            side.model.trouble = troubled(side.rank)
            try:
                self._loss(lambda m, *args: m(*args), side.model, side.rank, seed, 0, None)
            except Trouble:
                if side.model.trouble is None:
                    raise
            finally:
                side.model.trouble = None
                side.model.noted.clear()

        def plain() -> None:
            def body(run: Callable[..., torch.Tensor], rank: int) -> None:
                self.plain.model.trouble = troubled(rank)
                with contextlib.suppress(Trouble):
                    self._loss(run, self.plain.model, rank, seed, 0, None)

            try:
                self.plain.run(body)
            finally:
                self.plain.model.trouble = None
                self.plain.model.noted.clear()

        self._do(f"fail_forward({where}, {index}, only={only})", act, plain, must=True)
        self._last.pop(self.gathered, None)

    def backward(self, which: int = -1, retain: bool = False, both: bool = False, scaled: bool = True) -> None:
        """Run a backward of one graph, or of the sum of all."""
        if not self.plain.graphs or any(o.apart for o in self.opened):
            return
        known = list(self.plain.graphs)
        numbers = known if both else [known[which % len(known)]]

        def act(side: Side) -> None:
            loss = sum((side.graphs[number] for number in numbers[1:]), side.graphs[numbers[0]])
            loss = side.optimizer.scale(loss) if scaled else loss
            loss.backward(retain_graph=retain)

        def plain() -> None:
            for rank in range(self.options.world):
                losses = [self.plain.graphs[number][rank] for number in numbers]
                loss = sum(losses[1:], losses[0]) / self.options.world
                loss.backward(retain_graph=retain)

        # The plain side's graphs save casts of the parameters, so torch does not notice that the parameters changed.
        changed = any(self.plain.versions[number] != self.plain.version() for number in numbers)
        stale = changed and self.options.dtype is not None
        done = self._do(f"backward({numbers}, retain={retain}, scaled={scaled})", act, plain, stale=stale)
        if done is None:  # gradients accumulated so far stay, as in torch; a loop that continues clears them
            for number in numbers:
                self._drop(number)
            self.zero_grad("optimizer")
            self.zero_grad("model")

    def fail_backward(self, index: int, seed: int) -> None:
        """Raise in the middle of a backward, and clear the gradients, as a loop that continues does."""
        if any(o.apart for o in self.opened):
            return
        index %= self.options.blocks
        if self.options.precision == "fp16" and self.has_gradients:  # they may come from a loss that was not scaled
            return

        def act(side: Side) -> None:
            side.model.trouble = ("backward", index)
            try:
                loss = self._loss(lambda m, *args: m(*args), side.model, side.rank, seed, 0, None)
            finally:
                side.model.trouble = None
                side.model.noted.clear()
            if loss.requires_grad:
                with contextlib.suppress(Trouble):
                    side.optimizer.scale(loss).backward()
            side.optimizer.zero_grad()
            side.model.zero_grad()

        def plain() -> None:
            def body(run: Callable[..., torch.Tensor], rank: int) -> None:
                self._loss(run, self.plain.model, rank, seed, 0, None)

            self.plain.run(body)
            self.plain.model.zero_grad()
            self.plain.model.noted.clear()

        self._do(f"fail_backward({index})", act, plain, must=True)

    # -- the optimizer --------------------------------------------------------------------------------------------

    def step(self, closure: int | None = None) -> None:
        if any(o.edited and not o.writes for o in self.opened) or any(o.apart for o in self.opened):
            return  # it is undefined what is undone at the end
        if closure is not None and self.options.precision == "fp16" and self.has_gradients:
            return  # what zero_grad() leaves may come from a loss that was not scaled
        seed = closure
        called: list[int] = []

        def act(side: Side) -> Any:
            if seed is None:
                return side.optimizer.step()

            def again() -> torch.Tensor:
                side.optimizer.zero_grad()
                called.append(side.rank)
                loss = self._loss(lambda m, *args: m(*args), side.model, side.rank, seed, 0, None)
                if loss.requires_grad:
                    side.optimizer.scale(loss).backward()
                return loss

            found = side.optimizer.step(again).item()
            side.model.noted.clear()
            return found

        def plain() -> Any:
            if seed is None:
                return self.plain.optimizer.step()

            def again() -> Any:
                self.plain.optimizer.zero_grad()

                def body(run: Callable[..., torch.Tensor], rank: int) -> float:
                    loss = self._loss(run, self.plain.model, rank, seed, 0, None)
                    if loss.requires_grad:
                        (loss / self.options.world).backward()
                    return loss.item()

                return self.plain.run(body)

            with torch.enable_grad():
                found = again()
            self.plain.optimizer.step()
            self.plain.model.noted.clear()
            return found

        done = self._do(f"step(closure={closure})", act, plain, must=True)
        if done is None and called:  # the closure cleared the gradients before the step was rejected
            self.plain.optimizer.zero_grad()
        if done is not None and seed is not None:
            for mine, theirs in zip(*done, strict=True):
                self.same("the closure's loss", mine, theirs, loose=2)

    def train(self, seed: int, clear: str = "optimizer") -> None:
        """Run one step of a plain loop."""
        self.forward(seed)
        self.backward()
        self.step()
        self.zero_grad(clear)

    def zero_grad(self, by: str = "optimizer", set_to_none: bool = True) -> None:
        self._do(
            f"zero_grad({by}, {set_to_none})",
            lambda side: (side.optimizer if by == "optimizer" else side.model).zero_grad(set_to_none=set_to_none),
            lambda: (self.plain.optimizer if by == "optimizer" else self.plain.model).zero_grad(
                set_to_none=set_to_none
            ),
            must=True,
        )

    def clip(self, by: str, most: float, infinite: bool = False) -> None:
        """Clip gradients by norm or by value, with torch or with the optimizer."""
        kind = float("inf") if infinite else 2.0

        def clipped(model: nn.Module, optimizer: Any) -> Any:
            groups = [p for group in optimizer.param_groups for p in group["params"]]
            if by == "torch":
                return torch.nn.utils.clip_grad_norm_(model.parameters(), most, kind)
            if by == "groups":
                return torch.nn.utils.clip_grad_norm_(groups, most, kind)
            if by == "value":
                return torch.nn.utils.clip_grad_value_(model.parameters(), most)
            if by == "value of groups":
                return torch.nn.utils.clip_grad_value_(groups, most)
            return optimizer.clip_grad_norm_(most, kind)

        def plain() -> Any:
            if by == "optimizer":
                groups = [p for group in self.plain.optimizer.param_groups for p in group["params"]]
                return torch.nn.utils.clip_grad_norm_(groups, most, kind)
            return clipped(self.plain.model, self.plain.optimizer)

        done = self._do(
            f"clip({by}, {most}, inf={infinite})", lambda side: clipped(side.model, side.optimizer), plain, must=True
        )
        if done is not None and "value" not in by:
            for norm in done[0]:
                self.same("the gradients' norm", norm, done[1], loose=2)

    def step_original(self) -> None:
        """Step the optimizer that was passed to shard(): an error if there are gradients."""
        if not self.has_gradients:
            return
        outcomes = self._outcomes("step_original", lambda rank: self.sides[rank].original.step())
        for side, (_, error) in zip(self.sides, outcomes, strict=True):
            if error is None and not any(group["params"] for group in side.original.param_groups):
                continue  # a rank that has no part of these small units
            if error is None:
                raise Counterexample("the optimizer that was given to shard() was stepped, and nothing was said")
            if not is_clear(error):
                raise Counterexample(f"step_original: an error that is not clear: {told(error)}") from error
        self.refused["step_original"] += 1

    def set_rate(self, group: int, rate: float) -> None:
        def change(optimizer: Any) -> None:
            optimizer.param_groups[group % len(optimizer.param_groups)]["lr"] = rate

        self._do(
            f"set_rate({group}, {rate})", lambda side: change(side.optimizer), lambda: change(self.plain.optimizer)
        )

    def add_group(self) -> None:
        """Add the parameter that is in no group to the optimizer; if it is in one, the call must be rejected."""

        def add(model: Net, optimizer: Any) -> None:
            optimizer.add_param_group({"params": [model.scale], "lr": 0.1})

        known = {id(p) for group in self.plain.optimizer.param_groups for p in group["params"]}
        if id(self.plain.model.scale) in known:
            outcomes = self._outcomes("add_group", lambda rank: add(self.sides[rank].model, self.sides[rank].optimizer))
            if not all(error is not None and is_clear(error) for _, error in outcomes):
                raise Counterexample(f"add_group of a parameter that is in one: {told(outcomes[0][1])}")
            return
        self._do(
            "add_group()",
            lambda side: add(side.model, side.optimizer),
            lambda: add(self.plain.model, self.plain.optimizer),
        )

    def load_optimizer(self, which: int, plains: bool) -> None:
        """Load an earlier state dict of the sharded or of the plain optimizer."""
        if not self.snapshots:
            return
        theirs, saved = self.snapshots[which % len(self.snapshots)]
        self._do(
            f"load_optimizer({which}, plain={plains})",
            lambda side: side.optimizer.load_state_dict(
                copy.deepcopy(saved.optimizer if plains else theirs[side.rank])
            ),
            lambda: self.plain.optimizer.load_state_dict(copy.deepcopy(saved.optimizer)),
        )

    # -- gradients ------------------------------------------------------------------------------------------------

    def read_gradient(self, name: str, halve: bool = False) -> None:
        """Read ``p.grad``, and optionally write to it."""

        def act(side: Side) -> torch.Tensor | None:
            gradient = side.parameter(name).grad
            if gradient is None:
                return None
            if halve:
                gradient.mul_(0.5)
            return gradient.detach().clone().float()

        def plain() -> torch.Tensor | None:
            gradient = self.plain.parameter(name).grad
            if gradient is not None and halve:
                gradient.mul_(0.5)
            return gradient

        done = self._do(f"read_gradient({name}, halve={halve})", act, plain)
        for value in done[0] if done is not None else ():
            self.same(f"{name}.grad", value, done[1] if done is not None else None, loose=2)

    def assign_gradient(self, name: str, seed: int | None) -> None:
        """Set ``p.grad`` to new values or None."""

        def act(side: Side) -> None:
            parameter = side.parameter(name)
            parameter.grad = None if seed is None else values(seed, parameter.shape).to(parameter.dtype)

        def plain() -> None:
            parameter = self.plain.parameter(name)
            parameter.grad = None if seed is None else values(seed, parameter.shape)

        if self._do(f"assign_gradient({name}, {seed})", act, plain) is not None:
            self.by_hand = self.by_hand or seed is not None

    # -- parameters -----------------------------------------------------------------------------------------------

    def freeze(self, name: str, requires_grad: bool) -> None:
        def act(side: Side) -> None:
            side.parameter(name).requires_grad_(requires_grad)

        def plain() -> None:
            self.plain.parameter(name).requires_grad_(requires_grad)

        if self.options.checkpointed:  # torch's checkpointing does not allow it between forward and backward
            self.drop_graphs()
        if self._do(f"freeze({name}, {requires_grad})", act, plain) is None:
            return
        if name in self.frozen_at_shard:
            self.thawed = self.thawed | {name} if requires_grad else self.thawed - {name}

    def edit(self, name: str, how: str, seed: int, only_writer: bool = False) -> None:
        """Edit a parameter's values, as user code does between steps or inside gathered()."""
        inside = [o for o in self.opened if o.kind == "gathered"]
        if inside and name not in inside[-1].names:
            return
        if len(inside) > 1 and not all(o.writes for o in inside):
            return
        only_writer = only_writer and len(inside) == 1 and inside[0].writes and self.options.world > 1
        if any(o.apart for o in inside) and not only_writer:
            return

        def act(side: Side) -> None:
            if not only_writer or side.rank == inside[-1].writer:
                _edit(side.parameter(name), how, values(seed, side.parameter(name).shape))

        def plain() -> None:
            parameter = self.plain.parameter(name)
            if self.plain.dtype is None:
                _edit(parameter, how, values(seed, parameter.shape))
                return
            cast = nn.Parameter(parameter.detach().to(self.plain.dtype))
            _edit(cast, how, values(seed, parameter.shape))
            self.plain.set(name, cast.detach().float())

        if how.startswith(("data", "vector")):  # torch does not notice, so a graph would mix old and new values
            self.drop_graphs()
        done = self._do(f"edit({name}, {how}, only_writer={only_writer})", act, plain)
        if done is not None and how in ("data", "vector") and not inside and self._refuses_forward(how):
            self.over = True  # the trained tensors were replaced, and the next forward detected it
        if done is not None and inside:
            for o in inside:
                o.edited = True
                o.apart = o.apart or only_writer

    def cast(self, how: str) -> None:
        """Call `.to()` or similar. It must succeed if it changes nothing.

        A change of dtype must raise, at the latest in the next forward, and ends the sequence.
        """
        calls: dict[str, Callable[[nn.Module], Any]] = {
            "to cpu": lambda m: m.to("cpu"),
            "cpu": lambda m: m.cpu(),
            "to same": lambda m: m.to("cpu", torch.float32 if self.options.dtype is None else None),
            "apply": lambda m: m.apply(lambda module: None),
            "train": lambda m: m.train(),
            "double": lambda m: m.double(),
            "to half": lambda m: m.to(torch.float16 if self.options.precision != "fp16" else torch.bfloat16),
            "to_empty": lambda m: m.to_empty(device="cpu"),
            "share_memory": lambda m: m.share_memory(),
            "replace": _replace,
        }
        act = calls[how]
        harmless = how in ("to cpu", "cpu", "to same", "apply", "train")
        if self._do(f"cast({how})", lambda side: act(side.model) and None, lambda: None, must=harmless) is None:
            return
        if harmless or how == "share_memory":
            return
        if not self._refuses_forward(how):
            raise Counterexample(f"{how} went through, and so does a forward after it")
        self.over = True

    def _refuses_forward(self, how: str) -> bool:
        """Return whether a forward raises on all ranks after a call that the sharded side accepted."""
        outcomes = self._outcomes(
            f"forward after {how}",
            lambda rank: self._loss(lambda m, *a: m(*a), self.sides[rank].model, rank, 0, 0, None).item(),
        )
        errors = [error for _, error in outcomes if error is not None]
        for error in errors:
            if not is_clear(error) or len(errors) < len(outcomes):
                raise Counterexample(f"forward after {how}: an error that is not clear: {told(error)}") from error
        if not errors:
            for rank in range(self.options.world):
                self.sides[rank].model.noted.clear()
            self.plain.run(lambda run, rank: self._loss(run, self.plain.model, rank, 0, 0, None))
            self.plain.model.noted.clear()
            self._last[self.gathered] = (0, None)
        return bool(errors)

    def duplicate(self, what: str) -> None:
        """Copy or pickle the model or the optimizer: zeroshard's own error, or the same values."""

        def act(side: Side) -> dict[str, torch.Tensor] | None:
            if what == "deepcopy":
                copied = copy.deepcopy(side.model)
                return {name: p.detach().float().clone() for name, p in copied.named_parameters()}
            if what == "save":
                torch.save(side.model, io.BytesIO())
            elif what == "pickle optimizer":
                pickle.dumps(side.optimizer)
            else:
                twin = copy.deepcopy(side.optimizer)
                twin.state_dict()
            return None

        done = self._do(f"duplicate({what})", act, lambda: None)
        if done is not None and what == "deepcopy":
            for found in done[0]:
                for name, value in found.items():
                    self.same(f"copy of {name}", value, self.plain.computed_value(name))
        elif done is not None:
            raise Counterexample(f"duplicate({what}) went through")

    def state_dict(self) -> None:
        """Read the model's state dict directly."""
        done = self._do(
            "state_dict",
            lambda side: {k: v.detach().clone() for k, v in side.model.state_dict().items()},
            lambda: None,
        )
        apart = [o for o in self.opened if o.apart]
        for rank, found in enumerate(done[0] if done is not None else ()):
            if apart and rank != apart[0].writer:
                continue
            for name in self.names:
                self.same(f"{name} in the state dict of rank {rank}", found[name], self.plain.computed_value(name))
            for key, value in self.plain.buffers[0].items():
                if rank == 0:
                    self.same(f"{key} in the state dict", found[key], value)

    def load_state_dict(self, seed: int, assign: bool) -> None:
        """Load new values into the model."""
        if any(o.apart or (o.edited and not o.writes) for o in self.opened):
            return
        inside = [o for o in self.opened if o.kind == "gathered"]
        if any(set(o.names) != set(self.names) for o in inside) or len(inside) > 1:
            return
        new: dict[str, torch.Tensor] = {
            name: values(seed + n, self.plain.parameter(name).shape) for n, name in enumerate(self.names)
        }
        buffers = {"mean": values(seed, self.plain.model.mean.shape), "calls": torch.tensor(seed)}

        def act(side: Side) -> None:
            state = {n: (v.clone() if not assign else v.to(side.parameter(n).dtype)) for n, v in new.items()}
            side.model.load_state_dict({**state, **{k: b.clone() for k, b in buffers.items()}}, assign=assign)

        def plain() -> None:
            self.plain.load(Saved(new, buffers, {}), optimizer=False)

        done = self._do(f"load_state_dict({seed}, assign={assign})", act, plain)
        if done is not None:
            for o in inside:
                o.edited = True
        if assign:
            self.drop_graphs()

    # -- contexts -------------------------------------------------------------------------------------------------

    def enter(self, kind: str, writer: int | None = None, part: int | None = None) -> None:
        """Enter gathered() of the model or a block, or no_sync()."""
        if len(self.opened) >= 2 or (writer is not None and any(o.edited for o in self.opened)):
            return
        if any(o.apart for o in self.opened):
            return
        writer = None if writer is None else writer % self.options.world

        def module(net: Net) -> nn.Module:
            return net if part is None else net.blocks[part % len(net.blocks)]

        def act(side: Side) -> None:
            if kind == "gathered":
                context: Any = zeroshard.gathered(module(side.model), write_rank=writer)
            else:
                context = zeroshard.no_sync(side.model)
            context.__enter__()
            side.contexts.append(context)

        if self._do(f"enter({kind}, {writer}, part={part})", act, lambda: None) is None:
            return
        held = {id(p) for p in module(self.plain.model).parameters()}
        names = tuple(name for name in self.names if id(self.plain.parameter(name)) in held)
        before = {name: self.plain.parameter(name).detach().clone() for name in names}
        self.opened.append(Opened(kind, writer is not None, writer or 0, names, before))

    def leave(self, raising: bool = False) -> None:
        """Leave the innermost context, optionally with an exception."""
        if not self.opened:
            return
        opened = self.opened.pop()

        def act(rank: int) -> None:
            side = self.sides[rank]
            context = side.contexts.pop()
            if not raising:
                context.__exit__(None, None, None)
                return
            trouble = Trouble()
            with contextlib.suppress(Trouble):
                context.__exit__(Trouble, trouble, None)

        if opened.edited and not (opened.writes and not raising):
            outer = {name for o in self.opened if o.kind == "gathered" for name in o.names}  # the outer context decides
            for name, value in opened.before.items():
                if name not in outer:
                    self.plain.set(name, value)
        elif opened.edited:
            for o in self.opened:
                o.before |= {
                    name: self.plain.parameter(name).detach().clone() for name in o.before if name in opened.names
                }
        # A plain model has no contexts, so any error here is a counterexample.
        self._call(f"leave({opened.kind}, raising={raising})", act)
        if opened.edited:
            self.drop_graphs()

    # -- other calls ----------------------------------------------------------------------------------------------

    def save(self, wait: bool = True) -> None:
        if any(o.edited for o in self.opened):
            return
        path = str(Path(self.scratch) / f"step-{next(self._ids)}")
        wait = wait or self.options.world > 1
        done = self._do(
            f"save(wait={wait})",
            lambda side: side.saves.append(zeroshard.save(path, side.model, side.optimizer, wait=wait)),
            self.plain.save,
        )
        if done is not None:
            self.checkpoints.append((path, done[1]))

    def load(self, which: int) -> None:
        if not self.checkpoints or any(o.edited for o in self.opened):
            return
        path, saved = self.checkpoints[which % len(self.checkpoints)]
        self._do(
            f"load({which})",
            lambda side: zeroshard.load(path, side.model, side.optimizer) and None,
            lambda: self.plain.load(saved),
        )

    def offload(self) -> None:
        if self._do("offload_states", lambda side: zeroshard.offload_states(side.model), lambda: None) is not None:
            self.away = True

    def reload(self) -> None:
        if (
            self._do("reload_states", lambda side: zeroshard.reload_states(side.model), lambda: None, must=True)
            is not None
        ):
            self.away = False

    def reshard(self, stage: int, freeze: str | None = None, thaw: bool = False) -> None:
        """unwrap(), freeze or unfreeze parameters, and shard() again in another stage."""

        def take_apart(side: Side) -> None:
            side.model, side.optimizer = zeroshard.unwrap(side.model, side.optimizer)

        if self._do("unwrap", take_apart, self.plain.model.zero_grad) is None:
            return
        if any(o.kind == "gathered" for o in self.opened):
            raise Counterexample("unwrap() inside gathered() went through")
        self.drop_graphs()
        self.away = False
        for side in self.sides:
            for name in self.names:
                self.same(f"{name} unsharded", side.parameter(name), self.plain.parameter(name))
        for model in (self.plain.model, *(side.model for side in self.sides)):
            for name, parameter in model.named_parameters():
                if thaw:
                    parameter.requires_grad_(True)
                if name == freeze:
                    parameter.requires_grad_(False)

        def build(rank: int) -> None:
            side = self.sides[rank]
            side.original = side.optimizer
            options = replace(self.options, stage=stage).shard_options(self.scratch)
            side.model, side.optimizer = zeroshard.shard(side.model, side.optimizer, **options)
            for context in side.contexts:
                context.__exit__(None, None, None)
            side.contexts.clear()

        self._call(f"shard(stage={stage})", build)
        self._last.clear()
        self.opened.clear()
        self.thawed = set()
        self.frozen_at_shard = {name for name, p in self.plain.model.named_parameters() if not p.requires_grad}

    def report(self) -> None:
        def act(side: Side) -> str:
            return str(zeroshard.report(side.model)) + repr(side.model.scale) + repr(side.optimizer)

        self._do("report", act, lambda: None, must=True)

    def finish(self) -> None:
        """Compare everything a last time."""
        for side in self.sides:
            for save in side.saves:
                save.wait()
        if self.over:
            return
        while self.opened:
            self.leave()
        if self.away:
            self.reload()
        self.look("direct")
        self.look("full")


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def _read(parameter: torch.Tensor, numpy: bool = False) -> torch.Tensor:
    value = parameter.detach()
    if numpy and value.dtype is torch.float32:
        return torch.from_numpy(value.numpy().copy())
    return value.float().clone()


def _edit(parameter: nn.Parameter, how: str, new: torch.Tensor) -> None:
    if how == "data":
        parameter.data = new.to(parameter.dtype)
    elif how == "data.mul_":
        parameter.data.mul_(0.5)
    elif how == "data.copy_":
        parameter.data.copy_(new)
    elif how == "vector":
        nn.utils.vector_to_parameters(new.to(parameter.dtype).flatten(), [parameter])
    elif how == "init":
        nn.init.constant_(parameter, 0.1)
    else:
        with torch.no_grad():
            if how == "mul_":
                parameter.mul_(0.5)
            elif how == "clamp_":
                parameter.clamp_(-0.1, 0.1)
            else:
                parameter.copy_(new)


EDITS = ("mul_", "copy_", "clamp_", "init", "data", "data.mul_", "data.copy_", "vector")


def _replace(model: nn.Module) -> None:
    net: Any = model
    net.scale = nn.Parameter(torch.ones(WIDTH, dtype=net.scale.dtype))


def names_of(blocks: int) -> Iterator[str]:
    """Yield the parameter names of a net."""
    for name, _ in Net(blocks).named_parameters():
        yield name
