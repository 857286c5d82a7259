"""Pure parts of the transports: who adds up what, and how much memory there is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.transport import memory_file
from gradsync.transport.shares import LINE, block_numel, blocks, round_up

RANKS = st.integers(1, 17)
ITEMSIZES = st.sampled_from([2, 4, 8])


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int]:
    """Empty, tiny, and longer than several blocks."""
    start = draw(st.integers(0, 5000))
    return start, start + draw(st.one_of(st.integers(0, 200), st.integers(0, 500_000)))


@given(ranges(), RANKS, ITEMSIZES)
def test_shares_cover_everything_once(bounds: tuple[int, int], ranks: int, itemsize: int) -> None:
    start, stop = bounds
    at = start
    for position in range(ranks):
        for first, last in blocks(start, stop, position, ranks, itemsize):
            assert first == at, "a gap, or a part that two ranks have"
            assert first < last <= stop
            at = last
    assert at == stop


@given(ranges(), RANKS, ITEMSIZES)
def test_no_two_ranks_write_to_the_same_cache_line(bounds: tuple[int, int], ranks: int, itemsize: int) -> None:
    lines: dict[int, int] = {}
    for position in range(ranks):
        for first, last in blocks(*bounds, position, ranks, itemsize):
            for line in {first * itemsize // LINE, (last - 1) * itemsize // LINE}:
                assert lines.setdefault(line, position) == position


@given(ranges(), RANKS, ITEMSIZES)
def test_blocks_fit_the_scratch_memory(bounds: tuple[int, int], ranks: int, itemsize: int) -> None:
    most = block_numel(ranks, itemsize)
    assert most > 0
    assert most * itemsize % LINE == 0
    for position in range(ranks):
        assert all(last - first <= most for first, last in blocks(*bounds, position, ranks, itemsize))


@given(st.integers(100_000, 500_000), RANKS)
def test_shares_are_about_equal(numel: int, ranks: int) -> None:
    shares = [sum(last - first for first, last in blocks(0, numel, rank, ranks, 4)) for rank in range(ranks)]
    assert max(shares) <= numel / ranks + LINE


@given(st.integers(0, 10**9), st.integers(1, 10**6))
def test_round_up(number: int, multiple: int) -> None:
    assert round_up(number, multiple) % multiple == 0
    assert number <= round_up(number, multiple) < number + multiple


FILES = {
    "/proc/meminfo": "MemTotal: 900 kB\nMemAvailable:      500 kB\n",
    "/proc/self/cgroup": "0::/",
}


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 500 * 1024),
        ({"/sys/fs/cgroup/memory.max": "max", "/sys/fs/cgroup/memory.current": "90000"}, 500 * 1024),
        ({"/sys/fs/cgroup/memory.max": "100000", "/sys/fs/cgroup/memory.current": "90000"}, 10_000),
        # Files that the kernel keeps in memory are given back; shared memory is not.
        (
            {
                "/sys/fs/cgroup/memory.max": "100000",
                "/sys/fs/cgroup/memory.current": "90000",
                "/sys/fs/cgroup/memory.stat": "anon 20000\nshmem 30000\ninactive_file 35000\nactive_file 5000",
            },
            50_000,
        ),
        # A job's limit inside a container's or a host's.
        (
            {
                "/proc/self/cgroup": "0::/slurm/job7",
                "/sys/fs/cgroup/slurm/memory.max": "100000",
                "/sys/fs/cgroup/slurm/memory.current": "30000",
                "/sys/fs/cgroup/slurm/job7/memory.max": "max",
                "/sys/fs/cgroup/slurm/job7/memory.current": "30000",
            },
            70_000,
        ),
        (
            {
                "/proc/self/cgroup": "9:cpu:/x\n4:memory:/docker/1f\n0::/",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "100000",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": "99000",
            },
            1000,
        ),
    ],
)
def test_available_memory(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], available: int) -> None:
    there = {**FILES, **files}
    monkeypatch.setattr(memory_file, "_lines", lambda path: there.get(str(Path(path)), "").splitlines())
    assert memory_file._available() == available
