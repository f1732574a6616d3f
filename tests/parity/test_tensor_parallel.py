"""What tensor parallelism cut before: through checkpoints of any size, and in the wrapper class."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from shardwise import FullyShardedDataParallel, checkpoint
from tests.corpus.gathering import wholes
from tests.sharding.nets import assert_same_values, seeded
from tests.sharding.tensor_parallel import (
    TokenBlock,
    TokenNet,
    next_token_loss,
    sharded,
    tensor_parallel,
    tokens_of,
)
from tests.worlds import on_threads

Training = tuple[nn.Module, torch.optim.Optimizer]


def _training(net: nn.Module) -> Training:
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def _step(training: Training, data: DeviceMesh, step: int) -> None:
    """One step of which the global batch is the same on every mesh."""
    net, optimizer = training
    tokens = tokens_of(4, step).view(data.size(), -1, 5)
    next_token_loss(net, tokens[data.get_local_rank()]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _whole_step(training: Training, step: int) -> None:
    net, optimizer = training
    next_token_loss(net, tokens_of(4, step).flatten(0, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _assert_same_state(found: Training, wanted: Training) -> None:
    pairs = zip(found[0].named_parameters(), wanted[0].parameters(), strict=True)
    states = {
        f"{key} of {name}": (found[1].state[param][key], value)
        for (name, param), other in pairs
        for key, value in wanted[1].state[other].items()
    }
    assert len(states) >= len(list(wanted[0].parameters())), "momentum of every parameter"
    for own, (what, (_, value)) in zip(
        wholes(own for own, _ in states.values()), states.items(), strict=True
    ):
        assert torch.allclose(own, value), f"{what}: expected {value}, found {own}"


def _moved(folder: Path) -> None:
    """Train, save, load on another mesh, train on: after each as one process does."""
    whole = _training(seeded(TokenNet))
    for step, shape in enumerate(((2, 2), (4, 1), (1, 4))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        net = seeded(TokenNet, seed=step)
        training = _training(sharded(tensor_parallel(net, mesh["tp"]), mesh["dp"]))
        if step:
            checkpoint.load(folder / f"step-{step - 1}", *training)
            assert_same_values(training[0], whole[0])
            _assert_same_state(training, whole)
        _step(training, mesh["dp"], step)
        _whole_step(whole, step)
        assert_same_values(training[0], whole[0])
        checkpoint.save(folder / f"step-{step}", *training)


def _is_block(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, TokenBlock)


def _wrap(mesh: DeviceMesh, seed: int) -> Training:
    net = tensor_parallel(seeded(TokenNet, seed=seed), mesh["tp"])
    return _training(
        FullyShardedDataParallel(net, device_mesh=mesh["dp"], auto_wrap_policy=_is_block)
    )


def _wrapped() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    training, whole = _wrap(mesh, 0), _training(seeded(TokenNet))
    for step in range(2):
        _step(training, mesh["dp"], step)
        _whole_step(whole, step)
    assert_same_values(training[0], whole[0])
    _check_summoned(training[0], whole[0], mesh["tp"])
    for kind in StateDictType:
        _check_state_dicts(training, whole, _wrap(mesh, 1), kind)


def _check_summoned(net: nn.Module, whole: nn.Module, mesh: DeviceMesh) -> None:
    """Parameters are lent as tensor parallelism left them, and what is changed is kept."""
    wanted = {name: param.detach().clone() for name, param in whole.named_parameters()}
    with FullyShardedDataParallel.summon_full_params(net), torch.no_grad():
        for name, param in net.named_parameters():
            assert isinstance(param, DTensor), name
            assert param.device_mesh == mesh, name
            torch.testing.assert_close(param.full_tensor(), wanted[name])
            param.mul_(2.0)
        for param in whole.parameters():
            param.mul_(2.0)
    assert_same_values(net, whole)


def _check_state_dicts(
    training: Training, whole: Training, other: Training, kind: StateDictType
) -> None:
    """What one model and its optimizer save, others load; whole ones are the whole model's."""
    net, optimizer = training
    with FullyShardedDataParallel.state_dict_type(net, kind):
        state = net.state_dict()
        optim = FullyShardedDataParallel.optim_state_dict(net, optimizer)
    if kind is StateDictType.FULL_STATE_DICT:
        for name, value in whole[0].state_dict().items():
            assert not isinstance(state[name], DTensor), name
            torch.testing.assert_close(state[name], value)
    with FullyShardedDataParallel.state_dict_type(other[0], kind):
        other[0].load_state_dict(state)
        other[1].load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(other[0], other[1], optim)
        )
    assert_same_values(other[0], whole[0])
    _assert_same_state(other, whole)


@on_threads(4)
def test_checkpoints_move_between_sizes_and_the_wrapper_saves_and_lends(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    _moved(tmp_path)
    _wrapped()
