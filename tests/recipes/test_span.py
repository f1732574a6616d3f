"""How long a training is, in steps or in epochs."""

from __future__ import annotations

from shardwise.recipes.core.position import Position, Span


def test_steps_count_down() -> None:
    span = Span(steps=10)
    assert [span.left(Position(step), per_step=4) for step in (0, 9, 10, 12)] == [10, 1, 0, 0]
    assert span.shown(Position(3, 12)) == "step 3 of 10"


def test_epochs_end_with_the_step_that_takes_the_last_example() -> None:
    span = Span(epochs=2, per_epoch=10)
    assert span.steps_in_all(per_step=4) == 5
    assert span.steps_in_all(per_step=3) == 7, "one example of a third epoch fills the last step"
    assert span.left(Position(4, 16), per_step=4) == 1
    assert span.left(Position(5, 20), per_step=4) == 0
    assert span.shown(Position(3, 12)) == "epoch 1.20 of 2 (step 3)"


def test_what_is_left_follows_the_examples_where_a_step_has_changed_its_size() -> None:
    span = Span(epochs=2, per_epoch=10)
    assert span.left(Position(4, 8), per_step=6) == 2


def test_a_training_ends_with_whichever_comes_first() -> None:
    assert Span(steps=3, epochs=2, per_epoch=10).left(Position(), per_step=4) == 3
    assert Span(steps=30, epochs=2, per_epoch=10).left(Position(), per_step=4) == 5


def test_evaluations_are_counted_by_whole_epochs() -> None:
    span = Span(epochs=2, per_epoch=10)
    assert [span.evaluation_count(Position(i, 4 * i)) for i in range(6)] == [0, 0, 0, 1, 1, 2]
    assert Span(steps=5).evaluation_count(Position(3, 12)) == 3
