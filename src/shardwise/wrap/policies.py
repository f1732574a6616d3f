"""Policies: which modules of a model become groups of their own.

A function is asked about one module at a time, in the way of torch and PyTorch/XLA:

    policy(module=m, recurse=True,  nonwrapped_numel=n) -> visit its children?
    policy(module=m, recurse=False, nonwrapped_numel=n) -> make it a group?

``n`` counts the parameters of ``m`` that belong to no group yet: all of them on the way down, what
the children have left on the way up. The functions here can also be given their options first, and
be combined: ``size_based_auto_wrap_policy(min_num_params=10**6) | always_wrap_policy``.

A plan names modules by patterns, in the words of ``transformers``' ``fsdp_plan``:

    {"model.layers.*": "free_full_weight", "lm_head": "keep_full_weight"}

A ``*`` stands for one part of a name between dots. The values say what happens to a group's full
parameters between forward and backward: they are *freed*, as far as the strategy frees any, or
*kept*.

``"auto"`` finds the repeated blocks of a model by its shape alone. A *block* is one of several
modules of a class that stand in one list: the layers of a transformer, the bottlenecks of a ResNet.

- Nested blocks: where most parameters of a repeated module are in repeated modules of its own (a
  stage of a ResNet or of a Swin transformer, an encoder beside a decoder), the inner ones are the
  blocks.
- Experts are not blocks. The data decides which of them run, and ranks would gather different ones.
- Plain layers (one ``nn.Linear`` or convolution, perhaps with its norm) count as blocks only in a
  model that has no others.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
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


FREE = "free_full_weight"
KEEP = "keep_full_weight"

_ARGUMENTS: dict[str, dict[str, Any]] = {FREE: {}, KEEP: {"reshard_after_forward": False}}


def modules_of_plan(model: nn.Module, plan: Mapping[str, str]) -> dict[nn.Module, dict[str, Any]]:
    """The modules that ``plan`` makes units, with the keyword arguments it means.

    A module that is shared goes by each of its names; the first pattern that matches counts.

    Raises:
        ValueError: a value is neither of the two words, or no pattern matches any module.
    """
    wrong = {pattern: value for pattern, value in plan.items() if value not in _ARGUMENTS}
    if wrong:
        raise ValueError(f"wrap plan: expected {FREE!r} or {KEEP!r} as values, found {wrong}")
    found: dict[nn.Module, dict[str, Any]] = {}
    unmatched = list(plan)
    for name, module in model.named_modules(remove_duplicate=False):
        if not name:
            continue
        for pattern, value in plan.items():
            if _matches(name, pattern):
                found.setdefault(module, dict(_ARGUMENTS[value]))
                if pattern in unmatched:
                    unmatched.remove(pattern)
                break
    if not found:
        raise ValueError(
            f"wrap plan: none of {list(plan)} matches a module of {type(model).__name__}, whose "
            f"children are {[name for name, _ in model.named_children()]}; write patterns as "
            "model.named_modules() names modules, with * for one part between dots"
        )
    if unmatched:
        warnings.warn(
            f"wrap plan: {unmatched} match no module of {type(model).__name__}", stacklevel=2
        )
    return found


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


#: Share of the parts of a repeated module that its own repeated modules are, if they are blocks.
_MOSTLY = 0.5


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of ``model``, in module order, none inside another; the model itself is none."""
    return list(_blocks_in(model, composite=True) or _blocks_in(model, composite=False))


def _blocks_in(module: nn.Module, *, composite: bool) -> dict[nn.Module, bool]:
    """The blocks in ``module``, and whether they stand in a list."""
    found: dict[nn.Module, bool] = {}
    members = dict(_members(module))
    for member, in_list in members.items():
        alike = sum(type(other) is type(member) for other in members)
        inner = _blocks_in(member, composite=composite)
        # Inside a layer, what repeats without a list is its attention to this and to that.
        own = [block for block, listed in inner.items() if listed or not in_list]
        is_block = (
            alike > 1
            and _can_be_block(member, in_list=in_list, composite=composite)
            and _numel(own) < _MOSTLY * _numel(_parts(member))
        )
        found.update({member: in_list} if is_block else inner)
    return found


def _members(module: nn.Module, in_list: bool | None = None) -> Iterator[tuple[nn.Module, bool]]:
    """The modules that stand side by side in ``module``, and whether they do so in a list.

    What lies in bare lists (which have no forward of their own) stands beside the list.
    """
    if in_list is None:
        in_list = isinstance(module, nn.Sequential) or is_bare(module)
    for name, child in module.named_children():
        if "expert" in name.lower():
            continue
        if is_bare(child):
            yield from _members(child, True)
        else:
            yield child, in_list


def _can_be_block(module: nn.Module, *, in_list: bool, composite: bool) -> bool:
    if type(module) is nn.Sequential and not in_list:
        return False  # the name of a part of the model, like layer1 and layer2 of a ResNet
    if composite:
        return _is_composite(module)
    return in_list and not _is_composite(module) and _numel([module]) > 0


def _parts(module: nn.Module) -> list[nn.Module]:
    """Its children that are more than a plain layer: embeddings of a decoder do not count."""
    return [child for child in module.children() if _is_composite(child)] or [module]


def _is_composite(module: nn.Module) -> bool:
    """Whether it is more than one layer, with its norm and its activation perhaps."""
    return sum(parameter.ndim > 1 for parameter in module.parameters()) > 1


def is_bare(module: nn.Module) -> bool:
    """Whether it only holds modules: its class has no forward."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and (
        type(module).forward is nn.Module.forward
    )


def _numel(modules: list[nn.Module]) -> int:
    parameters = {parameter for module in modules for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in parameters)
