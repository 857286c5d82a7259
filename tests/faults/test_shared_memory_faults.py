"""Ranks that die, stop, dawdle or run out of something while they share memory."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.errors import ReplicaLostError, RoundTimeoutError, SharedMemoryError
from gradsync.transport import SymmetricMemory, handshake, progress_engine
from gradsync.transport.slot_reads import SlotReads
from gradsync.transport.slot_sums import SlotSums
from tests.ranks.memory import descriptors, links, mapped, train, transport_of
from tests.ranks.small import assert_gradients, backward, build, make, mean_gradients, same_everywhere
from tests.support.children import FORKS_BESIDE_THREADS
from tests.support.outcome import End
from tests.support.patience import crowding, wait_until
from tests.support.ranks import Ranks, on_ranks

pytestmark = FORKS_BESIDE_THREADS
SOON = 5.0  # seconds: what takes milliseconds, on a machine with much else to do


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(*_: object) -> None:
    os._exit(0)


def raise_something(*_: object) -> None:
    raise ZeroDivisionError("on purpose")


# --- ranks that end ----------------------------------------------------------------------------------------


def in_the_middle_of_a_reduction(end: Callable[..., None], replica: nn.Module) -> None:
    """All slots are filled, and this rank's share is not added up."""
    SlotSums.add_up = end  # type: ignore[method-assign]


def in_backward(end: Callable[..., None], replica: nn.Module) -> None:
    list(replica.parameters())[2].register_hook(end)


def between_rounds(end: Callable[..., None], replica: nn.Module) -> None:
    end()


def before_the_copies(end: Callable[..., None], replica: nn.Module) -> None:
    """The reduction is over; buffers are taken over from a rank that ends."""
    SlotReads.reading = end  # type: ignore[method-assign, assignment]


def lost(when: Callable[..., None], end: Callable[..., None], doomed: int) -> None:
    module = nn.Sequential(build(), nn.BatchNorm1d(2))
    replica = make("replicate", module)
    assert transport_of(replica).name == "shared_memory"
    for step in range(6):
        if step == 3 and dist.get_rank() == doomed:
            when(end, replica)
        backward(replica, step)
        replica.zero_grad()


@pytest.mark.parametrize("doomed", [0, 1])
@pytest.mark.parametrize("when", [in_the_middle_of_a_reduction, in_backward, between_rounds, before_the_copies])
def test_a_killed_rank_is_named_at_once(ranks: Ranks, when: Callable[..., None], doomed: int) -> None:
    outcomes = ranks.outcomes(lost, 3, when, die, doomed)
    assert outcomes[doomed].end is End.KILLED
    for outcome in outcomes:
        if outcome.rank != doomed:
            assert isinstance(outcome.exception, ReplicaLostError), outcome
            assert doomed in outcome.exception.ranks, outcome
            assert f"rank {doomed}" in str(outcome.exception)
            took = outcome.when - outcomes[doomed].when
            print(f"rank {outcome.rank} knew after {took * 1000:.0f} ms")  # noqa: T201
            assert took < SOON * crowding()


def lost_while_another_is_slow() -> None:
    replica = make("replicate", build())
    for step in range(4):
        if step == 3 and dist.get_rank() == 2:
            time.sleep(3)
        if step == 3 and dist.get_rank() == 1:
            progress_engine.begin = die  # type: ignore[assignment]  # the slot is filled, and that is the last of it
        backward(replica, step)


def test_a_lost_rank_is_named_while_another_is_slow(ranks: Ranks) -> None:
    waiting, _, slow = ranks.outcomes(lost_while_another_is_slow, 3)
    for outcome in (waiting, slow):
        assert isinstance(outcome.exception, ReplicaLostError), outcome
        assert outcome.exception.ranks[0] in (0, 1)
    assert waiting.exception.ranks == [1]  # type: ignore[union-attr]
    assert waiting.when < slow.when  # which slept for three seconds: nobody waited for it


@pytest.mark.parametrize("end", [leave, raise_something])
def test_a_rank_that_leaves_is_named(ranks: Ranks, end: Callable[..., None]) -> None:
    outcomes = ranks.outcomes(lost, 2, in_backward, end, 1)
    assert isinstance(outcomes[0].exception, ReplicaLostError), outcomes[0]
    assert outcomes[0].exception.ranks == [1]
    assert outcomes[0].when - outcomes[1].when < SOON * crowding()


# --- nothing is left ---------------------------------------------------------------------------------------

BIG = 300 * 2**20


