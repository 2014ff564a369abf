"""Loading a transformers model into shards, compared with a raw read of a rank's share and transformers' own loading.

    python -m benchmarks pretrained                    # 4 ranks, a Llama of 1.1B in bf16, on the CPU
    python -m benchmarks pretrained --tiny

Stage 3 without an optimizer, so a rank's shards are its share of the file. All in the same processes, in turns.
*Cold*: the file is not in the page cache before; *warm*: it is. *Peak* is the largest resident memory of a rank while
it loads, without what it had before, mapped files included; the largest of all runs is shown. Times are from when all
ranks begin until the last has ended. The raw read fills one buffer with the bytes of 1/N of the file.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeroshard
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.record import Record, Result, describe, median, ratio, spread
from benchmarks.harness.trials import make_parser
from zeroshard.utils.safetensors_files import SAFETENSORS_FILE, TensorInfo, as_memoryview, write_safetensors

VARIANTS = ("raw read", "zeroshard", "transformers, then shard()")
SHAPE = {"layers": 22, "width": 2048, "inner": 5632, "heads": 32, "vocabulary": 32000}  # as TinyLlama
TINY = {"layers": 2, "width": 32, "inner": 48, "heads": 4, "vocabulary": 64}
CHUNK_BYTES = 2**24
GIGABYTE = 1e9


def write_model(directory: Path, shape: dict[str, int]) -> int:
    """Write a Llama in bf16 with values that repeat; return the largest unit in bytes."""
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=shape["layers"],
        hidden_size=shape["width"],
        intermediate_size=shape["inner"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=max(shape["heads"] // 8, 1),
        vocab_size=shape["vocabulary"],
        dtype="bfloat16",
    )
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    block = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    def values(name: str) -> torch.Tensor:
        numel = shapes[name].numel()
        return block.repeat(-(-numel // block.numel()))[:numel].view(shapes[name])

    entries = [TensorInfo(name, torch.bfloat16, tuple(shape)) for name, shape in shapes.items()]
    write_safetensors(directory / SAFETENSORS_FILE, entries, values, {"format": "pt"})
    config.save_pretrained(directory)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    return 2 * max(layer, shape["vocabulary"] * shape["width"])


def measure_rank(directory: str, repeats: int) -> Result:
    """Be one rank: load in each way, cold and warm, in turns."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    for variant in VARIANTS:  # imports and first calls are not part of what is measured
        load(variant, Path(directory, "warm-up"))
    results = []
    for is_cold, variant in itertools.product((True, False) * repeats, VARIANTS):
        prepare_cache(Path(directory, SAFETENSORS_FILE), is_cold)
        found = load(variant, Path(directory))
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
        largest = {key: max(one[key] for one in every) for key in found}
        results.append({"variant": variant, "is_cold": is_cold, **largest})
        gc.collect()
    return {"results": results}


def load(variant: str, path: Path) -> Result:
    """Load this rank's share in one way, and measure it."""
    import transformers

    from zeroshard.integrations.pretrained import from_pretrained
    from zeroshard.utils.stored_tensor import stored_files

    auto_class, file, found = transformers.AutoModelForCausalLM, path / SAFETENSORS_FILE, {}
    dist.barrier()
    before = reset_peak()
    start = time.perf_counter()
    if variant == "raw read":
        held: Any = read_share(file)
        found["read"] = held.nbytes
    else:
        is_ours = variant == "zeroshard"
        model = from_pretrained(auto_class, path) if is_ours else auto_class.from_pretrained(path)
        found["before shard()"] = time.perf_counter() - start
        files = list(stored_files(model).values())
        held, _ = zeroshard.shard(model, stage=3)
        found["read"] = sum(file.bytes_read for file in files) if is_ours else file.stat().st_size
        found["shards"] = zeroshard.report(held).states
    found["own seconds"] = time.perf_counter() - start
    dist.barrier()
    return {**found, "seconds": time.perf_counter() - start, "peak": resident("VmHWM") - before}


def prepare_cache(path: Path, is_cold: bool) -> None:
    """Remove a file from the page cache, or read it into the cache."""
    dist.barrier()
    if dist.get_rank() == 0:
        with path.open("rb", buffering=0) as file:
            if is_cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                buffer = bytearray(CHUNK_BYTES)
                while file.readinto(buffer):
                    pass
    dist.barrier()


def read_share(path: Path) -> torch.Tensor:
    """Read this rank's part of a file into memory."""
    size, rank, ranks = path.stat().st_size, dist.get_rank(), dist.get_world_size()
    data = torch.empty(size * (rank + 1) // ranks - size * rank // ranks, dtype=torch.uint8)
    view = as_memoryview(data)
    with path.open("rb", buffering=0) as file:
        file.seek(size * rank // ranks)
        while view:
            view = view[file.readinto(view[:CHUNK_BYTES]) :]
    return data


def reset_peak() -> int:
    """Begin to record the largest resident memory of this process; return its bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(kind: str) -> int:
    """Return the bytes of resident memory that Linux counts."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found is not None else 0


def show(record: Record, unit: int) -> None:
    """Print a table."""
    rows = []
    shards = max(result.get("shards", 0) for result in record.results)
    for variant in VARIANTS:
        row: list[object] = [variant]
        for is_cold in (True, False):
            chosen = [r for r in record.results if (r["variant"], r["is_cold"]) == (variant, is_cold)]
            base = [r for r in record.results if (r["variant"], r["is_cold"]) == (VARIANTS[0], is_cold)]
            row += [median(chosen, "seconds"), spread(chosen, "seconds")]
            row.append(ratio(median(chosen, "seconds"), median(base, "seconds")))
        every = [r for r in record.results if r["variant"] == variant]
        peak = max(result["peak"] for result in every)
        row += [max(r["read"] for r in every) / GIGABYTE, peak / GIGABYTE, peak / shards, (peak - unit) / shards]
        rows.append(row)
    times = ("cold s", "spread of cold s", "of the raw read", "warm s", "spread of warm s", "of the warm raw read")
    memory = ("read by a rank GB", "peak GB", "peak / shards", "(peak - one unit) / shards")
    record.show("pretrained", ("", *times, *memory), rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything and print a table."""
    parser = make_parser(__doc__, **SHAPE, ranks=4, repeats=3)
    parser.add_argument("--directory", type=Path, help="where to write the model (default: a temporary directory)")
    chosen = parser.parse_args(argv)
    shape = TINY if chosen.tiny else {name: getattr(chosen, name) for name in SHAPE}
    record = Record("pretrained", "cpu", chosen.out)
    with tempfile.TemporaryDirectory(dir=chosen.directory) as folder:
        directory = Path(folder)
        unit = write_model(directory, shape)
        (directory / "warm-up").mkdir()
        write_model(directory / "warm-up", TINY)
        os.sync()
        size = (directory / SAFETENSORS_FILE).stat().st_size
        print(f"{chosen.ranks} ranks, a file of {size / GIGABYTE:.2f} GB, {describe(record.machine)}", flush=True)
        repeats = 1 if chosen.tiny else chosen.repeats
        found = run_ranks(measure_rank, chosen.ranks, directory=folder, repeats=repeats)
        for result in found["results"]:
            record.add({"ranks": chosen.ranks, "file": size, "unit": unit, **result})
    show(record, unit)
