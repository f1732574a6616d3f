"""What a program sets on a parameter is on each of its forms, whichever it was set on."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwise import FullyShardedDataParallel, fully_shard, materialize, optim, relayout
from shardwise.sharding.allocate import allocate
from tests.worlds import on_threads


class _Seeing(nn.Linear):
    """A linear layer that notes what its weight looks like in forward, and tags it there."""

    seen: object = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = getattr(self.weight, "tag", None)
        self.weight.touched = True
        return super().forward(x)


def _tagged() -> nn.Sequential:
    model = nn.Sequential(_Seeing(6, 5), _Seeing(5, 6), nn.LayerNorm(6))
    for name, param in model.named_parameters():
        param.tag = name
        param.no_weight_decay = param.ndim == 1
    return model


def _shard(model: nn.Module, **options: object) -> nn.Module:
    for layer in list(model.children())[:2]:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def _check_tags(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        name = name.replace("_fsdp_wrapped_module.", "")
        assert vars(param).get("tag") == name
        assert vars(param).get("no_weight_decay") == (param.ndim == 1), name


def _as_it_is(model: nn.Module) -> nn.Module:
    return model


def _after_to(model: nn.Module) -> nn.Module:
    return model.double()


def _assigned(model: nn.Module) -> nn.Module:
    model.load_state_dict(model.state_dict(), assign=True)
    return model


def _pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(dict(model.named_parameters()), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    _check_tags(type("Loaded", (), {"named_parameters": lambda self: loaded.items()})())
    return model


def _moved(model: nn.Module) -> nn.Module:
    relayout(model, torch.optim.SGD(model.parameters(), lr=1.0), strategy="no-shard")
    return model


def _after_a_step(model: nn.Module) -> nn.Module:
    model(torch.ones(2, 6)).sum().backward()
    optim.AdamW8bit(model.parameters()).step()
    return model


_WAYS = [_as_it_is, _after_to, copy.deepcopy, _assigned, _pickled, _moved, _after_a_step]


@on_threads(3)
def test_shards_have_the_attributes_of_their_parameters(rank: int, world_size: int) -> None:
    for way in _WAYS:
        _check_tags(way(_shard(_tagged())))


@on_threads(2)
def test_models_from_the_meta_device_keep_them(rank: int, world_size: int) -> None:
    ways: list[Callable[[nn.Module], object]] = [
        lambda model: model.to_empty(device="cpu"),
        materialize,
        lambda model: allocate(model, [name for name, _ in model.named_parameters()]),
    ]
    for make in ways:
        with torch.device("meta"):
            model = _tagged()
        plain = {*model[2].parameters()}
        _shard(model, ignored_params=plain)
        make(model)
        sharded = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
        assert len(sharded) == 4
        for name, param in sharded.items():
            assert vars(param)["tag"] == name
    assert vars(model[2].weight)["tag"] == "2.weight", "of those that are not sharded, too"


@on_threads(2)
def test_both_forms_have_one_set_of_attributes(rank: int, world_size: int) -> None:
    # Under reshard_after_forward=1 of 2 ranks, and without, also what is kept for backward.
    for options in ({}, {"reshard_after_forward": False}):
        model = _shard(_tagged(), **options)
        sharded = model[0].weight
        model(torch.ones(2, 6)).sum().backward()
        assert model[0].seen == "0.weight", "set on the original, seen in forward"
        assert sharded.touched, "set in forward, seen on the shard"
        sharded.tag = "new"
        del sharded.no_weight_decay
        model(torch.ones(2, 6))
        assert model[0].seen == "new"
        full = model[0].weight if options else None
        assert full is None or not hasattr(full, "no_weight_decay")


@on_threads(4)
def test_what_is_kept_over_fewer_ranks_has_them(rank: int, world_size: int) -> None:
    layer = _Seeing(8, 8)
    layer.weight.tag = "weight"
    model = nn.Sequential(layer, nn.Linear(8, 8))
    fully_shard(layer, reshard_after_forward=2)
    fully_shard(model)
    output = model(torch.ones(2, 8))
    assert isinstance(layer.weight, DTensor)
    assert layer.weight.tag == "weight"
    output.sum().backward()


@on_threads(2)
def test_copies_have_attributes_of_their_own(rank: int, world_size: int) -> None:
    model = _tagged()
    model[0].weight.names = ["a"]
    model[0].weight.of = model
    model[0].weight.group = torch.distributed.group.WORLD
    twin = copy.deepcopy(_shard(model))
    weight = twin[0].weight
    weight.names.append("b")
    assert model[0].weight.names == ["a"]
    assert weight.of is twin, "what is in the model is in the copy of the model"
    assert weight.group is torch.distributed.group.WORLD, "this cannot be copied"


@on_threads(2)
def test_tied_parameters_have_one_set(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.tag = "tied"
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model[1].weight.more = 1
    model(torch.tensor([1, 2])).sum().backward()
    assert (model[0].weight.tag, model[0].weight.more) == ("tied", 1)


@on_threads(2)
def test_parameters_of_tensor_parallelism_keep_theirs(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    layer = nn.Linear(6, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
    layer.weight.sequence_parallel = True
    fully_shard(layer, mesh=mesh["dp"])
    assert layer.weight.sequence_parallel
    layer.unshard()
    assert layer.weight.sequence_parallel


@on_threads(2)
def test_the_wrapper_of_fsdp1_keeps_them(rank: int, world_size: int) -> None:
    model = FullyShardedDataParallel(_tagged(), use_orig_params=True)
    _check_tags(model)
    with FullyShardedDataParallel.summon_full_params(model):
        _check_tags(model)
        model.module[0].weight.tag = "summoned"
    assert model.module[0].weight.tag == "summoned"


class _Named(nn.Parameter):
    pass


@on_threads(2)
def test_a_class_stays_behind_and_its_attributes_do_not(rank: int, world_size: int) -> None:
    layer = nn.Linear(4, 4)
    layer.weight = _Named(layer.weight.detach())
    layer.weight.tag = "named"
    fully_shard(layer)
    assert type(layer.weight) is DTensor
    assert layer.weight.tag == "named"


@on_threads(2)
def test_hooks_of_before_sharding_see_the_reduced_gradient(rank: int, world_size: int) -> None:
    whole, layer = nn.Linear(4, 2), nn.Linear(4, 2)
    layer.load_state_dict(whole.state_dict())
    seen: list[str] = []
    handles = [each.weight.register_hook(lambda grad: grad * 0.5) for each in (whole, layer)]
    layer.bias.register_post_accumulate_grad_hook(lambda param: seen.append(type(param).__name__))
    fully_shard(layer)
    for each in (whole, layer):
        each(torch.ones(1, 4)).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad.full_tensor(), whole.weight.grad)
    assert seen == ["DTensor"]
    for handle in handles:
        handle.remove()
    layer.zero_grad()
    layer(torch.ones(1, 4)).sum().backward()
    torch.testing.assert_close(layer.weight.grad.full_tensor(), whole.weight.grad * 2)


@on_threads(2)
def test_hooks_of_the_meta_device_are_called_after_it(rank: int, world_size: int) -> None:
    names, seen = ["0.weight", "2.weight"], list[str]()
    with torch.device("meta"):
        model = _tagged()
    _shard(model, ignored_params={*model[2].parameters()})
    for name in names:
        model.get_parameter(name).register_hook(lambda grad, name=name: seen.append(name))
    materialize(model)
    model(torch.ones(2, 6)).sum().backward()
    assert sorted(seen) == names


@on_threads(2)
def test_an_original_parameter_is_pickled_without_the_model_and_keeps_none_alive(
    rank: int, world_size: int
) -> None:
    model, file = _tagged(), io.BytesIO()
    weight = model[0].weight
    _shard(model)
    torch.save(torch.optim.SGD([weight], lr=1.0), file)
    file.seek(0)
    torch.load(file, weights_only=False).step()
    left = weakref.ref(model)
    del model
    gc.collect()
    assert left() is None
