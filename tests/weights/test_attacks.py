"""What trainers, readers, disks and strangers do to published weights, and what comes of it."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.base.errors import CheckpointError
from tests.harness import run_ranks
from tests.weights.constant import constant_model, set_weights
from tests.weights.names import keep_names_in

_FORK = multiprocessing.get_context("fork")
_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8, torch.int8),
    *(torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64),
]


def _in_child(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a forked process; return what it returns, or the text of its error."""
    results = _FORK.SimpleQueue()

    def run() -> None:
        try:
            results.put(function(*args))
        except BaseException as error:
            results.put(f"{type(error).__name__}: {error}")

    process = _FORK.Process(target=run)
    process.start()
    found = results.get()
    process.join()
    return found


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may use."""
    found = Path(tempfile.mkdtemp(dir="/tmp"))
    found.chmod(0o777)
    yield found
    shutil.rmtree(found)


def _become_another_user() -> None:
    os.setgroups([])
    os.setgid(12345)
    os.setuid(12345)


@pytest.fixture(params=["memory", "folder"])
def to(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """Where weights are published."""
    return None if request.param == "memory" else str(tmp_path / "published")


# -- models that change ----------------------------------------------------------------------------


class _Everything(nn.Module):
    """Every dtype, scalars, empty tensors, ties and buffers."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in _DTYPES:
            values = torch.arange(200).remainder(2).to(dtype)
            self.register_buffer(f"of_{dtype}".replace(".", "_"), values)
        self.scalar = nn.Parameter(torch.tensor(3.0))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.tied = self.turned
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("unsaved", torch.ones(2), persistent=False)

    @torch.no_grad()
    def change(self) -> None:
        for each in (*self.buffers(), *self.parameters()):
            if each.numel():
                flat = each.reshape(-1).clone().view(_BITS[each.itemsize])
                flat[-1] ^= 1  # another value of any dtype, a bool included
                each.copy_(flat.view(each.dtype).view(each.shape))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_every_dtype_and_shape_follows_every_change(to: str | None, default: str) -> None:
    model = _Everything()
    with torch.device(default), shardwise.publish(model, "policy", to=to) as weights:
        subscription = shardwise.subscribe("policy", at=to)
        for _ in range(3):
            expected = model.state_dict()
            found = dict(subscription)
            assert found.keys() == expected.keys() - {"tied"}
            for name, each in found.items():
                assert each.dtype == expected[name].dtype and each.shape == expected[name].shape
                assert each.tolist() == expected[name].tolist(), name
            with torch.device("cpu"):
                model.change()
            weights.update()


def test_a_model_without_tensors_is_published(to: str | None) -> None:
    with shardwise.publish(nn.Module(), "policy", to=to) as weights:
        weights.update()
        assert dict(shardwise.subscribe("policy", at=to)) == {}


def test_parameters_may_be_replaced_frozen_removed_and_converted(to: str | None) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with shardwise.publish(model, "policy", to=to) as weights:
        subscription = shardwise.subscribe("policy", at=to)

        def replace() -> None:
            model[0].weight = nn.Parameter(torch.full((4, 4), 7.0))

        def freeze() -> None:
            model[0].requires_grad_(False)

        def shrink() -> None:
            model[1] = nn.Linear(4, 2)

        def remove() -> None:
            del model[1]

        def tie() -> None:
            model.append(nn.Linear(4, 4))
            model[1].weight = model[0].weight

        for change in (replace, freeze, shrink, remove, tie, model.bfloat16, model.double):
            kept = dict(subscription)
            before = {name: each.clone() for name, each in kept.items()}
            change()
            weights.update()
            expected = model.state_dict()
            if change is not replace and len(model) > 1 and model[1].weight is model[0].weight:
                del expected["1.weight"]
            found = dict(subscription)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found)
            assert all(found[name].dtype == expected[name].dtype for name in found)
            assert all(torch.equal(kept[name], before[name]) for name in kept)
            del kept, found


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_it_is_updated_and_read_in_any_mode(to: str | None, mode: Any) -> None:
    model = constant_model(1)
    with mode(), contextlib.ExitStack() as stack:
        weights = stack.enter_context(shardwise.publish(model, "policy", to=to))
        subscription = shardwise.subscribe("policy", at=to)
        dict(subscription)
        again = stack.pop_all()
    with again:
        for value in (2, 3):
            with torch.no_grad():
                model.weight[0, 0] = value
            weights.update()
            assert dict(subscription)["weight"][0, 0] == value
            with mode():
                weights.update()
                assert torch.equal(dict(subscription)["weight"], model.weight)
                weights.update()


