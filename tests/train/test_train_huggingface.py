"""Hugging Face models come from their directories into the job, train as they train plainly, and go back unharmed."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from plain import Tensors, assert_close, copied, copied_buffers, masters, take_step
from ranks import run_processes, run_threads, seeded
from torch import nn
from zoo import built

import zeroshard.integrations
from zeroshard.train.data.corpus import train_tokenizer
from zeroshard.train.generation import generate_text
from zeroshard.train.models import HuggingFaceModel, load_trained, open_language_model, output_loss
from zeroshard.train.options import DataOptions, ModelOptions
from zeroshard.utils.safetensors_files import (
    SAFETENSORS_INDEX_FILE,
    SafetensorsWeights,
    TensorInfo,
    write_safetensors,
)
from zeroshard.utils.stored_tensor import StoredTensor

VOCABULARY = 61
SHAPE = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SHAPE, **WIDE, "num_key_value_heads": 2, "max_position_embeddings": 32}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        **SHAPE, n_positions=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),  # tied; its blocks' projections are drawn again by the modules around them
    "llama": lambda: transformers.LlamaConfig(**LLAMA),  # untied, with a buffer that is not stored
    "mixtral": lambda: transformers.MixtralConfig(
        **LLAMA, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5
    ),  # its experts are stored one by one
    "diffllama": lambda: transformers.DiffLlamaConfig(**LLAMA),  # builds a few parameters on the CPU whatever is asked
}
KINDS = list(CONFIGS)


def plain(kind: str, seed: int = 0) -> Any:
    """A model that transformers has built; its values are of some size, so that a wrong one shows."""
    with seeded(seed):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each model as save_pretrained writes it, in several files."""
    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        plain(kind).save_pretrained(root / kind, max_shard_size="12KB")
        assert (root / kind / SAFETENSORS_INDEX_FILE).is_file()
    return {kind: root / kind for kind in KINDS}


def config_only(kind: str, directory: Path, **changes: Any) -> Path:
    config = CONFIGS[kind]()
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(directory)
    return directory


