"""AdamW with moments of eight bits: the same update on every mesh, in a quarter of the memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from shardwise import checkpoint, fully_shard
from shardwise.optim import AdamW8bit, Lion, adamw8bit, offload
from shardwise.optim.blocks import BLOCK
from shardwise.optim.codes import Range, values
from tests.ecosystem.llama import full
from tests.worlds import on_threads

Ranks = Callable[..., list[Any]]
Threads = Callable[..., list[Any]]

SHAPES = ((48, 300), (40, 1024), (70, 64), (8, 6, 512), (16, 12, 5, 5), (5000,), (9, 30))
STEPS = 2


def weights(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def gradient(shape: torch.Size, step: int) -> Tensor:
    """Of very different sizes, with zeros."""
    generator = torch.Generator().manual_seed(step)
    sizes = 10.0 ** (-4 * torch.rand(shape, generator=generator))
    return sizes * torch.randn(shape, generator=generator).relu()


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for param in params:
            grad = gradient(param.shape, step).to(param.dtype)
            if isinstance(param, DTensor):
                grad = distribute_tensor(grad, param.device_mesh, param.placements)
            param.grad = grad
        optimizer.step()


def everything(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters and states, full."""
    states = [value for param in params for _, value in sorted(optimizer.state[param].items())]
    return [full(each.detach()) for each in (*params, *states)]


def plain() -> tuple[list[nn.Parameter], AdamW8bit]:
    params = [nn.Parameter(weight) for weight in weights()]
    return params, AdamW8bit(params, lr=1e-2)


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for number, (mine, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(mine, other), f"tensor {number} of shape {tuple(other.shape)}"


def on_mesh(shape: tuple[int, ...], placements: list[Placement]) -> list[nn.Parameter]:
    """The weights as ``DTensor`` s, cut along the last dimension if they lack the wanted one."""
    mesh = init_device_mesh("cpu", shape)
    params = []
    for weight in weights():
        fitting = [
            Shard(min(each.dim, weight.ndim - 1)) if isinstance(each, Shard) else each
            for each in placements
        ]
        params.append(nn.Parameter(distribute_tensor(weight, mesh, fitting)))
    return params


def _trained_on_mesh(
    rank: int, world_size: int, shape: tuple[int, ...], placements: list[Placement]
) -> list[Tensor]:
    params = on_mesh(shape, placements)
    optimizer = AdamW8bit(params, lr=1e-2)
    train(params, optimizer, range(STEPS))
    return everything(params, optimizer)


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        # tests/optim/test_blocks.py says on which meshes ranks share blocks.
        ((3,), [Shard(0)]),
        ((3,), [Shard(1)]),  # inside rows; between blocks of some
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(3)]),
        ((2, 2), [Shard(1), Shard(1)]),  # twice
    ],
)
def test_the_update_is_the_same_on_any_mesh(
    threads: Threads, shape: tuple[int, ...], placements: list[Placement]
) -> None:
    params, optimizer = plain()
    train(params, optimizer, range(STEPS))
    for found in threads(_trained_on_mesh, math.prod(shape), shape, placements):
        assert_same(found, everything(params, optimizer))


