"""Private names of torch that let every thread of a process be a rank."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

T = TypeVar("T")

#: The name of a backend by which torch knows that meshes of several ranks are in one process.
_THREADED = "threaded"


class _WorldOfThread(threading.local):
    """What torch keeps of the process groups of a process, for each thread."""

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        self.group_count = 0
        self.pg_config_info: list[Any] = []  # for torch's logs
        self.comms: list[Any] = []
        for name in (
            *("map", "names", "group_ranks", "backend_config", "to_tag", "coalesce_state"),
            "flight_recorder_hooks",  # as of torch 2.15
        ):
            setattr(self, f"pg_{name}", {})
        self.tags_to_pg: dict[str, list[dist.ProcessGroup]] = {}


#: The groups of all threads, for as long as the process lives: worlds come back.
_worlds_of_threads: Any = _WorldOfThread()
#: Who uses them: what it changes in torch is there once.
_in_use: dict[str, object] = {}
#: What was there before: an object, the name of an attribute, and its value.
_before: list[tuple[Any, str, Any]] = []


def call_with_worlds_of_threads(
    function: Callable[[], T],
    create: Callable[[int, Sequence[int], str], dist.ProcessGroup],
    number: Callable[[], int],
    kinds: Sequence[str],
) -> T:
    """Let every thread have process groups of its own, as long as a function runs.

    Whatever backend a program asks for, it gets groups that ``create`` makes.

    Args:
        function: called at once.
        create: makes a process group of a rank in it, its members, and its name.
        number: returns a number of the calling thread that none before it had. Torch caches by mesh
            what depends on the rank, and knows meshes of several ranks apart by these numbers.
        kinds: the types of devices that there are.

    Returns:
        What the function returned.

    Raises:
        RuntimeError: another thread is in such a call.
    """
    mine = object()
    try:
        try:
            if _in_use.setdefault("by", mine) is not mine:
                raise RuntimeError(
                    f"thread {threading.current_thread().name!r} cannot run simulated ranks while "
                    "this process runs others: wait until they have ended, or simulate in a "
                    "process of its own"
                )
            _separate(create, number, kinds)
            return function()
        finally:
            _restore(mine)
    finally:
        _restore(mine)  # Ctrl-C may have ended the first attempt


def _separate(
    create: Callable[[int, Sequence[int], str], dist.ProcessGroup],
    number: Callable[[], int],
    kinds: Sequence[str],
) -> None:
    c10d_module: Any = dist.distributed_c10d
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

    def init(*args: Any, **kw: Any) -> None:
        # A rank has a group from its start. Scripts that make theirs go on with it. Those that
        # have destroyed it need no rendezvous, in which the rank would keep its turn.
        if _worlds_of_threads.default_pg is None:
            join_world_of_threads(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    def make(options: Any, _: object) -> dist.ProcessGroup:
        members = options.global_ranks_in_group or range(options.group_size)
        return create(options.group_rank, list(members), options.group_id)

    dist.Backend.register_backend(_THREADED, make, extended_api=True, devices=list(kinds))
    # For fake tensors on hosts without a GPU. Torch 2.11 crashes where a second thread calls it.
    guard = "_ensureCUDADeviceGuardSet"
    if len(kinds) == 1:
        getattr(torch._C, guard)()
    _replace(sys, "excepthook", sys.excepthook)  # every process group that is made wraps it again
    _replace(c10d_module, "_world", _worlds_of_threads)
    _replace(c10d_module, "_new_process_group_helper", in_threads)
    _replace(dist, "init_process_group", init)
    _replace(torch._C, guard, lambda: None)
    _replace(device_mesh, "threading", SimpleNamespace(get_ident=number))
    bindings: Any = torch._C._distributed_c10d
    bindings._set_thread_isolation_mode(True)


def _replace(home: Any, name: str, value: object) -> None:
    _before.append((home, name, getattr(home, name)))
    setattr(home, name, value)


def _restore(mine: object) -> None:
    """Restore what was there before, unless another thread uses it."""
    if _in_use.get("by") is not mine:
        return
    bindings: Any = torch._C._distributed_c10d
    bindings._set_thread_isolation_mode(False)
    while _before:
        home, name, value = _before[-1]
        setattr(home, name, value)
        _before.pop()
    _in_use.clear()


def join_world_of_threads(rank: int, world_size: int) -> None:
    """Make the calling thread a rank, inside of :func:`call_with_worlds_of_threads`."""
    c10d_module: Any = dist.distributed_c10d
    store = dist.HashStore()  # type: ignore[attr-defined]
    c10d_module.init_process_group(_THREADED, store=store, rank=rank, world_size=world_size)


def variables_of_process() -> dict[bytes, bytes]:
    """Return the environment variables themselves.

    To read them one by one, as ``os.environ`` does, takes longer than a turn of a rank.
    """
    environment: Any = os.environ
    found: dict[bytes, bytes] = environment._data
    return found


def handlers_of_process() -> dict[Any, Any]:
    """Return how DTensor computes what it has no rule for, which ``loss_parallel`` changes."""
    dispatcher: Any = DTensor._op_dispatcher
    found: dict[Any, Any] = dispatcher._custom_op_handlers
    return found


def forget_meshes() -> None:
    """Clear what torch keeps forever for each mesh, such as those of ranks that have ended."""
    forgets = (  # not all of them in every torch
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
        getattr(getattr(_redistribute, "_gen_transform_infos", None), "cache_clear", None),
        getattr(_collective_utils.MeshTopoInfo.build_from_mesh, "cache_clear", None),
    )
    for forget in forgets:
        if forget is not None:
            forget()


def name_work(cls: Any) -> None:
    """Give a class of works, which have a ``sender``, the name for which ``recv`` asks."""
    cls._source_rank = lambda work: work.sender


def name_group(cls: Any) -> None:
    """Give a class of process groups what torch asks of a backend, and names before torch 2.13."""
    backend = SimpleNamespace(
        supports_coalescing=False,
        supports_tensor_alloc=lambda device: False,
        options=SimpleNamespace(_timeout=default_pg_timeout),
    )
    cls._get_backend = lambda group, device: backend
    cls._allgather_base = cls.all_gather_single
    cls._reduce_scatter_base = cls.reduce_scatter_single
