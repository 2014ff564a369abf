"""Read a DeepSpeed configuration: which of its keys become options of Config, which raise, and which are not needed.

docs/from-deepspeed.md says why a key is not needed, and what to write in a script in the place of others.

[Note: no number changes silently] A key is an option of Config, or a line of the script, or neither. The Config that is
made of a file can hold only the first. So a key that changes the numbers of a run and is not an option has to be named
by the caller (``handled``), or there is no Config. Keys that are not known here count as such. What DeepSpeed does if
the file says nothing, and zeroshard does otherwise, is read as if the file said it.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Source = str | os.PathLike[str] | Mapping[str, Any]
AUTO = "auto"  # Hugging Face's Trainer and Accelerate replace it by their own arguments
OPTION, SCRIPT, NOT_NEEDED, NO_COUNTERPART, UNKNOWN = "option", "script", "not needed", "no counterpart", "unknown"
PRECISION = "bf16.enabled or fp16.enabled"  # what both say together


@dataclass(frozen=True)
class MigratedKey:
    """What one key of a DeepSpeed configuration becomes."""

    key: str  # its path, as in "zero_optimization.stage"
    value: Any
    kind: str  # "option", "script", "not needed", "no counterpart" or "unknown"
    text: str = ""  # the option, the line to write, or the reason
    options: Mapping[str, Any] = field(default_factory=dict)  # of Config, that it sets
    needs: str = ""  # the option of Config that the file leaves open ("auto"): the caller has to give it

    @property
    def changes_numbers(self) -> bool:
        """Whether a run that leaves it out has other numbers, by more than rounding."""
        return self.kind in (SCRIPT, NO_COUNTERPART, UNKNOWN)


def merge_options(keys: Iterable[MigratedKey]) -> dict[str, Any]:
    """Return the options of Config that the keys of a configuration set together."""
    options: dict[str, Any] = {}
    for migrated in keys:
        for name, value in migrated.options.items():
            options[name] = {**options.get(name, {}), **value} if name == "offload" else value
    return options


def find_unhandled(
    keys: Iterable[MigratedKey], handled: Collection[str] = (), given: Collection[str] = ()
) -> list[MigratedKey]:
    """Return the keys that change the numbers, or that need an option, and that nobody has taken care of.

    ``handled`` has keys, or sections for all of their keys; ``given`` the options that the caller gives.
    """
    found = []
    for migrated in keys:
        is_handled = any(f"{migrated.key}.".startswith(f"{key}.") for key in handled)
        is_open = migrated.needs != "" and migrated.needs not in given
        if is_open or (migrated.changes_numbers and not is_handled):
            found.append(migrated)
    return found


def config_options(source: Source, handled: Collection[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of Config, those ``given`` first: see [Note: no number changes silently]."""
    keys = read_deepspeed(source, **given)
    paths = {".".join(migrated.key.split(".")[:n]) for migrated in keys for n in (1, 2, 3)}
    for key in handled:
        if key not in paths:  # the key that is meant would stay unhandled
            hint = _did_you_mean(key, paths)
            raise ValueError(f"handled={key!r} is not a key of this DeepSpeed configuration{hint}")
    left = find_unhandled(keys, handled, given)
    if left:
        names = [migrated.key for migrated in left if not migrated.needs]
        hint = f"Take care of them in the script, or accept the difference, and pass handled={names}."
        lines = [
            "DeepSpeed keys that are not an option of zeroshard and change the numbers:",
            *(f"  {migrated.key} = {migrated.value!r}: {migrated.text}" for migrated in left),
            hint if names else "Pass these options.",
        ]
        raise ValueError("\n".join(lines))
    return {**merge_options(keys), **given}


