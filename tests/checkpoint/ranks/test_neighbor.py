"""What hosts keep in memory: which version is taken, what is sent, and when nothing is left.

Each rank is a thread here, on one of several hosts, and sends at once what it has copied.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import checkpoint, fully_shard
from shardwise.base.boxes import Box
from shardwise.base.errors import CheckpointError, MisuseError
from shardwise.checkpoint.disk import host_memory
from shardwise.checkpoint.disk.entries import StoredPiece, TensorEntry
from shardwise.checkpoint.disk.host_memory import (
    KeptFile,
    KeptPart,
    KeptVersion,
    keep_only,
    kept_files,
)
from shardwise.checkpoint.ranks.neighbor import Neighbors, _world_of, neighbors_of
from shardwise.checkpoint.ranks.ring import HostRing, folder_of
from shardwise.transport.peers import new_group
from tests.threads import on_hosts, run_threads
from tests.worlds import on_processes

Training = tuple[nn.Module, torch.optim.Optimizer]
THREE = ("a", "b", "c")
Losses = list[float]


def build(seed: int = 0, shape: Sequence[int] | None = None) -> Training:
    """A small model, sharded over all ranks, or over a mesh."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3))
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names) if shape else None
    fully_shard(model, mesh=mesh)
    model[1].eval()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def step(training: Training, number: int) -> float:
    """Take a step on the same random numbers on all ranks; return the loss."""
    model, optimizer = training
    torch.manual_seed(number)
    loss = model(torch.randn(4, 7)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def keep(neighbors: Neighbors, training: Training, number: int, root: Path) -> None:
    """Keep a version, which is complete then."""
    neighbors.copy(number, training, {"step": number}, root)()


def train(rank: int, world_size: int, root: Path, steps: range, shape: Any = None) -> None:
    """Train, and keep every step."""
    training, neighbors = build(shape=shape), neighbors_of(None)
    for number in steps:
        step(training, number)
        keep(neighbors, training, number, root)


def go_on(
    rank: int, world_size: int, root: Path, steps: int, at_least: int = 0
) -> tuple[int | None, int | None, Losses]:
    """Recover, and train to the end: what was recovered, what was lost, and the losses."""
    training, neighbors = build(seed=1), neighbors_of(None)
    found = neighbors.recover(training, at_least, root)
    if found is None:
        return None, neighbors.lost, []
    assert found.extra == {"step": found.step}
    return found.step, None, [step(training, n) for n in range(found.step + 1, steps + 1)]


def undisturbed(rank: int, world_size: int, steps: int) -> Losses:
    """Train from the beginning to the end."""
    training = build()
    return [step(training, number) for number in range(1, steps + 1)]


def on(hosts: Sequence[str], function: Callable[..., Any], *given: Any) -> list[Any]:
    """Run a function on ranks of some hosts."""
    with on_hosts(hosts):
        return run_threads(function, len(hosts), *given)


def lose(root: Path, *hosts: str) -> None:
    """Lose the memory of hosts."""
    for host in hosts:
        shutil.rmtree(root / folder_of(host))


def files_of(root: Path, host: str) -> list[KeptFile]:
    """What a host keeps."""
    return kept_files(root / folder_of(host))


# ---- what is recovered ----


@pytest.mark.parametrize(
    ("lost", "left"), [("a", 3), ("b", 3), ("c", 3), ("b", 2), ("b", 1), ("b", 4)]
)
def test_any_one_host_may_be_lost_and_any_number_of_ranks_goes_on(
    tmp_path: Path, lost: str, left: int
) -> None:
    on(THREE, train, tmp_path, range(1, 4))
    lose(tmp_path, lost)
    # The others, with one that is new, without it, or with two ranks on each.
    kept = [host for host in THREE if host != lost]
    hosts = {3: [*kept, "new"], 2: kept, 1: kept[:1], 4: [host for host in kept for _ in "12"]}
    found = on(hosts[left], go_on, tmp_path, 6)
    if left == 1:  # of two lost hosts, one was the other's neighbor
        assert found == [(None, 3, [])]
        return
    calm = on(hosts[left], undisturbed, 6)
    for step_taken, _, losses in found:
        assert step_taken == 3
        # Of other numbers of ranks, gradients are added up in another order.
        same = slice(3, 6 if left == 3 else 4)
        assert losses[: same.stop - 3] == calm[0][same], "as if nothing had happened, to the bit"


def test_too_many_lost_hosts_are_told_from_none(tmp_path: Path) -> None:
    assert on(THREE, go_on, tmp_path, 6) == [(None, None, [])] * 3, "there is nothing yet"
    on(THREE, train, tmp_path, range(1, 4))
    lose(tmp_path, "a", "b")
    assert on(["c", "new"], go_on, tmp_path, 6) == [(None, 3, [])] * 2


def test_a_version_that_not_all_have_does_not_count(tmp_path: Path) -> None:
    def die_at_three(rank: int, world_size: int) -> None:
        training, neighbors = build(), neighbors_of(None)
        for number in (1, 2):
            step(training, number)
            keep(neighbors, training, number, tmp_path)
        step(training, 3)
        neighbors.copy(3, training, {"step": 3}, tmp_path)  # and send nothing

    on(THREE, die_at_three)
    lose(tmp_path, "b")
    calm = on(THREE, undisturbed, 5)
    for found in on(["a", "new", "c"], go_on, tmp_path, 5):
        assert found == (2, None, calm[0][2:])


def test_versions_of_two_sessions_are_not_mixed(tmp_path: Path) -> None:
    """Step 3 of one session is not step 3 of the next, though both have gone wrong halfway."""
    on(THREE, train, tmp_path, range(1, 4))
    every = [file for host in THREE for file in files_of(tmp_path, host)]
    last = max(file.version for file in every)
    # Of step 3, two hosts have lost what they had, and one has it of another session.
    for file in every:
        if file.version == last and file.rank != 1:
            file.manifest_path.unlink()
    other = KeptVersion(last.session, "0" * 16, last.step)
    for file in files_of(tmp_path, "b"):
        if file.version == last:
            into = KeptFile(file.folder, other, file.part, 0, file.world_size)
            into.path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.path, into.path)
            shutil.copy(file.manifest_path, into.manifest_path)
    assert {step for step, _, _ in on(THREE, go_on, tmp_path, 3)} == {2}


