"""A residual net on small images in folders: sharded in any way, stopped, resumed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from shardwise.app.recipes.vision.files import find_images
from shardwise.app.recipes.vision.task import Augment, FolderImages, center_box, random_box
from shardwise.base.errors import UserError
from shardwise.frontends.strategies import Checkpointing, Strategy
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.sharding import PrecisionName
from shardwise.insight.schema.training import Existing
from shardwise.runs.metrics_file import read_metrics
from tests.recipes.running import run_from_guide, train
from tests.recipes.small import losses
from tests.recipes.snapshots import small_imagenet, write_snapshots
from tests.worlds import Ranks


@pytest.mark.long
def test_a_net_learns_however_it_is_sharded(ranks: Ranks, tmp_path: Path) -> None:
    plain = small_imagenet(tmp_path, "plain", epochs=3)
    variants: dict[str, dict[str, Any]] = {
        "grad-op": {"strategy": Strategy.SHARD_GRAD_OP},
        "checkpointed": {"activation_checkpointing": Checkpointing.FULL},
    }
    same = [small_imagenet(tmp_path, name, epochs=3, steps=6, **v) for name, v in variants.items()]
    bf16 = small_imagenet(
        tmp_path,
        "bf16",
        epochs=3,
        param_dtype=PrecisionName.BF16,
        activation_checkpointing=Checkpointing.FULL,
    )
    fake = small_imagenet(tmp_path, "fake", data_dir=None, fake_data=True, steps=2)
    # A run that ends within an epoch, and goes on.
    part = small_imagenet(tmp_path, "part", epochs=3, steps=7)
    rest = small_imagenet(tmp_path, "part", epochs=3, existing=Existing.RESUME)
    runs = (plain, *same, bf16, fake, part, rest)
    assert ranks(train, 2, *runs) == [["finished"] * len(runs)] * 2

    # 78 images per epoch, 16 per step.
    assert [step for step, *_ in losses(plain)] == list(range(1, 16))
    session = plain.files.read()["sessions"][-1]
    assert session["accuracy"] == session["accuracy_of_file"] > 0.9
    judged = [r["step"] for r in read_metrics(plain.files.metrics) if "accuracy" in r]
    assert judged == [5, 10, 15]
    weights = load_file(plain.files.weights)
    for config in same:
        assert losses(config) == losses(plain)[:6], config.train.output.out.name
    assert losses(rest) == losses(plain)
    found = load_file(rest.files.weights)
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    _, names = run_from_guide(1, {"runs/imagenet": str(plain.train.output.out)})
    loaded = names["model"].state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in loaded)
    assert losses(bf16) != losses(plain)
    assert bf16.files.read()["sessions"][-1]["accuracy"] > 0.9
    assert [step for step, *_ in losses(fake)] == [1, 2]
    assert "accuracy_top5" in fake.files.read()["sessions"][-1]


def test_the_learning_rate_rises_and_drops() -> None:
    config = small_imagenet(Path(), data_dir=Path(), lr=0.4, warmup_epochs=5.0)
    assert [config.lr(epoch) for epoch in (1, 2.5, 5, 29.9)] == [0.08, 0.2, 0.4, 0.4]
    assert [config.lr(epoch) for epoch in (30, 60, 99)] == pytest.approx([0.04, 0.004, 0.0004])


# -- folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("", "found no folder .*, expected one with train/CLASS/ and val/CLASS/"),
        ("val", "found no folder val in .*, expected train/CLASS/ and val/CLASS/ with images"),
        ("val/sea", "found class sea in only one of train and val, expected the same in both"),
        ("train/rust/*", "found no images in .*/train/rust, expected files .jpg, .jpeg, .png"),
    ],
)
def test_what_is_laid_out_otherwise_is_named(tmp_path: Path, lacking: str, message: str) -> None:
    import shutil

    data = write_snapshots(tmp_path / "data", training=1, validation=1)
    for path in data.parent.glob(f"data/{lacking}") if lacking else [data]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    with pytest.raises(OptionError, match=f"--data-dir: {message}"):
        find_images(data)


# -- images ----------------------------------------------------------------------------------------


def test_images_are_read_when_needed_and_cropped_by_their_key(tmp_path: Path) -> None:
    folder, _ = find_images(write_snapshots(tmp_path, training=2, validation=1))
    folder_images = FolderImages(folder, 32, Augment.RANDOM_CROP, threads=2)
    images, classes = folder_images.read([5, 0, 0, 0], [1, 1, 1, 2])
    assert (images.shape, images.dtype) == ((4, 3, 32, 32), torch.float32)
    assert classes.tolist() == [2, 0, 0, 0]
    assert torch.equal(images[1], images[2])
    assert not torch.equal(images[1], images[3])
    held = [v for v in vars(folder_images).values() if isinstance(v, torch.Tensor | list | dict)]
    assert not held, "a picture was kept"

    judged = FolderImages(folder, 32, Augment.CENTER_CROP, threads=2)
    same, _ = judged.read([0, 0], [1, 2])
    assert torch.equal(same[0], same[1])


def test_pixels_are_normalized_by_imagenets_mean_and_deviation(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for name in ("black", "white"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("L", (50, 40), 255 * (name == "white")).save(tmp_path / part / name / "a.png")
    folder, _ = find_images(tmp_path)
    images, _ = FolderImages(folder, 32, Augment.CENTER_CROP, threads=1).read([0, 1], [0, 0])
    black, white = images[:, :, 16, 16].tolist()
    assert black == pytest.approx([-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225])
    assert white == pytest.approx([0.515 / 0.229, 0.544 / 0.224, 0.594 / 0.225])


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    folder, _ = find_images(write_snapshots(tmp_path, training=2, validation=1))
    file = tmp_path / "train" / "grass" / "0.JPEG"
    for content in (b"no picture", file.read_bytes()[:400]):
        file.write_bytes(content)
        with pytest.raises(UserError, match=f"--data-dir: {file} cannot be read as an image: "):
            FolderImages(folder, 32, Augment.CENTER_CROP, threads=1).read([0], [0])


def test_random_cuts_lie_inside_and_vary_in_area_and_shape() -> None:
    draw = random.Random(0)
    boxes = [random_box(100, 80, draw) for _ in range(500)]
    assert all(0 <= l < r <= 100 and 0 <= u < d <= 80 for l, u, r, d in boxes)  # noqa: E741
    areas = [(r - left) * (d - u) / 8000 for left, u, r, d in boxes]
    assert min(areas) < 0.15 and max(areas) > 0.85
    shapes = [(r - left) / (d - u) for left, u, r, d in boxes]
    assert min(shapes) > 0.7 and max(shapes) < 1.43
    assert random_box(1000, 10, draw) == pytest.approx((493.33, 0, 506.67, 10), abs=0.01)
    assert center_box(256, 512) == (16, 144, 240, 368)
