"""What a unit of a wrapped model is told, resolved once; and which kind of state dict it makes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from shardwise.frontends.strategies import Strategy, resolve
from shardwise.sharding.mesh import device_of


@dataclass(frozen=True)
class UnitSettings:
    """How one unit is sharded.

    Attributes:
        strategy: as the user named it.
        mesh: over which ranks.
        reshard_after_forward: as for ``fully_shard``.
        mixed_precision: in which dtypes.
        cpu_offload: where the shards live.
        backward_prefetch: whether backward gathers ahead.
        transport: what moves the bytes.
    """

    strategy: ShardingStrategy
    mesh: DeviceMesh
    reshard_after_forward: bool | int | None
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    backward_prefetch: BackwardPrefetch | None
    transport: str | None

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitSettings:
        """A copy of a module is sharded over the same ranks."""
        return self

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return device_of(self.mesh)


def default_reshard(strategy: ShardingStrategy) -> bool | None:
    """What a strategy says about freeing parameters, in the words of ``fully_shard``.

    ``None``, for those that free them: but not the root's, which backward needs at once.
    """
    plan = resolve(Strategy.of(strategy), 1, replicas=1)
    return None if plan.reshard_after_forward else False


def say_what_has_no_meaning(stacklevel: int, **notes: str | None) -> None:
    """Warn of every argument for which there is a note.

    Args:
        stacklevel: as for ``warnings.warn``, seen from the caller.
        notes: by argument, what to know; ``None`` where there is nothing to say.
    """
    for argument, note in notes.items():
        if note is not None:
            warnings.warn(f"{argument}: {note}", stacklevel=stacklevel + 1)


_MODEL_CONFIGS: dict[StateDictType, type[StateDictConfig]] = {
    StateDictType.FULL_STATE_DICT: FullStateDictConfig,
    StateDictType.LOCAL_STATE_DICT: LocalStateDictConfig,
    StateDictType.SHARDED_STATE_DICT: ShardedStateDictConfig,
}
_OPTIM_CONFIGS: dict[StateDictType, type[OptimStateDictConfig]] = {
    StateDictType.FULL_STATE_DICT: FullOptimStateDictConfig,
    StateDictType.LOCAL_STATE_DICT: LocalOptimStateDictConfig,
    StateDictType.SHARDED_STATE_DICT: ShardedOptimStateDictConfig,
}


def state_dict_settings(
    kind: StateDictType,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """The settings of a kind of state dict, with its defaults where none are given.

    Raises:
        TypeError: a configuration is not of that kind.
    """
    config = _MODEL_CONFIGS[kind]() if config is None else config
    optim_config = _OPTIM_CONFIGS[kind]() if optim_config is None else optim_config
    for name, found, expected in (
        ("state_dict_config", config, _MODEL_CONFIGS[kind]),
        ("optim_state_dict_config", optim_config, _OPTIM_CONFIGS[kind]),
    ):
        if type(found) is not expected:
            raise TypeError(
                f"{name}: {kind.name} expects a {expected.__name__}, found a {type(found).__name__}"
            )
    return StateDictSettings(kind, config, optim_config)
