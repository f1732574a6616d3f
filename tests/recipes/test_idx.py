"""MNIST's files, whole and damaged."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from shardwise.recipes.core.config import OptionError
from shardwise.recipes.vision.files import load_mnist
from tests.recipes.digits import idx, write_digits


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
