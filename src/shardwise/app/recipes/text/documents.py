"""Documents to stream: from the Hugging Face Hub, or from local files of any of these kinds.

    hf:allenai/c4:en          a dataset of the hub, and its configuration; a local folder works too
    *.jsonl, *.json           one object per line, its text in the field "text"
    *.parquet                 one document per row, its text in the column "text"
    everything else           text: a document is a paragraph, which ends at an empty line

Local files may be compressed (.zst, .gz). Finding them imports no torch and reads at most the
beginning of a file: the command line does it before processes start. Text is read here;
``datasets`` streams the rest. If a source has no split for validation, one document in 20 is held
out; the text of a document decides which. Texts with fewer than 20 paragraphs, or none of them held
out, are cut into pieces, which are documents.

``datasets`` retries a lost connection by reading on in the same open file. For a compressed file
that loses what was decompressed already: rows are missing, or a line starts in its middle. So its
retries are turned off here, and the dataset is opened again after the last row that came.
"""

from __future__ import annotations

import enum
import gzip
import hashlib
import io
import itertools
import json
import re
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TextIO

import xxhash

from shardwise.app.recipes.core.installed import require_installed
from shardwise.app.recipes.text.data import VALIDATION_SHARE, find_files
from shardwise.base.errors import UserError
from shardwise.base.units import counted, one_line
from shardwise.insight.schema.option import OptionError
from shardwise.pretrained.opening import hub_is_away

HUB = "hf:"
_COMPRESSED = {".zst": "zstandard", ".gz": None}  # suffix -> package that reads it
_DOCUMENTS = {".jsonl", ".parquet"}  # not to be learned byte by byte
# Characters of a piece, at least, and pieces of the texts that are cut, at most.
_PIECE, _PIECES = 256, 400
_TEXT = "text"  # what is read here
_UTF_8 = "utf-8-sig"  # with or without a byte order mark
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_PACKAGES = {"json": "datasets", "parquet": "datasets"}  # that read them
_CHATS = {"messages", "conversations", "instruction", "prompt"}  # fields of chats
_BEGINNING = 1 << 20  # bytes of a file in which its first record is looked for


@dataclass(frozen=True)
class Documents:
    """Documents to be streamed, in the order that their source has.

    Attributes:
        name: for people: where they come from.
        builder: what ``datasets.load_dataset`` is asked for: ``json``, ``parquet``, ``text``, or
            the name of a dataset.
        configuration: of that dataset, if it has several.
        files: local files; empty for a dataset of the hub.
        tokenizer: name or folder of a tokenizer of ``transformers``; None: bytes.
        commit: of the hub, at which to read; None: the newest.
        validation: to evaluate on; None: what the source has for it, or one document in 20.
    """

    name: str
    builder: str
    configuration: str | None = None
    files: tuple[Path, ...] = ()
    tokenizer: str | None = None
    commit: str | None = None
    validation: Documents | None = None

    @property
    def summary(self) -> str:
        """For people: how much there is, as far as that is known before it is read."""
        files = f", {counted(self.files, 'file')}" if self.files else ""
        return f"{self.name}, streamed{files}"

    def facts(self) -> dict[str, Any]:
        """For ``run.json``."""
        return {
            "name": self.name,
            "summary": self.summary,
            "files": len(self.files),
            "tokenizer": self.tokenizer or "bytes",
            "fingerprint": self.fingerprint(),
        }

    def fingerprint(self) -> str:
        """A short text that changes when the tokens or their order change."""
        digest = hashlib.sha256(f"{self.configuration}\0{self.tokenizer}\n".encode())
        if not self.files:
            digest.update(self.builder.encode())
        for file in self.files:
            digest.update(f"{file.name}\0{file.stat().st_size}\n".encode())
        own = digest.hexdigest()[:16]
        return own if self.validation is None else f"{own}-{self.validation.fingerprint()}"


