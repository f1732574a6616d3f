"""CUDA tensors on NCCL: one launch of a collective per parameter, from where the data lies.

The gathered buffer of a parameter that is cut along its rows *is* the parameter. So this rank's
shard is written into its place (converted, if the dtypes differ), and the gather runs in place:

    full, rank 1 of 3   |  ...  | shard |  ...  |   ->   | rank 0 | shard | rank 2 |

Gradients are reduced from where autograd left them. Only uneven rows (the padding is missing) and
another dtype for the reduction cost a copy. All collectives of a call are launched together, as
NCCL does between ``ncclGroupStart`` and ``ncclGroupEnd``.

Streams: NCCL's own stream waits for what the current stream holds at the call; ``wait()`` makes the
current stream wait for NCCL's. The work keeps every tensor referenced until then, so that no memory
is handed out again that NCCL still reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise._torch import launched_together
from shardwise.transport.collectives import Collective, CollectivesTransport
from shardwise.transport.waiting import Launched

#: Chunks of fewer bytes are packed: below this a copy costs less than one more collective.
SMALL_BYTES = 16 * 1024


class NcclTransport(CollectivesTransport):
    """The ranks of one NCCL process group, tensors on CUDA devices.

    Args:
        group: a process group whose CUDA backend is NCCL.
        backend: stands in for NCCL where there is none: any with coalesced collectives.
    """

    name = "nccl"
    runs_behind = True

    def __init__(self, group: dist.ProcessGroup, backend: str = "nccl") -> None:
        super().__init__(group, backend, SMALL_BYTES)

    def _launch(self, calls: Sequence[Collective]) -> list[Launched]:
        by_dtype: dict[torch.dtype, list[Collective]] = {}
        for call in calls:
            by_dtype.setdefault(call.tensor.dtype, []).append(call)
        launched: list[Launched] = []
        for together in by_dtype.values():
            with launched_together(self.group) as work:
                for call in together:
                    call.start(async_op=False)
            launched.append(work)
        return launched
