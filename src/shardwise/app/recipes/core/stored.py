"""A run in an object store: rank 0 has its files in a folder of its host, and copies them.

    run/sessions/00000003             made by the third start; no other request can make it
    run/checkpoints/step-00000040/    written there by all ranks
    run/run.json, metrics.jsonl, ...  copied at the beginning, just before each commit, at the end

What is in the store counts. A session that goes on replaces what the folder has by it, and what it
fetches, it trusts no more than files of strangers.

A store has no lock, so two sessions may train at a time. The later one has the higher number, and
the other one finds that before each save and again right before the commit, and ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from shardwise.app.recipes.core.rundir import RunDir
from shardwise.base.errors import CheckpointError, StoreError, UserError
from shardwise.base.say import say
from shardwise.base.units import one_line, printable
from shardwise.checkpoint.disk.commit import remove
from shardwise.checkpoint.disk.fetched import Files, fetch, folder_for
from shardwise.checkpoint.disk.manifest import NAME
from shardwise.checkpoint.disk.place import Place, place_of
from shardwise.checkpoint.disk.store_path import StorePath
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.training import Existing, OutputConfig

_SESSIONS = "sessions"
_SESSION = re.compile(r"\d{8,18}", re.ASCII)
_MOST_OF_SESSION = 1000  # bytes
_MOST_BYTES = 1 << 30  # of each file that is fetched
_PART = 8 << 20  # bytes of a request


class StoredRun(RunDir):
    """A run in an object store, and the folder of this host with its files.

    Args:
        url: of the run.

    Raises:
        UserError: this user has no folder for caches.
    """

    def __init__(self, url: os.PathLike[str]) -> None:
        store = place_of(url)
        assert isinstance(store, StorePath)
        try:
            super().__init__(folder_for("runs", store))
        except CheckpointError as error:
            raise UserError(str(error)) from None
        self._store = store
        self._session: tuple[int, bytes] | None = None
        self._copied: dict[Path, tuple[int, int]] = {}
        self._copying = threading.Lock()  # a checkpoint may be saved in the background

    @property
    def place(self) -> Place:
        """Its URL."""
        return self._store

    def reach(self) -> None:
        """Check that the store answers.

        Raises:
            StoreError: it does not, refuses, or has no such bucket.
        """
        next(self._store.iterdir(), None)

    def check(self, config: OutputConfig) -> None:
        """Check that a run may begin, or go on, here. Changes nothing.

        Raises:
            OptionError: there are objects that would be lost, or there is nothing to resume.
            StoreError: the store does not answer.
        """
        is_run = self.is_run()
        if config.existing is Existing.RESUME:
            if not is_run:
                raise OptionError("--resume", f"no run in {self._store}", "a run; see --out")
        elif is_run and config.existing is not Existing.OVERWRITE:
            raise OptionError(
                "--out",
                f"a run in {self._store} already",
                "another URL, --resume to go on, or --overwrite to delete that run",
            )
        elif not is_run:
            names = (path.name for path in self._store.iterdir())
            if (other := next((name for name in names if name != _SESSIONS), None)) is not None:
                found = f"{self._store / other}, which no run has written"
                raise OptionError("--out", found, "a URL below which there is nothing")

    def is_run(self) -> bool:
        """Return whether the store has a run here."""
        return (self._store / self.run_json.name).find() is not None

    def has_checkpoints(self) -> bool:
        """Return whether there is a manifest of a checkpoint, even if it is damaged by now."""
        names = (self._store / self.checkpoints.name).below()
        return any(re.fullmatch(rf"[^/]+/{re.escape(NAME)}", name) for name in names)

    def claim(self) -> None:
        """Begin a session.

        Raises:
            StoreError: it cannot be written.
        """
        names = (path.name for path in (self._store / _SESSIONS).iterdir())
        number = 1 + max((int(name) for name in names if _SESSION.fullmatch(name)), default=0)
        text = f"process {os.getpid()} on {socket.gethostname()}\n{secrets.token_hex(8)}\n".encode()
        while not self._path_of(number).create(text):
            number += 1
        self._session = number, text

    def check_session(self) -> None:
        """Check that no session has begun since this one.

        Raises:
            CheckpointError: one has; the message names it.
            StoreError: the store does not answer.
        """
        assert self._session is not None
        number, text = self._session
        for each in (number + 1, number):
            path = self._path_of(each)
            if each != number and path.find() is None:
                continue
            found = path.read_small(_MOST_OF_SESSION)
            if found != text:
                who = printable(found.decode(errors="replace").partition("\n")[0][:300])
                raise CheckpointError(
                    f"{path}: found a session ({who}) that has begun after this one, number "
                    f"{number}, expected none: two never train into one run; nothing is saved here"
                )

    def begin(self, config: OutputConfig) -> None:
        """Prepare the folder; with ``OVERWRITE``, delete the run in the store, and only that.

        Raises:
            StoreError: the store does not answer.
            UserError: what is to be fetched cannot be, or the folder cannot be made.
        """
        if self._session is None:
            self.claim()
        if config.existing is Existing.OVERWRITE:
            self._delete_run()
        self.make()
        for path in (*self.own_files, *self.own_folders):
            remove(path)
        if config.existing is Existing.RESUME:
            own = [file.name for file in self.own_files if file != self.weights]
            self._fetch(self._store, _found(self._store, own), self.root)
            for folder in (self.earlier_options, self.tokenizer):
                source = self._store / folder.name
                names = source.below().items()
                files = {name: each for name, each in names if name and not name.endswith("/")}
                self._fetch(source, files, folder)
        say(f"files      in {self.root}, and copied to {self._store} with each checkpoint")

    def publish(self) -> None:
        """Copy the files that have changed.

        Raises:
            CheckpointError: another session has begun, or the folder has been deleted.
            StoreError: the store does not answer.
        """
        if self._session is None:
            return
        with self._copying:
            self.check_session()
            if not self.run_json.is_file():
                raise CheckpointError(
                    f"{self.root}: found no {self.run_json.name}, expected the files of this run, "
                    "which are to be copied: keep that folder while it trains"
                )
            for path in self._files():
                with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                    status = os.fstat(file.fileno())
                    version = (status.st_mtime_ns, status.st_size)
                    if self._copied.get(path) != version:
                        name = path.relative_to(self.root).as_posix()
                        (self._store / name).write(_read(file, status.st_size), status.st_size)
                        self._copied[path] = version
            self.check_session()  # large files take a while to copy

    def leave(self) -> None:
        """Copy the files as a training fails; if that is not possible, say so."""
        try:
            self.publish()
        except (CheckpointError, OSError) as error:
            say(f"warning    {self.root} is not copied to {self._store}: {one_line(error)}")

    def check_metrics(self, step: int) -> None:
        """Check that the metrics up to a step can be read.

        Raises:
            StoreError: the store does not answer.
            UserError: a line is damaged.
        """
        with tempfile.TemporaryDirectory() as folder:
            self._fetch(self._store, _found(self._store, [self.metrics.name]), Path(folder))
            RunDir(Path(folder)).check_metrics(step)

    def _read_record(self, most: int) -> bytes:
        return (self._store / self.run_json.name).read_small(most)

    def _path_of(self, session: int) -> StorePath:
        return self._store / _SESSIONS / f"{session:08}"

    def _delete_run(self) -> None:
        """Delete what a run has written: manifests first, and last what says that it is a run."""
        own = {path.name for path in (*self.own_files, *self.own_folders)}
        names = [name for name in self._store.below() if name.partition("/")[0] in own]
        manifests = [name for name in names if name.endswith(f"/{NAME}")]
        last = [name for name in names if name == self.run_json.name]
        for some in (manifests, [*{*names}.difference(manifests, last)], last):
            self._store.remove(some)

    def _files(self) -> Iterator[Path]:
        """Yield the files to copy; first what says that there is a run."""
        elsewhere = (self.checkpoints, self.replicas, self.wandb)
        folders = [folder for folder in self.own_folders if folder not in elsewhere]
        within = (path for folder in folders for path in sorted(folder.rglob("*")))
        for path in (self.run_json, *self.own_files[:-1], *within):
            hidden = any(part.startswith(".") for part in path.relative_to(self.root).parts)
            if path.is_file() and not path.is_symlink() and not hidden:
                yield path

    def _fetch(self, source: StorePath, files: Files, folder: Path) -> None:
        try:
            fetch(source, files, folder, _MOST_BYTES)
        except StoreError:
            raise
        except CheckpointError as error:
            raise UserError(str(error)) from None


def _found(folder: StorePath, names: Iterable[str]) -> Files:
    """The objects of these names that there are."""
    found = ((name, (folder / name).find()) for name in names)
    return {name: each for name, each in found if each is not None}


def _read(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield as many bytes of a file, to which another thread may be appending."""
    while size and (part := file.read(min(size, _PART))):
        yield part
        size -= len(part)
