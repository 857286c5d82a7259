"""Shared memory inside hosts, gloo between them.

Hosts are network namespaces here, or, for many shapes at little cost, ranks that only say that they are elsewhere.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradsync
from gradsync.errors import ReplicaLostError, RoundTimeoutError
from gradsync.transport import handshake
from gradsync.transport.label import Label
from gradsync.transport.process_group import ProcessGroupTransport
from tests.ranks.cases import CASES
from tests.ranks.memory import be_on_host, requests, same_on_all, transport, transport_of
from tests.ranks.small import backward, build, make, same_everywhere
from tests.support.equality import SHARED, check_case
from tests.support.hosts import Host, hosts_or_skip
from tests.support.outcome import End
from tests.support.patience import crowding
from tests.support.ranks import Ranks

Shape = tuple[int, ...]
# Alike, uneven (through leaders), a host with one rank, one host only, ranks of hosts interleaved.
SHAPES = [(0, 0, 1, 1), (0, 1, 1, 2, 2), (0, 0, 1), (0, 1, 0, 1), (0, 0, 0), (0, 1, 1), (2, 0, 1, 0, 1, 2)]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)


def be_on(shape: Shape) -> None:
    be_on_host(shape[dist.get_rank()])


def values(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Small integers: their sums are exact in all of these types, in whatever order they are added up."""
    drawn = torch.randint(-9, 10, (numel,), generator=torch.Generator().manual_seed(numel + rank))
    return drawn.to(dtype)


# --- sums --------------------------------------------------------------------------------------------------


def sums(shape: Shape) -> None:
    be_on(shape)
    rank, size = dist.get_rank(), dist.get_world_size()
    carrier = transport("hierarchical")
    assert carrier.name == "hierarchical"
    wanted = [(numel, dtype) for dtype in DTYPES for numel in (1, 5, 63, 1000, 100_001)]
    buffers = carrier.allocate(requests(*wanted))
    for _ in range(2):
        for buffer in buffers:
            buffer.copy_(values(buffer.numel(), buffer.dtype, rank))
        works = [carrier.reduce(buffer, 2.0 if rank else 1.0) for buffer in buffers]
        for work in works:
            work.wait()
        for (numel, dtype), buffer in zip(wanted, buffers, strict=True):
            total = values(numel, dtype, 0) + 2 * sum(values(numel, dtype, r) for r in range(1, size))
            assert torch.equal(buffer, total), (numel, dtype)
    (buffer,) = carrier.allocate(requests((999, torch.float32)))
    for start, stop in [(990, 999), (3, 4), (5, 5), (17, 900)]:  # parts of a buffer
        buffer.fill_(rank + 1)
        carrier.reduce(buffer[start:stop], 1.0).wait()
        assert buffer[start:stop].eq(size * (size + 1) / 2).all()
        assert buffer[:start].eq(rank + 1).all()
        assert buffer[stop:].eq(rank + 1).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_exact(ranks: Ranks, shape: Shape) -> None:
    ranks(sums, len(shape), shape)


def beside_the_process_group(shape: Shape) -> None:
    be_on(shape)
    rank, size = dist.get_rank(), dist.get_world_size()
    carrier, group = transport("hierarchical"), ProcessGroupTransport(dist.distributed_c10d._get_default_group())
    for dtype in DTYPES:
        (buffer,) = carrier.allocate(requests((5003, dtype)))
        drawn = torch.randn(5003, dtype=dtype, generator=torch.Generator().manual_seed(rank))
        other = buffer.copy_(drawn).clone()
        carrier.reduce(buffer, (rank + 1) / (7 * size)).wait()
        group.reduce(other, (rank + 1) / (7 * size)).wait()
        low = {torch.float16: 1e-2, torch.bfloat16: 1e-1}.get(dtype)
        torch.testing.assert_close(buffer, other, rtol=low or 1e-5, atol=low or 1e-6)
        same_on_all(buffer)
    silent = carrier.allocate(requests((50, torch.float32)))[0].fill_(float("nan") if rank == 1 else 1)
    carrier.reduce(silent, 0.0 if rank == 1 else 1.0).wait()
    assert silent.eq(size - 1).all()


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_sums_agree_with_the_process_group(ranks: Ranks, shape: Shape) -> None:
    ranks(beside_the_process_group, len(shape), shape)


