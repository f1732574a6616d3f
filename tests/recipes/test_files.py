"""Folders of images: what counts as an image, which class it has, and what changes the data."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from shardwise.recipes.core.config import OptionError
from shardwise.recipes.vision.files import SUFFIXES, IdxSet, ImageFolder, Lookup, find_images


def folder_of(root: Path, **classes: list[str]) -> ImageFolder:
    return ImageFolder(root, tuple(classes), tuple(tuple(names) for names in classes.values()))


def touch(root: Path, *names: str) -> Path:
    """Empty files: nothing opens an image before it is needed."""
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return root


def test_an_index_leads_to_a_file_and_its_class_where_classes_differ_in_size(
    tmp_path: Path,
) -> None:
    folder = folder_of(tmp_path, cat=["a.png"], dog=["b.png", "c.png", "d.png"], owl=["e.png"])
    assert folder.ends() == [1, 4, 5]
    assert len(folder) == 5
    found = [Lookup(folder).at(index) for index in range(5)]
    assert [path.relative_to(tmp_path).as_posix() for path, _ in found] == [
        "cat/a.png",
        "dog/b.png",
        "dog/c.png",
        "dog/d.png",
        "owl/e.png",
    ]
    assert [number for _, number in found] == [0, 1, 1, 1, 2]


def test_an_index_behind_the_last_image_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        Lookup(folder_of(tmp_path, cat=["a.png"], dog=["b.png"])).at(2)


def test_images_are_those_with_a_suffix_of_images_at_any_depth(tmp_path: Path) -> None:
    images = [f"{index}{suffix}" for index, suffix in enumerate(SUFFIXES)]
    touch(
        tmp_path / "train" / "cat",
        *images,
        "LOUD.JPG",
        "young/kitten.png",
        "notes.txt",
        "noend",
        ".hidden.png",
    )
    touch(tmp_path, "train/dog/a.png", "val/cat/a.png", "val/dog/a.png")
    touch(tmp_path, "train/.cache/a.png", "train/README.png")
    training, _ = find_images(tmp_path)
    assert training.classes == ("cat", "dog"), "neither hidden folders nor files are classes"
    assert training.names[0] == tuple(sorted([*images, "LOUD.JPG", "young/kitten.png"]))


def test_the_order_is_that_of_names_and_not_that_of_the_disk(tmp_path: Path) -> None:
    """Hosts with copies of their own have to agree which image has which index."""
    files = [f"{part}/{name}/{i}.png" for part in ("train", "val") for name in "ba" for i in "201"]
    touch(tmp_path / "one", *files)
    touch(tmp_path / "two", *reversed(files))
    one, two = (find_images(tmp_path / each)[0] for each in ("one", "two"))
    assert one.classes == two.classes == ("a", "b")
    assert one.names == two.names == (("0.png", "1.png", "2.png"),) * 2
    assert one.fingerprint() == two.fingerprint(), "where the data are does not matter"


def test_a_fingerprint_changes_with_every_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, cat=["a.png", "b.png"], dog=["c.png"])
    others = [
        folder_of(tmp_path, cat=["a.png", "b.png"], cow=["c.png"]),
        folder_of(tmp_path, cat=["a.png", "b.png"], dog=["d.png"]),
        folder_of(tmp_path, cat=["a.png"], dog=["b.png", "c.png"]),
        folder_of(tmp_path, cat=["ab.png", "a.png"], dog=["c.png"]),
        folder_of(tmp_path, dog=["c.png"], cat=["a.png", "b.png"]),
    ]
    assert len({each.fingerprint() for each in (folder, *others)}) == 6


def test_a_name_that_is_not_utf8_has_a_fingerprint_too(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    assert (
        folder_of(tmp_path, cat=[name]).fingerprint()
        != folder_of(tmp_path, cat=["cafe.png"]).fingerprint()
    )


@pytest.mark.parametrize(
    ("names", "message"), [([], "found 0 classes in"), (["cat/a.png"], "found 1 class in")]
)
def test_one_class_is_nothing_to_tell_apart(tmp_path: Path, names: list[str], message: str) -> None:
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
        touch(tmp_path / part, *names)
    with pytest.raises(OptionError, match=f"--data-dir: {message} .*, expected two or more"):
        find_images(tmp_path)


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, *(f"{part}/{name}/a.png" for part in ("train", "val") for name in "ab"))
    scan = os.scandir

    def refuse(path: str | Path) -> object:
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(OptionError, match=r"train/b that cannot be read \(Permission denied\)"):
        find_images(tmp_path)


def test_a_fingerprint_of_digits_changes_with_images_and_labels() -> None:
    digits = IdxSet(bytes(28 * 28), bytes([7]))
    assert len(digits) == 1
    brighter = dataclasses.replace(digits, images=bytes([1]) + digits.images[1:])
    renamed = dataclasses.replace(digits, labels=bytes([1]))
    assert len({each.fingerprint() for each in (digits, brighter, renamed)}) == 3
