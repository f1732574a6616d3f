"""What carries a group's bytes: methods of a sharded module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from shardwise.sharding.reach import groups_of, require_state
from shardwise.transport.custom import AllGather, ReduceScatter
from shardwise.transport.peers import new_group


class Communication(TorchFSDPModule):
    """Collectives of the user's own, and how those of ours are ordered."""

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Have ``comm`` gather this module's own group, from and into flat buffers that it makes.

        Args:
            comm: has ``allocate(size, *, dtype, device) -> Tensor`` and is called as
                ``comm(output_tensor, input_tensor, group, async_op)``, where it returns a work to
                wait for, or ``None`` once the result is there.
        """
        for group in groups_of(self, recurse=False):
            if group.mesh.shards:
                group.change_mesh(group.mesh.with_all_gather(comm))
                if group.kept is not None:
                    group.kept.mesh = group.kept.mesh.with_all_gather(comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Have ``comm`` reduce-scatter the gradients of this module's own group.

        Args:
            comm: as for :meth:`set_custom_all_gather`, called as
                ``comm(output_tensor, input_tensor, group, op, async_op)``.
        """
        for group in groups_of(self, recurse=False):
            if group.mesh.shards:
                group.change_mesh(group.mesh.with_reduce_scatter(comm))

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Call ``hook`` with the reduced gradients of this module's own group, side by side.

        Args:
            hook: is given a 1-D tensor in the dtype of the reduction, after the reduce-scatter
                (and the all-reduce of a 2-D mesh), which it may change in place.
            stream: must be ``None``.

        Raises:
            ValueError: a ``stream`` on a 2-D mesh.
            NotImplementedError: any other ``stream``.
        """
        for group in groups_of(self, recurse=False):
            if stream is not None:
                if group.mesh.replicate is not None:
                    raise ValueError("set_all_reduce_hook: a 2-D mesh takes no stream")
                raise NotImplementedError(
                    "set_all_reduce_hook(stream=...): reductions end on the stream that backward "
                    "runs on; let the hook itself enter another stream, and wait for it"
                )
            group.options.all_reduce_hook = hook

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the first gather of the next forward wait for ``event``, once.

        Nothing runs ahead of the optimizer without it: this only orders further. On CPU devices
        there is nothing to wait for.
        """
        require_state(self).root.post_optim_event = event

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many groups' full gradients may be on their way at once (by default one).

        More hide a slow network behind backward, at the cost of that memory.

        Raises:
            TypeError: ``max_input_buffers`` is not an ``int``.
            ValueError: it is less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers: expected an int, found {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers: expected at least 1, found {max_input_buffers}")
        for group in groups_of(self, recurse):
            group.options.reduce_scatter_max_input_buffers = max_input_buffers

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Set whether gradients are reduced over a process group of their own.

        On NCCL, collectives of one process group run one after the other; of two, side by side.
        Every rank of the mesh makes this call.
        """
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in groups_of(self, recurse):
            if not group.mesh.shards:
                continue
            if not enable:
                group.change_mesh(group.mesh.with_scatter_group(None))
            elif group.mesh.scatter_group is None:
                ranks = tuple(dist.get_process_group_ranks(group.mesh.shard_group))
                if ranks not in made:
                    made[ranks] = new_group(ranks)
                group.change_mesh(group.mesh.with_scatter_group(made[ranks]))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refuse: there are no staging buffers whose memory could come from elsewhere.

        Raises:
            NotImplementedError: ``enable`` is true.
        """
        if enable:
            raise NotImplementedError(
                "set_allocate_memory_from_process_group_for_comm: parameters are gathered in place "
                "and gradients sent from where they lie, so there are no staging buffers to "
                "allocate; make them with set_custom_all_gather"
            )

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Refuse: there are no staging buffers that could be symmetric memory.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "set_symm_mem_for_comm: parameters are gathered in place and gradients sent from where "
            "they lie, so there are no staging buffers that could be symmetric memory; make them "
            "with set_custom_all_gather"
        )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: here every gather is asynchronous and allocates on the current stream."""
