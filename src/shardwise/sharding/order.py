"""In which order groups run, and so which one to unshard ahead of time.

Forward follows the order of the last forward; backward follows the reverse of the forward that it
belongs to. Every rank runs the same model, so every rank looks ahead in the same way and issues
its collectives in the same order.
"""

from __future__ import annotations

from shardwise.sharding.group import ParamGroup


class RunOrder:
    """The order of groups in the forward now running, in the one before, and in backward."""

    def __init__(self) -> None:
        self._last_forward: list[ParamGroup] = []
        self._forward: list[ParamGroup] = []
        self._as_expected = True
        # Forwards that are over and whose backward has not come, in order, with multiplicity: a
        # group that ran twice has two backwards.
        self._finished: list[ParamGroup] = []
        self._positions: dict[ParamGroup, list[int]] = {}
        # Of those, how many were there when the forward now running began.
        self._finished_before = 0

    def begin_forward(self) -> None:
        """Note that the outermost module's forward begins."""
        self._forward.clear()
        self._as_expected = True
        self._finished_before = len(self._finished)

    def enter_forward(self, group: ParamGroup) -> ParamGroup | None:
        """Note that ``group`` begins its forward.

        Returns:
            The group to unshard next, if this forward has run as the last one so far.
        """
        position = len(self._forward)
        self._forward.append(group)
        expected = self._last_forward[position : position + 2]
        self._as_expected = self._as_expected and bool(expected) and expected[0] is group
        return expected[1] if self._as_expected and len(expected) == 2 else None

    def end_forward(self) -> None:
        """Note that the outermost module's forward is over."""
        if self._forward:
            self._last_forward, self._forward = self._forward, []

    def abort_forward(self) -> None:
        """Forget the forward now running: it raised, and no backward follows it."""
        while len(self._finished) > self._finished_before:
            self._positions[self._finished.pop()].pop()
        self._forward.clear()

    def leave_forward(self, group: ParamGroup) -> None:
        """Note that ``group``'s forward is over and that its backward may come."""
        self._positions.setdefault(group, []).append(len(self._finished))
        self._finished.append(group)

    def enter_backward(self, group: ParamGroup) -> ParamGroup | None:
        """Note that ``group`` begins its backward.

        Returns:
            The group whose backward is expected next.
        """
        positions = self._positions.get(group)
        if not positions:
            return None  # a second backward through the same forward
        position = positions.pop()
        return self._finished[position - 1] if position > 0 else None

    def end_backward(self) -> None:
        """Forget the forwards whose backward is now over."""
        self._finished.clear()
        self._positions.clear()
        self._finished_before = 0

    def reset(self) -> None:
        """Forget a forward or backward that did not end."""
        self._forward.clear()
        self.end_backward()
