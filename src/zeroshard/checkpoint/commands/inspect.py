"""The command `zeroshard inspect`: show the contents of a checkpoint and verify it. It needs only torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.utils.command_line import CommandParser, make_echo, print_error
from zeroshard.utils.format import format_bytes

if TYPE_CHECKING:
    from zeroshard.checkpoint import CheckpointIndex, CheckpointReader


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status: 1 if the checkpoint cannot be read or is damaged."""
    options = _parser().parse_args(argv)
    from zeroshard.checkpoint import CheckpointReader

    with CheckpointReader(options.checkpoint) as reader:
        summary = describe(reader)
        if options.verify:
            summary["damages"] = list(reader.verify())
    make_echo(sys.stdout)(json.dumps(summary, indent=2) if options.json else render_text(summary))
    for damage in summary.get("damages", ()):
        print_error("inspect", damage)
    return 1 if summary.get("damages") else 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="zeroshard inspect", description="Show the contents of a checkpoint, read from its index."
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CKPT",
        help="a checkpoint; or a run or a directory of checkpoints, whose latest checkpoint is used",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--verify", action="store_true", help="verify every file; exit status 1 if one is damaged")
    return parser


# ---------------------------------------------------------------------------------------------- as plain data


def describe(reader: CheckpointReader) -> dict[str, Any]:
    """Return the contents of a checkpoint as plain JSON data."""
    index = reader.index
    tensors = list(_describe_tensors(index))
    return {
        "path": str(reader.path.absolute()),
        "written": index.written,
        "versions": index.versions,
        "ranks": len(index.rank_data),
        "stage": index.sharding and index.sharding["stage"],
        "precision": index.sharding and index.sharding["precision"],
        "tensor": index.sharding and index.sharding["tensor_parallel_degree"],  # tensor-parallel degree
        "replicas": index.sharding and index.sharding.get("replicas"),  # that train alone
        "step": _last_step(reader),
        "files": {record.name: record.nbytes for record in index.files},
        "bytes": sum(record.nbytes for record in index.files),
        "bytes_by_kind": {
            kind: sum(saved.nbytes for saved in index.tensors_of_kind(kind).values())
            for kind in ("model", "optimizer", "ema", "outer_optimizer", "replica", "other")
            if kind in ("model", "optimizer", "ema", "other") or index.tensors_of_kind(kind)
        },
        "parameters": {
            kind: sum(row["numel"] or 0 for row in tensors if row["kind"] == kind) for kind in ("trained", "frozen")
        },
        "architectures": index.huggingface_config and index.huggingface_config.get("architectures"),
        "tensors": tensors,
        "ties": index.tied_names,
        "optimizer": index.optimizer
        and {
            "class": " + ".join(dict.fromkeys(group["class"] for group in index.optimizer["param_groups"])),
            "groups": [
                {"parameters": len(group["param_names"]), **_to_plain_json(group["options"])}
                for group in index.optimizer["param_groups"]
            ],
            "loss_scale": index.optimizer["loss_scale"],
        },
        "extra": list(_decode_dict(index.extra)),
        "rank_extra": any(rank_entry["rank_extra"] is not None for rank_entry in index.rank_data),
    }


def _describe_tensors(index: CheckpointIndex) -> Iterator[dict[str, Any]]:
    """Yield parameters in the model's order, then buffers. Without weights, optimizer states give their shapes."""
    from zeroshard.utils.safetensors_files import DTYPE_NAMES

    model = index.tensors_of_kind("model")
    states: dict[str, dict[str, Any]] = {}
    for name, saved in index.tensors_of_kind("optimizer").items():
        parameter, _, key = name.rpartition("/")
        states.setdefault(parameter, {})[key] = saved
    for name in [*index.requires_grad, *(name for name in model if name not in index.requires_grad)]:
        weight, tensor_states = model.get(name), states.get(name, {})
        shape_source = weight or next(iter(tensor_states.values()), None)
        yield {
            "name": name,
            "kind": {True: "trained", False: "frozen", None: "buffer"}[index.requires_grad.get(name)],
            "shape": shape_source and list(shape_source.shape),
            "numel": shape_source and shape_source.numel,
            "dtype": weight and DTYPE_NAMES[weight.dtype],
            "bytes": weight.nbytes if weight else 0,
            "states": {key: DTYPE_NAMES[saved.dtype] for key, saved in tensor_states.items()},
            "tied": [tied_name for tied_name, first in index.tied_names.items() if first == name],
        }


