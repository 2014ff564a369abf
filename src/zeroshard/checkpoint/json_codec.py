"""JSON encoding of user data and of the state dicts of schedulers and optimizers.

[Note: JSON encoding]
JSON has strings, numbers, lists and objects. Other types are written as an object with a tag, a key that begins with
``$``: ``{"$tuple": [1, 2]}``. Tensors are saved in the safetensors files, and the JSON refers to them by name; most
0-dim tensors are written inline. A tensor subclass, such as a quantized optimizer state, is written as the plain
tensors that it consists of; to load it, the program must have imported its class. Nothing is pickled: a checkpoint
contains no code, and loading one imports none.
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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.optim import ShardedOptimizer

FetchTensor = Callable[[str], torch.Tensor]
_NUMPY_TYPES = "?bhilqBHILQefdFD"  # characters of the types that torch has too


def encode(value: Any, tensors: dict[str, torch.Tensor], path: str = "extra") -> Any:
    """Encode data as JSON; add its tensors to ``tensors``, named by their path in the data.

    >>> tensors = {}
    >>> encode({"step": 3, "betas": (0.9, 0.99), 7: torch.ones(2)}, tensors)
    {'$items': [['step', 3], ['betas', {'$tuple': [0.9, 0.99]}], [7, {'$tensor': 'extra[7]'}]]}
    >>> list(tensors)
    ['extra[7]']
    >>> encoded = encode(torch.ones(2, 3).T, tensors)
    >>> decode(encoded, tensors.get).stride()
    (1, 3)
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
    if numpy is not None and type(value) is numpy.ndarray and value.dtype.char in _NUMPY_TYPES:
        native = value.astype(value.dtype.newbyteorder("="))
        return {"$array": encode(torch.from_numpy(native), tensors, path), "dtype": str(value.dtype)}
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.char in _NUMPY_TYPES:
        return encode(value.item(), tensors, path)
    raise TypeError(
        f"{path} has type {type(value).__name__}, which cannot be saved: expected None, numbers, strings, bytes, "
        "tensors, arrays, lists, tuples, sets, dicts, or objects with state_dict(). Convert it to one of these"
    )


def _encode_tensor(value: torch.Tensor, tensors: dict[str, torch.Tensor], path: str) -> Any:
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        content = {
            "class": f"{type(value).__module__}:{type(value).__qualname__}",
            "tensors": {name: getattr(value, name) for name in names},
            "context": context,
            "shape": list(value.shape),
            "stride": list(value.stride()),
        }
        return {"$subclass": encode(content, tensors, path)}
    if value.layout is not torch.strided or value.is_nested or value.is_meta:
        raise TypeError(f"{path} is a sparse or nested tensor, or has no values, so it cannot be saved: make it dense")
    if value.dim() == 0 and not value.is_complex() and value.dtype not in (torch.float64, torch.bool):
        number = value.item()
        if isinstance(number, int) or math.isfinite(number):
            return {"$scalar": number, "dtype": str(value.dtype).removeprefix("torch.")}
    strides = value.stride()
    dims = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    if not value.is_contiguous() and value.permute(dims).is_contiguous():  # keep the layout: it decides on rounding
        return {"$permuted": {"tensor": _encode_tensor(value.permute(dims), tensors, path), "dims": dims}}
    while path in tensors:  # paths may collide: {"a.b": …} and {"a": {"b": …}}
        path += "'"
    tensors[path] = value.detach().resolve_conj()
    return {"$tensor": path}


def _encode_mapping(value: Mapping[Any, Any], tensors: dict[str, torch.Tensor], path: str) -> Any:
    is_counter = isinstance(value, Counter)
    if not is_counter and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, tensors, f"{path}.{key}") for key, item in value.items()}
    pairs = [[encode(k, tensors, f"{path}'s key"), encode(v, tensors, f"{path}[{k!r}]")] for k, v in value.items()]
    return {"$counter" if is_counter else "$items": pairs}


