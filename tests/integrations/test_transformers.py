"""ZeroTrainer against transformers' own Trainer under DDP: losses, gradient norms and weights of two ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from plain import Tensors
from ranks import run_processes

import zeroshard

transformers = pytest.importorskip("transformers")

ADAPTER = {
    "r": 2,
    "lora_alpha": 4,
    "target_modules": "all-linear",
    "task_type": "CAUSAL_LM",
    "init_lora_weights": False,
}


class Texts(torch.utils.data.Dataset[Any]):
    """Random tokens of different lengths, padded; the labels of padding count for nothing."""

    def __init__(self, size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(4, 32, (size, 12), generator=generator)
        self.lengths = torch.randint(4, 12, (size,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensors:
        is_text = torch.arange(12) < self.lengths[index]
        ids = torch.where(is_text, self.rows[index], 0)
        return {"input_ids": ids, "attention_mask": is_text.long(), "labels": torch.where(is_text, ids, -100)}


def llama(seed: int = 0, lora: bool = False) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    model = transformers.LlamaForCausalLM(config)
    if lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(**ADAPTER))
    return model


def forget_accelerators() -> None:
    """Forget what transformers and Accelerate remember of an earlier case."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def be_launched(rank: int, world: int) -> None:
    """Set what torchrun sets."""
    forget_accelerators()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ["MASTER_PORT"] = "0"  # the harness has made the process group
    transformers.utils.logging.disable_progress_bar()


def arguments(folder: Path, kind: Any = None, **options: Any) -> Any:
    kind = kind or transformers.TrainingArguments
    given = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "average_tokens_across_devices": True,
    }
    return kind(str(folder), **{**given, **options})


def history(trainer: Any, *keys: str) -> list[list[float]]:
    """What the trainer has logged in each step under these keys."""
    keys = keys or ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [[log[key] for log in trainer.state.log_history if key in log] for key in keys]


def weights(trainer: Any) -> Tensors:
    """The whole trained weights, on every rank."""
    model = trainer.model
    if zeroshard.is_sharded(model):
        return zeroshard.state_dict(model, rank=None, trainable_only=True)
    state = model.state_dict(keep_vars=True)
    return {name: value.detach().clone() for name, value in state.items() if value.requires_grad}


def assert_same(one: Any, other: Any, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, check_dtype=False)


def train(kind: Any, folder: Path, lora: bool = False, zero: Any = None, resume: Any = None, **options: Any) -> Any:
    extra = {} if zero is None else {"zero": zero}
    data = {"train_dataset": Texts(24), "eval_dataset": Texts(7, seed=1)}
    trainer = kind(model=llama(lora=lora), args=arguments(folder, **options), **data, **extra)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def zero_trainer() -> Any:
    from zeroshard.integrations.transformers import ZeroTrainer

    return ZeroTrainer


# ------------------------------------------------------------------------------------------------------- training


def compare(rank: int, folder: Path, stages: list[int], runs: list[dict[str, Any]], tolerance: float = 2e-5) -> None:
    """Train with Trainer's own DDP, not compiled, then with each stage: logs and weights are the same."""
    for options in runs:
        be_launched(rank, 2)
        eager = {name: value for name, value in options.items() if not name.startswith("torch_compile")}
        plain = train(transformers.Trainer, folder, **eager)
        assert isinstance(plain.model_wrapped, torch.nn.parallel.DistributedDataParallel)
        expected = history(plain), weights(plain), plain.state.total_flos
        assert len(expected[0][0]) == options.get("max_steps", 4) and expected[2] > 0
        for stage in stages:
            be_launched(rank, 2)
            trainer = train(zero_trainer(), folder, zero={"stage": stage}, **options)
            assert zeroshard.is_sharded(trainer.model)
            found = history(trainer), weights(trainer), trainer.state.total_flos
            assert_same(found, expected, tolerance)


