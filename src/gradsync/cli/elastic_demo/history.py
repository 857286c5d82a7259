"""Steps of a run whose ranks come and go, put together from what each reports."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from gradsync.cli.history import History, Step
from gradsync.cli.report import Record


class ShardHistory(History):
    """By shards: who computes them changes, what they give does not."""

    def __init__(self, *, ranks: int, steps: int, shards: int, tokens_per_step: int) -> None:
        super().__init__(ranks=ranks, steps=steps, tokens_per_step=tokens_per_step)
        self.shards = shards
        self.times: list[float] = []
        """When each step was finished, on the clock of all processes."""
        self.sizes: list[int] = []
        """How many ranks each had."""
        self._pending: dict[int, list[Record]] = {}

    def take(self, record: Record) -> Iterator[Step]:
        """The steps that are whole by now.

        A rank that was killed may have finished a step that it did not tell of: that one has what the others told. It
        is whole when somebody has finished the next.
        """
        number = record["step"]
        for earlier in [step for step in self._pending if step < number]:
            yield self._put_together(self._pending.pop(earlier))
        if number <= len(self.steps):  # told by a rank that has made it again
            return
        parts = self._pending.setdefault(number, [])
        parts.append(record)
        if len(_losses(parts)) == self.shards:
            yield self._put_together(self._pending.pop(number))

    def rest(self) -> Iterator[Step]:
        """When nobody tells anything any more."""
        while self._pending:
            yield self._put_together(self._pending.pop(min(self._pending)))

    def _put_together(self, parts: list[Record]) -> Step:
        losses = _losses(parts)
        self.times.append(min(part["at"] for part in parts))
        self.sizes.append(parts[-1]["ranks"])
        seconds, waited = (fmean(part[name] for part in parts) for name in ("seconds", "waited"))
        loss = fmean(losses[shard] for shard in sorted(losses))
        return self.append(Step(parts[0]["step"], loss, seconds, waited))


def _losses(parts: list[Record]) -> dict[int, float]:
    return {part["shard"] + place: loss for part in parts for place, loss in enumerate(part["losses"])}
