"""Why ranks wait, in words."""

from __future__ import annotations

import pytest

from gradsync.watch.explanation import culprits, explain
from gradsync.watch.notice import How, Notice
from gradsync.watch.position import Awaited, Position
from gradsync.watch.report import Row

WAITS = Position("at the end of backward", "GPT", 0, 12, str(Awaited(2, 7, "layers.7.weight", 5)), 14.0)
FORWARD = Position("in forward", "GPT", 0, 12, "", 14.0)


def test_one_that_computes() -> None:
    stack = ("/home/me/train.py:200 in <module>", "/home/me/train.py:83 in load_batch")
    rows = [Row(1, FORWARD, "train.py:83 in load_batch", stack), Row(0, WAITS), Row(2, WAITS)]
    assert culprits(rows) == [1]
    assert explain(rows).splitlines() == [
        "rank 1 has been in forward of round 12 of GPT for 14 s (train.py:83 in load_batch):",
        "    /home/me/train.py:200 in <module>",
        "    /home/me/train.py:83 in load_batch",
        "rank 0 is at the end of backward of round 12 of GPT, waiting for bucket 3 of 7 (layers.7.weight and 4 more)",
        "rank 2 is at the end of backward of round 12 of GPT, waiting for bucket 3 of 7 (layers.7.weight and 4 more)",
    ]


def test_one_in_another_collective() -> None:
    stack = ("/home/me/train.py:9 in evaluate", "/x/torch/distributed/distributed_c10d.py:3000 in all_reduce")
    text = explain([Row(1, FORWARD, "train.py:9 in evaluate", stack), Row(0, WAITS)])
    assert text.startswith("rank 1 has been in another collective, all_reduce(), for 14 s (train.py:9 in evaluate):")


def test_one_that_does_not_answer() -> None:
    assert culprits([Row(2, None), Row(0, WAITS), Row(1, WAITS)]) == [2]
    assert "rank 2 does not answer, though its process is there" in explain([Row(2, None), Row(0, WAITS)])


def test_different_ways() -> None:
    """All wait, and not for the same: those who are fewer are named."""
    other = WAITS._replace(awaits=str(Awaited(3, 7, "layers.2.weight", 1)))
    rows = [Row(0, WAITS), Row(1, other), Row(2, WAITS)]
    assert culprits(rows) == [1]
    assert "rank 1 is at the end of backward of round 12 of GPT, waiting for bucket 4 of 7 (layers.2.w" in explain(rows)
    assert "their backwards took different ways, or came in another order" in explain(rows)


def test_two_of_which_none_is_more_to_blame() -> None:
    other = WAITS._replace(awaits=str(Awaited(3, 7, "layers.2.weight", 1)))
    assert culprits([Row(0, WAITS), Row(1, other)]) == [0, 1]
    assert "their backwards took different ways" in explain([Row(0, WAITS), Row(1, other)])


def test_different_modules_of_the_same_name() -> None:
    """In the same round, for the same bucket."""
    rows = [Row(0, WAITS), Row(1, WAITS._replace(serial=1)), Row(2, WAITS)]
    assert culprits(rows) == [1]
    lines = explain(rows).splitlines()
    assert lines[0].startswith("rank 1 is at the end of backward of round 12 of GPT (replicated module 1), waiting for")
    assert lines[1].startswith("rank 0 is at the end of backward of round 12 of GPT (replicated module 0), waiting for")
    assert lines[-1].startswith("The ranks are in rounds of different replicated modules")


def test_different_calls() -> None:
    """Of which nothing but the line of the script is known."""
    waits = Position("past the end", "GPT", 0, 12, "the other ranks", 14.0)
    rows = [
        Row(0, waits, "train.py:9 in main"),
        Row(1, waits, "train.py:12 in main"),
        Row(2, waits, "train.py:9 in main"),
    ]
    assert culprits(rows) == [1]
    assert explain(rows).splitlines() == [
        "rank 1 is past the end of round 12 of GPT, waiting for the other ranks (train.py:12 in main)",
        "rank 0 is past the end of round 12 of GPT, waiting for the other ranks (train.py:9 in main)",
        "rank 2 is past the end of round 12 of GPT, waiting for the other ranks (train.py:9 in main)",
        "The ranks wait for each other in different calls: some train, for example, while others compare, load, save "
        "or make a replica. Let all ranks make the same calls, in the same order.",
    ]


def test_one_that_shows_its_exception() -> None:
    """That is a function of c10d's too."""
    stack = ("/x/torch/distributed/distributed_c10d.py:1928 in _distributed_excepthook",)
    assert explain([Row(1, FORWARD, "", stack), Row(0, WAITS)]).startswith("rank 1 has been in forward of round 12")


def test_all_wait_for_the_same() -> None:
    assert culprits([Row(0, WAITS), Row(1, WAITS)]) == []


def test_one_that_ended() -> None:
    assert "rank 3 ended its script after 99 rounds" in explain([], [Notice(3, How.ENDED, rounds=((0, 99),))])


@pytest.mark.parametrize("how", How)
def test_news_survive_the_trip(how: How) -> None:
    notice = Notice(3, how, "ValueError: \u00e4", ("train.py:7 in load",), (1, 2), WAITS, ((0, 99), (4, 5)))
    assert Notice.unpack(notice.pack()) == notice
    if how.is_loss:
        error = notice.error(0)
        assert str(error).startswith("rank 0: ")
        assert error.ranks == ([1, 2] if how in (How.RAISED, How.GAVE_UP) else [3])
