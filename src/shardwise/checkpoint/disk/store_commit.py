"""Commit to an object store, where nothing can be renamed or locked.

    run/.partial/step-00000040.6f1c09d26f1c09d2                         it is written, or deleted
    run/step-00000040/shard-00000-of-00002-6f1c09d26f1c09d2.safetensors
    run/step-00000040/manifest.json                                     it is complete

Each attempt writes files of its own names, so that no two overwrite each other's. The commit is one
request that makes the manifest unless there is one. A checkpoint is what its manifest names: no one
looks at other files. A model for Hugging Face has its index in place of the manifest.

A mark tells of files that no manifest may ever name. Only time says that nobody is going to commit
them: an attempt gives up an hour after it began, by its own clock. So the next save deletes what
marks of more than two hours tell of, by the clock of the store, which has made its own mark just
before. That holds if clocks run equally fast and no request takes an hour. If it does not hold,
whoever commits finds files missing, and withdraws the manifest.

Just before it commits, an attempt that replaces a checkpoint lists the old files in its mark: once
its commit is there, these are what is left.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Set
from datetime import timedelta

from shardwise.base.errors import CheckpointError, StoreError, lost_peer_behind
from shardwise.checkpoint.disk.companions import is_small
from shardwise.checkpoint.disk.entries import MANIFEST, Manifest, shard_name
from shardwise.checkpoint.disk.filenames import INDEX, SHARD, SINGLE
from shardwise.checkpoint.disk.manifest import MAX_BYTES, manifest_bytes, parse_manifest
from shardwise.checkpoint.disk.store_path import StorePath

MOST = timedelta(hours=1)  # from the beginning of an attempt to its commit
LEFT = 2 * MOST  # age of the marks of what was left
_MARKS = ".partial"
_MARK = re.compile(r"(?P<name>.+)\.(?P<nonce>[0-9a-f]{16})", re.ASCII | re.DOTALL)
_COMMITS = frozenset({MANIFEST, INDEX, SINGLE})  # what a checkpoint is read by


class StoreCommit:
    """A checkpoint that is being written, by the one process that commits it.

    Args:
        folder: name of the checkpoint.
        last: the file that commits.
        replaces: the files of the checkpoint that is replaced; none if there must not be one.

    Attributes:
        texts: the small files beside the shards, by name, which the commit writes.

    Raises:
        CheckpointError: there is one.
        StoreError: the store does not answer.
    """

    def __init__(
        self, folder: StorePath, last: str = MANIFEST, replaces: Collection[str] = ()
    ) -> None:
        if not folder.name:
            raise CheckpointError(f"{folder}: expected a name below the bucket")
        self.folder = folder
        self.texts: dict[str, bytes] = {}
        self._last, self._replaces = last, replaces
        self._nonce = secrets.token_hex(8)
        self._files: list[str] = []
        self._sent = False  # the manifest, so that nothing may be deleted before it is withdrawn
        if not replaces and (folder / last).is_file():
            raise CheckpointError(
                f"{folder}: already exists, expected a new name; nothing was written"
            )
        self._began = time.monotonic()
        self._mark = _mark(folder, self._nonce)
        _write_mark(self._mark)
        self._mark.prove_refusal(b"\n")  # before all is sent
        with contextlib.suppress(StoreError):  # it may be that this process may not delete
            clean_older(self._mark)

    def file(self, rank: int, world_size: int) -> StorePath:
        """The name of a rank's file, which no other attempt has."""
        return self / shard_name(rank, world_size)

    def __truediv__(self, name: str) -> StorePath:
        """A name that no other attempt has, for a file that is called ``name`` in a folder."""
        name = name.replace(".", f"-{self._nonce}.")
        if name not in self._files:
            self._files.append(name)
        return self.folder / name

    def size(self, name: str) -> int:
        """Size of a file that was written."""
        found = (self.folder / name).find()
        if found is None:
            raise CheckpointError(f"{self.folder / name}: is missing, although it was written")
        return found.size

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest, which is the commit.

        Raises:
            CheckpointError: another process has committed in the meantime, or this one took an
                hour, or files have disappeared.
            StoreError: the store does not answer; whether it has committed may not be known.
        """
        self.texts[MANIFEST] = manifest_bytes(manifest)
        parse_manifest(
            self.texts[MANIFEST], str(self.folder / MANIFEST), sum(manifest.files.values())
        )
        self.publish(manifest.files)

    def publish(self, files: Mapping[str, int] | None = None) -> None:
        """Write the small files, and last the one that commits.

        Args:
            files: bytes of the others; ``None`` for those that were named by this process.

        Raises:
            CheckpointError: as by :meth:`finish`.
            StoreError: as by :meth:`finish`.
        """
        files = {name: self.size(name) for name in self._files} if files is None else files
        text = self.texts.pop(self._last)
        taken = time.monotonic() - self._began
        if taken > MOST.total_seconds():
            raise CheckpointError(
                f"{self.folder}: was written in {taken:,.0f} s, expected at most "
                f"{MOST.total_seconds():,.0f}: others may take its files for leftovers by now"
            )
        old = {*self._replaces} - {*files, *self.texts, self._last}
        if old:
            _write_mark(self._mark, old)  # so that whoever cleans deletes what is left of them
        for name, small in self.texts.items():
            self._put_small(self.folder / name, small)
        self._put(self.folder / self._last, text)
        for reason in self.folder.lost(files).values():
            self._withdraw(text)
            raise CheckpointError(f"{reason}; the checkpoint was withdrawn")
        commits = old & _COMMITS
        self.folder.remove(commits)  # else these would be read
        with contextlib.suppress(StoreError):  # a mark does no harm, nor does what is not named
            self.folder.remove(old - commits)
            self._mark.remove()

    def _put_small(self, path: StorePath, data: bytes) -> None:
        if path.name in self._replaces:
            path.write([data], len(data))
        elif not path.create(data) and path.read_small(len(data)) != data:
            raise _of_another(path)

    def _put(self, path: StorePath, text: bytes) -> None:
        try:
            self._sent = True
            if self._last in self._replaces:
                path.write([text], len(text))
                return
            made = path.create(text)
        except StoreError:
            if self._is_mine(text):
                return  # only the answer was lost
            raise
        if made or self._is_mine(text):
            return
        self._sent = False
        raise CheckpointError(
            f"{self.folder}: was made by another process in the meantime; nothing was replaced"
        )

    def _is_mine(self, text: bytes) -> bool:
        try:
            return (self.folder / self._last).read_small(MAX_BYTES) == text
        except StoreError:
            raise
        except CheckpointError:
            return False

    def _withdraw(self, text: bytes) -> None:
        if self._is_mine(text):
            (self.folder / self._last).remove()
        self._sent = False

    def abandon(self) -> None:
        """Delete what was written, but for what a manifest may name, if the store answers."""
        with contextlib.suppress(StoreError):
            if self._sent and _named(self.folder, self._nonce):
                (self.folder / self._last).remove()
            self.folder.remove(self._files)
            failed = sys.exception()
            if isinstance(failed, CheckpointError) and lost_peer_behind(failed) is None:
                self._mark.remove()  # else a rank may still be writing


@contextlib.contextmanager
def committed(
    folder: StorePath, last: str, replaces: Collection[str] = ()
) -> Iterator[StoreCommit]:
    """Write a checkpoint from one process: what is named in the block is committed at its end.

    If the block raises, what it wrote is deleted. See :class:`StoreCommit` for the arguments.
    """
    attempt = StoreCommit(folder, last, replaces)
    try:
        yield attempt
        for name in sorted({*filter(is_small, folder.listed()[1])} - {*attempt.texts, *replaces}):
            raise _of_another(folder / name)
        attempt.publish()
    except BaseException:
        attempt.abandon()
        raise


def _of_another(small: StorePath) -> CheckpointError:
    return CheckpointError(
        f"{small}: found one of another model, which was not committed, or is being "
        "written; give another name, or delete it"
    )


def delete_stored(folder: StorePath, others: Collection[str] = ()) -> None:
    """Delete a checkpoint, complete or not. If interrupted, none that looks complete is left.

    Args:
        folder: its name.
        others: files below that are deleted besides the weights.

    Raises:
        StoreError: it cannot be deleted.
    """
    matches = [match for match in map(SHARD.fullmatch, folder.below()) if match]
    marks = [_mark(folder, each) for each in {match["nonce"] for match in matches} if each]
    for mark in marks:
        _write_mark(mark)  # so that others delete the rest if this process is killed
    _remove(folder, {MANIFEST, *(match.string for match in matches), *others})
    for mark in marks:
        mark.remove()


def _remove(folder: StorePath, files: Set[str]) -> None:
    """Delete files of a checkpoint; first those that it is read by."""
    folder.remove(files & _COMMITS)
    folder.remove(files - _COMMITS)


def under_way(folder: StorePath) -> set[str]:
    """The files below of attempts that have not committed, which may still be going on.

    Raises:
        StoreError: the store does not answer.
    """
    marked = {nonce for name, nonce, *_ in _marks(folder.parent) if name == folder.name}
    open_ = {nonce for nonce in marked if not _named(folder, nonce)}
    matches = filter(None, map(SHARD.fullmatch, folder.below() if open_ else ()))
    return {match.string for match in matches if match["nonce"] in open_}


def clean_older(mark: StorePath) -> None:
    """Delete what was left beside, if it began long enough before a mark that was just made.

    Raises:
        StoreError: the store does not answer, or nothing may be deleted.
    """
    mine = mark.find()
    if mine is not None:
        clean(mark.parent.parent, (mine.modified - LEFT).timestamp())


def clean(root: StorePath, before: float, names: Collection[str] | None = None) -> None:
    """Delete what dead processes have left in a folder.

    Args:
        root: the folder that checkpoints are in.
        before: seconds of the store's clock; what was begun later may still be written.
        names: of which checkpoints; all if ``None``.
    """
    for name, nonce, mark, modified in _marks(root):
        if modified < before and (names is None or name in names):
            _remove(root / name, _left(root / name, nonce, mark, modified).keys())
            mark.remove()


def clean_now(root: StorePath) -> None:
    """Delete what dead processes have left in a folder, as the next save there would.

    Raises:
        StoreError: the store does not answer, or nothing may be written or deleted.
    """
    mark = _mark(root / "clean", secrets.token_hex(8))
    _write_mark(mark)
    try:
        clean_older(mark)
    finally:
        mark.remove()


def leftovers(root: StorePath) -> Iterator[tuple[StorePath, int, float]]:
    """Yield the checkpoints of which attempts have left something, or are being written or deleted.

    Yields:
        The name of the checkpoint, the bytes of the files that no manifest names, and when it
        began, in seconds of the store's clock.
    """
    for name, nonce, mark, modified in _marks(root):
        yield root / name, sum(_left(root / name, nonce, mark, modified).values()), modified


def _left(folder: StorePath, nonce: str, mark: StorePath, modified: float) -> dict[str, int]:
    """The files that an attempt has left, with their bytes: its own, or those that it replaced.

    Args:
        folder: the checkpoint.
        nonce: of the attempt.
        mark: of the attempt.
        modified: when the mark was written: what is newer was not replaced.
    """
    found = folder.listed()[1]
    if not _named(folder, nonce):
        own = {each: SHARD.fullmatch(each) for each in found}
        return {name: found[name].size for name, m in own.items() if m and m["nonce"] == nonce}
    try:
        replaced = json.loads(mark.read_small(MAX_BYTES) or "[]")
    except StoreError:
        raise
    except (CheckpointError, ValueError):  # it is deleted by now, or of an earlier release
        return {}
    return {
        name: each.size
        for name, each in found.items()
        if isinstance(replaced, list) and name in replaced and each.modified.timestamp() <= modified
    }


def _marks(root: StorePath) -> Iterator[tuple[str, str, StorePath, float]]:
    for each, found in (root / _MARKS).below().items():
        match = _MARK.fullmatch(each)
        if match is not None and "/" not in each:
            with contextlib.suppress(ValueError):  # of a name that no checkpoint has
                yield (
                    (root / match["name"]).name,
                    match["nonce"],
                    root / _MARKS / each,
                    found.modified.timestamp(),
                )


def _mark(folder: StorePath, nonce: str) -> StorePath:
    return folder.parent / _MARKS / f"{folder.name}.{nonce}"


def _write_mark(mark: StorePath, replaces: Collection[str] = ()) -> None:
    """Tell of an attempt, and of the files that are to be deleted once it has committed."""
    text = json.dumps(sorted(replaces)).encode()
    mark.write([text], len(text))


def _named(folder: StorePath, nonce: str) -> bool:
    """Whether a manifest names files of an attempt, or cannot be read, so that it might."""
    return any(_names(folder / each, nonce) for each in (MANIFEST, INDEX))


def _names(commit: StorePath, nonce: str) -> bool:
    try:
        text = commit.read_small(MAX_BYTES)
    except StoreError:
        raise
    except CheckpointError:
        return commit.is_file()
    return nonce.encode() in text
