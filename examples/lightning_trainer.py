"""Train a character-level GPT on Shakespeare with Lightning's Trainer. One line differs from a script for DDP.

    python examples/lightning_trainer.py --devices 2

The Trainer starts the ranks itself; torchrun works as well. Checkpoints are Lightning's own files: load them with any
strategy, or without one by `LanguageModel.load_from_checkpoint`.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import zeroshard.integrations.lightning  # noqa: F401 - registers the strategies
from zeroshard.models import GPT, GPTConfig
from zeroshard.train import shakespeare


class LanguageModel(pl.LightningModule):
    """A GPT as a plain LightningModule: nothing in it knows about zeroshard."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(GPTConfig(vocab_size=128, context=context, layers=layers, heads=width // 32, width=width))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Return the loss of a batch of characters."""
        loss: torch.Tensor = self.model(batch[:, :-1], batch[:, 1:])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        """Log the loss of a batch that was not trained on."""
        self.log("val_loss", self.model(batch[:, :-1], batch[:, 1:]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW with a cosine schedule."""
        adamw = torch.optim.AdamW(self.parameters(), lr=3e-3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": adamw, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT with Lightning's Trainer and zeroshard.")
    parser.add_argument("--strategy", default="zeroshard_stage_3", help='or "ddp", for comparison')
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--precision", default="32-true", help='"bf16-mixed" on GPUs')
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=512, help="sequences per epoch")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="a multiple of 32")
    parser.add_argument("--context", type=int, default=64, help="characters per sequence")
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--resume", help="a checkpoint, also of another number of devices, stage or strategy")
    return parser.parse_args()


def main() -> None:
    """Train, validate and save the best checkpoint."""
    args = parse()
    pl.seed_everything(0, verbose=False)
    characters = torch.frombuffer(bytearray(shakespeare().encode()), dtype=torch.uint8).long()
    sequences = characters[: (args.samples + 64) * (args.context + 1)].view(-1, args.context + 1)
    best = ModelCheckpoint(args.out, monitor="val_loss")
    trainer = pl.Trainer(
        strategy=args.strategy,  # "zeroshard_stage_3" instead of "ddp": the one line that changes
        devices=args.devices,
        accelerator="gpu" if torch.cuda.device_count() >= args.devices else "cpu",
        precision=args.precision,
        max_epochs=args.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[best],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = LanguageModel(args.layers, args.width, args.context)
    train: Any = DataLoader(sequences[:-64], batch_size=8, shuffle=True)  # type: ignore[arg-type]
    held_out: Any = DataLoader(sequences[-64:], batch_size=8)  # type: ignore[arg-type]
    trainer.fit(model, train, held_out, ckpt_path=args.resume)
    if trainer.is_global_zero:
        print(f"validation loss {float(best.best_model_score or 0):.4f}, checkpoint {best.best_model_path}")


if __name__ == "__main__":
    main()
