"""What the runtime reports to whoever watches it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardwise import clip_grad_norm_, fully_shard
from shardwise._torch import autograd, c10d
from shardwise.base import observe
from shardwise.base.observe import Activity, Memory, Route
from shardwise.frontends.module import FSDPModule


class Notes:
    """An observer that writes down what it hears."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.open: dict[int, str] = {}
        self.collectives: dict[int, str] = {}
        self.memory_now: Counter[Memory] = Counter()
        self.most: Counter[Memory] = Counter()
        self._number = 0

    def begin(self, activity: Activity, name: str, dimension: str, nbytes: int) -> int:
        self._number += 1
        self.open[self._number] = f"{activity.value} of {name}"
        self.lines.append(self.open[self._number])
        return self._number

    def collective(
        self, activity: Activity, name: str, wire: Route, nbytes: int, launches: int
    ) -> int:
        self._number += 1
        self.collectives[self._number] = (
            f"{activity.value} of {name or 'the root'} over {wire.ranks} ranks of "
            f"{wire.dimension} by {wire.transport}: {nbytes} bytes in {launches}"
        )
        self.lines.append(self.collectives[self._number])
        return self._number

    def end(self, number: int) -> None:
        if number in self.collectives:
            self.lines.append(f"end of {self.collectives[number].partition(' over')[0]}")
            return
        self.lines.append(f"end of {self.open.pop(number)}")

    def memory(self, kind: Memory, name: str, nbytes: int) -> None:
        self.memory_now[kind] += nbytes
        self.most[kind] = max(self.most[kind], self.memory_now[kind])


@pytest.fixture
def alone() -> Iterator[None]:
    """Rank 0 of four, whose collectives do nothing."""
    with c10d.fake_world(4):
        yield


def _sharded() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3), nn.LayerNorm(3))
    mesh = init_device_mesh("cpu", (4,))
    for module in (model[0], model[1], model):
        fully_shard(module, mesh=mesh, transport="collectives")
    return model


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


_GROUPS = ("forward", "backward")


@pytest.mark.usefixtures("alone")
def test_groups_report_their_forward_and_backward_in_order() -> None:
    model, notes = _sharded(), Notes()
    with observe.observing(notes):
        _step(model)
    assert [line for line in notes.lines if line.removeprefix("end of ").startswith(_GROUPS)] == [
        "forward of the root group",
        "forward of 0",
        "end of forward of 0",
        "forward of 1",
        "end of forward of 1",
        "end of forward of the root group",
        "backward of the root group",
        "backward of 1",
        "end of backward of 1",
        "backward of 0",
        "end of backward of the root group",
        "end of backward of 0",
    ]
    assert not notes.open