def is_streamed(paths: Sequence[str], tokenizer: str | None) -> bool:
    """Whether ``--data`` and ``--tokenizer`` ask for documents, and not for files of bytes.

    Raises:
        OptionError: nothing is there, or chats.
    """
    if tokenizer is not None or any(path.startswith(HUB) for path in paths):
        return True
    files = find_files(paths) if paths else []
    _check_no_chats_in(files, "--data")
    return bool(files) and all(_kind(file) in _DOCUMENTS for file in files)


def find_documents(
    paths: Sequence[str],
    tokenizer: str | None,
    eval_paths: Sequence[str] = (),
    option: str = "--data",
) -> Documents:
    """Find out what ``--data`` names.

    Args:
        paths: what it names.
        tokenizer: name or folder of a tokenizer; None: bytes.
        eval_paths: what ``--eval-data`` names.
        option: what named ``paths``, for errors.

    Raises:
        OptionError: several sources at once, files of several kinds, chats, or nothing there.
        UserError: a package that reads them is not installed.
    """
    held = find_documents(eval_paths, tokenizer, (), "--eval-data") if eval_paths else None
    if any(path.startswith(HUB) for path in paths):
        if len(paths) > 1:
            raise OptionError(option, " and ".join(paths), f"one {HUB}NAME and nothing else")
        name, _, configuration = paths[0].removeprefix(HUB).partition(":")
        if not name:
            raise OptionError(option, paths[0], "a dataset behind hf:, as hf:allenai/c4:en")
        require_installed(f"{option} {paths[0]}", ["datasets"])
        return Documents(paths[0], name, configuration or None, (), tokenizer, validation=held)
    files = find_files(paths, option)
    builders = {_BUILDERS.get(_kind(file), _TEXT): file for file in files}
    if len(builders) > 1:
        found = " and ".join(str(file) for file in builders.values())
        raise OptionError(option, found, "files of one kind: .jsonl, .parquet or text")
    _check_no_chats_in(files, option)
    [builder] = builders
    packages = {_COMPRESSED.get(file.suffix) for file in files} | {_PACKAGES.get(builder)}
    name = ", ".join(paths) or "the Python standard library's source"
    require_installed(f"{option} {name}", sorted(filter(None, packages)))
    return Documents(name, builder, None, tuple(files), tokenizer, validation=held)


def _check_no_chats_in(files: Sequence[Path], option: str) -> None:
    """Check the first record of files that are all JSON, as far as that is seen at once."""
    if not files or any(_BUILDERS.get(_kind(file)) != "json" for file in files):
        return
    with files[0].open("rb") as opened:
        beginning = opened.read(_BEGINNING).decode(_UTF_8, errors="replace")
    try:
        record, _ = json.JSONDecoder().raw_decode(beginning.lstrip("[ \t\r\n"))
    except (ValueError, RecursionError):
        return  # compressed, cut off, or no JSON
    if isinstance(record, dict):
        _check_no_chats(record, option, str(files[0]))


def _check_no_chats(fields: Collection[str], option: str, name: str) -> None:
    if "text" not in fields and _CHATS.intersection(fields):
        in_place = "--chat in place of --data"
        expected = in_place if option == "--data" else "text; chats go with --chat"
        raise OptionError(option, f"{name}, which has chats", expected)


def _kind(file: Path) -> str:
    """Return the suffix of what is in a file, without that of its compression."""
    suffixes = [suffix for suffix in file.suffixes if suffix not in _COMPRESSED]
    return suffixes[-1] if suffixes else ""


class Dealing(enum.Enum):
    """How the documents of a source are dealt out to streams."""

    BY_FILE = "by file"  # each stream has files of its own
    BY_DOCUMENT = "by document"  # each reads all files, and takes every n-th document


EVEN = 1.1  # times as much as the smallest stream, that the largest may have of files of its own


