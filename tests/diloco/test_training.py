"""DiLoCo over ranks equals its definition, however a replica is sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import checkpoint
from shardwise.diloco import OuterSGD, Overlapped, Streaming, WireFormat
from tests.diloco.reference import KEEPING, STREAMING, late, plain, streamed
from tests.diloco.replicas import (
    Replica,
    assert_values,
    equal_everywhere,
    two_replicas,
)
from tests.threads import run_threads

AVERAGING = OuterSGD(lr=1.0, momentum=0.0, nesterov=False)
WARMING = OuterSGD(warmup=3)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"every": 3},
    "wrapped": {"every": 3, "wrapped": True},
    "averaging": {"every": 1, "outer": AVERAGING},
    "warming": {"every": 2, "outer": WARMING},  # for three rounds of four
    "streaming": {"every": 4, "streaming": STREAMING},
    "keeping": {"every": 4, "streaming": KEEPING},
    "late": {"every": 3, "streaming": Streaming(overlap=3, overlapped=Overlapped.KEPT)},
    **{each.value: {"every": 3, "wire": each} for each in WireFormat},
    "feedback": {"every": 1, "wire": WireFormat.INT8, "error_feedback": True},
}
SAVED = ("plain", "warming", "streaming", "late", "feedback", "ternary")
#: With these, the replicas are sharded as well. How values travel is for whoever has all of them.
SHARDED = (*SAVED, "wrapped", "keeping")
STEPS, SAVED_AFTER = 8, 5


def _train_all(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Train with settings for some steps; the larger world saves some of them midway."""
    mesh = two_replicas()
    found: dict[str, Any] = {}
    for name in SETTINGS if world_size == 2 else SHARDED:
        replica = Replica(mesh, **SETTINGS[name])
        replica.train(1, SAVED_AFTER)
        if name in SAVED and world_size == 4:
            group = mesh.get_group("shard")
            checkpoint.save(_file(folder, name, mesh), replica.model, replica.diloco, group=group)
        replica.train(SAVED_AFTER + 1, STEPS)
        found[name] = {
            "inner": replica.inner_values(),
            "outer": replica.outer_values(),
            "same": equal_everywhere(replica.outer_bits(), mesh),
            "bytes": replica.diloco.bytes_sent,
            "rounds": replica.diloco.rounds,
            "numel": [view.numel() for view in replica.outer_bits()[::2]],
        }
    for name in SAVED:
        found[name]["resumed"] = _resume(mesh, folder, name)
    replica.diloco.flush()
    found["flushed"] = equal_everywhere(list(replica.inner_values().values()), mesh)
    return found


def _file(folder: Path, name: str, mesh: Any) -> Path:
    return folder / name / f"replica-{mesh.get_coordinate()[0]}"


def _resume(mesh: Any, folder: Path, name: str) -> Any:
    """Continue in another object, in the middle of a round."""
    other = Replica(mesh, **SETTINGS[name])
    group = mesh.get_group("shard")
    checkpoint.load(_file(folder, name, mesh), other.model, other.diloco, group=group)
    errors = other.errors()
    other.train(SAVED_AFTER + 1, STEPS)
    return {"inner": other.inner_values(), "outer": other.outer_values(), "errors": errors}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """The results of both worlds, by the number of shards of a replica."""
    folder = tmp_path_factory.mktemp("diloco")
    return {shards: run_threads(_train_all, 2 * shards, folder) for shards in (2, 1)}


@pytest.mark.parametrize("shards", [1, 2])
def test_it_is_what_one_process_computes_replica_by_replica(found: Any, shards: int) -> None:
    expected = {
        "plain": plain(STEPS, 3, OuterSGD()),
        "wrapped": plain(STEPS, 3, OuterSGD()),
        "averaging": plain(STEPS, 1, AVERAGING),
        "warming": plain(STEPS, 2, WARMING),
        "streaming": streamed(STEPS),
        "keeping": streamed(STEPS, KEEPING),
        "late": late(STEPS, 3),
    }
    for rank, results in enumerate(found[shards]):
        for name in expected.keys() & results:
            reference, replica = expected[name], rank // shards
            what = f"{name}, {shards} shards, rank {rank}"
            assert_values(results[name]["outer"], reference.outer, f"{what}, outer")
            assert_values(results[name]["inner"], reference.replicas[replica], f"{what}, inner")


@pytest.mark.parametrize("shards", [1, 2])
def test_all_replicas_have_the_same_outer_state_to_the_bit(found: Any, shards: int) -> None:
    for rank, results in enumerate(found[shards]):
        for name in SETTINGS.keys() & results:
            assert results[name]["same"], f"{name}, rank {rank}"


