"""What a user may switch while training: methods of a sharded module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from typing_extensions import deprecated

from shardwise.sharding.group_state import GroupState
from shardwise.sharding.reach import groups_of, require_state, states_of


class Switches(TorchFSDPModule):
    """When parameters are gathered and freed, and what becomes of gradients."""

    # -- parameters ----------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether parameters are freed between forward and backward.

        Raises:
            ValueError: ``reshard_after_forward`` is not a ``bool``.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                "reshard_after_forward: expected a bool, found "
                f"{type(reshard_after_forward).__name__} {reshard_after_forward!r}"
            )
        for state in states_of(self, recurse):
            state.settle_reshard_after_forward(reshard_after_forward)
            for group in state.groups:
                if group.state is GroupState.KEPT:
                    group.reshard()
                group.kept = None

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters are freed after backward; keeping them saves a gather."""
        for group in groups_of(self, recurse):
            group.options.reshard_after_backward = reshard_after_backward

    @contextmanager
    def keep_unsharded(self, recurse: bool = True) -> Iterator[None]:
        """Gather parameters once, and keep them unsharded until the end of the ``with`` block.

        For loops of forwards without a backward (evaluating, generating), which gather again in
        every forward otherwise. It takes the memory of the unsharded model. Inside, parameters
        must not be written to; a forward after such a write raises where it is seen (writes by way
        of ``.data``, or of ``torch._foreach_mul_`` and the like, are not). A backward frees
        parameters as elsewhere. All ranks enter and leave.

        Args:
            recurse: those of sharded modules inside this one, too.

        Raises:
            MisuseError: in a forward, parameters were written to since they were gathered.
            PeerLostError: a peer died or stalled.
        """
        groups = list(groups_of(self, recurse))
        before = [group.options.keep_unsharded for group in groups]
        try:
            for group in groups:
                group.refresh()
                group.free_left()
                group.options.keep_unsharded = True
                group.unshard()
            for group in groups:
                group.wait_for_unshard()
                group.note_left()
            yield
        finally:
            for group, kept in zip(groups, before, strict=True):
                group.options.keep_unsharded = kept
                if not kept:
                    group.reshard()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward needs this module's own parameters (an embedding does not)."""
        for group in groups_of(self, recurse=False):
            group.options.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Unshard ``modules`` when this module's forward begins.

        By default forward gathers nothing ahead. What is written to the parameters of ``modules``
        after that, and before their own forward, is missed.

        Raises:
            ValueError: one of ``modules`` is not sharded by Shardwise.
        """
        require_state(self).forward_prefetch = [require_state(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Unshard ``modules`` when this module's backward begins, instead of the one expected.

        Raises:
            ValueError: one of ``modules`` is not sharded by Shardwise.
        """
        require_state(self).backward_prefetch = [require_state(module) for module in modules]

    # -- gradients -----------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients, for accumulation without communication.

        Until the next backward with synchronisation, every rank keeps full gradients of the group,
        in the reduction dtype.
        """
        for group in groups_of(self, recurse):
            group.options.requires_gradient_sync = requires_gradient_sync
            group.options.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward also reduces over the replicate dimension of a 2-D mesh.

        Without it gradients are reduce-scattered and added up until the next backward with it.
        """
        for group in groups_of(self, recurse):
            group.options.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward completes all reductions at its end."""
        require_state(self).root.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide the sum of gradients by ``factor`` instead of the number of ranks.

        ``None`` goes back to the number of ranks.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        if factor is not None and not factor > 0:
            raise ValueError(f"gradient divide factor: expected a positive number, found {factor}")
        for group in groups_of(self, recurse=False):
            group.options.gradient_divide_factor = factor

    @deprecated("Use `set_gradient_divide_factor` instead")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether the ranks only ever add gradients, and the division comes afterwards."""
        for group in groups_of(self, recurse=False):
            group.options.force_sum_reduction = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters that a backward did not reach are reduced as zeros.

        Needed where ranks use different parameters in one step (a mixture of experts, say), which
        is an error otherwise.
        """
        for group in groups_of(self, recurse):
            group.options.reduce_scatter_unused_params = reduce_scatter_unused_params
