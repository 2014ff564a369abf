"""StoredTensor: a tensor whose values stay in safetensors files until they are needed.

[Note: stored tensors]
A model of stored tensors has the shapes, dtypes and ties of a loaded one and takes no memory. ``zeroshard.shard()``
reads this rank's shard of each tensor straight from the files. Until then:

- Operations that only rearrange elements (``stack``, ``cat``, ``chunk``, ``transpose``, a cast) give another stored
  tensor, so libraries may convert a checkpoint to their own layout without reading it.
- Any other operation reads the values it needs and gives an ordinary tensor: the numbers are those of a loaded model.
  If that is a view, it is a stored tensor again, so that no write into it is lost.
- An operation that would write into a stored tensor raises. ``parameter.data = tensor`` makes it an ordinary one.

A stored tensor is a list of :class:`Piece`: boxes of it, each a strided view of one tensor in a file. Experts that
were stored one by one and are stacked by the model::

    stored    | w1 of expert 0 |  | w3 of expert 0 |  | w1 of expert 1 |  | w3 of expert 1 |
    tensor    [[w1 of expert 0, w3 of expert 0], [w1 of expert 1, w3 of expert 1]]: four pieces
"""

from __future__ import annotations

import copy
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from zeroshard.utils.safetensors_files import DTYPE_NAMES, as_memoryview

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
CHUNK_BYTES = 2**22  # of values that are cast, or copied to another device, at a time
MAX_UNUSED_BYTES = 2**16  # read in one call together with needed ones, rather than in a call each
_SAMPLED_BLOCKS, _SAMPLED_BYTES = 8, 4096  # of a file's fingerprint


class StoredFile:
    """A safetensors file, open for reading byte ranges."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes_read = path, 0
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - stays open: a replaced file keeps its values
        self._nbytes = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(os.pread(self._file.fileno(), 8, 0), "little")
        try:
            if not 0 < length <= self._nbytes - 8:
                raise ValueError(f"its header would be {length} bytes long, and the file has {self._nbytes} bytes")
            self._header = os.pread(self._file.fileno(), length, 8)
            self.entries: dict[str, dict[str, Any]] = json.loads(self._header)
            self.entries.pop("__metadata__", None)
            self._data_start = 8 + length
            for name, entry in self.entries.items():
                self._check_entry(name, entry)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not a complete safetensors file ({error}): download or write it again"
            ) from error

    def _check_entry(self, name: str, entry: dict[str, Any]) -> None:
        start, end = entry["data_offsets"]
        if not 0 <= start <= end <= self._nbytes - self._data_start:
            raise ValueError(f"{name!r} would end at byte {self._data_start + end} of {self._nbytes}")
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is not None and end - start != math.prod(entry["shape"]) * dtype.itemsize:
            raise ValueError(f"{name!r} has {end - start} bytes for shape {entry['shape']}")

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor of the file."""
        entry = self.entries[name]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(
                f"{self.path}: {name!r} has dtype {entry['dtype']}, expected one of {', '.join(_DTYPES)}: convert the "
                "file to one of these first"
            )
        shape = tuple(entry["shape"])
        start = self._data_start + entry["data_offsets"][0]
        whole = Piece(self, start, (0,) * len(shape), shape, 0, _row_major(shape), (dtype,))
        return StoredTensor(shape, (whole,) if math.prod(shape) else (), dtype)

    def read_into(self, buffer: torch.Tensor, start: int) -> None:
        """Fill a contiguous CPU tensor with the bytes from ``start`` on."""
        view, filled = as_memoryview(buffer), 0
        while filled < len(view):
            count = os.preadv(self._file.fileno(), [view[filled:]], start + filled)
            if count == 0:
                raise ValueError(f"{self.path} was cut to {start + filled} bytes while it was read: write it again")
            filled += count
        self.bytes_read += filled

    def fingerprint(self) -> str:
        """Return the size, and a checksum of the header and of a few blocks: equal for copies of one file."""
        checksum = zlib.crc32(self._header)
        for block in range(_SAMPLED_BLOCKS):
            start = (self._nbytes - _SAMPLED_BYTES) * block // max(_SAMPLED_BLOCKS - 1, 1)
            checksum = zlib.crc32(os.pread(self._file.fileno(), _SAMPLED_BYTES, max(start, 0)), checksum)
        return f"{self._nbytes} bytes with checksum {checksum:08x}"

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredFile:
        return self


