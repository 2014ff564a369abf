"""Traces: what a model's forward and backward would take, seen on tensors without memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from zeroshard.models import GPT, GPTConfig
from zeroshard.planner.tracing.trace import EngineEvent, Trace, split_spans
from zeroshard.planner.tracing.trace_model import UntraceableError, trace_model

SMALL = GPTConfig(vocab_size=64, context=16, layers=3, heads=4, width=32)


def gpt(**changes: Any) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(**{**vars(SMALL), **changes}))


def moments(found: Trace, moment: str) -> list[str]:
    return [
        found.unit_names[event.unit]
        for event in found.events
        if isinstance(event, EngineEvent) and event.kind == moment
    ]


def peak(found: Trace) -> float:
    return max(span.peak_bytes for span in split_spans(found))


# ------------------------------------------------------------------------------------------------ operations


def test_operations_are_those_that_torch_counts() -> None:
    model = GPT(SMALL)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    found = trace_model(model, micro_batch=2, device_kind="cpu")
    products = sum(op.flops for op in found.ops if op.kind == "matmul")
    assert products == sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))


def test_attention_never_makes_its_matrix_of_weights() -> None:
    """A long sequence: its weights would be 16 MB, and no fused kernel makes them."""
    for kind, precision in (("cuda", "bf16"), ("cuda", "fp32"), ("cpu", "fp32")):
        found = trace_model(gpt(context=2048), micro_batch=1, device_kind=kind, precision=precision)
        assert max(op.allocated_bytes for op in found.ops) < 4 * 2048 * 2048, (kind, precision)
        assert len([op for op in found.ops if op.kind == "attention"]) == 2 * SMALL.layers


def test_what_is_freed_was_made() -> None:
    found = trace_model(gpt(), micro_batch=2)
    gradients = sum(event.nbytes for event in found.events if isinstance(event, EngineEvent))
    made, freed = sum(op.allocated_bytes for op in found.ops), sum(op.freed_bytes for op in found.ops)
    assert made == freed
    assert gradients == sum(parameter.nbytes for parameter in gpt().parameters())
    assert split_spans(found)[-1].end_bytes == 0


def test_the_model_is_left_as_it_was() -> None:
    model = GPT(SMALL)
    before = {name: (value.data_ptr(), value._version) for name, value in model.state_dict(keep_vars=True).items()}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    attention = F.scaled_dot_product_attention
    trace_model(model, micro_batch=2, checkpoint="recompute", precision="bf16")
    after = {name: (value.data_ptr(), value._version) for name, value in model.state_dict(keep_vars=True).items()}
    assert before == after
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert F.scaled_dot_product_attention is attention
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_left_behind() -> None:
    """A trace of another model is not a reason to keep the first one's copy."""
    trace_model(gpt(), micro_batch=2)
    gc.collect()
    before = sum(1 for thing in gc.get_objects() if type(thing) is GPT)
    trace_model(gpt(), micro_batch=2)
    gc.collect()
    assert sum(1 for thing in gc.get_objects() if type(thing) is GPT) <= before


# ------------------------------------------------------------------------------------------------ moments


def test_units_come_and_go_as_the_engine_has_it() -> None:
    units = ["tokens+positions", "blocks.0", "blocks.1", "blocks.2", "norm+head"]
    found = trace_model(gpt(), micro_batch=1)
    assert list(found.unit_names) == units
    assert moments(found, "unshard") == [*units, *units[::-1]]
    assert moments(found, "reduce") == units[::-1]


def test_a_tied_weight_is_finished_last() -> None:
    found = trace_model(gpt(tied=True), micro_batch=1)
    finished = moments(found, "reduce")
    assert len(finished) == len(set(finished))
    assert finished[-1] == next(name for name in found.unit_names if "tokens" in name)


