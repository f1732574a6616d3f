"""A wrapper around a module that leaves all names unchanged.

As in torch, ``FullyShardedDataParallel(model)`` holds ``model``. Unlike torch's, it shows
parameters, buffers and modules under the names that they have in ``model``:

    model            wrapper                     inside it
    "0.weight"       "0.weight"                  "_fsdp_wrapped_module.0.weight"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shardwise._torch import fsdp

#: The name of the wrapped module in the wrapper, as in torch.
WRAPPED = "_fsdp_wrapped_module"


class TransparentModule(nn.Module):
    """A wrapper that forwards attributes, items and names of the wrapped module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.add_module(WRAPPED, module)
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

    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """The state dict of the wrapped module."""
        wrapped: Any = self.get_wrapped()
        state: dict[str, Any] = wrapped.state_dict(
            destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        return state

    def own_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules inside and their names, except those inside another wrapper.

        Returns:
            An iterator over names and modules.
        """
        yield from _outside_wrappers(self.get_wrapped(), "", set())

    def _before_load(self, state_dict: dict[str, Any], prefix: str, errors: list[str]) -> None:
        """Prepare values that are about to be loaded into the wrapped module, in place.

        Args:
            state_dict: the values; it may contain those of other modules.
            prefix: the prefix of this module's keys.
            errors: messages that ``load_state_dict`` raises in the end.
        """

    def _fqn_modifiers(self) -> Mapping[str, str]:
        """Tell ``torch.distributed.checkpoint`` that names skip the wrapper."""
        return {"": WRAPPED}


def _outside_wrappers(
    module: nn.Module, prefix: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    if module in seen or isinstance(module, TransparentModule):
        return
    seen.add(module)
    yield fsdp.without_checkpoint_prefix(prefix), module
    for name, child in module.named_children():
        yield from _outside_wrappers(child, f"{prefix}.{name}" if prefix else name, seen)


def _enter_names(
    module: TransparentModule,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Give values that are about to be loaded their names inside the wrapper."""
    module._before_load(state_dict, prefix, error_msgs)
    for key in list(state_dict):
        if key.startswith(prefix):
            state_dict[f"{prefix}{WRAPPED}.{key[len(prefix) :]}"] = state_dict.pop(key)


def _leave_names(module: nn.Module, incompatible: Any) -> None:
    """Report missing and unexpected keys under their names outside the wrapper."""
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [key.replace(f"{WRAPPED}.", "") for key in keys]
