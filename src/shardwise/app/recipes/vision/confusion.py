"""The confusion matrix of a classifier, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

BLUE, RED, WHITE = (31, 95, 168), (192, 57, 43), (255, 255, 255)
#: More classes than this are shown without names and numbers, which would be unreadable.
_FEW = 20
_LONGEST = 24  # letters of a name


def plot_confusion(
    counts: Sequence[Sequence[int]], classes: Sequence[str], title: str, path: Path
) -> None:
    """Draw a confusion matrix into a PNG.

    Args:
        counts: number of images by class (row) and predicted class (column).
        classes: their names.
        title: above the chart.
        path: the file; replaced once the new one is complete.
    """
    few = len(classes) <= _FEW
    cell = 48 if few else max(1, 960 // len(classes))
    font = ImageFont.load_default(14)
    shown = [name[:_LONGEST] for name in classes]
    left = 24 + int(max(map(font.getlength, shown))) if few else 24
    names = left if few else 24  # those of columns stand upright, above them
    top, size = 40 + names, cell * len(classes)
    image = Image.new("RGB", (max(left + size, 480) + 24, top + size + 40), WHITE)
    draw = ImageDraw.Draw(image)
    total, right = sum(map(sum, counts)), sum(row[i] for i, row in enumerate(counts))
    draw.text((12, 12), f"{title}: {right:,} of {total:,} correct", "black", font)
    draw.text((left, top + size + 12), "row: class; column: predicted class", "black", font)
    for i, (name, row) in enumerate(zip(shown, counts, strict=True)):
        if few:
            draw.text((12, top + (i + 0.5) * cell), name, "black", font, "lm")
            upright = Image.new("RGB", (names, 18), WHITE)
            ImageDraw.Draw(upright).text((0, 9), name, "black", font, "lm")
            turned = upright.rotate(90, expand=True)
            image.paste(turned, (left + int((i + 0.5) * cell) - 9, top - names - 4))
        for j, n in enumerate(row):
            # By row, so that a rare class is as legible as a frequent one. Mistakes are few: the
            # root makes them visible beside what is right.
            shade = (n / max(1, sum(row))) ** 0.5
            color = tuple(round(255 + shade * (each - 255)) for each in BLUE)
            x, y = left + j * cell, top + i * cell
            draw.rectangle((x, y, x + cell - 1, y + cell - 1), color)
            if few and n:
                ink = WHITE if shade > 0.45 else BLUE if i == j else RED
                draw.text((x + cell / 2, y + cell / 2), f"{n}", ink, font, "mm")
    temporary = path.with_name(f".{path.name}")
    image.save(temporary, format="png")
    temporary.replace(path)