class _Held:
    """Values that an operation has computed, in the place of a file."""

    def __init__(self, values: torch.Tensor) -> None:
        self._bytes = values.detach().cpu().contiguous().view(-1).view(torch.uint8)

    def read_into(self, buffer: torch.Tensor, start: int) -> None:
        """Fill a contiguous CPU tensor with the bytes from ``start`` on."""
        buffer.view(-1).view(torch.uint8).copy_(self._bytes[start : start + buffer.nbytes])


@dataclass(frozen=True)
class Piece:
    """A box of a stored tensor that is a strided view of one tensor in a file."""

    file: StoredFile | _Held
    start_byte: int  # of the tensor in the file
    starts: tuple[int, ...]  # first index of the box, per dimension
    sizes: tuple[int, ...]
    offset: int  # of the box's first element in the file's tensor
    strides: tuple[int, ...]  # in the file's tensor
    dtypes: tuple[torch.dtype, ...]  # of the file, then what it is cast to, in this order

    def cast(self, dtype: torch.dtype) -> Piece:
        return self if self.dtypes[-1] == dtype else replace(self, dtypes=(*self.dtypes, dtype))

    def intersect(self, starts: Sequence[int], sizes: Sequence[int]) -> Piece | None:
        """Return what of this piece is in a box, or None."""
        firsts = [max(own, other) for own, other in zip(self.starts, starts, strict=True)]
        ends = [
            min(own + length, other + size)
            for own, length, other, size in zip(self.starts, self.sizes, starts, sizes, strict=True)
        ]
        if any(first >= end for first, end in zip(firsts, ends, strict=True)):
            return None
        skipped = sum((f - s) * stride for f, s, stride in zip(firsts, self.starts, self.strides, strict=True))
        lengths = tuple(end - first for first, end in zip(firsts, ends, strict=True))
        return replace(self, starts=tuple(firsts), sizes=lengths, offset=self.offset + skipped)

    def shift(self, dim: int, distance: int) -> Piece:
        starts = tuple(start + distance * (d == dim) for d, start in enumerate(self.starts))
        return replace(self, starts=starts)

    def permute(self, dims: Sequence[int]) -> Piece:
        starts, sizes, strides = (tuple(v[d] for d in dims) for v in (self.starts, self.sizes, self.strides))
        return replace(self, starts=starts, sizes=sizes, strides=strides)

    def unsqueeze(self, dim: int) -> Piece:
        starts, sizes, strides = list(self.starts), list(self.sizes), list(self.strides)
        for values, value in ((starts, 0), (sizes, 1), (strides, 0)):
            values.insert(dim, value)
        return replace(self, starts=tuple(starts), sizes=tuple(sizes), strides=tuple(strides))

    def squeeze(self, dim: int) -> Piece:
        starts, sizes, strides = (
            tuple(v for d, v in enumerate(values) if d != dim) for values in (self.starts, self.sizes, self.strides)
        )
        return replace(self, starts=starts, sizes=sizes, strides=strides)

    def read(self, out: torch.Tensor) -> None:
        """Read the values into ``out``, of this piece's sizes; read little that is not needed."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        itemsize = self.dtypes[0].itemsize
        unused = (span - math.prod(self.sizes)) * itemsize
        start = self.start_byte + self.offset * itemsize
        is_in_order = span == out.numel() and self.strides == _row_major(self.sizes, self.strides)
        can_read_in_place = out.device.type == "cpu" and out.is_contiguous() and not out.requires_grad
        if is_in_order and can_read_in_place and self.dtypes == (out.dtype,):
            self.file.read_into(out, start)
            return
        if (unused <= MAX_UNUSED_BYTES and span * itemsize <= CHUNK_BYTES) or max(self.sizes, default=1) == 1:
            buffer = torch.empty(span, dtype=self.dtypes[0], device="cpu")
            self.file.read_into(buffer, start)
            values = buffer.as_strided(self.sizes, self.strides)
            for dtype in self.dtypes[1:]:
                values = values.to(dtype)
            out.copy_(values)
            return
        # in parts along the dimension that spans most of the file
        candidates = [d for d, size in enumerate(self.sizes) if size > 1]
        dim = max(candidates, key=lambda d: self.strides[d])
        count = self.sizes[dim]
        row_bytes = max(self.strides[dim] * itemsize, 1)
        step = max(min(CHUNK_BYTES // row_bytes, -(-count // 2)), 1) if unused <= MAX_UNUSED_BYTES else 1
        for first in range(0, count, step):
            length = min(step, count - first)
            sizes = (*self.sizes[:dim], length, *self.sizes[dim + 1 :])
            part = replace(self, sizes=sizes, offset=self.offset + first * self.strides[dim])
            part.read(out.narrow(dim, first, length))


class StoredTensor(torch.Tensor):
    """A tensor whose values are in files: see [Note: stored tensors]."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        pieces: Sequence[Piece],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        requires_grad: bool = False,
    ) -> StoredTensor:
        tensor: StoredTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=torch.device(device), requires_grad=requires_grad
        )
        tensor.pieces = tuple(pieces)
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Rearrange, or read the values and compute with them."""
        kwargs = kwargs or {}
        rearrange = _REARRANGING.get(func.overloadpacket.__name__)
        if rearrange is not None and "out" not in kwargs:
            if rearrange not in (_same, _to_copy, _equal):
                func(*tree_map_only(torch.Tensor, _to_meta, args), **kwargs)  # raises on wrong arguments
            result = rearrange(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if "_like" in func.__name__ or func.__name__.startswith("new_"):  # a new tensor that needs no values
            first = args[0]
            kwargs = {"device": first.device, **{key: value for key, value in kwargs.items() if value is not None}}
            return func(torch.empty(first.shape, dtype=first.dtype, device="meta"), *args[1:], **kwargs)
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for value in tree_leaves(given.get(argument.name)):
                if isinstance(value, StoredTensor):
                    raise RuntimeError(
                        f"{func.__name__} would write into a parameter of shape {tuple(value.shape)} whose values are "
                        "still in the files of from_pretrained(): change it after zeroshard.shard(), inside "
                        "zeroshard.gathered(model, write_rank=0), or set parameter.data to a new tensor before"
                    )
        args, kwargs = tree_map_only(StoredTensor, lambda tensor: tensor.read(), (args, kwargs))
        result = func(*args, **kwargs)
        if any(returned.alias_info is not None for returned in func._schema.returns):
            # a view of the values that were read: what is written into it would be lost
            return tree_map_only(torch.Tensor, _hold, result)
        return result

    @property
    def files(self) -> set[StoredFile]:
        """The files that have values of this tensor."""
        return {piece.file for piece in self.pieces if isinstance(piece.file, StoredFile)}

    def read(self) -> torch.Tensor:
        """Return an ordinary tensor with the values."""
        values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.read_range(0, self.numel(), values.view(-1))
        return values

    def read_range(self, start: int, end: int, out: torch.Tensor) -> None:
        """Read elements ``start`` to ``end`` of the flattened tensor into ``out``, which may cast them."""
        position = 0
        for starts, sizes in _boxes(tuple(self.shape), start, end):
            numel = math.prod(sizes)
            target = out[position : position + numel].view(sizes)
            for piece in self.pieces:
                common = piece.intersect(starts, sizes)
                if common is not None:
                    part = target
                    for dim, (first, origin) in enumerate(zip(common.starts, starts, strict=True)):
                        part = part.narrow(dim, first - origin, common.sizes[dim])
                    common.cast(self.dtype).read(part)
            position += numel

    def numpy(self, *, force: bool = False) -> Any:
        """Read the values."""
        return self.read().numpy(force=force)

    def tolist(self) -> Any:
        """Read the values."""
        return self.read().tolist()

    def untyped_storage(self) -> Any:
        """Raise: there is no memory. safetensors asks for it to find tensors that share theirs."""
        raise RuntimeError(
            f"a parameter of shape {tuple(self.shape)} has no memory yet, its values are still in the files of "
            "from_pretrained(): call zeroshard.shard() first, and save the model then with zeroshard.state_dict() or "
            "trainer.save_model(). To save it as it is now, load it with transformers' own from_pretrained()"
        )

    storage = share_memory_ = untyped_storage

    def to_param(self) -> StoredTensor:
        """Return this tensor as a parameter."""
        parameter: Any = nn.Parameter(self, requires_grad=self.requires_grad)
        return parameter  # type: ignore[no-any-return]

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Become ``value``, and keep the object identity."""
        is_param, requires_grad = isinstance(self, nn.Parameter), self.requires_grad
        new = value.detach()
        if is_param:
            new = nn.Parameter(new, requires_grad=requires_grad)
        torch.utils.swap_tensors(self, new)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        result = memo.get(id(self))
        if result is None:
            result = StoredTensor(self.shape, self.pieces, self.dtype, self.device, self.requires_grad)
            result = memo[id(self)] = result.to_param() if isinstance(self, nn.Parameter) else result
            result.__dict__.update(
                {key: copy.deepcopy(value, memo) for key, value in self.__dict__.items() if key != "pieces"}
            )
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values."""
        values = self.read()
        if isinstance(self, nn.Parameter):
            values = nn.Parameter(values, requires_grad=self.requires_grad)
        return values.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        names = ", ".join(sorted(file.path.name for file in self.files))
        return f"StoredTensor({tuple(self.shape)}, {self.dtype}, device={self.device}, in {names or 'no file'})"


def _row_major(sizes: Sequence[int], like: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor; along dimensions of one element, those of ``like``."""
    strides, step = [0] * len(sizes), 1
    for dim in reversed(range(len(sizes))):
        strides[dim] = step if sizes[dim] != 1 or like is None else like[dim]
        step *= sizes[dim]
    return tuple(strides)


