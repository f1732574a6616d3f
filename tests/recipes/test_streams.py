"""Documents that are streamed: never two ranks the same, in one order for every world."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from shardwise.app.recipes.text.batches import validation_tokens
from shardwise.app.recipes.text.data import SEPARATOR, Bytes, Tokenizer
from shardwise.app.recipes.text.documents import (
    Dealing,
    StreamSource,
    find_documents,
    is_streamed,
)
from shardwise.app.recipes.text.streams import (
    ShuffleBuffer,
    StreamBatches,
    StreamPart,
    streams_for,
)
from shardwise.base.errors import CheckpointError, UserError
from shardwise.elastic.world import World
from shardwise.insight.schema.option import OptionError
from tests.recipes.corpora import (
    texts,
    write_hub_folder,
    write_jsonl,
    write_parquet,
    write_tokenizer,
)

LENGTH = 24


def source_of(*paths: object) -> StreamSource:
    return StreamSource(find_documents([str(path) for path in paths], None))


def batches(
    source: StreamSource,
    rank: int,
    size: int,
    streams: int | None,
    shuffle: ShuffleBuffer | None = None,
) -> StreamBatches:
    world = World(rank, size, rank, size)
    return StreamBatches(source, Bytes(), LENGTH, streams, world, shuffle)


class Ranks:
    """All ranks of a world, one after another in this process."""

    def __init__(
        self,
        source: StreamSource,
        size: int,
        streams: int | None,
        shuffle: ShuffleBuffer | None = None,
    ) -> None:
        self.all = [batches(source, rank, size, streams, shuffle) for rank in range(size)]

    def step(self, position: int, examples: int) -> list[list[int]]:
        """What all ranks together take for a step of so many examples, in one order."""
        size = len(self.all)
        each = examples // size
        taken = [rank.batch(position + i * each, each) for i, rank in enumerate(self.all)]
        return sorted(row.tolist() for row in torch.cat(taken))

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: plain values of the first rank, the others' own keys."""
        merged: dict[str, Any] = {}
        for rank in self.all:
            merged = {**rank.state(), **merged}
        return merged

    def load(self, state: Mapping[str, Any]) -> None:
        for rank in self.all:
            rank.load_state(state, Path("checkpoint"))


def documents_in(rows: Sequence[Sequence[int]]) -> list[str]:
    """The whole documents in sequences of one stream."""
    tokens = [*rows[0], *(token for row in rows[1:] for token in row[1:])]
    text = "".join("\0" if token == SEPARATOR else chr(token) for token in tokens)
    return text.split("\0")[1:-1]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files of documents."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = texts(400)
    for i in range(4):
        write_jsonl(folder / f"{i}.jsonl.zst", documents[i * 100 : (i + 1) * 100])
    return folder


def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path) -> None:
    documents = texts(60)
    text = tmp_path / "a.txt"
    text.write_text("\n\n".join(documents))
    tables = [
        write_jsonl(tmp_path / name, documents) for name in ("a.jsonl", "b.jsonl.zst", "c.jsonl.gz")
    ]
    found = {}
    for path in (*tables, write_parquet(tmp_path / "a.parquet", documents), text):
        source = source_of(path)
        assert source.holds_back
        read = list(source.training_texts(source.part(0, 1)))
        held = list(source.validation_texts())
        assert len(held) in range(1, 10), "one document in 20 is held back"
        assert sorted(read + held) == sorted(documents)
        found[path.name] = read
    assert all(read == found["a.jsonl"] for read in found.values())


def test_a_folder_as_the_hub_has_them_brings_its_own_validation(tmp_path: Path) -> None:
    folder = write_hub_folder(tmp_path / "c4", texts(50), texts(30, seed=9))
    source = source_of(f"hf:{folder}:en")
    assert not source.holds_back
    assert list(source.training_texts(source.part(0, 1))) == texts(50)
    held = validation_tokens(source, Bytes(), LENGTH, 4)
    assert len(held) == 4 * (LENGTH + 1)
    assert Bytes().decode(held[1 : 1 + LENGTH].tolist()) == texts(30, seed=9)[0][:LENGTH]


@pytest.mark.parametrize("streams", [4, 6])  # with files of their own; taking turns in all files
def test_no_two_streams_have_a_document_in_common(corpus: Path, streams: int) -> None:
    source = source_of(corpus)
    assert source.dealing(streams) is (Dealing.BY_FILE if streams == 4 else Dealing.BY_DOCUMENT)
    seen: Counter[str] = Counter()
    for number in range(streams):
        one = batches(source, 0, 1, streams)
        rows = [one.batch(number + streams * i, 1)[0].tolist() for i in range(180)]
        seen.update(set(documents_in(rows)))
    assert len(seen) > 200
    assert max(seen.values()) == 1


