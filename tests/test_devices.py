"""What is asked of a device, on devices that lack some of it."""

from __future__ import annotations

import ctypes
import os
import types
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from shardwise.app.recipes.core.checkpointing import _random_state, _set_random_state
from shardwise.app.recipes.core.training import _choose_device
from shardwise.base import devices
from shardwise.base.devices import GLOO, NCCL, Backend, Copy, backend_of, backends_for
from shardwise.base.errors import CheckpointError
from shardwise.elastic.world import World
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.training import AUTO

CUDA = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test ask anew what a device can do."""
    for name in ("has_streams", "pins"):
        monkeypatch.setattr(devices, name, getattr(devices, name).__wrapped__)


class Pretend:
    """An accelerator of torch that is not there.

    Attributes:
        module: what torch would have as ``torch.cuda``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, number: int) -> None:
        self.module = types.SimpleNamespace()
        self.current = 0
        replaced = {
            "current_accelerator": lambda check_available=False: torch.device(kind),
            "device_count": lambda: number,
            "current_device_index": lambda: self.current,
            "set_device_index": lambda device: setattr(self, "current", device.index),
        }
        for name, function in replaced.items():
            monkeypatch.setattr(torch.accelerator, name, function)
        monkeypatch.setattr(torch, "get_device_module", lambda _: self.module)


def _world(size: int, rank: int = 0) -> World:
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


