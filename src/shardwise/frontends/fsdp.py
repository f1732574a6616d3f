"""``FullyShardedDataParallel``: the wrapper that scripts for FSDP1 and FairScale use.

It wraps a module that ``fully_shard`` was applied to. The runtime shards, gathers and reduces; this
file translates the constructor's arguments and the wrapper's methods for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from shardwise.frontends.prepare import ParamInit
from shardwise.frontends.settings import (
    Groups,
    UnitSettings,
    default_reshard,
    find_mesh,
    note_on_device,
    say_what_has_no_meaning,
)
from shardwise.frontends.strategies import Strategy
from shardwise.frontends.unit import Ignored, ShardedUnit, auto_wrap
from shardwise.sharding.grad import clip_grad_norm_
from shardwise.sharding.module import FSDPModule
from shardwise.sharding.state import gather_in_order, states_of
from shardwise.sharding.state_dict import get_shard_metadata
from shardwise.sharding.summon import SummonOptions, summoned
from shardwise.wrap import Policy

_NO_MIXED_PRECISION = MixedPrecision()


class FullyShardedDataParallel(ShardedUnit):
    """A module whose parameters are sharded over ranks, as torch's class of this name has it.

    Parameters are ``DTensor``s under the names that they have in ``module``; build the optimizer of
    them after wrapping.

    Args:
        module: the module; its parameters are sharded in place.
        process_group: over which ranks; for hybrid strategies a tuple of the group that shards and
            the one that replicates. By default all ranks, and for hybrid strategies sharding
            inside each host, of ``LOCAL_WORLD_SIZE`` ranks, and replicating across.
        sharding_strategy: by default ``FULL_SHARD``.
        cpu_offload: ``CPUOffload(True)`` keeps shards, gradients and the optimizer on the host.
        auto_wrap_policy: which modules inside become units of their own: see
            :mod:`shardwise.wrap`.
        backward_prefetch: ``BACKWARD_PRE`` gathers one unit ahead; ``None`` none.
        mixed_precision: dtypes of parameters, reduction and buffers.
        ignored_modules: modules whose parameters are left alone.
        param_init_fn: called with every module that has tensors on the meta device, to put them on
            a device and initialise them. By default ``to_empty`` and ``reset_parameters()``.
        device_id: where to compute: the CPU, or the current accelerator.
        sync_module_states: give all ranks the parameters and buffers of the first.
        forward_prefetch: gather one unit ahead in forward, in the order of ``modules()``. What is
            written to a unit after the forward of the one before it began is missed then.
        limit_all_gathers: hold two units at a time at most, which is so anyway.
        use_orig_params: keep parameters as they are, which is so anyway.
        ignored_states: modules, or parameters, to leave alone.
        device_mesh: in place of ``process_group``: 1-D, or 2-D ``(replicate, shard)``.
        reshard_after_forward: free parameters between forward and backward or not, whatever the
            strategy says; or keep them over so many ranks (an ``int``).
        auto_wrapper_callable: wraps the modules that ``auto_wrap_policy`` chooses, in place of this
            class; called as ``auto_wrapper_callable(module, **arguments)``.
        transport: what moves the bytes: as for :func:`~shardwise.fully_shard`.

    Raises:
        ValueError: arguments that contradict each other or the world, a module that is wrapped
            already, or one that cannot be materialised.
        TypeError: a ``sharding_strategy`` that is none.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Groups | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Policy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: ParamInit | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        reshard_after_forward: bool | int | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        transport: str | None = None,
    ) -> None:
        strategy = ShardingStrategy.FULL_SHARD if sharding_strategy is None else sharding_strategy
        mesh = find_mesh(Strategy.of(strategy), process_group, device_mesh, device_id)
        say_what_has_no_meaning(
            stacklevel=2,
            use_orig_params=None if use_orig_params else _NOT_FLAT,
            limit_all_gathers=None if limit_all_gathers else _LIMITED,
            backward_prefetch=_ONE_AHEAD
            if backward_prefetch is BackwardPrefetch.BACKWARD_POST
            else None,
            device_id=note_on_device(device_id, mesh),
        )
        ignored = Ignored.of(module, ignored_modules, ignored_states)
        settings = UnitSettings(
            strategy=strategy,
            mesh=mesh,
            reshard_after_forward=default_reshard(strategy)
            if reshard_after_forward is None
            else reshard_after_forward,
            mixed_precision=mixed_precision or _NO_MIXED_PRECISION,
            cpu_offload=cpu_offload or CPUOffload(),
            backward_prefetch=backward_prefetch,
            transport=transport,
        )
        if auto_wrap_policy is not None:
            nested = {
                "sharding_strategy": sharding_strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch and BackwardPrefetch.BACKWARD_PRE,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "sync_module_states": sync_module_states,
                "ignored_states": ignored.parameters,
                "device_mesh": mesh,
                "reshard_after_forward": reshard_after_forward,
                "transport": transport,
            }
            wrapper = auto_wrapper_callable or type(self)
            auto_wrap(module, auto_wrap_policy, wrapper, nested, mixed_precision, ignored)
        self.hold(module, settings, ignored, param_init_fn, sync_module_states)
        if forward_prefetch:
            gather_in_order(self)

    # -- running -------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside accumulate gradients without communication, for all units.

        The first backward after it reduces what has been accumulated. Until then every rank keeps
        whole gradients.

        Raises:
            RuntimeError: this is not the outermost wrapper.
        """
        self._require_root("no_sync")
        before = [
            (group, group.options.requires_gradient_sync, group.options.requires_all_reduce)
            for state in states_of(self)
            for group in state.groups
        ]
        for group, _, _ in before:
            group.options.requires_gradient_sync = False
            group.options.requires_all_reduce = False
        try:
            yield
        finally:
            for group, sync, all_reduce in before:
                group.options.requires_gradient_sync = sync
                group.options.requires_all_reduce = all_reduce

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm, over all ranks, is at most ``max_norm``.

        Every rank calls it.

        Args:
            max_norm: the largest norm that is left as it is.
            norm_type: as for :func:`~shardwise.clip_grad_norm_`.

        Returns:
            The norm before clipping.

        Raises:
            RuntimeError: this is not the outermost wrapper.
        """
        self._require_root("clip_grad_norm_")
        return clip_grad_norm_(self.parameters(), float(max_norm), norm_type)

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Have ``hook(state, gradients, output)`` reduce every unit's gradients.

        Args:
            state: passed to the hook.
            hook: is given this rank's gradients of a unit as one flat tensor, and the flat tensor
                to put this rank's part of the result into. It divides by the number of ranks too.
                Scalars, which are not cut, are averaged without it.

        Raises:
            RuntimeError: this is not the outermost wrapper.
            TypeError: ``hook`` cannot be called.
            NotImplementedError: a strategy that replicates: its all-reduce has no hook.
        """
        self._require_root("register_comm_hook")
        if not callable(hook):
            raise TypeError(f"register_comm_hook: expected a function, found {hook!r}")
        for unit in self.fsdp_modules(self):
            if unit.settings.mesh.ndim == 2:
                raise NotImplementedError(
                    f"register_comm_hook: {unit.settings.strategy.name} replicates parameters, and "
                    "a hook stands in for the reduce-scatter of sharded ones only. Use "
                    "FULL_SHARD or SHARD_GRAD_OP, or set_all_reduce_hook on fsdp.module"
                )
        for unit in self.fsdp_modules(self):
            inner = unit.module
            assert isinstance(inner, FSDPModule)
            inner.set_custom_reduce_scatter(HookedReduceScatter(hook, state))

    # -- whole parameters ----------------------------------------------------------------------

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Inside, modules hold whole, plain parameters, in the dtype that they are stored in.

        Those that tensor parallelism cut before are what it left: ``DTensor``s on its own mesh.
        Between steps only: neither forward nor backward may run inside. Every rank enters.

        Args:
            module: the model, wrapped or with wrapped modules in it.
            recurse: with all that is inside it; else this unit's own parameters.
            writeback: keep what is changed: each rank takes over its own rows.
            rank0_only: only the first rank of the mesh gets them; the others hold shards.
            offload_to_cpu: put them on the host.
            with_grads: lend gradients with them.

        Raises:
            NotImplementedError: ``writeback`` with ``rank0_only``.
            ValueError: inside a forward, a backward, or another such context.
        """
        if writeback and rank0_only:
            raise NotImplementedError(
                "summon_full_params(writeback=True, rank0_only=True): ranks that do not hold the "
                "parameters do not learn of changes; pass writeback=False, or rank0_only=False"
            )
        own = [module.sharding_state] if isinstance(module, ShardedUnit) else []
        loan = SummonOptions(
            writeback=writeback,
            first_rank_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )
        with summoned(states_of(module) if recurse else own, loan):
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call ``fn`` on every module inside, children first, with its whole parameters.

        One unit at a time is whole, beside those that it is nested in.
        """
        with self.summon_full_params(self, recurse=False):
            super().apply(fn)
        return self

    # -- what there is -------------------------------------------------------------------------

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in ``module``, itself included; those in no other one, if ``root_only``."""
        found = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        if not root_only:
            return found
        inside = {each for outer in found for each in outer.modules() if each is not outer}
        return [each for each in found if each not in inside]

    def check_is_root(self) -> bool:
        """Whether no other wrapper is around this one."""
        return self.is_root

    def get_shard_metadata(self) -> dict[str, Any]:
        """How this rank's shards are cut, to be saved beside them and to consolidate them by."""
        return get_shard_metadata(self)

    # -- inside --------------------------------------------------------------------------------

    def _require_root(self, method: str) -> None:
        if not self.is_root:
            raise RuntimeError(
                f"{method}: expected the outermost FullyShardedDataParallel, found one around a "
                f"{type(self.module).__name__} inside another; call it on the whole model"
            )


_NOT_FLAT = "parameters are never flattened here; each stays one of its own, a DTensor"
_LIMITED = "at most two units are gathered at a time here, always"
_ONE_AHEAD = "BACKWARD_POST gathers as BACKWARD_PRE does here, one unit ahead of the one computing"


#: ``hook(state, gradients, output)`` reduces flat gradients of all ranks into this rank's part.
CommHook = Callable[[Any, torch.Tensor, torch.Tensor], object]


class HookedReduceScatter:
    """A reduce-scatter that is the user's hook: it divides too.

    Args:
        hook: reduces, called once per group and dtype with flat gradients.
        state: passed to it.
    """

    def __init__(self, hook: CommHook, state: object) -> None:
        self._hook = hook
        self._state = state

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Make a buffer for the gradients or the result."""
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Have the hook reduce ``input_tensor`` into ``output_tensor``."""
        self._hook(self._state, input_tensor, output_tensor)
        if op == dist.ReduceOp.SUM:
            # The runtime divides a sum afterwards, here and for scalars, which no hook sees.
            output_tensor.mul_(group.size())
