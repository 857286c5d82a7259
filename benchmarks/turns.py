"""What contenders took for steps in turns, on one model and one number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.ratios import Spread, ratio, spread


@dataclass(frozen=True, kw_only=True)
class Turns:
    ranks: int
    model: str
    parameters: int
    repetitions: list[dict[str, float]]  # contender -> seconds on the slowest rank
    absent: dict[str, str]  # contender -> why
    wrong: dict[str, str]  # contender -> what is wrong with it

    def seconds(self, key: str) -> Spread:
        return spread([times[key] for times in self.repetitions])

    def ratio(self, key: str, to: str | None) -> Spread | None:
        """None where one of the two was not measured."""
        if to is None or not {key, to} <= self.repetitions[0].keys():
            return None
        return ratio(self.repetitions, key, to)
