"""Hybrid sharding over hosts: memory inside each of them, the network across."""

from __future__ import annotations

import json

from benchmarks._hosts import two_hosts
from shardwise.base import libc
from tests.hosts.network import needs_hosts, run_over


@needs_hosts
def test_every_mesh_dimension_gets_the_transport_of_its_ranks() -> None:
    with two_hosts() as hosts:
        printed = run_over(hosts, 2, "tests.hosts.hybrid")
    inside = "shm" if libc.has_futex() else "gloo"
    for out in printed:
        assert json.loads(out) == {
            "shard": inside,
            "replicate": "gloo",
            "all": f"{inside}+gloo",
            "encoded": f"{inside}+gloo",
        }
