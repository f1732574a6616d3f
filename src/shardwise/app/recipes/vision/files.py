"""Image data on disk: folders of images, and MNIST's IDX files. No torch here.

    DIR/train/CLASS/....jpg     as ImageNet is laid out; only names are kept in memory
    DIR/val/CLASS/....jpg

    magic                       an IDX file, gzipped or not: 00 00, type of the values (08: uint8),
                                number of dimensions
    sizes                       of each dimension, 32 bits, big-endian
    values                      one after another

A damaged file is reported before processes are started.
"""

from __future__ import annotations

import bisect
import gzip
import math
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, ClassVar

import xxhash

from shardwise.base.units import counted
from shardwise.insight.schema.option import OptionError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp", ".tif", ".tiff")

_OPTION = "--data-dir"


@dataclass(frozen=True)
class ImageFolder:
    """The images of one part of the data, in the order of their names.

    Attributes:
        root: the folder of the part.
        classes: names of the classes.
        names: for each class, the images, as paths from the folder of the class.
    """

    root: Path
    classes: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        """Return the number of images."""
        return sum(map(len, self.names))

    @cached_property
    def ends(self) -> list[int]:
        """For each class, the index after its last image."""
        return list(accumulate(map(len, self.names)))

    def at(self, index: int) -> tuple[Path, int]:
        """Return the file of an image, and the number of its class."""
        number = bisect.bisect_right(self.ends, index)
        before = self.ends[number - 1] if number else 0
        return self.root / self.classes[number] / self.names[number][index - before], number

    def fingerprint(self) -> str:
        """Return a text that changes when names or classes change."""
        digest = xxhash.xxh3_64()
        for name, images in zip(self.classes, self.names, strict=True):
            digest.update("\0".join((name, *images, "")).encode(errors="surrogateescape"))
        return digest.hexdigest()


def find_images(data: Path) -> tuple[ImageFolder, ImageFolder]:
    """List the images to train on, and those to evaluate on.

    Raises:
        OptionError: a folder is missing or empty, or the two parts have different classes.
    """
    if not data.is_dir():
        raise OptionError(_OPTION, f"no folder {data}", "one with train/CLASS/ and val/CLASS/")
    for part in ("train", "val"):
        if not (data / part).is_dir():
            raise OptionError(
                _OPTION, f"no folder {part} in {data}", "train/CLASS/ and val/CLASS/ with images"
            )
    training = _list(data / "train")
    validation = _list(data / "val")
    if training.classes != validation.classes:
        missing = sorted(set(training.classes) ^ set(validation.classes))
        raise OptionError(
            _OPTION, f"class {missing[0]} in only one of train and val", "the same in both"
        )
    return training, validation


def _list(root: Path) -> ImageFolder:
    try:
        folders = sorted(e.name for e in os.scandir(root) if e.is_dir() and e.name[0] != ".")
        if len(folders) < 2:
            raise OptionError(
                _OPTION,
                f"{counted(folders, 'class', 'classes')} in {root}",
                "two or more, a folder each",
            )
        names = tuple(_images_in(root / folder) for folder in folders)
    except OSError as error:
        found = f"{error.filename} that cannot be read ({error.strerror})"
        raise OptionError(_OPTION, found, "readable folders") from None
    return ImageFolder(root, tuple(folders), names)


def _images_in(folder: Path) -> tuple[str, ...]:
    found: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=_fail):
        folders.sort()
        inside = os.path.relpath(parent, folder)
        images = (n for n in names if n.lower().endswith(SUFFIXES) and n[0] != ".")
        found += (os.path.normpath(os.path.join(inside, name)) for name in images)
    if not found:
        raise OptionError(_OPTION, f"no images in {folder}", f"files {', '.join(SUFFIXES)}")
    return tuple(sorted(found))


def _fail(error: OSError) -> None:
    raise error


SIDE = 28  # height and width of an image
CLASSES = 10

_UINT8 = 8


@dataclass(frozen=True)
class IdxSet:
    """Images of digits.

    Attributes:
        images: one after another, ``SIDE * SIDE`` bytes each, row by row.
        labels: a byte for each, 0 to 9.
        classes: names of the classes.
    """

    images: bytes
    labels: bytes
    classes: ClassVar[tuple[str, ...]] = tuple(map(str, range(CLASSES)))

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def fingerprint(self) -> str:
        """Return a text that changes when any of it changes."""
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
        found = f"{images_file} with images of {sides[0]} x {sides[1]}"
        raise OptionError(_OPTION, found, f"{SIDE} x {SIDE}")
    (labeled,), labels = _read(labels_file, 1)
    if count != labeled:
        found = f"{count} images in {images_file.name} and {labeled} labels in"
        raise OptionError(_OPTION, f"{found} {labels_file.name}", "as many of both")
    if count == 0:
        raise OptionError(_OPTION, f"no images in {images_file}", "one or more")
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
    """Return the sizes and the values of an IDX file."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            header = stream.read(4 + 4 * dimensions)
            expected = bytes((0, 0, _UINT8, dimensions))
            if header[:4] != expected:
                found = f"{file} that begins with {header[:4].hex(' ') or 'nothing'}"
                raise OptionError(
                    _OPTION,
                    found,
                    f"{expected.hex(' ')}, IDX with {counted(dimensions, 'dimension')}",
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


def _pieces(stream: BinaryIO | gzip.GzipFile, most: int) -> Iterator[bytes]:
    while most > 0 and (piece := stream.read(min(most, 2**20))):
        most -= len(piece)
        yield piece
