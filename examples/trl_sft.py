"""TRL's supervised fine-tuning with LoRA. One line differs from plain TRL: it is marked.

    torchrun --standalone --nproc-per-node 2 examples/trl_sft.py

On CPUs add `--use_cpu --bf16 false --ddp_backend gloo`: all options of SFTConfig are options here. The base is a small
Llama with random weights, or a directory given by --model. DPOTrainer and GRPOTrainer are used in the same way.
"""

from dataclasses import dataclass, field
from typing import Any

import datasets
import peft
import transformers
from trl import SFTConfig, SFTTrainer

from zeroshard.integrations.transformers import ZeroTrainerMixin
from zeroshard.train import shakespeare


class ZeroSFTTrainer(ZeroTrainerMixin, SFTTrainer):  # new: use this class where SFTTrainer was
    """SFTTrainer with the argument `zero`."""


@dataclass
class Arguments(SFTConfig):
    """The arguments of SFTTrainer, with other defaults, and those of this file."""

    output_dir: str = "runs/trl_sft"
    max_steps: int = 30
    learning_rate: float = 1e-2
    max_length: int = 64
    logging_steps: int = 10
    report_to: str = "none"
    model: str = field(default="", metadata={"help": "directory of a model and its tokenizer"})
    stage: int = field(default=3, metadata={"help": "ZeRO stage: 0, 1, 2 or 3"})


def load(path: str) -> tuple[Any, Any]:
    """Return the base model and its tokenizer."""
    if path:
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        return model, transformers.AutoTokenizer.from_pretrained(path)
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)  # 256 bytes and 3 special tokens; no files needed
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.1,  # not 0.02: with a frozen head of small random weights, all logits would be close to 0
    )
    return transformers.LlamaForCausalLM(config), tokenizer


def main() -> None:
    """Fine-tune, and save the adapter."""
    parser = transformers.HfArgumentParser(Arguments)
    (args,) = parser.parse_args_into_dataclasses()
    transformers.set_seed(args.seed)
    model, tokenizer = load(args.model)
    speeches = [speech for speech in shakespeare()[:100_000].split("\n\n") if len(speech) > 20]
    trainer: Any = ZeroSFTTrainer(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_dict({"text": speeches}),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        zero={"stage": args.stage},  # new, and optional: stage 3 is the default
    )
    trainer.train()
    trainer.save_model()  # on all ranks: the first one writes what all of them send
    if trainer.is_world_process_zero():
        accuracy = [log["mean_token_accuracy"] for log in trainer.state.log_history if "mean_token_accuracy" in log]
        print(f"accuracy of the next byte: {accuracy[0]:.3f}, then {accuracy[-1]:.3f}")
    trainer.end()


if __name__ == "__main__":
    main()
