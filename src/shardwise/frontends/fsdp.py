"""``FullyShardedDataParallel``: the wrapper that scripts for FSDP1 and FairScale use.

It wraps a module that ``fully_shard`` was applied to. The runtime shards, gathers and reduces; this
file translates the constructor's arguments and the wrapper's methods for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)

from shardwise._torch import fsdp
from shardwise.base.arguments import check_arguments
from shardwise.frontends.fsdp2 import fully_shard
from shardwise.frontends.module import FSDPModule
from shardwise.frontends.optim_saving import OptimSavingModule
from shardwise.frontends.settings import (
    Groups,
    UnitSettings,
    WithoutEffect,
    check_device,
    find_mesh,
    warn_without_effect,
)
from shardwise.frontends.state_dict import state_dict_settings
from shardwise.frontends.strategies import Strategy, resolve
from shardwise.frontends.summon import SummonOptions, summoned
from shardwise.frontends.unit import (
    AutoWrap,
    Ignored,
    ParamInit,
    broadcast_states,
    cast_buffers,
    materialize_unit,
)
from shardwise.sharding.policy import cast_floating
from shardwise.sharding.state import FSDPState, gather_in_order, state_of, states_of
from shardwise.transport.wire import Wire
from shardwise.wrap import Policy


class FullyShardedDataParallel(OptimSavingModule):
    """A module whose parameters are sharded over ranks, with the API of torch's FSDP1.

    Parameters are ``DTensor``s under the names that they have in ``module``. Create the optimizer
    from them after wrapping.

    Source: ``torch.distributed.fsdp.FullyShardedDataParallel``. Arguments after ``device_mesh``
    are FairScale's, PyTorch/XLA's or Shardwise's own.

    Args:
        module: the module; its parameters are sharded in place.
        process_group: the ranks; for hybrid strategies a tuple of the sharding group and the
            replicating group. By default all ranks; hybrid strategies then shard inside each host
            (``LOCAL_WORLD_SIZE`` ranks) and replicate across hosts.
        sharding_strategy: ``FULL_SHARD`` by default.
        cpu_offload: ``CPUOffload(True)`` keeps shards, gradients and optimizer state on the host.
        auto_wrap_policy: the modules inside that become units of their own; see
            :mod:`shardwise.wrap`.
        backward_prefetch: ``BACKWARD_PRE`` gathers one unit ahead in backward, ``None`` does not.
        mixed_precision: dtypes of parameters, reduction and buffers.
        ignored_modules: modules whose parameters are not sharded.
        param_init_fn: called with every module that has tensors on the meta device, to move them to
            a device and initialize them. By default ``to_empty`` and ``reset_parameters()``.
        device_id: the device to compute on: the CPU, or the current accelerator.
        sync_module_states: broadcast parameters and buffers from the first rank.
        forward_prefetch: gather one unit ahead in forward, in the order of ``modules()``. A write
            to a unit's parameters once the forward before it has begun then raises an error.
        limit_all_gathers: without effect: at most two units are gathered at a time.
        use_orig_params: without effect: parameters are never flattened.
        ignored_states: modules or parameters that are not sharded.
        device_mesh: a mesh in place of ``process_group``: 1-D, or 2-D ``(replicate, shard)``.
        reshard_after_forward: override whether the strategy frees parameters between forward and
            backward; an ``int`` keeps them sharded over that many ranks.
        auto_wrapper_callable: wraps the modules that ``auto_wrap_policy`` chooses, in place of this
            class; called as ``auto_wrapper_callable(module, **arguments)``.
        transport: the transport, as for :func:`~shardwise.fully_shard`.
        wire: the formats on the wire, as there.

    Raises:
        ValueError: arguments contradict each other or the world, or the module is wrapped already,
            or cannot be materialized.
        TypeError: ``sharding_strategy`` is no ``ShardingStrategy``.
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
        wire: Wire | Mapping[str, Wire] | None = None,
    ) -> None:
        check_arguments(FullyShardedDataParallel.__init__, locals())
        if isinstance(backward_prefetch, str):
            raise TypeError(
                f"backward_prefetch: found {backward_prefetch!r}, expected a BackwardPrefetch or "
                "None; import it from shardwise"
            )
        given = dict(locals())  # arguments by name, as the tables below list them
        strategy = ShardingStrategy.FULL_SHARD if sharding_strategy is None else sharding_strategy
        mesh = find_mesh(Strategy.of(strategy), process_group, device_mesh, device_id)
        warn_without_effect(given, _WITHOUT_EFFECT, stacklevel=2)
        check_device(device_id, mesh, stacklevel=2)
        frees = resolve(Strategy.of(strategy), 1, replicas=1).reshard_after_forward
        if reshard_after_forward is None and not frees:
            reshard_after_forward = False  # fully_shard would free those of nested units
        settings = UnitSettings(
            strategy=strategy,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mixed_precision=mixed_precision or MixedPrecision(),
            cpu_offload=cpu_offload or CPUOffload(),
            backward_prefetch=backward_prefetch,
            transport=transport,
            wire=wire,
        )
        ignored = Ignored.of(module, ignored_modules, ignored_states)
        inner = {name: given[name] for name in _PASSED_ON}
        inner |= {"ignored_states": ignored.parameters, "device_mesh": mesh}
        inner["backward_prefetch"] = backward_prefetch and BackwardPrefetch.BACKWARD_PRE
        self.wrap(
            module,
            settings,
            ignored=ignored,
            auto_wrap=AutoWrap(
                auto_wrap_policy, auto_wrapper_callable or type(self), inner, mixed_precision
            ),
            param_init_fn=param_init_fn,
            sync_module_states=sync_module_states,
        )
        if forward_prefetch:
            gather_in_order(self)

    def wrap(
        self,
        module: nn.Module,
        settings: UnitSettings,
        *,
        ignored: Ignored,
        auto_wrap: AutoWrap,
        param_init_fn: ParamInit | None,
        sync_module_states: bool,
        state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT,
    ) -> None:
        """Shard ``module`` and become its wrapper: the last step of a constructor.

        Args:
            module: the module.
            settings: how to shard it.
            ignored: modules and parameters to leave alone.
            auto_wrap: which modules inside to wrap first.
            param_init_fn: called with every module that has tensors of its own on the meta device.
            sync_module_states: as for the constructors.
            state_dict_type: the initial type of state dicts.
        """
        auto_wrap.apply(module, ignored)
        inner = fsdp.without_checkpointing(module)
        materialize_unit(inner, settings.device, param_init_fn, ignored.modules)
        if sync_module_states:
            broadcast_states(inner, settings.mesh, settings.device, ignored.parameters)
        offloads, precision = settings.cpu_offload.offload_params, settings.mixed_precision
        fully_shard(
            inner,
            mesh=settings.mesh,
            reshard_after_forward=settings.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=precision.param_dtype,
                reduce_dtype=precision.reduce_dtype or precision.param_dtype,
                cast_forward_inputs=False,  # forward does
            ),
            offload_policy=CPUOffloadPolicy() if offloads else OffloadPolicy(),
            ignored_params=ignored.parameters,
            transport=settings.transport,
            wire=settings.wire,
        )
        super().__init__(module)
        self.settings = settings
        self._settings_of_state_dicts = state_dict_settings(state_dict_type)
        self._has_parent = False
        for nested in self.fsdp_modules(module):
            nested._has_parent = True
        for group in self.sharding_state.groups:
            group.options.keep_low_precision_grads = precision.keep_low_precision_grads
        if settings.backward_prefetch is None:
            assert isinstance(inner, FSDPModule)
            inner.set_modules_to_backward_prefetch([inner])  # only itself, so nothing ahead

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module. Its parameters are gathered for as long as it needs them.

        Returns:
            What the wrapped module returns.

        Raises:
            RuntimeError: inside ``summon_full_params``.
            PeerLostError: a peer died or stalled.
        """
        mixed_precision = self.settings.mixed_precision
        if self._buffer_dtypes is None:
            self._buffer_dtypes = cast_buffers(self.own_modules(), mixed_precision.buffer_dtype)
        casts = (
            mixed_precision.cast_root_forward_inputs
            if self.is_root
            else mixed_precision.cast_forward_inputs
        )
        if casts and mixed_precision.param_dtype is not None:
            args = cast_floating(args, mixed_precision.param_dtype)
            kwargs = cast_floating(kwargs, mixed_precision.param_dtype)
        return self.get_wrapped()(*args, **kwargs)

    @property
    def is_root(self) -> bool:
        """Whether this is the outermost wrapper."""
        return not self._has_parent

    @property
    def sharding_state(self) -> FSDPState:
        """The state that ``fully_shard`` attached to the module."""
        state = state_of(self.module)
        assert state is not None
        return state

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The sharding strategy of this unit."""
        return self.settings.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The dtypes of this unit."""
        return self.settings.mixed_precision

    @property
    def cpu_offload(self) -> CPUOffload:
        """Whether shards are kept on the host."""
        return self.settings.cpu_offload

    @property
    def compute_device(self) -> torch.device:
        """The device that this rank computes on."""
        return self.settings.device

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that parameters are sharded over; under ``NO_SHARD``, those that replicate."""
        mesh = self.settings.mesh
        replicates = self.settings.strategy is ShardingStrategy.NO_SHARD
        return mesh.get_group(0 if replicates else mesh.ndim - 1)

    @property
    def rank(self) -> int:
        """This rank in :attr:`process_group`."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """Number of ranks of :attr:`process_group`."""
        return self.process_group.size()

    # -- running -------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication in backwards inside this context.

        The first backward after it reduces the accumulated gradients. Until then every rank keeps
        full gradients.

        Raises:
            RuntimeError: this is not the outermost wrapper.
        """
        self._require_root("no_sync")
        before = [
            (group, group.options.requires_gradient_sync, group.options.requires_all_reduce)
            for state in states_of(self)
            for group in state.groups
        ]
        try:
            for group, _, _ in before:
                group.options.requires_gradient_sync = False
                group.options.requires_all_reduce = False
            yield
        finally:
            for group, sync, all_reduce in before:
                group.options.requires_gradient_sync = sync
                group.options.requires_all_reduce = all_reduce

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most ``max_norm``.

        A collective: every rank has to call it.

        Args:
            max_norm: the largest norm.
            norm_type: as for :func:`~shardwise.clip_grad_norm_`.

        Returns:
            The norm before clipping.

        Raises:
            RuntimeError: this is not the outermost wrapper.
        """
        from shardwise.optim.norms import clip_grad_norm_

        self._require_root("clip_grad_norm_")
        return clip_grad_norm_(self.parameters(), float(max_norm), norm_type)

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Reduce the gradients of all units with ``hook(state, gradients, output)``.

        Args:
            state: the first argument of the hook.
            hook: takes this rank's gradients of a unit as one flat tensor, and writes this rank's
                part of the result into the flat tensor ``output``. It also divides by the number of
                ranks. Scalars are not sharded, and are averaged without the hook.

        Raises:
            RuntimeError: this is not the outermost wrapper.
            TypeError: ``hook`` is not callable.
            NotImplementedError: the strategy replicates parameters; its all-reduce has no hook.
        """
        self._require_root("register_comm_hook")
        if not callable(hook):
            raise TypeError(f"register_comm_hook: expected a function, found {hook!r}")
        for unit in self.fsdp_modules(self):
            if unit.settings.mesh.ndim == 2:
                raise NotImplementedError(
                    f"register_comm_hook: {unit.settings.strategy.name} replicates parameters, and "
                    "a hook replaces the reduce-scatter of sharded ones only. Use "
                    "FULL_SHARD or SHARD_GRAD_OP, or set_all_reduce_hook on fsdp.module"
                )
        for unit in self.fsdp_modules(self):
            inner = unit.module
            assert isinstance(inner, FSDPModule)
            inner.set_custom_reduce_scatter(HookedReduceScatter(hook, state))

    # -- full parameters -----------------------------------------------------------------------

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
        """Give modules their full, plain parameters inside this context, in the stored dtype.

        Parameters with tensor parallelism become ``DTensor``s on its mesh. Neither forward nor
        backward may run inside. A collective: every rank has to enter.

        Args:
            module: the model, wrapped or with wrapped modules in it.
            recurse: include all units inside it; otherwise only this unit's own parameters.
            writeback: keep changes: each rank copies its rows into its shards.
            rank0_only: only the first rank of the mesh gets full parameters.
            offload_to_cpu: put them on the host.
            with_grads: give full gradients, too.

        Raises:
            NotImplementedError: ``writeback`` together with ``rank0_only``.
            ValueError: inside a forward, a backward, or another such context.
        """
        if writeback and rank0_only:
            raise NotImplementedError(
                "summon_full_params(writeback=True, rank0_only=True): ranks without the full "
                "parameters would miss changes; pass writeback=False or rank0_only=False"
            )
        own = [module.sharding_state] if isinstance(module, FullyShardedDataParallel) else []
        options = SummonOptions(
            writeback=writeback,
            first_rank_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )
        with summoned(states_of(module) if recurse else own, options):
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call ``fn`` on every module inside, children first, with its full parameters.

        Only the units around that module are gathered at the time.

        Args:
            fn: may change parameters in place; the changes are kept.

        Returns:
            This module.
        """
        with self.summon_full_params(self, recurse=False):
            super().apply(fn)
        return self

    # -- queries -------------------------------------------------------------------------------

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in ``module``, including itself; only outermost ones if ``root_only``.

        Args:
            module: where to look.
            root_only: leave out wrappers inside other wrappers.

        Returns:
            The wrappers, in module order.
        """
        found = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        if not root_only:
            return found
        inside = {each for outer in found for each in outer.modules() if each is not outer}
        return [each for each in found if each not in inside]

    def check_is_root(self) -> bool:
        """Whether this is the outermost wrapper.

        Returns:
            ``True`` for the outermost wrapper.
        """
        return self.is_root

    def get_shard_metadata(self) -> dict[str, Any]:
        """The layout of this rank's shards, to save with them: consolidation needs it.

        Returns:
            What :func:`shardwise.checkpoint.get_shard_metadata` returns for this module.
        """
        from shardwise.checkpoint.ranks.xla import get_shard_metadata

        return get_shard_metadata(self)

    def _require_root(self, method: str) -> None:
        if not self.is_root:
            raise RuntimeError(
                f"{method}: found a wrapper around a {type(self.module).__name__} inside another, "
                "expected the outermost FullyShardedDataParallel; call it on the full model"
            )


