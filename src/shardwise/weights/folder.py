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

import itertools
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.base import plain
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.boxes import Box
from shardwise.checkpoint.disk.commit import delete
from shardwise.checkpoint.disk.entries import dotted
from shardwise.checkpoint.disk.files import LockedFile, read_small, write_new
from shardwise.checkpoint.disk.pieces import narrow
from shardwise.checkpoint.disk.safetensors import as_bytes
from shardwise.checkpoint.formats.hf import HfSource
from shardwise.checkpoint.ranks.agreement import Ranks
from shardwise.checkpoint.ranks.hf import Contents, Rows, SavedModel, write_model, write_rows
from shardwise.checkpoint.ranks.loading import read_extra
from shardwise.checkpoint.ranks.saving import save
from shardwise.weights.version import FORMAT, Version, check_format

_FOLDER = re.compile(r"version-(\d{8,})", re.ASCII)
_ABOUT = "version.json"
_MOST_ABOUT = 4096  # bytes
_FARTHEST = 2**16 - 1
_LOOKS = 20  # attempts at a folder from which the publisher deletes what is being read


@dataclass(frozen=True)
class _About:
    """What a version says about itself.

    Attributes:
        format: of the version.
        number: its number.
        origin: of its publisher.
    """

    format: int
    number: int
    origin: str

    @property
    def version(self) -> Version:
        """The version, for readers."""
        return Version(self.number, self.origin)


def version_folder(root: Path, number: int) -> Path:
    """The path of a version."""
    return root / f"version-{number:08}"


def _numbers(root: Path) -> list[int]:
    """The numbers of all versions in a folder, in ascending order."""
    try:
        found = [_FOLDER.fullmatch(path.name) for path in root.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for match in found if match)


def _is_full(folder: Path) -> bool:
    return (folder / _ABOUT).exists()


# -- writing ---------------------------------------------------------------------------------------


class FolderVersions:
    """The versions that ranks publish to a folder. Every rank makes one.

    Args:
        root: the folder, which all ranks see; made if it does not exist.
        saved: how the model is saved.
        dtype: what floating-point tensors are converted to; ``None`` for their own.
        ranks: who publishes.
        group: the process group of ``ranks``.

    Attributes:
        version: number of the newest version; 0 if there is none.

    Raises:
        CheckpointError: another process publishes to this folder.
    """

    def __init__(
        self, root: Path, saved: SavedModel, dtype: torch.dtype | None, ranks: Ranks, group: Any
    ) -> None:
        self._root = root
        self._saved = saved
        self._dtype = dtype
        self._ranks = ranks
        self._group = group
        self._lock: LockedFile | None = None
        # The rows that this rank has written, as they are in the newest version, by tensor,
        # shape of the tensor, part and dtype.
        self._held: dict[_Key, torch.Tensor] = {}
        self._full = 0  # number of the newest version in full; 0 if this publisher has none
        self._left = 0  # bytes of changes that are cheaper than a version in full
        self.version, self._origin = ranks.first(f"publishing to {root}", self._begin)

    def _begin(self) -> tuple[int, str]:
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock = LockedFile(self._root / "publisher.lock", f"publishing to {self._root}")
        return max(_numbers(self._root), default=0), secrets.token_hex(8)

    def update(self) -> None:
        """Write the next version.

        Raises:
            CheckpointError: it could not be written, on any rank. Readers see the one before.
        """
        try:
            self._update()
        except BaseException:
            self._held.clear()  # so that the next one is in full
            raise

    def _update(self) -> None:
        doing = f"publishing to {self._root}"
        contents = replace(self._ranks.all(doing, self._saved.contents), dtype=self._dtype)
        changes = self._changes(contents, doing)

        def choose(sizes: list[int | None]) -> list[tuple[int, int | None]]:
            number = max(_numbers(self._root), default=0) + 1
            known = [size for size in sizes if size is not None]
            total = sum(known) if len(known) == len(sizes) else None
            return [(number, total)] * len(sizes)

        same_parts = not changes.new and changes.keys == self._held.keys()
        mine = sum(each.nbytes for each in changes.parts) if same_parts else None
        number, total = self._ranks.together(doing, lambda: mine, choose)
        about, target = _About(FORMAT, number, self._origin), version_folder(self._root, number)
        if total is None or total > self._left:
            self._write_full(target, about, contents)
            self._left = sum(info.nbytes for info in contents.infos().values())
        else:
            rank = {f"rank{self._ranks.rank}": [each.saved() for each in changes.parts]}
            save(target, nn.Module(), extra={"about": asdict(about), **rank}, group=self._group)
            self._left -= total
        for gone in self._held.keys() - changes.keys:
            del self._held[gone]
        for each in changes.parts:
            each.apply(self._held[each.key])
        self._held |= changes.new
        self.version = number

    def close(self) -> None:
        """Publish no more. The versions stay."""
        if self._lock is not None:
            self._lock.close()

    def _changes(self, contents: Contents, doing: str) -> _Changes:
        """How this rank's rows differ from those of the newest version."""
        found = _Changes(set(), [], {})

        def compare(rows: list[Rows]) -> None:
            for each in rows:
                key = _key(each, contents)
                found.keys.add(key)
                if (held := self._held.get(key)) is None:
                    found.new[key] = each.values.to("cpu", key.dtype, copy=True).contiguous()
                else:
                    now = each.values.to(key.dtype).cpu().contiguous()
                    found.parts.extend(_compared(key, held, now))

        write_rows(contents, self._ranks, doing, compare)
        return found

    def _write_full(self, target: Path, about: _About, contents: Contents) -> None:
        def write_others(folder: Path) -> None:
            self._saved.write_others(folder)
            write_new(folder / _ABOUT, plain.written(about))

        saved = replace(self._saved, contents=lambda: contents, write_others=write_others)
        write_model(target, saved, group=self._group)
        last, self._full = self._full, about.number

        def delete_older() -> None:
            for number in _numbers(self._root):
                if number < last:
                    delete(version_folder(self._root, number))

        self._ranks.first(f"publishing {target}", delete_older)


