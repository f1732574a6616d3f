"""A Vision Transformer from ``transformers``, built block by block: nobody ever holds it whole.

It comes into being in three moves, so that neither a host nor a device needs room for more than a
rank's shards and one layer:

    build       on the meta device: shapes only, no memory
    shard       group by group, still without memory: every rank learns which rows will be its own
    materialize layer by layer: memory, initial values, cut; the next layer takes the place of the
                one before
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.vit.modeling_vit import ViTLayer

from shardwise.recipes.config import OptionError


class Units(enum.Enum):
    """Which modules are groups of their own: what is whole at a time.

    Attributes:
        BLOCKS: every block of the transformer.
        HALF_BLOCKS: the attention and the MLP of every block, inside the block's own group.
        NONE: nothing: the model is one group.
    """

    BLOCKS = "blocks"
    HALF_BLOCKS = "half-blocks"
    NONE = "none"


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


def units_of(model: ViTForImageClassification, units: Units) -> list[nn.Module]:
    """The modules to shard before the model itself, inner ones first."""
    blocks = [module for module in model.modules() if isinstance(module, ViTLayer)]
    match units:
        case Units.NONE:
            return []
        case Units.BLOCKS:
            return list(blocks)
        case Units.HALF_BLOCKS:
            return [part for block in blocks for part in (block.attention, block.mlp, block)]


def placement(param: nn.Parameter) -> Shard | None:
    """Along which dimension a parameter is cut: the first, unless that has one row only.

    The class token and the positions have shapes (1, 1, hidden) and (1, positions, hidden). Cut
    along the first dimension, rank 0 would hold all of them, and with N ranks they would be
    gathered into a buffer of N times their size. So they are cut along their longest dimension.
    """
    if param.ndim < 2 or param.shape[0] > 1:
        return None
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))


def classification_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy, a float32 scalar, in nats.

    Args:
        model: maps pictures to ``.logits`` of shape (batch, classes).
        batch: pictures (batch, 3, height, width), and labels (batch,) int64.
    """
    pictures, labels = batch
    return F.cross_entropy(model(pixel_values=pictures).logits.float(), labels)
