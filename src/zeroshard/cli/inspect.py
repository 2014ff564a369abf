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
    from zeroshard.checkpoint.checkpoint_reader import CheckpointReader
    from zeroshard.checkpoint.index import CheckpointIndex


def main(argv: Sequence[str]) -> int:
    """Run it and return the exit status: 1 where the checkpoint cannot be read, or is found damaged."""
    options = _parser().parse_args(argv)
    from zeroshard.checkpoint.checkpoint_reader import CheckpointReader
    from zeroshard.checkpoint.errors import CheckpointError

    try:
        with CheckpointReader(options.checkpoint) as contents:
            told = describe(contents)
            if options.verify:
                told["damages"] = list(contents.verify())
    except (CheckpointError, OSError, ValueError) as error:
        print(f"zeroshard inspect: {error}", file=sys.stderr)
        return 1
    _print(json.dumps(told, indent=2) if options.json else render_text(told))
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


def describe(contents: CheckpointReader) -> dict[str, Any]:
    """What is in a checkpoint, as JSON has it."""
    index = contents.index
    tensors = list(_describe_tensors(index))
    return {
        "path": str(contents.path.absolute()),
        "written": index.written,
        "versions": index.versions,
        "ranks": index.ranks,
        "stage": index.sharding and index.sharding["stage"],
        "precision": index.sharding and index.sharding["precision"],
        "tensor": index.sharding and index.sharding.get("tensor", 1),  # the degree
        "step": _last_step(contents),
        "files": {record.name: record.nbytes for record in index.files},
        "bytes": sum(record.nbytes for record in index.files),
        "bytes_by_kind": {
            kind: sum(saved.nbytes for saved in index.tensors_of_kind(kind).values())
            for kind in ("model", "optimizer", "other")
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
                {"parameters": len(group["names"]), **_to_plain_json(group["options"])}
                for group in index.optimizer["groups"]
            ],
            "loss_scale": index.optimizer["loss_scale"],
        },
        "extra": list(_decode_dict(index.extra)),
        "rank_extra": any(own["extra"] is not None for own in index.own),
    }


def _describe_tensors(index: CheckpointIndex) -> Iterator[dict[str, Any]]:
    """Parameters in the model's order, then buffers. Of a checkpoint without weights, what the states tell of them."""
    from zeroshard.checkpoint.safetensors_files import DTYPE_NAMES

    model = index.tensors_of_kind("model")
    states: dict[str, dict[str, Any]] = {}
    for name, saved in index.tensors_of_kind("optimizer").items():
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
            "dtype": own and DTYPE_NAMES[own.dtype],
            "bytes": own.nbytes if own else 0,
            "states": {key: DTYPE_NAMES[saved.dtype] for key, saved in its_states.items()},
            "tied": [other for other, first in index.ties.items() if first == name],
        }


def _last_step(contents: CheckpointReader) -> float | None:
    """The step the user has noted, else the most steps that a parameter has seen."""
    noted = _decode_number(contents, _decode_dict(contents.index.extra).get("step"))
    if noted is not None or contents.index.optimizer is None:
        return noted
    counts = (
        _decode_number(contents, counter.get("step")) for counter in contents.index.optimizer["counters"].values()
    )
    return max((count for count in counts if count is not None), default=None)


def _decode_number(contents: CheckpointReader, encoded: Any) -> float | None:
    if isinstance(encoded, dict) and "$tensor" in encoded:
        name = f"other/{encoded['$tensor']}"
        value = contents.read_tensor(name).item() if contents.index.tensors[name].numel == 1 else None
    else:
        value = _to_plain_json(encoded)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (int, float)) else None


def _to_plain_json(encoded: Any) -> Any:
    """What was encoded, in JSON's own types: see [Note: plain data] in checkpoint/json_codec.py."""
    if isinstance(encoded, list):
        return [_to_plain_json(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    mark = next(iter(encoded), "")
    if mark == "$tensor":
        return f"tensor {encoded[mark]}"
    return (
        _to_plain_json(encoded[mark])
        if mark.startswith("$")
        else {key: _to_plain_json(value) for key, value in encoded.items()}
    )


def _decode_dict(encoded: Any) -> dict[str, Any]:
    """A dict by its keys as text: ``encode`` writes pairs where not all of them are."""
    if isinstance(encoded, dict) and "$items" in encoded:
        return {str(_to_plain_json(key)): value for key, value in encoded["$items"]}
    return dict(encoded or {})


# --------------------------------------------------------------------------------------------------- as a page


def render_text(summary: dict[str, Any]) -> str:
    """The same for people."""
    lines = [summary["path"], *(f"  {label:<12}{text}" for label, text in _summary_lines(summary))]
    rows = [("name", "shape", "dtype", "size", "kind", "optimizer states"), *map(_tensor_row, summary["tensors"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines.append("")
    for row in rows:
        cells = [
            f"{cell:>{width}}" if column == 3 else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    if "damages" in summary:
        count = len(summary["damages"])
        lines += [
            "",
            "damaged: see below" if count else f"whole: {len(summary['files'])} files read, as they were written",
        ]
    return "\n".join(lines)


def _summary_lines(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from zeroshard.memory.report import format_bytes

    yield "written", f"{summary['written']} by {', '.join(f'{name} {v}' for name, v in summary['versions'].items())}"
    sharded = summary["stage"] is not None
    how = f"stage {summary['stage']}, precision {summary['precision']}" if sharded else "not sharded"
    tensor = f", tensor parallel over {summary['tensor']}" if sharded and summary["tensor"] > 1 else ""
    yield "ranks", f"{summary['ranks']}, {how}{tensor}"
    yield "step", "unknown" if summary["step"] is None else str(summary["step"])
    kinds = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in summary["bytes_by_kind"].items())
    yield "size", f"{format_bytes(summary['bytes'])} in {len(summary['files'])} files: {kinds}"
    trained, frozen = summary["parameters"]["trained"], summary["parameters"]["frozen"]
    yield "parameters", f"{trained + frozen:,}: {trained:,} trained, {frozen:,} frozen"
    if summary["architectures"]:
        yield "model", ", ".join(summary["architectures"])
    if summary["optimizer"] is not None:
        scale = summary["optimizer"]["loss_scale"]
        yield "optimizer", summary["optimizer"]["class"] + (f", loss scale {scale}" if scale is not None else "")
        for number, group in enumerate(summary["optimizer"]["groups"]):
            options = ", ".join(f"{key} {value}" for key, value in group.items() if key != "parameters")
            yield f"  group {number}", f"{group['parameters']} parameters, {options}"
    else:
        yield "optimizer", "none"
    if summary["extra"]:
        yield "extra", ", ".join(summary["extra"])
    if summary["rank_extra"]:
        yield "rank_extra", "of each rank its own"


def _tensor_row(tensor: dict[str, Any]) -> tuple[str, ...]:
    from zeroshard.memory.report import format_bytes

    states = [f"{key} {dtype}" for key, dtype in tensor["states"].items()]
    tied = [f"(also {', '.join(tensor['tied'])})"] if tensor["tied"] else []
    return (
        tensor["name"],
        "?" if tensor["shape"] is None else str(tensor["shape"]),
        tensor["dtype"] or "not saved",
        format_bytes(tensor["bytes"]),
        tensor["kind"],
        " ".join([", ".join(states), *tied]).strip(),
    )
