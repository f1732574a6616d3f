"""NCCL's process group, as far as ordering goes, for one rank of a world of several.

- A group has a stream of its own. An asynchronous collective waits for what is on the current
  stream when it is launched; ``wait()`` lets the current stream wait for the collective.
- A synchronous one (``async_op=False``) runs on the current stream.
- A work holds its tensors until ``wait()``. If nobody waits, they are held until a thread of the
  backend has seen the end of the collective, so until it can do no harm.
- Collectives launched together are one launch.
- Tensors of the host have a backend of their own, which uses no stream.

The other ranks do not exist: a collective writes to its output and says nothing of the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.streams.device import (
    NAME,
    Device,
    Event,
    Stream,
    current_device,
    set_functional_collective,
    type_of,
)

#: The name of the backend.
BACKEND = "modeled"


class Work:
    """A collective under way."""

    def __init__(self, group: ModeledGroup, event: Event, held: Sequence[torch.Tensor]) -> None:
        self._group = group
        self._event = event
        self._held = list(held)

    def wait(self, timeout: object = None) -> bool:
        """Let the current stream wait, and let go of the tensors."""
        current_device().current.wait_event(self._event)
        self._held.clear()
        return True

    def is_completed(self) -> bool:
        """Whether it is known to be over."""
        return False

    def __del__(self) -> None:
        # Nobody waited. The backend lets go of the tensors when the collective is over.
        self._group.shelf.extend(self._held)


_dist: Any = dist
_c10d: Any = dist.distributed_c10d
_ProcessGroup: Any = dist.ProcessGroup


class ModeledGroup(_ProcessGroup):
    """A process group of the modeled device.

    Attributes:
        stream: the stream of its collectives.
        shelf: tensors of collectives that nobody waited for.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._stream: Stream | None = None
        self.shelf: list[torch.Tensor] = []

    @property
    def stream(self) -> Stream:
        """The stream of its collectives."""
        if self._stream is None:
            self._stream = Stream(name=current_device().name_stream("NCCL"))
        return self._stream

    def size(self) -> int:
        """The number of ranks."""
        return self._size

    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def pg_name(self) -> Any:
        """The name that torch gave the group."""
        return _c10d._world.pg_names[self]

    @property
    def group_name(self) -> Any:
        """The name that torch gave the group."""
        return self.pg_name

    def getBackendName(self) -> str:  # noqa: N802 (torch's)
        """The name of the backend."""
        return BACKEND

    def launch(
        self,
        what: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        *,
        asynchronous: bool,
    ) -> Work:
        """Launch one or more collectives."""
        model = current_device()
        if all(type_of(tensor) == "cpu" for tensor in (*reads, *writes)) and (reads or writes):
            model.access(model.host, what, reads, writes)
            return Work(self, Event(), [])
        stream = model.current
        if asynchronous:
            before, stream = stream, self.stream
            stream.wait_stream(before)
        model.collectives += 1
        model.access(stream, what, reads, writes)
        return Work(self, stream.record_event(), [*reads, *writes] if asynchronous else [])

    # -- what torch calls ----------------------------------------------------------------------

    def all_gather_single(self, output: Any, data: Any, opts: Any = None) -> Any:
        return self.launch("all-gather", [data], [output], asynchronous=_is_async(opts))

    def reduce_scatter_single(self, output: Any, data: Any, opts: Any = None) -> Any:
        return self.launch("reduce-scatter", [data], [output], asynchronous=_is_async(opts))

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self.launch("all-reduce", tensors, tensors, asynchronous=_is_async(opts))

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self.launch("broadcast", tensors, tensors, asynchronous=_is_async(opts))

    def all_to_all_single(
        self, output: Any, data: Any, out_sizes: Any = None, in_sizes: Any = None, opts: Any = None
    ) -> Any:
        return self.launch("all-to-all", [data], [output], asynchronous=_is_async(opts))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.launch("all-gather", inputs, outputs, asynchronous=_is_async(opts))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.launch("reduce-scatter", inputs, outputs, asynchronous=_is_async(opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self.launch("all-reduce", tensors, tensors, asynchronous=_is_async(opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        flat = [each for group in outputs for each in group]
        return self.launch("all-gather", inputs, flat, asynchronous=_is_async(opts))

    def barrier(self, opts: Any = None) -> Any:
        return self.launch("barrier", [], [], asynchronous=False)

    # The names of earlier versions of torch.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _is_async(opts: Any) -> bool:
    return bool(getattr(opts, "asyncOp", True))


# -- collectives that are operations (those of DTensor) -------------------------------------------

_under_way: dict[int, tuple[Work, torch.Tensor]] = {}


def _functional_collective(
    model: Device, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Launch a functional collective, or wait for one."""
    if name == "_c10d_functional::wait_tensor":
        found = _under_way.pop(args[0].untyped_storage()._cdata, None)
        if found is not None:
            found[0].wait()
        return args[0]
    out = func(*args, **kwargs)
    assert isinstance(out, torch.Tensor), f"{name}: not modeled"
    if out is not args[0]:
        model.allocate(out.untyped_storage(), out.device)
    group: Any = _c10d._resolve_process_group(args[-1])
    work = group.launch(
        name.removeprefix("_c10d_functional::"), [args[0]], [out], asynchronous=True
    )
    _under_way[out.untyped_storage()._cdata] = work, out
    return out


set_functional_collective(_functional_collective)


# -- a world ------------------------------------------------------------------------------------


def _make_group(store: Any, rank: int, size: int, timeout: Any) -> ModeledGroup:
    return ModeledGroup(rank, size)


@contextmanager
def world(shape: Sequence[int], rank: int = 0) -> Iterator[DeviceMesh]:
    """Be one rank of a world.

    Args:
        shape: of the mesh: ``(shard,)`` or ``(replicate, shard)``.
        rank: this rank.

    Yields:
        The mesh.
    """
    size = 1
    for each in shape:
        size *= each
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make_group, devices=[NAME, "cpu"])
    dist.init_process_group(BACKEND, store=_dist.HashStore(), rank=rank, world_size=size)
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    try:
        ranks = torch.arange(size, device="cpu").view(*shape)
        yield DeviceMesh(NAME, ranks, mesh_dim_names=names)
    finally:
        _under_way.clear()
        dist.destroy_process_group()
