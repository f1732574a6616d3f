"""The manifest: the file that says what a checkpoint contains, and where.

    step-00000040/
      shard-00000-of-00002.safetensors    written by rank 0
      shard-00001-of-00002.safetensors    written by rank 1
      manifest.json                       written last

A tensor consists of pieces, as the mesh sharded it when it was saved. Each piece is in one file, in
row-major order. Its checksums cover blocks of a fixed size, so that a part of it can be verified
without the rest.

Pieces are written one by one, for people to read, or in columns, if a tensor has many. A column is
a number that all pieces have, or the differences of one to the next, in 8 bytes each, compressed.

A manifest may come from a stranger. One that was read is consistent: its pieces are inside their
tensors and files and cover the tensors without overlap, so that no shape in it is larger than its
files. Whether the files have the sizes that it says is checked in :mod:`.pieces`. Torch is not
imported.
"""

from __future__ import annotations

import binascii
import bisect
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardwise.base.boxes import Box, are_tiling, is_tiling
from shardwise.base.errors import CheckpointError, StoreError
from shardwise.base.files import read_small, size_of, write_new
from shardwise.base.strict import (
    FREE,
    MAX_DIMS,
    MAX_INT,
    Fields,
    check_keys,
    check_memory,
    check_number,
    check_shape,
    check_text,
    memory_of,
    parse,
    refuse,
)
from shardwise.base.units import version_of
from shardwise.checkpoint.disk.columns import DIGEST, Numbers, Pieces
from shardwise.checkpoint.disk.entries import (
    DTYPE_NAMES,
    MANIFEST,
    SECTIONS,
    Manifest,
    ModelFacts,
    PathKey,
    StatePath,
    StoredPiece,
    TensorEntry,
    Value,
    dotted,
    itemsize,
)
from shardwise.checkpoint.disk.place import Place
from shardwise.checkpoint.disk.values import decode, encode

__all__ = ["Manifest", "StoredPiece", "TensorEntry", "Value", "read_manifest", "write_manifest"]

FORMAT = "shardwise.checkpoint"
VERSION = 1
IN_COLUMNS = 2  # the version of a manifest in which pieces may be written in columns
ALGORITHM = "xxh3_64"

