"""A backend of ``torch.distributed`` for the device of :mod:`tests.devices.device`: gloo inside.

It can do what gloo can, on tensors of the device and of the host. Torch and the runtime know it by
a name of its own, so they take nothing for granted.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from tests.devices.device import NAME, host_view

#: The name of the backend.
BACKEND = "pretend_ccl"

_dist: Any = dist
_c10d: Any = dist.distributed_c10d
_ProcessGroup: Any = dist.ProcessGroup


class PretendGroup(_ProcessGroup):
    """A process group whose collectives gloo does, on the memory of the device.

    Attributes:
        calls: the names of the calls with tensors on the device.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._gloo = _dist.ProcessGroupGloo(store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._register_backend(torch.device("cpu"), kind, self._gloo)
        self._set_default_backend(kind)  # which names the group to a recorder of torch 2.15
        self.calls: list[str] = []

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    @property
    def pg_name(self) -> Any:
        return _c10d._world.pg_names[self]

    @property
    def group_name(self) -> Any:
        return self.pg_name

    def getBackendName(self) -> str:  # noqa: N802 (torch's)
        return BACKEND


def _forwarded(name: str, gloo: str) -> Any:
    def call(self: PretendGroup, *args: Any, **kwargs: Any) -> Any:
        def view(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == NAME:
                self.calls.append(name)
            return host_view(tensor)

        args, kwargs = tree_map_only(torch.Tensor, view, (args, kwargs))
        return getattr(self._gloo, gloo)(*args, **kwargs)

    return call


for _name in (
    *("allgather", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier"),
    *("broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter", "scatter"),
    *("send", "_allgather_base", "_reduce_scatter_base"),
):
    setattr(PretendGroup, _name, _forwarded(_name, _name))
PretendGroup.all_gather_single = _forwarded("all_gather_single", "_allgather_base")
PretendGroup.reduce_scatter_single = _forwarded("reduce_scatter_single", "_reduce_scatter_base")
PretendGroup.all_to_all_single = _forwarded("all_to_all_single", "alltoall_base")


def _one_by_one(single: str) -> Any:
    def call(self: PretendGroup, outputs: Any, inputs: Any, *args: Any) -> Any:
        works = [getattr(self, single)(*each, *args) for each in zip(outputs, inputs, strict=True)]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    return call


for _names, _single in (
    (("all_gather_single_coalesced", "allgather_into_tensor_coalesced"), "all_gather_single"),
    (
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        "reduce_scatter_single",
    ),
):
    for _name in _names:
        setattr(PretendGroup, _name, _one_by_one(_single))


def register_backend() -> None:
    """Make the backend the default one of the device, in this process."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, PretendGroup, devices=[NAME])
