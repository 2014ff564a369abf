"""FlatGradient: the gradient of one flat, what this rank has summed of it and what it owns of the mean."""

from __future__ import annotations

import torch

from zeroshard.engine.flat import Flat
from zeroshard.engine.parameter import have_autograd_gradients, take_autograd_gradients, zero_autograd_gradients
from zeroshard.layout import Piece, Range
from zeroshard.memory.arena import Arena


class FlatGradient:
    """The gradient of one trainable flat: what this rank has summed itself, and its part of the reduced whole."""

    def __init__(self, flat: Flat, dtype: torch.dtype) -> None:
        self.flat = flat
        self.dtype = dtype
        self.local: torch.Tensor | None = None  # [numel]: this rank's own sum, not reduced yet
        self.shard: torch.Tensor | None = None  # [shard_numel]: the mean over the ranks, this rank's part
        self.soles = [flat.layout.sole(bucket) for bucket in flat.layout.buckets]  # buckets within one parameter
        self.parts: list[torch.Tensor] = []  # of ``shard``, by bucket, where gradients are partitioned
        self.carried: torch.Tensor | None = None  # [shard_numel]: reduced before, where ``local`` is reused
        self.arena: Arena | None = None  # that ``shard``, and ``local`` where gradients are replicated, lies in
        self.has_local = False
        self.has_shard = False
        self.used = [False] * len(flat.parameters)  # got a gradient on this rank since zero_grad()
        self.norms: dict[int, list[torch.Tensor]] = {}  # by bucket, of a gradient outside the device: see ``measure``
        self.largest: dict[int, list[torch.Tensor]] = {}  # the same for the infinity norm, under fp16
        self.landing: torch.cuda.Event | None = None  # when all of a far shard is there
        self.local_views: list[torch.Tensor] = []  # the parameters' places in ``local``

    @property
    def far(self) -> bool:
        """Whether the reduced gradient rests outside the device."""
        return self.flat.rest.gradients != "device"

    @property
    def is_reduced_aside(self) -> bool:
        """Whether its parts are reduced into a buffer first: to be added to what is there, or sent off."""
        return self.has_shard or (self.far and self.flat.layout.parts > 1)

    def keep(self, shard: torch.Tensor) -> None:
        """Have the reduced gradient here from now on."""
        self.shard = shard
        self.parts = [shard[home.slice] for home in self.flat.homes]

    def sum_in(self, local: torch.Tensor) -> None:
        """Sum this rank's own gradients here from now on."""
        self.local = local
        self.local_views = [self.flat.view(local, index) for index in range(len(self.flat.parameters))]

    def leave_arena(self) -> None:
        """Have no memory any more: somebody else may hold a part of it."""
        self.arena = self.local = self.shard = None
        self.local_views, self.parts = [], []

    def settle(self) -> None:
        """Wait until all of a shard outside the device is there."""
        if self.landing is not None:
            self.landing.synchronize()

    def counted(self, number: int, everything: bool) -> list[Range]:
        """What of one bucket's part of the shard counts in a norm: all of it, or what no other tensor rank has too."""
        home = self.flat.homes[number]
        stretches = [home] if everything else self.flat.divided_stretches()
        return [common for stretch in stretches if (common := stretch.meet(home)) is not None]

    def take(self) -> list[torch.Tensor | None]:
        """Take what autograd has put into the parameters' ``grad``."""
        taken = take_autograd_gradients(self.flat.parameters)
        self.used = [before or now is not None for before, now in zip(self.used, taken, strict=True)]
        return taken

    def as_it_lies(self, piece: Piece, taken: list[torch.Tensor | None]) -> torch.Tensor | None:
        """A part of a parameter's gradient, where it can be reduced without being packed."""
        tensor = taken[piece.parameter]
        if tensor is None or tensor.dtype != self.dtype or tensor.stride() != self.flat.strides[piece.parameter]:
            return None
        if tensor.is_conj() or tensor.is_neg():  # its memory has other values
            return None
        return self.flat.line(tensor, piece.parameter)[piece.within.slice]

    def pending(self) -> bool:
        """Whether autograd has left gradients here."""
        return have_autograd_gradients(self.flat.parameters)

    def forget_norms(self) -> None:
        """The gradient changes where it rests: what was measured on its way there does not hold any more."""
        self.norms.clear()
        self.largest.clear()

    def clear(self, index: int) -> None:
        """Forget the gradient of one parameter."""
        self.used[index] = False
        take_autograd_gradients(self.flat.parameters[index : index + 1])
        self.zero(index)

    def zero(self, index: int) -> None:
        """Make the gradient of one parameter zero."""
        self.forget_norms()
        zero_autograd_gradients(self.flat.parameters[index : index + 1])
        if self.has_local:
            self.local_views[index].zero_()
        reduced = self.shard if self.carried is None else self.carried
        if self.has_shard and reduced is not None:
            self.settle()
            for piece in self.flat.segments:
                if piece.parameter == index:
                    reduced[piece.at : piece.at + piece.within.numel].zero_()

    def parts_of(self, index: int) -> list[tuple[Range, torch.Tensor]]:
        """What this rank has of one parameter's reduced gradient: which elements, and where they lie."""
        if self.shard is None or not self.has_shard:
            return []
        pieces = [piece for piece in self.flat.segments if piece.parameter == index]
        return [(piece.within, self.shard[piece.at : piece.at + piece.within.numel]) for piece in pieces]


def norms_of(tensors: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """The norm of each tensor, in fp32; torch refuses to narrow those of float64, and of complex numbers, by itself."""
    if not tensors:
        return []
    if tensors[0].dtype == torch.float64 or tensors[0].is_complex():
        return [norm.float() for norm in torch._foreach_norm(tensors, norm_type)]
    return list(torch._foreach_norm(tensors, norm_type, dtype=torch.float32))
