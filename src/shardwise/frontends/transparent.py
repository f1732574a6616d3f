"""A module around another that no name tells of.

``FullyShardedDataParallel(model)`` holds ``model`` as torch's does. Unlike torch's, its parameters,
buffers and modules have the names that they have in ``model``, everywhere and always:

    model            wrapper                     inside it
    "0.weight"       "0.weight"                  "_fsdp_wrapped_module.0.weight"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shardwise._torch import fsdp

#: Under this name the wrapped module is registered, as in torch.
WRAPPED = "_fsdp_wrapped_module"


class TransparentModule(nn.Module):
    """A module around ``module`` that passes on its attributes, items and names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.add_module(WRAPPED, module)
        self.register_load_state_dict_pre_hook(_enter_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_leave_names)  # type: ignore[no-untyped-call]

    @property
    def module(self) -> nn.Module:
        """The wrapped module itself, also if torch's activation checkpointing is around it."""
        return fsdp.without_checkpointing(self.get_wrapped())

    def get_wrapped(self) -> nn.Module:
        """What is registered inside: :attr:`module`, or what has been put around it since."""
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
        """As of any module; the wrapped one has the name of its wrapper."""
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
        """That of the wrapped module."""
        wrapped: Any = self.get_wrapped()
        state: dict[str, Any] = wrapped.state_dict(
            destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        return state

    def own_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules inside with their names, but for those inside another such wrapper."""
        yield from _outside_wrappers(self.get_wrapped(), "", set())

    def before_load(self, state_dict: dict[str, Any], prefix: str, errors: list[str]) -> None:
        """Change in place what is about to be loaded into the wrapped module.

        Args:
            state_dict: what is loaded; may hold other modules' values too.
            prefix: what the keys of this module's begin with.
            errors: messages that ``load_state_dict`` will raise in the end.
        """

    def _fqn_modifiers(self) -> Mapping[str, str]:
        """By this ``torch.distributed.checkpoint`` learns that names skip the wrapper."""
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
    """Give what is to be loaded the names that it has inside."""
    module.before_load(state_dict, prefix, error_msgs)
    for key in list(state_dict):
        if key.startswith(prefix):
            state_dict[f"{prefix}{WRAPPED}.{key[len(prefix) :]}"] = state_dict.pop(key)


def _leave_names(module: nn.Module, incompatible: Any) -> None:
    """Tell what was missing and what was unexpected by the names that it has outside."""
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [key.replace(f"{WRAPPED}.", "") for key in keys]
