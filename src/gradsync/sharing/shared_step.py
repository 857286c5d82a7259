"""How an elementwise optimizer is stepped by shares: a plain one of the same class, over this rank's runs."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsync import _torch
from gradsync.engine.engine import Engine
from gradsync.engine.step import owner_of
from gradsync.guard import unsynchronized
from gradsync.sharing import kinds
from gradsync.sharing.blocks import step_in_blocks
from gradsync.sharing.counters import copied
from gradsync.sharing.part import Part

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SCALER = ("grad_scale", "found_inf")  # what torch's GradScaler tells a fused optimizer


class SharedStep:
    """Of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._elementwise = kinds.is_elementwise(type(optimizer))
        self._inner = _twin(optimizer)
        self._parts: list[Part] = []
        self._alone: list[list[Tensor]] = []  # for each group, what every rank has for itself, and steps
        self._sizes: list[int] = []

    @_torch.outside_of_graphs
    def step(self, optimizer: Optimizer) -> None:
        """This rank's share of all parameters that have a gradient."""
        for engine in _engines_of(optimizer):
            assert engine.shared is not None
            engine.shared.check_place(engine.transport.rank)
        if not self._is_current(optimizer):
            self._rebuild(optimizer)
        inner = self._inner
        self._take_settings(optimizer)
        with torch.no_grad():
            for part in self._parts:
                part.take_gradients(inner)
        for number, group in enumerate(inner.param_groups):
            group["params"] = [tensor for part in self._parts for tensor in part.of_group(number)] + self._alone[number]
        for part in self._parts:
            part.begin_step()
        try:
            with unsynchronized.trusted():
                self._step_inner()
        except BaseException:
            for part in self._parts[:1]:  # where the others hear of it, and go no further
                part.fail_step()
            raise
        with torch.no_grad():
            for part in self._parts:
                part.end_step(inner)

    # --- shares that are stepped as they come ----------------------------------------------------

    def plan_shares(self, optimizer: Optimizer) -> None:
        """For what is planned now. All ranks together."""
        self._rebuild(optimizer)
        self._part.check_all_in_runs()

    def step_shares(self, optimizer: Optimizer, shares: Iterable[tuple[int, Sequence[bool], Tensor]]) -> None:
        """Of these buckets: their numbers, which of their parameters have gradients, and this rank's share of those."""
        inner, part = self._inner, self._part
        runs = [run for share in shares for run in part.take_share(inner, *share)]
        groups = {number: [run.values for run in runs if run.group == number] for number in {run.group for run in runs}}
        self._take_settings(optimizer)
        inner.param_groups, all_groups = (
            [{**inner.param_groups[n], "params": groups[n]} for n in sorted(groups)],
            inner.param_groups,
        )
        try:
            with torch.enable_grad():  # `step` turns it off itself, and some look at it first
                self._step_inner()
            part.bring_state(inner, runs)
        finally:
            inner.param_groups = all_groups
            for run in runs:
                run.let_gradient_go()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it

    def end_shares(self, failed: bool) -> None:
        self._part.end_shares(self._inner, failed)

    def drop_shares(self, torn: str) -> None:
        for part in self._parts:
            part.drop_shares(torn)

    def torn(self, why: str) -> str:
        return self._part.torn(why)

    def parameters_change(self) -> None:
        self._part.parameters_change()

    @property
    def first_rank(self) -> int:
        return self._part.first_rank

    @property
    def _part(self) -> Part:
        (part,) = self._parts
        return part

    # ---------------------------------------------------------------------------------------------

    def _step_inner(self) -> None:
        if self._elementwise:
            step_in_blocks(self._inner)
        else:
            self._inner.step()

    def _take_settings(self, optimizer: Optimizer) -> None:
        """Learning rates and the like, as they are now."""
        for of_inner, group in zip(self._inner.param_groups, optimizer.param_groups, strict=True):
            of_inner.update({key: value for key, value in group.items() if key != "params"})
        for name in _SCALER:
            self._inner.__dict__.pop(name, None)
            if name in optimizer.__dict__:
                setattr(self._inner, name, optimizer.__dict__[name])

    def plain_state(self) -> dict[Tensor, dict[str, Any]]:
        """Of all parameters, also of those that other ranks step: what is in memory, not a copy."""
        alone = {p: self._inner.state[p] for group in self._alone for p in group if p in self._inner.state}
        return {p: state for part in self._parts for p, state in part.plain_state(self._inner)} | alone

    def forget(self) -> None:
        """The optimizer was given another state: what it steps next is built anew from that."""
        self._sizes = []
        self._parts = []

    def _is_current(self, optimizer: Optimizer) -> bool:
        return _sizes(optimizer) == self._sizes and all(part.is_current for part in self._parts)

    def _rebuild(self, optimizer: Optimizer) -> None:
        """For other parameters, or other buckets; the state stays what it was."""
        plain = {p: {k: copied(v) for k, v in state.items()} for p, state in optimizer.state.items()}
        optimizer.__dict__["state"] = {}  # from here on it is here
        engines = _engines_of(optimizer)
        groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._parts = [Part(engine, groups, self._elementwise) for engine in engines]
        shared = {id(p) for part in self._parts for p in part.parameters}
        self._alone = [[p for p in group["params"] if id(p) not in shared] for group in optimizer.param_groups]
        self._sizes = _sizes(optimizer)
        self._inner.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
        self._inner.state.clear()
        for one in (p for group in self._alone for p in group if p in plain):
            self._inner.state[one] = plain[one]
        with torch.no_grad():
            for part in self._parts:
                part.load(self._inner, plain)


def _twin(optimizer: Optimizer) -> Optimizer:
    """A plain one of the same class and with the same settings, but with a state and with hooks of its own."""
    made: Optimizer = object.__new__(type(optimizer))
    hooks = {name: OrderedDict[int, Any]() for name in _HOOKS}
    made.__dict__.update(optimizer.__dict__ | hooks | {"state": defaultdict(dict)})
    return made


def _sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _engines_of(optimizer: Optimizer) -> list[Engine]:
    """The replicas with shared parameters of which an optimizer has some, in the order of their serial numbers."""
    found: dict[Engine, None] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = owner_of(parameter)
            if isinstance(owner, Engine) and owner.shared is not None and owner.shared.memory is not None:
                found[owner] = None
    return sorted(found, key=lambda engine: engine.reducer.lockstep.serial)