def from_pretrained(path: Path, **options: Any) -> Any:
    """What transformers loads, which must find every tensor and no other."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    assert not any(told.values()), told
    return model.eval()


def tokens(rows: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, 6), generator=torch.Generator().manual_seed(seed))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens(), use_cache=False).logits


def loss_of(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return output_loss(model, model(input_ids=inputs, use_cache=False), targets)


OPENING = threading.Lock()  # transformers changes its classes while it loads: one rank thread at a time


def open_model(path: Path) -> HuggingFaceModel:
    with OPENING:
        return HuggingFaceModel(path)


def lora(path: Path, **options: Any) -> Any:
    with OPENING:
        return open_language_model(ModelOptions(model=str(path), lora=True, **options), DataOptions())


def sharded(model: HuggingFaceModel, **options: Any) -> tuple[Any, Any]:
    trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    options = {"stage": 3, "timeout": 20, "init_fn": model.init_fn, **options}
    return zeroshard.shard(model.module, optimizer, **options)


def train(model: Any, optimizer: Any, rank: int, world: int, steps: int = 2) -> None:
    model.train()
    for step in range(steps):
        part = tokens(seed=10 + step).chunk(world)[rank]
        take_step(optimizer, loss_of(model, part[:, :-1], part[:, 1:]))
    model.eval()


# ---------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_model_computes_what_transformers_computes_and_no_rank_holds_more_than_a_unit(
    kind: str, saved: dict[str, Path]
) -> None:
    def body(rank: int) -> Any:
        model, _ = zeroshard.shard(open_model(saved[kind]).module, stage=3)
        staged = zeroshard.report(model).memory["staging", "device"]
        units = [unit.full_bytes for unit in model._zeroshard.engine.units]
        assert staged.now == 0 and staged.peak <= max(units) < sum(units)
        return logits_of(model), copied_buffers(model)

    wanted = from_pretrained(saved[kind])
    for logits, buffers in run_threads(2, body):
        assert torch.equal(logits, logits_of(wanted))
        assert_same_tensors(buffers, dict(wanted.named_buffers()))


def assert_same_tensors(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_stored_16_bits_are_widened_to_the_master_copy_and_saved_in_16_bits(tmp_path: Path) -> None:
    model = plain("llama").to(torch.bfloat16)
    model.model.norm.float()  # each tensor keeps the dtype it had
    model.save_pretrained(tmp_path / "in")

    def body(rank: int) -> None:
        opened = open_model(tmp_path / "in")
        model, _ = sharded(opened, precision="bf16")
        assert zeroshard.full_parameter(model, "lm_head.weight").dtype == torch.float32
        opened.save(model, tmp_path / "out" if rank == 0 else None)

    run_threads(2, body)
    before, after = dict(SafetensorsWeights(tmp_path / "in")), dict(SafetensorsWeights(tmp_path / "out"))
    assert_same_tensors(after, before)
    assert {name: tensor.dtype for name, tensor in after.items()} == {n: t.dtype for n, t in before.items()}
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16, torch.float32}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_experts_that_are_stored_together_are_loaded_and_saved_so(tmp_path: Path) -> None:
    plain("mixtral").save_pretrained(tmp_path / "in", save_original_format=False)
    opened = open_model(tmp_path / "in")
    model, _ = sharded(opened)
    assert torch.equal(logits_of(model), logits_of(plain("mixtral")))
    opened.save(model, tmp_path / "out")
    assert_same_tensors(dict(SafetensorsWeights(tmp_path / "out")), dict(SafetensorsWeights(tmp_path / "in")))
    assert "model.layers.0.mlp.experts.down_proj" in SafetensorsWeights(tmp_path / "out")


def rewritten(source: Path, target: Path, change: Callable[[Tensors], None]) -> Path:
    """The model of a directory with other tensors."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: tensor.clone() for name, tensor in SafetensorsWeights(source).items()}
    change(tensors)
    entries = [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_safetensors(target / "model.safetensors", entries, tensors.__getitem__, {"format": "pt"})
    return target


def without_prefix(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)


def head_instead_of_embedding(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")


def head_and_embedding(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()


def leftover(tensors: Tensors) -> None:
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool)


@pytest.mark.parametrize("change", [without_prefix, head_instead_of_embedding, head_and_embedding, leftover])
def test_what_transformers_takes_for_the_same_weights_is_loaded(
    change: Any, saved: dict[str, Path], tmp_path: Path
) -> None:
    opened = open_model(rewritten(saved["gpt2"], tmp_path / "model", change))
    assert torch.equal(logits_of(sharded(opened)[0]), logits_of(plain("gpt2")))


# ---------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize(("kind", "recompute"), [("gpt2", False), ("llama", True)])
def test_a_loaded_model_trains_as_plainly(kind: str, recompute: bool, saved: dict[str, Path]) -> None:
    def body(rank: int) -> Tensors:
        opened = open_model(saved[kind])
        if recompute:
            zeroshard.checkpoint_activations(opened.module, opened.blocks)
            assert all("forward" in vars(layer) for layer in opened.base_model.model.layers)
        model, optimizer = sharded(opened)
        train(model, optimizer, rank, 2)
        return masters(model)

    wanted = from_pretrained(saved[kind])
    before = copied(wanted)
    train(wanted, torch.optim.SGD(wanted.parameters(), lr=0.1, momentum=0.9), 0, 1)
    for ours in run_threads(2, body):
        assert_close(ours, copied(wanted), 1e-5)
        assert not torch.equal(ours[next(iter(before))], before[next(iter(before))])


def test_the_loss_is_the_models_own() -> None:
    """Which shifts the targets itself: what follows the last token is ignored by both."""
    model, ids = plain("mixtral"), tokens()
    targets = torch.cat([ids[:, 1:], torch.full((4, 1), -100)], dim=1)
    theirs = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(loss_of(model, ids, targets), theirs.loss)
    with torch.no_grad():  # what is only measured is the cross-entropy alone
        torch.testing.assert_close(loss_of(model, ids, targets), theirs.loss - 0.5 * theirs.aux_loss)
    model.config.output_router_logits = False
    torch.testing.assert_close(loss_of(model, ids, targets), theirs.loss - 0.5 * theirs.aux_loss)


# ------------------------------------------------------------------------------------------------------------ saving


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_model_is_saved_as_it_came(kind: str, saved: dict[str, Path], tmp_path: Path) -> None:
    source = shutil.copytree(saved[kind], tmp_path / "in")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_text(json.dumps({"of": name}))

    def body(rank: int) -> torch.Tensor:
        opened = open_model(source)
        assert opened.tokenizer_path == source / "tokenizer.json"
        model, optimizer = sharded(opened)
        train(model, optimizer, rank, 2)
        opened.save(model, tmp_path / "out" if rank == 0 else None)
        return logits_of(model)

    trained, _ = run_threads(2, body)
    assert (tmp_path / "out" / SAFETENSORS_INDEX_FILE).is_file()
    assert set(SafetensorsWeights(tmp_path / "out")) == set(SafetensorsWeights(source))
    assert torch.equal(logits_of(from_pretrained(tmp_path / "out")), trained)
    assert not torch.equal(trained, logits_of(from_pretrained(source)))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_text() == (source / name).read_text()
    logits, context = load_trained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(logits(tokens()), trained)
    assert context == open_model(source).context


def in_processes(rank: int, source: Path, target: Path) -> torch.Tensor:
    opened = open_model(source)
    model, optimizer = sharded(opened)
    train(model, optimizer, rank, 2)
    opened.save(model, target if rank == 0 else None)
    return logits_of(model)


def test_processes_load_train_and_save(saved: dict[str, Path], tmp_path: Path) -> None:
    first, second = run_processes(2, in_processes, saved["gpt2"], tmp_path / "out")
    assert torch.equal(first, second)
    assert torch.equal(logits_of(from_pretrained(tmp_path / "out")), first)


# ------------------------------------------------------------------------------------------------------ from scratch


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_alone_is_trained_from_scratch_and_saved(kind: str, tmp_path: Path) -> None:
    source = config_only(kind, tmp_path / "in")

    def body(rank: int) -> Any:
        opened = open_model(source / "config.json")
        assert not opened.is_pretrained
        model, optimizer = sharded(opened)
        first = masters(model)
        buffers = copied_buffers(model)
        train(model, optimizer, rank, 2)
        opened.save(model, tmp_path / "out" if rank == 0 else None)
        return first, buffers, logits_of(model)

    (first, buffers, logits), (other, _, _) = run_threads(2, body)
    assert_same_tensors(first, other)
    wanted = built(lambda: transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()))
    assert_same_tensors(buffers, dict(wanted.named_buffers()))
    for name, parameter in wanted.named_parameters():
        ours, spread, count = first[name], parameter.std().item(), parameter.numel()
        if spread == 0:
            assert torch.equal(ours, parameter), name
        elif count > 64:  # within six times the standard error of what two draws differ by
            assert ours.mean().item() == pytest.approx(parameter.mean().item(), abs=9 * spread / count**0.5), name
            assert ours.std().item() == pytest.approx(spread, rel=6 / count**0.5), name
    assert torch.equal(logits_of(from_pretrained(tmp_path / "out")), logits)


def test_weights_from_scratch_are_saved_in_the_configs_dtype(tmp_path: Path) -> None:
    opened = open_model(config_only("llama", tmp_path / "in", dtype=torch.bfloat16) / "config.json")
    assert all(parameter.dtype == torch.float32 for parameter in opened.module.parameters())
    opened.save(sharded(opened)[0], tmp_path / "out")
    assert {tensor.dtype for tensor in SafetensorsWeights(tmp_path / "out").values()} == {torch.bfloat16}


def test_a_modules_values_are_final_when_its_turn_is_over(tmp_path: Path) -> None:
    """So that a checkpoint can overwrite them one by one: no parent draws a child's weight again later."""
    opened = open_model(config_only("gpt2", tmp_path) / "config.json")
    finished: Tensors = {}

    def fill(module: nn.Module) -> None:
        opened.init_fn(module)
        for parameter in module.parameters(recurse=False):
            with torch.no_grad():
                finished[names[parameter]] = parameter.fill_(float(len(finished))).clone()

    names = {parameter: name for name, parameter in opened.module.named_parameters()}
    model, _ = sharded(opened, init_fn=fill)
    assert finished.keys() == dict(model.named_parameters()).keys()
    for name, value in finished.items():
        assert torch.equal(zeroshard.full_parameter(model, name), value), name


# -------------------------------------------------------------------------------------------------------------- LoRA


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_adapters_alone_are_trained_and_load_with_peft(kind: str, saved: dict[str, Path], tmp_path: Path) -> None:
    def body(rank: int) -> torch.Tensor:
        opened = lora(saved[kind], lora_rank=2, lora_alpha=8.0)
        assert "LoRA of rank 2" in opened.description
        model, optimizer = sharded(opened)
        assert torch.equal(logits_of(model), logits_of(plain(kind)))  # B is zero: nothing is changed yet
        first = masters(model)
        down = [value for name, value in first.items() if "lora_A" in name]
        assert down and all(0 < value.abs().max() <= value.shape[1] ** -0.5 for value in down)
        train(model, optimizer, rank, 2)
        for name, value in first.items():
            assert torch.equal(zeroshard.full_parameter(model, name), value) == ("lora_" not in name), name
        opened.save(model, tmp_path if rank == 0 else None)
        return logits_of(model)

    trained, _ = run_threads(2, body)
    told = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (told["base_model_name_or_path"], told["inference_mode"]) == (str(saved[kind].resolve()), True)
    assert not (tmp_path / "config.json").exists()
    theirs = peft.PeftModel.from_pretrained(from_pretrained(saved[kind]), tmp_path)
    torch.testing.assert_close(logits_of(theirs), trained, rtol=0, atol=0)
    assert not torch.equal(trained, logits_of(plain(kind)))
    with torch.no_grad():
        assert torch.equal(load_trained(tmp_path)[0](tokens()), trained)


def test_adapters_need_pretrained_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--lora needs pretrained weights"):
        lora(config_only("gpt2", tmp_path) / "config.json")


def test_the_frozen_base_has_neither_master_copies_nor_optimizer_states(saved: dict[str, Path]) -> None:
    opened = lora(saved["llama"], lora_rank=2, lora_alpha=4.0, lora_targets=("q_proj",))
    trained = sum(parameter.numel() for parameter in opened.module.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in opened.module.parameters()) - trained
    model, optimizer = sharded(opened, precision="bf16")
    train(model, optimizer, 0, 1)
    held = {kind: nbytes.peak for (kind, _), nbytes in zeroshard.report(model).memory.items()}
    padding = 4096  # bytes: each unit's adapters are aligned
    assert 4 * trained <= held["master weights"] <= 4 * trained + padding < 4 * frozen
    assert 4 * trained <= held["optimizer states"] <= 4 * trained + padding
    assert 2 * frozen <= held["parameters"]


# ------------------------------------------------------------------------------------------------------------- facts


def test_facts_for_the_loop(saved: dict[str, Path]) -> None:
    gpt2, llama = open_model(saved["gpt2"]), open_model(saved["llama"])
    for model, name in ((gpt2, "GPT2LMHeadModel"), (llama, "LlamaForCausalLM")):
        assert model.description == f"{name}, 2 layers, width 16"
        assert (model.vocab_size, model.context, model.layers, model.width) == (VOCABULARY, 32, 2, 16)
        assert model.is_pretrained and model.tokenizer_path is None
        assert all(isinstance(parameter, StoredTensor) for parameter in model.module.parameters())
    assert gpt2.module.lm_head.weight is gpt2.module.transformer.wte.weight


# ------------------------------------------------------------------------------------------------------------ errors


def write_config(directory: Path, told: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(told if isinstance(told, str) else json.dumps(told))
    return directory


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("{", "not a valid JSON"),
        ({"hidden_size": 3}, "model_type"),
        ({"model_type": "nonsense"}, "nonsense"),
        ({"model_type": "llama", "hidden_size": 16, "num_attention_heads": 3}, "multiple of the number"),
        ({"model_type": "vit"}, "ViTConfig.*AutoModelForCausalLM"),
        ({"model_type": "bert"}, "is_decoder"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "custom code"),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused(told: Any, words: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, told)
    with pytest.raises(ValueError, match=words) as refused:
        open_model(path if "quantised" in words else path / "config.json")
    assert "\n" not in str(refused.value)


def test_paths_without_a_model_are_refused(saved: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing is downloaded"):
        open_model(tmp_path / "gpt2")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        open_model(tmp_path)
    config_only("llama", tmp_path)
    with pytest.raises(ValueError, match=r"cannot open .*no file named model\.safetensors"):
        open_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, expected safetensors files.*save_pretrained"):
        open_model(tmp_path)
    assert not open_model(tmp_path / "config.json").is_pretrained
    with pytest.raises(ValueError, match="--layers is for presets"):
        open_language_model(ModelOptions(model=str(saved["llama"]), layers=3), DataOptions())


def missing(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]


def unexpected(tensors: Tensors) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)


def misshapen(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = torch.zeros(VOCABULARY + 1, 16)


def without_an_expert(tensors: Tensors) -> None:
    del tensors["model.layers.1.block_sparse_moe.experts.2.w2.weight"]


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("llama", missing, r"missing keys: \['model\.norm\.weight'\]"),
        ("llama", unexpected, r"unexpected keys: \['model\.layers\.2\.mlp\.up_proj\.weight'\]"),
        ("llama", misshapen, r"mismatched keys: .*'lm_head\.weight'.*62, 16.*61, 16"),
        ("mixtral", without_an_expert, r"mlp\.experts\.down_proj"),
    ],
)
def test_weights_of_another_model_are_refused(
    kind: str, change: Any, words: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    path = rewritten(saved[kind], tmp_path / "model", change)
    with pytest.raises(ValueError, match=words):
        open_model(path)


def test_a_missing_library_is_named(saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"LoRA needs peft.*pip install .*\[huggingface\]'"):
        lora(saved["llama"])


def test_generate_reads_no_pickles(saved: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(saved["llama"], tmp_path, dirs_exist_ok=True)
    train_tokenizer(["to be"], 257).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").unlink()
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(saved["llama"])}))
    torch.save({}, tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"neither a model .* nor adapters \(adapter_model\.safetensors\)"):
        generate_text(tmp_path, "to", 1, temperature=0, seed=0)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"none")
    with pytest.raises(ValueError, match="cannot load the model") as refused:
        generate_text(tmp_path, "to", 1, temperature=0, seed=0)
    assert "\n" not in str(refused.value)
