"""Activations that a planned training keeps on a host or a disk: bytes, and copies to and fro."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import OffloadPolicy

from shardwise.base import devices
from shardwise.base.activations import ActivationStore, Kept, StorePolicy
from shardwise.base.observe import Activity, Memory, Route
from shardwise.base.places import folder_of_place
from shardwise.insight.planning.settings import Settings, SettingsError

if TYPE_CHECKING:
    from shardwise.insight.planning.recorder import RehearsalRecorder

#: What copies between a device and its host travel over, beside the dimensions of a mesh.
HOST_LINK = Route("host", "host", 2)


class Activations:
    """What takes the place of the host or the disk in a rehearsal.

    Args:
        settings: where activations go.

    Attributes:
        policy: for :func:`shardwise.offload_activations`; ``None``: activations stay.
        recorder: writes down what happens.
        copies: whether they cross a link that is known: that of an accelerator to its host.
        now: bytes that are kept.
        most: the most that ever were.

    Raises:
        SettingsError: there is no other place.
    """

    def __init__(self, settings: Settings) -> None:
        self.recorder: RehearsalRecorder | None = None
        self.copies = settings.device_type != devices.CPU.type
        self.now = self.most = 0
        self.policy: OffloadPolicy | None = None
        if settings.place_of_activations is None:
            return
        if not can_offload(settings):
            expected = "disk:FOLDER: the memory of the host is that of CPUs themselves"
            raise SettingsError("offload_activations", settings.place_of_activations, expected)
        keep = functools.partial(_Planned, self)
        self.policy = StorePolicy(
            ActivationStore(lambda tensor: tensor.device.type != "meta", keep)
        )

    def add(self, nbytes: int) -> None:
        """Count what is kept."""
        self.now += nbytes
        self.most = max(self.most, self.now)

    def start(self, nbytes: int) -> int:
        """Note that a copy over the link begins; return its number for the recorder."""
        assert self.recorder is not None
        if not self.copies:
            return 0
        return self.recorder.collective(Activity.COPY, "", HOST_LINK, nbytes, 1)

    def end(self, number: int) -> None:
        """Note that the device waits for a copy."""
        assert self.recorder is not None
        self.recorder.end(number)


class _Planned(Kept):
    """Memory that is kept nowhere."""

    def __init__(self, activations: Activations, source: torch.Tensor) -> None:
        super().__init__(source)
        self._activations = activations
        activations.add(self.nbytes)
        self._leaving = source if activations.copies else None
        self._like = source.to("meta")
        self._arriving: torch.Tensor | None = None
        self._copy = activations.start(self.nbytes)

    def settle(self) -> None:
        self._activations.end(self._copy)
        self._leaving = None

    def let_go(self) -> None:
        self._arriving = None

    def _start(self) -> None:
        if self._activations.copies:
            self._bring_back()

    def _load(self) -> torch.Tensor:
        if self._leaving is not None:
            return self._leaving
        made = self._bring_back()
        self._activations.end(self._copy)
        return made

    def _bring_back(self) -> torch.Tensor:
        if self._leaving is not None:
            return self._leaving
        if self._arriving is None:
            self._arriving = torch.empty_like(self._like, device=self.device)
            recorder = self._activations.recorder
            assert recorder is not None
            recorder.label(self._arriving, Memory.ACTIVATIONS, "")
            self._copy = self._activations.start(self.nbytes)
        return self._arriving

    def __del__(self) -> None:
        self._activations.add(-self.nbytes)


def can_offload(settings: Settings) -> bool:
    """Whether there is another place than that where activations are computed."""
    place = settings.place_of_activations
    on_cpu = settings.device_type == devices.CPU.type
    return place is None or not on_cpu or folder_of_place(place) is not None
