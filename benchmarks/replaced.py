"""Ranks of which one that has died is started again at once, for a rival that has no launcher which does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradsync.cli.launch import Rank, Ranks, Report, environment, start_rank


class ReplacedRanks(Ranks):
    def __init__(self, module: str, job: str, *, ranks: int) -> None:
        self._how = module, ranks
        self._job = job
        self._now: dict[int, Rank] = {}
        super().__init__(module, [job], ranks=ranks)

    def _start(self, module: str, arguments: Sequence[str], ranks: int, port: int) -> Iterator[Rank]:
        for number in range(ranks):
            yield self._begin(number)

    def _begin(self, number: int) -> Rank:
        module, ranks = self._how
        variables = {**environment(number, ranks, 0), "OMP_NUM_THREADS": "1"}
        self._now[number] = start_rank(number, variables, module, [self._job])
        return self._now[number]

    def reports(self) -> Iterator[Report]:
        """Without end. Raises `RankFailed` if one has ended other than by a signal."""
        while True:
            for rank in self._ready():
                yield from rank.read()
            for number, rank in list(self._now.items()):
                if (status := rank.status) is None:
                    continue
                if status >= 0:
                    raise rank.failure()
                yield from rank.drain()
                self._ranks.remove(rank)
                rank.close()
                self._ranks.append(self._begin(number))
