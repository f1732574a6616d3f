"""``offload``: states are elsewhere between steps, and numbers are those of states in memory."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from shardwise import checkpoint
from shardwise.base.errors import OffloadError, StepInterruptedError
from shardwise.base.places import folder_of_place
from shardwise.base.scratch import file as scratch
from shardwise.base.scratch import file as scratch_file
from shardwise.diloco import DiLoCo
from shardwise.optim import Adafactor, AdamW8bit, Lion, Muon, in_backward, muon_groups, offload
from shardwise.optim.offloaded import masters, optimizer, stores
from shardwise.optim.offloaded.states import kept_form
from tests.corpus.gathering import gather, own_part, part_of
from tests.harness import run_ranks
from tests.sharding.nets import (
    WIDTH,
    batches,
    hybrid_mesh,
    loss_of,
    run_over,
    seeded,
    sharded_modules,
    sharded_net,
)
from tests.sharding.nets import Net as SmallNet
from tests.worlds import Ranks, on_processes, on_threads

Make = Callable[[Any], torch.optim.Optimizer]


def staging_of(optim: optimizer.OffloadedOptimizer) -> int:
    """Bytes of memory that states pass through."""
    assert optim._kept is not None
    return optim._kept._staging.nbytes


def _keep_everything() -> None:
    """Have the smallest tensors kept elsewhere, and a few parameters step together."""
    scratch_file.SMALLEST = 1
    optimizer._TOGETHER = 40


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_file, "SMALLEST", 1)
    monkeypatch.setattr(optimizer, "_TOGETHER", 40)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


OPTIMIZERS: dict[str, Make] = {
    "adamw": adamw,
    "fused": lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.05, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "no states": lambda params: torch.optim.SGD(params, lr=0.05),
    "averages": lambda params: torch.optim.ASGD(params, lr=0.05),
    "adamw8bit": lambda params: AdamW8bit(params, lr=0.05),
    "lion": lambda params: Lion(params, lr=0.05, weight_decay=0.1),
    "adafactor": lambda params: Adafactor(params, lr=0.05, weight_decay=0.1),
}


class Net(nn.Module):
    """Matrices, a vector, a scalar, an unused parameter and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 70)
        self.down = nn.Linear(70, 6)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(50))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x).relu()) * self.gain + self.frozen
        return out


def _nets(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    net = seeded(Net).to(dtype)
    return net, copy.deepcopy(net)


def _step(net: nn.Module, optim: torch.optim.Optimizer, step: int) -> None:
    dtype = next(net.parameters()).dtype
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
    loss_of(net, x).backward()
    optim.step()
    optim.zero_grad()


def assert_same(
    mine: nn.Module, optim: torch.optim.Optimizer, other: nn.Module, theirs: torch.optim.Optimizer
) -> None:
    """Compare parameters and states bit for bit."""
    pairs = list(zip(mine.named_parameters(), other.parameters(), strict=True))
    for (name, p), q in pairs:
        assert torch.equal(own_part(p.detach()), own_part(q.detach())), name
        assert optim.state[p].keys() == theirs.state[q].keys(), name
        for key, value in theirs.state[q].items():
            found = optim.state[p][key]
            if isinstance(value, torch.Tensor):
                assert torch.equal(own_part(found), own_part(value)), f"{name}: {key}"
            else:
                assert found == value


def train_alike(
    mine: nn.Module,
    optim: torch.optim.Optimizer,
    other: nn.Module,
    theirs: torch.optim.Optimizer,
    steps: Iterable[int],
) -> None:
    """Take some steps with both, and compare."""
    for step in steps:
        _step(mine, optim, step)
        _step(other, theirs, step)
    assert_same(mine, optim, other, theirs)


# -- on one rank -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_states_are_those_of_the_optimizer_alone(name: str, tmp_path: Path) -> None:
    (mine, other), make = _nets(), OPTIMIZERS[name]
    optim, theirs = offload(make(mine.parameters()), f"disk:{tmp_path}"), make(other.parameters())
    for step in range(3):
        _step(mine, optim, step)
        _step(other, theirs, step)
        if step == 1:  # states that were read between steps are not read again from a cache
            assert_same(mine, optim, other, theirs)
    assert_same(mine, optim, other, theirs)
    kept = sum(
        form.nbytes
        for state in theirs.state.values()
        for value in state.values()
        if (form := kept_form(value)) is not None
    )
    assert optim.nbytes_kept == kept
    assert staging_of(optim) == 0, "between steps"


def test_an_optimizer_that_has_states_already_goes_on(tmp_path: Path) -> None:
    mine, other = _nets()
    inner, theirs = adamw(mine.parameters()), adamw(other.parameters())
    _step(mine, inner, 0)
    _step(other, theirs, 0)
    optim = offload(inner, f"disk:{tmp_path}")
    train_alike(mine, optim, other, theirs, (1, 2))


def test_gradients_may_be_missing_in_some_steps(tmp_path: Path) -> None:
    mine, other = _nets()
    optim = offload(adamw(mine.parameters()), f"disk:{tmp_path}", staging=8 * stores.ALIGNMENT)
    theirs = adamw(other.parameters())
    generator = random.Random(0)
    for step in range(12):
        missing = {name for name, _ in mine.named_parameters() if generator.random() < 0.4}
        for net, each in ((mine, optim), (other, theirs)):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            loss_of(net, x).backward()
            for name, param in net.named_parameters():
                if name in missing:
                    param.grad = None
            each.step()
            each.zero_grad()
    assert_same(mine, optim, other, theirs)


def test_learning_rates_follow_a_schedule(tmp_path: Path) -> None:
    mine, other = _nets()
    optim, theirs = offload(adamw(mine.parameters()), f"disk:{tmp_path}"), adamw(other.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optim, theirs)]
    for step in range(3):
        _step(mine, optim, step)
        _step(other, theirs, step)
        for schedule in schedules:
            schedule.step()
    assert optim.param_groups[0]["lr"] == 0.05 / 8
    assert_same(mine, optim, other, theirs)


