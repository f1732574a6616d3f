"""Point-to-point messages of one call, each with the peer at its other end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.transport.peers import PROBE_TAG
from shardwise.transport.waiting import Waiter

#: Message numbers wrap here; gloo takes tags of a C ``int``.
MAX_TAG = PROBE_TAG


class Message:
    """One tensor on its way to or from one peer.

    Attributes:
        tensor: what is sent, or where it arrives. Gloo reads or writes it from a thread of its own
            until the message has been waited for.
        peer: rank in the group of the peer at the other end.
        tag: the same at both ends, and different from that of any other message under way.
        work: gloo's work; ``None`` before it is posted and once it is over.
    """

    def __init__(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        self.tensor = tensor
        self.peer = peer
        self.tag = tag
        self.work: dist.Work | None = None


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
        self._sends: list[Message] = []
        self._receives: list[Message] = []

    def send(self, tensor: torch.Tensor, peer: int, number: int) -> Message:
        """Prepare message ``number`` to ``peer``; nothing travels for an empty tensor."""
        self._sends.append(Message(tensor, peer, self._tag(number)))
        return self._sends[-1]

    def recv(self, tensor: torch.Tensor, peer: int, number: int) -> Message:
        """Prepare memory for message ``number`` from ``peer``; nothing travels for an empty one."""
        self._receives.append(Message(tensor, peer, self._tag(number)))
        return self._receives[-1]

    def start(self) -> None:
        """Post all messages.

        A message moves when both of its ends are posted. Sends come first, and nothing comes
        between: so data arrives only when this thread has done with the connection. Gloo's own
        thread does not sleep while this one holds a connection that has data for it: it turns in
        circles, and takes the processor from whoever it waits for (3 ms at a time).

        Raises:
            PeerLostError: a peer is gone.
        """
        for post, messages in (
            (self._group.send, self._sends),
            (self._group.recv, self._receives),
        ):
            for message in messages:
                if message.tensor.numel():
                    try:
                        message.work = post([message.tensor], message.peer, message.tag)
                    except RuntimeError as error:
                        raise self._waiter.explain(error, self._doing, message.peer) from error

    def wait(self, messages: Sequence[Message] | None = None) -> None:
        """Return once the messages (by default all) have arrived or left.

        Raises:
            PeerLostError: a peer died, or did not answer in time.
        """
        every = [*self._receives, *self._sends] if messages is None else messages
        waiting = [(each.work, each.peer) for each in every if each.work is not None]
        if waiting:
            self._waiter.wait(waiting, self._doing)
        for each in every:
            each.work = None

    @property
    def held(self) -> list[object]:
        """What has to live until the messages have been waited for: memory, and gloo's works."""
        every = (*self._sends, *self._receives)
        return [part for each in every for part in (each.tensor, each.work)]

    def _tag(self, number: int) -> int:
        return (self._first_tag + number) % MAX_TAG