def with_much_memory(end: Callable[[], None]) -> None:
    listener = handshake.Listener
    handshake.Listener = _telling  # type: ignore[misc, assignment]
    tensor = SymmetricMemory().allocate(BIG // 2, torch.uint8)
    handshake.Listener = listener  # type: ignore[misc]
    tensor.mine[::4096] = 1
    replica = make("replicate", build())
    train(replica, steps=2)
    dist.barrier()
    end()


_listener = handshake.Listener


def _telling() -> handshake.Listener:
    made = _listener()
    print(made.name, flush=True)  # noqa: T201
    return made


def in_shared_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))


@contextmanager
def nothing_left() -> Iterator[list[str]]:
    """In the list go outputs of ranks, which told the names under which they met."""
    files, before, told = set(Path("/dev/shm").iterdir()), in_shared_memory(), list[str]()
    yield told
    names = {word for output in told for word in output.split() if word.startswith("gradsync-")}
    assert len(names) == 2
    assert not [name for name in names if name in Path("/proc/net/unix").read_text()]
    assert not [file for file in set(Path("/dev/shm").iterdir()) - files if "gradsync" in file.name]
    assert wait_until(lambda: in_shared_memory() - before <= BIG / 2, SOON)


@pytest.mark.parametrize("end", [die, leave, raise_something, dist.barrier])
def test_nothing_is_left_when_all_ranks_have_ended(ranks: Ranks, end: Callable[..., None]) -> None:
    with nothing_left() as told:
        told += [outcome.output for outcome in ranks.outcomes(with_much_memory, 2, end)]


def caught(transport: str, doomed: int) -> tuple[int, int, int]:
    """The others catch the error, and have nothing of the round that was lost: the sums under way least of all."""
    lose(transport, doomed)
    dist.destroy_process_group()
    wait_until(lambda: not mapped() + descriptors() + links(), 2)
    return mapped(), descriptors(), links()


def lose(transport: str, doomed: int) -> None:
    """In a function of its own, so that nothing outlives it."""
    module: Any = make("replicate", build(), transport=transport, bucket_cap_mb=1e-6)
    backward(module)
    if dist.get_rank() == doomed:
        die()
    with pytest.raises(ReplicaLostError):
        backward(module)


@pytest.mark.parametrize("transport", ["shared_memory", "hierarchical"])
def test_nothing_is_left_of_a_replica_that_was_lost(ranks: Ranks, transport: str) -> None:
    survivors = ranks.outcomes(caught, 3, transport, 1)[::2]
    assert [one.result for one in survivors] == [(0, 0, 0)] * 2, survivors


def test_memory_is_taken_while_ranks_live(ranks: Ranks) -> None:
    """Else the test above would show nothing."""
    before = in_shared_memory()
    assert all(taken - before > BIG * 0.7 for taken in ranks(measured, 2))


def measured() -> int:
    memory = SymmetricMemory()
    tensor = memory.allocate(BIG // 2, torch.uint8)
    memory.barrier()
    taken = in_shared_memory()
    memory.barrier()
    del tensor
    return taken


# --- too little of something -------------------------------------------------------------------------------


def no_address_space() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + 50 * 2**20, resource.RLIM_INFINITY))


def no_large_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))


def no_more_files() -> None:
    following = os.dup(0)
    os.close(following)
    resource.setrlimit(resource.RLIMIT_NOFILE, (following, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def nothing() -> None:
    return


def too_little(fault: Callable[[], None], faulty: int, numel: int) -> str:
    limits = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)}
    limits[resource.RLIMIT_NOFILE] = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = SymmetricMemory()
    memory.allocate(10)
    before = mapped(), descriptors()
    if dist.get_rank() == faulty:
        fault()
    dist.barrier()  # a rank ahead of the others would send its descriptor before the fault
    with pytest.raises(SharedMemoryError) as caught:
        memory.allocate(numel, torch.uint8)
    for kind, limit in limits.items():
        resource.setrlimit(kind, limit)
    assert (mapped(), descriptors()) == before
    dist.barrier()  # what comes next brings a descriptor
    tensor = memory.allocate(10)  # and it goes on
    tensor.mine.fill_(1)
    tensor.reduce().wait()
    assert tensor.mine.eq(2).all()
    return str(caught.value)


@pytest.mark.parametrize(
    ("fault", "faulty", "text"),
    [
        (no_address_space, 0, "rank 0: Cannot allocate memory"),
        (no_address_space, 1, "rank 1: Cannot allocate memory"),
        (no_large_files, 0, "rank 0: File too large"),
        (no_more_files, 0, r"rank 0: too many open files \(ulimit -n\)"),
        (no_more_files, 1, r"rank 1 was sent no descriptor, or has too many open files \(ulimit -n\)"),
    ],
)
def test_too_little_of_something_on_one_rank(ranks: Ranks, fault: Callable[[], None], faulty: int, text: str) -> None:
    numel = 128 * 2**20
    for rank, message in enumerate(ranks(too_little, 2, fault, faulty, numel)):
        assert message.startswith(f"rank {rank}: 2 ranks asked for {numel:,} bytes of shared memory each")
        assert re.search(text, message), message


