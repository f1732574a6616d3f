"""Pieced tensors against torch: the same functions, on boxes of a file and on tensors in memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shardwise.base.boxes import Box, narrow
from shardwise.checkpoint.formats.hf import HfSource
from shardwise.checkpoint.formats.source import ReadWindow
from shardwise.pretrained.pieced import Pieced

SHAPE = (4, 6, 8)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[HfSource]:
    file = tmp_path / "model.safetensors"
    save_file({str(at): torch.randn(SHAPE) for at in range(4)}, file)
    with HfSource(file) as opened:
        yield opened


def _boxes(shape: torch.Size) -> Iterator[Box]:
    """The full box, the rows of three ranks, and a box inside."""
    yield Box((0,) * len(shape), tuple(shape))
    rows = -(-shape[0] // 3)
    for first in range(0, shape[0], rows):
        sizes = (min(rows, shape[0] - first), *shape[1:])
        yield Box((first, *(0 for _ in shape[1:])), sizes)
    yield Box(tuple(size // 3 for size in shape), tuple(max(1, size // 2) for size in shape))


def _check(source: HfSource, found: Pieced, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    for box in _boxes(expected.shape):
        into = torch.full(box.sizes, float("nan"))
        found.read(source, ReadWindow(4096), box, into)
        assert torch.equal(into, narrow(expected, box))


def _inputs(source: HfSource) -> tuple[list[Any], list[Any]]:
    pieced = [Pieced.of(source, ("model", str(at))) for at in range(4)]
    full = []
    for at in range(4):
        tensor = torch.empty(SHAPE)
        source.read(("model", str(at)), Box((0, 0, 0), SHAPE), tensor)
        full.append(tensor)
    return pieced, full


CALLS = {
    "stack the experts of a layer": lambda t: torch.stack(t, dim=0),
    "stack inside": lambda t: torch.stack(t, dim=-1),
    "gate and up": lambda t: torch.cat([torch.stack(t[:2]), torch.stack(t[2:])], dim=1),
    "q, k and v": lambda t: torch.chunk(t[0], 3, dim=1)[1].contiguous(),
    "uneven": lambda t: torch.split(t[0], [1, 5], dim=1)[1],
    "steps": lambda t: torch.split(t[0], 4, dim=1)[1],
    "turned": lambda t: torch.transpose(torch.stack(t), 1, 2).contiguous(),
    "turned twice": lambda t: torch.cat(t, 2).transpose(0, 2).transpose(1, 2),
    "one row": lambda t: torch.chunk(t[1], 4, dim=0)[2].squeeze(0),
    "one column": lambda t: torch.stack(torch.unbind(t[1], 2)[3:5], 1),
    "a new dimension": lambda t: torch.unsqueeze(t[2], 1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_functions_are_those_of_torch(source: HfSource, call: Any) -> None:
    pieced, full = _inputs(source)
    _check(source, call(pieced), call(full))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_what_is_written_back_is_found_again(source: HfSource, call: Any) -> None:
    pieced, full = _inputs(source)
    made, changed = call(pieced), call(full) + 100
    written = [each.clone() for each in full]
    for at, tensor in enumerate(written):
        path = ("model", str(at))
        for box in _boxes(tensor.shape):
            into = narrow(full[at], box).clone()
            made.write(changed, path, box, into)
            narrow(tensor, box).copy_(into)
    assert torch.equal(call(written), changed)
    untouched = sum(int((a == b).sum()) for a, b in zip(written, full, strict=True))
    assert untouched == 4 * full[0].numel() - changed.numel()


def test_any_chain_of_functions_is_that_of_torch(source: HfSource) -> None:
    choose = random.Random(0)
    for _ in range(40):
        pieced, full = _inputs(source)
        for _ in range(4):
            ndim, kind = full[0].ndim, choose.randrange(4)
            a, b = choose.randrange(ndim), choose.randrange(ndim)
            if kind == 0 and ndim < 5:
                pieced, full = ([torch.stack(t[::-1], a) for _ in t] for t in (pieced, full))
            elif kind == 1 and full[0].numel() < 10_000:
                pieced, full = ([torch.cat(t, a) for _ in t] for t in (pieced, full))
            elif kind == 2:
                parts = max(1, full[0].shape[a] // 2)
                pieced, full = (
                    [torch.chunk(each, parts, a)[-1] for each in t] for t in (pieced, full)
                )
            else:
                pieced, full = ([torch.transpose(each, a, b) for each in t] for t in (pieced, full))
        _check(source, pieced[0], full[0])


def test_a_read_fetches_the_wanted_rows_alone(
    source: HfSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieced, _ = _inputs(source)
    fetched = []
    read = HfSource.read
    monkeypatch.setattr(
        HfSource, "read", lambda self, *args: (fetched.append(args[1].numel), read(self, *args))
    )
    stacked = torch.cat([torch.stack(pieced[:2]), torch.stack(pieced[2:])], dim=1)
    box = Box((1, 0, 0, 0), (1, 8, 6, 8))  # of expert 1
    stacked.read(source, ReadWindow(4096), box, torch.empty(box.sizes))
    assert sum(fetched) == 2 * torch.Size(SHAPE).numel()


def test_what_only_torch_can_do_is_refused(source: HfSource) -> None:
    pieced, _ = _inputs(source)
    for call in (lambda t: torch.flip(t, (0,)), lambda t: t.reshape(-1), lambda t: t + 1):
        with pytest.raises((TypeError, AttributeError)):
            call(pieced[0])
    with pytest.raises(ValueError, match="cannot join"):
        torch.cat([pieced[0], pieced[1].transpose(0, 1)], dim=2)
    with pytest.raises(ValueError, match="expected a sum of 6"):
        pieced[0].split([1, 2], dim=1)
