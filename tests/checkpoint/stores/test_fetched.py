"""Objects as files of this host: fetched once, complete or not there, and never elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk import fetched
from shardwise.checkpoint.disk.fetched import cached
from shardwise.checkpoint.disk.place import place_of
from shardwise.checkpoint.disk.store_path import StorePath

pytest.importorskip("obstore", reason="needs obstore: install .[test]")


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "host"))
    return tmp_path / "host" / "shardwise" / "fetched"


@pytest.fixture(params=["memory", "file"])
def books(request: pytest.FixtureRequest, tmp_path: Path) -> StorePath:
    place = place_of(f"{request.param}://{tmp_path}/store/books")
    assert isinstance(place, StorePath)
    put(place / "a.txt", b"a")
    put(place / "more" / "b.txt", b"bb")
    return place


def put(path: StorePath, data: bytes) -> None:
    path.write([data], len(data))


def get(place: StorePath, most: float = 1000, **given: Any) -> Path:
    return cached(place, {place: place.below()}, most=most, **given)


def left(caches: Path) -> list[str]:
    """What there is but locks."""
    return sorted(each.name for each in caches.glob("*") if not each.name.endswith("-lock"))


def test_what_was_fetched_is_there_and_what_was_replaced_is_fetched_beside(
    books: StorePath, caches: Path
) -> None:
    first = get(books)
    assert first.name.startswith("books-")
    assert {p.name: p.read_bytes() for p in first.rglob("*.txt")} == {"a.txt": b"a", "b.txt": b"bb"}

    def never(total: int, folder: Path) -> Callable[[int], None]:
        raise AssertionError(f"{total} bytes are fetched again")

    assert get(books, begin=never) == first
    put(books / "a.txt", b"other")
    second = get(books)
    assert (second / "a.txt").read_bytes() == b"other"
    assert (first / "a.txt").read_bytes() == b"a", "somebody may be reading it"
    assert left(caches) == sorted([first.name, second.name])


def test_of_several_at_once_one_fetches(books: StorePath) -> None:
    began: list[int] = []

    def begin(total: int, folder: Path) -> Callable[[int], None]:
        began.append(total)
        return lambda moved: None

    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: get(books, begin=begin), range(8)))
    assert (len(folders), began) == (1, [3])


def test_a_file_that_is_replaced_while_it_is_fetched_is_an_error(
    books: StorePath, caches: Path
) -> None:
    def replace(total: int, folder: Path) -> Callable[[int], None]:
        put(books / "more" / "b.txt", b"cc")
        return lambda moved: None

    with pytest.raises(CheckpointError, match=r"books/more/b\.txt: was replaced while it was read"):
        get(books, begin=replace)
    assert left(caches) == []
    assert (get(books) / "more" / "b.txt").read_bytes() == b"cc"


def test_what_a_killed_process_has_left_is_deleted(books: StorePath, caches: Path) -> None:
    folder = get(books)
    shutil.move(folder, caches / f".{folder.name}.partial")
    assert get(books) == folder
    assert left(caches) == [folder.name]


@pytest.mark.parametrize("name", ["../../x", "a/../../x", "/etc/passwd", "a//b", "a\nb"])
def test_names_never_lead_out_of_the_folder(books: StorePath, caches: Path, name: str) -> None:
    files = books.below()
    hostile = {**files, name: files["a.txt"]}
    with pytest.raises(CheckpointError, match=r"books: .*expected a URL of printable characters"):
        cached(books, {books: hostile}, most=1000)
    assert left(caches) == []


class _Usage(NamedTuple):
    free: int


def test_what_is_too_large_or_too_much_is_not_fetched(
    books: StorePath, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=r"b\.txt: found 2 bytes, expected at most 1$"):
        get(books, most=1)
    with monkeypatch.context() as patch:
        patch.setattr(fetched, "_MOST_FILES", 1)
        with pytest.raises(CheckpointError, match=r"books: found 2 files, expected at most 1$"):
            get(books)
    with monkeypatch.context() as patch:
        patch.setattr(fetched.shutil, "disk_usage", lambda path: _Usage(2))
        with pytest.raises(CheckpointError, match=r"books: found 3 B, and 2 B free in .*/fetched"):
            get(books)
    assert left(caches) == []


def test_a_name_that_no_disk_takes_is_one_line(tmp_path: Path) -> None:
    place = place_of(f"memory://{tmp_path}/long")
    assert isinstance(place, StorePath)
    put(place / ("x" * 300), b"x")
    with pytest.raises(CheckpointError, match=r"/long: cannot be fetched to .* \(File name too lo"):
        get(place)
