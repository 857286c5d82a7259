"""Optimizers that step during backward: each bucket's parameters as soon as it is reduced."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsync import _torch, arguments
from gradsync.errors import HookError


class Stepper(Protocol):
    """Steps an optimizer during backward."""

    def __call__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Steps parameters whose gradients were just delivered."""

    def round_closed(self, exchange: Exchange) -> None:
        """Called at the end of each round, on all ranks alike: it may communicate."""


class ShareStepper(Protocol):
    """Steps this rank's share of parameters that lie once a host, during backward."""

    def planned(self) -> None:
        """The round under way has made a plan, and has moved the parameters as it says. All ranks together."""

    def bucket_left(self, parameters: Sequence[nn.Parameter]) -> None:
        """This rank has no use for these any more in this backward: from now on other ranks may step them."""

    def step_share(self, bucket: int, used: Sequence[bool], gradient: Tensor) -> None:
        """The share of a bucket: its gradients, and which of its parameters any rank has used."""

    def round_closed(self, exchange: Exchange, failed: bool) -> None:
        """All shares of a round were given. Returns when all ranks of the host have stepped theirs.

        `failed`: not on this rank.
        """

    def torn(self) -> str:
        """What is to be said if a rank is lost now, or a backward raises; nothing if the parameters are whole."""

    def round_dropped(self) -> None:
        """The round under way comes to nothing."""


