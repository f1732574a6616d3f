"""Checkpoints that PyTorch/XLA's own FSDP saved, one file for each rank."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import checkpoint
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint import consolidate
from shardwise.checkpoint.formats.detect import Format, open_source
from shardwise.checkpoint.ranks.xla import consolidate_sharded_model_checkpoints, rank_file
from shardwise.checkpoint.tools.convert import convert
from shardwise.checkpoint.tools.survey import list_checkpoints

FILES = Path(__file__).parent / "torch_xla"
SEPARATOR = "_FSDP_SHARD_SEPARATOR_"
RANKS = {"plain": 2, "flat": 2, "flat3": 3, "dim0": 2, "bf16": 2}
NESTED = ("b.0.weight", "b.0.bias", "b.2.weight", "b.2.bias")


class Net(nn.Module):
    """The model in the files."""

    def __init__(self, *, scalar: bool) -> None:
        super().__init__()
        self.a = nn.Linear(7, 5)
        self.b = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 5))
        self.n = nn.BatchNorm1d(5)
        self.c = nn.Linear(5, 3, bias=False)
        if scalar:
            self.scale = nn.Parameter(torch.tensor(0.0))


def _full(name: str) -> dict[str, Tensor]:
    """The model of the files before it was sharded; buffers in bfloat16 have lost digits."""
    full: dict[str, Tensor] = torch.load(FILES / f"{name}_full.pt", weights_only=True)
    if name == "bf16":
        full |= {k: v.bfloat16().float() for k, v in full.items() if "running" in k}
    return full


def drawn(
    shards: Sequence[Sequence[str]], full: Mapping[str, Tensor], world_size: int, multiple: int
) -> dict[str, Tensor]:
    """What was drawn as ``exp_avg`` of each parameter of the files, here and of ``test_others``.

    Args:
        shards: the parameters of each shard, in the order of the optimizer.
        full: the parameters.
        world_size: the number of ranks.
        multiple: what each rank's rows are a multiple of; of 1, shards keep their shapes.
    """
    found = {}
    for i, members in enumerate(shards):
        sizes = [full[n].numel() for n in members]
        shape = full[members[0]].shape if multiple == 1 else torch.Size([sum(sizes)])
        rows = -(-shape[0] // (world_size * multiple)) * multiple
        parts = []
        for rank in range(world_size):
            generator = torch.Generator().manual_seed(100 + 10 * i + rank)
            parts.append(torch.rand(rows, *shape[1:], generator=generator))
        each = torch.cat(parts).flatten()[: sum(sizes)].split(sizes)
        found |= {n: part.view(full[n].shape) for n, part in zip(members, each, strict=True)}
    return found


def _saved_states(name: str) -> dict[str, Tensor]:
    full = _full(name)
    own = [n for n in full if n not in NESTED and "running" not in n and "num_" not in n]
    shards = [tuple(own), NESTED] if "flat" in name else [(n,) for n in (*own, *NESTED)]
    return drawn(shards, full, RANKS[name], 1 if name == "dim0" else 128)


def _assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", RANKS)
def test_full_tensors_and_states_come_of_real_files(name: str, tmp_path: Path) -> None:
    model, path = consolidate_sharded_model_checkpoints(
        f"{FILES}/{name}", save_path=f"{tmp_path}/all.pth"
    )

    _assert_equal(model, _full(name))
    assert path is not None
    optimizer = torch.load(path, weights_only=True)["optimizer"]
    _assert_equal(
        {param: state["exp_avg"] for param, state in optimizer["state"].items()},
        _saved_states(name),
    )
    assert all(state["step"] == 3 for state in optimizer["state"].values())
    assert set(optimizer["param_groups"][0]["params"]) == set(_saved_states(name))


@pytest.mark.parametrize("name", RANKS)
def test_any_file_of_the_set_stands_for_all(name: str, tmp_path: Path) -> None:
    source = rank_file(f"{FILES}/{name}", RANKS[name] - 1, RANKS[name])

    model = Net(scalar=name == "flat3")
    checkpoint.load_weights(source, model)
    _assert_equal(model.state_dict(), _full(name))

    convert(source, tmp_path / "ours", Format.SHARDWISE)
    again = Net(scalar=name == "flat3")
    optimizer = torch.optim.AdamW(again.parameters())
    checkpoint.load(tmp_path / "ours", again, optimizer)
    _assert_equal(again.state_dict(), _full(name))
    states = {n: optimizer.state[param]["exp_avg"] for n, param in again.named_parameters()}
    _assert_equal(states, _saved_states(name))
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_ls_lists_each_set_and_a_folder_of_several_asks_which(tmp_path: Path) -> None:
    found = list_checkpoints(FILES)
    assert {each.path.name: each.world_size for each in found} == {
        rank_file(name, 0, ranks).name: ranks for name, ranks in RANKS.items()
    }
    assert not any(each.problem for each in found)
    with pytest.raises(CheckpointError, match=r"of 5 checkpoints: .*name a file"):
        open_source(FILES)

    for file in FILES.glob("dim0_rank*"):
        shutil.copy(file, tmp_path)
    with open_source(tmp_path) as source:
        assert len(source.tensors) == 39
    rank_file(f"{tmp_path}/dim0", 1, 2).unlink()
    (listed,) = list_checkpoints(tmp_path)
    assert "the file of rank 1 is missing" in listed.problem


# ---- files like those of torch_xla, of models that it was not run with ----


class OnXla:
    """A tensor as ``torch.save`` pickles one that is on an XLA device."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild = torch._utils._rebuild_device_tensor_from_cpu_tensor  # type: ignore[attr-defined]
        return rebuild, (self.value, self.value.dtype, "xla:0", False)