def out_of_step(shape: Shape, rounds: int) -> None:
    """Buckets cross in the order in which they began, whichever host is ahead."""
    import random

    be_on(shape)
    rank, size = dist.get_rank(), dist.get_world_size()
    chance = random.Random(rank)
    carrier = transport("hierarchical")
    buffers = carrier.allocate(requests(*((numel, torch.float32) for numel in (3, 40, 1000, 20_000))))
    for turn in range(rounds):
        works = []
        for number, buffer in enumerate(buffers):
            if chance.random() < 0.1:
                time.sleep(chance.random() * 2e-3)
            buffer.fill_(turn + number + rank)
            works.append(carrier.reduce(buffer, 1.0))
        chance.shuffle(order := list(enumerate(works)))
        for number, work in order:
            work.wait()
            assert buffers[number].eq(size * (turn + number) + size * (size - 1) / 2).all(), (turn, number)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_no_race_is_found(ranks: Ranks, shape: Shape) -> None:
    ranks(out_of_step, len(shape), shape, 60)


# --- low precision -----------------------------------------------------------------------------------------

LOW = (torch.float16, torch.bfloat16)
# The last of them: one host only, of which nothing crosses.
LOW_SHAPES = [(0, 0, 1, 1), (0, 0, 1, 1, 2, 2), (0, 0, 1), (0, 1, 1, 2, 2), (0, 1, 0, 1), (0, 0, 0)]


def rounded_once(terms: list[Tensor], scales: list[float]) -> Tensor:
    """The sum, as if in infinite precision."""
    total = torch.zeros(terms[0].shape, dtype=torch.float64)
    for term, scale in zip(terms, scales, strict=True):
        total += scale * term.double()
    return total.to(terms[0].dtype)


def low_precision(shape: Shape) -> None:
    """Sums of small integers and halves are exact in float32, so the result has to be exact but for one rounding."""
    be_on(shape)
    rank, size = dist.get_rank(), dist.get_world_size()
    carrier = transport("hierarchical")
    cases = [(dtype, numel) for dtype in LOW for numel in (1, 3, 200, 70_001)]
    buffers = carrier.allocate(requests(*[(numel, dtype) for dtype, numel in cases]))
    scales = [1.0, *[0.5] * (size - 1)]

    @settings(max_examples=10, deadline=None, derandomize=True, database=None)  # all ranks draw the same
    @given(seed=st.integers(0, 2**31), most=st.sampled_from([3, 255, 2047]), start=st.sampled_from([0, 1, 64]))
    def check(seed: int, most: int, start: int) -> None:
        works, wanted = [], []
        for number, buffer in enumerate(buffers):
            generator = torch.Generator().manual_seed(seed + number)
            drawn = [
                torch.randint(-most, most + 1, buffer.shape, generator=generator).to(buffer.dtype) for _ in range(size)
            ]
            first = min(start, buffer.numel() - 1)
            buffer.copy_(drawn[rank])
            works.append(carrier.reduce(buffer[first:], scales[rank]))
            wanted.append(torch.cat([drawn[rank][:first], rounded_once([one[first:] for one in drawn], scales)]))
        for work, buffer, total in zip(works, buffers, wanted, strict=True):
            work.wait()
            assert torch.equal(buffer, total), (buffer.dtype, buffer.numel())

    check()
    for buffer in buffers:  # of any values: rounded alike on all ranks
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(rank)))
        carrier.reduce(buffer, 1 / (rank + 3)).wait()
    same_on_all(*buffers)


@pytest.mark.parametrize("shape", LOW_SHAPES, ids=str)
def test_low_precision_is_rounded_once(ranks: Ranks, shape: Shape) -> None:
    ranks(low_precision, len(shape), shape)


def almost_cancelling(shape: Shape) -> None:
    """What is lost, or too large, in the precision of the buffer on the way, and is neither in the end."""
    be_on(shape)
    rank, size = dist.get_rank(), dist.get_world_size()
    carrier, hosts = transport("hierarchical"), sorted(set(shape))
    for dtype, large in ((torch.float16, 60_000.0), (torch.bfloat16, 1024.0)):
        (buffer,) = carrier.allocate(requests((1000, dtype)))
        # All ranks of the first host bring much, and those of the last take it away again; each adds 1 of its own.
        brings = [large / shape.count(host) * ((host == hosts[0]) - (host == hosts[-1])) for host in shape]
        terms = [torch.full((1000,), value + 1).to(dtype) for value in brings]
        buffer.copy_(terms[rank])
        carrier.reduce(buffer, 1.0).wait()
        assert torch.equal(buffer, rounded_once(terms, [1.0] * size)), (dtype, buffer[0])
    # One host's sum is too large for the type, and another one takes it back.
    (buffer,) = carrier.allocate(requests((1000, torch.float16)))
    buffer.fill_(60_000 if shape[rank] == hosts[0] else -60_000)
    carrier.reduce(buffer, 1.75 / shape.count(shape[rank]) if shape[rank] in (hosts[0], hosts[-1]) else 0.0).wait()
    assert buffer.eq(0).all(), buffer[0]


