"""TRL's trainers with ZeroTrainerMixin against their own runs under DDP, full and with LoRA."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import run_processes
from test_transformers import ADAPTER, assert_same, be_launched, history, weights

import zeroshard

if find_spec("trl") is None:  # not importorskip: it takes two seconds in every worker
    pytest.skip("TRL is not installed", allow_module_level=True)
WORDS = "a bird can sing of the red sun and we all hear it go by in June".split()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = {name: number for number, name in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def save_inputs(folder: Path) -> None:
    """Write data and a tiny model: DPO and GRPO load the reference model from where the policy came from."""
    import datasets

    columns = {
        "SFT": {"text": sentences(16, 0, 6)},
        "DPO": {"prompt": sentences(16, 0, 3), "chosen": sentences(16, 1, 3), "rejected": sentences(16, 2, 4)},
        "GRPO": {"prompt": sentences(16, 0, 3)},
    }
    for method, rows in columns.items():
        datasets.Dataset.from_dict(rows).save_to_disk(folder / method)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS) + 3, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "base")


def sentences(count: int, start: int, length: int) -> list[str]:
    generator = torch.Generator().manual_seed(start)
    numbers = [torch.randint(len(WORDS), (length + row % 3,), generator=generator).tolist() for row in range(count)]
    return [" ".join(WORDS[number] for number in row) for row in numbers]


def rewards(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def make(method: str, folder: Path, lora: bool, zero: dict[str, Any] | None, adapter: Any = None, **more: Any) -> Any:
    import datasets
    import peft
    import trl

    from zeroshard.integrations.transformers import ZeroTrainerMixin

    options: dict[str, Any] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 1e-2,
        "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "ddp_backend": "gloo",
        "bf16": False, "max_grad_norm": 0.5, "save_strategy": "no",
    }  # fmt: skip
    if method == "GRPO":
        options |= {"max_completion_length": 8, "num_generations": 4, "beta": 0.1, "temperature": 1.0}
    args = getattr(trl, f"{method}Config")(str(folder / "out"), **{**options, **more})
    kind = getattr(trl, f"{method}Trainer")
    if zero is not None:
        kind = type(f"Zero{method}Trainer", (ZeroTrainerMixin, kind), {})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    if adapter is not None:
        torch.manual_seed(0)
        model = peft.get_peft_model(model, adapter)
    extra: dict[str, Any] = {"zero": zero} if zero is not None else {}
    if lora:
        extra["peft_config"] = peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    if method == "GRPO":
        extra["reward_funcs"] = rewards
    data = {"train_dataset": datasets.load_from_disk(folder / method), "processing_class": tokenizer()}
    return kind(model=model, args=args, **data, **extra)


def compare(rank: int, folder: Path, method: str) -> None:
    for lora in (False, True):
        be_launched(rank, 2)
        plain = make(method, folder, lora, None)
        plain.train()
        keys = {"SFT": ["mean_token_accuracy"], "DPO": ["rewards/margins"], "GRPO": ["kl", "completions/mean_length"]}
        logged = ["loss", "grad_norm", *keys[method]]
        expected = history(plain, *logged), weights(plain)
        assert all(len(series) == 3 for series in expected[0])
        assert max(expected[0][1]) > 0 and max(map(abs, expected[0][2])) > 0
        for stage in [3] if lora else [1, 3]:
            be_launched(rank, 2)
            trainer = make(method, folder, lora, {"stage": stage})
            reference = getattr(trainer, "ref_model", None)
            assert (reference is not None) == (method != "SFT" and not lora)
            assert reference is None or zeroshard.is_sharded(reference)
            trainer.train()
            assert_same((history(trainer, *logged), weights(trainer)), expected, 1e-3)


@pytest.mark.parametrize("method", ["SFT", "DPO", "GRPO"])
def test_trains_like_ddp(tmp_path: Path, method: str) -> None:
    save_inputs(tmp_path)
    run_processes(2, compare, tmp_path, method, env={"HF_HUB_OFFLINE": "1"})


def precompute(rank: int, folder: Path) -> None:
    """The policy is its own reference: it computes log-probabilities before it is trained, sharded all the same."""
    found = []
    for zero in (None, {"stage": 3}):
        be_launched(rank, 2)
        trainer = make("DPO", folder, False, zero, precompute_ref_log_probs=True)
        assert trainer.ref_model is None and zeroshard.is_sharded(trainer.model) == (zero is not None)
        trainer.train()
        dist.barrier()
        for file in (folder / "DPO").glob("cache-*") if rank == 0 else ():
            file.unlink()  # else the next run reads what this one has computed
        dist.barrier()
        found.append((history(trainer, "loss", "grad_norm", "rewards/margins"), weights(trainer)))
    assert_same(found[1], found[0], 1e-3)


def test_precomputes_the_reference_of_dpo(tmp_path: Path) -> None:
    save_inputs(tmp_path)
    run_processes(2, precompute, tmp_path, env={"HF_HUB_OFFLINE": "1"})


def continue_adapter(rank: int, folder: Path) -> None:
    """The reference is a frozen copy of the adapter: PEFT activates it for a while, and makes it trainable."""
    import peft

    found = []
    for zero in (None, {"stage": 3}):
        be_launched(rank, 2)
        trainer = make("DPO", folder, False, zero, adapter=peft.LoraConfig(**ADAPTER))
        assert set(trainer.model.peft_config) == {"default", "ref"}
        trainer.train()
        found.append((history(trainer, "loss", "grad_norm", "rewards/margins"), weights(trainer)))
    assert_same(found[1], found[0], 1e-3)


def test_dpo_continues_the_adapter_of_a_model(tmp_path: Path) -> None:
    save_inputs(tmp_path)
    run_processes(2, continue_adapter, tmp_path, env={"HF_HUB_OFFLINE": "1"})


def test_what_it_relies_on_in_trl_is_there() -> None:
    import trl

    assert list(inspect.signature(trl.DPOTrainer.compute_ref_log_probs).parameters) == ["self", "model", "inputs"]
    for kind in (trl.DPOTrainer, trl.GRPOTrainer):
        source = inspect.getsource(kind)
        assert "self.ref_model = self.accelerator.prepare_model(self.ref_model, evaluation_mode=True)" in source
    for kind in (trl.SFTTrainer, trl.DPOTrainer, trl.GRPOTrainer):
        assert issubclass(kind, transformers.Trainer)
