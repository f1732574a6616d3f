"""Which modules of a model become units of their own, and which are left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecision

from shardwise.frontends.precision import keep_in_full_precision, modules_in_full_precision
from shardwise.frontends.transparent import TransparentModule
from shardwise.sharding.module_state import state_of
from shardwise.wrap import Policy, apply_to, chosen_modules


@dataclass(frozen=True)
class Ignored:
    """What a user wants left alone.

    Attributes:
        modules: those named, and all inside them.
        parameters: those named, and all of these modules.
    """

    modules: set[nn.Module]
    parameters: set[nn.Parameter]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        modules: Iterable[nn.Module] | None,
        states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    ) -> Ignored:
        """What is meant by the arguments of a constructor.

        Raises:
            TypeError: something that is neither a module nor a parameter.
            ValueError: ``module`` itself, or a module that is wrapped.
        """
        given: list[object] = [*(modules or ()), *(states or ())]
        wrong = [each for each in given if not isinstance(each, nn.Module | nn.Parameter)]
        if wrong:
            raise TypeError(
                "ignored_modules and ignored_states: expected modules or parameters, found "
                f"{type(wrong[0]).__name__}"
            )
        inside = {m for each in given if isinstance(each, nn.Module) for m in each.modules()}
        if module in inside:
            raise ValueError(
                f"ignored_modules: found the {type(module).__name__} itself that is to be wrapped"
            )
        wrapped = [each for each in inside if isinstance(each, TransparentModule)]
        if wrapped:
            raise ValueError(
                "ignored_modules: expected modules that are not wrapped, found a "
                f"FullyShardedDataParallel around a {type(wrapped[0].module).__name__}"
            )
        parameters = {each for each in given if isinstance(each, nn.Parameter)}
        parameters.update(p for each in inside for p in each.parameters(recurse=False))
        return cls(inside, parameters)


def auto_wrap(
    module: nn.Module,
    policy: Policy,
    wrapper: Callable[..., nn.Module],
    arguments: dict[str, Any],
    mixed_precision: MixedPrecision | None,
    ignored: Ignored,
) -> None:
    """Wrap what ``policy`` chooses in ``module``, inner modules first, in place.

    Args:
        module: the module, which is left to the caller.
        policy: see :mod:`shardwise.wrap`.
        wrapper: called as ``wrapper(module, **arguments)``.
        arguments: those of the root; a policy may have others for a module.
        mixed_precision: that of the root: classes that it ignores become units without it.
        ignored: modules and parameters to leave alone.
    """
    chosen = chosen_modules(module, policy, ignored_modules=ignored.modules)
    for each in modules_in_full_precision(module, mixed_precision):
        if each not in ignored.modules:
            chosen[each] = {**chosen.get(each, {}), "mixed_precision": None}
            keep_in_full_precision(each)
    free = {
        each: {**arguments, **({"device_mesh": None} if "process_group" in own else {}), **own}
        for each, own in chosen.items()
        if state_of(each) is None and not isinstance(each, TransparentModule)
    }
    apply_to(module, free, wrapper)
