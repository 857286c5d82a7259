"""Keeps what one module's engine tells, on one rank, as long as somebody traces it."""

from __future__ import annotations

from collections import deque

from gradsync.events import RoundClosed, Span

# A round of 20 buckets is 7 KB here, and less than 1 KB on its way to rank 0, which gets those of all ranks.
_ROUNDS_OF_ALL_RANKS, _LEAST_ROUNDS, _SPANS_A_ROUND = 2048, 16, 16


def most_rounds(ranks: int) -> int:
    """So many are kept, the latest: memory stays bounded, however long somebody traces."""
    return max(_LEAST_ROUNDS, _ROUNDS_OF_ALL_RANKS // ranks)


class ModuleRecorder:
    def __init__(self, ranks: int) -> None:
        most = most_rounds(ranks)
        self.rounds: deque[RoundClosed] = deque(maxlen=most)
        self.spans: deque[Span] = deque(maxlen=most * _SPANS_A_ROUND)
        self._seen = 0

    @property
    def left_out(self) -> int:
        """Rounds that were recorded and are no longer kept."""
        return self._seen - len(self.rounds)

    def round_closed(self, event: RoundClosed) -> None:
        self._seen += 1
        self.rounds.append(event._replace(order=()))  # as long as the list of all parameters

    def phase_ended(self, span: Span) -> None:
        self.spans.append(span)

    def forget(self) -> None:
        """All so far."""
        self.rounds.clear()
        self.spans.clear()
        self._seen = 0
