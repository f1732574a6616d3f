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
from collections.abc import Callable, Collection, Iterable
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
from shardwise.base.scratch import file as scratch_file
from shardwise.diloco import DiLoCo
from shardwise.optim import Adafactor, AdamW8bit, Lion, Muon, in_backward, muon_groups, offload
from shardwise.optim.offloaded import masters, optimizer, stores
from shardwise.optim.offloaded.states import kept_form
from tests.corpus.gathering import gather, own_part, part_of
from tests.harness import run_ranks
from tests.optim.nets import OneByOne
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
from tests.worlds import Ranks, on_threads

Make = Callable[[Any], torch.optim.Optimizer]


def nbytes_to_keep(optim: torch.optim.Optimizer) -> int:
    """Bytes of the states of an optimizer that can be kept elsewhere."""
    values = [value for state in optim.state.values() for value in state.values()]
    return sum(form.nbytes for form in map(kept_form, values) if form is not None)


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


#: Bytes of staging memory: of one parameter alone, of one or some others, and of all.
LIMITS = (1, 6 * stores.ALIGNMENT, 20 * stores.ALIGNMENT, 2**30)


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


class Twins:
    """Two nets: one whose optimizer keeps its states elsewhere, and one with the optimizer alone.

    Args:
        place: where the states are.
        make: makes each optimizer.
        dtype: of the parameters.
        before: steps that optimizers take before the states of one go elsewhere.
        settings: of ``offload``.
    """

    def __init__(
        self,
        place: str,
        make: Make = adamw,
        dtype: torch.dtype = torch.float32,
        before: Iterable[int] = (),
        **settings: Any,
    ) -> None:
        self.mine, self.other = (seeded(Net).to(dtype) for _ in range(2))
        self.inner, self.theirs = (make(net.parameters()) for net in (self.mine, self.other))
        for step in before:
            take_step(self.mine, self.inner, step)
            take_step(self.other, self.theirs, step)
        self.optim = offload(self.inner, place, **settings)
        self.both: list[tuple[nn.Module, Any]]
        self.both = [(self.mine, self.optim), (self.other, self.theirs)]

    def step(self, *steps: int) -> None:
        """Take steps with both."""
        for step in steps:
            for net, optim in self.both:
                take_step(net, optim, step)

    def assert_same(self) -> None:
        """Compare parameters and states bit for bit."""
        assert_same(self.mine, self.optim, self.other, self.theirs)


def go_backward(net: nn.Module, step: int) -> None:
    """Give parameters the gradients of a step."""
    dtype = next(net.parameters()).dtype
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
    loss_of(net, x).backward()


def take_step(net: nn.Module, optim: torch.optim.Optimizer, step: int) -> None:
    """Go backward, step, and drop the gradients."""
    go_backward(net, step)
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
            _assert_same_state(optim.state[p][key], value, f"{name}: {key}")


def _assert_same_state(found: Any, expected: Any, what: str) -> None:
    assert type(found) is type(expected), what
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for key, value in expected.items():
            _assert_same_state(found[key], value, f"{what}: {key}")
    if not isinstance(expected, torch.Tensor):
        assert isinstance(expected, dict) or found == expected, what
        return
    mine, theirs = own_part(found), own_part(expected)
    assert torch.equal(mine, theirs), what
    assert mine.stride() == theirs.stride(), what
    assert mine.requires_grad == theirs.requires_grad, what