MAX_BYTES = 1 << 28  # of a manifest: about 20 million pieces in columns
MAX_PIECES = 1 << 17  # of one tensor
MANY = 64  # pieces of a tensor, from which on they are written in columns
MAX_BLOCK = 1 << 30
_HARMLESS = FREE // 256  # bytes, each of which takes at most 256 of memory, whatever it is
_DIGITS = 2 * DIGEST  # of a checksum, hexadecimal
# In an object store, files of each attempt to save have names of their own.
_FILE = re.compile(r"shard-\d{5,9}-of-\d{5,9}(-[0-9a-f]{16})?\.safetensors", re.ASCII)
_CHECKSUMS = re.compile(r"[0-9a-f]*", re.ASCII)
_LAST = "of_all_above"
_FIELDS = frozenset(
    (
        *("format", "version", "versions", "world_size", "mesh", "strategy", "tied", "config"),
        *("checksum", "files", "values", "tensors", _LAST),
    )
)
# The last line of a manifest as Shardwise writes it. To edit one by hand, delete this line.
_OF_ALL_ABOVE = re.compile(rb',\n"of_all_above": "([0-9a-f]{16})"\n}\n\Z')


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, and wait until it is on the disk.

    Args:
        folder: the checkpoint's folder, without a manifest.
        manifest: the contents of the checkpoint.

    Raises:
        OSError: it cannot be written, because the disk is full for instance.
        TypeError: a value is not a plain value.
    """
    write_new(Path(folder) / MANIFEST, manifest_bytes(manifest))


def manifest_bytes(manifest: Manifest) -> bytes:
    """What the file of a manifest contains.

    Raises:
        TypeError: a value is not a plain value.
    """
    text = "".join(_lines(_to_json(manifest))).encode("ascii")
    above = text.removesuffix(b"\n}\n")
    return above + b',\n"of_all_above": "%s"\n}\n' % _checksum(above)


def writer_versions() -> dict[str, str]:
    """The versions of Shardwise and torch, as a manifest records them."""
    return {name: version_of(name) or "unknown" for name in ("shardwise", "torch")}


def read_manifest(folder: Place) -> Manifest:
    """Read the manifest of a checkpoint.

    Args:
        folder: the checkpoint's folder, or its name in an object store.

    Raises:
        CheckpointError: it is missing or damaged; the message names the entry.
    """
    path = folder / MANIFEST
    if isinstance(path, Path):
        return parse_manifest(read_small(path, MAX_BYTES), str(path), size_of(path.parent))
    size = 0
    try:
        text = path.read_small(MAX_BYTES)
    except StoreError:
        raise
    except CheckpointError:
        path.parent.below()  # which raises StoreError if there is no such bucket
        raise
    if len(text) > _HARMLESS:
        size = sum(each.size for each in path.parent.below().values())
    return parse_manifest(text, str(path), size)


def parse_manifest(text: bytes, where: str, size: int) -> Manifest:
    """Check what the file of a manifest contains.

    Args:
        text: its bytes.
        where: the file, for error messages.
        size: bytes of all files of the checkpoint.

    Raises:
        CheckpointError: it is damaged; the message names the entry.
    """
    manifest = parse_part(text, where, size)
    for i, entry in enumerate(manifest.tensors):
        pieces = entry.pieces
        if not (
            are_tiling(pieces.offsets, pieces.sizes, len(pieces), entry.shape)
            if isinstance(pieces, Pieces)
            else is_tiling([piece.box for piece in pieces], entry.shape)
        ):
            expected = f"pieces that cover {list(entry.shape)} exactly"
            refuse(f"{where}, tensor {i} ({entry.fqn}), pieces", "gaps or overlaps", expected)
    return manifest


def parse_part(text: bytes, where: str, size: int) -> Manifest:
    """The same where pieces need not cover their tensors, because others have the rest."""
    fields = parse(text, where, size)
    found = _OF_ALL_ABOVE.search(text)
    wrong = found is not None and found[1] != _checksum(text[: found.start()])
    if wrong or (found is None and isinstance(fields, dict) and _LAST in fields):
        raise CheckpointError(
            f"{where}: is damaged: its contents do not match its checksum, {_LAST!r}; delete that "
            "line if the file was edited on purpose"
        )
    return _from_json(fields, where, _MemoryTaken(where, max(size, len(text)), memory_of(text)))


@dataclass
class _MemoryTaken:
    """What reading takes of memory, and may take."""

    where: str
    size: int
    taken: int

    def take(self, nbytes: int) -> None:
        """Check that there may be so many bytes more."""
        self.taken += nbytes
        check_memory(self.taken, self.size, self.where)


def _checksum(text: bytes) -> bytes:
    return xxhash.xxh3_64(text).hexdigest().encode("ascii")


def _lines(fields: dict[str, Any]) -> Iterator[str]:
    """Yield JSON with one line per field and per item of a list, so that people can read it."""
    yield "{\n"
    for i, (name, value) in enumerate(fields.items(), 1):
        end = ",\n" if i < len(fields) else "\n"
        if isinstance(value, list):
            yield f"{json.dumps(name)}: [\n"
            for j, item in enumerate(value, 1):
                comma = "," if j < len(value) else ""
                yield f"{json.dumps(item, allow_nan=False)}{comma}\n"
            yield f"]{end}"
        else:
            yield f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}{end}"
    yield "}\n"


def _to_json(manifest: Manifest) -> dict[str, Any]:
    files = tuple(manifest.files)
    in_columns = any(len(entry.pieces) >= MANY for entry in manifest.tensors)
    return {
        "format": FORMAT,
        "version": IN_COLUMNS if in_columns else VERSION,
        "versions": dict(manifest.versions),
        "world_size": manifest.world_size,
        "mesh": manifest.mesh,
        "strategy": manifest.facts.strategy,
        **({"tied": dict(manifest.facts.tied)} if manifest.facts.tied else {}),
        **({"config": dict(manifest.facts.config)} if manifest.facts.config else {}),
        "checksum": {"algorithm": ALGORITHM, "block": manifest.block},
        "files": dict(manifest.files),
        "values": [
            {"path": list(value.path), "value": encode(value.value, dotted(value.path))}
            for value in manifest.values
        ],
        "tensors": [_tensor_to_json(entry, files) for entry in manifest.tensors],
    }


def _tensor_to_json(entry: TensorEntry, files: tuple[str, ...]) -> dict[str, Any]:
    many = len(entry.pieces) >= MANY
    return {
        "path": list(entry.path),
        "shape": list(entry.shape),
        "dtype": entry.dtype,
        "placements": entry.placements,
        "mesh": entry.mesh,
        "pieces": (_columns_to_json if many else _pieces_to_json)(entry.pieces, files),
    }


def _pieces_to_json(pieces: Sequence[StoredPiece], files: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {
            "file": piece.file,
            "offset": piece.offset,
            "offsets": list(piece.box.offsets),
            "sizes": list(piece.box.sizes),
            "checksums": "".join(piece.checksums),
        }
        for piece in pieces
    ]


def _columns_to_json(pieces: Sequence[StoredPiece], files: tuple[str, ...]) -> dict[str, Any]:
    columns = Pieces.of(pieces, files)
    return {
        "count": len(columns),
        "file": _packed(columns.file),
        "offset": _packed(columns.offset),
        "offsets": [_packed(each) for each in columns.offsets],
        "sizes": [_packed(each) for each in columns.sizes],
        "checksums": _to_text(columns.digests),
    }


def _packed(column: Numbers) -> int | str:
    first = int(column[0])
    if (column == first).all():
        return first
    return _to_text(zlib.compress(np.diff(column, prepend=0).astype("<i8").tobytes(), 1))


def _unpacked(value: Any, where: str, count: int, most: int = MAX_INT) -> Numbers:
    """A column: numbers from 0 to ``most``, checked."""
    if not isinstance(value, str):
        return np.broadcast_to(np.int64(check_number(value, where, most=most)), count)
    packed, unpacking = _from_text(value, where), zlib.decompressobj()
    try:
        found = unpacking.decompress(packed, 8 * count + 1)  # no more, whatever is in it
    except zlib.error as error:
        refuse(where, str(error), "compressed numbers")
    if len(found) != 8 * count or not unpacking.eof or unpacking.unused_data:
        refuse(where, f"{len(found)} bytes", f"{8 * count} of {count} numbers, and no more")
    numbers: Numbers = np.cumsum(np.frombuffer(found, "<i8"), dtype=np.int64)
    if numbers.min() < 0 or numbers.max() > most:
        wrong = numbers[(numbers < 0) | (numbers > most)]
        refuse(where, int(wrong[0]), f"integers from 0 to {most}")
    return numbers


def _to_text(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def _from_text(value: Any, where: str) -> bytes:
    if not isinstance(value, str):
        refuse(where, value, "base64")
    try:
        return binascii.a2b_base64(value, strict_mode=True)
    except ValueError as error:
        refuse(where, str(error), "base64")


def _from_json(value: Any, where: str, memory: _MemoryTaken) -> Manifest:
    fields = Fields(value, where)
    unknown = next((name for name in fields.all() if name not in _FIELDS), None)
    if fields.any("format") != FORMAT:
        refuse(f"{where}, 'format'", fields.any("format"), FORMAT)
    version = fields.any("version")
    if version not in (VERSION, IN_COLUMNS):
        expected = f"{VERSION} or {IN_COLUMNS}, which this release reads"
        refuse(f"{where}, 'version'", version, expected)
    if unknown is not None:  # a damaged name, perhaps: its contents would be ignored silently
        refuse(where, f"the field {unknown!r}", f"one of {', '.join(sorted(_FIELDS))}")
    checksum = Fields(fields.any("checksum"), f"{where}, 'checksum'")
    if checksum.any("algorithm") != ALGORITHM:
        refuse(f"{checksum.where}, 'algorithm'", checksum.any("algorithm"), ALGORITHM)
    # A multiple of every element size, so that no element is in two blocks.
    block = checksum.number("block", least=16, most=MAX_BLOCK)
    if block % 16:
        refuse(f"{checksum.where}, 'block'", block, "a multiple of 16")
    files = {
        _file_name(name, where): check_number(size, f"{where}, file {name}")
        for name, size in fields.object("files").items()
    }
    if sum(files.values()) > MAX_INT:
        refuse(f"{where}, 'files'", f"{sum(files.values())} bytes", f"at most {MAX_INT}")
    reading = _TensorChecks(files, block, version, memory)
    versions = Fields(fields.any("versions"), f"{where}, 'versions'")
    manifest = Manifest(
        tensors=tuple(
            _tensor(item, f"{where}, tensor {i}", reading)
            for i, item in enumerate(fields.items("tensors", MAX_BYTES))
        ),
        values=tuple(
            _value(item, f"{where}, value {i}")
            for i, item in enumerate(fields.items("values", MAX_BYTES))
        ),
        files=files,
        block=block,
        world_size=fields.number("world_size", least=1, most=10**9),
        mesh=fields.text("mesh"),
        facts=_facts(fields),
        versions={
            check_text(name, versions.where): versions.text(name)
            for name in fields.object("versions")
        },
    )
    _check_paths([*manifest.tensors, *manifest.values], where)
    _check_files(manifest, where)
    _check_tied(manifest, where)
    return manifest


def _facts(fields: Fields) -> ModelFacts:
    optional = {name: fields.object(name) for name in ("tied", "config") if name in fields.all()}
    return ModelFacts(fields.text("strategy"), **optional)


def _check_tied(manifest: Manifest, where: str) -> None:
    """Check that both of two tied tensors exist, with the same dtype and shape."""
    model = {entry.name: (entry.dtype, entry.shape) for entry in manifest.section("model")}
    for name, other in manifest.facts.tied.items():
        known = isinstance(other, str) and name in model and other in model
        if not known or other == name or model[other] != model[name]:
            refuse(f"{where}, 'tied', {name!r}", other, "another tensor with its dtype and shape")


def _file_name(name: str, where: str) -> str:
    if not _FILE.fullmatch(name):  # neither a path nor "..", so the file is in the folder
        refuse(f"{where}, file", name, "shard-RRRRR-of-NNNNN.safetensors")
    return name


def _value(value: Any, where: str) -> Value:
    fields = Fields(value, where)
    path = _path(fields)
    return Value(path, decode(fields.any("value"), f"{where} ({dotted(path)})"))


def _path(fields: Fields) -> StatePath:
    path, where = fields.items("path", most=MAX_DIMS), f"{fields.where}, 'path'"
    check_keys(path, where)
    if len(path) < 2 or path[0] not in SECTIONS:
        refuse(where, path, f"keys that begin with one of {SECTIONS}")
    return tuple(path)


class _TensorChecks:
    """What tensors are checked with.

    Args:
        files: size in bytes of each file.
        block: number of bytes that one checksum covers.
        version: the version of the manifest.
        memory: what reading takes.
    """

    def __init__(
        self, files: Mapping[str, int], block: int, version: int, memory: _MemoryTaken
    ) -> None:
        self.files, self.names = files, tuple(files)
        self.nbytes = np.array([*files.values()], np.int64)
        self.block, self.version, self.memory = block, version, memory


def _tensor(value: Any, where: str, reading: _TensorChecks) -> TensorEntry:
    fields = Fields(value, where)
    path = _path(fields)
    fields.where = where = f"{where} ({dotted(path)})"
    dtype = fields.text("dtype")
    if dtype not in DTYPE_NAMES:
        refuse(f"{where}, 'dtype'", dtype, f"one of {', '.join(sorted(DTYPE_NAMES))}")
    shape = fields.numbers("shape")
    check_shape(shape, itemsize(dtype), where)
    pieces: Sequence[StoredPiece]
    if reading.version == IN_COLUMNS and isinstance(fields.any("pieces"), dict):
        pieces = _columns(fields.any("pieces"), where, shape, itemsize(dtype), reading)
    else:
        items = enumerate(fields.items("pieces", MAX_PIECES))
        pieces = tuple(
            _piece(item, f"{where}, piece {i}", shape, itemsize(dtype), reading)
            for i, item in items
        )
        if len(pieces) >= MANY:  # else array operations would take longer than loops
            pieces = Pieces.of(pieces, reading.names)
    return TensorEntry(
        path=path,
        shape=shape,
        dtype=dtype,
        placements=fields.text("placements"),
        mesh=fields.text("mesh"),
        pieces=pieces,
    )


def _columns(
    value: Any, where: str, shape: tuple[int, ...], size: int, reading: _TensorChecks
) -> Pieces:
    fields = Fields(value, f"{where}, pieces")
    digests = _from_text(fields.any("checksums"), f"{fields.where}, 'checksums'")
    # There is a checksum of each piece, so that a short text cannot stand for many.
    count = fields.number("count", least=1, most=min(MAX_PIECES, len(digests) // DIGEST))
    # All columns, and what checks take for a moment.
    reading.memory.take(8 * (2 * len(shape) + 10) * count)
    offsets, sizes = (
        tuple(
            _unpacked(each, f"{fields.where}, {name!r}", count)
            for each in fields.items(name, len(shape))
        )
        for name in ("offsets", "sizes")
    )
    if not len(offsets) == len(sizes) == len(shape):
        refuse(
            fields.where, f"{len(offsets)} offsets and {len(sizes)} sizes", f"{len(shape)} of each"
        )
    file = _unpacked(fields.any("file"), f"{fields.where}, 'file'", count, len(reading.names) - 1)
    offset = _unpacked(fields.any("offset"), f"{fields.where}, 'offset'", count)
    pieces = Pieces(reading.names, file, offset, offsets, sizes, file, digests)
    pieces = replace(pieces, ends=np.cumsum(-(-pieces.numels * size // reading.block)))
    _check_columns(pieces, where, shape, size, reading)
    return pieces


def _piece(
    value: Any, where: str, shape: tuple[int, ...], size: int, reading: _TensorChecks
) -> StoredPiece:
    fields = Fields(value, where)
    name = fields.text("file")
    if name not in reading.files:
        refuse(f"{where}, 'file'", name, "one of 'files'")
    box = Box(fields.numbers("offsets"), fields.numbers("sizes"))
    if len(box.sizes) != len(box.offsets) or not box.is_inside(shape) or not box.numel:
        refuse(where, *_not_inside(box, shape))
    nbytes, most = box.numel * size, reading.files[name]
    offset = fields.number("offset", most=most)
    if offset + nbytes > most:
        refuse(where, *_not_in_file(name, offset, nbytes, most))
    digits = fields.text("checksums")
    blocks = -(-nbytes // reading.block)
    if len(digits) != blocks * _DIGITS or not _CHECKSUMS.fullmatch(digits):
        expected = f"{_DIGITS} hex digits for each {reading.block} of {nbytes} bytes"
        refuse(f"{where}, 'checksums'", digits, expected)
    checksums = tuple(digits[i : i + _DIGITS] for i in range(0, len(digits), _DIGITS))
    return StoredPiece(name, offset, box, checksums)


def _not_inside(box: Box, shape: tuple[int, ...]) -> tuple[str, str]:
    return f"{box.offsets} + {box.sizes}", f"a non-empty part of {list(shape)}"


def _not_in_file(file: str, offset: int, nbytes: int, most: int) -> tuple[str, str]:
    return f"bytes {offset} .. {offset + nbytes}", f"bytes inside the {most} of {file}"


def _check_columns(
    pieces: Pieces, where: str, shape: tuple[int, ...], size: int, reading: _TensorChecks
) -> None:
    """Check that each piece is inside its tensor and its file, and has its checksums.

    No sum here exceeds 64 bits, since what it consists of has been checked before.
    """

    def check(
        right: NDArray[np.bool_], name: str, say: Callable[[StoredPiece], tuple[Any, str]]
    ) -> None:
        if not right.all():
            at = int(right.argmin())
            refuse(f"{where}, piece {at}{name}", *say(pieces[at]))

    def span(piece: StoredPiece) -> tuple[str, str]:
        most = reading.files[piece.file]
        return _not_in_file(piece.file, piece.offset, piece.box.numel * size, most)

    inside = np.ones(len(pieces), bool)
    for starts, sizes, most in zip(pieces.offsets, pieces.sizes, shape, strict=False):
        inside &= (sizes > 0) & (sizes <= most - starts)
    check(inside, "", lambda piece: _not_inside(piece.box, shape))
    nbytes, room = pieces.numels * size, reading.nbytes[pieces.file] - pieces.offset
    check(room >= 0, ", 'offset'", span)
    check(nbytes <= room, "", span)
    blocks, known = -(-nbytes // reading.block), len(pieces.digests) // DIGEST
    check(
        blocks <= known,
        ", 'checksums'",
        lambda piece: (len(piece.checksums), f"one for each {reading.block} bytes"),
    )
    if len(pieces.digests) != blocks.sum() * DIGEST:
        found, expected = f"{len(pieces.digests)} bytes", f"{blocks.sum() * DIGEST}"
        refuse(f"{where}, pieces, 'checksums'", found, expected)


class _Node:
    """A key of a path, as a node of a tree.

    Attributes:
        kind: type of all keys below it; ``None`` if a path ends here.
        children: the nodes below it, by key.
    """

    __slots__ = ("children", "kind")

    def __init__(self, kind: type | None) -> None:
        self.kind = kind
        self.children: dict[PathKey, _Node] = {}


def _check_paths(entries: Iterable[TensorEntry | Value], where: str) -> None:
    """Check that every path leads to one thing: none occurs twice, none goes on below a value."""
    names: set[str] = set()
    root = _Node(str)
    for entry in entries:
        name = dotted(entry.path)
        if name in names:
            refuse(where, f"the name {name} twice", "each once")
        names.add(name)
        node = root
        for i, key in enumerate(entry.path, 1):
            kind = type(entry.path[i]) if i < len(entry.path) else None
            node = node.children.setdefault(key, _Node(kind))
            if node.kind is kind:
                continue
            if node.kind is None or kind is None:
                end = dotted(entry.path[:i])
                raise CheckpointError(f"{where}: {end} is a value, and contains other values")
            refuse(where, f"both names and positions in {name}", "one kind of key")


def _positions(manifest: Manifest) -> tuple[Numbers, Numbers, list[int]]:
    """Where all pieces are, if files followed each other.

    Returns:
        The bytes at which they begin, how many they have, and for each entry how many pieces it and
        those before have.
    """
    names = tuple(manifest.files)
    bases = np.cumsum([0, *manifest.files.values()], dtype=np.int64)
    first = dict(zip(names, bases.tolist(), strict=False))
    starts, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]

    def are_columns(entry: TensorEntry) -> bool:
        return isinstance(entry.pieces, Pieces)

    for columnar, entries in itertools.groupby(manifest.tensors, are_columns):
        if columnar:
            for entry in entries:
                columns = Pieces.of(entry.pieces, names)
                starts.append(bases[columns.file] + columns.offset)
                sizes.append(columns.numels * entry.itemsize)
        else:
            found = [(piece, entry.itemsize) for entry in entries for piece in entry.pieces]
            starts.append(np.array([first[each.file] + each.offset for each, _ in found], np.int64))
            sizes.append(np.array([each.box.numel * size for each, size in found], np.int64))
    counts = list(itertools.accumulate(len(entry.pieces) for entry in manifest.tensors))
    return np.concatenate(starts), np.concatenate(sizes), counts


def _piece_at(manifest: Manifest, counts: list[int], at: int) -> tuple[StoredPiece, TensorEntry]:
    which = bisect.bisect_right(counts, at)
    entry = manifest.tensors[which]
    return entry.pieces[at - counts[which] + len(entry.pieces)], entry


def in_files(manifest: Manifest) -> Iterator[tuple[StoredPiece, TensorEntry]]:
    """Yield all pieces with their tensors, by file and offset."""
    starts, _, counts = _positions(manifest)
    for at in np.argsort(starts, kind="stable"):
        yield _piece_at(manifest, counts, int(at))


def _check_files(manifest: Manifest, where: str) -> None:
    """Check that no two pieces share bytes of a file."""
    starts, sizes, counts = _positions(manifest)
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    shared = np.flatnonzero(starts[:-1] + sizes[order][:-1] > starts[1:])
    if len(shared):
        pair = order[shared[0] : shared[0] + 2].tolist()
        (one, first), (_, second) = (_piece_at(manifest, counts, at) for at in pair)
        both = f"{first.fqn} and {second.fqn}"
        raise CheckpointError(f"{where}: {both} overlap in {one.file}")
