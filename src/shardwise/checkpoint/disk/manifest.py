"""The manifest: the file that says what a checkpoint contains, and where.

    step-00000040/
      shard-00000-of-00002.safetensors    written by rank 0
      shard-00001-of-00002.safetensors    written by rank 1
      manifest.json                       written last

A tensor consists of pieces, as the mesh sharded it when it was saved. Each piece is in one file, in
row-major order. Its checksums cover blocks of a fixed size, so that a part of it can be verified
without the rest.

A manifest may come from a stranger. One that was read is consistent: its pieces are inside their
tensors and files and cover the tensors without overlap, so that no shape in it is larger than its
files. Whether the files have the sizes that it says is checked in :mod:`.pieces`. Torch is not
imported.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from shardwise.base.boxes import Box, is_tiling
from shardwise.base.errors import CheckpointError, StoreError
from shardwise.base.files import read_small, size_of, write_new
from shardwise.base.strict import (
    FREE,
    MAX_DIMS,
    Fields,
    check_keys,
    check_number,
    check_shape,
    check_text,
    parse,
    refuse,
)
from shardwise.base.units import version_of
from shardwise.checkpoint.disk.entries import (
    DTYPE_NAMES,
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

NAME = "manifest.json"
FORMAT = "shardwise.checkpoint"
VERSION = 1
ALGORITHM = "xxh3_64"

MAX_BYTES = 1 << 28  # of a manifest: about 10 million pieces
MAX_PIECES = 1 << 17  # of one tensor
MAX_BLOCK = 1 << 30
_HARMLESS = FREE // 256  # bytes, each of which takes at most 256 of memory, whatever it is
_DIGITS = 16  # hexadecimal digits of a checksum
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
    write_new(Path(folder) / NAME, manifest_bytes(manifest))


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
    path = folder / NAME
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
        if not is_tiling([piece.box for piece in entry.pieces], entry.shape):
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
    return _from_json(fields, where)


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
    return {
        "format": FORMAT,
        "version": VERSION,
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
        "tensors": [_tensor_to_json(entry) for entry in manifest.tensors],
    }


def _tensor_to_json(entry: TensorEntry) -> dict[str, Any]:
    return {
        "path": list(entry.path),
        "shape": list(entry.shape),
        "dtype": entry.dtype,
        "placements": entry.placements,
        "mesh": entry.mesh,
        "pieces": [
            {
                "file": piece.file,
                "offset": piece.offset,
                "offsets": list(piece.box.offsets),
                "sizes": list(piece.box.sizes),
                "checksums": "".join(piece.checksums),
            }
            for piece in entry.pieces
        ],
    }


def _from_json(value: Any, where: str) -> Manifest:
    fields = Fields(value, where)
    unknown = next((name for name in fields.all() if name not in _FIELDS), None)
    if fields.any("format") != FORMAT:
        refuse(f"{where}, 'format'", fields.any("format"), FORMAT)
    if fields.any("version") != VERSION:
        refuse(f"{where}, 'version'", fields.any("version"), f"{VERSION}, which this release reads")
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
    versions = Fields(fields.any("versions"), f"{where}, 'versions'")
    manifest = Manifest(
        tensors=tuple(
            _tensor(item, f"{where}, tensor {i}", files, block)
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


def _tensor(value: Any, where: str, files: Mapping[str, int], block: int) -> TensorEntry:
    fields = Fields(value, where)
    path = _path(fields)
    fields.where = where = f"{where} ({dotted(path)})"
    dtype = fields.text("dtype")
    if dtype not in DTYPE_NAMES:
        refuse(f"{where}, 'dtype'", dtype, f"one of {', '.join(sorted(DTYPE_NAMES))}")
    shape = fields.numbers("shape")
    check_shape(shape, itemsize(dtype), where)
    return TensorEntry(
        path=path,
        shape=shape,
        dtype=dtype,
        placements=fields.text("placements"),
        mesh=fields.text("mesh"),
        pieces=tuple(
            _piece(item, f"{where}, piece {i}", shape, itemsize(dtype), files, block)
            for i, item in enumerate(fields.items("pieces", MAX_PIECES))
        ),
    )


def _piece(
    value: Any, where: str, shape: tuple[int, ...], size: int, files: Mapping[str, int], block: int
) -> StoredPiece:
    fields = Fields(value, where)
    name = fields.text("file")
    if name not in files:
        refuse(f"{where}, 'file'", name, "one of 'files'")
    box = Box(fields.numbers("offsets"), fields.numbers("sizes"))
    if len(box.sizes) != len(box.offsets) or not box.is_inside(shape) or not box.numel:
        refuse(where, f"{box.offsets} + {box.sizes}", f"a non-empty part of {list(shape)}")
    nbytes = box.numel * size
    offset = fields.number("offset", most=files[name])
    if offset + nbytes > files[name]:
        refuse(
            where,
            f"bytes {offset} .. {offset + nbytes}",
            f"bytes inside the {files[name]} of {name}",
        )
    digits = fields.text("checksums")
    if len(digits) != -(-nbytes // block) * _DIGITS or not _CHECKSUMS.fullmatch(digits):
        refuse(
            f"{where}, 'checksums'", digits, f"{_DIGITS} hex digits per {block} of {nbytes} bytes"
        )
    checksums = tuple(digits[i : i + _DIGITS] for i in range(0, len(digits), _DIGITS))
    return StoredPiece(name, offset, box, checksums)


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


def _check_files(manifest: Manifest, where: str) -> None:
    """Check that no two pieces share bytes of a file."""
    spans: dict[str, list[tuple[int, int, str]]] = {name: [] for name in manifest.files}
    for entry in manifest.tensors:
        for piece in entry.pieces:
            nbytes = piece.box.numel * entry.itemsize
            spans[piece.file].append((piece.offset, piece.offset + nbytes, entry.fqn))
    for name, found in spans.items():
        found.sort()
        for (_, end, one), (start, _, other) in itertools.pairwise(found):
            if start < end:
                raise CheckpointError(f"{where}: {one} and {other} overlap in {name}")