@dataclass(frozen=True)
class _Key:
    """Which part of which tensor.

    Attributes:
        name: of the tensor.
        shape: of the tensor in full.
        box: the part.
        dtype: in which it is published.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype


def _key(rows: Rows, contents: Contents) -> _Key:
    return _Key(rows.name, rows.shape, rows.box, contents.dtype_of(rows.values.dtype))


@dataclass(frozen=True)
class _ChangedPart:
    """What has changed in a part of a tensor.

    Attributes:
        key: the part.
        gaps: how far each changed element, in row-major order, is from the one before, in 16 bits;
            ``None`` if ``values`` are all elements.
        values: of the changed elements.
    """

    key: _Key
    gaps: torch.Tensor | None
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Its size in a version."""
        return self.values.nbytes + (0 if self.gaps is None else self.gaps.nbytes)

    def apply(self, part: torch.Tensor) -> None:
        """Change a part of a tensor."""
        if self.gaps is None:
            part.copy_(self.values.view(part.shape))
            return
        flat = part.reshape(-1)  # a copy, if the part is not contiguous
        flat[self.gaps.long().cumsum(0)] = self.values
        if flat.data_ptr() != part.data_ptr():
            part.copy_(flat.view(part.shape))

    def saved(self) -> dict[str, Any]:
        """The piece as a checkpoint holds it."""
        box = {"offsets": list(self.key.box.offsets), "sizes": list(self.key.box.sizes)}
        tensors = {"values": self.values} | ({} if self.gaps is None else {"gaps": self.gaps})
        return {"name": self.key.name, "shape": list(self.key.shape), **box, **tensors}


@dataclass(frozen=True)
class _Changes:
    """How the rows of a rank differ from those of the newest version.

    Attributes:
        keys: which parts it has now.
        parts: what has changed in parts that it had.
        new: parts that it did not have, copied.
    """

    keys: set[_Key]
    parts: list[_ChangedPart]
    new: dict[_Key, torch.Tensor]


