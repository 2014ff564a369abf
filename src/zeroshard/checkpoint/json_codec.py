"""JSON encoding of user data and of the state dicts of schedulers and optimizers.

[Note: JSON encoding]
JSON has strings, numbers, lists and objects. Other types are written as an object with a tag, a key that begins with
``$``: ``{"$tuple": [1, 2]}``. Tensors are saved in the safetensors files, and the JSON refers to them by name; most
0-dim tensors are written inline. Nothing is pickled: a checkpoint contains no code, and loading one runs none.
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

from zeroshard.optim import ShardedOptimizer

FetchTensor = Callable[[str], torch.Tensor]


def encode(value: Any, tensors: dict[str, torch.Tensor], path: str = "extra") -> Any:
    """Encode data as JSON; add its tensors to ``tensors``, named by their path in the data.

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
        return _encode_tensor(value, tensors, path)
    if isinstance(value, (torch.dtype, torch.device)):
        return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, path)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return _encode_sequence(value, tensors, path)
    if isinstance(value, PurePath):
        return str(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {"$array": encode(torch.from_numpy(value.copy()), tensors, path), "dtype": str(value.dtype)}
    if numpy is not None and isinstance(value, numpy.generic):
        return encode(value.item(), tensors, path)
    raise TypeError(
        f"{path} is of type {type(value).__name__}: a checkpoint keeps plain data (None, numbers, strings, bytes, "
        "tensors, arrays, lists, tuples, sets, dicts) and objects with state_dict(); give it as one of these"
    )


def _encode_tensor(value: torch.Tensor, tensors: dict[str, torch.Tensor], path: str) -> Any:
    if value.dim() == 0 and not value.is_complex() and value.dtype not in (torch.float64, torch.bool):
        number = value.item()
        if isinstance(number, int) or math.isfinite(number):
            return {"$scalar": number, "dtype": str(value.dtype).removeprefix("torch.")}
    while path in tensors:  # paths may collide: {"a.b": …} and {"a": {"b": …}}
        path += "'"
    tensors[path] = value.detach()
    return {"$tensor": path}


def _encode_mapping(value: Mapping[Any, Any], tensors: dict[str, torch.Tensor], path: str) -> Any:
    is_counter = isinstance(value, Counter)
    if not is_counter and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, tensors, f"{path}.{key}") for key, item in value.items()}
    pairs = [[encode(k, tensors, f"{path}'s key"), encode(v, tensors, f"{path}[{k!r}]")] for k, v in value.items()]
    return {"$counter" if is_counter else "$items": pairs}


