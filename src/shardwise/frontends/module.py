"""``FSDPModule``: the methods of a sharded module, and how a module gets them."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from torch.distributed.tensor import DTensor
from typing_extensions import deprecated

from shardwise._torch import fsdp
from shardwise.base import devices
from shardwise.base.arguments import check_arguments
from shardwise.base.errors import MisuseError
from shardwise.sharding import user_calls
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.hooks import run_as_forward
from shardwise.sharding.ledger import GradientReductionHandle
from shardwise.sharding.param import COPIED
from shardwise.sharding.state import Root, groups_of, require_state, states_of
from shardwise.sharding.states import GroupOrder, GroupState, Phase
from shardwise.transport.base import Reduce

_B = TypeVar("_B")
_END = object()


class UnshardHandle(TorchUnshardHandle):
    """A running all-gather; see :meth:`FSDPModule.unshard`.

    Args:
        groups: the groups whose parameters are being gathered.
    """

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = list(groups)

    def wait(self) -> None:
        """Wait until the modules hold full parameters. A second call does nothing.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        while self._groups:
            self._groups[0].wait_for_unshard()
            self._groups.pop(0)


if TYPE_CHECKING:
    from shardwise.transport.custom import AllGather, ReduceScatter

    # Every FSDPModule is a module, by its original class, which no type checker can see.
    class _Sharded(TorchFSDPModule, nn.Module): ...
else:
    _Sharded = TorchFSDPModule


