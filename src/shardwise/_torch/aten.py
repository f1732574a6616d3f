"""Operators that torch's own functions call, and that have no public name."""

from __future__ import annotations

import torch

#: (query, key, value, dropout_p, is_causal) -> (out, logsumexp), on CPUs.
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
#: (grad, query, key, value, out, logsumexp, dropout_p, is_causal) -> three gradients.
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
#: (grad, output, dim, dtype of the input) -> gradient.
log_softmax_backward = torch.ops.aten._log_softmax_backward_data.default
#: (list of tensors) -> their norms.
foreach_norm = torch._foreach_norm
#: (parameters, gradients, first and second moments, maximal ones, steps, ...), in place.
fused_adamw = torch._fused_adamw_
