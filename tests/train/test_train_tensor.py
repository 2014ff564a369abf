"""`zeroshard train` with layers divided by a tensor axis, activations partitioned and offloaded, and C1 to C5."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from plain import adamw, mesh_of, sharded
from ranks import run_processes, run_threads
from safetensors.torch import load_file
from test_train_command import BRIEF, SHORT_TEXT, SMALL, held_out, kept_weights, losses, record, trained
from torch import nn
from torch.distributed.tensor import DTensor

import zeroshard
from zeroshard.models import CONFIGURATIONS, GPT, GPTConfig
from zeroshard.models.gpt import Block
from zeroshard.planner.state_sizes import predict_memory
from zeroshard.tensor_parallel.plans import tensor_plan_for
from zeroshard.train.commands.train import main, read_options
from zeroshard.train.data.corpus import shakespeare, train_tokenizer
from zeroshard.train.metrics import count_matmul_params
from zeroshard.train.models import HuggingFaceModel, open_language_model
from zeroshard.train.options import Batching, ConfigurationName, DataOptions, ModelOptions, TrainingError
from zeroshard.train.rank import RankInfo
from zeroshard.train.run_directory import RunDirectory
from zeroshard.train.summary import dry_run
from zeroshard.train.training_setup import prepare_training

SHORT = "--steps 6 --eval-every 3 --checkpoint-every 3 --log-every 3".split()
VOCABULARY = 301  # which two ranks cannot divide evenly


def trained_into(rank: int, said: Path, arguments: list[str]) -> None:
    """Be one rank of a job whose output and errors go to files of their own."""
    with output_into(1, f"{said}.{rank}.out"), output_into(2, f"{said}.{rank}.err"):
        trained(rank, arguments)


@contextmanager
def output_into(descriptor: int, path: str) -> Iterator[None]:
    """Have all that this process writes to a descriptor, also past Python, go to a file."""
    kept = os.dup(descriptor)
    with open(path, "wb") as file:
        os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(kept, descriptor)
        os.close(kept)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The same batches on two ranks, and on two pairs of ranks that divide each layer; and what the second said."""
    root = tmp_path_factory.mktemp("tensor")
    alone, pairs = root / "alone", root / "pairs"
    options = [*SMALL, *SHORT_TEXT, *SHORT]
    run_processes(2, trained, [*options, "--out", str(alone)])
    divided = "--tensor 2 --configuration C5 --stage 3".split()
    run_processes(4, trained_into, root / "said", [*options, *divided, "--out", str(pairs)])
    assert [path.read_text() for path in sorted(root.glob("said.*err"))] == [""] * 4
    return alone, pairs, "".join(path.read_text() for path in sorted(root.glob("said.*out")))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of Hugging Face models: a Llama, a GPT-2 with dropout, and one that nobody has a plan for."""
    wide = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    configs = {
        "llama": transformers.LlamaConfig(
            **wide, vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=32
        ),
        "gpt2": transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=32, attn_pdrop=0.0, resid_pdrop=0.4
        ),
        "one layer": transformers.LlamaConfig(**(wide | {"num_hidden_layers": 1}), vocab_size=VOCABULARY),
        "neox": transformers.GPTNeoXConfig(**wide, vocab_size=VOCABULARY, max_position_embeddings=32),
    }
    root = tmp_path_factory.mktemp("models")
    for name, config in configs.items():
        config.bos_token_id = config.eos_token_id = None
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
        train_tokenizer([shakespeare()[:20_000]], 300).save(str(root / name / "tokenizer.json"))
    return {name: root / name for name in configs}


# ------------------------------------------------------------------------------------------------ a divided run


def norms(out: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["grad_norm"] for line in lines if "grad_norm" in line}


def test_losses_are_those_of_the_undivided_run(runs: tuple[Path, Path, str]) -> None:
    alone, pairs, _ = runs
    assert sorted(losses(pairs)) == [1, 2, 3, 4, 5, 6] and sorted(held_out(pairs)) == [0, 3, 6]
    assert losses(pairs) == pytest.approx(losses(alone), rel=1e-4)
    assert held_out(pairs) == pytest.approx(held_out(alone), rel=1e-4)
    assert norms(pairs) == pytest.approx(norms(alone), rel=1e-3)
    last = [json.loads(line) for line in (pairs / "metrics.jsonl").read_text().splitlines()][-2]
    assert last["tokens"] == 6 * 12 * 16  # each counts once, though two ranks see it


def test_the_header_and_the_page_say_what_is_divided(runs: tuple[Path, Path, str]) -> None:
    _, pairs, said = runs
    assert "4 on cpu over gloo, in 2 tensor-parallel groups of 2" in said
    assert "C5: stage 3, fp32" in said
    assert "recomputed from inputs kept in host memory, 1/2 on each rank" in said
    found = record(pairs)
    assert (found["ranks"], found["tensor_parallel_ranks"], found["stage"]) == (4, 2, 3)
    page = (pairs / "report.html").read_text()
    assert "tensor parallel over 2" in page and "activations (host)" in page and "activation gather" in page


def test_memory_and_traffic_are_as_promised(runs: tuple[Path, Path, str]) -> None:
    _, pairs, _ = runs
    found = record(pairs)
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=1024, context=16, layers=2, heads=4, width=32))
    assert found["model"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["ddp_state_bytes"] == predict_memory(model, ranks=4, stage=0).states
    expected = predict_memory(model, ranks=4, tensor=2, stage=3).states
    inputs = 2 * 6 * 16 * 32 * 4  # bytes of the two blocks' inputs, of the 6 sequences a rank has
    assert len(found["memory_by_rank"]) == 4
    for rank in found["memory_by_rank"]:
        assert rank["parameters"]["now_bytes"] == expected["parameters"]
        assert rank["gradients"]["peak_bytes"] == expected["gradients"]
        assert rank["activations (host)"]["peak_bytes"] == inputs / 2
    moved = sum(traffic["bytes"] for traffic in found["collectives_per_step"].values())
    assert moved == pytest.approx(sum(found["needed_bytes_per_step"].values()), rel=0.002)
    assert found["collectives_per_step"]["activation gather"] == {"count": 2, "bytes": inputs}


def test_the_model_and_the_sample_are_as_without_it(runs: tuple[Path, Path, str]) -> None:
    alone, pairs, _ = runs
    ours, theirs = (load_file(out / "model" / "model.safetensors") for out in (pairs, alone))
    kept = kept_weights(pairs / "checkpoints" / "step-000006")
    assert ours.keys() == theirs.keys() == kept.keys()
    for name, values in ours.items():
        assert torch.equal(values, kept[name])
        torch.testing.assert_close(values, theirs[name], rtol=1e-3, atol=1e-4)
    assert record(pairs)["samples"] == record(alone)["samples"]
    assert (pairs / "model" / "config.json").read_bytes() == (alone / "model" / "config.json").read_bytes()


def test_a_run_goes_on_with_another_tensor_degree_and_other_ranks(runs: tuple[Path, Path, str], tmp_path: Path) -> None:
    alone, pairs, _ = runs
    for source in (alone, pairs):
        shutil.copytree(source, tmp_path / source.name)
    divided, together = tmp_path / alone.name, tmp_path / pairs.name
    run_processes(2, trained, ["--out", str(divided), "--resume", "--steps", "9", "--tensor", "2"])
    run_processes(2, trained, ["--out", str(together), "--resume", "--steps", "9", "--tensor", "1"])
    assert [record(run)["tensor_parallel_ranks"] for run in (divided, together)] == [2, 1]
    assert sorted(losses(divided)) == list(range(1, 10))
    assert losses(divided) == pytest.approx(losses(together), rel=1e-3)


# ------------------------------------------------------------------------------------------------ Hugging Face models


def test_a_llama_is_divided_from_its_directory_and_saved_as_it_came(models: dict[str, Path], tmp_path: Path) -> None:
    options = [*BRIEF, "--model", str(models["llama"]), "--steps", "3"]
    run_processes(1, trained, [*options, "--out", str(tmp_path / "alone")])
    run_processes(2, trained, [*options, "--out", str(tmp_path / "pair"), "--tensor", "2", "--recompute"])
    assert losses(tmp_path / "pair") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    assert held_out(tmp_path / "pair") == pytest.approx(held_out(tmp_path / "alone"), rel=1e-4)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pair/model", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    kept = kept_weights(tmp_path / "pair/checkpoints/step-000003")
    assert all(torch.equal(parameter, kept[name]) for name, parameter in model.named_parameters())


def test_ranks_that_divide_a_layer_drop_the_same_activations(models: dict[str, Path], tmp_path: Path) -> None:
    """Or what each keeps of a block's input would be parts of different inputs, which P_a refuses."""
    options = [*BRIEF, "--model", str(models["gpt2"]), "--steps", "1", "--eval-every", "0"]
    run_processes(2, trained, [*options, "--out", str(tmp_path / "run"), "--tensor", "2", "--recompute"])
    assert sorted(losses(tmp_path / "run")) == [1]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", ["llama", "neox", "adapters", "one layer"])