class FSDPModule(_Sharded):
    """The class of a module after :func:`~shardwise.fully_shard`.

    The new class of a module has this class and its original one as bases. So ``isinstance`` holds
    for both, and for torch's ``FSDPModule``, by which other libraries recognize sharded modules.
    The methods have torch's names and meanings (``torch.distributed.fsdp.FSDPModule``), and
    :meth:`keep_unsharded` is new.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the original class, as indexing a sharded container does."""
        original = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        made = original.__new__(original, *args, **kwargs)
        if _initialize_new:
            made.__init__(*args, **kwargs)
        return made

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the group of this module, but not those of nested modules.

        Args:
            async_op: return at once, with a handle to wait for. Forward also waits by itself.

        Returns:
            The handle if ``async_op``, else ``None``.

        Raises:
            RuntimeError: a parameter is still on the meta device.
            PeerLostError: a peer died or stalled.
        """
        state = require_state(self)
        for group in state.groups:
            if state.is_root is None:
                group.refresh()  # no forward has done so, and parameters may have been replaced
            group.unshard_ahead()
        handle = UnshardHandle(state.groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the full parameters of this module's group. It holds the shards again.

        During the module's own forward, this does nothing if they are to be kept after forward.
        What is in use in a forward or backward stays in memory until that is over.
        """
        state = require_state(self)
        for group in state.groups:
            if state.phase is not Phase.FORWARD or group.options.reshard_after_forward:
                user_calls.reshard(group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also between forward and backward.

        This includes gradients that were accumulated without synchronization.

        Args:
            set_to_none: drop the gradients (``True``) or fill them with zeros (``False``).
        """
        super(TorchFSDPModule, self).zero_grad(set_to_none)
        for group in groups_of(self, recurse=True):
            group.zero_grad(set_to_none=set_to_none)

    def reset_iter_state(self) -> None:
        """Reset the model after an exception in forward or backward, so that it can train again.

        The gradients of the failed step are lost, including those accumulated without
        synchronization.

        Raises:
            RuntimeError: this module is not the root.
        """
        state = require_state(self)
        if state.is_root is False:
            self._refuse_nested("reset_iter_state")
        state.root.reset()

    def skip_step(self) -> None:
        """Take part in a step in place of forward and backward, on a rank that has no batch.

        Call it on the root, under ``fully_shard(..., order="own")``. It returns when all ranks are
        through with their backwards, and counts as zeros in the gradients. The optimizer then steps
        as on any rank. Also call it in place of a backward that does not follow its forward, and
        under ``torch.no_grad()`` in place of one forward of an evaluation.

        Raises:
            RuntimeError: this module is not the root.
            MisuseError: all ranks run the same modules.
            PeerLostError: a peer died or stalled.
        """
        self._own_order("skip_step").skip()

    def until_all_end(self, batches: Iterable[_B]) -> Iterator[_B | None]:
        """Yield batches until all ranks have come to the end of theirs.

        A rank that has none left gets ``None``, and calls :meth:`skip_step`. Call it on the root,
        under ``fully_shard(..., order="own")``, between steps.

        Args:
            batches: those of this rank.

        Yields:
            The next batch, or ``None``.

        Raises:
            RuntimeError: this module is not the root.
            MisuseError: all ranks run the same modules.
            PeerLostError: a peer died or stalled.
        """
        root, rest = self._own_order("until_all_end"), iter(batches)
        while True:
            batch = next(rest, _END)
            has_batch = batch is not _END
            others = root.own_order is not None and root.own_order.any_has(has_batch)
            if not (has_batch or others):
                return
            yield cast(_B, batch) if has_batch else None

    def _own_order(self, what: str) -> Root:
        """Return the root of a model whose ranks may run different modules."""
        state = require_state(self)
        state.lazy_init()
        if not state.is_root:
            self._refuse_nested(what)
        if state.order is not GroupOrder.OWN:
            raise MisuseError(
                f"{what} on rank {dist.get_rank()}: expected a model that was sharded by "
                f'fully_shard(model, order="own"), found order="same", in which all ranks run '
                "forward and backward in every step"
            )
        return state.root

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters that the modules hold: sharded ones between steps, full ones within.

        In a step that accumulates gradients of full parameters (``set_is_last_backward(False)`` and
        ``set_reshard_after_backward(False)``), these are always the full parameters that forward
        used. Pipelines that split backward look for them in the autograd graph.

        Args:
            recurse: include the parameters of the modules inside this one.

        Returns:
            An iterator over them: ``DTensor`` parameters if sharded, plain ones if full.
        """
        found = super(TorchFSDPModule, self).parameters(recurse)
        if require_state(self).root.ledger.ends_step:
            return found
        fulls: dict[nn.Parameter, list[nn.Parameter]] = {}
        for group in groups_of(self, recurse=True):
            if not group.options.reshard_after_backward:
                for param in group.params:
                    if param.full is not None:
                        fulls.setdefault(param.owners[0].registered, []).append(param.full)
        return iter(dict.fromkeys(each for one in found for each in fulls.get(one, [one])))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of shards, as in torch, with an error that says what full ones need.

        Args:
            state_dict: tensors by name: a ``DTensor`` for each sharded parameter.
            args: ``strict`` and ``assign``, as in torch.
            kwargs: the same by name.

        Returns:
            The names that the model or the state dict lacks.

        Raises:
            RuntimeError: names or shapes differ, or tensors are full where parameters are sharded.
        """
        try:
            return super(TorchFSDPModule, self).load_state_dict(state_dict, *args, **kwargs)
        except RuntimeError as error:
            for name, param in self.named_parameters():
                found = state_dict.get(name, param)
                if isinstance(param, DTensor) and type(found) in (torch.Tensor, nn.Parameter):
                    raise RuntimeError(
                        f"{name} on rank {dist.get_rank()}: found a full tensor of shape "
                        f"{tuple(found.shape)}, expected a DTensor with placements "
                        f"{param.placements}. Load a full state dict with set_model_state_dict of "
                        "torch.distributed.checkpoint.state_dict, and "
                        "options=StateDictOptions(full_state_dict=True)"
                    ) from error
            raise

    # -- parameters ----------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether parameters are freed between forward and backward.

        Args:
            reshard_after_forward: free them (ZeRO-3) or keep them for backward (ZeRO-2).
            recurse: include the sharded modules inside this one.

        Raises:
            ValueError: ``reshard_after_forward`` is not a ``bool``.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                "reshard_after_forward: expected a bool, found "
                f"{type(reshard_after_forward).__name__} {reshard_after_forward!r}"
            )
        for state in states_of(self, recurse):
            state.set_reshard_after_forward(reshard_after_forward)
            for group in state.groups:
                if group.state is GroupState.SHARDED_POST_FORWARD:
                    group.reshard()
                group.post_forward = None

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters are freed after backward. Keeping them saves an all-gather.

        While gradients accumulate without synchronization, the next forward uses what was kept. It
        raises after a visible write to a shard, but writes through ``.data`` or
        ``torch._foreach_mul_`` and the like are not visible, as in :meth:`keep_unsharded`.

        Args:
            reshard_after_backward: ``True`` by default.
            recurse: include the sharded modules inside this one.
        """
        for group in groups_of(self, recurse):
            group.options.reshard_after_backward = reshard_after_backward

    @contextmanager
    def keep_unsharded(self, recurse: bool = True) -> Iterator[None]:
        """Gather parameters once, and keep them unsharded until the end of the ``with`` block.

        Use it for loops of forwards without a backward (evaluation, generation), which would
        otherwise gather in every forward. It needs the memory of the unsharded model. Do not write
        to parameters inside: a forward after a visible write raises, but writes through ``.data``
        or ``torch._foreach_mul_`` and the like are not visible. A backward frees parameters as
        usual. All ranks enter and leave.

        Args:
            recurse: include the sharded modules inside this one.

        Raises:
            MisuseError: raised by a forward if parameters were written to since they were gathered.
            PeerLostError: a peer died or stalled.
        """
        groups = list(groups_of(self, recurse))
        before = [group.options.keep_unsharded for group in groups]
        try:
            for group in groups:
                group.refresh()
                group.reshard_if_stale()
                group.options.keep_unsharded = True
                group.unshard()
            for group in groups:
                group.wait_for_unshard()
                group.mark_stale()
            yield
        finally:
            for group, kept in zip(groups, before, strict=True):
                group.options.keep_unsharded = kept
                if not kept:
                    group.reshard()

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether full parameters keep their memory, and so their addresses, when resharded.

        A captured CUDA graph needs that. It takes the memory of the unsharded model. (Shared memory
        is freed all the same, since its addresses never change.)

        Args:
            keep: ``False`` by default.
            recurse: include the sharded modules inside this one.
        """
        for group in groups_of(self, recurse):
            group.options.keep_unsharded_storage = keep

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward needs this module's parameters (an embedding's does not).

        Args:
            unshard_in_backward: ``True`` by default. With ``False``, backward does not gather this
                module's group.
        """
        for group in groups_of(self, recurse=False):
            group.options.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Unshard ``modules`` when this module's forward begins.

        By default, forward does not prefetch. A write to the parameters of ``modules`` between
        their prefetch and their own forward raises an error, if autograd counts it.

        Args:
            modules: sharded modules of the same root, in the order in which to gather them.

        Raises:
            TypeError, ValueError: one of ``modules`` is not sharded by Shardwise.
        """
        check_arguments(FSDPModule.set_modules_to_forward_prefetch, locals())
        require_state(self).forward_prefetch = [require_state(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Unshard ``modules`` when this module's backward begins, instead of the module before it.

        Args:
            modules: sharded modules of the same root, in the order in which to gather them.

        Raises:
            TypeError, ValueError: one of ``modules`` is not sharded by Shardwise.
        """
        check_arguments(FSDPModule.set_modules_to_backward_prefetch, locals())
        require_state(self).backward_prefetch = [require_state(module) for module in modules]

    # -- gradients -----------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients; without it, they accumulate on each rank.

        Until the next backward with synchronization, every rank keeps the full gradients of the
        group, in the reduction dtype.

        Args:
            requires_gradient_sync: ``True`` by default. ``False`` is for all microbatches of a step
                but the last.
            recurse: include the sharded modules inside this one.
        """
        for group in groups_of(self, recurse):
            group.options.requires_gradient_sync = requires_gradient_sync
            group.options.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward also reduces over the replicate dimension of a 2-D mesh.

        Without it, gradients are reduce-scattered and accumulated until the next backward with it.

        Args:
            requires_all_reduce: ``True`` by default.
            recurse: include the sharded modules inside this one.
        """
        for group in groups_of(self, recurse):
            group.options.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward completes all reductions at its end.

        Args:
            is_last_backward: ``True`` by default. With ``False``, reductions may still run when
                backward returns.
        """
        require_state(self).root.ledger.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether :meth:`finalize_backward` completes reductions, and no backward does.

        It takes precedence over :meth:`set_is_last_backward`. Call it on the root, before backward.

        Args:
            enabled: ``False`` by default.

        Raises:
            RuntimeError: this module is not the root; or a backward has begun that was not
                completed.
        """
        state = require_state(self)
        if state.is_root is False:
            self._refuse_nested("set_manual_backward_finalization")
        state.root.ledger.set_manual(enabled)

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Complete the backwards of a step, after ``set_manual_backward_finalization(True)``.

        Gradients that groups have kept are reduced as the groups' settings say now, and groups are
        resharded. If several backwards come before, turn synchronization off for them
        (``set_requires_gradient_sync(False)``), and on again before this call. Every rank makes it.
        Before the first forward it does nothing.

        Args:
            async_op: return at once, with a handle to wait for before gradients are used, or the
                next forward begins.

        Returns:
            The handle if ``async_op``, else ``None``.

        Raises:
            RuntimeError: this module is not the root; finalization is not manual; a backward is
                running; or an earlier handle has not been waited for.
            PeerLostError: a peer died or stalled.
        """
        state = require_state(self)
        if state.is_root is None:
            return GradientReductionHandle(None) if async_op else None
        if not state.is_root:
            self._refuse_nested("finalize_backward")
        handle = state.root.finalize()
        if async_op:
            return handle
        handle.wait()
        return None

    def _refuse_nested(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what}: expected the root, the outermost module that fully_shard was applied to; "
            f"found a nested {type(self).__name__}"
        )

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide the sum of gradients by ``factor``, or (``None``) by the number of ranks.

        Args:
            factor: a positive number; ``None`` restores the default.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        check_arguments(FSDPModule.set_gradient_divide_factor, locals())
        if factor is not None and not factor > 0:
            raise ValueError(f"gradient divide factor: expected a positive number, found {factor}")
        for group in groups_of(self, recurse=False):
            group.options.gradient_divide_factor = factor

    @deprecated("Use `set_gradient_divide_factor` instead")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call :meth:`set_gradient_divide_factor`, the newer name of this method.

        Args:
            factor: a positive number.
        """
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether collectives only add gradients, which are then divided afterwards.

        Args:
            enable: add first and divide in a second step, instead of averaging in the collective.
        """
        for group in groups_of(self, recurse=False):
            group.options.reduce_op = Reduce.SUM if enable else Reduce.AVG

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether gradients of parameters that a backward did not reach are reduced as zeros.

        Needed if ranks use different parameters in one step (a mixture of experts, say). Otherwise
        that is an error.

        Args:
            reduce_scatter_unused_params: ``False`` by default.
            recurse: include the sharded modules inside this one.
        """
        for group in groups_of(self, recurse):
            group.options.reduce_scatter_unused_params = reduce_scatter_unused_params

    # -- communication -------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Use ``comm`` to gather the group of this module, with flat buffers that it allocates.

        Args:
            comm: has ``allocate(size, *, dtype, device) -> Tensor``, and is called as
                ``comm(output_tensor, input_tensor, group, async_op)``. It returns a work to wait
                for, or ``None`` if it is done.
        """
        check_arguments(FSDPModule.set_custom_all_gather, locals())
        for group in groups_of(self, recurse=False):
            if group.mesh.shards:
                group.change_mesh(group.mesh.with_all_gather(comm))
                if group.post_forward is not None:
                    group.post_forward.mesh = group.post_forward.mesh.with_all_gather(comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Use ``comm`` to reduce-scatter the gradients of this module's group.

        Args:
            comm: as for :meth:`set_custom_all_gather`, called as
                ``comm(output_tensor, input_tensor, group, op, async_op)``.
        """
        check_arguments(FSDPModule.set_custom_reduce_scatter, locals())
        for group in groups_of(self, recurse=False):
            if group.mesh.shards:
                group.change_mesh(group.mesh.with_reduce_scatter(comm))

    def wire_overflows(self) -> int:
        """Count the blocks that wires made or left without finite numbers on this rank.

        A block of int8 or fp8 with a value that is not finite, or with one of the largest that fp32
        has, is sent so that no number of it is finite. Where a gradient is, its step should be
        skipped (``clip_grad_norm_`` with ``error_if_nonfinite``, or a gradient scaler).

        Returns:
            The blocks that this rank has encoded so, since its transports exist: of parameters, of
            contributions to gradients, and of sums. On an accelerator, this waits for it.
        """
        transports = {
            transport: None for group in groups_of(self) for transport in group.mesh.encoded
        }
        return sum(transport.overflows for transport in transports)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Call ``hook`` with the reduced gradients of this module's group.

        Args:
            hook: called after the reduce-scatter (and the all-reduce of a 2-D mesh) with a 1-D
                tensor in the dtype of the reduction: the gradients, concatenated. It may change
                the tensor in place.
            stream: where to run the hook, beside backward. The optimizer waits for it. A device
                without streams (the CPU) runs the hook in its turn.

        Raises:
            ValueError: a ``stream`` on a 2-D mesh.
        """
        check_arguments(FSDPModule.set_all_reduce_hook, locals())
        groups = list(groups_of(self, recurse=False))
        if stream is not None and any(group.mesh.replicate is not None for group in groups):
            raise ValueError("set_all_reduce_hook: a 2-D mesh takes no stream")
        for group in groups:
            group.options.all_reduce_hook = hook
            ordered = devices.has_streams(group.mesh.device)
            group.options.all_reduce_hook_stream = stream if ordered else None

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the first all-gather of the next forward wait for ``event``, once.

        Without it, nothing overtakes the optimizer either. On CPUs there is nothing to wait for.

        Args:
            event: recorded after the optimizer step, on its stream.

        Raises:
            TypeError: ``event`` has no ``wait``.
        """
        if not hasattr(event, "wait"):
            raise TypeError(f"event: expected a torch.Event, found {event!r}")
        require_state(self).root.post_optim_event = event

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set the number of groups whose full gradients may be in reduction at once (default: 1).

        More of them hide a slow network behind backward, and take that much more memory.

        Args:
            max_input_buffers: the number of groups, 1 or more.
            recurse: include the sharded modules inside this one.

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
        """Set whether gradients are reduced over a separate process group.

        In NCCL, collectives of one process group run one after the other, and those of two groups
        run concurrently. Every rank of the mesh makes this call. All models that are sharded over
        the same ranks share one.

        Args:
            enable: whether reductions get a process group of their own.
            recurse: include the sharded modules inside this one.
        """
        for group in groups_of(self, recurse):
            if not group.mesh.shards:
                continue
            if not enable:
                group.change_mesh(group.mesh.with_scatter_group(None))
            elif group.mesh.scatter_group is None:
                group.change_mesh(group.mesh.with_scatter_group(group.mesh.separate_group()))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refuse buffers that the process group allocates.

        Args:
            enable: ``False``, as it is.

        Raises:
            NotImplementedError: it is ``True``.
        """
        if enable:
            raise _needs_gpu("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Refuse symmetric memory.

        Args:
            backend: what would allocate it.

        Raises:
            NotImplementedError: always.
        """
        raise _needs_gpu("set_symm_mem_for_comm")

    # -- inside --------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[Any, Any]) -> FSDPModule:
        """Copy the module with its shards; the copy is sharded over the same mesh.

        Unreduced gradients are not copied.
        """
        for group in groups_of(self, recurse=True):
            group.reshard()
            for param in group.params:
                param.form.copy_parameter(memo)
        module = self
        memo.setdefault(COPIED, frozenset(module.modules()))
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


fsdp.name_module(FSDPModule, require_state)


_CLASSES: dict[type, type] = {}
_initialize_new = True


def _needs_gpu(setter: str) -> NotImplementedError:
    return NotImplementedError(
        f"{setter} on rank {dist.get_rank()}: not offered until it has run on a GPU; leave it out, "
        "which changes no value"
    )


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """The classes made so far, by the original class of the module."""
    return _CLASSES


@contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Inside, constructing the class of a sharded module does not call ``__init__``."""
    global _initialize_new
    before = _initialize_new
    try:
        _initialize_new = False
        yield
    finally:
        _initialize_new = before


def fsdp_class_of(original: type[nn.Module]) -> type:
    """The subclass of both ``original`` and :class:`FSDPModule`.

    Raises:
        TypeError: ``original`` does not allow subclasses.
    """
    if original not in _CLASSES:
        _CLASSES[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
    return _CLASSES[original]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.<method_name>()`` gather and free parameters as ``forward()`` does.

    Args:
        module: a sharded module; any other is left as it is.
        method_name: name of a method that uses the module's parameters, such as ``"generate"``.

    Raises:
        ValueError: ``module`` has no such method.
    """
    check_arguments(register_fsdp_forward_method, locals())
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")

    # A copy of the module copies this method, which then has to run on the copy.
    own = getattr(method, "__self__", None) is module

    @functools.wraps(method)
    def call(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        bound = types.MethodType(method.__func__, self) if own else method
        return run_as_forward(require_state(self), self, bound, args, kwargs)

    setattr(module, method_name, types.MethodType(call, module))


def share_comm_ctx(modules: list[TorchFSDPModule]) -> None:
    """Accept several roots (the chunks of a pipeline stage, say) that would share communication.

    Nothing needs to be done: roots over the same ranks already share their transports.

    Args:
        modules: sharded roots.

    Raises:
        ValueError: one of ``modules`` is not sharded by Shardwise.
    """
    check_arguments(share_comm_ctx, locals())
    for module in modules:
        require_state(module)
