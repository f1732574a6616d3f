"""Documents, opened for streaming through ``datasets``; and what is held back for validation.

Where a source has no split for validation, one document in 20 is held back: which ones, their text
decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardwise.launch.errors import UserError
from shardwise.recipes.config import OptionError
from shardwise.recipes.connection import (
    ConnectionLostError,
    connection_lost,
    leave_retries_to_us,
    rows,
)
from shardwise.recipes.data import VALIDATION_SHARE
from shardwise.recipes.sources import Documents
from shardwise.recipes.tokens import Vocabulary


class Source:
    """A dataset, opened for streaming.

    Args:
        documents: what to open.

    Raises:
        UserError: it cannot be opened; or it has no text.
    """

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._name = documents.name
        splits, self._commit = _load(documents)
        self._train: Any = splits["train"]
        judged = [name for name in ("validation", "valid", "val") if name in splits]
        self._validation: Any = splits[judged[0]] if judged else None
        self._field = _text_field(self._train, documents.name)

    @property
    def commit(self) -> str | None:
        """Of the hub, at which the dataset is read; None for local files and folders."""
        return self._commit

    def at(self, commit: str) -> Source:
        """The same dataset as it was at a commit, whatever its owner did to it since.

        Raises:
            UserError: it cannot be opened.
        """
        if commit == self._commit:
            return self
        return Source(replace(self._documents, commit=commit))

    @property
    def holds_back(self) -> bool:
        """Whether one document in 20 is for validation, as the source has no split for that."""
        return self._validation is None

    def dealt_by_file(self, streams: int) -> bool:
        """Whether every stream has files of its own; else each reads all, and takes some."""
        return bool(self._train.num_shards % streams == 0)

    def part(self, stream: int, streams: int) -> Any:
        """The dataset of one stream, from its beginning."""
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(self._train, rank=stream, world_size=streams)

    def training_texts(self, part: Any, where: Mapping[str, Any] | None = None) -> Iterator[str]:
        """The texts of one stream that there is something to learn from.

        Args:
            part: what :meth:`part` gave.
            where: a state of such a part, to go on from; None: the beginning.
        """
        for text in self._texts(part, where):
            if text and not (self.holds_back and _is_held_back(text)):
                yield text

    def validation_texts(self) -> Iterator[str]:
        """The texts that nobody trains on."""
        if self._validation is not None:
            yield from self._texts(self._validation)
        else:
            yield from (text for text in self._texts(self._train) if _is_held_back(text))

    def _texts(self, dataset: Any, where: Mapping[str, Any] | None = None) -> Iterator[str]:
        try:
            for row in rows(dataset, where):
                yield row[self._field] or ""
        except UserError:
            raise
        except Exception as error:  # of the network, of the files, of what reads them
            kind = ConnectionLostError if connection_lost(error) else UserError
            raise kind(f"--data: {self._name} cannot be read: {_line(error)}") from error


def _load(documents: Documents) -> tuple[Mapping[str, Any], str | None]:
    """The splits of a dataset; and the commit of the hub that they are from."""
    import datasets

    datasets.disable_progress_bars()
    leave_retries_to_us()
    given: dict[str, Any] = {"name": documents.configuration, "revision": documents.commit}
    if documents.files:
        given = {"data_files": {"train": [str(file) for file in documents.files]}}
        if documents.builder == "text":
            given["sample_by"] = "paragraph"
    try:
        builder = datasets.load_dataset_builder(documents.builder, **given)
        loaded: Mapping[str, Any] = builder.as_streaming_dataset()
    except Exception as error:  # each builder fails in its own way
        kind = ConnectionLostError if connection_lost(error) else UserError
        raise kind(
            f"--data: {documents.name} cannot be opened: {_line(error)}{_remedy(documents, error)}"
        ) from error
    if "train" not in loaded:
        raise OptionError("--data", f"{documents.name} with splits {list(loaded)}", "a split train")
    local = documents.files or Path(documents.builder).exists()
    return loaded, None if local else builder.hash


def _remedy(documents: Documents, error: Exception) -> str:
    """What to do about a dataset that cannot be opened, where the error does not tell."""
    import datasets

    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        return (
            "; look for a slip in the name; a private or gated dataset needs `hf auth login` "
            "(or HF_TOKEN) of somebody who may read it"
        )
    told = documents.files or isinstance(error, ValueError)  # as of a configuration that is none
    return "" if told else "; the hub needs the network, local files do not"


def _text_field(dataset: Any, name: str) -> str:
    """``text``, or the only field that is a string."""
    features: Mapping[str, Any] = dataset.features or {"text": None}
    if "text" in features:
        return "text"
    strings = [key for key, kind in features.items() if "string" in getattr(kind, "dtype", "")]
    if len(strings) == 1:
        return strings[0]
    raise OptionError("--data", f"{name} with fields {', '.join(features)}", "a field text")


def _line(error: BaseException) -> str:
    """The innermost reason, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _is_held_back(text: str) -> bool:
    # By what it says, and not by where it stands: the same in every number of streams.
    return xxhash.xxh3_64_intdigest(text.encode()) % VALIDATION_SHARE == 0


class HeldTokens:
    """Tokens in memory, with the interface of a ``ByteStream``.

    Args:
        tokens: one after another.
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = np.array(tokens, dtype=np.int64)

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        """Tokens ``start`` .. ``start + length``."""
        return self._tokens[start : start + length]


def validation_tokens(
    source: Source, vocabulary: Vocabulary, length: int, count: int
) -> HeldTokens:
    """Tokens for ``count`` sequences that nobody trains on, or for as many as there are.

    Raises:
        OptionError: not even for one.
    """
    tokens: list[int] = []
    wanted = count * (length + 1)
    for text in source.validation_texts():
        if text:
            tokens += [vocabulary.separator, *vocabulary.encode(text)]
        if len(tokens) >= wanted:
            break
    if len(tokens) <= length:
        raise OptionError(
            "--data",
            f"{len(tokens)} tokens for validation (one document in {VALIDATION_SHARE})",
            f"at least {length + 1} with --seq-length {length}",
        )
    return HeldTokens(tokens[:wanted])