class Branches(nn.Module):
    """Two branches, only one of them leads to the loss, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        first, _ = self.blocks[0](x), self.blocks[1](x)
        return self.blocks[2](first * self.scale).sum()


def test_unused_branches_and_loose_parameters() -> None:
    found = trace_model(Branches(), torch.empty(1, 8), micro_batch=4)
    finished = {
        found.unit_names[e.unit]: e.nbytes for e in found.events if isinstance(e, EngineEvent) and e.kind == "reduce"
    }
    assert set(finished) == set(found.unit_names)  # all ranks come to all units, whatever their branches
    assert [name for name, nbytes in finished.items() if not nbytes] == ["blocks.1"]


# ------------------------------------------------------------------------------------------------ what is kept


def test_recomputation_keeps_inputs_alone_and_computes_again() -> None:
    plain, again = (
        trace_model(gpt(layers=6), micro_batch=4),
        trace_model(gpt(layers=6), micro_batch=4, checkpoint="recompute"),
    )
    assert peak(again) < peak(plain)
    assert again.kept_input_bytes == (4.0 * 4 * 16 * 32,) * 6
    forward = sum(op.flops for op in plain.ops if not op.is_backward and op.module_name.startswith("blocks"))
    more = sum(op.flops for op in again.ops) - sum(op.flops for op in plain.ops)
    assert 0.6 * forward < more < forward  # torch stops a recomputation as soon as all it saves is there


def test_a_model_may_recompute_by_itself() -> None:
    """GPT's own checkpointing: what it keeps are activations then, and in sum the same but for our copy."""
    own = trace_model(gpt(checkpoint=True), micro_batch=4)
    ours = trace_model(gpt(), micro_batch=4, checkpoint="recompute")
    assert own.kept_input_bytes == ()
    assert peak(ours) + sum(ours.kept_input_bytes) - peak(own) == ours.kept_input_bytes[0]


def test_each_tensor_rank_keeps_its_part() -> None:
    whole = trace_model(gpt(), micro_batch=3, checkpoint="recompute")
    part = trace_model(gpt(), micro_batch=3, checkpoint="recompute", tensor=4)
    every = trace_model(gpt(), micro_batch=3, checkpoint="recompute", tensor=4, partition_activations=False)
    assert (
        [4 * nbytes for nbytes in part.kept_input_bytes] == list(whole.kept_input_bytes) == list(every.kept_input_bytes)
    )


# ------------------------------------------------------------------------------------------------ a tensor axis


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_tensor_rank_computes_its_share_and_communicates(ranks: int) -> None:
    whole, part = trace_model(gpt(), micro_batch=2), trace_model(gpt(), micro_batch=2, tensor=ranks)
    assert sum(op.flops for op in part.ops) == pytest.approx(sum(op.flops for op in whole.ops) / ranks, rel=1e-9)
    stream = 4.0 * 2 * 16 * 32
    reduced = [op for op in part.ops if op.collective == "all-reduce"]
    # two a block in forward and two in backward; the embedding's, and that of the head's input
    assert [op.moved_bytes for op in reduced] == [stream] * (4 * SMALL.layers + 2)
    assert [op.moved_bytes for op in part.ops if op.collective == "all-gather"] == [4.0 * 2 * 16 * 64]  # the logits


def test_hugging_faces_models_divide_too() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        llama = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=32,
            )
        )
        gpt2 = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
        )
    for model in (llama, gpt2):
        whole, part = (trace_model(model, micro_batch=2, sequence=16, tensor=ranks) for ranks in (1, 2))
        ratio = sum(op.flops for op in part.ops) / sum(op.flops for op in whole.ops)
        assert ratio == pytest.approx(0.5, abs=0.01), type(model).__name__


# ------------------------------------------------------------------------------------------------ other batches


@pytest.mark.parametrize("kept", ["none", "recompute"])
def test_other_micro_batches_lie_on_straight_lines(kept: Any) -> None:
    model = gpt(layers=2)
    two, three, seven = (trace_model(model, micro_batch=batch, checkpoint=kept) for batch in (2, 3, 7))
    assert two.has_same_ops(three)
    between = two.extrapolate(three, 7)
    assert peak(between) == pytest.approx(peak(seven), rel=1e-6)
    assert sum(op.flops for op in between.ops) == pytest.approx(sum(op.flops for op in seven.ops))
    assert between.kept_input_bytes == seven.kept_input_bytes


# ------------------------------------------------------------------------------------------------ other models


class Graph(nn.Module):
    """Messages along edges, summed at their ends: how a graph network is written in plain PyTorch."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"f": nn.Linear(2 * width, width)}) for _ in range(layers))
        self.out = nn.Linear(width, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            message = F.relu(layer["f"](torch.cat([nodes[edges[:, 0]], nodes[edges[:, 1]]], dim=-1)))  # type: ignore[index]
            nodes = nodes + torch.zeros_like(nodes).index_add(0, edges[:, 1], message)
        return self.out(nodes).mean()


class Positions(nn.Module):
    """Looks at values that it made itself, as Hugging Face's masks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        if (torch.diff(positions) != 1).any():
            raise AssertionError("the positions are those of one sequence")
        return self.linear(x).sum()


