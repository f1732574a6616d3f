"""Where in a training step a module or a group is."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """``IDLE -> FORWARD -> IDLE -> BACKWARD -> REDUCED -> IDLE``.

    ``REDUCED`` is a group's alone: its gradients have been handed to a reduction in this backward.
    """

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCED = "reduced"
