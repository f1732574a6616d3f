"""How long one operation takes on a device.

On devices that are known from data sheets, matrix products, convolutions and attention need the
time of their arithmetic, and everything else that of reading and writing its tensors. On a machine
that was calibrated, each operation takes as long as the measured one that resembles it most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardwise.insight.planning.events import Op, StepPhase
from shardwise.insight.planning.machine import Curve, Device

#: Seconds that the smallest kernel of an accelerator takes.
KERNEL = 2e-6

#: Operation, by the first part of its name -> the family that was measured. All others are
#: arithmetic.
_FAMILIES: Mapping[str, str] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "linear", "convolution"), "product"),
    **dict.fromkeys(("convolution_backward", "_grouped_mm"), "product"),
    **dict.fromkeys(("copy_", "_foreach_copy_"), "copy"),
    **dict.fromkeys(("neg", "abs", "rsqrt", "sqrt", "reciprocal", "where", "clamp"), "unary"),
    **dict.fromkeys(("silu", "gelu", "exp", "tanh", "sigmoid", "sin", "cos", "log"), "exponential"),
    **dict.fromkeys(
        ("silu_backward", "gelu_backward", "tanh_backward", "sigmoid_backward"),
        "exponential_backward",
    ),
    **dict.fromkeys(("add_", "mul_", "div_", "_foreach_add_", "_foreach_mul_"), "in_place"),
    "_to_copy": "cast",
    **dict.fromkeys(("clone", "slice_backward", "select_backward", "_reshape_copy"), "strided"),
    **dict.fromkeys(("cat", "stack", "constant_pad_nd"), "cat"),
    **dict.fromkeys(("mean", "var_mean", "amax", "max"), "row_sum"),
    "sum": "column_sum",
    **dict.fromkeys(("_log_softmax", "_softmax", "_safe_softmax"), "softmax"),
    **dict.fromkeys(("_log_softmax_backward_data", "_softmax_backward_data"), "softmax_backward"),
    **dict.fromkeys(("native_layer_norm", "native_batch_norm", "_fused_rms_norm"), "norm"),
    **dict.fromkeys(
        (
            "native_layer_norm_backward",
            "native_batch_norm_backward",
            "_fused_rms_norm_backward",
        ),
        "norm_backward",
    ),
    **dict.fromkeys(("embedding", "index", "gather", "index_select"), "lookup"),
    "embedding_dense_backward": "lookup_backward",
    **dict.fromkeys(
        ("zeros", "zeros_like", "zero_", "fill_", "full", "full_like", "ones_like", "new_zeros"),
        "fill",
    ),
    **dict.fromkeys(("_fused_adamw_", "_fused_adam_", "_fused_sgd_", "_fused_adagrad_"), "adamw"),
    **dict.fromkeys(("_foreach_norm", "linalg_vector_norm"), "total_norm"),
}


#: All families.
FAMILIES = frozenset({*_FAMILIES.values(), "arithmetic", "attention", "attention_backward"})


def family_of(op: Op) -> str:
    """Return the measured family of an operation."""
    if is_attention(op):
        return "attention_backward" if "backward" in op.name else "attention"
    parts = op.name.split(".")
    return _FAMILIES.get(parts[1] if len(parts) > 1 else parts[0], "arithmetic")


def is_attention(op: Op) -> bool:
    """Whether an operation is fused attention."""
    return "_dot_product_" in op.name or "flash_attention" in op.name


def calls_of(op: Op) -> int:
    """Return how often the host's overhead counts for an operation: optimizers work by tensor."""
    return max(1, len(op.shapes)) if op.phase is StepPhase.OPTIMIZER else 1


def op_seconds(op: Op, device: Device) -> float:
    """Return the seconds that a device takes; 0 for operations that touch no memory."""
    if not op.nbytes and not op.flops:
        return 0.0
    if device.curves:
        return _measured(op, device.curves)
    moved = op.nbytes / (device.memory_bandwidth * device.memory_efficiency)
    if not op.flops:
        return KERNEL + moved
    share = device.attention_efficiency if is_attention(op) else device.matmul_efficiency
    return KERNEL + max(moved, op.flops / (device.peak(op.dtype) * share))


def size_of(op: Op) -> float:
    """Return where an operation is on the curve of its family: its operations, or its bytes."""
    family = family_of(op)
    if family in ("product", "attention", "attention_backward"):
        return op.flops
    if family == "lookup" and op.shapes:  # most of the table is not read
        return math.prod(op.shapes[-1]) * (2 if _is_half(op) else 4)
    return op.nbytes


def _is_half(op: Op) -> bool:
    return op.dtype in ("bfloat16", "float16")


def _measured(op: Op, curves: Mapping[str, Curve]) -> float:
    curve = curves[f"{family_of(op)}.{'bfloat16' if _is_half(op) else 'float32'}"]
    return curve(size_of(op))