@dataclass
class TextFiles:
    """Documents of text files, with the interface of a streamed dataset of ``datasets``.

    Attributes:
        files: UTF-8.
        pieces: what cuts each paragraph into documents; None: a paragraph is one.
        stream: which documents are given: those whose number has this remainder ...
        streams: ... in a division by this.
    """

    files: Sequence[Path]
    pieces: re.Pattern[str] | None = None
    stream: int = 0
    streams: int = 1

    features: ClassVar[Mapping[str, Any]] = {"text": None}

    def __post_init__(self) -> None:
        # The number of a file, of a document in it, and of that among all.
        self._begin = self._next = (0, 0, 0)

    @property
    def num_shards(self) -> int:
        """How many files there are."""
        return len(self.files)

    def part(self, stream: int, streams: int, dealing: Dealing) -> TextFiles:
        """Return the documents of one stream."""
        if dealing is Dealing.BY_FILE:
            return replace(self, files=self.files[stream::streams])
        return replace(self, stream=stream, streams=streams)

    def __iter__(self) -> Iterator[dict[str, str]]:
        first, done, number = self._begin
        for file, path in enumerate(self.files[first:], start=first):
            for document, text in enumerate(self._texts(path)):
                if document < done:
                    continue
                self._next = (file, document + 1, number + 1)
                if number % self.streams == self.stream:
                    yield {"text": text}
                number += 1
            done = 0

    def _texts(self, path: Path) -> Iterator[str]:
        try:
            with _opened(path) as file:
                for is_blank, lines in itertools.groupby(file, lambda line: line == "\n"):
                    paragraph = "".join(lines).rstrip("\n")
                    if not is_blank:
                        yield from self.pieces.findall(paragraph) if self.pieces else [paragraph]
        except UnicodeDecodeError as error:
            raise ValueError(f"found {error.reason} in {path}, expected UTF-8") from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"found {one_line(error)!r} in {path}, expected a whole file"
            ) from None

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"text": list(self._next)}

    def load_state_dict(self, where: Mapping[str, Any]) -> None:
        """Go on from a position.

        Raises:
            ValueError: it is none.
        """
        match where:
            case {"text": [int(file), int(document), int(number)]}:
                self._begin = self._next = (file, document, number)
            case _:
                raise ValueError(f"a position {where} that is none in text files")


