"""Parameters that come after ``fully_shard`` are sharded, or are refused if ranks would part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from shardwise import fully_shard
from shardwise.base.errors import MisuseError
from shardwise.sharding import additions
from tests.sharding.nets import Net, sharded_net, train_alike, twins
from tests.worlds import on_threads


class _Adapted(nn.Module):
    """The first layer of a block, with a low-rank adapter beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.base = base
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(x) + self.up(self.down(x))
        return output


def _adapt(net: Net) -> list[nn.Module]:
    for block in net.blocks:
        block.up = _Adapted(block.up)
    return [part for block in net.blocks for part in (block.up.down, block.up.up)]


def _new_head(net: Net) -> list[nn.Module]:
    torch.manual_seed(4)
    net.head = nn.Linear(6, 3)
    return [net.head]


def _new_block(net: Net) -> list[nn.Module]:
    torch.manual_seed(5)
    net.blocks.insert(1, nn.Linear(6, 6))  # torch tells nobody of this
    return [net.blocks[1]]


def _scale(net: Net) -> list[nn.Module]:
    net.head.register_parameter("scale", nn.Parameter(torch.ones(6)))
    return []


_ADDITIONS = [_adapt, _new_head, _new_block]


@pytest.mark.parametrize("trained", [False, True])
@on_threads(2)
def test_what_is_sharded_afterwards_trains_as_in_one_process(
    rank: int, world_size: int, trained: bool
) -> None:
    for add in _ADDITIONS:
        for options in ({}, {"reshard_after_forward": False}):
            net, whole = twins(Net, **options)
            if trained:
                train_alike(net, whole, rank, world_size, steps=2)
            add(whole)
            for part in add(net):
                fully_shard(part, **options)
            train_alike(net, whole, rank, world_size, steps=2)


@on_threads(2)
def test_what_ranks_would_train_apart_is_named(rank: int, world_size: int) -> None:
    x = torch.ones(2, 6)
    for trained in (False, True):
        for add, name in (
            (_adapt, r"blocks\.0\.up\.down\.weight of shape \(2, 6\) on rank \d, and 5 more"),
            (_new_head, r'head\.weight .* and 1 more.*part = model.get_submodule\("head"\)'),
            (_new_block, r"blocks\.1\.weight"),
            (_scale, r"head\.scale .*Linear.*module of its own and shard that"),
        ):
            net = sharded_net()
            if trained:
                net(x).sum().backward()
            parts = add(net)
            for _ in range(2):  # it does not pass by trying again
                with pytest.raises(MisuseError, match=name):
                    net(x)
            with torch.no_grad():
                net(x)  # this trains nothing
            for part in parts:
                fully_shard(part)
            if parts:
                net(x).sum().backward()


def _average(param: nn.Parameter) -> None:
    assert param.grad is not None
    torch.distributed.all_reduce(param.grad)
    param.grad /= torch.distributed.get_world_size()


def _add_frozen(net: Net) -> None:
    net.head = nn.Linear(6, 3).requires_grad_(False)


def _add_hooked(net: Net) -> None:
    net.head.scale = nn.Parameter(torch.ones(6))
    net.head.scale.register_post_accumulate_grad_hook(_average)


def _add_ignored(net: Net) -> None:
    net.head = nn.Linear(6, 3)
    fully_shard(net.head, ignored_params={*net.head.parameters()})


def _add_replicated(net: Net) -> None:
    scale = distribute_tensor(torch.ones(6), net.head.weight.device_mesh, [Replicate()])
    net.head.scale = nn.Parameter(scale)


def _add_replica(net: Net) -> None:
    net.head = nn.parallel.DistributedDataParallel(nn.Linear(6, 3))


def _add_tie(net: Net) -> None:
    net.tied = net.head.weight


@on_threads(2)
def test_what_ranks_keep_alike_may_be_added(rank: int, world_size: int) -> None:
    ways: list[Callable[[Net], None]] = [
        *(_add_frozen, _add_hooked, _add_ignored, _add_replicated, _add_replica, _add_tie)
    ]
    for way in ways:
        for trained in (False, True):
            net = sharded_net()
            if trained:
                net(torch.ones(2, 6)).sum().backward()
            way(net)
            net(torch.ones(2, 6)).sum().backward()


@on_threads(2)
def test_ignored_parameters_of_the_first_calls_are_no_additions(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        net = Net()
    fully_shard(net, ignored_params={*net.head.parameters()})
    net.to_empty(device="cpu")  # makes other objects of them
    for param in net.parameters():
        nn.init.zeros_(param)
    net(torch.ones(2, 6)).sum().backward()
    assert not isinstance(net.head.weight, DTensor)


@on_threads(1)
def test_a_rank_alone_may_add_anything(rank: int, world_size: int) -> None:
    net = sharded_net()
    _new_head(net)
    net(torch.ones(2, 6)).sum().backward()


@on_threads(2)
def test_what_is_unfrozen_later_is_named_then(rank: int, world_size: int) -> None:
    net = sharded_net()
    _add_frozen(net)
    net(torch.ones(2, 6)).sum().backward()
    net.head.bias.requires_grad_(True)
    with pytest.raises(MisuseError, match=r"head\.bias of shape \(3,\) on rank \d:"):
        net(torch.ones(2, 6))


@on_threads(2)
def test_ties_of_after_sharding_train_as_in_one_process(rank: int, world_size: int) -> None:
    for trained in (False, True):
        net, whole = twins(Net)
        if trained:
            train_alike(net, whole, rank, world_size, steps=2)
        for each in (net, whole):
            each.blocks[0].up.weight = each.blocks[2].up.weight
        train_alike(net, whole, rank, world_size, steps=2)


@on_threads(2)
def test_a_parameter_that_is_taken_away_is_named(rank: int, world_size: int) -> None:
    def parametrize(net: Net) -> None:
        nn.utils.parametrizations.weight_norm(net.head)

    def delete(net: Net) -> None:
        del net.head.weight

    for take in (parametrize, delete):
        net = sharded_net()
        take(net)
        with pytest.raises(MisuseError, match=r"head\.weight.*was deleted.*before fully_shard"):
            net(torch.ones(2, 6))


@on_threads(2)
def test_a_model_is_searched_only_after_a_change(rank: int, world_size: int) -> None:
    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.LSTM(6, 3)  # is given full parameters by setattr

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            output: torch.Tensor = self.head(x)[0]
            return output

    net = Recurrent()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    torch.distributed.barrier()  # other ranks are in this process, and have made theirs
    searches: list[nn.Module] = []
    search = additions._added_to

    def counted(module: nn.Module, prefix: str) -> Any:
        searches.append(module)
        return search(module, prefix)

    with patch.object(additions, "_added_to", counted):
        for _ in range(3):
            net(torch.ones(2, 6)).sum().backward()
        assert searches.count(net) == 1
        torch.distributed.barrier()
        net.extra = nn.Identity()
        net(torch.ones(2, 6)).sum().backward()
        assert searches.count(net) == 2