class _Two(nn.Linear):
    """Has two outputs."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y.relu(), y.sigmoid()


@pytest.mark.usefixtures("alone")
def test_a_backward_begins_with_the_first_of_several_outputs() -> None:
    model, notes = _Two(8, 8), Notes()
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)), transport="collectives")
    with observe.observing(notes):
        torch.cat(model(torch.ones(2, 8))).sum().backward()  # type: ignore[no-untyped-call]
    assert notes.lines.count("backward of the root group") == 1


class _Inside(nn.Linear):
    """Runs inside itself, and is recomputed in backward."""

    def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        if times == 2 and not autograd.in_backward():
            return checkpoint(super().__call__, x, 1, use_reentrant=False)  # type: ignore[no-any-return]
        y = super().forward(x).relu()
        return self(y, times - 1) if times else y


@pytest.mark.usefixtures("alone")
def test_what_is_recomputed_inside_itself_ends() -> None:
    model, notes = nn.Sequential(_Inside(8, 8)), Notes()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (4,)), transport="collectives")
    with observe.observing(notes):
        _step(model)
    begun = [line for line in notes.lines if line.startswith("forward")]
    assert len(begun) > 1, "it was recomputed"
    assert not notes.open


@pytest.mark.usefixtures("alone")
def test_memory_of_full_parameters_is_what_is_allocated() -> None:
    model, notes = _sharded(), Notes()
    with observe.observing(notes):
        _step(model)
    first, second, root = 4 * (64 + 8), 4 * (4 * 8 + 4), 4 * 8  # three rows are padded to four
    # The root keeps its parameters, and backward prefetches the group before.
    assert notes.most[Memory.FULL_PARAMETERS] == first + second + root
    assert notes.memory_now[Memory.FULL_PARAMETERS] == 0


@pytest.mark.usefixtures("alone")
def test_memory_of_shards_and_gradients_is_reported_until_it_is_freed() -> None:
    notes = Notes()
    with observe.observing(notes):
        model = _sharded()
        shards = 4 * (2 * 8 + 2 + 8 + 1 + 1 + 1)
        assert notes.memory_now[Memory.PARAMETERS] == shards
        _step(model)
        assert notes.memory_now[Memory.GRADIENTS] == shards
        assert notes.most[Memory.GRADIENTS] > shards  # the full ones, until they are reduced
        model.zero_grad()
        assert notes.memory_now[Memory.GRADIENTS] == 0
        del model
        gc.collect()
        assert notes.memory_now[Memory.PARAMETERS] == 0


@pytest.mark.usefixtures("alone")
def test_gradients_that_are_not_synchronized_are_reported() -> None:
    model, notes = _sharded(), Notes()
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    with observe.observing(notes):
        _step(model)
    assert notes.memory_now[Memory.GRADIENTS] == 4 * (64 + 8 + 24 + 3 + 6)


def _fail_in_backward(module: nn.Module, args: object, output: torch.Tensor) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise ValueError("no")

    output.register_hook(fail)  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("alone")
def test_a_parameter_that_was_frozen_is_not_reduced_any_more() -> None:
    seen = []
    for steps in (0, 1):
        model, notes = _sharded(), Notes()
        for _ in range(steps):
            _step(model)
        model[0].bias.requires_grad_(False)
        with observe.observing(notes):
            _step(model)
        seen.append(notes.lines)
    assert seen[0] == seen[1]


@pytest.mark.usefixtures("alone")
def test_an_exception_in_forward_or_backward_ends_what_was_begun() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    model, notes = _sharded(), Notes()
    with observe.observing(notes):
        model.append(Fails())
        with pytest.raises(ValueError, match="no"):
            _step(model)
        assert not notes.open
        del model[3]
        out = model(torch.ones(2, 8))
        out.register_hook(lambda grad: torch.ones(5))
        with pytest.raises(RuntimeError):
            out.sum().backward()
        _step(model)
        assert not notes.open
        handle = model[0].register_forward_hook(_fail_in_backward)
        with pytest.raises(ValueError, match="no"):
            _step(model)
        assert set(notes.open.values()) == {"backward of the root group", "backward of 0"}
        handle.remove()
        _step(model)
    assert not notes.open


def test_memory_is_reported_once_for_each_storage() -> None:
    notes = Notes()
    tensor = torch.zeros(4, 2)
    observe.memory_of(Memory.OTHER, "unobserved", tensor)
    with observe.observing(notes):
        assert observe.is_observed()
        observe.memory_of(Memory.OTHER, "", tensor)
        observe.memory_of(Memory.OTHER, "", tensor[1:])
        assert notes.memory_now[Memory.OTHER] == 32
        view = tensor[1:]
        del tensor
        assert notes.memory_now[Memory.OTHER] == 32
        del view
        assert notes.memory_now[Memory.OTHER] == 0
        observe.memory_of(Memory.OTHER, "", torch.zeros(3, device="meta"))
        left = torch.zeros(2)
        observe.memory_of(Memory.OTHER, "", left)
    later = Notes()
    with observe.observing(later):
        del left  # the observer that was told has gone
    assert not later.memory_now
    assert notes.memory_now[Memory.OTHER] == 8


def test_memory_of_a_tensor_without_a_storage_is_not_reported() -> None:
    notes = Notes()
    sparse = torch.eye(3).to_sparse()
    with observe.observing(notes):
        observe.memory_of(Memory.OTHER, "", sparse)
    assert not notes.memory_now


def test_one_observer_at_a_time() -> None:
    with (
        observe.observing(Notes()),
        pytest.raises(RuntimeError, match="a Notes watches"),
        observe.observing(Notes()),
    ):
        pass
    assert not observe.is_observed()


def test_during_ends_what_raises() -> None:
    notes = Notes()
    with (
        observe.observing(notes),
        pytest.raises(KeyError),
        observe.during(Activity.COPY, "layers.1"),
    ):
        raise KeyError
    assert notes.lines == ["copy of layers.1", "end of copy of layers.1"]


@pytest.mark.usefixtures("alone")
def test_the_gradient_norm_is_reported_as_a_collective_and_a_wait() -> None:
    model, notes = _sharded(), Notes()
    _step(model)
    with observe.observing(notes):
        clip_grad_norm_(model.parameters(), 1.0)
    assert notes.lines == [
        "all-reduce of the gradient norm over 4 ranks of dp by fake: 4 bytes in 1",
        "wait of the gradient norm",
        "end of wait of the gradient norm",
        "end of all-reduce of the gradient norm",
    ]
