"""The files beside the weights of a transformers model: its tokenizer, and how it generates.

``config.json`` is not one of them: it belongs to the weights, and is checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardwise.base.errors import CheckpointError
from shardwise.base.files import Links, read_small, write_new

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
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "source.spm"),
)


def is_companion(name: str) -> bool:
    """Whether transformers gives this name to a file of a tokenizer, a processor or generation."""
    return name.startswith(_BEGINNINGS) and Path(name).suffix in _SUFFIXES


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer that ``AutoTokenizer`` loads."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def copy_companions(folders: Iterable[Path], destination: Path) -> None:
    """Copy the files beside a model; of files with one name, the first that is found.

    Args:
        folders: where to look for them. Each may have a folder ``tokenizer``, as a run has.
        destination: the folder of the model, on the same or another file system.

    Raises:
        CheckpointError: one of them cannot be read, is larger than 256 MiB, or is not a regular
            file.
        OSError: one cannot be written.
    """
    for folder in folders:
        for file in (*_listed(folder / TOKENIZER), *_listed(folder)):
            target = destination / file.name
            if is_companion(file.name) and not file.is_dir() and not target.exists():
                write_new(target, read_small(file, _MAX_BYTES, Links.FOLLOW))


def _listed(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        try:
            yield from sorted(folder.iterdir())
        except PermissionError as error:
            raise CheckpointError(f"{folder}: cannot be listed ({error.strerror})") from None