def test_every_step_with_rate_1_and_no_momentum_is_averaging(found: Any) -> None:
    for results in found[1]:
        one, other = (each["averaging"] for each in found[1])
        for name, value in results["averaging"]["outer"].items():
            assert torch.equal(one["inner"][name], other["inner"][name]), name
            assert torch.equal(value, results["averaging"]["inner"][name]), name


def test_replicas_move_apart_inside_a_round(found: Any) -> None:
    one, other = (results["plain"]["inner"] for results in found[1])
    assert not torch.equal(one["head.weight"], other["head.weight"])


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8", "int8"])
def test_what_is_rounded_on_the_wire_stays_near(found: Any, name: str) -> None:
    exact = plain(STEPS, 3, OuterSGD())
    for results in found[1]:
        tolerance = 5e-2 if name == "fp8" else 5e-3
        assert_values(results[name]["outer"], exact.outer, name, tolerance=tolerance)
        values = results[name]["outer"]["head.weight"]
        assert not torch.equal(values, results["plain"]["outer"]["head.weight"]), "not rounded"


def test_with_error_feedback_nothing_is_lost_in_the_long_run(found: Any) -> None:
    exact = plain(STEPS, 1, OuterSGD())
    for results in found[2]:
        assert_values(results["feedback"]["outer"], exact.outer, "feedback", tolerance=5e-3)


def test_ranks_of_a_replica_have_the_same_of_what_is_not_cut(found: Any) -> None:
    for replica in (0, 1):
        one, other = found[2][2 * replica :][:2]
        for name in SHARDED:
            for part in ("inner", "outer"):
                for fqn, value in one[name][part].items():
                    assert torch.equal(value, other[name][part][fqn]), f"{name}, {part} {fqn}"


def test_bytes_are_those_of_two_halves_of_the_encoded_vector(found: Any) -> None:
    sizes = {
        "fp32": 4,
        "fp16": 2,
        "bf16": 2,
        "fp8": 1 + 4 / 256,
        "int8": 1 + 4 / 256,
        "int4": 1 / 2 + 4 / 256,
        "ternary": (52 + 4) / 256,
    }
    for results in found[1]:
        numel = sum(results["fp32"]["numel"])
        assert numel == sum(each.numel() for each in plain(0, 1, OuterSGD()).outer.parameters())
        # The scalar comes first and is averaged by itself, in a block of its own.
        for name, size in sizes.items():
            if name in ("fp8", "int8", "int4", "ternary"):  # whole blocks
                halves = [256, -(-(numel - 1) // 512) * 256]
            else:
                halves = [128, -(-(numel - 1) // 2)]
            half = sum(-(-half * size // 16) * 16 for half in halves)  # each part begins at 16
            assert results[name]["bytes"] == 2 * 2 * half, name


def test_exchanges_happen_when_they_are_due(found: Any) -> None:
    assert found[1][0]["plain"]["rounds"] == (2,)
    assert found[1][0]["averaging"]["rounds"] == (STEPS,)
    # Fragment 0 begins after steps 4 and 8, which ends after 10, fragment 1 after 2 and 6.
    assert found[1][0]["streaming"]["rounds"] == (1, 2)
    # The one that began after step 3 has ended after 6.
    assert found[1][0]["late"]["rounds"] == (1,)


@pytest.mark.parametrize("name", SAVED)
def test_a_run_saved_inside_a_round_goes_on_bit_for_bit(found: Any, name: str) -> None:
    for rank, results in enumerate(found[2]):
        for part in ("inner", "outer"):
            for fqn, value in results[name]["resumed"][part].items():
                expected = results[name][part][fqn]
                assert torch.equal(value, expected), f"{part} {fqn} on rank {rank}"


@pytest.mark.parametrize("name", ["plain", "streaming", "late"])
def test_what_two_shards_saved_one_loads(found: Any, name: str) -> None:
    references = {
        "plain": lambda: plain(STEPS, 3, OuterSGD()),
        "streaming": lambda: streamed(STEPS),
        "late": lambda: late(STEPS, 3),
    }
    expected = references[name]()
    for replica, results in enumerate(found[1]):
        resumed = results[name]["resumed"]
        assert_values(resumed["outer"], expected.outer, "outer")
        assert_values(resumed["inner"], expected.replicas[replica], "inner")


@pytest.mark.parametrize("name", ["feedback", "ternary"])
def test_what_encoding_has_lost_is_saved_and_resharded(found: Any, name: str) -> None:
    for replica, results in enumerate(found[1]):
        errors = results[name]["resumed"]["errors"]
        assert any(error.count_nonzero() for error in errors.values()), "something was lost"
        for both in found[2][2 * replica :][:2]:
            for fqn, error in both[name]["resumed"]["errors"].items():
                assert torch.equal(errors[fqn], error), fqn


def test_after_a_flush_all_replicas_are_alike(found: Any) -> None:
    assert all(results["flushed"] for shards in (1, 2) for results in found[shards])