class StepInBackward:
    """Steps one optimizer bucket by bucket.

    Learning rates and other settings are read from the optimizer's groups at each step, and its state is
    the optimizer's own: schedules and checkpoints work as ever.
    """

    def __init__(
        self, optimizer: Optimizer, clip_value: float | None, max_norm: float | None, free_gradients: bool
    ) -> None:
        self.optimizer = optimizer
        self.clip_value, self.max_norm = clip_value, max_norm
        self.free_gradients = free_gradients
        self._stepping = False
        self._delivered: list[nn.Parameter] = []  # and to be stepped when the norm of all is known
        refuse_other_steps(optimizer, lambda: not self._stepping)

    def __call__(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.max_norm is None:
            self._step(parameters)
        else:
            self._delivered += parameters

    def _step(self, parameters: Sequence[nn.Parameter]) -> None:
        wanted = {id(parameter) for parameter in parameters}
        groups = [{**group, "params": [p for p in group["params"] if id(p) in wanted]} for group in self._groups()]
        groups = [group for group in groups if group["params"]]
        if not groups:
            return
        if self.clip_value is not None:
            nn.utils.clip_grad_value_([p for group in groups for p in group["params"]], self.clip_value)
        part = self._part()
        part.param_groups = groups
        self._stepping = True
        try:
            with torch.enable_grad():  # `step` turns it off itself, and some look at it first
                part.step()
        finally:
            self._stepping = False
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
        if self.free_gradients:
            for group in groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _part(self) -> Optimizer:
        """An optimizer whose groups may be replaced; it shares the state."""
        return copy.copy(self.optimizer)

    def round_closed(self, exchange: Exchange) -> None:
        """Steps what had to wait for the norm of all gradients."""
        if self.max_norm is not None:
            delivered, self._delivered = self._delivered, []
            gradients = [parameter.grad for parameter in delivered if parameter.grad is not None]
            norm = float(nn.utils.get_total_norm(gradients)) if gradients else 0.0
            factor = clipping_factor(self.optimizer, norm, self.max_norm)
            with torch.no_grad():
                if gradients and factor != 1:
                    torch._foreach_mul_(gradients, factor)
                self._step(delivered)


def refuse_other_steps(optimizer: Optimizer, are_other: Callable[[], bool] = lambda: True) -> None:
    """From now on `step()` of the user's own raises."""

    def refuse(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if are_other():
            raise HookError(
                f"this {type(optimizer).__name__} steps by itself during backward, since gradsync.overlap_optimizer(): "
                "a step() of your own would be a second one. Leave it out; learning-rate schedules go on as before."
            )

    optimizer.register_step_pre_hook(refuse)


def clipping_factor(optimizer: Optimizer, norm: float, max_norm: float) -> float:
    """By which gradients of that norm are multiplied, as torch's `clip_grad_norm_` does; the user may read the norm."""
    optimizer.gradient_norm = norm  # type: ignore[attr-defined]
    factor = max_norm / (norm + 1e-6)
    return factor if factor < 1 or factor != factor else 1.0


class Exchange(Protocol):
    """What a sharded optimizer needs of a transport."""

    rank: int

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None: ...

    def gather(self, numbers: Sequence[int]) -> list[list[int]]: ...


class ShardedStepInBackward(StepInBackward):
    """The same for torch's `ZeroRedundancyOptimizer`: each rank steps the parameters of its shard.

    Their new values reach the other ranks at the end of the round, when all have stepped.
    """

    def __init__(self, optimizer: Any, clip_value: float | None, max_norm: float | None, free_gradients: bool) -> None:
        super().__init__(optimizer, clip_value, max_norm, free_gradients)
        if optimizer.__dict__.get("optim") is None:
            raise HookError(
                "this ZeroRedundancyOptimizer was made with overlap_with_ddp=True, for torch's own hooks. Make it "
                "without, and give it to gradsync.overlap_optimizer()."
            )
        self._stepped: list[nn.Parameter] = []
        self._owners: dict[int, int] = {}

    def _step(self, parameters: Sequence[nn.Parameter]) -> None:
        self._stepped += parameters
        super()._step(parameters)
        if self.free_gradients:  # also of the parameters that other ranks step
            for parameter in parameters:
                parameter.grad = None

    def _groups(self) -> list[dict[str, Any]]:
        """Of this rank's shard, with the settings of the optimizer that schedules know."""
        optimizer: Any = self.optimizer
        both = zip(optimizer.optim.param_groups, optimizer.param_groups, strict=True)
        return [{**local, **whole, "params": local["params"]} for local, whole in both]

    def _part(self) -> Optimizer:
        part: Optimizer = copy.copy(self.optimizer.optim)  # type: ignore[attr-defined]
        return part

    def round_closed(self, exchange: Exchange) -> None:
        """Brings the parameters that were stepped to all ranks."""
        super().round_closed(exchange)
        if not self._owners:
            self._find_owners(exchange)
        by_owner: dict[int, list[Tensor]] = {}
        for parameter in self._stepped:
            if id(parameter) in self._owners:
                by_owner.setdefault(self._owners[id(parameter)], []).append(parameter.detach())
        self._stepped = []
        for owner, values in sorted(by_owner.items()):
            exchange.broadcast(values, owner)

    def _find_owners(self, exchange: Exchange) -> None:
        """Whose shard each parameter is in, by asking everybody once."""
        mine = {id(p) for group in self._groups() for p in group["params"]}
        every = [p for group in self.optimizer.param_groups for p in group["params"]]
        rows = exchange.gather([int(id(p) in mine) for p in every])
        for number, parameter in enumerate(every):
            self._owners[id(parameter)] = next(rank for rank, row in enumerate(rows) if row[number])


class TorchsInBackward:
    """Optimizers that torch's `_apply_optimizer_in_backward` has put on the parameters."""

    def round_closed(self, exchange: Exchange) -> None:
        """Nothing is left to do."""

    def __call__(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            for optimizer in _torch.in_backward_optimizers(parameter):
                optimizer.step()
            if _torch.in_backward_optimizers(parameter):
                parameter.grad = None

    @staticmethod
    def found_on(parameters: Iterable[Tensor]) -> TorchsInBackward | None:
        """Takes over if there are any: their own hooks would step on gradients that nobody reduced yet."""
        parameters = [p for p in parameters if _torch.in_backward_optimizers(p)]
        if not parameters:
            return None
        for parameter in parameters:
            _torch.remove_in_backward_hooks(parameter)
        return TorchsInBackward()


def make_optimizer(optimizer: Any, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """From an optimizer, or from a function that makes one of the parameters."""
    made = optimizer(list(parameters)) if callable(optimizer) and not isinstance(optimizer, Optimizer) else optimizer
    cure = "overlap_optimizer() takes one, or a function that makes one of a list of parameters."
    arguments.instance("optimizer", made, Optimizer, cure)
    found: Optimizer = made
    return found


def make_stepper(
    optimizer: Optimizer, clip_value: float | None, max_norm: float | None, free_gradients: bool
) -> StepInBackward:
    """Of the kind that the optimizer needs."""
    sharded = any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)  # not imported to ask
    return (ShardedStepInBackward if sharded else StepInBackward)(optimizer, clip_value, max_norm, free_gradients)
