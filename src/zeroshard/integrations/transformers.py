"""Hugging Face's Trainer, and the trainers that are made of it (TRL's), with ZeRO.

:class:`ZeroTrainer` and :class:`ZeroSeq2SeqTrainer` are transformers' own classes with one more argument, ``zero``: the
options of :func:`zeroshard.shard`. :class:`ZeroTrainerMixin` adds it to any other trainer. :func:`from_pretrained`
leaves the weights of a model in their files until it is sharded.

[Note: what Trainer still does]
The loop, data, losses, metrics, logs, schedulers and callbacks are Trainer's own code. Its accelerator is a
:class:`~zeroshard.integrations.accelerate.ZeroAccelerator`, so models and optimizers are sharded where DDP would wrap
them, and accumulation, clipping and mixed precision follow. Overridden is what reads or writes whole weights.

[Note: checkpoints of a trainer]
A directory ``checkpoint-N`` has what Trainer puts there, so ``from_pretrained`` reads it, except for ``optimizer.pt``.
In its place is the directory ``zeroshard``, a checkpoint of :func:`zeroshard.save` with the states of the optimizer and
the exact weights (the master weights, if there are any). It loads on any number of ranks. A checkpoint without it, of a
plain Trainer or with ``save_only_model``, is read as Trainer does.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import zeroshard
from zeroshard.utils.version import check_version

check_version("transformers")

import transformers  # noqa: E402
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME  # noqa: E402

from zeroshard.integrations.accelerate import ZeroAccelerator  # noqa: E402
from zeroshard.integrations.pretrained import from_pretrained as from_pretrained  # noqa: E402

is_peft_model: Any = transformers.trainer_utils._is_peft_model
_Trainer: Any = object  # the class that the mixin is put before

STATES = "zeroshard"  # see [Note: checkpoints of a trainer]


class ZeroTrainerMixin(_Trainer):
    """Adds the argument ``zero`` to a class of trainers: the options of :func:`zeroshard.shard`, by default stage 3.

    Put it first: ``class ZeroSFTTrainer(ZeroTrainerMixin, SFTTrainer)``. All methods of a trainer are called on all
    ranks together. Models that a trainer prepares without an optimizer, such as the reference model of DPO, are sharded
    too.

    >>> class ZeroLoggingTrainer(ZeroTrainerMixin, transformers.Trainer):
    ...     "Any subclass of Trainer."
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the version of TRL, if the class is made of one of its trainers."""
        super().__init_subclass__(**kwargs)
        if any(base.__module__.partition(".")[0] == "trl" for base in cls.__mro__):
            check_version("trl")

    def __init__(self, *args: Any, zero: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.zero = zero
        self._late_weights: str | None = None  # a checkpoint whose weights are loaded once the model is sharded
        super().__init__(*args, **kwargs)

    # -- preparing ----------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; it shards models where Accelerate's own would wrap them with DDP."""
        _check_arguments(self.args, self.model)
        super().create_accelerator_and_postprocess()
        if self.args.n_gpu > 1:
            raise ValueError(
                f"one process sees {self.args.n_gpu} GPUs, for which Trainer uses DataParallel: start one process per "
                f"GPU, `torchrun --nproc-per-node {self.args.n_gpu} …`, or set CUDA_VISIBLE_DEVICES to one GPU"
            )
        ZeroAccelerator.adopt(self.accelerator, self.zero)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: shard() allocates each rank's shards on its device, and the whole model is never there."""

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Create the optimizer on whole parameters, and shard both; a model of an evaluation is unwrapped first."""
        if self._sharded_optimizer() is None:
            if zeroshard.is_sharded(self.model):
                zeroshard.unwrap(self.model)
            self.model_wrapped = self.model
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        """Shard a model that is evaluated before it is trained. (Trainer does so only if it has no other model.)"""
        if not training and self.accelerator._models:
            self._shard_for_inference(model)
        return super()._wrap_model(model, training, dataloader)

    def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> Any:
        """Shard the model if TRL's DPOTrainer uses it as the reference before it is trained."""
        self._shard_for_inference(model)
        return super().compute_ref_log_probs(model, inputs)

    def _shard_for_inference(self, model: nn.Module) -> None:
        if not zeroshard.is_sharded(model):
            self.accelerator.prepare_model(model, evaluation_mode=True)

    def _sharded_optimizer(self) -> zeroshard.ShardedOptimizer | None:
        inner = getattr(self.optimizer, "optimizer", None)
        return inner if isinstance(inner, zeroshard.ShardedOptimizer) else None

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """Return False: the accelerator clips all gradients at once, and reading them here takes time."""
        return False

    # -- checkpoints --------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a directory for ``from_pretrained``. All ranks call it, and the first one writes."""
        if not zeroshard.is_sharded(self.model):
            super().save_model(output_dir, _internal_call)
            return
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        state = _full_state_dict(self.model, self.args.should_save)
        with _gathered_copies_of_peft(self.model):
            if self.args.should_save:
                saved_dtypes = [value.dtype for value in state.values() if value.is_floating_point()]
                if _internal_call:  # a checkpoint-N, perhaps of an earlier run
                    shutil.rmtree(os.path.join(output_dir, STATES), ignore_errors=True)
                self._save(output_dir, state_dict=state)
                _correct_dtype(self.model, saved_dtypes, output_dir)
            elif is_peft_model(self.model):
                for name, config in self.model.peft_config.items():
                    if config.is_prompt_learning and not config.inference_mode:
                        self.model.get_prompt_embedding_to_save(name)  # a forward, which save_pretrained runs too
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the directory of states, of which each rank writes its own, and the scheduler."""
        is_whole = not is_peft_model(self.model)  # the base model of an adapter is not in the checkpoint
        zeroshard.save(os.path.join(output_dir, STATES), self.model, self._sharded_optimizer(), frozen=is_whole)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))
            Path(output_dir, OPTIMIZER_NAME).unlink(missing_ok=True)  # of an earlier run of a plain Trainer

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights before the model is sharded, unless the states of the optimizer have them too."""
        model = self.model if model is None else model
        if _has_states(resume_from_checkpoint):
            return
        if zeroshard.is_sharded(model):
            self._load_weights(resume_from_checkpoint)
        elif any(parameter.is_meta for parameter in model.parameters()):
            self._late_weights = resume_from_checkpoint
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the states of the optimizer and the scheduler, and weights that have not been loaded yet."""
        if self._late_weights is not None:
            self._load_weights(self._late_weights)
            self._late_weights = None
        if checkpoint is None or not _has_states(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        # random: Trainer restores the generators itself, after it has skipped the batches of the resumed epoch
        zeroshard.load(os.path.join(checkpoint, STATES), self.model, self._sharded_optimizer(), random=False)
        scheduler = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint into the shards."""
        best = str(self.state.best_model_checkpoint)
        if _has_states(best):
            zeroshard.load(os.path.join(best, STATES), self.model)
        else:
            self._load_weights(best)

    def _load_weights(self, path: str) -> None:
        """Load weights that ``save_pretrained`` has written into the sharded model."""
        if is_peft_model(self.model):  # PEFT knows the names
            with zeroshard.gathered(self.model, write_rank=0):
                super()._load_from_checkpoint(path, self.model)
            return
        loaded = zeroshard.load(path, self.model, strict=False)
        names = SimpleNamespace(missing_keys=loaded.missing, unexpected_keys=loaded.unexpected)
        self._issue_warnings_after_load(names)


