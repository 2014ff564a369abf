"""The command `zeroshard inspect`: what is in a checkpoint, and whether it is whole. It needs torch alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.checkpoint.contents import Contents
    from zeroshard.checkpoint.index import Index


def main(argv: Sequence[str]) -> int:
    """Run it and return the exit status: 1 where the checkpoint cannot be read, or is found damaged."""
    options = _parser().parse_args(argv)
    from zeroshard.checkpoint.contents import Contents
    from zeroshard.checkpoint.errors import CheckpointError

    try:
        with Contents(options.checkpoint) as contents:
            told = describe(contents)
            if options.verify:
                told["damages"] = list(contents.damages())
    except (CheckpointError, OSError, ValueError) as error:
        print(f"zeroshard inspect: {error}", file=sys.stderr)
        return 1
    _print(json.dumps(told, indent=2) if options.json else page(told))
    for damage in told.get("damages", ()):
        print(f"zeroshard inspect: {damage}", file=sys.stderr)
    return 1 if told.get("damages") else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zeroshard inspect", description="Tell what is in a checkpoint, from its index alone."
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CKPT",
        help="a checkpoint; or a directory of some or a run of `zeroshard train`, for the latest",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--verify", action="store_true", help="read every file and check it; exit status 1 for damage")
    return parser


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # of `zeroshard inspect CKPT | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter tells of it at its end


# ---------------------------------------------------------------------------------------------- as plain data


def describe(contents: Contents) -> dict[str, Any]:
    """What is in a checkpoint, as JSON has it."""
    index = contents.index
    tensors = list(_tensors(index))
    return {
        "path": str(contents.path.absolute()),
        "written": index.written,
        "versions": index.versions,
        "ranks": index.ranks,
        "stage": index.sharding and index.sharding["stage"],
        "precision": index.sharding and index.sharding["precision"],
        "tensor": index.sharding and index.sharding.get("tensor", 1),  # the degree
        "step": _step(contents),
        "files": {record.name: record.nbytes for record in index.files},
        "bytes": sum(record.nbytes for record in index.files),
        "bytes_by_kind": {
            kind: sum(saved.nbytes for saved in index.names(kind).values()) for kind in ("model", "optimizer", "other")
        },
        "parameters": {
            kind: sum(row["numel"] or 0 for row in tensors if row["kind"] == kind) for kind in ("trained", "frozen")
        },
        "architectures": index.config and index.config.get("architectures"),
        "tensors": tensors,
        "ties": index.ties,
        "optimizer": index.optimizer
        and {
            "class": index.optimizer["class"],
            "groups": [
                {"parameters": len(group["names"]), **_plain(group["options"])} for group in index.optimizer["groups"]
            ],
            "loss_scale": index.optimizer["loss_scale"],
        },
        "extra": list(_mapping(index.extra)),
        "rank_extra": any(own["extra"] is not None for own in index.own),
    }


def _tensors(index: Index) -> Iterator[dict[str, Any]]:
    """Parameters in the model's order, then buffers. Of a checkpoint without weights, what the states tell of them."""
    from zeroshard.checkpoint.weights import DTYPES

    model = index.names("model")
    states: dict[str, dict[str, Any]] = {}
    for name, saved in index.names("optimizer").items():
        parameter, _, key = name.rpartition("/")
        states.setdefault(parameter, {})[key] = saved
    for name in [*index.parameters, *(name for name in model if name not in index.parameters)]:
        own, its_states = model.get(name), states.get(name, {})
        known = own or next(iter(its_states.values()), None)
        yield {
            "name": name,
            "kind": {True: "trained", False: "frozen", None: "buffer"}[index.parameters.get(name)],
            "shape": known and list(known.shape),
            "numel": known and known.numel,
            "dtype": own and DTYPES[own.dtype],
            "bytes": own.nbytes if own else 0,
            "states": {key: DTYPES[saved.dtype] for key, saved in its_states.items()},
            "tied": [other for other, first in index.ties.items() if first == name],
        }


