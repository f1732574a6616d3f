"""Text as tokens: bytes of files in an order that the seed decides, and vocabularies.

    documents   | util.py ........ | heapq.py ...... | ...
    stream      S u t i l ......... S h e a p q ....... S ...      S: the document separator
    sequences         |<- length ->|<- length ->|<- length ->|

Only names and sizes are in memory: a sequence is read from its files when it is needed. The order
is a function of seed and position alone, so any rank of any world can take any part of it, and a
resumed run goes on where the other one stopped.
"""

from __future__ import annotations

import bisect
import glob
import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from shardwise.app.recipes.core.position import Shuffle
from shardwise.base.errors import CheckpointError, UserError
from shardwise.base.units import counted, one_line
from shardwise.checkpoint.disk.place import is_url
from shardwise.checkpoint.formats.detect import find_tokenizer
from shardwise.insight.planning import presets
from shardwise.insight.schema.option import OptionError
from shardwise.pretrained import opening

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


# The vocabulary: 256 bytes, one separator, and rows that nothing uses, up to a multiple of 8.
SEPARATOR, VOCAB_SIZE = presets.SEPARATOR, presets.BYTE_VOCABULARY

VALIDATION_SHARE = 20  # one part in 20
# Not the standard library's own code; and, of its own, what is tables and prose.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"} | {
    "encodings",
    "pydoc_data",
}


@dataclass(frozen=True)
class Document:
    """A piece of a file.

    Attributes:
        path: the file.
        offset: its first byte that belongs to the document.
        size: number of bytes.
    """

    path: Path
    offset: int
    size: int


class ByteStream:
    """Documents one after another, with a separator before each.

    Args:
        documents: in the order of the stream.
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        self.documents = tuple(documents)
        # Position in the stream of each document's separator, and of the end.
        self._starts = [0, *itertools.accumulate(document.size + 1 for document in self.documents)]

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._starts[-1]

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        """Return tokens ``start`` .. ``start + length``, int64 of shape (length,).

        Raises:
            IndexError: the stream ends before.
            UserError: a file became shorter, or cannot be read any more.
        """
        import numpy as np

        if start < 0 or start + length > len(self):
            raise IndexError(f"tokens {start} to {start + length} of {len(self)}")
        tokens = np.empty(length, dtype=np.int64)
        filled = 0
        index = bisect.bisect_right(self._starts, start) - 1
        while filled < length:
            document = self.documents[index]
            at = start + filled - self._starts[index]  # 0 is the separator
            if at == 0:
                tokens[filled] = SEPARATOR
                filled += 1
                at = 1
            count = min(length - filled, document.size - (at - 1))
            piece = read_bytes(document.path, document.offset + at - 1, count)
            tokens[filled : filled + count] = np.frombuffer(piece, dtype=np.uint8)
            filled += count
            index += 1
        return tokens

    def fingerprint(self) -> str:
        """Return a text that changes when names, sizes or order of the documents change."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{document.path.name}\0{document.offset}\0{document.size}\n".encode())
        return digest.hexdigest()[:16]


def read_bytes(path: Path, offset: int, count: int, option: str = "--data") -> bytes:
    """Read a part of a file that was looked at before.

    Raises:
        UserError: it cannot be read any more, or is shorter now.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            piece = file.read(count)
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be read any more: {error.strerror}") from None
    if len(piece) < count:
        raise UserError(f"{option}: {path} became shorter while it was being read")
    return piece


@dataclass(frozen=True)
class TextData:
    """What to train on, and what to evaluate on.

    Attributes:
        name: for people: where it comes from.
        files: number of files.
        train: the tokens to train on.
        validation: tokens from other places.
    """

    name: str
    files: int
    train: ByteStream
    validation: ByteStream

    @property
    def summary(self) -> str:
        """How much there is, for people."""
        return f"{self.name}, {len(self.train):,} tokens in {counted(self.files, 'file')}"

    def facts(self) -> dict[str, Any]:
        """Return the data's part of ``run.json``."""
        return {
            "name": self.name,
            "summary": self.summary,
            "files": self.files,
            "training_tokens": len(self.train),
            "validation_tokens": len(self.validation),
            "fingerprint": self.fingerprint(),
        }

    def fingerprint(self) -> str:
        """See :meth:`ByteStream.fingerprint`."""
        return f"{self.train.fingerprint()}-{self.validation.fingerprint()}"