def _opened(path: Path) -> TextIO:
    """Open a text for reading, which may be compressed."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding=_UTF_8)
    if path.suffix == ".zst":
        return io.TextIOWrapper(io.BufferedReader(_ZstdFile(path)), encoding=_UTF_8)
    return path.open(encoding=_UTF_8)


class _ZstdFile(io.RawIOBase):
    """The frames of a file as one, as those of gzip are.

    The reader of ``zstandard`` takes a frame that was cut off for one that has ended.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        import zstandard

        self._new_frame, self._damage = (
            zstandard.ZstdDecompressor().decompressobj,
            zstandard.ZstdError,
        )
        self._file = path.open("rb")
        self._frame: Any = None  # that has begun
        self._packed, self._text = b"", b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what comes next; return how many bytes that is, 0 at the end.

        Raises:
            EOFError: the file is damaged, or ends in the middle of a frame.
        """
        while not self._text:
            packed = self._packed or self._file.read(io.DEFAULT_BUFFER_SIZE)
            if not packed and self._frame is not None:
                raise EOFError("Compressed file ended before the end of its frame")
            if not packed:
                return 0
            frame = self._frame or self._new_frame()
            try:
                self._text = frame.decompress(packed)
            except self._damage as error:
                raise EOFError(str(error)) from None
            self._frame, self._packed = None if frame.eof else frame, frame.unused_data
        count = min(len(buffer), len(self._text))
        buffer[:count], self._text = self._text[:count], self._text[count:]
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


class StreamSource:
    """A dataset, opened for streaming.

    Args:
        documents: what to open.

    Raises:
        UserError: it cannot be opened; or it has no text.
    """

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        #: The commit of the hub at which the dataset is read; None: local files or folders.
        self.commit: str | None
        splits, self.commit, self._sizes = _load(documents)
        self._train: Any = splits["train"]
        judged = [name for name in ("validation", "valid", "val") if name in splits]
        self._validation: Any = splits[judged[0]] if judged else None
        self._field = _text_field(self._train, documents.name)
        if documents.builder == _TEXT:
            self._train = self._cut_if_few()
        self._others = None if documents.validation is None else StreamSource(documents.validation)

    def at(self, commit: str) -> StreamSource:
        """Return the same dataset as of a commit, whatever has changed since.

        Raises:
            UserError: it cannot be opened.
        """
        if commit == self.commit:
            return self
        return StreamSource(replace(self._documents, commit=commit))

    def _cut_if_few(self) -> Any:
        """Return the dataset, cut into pieces if it has too few documents to divide."""
        count, size, held = 0, 0, not self.holds_back
        for text in self.texts():
            count, size, held = count + 1, size + len(text), held or _is_held_back(text)
            if held and count >= VALIDATION_SHARE:
                return self._train
        length = max(_PIECE, size // _PIECES)
        pieces = re.compile(rf".{{{length}}}\S{{0,{_PIECE}}}\s*|.+", re.DOTALL)
        return replace(self._train, pieces=pieces)

    @property
    def holds_back(self) -> bool:
        """Whether one document in 20 is for validation: the source has no split for it."""
        return self._validation is None and self._documents.validation is None

    def dealing(self, streams: int) -> Dealing:
        """How documents are dealt out: by file if the streams have about as much each.

        Streams take turns, so those that have less would give their documents more often.
        """
        uneven = self.unevenness(streams)
        return Dealing.BY_DOCUMENT if uneven is None or uneven > EVEN else Dealing.BY_FILE

    def unevenness(self, streams: int) -> float | None:
        """How many times as much the largest stream has as the smallest, if files are dealt out.

        1 where sizes are not known: of a dataset of the hub. ``None``: the files cannot be dealt
        out, for they are no multiple of the streams.
        """
        if self._train.num_shards % streams:
            return None
        if len(self._sizes) != self._train.num_shards:
            return 1.0
        parts = [sum(self._sizes[stream::streams]) for stream in range(streams)]
        return max(parts) / max(1, min(parts))

    def part(self, stream: int, streams: int, dealing: Dealing | None = None) -> Any:
        """Return the dataset of one stream, from its beginning.

        Args:
            stream: which one.
            streams: how many there are.
            dealing: how documents are dealt out; ``None``: as :meth:`dealing` says.
        """
        dealing = self.dealing(streams) if dealing is None else dealing
        if isinstance(self._train, TextFiles):
            return self._train.part(stream, streams, dealing)
        from datasets.distributed import split_dataset_by_node

        if dealing is Dealing.BY_DOCUMENT and self._train.num_shards % streams == 0:
            # Where split_dataset_by_node would deal out files.
            return self._train.filter(
                lambda _, number: number % streams == stream, with_indices=True
            )
        return split_dataset_by_node(self._train, rank=stream, world_size=streams)

    def training_texts(self, part: Any, where: Mapping[str, Any] | None = None) -> Iterator[str]:
        """Return the texts of one stream that are to be trained on.

        Args:
            part: what :meth:`part` gave.
            where: a state of such a part, to go on from; None: the beginning.
        """
        for text in self._texts(part, where):
            if text and not (self.holds_back and _is_held_back(text)):
                yield text

    def validation_texts(self) -> Iterator[str]:
        """Return the texts that no rank trains on."""
        if self._others is not None:
            yield from self._others.texts()
        elif self._validation is not None:
            yield from self._texts(self._validation)
        else:
            yield from (text for text in self._texts(self._train) if _is_held_back(text))

    def texts(self) -> Iterator[str]:
        """Return all texts."""
        return self._texts(self._train)

    def _texts(self, dataset: Any, where: Mapping[str, Any] | None = None) -> Iterator[str]:
        try:
            for row in rows(dataset, where):
                yield row[self._field] or ""
        except UserError:
            raise
        except Exception as error:  # of the network, of the files, of what reads them
            kind = ConnectionLostError if connection_lost(error) else UserError
            name = self._documents.name
            raise kind(f"--data: {name} cannot be read: {_line(error)}") from error


def _load(documents: Documents) -> tuple[Mapping[str, Any], str | None, Sequence[int]]:
    """Return the splits of a dataset, the commit of the hub that they are from, and sizes of files.

    The sizes are those of local files to train on, in bytes.
    """
    if documents.builder == _TEXT:
        sizes = [file.stat().st_size for file in documents.files]
        return {"train": TextFiles(documents.files)}, None, sizes
    import datasets

    datasets.disable_progress_bars()
    # Requests that huggingface_hub makes again, whole, stay: they lose nothing.
    datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = 1
    given: dict[str, Any] = {"name": documents.configuration, "revision": documents.commit}
    if documents.files:
        given = {"data_files": {"train": [str(file) for file in documents.files]}}
    here = bool(documents.files) or Path(documents.builder).exists()
    if not here and hub_is_away():
        raise ConnectionLostError(
            f"--data: {documents.name} cannot be opened: the hub cannot be reached; the hub needs "
            "the network, local files do not"
        )
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
    if not here:
        return loaded, builder.hash, ()
    files = (builder.config.data_files or {}).get("train", ())
    return loaded, None, [Path(file).stat().st_size for file in files if Path(file).is_file()]


def _remedy(documents: Documents, error: Exception) -> str:
    """Return what to do about a dataset that cannot be opened, if the error does not say."""
    import datasets

    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        return (
            "; look for a slip in the name; a private or gated dataset needs `hf auth login` "
            "(or HF_TOKEN) of somebody who may read it"
        )
    # As of a configuration that is none.
    is_local = documents.files or isinstance(error, ValueError)
    return "" if is_local else "; the hub needs the network, local files do not"


def _text_field(dataset: Any, name: str) -> str:
    """Return ``text``, or the only field that is a string."""
    features: Mapping[str, Any] = dataset.features or {"text": None}
    if "text" in features:
        return "text"
    _check_no_chats(features, "--data", name)
    strings = [key for key, kind in features.items() if "string" in getattr(kind, "dtype", "")]
    if len(strings) == 1:
        return strings[0]
    raise OptionError("--data", f"{name} with fields {', '.join(features)}", "a field text")


def _line(error: BaseException) -> str:
    """Return the innermost reason, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {one_line(error)}"


