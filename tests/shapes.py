"""Work out once in a process which shape an operation on ``DTensor`` results in.

torch keeps what it has worked out for each thread, and ranks of most tests are new threads. It runs
the operation on fake tensors for that, which takes milliseconds; a tenth of all tests was that. The
result depends on shapes and arguments alone: on no mesh, placement or rank, which torch works out
as ever.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._sharding_prop import ShardingPropagator

_work_out = ShardingPropagator._propagate_tensor_meta_non_cached
_known: dict[Hashable, Any] = {}


def remember_shapes() -> None:
    """Let all ``DTensor`` operations of this process, and of those forked from it, do so."""
    ShardingPropagator._propagate_tensor_meta_non_cached = _recall  # type: ignore[method-assign]


def _recall(self: ShardingPropagator, op_schema: Any) -> Any:
    key = op_schema.op, _key(op_schema.args_schema), _key(op_schema.kwargs_schema)
    try:
        found = _known.get(key)
    except TypeError:  # what cannot be hashed: a symbolic size
        return _work_out(self, op_schema)
    if found is None:
        found = _known[key] = _work_out(self, op_schema)
    return list(found) if isinstance(found, list) else found


def _key(value: Any) -> Hashable:
    """What the shape of a result depends on; 1 is not 1.0 or True."""
    if isinstance(value, DTensorSpec):
        return value.mesh.device_type, value.tensor_meta
    if isinstance(value, tuple | list):
        return type(value), *map(_key, value)
    if isinstance(value, dict):
        return tuple((name, _key(each)) for name, each in value.items())
    return type(value), value
