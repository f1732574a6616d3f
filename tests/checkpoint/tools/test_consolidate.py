"""Full tensors in plain files: others load them, little memory is needed, all or nothing."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shardwise import checkpoint
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.beside import DestinationError
from shardwise.checkpoint.disk.entries import TensorInfo
from shardwise.checkpoint.formats.detect import Format
from shardwise.checkpoint.formats.hf import INDEX
from shardwise.checkpoint.formats.source import LEAST_BUFFER
from shardwise.checkpoint.formats.torchfile import Placeholder, read_tree, write_tree
from shardwise.checkpoint.tools.convert import consolidate, convert
from tests.checkpoint.meshes import Setup, expected, filled, wrong
from tests.corpus.models import make_model
from tests.programs import start_program
from tests.threads import run_threads

NAMES = ("mlp", "conv", "scalars", "llama-tied")
MIB = 2**20


def _save(rank: int, world_size: int, folder: Path) -> None:
    for name in NAMES:
        for last_dim in (False, True):
            model, optimizer = filled(Setup(name, (world_size,), last_dim=last_dim))
            extra = {"step": 3, "rng": torch.arange(9, dtype=torch.uint8)}
            checkpoint.save(folder / f"{name}{last_dim}", model, optimizer, extra)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of three ranks."""
    folder = tmp_path_factory.mktemp("saved")
    run_threads(_save, 3, folder)
    return folder


def _assert_right(name: str, state: dict[str, Tensor]) -> None:
    """Load a state dict into the unsharded model, by every name, and look at the values."""
    model = make_model(name, seed=7)
    model.load_state_dict(state, strict=True)
    assert not wrong(model, torch.optim.SGD(model.parameters())), name


# ---- what others load ----


@pytest.mark.parametrize(
    ("last_dim", "buffer"),
    [(False, LEAST_BUFFER), (True, LEAST_BUFFER), (False, 32 * MIB)],
    ids=["rows", "columns", "rows in one part"],
)
def test_plain_torch_and_safetensors_load_it(
    saved: Path, tmp_path: Path, last_dim: bool, buffer: int
) -> None:
    for name in NAMES:
        source = saved / f"{name}{last_dim}"

        consolidate(source, tmp_path / f"{name}.safetensors", buffer=buffer)
        consolidate(source, tmp_path / f"{name}.pt", buffer=buffer)
        consolidate(source, tmp_path / name, buffer=buffer, max_shard_size=150)

        _assert_right(name, load_file(tmp_path / f"{name}.safetensors"))
        _assert_right(name, torch.load(tmp_path / f"{name}.pt", weights_only=True))
        _assert_right(name, torch.load(tmp_path / f"{name}.pt", weights_only=True, mmap=True))
        parts = [load_file(path) for path in (tmp_path / name).glob("*.safetensors")]
        found = {key: value for part in parts for key, value in part.items()}
        if name == "llama-tied":  # a folder is as transformers writes it, which ties them again
            assert "lm_head.weight" not in found
            found["lm_head.weight"] = found["model.embed_tokens.weight"]
        _assert_right(name, found)
        if name != "scalars":
            assert (tmp_path / name / INDEX).exists()


def test_everything_goes_into_a_torch_file_if_asked_for(saved: Path, tmp_path: Path) -> None:
    consolidate(saved / "mlpFalse", tmp_path / "all.pth", everything=True)

    found = torch.load(tmp_path / "all.pth", weights_only=True)

    assert found["extra"]["step"] == 3
    assert found["extra"]["rng"].tolist() == list(range(9))
    _assert_right("mlp", found["model"])
    assert [group["lr"] for group in found["optimizer"]["param_groups"]] == [0.5, 0.001]
    for name, state in found["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.equal(value, expected(f"{name} {key}", value)), f"{name} {key}"


def test_the_newest_complete_checkpoint_of_a_run_is_taken(saved: Path, tmp_path: Path) -> None:
    for step, scale in ((1, 1.0), (20, 2.0), (3, 3.0), (100, 4.0)):
        layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(layer.weight, scale)
        checkpoint.save(tmp_path / "run" / "checkpoints" / f"step-{step:08}", layer)
    next((tmp_path / "run" / "checkpoints" / "step-00000100").glob("shard*")).unlink()

    consolidate(tmp_path / "run", tmp_path / "out.pt")

    assert torch.load(tmp_path / "out.pt")["weight"].item() == 2.0


# ---- or nothing at all ----


def test_a_damaged_piece_is_named_and_nothing_is_made(saved: Path, tmp_path: Path) -> None:
    model = nn.Linear(100, 100)
    checkpoint.save(tmp_path / "step", model)
    (file,) = (tmp_path / "step").glob("shard*")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)

    for destination in ("out.safetensors", "out.pt", "out"):
        with pytest.raises(
            CheckpointError, match=r"shard-00000-of-00001.safetensors, model\..*damaged"
        ):
            consolidate(tmp_path / "step", tmp_path / destination)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step"]


