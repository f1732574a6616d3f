"""MNIST as it is given out: four files in the IDX format, gzipped or not.

    magic       00 00, type of the values (08: uint8), number of dimensions
    sizes       of each dimension, 32 bits, the high byte first
    values      one after another

No torch here, so that a damaged file is told before processes are started.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from shardwise.recipes.config import OptionError

SIDE = 28  # height and width of a picture
CLASSES = 10

_OPTION = "--data-dir"
_UINT8 = 8


@dataclass(frozen=True)
class IdxSet:
    """Pictures of digits.

    Attributes:
        images: one after another, ``SIDE * SIDE`` bytes each, row by row.
        labels: a byte for each, 0 to 9.
    """

    images: bytes
    labels: bytes

    def __len__(self) -> int:
        """How many there are."""
        return len(self.labels)

    def fingerprint(self) -> str:
        """A short text that changes when any of it changes."""
        digest = xxhash.xxh3_64(self.images)
        digest.update(self.labels)
        return digest.hexdigest()


def load_mnist(folder: Path) -> tuple[IdxSet, IdxSet]:
    """Read the training set and the test set.

    Raises:
        OptionError: a file is missing, damaged, or goes with another than the one beside it.
    """
    if not folder.is_dir():
        raise OptionError(_OPTION, f"no folder {folder}", "one with MNIST's four files")
    return _load(folder, "train"), _load(folder, "t10k")


def _load(folder: Path, part: str) -> IdxSet:
    images_file = _find(folder, f"{part}-images", 3)
    labels_file = _find(folder, f"{part}-labels", 1)
    (count, *sides), images = _read(images_file, 3)
    if sides != [SIDE, SIDE]:
        found = f"{images_file} with pictures of {sides[0]} x {sides[1]}"
        raise OptionError(_OPTION, found, f"{SIDE} x {SIDE}")
    (labelled,), labels = _read(labels_file, 1)
    if count != labelled:
        found = f"{count} pictures in {images_file.name} and {labelled} labels in"
        raise OptionError(_OPTION, f"{found} {labels_file.name}", "as many of both")
    if count == 0:
        raise OptionError(_OPTION, f"no pictures in {images_file}", "one or more")
    if max(labels) >= CLASSES:
        raise OptionError(_OPTION, f"label {max(labels)} in {labels_file}", "0 to 9")
    return IdxSet(images, labels)


def _find(folder: Path, name: str, dimensions: int) -> Path:
    # With a hyphen as they are given out, with a dot as some tools unpack them.
    stems = [f"{name}{sep}idx{dimensions}-ubyte" for sep in ("-", ".")]
    for file in (folder / f"{stem}{suffix}" for stem in stems for suffix in ("", ".gz")):
        if file.is_file():
            return file
    raise OptionError(_OPTION, f"no {stems[0]} or {stems[0]}.gz in {folder}", "MNIST's four files")


def _read(file: Path, dimensions: int) -> tuple[list[int], bytes]:
    """The sizes and the values of an IDX file."""
    try:
        with _opened(file) as stream:
            header = stream.read(4 + 4 * dimensions)
            expected = bytes((0, 0, _UINT8, dimensions))
            if header[:4] != expected:
                found = f"{file} that begins with {header[:4].hex(' ') or 'nothing'}"
                raise OptionError(
                    _OPTION, found, f"{expected.hex(' ')}, IDX with {_counted(dimensions)}"
                )
            if len(header) < 4 + 4 * dimensions:
                raise OptionError(_OPTION, f"{file}, which ends in its header", "a whole file")
            sizes = list(struct.unpack(f">{dimensions}I", header[4:]))
            # Read in pieces: a header that lies must not take memory for what is not there.
            values = b"".join(_pieces(stream, math.prod(sizes) + 1))
    except (OSError, EOFError, zlib.error) as error:
        raise OptionError(
            _OPTION, f"{file} that cannot be read ({error})", "a whole file"
        ) from None
    if len(values) != math.prod(sizes):
        found = "fewer" if len(values) < math.prod(sizes) else "more"
        shape = " x ".join(map(str, sizes))
        raise OptionError(_OPTION, f"{file} with {found} values than its header says", shape)
    return sizes, values


def _opened(file: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")


def _pieces(stream: BinaryIO | gzip.GzipFile, most: int) -> Iterator[bytes]:
    while most > 0 and (piece := stream.read(min(most, 2**20))):
        most -= len(piece)
        yield piece


def _counted(dimensions: int) -> str:
    return "1 dimension" if dimensions == 1 else f"{dimensions} dimensions"