def step_only(
    net: nn.Module, optim: torch.optim.Optimizer, step: int, names: Collection[str]
) -> None:
    """Step with the gradients of some parameters."""
    go_backward(net, step)
    for name, param in net.named_parameters():
        if name not in names:
            param.grad = None
    optim.step()
    optim.zero_grad()


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A disk for the states."""
    return f"disk:{tmp_path}"


# -- on one rank -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_states_are_those_of_the_optimizer_alone(name: str, place: str) -> None:
    twins = Twins(place, OPTIMIZERS[name])
    twins.step(0, 1)
    twins.assert_same()  # states that were read between steps are not read again from a cache
    twins.step(2)
    twins.assert_same()
    assert twins.optim.nbytes_kept == nbytes_to_keep(twins.theirs)
    assert staging_of(twins.optim) == 0, "between steps"


def test_learning_rates_follow_a_schedule(place: str) -> None:
    twins = Twins(place)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for _, each in twins.both]
    for step in range(3):
        twins.step(step)
        for schedule in schedules:
            schedule.step()
    assert twins.optim.param_groups[0]["lr"] == 0.05 / 8
    twins.assert_same()


def test_a_closure_is_called_once(place: str) -> None:
    twins = Twins(place)
    losses = []

    def closure() -> float:
        loss = loss_of(twins.mine, torch.ones(2, WIDTH))
        loss.backward()
        losses.append(loss.item())
        return losses[-1]

    assert [twins.optim.step(closure)] == losses


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_states_keep_their_memory_format(layout: torch.memory_format, place: str) -> None:
    net = nn.Conv2d(3, 8, 3).to(memory_format=layout)  # type: ignore[call-overload]
    optim = offload(adamw(net.parameters()), place)
    for _ in range(2):
        net(torch.ones(1, 3, 5, 5)).sum().backward()
        optim.step()
    found = optim.state[net.weight]["exp_avg"]
    assert found.is_contiguous(memory_format=layout)
    assert found.stride() == net.weight.stride()


def test_staging_memory_is_bounded(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    limit = 3 * 2 * 64 * 64 * 4
    optim = offload(adamw(net.parameters()), place, staging=limit)
    seen = []
    real = scratch_file.ScratchFile.write

    def write(self: Any, memory: torch.Tensor, runs: Any) -> Any:
        seen.append(staging_of(optim))
        return real(self, memory, runs)

    monkeypatch.setattr(scratch_file.ScratchFile, "write", write)
    for _ in range(3):
        net(torch.ones(2, 64)).sum().backward()
        optim.step()
    assert len(seen) == 3 * 8
    assert 0 < max(seen) <= limit


def test_however_long_a_disk_takes_nothing_is_read_before_it_is_written(
    place: str, monkeypatch: pytest.MonkeyPatch
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
    for limit in LIMITS:
        twins = Twins(place, staging=limit)
        for step in range(4):
            twins.step(step)
            if generator.random() < 0.3:
                twins.assert_same()
        twins.assert_same()


class Replacing(OneByOne):
    """Replaces states in each step: by one of another size, by nothing, by one on the host."""

    def update(self, param: Any, grad: torch.Tensor, state: dict[str, Any], group: Any) -> None:
        count = state["count"] = state.get("count", 0) + 1
        state["same"] = state.get("same", param * 0) + grad
        state["grows"] = torch.full((count * 3,), float(count))
        state["nested"] = {"deep": grad.clone()}
        if count % 2:
            state["sometimes"] = grad * 2
        else:
            state.pop("sometimes", None)
        param.sub_(0.1 * state["same"])


class Collecting(OneByOne):
    """Has states of all kinds of tensors, some from a later step on."""

    def update(self, param: Any, grad: torch.Tensor, state: dict[str, Any], group: Any) -> None:
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
            state["late"] += grad
        state["complex"] += grad * 1j
        state["integers"] += 1
        state["flags"].logical_not_()
        state["every second"] += grad.flatten()
        state["transposed"] += count
        state["scalar"] += 1
        state["conjugate"] *= 2j
        param.sub_(state["complex"].imag + state["every second"].view(param.shape), alpha=0.1)


class Sharing(OneByOne):
    """Has a state under two names, and a part of it under a third."""

    def update(self, param: Any, grad: torch.Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["one"] = state["same"] = torch.zeros_like(param)
            state["part"] = state["one"].view(-1)[1:]
            state["two"] = state["alike"] = torch.zeros_like(param)
        state["one"].add_(grad)
        state["part"].mul_(1.5)
        state["two"].sub_(grad)
        param.sub_(state["same"] - state["alike"], alpha=0.1)


@pytest.mark.parametrize(("make", "last"), [(Replacing, 1), (Collecting, 2), (Sharing, 0)])
def test_states_are_of_any_kind_and_may_be_replaced_removed_or_share_memory(
    make: Make, last: int, tmp_path: Path
) -> None:
    """After the ``last`` step that adds a state, bytes that are free are used again."""
    twins, sizes = Twins(f"disk:{tmp_path}", make), []
    for step in range(8):
        twins.step(step)
        twins.assert_same()
        sizes.append(_on_disk(tmp_path))
        kept = twins.optim.nbytes_kept
        assert kept == (0 if make is Sharing else nbytes_to_keep(twins.theirs))
    assert sizes[-1] == sizes[last]
    assert bool(sizes[-1]) == (make is not Sharing), "what shares memory stays in memory"


def _on_disk(folder: Path) -> int:
    """The bytes that the disk has set aside for this process's files without a name."""
    open_files = [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    mine = [each for each in open_files if str(folder) in os.readlink(each)]
    return sum(each.stat().st_blocks * 512 for each in mine)


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
    twins, kept = Twins(f"disk:{tmp_path}"), []
    for step in range(9):
        twins.step(step)
        for _, optim in twins.both:
            for param in list(optim.state):
                _between(optim, param, step)
        kept.append(_on_disk(tmp_path))
    twins.assert_same()
    assert kept[-1] <= kept[3] * 2, "bytes that are free are used again"


def test_whatever_a_program_does_numbers_are_those_of_the_optimizer_alone(place: str) -> None:
    """Its optimizer may have states already, and some parameters have no gradient in a step."""
    generator = random.Random(3)
    for _ in range(6):
        _random_program(generator, place)


def _random_program(generator: random.Random, place: str) -> None:
    make = OPTIMIZERS[generator.choice(list(OPTIMIZERS))]
    before = range(generator.random() < 0.3)
    twins = Twins(place, make, before=before, staging=generator.choice(LIMITS))
    saved = [copy.deepcopy(optim.state_dict()) for _, optim in twins.both]
    for step in range(10):
        action, seed = generator.choice("sssgcrldhz"), generator.random()
        for i, (net, optim) in enumerate(twins.both):
            choose = random.Random(seed)
            match action:
                case "s":
                    take_step(net, optim, step)
                case "g":  # some gradients are missing
                    go_backward(net, step)
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
    twins.assert_same()


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


def test_a_state_dict_of_before_a_load_can_be_loaded_again(place: str) -> None:
    twins = Twins(place)
    take_step(twins.mine, twins.optim, 0)
    first, expected = twins.optim.state_dict(), copy.deepcopy(twins.optim.state_dict())
    for step in range(3):
        take_step(twins.other, twins.theirs, step)
    twins.optim.load_state_dict(twins.theirs.state_dict())
    take_step(twins.mine, twins.optim, 1)
    twins.optim.load_state_dict(first)
    for number, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(twins.optim.state_dict()["state"][number][key], value), key


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_waiting_for_a_disk_can_be_interrupted(
    call: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Ctrl-C comes during a wait, states are those of the chunks that have stepped."""
    twins = Twins(place)
    twins.step(0)
    for _, optim in twins.both:
        optim.step()  # without gradients
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
    before = [param.detach().clone() for param in twins.mine.parameters()]
    with pytest.raises(KeyboardInterrupt):
        take_step(twins.mine, twins.optim, 1)
    stepped = {
        name
        for (name, param), old in zip(twins.mine.named_parameters(), before, strict=True)
        if not torch.equal(param, old)
    }
    assert bool(stepped - {"gain"}) == (call == "pwritev"), "gain has no states on the disk"
    monkeypatch.undo()
    is_over.set()
    step_only(twins.other, twins.theirs, 1, stepped)
    twins.optim.zero_grad()
    twins.assert_same()
    assert staging_of(twins.optim) == 0
    twins.step(1, 2)
    twins.assert_same()


def test_states_that_are_left_half_moved_are_used_no_more(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(place, dtype=torch.bfloat16, masters=torch.float32)
    twins.step(0)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(masters, "_set_memory", interrupt)
    with pytest.raises(KeyboardInterrupt):
        twins.step(1)
    monkeypatch.undo()
    with pytest.raises(OffloadError, match=r"KeyboardInterrupt while states moved.*last"):
        twins.optim.step()


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
    mine, other = (seeded(Net).bfloat16() for _ in range(2))
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


def test_a_master_follows_whoever_writes_to_its_parameter(place: str) -> None:
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1e-3)

    twins = Twins(place, sgd, torch.bfloat16, masters=torch.float32)
    twins.step(0)
    weight, states = twins.mine.get_parameter("up.weight"), twins.optim.state
    before = states[weight]["master"].clone()
    assert not torch.equal(before, weight.float()), "more precise than the parameter"
    with torch.no_grad():
        weight[0] = 2.0
    weight.grad = torch.zeros_like(weight)
    twins.optim.step()
    after = states[weight]["master"]
    assert torch.equal(after[0], torch.full((6,), 2.0))
    assert torch.equal(after[1:], before[1:])


def test_wide_parameters_have_no_masters(place: str) -> None:
    twins = Twins(place, masters=torch.float32)
    twins.step(0)
    twins.assert_same()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        *((name, None, torch.float32) for name in ("adamw", "fused", "adamw8bit")),
        *((name, torch.float32, None) for name in ("adamw", "fused", "adamw8bit")),
        ("adamw", torch.float32, torch.float64),
    ],
)
def test_states_go_on_with_other_masters_or_none(
    name: str, before: torch.dtype | None, after: torch.dtype | None, place: str
) -> None:
    make = OPTIMIZERS[name]
    first = Twins(place, make, torch.bfloat16, masters=before)
    take_step(first.mine, first.optim, 0)
    second = Twins(place, make, torch.bfloat16, masters=after)
    second.mine.load_state_dict(first.mine.state_dict())
    second.optim.load_state_dict(copy.deepcopy(first.optim.state_dict()))
    third = offload(first.inner, place, masters=after)
    dtype = torch.bfloat16 if after is None else after
    for net, optim in ((second.mine, second.optim), (first.mine, third)):
        take_step(net, optim, 1)
        for state in optim.state.values():
            assert ("master" in state) == (after is not None)
            if name != "adamw8bit":
                assert state["exp_avg"].dtype == dtype
            elif after is not None:
                assert state["master"].dtype == torch.float32
    assert_same(first.mine, third, second.mine, second.optim)


# -- state dicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_goes_on_in_another_optimizer(dtype: torch.dtype, place: str) -> None:
    one, another = (Twins(place, adamw, dtype, masters=torch.float32) for _ in range(2))
    for step in range(3):
        take_step(one.mine, one.optim, step)
    saved = copy.deepcopy(one.optim.state_dict())
    another.mine.load_state_dict(one.mine.state_dict())
    another.optim.load_state_dict(saved)
    for step in (3, 4):
        assert_same(one.mine, one.optim, another.mine, another.optim)
        take_step(one.mine, one.optim, step)
        take_step(another.mine, another.optim, step)
    assert_same(one.mine, one.optim, another.mine, another.optim)


def test_the_state_of_the_optimizer_alone_is_loaded_and_back(place: str) -> None:
    twins = Twins(place)
    for step in range(2):
        take_step(twins.other, twins.theirs, step)
    twins.mine.load_state_dict(twins.other.state_dict())
    twins.optim.load_state_dict(copy.deepcopy(twins.theirs.state_dict()))
    twins.assert_same()
    twins.step(2)
    twins.assert_same()
    again = adamw(twins.other.parameters())
    again.load_state_dict(copy.deepcopy(twins.optim.state_dict()))
    assert_same(twins.mine, twins.optim, twins.other, again)


def test_loading_its_own_state_changes_nothing_and_takes_no_more_room(tmp_path: Path) -> None:
    twins = Twins(f"disk:{tmp_path}")
    for step in range(3):
        twins.step(step)
        size = _on_disk(tmp_path)
        twins.optim.load_state_dict(twins.optim.state_dict())
        for _ in range(2):
            twins.optim.load_state_dict(copy.deepcopy(twins.optim.state_dict()))
        assert _on_disk(tmp_path) <= 2 * size
    twins.assert_same()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda saved: saved["param_groups"][0]["params"].pop(),
        lambda saved: saved["state"][0].pop("exp_avg_scale"),
        lambda saved: saved["state"][0].update(exp_avg_scale=torch.ones(7)),
    ],
)
def test_a_state_of_something_else_is_refused_and_nothing_is_changed(
    spoil: Callable[[Any], object], place: str
) -> None:
    mine, other = (seeded(lambda: nn.Linear(300, 20)) for _ in range(2))
    optim, theirs = (offload(AdamW8bit(net.parameters(), lr=0.05), place) for net in (mine, other))
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
    twins = Twins(f"disk:{folder}")
    twins.step(0, 1)
    assert list(folder.iterdir()) == []
    assert twins.optim.nbytes_kept > 0


def test_a_file_system_without_nameless_files_has_nothing_left_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any, flags: int, *mode: int, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opened(path, flags, *mode, **more)

    opened = os.open
    monkeypatch.setattr(os, "open", refuse)
    twins = Twins(f"disk:{tmp_path}")
    twins.step(0, 1)
    assert list(tmp_path.iterdir()) == []
    twins.assert_same()


def test_memory_and_files_are_freed_with_the_optimizer(tmp_path: Path) -> None:
    net = seeded(Net)
    optim = offload(adamw(net.parameters()), f"disk:{tmp_path}")
    take_step(net, optim, 0)
    assert _on_disk(tmp_path) > 0
    del optim
    gc.collect()
    assert _on_disk(tmp_path) == 0


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


@pytest.mark.parametrize(
    ("call", "at", "message"),
    [
        ("pwritev", 0, "writing .*Input/output error.*last checkpoint"),
        ("pwritev", 3, "writing .*Input/output error.*last checkpoint"),
        ("preadv", 0, "reading .*Input/output error.*last checkpoint"),
        ("preadv", 3, "reading .*Input/output error.*last checkpoint"),
        ("preadv", None, "ended after 0 bytes"),
    ],
)
def test_a_disk_that_fails_or_gives_no_more_bytes_is_one_error(
    call: str, at: int | None, message: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(place)
    twins.step(0)
    calls, move = [], getattr(os, call)

    def fail(file: int, parts: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if at is None:
            return 0
        if len(calls) > at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return int(move(file, parts, offset))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OffloadError, match=message):
        twins.step(1)
    monkeypatch.undo()
    for again in (twins.optim.step, twins.optim.state_dict):
        with pytest.raises(OffloadError, match=message):
            again()


class Raising(torch.optim.AdamW):
    """Raises in a step, for the parameter of a shape."""

    shape: tuple[int, ...] | None = None

    def step(self, closure: Any = None) -> Any:
        shapes = [tuple(param.shape) for group in self.param_groups for param in group["params"]]
        if self.shape in shapes:
            raise ArithmeticError("a bad step")
        return super().step(closure)


def test_an_exception_of_the_optimizer_leaves_states_as_they_are(place: str) -> None:
    twins = Twins(place, lambda params: Raising(params, lr=0.05))
    twins.step(0)
    twins.inner.shape = (70,)  # type: ignore[attr-defined]
    with pytest.raises(ArithmeticError):
        take_step(twins.mine, twins.optim, 1)
    step_only(twins.other, twins.theirs, 1, {"gain", "up.weight"})  # these two come before it
    twins.assert_same()


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


@on_threads(2)
def test_an_interrupted_step_leaves_what_it_leaves_in_memory(
    rank: int, world_size: int, place: str
) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("in the middle")

    net, other = sharded_net(), sharded_net()
    optim = in_backward(net, lambda params: offload(adamw(params), place))
    theirs = in_backward(other, adamw)
    x = batches(world_size, 0)[rank]
    for each in (net, other):
        loss_of(each, x).backward()
    for each in (net, other):
        first: Any = sharded_modules(each)[1]
        handle = first.register_full_backward_pre_hook(fail)
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
        write = scratch_file.ScratchFile.write
        patch.setattr(
            scratch_file.ScratchFile, "write", lambda *args: made.append(1) or write(*args)
        )
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
    ("lion:memory", "lion:host"),
    ("adamw8bit:host", "adamw8bit:disk"),
    ("momentum:memory", "momentum:host"),
    ("no states:host", "no states:disk"),
    ("adafactor:disk in backward", "adafactor:memory"),
    ("adafactor:memory", "adafactor:disk"),
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
def test_torchs_functions_for_state_dicts_work(rank: int, world_size: int, place: str) -> None:
    net, other = sharded_net(), sharded_net()
    optim, theirs = (offload(adamw(each.parameters()), place) for each in (net, other))
    loss_of(net, batches(world_size, 0)[rank]).backward()
    optim.step()
    optim.zero_grad()
    other.load_state_dict(net.state_dict())
    set_optimizer_state_dict(other, theirs, copy.deepcopy(get_optimizer_state_dict(net, optim)))
    assert_same(net, optim, other, theirs)


@on_threads(2)
def test_replicas_that_train_apart_step_alike(rank: int, world_size: int, place: str) -> None:
    net, other = (seeded(SmallNet) for _ in range(2))
    optim = DiLoCo(net, offload(adamw(net.parameters()), place), group=dist.group.WORLD, every=2)
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
    net = seeded(Net)
    with pytest.raises(ValueError, match='expected "host" or "disk:FOLDER"'):
        offload(adamw(net.parameters()), to)


def test_a_place_is_what_was_written() -> None:
    assert folder_of_place("host") is None
    for folder in ("/a b/c", "relative"):
        assert folder_of_place(f"disk:{folder}") == Path(folder)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    net = seeded(Net)
    with pytest.raises(OffloadError, match=r"found no way to make a file in .*file/folder"):
        offload(adamw(net.parameters()), f"disk:{tmp_path}/file/folder")


def test_what_is_no_optimizer_is_refused(place: str) -> None:
    net = seeded(Net)
    once = offload(adamw(net.parameters()), place)
    with pytest.raises(TypeError, match="found OffloadedOptimizer, expected an optimizer"):
        offload(once, "host")
    with pytest.raises(TypeError, match="optimizer: found a Net, expected an Optimizer"):
        offload(net, "host")  # type: ignore[arg-type]
    for make in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            make(once)
    with pytest.raises(ValueError, match="LBFGS needs a closure"):
        offload(torch.optim.LBFGS(net.parameters()), place)
    for dtype in (torch.int32, torch.complex64):
        with pytest.raises(ValueError, match=f"found masters={dtype!r}, expected"):
            offload(adamw(net.parameters()), "host", masters=dtype)
    with pytest.raises(TypeError, match=r"masters: found 'float32', expected a torch\.dtype"):
        offload(adamw(net.parameters()), "host", masters="float32")  # type: ignore[arg-type]
