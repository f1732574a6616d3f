"""Modules that have a say in their state dicts are saved and loaded as with torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from shardwise import FullyShardedDataParallel, checkpoint, fully_shard, relayout
from shardwise.checkpoint import CheckpointError, load_weights, save_hf
from shardwise.checkpoint.formats import source as sources
from tests.worlds import on_threads


class Fused(nn.Module):
    """One weight, of which state dicts have two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(5, 3))
        self.register_state_dict_post_hook(self._split)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._join)  # type: ignore[no-untyped-call]

    @staticmethod
    def _split(module: Any, state: dict[str, Any], prefix: str, _: object) -> None:
        both = state.pop(f"{prefix}both")
        state[f"{prefix}first"], state[f"{prefix}second"] = torch.split(both, [2, 3])

    @staticmethod
    def _join(module: Any, state: dict[str, Any], prefix: str, *_: object) -> None:
        if f"{prefix}first" in state:
            parts = [state.pop(f"{prefix}{name}") for name in ("first", "second")]
            state[f"{prefix}both"] = torch.cat(parts)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.both.t()


class Cast(nn.Module):
    """State dicts have its weight in half precision, on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3).bfloat16().float())
        self.register_state_dict_post_hook(self._cast)  # type: ignore[no-untyped-call]

    @staticmethod
    def _cast(module: Any, state: dict[str, Any], prefix: str, _: object) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].bfloat16()


class Renamed(nn.Module):
    """Its layer had another name once, in version 1, and was transposed."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.ratio = torch.zeros(3)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *others: Any
    ) -> None:
        if f"{prefix}weight" in state:
            state[f"{prefix}linear.weight"] = state.pop(f"{prefix}weight")
        if (metadata.get("version") or 1) < 2 and f"{prefix}linear.weight" in state:
            state[f"{prefix}linear.weight"] = state[f"{prefix}linear.weight"].t()
        super()._load_from_state_dict(state, prefix, metadata, *others)  # type: ignore[no-untyped-call]


class Scaled(nn.Module):
    """What it derives from its weight is made anew after loading, and never saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.count = 0
        self.register_buffer("sums", torch.zeros(3), persistent=False)
        self.sums: Tensor
        self.register_state_dict_pre_hook(self._count)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(self._derive)  # type: ignore[no-untyped-call]

    @staticmethod
    def _count(module: Any, prefix: str, keep_vars: bool) -> None:
        module.count += 1

    @staticmethod
    def _derive(module: Any, incompatible: Any) -> None:
        incompatible.missing_keys.clear()
        weight = module.weight.detach()
        module.sums = (weight.full_tensor() if isinstance(weight, DTensor) else weight).sum(0)

    def get_extra_state(self) -> dict[str, Any]:
        return {"scale": 3, "table": torch.arange(3)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.loaded = state


class Model(nn.Module):
    """One of each, beside an ordinary layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.fused, self.cast, self.renamed = Fused(), Cast(), Renamed()
        self.scaled, self.plain = Scaled(), nn.Linear(3, 4)


def _sharded(seed: int, device: str = "cpu") -> Model:
    with torch.device(device):
        model = Model(seed)
    fully_shard(model.fused)
    return fully_shard(model)


def _full(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach()
        for name, param in model.named_parameters()
    }


def _check(model: nn.Module, expected: nn.Module, what: str) -> None:
    found, wanted = _full(model), _full(expected)
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), f"{what}: {name}"


def _write(folder: Path, model: Model) -> None:
    """Files of an unsharded model, as torch and safetensors write them."""
    torch.save(model.state_dict(), folder / "w.pt")
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    tensors["renamed.linear.weight"] = tensors["renamed.linear.weight"].t().contiguous()
    save_file(tensors, folder / "w.safetensors")  # without versions, so of the first one
    tensors["renamed.weight"] = tensors.pop("renamed.linear.weight")
    save_file(tensors, folder / "old.safetensors")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@on_threads(2)
def test_values_arrive_whatever_modules_make_of_them(
    rank: int, world_size: int, tmp_path: Path, device: str
) -> None:
    folder = tmp_path / str(rank)
    folder.mkdir()
    expected = Model(1)
    _write(folder, expected)
    for name in ("w.pt", "w.safetensors", "old.safetensors"):
        model = _sharded(2, device)
        load_weights(folder / name, model)
        _check(model, expected, name)
        assert torch.equal(model.scaled.sums, expected.scaled.weight.sum(0)), "hooks see the values"
        if name == "w.pt":
            assert model.scaled.loaded["scale"] == 3
    for each in model.modules():
        assert not any("Arrival" in str(hook) for hook in each._load_state_dict_pre_hooks.values())


