"""Whether a run may begin in a folder, and its lock: two runs never train into one. No torch here.

What lies in the folder, :class:`~shardwise.runs.files.RunFiles` says.

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
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.base.errors import CheckpointError, StoreError, UserError
from shardwise.base.files import (
    LockHandle,
    content_of_lock,
    lock_soon,
    name_holder,
    read_small,
    replace_file,
)
from shardwise.base.say import say
from shardwise.base.strict import Fields, parse
from shardwise.checkpoint.disk.companions import TOKENIZER
from shardwise.checkpoint.disk.place import Place
from shardwise.insight.schema.option import OptionError, flatten
from shardwise.insight.schema.training import Existing, OutputConfig
from shardwise.runs.files import Lock, RunFiles, lock_of
from shardwise.runs.metrics import without_nan

#: In the folder of checkpoints: those of all replicas but the first, where replicas train apart.
REPLICAS = "replicas"

_MAX_RECORD = 1 << 26  # bytes of a run.json: tens of thousands of sessions
_MAX_PATH = 4095  # bytes, of Linux
# As long as a name below the folder of a run gets.
_DEEPEST = "checkpoints/replicas/0000/.step-0000000000.partial/shard-000000-of-000000.safetensors"


class RunDir(RunFiles):
    """The folder of a run, in which a training may begin."""

    @property
    def place(self) -> Place:
        """What the user calls it: this folder, or a URL in an object store."""
        return self.root

    @property
    def place_of_checkpoints(self) -> Place:
        """Where they are; of a run in an object store, in no folder."""
        return self.place / self.checkpoints.name

    def reach(self) -> None:
        """Check that the place answers, if it is an object store."""

    def claim(self) -> None:
        """Begin a session, after which those before it save no more, if a lock cannot say that."""

    def check_session(self) -> None:
        """Check that none has begun since."""

    def publish(self) -> None:
        """Copy to the place what is in the folder, if these are not the same."""

    def leave(self) -> None:
        """Do so as a training fails, as far as that is possible."""

    def check_metrics(self, step: int) -> None:
        """Check that the metrics up to a step can be read.

        Raises:
            UserError: a line is damaged, or it is no file.
        """
        from shardwise.runs.metrics_file import check_metrics  # not for the command's help

        check_metrics(self.metrics, step)

    def check(self, config: OutputConfig) -> None:
        """Check that a run may begin, or go on, here. Changes nothing.

        Raises:
            OptionError: the folder holds something that would be lost, or nothing to resume; or it
                cannot be looked into.
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
        root = self.root
        if root.exists() and not root.is_dir():
            raise OptionError("--out", f"{root}, which is a file", "a folder")
        is_run = self.is_run()
        if is_run and (folder := next(filter(Path.is_dir, self.own_files), None)) is not None:
            raise OptionError(
                "--out", f"{folder}, a folder", "a file, as a run writes: move it away"
            )
        if config.existing is Existing.RESUME:
            if not is_run:
                raise OptionError("--resume", f"no run in {root}", "a run; see --out")
            return
        if is_run and config.existing is not Existing.OVERWRITE:
            raise OptionError(
                "--out",
                f"a run in {root} already",
                "another folder, --resume to go on, or --overwrite to delete that run",
            )
        if is_run:
            self._check_links()
        if root.is_dir() and not is_run and not all(map(self._is_trace, root.iterdir())):
            raise OptionError("--out", f"other files in {root}", "an empty or new folder")
        parent = root
        while not parent.exists():
            parent = parent.parent
        if not os.access(parent, os.W_OK | os.X_OK):
            raise OptionError("--out", f"no permission to write in {parent}", "a writable folder")

    def _check_links(self) -> None:
        """Check that the run that is to be deleted lies in its folder, and nowhere else."""
        for path in (self.root, *self.own_folders, *self.own_files):
            if path.is_symlink():
                raise OptionError(
                    "--out",
                    f"{path}, a symbolic link",
                    "no link where --overwrite deletes: remove it yourself, or take another folder",
                )

    def is_run(self) -> bool:
        """Return whether a run is here."""
        return self.run_json.is_file()

    def has_checkpoints(self) -> bool:
        """Return whether a checkpoint was ever committed here, even if damaged by now.

        A partial folder is none. Neither is what further replicas saved, of which the first is
        committed last.
        """
        from shardwise.checkpoint.disk.commit import is_partial  # not for the command's help

        if not self.checkpoints.is_dir():
            return False
        return any(
            not is_partial(path) and path.name != REPLICAS for path in self.checkpoints.iterdir()
        )

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

        Raises:
            OptionError: it cannot be made.
            OSError: what is in it cannot be deleted.
        """
        self.make()
        if config.existing is not Existing.OVERWRITE or not self.run_json.is_file():
            return
        self._check_links()
        try:
            for folder in self.own_folders:
                if folder.is_dir():
                    shutil.rmtree(folder)
            for file in self.own_files:
                file.unlink(missing_ok=True)
        except OSError as error:
            found = f"{error.filename}, which cannot be deleted ({error.strerror})"
            raise OptionError("--out", found, "a run that --overwrite may delete") from None

    def _is_trace(self, path: Path) -> bool:
        """Return whether a file was left by a run that was killed before its ``run.json``.

        That of any file: a run that was deleted for the next one may have been killed as well.
        """
        names = (f".{file.name}" for file in self.own_files)
        return path in (self.lock, self.quorum, self.replicas) or path.name.startswith(tuple(names))

    def keep_tokenizer(self, save: Callable[[Path], object]) -> None:
        """Keep the tokenizer in the folder, unless it has one. The folder is complete, or is not.

        Args:
            save: writes the tokenizer to a folder that exists.

        Raises:
            OSError: it cannot be written.
        """
        if self.tokenizer.is_dir():
            return
        partial = self.root / f".{TOKENIZER}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save(partial)
        partial.rename(self.tokenizer)

    def read(self, option: str = "--out") -> dict[str, Any]:
        """Return the content of ``run.json``, with its types checked, by the names of today.

        Args:
            option: what named the folder, for errors.

        Raises:
            StoreError: the object store does not answer.
            UserError: it cannot be read; the message names the line or the field.
        """
        try:
            where = str(self.place / self.run_json.name)
            return _checked_record(parse(self._read_record(_MAX_RECORD), where), where)
        except StoreError:
            raise  # it may be there
        except CheckpointError as error:
            raise UserError(f"{option}: {error}") from None

    def _read_record(self, most: int) -> bytes:
        return read_small(self.run_json, most)

    def write(self, record: Mapping[str, Any]) -> None:
        """Replace ``run.json`` atomically."""
        text = json.dumps(without_nan(record), indent=2, allow_nan=False)
        write_text(self.run_json, text + "\n")


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
