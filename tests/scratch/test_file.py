"""Files without a name: space in them, parts of them as memory, and what a fork sees of them."""

from __future__ import annotations

import errno
import faulthandler
import gc
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from shardwise.base import libc
from shardwise.base.errors import OffloadError
from shardwise.base.scratch import file as scratch
from shardwise.base.scratch.file import ALIGNMENT, ScratchFile, file_in


def _resident(tensor: torch.Tensor) -> int:
    """How many bytes of the mapping around a tensor this process has in memory."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= tensor.data_ptr() < end
        elif inside and first == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("not mapped")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _maps(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_memory_of_a_file_is_as_any_other(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    one, other = (file.memory(nbytes) for nbytes in (5000, 100))
    assert (one.numel(), other.numel()) == (5000, 100)
    assert one.untyped_storage().nbytes() == 5000
    one.fill_(1)
    other.fill_(2)
    assert one.sum() == 5000
    assert file.holds(one)
    assert file.holds(one[4096:])
    assert not file.holds(one.clone())
    assert not file.holds(one[:0])
    assert list(tmp_path.iterdir()) == []


def test_memory_that_nobody_holds_is_used_again(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    one, other = file.memory(5000), file.memory(5000)
    view, address = one[10:].view(-1), one.data_ptr()
    del one
    gc.collect()
    assert file.memory(5000).data_ptr() not in (address, other.data_ptr()), "a view still has it"
    del view
    gc.collect()
    kept = [file.memory(5000), file.memory(5000)]
    assert address in [each.data_ptr() for each in kept]
    assert file.nbytes == 3 * 2 * ALIGNMENT


def test_a_file_is_no_longer_than_what_is_in_use_however_sizes_vary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of activations, whose sizes differ from step to step."""
    monkeypatch.setattr(scratch, "_EXTENT", 64 * ALIGNMENT)
    file, random = ScratchFile(tmp_path), Random(0)
    for step in range(300):
        sizes = [random.randint(1, 40) for _ in range(4)]
        kept = [file.memory(size * ALIGNMENT).fill_(i) for i, size in enumerate(sizes)]
        random.shuffle(kept)
        held = [(each, int(each[0])) for each in kept[:2]]
        del kept
        held += [(file.memory(random.randint(1, 99999)).fill_(9), 9)]
        assert all((each == value).all() for each, value in held), step
    assert file.nbytes < 600 * ALIGNMENT