@on_threads(2)
def test_what_is_saved_is_loaded_again(rank: int, world_size: int, tmp_path: Path) -> None:
    expected, model = Model(1), _sharded(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sum(each.square().sum() for each in model.fused(torch.ones(1, 3))).backward()
    optimizer.step()
    expected.fused.both = nn.Parameter(_full(model)["fused.both"])
    optimizer.zero_grad()

    checkpoint.save(tmp_path / "own", model, optimizer)
    save_hf(tmp_path / "hf", model)
    for name in ("own", "hf"):
        other = _sharded(2, "meta" if name == "hf" else "cpu")
        if name == "own":
            steps = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
            checkpoint.load(tmp_path / name, other, steps)
            found, wanted = (
                each.state[net.fused.both]["momentum_buffer"].full_tensor()
                for each, net in ((steps, other), (optimizer, model))
            )
            assert torch.equal(found, wanted)
            _check(other, expected, name)
        else:
            del other.renamed  # has no versions there, as with torch
            with pytest.raises(CheckpointError, match=r"renamed\.linear\.bias, .* not in the mod"):
                load_weights(tmp_path / name, other)
            load_weights(tmp_path / name, other, strict=False)
            assert torch.equal(_full(other)["fused.both"], expected.fused.both)
    names = load_file(tmp_path / "hf" / "model.safetensors").keys()
    assert {"fused.first", "fused.second"} <= names, "under the names of state dicts"

    target = _sharded(3)
    checkpoint.transfer((model, None), (target, None))
    _check(target, expected, "transfer")


@on_threads(2)
def test_full_state_dicts_of_wrapped_modules_are_full(rank: int, world_size: int) -> None:
    expected = Model(1)
    wrapped, other = FullyShardedDataParallel(Model(1)), FullyShardedDataParallel(Model(2))
    state = wrapped.state_dict()
    for name, value in expected.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(state[name], value), name
    other.load_state_dict(state)
    with FullyShardedDataParallel.summon_full_params(other):
        _check(other.module, expected, "wrapped")


class _Root(nn.Module):
    """Old files have a prefix. A hook of the root, which sees all names, removes it.

    It looks at values, but not at their elements.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.register_load_state_dict_pre_hook(self._rename)  # type: ignore[no-untyped-call]

    @staticmethod
    def _rename(module: Any, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name in list(state):
            value = state[name.removeprefix("model.")] = state.pop(name)
            assert value.size() == value.shape == (64, 64)
            assert value.dim() == value.ndim == 2
            assert value.numel() == 64 * len(value)
            assert value.is_floating_point()
            assert value.device.type == "cpu"
            assert not value.is_meta


class Older(nn.Linear):
    """Loads names that it had once."""

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        renamed = {name.removeprefix("old_"): value for name, value in state_dict.items()}
        return super().load_state_dict(renamed, *args, **kwargs)


@on_threads(2)
def test_a_sharded_module_loads_by_its_own_load_state_dict(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    plain = Older(3, 5)
    state = {f"old_{name}": value for name, value in plain.state_dict().items()}
    torch.save(state, tmp_path / f"{rank}.pt")
    model: Any = fully_shard(Older(3, 5))
    load_weights(tmp_path / f"{rank}.pt", model)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.get_parameter(name).full_tensor(), value), name


@on_threads(2)
def test_a_rank_reads_only_its_part_of_what_hooks_pass_on(
    rank: int, world_size: int, tmp_path: Path, monkeypatch: Any
) -> None:
    expected, model = _Root(1), _Root(2)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    file = tmp_path / f"{rank}.safetensors"
    save_file({f"model.{k}": v for k, v in expected.state_dict().items()}, file)
    seen: list[int] = []
    read = sources.ExtentReader.read

    def count(self: Any, extents: Any, box: Any, into: Tensor) -> None:
        seen.append(into.nbytes)
        read(self, extents, box, into)

    with monkeypatch.context() as patch:
        patch.setattr(sources.ExtentReader, "read", count)
        load_weights(file, model)
    _check(model, expected, "renamed")
    assert sum(seen) >= 4 * 64 * 64 * 4 // 2
    assert max(seen) == 64 * 64 * 4 // 2, "half of each weight"


def _made(change: Callable[[nn.Module], object]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    change(model)
    return model


def test_strict_means_that_values_have_arrived(tmp_path: Path) -> None:
    def drop(module: Any, state: dict[str, Any], prefix: str, *_: object) -> None:
        del state[f"{prefix}weight"]

    plain = _made(lambda model: None)
    save_file(plain.state_dict(), tmp_path / "w.safetensors")
    model = _made(lambda m: m[0].register_load_state_dict_pre_hook(drop))  # type: ignore[index]
    with pytest.raises(CheckpointError, match=r"0\.weight is not in the checkpoint"):
        load_weights(tmp_path / "w.safetensors", model)
    assert load_weights(tmp_path / "w.safetensors", model, strict=False) is None


def test_files_older_than_a_module_are_loaded_as_with_torch(tmp_path: Path) -> None:
    """Batch normalization did not count its batches once; nor do files without versions say so."""
    state = _made(lambda model: None).state_dict()
    del state["1.num_batches_tracked"]
    torch.save(state, tmp_path / "new.pt")
    torch.save(dict(state), tmp_path / "old.pt")
    model = _made(lambda each: each.register_buffer("none", None))
    load_weights(tmp_path / "old.pt", model)
    with pytest.raises(CheckpointError, match=r"1\.num_batches_tracked is not in"):
        load_weights(tmp_path / "new.pt", model)


def test_a_value_that_a_module_keeps_is_read(tmp_path: Path) -> None:
    class Keeps(nn.Module):
        table: Tensor

        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *_: object) -> None:
            self.table = state[f"{prefix}table"]

    save_file({"0.table": torch.arange(4.0)}, tmp_path / "w.safetensors")
    model = nn.Sequential(Keeps())
    load_weights(tmp_path / "w.safetensors", model)
    (tmp_path / "w.safetensors").unlink()
    assert torch.equal(model[0].table + 1, torch.arange(4.0) + 1)


class Takes(nn.Linear):
    """Takes values as its own memory, in one of several ways."""

    def __init__(self, how: str) -> None:
        torch.manual_seed(len(how))
        super().__init__(3, 3, bias=False)
        self.how = how

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *_: object) -> None:
        value = state[f"{prefix}weight"]
        match self.how:
            case "assigns":
                self.weight.data = value
            case "wraps":
                self.weight = nn.Parameter(value, requires_grad=False)
            case "wraps twice":
                self.weight = nn.Parameter(value)
                self.alike = self.weight
            case "reshapes":
                self.weight.data.copy_(value.unsqueeze_(0).detach()[0])


@pytest.mark.parametrize("how", ["assigns", "wraps", "wraps twice", "reshapes"])
def test_modules_may_take_values_for_their_own(tmp_path: Path, how: str) -> None:
    state = {"0.weight": torch.arange(9.0).view(3, 3)}
    save_file(state, tmp_path / "w.safetensors")
    expected, model = nn.Sequential(Takes(how)), nn.Sequential(Takes(how))
    expected.load_state_dict({k: v.clone() for k, v in state.items()})
    load_weights(tmp_path / "w.safetensors", model)
    found, wanted = model[0].weight, expected[0].weight
    assert type(found) is type(wanted) is nn.Parameter
    assert found.requires_grad == wanted.requires_grad
    assert torch.equal(found, wanted)
    if how == "wraps twice":
        assert model[0].alike is found
    checkpoint.save(tmp_path / "saved", model)


@on_threads(2)
def test_a_value_assigned_to_the_data_of_a_shard_is_refused(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """Torch accepts it, and goes on with the shard as it was."""
    save_file({"0.weight": torch.zeros(3, 3)}, tmp_path / f"{rank}.safetensors")
    model = nn.Sequential(Takes("assigns"))
    fully_shard(model)
    with pytest.raises(CheckpointError, match=r"0\.weight: its module assigned a tensor to \.data"):
        load_weights(tmp_path / f"{rank}.safetensors", model)


def _times_two(value: Tensor) -> None:
    value.mul_(2)


def _times_two_in_data(value: Tensor) -> None:
    value.data.mul_(2)


def _times_two_in_numpy(value: Tensor) -> None:
    array = value.numpy()
    array *= 2


@pytest.mark.parametrize("change", [_times_two, _times_two_in_data, _times_two_in_numpy])
def test_what_a_hook_of_the_root_writes_into_values_arrives(
    tmp_path: Path, change: Callable[[Tensor], None]
) -> None:
    def write(module: Any, state: dict[str, Any], *_: object) -> None:
        for value in state.values():
            change(value)

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    state = {name: torch.rand_like(value) for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    model.register_load_state_dict_pre_hook(write)  # type: ignore[no-untyped-call]
    load_weights(tmp_path / "w.safetensors", model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name] * 2), name


@on_threads(2)
def test_every_way_into_a_model_goes_by_its_hooks(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    expected, saved = Model(1), _sharded(1)
    if rank == 0:
        torch.save(expected.state_dict(), tmp_path / "w.pt")
    checkpoint.save_rank_checkpoint(str(tmp_path / "ranks"), saved)
    dist.barrier()

    loaded = _sharded(2)
    checkpoint.load_rank_checkpoint(str(tmp_path / "ranks"), loaded)
    _check(loaded, expected, "one file per rank")
    relayout(loaded, strategy="no-shard")
    _check(loaded, expected, "relayout")

    theirs = Model(2)
    for module in (theirs.fused, theirs):
        torch.distributed.fsdp.fully_shard(module)
    parallel = nn.parallel.DistributedDataParallel(Model(2))
    for model in (theirs, parallel):
        load_weights(tmp_path / "w.pt", model)
        checkpoint.save(tmp_path / type(model).__name__, model)
        other = _sharded(3)
        checkpoint.load(tmp_path / type(model).__name__, other)
        _check(other, expected, type(model).__name__)

    wrapped = Model(2)
    wrapped.fused = FullyShardedDataParallel(checkpoint_wrapper(wrapped.fused))  # type: ignore[assignment]
    wrapped = FullyShardedDataParallel(wrapped)  # type: ignore[assignment]
    load_weights(tmp_path / "w.pt", wrapped)
    checkpoint.save(tmp_path / "wrapped", wrapped)
    other = _sharded(3)
    checkpoint.load(tmp_path / "wrapped", other)
    _check(other, expected, "wrapped")
