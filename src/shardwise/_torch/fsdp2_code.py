"""The code of torch's own FSDP2 that allocates memory."""

from typing import Any

from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param

#: The modules that gather and reduce, and that hold parameters.
COLLECTIVES: Any = _fsdp_collectives
PARAMETERS: Any = _fsdp_param
