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

from shardwise.base.errors import CheckpointError, StoreError, UserError
from shardwise.base.say import say
from shardwise.base.units import one_line, printable
from shardwise.checkpoint.disk.entries import MANIFEST
from shardwise.checkpoint.disk.fetched import fetch, folder_for
from shardwise.checkpoint.disk.place import place_of
from shardwise.checkpoint.disk.store_path import StorePath
from shardwise.insight.schema.training import Existing
from shardwise.runs.files import RunFiles

_SESSION = re.compile(r"\d{8,18}", re.ASCII)
_MOST_OF_SESSION = 1000  # bytes
_MOST_BYTES = 1 << 30  # of each file that is fetched
_PART = 8 << 20  # bytes of a request


class RunStore:
    """Where a run is in an object store.

    Args:
        url: of the run.

    Attributes:
        place: its URL.
        root: the folder of this host with its files.
        sessions: below which each session has an object.

    Raises:
        UserError: this user has no folder for caches.
    """

    def __init__(self, url: os.PathLike[str]) -> None:
        place = place_of(url)
        assert isinstance(place, StorePath)
        with _reported():
            self.root = folder_for("runs", place)
        self.place, self.sessions = place, place / "sessions"
        self._files = RunFiles(self.root)
        self._session: tuple[int, bytes] | None = None
        self._copied: dict[Path, tuple[int, int]] = {}
        self._copying = threading.Lock()  # a checkpoint may be saved in the background

    def reach(self) -> None:
        """Check that the store answers.

        Raises:
            StoreError: it does not, refuses, or has no such bucket.
        """
        next(self.place.iterdir(), None)

    def has_checkpoints(self) -> bool:
        """Return whether there is a manifest of a checkpoint, even if it is damaged by now."""
        steps = (self.place / self._files.checkpoints.name).iterdir()
        return any((step / MANIFEST).is_file() for step in steps)

    def claim(self) -> None:
        """Begin a session, after which those before it save no more.

        Raises:
            StoreError: it cannot be written.
        """
        names = (path.name for path in self.sessions.iterdir())
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
        later = self._path_of(number + 1)
        path = later if later.is_file() else self._path_of(number)
        found = path.read_small(_MOST_OF_SESSION)
        if found != text:
            who = printable(found.decode(errors="replace").partition("\n")[0][:300])
            raise CheckpointError(
                f"{path}: found a session ({who}) that has begun after this one, number "
                f"{number}, expected none: two never train into one run; nothing is saved here"
            )

    def begin(self, existing: Existing) -> None:
        """Begin a session, if none has; delete the run, or fetch its files into the empty folder.

        Raises:
            StoreError: the store does not answer.
            UserError: what is to be fetched cannot be.
        """
        if self._session is None:
            self.claim()
        if existing is Existing.OVERWRITE:
            self._delete_run()
        if existing is Existing.RESUME:
            files = self._files
            own = [file for file in files.own_files if file != files.weights]
            self.fetch(own, [files.earlier_options, files.tokenizer], self.root)
        say(f"files      in {self.root}, and copied to {self.place} with each checkpoint")

    def fetch(self, files: Iterable[Path], folders: Iterable[Path], root: Path) -> None:
        """Fetch what the store has of some files and folders of the run.

        Args:
            files: their paths on this host.
            folders: the same of folders.
            root: the folder to which they go.

        Raises:
            StoreError: the store does not answer.
            UserError: there are too many or too large ones, or the names of some lead elsewhere.
        """
        found = {file.name: each for file in files if (each := (self.place / file.name).find())}
        for folder in folders:
            for name, each in (self.place / folder.name).below().items():
                if name and not name.endswith("/"):  # with which S3 shows a folder
                    found[f"{folder.name}/{name}"] = each
        with _reported():
            fetch(self.place, found, root, _MOST_BYTES)

    @contextlib.contextmanager
    def metrics(self) -> Iterator[Path]:
        """The metrics, in a file that is there for the block.

        Raises:
            StoreError: the store does not answer.
            UserError: they cannot be fetched.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.fetch([self._files.metrics], [], Path(folder))
            yield RunFiles(Path(folder)).metrics

    def leave(self) -> None:
        """Copy the files as a training fails; if that is not possible, say so."""
        try:
            self.publish()
        except (CheckpointError, OSError) as error:
            say(f"warning    {self.root} is not copied to {self.place}: {one_line(error)}")

    def publish(self) -> None:
        """Copy the files that have changed, if this session has begun.

        Raises:
            CheckpointError: another session has begun, or the folder has been deleted.
            StoreError: the store does not answer.
        """
        if self._session is None:
            return
        root, run_json = self.root, self._files.run_json
        with self._copying:
            self.check_session()
            if not run_json.is_file():
                raise CheckpointError(
                    f"{root}: found no {run_json.name}, expected the files of this run, which are "
                    "to be copied: keep that folder while it trains"
                )
            for path in self._to_copy():
                with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                    status = os.fstat(file.fileno())
                    version = (status.st_mtime_ns, status.st_size)
                    if self._copied.get(path) != version:
                        target = self.place / path.relative_to(root).as_posix()
                        target.write(_read(file, status.st_size), status.st_size)
                        self._copied[path] = version
            self.check_session()  # large files take a while to copy

    def _path_of(self, session: int) -> StorePath:
        return self.sessions / f"{session:08}"

    def _delete_run(self) -> None:
        """Delete what a run has written: manifests first, and last what says that it is a run."""
        own = {path.name for path in (*self._files.own_files, *self._files.own_folders)}
        names = {name for name in self.place.below() if name.partition("/")[0] in own}
        manifests = {name for name in names if name.endswith(f"/{MANIFEST}")}
        last = names & {self._files.run_json.name}
        for some in (manifests, names - manifests - last, last):
            self.place.remove(some)

    def _to_copy(self) -> Iterator[Path]:
        """Yield the files to copy; first what says that there is a run."""
        files = self._files
        elsewhere = (files.checkpoints, files.replicas, files.wandb)
        folders = [folder for folder in files.own_folders if folder not in elsewhere]
        within = (path for folder in folders for path in sorted(folder.rglob("*")))
        for path in (files.run_json, *files.own_files[:-1], *within):
            hidden = any(part.startswith(".") for part in path.relative_to(files.root).parts)
            if path.is_file() and not path.is_symlink() and not hidden:
                yield path


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except CheckpointError as error:
        raise UserError(str(error)) from None


def _read(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield as many bytes of a file, to which another thread may be appending."""
    while size and (part := file.read(min(size, _PART))):
        yield part
        size -= len(part)
