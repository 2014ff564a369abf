"""Make the bundled text of `zeroshard train`, as tokens, from the text that `zeroshard.train.shakespeare()` gives.

python -m benchmarks.bundled_text TEXT src/zeroshard/train/data
"""

from __future__ import annotations

import lzma
import sys
import tempfile
from pathlib import Path

from zeroshard.train.data.corpus import encode_corpus, open_corpus

FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 1, "pb": 1}]  # for 16-bit numbers


def main(text: Path, directory: Path) -> None:
    """Write shakespeare.xz, little-endian 16-bit ids, and tokenizer.json, of 1024 ids."""
    with tempfile.TemporaryDirectory() as temporary:
        encode_corpus([text], Path(temporary), vocab_size=1024)
        corpus = open_corpus(Path(temporary), holdout=0)
    ids = corpus.train[:-1]  # without the end of text
    (directory / "shakespeare.xz").write_bytes(lzma.compress(ids.astype("<u2").tobytes(), filters=FILTERS))
    corpus.tokenizer.save(str(directory / "tokenizer.json"), pretty=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
