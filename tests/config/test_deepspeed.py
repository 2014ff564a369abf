"""DeepSpeed configurations: what each key becomes, and that no key that changes the numbers is dropped silently."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard import Config, Offload
from zeroshard.cli.main import main
from zeroshard.cli.migrate import script_lines
from zeroshard.config.deepspeed import NO_COUNTERPART, NOT_NEEDED, SCRIPT, UNKNOWN, read_deepspeed

# All keys of DeepSpeed's documentation and of the classes that read its configuration, each with a value that is on.
DOCUMENTED: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "managed_gradient_accumulation": True,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "communication_data_type": "fp32",
    "seq_parallel_comm_data_type": "fp32",
    "sequence_parallel_size": 2,
    "gradient_allreduce_op": "sum",
    "prescale_gradients": True,
    "gradient_predivide_factor": 2.0,
    "sparse_gradients": True,
    "fp16": {
        "enabled": True,
        "auto_cast": True,
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": True,
        "min_loss_scale": 1,
        "fused_mode": True,
        "fp16_master_weights_and_grads": True,
    },
    "bf16": {
        "enabled": False,
        "immediate_grad_update": True,
        "check_grad_overflow": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    },
    "torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]},
    "amp": {"enabled": True, "opt_level": "O1"},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "compute_grad_norm": True,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
        "load_from_fp32_weights": True,
        "elastic_checkpoint": True,
        "round_robin_gradients": True,
        "parameter_alignment": True,
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/nvme",
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/nvme",
            "pin_memory": True,
            "ratio": 0.3,
            "buffer_count": 4,
            "fast_init": True,
            "pipeline": True,
            "pipeline_read": True,
            "pipeline_write": True,
            "super_offload": True,
            "convert_grad_on_cpu": True,
            "cpuadam_cores_perc": 0.8,
        },
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_prefetch_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 1e6,
        "stage3_model_persistence_threshold": 1e6,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_gather_fp16_weights_on_model_save": True,
        "stage3_module_granularity_threshold": 1,
        "stage3_use_all_reduce_for_fetch_params": True,
        "stage3_allgather_sequential": True,
        "stage3_partition_stream_chunk_size": 1,
        "sub_group_size": 1e9,
        "ignore_unused_parameters": True,
        "legacy_stage1": True,
        "zero_hpz_partition_size": 8,
        "zero_quantized_weights": True,
        "zero_quantized_nontrainable_weights": True,
        "zero_quantized_gradients": True,
        "zeropp_loco_param": {"err_beta": 0.8},
        "mics_shard_size": 8,
        "mics_hierarchical_params_gather": True,
        "memory_efficient_linear": True,
        "pipeline_loading_checkpoint": True,
        "override_module_apply": True,
        "log_trace_cache_warnings": True,
        "enable_sanity_checks": True,
        "save_muon_momentum_buffer_in_memory": True,
        "use_multi_rank_bucket_allreduce": True,
        "leaf_module": {"classes": []},
        "zenflow": {"topk_ratio": 0.1},
        "cpu_offload": False,
        "cpu_offload_param": False,
        "cpu_offload_use_pin_memory": False,
    },
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "aio": {"block_size": 1048576},
    "tensor_parallel": {"autotp_size": 4},
    "hybrid_engine": {"enabled": True},
    "expert_parallel": {"enabled": True},
    "steps_per_print": 10,
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "dump_state": True,
    "flops_profiler": {"enabled": True},
    "autotuning": {"enabled": True},
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
    "sparse_attention": {"mode": "fixed"},
    "data_efficiency": {"enabled": True},
    "curriculum_learning": {"enabled": True},
    "tensorboard": {"enabled": True},
    "wandb": {"enabled": True},
    "comet": {"enabled": True},
    "csv_monitor": {"enabled": True},
    "comms_logger": {"enabled": True},
    "checkpoint": {"tag_validation": "Warn"},
    "data_types": {"grad_accum_dtype": "fp32", "param_dtype": "bf16", "buffer_dtype": "fp32"},
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
    "progressive_layer_drop": {"enabled": True, "theta": 0.5},
    "elasticity": {"enabled": True},
    "eigenvalue": {"enabled": True},
    "quantize_training": {"enabled": True},
    "weight_quantization": {"quantized_initialization": {}},
    "pipeline": {"stages": 2},
    "compile": {"deepcompile": True},
    "graph_harvesting": True,
    "timers": {},
    "nebula": {"enabled": True},
    "datastates": {"enabled": True},
    "disable_allgather": True,
    "vocabulary_size": 1024,
    "dataloader_drop_last": True,
    "log_level": "info",
    "use_data_before_expert_parallelism": True,
}
# Those that change the numbers of a run and that zeroshard cannot do.
LOST = """
    sequence_parallel_size prescale_gradients gradient_predivide_factor amp expert_parallel sparse_attention elasticity
    data_efficiency curriculum_learning compression_training progressive_layer_drop quantize_training pipeline
    weight_quantization data_types.param_dtype data_types.buffer_dtype fp16.fp16_master_weights_and_grads
    fp16.loss_scale_window fp16.hysteresis fp16.consecutive_hysteresis bf16.check_grad_overflow
    bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
    zero_optimization.zero_quantized_nontrainable_weights zero_optimization.zeropp_loco_param zero_optimization.zenflow
