"""In which order groups run, and so which one to unshard ahead of time in backward.

Backward follows the reverse of the forward that it belongs to. Every rank runs the same model, so
every rank looks ahead in the same way and issues its collectives in the same order. Forward does
not look ahead by itself: what a program writes to the next group before that group's turn would be
missed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from shardwise.sharding.group import ParamGroup


class WayBack:
    """Lives as long as autograd can go back through a forward, whose marks on graphs hold it.

    Args:
        groups: that the forward ran with, unsharded.
    """

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._fulls = {group: group.makes for group in groups}

    def leads_to(self, group: ParamGroup) -> bool:
        """Whether gradients arrive at the full parameters that ``group`` has now."""
        return self._fulls.get(group) == group.makes


class RunOrder:
    """The order of groups in forward, and in backward."""

    def __init__(self) -> None:
        # Forwards that are over and whose backward has not come, in order, with multiplicity: a
        # group that ran twice has two backwards.
        self._finished: list[ParamGroup] = []
        self._positions: dict[ParamGroup, list[tuple[int, weakref.ref[WayBack]]]] = {}
        # Of those, how many were there when the forward now running began.
        self._finished_before = 0

    def begin_forward(self) -> None:
        """Note that the outermost module's forward begins."""
        self._finished_before = len(self._finished)

    def abort_forward(self) -> None:
        """Forget the forward now running: it raised, and no backward follows it."""
        while len(self._finished) > self._finished_before:
            self._positions[self._finished.pop()].pop()

    def leave_forward(self, group: ParamGroup, way_back: WayBack) -> None:
        """Note that ``group``'s forward is over and that its backward may come."""
        position = len(self._finished), weakref.ref(way_back)
        self._positions.setdefault(group, []).append(position)
        self._finished.append(group)

    def enter_backward(self, group: ParamGroup) -> ParamGroup | None:
        """Note that ``group`` begins its backward.

        Returns:
            The group whose backward is expected next.
        """
        positions = self._positions.get(group)
        if not positions:
            return None  # a second backward through the same forward
        position, _ = positions.pop()
        return self._finished[position - 1] if position > 0 else None

    def runs_again(self, group: ParamGroup) -> bool:
        """Whether another backward of ``group`` may come: its forward ran more often.

        Not of a forward whose outputs were let go of.
        """
        return any(way_back() is not None for _, way_back in self._positions.get(group, ()))

    def end_backward(self) -> None:
        """Forget the forwards whose backward is now over."""
        self._finished.clear()
        self._positions.clear()
        self._finished_before = 0