def test_a_closure_is_called_once(tmp_path: Path) -> None:
    mine, _ = _nets()
    optim = offload(adamw(mine.parameters()), f"disk:{tmp_path}")
    losses = []

    def closure() -> float:
        loss = loss_of(mine, torch.ones(2, WIDTH))
        loss.backward()
        losses.append(loss.item())
        return losses[-1]

    assert [optim.step(closure)] == losses


class Replacing(torch.optim.Optimizer):
    """Replaces states in each step: by one of another size, by nothing, by one on the host."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                count = state["count"] = state.get("count", 0) + 1
                state["same"] = state.get("same", param * 0) + param.grad
                state["grows"] = torch.full((count * 3,), float(count))
                state["nested"] = {"deep": param.grad.clone()}
                if count % 2:
                    state["sometimes"] = param.grad * 2
                else:
                    state.pop("sometimes", None)
                param.sub_(0.1 * state["same"])


def _on_disk(folder: Path) -> int:
    """The bytes that the disk has set aside for this process's files without a name."""
    open_files = [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    mine = [each for each in open_files if str(folder) in os.readlink(each)]
    return sum(each.stat().st_blocks * 512 for each in mine)


def test_an_optimizer_may_replace_and_remove_its_states(tmp_path: Path) -> None:
    mine, other = _nets()
    optim = offload(Replacing(mine.parameters()), f"disk:{tmp_path}")
    theirs = Replacing(other.parameters())
    sizes = []
    for step in range(8):
        _step(mine, optim, step)
        _step(other, theirs, step)
        sizes.append(_on_disk(tmp_path))
        for p, q in zip(mine.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)
            assert optim.state[p].keys() == theirs.state[q].keys()
            for key in ("same", "grows", "sometimes"):
                if key in theirs.state[q]:
                    assert torch.equal(optim.state[p][key], theirs.state[q][key]), key
    assert sizes[-1] == sizes[1] > 0, "bytes that are free are used again"


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_states_keep_their_memory_format(layout: torch.memory_format, tmp_path: Path) -> None:
    net = nn.Conv2d(3, 8, 3).to(memory_format=layout)  # type: ignore[call-overload]
    optim = offload(adamw(net.parameters()), f"disk:{tmp_path}")
    for _ in range(2):
        net(torch.ones(1, 3, 5, 5)).sum().backward()
        optim.step()
    found = optim.state[net.weight]["exp_avg"]
    assert found.is_contiguous(memory_format=layout)
    assert found.stride() == net.weight.stride()


def test_staging_memory_is_bounded(tmp_path: Path) -> None:
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    limit = 3 * 2 * 64 * 64 * 4
    optim = offload(adamw(net.parameters()), f"disk:{tmp_path}", staging=limit)
    seen = []
    make = scratch.ScratchFile.write

    def write(self: Any, memory: torch.Tensor, runs: Any) -> Any:
        seen.append(staging_of(optim))
        return make(self, memory, runs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch.ScratchFile, "write", write)
        for _ in range(3):
            net(torch.ones(2, 64)).sum().backward()
            optim.step()
    assert len(seen) == 3 * 8
    assert 0 < max(seen) <= limit


def test_a_parameter_larger_than_the_limit_steps_alone(tmp_path: Path) -> None:
    mine, other = _nets()
    optim = offload(adamw(mine.parameters()), f"disk:{tmp_path}", staging=1)
    theirs = adamw(other.parameters())
    train_alike(mine, optim, other, theirs, range(3))


def test_however_long_a_disk_takes_nothing_is_read_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(0)

    def late(move: Callable[..., int]) -> Callable[..., int]:
        def call(file: int, parts: list[memoryview], offset: int) -> int:
            time.sleep(generator.random() * 2e-3)
            some = max(4096, len(parts[0]) // generator.choice((1, 2)) // 4096 * 4096)
            return move(file, [parts[0][:some]], offset)

        return call

    monkeypatch.setattr(os, "preadv", late(os.preadv))
    monkeypatch.setattr(os, "pwritev", late(os.pwritev))
    for limit in (1, 6 * 4096, 20 * 4096, 2**30):
        mine, other = _nets()
        optim = offload(adamw(mine.parameters()), f"disk:{tmp_path}", staging=limit)
        theirs = adamw(other.parameters())
        for step in range(4):
            _step(mine, optim, step)
            _step(other, theirs, step)
            if generator.random() < 0.3:
                assert_same(mine, optim, other, theirs)
        assert_same(mine, optim, other, theirs)


class Collecting(torch.optim.Optimizer):
    """Has states of all kinds of tensors, some from a later step on."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            count = state["count"] = state.get("count", 0) + 1
            if count == 1:
                state["complex"] = torch.zeros(param.shape, dtype=torch.complex64)
                state["integers"] = torch.zeros(param.shape, dtype=torch.int16)
                state["flags"] = torch.zeros(param.shape, dtype=torch.bool)
                state["every second"] = torch.zeros(2 * param.numel())[::2]
                state["transposed"] = torch.zeros(4, 6).t()
                state["expanded"] = torch.zeros(1).expand(5)
                state["empty"] = torch.zeros(0, 3)
                state["scalar"] = torch.tensor(0.0)
                state["conjugate"] = torch.ones(4, dtype=torch.complex64).conj()
                state["parameter"] = nn.Parameter(torch.ones(4))
            if count == 3:
                state["late"] = torch.zeros_like(param)
            if count > 2:
                state["late"] += param.grad
            state["complex"] += param.grad * 1j
            state["integers"] += 1
            state["flags"].logical_not_()
            state["every second"] += param.grad.flatten()
            state["transposed"] += count
            state["scalar"] += 1
            state["conjugate"] *= 2j
            param.sub_(state["complex"].imag + state["every second"].view(param.shape), alpha=0.1)


def test_states_are_of_any_kind_of_tensor(tmp_path: Path) -> None:
    mine, other = _nets()
    optim, theirs = (
        offload(Collecting(mine.parameters()), f"disk:{tmp_path}"),
        Collecting(other.parameters()),
    )
    train_alike(mine, optim, other, theirs, range(5))
    for p, q in zip(mine.parameters(), other.parameters(), strict=True):
        for key, value in theirs.state[q].items():
            found = optim.state[p][key]
            assert type(found) is type(value), key
            if isinstance(value, torch.Tensor):
                assert found.stride() == value.stride(), key
                assert found.requires_grad == value.requires_grad, key


class Sharing(torch.optim.Optimizer):
    """Has a state under two names, and a part of it under a third."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                state = self.state[param]
                if not state:
                    state["one"] = state["same"] = torch.zeros_like(param)
                    state["part"] = state["one"].view(-1)[1:]
                    state["two"] = state["alike"] = torch.zeros_like(param)
                state["one"].add_(param.grad)
                state["part"].mul_(1.5)
                state["two"].sub_(param.grad)
                param.sub_(state["same"] - state["alike"], alpha=0.1)


def test_states_that_share_memory_go_on_to_share_it(tmp_path: Path) -> None:
    mine, other = _nets()
    optim, theirs = (
        offload(Sharing(mine.parameters()), f"disk:{tmp_path}"),
        Sharing(other.parameters()),
    )
    train_alike(mine, optim, other, theirs, range(4))


# -- between steps ---------------------------------------------------------------------------------


def _between(optim: torch.optim.Optimizer, param: torch.Tensor, step: int) -> None:
    """Do to the states of a parameter what a program may do with those of any optimizer."""
    match step:
        case 0:
            optim.state[param]["exp_avg"].zero_()
        case 1:
            optim.state[param]["exp_avg_sq"] = torch.full_like(param, 0.25)
        case 2:
            optim.state[param]["of mine"] = torch.ones(7)
        case 3:
            del optim.state[param]["of mine"]
        case 4:
            optim.state[param] = {
                key: value.clone() / 2 if key == "exp_avg" else value
                for key, value in optim.state[param].items()
            }
        case 5:
            del optim.state[param]
        case 6:
            optim.state.clear()


def test_states_can_be_changed_replaced_and_removed_between_steps(tmp_path: Path) -> None:
    mine, other = _nets()
    optim, theirs = offload(adamw(mine.parameters()), f"disk:{tmp_path}"), adamw(other.parameters())
    kept = []
    for step in range(9):
        for net, each in ((mine, optim), (other, theirs)):
            _step(net, each, step)
            for param in list(each.state):
                _between(each, param, step)
        kept.append(_on_disk(tmp_path))
    assert_same(mine, optim, other, theirs)
    assert kept[-1] <= kept[3] * 2, "bytes that are free are used again"


def test_whatever_a_program_does_numbers_are_those_of_the_optimizer_alone(tmp_path: Path) -> None:
    generator = random.Random(3)
    for _ in range(6):
        _random_program(generator, f"disk:{tmp_path}")


def _random_program(generator: random.Random, place: str) -> None:
    make = OPTIMIZERS[generator.choice(list(OPTIMIZERS))]
    nets = _nets()
    inner = make(nets[0].parameters())
    optims = [inner, make(nets[1].parameters())]
    if generator.random() < 0.3:
        for net, each in zip(nets, optims, strict=True):
            _step(net, each, 0)
    limit = generator.choice((1, 6 * 4096, 20 * 4096, 2**30))
    optims[0] = offload(inner, place, staging=limit)
    saved = [copy.deepcopy(each.state_dict()) for each in optims]
    for step in range(10):
        action, seed = generator.choice("sssgcrldhz"), generator.random()
        for i, (net, optim) in enumerate(zip(nets, optims, strict=True)):
            choose = random.Random(seed)
            match action:
                case "s":
                    _step(net, optim, step)
                case "g":  # some gradients are missing
                    loss_of(net, torch.ones(2, WIDTH)).backward()
                    for param in net.parameters():
                        if choose.random() < 0.5:
                            param.grad = None
                    optim.step()
                    optim.zero_grad()
                case "c" | "r" | "h":  # states are changed, removed or replaced
                    for param in net.parameters():
                        if param in optim.state:
                            _change(optim.state[param], action, choose)
                case "d":
                    saved[i] = copy.deepcopy(optim.state_dict())
                case "l":
                    optim.load_state_dict(copy.deepcopy(saved[i]))
                case "z":
                    optim.param_groups[0]["lr"] *= 0.5
    assert_same(nets[0], optims[0], nets[1], optims[1])


def _change(state: dict[str, Any], action: str, choose: random.Random) -> None:
    if action == "r":
        if choose.random() < 0.3:
            state.clear()
        return
    for key, value in sorted(state.items()):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
            if action == "c":
                value.mul_(0.5)
            elif choose.random() < 0.5:
                state[key] = value * 0.25


def test_a_state_dict_of_before_a_load_can_be_loaded_again(tmp_path: Path) -> None:
    mine, other = _nets()
    optim = offload(adamw(mine.parameters()), f"disk:{tmp_path}")
    _step(mine, optim, 0)
    first, expected = optim.state_dict(), copy.deepcopy(optim.state_dict())
    theirs = adamw(other.parameters())
    for step in range(3):
        _step(other, theirs, step)
    optim.load_state_dict(theirs.state_dict())
    _step(mine, optim, 1)
    optim.load_state_dict(first)
    for number, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(optim.state_dict()["state"][number][key], value), key


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_waiting_for_a_disk_can_be_interrupted(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Ctrl-C comes during a wait, states are those of the chunks that have stepped."""
    mine, other = _nets()
    optim, theirs = offload(adamw(mine.parameters()), f"disk:{tmp_path}"), adamw(other.parameters())
    for net, each in ((mine, optim), (other, theirs)):
        _step(net, each, 0)
        each.step()  # without gradients
    move, wait = getattr(os, call), stores._wait_for
    is_over = threading.Event()
    counts = iter(range(1000))

    def late(*args: Any) -> int:
        is_over.wait()
        return int(move(*args))

    def interrupted(transfers: Any) -> None:
        if next(counts) == (3 if call == "pwritev" else 0):
            raise KeyboardInterrupt
        is_over.set()
        wait(transfers)

    if call == "preadv":
        monkeypatch.setattr(os, call, late)
    monkeypatch.setattr(stores, "_wait_for", interrupted)
    loss_of(mine, torch.ones(2, WIDTH)).backward()
    before = [param.detach().clone() for param in mine.parameters()]
    with pytest.raises(KeyboardInterrupt):
        optim.step()
    stepped = {
        name
        for (name, param), old in zip(mine.named_parameters(), before, strict=True)
        if not torch.equal(param, old)
    }
    assert bool(stepped - {"gain"}) == (call == "pwritev"), "gain has no states on the disk"
    monkeypatch.undo()
    is_over.set()
    loss_of(other, torch.ones(2, WIDTH)).backward()
    for name, param in other.named_parameters():
        if name not in stepped:
            param.grad = None
    theirs.step()
    theirs.zero_grad()
    optim.zero_grad()
    assert_same(mine, optim, other, theirs)
    assert staging_of(optim) == 0
    train_alike(mine, optim, other, theirs, (1, 2))


def test_states_that_are_left_half_moved_are_used_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, _ = _nets(torch.bfloat16)
    optim = offload(adamw(net.parameters()), f"disk:{tmp_path}", masters=torch.float32)
    _step(net, optim, 0)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(masters, "_set_memory", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _step(net, optim, 1)
    monkeypatch.undo()
    with pytest.raises(OffloadError, match=r"KeyboardInterrupt while states moved.*last"):
        optim.step()


def test_a_fork_has_no_states(tmp_path: Path) -> None:
    [message] = run_ranks(_fork, 1, tmp_path, backend=None)
    assert "was forked from" in message


def _fork(rank: int, world_size: int, folder: Path) -> str:
    _keep_everything()
    torch.set_num_threads(1)
    net = nn.Linear(20, 20)
    optim = offload(adamw(net.parameters()), f"disk:{folder}")
    net(torch.ones(2, 20)).sum().backward()
    optim.step()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            optim.step()
        except OffloadError as error:
            os.write(writing, str(error).encode())
        optim = None  # type: ignore[assignment]
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    optim.step()
    return os.read(reading, 1000).decode()


# -- masters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["host", "disk:{}"])
def test_masters_are_what_an_optimizer_of_wide_parameters_has(to: str, tmp_path: Path) -> None:
    mine, other = _nets(torch.bfloat16)
    wide = [nn.Parameter(param.detach().float()) for param in other.parameters()]
    optim = offload(adamw(mine.parameters()), to.format(tmp_path), masters=torch.float32)
    theirs = adamw(wide)
    for step in range(2):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        for net in (mine, other):
            loss_of(net, x).backward()
        for param, master in zip(other.parameters(), wide, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        optim.step()
        theirs.step()
        with torch.no_grad():
            for param, master in zip(other.parameters(), wide, strict=True):
                param.copy_(master)
                param.grad = None
        optim.zero_grad()
    trained = 0
    for p, q, master in zip(mine.parameters(), other.parameters(), wide, strict=True):
        assert torch.equal(p, q)
        if optim.state[p]:
            trained += 1
            assert optim.state[p]["exp_avg"].dtype == torch.float32
            assert torch.equal(optim.state[p]["exp_avg"], theirs.state[master]["exp_avg"])
            assert torch.equal(optim.state[p]["master"], master)
    assert trained == 5


def test_a_master_follows_whoever_writes_to_its_parameter(tmp_path: Path) -> None:
    net, _ = _nets(torch.bfloat16)
    optim = offload(
        torch.optim.SGD(net.parameters(), lr=1e-3), f"disk:{tmp_path}", masters=torch.float32
    )
    _step(net, optim, 0)
    weight = net.get_parameter("up.weight")
    before = optim.state[weight]["master"].clone()
    assert not torch.equal(before, weight.float()), "more precise than the parameter"
    with torch.no_grad():
        weight[0] = 2.0
    weight.grad = torch.zeros_like(weight)
    optim.step()
    after = optim.state[weight]["master"]
    assert torch.equal(after[0], torch.full((6,), 2.0))
    assert torch.equal(after[1:], before[1:])


def test_wide_parameters_have_no_masters(tmp_path: Path) -> None:
    net, _ = _nets()
    optim = offload(adamw(net.parameters()), f"disk:{tmp_path}", masters=torch.float32)
    _step(net, optim, 0)
    assert all("master" not in state for state in optim.state.values())


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        *((name, None, torch.float32) for name in ("adamw", "fused", "adamw8bit")),
        *((name, torch.float32, None) for name in ("adamw", "fused", "adamw8bit")),
        ("adamw", torch.float32, torch.float64),
    ],
)
def test_states_go_on_with_other_masters_or_none(
    name: str, before: torch.dtype | None, after: torch.dtype | None, tmp_path: Path
) -> None:
    mine, other = _nets(torch.bfloat16)
    make, place = OPTIMIZERS[name], f"disk:{tmp_path}"
    inner = make(mine.parameters())
    first = offload(inner, place, masters=before)
    _step(mine, first, 0)
    other.load_state_dict(mine.state_dict())
    second = offload(make(other.parameters()), place, masters=after)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    third = offload(inner, place, masters=after)
    dtype = torch.bfloat16 if after is None else after
    for net, optim in ((other, second), (mine, third)):
        _step(net, optim, 1)
        for state in optim.state.values():
            assert ("master" in state) == (after is not None)
            if name != "adamw8bit":
                assert state["exp_avg"].dtype == dtype
            elif after is not None:
                assert state["master"].dtype == torch.float32
    assert_same(mine, third, other, second)


# -- state dicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_goes_on_in_another_optimizer(dtype: torch.dtype, tmp_path: Path) -> None:
    mine, other = _nets(dtype)
    place = f"disk:{tmp_path}"
    optim, theirs = (
        offload(adamw(net.parameters()), place, masters=torch.float32) for net in (mine, other)
    )
    for step in range(3):
        _step(mine, optim, step)
    saved = copy.deepcopy(optim.state_dict())
    other.load_state_dict(mine.state_dict())
    theirs.load_state_dict(saved)
    assert_same(mine, optim, other, theirs)
    train_alike(mine, optim, other, theirs, (3, 4))


def test_the_state_of_the_optimizer_alone_is_loaded_and_back(tmp_path: Path) -> None:
    mine, other = _nets()
    alone = adamw(other.parameters())
    for step in range(2):
        _step(other, alone, step)
    mine.load_state_dict(other.state_dict())
    optim = offload(adamw(mine.parameters()), f"disk:{tmp_path}")
    optim.load_state_dict(copy.deepcopy(alone.state_dict()))
    assert_same(mine, optim, other, alone)
    _step(mine, optim, 2)
    _step(other, alone, 2)
    assert_same(mine, optim, other, alone)
    again = adamw(other.parameters())
    again.load_state_dict(copy.deepcopy(optim.state_dict()))
    assert_same(mine, optim, other, again)


def test_loading_its_own_state_changes_nothing_and_takes_no_more_room(tmp_path: Path) -> None:
    mine, other = _nets()
    optim, theirs = offload(adamw(mine.parameters()), f"disk:{tmp_path}"), adamw(other.parameters())
    for step in range(3):
        _step(mine, optim, step)
        _step(other, theirs, step)
        size = _on_disk(tmp_path)
        optim.load_state_dict(optim.state_dict())
        optim.load_state_dict(copy.deepcopy(optim.state_dict()))
        optim.load_state_dict(copy.deepcopy(optim.state_dict()))
        assert _on_disk(tmp_path) <= 2 * size
    assert_same(mine, optim, other, theirs)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda saved: saved["param_groups"][0]["params"].pop(),
        lambda saved: saved["state"][0].pop("exp_avg_scale"),
        lambda saved: saved["state"][0].update(exp_avg_scale=torch.ones(7)),
    ],
)
def test_a_state_of_something_else_is_refused_and_nothing_is_changed(
    spoil: Callable[[Any], object], tmp_path: Path
) -> None:
    mine, other = (seeded(lambda: nn.Linear(300, 20)) for _ in range(2))
    optim, theirs = (
        offload(AdamW8bit(net.parameters(), lr=0.05), f"disk:{tmp_path}") for net in (mine, other)
    )
    for net, each in ((mine, optim), (other, theirs)):
        net(torch.ones(2, 300)).sum().backward()
        each.step()
    saved = copy.deepcopy(optim.state_dict())
    spoil(saved)
    with pytest.raises(ValueError, match="param"):
        optim.load_state_dict(saved)
    with pytest.raises(NotImplementedError, match="load it with load_state_dict"):
        optim.state = {}
    assert_same(mine, optim, other, theirs)


# -- disks that are full, or fail ------------------------------------------------------------------


def test_nothing_has_a_name_on_the_disk(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "for it"
    mine, _ = _nets()
    optim = offload(adamw(mine.parameters()), f"disk:{folder}")
    for step in range(2):
        _step(mine, optim, step)
        assert list(folder.iterdir()) == []
    assert optim.nbytes_kept > 0


def test_a_file_system_without_nameless_files_has_nothing_left_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any, flags: int, *mode: int, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opened(path, flags, *mode, **more)

    opened = os.open
    monkeypatch.setattr(os, "open", refuse)
    mine, other = _nets()
    optim, theirs = offload(adamw(mine.parameters()), f"disk:{tmp_path}"), adamw(other.parameters())
    for step in range(2):
        _step(mine, optim, step)
        _step(other, theirs, step)
    assert list(tmp_path.iterdir()) == []
    assert_same(mine, optim, other, theirs)


def test_memory_and_files_are_freed_with_the_optimizer(tmp_path: Path) -> None:
    def is_open() -> bool:
        files = Path("/proc/self/fd").iterdir()
        return any(str(tmp_path) in os.readlink(file) for file in files if file.is_symlink())

    mine, _ = _nets()
    optim = offload(adamw(mine.parameters()), f"disk:{tmp_path}")
    _step(mine, optim, 0)
    assert is_open()
    del optim
    gc.collect()
    assert not is_open()


def test_a_full_disk_is_one_error_and_so_is_everything_after_it(tmp_path: Path) -> None:
    [message] = run_ranks(_fill, 1, tmp_path, backend=None)
    assert "rank 0" not in message, "there is no world"
    assert f"setting aside 4.00 KiB after 32.0 KiB in {tmp_path}" in message
    assert "File too large" in message
    assert "go on from the last checkpoint" in message


def _fill(rank: int, world_size: int, folder: Path) -> str:
    _keep_everything()
    resource.setrlimit(resource.RLIMIT_FSIZE, (32768, 32768))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    net = nn.Sequential(*(nn.Linear(20, 20) for _ in range(20)))
    optim = offload(adamw(net.parameters()), f"disk:{folder}")
    net(torch.ones(2, 20)).sum().backward()
    with pytest.raises(OffloadError) as caught:
        optim.step()
    for again in (
        optim.step,
        optim.state_dict,
        lambda: optim.state,
        lambda: optim.load_state_dict({}),
    ):
        with pytest.raises(OffloadError, match="setting aside"):
            again()  # type: ignore[operator]
    return str(caught.value)


@pytest.mark.parametrize(("call", "doing"), [("pwritev", "writing"), ("preadv", "reading")])
@pytest.mark.parametrize("at", [0, 3])
def test_a_disk_that_fails_is_one_error(
    call: str, doing: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, _ = _nets()
    optim = offload(adamw(mine.parameters()), f"disk:{tmp_path}")
    _step(mine, optim, 0)
    calls, move = [], getattr(os, call)

    def fail(file: int, parts: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) > at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return int(move(file, parts, offset))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OffloadError, match=f"{doing} .*Input/output error.*last checkpoint"):
        _step(mine, optim, 1)
    monkeypatch.undo()
    with pytest.raises(OffloadError, match="Input/output error"):
        optim.step()
    with pytest.raises(OffloadError, match="Input/output error"):
        optim.state_dict()


def test_a_disk_that_gives_no_more_bytes_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, _ = _nets()
    optim = offload(adamw(mine.parameters()), f"disk:{tmp_path}")
    _step(mine, optim, 0)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OffloadError, match="ended after 0 bytes"):
        _step(mine, optim, 1)


class Raising(torch.optim.AdamW):
    """Raises in a step, for the parameter of a shape."""

    shape: tuple[int, ...] | None = None

    def step(self, closure: Any = None) -> Any:
        shapes = [tuple(param.shape) for group in self.param_groups for param in group["params"]]
        if self.shape in shapes:
            raise ArithmeticError("a bad step")
        return super().step(closure)


def test_an_exception_of_the_optimizer_leaves_states_as_they_are(tmp_path: Path) -> None:
    mine, other = _nets()
    inner = Raising(mine.parameters(), lr=0.05)
    optim, theirs = offload(inner, f"disk:{tmp_path}"), torch.optim.AdamW(other.parameters(), 0.05)
    _step(mine, optim, 0)
    _step(other, theirs, 0)
    inner.shape = (70,)
    with pytest.raises(ArithmeticError):
        _step(mine, optim, 1)
    loss_of(other, torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))).backward()
    for name, param in other.named_parameters():
        if name not in ("gain", "up.weight"):  # these two come before it
            param.grad = None
    theirs.step()
    assert_same(mine, optim, other, theirs)


# -- over ranks ------------------------------------------------------------------------------------

SHARDED: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda net: adamw(net.parameters()),
    "adamw8bit": lambda net: AdamW8bit(net.parameters(), lr=0.05),
    "muon": lambda net: Muon(muon_groups(net), lr=0.05),
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "zero3": {"reshard_after_forward": True},
    "zero2": {"reshard_after_forward": False},
    "hybrid": {"hybrid": True},
}


def _sharded(world_size: int, transport: str, *, hybrid: bool = False, **options: Any) -> nn.Module:
    mesh = hybrid_mesh(world_size) if hybrid else None
    return sharded_net(mesh=mesh, transport=transport, **options)


def _train_alike(
    rank: int, world_size: int, transport: str, folder: Path, name: str, **options: Any
) -> None:
    _keep_everything()
    nets = [_sharded(world_size, transport, **options) for _ in range(3)]
    after, inside, alone = nets
    place, make = f"disk:{folder}", SHARDED[name]
    optims = [
        offload(make(after), place, staging=16 * stores.ALIGNMENT),
        in_backward(inside, lambda _: offload(make(inside), place)),
        make(alone),
    ]
    for step in range(3):
        for net, optim in zip(nets, optims, strict=True):
            loss_of(net, batches(world_size, step)[rank]).backward()
            optim.step()
            optim.zero_grad()
    assert_same(after, optims[0], alone, optims[2])
    assert_same(inside, optims[1], alone, optims[2])


@pytest.mark.parametrize(
    ("name", "strategy", "transport", "world_size"),
    [
        ("adamw", "zero3", "c10d", 3),
        ("adamw", "zero3", "shm", 2),
        ("adamw", "hybrid", "c10d", 4),
        ("adamw8bit", "zero2", "c10d", 2),
        ("muon", "zero3", "c10d", 2),
        *(
            pytest.param(name, strategy, transport, 4, marks=pytest.mark.long)
            for name in SHARDED
            for strategy in STRATEGIES
            for transport in ("c10d", "shm")
        ),
    ],
)
def test_shards_step_alike_after_backward_and_in_it(
    name: str, strategy: str, transport: str, world_size: int, tmp_path: Path
) -> None:
    options = STRATEGIES[strategy]
    run_over(transport, _train_alike, world_size, tmp_path, name, **options)


def _interrupt(rank: int, world_size: int, transport: str, folder: Path) -> None:
    _keep_everything()
    net, other = (_sharded(world_size, transport) for _ in range(2))
    optim = in_backward(net, lambda params: offload(adamw(params), f"disk:{folder}"))
    theirs = in_backward(other, adamw)
    x = batches(world_size, 0)[rank]
    for each in (net, other):
        loss_of(each, x).backward()
    first = sharded_modules(net)[1], sharded_modules(other)[1]
    for module, each in zip(first, (net, other), strict=True):

        def fail(*_: Any) -> None:
            raise ArithmeticError("in the middle")

        handle = module.register_full_backward_pre_hook(fail)  # type: ignore[attr-defined]
        with pytest.raises(ArithmeticError):
            loss_of(each, x).backward()
        handle.remove()
    for each in (optim, theirs):
        with pytest.raises(StepInterruptedError):
            each.state_dict()
        each.accept_interrupted_step()
    assert_same(net, optim, other, theirs)
    for each in (net, other):
        loss_of(each, x).backward()
    assert_same(net, optim, other, theirs)


def test_an_interrupted_step_leaves_what_it_leaves_in_memory(tmp_path: Path) -> None:
    run_over("c10d", _interrupt, 2, tmp_path)


def _save(rank: int, world_size: int, folder: Path) -> None:
    _keep_everything()
    for how in dict.fromkeys(saved for saved, _ in MOVES):
        net = sharded_net()
        optim = _with_states_on(how, net, folder)
        for step in range(2):
            loss_of(net, batches(4, step).flatten(0, 1)).backward()
            optim.step()
            optim.zero_grad()
        checkpoint.save(folder / how / "step-00000001", net, optim)


def _with_states_on(how: str, net: nn.Module, folder: Path) -> Any:
    """``"PLACE"`` or ``"PLACE in backward"``, maybe after the name of an optimizer and a colon."""
    name, _, where = how.rpartition(":")
    make = OPTIMIZERS[name or "adamw"]
    place = where.removesuffix(" in backward")
    to = {"disk": f"disk:{folder}", "host": "host"}.get(place)

    def kept(params: Any) -> torch.optim.Optimizer:
        return make(params) if to is None else offload(make(params), to)

    return in_backward(net, kept) if place != where else kept(net.parameters())


def _load(rank: int, world_size: int, folder: Path, moves: list[tuple[str, str]]) -> list[Any]:
    _keep_everything()
    return [_loaded(folder, saved, loaded) for saved, loaded in moves]


def _loaded(folder: Path, saved: str, loaded: str) -> dict[str, Any]:
    net = sharded_net(lambda: seeded(SmallNet, 7))
    optim = _with_states_on(loaded, net, folder)
    made: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        write = scratch.ScratchFile.write
        patch.setattr(scratch.ScratchFile, "write", lambda *args: made.append(1) or write(*args))
        checkpoint.load(folder / saved / "step-00000001", net, optim)
    assert not made, "states go from the checkpoint to where they are kept, not through memory"
    loss_of(net, batches(4, 3).flatten(0, 1)).backward()
    optim.step()
    return gather(
        {
            name: [part_of(p), *(part_of(v) for _, v in sorted(optim.state[p].items()))]
            for name, p in net.named_parameters()
        }
    )


#: Where states were as they were saved, and where they are loaded to.
MOVES = [
    ("disk", "memory"),
    ("memory", "disk"),
    ("disk in backward", "disk in backward"),
    *(
        (f"{name}:{saved}", f"{name}:{loaded}")
        for name in ("lion", "adafactor", "adamw8bit", "momentum", "no states")
        for saved, loaded in (("memory", "host"), ("host", "disk"))
    ),
    ("adafactor:disk in backward", "adafactor:memory"),
]


def test_checkpoints_move_between_disk_and_memory_and_between_meshes(
    threads: Ranks, tmp_path: Path
) -> None:
    threads(_save, 2, tmp_path)
    in_memory = [(saved, f"{saved.rpartition(':')[0]}:memory") for saved, _ in MOVES]
    [expected] = threads(_load, 1, tmp_path, in_memory)
    for found in threads(_load, 3, tmp_path, MOVES):
        for move, mine, theirs in zip(MOVES, found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, msg=lambda text, m=move: f"{m}: {text}")


@on_threads(2)
def test_torchs_functions_for_state_dicts_work(rank: int, world_size: int, tmp_path: Path) -> None:
    _keep_everything()
    net, other = sharded_net(), sharded_net()
    optim, theirs = (offload(adamw(each.parameters()), f"disk:{tmp_path}") for each in (net, other))
    loss_of(net, batches(world_size, 0)[rank]).backward()
    optim.step()
    optim.zero_grad()
    other.load_state_dict(net.state_dict())
    set_optimizer_state_dict(other, theirs, copy.deepcopy(get_optimizer_state_dict(net, optim)))
    assert_same(net, optim, other, theirs)


@on_processes(2)
def test_replicas_that_train_apart_step_alike(rank: int, world_size: int, tmp_path: Path) -> None:
    _keep_everything()
    net, other = (seeded(SmallNet) for _ in range(2))
    optim = DiLoCo(
        net, offload(adamw(net.parameters()), f"disk:{tmp_path}"), group=dist.group.WORLD, every=2
    )
    theirs = DiLoCo(other, adamw(other.parameters()), group=dist.group.WORLD, every=2)
    for step in range(4):
        for model, each in ((net, optim), (other, theirs)):
            loss_of(model, batches(world_size, step)[rank]).backward()
            each.step()
            each.zero_grad()
    assert_same(net, optim, other, theirs)


def _one_fails(rank: int, world_size: int, folder: Path) -> None:
    _keep_everything()
    net = sharded_net()
    in_backward(net, lambda params: offload(adamw(params), f"disk:{folder}"))
    loss_of(net, batches(world_size, 0)[rank]).backward()
    if rank == 1:

        def fail(*_: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        os.preadv = fail  # type: ignore[assignment]
    for step in range(1, 4):
        loss_of(net, batches(world_size, step)[rank]).backward()


def test_a_disk_that_fails_on_one_rank_ends_the_run_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(_one_fails, 2, tmp_path, expect_failures=True)
    assert "OffloadError: rank 1: offload: reading" in str(second.error)
    assert not first.ok
    assert "PeerLostError" in str(first.error)


# -- what is asked for -----------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["", "disk", "disk:", "host:", "host:/tmp", "nvme:/tmp", "/tmp"])
def test_places_that_are_none_are_refused(to: str) -> None:
    net, _ = _nets()
    with pytest.raises(ValueError, match='expected "host" or "disk:FOLDER"'):
        offload(adamw(net.parameters()), to)


def test_a_place_is_what_was_written() -> None:
    assert folder_of_place("host") is None
    for folder in ("/a b/c", "relative"):
        assert folder_of_place(f"disk:{folder}") == Path(folder)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    net, _ = _nets()
    with pytest.raises(OffloadError, match=r"found no way to make a file in .*file/folder"):
        offload(adamw(net.parameters()), f"disk:{tmp_path}/file/folder")


def test_what_is_no_optimizer_is_refused(tmp_path: Path) -> None:
    net, _ = _nets()
    once = offload(adamw(net.parameters()), f"disk:{tmp_path}")
    with pytest.raises(TypeError, match="found OffloadedOptimizer, expected an optimizer"):
        offload(once, "host")
    with pytest.raises(TypeError, match="optimizer: found a Net, expected an Optimizer"):
        offload(net, "host")  # type: ignore[arg-type]
    for make in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            make(once)
    with pytest.raises(ValueError, match="LBFGS needs a closure"):
        offload(torch.optim.LBFGS(net.parameters()), f"disk:{tmp_path}")
    for dtype in (torch.int32, torch.complex64):
        with pytest.raises(ValueError, match=f"found masters={dtype!r}, expected"):
            offload(adamw(net.parameters()), "host", masters=dtype)
    with pytest.raises(TypeError, match=r"masters: found 'float32', expected a torch\.dtype"):
        offload(adamw(net.parameters()), "host", masters="float32")  # type: ignore[arg-type]
