"""TokenLoader: the batch of tokens for a step.

There are no worker processes: a batch is a few slices of a memory-mapped file, copied in microseconds. Any step's batch
can be read at any time, so there is no state to save.

[Note: the order of samples]
The tokens are split into windows of `sequence` tokens. Training uses samples 0, 1, 2, … in order, `batch` of them per
step: sample n is at position n % windows of epoch n // windows, and the seed determines each epoch's own order. So a
batch depends only on the seed and the step, not on the number of ranks or on interruptions. Every epoch visits every
window once, and a batch may span two epochs.

The order of an epoch is not stored (that would take 8 bytes per window on every rank, and a new shuffle every epoch).
It is computed position by position, by a keyed bijection. A Feistel network permutes the numbers of b bits: it splits a
number into two halves and xors to each half, in turn, a hash of the other, which is invertible for any hash. With b the
bits of the last window's index, fewer than half of the numbers are not windows. From such a number the network is
applied again until it reaches a window (cycle walking), which keeps the map one to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zeroshard.train.options import TrainingError

MAX_EPOCHS_PER_STEP = 1000
_FEISTEL_ROUNDS = 8  # each half is hashed four times: two are too few to look random, more do not help


class TokenLoader:
    """Reads batches of token windows; the target of each token is the next one.

    >>> loader = TokenLoader(np.arange(13), sequence=3, batch=2, seed=0, vocab_size=13)
    >>> loader.num_windows  # of 3 tokens and the next one
    4
    >>> inputs, targets = loader.read_windows([0, 1])
    >>> inputs.tolist(), targets.tolist()
    ([[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]])
    >>> [loader.batch(step, rank=0, ranks=1)[0][:, 0].tolist() for step in range(4)]  # two epochs
    [[3, 9], [0, 6], [3, 6], [9, 0]]
    """

    def __init__(
        self, tokens: NDArray[np.integer[Any]], *, sequence: int, batch: int, seed: int, vocab_size: int
    ) -> None:
        """Read windows of `sequence` tokens, `batch` of them per step over all ranks.

        An id that is not below `vocab_size` raises when it is read: an embedding would read past its end.
        """
        if len(tokens) <= sequence:
            raise ValueError(
                f"the data has {len(tokens)} tokens, but a sequence of {sequence} and its next token need "
                f"{sequence + 1}: pass more text, or a shorter sequence"
            )
        self.tokens = tokens
        self.sequence = sequence
        self.batch_size = batch
        self.seed = seed
        self.vocab_size = vocab_size
        self.num_windows = (len(tokens) - 1) // sequence
        """Windows per epoch. The remainder at the end, less than a window, is not read."""
        if batch > MAX_EPOCHS_PER_STEP * self.num_windows:
            raise ValueError(
                f"a batch of {batch} sequences would read all {self.num_windows} sequences of the data more than "
                f"{MAX_EPOCHS_PER_STEP} times in a step: pass a smaller --batch, or more text"
            )

    def batch(self, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of a step's batch: inputs and targets, int64, (batch / ranks, sequence).

        The concatenated rows of all ranks are the same for every number of ranks. Steps count from 0.
        """
        rows = self.batch_size // ranks
        first = step * self.batch_size + rank * rows
        return self.read_windows(sample_windows(first, rows, self.num_windows, self.seed).tolist())

    def read_windows(self, windows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return windows by their index in the file, as inputs and targets."""
        ids = np.empty((len(windows), self.sequence + 1), dtype=np.int64)
        for row, window in zip(ids, windows, strict=True):
            row[:] = self.tokens[window * self.sequence :][: self.sequence + 1]
        unknown = ids[(ids < 0) | (ids >= self.vocab_size)]
        if unknown.size:
            position = int(np.flatnonzero(self.tokens == unknown[0])[0])
            source = getattr(self.tokens, "filename", "the data")
            raise TrainingError(
                f"token {position} of {source} is {unknown[0]}, but ids go from 0 to {self.vocab_size - 1}: check that "
                "the vocabulary is that of the tokenizer that made the ids, and that a .bin has 16-bit ids"
            )
        rows = torch.from_numpy(ids)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def sample_windows(first: int, count: int, windows: int, seed: int) -> NDArray[np.uint64]:
    """Return the windows of samples `first` to `first + count`; see [Note: the order of samples].

    >>> [sample_windows(5 * epoch, 5, windows=5, seed=7).tolist() for epoch in range(2)]
    [[1, 2, 4, 0, 3], [4, 3, 0, 1, 2]]
    """
    parts = []
    while count:
        epoch, position = divmod(first, windows)
        num_here = min(count, windows - position)
        parts.append(shuffled_indices(np.arange(position, position + num_here, dtype=np.uint64), windows, seed, epoch))
        first, count = first + num_here, count - num_here
    return np.concatenate(parts)


def shuffled_indices(positions: NDArray[np.uint64], size: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Return the elements at `positions` of a pseudo-random order of range(size); each (seed, epoch) has its own.

    >>> shuffled_indices(np.arange(4, dtype=np.uint64), 10**9, seed=0, epoch=0).tolist()
    [825120821, 668828165, 192495340, 179227706]
    """
    keys = np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(_FEISTEL_ROUNDS, np.uint64).astype(np.uint64)
    bits = (size - 1).bit_length()
    indices = _feistel(positions, bits, keys)
    while (is_outside := indices >= size).any():
        indices[is_outside] = _feistel(indices[is_outside], bits, keys)
    return indices


def _feistel(numbers: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute the numbers below 2**bits."""
    low = np.uint64(bits - bits // 2)  # the halves may differ by a bit, because they are never swapped
    left_mask = _bit_mask(bits // 2)
    right_mask = _bit_mask(bits - bits // 2)
    left = numbers >> low
    right = numbers & right_mask
    for left_key, right_key in zip(keys[::2], keys[1::2], strict=True):
        left = left ^ (_hash(right, left_key) & left_mask)
        right = right ^ (_hash(left, right_key) & right_mask)
    return (left << low) | right


def _hash(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Hash numbers: every input bit affects the low bits of the result."""
    mixed = numbers ^ key
    for _ in range(2):
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd
    return mixed ^ (mixed >> np.uint64(32))


def _bit_mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)
