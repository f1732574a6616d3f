"""What a user may switch for one group while training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Called with the reduced gradients of a group side by side, 1-D, before they are divided.
AllReduceHook = Callable[[torch.Tensor], object]


@dataclass
class GroupOptions:
    """Each is described where it is set: at the ``FSDPModule`` method of its name."""

    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    keep_unsharded: bool = False
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    gradient_divide_factor: float | None = None
    force_sum_reduction: bool = False
    reduce_scatter_unused_params: bool = False
    reduce_scatter_max_input_buffers: int = 1
    all_reduce_hook: AllReduceHook | None = None
    keep_low_precision_grads: bool = False
