"""What ``--from`` names: published weights, with their configuration. No torch here.

Only names are looked at, so that a mistake is reported before processes start. What is in the files
is checked when they are read.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from shardwise.app.recipes.core.begin import find_settings
from shardwise.app.recipes.core.rundir import RunDir
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.files import Links, read_small
from shardwise.checkpoint.disk.strict import Fields, parse
from shardwise.insight.schema.option import OptionError

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_INDEX = 1 << 28
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Weights in other formats: they are pickles, or of other frameworks.
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "*.onnx")


def find_pretrained(name: str) -> dict[str, Any]:
    """Return the settings of a model that has weights.

    Args:
        name: a folder, such as that of a run, or the name of a repository on the Hugging Face Hub.

    Returns:
        What its ``config.json`` says.

    Raises:
        OptionError: there is no such model, or it has no weights.
    """
    folder = Path(name)
    if not folder.exists():
        return find_settings(str(_from_hub(name)), {}, "--from")
    if not folder.is_dir():
        raise OptionError("--from", f"{name}, a file", "the folder that it is in")
    missing = missing_weights(folder)
    if missing is not None:
        raise OptionError("--from", f"{name} {missing}", "a folder with all files of a model")
    run = _run_of(folder)
    found = folder if run is None else run.root
    if not (found / _CONFIG).is_file():
        raise OptionError("--from", f"{name} without {_CONFIG}", "the model's configuration in it")
    return find_settings(str(found), {}, "--from")


def _run_of(folder: Path) -> RunDir | None:
    """Return the run that a folder is, or is a checkpoint of; None: it is something else."""
    step = folder.absolute().parent.parent
    return next((run for run in map(RunDir, (folder, step)) if run.run_json.is_file()), None)


def missing_weights(folder: Path) -> str | None:
    """Return what a folder lacks of the weights of a model; None: nothing."""
    index = folder / _INDEX
    if index.is_file() and not (folder / _SINGLE).is_file():  # of which the single file wins
        try:
            text = read_small(index, _MAX_INDEX, Links.FOLLOW)
            files = Fields(parse(text, str(index)), str(index)).object("weight_map").values()
        except CheckpointError as error:
            raise OptionError("--from", str(error), f"a {_INDEX} of safetensors files") from None
        named = sorted({file for file in files if isinstance(file, str)})
        lost = [file for file in named if not (folder / os.path.basename(file)).is_file()]
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            return f"without {lost[0]}{more}, of the {len(named)} files that {_INDEX} names"
        return None
    if any(folder.glob("*.safetensors")) or _is_checkpoint(folder):
        return None
    other = sorted(file.name for pattern in _OTHER_WEIGHTS for file in folder.glob(pattern))
    if other:
        return f"with weights in {other[0]} and none in .safetensors files"
    return "without weights"


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a run of ours, or a checkpoint of torch's."""
    return RunDir(folder).has_checkpoints() or (folder / ".metadata").is_file()


def _from_hub(name: str) -> Path:
    """Download the configuration of a model, and return its path."""
    expected = "a folder with weights, or the name of a model on the Hugging Face Hub"
    if not _REPOSITORY.fullmatch(name):
        raise OptionError("--from", name, expected)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, _CONFIG))
    except Exception as error:  # of the network, of permissions, of names
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise OptionError(
            "--from",
            f"{name}, which is no folder here and cannot be downloaded ({reason})",
            expected,
        ) from None
