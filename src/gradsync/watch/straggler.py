"""A rank that is slow, and what to say of it."""

from __future__ import annotations

from typing import NamedTuple

from gradsync.watch.waits import Phases

_COMPUTES = (
    "It computes slowly, or has more to compute: look for larger batches than the others', other processes on its "
    "host, a throttled processor, fewer threads (torch.get_num_threads())"
)
_CURES = {
    "outside": "Look at its data loader, and at what else it does between steps: logging, checkpoints, evaluation.",
    "forward": f"{_COMPUTES}.",
    "backward": f"{_COMPUTES}, hooks of its own.",
    "": "None of that explains it: look at its connection with the others.",
}


class Straggler(NamedTuple):
    rank: int
    module: str
    slowest: int
    """In so many rounds it was the last to come."""
    rounds: int
    seconds: float
    """That the others waited for it in these, in the mean over them."""
    elapsed: float
    """That these have taken."""
    all_waits: float
    """That ranks waited in them for any rank, in the mean over those who waited."""
    its: Phases
    """Its own, in the mean over the rounds."""
    others: Phases
    """The median of the others'."""

    @property
    def phase(self) -> str:
        """In which it loses most of the time against the others; '' if in none of them."""
        lost = {
            name: getattr(self.its, name) - getattr(self.others, name) for name in ("outside", "forward", "backward")
        }
        most = max(lost, key=lambda name: lost[name])
        return most if lost[most] > self.seconds / self.rounds / 4 else ""

    def __str__(self) -> str:
        its, others = self.its, self.others
        return (
            f"rank {self.rank} is slow: in {self.slowest} of the last {self.rounds} rounds of {self.module} the others "
            f"waited for it, {self.seconds:.1f} s each, {self.seconds / self.elapsed:.0%} of the time and "
            f"{self.seconds / self.all_waits:.0%} of all waiting. Each step it spends {_ms(its.outside)} between "
            f"rounds (data, optimizer), others {_ms(others.outside)}; {_ms(its.forward)} in forward and loss, others "
            f"{_ms(others.forward)}; {_ms(its.backward)} in backward, others {_ms(others.backward)}. "
            f"{_CURES[self.phase]}"
        )


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
