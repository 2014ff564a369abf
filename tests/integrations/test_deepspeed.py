"""DeepSpeed configurations: what each key becomes, and that no key that changes the numbers is dropped silently."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard import Config, Offload
from zeroshard.cli.main import main
from zeroshard.integrations.deepspeed.migrate import script_lines
from zeroshard.integrations.deepspeed.reader import NO_COUNTERPART, SCRIPT, UNKNOWN, find_unhandled, read_deepspeed

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
    sequence_parallel_size prescale_gradients amp expert_parallel sparse_attention elasticity data_efficiency
    curriculum_learning compression_training progressive_layer_drop quantize_training pipeline weight_quantization
    data_types.param_dtype data_types.buffer_dtype fp16.fp16_master_weights_and_grads fp16.loss_scale_window
    fp16.hysteresis fp16.consecutive_hysteresis zero_optimization.zero_quantized_nontrainable_weights
    zero_optimization.zeropp_loco_param zero_optimization.zenflow
""".split()


@pytest.mark.guarantee("DeepSpeed configurations")
def test_every_documented_key_is_known_and_none_that_changes_numbers_is_dropped() -> None:
    keys = read_deepspeed(DOCUMENTED)
    assert [key.key for key in keys if key.kind == UNKNOWN] == []
    lost = {key.key for key in keys if key.kind == NO_COUNTERPART}
    assert lost == set(LOST)
    demanded = {key.key for key in find_unhandled(keys)}
    assert demanded - lost == {
        *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler", "fp16.loss"),
        *("gradient_allreduce_op", "torch_autocast", "gradient_clipping", "dataloader_drop_last"),
        "tensor_parallel.autotp_size",
    }
    with pytest.raises(ValueError) as error:
        Config.from_deepspeed(DOCUMENTED)
    assert [key for key in demanded if f"\n  {key} = " not in str(error.value)] == []


@pytest.mark.parametrize(
    ("deepspeed", "options"),
    [
        ({}, {"stage": 0, "precision": "fp32"}),
        ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, {"stage": 2, "precision": "bf16"}),
        (
            {"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}},
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
            {"zero_optimization": {"stage": 3, "reduce_bucket_size": 2e8, "allgather_bucket_size": 5e8}},
            {"stage": 3, "precision": "fp32", "bucket_size": 200_000_000},
        ),
        (
            {"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}, "communication_data_type": "bf16"},
            {"stage": 1, "precision": "fp32"},  # DeepSpeed accumulates in fp32
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
    with pytest.raises(ValueError, match=r"(?s)pass stage=….*pass precision=….*Pass these options"):
        Config.from_deepspeed(auto)
    assert Config.from_deepspeed(auto, precision="bf16", stage=3) == Config(stage=3, precision="bf16")
    both = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "hysteresis": 2}}
    with pytest.raises(ValueError, match=r"fp16\.hysteresis"):
        Config.from_deepspeed(both, precision="fp16")
    stage_2 = {"zero_optimization": {"stage": 2}}
    for deepspeed, message in (
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both enabled"),
        ({"zero_optimization": {"stage": 5}}, "stage must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}, '"cpu" or "nvme", got \'gpu\''),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path must be the path"),
        (
            {"communication_data_type": "int8", "bf16": {"enabled": True}, **stage_2},
            "communication_data_type must be .*'int8'",
        ),
        ({"fp16": True}, "fp16 must be a JSON object"),
        ({"zero_optimization": True}, "zero_optimization must be a JSON object"),
        ({"bfloat16": {"enabled": True}}, "did you mean 'bf16'"),
        ({"zero_optimization": {"cpu_offload": True}}, "cpu_offload = True: write offload_optimizer"),
        ({"fp16": {"enabled": True, "initial_scale_power": "auto"}}, "scale_power is not of the form .* got 'auto'"),
        ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, "reduce_bucket_size is not of the form .* got '5e8'"),
        ({"optimizer": {"params": {}}}, "optimizer is not of the form"),
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


@pytest.mark.parametrize("section", ["fp16", "bf16"])
def test_a_misspelled_key_of_a_section_that_is_off_is_not_dropped(section: str) -> None:
    with pytest.raises(ValueError, match=f"{section}.enabld = True: not a key .* did you mean '{section}.enabled'"):
        Config.from_deepspeed({section: {"enabld": True}})


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
            torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=1e-3, betas=[0.8, 0.9], weight_decay=0.1),  # type: ignore[arg-type]
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
    (key,) = (key for key in read_deepspeed({"optimizer": section}) if key.key == "optimizer")
    names: dict[str, Any] = {"torch": torch, "model": nn.Linear(1, 1)}
    exec(key.text, names)
    assert type(names["optimizer"]) is type(written)
    assert names["optimizer"].defaults == written.defaults


@pytest.mark.parametrize("name", ["Lamb", "lion"])
def test_an_optimizer_that_torch_does_not_have_is_not_written_as_torchs(name: str) -> None:
    (key,) = (key for key in read_deepspeed({"optimizer": {"type": name}}) if key.key == "optimizer")
    assert f"YOUR_LIBRARY.{name}(" in key.text and "torch" not in key.text


def test_compressed_optimizers_have_no_counterpart() -> None:
    (key,) = (key for key in read_deepspeed({"optimizer": {"type": "OneBitAdam"}}) if key.key == "optimizer")
    assert key.kind == NO_COUNTERPART and key.changes_numbers


def deepspeed_rates(kind: str, n: int, total: int) -> list[float]:
    """The learning rates of DeepSpeed's schedulers, by its definition: before step t, the iteration is t - 1."""
    rates = [0.0]
    for iteration in range(13):
        decay = max(0.0, (total - iteration) / (total - n))
        cosine = 0.0001 + 0.9999 * (1 + math.cos(math.pi * min(1.0, (iteration - n + 1) / (total - n)))) / 2
        after = {"warmup_lr": 1.0, "warmup_decay_lr": decay, "warmup_cosine_lr": cosine}[kind]
        rates.append(math.log(iteration + 1) / math.log(n) if iteration < n else after)
    return rates


@pytest.mark.parametrize("kind", ["warmup_lr", "warmup_decay_lr", "warmup_cosine_lr"])
def test_the_schedulers_on_the_page_have_deepspeeds_rates(kind: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "from-deepspeed.md").read_text(encoding="utf-8")
    code = page.partition("## Schedulers")[2].partition("```python\n")[2].partition("```")[0]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.01)
    names: dict[str, Any] = {"torch": torch, "optimizer": optimizer}
    exec(code, names)
    found = [names[kind](step) for step in range(14)]
    assert found == pytest.approx(deepspeed_rates(kind, names["n"], names["total"]))


