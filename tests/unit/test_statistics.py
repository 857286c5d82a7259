"""Statistics without ranks: what follows from a round's record, and how it is shown."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from typing import Any

import pytest

from gradsync.events import BucketTimes, Layout, PhaseSeconds, PlannedBucket, RoundClosed, Traffic
from gradsync.observe import units
from gradsync.observe.costs import Costs, of_round
from gradsync.observe.statistics import Statistics

MIB = 2**20


def bucket(number: int, launched: float, reduced: float, awaited: float = 0.0, sent: int = MIB) -> BucketTimes:
    return BucketTimes(number, launched - 0.25, launched, reduced, awaited, reduced + 0.25, Traffic(sent, sent // 2))


def layout(buckets: int = 2, name: str = "layer{}.weight") -> Layout:
    planned = tuple(PlannedBucket((2 * n, 2 * n + 1), MIB, MIB + 64, True, "cpu", "float32") for n in range(buckets))
    return Layout(tuple(name.format(index) for index in range(2 * buckets)), planned)


def event(**changes: Any) -> RoundClosed:
    """Backward takes from 12 to 20. Buckets are under way from 14 to 17 and from 18 to 22; the second is waited for."""
    usual = RoundClosed(
        round=7,
        opened_at=12.0,
        first_launch_at=14.0,
        reduced_at=22.0,
        closed_at=23.0,
        waited=1.0,
        nbytes=2 * MIB,
        buckets=(bucket(0, 14.0, 17.0), bucket(1, 18.0, 22.0, awaited=21.0)),
        overlapped_buckets=1,
        order=(0, 1, 2, 3),
        corrected=False,
        repaired=False,
        layout=layout(),
        forward_at=10.0,
        backward_ended_at=20.0,
        before=PhaseSeconds(forward=2.0, backward=0.5, optimizer=1.5),
    )
    return usual._replace(**changes)


def test_a_step_is_the_sum_of_its_phases() -> None:
    costs = of_round(event(), closed_before=5.0)
    assert (costs.seconds, costs.forward, costs.backward, costs.optimizer) == (18.0, 2.0, 8.5, 1.5)
    assert (costs.communication, costs.exposed, costs.finishing) == (7.0, 2.0, 1.0)
    assert costs.outside == 3.0
    assert costs.overlap == pytest.approx(5 / 7)
    assert (costs.sent, costs.crossed, costs.bandwidth) == (2 * MIB, MIB, 2 * MIB / 7)


@pytest.mark.parametrize(
    ("spans", "communication", "exposed"),
    [
        ([(14.0, 22.0), (15.0, 16.0), (19.0, 21.0)], 8.0, 2.0),  # one around the others
        ([(14.0, 19.0), (16.0, 21.0)], 7.0, 1.0),  # they overlap
        ([(20.5, 21.0), (22.0, 22.5)], 1.0, 1.0),  # none in backward, as in the first round
        ([(14.0, 14.0)], 0.0, 0.0),  # one rank
        ([], 0.0, 0.0),
    ],
)
def test_communication_is_a_union(spans: list[tuple[float, float]], communication: float, exposed: float) -> None:
    costs = of_round(event(buckets=tuple(bucket(n, *span) for n, span in enumerate(spans))), closed_before=5.0)
    assert (costs.communication, costs.exposed) == (communication, exposed)
    assert costs.finishing == 3.0 - exposed
    assert costs.overlap == (1 - exposed / communication if communication else 0)


def test_the_first_round_begins_with_its_forward() -> None:
    first = event(before=PhaseSeconds(forward=2.0))
    assert of_round(first, closed_before=0.0).seconds == 13.0
    assert of_round(first._replace(forward_at=0.0, before=PhaseSeconds()), 0.0).seconds == 11.0
    # Several forwards and backwards before it, of which only the latest forward's moment is known.
    several = of_round(event(before=PhaseSeconds(forward=6.0, backward=9.0)), closed_before=0.0)
    assert (several.seconds, several.outside) == (6.0 + 9.0 + 11.0, 0.0)


def test_what_a_hook_sends_is_not_known() -> None:
    statistics = Statistics()
    statistics.record(event())
    assert statistics.total.bandwidth is not None
    statistics.record(event(hooked=True))
    assert statistics.latest_costs.bandwidth is None
    assert statistics.total.bandwidth is None  # of all rounds, neither


def test_totals_and_means() -> None:
    statistics = Statistics()
    for at in range(4):
        statistics.record(event(round=at, closed_at=23.0 + at))
    total, mean = statistics.total, statistics.total.mean()
    assert (statistics.rounds, total.rounds, mean.rounds) == (4, 4, 1)
    assert total.forward == 8.0
    assert mean.forward == 2.0
    assert (total.sent, mean.sent) == (8 * MIB, 2 * MIB)
    assert mean.overlap == pytest.approx(total.overlap)
    assert mean.bandwidth == pytest.approx(total.bandwidth)
    assert Costs().mean() == Costs()


def test_the_latest_round_has_names_and_moments() -> None:
    statistics = Statistics()
    assert statistics.latest is None
    statistics.record(event(unused=(1, 3)))
    latest = statistics.latest
    assert latest is not None
    assert latest.unused == ("layer1.weight", "layer3.weight")
    first, second = latest.buckets
    assert first.parameters == ("layer0.weight", "layer1.weight")
    assert (first.ready, first.start, first.end, first.waited) == (1.75, 2.0, 5.0, 0.0)
    assert (second.number, second.waited, second.nbytes, second.sent) == (1, 1.0, MIB, MIB)
    assert (latest.number, latest.overlapped_buckets, latest.idle_buckets, latest.backward_ended) == (7, 1, 0, 8.0)
    assert latest.seconds == statistics.latest_costs.seconds
    with pytest.raises(AttributeError):
        latest.forward = 0.0


def test_idle_buckets_are_counted() -> None:
    statistics = Statistics()
    statistics.record(event(layout=layout(5)))
    assert statistics.latest is not None
    assert statistics.latest.idle_buckets == 3


# --- how it is shown ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (units.seconds(0), "0"),
        (units.seconds(1.2345), "1.23 s"),
        (units.seconds(0.9996), "1.00 s"),
        (units.seconds(0.0123), "12.3 ms"),
        (units.seconds(0.999), "999 ms"),
        (units.seconds(3e-6), "3.00 µs"),
        (units.seconds(3e-9), "0.00 µs"),
        (units.seconds(7200.4), "7200 s"),
        (units.size(0), "0 B"),
        (units.size(1023), "1023 B"),
        (units.size(3 * MIB // 2), "1.50 MiB"),
        (units.size(2**50), "1024 TiB"),
        (units.rate(2.5e9), "2.50 GB/s"),
        (units.share(1, 3), "33 %"),
        (units.share(1, 30), "3.3 %"),
        (units.share(1, 0), "0 %"),
        (" ".join(units.moments([0.001, 0.02, 0.3])), "1 ms 20 ms 300 ms"),
        (" ".join(units.moments([])), ""),
    ],
)
def test_units(shown: str, text: str) -> None:
    assert shown == text


def test_the_whole_table() -> None:
    statistics = Statistics(module="GPT", transport="shared_memory: all ranks share a host", rank=1, size=2)
    statistics.record(event(closed_at=5.0, opened_at=-3.0, backward_ended_at=3.5, forward_at=-5.0, buckets=()))
    statistics.record(event(unused=(3,)))
    text = str(statistics)
    assert "process took" in text
    shown = "\n".join(line.split("; the process took")[0] for line in text.splitlines())
    assert shown == TABLE.strip("\n")


TABLE = """
GPT, rank 1 of 2: 2 rounds

                              round 7       mean      total   of a step
  step                         18.0 s     15.0 s     30.0 s       100 %
    forward                    2.00 s     2.00 s     4.00 s        13 %
    backward                   8.50 s     7.75 s     15.5 s        52 %
    communication, exposed     2.00 s     1.00 s     2.00 s       6.7 %
    end of round               1.00 s     1.25 s     2.50 s       8.3 %
    optimizer                  1.50 s     1.50 s     3.00 s        10 %
    outside                    3.00 s     1.50 s     3.00 s        10 %
  communication                7.00 s     3.50 s     7.00 s        23 %
    waited for peers           1.00 s     1.00 s     2.00 s       6.7 %
    hidden by backward           71 %       71 %       71 %
  sent                       2.00 MiB   1.00 MiB   2.00 MiB
    to other hosts           1.00 MiB    512 KiB   1.00 MiB
  bandwidth                  300 kB/s   300 kB/s   300 kB/s

  bucket   parameters                              size   ready   start      end   waited
       0   layer0.weight … layer1.weight (2)   1.00 MiB   1.8 s   2.0 s    5.0 s        0
       1   layer2.weight … layer3.weight (2)   1.00 MiB   5.8 s   6.0 s   10.0 s   1.00 s
           (backward has ended)                                            8.0 s

  transport  shared_memory: all ranks share a host
  unused     layer3.weight
  memory     2.00 MiB of buckets, in shared memory; gradients lie in them