def _last_step(reader: CheckpointReader) -> float | None:
    """Return the step that the user saved as extra, or the largest step counter of any parameter."""
    saved_step = _decode_number(reader, _decode_dict(reader.index.extra).get("step"))
    if saved_step is not None or reader.index.optimizer is None:
        return saved_step
    counts = (_decode_number(reader, counter.get("step")) for counter in reader.index.optimizer["scalars"].values())
    return max((count for count in counts if count is not None), default=None)


def _decode_number(reader: CheckpointReader, encoded: Any) -> float | None:
    if isinstance(encoded, dict) and "$tensor" in encoded:
        name = f"other/{encoded['$tensor']}"
        value = reader.read_tensor(name).item() if reader.index.tensors[name].numel == 1 else None
    else:
        value = _to_plain_json(encoded)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (int, float)) else None


def _to_plain_json(encoded: Any) -> Any:
    """Return encoded data in plain JSON types: see [Note: JSON encoding] in checkpoint/json_codec.py."""
    if isinstance(encoded, list):
        return [_to_plain_json(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    tag = next(iter(encoded), "")
    if tag == "$tensor":
        return f"tensor {encoded[tag]}"
    return (
        _to_plain_json(encoded[tag])
        if tag.startswith("$")
        else {key: _to_plain_json(value) for key, value in encoded.items()}
    )


def _decode_dict(encoded: Any) -> dict[str, Any]:
    """Return a dict with string keys: ``encode`` writes pairs if not all keys are strings."""
    if isinstance(encoded, dict) and "$items" in encoded:
        return {str(_to_plain_json(key)): value for key, value in encoded["$items"]}
    return dict(encoded or {})


# --------------------------------------------------------------------------------------------------- as a page


def render_text(summary: dict[str, Any]) -> str:
    """Return the summary as readable text."""
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
        intact = f"intact: all {len(summary['files'])} files verified"
        lines += ["", "damaged: see below" if summary["damages"] else intact]
    return "\n".join(line.replace("\n", r"\n") for line in lines)  # of a name, which could look like another line


def _summary_lines(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "written", f"{summary['written']} by {', '.join(f'{name} {v}' for name, v in summary['versions'].items())}"
    is_sharded = summary["stage"] is not None
    sharding = f"stage {summary['stage']}, precision {summary['precision']}" if is_sharded else "not sharded"
    tensor_note = f", tensor parallel over {summary['tensor']}" if is_sharded and summary["tensor"] > 1 else ""
    yield "ranks", f"{summary['ranks']}, {sharding}{tensor_note}"
    if summary["replicas"] is not None:
        count, steps = summary["replicas"]["count"], max(summary["replicas"]["steps_since_average"], default=0)
        since = f"{steps} local steps after an average: model has the values of the first" if steps else "just averaged"
        yield "replicas", f"{count}, {since}"
    yield "step", "unknown" if summary["step"] is None else str(summary["step"])
    kinds = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in summary["bytes_by_kind"].items())
    yield "size", f"{format_bytes(summary['bytes'])} in {len(summary['files'])} files: {kinds}"
    trained, frozen = summary["parameters"]["trained"], summary["parameters"]["frozen"]
    yield "parameters", f"{trained + frozen:,}: {trained:,} trained, {frozen:,} frozen"
    if summary["architectures"]:
        yield "model", ", ".join(summary["architectures"])
    if summary["optimizer"] is not None:
        loss_scale = summary["optimizer"]["loss_scale"]
        scale_note = f", loss scale {loss_scale['scale']}" if loss_scale is not None else ""
        yield "optimizer", summary["optimizer"]["class"] + scale_note
        for index, group in enumerate(summary["optimizer"]["groups"]):
            options = ", ".join(f"{key} {value}" for key, value in group.items() if key != "parameters")
            yield f"  group {index}", f"{group['parameters']} parameters, {options}"
    else:
        yield "optimizer", "none"
    if summary["extra"]:
        yield "extra", ", ".join(summary["extra"])
    if summary["rank_extra"]:
        yield "rank_extra", "one per rank"


def _tensor_row(tensor: dict[str, Any]) -> tuple[str, ...]:
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