def test_a_hugging_face_model_recomputes_its_blocks(kind: str, offload: bool, models: dict[str, Path]) -> None:
    """By zeroshard's own checkpoints: the same gradients, bit for bit, as with everything kept."""
    path = models["llama" if kind == "adapters" else kind]
    ids = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1))
    gradients: list[dict[str, torch.Tensor]] = []
    for options in ({}, {"recompute": not offload, "offload_activations": offload}):
        torch.manual_seed(0)
        opened = open_language_model(ModelOptions(model=str(path), lora=kind == "adapters", **options), DataOptions())
        assert isinstance(opened, HuggingFaceModel)
        blocks = opened.base_model.model.layers if kind != "neox" else opened.base_model.gpt_neox.layers
        assert ["forward" in vars(block) for block in blocks] == [bool(options)] * len(blocks)
        torch.manual_seed(0)
        model, _ = zeroshard.shard(opened.module, init_fn=opened.init_fn)
        opened.loss(model, ids[:, :-1], ids[:, 1:]).backward()
        trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        found = {name: zeroshard.full_gradient(model, name) for name in trainable}
        gradients.append({name: gradient for name, gradient in found.items() if gradient is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    assert all(torch.equal(values, gradients[1][name]) for name, values in gradients[0].items())


# ------------------------------------------------------------------------------------------------ what is divided, told


def gpt(**changes: Any) -> GPT:
    shape = {"vocab_size": VOCABULARY, "context": 8, "layers": 2, "heads": 4, "width": 32}
    return GPT(GPTConfig(**(shape | changes)))


def hugging_face(kind: str, models: dict[str, Path]) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(models[kind])  # type: ignore[no-any-return]


MAKERS: dict[str, Callable[[dict[str, Path]], nn.Module]] = {
    "gpt": lambda _: gpt(),
    "tied gpt without biases": lambda _: gpt(tied=True, bias=False),
    "llama": lambda models: hugging_face("llama", models),
    "gpt2": lambda models: hugging_face("gpt2", models),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_plan_tells_without_ranks_what_torch_then_divides(kind: str, models: dict[str, Path]) -> None:
    model = MAKERS[kind](models)
    plan = tensor_plan_for(model)
    assert plan is not None

    def body(rank: int) -> None:
        ours = copy.deepcopy(model)
        shares = plan.tp_shards(ours, 2, rank)
        mesh = mesh_of((1, 2), "shard tensor")
        zeroshard.shard(ours, mesh=mesh, stage=0, timeout=20)
        divided = {
            name: p for name, p in ours.named_parameters() if isinstance(p, DTensor) and p.placements[0].is_shard()
        }
        assert shares.keys() == divided.keys()
        for name, parameter in divided.items():
            assert parameter.placements[0].dim == shares[name].dim
            assert parameter.to_local().shape == shares[name].local_shape
        assert count_matmul_params(ours) == count_matmul_params(
            model
        )  # whole matrices, which all ranks multiply together

    run_threads(2, body)


@pytest.mark.parametrize(
    ("stage", "shape", "precision"), [(0, (2, 2), "bf16"), (2, (2, 2), None), (3, (2, 2), "bf16"), (3, (1, 4), None)]
)
def test_the_states_of_a_divided_gpt_are_predicted_to_the_byte(
    stage: int, shape: tuple[int, int], precision: str | None
) -> None:
    options: dict[str, Any] = {"stage": stage, "precision": precision, "bucket_size": 4096}
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with torch.device("meta"):
        predicted = predict_memory(gpt(), ranks=4, tensor=shape[1], **options)

    def body(rank: int) -> dict[str, int]:
        model, optimizer = sharded(gpt(), adamw, mesh=mesh_of(shape, "shard tensor"), timeout=20, **options)
        model(tokens, tokens).backward()
        optimizer.step()
        assert count_matmul_params(model) == count_matmul_params(gpt())  # whole, also where the values are not there
        return {kind: held.peak for (kind, _), held in zeroshard.report(model).memory.items()}

    for rank, held in enumerate(run_threads(4, body)):
        for kind in ("parameters", "gradients", "master weights"):
            most = held.get(kind, 0)
            # the vocabulary is not divided evenly: only the first rank of the tensor axis has as much
            assert most == predicted.states[kind] if rank % shape[1] == 0 else most <= predicted.states[kind], kind


def test_ranks_that_no_division_fits_are_refused_by_the_planner() -> None:
    with pytest.raises(ValueError, match="4 ranks are not a multiple of the 3"):
        predict_memory(gpt(), ranks=4, tensor=3)
    with pytest.raises(ValueError, match="no plan is known to shard a Linear"):
        predict_memory(nn.Linear(2, 2), ranks=4, tensor=2)


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_sets_stage_and_activations(name: str) -> None:
    options, wanted = read_options(["--configuration", name]), CONFIGURATIONS[name]
    assert options.sharding.stage == wanted.stage
    assert options.model.has_activation_checkpointing and options.model.checkpoint_kwargs == wanted.checkpoint_options
    assert f"ZeRO      {name}: stage {wanted.stage}, fp32" in dry_run(options, ranks=2)


def test_all_configurations_have_a_flag() -> None:
    assert get_args(ConfigurationName) == tuple(CONFIGURATIONS)


@pytest.mark.parametrize(
    ("file", "flags", "stage", "offload"),
    [
        ("", ["--stage", "3", "--configuration", "C5"], 3, True),  # a flag counts more, wherever it stands
        ("stage = 0", ["--configuration", "C3"], 2, False),  # but a file's less than the command line's configuration
        ('configuration = "C5"\nstage = 1', [], 1, True),
        ('configuration = "C5"\nstage = 1', ["--configuration", "C2"], 1, False),
        ('configuration = "C5"', ["--no-offload-activations"], 2, False),
    ],
)
def test_options_given_with_a_configuration_override_it(
    file: str, flags: list[str], stage: int, offload: bool, tmp_path: Path
) -> None:
    (tmp_path / "a.toml").write_text(file)
    options = read_options(["--config", str(tmp_path / "a.toml"), *flags])
    assert (options.sharding.stage, options.model.offload_activations) == (stage, offload)
    assert options.model.recompute
    run = RunDirectory(tmp_path)
    run.write_config({name: value for name, value in options.to_flat_dict().items() if name not in ("out", "config")})
    again = read_options(["--out", str(tmp_path), "--resume"])
    assert (again.sharding, again.model) == (options.sharding, options.model)
    assert read_options(["--out", str(tmp_path), "--resume", "--configuration", "C1"]).sharding.stage == 1


def test_the_gpt_recomputes_its_blocks_and_offloading_implies_it() -> None:
    for flags, kept in (("", False), ("--recompute", True), ("--offload-activations --layers 1", True)):
        options = read_options(flags.split())
        module = open_language_model(options.model, options.data).module
        blocks = [block for block in module.modules() if isinstance(block, Block)]
        assert blocks and ["forward" in vars(block) for block in blocks] == [kept] * len(blocks)
        assert ("blocks    recomputed" in dry_run(options, ranks=2)) == kept


def test_a_dry_run_tells_the_memory_of_a_divided_model() -> None:
    command = "--model paper-100b --ranks 400 --tensor 16 --configuration C4 --precision bf16 --micro-batch 32"
    told = dry_run(read_options(command.split()), ranks=400)
    assert "400 on cpu, in 25 tensor-parallel groups of 16" in told
    assert "recomputed from inputs kept on the device, 1/16 on each rank" in told
    assert "800 sequences × 1024 tokens: 32 per rank and backward" in told
    parameters = next(line.split() for line in told.splitlines() if line.startswith("parameters"))
    assert parameters[1] == "12.72"  # GB: 2 · 101.5e9 / 16, and a little that is not divided


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tensor", "3", "--ranks", "4"], "--tensor 3 does not divide the 4 ranks"),
        (["--tensor", "3", "--ranks", "6"], "the tensor axis has 3 ranks, which do not divide the model's 4 heads"),
        (["--tensor", "2", "--ranks", "4", "--batch", "7"], "2 groups of 2 ranks"),
        (["--tensor", "4", "--ranks", "4", "--model", "llama"], "do not divide the model's 2 key-value heads"),
        (["--tensor", "2", "--ranks", "2", "--model", "neox"], "no plan is known to shard a GPTNeoXForCausalLM"),
        (["--tensor", "2", "--ranks", "2", "--model", "llama", "--lora"], "no plan is known to shard a PeftModel"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_anything_is_written(
    flags: list[str],
    words: str,
    models: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [str(models.get(flag, flag)) for flag in flags] + ["--device", "cpu", "--out", str(tmp_path / "run")]
    assert main([*given, "--dry-run"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("zeroshard train: ") and words in told
    world = RankInfo(0, int(flags[3]), torch.device("cpu"), "gloo")
    with pytest.raises(TrainingError, match=words):
        prepare_training(read_options(given), world)  # as a rank that torchrun has started
    assert not (tmp_path / "run").exists()


def test_ranks_that_divide_a_layer_count_as_one_to_the_batch() -> None:
    assert Batching.resolve(8, None, 4, None, tensor=4) == Batching.resolve(2, None, 4, None)
