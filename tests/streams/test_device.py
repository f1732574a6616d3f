"""The model of a device: what it reports, and what it does not."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from tests.streams.clocks import Clock
from tests.streams.device import NAME, Device, Event, Pageable, Stream, modeled
from tests.streams.process_group import world
from tests.worlds import Ranks

NUMEL = 1024
PROGRAMS: dict[str, tuple[Callable[[Device], None], str]] = {}


def program(report: str = "") -> Callable[[Callable[[Device], None]], Callable[[Device], None]]:
    """List a program, with a part of the report that it causes; by default there is none."""

    def listed(function: Callable[[Device], None]) -> Callable[[Device], None]:
        PROGRAMS[function.__name__] = function, report
        return function

    return listed


def ones(numel: int = NUMEL) -> torch.Tensor:
    return torch.ones(numel, device=NAME)


# -- streams and events -------------------------------------------------------------------------


@program("reads on side")
def read_on_another_stream(device: Device) -> None:
    x = ones()
    with Stream(name="side"):
        x.sum()


@program("writes on side")
def write_on_another_stream(device: Device) -> None:
    x = ones()
    with Stream(name="side"):
        x.zero_()


@program("writes on compute")
def write_to_what_another_stream_reads(device: Device) -> None:
    x, side = ones(), Stream(name="side")
    side.wait_stream(device.compute)
    with side:
        x.sum()
    x.zero_()


@program()
def two_streams_read(device: Device) -> None:
    x, side = ones(), Stream(name="side")
    side.wait_stream(device.compute)
    with side:
        x.sum()
    x.sum()


@program()
def an_event_orders(device: Device) -> None:
    x, side = ones(), Stream(name="side")
    side.wait_event(device.compute.record_event())
    with side:
        x.zero_()


@program("reads on side")
def an_event_that_was_recorded_too_early(device: Device) -> None:
    event, side = Event(), Stream(name="side")
    x = ones()
    event.record()
    x.zero_()
    event.wait(side)
    with side:
        x.sum()


@program("reads on side")
def an_event_that_was_never_recorded(device: Device) -> None:
    x, side = ones(), Stream(name="side")
    side.wait_event(Event())
    with side:
        x.sum()


@program()
def ordered_by_the_host(device: Device) -> None:
    x = ones()
    torch.accelerator.synchronize()
    with Stream():
        x.zero_()


@program()
def ordered_through_a_third(device: Device) -> None:
    x, second, third = ones(), Stream(), Stream()
    second.wait_stream(device.compute)
    third.wait_stream(second)
    with third:
        x.zero_()


# -- the caching allocator ----------------------------------------------------------------------


def _freed_while_read(device: Device, side: Stream) -> torch.Tensor:
    x = ones()
    side.wait_stream(device.compute)
    with side:
        x.sum()
    return x


@program("is given the freed memory on compute")
def freed_while_another_stream_reads(device: Device) -> None:
    x = _freed_while_read(device, Stream(name="side"))
    del x
    ones()


@program()
def freed_after_waiting(device: Device) -> None:
    side = Stream(name="side")
    x = _freed_while_read(device, side)
    del x
    device.compute.wait_stream(side)
    ones()


@program()
def freed_after_record_stream(device: Device) -> None:
    side = Stream(name="side")
    x = _freed_while_read(device, side)
    x.record_stream(side)  # type: ignore[arg-type]
    del x
    ones()


@program()
def freed_on_the_stream_that_used_it(device: Device) -> None:
    x = ones()
    x.sum()
    del x
    ones()


@program("none: its storage has been freed")
def read_after_resizing_to_zero(device: Device) -> None:
    x = ones()
    x.untyped_storage().resize_(0)
    x.sum()


@program("is given the freed memory on compute")
def resized_while_another_stream_reads(device: Device) -> None:
    x = _freed_while_read(device, Stream(name="side"))
    storage = x.untyped_storage()
    nbytes = storage.size()
    storage.resize_(0)
    storage.resize_(nbytes)


# -- the host -----------------------------------------------------------------------------------


@program("reads on host")
def pinned_copy_read_at_once(device: Device) -> None:
    host = torch.empty(1024, pin_memory=True)
    host.copy_(ones(), non_blocking=True)
    host.sum()


@program()
def pinned_copy_read_after_waiting(device: Device) -> None:
    host = torch.empty(1024, pin_memory=True)
    host.copy_(ones(), non_blocking=True)
    device.compute.record_event().synchronize()
    host.sum()


@program()
def blocking_copy(device: Device) -> None:
    host = torch.empty(1024, pin_memory=True)
    host.copy_(ones())
    host.sum()


@program()
def pageable_copy(device: Device) -> None:
    host = torch.empty(1024)
    host.copy_(ones(), non_blocking=True)
    host.sum()


@program("reads on host")
def pageable_copy_where_nobody_waits(device: Device) -> None:
    device.pageable = Pageable.RETURNS
    host = torch.empty(1024)
    host.copy_(ones(), non_blocking=True)
    host.sum()


@program("reads on host")
def asynchronous_to(device: Device) -> None:
    ones().to("cpu", non_blocking=True).sum()


@program("writes on host")
def written_while_it_is_copied_to_the_device(device: Device) -> None:
    host = torch.ones(1024).pin_memory()
    ones().copy_(host, non_blocking=True)
    host.zero_()


@program()
def item_waits(device: Device) -> None:
    host = torch.empty(1024, pin_memory=True)
    x = ones()
    host.copy_(x, non_blocking=True)
    assert x.sum().item() == 1.0
    host.sum()


# -- NCCL ---------------------------------------------------------------------------------------


@program("reads on compute")
def gathered_but_not_waited_for(device: Device) -> None:
    full = torch.empty(2048, device=NAME)
    work = dist.all_gather_single(full, ones(), async_op=True)
    full.sum()
    work.wait()


@program()
def gathered_and_waited_for(device: Device) -> None:
    full = torch.empty(2048, device=NAME)
    dist.all_gather_single(full, ones(), async_op=True).wait()
    full.sum()


@program()
def gathered_synchronously(device: Device) -> None:
    full = torch.empty(2048, device=NAME)
    dist.all_gather_single(full, ones())
    full.sum()


@program("writes on compute")
def written_while_it_is_sent(device: Device) -> None:
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    x.zero_()
    assert work is not None
    work.wait()


@program()
def a_work_holds_its_tensors(device: Device) -> None:
    x = ones(2048)
    out = torch.empty(1024, device=NAME)
    work = dist.reduce_scatter_single(out, x, async_op=True)
    held = weakref.ref(x)
    del x
    assert held() is not None
    ones()
    work.wait()
    assert held() is None
    ones()


@program()
def a_work_that_nobody_waits_for(device: Device) -> None:
    x = ones(2048)
    work = dist.all_reduce(x, async_op=True)
    del x, work
    ones(2048)


@program()
def a_functional_collective(device: Device) -> None:
    with unset_fake_temporarily():
        mesh = DeviceMesh(NAME, torch.arange(2))
    distribute_tensor(ones(), mesh, [Shard(0)], src_data_rank=None).full_tensor().sum()


# -- autograd -----------------------------------------------------------------------------------


@program()
def backward_runs_on_the_stream_of_forward(device: Device) -> None:
    side, seen = Stream(name="side"), []
    weight = ones().requires_grad_()
    side.wait_stream(device.compute)
    with side:
        middle = weight * 2
        middle.register_hook(lambda grad: seen.append(device.current))  # type: ignore[no-untyped-call]
        loss = middle.sum()
    device.compute.wait_stream(side)
    loss.backward()  # type: ignore[no-untyped-call]
    assert seen == [side]
    assert weight.grad is not None
    weight.grad.sum()  # backward has let this stream wait


@program("reads on compute")
def a_hook_that_reads_on_another_stream(device: Device) -> None:
    side = Stream(name="side")
    weight = ones().requires_grad_()

    def read(grad: torch.Tensor) -> None:
        with device.compute:
            grad.sum()

    side.wait_stream(device.compute)
    with side:
        middle = weight * 2
        middle.register_hook(read)  # type: ignore[no-untyped-call]
        loss = (middle * middle).sum()
    device.compute.wait_stream(side)
    loss.backward()  # type: ignore[no-untyped-call]


@program()
def recomputed_activations(device: Device) -> None:
    weight = ones().requires_grad_()
    loss: Any = checkpoint(lambda: (weight * 2).sin().sum(), use_reentrant=False)
    loss.backward()


# -- faults that other runtimes have had, in small ----------------------------------------------


class Version(enum.Enum):
    """Which version of a program runs."""

    FAULTY = "faulty"
    MENDED = "mended"


def fault(report: str) -> Callable[[Callable[[Device, Version], None]], None]:
    """List a program that causes a report, and the same without its fault."""

    def listed(function: Callable[[Device, Version], None]) -> None:
        for version, its in ((Version.FAULTY, report), (Version.MENDED, "")):

            def run(device: Device, version: Version = version) -> None:
                function(device, version)

            PROGRAMS[f"{function.__name__}, {version.value}"] = run, its

    return listed


def _scatter(full: torch.Tensor) -> torch.Tensor:
    """Reduce-scatter on the current stream."""
    out = torch.empty(full.numel() // 2, device=NAME)
    dist.reduce_scatter_single(out, full)
    return out


@fault("is given the freed memory on reduce")
def output_freed_while_copied(device: Device, version: Version) -> None:
    """A reduce-scatter output that is freed on one stream while another copies it to the host."""
    reduces, copies = Stream(name="reduce"), Stream(name="copy")
    full = ones()
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


@fault("is given the freed memory on gather")
def gather_buffer_handed_out(device: Device, version: Version) -> None:
    """A gather buffer that is handed out again while the other stream still reads it."""
    gathers = Stream(name="gather")
    shard = ones(NUMEL // 2)
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


@fault("is given the freed memory on reduce")
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


@fault("reduce-scatter reads on reduce")
def default_stream_after_backward(device: Device, version: Version) -> None:
    """A reduction that waits for the default stream, while autograd runs on forward's."""
    forward, reduces = Stream(name="forward"), Stream(name="reduce")
    weight = ones().requires_grad_()

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


