"""The reference GPT: a pre-norm decoder in plain PyTorch.

Every module with parameters can initialize them by its own `reset_parameters`. So the model can be built on the meta
device and initialized later, module by module and in any order:

>>> import torch
>>> with torch.device("meta"):
...     model = GPT(GPTConfig(layers=24, heads=16, width=2048))
>>> f"{model.config.parameters / 1e9:.1f}B"
'1.4B'
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

INIT_STD = 0.02  # of every matrix except the residual projections
MAX_LAYERS = 4096  # the sizes to which models are planned; beyond, a plan would take hours, or all memory
MAX_PARAMETERS = 10**14


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT."""

    vocab_size: int = 50304
    """Number of token ids."""
    context: int = 1024
    """Longest sequence, in tokens."""
    layers: int = 12
    """Number of blocks."""
    heads: int = 12
    """Attention heads per block; must divide `width`."""
    width: int = 768
    """Size of the residual stream."""
    bias: bool = True
    """Whether linear layers (except the head) and norms have a bias."""
    tied: bool = False
    """Whether the head shares its weight with the token embedding."""
    checkpoint: bool = False
    """Whether to save only the blocks' inputs and recompute everything else in backward."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "heads", "width"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"GPTConfig.{name} must be a positive int, got {value!r}")
        if self.width % self.heads:
            raise ValueError(
                f"GPTConfig.width must be a multiple of its {self.heads} heads, got {self.width}: use a width of "
                f"{self.width - self.width % self.heads or self.heads}, or another number of heads"
            )
        if self.layers > MAX_LAYERS or self.parameters > MAX_PARAMETERS:
            raise ValueError(
                f"a GPT has at most {MAX_LAYERS:,} layers and {MAX_PARAMETERS:,} parameters, got {self.layers:,} and "
                f"{self.parameters:,}"
            )

    @property
    def parameters(self) -> int:
        """Ψ, the exact number of parameters of `GPT(self)`."""
        width, has_bias = self.width, int(self.bias)
        block = 12 * width**2 + 2 * width + has_bias * 11 * width  # matrices, two norms, every bias
        embeddings = (self.vocab_size + self.context) * width
        head = 0 if self.tied else self.vocab_size * width
        return embeddings + self.layers * block + (1 + has_bias) * width + head


class Linear(nn.Linear):
    """A linear layer whose weight is initialized from a normal distribution with its own standard deviation."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, init_std: float = INIT_STD) -> None:
        self.init_std = init_std  # before nn.Linear.__init__, which calls reset_parameters
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding with GPT-2's initialization."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig, residual_std: float) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.qkv = Linear(config.width, 3 * config.width, bias=config.bias)
        self.out = Linear(config.width, config.width, bias=config.bias, init_std=residual_std)

    def forward(self, x: Tensor) -> Tensor:  # (batch, sequence, width), as in all modules below
        parts = self.qkv(x).chunk(3, -1)  # of all heads, or of this rank's heads under tensor parallelism
        query, key, value = (part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # (batch, heads, sequence, -1)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, config: GPTConfig, residual_std: float) -> None:
        super().__init__()
        self.up = Linear(config.width, 4 * config.width, bias=config.bias)
        self.down = Linear(4 * config.width, config.width, bias=config.bias, init_std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """Attention and MLP, each applied to the normalized residual stream and added to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        residual_std = INIT_STD / (2 * config.layers) ** 0.5  # two additions per layer keep the stream's variance
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config, residual_std)
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config, residual_std)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """Token and position embeddings, `config.layers` blocks, a norm and a head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = Embedding(config.vocab_size, config.width)
        self.positions = Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits of (batch, sequence) tokens or, given the targets, the mean cross-entropy in fp32."""
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(
                f"got sequences of {length} tokens, but the model's context is {self.config.context}: "
                f"shorten them or build the model with GPTConfig(context={length})"
            )
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        recompute = self.config.checkpoint and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        logits: Tensor = self.head(self.norm(x))  # (batch, sequence, vocab_size)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(self, tokens: Tensor, steps: int) -> Tensor:
        """Append the `steps` likeliest next tokens, one by one, to (batch, sequence) tokens."""
        for _ in range(steps):
            logits = self(tokens[:, -self.config.context :])
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        return tokens


def find_output_layers(module: nn.Module) -> tuple[str, ...]:
    """Return the name of the layer that computes the logits: it stays in bf16 with --precision fp8.

    >>> find_output_layers(GPT(GPTConfig(vocab_size=16, context=4, layers=1, heads=1, width=8)))
    ('head',)
    """
    get_output = getattr(module, "get_output_embeddings", None)
    output = get_output() if callable(get_output) else getattr(module, "head", None)
    return tuple(name for name, each in module.named_modules() if output is not None and each is output)
