"""Images on disk: folders of classes, and the files of MNIST, whole and damaged."""

from __future__ import annotations

import dataclasses
import gzip
import os
import re
from pathlib import Path

import pytest

from shardwise.app.recipes.vision.files import (
    SUFFIXES,
    IdxSet,
    ImageFolder,
    find_images,
    load_mnist,
)
from shardwise.insight.schema.option import OptionError
from tests.recipes.digits import idx, write_digits


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
    assert folder.ends == [1, 4, 5]
    assert len(folder) == 5
    found = [folder.at(index) for index in range(5)]
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
        folder_of(tmp_path, cat=["a.png"], dog=["b.png"]).at(2)


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


def test_files_are_read_whether_gzipped_or_not(tmp_path: Path) -> None:
    training, test = load_mnist(write_digits(tmp_path / "a", training=5, test=3))
    assert (len(training), len(test)) == (5, 3)
    assert len(training.images) == 5 * 28 * 28
    again = write_digits(tmp_path / "b", training=5, test=3)
    for file in list(again.glob("*ubyte")):
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    for file in list(again.glob("t10k*.gz")):
        plain = file.name.replace("-idx", ".idx").removesuffix(".gz")  # as some tools unpack them
        file.with_name(plain).write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()
    assert load_mnist(again) == (training, test)
    assert load_mnist(again)[0].fingerprint() == training.fingerprint() != test.fingerprint()


LABELS, IMAGES = "train-labels-idx1-ubyte", "train-images-idx3-ubyte"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (LABELS, None, f"no {LABELS} or {LABELS}.gz in "),
        (LABELS, b"", f"{LABELS} that begins with nothing, expected 00 00 08 01"),
        (LABELS, b"<html>", f"{LABELS} that begins with 3c 68 74 6d, expected 00 00 08 01"),
        (LABELS, idx([5, 1, 1], bytes(5)), f"{LABELS} that begins with 00 00 08 03, expected"),
        (LABELS, idx([5], bytes(5))[:6], f"{LABELS}, which ends in its header"),
        (LABELS, idx([5], bytes(4)), f"{LABELS} with fewer values than its header says"),
        (LABELS, idx([5], bytes(6)), f"{LABELS} with more values than its header says"),
        (LABELS, idx([2**32 - 1], bytes(6)), f"{LABELS} with fewer values than its header says"),
        (LABELS, idx([4], bytes(4)), f"5 images in {IMAGES} and 4 labels in {LABELS}"),
        (LABELS, idx([5], bytes([1, 2, 3, 10, 4])), f"label 10 in .*{LABELS}, expected 0 to 9"),
        (IMAGES, idx([5, 20, 20], bytes(2000)), f"{IMAGES} with images of 20 x 20, expected 28"),
    ],
)
def test_what_is_no_mnist_is_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    folder = write_digits(tmp_path / "mnist", training=5, test=3)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(OptionError) as caught:
        load_mnist(folder)
    assert re.match(f"--data-dir: found .*{message}", str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["cut short", "changed", "no gzip"])
def test_damaged_gzip_files_are_named(tmp_path: Path, damage: str) -> None:
    folder = write_digits(tmp_path / "mnist", training=5, test=30)
    file = folder / "t10k-images-idx3-ubyte.gz"
    data = bytearray(file.read_bytes())
    match damage:
        case "cut short":
            data = data[: len(data) // 2]
        case "changed":
            data[len(data) // 2] ^= 255
        case "no gzip":
            data = bytearray(gzip.decompress(data))
    file.write_bytes(data)
    with pytest.raises(OptionError, match=f"found .*{file.name} that cannot be read"):
        load_mnist(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--data-dir: found no folder .*nowhere, expected one"):
        load_mnist(tmp_path / "nowhere")
