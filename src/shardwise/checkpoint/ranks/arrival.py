"""Values of a checkpoint on their way into a model, which may have a say in what becomes of them.

    a file, rows of other ranks      {"wq": unread, "wk": unread}
      -> load_state_dict             hooks of modules rename values, join them, convert them
      -> where one arrives           each rank reads its part of "wq", or of what was joined

Modules see full tensors, as in one process. A tensor that they only pass on, or rename, is never
read in full: it is an :class:`~shardwise._torch.unread.Unread`.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardwise._torch import fsdp
from shardwise._torch.dtensor import has_own_memory
from shardwise._torch.module import (
    EXTRA_STATE,
    customizes_loading,
    customizes_saving,
    has_extra_state,
    joined,
    saved_tensors_of,
    version_of,
    visits,
    with_versions,
)
from shardwise._torch.unread import Fill, Unread, lacked_memory, settle
from shardwise.base.errors import CheckpointError
from shardwise.base.units import one_line
from shardwise.checkpoint.disk.values import replaced_in
from shardwise.checkpoint.ranks.state import (
    ModelNames,
    check_same_names,
    in_place,
    own_tensors,
    reshard,
    sharded_state_dict,
    sharded_state_dicts,
    ties,
)
from shardwise.sharding import user_calls
from shardwise.sharding.allocate import MetaMemory
from shardwise.sharding.state import groups_of

_PARALLEL = "module."  # what DistributedDataParallel puts before all names of its state dict


class Arrival:
    """Values that are about to be loaded into a model.

    Args:
        model: the model, sharded or not. Tensors on the meta device get memory with their values.
        where: the checkpoint, for error messages.
        strict: whether the names must be exactly the model's. A tied tensor needs one of its names.
        left_out: names of the model that stay as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        where: str,
        *,
        strict: bool,
        left_out: Collection[str] = (),
    ) -> None:
        self._model, self._where, self._strict = model, where, strict
        self._left_out = frozenset(left_out)
        reshard(model)
        self._names = ModelNames(model)
        self._visits = list(visits(model))
        self._ties = ties(model)
        self._extra = {
            joined(each.name, EXTRA_STATE) for each in self._visits if has_extra_state(each.module)
        }
        self._values: dict[str, Any] = {}
        self._outer = ""  # what the names in the checkpoint begin with, and those of the model not
        self._held: list[Unread] = []
        self._made: list[weakref.ref[Unread]] = []
        self._failed: list[Exception] = []

    @property
    def has_extra_states(self) -> bool:
        """Whether modules have extra states."""
        return bool(self._extra)

    def unread(self, shape: tuple[int, ...], dtype: torch.dtype, fill: Fill) -> Unread:
        """A tensor that is read where it arrives.

        Args:
            shape: its shape.
            dtype: its dtype.
            fill: reads it into a tensor: all of it, or this rank's part of a ``DTensor``.
        """

        def attempt(into: Tensor) -> None:
            try:
                fill(into)
            except Exception as error:  # of which torch would keep the words
                self._failed.append(error)
                raise

        made = Unread(shape, dtype, attempt, self._held)
        self._made.append(weakref.ref(made))
        return made

    def expect(self, values: Mapping[str, Any]) -> None:
        """Take the values, and check names and shapes, if nothing in the model may change those.

        Args:
            values: the values by name: tensors, as :meth:`unread` makes them or not, and the extra
                states of modules.

        Raises:
            CheckpointError: they differ.
        """
        wrapped = values and all(name.startswith(_PARALLEL) for name in values)
        if wrapped and not any(name.startswith(_PARALLEL) for name in own_tensors(self._model)):
            self._outer = _PARALLEL
        for name, value in values.items():
            is_extra = name.rpartition(".")[2] == EXTRA_STATE
            self._values[self._own_name(name)] = replaced_in(value, _full) if is_extra else value
        if customizes_loading(each.module for each in self._visits):
            return
        own = own_tensors(self._model)
        if not self._renames():
            known = (own.keys() | self._extra) - self._left_out
            self._check_names(known - self._values.keys(), self._values.keys() - known)
        for name in own:  # in order, so that all ranks name the same one
            if name in self._values:
                self._check_shape(name, self._values[name], own[name])

    def load(self, versions: Mapping[str, int] | None = None) -> None:
        """Load the values. No rank waits for another.

        Args:
            versions: the version of each module's state dict when it was saved, by the name that
                the module had; ``None`` for those of this model.

        Raises:
            CheckpointError: names or shapes differ, or a value could not be read.
        """
        saved = None if versions is None else {self._own_name(k): v for k, v in versions.items()}
        state = with_versions(
            (
                (self._names.key(name), value)
                for name, value in self._values.items()
                if name not in self._left_out
            ),
            {
                each.path: {
                    "version": version_of(each.module) if saved is None else saved[each.name]
                }
                for each in self._visits
                if saved is None or each.name in saved
            },
        )
        with torch.no_grad(), sharded_state_dicts(self._model), self._watched():
            result = self._load_modules(state)
            settle(each.module for each in self._visits)
            self._check_shards()
            missing, unexpected = (
                {self._names.of(key) for key in keys}
                for keys in (result or ((), ()))  # a method of the model's own may return nothing
            )
            if (missing or unexpected) and self._renames():
                unexpected -= self._load_renamed(unexpected)
                missing &= {self._names.of(key) for key in sharded_state_dict(self._model)}
        stored = {n: each.dtype for n, each in self._values.items() if isinstance(each, Tensor)}
        check_scaled(self._where, stored, own_tensors(self._model), unexpected)
        self._check_names(
            missing - self._left_out, unexpected | self._left_out & self._values.keys()
        )
        self._values.clear()
        state.clear()
        for made in self._made:
            if (kept := made()) is not None:  # by a module, which may need it later
                kept.full()

    def _own_name(self, name: str) -> str:
        """The name in the model of what a checkpoint has under a name."""
        return self._names.of(f"{name}.".removeprefix(self._outer).removesuffix("."))

    def _load_modules(self, state: OrderedDict[str, Any]) -> Any:
        """Let modules load values, which are read before they ask if they take them for their own.

        Raises:
            CheckpointError: that failed.
        """
        try:
            return self._model.load_state_dict(state, strict=False)
        except CheckpointError:
            raise
        except RuntimeError as error:
            if self._failed:
                raise self._failed[0] from None
            if not lacked_memory(error) or not any(map(_is_unread, state.values())):
                raise CheckpointError(f"{self._where}: {one_line(error, 400)}") from error
        state.update([(key, _full(value)) for key, value in state.items()])
        return self._load_modules(state)

    def _check_shards(self) -> None:
        """Check that no module has assigned a value to the ``data`` of a shard.

        Raises:
            CheckpointError: one has, which torch accepts, and which changes no values.
        """
        if not customizes_loading(each.module for each in self._visits):
            return
        for name, tensor in own_tensors(self._model).items():
            if isinstance(tensor, DTensor) and has_own_memory(tensor):
                raise CheckpointError(
                    f"{self._where}: {name}: its module assigned a tensor to .data of a sharded "
                    "parameter, which changes no shard; expected it to copy the value: "
                    "parameter.copy_(value)"
                )

    def _renames(self) -> bool:
        """Whether names of the model's state dicts may not be those of its tensors."""
        return customizes_saving(each.module for each in self._visits)

    def _load_renamed(self, names: Collection[str]) -> set[str]:
        """Load what state dicts have under other names than the model, and return those names."""
        state = {self._names.of(k): each for k, each in sharded_state_dict(self._model).items()}
        found = {
            name: tensor for name, tensor in in_place(state, self._model).items() if name in names
        }
        for name, tensor in found.items():
            value = self._values[name]
            self._check_shape(name, value, tensor)
            tensor.copy_(value)
        return set(found)

    def _check_names(self, missing: Collection[str], unexpected: Collection[str]) -> None:
        """Check that no names are left over; a tied tensor needs one of its names.

        Files of weights need not have extra states.
        """
        if not self._strict:
            return
        lost = {
            name
            for name in missing
            if name.rpartition(".")[2] != EXTRA_STATE
            and not any(each in self._values for each in self._ties.get(name, ()))
        }
        check_same_names(self._where, missing=lost, unexpected=set(unexpected))

    def _check_shape(self, name: str, value: Any, own: Tensor) -> None:
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if found != list(own.shape):
            raise CheckpointError(
                f"{self._where}: {name}: found shape {found}, expected {list(own.shape)}"
            )

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """See to every value that arrives at a module, after all hooks of the module itself."""
        memory = MetaMemory(self._model)
        before = functools.partial(self._arrive, memory)
        handles: list[Any] = []
        try:
            for module in dict.fromkeys(each.module for each in self._visits):
                if not fsdp.is_scripted(module):
                    handles += [
                        module.register_load_state_dict_pre_hook(before),  # type: ignore[no-untyped-call]
                        module.register_load_state_dict_post_hook(self._forget),  # type: ignore[no-untyped-call]
                    ]
            with ExitStack() as stack:
                for group in groups_of(self._model):
                    stack.enter_context(user_calls.loading(group))
                yield
        finally:
            for handle in handles:
                handle.remove()
            memory.end()

    def _arrive(
        self,
        memory: MetaMemory,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        *_: object,
    ) -> None:
        for name, own in saved_tensors_of(module):
            value = state_dict.get(prefix + name)
            if not isinstance(value, Tensor) or is_lazy(own):
                continue
            self._check_shape(self._names.of(prefix + name), value, own)
            if own.is_meta:
                memory.give(module, name, own)
            if isinstance(own, DTensor) and not isinstance(value, Unread | DTensor):
                state_dict[prefix + name] = Unread.of(value)

    def _forget(self, *_: object) -> None:
        """Drop what hooks have read; what they made of it has arrived."""
        while self._held:
            self._held.pop().forget()