class ZeroTrainer(ZeroTrainerMixin, transformers.Trainer):
    """transformers' Trainer with one more argument, ``zero``: see :class:`ZeroTrainerMixin`.

    >>> import tempfile
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    ... )
    >>> trainer = ZeroTrainer(
    ...     model=transformers.LlamaForCausalLM(config),
    ...     args=transformers.TrainingArguments(tempfile.mkdtemp(), max_steps=2, use_cpu=True, report_to="none"),
    ...     train_dataset=[{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4,
    ...     zero={"stage": 3},
    ... )
    >>> trainer.accelerator.zero["stage"]
    3
    """


class ZeroSeq2SeqTrainer(ZeroTrainerMixin, transformers.Seq2SeqTrainer):
    """transformers' Seq2SeqTrainer with one more argument, ``zero``: see :class:`ZeroTrainerMixin`."""


def _has_states(checkpoint: str) -> bool:
    """Return whether a checkpoint has zeroshard's states; raise if it also has those of a plain Trainer."""
    has_states = os.path.isdir(os.path.join(checkpoint, STATES))
    if has_states and os.path.isfile(os.path.join(checkpoint, OPTIMIZER_NAME)):
        raise ValueError(
            f"{checkpoint} has both {STATES!r} and {OPTIMIZER_NAME!r}, of two runs that were saved to the same place, "
            "one with and one without zeroshard: delete the one that is not to be continued"
        )
    return has_states


