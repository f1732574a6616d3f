"""Random writes to shards, those of ``torch.nn.init`` above all, are those of one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwise import fully_shard, materialize
from tests.worlds import Ranks, on_threads

Draw = Callable[[torch.Tensor], Any]

_INITS: dict[str, Draw] = {
    "uniform_": nn.init.uniform_,
    "normal_": nn.init.normal_,
    "constant_": lambda p: nn.init.constant_(p, 2.0),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "trunc_normal_": nn.init.trunc_normal_,
    "trunc_normal_, in a tail": lambda p: nn.init.trunc_normal_(p, a=1.5, b=2.0),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda p: nn.init.kaiming_uniform_(p, a=5**0.5),
    "kaiming_normal_": lambda p: nn.init.kaiming_normal_(p, mode="fan_out"),
    "eye_": lambda p: nn.init.eye_(p) if p.ndim == 2 else p,
    "dirac_": lambda p: nn.init.dirac_(p) if p.ndim > 2 else p,
    "orthogonal_": lambda p: nn.init.orthogonal_(p) if p.ndim == 2 and len(p) >= p.shape[1] else p,
}
_OTHERS: dict[str, Draw] = {
    "data.normal_": lambda p: p.data.normal_(),
    "exponential_": lambda p: p.exponential_(),
    "random_": lambda p: p.random_(0, 9),
    "bernoulli_": lambda p: p.bernoulli_(torch.full_like(p, 0.5)),
    "add_ noise": lambda p: p.add_(torch.randn_like(p), alpha=0.1),
    "rand_like": torch.rand_like,
    "randint_like": lambda p: torch.randint_like(p, 9),
    "normal": lambda p: torch.normal(p, 2.0),
    "dropout": lambda p: F.dropout(torch.ones_like(p)),
    "native_dropout": lambda p: torch.native_dropout(p, 0.5, True)[0],
    "empty_like, normal_": lambda p: p.copy_(torch.empty_like(p).normal_()),
    "a generator": lambda p: p.normal_(generator=torch.Generator().manual_seed(7)),
    "a row": lambda p: p[len(p) // 2].normal_(),
    "the last row": lambda p: p.data[-1].fill_(3.0),
    "an element": lambda p: p.__setitem__((-1,) * p.ndim, 3.0),
}


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _check_draws(draws: dict[str, Draw], whole: nn.Parameter, sharded: nn.Parameter) -> None:
    """What is drawn, and what is drawn next, does not depend on how a parameter is sharded."""
    for name, draw in draws.items():
        found = []
        for param in (whole, sharded):
            torch.manual_seed(11)
            with torch.no_grad():
                param.fill_(0.25)
                made = draw(param)
                made = _full(made) if isinstance(made, torch.Tensor) else None
            found.append((made, _full(param.detach()), torch.rand(3)))
        (made, after, then), (other, after_other, then_other) = found
        assert torch.equal(after, after_other), f"{name} of {tuple(whole.shape)}"
        assert torch.equal(then, then_other), f"{name}: the next numbers"
        # A row that is read is the one of the rank that has it.
        assert made is None or made.shape != whole.shape or torch.equal(made, other), name


class _Param(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum()


_SHAPES = [(8, 4), (7, 5), (2, 4), (4, 3, 2), (9, 2, 3)]


@on_threads(3)
def test_shards_get_the_numbers_of_one_process(rank: int, world_size: int) -> None:
    for shape in _SHAPES:
        for dim in range(2):
            module = _Param(*shape)
            fully_shard(module, shard_placement_fn=lambda _, dim=dim: Shard(dim))
            _check_draws(_INITS | _OTHERS, _Param(*shape).weight, module.weight)


@on_threads(4)
def test_replicas_and_tensor_parallelism_change_nothing(rank: int, world_size: int) -> None:
    module = _Param(6, 5)
    replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(module, mesh=replicated)
    _check_draws(_INITS | _OTHERS, _Param(6, 5).weight, module.weight)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for dim in range(2):
        module = _Param(8, 6)
        cut = distribute_tensor(module.weight.detach(), mesh["tp"], [Shard(dim)])
        module.weight = nn.Parameter(cut)
        fully_shard(module, mesh=mesh["dp"])
        draws = {name: draw for name, draw in _INITS.items() if name != "orthogonal_"}
        _check_draws(draws, _Param(8, 6).weight, module.weight)


@on_threads(2)
def test_replicas_agree_though_their_seeds_differ(rank: int, world_size: int) -> None:
    module = _Param()
    fully_shard(module)  # a scalar: each rank has all of it
    torch.manual_seed(rank)
    nn.init.normal_(module.weight)
    torch.manual_seed(0)
    assert torch.equal(_full(module.weight.detach()), torch.empty(()).normal_())


_MODULES: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(6, 5),
    lambda: nn.Bilinear(3, 4, 5),
    lambda: nn.Embedding(7, 4, padding_idx=5),
    lambda: nn.EmbeddingBag(7, 4, padding_idx=1),
    lambda: nn.Conv2d(4, 6, 3),
    lambda: nn.ConvTranspose1d(4, 6, 3, groups=2),
    lambda: nn.LSTM(4, 5, num_layers=2),
    lambda: nn.GRUCell(4, 5),
    lambda: nn.LayerNorm(5),
    lambda: nn.BatchNorm1d(5),
    lambda: nn.GroupNorm(2, 4),
    lambda: nn.RMSNorm(5),
    lambda: nn.PReLU(3),
    lambda: nn.MultiheadAttention(6, 2, kdim=4, add_bias_kv=True),
    lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 10, [3, 6], div_value=2.0),
]


def _reset(module: nn.Module) -> None:
    torch.manual_seed(5)
    reset: Any = getattr(module, "reset_parameters", None)
    (reset or module._reset_parameters)()


@on_threads(3)
def test_modules_of_torch_reset_their_shards(rank: int, world_size: int) -> None:
    for make in _MODULES:
        whole = make()
        module = copy.deepcopy(whole)
        fully_shard(nn.Sequential(module))
        _reset(whole)
        _reset(module)
        for (name, one), other in zip(whole.named_parameters(), module.parameters(), strict=True):
            assert torch.equal(one, _full(other.detach())), f"{name} of {whole}"


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.head = nn.Linear(5, 3)

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                module.bias.data.uniform_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.head(x)
        return output


@on_threads(2)
def test_a_model_is_initialized_after_to_empty(rank: int, world_size: int) -> None:
    whole = _Net()
    torch.manual_seed(2)
    whole.init_weights()
    with torch.device("meta"):
        net = _Net()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    net.to_empty(device="cpu")
    torch.manual_seed(2)
    with torch.device("cpu"):  # a mode, whose frames are between torch.nn.init and the operator
        net.init_weights()
    for one, other in zip(whole.parameters(), net.parameters(), strict=True):
        assert torch.equal(one, _full(other.detach()))
    x = torch.randn(4, 5)
    torch.testing.assert_close(net(x), whole(x))


@pytest.mark.parametrize(
    ("draw", "shape"),
    [
        (lambda p: nn.init.sparse_(p, 0.5), (8, 4)),
        (nn.init.orthogonal_, (3, 4)),
        (nn.init.orthogonal_, (8, 3, 2)),
    ],
)
def test_what_needs_the_whole_tensor_is_refused(
    threads: Ranks, draw: Draw, shape: tuple[int, ...]
) -> None:
    def each_rank(rank: int, world_size: int) -> None:
        module = _Param(*shape)
        fully_shard(module)
        with pytest.raises(NotImplementedError, match=r"materialize\(model, init="):
            draw(module.weight)
        assert not module.weight.full_tensor().any(), "nothing was changed"

        with torch.device("meta"):
            module = _Param(*shape)
        fully_shard(module)
        torch.manual_seed(1)
        materialize(module, init=lambda m: draw(m.weight))
        torch.manual_seed(1)
        whole = _Param(*shape).weight
        draw(whole)
        assert torch.equal(_full(module.weight.detach()), whole)

    threads(each_rank, 2)


@on_threads(2)
def test_draws_that_take_more_numbers_for_larger_values_are_refused(
    rank: int, world_size: int
) -> None:
    module = _Param(4, 3)
    fully_shard(module)
    with pytest.raises(NotImplementedError, match="poisson"), torch.no_grad():
        torch.poisson(module.weight)


@on_threads(2)
def test_tensors_of_others_are_left_to_torch(rank: int, world_size: int) -> None:
    module = _Param(6, 2)
    fully_shard(module)
    mesh = module.weight.device_mesh
    other = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: not supported on CPUs
        other.normal_()
    torch.manual_seed(0)
    assert torch.equal(other.to_local(), torch.empty(2, 2).normal_())
    other[0].zero_()
    assert other.to_local()[0].all(), "a write to a row is lost"


@on_threads(2)
def test_rows_read_with_gradients_are_as_in_torch(rank: int, world_size: int) -> None:
    module = _Param(4, 2)
    fully_shard(module)
    module.weight[3].sum().backward()
    assert module.weight.grad is not None
    expected = torch.zeros(4, 2)
    expected[3] = 1.0
    assert torch.equal(_full(module.weight.grad), expected)
