"""Which modules of a model become groups of their own, and how to wrap them.

A policy decides about modules. Functions here ask one about a model and wrap what it chose, or wrap
by hand while a model is built that no host could hold in full:

    with enable_wrap(wrapper_cls=FullyShardedDataParallel, mixed_precision=bf16):
        blocks = nn.Sequential(*[wrap(Block()) for _ in range(1000)])

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

import enum
import fnmatch
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

from shardwise._torch import fsdp
from shardwise.base.arguments import check_arguments

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "Policy",
    "WrapPolicy",
    "always_wrap_policy",
    "apply_to",
    "apply_wrap",
    "chosen_modules",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "or_policy",
    "repeated_blocks",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

AUTO = "auto"
#: The number of parameters of which :data:`size_based_auto_wrap_policy` makes a group.
DEFAULT_MIN_NUM_PARAMS = 100_000_000
FREE = "free_full_weight"
KEEP = "keep_full_weight"
_ARGUMENTS: dict[str, dict[str, Any]] = {FREE: {}, KEEP: {"reshard_after_forward": False}}

#: Share of a repeated module that its own repeated modules must have to be the blocks instead.
_MOSTLY = 0.5

_Module = TypeVar("_Module", bound=nn.Module)


class WrapPolicy:
    """A policy made of a function and the options to pass to it.

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
        """Decide about ``module``; without a module, return this policy with ``options`` set."""
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


class ModuleWrapPolicy(WrapPolicy):
    """Make a group of every module of certain classes.

    Args:
        module_classes: the classes; their subclasses count too.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        check_arguments(ModuleWrapPolicy.__init__, locals())
        super().__init__(
            torch_wrap.transformer_auto_wrap_policy,
            transformer_layer_cls=tuple(dict.fromkeys(module_classes)),
        )

    def __repr__(self) -> str:
        names = ", ".join(each.__name__ for each in self._options["transformer_layer_cls"])
        return f"ModuleWrapPolicy({{{names}}})"


class CustomPolicy:
    """Let a function decide which modules become groups, and with which arguments.

    Args:
        lambda_fn: returns ``False`` or ``{}`` for no group, ``True`` for a group with the root's
            arguments, or keyword arguments of the group that replace the root's.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        check_arguments(CustomPolicy.__init__, locals())
        self._lambda_fn = lambda_fn

    def arguments(self, module: nn.Module, fqn: str) -> dict[str, Any] | None:
        """Return the keyword arguments of the group of ``module``, or ``None`` if it becomes none.

        Args:
            module: the module in question.
            fqn: its full name in the model.

        Returns:
            Keyword arguments for the group, or ``None`` if the module becomes none.

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


class SizeBasedPolicy(WrapPolicy):
    """The policy by size, with the sets of classes that scripts change."""

    #: Modules that stay with their parent in full: they use their children's parameters
    #: themselves.
    FORCE_LEAF_MODULES: frozenset[type[nn.Module]] = frozenset({nn.MultiheadAttention})
    #: Modules that are never groups: they have no forward that could gather.
    EXCLUDE_WRAP_MODULES: frozenset[type[nn.Module]] = frozenset({nn.ModuleList, nn.ModuleDict})


def or_policy(policies: Iterable[Callable[..., bool]]) -> WrapPolicy:
    """Return a policy that recurses into, or makes a group of, what any of ``policies`` would.

    Args:
        policies: the policies to combine.

    Returns:
        The combined policy.
    """
    check_arguments(or_policy, locals())
    return WrapPolicy(_any_policy, policies=tuple(policies))


def _any_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: tuple[Any, ...]
) -> bool:
    """Whether one of the policies says so."""
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for policy in policies
    )


def _size_based(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = DEFAULT_MIN_NUM_PARAMS,
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """Decide as torch does, with the sets of classes that our own policy has."""
    if force_leaf_modules is None:
        force_leaf_modules = size_based_auto_wrap_policy.FORCE_LEAF_MODULES
    if exclude_wrap_modules is None:
        exclude_wrap_modules = size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES
    return torch_wrap.size_based_auto_wrap_policy(
        module,
        recurse,
        nonwrapped_numel,
        min_num_params,
        {*force_leaf_modules},
        {*exclude_wrap_modules},
    )


size_based_auto_wrap_policy = SizeBasedPolicy(_size_based)
"""Makes a group wherever enough parameters come together.

