"""The user's optimizer on shards: slices, the step, fused and offloaded updates."""

from zeroshard.optim.cpu.apply import make_adam_update
from zeroshard.optim.fused_adam.fused_adam import SUPPORTED_DTYPES
from zeroshard.optim.hyperparams import ADAM_STATE_KEYS, is_supported
from zeroshard.optim.local_steps import ANCHOR, LocalSteps, mark_local_axis
from zeroshard.optim.model_optimizers import ModelOptimizers, as_list
from zeroshard.optim.muon import MAX_STACKED_NUMEL, MuonWithAdamW
from zeroshard.optim.optimizer_copy import state_after_first_step, state_bytes_per_element
from zeroshard.optim.routing import measure_update
from zeroshard.optim.sharded_muon.updater import MOMENTUM_DTYPES, max_exchanged_numel, runs_on_shards
from zeroshard.optim.sharded_optimizer import ShardedOptimizer, check_optimizer
from zeroshard.optim.slices import is_elementwise, max_slice_numel
from zeroshard.optim.state_dict import StateDtypes, allocate_state
from zeroshard.optim.whole_params import assign_owners, split_batches

__all__ = [
    "ADAM_STATE_KEYS",
    "ANCHOR",
    "MAX_STACKED_NUMEL",
    "MOMENTUM_DTYPES",
    "SUPPORTED_DTYPES",
    "LocalSteps",
    "ModelOptimizers",
    "MuonWithAdamW",
    "ShardedOptimizer",
    "StateDtypes",
    "allocate_state",
    "as_list",
    "assign_owners",
    "check_optimizer",
    "is_elementwise",
    "is_supported",
    "make_adam_update",
    "mark_local_axis",
    "max_exchanged_numel",
    "max_slice_numel",
    "measure_update",
    "runs_on_shards",
    "split_batches",
    "state_after_first_step",
    "state_bytes_per_element",
]
