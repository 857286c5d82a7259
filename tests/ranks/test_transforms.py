"""`torch.func` and `torch.autograd.functional` over a replica: what they compute is this rank's own affair."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, func, nn
from torch.autograd import forward_ad, functional

import gradsync
from tests.ranks.small import (
    FRONTS,
    TRANSPORTS,
    assert_gradients,
    backward,
    batch,
    build,
    make,
    mean_gradients,
    same_everywhere,
)
from tests.support.ranks import on_ranks

Transform = Callable[[nn.Module, Tensor], Any]
Values = dict[str, Tensor]


def detached(module: nn.Module) -> Values:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def loss_of(module: nn.Module) -> Callable[[Values, Tensor], Tensor]:
    return lambda values, x: func.functional_call(module, values, (x,)).square().mean()


def output_sum(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: module(x).square().sum()


# With the parameters' values passed in.


def functional_call(module: nn.Module, x: Tensor) -> Any:
    return func.functional_call(module, detached(module), (x,))


def gradient(module: nn.Module, x: Tensor) -> Any:
    return func.grad(loss_of(module))(detached(module), x)


def gradient_of_each_sample(module: nn.Module, x: Tensor) -> Any:
    return func.vmap(func.grad(loss_of(module)), in_dims=(None, 0))(detached(module), x)


def gradient_and_value(module: nn.Module, x: Tensor) -> Any:
    return func.grad_and_value(loss_of(module))(detached(module), x)


def along_parameters(module: nn.Module, x: Tensor) -> Any:
    values = detached(module)
    return func.jvp(lambda given: loss_of(module)(given, x), (values,), (values,))


def back_to_parameters(module: nn.Module, x: Tensor) -> Any:
    output, pull = func.vjp(lambda given: func.functional_call(module, given, (x,)), detached(module))  # type: ignore[misc]
    return output, pull(torch.ones_like(output))


def jacobian_of_parameters(module: nn.Module, x: Tensor) -> Any:
    return func.jacrev(lambda given: func.functional_call(module, given, (x,)))(detached(module))


def jacobian_forward_of_parameters(module: nn.Module, x: Tensor) -> Any:
    return func.jacfwd(lambda given: func.functional_call(module, given, (x,)))(detached(module))


def hessian_of_parameters(module: nn.Module, x: Tensor) -> Any:
    values = detached(module)
    name = next(iter(values))
    return func.hessian(lambda one: loss_of(module)({**values, name: one}, x))(values[name])


def ensemble(module: nn.Module, x: Tensor) -> Any:
    stacked = {name: torch.stack([value, value + 1]) for name, value in detached(module).items()}
    return func.vmap(lambda values: func.functional_call(module, values, (x,)))(stacked)


# With the module as it is: its parameters require gradients, and nobody asks for those.


def of_inputs(module: nn.Module, x: Tensor) -> Any:
    return func.grad(output_sum(module))(x)


def of_each_input(module: nn.Module, x: Tensor) -> Any:
    return func.vmap(func.grad(output_sum(module)))(x)


def mapped(module: nn.Module, x: Tensor) -> Any:
    return func.vmap(module)(x)


def along_inputs(module: nn.Module, x: Tensor) -> Any:
    return func.jvp(module, (x,), (x,))


def back_to_inputs(module: nn.Module, x: Tensor) -> Any:
    output, pull = func.vjp(module, x)  # type: ignore[misc]
    return output, pull(torch.ones_like(output))


def jacobians_of_inputs(module: nn.Module, x: Tensor) -> Any:
    return func.jacrev(module)(x), func.jacfwd(module)(x)


def hessian_of_inputs(module: nn.Module, x: Tensor) -> Any:
    return func.hessian(output_sum(module))(x)


def linearized(module: nn.Module, x: Tensor) -> Any:
    output, along = func.linearize(module, x)
    return output, along(x)


def autograd_functional(module: nn.Module, x: Tensor) -> Any:
    return (
        functional.jacobian(module, x),
        functional.jacobian(module, x, create_graph=True),
        functional.hessian(output_sum(module), x),
        functional.vjp(module, x, torch.ones(3, 2)),
        functional.jvp(module, x, x),
        functional.vhp(output_sum(module), x, x),
        functional.hvp(output_sum(module), x, x),
    )


def autograd_functional_of_parameters(module: nn.Module, x: Tensor) -> Any:
    names, values = zip(*detached(module).items(), strict=True)

    def loss(*given: Tensor) -> Tensor:
        return loss_of(module)(dict(zip(names, given, strict=True)), x)

    return functional.jacobian(loss, values), functional.hvp(loss, values, values)


def dual_numbers(module: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(module(forward_ad.make_dual(x, x))))


TRANSFORMS = [
    functional_call,
    gradient,
    gradient_of_each_sample,
    gradient_and_value,
    along_parameters,
    back_to_parameters,
    jacobian_of_parameters,
    jacobian_forward_of_parameters,
    hessian_of_parameters,
    ensemble,
    of_inputs,
    of_each_input,
    mapped,
    along_inputs,
    back_to_inputs,
    jacobians_of_inputs,
    hessian_of_inputs,
    linearized,
    autograd_functional,
    autograd_functional_of_parameters,
    dual_numbers,
]


def train(replica: Any, module: nn.Module, steps: range) -> None:
    """Each step with the gradient of one process on the whole batch."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        wanted = mean_gradients(module, step)
        backward(replica, step)
        assert_gradients(module, wanted)
        optimizer.step()
    same_everywhere(module)


