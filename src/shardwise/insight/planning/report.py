"""The plan: memory, traffic and time of a training that has not been started.

A plan is a plain value. ``text.py`` and ``page.py`` show it, and ``docs/plan.md`` describes its
JSON form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise.base.observe import Memory
from shardwise.base.spans import StepTime
from shardwise.frontends.strategies import REPLICATE
from shardwise.insight.planning.clock import sent
from shardwise.insight.planning.events import Log, Start
from shardwise.insight.planning.memory import RankBytes
from shardwise.insight.planning.settings import Settings

JSON_VERSION = 1  # raised when a field is removed or changes its meaning


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The collectives of one kind along one mesh dimension, on one rank in one step.

    Attributes:
        dimension: the mesh dimension, such as ``"dp_shard"``.
        collective: ``"all-gather"``, ``"reduce-scatter"`` or ``"all-reduce"``.
        calls: how many collectives.
        launches: calls of the wire that they take: messages, or calls of a library.
        nbytes: bytes of the full tensors, padding included.
        sent: bytes that the rank sends.
    """

    dimension: str
    collective: str
    calls: int
    launches: int
    nbytes: int
    sent: int

    @classmethod
    def of(cls, log: Log) -> tuple[Traffic, ...]:
        """Return the collectives of a step, in the order of their first calls."""
        found: dict[tuple[str, str], list[Start]] = {}
        for event in log.events:
            if isinstance(event, Start):
                found.setdefault((event.dimension, event.activity.value), []).append(event)
        return tuple(
            cls(
                dimension=dimension,
                collective=collective,
                calls=len(starts),
                launches=sum(start.launches for start in starts),
                nbytes=sum(start.nbytes for start in starts),
                sent=sum(map(sent, starts)),
            )
            for (dimension, collective), starts in found.items()
        )


