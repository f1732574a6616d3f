"""``from_pretrained``: a sharded ``transformers`` model with published weights, in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.frontends.fsdp2 import fully_shard
from shardwise.frontends.wrap.apply import AUTO, Policy, apply_wrap

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

    from shardwise.frontends.pretrained.building import Name


@overload
def from_pretrained(name: Name, *, peft_config: None = None, **options: Any) -> PreTrainedModel: ...
@overload
def from_pretrained(name: Name, *, peft_config: PeftConfig, **options: Any) -> PeftModel: ...
def from_pretrained(
    name: Name,
    *,
    mesh: DeviceMesh | None = None,
    policy: Policy = AUTO,
    param_dtype: torch.dtype | None = None,
    dtype: torch.dtype | str | None = None,
    model_class: Any = None,
    peft_config: PeftConfig | None = None,
    reshard_after_forward: bool | int | None = None,
    offload_policy: OffloadPolicy | None = None,
    **config: Any,
) -> PreTrainedModel | PeftModel:
    """Load a ``transformers`` model straight into shards. Every rank calls this.

    The model is built on the meta device and sharded. Then every rank reads its rows from the
    files, so no rank ever holds the full model, and each byte of a file is read once per host.
    Weights that the files lack are initialized as the model would; rank 0 logs which.

        model = shardwise.from_pretrained("Qwen/Qwen3-0.6B", param_dtype=torch.bfloat16)

    Args:
        name: a folder of ``save_pretrained``, a run or a checkpoint of Shardwise, or the name of a
            repository on the Hugging Face Hub.
        mesh: the ranks to shard over; see :func:`shardwise.fully_shard`.
        policy: which modules become groups; see :func:`shardwise.wrap.apply_wrap`. By default the
            repeated blocks of the model.
        param_dtype: dtype to compute in; gradients are reduced in float32. The default is the dtype
            of the shards.
        dtype: dtype of the shards, or its name. The default is that of the configuration, or else
            of the weights.
        model_class: a model class or an ``AutoModel...`` class of ``transformers``. The default is
            the first of the configuration's ``architectures``.
        peft_config: adapters to put on the model, a ``LoraConfig``: they are float32 and trained,
            and the rest is frozen. What is returned is then a ``PeftModel``, in training mode.
        reshard_after_forward: for every group but the root; see :func:`shardwise.fully_shard`.
        offload_policy: where shards are stored; see :func:`shardwise.fully_shard`.
        config: overrides of the configuration, such as ``attn_implementation="eager"``.

    Returns:
        The model, sharded, in evaluation mode as from ``from_pretrained`` of ``transformers``.

    Raises:
        CheckpointError: there is no such model, ``transformers`` cannot build it, it is damaged, or
            it does not fit its configuration; raised on all ranks alike.
        ValueError: an argument of :func:`shardwise.fully_shard` is out of range.
    """
    # Importing this name does not import transformers: everything that lists our names imports it.
    from shardwise.frontends.pretrained import hf
    from shardwise.frontends.pretrained.building import build
    from shardwise.frontends.pretrained.filling import fill

    reduce_dtype = None if param_dtype is None else torch.float32
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
    }
    if offload_policy is not None:
        options["offload_policy"] = offload_policy
    group = _ranks_of(mesh)
    # A folder that one rank cannot read ends all of them.
    model = Ranks(group_for(group)).all(
        f"loading {name}", lambda: build(name, model_class=model_class, dtype=dtype, **config)
    )

    def shard(block: torch.nn.Module, **arguments: Any) -> torch.nn.Module:
        own = {"reshard_after_forward": reshard_after_forward, **options, **arguments}
        return fully_shard(block, **own)

    if peft_config is None:
        apply_wrap(model, policy, shard)
        fully_shard(model, **options)
        fill(model, name, group=group)
        shards = dist.get_world_size() if mesh is None else mesh.size(mesh.ndim - 1)
        replicas = 1 if mesh is None else mesh.size() // shards
        hf.tell_sharded(model, shards, replicas)
        return model
    from shardwise.frontends.pretrained.lora import add_adapters, initialize_adapters, plain_names

    adapted = add_adapters(model.train(), peft_config)
    apply_wrap(model, policy, shard)
    fully_shard(adapted, **options)
    initialize_adapters(adapted, group)
    fill(adapted, name, names=plain_names(adapted), group=group)
    return adapted


def _ranks_of(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The ranks that load together: all of a mesh, or those that hold its shards once."""
    if mesh is None or mesh.size() == dist.get_world_size():
        return None
    return mesh.get_group(mesh.ndim - 1)
