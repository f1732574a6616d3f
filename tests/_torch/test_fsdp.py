"""Private names of FSDP and of modules do on this torch what ``_torch.fsdp`` promises."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing._internal.two_tensor import TwoTensor

from shardwise._torch import fsdp


def test_torchs_functions_are_found_by_name() -> None:
    found = fsdp.fsdp2_functions(["fully_shard", "of_another_torch"])
    assert found == {"fully_shard": torch.distributed.fsdp.fully_shard}


def test_checkpointing_wrappers_are_seen_through() -> None:
    inner = nn.Linear(1, 1)
    model = nn.Sequential(checkpoint_wrapper(checkpoint_wrapper(inner)))
    assert fsdp.without_checkpointing(model[0]) is inner
    assert fsdp.without_checkpointing(inner) is inner
    wrapped = dict(model.named_modules(remove_duplicate=False))
    [name] = [name for name, module in wrapped.items() if module is inner]
    assert fsdp.without_checkpoint_prefix(name) == "0"
    assert fsdp.without_checkpoint_prefix("blocks.0.weight") == "blocks.0.weight"


class Noting(nn.Module):
    """A module with rules of its own about what is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def __setattr__(self, name: str, value: object) -> None:
        self.__dict__.setdefault("assigned", []).append(name)
        super().__setattr__(name, value)


def test_a_module_with_its_own_assignment_is_asked() -> None:
    module = Noting()
    module.__dict__["assigned"].clear()
    fsdp.ParamOwner(module, "weight").register(nn.Parameter(torch.zeros(1)))
    assert module.__dict__["assigned"] == ["weight"]


def test_children_and_buffers_are_the_modules_own() -> None:
    shared = nn.ReLU()
    model = nn.Sequential(nn.BatchNorm1d(2), shared, shared)
    model.register_module("none", None)
    assert fsdp.children_of(model) == [("0", model[0]), ("1", shared), ("2", shared)]
    buffers = fsdp.buffers_of(model[0])
    buffers["running_mean"] = torch.full((2,), 3.0)
    assert model[0].running_mean.tolist() == [3.0, 3.0]
    assert fsdp.buffers_of(model) == {}


@pytest.mark.parametrize("name", ["DataParallelMeshDims", "ShardPlacementResult"])
def test_classes_of_newer_torches_have_a_stand_in(name: str) -> None:
    assert isinstance(getattr(fsdp, name), type)
    assert getattr(fsdp, name).__name__ == name


def test_a_tensor_is_moved_for_all_who_hold_it_with_all_that_it_is() -> None:
    wrapper = nn.Parameter(TwoTensor(torch.ones(2), torch.zeros(2)), requires_grad=False)
    wrapper.mark = "user's"
    for tensor in (wrapper, torch.ones(2), nn.Parameter(torch.ones(2))):
        before = type(tensor), tensor.requires_grad, tensor.__dict__
        fsdp.move(tensor, torch.device("meta"))
        assert tensor.is_meta
        assert (type(tensor), tensor.requires_grad, tensor.__dict__) == before
