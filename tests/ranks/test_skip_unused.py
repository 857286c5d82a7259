"""`skip_all_reduce_unused_params=True`: buckets that no rank has filled do not travel, and all the rest is as ever."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync.errors import GradsyncError, HookError
from gradsync.events import Event
from tests.ranks.small import FRONTS, TRANSPORTS, assert_gradients, batch, gradients_of, make, same_everywhere
from tests.support.ranks import Ranks, on_ranks

PARTS = 5
WIDTH = 4
BYTES = 4 * (WIDTH * WIDTH + WIDTH)  # of one part, which has a bucket of its own


class Parts(nn.Module):
    """Of which each batch uses some. The first one comes last in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(PARTS))

    def forward(self, x: Tensor, used: set[int]) -> Tensor:
        for number in sorted(used):
            x = torch.tanh(self.parts[number](x))
        return x


def backward(module: Any, used: set[int], rank: int, step: int, scale: float = 1.0) -> None:
    (module(batch(rank, step), used).square().mean() * scale).backward()


class Training:
    """A replica, what was sent in the latest round, and the same in one process."""

    def __init__(self, front: str, skip: bool = True, **options: Any) -> None:
        self.module, self.alone = Parts(), Parts()
        self.replica = make(
            front, self.module, bucket_cap_mb=BYTES / 2**20, skip_all_reduce_unused_params=skip, **options
        )
        self.sent: list[int] = []
        self.replica._engine.add_recorder(self._record)

    def _record(self, event: Event) -> None:
        self.sent += [bucket.number for bucket in event.buckets]

    def round(self, step: int, used: list[set[int]]) -> list[int]:
        """One step with these parts on each rank; tells which buckets have travelled."""
        self.sent.clear()
        before = gradsync.statistics(self.replica).bytes_reduced
        self.module.zero_grad()
        backward(self.replica, used[dist.get_rank()], dist.get_rank(), step)
        assert gradsync.statistics(self.replica).bytes_reduced - before == BYTES * len(self.sent)
        assert gradsync.statistics(self.replica).buckets == len(self.sent)
        self.check(step, used)
        return list(self.sent)

    def check(self, step: int, used: list[set[int]]) -> None:
        self.alone.zero_grad()
        for rank, parts in enumerate(used):
            if parts:
                backward(self.alone, parts, rank, step, 1 / len(used))
        for (name, found), wanted in zip(self.module.named_parameters(), self.alone.named_parameters(), strict=True):
            expected = wanted[1].grad
            assert (found.grad is None) is (expected is None), f"{name}, step {step}"
            if expected is not None:
                torch.testing.assert_close(found.grad, expected, rtol=1e-5, atol=1e-7)
        for one in (self.module, self.alone):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
        same_everywhere(self.module)


# --- what travels ----------------------------------------------------------------------------------------


def never_used(front: str, transport: str, skip: bool) -> list[list[int]]:
    training = Training(front, skip, transport=transport)
    return [training.round(step, [{0, 1}, {0, 1}]) for step in range(4)]


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("skip", [True, False])
def test_what_nobody_uses_does_not_travel(ranks: Ranks, front: str, transport: str, skip: bool) -> None:
    """The first two buckets have the two used parts; the last one always speaks for the whole round."""
    every = list(range(PARTS))
    for sent in ranks(never_used, 2, front, transport, skip):
        assert sent == [every] + [[0, 1, PARTS - 1] if skip else every] * 3


def used_again(front: str, transport: str) -> list[list[int]]:
    training = Training(front, transport=transport)
    return [
        training.round(0, [set(range(PARTS))] * 2),
        training.round(1, [{0, 1}, {0, 1}]),  # it is not known yet that the others are unused
        training.round(2, [{0, 1}, {0, 1}]),
        training.round(3, [{0, 1}, {0, 1, 3}]),  # by one rank: behind the others
        training.round(4, [{0, 1, 3}, {0, 1}]),  # in its turn
        training.round(5, [{1}, {0}]),
    ]


