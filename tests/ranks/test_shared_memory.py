"""Sums, broadcasts and gathers through memory that the ranks of a host have in common."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.transport import SymmetricMemory
from gradsync.transport.process_group import ProcessGroupTransport
from tests.ranks.memory import CPU, requests, same_on_all, transport
from tests.support.ranks import Ranks, on_ranks

SIZES = pytest.mark.parametrize("size", [2, 3, 5])
# Nothing, one, less than a cache line, odd, more than one block a rank.
NUMELS = (0, 1, 7, 1001, 150_001)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


def drawn(numel: int, dtype: torch.dtype, rank: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(seed * 64 + rank))


def expected(parts: list[Tensor], scales: list[float]) -> Tensor:
    """In rank order, low precision in float32 and rounded once. For scales by which one multiplies exactly."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = torch.zeros_like(parts[0], dtype=wide)
    for part, scale in zip(parts, scales, strict=True):
        if scale:
            total += part.to(wide) * scale
    return total.to(dtype)


# --- sums --------------------------------------------------------------------------------------------------


@SIZES
@on_ranks("size")
def test_sums_are_exact(size: int) -> None:
    """All of them under way at once, and awaited in another order."""
    rank = dist.get_rank()
    scales = [2.0 ** -(r % 3) for r in range(size)]
    wanted = [(numel, dtype) for dtype in DTYPES for numel in NUMELS]
    carrier = transport()
    buffers = carrier.allocate(requests(*wanted))
    works = []
    for (numel, dtype), buffer in zip(wanted, buffers, strict=True):
        assert (buffer.numel(), buffer.dtype, buffer.device) == (numel, dtype, CPU)
        buffer.copy_(drawn(numel, dtype, rank))
        works.append(carrier.reduce(buffer, scales[rank]))
    for work in reversed(works):
        work.wait()
        assert work.done()
    for (numel, dtype), buffer in zip(wanted, buffers, strict=True):
        parts = [drawn(numel, dtype, r) for r in range(size)]
        assert torch.equal(buffer, expected(parts, scales)), (numel, dtype)
    same_on_all(*buffers)


def test_low_precision_is_not_added_up_in_low_precision() -> None:
    """Else the test above would show nothing."""
    parts = [drawn(1001, torch.bfloat16, rank) for rank in range(3)]
    assert not torch.equal(expected(parts, [1.0, 1.0, 1.0]), parts[0] + parts[1] + parts[2])


@SIZES
@on_ranks("size")
def test_sums_agree_with_the_process_group(size: int) -> None:
    """Scales that round: what the process group gives, to rounding, and the same on all ranks to the last bit."""
    rank = dist.get_rank()
    carrier, group = transport(), ProcessGroupTransport(dist.distributed_c10d._get_default_group())
    for dtype in DTYPES:
        (buffer,) = carrier.allocate(requests((5003, dtype)))
        other = buffer.copy_(drawn(5003, dtype, rank)).clone()
        scale = (rank + 1) / (size * 7)
        carrier.reduce(buffer, scale).wait()
        group.reduce(other, scale).wait()
        low = {torch.float16: 1e-2, torch.bfloat16: 1e-1}.get(dtype)
        torch.testing.assert_close(buffer, other, rtol=low or 1e-5, atol=low or 1e-6)
        same_on_all(buffer)


@SIZES
@on_ranks("size")
def test_parts_of_a_buffer(size: int) -> None:
    rank = dist.get_rank()
    carrier = transport()
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        (buffer,) = carrier.allocate(requests((3001, dtype)))
        for start, stop in [(0, 3001), (2990, 3001), (5, 6), (1, 3000), (17, 17), (33, 129)]:
            parts = [drawn(3001, dtype, r, seed=start) for r in range(size)]
            buffer.copy_(parts[rank])
            carrier.reduce(buffer[start:stop], 1.0).wait()
            total = parts[rank].clone()
            total[start:stop] = expected(parts, [1.0] * size)[start:stop]
            assert torch.equal(buffer, total), (dtype, start, stop)
            dist.barrier()  # others may still write to this slot, outside of what was asked for, if that was wrong
            assert torch.equal(buffer, total), (dtype, start, stop)


@SIZES
@on_ranks("size")
def test_two_parts_of_a_buffer_under_way(size: int) -> None:
    """With scales of their own; the second must not take the first one's for its."""
    rank = dist.get_rank()
    carrier = transport()
    (buffer,) = carrier.allocate(requests((1000, torch.float32)))
    for turn in range(50):
        buffer.fill_(rank + 1)
        if rank == turn % size:
            time.sleep(0.001)
        works = carrier.reduce(buffer[:500], 1.0), carrier.reduce(buffer[500:], 2.0)
        for work in works:
            work.wait()
        total = size * (size + 1) / 2
        assert buffer[:500].eq(total).all()
        assert buffer[500:].eq(2 * total).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@on_ranks(2)
