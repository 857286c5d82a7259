"""What a step was spent on: every second once, and what is known of made-up steps."""

from __future__ import annotations

import pytest

from gradsync.events import BACKWARD, OPTIMIZER
from gradsync.observe.timeline.intervals import length
from gradsync.observe.timeline.measures import measure
from gradsync.observe.timeline.recording import Recording
from gradsync.observe.timeline.step import journeys_of, parts_of, spent_in, steps_of, waits_of
from tests.unit.timeline.made import Made

MADE = [
    Made(),
    Made(ranks=1),
    Made(accumulated=2),
    Made(late={1: {"backward": 15.0}}),
    Made(ready=(20.0, 20.0, 20.0, 20.0), overlapped=0),
    Made(ranks=4, hosts=2, late={3: {"data": 7.0}}),
]


@pytest.mark.parametrize("made", MADE)
def test_every_second_of_a_step_is_spent_once(made: Made) -> None:
    recording = made.recording()
    journeys = journeys_of(recording)
    for record in recording.ranks:
        for step in steps_of(record, 0):
            parts = parts_of(step, journeys)
            pieces = [piece for intervals in parts.values() for piece in intervals]
            assert length(pieces) == pytest.approx(sum(ended - began for began, ended in pieces))  # none overlap
            assert spent_in(step, journeys).total == pytest.approx(step.seconds)


def test_the_phases_of_a_step_are_found() -> None:
    spent = measure(Made().recording()).spent
    wanted = {"data": 1, "forward": 10, "loss": 0.5, "backward": 20, "transfer": 2, "deliver": 1, "optimizer": 3}
    for phase, milliseconds in wanted.items():
        assert 1000 * getattr(spent, phase) == pytest.approx(milliseconds), phase
    assert spent.ranks == spent.other == pytest.approx(0, abs=1e-9)
    assert 1000 * spent.exposed == pytest.approx(3)


def test_accumulated_backwards_are_backward() -> None:
    made = Made(accumulated=2)
    measures = measure(made.recording())
    assert 1000 * measures.spent.backward == pytest.approx(60)
    assert 1000 * measures.spent.forward == pytest.approx(30)
    assert 1000 * measures.spent.loss == pytest.approx(1.5)
    assert 1000 * measures.seconds == pytest.approx(1 + 30 + 1.5 + 60 + 2 + 1 + 3)
    spans = measures.steps[21][0].spans
    assert [span.phase for span in spans].count(BACKWARD) == 2


def test_transfers_during_backward_are_hidden() -> None:
    """Four of 2 ms each, of which the last one comes after backward."""
    measures = measure(Made().recording())
    assert 1000 * measures.transferring == pytest.approx(8)
    assert measures.hidden == pytest.approx(0.75)
    assert measure(Made(ready=(20.0,) * 4, overlapped=0).recording()).hidden == pytest.approx(0)


def test_who_is_waited_for() -> None:
    measures = measure(Made(ranks=3, late={2: {"forward": 6.0}}).recording())
    caused = {one.rank: 1000 * one.caused for one in measures.by_rank}
    # It launches its last bucket 6 ms after them: that buckets travel meanwhile does not matter.
    assert caused == {0: 0, 1: 0, 2: pytest.approx(6)}
    assert 1000 * measures.by_rank[0].spent.transfer == pytest.approx(2)
    assert 1000 * measures.by_rank[2].spent.ranks == pytest.approx(0, abs=1e-6)
    assert all(bucket.last_rank == 2 for bucket in measures.buckets)
    assert 1000 * measures.buckets[0].skew == pytest.approx(2 / 3 * 6)


def test_a_wait_is_first_for_ranks_and_then_for_the_transfer() -> None:
    recording = Made(late={1: {"data": 5.0}}).recording()
    journeys = journeys_of(recording)
    waits = waits_of(0, recording.ranks[0].rounds[1], journeys)
    assert [wait.bucket for wait in waits] == [2, 3]
    assert waits[0].complete_at == waits[0].ended_at  # the last bucket is still to come
    last = waits[-1]
    assert last.rank == 1
    assert last.began_at < last.complete_at < last.ended_at
    assert 1000 * (last.ended_at - last.complete_at) == pytest.approx(2)
    for wait in waits_of(1, recording.ranks[1].rounds[1], journeys):
        assert wait.complete_at == wait.began_at  # it came last itself