def read_deepspeed(source: Source, **given: Any) -> list[MigratedKey]:
    """Return what each key of a DeepSpeed configuration becomes. ``given`` options of Config come before the file's.

    >>> for migrated in read_deepspeed({"zero_optimization": {"stage": 2, "overlap_comm": True}}):
    ...     print(migrated.key, "->", migrated.text or migrated.kind)
    zero_optimization.stage -> stage=2
    zero_optimization.overlap_comm -> not needed
    bf16.enabled or fp16.enabled -> precision="fp32"
    """
    config = source if isinstance(source, Mapping) else _load(Path(source))
    reader = _Reader(dict(_flatten(config)), given)
    found = []
    for key, value in reader.values.items():
        try:
            _check_value(key, value)
            found.append(reader.read(key, value))
        except (AttributeError, KeyError, OverflowError, TypeError):
            raise ValueError(f"{key} is not of the form that DeepSpeed reads: got {value!r}") from None
    return found


def _load(path: Path) -> dict[str, Any]:
    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{path}: the key {key!r} is given twice")
            found[key] = value
        return found

    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=reject_duplicates)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}. (Remove comments and trailing commas.)") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return config


_SECTIONS = """
    zero_optimization zero_optimization.offload_optimizer zero_optimization.offload_param fp16 bf16 data_types
    tensor_parallel
""".split()


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a configuration by their paths."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if key not in _SECTIONS:
            yield key, value
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{key}.")
        elif value is not None:
            raise ValueError(f"{key} must be a JSON object, got {value!r}")


def _did_you_mean(key: str, known: Collection[str]) -> str:
    matches = difflib.get_close_matches(key, known)
    return f": did you mean {matches[0]!r}?" if matches else ""


# ------------------------------------------------------------------------------------------------ keys by one rule


def _read_table(text: str) -> dict[str, str]:
    """Return the lines of a table: a key, a colon, and a text."""
    rows = (line.strip().partition(": ") for line in text.strip().splitlines())
    return {key: content for key, _, content in rows}


# Change no number, whatever the value. docs/from-deepspeed.md says why zeroshard does not need them.
_NOT_NEEDED = """
    activation_checkpointing aio autotuning checkpoint comet comms_logger compile csv_monitor datastates
    disable_allgather dump_state eigenvalue flops_profiler gradient_predivide_factor graph_harvesting hybrid_engine
    log_level managed_gradient_accumulation memory_breakdown nebula seq_parallel_comm_data_type
    seq_parallel_communication_data_type sparse_gradients steps_per_print tensorboard timers
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer
    bf16.enabled bf16.immediate_grad_update
    fp16.auto_cast fp16.enabled fp16.fused_mode fp16.min_loss_scale
    zero_optimization.allgather_bucket_size zero_optimization.allgather_partitions zero_optimization.compute_grad_norm
    zero_optimization.contiguous_gradients zero_optimization.cpu_offload_use_pin_memory
    zero_optimization.elastic_checkpoint zero_optimization.enable_sanity_checks
    zero_optimization.ignore_unused_parameters zero_optimization.leaf_module zero_optimization.legacy_stage1
    zero_optimization.load_from_fp32_weights zero_optimization.log_trace_cache_warnings
    zero_optimization.memory_efficient_linear zero_optimization.mics_hierarchical_params_gather
    zero_optimization.mics_shard_size zero_optimization.overlap_comm zero_optimization.override_module_apply
    zero_optimization.parameter_alignment zero_optimization.pipeline_loading_checkpoint
    zero_optimization.reduce_scatter zero_optimization.round_robin_gradients
    zero_optimization.save_muon_momentum_buffer_in_memory zero_optimization.stage3_allgather_sequential
    zero_optimization.stage3_gather_16bit_weights_on_model_save
    zero_optimization.stage3_gather_fp16_weights_on_model_save zero_optimization.stage3_max_live_parameters
    zero_optimization.stage3_max_reuse_distance zero_optimization.stage3_model_persistence_threshold
    zero_optimization.stage3_module_granularity_threshold zero_optimization.stage3_param_persistence_threshold
    zero_optimization.stage3_partition_stream_chunk_size zero_optimization.stage3_prefetch_bucket_size
    zero_optimization.stage3_use_all_reduce_for_fetch_params zero_optimization.sub_group_size
    zero_optimization.use_multi_rank_bucket_allreduce
    zero_optimization.offload_optimizer.buffer_count zero_optimization.offload_optimizer.convert_grad_on_cpu
    zero_optimization.offload_optimizer.cpuadam_cores_perc zero_optimization.offload_optimizer.fast_init
    zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_optimizer.pin_memory
    zero_optimization.offload_optimizer.pipeline zero_optimization.offload_optimizer.pipeline_read
    zero_optimization.offload_optimizer.pipeline_write zero_optimization.offload_optimizer.ratio
    zero_optimization.offload_optimizer.super_offload
    zero_optimization.offload_param.buffer_count zero_optimization.offload_param.buffer_size
    zero_optimization.offload_param.max_in_cpu zero_optimization.offload_param.nvme_path
    zero_optimization.offload_param.pin_memory
""".split()