@dataclass(frozen=True, kw_only=True)
class Available:
    """The memory that a rank may use.

    Attributes:
        nbytes: how much.
        source: where the figure is from, such as ``"h100"`` or ``"--fit"``.
    """

    nbytes: int
    source: str


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way to train the same model on as many ranks.

    Attributes:
        mesh: ranks by dimension.
        strategy: name of the strategy.
        activation_checkpointing: which activations are recomputed.
        batch_size: samples of a rank and microbatch.
        peak: estimated bytes of the rank that holds most.
        tokens_per_second: estimated, on all ranks; samples for models without sequences.
        fits: whether it fits.
    """

    mesh: str
    strategy: str
    activation_checkpointing: str
    batch_size: int
    peak: int
    tokens_per_second: float
    fits: bool

    @property
    def words(self) -> str:
        """The settings in a few words."""
        mode = self.activation_checkpointing
        recomputed = "" if mode == "none" else f", {mode} checkpointing"
        return f"{self.strategy} over {self.mesh}, batch size {self.batch_size}{recomputed}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a training needs and how fast it is. ``print`` it, or write it as JSON or as a page.

    Attributes:
        model: the model's name.
        numel: number of elements of all parameters.
        settings: what the plan was made for.
        ranks: memory by kind of rank, the one with the highest peak first.
        traffic: the collectives of a step on one rank.
        step: the time of a step; ``None`` if the machine is not known.
        machine: the device and the links, in words; ``""`` if they are not known.
        observed: how far plans of this kind were from trainings that others have published;
            ``""`` if that was little, or nothing is known.
        available: the memory of a rank; ``None`` if it is not known.
        reserved: bytes that the allocator takes for the first kind of rank, at the peak or above:
            by the rules of the caching allocator of a device, or by a measured factor on CPUs;
            ``None`` if it is not known.
        exchanged: bytes that a rank sends in each exchange of DiLoCo's replicas.
        formulas: modules that could not be traced, and why. Their figures come from formulas.
        alternatives: other ways to train the model, if the fastest that fits was looked for.
    """

    model: str
    numel: int
    settings: Settings
    ranks: tuple[RankBytes, ...]
    traffic: tuple[Traffic, ...] = ()
    step: StepTime | None = None
    machine: str = ""
    observed: str = ""
    available: Available | None = None
    reserved: int | None = None
    exchanged: int = 0
    formulas: Mapping[str, str] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()

    @property
    def peak(self) -> int:
        """The most bytes that any rank holds at any moment."""
        return max(rank.peak for rank in self.ranks)

    @property
    def needed(self) -> int:
        """The memory that a rank needs: its peak, and what the allocator reserves above it."""
        return max(self.peak, self.reserved or 0)

    @property
    def fits(self) -> bool | None:
        """Whether every rank has enough memory; ``None`` if its memory is not known."""
        return None if self.available is None else self.needed <= self.available.nbytes

    @property
    def kept_in_memory(self) -> tuple[int, int]:
        """What ``--replicate-every`` takes: bytes on a host, and those that a rank sends each time.

        A host keeps two versions of the shards and states of its ranks, and of the ranks before
        them, unless these are on another host in any case.
        """
        world, here = self.settings.world, self.settings.on_host
        apart = dict(zip(world.names, world.shape, strict=True)).get(REPLICATE, 1)
        held = max(rank.parameters + rank.optimizer for rank in self.ranks)
        if self.settings.offload or self.settings.offload_parameters:
            held += max(rank.offloaded for rank in self.ranks)
        sends = world.size > here and apart == 1
        kept = min(here, world.size // apart) * held
        return 2 * kept * (1 + sends), held * sends

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes that a rank sends in a step, by mesh dimension."""
        sums: Counter[str] = Counter()
        for each in self.traffic:
            sums[each.dimension] += each.sent
        return dict(sums)

    def to_json(self) -> dict[str, Any]:
        """Convert the plan to values that ``json`` can write. docs/plan.md lists the fields.

        Returns:
            Dicts, lists, strings, numbers and ``None``.
        """
        diloco = self.settings.diloco
        return {
            "version": JSON_VERSION,
            "model": self.model,
            "numel": self.numel,
            "machine": self.machine or None,
            "settings": self.settings.to_json(),
            "ranks": [
                {
                    "ranks": rank.ranks,
                    "bytes": {kind.value: getattr(rank, kind.value) for kind in Memory},
                    "peak": rank.peak,
                    "peak_moment": rank.peak_moment,
                    "most": {kind.value: nbytes for kind, nbytes in rank.most.items()},
                    "activations_by_module": dict(rank.by_module),
                    "offloaded": rank.offloaded,
                }
                for rank in self.ranks
            ],
            "step": self._json_of_step(),
            "exchange": diloco
            and {
                "wire": diloco.wire.value,
                "every": diloco.local_steps,
                "bytes_sent": self.exchanged,
            },
            "in_memory": {
                "every": self.settings.replicate_every,
                "bytes_on_host": self.kept_in_memory[0],
                "bytes_sent": self.kept_in_memory[1],
            }
            if self.settings.replicate_every
            else None,
            "fits": self.fits,
            "reserved": self.reserved,
            "available": None
            if self.available is None
            else {"bytes": self.available.nbytes, "source": self.available.source},
            "formulas": dict(self.formulas),
            "alternatives": [asdict(each) for each in self.alternatives],
        }

    def _json_of_step(self) -> dict[str, Any]:
        step = self.step
        return {
            "seconds": step and step.seconds,
            "parts": step and {k.replace(" ", "_"): v for k, v in step.parts.items()},
            "bytes_sent": self.bytes_sent,
            "collectives": [
                {
                    "dimension": each.dimension,
                    "collective": each.collective,
                    "calls": each.calls,
                    "launches": each.launches,
                    "bytes": each.nbytes,
                    "bytes_sent": each.sent,
                }
                for each in self.traffic
            ],
            "tokens_per_second": step and step.tokens_per_second,
            "mfu": step and step.mfu,
            "bound_by": step and step.bound_by,
        }