def check_scaled(
    where: str,
    stored: Mapping[str, torch.dtype],
    own: Mapping[str, Tensor],
    unexpected: Collection[str],
) -> None:
    """Check that no scale of quantized weights is left over: without it, values mean nothing.

    Args:
        where: the checkpoint, for error messages.
        stored: the dtypes of its tensors, by name in the model.
        own: the tensors of the model.
        unexpected: names of the checkpoint for which the model has no place.

    Raises:
        CheckpointError: weights of fewer than 16 bits have something beside them that the model has
            no place for, and the model is to hold them in more bits.
    """
    beside: dict[str, str] = {}
    for name in sorted(unexpected):
        beside.setdefault(name.rpartition(".")[0], name)
    for name, dtype in stored.items():
        is_few = dtype.itemsize == 1 and dtype is not torch.bool
        tensor, other = own.get(name), beside.get(name.rpartition(".")[0])
        if not is_few or other is None or tensor is None or tensor.dtype.itemsize == 1:
            continue
        if tensor.is_floating_point():
            raise CheckpointError(
                f"{where}: {name}: found {dtype} values and {other} beside them, for which the "
                f"model has no place, expected values to load as {tensor.dtype}; scale the "
                "weights first, or load them in a model that does"
            )


def _is_unread(value: Any) -> bool:
    return isinstance(value, Unread)


def _full(value: Any) -> Any:
    return value.full() if isinstance(value, Unread) else value