@FRONTS
@TRANSPORTS
def test_what_is_used_again_travels_again(ranks: Ranks, front: str, transport: str) -> None:
    """Part n is in bucket PARTS - 1 - n: backward comes to the last one first."""
    for sent in ranks(used_again, 2, front, transport):
        assert sent == [
            [0, 1, 2, 3, 4],
            [0, 1, 2, 3, 4],
            [3, 4],
            [3, 4, 1],
            [1, 3, 4],
            [1, 3, 4],
        ]


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_every_pattern_of_use(front: str, transport: str) -> None:
    """Which rank uses what changes with each step, in all ways that two parts and two ranks have."""
    training = Training(front, transport=transport)
    some = [set(parts) for parts in ({1}, {3}, {1, 3}, {0})]
    for step, (first, second) in enumerate(itertools.product(some, repeat=2)):
        training.round(step, [first | {2}, second])


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_parts_used_without_synchronization(front: str, transport: str) -> None:
    """A part that was used only while nothing was synchronized travels with the next round."""
    training = Training(front, transport=transport)
    for step in range(3):
        training.round(step, [{0}, {0}])
    training.module.zero_grad()
    with training.replica.no_sync():
        backward(training.replica, {0, 2} if dist.get_rank() else {0}, dist.get_rank(), 50)
    backward(training.replica, {0}, dist.get_rank(), 51)
    training.alone.zero_grad()
    for rank, used in enumerate(({0}, {0, 2})):
        backward(training.alone, used, rank, 50, 0.5)
        backward(training.alone, {0}, rank, 51, 0.5)
    assert_gradients(training.module, gradients_of(training.alone), rtol=1e-5, atol=1e-7)


@FRONTS
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@on_ranks(2)
def test_gradients_that_are_not_zeroed(front: str, reduce: str) -> None:
    """An earlier round's gradient of a part that is unused stays what it is, also where all are added up."""
    training = Training(front, reduce=reduce)
    scale = 0.5 if reduce == "mean" else 1.0
    for step in range(6):
        used = {0, 2} if step in (0, 4) else {0}
        backward(training.replica, used, dist.get_rank(), step)
        for rank in range(2):
            backward(training.alone, used, rank, step, scale)
        assert_gradients(training.module, gradients_of(training.alone), rtol=1e-5, atol=1e-6)
    same_everywhere(training.module)


@FRONTS
@on_ranks(2)
def test_ranks_of_no_weight(front: str) -> None:
    """What only ranks of no weight have used, nobody has."""
    training = Training(front)
    for step in range(3):
        training.round(step, [{0}, {0}])
    for step in (3, 4):
        training.module.zero_grad()
        if dist.get_rank():
            training.replica.set_round_weight(0)
        backward(training.replica, {0, 2} if dist.get_rank() else {0}, dist.get_rank(), step)
        training.check(step, [{0}])
    training.module.zero_grad()
    if dist.get_rank():
        training.replica.skip_round()
    else:
        backward(training.replica, {0, 3}, 0, 5)
    training.check(5, [{0, 3}])


