"""Who is connected to whom, for any number of hosts and ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradsync.watch.tree import FANOUT, place_of

HOSTS = st.lists(st.integers(1, 9), min_size=1, max_size=400)


def ranks_of(sizes: list[int]) -> list[list[int]]:
    hosts, first = [], 0
    for size in sizes:
        hosts.append(list(range(first, first + size)))
        first += size
    return hosts


@given(HOSTS)
def test_every_rank_hangs_below_rank_0(sizes: list[int]) -> None:
    hosts = ranks_of(sizes)
    places = {rank: place_of(rank, hosts) for host in hosts for rank in host}
    for rank, place in places.items():
        assert (place.above is None) == (rank == 0)
        assert len(place.leaders) <= FANOUT
        for below in place.below:
            assert places[below].above == rank
        if place.above is not None:
            assert rank in places[place.above].below
            assert place.above < rank  # so there is no circle
            same_host = any(rank in host and place.above in host for host in hosts)
            assert place.above_is_remote is not same_host


def test_ten_thousand_ranks_are_four_connections_deep() -> None:
    hosts = ranks_of([8] * 1250)
    rank, depth = 9_999, 0
    while (above := place_of(rank, hosts).above) is not None:
        rank, depth = above, depth + 1
    assert depth <= 4
    assert max(len(place_of(host[0], hosts).below) for host in hosts) == FANOUT + 7