_WITHOUT_EFFECT: WithoutEffect = {
    "use_orig_params": ((True,), "parameters are never flattened; each stays a DTensor of its own"),
    "limit_all_gathers": ((True,), "at most two units are gathered at a time anyway"),
    "backward_prefetch": (
        (BackwardPrefetch.BACKWARD_PRE, None),
        "BACKWARD_POST gathers one unit ahead, as BACKWARD_PRE does",
    ),
}

#: The arguments that modules wrapped by ``auto_wrap_policy`` get as they are.
_PASSED_ON = (
    "sharding_strategy",
    "cpu_offload",
    "mixed_precision",
    "param_init_fn",
    "sync_module_states",
    "reshard_after_forward",
    "transport",
    "wire",
)

#: ``hook(state, gradients, output)`` reduces flat gradients of all ranks into this rank's part.
CommHook = Callable[[Any, torch.Tensor, torch.Tensor], object]


class HookedReduceScatter:
    """A reduce-scatter that calls a user's hook, which also divides by the number of ranks.

    Args:
        hook: called once per group and dtype with flat gradients.
        state: its first argument.
    """

    def __init__(self, hook: CommHook, state: object) -> None:
        self._hook = hook
        self._state = state

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate a buffer for gradients or for the result."""
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor`` into ``output_tensor`` with the hook."""
        self._hook(self._state, input_tensor, output_tensor)
        if op == dist.ReduceOp.SUM:
            # The runtime divides sums afterwards, because no hook sees scalars.
            output_tensor.mul_(group.size())
