"""Groups: the parameter groups as users see them, and whether all ranks have the same hyper-parameters in them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from zeroshard.memory.streams import record_blocking_event

DIGEST_BYTES = 8  # bytes


class ParamGroupView(dict[str, Any]):
    """One of ``ShardedOptimizer.param_groups``.

    The inner optimizer's groups hold slices of shards ([Note: runs]), which differ by rank and are no parameters of the
    model. What users do with a group's parameters (clip their gradients, count them, look one up) is meant for the
    model's own, so these are shown. Everything else, the learning rate above all, is the inner group's own entry.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> inner = {"params": ["a slice"], "lr": 0.1}
    >>> group = ParamGroupView(inner, [weight])
    >>> group["lr"] = 0.2
    >>> inner["lr"], group["params"][0] is weight, isinstance(group, dict), dict(group)["lr"]
    (0.2, True, True, 0.2)
    """

    def __init__(self, inner: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._inner, self._parameters, self._param_count = inner, parameters, len(parameters)

    def check_unchanged(self) -> None:
        """Raise where parameters were added to the list, or taken from it: nothing would come of it."""
        if len(self._parameters) != self._param_count:
            raise RuntimeError(
                f"a parameter group of {self._param_count} parameters has {len(self._parameters)} now: to "
                "train more of the "
                "model's, call optimizer.add_param_group(); to train fewer, zeroshard.unshard() and shard again"
            )

    def __getitem__(self, key: str) -> Any:
        """Return the model's parameters, or an option."""
        return self._parameters if key == "params" else self._inner[key]

    def __setitem__(self, key: str, value: Any) -> None:
        """Set an option of the inner group."""
        if key != "params":
            self._inner[key] = value
        elif value is not self._parameters:
            raise RuntimeError(
                "the parameters of a group cannot be replaced after zeroshard.shard(): call "
                "optimizer.add_param_group() for more, or zeroshard.unshard() and shard again"
            )

    def __delitem__(self, key: str) -> None:
        """Forget an option."""
        if key == "params":
            raise RuntimeError("a group has its parameters for as long as the model is sharded")
        del self._inner[key]

    def __iter__(self) -> Iterator[str]:
        """Go through the keys."""
        return iter(self._inner)

    def __len__(self) -> int:
        """How many entries there are."""
        return len(self._inner)

    __contains__ = MutableMapping.__contains__
    __eq__ = MutableMapping.__eq__
    get = MutableMapping.get  # type: ignore[assignment]
    keys = MutableMapping.keys  # type: ignore[assignment]
    values = MutableMapping.values  # type: ignore[assignment]
    items = MutableMapping.items  # type: ignore[assignment]
    pop = MutableMapping.pop
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault

    def __repr__(self) -> str:
        """Show it as a dictionary."""
        return repr(self.copy())

    def copy(self) -> dict[str, Any]:
        """A plain dictionary of the same entries."""
        return {key: self[key] for key in self}

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """A plain dictionary of copies."""
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain dictionary."""
        return dict, (self.copy(),)


class HyperparamChecker:
    """What all ranks tell each other of their optimizers' hyper-parameters, within a message that is sent anyway.

    Each rank sends a digest and its complement; the largest of each byte over the ranks add up to 255 everywhere only
    where all ranks have sent the same. On a GPU nobody waits for the answer: it is read in the next step.

    >>> told = HyperparamChecker(torch.device("cpu"))
    >>> told.compare(told.local_digest([{"lr": 0.1}]), rank=0)
    >>> both = torch.maximum(told.local_digest([{"lr": 0.1}]), told.local_digest([{"lr": 0.2}]))
    >>> try:
    ...     told.compare(both, rank=0)
    ... except RuntimeError as error:
    ...     print(str(error).partition(". ")[0])
    the hyper-parameters of the optimizer differ between ranks: rank 0 has [{'lr': 0.2}]
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._options: list[dict[str, Any]] | None = None
        self._local_digest = torch.empty(0, dtype=torch.uint8)
        self._received_bytes = bytearray(2 * DIGEST_BYTES)  # read without an operation of torch's
        self._received = torch.frombuffer(self._received_bytes, dtype=torch.uint8)
        self._pinned = (
            torch.empty(2 * DIGEST_BYTES, dtype=torch.uint8, pin_memory=True) if device.type == "cuda" else None
        )
        self._copy_done: torch.cuda.Event | None = None  # when the device has written the answer

    def local_digest(self, groups: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """What this rank sends."""
        options = [_numeric_options(group) for group in groups]
        if options != self._options:
            digest = hashlib.blake2b(repr(options).encode(), digest_size=DIGEST_BYTES).digest()
            both = [*digest, *(255 - byte for byte in digest)]
            self._local_digest = torch.tensor(both, dtype=torch.uint8, device=self._device)
            self._options = options
        return self._local_digest

    def compare(self, largest: torch.Tensor, rank: int) -> None:
        """Raise where ranks have sent different things. ``largest``: of each byte that they have sent."""
        if self._pinned is None:
            self._received.copy_(largest)
            self._raise_if_different(rank)
            return
        if self._copy_done is not None:
            self._copy_done.synchronize()  # of the step before
            self._received.copy_(self._pinned)
            self._raise_if_different(rank)
        self._pinned.copy_(largest, non_blocking=True)
        self._copy_done = record_blocking_event(torch.cuda.current_stream())

    def _raise_if_different(self, rank: int) -> None:
        if any(self._received_bytes[i] + self._received_bytes[DIGEST_BYTES + i] != 255 for i in range(DIGEST_BYTES)):
            raise RuntimeError(
                f"the hyper-parameters of the optimizer differ between ranks: rank {rank} has {self._options}. Set the "
                "same learning rate, and whatever else is in optimizer.param_groups, on all ranks: each updates its "
                "part of every parameter by its own"
            )


def _numeric_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a group that are numbers. How many slices a rank has is its own affair."""
    found = ((key, _numeric_value(value)) for key, value in group.items() if key not in ("params", "param_names"))
    return {key: number for key, number in found if number is not None}


def _numeric_value(value: Any) -> Any:
    """A hyper-parameter that is a number, or several; None for anything else, and for what only a GPU knows."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, (tuple, list)) and all(isinstance(item, (bool, int, float)) for item in value):
        return tuple(value)
    return None
