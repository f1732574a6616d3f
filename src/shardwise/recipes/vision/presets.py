"""Vision Transformers by name. No torch here: the command line asks.

The sizes up to ``vit-huge`` are those of Dosovitskiy et al. and Touvron et al.; ``vit-1b`` and
``vit-2b`` are g and G of Zhai et al., "Scaling Vision Transformers"; ``vit-10b`` has the shape of
PyTorch/XLA's 10-billion-parameter example of FSDP.

Residual nets by name, as settings of ``transformers``. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class VitPreset:
    """The shape of a Vision Transformer.

    Attributes:
        hidden: width of the residual stream.
        layers: number of blocks.
        heads: attention heads.
        intermediate: width inside the blocks' MLPs; by default four times ``hidden``.
        patch: edge of a patch, in pixels.
        image: edge of a picture, in pixels.
        batch_size: pictures per rank, unless told otherwise.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int | None = None
    patch: int = 16
    image: int = 224
    batch_size: int = 32

    def settings(self) -> dict[str, Any]:
        """As ``transformers`` names them."""
        return {
            "model_type": "vit",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate or 4 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "patch_size": self.patch,
            "image_size": self.image,
            "layer_norm_eps": 1e-6,
        }


VIT_PRESETS = {
    "vit-tiny": VitPreset(hidden=192, layers=12, heads=3),  # 5.7 M parameters
    "vit-small": VitPreset(hidden=384, layers=12, heads=6),  # 22 M
    "vit-base": VitPreset(hidden=768, layers=12, heads=12),  # 87 M
    "vit-large": VitPreset(hidden=1024, layers=24, heads=16),  # 304 M
    "vit-huge": VitPreset(hidden=1280, layers=32, heads=16, patch=14),  # 632 M
    "vit-1b": VitPreset(  # 1.01 billion
        hidden=1408, layers=40, heads=16, intermediate=6144, patch=14
    ),
    "vit-2b": VitPreset(  # 1.84 billion
        hidden=1664, layers=48, heads=16, intermediate=8192, patch=14
    ),
    "vit-10b": VitPreset(hidden=5120, layers=32, heads=32, patch=14, batch_size=8),  # 10.1 billion
}


def _resnet(
    layer: str, depths: list[int], hidden: list[int], embedding: int = 64
) -> dict[str, Any]:
    return {
        "model_type": "resnet",
        "layer_type": layer,
        "depths": depths,
        "hidden_sizes": hidden,
        "embedding_size": embedding,
    }


_NARROW, _WIDE = [64, 128, 256, 512], [256, 512, 1024, 2048]

RESNETS = {
    "resnet18": _resnet("basic", [2, 2, 2, 2], _NARROW),
    "resnet34": _resnet("basic", [3, 4, 6, 3], _NARROW),
    "resnet50": _resnet("bottleneck", [3, 4, 6, 3], _WIDE),
    "resnet101": _resnet("bottleneck", [3, 4, 23, 3], _WIDE),
    "resnet152": _resnet("bottleneck", [3, 8, 36, 3], _WIDE),
    "tiny": _resnet("basic", [1, 1], [16, 32], embedding=16),
}