"""


def test_before_the_first_round_it_says_so() -> None:
    statistics = Statistics(module="GPT", transport="shared_memory: all ranks share a host", size=2)
    assert str(statistics).startswith("GPT, rank 0 of 2: no round yet\n")
    assert "no round yet" in statistics._repr_html_()
    assert repr(statistics) == "<Statistics of 0 rounds, 0 each; print() shows them>"
    assert str(Statistics())  # without an engine


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hooked": True}, "how many bytes it has sent, only it knows"),
        ({"steps_in_backward": True}, "steps in backward, and is counted there"),
        ({"corrected": True}, "1 round with a second pass"),
        ({"repaired": True}, "1 round in which replicas were given the same parameters"),
        ({"layout": layout(4)}, "2 buckets that no rank had anything for"),
        ({"layout": layout()._replace(sparse=(0,))}, "1 gradient travels by itself"),
        ({"layout": layout()._replace(gradients_are_views=False)}, "gradients lie elsewhere"),
        ({"unused": (0, 2)}, "layer0.weight, layer2.weight"),
        (
            {"layout": layout()._replace(buckets=tuple(one._replace(device="cuda:0") for one in layout().buckets))},
            "of the host, which queues work for the accelerator",
        ),
    ],
)
def test_what_is_out_of_the_usual_is_told(changes: dict[str, Any], told: str) -> None:
    usual, statistics = Statistics(), Statistics()
    if changes.get("hooked"):
        statistics.hook_registered("halves")
    usual.record(event())
    statistics.record(event(**changes))
    assert told in str(statistics)
    assert told in statistics._repr_html_()
    assert told not in str(usual)


def test_of_many_buckets_the_first_and_the_last_are_shown() -> None:
    statistics = Statistics()
    many = tuple(bucket(n, 14.0 + n / 100, 14.5 + n / 100) for n in range(100))
    statistics.record(event(buckets=many, layout=layout(100)))
    text = str(statistics)
    assert "(68 more)" in text
    assert "layer0.weight" in text
    assert "layer199.weight" in text
    assert "layer100.weight" not in text
    assert statistics.latest is not None
    assert len(statistics.latest.buckets) == 100


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag in ("div", "p", "b", "table", "thead", "tbody", "tr", "th", "td"), tag
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def test_html_is_well_formed_and_escaped() -> None:
    statistics = Statistics(module="<script>alert(1)</script>", transport="a & b: <c>")
    statistics.record(event(layout=layout(name='<img src="x">{}'), unused=(0,)))
    parser = _Tags()
    parser.feed(statistics._repr_html_())
    parser.close()
    assert parser.open == []
    assert '<img src="x">0' in parser.cells  # as text
    assert "a & b: <c>" in parser.cells
    assert "communication, exposed" in {cell.strip() for cell in parser.cells}


def test_long_names_are_shortened_in_the_middle() -> None:
    statistics = Statistics()
    statistics.record(event(layout=layout(name="a" * 60 + ".{}.weight")))
    assert max(map(len, str(statistics).splitlines())) < 170
    assert "….0.weight" not in str(statistics)
    assert ".0.weight" in str(statistics)


def test_numbers_stay_finite() -> None:
    statistics = Statistics()
    statistics.record(event(buckets=(), before=PhaseSeconds(), layout=Layout()))
    costs = statistics.latest_costs
    values = [costs.seconds, costs.outside, costs.overlap, costs.communication]
    assert all(map(math.isfinite, values))
    assert costs.bandwidth is None
    assert str(statistics)
