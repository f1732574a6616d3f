"""Models by name, as settings of a ``config.json``, and the settings of a file. No torch here."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.base.errors import CheckpointError, NotPossibleError
from shardwise.frontends.pretrained.opening import ModelSettingsError, read_settings

#: Of text that is read byte by byte: the 256 bytes, then the token that stands between documents.
SEPARATOR, BYTE_VOCABULARY = 256, 264


class ModelError(NotPossibleError):
    """A model that cannot be found or built."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__("model", found, expected)


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The shape of a Llama.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width inside the feed-forward blocks.
        layers: number of decoder layers.
        heads: number of attention heads.
        positions: tokens of the longest sequence.
        kv_heads: number of key and value heads; ``None``: as many as attention heads.
        vocabulary: rows of the embedding; ``None``: that of bytes.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    positions: int
    kv_heads: int | None = None
    vocabulary: int | None = None

    def settings(self) -> dict[str, Any]:
        """Return the settings, as in a ``config.json`` of ``transformers``."""
        settings = {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.positions,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
        }
        return {name: value for name, value in settings.items() if value is not None}


_llama3 = functools.partial(LlamaShape, positions=131_072, kv_heads=8, vocabulary=128_256)
_llama2 = functools.partial(LlamaShape, positions=4096, vocabulary=32_000)

#: The first three are of this library; their names count all parameters but embedding and head. The
#: others have the shapes of the Llama 2 and Llama 3.1 papers.
LLAMAS = {
    "llama-tiny": LlamaShape(hidden=128, intermediate=384, layers=4, heads=4, positions=1024),
    "llama-34m": LlamaShape(hidden=512, intermediate=2048, layers=8, heads=8, positions=2048),
    "llama-150m": LlamaShape(hidden=1024, intermediate=2688, layers=12, heads=16, positions=2048),
    "llama-8b": _llama3(hidden=4096, intermediate=14_336, layers=32, heads=32),
    "llama-70b": _llama3(hidden=8192, intermediate=28_672, layers=80, heads=64),
    "llama-405b": _llama3(hidden=16_384, intermediate=53_248, layers=126, heads=128),
    "llama2-7b": _llama2(hidden=4096, intermediate=11_008, layers=32, heads=32),
    "llama2-13b": _llama2(hidden=5120, intermediate=13_824, layers=40, heads=40),
}


@dataclass(frozen=True, kw_only=True)
class VitPreset:
    """The shape of a Vision Transformer.

    Attributes:
        hidden: width of the residual stream.
        layers: number of blocks.
        heads: attention heads.
        intermediate: width inside the blocks' MLPs; by default four times ``hidden``.
        patch: edge of a patch, in pixels.
        image: edge of an image, in pixels.
        batch_size: images per rank, by default.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int | None = None
    patch: int = 16
    image: int = 224
    batch_size: int = 32

    def settings(self) -> dict[str, Any]:
        """Return the settings, as in a ``config.json`` of ``transformers``."""
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


# The sizes up to vit-huge are those of Dosovitskiy et al. and Touvron et al.; vit-1b and vit-2b are
# g and G of Zhai et al., "Scaling Vision Transformers"; vit-10b has the shape of PyTorch/XLA's
# 10-billion-parameter example of FSDP.
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

#: All models that have a name of their own, as settings of a ``config.json``.
MODELS: Mapping[str, dict[str, Any]] = {
    **{name: shape.settings() for name, shape in LLAMAS.items()},
    **{name: preset.settings() for name, preset in VIT_PRESETS.items()},
    **{name: settings for name, settings in RESNETS.items() if name != "tiny"},
}


def find_settings(model: str, presets: Mapping[str, dict[str, Any]] = MODELS) -> dict[str, Any]:
    """Return the settings of a preset, or of a ``config.json`` of ``transformers``.

    Args:
        model: a preset's name, the path of a config file, or of a folder that holds one.
        presets: settings by name.

    Raises:
        ModelError: it is neither, or the file is no model configuration.
    """
    if model in presets:
        return presets[model]
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        names = ", ".join(presets)
        near = difflib.get_close_matches(model, presets, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ModelError(model, f"{names}, or the path of a config.json{hint}")
    try:
        return read_settings(file)
    except ModelSettingsError as error:
        raise ModelError(f"{file} with {error.found}", error.expected) from None
    except CheckpointError as error:
        raise ModelError(f"{file}, no JSON ({error})", "a config.json") from None


def longest_sequence(settings: dict[str, Any]) -> int | None:
    """Return the number of positions of a model; None if its settings do not say."""
    found = settings.get("max_position_embeddings", settings.get("n_positions"))
    return found if isinstance(found, int) else None