@pytest.mark.parametrize("at_once", [1, 1000, 1 << 12])
def test_the_update_is_the_same_however_much_is_computed_at_a_time(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    params, optimizer = plain()
    train(params, optimizer, range(2))
    wanted = everything(params, optimizer)
    monkeypatch.setattr(adamw8bit, "AT_ONCE", max(at_once, BLOCK))
    params, optimizer = plain()
    train(params, optimizer, range(2))
    assert_same(everything(params, optimizer), wanted)


def test_it_follows_adamw() -> None:
    params, optimizer = plain()
    others = [nn.Parameter(weight) for weight in weights()]
    adamw = torch.optim.AdamW(others, lr=1e-2)
    torch.manual_seed(0)
    for _ in range(10):
        for param, other in zip(params, others, strict=True):
            param.grad = torch.randn_like(param)
            other.grad = param.grad.clone()
        optimizer.step()
        adamw.step()
    for before, mine, other in zip(weights(), params, others, strict=True):
        off = ((mine - other).norm() / (other - before).norm()).item()
        assert off < (0.02 if is_quantized(optimizer, mine) else 1e-5), tuple(mine.shape)


def test_second_moments_are_right_on_average_after_many_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.zeros(16, 512))
    optimizer = AdamW8bit([param])
    wanted = torch.zeros_like(param)
    of_code = torch.tensor(values(Range.UNSIGNED))

    def spread(decades: int) -> Tensor:
        return 10.0 ** (-decades * torch.rand(param.shape, generator=generator))

    sizes, ratios = spread(2), []
    for _ in range(200):
        this_step = torch.randn((), generator=generator).exp()
        param.grad = this_step * sizes * spread(2) * torch.randn(param.shape, generator=generator)
        wanted.mul_(0.999).addcmul_(param.grad, param.grad, value=0.001)
        optimizer.step()
        state = optimizer.state[param]
        found = of_code[state["exp_avg_sq_codes"].long()].view(16, -1, BLOCK)
        found *= state["exp_avg_sq_scale"].unsqueeze(-1)
        ratios.append((found.view_as(wanted) / wanted).median())
    assert torch.stack(ratios[100:]).mean().item() == pytest.approx(1.0, abs=0.03)


def is_quantized(optimizer: AdamW8bit, param: nn.Parameter) -> bool:
    return "exp_avg_codes" in optimizer.state[param]


def test_vectors_and_small_matrices_keep_moments_in_fp32() -> None:
    params, optimizer = plain()
    train(params, optimizer, range(1))
    fp32 = [tuple(each.shape) for each in params if not is_quantized(optimizer, each)]
    assert fp32 == [(5000,), (9, 30)]


def test_states_take_a_quarter_of_the_memory() -> None:
    shapes = ((256, 688), (688, 256), (256, 256), (1000, 64), (64, 32, 3, 3), (256,))
    held = {}
    for make in (AdamW8bit, torch.optim.AdamW):
        params = [nn.Parameter(weight) for weight in weights(shapes)]
        optimizer = make(params)
        train(params, optimizer, range(1))
        held[make] = sum(
            value.nbytes for state in optimizer.state.values() for value in state.values()
        )
    assert held[AdamW8bit] <= 0.27 * held[torch.optim.AdamW]


def test_parameters_in_half_precision_are_rounded_from_fp32() -> None:
    [weight] = weights(((64, 256),))
    half, exact = nn.Parameter(weight.bfloat16()), nn.Parameter(weight.bfloat16().float())
    for param in (half, exact):
        param.grad = gradient(param.shape, 0).bfloat16().to(param.dtype)
        AdamW8bit([param], lr=1e-1).step()
    assert torch.equal(half, exact.bfloat16())


def test_zeros_and_tiny_gradients_do_no_harm() -> None:
    param = nn.Parameter(torch.ones(64, 256))
    optimizer = AdamW8bit([param], lr=1e-3, weight_decay=0.0)
    for scale in (0.0, 1e-30, 1e-10):
        param.grad = scale * gradient(param.shape, 0)
        optimizer.step()
    assert bool(param.isfinite().all())
    assert bool(((param - 1).abs() < 1e-2).all())


def test_a_gradient_that_is_no_number_shows() -> None:
    param = nn.Parameter(torch.ones(64, 256))
    optimizer = AdamW8bit([param])
    param.grad = torch.zeros(64, 256)
    param.grad[0, 0] = float("nan")
    optimizer.step()
    assert bool(param[0, 0].isnan())
    assert bool(param[1].isfinite().all())
    optimizer.step()
    assert bool(param[0].isnan().all()), "the block shares a scale"
    assert bool(param[1].isfinite().all())


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    params, optimizer = plain()
    train(params[1:], optimizer, range(1))
    assert torch.equal(params[0], weights()[0])
    assert params[0] not in optimizer.state
    train(params, optimizer, range(1, 2))
    steps = [optimizer.state[param]["step"].item() for param in params]
    assert steps == [1.0] + [2.0] * (len(params) - 1)


