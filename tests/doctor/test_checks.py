"""The checks: facts and measurements in, findings out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.app.doctor.checks import (
    Finding,
    Level,
    check_clocks,
    check_devices,
    check_interfaces,
    check_limits,
    check_links,
    check_names,
    check_ports,
    check_ranks,
    check_start,
    check_versions,
    check_within_hosts,
    check_world,
    files_needed,
    gloo_interface,
    nccl_interface,
    shortened,
)
from shardwise.app.doctor.facts import Facts
from shardwise.app.doctor.probe import PairLink, Probe

H100 = ("NVIDIA H100 80GB HBM3", 79 * 2**30)
A100 = ("NVIDIA A100-SXM4-40GB", 0)
VERSIONS = {"driver": "580.95.05", "CUDA": "13.0", "NCCL": "2.27.5"}
GPUS = Probe("", PairLink(gbit=80.0, ms=0.01), "cuda", [H100] * 4, VERSIONS)
HOST = Facts(
    rank=0,
    nnodes=2,
    nproc=4,
    name="a",
    versions={"python": "3.12", "torch": "2.13"},
    interfaces={"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]},
    address="10.0.0.1",
    towards="eth0",
    resolved="10.0.0.1",
    probe=GPUS,
    files=4096,
    temporary_free=2**30,
    shm_free=2**30,
)
MUTE = replace(GPUS, memory=PairLink("no room"))
OTHER = replace(
    HOST,
    rank=1,
    name="b",
    interfaces={"eth0": ["10.0.0.2"]},
    address="10.0.0.2",
    resolved="10.0.0.2",
)
PAIR = [HOST, OTHER]
FAST = PairLink(gbit=10.0, ms=0.2)
LINKS = {(0, 0): FAST, (1, 1): FAST, (0, 1): FAST, (1, 0): FAST}


def found(findings: list[Finding], level: Level) -> str:
    """The only finding, which has that level."""
    [finding] = findings
    assert finding.level is level, finding
    assert bool(finding.advice) is (level is not Level.OK), "what is wrong comes with advice"
    return f"{finding.text}: {finding.advice}"


def test_healthy_hosts_pass_every_check() -> None:
    every = [
        check_ranks(PAIR, 2),
        check_world(PAIR),
        check_versions(PAIR),
        check_start(PAIR),
        check_devices(PAIR),
        check_clocks(PAIR, {1: -0.2}),
        check_names(PAIR, {1: "10.0.0.2"}),
        check_interfaces(PAIR),
        check_limits(PAIR),
        check_ports(PAIR, LINKS),
        check_links(PAIR, LINKS, 1.0),
        check_within_hosts(PAIR, LINKS),
    ]
    assert all(each.level is Level.OK for findings in every for each in findings)
    assert all(findings for findings in every), "that nothing is wrong is a finding too"


def test_a_finding_is_a_line_of_columns() -> None:
    line = str(Finding("clocks", Level.WARN, "host 1 (b) is late", "synchronize"))
    assert line == "warn clocks      host 1 (b) is late: synchronize"


def test_many_items_are_counted() -> None:
    assert shortened([1, 2], 2, " and ") == "1 and 2"
    assert shortened(range(10**9), 10**9).endswith("14, 15, 999999984 more")


def test_ranks_that_are_missing_or_given_twice() -> None:
    twice = [HOST, OTHER, replace(OTHER, name="c")]
    text = found(check_ranks(twice, 2), Level.FAIL)
    assert text.startswith("rank 1 is used by 2 hosts (b and c)")
    text = found(check_ranks([HOST], 3), Level.FAIL)
    assert text.startswith("no host has rank 1, 2: run the command there")


def test_hosts_that_expect_another_world() -> None:
    text = found(check_world([HOST, replace(OTHER, nproc=8)]), Level.FAIL)
    assert text.startswith("hosts x ranks is 2 x 4 on host 0 (a), 2 x 8 on host 1 (b)")


def test_versions_that_differ() -> None:
    other = replace(OTHER, versions={"python": "3.12", "torch": "2.11"})
    text = found(check_versions([HOST, other]), Level.FAIL)
    assert text.startswith("torch is 2.13 on host 0 (a), 2.11 on host 1 (b)")


@pytest.mark.parametrize(("ahead", "text"), [(90.0, "90.0 s ahead of"), (-2.0, "2.0 s behind")])
def test_clocks_that_differ(ahead: float, text: str) -> None:
    assert f"host 1 (b) is {text} host 0" in found(check_clocks(PAIR, {1: ahead}), Level.WARN)


def test_clocks_that_nothing_reaches_are_not_compared() -> None:
    assert "not compared" in found(check_clocks(PAIR, {}), Level.OK)


def test_clocks_that_differ_more_than_torchruns_rendezvous_allows() -> None:
    dead = "torchrun takes hosts for dead"
    assert dead not in found(check_clocks(PAIR, {1: -14.0}), Level.WARN)
    assert dead in found(check_clocks(PAIR, {1: -16.0}), Level.WARN)


def test_a_host_on_which_no_rank_starts() -> None:
    mute = replace(OTHER, probe=Probe("exit code 1: ImportError: libcudnn.so.9: not found"))
    text = found(check_start([HOST, mute]), Level.FAIL)
    assert text.startswith("host 1 (b): a process started as a rank failed (exit code 1: Import")
    assert found(check_devices([HOST, mute]), Level.OK), "of its devices nothing is known"
    assert check_devices([mute]) == []


# -- devices ---------------------------------------------------------------------------------------


def having(**changes: Any) -> list[Facts]:
    """Both hosts, the second with other accelerators."""
    return [HOST, replace(OTHER, probe=replace(GPUS, **changes))]


def test_accelerators_are_named_with_their_software() -> None:
    software = "driver 580.95.05, CUDA 13.0, NCCL 2.27.5"
    both, one = found(check_devices(PAIR), Level.OK), found(check_devices([HOST]), Level.OK)
    assert both == f"4 x NVIDIA H100 80GB HBM3 (79.0 GiB) on every host; {software}: "
    assert one == f"4 x NVIDIA H100 80GB HBM3 (79.0 GiB); {software}: "
    without = replace(HOST, probe=Probe())
    assert found(check_devices([without]), Level.OK) == "no accelerators: "


def test_accelerators_that_differ() -> None:
    text = found(check_devices(having(models=[H100, H100, *[A100] * 3])), Level.WARN)
    assert text.startswith(
        "4 x NVIDIA H100 80GB HBM3 (79.0 GiB) on host 0 (a), 2 x NVIDIA H100 80GB HBM3 "
        "(79.0 GiB), 3 x NVIDIA A100-SXM4-40GB on host 1 (b): the slowest sets the pace"
    )


@pytest.mark.parametrize(
    ("models", "kind", "device"),
    [([H100] * 3, "cuda", "CPUs"), ([], "", "CPUs"), ([H100] * 4, "xpu", "xpu")],
)
def test_hosts_whose_ranks_would_compute_on_other_devices(
    models: list[tuple[str, int]], kind: str, device: str
) -> None:
    text = found(check_devices(having(models=models, kind=kind)), Level.FAIL)
    assert f"; ranks would compute on cuda on host 0 (a), {device} on host 1 (b): use " in text


def test_fewer_accelerators_than_ranks() -> None:
    text = found(check_devices([replace(host, nproc=8) for host in PAIR]), Level.WARN)
    assert "GiB) on every host: too few for 8 ranks: pass --nproc 4, or" in text


@pytest.mark.parametrize(
    ("name", "level"), [("driver", Level.WARN), ("CUDA", Level.WARN), ("NCCL", Level.FAIL)]
)
def test_software_that_differs(name: str, level: Level) -> None:
    named, differing = check_devices(having(versions={**VERSIONS, name: "1.2.3"}))
    assert found([differing], level).startswith(
        f"{name} is {VERSIONS[name]} on host 0 (a), 1.2.3 on host 1 (b): "
    )
    same = ", ".join(f"{each} {VERSIONS[each]}" for each in VERSIONS if each != name)
    assert found([named], Level.OK).endswith(f"; {same}: ")


def test_software_that_one_host_lacks() -> None:
    _, differing = check_devices(having(versions={"driver": "580.95.05", "CUDA": "13.0"}))
    text = found([differing], Level.FAIL)
    assert text.startswith("NCCL is 2.27.5 on host 0 (a), missing on host 1 (b): load the same")


def test_a_driver_without_a_device_is_explained() -> None:
    lost = replace(HOST, probe=Probe(problem="The driver is too old."))
    problem, named = check_devices([lost])
    text = found([problem], Level.WARN)
    assert text.startswith("host 0 (a): torch finds no accelerator: The driver is too old.: ")
    assert named.text == "no accelerators"


# -- names and interfaces --------------------------------------------------------------------------


def test_a_host_without_localhost() -> None:
    text = found(check_names([replace(HOST, localhost="Name not known")], {}), Level.WARN)
    assert text.startswith("host 0 (a): no port of localhost can be taken (Name not known): write")


@pytest.mark.parametrize("resolved", ["10.9.9.9", "unknown (Name or service not known)"])
def test_a_name_that_leads_elsewhere(resolved: str) -> None:
    text = found(check_names([HOST, replace(OTHER, resolved=resolved)], {}), Level.WARN)
    assert text.startswith(f"host 1 (b): its name leads to {resolved}, which is not this host: ")
    alone = [replace(HOST, nnodes=1, resolved=resolved)]
    assert found(check_names(alone, {}), Level.OK), "nobody looks for a host alone"


def test_a_host_behind_a_translation_of_addresses() -> None:
    text = found(check_names(PAIR, {1: "192.0.2.1"}), Level.FAIL)
    assert text.startswith("host 1 (b) connects from 192.0.2.1, and its own address is 10.0.0.2: ")
    assert found(check_names(PAIR, {1: "::ffff:10.0.0.2"}), Level.OK), "the same in IPv6"
    linked = [HOST, replace(OTHER, address="fe80::2%eth0")]
    assert found(check_names(linked, {1: "fe80::2%eth1"}), Level.OK), "each end names its own link"


def test_a_host_without_a_way_to_host_0() -> None:
    text = found(check_interfaces([HOST, replace(OTHER, towards=None)]), Level.FAIL)
    assert text.startswith("host 1 (b): no interface leads to host 0 (eth0 10.0.0.2)")


def test_a_host_whose_name_leads_gloo_to_another_interface() -> None:
    lost = replace(HOST, resolved="127.0.0.1")
    text = found(check_interfaces([lost, OTHER]), Level.WARN)
    assert "gloo would use lo under torchrun" in text
    assert text.endswith("export GLOO_SOCKET_IFNAME=eth0")
    assert found(check_interfaces([lost]), Level.OK), "one host needs no way to others"
    unknown = replace(HOST, resolved="unknown (Name or service not known)")
    assert "gloo would use none" in found(check_interfaces([unknown, OTHER]), Level.WARN)


@pytest.mark.parametrize(
    ("value", "level"),
    [
        ("eth0", Level.OK),
        ("eth", Level.OK),
        ("=eth0,lo", Level.OK),
        ("^docker0", Level.OK),
        ("eth7", Level.FAIL),
        ("eth0,ib0", Level.FAIL),
    ],
)
def test_variables_name_interfaces_that_exist(value: str, level: Level) -> None:
    host = replace(HOST, settings={"NCCL_SOCKET_IFNAME": value})
    text = found(check_interfaces([host, OTHER]), level)
    if level is Level.FAIL:
        assert f"NCCL_SOCKET_IFNAME={value}, an interface that it does not have" in text
        assert text.endswith("unset it, or set it to one of lo, eth0")


def test_backends_choose_interfaces_as_they_document_it() -> None:
    assert gloo_interface(HOST) == "eth0", "of the host's own name"
    assert gloo_interface(replace(HOST, settings={"GLOO_SOCKET_IFNAME": "ib0,eth0"})) == "ib0"
    names = {name: ["10.0.0.1"] for name in ("lo", "docker0", "eth0", "ib0")}
    assert nccl_interface(replace(HOST, interfaces=names)) == "ib0", "InfiniBand first"
    assert nccl_interface(HOST) == "eth0"
    assert nccl_interface(replace(HOST, interfaces={"lo": ["127.0.0.1"]})) == "none"
    assert nccl_interface(replace(HOST, settings={"NCCL_SOCKET_IFNAME": "lo"})) == "lo"


@pytest.mark.parametrize(
    ("change", "level", "text"),
    [
        ({"files": 100}, Level.FAIL, "host 0 (a): 100 open files per process, a rank may need "),
        (
            {"probe": replace(GPUS, memory=PairLink("no room"))},
            Level.WARN,
            "host 0 (a): shared memory: no room",
        ),
        ({"shm_free": 2**20}, Level.WARN, "host 0 (a): 1 MiB free in /dev/shm"),
        ({"shm_free": -1}, Level.OK, "4096 files, shared memory works"),
        ({"tasks": 255}, Level.FAIL, "host 0 (a): 255 more processes and threads can be started: "),
        ({"tasks": 256}, Level.OK, "4096 files, shared memory works"),
        ({"temporary": "Read-only file system"}, Level.FAIL, "host 0 (a): the temporary folder "),
        ({"temporary_free": 2**20}, Level.WARN, "host 0 (a): 1 MiB free in the temporary folder"),
    ],
)
def test_limits_of_a_process(change: dict[str, object], level: Level, text: str) -> None:
    host = replace(HOST, **change)  # type: ignore[arg-type]
    assert found(check_limits([host, OTHER]), level).startswith(text)


def test_ranks_need_more_files_the_more_peers_they_have() -> None:
    assert files_needed(1024) - files_needed(1) == 4 * 1023
    many = [replace(HOST, nproc=512), replace(OTHER, nproc=512)]
    findings = check_limits(many)
    assert [each.level for each in findings] == [Level.FAIL] * 2
    assert f"run ulimit -n {files_needed(1024)}" in findings[0].advice


def test_pairs_that_cannot_connect() -> None:
    links = {**LINKS, (1, 0): PairLink("10.0.0.1:5: timed out")}
    text = found(check_ports(PAIR, links), Level.FAIL)
    assert text.startswith("host 1 (b) cannot connect to host 0 (a): 10.0.0.1:5: timed out")
    assert len(check_links(PAIR, links, 0.0)) == 1, "where nothing passes, nothing is slow"
    assert found(check_ports([HOST], {(0, 0): FAST}), Level.OK).startswith("one host")


@pytest.mark.parametrize(
    ("link", "advice"),
    [
        (PairLink(gbit=0.5, ms=0.2), "expected 1 Gbit/s; train with --strategy hybrid"),
        (
            PairLink(gbit=10, ms=20.0),
            "expected 5 ms; --strategy hybrid sends fewer, larger messages",
        ),
    ],
)
def test_links_that_are_slow(link: PairLink, advice: str) -> None:
    slow, fast = check_links(PAIR, {(0, 1): link, (1, 0): FAST, (0, 0): link}, 1.0)
    assert (slow.level, fast.level) == (Level.WARN, Level.OK)
    assert slow.text == f"host 0 (a) to host 1 (b): {link}"
    assert slow.advice.startswith(advice)


def test_what_ranks_of_one_host_exchange() -> None:
    first, second = check_within_hosts([HOST, replace(OTHER, probe=MUTE)], LINKS)
    both = "shared memory 80.00 Gbit/s, 0.01 ms; messages 10.00 Gbit/s, 0.20 ms"
    assert first.text == f"host 0 (a): {both}"
    assert second.text == "host 1 (b): no shared memory; messages 10.00 Gbit/s, 0.20 ms"
    down = {(0, 0): PairLink("127.0.0.1:5: unreachable")}
    text = found(check_within_hosts([HOST], down), Level.FAIL)
    assert text.endswith("bring up the loopback device (ip link set lo up)")
