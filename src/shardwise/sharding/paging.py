"""How shards that are kept on a disk come into memory before a group is gathered, and leave it.

The shards are mapped, so they could come by themselves, page by page, as they are touched. Asking
for them in time lets the disk work while the group before computes. And a disk that fails is an
error then, and not a signal that ends the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch.distributed as dist

from shardwise.base import observe
from shardwise.base.errors import OffloadError
from shardwise.base.observe import Activity
from shardwise.sharding.param import ShardedParam


class Pages:
    """The shards of a group that are kept on a disk.

    Args:
        forms: the parameters that are.

    Attributes:
        order: in which order groups come; those of one model share it, once its root is known.
    """

    def __init__(self, forms: Sequence[ShardedParam]) -> None:
        self._forms = forms
        self.order = ReadOrder()

    def load(self, name: str) -> None:
        """Bring the shards into memory, and start to read those of the group that comes next.

        Args:
            name: of the group.

        Raises:
            OffloadError: they cannot be read; the message names the parameter and the rank.
        """
        with observe.during(Activity.COPY, name):
            for form in self._forms:
                try:
                    form.offload.load(form.local)
                except OffloadError as error:
                    raise OffloadError(
                        f"{form.fqn} on rank {dist.get_rank()}: {error}. Parameters are lost: go "
                        "on from the last checkpoint in a new process, with another folder"
                    ) from error
        following = self.order.note(self)
        if following is not None:
            for form in following._forms:
                form.offload.read_ahead(form.local)

    def let_go(self) -> None:
        """Take the shards out of memory, which other groups need now."""
        for form in self._forms:
            form.offload.let_go(form.local)


class ReadOrder:
    """The order in which groups are gathered, as far as it repeats itself.

    What came after the last two comes again: two, since forward and backward run through the same
    groups in opposite directions. A wrong guess costs a read.
    """

    def __init__(self) -> None:
        self._before: Pages | None = None
        self._last: Pages | None = None
        # What came after two groups, by the later and then by the earlier one.
        self._next: weakref.WeakKeyDictionary[
            Pages, weakref.WeakKeyDictionary[Pages, weakref.ref[Pages]]
        ] = weakref.WeakKeyDictionary()

    def note(self, pages: Pages) -> Pages | None:
        """Note that a group is gathered, and return the one that came next the last time."""
        before, last = self._before, self._last
        if before is not None and last is not None:
            self._next.setdefault(last, weakref.WeakKeyDictionary())[before] = weakref.ref(pages)
        self._before, self._last = last, pages
        if last is None:
            return None
        after = self._next.get(pages)
        following = None if after is None else after.get(last)
        return None if following is None else following()