def _updates_in_backward(rank: int, world_size: int, names: str, to: str | None) -> None:
    keep_names_in(names)
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    for layer in model:
        shardwise.fully_shard(layer)
    shardwise.fully_shard(model)
    expected = {name: each.full_tensor() for name, each in model.state_dict().items()}
    weights = shardwise.publish(model, "policy", to=to)
    subscription = shardwise.subscribe("policy", at=to)

    def update(grad: torch.Tensor) -> None:
        weights.update()

    def update_after(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(update)

    handle = model[1].register_forward_hook(update_after)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
    handle.remove()
    assert weights.version == 3
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 6)).sum().backward()
    weights.update()
    found = dict(subscription)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    dist.barrier()
    weights.close()


def test_an_update_in_backward_publishes_the_shards_as_they_are(
    tmp_path: Path, to: str | None
) -> None:
    run_ranks(_updates_in_backward, 2, str(tmp_path / "names"), to)


# -- ranks that differ -----------------------------------------------------------------------------


def _other_tensors(model: Any, rank: int) -> contextlib.AbstractContextManager[Any]:
    if rank == 1:
        model.register_buffer("own", torch.zeros(3))
    return contextlib.nullcontext()


def _no_memory(model: Any, rank: int) -> contextlib.AbstractContextManager[Any]:
    if rank == 1:
        model.register_buffer("own", torch.zeros(3, device="meta"))
    return contextlib.nullcontext()


@contextlib.contextmanager
def _breaks_while_writing(model: Any, rank: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(torch.Tensor, "copy_", None)
            patch.setattr(torch.Tensor, "contiguous", None)
        yield


#: What may go wrong on one rank, and what all are told.
_FAILURES: list[tuple[Callable[..., contextlib.AbstractContextManager[Any]], str]] = [
    (_other_tensors, r"found 2 tensors, and on rank 1 .* 3, of other"),
    (_no_memory, r"rank 1: .*own: is on the meta device"),
    (_breaks_while_writing, "rank 1: TypeError"),
]


def _fails_on_one_rank(rank: int, world_size: int, names: str, to: str | None) -> None:
    keep_names_in(names)
    model: Any = shardwise.fully_shard(nn.Linear(5, 7))
    with shardwise.publish(model, "policy", to=to) as weights:
        subscription = shardwise.subscribe("policy", at=to)
        before = {name: each.clone() for name, each in dict(subscription).items()}
        for version, (failure, told) in enumerate(_FAILURES, 1):
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1)
            with failure(model, rank), pytest.raises(CheckpointError, match=told):
                weights.update()
            found = dict(subscription)
            assert subscription.version == version
            assert all(torch.equal(found[name], before[name]) for name in found)
            dist.barrier()
            if "own" in dict(model.named_buffers()):
                del model.own
            assert weights.update() == subscription.wait() == version + 1
            found = dict(subscription)
            assert found.keys() == before.keys()
            assert all(torch.equal(found[name], before[name] + 1) for name in found)
            before = {name: each.clone() for name, each in found.items()}
            dist.barrier()
        model.register_buffer("own", torch.zeros(3))
        weights.update()
        assert dict(subscription).keys() == {"weight", "bias", "own"}
        dist.barrier()


def test_if_one_rank_fails_all_do_and_readers_keep_the_version_before(
    tmp_path: Path, to: str | None
) -> None:
    run_ranks(_fails_on_one_rank, 2, str(tmp_path / "names"), to)


def _dies_while_writing(rank: int, world_size: int, names: str, to: str | None, dying: int) -> str:
    keep_names_in(names)
    model: Any = nn.Linear(5, 7)
    shardwise.fully_shard(model)
    weights = shardwise.publish(model, "policy", to=to)
    kept = dict(shardwise.subscribe("policy", at=to))
    before = {name: each.clone() for name, each in kept.items()}
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    dist.barrier()
    if rank == dying:
        torch.Tensor.copy_ = torch.Tensor.contiguous = _die  # type: ignore[method-assign,assignment]
    with pytest.raises(CheckpointError, match=f"rank {dying}.* lost") as raised:
        weights.update()
    assert all(torch.equal(kept[name], before[name]) for name in kept)
    if to is not None:
        found = dict(shardwise.subscribe("policy", at=to))
        assert all(torch.equal(found[name], before[name]) for name in found)
    return str(raised.value)