def test_the_version_of_a_later_session_is_the_later_one(tmp_path: Path) -> None:
    """What a session has left behind never comes back after the next one has kept something."""
    on(THREE, train, tmp_path, range(1, 8))
    on(THREE, train, tmp_path, range(1, 3))  # from a checkpoint, say
    assert {step for step, _, _ in on(THREE, go_on, tmp_path, 7)} == {2}


def test_nothing_before_the_newest_checkpoint_is_taken(tmp_path: Path) -> None:
    on(THREE, train, tmp_path, range(1, 4))
    assert on(THREE, go_on, tmp_path, 6, 4) == [(None, None, [])] * 3
    assert {step for step, _, _ in on(THREE, go_on, tmp_path, 3, 3)} == {3}


def test_what_was_recovered_is_kept_until_there_is_another(tmp_path: Path) -> None:
    on(THREE, train, tmp_path, range(1, 4))
    for _ in range(2):
        assert {step for step, _, _ in on(THREE, go_on, tmp_path, 3)} == {3}


def extra_of(rank: int) -> dict[str, Any]:
    """What differs by rank, and a list in which only one rank of a host has the tensor."""
    return {"own": checkpoint.per_rank({"at": torch.arange(rank)}), "both": [1, torch.ones(2)]}


def test_extra_comes_back_whatever_files_a_rank_has(tmp_path: Path) -> None:
    def keep_extra(rank: int, world_size: int) -> None:
        neighbors_of(None).copy(1, build(), extra_of(rank), tmp_path)()

    def find_extra(rank: int, world_size: int) -> list[int]:
        found = neighbors_of(None).recover(build(seed=1), 0, tmp_path)
        assert found is not None
        assert found.extra["both"][0] == found.extra["both"][1].sum() / 2 == 1
        return [value["at"].numel() for value in found.extra["own"].values]

    on(["a", "a", "b"], keep_extra)
    lose(tmp_path, "b")
    assert on(["a", "a", "new"], find_extra) == [[0, 1, 2]] * 3


