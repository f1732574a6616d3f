"""Documents, opened for streaming through ``datasets``; and what is held back for validation.

Where a source has no split for validation, one document in 20 is held back: which ones, their text
decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardwise.launch.errors import UserError
from shardwise.recipes.config import OptionError
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
        self._name = documents.name
        splits = _load(documents)
        self._train: Any = splits["train"]
        judged = [name for name in ("validation", "valid", "val") if name in splits]
        self._validation: Any = splits[judged[0]] if judged else None
        self._field = _text_field(self._train, documents.name)

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

    def training_texts(self, part: Any) -> Iterator[str | None]:
        """The texts of one stream, from where it stands; None for one that is not for training."""
        for text in self._texts(part):
            yield None if self.holds_back and _is_held_back(text) else text

    def validation_texts(self) -> Iterator[str]:
        """The texts that nobody trains on."""
        if self._validation is not None:
            yield from self._texts(self._validation)
        else:
            yield from (text for text in self._texts(self._train) if _is_held_back(text))

    def _texts(self, dataset: Any) -> Iterator[str]:
        try:
            for row in dataset:
                yield row[self._field] or ""
        except UserError:
            raise
        except Exception as error:  # of the network, of the files, of what reads them
            raise UserError(f"--data: {self._name} cannot be read: {_line(error)}") from error


def _load(documents: Documents) -> Mapping[str, Any]:
    import datasets

    datasets.disable_progress_bars()
    try:
        if documents.files:
            more = {"sample_by": "paragraph"} if documents.builder == "text" else {}
            loaded = datasets.load_dataset(
                documents.builder,
                data_files={"train": [str(file) for file in documents.files]},
                streaming=True,
                **more,
            )
        else:
            loaded = datasets.load_dataset(
                documents.builder, documents.configuration, streaming=True
            )
    except Exception as error:  # each builder fails in its own way
        hub = "" if documents.files else "; the hub needs the network, local files do not"
        raise UserError(
            f"--data: {documents.name} cannot be opened: {_line(error)}{hub}"
        ) from error
    if "train" not in loaded:
        raise OptionError("--data", f"{documents.name} with splits {list(loaded)}", "a split train")
    return cast("Mapping[str, Any]", loaded)


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
