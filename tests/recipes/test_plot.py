"""The charts of a run: what they show, and how the file is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shardwise.recipes.core import plot
from shardwise.recipes.core.plot import BLUE, RED, plot_confusion, plot_loss, smooth


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would have been saved: drawing text into a PNG takes most of the time."""
    figures: list[Figure] = []
    monkeypatch.setattr(plot, "_save", lambda figure, path: figures.append(figure))
    return figures


def axes(figures: list[Figure]) -> Axes:
    """The axes of the only figure."""
    (figure,) = figures
    (found,) = figure.axes
    return found


def texts(found: Axes) -> dict[tuple[float, float], tuple[str, Any]]:
    """The text in each cell, and its color."""
    return {text.get_position(): (text.get_text(), text.get_color()) for text in found.texts}


# -- the loss curve --------------------------------------------------------------------------------


def test_each_kind_of_record_is_a_line_of_its_own(drawn: list[Figure], tmp_path: Path) -> None:
    records = [
        {"step": 1, "loss": 4.0},
        {"step": 1, "validation_loss": 3.5},
        {"step": 2, "loss": 2.0},
        {"step": 2, "validation_loss": 1.25},
    ]
    plot_loss(records, "llama-tiny", "nats per token", tmp_path / "loss.png")
    found = axes(drawn)
    lines = {str(line.get_label()): line.get_xydata().tolist() for line in found.lines}
    assert lines["training, every step"] == [[1, 4.0], [2, 2.0]]
    assert lines["training, smoothed"] == [[1, 4.0], [2, 3.0]]
    assert lines["validation"] == [[1, 3.5], [2, 1.25]]
    assert found.get_title(loc="left") == "llama-tiny"
    assert found.get_ylabel() == "loss (nats per token)"
    assert [text.get_text() for text in found.texts] == ["1.25"], "the newest validation loss"


def test_a_loss_that_was_not_finite_leaves_a_gap(drawn: list[Figure], tmp_path: Path) -> None:
    """``metrics.jsonl`` has null where the loss was NaN or infinite."""
    records = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 3.0}]
    plot_loss(records, "title", "nats", tmp_path / "loss.png")
    assert axes(drawn).lines[0].get_xdata().tolist() == [1, 3]


def test_a_chart_without_lines_has_no_legend(drawn: list[Figure], tmp_path: Path) -> None:
    plot_loss([{"step": 1, "accuracy": 0.5}], "title", "nats", tmp_path / "loss.png")
    assert axes(drawn).get_legend() is None
    assert not axes(drawn).lines


@pytest.mark.parametrize("reach", [0, 1, 3])
def test_a_smoothed_value_is_a_mean_of_as_many_neighbors_on_both_sides(reach: int) -> None:
    values = [9.0, 3.0, 0.0, 6.0, 12.0, 3.0, 0.0, 3.0]
    smoothed = smooth(values, reach)
    assert len(smoothed) == len(values)
    assert smoothed[0] == values[0]
    for index in range(reach, len(values) - reach):
        window = values[index - reach : index + reach + 1]
        assert smoothed[index] == pytest.approx(sum(window) / (2 * reach + 1))


# -- the confusion matrix --------------------------------------------------------------------------


def test_a_confusion_matrix_shows_counts_and_tells_mistakes_by_color(
    drawn: list[Figure], tmp_path: Path
) -> None:
    counts = [[990, 10, 0], [0, 1, 9], [0, 0, 0]]
    plot_confusion(counts, ["cat", "dog", "owl"], "test set", tmp_path / "confusion.png")
    found = axes(drawn)
    assert found.get_title(loc="left") == "test set: 991 of 1,010 correct"
    assert texts(found) == {
        (0, 0): ("990", "white"),  # on dark ground
        (1, 0): ("10", RED),
        (1, 1): ("1", BLUE),
        (2, 1): ("9", "white"),
    }, "a column for each predicted class, and nothing where the count is 0"
    assert [label.get_text() for label in found.get_xticklabels()] == ["cat", "dog", "owl"]
    assert [label.get_rotation() for label in found.get_xticklabels()] == [0, 0, 0]


def test_shades_are_by_row_so_that_rare_classes_are_legible(
    drawn: list[Figure], tmp_path: Path
) -> None:
    plot_confusion([[10_000, 0], [1, 3]], ["0", "1"], "title", tmp_path / "confusion.png")
    shades = axes(drawn).images[0].get_array()
    assert shades is not None
    assert shades.tolist() == [[1.0, 0.0], [0.5, pytest.approx(0.75**0.5)]]


def test_names_of_many_classes_are_left_out(drawn: list[Figure], tmp_path: Path) -> None:
    few, many = 20, 21
    for classes in (few, many):
        counts = [[int(i == j) for j in range(classes)] for i in range(classes)]
        names = [f"class {i}" for i in range(classes)]
        plot_confusion(counts, names, "title", tmp_path / "confusion.png")
    small, large = (figure.axes[0] for figure in drawn)
    assert len(small.texts) == few
    assert {label.get_rotation() for label in small.get_xticklabels()} == {90.0}, "long names"
    assert not large.texts
    assert "class 0" not in {label.get_text() for label in large.get_xticklabels()}


def test_a_chart_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "confusion.png"
    path.write_bytes(b"the chart before")

    def fail(figure: Figure, file: Path, **settings: Any) -> None:
        file.write_bytes(b"half a chart")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", fail)
        with pytest.raises(OSError, match="No space left"):
            plot_confusion([[1]], ["a"], "title", path)
    assert path.read_bytes() == b"the chart before"
    plot_confusion([[1]], ["a"], "title", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["confusion.png"]
