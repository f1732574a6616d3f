"""How long a training is, in steps or in epochs, and which example comes where."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.app.recipes.core.position import Draw, Position, Shuffle, TrainingSpan, permute
from shardwise.base.mixing import mix
from shardwise.insight.schema.training import OutputConfig, SgdConfig, TrainConfig

FIRST_EPOCH = [9, 5, 7, 1, 6, 4, 8, 3, 2, 0]  # of 10 examples, with seed 0


# -- how long --------------------------------------------------------------------------------------


def test_steps_count_down() -> None:
    span = TrainingSpan(steps=10)
    assert [span.left(Position(step), per_step=4) for step in (0, 9, 10, 12)] == [10, 1, 0, 0]
    assert span.shown(Position(3, 12)) == "step 3 of 10"


def test_epochs_end_with_the_step_that_takes_the_last_example() -> None:
    span = TrainingSpan(epochs=2, per_epoch=10)
    assert span.steps_in_all(per_step=4) == 5
    assert span.steps_in_all(per_step=3) == 7, "one example of a third epoch fills the last step"
    assert span.left(Position(4, 16), per_step=4) == 1
    assert span.left(Position(5, 20), per_step=4) == 0
    assert span.shown(Position(3, 12)) == "epoch 1.20 of 2 (step 3)"


def test_what_is_left_follows_the_examples_where_a_step_has_changed_its_size() -> None:
    span = TrainingSpan(epochs=2, per_epoch=10)
    assert span.left(Position(4, 8), per_step=6) == 2


def test_a_training_ends_with_whichever_comes_first() -> None:
    assert TrainingSpan(steps=3, epochs=2, per_epoch=10).left(Position(), per_step=4) == 3
    assert TrainingSpan(steps=30, epochs=2, per_epoch=10).left(Position(), per_step=4) == 5


def test_evaluations_are_counted_by_whole_epochs() -> None:
    span = TrainingSpan(epochs=2, per_epoch=10)
    assert [span.evaluation_count(Position(i, 4 * i)) for i in range(6)] == [0, 0, 0, 1, 1, 2]
    assert TrainingSpan(steps=5).evaluation_count(Position(3, 12)) == 3


def test_a_span_is_what_the_configuration_asks_for() -> None:
    config = TrainConfig(
        steps=7,
        epochs=3,
        batch_size=4,
        accumulate=5,
        optimizer=SgdConfig(lr=0.1),
        output=OutputConfig(out=Path("out")),
    )
    assert TrainingSpan.of(config, per_epoch=100) == TrainingSpan(steps=7, epochs=3, per_epoch=100)
    assert TrainingSpan.of(config) == TrainingSpan(steps=7, epochs=3, per_epoch=None)
    assert config.examples_per_step(6) == 4 * 5 * 6


def test_epochs_are_no_measure_where_nothing_is_counted_in_them() -> None:
    span = TrainingSpan(steps=5)
    assert span.epoch(Position(3, 12)) is None
    assert TrainingSpan(steps=5, per_epoch=8).epoch(Position(3, 12)) == 1.5
    assert TrainingSpan(steps=5, per_epoch=8).shown(Position(3, 12)) == "step 3 of 5"


@pytest.mark.parametrize("per_step", [1, 3, 10, 99, 100, 101, 1000])
def test_a_training_takes_all_examples_of_its_epochs_and_less_than_a_step_more(
    per_step: int,
) -> None:
    span = TrainingSpan(epochs=2, per_epoch=50)
    position = Position()
    while span.left(position, per_step):
        position = Position(position.step + 1, position.examples + per_step)
    assert position.step == span.steps_in_all(per_step)
    assert 100 <= position.examples < 100 + per_step


# -- which example ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 10, 37])
def test_an_epoch_has_every_example_once_under_one_key(size: int) -> None:
    order = Shuffle(size, seed=3)
    keys = set()
    for epoch in range(3):
        draws = [order.at(epoch * size + turn) for turn in range(size)]
        assert {draw.epoch for draw in draws} == {epoch}
        assert sorted(draw.index for draw in draws) == list(range(size))
        (key,) = {draw.key for draw in draws}
        keys.add(key)
    assert len(keys) == 3, "each epoch has an order of its own"


def test_an_order_is_known_at_any_position_without_those_before() -> None:
    """A resumed run asks for a position that nobody has counted up to."""
    far = 10**15 + 7
    draw = Shuffle(10**6, seed=0).at(far)
    assert draw == Shuffle(10**6, seed=0).at(far)
    assert draw.epoch == 10**9
    assert 0 <= draw.index < 10**6
    assert draw != Shuffle(10**6, seed=1).at(far)


def test_an_order_is_the_same_on_every_machine_and_in_every_release() -> None:
    """Another one would give a resumed run other examples than those that are left."""
    order = Shuffle(10, seed=0)
    assert [order.at(position).index for position in range(10)] == FIRST_EPOCH
    assert order.at(0) == Draw(0, FIRST_EPOCH[0], mix(mix(0)))
    assert mix(0) == 0xE220A8397B1DCDAF, "the first output of splitmix64 with state 0"
    assert mix(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4, "the second"


def test_mixing_keeps_to_64_bits_and_changes_half_of_them() -> None:
    changed = [bin(mix(1 << bit) ^ mix(0)).count("1") for bit in range(64)]
    assert 28 < sum(changed) / 64 < 36
    assert min(changed) > 10
    assert all(0 <= mix(value) < 2**64 for value in (0, 1, 2**63, 2**64 - 1, 2**80))


def test_a_permutation_leaves_hardly_anything_in_its_place() -> None:
    """By chance one index stays, whatever the size."""
    size = 1000
    stay = [sum(permute(i, size, key) == i for i in range(size)) for key in range(10)]
    assert sum(stay) / len(stay) < 4
    neighbors = sum(permute(i + 1, size, 1) == permute(i, size, 1) + 1 for i in range(size - 1))
    assert neighbors < 10
