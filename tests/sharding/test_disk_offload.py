"""``DiskOffloadPolicy``: shards are on a disk, and everything else is as if they were in memory."""

from __future__ import annotations

import copy
import gc
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from shardwise import (
    DiskOffloadPolicy,
    OffloadError,
    OffloadPolicy,
    checkpoint,
    clip_grad_norm_,
    fully_shard,
    materialize,
)
from shardwise.base import libc
from shardwise.base.scratch import file as scratch_file
from shardwise.base.scratch.file import ScratchFile, file_in
from shardwise.optim import in_backward, offload
from shardwise.sharding.paging import Pages, ReadOrder
from shardwise.sharding.state import groups_of
from tests.corpus.gathering import own_part
from tests.corpus.models import Odd
from tests.harness import run_ranks
from tests.sharding.nets import (
    Net,
    batches,
    group_of,
    hybrid_mesh,
    loss_of,
    run_over,
    seeded,
    shard_blocks,
    sharded_net,
)
from tests.worlds import Ranks, on_threads


def _keep_everything() -> None:
    scratch_file.SMALLEST = 1


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_file, "SMALLEST", 1)


def assert_on_disk(net: nn.Module, folder: Path) -> None:
    """Check that all shards are in the file of this process in ``folder``."""
    file = file_in(folder)
    for group in groups_of(net):
        for param in group.params:
            assert file.holds(param.local) or not param.local.numel(), param.fqn