_REQUIRED = {
    PRECISION: "precision",
    "zero_optimization.stage": "stage",
    "zero_optimization.offload_optimizer.device": "offload",
    "zero_optimization.offload_param.device": "offload",
}  # if they are "auto", the option has to be given
_KEPT_BY_TOOLS = """
    gradient_accumulation_steps gradient_clipping train_batch_size train_micro_batch_size_per_gpu
    zero_optimization.reduce_bucket_size zero_optimization.zero_hpz_partition_size
""".split()  # "auto" is the tool's own argument, or zeroshard's default

# The keys of the following tables do nothing if they are off: false, 0, null, "enabled": false, or as in _OFF. A
# section without "enabled" is on, also an empty one: DeepSpeed reads some of them so.
_OFF = {
    "fp16.hysteresis": 1,
    "fp16.loss_scale_window": 2000,
    "gradient_accumulation_steps": 1,
    "gradient_allreduce_op": "mean",
    "sequence_parallel_size": 1,
    "tensor_parallel.autotp_size": 1,
    "zero_optimization.zero_hpz_partition_size": 1,
}
_IN_STAGE_3 = {
    "zero_optimization.zero_hpz_partition_size": {"partition": "hierarchical"},
    "zero_optimization.zero_quantized_gradients": {"reduce_wire": "int8"},
    "zero_optimization.zero_quantized_weights": {"gather_dtype": "int8"},
}
_IN_SCRIPT = _read_table("""
    dataloader_drop_last: DataLoader(…, drop_last=True), if DeepSpeed has made the data loader
    fp16.loss: optimizer.scale(loss).backward(): DeepSpeed's engine.backward(loss) scales the loss by itself
    gradient_accumulation_steps: (loss / k).backward(), k = {}: DeepSpeed's engine divides the loss
    gradient_allreduce_op: gradients are averaged over the ranks: multiply the loss by their number
    gradient_clipping: optimizer.clip_grad_norm_({}) before optimizer.step()
    scheduler: a scheduler of torch.optim.lr_scheduler; docs/from-deepspeed.md has DeepSpeed's as a LambdaLR
    tensor_parallel.autotp_size: a mesh with an axis of {} ranks named "tensor", which get the same batch
    torch_autocast: torch.autocast around the forward (to float16 it needs a loss scale, which precision has)
    train_batch_size: the script's data loader decides: micro-batch × accumulation × ranks
    train_micro_batch_size_per_gpu: the script's data loader decides: the batch of one rank
""")
_NO_COUNTERPART = _read_table("""
    amp: apex is not supported: precision="bf16" or "fp16", or torch.autocast in the script
    bf16.bf16_master_weights_and_grads: master weights are always fp32. A bf16 model with precision=None has none
    bf16.bf16_optimizer_states: optimizer states have the dtype of the master weights, fp32
    bf16.check_grad_overflow: steps with gradients that are not finite are skipped only with fp16
    compression_training: quantization and pruning in training are not supported
    curriculum_learning: choose the sequences in the script's data loader
    data_efficiency: choose the sequences in the script's data loader
    data_types.buffer_dtype: see data_types.param_dtype
    data_types.param_dtype: precision=… is the only dtype of computation
    elasticity: compute batch and accumulation from the number of ranks in the script
    expert_parallel: expert parallelism is not supported: experts are sharded like all parameters
    fp16.consecutive_hysteresis: see fp16.hysteresis
    fp16.fp16_master_weights_and_grads: master weights are always fp32
    fp16.hysteresis: zeroshard's scale halves after every overflow, also the first: other steps are skipped
    fp16.loss_scale: the scale is dynamic: loss_scale=… is only where it starts. See fp16.loss_scale_window
    fp16.loss_scale_window: zeroshard's scale doubles after 2000 steps without an overflow. Others: torch.amp.GradScaler
    pipeline: pipeline parallelism is not supported
    prescale_gradients: gradients are summed, then divided; if sums overflow in fp16: reduce_dtype='fp32'
    progressive_layer_drop: drop layers in the model's forward
    quantize_training: quantized training is not supported
    sequence_parallel_size: sequence parallelism is not supported
    sparse_attention: use the model's own attention
    weight_quantization: quantized weights are not supported
    zero_optimization.cpu_offload: write offload_optimizer, which has taken its place
    zero_optimization.cpu_offload_param: write offload_param, which has taken its place
    zero_optimization.zenflow: every gradient is applied in its own step
    zero_optimization.zero_quantized_nontrainable_weights: frozen weights are kept in their own dtype
    zero_optimization.zeropp_loco_param: error_feedback=True is like it, without err_beta and reset_T
""")
_TEXTS = {**_IN_SCRIPT, **_NO_COUNTERPART}


