"""Train the reference GPT with Ray Train: Ray starts the workers, and starts them again after a failure.

    python examples/ray_train.py --workers 2 --storage runs

All workers write one zeroshard checkpoint, each its own shards, into the storage directory, which all nodes share. When
a worker dies, Ray ends the others and starts a new group, which goes on from the last checkpoint: with the same
numbers as an undisturbed run. --kill-at 6 shows it: the last worker kills itself at step 6, once.
"""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device

import zeroshard
from zeroshard.models import GPT, GPTConfig
from zeroshard.train import shakespeare


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a GPT on Shakespeare with Ray Train and zeroshard.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="one GPU per worker, instead of CPUs")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences per worker and step")
    parser.add_argument("--context", type=int, default=64, help="characters per sequence")
    parser.add_argument("--checkpoint-every", type=int, default=4, help="steps")
    parser.add_argument("--storage", type=Path, default=Path("runs"), help="directory that all nodes share")
    parser.add_argument("--kill-at", type=int, help="step at which the last worker kills itself, once")
    return parser.parse_args()


def train(args: dict[str, Any]) -> None:
    """Train on one worker. Ray has initialized the process group."""
    rank, workers = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    device = get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model: Any = GPT(GPTConfig(vocab_size=128, context=args["context"], layers=2, heads=2, width=64))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # instead of ray.train.torch.prepare_model(model), which would wrap it in DDP
    model, optimizer = zeroshard.shard(model, adamw, stage=args["stage"])

    checkpoints = Path(args["storage"]) / "checkpoints"
    metrics = {"step": 0}
    if (checkpoints / "latest").exists():
        metrics = zeroshard.load(checkpoints, model, optimizer).extra
    step = metrics["step"]
    text = torch.frombuffer(bytearray(shakespeare()[:200_000].encode()), dtype=torch.uint8).long()
    while step < args["steps"]:
        step += 1
        generator = torch.Generator().manual_seed(step * workers + rank)  # so that a resumed run draws the same
        starts = torch.randint(len(text) - args["context"] - 1, (args["batch"], 1), generator=generator)
        batch = text[starts + torch.arange(args["context"] + 1)].to(device)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == args["kill_at"] and rank == workers - 1:
            kill_once(Path(args["storage"]) / "killed")
        metrics = {"step": step, "loss": loss.item(), "norm": norm.item()}
        if step % args["checkpoint_every"] == 0 or step == args["steps"]:
            zeroshard.save(checkpoints / f"step-{step}", model, optimizer, extra=metrics, keep=2)
        ray.train.report(metrics)
    if rank == 0:
        (Path(args["storage"]) / "result.json").write_text(json.dumps(metrics))


def kill_once(mark: Path) -> None:
    """Kill this process, unless it was done before."""
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Start the workers, and again up to three times when one fails."""
    args = parse()
    storage = args.storage.absolute()
    storage.mkdir(parents=True, exist_ok=True)
    if not ray.is_initialized():  # on a cluster: ray.init(address="auto")
        ray.init(num_cpus=args.workers + 1, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(args), "storage": str(storage)},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=RunConfig(storage_path=str(storage), name="ray", failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()
    metrics = json.loads((storage / "result.json").read_text())
    print(f"step {metrics['step']}  loss {metrics['loss']:.4f}  norm {metrics['norm']:.4f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
