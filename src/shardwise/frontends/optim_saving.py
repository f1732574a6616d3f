"""The methods of the wrapper that convert optimizer state between parameter ids and names.

What they do is in ``optim_state.py``, which is loaded when one of them is called.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, OptimStateKeyType, StateDictType

from shardwise.frontends.state_dict import StateDict, WrapperModule, state_dict_settings


class OptimSavingModule(WrapperModule):
    """A wrapper that converts optimizer state between parameter ids and names."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: StateDict | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """The state of ``optim`` by parameter name, in the type that is set on ``model``.

        A collective: every rank has to call it.

        Args:
            model: the model, wrapped or with wrapped modules in it.
            optim: an optimizer of its parameters.
            optim_state_dict: a state to convert in place of ``optim.state_dict()``.
            group: not needed: parameters know the ranks that they are sharded over.

        Returns:
            A dict with ``"state"``, by parameter names, and ``"param_groups"``. Its tensors are
            ``DTensor`` shards, or full, depending on the state dict type.

        Raises:
            ValueError: ``group`` has other ranks than the model.
        """
        from shardwise.frontends import optim_state

        optim_state.check_group(model, group)
        settings = WrapperModule.get_state_dict_type(model)
        state = optim.state_dict() if optim_state_dict is None else optim_state_dict
        return optim_state.save_by_name(model, optim, state, settings)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """Convert a result of :meth:`optim_state_dict` for ``optim.load_state_dict``.

        If the settings say ``rank0_only``, only the first rank needs the full state.

        Args:
            model: the model, wrapped or with wrapped modules in it.
            optim: an optimizer of its parameters.
            optim_state_dict: the state by parameter name.
            is_named_optimizer: whether ``optim`` identifies its parameters by name.
            load_directly: also call ``optim.load_state_dict``.
            group: the ranks to broadcast the first rank's state to; all ranks of the mesh by
                default.

        Returns:
            A dict for ``optim.load_state_dict``.

        Raises:
            ValueError: the model has no parameter of a name, or a tensor has another shape.
        """
        from shardwise.frontends import optim_state

        settings = WrapperModule.get_state_dict_type(model)
        keys = OptimStateKeyType.PARAM_ID
        if is_named_optimizer:
            keys = OptimStateKeyType.PARAM_NAME
        if getattr(settings.optim_state_dict_config, "rank0_only", False):
            made = optim_state.load_from_first_rank(
                model, optim, optim_state_dict, settings, group, keys
            )
        else:
            made = optim_state.load_by_name(model, optim, optim_state_dict, settings, keys)
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
        """The full state by parameter name, on the host. Superseded by :meth:`optim_state_dict`.

        Args:
            model: the model, wrapped or with wrapped modules in it.
            optim: an optimizer of its parameters.
            optim_input: not needed: what ``optim`` was made from.
            rank0_only: return the state on the first rank only.
            group: not needed: parameters know the ranks that they are sharded over.

        Returns:
            A dict with ``"state"`` and ``"param_groups"``; its tensors are full and on the CPU.

        Raises:
            ValueError: ``optim`` was made from other parameters than ``optim_input``, or ``group``
                has other ranks than the model.
        """
        from shardwise.frontends import optim_groups, optim_state

        optim_groups.made_from(optim, optim_input)
        optim_state.check_group(model, group)
        config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
        settings = state_dict_settings(StateDictType.FULL_STATE_DICT, None, config)
        return optim_state.save_by_name(model, optim, optim.state_dict(), settings)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> StateDict:
        """The state by parameter name as ``DTensor``s. Superseded by :meth:`optim_state_dict`.

        Args:
            model: the model, wrapped or with wrapped modules in it.
            optim: an optimizer of its parameters.
            group: not needed: parameters know the ranks that they are sharded over.

        Returns:
            A dict with ``"state"`` and ``"param_groups"``.

        Raises:
            ValueError: ``group`` has other ranks than the model.
        """
        from shardwise.frontends import optim_state

        optim_state.check_group(model, group)
        settings = state_dict_settings(StateDictType.SHARDED_STATE_DICT)
        return optim_state.save_by_name(model, optim, optim.state_dict(), settings)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: StateDict,
        model: nn.Module,
        optim_input: object = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> StateDict:
        """Convert a full state on every rank for ``load_state_dict``.

        Args:
            full_optim_state_dict: the full state, on every rank.
            model: the model, wrapped or with wrapped modules in it.
            optim_input: what an optimizer was made from, in place of ``optim``.
            optim: an optimizer of its parameters; without it and ``optim_input``, the state is for
                one that has ``model.parameters()`` in order.

        Returns:
            A dict for ``optim.load_state_dict``.

        Raises:
            ValueError: ``optim`` was made from other parameters than ``optim_input``.
        """
        from shardwise.frontends import optim_groups, optim_state

        optim = optim_groups.made_from(optim, optim_input)
        settings = state_dict_settings(StateDictType.FULL_STATE_DICT)
        return optim_state.load_by_name(model, optim, full_optim_state_dict, settings)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: StateDict, model: nn.Module, optim: torch.optim.Optimizer
    ) -> StateDict:
        """Convert a result of :meth:`sharded_optim_state_dict` for ``load_state_dict``.

        Args:
            sharded_optim_state_dict: the state by parameter names, with ``DTensor`` values.
            model: the model, wrapped or with wrapped modules in it.
            optim: an optimizer of its parameters.

        Returns:
            A dict for ``optim.load_state_dict``.
        """
        from shardwise.frontends import optim_state

        settings = state_dict_settings(StateDictType.SHARDED_STATE_DICT)
        return optim_state.load_by_name(model, optim, sharded_optim_state_dict, settings)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: StateDict | None,
        model: nn.Module,
        optim_input: object = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """Convert a full state that only the first rank has for ``load_state_dict``.

        Args:
            full_optim_state_dict: the full state on the first rank, ``None`` on the others.
            model: the model, wrapped or with wrapped modules in it.
            optim_input: what an optimizer was made from, in place of ``optim``.
            optim: an optimizer of its parameters; without it and ``optim_input``, the state is for
                one that has ``model.parameters()`` in order.
            group: the ranks to send the state to; by default all ranks of the mesh.

        Returns:
            A dict for ``optim.load_state_dict``.

        Raises:
            ValueError: ``optim`` was made from other parameters than ``optim_input``.
        """
        from shardwise.frontends import optim_groups, optim_state

        optim = optim_groups.made_from(optim, optim_input)
        settings = state_dict_settings(StateDictType.FULL_STATE_DICT)
        return optim_state.load_from_first_rank(
            model, optim, full_optim_state_dict, settings, group
        )

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: StateDict,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: object = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> StateDict:
        """Convert the keys of a state to parameter names or ids.

        Args:
            optim_state_dict: a state by name or by id.
            optim_state_key_type: the type of keys to return.
            model: the model, which need not be wrapped.
            optim_input: parameters or groups that an optimizer was made from, in place of
                ``optim``; or the optimizer itself.
            optim: an optimizer of its parameters. Ids are numbers in its order, and groups become
                as its own are. Without it and ``optim_input``, ids are numbers in the order of
                ``model.parameters()``.

        Returns:
            A new dict with the same values.

        Raises:
            ValueError: keys are of both types, or a parameter is not the model's, or the optimizer
                has other parameters or groups than the state. Or there are several groups, and
                nothing says which parameters are in which.
        """
        from shardwise.frontends import optim_state

        return optim_state.rekeyed(
            optim_state_dict, optim_state_key_type, model, optim_input, optim
        )
