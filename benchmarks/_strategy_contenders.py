"""Who runs over two hosts: every strategy of ours, torch FSDP2 in two ways, and the floor."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from _contenders import FSDP2, Case, Contender, Floor, Ours, OursAhead
from shardwise.diloco import DiLoCo, WireFormat
from shardwise.frontends.strategies import REPLICATE, SHARD, ShardingPlan, Strategy, resolve

HOSTS = 2


class Spread(OursAhead):
    """As ``shardwise train`` shards by a strategy, a replica on each host if there are several."""

    strategy: ClassVar[Strategy]

    def __init__(self, case: Case) -> None:
        self._plan: ShardingPlan = resolve(self.strategy, case.ranks, hosts=HOSTS)
        zero = 3 if self._plan.reshard_after_forward else 2
        super().__init__(dataclasses.replace(case, zero=zero))

    def mesh(self, case: Case) -> DeviceMesh:
        """Make the strategy's mesh."""
        self.whole = self._plan.make_mesh(case.device)
        return self._plan.sharding_mesh(self.whole)


class Apart(Spread):
    """DiLoCo: each host a replica that trains by itself."""

    strategy = Strategy.DILOCO
    exchanges = False
    wire: ClassVar[WireFormat]

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        # Rounds end when they are asked to: what an exchange takes is measured by itself.
        self.diloco = self.optimizer = DiLoCo(
            self.model,
            self.optimizer,
            every=2**31,
            group=self.whole.get_group(REPLICATE),
            wire=self.wire,
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


def _spread(named: str, titled: str, by: Strategy) -> type[Spread]:
    class Made(Spread):
        name = named
        title = titled
        strategy = by

    return Made


def _apart(named: str, titled: str, kind: WireFormat) -> type[Apart]:
    class Made(Apart):
        name = named
        title = titled
        wire = kind

    return Made


STRATEGIES: dict[str, type[Contender]] = {
    contender.name: contender
    for contender in (
        _spread("no-shard", "NO_SHARD", Strategy.NO_SHARD),
        _spread("grad-op", "SHARD_GRAD_OP", Strategy.SHARD_GRAD_OP),
        _spread("full", "FULL_SHARD", Strategy.FULL_SHARD),
        _spread("hybrid", "HYBRID_SHARD", Strategy.HYBRID_SHARD),
        _spread("hybrid-zero2", "_HYBRID_SHARD_ZERO2", Strategy.HYBRID_SHARD_ZERO2),
        _apart("diloco", "DiLoCo, fp32", WireFormat.FP32),
        _apart("diloco-int8", "DiLoCo, int8", WireFormat.INT8),
        OwnLoop,
        FSDP2Full,
        FSDP2Hybrid,
        Floor,
    )
}
