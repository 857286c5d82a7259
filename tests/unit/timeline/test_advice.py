"""Each rule, with a case in which it speaks and one in which it does not."""

from __future__ import annotations

import pytest

from gradsync.observe.timeline import advice
from gradsync.observe.timeline.measures import Measures, measure
from tests.unit.timeline.made import MIB, Made

AT_END = {"ready": (20.0,) * 4, "overlapped": 0}
SMALL = {"ready": tuple(range(1, 21)), "nbytes": (20_000,) * 20}
PG = {"transport": "process_group", "reason": "rank 1 can't: no socket", "transfer": 5.0}
CASES = {
    "straggler": (Made(late={1: {"data": 8.0}}), Made()),
    "crowded_host": (Made(ranks=2, threads=8, cpus=8), Made(ranks=2, threads=4, cpus=8)),
    "network_inside_a_host": (Made(**PG), Made(hosts=2, **PG)),  # type: ignore[arg-type]
    "gradients_at_once": (Made(**AT_END), Made()),  # type: ignore[arg-type]
    "all_in_one_bucket": (
        Made(ready=(20.0,), nbytes=(64 * MIB,), transfer=10.0, overlapped=0),
        Made(ready=(20.0,), nbytes=(64 * MIB,), transfer=0.1, deliver=0.1, overlapped=0),
    ),
    "first_bucket_late": (Made(ready=(15.0, 17.0, 19.0, 20.0), transfer=5.0), Made(transfer=5.0)),
    "large_last_bucket": (Made(nbytes=(MIB, MIB, MIB, 40 * MIB), transfer=5.0), Made(transfer=5.0, nbytes=(MIB,) * 4)),
    "many_small_buckets": (Made(deliver=4.0, **SMALL), Made(deliver=0.1, transfer=0.1, **SMALL)),  # type: ignore[arg-type]
    "too_much_to_send": (Made(transfer=40.0), Made(transfer=8.0)),
    "slow_data": (Made(data=30.0), Made(late={1: {"data": 30.0}})),
    "second_passes": (Made(corrected=True), Made()),
}


def measured(made: Made) -> Measures:
    return measure(made.recording())


def test_every_rule_has_its_cases() -> None:
    assert [rule.__name__ for rule in advice.RULES] == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_speaks_where_it_should_and_nowhere_else(name: str) -> None:
    speaks, silent = (getattr(advice, name)(measured(made)) for made in CASES[name])
    assert silent is None
    assert isinstance(speaks, advice.Advice)
    assert all(speaks)
    assert speaks in advice.advise(measured(CASES[name][0]))


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_a_straggler_is_named_with_its_phase(phase: str) -> None:
    found = advice.straggler(measured(Made(ranks=3, late={1: {phase: 9.0}})))
    assert found is not None
    assert "Rank 1 on host0" in found.title
    assert "9 ms more than the others in" in found.reason
    assert phase in found.reason


def test_a_reason_is_passed_on() -> None:
    found = advice.network_inside_a_host(measured(CASES["network_inside_a_host"][0]))
    assert found is not None
    assert "rank 1 can't: no socket." in found.reason
    asked = advice.network_inside_a_host(measured(Made(**{**PG, "reason": "asked for"})))  # type: ignore[arg-type]
    assert asked is not None
    assert asked.change == 'Leave out transport="process_group".'


def test_pinned_ranks_are_no_crowd() -> None:
    recording = Made(ranks=2, threads=1, cpus=1).recording()
    assert advice.crowded_host(measure(recording)) is not None
    first, second = recording.ranks
    pinned = recording._replace(ranks=(first._replace(cpus=(0,)), second._replace(cpus=(1,))))
    assert advice.crowded_host(measure(pinned)) is None


def test_nothing_to_change_is_said() -> None:
    (found,) = advice.advise(measured(Made(transfer=0.1, deliver=0.1)))
    assert found.title == "Nothing stands out"
    (found,) = advice.advise(measured(Made(ranks=1, transfer=0.0)))
    assert found.title == "Nothing stands out"
    (found,) = advice.advise(measured(Made(rounds=0)))
    assert found.title == "Nothing was recorded"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 µs"), (4e-5, "40 µs"), (0.0012, "1.2 ms"), (0.00999, "10 ms"), (0.5, "500 ms"), (61, "61.0 s")],
)
def test_seconds_in_words(seconds: float, shown: str) -> None:
    assert advice.ms(seconds) == shown


def test_bytes_in_words() -> None:
    assert [advice.size(n) for n in (12, 2048, 3 * MIB, 5 * 1024 * MIB)] == ["12 B", "2 KiB", "3 MiB", "5 GiB"]
