"""Files: only regular ones are opened, they are read in full, and what is written is synced."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from shardwise.base import files
from shardwise.base.files import (
    Closing,
    Links,
    NewFile,
    open_file,
    read_exactly,
    read_small,
    sync,
    write_new,
)
from shardwise.checkpoint import CheckpointError


def test_a_regular_file_is_opened_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    handle, size = open_file(tmp_path / "a")
    assert size == 5
    assert os.read(handle, 9) == b"12345"
    assert not os.get_inheritable(handle)
    os.close(handle)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it to read would wait for a writer
    for path, found in (
        (tmp_path / "pipe", r"found prw\S+"),
        (tmp_path, r"found drwx\S+"),
        (Path("/dev/zero"), r"found crw\S+"),
    ):
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(CheckpointError, match=f"^{path}: {found}, expected a regular file"):
            open_file(path)
        assert len(os.listdir("/proc/self/fd")) == before, "no descriptor is left open"
    with pytest.raises(CheckpointError, match=r"cannot be opened \(No such file or directory\)"):
        open_file(tmp_path / "missing")


def test_links_are_followed_only_if_asked(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="expected a regular file, not a link"):
        read_small(tmp_path / "link", 10)
    assert read_small(tmp_path / "link", 10, Links.FOLLOW) == b"x"


def test_a_small_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_small(tmp_path / "a", 5) == b"12345"
    with pytest.raises(CheckpointError, match=r"a: found '5 bytes', expected at most 4"):
        read_small(tmp_path / "a", 4)


def test_a_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"12345")

    def open_smaller(path: Path, links: Links) -> tuple[int, int]:
        handle, size = open_file(path, links)
        return handle, size - 1

    monkeypatch.setattr(files, "open_file", open_smaller)
    with pytest.raises(CheckpointError, match="more bytes than when it was opened"):
        read_small(tmp_path / "a", 10)


def test_memory_is_filled_from_a_place_in_a_file_or_the_end_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    handle, _ = open_file(tmp_path / "a")
    into = bytearray(10)
    read_exactly(handle, memoryview(into), 40, tmp_path / "a")
    assert into == bytes(range(40, 50))
    with pytest.raises(CheckpointError, match=r"a: ends at byte 100, expected 5 more"):
        read_exactly(handle, memoryview(into), 95, tmp_path / "a")
    os.close(handle)
    with pytest.raises(CheckpointError, match=r"a: cannot be read \(Bad file descriptor\)"):
        read_exactly(handle, memoryview(into), 0, tmp_path / "a")


def test_files_are_closed_at_the_end_of_the_block_also_after_an_error() -> None:
    class Held(Closing):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    held = Held()
    with held as same:
        assert same is held
        assert not held.closed
    with pytest.raises(KeyError), held:
        raise KeyError
    assert held.closed == 2


def test_a_new_file_is_complete_though_the_system_writes_a_little_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:7]))
    data = bytes(range(256))
    with NewFile(tmp_path / "a") as file:
        file.write(data[:100])
        file.write(memoryview(data)[100:])
        assert file.size == 256
    assert (tmp_path / "a").read_bytes() == data


def test_a_new_file_is_synced_at_its_end_and_meanwhile_by_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, bool]] = []
    main = threading.current_thread()
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(
            os,
            name,
            lambda _, name=name: calls.append((name, threading.current_thread() is main)),
        )
    monkeypatch.setattr(files, "_SYNC_EVERY", 100)
    with NewFile(tmp_path / "a") as file:
        file.write(bytes(99))
        assert calls == []
        file.write(bytes(1))
    assert calls == [("fdatasync", False), ("fsync", True)]


def test_what_cannot_be_written_is_named_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_new(tmp_path / "a", b"first")
    with pytest.raises(FileExistsError, match="a'"):
        write_new(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    for name in ("write", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="No space left on device") as caught:
                write_new(tmp_path / name, b"x")
        assert caught.value.filename == str(tmp_path / name)
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_and_folders_can_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    (tmp_path / "a").touch()
    sync(tmp_path / "a")
    sync(tmp_path)
    assert synced == [str(tmp_path / "a"), str(tmp_path)]
