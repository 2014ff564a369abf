"""Read a DeepSpeed configuration: what each key becomes with zeroshard, is not needed for, or has no counterpart.

[Note: no number changes silently] A key is an option of Config, or a line of the script, or neither. The Config that is
made of a file can hold only the first. So a key that changes the numbers of a run and is not an option has to be named
by the caller (``handled``), or there is no Config. Keys that are not known here count as such.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

AUTO = "auto"  # Hugging Face's Trainer and Accelerate replace it by their own arguments
OPTION, SCRIPT, NOT_NEEDED, NO_COUNTERPART, UNKNOWN = "option", "script", "not needed", "no counterpart", "unknown"


@dataclass(frozen=True)
class MigratedKey:
    """What one key of a DeepSpeed configuration becomes."""

    key: str
    """Its path, as in "zero_optimization.stage"."""

    value: Any

    kind: str
    """"option", "script", "not needed", "no counterpart" or "unknown"."""

    text: str
    """The option, the line to write, or the reason."""

    changes_numbers: bool = False
    """Whether leaving it out changes the numbers of a run by more than rounding."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of Config that it sets."""

    needs: str = ""
    """The option of Config that the file leaves open ("auto"): the caller has to give it."""

    before_shard: str = ""
    """Lines for the script: before the call of ``shard()``."""

    after_shard: str = ""
    """Lines for the script: after it, before the loop."""

    in_loop: str = ""
    """A line for the loop: after the backwards of a step, before ``optimizer.step()``."""

    loss: str = "{}"
    """What the loss becomes before ``backward()``."""


@dataclass(frozen=True)
class Migration:
    """All keys of a DeepSpeed configuration, and what they become together."""

    keys: tuple[MigratedKey, ...]

    @property
    def options(self) -> dict[str, Any]:
        """The options of Config."""
        options: dict[str, Any] = {}
        for migrated in self.keys:
            for name, value in migrated.options.items():
                if name == "offload" and name in options:
                    if len({offload["directory"] for offload in (options[name], value) if "directory" in offload}) > 1:
                        raise ValueError("nvme_path is not the same in offload_optimizer and offload_param: use one")
                    value = {**options[name], **value}
                options[name] = value
        return options

    def unhandled(self, handled: Collection[str] = (), given: Collection[str] = ()) -> list[MigratedKey]:
        """Return the keys that change the numbers, or that need an option, and that nobody has taken care of.

        ``handled`` has keys, or sections for all of their keys; ``given`` the options that the caller gives.
        """
        return [
            migrated
            for migrated in self.keys
            if (migrated.needs and migrated.needs not in given)
            or (
                migrated.changes_numbers
                and migrated.kind != OPTION
                and not any(f"{migrated.key}.".startswith(f"{key}.") for key in handled)
            )
        ]

    def check_handled(self, handled: Collection[str]) -> None:
        """Raise for a name that is not a key of the configuration: its key would stay unhandled."""
        paths = {".".join(migrated.key.split(".")[:n]) for migrated in self.keys for n in (1, 2, 3, 4)}
        for key in handled:
            if key not in paths:
                matches = difflib.get_close_matches(key, paths, n=1, cutoff=0.5)
                hint = f": did you mean {matches[0]!r}?" if matches else ""
                raise ValueError(f"handled={key!r} is not a key of this DeepSpeed configuration{hint}")


def read_deepspeed(source: str | os.PathLike[str] | Mapping[str, Any], **given: Any) -> Migration:
    """Return what each key of a DeepSpeed configuration becomes. ``given`` options of Config come before the file's.

    >>> for migrated in read_deepspeed({"zero_optimization": {"stage": 2, "overlap_comm": True}}).keys:
    ...     print(migrated.key, "->", migrated.text.partition(":")[0])
    zero_optimization.stage -> stage=2
    zero_optimization.overlap_comm -> reductions always overlap with backward
    precision -> precision="fp32"
    """
    config = dict(source) if isinstance(source, Mapping) else _load(Path(source))
    return Migration(tuple(_Reader(config, given).read()))


def _load(path: Path) -> dict[str, Any]:
    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, _ in pairs:
            if sum(other == key for other, _ in pairs) > 1:
                raise ValueError(f"{path}: the key {key!r} is given twice")
        return dict(pairs)

    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=reject_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}. (Remove comments and trailing commas.)") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return config


# ------------------------------------------------------------------------------------------------ keys by one rule

