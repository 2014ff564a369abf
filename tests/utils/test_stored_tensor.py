"""A tensor without values gives those of its file: any range, after any rearrangement, and nothing else is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import Tensors
from safetensors.torch import save_file

from zeroshard.utils import stored_tensor
from zeroshard.utils.stored_tensor import StoredFile, StoredTensor


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    draw = torch.Generator().manual_seed(0)
    return {
        **{name: torch.randn(4, 6, generator=draw) for name in "abc"},
        "half": torch.randn(3, 5, generator=draw).to(torch.bfloat16),
        "number": torch.tensor(2.5),
        "nothing": torch.zeros(0, 3),
    }


@pytest.fixture
def stored(tensors: Tensors, tmp_path: Path) -> dict[str, StoredTensor]:
    save_file(tensors, tmp_path / "t.safetensors")
    file = StoredFile(tmp_path / "t.safetensors")
    return {name: file.tensor(name) for name in tensors}


REARRANGED: dict[str, Callable[[Any], Any]] = {
    "whole": lambda t: t["a"][...],
    "number": lambda t: t["number"],
    "nothing": lambda t: t["nothing"],
    "rows": lambda t: t["a"][1:3],
    "a row": lambda t: t["a"][-1],
    "columns": lambda t: t["a"].narrow(1, 1, 4),
    "transposed": lambda t: t["a"].t().contiguous()[1:],
    "stacked": lambda t: torch.stack([t["a"], t["b"]], dim=1),
    "experts": lambda t: torch.cat([torch.stack([t["a"], t["b"]]), torch.stack([t["b"], t["c"]])], dim=1),
    "chunk": lambda t: torch.chunk(t["a"], 3, dim=1)[1],
    "split": lambda t: torch.split(t["a"], [1, 3])[1],
    "cast": lambda t: t["half"].float(),
    "cast twice": lambda t: t["a"].to(torch.bfloat16).double(),
    "viewed": lambda t: t["a"].reshape(2, 2, 3, 2).transpose(0, 2).squeeze(),
    "squeezed number": lambda t: t["number"].squeeze(0).squeeze(),
    "mixed": lambda t: torch.cat([t["a"], t["b"][:1]]).unsqueeze(0),
}


@pytest.mark.parametrize("unused", [0, 2**16])
@pytest.mark.parametrize("name", REARRANGED)
def test_any_range_of_a_rearranged_tensor_is_read(
    name: str,
    unused: int,
    tensors: Tensors,
    stored: dict[str, StoredTensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored_tensor, "MAX_UNUSED_BYTES", unused)
    tensor, expected = REARRANGED[name](stored), REARRANGED[name](tensors)
    assert isinstance(tensor, StoredTensor)
    assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
    (file,) = stored["a"].files
    flat = expected.reshape(-1)
    for start in range(0, flat.numel(), 2):
        for end in range(start, flat.numel() + 1, 3):
            values, before = torch.empty(end - start, dtype=flat.dtype), file.bytes_read
            tensor.read_range(start, end, values)
            assert torch.equal(values, flat[start:end])
            if not unused:
                assert file.bytes_read - before == (end - start) * (2 if name == "cast" else 4)
    assert torch.equal(tensor, tensor.clone())
    assert torch.equal(tensor.read(), expected)


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda t: t.mul_(2),
    "into data": lambda t: t.data.zero_(),
    "into an element": lambda t: t.__setitem__((0, 0), 1.0),
    "into a view": lambda t: t.view(-1).fill_(1),
    "into a diagonal": lambda t: t.diagonal().fill_(1),
    "into every second row": lambda t: t[::2].zero_(),
    "into a clone": lambda t: t.clone().zero_(),
    "out": lambda t: torch.add(torch.ones(4, 6), 1, out=t),
    "foreach": lambda t: torch._foreach_mul_([t], 2.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_no_write_is_lost(name: str, tensors: Tensors, stored: dict[str, StoredTensor]) -> None:
    with pytest.raises(RuntimeError, match="would write into a parameter of shape"):
        WRITES[name](stored["a"])
    experts = torch.stack([stored["a"], stored["b"]])
    with pytest.raises(RuntimeError, match="would write into a parameter of shape"):
        experts.view(8, 6).zero_()
    assert torch.equal(experts.view(8, 6), torch.cat([tensors["a"], tensors["b"]]))
    assert torch.equal(
        stored["a"][::2] + stored["a"].diagonal().sum(), tensors["a"][::2] + tensors["a"].diagonal().sum()
    )
    parameter = torch.nn.Parameter(stored["a"])
    same = parameter
    parameter.data = torch.ones(2)
    assert same is parameter and type(parameter) is torch.nn.Parameter and parameter.requires_grad
    assert torch.equal(parameter, torch.ones(2))


WRONG: dict[str, Callable[[Any], Any]] = {
    "index": lambda t: t.select(0, 10),
    "dimension": lambda t: t.select(2, 0),
    "slice": lambda t: torch.cat([t, t], dim=2),
    "unsqueezed": lambda t: t.unsqueeze(5),
    "sizes": lambda t: torch.split(t, [1, 2]),
    "permuted": lambda t: t.permute(0, 0),
    "flat": lambda t: t.unsqueeze(0).t(),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise_what_they_raise_of_a_tensor(
    name: str, tensors: Tensors, stored: dict[str, StoredTensor]
) -> None:
    with pytest.raises((IndexError, RuntimeError)) as expected:
        WRONG[name](tensors["a"])
    with pytest.raises(expected.type):
        WRONG[name](stored["a"])


def test_values_are_read_for_out_numpy_and_lists(tensors: Tensors, stored: dict[str, StoredTensor]) -> None:
    result = torch.empty(8, 6)
    torch.cat([stored["a"], stored["b"]], out=result)
    assert torch.equal(result, torch.cat([tensors["a"], tensors["b"]]))
    assert stored["a"].tolist() == tensors["a"].tolist() == stored["a"].numpy().tolist()
    for use in (stored["a"].untyped_storage, stored["a"].storage, stored["a"].share_memory_):
        with pytest.raises(RuntimeError, match=r"has no memory yet, .* call zeroshard.shard\(\) first"):
            use()


def test_a_file_with_a_wrong_header_is_rejected(tensors: Tensors, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_file(tensors, path)
    whole = path.read_bytes()
    for damaged, reason in (
        (b"", "header would be 0 bytes"),
        (whole[:20], "header would be"),
        (whole[:-1], "would end at byte"),
        (whole.replace(b'"F32"', b'"F16"'), r"bytes for shape \[4, 6\]"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"not a complete safetensors file \(.*{reason}.*\): download"):
            StoredFile(path)
    path.write_bytes(whole)
    file = StoredFile(path)
    path.write_bytes(whole[:-40])  # now, while it is open
    with pytest.raises(ValueError, match="was cut to"):
        file.tensor("c").read()
        file.tensor("number").read()