def _full_state_dict(model: Any, is_writer: bool) -> dict[str, torch.Tensor]:
    """Return what ``save_pretrained`` needs, on the first rank. All ranks call it together.

    Of a PEFT model these are the adapters, also frozen ones (the reference of DPO), and the embeddings, which PEFT
    saves if they may have changed.
    """
    if not is_peft_model(model):
        return zeroshard.state_dict(model)
    state = zeroshard.state_dict(model, trainable_only=True)
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    embedded = {id(parameter) for layer in embeddings if layer is not None for parameter in layer.parameters()}
    own_names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_adapter = not model.peft_config.keys().isdisjoint(name.split("."))
        if not parameter.requires_grad and (is_adapter or id(parameter) in embedded):
            value = zeroshard.full_parameter(model, own_names[id(parameter)])
            if is_writer:
                state[name] = value.cpu()
    return state


@contextmanager
def _gathered_copies_of_peft(model: Any) -> Iterator[None]:
    """Gather what PEFT trains as a whole (``modules_to_save``): it lists what to save by their state_dict()."""
    with ExitStack() as stack:
        for module in model.modules() if is_peft_model(model) else ():
            if type(module).__name__ == "ModulesToSaveWrapper":
                stack.enter_context(zeroshard.gathered(module.modules_to_save))
        yield


def _correct_dtype(model: Any, saved_dtypes: list[torch.dtype], path: str) -> None:
    """Write the dtype of the saved weights to the configuration; with mixed precision the model computes in another."""
    if isinstance(model, transformers.PreTrainedModel) and saved_dtypes and model.config.dtype != saved_dtypes[0]:
        model.config.dtype = saved_dtypes[0]
        model.config.save_pretrained(path)


def _check_arguments(args: Any, model: Any) -> None:
    """Raise on arguments that sharding by zeroshard cannot go with."""
    instead = "leave it out, and describe the sharding by zero={'stage': 3}"
    reasons = {
        "deepspeed": f"is another way to shard: {instead}",
        "fsdp": f"is another way to shard: {instead}",
        "parallelism_config": f"is another way to shard: {instead}",
        "auto_find_batch_size": "restarts after a rank is out of memory, when the other ranks wait for it: find the "
        "largest batch with zeroshard.plan() or `zeroshard plan`",
        "save_on_each_node": "writes the model on each node, but a checkpoint has shards of all nodes: give an "
        "output_dir that all nodes see",
        "fp16_full_eval": "would replace the sharded parameters: use fp16=True",
        "bf16_full_eval": "would replace the sharded parameters: use bf16=True",
        "use_vllm": "reads the parameters from vLLM's side, which sharded ones do not support: generate with "
        "transformers, use_vllm=False",
    }
    for name, reason in reasons.items():
        if getattr(args, name, None):
            raise ValueError(f"{name}={getattr(args, name)!r} {reason}")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        raise ValueError(
            f"optim={optimizer!r} updates parameters during backward, when their gradients are not reduced yet: use "
            "another, such as 'adamw_torch', 'adafactor' or 'sgd'; zero={'stage': 2} or 3 frees gradients as well"
        )
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise ValueError(
            "the model was sharded by from_pretrained(distributed_config=…) already: load it without, to have it "
            "sharded by zero={'stage': 3}"
        )