def test_trains_like_ddp(tmp_path: Path) -> None:
    options = {"max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 2}
    run_processes(2, compare, tmp_path, [0, 1, 3], [{**options, "lora": lora} for lora in (False, True)])


def test_training_arguments_mean_what_they_mean_with_ddp(tmp_path: Path) -> None:
    runs: list[dict[str, Any]] = [
        {"optim": "adafactor", "label_smoothing_factor": 0.1},
        {"optim": "sgd", "optim_args": "momentum=0.9", "lr_scheduler_type": "cosine", "warmup_steps": 1},
        {"optim": "adamw_torch_fused", "weight_decay": 0.3, "gradient_checkpointing": True, "max_grad_norm": 0.0},
        {"optim": "rmsprop", "average_tokens_across_devices": False, "gradient_checkpointing": True, "lora": True},
        {"torch_compile": True, "torch_compile_backend": "eager", "neftune_noise_alpha": 5.0, "max_steps": 2},
    ]
    run_processes(2, compare, tmp_path, [3], [{"max_steps": 3, **run} for run in runs], 1e-3)


def evaluate_train_twice(rank: int, folder: Path) -> None:
    def make(kind: Any, **extra: Any) -> Any:
        be_launched(rank, 2)
        args = arguments(folder, max_steps=2, eval_strategy="steps", eval_steps=2, label_names=["labels"])
        return kind(llama(), args, train_dataset=Texts(24), eval_dataset=Texts(7, seed=1), **extra)

    plain = make(transformers.Trainer)
    before = plain.evaluate()["eval_loss"], plain.predict(Texts(5, seed=2)).predictions
    plain = make(transformers.Trainer)  # another one: after evaluate(), Trainer 5.22 would train without DDP
    plain.train()
    plain.train()
    for stage in (1, 3):
        trainer = make(zero_trainer(), zero={"stage": stage})
        assert_same((trainer.evaluate()["eval_loss"], trainer.predict(Texts(5, seed=2)).predictions), before)
        trainer.train()
        trainer.train()
        assert_same((history(trainer), weights(trainer)), (history(plain), weights(plain)))


def train_in_16_bits(rank: int, folder: Path) -> None:
    be_launched(rank, 2)
    plain = train(transformers.Trainer, folder, bf16=True, eval_strategy="steps", eval_steps=2)
    for stage, lora in ((1, False), (3, False), (3, True)):
        be_launched(rank, 2)
        path = folder / f"{stage}-{lora}"
        trainer = train(zero_trainer(), path, lora, {"stage": stage}, bf16=True, eval_strategy="steps", eval_steps=2)
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}
        if not lora:
            assert_same(history(trainer), history(plain), 5e-3)
        trainer.save_model()
        dist.barrier()
        if not lora:  # saved as with DDP, in fp32, and said so: `from_pretrained` would round the weights
            assert json.loads((path / "config.json").read_text())["dtype"] == "float32"
            loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
            assert_same(dict(loaded.named_parameters()), weights(trainer), 0)
            assert loaded.dtype == torch.float32


def own_optimizer(rank: int, folder: Path) -> None:
    """Optimizer and scheduler of the user's, callbacks, a fresh model for each train()."""

    class Callback(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.rates: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])

    def run(kind: Any, **extra: Any) -> Any:
        be_launched(rank, 2)
        model, callback = llama(), Callback()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        data = {"train_dataset": Texts(24), "callbacks": [callback], **extra}
        trainer = kind(model, arguments(folder, max_steps=2), optimizers=(optimizer, schedule), **data)
        trainer.train()
        be_launched(rank, 2)
        again = kind(model_init=lambda: llama(), args=arguments(folder, max_steps=2), **data)
        again.train()
        again.train()
        return history(trainer), weights(trainer), callback.rates, history(again), weights(again)

    assert_same(run(zero_trainer(), zero={"stage": 3}), run(transformers.Trainer))


def test_trains_after_an_evaluation_and_again(tmp_path: Path) -> None:
    run_processes(2, evaluate_train_twice, tmp_path)
    run_processes(2, own_optimizer, tmp_path)


