"""What ``--from`` and ``--lora`` say: published weights, and adapters on them. No torch here.

Of weights only names are looked at, so that a mistake is reported before processes start. What is
in the files is checked when they are read.
"""

from __future__ import annotations

import enum
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from shardwise.app.recipes.core.rundir import RunDir
from shardwise.base.errors import CheckpointError
from shardwise.base.files import Links, read_small
from shardwise.base.strict import Fields, parse
from shardwise.base.units import listed
from shardwise.checkpoint.disk.filenames import INDEX, SINGLE
from shardwise.checkpoint.disk.place import Place, place_of
from shardwise.checkpoint.formats.detect import find_checkpoint
from shardwise.insight.planning.presets import find_settings
from shardwise.insight.schema.option import OptionError, naming, require
from shardwise.insight.schema.sharding import PrecisionName
from shardwise.pretrained.opening import from_hub, small_files

if TYPE_CHECKING:
    from torch import nn

_CONFIG = "config.json"
_MAX_INDEX = 1 << 28
_SAMPLES, _SAMPLE = 256, 1 << 12  # parts of a file that make its fingerprint, and bytes of each
# Weights in other formats: they are pickles, or of other frameworks.
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "*.onnx")


def find_pretrained(name: str) -> dict[str, Any]:
    """Return the settings of a model that has weights.

    Args:
        name: a folder, such as that of a run, a URL, or the name of a repository on the Hub.

    Returns:
        What its ``config.json`` says.

    Raises:
        UserError: there is no such model, or it has no weights.
    """
    with naming("--from"):
        folder = _with_config(name, place_of(name))
        has_config = (folder / _CONFIG).is_file()
        require(
            has_config, "--from", f"{name} without {_CONFIG}", "the model's configuration in it"
        )
        return find_settings(str(folder), {})


def _with_config(name: str, place: Place) -> Path:
    """The folder that the configuration of a model with weights has to be in."""
    if isinstance(place, Path) and not place.exists():
        return from_hub(name, [_CONFIG])
    is_file = not place.is_dir() if isinstance(place, Path) else name.endswith(".safetensors")
    require(not is_file, "--from", f"{name}, a file", "the folder that it is in")
    if not isinstance(place, Path):
        find_checkpoint(place)
        return small_files(place)
    missing = missing_weights(place)
    if missing is not None:
        raise OptionError("--from", f"{name} {missing}", "a folder with all files of a model")
    # A run has it, of which this may be the folder, or a checkpoint.
    runs = map(RunDir, (place, place.absolute().parent.parent))
    return next((run.root for run in runs if run.is_run()), place)


def missing_weights(folder: Path) -> str | None:
    """Return what a folder lacks of the weights of a model; None: nothing."""
    index = folder / INDEX
    if index.is_file() and not (folder / SINGLE).is_file():  # of which the single file wins
        try:
            text = read_small(index, _MAX_INDEX, Links.FOLLOW)
            files = Fields(parse(text, str(index)), str(index)).object("weight_map").values()
        except CheckpointError as error:
            raise OptionError("--from", str(error), f"a {INDEX} of safetensors files") from None
        named = sorted({file for file in files if isinstance(file, str)})
        lost = [file for file in named if not (folder / os.path.basename(file)).is_file()]
        if lost:
            return f"without {listed(lost, 1)}, of the {len(named)} files that {INDEX} names"
        return None
    is_checkpoint = RunDir(folder).has_checkpoints() or (folder / ".metadata").is_file()
    if any(folder.glob("*.safetensors")) or is_checkpoint:
        return None
    other = sorted(file.name for pattern in _OTHER_WEIGHTS for file in folder.glob(pattern))
    if other:
        return f"with weights in {other[0]} and none in .safetensors files"
    return "without weights"


def fingerprint(name: str) -> str:
    """Return what tells the weights of one base model from those of another.

    It is a hash of the sizes of the files and of parts that are spread over each of them, so that
    large models need no more reading than small ones. In an object store, the entity tags stand for
    these parts. A name on the Hugging Face Hub stands for itself.

    Raises:
        UserError: the object store cannot be read.
    """
    digest = xxhash.xxh3_128()
    with naming("--from"):
        place = place_of(name)
        if not isinstance(place, Path):
            for file, found in sorted(place.below().items()):
                if file.endswith(".safetensors"):
                    digest.update(f"{file} {found.size} {found.tag or found.modified}\n".encode())
        elif not place.is_dir():
            return name
        else:
            for path in sorted(place.rglob("*.safetensors")):
                size = path.stat().st_size
                digest.update(f"{path.name} {size}".encode())
                for part in _parts(path, size):
                    digest.update(part)
    return digest.hexdigest()


