"""Devices and links by name, by what devices report, and from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.insight.planning.machine import (
    DEVICES,
    LINKS,
    Machine,
    MachineError,
    SharedBy,
    device_reported_as,
    link_named,
)

FILE = """
ranks_per_host = 4

[device]
name = "my-gpu"
memory = 85_899_345_920
memory_bandwidth = 2.0e12
matmul_efficiency = 0.6
host_link = "pcie5"
flops.bfloat16 = 312e12
flops.float32 = 19.5e12

[link_between_hosts]
name = "my-fabric"
bandwidth = 23e9
latency = 6e-6
shared_by = "host"
"""


def test_a_known_machine_has_the_link_of_its_device_inside_a_host() -> None:
    machine = Machine.named("a100")
    assert machine.device is DEVICES["a100"]
    assert machine.inside is LINKS["nvlink3"]
    assert machine.between is LINKS["ib-400"]
    assert machine.ranks_per_host == 8


@pytest.mark.parametrize("name", DEVICES)
def test_every_known_device_has_a_known_link_and_peaks_in_order(name: str) -> None:
    device = Machine.named(name).device
    assert device.host_link in LINKS
    assert device.peak("bfloat16") > device.peak("float32")
    assert device.peak("float8_e4m3fn") >= device.peak("bfloat16")
    assert device.memory > 20 * 2**30


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(MachineError, match=r"--device: found h10 \(did you mean h100\?\).* a100,"):
        Machine.named("h10")
    with pytest.raises(MachineError, match=r"--link: found carrier-pigeon, expected .*ib-400"):
        link_named("carrier-pigeon")


@pytest.mark.parametrize(
    ("reported", "name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", 989.4),
        ("NVIDIA H200", "h200", 989.4),
        ("NVIDIA A100-SXM4-80GB", "a100", 312),
        ("NVIDIA A100 80GB PCIe", "a100", 312),
    ],
)
def test_devices_are_found_by_what_they_report(reported: str, name: str, tflops: float) -> None:
    found = device_reported_as(reported)
    assert found is not None
    assert (found.name, found.peak("bfloat16")) == (name, tflops * 1e12)


@pytest.mark.parametrize(
    "reported",
    [
        *("NVIDIA A1000", "NVIDIA A100-SXM4-40GB", "NVIDIA GH200 480GB", "NVIDIA B200"),
        *("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "AMD Instinct MI300X"),
        *("Tesla V100-SXM2-16GB", "cpu", ""),
    ],
)
def test_a_device_without_a_confirmed_sheet_is_none_and_no_variant_of_another(
    reported: str,
) -> None:
    assert device_reported_as(reported) is None


def test_a_file_describes_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(FILE)
    machine = Machine.from_file(path)
    assert machine.ranks_per_host == 4
    assert machine.device.name == "my-gpu"
    assert machine.device.memory == 80 * 2**30
    assert machine.device.matmul_efficiency == 0.6
    assert machine.device.peak("float32") == 19.5e12
    assert machine.inside is not None
    assert machine.inside.bandwidth == LINKS["pcie5"].bandwidth
    assert machine.between.shared_by is SharedBy.HOST


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("memory = 85_899_345_920\n", "", r"\[device\]: found no memory"),
        ("memory = 85_899_345_920", "memory = -1", "memory: found -1, expected a number from 1"),
        ("memory = 85_899_345_920", "memory = nan", "memory: found nan"),
        ("memory = 85_899_345_920", "memory = true", "memory: found True"),
        ("memory = 85_899_345_920", f"memory = 1{'0' * 4000}", "memory: found 1000"),
        ('name = "my-gpu"', 'name = "a\\u001bb"', "name: found a\N{REPLACEMENT CHARACTER}b"),
        ("matmul_efficiency = 0.6", "matmul_efficiency = 1.5", "from 0.001 to 1"),
        ("matmul_efficiency", "matmul_eficiency", "unknown field matmul_eficiency"),
        ('"pcie5"', '"pcie9"', "host_link: found pcie9, expected one of nvlink3"),
        ('shared_by = "host"', 'shared_by = "all"', "expected one of rank, host"),
        ("bandwidth = 23e9\n", "", r"\[link_between_hosts\]: found no bandwidth"),
        ("[device]", "[device", "found no TOML"),
        ("flops.bfloat16 = 312e12\nflops.float32 = 19.5e12", "flops = 3", "expected a table"),
        ("flops.bfloat16 = 312e12\nflops.float32 = 19.5e12", "flops = {}", "found no dtype"),
    ],
)
def test_files_that_describe_no_machine_are_refused(
    tmp_path: Path, before: str, after: str, message: str
) -> None:
    path = tmp_path / "machine.toml"
    assert before in FILE
    path.write_text(FILE.replace(before, after))
    with pytest.raises(MachineError, match=message):
        Machine.from_file(path)


def test_files_that_are_missing_huge_deep_or_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    with pytest.raises(MachineError, match=r"machine\.toml: found no file to read: .*No such file"):
        Machine.from_file(path)
    path.write_bytes(b"#" * 2**17)
    with pytest.raises(MachineError, match=r"131,072 bytes.*at most 65,536"):
        Machine.from_file(path)
    path.write_text("a = " + "[" * 20_000)
    with pytest.raises(MachineError, match="found no TOML"):
        Machine.from_file(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(MachineError, match="found no TOML"):
        Machine.from_file(path)
