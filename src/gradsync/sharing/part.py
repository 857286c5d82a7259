"""What a shared optimizer has of one replica: runs of elements, and whole parameters; who waits for whom in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsync.engine.engine import Engine
from gradsync.errors import NotSupportedError, ReplicaLostError, RoundTimeoutError, UnfinishedRoundError
from gradsync.sharing.counters import copied, counters, is_like
from gradsync.sharing.runs import Run, find_runs
from gradsync.sharing.state import RunState
from gradsync.sharing.whole import WholeParameters

# What ranks say to each other at the end of a step; from the second on, plus the rank, that it has raised.
_NEWS, _FAILED = 1, 2


class Part:
    """What an optimizer has of one replica, as that is planned now."""

    def __init__(self, engine: Engine, groups: Mapping[int, int], elementwise: bool) -> None:
        """`groups`: of the optimizer, by the identities of its parameters."""
        assert engine.shared is not None
        assert engine.shared.memory is not None
        self._engine, self.group, self._shared = engine, engine.reducer.group, engine.shared
        self._memory, self._groups = engine.shared.memory, groups
        self.runs = find_runs(self.group, self._shared, groups) if elementwise else []
        self._state = RunState(self.group)
        in_runs = {index for run in self.runs for index in run.indices}
        left = [i for i, p in enumerate(self.group.parameters) if i not in in_runs and id(p) in groups]
        self.whole = WholeParameters(
            [self.group.parameters[index] for index in left], list(map(self.group.name, left)), self._memory
        )
        self.parameters = [self.group.parameters[index] for index in sorted(in_runs)] + self.whole.parameters
        self._by_bucket: dict[int, list[Run]] = {}

    @property
    def is_current(self) -> bool:
        return self._engine.reducer.group is self.group

    def of_group(self, number: int) -> list[Tensor]:
        """What this rank steps of a group of the optimizer's."""
        mine: list[Tensor] = [run.values for run in self.runs if run.group == number]
        return mine + [p for p in self.whole.mine if self._groups[id(p)] == number]

    def begin_step(self) -> None:
        """Nobody reads the parameters any more when this returns."""
        self._shared.check(self.group.transport.rank)
        try:
            self._memory.meet("the beginning of an optimizer's step")
        except (ReplicaLostError, RoundTimeoutError) as error:
            raise type(error)(
                f"{error} The parameters are whole, as after step {self._shared.steps}.", error.ranks
            ) from None

    def end_step(self, inner: Optimizer) -> None:
        """They are whole again when this returns, on all ranks of the host."""
        said = _NEWS if self.whole.has_news(inner) else 0
        if not self._memory.is_common or self._has_new_state(inner):
            said = self._meet_unless_failed(said)  # what follows all ranks do together: not those that have raised
        self.share_state(inner)
        self._spread()
        for run in self.runs:
            run.let_gradient_go()
        torch.autograd.graph.increment_version([p for p in self.parameters if p.grad is not None])
        self.whole.write_numbers(inner)
        if self._memory.is_common:
            said = self._meet_unless_failed(said)
        if said == _NEWS:
            self.whole.tell(inner, self.group.transport)
            self.whole.write_numbers(inner)
            self._meet_at_end()
        self._shared.stepped()

    def _spread(self) -> None:
        """Where ranks do not see each other's memory, they send what they have stepped."""
        if not self._memory.is_common:
            stepped = {run.number for run in self.runs if run.values.grad is not None}
            for number in sorted(stepped):
                self._shared.spread(self.group, number)
            self.whole.spread(self.group.transport)

    def fail_step(self) -> None:
        """The optimizer has raised on this rank: so that the others need not wait."""
        with contextlib.suppress(ReplicaLostError, RoundTimeoutError):  # what it has raised says more
            self._meet_at_end(_FAILED + self._rank)

    def _meet_unless_failed(self, said: int = 0) -> int:
        heard = self._meet_at_end(said)
        if heard >= _FAILED:
            raise self._torn_by(heard)
        return heard

    def _torn_by(self, heard: int) -> UnfinishedRoundError:
        rank = heard - _FAILED
        return self._torn(f"the optimizer of rank {rank} raised", [rank] if rank != self._rank else ())

    def _meet_at_end(self, said: int = 0) -> int:
        try:
            return self._memory.meet("the end of an optimizer's step", said)
        except (ReplicaLostError, RoundTimeoutError) as error:
            raise type(error)(f"{error} {self._torn('its share is missing')}", error.ranks) from None

    def _torn(self, why: str, because: Sequence[int] = ()) -> UnfinishedRoundError:
        steps = self._shared.steps
        return UnfinishedRoundError(
            f"rank {self.group.transport.rank}: step {steps + 1} of a shared optimizer did not come to its end: {why}. "
            "The parameters on this host, and the optimizer's state, are those of two steps; the last whole one was "
            f"step {steps}. Go on from a checkpoint: load_state_dict() of replica and optimizer, on all ranks.",
            because,
        )

    def take_share(self, inner: Optimizer, number: int, used: Sequence[bool], gradient: Tensor) -> list[Run]:
        """The runs of a bucket that are to be stepped, each with its part of the gradient, this rank's share.

        `used`: whether each of the bucket's parameters has one; runs are split where some have none.
        """
        start, runs = self._shared.share_of(self.group, number).start, []
        for run in self._runs_of(number):
            of_run = used[run.first : run.last]
            if all(of_run) or not any(of_run):
                runs.append(run)
                continue
            parts = []
            for part, state in run.split(of_run, inner.state.pop(run.values, {})):
                if state:
                    inner.state[part.values] = state
                parts.append(part)
            at = self.runs.index(run)
            self.runs[at : at + 1] = parts
            self._by_bucket.clear()
            runs += parts
        found = [run for run in runs if used[run.first]]
        for run in found:
            run.values.grad = gradient[run.extent.start - start : run.extent.stop - start]
        return found

    def _runs_of(self, number: int) -> list[Run]:
        if not self._by_bucket:
            for run in self.runs:
                self._by_bucket.setdefault(run.number, []).append(run)
        return self._by_bucket.get(number, [])

    def check_all_in_runs(self) -> None:
        """Before shares are stepped as they come: raises if a parameter has none, as it would never be stepped."""
        in_runs, rank = {id(self.group.parameters[index]) for run in self.runs for index in run.indices}, self._rank
        missing = [i for i, p in enumerate(self.group.parameters) if id(p) not in in_runs]
        if missing:
            name = self.group.name(missing[0])
            why = (
                "has a sparse gradient, which is not cut"
                if id(self.group.parameters[missing[0]]) in self._groups
                else "is in no group of the optimizer"
            )
            raise NotSupportedError(
                f"rank {rank}: '{name}' {why}: overlap_optimizer() with share_parameters=True steps shares of all "
                "parameters that have gradients, and delivers none. Give it an optimizer of all of them (freeze the "
                "others), or use gradsync.share_optimizer()."
            )

    @property
    def _rank(self) -> int:
        return self.group.transport.rank

    @property
    def first_rank(self) -> int:
        """Of those that have shares of the same memory."""
        return self._memory.ranks[0]

    def end_shares(self, inner: Optimizer, failed: bool) -> None:
        """All shares of a round were stepped here, or that has failed; returns when all ranks are so far."""
        heard = self._meet_at_end(_FAILED + self._rank if failed else 0)
        if heard >= _FAILED:
            torn = self._torn_by(heard)
            self.drop_shares(str(torn))
            if not failed:
                raise torn
            return
        if not self._memory.is_common:
            for number in sorted({run.number for run in self.runs}):
                self._shared.spread(self.group, number)
        if self._has_new_state(inner):
            self.share_state(inner)
            self._meet_at_end()
        self._shared.stepped()

    def drop_shares(self, torn: str) -> None:
        """The round comes to nothing. `torn`: what is to be said of shares that may have been stepped."""
        self._shared.accept()
        self._shared.tear(torn)

    def torn(self, why: str) -> str:
        return str(self._torn(why))

    def parameters_change(self) -> None:
        torch.autograd.graph.increment_version(self.parameters)

    def take_gradients(self, inner: Optimizer) -> None:
        """Gives each run its gradient; splits those of which some parameters have none."""
        parameters, runs = self.group.parameters, []
        for run in self.runs:
            gradients = [parameters[index].grad for index in run.indices]
            missing = [gradient is None for gradient in gradients]
            if not any(missing) or all(missing):
                run.take_gradient(gradients)
                runs.append(run)
                continue
            first = run.first
            for part, state in run.split(missing, inner.state.pop(run.values, {})):
                if state:
                    inner.state[part.values] = state
                part.take_gradient(gradients[part.first - first : part.last - first])
                runs.append(part)
        self.runs = runs
        self._by_bucket.clear()

    def share_state(self, inner: Optimizer) -> None:
        """What the steps have added to the state goes to common memory. All ranks together."""
        runs, states = self._with_state(inner, self.runs)
        if keys := self._state.new_keys(runs, states):
            self._state.allocate(keys)
        self._state.bring(runs, states)

    def bring_state(self, inner: Optimizer, stepped: Sequence[Run]) -> None:
        """The same of these runs, by this rank alone: what has no common memory yet stays where it is."""
        self._state.bring(*self._with_state(inner, stepped))

    def _has_new_state(self, inner: Optimizer) -> bool:
        return bool(self._state.new_keys(*self._with_state(inner, self.runs)))

    def _with_state(self, inner: Optimizer, runs: Sequence[Run]) -> tuple[list[Run], list[dict[str, Any]]]:
        stepped = [run for run in runs if run.values in inner.state]
        return stepped, [inner.state[run.values] for run in stepped]

    def plain_state(self, inner: Optimizer) -> Iterable[tuple[nn.Parameter, dict[str, Any]]]:
        """Of each parameter, as the plain optimizer would have it."""
        self._state.spread()
        self.whole.spread_state(self.group.transport)
        yield from self.whole.plain_state()
        for run in self.runs:
            state: dict[str, Any] = inner.state.get(run.values, {})
            for at in range(run.first, run.last) if state else ():
                parameter = self.group.parameters[run.bucket.indices[at]]
                yield parameter, self._state.of_parameter(run, at, state)

    def load(self, inner: Optimizer, plain: Mapping[Tensor, dict[str, Any]]) -> None:
        """Takes over a plain optimizer's state, the same on all ranks."""
        runs: list[Run] = []
        for run in self.runs:
            of_each = [plain.get(self.group.parameters[index], {}) for index in run.indices]
            for part, _ in run.split(list(map(counters, of_each)), {}):
                runs.append(part)
                mine = of_each[part.first - run.first : part.last - run.first]
                if mine[0]:
                    inner.state[part.values] = _state_of(part, mine)
        self.runs = runs
        self._by_bucket.clear()
        self.share_state(inner)
        for parameter in self.whole.mine:
            if state := plain.get(parameter):
                inner.state[parameter] = dict(state)
        if self._memory.meet("the loading of an optimizer's state", said=int(self.whole.has_news(inner))):
            self.whole.tell(inner, self.group.transport)
            self.whole.write_numbers(inner)
        self._memory.meet("the loading of an optimizer's state")


def _state_of(run: Run, of_each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of a run, from that of each of its parameters."""
    return {
        key: run.flatten([state[key] for state in of_each]) if is_like(key, value) else copied(value)
        for key, value in of_each[0].items()
    }
