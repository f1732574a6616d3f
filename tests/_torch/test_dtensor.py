"""Private names of DTensor and device meshes do on this torch what ``_torch.dtensor`` promises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwise._torch import dtensor
from shardwise._torch.c10d import fake_world


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of 2 by 2 ranks, of which this is rank 0."""
    with fake_world(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def sharded(mesh: DeviceMesh, *shape: int) -> DTensor:
    return distribute_tensor(torch.zeros(shape), mesh["dp"], [Shard(0)])


class Undeclared(torch.Tensor):
    """A wrapper that does not declare itself as one."""

    @staticmethod
    def __new__(cls: type[torch.Tensor], inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_a_parameter_follows_its_memory_to_another_device(mesh: DeviceMesh) -> None:
    """As under CPU offload, after ``to_empty(device="cuda")``: its gradient is on the host, too."""
    with FakeTensorMode():
        on_device = torch.empty(2, 3, device="cuda")
    spec = dtensor.spec_of(sharded(mesh, 4, 3))
    param = dtensor.make_parameter(on_device, spec, requires_grad=True)
    dtensor.set_local_memory(param, torch.zeros(2, 3))
    assert (param.device, dtensor.local_of(param).device) == (torch.device("cpu"),) * 2
    param.grad = dtensor.wrap_local(torch.ones(2, 3), spec)
    torch.optim.SGD([param], lr=2.0).step()
    assert dtensor.local_of(param).eq(-2.0).all()


@pytest.mark.parametrize("inference", [False, True])
def test_the_local_tensor_moves_to_another_memory(mesh: DeviceMesh, inference: bool) -> None:
    with torch.inference_mode(inference):
        tensor = sharded(mesh, 4, 3)
    before, memory = dtensor.local_of(tensor), torch.full((2, 3), 5.0)
    dtensor.set_local_memory(tensor, memory)
    assert dtensor.local_of(tensor).data_ptr() == memory.data_ptr()
    if not inference:
        assert before.data_ptr() == memory.data_ptr(), "whoever holds the local tensor sees it"


def test_a_running_collective_is_waited_for(mesh: DeviceMesh) -> None:
    result = funcol.all_reduce(torch.ones(3), "sum", mesh["dp"])
    assert type(result) is not torch.Tensor
    assert type(dtensor.wait_tensor(result)) is torch.Tensor
    plain = torch.ones(3)
    assert dtensor.wait_tensor(plain) is plain


def test_wrappers_are_known_whether_they_declare_themselves_or_not(mesh: DeviceMesh) -> None:
    assert dtensor.is_wrapper(sharded(mesh, 4, 3))
    assert dtensor.is_wrapper(Undeclared(torch.ones(2)))
    for tensor in (torch.ones(2), nn.Parameter(torch.ones(2)), torch.Tensor(2)):
        assert not dtensor.is_wrapper(tensor)
        assert dtensor.has_memory(tensor)
    assert not dtensor.has_memory(torch.ones(2, device="meta"))
    assert not dtensor.has_memory(Undeclared(torch.ones(2)))


def test_tensors_inside_a_transform_have_no_storage() -> None:
    seen: list[int | None] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        seen.append(dtensor.storage_of(x * 2))
        return x

    torch.func.vmap(body)(torch.ones(3))
    assert seen == [None]


def test_meshes_are_joined_flattened_and_traced_to_their_root(mesh: DeviceMesh) -> None:
    joined = dtensor.join_meshes([mesh["dp"], mesh["tp"]])
    assert joined.mesh_dim_names == ("dp", "tp")
    assert joined.mesh.tolist() == mesh.mesh.tolist()
    only = mesh["dp"]
    assert dtensor.join_meshes([only]) is only
    flat = dtensor.flatten_mesh(mesh, ("dp", "tp"))
    assert (flat.ndim, flat.mesh.tolist()) == (1, [0, 1, 2, 3])
    assert dtensor.root_mesh(mesh["tp"]) == mesh
    assert dtensor.root_mesh(mesh) == mesh


def test_siblings_of_a_mesh_are_all_slices_of_its_kind(mesh: DeviceMesh) -> None:
    assert dtensor.sibling_meshes(mesh["dp"]).tolist() == [[0, 2], [1, 3]]
    assert dtensor.sibling_meshes(mesh["tp"]).tolist() == [[0, 1], [2, 3]]
    assert dtensor.sibling_meshes(mesh).tolist() == [[[0, 1], [2, 3]]]
