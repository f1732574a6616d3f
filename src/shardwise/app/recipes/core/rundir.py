"""Whether a run may begin in its place, and its lock: two runs never train into one. No torch here.

What lies in the folder, :class:`~shardwise.runs.files.RunFiles` says. The folder is the place of
the run, unless that is in an object store, of which it then has copies.

The launcher of host 0 holds the lock, or rank 0 where no launcher of ours is above; so a job that
begins again is not in its own way. The lock is the kernel's (``flock``) and ends with the process
that holds it, however that ends. The file stays, and says who held it last; a file that says
anything else is not ours, and not written to.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import CheckpointError, StoreError, UserError
from shardwise.base.files import (
    Links,
    LockHandle,
    content_of_lock,
    lock_soon,
    name_holder,
    replace_file,
)
from shardwise.base.say import say
from shardwise.base.strict import Fields, parse
from shardwise.checkpoint.disk.place import Place, read_whole
from shardwise.insight.schema.option import OptionError, flatten, require
from shardwise.insight.schema.training import Existing, OutputConfig
from shardwise.runs.files import Lock, RunFiles, lock_of
from shardwise.runs.metrics import without_nan

if TYPE_CHECKING:
    from shardwise.app.recipes.core.stored import RunStore

#: In the folder of checkpoints: those of all replicas but the first, where replicas train apart.
REPLICAS = "replicas"

_MAX_RECORD = 1 << 26  # bytes of a run.json: tens of thousands of sessions
_MAX_PATH = 4095  # bytes, of Linux
# As long as a name below the folder of a run gets.
_DEEPEST = "checkpoints/replicas/0000/.step-0000000000.partial/shard-000000-of-000000.safetensors"


@dataclass(frozen=True)
class RunDir(RunFiles):
    """The folder of a run, in which a training may begin.

    Attributes:
        store: where the run is, if not in this folder: what is there counts.
    """

    store: RunStore | None = None

    @property
    def place(self) -> Place:
        """What the user calls it: this folder, or a URL in an object store."""
        return self.root if self.store is None else self.store.place

    @property
    def place_of_checkpoints(self) -> Place:
        """Where they are; of a run in an object store, in no folder."""
        return self.place / self.checkpoints.name

    def check_metrics(self, step: int) -> None:
        """Check that the metrics up to a step can be read.

        Raises:
            StoreError: the store does not answer.
            UserError: a line is damaged, or it is no file.
        """
        from shardwise.runs.metrics_file import check_metrics  # not for the command's help

        held = contextlib.nullcontext(self.metrics) if self.store is None else self.store.metrics()
        with held as file:
            check_metrics(file, step)

    def check(self, config: OutputConfig) -> None:
        """Check that a run may begin, or go on, here. Changes nothing.

        Raises:
            OptionError: the place holds something that would be lost, or nothing to resume; or it
                cannot be looked into.
            StoreError: the store does not answer.
        """
        length = len(os.fsencode(self.root / _DEEPEST))
        if length > _MAX_PATH:
            most = _MAX_PATH - (length - len(os.fsencode(self.root)))
            raise OptionError("--out", "a path that is too long", f"{most} bytes at most")
        try:
            self._check(config)
        except OSError as error:
            found = f"{error.filename or self.root}, which cannot be used ({error.strerror})"
            raise OptionError("--out", found, "a folder that can be read and written") from None

    def _check(self, config: OutputConfig) -> None:
        place, is_run = self.place, self.is_run()
        if isinstance(place, Path):
            self._check_kinds(is_run)
        if config.existing is Existing.RESUME:
            require(is_run, "--resume", f"no run in {place}", "a run; see --out")
            return
        expected = "another folder or URL, --resume to go on, or --overwrite to delete that run"
        may_begin = not is_run or config.existing is Existing.OVERWRITE
        require(may_begin, "--out", f"a run in {place} already", expected)
        if not is_run and (others := [p for p in _inside(place) if not self._is_trace(p)]):
            found = f"other files in {place}, such as {min(each.name for each in others)!r}"
            raise OptionError("--out", found, "an empty or new folder, or a URL that is free")
        if isinstance(place, Path):
            self._check_may_write(is_run)

    def _check_kinds(self, is_run: bool) -> None:
        """Check that the folder is one, and that files are where a run has files."""
        is_file = self.root.exists() and not self.root.is_dir()
        require(not is_file, "--out", f"{self.root}, which is a file", "a folder")
        for file in self.own_files if is_run else ():
            expected = "a file, as a run writes: move it away"
            require(not file.is_dir(), "--out", f"{file}, a folder", expected)

    def _check_may_write(self, is_run: bool) -> None:
        """Check that the folder can be made or written to, and its run deleted, if there is one."""
        if is_run:
            self._check_links()
        parent = self.root
        while not parent.exists():
            parent = parent.parent
        is_writable = os.access(parent, os.W_OK | os.X_OK)
        require(is_writable, "--out", f"no permission to write in {parent}", "a writable folder")

    def _check_links(self) -> None:
        """Check that the run that is to be deleted lies in its folder, and nowhere else."""
        for path in (self.root, *self.own_folders, *self.own_files):
            expected = (
                "no link where --overwrite deletes: remove it yourself, or take another folder"
            )
            require(not path.is_symlink(), "--out", f"{path}, a symbolic link", expected)

    def is_run(self) -> bool:
        """Return whether a run is here."""
        return (self.place / self.run_json.name).is_file()

    def has_checkpoints(self) -> bool:
        """Return whether a checkpoint was ever committed here, even if damaged by now.

        A partial folder is none. Neither is what further replicas saved, of which the first is
        committed last.
        """
        if self.store is not None:
            return self.store.has_checkpoints()
        from shardwise.checkpoint.disk.commit import is_partial  # not for the command's help

        found = _inside(self.checkpoints)
        return any(not is_partial(path) and path.name != REPLICAS for path in found)

    def is_taken(self) -> bool:
        """Return whether a run or another file is here, or a run is about to begin here."""
        try:
            found = list(self.root.iterdir())
        except FileNotFoundError:
            return False
        except OSError:  # a file, or a folder of somebody else
            return True
        return not all(map(self._is_trace, found)) or lock_of(self.lock) is Lock.HELD

    def was_begun_by(self, job: str | None) -> bool:
        """Return whether a job has begun, or resumed, the run that is here.

        Args:
            job: its id, see :func:`shardwise.elastic.world.job_id`; None is no job.
        """
        if job is None:
            return False
        try:
            sessions = self.read().get("sessions", [])
        except UserError:  # none is here, or it was damaged: jobs of ours write it whole
            return False
        return any(session.get("job") == job for session in sessions)

    def is_finished(self) -> bool:
        """Return whether the last session of the run finished, with its results.

        Raises:
            UserError: ``run.json`` cannot be read.
        """
        sessions = self.read().get("sessions", [])
        return bool(sessions) and sessions[-1].get("status") == "finished"

    def make(self) -> None:
        """Make the folder.

        Raises:
            OptionError: it cannot be made.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{self.root}, which cannot be made ({error.strerror})"
            raise OptionError("--out", reason, "a folder in a place that can be written") from None

    def begin(self, config: OutputConfig) -> None:
        """Make the folder; with ``OVERWRITE``, delete the run that is in it, and only that.

        Of a run in an object store, the folder then has the files that are there, if it goes on.

        Raises:
            OptionError: it cannot be made, or what is in it cannot be deleted.
            StoreError: the store does not answer.
            UserError: what is to be fetched cannot be.
        """
        from shardwise.checkpoint.disk.commit import remove  # not for the command's help

        is_replaced = config.existing is Existing.OVERWRITE and self.is_run()
        self.make()
        if is_replaced and self.store is None:
            self._check_links()
        try:
            for path in (*self.own_folders, *self.own_files):
                if is_replaced or self.store is not None:
                    remove(path)
        except OSError as error:
            found = f"{error.filename}, which cannot be deleted ({error.strerror})"
            raise OptionError("--out", found, "a run that --overwrite may delete") from None
        if self.store is not None:
            self.store.begin(config.existing)

    def publish(self) -> None:
        """Copy what has changed to the object store, if the run is in one.

        Raises:
            CheckpointError: see :meth:`.RunStore.publish`.
        """
        if self.store is not None:
            self.store.publish()

    def _is_trace(self, path: Place) -> bool:
        """Return whether something was left by a run that was killed before its ``run.json``.

        That of any file: a run that was deleted for the next one may have been killed as well.
        """
        if self.store is not None:
            return path == self.store.sessions
        names = (f".{file.name}" for file in self.own_files)
        return path in (self.lock, self.quorum, self.replicas) or path.name.startswith(tuple(names))

    def keep_tokenizer(self, save: Callable[[Path], object]) -> None:
        """Keep the tokenizer in the folder, unless it has one. The folder is complete, or is not.

        Args:
            save: writes the tokenizer to a folder that exists.

        Raises:
            OSError: it cannot be written.
        """
        from shardwise.checkpoint.disk.beside import written_beside  # not for the command's help

        if self.tokenizer.is_dir():
            return
        with written_beside(self.tokenizer, None) as partial:
            partial.mkdir()
            save(partial)

    def read(self, option: str = "--out") -> dict[str, Any]:
        """Return the content of ``run.json``, with its types checked, by the names of today.

        Args:
            option: what named the folder, for errors.

        Raises:
            StoreError: the object store does not answer.
            UserError: it cannot be read; the message names the line or the field.
        """
        try:
            file = self.place / self.run_json.name
            text = read_whole(file, _MAX_RECORD, Links.REFUSE)
            return _checked_record(parse(text, str(file)), str(file))
        except StoreError:
            raise  # it may be there
        except CheckpointError as error:
            raise UserError(f"{option}: {error}") from None

    def write(self, record: Mapping[str, Any]) -> None:
        """Replace ``run.json`` atomically."""
        text = json.dumps(without_nan(record), indent=2, allow_nan=False)
        try:
            write_text(self.run_json, text + "\n")
        except FileNotFoundError:
            found = f"no folder {self.root} any more"
            raise OptionError("--out", found, "the folder of this run until it has ended") from None


