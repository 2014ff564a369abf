"""checkpoint_activations: recompute a model's blocks in backward and save only their inputs in forward.

[Note: the wrapped forward]
A block's ``forward`` is replaced on the instance, so names, ``state_dict``, classes and hooks do not change. The new
forward saves the inputs (``block_inputs.py``) and makes autograd save nothing else ([Note: lean recomputation] in
``recompute.py``). Module hooks of the block, including the engine's, are outside this forward: they run once, in
forward. Hooks of inner modules run again in backward, as in any checkpointing ([Note: recomputation] in
``engine/engine.py``).

A block with a policy uses torch's non-reentrant checkpointing. So does a block inside another checkpointed block: the
outer checkpoint drops what the inner one saves until the outer one is recomputed, which is the purpose of nesting.

Recomputation uses the current parameter values. If step(), a load or an edit changed them since forward, the gradients
would match no forward. torch saved none of the parameters, so it cannot detect this; the version counters do. Besides
its own parameters a block may be given others, or read them from elsewhere, as a tied head does: those that its first
forward reads, and that require a gradient, are found in its graph.

Under ``torch.compile`` a block uses torch's checkpointing: the compiler decides what to save, and nothing is
partitioned or offloaded. A block that calls compiled code is partitioned and offloaded as usual.

[Note: module state]
A block may update buffers in its forward: running statistics, the vectors of a spectral norm, a codebook. Recomputation
must begin with the same buffers as the forward, and must not update them a second time. So the buffers that a forward
has changed are copied, and recomputation gets a copy of the copy. The module's own buffers are put aside meanwhile.
Likewise ``model.eval()`` between forward and backward must not change what is recomputed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from zeroshard.activations.block_inputs import BlockCall, RecomputeContext
from zeroshard.activations.recompute import BlockRecomputation, flatten_arguments, is_kv_cache, thread_state
from zeroshard.comm import MeshAxis
from zeroshard.engine import param_versions
from zeroshard.memory import MemoryTracker
from zeroshard.sharding import find_repeated_blocks, matches
from zeroshard.utils.profiling import label
from zeroshard.utils.tree import tensors_in

BlockSelector = int | Iterable[str | type[nn.Module] | nn.Module] | Callable[[str, nn.Module], bool] | None
RecomputePolicy = Callable[..., Any] | list[Any]
BlockContents = tuple[list[nn.Parameter], list[nn.Module]]
# batch norm changes them without incrementing their version counter
RUNNING_STATISTICS = ("running_mean", "running_var")

_selective_contexts: Callable[..., Any] = create_selective_checkpoint_contexts


def checkpoint_activations(
    model: nn.Module,
    blocks: BlockSelector = None,
    *,
    partition: bool | DeviceMesh | None = None,
    offload: bool = False,
    policy: RecomputePolicy | None = None,
) -> nn.Module:
    """Save only the inputs of a model's blocks in forward, and recompute everything else in backward.

    ``blocks`` selects the blocks: ``None`` for all repeated blocks, an int n for every n-th of them, a list of names
    (shell patterns), classes and modules, or a function of name and module. An empty list undoes checkpointing; a new
    call replaces the previous one. Works before and after :func:`zeroshard.shard`, and on a plain model.

    ``partition``: each rank saves its part of the inputs, and an all-gather restores them before recomputation (P_a).
    The default is the sharded model's tensor axis, if it has one. Pass a ``DeviceMesh`` of one axis to partition over
    ranks that compute on the same data, or ``False`` to disable it. ``offload``: move saved inputs to host memory and
    prefetch them in backward (P_a+cpu). ``policy`` selects operators that are not recomputed, in the format of
    ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

    Returns the same model. In a block compiled by ``torch.compile``, inputs are neither partitioned nor offloaded.

    >>> import zeroshard
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
    >>> model = zeroshard.checkpoint_activations(model, offload=True)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> model = zeroshard.checkpoint_activations(model, ())  # a plain model again
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if not isinstance(offload, bool):
        raise TypeError(f"offload must be a bool, got {offload!r}")
    _check_partition(partition)
    _check_policy(policy)
    selected = select_blocks(model, blocks)
    for checkpointed in checkpointed_forwards(model).values():
        checkpointed.restore()
    context = RecomputeContext(partition, offload)
    for name, block in selected.items():
        block.__dict__["forward"] = CheckpointedForward(block, name, context, policy, block.__dict__.get("forward"))
    return model


