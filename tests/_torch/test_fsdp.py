"""Private names of FSDP and of modules do on this torch what ``_torch.fsdp`` promises."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

from shardwise._torch import fsdp
from shardwise._torch.c10d import fake_world


def test_torchs_functions_are_found_by_name() -> None:
    found = fsdp.fsdp2_functions(["fully_shard", "of_another_torch"])
    assert found == {"fully_shard": torch.distributed.fsdp.fully_shard}


def test_torch_returns_the_state_that_is_set() -> None:
    module, state = nn.Linear(1, 1), object()
    fsdp.set_fsdp_state(module, state)
    assert torch.distributed.fsdp.fully_shard.state(module) is state  # type: ignore[attr-defined]


def test_composable_apis_see_the_mark() -> None:
    module = nn.Linear(1, 1)
    fsdp.check_composable(module, "fully_shard")
    fsdp.mark_composable(module, "fully_shard")
    registry = _get_registry(module)
    assert registry is not None
    assert list(registry) == ["fully_shard"]
    with pytest.raises(ValueError, match="fully_shard has already been applied to this Linear"):
        fsdp.check_composable(module, "fully_shard")
    assert not fsdp.is_replicated(module)
    other = nn.Linear(1, 1)
    fsdp.mark_composable(other, "replicate")
    assert fsdp.is_replicated(other)
    with pytest.raises(ValueError, match=r"torch's replicate\(\) already manages it"):
        fsdp.check_composable(other, "fully_shard")


def test_tensor_parallel_plans_are_refused() -> None:
    module = nn.Linear(4, 4)
    fsdp.refuse_to_distribute(module, TypeError("apply the plan first"))
    with fake_world(2):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        with pytest.raises(TypeError, match="apply the plan first"):
            parallelize_module(module, mesh, ColwiseParallel())


def test_policies_of_torch_choose_modules() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    policy = ModuleWrapPolicy({nn.Linear})
    assert fsdp.is_wrap_policy(policy)
    assert not fsdp.is_wrap_policy(lambda module: True)
    assert list(fsdp.run_wrap_policy(policy, model, set())) == [model[0]]
    chosen = CustomPolicy(lambda module: {"x": 1} if module is model[1] else False)
    assert fsdp.run_wrap_policy(chosen, model, set())[model[1]] == {"x": 1}
    assert list(fsdp.run_wrap_policy(policy, model, {model[0]})) == []


def test_batch_norms_stay_in_full_precision() -> None:
    assert nn.modules.batchnorm._BatchNorm in fsdp.module_classes_to_ignore(MixedPrecision())


def test_checkpointing_wrappers_are_seen_through() -> None:
    inner = nn.Linear(1, 1)
    model = nn.Sequential(checkpoint_wrapper(checkpoint_wrapper(inner)))
    assert fsdp.without_checkpointing(model[0]) is inner
    assert fsdp.without_checkpointing(inner) is inner
    wrapped = dict(model.named_modules(remove_duplicate=False))
    [name] = [name for name, module in wrapped.items() if module is inner]
    assert fsdp.without_checkpoint_prefix(name) == "0"
    assert fsdp.without_checkpoint_prefix("blocks.0.weight") == "blocks.0.weight"


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_scripted_modules_are_known() -> None:
    module = nn.Linear(1, 1)
    assert not fsdp.is_scripted(module)
    assert fsdp.is_scripted(torch.jit.script(module))


class Noting(nn.Module):
    """A module with rules of its own about what is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def __setattr__(self, name: str, value: object) -> None:
        self.__dict__.setdefault("assigned", []).append(name)
        super().__setattr__(name, value)


def test_parameters_are_registered_and_found() -> None:
    module, new = nn.Linear(1, 1), nn.Parameter(torch.zeros(1, 1))
    old = module.weight
    owner = fsdp.ParamOwner(module, "weight")
    assert owner.registered is old
    assert owner.holds(old)
    owner.register(new)
    assert module.weight is new
    assert not owner.holds(old)
    assert not fsdp.ParamOwner(module, "nothing").holds(old)
    assert list(module.state_dict()) == ["weight", "bias"], "the order stays"


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