def load_text(paths: Sequence[str], seq_length: int, eval_paths: Sequence[str] = ()) -> TextData:
    """Find the files and divide them into training and validation.

    From 20 files up every 20th file is for validation; of fewer files the last part of each is.

    Args:
        paths: files, folders (with all that they hold) and patterns; the Python standard
            library's own source where empty.
        seq_length: tokens of a sequence.
        eval_paths: the same for validation, in place of a part of ``paths``.

    Raises:
        OptionError: a path that does not exist, is empty or cannot be read, or too little text.
    """
    sizes = {file: file.stat().st_size for file in find_files(paths)}
    name = "the Python standard library's source" if not paths else ", ".join(paths)
    if eval_paths:
        train = [Document(file, 0, size) for file, size in sizes.items() if size]
        held = find_files(eval_paths, "--eval-data")
        validation = [Document(file, 0, file.stat().st_size) for file in held]
    else:
        given = [(file, size) for file, size in sizes.items() if size]
        train, validation = _split(given, seq_length)
    data = TextData(name, len(sizes), ByteStream(train), ByteStream(validation))
    smallest = Sequences.tokens_needed(seq_length)
    for stream, part in ((data.train, "training"), (data.validation, "validation")):
        if len(stream) < smallest:
            raise OptionError(
                "--eval-data" if eval_paths and stream is data.validation else "--data",
                f"{sum(sizes.values())} bytes in {counted(sizes, 'file')}, of which {len(stream)} "
                f"for {part}",
                f"at least {smallest} for {part} with --seq-length {seq_length}",
            )
    return data


def find_files(paths: Sequence[str], option: str = "--data") -> list[Path]:
    """Return the files that an option names, each once, whatever its names; or Python's library.

    Args:
        paths: files, folders (with all that they hold) and patterns; and URLs of files and folders
            in object stores, which are fetched once for each host.
        option: what named them, for errors.

    Raises:
        OptionError: a path that does not exist, is empty or cannot be read.
    """
    files = [file for text in paths for file in _expand(text, option)] if paths else _stdlib_files()
    once: dict[tuple[int, int], Path] = {}
    for file in files:
        status = file.stat()
        once.setdefault((status.st_dev, status.st_ino), file)
    return list(once.values())