def _check_partition(partition: bool | DeviceMesh | None) -> None:
    if isinstance(partition, DeviceMesh):
        if partition.ndim != 1:
            raise ValueError(
                f"partition must be a DeviceMesh of one axis, got {partition.ndim} in {partition}: select one, as in "
                'mesh["tensor"]'
            )
    elif partition is not None and not isinstance(partition, bool):
        raise TypeError(f"partition must be None, a bool or a DeviceMesh, got {partition!r}")


def _check_policy(policy: RecomputePolicy | None) -> None:
    if policy is None:
        return
    try:
        _selective_contexts(policy)
    except (TypeError, ValueError) as error:
        expected = "policy must be a function or a list of operators, such as torch.ops.aten.mm.default"
        raise TypeError(f"{expected}, got {policy!r}: {error}") from error


class CheckpointedForward:
    """Replaces the forward of a checkpointed block: see [Note: the wrapped forward]."""

    def __init__(
        self,
        block: nn.Module,
        name: str,
        context: RecomputeContext,
        policy: RecomputePolicy | None,
        forward: Callable[..., Any] | None,
    ) -> None:
        self._block_ref = weakref.ref(block)  # weak: the block refers to this object
        self._name = name
        self.context = context
        self.policy = policy
        self._original_forward = forward  # an override on the instance, not the class's forward
        self._verified_axis: MeshAxis | None = None  # axis over which the inputs were verified as replicated
        self._outer_params: list[nn.Parameter] | None = None  # read from elsewhere; None: no forward has run yet
        self._cached_contents: BlockContents = ([], [])  # while the model is sharded
        self._tracker_ref: weakref.ref[MemoryTracker] | None = None  # tracker of that sharded model

    def __reduce__(self) -> Any:
        """Support copy and pickle: the copied block gets its own CheckpointedForward."""
        return CheckpointedForward, (self._block, self._name, self.context, self.policy, self._original_forward)

    @property
    def _block(self) -> nn.Module:
        block = self._block_ref()
        if block is None:
            raise ReferenceError(f"block {self._name!r} no longer exists, so its forward cannot run")
        return block

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the block's own forward, so that ``inspect.signature`` sees its signature."""
        if self._original_forward is not None:
            return self._original_forward
        return partial(type(self._block).forward, self._block)

    @property
    def calls_class_forward(self) -> bool:
        """Whether the block's own forward is that of its class, not one that was set on the instance."""
        return self._original_forward is None

    def restore(self) -> None:
        if self._original_forward is None:
            del self._block.__dict__["forward"]
        else:
            self._block.__dict__["forward"] = self._original_forward

    def save_full_on_device(self) -> None:
        """Save full inputs on the device from now on: neither partitioned nor offloaded."""
        self.context = RecomputeContext(partition=False, offload=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, checkpointed if gradients are enabled."""
        forward = self.__wrapped__
        if not torch.is_grad_enabled() or self._needs_kv_cache(args, kwargs):
            return forward(*args, **kwargs)
        options: dict[str, Any] = {"use_reentrant": False}
        if self.policy is not None:
            options["context_fn"] = partial(_selective_contexts, self.policy)
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, **options, **kwargs)
        return self._run_checkpointed(forward, args, kwargs, options)

    def _needs_kv_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the block fills a KV cache that the caller needs. Training needs none."""
        return not self._block.training and any(map(is_kv_cache, (*args, *kwargs.values())))

    @_disable_dynamo  # may be called after a graph break
    def _run_checkpointed(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
    ) -> Any:
        tensors, run = flatten_arguments(forward, args, kwargs)
        if thread_state.is_in_block:
            return checkpoint(with_module_state(run, list(self._block.modules())), *tensors, **options)
        call = BlockCall(self._name, self.context, self._block)
        parameters, submodules = self._parameters_and_submodules()
        run = with_module_state(run, [self._block, *submodules])
        given_params = [p for p in tensors if isinstance(p, nn.Parameter) and not p.is_inference()]
        outer_params = [*given_params, *(self._outer_params or ())]
        parameters = [*parameters, *outer_params] if outer_params else parameters
        first_node = torch._C._autograd._get_sequence_nr()
        if self._verified_axis != call.axis and call.check_inputs_replicated(tensors):
            self._verified_axis = call.axis
        input_versions = call.input_versions(tensors)
        forward_versions: list[int] = []  # parameter versions after forward, which may itself compute gradients

        def load_inputs() -> list[torch.Tensor]:
            if forward_versions and param_versions(parameters) != forward_versions:
                self._raise_params_modified(forward_versions)
            return [call.unpack(packed) for packed in packed_inputs]

        def checked_run(*given: torch.Tensor) -> Any:
            if forward_versions and param_versions(parameters) != forward_versions:
                self._raise_params_modified(forward_versions)
            with label("recompute {!r}", self._name) if forward_versions else nullcontext():
                return run(*given)

        if self.policy is None:
            recomputation = BlockRecomputation(self._name, run, tensors)
            packed_inputs = [call.pack(tensor) for tensor in tensors]
            output = recomputation.forward(load_inputs)
        else:
            with saved_tensors_hooks(call.pack, call.unpack):
                output = checkpoint(checked_run, *tensors, **options)
        if self._outer_params is None:
            known = {id(parameter) for parameter in parameters}
            self._outer_params = [p for p in _params_in_graph(output, first_node) if id(p) not in known]
            parameters = [*parameters, *self._outer_params]
        forward_versions += param_versions(parameters)
        call.check_inputs_unchanged(input_versions)
        return output

    def _parameters_and_submodules(self) -> BlockContents:
        """Return the block's parameters and submodules. Those of a sharded model do not change, so they are cached."""
        tracker = self.context.tracker
        if tracker is None:
            parameters = [parameter for parameter in self._block.parameters() if not parameter.is_inference()]
            return parameters, list(self._block.modules())[1:]
        if self._tracker_ref is None or self._tracker_ref() is not tracker:
            self._cached_contents = list(self._block.parameters()), list(self._block.modules())[1:]
            self._tracker_ref = weakref.ref(tracker)
        return self._cached_contents

    def _raise_params_modified(self, versions: list[int]) -> None:
        named_versions = zip(self._block.named_parameters(), versions, strict=False)
        name = next(
            (name for (name, parameter), version in named_versions if param_versions([parameter]) != [version]), ""
        )
        name = f"{self._name}.{name}".strip(".") if name else ""
        changed = repr(name) if name else "a parameter of another module, which the block is given or reads,"
        raise RuntimeError(
            f"{changed} was modified between the forward and the backward of the "
            f"checkpointed block {self._name!r}, which would be recomputed with the new values: call backward() before "
            "step(), a load or an edit of parameters, or run forward again"
        )


def _params_in_graph(output: Any, first_node: int) -> list[nn.Parameter]:
    """Return the parameters that ``output`` depends on through nodes from this sequence number on."""
    found: dict[int, nn.Parameter] = {}
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors_in(output)]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        parameter = getattr(node, "variable", None)
        if isinstance(parameter, nn.Parameter):
            found[id(parameter)] = parameter
        elif node._sequence_nr() >= first_node:
            nodes += [next_node for next_node, _ in node.next_functions]
    return list(found.values())


