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


def decode(value: Any, fetch: Fetch, at: str = "extra") -> Any:
    """Make plain data of JSON again; ``fetch`` gives the tensors by name.

    Raises ValueError, which names the place, for what :func:`encode` does not write.

    >>> decode({"$tuple": [1, {"$float": "inf"}, {"$scalar": 2.0, "dtype": "float32"}]}, {}.get)
    (1, inf, tensor(2.))
    >>> decode({"d": {"$dtype": "load"}}, {}.get)
    Traceback (most recent call last):
        ...
    ValueError: extra.d: $dtype is 'load', expected the name of a torch dtype (torch.load is no dtype)
    """
    if isinstance(value, list):
        return [decode(item, fetch, f"{at}[{number}]") for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if not any(key.startswith("$") for key in value):
        return {key: decode(item, fetch, f"{at}.{key}") for key, item in value.items()}
    if set(value) != {mark, *(("dtype",) if mark in ("$scalar", "$array") else ())}:
        raise ValueError(f"{at}: an object has the keys {shown(list(value))}, expected one key that begins with $")
    if mark == "$tensor" and isinstance(value[mark], str):
        return fetch(value[mark])
    if mark not in _DECODERS:
        raise ValueError(f"{at}: {shown(mark)} is not a mark of this version: it was saved by a newer one")
    expected, make = _DECODERS[mark]
    content = value[mark]
    try:
        if mark in ("$scalar", "$array"):
            return make((decode(content, fetch, at), value["dtype"]))
        return make(decode(content, fetch, at))
    except _Unfit as error:
        raise ValueError(f"{at}: {mark} is {shown(content)}, expected {expected}{error}") from error


class _Unfit(Exception):
    """Content that does not fit its mark; what else there is to say."""


def shown(value: Any, most: int = 60) -> str:
    """A value for an error message, cut where it is long.

    >>> shown("abc" * 100, 8)
    "'abcabca…"
    """
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def _decoder(wanted: Callable[[Any], bool], make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make something of content that is ``wanted``, and refuse all other."""

    def decoded(content: Any) -> Any:
        try:
            if not wanted(content):
                raise _Unfit
            return make(content)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise _Unfit(f" ({error})") from error

    return decoded


def dtype_named(name: Any) -> torch.dtype:
    """The dtype that torch has under a name; raises ValueError where it has none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype")
    return dtype


def _scalar(pair: tuple[Any, Any]) -> torch.Tensor:
    number, dtype = pair[0], dtype_named(pair[1])
    if isinstance(number, float) and not dtype.is_floating_point:
        raise ValueError(f"{number} is no {dtype}")
    return torch.tensor(number, dtype=dtype)


def _array(pair: tuple[torch.Tensor, Any]) -> Any:
    tensor, name = pair
    import numpy

    dtype = numpy.dtype(name)
    if dtype.kind not in "biufc":
        raise ValueError(f"arrays of {shown(name)} are not kept")
    if tensor.is_meta:  # its values are not wanted now
        return tensor
    return tensor.numpy().astype(dtype, copy=False)


def _are_pairs(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in content)


def _is_list(content: Any) -> bool:
    return isinstance(content, list)


def _is_text(content: Any) -> bool:
    return isinstance(content, str)


def _are_sizes(content: Any) -> bool:
    return isinstance(content, list) and all(type(item) is int and item >= 0 for item in content)


_DECODERS: dict[str, tuple[str, Callable[[Any], Any]]] = {  # what is expected, and how it is made
    "$tensor": ("the name of a tensor", _decoder(_is_text, str)),
    "$scalar": ("a number of its dtype", _decoder(lambda pair: isinstance(pair[0], (int, float)), _scalar)),
    "$array": (
        "a tensor, and a dtype of numbers that NumPy has",
        _decoder(lambda pair: isinstance(pair[0], torch.Tensor) and isinstance(pair[1], str), _array),
    ),
    "$float": ("'inf', '-inf' or 'nan'", _decoder(lambda content: content in ("inf", "-inf", "nan"), float)),
    "$bytes": ("base64", _decoder(_is_text, lambda content: base64.b64decode(content, validate=True))),
    "$dtype": ("the name of a torch dtype", _decoder(_is_text, dtype_named)),
    "$device": ("a device", _decoder(_is_text, torch.device)),
    "$tuple": ("a list", _decoder(_is_list, tuple)),
    "$set": ("a list of keys", _decoder(_is_list, set)),
    "$size": ("a list of sizes", _decoder(_are_sizes, torch.Size)),
    "$items": ("a list of pairs", _decoder(_are_pairs, dict)),
    "$counter": ("a list of pairs", _decoder(_are_pairs, lambda pairs: Counter(dict(pairs)))),
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
