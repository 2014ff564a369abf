"""The data of `zeroshard train`: text to tokens without loss, and batches that depend on seed and step alone."""

import contextlib
import lzma
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import RanksFailed, run_threads

from benchmarks import bundled_text
from zeroshard.train.commands.train import main, read_options
from zeroshard.train.data import corpus as corpus_module
from zeroshard.train.data.corpus import (
    END_OF_TEXT,
    encode_corpus,
    encode_prompt,
    end_of_text_ids,
    load_tokenizer,
    open_corpus,
    open_tokens,
    read_text,
    shakespeare,
    tokenizer_vocab_size,
    train_tokenizer,
)
from zeroshard.train.data.token_loader import TokenLoader, sample_windows, shuffled_indices
from zeroshard.train.models import open_language_model
from zeroshard.train.options import TrainingError
from zeroshard.train.rank import RankInfo
from zeroshard.train.run_directory import RunDirectory
from zeroshard.train.training_setup import _open_corpus
from zeroshard.utils.install_hint import install_hint

settings.register_profile("no timing", deadline=None)  # a slow machine is not a failure
settings.load_profile("no timing")

LINES = "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n\n" * 20
TOKENIZER = train_tokenizer([LINES], 300)


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


def test_the_bundled_tokens_are_made_by_their_script(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(shakespeare())
    bundled_text.main(tmp_path / "text", tmp_path)
    directory = Path(corpus_module.__file__).parent
    for read, name in ((lzma.open, "shakespeare.xz"), (open, "tokenizer.json")):
        with read(tmp_path / name, "rb") as made, read(directory / name, "rb") as bundled:
            assert made.read() == bundled.read()


# Tokenizer


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["\r\n\n \t\n  x", "naïve – 東京 🎭\u2028", "\x00\x7f", "  ", LINES])
def test_white_space_and_foreign_letters_come_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_a_tokenizer_has_as_many_ids_as_asked_for_and_the_text_allows() -> None:
    assert tokenizer_vocab_size(train_tokenizer([shakespeare()[:50_000]], 500)) == 500
    assert tokenizer_vocab_size(train_tokenizer(["ab"], 500)) == 257  # nothing occurs twice
    assert end_of_text_ids(TOKENIZER) == [0]


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
    whole = saved(tmp_path).read_bytes()
    for damaged in (b"", b"{}", b"\xff", whole[:-100], whole.replace(b'"vocab"', b'"vocal"')):
        (tmp_path / "tokenizer.json").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"`tokenizers` cannot read .*tokenizer\.json"):
            load_tokenizer(tmp_path)


def test_without_a_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zeroshard.train.launch.REQUIRED_PACKAGES", ("numpy", "no_tokenizers"))
    assert main(["--device", "cpu"]) == 1
    assert f"training needs no_tokenizers: {install_hint('train')}" in capsys.readouterr().err


def test_a_prompt_that_cannot_be_encoded_is_refused() -> None:
    assert TOKENIZER.decode(encode_prompt(TOKENIZER, "to be")) == "to be"
    with pytest.raises(ValueError, match="the prompt is not UTF-8 at character 2"):
        encode_prompt(TOKENIZER, os.fsdecode(b"to\xff"))
    with pytest.raises(ValueError, match="the prompt '' has no tokens"):
        encode_prompt(TOKENIZER, "")


# Token files


def test_raw_ids_are_little_endian(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(b"".join(id.to_bytes(2, "little") for id in (1, 258, 65_535)))
    assert open_tokens(path).tolist() == [1, 258, 65_535]


def test_token_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(1000))
    whole = (tmp_path / "t.npy").read_bytes()
    contents: dict[str, bytes | np.ndarray] = {
        "odd.bin": b"123",
        "empty.bin": b"",
        "text.npy": b"not numpy",
        "empty.npy": b"",
        "cut.npy": whole[:-1],
        "tokens.npy": whole.replace(b"{'descr'", b"(('descr'"),  # numpy: tokenize.TokenError
        "object.npy": np.array([None]),
        "none.npy": np.empty(0, np.uint16),
        "float.npy": np.ones(3),
        "square.npy": np.ones((2, 2), np.uint16),
    }
    for name, content in contents.items():
        path = tmp_path / name
        path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
        is_shape = name in ("none.npy", "float.npy", "square.npy")
        with pytest.raises(ValueError, match="has the shape" if is_shape else "is not a complete") as refused:
            open_tokens(path)
        assert str(path) in str(refused.value) and "unsafe" not in str(refused.value)
    with pytest.raises(ValueError, match=r"missing\.bin is not a complete .*No such file"):
        open_tokens(tmp_path / "missing.bin")


