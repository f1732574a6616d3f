"""Many steps leave nothing behind."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pytest
import torch

from shardwise import clip_grad_norm_
from shardwise.sharding.state import state_of
from tests.harness import run_ranks
from tests.sharding.nets import Net, batches, loss_of, sharded_net

pytestmark = pytest.mark.usefixtures("new_ranks")

WARM_UP = 300
EVERY = 50  # steps from one look to the next

# Memory to lay out in is taken once more where a peer is late for the first time.
SLACK = 4

# What the allocator may keep and give back between two looks; a leak of one small tensor per step
# would be more, with the Python object around it.
GROWTH = 500_000


def _sizes(root: object) -> dict[str, int]:
    """The length of every container that can be reached through Shardwise's own objects."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()

    def visit(value: object, path: str) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if hasattr(value, "__len__") and hasattr(value, "__iter__"):
            if not isinstance(value, str | bytes | torch.Tensor):
                sizes[path] = len(value)
                items = value.values() if isinstance(value, dict) else list(value)
                for i, item in enumerate(items):
                    visit(item, f"{path}[{i}]")
        elif type(value).__module__.startswith("shardwise"):
            for name, attribute in _attributes(value):
                visit(attribute, f"{path}.{name}")

    visit(root, "root")
    return sizes


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from getattr(value, "__dict__", {}).items()
    for name in getattr(type(value), "__slots__", ()):
        if hasattr(value, name):
            yield name, getattr(value, name)


def _soak(
    rank: int, world_size: int, transport: str, steps: int, lists: Sequence[str]
) -> dict[str, Any]:
    net = sharded_net(lambda: Net(blocks=2), transport=transport)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, foreach=True)
    root = state_of(net).root
    process = psutil.Process()
    inputs = [batches(world_size, step)[rank] for step in range(4)]
    rss: list[int] = []
    blocks: list[int] = []
    sizes: list[dict[str, int]] = []
    losses: list[float] = []

    gc.freeze()  # what was there before is looked at no more

    def step(number: int) -> None:
        net.set_requires_gradient_sync(number % 4 != 1)
        loss = loss_of(net, inputs[number % len(inputs)])
        loss.backward()
        if number % 8 == 0:
            clip_grad_norm_(net.parameters(), 1.0)
        if number % 4 != 1:
            optimizer.step()
            optimizer.zero_grad()
        if number % 50 == 0:
            with torch.no_grad():
                net(inputs[0])
            losses.append(loss.item())

    for number in range(steps):
        step(number)
        if number >= WARM_UP and number % EVERY == 0:
            rss.append(process.memory_info().rss)
            gc.collect()
            blocks.append(sys.getallocatedblocks())
        if number in (WARM_UP, steps - EVERY):
            sizes.append(_sizes(root))

    # A step makes no cycle that holds a tensor until the collector comes by.
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    for number in range(4):
        step(number)
    gc.collect()
    left = [type(each).__name__ for each in gc.garbage if isinstance(each, torch.Tensor)]
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    values = [param.to_local() for param in net.parameters()]
    return {
        "rss": rss,
        "blocks": blocks,
        "sizes": sizes,
        "losses": losses,
        "transport's": lists,
        "left": left,
        "finite": all(bool(torch.isfinite(value).all()) for value in values),
    }


@pytest.mark.parametrize(
    ("transport", "steps", "lists"),
    [
        pytest.param("auto", 700, (), id="auto"),
        pytest.param("auto", 2000, (), id="auto-long", marks=pytest.mark.long),
        pytest.param(
            *("c10d", 700, ("_under_way", "_calls", "_kinds")), id="c10d", marks=pytest.mark.long
        ),
    ],
)
def test_many_steps_leave_nothing_behind(transport: str, steps: int, lists: Sequence[str]) -> None:
    """Over a transport whose lists are known by name: one test, since two would train twice."""
    for rank, seen in enumerate(run_ranks(_soak, 2, transport, steps, lists)):
        _check_memory(rank, seen)
        _check_lists(rank, seen)
        assert not seen["left"], f"rank {rank}: tensors wait for the garbage collector"
        assert seen["finite"]
        assert seen["losses"][-1] < seen["losses"][0]


def _check_memory(rank: int, seen: dict[str, Any]) -> None:
    growth = min(seen["rss"][-4:]) - max(seen["rss"][:4])
    assert growth <= GROWTH, f"rank {rank} grew by {growth} bytes: {seen['rss']}"
    blocks = seen["blocks"][3:]  # behind the first look at all lists
    steps = EVERY * (len(blocks) - 1)
    growth = blocks[-1] - blocks[0]
    assert growth < steps / 2, f"rank {rank}: {growth} more blocks in {steps} steps: {blocks}"


def _check_lists(rank: int, seen: dict[str, Any]) -> None:
    first, later = seen["sizes"]
    for known in ("_in_flight", "_finished", *seen["transport's"]):
        assert any(path.endswith(known) for path in first), f"the walk has not found {known}"
    grown = {
        path: (size, later[path])
        for path, size in first.items()
        if later.get(path, 0) > size + SLACK
    }
    assert not grown, f"on rank {rank}: {grown}"
    others = {path for path in later.keys() ^ first.keys() if "_exchange._parts" not in path}
    assert not others, f"on rank {rank}: {others}"
