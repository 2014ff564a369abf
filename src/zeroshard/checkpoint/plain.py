"""Plain data as JSON: what a user adds to a checkpoint, and what schedulers and optimizers give of themselves.

[Note: plain data]
JSON knows strings, numbers, lists and objects. What else plain data is made of is written as an object with one key
that begins with ``$``: ``{"$tuple": [1, 2]}``. Tensors go to the safetensors files, under a name that the JSON refers
to; those of one number are written in place. Nothing is pickled: a checkpoint holds no code, and loading one runs none.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import torch

from zeroshard.optimizer import ShardedOptimizer

Fetch = Callable[[str], torch.Tensor]


def encode(value: Any, tensors: dict[str, torch.Tensor], at: str = "extra") -> Any:
    """Make JSON of plain data; tensors are put into ``tensors`` under names made from where they are.

    >>> tensors = {}
    >>> encode({"step": 3, "betas": (0.9, 0.99), 7: torch.ones(2)}, tensors)
    {'$items': [['step', 3], ['betas', {'$tuple': [0.9, 0.99]}], [7, {'$tensor': 'extra[7]'}]]}
    >>> list(tensors)
    ['extra[7]']
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, tensors, at)
    if isinstance(value, (torch.dtype, torch.device)):
        return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, at)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return _encode_sequence(value, tensors, at)
    if isinstance(value, PurePath):
        return str(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {"$array": encode(torch.from_numpy(value.copy()), tensors, at), "dtype": str(value.dtype)}
    if numpy is not None and isinstance(value, numpy.generic):
        return encode(value.item(), tensors, at)
    raise TypeError(
        f"{at} is of type {type(value).__name__}: a checkpoint keeps plain data (None, numbers, strings, bytes, "
        "tensors, arrays, lists, tuples, sets, dicts) and objects with state_dict(); give it as one of these"
    )


def _encode_tensor(value: torch.Tensor, tensors: dict[str, torch.Tensor], at: str) -> Any:
    if value.dim() == 0 and not value.is_complex() and value.dtype not in (torch.float64, torch.bool):
        number = value.item()
        if isinstance(number, int) or math.isfinite(number):
            return {"$scalar": number, "dtype": str(value.dtype).removeprefix("torch.")}
    while at in tensors:  # keys may read alike: {"a.b": …} and {"a": {"b": …}}
        at += "'"
    tensors[at] = value.detach()
    return {"$tensor": at}


def _encode_mapping(value: Mapping[Any, Any], tensors: dict[str, torch.Tensor], at: str) -> Any:
    counts = isinstance(value, Counter)
    if not counts and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, tensors, f"{at}.{key}") for key, item in value.items()}
    pairs = [[encode(k, tensors, f"{at}'s key"), encode(v, tensors, f"{at}[{k!r}]")] for k, v in value.items()]
    return {"$counter" if counts else "$items": pairs}


def _encode_sequence(value: Any, tensors: dict[str, torch.Tensor], at: str) -> Any:
    items = [encode(item, tensors, f"{at}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, list):
        return items
    if isinstance(value, torch.Size):
        return {"$size": items}
    if isinstance(value, deque):
        return items
    return {"$tuple" if isinstance(value, tuple) else "$set": items}


def decode(value: Any, fetch: Fetch) -> Any:
    """Make plain data of JSON again; ``fetch`` gives the tensors by name.

    >>> decode({"$tuple": [1, {"$float": "inf"}, {"$scalar": 2.0, "dtype": "float32"}]}, {}.get)
    (1, inf, tensor(2.))
    """
    if isinstance(value, list):
        return [decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if not mark.startswith("$"):
        return {key: decode(item, fetch) for key, item in value.items()}
    content = value[mark]
    if mark == "$tensor":
        return fetch(content)
    if mark == "$scalar":
        return torch.tensor(content, dtype=getattr(torch, value["dtype"]))
    if mark == "$array":
        return decode(content, fetch).numpy().astype(value["dtype"], copy=False)
    if mark not in _DECODERS:
        raise ValueError(f"{mark} is not a mark of this version: it was saved by a newer one")
    return _DECODERS[mark](decode(content, fetch))


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$bytes": base64.b64decode,
    "$dtype": lambda name: getattr(torch, name),
    "$device": torch.device,
    "$tuple": tuple,
    "$set": set,
    "$size": torch.Size,
    "$items": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
}


def state_of(value: Any) -> Any:
    """What an object that keeps a state gives of it (a scheduler, a data loader, a generator); plain data as it is."""
    if isinstance(value, ShardedOptimizer) or "_zeroshard" in getattr(value, "__dict__", {}):
        raise TypeError(f"a sharded {type(value).__name__} is no extra data: save it by a call of its own")
    if callable(state_dict := getattr(value, "state_dict", None)):
        return state_dict()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if type(value) in (dict, OrderedDict):
        return {key: state_of(item) for key, item in value.items()}
    return [state_of(item) for item in value] if type(value) is list else value


def give_state(value: Any, state: Any, at: str = "extra") -> None:
    """Give objects that keep a state, anywhere in ``value``, what :func:`state_of` had of them."""
    if callable(load := getattr(value, "load_state_dict", None)):
        load(state)
    elif isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in state:
                raise KeyError(f"the checkpoint has no {at}[{key!r}], it has {list(state)}")
            give_state(item, state[key], f"{at}[{key!r}]")
    elif isinstance(value, list):
        for number, (item, one) in enumerate(zip(value, state, strict=True)):
            give_state(item, one, f"{at}[{number}]")