@given(st.binary(max_size=4), st.integers(0, 127))
def test_a_damaged_header_is_a_value_error(tmp_path_factory: pytest.TempPathFactory, wrong: bytes, at: int) -> None:
    path = tmp_path_factory.mktemp("tokens") / "t.npy"
    np.save(path, np.arange(100, dtype=np.uint16))
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + wrong + whole[at + len(wrong) :])
    with contextlib.suppress(ValueError):
        open_tokens(path)


# Text files


def read_all(paths: list[Path | str]) -> list[str]:
    return [text for file in corpus_module._source_files(paths) for text in read_text(file)]


texts = st.text(st.sampled_from("a b\n\ré東🎭"), max_size=200)


@given(texts, st.integers(1, 40))
def test_pieces_of_a_text_give_the_whole(tmp_path_factory: pytest.TempPathFactory, text: str, chunk: int) -> None:
    path = tmp_path_factory.mktemp("texts") / "text"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "PART_CHARS", chunk)
        pieces = list(read_text(path))
    assert "".join(pieces) == text and "" not in pieces


def test_texts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match=rf"{path.name} has no text: expected a file that is not empty"):
            read_all([path])
    latin = tmp_path / "latin.txt"
    latin.touch()
    with pytest.raises(FileNotFoundError, match=r"latin\.txt has no text: expected a file that is not empty"):
        read_all([latin])
    latin.write_bytes("caf\u00e9\n".encode() * 3 + "caf\u00e9\n".encode("latin1") * 3)
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 \(invalid .*\): convert it"):
        read_all([latin])


# From options to tokens


