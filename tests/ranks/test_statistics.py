"""Statistics of real rounds: phases, names, unused parameters, memory, on every transport and in odd programs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

import gradsync
from gradsync.observe.round_statistics import RoundStatistics
from tests.ranks.memory import be_on_host
from tests.ranks.small import FRONTS, backward, build, make
from tests.support.ranks import on_ranks

PAUSE = 0.02
WIDTH, LAYERS = 64, 4
BYTES = 4 * (WIDTH * WIDTH + WIDTH)  # of a layer, which has a bucket of its own
ONE_LAYER = BYTES / 2**20


class Slow(nn.Linear):
    """Takes a while, forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(PAUSE / LAYERS)
        y = super().forward(x)
        y.register_hook(lambda _: time.sleep(PAUSE / LAYERS))
        return y


class SlowSGD(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        time.sleep(PAUSE)
        super().step()


def latest(model: Any) -> RoundStatistics:
    found = gradsync.statistics(model).latest
    assert found is not None
    return found


def adds_up(costs: Any) -> None:
    parts = costs.forward + costs.backward + costs.exposed + costs.finishing + costs.optimizer + costs.outside
    assert costs.seconds == pytest.approx(parts)
    assert 0 <= costs.exposed <= costs.communication
    assert 0 <= costs.waited <= costs.communication + 1e-9
    assert 0 <= costs.overlap <= 1


@FRONTS
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical"])
@on_ranks(2)
def test_the_phases_of_a_step_add_up(front: str, transport: str) -> None:
    if transport == "hierarchical":
        be_on_host(0)
    model = make(front, nn.Sequential(*(Slow(WIDTH, WIDTH) for _ in range(LAYERS))), bucket_cap_mb=ONE_LAYER)
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    statistics = gradsync.statistics(model)
    began = time.perf_counter()
    for _ in range(4):
        time.sleep(PAUSE)
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    took = time.perf_counter() - began

    for costs in (statistics.total, statistics.total.mean(), statistics.latest_costs):
        adds_up(costs)
    found = latest(model)
    assert min(found.forward, found.optimizer, found.outside) >= PAUSE
    assert found.backward >= 0.75 * PAUSE  # it is noticed when it has passed the output, whose own hook comes first
    # Without the first pause, and the last step: nothing is left out, and nothing counted twice.
    assert 4 * 4 * 0.75 * PAUSE - 2 * PAUSE <= statistics.total.seconds <= took
    assert statistics.total.rounds == statistics.rounds == 4
    assert statistics.total.waited == pytest.approx(statistics.waited_seconds)

    assert found.overlapped_buckets == LAYERS - 1
    assert found.communication > found.exposed  # what is under way while backward computes, is not exposed
    assert LAYERS * BYTES <= found.sent <= LAYERS * (BYTES + 1024)
    assert found.bandwidth == pytest.approx(found.sent / found.communication)
    names = [f"{layer}.{kind}" for layer in reversed(range(LAYERS)) for kind in ("bias", "weight")]
    prefix = "module." if front == "DistributedDataParallel" else ""
    told = [name.removeprefix(prefix) for one in found.buckets for name in one.parameters]
    assert sorted(told) == sorted(names)
    assert [one.nbytes for one in found.buckets] == LAYERS * [BYTES]
    for one in found.buckets:
        assert 0 <= one.ready <= one.start <= one.end
        assert 0 <= one.waited <= one.end - one.start
    assert found.buckets[-2].start < found.backward_ended < found.buckets[-1].end
    assert found.unused == ()
    assert "round 3" in str(statistics)


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@on_ranks(2)
def test_where_the_buckets_are(transport: str) -> None:
    model = make("replicate", build(), transport=transport)
    twin = make("DistributedDataParallel", build(), transport=transport, gradient_as_bucket_view=False)
    statistics = gradsync.statistics(model)
    assert statistics.memory.buckets == 0  # before the first round
    for one in (model, twin):
        backward(one)
    gradients = 4 * sum(parameter.numel() for parameter in model.parameters())
    memory = statistics.memory
    assert gradients < memory.buckets < 4 * gradients
    assert memory.shared == (memory.buckets if transport == "shared_memory" else 0)
    assert memory.gradients_in_buckets
    assert not gradsync.statistics(twin).memory.gradients_in_buckets
    assert memory.process_peak > 2**20


@on_ranks(2)
def test_a_rank_that_is_late_is_waited_for_by_the_other() -> None:
    model, late = make("replicate", nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))), 0.3
    statistics = gradsync.statistics(model)
    for _ in range(3):
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(late)
        model(torch.ones(2, WIDTH)).sum().backward()
        model.zero_grad()
    if dist.get_rank() == 0:
        assert statistics.total.waited >= late  # three times as much, but for a machine that is busy
        assert latest(model).exposed >= latest(model).waited - 1e-9


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.table = nn.Embedding(8, WIDTH, sparse=True)

    def forward(self, x: Tensor, branches: list[int], looks_up: bool = False) -> Tensor:
        for branch in branches:
            x = self.used[branch](x)
        out: Tensor = x + self.table(torch.tensor([1, 3])) if looks_up else x
        return out


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@on_ranks(2)
def test_unused_parameters_are_named_by_each_rank(transport: str) -> None:
    model: Any = make("replicate", Branches(), transport=transport, bucket_cap_mb=ONE_LAYER)
    mine = [0, 1] if dist.get_rank() == 0 else [0, 2]
    other = {0: ("used.2.weight", "used.2.bias"), 1: ("used.1.weight", "used.1.bias")}[dist.get_rank()]
    for looks_up in (False, True, False):
        model(torch.ones(2, WIDTH), mine, looks_up).sum().backward()
        model.zero_grad()
        assert latest(model).unused == (*other, *(() if looks_up else ("table.weight",)))
    assert "sparse" in str(gradsync.statistics(model))
    # What came in an earlier backward, and was not synchronized, is used; so is what is there without a backward.
    with model.no_sync():
        model(torch.ones(2, WIDTH), [0, 1, 2], True).sum().backward()
    model(torch.ones(2, WIDTH), [0]).sum().backward()
    assert latest(model).unused == ()
    model.zero_grad()
    with model.no_sync():
        model(torch.ones(2, WIDTH), mine).sum().backward()
    model.synchronize_gradients()
    assert latest(model).unused == (*other, "table.weight")
    model.zero_grad()
    if dist.get_rank() == 0:
        model(torch.ones(2, WIDTH), [0, 1, 2]).sum().backward()
    else:
        model.skip_round()
    assert len(latest(model).unused) == (1 if dist.get_rank() == 0 else 7)
    assert latest(model).communication > 0


