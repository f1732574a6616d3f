"""Private names of process groups do on this torch what ``_torch.c10d`` promises."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardwise._torch import c10d


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A gloo group of this process alone."""
    store = dist.HashStore()
    dist.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


def test_a_group_has_a_store_and_a_timeout(group: dist.ProcessGroup) -> None:
    store = c10d.store_of(group)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert c10d.timeout_of(group) == 77.0


def test_a_store_of_a_file_is_shared_under_any_prefix(
    group: dist.ProcessGroup, tmp_path: Path
) -> None:
    assert not c10d.has_shared_store(group)
    shared = dist.PrefixStore("outer", dist.FileStore(str(tmp_path / "store"), 1))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=shared, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    assert c10d.has_shared_store(dist.group.WORLD)


def test_a_fake_world_is_there_inside_only() -> None:
    with c10d.fake_world(8):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 8)
        dist.all_reduce(torch.ones(2))  # returns at once
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), c10d.fake_world(2):
        _ = 1 // 0
    assert not dist.is_initialized(), "an error ends it too"


def test_a_fake_world_is_none_inside_another(group: dist.ProcessGroup) -> None:
    with (
        pytest.raises(RuntimeError, match="this process is rank 0 of a world of 1"),
        c10d.fake_world(2),
    ):
        pass


def test_a_group_between_worlds_listens_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> dist.ProcessGroup:
        wait = timedelta(seconds=10)
        nowhere = "203.0.113.9"  # an address for documentation, which no interface has
        store = dist.HashStore()
        return c10d.group_between_worlds(
            store, 0, 1, address=nowhere, connecting=wait, timeout=wait
        )

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(RuntimeError, match=r"203\.0\.113\.9"):
        make()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    c10d.forget_group_between_worlds(make())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_metadata_of_a_checkpoint_names_known_classes_only(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    classes = c10d.metadata_classes()

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            if module == "torch" and name in ("float32", "strided"):
                return getattr(torch, name)
            if module.partition(".")[0] == "pathlib":  # Python's own, which moved it in 3.13
                return PurePosixPath
            return classes[module, name]

    with (tmp_path / ".metadata").open("rb") as file:
        metadata = Reader(file).load()
    assert metadata.state_dict_metadata["weight"].size == torch.Size([4])
    [info] = metadata.storage_data.values()
    own = c10d.storage_info(info.relative_path, info.offset, info.length)
    assert own == info


def test_classes_of_the_metadata_only_hold_values() -> None:
    assert {module for module, _ in c10d.metadata_classes()} == {
        "torch",
        "torch.serialization",
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.filesystem",
    }