class Decides(Positions):
    """Decides by what its parameters make of the input: no shape tells that."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.sum() if y.mean() > 0 else -y.sum()


def test_graphs_convolutions_and_norms() -> None:
    def graph(batch: int) -> tuple[Tensor, Tensor]:
        return torch.empty(32 * batch, 16), torch.zeros(128 * batch, 2, dtype=torch.int64)

    found = trace_model(Graph(), graph, micro_batch=2)
    assert sum(op.flops for op in found.ops) > 0
    convolution = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    convolution(torch.zeros(2, 3, 16, 16))
    found = trace_model(convolution, torch.empty(1, 3, 16, 16), micro_batch=8, precision="bf16")
    assert {op.kind for op in found.ops} >= {"matmul", "plain"}
    assert found.buffer_bytes == sum(buffer.nbytes for buffer in convolution.buffers())
    again = trace_model(nn.GRU(4, 8, batch_first=True), torch.empty(1, 5, 4), micro_batch=2)
    assert sum(op.flops for op in again.ops) > 0


def test_values_that_follow_from_shapes_are_known() -> None:
    trace_model(Positions(), torch.empty(1, 3, 4), micro_batch=2)


def test_a_model_that_decides_by_values_is_refused_with_advice() -> None:
    with pytest.raises(UntraceableError, match=r"Decides cannot run on tensors without values.*\n.*predict_memory"):
        trace_model(Decides(), torch.empty(1, 3, 4), micro_batch=2)


def test_what_is_given_with_values_may_be_looked_at() -> None:
    class Masked(Positions):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.linear(x).sum() if mask.all() else self.linear(x).mean()

    def given(batch: int) -> tuple[Tensor, Tensor]:
        return torch.empty(batch, 3, 4), torch.ones(batch, 3, dtype=torch.bool)

    trace_model(Masked(), given, micro_batch=2)


# ------------------------------------------------------------------------------------------------ bad input


def test_bad_input_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="the arguments of Linear are not known: pass inputs="):
        trace_model(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="must have the batch as first dimension"):
        trace_model(nn.Bilinear(2, 2, 1), (torch.empty(2, 2), torch.empty(3, 2)))
    with pytest.raises(ValueError, match="has no repeated blocks"):
        trace_model(nn.Linear(2, 2), torch.empty(1, 2), checkpoint="recompute")
    with pytest.raises(ValueError, match="no tensor-parallel plan is known for Linear"):
        trace_model(nn.Linear(2, 2), torch.empty(1, 2), tensor=2)
    with pytest.raises(ValueError, match="which do not divide the model's 4 heads"):
        trace_model(gpt(), tensor=3)
    with pytest.raises(ValueError, match="does not depend on any trained parameter"):
        trace_model(nn.Linear(2, 2).requires_grad_(False), torch.empty(1, 2))
    with pytest.raises(ValueError, match="loss must return a scalar tensor, got a tensor of"):
        trace_model(nn.Linear(2, 2), torch.empty(1, 2), loss=lambda output: output)


def test_frozen_parameters_have_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    found = trace_model(model, torch.empty(1, 8), micro_batch=4)
    assert sum(event.nbytes for event in found.events if isinstance(event, EngineEvent)) == 4 * (64 + 8)


def test_checkpoint_is_torchs_own() -> None:
    """A user's own recomputation, of something that is not a block."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 8)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: self.second(F.gelu(self.first(x))), x, use_reentrant=False).sum()

    found = trace_model(Own(), torch.empty(1, 8), micro_batch=4)
    assert sum(op.name == "gelu" for op in found.ops) == 2


def test_every_block_keeps_its_input_however_many_there_are() -> None:
    """An input that is gone leaves its address to another: each is kept all the same."""
    found = trace_model(gpt(layers=40), micro_batch=2, checkpoint="recompute")
    assert len(found.kept_input_bytes) == 40


# ------------------------------------------------------------------------------------------------ values and masks