class Wrapped(nn.Module):
    """With the names that the wrapper gives its parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


class Counted:
    """Fails if anything leaves this rank inside."""

    def __init__(self, replica: Any) -> None:
        self._reducer = replica._engine.reducer

    def __enter__(self) -> None:
        self._before = self._reducer.lockstep.launches, self._reducer.rounds

    def __exit__(self, *_: object) -> None:
        assert (self._reducer.lockstep.launches, self._reducer.rounds) == self._before


@FRONTS
@TRANSPORTS
@pytest.mark.filterwarnings("ignore:.*get_attr Node with no underlying reference:UserWarning")  # torch's own linearize
@on_ranks(2)
def test_one_rank_may_transform_alone(front: str, transport: str) -> None:
    """In front of the first round, and between two: right, without the other rank, and without a trace."""
    for transform in TRANSFORMS:
        module = build()
        replica = make(front, module, transport=transport, verify="every")
        for rounds in (range(0), range(2)):
            train(replica, module, rounds)
            gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
            if dist.get_rank() == 1:
                alone = copy.deepcopy(module)
                plain = gradsync.unreplicate(alone) if front == "replicate" else Wrapped(alone)
                with Counted(replica):
                    found = transform(replica, batch(7))
                torch.testing.assert_close(found, transform(plain, batch(7)), msg=transform.__name__)
            for parameter, before in zip(module.parameters(), gradients, strict=True):
                assert (parameter.grad is None) == (before is None)
                assert before is None or torch.equal(parameter.grad, before)  # type: ignore[arg-type]
        train(replica, module, range(2, 4))
        gradsync.verify(replica)


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_training_through_a_transform(front: str, transport: str) -> None:
    """A backward after `vmap`, or through `functional_call` with the module's own parameters, is a round."""
    module = build()
    replica = make(front, module, transport=transport, verify="every")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ways: list[Callable[[Tensor], Tensor]] = [
        func.vmap(replica),
        lambda x: func.functional_call(replica, dict(replica.named_parameters()), (x,)),
        replica,
    ]
    for step in range(6):
        optimizer.zero_grad()
        wanted = mean_gradients(module, step)
        ways[step % 3](batch(dist.get_rank(), step)).square().mean().backward()
        assert_gradients(module, wanted)
        optimizer.step()
    same_everywhere(module)
