"""OnePass: a step of fused Adam over runs that rest on the device, in one pass over their memory.

[Note: one pass]
Under bf16 and fp16 torch's way is three passes: gradients are copied into a buffer in fp32, the fused kernel updates
the master, and the master is copied into the parameters: 40 bytes a parameter, and the buffer. One kernel reads the
reduced gradient where it lies, unscales and clips it on the way, updates master, momentum and variance, and writes the
parameter in 16 bits into this rank's part: 28 bytes, and no buffer; 26, where no such part is kept
([Note: cast on gather]). The result is torch's to the bit ([Note: every bit of the fused kernel]); the states are
torch's too, under its names, in the optimizer's own ``state``.

Where things lie is noted once, in a table on the device (``table.py``), and holds as long as the addresses do. So a
step is a few launches, however many units, buckets and runs there are. Nothing waits for the device: step counts, loss
scale, clip and overflow are read there. After an overflow nothing is written, and no step counted, as by torch.

Served is what :func:`zeroshard.device.strip.numbers_of` knows, on a GPU with Triton; everything else goes torch's way,
run by run: see [Note: the update in batches].
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from zeroshard.device.strip import PASSED, SERVED, STATES, Factors, Numbers, Strip, numbers_of
from zeroshard.engine.engine import Engine
from zeroshard.runs import Part, Run

NOTED = 16  # tables that are kept: gradients lie now here, now there, and some parameters are used now and then


class Kernel(Protocol):
    """What updates strips."""

    def lay(self, strips: Sequence[Strip], runs: int) -> Any:
        """Note where strips of so many runs lie."""

    def run(self, laid: Any, steps: Sequence[torch.Tensor], numbers: Numbers, factors: Factors) -> None:
        """Update them. ``steps`` are the runs' counts, this update counted too."""


def kernel_for(optimizer: torch.optim.Optimizer, device: torch.device) -> Kernel | None:
    """The kernel that may update parts of an optimizer's parameters on a device; None: torch does.

    >>> kernel_for(torch.optim.AdamW([torch.zeros(1)], fused=True), torch.device("cpu"))
    """
    if device.type != "cuda" or torch.version.cuda is None or type(optimizer) not in SERVED:
        return None
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return _kernel_on(device) if fused else None


