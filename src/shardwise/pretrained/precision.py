"""What models of ``transformers`` keep in float32 while the rest computes in another dtype.

Importing this does not import transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise._torch import fsdp


def keeping_float32(model: nn.Module, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """The policy with which parameters compute in float32 that ``transformers`` keeps in it.

    Those are routers of experts, say. Inputs are cast as the policy says.

    Args:
        model: any model, about to be sharded, with adapters or not.
        policy: that of all other parameters.
    """
    kept = kept_in_float32(model, policy.param_dtype)
    return fsdp.with_own_dtypes(policy, kept) if kept else policy


def kept_in_float32(model: nn.Module, dtype: torch.dtype | None) -> Collection[nn.Parameter]:
    """The parameters that stay in float32 when the rest of a model has another dtype.

    Args:
        model: any model, with adapters or not.
        dtype: the dtype of the rest; ``None`` if it stays as it is.
    """
    if dtype is None or "transformers" not in sys.modules:  # what is not imported made no model
        return frozenset()
    from shardwise.pretrained import hf

    return hf.kept_in_float32(model, dtype)
