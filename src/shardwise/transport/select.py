"""Which transport a mesh dimension gets.

Which composition of messages a ``torch.distributed`` process group gets.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwise.transport.base import Transport
from shardwise.transport.collectives import CollectivesTransport, NcclTransport
from shardwise.transport.gloo import GlooTransport
from shardwise.transport.local import LocalTransport
from shardwise.transport.peers import backend_name
from shardwise.transport.shm.handshake import NotTogetherError, address_limit, meet
from shardwise.transport.shm.transport import ShmTransport

#: The environment variable that is read where no transport is asked for by argument.
VARIABLE = "SHARDWISE_TRANSPORT"


def _collectives(group: dist.ProcessGroup, device: torch.device) -> Transport:
    return CollectivesTransport(group, backend_name(group, device))


def _shared_memory(group: dist.ProcessGroup, device: torch.device) -> Transport:
    if device.type != "cpu":
        raise ValueError(f"transport 'shm' is for tensors on the CPU, not on {device.type}")
    met = _meet(group)
    if isinstance(met, str):
        raise ValueError(f"transport 'shm' cannot be used here: {met}")
    return met


def _fastest(group: dist.ProcessGroup, device: torch.device) -> Transport:
    if device.type == "cpu" and backend_name(group, device) == "gloo":
        met = _meet(group)
        if not isinstance(met, str):
            return met
        if address_limit() is not None:
            warnings.warn(
                f"ranks exchange messages, which is slower than shared memory: {met}. Raise the "
                "limit with 'ulimit -v unlimited', or pass transport='c10d' to expect messages",
                stacklevel=2,
            )
    return c10d_transport(group, device)


def _meet(group: dist.ProcessGroup) -> ShmTransport | str:
    """Shared memory of the ranks of ``group``, or why they have none.

    All ranks have to meet at once, so it happens once in the life of a group: not whenever a
    transport is needed anew, which depends on when one rank or another has let go of the last.
    """
    met = _met.get(group)
    if met is None:
        try:
            met = ShmTransport(group, meet(group))
        except NotTogetherError as error:
            met = str(error)
        _met[group] = met
    return met


#: What came of the meeting of each group. The transport does not hold the group.
_met: weakref.WeakKeyDictionary[dist.ProcessGroup, ShmTransport | str] = weakref.WeakKeyDictionary()

#: The transports in use, by group, device and request. Groups of parameters that are sharded over
#: the same ranks share one: its message numbers and its scratch memory belong to the process group,
#: not to the parameters. Neither group nor transport is kept alive by this.
_InUse = weakref.WeakValueDictionary[tuple[torch.device, str], Transport]
_in_use: weakref.WeakKeyDictionary[dist.ProcessGroup, _InUse] = weakref.WeakKeyDictionary()


def select_transport(
    group: dist.ProcessGroup | None, device: torch.device, requested: str | None = None
) -> Transport:
    """Return the transport of one mesh dimension, the same one as long as it is in use.

    Args:
        group: the process group of the dimension; ``None`` where it has one rank only.
        device: where the full tensors live.
        requested: ``"auto"`` (the fastest that there is here), ``"shm"`` (shared memory, for the
            ranks of one host), ``"c10d"`` (``torch.distributed``, composed
            by backend), ``"collectives"`` (plain ``torch.distributed`` collectives) or ``None``:
            then the environment variable ``SHARDWISE_TRANSPORT`` is asked, and ``"auto"`` is
            taken where it is unset or empty. A dimension of one rank needs no collective and
            always gets the local transport.

    Raises:
        ValueError: an unknown name; the group has no backend for the device; or shared memory is
            asked for where it cannot be, with the reason.
    """
    source = "transport"
    if requested is None:
        source, requested = VARIABLE, os.environ.get(VARIABLE) or "auto"
    if requested not in _CHOICES:
        raise ValueError(f"{source}={requested!r} is unknown: choose one of {', '.join(_CHOICES)}")
    if group is None or group.size() == 1:
        return LocalTransport()
    in_use = _in_use.setdefault(group, weakref.WeakValueDictionary())
    transport = in_use.get((device, requested))
    if transport is None:
        transport = in_use[device, requested] = _CHOICES[requested](group, device)
    return transport


def c10d_transport(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Make the fastest transport that is known for the backend.

    Args:
        group: the process group of a mesh dimension.
        device: where the full tensors live. Of a group with several backends, such as
            ``"cpu:gloo,cuda:nccl"``, the one for this device's type counts.
    """
    backend = backend_name(group, device)
    if backend == "gloo" and device.type == "cpu":
        return GlooTransport(group)
    if backend == "nccl" and device.type == "cuda":
        return NcclTransport(group)
    return CollectivesTransport(group, backend)


_CHOICES: dict[str, Callable[[dist.ProcessGroup, torch.device], Transport]] = {
    "auto": _fastest,
    "shm": _shared_memory,
    "c10d": c10d_transport,
    "collectives": _collectives,
}
