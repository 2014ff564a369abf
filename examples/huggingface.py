"""Train a causal language model of transformers, unmodified, in one's own loop, and let it speak.

    torchrun --standalone --nproc-per-node 2 examples/huggingface.py
    torchrun --standalone --nproc-per-node 2 examples/huggingface.py --model DIRECTORY  # of a model on this machine

Without --model a tiny Llama begins anew, on bytes. With it, the stored weights go straight into the ranks' partitions.
Either way no rank holds the whole model before, during or after training, unless --save asks for it.
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
from zeroshard.train.data.corpus import shakespeare
from zeroshard.train.models.huggingface import open_model


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a model of transformers with zeroshard.")
    parser.add_argument("--model", type=Path, help="directory with config.json, safetensors and a tokenizer")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--context", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--save", type=Path, help="directory for the trained model, as save_pretrained writes it")
    return parser.parse_args()


def build(path: Path | None) -> tuple[Any, Callable[[nn.Module], None], Any]:
    """Return a model on the meta device, the function that gives its modules their values, and a tokenizer."""
    if path is not None:
        stored = open_model(path)  # looks at the files' headers; init_fn reads each tensor when its turn has come
        return stored.module, stored.init_fn, transformers.AutoTokenizer.from_pretrained(path)
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)  # 256 bytes and 3 special tokens; needs no files
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
    with torch.device("meta"):  # shapes without memory
        model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model, model._init_weights, tokenizer  # transformers' own initialisation, module by module


def train(model: Any, optimizer: Any, tokens: torch.Tensor, args: argparse.Namespace) -> None:
    """Run `args.steps` steps on random pieces of the text, and print how they went."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)  # every rank reads other pages
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
                print(f"step {step:3d}  loss {mean.item():.3f}")  # nats a token


def main() -> None:
    """Join the process group, train, speak, and leave it."""
    args = parse()
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # a GPU for each rank of this machine
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)
    model, init_fn, tokenizer = build(args.model)
    adamw = torch.optim.AdamW(model.parameters(), lr=args.lr)
    _, optimizer = zeroshard.shard(model, adamw, stage=3, init_fn=init_fn)  # the model stays the same object
    tokens = tokenizer.encode(shakespeare()[:200_000], add_special_tokens=False)
    train(model, optimizer, torch.tensor(tokens), args)

    prompt = tokenizer("ROMEO. ", return_tensors="pt", add_special_tokens=False).to(model.device)
    said = model.eval().generate(**prompt, max_new_tokens=40, do_sample=False)  # all ranks together, the same tokens
    if dist.get_rank() == 0:
        print(repr(tokenizer.decode(said[0])))
        print(zeroshard.report(model))
    if args.save is not None:
        with zeroshard.gathered(model):  # whole on every rank; open_model(…).save writes tensor by tensor instead
            if dist.get_rank() == 0:
                model.save_pretrained(args.save)
                tokenizer.save_pretrained(args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