# --------------------------------------------------------------------------------------- what DeepSpeed itself refuses

_ONE_OF = _read_table("""
    bf16.enabled: true, false or "auto"
    communication_data_type: "fp16", "bf16" or "fp32"
    data_types.grad_accum_dtype: "fp16", "bf16" or "fp32"
    fp16.enabled: true, false or "auto"
    gradient_allreduce_op: "mean" or "sum"
    zero_optimization.offload_optimizer.device: "none", "cpu" or "nvme"
    zero_optimization.offload_param.device: "none", "cpu" or "nvme"
    zero_optimization.stage: 0, 1, 2 or 3
    zero_optimization.zero_quantized_gradients: true or false
    zero_optimization.zero_quantized_weights: true or false
""")
_POSITIVE = "gradient_accumulation_steps train_batch_size train_micro_batch_size_per_gpu".split()
_NOT_NEGATIVE = """
    fp16.loss_scale zero_optimization.allgather_bucket_size zero_optimization.reduce_bucket_size
    zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
    zero_optimization.stage3_model_persistence_threshold zero_optimization.stage3_param_persistence_threshold
    zero_optimization.stage3_partition_stream_chunk_size zero_optimization.stage3_prefetch_bucket_size
    zero_optimization.sub_group_size zero_optimization.zero_hpz_partition_size
    zero_optimization.offload_optimizer.buffer_count
    zero_optimization.offload_optimizer.cpuadam_cores_perc zero_optimization.offload_optimizer.ratio
    zero_optimization.offload_param.buffer_count zero_optimization.offload_param.buffer_size
    zero_optimization.offload_param.max_in_cpu
""".split()
_LEAST = {**dict.fromkeys(_NOT_NEGATIVE, 0), **dict.fromkeys(_POSITIVE, 1)}


def _check_value(key: str, value: Any) -> None:
    """Raise if DeepSpeed itself refuses a value."""
    if value is None or (value == AUTO and key in _REQUIRED):
        return
    if key in _ONE_OF:
        expected = _ONE_OF[key]
        is_valid = value in json.loads(f"[{expected.replace(' or', ',')}]")
    else:
        expected = f"at least {_LEAST.get(key)}"
        is_valid = key not in _LEAST or not isinstance(value, (int, float)) or value >= _LEAST[key]
    if not is_valid:
        raise ValueError(f"{key} must be {expected}, got {value!r}: correct the DeepSpeed configuration")


