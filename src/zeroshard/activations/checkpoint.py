"""checkpoint_activations: run a model's blocks again in backward, and keep only what that takes.

[Note: the wrapped forward]
A block's ``forward`` is replaced on the instance, so that names, ``state_dict``, classes and hooks stay. It keeps the
inputs (``block_inputs.py``) and has autograd save nothing else ([Note: lean recomputation] in ``recompute.py``). The
block's module hooks, the engine's among them, are outside, so they run once, in forward; hooks of modules inside run
again in backward, as under any checkpointing ([Note: recomputation] in ``engine/engine.py``).

Under a policy torch's own checkpointing does it, without reentrance. So it does for a block inside another: what it
saves is dropped by the outer checkpoint until that has been recomputed, which is the point of nesting them.

A block that runs again computes from the parameters as they are then. Where step(), a load or an edit has changed them
since, its gradients would belong to no forward, and torch, which saved none of them, would not say so: their version
counters do.

A compiler sees plain checkpointing: what a compiled block saves is the compiler's decision, and nothing is divided or
offloaded there. A block that calls compiled code has both.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from zeroshard.activations.block_inputs import BlockCall, RecomputeContext
from zeroshard.activations.blocks import BlockSelector, select_blocks
from zeroshard.activations.recompute import BlockRecomputation
from zeroshard.comm.collectives import MeshAxis
from zeroshard.engine.hooks import tensors_in
from zeroshard.engine.parameter import param_versions
from zeroshard.memory.tracker import MemoryTracker

RecomputePolicy = Callable[..., Any] | list[Any]

LEAF_TYPES = (torch.Tensor, bool, int, float, str, type(None))  # arguments that hold no others
_selective_contexts: Callable[..., Any] = create_selective_checkpoint_contexts
_thread_state = threading.local()  # .inside: whether a checkpointed block is running on this thread


def checkpoint_activations(
    model: nn.Module,
    blocks: BlockSelector = None,
    *,
    partition: bool | DeviceMesh | None = None,
    offload: bool = False,
    policy: RecomputePolicy | None = None,
) -> nn.Module:
    """Keep of a model's blocks only their inputs from forward to backward, and compute the rest again.

    ``blocks`` are all repeated blocks of the model, or every so many-th of them (an int), or those that a list of names
    (shell patterns), classes and modules, or a function of name and module, chooses. An empty list undoes it; another
    call replaces the one before. Works before and after :func:`zeroshard.shard`, and on a plain model.

    ``partition``: each rank keeps its part of the inputs, and they are gathered when they are needed (P_a). By default
    over the sharded model's tensor axis, where it has one; or over a ``DeviceMesh`` of one axis, whose ranks compute on
    the same data; ``False``: never. ``offload``: what is kept goes to host memory and comes back ahead of need
    (P_a+cpu). ``policy`` says what is not computed again, as
    ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes it.

    Returns the same model. In a block that ``torch.compile`` compiles, inputs are neither divided nor offloaded.

    >>> import zeroshard
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
    >>> model = zeroshard.checkpoint_activations(model, offload=True)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> model = zeroshard.checkpoint_activations(model, ())  # a plain model again
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is an nn.Module, got {type(model).__name__}")
    if not isinstance(offload, bool):
        raise TypeError(f"offload is a bool, got {offload!r}")
    _check_partition(partition)
    _check_policy(policy)
    chosen = select_blocks(model, blocks)
    for module in model.modules():
        wrapped = module.__dict__.get("forward")
        if isinstance(wrapped, CheckpointedForward):
            wrapped.restore()
    keeper = RecomputeContext(partition, offload)
    for name, block in chosen.items():
        block.__dict__["forward"] = CheckpointedForward(block, name, keeper, policy, block.__dict__.get("forward"))
    return model


def _check_partition(partition: bool | DeviceMesh | None) -> None:
    if isinstance(partition, DeviceMesh):
        if partition.ndim != 1:
            raise ValueError(
                f"partition is a DeviceMesh of one axis, got {partition.ndim} in {partition}: choose one, as in "
                'mesh["tensor"]'
            )
    elif partition is not None and not isinstance(partition, bool):
        raise TypeError(f"partition is None, a bool or a DeviceMesh, got {partition!r}")


def _check_policy(policy: RecomputePolicy | None) -> None:
    if policy is None:
        return
    try:
        _selective_contexts(policy)
    except (TypeError, ValueError) as error:
        what = "policy is a function or a list of operators, such as torch.ops.aten.mm.default"
        raise TypeError(f"{what}, got {policy!r}: {error}") from error