def _inside(folder: Place) -> list[Place]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [*folder.iterdir()]
    return []


def _checked_record(record: Any, where: str) -> dict[str, Any]:
    fields = Fields(record, where)
    known = fields.all()
    for name in {"recipe", "identity"}.intersection(known):
        fields.text(name)
    for name in ("config", "model", "data"):
        if name in known:
            fields.object(name)
    if "config" in known:
        from shardwise.app.recipes.core.former import as_now  # not for a run that begins

        known["config"] = as_now(known["config"])
    if "settings" in known.get("model", {}):
        Fields(known["model"], f"{where}, 'model'").object("settings")
    if "best" in known:
        Fields(known["best"], f"{where}, 'best'").number("step")
    if "sessions" in known:
        for number, session in enumerate(fields.items("sessions", _MAX_RECORD), start=1):
            Fields(session, f"{where}, session {number}")
    return known


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Check that a run is resumed with the settings that it began with.

    Args:
        before: configuration in its ``run.json``.
        now: configuration asked for.
        names: setting -> option, for those that may not change.

    Raises:
        OptionError: naming the first that differs.
    """
    old, new = flatten(before), flatten(now)
    for name, option in names.items():
        if old.get(name) != new.get(name):
            was = "nothing" if old.get(name) is None else old[name]
            raise OptionError(option, new.get(name), f"{was}, as in the run to resume")


def check_same_model(
    before: Mapping[str, Any], now: Mapping[str, Any], options: Mapping[str, str]
) -> None:
    """Check that a run is resumed with the model that it began with.

    Args:
        before: ``name`` and ``settings`` of the model in its ``run.json``.
        now: those asked for.
        options: setting -> option, for those that have one of their own.

    Raises:
        OptionError: naming the option by which it has become another model.
    """
    old, new = before.get("settings", {}), now["settings"]
    differing = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if not differing:
        return
    if before.get("name") == now["name"] and set(differing) <= options.keys():
        check_same(old, new, {name: options[name] for name in differing})
    expected = f"{before.get('name')} as in the run to resume"
    raise OptionError("--model", f"{now['name']}, another model", expected)


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically, and flush it to disk.

    Raises:
        OSError: it cannot be written; the error names it.
    """
    replace_file(path, text.encode())


