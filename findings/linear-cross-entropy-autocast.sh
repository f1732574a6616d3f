#!/usr/bin/env bash
# linear_cross_entropy under autocast: the chunks of tokens that save memory also leave autocast.
#
# Guess: under bfloat16 autocast, F.linear_cross_entropy multiplies in bfloat16, as F.linear does, with options and
# without. Options say how memory is used, and a training in mixed precision keeps its speed.
# Found (torch 2.13.0): without options it does. With LinearCrossEntropyOptions() the same call, in the same block, is
# one operator that gets float32 tensors and multiplies them as such: its loss is that of no autocast, bit for bit.
source "$(dirname "$0")/environment.sh"
packages torch==2.13.0
ranks 1 <<'PROGRAM'
import torch
import torch.nn.functional as F
from torch.nn import LinearCrossEntropyOptions
from torch.utils._python_dispatch import TorchDispatchMode


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.mm.default or "linear_cross_entropy" in str(operator):
            self.dtypes.add(str(args[0].dtype))
        return operator(*args, **(kwargs or {}))


torch.manual_seed(0)
hidden, weight, targets = torch.randn(512, 64), torch.randn(1000, 64) / 10, torch.randint(0, 1000, (512,))
for options in (None, LinearCrossEntropyOptions()):
    in_float32 = F.linear_cross_entropy(hidden, weight, targets, options=options)
    with torch.autocast("cpu", torch.bfloat16), Products() as products:
        found = F.linear_cross_entropy(hidden, weight, targets, options=options)
    (dtype,) = products.dtypes
    same = bool(found == in_float32)
    print(f"{'without' if options is None else 'with'} options: products of {dtype}, the loss of float32: {same}")
    assert (dtype, same) == (("torch.bfloat16", False) if options is None else ("torch.float32", True))
PROGRAM
# Output:
#   torch 2.13.0+cpu
#   without options: products of torch.bfloat16, the loss of float32: False
#   with options: products of torch.float32, the loss of float32: True
