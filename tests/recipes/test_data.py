"""Which text comes when: decided by the seed and the position; and what a run records of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.app.recipes.core.position import permute
from shardwise.app.recipes.text.data import (
    SEPARATOR,
    VOCAB_SIZE,
    Bytes,
    ByteStream,
    Document,
    Sequences,
    find_files,
    load_text,
    load_vocabulary,
)
from shardwise.base.errors import UserError
from shardwise.insight.schema.option import OptionError


def write(folder: Path, **files: bytes) -> list[Path]:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in files]


def stream_of(folder: Path, *contents: bytes) -> ByteStream:
    documents = []
    for index, content in enumerate(contents):
        path = folder / f"document-{index}"
        path.write_bytes(content)
        documents.append(Document(path, 0, len(content)))
    return ByteStream(documents)


# -- the stream ------------------------------------------------------------------------------------


def test_documents_stand_behind_separators(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, b"ab", b"c")
    assert len(stream) == 5
    assert stream.read(0, 5).tolist() == [SEPARATOR, 97, 98, SEPARATOR, 99]


@given(data=st.data())
def test_any_piece_of_the_stream_is_the_piece_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    contents = data.draw(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=6))
    stream = stream_of(tmp_path_factory.mktemp("stream"), *contents)
    whole = [token for content in contents for token in (SEPARATOR, *content)]
    start = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.integers(0, len(whole) - start))
    assert stream.read(start, length).tolist() == whole[start : start + length]


def test_reading_past_the_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IndexError, match="tokens 2 to 4 of 3"):
        stream_of(tmp_path, b"ab").read(2, 2)


def test_a_file_that_shrinks_while_training_is_named(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, b"abcdef")
    (tmp_path / "document-0").write_bytes(b"ab")
    with pytest.raises(UserError, match="document-0 became shorter"):
        stream.read(0, 6)


def test_text_comes_back_as_text() -> None:
    assert Bytes().decode(list("naïve".encode())) == "naïve"
    assert Bytes().decode([SEPARATOR, 97, SEPARATOR, 0xFF]) == "\n\na\n\n�"


# -- files -----------------------------------------------------------------------------------------


def test_the_default_is_the_standard_library_of_this_python() -> None:
    text = load_text([], 256)
    names = [document.path.name for document in text.train.documents]
    assert "dataclasses.py" in names
    assert len(text.train) > 5_000_000
    assert not any("site-packages" in str(d.path) for d in text.train.documents)
    assert text.fingerprint() == load_text([], 256).fingerprint()


def test_training_and_validation_share_no_file(tmp_path: Path) -> None:
    write(tmp_path, **{f"{i:03}.txt": bytes([i]) * 100 for i in range(60)})
    text = load_text([str(tmp_path)], 16)
    train = {document.path for document in text.train.documents}
    validation = {document.path for document in text.validation.documents}
    assert (len(train), len(validation)) == (57, 3)
    assert not train & validation


def test_of_few_files_validation_takes_the_ends(tmp_path: Path) -> None:
    [path] = write(tmp_path, **{"a.txt": bytes(range(250)) * 40})
    text = load_text([str(path)], 16)
    assert text.train.documents == (Document(path, 0, 9500),)
    assert text.validation.documents == (Document(path, 9500, 500),)


def test_files_folders_and_patterns_may_be_mixed_and_count_once(tmp_path: Path) -> None:
    a, b, c = write(tmp_path, **{"a.txt": b"a" * 99, "b.txt": b"b" * 99, "c.md": b"c" * 99})
    (tmp_path / ".hidden").write_bytes(b"x" * 99)
    (tmp_path / "empty.txt").touch()
    for paths in (
        [str(tmp_path)],
        [str(a), str(b), str(c)],
        [str(tmp_path / "*.txt"), str(tmp_path / "*.md"), str(a)],
    ):
        found = {document.path.name for document in load_text(paths, 8).train.documents}
        assert found == {"a.txt", "b.txt", "c.md"}, paths


@pytest.mark.parametrize("pattern", ["**/*.txt", "**", "**/**/*.txt"])
def test_a_file_counts_once_under_all_its_names(tmp_path: Path, pattern: str) -> None:
    (first, second) = write(tmp_path, a=b"x" * 9, b=b"y" * 9)
    (tmp_path / "inner").mkdir()
    second.rename(tmp_path / "inner" / "b.txt")
    first.rename(tmp_path / "a.txt")
    for name in ("loop", "again", "inner/up"):  # each way through them would be 2^40 names
        (tmp_path / name).symlink_to(tmp_path)
    (tmp_path / "c.txt").hardlink_to(tmp_path / "a.txt")
    found = find_files([f"{tmp_path}/{pattern}", str(tmp_path), f"{tmp_path}/c.txt"])
    assert sorted(file.read_bytes()[:1] for file in found) == [b"x", b"y"]


def test_bytes_that_are_no_text_are_as_good(tmp_path: Path) -> None:
    [path] = write(tmp_path, **{"image.bin": bytes(range(256)) * 8})
    tokens = load_text([str(path)], 8).train.read(0, 257)
    assert tokens.tolist() == [SEPARATOR, *range(256)]


def test_bad_data_is_one_clear_line(tmp_path: Path) -> None:
    empty, short = write(tmp_path, **{"empty.txt": b"", "short.txt": b"x" * 50})
    (tmp_path / "folder").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    cases = {
        str(tmp_path / "run"): "--data: found .*run, the folder of a run, expected text; --out",
        str(tmp_path / "none.txt"): "--data: found nothing at .*none.txt, expected a file",
        str(tmp_path / "*.none"): "--data: found nothing at",
        str(empty): "--data: found an empty file: .*empty.txt",
        str(tmp_path / "folder"): "--data: found no text in folder",
        str(short): "found 50 bytes in 1 file.* expected at least 33 for .* --seq-length 16",
    }
    for path, message in cases.items():
        with pytest.raises(OptionError, match=message) as caught:
            load_text([path], 16)
        assert "\n" not in str(caught.value)


# -- the order -------------------------------------------------------------------------------------


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_a_permutation_takes_every_index_once(size: int, key: int) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


def test_permutations_of_other_keys_are_others() -> None:
    orders = {tuple(permute(index, 50, key) for index in range(50)) for key in range(100)}
    assert len(orders) == 100


def test_a_permutation_is_the_same_forever() -> None:
    # A run that resumes under another version must find its data where it left it.
    assert [permute(index, 10, 7) for index in range(10)] == [5, 4, 6, 9, 1, 7, 3, 2, 8, 0]


def test_an_epoch_takes_every_sequence_once_and_the_next_cuts_elsewhere(tmp_path: Path) -> None:
    sequences = Sequences(stream_of(tmp_path, bytes(1000)), 10, seed=3)
    first, second = (
        [sequences.start(epoch * sequences.per_epoch + i) for i in range(sequences.per_epoch)]
        for epoch in (0, 1)
    )
    for starts in (first, second):
        assert len({start // 10 for start in starts}) == sequences.per_epoch
        assert len({start % 10 for start in starts}) == 1
    assert first != second
    assert max(first + second) + 11 <= 1001


def test_the_shortest_stream_is_long_enough(tmp_path: Path) -> None:
    needed = Sequences.tokens_needed(10)
    sequences = Sequences(stream_of(tmp_path, bytes(needed - 1)), 10, seed=0)
    for position in range(50):
        assert sequences.batch(position, 1).shape == (1, 11)
    with pytest.raises(ValueError, match="too few for sequences of 10"):
        Sequences(stream_of(tmp_path, bytes(needed - 2)), 10, seed=0)


def test_another_seed_is_another_order(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, bytes(5000))
    orders = [[Sequences(stream, 10, seed).start(i) for i in range(100)] for seed in range(3)]
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_the_same_examples_whatever_the_world(tmp_path: Path, world_size: int) -> None:
    # 8 examples a step: however many ranks take them, in however many microbatches.
    stream = stream_of(tmp_path, bytes(np.random.default_rng(0).integers(0, 256, 5000, np.uint8)))
    sequences = Sequences(stream, 10, seed=1)
    whole = sequences.batch(16, 8)
    size = 4 // world_size
    parts = [
        sequences.batch(16 + (micro * world_size + rank) * size, size)
        for micro in range(2)
        for rank in range(world_size)
    ]
    assert np.array_equal(np.concatenate(parts), whole)
    assert len(np.unique(whole, axis=0)) == 8


# -- what a run records ----------------------------------------------------------------------------


def test_a_fingerprint_tells_other_data_from_the_same_data_elsewhere(tmp_path: Path) -> None:
    def fingerprint(*documents: Document) -> str:
        return ByteStream(documents).fingerprint()

    one, two = Document(tmp_path / "one", 0, 5), Document(tmp_path / "two", 0, 5)
    moved = Document(tmp_path / "elsewhere" / "one", 0, 5)
    assert fingerprint(one, two) == fingerprint(moved, two)
    longer, later = Document(tmp_path / "one", 0, 6), Document(tmp_path / "one", 1, 5)
    others = [(one, two), (two, one), (one,), (longer, two), (later, two)]
    assert len({fingerprint(*each) for each in others}) == len(others)


def test_what_is_recorded_counts_all_tokens_once(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_bytes(b"x" * 100)
    data = load_text([str(tmp_path)], 16)
    facts = data.facts()
    assert facts["files"] == 20
    assert (facts["training_tokens"], facts["validation_tokens"]) == (19 * 101, 101)
    assert facts["summary"] == f"{tmp_path}, {19 * 101:,} tokens in 20 files"
    assert facts["fingerprint"] == data.fingerprint()


def test_bytes_are_the_vocabulary_unless_a_tokenizer_is_named() -> None:
    vocabulary = load_vocabulary(None)
    assert isinstance(vocabulary, Bytes)
    assert vocabulary.decode(vocabulary.encode("naïve\n")) == "naïve\n"
    assert max(vocabulary.encode("\U0010ffff")) < vocabulary.separator == vocabulary.used
    assert vocabulary.separator < vocabulary.size == VOCAB_SIZE


def test_a_tokenizer_that_cannot_be_loaded_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("no JSON")
    with pytest.raises(OptionError, match=r"--tokenizer: found .* cannot be loaded") as error:
        load_vocabulary(str(tmp_path))
    assert "\n" not in str(error.value)