class Attends(nn.Module):
    """Attention with a mask of some form."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        self.bias = nn.Parameter(torch.zeros(1, 4, 256, 256)) if bias else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, self.bias if mask is None else mask).sum()


def test_a_boolean_mask_is_widened_once_and_not_for_every_head() -> None:
    shape = (8, 1, 256, 256)

    def given(dtype: torch.dtype) -> Any:
        return lambda batch: (torch.empty(batch, 256, 64), torch.empty(shape, dtype=dtype, device="meta"))

    for kind in ("cuda", "cpu"):
        plain, wide = (
            peak(trace_model(Attends(), given(dtype), micro_batch=8, device_kind=kind))
            for dtype in (torch.float32, torch.bool)
        )
        mask = 4 * 8 * 256 * 256
        assert plain + mask <= wide <= plain + 1.5 * mask, kind


def test_a_bias_that_is_trained_takes_the_kernel_that_can() -> None:
    for kind in ("cuda", "cpu"):
        found = trace_model(Attends(bias=True), torch.empty(1, 256, 64), micro_batch=2, device_kind=kind)
        assert sum(event.nbytes for event in found.events if isinstance(event, EngineEvent)) > 4 * 4 * 256 * 256


def test_attention_that_was_imported_by_name_is_seen_too() -> None:
    from torch.nn.functional import scaled_dot_product_attention

    class Named(Attends):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            query, key, value = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            return checkpoint(scaled_dot_product_attention, query, key, value, use_reentrant=False).sum()

    found = trace_model(Named(), torch.empty(1, 256, 64), micro_batch=2, precision="bf16")
    assert sum(op.kind == "attention" for op in found.ops) == 3  # once more in backward


class Looks(nn.Module):
    """Looks at values: of its inputs, of what it makes, of what it writes into."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.linear(x)
        if self.how == "input" and not mask.all():
            raise AssertionError("the mask that was given is all ones")
        if self.how == "made" and not torch.ones(x.shape[:2], device=x.device).to(torch.bool).all():
            raise AssertionError("ones are true")
        if self.how == "buffer" and int(self.count) != 3:
            raise AssertionError("the buffer holds 3")
        if self.how == "written":
            flags = torch.zeros(4, dtype=torch.bool, device=x.device)
            flags[:] = y[0, 0] > 0
            return y.sum() if flags.any() else -y.sum()
        if self.how == "changes":
            mask.zero_()
        return y.sum()


@pytest.mark.parametrize("how", ["input", "made", "buffer", "changes"])
def test_an_example_keeps_its_values_and_they_stay_its_own(how: str) -> None:
    mask = torch.ones(2, 3, dtype=torch.int64)
    for inputs in ((torch.empty(2, 3, 4), mask), lambda batch: (torch.empty(batch, 3, 4), mask)):
        trace_model(Looks(how), inputs, micro_batch=2)
    assert mask.all()


def test_what_was_written_into_is_not_known_any_more() -> None:
    with pytest.raises(UntraceableError, match="cannot run on tensors without values"):
        trace_model(Looks("written"), (torch.empty(2, 3, 4), torch.ones(2, 3)), micro_batch=2)


def test_a_models_own_error_is_reported_as_such() -> None:
    class Typo(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[{"a": 1}["b"]]

    with pytest.raises(UntraceableError, match=r"Typo raised KeyError: 'b'\n.*pass inputs="):
        trace_model(Typo(2, 2), torch.empty(1, 2))


def test_parts_in_evaluation_mode_stay_there() -> None:
    def model(frozen: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), nn.Sequential(nn.Dropout(0.5)).train(not frozen), nn.Linear(64, 8))

    live, still = (trace_model(model(frozen), torch.empty(1, 8), micro_batch=64) for frozen in (False, True))
    assert sum(op.allocated_bytes for op in still.ops) < sum(op.allocated_bytes for op in live.ops)


def test_sequences_that_the_model_does_not_take_are_refused() -> None:
    for sequence, words in (
        (17, "longer than the model's context of 16"),
        (0, "positive integer, got 0"),
        (-5, "got -5"),
    ):
        with pytest.raises(ValueError, match=words):
            trace_model(gpt(), sequence=sequence)


def test_a_loss_that_fails_is_reported_as_such() -> None:
    targets = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"loss raised RuntimeError(.|\n)*create the targets there too"):
        trace_model(
            nn.Linear(4, 3), torch.empty(2, 4), micro_batch=2, loss=lambda output: F.cross_entropy(output, targets)
        )
    trace_model(
        nn.Linear(4, 3),
        torch.empty(2, 4),
        micro_batch=2,
        loss=lambda output: F.cross_entropy(output, targets.to(output.device)),
    )
