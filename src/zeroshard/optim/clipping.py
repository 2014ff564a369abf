"""Clip the gradients of all ranks together, by their global norm or by value."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from zeroshard.engine import Engine
from zeroshard.optim.param_groups import ParamGroups


@torch.no_grad()
def clip_grad_norm(
    engine: Engine, groups: ParamGroups, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scale the gradients of the groups' parameters to a norm of at most ``max_norm``; return the norm before.

    If every parameter is in a group, and nobody has read one's gradient, the coefficient is only recorded: the step
    applies it.
    """
    if norm_type not in (2, math.inf):
        raise ValueError(f"norm_type must be 2 or inf, got {norm_type!r}")
    gradients = engine.gradients
    _begin_clip(engine, groups)
    norm = _grouped_norm(engine, groups, norm_type) if groups.own.has_ungrouped else _global_norm(engine, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(f"the gradient norm is {norm.item()}: the gradients were not clipped")
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if groups.own.has_ungrouped or gradients.memory.is_exposed:  # a tensor that the user has read must show it
        _prepare_write(engine, groups)
        gradients.scaling.multiply(groups.grad_shards(), coefficient)
    else:
        gradients.scaling.clip(coefficient)
    return norm


@torch.no_grad()
def clip_grad_value(engine: Engine, groups: ParamGroups, clip_value: float) -> None:
    """Clamp every gradient element of the groups' parameters to [-clip_value, clip_value]."""
    gradients = engine.gradients
    _begin_clip(engine, groups)
    gradients.scaling.apply()
    _prepare_write(engine, groups)
    limit = torch.tensor(float(clip_value), dtype=torch.float64, device=engine.comm.device)
    limit = limit if gradients.scaling.scale.inv_scale is None else limit / gradients.scaling.scale.inv_scale
    for shard in groups.grad_shards():
        bound = limit.to(shard.device, shard.dtype)
        torch.clamp(shard, -bound, bound, out=shard)


def _begin_clip(engine: Engine, groups: ParamGroups) -> None:
    engine.state_guard.check_states_reloaded()
    engine.order.begin_pass(f"clip{groups.member.label}" + engine.gradients.scaled_suffix)
    engine.reduce_pending()


def _prepare_write(engine: Engine, groups: ParamGroups) -> None:
    engine.state_guard.invalidate_speculation()
    for flat in groups.own.flats:
        engine.gradients.prepare_write(engine.gradients.flat_grads[flat])


def _global_norm(engine: Engine, norm_type: float) -> torch.Tensor:
    comm, is_inf_norm = engine.comm, norm_type == math.inf
    found = engine.gradients.norms.per_shard(norm_type)
    norms = torch.stack(found) if found else torch.zeros(1, device=comm.device)
    total = norms.max().nan_to_num(nan=math.inf, posinf=math.inf) if is_inf_norm else norms.square().sum()
    op = dist.ReduceOp.MAX if is_inf_norm else dist.ReduceOp.SUM
    for axis in (comm.shard_axis, comm.tensor_axis):  # ranks along the other axes have the same gradients
        if axis.size > 1:
            what = "sum the gradients' norm"
            engine.order.check(what)
            comm.all_reduce(total, axis, what, op).wait()
    norm = total if is_inf_norm else total.sqrt()
    for factor in reversed(engine.gradients.scaling.scale.factors):
        norm = norm * factor
    return norm


def _grouped_norm(engine: Engine, groups: ParamGroups, norm_type: float) -> torch.Tensor:
    is_grouped = [name in groups.member.names for flat in engine.gradients.flat_grads for name in flat.names]
    norms = engine.gradients.scaling.parameter_norms(norm_type)
    grouped = norms[torch.tensor(is_grouped, device=norms.device)]
    norm: torch.Tensor = torch.linalg.vector_norm(grouped, norm_type).float()
    return norm
