"""A Vision Transformer from ``transformers``, built block by block: nobody ever holds it whole.

It comes into being in two moves, so that neither a host nor a device needs room for more than a
rank's shards and one layer:

    build       on the meta device: shapes only, no memory
    born        sharded group by group, still without memory: a rank learns which rows will be its
                own; then layer by layer: memory, initial values, cut, and the whole layer is gone
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.vit.modeling_vit import ViTLayer

from shardwise.frontends.strategies import ShardingPlan
from shardwise.recipes.config import OptionError, ShardingConfig
from shardwise.recipes.model import shard
from shardwise.sharding.shares import Shares, shares_of


def build(settings: Mapping[str, Any], classes: int) -> ViTForImageClassification:
    """Build the model on the meta device.

    Args:
        settings: as in a ``config.json`` of ``transformers``.
        classes: rows of the classifier, whatever the settings say.

    Raises:
        OptionError: ``transformers`` cannot make a Vision Transformer of the settings.
    """
    own = {"num_labels": classes, "dtype": "float32"}
    left_out = ("model_type", "torch_dtype", "id2label", "label2id")
    rest = {name: value for name, value in settings.items() if name not in left_out}
    try:
        config = ViTConfig(**{**rest, **own})
        with torch.device("meta"):
            return ViTForImageClassification(config)
    except Exception as error:  # it checks in several ways
        reason = " ".join(str(error).split())[:200]
        raise OptionError(
            "--model",
            f"settings that transformers cannot use ({reason})",
            "those of a Vision Transformer",
        ) from error


def units_of(model: ViTForImageClassification, *, nested: bool) -> list[nn.Module]:
    """The modules to shard before the model itself: every block, or none."""
    return [m for m in model.modules() if isinstance(m, ViTLayer)] if nested else []


def placement(param: nn.Parameter) -> Shard | None:
    """Along which dimension a parameter is cut: the first, unless that has one row only.

    The class token and the positions have shapes (1, 1, hidden) and (1, positions, hidden). Cut
    along the first dimension, rank 0 would hold all of them, and with N ranks they would be
    gathered into a buffer of N times their size. So they are cut along their longest dimension.
    """
    if param.ndim < 2 or param.shape[0] > 1:
        return None
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))


def shares(
    model: ViTForImageClassification, world_size: int, *, nested: bool = True
) -> list[Shares]:
    """What every rank will hold of each group, the model's own last."""
    return shares_of(model, units_of(model, nested=nested), world_size, placement)


def born(
    model: ViTForImageClassification,
    config: ShardingConfig,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    seed: int,
    *,
    nested: bool = True,
) -> None:
    """Shard a model that is on the meta device, and give the shards their initial values.

    With one seed the values are the same on any mesh; see :func:`shardwise.recipes.model.shard`.

    Args:
        model: as :func:`build` made it.
        config: dtypes, activation checkpointing, transport.
        plan: what becomes of full parameters between forward and backward.
        mesh: over which ranks.
        seed: of the initial values.
        nested: every block is a group of its own; else the model is one group.
    """
    units = units_of(model, nested=nested)
    shard(model, config, plan, mesh, seed, units=units, placement=placement)


def classification_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy, a float32 scalar, in nats.

    Args:
        model: maps pictures to ``.logits`` of shape (batch, classes).
        batch: pictures (batch, 3, height, width), and labels (batch,) int64.
    """
    pictures, labels = batch
    return F.cross_entropy(model(pixel_values=pictures).logits.float(), labels)
