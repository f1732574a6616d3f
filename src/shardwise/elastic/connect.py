"""How a rank joins the default process group, under any launcher.

    ours, torchrun     torch's agent serves the store, under torchrun one for all attempts of a job
    Ray, the user      the process group is there already; its creator ends it
    any other          MASTER_ADDR and MASTER_PORT, where rank 0 serves the store

Nothing here imports torch before a rank connects.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from shardwise.base.errors import UserError
from shardwise.elastic.errors import MovedOn, Parted
from shardwise.elastic.world import World

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torch's: "True" if its agent serves the store
_ATTEMPT = "shardwise/attempt"  # the key under which rank 0 names the attempt
_POLL = 0.02  # seconds between looks into the store

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def connected(world: World, backend: str, timeout: float | None = None) -> Iterator[None]:
    """Be a member of the default process group of ``torch.distributed`` during the context.

    A process group that exists already is used, and left to its creator.

    Args:
        world: this rank.
        backend: for ``init_process_group``, e.g. ``gloo``.
        timeout: seconds that a collective may take; None for torch's default. A process group that
            exists keeps its own.

    Raises:
        PeerLostError: another rank died, or never started.
        UserError: a process group exists, for another world or without a backend of ``backend``.
    """
    import torch.distributed as dist

    from shardwise.transport.peers import Peers, connecting

    exists = dist.is_initialized()
    if exists:
        _check_group(world, backend)
    else:
        with connecting(world.rank, world.size):
            _connect(world, backend, None if timeout is None else timedelta(seconds=timeout))
    moved: MovedOn | None = None
    try:
        yield
    except MovedOn as error:
        moved = error
    # Only after success: if a peer is gone, shutting down may wait for it. The barrier keeps the
    # store of rank 0 alive until no rank needs it.
    if not isinstance(moved, Parted):  # else some ranks have left
        with Peers().collective("the barrier at the end"):
            dist.barrier()
    if not exists:
        dist.destroy_process_group()
    if moved is not None:
        raise moved


def _check_group(world: World, backend: str) -> None:
    """Check that the default process group is that of ``world`` and has all backends."""
    import torch.distributed as dist

    place = f"rank {dist.get_rank()} of {dist.get_world_size()}"
    if place != f"rank {world.rank} of {world.size}":
        raise UserError(
            f"process group: found {place}, expected rank {world.rank} of {world.size}, as RANK "
            "and WORLD_SIZE say"
        )
    config = dist.get_backend_config()
    found = dist.BackendConfig(dist.Backend(config)).get_device_backend_map()
    # One name alone stands for all devices, of which only the CPU is used.
    needed = backend.split(",") if ":" in backend else [f"cpu:{backend}"]
    if not {*needed} <= {f"{device}:{name}" for device, name in found.items()}:
        raise UserError(
            f"process group: found backend {config}, expected {backend}; with Ray Train, pass "
            f"torch_config=TorchConfig(backend={backend!r}) to TorchTrainer"
        )


def _connect(world: World, backend: str, timeout: timedelta | None) -> None:
    """Create the default process group."""
    import torch.distributed as dist
    from torch.distributed.constants import default_pg_timeout

    store: Any = None
    awaited = "for the other ranks to connect"
    if os.environ.get(_AGENT_STORE) == str(True):  # it outlives its ranks
        limit = timeout or default_pg_timeout
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*where, timeout=limit)  # type: ignore[attr-defined]
        attempt = agree_on_attempt(store, world, limit.total_seconds())
        store = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
        awaited = "for connections to the other ranks, which are there; is a firewall between them?"
    with _reported_wait(world, awaited):
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
        )


@contextlib.contextmanager
def _reported_wait(world: World, what: str) -> Iterator[None]:
    """Log a warning if the block takes long."""
    from shardwise.transport import peers

    def tell() -> None:
        _log.warning("rank %s has waited %.0f s %s", world.rank, peers.WARNING_SECONDS, what)

    timer = threading.Timer(peers.WARNING_SECONDS, tell)
    timer.daemon = True
    try:
        timer.start()
        yield
    finally:
        timer.cancel()


def agree_on_attempt(store: Any, world: World, timeout: float) -> str:
    """Return a prefix for keys that only the ranks of this attempt know.

    The store of torch's agent serves every attempt of a job, and keeps the keys of all: a rank that
    is started again may read the address of a peer that has ended, and fail to connect
    (https://github.com/pytorch/pytorch/issues/135712; found again in torch 2.13). No variable of
    the environment tells attempts apart on all hosts, since each agent counts its own restarts. So
    rank 0 names the attempt, and answers each rank by a name that the rank has chosen for itself.

    Args:
        store: of all attempts.
        world: this rank.
        timeout: seconds to wait for the others.

    Raises:
        PeerLostError: a rank did not come in time.
    """
    me, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    if world.rank == 0:
        store.set(_ATTEMPT, me)
        for rank in range(1, world.size):
            key = f"{_ATTEMPT}/{me}/{rank}"
            _wait(functools.partial(store.check, [key]), world, rank, deadline)
            store.set(f"{_ATTEMPT}/{me}/{store.get(key).decode()}", "")
        return f"{_ATTEMPT}/{me}"
    known = ""

    def is_answered() -> bool:
        nonlocal known
        if not store.check([_ATTEMPT]):
            return False
        if (attempt := store.get(_ATTEMPT).decode()) != known:  # at first perhaps an earlier one
            known = attempt
            store.set(f"{_ATTEMPT}/{known}/{world.rank}", me)
        return bool(store.check([f"{_ATTEMPT}/{known}/{me}"]))

    _wait(is_answered, world, 0, deadline)
    return f"{_ATTEMPT}/{known}"


def _wait(happens: Callable[[], bool], world: World, peer: int, deadline: float) -> None:
    """Wait until a rank has done its part."""
    from shardwise.base.errors import PeerLostError

    with _reported_wait(world, f"for rank {peer} of {world.size} to connect"):
        while not happens():
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"rank {world.rank} waited for rank {peer} of {world.size}, which did not "
                    "connect; look for the first error in its output"
                )
            time.sleep(_POLL)
