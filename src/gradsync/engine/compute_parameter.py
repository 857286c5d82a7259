"""Parameters that compute in another form than the one they are registered in.

With a device mesh the registered parameters are DTensors, for optimizers, state dicts and
checkpoints; with a precision policy they are in full precision. Forward and backward use another
parameter instead, the compute parameter: the plain local tensor, which shares its memory, or a copy in
low precision. Compute parameters are swapped into the module before forward and out after backward.

To the rest of the engine it looks like a parameter: it has a `.grad`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradsync import _torch

Site = tuple[dict[str, nn.Parameter | None], str]  # the `_parameters` of a submodule, and the key in it


@dataclass(eq=False)
class ComputeParameter:
    """One parameter with two forms, and all places of the module that hold it."""

    registered: nn.Parameter
    compute: nn.Parameter
    sites: Sequence[Site]
    reduce_dtype: torch.dtype
    apart: Sequence[str] = ()
    """Dimensions of the mesh of a computing DTensor over which its gradient is reduced by us, not by DTensor."""
    _accumulated: Tensor | None = None  # of backwards without synchronization, in `reduce_dtype`
    _given: tuple[Tensor, Tensor] | None = None  # a local gradient, and the registered form it was given

    def __post_init__(self) -> None:
        # Converted forms of what stands in for the parameter, and where: owner, key, what was there, what is now.
        self._converted: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, Tensor]] = []
        inner = _torch.local(self.registered)
        self._offloaded = inner.device != _torch.local(self.compute).device
        self._made_for = inner.dtype, inner.device, inner.shape, _shares_memory(inner, _torch.local(self.compute))

    def outdated(self) -> bool:
        """Whether the registered parameter was converted, moved or given other memory since."""
        inner = _torch.local(self.registered)
        shares = _shares_memory(inner, _torch.local(self.compute))
        return self._made_for != (inner.dtype, inner.device, inner.shape, shares)

    def move_to(self, sites: Sequence[Site]) -> None:
        """Other places of the module hold it now."""
        self.sites = sites

    def register(self) -> None:
        """Puts the registered form into the module, whatever it was made from."""
        for owner, key in self.sites:
            owner[key] = self.registered

    def show_compute(self) -> None:
        """Puts the compute parameter into the module, or in its own place what stands in, converted.

        `torch.func.functional_call` puts tensors there for the time of a forward.
        """
        for owner, key in self.sites:
            there = _held_by(owner, key)
            if there is self.registered:
                owner[key] = self.compute
            elif there is not None and there is not self.compute:
                converted = _torch.in_form_to_compute(there, self.compute)
                if converted is not there:
                    owner[key] = converted  # type: ignore[assignment]
                    self._converted.append((owner, key, there, converted))

    def show_registered(self) -> None:
        """Puts back what was there."""
        for owner, key, there, converted in self._converted:
            if _held_by(owner, key) is converted:
                owner[key] = there
        self._converted.clear()
        for owner, key in self.sites:
            if _held_by(owner, key) is self.compute:
                owner[key] = self.registered

    def refresh(self) -> None:
        """Brings the compute parameter up to date with the registered parameter's values."""
        if self.compute.requires_grad is not self.registered.requires_grad:
            self.compute.requires_grad = self.registered.requires_grad  # inside a transform the method is refused
        registered, compute = _torch.local(self.registered), _torch.local(self.compute)
        if not _shares_memory(registered, compute):
            # Every time: no version counter tells of all the ways to change a parameter. Through `.data`: the
            # graph of an earlier forward, whose values are the same, does not take it for a mistake. A transform
            # of `torch.func` would not have what it did not make changed.
            with _torch.outside_of_transforms():
                compute.data.copy_(registered.detach())

    # --- gradients, as if this were a parameter --------------------------------------------------

    @property
    def grad(self) -> Tensor | None:
        """What this rank has to bring, as a local tensor, up to the latest `fold_in`."""
        return self._earlier() if self._folds else self._accumulated

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        """Gives the registered parameter its reduced gradient; None while a bucket is under way."""
        self.compute.grad = None
        self._accumulated = None
        if self._folds:
            self._give(gradient)
        elif gradient is not None:
            exact = gradient.to(_torch.local(self.registered))
            earlier = self._earlier()
            self._give(exact if earlier is None else earlier.add_(exact))

    def fold_in(self) -> None:
        """Takes what backward has left on the compute parameter since the last time."""
        fresh = self._take_fresh()
        if not self._folds:
            self._accumulated = fresh
        elif (earlier := self._earlier()) is None:
            self._give(fresh)
        elif fresh is not None:
            earlier.add_(fresh)

    def release_given(self) -> bool:
        """Lets go of what a round has delivered, unless the registered gradient still is that: then False."""
        if self._given is not None and self.registered.grad is self._given[1]:
            return False
        self._given = None
        return True

    def shows_what_nobody_gave(self) -> bool:
        return self.compute.grad is not None or (
            self.registered.grad is not None
            and not (self._given is not None and self.registered.grad is self._given[1])
        )

    def give_back_to_compute(self) -> None:
        """Puts what was delivered, or collected, into `.grad` of what computes, for whoever adds to it or scales it."""
        if not self._folds or self.compute.grad is not None or self.compute.dtype is not self.registered.dtype:
            return
        self.fold_in()
        gradient = self.grad
        if gradient is not None:
            self.compute.grad = _torch.in_form_of(self.compute, gradient.clone())
            self.registered.grad = None

    def zero_grad(self, set_to_none: bool) -> None:
        """Throws away what is new and what an earlier round left."""
        self.compute.grad = self._accumulated = None
        if set_to_none:
            self.registered.grad = None
        elif self.registered.grad is not None:
            self.registered.grad.zero_()

    @property
    def _folds(self) -> bool:
        """Whether what an earlier round left in `.grad` travels along with what is new.

        In the same dtype it does, as it does for a plain parameter. Otherwise it would lose precision
        on the way, so the registered gradient stays where it is and the result is added to it. So does
        that of a parameter that is offloaded, on its own device.
        """
        return self.reduce_dtype is self.registered.dtype and not self._offloaded

    def _take_fresh(self) -> Tensor | None:
        """What backward left on the compute parameter since the last time, in the dtype of the bucket."""
        fresh, self.compute.grad = self.compute.grad, None
        if fresh is None:
            return self._accumulated
        local = _torch.local_gradient(fresh, self.compute, self.apart)
        if self._accumulated is None:
            return local.to(self.reduce_dtype)
        return self._accumulated.add_(local)

    def _earlier(self) -> Tensor | None:
        """The local tensor of the registered gradient; the very object we gave, so that it is recognized."""
        gradient = self.registered.grad
        if gradient is None:
            return None
        if self._given is not None and self._given[1] is gradient:
            return self._given[0]
        return _torch.local(gradient)

    def _give(self, gradient: Tensor | None) -> None:
        if gradient is None:
            self.registered.grad = None
            return
        if self._given is None or self._given[0] is not gradient:
            self._given = gradient, _torch.in_form_of(self.registered, gradient)
        self.registered.grad = self._given[1]


