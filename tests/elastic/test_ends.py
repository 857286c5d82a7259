"""Losses of many at once, and those that training does not get over: what is said, and what is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from tests.elastic.fault import Fault, Kind, Phase
from tests.elastic.job import Plan, Result, run, truth
from tests.support.hosts import Host, hosts_or_skip

STEPS = 60


@pytest.fixture(scope="module")
def right() -> Result:
    return truth(STEPS)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Sequence[Host]]:
    with hosts_or_skip(2) as made:
        yield made


def killed(number: int, phase: Phase, *, ranks: int, slot: int = 0, host: int = 0, **options: int) -> Fault:
    options = {"after": number, "wait": 3, **options}
    return Fault(number=number, kind=Kind.KILL, phase=phase, slot=slot, host=host, ranks=ranks, **options)


def do(plan: Plan, folder: Path | None = None) -> Result:
    return run(plan, Random(0), folder)


def test_the_first_ranks_of_all_hosts_die(hosts: Sequence[Host], right: Result) -> None:
    faults = [killed(host, Phase.REDUCED, ranks=4, host=host, after=0) for host in (0, 1)]
    result = do(Plan("hierarchical", STEPS, faults=faults, hosts=hosts))
    assert not result.wrong(right), result.said
    assert len(result.fired) == 2, result.said


def test_the_last_one_goes_on_alone(right: Result) -> None:
    faults = [killed(0, Phase.BACKWARD, ranks=3), killed(1, Phase.OPTIMIZER, ranks=2, slot=2)]
    result = do(Plan("shared_memory", STEPS, "1:3", faults, max_restarts=0))
    assert not result.wrong(right), result.said
    assert "epoch 3: 1 ranks" in result.said
    assert result.said.count("it is given up (--max-restarts)") == 2


def test_too_few_wait_and_leave_a_checkpoint_from_which_another_job_goes_on(right: Result, tmp_path: Path) -> None:
    faults = [killed(0, Phase.STEPPED, ranks=2, slot=1)]
    result = do(Plan("process_group", STEPS, "2:2", faults, wait=0.1), tmp_path)  # a start takes longer
    assert result.codes == [1]
    assert "1 of at least 2 ranks are left: waiting 0.1 s for others" in result.said
    assert "training can't go on: only 1 of at least 2 ranks were there for 0.1 s." in result.said
    assert "steps are in" in result.said
    assert "training.resume() goes on from there" in result.said
    assert not result.ends

    again = do(Plan("shared_memory", STEPS, "1:3"), tmp_path)
    assert not again.wrong(right), again.said
    assert all(one["resumed"] for one in again.ends)
    first = min(one["step"] for name, one in again.steps if name not in result.records)
    assert first == 1 + max(one["step"] for _, one in result.steps)


def test_who_keeps_dying_is_given_up(right: Result) -> None:
    starts = [killed(number, Phase.JOINING, ranks=0, slot=1, part=1) for number in (1, 2)]
    result = do(
        Plan("shared_memory", STEPS, "2:3", [killed(0, Phase.FORWARD, ranks=3, slot=1), *starts], max_restarts=2)
    )
    assert not result.wrong(right), result.said
    assert "a rank was started 2 times again, and has died again (killed by SIGKILL): it is given up" in result.said


def test_all_die_at_once(right: Result) -> None:
    every = Fault(number=0, kind=Kind.ALL, phase=Phase.ANY, ranks=2, wait=3)
    result = do(Plan("shared_memory", STEPS, "2:2", [every]))
    assert not result.wrong(right), result.said
    assert "all ranks were lost at once, and what they had trained with them: beginning again" in result.said


def test_the_host_that_leads_is_lost(hosts: Sequence[Host], right: Result, tmp_path: Path) -> None:
    """The others leave a checkpoint."""
    lead = Fault(number=0, kind=Kind.HOST, phase=Phase.ANY, host=0, ranks=4, wait=3)
    result = do(Plan("process_group", STEPS, faults=[lead], hosts=hosts), tmp_path)
    assert result.codes == [1], result.said
    assert "the host that leads (the first one, with the rendezvous endpoint) is lost" in result.said
    assert not result.ends

    again = do(Plan("process_group", STEPS, "1:2"), tmp_path)
    assert not again.wrong(right), again.said
    assert all(one["resumed"] for one in again.ends)


def test_a_launcher_is_lost_and_its_ranks_live(hosts: Sequence[Host], right: Result) -> None:
    """They leave by themselves, and nobody waits for them, though their connections are there."""
    lost = Fault(number=0, kind=Kind.LAUNCHER, phase=Phase.ANY, host=1, ranks=4, wait=3)
    result = do(Plan("process_group", STEPS, faults=[lost], hosts=hosts))
    assert not result.wrong(right), result.said
    assert "host 1 is lost, with 2 ranks" in result.said
    assert "training can't go on: the launcher of this host (gradsync run --elastic) is gone" in result.said


@pytest.mark.parametrize("phase", [Phase.BETWEEN, Phase.BACKWARD])
def test_an_exit_with_a_code_is_a_loss_and_not_the_end_of_training(phase: Phase, right: Result) -> None:
    """For Python, `sys.exit(3)` is an end like any other; to leave the loop by `break` would end training for all."""
    leaves = Fault(number=0, kind=Kind.EXIT, phase=phase, slot=1, ranks=3, wait=2)
    result = do(Plan("shared_memory", STEPS, "2:3", [leaves], max_restarts=0))
    assert not result.wrong(right), result.said
    how = "exit code 3" if phase is Phase.BETWEEN else "it raised SystemExit: 3"
    assert f"rank 1 is lost in epoch 1: {how}" in result.said
    assert {one["ranks"] for _, one in result.steps} == {2, 3}
