"""The one checkpoint that a process is saving while it trains on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise._torch import c10d, dtensor
from shardwise.checkpoint.ranks.state import local_of
from shardwise.errors import CheckpointError
from shardwise.transport.peers import new_group


class Handle:
    """A checkpoint that is being saved.

    Args:
        work: saves it.
        path: where.
    """

    def __init__(self, work: Callable[[], None], path: Path) -> None:
        self.path = path
        self._work = work
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name=f"saving {path.name}")
        self._thread.start()

    def done(self) -> bool:
        """Whether it is saved, or has failed."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is whole and on the disk.

        Args:
            timeout: seconds to wait at most.

        Returns:
            Where it is.

        Raises:
            CheckpointError: it could not be saved.
            TimeoutError: it takes longer.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"saving {self.path}: is not done after {timeout} s")
        if self._error is not None:
            self._told = True
            raise CheckpointError(str(self._error)) from self._error
        return self.path

    def settle(self) -> None:
        """Wait, and raise an error that nobody has been told yet.

        Raises:
            CheckpointError: it could not be saved.
        """
        self._thread.join()
        if not self._told:
            self.result()

    def forget(self) -> None:
        """Count its error as told: the caller knows it already."""
        self._told = True

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            del self._work  # and the copies with it


# One a process, because the host's memory is: a second would need room for copies of its own.
_current: Handle | None = None
# Of each group, the one beside it that checkpoints have to themselves. It goes with the group.
_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def start(work: Callable[[], None], path: Path) -> Handle:
    """Begin to save; :func:`wait` has been called before."""
    global _current
    _current = Handle(work, path)
    return _current


def wait() -> None:
    """Wait for what is being saved, if anything is.

    Raises:
        CheckpointError: it could not be saved, and nobody has been told yet.
    """
    global _current
    before, _current = _current, None
    if before is not None:
        before.settle()


def group_for(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group of the same ranks, on gloo, that training does not use. All ranks call it alike.

    Args:
        group: the default one if there is none.

    Returns:
        ``None`` where there are no process groups.
    """
    if not dist.is_initialized():
        return None
    group = group or dist.group.WORLD
    assert group is not None
    if group not in _groups:
        _groups[group] = new_group(
            dist.get_process_group_ranks(group),
            timeout=timedelta(seconds=c10d.timeout_of(group)),
            backend="gloo",
        )
    return _groups[group]


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the host's memory, complete when this returns.

    What several names share is copied once.
    """
    made: dict[tuple[object, ...], Tensor] = {}
    copied: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            local = local_of(tensor)
            key = (
                *(local.data_ptr(), local.shape, local.stride(), local.dtype),
                *(local.is_conj(), local.is_neg()),
            )
            if key not in made or not local.numel():
                made[key] = _copy(local)
            spec = dtensor.spec_of(tensor) if isinstance(tensor, DTensor) else None
            copied[name] = made[key] if spec is None else dtensor.wrap_local(made[key], spec)
    if any(tensor.device.type == "cuda" for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copied


def _copy(local: Tensor) -> Tensor:
    """A copy; from a GPU it is only begun."""
    if local.device.type == "cpu":
        return local.clone(memory_format=torch.contiguous_format)
    copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.device.type == "cuda")
    return copy.copy_(local, non_blocking=True)