@on_ranks(2)
def test_idle_buckets_are_left_out_of_the_table() -> None:
    model: Any = make("replicate", Branches(), bucket_cap_mb=ONE_LAYER, skip_all_reduce_unused_params=True)
    for branches in ([0, 1, 2], [0, 1], [0, 1]):
        model(torch.ones(2, WIDTH), branches).sum().backward()
        model.zero_grad()
    found = latest(model)
    assert (len(found.buckets), found.idle_buckets) == (2, 1)
    assert found.unused[:2] == ("used.2.weight", "used.2.bias")
    assert all("used.2" not in name for one in found.buckets for name in one.parameters)
    adds_up(found)
    model(torch.ones(2, WIDTH), [2, 1, 0]).sum().backward()  # one that was left out turns out to be used
    found = latest(model)
    assert (len(found.buckets), found.idle_buckets) == (3, 0)
    assert found.unused == ("table.weight",)
    adds_up(found)


@FRONTS
@on_ranks(1)
def test_alone_nothing_travels(front: str) -> None:
    model = make(front, build())
    assert gradsync.statistics(model).latest is None
    for step in range(2):
        backward(model, step)
    found = latest(model)
    assert (found.sent, found.crossed, found.bandwidth) == (0, 0, None)
    assert "rank 0 of 1: 2 rounds" in str(gradsync.statistics(model))
    adds_up(found)


def halves(state: object, bucket: Any) -> Future[Tensor]:
    def mean(future: Future[list[Tensor]]) -> Tensor:
        return future.value()[0] / 2

    future: Any = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(mean)


@FRONTS
@on_ranks(2)
def test_what_a_hook_sends_is_said_to_be_unknown(front: str) -> None:
    model = make(front, build())
    backward(model)
    assert latest(model).bandwidth is not None
    model.register_comm_hook(None, halves)
    assert latest(model).bandwidth is not None  # of a round before it
    backward(model, 1)
    found = latest(model)
    assert (found.is_counted, found.bandwidth) == (False, None)
    assert "only it knows" in str(gradsync.statistics(model))
    adds_up(found)


@on_ranks(2)
def test_an_optimizer_in_backward_is_part_of_it() -> None:
    model = make("replicate", build())
    gradsync.overlap_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        backward(model, step)
    found = latest(model)
    assert found.optimizer == 0
    assert gradsync.statistics(model).optimizer_in_backward
    assert "steps in backward" in str(gradsync.statistics(model))
    adds_up(found)


@on_ranks(2)
def test_other_parameters_and_other_groups_have_another_layout() -> None:
    model: Any = make("replicate", build())
    backward(model)
    model[0].requires_grad_(False)
    backward(model, 1)
    told = {name for one in latest(model).buckets for name in one.parameters}
    assert told == {"2.weight", "2.bias", "4.weight", "4.bias"}
    model.change_process_group(dist.new_group([0, 1], backend="gloo"))
    backward(model, 2)
    statistics = gradsync.statistics(model)
    assert (statistics.rounds, statistics.total.rounds, latest(model).number) == (3, 3, 0)
    adds_up(statistics.total)


@on_ranks(2)
def test_two_replicas_in_one_backward_have_statistics_each() -> None:
    first, second = (make("replicate", nn.Sequential(Slow(WIDTH, WIDTH), Slow(WIDTH, WIDTH))) for _ in range(2))
    for _ in range(3):
        second(first(torch.ones(2, WIDTH))).sum().backward()
    for model in (first, second):
        found = latest(model)
        adds_up(found)
        assert found.number == 2
    # Backward has ended for both before one of them waits.
    events = [gradsync.statistics(model)._event for model in (first, second)]
    ends = [event.backward_ended_at for event in events if event is not None]
    launches = [event.buckets[-1].launched_at for event in events if event is not None]
    assert max(ends) <= min(launches)
