"""Policies: which modules become units of their own, decided one module at a time.

A policy is anything that can be called as torch's and PyTorch/XLA's are:

    policy(module=m, recurse=True,  nonwrapped_numel=n) -> go on into its children?
    policy(module=m, recurse=False, nonwrapped_numel=n) -> make it a unit?

``n`` counts the parameters of ``m`` that no unit has yet: all of them on the way down, what the
children have left on the way up. The policies here can also be given their options first, and be
joined: ``size_based_auto_wrap_policy(min_num_params=10**6) | always_wrap_policy``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

#: Parameters from which on :data:`size_based_auto_wrap_policy` makes a unit.
DEFAULT_MIN_NUM_PARAMS = 100_000_000


class WrapPolicy:
    """A policy made of a function, and of the options that are to be passed to it.

    Args:
        decide: called with ``module``, ``recurse``, ``nonwrapped_numel`` and the options.
        options: keyword arguments of ``decide``.
    """

    def __init__(self, decide: Callable[..., bool], **options: Any) -> None:
        self._decide = decide
        self._options = options
        self.__doc__ = decide.__doc__

    def __call__(
        self,
        module: nn.Module | None = None,
        recurse: bool = False,
        nonwrapped_numel: int = 0,
        **options: Any,
    ) -> Any:
        """Decide about ``module``; without one, return this policy with ``options`` set."""
        options = {**self._options, **options}
        if module is None:
            return WrapPolicy(self._decide, **options)
        return self._decide(module, recurse, nonwrapped_numel, **options)

    def __or__(self, other: Callable[..., bool]) -> WrapPolicy:
        return or_policy([self, other])

    def __ror__(self, other: Callable[..., bool]) -> WrapPolicy:
        return or_policy([other, self])

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        return f"{self._decide.__name__.lstrip('_')}({options})"


def or_policy(policies: Iterable[Callable[..., bool]]) -> WrapPolicy:
    """A policy that goes on, and makes a unit, where one of ``policies`` does."""
    return WrapPolicy(_any_policy, policies=tuple(policies))


def _any_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: tuple[Any, ...]
) -> bool:
    """Whatever one of the policies takes."""
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for policy in policies
    )


class SizeBasedPolicy(WrapPolicy):
    """The policy by size, with the sets that scripts change."""

    #: Modules that stay whole with what they are in: they use their children's parameters
    #: themselves.
    FORCE_LEAF_MODULES: frozenset[type[nn.Module]] = frozenset({nn.MultiheadAttention})
    #: Modules that are never units: they have no forward that could gather.
    EXCLUDE_WRAP_MODULES: frozenset[type[nn.Module]] = frozenset({nn.ModuleList, nn.ModuleDict})


def _size_based(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = DEFAULT_MIN_NUM_PARAMS,
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """A unit wherever ``min_num_params`` parameters (100 million) have come together.

    Args:
        module: the module in question.
        recurse: whether to go on into its children, or to make it a unit.
        nonwrapped_numel: its parameters that no unit has yet.
        min_num_params: the number from which on it becomes a unit.
        force_leaf_modules: classes that are not gone into, and stay with what they are in.
        exclude_wrap_modules: classes that never become units themselves.
    """
    large = nonwrapped_numel >= min_num_params
    if recurse:
        leaves = size_based_auto_wrap_policy.FORCE_LEAF_MODULES
        kept = leaves if force_leaf_modules is None else force_leaf_modules
    else:
        excluded = size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES
        kept = excluded if exclude_wrap_modules is None else exclude_wrap_modules
    return large and not isinstance(module, tuple(kept))


def _transformer(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: Iterable[type[nn.Module]],
) -> bool:
    """A unit for every module of the classes ``transformer_layer_cls``."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def _lambda(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """A unit for every module of which ``lambda_fn(module)`` is true."""
    return recurse or bool(lambda_fn(module))


def _always(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """A unit for every module."""
    return True


size_based_auto_wrap_policy = SizeBasedPolicy(_size_based)
transformer_auto_wrap_policy = WrapPolicy(_transformer)
lambda_auto_wrap_policy = WrapPolicy(_lambda)
always_wrap_policy = WrapPolicy(_always)


class ModuleWrapPolicy(WrapPolicy):
    """A unit for every module of certain classes.

    Args:
        module_classes: the classes; their subclasses count too.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        super().__init__(_transformer, transformer_layer_cls=tuple(dict.fromkeys(module_classes)))

    def __repr__(self) -> str:
        names = ", ".join(each.__name__ for each in self._options["transformer_layer_cls"])
        return f"ModuleWrapPolicy({{{names}}})"


class CustomPolicy:
    """A function says of every module whether it becomes a unit, and with which arguments.

    Args:
        lambda_fn: returns ``False`` or ``{}`` (no unit), ``True`` (a unit as the root is), or
            keyword arguments that the unit shall have in place of the root's.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def arguments(self, module: nn.Module, fqn: str) -> dict[str, Any] | None:
        """What the unit of ``module`` shall have of its own; ``None``: it becomes none.

        Raises:
            TypeError: the function returned something else.
        """
        answer = self._lambda_fn(module)
        if isinstance(answer, dict):
            return answer or None
        if not isinstance(answer, bool):
            raise TypeError(
                f"CustomPolicy: expected the function to return True, False or a dict of keyword "
                f"arguments for {fqn}, found {type(answer).__name__} {answer!r}"
            )
        return {} if answer else None
