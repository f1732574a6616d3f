"""A plan by name patterns, in the words of ``transformers``' ``fsdp_plan``.

    {"model.layers.*": "free_full_weight", "lm_head": "keep_full_weight"}

A ``*`` stands for one part of a name between dots. The values say what happens to a unit's full
parameters between forward and backward: *freed*, as far as the strategy frees any, or *kept*.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

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
