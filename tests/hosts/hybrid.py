"""One rank of a hybrid training over two hosts; prints what carried its bytes."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise import Wire, fully_shard
from tests.sharding.nets import (
    Net,
    assert_same_gradients,
    assert_same_values,
    average_backward,
    batches,
    loss_of,
    seeded,
)


def main() -> None:
    """Train, and compare with one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    net, whole = seeded(Net), seeded(Net)
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    over_all = fully_shard(seeded(Net))
    pairs = [(net, whole), (over_all, seeded(Net))]
    for sharded, one in pairs:
        for step in range(2):
            x = batches(world_size, step)
            loss_of(sharded, x[dist.get_rank()]).backward()
            average_backward(one, x)
            assert_same_gradients(sharded, one)
            with torch.no_grad():
                for param in (*sharded.parameters(), *one.parameters()):
                    param -= 0.1 * param.grad
                    param.grad = None
        assert_same_values(sharded, one)
    encoded = fully_shard(seeded(Net), wire=Wire(gather="bf16", reduce="int8"))
    loss_of(encoded, batches(world_size)[dist.get_rank()]).backward()
    group, whole_group, encoded_group = (
        fully_shard.state(each).groups[0] for each in (net, over_all, encoded)
    )
    names = {
        "shard": group.mesh.shard.name,
        "replicate": group.mesh.replicate.name,
        "all": whole_group.mesh.shard.name,
        "encoded": encoded_group.mesh.shard.name,
    }
    print(json.dumps(names))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