def test_a_rank_of_no_weight_may_hold_nan(dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    carrier = transport()
    for silent in range(2):
        (buffer,) = carrier.allocate(requests((300, dtype)))
        buffer.fill_(float("nan") if rank == silent else 3)
        carrier.reduce(buffer, 0.0 if rank == silent else 0.5).wait()
        assert buffer.eq(1.5).all()


@on_ranks(2)
def test_what_is_not_in_shared_memory_is_reduced_too() -> None:
    """Integers have no sums here, and a tensor from elsewhere goes the way of the process group."""
    rank = dist.get_rank()
    carrier = transport()
    numbers, mine = carrier.allocate(requests((10, torch.int64), (10, torch.float32)))
    foreign = torch.full((10,), rank + 1.0)
    numbers.fill_(rank + 1)
    mine.fill_(rank + 1)
    for buffer in (numbers, mine, foreign):
        carrier.reduce(buffer, 1.0).wait()
        assert buffer.eq(3).all()


@on_ranks(1)
def test_one_rank_alone() -> None:
    memory = SymmetricMemory()
    tensor = memory.allocate((3, 2))
    tensor.mine.fill_(2)
    tensor.reduce(0.5).wait()
    memory.barrier()
    assert tensor.gather()[0].eq(1).all()


@on_ranks(2)
def test_another_default_device() -> None:
    """A default device is for the user's tensors, not for ours."""
    carrier = transport()
    with torch.device("meta"):
        for dtype in (torch.float32, torch.bfloat16):
            (buffer,) = carrier.allocate(requests((100, dtype)))
            buffer.fill_(1)
            carrier.reduce(buffer, 1.0).wait()
            assert buffer.tolist() == [2] * 100


# --- races -------------------------------------------------------------------------------------------------


def hunt(seed: int, steps: int) -> None:
    """Small operations without a barrier between them, ranks out of step at random, every result looked at."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alike, own = random.Random(seed), random.Random(seed * 100 + rank)
    carrier = transport()
    sizes = [1, 3, 16, 17, 100, 1000, 40_000]
    buffers = carrier.allocate(requests(*((numel, torch.float32) for numel in sizes)))
    shown, counter = torch.zeros(50), torch.zeros((), dtype=torch.int64)
    memory = SymmetricMemory().allocate(5, torch.int64)
    for step in range(steps):
        some = alike.sample(range(len(buffers)), alike.randint(1, len(buffers)))
        works = []
        for number in some:
            buffers[number].fill_(step * 7 + number + rank)
            _dawdle(own)
            works.append(carrier.reduce(buffers[number], 1.0))
        own.shuffle(order := list(zip(some, works, strict=True)))
        for number, work in order:
            work.wait()
            total = size * (step * 7 + number) + size * (size - 1) / 2
            assert buffers[number].eq(total).all(), (step, number)
        if alike.random() < 0.5:
            source = alike.randrange(size)
            shown.fill_(step if rank == source else -1)
            counter.fill_(source if rank == source else -1)
            _dawdle(own)
            carrier.broadcast([shown, counter], source)
            assert shown.eq(step).all()
            assert int(counter) == source
            shown.fill_(-2)  # of no concern to the others
        if alike.random() < 0.3:
            memory.mine.fill_(step * size + rank)
            _dawdle(own)
            assert [int(one[0]) for one in memory.gather()] == [step * size + r for r in range(size)]


def _dawdle(chance: random.Random) -> None:
    draw = chance.random()
    if draw < 0.05:
        time.sleep(chance.random() * 1e-3)
    elif draw < 0.2:
        end = time.perf_counter() + chance.random() * 50e-6
        while time.perf_counter() < end:
            pass


@pytest.mark.parametrize(("size", "steps"), [(2, 500), (3, 250), (4, 150)])
def test_no_race_is_found(ranks: Ranks, size: int, steps: int) -> None:
    ranks(hunt, size, random.SystemRandom().randrange(1000), steps, limit=60)


@on_ranks(2)
def test_waiting_in_several_threads() -> None:
    """Two threads that both wait must not both add up the same share."""
    rank = dist.get_rank()
    carrier = transport()
    buffers = carrier.allocate(requests(*[(200_000, torch.float32)] * 3))
    for turn in range(8):
        for buffer in buffers:
            buffer.fill_(rank + turn)
        works = [carrier.reduce(buffer, 1.0) for buffer in buffers]
        threads = [threading.Thread(target=work.wait) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(buffer.eq(2 * turn + 1).all() for buffer in buffers)


# --- broadcasts --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_broadcasts() -> None:
    rank = dist.get_rank()
    carrier = transport()
    for numel in (0, 3, 1000, 400_000):  # the last one is too large for the staging memory
        for source in (1, 0):
            tensors = [
                torch.full((numel, 2), rank + 1.0).t(),  # not contiguous
                torch.full((numel,), rank + 1, dtype=torch.int16),
                torch.tensor(rank == source),
                torch.full((3,), rank + 1.0, dtype=torch.complex128),
            ]
            carrier.broadcast(tensors, source)
            assert tensors[0].eq(source + 1).all()
            assert tensors[1].eq(source + 1).all()
            assert bool(tensors[2])
            assert tensors[3].eq(source + 1).all()


@SIZES
@on_ranks("size")
def test_broadcasts_one_after_the_other(size: int) -> None:
    """The source is ahead of the others, but must not overwrite what they have not read."""
    rank = dist.get_rank()
    alike, own = random.Random(1), random.Random(rank)
    carrier = transport()
    shown = torch.zeros(20_000)
    for turn in range(200):
        source = alike.randrange(size)
        shown.fill_(turn if rank == source else -1)
        if rank != source:
            _dawdle(own)
        carrier.broadcast([shown], source)
        assert shown.eq(turn).all()


@on_ranks(2)
def test_in_and_out_of_inference_mode() -> None:
    """Memory that was first looked at in evaluation can be written to in training."""
    carrier = transport()
    shown = torch.zeros(4)
    for inside in (True, False, True, False):
        shown.fill_(dist.get_rank() + 5)
        with torch.inference_mode(inside):
            carrier.broadcast([shown], 0)
        assert shown.eq(5).all()
