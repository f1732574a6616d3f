"""Faults that other runtimes have had, in small: each is reported, and its repair is not."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.streams.device import NAME, Device, Stream, modeled
from tests.streams.process_group import world

NUMEL = 1024


class Version(enum.Enum):
    """Which version of a program runs."""

    FAULTY = "faulty"
    MENDED = "mended"


def _tensor(numel: int = NUMEL) -> torch.Tensor:
    return torch.zeros(numel, device=NAME)


def _scatter(full: torch.Tensor) -> torch.Tensor:
    """Reduce-scatter on the current stream."""
    out = torch.empty(full.numel() // 2, device=NAME)
    dist.reduce_scatter_single(out, full)
    return out


def output_freed_while_copied(device: Device, version: Version) -> None:
    """A reduce-scatter output that is freed on one stream while another copies it to the host."""
    reduces, copies = Stream(name="reduce"), Stream(name="copy")
    full = _tensor()
    reduces.wait_stream(device.compute)
    for _ in range(2):
        with reduces:
            shard = _scatter(full)
        copies.wait_stream(reduces)
        with copies:
            host = torch.empty(shard.numel(), pin_memory=True)
            host.copy_(shard, non_blocking=True)
        if version is Version.MENDED:
            reduces.wait_stream(copies)  # before it allocates again
        del shard
    copies.synchronize()


def gather_buffer_handed_out(device: Device, version: Version) -> None:
    """A gather buffer that is handed out again while the other stream still reads it."""
    gathers = Stream(name="gather")
    shard = _tensor(NUMEL // 2)
    gathers.wait_stream(device.compute)
    for _ in range(2):
        if version is Version.MENDED:
            gathers.wait_stream(device.compute)
        with gathers:
            buffer = torch.empty(NUMEL, device=NAME)
            dist.all_gather_single(buffer, shard)
        device.compute.wait_stream(gathers)
        buffer.mul(2)
        del buffer


def gradient_on_wrong_stream(device: Device, version: Version) -> None:
    """A gradient that is allocated on the stream that reduces, and used on the one that computes.

    Its memory goes back to the stream that reduces, which does not know when it is free.
    """
    reduces = Stream(name="reduce")
    for _ in range(2):
        if version is Version.MENDED:
            grad = torch.empty(NUMEL, device=NAME)
        else:
            with reduces:
                grad = torch.empty(NUMEL, device=NAME)
        grad.fill_(1)
        grad.mul(2)
        del grad


def default_stream_after_backward(device: Device, version: Version) -> None:
    """A reduction that waits for the default stream, while autograd runs on forward's."""
    forward, reduces = Stream(name="forward"), Stream(name="reduce")
    weight = _tensor().requires_grad_()

    def reduce(parameter: torch.Tensor) -> None:
        reduces.wait_stream(device.current if version is Version.MENDED else device.compute)
        assert parameter.grad is not None
        with reduces:
            _scatter(parameter.grad)
        device.current.wait_stream(reduces)

    weight.register_post_accumulate_grad_hook(reduce)  # type: ignore[no-untyped-call]
    forward.wait_stream(device.compute)
    with forward:
        loss = (weight * 2).sum()
    device.compute.wait_stream(forward)
    loss.backward()  # type: ignore[no-untyped-call]


FAULTS: dict[str, tuple[Callable[..., None], str]] = {
    fault.__name__: (fault, message)
    for fault, message in (
        (output_freed_while_copied, "is given the freed memory on reduce"),
        (gather_buffer_handed_out, "is given the freed memory on gather"),
        (gradient_on_wrong_stream, "is given the freed memory on reduce"),
        (default_stream_after_backward, "reduce-scatter reads on reduce"),
    )
}


def _races(rank: int, world_size: int, name: str, version: Version) -> list[str]:
    with world((2,)), modeled(Device()) as device:
        FAULTS[name][0](device, version)
        return [str(race) for race in device.races]


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_known_fault_is_reported(ranks: Callable[..., list[Any]], name: str) -> None:
    [races] = ranks(_races, 1, name, Version.FAULTY, backend=None)
    assert any(FAULTS[name][1] in race for race in races), races
    assert all("test_known_faults.py:" in race for race in races)


@pytest.mark.parametrize("name", list(FAULTS))
def test_its_repair_is_not(ranks: Callable[..., list[Any]], name: str) -> None:
    [races] = ranks(_races, 1, name, Version.MENDED, backend=None)
    assert not races
