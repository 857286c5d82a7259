"""News of one rank that all others hear: that it is gone, why, and where it was."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from gradsync.errors import ReplicaLostError, RoundTimeoutError
from gradsync.watch.position import Position
from gradsync.watch.wire import Message

MOST_TEXT = 6000  # characters of another rank's error
BY_EXIT = "sys.exit"  # how a script ended, if not at its end


class How(Enum):
    ENDED = "ended"  # its script came to its end
    LEFT = "left"  # it gave up its replicas, and lives on
    RAISED = "raised"
    GAVE_UP = "gave up"  # it has waited for others for too long
    GONE = "gone"  # without a word: killed, for example
    UNREACHABLE = "unreachable"  # its host does not answer

    @property
    def is_loss(self) -> bool:
        return self not in (How.ENDED, How.LEFT)


class Notice(NamedTuple):
    rank: int
    how: How
    why: str = ""
    """Its exception, if it raised; what it has to say, if it gave up; `BY_EXIT`, if it ended so."""
    lines: tuple[str, ...] = ()
    """The end of that one's traceback."""
    because: tuple[int, ...] = ()
    """Other ranks that it raised for: not itself the first cause."""
    at: Position | None = None
    """Where it was, by its own words; of one that said nothing, where it was last seen, and how long before its end."""
    rounds: tuple[tuple[int, int], ...] = ()
    """How many rounds each of its modules has closed, by their serial numbers."""

    def pack(self) -> Message:
        return {
            "is": "lost",
            "rank": self.rank,
            "how": self.how.value,
            "why": self.why[:MOST_TEXT],
            "lines": list(self.lines),
            "because": list(self.because),
            "at": None if self.at is None else self.at.pack(),
            "rounds": [list(one) for one in self.rounds],
        }

    @classmethod
    def unpack(cls, message: Message) -> Notice:
        return cls(
            int(message["rank"]),
            How(message["how"]),
            str(message["why"]),
            tuple(map(str, message["lines"])),
            tuple(map(int, message["because"])),
            None if message["at"] is None else Position.unpack(message["at"]),
            tuple((int(module), int(number)) for module, number in message["rounds"]),
        )

    def error(self, rank: int) -> ReplicaLostError | RoundTimeoutError:
        """What rank `rank` raises for it."""
        if self.how is How.GAVE_UP:
            return RoundTimeoutError(f"rank {rank}: {self.why}", self.because)
        raised = self.how is How.RAISED
        begin = "Cure that, then start" if raised else "Start"
        return ReplicaLostError(
            f"rank {rank}: rank {self.rank} {self.told()}{begin} the job again from the last checkpoint (torchrun "
            "--max-restarts does).",
            (raised and self.because) or (self.rank,),
        )

    def told(self) -> str:
        """What happened to the rank, and where it was; what to do about it may follow."""
        if self.how is How.RAISED:
            where = "" if self.at is None else f" It was {self.at}."
            ends = "".join(f"\n  {line}" for line in self.lines)
            tail = f" Its traceback ends:{ends}\n" if ends else " "
            return f"raised {self.why}{'' if self.why.endswith('.') else '.'}{where}{tail}"
        where = "" if self.at is None else f" It was last seen {self.at}, {self.at.since:.1f} s before that."
        if self.how is How.UNREACHABLE:
            return f"does not answer any more: its host is down, or the network is.{where} "
        return (
            "is gone: its process ended without a word (killed, by the kernel for want of memory perhaps, or by "
            f"os._exit). Its own output, and the kernel's log, say more.{where} "
        )