def assert_same(mine: nn.Module, other: nn.Module) -> None:
    """Compare parameters bit for bit."""
    for (name, p), q in zip(mine.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(own_part(p), own_part(q)), name


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


class Clamping(Odd):
    """An odd model that also writes to a parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.out.bias.clamp_(max=0.1)
        return super().forward(x)


STRATEGIES: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero2": {"reshard_after_forward": False},
    "halves": {"of_blocks": {"reshard_after_forward": 2}},
    "hybrid": {"hybrid": True},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


def _train_alike(
    rank: int,
    world_size: int,
    transport: str,
    folder: Path,
    *,
    hybrid: bool = False,
    **options: Any,
) -> None:
    _keep_everything()
    mesh = hybrid_mesh(world_size) if hybrid else None
    where = [OffloadPolicy(), *(DiskOffloadPolicy(folder) for _ in range(3))]
    nets = [
        sharded_net(Clamping, mesh=mesh, transport=transport, offload_policy=each, **options)
        for each in where
    ]
    nets[3] = copy.deepcopy(nets[3])
    alone, after, inside, copied = nets
    optims: list[torch.optim.Optimizer] = [
        _adamw(alone.parameters()),
        offload(_adamw(after.parameters()), f"disk:{folder}"),
        in_backward(inside, lambda params: offload(_adamw(params), f"disk:{folder}")),
        _adamw(copied.parameters()),
    ]
    for step in range(2):
        for net, optim in zip(nets, optims, strict=True):
            loss_of(net, batches(world_size, step)[rank]).backward()
            optim.step()
            optim.zero_grad()
    for net in nets[1:]:
        assert_same(net, alone)
        assert_on_disk(net, folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("strategy", "transport", "world_size"),
    [
        ("zero3", "c10d", 1),
        ("zero3", "shm", 2),
        ("zero2", "c10d", 2),
        ("hybrid", "c10d", 4),
        ("bf16", "c10d", 1),
        *(
            pytest.param(strategy, transport, 4, marks=pytest.mark.long)
            for strategy in STRATEGIES
            for transport in ("c10d", "shm")
        ),
    ],
)
def test_numbers_are_those_of_shards_in_memory(
    strategy: str, transport: str, world_size: int, tmp_path: Path
) -> None:
    run_over(transport, _train_alike, world_size, tmp_path, **STRATEGIES[strategy])


@on_threads(2)
def test_accumulation_clipping_and_evaluation_are_the_same(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    nets = [sharded_net(offload_policy=p) for p in (OffloadPolicy(), DiskOffloadPolicy(tmp_path))]
    for net in nets:
        optim = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            net.set_requires_gradient_sync(step % 2 == 1)  # type: ignore[operator]
            loss_of(net, batches(world_size, step)[rank]).backward()
            if step % 2:
                clip_grad_norm_(net.parameters(), 0.1)
                optim.step()
                optim.zero_grad()
            with torch.no_grad():
                net(batches(world_size, step)[rank])
    assert_same(*nets)


@on_threads(2)
def test_models_on_the_meta_device_are_filled_shard_by_shard(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    def make(where: OffloadPolicy) -> nn.Module:
        with torch.device("meta"):
            net = Net()
        shard_blocks(net, offload_policy=where)

        def init(module: nn.Module) -> None:
            for param in module.parameters(recurse=False):
                param.uniform_()

        torch.manual_seed(0)
        materialize(net, init=init)
        return net

    disk = make(DiskOffloadPolicy(tmp_path))
    assert_on_disk(disk, tmp_path)
    assert_same(disk, make(OffloadPolicy()))


@on_threads(2)
def test_parameters_that_replace_shards_go_to_the_disk(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    net, other = sharded_net(offload_policy=DiskOffloadPolicy(tmp_path)), sharded_net()
    x = batches(world_size)[rank]
    loss_of(net, x)
    for each in (net, other):
        each.to(torch.float64)
        loss_of(each, x.double()).backward()
    assert_on_disk(net, tmp_path)
    state = {name: value.clone() for name, value in other.state_dict().items()}
    net.load_state_dict({name: value * 2 for name, value in state.items()}, assign=True)
    loss_of(net, x.double())
    assert_on_disk(net, tmp_path)
    net.load_state_dict(state)
    assert_same(net, other)
    taken = file_in(tmp_path).nbytes
    for _ in range(3):
        net.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
        loss_of(net, x.double())
        gc.collect()
    assert file_in(tmp_path).nbytes <= 2 * taken, "what was replaced is free again"


@on_threads(1)
def test_parameters_that_went_to_the_disk_in_inference_mode_are_trained(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    nets = [sharded_net(offload_policy=p) for p in (OffloadPolicy(), DiskOffloadPolicy(tmp_path))]
    x = batches(world_size)[rank].double()
    for net in nets:
        net.to(torch.float64)
        with torch.inference_mode():
            net(x)  # brings them to the disk
        optim = _adamw(net.parameters())
        loss_of(net, x).backward()
        optim.step()
    assert_same(*nets)
    assert_on_disk(nets[1], tmp_path)


@on_threads(1)
def test_a_copy_is_on_the_disk_apart(rank: int, world_size: int, tmp_path: Path) -> None:
    net = sharded_net(offload_policy=DiskOffloadPolicy(tmp_path))
    before = [own_part(param).clone() for param in net.parameters()]
    average = torch.optim.swa_utils.AveragedModel(net)
    assert_on_disk(average.module, tmp_path)
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    for param, value in zip(average.module.parameters(), before, strict=True):
        assert torch.equal(own_part(param), value), "a copy has memory of its own"


@on_threads(2)
def test_checkpoints_move_between_disk_and_memory(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    _keep_everything()
    net = sharded_net(offload_policy=DiskOffloadPolicy(tmp_path / "disk"))
    checkpoint.save(tmp_path / "saved", net)
    other = sharded_net()
    again = sharded_net(offload_policy=DiskOffloadPolicy(tmp_path / "disk"))
    for each in (other, again):
        with torch.no_grad():
            for param in each.parameters():
                param.add_(1)
        checkpoint.load(tmp_path / "saved", each)
        assert_same(each, net)
    assert_on_disk(again, tmp_path / "disk")


@on_threads(2)
def test_training_goes_on_after_an_exception(rank: int, world_size: int, tmp_path: Path) -> None:
    net = sharded_net(offload_policy=DiskOffloadPolicy(tmp_path))
    other = sharded_net()
    x = batches(world_size)[rank]

    def fail(*_: Any) -> None:
        raise ArithmeticError

    for each in (net, other):
        handle = each.blocks[1].down.register_forward_hook(fail)  # type: ignore[union-attr]
        with pytest.raises(ArithmeticError):
            loss_of(each, x)
        handle.remove()
        loss_of(each, x).backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_same(net, other)


@on_threads(1)
def test_small_shards_stay_in_memory(rank: int, world_size: int, tmp_path: Path) -> None:
    scratch_file.SMALLEST = 7 * 6 * 4
    net = sharded_net(offload_policy=DiskOffloadPolicy(tmp_path))
    loss_of(net, batches(world_size)[rank]).backward()
    file = file_in(tmp_path)
    found = {name: file.holds(own_part(param)) for name, param in net.named_parameters()}
    assert {name for name, on_disk in found.items() if on_disk} == {
        f"blocks.{i}.{name}.weight" for i in range(3) for name in ("up", "down")
    }


# -- pages -----------------------------------------------------------------------------------------


def _record(rank: int, world_size: int, folder: Path) -> tuple[list[str], list[str]]:
    net = sharded_net(offload_policy=DiskOffloadPolicy(folder))
    blocks = {
        own_part(block.up.weight).data_ptr(): str(i)
        for i, block in enumerate(net.blocks)  # type: ignore[arg-type, union-attr]
    }
    calls: list[str] = []

    def recorded(what: str) -> Callable[[ScratchFile, torch.Tensor], None]:
        do = getattr(ScratchFile, what)

        def call(self: ScratchFile, tensor: torch.Tensor) -> None:
            do(self, tensor)
            if tensor.data_ptr() in blocks:
                calls.append(f"{what} {blocks[tensor.data_ptr()]}")

        return call

    with pytest.MonkeyPatch.context() as patch:
        for what in ("read_ahead", "load", "let_go"):
            patch.setattr(ScratchFile, what, recorded(what))
        loss_of(net, batches(world_size)[rank]).backward()
        calls.clear()
        loss = loss_of(net, batches(world_size)[rank])
        forward = calls.copy()
        calls.clear()
        loss.backward()
    return forward, calls


def test_shards_are_read_before_a_group_is_gathered_and_let_go_after_it(
    threads: Ranks, tmp_path: Path
) -> None:
    [(forward, backward)] = threads(_record, 1, tmp_path)
    for block in "012":
        for calls in (forward, backward):
            assert calls.index(f"load {block}") < calls.index(f"let_go {block}")
    assert forward.index("read_ahead 1") < forward.index("let_go 0") < forward.index("load 1")
    assert backward.index("read_ahead 1") < backward.index("let_go 2")


def test_what_came_after_two_groups_comes_after_them_again() -> None:
    order = ReadOrder()
    first, second, third = (Pages([]) for _ in range(3))
    run = [first, second, third, third, second, first]  # forward and backward
    for each in run:
        assert order.note(each) is None
    assert [order.note(each) for each in run[:2]] == [None, third]
    found = [order.note(each) for each in run[2:]]
    assert found == [third, second, first, first]
    del run, found, each, third
    gc.collect()
    order.note(first)
    assert order.note(second) is None, "it is gone"


# -- disks that are full, or fail ------------------------------------------------------------------


@on_threads(1)
def test_shards_that_cannot_be_read_are_an_error_that_names_them(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    net = sharded_net(offload_policy=DiskOffloadPolicy(tmp_path / str(rank)))
    x = batches(world_size)[rank]
    loss_of(net, x)
    os.ftruncate(file_in(tmp_path / str(rank))._file, 0)
    match = rf"gain on rank {rank}: .*reading .*Input/output error.*last checkpoint"
    with pytest.raises(OffloadError, match=match):
        loss_of(net, x)


@on_threads(1)
def test_a_step_does_not_go_on_with_parameters_that_were_not_written(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    net = sharded_net(offload_policy=DiskOffloadPolicy(tmp_path / "shards"))
    optim = offload(_adamw(net.parameters()), f"disk:{tmp_path}")
    loss_of(net, batches(world_size)[rank]).backward()

    def fail(*_: int) -> None:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libc, "check_writes", fail)
        with pytest.raises(OffloadError, match=r"writing .*shards: Input/output error"):
            optim.step()
    with pytest.raises(OffloadError, match=r"writing .*shards: Input/output error"):
        optim.step()
    with pytest.raises(OffloadError, match=r"writing .*shards: Input/output error"):
        loss_of(net, batches(world_size)[rank])


def _fill(rank: int, world_size: int, folder: Path) -> str:
    _keep_everything()
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    net = seeded(Net)
    with pytest.raises(OffloadError) as caught:
        fully_shard(net, offload_policy=DiskOffloadPolicy(folder))
    assert not any(isinstance(param, DTensor) for param in net.parameters())
    assert not list(groups_of(net))
    fully_shard(net)  # in memory
    loss_of(net, batches(world_size)[rank]).backward()
    return str(caught.value)


def test_a_full_disk_is_one_error_and_changes_no_module(tmp_path: Path) -> None:
    for rank, message in enumerate(run_ranks(_fill, 2, tmp_path)):
        assert f"of which rank {rank} has" in message
        assert f"setting aside 4.00 KiB after 8.00 KiB in {tmp_path}, where" in message
        assert "are free: File too large" in message


@on_threads(1)
def test_a_folder_that_is_none_is_named(rank: int, world_size: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match=f"make a file in {tmp_path / 'file'}"):
        fully_shard(Net(), offload_policy=DiskOffloadPolicy(tmp_path / "file"))


@pytest.mark.parametrize("folder", ["", None, 3])
def test_what_names_no_folder_is_refused(folder: Any) -> None:
    with pytest.raises(ValueError, match="DiskOffloadPolicy: found"):
        DiskOffloadPolicy(folder)


@on_threads(1)
def test_the_file_is_gone_with_the_model(rank: int, world_size: int, tmp_path: Path) -> None:
    net = sharded_net(offload_policy=DiskOffloadPolicy(tmp_path))
    loss_of(net, batches(world_size)[rank]).backward()
    assert group_of(net).pages.order is not None
    del net
    gc.collect()
    open_files = [
        os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()
    ]
    assert not any(str(tmp_path) in each for each in open_files)
