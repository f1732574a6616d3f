"""The states of a group, and the moves between them.

            unshard()              wait_for_unshard()
  SHARDED ------------> UNSHARDING ------------------> UNSHARDED
     ^                       ^                          |     |
     |                       | unshard()                |     |
     |                       +--------- KEPT <----------+     |
     |                                    reshard_after_forward()
     +--------------------------------------------------------+
                           reshard()

``KEPT`` is the form between forward and backward under an integer ``reshard_after_forward``. A
gather that fails leads from ``UNSHARDING`` back to ``SHARDED``. Between steps a user may borrow
whole parameters: ``SHARDED`` to ``LENT`` and back (``lending.py``).
"""

from __future__ import annotations

import enum


class GroupState(enum.Enum):
    """Which form of its parameters a group's modules hold."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"
    KEPT = "kept on fewer ranks"
    LENT = "lent whole to a user"

    # Members are singletons; the hash that enums have costs a call of a Python function.
    __hash__ = object.__hash__


#: From which state a group may go to which.
MOVES = {
    (GroupState.SHARDED, GroupState.UNSHARDING),
    (GroupState.UNSHARDING, GroupState.UNSHARDED),
    (GroupState.UNSHARDING, GroupState.SHARDED),
    (GroupState.UNSHARDED, GroupState.SHARDED),
    (GroupState.UNSHARDED, GroupState.KEPT),
    (GroupState.KEPT, GroupState.UNSHARDING),
    (GroupState.KEPT, GroupState.SHARDED),
    (GroupState.SHARDED, GroupState.LENT),
    (GroupState.LENT, GroupState.SHARDED),
}
