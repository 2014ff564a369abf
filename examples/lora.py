"""Fine-tune a transformers model with PEFT's LoRA; base and adapters are partitioned over the ranks.

    torchrun --standalone --nproc-per-node 2 examples/lora.py --save adapter

The frozen base takes its bytes divided by the number of ranks, without gradients or optimizer states. --save writes a
normal PEFT adapter. `zeroshard train --model DIRECTORY --lora` does the same without code.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers

import zeroshard
from zeroshard.train import shakespeare


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Fine-tune a model of transformers with LoRA and zeroshard.")
    parser.add_argument("--model", type=Path, help="directory of the base and its tokenizer (default: a tiny Llama)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--context", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--save", type=Path, help="directory for the adapter")
    return parser.parse_args()


def build(path: Path | None) -> tuple[Any, Any]:
    """Return the base model, in full on every rank, and a tokenizer. For large models see huggingface.py."""
    if path is not None:
        base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return base, transformers.AutoTokenizer.from_pretrained(path)
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)  # 256 bytes and 3 special tokens; no files needed
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.1,  # not 0.02: with a frozen head of small random weights, all logits would be close to 0
    )
    return transformers.AutoModelForCausalLM.from_config(config), tokenizer


def train(model: Any, optimizer: Any, tokens: torch.Tensor, args: argparse.Namespace) -> None:
    """Train for `args.steps` steps on random sequences of the text, and print the loss."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)  # different sequences on every rank
    model.train()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(tokens) - args.context, (args.batch, 1), generator=generator)
        batch = tokens[starts + torch.arange(args.context)].to(model.device)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0 or step == args.steps:
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:3d}  loss {mean.item():.3f}")  # in nats per token


def save(model: Any, directory: Path) -> None:
    """Save the adapter with PEFT, without gathering the base."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    adapter = {name: zeroshard.full_parameter(model, name) for name in names}  # on all ranks
    if dist.get_rank() == 0:
        model.save_pretrained(directory, state_dict=adapter)


def main() -> None:
    """Initialize the process group, fine-tune, print a report, and save."""
    args = parse()
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one GPU per local rank
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)
    base, tokenizer = build(args.model)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(base, lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=args.lr)
    _, optimizer = zeroshard.shard(model, adamw, stage=3)  # the model is changed in place
    tokens = tokenizer.encode(shakespeare()[:200_000], add_special_tokens=False)
    train(model, optimizer, torch.tensor(tokens), args)

    report = zeroshard.report(model)
    states = report.memory["optimizer states", "device"].now
    if dist.get_rank() == 0:
        print(report)
        print(f"trained: {sum(p.numel() for p in trained):,} of {report.parameters:,} parameters")
        if_all_trained = 8 * report.parameters // report.ranks
        print(f"optimizer states: {states:,} B per rank; {if_all_trained:,} B if all parameters were trained")
    if args.save is not None:
        save(model, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