def test_memory_outlives_its_file(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    memory = file.memory(ALIGNMENT).fill_(3)
    del file
    gc.collect()
    assert memory.sum() == 3 * ALIGNMENT


def test_there_are_few_maps_and_descriptors_however_many_tensors(tmp_path: Path) -> None:
    file, before = ScratchFile(tmp_path), _descriptors()
    kept = [file.memory(ALIGNMENT) for _ in range(2000)]
    assert len({each.data_ptr() for each in kept}) == 2000
    assert _descriptors() - before == 1
    assert _maps(tmp_path) == 1


def test_extents_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_EXTENT", 4 * ALIGNMENT)
    file = ScratchFile(tmp_path)
    sizes = [1, 9, 2, 3] * 25  # some are larger than an extent, or than what is left of one
    kept = [file.memory(size * ALIGNMENT).fill_(i) for i, size in enumerate(sizes)]
    assert all((each == i).all() for i, each in enumerate(kept))
    assert file.nbytes == sum(sizes) * ALIGNMENT
    assert 1 < _maps(tmp_path) < 25
    assert all(file.holds(file.memory(ALIGNMENT)) for _ in range(5))


def _be_full_halfway(file: int, offset: int, nbytes: int) -> None:
    """Set aside a part and fail, as ext4 does."""
    _set_aside(file, offset, nbytes // 2)
    raise OSError(errno.ENOSPC, "No space left on device")


_set_aside = os.posix_fallocate


def test_what_a_full_disk_has_set_aside_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_EXTENT", 16 * ALIGNMENT)
    file = ScratchFile(tmp_path)
    kept = file.memory(12 * ALIGNMENT).fill_(1)
    taken = os.fstat(file._file).st_blocks
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", _be_full_halfway)
        for size in (2, 100):  # in the same extent, and in a new one
            with pytest.raises(OffloadError, match="No space left"):
                file.memory(size * ALIGNMENT)
            assert os.fstat(file._file).st_blocks == taken
    # Now there is room, also for what does not fit into the rest of the first extent.
    more = [file.memory(size * ALIGNMENT).fill_(2) for size in (5, 100, 1)]
    assert [each.numel() // ALIGNMENT for each in more] == [5, 100, 1]
    assert kept.sum() == kept.numel()
    assert all((each == 2).all() for each in more)


def test_what_is_let_go_is_in_no_memory_of_the_process_and_keeps_its_values(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    memory = file.memory(64 * ALIGNMENT).fill_(5)
    assert _resident(memory) == 64 * ALIGNMENT
    file.let_go(memory)
    assert _resident(memory) == 0
    file.read_ahead(memory)
    file.load(memory)
    assert _resident(memory) >= 64 * ALIGNMENT
    assert (memory == 5).all()
    elsewhere = torch.ones(10)
    for call in (file.load, file.read_ahead, file.let_go):
        call(elsewhere)  # nothing to do
    assert elsewhere.sum() == 10


def test_bytes_that_are_gone_are_an_error_and_no_signal(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    memory = file.memory(4 * ALIGNMENT).fill_(1)
    os.ftruncate(file._file, 0)
    with pytest.raises(OffloadError, match=r"reading 16.0 KiB .*Input/output error"):
        file.load(memory)


def test_what_could_not_be_written_is_an_error_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ScratchFile(tmp_path)
    memory = file.memory(ALIGNMENT).fill_(1)
    errors = [OSError(5, "Input/output error")]

    def check(*_: int) -> None:  # the kernel tells once
        if errors:
            raise errors.pop()

    monkeypatch.setattr(libc, "check_writes", check)
    for _ in range(2):
        with pytest.raises(OffloadError, match=r"writing .*Input/output error"):
            file.load(memory)


def test_an_old_kernel_reads_pages_as_they_are_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libc, "POPULATE_READ", 9999)
    file = ScratchFile(tmp_path)
    memory = file.memory(ALIGNMENT).fill_(1)
    file.let_go(memory)
    file.load(memory)
    assert memory.sum() == ALIGNMENT


def test_a_process_has_one_file_in_a_folder(tmp_path: Path) -> None:
    one = file_in(tmp_path)
    assert file_in(tmp_path) is one
    assert file_in(tmp_path / "other") is not one


def test_a_fork_sees_values_and_keeps_its_writes_to_itself(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    memory = file.memory(2 * ALIGNMENT).fill_(1)

    def be_fork() -> None:
        assert memory.sum() == 2 * ALIGNMENT
        memory[:10].fill_(7)
        file.let_go(memory)
        file.load(memory)
        assert memory.sum() == 2 * ALIGNMENT + 60
        with pytest.raises(OffloadError, match="which was forked"):
            file.memory(ALIGNMENT)
        own = file_in(tmp_path)
        assert own is not file
        own.memory(2 * ALIGNMENT).fill_(9)

    in_fork(be_fork)
    assert (memory == 1).all()


def test_a_fork_of_a_fork_sees_what_the_fork_has_written(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    memory = file.memory(2 * ALIGNMENT).fill_(1)

    def be_fork() -> None:
        memory.fill_(2)
        own = file_in(tmp_path).memory(ALIGNMENT).fill_(3)
        in_fork(be_fork_of_fork, own)
        assert (memory == 2).all()
        assert (own == 3).all()

    def be_fork_of_fork(own: torch.Tensor) -> None:
        assert (memory == 2).all()
        for each in (memory, own):
            each.fill_(4)

    in_fork(be_fork)
    assert (memory == 1).all()


def test_a_fork_that_cannot_keep_its_writes_to_itself_cannot_write(tmp_path: Path) -> None:
    def be_limited() -> None:
        memory = file_in(tmp_path).memory(ALIGNMENT).fill_(1)
        resource.setrlimit(resource.RLIMIT_DATA, (0, 0))
        pid = os.fork()
        if pid == 0:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            assert memory.sum() == ALIGNMENT
            memory[0] = 2
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
        assert memory.sum() == ALIGNMENT

    in_fork(be_limited)


def in_fork(call: Callable[..., None], *args: object) -> None:
    """Call a function in a fork, which has to return."""
    pid = os.fork()
    if pid == 0:
        wrong = 1
        try:
            call(*args)
            wrong = 0
        finally:
            os._exit(wrong)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