def test_mixed_precision_is_close_to_ddp_and_saves_fp32(tmp_path: Path) -> None:
    run_processes(2, train_in_16_bits, tmp_path)


# ---------------------------------------------------------------------------------------------------- checkpoints

SAVING = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "max_steps": 3}


def save(rank: int, folder: Path, lora: bool) -> Any:
    """Leave a checkpoint of step 2 by Trainer and one by ZeroTrainer; return losses, norms and weights of step 3."""
    be_launched(rank, 2)
    plain = train(transformers.Trainer, folder / "plain", lora, **SAVING)
    be_launched(rank, 2)
    trainer = train(zero_trainer(), folder / "zero", lora, {"stage": 3}, **SAVING)
    assert_same((history(trainer), weights(trainer)), (history(plain), weights(plain)))
    dist.barrier()
    assert {path.name for path in (folder / "zero").iterdir()} == {"checkpoint-2", "checkpoint-3"}
    files = {file.name for file in (folder / "plain/checkpoint-2").iterdir()} - {"optimizer.pt"}
    assert {file.name for file in (folder / "zero/checkpoint-2").iterdir()} == files | {"zeroshard", "latest"}
    return [series[-1:] for series in history(plain)], weights(plain)


def resume(rank: int, world: int, folder: Path, stage: int, lora: bool, expected: Any) -> None:
    options = {**SAVING, "per_device_train_batch_size": 4 // world, "save_strategy": "no"}
    be_launched(rank, world)
    checkpoint = str(folder / "checkpoint-2")
    trainer = train(zero_trainer(), folder / "resumed", lora, {"stage": stage}, checkpoint, **options)
    assert_same(([series[-1:] for series in history(trainer)], weights(trainer)), expected)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_resumes_on_other_ranks_at_another_stage_and_from_a_plain_trainer(tmp_path: Path, lora: bool) -> None:
    expected, _ = run_processes(2, save, tmp_path, lora)
    run_processes(1, resume, 1, tmp_path / "zero", 1, lora, expected)
    run_processes(2, resume, 2, tmp_path / "plain", 3, lora, expected)
    if not lora:
        run_processes(4, resume, 4, tmp_path / "zero", 3, lora, expected)


def find_best(rank: int, folder: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"save_total_limit": 1, "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_steps": 3}
    for lora in (False, True):
        be_launched(rank, 2)
        plain = train(transformers.Trainer, folder / f"plain-{lora}", lora, load_best_model_at_end=True, **options)
        assert plain.state.best_global_step == 1  # of 3: the rate is too high
        for only in (False, True):
            be_launched(rank, 2)
            path = folder / f"zero-{lora}"  # the second run replaces what the first has left there
            more = {**options, "load_best_model_at_end": True, "save_only_model": only}
            trainer = train(zero_trainer(), path, lora, {"stage": 3}, **more)
            assert trainer.state.best_global_step == 1
            assert_same(weights(trainer), weights(plain), 1e-4)
            trainer.save_model(str(path / "best"))
            dist.barrier()
            assert [file.name for file in path.glob("checkpoint-*")] == ["checkpoint-1"]
            assert (path / "checkpoint-1/zeroshard").is_dir() != only
            if lora:
                import peft

                loaded: Any = peft.PeftModel.from_pretrained(llama(), path / "best", is_trainable=True)
            else:
                loaded = transformers.AutoModelForCausalLM.from_pretrained(path / "best")
            assert_same({n: p for n, p in loaded.named_parameters() if p.requires_grad}, weights(plain), 1e-4)


def test_loads_and_saves_the_best_model(tmp_path: Path) -> None:
    run_processes(2, find_best, tmp_path)


def save_two_adapters(rank: int, folder: Path) -> None:
    """A frozen second adapter is saved like the trained one, and so is an embedding that an adapter targets."""
    import peft

    saved = []
    for kind, extra in ((transformers.Trainer, {}), (zero_trainer(), {"zero": {"stage": 3}})):
        be_launched(rank, 2)
        targets = ["q_proj", "embed_tokens"]
        model = peft.get_peft_model(llama(), peft.LoraConfig(**{**ADAPTER, "target_modules": targets}))
        model.add_adapter("frozen", peft.LoraConfig(**ADAPTER))
        trainer = kind(model, arguments(folder / kind.__name__, max_steps=1), train_dataset=Texts(24), **extra)
        trainer.train()
        trainer.save_model()
        dist.barrier()
        import safetensors.torch

        files = sorted((folder / kind.__name__).rglob("*.safetensors"))
        assert [file.parent.name for file in files] == [kind.__name__, "frozen"]
        saved.append([safetensors.torch.load_file(file) for file in files])
    assert_same(saved[1], saved[0])


def test_saves_frozen_adapters_too(tmp_path: Path) -> None:
    run_processes(2, save_two_adapters, tmp_path)


def save_other_adapters(rank: int, folder: Path) -> None:
    """PEFT lists modules that are trained as a whole by their state_dict(), and runs prompts to save them."""
    import peft
    import safetensors.torch

    prompts = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    dora = {"target_modules": ["q_proj"], "use_dora": True, "modules_to_save": ["down_proj", "lm_head"]}
    one = {"target_modules": ["q_proj"], "target_parameters": ["down_proj.weight"]}  # of fused experts, mostly
    lora = [peft.LoraConfig(**{**ADAPTER, **more}) for more in ({"modules_to_save": ["lm_head"]}, dora, one)]
    for number, config in enumerate([*lora, prompts]):
        saved = []
        for kind, extra in ((transformers.Trainer, {}), (zero_trainer(), {"zero": {"stage": 3}})):
            be_launched(rank, 2)
            torch.manual_seed(1)  # of the adapter
            model = peft.get_peft_model(llama(), config)
            path = folder / str(number) / kind.__name__
            trainer = kind(model, arguments(path, max_steps=3), train_dataset=Texts(24), **extra)
            trainer.train()
            trainer.save_model()
            dist.barrier()
            saved.append(safetensors.torch.load_file(path / "adapter_model.safetensors"))
        assert saved[0].keys() == saved[1].keys()
        assert_same(saved[1], saved[0])


def test_saves_whole_modules_and_prompts_of_adapters(tmp_path: Path) -> None:
    run_processes(2, save_other_adapters, tmp_path)


def test_a_checkpoint_of_two_runs_is_rejected(tmp_path: Path) -> None:
    from zeroshard.integrations.transformers import _has_states

    assert not _has_states(str(tmp_path))
    (tmp_path / "zeroshard").mkdir()
    assert _has_states(str(tmp_path))
    (tmp_path / "optimizer.pt").touch()
    with pytest.raises(ValueError, match=r"has both 'zeroshard' and 'optimizer\.pt', of two runs"):
        _has_states(str(tmp_path))


# ------------------------------------------------------------------------------------------------------- generate


def translate(rank: int, folder: Path) -> None:
    from zeroshard.integrations.transformers import ZeroSeq2SeqTrainer

    def run(kind: Any, **extra: Any) -> tuple[list[Any], list[int]]:
        be_launched(rank, 2)
        torch.manual_seed(0)
        config = transformers.T5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0,
            pad_token_id=0, dropout_rate=0.0, initializer_factor=3.0,
        )  # fmt: skip
        model = transformers.T5ForConditionalGeneration(config)
        model.generation_config.eos_token_id = list(range(1, 12))
        options: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 16, "max_steps": 2}
        options |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1}
        options |= {"optim": "sgd", "learning_rate": 1e-4}
        args = arguments(folder, transformers.Seq2SeqTrainingArguments, **options)
        data = {"train_dataset": Texts(24), "eval_dataset": Texts(9, seed=1)}
        score = {"compute_metrics": lambda result: {"sum": int(result.predictions.sum())}}
        trainer = kind(model, args, **data, **score, **extra)
        lengths, generate = [], model.generate

        def counted(*inputs: Any, **kwargs: Any) -> Any:
            output = generate(*inputs, **kwargs)
            lengths.append(output.shape[1])
            return output

        model.generate = counted
        trainer.train()
        predicted = trainer.predict(Texts(5, seed=2)).predictions
        return [history(trainer), history(trainer, "eval_sum"), np.array(predicted), weights(trainer)], lengths

    expected, lengths = run(transformers.Seq2SeqTrainer)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, lengths)
    assert gathered[0] != gathered[1]  # the ranks end at different lengths
    for stage in (1, 3):
        found, _ = run(ZeroSeq2SeqTrainer, zero={"stage": stage})
        assert_same(found, expected, 1e-4)


