"""A ``transformers`` model on the meta device, as the configuration beside its weights says."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.base.errors import CheckpointError
from shardwise.base.units import one_line
from shardwise.checkpoint.disk.entries import torch_dtype
from shardwise.checkpoint.disk.place import Place, place_of
from shardwise.checkpoint.formats.detect import open_source
from shardwise.checkpoint.formats.hf import CONFIG, find_config
from shardwise.checkpoint.formats.source import ReadWindow, Source, model_tensors
from shardwise.pretrained import hf, opening

Name = str | os.PathLike[str]
"""A folder, a file of weights, their URL, or the name of a repository on the Hugging Face Hub."""

_log = logging.getLogger(__name__)

_BUFFER = 1 << 20  # bytes of each of two weights that are compared
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


def build(
    name: Name,
    *,
    model_class: Any = None,
    dtype: torch.dtype | str | None = None,
    **config: Any,
) -> PreTrainedModel:
    """Build a model on the meta device, as its configuration says. Nothing is allocated.

    Tied weights are tied, unless the files have different values for them. :func:`.fill` reads the
    weights after the model was sharded.

    Args:
        name: a folder of ``save_pretrained``, a run or a checkpoint of Shardwise, its URL in an
            object store, or the name of a repository on the Hugging Face Hub.
        model_class: a model class or an ``AutoModel...`` class of ``transformers``. The default is
            the first of the configuration's ``architectures``.
        dtype: dtype of the parameters, or its name. The default is that of the configuration, or
            else of the weights. Parameters that the model keeps in float32 stay in it.
        config: overrides of the configuration, such as ``attn_implementation="eager"``.

    Returns:
        The model, in evaluation mode as from ``from_pretrained``.

    Raises:
        CheckpointError: there is no configuration, its weights are quantized, or a file is damaged.
        ValueError: ``transformers`` cannot build the model, or ``dtype`` is not one.
    """
    where = find(name)
    with open_source(where) as source:
        return build_from(source, where, name, model_class=model_class, dtype=dtype, **config)


def build_from(
    source: Source,
    where: Place,
    name: Name,
    *,
    model_class: Any,
    dtype: torch.dtype | str | None,
    **config: Any,
) -> PreTrainedModel:
    """Build the model of weights that are open; see :func:`build`.

    Args:
        source: the weights.
        where: the folder that was asked for, or its name in an object store.
        name: what the model is called.
        model_class: as for :func:`build`.
        dtype: as for :func:`build`.
        config: as for :func:`build`.

    Raises:
        CheckpointError, ValueError: as by :func:`build`.
    """
    with torch.no_grad():
        settings = _config(source, where, config)
        if getattr(settings, "quantization_config", None) is not None:
            raise CheckpointError(
                f"{where}: {CONFIG} says that the weights are quantized, expected weights in a "
                "floating-point dtype; quantized weights cannot be sharded"
            )
        chosen = _dtype(dtype, settings, source)
        made = _class(model_class, settings, where)
        with explaining(f"{where}: transformers cannot build {made.__name__} from {CONFIG}"):
            model = hf.build(made, settings, chosen)
        untied = hf.untie(model, lambda name, other: not _differ(source, name, other))
    if untied:
        _log.warning(
            "%s: has different values for weights that %s ties, so they are not tied: %s",
            *(name, CONFIG, ", ".join(untied)),
        )
    model.config.name_or_path = model.name_or_path = os.fspath(name)
    folders = [each for each in map(opening.small_files, (where, source.where)) if each.is_dir()]
    if model.can_generate() and any(found := [*map(opening.generation_config, folders)]):
        model.generation_config = next(filter(None, found))
    model.train(mode=False)
    return model


def find_adapters(where: Path) -> Path | None:
    """Return the folder of the adapters that a path means: its own, or that of its run."""
    folders = (where, where / "adapters")
    return next((each for each in folders if (each / opening.ADAPTER_CONFIG).is_file()), None)


@contextlib.contextmanager
def explaining(doing: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Say what a library was doing: each model checks its configuration in its own way."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise kind(f"{doing}: {reason}") from error


def _differ(source: Source, name: str, other: str) -> bool:
    """Whether the files have both weights, with different values."""
    paths = {each: path for each, path in model_tensors(source).items() if each in (name, other)}
    if len(paths) < 2:
        return False
    if source.tensors[paths[name]] != source.tensors[paths[other]]:
        return True
    windows = ReadWindow(_BUFFER), ReadWindow(_BUFFER)
    both = (w.parts(source, paths[n]) for w, n in zip(windows, (name, other), strict=True))
    return any(not torch.equal(a, b) for (_, a), (_, b) in zip(*both, strict=True))


def find(name: Name) -> Place:
    """Find the folder or file of a name; files of the Hub are downloaded, once for each host.

    Raises:
        CheckpointError: there is nothing of this name.
        ValueError: it is a URL of no store, or has a user name, a password or a query.
    """
    path = place_of(name)
    if not isinstance(path, Path):
        return path
    return path if path.exists() else opening.from_hub(os.fspath(name), _FILES)


def _config(source: Source, where: Place, overrides: Mapping[str, Any]) -> PreTrainedConfig:
    found = find_config(source)
    if found is None:
        raise CheckpointError(
            f"{where}: found no {CONFIG} that names a model_type, expected the configuration of a "
            "transformers model beside its weights"
        )
    settings = dict(found[1])
    made = hf.config_class(settings["model_type"])
    if made is None:
        raise ValueError(
            f"{where}: {CONFIG} has model_type {settings['model_type']!r}, which transformers does "
            "not know; install the version that does, or build the model and call fill()"
        )
    with explaining(f"{where}: transformers cannot use {CONFIG}"):
        return opening.model_config(made, settings, where / CONFIG, **overrides)


def _dtype(
    asked: torch.dtype | str | None, config: PreTrainedConfig, source: Source
) -> torch.dtype:
    if asked is None or asked == "auto":
        asked = config.dtype or next(
            (
                found
                for _, path in sorted(model_tensors(source).items())  # as transformers does
                if (found := torch_dtype(source.tensors[path].dtype)).is_floating_point
            ),
            torch.float32,
        )
    dtype: Any = getattr(torch, asked, None) if isinstance(asked, str) else asked
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(
            f"dtype: found {asked!r}, expected a floating-point dtype of 16 bits or more, such as "
            "torch.bfloat16"
        )
    return dtype


def _class(asked: Any, config: PreTrainedConfig, where: Place) -> Any:
    if asked is not None:
        return asked
    names = config.architectures or []
    for name in names:
        made = hf.class_named(name)
        if made is not None:
            return made
    raise ValueError(
        f"{where}: {CONFIG} has architectures {names}, of which transformers has none; pass "
        "model_class=, such as transformers.AutoModelForCausalLM"
    )
