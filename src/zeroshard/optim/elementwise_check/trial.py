"""What a trial steps: small tensors, their gradients, and what each rank would have of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

MAX_TRIED_DIM = 1040  # of a square matrix: takes half a second


class ElementwiseMismatchError(Exception):
    """An optimizer gives different numbers on slices than on full parameters; the message says which."""


class Span(NamedTuple):
    """The elements of a group that a tensor of a trial has, and its shape."""

    start: int
    end: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TrialSpec:
    """Which tensors are stepped, how often, and how they are split into slices."""

    shapes: tuple[tuple[int, ...], ...]
    grad_scales: tuple[float, ...]  # of the gradients, one per step; see Trial.gradients
    grad_scales_after_jump: tuple[float, ...]
    splits: tuple[tuple[int, ...], ...]  # for each rank, where its slices begin and where the last one ends
    tolerance: float  # relative to the change of an element
    tries_unused: bool = False  # also with slices of tensors that have no gradient in a step

    @property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    @property
    def tensors(self) -> list[Span]:
        """The full tensors."""
        ends = [0, *itertools.accumulate(self.sizes)]
        return [
            Span(start, end, shape) for (start, end), shape in zip(itertools.pairwise(ends), self.shapes, strict=True)
        ]

    def with_dims(self, dims: set[int]) -> TrialSpec:
        """Add two tensors for each number of dimensions that none has yet."""
        missing = sorted(dims - {len(shape) for shape in self.shapes})
        added = replace(self, shapes=(*self.shapes, *((2,) * dim for dim in missing for _ in range(2))))
        ends = {self.numel: added.numel}
        return replace(added, splits=tuple(tuple(ends.get(at, at) for at in split) for split in self.splits))


SMALL_TRIAL = TrialSpec(  # each number of dimensions twice in one shape: a rule may join tensors of a shape
    shapes=(
        *((6, 4), (5,), (), (2, 3, 2, 2), (4, 6), (1,), (3, 8)),
        *((6, 4), (5,), (), (2, 3, 2, 2), (2, 2, 3), (2, 2, 3)),
    ),
    grad_scales=(1, 1, 1, 0.01, 1, 100, 1, 0, -1, 1, 1e-8, 1e4, 1e-3, 1, 1),
    grad_scales_after_jump=(1, 1, 30, -1, 1e6, 1),
    splits=((0, 181), (0, 37), (37, 181), (0, 10, 61), (), (61, 62, 181)),  # of one rank, of two, of three
    tolerance=1e-5,
    tries_unused=True,
)
LARGE_TRIAL = TrialSpec(  # above the sizes at which matrices are factored (128 x 128) or states quantized (4096)
    shapes=((144, 128), (1040, 8), (16, 16, 3, 3), (4608,)),
    grad_scales=(1, 0.1, 10),
    grad_scales_after_jump=(1, -3),
    splits=((0, 20_011), (20_011, 33_664)),
    tolerance=2e-3,
)
LARGE_WHOLE_TRIAL = TrialSpec(  # the same without long dimensions: some rules factorize a square matrix for each
    shapes=((144, 128), (160,), (16, 4, 3, 3), (132, 160)),
    grad_scales=(1, 0.1, 10),
    grad_scales_after_jump=(1, -3),
    splits=((0, 20_011), (20_011, 40_288), (), (0, 40_288)),
    tolerance=2e-3,
)


def huge_trials(parameters: Iterable[torch.Tensor]) -> list[TrialSpec]:
    """Return a trial of a matrix like the largest, up to a limit; none if it is not larger than in other trials."""
    dims = [min(p.shape) for p in parameters if p.dim() > 1]
    dim = min(max(dims, default=0), MAX_TRIED_DIM)
    if dim <= max(min(shape) for shape in LARGE_TRIAL.shapes if len(shape) > 1):
        return []
    numel, split = dim * (dim + 16), dim * dim - 5
    return [TrialSpec(((dim + 16, dim),), (1,), (), ((0, split), (split, numel)), LARGE_TRIAL.tolerance)]


@dataclass
class Trial:
    """A comparison of one optimizer on full tensors and on those that one rank would have."""

    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]]
    is_whole: list[bool]  # for each group, whether ranks have some of the full tensors, not slices of all
    spec: TrialSpec
    dtype: torch.dtype
    device: torch.device

    @property
    def has_whole(self) -> bool:
        return any(self.is_whole)

    def full_spans(self) -> list[list[Span]]:
        """Return the full tensors of each group: a rule may accept only the dimensions that a whole group has."""
        found = []
        for group, is_whole in zip(self.groups, self.is_whole, strict=True):
            dims = {p.dim() for p in group["params"]}
            spans = [span for span in self.spec.tensors if len(span.shape) in dims] if is_whole else []
            found.append(spans or self.spec.tensors)
        return found

    def spans_of_rank(self, number: int) -> list[list[Span]]:
        """Return what a rank has of each group: some whole tensors, or none, or slices."""
        found = []
        for index, (tensors, is_whole) in enumerate(zip(self.full_spans(), self.is_whole, strict=True)):
            splits = self.spec.splits[number % len(self.spec.splits)]
            slices = [Span(start, end, (end - start,)) for start, end in itertools.pairwise(splits)]
            some = (tensors[::2], tensors[1::2], tensors[-1:], [])[(number + index) % 4]
            found.append(some if is_whole else slices)
        return found

    @cached_property
    def gradients(self) -> list[list[torch.Tensor]]:
        """The gradients of all elements for each group and step.

        Tensors and rows have different scales, and some elements are zero. Most gradients keep their direction, as in
        a model that learns; a negative scale reverses it.
        """
        generator = torch.Generator("cpu").manual_seed(0)
        gradients = []
        for number in range(len(self.groups)):
            base = self._random(generator, (1.0, 0.2, 5.0, 0.03), number)
            for part in torch.split(base, self.spec.sizes):
                part[::7] *= 10
            group_gradients = []
            for step, scale in enumerate((*self.spec.grad_scales, *self.spec.grad_scales_after_jump)):
                noise = base.roll(3 * step + 1)
                gradient = (0.8 * base + 0.2 * noise) * scale * (0.01 if self.dtype == torch.float16 else 1.0)
                if step % 4 == 3:
                    gradient[step % 5 :: 3] = 0
                group_gradients.append(gradient.to(self.device, self.dtype))
            gradients.append(group_gradients)
        return gradients

    @cached_property
    def initial_values(self) -> list[torch.Tensor]:
        """The initial values of all elements for each group."""
        generator, scales = torch.Generator("cpu").manual_seed(1), (1.0, 0.0, 0.5, 0.02, 8.0)
        values = [self._random(generator, scales, 5 - number) for number in range(len(self.groups))]
        return [value.to(self.device, self.dtype) for value in values]

    def _random(self, generator: torch.Generator, scales: tuple[float, ...], shift: int) -> torch.Tensor:
        """Return random elements whose scale differs from tensor to tensor."""
        values = torch.randn(self.spec.numel, generator=generator, dtype=torch.float64, device="cpu")
        for index, part in enumerate(torch.split(values, self.spec.sizes)):
            part *= scales[(index + shift) % len(scales)]
        return values

    def lr(self, options: Mapping[str, Any]) -> Any:
        """Return the learning rate of a group: not 0, even if a warmup begins at 0, and larger if all are small.

        Otherwise rounding would hide small updates.
        """
        group_lr, min_lr = options["lr"], 0.0 if self.dtype == torch.float64 else 1e-2
        fallbacks: list[Any] = [options.get("initial_lr"), self.optimizer.defaults.get("lr"), 1e-3]
        positive = (float(value) for value in fallbacks if is_number(value) and float(value) > 0)
        lr = float(group_lr) or next(positive)
        max_lr = max((float(g["lr"]) for g in self.groups if is_number(g.get("lr"))), default=0.0)
        if max_lr < min_lr:
            lr *= min_lr / (max_lr or lr)
        return torch.full_like(group_lr, lr) if isinstance(group_lr, torch.Tensor) else lr


def is_number(value: Any) -> bool:
    """Return whether a value is one real number, in a tensor or not."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def short_repr(value: Any) -> str:
    """Return a short text of a value, for an error."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return f"{value.item():.6g}"
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return f"{value:.6g}" if isinstance(value, float) else " ".join(repr(value).split())[:60]
