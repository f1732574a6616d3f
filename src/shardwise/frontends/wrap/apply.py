"""Wrapping: apply a function to every module that a policy chooses, or to modules one by one.

A model that no host could hold in full is wrapped while it is built:

    with enable_wrap(wrapper_cls=FullyShardedDataParallel, mixed_precision=bf16):
        blocks = nn.Sequential(*[wrap(Block()) for _ in range(1000)])
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import nn

from shardwise._torch import fsdp
from shardwise.frontends.wrap.policies import (
    CustomPolicy,
    is_bare,
    modules_of_plan,
    numel_of,
    repeated_blocks,
)

AUTO = "auto"

Policy = Callable[..., Any] | CustomPolicy | Mapping[str, str] | str | object
"""What may be passed as a policy: a function, a policy object of torch, a plan, or ``"auto"``."""

_Module = TypeVar("_Module", bound=nn.Module)


def apply_wrap(
    model: _Module,
    policy: Policy,
    fn: Callable[..., nn.Module | None],
    *,
    ignored_modules: Iterable[nn.Module] = (),
) -> _Module:
    """Call ``fn`` on every module that ``policy`` chooses, inner ones first.

    The model itself is left to the caller, as the last call:

        apply_wrap(model, "auto", fully_shard)
        fully_shard(model)

    Args:
        model: the model.
        policy: a policy of this package or of torch, a function with the same arguments, a plan by
            names, or ``"auto"``.
        fn: called as ``fn(module, **arguments)``, with the arguments that the policy has for that
            module. If it returns another module, that replaces the module.
        ignored_modules: left out, with everything in them.

    Returns:
        ``model``.

    Raises:
        ValueError: the policy is none of the above, or a plan that matches nothing.
    """
    return apply_to(model, chosen_modules(model, policy, ignored_modules=ignored_modules), fn)


def apply_to(
    model: _Module,
    chosen: Mapping[nn.Module, Mapping[str, Any]],
    fn: Callable[..., nn.Module | None],
) -> _Module:
    """Call ``fn(module, **arguments)`` on every chosen module, inner ones first.

    Args:
        model: the model that contains them.
        chosen: the modules, with the arguments of each.
        fn: if it returns another module, that replaces the module in ``model`` wherever it is
            registered.

    Returns:
        ``model``.
    """
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in fsdp.children_of(parent):
            places.setdefault(child, []).append((parent, name))
    for module in _children_first(model):
        if module not in chosen or module is model:
            continue
        made = fn(module, **chosen[module])
        if made is not None and made is not module:
            for parent, name in places[module]:
                setattr(parent, name, made)
    return model


def chosen_modules(
    model: nn.Module, policy: Policy, *, ignored_modules: Iterable[nn.Module] = ()
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules that ``policy`` chooses, inner ones first, with their arguments.

    Arguments and errors are those of :func:`apply_wrap`. The model itself is never among them, and
    neither are bare lists of modules, which have no forward.

    Args:
        model: the model to look through.
        policy: as for :func:`apply_wrap`.
        ignored_modules: modules to leave out, with everything inside them.

    Returns:
        A dict from each module to the keyword arguments of its own that the policy gives it.
    """
    ignored = {inner for module in ignored_modules for inner in module.modules()}
    chosen = _ask(model, policy, ignored)
    return {
        module: chosen[module]
        for module in _children_first(model)
        if module in chosen
        and module is not model
        and module not in ignored
        and not is_bare(module)
    }


@contextmanager
def enable_wrap(
    *, wrapper_cls: Callable[..., nn.Module | None], **arguments: Any
) -> Iterator[None]:
    """Let :func:`wrap`, called inside, apply ``wrapper_cls(module, **arguments)``.

    In nested contexts, only the inner one counts.

    Args:
        wrapper_cls: ``FullyShardedDataParallel``, ``fully_shard``, or anything called like them.
        arguments: its keyword arguments.
    """
    token = _CURRENT.set(functools.partial(wrapper_cls, **arguments))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def wrap(module: nn.Module, **overrides: Any) -> nn.Module:
    """Wrap ``module`` as :func:`enable_wrap` says; outside of it, return the module unchanged.

    Args:
        module: the module, which is sharded before the next one is built.
        overrides: keyword arguments that replace those of :func:`enable_wrap`.

    Returns:
        The wrapped module.
    """
    current = _CURRENT.get()
    if current is None:
        return module
    made = current(module, **overrides)
    return module if made is None else made


_CURRENT: ContextVar[Callable[..., nn.Module | None] | None] = ContextVar(
    "shardwise_wrapping", default=None
)


def _ask(
    model: nn.Module, policy: Policy, ignored: set[nn.Module]
) -> dict[nn.Module, dict[str, Any]]:
    if isinstance(policy, str):
        if policy != AUTO:
            raise ValueError(
                f"wrap policy: expected {AUTO!r}, the only one with a name, found {policy!r}"
            )
        return {module: {} for module in repeated_blocks(model)}
    if isinstance(policy, Mapping):
        return modules_of_plan(model, policy)
    if isinstance(policy, CustomPolicy):
        answers = ((m, policy.arguments(m, name)) for name, m in model.named_modules())
        return {module: found for module, found in answers if found is not None}
    if fsdp.is_wrap_policy(policy):
        return fsdp.run_wrap_policy(policy, model, ignored)
    if not callable(policy):
        raise ValueError(
            f"wrap policy: expected a function, a policy, a dict of name patterns or {AUTO!r}, "
            f"found {type(policy).__name__} {policy!r}"
        )
    chosen: dict[nn.Module, dict[str, Any]] = {}
    _descend(model, policy, ignored, chosen, set())
    return chosen


def _descend(
    module: nn.Module,
    policy: Callable[..., bool],
    ignored: set[nn.Module],
    chosen: dict[nn.Module, dict[str, Any]],
    seen: set[nn.Module],
) -> int:
    """Ask ``policy`` about everything in ``module``; return how many parameters groups took."""
    seen.add(module)
    inside = (inner for inner in module.modules() if inner not in ignored)
    total = numel_of(p for inner in inside for p in inner.parameters(recurse=False))
    if not policy(module=module, recurse=True, nonwrapped_numel=total):
        return 0
    taken = sum(
        _descend(child, policy, ignored, chosen, seen)
        for child in module.children()
        if child not in ignored and child not in seen
    )
    if policy(module=module, recurse=False, nonwrapped_numel=total - taken):
        chosen[module] = {}
        return total
    return taken


def _children_first(model: nn.Module) -> list[nn.Module]:
    found: dict[nn.Module, None] = {}
    entered: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module not in entered:
            entered.add(module)
            for child in module.children():
                visit(child)
            found[module] = None

    visit(model)
    return list(found)
