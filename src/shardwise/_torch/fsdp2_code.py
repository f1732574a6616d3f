"""The code of torch's own FSDP2 that allocates memory."""

import inspect
from typing import Any

from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param

#: The modules that gather and reduce, and that hold parameters.
COLLECTIVES: Any = _fsdp_collectives
PARAMETERS: Any = _fsdp_param

# From torch 2.15 on, autograd accumulates by itself, without these.
_ACCUMULATE = ("accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed")
_ACCUMULATING = [getattr(_fsdp_param.FSDPParam, name, None) for name in _ACCUMULATE]

#: Functions in them that allocate for gradients, and for what is sent.
FOR_GRADIENTS: list[Any] = [
    inspect.unwrap(each) for each in (*_ACCUMULATING, _fsdp_collectives.foreach_reduce) if each
]
FOR_SENDING: list[Any] = [inspect.unwrap(PARAMETERS.FSDPParam.all_gather_inputs.fget)]