def _die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_is_killed_while_it_writes_is_named_by_the_other(
    tmp_path: Path, to: str | None, dying: int
) -> None:
    names = str(tmp_path / "names")
    outcomes = run_ranks(
        _dies_while_writing, 2, names, to, dying, expect_failures=True, pg_timeout=600
    )
    assert outcomes[dying].exitcode == -signal.SIGKILL
    assert outcomes[1 - dying].ok, outcomes[1 - dying].error
    assert outcomes[1 - dying].seconds < 60
    with shardwise.publish(constant_model(2), "policy", to=to) as weights:
        assert weights.version == 2
        assert dict(shardwise.subscribe("policy", at=to))["weight"].eq(2).all()


def _publishes_apart(rank: int, world_size: int, names: str, to: str | None) -> None:
    keep_names_in(names)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = groups[rank // 2]
    first = None
    if rank < 2:
        first = shardwise.publish(constant_model(1), "policy", to=to, group=pair)
    dist.barrier()
    if rank >= 2:
        with pytest.raises(CheckpointError, match=r"rank 2: .* found process \d+ on .* doing that"):
            shardwise.publish(constant_model(2), "policy", to=to, group=pair)
    dist.barrier()
    if first is not None:
        first.close()
    dist.barrier()
    if rank >= 2:
        with shardwise.publish(constant_model(2), "policy", to=to, group=pair) as weights:
            assert weights.version == 2
            assert dict(shardwise.subscribe("policy", at=to))["weight"].eq(2).all()
            dist.barrier(pair)


def test_other_ranks_of_a_job_do_not_take_a_name(tmp_path: Path, to: str | None) -> None:
    run_ranks(_publishes_apart, 4, str(tmp_path / "names"), to)


# -- processes -------------------------------------------------------------------------------------


def _publish_and_fork(to: str | None, ready: Any) -> None:
    weights = shardwise.publish(constant_model(1), "policy", to=to)
    weights.update()
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    ready.put(child)
    time.sleep(60)


def test_a_name_is_free_once_its_publisher_is_killed_whatever_it_has_forked(
    to: str | None,
) -> None:
    ready = _FORK.SimpleQueue()
    publisher = _FORK.Process(target=_publish_and_fork, args=(to, ready))
    publisher.start()
    child = ready.get()
    subscription = shardwise.subscribe("policy", at=to)
    kept = dict(subscription)
    publisher.kill()
    publisher.join()
    try:
        with shardwise.publish(constant_model(2), "policy", to=to) as weights:
            assert weights.version == subscription.wait() == 3
            assert dict(subscription)["weight"].eq(2).all()
            assert kept["weight"].eq(1).all()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_process_subscribes_but_does_not_update(to: str | None) -> None:
    model = constant_model(4)
    with shardwise.publish(model, "policy", to=to) as weights:
        subscription = shardwise.subscribe("policy", at=to)
        dict(subscription)

        def reads() -> float:
            return float(dict(subscription)["weight"].sum())

        def updates() -> None:
            weights.update()

        def closes() -> str:
            weights.close()
            return "closed"

        assert _in_child(reads) == 4 * 64 * 64
        assert "ValueError: publication: found it in process" in _in_child(updates)
        assert _in_child(closes) == "closed"
        set_weights(model, 5)
        assert weights.update() == 2
        assert dict(subscription)["weight"].eq(5).all()
        with pytest.raises(CheckpointError, match="doing that"):
            shardwise.publish(model, "policy", to=to)


def test_threads_read_while_versions_come(to: str | None) -> None:
    model = constant_model(0)
    torn: list[Any] = []
    done = threading.Event()

    def read() -> None:
        subscription = shardwise.subscribe("policy", at=to)
        while not done.is_set():
            found = dict(subscription)["weight"]
            if found.min() != found.max():
                torn.append(found)

    with shardwise.publish(model, "policy", to=to, buffers=6) as weights:
        threads = [threading.Thread(target=read) for _ in range(2)]
        for each in threads:
            each.start()
        for value in range(1, 20):
            set_weights(model, value)
            with contextlib.suppress(
                CheckpointError
            ):  # both read, and the garbage is not collected
                weights.update()
        done.set()
        for each in threads:
            each.join()
    assert not torn


def test_a_reader_of_what_was_closed_goes_on_with_what_follows(to: str | None) -> None:
    weights = shardwise.publish(constant_model(1), "policy", to=to)
    weights.update()
    subscription = shardwise.subscribe("policy", at=to, timeout=0.2)
    kept = dict(subscription)
    weights.close()
    with pytest.raises(CheckpointError, match="found version 2 again"):
        subscription.wait()
    with shardwise.publish(constant_model(2), "policy", to=to):
        assert subscription.wait() == 3
        assert dict(subscription)["weight"].eq(2).all()
        assert kept["weight"].eq(1).all()


def _hold(to: str | None, ready: Any) -> None:
    tensors = dict(shardwise.subscribe("policy", at=to))
    ready.put(len(tensors))
    time.sleep(60)


def test_a_reader_that_is_killed_holds_nothing() -> None:
    model = constant_model(1)
    with shardwise.publish(model, "policy", buffers=2) as weights:
        ready = _FORK.SimpleQueue()
        readers = [_FORK.Process(target=_hold, args=(None, ready)) for _ in range(2)]
        for each in readers:
            each.start()
            ready.get()
        assert weights.update() == 2
        readers[0].kill()
        readers[0].join()
        with pytest.raises(CheckpointError, match=f"found readers .*process {readers[1].pid}"):
            weights.update()
        readers[1].kill()
        readers[1].join()
        assert weights.update() == 3


def test_a_publication_that_is_forgotten_gives_its_name_back(to: str | None) -> None:
    shardwise.publish(constant_model(1), "policy", to=to)
    gc.collect()
    with shardwise.publish(constant_model(2), "policy", to=to) as weights:
        assert weights.version == 2


# -- names and what is in TMPDIR -------------------------------------------------------------------


def _pointer(tmp_path: Path) -> Path:
    [found] = (tmp_path / "names").rglob("*.pointer")
    return found


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_pointer_to_a_process_of_another_user_is_not_followed(
    open_folder: Path, tmp_path: Path
) -> None:
    def read() -> None:
        _become_another_user()
        keep_names_in(open_folder)
        subscription = shardwise.subscribe("policy", timeout=0.01)
        home = open_folder / "shardwise-12345"
        (home / "policy.pointer").write_text(json.dumps(said))
        dict(subscription)

    with shardwise.publish(constant_model(), "policy"):
        said = json.loads(_pointer(tmp_path).read_text())
        assert "CheckpointError: subscribing to 'policy': found no version" in _in_child(read)


def test_a_pointer_from_before_the_last_boot_is_waited_over(tmp_path: Path) -> None:
    with shardwise.publish(constant_model(), "policy"):
        said = json.loads(_pointer(tmp_path).read_text())
    _pointer(tmp_path).write_text(json.dumps(said | {"host": "an earlier boot"}))
    subscription = shardwise.subscribe("policy", timeout=0.01)
    with pytest.raises(CheckpointError, match="found no version"):
        dict(subscription)
    with shardwise.publish(constant_model(), "policy"):
        dict(subscription)
        assert subscription.version == 2


def test_names_are_not_cleaned_away_or_come_back(tmp_path: Path) -> None:
    model = constant_model(1)
    with shardwise.publish(model, "policy") as weights:
        subscription = shardwise.subscribe("policy", timeout=0.01)
        lock = _pointer(tmp_path).with_suffix(".lock")
        os.utime(lock, (0, 0))
        weights.update()
        assert lock.stat().st_mtime > 0
        shutil.rmtree(_pointer(tmp_path).parent)
        with pytest.raises(CheckpointError, match="found no version"):
            dict(subscription)
        assert weights.update() == 3
        assert dict(subscription)["weight"].eq(1).all()


# -- full disks, and folders that cannot be used ---------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mounted)]
    if os.getuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def _fill(folder: Path) -> Path:
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return folder / "filler"


def test_a_full_folder_keeps_the_version_before(small: Path) -> None:
    model = constant_model(1, 128)  # 64 KiB
    with shardwise.publish(model, "policy", to=small) as weights:
        subscription = shardwise.subscribe("policy", at=small)
        filler = _fill(small)
        for value in (2, 3):
            set_weights(model, value)
            with pytest.raises(CheckpointError, match="No space left"):
                weights.update()
            assert weights.version == 1
            assert dict(subscription)["weight"].eq(1).all()
        filler.unlink()
        assert weights.update() == 2
        assert dict(subscription)["weight"].eq(3).all()


def test_a_full_tmpdir_keeps_the_version_before(small: Path, monkeypatch: Any) -> None:
    keep_names_in(small)
    model = constant_model(1)
    with shardwise.publish(model, "policy") as weights:
        subscription = shardwise.subscribe("policy")
        filler = _fill(small)
        set_weights(model, 2)
        for _ in range(3):
            with pytest.raises(CheckpointError, match="No space left"):
                weights.update()
        assert dict(subscription)["weight"].eq(1).all()
        filler.unlink()
        assert weights.update() == 2
        assert dict(subscription)["weight"].eq(2).all()


def test_memory_that_could_not_be_had_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = constant_model(1)
    with shardwise.publish(model, "policy") as weights:
        asked = []

        def refuse(descriptor: int, offset: int, length: int) -> None:
            asked.append(length)
            raise OSError(12, "Cannot allocate memory")

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", refuse)
            for count in (1, 2):
                with pytest.raises(CheckpointError, match="Cannot allocate memory"):
                    weights.update()
                assert len(asked) == count
        assert weights.update() == 2
        assert dict(shardwise.subscribe("policy"))["weight"].eq(1).all()


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_folder_without_permission_is_named(open_folder: Path) -> None:
    with shardwise.publish(constant_model(), "policy", to=open_folder):
        pass
    (open_folder / "policy").chmod(0o700)

    def become(call: Callable[[], Any]) -> Any:
        _become_another_user()
        return call()

    for call in (
        lambda: dict(shardwise.subscribe("policy", at=open_folder, timeout=0.01)),
        lambda: shardwise.subscribe("policy", at=open_folder).wait(0.01),
        lambda: shardwise.publish(constant_model(), "policy", to=open_folder),
    ):
        found = _in_child(become, call)
        assert "CheckpointError" in found and "policy" in found, found
        assert "Permission denied" in found, found


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "policy").touch()
    for call in (dict, shardwise.Subscription.wait):
        with pytest.raises(CheckpointError, match="policy: cannot be read"):
            call(shardwise.subscribe("policy", at=tmp_path, timeout=0.01))