def test_more_memory_than_there_is(ranks: Ranks) -> None:
    for message in ranks(too_little, 2, nothing, 0, 2**44):
        assert f"{2**44:,} bytes" in message
        assert "rank 0: only " in message
        assert "transport='process_group'" in message


@on_ranks(2)
def test_training_goes_on_without_shared_memory() -> None:
    """The first round asks for the memory. After the error on all ranks another transport does."""
    big = nn.Linear(2000, 4000, bias=False)  # 32 MB
    replica = gradsync.replicate(big)
    x = torch.randn(1, 2000)
    if dist.get_rank() == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + 40 * 2**20, resource.RLIM_INFINITY))
    with pytest.raises(SharedMemoryError, match=r"rank 1: Cannot allocate memory.*process_group"):
        replica(x).sum().backward()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    gradsync.unreplicate(replica)
    big.zero_grad()
    again = gradsync.replicate(big, transport="process_group")
    again(x).sum().backward()
    same_everywhere(big)


def in_a_container() -> None:
    """With /dev/shm as small as Docker makes it, for this process alone."""
    if ctypes.CDLL(None).unshare(0x00020000) != 0:  # CLONE_NEWNS
        raise SystemExit(NOT_ALLOWED)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"], check=True)
    assert shutil.disk_usage("/dev/shm").total == 64 * 2**20
    dist.init_process_group("gloo")
    tensor = SymmetricMemory().allocate(100 * 2**20, torch.uint8)
    tensor.mine[::4096] = 1
    train(make("replicate", build()))
    assert not list(Path("/dev/shm").iterdir())


NOT_ALLOWED = 77


def test_a_small_dev_shm_does_not_matter(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(in_a_container, 2, backend=None)
    if {outcome.exit_code for outcome in outcomes} == {NOT_ALLOWED}:
        pytest.skip("this user may not make a mount namespace")
    assert all(outcome.returned for outcome in outcomes), "\n".join(map(str, outcomes))


# --- slow ranks --------------------------------------------------------------------------------------------


def stop_for(seconds: float) -> None:
    """A child stops this rank, and lets it go on."""
    rank = os.getpid()
    if os.fork() == 0:
        time.sleep(0.05)
        os.kill(rank, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(rank, signal.SIGCONT)
        os._exit(0)


def stopped(seconds: float) -> float:
    """Rounds until one of them took as long as the stop; each is looked at."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=seconds + SOON))
    replica = make("replicate", build(), process_group=group)
    if rank == 1:
        stop_for(seconds)
    longest, step, latest = 0.0, 0, time.monotonic()
    while longest < seconds / 2:
        replica.zero_grad()
        wanted = mean_gradients(replica, step)
        backward(replica, step)
        assert_gradients(replica, wanted)
        before, latest = latest, time.monotonic()
        found: list[Any] = [None] * 2
        dist.all_gather_object(found, latest - before, group=group)
        longest, step = max(found), step + 1
    if rank == 1:
        os.wait()
    train(replica)
    same_everywhere(replica)
    return longest


def test_a_rank_that_was_stopped_goes_on(ranks: Ranks) -> None:
    seconds = float(os.environ.get("GRADSYNC_TEST_STOP", "2"))  # 30, by hand
    assert min(ranks(stopped, 2, seconds, limit=seconds + 30)) > seconds / 2


def late() -> None:
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=1))
    replica = make("replicate", build(), process_group=group)
    for step in range(4):
        if step == 2 and dist.get_rank() == 1:
            time.sleep(2)
        backward(replica, step)
        replica.zero_grad()


def test_a_rank_that_takes_longer_than_the_limit_is_named(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(late, 3)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.exception, RoundTimeoutError), outcome
        assert outcome.exception.ranks == [1]
        text = str(outcome.exception)
        assert re.search(
            r"rank [02] has waited \d s, at the end of backward of round 2 of Sequential, waiting for bu", text
        )
        assert re.search(r"\nrank 1 has been past the end of round 1 of Sequential for \d s \(test_shared_mem", text), (
            text
        )
    assert isinstance(outcomes[1].exception, (ReplicaLostError, RoundTimeoutError)), outcomes[1]
