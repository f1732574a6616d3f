"""Residual nets by name, as settings of ``transformers``. No torch here."""

from __future__ import annotations

from typing import Any


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