def _step(contents: Contents) -> float | None:
    """The step the user has noted, else the most steps that a parameter has seen."""
    noted = _number(contents, _mapping(contents.index.extra).get("step"))
    if noted is not None or contents.index.optimizer is None:
        return noted
    counts = (_number(contents, counter.get("step")) for counter in contents.index.optimizer["counters"].values())
    return max((count for count in counts if count is not None), default=None)


def _number(contents: Contents, encoded: Any) -> float | None:
    if isinstance(encoded, dict) and "$tensor" in encoded:
        name = f"other/{encoded['$tensor']}"
        value = contents.tensor(name).item() if contents.index.tensors[name].numel == 1 else None
    else:
        value = _plain(encoded)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (int, float)) else None


def _plain(encoded: Any) -> Any:
    """What was encoded, in JSON's own types: see [Note: plain data] in checkpoint/plain.py."""
    if isinstance(encoded, list):
        return [_plain(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    mark = next(iter(encoded), "")
    if mark == "$tensor":
        return f"tensor {encoded[mark]}"
    return _plain(encoded[mark]) if mark.startswith("$") else {key: _plain(value) for key, value in encoded.items()}


def _mapping(encoded: Any) -> dict[str, Any]:
    """A dict by its keys as text: ``encode`` writes pairs where not all of them are."""
    if isinstance(encoded, dict) and "$items" in encoded:
        return {str(_plain(key)): value for key, value in encoded["$items"]}
    return dict(encoded or {})


# --------------------------------------------------------------------------------------------------- as a page


def page(told: dict[str, Any]) -> str:
    """The same for people."""
    lines = [told["path"], *(f"  {label:<12}{text}" for label, text in _facts(told))]
    rows = [("name", "shape", "dtype", "size", "kind", "optimizer states"), *map(_row, told["tensors"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines.append("")
    for row in rows:
        cells = [
            f"{cell:>{width}}" if column == 3 else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    if "damages" in told:
        count = len(told["damages"])
        lines += [
            "",
            "damaged: see below" if count else f"whole: {len(told['files'])} files read, as they were written",
        ]
    return "\n".join(lines)


def _facts(told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from zeroshard.memory.report import size

    yield "written", f"{told['written']} by {', '.join(f'{name} {v}' for name, v in told['versions'].items())}"
    sharded = told["stage"] is not None
    how = f"stage {told['stage']}, precision {told['precision']}" if sharded else "not sharded"
    tensor = f", tensor parallel over {told['tensor']}" if sharded and told["tensor"] > 1 else ""
    yield "ranks", f"{told['ranks']}, {how}{tensor}"
    yield "step", "unknown" if told["step"] is None else str(told["step"])
    kinds = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in told["bytes_by_kind"].items())
    yield "size", f"{size(told['bytes'])} in {len(told['files'])} files: {kinds}"
    trained, frozen = told["parameters"]["trained"], told["parameters"]["frozen"]
    yield "parameters", f"{trained + frozen:,}: {trained:,} trained, {frozen:,} frozen"
    if told["architectures"]:
        yield "model", ", ".join(told["architectures"])
    if told["optimizer"] is not None:
        scale = told["optimizer"]["loss_scale"]
        yield "optimizer", told["optimizer"]["class"] + (f", loss scale {scale}" if scale is not None else "")
        for number, group in enumerate(told["optimizer"]["groups"]):
            options = ", ".join(f"{key} {value}" for key, value in group.items() if key != "parameters")
            yield f"  group {number}", f"{group['parameters']} parameters, {options}"
    else:
        yield "optimizer", "none"
    if told["extra"]:
        yield "extra", ", ".join(told["extra"])
    if told["rank_extra"]:
        yield "rank_extra", "of each rank its own"


def _row(tensor: dict[str, Any]) -> tuple[str, ...]:
    from zeroshard.memory.report import size

    states = [f"{key} {dtype}" for key, dtype in tensor["states"].items()]
    tied = [f"(also {', '.join(tensor['tied'])})"] if tensor["tied"] else []
    return (
        tensor["name"],
        "?" if tensor["shape"] is None else str(tensor["shape"]),
        tensor["dtype"] or "not saved",
        size(tensor["bytes"]),
        tensor["kind"],
        " ".join([", ".join(states), *tied]).strip(),
    )