def test_ranks_of_a_group_count_from_its_first(tmp_path: Path) -> None:
    def each_rank(rank: int, world_size: int) -> list[int]:
        group = new_group([1, 2])
        if not rank:
            return []
        neighbors, model = neighbors_of(group), nn.Linear(2, 2)
        with pytest.raises(CheckpointError, match="folder: found None for a group of some"):
            neighbors.copy(1, (model, None), extra_of(rank))
        neighbors.copy(1, (model, None), extra_of(rank), tmp_path)()
        found = neighbors.recover((nn.Linear(2, 2), None), 0, tmp_path, group)
        assert found is not None
        return [value["at"].numel() for value in found.extra["own"].values]

    assert on(THREE, each_rank) == [[], [1, 2], [1, 2]]


def test_two_launchers_on_one_host_are_as_two_hosts(tmp_path: Path) -> None:
    def folder() -> Path:
        return tmp_path / ("one" if dist.get_rank() < 2 else "other")

    with patch("shardwise.checkpoint.ranks.neighbor.memory_folder", folder):
        on(["a"] * 4, train, None, range(1, 4))
        for launcher in ("one", "other"):
            assert {file.version.step for file in files_of(tmp_path / launcher, "a")} == {2, 3}
        shutil.rmtree(tmp_path / "one")
        assert {step for step, _, _ in on(["a"] * 4, go_on, None, 3)} == {3}


def test_recover_names_another_model_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    on(THREE, train, tmp_path, range(1, 3))

    def each_rank(rank: int, world_size: int) -> None:
        model = fully_shard(nn.Linear(7, 5))
        with pytest.raises(CheckpointError, match="recover: is of another model"):
            neighbors_of(None).recover((model, None), 0, tmp_path)
        model(torch.randn(2, 7)).sum().backward()

    on(THREE, each_rank)
    assert {step for step, _, _ in on(THREE, go_on, tmp_path, 2)} == {2}


# ---- damage ----


