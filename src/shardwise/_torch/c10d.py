"""Private names of process groups and of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _coalescing_manager,
    _CoalescingManager,
)


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the store through which the ranks of ``group`` found each other."""
    return dist.distributed_c10d._get_process_group_store(group)


def has_shared_store(group: dist.ProcessGroup) -> bool:
    """Whether the store of ``group`` is one in which processes meet.

    The stores of simulated worlds, ``HashStore`` and ``FakeStore``, belong to one process.
    """
    store = store_of(group)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore | dist.FileStore)  # type: ignore[attr-defined]


@contextmanager
def naming_group(name: str) -> Iterator[None]:
    """Have torch give a group this name, which it else derives from what a rank has made before.

    For groups that their members make alone (``use_local_synchronization``). Ranks may have made
    different groups: then they would wait for each other under different names.
    """
    c10d: Any = dist.distributed_c10d
    derive, count = c10d._hash_ranks_to_str, c10d._world.group_count
    try:
        c10d._hash_ranks_to_str = lambda ranks: name
        yield
    finally:
        c10d._hash_ranks_to_str = derive
        c10d._world.group_count = count  # from which all ranks derive the names of other groups


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return how long a collective of ``group`` may take, in seconds."""
    types = group._device_types
    cpu = torch.device("cpu")  # which a simulated group serves, too, without listing it
    options = group._get_backend(types[0] if types and cpu not in types else cpu).options
    return float(options._timeout.total_seconds())


def group_between_worlds(
    store: Any, rank: int, size: int, *, address: str, connecting: timedelta, timeout: timedelta
) -> dist.ProcessGroup:
    """Create a gloo group of processes that are in no common world, for tensors on the CPU.

    Its ranks are numbered by themselves: they are no ranks of the default group.

    Args:
        store: in which only these processes meet.
        rank: of this process in the group.
        size: of the group.
        address: of this process for the others, unless GLOO_SOCKET_IFNAME names interfaces. By
            itself, gloo takes what the host's name resolves to, which is often 127.0.0.1.
        connecting: how long the processes may take to come together.
        timeout: how long a message may take afterwards.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    interfaces = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    options._devices = [
        dist.ProcessGroupGloo.create_device(interface=each) for each in interfaces
    ] or [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = connecting
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    backend.options._timeout = timeout
    backend._set_default_timeout(timeout)
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    world = dist.distributed_c10d._world
    world.pg_map[group] = (dist.Backend.GLOO, store)
    world.pg_group_ranks[group] = {number: number for number in range(size)}
    world.pg_backend_config[group] = f"cpu:{dist.Backend.GLOO}"
    return group


def forget_group_between_worlds(group: dist.ProcessGroup) -> None:
    """Forget a group of :func:`group_between_worlds`; its connections end with the last user."""
    world = dist.distributed_c10d._world
    for known in (world.pg_map, world.pg_group_ranks, world.pg_backend_config):
        known.pop(group, None)


def broadcast_all(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give ``tensors`` the values of the first rank of ``group``, small ones together."""
    if tensors:
        bucket = 8 * 1024 * 1024  # bytes
        dist._broadcast_coalesced(group, tensors, bucket, 0)  # type: ignore[attr-defined]


@contextmanager
def coalesced(group: dist.ProcessGroup) -> Iterator[_CoalescingManager]:
    """Launch the collectives called inside as one, at the end of the block.

    They must be of one kind and one dtype, each called with ``async_op=False``. The object yielded
    has a ``wait()`` for all of them.
    """
    with _coalescing_manager(group, async_ops=True) as manager:
        yield manager


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Act as one rank of a world without other processes, whose collectives return at once.

    A world belongs to the whole process, so other threads wait until they can have one.

    Args:
        world_size: the number of ranks.
        rank: which of them this process is.

    Raises:
        RuntimeError: this process is already part of a world.
    """
    with _one_world:
        if dist.is_initialized():
            raise RuntimeError(
                f"this process is rank {dist.get_rank()} of a world of {dist.get_world_size()}; "
                "simulate another one in a separate process"
            )
        from torch.testing._internal.distributed.fake_pg import FakeStore

        # A process group lets this process print errors as those of a rank, for good.
        hook = sys.excepthook
        try:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            sys.excepthook = hook
            _forget_placements()


_one_world = threading.RLock()


def _forget_placements() -> None:
    """Forget which placements operations have on meshes of this world.

    ``DTensor`` takes the meshes of a later world for the same, and would look for groups that are
    gone.
    """
    from torch.distributed.tensor import debug

    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()  # not in every torch


def storage_info(file: str, offset: int, length: int) -> Any:
    """Build the entry by which ``torch.distributed.checkpoint`` metadata locates a chunk.

    It has the attributes ``relative_path``, ``offset``, ``length`` and ``transform_descriptors``.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def metadata_classes() -> dict[tuple[str, str], Any]:
    """Return the classes that a pickle of that metadata may name, by module and name.

    None does more than hold values; ``_get_layout`` looks a word up in a table. Dtypes are not
    listed: they are attributes of ``torch`` itself.
    """
    from torch.distributed.checkpoint import filesystem, metadata

    names = (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
    classes: dict[tuple[str, str], Any] = {
        (metadata.__name__, name): getattr(metadata, name) for name in names
    }
    classes[filesystem.__name__, "_StorageInfo"] = filesystem._StorageInfo
    classes["torch.serialization", "_get_layout"] = torch.serialization._get_layout
    classes["torch", "Size"] = torch.Size
    return classes