def _split(
    files: Sequence[tuple[Path, int]], seq_length: int
) -> tuple[list[Document], list[Document]]:
    whole = [Document(file, 0, size) for file, size in files]
    if len(whole) >= VALIDATION_SHARE:
        last = VALIDATION_SHARE - 1
        train = [d for i, d in enumerate(whole) if i % VALIDATION_SHARE != last]
        return train, whole[last::VALIDATION_SHARE]
    train, validation = [], []
    smallest = -(-Sequences.tokens_needed(seq_length) // max(1, len(whole)))
    for document in whole:
        tail = min(document.size // 2, max(document.size // VALIDATION_SHARE, smallest))
        head = document.size - tail
        train.append(Document(document.path, 0, head))
        if tail:
            validation.append(Document(document.path, head, tail))
    return train, validation


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, inside, names in os.walk(root):
        # Not even looked into: site-packages may have a hundred times as many files.
        inside[:] = [name for name in inside if name not in STDLIB_SKIPPED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise OptionError(
            "--data", f"no source files of the standard library in {root}", "--data with your text"
        )
    return sorted(files)


def _expand(text: str, option: str) -> list[Path]:
    path = Path(text)
    if is_url(text):
        from shardwise.app.recipes.text.stored import fetched_data  # of no use to folders

        path = fetched_data(text, option, _is_left_out)
    if path.is_dir():
        if (path / "run.json").is_file():
            expected = "text; --out names the run that --resume continues"
            raise OptionError(option, f"{text}, the folder of a run", expected)
        files = sorted(_walk(path, option))
        if not any(file.stat().st_size for file in files):
            raise OptionError(option, f"no text in folder {text}", "files with text in it")
        return files
    if path.exists():
        if not path.stat().st_size:
            raise OptionError(option, f"an empty file: {path}", "files with text in it")
        return [_readable(path, option)]
    matches = sorted(_glob(str(path))) if glob.has_magic(text) else []
    if not matches:
        raise OptionError(option, f"nothing at {text}", "a file, a folder or a pattern")
    # A pattern takes what it can: folders and empty files that it happens to match are no mistake.
    found = [Path(match) for match in matches]
    return [_readable(file, option) for file in found if file.is_file() and file.stat().st_size]


def _glob(pattern: str) -> list[str]:
    """Return what a pattern matches; behind ``**`` each folder once, as links may form circles."""
    head, stars, tail = pattern.partition("**")
    if not stars or (head and not head.endswith("/")) or (tail and not tail.startswith("/")):
        return glob.glob(pattern)
    seen: set[tuple[int, int]] = set()
    found: list[str] = []
    for top in glob.glob(head) if head else ["."]:
        for parent, folders, _ in os.walk(top, followlinks=True):
            status = os.stat(parent)
            folders[:] = [name for name in folders if not name.startswith(".")]
            if (status.st_dev, status.st_ino) in seen:
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            found += _glob(os.path.join(glob.escape(parent), tail.lstrip("/") or "*"))
    return found


def _is_left_out(name: str) -> bool:
    """Whether a file or a folder is no text: it is hidden, or Python has made it."""
    return name.startswith(".") or name == "__pycache__"


def _walk(folder: Path, option: str) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = itertools.filterfalse(_is_left_out, folders)
        for name in itertools.filterfalse(_is_left_out, names):
            file = Path(parent, name)
            if file.is_file():
                yield _readable(file, option)


def _readable(path: Path, option: str) -> Path:
    if not os.access(path, os.R_OK):
        raise OptionError(option, f"a file that cannot be read: {path}", "readable files")
    return path


class Sequences:
    """Sequences of a stream in a random order that the seed decides.

    An epoch takes every sequence once, in an order of its own and cut at places of its own.

    Args:
        stream: where they come from.
        length: tokens of a sequence, without the one that only is a target.
        seed: of the order.
    """

    def __init__(self, stream: ByteStream, length: int, seed: int) -> None:
        if len(stream) < self.tokens_needed(length):
            raise ValueError(f"{len(stream)} tokens are too few for sequences of {length}")
        self._stream = stream
        self._length = length
        # One less than fit, so that every epoch can begin up to ``length - 1`` tokens later.
        self.per_epoch = (len(stream) - 1) // length - 1
        self._order = Shuffle(self.per_epoch, seed)

    @staticmethod
    def tokens_needed(length: int) -> int:
        """Return the length of the shortest stream that has sequences of this length."""
        return 2 * length + 1

    def start(self, position: int) -> int:
        """Return where in the stream the sequence at a position of the order begins."""
        draw = self._order.at(position)
        return draw.key % self._length + self._length * draw.index

    def batch(self, position: int, count: int) -> torch.Tensor:
        """Return sequences ``position`` .. + ``count``, int64 of shape (count, length + 1)."""
        import numpy as np
        import torch

        rows = [
            self._stream.read(self.start(p), self._length + 1)
            for p in range(position, position + count)
        ]
        return torch.from_numpy(np.stack(rows))


_ROWS = 64  # the rows of an embedding are a multiple of this: kernels like that


class Bytes:
    """A token is a byte of UTF-8.

    Attributes:
        name: for people.
        size: rows of the model's embedding.
        used: tokens from here up are never drawn in a sample.
        separator: the token in front of every document.
    """

    name = "bytes"
    size = VOCAB_SIZE
    used = SEPARATOR
    separator = SEPARATOR

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes; separators become blank lines, invalid UTF-8 is replaced."""
        pieces = (b"\n\n" if token >= SEPARATOR else bytes([token]) for token in tokens)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def as_transformers(self) -> Any:
        """Return what a run without ``--tokenizer`` saves."""
        return byte_tokenizer()


#: The end-of-text token of :func:`byte_tokenizer`, which is the separator.
END_OF_TEXT = "<|endoftext|>"


def byte_tokenizer() -> Any:
    """Return a fast tokenizer of ``transformers`` whose ids are bytes, and 256 for the end of text.

    Byte-level BPE without merges has one token per byte.

    Special tokens inside a text are read as bytes (``split_special_tokens``): a document that
    spells one out means those characters.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Characters of Latin-1 stand for themselves, and those above it for the other bytes, in order.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {each: ord(each) for each in alphabet if ord(each) < SEPARATOR}
    others = (byte for byte in range(SEPARATOR) if chr(byte) not in vocabulary)
    vocabulary |= dict(zip(alphabet[len(vocabulary) :], [*others], strict=True))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(END_OF_TEXT, special=True, normalized=False)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


class Tokenizer:
    """A tokenizer of ``transformers``; its end-of-text token stands between documents.

    It has the attributes of :class:`Bytes`.

    Args:
        name: of the hub, or the folder that it was saved in.
        option: what named it, for errors.

    Raises:
        OptionError: it cannot be loaded, or has no token that could separate documents.
    """

    def __init__(self, name: str, option: str = "--tokenizer") -> None:
        try:  # that of a run is in a folder of its own
            folder = opening.small_files(name)
            found = find_tokenizer(folder) or (folder if is_url(name) else name)
            self.tokenizer: Any = opening.tokenizer(found)
        except (CheckpointError, OSError, ValueError) as error:
            reason = error.__cause__ or error
            whose = "which" if option == "--tokenizer" else "whose tokenizer"
            raise OptionError(
                option,
                f"{name}, {whose} cannot be loaded ({one_line(reason, 200)})",
                "a tokenizer of the hub, with the network there, or the folder of a saved one",
            ) from None
        separator = self.tokenizer.eos_token_id
        if separator is None:
            separator = self.tokenizer.bos_token_id
        if separator is None:
            raise OptionError(
                option, f"{name} without eos_token and bos_token", "a tokenizer that has either"
            )
        self.name = name
        self.option = option
        # Ids may have holes, so that the largest is above their number.
        self.used = 1 + max(len(self.tokenizer) - 1, *self.tokenizer.get_vocab().values())
        self.size = -(-self.used // _ROWS) * _ROWS
        self.separator = int(separator)

    def fit(self, rows: int) -> str:
        """Check that a model has a row for each token, except for special tokens.

        Some published models have tokenizers with special tokens for images, which they have no
        rows for. A text that has one of these is refused by :meth:`check`.

        Args:
            rows: of the model's embedding.

        Returns:
            What people should know; empty: there is a row for each token.

        Raises:
            OptionError: there is none for a token that is not special.
        """
        whole, self.used = self.used, min(self.used, rows)
        if whole <= rows:
            return ""
        special = set(self.tokenizer.added_tokens_decoder)
        lacking = {each for each in self.tokenizer.get_vocab().values() if each >= rows}
        found = f"a tokenizer of {whole:,} tokens ({self.name}) for a model of {rows:,}"
        if lacking - special or self.separator >= rows:
            raise OptionError(
                self.option,
                found,
                "the tokenizer that the model was trained with: its embedding is not made larger",
            )
        return f"{found}: texts with {self.tokenizer.decode([min(lacking)])} are refused"

    def check(self, tokens: Sequence[int]) -> None:
        """Check that the model has a row for each of these tokens.

        Raises:
            UserError: it has none.
        """
        if (found := max(tokens, default=0)) >= self.used:
            raise UserError(
                f"{self.option}: found token {found} ({self.tokenizer.decode([found])}) in a text, "
                f"expected those below {self.used:,}, which the model has rows for"
            )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text.

        Raises:
            UserError: the model has no row for one of them, or the tokenizer takes for ever.
        """
        try:
            with opening.limited(f"{self.option}: the tokenizer in {self.name}"):
                found = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except CheckpointError as error:
            raise UserError(str(error)) from None
        self.check(found)
        return [int(token) for token in found]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def as_transformers(self) -> Any:
        """Return the tokenizer itself."""
        return self.tokenizer


#: The meaning of tokens.
Vocabulary: TypeAlias = Bytes | Tokenizer


def load_vocabulary(tokenizer: str | None, option: str = "--tokenizer") -> Vocabulary:
    """Return the vocabulary that an option names; None: bytes."""
    return Bytes() if tokenizer is None else Tokenizer(tokenizer, option)