@pytest.mark.parametrize("dealing", [Dealing.BY_FILE, Dealing.BY_DOCUMENT])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_text_goes_on_from_any_document(tmp_path: Path, suffix: str, dealing: Dealing) -> None:
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    documents = texts(80)
    for number in range(4):
        some = "\r\n\r\n".join(documents[20 * number : 20 * number + 20])
        parts = [f"\ufeff\n{some[:99]}".encode(), f"{some[99:]}\n\n\n".encode()]
        (tmp_path / f"{number}.txt{suffix}").write_bytes(b"".join(map(pack, parts)))
    source = source_of(tmp_path)
    held = set(source.validation_texts())
    read = []
    for stream in range(2):
        expected = list(source.training_texts(source.part(stream, 2, dealing)))
        for taken in range(len(expected)):
            part = source.part(stream, 2, dealing)
            assert list(itertools.islice(source.training_texts(part), taken)) == expected[:taken]
            where = json.loads(json.dumps(part.state_dict()))
            again = source.training_texts(source.part(stream, 2, dealing), where)
            assert list(again) == expected[taken:]
        read += expected
    assert sorted([*read, *held]) == sorted(documents)
    with pytest.raises(UserError, match="cannot be read: ValueError: a position"):
        next(source.training_texts(source.part(0, 2, dealing), {"examples_iterable": {}}))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"ValueError: found .* in .*latin\.txt, expected U"):
        source_of(tmp_path / "latin.txt")


