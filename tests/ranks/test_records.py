"""What the engine tells of a round: its phases, and each bucket's way, on every transport."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.events import BACKWARD, FORWARD, OPTIMIZER, RoundClosed, Span
from tests.ranks.memory import be_on_host
from tests.ranks.small import FRONTS, make
from tests.support.ranks import on_ranks

PAUSE = 0.02
WIDTH, LAYERS = 64, 5
BYTES = 4 * (WIDTH * WIDTH + WIDTH)  # of a layer, which has a bucket of its own


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


@FRONTS
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical"])
@on_ranks(2)
def test_a_round_tells_all_of_its_phases_in_their_order(front: str, transport: str) -> None:
    if transport == "hierarchical":
        be_on_host(0)
    layers = (Slow(WIDTH, WIDTH) for _ in range(LAYERS))
    model = make(front, nn.Sequential(*layers), transport=transport, bucket_cap_mb=BYTES / 2**20)
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    events: list[RoundClosed] = []
    spans: list[Span] = []
    model._engine.add_recorder(events.append)
    model._engine.stopwatch.listen(spans.append)
    for _ in range(3):
        with model._engine.no_sync():
            model(torch.ones(2, WIDTH)).sum().backward()
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert [span.phase for span in spans] == 3 * [FORWARD, BACKWARD, FORWARD, OPTIMIZER]
    # A backward is noticed when it has passed the output, whose own hook comes before ours.
    assert all(span.ended_at - span.began_at >= 0.75 * PAUSE for span in spans)
    assert all(one.ended_at <= after.began_at for one, after in itertools.pairwise(spans))
    assert events[0].before.forward >= 2 * PAUSE
    assert events[0].before.optimizer == 0  # which came after it
    for event in events[1:]:
        assert event.before.forward >= 2 * PAUSE
        assert min(event.before.backward, event.before.optimizer) >= 0.75 * PAUSE
        assert event.forward_at + PAUSE <= event.opened_at
        assert event.opened_at <= event.first_launch_at <= event.backward_ended_at <= event.closed_at
        assert [bucket.number for bucket in event.buckets] == list(range(LAYERS))
        for bucket in event.buckets:
            assert event.opened_at <= bucket.ready_at <= bucket.launched_at <= bucket.reduced_at <= bucket.delivered_at
            assert bucket.delivered_at <= event.closed_at
            assert bucket.awaited_at == 0 or bucket.launched_at <= bucket.awaited_at <= bucket.reduced_at
            # Half of it is read by the other rank, and the sum of the other half goes back; and the tail.
            assert BYTES <= bucket.traffic.sent <= BYTES + 1024
        assert event.buckets[0].launched_at + PAUSE / 2 < event.buckets[-1].launched_at
        assert event.waited == pytest.approx(
            sum(one.reduced_at - one.awaited_at for one in event.buckets if one.awaited_at)
        )
    # All but the last ones were seen to be back before backward ended, unless the machine is busy.
    assert any(event.buckets[0].reduced_at < event.backward_ended_at for event in events[1:])
    model._engine.stopwatch.unlisten(spans.append)


@on_ranks(4)
def test_only_what_crosses_between_hosts_is_counted_as_crossing() -> None:
    be_on_host(dist.get_rank() // 2)
    model = make("replicate", nn.Linear(WIDTH, WIDTH), transport="hierarchical")
    events: list[RoundClosed] = []
    model._engine.add_recorder(events.append)
    model(torch.ones(2, WIDTH)).sum().backward()
    sent, crossed = map(sum, zip(*(bucket.traffic for bucket in events[0].buckets), strict=True))
    assert BYTES / 2 <= crossed <= BYTES / 2 + 1024  # its share, there and back
    assert BYTES <= sent - crossed <= BYTES + 1024