# Changes no number, whatever the value: why zeroshard does not need it.
_NOT_NEEDED = {
    "aio": "I/O on disk is tuned by zeroshard: direct I/O by a few threads",
    "autotuning": "`zeroshard plan` predicts memory and time of every stage before a run",
    "checkpoint": "zeroshard.save() and zeroshard.load(): any number of ranks loads what another has saved",
    "comet": "logging: call Comet in the script",
    "comms_logger": "zeroshard.report(model) counts collectives; zeroshard.profile(model) shows when they run",
    "compile": "torch.compile() on the blocks of the model, in the script",
    "csv_monitor": "logging: write in the script",
    "datastates": "zeroshard.save(…, wait=False) saves while training continues",
    "disable_allgather": "DeepSpeed itself ignores it",
    "dump_state": "print(zeroshard.report(model))",
    "eigenvalue": "it is for DeepSpeed's quantized training",
    "flops_profiler": "zeroshard.profile(model, trace=…) writes a Chrome trace of a step",
    "graph_harvesting": "no CUDA graphs: fused Adam is one pass over memory",
    "hybrid_engine": "generate() works on a sharded model",
    "log_level": "logging.getLogger('zeroshard').setLevel(…)",
    "memory_breakdown": "zeroshard.report(model)",
    "nebula": "zeroshard.save(…, wait=False) saves while training continues",
    "seq_parallel_comm_data_type": "there is no sequence parallelism",
    "seq_parallel_communication_data_type": "there is no sequence parallelism",
    "steps_per_print": "print in the script",
    "tensorboard": "logging: use a SummaryWriter in the script; `zeroshard train` has --tensorboard",
    "timers": "zeroshard.profile(model)",
    "use_data_before_expert_parallelism": "it places experts, and there is no expert parallelism",
    "vocabulary_size": "DeepSpeed only warns about its alignment",
    "wall_clock_breakdown": "zeroshard.profile(model)",
    "wandb": "logging: call wandb in the script",
    "zero_allow_untested_optimizer": "shard() knows torch's optimizers and tests any other class by itself",
    "zero_force_ds_cpu_optimizer": "offloaded states are updated by the rule of your own optimizer",
    "bf16.immediate_grad_update": "gradients are accumulated in reduce_dtype as they are made",
    "fp16.auto_cast": "cast_inputs=True, the default, casts floating-point inputs",
    "fp16.fused_mode": "the step is fused where torch's optimizer is",
    "optimizer.legacy_fusion": "the step is fused where torch's optimizer is",
    "zero_optimization.allgather_partitions": "updated parameters are always all-gathered",
    "zero_optimization.compute_grad_norm": "the norm is computed when clip_grad_norm_ asks for it",
    "zero_optimization.contiguous_gradients": "gradients are always reduced from contiguous buckets",
    "zero_optimization.cpu_offload_use_pin_memory": "host memory is pinned where that helps",
    "zero_optimization.elastic_checkpoint": "checkpoints load at any number of ranks",
    "zero_optimization.enable_sanity_checks": "ranks are always compared: RanksDisagreeError",
    "zero_optimization.ignore_unused_parameters": "unused parameters are allowed; they get no update, as in torch",
    "zero_optimization.leaf_module": "units=(Class, …) says which modules are gathered together, if detection is wrong",
    "zero_optimization.legacy_stage1": "there is one stage 1",
    "zero_optimization.load_from_fp32_weights": "checkpoints have the fp32 master weights, and these are loaded",
    "zero_optimization.log_trace_cache_warnings": "the order of units may change from step to step",
    "zero_optimization.memory_efficient_linear": "no layer is replaced",
    "zero_optimization.mics_hierarchical_params_gather": "all-gathers run on the shard axis of the mesh",
    "zero_optimization.override_module_apply": "torch is not patched",
    "zero_optimization.overlap_comm": "reductions always overlap with backward",
    "zero_optimization.parameter_alignment": "every parameter of a buffer starts at a multiple of 64 elements",
    "zero_optimization.pipeline_loading_checkpoint": "each rank reads only its own part of a checkpoint",
    "zero_optimization.reduce_scatter": "gradients are reduce-scattered in stages 2 and 3",
    "zero_optimization.round_robin_gradients": "every rank copies its own shard of each bucket",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "offload=… places the states of all optimizers",
    "zero_optimization.stage3_allgather_sequential": "all-gathers run without a copy before or after",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "`zeroshard export` writes full weights",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "`zeroshard export` writes full weights",
    "zero_optimization.stage3_max_live_parameters": "a unit is freed when the next one is reached",
    "zero_optimization.stage3_max_reuse_distance": "a unit that is used twice in a row is gathered once",
    "zero_optimization.stage3_model_persistence_threshold": "all parameters are partitioned, with their unit",
    "zero_optimization.stage3_module_granularity_threshold": "units=… says which modules are gathered together",
    "zero_optimization.stage3_param_persistence_threshold": "small parameters are gathered together with their unit",
    "zero_optimization.stage3_partition_stream_chunk_size": "a model on the meta device is built one unit at a time",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "all-gathers run without a copy before or after",
    "zero_optimization.sub_group_size": "bucket_size elements are updated at a time",
    "zero_optimization.use_multi_rank_bucket_allreduce": "each bucket is divided evenly over the ranks",
    "zero_optimization.offload_optimizer.buffer_count": "buffers are chosen by zeroshard",
    "zero_optimization.offload_optimizer.convert_grad_on_cpu": "the CPU's update reads 16-bit gradients",
    "zero_optimization.offload_optimizer.fast_init": "states are created by the first step",
    "zero_optimization.offload_optimizer.pin_memory": "host memory is pinned where that helps",
    "zero_optimization.offload_optimizer.pipeline": "reads, updates and writes always overlap",
    "zero_optimization.offload_optimizer.pipeline_read": "reads, updates and writes always overlap",
    "zero_optimization.offload_optimizer.pipeline_write": "reads, updates and writes always overlap",
    "zero_optimization.offload_optimizer.super_offload": "updates start in backward: speculate=True, the default",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "Offload(threads=…), by default all cores but two",
    "zero_optimization.offload_param.buffer_count": "buffers are chosen by zeroshard",
    "zero_optimization.offload_param.buffer_size": "buffers are chosen by zeroshard",
    "zero_optimization.offload_param.max_in_cpu": "for a share in host memory: {'host': 0.5, 'disk': 0.5}",
    "zero_optimization.offload_param.pin_memory": "host memory is pinned where that helps",
}

