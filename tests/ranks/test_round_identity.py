"""Ranks whose backwards do not belong together: every rank learns of it, or they are brought in step.

A backward that raises, a look at gradients on one rank, `no_sync` on one rank: none of it may mix up rounds in silence.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradsync
from gradsync.errors import GradsyncError, ReplicaLostError, RoundMismatchError, RoundTimeoutError
from tests.ranks.memory import be_on_host
from tests.ranks.small import FRONTS, TRANSPORTS, Fails, batch, make, same_everywhere, short_group
from tests.support.outcome import End, Outcome
from tests.support.patience import seconds_since
from tests.support.ranks import Ranks, on_ranks

SOON = 5.0  # seconds: what takes milliseconds, on a busy machine; half of the group's time limit
IN_VAIN = (ReplicaLostError, RoundTimeoutError)
LAYERS = 4
FORWARD = -1  # instead of a layer: raises in forward
PLACES = [("shared_memory", 2), ("process_group", 2), ("hierarchical", 3)]  # the last rank is on another host
WHERE = pytest.mark.parametrize(("transport", "size"), PLACES)
Batch = tuple[int, int]  # step, rank


class Layers(nn.Module):
    """Layers of one shape, so that mixing up buckets goes unnoticed; backward may raise before it comes to one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))

    def forward(self, x: Tensor, fail: int | None = None) -> Tensor:
        if fail == FORWARD:
            raise ZeroDivisionError("on purpose")
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == fail:
                x = Fails.apply(x)
        return x


