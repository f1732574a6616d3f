"""Point-to-point messages of one call, each with the peer at its other end."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwise.transport.peers import peer_lost, tells_of_lost_peer, tells_of_stall

#: Message numbers wrap here; gloo takes tags of a C ``int``.
MAX_TAG = 2**30


class Message:
    """One tensor on its way to or from one peer.

    Holds the tensor and the backend's work object until it is waited for: the backend reads or
    writes that memory from a thread of its own.
    """

    def __init__(
        self,
        exchange: Exchange,
        post: Callable[[list[torch.Tensor], int, int], dist.Work | None],
        tensor: torch.Tensor,
        peer: int,
        tag: int,
    ) -> None:
        self.tensor = tensor
        self.peer = peer
        self._exchange = exchange
        self._work: dist.Work | None = None
        if tensor.numel():
            try:
                self._work = post([tensor], peer, tag)
            except RuntimeError as error:
                raise exchange.broken(error, peer) from error

    def wait(self) -> torch.Tensor:
        """Return the tensor once it has arrived or left.

        Raises:
            PeerLostError: the peer died, or did not answer in time.
        """
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise self._exchange.broken(error, self.peer) from error
            self._work = None
        return self.tensor


class Exchange:
    """The messages of one call.

    Args:
        group: the process group.
        doing: what the call does, for errors.
        first_tag: tag of message number 0. Tags grow from call to call, so that the messages of
            two calls under way never mix.
    """

    def __init__(self, group: dist.ProcessGroup, doing: str, first_tag: int) -> None:
        self._group = group
        self._doing = doing
        self._first_tag = first_tag
        self._messages: list[Message] = []

    def recv(self, tensor: torch.Tensor, peer: int, number: int) -> Message:
        """Post memory for message ``number`` from ``peer``; nothing travels for an empty one."""
        return self._post(self._group.recv, tensor, peer, number)

    def send(self, tensor: torch.Tensor, peer: int, number: int) -> Message:
        """Post message ``number`` to ``peer``; nothing travels for an empty one."""
        return self._post(self._group.send, tensor, peer, number)

    def wait(self) -> None:
        """Wait for every message, so that its memory may be used again.

        Raises:
            PeerLostError: a peer died, or did not answer in time.
        """
        for message in self._messages:
            message.wait()

    def broken(self, error: RuntimeError, peer: int) -> RuntimeError:
        """Make the error to raise when a message to or from ``peer`` failed."""
        if not tells_of_lost_peer(error):
            return error
        peers = [peer]
        if not tells_of_stall(error):
            # The peer may have left because it lost another one, and that one is the cause.
            others = set(range(self._group.size())) - {self._group.rank(), peer}
            peers += [other for other in others if self._is_gone(other)]
        return peer_lost(self._group, self._doing, error, peers)

    def _post(
        self,
        post: Callable[[list[torch.Tensor], int, int], dist.Work | None],
        tensor: torch.Tensor,
        peer: int,
        number: int,
    ) -> Message:
        message = Message(self, post, tensor, peer, (self._first_tag + number) % MAX_TAG)
        self._messages.append(message)
        return message

    def _is_gone(self, peer: int) -> bool:
        """Whether a message to ``peer`` could not even be posted."""
        try:
            self._group.recv([torch.empty(1)], peer, MAX_TAG)
        except RuntimeError:
            return True
        return False
