"""Who is waited for, and who is slow, from blocks of waits."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.watch import lost_time
from gradsync.watch.ledger import Ledger
from gradsync.watch.lost_time import LostTime
from gradsync.watch.straggler import Straggler
from gradsync.watch.waits import MOST_ROUNDS, Block, Heard, Phases, Totals

SIZES = st.integers(2, 9)
SEEDS = st.integers(0, 2**32)
STEP = 0.2  # seconds, of a rank that waits for nobody


def waits_of(works: Sequence[float], overhead: float = 0.001) -> list[float]:
    """How long each rank waits if it has so much to do in a round; all of them end it together."""
    return [max(works) - work + overhead for work in works]


def blocks_of(rank: int, works: Sequence[Sequence[float]], chance: random.Random | None = None) -> list[Block]:
    """What a rank tells of these rounds, in blocks as long as they may be, or of any length."""
    blocks, first = [], 0
    while first < len(works):
        count = min(chance.randint(1, MOST_ROUNDS) if chance else MOST_ROUNDS, len(works) - first)
        some = works[first : first + count]
        waits = tuple(waits_of(one)[rank] for one in some)
        mine, all_of_it = sum(one[rank] for one in some), sum(max(one) + 0.001 for one in some)
        blocks.append(Block(rank, 0, "GPT", first, waits, Phases(0.1 * mine, 0.3 * mine, 0.6 * mine, all_of_it)))
        first += count
    return blocks


def account_of(works: Sequence[Sequence[float]], chance: random.Random | None = None) -> LostTime:
    """Of all ranks' blocks, with `chance` in any order that keeps each rank's own."""
    account, size = LostTime(len(works[0])), len(works[0])
    queues = [blocks_of(rank, works, chance) for rank in range(size)]
    while any(queues):
        rank = (chance or random).choice([rank for rank in range(size) if queues[rank]])
        account.add(queues[rank].pop(0))
    return account


def found(works: Sequence[Sequence[float]]) -> Straggler | None:
    return account_of(works).judge()


def test_the_last_one_is_waited_for() -> None:
    account = account_of([[1.0, 1.5, 4.0], [1.0, 3.0, 1.0]])
    totals = account.totals()
    assert totals.rounds == 2
    assert totals.waited_for == pytest.approx({2: 2.75, 1: 2.0})
    assert list(totals.waited_for) == [2, 1]
    assert [(one.round, one.rank) for one in totals.latest] == [(0, 2), (1, 1)]
    assert [one.seconds for one in totals.latest] == pytest.approx([2.75, 2.0])


@given(SEEDS, SIZES, st.integers(1, 200))
@settings(deadline=None)
def test_all_waiting_is_for_somebody_however_it_is_told(seed: int, size: int, rounds: int) -> None:
    chance = random.Random(seed)
    works = [[chance.expovariate(1) for _ in range(size)] for _ in range(rounds)]
    plain, mixed = account_of(works).totals(), account_of(works, chance).totals()
    assert plain.rounds == mixed.rounds == rounds
    assert plain.waited_for == pytest.approx(mixed.waited_for)
    beyond = sum(sum(max(one) - work for work in one) for one in works) / (size - 1)
    assert sum(plain.waited_for.values()) == pytest.approx(beyond)
    assert all(seconds >= 0 for seconds in plain.waited_for.values())
    assert [one.round for one in plain.latest] == list(range(max(0, rounds - MOST_ROUNDS), rounds))


@given(SEEDS, SIZES, st.floats(0.25, 5), st.floats(0, 0.1))
@settings(deadline=None, max_examples=50)
def test_one_that_is_slow_by_much_is_found(seed: int, size: int, slower: float, noise: float) -> None:
    chance = random.Random(seed)
    slow = chance.randrange(size)
    works = [[STEP * (1 + chance.uniform(0, noise) + slower * (r == slow)) for r in range(size)] for _ in range(128)]
    straggler = found(works)
    assert straggler is not None
    assert straggler.rank == slow
    assert straggler.slowest == straggler.rounds == 128
    assert straggler.seconds == pytest.approx(128 * STEP * slower, rel=0.5, abs=128 * STEP * noise)
    assert straggler.seconds / straggler.all_waits > 0.99
    assert straggler.phase == "backward"


@given(SEEDS, SIZES, st.floats(0, 10))
@settings(deadline=None, max_examples=50)
def test_noise_has_no_name(seed: int, size: int, noise: float) -> None:
    """However large, if it is the same for all."""
    chance = random.Random(seed)
    assert found([[STEP * (1 + chance.expovariate(1) * noise) for _ in range(size)] for _ in range(200)]) is None


@given(SEEDS, SIZES, st.integers(1, 64))
@settings(deadline=None, max_examples=50)
def test_ranks_that_are_slow_in_turns_have_no_name(seed: int, size: int, turn: int) -> None:
    chance = random.Random(seed)
    works = [
        [STEP * (1 + 3 * (r == number // turn % size)) for r in range(size)] for number in range(max(2 * turn, 128))
    ]
    chance.shuffle(works)
    assert found(works) is None


@given(SEEDS, SIZES)
@settings(deadline=None, max_examples=50)
def test_one_that_costs_little_has_no_name(seed: int, size: int) -> None:
    slow = random.Random(seed).randrange(size)
    assert found([[STEP * (1 + 0.1 * (r == slow)) for r in range(size)]] * 200) is None


def test_not_before_there_is_enough_to_say_so() -> None:
    assert found([[STEP, 2 * STEP]] * (lost_time.MIN_ROUNDS - 1)) is None
    assert found([[0.01, 0.02]] * lost_time.MIN_ROUNDS) is None  # of 3 seconds
    assert found([[STEP, 2 * STEP]] * lost_time.MIN_ROUNDS) is not None


def test_a_rank_that_never_tells_costs_no_memory() -> None:
    account = LostTime(3)
    for first in range(0, 100 * MOST_ROUNDS, MOST_ROUNDS):
        for rank in (0, 2):
            account.add(Block(rank, 0, "GPT", first, (0.1,) * MOST_ROUNDS, Phases(all=1.0)))
    assert account.rounds == 0
    assert len(account._open) == lost_time.MOST_OPEN
    assert account.judge() is None


def test_ten_thousand_ranks() -> None:
    size = 10_000
    account = LostTime(size)
    for rank in range(size):
        account.add(Block(rank, 0, "GPT", 0, tuple(0.0 if rank == n else 1.0 for n in range(64)), Phases(all=64.0)))
    totals = account.totals()
    assert totals.rounds == 64
    assert len(totals.waited_for) == 16
    assert len(json.dumps(totals.pack(0))) < 8000


# --- words -------------------------------------------------------------------------------------------------

SLOW = Straggler(3, "GPT", 120, 128, 14.1, 64.0, 15.5, Phases(0.31, 0.04, 0.08, 0.5), Phases(0.095, 0.041, 0.0795, 0.5))


def test_in_words() -> None:
    assert str(SLOW) == (
        "rank 3 is slow: in 120 of the last 128 rounds of GPT the others waited for it, 14.1 s each, 22% of the time "
        "and 91% of all waiting. Each step it spends 310 ms between rounds (data, optimizer), others 95 ms; 40 ms in "
        "forward and loss, others 41 ms; 80 ms in backward, others 80 ms. Look at its data loader, and at what else it "
        "does between steps: logging, checkpoints, evaluation."
    )


@pytest.mark.parametrize(
    ("phases", "phase", "cure"),
    [
        (Phases(0.1, 0.3, 0.1), "forward", "It computes slowly"),
        (Phases(0.1, 0.1, 0.3), "backward", "hooks of its own"),
        (Phases(0.1, 0.1, 0.1), "", "look at its connection"),
        (Phases(0.11, 0.09, 0.1), "", "look at its connection"),
    ],
)
def test_where_it_loses_the_time(phases: Phases, phase: str, cure: str) -> None:
    straggler = SLOW._replace(its=phases, others=Phases(0.1, 0.1, 0.1))
    assert straggler.phase == phase
    assert cure in str(straggler)


# --- rank 0's books ----------------------------------------------------------------------------------------


def test_one_warning_a_rank(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(2)
    for _ in range(3):
        for rank in (0, 1):
            for block in blocks_of(rank, [[STEP, 2 * STEP]] * 256):
                ledger.take(json.loads(json.dumps(block.pack())))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["rank 1 is slow"]


def test_totals_are_told_once_a_second() -> None:
    ledger, heard = Ledger(2), Heard()
    for rank in (0, 1):
        for block in blocks_of(rank, [[1.0, 3.0]] * 10):
            ledger.take(block.pack())
    (message,) = ledger.news(100.0)
    heard.take(json.loads(json.dumps(message)))
    assert heard.of(0).waited_for == pytest.approx({1: 20.0})
    assert heard.of(0).rounds == 10
    assert len(heard.of(0).latest) == 10
    assert heard.of(7) == Totals()
    for rank in (0, 1):
        ledger.take(blocks_of(rank, [[1.0, 3.0]] * 10)[0].pack())
    assert ledger.news(100.5) == []
    assert len(ledger.news(101.5)) == 1
    assert ledger.news(103.0) == []  # nothing new


def test_replicas_that_come_and_go_cost_no_memory() -> None:
    ledger, heard = Ledger(2), Heard()
    for module in range(500):
        for rank in (0, 1):
            ledger.take(Block(rank, module, "GPT", 0, (0.1,), Phases(all=1.0)).pack())
        for message in ledger.news(2.0 * module):
            heard.take(message)
    assert len(ledger._accounts) == len(heard._totals) == 64
    assert len(ledger._told) <= 64


@pytest.mark.parametrize("waits", [[], [1] * (MOST_ROUNDS + 1), ["a"]], ids=["none", "too many", "no number"])
def test_a_block_that_makes_no_sense(waits: list[int]) -> None:
    message = Block(0, 0, "GPT", 0, (0.1,), Phases()).pack()
    with pytest.raises(ValueError, match=r"."):
        Block.unpack({**message, "waits": waits})
