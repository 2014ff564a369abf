"""The reference GPT: its size, its start, and that it learns."""

import random

import pytest
import torch
from plain import take_step
from torch import nn

from zeroshard.models import GPT, GPTConfig

TINY = GPTConfig(vocab_size=17, context=16, layers=2, heads=2, width=32)


def build(config: GPTConfig, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


@pytest.mark.parametrize(
    ("layers", "heads", "width", "billions"), [(24, 16, 2048, 1.4), (36, 32, 4096, 7.6), (48, 8, 512, 0.2)]
)
def test_large_shapes_have_their_size(layers: int, heads: int, width: int, billions: float) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=layers, heads=heads, width=width))
    counted = sum(p.numel() for p in model.parameters())
    assert counted == model.config.parameters
    assert int(counted / 1e8) / 10 == billions


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_parameter_formula_is_exact(bias: bool, tied: bool) -> None:
    config = GPTConfig(vocab_size=19, context=7, layers=3, heads=2, width=10, bias=bias, tied=tied)
    assert sum(p.numel() for p in GPT(config).parameters()) == config.parameters


def test_no_buffers() -> None:
    assert not list(GPT(TINY).buffers())


def test_tied_head_is_the_embedding() -> None:
    tied = GPT(GPTConfig(vocab_size=17, context=16, layers=1, heads=2, width=32, tied=True))
    assert tied.head.weight is tied.tokens.weight
    untied = GPT(TINY)
    assert untied.head.weight is not untied.tokens.weight


def test_starts_near_the_uniform_guess() -> None:
    tokens = torch.randint(17, (8, 16), generator=torch.Generator().manual_seed(0))
    loss = build(TINY)(tokens, tokens)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - torch.tensor(17.0).log().item()) < 0.1


def test_meta_model_is_initialised_module_by_module_in_any_order() -> None:
    config = GPTConfig(vocab_size=256, context=64, layers=8, heads=4, width=128)
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    owners = [m for m in model.modules() if list(m.parameters(recurse=False))]
    random.Random(0).shuffle(owners)
    torch.manual_seed(0)
    for module in owners:
        module.reset_parameters()

    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / (2 * config.layers) ** 0.5 if residual else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name


def test_a_token_sees_no_later_token() -> None:
    model = build(TINY)
    tokens = torch.randint(17, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 17
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_learns_to_copy() -> None:
    """The second half of each sequence repeats the first: only attention can know it."""
    model = build(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(100):
        half = torch.randint(17, (32, 8), generator=generator)
        sequence = torch.cat([half, half], dim=1)
        targets = sequence[:, 1:].clone()
        targets[:, :7] = -100  # the first half is noise: nothing to learn from it
        losses.append(take_step(optimizer, model(sequence[:, :-1], targets)))
    assert losses[-1] < losses[0] / 4

    half = torch.randint(17, (4, 8), generator=generator)
    written = model.generate(torch.cat([half, half[:, :1]], dim=1), steps=7)[:, 8:]
    assert (written == half).float().mean() > 0.8


def test_generate_slides_past_the_context() -> None:
    assert build(TINY).generate(torch.zeros(1, 3, dtype=torch.long), steps=20).shape == (1, 23)


def test_checkpointing_gives_the_same_gradients() -> None:
    tokens = torch.randint(17, (2, 16), generator=torch.Generator().manual_seed(0))
    plain = build(TINY)
    recomputing = build(GPTConfig(vocab_size=17, context=16, layers=2, heads=2, width=32, checkpoint=True))
    plain(tokens, tokens).backward()
    recomputing(tokens, tokens).backward()
    for (name, p), q in zip(plain.named_parameters(), recomputing.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"layers": 0}, "GPTConfig.layers must be a positive int, got 0"),
        ({"width": 2.5}, "GPTConfig.width must be a positive int, got 2.5"),
        ({"vocab_size": True}, "GPTConfig.vocab_size must be a positive int, got True"),
        ({"width": 100, "heads": 3}, "a multiple of its 3 heads, got 100: use a width of 99"),
    ],
)
def test_bad_configs_are_refused(bad: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GPTConfig(**bad)


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got sequences of 17 tokens, but the model's context is 16"):
        GPT(TINY)(torch.zeros(1, 17, dtype=torch.long))