def test_texts_become_tokens_and_back(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(LINES)
    (tmp_path / "texts" / "b.txt").write_text("naïve\r\n" * 30, newline="")
    encode_corpus([tmp_path / "texts" / name for name in ("a.txt", "b.txt")], tmp_path / "corpus", vocab_size=300)
    corpus = open_corpus(tmp_path / "corpus", holdout=0.25)
    assert tokenizer_vocab_size(corpus.tokenizer) == 300
    ids = [*corpus.train.tolist(), *corpus.validation.tolist()]
    assert len(corpus.validation) == round(len(ids) / 4)
    first, second = LINES, "naïve\r\n" * 30
    text = corpus.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == f"{first}{END_OF_TEXT}{second}{END_OF_TEXT}"


def test_separate_validation_texts_have_the_same_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("a question to suffer")
    encode_corpus([], tmp_path / "corpus", vocab_size=300, validation=[str(tmp_path / "held.txt")])
    corpus = open_corpus(tmp_path / "corpus", holdout=0.5)
    assert corpus.tokenizer.decode(corpus.train.tolist()) == shakespeare()  # nothing of it is held out
    assert corpus.tokenizer.decode(corpus.validation.tolist()) == "a question to suffer"


def test_a_given_tokenizer_is_used_and_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    encode_corpus([tmp_path / "a.txt"], tmp_path / "corpus", tokenizer=saved(tmp_path), vocab_size=9)
    corpus = open_corpus(tmp_path / "corpus", holdout=0)
    assert tokenizer_vocab_size(corpus.tokenizer) == 300 and not len(corpus.validation)
    assert corpus.train.tolist() == [*TOKENIZER.encode(LINES).ids, 0]
    assert load_tokenizer(tmp_path / "corpus").to_str() == TOKENIZER.to_str()


@pytest.mark.parametrize("name", ["t.npy", "t.bin"])
def test_a_token_file_is_used_where_it_lies(tmp_path: Path, name: str) -> None:
    ids = np.arange(50, dtype=np.uint16)
    np.save(tmp_path / name, ids) if name.endswith("npy") else ids.tofile(tmp_path / name)
    encode_corpus([tmp_path / name], tmp_path / "corpus")
    corpus = open_corpus(tmp_path / "corpus", holdout=0.2)
    assert corpus.tokenizer is None
    assert corpus.train.tolist() == list(range(40)) and corpus.validation.tolist() == list(range(40, 50))
    assert np.shares_memory(corpus.train.base, corpus.validation.base)
    assert [path.name for path in (tmp_path / "corpus").iterdir()] == ["corpus.json"]


def test_token_files_and_texts_go_together_with_a_tokenizer(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", [5, 6, 7])
    (tmp_path / "a.txt").write_text(LINES)
    for train, held_out in (("t.npy", "a.txt"), ("a.txt", "t.npy")):
        paths = {"paths": [tmp_path / train], "validation": [tmp_path / held_out], "directory": tmp_path / "corpus"}
        if train == "t.npy":
            with pytest.raises(ValueError, match=r"--data has token ids, but .*a\.txt is text: pass the tokenizer"):
                encode_corpus(**paths)
        encode_corpus(**paths, tokenizer=saved(tmp_path))
        corpus = open_corpus(tmp_path / "corpus")
        encoded = {train: corpus.train, held_out: corpus.validation}
        assert encoded["t.npy"].tolist() == [5, 6, 7]
        assert encoded["a.txt"].tolist() == [*TOKENIZER.encode(LINES).ids, 0]


def test_a_token_file_stands_alone(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", [5, 6, 7])
    with pytest.raises(ValueError, match=r"t\.npy is a token file and must be the only path \(got 2 paths\)"):
        encode_corpus([tmp_path / "t.npy", tmp_path], tmp_path / "corpus")
    with pytest.raises(FileNotFoundError, match=r"gone\.bin has no text"):
        encode_corpus([tmp_path / "gone.bin"], tmp_path / "corpus")


def test_a_run_keeps_its_tokens(tmp_path: Path) -> None:
    text, directory, options = tmp_path / "a.txt", tmp_path / "corpus", {"data": ["a.txt"], "vocabulary": None}
    text.write_text(LINES)
    encode_corpus([text], directory, vocab_size=300, options=options)
    open_corpus(directory, options=options)
    with pytest.raises(
        ValueError, match=r"were made with .*'a\.txt'.* not .*'b\.txt'.*: omit .* or pass another --out"
    ):
        open_corpus(directory, options=options | {"data": ["b.txt"]})
    for name, content in (("corpus.json", "{"), ("corpus.json", "{}"), ("tokenizer.json", "{}")):
        before = (directory / name).read_bytes()
        (directory / name).write_text(content)
        with pytest.raises(ValueError, match=name):
            open_corpus(directory)
        (directory / name).write_bytes(before)
    np.save(directory / "train.npy", [1, 2, 3])
    with pytest.raises(ValueError, match=r"train\.npy has 3 tokens, expected \d+ as when the run started"):
        open_corpus(directory)


def test_a_resumed_run_uses_its_own_tokenizer_whatever_has_become_of_the_text(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")

    def tokens(rank: int, text: Path) -> list[int]:
        options = read_options(["--data", str(text), "--vocabulary", "300"])
        model = open_language_model(options.model, options.data)
        return _open_corpus(options, RankInfo(rank, 1, torch.device("cpu"), "gloo"), run, model).train.tolist()

    text, other = tmp_path / "a.txt", tmp_path / "b.txt"
    text.write_text(LINES)
    (started,) = run_threads(1, tokens, text)
    run.write_config({})
    text.write_text(f"other words, {LINES}")
    assert run_threads(1, tokens, text) == [started]
    other.write_text(LINES)
    with pytest.raises(RanksFailed, match="the run's tokens were made with"):
        run_threads(1, tokens, other)


def test_an_encoding_that_failed_leaves_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    (tmp_path / "b.txt").write_bytes(b"\xff")
    encode_corpus([tmp_path / "a.txt"], tmp_path / "corpus", vocab_size=300)
    with pytest.raises(ValueError, match=r"b\.txt is not UTF-8 \(invalid start byte\)"):
        encode_corpus([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "corpus", vocab_size=300)
    with pytest.raises(FileNotFoundError, match=r"corpus has no tokens \(no corpus\.json\)"):
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
    return TokenLoader(
        np.arange(tokens, dtype=np.uint16), **{"sequence": 9, "batch": 8, "seed": 5, "vocab_size": 2**16, **options}
    )


def test_targets_are_the_tokens_that_follow() -> None:
    inputs, targets = loader().batch(3, 0, 1)
    assert inputs.shape == targets.shape == (8, 9) and inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)  # the tokens count up
    assert (inputs[:, 0] % 9 == 0).all()  # windows do not overlap


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
    assert loaded.read_windows([windows - 1])[1][0, -1] == 9 * windows


def test_evaluation_reads_in_order() -> None:
    loaded = loader(9 * 7 + 1)
    assert loaded.read_windows(range(3))[0].flatten().tolist() == list(range(27))
    assert loaded.read_windows(range(3, 6))[1].flatten().tolist() == list(range(28, 55))


def test_an_id_outside_the_vocabulary_is_named_with_its_place() -> None:
    ids = np.zeros(100, np.int64)
    for wrong in (300, -2):
        ids[87] = wrong
        loaded = TokenLoader(ids, sequence=5, batch=1, seed=0, vocab_size=300)
        loaded.read_windows([0])  # only where it is met
        with pytest.raises(TrainingError, match=rf"token 87 of the data is {wrong}, but ids go from 0 to 299: check"):
            loaded.read_windows([17])


def test_what_a_loader_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="the data has 9 tokens, but a sequence of 9 and its next token need"):
        loader(tokens=9)
    with pytest.raises(ValueError, match="more than 1000 times in a step: pass a smaller --batch"):
        loader(batch=10**12)
