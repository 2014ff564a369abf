"""A transformers model loaded without values is, once sharded, the one that transformers loads."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from plain import Tensors, adamw, masters, sharded, take_step
from ranks import RanksFailed, run_processes, seeded
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.auto.auto_factory import _BaseAutoModelClass

import zeroshard
from zeroshard.integrations.pretrained import from_pretrained
from zeroshard.utils import stored_tensor
from zeroshard.utils.stored_tensor import StoredTensor, stored_files

WIDE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**WORDS, **WIDE, "num_key_value_heads": 2, "max_position_embeddings": 32}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
MODELS: dict[str, tuple[Callable[[], Any], Any]] = {  # what is saved, and the class it is loaded as
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**WORDS, **GPT2)),
        transformers.AutoModelForCausalLM,
    ),  # tied
    "llama": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
        transformers.AutoModelForCausalLM,
    ),  # has a buffer that is not stored
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=61, d_model=16, d_ff=24, d_kv=4, num_layers=2, num_heads=4, decoder_start_token_id=0
            )
        ),
        transformers.AutoModelForSeq2SeqLM,
    ),  # encoder, decoder and head are tied
    "mixtral": (
        lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA, num_local_experts=4)),
        transformers.AutoModelForCausalLM,
    ),  # experts are stored one by one, and stacked by the model
    "bert": (
        lambda: transformers.BertModel(transformers.BertConfig(vocab_size=61, **WIDE)),
        transformers.AutoModelForSequenceClassification,
    ),  # the head is new, and the stored names have no prefix
    "vit": (
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**WIDE, image_size=8, patch_size=4)),
        transformers.ViTForImageClassification,
    ),
    "resnet": (
        lambda: transformers.ResNetForImageClassification(
            transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
        ),
        transformers.AutoModelForImageClassification,
    ),  # has buffers that are stored
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each model as save_pretrained writes it, in several files, with values that are none of the initial ones."""
    root = tmp_path_factory.mktemp("models")
    for kind, (build, _) in MODELS.items():
        with seeded(1):
            model = build()
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.data.add_(torch.randn_like(tensor).abs(), alpha=0.1)
        model.save_pretrained(root / kind, max_shard_size="12KB")
        assert (root / kind / "model.safetensors.index.json").is_file()
    return {kind: root / kind for kind in MODELS}


def batch(model: Any, rank: int) -> Tensors:
    draw = torch.Generator().manual_seed(rank)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=draw), "labels": torch.tensor([0, 1])}
    words = torch.randint(3, 61, (2, 8), generator=draw)
    return {"input_ids": words, "labels": words if "Classification" not in type(model).__name__ else words[:, 0] % 2}


def trained(model: Any, rank: int, options: dict[str, Any]) -> tuple[Any, Tensors]:
    """Shard a model and train a step; return it and its values before."""
    options = dict(options)
    if "mesh" in options:
        sizes, names = options.pop("mesh")
        options["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), **options)
    before = masters(model)
    model(**batch(model, 0 if "tensor" in str(options) else rank)).loss.backward()
    optimizer.step()
    return model, before


def load_and_train(rank: int, kind: str, path: str, options: dict[str, Any]) -> int:
    """Compare with transformers' own loading, before and after a step; return the bytes that this rank has read."""
    auto_class = MODELS[kind][1]
    torch.manual_seed(0)
    plain, before = trained(auto_class.from_pretrained(path), rank, options)
    torch.manual_seed(rank)  # a new head is drawn by each rank, and rank 0's counts
    model = from_pretrained(auto_class, path)
    assert not model.training
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    files = list(stored_files(model).values())
    assert len(files) > 1
    read_before = sum(file.bytes_read for file in files)  # buffers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_tensor, "MAX_UNUSED_BYTES", 0)  # in a tensor this small, nearly all would be read
        model, loaded = trained(model, rank, options)
    for name, values in before.items():
        assert torch.equal(loaded[name], values), name
        assert type(model.get_parameter(name)) is type(plain.get_parameter(name))
        assert torch.equal(zeroshard.full_parameter(model, name), zeroshard.full_parameter(plain, name)), name
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    return sum(file.bytes_read for file in files) - read_before


@pytest.mark.parametrize(
    ("kind", "world", "options"),
    [
        ("gpt2", 2, {"stage": 3, "precision": "bf16"}),
        ("llama", 3, {"stage": 3}),
        ("t5", 2, {"stage": 1}),
        ("mixtral", 3, {"stage": 3, "bucket_size": 500}),
        ("bert", 2, {"stage": 2, "offload": "host", "precision": "bf16"}),
        ("bert", 2, {"stage": 3, "offload": {"optimizer": "host", "parameters": "host"}}),
        ("resnet", 2, {"stage": 3}),
    ],
)
def test_ranks_read_their_shards_and_nothing_twice(
    kind: str, world: int, options: dict[str, Any], saved: dict[str, Path]
) -> None:
    counts = run_processes(world, load_and_train, kind, str(saved[kind]), options)
    model = from_pretrained(MODELS[kind][1], saved[kind])
    stored = sum(p.nbytes for p in model.parameters() if isinstance(p, StoredTensor))
    assert sum(counts) == stored
    assert max(counts) < stored * 0.8


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("vit", {"stage": 0}),
        ("llama", {"stage": 3, "mesh": ((2, 1), ("replicate", "shard"))}),
        ("llama", {"stage": 3, "mesh": ((1, 2), ("shard", "tensor"))}),
        ("gpt2", {"stage": 1, "mesh": ((1, 2), ("shard", "tensor")), "precision": "bf16"}),
    ],
)
def test_replicas_and_tensor_ranks_read_what_they_hold(
    kind: str, options: dict[str, Any], saved: dict[str, Path]
) -> None:
    counts = run_processes(2, load_and_train, kind, str(saved[kind]), options)
    stored = sum(p.nbytes for p in from_pretrained(MODELS[kind][1], saved[kind]).parameters())
    if "tensor" in str(options):  # norms and biases are on both
        assert stored <= sum(counts) < 1.2 * stored
    else:
        assert counts == [stored, stored]


