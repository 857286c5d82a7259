"""`gradsync.transport.SymmetricMemory`: shared memory for everybody."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.errors import InvalidOptionError, NoProcessGroupError, SharedMemoryError
from gradsync.transport import SymmetricMemory, handshake
from tests.ranks.memory import be_on_host, descriptors, links, mapped
from tests.support.ranks import Ranks, on_ranks


@on_ranks(3)
def test_every_rank_sees_all() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    memory = SymmetricMemory()
    assert (memory.rank, memory.size) == (rank, size)
    shapes: list[tuple[Any, torch.dtype]]
    shapes = [((2, 3), torch.float32), (5, torch.int64), ((), torch.bool), ((0, 4), torch.float16)]
    for shape, dtype in shapes:
        tensor = memory.allocate(shape, dtype)
        assert tensor.mine.shape == torch.Size((shape,) if isinstance(shape, int) else shape)
        assert tensor.mine.dtype is dtype
        assert not tensor.mine.any()  # zeros to begin with
        tensor.mine.fill_(rank)
        memory.barrier()
        assert all(tensor.of(other).eq(torch.tensor(other).to(dtype)).all() for other in range(size))
        memory.barrier()
        if rank == 0 and tensor.mine.numel():  # also into another rank's
            tensor.of(1).fill_(1)
        memory.barrier()
        if rank == 1:
            assert tensor.mine.eq(1).all()


@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks("size")
def test_operations(size: int) -> None:
    rank = dist.get_rank()
    memory = SymmetricMemory()
    tensor = memory.allocate((4, 2), torch.bfloat16)
    for turn in range(20):
        tensor.mine.fill_(rank + turn)
        work = tensor.reduce(scale=0.5)
        work.wait()
        assert work.done()
        assert tensor.mine.eq((size * turn + size * (size - 1) / 2) / 2).all()
        tensor.mine.fill_(rank + turn)
        assert [one.tolist() for one in tensor.gather()] == [[[float(r + turn)] * 2] * 4 for r in range(size)]
        tensor.broadcast(source=turn % size)
        assert tensor.mine.eq(turn % size + turn).all()
        tensor.reduce()  # the next sum waits for this one
        tensor.reduce().wait()
        assert tensor.mine.eq((turn % size + turn) * size * size).all()


@on_ranks(3)
def test_what_is_gathered_is_a_copy() -> None:
    """Copies: what is written later does not show."""
    tensor = SymmetricMemory().allocate(3)
    for turn in range(50):
        tensor.mine.fill_(turn)
        copies = tensor.gather()
        tensor.mine.fill_(-1)
        assert all(copy.eq(turn).all() for copy in copies)


@on_ranks(3)
def test_over_a_part_of_the_world() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    memory = SymmetricMemory(group)
    tensor = memory.allocate(2)
    tensor.mine.fill_(dist.get_rank())
    tensor.reduce().wait()
    assert tensor.mine.eq(2).all()


@on_ranks(2)
def test_memory_is_given_back() -> None:
    memory = SymmetricMemory()
    tensor = memory.allocate(1000)
    kept = tensor.mine
    del tensor
    kept.fill_(7)
    assert mapped() == 2
    again = SymmetricMemory()  # over the same connections
    assert links() == 1
    del memory, kept
    assert mapped() == 1
    del again
    assert (mapped(), descriptors(), links()) == (0, 0, 0)


# --- mistakes ----------------------------------------------------------------------------------------------


def test_without_a_process_group() -> None:
    with pytest.raises(NoProcessGroupError, match="init_process_group"):
        SymmetricMemory()


@on_ranks(2)
def test_mistakes() -> None:
    memory = SymmetricMemory()
    with pytest.raises(TypeError, match=r"not for torch\.int64"):
        memory.allocate(3, torch.int64).reduce()
    tensor = memory.allocate(3)
    for source in (-1, 2):
        with pytest.raises(InvalidOptionError, match=f"there is no rank {source}: the ranks are 0 to 1"):
            tensor.broadcast(source)
    with pytest.raises(SharedMemoryError, match=r"rank 0 asked for [\d,]+ bytes in all, but rank 1 for"):
        memory.allocate([5000, 9000][dist.get_rank()])
    tensor.mine.fill_(1)
    tensor.reduce().wait()
    assert tensor.mine.eq(2).all()


def on_two_hosts() -> None:
    be_on_host(dist.get_rank() % 2)
    SymmetricMemory()


def test_several_hosts(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(on_two_hosts, 3):
        assert isinstance(outcome.exception, SharedMemoryError), outcome
        assert re.search(r"2 hosts: \[\[0, 2\], \[1\]\]; make a group for each", str(outcome.exception))


def no_listener() -> Any:
    if dist.get_rank() == 1:
        handshake.Listener = _closed  # type: ignore[misc, assignment]
    SymmetricMemory()


def _closed() -> None:
    raise OSError(24, "Too many open files")


def test_a_rank_that_can_not(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(no_listener, 2):
        assert isinstance(outcome.exception, SharedMemoryError), outcome
        assert "rank 1: could not open a socket: Too many open files" in str(outcome.exception)
