"""The picture of a confusion matrix: what it shows, and how the file is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shardwise.app.recipes.vision.task import BLUE, RED, WHITE, plot_confusion


def _colors(path: Path) -> set[Any]:
    with Image.open(path) as image:
        return {color for _, color in image.getcolors(2**20) or ()}


def test_shades_are_by_row_and_mistakes_have_a_color_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "confusion.png"
    plot_confusion([[990, 10], [0, 0]], ["cat", "dog"], "test set", path)
    shade = (10 / 1000) ** 0.5
    assert {RED, WHITE, tuple(round(255 + shade * (each - 255)) for each in BLUE)} < _colors(path)
    plot_confusion([[10_000, 0], [0, 4]], ["cat", "dog"], "test set", path)
    assert BLUE in _colors(path), "a class that is always right, however rare"
    assert RED not in _colors(path)


def test_names_and_numbers_of_many_classes_are_left_out(tmp_path: Path) -> None:
    for classes, has_numbers in ((20, True), (21, False)):
        counts = [[10 * (i == j) + 1 for j in range(classes)] for i in range(classes)]
        path = tmp_path / f"{classes}.png"
        plot_confusion(counts, [f"class {i}" for i in range(classes)], "title", path)
        assert (RED in _colors(path)) == has_numbers


def test_a_picture_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "confusion.png"
    path.write_bytes(b"the chart before")

    def fail(image: Image.Image, file: Path, **settings: Any) -> None:
        file.write_bytes(b"half a chart")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", fail)
        with pytest.raises(OSError, match="No space left"):
            plot_confusion([[1]], ["a"], "title", path)
    assert path.read_bytes() == b"the chart before"
    plot_confusion([[1]], ["a"], "title", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["confusion.png"]