# -- what is in a folder ---------------------------------------------------------------------------


def test_links_are_not_versions(tmp_path: Path) -> None:
    with shardwise.publish(constant_model(1), "policy", to=tmp_path / "a"):
        pass
    with shardwise.publish(constant_model(2), "policy", to=tmp_path / "b") as weights:
        root = tmp_path / "b" / "policy"
        (root / "version-00000007").symlink_to(tmp_path / "a/policy/version-00000001")
        subscription = shardwise.subscribe("policy", at=tmp_path / "b")
        assert dict(subscription)["weight"].eq(2).all()
        assert weights.update() == 2
        assert (root / "version-00000007").is_symlink()


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/publisher.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(CheckpointError, match=r"publisher\.lock"):
        shardwise.publish(constant_model(), "policy", to=tmp_path)
    assert not (tmp_path / "victim").exists()


def test_a_folder_that_was_made_anew_is_read_anew(tmp_path: Path) -> None:
    with shardwise.publish(constant_model(1), "policy", to=tmp_path):
        subscription = shardwise.subscribe("policy", at=tmp_path)
        dict(subscription)
    shutil.rmtree(tmp_path / "policy")
    with shardwise.publish(constant_model(2), "policy", to=tmp_path):
        assert subscription.wait() == 1
        assert dict(subscription)["weight"].eq(2).all()


def test_a_version_of_another_format_is_refused(tmp_path: Path) -> None:
    with shardwise.publish(constant_model(1), "policy", to=tmp_path):
        about = tmp_path / "policy/version-00000001/version.json"
        said = json.loads(about.read_text())
        for changed, message in (
            (said | {"format": 2}, "version-00000001: found format 2, expected 1"),
            (said | {"more": 1}, "version-00000001: found .*expected the fields of Version"),
            (said | {"number": 5}, "version-00000001: found version 5 in it"),
        ):
            about.write_text(json.dumps(changed))
            with pytest.raises(CheckpointError, match=message):
                dict(shardwise.subscribe("policy", at=tmp_path))
