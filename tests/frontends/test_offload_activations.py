"""Activations that are kept on a disk: the same bits as in memory, and nothing is left there."""

from __future__ import annotations

import copy
import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from shardwise import (
    DiskOffloadPolicy,
    OffloadError,
    checkpoint_module,
    fully_shard,
    offload_activations,
)
from shardwise.base import activations, libc
from shardwise.base.scratch import file as scratch_file
from shardwise.frontends.blocks import keep_products
from tests.corpus.gathering import own_part
from tests.worlds import Ranks

WIDTH, ROWS = 16, 64


class Block(nn.Module):
    """Attention and a residual stream; in backward twice, unlike fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(mask, -1e9)
        return x + self.dropout(self.out(scores.softmax(-1) @ v))


class Sigmoid(nn.Module):
    """Saves its input, what it computes, and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, results: list[torch.Tensor]) -> torch.Tensor:
        y = self.linear(x).sigmoid()
        results.append(y)
        return y * y


Change = Callable[[nn.Module], nn.Module]


@pytest.fixture
def policy(tmp_path: Path) -> DiskOffloadPolicy:
    return DiskOffloadPolicy(tmp_path)


def _ways(policy: OffloadPolicy) -> dict[str, Change]:
    def selective(module: nn.Module) -> nn.Module:
        return checkpoint_module(module, context_fn=keep_products)

    return {
        "inputs": lambda m: offload_activations(checkpoint_module(m), policy, smallest=1),
        "all": lambda m: offload_activations(m, policy, smallest=1),
        "selective": lambda m: offload_activations(selective(m), policy, smallest=1),
    }


def _model(change: Change | None = None, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(depth)))
    if change is not None:
        for block in model:
            change(block)
    return model


def _input(seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(2, ROWS, WIDTH, requires_grad=True)


def _plain(model: nn.Sequential) -> list[torch.Tensor]:
    found = []
    for step in range(2):
        x = _input(step)
        loss = model(x).square().mean()
        loss.backward()
        found += [loss, x.grad]
    return found


def _twice(model: nn.Sequential) -> list[torch.Tensor]:
    x = _input()
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad]  # type: ignore[list-item]


def _double_backward(model: nn.Sequential) -> list[torch.Tensor]:
    x = _input()
    [grad] = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    grad.square().sum().backward()
    return [x.grad]  # type: ignore[list-item]


def _several_forwards(model: nn.Sequential) -> list[torch.Tensor]:
    inputs = [_input(seed) for seed in range(4)]
    losses = [model(x).square().mean() for x in inputs]
    for i in (1, 3, 0, 2):
        losses[i].backward()
    return [x.grad for x in inputs]  # type: ignore[misc]


def _threads(model: nn.Sequential) -> list[torch.Tensor]:
    model.eval()  # dropout draws in the order of threads
    inputs = [_input(seed) for seed in range(4)]

    def run(x: torch.Tensor) -> None:
        model(x).square().mean().backward(inputs=[x])

    threads = [threading.Thread(target=run, args=(x,)) for x in inputs]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return [x.grad for x in inputs]  # type: ignore[misc]


def _shared_mask(model: nn.Sequential) -> list[torch.Tensor]:
    y, mask = _input(), torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)
    x = y
    for block in model:
        y = block(y, mask)
    y.square().mean().backward()
    return [x.grad]  # type: ignore[list-item]


def _inside_a_checkpoint(model: nn.Sequential) -> list[torch.Tensor]:
    x = _input()
    checkpoint(model, x, use_reentrant=False).square().mean().backward()
    return [x.grad]  # type: ignore[list-item]


def _inside_hooks(model: nn.Sequential) -> list[torch.Tensor]:
    x = _input()
    with torch.autograd.graph.save_on_cpu():
        loss = model(x).square().mean()
    loss.backward()
    return [x.grad]  # type: ignore[list-item]


def _copied(model: nn.Sequential) -> list[torch.Tensor]:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    x = _input()
    other(x).square().mean().backward()
    return [x.grad, *(p.grad for p in other.parameters())]  # type: ignore[list-item]