""".split()


def test_every_documented_key_is_known_and_none_that_changes_numbers_is_dropped() -> None:
    migration = read_deepspeed(DOCUMENTED)
    assert [key.key for key in migration.keys if key.kind == UNKNOWN] == []
    assert all(key.text for key in migration.keys)
    lost = {key.key for key in migration.keys if key.kind == NO_COUNTERPART and key.changes_numbers}
    assert lost == set(LOST)
    demanded = {key.key for key in migration.unhandled()}
    assert demanded - lost == {
        *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler"),
        *(
            "fp16.loss",
            "gradient_allreduce_op",
            "torch_autocast",
            "gradient_clipping",
            "tensor_parallel",
            "dataloader_drop_last",
        ),
    }
    with pytest.raises(ValueError) as error:
        Config.from_deepspeed(DOCUMENTED)
    assert [key for key in demanded if f"\n  {key} = " not in str(error.value)] == []


@pytest.mark.parametrize(
    ("deepspeed", "options"),
    [
        ({}, {"stage": 0, "precision": "fp32"}),
        ({"zero_optimization": True}, {"stage": 1, "precision": "fp32"}),
        ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, {"stage": 2, "precision": "bf16"}),
        (
            {"bfloat16": {"enabled": True}, "fp16": {"enabled": "auto"}},
            {"stage": 0, "precision": "bf16", "reduce_dtype": "fp32"},
        ),
        (
            {"communication_data_type": "fp32", "bf16": {"enabled": True}},
            {"stage": 0, "precision": "bf16", "reduce_dtype": "fp32"},
        ),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "fp32", "bf16": {"enabled": True}},
            {"stage": 0, "precision": "bf16", "reduce_dtype": "fp32"},
        ),
        (
            {"zero_optimization": {"stage": 3, "reduce_bucket_size": 2e8, "stage3_prefetch_bucket_size": 0}},
            {"stage": 3, "precision": "fp32", "bucket_size": 200_000_000, "prefetch": False},
        ),
        (
            {"zero_optimization": {"stage": 1, "allgather_bucket_size": 5e8, "reduce_bucket_size": "auto"}},
            {"stage": 1, "precision": "fp32", "bucket_size": 500_000_000},
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.25}}},
            {"stage": 3, "precision": "fp32", "offload": Offload(optimizer=("host", 0.25))},
        ),
        (
            {  # DeepSpeed uses neither the ratio nor offloaded parameters in stage 2
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "cpu", "ratio": 0.25},
                    "offload_param": {"device": "cpu"},
                }
            },
            {"stage": 2, "precision": "fp32", "offload": "host"},
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
                    "offload_param": {"device": "cpu"},
                }
            },
            {
                "stage": 3,
                "precision": "fp32",
                "offload": Offload(optimizer="disk", parameters="host", directory="/nvme"),
            },
        ),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            {"stage": 0, "precision": "fp32"},
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}},
            {"stage": 3, "precision": "fp32", "gather_dtype": "int8", "reduce_wire": "int8"},
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": False, "zero_quantized_gradients": True}},
            {"stage": 3, "precision": "fp32", "reduce_wire": "int8"},
        ),
        (  # DeepSpeed uses neither below stage 3
            {"zero_optimization": {"stage": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True}},
            {"stage": 2, "precision": "fp32"},
        ),
        (
            {"gradient_clipping": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto"},
            {"stage": 0, "precision": "fp32"},
        ),
    ],
)
def test_keys_become_options(deepspeed: dict[str, Any], options: dict[str, Any]) -> None:
    assert Config.from_deepspeed(deepspeed) == Config(**options)


def test_fp16_says_how_its_loss_scale_differs() -> None:
    deepspeed = {"fp16": {"enabled": True, "initial_scale_power": 10}}
    with pytest.raises(ValueError, match=r"fp16.loss_scale_window = 1000: .*2000 steps(.|\n)*fp16.hysteresis = 2"):
        Config.from_deepspeed(deepspeed)
    config = Config.from_deepspeed(deepspeed, handled=["fp16"])
    assert config == Config(stage=0, precision="fp16", loss_scale=1024.0)
    assert Config.from_deepspeed(deepspeed, precision="bf16").precision == "bf16"  # no loss scale, nothing to handle
    with pytest.raises(ValueError, match=r"fp16.loss_scale = 128: the scale is dynamic"):
        Config.from_deepspeed({"fp16": {"enabled": True, "loss_scale": 128}})


def test_auto_and_wrong_values_are_errors_with_what_to_do() -> None:
    auto = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": "auto"}}
    with pytest.raises(ValueError, match=r'(?s)pass precision="bf16".*pass stage=….*Pass these options'):
        Config.from_deepspeed(auto)
    assert Config.from_deepspeed(auto, precision="bf16", stage=3) == Config(stage=3, precision="bf16")
    both = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "hysteresis": 2}}
    texts = {key.key: key.text for key in read_deepspeed(both).keys}
    assert texts["fp16.enabled"] == "see bf16.enabled" and 'precision="fp16") says' in texts["fp16.hysteresis"]
    with pytest.raises(ValueError, match=r"fp16\.hysteresis"):
        Config.from_deepspeed(both, precision="fp16")
    for deepspeed, message in (
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both enabled"),
        ({"zero_optimization": {"stage": 5}}, "stage must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}, '"cpu" or "nvme", got \'gpu\''),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path must be the path"),
        ({"communication_data_type": "int8"}, '"fp32", "bf16" or "fp16", got \'int8\''),
        ({"fp16": True}, "fp16 must be a JSON object"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": "auto"}},
            "scale_power must be a number, got 'auto': no tool",
        ),
        ({"fp16": {"enabled": True, "loss_scale": "auto"}}, "fp16.loss_scale must be a number, got 'auto'"),
        ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, "reduce_bucket_size must be a number, got '5e8'"),
        ({"zero_optimization": {"overlap_com": True}}, "did you mean 'zero_optimization.overlap_comm'"),
    ):
        with pytest.raises(ValueError, match=message):
            Config.from_deepspeed(deepspeed)
    with pytest.raises(
        ValueError, match=r"handled='gradient_cliping' is not a key .* did you mean 'gradient_clipping'"
    ):
        Config.from_deepspeed({"gradient_clipping": 1.0}, handled=["gradient_cliping"])
    with pytest.raises(TypeError, match="unknown option 'stagee'"):
        Config.from_deepspeed({}, stagee=2)


@pytest.mark.parametrize("value", [{}, {"topk_ratio": 0.1}])
def test_a_section_that_is_on_if_it_is_there_is_not_dropped(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"zero_optimization\.zenflow = .*every gradient is applied in its own step"):
        Config.from_deepspeed({"zero_optimization": {"stage": 2, "zenflow": value}})
    Config.from_deepspeed({"zero_optimization": {"stage": 2, "zenflow": None}})


def test_bf16_names_the_overflow_check_that_recent_versions_have_by_default() -> None:
    def found(**section: Any) -> list[tuple[str, bool]]:
        keys = read_deepspeed({"bf16": {"enabled": True, **section}}).keys
        return [(key.kind, key.changes_numbers) for key in keys if key.key == "bf16.check_grad_overflow"]

    assert found() == [(NO_COUNTERPART, False)]  # a NaN in the loss shows itself
    assert found(check_grad_overflow=True) == [(NO_COUNTERPART, True)]
    assert found(check_grad_overflow=False) == [(NOT_NEEDED, False)]


def test_a_file_is_read_as_json_without_duplicate_keys(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"zero_optimization": {"stage": 3}}')
    assert Config.from_deepspeed(path) == Config.from_deepspeed(str(path)) == Config(stage=3, precision="fp32")
    path.write_text('{"zero_optimization": {"stage": 3, "stage": 2}}')
    with pytest.raises(ValueError, match="'stage' is given twice"):
        Config.from_deepspeed(path)
    path.write_text('{"bf16": {"enabled": true},}')
    with pytest.raises(ValueError, match=r"is not JSON: .*trailing commas"):
        Config.from_deepspeed(path)


@pytest.mark.parametrize(
    ("section", "written"),
    [
        # DeepSpeed's Adam decouples the weight decay by default, and its default decay is 0, not torch's 0.01
        ({"type": "Adam"}, torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=1e-3, weight_decay=0.0)),
        (
            {"type": "Adam", "params": {"adam_w_mode": False, "betas": [0.8, 0.9], "weight_decay": 0.1}},
            torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=1e-3, betas=(0.8, 0.9), weight_decay=0.1),
        ),
        (
            {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.5}},
            torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.5),
        ),
        (
            {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
            torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5, momentum=0.9),
        ),
    ],
)
def test_the_optimizer_to_write_is_deepspeeds(section: dict[str, Any], written: torch.optim.Optimizer) -> None:
    (key,) = (key for key in read_deepspeed({"optimizer": section}).keys if key.key == "optimizer")
    names: dict[str, Any] = {"torch": torch, "model": nn.Linear(1, 1)}
    exec(key.before_shard, names)
    assert type(names["optimizer"]) is type(written)
    assert names["optimizer"].defaults == written.defaults


def test_compressed_optimizers_have_no_counterpart() -> None:
    (key,) = (key for key in read_deepspeed({"optimizer": {"type": "OneBitAdam"}}).keys if key.key == "optimizer")
    assert key.kind == NO_COUNTERPART and key.changes_numbers


def deepspeed_rates(kind: str, steps: int, **given: Any) -> list[float]:
    """The learning rates of DeepSpeed's schedulers, by its definition: before step t, the iteration is t - 1."""
    n, total, kind_of_warmup = (
        given["warmup_num_steps"],
        given.get("total_num_steps", 0),
        given.get("warmup_type", "log"),
    )
    low, high = given.get("warmup_min_lr", 0.0), given.get("warmup_max_lr", 0.01)
    rates = []
    for iteration in range(-1, steps - 1):
        if iteration < 0:
            rates.append(0.0 if kind == "WarmupCosineLR" else low)
            continue
        warm = math.log(iteration + 1) / math.log(n) if kind_of_warmup == "log" else iteration / n
        if kind == "WarmupCosineLR":
            least, end = given.get("warmup_min_ratio", 0.0), given.get("cos_min_ratio", 0.0001)
            progress = min(1.0, (iteration - n + 1) / (total - n))
            cosine = end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2
            rates.append(0.01 * (least + (1 - least) * warm if iteration < n else cosine))
        else:
            decay = max(0.0, (total - iteration) / (total - n)) if kind == "WarmupDecayLR" else 1.0
            rates.append(low + (high - low) * (warm if iteration < n else decay))
    return rates


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("WarmupLR", {"warmup_num_steps": 5}),
        ("WarmupLR", {"warmup_num_steps": 5, "warmup_type": "linear", "warmup_min_lr": 0.001, "warmup_max_lr": 0.01}),
        ("WarmupDecayLR", {"warmup_num_steps": 4, "total_num_steps": 12, "warmup_max_lr": 0.01}),
        ("WarmupDecayLR", {"warmup_num_steps": 4, "total_num_steps": 9, "warmup_min_lr": 0.002, "warmup_max_lr": 0.01}),
        ("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 12}),
        (
            "WarmupCosineLR",
            {"warmup_num_steps": 3, "total_num_steps": 9, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2},
        ),
    ],
)
def test_the_scheduler_to_write_has_deepspeeds_rates(kind: str, given: dict[str, Any]) -> None:
    migration = read_deepspeed({"scheduler": {"type": kind, "params": given}})
    (key,) = (key for key in migration.keys if key.key == "scheduler")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.01)
    names: dict[str, Any] = {"torch": torch, "optimizer": optimizer}
    exec(key.after_shard, names)
    rates = []
    for _ in range(14):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        names["scheduler"].step()
    assert rates == pytest.approx(deepspeed_rates(kind, 14, **given))


