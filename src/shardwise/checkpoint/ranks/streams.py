"""How ranks write the files of a model to an object store, where an object has one writer.

    rank 0 sends file 1:  | rows of rank 0 | rows of rank 1 | ...     to the store
    rank 1 sends file 2:  | rows of rank 0 | rows of rank 1 | ...

Files are dealt to ranks, evenly by their bytes. All ranks walk one list of rounds: in each, the
next few parts of every file that is being sent go from the ranks that have their rows to the rank
that sends the file, in one all-to-all. A rank that fails goes on with the rounds, since the others
wait for its messages, and says so the next time that all ranks agree.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch

from shardwise.base.boxes import Box, full_box
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.entries import torch_dtype
from shardwise.checkpoint.disk.place import place_of
from shardwise.checkpoint.disk.safetensors import (
    PT_METADATA,
    as_bytes,
    lay_out,
    write_safetensors,
)
from shardwise.checkpoint.formats.hf import Files
from shardwise.checkpoint.ranks.agreement import Ranks
from shardwise.checkpoint.ranks.contents import (
    Contents,
    Conversion,
    Rows,
    converted,
    gathered,
    own_rows,
)
from shardwise.checkpoint.ranks.rows import RoutedRows, RowExchange

_AT_ONCE = 2 << 20  # bytes that a rank sends, and that arrive at one, in a round
_ROUNDS = 64  # between two times that ranks agree


@dataclass(frozen=True)
class _FilePart:
    """What comes next in a file: elements of a tensor, in order, and the rows that they are."""

    name: str
    box: Box
    writer: int
    rows: tuple[RoutedRows, ...]

    @functools.cached_property
    def loads(self) -> Counter[tuple[str, int]]:
        """The bytes that each rank sends and gets."""
        found = Counter({("gets", self.writer): sum(each.nbytes for each in self.rows)})
        for each in self.rows:
            found["sends", each.source] += each.nbytes if each.travels else 0
        return found


class FileStreams:
    """The files of a model, written by all ranks. Every rank makes one.

    Args:
        contents: what is written.
        files: the tensors of each file, by the URL of the file.
        ranks: who writes.
        doing: what the ranks do, for error messages.
    """

    def __init__(self, contents: Contents, files: Files, ranks: Ranks, doing: str) -> None:
        self._contents, self._files = contents, files
        self._ranks, self._doing = ranks, doing
        self._dealt = _deal(files, ranks.size)
        self._made_by = {name: each for each in contents.conversions for name in each.results}
        self._own: dict[str, Rows] = {}
        self._held: list[dict[str, Box]] = []  # by rank
        self._made: dict[str, Rows] = {}  # by the conversion that this rank's file has come to
        self._arriving: dict[tuple[str, Box], torch.Tensor] = {}
        self._exchange = RowExchange(
            ranks,
            doing,
            lambda rows: (
                (self._made if rows.name in self._made_by else self._own)[rows.name].values
            ),
            lambda rows: self._arriving[rows.name, rows.needed],
            room=2 * _AT_ONCE,
        )

    def write(self) -> None:
        """Write the files. All ranks call this; they are written once :meth:`check` says so.

        Raises:
            CheckpointError: a rank failed, or was lost; raised on all ranks alike.
        """
        self._held = self._ranks.together(self._doing, self._hold, lambda held: [held] * len(held))
        arrivals = self._rounds()
        try:
            self._write_own(arrivals)
            for _ in arrivals:
                pass
        except CheckpointError:  # of all ranks
            raise
        except BaseException:
            if self._ranks.size > 1:
                self._ranks.all_to_all().abandon()  # the others wait for messages
            raise

    def check(self) -> None:
        """Raise what has failed on this rank."""
        self._exchange.check()

    def _write_own(self, arrivals: Generator[torch.Tensor]) -> None:
        """Write the files of this rank, unless that fails."""
        try:
            for file in self._dealt[self._ranks.rank]:
                self._write(file, arrivals)
        except Exception as error:
            if inspect.getgeneratorstate(arrivals) == inspect.GEN_CLOSED:
                raise  # in a round, and not in the store
            self._exchange.fail(error)

    def _hold(self) -> dict[str, Box]:
        self._own = {each.name: each for each in own_rows(self._contents, self._ranks)}
        return {name: each.box for name, each in self._own.items()}

    def _write(self, file: str, arrivals: Iterator[torch.Tensor]) -> None:
        infos = self._files[file]

        def chunks(name: str) -> Iterator[memoryview]:
            left = infos[name].nbytes
            while left:
                part = next(arrivals)
                left -= part.nbytes
                yield as_bytes(part).numpy().data

        write_safetensors(place_of(file), infos, chunks)

    def _rounds(self) -> Generator[torch.Tensor]:
        """Take part in all rounds, and yield what arrives for this rank's files, in order."""
        streams = [self._parts(writer) for writer in range(self._ranks.size)]
        coming = [next(each, None) for each in streams]
        for number in itertools.count(1):
            for writer, stream in enumerate(streams):
                while isinstance(conversion := coming[writer], Conversion):
                    self._convert(conversion, writer)
                    coming[writer] = next(stream, None)
            parts: list[_FilePart] = []
            loads: Counter[tuple[str, int]] = Counter()
            for turn in range(len(streams)):
                writer = (number + turn) % len(streams)
                while isinstance(part := coming[writer], _FilePart):
                    if parts and any(loads[each] + n > _AT_ONCE for each, n in part.loads.items()):
                        break
                    loads.update(part.loads)
                    parts.append(part)
                    coming[writer] = next(streams[writer], None)
            if not parts:
                return
            self._arriving = {
                (part.name, part.box): torch.empty(
                    part.box.sizes, dtype=part.rows[0].dtype, device="cpu"
                )
                for part in parts
                if part.writer == self._ranks.rank
            }
            self._exchange.send([rows for part in parts for rows in part.rows])
            yield from self._arriving.values()
            if number % _ROUNDS == 0:
                self._ranks.all(self._doing, self.check)

    def _parts(self, writer: int) -> Iterator[_FilePart | Conversion]:
        """What is written by a rank, in order; and each conversion, before what it makes."""
        current: Conversion | None = None
        for file in self._dealt[writer]:
            infos = self._files[file]
            for name in lay_out(infos, PT_METADATA)[1]:
                info, conversion = infos[name], self._made_by.get(name)
                full = full_box(info.shape)
                holders = [(writer, full)]
                if conversion is None:
                    holders = [(r, held[name]) for r, held in enumerate(self._held) if name in held]
                elif conversion is not current:
                    yield conversion
                    current = conversion
                spans = [(*box.span(info.shape), rank, box) for rank, box in holders]
                for part in full.cut(max(1, _AT_ONCE // info.itemsize)):
                    start, stop = part.span(info.shape)
                    rows = tuple(
                        RoutedRows(name, torch_dtype(info.dtype), common, rank, writer, held, part)
                        for first, last, rank, held in spans
                        if first < stop and start < last and (common := held.intersection(part))
                    )
                    if sum(each.box.numel for each in rows) != part.numel:
                        raise CheckpointError(
                            f"{name}: found ranks that have {part} in part or twice, expected all "
                            "ranks of the model's mesh to save it"
                        )
                    yield _FilePart(name, part, writer, rows)

    def _convert(self, conversion: Conversion, writer: int) -> None:
        """Let a rank make what comes next in its file of full tensors, which all gather."""
        full = gathered(conversion)
        if writer == self._ranks.rank:
            self._made = {}

            def make() -> None:
                self._made = {each.name: each for each in converted(conversion, full)}

            self._exchange.attempt(make)


def _deal(files: Files, ranks: int) -> list[list[str]]:
    """Deal files to ranks, each of the larger ones first to the rank that has the least bytes."""
    dealt: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    sizes = {file: sum(info.nbytes for info in infos.values()) for file, infos in files.items()}
    for file in sorted(sizes, key=sizes.__getitem__, reverse=True):
        rank = loads.index(min(loads))
        dealt[rank].append(file)
        loads[rank] += sizes[file]
    return dealt
