"""Pickles of some hundred bytes that would take hours, gigabytes, or the whole process."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.formats.archive import Archive
from shardwise.checkpoint.formats.dcp import read_metadata
from shardwise.checkpoint.formats.pickles import Constructor, PickleError, load
from shardwise.checkpoint.formats.torchfile import TorchSource, read_tree
from tests.fuzz.mutations import archive_of

_TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n("
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"
    b"K\x00%s%s\x89}tR"  # offset, shape, strides
)


def _pickle(steps: bytes) -> bytes:
    return b"\x80\x02" + steps + b"."


def _read(tmp_path: Path, steps: bytes, data: bytes = bytes(4)) -> Any:
    """Read a torch file that holds this pickle, and one memory of four bytes."""
    file = tmp_path / "hostile.pt"
    file.write_bytes(archive_of([(b"x/data.pkl", _pickle(steps)), (b"x/data/0", data)]))
    return read_tree(file)


def _refuses(tmp_path: Path, steps: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        _read(tmp_path, steps)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def _laughs(make: bytes, times: int, last: bytes = b"") -> bytes:
    """A list of containers, each of which holds the one before twice."""
    steps = b"](K\x01q\x00"
    for slot in range(times):
        get = b"h" + bytes([slot])
        steps += make % (get + get) + b"q" + bytes([slot + 1])
    return steps + last + b"e"


@pytest.mark.parametrize("make", [b"](%se", b"(%st"], ids=["lists", "tuples"])
def test_lists_that_hold_each_other_are_not_walked_for_ever(tmp_path: Path, make: bytes) -> None:
    assert len(_read(tmp_path, _laughs(make, 3))) == 4
    _refuses(tmp_path, _laughs(make, 60), "grows too large")


def test_a_tuple_whose_hash_takes_for_ever_is_no_key(tmp_path: Path) -> None:
    assert {((1, 1), (1, 1)): None} in _read(tmp_path, _laughs(b"(%st", 2, b"}h\x02Ns"))
    _refuses(tmp_path, _laughs(b"(%st", 60, b"}h\x3cNs"), "has a key that is a tuple")


def test_a_tuple_that_takes_for_ever_to_show_is_not_shown(tmp_path: Path) -> None:
    tensor = _TENSOR % (b"h\x3c", b"K\x01\x85")
    _refuses(tmp_path, _laughs(b"(%st", 60, tensor), "found tuple of 2")


@pytest.mark.parametrize(
    "steps",
    [
        b"c_codecs\nencode\nX\x01\x00\x00\x00ah\x3c\x86R",
        b"c_codecs\nencode\nh\x3cX\x06\x00\x00\x00latin1\x86R",
        b"ctorch.serialization\n_get_layout\nh\x3c\x85R",
        b"ctorch\ndevice\nh\x3c\x85R",
        b"c__builtin__\nset\nh\x3c\x85\x85R",
        b"c__builtin__\ncomplex\nh\x3cK\x01\x86R",
        b"ctorch\nSize\nh\x3c\x85R",
        b"ccollections\nCounter\nh\x3c\x85R",
    ],
)
def test_nothing_that_is_called_looks_at_all_of_such_a_tuple(tmp_path: Path, steps: bytes) -> None:
    _refuses(tmp_path, _laughs(b"(%st", 60, steps), "with wrong arguments")


def test_keys_made_to_have_one_hash_are_refused(tmp_path: Path) -> None:
    prime = 2**61 - 1  # by which Python takes the remainder of numbers
    keys = [pickle.dumps(i * prime, protocol=2)[2:-1] for i in range(1, 30)]
    _refuses(tmp_path, b"}" + b"".join(key + b"Ns" for key in keys), "keys with the same hash")


@pytest.mark.parametrize(
    "steps",
    [b"]" * 5000 + b"a" * 4999, b"N" + b"\x85" * 5000, b"]q\x00h\x00a"],
    ids=["lists", "tuples", "a list in itself"],
)
def test_deep_nesting_is_one_clear_line(tmp_path: Path, steps: bytes) -> None:
    _refuses(tmp_path, steps, "more than 100 levels of nesting")


@pytest.mark.parametrize("container", [b"}", b"]", b"("])
def test_containers_take_no_more_memory_than_their_file_explains(
    tmp_path: Path, container: bytes
) -> None:
    _refuses(tmp_path, container * 100_000, "more lists than its size explains")


def test_the_number_of_steps_is_bounded() -> None:
    with pytest.raises(PickleError, match="more than 1,000 steps"):
        load(_pickle(b"N" * 2000), lambda module, name: None, 1000)


def test_memory_is_not_made_of_a_number(tmp_path: Path) -> None:
    _refuses(
        tmp_path,
        b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R",
        "calls bytearray with",
    )
    _refuses(tmp_path, b"Nr\xff\xff\xff\x7f", "skips places in its memo")


def test_elements_that_are_there_once_are_not_read_a_billion_times(tmp_path: Path) -> None:
    few = _TENSOR % (b"K\x05\x85", b"K\x00\x85")
    found = _read(tmp_path, b"}X\x01\x00\x00\x00a" + few + b"s")
    assert found["a"].strides == (0,)

    many = _TENSOR % (b"J\xff\xff\xff\x3f\x85", b"K\x00\x85")
    _refuses(tmp_path, b"}X\x01\x00\x00\x00a" + many + b"s", "4,294,967,292 bytes in all")


@pytest.mark.parametrize("strides", [b"(t", b"J\xff\xff\xff\xff\x85"], ids=["none", "negative"])
def test_strides_that_lie_are_refused(tmp_path: Path, strides: bytes) -> None:
    _refuses(tmp_path, _TENSOR % (b"K\x01\x85", strides), "strides")


# ---- archives that can be read in two ways ----


def _model(value: float) -> bytes:
    data = torch.tensor([value]).numpy().tobytes()
    tensor = _TENSOR % (b"K\x01\x85", b"K\x01\x85")
    records = [
        (b"x/data.pkl", _pickle(b"}X\x01\x00\x00\x00a" + tensor + b"s")),
        (b"x/data/0", data),
    ]
    return archive_of(records)


def _twice(data: bytes) -> bytes:
    pickles = [_pickle(b"}"), _pickle(b"]")]
    return archive_of([(b"x/data.pkl", each) for each in pickles])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"PK\3\4" + d, "directory ends at byte"),
        (lambda d: d + b"\0", "no directory of an archive at its end"),
        (lambda d: d[:-2] + b"\1\0" + b"!", "comment|no directory|ends at byte"),
        (lambda d: d + d, "directory ends at byte"),
        (_twice, "is in it twice"),
        (lambda d: d.replace(b"x/data.pkl", b"x/data.pk2", 1), "its header differs from"),
        (
            lambda d: d[: d.rindex(b"x/data/0")] + d[d.rindex(b"x/data/0") :].replace(b"x/", b"y/"),
            "folder",
        ),
    ],
    ids=["before", "behind", "comment", "two archives", "two pickles", "two names", "two folders"],
)
def test_an_archive_that_programs_read_differently_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    file = tmp_path / "x.pt"
    file.write_bytes(_model(1.0))
    with TorchSource(file) as source:
        assert list(source.tensors) == [("model", "a")]

    file.write_bytes(change(_model(1.0)))
    with pytest.raises(CheckpointError, match=message):
        TorchSource(file)


class _Counted(bytes):
    """Bytes that count how many of them are copied."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if not isinstance(key, slice):
            return found
        _Counted.copied += len(found)
        return _Counted(found)


