"""A convolutional net on small digits: sharded in any way, stopped, resumed, loaded elsewhere."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from shardwise.app.recipes.core.batches import Shuffled
from shardwise.app.recipes.core.build import average_running_statistics
from shardwise.app.recipes.vision.config import MnistConfig
from shardwise.app.recipes.vision.task import Batch, ImageData, Images, read_drawn, vision_task
from shardwise.elastic.world import World
from shardwise.frontends.strategies import Checkpointing
from shardwise.insight.schema.sharding import PrecisionName
from shardwise.insight.schema.training import Existing
from tests.recipes.digits import small_mnist, write_digits
from tests.recipes.running import as_after, run_from_guide, train
from tests.recipes.small import losses, validation
from tests.worlds import Ranks

accuracies = functools.partial(validation, what="accuracy")


def same_weights(found: MnistConfig, expected: MnistConfig) -> None:
    """Compare the files that two runs have written, bit for bit."""
    mine, other = load_file(found.files.weights), load_file(expected.files.weights)
    assert set(mine) == set(other)
    different = [name for name in mine if not torch.equal(mine[name], other[name])]
    assert not different, f"{found.train.output.out.name}: {different}"


def test_a_net_learns_and_its_file_alone_knows_as_much(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small_mnist(tmp_path, epochs=6)
    assert ranks(train, 2, config) == [["finished"]] * 2
    # 203 images per epoch, 32 per step: none is left out, and no step is smaller.
    assert [step for step, _ in accuracies(config)] == [7, 13, 20, 26, 32, 39]
    assert losses(config)[0][1] > 2
    accuracy = accuracies(config)[-1][1]
    assert accuracy > 0.9
    session = config.files.read()["sessions"][-1]
    assert session["accuracy"] == session["accuracy_of_file"] == accuracy
    assert config.files.confusion.read_bytes().startswith(b"\x89PNG")
    lines = capfd.readouterr().out.splitlines()
    told = dict(line.split(maxsplit=1) for line in lines)
    assert told["data"] == "MNIST: 203 images to train on, 45 for validation; 10 classes"
    assert told["step"] == "16 images x 2 ranks = 32 images; 6 epochs, 39 steps"
    steps = [line for line in lines if line.startswith("step=")]
    assert len(steps) == 39
    assert steps[-1].startswith("step=39 epoch=6.148 loss=")
    judged = [line.split()[1] for line in lines if line.startswith("evaluation")]
    assert judged == ["step=7", "step=13", "step=20", "step=26", "step=32", "step=39"]
    assert told["reloaded"].startswith("accuracy ")
    for name in ("model.safetensors", "confusion.png", "report.html"):
        assert any(line.endswith(f"run/{name}") for line in lines), name
    paths = {"runs/mnist": str(tmp_path / "run"), '"mnist/': f'"{tmp_path}/mnist/'}
    assert run_from_guide(0, paths)[0] == f"accuracy {accuracy:.4f}\n"


def test_blocks_that_are_recomputed_learn_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """Running statistics have counted every picture once."""
    recomputed = {"nested": True, "activation_checkpointing": Checkpointing.FULL, "steps": 3}
    bf16 = {"param_dtype": PrecisionName.BF16, "nested": True, "steps": 3}
    runs = {
        "plain": small_mnist(tmp_path, "plain", steps=3),
        "checkpointed": small_mnist(tmp_path, "checkpointed", **recomputed),
        "bf16": small_mnist(tmp_path, "bf16", **bf16),
        "bf16-checkpointed": small_mnist(tmp_path, "both", **{**bf16, **recomputed}),
    }
    ranks(train, 2, *runs.values())
    assert len(losses(runs["plain"])) == 3
    same_weights(runs["checkpointed"], runs["plain"])
    same_weights(runs["bf16-checkpointed"], runs["bf16"])
    assert losses(runs["bf16"]) != losses(runs["plain"])
    for found, expected in zip(losses(runs["bf16"]), losses(runs["plain"]), strict=True):
        assert found[1] == pytest.approx(expected[1], rel=0.1, abs=0.1)


class Dots(Images):
    """Ten images of one pixel, and how many were read at a time."""

    def __init__(self) -> None:
        self.read_at_a_time: list[int] = []

    def __len__(self) -> int:
        return 10

    def read(self, indices: Sequence[int], epochs: Sequence[int]) -> Batch:
        self.read_at_a_time.append(len(indices))
        return Batch(torch.tensor(indices).float().view(-1, 1), torch.tensor(indices) % 3)


def evaluate(rank: int, world_size: int, folder: Path) -> None:
    world, scores = World(rank, world_size, rank, world_size), []
    torch.manual_seed(0)
    model: Any = nn.Linear(1, 3)
    for size, expected in ((None, [5]), (2, [2, 2, 1]), (4, [4, 1])):
        config = dataclasses.replace(small_mnist(folder), eval_batch_size=size)
        dots = Dots()
        data = ImageData("dots", dots, dots, ["a", "b", "c"])
        place: Any = SimpleNamespace(world=world, device=torch.device("cpu"))
        program: Any = SimpleNamespace(
            model=model, make_optimizer=lambda: torch.optim.SGD(model.parameters())
        )
        task = vision_task(
            config.check(world),
            place,
            data,
            program=program,
            schedule=lambda step: 1.0,
            load=lambda file: model,
            loaded_into="itself",
        )
        evaluated = task.evaluate()
        assert dots.read_at_a_time == expected
        scores.append(evaluated)
    assert all(each == pytest.approx(scores[0]) for each in scores)


def test_evaluations_have_a_batch_size_of_their_own(threads: Ranks, tmp_path: Path) -> None:
    write_digits(tmp_path / "mnist")
    threads(evaluate, 2, tmp_path)


# -- running statistics ----------------------------------------------------------------------------


def average(rank: int, world_size: int) -> list[torch.Tensor]:
    """Running statistics after three steps on data of this rank's own; and rank 0's, of all."""
    norm, alone = nn.BatchNorm1d(5), [nn.BatchNorm1d(5) for _ in range(world_size)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        parts = [torch.randn(8, 5, generator=generator) + r for r in range(world_size)]
        norm(parts[rank])
        average_running_statistics(nn.Sequential(norm))
        for each, part in zip(alone, parts, strict=True):
            each(part)
    assert norm.running_mean is not None and norm.running_var is not None
    expected = [
        torch.stack([getattr(each, name) for each in alone]).mean(0)
        for name in ("running_mean", "running_var")
    ]
    torch.testing.assert_close([norm.running_mean, norm.running_var], expected)
    assert norm.num_batches_tracked == 3
    everyone = [torch.empty(10) for _ in range(world_size)]
    dist.all_gather(everyone, torch.cat([norm.running_mean, norm.running_var]))
    return everyone


def test_running_statistics_are_those_of_all_ranks_data_on_every_rank(ranks: Ranks) -> None:
    for first, *others in ranks(average, 3):
        assert all(torch.equal(first, other) for other in others)


# -- resuming --------------------------------------------------------------------------------------


def test_a_run_goes_on_within_an_epoch_as_if_nothing_had_been(ranks: Ranks, tmp_path: Path) -> None:
    whole = small_mnist(tmp_path, "whole", epochs=2, checkpoint_every=10)
    ranks(train, 2, whole)
    rest = small_mnist(tmp_path, "rest", epochs=2, existing=Existing.RESUME)
    as_after(10, whole, rest)  # of 13 steps; the second epoch begins in step 7
    rest.files.weights.unlink()
    ranks(train, 2, rest)
    assert [session["from_step"] for session in rest.files.read()["sessions"]] == [0, 10]
    assert losses(rest) == losses(whole)
    assert accuracies(rest) == accuracies(whole)
    same_weights(rest, whole)


# -- the order of images ---------------------------------------------------------------------------


class Numbers:
    """Images that are their own indices."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, indices: Any, keys: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(indices), torch.tensor([key % 2**62 for key in keys])


def taken(world_size: int, size: int, steps: int, seed: int = 0) -> list[tuple[int, int]]:
    """Images with their keys in the order in which a world takes them, a step after another."""
    ranks = [
        Shuffled(50, seed, functools.partial(read_drawn, Numbers(50)))  # type: ignore[arg-type]
        for _ in range(world_size)
    ]
    found: list[tuple[int, int]] = []
    for step in range(steps):
        for rank, pictures in enumerate(ranks):
            indices, keys = pictures.batch((step * world_size + rank) * size, size)
            found += zip(indices.tolist(), keys.tolist(), strict=True)
    return found


def test_ranks_share_out_an_epoch_whatever_their_number() -> None:
    alone = taken(1, 12, 10)
    assert taken(3, 4, 10) == taken(2, 6, 10) == alone
    epochs = [alone[:50], alone[50:100]]
    for epoch in epochs:
        assert sorted(index for index, _ in epoch) == list(range(50)), "each once"
    assert [i for i, _ in epochs[0]] != [i for i, _ in epochs[1]], "in another order"
    assert len({key for _, key in alone}) == len(alone), "and every time done to as by chance"
    assert taken(1, 12, 10, seed=1) != alone