class CheckpointedForward:
    """The forward of a checkpointed block: see [Note: the wrapped forward]."""

    def __init__(
        self,
        block: nn.Module,
        name: str,
        context: RecomputeContext,
        policy: RecomputePolicy | None,
        forward: Callable[..., Any] | None,
    ) -> None:
        self._block_ref = weakref.ref(block)  # which holds this
        self._name = name
        self._context = context
        self._policy = policy
        self._original_forward = forward  # that the instance had, not its class
        self._verified_axis: MeshAxis | None = None  # the axis that its inputs are known to be the same on
        self._cached_parameters: list[nn.Parameter] = []  # of the block, as long as the model is sharded
        self._tracker_ref: weakref.ref[MemoryTracker] | None = None  # of that model

    def __reduce__(self) -> Any:
        """For copies and pickles of the block, which come with a block of their own."""
        return CheckpointedForward, (self._block, self._name, self._context, self._policy, self._original_forward)

    @property
    def _block(self) -> nn.Module:
        block = self._block_ref()
        if block is None:
            raise ReferenceError(f"block {self._name!r} is gone, and its forward with it")
        return block

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The block's own forward, for whoever asks for its signature."""
        return (
            self._original_forward
            if self._original_forward is not None
            else partial(type(self._block).forward, self._block)
        )

    def restore(self) -> None:
        """Give the block its own forward back."""
        if self._original_forward is None:
            del self._block.__dict__["forward"]
        else:
            self._block.__dict__["forward"] = self._original_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        forward = self.__wrapped__
        if not torch.is_grad_enabled() or self._needs_kv_cache(args, kwargs):
            return forward(*args, **kwargs)
        options: dict[str, Any] = {"use_reentrant": False}
        if self._policy is not None:
            options["context_fn"] = partial(_selective_contexts, self._policy)
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, **options, **kwargs)
        return self._run_checkpointed(forward, args, kwargs, options)

    def _needs_kv_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the block fills a cache that somebody wants: outside of training, which has no use for one."""
        return not self._block.training and any(map(_is_kv_cache, (*args, *kwargs.values())))

    @_disable_dynamo  # it may be called from code that a compiler has given up on
    def _run_checkpointed(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
    ) -> Any:
        tensors, run = flatten_arguments(forward, args, kwargs)
        if getattr(_thread_state, "inside", False):
            return checkpoint(run, *tensors, **options)
        call = BlockCall(self._name, self._context, self._block)
        if self._verified_axis != call.axis and call.check_inputs_replicated(tensors):
            self._verified_axis = call.axis
        versions = call.input_versions(tensors)
        parameters = self._block_parameters()
        used: list[int] = []  # the parameters' versions after the first run; a block may compute gradients inside

        def inputs() -> list[torch.Tensor]:
            if used and param_versions(parameters) != used:
                self._raise_params_modified(used)
            return [call.unpack(packed) for packed in kept]

        def checked(*given: torch.Tensor) -> Any:
            if used and param_versions(parameters) != used:
                self._raise_params_modified(used)
            return run(*given)

        if self._policy is None:
            again = BlockRecomputation(self._name, run, tensors)
            kept = [call.pack(tensor) for tensor in tensors]
            output = again.forward(inputs)
        else:
            with saved_tensors_hooks(call.pack, call.unpack):
                output = checkpoint(checked, *tensors, **options)
        used += param_versions(parameters)
        call.check_inputs_unchanged(versions)
        return output

    def _block_parameters(self) -> list[nn.Parameter]:
        """The block's parameters. Those of a sharded model stay, so they are not looked for each time."""
        ledger = self._context.tracker
        if ledger is None:
            return [parameter for parameter in self._block.parameters() if not parameter.is_inference()]
        if self._tracker_ref is None or self._tracker_ref() is not ledger:
            self._cached_parameters, self._tracker_ref = list(self._block.parameters()), weakref.ref(ledger)
        return self._cached_parameters

    def _raise_params_modified(self, versions: list[int]) -> None:
        named = zip(self._block.named_parameters(), versions, strict=False)
        name = next((name for (name, parameter), version in named if param_versions([parameter]) != [version]), "")
        raise RuntimeError(
            f"the values of {f'{self._name}.{name}'.strip('.')!r} were changed after the forward of the checkpointed "
            f"block {self._name!r} and before its backward, in which the block runs again and would compute from the "
            "new values: call backward() before step(), a load or an edit of parameters, or run forward again"
        )


def flatten_arguments(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], Callable[..., Any]]:
    """The tensors among the arguments, each once, and what runs the block on them.

    torch's checkpointing packs only tensors that are arguments themselves, not those in containers and keywords.
    """
    leaves, together = _flatten_containers(args, kwargs)
    leaves = [None if _is_empty_kv_cache(leaf) else leaf for leaf in leaves]
    tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    places = [numbers.get(id(leaf), -1) if isinstance(leaf, torch.Tensor) else -1 for leaf in leaves]
    rest = [None if place >= 0 else leaf for leaf, place in zip(leaves, places, strict=True)]

    def run(*given: torch.Tensor) -> Any:
        filled = [given[place] if place >= 0 else leaf for leaf, place in zip(rest, places, strict=True)]
        args, kwargs = together(filled)
        before, _thread_state.inside = getattr(_thread_state, "inside", False), True
        try:
            return forward(*args, **kwargs)
        finally:
            _thread_state.inside = before

    return tensors, run


def _flatten_containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arguments without the containers they come in, and what puts them back."""
    leaves, count, names = [*args, *kwargs.values()], len(args), tuple(kwargs)
    if all(isinstance(leaf, LEAF_TYPES) for leaf in leaves):  # as for most blocks
        return leaves, lambda filled: (filled[:count], dict(zip(names, filled[count:], strict=True)))
    leaves, shape = tree_flatten((args, kwargs))
    return leaves, lambda filled: tree_unflatten(filled, shape)


def _is_kv_cache(value: Any) -> bool:
    if isinstance(value, (*LEAF_TYPES, nn.Module)):
        return False
    return hasattr(value, "update") and hasattr(value, "get_seq_length")


def _is_empty_kv_cache(value: Any) -> bool:
    """Whether an argument is an empty cache of a decoder's keys and values, as Hugging Face's models make by default.

    A block writes into it, and would again when it is recomputed. It serves nothing in training: the block gets none.
    """
    if not _is_kv_cache(value):
        return False
    if tensors_in(value, depth=8):
        raise ValueError(
            f"a checkpointed block was given a {type(value).__name__} with keys and values in it, and would write into "
            "it once more when it runs again: call the model with use_cache=False"
        )
    return True