def _copied(monkeypatch: pytest.MonkeyPatch, file: Path, data: bytes) -> tuple[int, dict[str, int]]:
    """How many bytes are copied of what is read from an archive; and its records' sizes."""
    file.write_bytes(data)
    read = Archive._bytes
    with monkeypatch.context() as patched, file.open("rb") as opened:
        patched.setattr(Archive, "_bytes", lambda *args: _Counted(read(*args)))
        _Counted.copied = 0
        archive = Archive(opened.fileno(), 0, os.fstat(opened.fileno()).st_size, file)
    return _Counted.copied, {name: record.length for name, record in archive.records.items()}


def test_a_directory_of_many_records_is_not_copied_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = archive_of([(b"x/%d" % i, b"") for i in range(2000)])
    copied, sizes = _copied(monkeypatch, tmp_path / "x.pt", data)
    assert len(sizes) == 2000
    assert copied < len(data)


def test_what_follows_a_name_is_not_copied_for_each_of_its_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes of 64 bits, behind as many empty fields as there is room for."""
    data = archive_of([(b"x/0", b"four")])
    directory, end = data.index(b"PK\1\2"), data.index(b"PK\5\6")
    fields = struct.pack("<2H", 7, 0) * 16000 + struct.pack("<2H2Q", 1, 16, 4, 4)
    entry = bytearray(data[directory:end])
    struct.pack_into("<2L", entry, 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<H", entry, 30, len(fields))
    tail = bytearray(data[end:])
    struct.pack_into("<L", tail, 12, len(entry) + len(fields))
    data = data[:directory] + entry + fields + tail
    copied, sizes = _copied(monkeypatch, tmp_path / "x.pt", data)
    assert sizes == {"0": 4}
    assert copied < 2 * len(data)


def test_a_damaged_pickle_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    torch.save({"model": {"name": torch.ones(2)}}, file)
    file.write_bytes(file.read_bytes().replace(b"name", b"same", 1))
    with pytest.raises(CheckpointError, match=r"data\.pkl: is damaged"):
        TorchSource(file)


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert read_tree(tmp_path / "x.pt")["a"].info.shape == (2,)


# ---- metadata of torch.distributed.checkpoint ----

_STATE = b"}X\x06\x00\x00\x00hostileK\x01sb".replace(b"X\x06", b"X\x07")


@pytest.mark.parametrize(
    "name",
    [
        b"cpathlib\nPosixPath\n",
        b"ctorch\nSize\n",
        b"ctorch\nfloat32\n",
        b"c_codecs\nencode\nh\x3cX\x06\x00\x00\x00latin1\x86R",
        b"ctorch.serialization\n_get_layout\n",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
    ],
)
@pytest.mark.parametrize("step", [_STATE, b"K\x01K\x01s", b"(K\x01K\x01u", b"K\x01a", b"(K\x01e"])
def test_nothing_but_what_the_pickle_made_is_changed(
    tmp_path: Path, name: bytes, step: bytes
) -> None:
    (tmp_path / ".metadata").write_bytes(_pickle(name + step))

    with pytest.raises(CheckpointError, match=r"changes|sets items of|adds items to|names _codecs"):
        read_metadata(tmp_path)

    for touched in (PurePosixPath, torch.Size, torch.float32, torch.serialization._get_layout):
        assert not hasattr(touched, "hostile")


def test_chunks_that_tensors_share_are_not_checked_for_each(tmp_path: Path) -> None:
    module = b"ctorch.distributed.checkpoint.metadata\n"

    def made(kind: bytes, **state: bytes) -> bytes:
        items = b"".join(
            b"X" + len(key).to_bytes(4, "little") + key.encode() + value
            for key, value in state.items()
        )
        return module + kind + b"\n)\x81}(" + items + b"ub"

    chunks = b"](" + b"N" * 2000 + b"eq\x00"
    shared = [chunks, *[b"h\x00"] * 99]
    entries = b"".join(
        b"J" + number.to_bytes(4, "little") + made(b"TensorStorageMetadata", chunks=each)
        for number, each in enumerate(shared)
    )
    metadata = made(b"Metadata", state_dict_metadata=b"}(" + entries + b"u", storage_data=b"}")
    (tmp_path / ".metadata").write_bytes(_pickle(metadata))

    with pytest.raises(CheckpointError, match="chunks that tensors share"):
        read_metadata(tmp_path)


def test_what_a_maker_raises_is_an_error_of_the_pickle() -> None:
    def fails(args: tuple[Any, ...]) -> Any:
        raise ValueError("of two\nlines")

    with pytest.raises(PickleError, match=r"^it calls f with wrong arguments \(of two lines\)$"):
        load(_pickle(b"cm\nf\n)R"), lambda module, name: Constructor("f", fails), 10)
