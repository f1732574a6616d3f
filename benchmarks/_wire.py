"""Payload bytes that a rank sends to others over one process group of gloo, counted where they go.

Headers of the network are not counted, nor what other groups send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


class Meter:
    """Bytes that have left this rank.

    Attributes:
        sent: bytes so far.
    """

    def __init__(self) -> None:
        self.sent = 0


@contextmanager
def metered(group: dist.ProcessGroup) -> Iterator[Meter]:
    """Count what this rank sends over a group while the block runs.

    A message counts as it is. A gloo all-reduce is a ring: each rank sends ``2 (R - 1) / R`` of the
    tensor. Other collectives over the group are refused, so that nothing passes uncounted.
    """
    meter = Meter()
    size = group.size()
    send, all_reduce = dist.ProcessGroup.send, dist.all_reduce

    def counting_send(self: dist.ProcessGroup, tensors: list[torch.Tensor], *rest: Any) -> Any:
        if self is group or self.group_name == group.group_name:
            meter.sent += sum(tensor.nbytes for tensor in tensors)
        return send(self, tensors, *rest)

    def counting_all_reduce(tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if named.get("group") is group:
            meter.sent += round(2 * (size - 1) * tensor.nbytes / size)
        return all_reduce(tensor, *rest, **named)

    def refusing(function: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        if named.get("group") is group:
            raise RuntimeError(f"{function.__name__} over the metered group is not counted")
        return function(*rest, **named)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist.ProcessGroup, "send", counting_send))
        stack.enter_context(mock.patch.object(dist, "all_reduce", counting_all_reduce))
        for function in (
            dist.all_gather_into_tensor,
            dist.reduce_scatter_tensor,
            dist.all_to_all_single,
        ):
            refused = partial(refusing, function)
            stack.enter_context(mock.patch.object(dist, function.__name__, refused))
        yield meter
