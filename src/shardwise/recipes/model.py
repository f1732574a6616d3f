"""A causal language model from ``transformers``, built as shards: no rank ever holds it whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise import MixedPrecisionPolicy, fully_shard, materialize
from shardwise.frontends.strategies import ShardingPlan
from shardwise.recipes.config import OptionError, Precision, ShardingConfig

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}


def build(
    settings: dict[str, Any], vocab_size: int | None, separator: int | None
) -> PreTrainedModel:
    """Build the model on the meta device.

    Args:
        settings: as in a ``config.json`` of ``transformers``.
        vocab_size: rows of the embedding, whatever the settings say; ``None``: as they say.
        separator: the token that stands between documents; ``None``: as they say.

    Raises:
        OptionError: ``transformers`` cannot make a causal language model of the settings.
    """
    own: dict[str, Any] = {"use_cache": False, "dtype": "float32"}
    if vocab_size is not None:
        own |= {"vocab_size": vocab_size}
    if separator is not None:
        own |= {"bos_token_id": separator, "eos_token_id": separator, "pad_token_id": None}
    rest = {k: v for k, v in settings.items() if k not in ("model_type", "torch_dtype")}
    try:
        config = AutoConfig.for_model(settings["model_type"], **{**rest, **own})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=torch.float32
            )
    except Exception as error:  # each of its models checks in its own way
        reason = " ".join(str(error).split())[:200]
        raise OptionError(
            "--model",
            f"settings that transformers cannot use ({reason})",
            "those of a causal language model",
        ) from error
    assert isinstance(model, PreTrainedModel)
    return model


def shard(
    model: PreTrainedModel, config: ShardingConfig, plan: ShardingPlan, mesh: DeviceMesh, seed: int
) -> None:
    """Shard every decoder layer, then the rest, and give the shards their initial values.

    The values depend on the seed alone, not on the mesh.
    """
    if config.activation_checkpointing:
        # The newer name of transformers 5.x, or the older one.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[config.param_dtype], reduce_dtype=DTYPES[config.reduce_dtype]
    )
    transport = None if config.transport is None else config.transport.value
    for module in (*decoder_layers(model), model):
        # The root's own parameters (embedding, head) are needed at both ends of the forward.
        reshard = plan.reshard_after_forward and module is not model
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=precision,
            transport=transport,
        )
    # Nested models of one model may each have rules of their own for their modules.
    owner = {
        module: part
        for part in model.modules()
        if isinstance(part, PreTrainedModel)
        for module in part.modules()
    }

    def init(module: nn.Module) -> None:
        owner[module]._init_weights(module)  # type: ignore[no-untyped-call]

    torch.manual_seed(seed)
    materialize(model, init=init)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The blocks that repeat: the longest list of modules in the model."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        name = type(model).__name__
        raise OptionError("--model", f"{name} without a list of layers", "a model made of layers")
    return max(lists, key=len)


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of every next token, a float32 scalar, in nats.

    Args:
        model: maps (batch, length) int64 to ``.logits`` of shape (batch, length, vocabulary).
        tokens: (batch, length + 1) int64.
    """
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def shard_bytes(model: nn.Module) -> int:
    """Bytes of parameters that this rank keeps."""
    locals_ = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(t.numel() * t.element_size() for t in locals_)


def transport_name(model: nn.Module) -> str:
    """What moves bytes along each dimension of the mesh, outermost first."""
    state = fully_shard.state(model)  # type: ignore[attr-defined]
    for group in state.groups if state is not None else []:
        outer = group.mesh.replicate
        return group.mesh.shard.name if outer is None else f"{outer.name}/{group.mesh.shard.name}"
    return "none"