# Changes the numbers if it is on, and zeroshard has nothing like it. (A section is on if its "enabled" is; see _is_on.)
_NO_COUNTERPART = {
    "amp": 'apex is not supported: precision="bf16" or "fp16", or torch.autocast in the script',
    "bf16.bf16_master_weights_and_grads": "master weights are always fp32. A bf16 model with precision=None has none",
    "bf16.bf16_optimizer_states": "optimizer states have the dtype of the master weights, fp32",
    "bf16.check_grad_overflow": "steps with gradients that are not finite are skipped only with fp16",
    "compression_training": "quantization and pruning in training are not supported",
    "curriculum_learning": "choose the sequences in the script's data loader",
    "data_efficiency": "choose the sequences in the script's data loader",
    "elasticity": "compute batch and accumulation from the number of ranks in the script",
    "expert_parallel": "expert parallelism is not supported: experts are sharded like all parameters",
    "fp16.fp16_master_weights_and_grads": "master weights are always fp32",
    "pipeline": "pipeline parallelism is not supported",
    "progressive_layer_drop": "drop layers in the model's forward",
    "quantize_training": "quantized training is not supported",
    "sparse_attention": "use the model's own attention",
    "weight_quantization": "quantized weights are not supported",
    "zero_optimization.zenflow": "every gradient is applied in its own step",
    "zero_optimization.zero_quantized_nontrainable_weights": "frozen weights are kept in their own dtype",
    "zero_optimization.zeropp_loco_param": "error_feedback=True is like it, without err_beta and reset_T",
}


# Sections without "enabled", which DeepSpeed turns on if they are there, also empty.
_ON_IF_PRESENT = {"sparse_attention", "zero_optimization.zenflow", "zero_optimization.zeropp_loco_param"}


def _is_on(value: Any, key: str = "") -> bool:
    if isinstance(value, Mapping):
        return key in _ON_IF_PRESENT or bool(value.get("enabled", bool(value)))
    return value not in (False, None, 0, "")