Options: ``min_num_params`` (100 million), ``force_leaf_modules`` (classes whose children stay with
them; by default ``nn.MultiheadAttention``) and ``exclude_wrap_modules`` (classes that never become
groups; by default ``nn.ModuleList`` and ``nn.ModuleDict``).
"""

transformer_auto_wrap_policy = WrapPolicy(torch_wrap.transformer_auto_wrap_policy)
"""Makes a group of every module of the classes in the option ``transformer_layer_cls``."""

lambda_auto_wrap_policy = WrapPolicy(torch_wrap.lambda_auto_wrap_policy)
"""Makes a group of every module for which the option ``lambda_fn``, called with it, is true."""

always_wrap_policy = WrapPolicy(torch_wrap.always_wrap_policy)
"""Makes a group of every module. It has no options."""


def modules_of_plan(model: nn.Module, plan: Mapping[str, str]) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules that ``plan`` makes groups, with their keyword arguments.

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
            if matches(name, pattern):
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


def matches(name: str, pattern: str) -> bool:
    """Whether a name has a pattern, in which ``*`` stands for one part between dots."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of ``model``, in module order, none inside another, without the model.

    Args:
        model: the model to look through.

    Returns:
        The modules; an empty list if nothing in the model is repeated.
    """
    check_arguments(repeated_blocks, locals())
    return list(_blocks_in(model, _BlockKind.COMPOSITE) or _blocks_in(model, _BlockKind.LAYER))


class _BlockKind(enum.Enum):
    """What may be a block."""

    COMPOSITE = "composite"  # modules of several layers
    LAYER = "layer"  # plain layers, in a model without such modules


class _Registration(enum.Enum):
    """Where a module is registered."""

    LIST = "list"  # in a list of modules, or in a sequence
    ATTRIBUTE = "attribute"  # under a name of its own


def _blocks_in(module: nn.Module, kind: _BlockKind) -> dict[nn.Module, _Registration]:
    """Return the blocks in ``module``, and where each is registered."""
    found: dict[nn.Module, _Registration] = {}
    members = dict(_members(module))
    for member, place in members.items():
        alike = sum(type(other) is type(member) for other in members)
        inner = _blocks_in(member, kind)
        # What repeats inside a layer without a list is its self-attention and its cross-attention.
        own = [
            block
            for block, inner_place in inner.items()
            if inner_place is _Registration.LIST or place is _Registration.ATTRIBUTE
        ]
        is_block = (
            alike > 1
            and _can_be_block(member, place, kind)
            and _numel(own) < _MOSTLY * _numel(_parts(member))
        )
        found.update({member: place} if is_block else inner)
    return found


def _members(
    module: nn.Module, place: _Registration | None = None
) -> Iterator[tuple[nn.Module, _Registration]]:
    """Yield the modules side by side in ``module``, and where each is registered.

    The contents of bare lists, which have no forward of their own, are side by side with the list.
    """
    if place is None:
        in_list = isinstance(module, nn.Sequential) or is_bare(module)
        place = _Registration.LIST if in_list else _Registration.ATTRIBUTE
    for name, child in module.named_children():
        if "expert" in name.lower():
            continue
        if is_bare(child):
            yield from _members(child, _Registration.LIST)
        else:
            yield child, place


def _can_be_block(module: nn.Module, place: _Registration, kind: _BlockKind) -> bool:
    if type(module) is nn.Sequential and place is _Registration.ATTRIBUTE:
        return False  # the name of a part of the model, like layer1 and layer2 of a ResNet
    if kind is _BlockKind.COMPOSITE:
        return _is_composite(module)
    return place is _Registration.LIST and not _is_composite(module) and _numel([module]) > 0


def _parts(module: nn.Module) -> list[nn.Module]:
    """Return its composite children, or itself; embeddings of a decoder do not count."""
    return [child for child in module.children() if _is_composite(child)] or [module]


def _is_composite(module: nn.Module) -> bool:
    """Whether it is more than one layer, perhaps with its norm and its activation."""
    return sum(parameter.ndim > 1 for parameter in module.parameters()) > 1


def is_bare(module: nn.Module) -> bool:
    """Whether it only holds modules: its class has no forward."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and (
        type(module).forward is nn.Module.forward
    )


def _numel(modules: list[nn.Module]) -> int:
    return numel_of(parameter for module in modules for parameter in module.parameters())


def numel_of(parameters: Iterable[nn.Parameter]) -> int:
    """Return the number of elements of parameters, each counted once."""
    return sum(parameter.numel() for parameter in {*parameters})


Policy = Callable[..., Any] | CustomPolicy | Mapping[str, str] | str | object
"""What may be passed as a policy: a function, a policy object of torch, a plan, or ``"auto"``."""


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
    check_arguments(apply_wrap, locals())
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
    check_arguments(apply_to, locals())
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
    check_arguments(chosen_modules, locals())
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
    check_arguments(enable_wrap, locals())
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
    check_arguments(wrap, locals())
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