@functools.cache
def _kernel_on(device: torch.device) -> Kernel | None:
    try:
        from zeroshard.device.kernel import TritonKernel  # late: it imports Triton

        found = TritonKernel(device)
        _try(found, device)
        return found
    except Exception as error:  # Triton has many, of its own and of the C compiler's that it calls
        warnings.warn(
            f"the optimizer's update in one pass could not be made, so torch's own slower one runs on {device}: "
            f"{type(error).__name__}: {error}. Install Triton, and a C compiler with Python's headers for it",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _try(kernel: Kernel, device: torch.device) -> None:
    """Raise where the kernel does not compile, or does something else than torch's."""
    gradient, step = torch.linspace(-1, 1, 100, device=device), torch.ones((), device=device)
    ours, theirs = ([torch.full_like(gradient, start) for start in (1.0, 0.0, 0.0)] for _ in range(2))
    copy = torch.zeros_like(gradient, dtype=torch.bfloat16)
    kernel.run(
        kernel.lay([Strip(0, gradient, ours[0], ours[1], ours[2], copy)], 1),
        [step],
        Numbers(lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, maximize=False),
        Factors(),
    )
    torch._fused_adamw_(
        [theirs[0]],
        [gradient],
        [theirs[1]],
        [theirs[2]],
        [],
        [step],
        lr=0.01,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )
    torch.testing.assert_close([*ours, copy], [*theirs, theirs[0].bfloat16()], rtol=1e-6, atol=1e-7)


class OnePass:
    """Steps one optimizer's runs: see [Note: one pass]."""

    def __init__(self, inner: torch.optim.Optimizer, engine: Engine, kernel: Kernel) -> None:
        self._inner, self._engine, self._kernel = inner, engine, kernel
        self._suits: WeakKeyDictionary[Run, bool] = WeakKeyDictionary()  # whether a run lies where the kernel can go
        self._noted: dict[tuple[int, ...], Any] = {}  # by the addresses that it holds for

    def sorted(self, runs: list[Run]) -> tuple[list[Run], list[Run]]:
        """The runs that are updated here, and those that torch is to update."""
        served = {id(run.group): run.group for run in runs}
        kind, device = type(self._inner), self._engine.comm.device
        served = {key: group for key, group in served.items() if numbers_of(kind, group, device) is not None}
        ours = [run for run in runs if id(run.group) in served and self._takes(run)]
        chosen = set(map(id, ours))
        return ours, [run for run in runs if id(run) not in chosen]

    def step(self, runs: list[Run], factors: Factors) -> None:
        """Update the runs, of which each has a gradient."""
        new = [run.parameter.nbytes for run in runs if not self._inner.state.get(run.parameter)]
        self._engine.pool.make_room(new * len(STATES))
        by_group: dict[int, list[Run]] = {}
        for run in runs:
            by_group.setdefault(id(run.group), []).append(run)
        for found in by_group.values():
            numbers = numbers_of(type(self._inner), found[0].group, self._engine.comm.device)
            assert numbers is not None
            states = [self._state(run) for run in found]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            self._kernel.run(self._laid(found, states), steps, numbers, factors)
            if factors.overflow is not None:  # it was no step, then
                torch._foreach_sub_(steps, [factors.overflow] * len(steps))

    # -- which runs --------------------------------------------------------------------------------------------------

    def _takes(self, run: Run) -> bool:
        suits = self._suits.get(run)
        if suits is None:
            suits = self._suits[run] = self._lies_well(run)
        return suits and _has_plain_states(self._inner.state.get(run.parameter) or {}, run.parameter)

    def _lies_well(self, run: Run) -> bool:
        parameter, gradients = run.parameter, self._engine.gradients.of_flat
        if run.stretch is not None or parameter.dtype != torch.float32 or not parameter.is_contiguous():
            return False
        for part in run.parts:
            flat, gradient = part.flat, gradients[part.flat]
            if flat.far or gradient.far or gradient.dtype not in PASSED or flat.dtype not in PASSED:
                return False
        return parameter.device.type == self._engine.comm.device.type

    # -- what of them ------------------------------------------------------------------------------------------------

    def _state(self, run: Run) -> dict[str, Any]:
        """The run's states, made as torch makes them, but in memory apart: [Note: memory apart]."""
        state: dict[str, Any] = self._inner.state[run.parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=run.parameter.device)
            for key in STATES:
                with self._engine.pool:
                    state[key] = torch.zeros_like(run.parameter.data)
        return state

    def _laid(self, runs: list[Run], states: list[dict[str, Any]]) -> Any:
        """What the kernel has noted of the runs, as long as nothing has moved."""
        key = tuple(self._addresses(runs, states))
        if key not in self._noted:
            if len(self._noted) == NOTED:
                self._noted.clear()
            found = enumerate(zip(runs, states, strict=True))
            strips = [strip for number, (run, state) in found for strip in self._strips(number, run, state)]
            self._noted[key] = self._kernel.lay(strips, len(runs))
        return self._noted[key]

    def _addresses(self, runs: list[Run], states: list[dict[str, Any]]) -> Iterator[int]:
        """Numbers that differ where anything lies elsewhere: in a flat, all places follow from the first."""
        gradients = self._engine.gradients.of_flat
        for run, state in zip(runs, states, strict=True):
            yield run.parameter.numel()
            yield run.parameter.data_ptr()
            yield from (state[key].data_ptr() for key in STATES)
            for part in run.parts if run.parameter.numel() else ():
                shard = gradients[part.flat].shard
                assert shard is not None
                yield shard.data_ptr()
                yield 0 if part.flat.is_cast else part.flat.owned[0].data_ptr()

    def _strips(self, number: int, run: Run, state: dict[str, Any]) -> Iterator[Strip]:
        offset = 0
        for part in run.parts if run.parameter.numel() else ():
            for start, gradient, place in self._places(part):
                here = slice(offset + start, offset + start + gradient.numel())
                master = run.parameter.data[here]
                copy = None if place is None or place.data_ptr() == master.data_ptr() else place
                yield Strip(number, gradient, master, state[STATES[0]][here], state[STATES[1]][here], copy)
            offset += part.span.numel

    def _places(self, part: Part) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """Yield (first element in the part, gradient, parameter in computation, if it is kept), bucket by bucket."""
        flat, shard = part.flat, self._engine.gradients.of_flat[part.flat].shard
        assert shard is not None
        for number, home in enumerate(flat.homes):
            common = home.meet(part.span)
            if common is not None:
                within = slice(common.start - home.start, common.end - home.start)
                place = None if flat.is_cast else flat.owned[number][within]
                yield common.start - part.span.start, shard[common.slice], place


def _has_plain_states(state: dict[str, Any], parameter: torch.Tensor) -> bool:
    """Whether a run has no states yet, or those of a fused Adam and no others."""
    if not state:
        return True
    if state.keys() != {"step", *STATES} or not all(isinstance(value, torch.Tensor) for value in state.values()):
        return False
    step, moments = state["step"], [state[key] for key in STATES]
    if step.device != parameter.device or step.dtype != torch.float32 or step.dim():
        return False
    return all(
        m.device == parameter.device and m.dtype == torch.float32 and m.shape == parameter.shape and m.is_contiguous()
        for m in moments
    )
