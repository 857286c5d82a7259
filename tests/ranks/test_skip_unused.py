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
from gradsync.events import BucketLaunched, Event
from tests.ranks.small import FRONTS, TRANSPORTS, make, same_everywhere
from tests.support.ranks import Ranks

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


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(16 * step + rank))


def backward(module: Any, used: set[int], rank: int, step: int, scale: float = 1.0) -> None:
    (module(batch(rank, step), used).square().mean() * scale).backward()


class Bench:
    """A replica, what was sent in the latest round, and the same in one process."""

    def __init__(self, front: str, skip: bool = True, **options: Any) -> None:
        self.module, self.alone = Parts(), Parts()
        self.replica = make(
            front, self.module, bucket_cap_mb=BYTES / 2**20, skip_all_reduce_unused_params=skip, **options
        )
        self.sent: list[int] = []
        self.replica._engine.recorders.append(self._record)

    def _record(self, event: Event) -> None:
        if isinstance(event, BucketLaunched):
            self.sent.append(event.bucket)

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
    bench = Bench(front, skip, transport=transport)
    return [bench.round(step, [{0, 1}, {0, 1}]) for step in range(4)]


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("skip", [True, False])
def test_what_nobody_uses_does_not_travel(ranks: Ranks, front: str, transport: str, skip: bool) -> None:
    """The first two buckets have the two used parts; the last one always speaks for the whole round."""
    every = list(range(PARTS))
    for sent in ranks(never_used, 2, front, transport, skip):
        assert sent == [every] + [[0, 1, PARTS - 1] if skip else every] * 3


