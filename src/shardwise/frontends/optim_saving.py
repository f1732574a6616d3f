"""The methods of a wrapped model that save and load an optimizer's state."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    StateDictSettings,
    StateDictType,
)

from shardwise.frontends.optim_state import (
    StateDict,
    broadcast_state,
    load_by_name,
    rekey,
    save_by_name,
)
from shardwise.frontends.saving import SavingModule, wrappers_in
from shardwise.frontends.settings import UnitSettings, state_dict_settings


class OptimSavingModule(SavingModule):
    """A wrapper that knows the optimizer's state by the names of its parameters."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: StateDict | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """The state of ``optim`` by parameter names, in the kind that is set on ``model``.

        Every rank calls it.

        Args:
            model: the model, wrapped or with wrapped modules in it.
            optim: an optimizer of its parameters.
            optim_state_dict: in place of ``optim.state_dict()``.
            group: not needed: parameters know over which ranks they are cut.
        """
        settings = SavingModule.get_state_dict_type(model)
        state = optim.state_dict() if optim_state_dict is None else optim_state_dict
        keeps = wrappers_in(model)[0].keeps_whole(settings.optim_state_dict_config)
        return save_by_name(model, optim, state, settings, keeps=keeps)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """Turn what :meth:`optim_state_dict` made into what ``optim.load_state_dict`` takes.

        With ``rank0_only`` in the settings of a whole state, only the first rank has to have it.

        Args:
            model: the model, wrapped or with wrapped modules in it.
            optim: an optimizer of its parameters.
            optim_state_dict: the state by parameter names.
            is_named_optimizer: whether ``optim`` knows its parameters by name.
            load_directly: call ``optim.load_state_dict`` too.
            group: over which ranks to send what only the first one has; by default all of the mesh.

        Raises:
            ValueError: a name that the model does not have, or a tensor of another shape.
        """
        settings = SavingModule.get_state_dict_type(model)
        only_first = getattr(settings.optim_state_dict_config, "rank0_only", False)
        made = _to_load(
            model, optim, optim_state_dict, settings, is_named_optimizer, only_first, group
        )
        if load_directly:
            optim.load_state_dict(made)
        return made

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: object = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """The whole state by parameter names, on the host; an older :meth:`optim_state_dict`."""
        config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
        settings = state_dict_settings(StateDictType.FULL_STATE_DICT, None, config)
        keeps = wrappers_in(model)[0].keeps_whole(config)
        return save_by_name(model, optim, optim.state_dict(), settings, keeps=keeps)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> StateDict:
        """The state by parameter names as ``DTensor``s; an older :meth:`optim_state_dict`."""
        settings = state_dict_settings(StateDictType.SHARDED_STATE_DICT)
        return save_by_name(model, optim, optim.state_dict(), settings, keeps=True)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: StateDict,
        model: nn.Module,
        optim_input: object = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> StateDict:
        """What ``load_state_dict`` takes, of a whole state that every rank has."""
        settings = state_dict_settings(StateDictType.FULL_STATE_DICT)
        return _to_load(model, optim, full_optim_state_dict, settings)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: StateDict, model: nn.Module, optim: torch.optim.Optimizer
    ) -> StateDict:
        """What ``load_state_dict`` takes, of what :meth:`sharded_optim_state_dict` made."""
        settings = state_dict_settings(StateDictType.SHARDED_STATE_DICT)
        return _to_load(model, optim, sharded_optim_state_dict, settings)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: StateDict | None,
        model: nn.Module,
        optim_input: object = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """What ``load_state_dict`` takes, of a whole state that only the first rank has."""
        settings = state_dict_settings(StateDictType.FULL_STATE_DICT)
        return _to_load(model, optim, full_optim_state_dict, settings, only_first=True, group=group)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: StateDict,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: object = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> StateDict:
        """The same state with parameter names as keys, or with parameter ids.

        Args:
            optim_state_dict: by names or by ids.
            optim_state_key_type: which of both is wanted.
            model: the model, which need not be wrapped.
            optim_input: not needed.
            optim: an optimizer of its parameters; without one, ``model.parameters()`` in order.

        Raises:
            ValueError: some keys are names and some are ids, or one is not of this model.
        """
        return rekey(optim_state_dict, optim_state_key_type, model, optim)


def _to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    state: StateDict | None,
    settings: StateDictSettings,
    keeps_names: bool = False,
    only_first: bool = False,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    if not only_first:
        assert state is not None
        return load_by_name(model, optim, state, settings, keeps_names=keeps_names)
    unit = wrappers_in(model)[0].settings
    over = group if group is not None else _group_of(unit)
    state, receive = broadcast_state(state, over, unit.device)
    return load_by_name(model, optim, state, settings, keeps_names=keeps_names, receive=receive)


def _group_of(unit: UnitSettings) -> dist.ProcessGroup:
    """A process group of all ranks of a mesh."""
    if unit.mesh.ndim == 1:
        return unit.mesh.get_group()
    if unit.mesh.size() != dist.get_world_size():
        raise ValueError(
            "a mesh of two dimensions over a part of all ranks: pass group=, the process group of "
            "the ranks that load the state"
        )
    assert dist.group.WORLD is not None
    return dist.group.WORLD