def _write(
    prefix: Path,
    shards: Sequence[Sequence[str]],
    full: Mapping[str, Tensor],
    world_size: int,
    *,
    rows: bool = False,
    multiple: int = 128,
    groups: Sequence[Mapping[str, Any]] | None = None,
    make: Callable[[Tensor], Any] = Tensor.clone,
) -> None:
    """Write the files of all ranks: one shard for each of ``shards``, the others as buffers."""
    states = [_Rank(rank, world_size) for rank in range(world_size)]
    for number, members in enumerate(shards):
        whole = full[members[0]]
        if len(members) > 1 or not rows:
            whole = torch.cat([full[name].flatten() for name in members])
        each = -(-whole.shape[0] // (world_size * multiple)) * multiple
        padding = whole.new_zeros(world_size * each - whole.shape[0], *whole.shape[1:])
        joined = len(members) > 1
        inner = f"flat_param_{number}" if joined else f"_fpw_module.{members[0]}"
        size = whole.shape if joined else full[members[0]].shape
        for state, part in zip(states, torch.cat([whole, padding]).split(each), strict=True):
            state.add(f"_fsdp_wrapped_module.{inner}", size, part, make)
            if joined:
                names = [f"_fpw_module.{name}" for name in members]
                shapes, counts = (
                    [full[n].shape for n in members],
                    [full[n].numel() for n in members],
                )
                state.metadata["flatten_info"][f"_fsdp_wrapped_module.{inner}"] = (
                    names, shapes, counts,
                )  # fmt: skip
    for state in states:
        named = {name for members in shards for name in members}
        buffers = {f"_fsdp_wrapped_module.{n}": v for n, v in full.items() if n not in named}
        every = [{"lr": 0.5, "params": list(range(len(shards)))}]
        saved = {
            "model": state.model | buffers,
            "shard_metadata": state.metadata,
            "optimizer": {"state": state.momenta, "param_groups": groups or every},
        }
        torch.save(saved, rank_file(str(prefix), state.metadata["rank"], world_size))


class _Rank:
    """What one rank saves."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.model: dict[str, Any] = {}
        self.momenta: dict[int, Any] = {}
        self.metadata: dict[str, Any] = {
            "shard_info": {"": {}},
            "flatten_info": {},
            "buffer_info": {},
            "rank": rank,
            "world_size": world_size,
        }

    def add(
        self, original: str, size: torch.Size, part: Tensor, make: Callable[[Tensor], Any]
    ) -> None:
        name = f"_fsdp_shard.{original}".replace(".", SEPARATOR)
        info = {"_orig_size": size, "_orig_name": original}
        self.metadata["shard_info"][""][name] = info
        self.momenta[len(self.model)] = {"momentum_buffer": part * 2, "step": 7}
        self.model[name] = make(part)


def _tensors() -> dict[str, Tensor]:
    shapes = {"w": (11, 3), "s": (), "e": (0, 4), "c": (2, 3, 2), "v": (300,), "buffer": (2,)}
    return {n: torch.rand(s, generator=torch.Generator().manual_seed(3)) for n, s in shapes.items()}


ALONE = [("w",), ("s",), ("c",), ("v",)]
CASES: dict[str, Callable[[Path, Mapping[str, Tensor]], None]] = {
    "scalars and parameters smaller than the ranks": lambda p, t: _write(p, ALONE, t, 5),
    "one rank": lambda p, t: _write(p, ALONE, t, 1),
    "without padding": lambda p, t: _write(p, ALONE, t, 3, multiple=1),
    "rows": lambda p, t: _write(p, [("w",), ("c",), ("v",)], t, 4, rows=True, multiple=1),
    "joined, some empty": lambda p, t: _write(p, [("w", "s", "e"), ("c", "v")], t, 3),
    "of a device": lambda p, t: _write(p, ALONE, t, 2, make=OnXla),
}


@pytest.mark.parametrize("case", CASES)
def test_any_shapes_on_any_number_of_ranks(case: str, tmp_path: Path) -> None:
    full = _tensors()
    CASES[case](tmp_path / "x", full)

    model, path = consolidate_sharded_model_checkpoints(f"{tmp_path}/x", save_model=True)

    _assert_equal(model, full)
    assert path is not None
    state = torch.load(path, weights_only=True)["optimizer"]["state"]
    for name, values in state.items():
        assert torch.equal(values["momentum_buffer"], full[name] * 2), name
        assert values["step"] == 7
    whole, _ = consolidate_sharded_model_checkpoints(f"{tmp_path}/x", save_model=False)
    _assert_equal(whole, full)


def test_names_say_which_group_a_parameter_is_in(tmp_path: Path) -> None:
    names = [f"_fsdp_shard{SEPARATOR}_fsdp_wrapped_module{SEPARATOR}_fpw_module{SEPARATOR}{n}" for
             n in ("v", "w", "c", "s")]  # fmt: skip
    groups = [
        {"params": [0, 1], "param_names": names[:2], "lr": 1.0},
        {"params": [2, 3], "param_names": names[2:], "lr": 2.0},
    ]
    full = _tensors()
    order = [("v",), ("w",), ("c",), ("s",)]
    _write(tmp_path / "x", order, full, 2, groups=groups)

    _, path = consolidate_sharded_model_checkpoints(f"{tmp_path}/x")

    assert path is not None
    optimizer = torch.load(path, weights_only=True)["optimizer"]
    assert [group["params"] for group in optimizer["param_groups"]] == [["v", "w"], ["c", "s"]]
    for name, values in optimizer["state"].items():
        assert torch.equal(values["momentum_buffer"], full[name] * 2), name


def test_states_that_nothing_names_are_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = _tensors()
    groups = [{"params": [0, 1]}, {"params": [2, 3]}]
    _write(tmp_path / "x", ALONE, full, 2, groups=groups)
    reason = "4 parameters in 2 groups, without names"

    with pytest.warns(UserWarning, match=reason):
        model, path = consolidate_sharded_model_checkpoints(f"{tmp_path}/x")
    _assert_equal(model, full)
    assert path is not None
    assert list(torch.load(path, weights_only=True)) == ["model"]

    assert consolidate.main(["--ckpt_prefix", f"{tmp_path}/x", "--force"]) == 0
    assert reason in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=f"{reason}.*the model alone can be read"):
        convert(rank_file(f"{tmp_path}/x", 0, 2), tmp_path / "ours", Format.SHARDWISE)
    convert(rank_file(f"{tmp_path}/x", 0, 2), tmp_path / "hf", Format.HF)
    _assert_equal(_read(tmp_path / "hf"), full)


def _read(path: Path) -> dict[str, Tensor]:
    with open_source(path) as source:
        return {str(each[1]): source.full(each) for each in source.tensors if each[0] == "model"}


@pytest.mark.parametrize("state", [{}, {0: {"momentum_buffer": None}}])
def test_an_optimizer_without_tensors_comes_over(tmp_path: Path, state: dict[int, Any]) -> None:
    for rank in range(2):
        saved = torch.load(rank_file(f"{FILES}/flat", rank, 2), weights_only=True)
        groups = torch.optim.SGD([torch.ones(2)], lr=0.5).state_dict()["param_groups"]
        groups[0]["params"] = [0, 1]
        saved["optimizer"] = {"state": state, "param_groups": groups}
        torch.save(saved, rank_file(f"{tmp_path}/flat", rank, 2))

    convert(rank_file(f"{tmp_path}/flat", 0, 2), tmp_path / "ours", Format.SHARDWISE)

    model = Net(scalar=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpoint.load(tmp_path / "ours", model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5


# ---- files that do not tell the truth ----


def _info(state: dict[str, Any], **fields: Any) -> None:
    next(iter(state["shard_metadata"]["shard_info"][""].values())).update(fields)


def _flatten(state: dict[str, Any], change: Callable[[list[Any]], Any]) -> None:
    found = state["shard_metadata"]["flatten_info"]
    found.update({name: change([list(each) for each in value]) for name, value in found.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: _info(s, _orig_size=[2**40]), "bytes of shape|those of|gaps"),
        (lambda s: _info(s, _orig_size=[-1]), "an integer from 0"),
        (lambda s: _info(s, _orig_size=3), "a shape of at most"),
        (lambda s: _info(s, _orig_name=3), "a string"),
        (lambda s: s["shard_metadata"]["shard_info"].clear(), "has no ''"),
        (lambda s: s["shard_metadata"].update(shard_info=[]), "an object"),
        (lambda s: s["shard_metadata"].update(rank=9), "from 0 to 1"),
        (lambda s: s["shard_metadata"].update(world_size=3), "files of 2 ranks|a world of"),
        (lambda s: s["shard_metadata"].update(buffer_info={"n.running_mean": 1}), "an object"),
        (
            lambda s: s["shard_metadata"].update(
                buffer_info={"n.running_mean": {"_orig_dtype": "float32"}}
            ),
            "a dtype",
        ),
        (lambda s: _flatten(s, lambda found: found[:2]), "names, shapes and sizes"),
        (lambda s: _flatten(s, lambda found: [found[0][1:], *found[1:]]), "equal lengths"),
        (lambda s: _flatten(s, lambda found: [each[1:] for each in found]), "those of"),
        (
            lambda s: _flatten(s, lambda found: [*found[:2], [n + 1 for n in found[2]]]),
            "as many elements as its shape",
        ),
        (
            lambda s: _flatten(s, lambda found: [["x\x1b[2J"] * len(found[0]), *found[1:]]),
            "printable",
        ),
        (lambda s: _flatten(s, lambda found: [["x"] * len(found[0]), *found[1:]]), "twice"),
        (lambda s: s["model"].update({next(iter(s["model"])): torch.ones(64)}), "as on all ranks"),
        (lambda s: s["model"].update({next(iter(s["model"])): "x"}), "as on all ranks"),
        (lambda s: s.update(model=[]), "a state dict"),
        (lambda s: s.pop("shard_metadata"), "a dict with model and shard_metadata"),
    ],
)
def test_files_that_lie_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    for rank in range(2):
        state = torch.load(rank_file(f"{FILES}/flat", rank, 2), weights_only=True)
        if rank == 0:
            change(state)
        torch.save(state, rank_file(f"{tmp_path}/flat", rank, 2))

    with pytest.raises(CheckpointError, match=message):
        consolidate_sharded_model_checkpoints(f"{tmp_path}/flat")

    assert not list(tmp_path.glob("*consolidated*"))


def test_a_rank_of_ours_does_not_load_them_alone(tmp_path: Path) -> None:
    shutil.copy(rank_file(f"{FILES}/plain", 0, 2), rank_file(f"{tmp_path}/plain", 0, 1))
    with pytest.raises(CheckpointError, match="PyTorch/XLA's FSDP saved it; consolidate"):
        checkpoint.load_rank_checkpoint(f"{tmp_path}/plain", Net(scalar=False))