def test_every_key_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "from-deepspeed.md").read_text(encoding="utf-8")
    names = {key.key.rpartition(".")[2] for key in read_deepspeed(DOCUMENTED)}
    assert [name for name in sorted(names - {"loss"}) if not re.search(rf"\b{name}\b", page)] == []


def test_the_calls_that_the_command_prints_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deepspeed = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(deepspeed))
    assert main(["migrate", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "optimizer.clip_grad_norm_(0.5) before optimizer.step()" in printed
    model = nn.Linear(4, 4)
    names: dict[str, Any] = {"zeroshard": zeroshard, "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    calls = script_lines(read_deepspeed(path), path)
    assert all(line in printed for line in calls)
    exec("\n".join(calls), names)
    assert names["config"] == Config(stage=2, precision="bf16", offload="host")
    zeroshard.unwrap(model)


def test_the_command_fails_for_what_it_cannot_do_and_suggests_to_handle_only_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"weight_quantization": {"enabled": True}, "gradient_clipping": 1.0}))
    assert main(["migrate", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "without a counterpart:\n  weight_quantization = " in printed
    assert "quantized weights are not supported" in printed
    assert "handled=['gradient_clipping']" in printed
    assert main(["migrate", str(path), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["options"] == {"stage": 0, "precision": "fp32"} and not record["can_be_migrated"]
    assert {key["key"]: key["kind"] for key in record["keys"]}["gradient_clipping"] == SCRIPT
    assert main(["migrate", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("deepspeed", "message"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage must be 0, 1, 2 or 3, got 4"),
        ({"zero_optimization": {"stage": "two"}}, "zero_optimization.stage must be 0, 1, 2 or 3, got 'two'"),
        ({"train_batch_size": -8}, "train_batch_size must be at least 1, got -8"),
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu must be at least 1, got 0"),
        ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps must be at least 1, got -1"),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": -5}},
            "zero_optimization.reduce_bucket_size must be at least 0, got -5",
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": -1}},
            "zero_optimization.stage3_prefetch_bucket_size must be at least 0, got -1",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": -0.5}}},
            "zero_optimization.offload_optimizer.ratio must be at least 0, got -0.5",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.5}}},
            "zero_optimization.offload_optimizer.ratio must be at most 1, got 1.5",
        ),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale must be at least 0, got -1"),
        ({"gradient_allreduce_op": "max"}, 'gradient_allreduce_op must be "mean" or "sum", got \'max\''),
        (
            {"communication_data_type": "float"},
            'communication_data_type must be "fp16", "bf16" or "fp32", got \'float\'',
        ),
        (
            {"data_types": {"grad_accum_dtype": "fp64"}},
            'data_types.grad_accum_dtype must be "fp16", "bf16" or "fp32", got \'fp64\'',
        ),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled must be true, false or \"auto\", got 'yes'"),
    ],
)
def test_what_deepspeed_itself_refuses_is_one_line(
    deepspeed: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(deepspeed))
    assert main(["migrate", str(path)]) == 2
    printed, told = capsys.readouterr()
    assert told == f"zeroshard migrate: {message}: correct the DeepSpeed configuration\n"
    assert printed == ""


def test_nothing_and_auto_are_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    open_sizes = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "sub_group_size": None}
    deepspeed = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": None,
        "communication_data_type": None,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": "auto",
            "offload_param": {"device": "auto"},
            "mics_shard_size": -1,
            **open_sizes,
        },
    }
    path.write_text(json.dumps(deepspeed))
    assert main(["migrate", str(path)]) == 0


def test_quantized_collectives_are_checked_with_the_other_options() -> None:
    keys = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    deepspeed = {"zero_optimization": {"stage": 3, **keys}, "bf16": {"enabled": True}}
    with pytest.raises(ValueError, match="reduce_wire='int8' sends gradients in 8 bits, but reduce_dtype asks for"):
        Config.from_deepspeed(deepspeed, reduce_dtype="fp32")
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