def _under_autocast(model: nn.Sequential) -> list[torch.Tensor]:
    x = _input()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    return [x.grad]  # type: ignore[list-item]


def _compiled(model: nn.Sequential) -> list[torch.Tensor]:
    del model[1:]
    if any("forward" in block.__dict__ for block in model):
        for block in model:
            block.compile(backend="aot_eager")
    model.eval()
    x = _input()
    model(x).square().mean().backward()
    return [x.grad]  # type: ignore[list-item]


PROGRAMS = (
    *(_plain, _twice, _double_backward, _several_forwards, _threads, _shared_mask),
    *(_inside_a_checkpoint, _inside_hooks, _copied, _under_autocast, _compiled),
)


@pytest.mark.filterwarnings("ignore:Detected that context_fn")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
def test_programs_compute_the_same(
    program: Callable[[nn.Sequential], list[torch.Tensor]], policy: DiskOffloadPolicy
) -> None:
    def gradients(model: nn.Sequential) -> list[torch.Tensor]:
        return [*program(model), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = gradients(_model())
    for name, change in _ways(policy).items():
        if name == "selective" and program in (_twice, _double_backward):
            continue  # torch refuses that
        for mine, other in zip(gradients(_model(change)), expected, strict=True):
            assert torch.equal(mine, other), name


class Kinds(nn.Module):
    """Integers, complex and conjugate numbers, sparse matrices, expanded and overlapping views."""

    def forward(self, x: torch.Tensor, rows: torch.Tensor, factor: float, *, z: Any) -> Any:
        eye = torch.sparse_coo_tensor(
            [[0, 1], [0, 1]], torch.ones(2), (2, 2), check_invariants=True
        )
        windows = x.flatten().unfold(0, 8, 2)
        parts = (
            (torch.complex(x[rows], x[rows]).conj() * z).real,
            torch.sparse.mm(eye, x[:2]),
            x[:1].expand(3, -1) * torch.ones(3, WIDTH),
            windows.exp(),
            x.double().sigmoid().t(),
        )
        return {"loss": sum(each.square().sum() for each in parts) * factor, "rows": rows}


def test_any_kind_of_tensor_can_be_saved(policy: DiskOffloadPolicy) -> None:
    def gradients(change: Change | None) -> list[Any]:
        module = Kinds() if change is None else change(Kinds())
        x = _input()[0].detach().requires_grad_()
        z = torch.randn(3, WIDTH, dtype=torch.complex64, requires_grad=True)
        module(x, torch.tensor([2, 2, 0]), 1.5, z=z)["loss"].backward()
        return [x.grad, z.grad]

    expected = gradients(None)
    for name, change in _ways(policy).items():
        for mine, other in zip(gradients(change), expected, strict=True):
            assert torch.equal(mine, other), name


def _raises_after_write(change: Change | None, write: str) -> bool:
    torch.manual_seed(0)
    module = Sigmoid() if change is None else change(Sigmoid())
    x, results = _input() * 1, list[torch.Tensor]()
    loss = module(x, results).sum()
    with torch.no_grad():
        match write:
            case "input":
                x.add_(1)
            case "a view, the only one left, of the input":
                view = x.view(-1)
                del x
                view.add_(1)
            case "result":
                results[0].view(-1).add_(1)
            case "parameter":
                next(module.parameters()).add_(1)
    try:
        loss.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


@pytest.mark.parametrize(
    "write", ["input", "a view, the only one left, of the input", "result", "parameter", "nothing"]
)
def test_writes_before_backward_raise_as_without(write: str, policy: DiskOffloadPolicy) -> None:
    ways = _ways(policy)
    assert _raises_after_write(ways["all"], write) == _raises_after_write(None, write)
    checkpointed = _raises_after_write(checkpoint_module, write)
    assert _raises_after_write(ways["inputs"], write) == checkpointed


def _on_disk(folder: Path) -> int:
    """Bytes of a file that tensors hold; 0 once the file has gone."""
    gc.collect()
    files = [file for (_, each), file in scratch_file._shared.items() if each == folder]
    free = sum(size for file in files for _, size in (*file._free, *file._returned))
    return sum(file.nbytes for file in files) - free


class _FaultError(Exception):
    pass


def _fail(*_: object) -> None:
    raise _FaultError


def _in_forward(model: nn.Sequential) -> None:
    handle = model[2].register_forward_pre_hook(_fail)
    with pytest.raises(_FaultError):
        model(_input())
    handle.remove()


def _in_backward(model: nn.Sequential) -> None:
    loss = model(_input()).sum()
    handle = model[1].qkv.weight.register_hook(_fail)
    with pytest.raises(_FaultError):
        loss.backward()
    handle.remove()
    model(_input()).sum().backward()  # torch keeps a graph whose backward failed until the next


def _never(model: nn.Sequential) -> None:
    model(_input()).sum()


def _without_gradients(model: nn.Sequential) -> None:
    with torch.no_grad():
        model(_input())


@pytest.mark.parametrize("use", [_plain, _twice, _in_forward, _in_backward, _never])
def test_nothing_is_left_on_the_disk(
    use: Callable[[nn.Sequential], Any], policy: DiskOffloadPolicy, tmp_path: Path
) -> None:
    for name, change in _ways(policy).items():
        if name == "selective" and use is _twice:
            continue  # torch refuses that
        model = _model(change)
        loss = model(_input()).sum()
        assert _on_disk(tmp_path)
        del loss
        use(model)
        assert not _on_disk(tmp_path)
        assert not os.listdir(tmp_path)
        del model
        gc.collect()
        assert tmp_path not in activations._stores


def test_without_gradients_nothing_is_kept(policy: DiskOffloadPolicy, tmp_path: Path) -> None:
    model = _model(_ways(policy)["all"])
    _without_gradients(model)
    assert not _on_disk(tmp_path)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of everything that is kept on a disk from here on."""
    sizes: list[int] = []

    class Noted(activations._OnDisk):
        def __init__(self, file: Any, source: torch.Tensor) -> None:
            sizes.append(source.nbytes)
            super().__init__(file, source)

    monkeypatch.setattr(activations, "_OnDisk", Noted)
    return sizes  # type: ignore[return-value]


def test_a_checkpoint_keeps_its_inputs_once(kept: list[int], policy: DiskOffloadPolicy) -> None:
    model = _model(_ways(policy)["inputs"])
    _shared_mask(model)
    assert kept == [4 * 2 * ROWS * WIDTH, ROWS * ROWS, *[4 * 2 * ROWS * WIDTH] * 2]
    kept.clear()
    _inside_a_checkpoint(model)
    assert not kept


def test_small_tensors_and_parts_of_large_ones_stay(
    kept: list[int], policy: DiskOffloadPolicy
) -> None:
    nbytes = 4 * 2 * ROWS * WIDTH
    for smallest, found in ((nbytes, [nbytes]), (nbytes + 1, [])):
        module = offload_activations(nn.Sigmoid(), policy, smallest=smallest)
        module(_input())
        assert kept == found
        kept.clear()
    module = offload_activations(checkpoint_module(nn.Sigmoid()), policy, smallest=1)
    module(torch.ones(100, 100, requires_grad=True)[:10])
    assert not kept


def test_what_the_program_still_has_is_not_read(
    monkeypatch: pytest.MonkeyPatch, policy: DiskOffloadPolicy
) -> None:
    model = _model(_ways(policy)["inputs"], depth=1)
    x = _input()
    loss = model(x).sum()
    monkeypatch.setattr(libc, "read", None)
    loss.backward()


def test_backward_reads_ahead(monkeypatch: pytest.MonkeyPatch, policy: DiskOffloadPolicy) -> None:
    model, order = _model(_ways(policy)["inputs"], depth=4), list[str]()
    loss = model(_input() * 1).sum()
    for name, call in (("ahead", libc.read_ahead), ("read", libc.read)):

        def noted(*args: Any, name: str = name, call: Any = call) -> None:
            order.append(name)
            call(*args)

        monkeypatch.setattr(libc, name.replace("ahead", "read_ahead"), noted)
    loss.backward()
    assert order == ["ahead", "ahead", "read", *["ahead", "read"] * 2, "read"] or order == [
        *["ahead", "ahead", "read"] * 3,
        *["ahead", "read"],
    ]


# -- sharding --------------------------------------------------------------------------------------


def _sharded_alike(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    policy = DiskOffloadPolicy(folder)
    sizes: list[int] = []
    on_disk = activations._OnDisk
    activations._OnDisk = lambda file, source: (  # type: ignore[assignment, misc]
        sizes.append(source.nbytes),
        on_disk(file, source),
    )[1]
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for shard in (fully_shard, torchs_fully_shard):
        found = []
        for change in (None, *_ways(policy).values()):
            model = _model()
            if change is not None:
                change(model[0])
            for part in (*model, model):
                shard(part, mesh=mesh, mp_policy=bf16)
            if change is not None:  # before and after it is sharded
                change(model[1])
                change(model[2])
            losses = _plain(model)
            found.append([*losses, *(own_part(p.grad) for p in model.parameters())])  # type: ignore[arg-type]
        for other in found[1:]:
            assert all(map(torch.equal, other, found[0]))
    of_parameters = {p.nbytes for p in _model().parameters()} | {3 * WIDTH * WIDTH * 2}
    assert sizes
    assert not of_parameters & {*sizes}, "no full parameter is copied"


def test_sharded_trainings_are_the_same_and_no_parameter_is_kept(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(_sharded_alike, 2, tmp_path)


def _dtensors(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    ways = _ways(DiskOffloadPolicy(folder))

    def run(change: Change | None) -> list[torch.Tensor]:
        model = _model(change).eval()
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                module.register_parameter(
                    name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()]))
                )
        x = _input()
        out = model(DTensor.from_local(x, mesh, [Shard(0)]))
        if change is not None:
            assert _on_disk(folder)
        out.full_tensor().square().mean().backward()
        return [x.grad, *(p.grad.full_tensor() for p in model.parameters())]  # type: ignore[union-attr, list-item]

    expected = run(None)
    for name, change in ways.items():
        assert all(map(torch.equal, run(change), expected)), name
    module = ways["all"](nn.Sigmoid())
    out: Any = module(DTensor.from_local(_input(), mesh, [Shard(0)]))
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        out.full_tensor().sum().backward()


def test_dtensors_are_kept_like_other_tensors(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_dtensors, 2, tmp_path)


# -- errors ----------------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_in_forward(
    monkeypatch: pytest.MonkeyPatch, policy: DiskOffloadPolicy
) -> None:
    model = _model(_ways(policy)["inputs"])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OffloadError, match=r"activations: .* No space left .* another folder"):
            model(_input())
    _plain(model)


def test_a_disk_that_cannot_be_read_is_an_error_in_backward(
    monkeypatch: pytest.MonkeyPatch, policy: DiskOffloadPolicy
) -> None:
    model = _model(_ways(policy)["all"])
    loss = model(_input()).sum()

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(libc, "read", fail)
        with pytest.raises(OffloadError, match="cannot go on: drop its gradients"):
            loss.backward()
    model.zero_grad()
    _plain(model)


def test_arguments_are_checked(policy: DiskOffloadPolicy) -> None:
    with pytest.raises(
        TypeError, match=r"offload_policy: found OffloadPolicy\(\), expected CPUOffload"
    ):
        offload_activations(Block(), OffloadPolicy())
    module = offload_activations(Block(), policy)
    assert offload_activations(module, policy) is module
    with pytest.raises(ValueError, match="the other order"):
        checkpoint_module(module)


def test_on_the_cpu_there_is_no_other_host(kept: list[int]) -> None:
    model = _model(_ways(CPUOffloadPolicy())["all"])
    for mine, other in zip(_plain(model), _plain(_model()), strict=True):
        assert torch.equal(mine, other)
