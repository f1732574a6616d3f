"""Where shards, their gradients and optimizer states are kept: on the device, a host or a disk."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from shardwise._torch import autograd
from shardwise.base import devices
from shardwise.base.errors import OffloadError

if TYPE_CHECKING:
    from shardwise.base.scratch.file import ScratchFile


@dataclass
class DiskOffloadPolicy(OffloadPolicy):
    """Keep shards, or activations (``offload_activations``), in a file on a local disk.

    The file has no name, and vanishes with this process, however it ends. Shards are mapped: they
    are tensors as ever, whose memory the kernel reads and writes as it is used. Shards of less than
    64 KiB on a rank stay in memory, and so do those of tensor subclasses. On an accelerator, a
    shard on the disk takes the way over the host.

    Args:
        folder: a folder of a local disk; made if it does not exist. ``~`` is the home of the user.

    Raises:
        ValueError: the folder is none.

    Sources: Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857.
    """

    folder: str | os.PathLike[str]

    def __post_init__(self) -> None:
        found = self.folder
        if not isinstance(found, str | os.PathLike) or not os.fspath(found):
            raise ValueError(
                f"DiskOffloadPolicy: found {found!r}, expected a folder of a local disk, such as "
                '"/scratch"'
            )


@dataclass
class Offload:
    """Where the shards and sharded gradients of one ``fully_shard`` call are stored.

    On a CPU mesh, ``CPUOffloadPolicy`` has nothing to offload, and changes nothing. The parameters
    and groups of the call share one object: groups wait for the copies that parameters start.

    Attributes:
        enabled: whether they are stored on the host, apart from ``device``.
        pin_memory: whether host memory is pinned, so that copies overlap with compute. Never on
            devices without pinned memory, whatever the policy says.
        device: the device on which this rank computes.
        disk: what keeps the shards, with :class:`DiskOffloadPolicy`.
    """

    enabled: bool
    pin_memory: bool
    device: torch.device
    disk: ScratchFile | None = None
    # The last copy to the host on each stream. Earlier ones on that stream end before it.
    _copied: dict[torch.Stream, torch.Event] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, policy: OffloadPolicy, device: torch.device) -> Offload:
        """Read a policy for a mesh on ``device``.

        Raises:
            OffloadError: no file can be made in the folder.
        """
        disk = None
        if isinstance(policy, DiskOffloadPolicy):
            from shardwise.base.scratch.file import file_in

            disk = file_in(Path(policy.folder).expanduser())
        offloads = isinstance(policy, DiskOffloadPolicy | CPUOffloadPolicy)
        enabled = offloads and device.type != "cpu"
        pin = isinstance(policy, CPUOffloadPolicy) and policy.pin_memory
        return cls(enabled, enabled and pin and devices.pins(device), device, disk)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Offload:
        """Copy for copied modules, whose gradients are not being copied to the host."""
        return dataclasses.replace(self, _copied={})

    @property
    def home(self) -> torch.device:
        """The device that shards are stored on."""
        return devices.CPU if self.enabled else self.device

    def place(self, shard: torch.Tensor, fqn: str) -> torch.Tensor:
        """Move ``shard`` to where it is stored. Shards on the meta device stay there.

        Args:
            shard: the shard.
            fqn: the name of the parameter, for messages.

        Raises:
            OffloadError: the disk is full, or fails.
        """
        if shard.is_meta or not (self.enabled or self.disk):
            return shard
        if self.is_on_disk(shard) and shard.is_contiguous():
            return shard
        if self._goes_to_disk(shard):
            return self.copy(shard, fqn)
        shard = shard.to(self.home)
        return devices.pinned(shard) if self.pin_memory else shard

    def is_on_disk(self, shard: torch.Tensor) -> bool:
        """Whether the memory of ``shard`` is a part of the file."""
        return self.disk is not None and self._goes_to_disk(shard) and self.disk.holds(shard)

    def copy(self, shard: torch.Tensor, fqn: str) -> torch.Tensor:
        """Copy ``shard`` to where it is stored, in memory of its own, one row after the other.

        Args:
            shard: the shard.
            fqn: the name of the parameter, for messages.

        Raises:
            OffloadError: the disk is full, or fails.
        """
        if self._goes_to_disk(shard) and not shard.is_meta:
            made = self.empty_like(shard, self.home, fqn).copy_(shard)
            self.let_go(made)
            return made
        # Tensor subclasses usually implement clone(), and rarely empty_like().
        return self.place(shard.clone(memory_format=torch.contiguous_format), fqn)

    def empty_like(self, shard: torch.Tensor, device: torch.device, fqn: str) -> torch.Tensor:
        """Make an uninitialized shard where it is stored.

        Args:
            shard: a shard of the same shape and dtype, maybe on the meta device.
            device: the device to make it on, unless it is offloaded.
            fqn: the name of the parameter, for messages.

        Raises:
            OffloadError: the disk is full, or fails.
        """
        if self.disk is None or not self._goes_to_disk(shard):
            return self.place(torch.empty_like(shard, device=device), fqn)
        try:
            memory = self.disk.memory(shard.nbytes)
        except OffloadError as error:
            raise OffloadError(
                f"{fqn}, of which rank {dist.get_rank()} has {tuple(shard.shape)}: {error}; make "
                "room, or take another folder"
            ) from error
        return memory.view(shard.dtype).view(shard.shape)

    def load(self, shard: torch.Tensor) -> None:
        """Bring a shard that is on the disk into memory.

        Raises:
            OffloadError: it cannot be read, or something could not be written.
        """
        if self.disk is not None and self._goes_to_disk(shard):
            self.disk.load(shard)

    def read_ahead(self, shard: torch.Tensor) -> None:
        """Start to bring a shard that is on the disk into memory."""
        if self.disk is not None and self._goes_to_disk(shard):
            self.disk.read_ahead(shard)

    def let_go(self, shard: torch.Tensor) -> None:
        """Take a shard that is on the disk out of memory. It stays what it is."""
        if self.disk is not None and self._goes_to_disk(shard):
            self.disk.let_go(shard)

    def _goes_to_disk(self, shard: torch.Tensor) -> bool:
        """Whether a disk keeps such shards."""
        if self.disk is None:
            return False
        from shardwise.base.scratch.file import SMALLEST

        plain = type(shard) in (torch.Tensor, nn.Parameter) and shard.layout is torch.strided
        return plain and shard.nbytes >= SMALLEST

    def grad_to_host(self, grad: torch.Tensor, sharded: nn.Parameter) -> torch.Tensor:
        """Start to copy a reduced gradient to the host. :meth:`wait` waits for it.

        If ``sharded`` has hooks that read the gradient at once, this waits.
        """
        if not self.pin_memory:
            return devices.copy_to_host(grad, devices.Copy.PAGEABLE)
        if autograd.has_post_accumulate_hooks(sharded):
            return devices.copy_to_host(grad, devices.Copy.PINNED)
        host = devices.copy_to_host(grad, devices.Copy.STARTED)
        stream = devices.current_stream(self.device)
        self._copied[stream] = stream.record_event()
        return host

    def wait(self) -> None:
        """Block until all gradients have been copied to the host."""
        while self._copied:
            self._copied.popitem()[1].synchronize()
