"""The data of `zeroshard train`: text to tokens without loss, and batches that depend on seed and step alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.train.data import corpus as corpus_module
from zeroshard.train.data.corpus import encode_corpus, open_corpus, read_text, shakespeare, text_files
from zeroshard.train.data.token_file import TokenFile, smallest_dtype, write_token_chunks
from zeroshard.train.data.token_loader import TokenLoader, sample_windows, shuffled_indices
from zeroshard.train.data.tokenizer import (
    END_OF_TEXT,
    encode_texts,
    end_of_text_id,
    load_tokenizer,
    tokenizer_vocab_size,
    train_tokenizer,
)
from zeroshard.utils.install_hint import install_hint

settings.register_profile("no timing", deadline=None)  # a slow machine is not a failure
settings.load_profile("no timing")

LINES = "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n\n" * 20
TOKENIZER = train_tokenizer([LINES], 300)


def write_tokens(path: Path, ids: object) -> None:
    array = np.asarray(ids)
    tokens = TokenFile(array if array.size else array.astype(np.uint16))  # numpy makes an empty list a float array
    write_token_chunks(path, [tokens.ids], smallest_dtype(int(tokens.ids.max(initial=0))))


def saved(directory: Path, tokenizer=TOKENIZER) -> Path:
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return path


# The corpus that comes with the package


def test_the_bundled_corpus_is_eight_plays_of_plain_ascii() -> None:
    text = shakespeare()
    assert text.isascii() and 1_030_000 < len(text) < 1_050_000
    assert text.count("by William Shakespeare") == 8
    assert re.search("gutenberg|copyright|http|licensed", text, re.IGNORECASE) is None
    notice = (Path(__file__).parents[2] / "NOTICE").read_text()
    for title in re.findall(r"^(.+)\n\nby William Shakespeare", text, re.MULTILINE):
        name = re.sub("^THE TRAGEDY OF |, .*$", "", title)  # THE TRAGEDY OF KING LEAR; HAMLET, PRINCE OF DENMARK
        assert name.lower() in notice.lower()


# Tokenizer


@pytest.mark.slow
@given(st.text(st.characters(codec="utf-8")))
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["\r\n\n \t\n  x", "naïve – 東京 🎭\u2028", "\x00\x7f", "  ", LINES])
def test_white_space_and_foreign_letters_come_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_a_tokenizer_has_as_many_ids_as_asked_for_and_the_text_allows() -> None:
    assert tokenizer_vocab_size(train_tokenizer([shakespeare()[:50_000]], 500)) == 500
    assert tokenizer_vocab_size(train_tokenizer(["ab"], 500)) == 257  # nothing occurs twice
    assert end_of_text_id(TOKENIZER) == 0


@pytest.mark.slow
def test_the_same_text_gives_the_same_tokenizer_in_every_process() -> None:
    program = (
        "import sys; from zeroshard.train.data.tokenizer import train_tokenizer; "
        "sys.stdout.write(train_tokenizer(sys.stdin.read().splitlines(True), 700).to_str())"
    )
    text = shakespeare()[:100_000]
    here = train_tokenizer(text.splitlines(True), 700).to_str()
    for seed, threads in (("1", "1"), ("2", "3")):
        varied = {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"}
        environment = {**os.environ, **varied, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        there = subprocess.run(
            [sys.executable, "-c", program],
            input=text,
            env=environment,
            encoding="utf-8",
            stdout=subprocess.PIPE,
            check=True,
        )
        assert there.stdout == here


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocabulary must be at least 257.*got 256"):
        train_tokenizer([LINES], 256)


def test_a_tokenizer_is_loaded_from_its_file_or_its_directory(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for given_path in (path, tmp_path, str(path)):
        assert load_tokenizer(given_path).to_str() == TOKENIZER.to_str()


def test_a_limit_saved_with_a_tokenizer_does_not_cut_texts(tmp_path: Path) -> None:
    limited = train_tokenizer([LINES], 300)
    limited.enable_truncation(4)
    limited.enable_padding(length=4)
    loaded = load_tokenizer(saved(tmp_path, limited))
    assert loaded.decode(loaded.encode(LINES).ids) == LINES
    assert len(loaded.encode("a").ids) == 1


def test_anything_but_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist: pass a tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"tokenizer gpt-nowhere does not exist: pass a tokenizer\.json"):
        load_tokenizer("gpt-nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"`tokenizers` cannot read .*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = saved(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for call in (lambda: train_tokenizer([LINES], 300), lambda: load_tokenizer(path)):
        with pytest.raises(ImportError, match=re.escape(install_hint("train"))):
            call()


def test_pieces_are_encoded_in_order_and_texts_end(tmp_path: Path) -> None:
    texts = [f"{number} question\n" for number in range(40)]  # more than one batch
    ids = [part.tolist() for part in encode_texts(TOKENIZER, [*texts, None, "x"])]
    assert [TOKENIZER.decode(part) for part in ids[:40]] == texts
    assert ids[40] == [TOKENIZER.token_to_id(END_OF_TEXT)]
    assert TOKENIZER.decode(ids[41]) == "x"


# Token files


@pytest.mark.parametrize(("largest", "dtype"), [(65_535, np.uint16), (65_536, np.uint32), (2**32 - 1, np.uint32)])
def test_tokens_are_written_in_the_smallest_dtype(tmp_path: Path, largest: int, dtype: type) -> None:
    write_tokens(tmp_path / "t.npy", [3, largest, 0])
    tokens = TokenFile.open(tmp_path / "t.npy")
    assert tokens.ids.dtype == dtype and tokens.ids.tolist() == [3, largest, 0]
    assert isinstance(tokens.ids, np.memmap)
    assert np.load(tmp_path / "t.npy").tolist() == [3, largest, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["t.npy"]


def test_a_file_that_was_not_finished_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "t.npy"
    write_tokens(path, [1, 2, 3])

    def chunks():
        yield np.arange(100)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_token_chunks(path, chunks(), "uint16")
    assert TokenFile.open(path).ids.tolist() == [1, 2, 3]
    assert [file.name for file in tmp_path.iterdir()] == ["t.npy"]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, -1], "the id -1 of token 1 does not fit in uint16"),
        ([2**32], "token id 4294967296 does not fit in uint32"),
        ([0.5], r"must contain integers \(got float64\)"),
        ([[1, 2]], r"must have one dimension \(got the shape \(1, 2\)\)"),
        ([], "no token ids to write"),
    ],
)
def test_ids_that_cannot_be_written_are_refused(tmp_path: Path, ids: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        write_tokens(tmp_path / "t.npy", ids)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_raw_ids_are_little_endian(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(b"".join(id.to_bytes(np.dtype(dtype).itemsize, "little") for id in (1, 258, 65_535)))
    assert TokenFile.open(path, dtype).ids.tolist() == [1, 258, 65_535]


def test_token_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    def refused(name: str, content: bytes | np.ndarray, words: str, dtype: str = "uint16") -> None:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            np.save(path, content)
        with pytest.raises(ValueError, match=words):
            TokenFile.open(path, dtype)

    refused(
        "odd.bin", b"123", r"odd\.bin has 3 bytes, which is not a multiple of the 2 bytes of uint16: it is truncated"
    )
    refused("odd.bin", b"123456", "not a multiple of the 4 bytes of uint32", "uint32")
    refused("odd.bin", b"1234", r"must be uint16 or uint32 \(got 'float32'\)", "float32")
    refused("empty.bin", b"", r"token file .*empty\.bin is empty")
    refused("empty.npy", np.empty(0, np.uint16), r"token file .*empty\.npy is empty")
    refused("float.npy", np.ones(3), r"float\.npy must contain integers \(got float64\): save it as uint16")
    refused("bool.npy", np.ones(3, bool), "got bool")
    refused("square.npy", np.ones((2, 2), np.uint16), r"must have one dimension \(got the shape \(2, 2\)\)")
    refused("object.npy", np.array([None]), "is not a complete .npy file")
    refused("text.npy", b"not numpy", "is not a complete .npy file")
    refused("none.npy", b"", "is not a complete .npy file")
    refused("t.pt", b"1234", r"its name must end in \.npy or \.bin")
    np.save(tmp_path / "cut.npy", np.arange(1000))
    refused("cut.npy", (tmp_path / "cut.npy").read_bytes()[:-1], r"cut\.npy is not a complete \.npy file")
    with pytest.raises(FileNotFoundError, match=r"token file .*missing\.bin does not exist"):
        TokenFile.open(tmp_path / "missing.bin")


@pytest.mark.parametrize(("share", "held"), [(0.0, 0), (0.1, 10), (0.255, 26), (0.99, 99)])
def test_the_last_share_is_held_out_without_a_copy(tmp_path: Path, share: float, held: int) -> None:
    write_tokens(tmp_path / "t.npy", np.arange(100))
    whole = TokenFile.open(tmp_path / "t.npy")
    train, held_out = whole.split(share)
    assert train.ids.tolist() == list(range(100 - held)) and held_out.ids.tolist() == list(range(100 - held, 100))
    assert held_out.start == 100 - held and held_out.path == whole.path
    assert not held or np.shares_memory(held_out.ids, whole.ids)


def test_a_share_of_everything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be at least 0 and below 1 \(got 1\.5\)"):
        TokenFile(np.arange(10)).split(1.5)


# Text files


def read_all(paths: list[Path | str]) -> list[str]:
    return [text for file in text_files(paths) for text in read_text(file)]


def test_a_directory_gives_its_text_files_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a.TXT", "a/.hidden.txt", ".git/c.txt", "d.png", "a/b/c.rst"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder.txt").mkdir()
    names = [file.relative_to(tmp_path).as_posix() for file in text_files([tmp_path])]
    assert names == ["a/b/c.rst", "a/z.md", "a.TXT", "b.txt"]
    assert read_all([tmp_path / "d.png", str(tmp_path / "a")]) == ["d.png", "a/b/c.rst", "a/z.md"]


texts = st.text(st.sampled_from("a b\n\ré東🎭"), max_size=200)


@pytest.mark.slow
@given(texts, st.integers(1, 40))
def test_pieces_of_a_text_give_the_whole(tmp_path_factory: pytest.TempPathFactory, text: str, chunk: int) -> None:
    path = tmp_path_factory.mktemp("texts") / "text"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "CHUNK_BYTES", chunk)
        pieces = list(read_text(path))
    assert "".join(pieces) == text and "" not in pieces
    assert all(len(piece.encode()) <= 2 * chunk + 4 for piece in pieces)


def test_text_in_pieces_has_the_tokens_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"{line}\n" for line in ("To be,", "", "", "or", "  not\t", " to be", "that", "is", "") * 150)
    tokenizer = train_tokenizer([text], 400)  # with tokens of several line ends and spaces
    (tmp_path / "text").write_text(text)
    monkeypatch.setattr(corpus_module, "CHUNK_BYTES", 100)
    pieces = list(read_text(tmp_path / "text"))
    assert len(pieces) > 50
    ids = np.concatenate(list(encode_texts(tokenizer, pieces)))
    assert ids.tolist() == tokenizer.encode(text).ids


def test_texts_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"text file or directory .*nowhere does not exist"):
        read_all([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"has no text files: expected files named .*\*\.md, .*\*\.txt"):
        read_all([tmp_path])
    latin = tmp_path / "latin.txt"
    latin.touch()
    with pytest.raises(ValueError, match=r"text file .*latin\.txt is empty"):
        read_all([latin])
    latin.write_bytes("caf\u00e9\n".encode() * 3 + "caf\u00e9\n".encode("latin1") * 3)
    for chunk in (1, 4, 7, 100):
        monkeypatch.setattr(corpus_module, "CHUNK_BYTES", chunk)
        with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 at byte 21 \(0xe9\): convert it"):
            read_all([latin])


# From options to tokens


def test_texts_become_tokens_and_back(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(LINES)
    (tmp_path / "texts" / "b.txt").write_text("naïve\r\n" * 30, newline="")
    assert encode_corpus([tmp_path / "texts"], tmp_path / "corpus", vocab_size=300)
    corpus = open_corpus(tmp_path / "corpus", holdout=0.25)
    assert corpus.vocab_size == 300 and corpus.tokenizer_path is not None and corpus.validation is not None
    ids = [*corpus.train.ids.tolist(), *corpus.validation.ids.tolist()]
    assert len(corpus.validation) == round(len(ids) / 4)
    first, second = LINES, "naïve\r\n" * 30
    text = load_tokenizer(corpus.tokenizer_path).decode(ids, skip_special_tokens=False)
    assert text == f"{first}{END_OF_TEXT}{second}{END_OF_TEXT}"


@pytest.mark.slow
def test_separate_validation_texts_have_the_same_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("a question to suffer")
    encode_corpus([], tmp_path / "corpus", vocab_size=300, validation=[str(tmp_path / "held.txt")])
    corpus = open_corpus(tmp_path / "corpus", holdout=0.5)
    assert corpus.validation is not None and corpus.tokenizer_path is not None
    tokenizer = load_tokenizer(corpus.tokenizer_path)
    assert tokenizer.decode(corpus.train.ids.tolist()) == shakespeare()  # nothing of it is held out
    assert tokenizer.decode(corpus.validation.ids.tolist()) == "a question to suffer"


def test_a_given_tokenizer_is_used_and_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    encode_corpus([tmp_path / "a.txt"], tmp_path / "corpus", tokenizer=saved(tmp_path), vocab_size=9)
    corpus = open_corpus(tmp_path / "corpus", holdout=0)
    assert corpus.vocab_size == 300 and corpus.validation is None
    assert corpus.train.ids.tolist() == [*TOKENIZER.encode(LINES).ids, 0]
    assert load_tokenizer(tmp_path / "corpus").to_str() == TOKENIZER.to_str()


@pytest.mark.parametrize("name", ["t.npy", "t.bin"])
def test_a_token_file_is_used_where_it_lies(tmp_path: Path, name: str) -> None:
    ids = np.arange(50, dtype=np.uint16)
    np.save(tmp_path / name, ids) if name.endswith("npy") else ids.tofile(tmp_path / name)
    encode_corpus([tmp_path / name], tmp_path / "corpus")
    corpus = open_corpus(tmp_path / "corpus", holdout=0.2)
    assert corpus.train.path == (tmp_path / name).resolve()
    assert (corpus.tokenizer_path, corpus.vocab_size) == (None, None)
    assert corpus.validation is not None and corpus.validation.ids.tolist() == list(range(40, 50))
    assert [path.name for path in (tmp_path / "corpus").iterdir()] == ["corpus.json"]


def test_token_files_and_texts_go_together_with_a_tokenizer(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t.npy", [5, 6, 7])
    (tmp_path / "a.txt").write_text(LINES)
    for train, held_out in (("t.npy", "a.txt"), ("a.txt", "t.npy")):
        paths = {"paths": [tmp_path / train], "validation": [tmp_path / held_out], "directory": tmp_path / "corpus"}
        with pytest.raises(ValueError, match=r"t\.npy has token ids, but the other data is text"):
            encode_corpus(**paths)
        encode_corpus(**paths, tokenizer=saved(tmp_path))
        corpus = open_corpus(tmp_path / "corpus")
        assert corpus.validation is not None and corpus.vocab_size == 300
        encoded = {train: corpus.train, held_out: corpus.validation}
        assert encoded["t.npy"].ids.tolist() == [5, 6, 7]
        assert encoded["a.txt"].ids.tolist() == [*TOKENIZER.encode(LINES).ids, 0]


def test_a_token_file_stands_alone(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t.npy", [5, 6, 7])
    with pytest.raises(ValueError, match=r"t\.npy is a token file and must be the only path \(got 2 paths\)"):
        encode_corpus([tmp_path / "t.npy", tmp_path], tmp_path / "corpus")
    with pytest.raises(FileNotFoundError, match=r"token file .*gone\.bin does not exist"):
        encode_corpus([tmp_path / "gone.bin"], tmp_path / "corpus")


def test_a_corpus_is_encoded_again_only_when_something_changed(tmp_path: Path) -> None:
    text, directory = tmp_path / "a.txt", tmp_path / "corpus"
    text.write_text(LINES)
    assert encode_corpus([text], directory, vocab_size=300)
    made = (directory / "train.npy").stat().st_mtime_ns
    assert not encode_corpus([text], directory, vocab_size=300)
    assert (directory / "train.npy").stat().st_mtime_ns == made
    assert encode_corpus([text], directory, vocab_size=310)
    text.write_text(LINES + "!")
    assert encode_corpus([text], directory, vocab_size=310)
    (directory / "train.npy").unlink()
    assert encode_corpus([text], directory, vocab_size=310)
    (directory / "corpus.json").write_text("{")
    assert encode_corpus([text], directory, vocab_size=310)
    assert encode_corpus([text], directory, tokenizer=saved(tmp_path))
    assert json.loads((directory / "corpus.json").read_text())["vocabulary"] == 300


def test_an_encoding_that_failed_leaves_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    (tmp_path / "b.txt").write_bytes(b"\xff")
    encode_corpus([tmp_path / "a.txt"], tmp_path / "corpus", vocab_size=300)
    with pytest.raises(ValueError, match=r"b\.txt is not UTF-8 at byte 0 \(0xff\)"):
        encode_corpus([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "corpus", vocab_size=300)
    with pytest.raises(FileNotFoundError, match="has no encoded corpus"):
        open_corpus(tmp_path / "corpus")


def test_encoding_leaves_no_threads_that_a_fork_would_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    encode_corpus([tmp_path / "a.txt"], tmp_path / "one", vocab_size=300)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"  # the user's own
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    encode_corpus([tmp_path / "a.txt"], tmp_path / "two", vocab_size=300)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


# The order of samples


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 2**40))
def test_an_epoch_visits_every_window_once(size: int, seed: int, epoch: int) -> None:
    order = shuffled_indices(np.arange(size, dtype=np.uint64), size, seed, epoch)
    assert sorted(order.tolist()) == list(range(size))


@given(size=st.integers(2**20, 2**62), seed=st.integers(0, 2**64), start=st.integers(0, 2**61))
def test_places_far_apart_in_a_huge_data_set_have_windows_of_their_own(size: int, seed: int, start: int) -> None:
    places = np.unique(np.concatenate([np.arange(100), np.arange(100) + start % (size - 100)]).astype(np.uint64))
    found = shuffled_indices(places, size, seed, 0).tolist()
    assert len(set(found)) == len(places) and max(found) < size


@pytest.mark.slow
@given(size=st.integers(30, 500), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_seeds_and_epochs_have_orders_of_their_own(size: int, seed: int, epoch: int) -> None:
    places = np.arange(size, dtype=np.uint64)
    keys = [(seed, epoch), (seed + 1, epoch), (seed, epoch + 1), (seed + 1, epoch + 1)]
    orders = {tuple(shuffled_indices(places, size, *key).tolist()) for key in keys}
    assert len(orders) == 4 and tuple(range(size)) not in orders


def test_every_window_comes_to_every_place() -> None:
    size, draws = 7, 700
    orders = np.stack([shuffled_indices(np.arange(size, dtype=np.uint64), size, 0, epoch) for epoch in range(draws)])
    counts = np.stack([(orders == window).sum(0) for window in range(size)])
    assert counts.min() > 60 and counts.max() < 140  # 100 ± 9.3 are expected; the seeds are fixed


def test_samples_run_on_over_epochs() -> None:
    all_at_once = sample_windows(0, 50, windows=7, seed=3)
    assert all_at_once.tolist() == [int(sample_windows(n, 1, windows=7, seed=3)[0]) for n in range(50)]
    for epoch in range(7):
        assert sorted(all_at_once[7 * epoch : 7 * epoch + 7].tolist()) == list(range(7))


def test_the_order_stays_what_it_is_between_versions() -> None:
    # a changed order would let a resumed run see windows twice
    assert sample_windows(10, 12, windows=16, seed=1234).tolist() == [3, 4, 1, 14, 10, 6, 5, 8, 15, 1, 12, 9]


# Loader


def loader(tokens: int = 1000, **options: int) -> TokenLoader:
    return TokenLoader(np.arange(tokens, dtype=np.uint16), **{"sequence": 9, "batch": 8, "seed": 5, **options})


def test_targets_are_the_tokens_that_follow() -> None:
    inputs, targets = loader().batch(3, 0, 1)
    assert inputs.shape == targets.shape == (8, 9) and inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)  # the tokens count up
    assert (inputs[:, 0] % 9 == 0).all()  # windows do not overlap


@pytest.mark.slow
@given(step=st.integers(0, 10**6), seed=st.integers(0, 99), batch=st.sampled_from([4, 8, 12]))
def test_the_batch_is_the_same_for_every_number_of_ranks(step: int, seed: int, batch: int) -> None:
    loaded = loader(seed=seed, batch=batch)
    whole = loaded.batch(step, 0, 1)
    for ranks in (2, 4):
        parts = [loaded.batch(step, rank, ranks) for rank in range(ranks)]
        for side in (0, 1):
            assert torch.equal(torch.cat([part[side] for part in parts]), whole[side])


def test_a_resumed_run_sees_the_same_batches() -> None:
    straight = loader()
    batches = [straight.batch(step, 0, 1)[0] for step in range(40)]
    for step in (39, 17, 0, 25):  # in any order, from a new loader
        assert torch.equal(loader().batch(step, 0, 1)[0], batches[step])
    assert not torch.equal(loader(seed=6).batch(0, 0, 1)[0], batches[0])


@pytest.mark.parametrize("batch", [1, 6, 50])  # 50: more than an epoch a step
def test_an_epoch_of_batches_holds_every_window_once(batch: int) -> None:
    loaded = loader(tokens=9 * 12 + 1, batch=batch)
    assert loaded.num_windows == 12
    steps = -(-36 // batch)
    starts = torch.cat([loaded.batch(step, 0, 1)[0][:, 0] for step in range(steps)])
    for epoch in range(3):
        assert sorted(starts[12 * epoch : 12 * epoch + 12].tolist()) == [9 * window for window in range(12)]


@pytest.mark.parametrize(("tokens", "windows"), [(10, 1), (18, 1), (19, 2), (27, 2), (28, 3)])
def test_windows_need_a_token_after_them(tokens: int, windows: int) -> None:
    loaded = loader(tokens)
    assert loaded.num_windows == windows
    assert loaded.sequential_batch(windows - 1, 1)[1][0, -1] == 9 * windows


def test_evaluation_reads_in_order_and_ends() -> None:
    loaded = loader(9 * 7 + 1)
    assert loaded.sequential_batch(0, 3)[0].flatten().tolist() == list(range(27))
    assert loaded.sequential_batch(1, 3)[1].flatten().tolist() == list(range(28, 55))
    with pytest.raises(IndexError, match="batch 2 of 3 windows does not exist: an array has 7 windows"):
        loaded.sequential_batch(2, 3)
    for index, rows in ((-1, 3), (0, 0), (0, 8)):
        with pytest.raises(IndexError, match=f"batch {index} of {rows} windows does not exist"):
            loaded.sequential_batch(index, rows)


def test_a_held_out_part_is_read_from_its_own_beginning() -> None:
    _, held_out = TokenFile(np.arange(100)).split(0.4)
    assert TokenLoader(held_out, sequence=5, batch=1, seed=0).sequential_batch(0, 1)[0].tolist() == [
        [60, 61, 62, 63, 64]
    ]


def test_an_id_outside_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    ids = np.zeros(100, np.int64)
    ids[87] = 300
    write_tokens(tmp_path / "t.npy", ids)
    _, held_out = TokenFile.open(tmp_path / "t.npy").split(0.4)
    options = {"sequence": 5, "batch": 1, "seed": 0}
    TokenLoader(held_out, **options, vocab_size=301).sequential_batch(5, 1)
    loaded = TokenLoader(held_out, **options, vocab_size=300)
    loaded.sequential_batch(0, 1)  # only where it is met
    with pytest.raises(ValueError, match=r"token 87 of .*t\.npy is 300, but ids go from 0 to 299: check"):
        loaded.sequential_batch(5, 1)
    ids[87] = -2
    with pytest.raises(ValueError, match="token 87 of the array is -2, but ids go from 0:"):
        TokenLoader(ids, **options).sequential_batch(17, 1)


def test_what_a_loader_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="an array has 9 tokens, but a sequence of 9 and its next token need"):
        loader(tokens=9)
    for name in ("sequence", "batch"):
        with pytest.raises(ValueError, match=rf"{name} must be at least 1 \(got 0\)"):
            loader(**{name: 0})
    with pytest.raises(ValueError, match=r"seed must be at least 0 \(got -1\)"):
        loader(seed=-1)
    with pytest.raises(ValueError, match="a batch of 8 sequences is not a multiple of the 3 ranks"):
        loader().batch(0, 0, 3)
    for step, rank in ((-1, 0), (0, 2), (0, -1)):
        with pytest.raises(ValueError, match=rf"step and rank count from 0 \(got step {step}, rank {rank} of 2\)"):
            loader().batch(step, rank, 2)