def _encode_sequence(value: Any, tensors: dict[str, torch.Tensor], path: str) -> Any:
    items = [encode(item, tensors, f"{path}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, list):
        return items
    if isinstance(value, torch.Size):
        return {"$size": items}
    if isinstance(value, deque):
        return items
    return {"$tuple" if isinstance(value, tuple) else "$set": items}


def decode(value: Any, fetch: FetchTensor, path: str = "extra") -> Any:
    """Decode the result of :func:`encode`; ``fetch`` returns a tensor by name.

    Raise ValueError with the path in the data if :func:`encode` cannot have written it.

    >>> decode({"$tuple": [1, {"$float": "inf"}, {"$scalar": 2.0, "dtype": "float32"}]}, {}.get)
    (1, inf, tensor(2.))
    >>> decode({"d": {"$dtype": "load"}}, {}.get)
    Traceback (most recent call last):
        ...
    ValueError: extra.d: $dtype is 'load', expected the name of a torch dtype (torch.load is no dtype)
    """
    if isinstance(value, list):
        return [decode(item, fetch, f"{path}[{number}]") for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not any(key.startswith("$") for key in value):
        return {key: decode(item, fetch, f"{path}.{key}") for key, item in value.items()}
    if set(value) != {tag, *(("dtype",) if tag in ("$scalar", "$array") else ())}:
        raise ValueError(
            f"{path}: an object has the keys {truncated_repr(list(value))}, expected one key that begins with $"
        )
    if tag == "$tensor" and isinstance(value[tag], str):
        return fetch(value[tag])
    if tag not in _DECODERS:
        raise ValueError(f"{path}: {truncated_repr(tag)} is not a mark of this version: it was saved by a newer one")
    expected, make = _DECODERS[tag]
    content = value[tag]
    try:
        if tag in ("$scalar", "$array"):
            return make((decode(content, fetch, path), value["dtype"]))
        return make(decode(content, fetch, path))
    except _ContentError as error:
        raise ValueError(f"{path}: {tag} is {truncated_repr(content)}, expected {expected}{error}") from error


class _ContentError(Exception):
    """The content of an object does not fit its tag; the message holds details."""


def truncated_repr(value: Any, max_chars: int = 60) -> str:
    """Return the repr of a value for an error message, truncated to ``max_chars``.

    >>> truncated_repr("abc" * 100, 8)
    "'abcabca…"
    """
    text = repr(value)
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"


def _checked_decoder(wanted: Callable[[Any], bool], make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decoder that calls ``make`` if ``wanted`` accepts the content, and raises otherwise."""

    def decoded(content: Any) -> Any:
        try:
            if not wanted(content):
                raise _ContentError
            return make(content)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise _ContentError(f" ({error})") from error

    return decoded


def parse_dtype(name: Any) -> torch.dtype:
    """Return the torch dtype of a name; raise ValueError if there is none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype")
    return dtype


def _decode_scalar(pair: tuple[Any, Any]) -> torch.Tensor:
    number, dtype = pair[0], parse_dtype(pair[1])
    if isinstance(number, float) and not dtype.is_floating_point:
        raise ValueError(f"{number} is no {dtype}")
    return torch.tensor(number, dtype=dtype)


def _decode_array(pair: tuple[torch.Tensor, Any]) -> Any:
    tensor, name = pair
    import numpy

    dtype = numpy.dtype(name)
    if dtype.kind not in "biufc":
        raise ValueError(f"arrays of {truncated_repr(name)} are not kept")
    if tensor.is_meta:  # only validation: there are no values
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


_DECODERS: dict[str, tuple[str, Callable[[Any], Any]]] = {  # tag → (expected content, decoder)
    "$tensor": ("the name of a tensor", _checked_decoder(_is_text, str)),
    "$scalar": (
        "a number of its dtype",
        _checked_decoder(lambda pair: isinstance(pair[0], (int, float)), _decode_scalar),
    ),
    "$array": (
        "a tensor, and a dtype of numbers that NumPy has",
        _checked_decoder(lambda pair: isinstance(pair[0], torch.Tensor) and isinstance(pair[1], str), _decode_array),
    ),
    "$float": ("'inf', '-inf' or 'nan'", _checked_decoder(lambda content: content in ("inf", "-inf", "nan"), float)),
    "$bytes": ("base64", _checked_decoder(_is_text, lambda content: base64.b64decode(content, validate=True))),
    "$dtype": ("the name of a torch dtype", _checked_decoder(_is_text, parse_dtype)),
    "$device": ("a device", _checked_decoder(_is_text, torch.device)),
    "$tuple": ("a list", _checked_decoder(_is_list, tuple)),
    "$set": ("a list of keys", _checked_decoder(_is_list, set)),
    "$size": ("a list of sizes", _checked_decoder(_are_sizes, torch.Size)),
    "$items": ("a list of pairs", _checked_decoder(_are_pairs, dict)),
    "$counter": ("a list of pairs", _checked_decoder(_are_pairs, lambda pairs: Counter(dict(pairs)))),
}


def state_dict_of(value: Any) -> Any:
    """Return the state of a stateful object (a scheduler, data loader, generator); return other data unchanged."""
    if isinstance(value, ShardedOptimizer) or "_zeroshard" in getattr(value, "__dict__", {}):
        raise TypeError(f"a sharded {type(value).__name__} is no extra data: save it by a call of its own")
    if callable(state_dict := getattr(value, "state_dict", None)):
        return state_dict()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if type(value) in (dict, OrderedDict):
        return {key: state_dict_of(item) for key, item in value.items()}
    return [state_dict_of(item) for item in value] if type(value) is list else value


def load_into(value: Any, state: Any, path: str = "extra") -> None:
    """Restore stateful objects anywhere in ``value`` from the result of :func:`state_dict_of`."""
    if callable(load := getattr(value, "load_state_dict", None)):
        load(state)
    elif isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in state:
                raise KeyError(f"the checkpoint has no {path}[{key!r}], it has {list(state)}")
            load_into(item, state[key], f"{path}[{key!r}]")
    elif isinstance(value, list):
        for number, (item, item_state) in enumerate(zip(value, state, strict=True)):
            load_into(item, item_state, f"{path}[{number}]")
