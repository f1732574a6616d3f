"""What calibration measured: as a file, and as a machine."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.app.cli import calibrate as command
from shardwise.insight.planning import calibrate
from shardwise.insight.planning.calibrate import (
    Calibration,
    Effort,
    MeasuredRates,
    cache_file,
    check_writable,
    measure_machine,
    stored,
)
from shardwise.insight.planning.costs import FAMILIES, op_seconds
from shardwise.insight.planning.events import Op, StepPhase
from shardwise.insight.planning.machine import (
    GROUP,
    Curve,
    Execution,
    Link,
    MachineError,
    Progress,
    SharedBy,
)
from shardwise.insight.planning.probe_steps import Size, Sizes
from shardwise.insight.planning.probes import OperationRecorder, probes

CURVE = Curve((100.0, 1000.0), (1e-6, 5e-6))
CURVES = {f"{family}.{dtype}": CURVE for family in FAMILIES for dtype in ("float32", "bfloat16")}
GLOO = Link(name="gloo", bandwidth=1e9, latency=0.0, launch=1e-4, host_cost=1e-9)
SHM = Link(name="shm", bandwidth=1e15, latency=0.0, launch=1e-5, progress=Progress.WAITING)
ALONE = MeasuredRates(
    ranks=1,
    curves=CURVES,
    overheads={"forward": 1e-6, "backward": 2e-6, "optimizer": 3e-6, GROUP: 1e-4},
    links={},
)
PAIR = MeasuredRates(
    ranks=2,
    curves={name: Curve(CURVE.sizes, (2e-6, 1e-5)) for name in CURVES},
    overheads={"forward": 2e-6, "backward": 2e-6, "optimizer": 3e-6, GROUP: 0.0},
    links={"gloo": GLOO, "shm": SHM},
)
FOUND = Calibration(
    processor="a processor", cores=2, torch=torch.__version__, measured=(ALONE, PAIR)
)


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "machine.json"
    FOUND.save(path)
    assert Calibration.load(path) == FOUND


def test_ranks_get_what_as_many_processes_at_once_could_do() -> None:
    alone, pair = FOUND.machine(1), FOUND.machine(2)
    assert alone.device.curves == ALONE.curves
    assert alone.device.execution is Execution.DIRECT
    assert pair.device.curves == PAIR.curves
    assert (pair.inside, pair.links["gloo"]) == (SHM, GLOO)
    assert pair.device.memory <= alone.device.memory


def test_more_ranks_than_processors_take_turns() -> None:
    pair, four = FOUND.machine(2), FOUND.machine(4)
    for name, curve in pair.device.curves.items():
        assert four.device.curves[name](500) == pytest.approx(2 * curve(500))
    assert four.device.overheads["forward"] == 2 * pair.device.overheads["forward"]
    assert four.links["gloo"].bandwidth == GLOO.bandwidth / 2


def test_a_link_between_hosts_is_no_faster_than_messages_and_costs_as_much() -> None:
    slow = FOUND.machine(2, "ethernet-1").between
    assert slow.bandwidth == pytest.approx(0.95e9 / 8)
    assert slow.shared_by is SharedBy.HOST
    assert slow.host_cost > GLOO.host_cost, "a network has shorter packets"
    assert FOUND.machine(2, "ethernet-400").between.bandwidth == GLOO.bandwidth
    assert FOUND.machine(1).between == GLOO
    with pytest.raises(MachineError, match="--link: found wire"):
        FOUND.machine(2, "wire")


def test_every_family_is_probed_in_each_dtype_by_ascending_size() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        sizes: dict[str, list[int]] = {}
        for probe in probes(dtype):
            nbytes = sum(each.nbytes for each in probe.inputs)
            assert all(each.isfinite().all() for each in probe.inputs)
            sizes.setdefault(probe.family, []).append(nbytes)
        assert sizes.keys() == FAMILIES
        assert all(found == sorted(set(found)) for found in sizes.values())


@pytest.mark.parametrize("family", sorted(FAMILIES - {"total_norm"}))
def test_a_probe_is_an_operation_of_its_family(family: str) -> None:
    probe = next(probe for probe in probes(torch.float32) if probe.family == family)
    recorder = OperationRecorder()
    with torch.no_grad(), recorder:
        probe.call(*probe.inputs)
    (op,) = (op for op in recorder.ops if op.nbytes)
    known = {f"{each}.float32": Curve((1.0,), (9.0,)) for each in FAMILIES}
    known[f"{family}.float32"] = Curve((1e12,), (0.5,))
    half = {name.replace("float32", "bfloat16"): curve for name, curve in known.items()}
    device = FOUND.machine(1).device.__class__(
        name="x", memory=1, memory_bandwidth=1, flops={"float32": 1}, curves=known | half
    )
    assert op_seconds(op, device) == 0.5


def test_products_take_time_by_operations_and_copies_by_bytes() -> None:
    device = FOUND.machine(1).device
    product = Op("aten.mm.default", "", StepPhase.FORWARD, 1000, 10, (), "float32", False)
    copy = Op("aten.copy_.default", "", StepPhase.FORWARD, 0, 100, (), "bfloat16", False)
    assert op_seconds(product, device) == 5e-6
    assert op_seconds(copy, device) == 1e-6


#: So short that it measures nothing well.
SHORT = Effort(
    seconds=1e-6,
    steps=2,
    timed_steps=2,
    sizes=Sizes(*(Size(width, 16, layers=1) for width in (16, 32, 64))),
)


@pytest.mark.long
def test_a_machine_is_measured_alone_and_with_all_of_its_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "cores", lambda: 2)
    said: list[str] = []
    found = measure_machine(said.append, SHORT)
    assert said == ["one process alone", "2 at once"]
    assert [each.ranks for each in found.measured] == [1, 2]
    assert found.torch == torch.__version__
    path = tmp_path / "machine.json"
    found.save(path)
    assert Calibration.load(path) == found, "it has all that plans need"
    assert found.measured[0].links == {}
    assert found.measured[1].links.keys() == {"gloo", "shm"}
    for each in found.measured:
        assert all(took > 0 for curve in each.curves.values() for took in curve.seconds)
        assert all(seconds >= 0 for seconds in each.overheads.values())


# -- the file --------------------------------------------------------------------------------------


def _changed(change: Mapping[str, Any]) -> str:
    return json.dumps(json.loads(json.dumps(FOUND.to_json())) | dict(change))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ("[]", "expected an object"),
        (_changed({"version": 99}), "2: run `shardwise calibrate` again"),
        (_changed({"cores": -1}), "an integer from 1"),
        (_changed({"processor": "a\x1b[2J"}), "printable"),
        (_changed({"measured": []}), "no measurements"),
        (_changed({"measured": [{}]}), "has no 'curves'"),
        ('{"version": 1, "version": 1}', "twice"),
        (_changed({"cores": 10**400}), "a huge number"),
        (json.dumps(FOUND.to_json()).replace('"latency": 0.0', f'"latency": {10**400}'), "huge"),
        (json.dumps(FOUND.to_json())[:-9], "is not valid JSON"),
        (" " * (1 << 25), "at most"),
        ("[" * 100_000, "nested too deeply|lists and objects"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(MachineError, match=message):
        Calibration.load(path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sizes", [1, 2, 3], "as many seconds as ascending sizes"),
        ("sizes", [1000, 100], "ascending"),
        ("seconds", [1e-6, -1], "positive"),
        ("seconds", [1e-6, True], "positive"),
        ("seconds", ["a", 1], "positive"),
    ],
)
def test_damaged_curves_are_refused(
    tmp_path: Path, field: str, value: list[object], message: str
) -> None:
    values = json.loads(json.dumps(FOUND.to_json()))
    values["measured"][0]["curves"]["copy.float32"][field] = value
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(values))
    with pytest.raises(MachineError, match=message):
        Calibration.load(path)


def test_huge_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(" " * 2**21)
    with pytest.raises(MachineError, match=r"at most 1,048,576"):
        Calibration.load(path)


def test_plans_find_what_was_measured_here_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file().is_relative_to(tmp_path)
    assert stored() is None
    FOUND.save(cache_file())
    with pytest.raises(MachineError, match=r"a processor, 2 cores.*run `shardwise calibrate`"):
        stored()
    monkeypatch.setattr(calibrate, "processor", lambda: "a processor")
    monkeypatch.setattr(calibrate, "cores", lambda: 2)
    assert stored() == FOUND


@pytest.mark.parametrize(
    ("part", "name", "message"),
    [
        ("curves", "copy.float32", "none of copy.float32"),
        ("overheads", "backward", "none of backward"),
        ("links", "gloo", "no messages"),
    ],
)
def test_a_file_that_lacks_what_plans_need_is_refused(
    tmp_path: Path, part: str, name: str, message: str
) -> None:
    values = json.loads(json.dumps(FOUND.to_json()))
    del values["measured"][-1][part][name]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(values))
    with pytest.raises(MachineError, match=message):
        Calibration.load(path)


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

    def full(self: Path, text: str, encoding: str) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            FOUND.save(path)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["measured before"]


@pytest.mark.parametrize(("others", "warned"), [(0.0, False), (3600.0, True)])
def test_a_busy_machine_is_said_to_be_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    others: float,
    warned: bool,
) -> None:
    seconds = iter([100.0, 100.0 + others])
    monkeypatch.setattr(calibrate, "seconds_of_others", lambda: next(seconds))
    monkeypatch.setattr(calibrate, "measure_machine", lambda _: FOUND)
    command.calibrate(tmp_path / "machine.json")
    assert ("other programs used" in capsys.readouterr().out) is warned
    assert Calibration.load(tmp_path / "machine.json") == FOUND
