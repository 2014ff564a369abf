"""Parameter groups as the user sees them, and a check that their hyper-parameters are equal on all ranks."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from zeroshard.memory import record_blocking_event

DIGEST_BYTES = 8


class ParamGroupView(dict[str, Any]):
    """One of ``ShardedOptimizer.param_groups``.

    The inner optimizer's groups hold slices of shards ([Note: optimizer slices]). They differ between ranks and are not
    parameters of the model. Users expect the model's parameters in a group (to clip gradients, count or look up
    parameters), so "params" returns those. All other entries, such as the learning rate, are those of the inner group.

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
        """Raise if parameters were added to or removed from the list: it would have no effect."""
        if len(self._parameters) != self._param_count:
            raise RuntimeError(
                f"a parameter group of {self._param_count} parameters has {len(self._parameters)} now: to "
                "train more of the "
                "model's, call optimizer.add_param_group(); to train fewer, zeroshard.unwrap() and shard again"
            )

    def __getitem__(self, key: str) -> Any:
        """Return the model's parameters for "params", else the inner group's entry."""
        return self._parameters if key == "params" else self._inner[key]

    def __setitem__(self, key: str, value: Any) -> None:
        """Set an entry of the inner group."""
        if key != "params":
            self._inner[key] = value
        elif value is not self._parameters:
            raise RuntimeError(
                "the parameters of a group cannot be replaced after zeroshard.shard(): call "
                "optimizer.add_param_group() for more, or zeroshard.unwrap() and shard again"
            )

    def __delitem__(self, key: str) -> None:
        """Delete an entry of the inner group."""
        if key == "params":
            raise RuntimeError("a group has its parameters for as long as the model is sharded")
        del self._inner[key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys."""
        return iter(self._inner)

    def __len__(self) -> int:
        """Return the number of entries."""
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
        """Return the repr of the plain dictionary."""
        return repr(self.copy())

    def copy(self) -> dict[str, Any]:
        """Return a plain dictionary with the same entries."""
        return {key: self[key] for key in self}

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """Return a deep copy as a plain dictionary."""
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain dictionary."""
        return dict, (self.copy(),)


class HyperparamChecker:
    """Check that the hyper-parameters are equal on all ranks, inside an all-reduce that is needed anyway.

    Each rank sends a digest and its complement. After a MAX all-reduce, each byte and its complement add up to 255 only
    if all ranks sent the same digest. On a GPU the result is read in the next step, so there is no host sync.

    >>> checker = HyperparamChecker(torch.device("cpu"))
    >>> checker.compare(checker.local_digest([{"lr": 0.1}]), rank=0)
    >>> both = torch.maximum(checker.local_digest([{"lr": 0.1}]), checker.local_digest([{"lr": 0.2}]))
    >>> try:
    ...     checker.compare(both, rank=0)
    ... except RuntimeError as error:
    ...     print(str(error).partition(". ")[0])
    the hyper-parameters of the optimizer differ between ranks: rank 0 has [{'lr': 0.2}]
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._options: list[dict[str, Any]] | None = None
        self._local_digest = torch.empty(0, dtype=torch.uint8)
        self._received_bytes = bytearray(2 * DIGEST_BYTES)  # read without a torch operation
        self._received = torch.frombuffer(self._received_bytes, dtype=torch.uint8)
        self._pinned = (
            torch.empty(2 * DIGEST_BYTES, dtype=torch.uint8, pin_memory=True) if device.type == "cuda" else None
        )
        self._copy_done: torch.cuda.Event | None = None  # the copy of the result to the host

    def local_digest(self, groups: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """Return the digest and its complement, as this rank sends them."""
        options = [_numeric_options(group) for group in groups]
        if options != self._options:
            digest = hashlib.blake2b(repr(options).encode(), digest_size=DIGEST_BYTES).digest()
            both = [*digest, *(255 - byte for byte in digest)]
            self._local_digest = torch.tensor(both, dtype=torch.uint8, device=self._device)
            self._options = options
        return self._local_digest

    def compare(self, largest: torch.Tensor, rank: int) -> None:
        """Raise if the ranks sent different digests. ``largest`` is the maximum of each byte over the ranks."""
        if self._pinned is None:
            self._received.copy_(largest)
            self._raise_if_different(rank)
            return
        if self._copy_done is not None:
            self._copy_done.synchronize()  # the previous step's copy
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
    """Return the numeric hyper-parameters of a group, without its slices, which differ between ranks."""
    values = ((key, _numeric_value(value)) for key, value in group.items() if key not in ("params", "param_names"))
    return {key: number for key, number in values if number is not None}


def _numeric_value(value: Any) -> Any:
    """Return a hyper-parameter that is one number or several; None for anything else and for GPU tensors."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, (tuple, list)) and all(isinstance(item, (bool, int, float)) for item in value):
        return tuple(value)
    return None
