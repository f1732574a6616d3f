"""Memory: blocks and who accessed them; the caching allocator of a device.

The caching allocator keeps a pool for each stream. A block belongs to the stream that was current
when it was allocated. When it is freed, the allocator may hand it out on that stream at once, since
what is launched later on a stream runs later. It knows nothing of other streams, unless
``record_stream`` told it. Then it waits until they are done.

The sizes are those of CUDA's caching allocator, in its default configuration: blocks are rounded to
512 bytes; requests of up to 1 MiB are served from segments of 2 MiB, others of less than 10 MiB
from segments of 20 MiB, and larger ones from segments of their own, rounded to 2 MiB.
"""

from __future__ import annotations

import enum
from bisect import insort
from dataclasses import dataclass, field

from torch.multiprocessing.reductions import StorageWeakRef

from tests.streams.clocks import Moment

KIB = 1024
MIB = 1024 * KIB
ROUNDING = 512
SMALL = 1 * MIB
SMALL_SEGMENT = 2 * MIB
LARGE = 10 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_ROUNDING = 2 * MIB


class Place(enum.Enum):
    """Where memory is."""

    DEVICE = "device memory"
    PAGEABLE = "pageable host memory"
    PINNED = "pinned host memory"


class Kind(enum.Enum):
    """What is done to memory."""

    READ = "reads"
    WRITE = "writes"
    REUSE = "is given the freed memory"
    FREE = "frees the memory"


@dataclass(frozen=True)
class Access:
    """One access to a block.

    Attributes:
        kind: what is done.
        moment: when, and on which timeline.
        what: the operation.
        site: where in the program it was launched, innermost first.
    """

    kind: Kind
    moment: Moment
    what: str
    site: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what} {self.kind.value} on {self.moment.timeline}\n" + "\n".join(
            f"      at {line}" for line in self.site or ("autograd",)
        )


@dataclass(frozen=True)
class Race:
    """Two accesses to one block that nothing orders; or one that finds no memory, or no values.

    Attributes:
        earlier: the one that was launched first; the same as ``later`` if there is only one.
        later: the one that was launched while the first might still run, or be about to.
        block: the memory.
    """

    earlier: Access
    later: Access
    block: str

    @property
    def key(self) -> object:
        """What tells this race from others: the same in every step."""
        return self.later.kind, self.later.site, self.earlier.kind, self.earlier.site

    def __str__(self) -> str:
        return f"race: {self.later}\n   not ordered after: {self.earlier}\n   memory: {self.block}"


@dataclass
class Block:
    """Memory between one allocation and its end.

    Attributes:
        storage: the storage that has the memory.
        place: where the memory is.
        owner: the timeline on which it was allocated, and may be handed out again.
        nbytes: its size.
        site: where in the program it was allocated.
        address: where it begins.
        last: the last read and the last write on each timeline.
        has_values: whether anything has been written to it.
        recorded: streams that ``record_stream`` named. The allocator waits for them.
    """

    storage: StorageWeakRef
    place: Place
    owner: str
    nbytes: int
    site: tuple[str, ...]
    address: int
    last: dict[tuple[Kind, str], Access] = field(default_factory=dict)
    has_values: bool = False
    recorded: set[str] = field(default_factory=set)

    @property
    def is_gone(self) -> bool:
        """Whether nobody holds its storage any more."""
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]

    def note(self, access: Access) -> None:
        """Remember an access. Earlier ones of its kind on its timeline need not be remembered."""
        self.last[access.kind, access.moment.timeline] = access

    def conflicts(self, kind: Kind) -> list[Access]:
        """The accesses that one of ``kind`` has to come after."""
        return [access for access in self.last.values() if not (kind is access.kind is Kind.READ)]

    def __str__(self) -> str:
        where = " < ".join(self.site) or "autograd"
        return f"{self.nbytes} bytes of {self.place.value}, allocated on {self.owner} at {where}"


@dataclass(order=True)
class _Chunk:
    """A part of a segment: free, or one block."""

    nbytes: int
    address: int
    segment: int = field(compare=False)
    is_small: bool = field(compare=False)


class CachingAllocator:
    """The addresses and sizes of the blocks of one stream.

    Args:
        base: the first address.

    Attributes:
        reserved: the bytes of all segments.
    """

    def __init__(self, base: int) -> None:
        self.reserved = 0
        self._next = base
        self._segments = 0
        self._free: list[_Chunk] = []
        self._used: dict[int, _Chunk] = {}

    def allocate(self, nbytes: int) -> int:
        """Find a chunk: the smallest free one that fits, or a part of a new segment.

        Returns:
            The address.
        """
        rounded = round_up(max(nbytes, 1), ROUNDING)
        small = rounded <= SMALL
        chunk = next(
            (c for c in self._free if c.is_small is small and c.nbytes >= rounded), None
        ) or self._new_segment(rounded)
        self._free.remove(chunk)
        rest = chunk.nbytes - rounded
        if rest >= ROUNDING and (small or rest > SMALL):
            insort(self._free, _Chunk(rest, chunk.address + rounded, chunk.segment, chunk.is_small))
            chunk.nbytes = rounded
        self._used[chunk.address] = chunk
        return chunk.address

    def size_at(self, address: int) -> int:
        """The bytes that the block at ``address`` takes."""
        return self._used[address].nbytes

    def free(self, address: int) -> None:
        """Take a chunk back, and merge it with free neighbors."""
        chunk = self._used.pop(address)
        for other in list(self._free):
            if other.segment != chunk.segment:
                continue
            if other.address + other.nbytes == chunk.address:
                self._free.remove(other)
                chunk.address, chunk.nbytes = other.address, other.nbytes + chunk.nbytes
            elif chunk.address + chunk.nbytes == other.address:
                self._free.remove(other)
                chunk.nbytes += other.nbytes
        insort(self._free, chunk)

    def _new_segment(self, nbytes: int) -> _Chunk:
        small = nbytes <= SMALL
        if small:
            size = SMALL_SEGMENT
        elif nbytes < LARGE:
            size = LARGE_SEGMENT
        else:
            size = round_up(nbytes, LARGE_ROUNDING)
        self._segments += 1
        chunk = _Chunk(size, self._next, self._segments, small)
        self._next += size
        self.reserved += size
        insort(self._free, chunk)
        return chunk


def round_up(number: int, multiple: int) -> int:
    """The next multiple of ``multiple``."""
    return -(-number // multiple) * multiple