def _number(key: str, value: Any) -> float:
    """Return a value that DeepSpeed reads as a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        hint = f": {_KEPT_OPEN}" if value == AUTO else ""
        raise ValueError(f"{key} must be a number, got {value!r}{hint}")
    return value


_KEPT_OPEN = "no tool replaces it here, and DeepSpeed rejects it. Leave the key out for its default"


def _shown(value: Any) -> str:
    """Return a value as Python source; a name stands for a value that the file leaves open.

    >>> _shown({"lr": 0.1}), _shown(5e8)
    ("{'lr': 0.1}", '500000000')
    """
    if isinstance(value, float) and value.is_integer() and value >= 1e4:
        value = int(value)
    return json.dumps(value) if isinstance(value, str) else repr(value)


# ------------------------------------------------------------------------------------------- keys with their own rule


class _Reader:
    """Reads one configuration, key by key."""

    def __init__(self, config: dict[str, Any], given: Mapping[str, Any]) -> None:
        if "bfloat16" in config and "bf16" not in config:  # the key of old versions
            config = {"bf16" if key == "bfloat16" else key: value for key, value in config.items()}
        self.config = config
        zero = config.get("zero_optimization", {})
        if isinstance(zero, bool):  # the form of old versions
            zero = {"stage": int(zero)}
            self.config = {**config, "zero_optimization": zero}
        for section in ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler", "data_types", "torch_autocast"):
            if not isinstance(self.config.get(section, {}), Mapping):
                raise ValueError(f"{section} must be a JSON object, got {self.config[section]!r}")
        self.stage = given.get("stage", zero.get("stage", 0))
        self.precision, self.precision_key = self._find_precision(given)

    def _find_precision(self, given: Mapping[str, Any]) -> tuple[Any, str]:
        enabled = {name: self.config.get(name, {}).get("enabled", False) for name in ("bf16", "fp16")}
        for name, value in enabled.items():
            if not isinstance(value, bool) and value not in (None, AUTO):  # DeepSpeed reads 1 and "true" as true
                raise ValueError(f'{name}.enabled must be true, false or "auto", got {value!r}')
        if "precision" in given:
            return given["precision"], ""
        if all(value is True for value in enabled.values()):
            raise ValueError("bf16 and fp16 are both enabled: DeepSpeed accepts one of them")
        for name, value in enabled.items():
            if value is True:
                return name, f"{name}.enabled"
        for name, value in enabled.items():
            if value == AUTO:
                return AUTO, f"{name}.enabled"
        return "fp32", ""

    def read(self) -> Iterator[MigratedKey]:
        for key, value in self.config.items():
            yield from self._read(key, value)
        yield from self._read_defaults()

    def _read(self, key: str, value: Any) -> Iterator[MigratedKey]:
        """Yield what a key becomes: by its own rule, or by its section's, or by one of the tables."""
        rule = _RULES.get(key)
        if rule is not None:
            yield from rule(self, key, value)
        elif key in _SECTIONS and isinstance(value, Mapping):
            for name, inner in value.items():
                yield from self._read(f"{key}.{name}", inner)
        elif key in _NOT_NEEDED:
            yield MigratedKey(key, value, NOT_NEEDED, _NOT_NEEDED[key])
        elif key in _NO_COUNTERPART:
            if _is_on(value, key):
                yield MigratedKey(key, value, NO_COUNTERPART, _NO_COUNTERPART[key], changes_numbers=True)
            else:
                yield MigratedKey(key, value, NOT_NEEDED, "it is off")
        else:
            known = [name for name in _KNOWN if name.rpartition(".")[0] == key.rpartition(".")[0]]
            matches = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
            hint = f": did you mean {matches[0]!r}?" if matches else ""
            yield MigratedKey(key, value, UNKNOWN, f"not a key that zeroshard knows{hint}", changes_numbers=True)

    def _read_defaults(self) -> Iterator[MigratedKey]:
        """Yield what DeepSpeed does if the file says nothing, where zeroshard's default is another."""
        if "stage" not in self.config.get("zero_optimization", {}):
            yield from _read_stage(self, "zero_optimization.stage", self.stage)
        if self.precision == "fp32":
            text = 'precision="fp32": neither fp16 nor bf16 is enabled'
            yield MigratedKey("precision", "fp32", OPTION, text, options={"precision": "fp32"})
        types = (self.config.get("communication_data_type"), self.config.get("data_types", {}).get("grad_accum_dtype"))
        if self.precision == "bf16" and self.stage == 0 and types == (None, None):
            text = 'reduce_dtype="fp32": in stage 0 DeepSpeed accumulates bf16 gradients in fp32'
            yield MigratedKey("data_types.grad_accum_dtype", None, OPTION, text, options={"reduce_dtype": "fp32"})
        if self.precision == "bf16" and "check_grad_overflow" not in self.config.get("bf16", {}):
            text = (
                "recent versions of DeepSpeed skip a step whose gradients are not finite, if the file does not say "
                "otherwise; zeroshard does so only with fp16. clip_grad_norm_(…, error_if_nonfinite=True) raises"
            )
            yield MigratedKey("bf16.check_grad_overflow", None, NO_COUNTERPART, text)
        if self.precision == "fp16":
            text = "optimizer.scale(loss).backward(): DeepSpeed's engine.backward(loss) scales the loss by itself"
            yield MigratedKey("fp16.loss", "scaled", SCRIPT, text, changes_numbers=True)
            for name, default in (("loss_scale_window", 1000), ("hysteresis", 2)):
                if name not in self.config.get("fp16", {}):
                    yield from self._read(f"fp16.{name}", default)
        batch, micro = (self.config.get(f"train_{name}") for name in ("batch_size", "micro_batch_size_per_gpu"))
        if (
            self.config.get("gradient_accumulation_steps") is None
            and None not in (batch, micro)
            and AUTO not in (batch, micro)
        ):
            yield from _read_accumulation(self, "gradient_accumulation_steps", f"{batch} // ({micro} * ranks)")


