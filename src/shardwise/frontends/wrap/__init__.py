"""Which modules of a model become groups of their own, and how to wrap them.

``policies.py`` decides about modules; ``apply.py`` asks a policy about a model and wraps what
it chose, or wraps by hand while a model is built.
"""

from shardwise.frontends.wrap.apply import (
    Policy,
    apply_to,
    apply_wrap,
    chosen_modules,
    enable_wrap,
    wrap,
)
from shardwise.frontends.wrap.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    WrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    or_policy,
    repeated_blocks,
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