# ------------------------------------------------------------------------------------------- keys with their own rule


class _Reader:
    """Reads one configuration, key by key."""

    def __init__(self, values: dict[str, Any], given: Mapping[str, Any]) -> None:
        self.values = {"zero_optimization.stage": 0, **values}
        self.stage = given.get("stage", self.values["zero_optimization.stage"])
        self.precision = given["precision"] if "precision" in given else self._find_precision()
        self.off = {**_OFF, **dict.fromkeys(("data_types.buffer_dtype", "data_types.param_dtype"), self.precision)}
        self._add_defaults()

    def _find_precision(self) -> str:
        enabled = {name: self.values.get(f"{name}.enabled") for name in ("bf16", "fp16")}
        on = [name for name, value in enabled.items() if value not in (False, None, AUTO)]
        if len(on) > 1:
            raise ValueError("bf16 and fp16 are both enabled: DeepSpeed accepts one of them")
        default = AUTO if AUTO in enabled.values() else "fp32"
        return on[0] if on else default

    def _add_defaults(self) -> None:
        """Add what DeepSpeed does if the file says nothing, where zeroshard's default is another."""
        defaults: dict[str, Any] = {PRECISION: self.precision}
        if self.precision == "fp16":
            defaults |= {"fp16.loss": "scaled", "fp16.loss_scale_window": 1000, "fp16.hysteresis": 2}
        is_sent_otherwise = self.precision == "fp32" and "communication_data_type" in self.values
        if is_sent_otherwise or (self.precision, self.stage) == ("bf16", 0):
            defaults["data_types.grad_accum_dtype"] = "fp32"
        batch = self.values.get("train_batch_size") or AUTO
        micro = self.values.get("train_micro_batch_size_per_gpu") or AUTO
        if AUTO not in (batch, micro):
            self.off["train_batch_size"] = batch  # it follows from the others
            defaults["gradient_accumulation_steps"] = f"{batch} // ({micro} * ranks)"
        self.values |= {key: value for key, value in defaults.items() if self.values.get(key) is None}

    def is_on(self, key: str, value: Any) -> bool:
        """Return whether a key asks DeepSpeed for anything."""
        section = key.partition(".")[0]
        is_other_precision = section in ("bf16", "fp16") and section != self.precision
        if is_other_precision or (value == AUTO and key in _KEPT_BY_TOOLS):
            return False
        if isinstance(value, Mapping):
            return value.get("enabled", True) is not False
        return bool(value) and value != self.off.get(key)

    def read(self, key: str, value: Any) -> MigratedKey:
        """Return what a key becomes: by a table, or by its own rule."""
        if value == AUTO and key in _REQUIRED:
            text = f"pass {_REQUIRED[key]}=…: the Trainer and Accelerate have it in their own settings"
            return MigratedKey(key, value, OPTION, text, needs=_REQUIRED[key])
        if key in _TEXTS and self.is_on(key, value):
            kind = SCRIPT if key in _IN_SCRIPT else NO_COUNTERPART
            return MigratedKey(key, value, kind, _TEXTS[key].format(value))
        if key in _TEXTS or key in _NOT_NEEDED:
            return MigratedKey(key, value, NOT_NEEDED)
        if key == "optimizer":
            return _read_optimizer(key, value)
        if key in _RULES:
            options = _RULES[key](self, key, value)
            text = ", ".join(f"{name}={json.dumps(option)}" for name, option in options.items())
            return MigratedKey(key, value, OPTION if options else NOT_NEEDED, text, options)
        known = [*_NOT_NEEDED, *_RULES, *_TEXTS, *_SECTIONS]
        return MigratedKey(key, value, UNKNOWN, f"not a key that zeroshard knows{_did_you_mean(key, known)}")