@pytest.mark.parametrize("shape", LOW_SHAPES[:-1], ids=str)
def test_what_is_lost_in_low_precision_on_the_way(ranks: Ranks, shape: Shape) -> None:
    ranks(almost_cancelling, len(shape), shape)


def labelled(shape: Shape, differs: int) -> None:
    be_on(shape)
    carrier = transport("hierarchical")
    for dtype in LOW:
        buffers = carrier.allocate(requests((5, dtype), (70_001, dtype)))
        for turn in range(3):
            for buffer in buffers:
                buffer.fill_(1)
            told = Label(0b1010 ^ (turn == 1 and dist.get_rank() == differs), 0b1111)
            works = [carrier.reduce(buffer, 1.0, told) for buffer in buffers]
            for work, buffer in zip(works, buffers, strict=True):
                work.wait()
                assert work.differing() == int(turn == 1)
                assert turn == 1 or buffer.eq(len(shape)).all()
        dist.barrier()


@pytest.mark.parametrize("shape", [*LOW_SHAPES[:3], LOW_SHAPES[-1]], ids=str)
def test_labels_cross_with_low_precision(ranks: Ranks, shape: Shape) -> None:
    for differs in (0, len(shape) - 1):
        ranks(labelled, len(shape), shape, differs)


def trains_in(dtype: torch.dtype, shape: Shape) -> None:
    be_on(shape)
    model = make("replicate", build().to(dtype), transport="hierarchical")
    for step in range(3):
        generator = torch.Generator().manual_seed(step * 16 + dist.get_rank())
        model(torch.randn(3, 4, generator=generator).to(dtype)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
    same_everywhere(model)


@pytest.mark.parametrize("shape", [(0, 0, 1, 1), (0, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_training_in_low_precision(ranks: Ranks, shape: Shape, dtype: torch.dtype) -> None:
    ranks(trains_in, len(shape), dtype, shape)


# --- training ----------------------------------------------------------------------------------------------


def train(transport_name: str) -> list[str]:
    """Two replicas with batch normalization in one backward, several buckets each."""
    torch.manual_seed(0)
    modules: list[Any] = [nn.Sequential(build(), nn.BatchNorm1d(2)).double() for _ in range(2)]
    replicas = [make("replicate", module, transport=transport_name) for module in modules]
    assert all(transport_of(replica).name == transport_name for replica in replicas)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step * 16 + dist.get_rank())
        x = torch.randn(3, 4, dtype=torch.float64, generator=generator)
        (replicas[0](x) - replicas[1](x)).square().mean().backward()
        optimizer.step()
    for module in modules:
        same_everywhere(module)
    assert all(gradsync.statistics(module).overlapped_buckets > 1 for module in modules)
    return [value.numpy().tobytes().hex() for module in modules for value in module.state_dict().values()]


def both_ways(shape: Shape | None = None) -> None:
    if shape is not None:
        be_on(shape)
    decoded = [
        [torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for text in train(name)]
        for name in ("hierarchical", "process_group")
    ]
    for ours, theirs in zip(*decoded, strict=True):
        torch.testing.assert_close(ours.view(torch.float64), theirs.view(torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training_gives_what_the_process_group_gives(ranks: Ranks, shape: Shape) -> None:
    ranks(both_ways, len(shape), shape)


# --- faults ------------------------------------------------------------------------------------------------


def one_is_late(shape: Shape) -> None:
    be_on(shape)
    group = dist.new_group(list(range(len(shape))), timeout=timedelta(seconds=1))
    replica = make("replicate", build(), process_group=group, transport="hierarchical")
    for step in range(3):
        if step == 2 and dist.get_rank() == len(shape) - 1:
            time.sleep(2)
        replica(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("shape", [(0, 0, 1, 1), (0, 0, 1)], ids=str)
def test_a_late_rank_on_another_host(ranks: Ranks, shape: Shape) -> None:
    """On each host somebody is named who is not on time, or waits for such a one; nobody names itself."""
    outcomes = ranks.outcomes(one_is_late, len(shape), shape)
    for outcome in outcomes[:-1]:
        assert isinstance(outcome.exception, (RoundTimeoutError, ReplicaLostError)), outcome
        assert outcome.exception.ranks, outcome
        assert outcome.rank not in outcome.exception.ranks, outcome


# --- on real networks --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with hosts_or_skip(3) as made:
        yield made


def enter(hosts: list[Host], shape: Shape) -> None:
    hosts[shape[int(os.environ["RANK"])]].enter()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{hosts[shape[0]].address}:29500",
        rank=int(os.environ["RANK"]),
        world_size=len(shape),
        timeout=timedelta(seconds=10),
    )
    places: list[Any] = [None] * len(shape)
    dist.all_gather_object(places, handshake.location())
    assert len(set(places)) == len(set(shape))


def on_the_network(hosts: list[Host], shape: Shape) -> None:
    enter(hosts, shape)
    sums_there()
    both_ways()
    dist.barrier()


def sums_there() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    carrier = transport("auto")
    assert carrier.name == "hierarchical"
    buffers = carrier.allocate(requests(*[(200_001, torch.float32)] * 4))
    for buffer in buffers:
        buffer.copy_(values(200_001, torch.float32, rank))
    for work in [carrier.reduce(buffer, 1.0) for buffer in buffers]:
        work.wait()
    total = sum(values(200_001, torch.float32, r) for r in range(size))
    assert isinstance(total, Tensor)
    assert all(torch.equal(buffer, total) for buffer in buffers)


@pytest.mark.parametrize("shape", [(0, 0, 1, 1), (0, 1, 1, 2, 2), (0, 0, 0, 1, 1, 1)], ids=str)
def test_on_hosts(ranks: Ranks, hosts: list[Host], shape: Shape) -> None:
    ranks(on_the_network, len(shape), hosts, shape, backend=None)


def one_model_a_host(hosts: list[Host], shape: Shape) -> None:
    """Cases with shared parameters, after backward; and in it, to the same."""
    enter(hosts, shape)
    for name in (
        "through_forward",
        "accumulation",
        "branch_by_rank_and_step",
        "foreach_adamw",
        "batch_norm",
    ):
        check_case(CASES[name], SHARED, ["hierarchical"])
    made = []
    for in_backward in (False, True):
        model = make("replicate", build(), share_parameters=True, transport="hierarchical")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if in_backward:
            gradsync.overlap_optimizer(model, optimizer)
        else:
            gradsync.share_optimizer(optimizer)
        for step in range(4):
            backward(model, step)
            if not in_backward:
                optimizer.step()
                optimizer.zero_grad()
        same_everywhere(model)
        made.append(list(model.parameters()))
    torch.testing.assert_close(*made, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 0, 1, 1), (0, 0, 1)], ids=str)
def test_one_model_a_host(ranks: Ranks, hosts: list[Host], shape: Shape) -> None:
    ranks(one_model_a_host, len(shape), hosts, shape, backend=None)


def killed_on_a_host(hosts: list[Host], shape: Shape, doomed: int) -> None:
    enter(hosts, shape)
    replica = make("replicate", build())
    assert transport_of(replica).name == "hierarchical"
    for step in range(10):
        if step == 4 and dist.get_rank() == doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        replica(torch.ones(1, 4)).sum().backward()
        replica.zero_grad()


@pytest.mark.parametrize(("shape", "doomed"), [((0, 0, 1, 1), 3), ((0, 0, 1, 1), 2), ((0, 1, 1, 2, 2), 4)], ids=str)
def test_a_rank_killed_on_a_host(ranks: Ranks, hosts: list[Host], shape: Shape, doomed: int) -> None:
    outcomes = ranks.outcomes(killed_on_a_host, len(shape), hosts, shape, doomed, backend=None)
    killed = outcomes[doomed]
    assert killed.end is End.KILLED
    for outcome in outcomes:
        if outcome.rank != doomed:
            assert isinstance(outcome.exception, (ReplicaLostError, RoundTimeoutError)), outcome
            assert outcome.when - killed.when < 5 * crowding(), outcome
            if shape[outcome.rank] == shape[doomed]:
                assert outcome.exception.ranks == [doomed], outcome
