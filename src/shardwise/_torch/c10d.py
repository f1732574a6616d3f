"""Private names of process groups and of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
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
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()
            sys.excepthook = hook
            _forget_meshes()


_one_world = threading.RLock()


def _forget_meshes() -> None:
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


# -- ranks that are threads ------------------------------------------------------------------------

#: The name of a backend by which torch knows that meshes of several ranks are in one process.
_THREADED = "threaded"


class _WorldOfThread(threading.local):
    """What torch keeps of the process groups of a process, for each thread."""

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        self.group_count = 0
        self.pg_map: dict[dist.ProcessGroup, tuple[str, Any]] = {}
        self.pg_names: dict[dist.ProcessGroup, str] = {}
        self.pg_group_ranks: dict[dist.ProcessGroup, dict[int, int]] = {}
        self.pg_backend_config: dict[dist.ProcessGroup, str] = {}
        self.tags_to_pg: dict[str, list[dist.ProcessGroup]] = {}
        self.pg_to_tag: dict[dist.ProcessGroup, str] = {}
        self.pg_coalesce_state: dict[dist.ProcessGroup, list[Any]] = {}
        self.comms: list[Any] = []

    @property
    def pg_config_info(self) -> list[dict[str, Any]]:
        """The groups, for torch's logs."""
        return [{"pg_name": name, "ranks": [], "group_count": 0} for name in self.pg_names.values()]


#: The groups of all threads, for as long as the process lives: worlds come back.
_worlds_of_threads = _WorldOfThread()


@contextmanager
def worlds_of_threads(
    create: Callable[[int, Sequence[int], str], dist.ProcessGroup], number: Callable[[], int]
) -> Iterator[None]:
    """Let every thread have process groups of its own, until the end of the block.

    Whatever backend a program asks for, it gets groups that ``create`` makes.

    Args:
        create: makes a process group of a rank in it, its members, and its name.
        number: returns a number of the calling thread that none before it had. Torch caches by mesh
            what depends on the rank, and knows meshes of several ranks apart by these numbers.
    """
    c10d_module: Any = dist.distributed_c10d
    bindings: Any = torch._C._distributed_c10d
    new_group = c10d_module._new_process_group_helper

    def in_threads(
        size: int, rank: int, members: Any, backend: Any, store: Any, name: str = "", **kw: Any
    ) -> Any:
        # By who is in it: meshes that torch has cached find groups of the same ranks later on.
        name = ",".join(map(str, members or range(size)))
        number = sum(
            each.partition("/")[0] == name for each in _worlds_of_threads.pg_names.values()
        )
        name = f"{name}/{number}" if number else name
        return new_group(size, rank, members, dist.Backend(_THREADED), store, name, **kw)

    def make(options: Any, _: object) -> dist.ProcessGroup:
        members = options.global_ranks_in_group or range(options.group_size)
        return create(options.group_rank, list(members), options.group_id)

    backends: Any = dist.Backend
    backends.register_backend(_THREADED, make, extended_api=True, devices=["cpu", "cuda"])
    plugin = {_THREADED.upper(): backends._BackendPlugin(make, True)}
    # For fake tensors on hosts without a GPU. Torch 2.11 crashes where a second thread calls it.
    guard = "_ensureCUDADeviceGuardSet"
    if not torch.cuda.is_available():
        getattr(torch._C, guard)()
    hook = sys.excepthook  # every process group that is made wraps it once more
    bindings._set_thread_isolation_mode(True)
    try:
        with (
            patch.object(c10d_module, "_world", _worlds_of_threads),
            patch.object(c10d_module, "_new_process_group_helper", in_threads),
            patch.dict(backends._plugins, plugin),
            patch.object(torch._C, guard, lambda: None),
            patch.object(device_mesh, "threading", SimpleNamespace(get_ident=number)),
        ):
            yield
    finally:
        bindings._set_thread_isolation_mode(False)
        sys.excepthook = hook


def join_world_of_threads(rank: int, world_size: int) -> None:
    """Make the calling thread a rank, in a block of :func:`worlds_of_threads`."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(_THREADED, store=store, rank=rank, world_size=world_size)
