"""The methods of a wrapped model that save and load its own state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from shardwise.frontends.optim_state import sharded_params
from shardwise.frontends.settings import UnitSettings, state_dict_settings
from shardwise.frontends.state_dicts import convert_loaded, convert_saved, is_first_of
from shardwise.frontends.transparent import TransparentModule
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.state_dicts import HasStateDictKinds


class SavingModule(TransparentModule, HasStateDictKinds):
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
            The settings that the outermost one had before.

        Raises:
            TypeError: a configuration that is not of this type.
            ValueError: there is no wrapped module.
        """
        new = state_dict_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        units = wrappers_in(module)
        before = units[0]._settings_of_state_dicts
        for unit in units:
            unit._settings_of_state_dicts = new
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The kind of state dict that the wrapped modules in ``module`` make and take.

        Raises:
            ValueError: there is no wrapped module, or they differ.
        """
        found = [each._settings_of_state_dicts for each in wrappers_in(module)]
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
        with _restored(wrappers_in(module)):
            SavingModule.set_state_dict_type(
                module, state_dict_type, state_dict_config, optim_state_dict_config
            )
            yield

    @contextmanager
    def sharded_kind(self) -> Iterator[None]:
        """Inside, this unit's own state dicts hold its shards as ``DTensor``s."""
        with _restored([self]):
            self._settings_of_state_dicts = state_dict_settings(StateDictType.SHARDED_STATE_DICT)
            yield

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
        convert_saved(
            state, keys, params, settings, keeps=self.keeps_whole(settings.state_dict_config)
        )
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

    def keeps_whole(self, config: object) -> bool:
        """Whether this rank wants what is whole."""
        only_first = isinstance(config, FullStateDictConfig | FullOptimStateDictConfig) and (
            config.rank0_only
        )
        return not only_first or is_first_of(self.settings.mesh)


@contextmanager
def _restored(units: list[SavingModule]) -> Iterator[None]:
    """Give every unit the settings back, at the end, that it has now."""
    before = [unit._settings_of_state_dicts for unit in units]
    try:
        yield
    finally:
        for unit, settings in zip(units, before, strict=True):
            unit._settings_of_state_dicts = settings


def wrappers_in(module: nn.Module) -> list[SavingModule]:
    """The wrappers in ``module``, itself included.

    Raises:
        ValueError: there is none.
    """
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