def _read_stage(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    if value == AUTO:
        yield MigratedKey(key, value, OPTION, "pass stage=…: Accelerate has it in its own file", needs="stage")
    else:
        yield MigratedKey(key, value, OPTION, f"stage={value}", options={"stage": value})


def _read_precision(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    name = key.partition(".")[0]
    if key != reader.precision_key:
        other = (
            f"see {reader.precision_key}" if reader.precision == AUTO else f"precision={reader.precision!r} comes first"
        )
        text = "it is off" if value is False else other
        yield MigratedKey(key, value, NOT_NEEDED, text)
    elif value == AUTO:
        text = 'pass precision="bf16", "fp16" or "fp32": the Trainer takes it from its own arguments'
        yield MigratedKey(key, value, OPTION, text, needs="precision")
    else:
        text = f'precision="{name}": computes in {name}, updates fp32 master weights; batch norms stay in fp32'
        loss = "optimizer.scale({})" if name == "fp16" else "{}"
        yield MigratedKey(key, value, OPTION, text, options={"precision": name}, loss=loss)


def _read_loss_scale(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    name = key.partition(".")[2]
    if reader.precision != "fp16":
        then = ': from_deepspeed(…, precision="fp16") says what it becomes' if reader.precision == AUTO else ""
        yield MigratedKey(key, value, NOT_NEEDED, f"the loss scale is for fp16{then}")
        return
    is_static = _is_on(reader.config.get("fp16", {}).get("loss_scale", 0))
    if name in ("initial_scale_power", "loss_scale"):
        _number(key, value)
    if name == "initial_scale_power" and not is_static:
        text = f"loss_scale=2.0**{value}"
        yield MigratedKey(key, value, OPTION, text, options={"loss_scale": 2.0**value})
    elif name == "loss_scale" and is_static:
        text = (
            f"the scale is dynamic: it starts at loss_scale={value}, halves after an overflow and doubles after 2000 "
            "steps without one. It is a factor that the update divides by: without an overflow it changes no more than "
            "rounding"
        )
        yield MigratedKey(key, value, NO_COUNTERPART, text, True, options={"loss_scale": float(value)})
    elif is_static or name == "loss_scale":
        text = "the scale is dynamic" if name == "loss_scale" else "DeepSpeed's scale is fixed here"
        yield MigratedKey(key, value, NOT_NEEDED, text)
    elif (name, value) in (("loss_scale_window", 2000), ("hysteresis", 1), ("consecutive_hysteresis", False)):
        yield MigratedKey(key, value, NOT_NEEDED, "this is what zeroshard does")
    else:
        what = {
            "loss_scale_window": "zeroshard's scale doubles after 2000 steps without an overflow",
            "hysteresis": "zeroshard's scale halves after every overflow, also the first",
            "consecutive_hysteresis": "zeroshard's scale halves after every overflow, also the first",
            "min_loss_scale": "zeroshard's scale has no minimum",
        }[name]
        scaler = "torch.amp.GradScaler(growth_interval=…) works as in a plain loop"
        text = f"{what}: after an overflow, other steps are skipped. {scaler}" if name != "min_loss_scale" else what
        yield MigratedKey(key, value, NO_COUNTERPART, text, changes_numbers=name != "min_loss_scale")


def _read_reduce_dtype(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    if value in (None, "none"):
        yield MigratedKey(key, value, NOT_NEEDED, "gradients are reduced in the compute dtype")
    elif value not in ("fp32", "bf16", "fp16"):
        raise ValueError(f'{key} must be "fp32", "bf16" or "fp16", got {value!r}')
    else:
        sent = reader.config.get("communication_data_type") or value
        # DeepSpeed's default: the compute dtype, but fp32 for bf16 without ZeRO
        is_fp32 = reader.precision == "fp32" or (reader.precision == "bf16" and reader.stage == 0)
        kept = reader.config.get("data_types", {}).get("grad_accum_dtype") or ("fp32" if is_fp32 else value)
        chosen = "fp32" if "fp32" in (sent, kept) else value
        both = ", the more precise of the two" if sent != kept else ""
        text = f'reduce_dtype="{chosen}"{both}: gradients are accumulated, reduced and kept in it'
        yield MigratedKey(key, value, OPTION, text, options={"reduce_dtype": chosen})


def _read_other_dtype(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    if value in (None, reader.precision):
        yield MigratedKey(key, value, NOT_NEEDED, "precision says it")
    else:
        yield MigratedKey(key, value, NO_COUNTERPART, "precision=… is the only dtype of computation", True)


def _read_bucket_size(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    other = reader.config["zero_optimization"].get("reduce_bucket_size", AUTO)
    if value == AUTO or (key.endswith("allgather_bucket_size") and other != AUTO):
        text = "the default bucket_size" if value == AUTO else "reduce_bucket_size sets bucket_size"
        yield MigratedKey(key, value, NOT_NEEDED, text)
    elif reader.stage == 3 and key.endswith("allgather_bucket_size"):
        yield MigratedKey(key, value, NOT_NEEDED, "DeepSpeed does not use it in stage 3")
    else:
        size = max(int(_number(key, value)), 1)
        text = f"bucket_size={size}: elements per collective, also of a step's update"
        yield MigratedKey(key, value, OPTION, text, options={"bucket_size": size})


def _read_prefetch(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    if value == 0:
        yield MigratedKey(key, value, OPTION, "prefetch=False", options={"prefetch": False})
    else:
        yield MigratedKey(key, value, NOT_NEEDED, "the next unit is gathered while the current one computes")


def _read_hpz(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    if value in (AUTO, None, 0, 1, -1):
        yield MigratedKey(key, value, NOT_NEEDED, "it is off")
    else:
        is_hpz = key.endswith("zero_hpz_partition_size")
        shared = "all-gathers of backward stay" if is_hpz else "states are partitioned"
        text = f"{shared} inside groups of {value} with a 2-D mesh (replicate × shard): more memory, the same numbers"
        mesh = f'mesh = init_device_mesh("cuda", (ranks // {value}, {value}))  # shard(…, mesh=mesh)'
        options = {"partition": "hierarchical"} if is_hpz else {}
        yield MigratedKey(key, value, SCRIPT, text, before_shard=mesh, options=options)


def _read_offload(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    """offload_optimizer, offload_param and the old cpu_offload, cpu_offload_param."""
    name = "parameters" if "param" in key else "optimizer"
    section = value if isinstance(value, Mapping) else {"device": "cpu" if value is True else "none"}
    device = section.get("device", "none")
    stages = (3,) if name == "parameters" else (1, 2, 3)
    path = f"{key}.device" if isinstance(value, Mapping) else key
    inner = {"device", "nvme_path", *(("ratio",) if name == "optimizer" else ())}
    if device == AUTO:
        yield MigratedKey(path, device, OPTION, "pass offload=…: Accelerate has it in its own file", needs="offload")
    elif device in ("none", None):
        yield MigratedKey(path, device, NOT_NEEDED, "it is off")
    elif device not in ("cpu", "nvme"):
        raise ValueError(f'{path} must be "none", "cpu" or "nvme", got {device!r}')
    elif reader.stage != AUTO and reader.stage not in stages:
        yield MigratedKey(path, device, NOT_NEEDED, f"DeepSpeed does not use it in stage {reader.stage}")
    else:
        tier = {"cpu": "host", "nvme": "disk"}[device]
        ratio = section.get("ratio", 1.0) if name == "optimizer" and reader.stage == 3 else 1.0
        offload: dict[str, Any] = {name: tier if ratio == 1.0 else (tier, ratio)}
        if tier == "disk":
            offload["directory"] = section.get("nvme_path")
            if offload["directory"] in (None, AUTO):
                raise ValueError(f"{key}.nvme_path must be the path of a directory, got {offload['directory']!r}")
        text = ", ".join(f"{option}={_shown(chosen)}" for option, chosen in offload.items())
        yield MigratedKey(path, device, OPTION, f"offload=Offload({text})", options={"offload": offload})
    for other, chosen in section.items() if isinstance(value, Mapping) else ():
        if other not in inner:
            yield from reader._read(f"{key}.{other}", chosen)
        elif other != "device":
            yield MigratedKey(f"{key}.{other}", chosen, NOT_NEEDED, f"see {path}")


def _read_quantized(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    """zero_quantized_weights and zero_quantized_gradients."""
    if value not in (True, False, None):  # "auto", "false"
        raise ValueError(f"{key} must be true or false, got {value!r}")
    if not value:
        yield MigratedKey(key, value, NOT_NEEDED, "it is off")
    elif reader.stage not in (3, AUTO):
        yield MigratedKey(key, value, NOT_NEEDED, f"DeepSpeed does not use it in stage {reader.stage}")
    else:
        name, text = _QUANTIZED[key]
        yield MigratedKey(key, value, OPTION, text, changes_numbers=True, options={name: "int8"})


_QUANTIZED = {
    "zero_optimization.zero_quantized_weights": (
        "gather_dtype",
        'gather_dtype="int8": parameters are gathered in 8 bits, as in DeepSpeed, with a scale for each 64 elements. '
        "Master weights stay exact, and so do parameters that stay in fp32",
    ),
    "zero_optimization.zero_quantized_gradients": (
        "reduce_wire",
        'reduce_wire="int8": gradients are sent in 8 bits with a scale for each 64 elements, and summed in fp32. '
        "DeepSpeed sends 4 bits. On nodes with several GPUs use a 2-D mesh and "
        'partition="hierarchical" or "full", so that gradients are summed inside a node first',
    ),
}


def _read_clipping(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    if value in (0, None):
        yield MigratedKey(key, value, NOT_NEEDED, "it is off")
    elif value == AUTO:
        yield MigratedKey(key, value, NOT_NEEDED, _KEPT_BY_TOOL)
    else:
        line = f"optimizer.clip_grad_norm_({value})"
        yield MigratedKey(key, value, SCRIPT, f"{line} before optimizer.step()", True, in_loop=line)


_KEPT_BY_TOOL = "the Trainer and Accelerate have it in their own arguments, and keep it"


def _read_accumulation(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    if value in (1, None):
        yield MigratedKey(key, value, NOT_NEEDED, "one backward per step")
    elif value == AUTO:
        yield MigratedKey(key, value, NOT_NEEDED, _KEPT_BY_TOOL)
    else:
        divisor = f"({value})" if isinstance(value, str) else str(value)
        text = f"{value} backwards per step, each of loss / {divisor}: DeepSpeed's engine divides the loss"
        yield MigratedKey(key, value, SCRIPT, text, True, loss=f"{{}} / {divisor}")


def _read_batch(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    what = "the batch of one rank" if "micro" in key else "micro-batch × accumulation × ranks"
    if value == AUTO:
        yield MigratedKey(key, value, NOT_NEEDED, _KEPT_BY_TOOL)
    elif "micro" not in key and reader.config.get("train_micro_batch_size_per_gpu", AUTO) != AUTO:
        yield MigratedKey(key, value, NOT_NEEDED, f"{what}: it follows from them")
    else:
        yield MigratedKey(key, value, SCRIPT, f"{what}: the script's data loader decides", True)


def _read_managed_accumulation(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    text = "the script calls optimizer.step() after the last backward of a step"
    yield MigratedKey(key, value, NOT_NEEDED, text)


def _read_prescale(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    if not reader.config.get("prescale_gradients"):
        yield MigratedKey(key, value, NOT_NEEDED, "gradients are summed and then divided by the number of ranks")
    else:
        is_fp16 = "fp16" in (reader.config.get("communication_data_type"), reader.precision)
        text = "gradients are summed and then divided by the number of ranks; it matters if sums overflow, as in fp16: "
        yield MigratedKey(key, value, NO_COUNTERPART, text + 'reduce_dtype="fp32" avoids it', is_fp16)


def _read_allreduce_op(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    if str(value).lower() == "mean":
        yield MigratedKey(key, value, NOT_NEEDED, "gradients are averaged over the ranks")
    else:
        text = "gradients are averaged over the ranks: multiply the loss by their number"
        yield MigratedKey(key, value, SCRIPT, text, True, loss="{} * torch.distributed.get_world_size()")


def _read_sparse_gradients(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    text = "gradients are dense: build embeddings with sparse=False. The numbers are the same"
    yield MigratedKey(key, value, NOT_NEEDED, text if value else "it is off")


def _read_sequence_parallel(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    if value in (1, None):
        yield MigratedKey(key, value, NOT_NEEDED, "it is off")
    else:
        yield MigratedKey(key, value, NO_COUNTERPART, "sequence parallelism is not supported", True)


def _read_tensor_parallel(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    degree = value.get("autotp_size", 0) if isinstance(value, Mapping) else 0
    if degree in (0, 1):
        yield MigratedKey(key, value, NOT_NEEDED, "it is off")
    else:
        text = "tensor parallelism by a mesh axis named tensor; ranks of one axis get the same batch"
        line = f'mesh = init_device_mesh("cuda", (ranks // {degree}, {degree}), mesh_dim_names=("shard", "tensor"))'
        yield MigratedKey(key, value, SCRIPT, text, True, before_shard=f"{line}  # shard(…, mesh=mesh)")


def _read_autocast(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    if not value.get("enabled"):
        yield MigratedKey(key, value, NOT_NEEDED, "it is off")
        return
    dtype = str(value.get("dtype", "bfloat16")).removeprefix("torch.")
    if dtype in ("float16", "half", "fp16"):
        text = 'autocast to float16 needs a loss scale: precision="fp16" has one, or autocast to bfloat16 in the script'
        yield MigratedKey(key, value, NO_COUNTERPART, text, True)
        return
    text = "torch.autocast around the forward, in the script; gradients are sent in the parameters' dtype, fp32"
    line = f'autocast = torch.autocast("cuda", dtype=torch.{dtype})  # in the loop: with autocast: loss = …'
    yield MigratedKey(key, value, SCRIPT, text, True, after_shard=line)


def _read_activation_checkpointing(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    offload = isinstance(value, Mapping) and bool(value.get("cpu_checkpointing"))
    line = f"zeroshard.checkpoint_activations(model{', offload=True' if offload else ''})"
    text = f"{line} instead of deepspeed.checkpointing: recomputes the model's blocks, changes no numbers"
    yield MigratedKey(key, value, SCRIPT, text, after_shard=line)


def _read_drop_last(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    if value:
        text = "DataLoader(…, drop_last=True), if DeepSpeed has made the data loader"
        yield MigratedKey(key, value, SCRIPT, text, changes_numbers=True)
    else:
        yield MigratedKey(key, value, NOT_NEEDED, "it is off")


# ------------------------------------------------------------------------------------------ optimizers and schedulers

_ADAM_DEFAULTS = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}  # DeepSpeed's; torch's differ
_TORCH_OPTIMIZERS = "Adadelta Adafactor Adagrad Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()


def _read_optimizer(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    params, name = dict(value.get("params") or {}), str(value.get("type", ""))
    kind = name.lower()
    if kind in ("onebitadam", "zerooneadam", "onebitlamb"):
        text = f"{name} compresses gradients: no counterpart. torch.optim.AdamW is the uncompressed rule"
        yield MigratedKey(key, value, NO_COUNTERPART, text, changes_numbers=True)
        return
    if kind in ("adam", "adamw"):
        is_torch, is_w = params.pop("torch_adam", False), params.pop("adam_w_mode", True) or kind == "adamw"
        params = {**(_ADAM_DEFAULTS if not is_torch else {}), **params}
        if params.pop("bias_correction", True) is not True:
            yield MigratedKey(
                f"{key}.params.bias_correction", False, NO_COUNTERPART, "torch's Adam has it always", True
            )
        cls = "torch.optim.AdamW" if is_w else "torch.optim.Adam"
        text = f"{cls}: DeepSpeed's {name} {'decouples the weight decay' if is_w else 'adds the decay to gradients'}"
    elif kind == "muon":
        cls, text = "MuonWithAdamW", "zeroshard.optim.MuonWithAdamW, or your own Muon: see the page on optimizers"
    elif kind in map(str.lower, _TORCH_OPTIMIZERS):
        cls = next(f"torch.optim.{known}" for known in _TORCH_OPTIMIZERS if known.lower() == kind)
        text = f"{cls}, with the same arguments"
    else:
        cls, text = name or "YourOptimizer", f"any {name} class: shard() tests how it has to be run"
    arguments = ", ".join(f"{option}={_argument(option, given)}" for option, given in params.items())
    line = f"optimizer = {cls}(model.parameters(), {arguments})" if kind != "muon" else ""
    yield MigratedKey(key, value, SCRIPT, text, changes_numbers=True, before_shard=line)


def _argument(name: str, value: Any) -> str:
    """Return a value as source, or its own name if the file leaves it open."""
    return name if value == AUTO else _shown(tuple(value) if isinstance(value, list) else value)


_WARMUP = {"log": "math.log(step) / math.log({n})", "linear": "(step - 1) / {n}"}


def _read_scheduler(reader: _Reader, key: str, value: Any) -> Iterator[MigratedKey]:
    params, name = dict(value.get("params") or {}), str(value.get("type", ""))
    formulas = {"WarmupLR": "1.0", "WarmupDecayLR": _DECAY, "WarmupCosineLR": _COSINE}
    if name not in formulas or any(isinstance(given, list) for given in params.values()):  # a list: one for each group
        text = f"{name}: a scheduler of torch.optim.lr_scheduler, and scheduler.step() after optimizer.step()"
        yield MigratedKey(key, value, SCRIPT, text, changes_numbers=True)
        return
    steps = params.get("warmup_num_steps", 1000)
    values = {
        "n": max(2, steps) if steps != AUTO else "warmup_num_steps",
        "total": _argument("total_num_steps", params.get("total_num_steps", AUTO)),
        "low": _argument("cos_min_ratio", params.get("cos_min_ratio", 0.0001)),
    }
    warmup = _WARMUP.get(str(params.get("warmup_type")), _WARMUP["log"]).format(**values)
    after = formulas[name].format(**values)
    if name == "WarmupCosineLR":
        least = _argument("warmup_min_ratio", params.get("warmup_min_ratio", 0.0))
        start, ratio = "0.0", warmup if least == "0.0" else f"{least} + (1 - {least}) * {warmup}"
        base, note = "", "of the optimizer's learning rate"
    else:
        top = params.get("warmup_max_lr", None if name == "WarmupLR" else 0.001)
        base = "" if top is None else f"  # the optimizer's lr has to be {_argument('warmup_max_lr', top)}"
        least = _argument("warmup_min_lr", params.get("warmup_min_lr", 0.0))
        if least in ("0", "0.0"):
            start, ratio = "0.0", warmup
        else:
            low = f"{least} / {'lr' if top is None else _argument('warmup_max_lr', top)}"
            start, ratio = low, f"{low} + (1 - {low}) * {warmup}"
            after = f"{low} + (1 - {low}) * {after}" if after != "1.0" else after
        note = "DeepSpeed sets the learning rate from the scheduler's own values"
    lines = (
        f"{'import math' if 'math.' in ratio + after else ''}\n"
        f"def factor(step):  # DeepSpeed's {name}; its first two steps have the lowest rate\n"
        f"    if step <= {values['n']}:\n"
        f"        return {ratio} if step else {start}\n"
        f"    return {after}\n"
        "\n"
        f"scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor){base}"
    )
    yield MigratedKey(key, value, SCRIPT, f"a LambdaLR, below; {note}", changes_numbers=True, after_shard=lines)


_DECAY = "max(0.0, ({total} - step + 1) / max(1, {total} - {n}))"
_COSINE = "{low} + (1 - {low}) * (1 + math.cos(math.pi * min(1.0, (step - {n}) / max(1, {total} - {n})))) / 2"

_SECTIONS = {"zero_optimization", "fp16", "bf16", "data_types"}
_Rule = Callable[[_Reader, str, Any], Iterator[MigratedKey]]
_RULES: dict[str, _Rule] = {
    "activation_checkpointing": _read_activation_checkpointing,
    "bf16.enabled": _read_precision,
    "communication_data_type": _read_reduce_dtype,
    "data_types.buffer_dtype": _read_other_dtype,
    "data_types.grad_accum_dtype": _read_reduce_dtype,
    "data_types.param_dtype": _read_other_dtype,
    "dataloader_drop_last": _read_drop_last,
    "fp16.enabled": _read_precision,
    "gradient_accumulation_steps": _read_accumulation,
    "gradient_allreduce_op": _read_allreduce_op,
    "gradient_clipping": _read_clipping,
    "gradient_predivide_factor": _read_prescale,
    "managed_gradient_accumulation": _read_managed_accumulation,
    "optimizer": _read_optimizer,
    "prescale_gradients": _read_prescale,
    "scheduler": _read_scheduler,
    "sequence_parallel_size": _read_sequence_parallel,
    "sparse_gradients": _read_sparse_gradients,
    "tensor_parallel": _read_tensor_parallel,
    "torch_autocast": _read_autocast,
    "train_batch_size": _read_batch,
    "train_micro_batch_size_per_gpu": _read_batch,
    "zero_optimization.allgather_bucket_size": _read_bucket_size,
    "zero_optimization.cpu_offload": _read_offload,
    "zero_optimization.cpu_offload_param": _read_offload,
    "zero_optimization.cpu_offload_params": _read_offload,
    "zero_optimization.mics_shard_size": _read_hpz,
    "zero_optimization.offload_optimizer": _read_offload,
    "zero_optimization.offload_param": _read_offload,
    "zero_optimization.reduce_bucket_size": _read_bucket_size,
    "zero_optimization.stage": _read_stage,
    "zero_optimization.stage3_prefetch_bucket_size": _read_prefetch,
    "zero_optimization.zero_hpz_partition_size": _read_hpz,
    "zero_optimization.zero_quantized_gradients": _read_quantized,
    "zero_optimization.zero_quantized_weights": _read_quantized,
    **{
        f"fp16.{name}": _read_loss_scale
        for name in (
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        )
    },
}
_KNOWN = {*_NOT_NEEDED, *_NO_COUNTERPART, *_RULES, *_SECTIONS}
