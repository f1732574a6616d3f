"""``subscribe``: the newest published weights, read by any process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch

from shardwise.base.arguments import check_arguments, check_timeout
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.place import place_of
from shardwise.weights.folder import FolderReader
from shardwise.weights.memory import MemoryReader
from shardwise.weights.version import Version, quoted


def subscribe(
    name: str, *, at: str | os.PathLike[str] | None = None, timeout: float = 60.0
) -> Subscription:
    """Read weights that :func:`shardwise.publish` publishes. Any process may, at any time.

        weights = shardwise.subscribe("policy")
        model.load_state_dict(dict(weights))
        while training:
            weights.wait()                                  # for a version newer than the last one
            engine.load_weights(weights)

    Each iteration gives all tensors of the newest version by name: full, on the CPU, and of one
    version. Of weights in memory nothing is copied: tensors share it with the publisher, which
    leaves it alone as long as one of them exists. So drop them before long. What a reader writes to
    them stays in its process. Weights in a folder are read into memory of the process.

    Args:
        name: what they are published as.
        at: the folder that they are published to, or its URL in an object store, at which readers
            look once a second; ``None`` for memory of this host.
        timeout: longest time to wait for a version, in seconds.

    Returns:
        The weights, as an iterable of names and tensors.

    Raises:
        ValueError: ``name`` cannot be one, or ``at`` is a URL of no store, or has credentials.
    """
    check_arguments(subscribe, locals())
    reader = MemoryReader(name) if at is None else FolderReader(place_of(at) / quoted(name))
    return Subscription(name, reader, timeout)


class Subscription:
    """The newest version of published weights, as an iterable of names and full tensors.

    :func:`subscribe` makes it.

    Args:
        name: what they are published as.
        reader: what reads them.
        timeout: longest time to wait for a version, in seconds.
    """

    def __init__(self, name: str, reader: MemoryReader | FolderReader, timeout: float) -> None:
        self._name = name
        self._reader = reader
        check_timeout("timeout", timeout)
        self._timeout = timeout
        self._read: Version | None = None

    @property
    def version(self) -> int:
        """The number of the version that was read last; 0 if none was."""
        return 0 if self._read is None else self._read.number

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read the newest version; wait for the first one if there is none yet.

        Raises:
            CheckpointError: there is none within the timeout, or what there is cannot be read.
        """
        deadline = time.monotonic() + self._timeout
        # What is kept is changed later, whatever mode and default device that read has.
        with torch.inference_mode(False), torch.device("cpu"):
            while (found := self._reader.read()) is None:
                self._sleep(deadline)
        self._read, tensors = found
        return tensors

    def wait(self, timeout: float | None = None) -> int:
        """Wait for a version other than the one that was read last.

        Args:
            timeout: longest time to wait, in seconds; that of the subscription if ``None``.

        Returns:
            The number of the newest version.

        Raises:
            CheckpointError: there is none within the timeout, or what there is cannot be read.
        """
        if timeout is not None:
            check_timeout("timeout", timeout)
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        while (newest := self._reader.newest()) is None or newest == self._read:
            self._sleep(deadline)
        return newest.number

    def _sleep(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            read = f"version {self.version} again" if self._read else "no version"
            raise CheckpointError(
                f"subscribing to {self._name!r}: found {read} within the timeout, expected a new "
                "one; is the trainer alive, and does it call update()?"
            )
        time.sleep(max(0.0, min(self._reader.look_seconds, deadline - time.monotonic())))
