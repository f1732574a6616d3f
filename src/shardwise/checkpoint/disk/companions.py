"""The files beside the weights of a transformers model: its tokenizer, and how it generates.

``config.json`` is not one of them: it belongs to the weights, and is checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from shardwise.base.errors import CheckpointError
from shardwise.base.files import write_new
from shardwise.checkpoint.disk.place import Place, read_whole

if TYPE_CHECKING:
    from shardwise.checkpoint.disk.store_path import StorePath

#: The folder of a run that contains its tokenizer.
TOKENIZER = "tokenizer"
_MAX_BYTES = 1 << 28
_SUFFIXES = frozenset(
    {".codes", ".jinja", ".json", ".model", ".spm", ".tiktoken", ".tokenizer", ".txt"}
)
_BEGINNINGS = (
    *("added_tokens", "bpe", "chat_template", "dict", "entity_vocab", "generation_config"),
    *("merges", "normalizer", "preprocessor_config", "processor_config", "prophetnet"),
    *("sentencepiece", "source", "special_tokens_map", "spiece", "spm", "target", "tekken"),
    *("tokenizer", "video_preprocessor_config", "vocab"),
)

#: Of the files of every tokenizer, at least one.
TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "source.spm"),
)


def is_companion(name: str) -> bool:
    """Whether transformers gives this name to a file of a tokenizer, a processor or generation."""
    return name.startswith(_BEGINNINGS) and Path(name).suffix in _SUFFIXES


def is_small(name: str) -> bool:
    """Whether a file is one that is written beside the weights of a model, its index apart."""
    return name == "config.json" or is_companion(name)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer that ``AutoTokenizer`` loads."""
    return any((folder / name).is_file() for name in TOKENIZERS)


class NewFolder(Protocol):
    """A checkpoint that is being written to an object store.

    Attributes:
        texts: the small files, by name, which are written when it is committed.
    """

    texts: dict[str, bytes]

    def __truediv__(self, name: str) -> StorePath:
        """The name of a large file."""

    def size(self, name: str) -> int:
        """Size of a large file that was written."""


Folder: TypeAlias = Path | NewFolder


def write_beside(folder: Folder, name: str, data: bytes) -> None:
    """Write a small file of a checkpoint.

    Args:
        folder: its folder, or a checkpoint that is being written to an object store, which writes
            the file when it is committed.
        name: of the file, which must not exist.
        data: what it contains.

    Raises:
        OSError: it cannot be written.
    """
    if isinstance(folder, Path):
        write_new(folder / name, data)
    else:
        folder.texts[name] = data


def copy_companions(folders: Iterable[Place], destination: Folder) -> None:
    """Copy the files beside a model; of files with one name, the first that is found.

    Args:
        folders: where to look for them. Each may have a folder ``tokenizer``, as a run has.
        destination: the folder of the model, as for :func:`write_beside`.

    Raises:
        CheckpointError: one of them cannot be read, is larger than 256 MiB, or is not a regular
            file.
        OSError: one cannot be written.
    """
    found: dict[str, Place] = {}
    for folder in folders:
        for file in (*_listed(folder / TOKENIZER), *_listed(folder)):
            if is_companion(file.name):
                found.setdefault(file.name, file)
    for name, file in found.items():
        write_beside(destination, name, read_whole(file, _MAX_BYTES))


def _listed(folder: Place) -> Iterator[Place]:
    if not isinstance(folder, Path):
        yield from (folder / name for name in sorted(folder.listed()[1]))
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        try:
            yield from (file for file in sorted(folder.iterdir()) if not file.is_dir())
        except PermissionError as error:
            raise CheckpointError(f"{folder}: cannot be listed ({error.strerror})") from None