def _read_required(reader: _Reader, key: str, value: Any) -> dict[str, Any]:
    return {_REQUIRED[key]: value}


def _read_loss_scale(reader: _Reader, key: str, value: Any) -> dict[str, Any]:
    return {"loss_scale": 2.0**value} if reader.precision == "fp16" else {}


_REDUCE_DTYPES = ("communication_data_type", "data_types.grad_accum_dtype")


def _read_reduce_dtype(reader: _Reader, key: str, value: Any) -> dict[str, Any]:
    """Gradients are accumulated, reduced and kept in one dtype: the more precise of DeepSpeed's two."""
    if value is None:
        return {}
    dtypes = [reader.values.get(name) for name in _REDUCE_DTYPES]
    chosen = "fp32" if "fp32" in dtypes else value
    return {} if chosen == reader.precision else {"reduce_dtype": chosen}


def _read_bucket_size(reader: _Reader, key: str, value: Any) -> dict[str, Any]:
    return {"bucket_size": max(math.floor(value), 1)} if reader.is_on(key, value) else {}


def _read_in_stage_3(reader: _Reader, key: str, value: Any) -> dict[str, Any]:
    return _IN_STAGE_3[key] if reader.stage in (3, AUTO) and reader.is_on(key, value) else {}


_NVME_PATHS = ("zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path")


def _read_offload(reader: _Reader, key: str, value: Any) -> dict[str, Any]:
    section = key.rpartition(".")[0]
    name = "parameters" if section.endswith("param") else "optimizer"
    unused_stages = (0, 1, 2) if name == "parameters" else (0,)
    if value in ("none", None) or reader.stage in unused_stages:
        return {}
    ratio = reader.values.get(f"{section}.ratio", 1.0) if reader.stage == 3 else 1.0
    if ratio > 1:
        raise ValueError(f"{section}.ratio must be at most 1, got {ratio}: correct the DeepSpeed configuration")
    tier = "host" if value == "cpu" else "disk"
    offload = {name: tier if ratio == 1.0 else (tier, ratio)}
    if tier == "disk":
        paths: set[Any] = {reader.values.get(path) for path in _NVME_PATHS} - {None, AUTO}
        if len(paths) != 1:
            raise ValueError(f"nvme_path must be the path of one directory, got {paths or None}")
        offload["directory"] = paths.pop()
    return {"offload": offload}


_ADAM_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}  # DeepSpeed's; torch's differ


def _read_optimizer(key: str, value: Any) -> MigratedKey:
    name = str(value["type"])
    params = dict(value.get("params") or {})
    if name.lower() in ("onebitadam", "zerooneadam", "onebitlamb"):
        return MigratedKey(key, value, NO_COUNTERPART, f"{name} compresses gradients. AdamW is the uncompressed rule")
    if name.lower() in ("adam", "adamw"):
        name = "AdamW" if params.pop("adam_w_mode", True) or name.lower() == "adamw" else "Adam"
        if not params.pop("torch_adam", False):
            params = {**_ADAM_DEFAULTS, **params}
    library = "YOUR_LIBRARY" if name.lower() in ("lamb", "lion") else "torch.optim"  # which does not have these two
    return MigratedKey(key, value, SCRIPT, f"optimizer = {library}.{name}(model.parameters(), **{params})")


_RULES: dict[str, Callable[[_Reader, str, Any], dict[str, Any]]] = {
    **dict.fromkeys(_REQUIRED, _read_required),
    **dict.fromkeys(_REDUCE_DTYPES, _read_reduce_dtype),
    **dict.fromkeys(_IN_STAGE_3, _read_in_stage_3),
    "fp16.initial_scale_power": _read_loss_scale,
    "zero_optimization.offload_optimizer.device": _read_offload,
    "zero_optimization.offload_param.device": _read_offload,
    "zero_optimization.reduce_bucket_size": _read_bucket_size,
}