_HOLDER = re.compile(rb"process \d+ on [^\n]*\n?")


@contextlib.contextmanager
def locked(files: RunDir) -> Iterator[None]:
    """Hold the lock of a folder, so that no other run trains into it. Makes the folder.

    Where the file system has no locks, a line says so.

    Raises:
        OptionError: another run holds the lock, the folder cannot be written to, or the file is
            not one that a run made.
    """
    files.make()
    handle = _open(files)
    with LockHandle(handle):
        _lock(handle, files)
        yield


def _open(files: RunDir) -> int:
    # O_NOFOLLOW, O_NONBLOCK: who holds the lock is written into it, so never through a link; and a
    # pipe would wait for its other end. O_CLOEXEC: not inherited by ranks: they end with their
    # launcher, and a lock that outlived it would be in the way of the next start.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(files.lock, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_ours(files, "a symbolic link") from None
        reason = f"{files.lock}, which cannot be opened ({error.strerror})"
        raise OptionError("--out", reason, "a folder that can be written to") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise _not_ours(files, f"no regular file ({stat.filemode(mode)})")
    return handle


def _not_ours(files: RunDir, what: str) -> OptionError:
    return OptionError(
        "--out",
        f"{files.lock}, {what}",
        "the file that a run makes to lock its folder: remove this, or take another folder",
    )


def _lock(handle: int, files: RunDir) -> None:
    try:
        lock_soon(handle)
    except BlockingIOError:
        holder = content_of_lock(handle).decode(errors="replace").strip()
        raise OptionError(
            "--out",
            f"a run that is under way in {files.place} ({holder or 'it has only begun'})",
            "another folder, or to wait until that run has ended",
        ) from None
    except OSError as error:
        say(
            f"warning    {files.lock} cannot be locked ({error.strerror}): start no other run there"
        )
        return
    found = content_of_lock(handle)
    if found and not _HOLDER.fullmatch(found):
        raise _not_ours(files, "a file of something else")
    name_holder(handle)