def _is_held_back(text: str) -> bool:
    # By what it says, and not by where it stands: the same in every number of streams.
    return xxhash.xxh3_64_intdigest(text.encode()) % VALIDATION_SHARE == 0


PATIENCE = 600.0  # seconds without a row, each attempt of the hub's own retries included
PAUSE = 1.0  # seconds between attempts, which take some 25 by themselves


class ConnectionLostError(UserError):
    """The hub cannot be reached: not the user's mistake, and worth a restart."""

    exit_code = 1
    passing = True


def rows(dataset: Any, where: Mapping[str, Any] | None) -> Iterator[Any]:
    """Return the rows of a streaming dataset, each once.

    Args:
        dataset: an ``IterableDataset`` of ``datasets``.
        where: one of its states, to go on from; None: the beginning.

    Raises:
        Exception: the dataset cannot be read; or the connection is lost, and was so for
            ``PATIENCE`` seconds.
    """
    alive = time.monotonic()
    while True:
        came = False
        if where is not None:
            dataset.load_state_dict(where)
        try:
            for row in dataset:
                came = True
                yield row
                alive = time.monotonic()
            return
        except Exception as error:
            if came:
                where = dataset.state_dict()
            if not connection_lost(error) or time.monotonic() - alive > PATIENCE:
                raise
        time.sleep(PAUSE)


def connection_lost(error: Exception) -> bool:
    """Return whether a server could not be reached, or could not answer."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        status = getattr(error.response, "status_code", 0)
        return status == 429 or status >= 500
    # What the hub's client raises itself, whichever generation of httpx it is built upon.
    raw = any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
    return raw or isinstance(error, ConnectionError | TimeoutError)
