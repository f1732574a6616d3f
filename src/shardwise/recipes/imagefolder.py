"""Pictures in folders, one for each class, as ImageNet is laid out.

    DIR/train/CLASS/....jpg
    DIR/val/CLASS/....jpg

Only names are kept in memory: a picture is read when it is asked for. No torch here.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import xxhash

from shardwise.recipes.config import OptionError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp", ".tif", ".tiff")

_OPTION = "--data-dir"


@dataclass(frozen=True)
class ImageFolder:
    """The pictures of one part of the data, in the order of their names.

    Attributes:
        root: the folder of the part.
        classes: names of the classes.
        names: for each class, the pictures, as paths from the folder of the class.
    """

    root: Path
    classes: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        """How many pictures there are."""
        return sum(map(len, self.names))

    def ends(self) -> list[int]:
        """For each class, the index behind its last picture."""
        return list(accumulate(map(len, self.names)))

    def fingerprint(self) -> str:
        """A short text that changes when names or classes change."""
        digest = xxhash.xxh3_64()
        for name, pictures in zip(self.classes, self.names, strict=True):
            digest.update("\0".join((name, *pictures, "")).encode(errors="surrogateescape"))
        return digest.hexdigest()


class Lookup:
    """Finds pictures by index.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: ImageFolder) -> None:
        self._folder = folder
        self._ends = folder.ends()

    def at(self, index: int) -> tuple[Path, int]:
        """The file of a picture, and its class."""
        number = bisect.bisect_right(self._ends, index)
        before = self._ends[number - 1] if number else 0
        name = self._folder.names[number][index - before]
        return self._folder.root / self._folder.classes[number] / name, number


def find_pictures(data: Path) -> tuple[ImageFolder, ImageFolder]:
    """List the pictures to learn from, and those to be judged by.

    Raises:
        OptionError: a folder is missing or empty, or the two parts have different classes.
    """
    if not data.is_dir():
        raise OptionError(_OPTION, f"no folder {data}", "one with train/CLASS/ and val/CLASS/")
    for part in ("train", "val"):
        if not (data / part).is_dir():
            raise OptionError(
                _OPTION, f"no folder {part} in {data}", "train/CLASS/ and val/CLASS/ with pictures"
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
                f"{len(folders)} {'class' if len(folders) == 1 else 'classes'} in {root}",
                "two or more, a folder each",
            )
        names = tuple(_pictures(root / folder) for folder in folders)
    except OSError as error:
        found = f"{error.filename} that cannot be read ({error.strerror})"
        raise OptionError(_OPTION, found, "readable folders") from None
    return ImageFolder(root, tuple(folders), names)


def _pictures(folder: Path) -> tuple[str, ...]:
    found: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=_fail):
        folders.sort()
        inside = os.path.relpath(parent, folder)
        found += (os.path.normpath(os.path.join(inside, name)) for name in _named(names))
    if not found:
        raise OptionError(_OPTION, f"no pictures in {folder}", f"files {', '.join(SUFFIXES)}")
    return tuple(sorted(found))


def _named(names: Sequence[str]) -> list[str]:
    return [n for n in names if n.lower().endswith(SUFFIXES) and n[0] != "."]


def _fail(error: OSError) -> None:
    raise error