@pytest.mark.parametrize("damage", ["cut off", "no such file"])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_text_that_is_damaged_is_named(
    tmp_path: Path, suffix: str, damage: str
) -> None:
    """A file that was cut off is not a shorter text."""
    write = {".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    whole = write("\n\n".join(texts(40)).encode())
    (tmp_path / f"a.txt{suffix}").write_bytes(whole)
    second = whole + whole[:-1] if damage == "cut off" else b"text"
    (tmp_path / f"b.txt{suffix}").write_bytes(second)
    with pytest.raises(UserError, match=rf"in \S+b\.txt\{suffix}, expected a whole file"):
        list(source_of(tmp_path).texts())


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files for four streams, one of them ten times as large as each other."""
    folder = tmp_path_factory.mktemp("uneven")
    for number, (first, last) in enumerate([(0, 200), (200, 220), (220, 240), (240, 260)]):
        write_jsonl(folder / f"{number}.jsonl", texts(260)[first:last])
    return folder


def test_every_document_comes_as_often_however_large_its_file_is(uneven: Path) -> None:
    source = source_of(uneven)
    assert source.dealing(4) is Dealing.BY_DOCUMENT
    one = batches(source, 0, 1, 4)
    assert str(one) == "4 streams, dealt out by document"
    seen: Counter[str] = Counter()
    for number in range(4):
        rows = [one.batch(number + 4 * i, 1)[0].tolist() for i in range(700)]
        seen.update(documents_in(rows))
    assert len(seen) > 200
    assert 2 <= min(seen.values()) <= max(seen.values()) <= min(seen.values()) + 2


def test_documents_that_are_dealt_out_one_by_one_go_on_exactly_in_every_world(uneven: Path) -> None:
    source = source_of(uneven)
    whole = Ranks(source, 1, 4)
    expected = [whole.step(position, 12) for position in range(0, 120, 12)]
    first = Ranks(source, 2, 4)
    assert [first.step(position, 12) for position in range(0, 60, 12)] == expected[:5]
    second = Ranks(source, 3, None)
    second.load(first.state())
    assert [second.step(position, 12) for position in range(60, 120, 12)] == expected[5:]


def test_a_run_that_dealt_out_uneven_files_goes_on_so_and_says_it(
    uneven: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(uneven)
    with monkeypatch.context() as before:
        before.setattr("shardwise.app.recipes.text.documents.EVEN", 100)
        whole = Ranks(source, 1, 4)
    expected = [whole.step(position, 4) for position in range(0, 80, 4)]
    with monkeypatch.context() as before:
        before.setattr("shardwise.app.recipes.text.documents.EVEN", 100)
        first = Ranks(source, 1, 4)
    assert [first.step(position, 4) for position in range(0, 40, 4)] == expected[:10]
    state = first.state()
    assert state.pop("dealt") == "by file"  # of which older checkpoints say nothing
    second = Ranks(source, 1, None)
    second.load(state)
    assert [second.step(position, 4) for position in range(40, 80, 4)] == expected[10:]
    assert re.fullmatch(
        r"4 streams, dealt out by file as the run began: the largest stream has (9|1\d)\.\d times "
        "as much as the smallest, whose documents come that many times as often",
        str(second.all[0]),
    )
    with pytest.raises(CheckpointError, match=r"found 'by size' as extra\.data\.dealt"):
        second.load({**state, "dealt": "by size"})


def test_a_step_has_the_same_examples_in_every_world(corpus: Path) -> None:
    source = source_of(corpus)
    whole = Ranks(source, 1, 8)
    worlds = {size: Ranks(source, size, 8) for size in (2, 3, 4)}  # 3 does not divide 8
    for position in range(0, 60, 12):
        expected = whole.step(position, 12)
        assert len({tuple(row) for row in expected}) == 12
        for size, world in worlds.items():
            assert world.step(position, 12) == expected, f"{size} ranks, from {position}"


@pytest.mark.parametrize("shuffle", [None, ShuffleBuffer(16, seed=3)], ids=["plain", "shuffled"])
def test_a_run_goes_on_exactly_in_every_world(corpus: Path, shuffle: ShuffleBuffer | None) -> None:
    source = source_of(corpus)
    whole = Ranks(source, 1, None, shuffle)
    expected = {position: whole.step(position, 12) for position in range(0, 120, 12)}
    assert streams_for(1) == streams_for(2) == 8
    for before, after in ((2, 2), (2, 4), (4, 3), (3, 1), (1, 2)):
        first = Ranks(source, before, 8, shuffle)
        for position in range(0, 60, 12):
            first.step(position, 12)
        second = Ranks(source, after, None, shuffle)
        second.load(first.state())
        for position in range(60, 120, 12):
            assert second.step(position, 12) == expected[position], (before, after, position)


def documents_of(order: Any) -> list[str]:
    """All documents from where an order stands."""
    return list(iter(lambda: next(order, ""), ""))


def test_a_buffer_gives_every_document_once_in_an_order_of_its_own(corpus: Path) -> None:
    source = source_of(corpus)
    part = StreamPart(source, 0, 8, 0)
    plain = documents_of(ShuffleBuffer().order(part, None))
    size = 7
    given = documents_of(ShuffleBuffer(size, seed=1).order(part, None))
    assert len(plain) % size, "the last block is a short one"
    for first in range(0, len(plain), size):
        assert sorted(given[first : first + size]) == sorted(plain[first : first + size])
    others = {
        "plain": plain,
        "epoch": documents_of(ShuffleBuffer(size, 1).order(replace(part, epoch=1), None)),
        "seed": documents_of(ShuffleBuffer(size, 2).order(part, None)),
    }
    for name, other in others.items():
        assert sorted(other) == sorted(given), name
        assert sum(a == b for a, b in zip(other, given, strict=True)) < len(given) / 2, name


@pytest.mark.parametrize("size", [0, 1, 7, 16, 1000])
def test_an_order_goes_on_from_any_document(corpus: Path, size: int) -> None:
    # Streams have 47 documents or so: blocks of 16 and 7 end with a short one, 1000 is all.
    part = StreamPart(source_of(corpus), 1, 8, 0)
    buffer = ShuffleBuffer(size, seed=5)
    order = buffer.order(part, None)
    expected = documents_of(buffer.order(part, None))
    for taken in range(len(expected) + 1):
        state = json.dumps(order.state())
        assert len(state) < 1000, "a position holds no documents"
        resumed = buffer.order(part, json.loads(state))
        assert next(resumed, "") == (expected[taken] if taken < len(expected) else ""), taken
        if taken % 5 == 0:
            assert documents_of(buffer.order(part, json.loads(state))) == expected[taken:]
        next(order, None)


def test_a_buffer_holds_no_more_than_it_is_asked_to(corpus: Path) -> None:
    source = source_of(corpus)
    read = 0
    texts_of = source.training_texts

    def counted(*where: Any) -> Iterator[str]:
        nonlocal read
        for text in texts_of(*where):
            read += 1
            yield text

    source.training_texts = counted  # type: ignore[method-assign,assignment]
    order = ShuffleBuffer(10, seed=1).order(StreamPart(source, 0, 4, 0), None)
    for given in range(40):
        assert read == (given + 10 if given else 0)
        next(order)


def test_a_position_of_another_buffer_is_refused(corpus: Path) -> None:
    source = source_of(corpus)
    before = Ranks(source, 1, 8, ShuffleBuffer(16))
    before.step(0, 8)
    for other in (None, ShuffleBuffer(8)):
        after = Ranks(source, 1, 8, other)
        after.load(before.state())
        with pytest.raises(CheckpointError, match="the position of stream 0 cannot be read"):
            after.step(8, 8)


def test_streams_that_nobody_opened_since_are_still_where_they_were(corpus: Path) -> None:
    source = source_of(corpus)
    whole = Ranks(source, 1, 8)
    expected = [whole.step(position, 2) for position in range(0, 40, 2)]
    ranks = Ranks(source, 2, 8)
    for i in range(20):
        assert ranks.step(2 * i, 2) == expected[i]
        again = Ranks(source, 2, None)  # resumed after every step, with two streams of eight open
        again.load(ranks.state())
        ranks = again


def test_a_text_of_few_documents_is_divided_also_with_others_to_evaluate_on(tmp_path: Path) -> None:
    words = " ".join(f"word{number}" for number in range(2000))
    for name in ("few.txt", "held.txt"):
        (tmp_path / name).write_text(words)
    held = [str(tmp_path / "held.txt")]
    source = StreamSource(find_documents([str(tmp_path / "few.txt")], "words", held))
    streams = [list(source.training_texts(source.part(i, 8))) for i in range(8)]
    assert all(streams)
    assert sorted(" ".join(itertools.chain(*streams)).split()) == sorted(words.split())


@pytest.mark.parametrize("paragraphs", [1, 7])
def test_a_text_of_few_documents_is_cut_and_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paragraphs: int
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # text is read without it
    words = [f"word{number}" for number in range(12_000)]
    size = len(words) // paragraphs
    parts = [words[at : at + size] for at in range(0, size * paragraphs, size)]
    path = tmp_path / "few.txt"
    path.write_text("\n\n".join(" ".join(part) for part in parts))
    source = StreamSource(find_documents([str(path)], "words"))
    streams = [list(source.training_texts(source.part(i, 8))) for i in range(8)]
    assert all(len(stream) > 10 for stream in streams), "no stream is empty"
    trained = [word for stream in streams for text in stream for word in text.split()]
    held = [word for text in source.validation_texts() for word in text.split()]
    assert sorted(trained + held) == sorted(words[: size * paragraphs])
    assert len(words) / 50 < len(held) < len(words) / 8


def test_a_stream_begins_again_when_its_documents_are_over(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(20))
    one = batches(source_of(path), 0, 1, 1)
    rows = [one.batch(i, 1)[0].tolist() for i in range(150)]
    counts = Counter(documents_in(rows))
    assert 2 <= min(counts.values()) <= max(counts.values()) <= min(counts.values()) + 1
    assert all(np.array_equal(a[-1:], b[:1]) for a, b in itertools.pairwise(rows))


def test_what_is_wrong_with_a_source_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import huggingface_hub

    few = write_jsonl(tmp_path / "few.jsonl", texts(3))
    other = tmp_path / "other.jsonl"
    other.write_text('{"a": 1, "b": 2}\n')
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\n{"text": \n')
    table = write_parquet(tmp_path / "a.parquet", texts(9))

    def message(call: Any) -> str:
        with pytest.raises(UserError) as caught:
            call()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def read(*paths: object) -> Any:
        return lambda: batches(source_of(*paths), 0, 1, 8).batch(0, 8)

    assert "--streams: found 8, of which stream" in message(read(few))
    assert "with fields a, b, expected a field text" in message(read(other))
    assert f"--data: {broken} cannot be" in message(read(broken))
    assert "expected files of one kind" in message(read(few, table))
    assert "expected one hf:NAME and nothing else" in message(read("hf:a", few))
    assert "expected a dataset behind hf:" in message(read("hf:"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "--data: hf:allenai/c4:en cannot be opened" in message(read("hf:allenai/c4:en"))
    assert "the hub needs the network" in message(read("hf:allenai/c4:en"))
    assert "--tokenizer: found no/such" in message(lambda: Tokenizer("no/such"))
    one = batches(source_of(few), 0, 1, 2)
    with pytest.raises(OptionError, match="--streams: found 2, expected 8, as in the run to"):
        one.load_state({"streams": 8, "dealt": "by file"}, Path("checkpoint"))


def test_bytes_of_files_stay_what_they_were(tmp_path: Path) -> None:
    note = tmp_path / "note.md"
    note.write_text("text")
    table = write_jsonl(tmp_path / "a.jsonl", texts(3))
    assert is_streamed([str(table)], None)
    assert is_streamed([str(note)], "gpt2")
    assert is_streamed(["hf:name"], None)
    assert not is_streamed([str(note)], None)
    assert not is_streamed([str(note), str(table)], None)
    assert not is_streamed([], None)


def test_a_tokenizer_says_what_stands_between_documents(tmp_path: Path) -> None:
    tokenizer = Tokenizer(str(write_tokenizer(tmp_path)))
    assert (tokenizer.separator, tokenizer.used, tokenizer.size) == (0, 10, 64)
    tokens = tokenizer.encode("shard gather")
    assert len(tokens) == 2
    assert tokenizer.decode([0, *tokens]) == "shard gather"