def test_generates_in_evaluation_with_different_lengths_on_the_ranks(tmp_path: Path) -> None:
    run_processes(2, translate, tmp_path)


# --------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "options",
    [
        {"auto_find_batch_size": True},
        {"save_on_each_node": True},
        {"bf16_full_eval": True},
        {"optim": "lomo"},
        {"optim": "galore_adamw_layerwise", "optim_target_modules": ["q_proj"]},
        {"fsdp": "full_shard"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_rejects_arguments_that_it_cannot_follow(tmp_path: Path, options: dict[str, Any]) -> None:
    forget_accelerators()
    given = {"ddp_backend": None, **options}
    fsdp = given.pop("fsdp", None)  # TrainingArguments would set variables of the environment
    args = arguments(tmp_path, **given)
    args.fsdp = fsdp or args.fsdp
    with pytest.raises(ValueError, match=next(iter(options))):
        zero_trainer()(llama(), args)


def test_rejects_options_that_shard_does_not_have(tmp_path: Path) -> None:
    forget_accelerators()
    args = arguments(tmp_path, ddp_backend=None)
    with pytest.raises(TypeError, match="did you mean 'stage'"):
        zero_trainer()(llama(), args, zero={"stag": 3})
    args.deepspeed = {"zero_optimization": {"stage": 3}}
    with pytest.raises(ValueError, match="another way to shard"):
        zero_trainer()(llama(), args, zero={"stage": 3})


def test_what_it_overrides_and_uses_of_trainer_is_there() -> None:
    """Where a name is gone or takes other arguments, an override would silently have no effect."""
    import inspect

    from zeroshard.integrations.transformers import ZeroTrainerMixin

    mixin, base = vars(ZeroTrainerMixin), transformers.Trainer
    ours = {"__init__", "compute_ref_log_probs", "_shard_for_inference", "_sharded_optimizer", "_load_weights"}
    overridden = {name for name, value in mixin.items() if inspect.isfunction(value)} - ours
    assert len(overridden) == 10
    for name in overridden:
        names = [list(inspect.signature(getattr(kind, name)).parameters) for kind in (ZeroTrainerMixin, base)]
        assert names[0] == names[1], name
        assert "Trainer" in getattr(base, name).__qualname__
    source = inspect.getsource(transformers.trainer)
    for used in (
        "self._move_model_to_device(",
        "self._wrap_model(self.model, training=False)",
        "self._prepare_for_training(",
        "self._load_from_checkpoint(resume_from_checkpoint)",
        "self._load_optimizer_and_scheduler(resume_from_checkpoint)",
        "self._save_optimizer_and_scheduler(output_dir)",
        "self._load_best_model()",
        "self._has_mixed_mesh_grads(model)",
        "len(self.accelerator._models) == 0",
    ):
        assert used in source, used
    assert callable(base._issue_warnings_after_load) and callable(base._save)


# ---------------------------------------------------------------------------------------------------- guide


def follow_guide(rank: int, folder: Path, blocks: list[str]) -> None:
    be_launched(rank, 2)
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(folder):
        for block in blocks:
            if "resume_from_checkpoint" in block:
                be_launched(rank, 2)  # a new program
            exec(compile(block, "docs/transformers.md", "exec"), names)


def test_the_code_of_the_guide_runs(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    page = (Path(__file__).parents[2] / "docs/transformers.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 4
    run_processes(2, follow_guide, tmp_path, blocks)
