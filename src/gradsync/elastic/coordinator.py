"""Who trains together, and from which step on: what has happened to ranks -> what they are told. Pure, no clock.

An epoch is a set of ranks. It ends when one of them dies, or before a step on which they have agreed, when others want
to join. Each rank that has left it says how far it is; when all have, the next epoch begins with those who are there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

Message = dict[str, Any]
FRESH = -1  # steps of a rank that has not trained yet
# Ranks that are about to come are worth waiting for so long before an epoch is ended for those who have.
GATHER_SECONDS = 1.0


class Phase(Enum):
    STARTING = "starting"  # its process runs, and imports
    READY = "ready"  # waits for the next epoch
    TRAINING = "training"


@dataclass
class Rank:
    phase: Phase = Phase.STARTING
    since: float = 0.0
    step: int = FRESH  # how many it has finished, by its own words
    whole: bool = False
    finished: bool = False
    joined: bool = False  # it has been in an epoch
    model: str = ""  # a digest of what it trains
    ask: int | None = None  # the step in which it was when asked
    blamed: int = 0  # by how many for not having come

    def left(self, said: Message, now: float) -> None:
        """The epoch, or its imports: it waits for the next one."""
        self.phase, self.since, self.ask = Phase.READY, now, None
        self.step, self.whole, self.finished = int(said["step"]), bool(said["whole"]), bool(said["finished"])
        self.model = str(said["model"])

    def begins(self) -> None:
        self.phase, self.joined, self.ask, self.blamed = Phase.TRAINING, True, None, 0

    def is_in(self, step: int) -> None:
        self.ask = step

    def blame(self, times: int) -> None:
        self.blamed = self.blamed + times if times else 0


@dataclass(frozen=True)
class Terms:
    """What the user has asked for."""

    least: int
    """Ranks that must be there."""
    wait: float
    """Seconds to wait for them."""
    start: float = 60.0
    """Seconds to wait for those who were started first."""
    limit: float = 1800.0
    """Seconds that a rank may take to leave an epoch that has ended for others."""
    blamed: float = 5.0
    """The same for one that the others have waited for in vain."""


class Order(NamedTuple):
    """A message to a rank; `is`: "epoch", "hold", "break", "lost", "kill", "over", "give up" or "refused"."""

    to: str
    message: Message


@dataclass
class Coordinator:
    terms: Terms
    epoch: int = 0
    """The number of the latest; 0: there was none yet."""
    over: str = ""
    """Why nothing will be told any more: "finished", or what went wrong."""
    members: list[str] = field(default_factory=list)
    """Of the latest epoch, by their ranks; those that died since are among them."""
    ranks: dict[str, Rank] = field(default_factory=dict)
    """Of all that live."""
    _broken: list[str] = field(default_factory=list)  # members that died in this epoch
    _asking: bool = False  # ranks were asked where they are, because others want to join
    _ends_before: int | None = None  # the step that was agreed on
    _short_since: float | None = None
    _said_short: bool = False
    _others_may_come: bool = True
    _orders: list[Order] = field(default_factory=list)
    _words: list[str] = field(default_factory=list)

    # --- what happens ------------------------------------------------------------------------------------

    def born(self, name: str, now: float) -> None:
        self.ranks[name] = Rank(since=now)

    def died(self, name: str, how: str, now: float) -> None:
        rank = self.ranks.pop(name, None)
        if rank is None or self.over:
            return
        if rank.joined and name in self.members and not (rank.finished and how == "it has ended"):
            self._words.append(f"rank {self.members.index(name)} is lost in epoch {self.epoch}: {how}")
        if name in self.members and rank.joined:  # also one that waits already: others may need what it has sent
            self._broken.append(name)
            for other in self._training():
                self._tell(other, {"is": "lost", "epoch": self.epoch, "rank": self.members.index(name), "how": how})
        self.decide(now)

    def ready(self, name: str, said: Message, now: float) -> None:
        """It waits for the next epoch: at the beginning, after a loss, before the step agreed on, or at the end."""
        rank = self.ranks.get(name)
        if rank is None:
            return
        if rank.phase is Phase.TRAINING and not said["finished"] and self._ends_before != int(said["step"]):
            self._leaves(name)
        rank.left(said, now)
        for number in said.get("blamed", ()):
            if name in self.members and 0 <= int(number) < len(self.members):
                other = self.ranks.get(self.members[int(number)])
                if other is not None and other is not rank:
                    other.blame(1)
        if self.over:
            self._dismiss(name)
        self.decide(now)

    def _leaves(self, name: str) -> None:
        """Before it was agreed: others may wait for it where they see nothing of that."""
        how = {"rank": self.members.index(name), "how": "it has left, as it takes another one for lost"}
        for other in self._training():
            if other != name:
                self._tell(other, {"is": "lost", "epoch": self.epoch, **how})

    def at(self, name: str, step: int, now: float) -> None:
        """An answer to "hold": it is in this step, and begins at most the next one before it is told."""
        if (rank := self.ranks.get(name)) is not None and rank.phase is Phase.TRAINING:
            rank.is_in(step)
            self.decide(now)

    # --- what follows ------------------------------------------------------------------------------------

    def orders(self) -> list[Order]:
        """What is to be sent, once."""
        orders, self._orders = self._orders, []
        return orders

    def words(self) -> list[str]:
        """What people should know, once."""
        words, self._words = self._words, []
        return words

    def expect_others(self, flag: bool) -> None:
        """Whether ranks may come that were not born yet."""
        self._others_may_come = flag

    def stop(self) -> None:
        """The user wants it: what happens to ranks from here on is no loss."""
        self.over = self.over or "stopped"

    def decide(self, now: float) -> None:
        """Also to be called now and then, as time passes."""
        if self.over:
            return
        ready = [name for name, one in self.ranks.items() if one.phase is Phase.READY]
        if self._training():
            self._short_since = None
            if any(name in self.members and not self.ranks[name].finished for name in ready) or self._broken:
                self._await_leavers(now)
            elif self._asking:
                self._agree()
            elif any(name not in self.members for name in ready):
                self._let_join(ready, now)
            return
        here = [name for name in ready if name in self.members]
        if here and all(self.ranks[name].finished for name in here):
            self._end("finished")
        elif self._may_begin(ready, now):
            self._begin(ready)

    def _training(self) -> list[str]:
        return [name for name in self.members if name in self.ranks and self.ranks[name].phase is Phase.TRAINING]

    def _await_leavers(self, now: float) -> None:
        """Others have left the epoch. Who does not follow is stuck."""
        left = [one.since for name, one in self.ranks.items() if one.phase is Phase.READY and name in self.members]
        for name in self._training() if left else ():
            patience = self.terms.blamed if self.ranks[name].blamed else self.terms.limit
            if now - min(left) > patience:
                self._words.append(f"rank {self.members.index(name)} does not come back: it is ended")
                self._tell(name, {"is": "kill"})
                self.ranks[name].blame(0)

    def _let_join(self, ready: list[str], now: float) -> None:
        joiners = [name for name in ready if name not in self.members]
        for name in self._strangers(joiners):
            joiners.remove(name)
        first = min((self.ranks[name].since for name in joiners), default=now)
        coming = any(one.phase is Phase.STARTING for one in self.ranks.values())
        if not joiners or (coming and now - first < GATHER_SECONDS):
            return
        self._asking = True
        for name in self._training():
            self._tell(name, {"is": "hold", "epoch": self.epoch})

    def _agree(self) -> None:
        """When all have said in which step they are: before which one they break. Also if who wanted to join has died
        since: they wait for the answer."""
        steps = [self.ranks[name].ask for name in self._training()]
        if self._ends_before is None and all(step is not None for step in steps):
            self._ends_before = max(step for step in steps if step is not None) + 2
            for name in self._training():
                self._tell(name, {"is": "break", "epoch": self.epoch, "before": self._ends_before})

    def _strangers(self, joiners: list[str]) -> list[str]:
        """Those that train something else than the members do; they are told."""
        models = {self.ranks[name].model for name in self.members if name in self.ranks}
        if len(models) != 1:
            return []
        strangers = [name for name in joiners if self.ranks[name].model not in models]
        for name in strangers:
            why = "it trains another model, or with other options, than the ranks that are there"
            self._tell(name, {"is": "refused", "why": why})
            self._words.append(f"a rank that has come is refused: {why}")
            del self.ranks[name]
        return strangers

    def _may_begin(self, ready: list[str], now: float) -> bool:
        starting = [one for one in self.ranks.values() if one.phase is Phase.STARTING]
        if len(ready) >= self.terms.least:
            self._short_since = None
            first = min(self.ranks[name].since for name in ready)
            return bool(self.epoch or not starting or now - first > self.terms.start)
        if not self._others_may_come and not starting:
            self._end(f"only {len(ready)} of at least {self.terms.least} ranks are left, and none is started again")
            return False
        if self._short_since is None:
            self._short_since, self._said_short = now, False
        waited = now - self._short_since
        if not self._said_short and self.epoch:
            self._said_short = True
            self._words.append(
                f"{len(ready)} of at least {self.terms.least} ranks are left: waiting {self.terms.wait:g} s for others"
            )
        if waited > (self.terms.wait if self.epoch else max(self.terms.wait, self.terms.start)):
            self._end(f"only {len(ready)} of at least {self.terms.least} ranks were there for {self.terms.wait:g} s")
        return False

    def _begin(self, ready: list[str]) -> None:
        """The next epoch, of those who are ready: members in their order, then those who have come."""
        order = [name for name in self.members if name in ready]
        order += sorted(name for name in ready if name not in order)
        for name in self._strangers(order) if self.epoch else ():
            order.remove(name)
        if not self.epoch and len({self.ranks[name].model for name in order}) > 1:
            self._end("the ranks train different models, or with different options: start the same script on all hosts")
            return
        survivors = [name for name in order if self.ranks[name].joined]
        whole = [name for name in survivors or order if self.ranks[name].whole]
        if not whole:
            self._end("no rank that is left has a whole model: all were interrupted while an optimizer stepped")
            return
        source = max(whole, key=lambda name: self.ranks[name].step)  # of equals the first
        step = self.ranks[source].step
        if self.epoch and not survivors:
            self._words.append("all ranks were lost at once, and what they had trained with them: beginning again")
        fresh = step == FRESH
        joined = [name for name in order if not self.ranks[name].joined and self.epoch]
        behind = [
            number
            for number, name in enumerate(order)
            if name != source
            and (fresh or name in joined or not self.ranks[name].whole or self.ranks[name].step != step)
        ]
        ends = min((self.ranks[name].step for name in order if self.ranks[name].finished), default=None)
        self.epoch += 1
        self.members, self._broken, self._asking, self._ends_before = order, [], False, None
        self._short_since = None
        for number, name in enumerate(order):
            self.ranks[name].begins()
            begin = {"is": "epoch", "number": self.epoch, "rank": number, "size": len(order), "ends": ends}
            self._tell(name, {**begin, "source": order.index(source), "behind": behind, "step": max(step, 0)})
        came = f", {len(joined)} of them new" if joined and self.epoch > 1 else ""
        self._words.append(f"epoch {self.epoch}: {len(order)} ranks{came}, from step {max(step, 0)} on")

    def _end(self, why: str) -> None:
        self.over = why
        if why != "finished":
            self._words.append(why)
        here = [name for name, one in self.ranks.items() if one.phase is Phase.READY and one.whole and one.joined]
        keeps = max(here, key=lambda name: self.ranks[name].step, default="")
        for name in self.ranks:
            self._dismiss(name, keeps == name)

    def _dismiss(self, name: str, keeps: bool = False) -> None:
        """`keeps`: it leaves a checkpoint."""
        if self.over != "finished":
            self._tell(name, {"is": "give up", "why": self.over, "checkpoint": keeps})
        elif self.ranks[name].joined:
            self._tell(name, {"is": "over"})
        else:
            self._tell(name, {"is": "kill", "finished": True})  # it came too late, and would go on as if it had trained

    def _tell(self, name: str, message: Message) -> None:
        self._orders.append(Order(name, message))