def test_the_script_that_the_command_prints_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deepspeed = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(deepspeed))
    assert main(["migrate", str(path)]) == 0
    printed = capsys.readouterr().out
    script = script_lines(read_deepspeed(path), path)
    assert all(line in printed for line in script)
    setup, _, loop = "\n".join(script).partition("# in the loop")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
    names: dict[str, Any] = {"torch": torch, "zeroshard": zeroshard, "model": model}
    exec(setup, names)
    assert names["config"] == Config(stage=2, precision="bf16", offload="host")
    before = zeroshard.full_parameter(model, "0.0.weight").clone()
    for _ in range(3):  # the first two have a rate of 0
        names["loss"] = model(torch.ones(2, 4)).float().pow(2).mean()
        exec(f"# {loop}", names)
    assert not torch.equal(zeroshard.full_parameter(model, "0.0.weight"), before)
    zeroshard.unwrap(model)


def test_the_command_fails_for_what_it_cannot_do_and_suggests_to_handle_only_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"weight_quantization": {"enabled": True}, "gradient_clipping": 1.0}))
    assert main(["migrate", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "CHANGES THE NUMBERS. quantized weights are not supported" in printed
    assert "handled=['gradient_clipping']" in printed
    assert main(["migrate", str(path), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["options"] == {"stage": 0, "precision": "fp32"} and not record["can_be_migrated"]
    assert {key["key"]: key["kind"] for key in record["keys"]}["gradient_clipping"] == SCRIPT
    assert main(["migrate", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_quantized_collectives_say_how_they_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, **keys}, "bf16": {"enabled": True}}))
    assert main(["migrate", str(path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "with a scale for each 64 elements" in printed and "Master weights stay exact" in printed
    assert "summed in fp32. DeepSpeed sends 4 bits" in printed
    assert 'gather_dtype="int8", reduce_wire="int8"' in printed
    migrated = {key.key: key for key in read_deepspeed(path).keys}
    assert all(migrated[f"zero_optimization.{key}"].changes_numbers for key in keys)
    with pytest.raises(ValueError, match="reduce_wire='int8' sends gradients in 8 bits, but reduce_dtype asks for"):
        Config.from_deepspeed(path, reduce_dtype="fp32")
    with pytest.raises(ValueError, match="gather_dtype='int8' needs stage=3"):
        Config.from_deepspeed({"zero_optimization": {"stage": "auto", **keys}}, stage=2, gather_dtype="int8")


@pytest.mark.parametrize("value", ["auto", "false"])
def test_a_text_does_not_turn_quantized_collectives_on(value: str) -> None:
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        with pytest.raises(ValueError, match=f"zero_optimization.{key} must be true or false, got '{value}'"):
            Config.from_deepspeed({"zero_optimization": {"stage": 3, key: value}})


def test_shard_takes_a_config_and_options_before_it() -> None:
    for options, dtype in (({}, torch.bfloat16), ({"precision": "fp16"}, torch.float16)):
        model, _ = zeroshard.shard(nn.Linear(4, 2), config=Config(stage=2, precision="bf16"), **options)
        assert model.weight.dtype == dtype
        zeroshard.unwrap(model)
    with pytest.raises(TypeError, match=r"config must be a zeroshard.Config, got dict"):
        zeroshard.shard(model, config={"stage": 3})  # type: ignore[arg-type]