def assert_same_state(model: Any, plain: Any) -> None:
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    for name, values in expected.items():
        assert state[name].dtype == values.dtype, name
        assert torch.equal(state[name], values), name
    shared = [[id(p) for p in m.parameters()] for m in (model, plain)]
    assert len(set(shared[0])) == len(set(shared[1]))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, "float16"])
def test_the_state_and_the_random_numbers_are_those_of_transformers(
    kind: str, dtype: Any, saved: dict[str, Path]
) -> None:
    torch.manual_seed(3)
    plain = MODELS[kind][1].from_pretrained(saved[kind], dtype=dtype)
    after = torch.rand(1)
    torch.manual_seed(3)
    model = from_pretrained(MODELS[kind][1], saved[kind], dtype=dtype)
    assert torch.equal(torch.rand(1), after)
    assert_same_state(model, plain)
    assert type(model) is type(plain)
    assert not any(isinstance(buffer, StoredTensor) for buffer in model.buffers())
    assert model.config.to_dict() == plain.config.to_dict()


def test_weights_are_rounded_as_often_as_transformers_rounds_them(saved: dict[str, Path]) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(saved["llama"], dtype=torch.bfloat16).float()
    model = from_pretrained(transformers.AutoModelForCausalLM, saved["llama"], dtype=torch.bfloat16).float()
    assert_same_state(model, plain)
    model, _ = zeroshard.shard(model, precision="fp32")
    assert torch.equal(zeroshard.full_parameter(model, "lm_head.weight"), plain.lm_head.weight)


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_tied_weight_that_is_stored_twice_is_tied_if_the_values_are_equal(
    is_equal: bool, saved: dict[str, Path], tmp_path: Path
) -> None:
    plain = transformers.GPT2LMHeadModel.from_pretrained(saved["gpt2"])
    plain.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + (0 if is_equal else 1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = from_pretrained(transformers.GPT2LMHeadModel, tmp_path)
    assert (model.lm_head.weight is model.transformer.wte.weight) == is_equal
    assert_same_state(model, transformers.GPT2LMHeadModel.from_pretrained(tmp_path))


def adapted(model: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(model, config)


def train_adapters(rank: int, path: str) -> None:
    auto_class = transformers.AutoModelForCausalLM
    states = []
    for load in (auto_class.from_pretrained, lambda path: from_pretrained(auto_class, path)):
        torch.manual_seed(rank)
        model = load(path)
        model.resize_token_embeddings(70)
        model.gradient_checkpointing_enable()
        model = adapted(model)
        stored = [name for name, p in model.named_parameters() if isinstance(p, StoredTensor)]
        assert len(stored) in (0, 19), stored  # the adapters, the embedding and the heads are not
        model.train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        model, optimizer = zeroshard.shard(model, torch.optim.AdamW(parameters, lr=0.1), stage=3)
        for _ in range(2):
            take_step(optimizer, model(**batch(model.base_model.model, rank)).loss)
        states.append(masters(model))
    assert states[0].keys() == states[1].keys()
    for name, values in states[0].items():
        assert torch.equal(values, states[1][name]), name


def test_adapters_and_resized_embeddings_train_as_on_a_loaded_model(saved: dict[str, Path]) -> None:
    run_processes(2, train_adapters, str(saved["llama"]))


def test_a_copy_and_a_pickle_have_the_values(saved: dict[str, Path]) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(saved["gpt2"])
    model = from_pretrained(transformers.AutoModelForCausalLM, saved["gpt2"])
    copied = copy.deepcopy(model)
    assert isinstance(copied.lm_head.weight, StoredTensor)
    assert copied.lm_head.weight is copied.transformer.wte.weight
    assert_same_state(zeroshard.shard(copied, stage=0)[0], plain)
    pickled = pickle.loads(pickle.dumps(model))
    assert type(pickled.lm_head.weight) is torch.nn.Parameter
    assert_same_state(pickled, plain)
    words = batch(model, 0)["input_ids"]
    assert torch.equal(model(words).logits, plain(words).logits)  # weights are read as they are used


def test_a_plan_counts_no_memory_for_weights_in_files(saved: dict[str, Path]) -> None:
    model, _ = sharded(
        from_pretrained(transformers.AutoModelForCausalLM, saved["llama"]),
        adamw,
        stage="auto",
        planning={"micro_batch": 1, "sequence": 8},
    )
    plain = transformers.AutoModelForCausalLM.from_pretrained(saved["llama"])
    assert torch.equal(zeroshard.full_parameter(model, "lm_head.weight"), plain.lm_head.weight)


def test_a_model_cannot_be_saved_before_it_is_read(saved: dict[str, Path], tmp_path: Path) -> None:
    model = from_pretrained(transformers.AutoModelForCausalLM, saved["gpt2"])
    with pytest.raises(RuntimeError, match=r"has no memory yet, .* load it with transformers' own from_pretrained"):
        model.save_pretrained(tmp_path)


def test_weights_cannot_be_changed_before_they_are_read(saved: dict[str, Path]) -> None:
    model = from_pretrained(transformers.AutoModelForCausalLM, saved["llama"])
    for change in (model.lm_head.weight.data.zero_, lambda: torch.nn.init.normal_(model.lm_head.weight)):
        with pytest.raises(RuntimeError, match=r"would write into a parameter of shape \(61, 16\)"):
            change()
    model(**batch(model, 0)).loss.backward()
    with pytest.raises(RuntimeError, match=r"change it after zeroshard.shard\(\)"):
        torch.optim.SGD(model.parameters(), lr=1.0).step()


def load_own_copy(rank: int, paths: list[str]) -> None:
    zeroshard.shard(from_pretrained(transformers.AutoModelForCausalLM, paths[rank]))


def test_ranks_with_different_files_are_rejected(saved: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "other"
    with seeded(9):
        MODELS["llama"][0]().save_pretrained(path, max_shard_size="12KB")
    with pytest.raises(RanksFailed, match=r"rank 1: 'file model-0000.-of-.*' is \d+ bytes with checksum"):
        run_processes(2, load_own_copy, [str(saved["llama"]), str(path)])


def test_what_cannot_be_loaded_is_rejected(saved: dict[str, Path], tmp_path: Path) -> None:
    auto_class, path = transformers.AutoModelForCausalLM, saved["llama"]
    for name, value, remedy in (
        ("device_map", "auto", "omit it"),
        ("quantization_config", {"load_in_4bit": True}, "train 16-bit"),
        ("tp_plan", "auto", "a mesh with a tensor axis"),
    ):
        with pytest.raises(ValueError, match=rf"does not take {name}: .*{remedy}"):
            from_pretrained(auto_class, path, **{name: value})
    with pytest.raises(TypeError, match=r"model_class is a model class of transformers, .* got <class 'torch"):
        from_pretrained(torch.nn.Linear, path)
    with pytest.raises(ValueError, match=r"CsmForConditionalGeneration has a from_pretrained\(\) of its own"):
        from_pretrained(transformers.CsmForConditionalGeneration, path)

    transformers.AutoModelForCausalLM.from_pretrained(path).save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(described | quantised))
    with pytest.raises(ValueError, match=r"has quantised weights, which cannot be sharded: pass 16-bit"):
        from_pretrained(auto_class, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(described))

    tensors = load_file(tmp_path / "model.safetensors")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-5])
    with pytest.raises(ValueError, match=r"not a complete safetensors file .* would end at byte"):
        from_pretrained(auto_class, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model.bin, expected safetensors files: convert them"):
        from_pretrained(auto_class, tmp_path)

    tensors["lm_head.weight"] = torch.zeros(5, 16)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match=r"ignore_mismatched_sizes"):  # transformers' own error
        from_pretrained(auto_class, tmp_path)


def test_the_private_names_of_transformers_are_there() -> None:
    assert list(inspect.signature(transformers.PreTrainedModel._load_pretrained_model).parameters) == [
        "model",
        "state_dict",
        "checkpoint_files",
        "load_config",
        "expected_keys",
    ]
    assert "cls._load_pretrained_model(" in inspect.getsource(transformers.PreTrainedModel.from_pretrained)
    assert "_get_model_class(config, cls._model_mapping)" in inspect.getsource(_BaseAutoModelClass.from_pretrained)
