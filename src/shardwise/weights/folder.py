"""Versions of weights in a folder that several hosts see: in full, or as what has changed.

    FOLDER/publisher.lock           locked by the process that publishes
    FOLDER/version-00000001/        in full, as ``save_pretrained`` writes it, and version.json
    FOLDER/version-00000002/        a checkpoint of what has changed since version 1

After a step of reinforcement learning, one to three percent of the elements differ in bf16. Of
those, a version has the positions and the values, exactly. A position is a distance to the one
before, in 16 bits; farther ones are reached over elements that have not changed. A version in full
is written when the changes since the last one add up to its size: so a new reader never reads more
than twice the weights. Versions older than the last but one in full are deleted.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.base import plain
from shardwise.base.boxes import Box, narrow
from shardwise.base.errors import CheckpointError
from shardwise.base.files import LockedFile, read_small, write_new
from shardwise.checkpoint.disk.commit import DELETED, delete, remove
from shardwise.checkpoint.disk.entries import dotted
from shardwise.checkpoint.disk.safetensors import as_bytes
from shardwise.checkpoint.formats.hf import HfSource
from shardwise.checkpoint.ranks import hf
from shardwise.checkpoint.ranks.agreement import Ranks
from shardwise.checkpoint.ranks.loading import read_extra
from shardwise.checkpoint.ranks.saving import save
from shardwise.weights.version import Version, quoted

_FOLDER = re.compile(r"version-(\d{8,})", re.ASCII)
_ABOUT = "version.json"
_MOST_ABOUT = 4096  # bytes
_FARTHEST = 2**16 - 1
_LOOKS = 20  # attempts at a folder from which the publisher deletes what is being read

#: A part of a tensor: its name, the full shape, the box of the part, and the published dtype.
_Part = tuple[str, tuple[int, ...], Box, torch.dtype]


def version_folder(root: Path, number: int) -> Path:
    """The path of a version."""
    return root / f"version-{number:08}"


def _numbers(root: Path) -> list[int]:
    """The numbers of all versions in a folder, in ascending order. A link is not one of them.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        with os.scandir(root) as entries:
            found = [_FOLDER.fullmatch(each.name) for each in entries if not each.is_symlink()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read ({error.strerror})") from None
    return sorted(int(match[1]) for match in found if match)


def _is_full(folder: Path) -> bool:
    return os.path.exists(folder / _ABOUT)


def newest_in_full(name: str, at: str | os.PathLike[str]) -> tuple[int, Path]:
    """The newest version in full that is published to a folder: its number, and its path.

    Raises:
        CheckpointError: there is none.
    """
    root = Path(os.path.abspath(at)) / quoted(name)
    for number in reversed(_numbers(root)):
        if _is_full(folder := version_folder(root, number)):
            return number, folder
    raise CheckpointError(f"{root}: found no version in full, expected one; publish first")


def _stamp(folder: Path) -> tuple[int, int] | None:
    """What tells a version from another one of the same path; ``None`` if it is not there."""
    with contextlib.suppress(OSError):
        found = folder.stat()
        return found.st_ino, found.st_mtime_ns
    return None


# -- writing ---------------------------------------------------------------------------------------


class FolderVersions:
    """The versions that ranks publish to a folder. Every rank makes one.

    Args:
        root: the folder, which all ranks see; made if it does not exist.
        saved: how the model is saved.
        ranks: who publishes.
        group: the process group of ``ranks``.

    Attributes:
        version: number of the newest version; 0 if there is none.

    Raises:
        CheckpointError: another process publishes to this folder.
    """

    def __init__(self, root: Path, saved: hf.SavedModel, ranks: Ranks, group: Any) -> None:
        self._root = root
        self._doing = f"publishing to {root}"
        self._saved = saved
        self._ranks = ranks
        self._group = group
        self._lock: LockedFile | None = None
        # What this rank has written, as it is in the newest version.
        self._held: dict[_Part, torch.Tensor] = {}
        self._full = 0  # number of the newest version in full; 0 if this publisher has none
        self._left = 0  # bytes of changes that are cheaper than a version in full
        self.version, self._origin = ranks.first(self._doing, self._begin)

    def _begin(self) -> tuple[int, str]:
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock = LockedFile(self._root / "publisher.lock", self._doing)
        _remove_left(self._root)
        return max(_numbers(self._root), default=0), secrets.token_hex(8)

    def update(self) -> None:
        """Write the next version.

        Raises:
            CheckpointError: it could not be written, on any rank. Readers see the one before.
        """
        held, self._held = self._held, {}  # if this fails, the next version is in full

        def prepare(_: hf.Contents) -> int:
            return max(_numbers(self._root), default=0) + 1

        read = self._saved.contents
        contents, number = hf.agreed_contents(read, self._ranks, self._doing, prepare)
        parts: dict[_Part, torch.Tensor] = {}
        changes: list[dict[str, Any]] = []

        def compare(rows: list[hf.Rows]) -> None:
            for each in rows:
                part = (each.name, each.shape, each.box, contents.dtype_of(each.values.dtype))
                if part in held:
                    new = each.values.to(part[-1]).cpu().contiguous()
                    changes.extend(_changes(part, held[part], new))
                    parts[part] = held[part].copy_(new)
                else:
                    parts[part] = each.values.to("cpu", part[-1], copy=True).contiguous()

        compared = hf.write_rows(contents, self._ranks, compare)

        def size() -> int | None:
            compared()
            tensors = [each[key] for each in changes for key in _TENSORS if key in each]
            return sum(each.nbytes for each in tensors) if parts.keys() == held.keys() else None

        def choose(sizes: list[int | None]) -> list[int | None]:
            known = [each for each in sizes if each is not None]
            return [sum(known) if len(known) == len(sizes) else None] * len(sizes)

        total = self._ranks.together(self._doing, size, choose)
        version, target = Version(number, self._origin), version_folder(self._root, number)
        if total is None or total >= self._left:
            self._write_full(target, version, contents)
        else:
            extra = {_VERSION: asdict(version), f"rank{self._ranks.rank}": changes}
            save(target, nn.Module(), extra=extra, group=self._group)
            self._left -= total
        self._held, self.version = parts, number

    def close(self) -> None:
        """Publish no more. The versions stay."""
        if self._lock is not None:
            self._lock.close()

    def _write_full(self, target: Path, version: Version, contents: hf.Contents) -> None:
        def write_others(folder: Path) -> None:
            self._saved.write_others(folder)
            write_new(folder / _ABOUT, plain.written(version))

        saved = replace(self._saved, contents=lambda: contents, write_others=write_others)
        hf.write_model(target, saved, group=self._group)
        self._left = sum(info.nbytes for info in contents.infos.values())
        last, self._full = self._full, version.number

        def delete_older() -> None:
            for number in _numbers(self._root):
                if number < last:
                    delete(version_folder(self._root, number))
            _remove_left(self._root)

        self._ranks.first(self._doing, delete_older)


def _remove_left(root: Path) -> None:
    """Remove what is left of versions whose deletion was interrupted."""
    for path in root.glob(DELETED.format("*")):
        remove(path)


#: Keys of changes in a checkpoint: what they are changes to; how far each changed element is, in
#: row-major order, from the one before; the new values. Without gaps, there are values for all.
_VERSION, _TENSORS = "about", ("gaps", "values")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as integers: NaN is not equal to itself, and the zeros are."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return as_bytes(tensor).view(sizes[tensor.itemsize])


def _changes(part: _Part, old: torch.Tensor, new: torch.Tensor) -> Iterator[dict[str, Any]]:
    """What has changed in a part of a tensor, as a checkpoint holds it, if anything has."""
    differs = _bits(old) != _bits(new)
    count = int(differs.count_nonzero())
    if not count:
        return
    name, shape, box, _ = part
    offsets, sizes = list(box.offsets), list(box.sizes)
    found = {"name": name, "shape": list(shape), "offsets": offsets, "sizes": sizes}
    if count * (2 + new.itemsize) >= new.nbytes:
        yield found | {"values": new.reshape(-1).clone()}
        return
    where = differs.nonzero().reshape(-1)
    gaps = where.diff(prepend=where.new_zeros(1))
    # As many elements between two as it takes to reach from one to the other.
    between = (gaps - 1).clamp(min=0) // _FARTHEST
    if between.any():
        first = (where - gaps).repeat_interleave(between)
        number = torch.arange(len(first)) - (between.cumsum(0) - between).repeat_interleave(between)
        where = torch.cat([where, first + (number + 1) * _FARTHEST]).sort().values
        gaps = where.diff(prepend=where.new_zeros(1))
    yield found | {"gaps": gaps.to(torch.uint16), "values": _bits(new)[where].view(new.dtype)}


# -- reading ---------------------------------------------------------------------------------------


class FolderReader:
    """The versions of a folder, read into memory of this process.

    Args:
        root: the folder; it need not exist yet.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held: dict[str, torch.Tensor] = {}
        self._version: Version | None = None
        self._stamp: tuple[int, int] | None = None

    def newest(self) -> Version | None:
        """The newest version; ``None`` if there is none."""
        number = max(_numbers(self._root), default=0)
        if self._has(number):
            return self._version
        return Version(number, "") if number else None

    def _has(self, number: int) -> bool:
        """Whether a version is the one that was read. A new one may be in a new folder."""
        return (
            self._version is not None
            and self._version.number == number
            and self._stamp == _stamp(version_folder(self._root, number))
        )

    def read(self) -> tuple[Version, Iterator[tuple[str, torch.Tensor]]] | None:
        """The newest version, and copies of its tensors by name; ``None`` if there is none.

        Raises:
            CheckpointError: a version is damaged, or does not follow the one before.
        """
        for look in itertools.count(1):
            numbers = _numbers(self._root)
            if not numbers:
                return None
            try:
                self._read_up_to(numbers)
                break
            except CheckpointError:
                self._version, self._held = None, {}
                # The publisher may have deleted what was being read.
                if look == _LOOKS or numbers == _numbers(self._root):
                    raise
        assert self._version is not None
        return self._version, ((name, each.clone()) for name, each in self._held.items())

    def _read_up_to(self, numbers: list[int]) -> None:
        """Read the newest version, from the one that is held or from the newest in full."""
        chain: list[Path] = []
        for number in reversed(numbers):
            if self._has(number):
                break
            chain.insert(0, version_folder(self._root, number))
            if _is_full(chain[0]):
                break
        for folder in chain:
            stamp = _stamp(folder)
            try:
                found = self._read_full(folder) if _is_full(folder) else self._read_changes(folder)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{folder}: {error}") from None
            if version_folder(self._root, found.number) != folder:
                raise CheckpointError(f"{folder}: found version {found.number} in it")
            self._version, self._stamp = found, stamp

    def _read_full(self, folder: Path) -> Version:
        version = plain.read(Version, read_small(folder / _ABOUT, _MOST_ABOUT))
        self._held = {}  # before there are others
        with HfSource(folder) as source:
            self._held = {dotted(path[1:]): source.full(path) for path in source.tensors}
        return version

    def _read_changes(self, folder: Path) -> Version:
        extra = read_extra(folder)
        version = plain.converted(Version, extra.pop(_VERSION, None))
        if self._version != replace(version, number=version.number - 1):
            raise CheckpointError(
                f"{folder}: found changes since version {version.number - 1} of publisher "
                f"{version.origin}, expected changes since {self._version}; publish again, which "
                "begins with a version in full"
            )
        try:
            checked = [self._checked(each) for rank in extra.values() for each in rank]
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"{folder}: found changes of another form ({error!r})") from None
        for part, where, values in checked:  # all fit
            flat = part.reshape(-1)  # a copy, if the part is not contiguous
            _bits(flat)[where] = _bits(values)
            part.copy_(flat.view(part.shape))
        return version

    def _checked(
        self, found: dict[str, Any]
    ) -> tuple[torch.Tensor, slice | torch.Tensor, torch.Tensor]:
        """The part of a tensor that changes, which of its elements, and their values.

        Raises:
            ValueError: they do not fit the tensor.
        """
        held, box = self._held[found["name"]], Box(tuple(found["offsets"]), tuple(found["sizes"]))
        values, gaps = found["values"], found.get("gaps")
        fits = found["shape"] == list(held.shape) and box.is_inside(held.shape)
        where: slice | torch.Tensor = slice(None)
        if gaps is None:
            fits = fits and values.shape == (box.numel,)
        else:
            where = index = gaps.long().cumsum(0)
            fits = fits and index.shape == values.shape and bool((index.diff() > 0).all())
            fits = fits and bool(((index >= 0) & (index < box.numel)).all())
        if not fits or values.dtype != held.dtype:
            raise ValueError(
                f"{found['name']}: found {tuple(values.shape)} values of {values.dtype} for {box}, "
                f"expected changes of a tensor of {held.dtype} and shape {list(held.shape)}"
            )
        return narrow(held, box), where, values
