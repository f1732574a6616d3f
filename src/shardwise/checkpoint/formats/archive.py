"""The zip archives that ``torch.save`` writes, read in one way only.

    header  data.pkl   header  data/0   ...   directory   end

Zip has room for doubt: a name may be there twice, the directory and the headers may differ, bytes
may lie before, between or behind. Programs resolve that differently, so what one of them has
checked another reads otherwise. Here everything in doubt is refused, and so is compression, which
makes a gigabyte of a megabyte.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.disk.files import read_exactly
from shardwise.checkpoint.disk.strict import refuse
from shardwise.errors import CheckpointError

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s4B4HL2L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_EXTRA = struct.Struct("<2H")
_ZIP64 = 1  # the tag of what follows a name where a number does not fit into 32 bits
_FULL, _FULL_SHORT = 0xFFFFFFFF, 0xFFFF
_ENCRYPTED, _LATER = 1, 8  # _LATER: sizes are behind the record, and in the directory
_MOST_DIRECTORY = 1 << 26


@dataclass(frozen=True)
class Record:
    """A file in an archive.

    Attributes:
        first: its first byte, counted from where the archive begins.
        length: its bytes.
        crc: its checksum; 0 where the writer made none.
    """

    first: int
    length: int
    crc: int


@dataclass(frozen=True)
class _Entry:
    """What the directory says of a record: its name, its size, and where its header lies."""

    name: bytes
    size: int
    crc: int
    header: int


class Archive:
    """An archive in an open file.

    Args:
        handle: of the file.
        start: the byte at which the archive begins.
        length: its bytes.
        file: for messages.

    Attributes:
        records: by name, without the folder that all of them are in.

    Raises:
        CheckpointError: it is none, is damaged, or can be read in more than one way.
    """

    def __init__(self, handle: int, start: int, length: int, file: Path) -> None:
        self._handle, self._start, self._length, self._file = handle, start, length, file
        self.records: Mapping[str, Record] = self._read_records()

    def read(self, name: str, most: int) -> bytes:
        """A small record, whole.

        Raises:
            CheckpointError: it is missing, larger than ``most``, or not what was written.
        """
        record = self.records.get(name)
        if record is None:
            raise self._no_archive(f"it has no {name}")
        if record.length > most:
            refuse(f"{self._file}, {name}", f"{record.length:,} bytes", f"{most:,} at most")
        data = self._bytes(record.first, record.length)
        if record.crc and zlib.crc32(data) != record.crc:
            raise CheckpointError(f"{self._file}, {name}: is damaged: its checksum is another")
        return data

    def _bytes(self, first: int, count: int) -> bytes:
        if first < 0 or first + count > self._length:
            raise self._no_archive(f"it is cut short: byte {first + count} of {self._length}")
        data = bytearray(count)
        read_exactly(self._handle, memoryview(data), self._start + first, self._file)
        return bytes(data)

    def _no_archive(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file}: is no file of torch.save that can be read without running code from it "
            f"({reason})"
        )

    def _read_records(self) -> dict[str, Record]:
        first, size, count = self._find_directory()
        directory = self._bytes(first, size)
        records: dict[str, Record] = {}
        folder, end = b"", 0
        for entry in sorted(self._entries(directory, count), key=lambda entry: entry.header):
            folder = folder or entry.name.partition(b"/")[0] + b"/"
            inner = entry.name.removeprefix(folder)
            if inner == entry.name or not inner.isascii():
                raise self._no_archive(f"its records lie in more than one folder: {inner[:80]!r}")
            name = inner.decode("ascii")
            if entry.header < end:
                raise self._no_archive(f"{name[:80]!r} overlaps another record")
            record = self._record(entry)
            end = record.first + record.length
            if end > first:
                raise self._no_archive(f"{name[:80]!r} ends at byte {end} of {first}")
            if records.setdefault(name, record) is not record:
                raise self._no_archive(f"{name[:80]!r} is in it twice")
        return records

    def _find_directory(self) -> tuple[int, int, int]:
        """The first byte of the directory, its bytes, and how many records it lists."""
        at = self._length - _END.size
        end = self._bytes(at, _END.size) if at >= 0 else b""
        if not end.startswith(b"PK\5\6"):
            raise self._no_archive("it has no directory of an archive at its end")
        _, disk, its_disk, here, count, size, first, comment = _END.unpack(end)
        if _FULL in (size, first) or count == _FULL_SHORT or self._has_locator(at):
            at, disk, its_disk, here, count, size, first = self._find_directory_64(at)
        if disk or its_disk or comment or here != count:
            raise self._no_archive("it has a comment, or is a part of an archive")
        if size > _MOST_DIRECTORY:
            refuse(f"{self._file}, directory", f"{size:,} bytes", f"{_MOST_DIRECTORY:,} at most")
        if first + size != at:
            raise self._no_archive(f"its directory ends at byte {first + size}, expected {at}")
        return first, size, count

    def _has_locator(self, end: int) -> bool:
        at = end - _LOCATOR.size
        return at >= 0 and self._bytes(at, 4) == b"PK\6\7"

    def _find_directory_64(self, end: int) -> tuple[int, int, int, int, int, int, int]:
        """The same of a large archive: where the directory ends, and what the short end says."""
        locator = end - _LOCATOR.size
        if not self._has_locator(end):
            raise self._no_archive("its directory is cut short")
        _, disk, at, disks = _LOCATOR.unpack(self._bytes(locator, _LOCATOR.size))
        if at + _END64.size != locator or disk or disks > 1:
            raise self._no_archive("the end of its directory is not where it says")
        found = _END64.unpack(self._bytes(at, _END64.size))
        magic, length, _, _, disk, its_disk, here, count, size, first = found
        if magic != b"PK\6\6" or length != _END64.size - 12:
            raise self._no_archive("the end of its directory is damaged")
        return at, disk, its_disk, here, count, size, first

    def _entries(self, directory: bytes, count: int) -> Iterator[_Entry]:
        at = found = 0
        while at < len(directory):
            if len(directory) - at < _ENTRY.size:
                raise self._no_archive("its directory is cut short")
            fields = _ENTRY.unpack_from(directory, at)
            magic, flags, method, crc, packed, size = (fields[i] for i in (0, 5, 6, 9, 10, 11))
            named, extra, comment, header = (fields[i] for i in (12, 13, 14, 18))
            name = directory[at + _ENTRY.size : at + _ENTRY.size + named]
            after = at + _ENTRY.size + named
            at = after + extra + comment
            if magic != b"PK\1\2" or at > len(directory) or flags & _ENCRYPTED:
                raise self._no_archive("its directory is damaged")
            size, packed, header = self._wide(
                (size, packed, header), directory[after : after + extra]
            )
            if method or size != packed:
                raise self._no_archive(f"{name[:80]!r} is compressed, expected it plain")
            found += 1
            yield _Entry(name, size, crc, header)
        if found != count:
            raise self._no_archive(f"its directory lists {found} records, expected {count}")

    def _wide(self, numbers: tuple[int, ...], extra: bytes) -> tuple[int, ...]:
        """Numbers of the directory; those that do not fit there follow the name."""
        if _FULL not in numbers:
            return numbers
        at, wide = 0, struct.Struct(f"<{numbers.count(_FULL)}Q")
        while len(extra) - at >= _EXTRA.size:
            tag, length = _EXTRA.unpack_from(extra, at)
            at += _EXTRA.size
            if tag == _ZIP64 and min(length, len(extra) - at) >= wide.size:
                found = iter(wide.unpack_from(extra, at))
                return tuple(next(found) if number == _FULL else number for number in numbers)
            at += length
        raise self._no_archive("its directory is damaged")

    def _record(self, entry: _Entry) -> Record:
        """The record that an entry of the directory tells of, if its own header agrees."""
        size = _LOCAL.size + len(entry.name)
        header = self._bytes(entry.header, size)
        magic, _, flags, method, _, _, _, packed, length, named, extra = _LOCAL.unpack_from(header)
        sizes = {packed, length} - {_FULL}
        if (
            magic != b"PK\3\4"
            or method
            or flags & _ENCRYPTED
            or not (flags & _LATER or sizes <= {entry.size})
            or named != len(entry.name)
            or header[_LOCAL.size :] != entry.name
        ):
            raise self._no_archive(
                f"{entry.name[:80]!r}: its header is not what the directory says"
            )
        return Record(entry.header + size + extra, entry.size, entry.crc)