@FRONTS
@on_ranks(2)
def test_an_optimizer_in_backward(front: str) -> None:
    module, alone = Parts(), Parts()
    replica = make(front, module, bucket_cap_mb=BYTES / 2**20, skip_all_reduce_unused_params=True)
    gradsync.overlap_optimizer(replica, torch.optim.SGD(module.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    patterns: list[list[set[int]]] = [[{0}, {0}], [{0}, {0}], [{0, 3}, {0}], [{0}, {0, 3}], [{1}, {2}]]
    for step, used in enumerate(patterns):
        module.zero_grad()
        optimizer.zero_grad()
        backward(replica, used[dist.get_rank()], dist.get_rank(), step)
        for rank, parts in enumerate(used):
            backward(alone, parts, rank, step, 0.5)
        optimizer.step()
        for found, wanted in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        same_everywhere(module)


# --- hooks -----------------------------------------------------------------------------------------------


class Mean:
    """A communication hook that notes its calls, and fails when it is told to."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.fails = False

    def __call__(self, state: object, bucket: Any) -> Any:
        self.calls.append(bucket.index())
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        fails = self.fails and bucket.is_last()

        def finish(done: Any) -> Tensor:
            total: Tensor = done.value()[0]
            return total[1:] if fails else total / dist.get_world_size()

        return future.then(finish)


def hooked(front: str, transport: str) -> list[list[int]]:
    training = Training(front, transport=transport)
    found = [training.round(step, [{0, 1}, {0, 1}]) for step in range(3)]
    hook = Mean()
    training.replica.register_comm_hook(
        None, hook
    )  # the ranks ask each other, in place of the first bucket that travels
    for step, used in enumerate([[{0, 1}, {0, 1}], [{0, 1}, {1, 3}], [{0, 3}, {1}]], 3):
        hook.calls.clear()
        assert training.round(step, used) == hook.calls
        found.append(list(hook.calls))
    return found


@FRONTS
@TRANSPORTS
def test_hooks_see_only_what_travels(ranks: Ranks, front: str, transport: str) -> None:
    for found in ranks(hooked, 2, front, transport):
        assert found == [[0, 1, 2, 3, 4], [0, 1, 4], [0, 1, 4], [0, 1, 4], [0, 1, 4, 3], [0, 1, 3, 4]]


@FRONTS
@on_ranks(2)
def test_a_hook_that_fails_on_one_rank(front: str) -> None:
    """The ranks stay in step: what the next round sends is the same everywhere."""
    training = Training(front)
    hook = Mean()
    training.replica.register_comm_hook(None, hook)
    for step in range(2):
        training.round(step, [{0}, {0}])
    training.module.zero_grad()
    hook.fails = dist.get_rank() == 1
    if hook.fails:
        with pytest.raises(HookError, match="must bring a tensor like"):
            backward(training.replica, {0, 2, 3}, 1, 2)
    else:
        backward(training.replica, {0, 1}, 0, 2)
    hook.fails = False
    for step in range(3, 5):
        training.round(step, [{0, 2}, {0}])


# --- mistakes --------------------------------------------------------------------------------------------


def set_by_one(front: str) -> str:
    with pytest.raises(GradsyncError) as caught:
        Training(front, skip=dist.get_rank() == 0)
    return str(caught.value)


@FRONTS
def test_all_ranks_set_it_alike(ranks: Ranks, front: str) -> None:
    for text in ranks(set_by_one, 2, front):
        assert "skip_all_reduce_unused_params" in text


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_a_backward_that_raises(front: str, transport: str) -> None:
    """A backward that raises on all ranks, with the first buckets unused; they stay in step."""
    training = Training(front, transport=transport)
    training.round(0, [set(range(PARTS))] * 2)
    for step in range(1, 4):
        training.round(step, [{0, 2, 3}, {0, 2, 3}])

    def fail(gradient: Tensor) -> None:
        raise ValueError("on purpose")

    handle = training.module.get_parameter("parts.0.weight").register_hook(fail)
    training.module.zero_grad()
    with pytest.raises(ValueError, match="on purpose"):
        backward(training.replica, {0, 2, 3}, dist.get_rank(), 4)
    handle.remove()
    for step in range(5, 8):
        training.round(step, [{0, 2, 3}, {0, 4}])


def out_of_step(front: str, transport: str) -> str:
    """One rank has registered a hook and asks whether the other has, which sends the first bucket that travels."""
    training = Training(front, transport=transport)
    training.round(0, [set(range(PARTS))] * 2)
    for step in range(1, 4):
        training.round(step, [{0, 2}, {0, 2}])
    torch.optim.SGD(training.module.parameters(), lr=0.1).step()
    if dist.get_rank():
        training.replica.register_comm_hook(None, Mean())
    with pytest.raises(GradsyncError) as caught:
        backward(training.replica, {0, 2}, dist.get_rank(), 4)
    return str(caught.value)


@FRONTS
@TRANSPORTS
def test_ranks_out_of_step_are_told(ranks: Ranks, front: str, transport: str) -> None:
    for text in ranks(out_of_step, 2, front, transport):
        assert "communication hook" in text
