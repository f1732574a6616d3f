"""Point-to-point messages of one call, each with the peer at its other end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from shardwise.transport.waiting import PROBE_TAG, Waiter

#: Message numbers wrap here; gloo takes tags of a C ``int``.
MAX_TAG = PROBE_TAG


class Message:
    """One tensor on its way to or from one peer.

    Attributes:
        tensor: what is sent, or where it arrives. Gloo reads or writes it from a thread of its own
            until the message has been waited for.
        peer: rank in the group of the peer at the other end.
        work: gloo's work; ``None`` once it is over, and where nothing travels.
    """

    def __init__(self, tensor: torch.Tensor, peer: int, work: dist.Work | None) -> None:
        self.tensor = tensor
        self.peer = peer
        self.work = work


class Exchange:
    """The messages of one call.

    Args:
        group: the process group.
        waiter: waits for works of that group.
        doing: what the call does, for errors.
        first_tag: tag of message number 0. Tags grow from call to call, so that the messages of
            two calls under way never mix.
    """

    def __init__(
        self, group: dist.ProcessGroup, waiter: Waiter, doing: str, first_tag: int
    ) -> None:
        self._group = group
        self._waiter = waiter
        self._doing = doing
        self._first_tag = first_tag
        self._messages: list[Message] = []

    def recv(self, tensor: torch.Tensor, peer: int, number: int) -> Message:
        """Post memory for message ``number`` from ``peer``; nothing travels for an empty one."""
        return self._post(self._group.recv, tensor, peer, number)

    def send(self, tensor: torch.Tensor, peer: int, number: int) -> Message:
        """Post message ``number`` to ``peer``; nothing travels for an empty one."""
        return self._post(self._group.send, tensor, peer, number)

    def wait(self, messages: Iterable[Message] | None = None) -> None:
        """Return once the messages (by default all) have arrived or left.

        Raises:
            PeerLostError: a peer died, or did not answer in time.
        """
        waiting = [
            message
            for message in (self._messages if messages is None else messages)
            if message.work is not None
        ]
        works = [(message.work, message.peer) for message in waiting if message.work is not None]
        self._waiter.wait(works, self._doing)
        for message in waiting:
            message.work = None

    def _post(
        self,
        post: Callable[[list[torch.Tensor], int, int], dist.Work | None],
        tensor: torch.Tensor,
        peer: int,
        number: int,
    ) -> Message:
        work = None
        if tensor.numel():
            try:
                work = post([tensor], peer, (self._first_tag + number) % MAX_TAG)
            except RuntimeError as error:
                raise self._waiter.explain(error, self._doing, peer) from error
        message = Message(tensor, peer, work)
        self._messages.append(message)
        return message
