"""The faults that a seed stands for, and the line that stands for one."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from gradsync.cli.chaos.fault import FRONTS, TRANSPORTS, BadFault, Fault, Kind, Phase, parse
from gradsync.cli.chaos.plan import Choices, faults


def draw(seed: int, count: int, **choices: object) -> list[Fault]:
    return list(islice(faults(seed, Choices(**choices)), count))  # type: ignore[arg-type]


def test_a_seed_always_means_the_same_faults() -> None:
    assert draw(3, 90) == draw(3, 90)
    assert draw(3, 90)[:40] == draw(3, 40)
    assert draw(3, 90) != draw(4, 90)


def test_everything_is_drawn() -> None:
    drawn = draw(1, 600)
    assert {fault.kind for fault in drawn} == set(Kind)
    assert {fault.front for fault in drawn} == set(FRONTS)
    assert {fault.ranks for fault in drawn} == {2, 3, 4}
    assert {fault.phase for fault in drawn if fault.kind is Kind.KILL} == set(Phase)
    assert {fault.phase for fault in drawn if fault.kind is Kind.CUT} == set(Phase)
    assert {fault.phase for fault in draw(1, 1500) if fault.kind is Kind.HALT} == set(Phase)
    assert {(fault.transport, fault.hosts) for fault in drawn} == {
        *((transport, 1) for transport in TRANSPORTS),
        ("process_group", 2),
        ("hierarchical", 2),
    }
    boundaries = {(one.bucket, one.after) for one in drawn if one.phase is Phase.BACKWARD}
    assert len(boundaries) == 20
    for answer in (True, False):
        assert any(one.caught is answer for one in drawn)
        assert any(one.store_in_rank_0 is answer for one in drawn)
        assert any(bool(one.delay) is answer for one in drawn if one.kind is Kind.KILL)


def test_slow_kinds_are_rare_and_evenly_spread() -> None:
    drawn = draw(1, 90)
    for first in (0, 30, 60):
        assert Counter(fault.kind for fault in drawn[first : first + 30])[Kind.CUT] == 1


def test_what_was_not_chosen_is_not_drawn() -> None:
    inside = draw(1, 100, hosts=False)
    assert all(fault.hosts == 1 and not fault.kind.needs_hosts for fault in inside)
    shared = draw(1, 100, transports=("shared_memory",), fewest=2, most=2)
    assert {(fault.transport, fault.ranks, fault.hosts) for fault in shared} == {("shared_memory", 2, 1)}
    two = draw(1, 100, transports=("hierarchical",), fewest=2, most=2)
    assert {fault.hosts for fault in two} == {1}


def test_a_line_says_all() -> None:
    for fault in draw(5, 300):
        assert parse(str(fault)) == fault
        assert Fault.from_json(fault.to_json()) == fault


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "kind can't be ''"),
        ("explode rank=1", "kind can't be 'explode'"),
        ("kill rank=1", "missing: phase, ranks, transport"),
        ("kill rank=2 ranks=2 phase=forward transport=shared_memory", "no rank 2 of 2"),
        ("kill rank=one ranks=2 phase=forward transport=shared_memory", "rank can't be 'one'"),
        ("kill rank=0 ranks=2 phase=lunch transport=shared_memory", "phase can't be 'lunch'"),
        ("kill rank=0 ranks=2 phase=forward transport=pigeons", "pigeons is no transport"),
        ("kill rank=0 ranks=2 phase=forward transport=shared_memory hosts=2", "shared memory ends at a host"),
        ("kill rank=0 ranks=2 phase=forward transport=hierarchical hosts=2", "no host has two ranks"),
        ("kill rank=0 ranks=2 phase=forward transport=shared_memory caught=maybe", "caught can't be 'maybe'"),
        ("kill rank=0 ranks=2 phase=forward transport=shared_memory colour=red", "'colour' is nothing that a fault"),
        ("cut rank=0 ranks=2 phase=forward transport=process_group", "cut needs hosts=2"),
        ("raise rank=0 ranks=2 phase=forward transport=shared_memory delay=1", "raise can't be delayed"),
        ("loop rank=0 ranks=2 phase=forward transport=shared_memory delay=1", "loop can't be delayed"),
        ("halt rank=1 ranks=2 phase=construction transport=shared_memory delay=1", "can't be delayed in construction"),
        ("halt rank=0 ranks=2 phase=construction transport=process_group store_in_rank_0=yes", "tells nobody anything"),
        ("end rank=0 ranks=2 phase=forward transport=shared_memory", "a script ends between steps"),
        ("slow rank=0 ranks=2 phase=forward transport=shared_memory seconds=-1", "negative"),
    ],
)
def test_there_is_no_such_fault(line: str, complaint: str) -> None:
    with pytest.raises(BadFault, match=complaint):
        parse(line)