def flip(path: Path) -> None:
    """Change one bit in the middle of the elements."""
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Cut a file off."""
    path.write_bytes(path.read_bytes()[:-9])


def link(path: Path) -> None:
    """Put a link to another file in the place of one."""
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        *((flip, "path"), (cut, "path"), (link, "path")),
        *((flip, "manifest_path"), (Path.unlink, "manifest_path")),
    ],
)
def test_a_damaged_file_is_as_if_it_were_not_there(
    tmp_path: Path, harm: Callable[[Path], object], what: str
) -> None:
    on(THREE, train, tmp_path, range(1, 4))
    last = max(file.version for file in files_of(tmp_path, "a"))
    own, copy = (
        next(f for f in files_of(tmp_path, h) if (f.version, f.rank, f.part) == (last, 0, unique))
        for h, unique in (("a", KeptPart.UNIQUE), ("b", KeptPart.UNIQUE))
    )
    harm(getattr(own, what))
    assert {step for step, _, _ in on(THREE, go_on, tmp_path, 3)} == {3}, "the neighbor has it"
    harm(getattr(copy, what))
    assert on(THREE, go_on, tmp_path, 3) == [(None, 3, [])] * 3


def test_a_damaged_version_leaves_the_one_before(tmp_path: Path) -> None:
    on(THREE, train, tmp_path, range(1, 4))
    last = max(file.version for file in files_of(tmp_path, "a"))
    for host in THREE:
        for file in files_of(tmp_path, host):
            if file.version == last and file.rank == 0:
                flip(file.path)
    assert {step for step, _, _ in on(THREE, go_on, tmp_path, 3)} == {2}


# ---- what is sent ----


def sent(rank: int, world_size: int, root: Path, shape: Any) -> tuple[int, int, int]:
    """Keep a version: bytes on the host and bytes that are sent, and those of the state."""
    training, neighbors = build(shape=shape), neighbors_of(None)
    step(training, 1)
    keep(neighbors, training, 1, root)
    assert neighbors.cost is not None
    state = [*training[0].parameters()]
    state += [each for s in training[1].state.values() for each in s.values()]
    held = sum(t.to_local().nbytes for t in state if hasattr(t, "to_local"))
    return neighbors.cost.memory, neighbors.cost.sent, held


def test_a_shard_goes_to_the_next_host_once(tmp_path: Path) -> None:
    for memory, on_link, held in on(THREE, sent, tmp_path, None):
        assert 0 <= on_link - held < 64, "the shards and their states; and what only rank 0 has"
        assert memory > 2 * held


def test_nothing_is_sent_of_shards_that_another_host_has(tmp_path: Path) -> None:
    for _, on_link, held in on(["a", "a", "b", "b"], sent, tmp_path, (2, 2)):
        assert held > 100
        assert on_link == 0
    lose(tmp_path, "a")
    assert [found for found, _, _ in on(["b", "new"], go_on, tmp_path, 1)] == [1, 1]


def test_on_one_host_nothing_is_sent_and_its_processes_may_be_lost(tmp_path: Path) -> None:
    for _, on_link, _ in on(["a", "a"], sent, tmp_path, None):
        assert on_link == 0
    assert [found for found, _, _ in on(["a", "a"], go_on, tmp_path, 1)] == [1, 1]


def test_one_rank_of_each_host_copies_what_several_of_them_hold() -> None:
    entry = TensorEntry(
        *(("model", "w"), (4,), "F32", "", ""),
        tuple(StoredPiece(str(r), 0, Box((r % 2 * 2,), (2,)), ()) for r in (0, 1, 2, 3, 3)),
    )
    top, bottom = ("model.w", Box((0,), (2,))), ("model.w", Box((2,), (2,)))
    ours = HostRing(["a", "a", "a", "b"]).deal([entry])
    assert [each[KeptPart.UNIQUE] for each in ours] == [[top], [], [], []]
    assert [each[KeptPart.COMMON] for each in ours] == [[], [bottom], [], [bottom]]


def test_hosts_are_a_ring_whatever_ranks_each_of_them_has() -> None:
    ring = HostRing(["a", "b", "a", "c", "a"])
    assert ring.targets == [1, 3, 1, 0, 1]
    assert ring.sources(1) == [0, 2, 4]
    assert HostRing(["a", "a"]).targets == [None, None]


# ---- memory ----


def test_two_versions_are_kept_and_their_memory_is_used_again(tmp_path: Path) -> None:
    made: list[int] = []

    def each_rank(rank: int, world_size: int) -> None:
        training, neighbors = build(), neighbors_of(None)
        for number in range(1, 6):
            step(training, number)
            keep(neighbors, training, number, tmp_path)
            if rank == 0:
                mine = {file.version.step for file in files_of(tmp_path, "a")}
                assert mine <= {number, number - 1}
                paths = (file.path for file in files_of(tmp_path, "a") if file.rank == 0)
                made.extend(path.stat().st_ino for path in paths)

    on(THREE, each_rank)
    assert len({*made}) == 2 * len(KeptPart)


def bytes_under(root: Path) -> int:
    """The memory that all files take."""
    return sum(os.stat(path).st_blocks * 512 for path in root.rglob("*.safetensors"))


def test_what_another_session_left_takes_no_room_of_two_versions(tmp_path: Path) -> None:
    on(THREE, train, tmp_path, range(1, 4))
    two, found, make = bytes_under(tmp_path), [], host_memory.KeptFile.make

    def made(file: KeptFile, *given: Any) -> Any:
        memory = make(file, *given)
        found.append(bytes_under(tmp_path))
        return memory

    with patch.object(host_memory.KeptFile, "make", made):
        on(THREE, train, tmp_path, range(7, 10))  # without recovering, as after a move
    assert max(found) <= two


def test_a_version_that_failed_takes_no_room(tmp_path: Path) -> None:
    make = host_memory.KeptFile.make

    def full(file: KeptFile, *given: Any) -> Any:
        if file.rank == 1 and file.version.step in (3, 4, 5):
            raise OSError(28, "No space left on device", str(file.path))
        return make(file, *given)

    def each_rank(rank: int, world_size: int) -> list[int]:
        training, neighbors, found = build(), neighbors_of(None), []
        for number in range(1, 7):
            step(training, number)
            fails = pytest.raises(CheckpointError, match="No space")
            with fails if number in (3, 4, 5) else contextlib.nullcontext():
                keep(neighbors, training, number, tmp_path)
            found.append(neighbors.ranks.first("count", lambda: bytes_under(tmp_path)))
        return found

    with patch.object(host_memory.KeptFile, "make", full):
        for found in on(THREE, each_rank):
            assert max(found) == found[1]


def test_no_rank_begins_a_version_before_the_old_ones_are_deleted(tmp_path: Path) -> None:
    """What it has begun would be deleted with them."""
    order: list[str] = []

    def cleaned(folder: Path, versions: Any) -> None:
        order.append("cleaned")

    def each_rank(rank: int, world_size: int) -> None:
        keep(neighbors_of(None), build(), 1, tmp_path)
        order.append("ended")

    with patch("shardwise.checkpoint.ranks.neighbor.keep_only", cleaned):
        on(["a", "a", "b", "b"], each_rank)
    assert order[-4:] == ["ended"] * 4


def test_a_host_without_room_is_named_at_the_first_version(tmp_path: Path) -> None:
    def each_rank(rank: int, world_size: int) -> str:
        training, neighbors = build(), neighbors_of(None)
        step(training, 1)
        with pytest.raises(CheckpointError) as raised:
            keep(neighbors, training, 1, tmp_path)
        return str(raised.value)

    with patch("shardwise.checkpoint.ranks.neighbor.bytes_in", lambda _: (1000, 24)):
        for said in on(THREE, each_rank):
            assert re.search(r"found 1.00 KiB for it in the folder of rank \d's host, exp", said)
            assert "SHARDWISE_MEMORY" in said


def test_a_file_without_room_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    make = host_memory.KeptFile.make

    def full(file: KeptFile, *given: Any) -> Any:
        if file.rank == 1 and file.version.step == 2:
            raise OSError(28, "No space left on device", str(file.path))
        return make(file, *given)

    def each_rank(rank: int, world_size: int) -> str:
        training, neighbors = build(), neighbors_of(None)
        step(training, 1)
        keep(neighbors, training, 1, tmp_path)
        with pytest.raises(CheckpointError) as raised:
            keep(neighbors, training, 2, tmp_path)
        return str(raised.value)

    with patch.object(host_memory.KeptFile, "make", full):
        assert all("rank 1: " in said and "No space" in said for said in on(THREE, each_rank))
    assert {step for step, _, _ in on(THREE, go_on, tmp_path, 1)} == {1}, "the one before is there"


def test_only_versions_are_deleted(tmp_path: Path) -> None:
    version = KeptVersion(1, "0123456789abcdef", 3)
    for name in (version.name, KeptVersion(1, "0123456789abcdef", 2).name, "notes"):
        (tmp_path / name).mkdir()
    keep_only(tmp_path, [version])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([version.name, "notes"])


# ---- what is wrong ----


def test_a_rank_that_cannot_keep_what_was_sent_holds_up_no_other(tmp_path: Path) -> None:
    real = KeptFile.complete

    def fail(file: KeptFile, manifest: bytes) -> None:
        if dist.get_rank() == 1 and file.rank == 0 and file.version.step == 2:
            raise RuntimeError("out of memory")
        real(file, manifest)

    def each_rank(rank: int, world_size: int) -> None:
        training, neighbors = build(), neighbors_of(None)
        keep(neighbors, training, 1, tmp_path)
        with pytest.raises(CheckpointError, match="rank 1: RuntimeError: out of memory"):
            keep(neighbors, training, 2, tmp_path)

    with patch.object(KeptFile, "complete", fail):
        on(THREE, each_rank)
    assert {step for step, _, _ in on(THREE, go_on, tmp_path, 2)} == {2}, "its own host has it"


def test_a_name_may_have_any_number_in_it(tmp_path: Path) -> None:
    version = KeptVersion(10**9, "0" * 16, 10**13)
    assert not _world_of([KeptFile(tmp_path, version, KeptPart.UNIQUE, 0, 10**9 - 1)])
    on(THREE, train, tmp_path, range(10**13, 10**13 + 2))
    assert {step for step, _, _ in on(THREE, go_on, tmp_path, 0)} == {10**13 + 1}


def test_a_group_keeps_one_training(tmp_path: Path) -> None:
    def each_rank(rank: int, world_size: int) -> None:
        training, neighbors = build(), neighbors_of(None)
        keep(neighbors, training, 1, tmp_path)
        with pytest.raises(CheckpointError, match=r"folder: found .*other, expected"):
            keep(neighbors, training, 2, tmp_path / "other")

    on(THREE, each_rank)


def test_steps_only_rise(tmp_path: Path) -> None:
    def each_rank(rank: int, world_size: int) -> None:
        training, neighbors = build(), neighbors_of(None)
        keep(neighbors, training, 2, tmp_path)
        with pytest.raises(CheckpointError, match="found -1, expected 0 or more"):
            keep(neighbors, training, -1, tmp_path)
        with pytest.raises(CheckpointError, match="found 2, expected more than 2"):
            keep(neighbors, training, 2, tmp_path)
        with pytest.raises(CheckpointError, match=r"found \[3, 4\], expected the same"):
            keep(neighbors, training, 3 + rank % 2, tmp_path)

    on(THREE, each_rank)


def test_ranks_agree_on_extra(tmp_path: Path) -> None:
    def each_rank(rank: int, world_size: int) -> None:
        with pytest.raises(CheckpointError, match=r"extra.rank.*per_rank"):
            neighbors_of(None).copy(1, build(), {"rank": rank}, tmp_path)

    on(THREE, each_rank)


def test_simulated_ranks_and_single_processes_are_refused() -> None:
    model, optimizer = nn.Linear(2, 2), None
    with pytest.raises(MisuseError, match="no process group"):
        checkpoint.replicate(1, model, optimizer)
    with pytest.raises(MisuseError, match="no process group"):
        checkpoint.recover(model, optimizer)
    with pytest.raises(RuntimeError, match="simulated"):
        run_threads(lambda rank, size: checkpoint.replicate(1, nn.Linear(2, 2)), 2)


# ---- processes ----


@on_processes(2)
def test_a_thread_sends_while_training_goes_on(rank: int, world_size: int, tmp_path: Path) -> None:
    training = build()
    handles = []
    for number in range(1, 5):
        step(training, number)
        handles.append(checkpoint.replicate(number, *training, {"step": number}, folder=tmp_path))
    assert all(handle.result().name.endswith(f"{n:08}") for n, handle in enumerate(handles, 1))
    calm = [each.full_tensor() for each in training[0].parameters()]
    again = new_group([0, 1])  # as ranks have that are started again
    other = build(seed=1)
    found = checkpoint.recover(*other, folder=tmp_path, group=again)
    assert found is not None
    assert (found.step, found.extra, found.world_size) == (4, {"step": 4}, 2)
    assert all(map(torch.equal, calm, [each.full_tensor() for each in other[0].parameters()]))


@on_processes(2)
def test_an_error_that_one_rank_has_seen_is_raised_on_all(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    group, model = new_group([0, 1]), fully_shard(nn.Linear(7, 5))

    def replicate(number: int) -> checkpoint.Handle:
        return checkpoint.replicate(number, model, folder=tmp_path, group=group)

    replicate(1).result()
    with patch.object(host_memory.FileWriter, "complete", side_effect=RuntimeError("no")):
        handle = replicate(2)
        if rank == 0:
            with pytest.raises(CheckpointError, match="RuntimeError: no"):
                handle.result()
        with pytest.raises(CheckpointError, match="RuntimeError: no"):
            replicate(3)
    assert replicate(4).result().name.endswith("4")
