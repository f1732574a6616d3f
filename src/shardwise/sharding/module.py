"""``FSDPModule``: what a module becomes under ``fully_shard``."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from shardwise.sharding.communication import Communication
from shardwise.sharding.form import COPIED
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.hooks import FSDPState
from shardwise.sharding.phase import Phase
from shardwise.sharding.reach import groups_of, require_state
from shardwise.sharding.switches import Switches


class UnshardHandle(TorchUnshardHandle):
    """An unshard under way; see :meth:`FSDPModule.unshard`."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = list(groups)

    def wait(self) -> None:
        """Wait until the modules hold full parameters. A second wait does nothing.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        while self._groups:
            self._groups[0].wait_for_unshard()
            self._groups.pop(0)


if TYPE_CHECKING:
    # Every FSDPModule is a module, by its original class, which no type checker can see.
    class _Sharded(Switches, Communication, nn.Module): ...
else:

    class _Sharded(Switches, Communication): ...


class FSDPModule(_Sharded):
    """What a module becomes under :func:`~shardwise.fully_shard`.

    Its class is made anew from this one and its original class, so ``isinstance`` holds for both,
    and for torch's ``FSDPModule``, by which other libraries recognise sharded modules. Names and
    meanings of the methods are torch's.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the original class: indexing a sharded container makes plain ones."""
        original = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        made = original.__new__(original, *args, **kwargs)
        if _initialise_new:
            made.__init__(*args, **kwargs)
        return made

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own group, not those nested in it.

        Args:
            async_op: return at once, with a handle to wait on; forward waits by itself too.

        Returns:
            The handle if ``async_op``, else ``None``.

        Raises:
            RuntimeError: a parameter is still on the meta device.
            PeerLostError: a peer died or stalled.
        """
        state = require_state(self)
        for group in state.groups:
            if state.is_root is None:
                group.refresh()  # no forward has, and parameters may have been replaced
            group.unshard_for_user()
        groups = state.groups
        handle = UnshardHandle(groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the full parameters of this module's own group; it holds the shards again.

        In the module's own forward, this does nothing where they are kept after forward.
        """
        state = require_state(self)
        for group in state.groups:
            if state.phase is not Phase.FORWARD or group.options.reshard_after_forward:
                group.reshard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; also where modules hold full parameters, between forward and backward.

        Gradients that were accumulated without synchronization are dropped, too.
        """
        super(TorchFSDPModule, self).zero_grad(set_to_none)
        for group in groups_of(self, recurse=True):
            group.zero_grad(set_to_none=set_to_none)

    def reset_iter_state(self) -> None:
        """Make the model able to train again after an exception in forward or backward.

        Gradients of the failed step are lost, those accumulated without synchronisation too.

        Raises:
            RuntimeError: this module is not the root.
        """
        state = require_state(self)
        if state.is_root is False:
            raise RuntimeError(
                "reset_iter_state: expected the root, the outermost module that fully_shard was "
                f"applied to; found a nested {type(self).__name__}"
            )
        state.root.reset()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As of any module: the sharded ones between steps, full ones where those are registered.

        Inside a step that accumulates full parameters (``set_is_last_backward(False)`` and
        ``set_reshard_after_backward(False)``), always those that forward ran with. Pipelines that
        split backward look them up in its graph, where sharded ones are not.
        """
        found = super(TorchFSDPModule, self).parameters(recurse)
        if require_state(self).root.is_last_backward:
            return found
        fulls: dict[nn.Parameter, list[nn.Parameter]] = {}
        for group in groups_of(self, recurse=True):
            if not group.options.reshard_after_backward:
                for param in group.params:
                    if param.full is not None:
                        fulls.setdefault(param.owners[0].registered, []).append(param.full)
        return iter(dict.fromkeys(each for one in found for each in fulls.get(one, [one])))

    # -- inside --------------------------------------------------------------------------------

    def _get_fsdp_state(self) -> FSDPState:  # type: ignore[override]
        """The name under which torch's own code asks for the state."""
        return require_state(self)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Behind ``to()``, ``cuda()``, ``to_empty()``, ...: they change the shards."""
        self.reshard()
        # Past torch's own FSDPModule, which would look for torch's state.
        result = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        for group in require_state(self).groups:
            group.refresh()
        return result

    def __deepcopy__(self, memo: dict[Any, Any]) -> FSDPModule:
        """Copy the module with its shards; the copy is sharded over the same mesh.

        Neither reductions under way nor gradients that were not yet reduced are copied.
        """
        for group in groups_of(self, recurse=True):
            group.reshard()
            for param in group.params:
                param.form.copy_parameter(memo)
        module = self
        memo.setdefault(COPIED, frozenset(module.modules()))
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


_CLASSES: dict[type, type] = {}
_initialise_new = True


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """The classes made so far: from a module's original class to what it became."""
    return _CLASSES


@contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Inside, constructing the class of a sharded module makes an object without ``__init__``."""
    global _initialise_new
    before, _initialise_new = _initialise_new, False
    try:
        yield
    finally:
        _initialise_new = before


def fsdp_class_of(original: type[nn.Module]) -> type:
    """The class that is both ``original`` and :class:`FSDPModule`.

    Raises:
        TypeError: ``original`` refuses to have subclasses.
    """
    if original not in _CLASSES:
        _CLASSES[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
    return _CLASSES[original]


def become_fsdp_module(module: nn.Module) -> None:
    """Give ``module`` a class that is both its own and :class:`FSDPModule`."""
    module.__class__ = fsdp_class_of(type(module))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.<method_name>()`` gather and free parameters as ``forward()`` does.

    Args:
        module: a sharded module; any other is left as it is.
        method_name: name of a method that uses the module's parameters, such as ``"generate"``.

    Raises:
        ValueError: ``module`` has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")

    # A copy of the module takes this along: it shall run on the copy.
    own = getattr(method, "__self__", None) is module

    @functools.wraps(method)
    def call(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        bound = types.MethodType(method.__func__, self) if own else method
        return require_state(self).run_as_forward(self, bound, args, kwargs)

    setattr(module, method_name, types.MethodType(call, module))


def share_comm_ctx(modules: list[TorchFSDPModule]) -> None:
    """Let several roots (the chunks of a pipeline stage, say) share what carries their bytes.

    Transports belong to process groups here, so roots over the same ranks share them without
    this call.

    Raises:
        ValueError: one of ``modules`` is not sharded by Shardwise.
    """
    for module in modules:
        require_state(module)
