"""Hugging Face's Trainer on a small Llama. One line differs from plain transformers: it is marked.

    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py  # on CPUs with --use_cpu --ddp_backend gloo
    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --resume_from_checkpoint true  # on any ranks

All options of TrainingArguments are options here. The model learns characters of Shakespeare from scratch. What is in
--output_dir afterwards can be given to `from_pretrained`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset

from zeroshard.integrations.transformers import ZeroTrainer as Trainer  # was: from transformers import Trainer
from zeroshard.train import shakespeare


@dataclass
class Arguments(transformers.TrainingArguments):
    """The arguments of Trainer, with other defaults, and those of this file."""

    output_dir: str = "runs/hf_trainer"
    max_steps: int = 60
    learning_rate: float = 1e-2
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 2
    eval_strategy: str = "steps"
    eval_steps: int = 20
    save_steps: int = 20
    save_total_limit: int = 2
    logging_steps: int = 10
    load_best_model_at_end: bool = True
    stage: int = field(default=3, metadata={"help": "ZeRO stage: 0, 1, 2 or 3"})
    context: int = field(default=64, metadata={"help": "characters per sequence"})


class Pages(Dataset[dict[str, torch.Tensor]]):
    """A text as sequences of characters, by their ASCII number."""

    def __init__(self, text: str, context: int) -> None:
        numbers = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
        self.rows = numbers[: len(numbers) // context * context].view(-1, context)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    """Train, evaluate and save."""
    parser = transformers.HfArgumentParser(Arguments)  # type: ignore[arg-type]
    (args,) = parser.parse_args_into_dataclasses()
    transformers.set_seed(args.seed)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4
    )
    text = shakespeare()
    trainer: Any = Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=args,
        train_dataset=Pages(text[:200_000], args.context),
        eval_dataset=Pages(text[200_000:208_000], args.context),
        zero={"stage": args.stage},  # new, and optional: stage 3 is the default
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint == "true")
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()  # on all ranks: the first one writes what all of them send
    if trainer.is_world_process_zero():
        print(f"perplexity per character: {math.exp(loss):.2f}")
    trainer.end()


if __name__ == "__main__":
    main()
