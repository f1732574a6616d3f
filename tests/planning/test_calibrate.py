"""What calibration measured: as a file, and as a machine."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.app.cli import plan as command
from shardwise.insight.planning import calibrate
from shardwise.insight.planning.calibrate import (
    Calibration,
    cache_file,
    check_writable,
    stored,
)
from shardwise.insight.planning.clock import CALLS, WORK, amount_of, calls_of, op_seconds
from shardwise.insight.planning.events import Op, StepPhase
from shardwise.insight.planning.machine import DEVICES, LINKS, Execution, MachineError, SharedBy
from shardwise.timeline import recorded

ALONE = dict.fromkeys((*CALLS, *WORK), 1e-9) | {"product.float32": 1e-11}
PAIR = {unit: 2 * cost for unit, cost in ALONE.items()} | {
    "launch.gloo": 1e-4,
    "sent.gloo": 1e-9,
    "launch.shm": 1e-5,
}
FOUND = Calibration(
    device="cpu",
    processor="a processor",
    cores=2,
    torch=torch.__version__,
    costs={1: ALONE, 2: PAIR},
)


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "machine.json"
    FOUND.save(path)
    assert Calibration.load(path) == FOUND


def test_ranks_get_what_as_many_processes_at_once_could_do() -> None:
    alone, pair = FOUND.machine(1), FOUND.machine(2)
    assert alone.device.costs == ALONE
    assert alone.device.execution is Execution.DIRECT
    assert alone.device.peak("float32") == pytest.approx(1e11)
    assert not alone.links
    assert pair.device.costs == PAIR
    assert pair.inside is pair.links["shm"]
    assert (pair.inside.launch, pair.links["gloo"].host_cost) == (1e-5, 1e-9)
    assert pair.device.memory <= alone.device.memory


def test_more_ranks_than_processors_take_turns() -> None:
    four = FOUND.machine(4)
    assert four.device.costs == {unit: 2 * cost for unit, cost in PAIR.items()}
    assert four.links["gloo"].host_cost == 2e-9


def test_between_hosts_a_link_has_its_bandwidth_and_messages_their_cost() -> None:
    slow = FOUND.machine(2, "ethernet-1").between
    assert slow.bandwidth == pytest.approx(0.95e9 / 8)
    assert slow.shared_by is SharedBy.HOST
    assert slow.launch == 1e-4
    assert slow.host_cost > 1e-9, "a network has shorter packets"
    assert FOUND.machine(1).between.name == "gloo"
    with pytest.raises(MachineError, match="--link: found wire"):
        FOUND.machine(2, "wire")


def test_an_accelerator_has_the_memory_of_its_data_sheet_and_the_costs_that_were_measured() -> None:
    costs = {1: ALONE | {"host": 5e-6}}
    known = replace(FOUND, device="cuda", processor="NVIDIA H100 80GB HBM3", costs=costs).machine(8)
    assert (known.device.costs, known.device.op_overhead) == (costs[1], 5e-6)
    assert (known.device.name, known.device.memory) == ("h100", DEVICES["h100"].memory)
    assert known.device.execution is Execution.QUEUED
    assert known.between is LINKS["ib-400"]
    assert known.inside is LINKS["nvlink4"]


OP = Op("aten.mul.Tensor", "", StepPhase.FORWARD, 0, 10, (), "float32", False)


@pytest.mark.parametrize(
    ("change", "unit", "amount"),
    [
        ({}, "bytes.float32", 10),
        ({"dtype": "float16", "phase": StepPhase.RECOMPUTE}, "bytes.bfloat16", 10),
        ({"name": "aten.mm.default", "flops": 1000}, "product.float32", 1000),
        (
            {"name": "aten._scaled_dot_product_flash_attention", "flops": 7, "dtype": "bfloat16"},
            "attention.bfloat16",
            7,
        ),
        ({"name": "aten.embedding.default", "shapes": ((9, 9), (2, 3))}, "bytes.lookup", 2 * 4 * 6),
        ({"runtime": True, "phase": StepPhase.BACKWARD}, "bytes.runtime", 10),
        ({"phase": StepPhase.OPTIMIZER, "shapes": ((1,), (1,))}, "bytes.optimizer", 10),
    ],
)
def test_an_operation_is_work_of_one_unit(change: dict[str, Any], unit: str, amount: float) -> None:
    op = replace(OP, **change)
    assert amount_of(op) == (unit, amount)
    assert op_seconds(op, FOUND.machine(1).device) == pytest.approx(ALONE[unit] * amount)
    assert unit in WORK
    assert calls_of(op)[0] in CALLS
    assert calls_of(op)[1] == max(1, len(op.shapes)) if op.phase is StepPhase.OPTIMIZER else 1


# -- the file --------------------------------------------------------------------------------------


def _changed(change: Mapping[str, Any]) -> str:
    return json.dumps({"version": 3, **json.loads(json.dumps(asdict(FOUND))), **change})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ("[]", "expected an object"),
        (_changed({"version": 2}), "version 2, expected version 3: run `shardwise calibrate`"),
        (_changed({"cores": -1}), "an integer from 1"),
        (_changed({"processor": "a\x1b[2J"}), "printable"),
        (_changed({"costs": {}}), "costs by number of ranks"),
        (_changed({"costs": {"many": ALONE}}), "costs by number of ranks"),
        (_changed({"costs": {"1": {}}}), "no cost of attention.bfloat16"),
        (_changed({"costs": {"1": {**ALONE, "bytes.float32": -1}}}), "a finite number, 0 or more"),
        (_changed({"costs": {"1": {**ALONE, "bytes.float32": True}}}), "a finite number"),
        ('{"version": 1, "version": 1}', "twice"),
        (_changed({"cores": 10**400}), "a huge number"),
        (_changed({})[:-9], "is not valid JSON"),
        (" " * (1 << 25), "at most 1,048,576"),
        ("[" * 100_000, "nested too deeply|lists and objects"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(MachineError, match=message):
        Calibration.load(path)


def test_plans_find_what_was_measured_here_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file().is_relative_to(tmp_path)
    assert stored() is None
    FOUND.save(cache_file())
    with pytest.raises(
        MachineError, match=r"a processor, torch .*, cores: 2, expected .*run `shardwise calibrate`"
    ):
        stored()
    monkeypatch.setattr(calibrate, "processor", lambda: "a processor")
    monkeypatch.setattr(calibrate, "usable_cores", lambda: 2)
    assert stored() == FOUND


def test_a_pipe_in_place_of_the_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "machine.json")
    with pytest.raises(MachineError, match="expected a regular file"):
        Calibration.load(tmp_path / "machine.json")


def test_the_file_is_named_after_the_host_whatever_that_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for host, name in {
        "node-7.local": "machine-node-7.local.json",
        "../../etc/x\n": "machine-.._.._etc_x_.json",
        "ü" * 300: f"machine-{'_' * 64}.json",
        "": "machine-here.json",
    }.items():
        monkeypatch.setattr("platform.node", lambda host=host: host)
        assert cache_file() == tmp_path / "shardwise" / name


def test_the_cache_folder_is_absolute_or_that_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_file().parent == tmp_path / ".cache" / "shardwise"

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(MachineError, match="HOME: found no home folder, expected one, or XDG_"):
        cache_file()


def test_nothing_is_measured_for_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "machine.json", tmp_path):
        with pytest.raises(OSError, match=r"Not a directory|Is a directory|File exists"):
            check_writable(path)
    check_writable(tmp_path / "new" / "machine.json")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_disk_that_fills_up_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "machine.json"
    path.write_text("measured before")

    def full(handle: int, content: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            FOUND.save(path)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["measured before"]


@pytest.mark.parametrize(("others", "warned"), [(0.0, False), (36.0, True)])
def test_a_busy_machine_is_said_to_be_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    others: float,
    warned: bool,
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (others, 0.0, 0.0))
    monkeypatch.setattr(recorded, "measure_machine", lambda _: FOUND)
    command.calibrate(tmp_path / "machine.json")
    out = capsys.readouterr().out
    assert ("other programs used" in out) is warned
    assert "100 GFLOP/s" in out
    assert "1.00 GB/s, 100 µs each" in out
    assert Calibration.load(tmp_path / "machine.json") == FOUND
