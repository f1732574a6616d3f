"""The zip archives that ``torch.save`` writes, accepted only if they can be read in one way.

    header  data.pkl   header  data/0   ...   directory   end

Zip leaves room for doubt: a name may occur twice, the directory and the headers may differ, there
may be bytes before, between or behind the records. Programs resolve that differently, so that one
reads something else than another has checked. Here every ambiguous archive is refused. So is
compression, which can turn a megabyte into a gigabyte.

Source: APPNOTE.TXT, the ZIP file format specification.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardwise.base.errors import CheckpointError
from shardwise.base.files import read_exactly
from shardwise.base.strict import check_memory, refuse

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s4B4HL2L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_EXTRA = struct.Struct("<2H")
_ZIP64 = 1  # tag of the extra field for numbers that need more than 32 bits
_FULL, _FULL_SHORT = 0xFFFFFFFF, 0xFFFF  # stand for such numbers
_ENCRYPTED, _LATER = 1, 8  # flags; _LATER: sizes follow the record, and are in the directory
_ENTRY_CRC = 16  # offset of the checksum in an entry of the directory
_DESCRIPTOR = b"PK\x07\x08"
_MOST_DIRECTORY = 1 << 26
_RECORD = 800  # bytes of memory that a record takes while the directory is read


@dataclass(frozen=True)
class Record:
    """A file in an archive.

    Attributes:
        first: its first byte, counted from the beginning of the archive.
        length: its size in bytes.
        crc: its CRC-32; 0 if the writer did not compute one.
    """

    first: int
    length: int
    crc: int


#: What the directory says about a record: first byte of its header, name, size and CRC-32.
_Entry = tuple[int, bytes, int, int]


class Archive:
    """An archive in an open file.

    Args:
        handle: descriptor of the file.
        start: byte of the file at which the archive begins.
        length: size of the archive in bytes.
        file: path of the file, for error messages.

    Attributes:
        records: all records by name, without the name of the folder that contains all of them.

    Raises:
        CheckpointError: it is not an archive, is damaged, or can be read in more than one way.
    """

    def __init__(self, handle: int, start: int, length: int, file: Path) -> None:
        self._handle, self._start, self._length, self._file = handle, start, length, file
        self.records: Mapping[str, Record] = self._read_records()

    def read(self, name: str, most: int) -> bytes:
        """Read a small record in full.

        Args:
            name: name of the record.
            most: largest accepted size in bytes.

        Raises:
            CheckpointError: it is missing, larger than ``most``, or damaged.
        """
        record = self.records.get(name)
        if record is None:
            raise self._refused(f"it has no {name}")
        if record.length > most:
            refuse(f"{self._file}, {name}", f"{record.length:,} bytes", f"at most {most:,}")
        data = self._bytes(record.first, record.length)
        if record.crc and zlib.crc32(data) != record.crc:
            raise CheckpointError(f"{self._file}, {name}: is damaged: its checksum does not match")
        return data

    def _bytes(self, first: int, count: int) -> bytes:
        if first < 0 or first + count > self._length:
            raise self._refused(f"it is truncated: byte {first + count} of {self._length}")
        data = bytearray(count)
        read_exactly(self._handle, memoryview(data), self._start + first, self._file)
        return bytes(data)

    def _refused(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file}: is not a file of torch.save that can be read without running code from "
            f"it ({reason})"
        )

    def _read_records(self) -> dict[str, Record]:
        first, size, count = self._read_end()
        check_memory(size // _ENTRY.size * _RECORD, self._length, str(self._file))
        directory = self._bytes(first, size)
        records: dict[str, Record] = {}
        folder, free = b"", 0
        for header, path, size, crc in sorted(self._entries(directory, count)):
            folder = folder or path.partition(b"/")[0] + b"/"
            inner = path.removeprefix(folder)
            if inner == path or not inner.isascii():
                raise self._refused(f"its records are in more than one folder: {inner[:80]!r}")
            name = inner.decode("ascii")
            if header < free:
                raise self._refused(f"{name[:80]!r} overlaps another record")
            record = self._record(header, path, size, crc)
            free = record.first + record.length
            if free > first:
                raise self._refused(f"{name[:80]!r} ends at byte {free} of {first}")
            if records.setdefault(name, record) is not record:
                raise self._refused(f"{name[:80]!r} is in it twice")
        return records

    def _read_end(self) -> tuple[int, int, int]:
        """First byte, size and records of the directory, if there is one that is not split."""
        at = self._length - _END.size
        data = self._bytes(at, _END.size) if at >= 0 else b""
        if not data.startswith(b"PK\5\6"):
            raise self._refused("it has no directory of an archive at its end")
        *numbers, comment = _END.unpack(data)[1:]
        # In which files its end and itself are, records in this one and in all, bytes, first byte.
        disk, directory_disk, here, count, size, first = numbers
        if _FULL in (size, first) or count == _FULL_SHORT or self._has_locator(at):
            at, disk, directory_disk, here, count, size, first = self._read_end_64(at)
        if disk or directory_disk or comment or here != count:
            raise self._refused("it has a comment, or is one part of several")
        if size > _MOST_DIRECTORY:
            refuse(f"{self._file}, directory", f"{size:,} bytes", f"at most {_MOST_DIRECTORY:,}")
        if first + size != at:
            raise self._refused(f"its directory ends at byte {first + size}, expected {at}")
        return first, size, count

    def _has_locator(self, end: int) -> bool:
        at = end - _LOCATOR.size
        return at >= 0 and self._bytes(at, 4) == b"PK\6\7"

    def _read_end_64(self, end: int) -> tuple[int, ...]:
        """Where the end of a large directory begins, which precedes the short one; its numbers."""
        locator = end - _LOCATOR.size
        if not self._has_locator(end):
            raise self._refused("its directory is truncated")
        _, disk, at, disks = _LOCATOR.unpack(self._bytes(locator, _LOCATOR.size))
        if at + _END64.size != locator or disk or disks > 1:
            raise self._refused("the end of its directory is not where it says")
        magic, length, _, _, *numbers = _END64.unpack(self._bytes(at, _END64.size))
        if magic != b"PK\6\6" or length != _END64.size - 12:
            raise self._refused("the end of its directory is damaged")
        return (at, *numbers)

    def _entries(self, directory: bytes, count: int) -> Iterator[_Entry]:
        at = found = 0
        while at < len(directory):
            if len(directory) - at < _ENTRY.size:
                raise self._refused("its directory is truncated")
            fields = _ENTRY.unpack_from(directory, at)
            magic, flags, method, crc, packed, size = (fields[i] for i in (0, 5, 6, 9, 10, 11))
            named, extra, comment, header = (fields[i] for i in (12, 13, 14, 18))
            name = directory[at + _ENTRY.size : at + _ENTRY.size + named]
            after = at + _ENTRY.size + named
            at = after + extra + comment
            if magic != b"PK\1\2" or at > len(directory) or flags & _ENCRYPTED:
                raise self._refused("its directory is damaged")
            size, packed, header = self._wide(
                (size, packed, header), directory[after : after + extra]
            )
            if method or size != packed:
                raise self._refused(f"{name[:80]!r} is compressed, expected plain records")
            found += 1
            yield header, name, size, crc
        if found != count:
            raise self._refused(f"its directory lists {found} records, expected {count}")

    def _wide(self, numbers: tuple[int, ...], extra: bytes) -> tuple[int, ...]:
        """Replace numbers that are too large for the directory by those that follow the name."""
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
        raise self._refused("its directory is damaged")

    def _record(self, at: int, name: bytes, size: int, crc: int) -> Record:
        """The record that an entry of the directory describes, if its own header agrees."""
        length = _LOCAL.size + len(name)
        header = self._bytes(at, length)
        magic, _, flags, method, _, _, _, packed, plain, named, extra = _LOCAL.unpack_from(header)
        if (
            magic != b"PK\3\4"
            or method
            or flags & _ENCRYPTED
            or not (flags & _LATER or {packed, plain} - {_FULL} <= {size})
            or named != len(name)
            or header[_LOCAL.size :] != name
        ):
            raise self._refused(f"{name[:80]!r}: its header differs from the directory")
        return Record(at + length + extra, size, crc)


def write_checksums(file: BinaryIO, checksums: Mapping[int, int]) -> None:
    """Enter the checksums of records that were filled after the archive had been written.

    Other programs refuse an archive without them.

    Args:
        file: the archive, open for reading and writing.
        checksums: CRC-32 of a record, by its first byte.
    """
    with zipfile.ZipFile(file) as archive:
        items = archive.infolist()
        entry = archive.start_dir
    for item in items:
        file.seek(item.header_offset)
        *_, name, extra = _LOCAL.unpack(file.read(_LOCAL.size))
        first = item.header_offset + _LOCAL.size + name + extra
        file.seek(entry)
        fields = _ENTRY.unpack(file.read(_ENTRY.size))
        if first in checksums:
            crc = checksums[first].to_bytes(4, "little")
            file.seek(entry + _ENTRY_CRC)
            file.write(crc)
            file.seek(first + item.file_size)
            if file.read(4) == _DESCRIPTOR:
                file.write(crc)
        entry += _ENTRY.size + sum(fields[12:15])  # the name, what follows it, and a comment