def test_memory_that_is_no_matrix_is_updated_too() -> None:
    [weight] = weights(((64, 32, 3, 3),))
    param = nn.Parameter(weight.to(memory_format=torch.channels_last))
    other = nn.Parameter(weight.clone())
    for each in (param, other):
        train([each], AdamW8bit([each]), range(2))
    assert torch.equal(param, other)


def test_groups_have_options_of_their_own_and_a_closure_is_called() -> None:
    one, two = (nn.Parameter(torch.ones(64, 128)) for _ in range(2))
    optimizer = AdamW8bit([{"params": [one]}, {"params": [two], "lr": torch.tensor(0.0)}], lr=1e-2)

    def closure() -> float:
        loss = (one + two).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    assert optimizer.step(closure) == 4 * 64 * 128
    assert torch.equal(two, torch.ones(64, 128))
    assert not torch.equal(one, torch.ones(64, 128))


def test_a_copy_goes_on_by_itself() -> None:
    params, optimizer = plain()
    train(params, optimizer, range(1))
    its_params, its_optimizer = copy.deepcopy((params, optimizer))
    for each, its in ((params, optimizer), (its_params, its_optimizer)):
        train(each, its, range(1, 3))
    assert_same(everything(its_params, its_optimizer), everything(params, optimizer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_goes_on_where_it_was_saved(dtype: torch.dtype) -> None:
    params, optimizer = plain()
    params = [nn.Parameter(param.detach().to(dtype)) for param in params]
    optimizer = AdamW8bit(params, lr=1e-2)
    train(params, optimizer, range(2))
    others = copy.deepcopy(params)
    its = AdamW8bit(others)
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its_optimizer in ((params, optimizer), (others, its)):
        train(each, its_optimizer, range(2, 3))
    assert_same(everything(others, its), everything(params, optimizer))


def test_hooks_of_the_user_see_the_state() -> None:
    params, optimizer = plain()
    train(params, optimizer, range(1))
    given, seen = optimizer.state_dict(), []
    other = AdamW8bit(params)
    other.register_load_state_dict_pre_hook(lambda _, state: seen.append(len(state["state"])))
    other.register_load_state_dict_post_hook(lambda each: seen.append(len(each.state)))
    other.load_state_dict(given)
    assert seen == [len(params)] * 2


def _fails(optimizer: AdamW8bit, given: dict[str, Any], match: str) -> None:
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(given)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(after["state"][number][name], value)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    params, optimizer = plain()
    train(params, optimizer, range(1))
    others = [nn.Parameter(weight) for weight in weights()]
    adamw = torch.optim.AdamW(others, lr=0.5)
    train(others, adamw, range(1))
    _fails(optimizer, adamw.state_dict(), "the state of another optimizer cannot be loaded")
    given = copy.deepcopy(optimizer.state_dict())
    given["state"][1]["exp_avg_scale"] = torch.zeros(40, 5)
    _fails(optimizer, given, r"parameter 1, of shape \[40, 1024\]: exp_avg_scale: found .*40, 5")
    given = copy.deepcopy(optimizer.state_dict())
    given["state"][0]["exp_avg_codes"] = given["state"][0]["exp_avg_codes"].float()
    _fails(optimizer, given, "exp_avg_codes: found torch.float32")
    _fails(optimizer, {**optimizer.state_dict(), "param_groups": []}, "number of parameter groups")


@on_threads(2)
def test_a_state_of_another_mesh_is_refused(rank: int, world_size: int) -> None:
    by_rows, by_columns = (on_mesh((2,), [Shard(dim)]) for dim in (0, 1))
    optimizer, other = AdamW8bit(by_rows), AdamW8bit(by_columns)
    train(by_rows, optimizer, range(1))
    with pytest.raises(ValueError, match=f"on rank {rank}.*another mesh with shardwise.checkpoint"):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state


def test_wrong_arguments_are_named() -> None:
    param = nn.Parameter(torch.ones(64, 128))
    with pytest.raises(ValueError, match="lr: found -1"):
        AdamW8bit([param], lr=-1.0)
    with pytest.raises(ValueError, match=r"betas: found \(0.9, 1.0\)"):
        AdamW8bit([param], betas=(0.9, 1.0))
    with pytest.raises(TypeError, match=r"parameter 1 of group 0, of shape \[2\].*float64"):
        AdamW8bit([param, nn.Parameter(torch.ones(2, dtype=torch.float64))])
    sparse = nn.Embedding(100, 64, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    optimizer = AdamW8bit([param, sparse.weight])
    param.grad = torch.ones_like(param)
    with pytest.raises(
        RuntimeError, match=r"parameter 1 of group 0: found a sparse .*sparse=False"
    ):
        optimizer.step()
    assert torch.equal(param, torch.ones(64, 128))


class Mlp(nn.Module):
    """Matrices whose blocks end inside rows, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(100, 300, bias=False)
        self.down = nn.Linear(300, 50)


def _made(cut: int | None) -> tuple[nn.Module, list[nn.Parameter], AdamW8bit]:
    """The model, cut along a dimension or not, and an optimizer without state."""
    model: nn.Module = Mlp()
    if cut is not None:
        fully_shard(model, shard_placement_fn=lambda param: Shard(min(cut, param.ndim - 1)))
    params = list(model.parameters())
    return model, params, AdamW8bit(params, lr=1e-2)


def _save(rank: int, world_size: int, folder: Path) -> list[Tensor]:
    model, params, optimizer = _made(0)
    train(params, optimizer, range(2))
    checkpoint.save(folder / "ours", model, optimizer)
    dcp.save(_state(model, optimizer), checkpoint_id=folder / "torchs")
    train(params, optimizer, range(2, 3))
    return everything(params, optimizer)


def _load(rank: int, world_size: int, folder: Path, cut: int) -> list[list[Tensor]]:
    return [_from_ours(folder, cut), _from_torchs(folder, cut)]


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def _from_ours(folder: Path, cut: int | None) -> list[Tensor]:
    model, params, optimizer = _made(cut)
    checkpoint.load(folder / "ours", model, optimizer)
    train(params, optimizer, range(2, 3))
    return everything(params, optimizer)


def _from_torchs(folder: Path, cut: int | None) -> list[Tensor]:
    model, params, optimizer = _made(cut)
    state = _state(model, optimizer)  # without a step, torch makes one without a gradient
    dcp.load(state, checkpoint_id=folder / "torchs")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(params, optimizer, range(2, 3))
    return everything(params, optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_go_on_on_any_mesh_as_one_process_does(threads: Ranks, tmp_path: Path) -> None:
    _, params, optimizer = _made(None)
    train(params, optimizer, range(3))
    wanted = everything(params, optimizer)
    for found in threads(_save, 3, tmp_path):
        assert_same(found, wanted)
    for both in threads(_load, 2, tmp_path, 1):
        for found in both:
            assert_same(found, wanted)
    assert_same(_from_ours(tmp_path, None), wanted)
    assert_same(_from_torchs(tmp_path, None), wanted)


@pytest.mark.parametrize(
    ("other", "words"), [(torch.optim.AdamW, "torch's AdamW"), (Lion, "shardwise.optim.Lion")]
)
def test_another_optimizer_does_not_take_codes_for_moments(
    other: type[torch.optim.Optimizer], words: str, tmp_path: Path
) -> None:
    model, params, optimizer = _made(None)
    train(params, optimizer, range(1))
    checkpoint.save(tmp_path / "codes", model, optimizer)
    takes = other(params)
    message = f"found exp_avg_codes, a state of shardwise.optim.AdamW8bit, from which {words}"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.load(tmp_path / "codes", model, takes)
    with pytest.raises(ValueError, match=message):
        offload(takes, f"disk:{tmp_path}").load_state_dict(optimizer.state_dict())
    assert not takes.state
