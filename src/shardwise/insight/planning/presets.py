"""Models by name, as settings of a ``config.json``, and the settings of a file. No torch here."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.base.errors import CheckpointError, NotPossibleError
from shardwise.checkpoint.disk.place import is_url
from shardwise.pretrained.opening import ModelSettingsError, read_settings, small_files

#: Of text that is read byte by byte: the 256 bytes, then the token that stands between documents.
SEPARATOR, BYTE_VOCABULARY = 256, 264


class ModelError(NotPossibleError):
    """A model that cannot be found or built."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__("model", found, expected)


def llama_settings(
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    positions: int,
    kv_heads: int | None = None,
    vocabulary: int | None = None,
) -> dict[str, Any]:
    """Return the settings of a Llama, as in a ``config.json`` of ``transformers``.

    Without ``kv_heads``, there are as many as attention heads; without ``vocabulary``, whoever
    builds the model says it.
    """
    settings = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }
    return {name: value for name, value in settings.items() if value is not None}


_llama3 = functools.partial(llama_settings, positions=131_072, kv_heads=8, vocabulary=128_256)
_llama2 = functools.partial(llama_settings, positions=4096, vocabulary=32_000)

#: The first three are of this library; their names count all parameters but embedding and head. The
#: others have the shapes of the Llama 2 and Llama 3.1 papers.
LLAMAS = {
    "llama-tiny": llama_settings(hidden=128, intermediate=384, layers=4, heads=4, positions=1024),
    "llama-34m": llama_settings(hidden=512, intermediate=2048, layers=8, heads=8, positions=2048),
    "llama-150m": llama_settings(
        hidden=1024, intermediate=2688, layers=12, heads=16, positions=2048
    ),
    "llama-8b": _llama3(hidden=4096, intermediate=14_336, layers=32, heads=32),
    "llama-70b": _llama3(hidden=8192, intermediate=28_672, layers=80, heads=64),
    "llama-405b": _llama3(hidden=16_384, intermediate=53_248, layers=126, heads=128),
    "llama2-7b": _llama2(hidden=4096, intermediate=11_008, layers=32, heads=32),
    "llama2-13b": _llama2(hidden=5120, intermediate=13_824, layers=40, heads=40),
}


def vit_settings(
    hidden: int, layers: int, heads: int, intermediate: int | None = None, patch: int = 16
) -> dict[str, Any]:
    """Return the settings of a Vision Transformer.

    Its MLPs are four times as wide as the rest, unless ``intermediate`` is given.
    """
    return {
        "model_type": "vit",
        "hidden_size": hidden,
        "intermediate_size": intermediate or 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "patch_size": patch,
        "image_size": 224,
        "layer_norm_eps": 1e-6,
    }


# The sizes up to vit-huge are those of Dosovitskiy et al. and Touvron et al.; vit-1b and vit-2b are
# g and G of Zhai et al., "Scaling Vision Transformers"; vit-10b has the shape of PyTorch/XLA's
# 10-billion-parameter example of FSDP.
VIT_PRESETS = {
    "vit-tiny": vit_settings(hidden=192, layers=12, heads=3),  # 5.7 M parameters
    "vit-small": vit_settings(hidden=384, layers=12, heads=6),  # 22 M
    "vit-base": vit_settings(hidden=768, layers=12, heads=12),  # 87 M
    "vit-large": vit_settings(hidden=1024, layers=24, heads=16),  # 304 M
    "vit-huge": vit_settings(hidden=1280, layers=32, heads=16, patch=14),  # 632 M
    "vit-1b": vit_settings(  # 1.01 billion
        hidden=1408, layers=40, heads=16, intermediate=6144, patch=14
    ),
    "vit-2b": vit_settings(  # 1.84 billion
        hidden=1664, layers=48, heads=16, intermediate=8192, patch=14
    ),
    "vit-10b": vit_settings(hidden=5120, layers=32, heads=32, patch=14),  # 10.1 billion
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
    **LLAMAS,
    **VIT_PRESETS,
    **{name: settings for name, settings in RESNETS.items() if name != "tiny"},
}


def is_code(model: str) -> bool:
    """Whether a model is named by a function in code, and not by a preset or a file of settings."""
    if model in MODELS or is_url(model) or (Path(model).exists() and not model.endswith(".py")):
        return False
    return ":" in model or model.endswith(".py") or find_module(model.partition(".")[0]) is not None


def find_module(name: str) -> ModuleSpec | None:
    """Return where a module could be imported from; None: nowhere. Its packages are imported."""
    try:
        return find_spec(name) if all(map(str.isidentifier, name.split("."))) else None
    except ImportError:
        return None


def find_settings(model: str, presets: Mapping[str, dict[str, Any]] = MODELS) -> dict[str, Any]:
    """Return the settings of a preset, or of a ``config.json`` of ``transformers``.

    Args:
        model: a preset's name, the path of a config file, or of a folder that holds one; or the URL
            of such a folder in an object store.
        presets: settings by name.

    Raises:
        ModelError: it is neither, or the file is no model configuration.
    """
    if model in presets:
        return presets[model]
    try:
        path = small_files(model)
    except (CheckpointError, ValueError) as error:
        reason = str(error).removeprefix("path: ")
        raise ModelError(f"a URL that cannot be read ({reason})", "a model there") from None
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