def _parts(file: Path, size: int) -> Iterator[bytes]:
    step = max(_SAMPLE, size // _SAMPLES)
    with file.open("rb") as opened:
        for at in range(0, size, step):
            opened.seek(at)
            yield opened.read(_SAMPLE)


# -- adapters --------------------------------------------------------------------------------------

ALL_LINEAR = "all-linear"

_EXPECTED = "r=16,alpha=32,targets=all-linear,dropout=0.05, or some of these"
_TARGETS = re.compile(r"[\w.-]+(\+[\w.-]+)*")


class Frozen(enum.Enum):
    """What happens to the frozen parameters of a group between forward and backward."""

    KEEP = "keep"
    GATHER = "gather"


class BaseFormat(enum.Enum):
    """How the frozen linear layers below adapters are stored."""

    NF4 = "nf4"


def allowed(needed: int, free: int) -> Frozen:
    """What happens to frozen parameters as far as memory allows, unless ``--frozen`` decides.

    Args:
        needed: bytes of all frozen parameters as they are computed with.
        free: bytes that are free for each rank.
    """
    return Frozen.KEEP if 2 * needed <= free else Frozen.GATHER


def frozen_bytes(model: nn.Module, compute: PrecisionName | None) -> int:
    """The bytes of all frozen parameters of a model as they are computed with."""
    itemsize = 2 if compute is PrecisionName.BF16 else 4
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return sum(p.numel() * (itemsize if p.is_floating_point() else p.itemsize) for p in frozen)


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Adapters of low rank (LoRA, Hu et al. 2021), as ``peft`` makes them.

    Attributes:
        r: their rank.
        alpha: what they are added with is ``alpha / r``.
        targets: names of the layers that get one, or all linear layers but the head.
        dropout: of their inputs.
    """

    r: int = 16
    alpha: float = 32
    targets: str | tuple[str, ...] = ALL_LINEAR
    dropout: float = 0.0

    def __str__(self) -> str:
        where = self.targets if isinstance(self.targets, str) else "+".join(self.targets)
        dropout = f", dropout {self.dropout:g}" if self.dropout else ""
        return f"LoRA of rank {self.r}, alpha {self.alpha:g}{dropout}, on {where}"


def parse_lora(text: str) -> LoraSettings:
    """Read ``r=16,alpha=32,targets=q_proj+v_proj,dropout=0.05``; each may be left out.

    Alpha is twice the rank by default.

    Raises:
        OptionError: it says something else.
    """
    given: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not value or name not in ("r", "alpha", "targets", "dropout"):
            raise OptionError("--lora", repr(part), _EXPECTED)
        if name in given:
            raise OptionError("--lora", f"{name} twice", _EXPECTED)
        given[name] = value
    rank = _number("r", given.get("r", "16"))
    if rank != int(rank) or rank < 1:
        raise OptionError("--lora", f"r={given['r']}", "a whole number, 1 or more")
    alpha = _number("alpha", given["alpha"]) if "alpha" in given else 2 * rank
    if not alpha > 0:
        raise OptionError("--lora", f"alpha={given['alpha']}", "a number above 0")
    dropout = _number("dropout", given.get("dropout", "0"))
    if not 0 <= dropout < 1:
        raise OptionError("--lora", f"dropout={given['dropout']}", "a number from 0 to below 1")
    targets = given.get("targets", ALL_LINEAR)
    if not _TARGETS.fullmatch(targets):
        expected = "all-linear, or names of layers, such as q_proj+v_proj"
        raise OptionError("--lora", f"targets={targets}", expected)
    return LoraSettings(
        r=int(rank),
        alpha=alpha,
        targets=ALL_LINEAR if targets == ALL_LINEAR else tuple(targets.split("+")),
        dropout=dropout,
    )


def _number(name: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise OptionError("--lora", f"{name}={text}", "a number")
    return found
