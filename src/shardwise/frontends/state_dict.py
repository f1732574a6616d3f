"""State dicts of a wrapped model: full tensors, ``DTensor``s, or this rank's shards.

    FULL_STATE_DICT     full tensors, gathered one parameter at a time
    SHARDED_STATE_DICT  ``DTensor``s, for ``torch.distributed.checkpoint``
    LOCAL_STATE_DICT    plain tensors: the rows that this rank holds

All three use the names of the model that was wrapped. As in torch,
``FullyShardedDataParallel(model)`` holds ``model``. Unlike torch's, it shows parameters, buffers
and modules under the names that they have in ``model``:

    model            wrapper                     inside it
    "0.weight"       "0.weight"                  "_fsdp_wrapped_module.0.weight"
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.hooks import RemovableHandle

from shardwise._torch import dtensor, fsdp
from shardwise._torch.module import joined, skip_in_names, versions_in, visits, with_versions
from shardwise._torch.unread import Unread
from shardwise.frontends.settings import UnitSettings
from shardwise.frontends.summon import is_first
from shardwise.sharding.group_param import GroupParam
from shardwise.sharding.placement import full_tensor
from shardwise.sharding.state import HasStateDictKinds, groups_of
from shardwise.sharding.steps import check_origin

#: The name of the wrapped module in the wrapper, as in torch.
WRAPPED = "_fsdp_wrapped_module"

StateDict = dict[str, Any]


class WrapperModule(nn.Module, HasStateDictKinds):
    """A wrapper that forwards attributes, items and names of the wrapped module.

    Its state dicts have the type that is set on it.

    Attributes:
        settings: how this unit is sharded.
    """

    _settings_of_state_dicts: StateDictSettings
    _buffer_dtypes: dict[str, torch.dtype] | None = None  # to save buffers in that were cast
    settings: UnitSettings

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.add_module(WRAPPED, module)
        self._loading: list[RemovableHandle] = []
        self._settings_of_state_dicts = state_dict_settings(StateDictType.FULL_STATE_DICT)
        self.register_load_state_dict_pre_hook(_enter_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_leave_names)  # type: ignore[no-untyped-call]

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without torch's activation checkpointing wrapper around it."""
        return fsdp.without_checkpointing(self.get_wrapped())

    def get_wrapped(self) -> nn.Module:
        """The registered module: :attr:`module`, or a wrapper that was put around it later.

        Returns:
            The module.
        """
        return dict(fsdp.children_of(self))[WRAPPED]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(self.get_wrapped(), name)

    def __getitem__(self, key: Any) -> Any:
        wrapped: Any = self.get_wrapped()
        return wrapped[key]

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """As for any module. The wrapped module has the name of its wrapper.

        Args:
            memo: modules that were visited already.
            prefix: put in front of every name.
            remove_duplicate: yield a module with several names only once.

        Returns:
            An iterator over names and modules.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, module in self.get_wrapped().named_modules(memo, prefix, remove_duplicate):
            yield fsdp.without_checkpoint_prefix(name), module

    def own_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules inside and their names, except those inside another wrapper.

        Returns:
            An iterator over names and modules.
        """
        yield from _outside_wrappers(self.get_wrapped(), "", set())

    # -- the type of state dicts ---------------------------------------------------------------

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the type of state dict that the wrapped modules in ``module`` save and load.

        Args:
            module: the model, wrapped or with wrapped modules in it.
            state_dict_type: full tensors, ``DTensor``s, or this rank's shards.
            state_dict_config: for the model's state dict; ``None`` for the defaults of the type.
            optim_state_dict_config: for the optimizer's.

        Returns:
            The previous settings of the outermost wrapper.

        Raises:
            TypeError: a configuration does not belong to this type.
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
        """The type of state dict that the wrapped modules in ``module`` save and load.

        Args:
            module: the model, wrapped or with wrapped modules in it.

        Returns:
            The type and the configurations for model and optimizer.

        Raises:
            ValueError: there is no wrapped module, or their settings differ.
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
        """Set the type as :meth:`set_state_dict_type` does, inside this context.

        Args:
            module: the model, wrapped or with wrapped modules in it.
            state_dict_type: full, sharded or local.
            state_dict_config: options for state dicts of the model.
            optim_state_dict_config: options for state dicts of the optimizer.
        """
        with _restored(wrappers_in(module)):
            WrapperModule.set_state_dict_type(
                module, state_dict_type, state_dict_config, optim_state_dict_config
            )
            yield

    @contextmanager
    def sharded_kind(self) -> Iterator[None]:
        """Save and load this unit's own shards as ``DTensor``s inside this context."""
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
        """The state under the names of the wrapped model, in the type that is set.

        With full tensors this is a collective, which gathers one parameter at a time.

        Args:
            *args: ``destination``, ``prefix`` and ``keep_vars``, as torch still allows.
            destination: a dict to add to; by default a new one.
            prefix: put in front of every name.
            keep_vars: keep tensors attached to autograd.

        Returns:
            A dict from names to tensors: full ones or ``DTensor`` shards.
        """
        names = [destination, prefix, keep_vars]
        names[: len(args)] = args  # old code passes them by position
        destination, prefix, keep_vars = names  # type: ignore[assignment]
        known = set() if destination is None else set(destination)
        wrapped: Any = self.get_wrapped()
        state: dict[str, Any] = wrapped.state_dict(
            destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        inside = self._names_inside()  # hooks may have made tensors that no module has
        keys = [
            key for key in state if key not in known and not key[len(prefix) :].startswith(inside)
        ]
        dtypes = self._buffer_dtypes or {}
        settings = self._settings_of_state_dicts
        if settings.state_dict_type is not StateDictType.LOCAL_STATE_DICT:
            for key in keys:
                if key[len(prefix) :] in dtypes:
                    state[key] = state[key].to(dtypes[key[len(prefix) :]])
        params = {f"{prefix}{name}": param for name, param in self._own_params().items()}
        rank0_only = getattr(settings.state_dict_config, "rank0_only", False)
        keeps = not rank0_only or is_first(self.settings.mesh)
        done: dict[int, Any] = {}  # tied parameters stay tied
        for key in keys:  # in the same order on every rank
            tie = id(params[key].form) if key in params else id(key)
            if tie not in done:
                value = exported(state[key], settings.state_dict_type, settings.state_dict_config)
                done[tie] = value if keeps else None
            if keeps:
                state[key] = done[tie]
            else:
                del state[key]
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state of the type that is set, by the names of the wrapped model.

        Args:
            state_dict: the state.
            strict: whether the names must be exactly the model's.
            assign: replace parameters, in place of writing to them.

        Returns:
            The missing and the unexpected names, as of any module.
        """
        versions = versions_in(state_dict)
        # Torch looks for them under names with the parts of wrappers.
        inside = {each.path: versions[each.key] for each in visits(self) if each.key in versions}
        state = with_versions(state_dict.items(), {**versions, **inside})
        return super().load_state_dict(state, strict, assign)

    def _names_inside(self) -> tuple[str, ...]:
        """What names begin with that belong to an inner wrapper."""
        return tuple(
            joined(fsdp.without_checkpoint_prefix(name), "")
            for name, module in self.get_wrapped().named_modules()
            if isinstance(module, WrapperModule)
        )

    def _begin_load(self) -> None:
        """Shard what is about to be loaded as this unit's parameters are sharded.

        That is when it arrives at the module that holds the parameter: hooks see full tensors.
        """
        self._end_load()  # of one that has raised
        own = {module for _, module in self.own_modules()}
        found: dict[nn.Module, dict[str, GroupParam]] = {}
        for group in groups_of(self.module):
            for param in group.params:
                for owner in param.owners:
                    if owner.module in own:
                        found.setdefault(owner.module, {})[owner.name] = param
        self._loading = [
            module.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                functools.partial(_shard_loaded, params, self._settings_of_state_dicts)
            )
            for module, params in found.items()
        ]

    def _end_load(self) -> None:
        while self._loading:
            self._loading.pop().remove()

    def _own_params(self) -> dict[str, GroupParam]:
        names = self._names_inside()
        return {
            name: param
            for name, param in sharded_params(self.module).items()
            if not name.startswith(names)
        }


skip_in_names(WrapperModule, WRAPPED)


@contextmanager
def _restored(units: list[WrapperModule]) -> Iterator[None]:
    """Restore the settings of all units at the end."""
    before = [unit._settings_of_state_dicts for unit in units]
    try:
        yield
    finally:
        for unit, settings in zip(units, before, strict=True):
            unit._settings_of_state_dicts = settings


def wrappers_in(module: nn.Module) -> list[WrapperModule]:
    """The wrappers in ``module``, including itself.

    Raises:
        ValueError: there is none.
    """
    found = [each for each in module.modules() if isinstance(each, WrapperModule)]
    if not found:
        raise ValueError(
            f"found none in {type(module).__name__}, expected a model with "
            "FullyShardedDataParallel modules"
        )
    return found


def exported(
    value: Any, kind: StateDictType, config: StateDictConfig | OptimStateDictConfig
) -> Any:
    """Convert a value to what this type of state dict contains.

    Full tensors, and tensors that the configuration offloads to the CPU, are copies: training does
    not change them. Shards that stay on their device share memory with the model's.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if kind is StateDictType.FULL_STATE_DICT:
        if isinstance(value, DTensor):
            full = full_tensor(value)
            return full.cpu() if config.offload_to_cpu else full
        return value.detach().to("cpu" if config.offload_to_cpu else value.device, copy=True)
    if isinstance(value, DTensor) and kind is StateDictType.SHARDED_STATE_DICT:
        if not config.offload_to_cpu:
            return value
        local = dtensor.local_of(value).detach().to("cpu", copy=True)
        return dtensor.wrap_local(local, dtensor.spec_of(value))
    value = dtensor.plain(value)
    return value.detach().to("cpu", copy=True) if config.offload_to_cpu else value.detach()


def _shard_loaded(
    params: Mapping[str, GroupParam],
    settings: StateDictSettings,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    *others: Any,
) -> None:
    """Shard the values of a module's parameters; a hook."""
    del module
    for name, param in params.items():
        key = f"{prefix}{name}"
        if not isinstance(state_dict.get(key), torch.Tensor) or param.form.summoned is not None:
            continue
        if isinstance(state_dict[key], Unread):  # which shards itself
            continue
        fqn = key.replace(f"{WRAPPED}.", "")
        try:
            state_dict[key] = _convert_loaded(fqn, state_dict[key], param, settings)
        except ValueError as error:
            others[-1].append(str(error))
            state_dict[key] = param.sharded  # load_state_dict raises in the end


def _convert_loaded(
    fqn: str, value: Any, param: GroupParam, settings: StateDictSettings
) -> torch.Tensor:
    """Convert a loaded value to a ``DTensor`` that is sharded as the parameter is.

    It is a full tensor, a ``DTensor``, or this rank's rows under ``LOCAL_STATE_DICT``. Communicates
    only to redistribute a ``DTensor`` with other placements.

    Raises:
        ValueError: the value does not have the shape that this type of state dict implies.
    """
    sharded = param.sharded
    assert isinstance(sharded, DTensor)
    if isinstance(value, DTensor):
        check_origin(fqn, value, sharded)
        _check_shape(fqn, value.shape, sharded.shape, "the full tensor", settings)
        if value.placements == sharded.placements and value.device_mesh == sharded.device_mesh:
            return value
        return value.redistribute(sharded.device_mesh, sharded.placements)
    return shard_of(fqn, value, param, settings)


def shard_of(
    what: str, value: torch.Tensor, param: GroupParam, settings: StateDictSettings
) -> DTensor:
    """A plain value of a state dict as a ``DTensor`` that is sharded as a parameter is.

    Raises:
        ValueError: it does not have the shape that this type of state dict implies.
    """
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        _check_shape(what, value.shape, param.local.shape, "this rank's rows", settings)
        return as_shard(param, value)
    _check_shape(what, value.shape, param.sharded.shape, "the full tensor", settings)
    return cut(param, value)


def cut(param: GroupParam, full: torch.Tensor) -> DTensor:
    """This rank's rows of ``full`` as a ``DTensor``, without communication."""
    origin = param.form.origin
    if origin is not None:
        split = distribute_tensor(full, origin.mesh, origin.placements, src_data_rank=None)
        full = dtensor.local_of(split)
    return as_shard(param, param.layout.cut(full, param.form.mesh.shard.rank))


def as_shard(param: GroupParam, rows: torch.Tensor) -> DTensor:
    """A copy of ``rows`` as a ``DTensor`` with the device and placements of ``param``."""
    rows = rows.detach().to(param.local.device, copy=True).contiguous()
    return dtensor.wrap_local(rows, dtensor.with_dtype(dtensor.spec_of(param.sharded), rows.dtype))


def _check_shape(
    fqn: str,
    found: torch.Size,
    expected: torch.Size,
    what: str,
    settings: StateDictSettings,
) -> None:
    if found != expected:
        raise ValueError(
            f"{fqn} on rank {dist.get_rank()}: found shape {tuple(found)}, expected {what}, of "
            f"shape {tuple(expected)}; the state dict type is {settings.state_dict_type.name}, see "
            "set_state_dict_type"
        )


def sharded_params(model: nn.Module) -> dict[str, GroupParam]:
    """The sharded parameters of ``model`` by each of their names."""
    places: dict[tuple[nn.Module, str], GroupParam] = {}
    for group in groups_of(model):
        for param in group.params:
            places.update(((owner.module, owner.name), param) for owner in param.owners)
    found: dict[str, GroupParam] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            if (module, name) in places:
                found[f"{prefix}.{name}" if prefix else name] = places[module, name]
    return found


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def state_dict_settings(
    kind: StateDictType,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """The settings of a type of state dict, with defaults for configurations that are not given.

    Raises:
        TypeError: a configuration does not belong to that type.
    """
    of_model, of_optim = _CONFIGS[kind]
    config = of_model() if config is None else config
    optim_config = of_optim() if optim_config is None else optim_config
    for name, found, expected in (
        ("state_dict_config", config, of_model),
        ("optim_state_dict_config", optim_config, of_optim),
    ):
        if type(found) is not expected:
            raise TypeError(
                f"{name}: {kind.name} expects a {expected.__name__}, found a {type(found).__name__}"
            )
    return StateDictSettings(kind, config, optim_config)


# -- names -----------------------------------------------------------------------------------------


def _outside_wrappers(
    module: nn.Module, prefix: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    if module in seen or isinstance(module, WrapperModule):
        return
    seen.add(module)
    yield fsdp.without_checkpoint_prefix(prefix), module
    for name, child in module.named_children():
        yield from _outside_wrappers(child, f"{prefix}.{name}" if prefix else name, seen)


def _enter_names(
    module: WrapperModule, state_dict: dict[str, Any], prefix: str, *others: Any
) -> None:
    """Give values that are about to be loaded their names inside the wrapper."""
    del others
    module._begin_load()
    for key in list(state_dict):
        if key.startswith(prefix):
            state_dict[f"{prefix}{WRAPPED}.{key[len(prefix) :]}"] = state_dict.pop(key)


def _leave_names(module: WrapperModule, incompatible: Any) -> None:
    """Report missing and unexpected keys under their names outside the wrapper."""
    module._end_load()
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [key.replace(f"{WRAPPED}.", "") for key in keys]