def _boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (starts, sizes) of the boxes that a range of the flattened tensor consists of, in order.

    >>> list(_boxes((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first_full, last_full = -(-start // inner), end // inner
    if first_full > last_full:  # inside one row
        for starts, sizes in _boxes(shape[1:], start - last_full * inner, end - last_full * inner):
            yield (last_full, *starts), (1, *sizes)
        return
    for starts, sizes in _boxes(shape[1:], start - (first_full - 1) * inner, inner) if start % inner else ():
        yield (first_full - 1, *starts), (1, *sizes)
    if first_full < last_full:
        yield (first_full, *(0,) * (len(shape) - 1)), (last_full - first_full, *shape[1:])
    for starts, sizes in _boxes(shape[1:], 0, end - last_full * inner) if end % inner else ():
        yield (last_full, *starts), (1, *sizes)


# ------------------------------------------------------------------- operations that only rearrange elements


def _hold(values: torch.Tensor) -> StoredTensor:
    """Return a stored tensor of values in memory."""
    shape = tuple(values.shape)
    piece = Piece(_Held(values), 0, (0,) * len(shape), shape, 0, _row_major(shape), (values.dtype,))
    return StoredTensor(shape, (piece,) if values.numel() else (), values.dtype, values.device)


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _same(tensor: StoredTensor, *_: Any, **__: Any) -> StoredTensor:
    return StoredTensor(tensor.shape, tensor.pieces, tensor.dtype, tensor.device)


def _to_copy(tensor: StoredTensor, **options: Any) -> torch.Tensor:
    dtype, device = options.get("dtype") or tensor.dtype, options.get("device") or tensor.device
    if torch.device(device).type == "meta":
        return torch.empty(tensor.shape, dtype=dtype, device="meta")
    return StoredTensor(tensor.shape, [piece.cast(dtype) for piece in tensor.pieces], dtype, device)


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    dim %= max(first.dim(), 1)
    is_uniform = all(
        isinstance(tensor, StoredTensor)
        and tensor.dtype == first.dtype
        and (*tensor.shape[:dim], *tensor.shape[dim + 1 :]) == (*first.shape[:dim], *first.shape[dim + 1 :])
        for tensor in tensors
    )
    if not is_uniform:
        return NotImplemented
    pieces, length = [], 0
    for tensor in tensors:
        pieces += [piece.shift(dim, length) for piece in tensor.pieces]  # type: ignore[attr-defined]
        length += tensor.shape[dim]
    return StoredTensor((*first.shape[:dim], length, *first.shape[dim + 1 :]), pieces, first.dtype, first.device)


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    if not all(isinstance(tensor, StoredTensor) for tensor in tensors):
        return NotImplemented
    dim %= tensors[0].dim() + 1
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)  # type: ignore[arg-type]


def _unsqueeze(tensor: StoredTensor, dim: int) -> StoredTensor:
    dim %= tensor.dim() + 1
    shape = (*tensor.shape[:dim], 1, *tensor.shape[dim:])
    return StoredTensor(shape, [piece.unsqueeze(dim) for piece in tensor.pieces], tensor.dtype, tensor.device)


def _squeeze(tensor: StoredTensor, dims: Any = None) -> StoredTensor:
    dims = range(tensor.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    for dim in sorted((dim % max(tensor.dim(), 1) for dim in dims), reverse=True):
        if tensor.dim() and tensor.shape[dim] == 1:
            shape = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
            pieces = [piece.squeeze(dim) for piece in tensor.pieces]
            tensor = StoredTensor(shape, pieces, tensor.dtype, tensor.device)
    return _same(tensor)


def _narrow(tensor: StoredTensor, dim: int, start: int, length: int) -> StoredTensor:
    shape = [length if d == dim else size for d, size in enumerate(tensor.shape)]
    starts = [start if d == dim else 0 for d in range(tensor.dim())]
    parts = (piece.intersect(starts, shape) for piece in tensor.pieces)
    pieces = [part.shift(dim, -start) for part in parts if part is not None]
    return StoredTensor(shape, pieces, tensor.dtype, tensor.device)


def _slice(tensor: StoredTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if step != 1:
        return NotImplemented
    dim %= tensor.dim()
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    return _narrow(tensor, dim, first, max(last - first, 0))


def _select(tensor: StoredTensor, dim: int, index: int) -> StoredTensor:
    dim %= tensor.dim()
    return _squeeze(_narrow(tensor, dim, index % tensor.shape[dim], 1), dim)


def _split(tensor: StoredTensor, sizes: int | Sequence[int], dim: int = 0) -> list[StoredTensor]:
    dim %= tensor.dim()
    if isinstance(sizes, int):
        length = tensor.shape[dim]
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    return [_narrow(tensor, dim, sum(sizes[:number]), size) for number, size in enumerate(sizes)]


def _unbind(tensor: StoredTensor, dim: int = 0) -> list[StoredTensor]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _permute(tensor: StoredTensor, dims: Sequence[int]) -> StoredTensor:
    dims = [dim % tensor.dim() for dim in dims]
    pieces = [piece.permute(dims) for piece in tensor.pieces]
    return StoredTensor([tensor.shape[dim] for dim in dims], pieces, tensor.dtype, tensor.device)


def _transpose(tensor: StoredTensor, dim0: int = 0, dim1: int = 1) -> StoredTensor:
    dims = list(range(tensor.dim()))
    if len(dims) > 1:
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(tensor, dims)


def _view(tensor: StoredTensor, shape: Sequence[int]) -> Any:
    """Change the shape of a tensor that is one piece, if its elements allow it without a copy."""
    if isinstance(shape, torch.dtype):  # view.dtype: other values
        return NotImplemented
    shape = torch.empty(tensor.shape, device="meta").view(shape).shape
    if shape == tensor.shape:
        return _same(tensor)
    if len(tensor.pieces) != 1:
        return NotImplemented
    (piece,) = tensor.pieces
    try:
        strides = torch.empty_strided(piece.sizes, piece.strides, device="meta").view(shape).stride()
    except RuntimeError:
        return NotImplemented
    viewed = replace(piece, starts=(0,) * len(shape), sizes=tuple(shape), strides=tuple(strides))
    return StoredTensor(shape, (viewed,), tensor.dtype, tensor.device)


def _equal(one: torch.Tensor, other: torch.Tensor) -> Any:
    """Compare two tensors a few elements at a time."""
    if not (isinstance(one, StoredTensor) and isinstance(other, StoredTensor)):
        return NotImplemented
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    chunk = CHUNK_BYTES // one.dtype.itemsize
    buffers = [torch.empty(min(chunk, one.numel()), dtype=one.dtype, device="cpu") for _ in range(2)]
    for start in range(0, one.numel(), chunk):
        end = min(start + chunk, one.numel())
        for tensor, buffer in zip((one, other), buffers, strict=True):
            tensor.read_range(start, end, buffer[: end - start])
        if not torch.equal(buffers[0][: end - start], buffers[1][: end - start]):
            return False
    return True


_REARRANGING: dict[str, Callable[..., Any]] = {
    "alias": _same,
    "clone": _same,
    "detach": _same,
    "lift_fresh": _same,
    "_to_copy": _to_copy,
    "cat": _cat,
    "stack": _stack,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "slice": _slice,
    "select": _select,
    "split": _split,
    "split_with_sizes": _split,
    "unbind": _unbind,
    "permute": _permute,
    "transpose": _transpose,
    "t": _transpose,
    "view": _view,
    "_unsafe_view": _view,
    "equal": _equal,
}


def stored_files(model: nn.Module) -> dict[str, StoredFile]:
    """Return the files that parameters of a model are stored in, by path."""
    parameters = (parameter for parameter in model.parameters() if isinstance(parameter, StoredTensor))
    return {str(file.path): file for parameter in parameters for file in parameter.files}
