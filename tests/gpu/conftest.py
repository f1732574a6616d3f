"""The one place that decides which devices the tests of this package run on."""

from __future__ import annotations

import pytest

from tests.gpu.devices import Devices


@pytest.fixture(scope="session")
def devices() -> Devices:
    """``devices.run(check, world_size, *args)``: ranks on GPUs, or on CPUs where there is none."""
    return Devices.find()
