"""Who runs over two hosts: every strategy of ours, torch FSDP2 in two ways, and the floor."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from _contenders import FSDP2, Case, Contender, Floor, Ours, OursAhead
from shardwise import Wire
from shardwise.diloco import DiLoCo, WireFormat
from shardwise.frontends.strategies import REPLICATE, SHARD, ShardingPlan, Strategy, resolve

HOSTS = 2
#: Whose steps are also measured with accumulation.
ACCUMULATED = ("hybrid", "fsdp2-hybrid")
#: By how much losses may differ in the first steps if values are encoded.
NEAR = 0.05


class Spread(OursAhead):
    """As ``shardwise train`` shards by a strategy, a replica on each host if there are several.

    Attributes:
        strategy: how models are sharded.
        wire: of the link between hosts.
        kept_on_host: whether parameters stay cut over the ranks of a host between forward and
            backward.
    """

    strategy: ClassVar[Strategy]
    wire: ClassVar[Wire] = Wire()
    kept_on_host: ClassVar[bool] = False

    def __init__(self, case: Case) -> None:
        self._plan: ShardingPlan = resolve(self.strategy, case.ranks, hosts=HOSTS)
        zero = 3 if self._plan.reshard_after_forward else 2
        super().__init__(dataclasses.replace(case, zero=zero))

    def mesh(self, case: Case) -> DeviceMesh:
        """Make the strategy's mesh."""
        self.whole = self._plan.make_mesh(case.device)
        return self._plan.sharding_mesh(self.whole)

    def options(self) -> dict[str, Any]:
        """Return the wire."""
        return {} if self.wire.is_plain else {"wire": self.wire}

    def reshard(self, case: Case) -> bool | int:
        """Keep parameters on the host, or free them as the strategy says."""
        return case.ranks // HOSTS if self.kept_on_host else super().reshard(case)


class Apart(Spread):
    """DiLoCo: each host a replica that trains by itself."""

    strategy = Strategy.DILOCO
    exchanges = False
    exchange: ClassVar[WireFormat]

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        # Rounds end when they are asked to: what an exchange takes is measured by itself.
        self.diloco = self.optimizer = DiLoCo(
            self.model,
            self.optimizer,
            every=2**31,
            group=self.whole.get_group(REPLICATE),
            wire=self.exchange,
        )

    def meet(self) -> None:
        """End the round: exchange pseudo-gradients and take the outer step."""
        self.diloco.flush()


class OwnLoop(Ours):
    """``shardwise.fully_shard`` in a user's own loop, which gathers nothing ahead in forward."""

    name = "full-own-loop"
    title = "FULL_SHARD, own loop"


class FSDP2Hybrid(FSDP2):
    """Torch's, on a mesh of two dimensions."""

    name = "fsdp2-hybrid"
    title = "torch FSDP2, hybrid"

    def mesh(self, case: Case) -> DeviceMesh:
        """Replicate over hosts, shard inside."""
        shape = (HOSTS, case.ranks // HOSTS)
        return init_device_mesh(case.device, shape, mesh_dim_names=(REPLICATE, SHARD))


class FSDP2Full(FSDP2):
    """Torch's, over all ranks."""

    name = "fsdp2-full"
    title = "torch FSDP2, full"


def _spread(name: str, title: str, by: Strategy, **settings: Any) -> type[Contender]:
    """Make a contender that shards by a strategy."""
    return type(title, (Spread,), {"name": name, "title": title, "strategy": by, **settings})


def _apart(name: str, title: str, kind: WireFormat) -> type[Contender]:
    """Make a contender whose exchanges are in a format."""
    return type(title, (Apart,), {"name": name, "title": title, "exchange": kind})


#: What losses are with a wire is shown over many steps elsewhere: here they must be near others.
_BF16: dict[str, Any] = {"wire": Wire(gather="bf16", reduce="bf16"), "tolerance": NEAR}
_INT8: dict[str, Any] = {
    "wire": Wire(gather="int8", reduce="int8", error_feedback=True),
    "tolerance": NEAR,
}
_KEPT = {"kept_on_host": True}
FULL, HYBRID = Strategy.FULL_SHARD, Strategy.HYBRID_SHARD
STRATEGIES: dict[str, type[Contender]] = {
    contender.name: contender
    for contender in (
        _spread("no-shard", "NO_SHARD", Strategy.NO_SHARD),
        _spread("grad-op", "SHARD_GRAD_OP", Strategy.SHARD_GRAD_OP),
        _spread("full", "FULL_SHARD", FULL),
        _spread("hybrid", "HYBRID_SHARD", HYBRID),
        _spread("hybrid-zero2", "_HYBRID_SHARD_ZERO2", Strategy.HYBRID_SHARD_ZERO2),
        _spread("full-kept", "FULL_SHARD, kept on host", FULL, **_KEPT),
        _spread("full-int8", "FULL_SHARD, int8, kept", FULL, **_INT8, **_KEPT),
        _spread("hybrid-bf16", "HYBRID_SHARD, bf16", HYBRID, **_BF16),
        _spread("hybrid-int8", "HYBRID_SHARD, int8", HYBRID, **_INT8),
        _apart("diloco", "DiLoCo, fp32", WireFormat.FP32),
        _apart("diloco-int8", "DiLoCo, int8", WireFormat.INT8),
        OwnLoop,
        FSDP2Full,
        FSDP2Hybrid,
        Floor,
    )
}
