"""One unit: a module that ``fully_shard`` was applied to, and the wrapper around it.

``fsdp.py`` and ``xla.py`` say what the arguments of two constructors mean; this is what they make.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)

from shardwise import _torch
from shardwise.frontends.optim_saving import OptimSavingModule
from shardwise.frontends.precision import cast_buffers, cast_inputs, policy_of
from shardwise.frontends.prepare import ParamInit, broadcast_states, materialise_unit
from shardwise.frontends.settings import UnitSettings, state_dict_settings
from shardwise.frontends.units import Ignored
from shardwise.sharding.api import fully_shard
from shardwise.sharding.module import FSDPModule
from shardwise.sharding.module_state import ModuleState, state_of


class ShardedUnit(OptimSavingModule):
    """A wrapper around a module that is sharded."""

    _buffer_dtypes: dict[str, torch.dtype] | None
    _has_parent: bool

    def hold(
        self,
        module: nn.Module,
        settings: UnitSettings,
        ignored: Ignored,
        param_init_fn: ParamInit | None,
        sync_module_states: bool,
        state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT,
    ) -> None:
        """Shard ``module`` and become the wrapper around it: what a constructor ends with.

        Args:
            module: the module.
            settings: how to shard it.
            ignored: what to leave alone.
            param_init_fn: see :func:`~shardwise.frontends.prepare.materialise_unit`.
            sync_module_states: whether the first rank's values go to all.
            state_dict_type: the kind of state dict until another is set.
        """
        inner = _torch.without_checkpointing(module)
        materialise_unit(inner, settings.device, param_init_fn, ignored.modules)
        if sync_module_states:
            broadcast_states(inner, settings.mesh, settings.device, ignored.parameters)
        offloads = settings.cpu_offload.offload_params
        fully_shard(
            inner,
            mesh=settings.mesh,
            reshard_after_forward=settings.reshard_after_forward,
            mp_policy=policy_of(settings.mixed_precision),
            offload_policy=CPUOffloadPolicy() if offloads else OffloadPolicy(),
            ignored_params=ignored.parameters,
            transport=settings.transport,
        )
        super().__init__(module)
        self.settings = settings
        self._settings_of_state_dicts = state_dict_settings(state_dict_type)
        self._has_parent = False
        self._buffer_dtypes: dict[str, torch.dtype] | None = None
        for nested in units_in(module):
            nested._has_parent = True
        for group in self.sharding_state.groups:
            group.options.keep_low_precision_grads = (
                settings.mixed_precision.keep_low_precision_grads
            )
        if settings.backward_prefetch is None:
            assert isinstance(inner, FSDPModule)
            inner.set_modules_to_backward_prefetch([inner])  # itself: nothing ahead of its turn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, its parameters gathered for as long as it needs them.

        Raises:
            RuntimeError: inside ``summon_full_params``.
            PeerLostError: a peer died or stalled.
        """
        mixed_precision = self.settings.mixed_precision
        if self._buffer_dtypes is None:
            self._buffer_dtypes = cast_buffers(self.own_modules(), mixed_precision.buffer_dtype)
        args, kwargs = cast_inputs(mixed_precision, not self._has_parent, args, kwargs)
        return self.get_wrapped()(*args, **kwargs)

    @property
    def is_root(self) -> bool:
        """Whether no other wrapper is around this one."""
        return not self._has_parent

    @property
    def sharding_state(self) -> ModuleState:
        """What ``fully_shard`` knows of it."""
        state = state_of(self.module)
        assert state is not None
        return state

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """How this unit is spread over ranks."""
        return self.settings.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """In which dtypes it computes."""
        return self.settings.mixed_precision

    @property
    def cpu_offload(self) -> CPUOffload:
        """Whether its shards live on the host."""
        return self.settings.cpu_offload

    @property
    def compute_device(self) -> torch.device:
        """Where this rank computes."""
        return self.settings.device

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that its parameters are sharded over; all that replicate, under NO_SHARD."""
        mesh = self.settings.mesh
        whole = self.settings.strategy is ShardingStrategy.NO_SHARD
        return mesh.get_group(0 if whole else mesh.ndim - 1)

    @property
    def rank(self) -> int:
        """This rank in :attr:`process_group`."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """The size of :attr:`process_group`."""
        return self.process_group.size()

    def _dtypes_of_buffers(self) -> dict[str, torch.dtype]:
        return self._buffer_dtypes or {}


def units_in(module: nn.Module) -> list[ShardedUnit]:
    """The wrappers in ``module``, itself included."""
    return [each for each in module.modules() if isinstance(each, ShardedUnit)]