def checkpointed_forwards(model: nn.Module) -> dict[str, CheckpointedForward]:
    """Return the forwards of the blocks that :func:`checkpoint_activations` has changed, by the block's name."""
    forwards = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    return {name: forward for name, forward in forwards.items() if isinstance(forward, CheckpointedForward)}


def select_blocks(model: nn.Module, blocks: BlockSelector) -> dict[str, nn.Module]:
    """Return the modules that ``blocks`` selects, by name, in the order the model defines them.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.linear = nn.Linear(2, 2)
    ...     def forward(self, x):
    ...         return self.linear(x)
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(*[Block() for _ in range(4)]))
    >>> list(select_blocks(model, None)), list(select_blocks(model, 2)), list(select_blocks(model, ["1.[01]"]))
    (['1.0', '1.1', '1.2', '1.3'], ['1.0', '1.2'], ['1.0', '1.1'])
    """
    names = {module: name for name, module in model.named_modules()}
    if blocks is None or isinstance(blocks, int):
        found = _every_nth_block(model, 1 if blocks is None else blocks)
    elif isinstance(blocks, (str, type)) or (isinstance(blocks, nn.Module) and not isinstance(blocks, Iterable)):
        raise TypeError(f"blocks={blocks!r} is a single entry: pass a list, [{blocks!r}]")
    elif isinstance(blocks, Iterable):
        found = {module for entry in blocks for module in _match_entry(entry, names)}
    elif callable(blocks):
        found = {module for module, name in names.items() if name and blocks(name, module)}
        if not found:
            raise ValueError(f"blocks={blocks!r} selects no module. {_module_names_hint(model)}")
    else:
        raise TypeError(f"blocks must be None, an int, a list or a function (name, module) -> bool, got {blocks!r}")
    selected = {name: module for module, name in names.items() if module in found}
    for name, module in selected.items():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(f"{name!r} is a {type(module).__name__}, which is never called: select the modules in it")
    return selected


