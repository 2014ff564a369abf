"""Train an unmodified causal language model of transformers in your own loop, and generate text.

    torchrun --standalone --nproc-per-node 2 examples/huggingface.py
    torchrun --standalone --nproc-per-node 2 examples/huggingface.py --model DIRECTORY  # a local model

Without --model, a tiny Llama on bytes is trained from scratch. With it, weights are read directly into the shards.
In both cases no rank ever holds the full model, except for --save.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

import zeroshard
from zeroshard.integrations.pretrained import from_pretrained
from zeroshard.train import shakespeare


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a model of transformers with zeroshard.")
    parser.add_argument("--model", type=Path, help="directory with config.json, safetensors and a tokenizer")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--context", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--save", type=Path, help="directory for the trained model, in the format of save_pretrained")
    return parser.parse_args()


def build(path: Path | None) -> tuple[Any, Callable[[nn.Module], None] | None, Any]:
    """Return a model without values, a function that initializes its modules, and a tokenizer."""
    if path is not None:
        model: Any = from_pretrained(transformers.AutoModelForCausalLM, path, dtype=torch.float32)
        return model, None, transformers.AutoTokenizer.from_pretrained(path)  # shard() reads the weights
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)  # 256 bytes and 3 special tokens; no files needed
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device("meta"):  # no memory is allocated
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model, model._init_weights, tokenizer  # transformers' own initialisation


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
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0 or step == args.steps:
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:3d}  loss {mean.item():.3f}")  # in nats per token


def main() -> None:
    """Initialize the process group, train, generate, and save."""
    args = parse()
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one GPU per local rank
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)
    model, init_fn, tokenizer = build(args.model)
    adamw = torch.optim.AdamW(model.parameters(), lr=args.lr)
    _, optimizer = zeroshard.shard(model, adamw, stage=3, init_fn=init_fn)  # the model is changed in place
    tokens = tokenizer.encode(shakespeare()[:200_000], add_special_tokens=False)
    train(model, optimizer, torch.tensor(tokens), args)

    prompt = tokenizer("ROMEO. ", return_tensors="pt", add_special_tokens=False).to(model.device)
    said = model.eval().generate(**prompt, max_new_tokens=40, do_sample=False)  # all ranks get the same tokens
    if dist.get_rank() == 0:
        print(repr(tokenizer.decode(said[0])))
        print(zeroshard.report(model))
    if args.save is not None:
        with zeroshard.gathered(model):  # the full model on every rank; zeroshard.save() and export() avoid that
            if dist.get_rank() == 0:
                model.save_pretrained(args.save)
                tokenizer.save_pretrained(args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
