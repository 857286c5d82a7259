"""What ranks hear of each other, over real sockets: nodes in threads of one process."""

from __future__ import annotations

import time

import pytest

from gradsync.errors import ReplicaLostError, RoundTimeoutError
from gradsync.watch.notice import How, Notice
from gradsync.watch.patience import after_break
from gradsync.watch.watch import Watch
from tests.watch.board import watches

TWO_HOSTS = [[0, 1, 2], [3, 4]]


def vanish(watch: Watch) -> None:
    """As when a process dies: its connections are closed, nothing is said."""
    watch._node.end()


def raised(rank: int, why: str = "ValueError: boom", because: tuple[int, ...] = ()) -> Notice:
    return Notice(rank, How.RAISED, why, ("train.py:7 in load",), because)


def hears(watch: Watch) -> ReplicaLostError:
    found = after_break(watch, RuntimeError("broken"))
    assert isinstance(found, ReplicaLostError)
    with pytest.raises(ReplicaLostError):
        watch.check()
    return found


@pytest.mark.parametrize("lost", range(5))
def test_all_hear_of_a_rank_that_is_gone(lost: int) -> None:
    with watches(TWO_HOSTS) as all_of_them:
        began = time.monotonic()
        vanish(all_of_them[lost])
        for rank, watch in enumerate(all_of_them):
            if rank != lost:
                error = hears(watch)
                assert error.ranks == [lost]
                assert f"rank {rank}: rank {lost} is gone" in str(error)
        assert time.monotonic() - began < 2


@pytest.mark.parametrize("lost", range(5))
def test_all_hear_why(lost: int) -> None:
    with watches(TWO_HOSTS) as all_of_them:
        all_of_them[lost]._node.say(raised(lost), 1)
        for rank, watch in enumerate(all_of_them):
            if rank != lost:
                text = str(hears(watch))
                assert f"rank {lost} raised ValueError: boom" in text
                assert "train.py:7 in load" in text


@pytest.mark.parametrize("first", range(4))
def test_the_first_cause_not_those_who_fell_with_it(first: int) -> None:
    with watches(TWO_HOSTS) as all_of_them:
        vanish(all_of_them[first])
        last = all_of_them[4]
        for rank, watch in enumerate(all_of_them[:4]):
            if rank != first:
                hears(watch)
                watch._node.say(raised(rank, "ReplicaLostError: ...", because=(first,)), 1)
                vanish(watch)
        assert hears(last).ranks == [first]


@pytest.mark.parametrize("tired", range(5))
def test_one_that_gives_up_and_ends_at_once_says_for_whom(tired: int) -> None:
    """Also to those who are heard over it."""
    with watches(TWO_HOSTS) as all_of_them:
        blamed = (tired + 1) % 5
        all_of_them[tired].give_up("rank x has waited long", [blamed])
        vanish(all_of_them[tired])
        for rank, watch in enumerate(all_of_them):
            if rank != tired:
                error = after_break(watch, RuntimeError("broken"))
                assert isinstance(error, RoundTimeoutError)
                assert error.ranks == [blamed]


@pytest.mark.parametrize("leaver", range(5))
def test_who_has_come_to_its_end_is_not_lost(leaver: int) -> None:
    with watches(TWO_HOSTS) as all_of_them:
        words = Notice(leaver, How.ENDED, rounds=((0, 99),))
        all_of_them[leaver]._node.say(words, 1)
        vanish(all_of_them[leaver])
        for rank, watch in enumerate(all_of_them):
            if rank == leaver:
                continue
            node = watch._node
            with node.news:
                assert node.news.wait_for(lambda node=node: node.notices, 5)  # type: ignore[misc]
            watch.check()
            assert [(one.rank, one.how, one.rounds) for one in watch.ended()] == [(leaver, How.ENDED, ((0, 99),))]


def test_where_everybody_is() -> None:
    with watches(TWO_HOSTS) as all_of_them:
        for watch in all_of_them:
            rows = watch.where()
            assert sorted(row.rank for row in rows) == [0, 1, 2, 3, 4]
            assert all(row.at is not None and row.line.startswith("test_news.py") for row in rows)


def test_nobody_waits_long_for_an_answer_when_rank_0_is_gone() -> None:
    with watches(TWO_HOSTS) as all_of_them:
        vanish(all_of_them[0])
        hears(all_of_them[3])
        assert all_of_them[3].where() == ()
