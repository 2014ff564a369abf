"""The options of shard(): what they are by default, and what is refused with which words."""

import ast
import dataclasses
import inspect
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard import Config


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("stagee", "stage"),
        ("bucketsize", "bucket_size"),
        ("bucket_sizes", "bucket_size"),
        ("percision", "precision"),
        ("keep_fp_32", "keep_fp32"),
        ("unit", "units"),
        ("lossscale", "loss_scale"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_right_one(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"unknown option '{name}': did you mean '{meant}'\\?"):
        Config(**{name: 1})


def test_an_option_like_no_other_is_refused_with_all_names() -> None:
    with pytest.raises(TypeError, match="unknown option 'xyzzy': the options are stage, partition, local_steps, outer"):
        Config(xyzzy=1)


def test_shard_refuses_what_config_refuses_and_leaves_the_model_alone() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="did you mean 'stage'"):
        zeroshard.shard(model, stge=3)
    assert type(model.weight) is nn.Parameter
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 4}, "stage must be 0, 1, 2 or 3, got 4"),
        ({"stage": "3"}, "stage must be 0, 1, 2 or 3, got '3'"),
        ({"stage": True}, "stage must be 0, 1, 2 or 3, got True"),
        ({"stage": 2.0}, "stage must be 0, 1, 2 or 3, got 2.0"),
        ({"stage": [3]}, "stage must be 0, 1, 2 or 3, got [3]"),
        ({"precision": "int8"}, "precision must be None, 'fp32', 'bf16', 'fp16' or 'fp8', got 'int8'"),
        ({"precision": torch.bfloat16}, "precision must be None, 'fp32', 'bf16', 'fp16' or 'fp8', got torch.bfloat16"),
        ({"reduce_dtype": "fp8"}, "reduce_dtype must be one of 'fp32', 'bf16', 'fp16' or a torch.dtype, got 'fp8'"),
        ({"reduce_dtype": torch.int32}, "reduce_dtype must be a floating-point torch.dtype, got torch.int32"),
        ({"reduce_dtype": 32}, "reduce_dtype must be a floating-point torch.dtype, got 32"),
        ({"keep_fp32": (3,)}, "keep_fp32 must contain module classes or name patterns, got 3"),
        ({"keep_fp32": 3}, "keep_fp32 must contain module classes or name patterns, got 3"),
        ({"keep_fp32": (int,)}, "keep_fp32 must contain module classes or name patterns, got <class 'int'>"),
        ({"units": (nn.Linear(1, 1),)}, "units must contain module classes or name patterns, got Linear"),
        ({"bucket_size": 0}, "bucket_size must be an integer of at least 1, got 0"),
        ({"bucket_size": 1e6}, "bucket_size must be an integer of at least 1, got 1000000.0"),
        ({"ring": 0}, "ring must be an integer of at least 1, got 0"),
        ({"ring": True}, "ring must be an integer of at least 1, got True"),
        ({"backwards": -1}, "backwards must be an integer of at least 0, got -1"),
        ({"backwards": True}, "backwards must be an integer of at least 0, got True"),
        ({"timeout": 0}, "timeout must be a positive number, got 0"),
        ({"timeout": float("inf")}, "timeout must be a positive number, got inf"),
        ({"heartbeat_timeout": 0}, "heartbeat_timeout must be a positive number, got 0"),
        ({"loss_scale": float("nan")}, "loss_scale must be a positive number, got nan"),
        ({"loss_scale": "dynamic"}, "loss_scale must be a positive number, got 'dynamic'"),
        ({"prefetch": "no"}, "prefetch must be True or False, got 'no'"),
        ({"cast_inputs": None}, "cast_inputs must be True, 'model' or False, got None"),
        ({"broadcast_buffers": 2}, "broadcast_buffers must be True or False, got 2"),
        ({"init_fn": "normal"}, "init_fn"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_wanted(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Config(**options)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Config)])
def test_an_option_cannot_be_changed_later(name: str) -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, getattr(config, name))


def test_options_are_given_by_name_only() -> None:
    with pytest.raises(TypeError):
        Config(3)  # type: ignore[misc]


def test_defaults_partition_everything_and_change_no_number() -> None:
    config = Config()
    assert config.stage == 3
    assert config.precision is None and config.reduce_dtype is None and not config.has_master
    assert config.compute_dtype is None


@pytest.mark.parametrize(
    ("precision", "dtype", "has_master"),
    [("fp32", torch.float32, False), ("bf16", torch.bfloat16, True), ("fp16", torch.float16, True)],
)
def test_precision_says_the_compute_dtype_and_the_master(precision: str, dtype: torch.dtype, has_master: bool) -> None:
    config = Config(precision=precision)
    assert (config.compute_dtype, config.has_master) == (dtype, has_master)


@pytest.mark.parametrize(("given", "kept"), [("fp32", torch.float32), (torch.float64, torch.float64), (None, None)])
def test_reduce_dtype_is_a_name_or_a_dtype(given: Any, kept: torch.dtype | None) -> None:
    assert Config(reduce_dtype=given).reduce_dtype is kept


@pytest.mark.parametrize("name", ["keep_fp32", "units"])
@pytest.mark.parametrize("given", ["blocks.*", nn.LayerNorm, ["blocks.*", nn.LayerNorm]])
def test_patterns_may_be_one_or_several(name: str, given: Any) -> None:
    wanted = tuple(given) if isinstance(given, list) else (given,)
    assert getattr(Config(**{name: given}), name) == wanted


def test_equal_options_are_equal_configs() -> None:
    assert Config(stage=2) == Config(stage=2) != Config(stage=1)
    assert hash(Config(stage=2, units=["a.*"])) == hash(Config(stage=2, units=("a.*",)))


def test_every_option_is_documented_below_its_line() -> None:
    body = ast.parse(inspect.getsource(Config)).body[0].body  # type: ignore[attr-defined]
    documented = {
        line.target.id
        for line, below in pairwise(body)
        if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }
    assert documented == {field.name for field in dataclasses.fields(Config)}