def _every_nth_block(model: nn.Module, n: int) -> set[nn.Module]:
    if isinstance(n, bool) or n < 1:
        raise ValueError(f"blocks must be an int of at least 1 (every n-th block) or a list, got {n!r}")
    found = set(find_repeated_blocks(model))
    in_order = [module for module in model.modules() if module in found]
    if not in_order:
        hint = f"select some with blocks=[…]. {_module_names_hint(model)}"
        raise ValueError(f"this {type(model).__name__} has no repeated blocks: {hint}")
    return set(in_order[::n])  # prefer the first: backward needs the last ones first, so they gain least


def _match_entry(entry: Any, names: dict[nn.Module, str]) -> list[nn.Module]:
    """Return the modules that one entry of a list selects."""
    if isinstance(entry, nn.Module):
        found = [module for module in names if module is entry]
    elif isinstance(entry, str) or (isinstance(entry, type) and issubclass(entry, nn.Module)):
        found = [module for module, name in names.items() if name and matches(name, module, (entry,))]
    else:
        raise TypeError(f"blocks must contain name patterns, module classes or modules, got {entry!r}")
    if not found:
        described = f"the {type(entry).__name__} given" if isinstance(entry, nn.Module) else repr(entry)
        raise ValueError(f"blocks: {described} matches no module of the model. {_module_names_hint(next(iter(names)))}")
    return found


def _module_names_hint(model: nn.Module) -> str:
    """Describe the module names to choose from."""
    names = [name for name, module in model.named_modules() if name and next(module.children(), None) is not None]
    names = names or [name for name, _ in model.named_modules() if name]
    return f"Examples of module names: {names[:6]}"


class ModuleState:
    """Buffers and training modes of some modules, as they are now.

    >>> norm = nn.BatchNorm1d(1)
    >>> state = ModuleState([norm])
    >>> _ = norm(torch.tensor([[0.0], [20.0]]))
    >>> state.keep_changed()
    >>> with state.restored():
    ...     _ = norm.running_mean.clone(), norm(torch.tensor([[0.0], [20.0]]))
    >>> norm.running_mean, norm.num_batches_tracked
    (tensor([1.]), tensor(1))
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._training = [module.training for module in modules]
        with torch.no_grad():
            self._buffers = [
                (module, key, buffer, _version(buffer), None if buffer is None else buffer.clone())
                for module in modules
                if module._buffers
                for key, buffer in module._buffers.items()
            ]

    def keep_changed(self) -> None:
        """Keep only the buffers that have changed since: forward has ended."""
        self._buffers = [
            (module, key, buffer, version, value if version != _version(buffer) or _is_running(module, key) else buffer)
            for module, key, buffer, version, value in self._buffers
            if version != _version(buffer) or buffer is not module._buffers.get(key) or _is_running(module, key)
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore buffers and training modes inside the context, and the current ones after it."""
        current = [module._buffers.get(key) for module, key, *_ in self._buffers]
        training = [module.training for module in self._modules]
        copies: dict[int, torch.Tensor | None] = {}  # modules may share a buffer
        with torch.no_grad():
            for module, key, buffer, _, value in self._buffers:
                copies.setdefault(id(buffer), value if value is None or value is buffer else value.clone())
                module._buffers[key] = copies[id(buffer)]
        self._set_training(self._training)
        try:
            yield
        finally:
            self._set_training(training)
            for (module, key, *_), buffer in zip(self._buffers, current, strict=True):
                module._buffers[key] = buffer

    def _set_training(self, modes: list[bool]) -> None:
        for module, is_training in zip(self._modules, modes, strict=True):
            if module.training != is_training:
                module.training = is_training


def _version(buffer: torch.Tensor | None) -> int:
    return 0 if buffer is None or buffer.is_inference() else buffer._version


def _is_running(module: nn.Module, key: str) -> bool:
    return module.training and key in RUNNING_STATISTICS


def with_module_state(run: Callable[..., Any], modules: Sequence[nn.Module]) -> Callable[..., Any]:
    """Return a function that runs ``run``, and again with the module state of the first time."""
    state: ModuleState | None = None

    def run_in_state(*given: torch.Tensor) -> Any:
        nonlocal state
        if state is not None:
            with state.restored():
                return run(*given)
        state = ModuleState(modules)
        output = run(*given)
        state.keep_changed()
        return output

    return run_in_state
