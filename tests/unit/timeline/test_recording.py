"""Records travel as text and are moved to another clock, and nothing else of them changes."""

from __future__ import annotations

from gradsync.events import RoundClosed
from gradsync.observe.timeline.recorder import ModuleRecorder, most_rounds
from gradsync.observe.timeline.recording import pack, shifted, unpack
from tests.unit.timeline.made import Made


def test_there_and_back() -> None:
    record = Made(accumulated=1).recording().ranks[1]._replace(fault="ValueError: ü")
    found = unpack(pack(record))
    assert type(found.rounds[0]) is RoundClosed
    assert found.rounds[0].buckets[1].traffic == record.rounds[0].buckets[1].traffic
    assert found.modules == record.modules
    assert found.cpus == record.cpus
    assert found.fault == record.fault
    assert [event.round for event in found.rounds] == [20, 21, 22, 23]
    for mine, theirs in zip(record.spans, found.spans, strict=True):
        assert abs(mine.began_at - theirs.began_at) < 1e-6
    assert pack(found) == pack(record)


def test_text_is_short() -> None:
    """Rank 0 gets those of all ranks."""
    record = Made(rounds=100).recording().ranks[0]
    assert len(pack(record)) < 100 * 4 * 60  # 60 bytes a bucket


def test_shifting_moves_every_time_but_those_that_are_none() -> None:
    record = Made().recording().ranks[0]
    moved = shifted(record, 100.0)
    assert moved.rounds[0].opened_at == record.rounds[0].opened_at + 100
    for before, after in zip(record.rounds[0].buckets, moved.rounds[0].buckets, strict=True):
        assert after.ready_at == before.ready_at + 100
        assert after.delivered_at == before.delivered_at + 100
        assert after.awaited_at == (before.awaited_at + 100 if before.awaited_at else 0.0)
    assert any(bucket.awaited_at for bucket in moved.rounds[0].buckets)
    assert any(not bucket.awaited_at for bucket in moved.rounds[0].buckets)
    assert moved.rounds[0].waited == record.rounds[0].waited  # no point in time
    assert moved.spans[0].ended_at == record.spans[0].ended_at + 100


def test_a_recorder_keeps_the_latest() -> None:
    record = Made(rounds=50).recording().ranks[0]
    recorder = ModuleRecorder(ranks=1024)
    for event in record.rounds:
        recorder.round_closed(event._replace(order=tuple(range(1000))))
    assert most_rounds(1024) == 16
    assert [event.round for event in recorder.rounds] == list(range(54, 70))
    assert recorder.left_out == 34
    assert recorder.rounds[0].order == ()
    recorder.forget()
    assert recorder.left_out == 0
    assert not recorder.rounds