def test_a_straggler_is_not_taken_for_a_slow_transfer() -> None:
    """Of many buckets one is always on its way, as fast as the slow rank launches them."""
    many = tuple(float(ready) for ready in range(1, 21))
    measures = measure(Made(late={1: {"backward": 9.0}}, ready=many, nbytes=(1000,) * 20).recording())
    assert 1000 * measures.by_rank[0].spent.ranks == pytest.approx(9)
    assert 1000 * measures.by_rank[0].spent.transfer == pytest.approx(2)


def test_an_optimizer_in_backward_waits_for_one_bucket_only() -> None:
    recording = Made(late={1: {"data": 5.0}}).recording()
    event = recording.ranks[0].rounds[1]
    first = event.buckets[0]
    inside = first._replace(awaited_at=first.launched_at + 0.001)  # while its own backward goes on
    (wait, *_) = waits_of(0, event._replace(buckets=(inside, *event.buckets[1:])), journeys_of(recording))
    assert wait.bucket == 0
    assert wait.complete_at == recording.ranks[1].rounds[1].buckets[0].launched_at


def test_the_first_round_of_all_is_left_out() -> None:
    assert sorted(measure(Made(first_round=0).recording()).steps) == [1, 2, 3]
    assert sorted(measure(Made(first_round=0, rounds=1).recording()).steps) == [0]


def test_a_step_whose_beginning_was_not_recorded_is_left_out() -> None:
    """The data before its forward may have taken any time."""
    assert sorted(measure(Made().recording()).steps) == [21, 22, 23]


def test_rounds_that_one_rank_has_not_are_left_out() -> None:
    """It has failed there, or was recorded from another round on."""
    recording = Made().recording()
    first, second = recording.ranks
    recording = recording._replace(ranks=(first, second._replace(rounds=second.rounds[:-1])))
    assert sorted(measure(recording).steps) == [21, 22]


def test_nothing_was_recorded() -> None:
    measures = measure(Recording(2, ()))
    assert measures.steps == {}
    assert measures.hidden is None
    assert measures.round_at(0.5) is None
    record = Made().recording().ranks[0]
    assert measure(Recording(1, (record._replace(rounds=()),))).module is None


def test_an_optimizer_in_backward_and_steps_without_any() -> None:
    """A step ends where its round closes."""
    recording = Made().recording()
    ranks = [
        record._replace(spans=tuple(span for span in record.spans if span.phase != OPTIMIZER))
        for record in recording.ranks
    ]
    measures = measure(Recording(2, tuple(ranks)))
    assert measures.spent.optimizer == 0
    step = measures.steps[22][0]
    assert step.ended_at == step.round.closed_at
    assert step.began_at == measures.steps[21][0].ended_at


def test_rounds_of_another_module_are_part_of_the_step() -> None:
    recording = Made().recording()
    ranks = []
    for record in recording.ranks:
        event = record.rounds[2]
        shift = event.opened_at - 0.008
        smaller = event._replace(module=1, round=7, nbytes=8, opened_at=shift, backward_ended_at=shift + 0.001)
        smaller = smaller._replace(buckets=(), closed_at=shift + 0.002)
        ranks.append(record._replace(rounds=(*record.rounds[:2], smaller, *record.rounds[2:])))
    measures = measure(Recording(2, tuple(ranks)))
    assert measures.module is not None
    assert measures.module.serial == 0
    assert [len(measures.steps[number][0].others) for number in (21, 22, 23)] == [0, 1, 0]


def test_the_typical_and_the_slowest_step() -> None:
    recording = Made(rounds=6).recording()
    assert measure(recording).round_at(0.5) in range(21, 26)
    stretched = []
    for record in recording.ranks:
        last = record.rounds[-1]
        spans = (*record.spans[:-1], record.spans[-1]._replace(ended_at=record.spans[-1].ended_at + 1))
        stretched.append(record._replace(rounds=(*record.rounds[:-1], last), spans=spans))
    measures = measure(Recording(2, tuple(stretched)))
    assert measures.round_at(1.0) == 25
    assert measures.round_at(0.5) != 25