def test_what_is_there_is_refused_or_replaced_if_forced(saved: Path, tmp_path: Path) -> None:
    source = saved / "mlpFalse"
    for name in ("out.safetensors", "out.pt"):
        (tmp_path / name).write_text("a thesis")
        with pytest.raises(DestinationError, match=r"exists; .*--force"):
            consolidate(source, tmp_path / name)
        assert (tmp_path / name).read_text() == "a thesis"
        consolidate(source, tmp_path / name, force=True)
        assert (tmp_path / name).stat().st_size > 300
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(DestinationError, match=r"thesis\.tex, which is not part of a checkpoint"):
        consolidate(source, tmp_path / "out", force=True)
    (tmp_path / "out" / "thesis.tex").unlink()
    consolidate(source, tmp_path / "out", force=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    with pytest.raises(DestinationError, match="is, or contains, the checkpoint that is read"):
        consolidate(source, source, force=True)
    with pytest.raises(DestinationError, match="is, or contains, the checkpoint that is read"):
        consolidate(source, saved, force=True)
    with pytest.raises(DestinationError, match="no folder"):
        consolidate(source, tmp_path / "no" / "out.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "out.pt")
    with pytest.raises(DestinationError, match="not a regular file"):
        consolidate(source, tmp_path / "link.pt", force=True)
    assert checkpoint.is_complete(source)


@pytest.mark.parametrize(
    ("destination", "options", "message"),
    [
        ("x.ckpt", {}, "found a destination .ckpt"),
        ("x.txt", {}, "found a destination .txt, expected .*the name of a folder"),
        ("x.safetensors", {"everything": True}, "--everything requires"),
        ("x.pt", {"max_shard_size": 5}, "--max-shard-size requires"),
        ("x.pt", {"buffer": 100}, "buffer: found 100 bytes"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    saved: Path, tmp_path: Path, destination: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        consolidate(saved / "mlpFalse", tmp_path / destination, **options)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_what_was_there(saved: Path, tmp_path: Path) -> None:
    model = nn.Linear(500, 500)
    checkpoint.save(tmp_path / "step", model)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes: dict[str, Callable[[Path], None]] = {
        "out.safetensors": lambda path: consolidate(tmp_path / "step", path),
        "out.pt": lambda path: consolidate(tmp_path / "step", path),
        "out": lambda path: consolidate(tmp_path / "step", path),
        "dcp": lambda path: convert(tmp_path / "step", path, Format.DCP),
        "ours": lambda path: convert(tmp_path / "step", path, Format.SHARDWISE),
    }
    for name, write in writes.items():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(OSError, match=r"File too large|is the disk full"):
                write(tmp_path / name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step"]


# ---- with bounded memory ----

_MEASURE = """
import resource, shutil, sys
from pathlib import Path
from shardwise.checkpoint.tools.convert import consolidate
from shardwise.checkpoint.tools.convert import convert
from shardwise.checkpoint.tools.diff import differences
from shardwise.checkpoint.formats.detect import Format, open_source
from shardwise.checkpoint.tools.survey import verify

def run(source, to, buffer):
    to.mkdir()
    peak("nothing")
    consolidate(source, to / "a.safetensors", buffer=buffer)
    peak("safetensors")
    (to / "a.safetensors").unlink()
    consolidate(source, to / "a.pt", buffer=buffer)
    peak("torch")
    (to / "a.pt").unlink()
    consolidate(source, to / "a", buffer=buffer, max_shard_size=40_000_000)
    peak("folder")
    convert(source, to / "dcp", Format.DCP, buffer=buffer)
    peak("to dcp")
    convert(to / "dcp", to / "ours", Format.SHARDWISE, buffer=buffer)
    peak("from dcp")
    convert(to / "a", to / "from-hf", Format.SHARDWISE, buffer=buffer)
    peak("from hf")
    shutil.rmtree(to / "from-hf")
    with open_source(source) as a, open_source(to / "ours") as b:
        assert not list(differences(a, b, buffer=buffer))
    peak("diff")
    assert not list(verify(to / "ours", buffer=buffer))
    peak("verify")

base = None
def peak(name):
    now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if base is not None:
        print(name, (now - base) // 1024, flush=True)

small, large, out = map(Path, sys.argv[1:])
run(small, out / "small", 4096)  # whatever is imported late
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(large, out / "large", 8 * 2**20)
"""


class _Large(nn.Module):
    """72 MB: more than any buffer, in one large parameter and some smaller ones."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(500, 20_000))
        self.layers = nn.ParameterList([torch.full((2000, 1000), float(i)) for i in range(4)])


def test_memory_grows_by_the_buffer_and_not_by_the_checkpoint(saved: Path, tmp_path: Path) -> None:
    model = _Large()
    total = sum(param.nbytes for param in model.parameters())
    assert total == 72 * 10**6
    checkpoint.save(tmp_path / "large", model)

    (tmp_path / "out").mkdir()
    (tmp_path / "measure.py").write_text(_MEASURE)
    words = [tmp_path / "measure.py", saved / "mlpFalse", tmp_path / "large", tmp_path / "out"]
    program = start_program([str(word) for word in words], folder=tmp_path)
    out, err = program.communicate(timeout=200)

    assert program.returncode == 0, err
    growth = dict(line.rsplit(" ", 1) for line in out.splitlines())
    assert len(growth) == 9
    # The buffer of 8 MiB, and as much again for what allocators keep.
    for name, mib in growth.items():
        assert int(mib) < 32, f"{name}: grew by {mib} MiB; all: {growth}"


def test_a_torch_file_beyond_four_gigabytes_has_its_tensors_where_it_says(tmp_path: Path) -> None:
    huge = TensorInfo("U8", (2**32 + 100,))
    tree = {"huge": Placeholder("huge", huge), "last": Placeholder("last", TensorInfo("F32", (2,)))}
    path = tmp_path / "x.pt"
    data = {"huge": b"", "last": torch.tensor([1.0, 2.0]).numpy().tobytes()}

    with pytest.raises(AssertionError, match="huge: wrote another number of bytes"):
        write_tree(path, tree, lambda name: iter([memoryview(data[name])]))

    stored = read_tree(path)
    assert stored["huge"].info == huge
    assert stored["last"].start > 2**32
    assert path.stat().st_blocks * 512 < MIB, "what is not written takes no room"
