"""What the judge lets pass, and above all what it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradsync.cli.chaos.fault import Fault, Kind, Phase, parse
from gradsync.cli.chaos.judge import Judgment, judge
from gradsync.cli.chaos.outcome import Observation, Outcome
from gradsync.cli.chaos.tally import Tally

FAULT_AT = 100.0
GONE = "rank 0: rank 1 is gone: its process ended without a word (killed, ...)."
DOWN = "does not answer any more: its host is down, or the network is."
KILL = parse("kill rank=1 ranks=3 phase=backward transport=shared_memory step=2")
RAISE = replace(KILL, kind=Kind.RAISE)
END = replace(KILL, kind=Kind.END, phase=Phase.LOADING)
STOP = replace(KILL, kind=Kind.STOP, seconds=1.0)
HALT = replace(KILL, kind=Kind.HALT)
LOOP = replace(KILL, kind=Kind.LOOP)
CUT = parse("cut rank=3 ranks=4 hosts=2 phase=forward transport=hierarchical")
FLAP = replace(CUT, kind=Kind.FLAP, seconds=2.0)


def names(rank: int, blamed: int = 1, text: str = GONE, after: float = 0.1, **more: Any) -> Outcome:
    told = {"status": 0, "error": "ReplicaLostError", "blamed": (blamed,), "at": FAULT_AT + after, "text": text}
    return Outcome(rank=rank, **{**told, **more})


def tells(rank: int, text: str, **more: Any) -> Outcome:
    return names(rank, text=text, **{"error": "RoundTimeoutError", "after": 7.0, **more})


def finished(rank: int, fingerprint: str = "aa") -> Outcome:
    return Outcome(rank=rank, status=0, finished=fingerprint)


def seen(*outcomes: Outcome, **more: Any) -> Observation:
    return Observation(**{"outcomes": outcomes, "fault_at": FAULT_AT, **more})


KILLED = Outcome(rank=1, status=-9)
RAISED = Outcome(rank=1, status=1, error="ValueError")
HIS_WORDS = "rank 0: rank 1 raised ValueError: the data of this rank is bad. It was ..."
SILENT = "rank 0 has waited 4 s, at the end of backward ...: rank 1 does not answer, though its process is there: ..."
BUSY = "rank 0 has waited 4 s, at the end of backward ...: rank 1 has been in backward of round 2 for 4 s (train.py:3):"
EARLY = "rank 0: rank 1 ended its training after round 1; rank 0 is in round 2."


@pytest.mark.parametrize(
    ("fault", "observed", "judgment"),
    [
        (KILL, seen(names(0), KILLED, names(2)), Judgment.NAMED),
        (RAISE, seen(names(0, text=HIS_WORDS), RAISED, names(2, text=HIS_WORDS)), Judgment.NAMED),
        (END, seen(names(0, text=EARLY), finished(1), names(2, text=EARLY, after=1.9)), Judgment.NAMED),
        (STOP, seen(finished(0), finished(1), finished(2)), Judgment.WENT_ON),
        (CUT, seen(*(names(rank, 2 - rank // 2 * 2, DOWN, 9.0) for rank in range(4))), Judgment.NAMED),
        (FLAP, seen(*map(finished, range(4))), Judgment.WENT_ON),
        (HALT, seen(tells(0, SILENT), KILLED, tells(2, SILENT)), Judgment.NAMED),
        (LOOP, seen(tells(0, BUSY), KILLED, tells(2, BUSY)), Judgment.NAMED),
        (  # there is no round yet
            replace(LOOP, phase=Phase.CONSTRUCTION, step=0),
            seen(names(0, text="no word", after=5.0), KILLED, names(2, text="no word", after=5.0)),
            Judgment.NAMED,
        ),
        (  # a busy machine has more time
            KILL,
            seen(names(0), KILLED, names(2, after=3.0), crowding=4.0),
            Judgment.NAMED,
        ),
        (  # the kill came when all was done
            replace(KILL, delay=0.05),
            seen(finished(0), Outcome(rank=1, status=-9, finished="aa"), finished(2)),
            Judgment.WENT_ON,
        ),
        (  # a link that was down for so long that either is right
            replace(FLAP, seconds=6.0),
            seen(*(names(rank, 2 - rank // 2 * 2, DOWN, 9.0) for rank in range(4))),
            Judgment.NAMED,
        ),
    ],
)
def test_promises_kept(fault: Fault, observed: Observation, judgment: Judgment) -> None:
    verdict = judge(fault, observed)
    assert (verdict.judgment, verdict.reason) == (judgment, "")


CUT_SEEN = [names(rank, 2 - rank // 2 * 2, DOWN, 9.0) for rank in range(4)]
BAD = {
    "a rank hangs": (KILL, seen(names(0), KILLED, Outcome(rank=2, status=None)), "rank 2 hung"),
    "nothing happened": (KILL, seen(finished(0), finished(1), finished(2), fault_at=None), "did not happen"),
    "the doomed lived": (KILL, seen(names(0), finished(1), names(2)), "did not happen: rank 1 ended with 0"),
    "too late": (KILL, seen(names(0), KILLED, names(2, after=1.2)), "raised after 1.20 s; promised are 1 s"),
    "too late between hosts": (
        replace(KILL, hosts=2, transport="process_group"),
        seen(names(0), KILLED, names(2, after=2.2)),
        "promised are 2 s",
    ),
    "too late after silence": (CUT, seen(*CUT_SEEN[:3], names(3, 0, DOWN, 10.5)), "promised are 10 s"),
    "another is blamed": (KILL, seen(names(0), KILLED, names(2, blamed=0)), "rank 2 blames rank 0, not 1"),
    "two are blamed": (KILL, seen(names(0), KILLED, replace(names(2), blamed=(1, 2))), "blames rank 1, 2, not 1"),
    "nobody is blamed": (KILL, seen(names(0), KILLED, replace(names(2), blamed=())), "blames rank nobody"),
    "another error": (KILL, seen(names(0), KILLED, names(2, error="RuntimeError")), "rank 2 raised RuntimeError"),
    "no error": (KILL, seen(names(0), KILLED, Outcome(rank=2, status=-6)), "rank 2 ended with -6"),
    "one goes on alone": (KILL, seen(names(0), KILLED, finished(2)), "rank 2 went on without"),
    "its exception is not told": (RAISE, seen(names(0), RAISED, names(2)), "does not say 'raised ValueError"),
    "an end is called a death": (END, seen(names(0), finished(1), names(2)), "does not say 'ended its training'"),
    "a cut is called a death": (CUT, seen(*CUT_SEEN[:3], names(3, 0, GONE)), "rank 3 does not say 'does not answer"),
    "a cut blames one's own side": (CUT, seen(*CUT_SEEN[:3], names(3, 2, DOWN)), "rank 3 blames rank 2, not 0"),
    "a stop ends one": (STOP, seen(finished(0), finished(1), names(2)), "rank 2 raised ReplicaLostError, and should"),
    "a stop kills one": (STOP, seen(finished(0), KILLED, finished(2)), "rank 1 ended with -9"),
    "a halt is called a death": (HALT, seen(names(0), KILLED, names(2)), "rank 0 raised ReplicaLostError"),
    "a halt is not told apart": (
        HALT,
        seen(tells(0, BUSY), KILLED, tells(2, BUSY)),
        "does not say 'rank 1 does",
    ),
    "where it loops is not said": (LOOP, seen(tells(0, SILENT), KILLED, tells(2, SILENT)), "does not say 'rank 1 has"),
    "the limit is not kept": (HALT, seen(tells(0, SILENT), KILLED, tells(2, SILENT, after=9.5)), "promised are 9 s"),
    "who waits is blamed": (HALT, seen(tells(0, SILENT), KILLED, tells(2, SILENT, blamed=0)), "blames rank 0, not 1"),
    "replicas differ": (STOP, seen(finished(0), finished(1), finished(2, "bb")), "the replicas differ: aa, aa, bb"),
    "a short flap ends the training": (FLAP, seen(*CUT_SEEN), "should have gone on"),
    "a thread is left": (
        KILL,
        seen(names(0, left=("thread 7 (python)",)), KILLED, names(2)),
        "left behind: rank 0: thread 7",
    ),
    "a process is left": (KILL, seen(names(0), KILLED, names(2), left=("process 8 (x)",)), "left behind: process 8"),
}


@pytest.mark.parametrize("name", BAD)
def test_promises_broken(name: str) -> None:
    fault, observed, reason = BAD[name]
    verdict = judge(fault, observed)
    assert verdict.judgment is Judgment.BAD
    assert reason in verdict.reason


def test_parameters_that_differ_from_those_without_a_fault() -> None:
    same = seen(*(finished(rank, "cc") for rank in range(3)))
    assert judge(STOP, same, undisturbed="cc").judgment is Judgment.WENT_ON
    assert "without the fault" in judge(STOP, same, undisturbed="dd").reason


def test_a_tally_compares_trainings_that_are_alike() -> None:
    tally = Tally()
    for fault, fingerprint, is_bad in (
        (STOP, "aa", False),
        (replace(STOP, rank=0), "bb", True),
        (replace(STOP, rank=0), "aa", False),
        (replace(STOP, transport="process_group"), "bb", False),
    ):
        case = tally.add(0, fault, seen(*(finished(rank, fingerprint) for rank in range(3))))
        assert case.is_bad is is_bad, case.verdict
    assert [row.cells()[:6] for row in tally.rows()] == [
        ["stop", "backward", "4", "3", "0", "1"],
        ["all", "", "4", "3", "0", "1"],
    ]
