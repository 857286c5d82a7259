"""What training code may do with `.grad`, since torch's DistributedDataParallel leaves each one a tensor of its own.

Each use is called after every backward and says what it saw. A plain module in one process, with the mean gradient
over the ranks, must see the same and come to the same parameters.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.dlpack
from torch import Tensor, nn

from tests.ranks.small import backward, batch, same_everywhere

STEPS = 5


@dataclass
class Training:
    """A module, and what its code has noted."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    kept: list[Any] = field(default_factory=list)

    @property
    def gradients(self) -> list[Tensor]:
        found = [parameter.grad for parameter in self.module.parameters()]
        assert all(gradient is not None for gradient in found)
        return found  # type: ignore[return-value]


See = Callable[[Training], object]
momentum = partial(torch.optim.SGD, momentum=0.9)


@dataclass(frozen=True)
class Use:
    see: See
    zero: bool | None = True  # zero_grad's set_to_none; None: gradients add up
    optimizer: Callable[..., torch.optim.Optimizer] = momentum


USES: dict[str, Use] = {}


def use(**settings: Any) -> Callable[[See], See]:
    def register(see: See) -> See:
        USES[see.__name__] = Use(see, **settings)
        return see

    return register


def also(of: str, **settings: Any) -> None:
    USES[f"{of}, {settings}"] = Use(USES[of].see, **settings)


# --- what a gradient is ---------------------------------------------------------------------------------


@use()
def what_it_is(training: Training) -> object:
    return [
        (
            g.is_leaf,
            g.requires_grad,
            g.grad_fn,
            g._is_view(),
            g._base is None,
            g.is_contiguous(),
            g.stride(),
            g.storage_offset(),
            g.untyped_storage().nbytes(),
            type(g),
            g.is_inference(),
        )
        for g in training.gradients
    ]


also("what_it_is", zero=False)


def _saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@use()
def saved_to_a_file(training: Training) -> object:
    """Of its own size, not that of a bucket."""
    for gradient in training.gradients:
        loaded = torch.load(io.BytesIO(_saved(gradient)))
        assert torch.equal(loaded, gradient)
    return [len(_saved(gradient)) for gradient in training.gradients]


@use()
def copied_with_its_module(training: Training) -> object:
    duplicate = nn.Sequential(*copy.deepcopy(list(training.module.children())))
    copies = [parameter.grad for parameter in duplicate.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(copies, training.gradients, strict=True) if a is not None)
    return [None if one is None else one.untyped_storage().nbytes() for one in copies]


@use()
def seen_as_another_type(training: Training) -> object:
    return [gradient.flatten()[:2].view(torch.int64).shape for gradient in training.gradients]


# --- changed in place -----------------------------------------------------------------------------------


@use()
def detached_in_place(training: Training) -> None:
    for gradient in training.gradients:
        gradient.detach_()


also("detached_in_place", zero=False)


@use()
def scaled_in_place(training: Training) -> None:
    for gradient in training.gradients:
        gradient.mul_(0.5)


also("scaled_in_place", zero=None)


@use()
def clipped(training: Training) -> float:
    return round(nn.utils.clip_grad_norm_(training.module.parameters(), 0.01).item(), 6)


@use()
def scaled_as_an_array(training: Training) -> None:
    for gradient in training.gradients:
        array = gradient.numpy()
        array *= 0.5


@use()
def scaled_through_dlpack(training: Training) -> None:
    for gradient in training.gradients:
        torch.utils.dlpack.from_dlpack(gradient).mul_(0.5)


@use(zero=False)
def scaled_by_something_with_a_graph(training: Training) -> object:
    """As a learned scale does; `zero_grad` then calls `detach_`."""
    before = [(gradient.requires_grad, gradient.grad_fn is None) for gradient in training.gradients]
    scale = torch.tensor(0.5, requires_grad=True)
    for gradient in training.gradients:
        gradient.mul_(scale)
    return before


also("scaled_by_something_with_a_graph", zero=True)


@use()
def differentiated_by(training: Training) -> object:
    """A later round's gradient knows nothing of that."""
    before = [gradient.requires_grad for gradient in training.gradients]
    for gradient in training.gradients:
        gradient.requires_grad_()
    return before


also("differentiated_by", zero=False)


@use()
def used_in_a_graph_while_others_change(training: Training) -> list[bool]:
    """Each has a version of its own."""
    first, *others = training.gradients
    x = torch.ones_like(first, requires_grad=True)
    loss = (x * first).sum()
    for gradient in others:
        gradient.mul_(0.5)
    loss.backward()
    assert x.grad is not None
    return [torch.equal(x.grad, first)]


# --- replaced -------------------------------------------------------------------------------------------


@use()
def another_tensor(training: Training) -> None:
    for parameter, gradient in zip(training.module.parameters(), training.gradients, strict=True):
        parameter.grad = gradient.clone() * 0.5


also("another_tensor", zero=False)
also("another_tensor", zero=None)


@use()
def the_same_detached(training: Training) -> None:
    for parameter, gradient in zip(training.module.parameters(), training.gradients, strict=True):
        parameter.grad = gradient.detach()


also("the_same_detached", zero=False)


