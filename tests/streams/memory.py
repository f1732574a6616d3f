"""Memory: blocks and who accessed them.

The caching allocator keeps a pool for each stream. A block belongs to the stream that was current
when it was allocated. When it is freed, the allocator may hand it out on that stream at once, since
what is launched later on a stream runs later. It knows nothing of other streams, unless
``record_stream`` told it. Then it waits until they are done.

Sizes and addresses are those of the allocator that plans reckon with.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.insight.planning.memory import CachingAllocator, SegmentPart
from tests.streams.clocks import Moment


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
class Pool:
    """Memory of one stream, or of the host.

    Attributes:
        base: the first address.
        allocator: what gives parts of it to storages.
    """

    base: int
    allocator: CachingAllocator = field(default_factory=CachingAllocator)


@dataclass
class Block:
    """Memory between one allocation and its end.

    Attributes:
        storage: the storage that has the memory.
        place: where the memory is.
        owner: the timeline on which it was allocated, and may be handed out again.
        nbytes: its size.
        site: where in the program it was allocated.
        pool: what it was taken from.
        part: the part of the pool that it is.
        last: the last read and the last write on each timeline.
        has_values: whether anything has been written to it.
        recorded: streams that ``record_stream`` named. The allocator waits for them.
    """

    storage: StorageWeakRef
    place: Place
    owner: str
    nbytes: int
    site: tuple[str, ...]
    pool: Pool
    part: SegmentPart
    last: dict[tuple[Kind, str], Access] = field(default_factory=dict)
    has_values: bool = False
    recorded: set[str] = field(default_factory=set)

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.pool.base + self.part.address

    @property
    def taken(self) -> int:
        """How many bytes it takes: its size, rounded."""
        return self.part.nbytes

    def free(self) -> None:
        """Give the memory back."""
        self.pool.allocator.free(self.part)

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