def used_again(front: str, transport: str) -> list[list[int]]:
    bench = Bench(front, transport=transport)
    return [
        bench.round(0, [set(range(PARTS))] * 2),
        bench.round(1, [{0, 1}, {0, 1}]),  # it is not known yet that the others are unused
        bench.round(2, [{0, 1}, {0, 1}]),
        bench.round(3, [{0, 1}, {0, 1, 3}]),  # by one rank: behind the others
        bench.round(4, [{0, 1, 3}, {0, 1}]),  # in its turn
        bench.round(5, [{1}, {0}]),
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


def every_pattern(front: str, transport: str) -> None:
    """Which rank uses what changes with each step, in all ways that two parts and two ranks have."""
    bench = Bench(front, transport=transport)
    some = [set(parts) for parts in ({1}, {3}, {1, 3}, {0})]
    for step, (first, second) in enumerate(itertools.product(some, repeat=2)):
        bench.round(step, [first | {2}, second])


@FRONTS
@TRANSPORTS
def test_every_pattern_of_use(ranks: Ranks, front: str, transport: str) -> None:
    ranks(every_pattern, 2, front, transport)


def accumulated(front: str, transport: str) -> None:
    """A part that was used only while nothing was synchronised travels with the next round."""
    bench = Bench(front, transport=transport)
    for step in range(3):
        bench.round(step, [{0}, {0}])
    bench.module.zero_grad()
    with bench.replica.no_sync():
        backward(bench.replica, {0, 2} if dist.get_rank() else {0}, dist.get_rank(), 50)
    backward(bench.replica, {0}, dist.get_rank(), 51)
    bench.alone.zero_grad()
    for rank, used in enumerate(({0}, {0, 2})):
        backward(bench.alone, used, rank, 50, 0.5)
        backward(bench.alone, {0}, rank, 51, 0.5)
    for found, wanted in zip(bench.module.parameters(), bench.alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-5, atol=1e-7)


@FRONTS
@TRANSPORTS
def test_parts_used_without_synchronisation(ranks: Ranks, front: str, transport: str) -> None:
    ranks(accumulated, 2, front, transport)


def not_zeroed(front: str, reduce: str) -> None:
    """An earlier round's gradient of a part that is unused stays what it is, also where all are added up."""
    bench = Bench(front, reduce=reduce)
    scale = 0.5 if reduce == "mean" else 1.0
    for step in range(6):
        used = {0, 2} if step in (0, 4) else {0}
        backward(bench.replica, used, dist.get_rank(), step)
        for rank in range(2):
            backward(bench.alone, used, rank, step, scale)
        for found, wanted in zip(bench.module.parameters(), bench.alone.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-5, atol=1e-6)
    same_everywhere(bench.module)


@FRONTS
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_gradients_that_are_not_zeroed(ranks: Ranks, front: str, reduce: str) -> None:
    ranks(not_zeroed, 2, front, reduce)


def weighted(front: str) -> None:
    """What only ranks of no weight have used, nobody has."""
    bench = Bench(front)
    for step in range(3):
        bench.round(step, [{0}, {0}])
    for step in (3, 4):
        bench.module.zero_grad()
        if dist.get_rank():
            bench.replica.set_round_weight(0)
        backward(bench.replica, {0, 2} if dist.get_rank() else {0}, dist.get_rank(), step)
        bench.check(step, [{0}])
    bench.module.zero_grad()
    if dist.get_rank():
        bench.replica.skip_round()
    else:
        backward(bench.replica, {0, 3}, 0, 5)
    bench.check(5, [{0, 3}])


@FRONTS
def test_ranks_of_no_weight(ranks: Ranks, front: str) -> None:
    ranks(weighted, 2, front)


def stepped_in_backward(front: str) -> None:
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


@FRONTS
def test_an_optimizer_in_backward(ranks: Ranks, front: str) -> None:
    ranks(stepped_in_backward, 2, front)


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
    bench = Bench(front, transport=transport)
    found = [bench.round(step, [{0, 1}, {0, 1}]) for step in range(3)]
    hook = Mean()
    bench.replica.register_comm_hook(None, hook)  # the ranks ask each other, in place of the first bucket that travels
    for step, used in enumerate([[{0, 1}, {0, 1}], [{0, 1}, {1, 3}], [{0, 3}, {1}]], 3):
        hook.calls.clear()
        assert bench.round(step, used) == hook.calls
        found.append(list(hook.calls))
    return found


@FRONTS
@TRANSPORTS
def test_hooks_see_only_what_travels(ranks: Ranks, front: str, transport: str) -> None:
    for found in ranks(hooked, 2, front, transport):
        assert found == [[0, 1, 2, 3, 4], [0, 1, 4], [0, 1, 4], [0, 1, 4], [0, 1, 4, 3], [0, 1, 3, 4]]


def hook_fails_on_one_rank(front: str) -> None:
    """The ranks stay in step: what the next round sends is the same everywhere."""
    bench = Bench(front)
    hook = Mean()
    bench.replica.register_comm_hook(None, hook)
    for step in range(2):
        bench.round(step, [{0}, {0}])
    bench.module.zero_grad()
    hook.fails = dist.get_rank() == 1
    if hook.fails:
        with pytest.raises(HookError, match="must bring a tensor like"):
            backward(bench.replica, {0, 2, 3}, 1, 2)
    else:
        backward(bench.replica, {0, 1}, 0, 2)
    hook.fails = False
    for step in range(3, 5):
        bench.round(step, [{0, 2}, {0}])


@FRONTS
def test_a_hook_that_fails_on_one_rank(ranks: Ranks, front: str) -> None:
    ranks(hook_fails_on_one_rank, 2, front)


# --- mistakes --------------------------------------------------------------------------------------------


def set_by_one(front: str) -> str:
    with pytest.raises(GradsyncError) as caught:
        Bench(front, skip=dist.get_rank() == 0)
    return str(caught.value)


@FRONTS
def test_all_ranks_set_it_alike(ranks: Ranks, front: str) -> None:
    for text in ranks(set_by_one, 2, front):
        assert "skip_all_reduce_unused_params" in text


def raised_in_backward(front: str, transport: str) -> None:
    """A backward that raises on all ranks, with the first buckets unused; they stay in step."""
    bench = Bench(front, transport=transport)
    bench.round(0, [set(range(PARTS))] * 2)
    for step in range(1, 4):
        bench.round(step, [{0, 2, 3}, {0, 2, 3}])

    def fail(gradient: Tensor) -> None:
        raise ValueError("on purpose")

    handle = bench.module.get_parameter("parts.0.weight").register_hook(fail)
    bench.module.zero_grad()
    with pytest.raises(ValueError, match="on purpose"):
        backward(bench.replica, {0, 2, 3}, dist.get_rank(), 4)
    handle.remove()
    for step in range(5, 8):
        bench.round(step, [{0, 2, 3}, {0, 4}])


@FRONTS
@TRANSPORTS
def test_a_backward_that_raises(ranks: Ranks, front: str, transport: str) -> None:
    ranks(raised_in_backward, 2, front, transport)


def out_of_step(front: str, transport: str) -> str:
    """One rank has registered a hook and asks whether the other has, which sends the first bucket that travels."""
    bench = Bench(front, transport=transport)
    bench.round(0, [set(range(PARTS))] * 2)
    for step in range(1, 4):
        bench.round(step, [{0, 2}, {0, 2}])
    torch.optim.SGD(bench.module.parameters(), lr=0.1).step()
    if dist.get_rank():
        bench.replica.register_comm_hook(None, Mean())
    with pytest.raises(GradsyncError) as caught:
        backward(bench.replica, {0, 2}, dist.get_rank(), 4)
    return str(caught.value)


@FRONTS
@TRANSPORTS
def test_ranks_out_of_step_are_told(ranks: Ranks, front: str, transport: str) -> None:
    for text in ranks(out_of_step, 2, front, transport):
        assert "communication hook" in text
