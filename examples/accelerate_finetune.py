"""Accelerate's own text classification example, made small. One line differs from plain Accelerate: it is marked.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_finetune.py  # on CPUs with --cpu
    torchrun --standalone --nproc-per-node 2 examples/accelerate_finetune.py --resume  # on any number of ranks

A BERT learns from scratch to say whether most words of a sequence are "positive" ones. Everything that Accelerate does
around the model stays as it is: loaders, accumulation, clipping, the schedule, metrics, checkpoints.
"""

import argparse
from pathlib import Path

import torch
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from zeroshard.integrations.accelerate import ZeroAccelerator as Accelerator  # was: from accelerate import Accelerator

WORDS, LENGTH = 64, 15  # words of the second half of the vocabulary are positive; an odd number has a majority


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Fine-tune with Accelerate and zeroshard.")
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--mixed-precision", default="no", choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true", help="train on CPUs")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--project", type=Path, default=Path("runs/accelerate"), help="directory of checkpoints and model"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint")
    return parser.parse_args()


def get_dataloaders(batch_size: int) -> tuple[DataLoader[tuple[torch.Tensor, ...]], ...]:
    """Return loaders of training and evaluation data."""
    tokens = torch.randint(WORDS, (1100, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ((tokens >= WORDS // 2).float().mean(dim=1) > 0.5).long()
    train, held_out = TensorDataset(tokens[:1000], labels[:1000]), TensorDataset(tokens[1000:], labels[1000:])
    return DataLoader(train, batch_size, shuffle=True), DataLoader(held_out, batch_size)


def main() -> None:
    """Train, evaluate and save."""
    args = parse()
    accelerator = Accelerator(
        zero={"stage": args.stage},  # new, and optional: stage 3 is the default
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(str(args.project), automatic_checkpoint_naming=True, total_limit=1),
    )
    set_seed(42)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train_loader, eval_loader = get_dataloaders(batch_size=16)
    steps = len(train_loader) * args.epochs // accelerator.gradient_accumulation_steps
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, schedule
    )
    first_epoch = 0
    if args.resume:
        accelerator.load_state()
        latest = max((args.project / "checkpoints").iterdir(), key=lambda path: int(path.name.split("_")[-1]))
        first_epoch = accelerator.project_configuration.iteration = int(latest.name.split("_")[-1]) + 1

    for epoch in range(first_epoch, args.epochs):
        model.train()
        for tokens, labels in train_loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=labels).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        correct = 0
        for tokens, labels in eval_loader:
            with torch.no_grad():
                guesses = model(input_ids=tokens).logits.argmax(dim=-1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            correct += int((guesses == labels).sum())
        accelerator.print(f"epoch {epoch + 1}  accuracy {correct / len(eval_loader.dataset):.2f}")
        accelerator.save_state()

    state_dict = accelerator.get_state_dict(model)  # on all ranks; whole on the first
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.project / "model", state_dict=state_dict)
    accelerator.end_training()


if __name__ == "__main__":
    main()
