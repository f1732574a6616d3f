"""The methods of a wrapped model that save and load: its own state and an optimizer's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from shardwise.frontends.optim_state import (
    StateDict,
    broadcast_state,
    load_by_name,
    rekey,
    save_by_name,
    sharded_params,
)
from shardwise.frontends.settings import UnitSettings, state_dict_settings
from shardwise.frontends.state_dicts import convert_loaded, convert_saved, is_first_of
from shardwise.frontends.transparent import TransparentModule
from shardwise.sharding.param import ShardedParam


class SavingModule(TransparentModule):
    """A wrapper whose state dicts are of the kind that was asked for.

    Attributes:
        settings: how this unit is sharded.
    """

    _settings_of_state_dicts: StateDictSettings
    settings: UnitSettings

    # -- the kind ------------------------------------------------------------------------------

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set which kind of state dict the wrapped modules in ``module`` make and take.

        Args:
            module: the model, wrapped or with wrapped modules in it.
            state_dict_type: whole tensors, ``DTensor``s, or this rank's shards.
            state_dict_config: for the model's; that type's defaults where None.
            optim_state_dict_config: for the optimizer's.

        Returns:
            The settings of before.

        Raises:
            TypeError: a configuration that is not of this type.
            ValueError: there is no wrapped module.
        """
        new = state_dict_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = SavingModule.get_state_dict_type(module)
        for each in _wrappers(module):
            each._settings_of_state_dicts = new
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The kind of state dict that the wrapped modules in ``module`` make and take.

        Raises:
            ValueError: there is no wrapped module, or they differ.
        """
        found = [each._settings_of_state_dicts for each in _wrappers(module)]
        if any(each != found[0] for each in found):
            kinds = sorted({each.state_dict_type.name for each in found})
            raise ValueError(
                f"the wrapped modules of {type(module).__name__} have different state dict "
                f"settings ({', '.join(kinds)}); call set_state_dict_type on the outermost module"
            )
        return found[0]

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Inside, as :meth:`set_state_dict_type` with the same arguments."""
        before = SavingModule.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for each in _wrappers(module):
                each._settings_of_state_dicts = before

    # -- the model -----------------------------------------------------------------------------

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """The state under the names of the wrapped model, in the kind that is set.

        Every rank calls it; what is whole is gathered one parameter at a time.
        """
        names = [destination, prefix, keep_vars]
        names[: len(args)] = args  # older code passes them by position
        destination, prefix, keep_vars = names  # type: ignore[assignment]
        known = set() if destination is None else set(destination)
        state = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        own = self._own_state_names()
        keys = [key for key in state if key not in known and key[len(prefix) :] in own]
        dtypes = self._dtypes_of_buffers()
        settings = self._settings_of_state_dicts
        if settings.state_dict_type is not StateDictType.LOCAL_STATE_DICT:
            for key in keys:
                if key[len(prefix) :] in dtypes:
                    state[key] = state[key].to(dtypes[key[len(prefix) :]])
        params = {f"{prefix}{name}": param for name, param in self._own_params().items()}
        convert_saved(state, keys, params, settings, keeps=self._keeps(settings.state_dict_config))
        return state

    def before_load(self, state_dict: dict[str, Any], prefix: str, errors: list[str]) -> None:
        """Cut what is to be loaded as this unit's parameters are cut."""
        for name, param in self._own_params().items():
            key = f"{prefix}{name}"
            if key not in state_dict or param.form.lent is not None:
                continue
            try:
                value = convert_loaded(key, state_dict[key], param, self._settings_of_state_dicts)
            except ValueError as error:
                errors.append(str(error))
                value = param.sharded  # load_state_dict raises in the end
            state_dict[key] = value

    def _own_params(self) -> dict[str, ShardedParam]:
        names = self._own_state_names()
        return {name: param for name, param in sharded_params(self.module).items() if name in names}

    def _own_state_names(self) -> set[str]:
        """The names of parameters, buffers and extra state that no wrapper inside has."""
        names: set[str] = set()
        for prefix, module in self.own_modules():
            parts = [f"{prefix}.{name}" if prefix else name for name in _own_entries(module)]
            names.update(parts)
        return names

    def _dtypes_of_buffers(self) -> Mapping[str, torch.dtype]:
        """In which dtypes buffers are saved that compute in another."""
        return {}

    def _keeps(self, config: object) -> bool:
        """Whether this rank wants what is whole."""
        only_first = isinstance(config, FullStateDictConfig | FullOptimStateDictConfig) and (
            config.rank0_only
        )
        return not only_first or is_first_of(self.settings.mesh)

    # -- an optimizer --------------------------------------------------------------------------

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
        keeps = _wrappers(model)[0]._keeps(settings.optim_state_dict_config)
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
        keeps = _wrappers(model)[0]._keeps(config)
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


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state of ``model`` with its shards as ``DTensor``s, whatever kind is set.

    Args:
        model: wrapped, with wrapped modules in it, or sharded without a wrapper.
    """
    units = [each for each in model.modules() if isinstance(each, SavingModule)]
    before = [unit._settings_of_state_dicts for unit in units]
    for unit in units:
        unit._settings_of_state_dicts = state_dict_settings(StateDictType.SHARDED_STATE_DICT)
    try:
        return model.state_dict()
    finally:
        for unit, settings in zip(units, before, strict=True):
            unit._settings_of_state_dicts = settings


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
    unit = _wrappers(model)[0].settings
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


def _wrappers(module: nn.Module) -> list[SavingModule]:
    found = [each for each in module.modules() if isinstance(each, SavingModule)]
    if not found:
        raise ValueError(
            f"expected a model with FullyShardedDataParallel modules, found none in "
            f"{type(module).__name__}"
        )
    return found


def _own_entries(module: nn.Module) -> Iterable[str]:
    yield from (name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False))
    yield from (name for name, _ in module.named_buffers(recurse=False, remove_duplicate=False))
    yield "_extra_state"