@pytest.mark.parametrize(
    ("wanted", "kind", "number", "ranks", "found"),
    [
        (AUTO, "xpu", 2, 2, "xpu:1"),
        (AUTO, "xpu", 1, 2, "cpu"),
        ("cpu", "xpu", 2, 2, "cpu"),
        ("cuda", "cuda", 8, 4, "cuda:3"),
        ("mps", "mps", 1, 1, "mps:0"),
    ],
)
def test_every_rank_takes_the_accelerator_of_its_number(
    monkeypatch: pytest.MonkeyPatch, wanted: str, kind: str, number: int, ranks: int, found: str
) -> None:
    there = Pretend(monkeypatch, kind, number)
    assert str(_choose_device(wanted, _world(ranks, ranks - 1))) == found
    assert there.current == (ranks - 1 if found != "cpu" else 0)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("cuda", "--device: found cuda where torch .* has no accelerator, expected cpu$"),
        ("gpu", "expected cpu; an accelerator is named by its type, such as cuda"),
        ("H100", "found H100 .* such as cuda: `shardwise plan --device` alone takes its model"),
        ("npu", "expected cpu; npu devices come with the package torch_npu, beside torch"),
        ("tpu", "expected cpu; tpu devices come with the package torch_tpu, beside torch"),
        ("xla", "TPUs are of type tpu and come with torch_tpu, in place of torch_xla"),
        ("cuda:0", "expected cpu, without an index: each rank takes the device of its number"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(wanted: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        _choose_device(wanted, _world(1))


def test_of_another_type_or_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    Pretend(monkeypatch, "xpu", 1)
    with pytest.raises(OptionError, match="the accelerator xpu, expected xpu or cpu"):
        _choose_device("cuda", _world(1))
    with pytest.raises(OptionError, match="found xpu, of which this host has 1, expected one for"):
        _choose_device("xpu", _world(2))


def test_a_device_without_streams_pinned_memory_figures_and_random_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Pretend(monkeypatch, "cuda", 2)

    def lacking(*_: object, **__: object) -> None:
        raise NotImplementedError("Backend doesn't support events.")

    monkeypatch.setattr(torch.accelerator, "current_stream", lacking)
    assert not devices.has_streams(CUDA)
    assert not devices.pins(CUDA), "no event could say when a copy is over"
    assert devices.name(CUDA) == "cuda"
    assert devices.peak_memory(CUDA) == devices.peak_memory(devices.CPU) > 2**20
    assert devices.random_state(CUDA) is None
    devices.set_random_state(CUDA, torch.zeros(0))  # does nothing
    value = torch.arange(6.0).view(2, 3).t()
    copied = devices.copy_to_host(value, Copy.PAGEABLE)
    assert copied.is_contiguous()
    assert torch.equal(copied, value)


def test_a_device_with_streams_may_be_unable_to_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    Pretend(monkeypatch, "cuda", 2)
    stream = types.SimpleNamespace(record_event=lambda: None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: stream)
    assert devices.has_streams(CUDA)
    assert not devices.pins(CUDA), "this torch pins for no accelerator"


def test_figures_come_from_the_module_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Pretend(monkeypatch, "cuda", 2)
    there.module.get_device_name = lambda device: f"card {device.index}"
    there.module.max_memory_allocated = lambda device: 100 + device.index
    there.module.get_rng_state = lambda device: torch.tensor([device.index])
    assert devices.name(CUDA) == "card 1"
    assert devices.peak_memory(CUDA) == 101
    assert devices.random_state(CUDA) == torch.tensor([1])


def test_the_generator_of_a_device_comes_before_the_functions_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = Pretend(monkeypatch, "cuda", 2)

    def refuse(*_: object) -> None:
        raise RuntimeError("get_rng_state can only be called by the PyTorch framework")

    there.module.get_rng_state = there.module.set_rng_state = refuse
    there.module.default_generators = torch.Generator(), torch.Generator()
    expected = there.module.default_generators[1].manual_seed(5).get_state()
    state = devices.random_state(CUDA)
    assert state is not None
    assert torch.equal(state, expected)
    there.module.default_generators[1].manual_seed(6)
    devices.set_random_state(CUDA, state)
    assert torch.equal(there.module.default_generators[1].get_state(), expected)
    there.module.default_generators = ()  # as before a device is used for the first time
    there.module.get_rng_state = lambda device: expected
    assert devices.random_state(torch.device("cuda")) is expected


def test_a_process_that_is_bound_to_a_device_computes_on_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = Pretend(monkeypatch, "xpu", 4)
    there.current = 2

    def refuse(device: torch.device) -> None:
        raise ValueError(f"Cannot set device to index {device.index}, bound to index 2")

    monkeypatch.setattr(torch.accelerator, "set_device_index", refuse)
    assert _choose_device("xpu", _world(2, 1)) == torch.device("xpu", 2)


def test_a_package_that_finds_no_device_is_not_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "torch_tpu" or None)
    with pytest.raises(OptionError, match="torch_tpu is installed, and finds no tpu device"):
        _choose_device("tpu", _world(1))
    with pytest.raises(OptionError, match="npu devices come with the package torch_npu"):
        _choose_device("npu", _world(1))


def test_a_backend_of_which_nothing_is_known_needs_only_what_all_can_do() -> None:
    unknown = backend_of("theirs", CUDA)
    assert unknown == Backend("theirs")
    assert not (unknown.averages or unknown.coalesces or unknown.sends_messages)
    assert backend_of("gloo", CUDA) == Backend("gloo"), "gloo itself stages what is on a GPU"
    assert backend_of("gloo", devices.CPU) is GLOO
    assert backend_of("nccl", CUDA) is NCCL


def test_every_world_has_gloo_for_small_messages() -> None:
    assert backends_for(devices.CPU) == "gloo"
    assert backends_for(CUDA) == "cpu:gloo,cuda:nccl"
    assert backends_for(torch.device("xpu", 0)) == "cpu:gloo,xpu:xccl"


def test_random_states_go_by_the_type_of_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    there = Pretend(monkeypatch, "cuda", 2)
    put: list[object] = []
    there.module.get_rng_state = lambda device: torch.tensor([7])
    there.module.set_rng_state = lambda state, device: put.append((state, device))
    saved = _random_state(CUDA)
    assert list(saved["rank0"]) == ["cpu", "cuda"], "as in all checkpoints so far"
    _set_random_state(CUDA, {"random": saved}, tmp_path)
    assert put == [(torch.tensor([7]), CUDA)]
    torch.rand(1)
    for elsewhere in (None, torch.device("xpu", 0)):
        _set_random_state(elsewhere, {"random": saved}, tmp_path)
        assert torch.equal(torch.get_rng_state(), saved["rank0"]["cpu"])
    assert len(put) == 1, "a state of another type of device is left alone"
    with pytest.raises(CheckpointError, match="holds no random states"):
        _set_random_state(CUDA, {"random": {"rank0": {"cuda": torch.tensor([7])}}}, tmp_path)


# -- what a host has ------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which the kernel shows the version of the driver; there is none yet.

    Torch is as it is built for CPUs.
    """
    path = tmp_path / "version"
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError("nothing is loaded")))
    for name in ("_NVIDIA", "_AMD"):
        monkeypatch.setattr(devices, name, (path, getattr(devices, name)[1]))
    return path


NVIDIA = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
    "GCC version:  gcc version 12.2.0 (GCC)\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root)\n"


def test_a_host_without_accelerators_has_none_to_name(kernel: Path) -> None:
    assert devices.models() == []
    assert devices.versions() == {}
    assert devices.why_none() == ""


def test_accelerators_are_named_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Pretend(monkeypatch, "cuda", 2)
    there.module.get_device_name = lambda device: f"card {device.index}"
    there.module.get_device_properties = lambda device: types.SimpleNamespace(
        total_memory=2**30 + device.index
    )
    assert devices.models() == [("card 0", 2**30), ("card 1", 2**30 + 1)]
    del there.module.get_device_properties, there.module.get_device_name
    assert devices.models() == [("cuda", 0)] * 2


@pytest.mark.parametrize(("text", "version"), [(NVIDIA, "535.129.03"), (OPEN, "580.95.05")])
def test_the_kernel_tells_the_version_of_a_driver(kernel: Path, text: str, version: str) -> None:
    kernel.write_text(text)
    assert devices.versions() == {"driver": version}
    kernel.write_text("something else")
    assert devices.versions() == {}


def test_versions_of_torchs_build_and_of_the_loaded_library(
    monkeypatch: pytest.MonkeyPatch, kernel: Path
) -> None:
    kernel.write_text("6.12.12\n")
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    loaded = {"librccl.so.1": 22203}

    class Library:
        def __init__(self, name: str, mode: int) -> None:
            assert mode & os.RTLD_NOLOAD, "what is not loaded is not to be loaded"
            if name not in loaded:
                raise OSError(f"{name}: cannot open shared object file")
            self._code = loaded[name]

        def ncclGetVersion(self, number: Any) -> int:  # noqa: N802 (its name)
            number._obj.value = self._code
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert devices.versions() == {"driver": "6.12.12", "ROCm": "6.4.1", "RCCL": "2.22.3"}
    del loaded["librccl.so.1"]
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert devices.versions()["NCCL"] == "2.27.5", "it is a part of torch"


def test_a_device_may_tell_the_version_of_its_driver(
    monkeypatch: pytest.MonkeyPatch, kernel: Path
) -> None:
    there = Pretend(monkeypatch, "xpu", 1)
    told = types.SimpleNamespace(driver_version="1.6.33578", total_memory=1)
    there.module.get_device_properties = lambda device: told
    monkeypatch.setattr(torch.version, "xpu", "20250301")
    assert devices.versions() == {"driver": "1.6.33578", "SYCL": "20250301"}


def test_a_driver_that_torch_cannot_use_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, kernel: Path
) -> None:
    kernel.write_text(NVIDIA)
    monkeypatch.setattr(torch.version, "cuda", None)
    expected = f"torch {torch.__version__} is built for CPUs, and the driver is 535.129.03"
    assert devices.why_none() == expected
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old.\nPlease update it.")

    monkeypatch.setattr(torch.cuda, "init", init)
    assert devices.why_none() == "The NVIDIA driver on your system is too old."
    Pretend(monkeypatch, "cuda", 1)
    assert devices.why_none() == "", "torch has found one"