def _held_by(owner: dict[str, nn.Parameter | None], key: str) -> nn.Parameter | None:
    """(A script module's table is no dictionary.)"""
    return owner[key] if key in owner else None  # noqa: SIM401


def _shares_memory(first: Tensor, second: Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.dtype is second.dtype


class _Forwards(threading.local):
    """The forwards of replicas that run in this thread, one inside the other."""

    def __init__(self) -> None:
        self.depth = 0
        self.met: dict[ComputeParameters, bool] = {}
        """Whose forwards ran inside the outermost one, and whether they go on computing after it."""


_forwards = _Forwards()


class ComputeParameters:
    """All compute parameters of one engine: which form of the parameters is in the module.

    It computes from the beginning of a forward to the end of its backward. Replicas may be nested: what computed in
    an inner forward does so until the outermost one ends, for whoever is around it may use the parameters again.
    """

    def __init__(self) -> None:
        self._compute_parameters: Sequence[ComputeParameter] = ()
        self._inside: list[ComputeParameters] = []  # those of replicas that computed in the latest forward of this one
        self.computing = False
        self._until_backward_ends = True

    def __bool__(self) -> bool:
        """Whether there are any, here or in replicas inside this one."""
        return bool(self._compute_parameters or self._inside)

    @property
    def hidden(self) -> bool:
        """Whether there are some, and the module shows what is registered."""
        return bool(self._compute_parameters) and not self.computing

    def hold(self, compute_parameters: Sequence[ComputeParameter]) -> None:
        """From now on other ones, which are registered."""
        self._compute_parameters = compute_parameters
        self.to_registered()

    def begin_forward(self, recomputed: bool) -> None:
        """`recomputed`: inside a backward, to whose graph values of before belong."""
        _forwards.depth += 1
        if not (recomputed and self.computing):
            self.to_compute()

    def end_forward(self, backward_follows: bool) -> None:
        _forwards.depth -= 1
        _forwards.met[self] = backward_follows and _forwards.met.get(self, True)
        if _forwards.depth == 0:
            met, _forwards.met = _forwards.met, {}
            self._inside = [
                compute_parameters
                for compute_parameters in met
                if compute_parameters and compute_parameters is not self
            ]
            for compute_parameters, goes_on in met.items():
                if not (goes_on and backward_follows):
                    compute_parameters.to_registered()

    def hide_after_backward(self, flag: bool) -> None:
        """Whether the end of a backward shows the registered parameters; if not, who asks for them."""
        self._until_backward_ends = flag

    def end_backward(self) -> None:
        if not self._until_backward_ends:
            return
        if _forwards.depth:  # it was started in a forward
            _forwards.met[self] = False
            return
        for compute_parameters in (self, *self._inside):  # of which some may have had no part in it
            if compute_parameters._until_backward_ends:
                compute_parameters.to_registered()

    def to_compute(self) -> None:
        """The module computes with the compute parameters."""
        for compute_parameter in self._compute_parameters:
            compute_parameter.refresh()
            compute_parameter.show_compute()
        self.computing = bool(self._compute_parameters)

    def to_registered(self) -> None:
        """The module shows its registered parameters."""
        for compute_parameter in self._compute_parameters:
            compute_parameter.show_registered()
        self.computing = False

    def zero_grad(self, set_to_none: bool) -> None:
        for compute_parameter in self._compute_parameters:
            compute_parameter.zero_grad(set_to_none)

    def give_back_to_compute(self) -> None:
        for compute_parameter in self._compute_parameters:
            compute_parameter.give_back_to_compute()

    def fold_in(self) -> None:
        """After a backward without synchronization: gradients go where `zero_grad` finds them."""
        for compute_parameter in self._compute_parameters:
            compute_parameter.fold_in()