@use()
def other_data(training: Training) -> None:
    for gradient in training.gradients:
        gradient.data = gradient.data * 0.5


also("other_data", zero=False)
also("other_data", zero=None)


@use()
def other_data_now_and_then(training: Training) -> None:
    if training.step % 2 == 0:
        for gradient in training.gradients[:3]:
            gradient.data = gradient.data * 0.5


@use()
def set_to_another(training: Training) -> None:
    for gradient in training.gradients:
        gradient.set_(gradient * 0.5)  # type: ignore[call-overload]


also("set_to_another", zero=False)


@use()
def shared_with_other_processes(training: Training) -> list[bool]:
    for gradient in training.gradients:
        gradient.share_memory_()
        gradient.mul_(0.5)
    return [gradient.is_shared() for gradient in training.gradients]


also("shared_with_other_processes", zero=False)


# --- kept -----------------------------------------------------------------------------------------------


@use()
def kept_while_a_new_one_comes(training: Training) -> object:
    training.kept.append([(gradient, gradient.clone()) for gradient in training.gradients])
    return [torch.equal(found, wanted) for kept in training.kept for found, wanted in kept]


@use(zero=False)
def the_same_tensor_each_time(training: Training) -> object:
    """Whoever has listed the gradients once sees those of each step in the list."""
    training.kept = training.kept or training.gradients
    gradients = training.gradients
    same = [kept is gradient for kept, gradient in zip(training.kept, gradients, strict=True)]
    return same, [torch.equal(kept, gradient) for kept, gradient in zip(training.kept, gradients, strict=True)]


also("the_same_tensor_each_time", zero=None)


@use(zero=False)
def memory_at_the_same_address(training: Training) -> list[bool]:
    training.kept = training.kept or [gradient.data_ptr() for gradient in training.gradients]
    return [kept == gradient.data_ptr() for kept, gradient in zip(training.kept, training.gradients, strict=True)]


@use(zero=False)
def a_part_of_the_same_tensor_each_time(training: Training) -> object:
    training.kept = training.kept or [gradient[0] for gradient in training.gradients]
    return [torch.equal(kept, gradient[0]) for kept, gradient in zip(training.kept, training.gradients, strict=True)]


also("a_part_of_the_same_tensor_each_time", zero=None)


@use(zero=None)
def listed_once_and_zeroed_together(training: Training) -> None:
    training.kept = training.kept or training.gradients
    training.optimizer.step()
    torch._foreach_zero_(training.kept)


@use()
def kept_in_part_while_a_new_one_comes(training: Training) -> object:
    training.kept.append([(gradient[0], gradient[0].clone()) for gradient in training.gradients[1:]])
    return [torch.equal(found, wanted) for kept in training.kept for found, wanted in kept]


@use()
def kept_in_a_graph_while_a_new_one_comes(training: Training) -> object:
    x = [torch.ones_like(gradient, requires_grad=True) for gradient in training.gradients]
    for loss, of, wanted in training.kept:
        loss.backward()
        assert torch.equal(of.grad, wanted)
    losses = [(one * gradient).sum() for one, gradient in zip(x, training.gradients, strict=True)]
    training.kept = [(loss, one, g.clone()) for loss, one, g in zip(losses, x, training.gradients, strict=True)]
    return None


# --- optimizers -----------------------------------------------------------------------------------------


@use(optimizer=partial(torch.optim.AdamW, fused=True))
def nothing(training: Training) -> None:
    pass


also("nothing", optimizer=partial(torch.optim.AdamW, foreach=True))
also("nothing", optimizer=partial(momentum, fused=True), zero=False)


# --- all of them ----------------------------------------------------------------------------------------


def build() -> nn.Sequential:
    """Sizes that no vector register likes, and layouts of all kinds."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 3, 1),
        nn.Conv2d(3, 3, 2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(27, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    )
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _grad(parameter: nn.Parameter) -> Tensor | None:
    return parameter.grad


def _value(parameter: nn.Parameter) -> Tensor:
    return parameter


def _same(module: nn.Module, alone: nn.Module, what: Callable[[nn.Parameter], Tensor | None]) -> None:
    for (name, found), wanted in zip(module.named_parameters(), alone.parameters(), strict=True):
        text = partial("{}, {}: {}".format, what.__name__, name)
        torch.testing.assert_close(what(found), what(wanted), rtol=1e-5, atol=1e-6, msg=text)


def check_use(name: str, replicate: Callable[[nn.Module], Any]) -> None:
    of = USES[name]
    module, alone = build(), build()
    front = replicate(module)
    trainings = [Training(m, of.optimizer(m.parameters(), lr=0.05)) for m in (module, alone)]
    ours, single = trainings
    for step in range(STEPS):
        for one in trainings:
            one.step = step
            if of.zero is not None:
                one.optimizer.zero_grad(set_to_none=of.zero)
        backward(front, step)
        for part in range(dist.get_world_size()):
            (alone(batch(part, step)).square().mean() / dist.get_world_size()).backward()
        assert of.see(ours) == of.see(single), f"{name}, step {step}"
        _same(module, alone, _grad)
        for one in trainings:
            one.optimizer.step()
        _same(module, alone, _value)
        same_everywhere(module)