def _play(rank: int, world_size: int) -> dict[str, list[str]]:
    """What each program causes."""
    races = {}
    for name, (function, _) in PROGRAMS.items():
        with world((2,)), modeled(Device()) as device:
            function(device)
            races[name] = [str(race) for race in device.races]
    return races


def test_a_program_is_reported_if_it_races(ranks: Ranks) -> None:
    [found] = ranks(_play, 1, backend=None)
    for name, (_, report) in PROGRAMS.items():
        races = found[name]
        assert bool(races) == bool(report), "\n".join([name, *races])
        assert all(report in race and "test_device.py:" in race for race in races), name


def _report(rank: int, world_size: int) -> str:
    with modeled(Device()) as device:
        read_on_another_stream(device)
        with pytest.raises(AssertionError) as raised:
            device.check()
        return str(raised.value)


def test_a_report_names_both_places_and_the_memory(ranks: Ranks) -> None:
    [report] = ranks(_report, 1, backend=None)
    lines = report.splitlines()
    assert lines[0] == "1 races"
    assert lines[1] == "race: aten::sum reads on side"
    assert "in read_on_another_stream" in lines[2]
    earlier = next(line for line in lines if "not ordered after" in line)
    assert "aten::ones writes on compute" in earlier or "aten::fill_ writes on compute" in earlier
    assert any("4096 bytes of device memory, allocated on compute" in line for line in lines)


# -- without torch ------------------------------------------------------------------------------


def test_a_clock_knows_what_it_has_joined() -> None:
    first, second = Clock(), Clock()
    moment = first.advance("first")
    before = first.copy()
    later = first.advance("first")
    second.join(before)
    assert second.knows(moment)
    assert not second.knows(later)
