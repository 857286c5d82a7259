"""Twenty faults, of some seeds, on all transports and on two hosts: training ends with the bits of an undisturbed one.

`python -m tests.elastic.proof --faults 300` does the same with more of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import pytest

from tests.elastic.fault import STEP_PHASES, Fault, Kind, Phase, draw
from tests.elastic.job import Plan, Result, run, truth
from tests.support.hosts import Host, hosts_or_skip

STEPS = 240
SEEDS = {"shared_memory": 961, "process_group": 857, "hierarchical": 239}
SEED_OF_HOSTS = 996
FAULTS = 5  # a job


def of_seed(seed: int, hosts: int) -> list[Fault]:
    return draw(Random(seed), FAULTS, hosts, 4 // hosts)


@pytest.fixture(scope="module")
def right() -> Result:
    return truth(STEPS)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Sequence[Host]]:
    with hosts_or_skip(2) as made:
        yield made


def test_the_sample_has_everything_in_it() -> None:
    faults = [one for seed in SEEDS.values() for one in of_seed(seed, 1)] + of_seed(SEED_OF_HOSTS, 2)
    assert len(faults) == 20
    assert {Kind.KILL, Kind.RAISE, Kind.EXIT, Kind.STOP} <= {one.kind for one in faults}
    assert any(one.kind.needs_hosts for one in faults)
    phases = {one.phase for one in faults}
    assert {Phase.ANY, Phase.MEETING, Phase.TRANSFER, Phase.JOINING} <= phases
    assert len(phases & set(STEP_PHASES)) >= 5
    assert {one.slot for one in faults} == {0, 1, 2, 3}


@pytest.mark.parametrize("transport", SEEDS)
def test_one_host(transport: str, right: Result) -> None:
    check(Plan(transport, STEPS, faults=of_seed(SEEDS[transport], 1)), right)


def test_two_hosts(hosts: Sequence[Host], right: Result) -> None:
    check(Plan("hierarchical", STEPS, faults=of_seed(SEED_OF_HOSTS, 2), hosts=hosts), right)


def check(plan: Plan, right: Result) -> None:
    result = run(plan, Random(0))
    assert not result.wrong(right), result.said
    assert len(result.fired) == len(plan.faults), result.said