def _compared(key: _Key, old: torch.Tensor, new: torch.Tensor) -> Iterator[_ChangedPart]:
    """What has changed between two values of the same part, if anything has."""
    # Bits are compared, for NaN is not equal to itself and the zeros are.
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[new.itemsize]
    differs = as_bytes(old).view(bits) != as_bytes(new).view(bits)
    count = int(differs.count_nonzero())
    if not count:
        return
    flat = new.reshape(-1)
    if count * (2 + new.itemsize) >= new.nbytes:
        yield _ChangedPart(key, None, flat.clone())
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
    yield _ChangedPart(key, gaps.to(torch.uint16), flat[where])


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

    def newest(self) -> Version | None:
        """The newest version; ``None`` if there is none."""
        number = max(_numbers(self._root), default=0)
        if self._version is not None and number == self._version.number:
            return self._version
        return Version(number, "") if number else None

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
            except (CheckpointError, OSError):
                self._version, self._held = None, {}
                # The publisher may have deleted what was being read.
                if look == _LOOKS or numbers == _numbers(self._root):
                    raise
        assert self._version is not None
        return self._version, ((name, each.clone()) for name, each in self._held.items())

    def _read_up_to(self, numbers: list[int]) -> None:
        """Read the newest version, from the one that is held or from the newest in full."""
        chain: list[int] = []
        for number in reversed(numbers):
            if self._version is not None and number == self._version.number:
                break
            chain.insert(0, number)
            if _is_full(version_folder(self._root, number)):
                self._version, self._held = None, {}
                break
        for number in chain:
            folder = version_folder(self._root, number)
            if _is_full(folder):
                self._read_full(folder)
            else:
                self._read_changes(folder)

    def _read_full(self, folder: Path) -> None:
        about = _about(folder, lambda: plain.read(_About, read_small(folder / _ABOUT, _MOST_ABOUT)))
        with HfSource(folder) as source:
            self._held = {dotted(path[1:]): source.full(path) for path in source.tensors}
        self._version = about.version

    def _read_changes(self, folder: Path) -> None:
        extra = read_extra(folder)
        about = _about(folder, lambda: plain.converted(_About, extra.get("about")))
        if self._version != Version(about.number - 1, about.origin):
            raise CheckpointError(
                f"{folder}: found changes since version {about.number - 1} of publisher "
                f"{about.origin}, expected changes since {self._version}; publish again, which "
                "begins with a version in full"
            )
        # All are checked before the first one is applied.
        pieces = [
            self._checked(each, folder)
            for key, found in extra.items()
            if key != "about"
            for each in found
        ]
        for each in pieces:
            each.apply(narrow(self._held[each.key.name], each.key.box))
        self._version = about.version

    def _checked(self, found: Any, folder: Path) -> _ChangedPart:
        """A piece that a checkpoint holds.

        Raises:
            CheckpointError: it does not fit the tensor that it changes.
        """
        try:
            name, box = found["name"], Box(tuple(found["offsets"]), tuple(found["sizes"]))
            values, gaps = found["values"], found.get("gaps")
            held = self._held[name]
            fits = found["shape"] == list(held.shape) and box.is_inside(held.shape)
            fits &= values.dtype == held.dtype
            if gaps is None:
                fits &= values.shape == (box.numel,)
            else:
                fits &= gaps.dtype == torch.uint16 and gaps.shape == values.shape and gaps.ndim == 1
                fits &= int(gaps.long().sum()) < box.numel
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}: found changes without {error}") from None
        if not fits:
            raise CheckpointError(
                f"{folder}: {name}: found {len(values)} values of {values.dtype} for {box}, "
                f"expected changes of a tensor of {held.dtype} and shape {list(held.shape)}"
            )
        return _ChangedPart(_Key(name, tuple(held.shape), box, held.dtype), gaps, values)


def _about(folder: Path, read: Callable[[], _About]) -> _About:
    try:
        about = read()
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    check_format(folder, about.format)
    return about
