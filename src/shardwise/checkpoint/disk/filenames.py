"""What files of checkpoints are called, without the readers of them."""

from __future__ import annotations

import re
from pathlib import Path

#: The file of a model in one file, which is read rather than an index beside it.
SINGLE = "model.safetensors"
#: The file of a model in several files that names the file of each tensor.
INDEX = "model.safetensors.index.json"
#: What to do to the parts that DeepSpeed saves on each rank.
DEEPSPEED = "DeepSpeed's ZeRO; its zero_to_fp32.py, which it puts beside, makes a model of them"
#: A file of weights of a checkpoint in an object store, and the attempt that has written it.
SHARD = re.compile(
    r"(?:shard-\d+-of-\d+|model(?:-\d+-of-\d+)?(?=-[0-9a-f]{16}\.))"
    r"(?:-(?P<nonce>[0-9a-f]{16}))?\.safetensors",
    re.ASCII,
)
_NAME = re.compile(r"(.*?)rank-(\d{1,9})-of-(\d{1,9})(\.pt|\.pth|\.bin)")


def is_of_attempt(name: str) -> bool:
    """Whether a file has a name that one attempt alone gives it; it may be a leftover."""
    match = SHARD.fullmatch(name)
    return match is not None and match["nonce"] is not None


def is_rank_file(path: Path) -> bool:
    """Whether a path has the name of one rank's file."""
    return _NAME.fullmatch(path.name) is not None


def sets_of_rank_files(folder: Path) -> list[list[Path]]:
    """The files of ranks in a folder; those of one checkpoint together, by rank."""
    found: dict[tuple[str, ...], list[tuple[int, Path]]] = {}
    for path in folder.glob("*rank-*-of-*.*"):
        if match := _NAME.fullmatch(path.name):
            before, rank, *rest = match.groups()
            found.setdefault((before, *rest), []).append((int(rank), path))
    return [[path for _, path in sorted(files)] for _, files in sorted(found.items())]


def files_beside(path: Path) -> list[Path]:
    """The files of all ranks of the checkpoint that a file of one rank belongs to."""
    return next((files for files in sets_of_rank_files(path.parent) if path in files), [path])