def _encode_sequence(value: Any, tensors: dict[str, torch.Tensor], path: str) -> Any:
    items = [encode(item, tensors, f"{path}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, (list, deque)):
        return items
    if isinstance(value, torch.Size):
        return {"$size": items}
    tags = {tuple: "$tuple", frozenset: "$frozenset", set: "$set"}
    return {next(tag for kind, tag in tags.items() if isinstance(value, kind)): items}


def decode(value: Any, fetch: FetchTensor, path: str = "extra") -> Any:
    """Decode the result of :func:`encode`; ``fetch`` returns a tensor by name.

    Raise ValueError with the path in the data if :func:`encode` cannot have written it.

    >>> decode({"$tuple": [1, {"$float": "inf"}, {"$scalar": 2.0, "dtype": "float32"}]}, {}.get)
    (1, inf, tensor(2.))
    >>> decode({"d": {"$dtype": "load"}}, {}.get)
    Traceback (most recent call last):
        ...
    ValueError: extra.d: $dtype is 'load', expected the name of a torch dtype (torch.load is not a dtype)
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
            f"{path}: an object has the keys {truncated_repr(list(value))}, expected a single key that begins with $"
        )
    if tag == "$tensor" and isinstance(value[tag], str):
        return fetch(value[tag])
    if tag not in _DECODERS:
        raise ValueError(f"{path}: the tag {truncated_repr(tag)} is unknown: a newer version of zeroshard wrote it")
    expected, is_valid, make = _DECODERS[tag]
    content = decode(value[tag], fetch, path)
    arguments = (content, value["dtype"]) if "dtype" in value else (content,)
    details = ""
    try:
        if is_valid(*arguments):
            return make(*arguments)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        details = f" ({error})"
    raise ValueError(f"{path}: {tag} is {truncated_repr(value[tag])}, expected {expected}{details}")


def truncated_repr(value: Any, max_chars: int = 60) -> str:
    """Return the repr of a value for an error message, truncated to ``max_chars``.

    >>> truncated_repr("abc" * 100, 8)
    "'abcabca…"
    """
    text = repr(value)
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"


def parse_dtype(name: Any) -> torch.dtype:
    """Return the torch dtype of a name; raise ValueError if there is none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{name} is not a dtype")
    return dtype


def _decode_scalar(number: float, dtype_name: Any) -> torch.Tensor:
    dtype = parse_dtype(dtype_name)
    if isinstance(number, float) and not dtype.is_floating_point:
        raise ValueError(f"{number} is not a {dtype}")
    return torch.tensor(number, dtype=dtype, device="cpu")


def _decode_array(tensor: torch.Tensor, dtype_name: str) -> Any:
    import numpy

    dtype = numpy.dtype(dtype_name)
    if dtype.kind not in "biufc":
        raise ValueError(f"arrays of {truncated_repr(dtype_name)} are not supported")
    if tensor.is_meta:  # only validation: there are no values
        return tensor
    return tensor.numpy().astype(dtype, copy=False)


def _decode_subclass(content: dict[str, Any]) -> torch.Tensor:
    module, _, name = content["class"].partition(":")
    kind = getattr(sys.modules.get(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise ValueError(f"import {module}.{name} before loading")
    size, stride = torch.Size(content["shape"]), tuple(content["stride"])
    try:
        tensor: torch.Tensor = kind.__tensor_unflatten__(content["tensors"], content["context"], size, stride)
    except Exception as error:  # of any class, with any content
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return tensor


def _is_permuted(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and content.keys() == {"tensor", "dims"}
        and isinstance(content["tensor"], torch.Tensor)
        and are_sizes(content["dims"])
        and sorted(content["dims"]) == list(range(content["tensor"].dim()))
    )


def _decode_permuted(content: dict[str, Any]) -> torch.Tensor:
    tensor: torch.Tensor = content["tensor"]
    return tensor.permute([content["dims"].index(dim) for dim in range(tensor.dim())])


def _is_subclass(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and content.keys() == {"class", "tensors", "context", "shape", "stride"}
        and isinstance(content["class"], str)
        and isinstance(content["tensors"], dict)
        and are_sizes(content["shape"])
        and are_sizes(content["stride"])
    )


def _is_instance(kind: type) -> Callable[[Any], bool]:
    return lambda content: isinstance(content, kind)


def _are_pairs(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in content)


def are_sizes(content: Any) -> bool:
    """Return whether decoded data is a list of integers of at least 0."""
    return isinstance(content, list) and all(type(item) is int and item >= 0 for item in content)


# tag → (expected content, whether content is valid, decoder); all take the content and, if there is one, the dtype
_DECODERS: dict[str, tuple[str, Callable[..., bool], Callable[..., Any]]] = {
    "$tensor": ("the name of a tensor", _is_instance(str), str),
    "$scalar": ("a number of its dtype", lambda number, _: isinstance(number, (int, float)), _decode_scalar),
    "$array": (
        "a tensor and a numeric NumPy dtype",
        lambda tensor, name: isinstance(tensor, torch.Tensor) and isinstance(name, str),
        _decode_array,
    ),
    "$permuted": ("a tensor and the order of its dimensions", _is_permuted, _decode_permuted),
    "$subclass": ("a tensor subclass that is imported", _is_subclass, _decode_subclass),
    "$float": ("'inf', '-inf' or 'nan'", lambda text: text in ("inf", "-inf", "nan"), float),
    "$bytes": ("base64", _is_instance(str), lambda text: base64.b64decode(text, validate=True)),
    "$dtype": ("the name of a torch dtype", _is_instance(str), parse_dtype),
    "$device": ("a device", _is_instance(str), torch.device),
    "$tuple": ("a list", _is_instance(list), tuple),
    "$set": ("a list of hashable items", _is_instance(list), set),
    "$frozenset": ("a list of hashable items", _is_instance(list), frozenset),
    "$size": ("a list of sizes", are_sizes, torch.Size),
    "$items": ("a list of pairs with hashable keys", _are_pairs, dict),
    "$counter": ("a list of pairs with hashable keys", _are_pairs, lambda pairs: Counter(dict(pairs))),
}


def state_dict_of(value: Any) -> Any:
    """Return the state of a stateful object (a scheduler, data loader, generator); return other data unchanged."""
    if isinstance(value, ShardedOptimizer) or "_zeroshard" in getattr(value, "__dict__", {}):
        raise TypeError(
            f"a sharded {type(value).__name__} cannot be saved as extra data: save it in a separate call of save()"
        )
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
                raise KeyError(f"the checkpoint has no {path}[{key!r}], only {list(state)}")
            load_into(item, state[key], f"{path}[{key!r}]")
    elif isinstance(value, list):
        for number, (item, item_state) in enumerate(zip(value, state, strict=True)):
            load_into(item, item_state, f"{path}[{number}]")
