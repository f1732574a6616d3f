"""The settings of ``--lora``: which adapters, on which base. No torch here."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.sharding import PrecisionName

if TYPE_CHECKING:
    from torch import nn

ALL_LINEAR = "all-linear"

_EXPECTED = "r=16,alpha=32,targets=all-linear,dropout=0.05, or some of these"
_TARGETS = re.compile(r"[\w.-]+(\+[\w.-]+)*")
_SAMPLES, _SAMPLE = 256, 1 << 12  # parts of a file that are looked at, and bytes of each


class Frozen(enum.Enum):
    """What happens to the frozen parameters of a group between forward and backward."""

    KEEP = "keep"
    GATHER = "gather"


def decided(asked: Frozen | None, needed: int, free: int) -> Frozen:
    """What happens to frozen parameters: what was asked for, or else what memory allows.

    Args:
        asked: ``--frozen``.
        needed: bytes of all frozen parameters as they are computed with.
        free: bytes that are free for each rank.
    """
    if asked is not None:
        return asked
    return Frozen.KEEP if 2 * needed <= free else Frozen.GATHER


def frozen_bytes(model: nn.Module, compute: PrecisionName | None) -> int:
    """The bytes of all frozen parameters of a model as they are computed with."""
    itemsize = 2 if compute is PrecisionName.BF16 else 4
    return itemsize * sum(p.numel() for p in model.parameters() if not p.requires_grad)


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


def fingerprint(name: str) -> str:
    """Return what tells the weights of one base model from those of another.

    It is a hash of the sizes of the files and of parts that are spread over each of them, so that
    large models need no more reading than small ones. A name on the Hugging Face Hub stands for
    itself.
    """
    folder = Path(name)
    if not folder.is_dir():
        return name
    digest = xxhash.xxh3_128()
    for file in sorted(folder.rglob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        for part in _parts(file, size):
            digest.update(part)
    return digest.hexdigest()


def _parts(file: Path, size: int) -> Iterator[bytes]:
    step = max(_SAMPLE, size // _SAMPLES)
    with file.open("rb") as opened:
        for at in range(0, size, step):
            opened.seek(at)
            yield opened.read(_SAMPLE)
