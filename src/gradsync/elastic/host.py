"""The ranks of this host, as processes: started, listened to, told, and started again."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradsync.elastic.control import LINE, MOST, STORE
from gradsync.watch.wire import Channel, Message

_GRACE_SECONDS = 10.0
# A rank in the place of one that has died starts so much later: its imports would take the cores from the others, who
# have a step to make again.
_AGAIN_SECONDS = 1.0


@dataclass
class _Process:
    """One that is, or was, a rank."""

    name: str
    slot: int
    process: subprocess.Popen[bytes]
    channel: Channel
    death: int
    """A descriptor that can be read when it has ended."""
    came: bool = False
    """It has come to where ranks meet."""

    is_refused: bool = False
    """The others can't train with it."""

    is_ended_here: bool = False
    """By this launcher: it has not failed."""

    def kill(self) -> None:
        """With the workers of its data loader, say."""
        self.is_ended_here = True
        self.sweep()

    def stop(self, signum: int) -> None:
        """Asks it to end."""
        self.is_ended_here = True
        self.process.send_signal(signum)

    def sweep(self) -> None:
        """Ends what it has started and could not end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # not reaped yet: the number is still its own

    failure: str = ""
    """Why it has left, by its own words; its process ends in a moment."""

    def fails(self, how: str) -> None:
        self.failure = how

    def comes(self) -> None:
        self.came = True

    def refuse(self) -> None:
        self.is_refused = True


@dataclass(frozen=True)
class Plan:
    """What to start."""

    command: Sequence[str]
    slots: int
    """Ranks of this host."""
    most: int
    """Ranks of all hosts."""
    store: str
    """`host:port`"""
    max_restarts: int
    """Of each slot."""


@dataclass
class Host:
    number: int
    plan: Plan
    report: Callable[[Message], None]
    """What happens is told here: "born", "died", "ready" and "at", each with the rank's name."""
    say: Callable[[str], None]
    """What people should know."""
    selector: selectors.BaseSelector
    over: str = ""
    """Why nobody is started any more: "finished", or what went wrong."""
    failed: bool = False
    """Whether a rank failed after training was over."""
    _here: dict[str, _Process] = field(default_factory=dict)
    _starts: dict[int, int] = field(default_factory=dict)
    _any_came: bool = False
    _kill_at: float | None = None
    _to_start: list[tuple[int, float]] = field(default_factory=list)  # slots, and when

    def start(self) -> None:
        for slot in range(self.plan.slots):
            self._start(slot)

    @property
    def living(self) -> int:
        return len(self._here) + len(self._to_start)

    @property
    def ever_came(self) -> bool:
        """Whether any rank has come to where ranks meet."""
        return self._any_came

    def tell(self, name: str, message: Message) -> None:
        """What the lead has for a rank."""
        if not self.over and (message["is"] in ("over", "give up") or message.get("finished")):
            self.over = str(message["why"]) if message["is"] == "give up" else "finished"
        one = self._here.get(name)
        if one is None:
            return
        if message["is"] == "kill" or (message["is"] == "give up" and not one.came):
            one.kill()
        else:
            if message["is"] == "refused":
                one.refuse()
            one.channel.send(message)

    def give_up(self, why: str) -> None:
        """Nobody is left to say who goes on."""
        for name in list(self._here):
            self.tell(name, {"is": "give up", "why": why, "checkpoint": True})
        self.over = self.over or why

    def stop(self, signum: int) -> None:
        """Passes a signal on; who does not end is killed after a while."""
        self.over = self.over or f"stopped by {signal.Signals(signum).name}"
        self._kill_at = self._kill_at or time.monotonic() + _GRACE_SECONDS
        for one in self._here.values():
            one.stop(signum)

    def tick(self) -> None:
        """Now and then."""
        now, waiting = time.monotonic(), self._to_start
        self._to_start = [(slot, at) for slot, at in waiting if at > now and not self.over]
        for slot, at in waiting if not self.over else ():
            if at <= now:
                self._start(slot)
        for one in self._here.values():
            if one.channel.has_more_to_send:
                one.channel.flush()
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            for one in self._here.values():
                one.kill()

    def close(self) -> None:
        """Ends whoever is still there."""
        for one in list(self._here.values()):
            one.kill()
            one.process.wait()
            self._forget(one)

    # --- processes ---------------------------------------------------------------------------------------

    def _start(self, slot: int) -> None:
        begun = self._starts[slot] = self._starts.get(slot, 0) + 1
        name = f"{self.number:04}.{slot:04}.{begun:06}"
        mine, its = socket.socketpair()
        environment = {
            **os.environ,
            "LOCAL_RANK": str(slot),
            "LOCAL_WORLD_SIZE": str(self.plan.slots),
            LINE: str(its.fileno()),
            STORE: self.plan.store,
            MOST: str(self.plan.most),
        }
        for variable in ("RANK", "WORLD_SIZE", "GROUP_RANK"):  # of a launcher around this one
            environment.pop(variable, None)
        if self.plan.slots > 1:
            environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        with its:
            process = subprocess.Popen(
                self.plan.command, env=environment, pass_fds=[its.fileno()], start_new_session=True
            )
        one = _Process(name, slot, process, Channel(mine, slot), os.pidfd_open(process.pid))
        self._here[name] = one
        self.selector.register(one.channel.socket, selectors.EVENT_READ, lambda: self._listen(one))
        self.selector.register(one.death, selectors.EVENT_READ, lambda: self._ended(one))
        self.report({"is": "born", "name": name})

    def _listen(self, one: _Process) -> None:
        try:
            messages = one.channel.receive()
        except OSError:  # its end will be told by the kernel
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(one.channel.socket)
            return
        for message in messages:
            if message.get("is") == "failed":
                one.fails(f"it raised {message.get('how')}")
                self.report({"is": "died", "name": one.name, "how": one.failure})
            elif message.get("is") in ("ready", "at"):
                one.comes()
                self._any_came = True
                self.report({**message, "name": one.name})

    def _ended(self, one: _Process) -> None:
        self._listen(one)  # what it said before
        one.sweep()
        code = one.process.wait()
        self._forget(one)
        how = "it has ended" if code == 0 else f"exit code {code}" if code > 0 else f"killed by {_signal(-code)}"
        if not one.failure:
            self.report({"is": "died", "name": one.name, "how": how})
        how = one.failure or how
        if self.over:
            self.failed = self.failed or (code != 0 and not one.is_ended_here and not one.failure)
            return
        restarts = self._starts[one.slot] - 1
        if code > 0 and not self._any_came:
            self.say(f"a rank has failed before it could train ({how}), and is not started again")
        elif one.is_refused:
            self.say(f"a rank that was refused has ended ({how}), and is not started again")
        elif code == 0:
            self.say("a rank has ended, though training is not finished")
        elif restarts >= self.plan.max_restarts:
            again = f"{restarts} times again, " if restarts else ""
            self.say(f"a rank was started {again}and has died again ({how}): it is given up (--max-restarts)")
        else:
            self.say(
                f"a rank has died ({how}), and is started again ({restarts + 1} of {self.plan.max_restarts} times)"
            )
            self._to_start.append((one.slot, time.monotonic() + _AGAIN_SECONDS))

    def _forget(self, one: _Process) -> None:
        del self._here[one.name]
        for descriptor in (one.channel.socket, one.death):
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(descriptor)
        one.channel.close()
        os.close(one.death)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
