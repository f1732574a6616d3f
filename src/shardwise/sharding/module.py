"""``FSDPModule``: the methods that a sharded module gains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from shardwise.sharding.group import ParamGroup
from shardwise.sharding.hooks import FSDPState, state_of


class UnshardHandle(TorchUnshardHandle):
    """An unshard under way; see :meth:`FSDPModule.unshard`."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = list(groups)

    def wait(self) -> None:
        """Wait until the modules hold full parameters. A second wait does nothing.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        while self._groups:
            self._groups[0].wait_for_unshard()
            self._groups.pop(0)


class FSDPModule(TorchFSDPModule):
    """What a module becomes under :func:`~shardwise.fully_shard`.

    Its class is made anew from this one and its original class, so ``isinstance`` holds for both,
    and for torch's ``FSDPModule``, by which other libraries recognise sharded modules. Names and
    meanings of the methods are torch's.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the original class: indexing a sharded container makes plain ones."""
        original = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    # -- forms ---------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own group, not those nested in it.

        Args:
            async_op: return at once, with a handle to wait on; forward waits by itself too.

        Returns:
            The handle if ``async_op``, else ``None``.

        Raises:
            RuntimeError: a parameter is still on the meta device.
            PeerLostError: a peer died or stalled.
        """
        groups = self._state().groups
        for group in groups:
            group.unshard()
        handle = UnshardHandle(groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the full parameters of this module's own group; it holds the shards again."""
        for group in self._state().groups:
            group.reshard()

    # -- switches ------------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients, for accumulation without communication.

        Until the next backward with synchronisation, every rank keeps full gradients of the group,
        in the reduction dtype.
        """
        for group in self._groups(recurse):
            group.options.requires_gradient_sync = requires_gradient_sync
            group.options.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward also reduces over the replicate dimension of a 2-D mesh.

        Without it gradients are reduce-scattered and added up until the next backward with it.
        """
        for group in self._groups(recurse):
            group.options.requires_all_reduce = requires_all_reduce

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
        for state in self._states(recurse):
            state.settle_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters are freed after backward; keeping them saves a gather."""
        for group in self._groups(recurse):
            group.options.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward needs this module's own parameters (an embedding does not)."""
        for group in self._groups(recurse=False):
            group.options.unshard_in_backward = unshard_in_backward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward completes all reductions at its end."""
        self._state().root.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by ``factor`` instead of the number of ranks.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"gradient divide factor: expected a positive number, found {factor}")
        for group in self._groups(recurse=False):
            group.options.gradient_divide_factor = factor

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Unshard ``modules`` when this module's forward begins, instead of the one expected.

        Raises:
            ValueError: one of ``modules`` is not sharded by Shardwise.
        """
        self._state().forward_prefetch = [_require_state(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Unshard ``modules`` when this module's backward begins, instead of the one expected.

        Raises:
            ValueError: one of ``modules`` is not sharded by Shardwise.
        """
        self._state().backward_prefetch = [_require_state(module) for module in modules]

    def reset_iter_state(self) -> None:
        """Make the model able to train again after an exception in forward or backward.

        Gradients of the failed step are lost, those accumulated without synchronisation too.

        Raises:
            RuntimeError: this module is not the root.
        """
        state = self._state()
        if state.is_root is False:
            raise RuntimeError(
                "reset_iter_state: expected the root, the outermost module that fully_shard was "
                f"applied to; found a nested {type(self).__name__}"
            )
        state.root.reset()

    # -- not yet -------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> None:
        """Not available yet."""
        _not_yet("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Not available yet."""
        _not_yet("set_custom_reduce_scatter")

    def set_all_reduce_hook(self, hook: Callable[..., None], *, stream: Any = None) -> None:
        """Not available yet."""
        _not_yet("set_all_reduce_hook")

    def set_post_optim_event(self, event: Any) -> None:
        """Not available yet."""
        _not_yet("set_post_optim_event")

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Not available yet."""
        _not_yet("set_force_sum_reduction_for_comms")

    def set_reduce_scatter_unused_params(self, *args: Any, **kwargs: Any) -> None:
        """Not available yet."""
        _not_yet("set_reduce_scatter_unused_params")

    def set_reduce_scatter_max_input_buffers(self, *args: Any, **kwargs: Any) -> None:
        """Not available yet."""
        _not_yet("set_reduce_scatter_max_input_buffers")

    def set_separate_reduce_scatter_group(self, *args: Any, **kwargs: Any) -> None:
        """Not available yet."""
        _not_yet("set_separate_reduce_scatter_group")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Not available yet."""
        _not_yet("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, *args: Any, **kwargs: Any) -> None:
        """Not available yet."""
        _not_yet("set_symm_mem_for_comm")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Not available yet."""
        _not_yet("_set_unshard_async_op")

    # -- inside --------------------------------------------------------------------------------

    def _get_fsdp_state(self) -> FSDPState:  # type: ignore[override]
        """The name under which torch's own code asks for the state."""
        return self._state()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Behind ``to()``, ``cuda()``, ``to_empty()``, ...: they change the shards."""
        self.reshard()
        # Past torch's own FSDPModule, which would look for torch's state.
        result = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        for group in self._state().groups:
            group.refresh()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _not_yet("copy.deepcopy of a sharded module")

    def _state(self) -> FSDPState:
        return _require_state(self)

    def _states(self, recurse: bool) -> Iterator[FSDPState]:
        modules = cast(nn.Module, self).modules() if recurse else [cast(nn.Module, self)]
        found = (state_of(module) for module in modules)
        return iter(dict.fromkeys(state for state in found if state is not None))

    def _groups(self, recurse: bool) -> Iterator[ParamGroup]:
        for state in self._states(recurse):
            yield from state.groups


_CLASSES: dict[type, type] = {}


def become_fsdp_module(module: nn.Module) -> None:
    """Give ``module`` a class that is both its own and :class:`FSDPModule`."""
    original = type(module)
    if original not in _CLASSES:
        _CLASSES[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
    module.__class__ = _CLASSES[original]


def _require_state(module: object) -> FSDPState:
    state = state_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise ValueError(
            f"expected a module that shardwise.fully_shard was applied to, found "
            f"{type(module).__name__}"
        )
    return state


def _not_yet(what: str) -> NoReturn:
    raise NotImplementedError(f"{what} is not available in this version of Shardwise")
