"""Which modules of a model become units of their own, and wrapping them.

``apply.py`` is where policies meet models; ``policies.py``, ``plan.py`` and ``blocks.py`` are the
kinds of policies; ``manual.py`` wraps without one, while a model is built.
"""

from shardwise.wrap.apply import Policy, apply_to, apply_wrap, chosen_modules
from shardwise.wrap.blocks import repeated_blocks
from shardwise.wrap.manual import enable_wrap, wrap
from shardwise.wrap.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    WrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    or_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

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