class Training:
    """A replica, and beside it one process that knows all batches."""

    def __init__(self, front: str, transport: str, **options: Any) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if transport == "hierarchical":
            be_on_host(0 if self.rank < 2 else 1)
        torch.manual_seed(0)
        self.module = Layers().double()
        self.oracle = copy.deepcopy(self.module)
        self.replica = make(front, self.module, transport=transport, **options)
        self.begin()

    def begin(self) -> None:
        self.optimizer, self._oracles = (
            torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (self.module, self.oracle)
        )

    def backward(self, step: int, fail: int | None = None) -> None:
        self.replica(batch(self.rank, step).double(), fail).square().mean().backward()

    def step(self, step: int, fail: int | None = None) -> None:
        self.optimizer.zero_grad()
        self.backward(step, fail)
        self.optimizer.step()

    def expect(self, *batches: Batch) -> None:
        """After a step: as one process would have it after these batches."""
        self._oracles.zero_grad()
        for step, rank in batches:
            (self.oracle(batch(rank, step).double()).square().mean() / len(batches)).backward()
        self._oracles.step()
        for found, wanted in zip(self.module.parameters(), self.oracle.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        same_everywhere(self.module)

    def expect_without(self, step: int, who: tuple[int, ...], fail: int) -> None:
        """The same if `who` did not get beyond a layer: what had left by then may count, the rest does not."""
        every, others = range(self.size), [rank for rank in range(self.size) if rank not in who]
        both = []
        for ranks in (every, others):
            self.oracle.zero_grad()
            for rank in ranks:
                (self.oracle(batch(rank, step).double()).square().mean() / len(ranks)).backward()
            both.append([parameter.grad for parameter in self.oracle.parameters()])
        for (name, found), wanted, with_all, without in zip(
            self.module.named_parameters(), self.oracle.parameters(), *both, strict=True
        ):
            assert found.grad is not None
            assert with_all is not None
            assert without is not None
            left = int(name.split(".")[1]) > fail and torch.allclose(found.grad, with_all, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found.grad, with_all if left else without, rtol=1e-12, atol=1e-12)
            wanted.grad = found.grad.clone()
        self._oracles.step()
        same_everywhere(self.module)

    def step_together(self, step: int) -> None:
        self.step(step)
        self.expect(*((step, rank) for rank in range(self.size)))

    def start_over(self) -> None:
        """All ranks with the values that rank 0 has; as after a checkpoint."""
        state: list[Any] = [self.module.state_dict()]
        dist.broadcast_object_list(state)
        self.module.load_state_dict(state[0])
        self.oracle.load_state_dict(state[0])
        self.module.zero_grad()
        self.begin()


@contextlib.contextmanager
def refused(error: type[Exception], *words: str) -> Iterator[None]:
    """What is inside raises this, with these words; to wait in vain for a rank that has ended is not enough."""
    began = time.monotonic()
    with pytest.raises(error) as caught:
        yield
    assert not isinstance(caught.value, IN_VAIN)
    assert seconds_since(began) < SOON
    for word in words:
        assert word in str(caught.value)


def mismatch() -> contextlib.AbstractContextManager[None]:
    everybody = [f"rank {rank}" for rank in range(dist.get_world_size())]
    return refused(RoundMismatchError, *everybody, "round", "Layers", "skip_round()")


# --- a backward that raises ------------------------------------------------------------------------------


def train_on(training: Training, steps: Iterable[int], at: int, fail: int | None) -> None:
    """As many a loop does: a batch that fails is left out."""
    for step in steps:
        try:
            training.step(step, fail if step == at else None)
        except ZeroDivisionError:
            training.optimizer.zero_grad()


def raises_alone(front: str, transport: str, fails: tuple[int | None, ...]) -> None:
    """Buckets of that round have left; the others wait for the rest. Once all know, training can go on."""
    training = Training(front, transport)
    for first in (0, 20):
        for step in range(first, first + 3):
            training.step_together(step)
        assert gradsync.statistics(training.replica).overlapped_buckets > 1
        with mismatch():
            train_on(training, range(first + 3, first + 7), first + 3, fails[training.rank])
        training.start_over()
    training.step_together(50)


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("fails", [(None, 0), (0, None), (None, 2), (None, 0, None), (None, 0, 2)], ids=str)
def test_a_backward_that_raises_on_one_rank(
    ranks: Ranks, front: str, transport: str, fails: tuple[int | None, ...]
) -> None:
    ranks(raises_alone, len(fails), front, transport, fails)


@FRONTS
@pytest.mark.parametrize("fails", [(None, 0, None), (None, None, 0)], ids=str)
def test_a_backward_that_raises_on_one_rank_of_several_hosts(
    ranks: Ranks, front: str, fails: tuple[int | None, ...]
) -> None:
    ranks(raises_alone, 3, front, "hierarchical", fails)


def raises_alone_and_ends(transport: str) -> None:
    training = Training("replicate", transport)
    for step in range(3):
        training.step(step)
    train_on(training, range(3, 7), 3, 0 if training.rank == 1 else None)


@pytest.mark.parametrize(("transport", "size"), [*PLACES, ("shared_memory", 3), ("process_group", 3)])
def test_ranks_that_end_with_the_error_leave_it_to_the_others(ranks: Ranks, transport: str, size: int) -> None:
    for outcome in ranks.outcomes(raises_alone_and_ends, size, transport):
        assert outcome.end is End.RAISED, outcome
        assert isinstance(outcome.exception, RoundMismatchError), outcome


def all_raise(front: str, transport: str, fails: tuple[int, ...]) -> None:
    """In the very first round, in a later one, and in two in a row."""
    training = Training(front, transport)
    for step in range(8):
        if step in (0, 3, 4, 6):
            with pytest.raises(ZeroDivisionError):
                training.step(step, fails[training.rank])
        else:
            training.step_together(step)


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("fails", [(0, 0), (0, 2), (FORWARD, FORWARD), (3, 3), (0, 1, 2)], ids=str)
def test_a_backward_that_raises_on_all_ranks(ranks: Ranks, front: str, transport: str, fails: tuple[int, ...]) -> None:
    ranks(all_raise, len(fails), front, transport, fails)


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("fails", [(3, 0), (0, 1, 3), (FORWARD, 1)], ids=str)
def test_ranks_of_which_one_had_sent_nothing_yet(
    ranks: Ranks, front: str, transport: str, fails: tuple[int, ...]
) -> None:
    """It does not know that the others have begun the round: its next one is another."""
    ranks(raises_alone, len(fails), front, transport, fails)


@FRONTS
def test_a_backward_that_raises_on_all_ranks_of_several_hosts(ranks: Ranks, front: str) -> None:
    ranks(all_raise, 3, front, "hierarchical", (0, 2, 1))


@FRONTS
@WHERE
@pytest.mark.parametrize(("at", "fail"), [(0, 0), (0, FORWARD), (2, FORWARD), (2, LAYERS - 1)])
@on_ranks("size")
def test_one_rank_raises_before_anything_has_left(front: str, transport: str, at: int, fail: int, size: int) -> None:
    """The last rank leaves a batch out and takes its next one, which belongs to the same round as the others' one."""
    training = Training(front, transport)
    last = training.size - 1
    for step in range(4):
        mine = step
        if training.rank == last and step >= at:
            if step == at:
                with pytest.raises(ZeroDivisionError):
                    training.step(step, fail)
            mine = step + 1
        training.step(mine)
        training.expect(*((step + 1 if rank == last and step >= at else step, rank) for rank in range(training.size)))


# --- rounds that a rank skips ----------------------------------------------------------------------------


def skips(front: str, transport: str, who: tuple[int, ...], fail: int | None) -> None:
    """Instead of a backward, or after one that raised; in the very first round, and in two in a row."""
    training = Training(front, transport)
    others = [rank for rank in range(training.size) if rank not in who]
    for step in range(6):
        if step not in (0, 2, 3):
            training.step_together(step)
            continue
        training.optimizer.zero_grad()
        if training.rank in who:
            if fail is not None:
                with pytest.raises(ZeroDivisionError):
                    training.backward(step, fail)
            training.replica.skip_round()
        else:
            training.backward(step)
        training.optimizer.step()
        if fail is None or fail == FORWARD or step == 0:
            training.expect(*((step, rank) for rank in others))
        else:
            training.expect_without(step, who, fail)


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize(("who", "fail"), [(0, None), (0, 0), (1, None), (1, 0), (1, 2), (1, LAYERS - 1), (1, FORWARD)])
def test_a_rank_that_skips_rounds(ranks: Ranks, front: str, transport: str, who: int, fail: int | None) -> None:
    ranks(skips, 2, front, transport, (who,), fail)


@FRONTS
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical"])
@pytest.mark.parametrize(("who", "fail"), [((0, 1), 1), ((2,), None)])
def test_some_of_three_ranks_skip_rounds(
    ranks: Ranks, front: str, transport: str, who: tuple[int, ...], fail: int | None
) -> None:
    ranks(skips, 3, front, transport, who, fail)


# --- a backward that others do not make ------------------------------------------------------------------


@FRONTS
@WHERE
@pytest.mark.parametrize(("who", "at"), [(1, 0), (0, 3), (1, 3)])
@on_ranks("size")
def test_a_look_at_gradients_on_one_rank(front: str, transport: str, who: int, at: int, size: int) -> None:
    """The look takes part in the others' round, and from then on this rank is one ahead; until somebody notices."""
    training = Training(front, transport)
    with refused(GradsyncError):
        for step in range(at + 4):
            if training.rank == who and step == at:
                training.backward(step)
                training.optimizer.zero_grad()
            training.step(step)


def accumulates_apart(front: str, transport: str, zero_first: bool) -> str:
    """Each rank in a step of its own, so that all have as many rounds."""
    training = Training(front, transport)
    for step in range(7):
        if zero_first:
            training.optimizer.zero_grad()
        if step == 1 + 2 * training.rank:
            with training.replica.no_sync():
                training.backward(step)
            continue
        training.backward(step)
        training.optimizer.step()
        if not zero_first:
            training.optimizer.zero_grad()
    return gradsync.fingerprint(training.module)


@FRONTS
@WHERE
@pytest.mark.parametrize("zero_first", [True, False])
def test_accumulation_in_other_steps_on_other_ranks(
    ranks: Ranks, front: str, transport: str, size: int, zero_first: bool
) -> None:
    check_not_silent(ranks.outcomes(accumulates_apart, size, front, transport, zero_first))


def check_not_silent(outcomes: list[Outcome]) -> None:
    """Equal to the last bit, or all have raised an error of ours."""
    if all(outcome.returned for outcome in outcomes):
        assert len({outcome.result for outcome in outcomes}) == 1
    else:
        for outcome in outcomes:
            assert isinstance(outcome.exception, GradsyncError), outcome


# --- modules in another order ----------------------------------------------------------------------------


@FRONTS
@WHERE
@pytest.mark.parametrize("alike", [True, False])
@on_ranks("size")
def test_modules_replicated_in_another_order(front: str, transport: str, alike: bool, size: int) -> None:
    """The first replica of one rank is the second one of another, and nothing in their shapes tells."""
    rank = dist.get_rank()
    if transport == "hierarchical":
        be_on_host(0 if rank < 2 else 1)
    torch.manual_seed(0 if alike else rank)
    modules = [Layers(), Layers()]
    with refused(GradsyncError):
        order = (1, 0) if rank == 1 else (0, 1)
        made = {number: make(front, modules[number], transport=transport) for number in order}
        for step in range(4):
            for module in modules:
                module.zero_grad()
            made[1](made[0](batch(rank, step))).square().mean().backward()


# --- whatever ranks may do -------------------------------------------------------------------------------

Schedule = list[str]
ACTIONS = ["train", "train", "train", "raise 0", "raise 1", "raise 3", "look", "accumulate", "skip"]
schedules = st.lists(st.sampled_from(ACTIONS), min_size=6, max_size=6)


def act(training: Training, step: int, action: str) -> None:
    if action.startswith("raise"):
        with pytest.raises(ZeroDivisionError):
            training.backward(step, int(action[-1]))
    elif action == "accumulate":
        with training.replica.no_sync():
            training.backward(step)
        return
    else:
        if action == "look":
            training.backward(step)
            training.optimizer.zero_grad()
        if action == "skip":
            training.replica.skip_round()
        else:
            training.backward(step)
        training.optimizer.step()
    training.optimizer.zero_grad()


def follow(front: str, transport: str, both: tuple[Schedule, Schedule]) -> str:
    group = short_group(8)
    training = Training(front, transport, process_group=group)
    training.step_together(99)  # a plan, so that buckets leave early
    for step, action in enumerate(both[training.rank]):
        act(training, step, action)
    return gradsync.fingerprint(training.module)


def waited_in_vain(outcome: Outcome) -> bool:
    return outcome.lost_peer or isinstance(outcome.exception, IN_VAIN)


def check_ends(outcomes: list[Outcome]) -> None:
    """Not silent, nobody killed or stuck; a rank may also wait in vain for one that has no more rounds to make."""
    for outcome in outcomes:
        assert outcome.end in (End.RETURNED, End.RAISED), outcome
    if any(outcome.returned for outcome in outcomes):
        raised = [outcome for outcome in outcomes if not outcome.returned]
        assert all(waited_in_vain(outcome) for outcome in raised), raised
        if not raised:
            check_not_silent(outcomes)
    else:
        for outcome in outcomes:
            assert isinstance(outcome.exception, GradsyncError) or waited_in_vain(outcome), outcome


_settings = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # the first failure is told as it is: to look for smaller ones takes minutes
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@_settings
@given(front=st.sampled_from(["replicate", "DistributedDataParallel"]), first=schedules, second=schedules)
def test_any_two_schedules(ranks: Ranks, front: str, first: Schedule, second: Schedule) -> None:
    for transport in ("shared_memory", "process_group"):
        check_ends(ranks.outcomes(follow, 2, front, transport, (first, second)))


@_settings
@given(front=st.sampled_from(["replicate", "DistributedDataParallel"]), schedule=schedules)
def test_any_schedule_that_all_follow(ranks: Ranks, front: str, schedule: Schedule) -> None:
    for transport in ("shared_memory", "process_group"):
        first, second = ranks(follow, 2, front, transport, (schedule, schedule))
        assert first == second
