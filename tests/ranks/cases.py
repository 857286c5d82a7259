"""The cases in which every front must train as one process does. Each is a step, written once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.support.equality import Case, Env, Step

CASES: dict[str, Case] = {}


def case(build: Callable[[], nn.Module], **settings: Any) -> Callable[[Step], Step]:
    def register(step: Step) -> Step:
        name = step.__name__
        CASES[name] = Case(name, build, step, **settings)
        return step

    return register


def also(name: str, of: str, **settings: Any) -> None:
    """The same step under other settings."""
    CASES[name] = replace(CASES[of], name=name, **settings)


# --- modules -----------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


class Branches(nn.Module):
    """A trunk, two branches of which one is taken, and a part that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 6)
        self.left = nn.Linear(6, 2)
        self.right = nn.Linear(6, 2)
        self.never = nn.Linear(6, 2)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        return self.left(hidden) if left else self.right(hidden)


class Checkpointed(nn.Module):
    """The same layer several times, behind activation checkpoints, and one part that is unused."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(4, 4)
        self.layer = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self._block, x, use_reentrant=self.reentrant)
        return x

    def _block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Loss(nn.Module):
    """A module that is trained through a method of its own, never through forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, x: Tensor) -> Tensor:
        return (self.body(x) * self.scale).square().mean()


def mean_square(env: Env, **kwargs: Any) -> None:
    env.backward(env.front(env.x(), **kwargs).square().mean())


# --- 1. ways to reach backward -----------------------------------------------------------------------


@case(mlp, torch={})
def through_forward(env: Env) -> None:
    mean_square(env)


@case(mlp)
def through_the_module_itself(env: Env) -> None:
    env.backward(env.module(env.x()).square().mean())


@case(Loss)
def through_another_method(env: Env) -> None:
    assert isinstance(env.module, Loss)
    env.backward(env.module.loss(env.x()))


@case(mlp)
def through_a_submodule(env: Env) -> None:
    assert isinstance(env.module, nn.Sequential)
    env.backward(env.module[2](torch.tanh(env.module[0](env.x()))).square().mean())


@case(mlp)
def loss_on_the_parameters(env: Env) -> None:
    env.backward(sum((p.square().sum() * (env.rank + 1) for p in env.module.parameters()), torch.zeros(())))


@case(mlp, torch={})
def loss_on_outputs_and_parameters(env: Env) -> None:
    penalty = sum((p.square().sum() for p in env.module.parameters()), torch.zeros(()))
    env.backward(env.front(env.x()).square().mean() + 0.01 * penalty)


# --- 2. accumulation ---------------------------------------------------------------------------------


def _accumulate(env: Env) -> None:
    with env.no_sync():
        mean_square(env)
        mean_square(env)
    mean_square(env)


@case(mlp, torch={})
def accumulation(env: Env) -> None:
    _accumulate(env)


also("accumulation_zeroing_in_place", "accumulation", zero=False)
also("accumulation_without_views", "accumulation", options={"gradient_as_bucket_view": False})
also("accumulation_in_a_static_graph", "accumulation", options={"static_graph": True}, torch=None)
also("accumulation_in_one_bucket", "accumulation", options={"bucket_cap_mb": 25})


@case(mlp)
def accumulation_around_backward_only(env: Env) -> None:
    loss = env.front(env.x()).square().mean()
    with env.no_sync():
        env.backward(loss)
    mean_square(env)


@case(mlp)
def accumulation_by_setter(env: Env) -> None:
    if not env.alone:
        env.front.set_requires_gradient_sync(False)  # type: ignore[attr-defined]
    mean_square(env)
    if not env.alone:
        env.front.set_requires_gradient_sync(True)  # type: ignore[attr-defined]
    mean_square(env)


@case(Branches)
def accumulation_over_different_branches(env: Env) -> None:
    with env.no_sync():
        mean_square(env, left=True)
    mean_square(env, left=False)


@case(mlp, zero=False, torch={})
def zeroing_in_place(env: Env) -> None:
    mean_square(env)


@case(mlp, zero=None)
def zeroing_before_forward_and_never_stepping(env: Env) -> None:
    if env.step % 2 == 0 and (env.rank == 0 or not env.alone):
        env.module.zero_grad(set_to_none=env.step % 4 == 0)
    mean_square(env)


# --- 3. unused parameters ----------------------------------------------------------------------------


@case(Branches, torch={"find_unused_parameters": True})
def never_used(env: Env) -> None:
    mean_square(env, left=True)


@case(Branches, torch={"find_unused_parameters": True})
def branch_by_step(env: Env) -> None:
    mean_square(env, left=env.step % 2 == 0)


@case(Branches, torch={"find_unused_parameters": True})
def branch_by_rank(env: Env) -> None:
    mean_square(env, left=env.rank == 0)


@case(Branches, torch={"find_unused_parameters": True})
def branch_by_rank_and_step(env: Env) -> None:
    mean_square(env, left=(env.rank + env.step) % 3 == 0)


also("branch_zeroing_in_place", "branch_by_rank_and_step", zero=False)
also("branch_without_views", "branch_by_rank_and_step", options={"gradient_as_bucket_view": False})
also("branch_static_graph", "never_used", options={"static_graph": True}, torch={"static_graph": True})


@case(Branches, zero=None)
def branches_accumulate_without_zeroing(env: Env) -> None:
    mean_square(env, left=(env.rank + env.step) % 3 == 0)


@case(Branches)
def a_rank_that_uses_nothing(env: Env) -> None:
    x = env.x()
    if env.rank == 0:
        env.backward(env.front(x, left=True).square().mean())
    else:  # its loss reaches only the trunk, through the second backward of the same forward
        hidden = env.front(x, left=False)
        env.backward((hidden * 0).sum() + 0 * env.front(x, left=True).sum())


SKIPPED = {"skip_all_reduce_unused_params": True}
also("branch_skipped", "branch_by_rank_and_step", options=SKIPPED)
also("branch_skipped_zeroing_in_place", "branch_by_rank_and_step", options=SKIPPED, zero=False)
also("branch_skipped_without_zeroing", "branches_accumulate_without_zeroing", options=SKIPPED)
also("nothing_skipped", "accumulation", options=SKIPPED)


# --- 4. activation checkpointing ---------------------------------------------------------------------


@case(lambda: Checkpointed(reentrant=False), torch={"find_unused_parameters": True})
def checkpoint_not_reentrant(env: Env) -> None:
    mean_square(env)


@case(lambda: Checkpointed(reentrant=True), torch={"static_graph": True})
def checkpoint_reentrant(env: Env) -> None:
    mean_square(env)


@case(lambda: Checkpointed(reentrant=True))
def checkpoint_reentrant_more_often_now_and_then(env: Env) -> None:
    mean_square(env, times=[1, 1, 3, 2][env.step])


@case(lambda: Checkpointed(reentrant=True))
def checkpoint_reentrant_differs_by_rank(env: Env) -> None:
    mean_square(env, times=1 + (env.rank + env.step) % 3)


also(
    "checkpoint_late_without_views", "checkpoint_reentrant_differs_by_rank", options={"gradient_as_bucket_view": False}
)
also("checkpoint_late_skipped", "checkpoint_reentrant_differs_by_rank", options=SKIPPED)
also("checkpoint_late_zeroing_in_place", "checkpoint_reentrant_differs_by_rank", zero=False)


@case(lambda: Checkpointed(reentrant=True))
def checkpoint_reentrant_past_the_front(env: Env) -> None:
    assert isinstance(env.module, Checkpointed)
    x = env.x().requires_grad_()
    for _ in range(1 + env.step % 2):
        x = checkpoint(env.module._block, x, use_reentrant=True)
    env.backward(x.square().mean())


@case(mlp)
def everything_inside_one_reentrant_checkpoint(env: Env) -> None:
    out = checkpoint(env.front, env.x().requires_grad_(), use_reentrant=True)
    env.backward(out.square().mean())


# --- 5. several forwards, several backwards, many kinds of outputs -----------------------------------


@case(mlp, torch={})
def two_forwards_one_backward(env: Env) -> None:
    first, second = env.front(env.x()), env.front(env.x())
    env.backward(first.square().mean() + second.sin().mean())


@case(mlp)
def two_backwards(env: Env) -> None:
    mean_square(env)
    mean_square(env)


@case(mlp)
def a_retained_graph_twice(env: Env) -> None:
    loss = env.front(env.x()).square().mean()
    env.backward(loss, retain_graph=True)
    env.backward(loss)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.judge = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x: Tensor, made: bool) -> Tensor:
        return self.judge(self.maker(x)) if made else self.judge(x)


@case(Gan)
def gan_with_batch_norm(env: Env) -> None:
    real, fake = env.front(env.x(), made=False), env.front(env.x(), made=True)
    env.backward(real.mean() - fake.mean(), retain_graph=True)
    env.backward(fake.square().mean())


class Point(NamedTuple):
    a: Tensor
    b: Tensor


@dataclass
class Record:
    value: Tensor
    note: str
    inner: dict[str, Any]


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Record:
        point = Point(self.a(x), self.b(x))
        return Record(self.a(x), "note", {"point": point, "none": None, "list": [self.b(x), 3]})


@case(Outputs)
def nested_outputs_partly_used(env: Env) -> None:
    out = env.front(env.x())
    env.backward(out.inner["point"].a.square().mean())
    if env.step > 1:
        env.backward(env.front(env.x()).inner["list"][0].square().mean())


@case(mlp)
def a_forward_whose_output_is_ignored(env: Env) -> None:
    env.front(env.x())
    mean_square(env)


@case(mlp)
def gradient_penalty_by_autograd_grad(env: Env) -> None:
    x = env.x().requires_grad_()
    out = env.front(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    env.backward(out.square().mean() + slope.square().mean())


@case(mlp)
def autograd_grad_on_one_rank_alone(env: Env) -> None:
    if env.rank == 0:
        x = env.x().requires_grad_()
        torch.autograd.grad(env.front(x).sum(), x)
        torch.autograd.grad(env.front(x).sum(), list(env.module.parameters()))
        env.front(x).sum().backward(inputs=[x])
    mean_square(env)


# --- 6. parameters of every kind, changed while training ---------------------------------------------


@case(mlp)
def freezing_and_unfreezing(env: Env) -> None:
    assert isinstance(env.module, nn.Sequential)
    env.module[0].requires_grad_(env.step != 1)
    env.module[2].requires_grad_(env.step != 2)
    env.module.zero_grad() if env.rank == 0 and env.alone else None
    mean_square(env)


def _frozen_at_first() -> nn.Module:
    module = mlp()
    assert isinstance(module, nn.Sequential)
    module[0].requires_grad_(False)
    return module


@case(_frozen_at_first, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
def unfrozen_later(env: Env) -> None:
    assert isinstance(env.module, nn.Sequential)
    env.module[0].requires_grad_(env.step >= 2)
    mean_square(env)


@case(mlp)
def frozen_while_a_backward_passes_through(env: Env) -> None:
    """As a GAN's discriminator is while its generator learns."""
    mean_square(env)
    env.module.requires_grad_(False)
    env.front(env.x().requires_grad_()).square().mean().backward()
    env.module.requires_grad_(True)
    mean_square(env)


@case(mlp, dtype=torch.float32, tolerance=1e-6)
def float32(env: Env) -> None:
    mean_square(env)


@case(mlp, dtype=torch.float32, tolerance=1e-6)
def converted_to_double_in_the_middle(env: Env) -> None:
    if env.step == 2 and (env.rank == 0 or not env.alone):
        env.module.double()
    dtype = next(env.module.parameters()).dtype
    env.backward(env.front(env.x().to(dtype)).square().mean())


@case(mlp, zero=None)
def loaded_by_assignment_in_the_middle(env: Env) -> None:
    if env.rank == 0 or not env.alone:
        env.module.zero_grad()
        state = {key: value.clone() * 0.9 for key, value in env.module.state_dict().items()}
        env.module.load_state_dict(state, assign=True)
    mean_square(env)


def _weight_norm() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh(), parametrizations.orthogonal(nn.Linear(4, 4))
    )


@case(_weight_norm, torch={})
def parametrized(env: Env) -> None:
    mean_square(env)


def _tied() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


@case(_tied, torch={})
def tied_weights(env: Env) -> None:
    mean_square(env)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


@case(Recurrent, torch={})
def lstm(env: Env) -> None:
    env.backward(env.front(env.x(2, 5, 4)).square().mean())


def _channels_last() -> nn.Module:
    model: Any = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 3))
    return model.to(memory_format=torch.channels_last)


@case(_channels_last, torch={}, tolerance=1e-10)
def channels_last(env: Env) -> None:
    env.backward(env.front(env.x(2, 3, 8, 8).to(memory_format=torch.channels_last)).square().mean())


class Strange(nn.Module):
    """Scalars, empty parameters, transposed and expanded layouts, several dtypes, complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(4, 5).t())
        self.strided = nn.Parameter(torch.randn(8, 4)[::2])
        self.single = nn.Parameter(torch.randn(3, dtype=torch.float32))
        self.complex = nn.Parameter(torch.randn(2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        y = self.scalar * (x @ self.transposed.t()).sum() + (x @ self.strided.t()).square().sum() + self.empty.sum()
        return y + (self.single.double() ** 2).sum() * x.mean() + (self.complex * self.complex.conj()).real.sum()


@case(Strange, tolerance=1e-6)  # one of its parameters is float32
def strange_parameters(env: Env) -> None:
    env.backward(env.front(env.x()))


@case(lambda: mlp().to(torch.bfloat16), tolerance=0.05)
def bfloat16(env: Env) -> None:
    env.backward(env.front(env.x().bfloat16()).float().square().mean())


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x))


def _words(env: Env) -> Tensor:
    return env.here(torch.randint(20, (6,), generator=torch.Generator().manual_seed(env.step * 8 + env.rank)))


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@case(Words, optimizer=plain_sgd, torch={})
def sparse_embedding(env: Env) -> None:
    env.backward(env.front(_words(env)).square().mean())


@case(Words, optimizer=plain_sgd)
def sparse_embedding_unused_on_a_rank(env: Env) -> None:
    assert isinstance(env.module, Words)
    if env.rank == 0 and env.step != 1:
        env.backward(env.front(_words(env)).square().mean())
    else:
        env.backward(env.module.out(env.x()).square().mean())


@case(lambda: nn.Embedding(20, 4, sparse=True), optimizer=plain_sgd)
def nothing_but_a_sparse_embedding(env: Env) -> None:
    env.backward(env.front(_words(env)).square().mean())


@case(mlp, dtype=torch.float32, tolerance=1e-2)
def autocast(env: Env) -> None:
    with torch.autocast(env.device, torch.bfloat16):
        loss = env.front(env.x()).float().square().mean()
    env.backward(loss)


@case(mlp, dtype=torch.float32, tolerance=1e-6, zero=None)
def grad_scaler_and_clipping(env: Env) -> None:
    """Scaled, unscaled, clipped: what the optimizer sees is the clipped mean."""
    scaler = torch.amp.GradScaler(env.device, init_scale=128.0)
    env.backward(scaler.scale(env.front(env.x()).square().mean()))
    if env.optimizer is not None:
        scaler.unscale_(env.optimizer)
        nn.utils.clip_grad_norm_(env.module.parameters(), 0.1)
        scaler.step(env.optimizer)
        scaler.update()
        if env.step < 3:
            env.optimizer.zero_grad()


@case(mlp)
def tensor_hooks_see_the_local_gradient(env: Env) -> None:
    weight = next(env.module.parameters())
    handle = weight.register_hook(lambda gradient: gradient * (env.rank + 1))
    mean_square(env)
    handle.remove()


@case(mlp)
def post_accumulate_hooks_see_a_gradient(env: Env) -> None:
    seen: list[bool] = []
    hook = lambda p: seen.append(p.grad is not None)  # noqa: E731
    handles = [p.register_post_accumulate_grad_hook(hook) for p in env.module.parameters()]
    mean_square(env)
    for handle in handles:
        handle.remove()
    assert seen == [True] * len(handles)


# --- 7. optimizers -----------------------------------------------------------------------------------


def _adam(**settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.01, **settings)


@case(mlp, optimizer=_adam(foreach=True), tolerance=1e-10, torch={})
def foreach_adamw(env: Env) -> None:
    mean_square(env)


also("fused_adamw", "foreach_adamw", optimizer=_adam(fused=True))
also(
    "parameter_groups",
    "through_forward",
    optimizer=lambda ps: torch.optim.SGD([{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(ps)]),
)


@case(mlp, zero=None, optimizer=lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3), tolerance=1e-9)
def lbfgs_with_a_closure(env: Env) -> None:
    """All ranks use the same data, so that the oracle's closure can be that of any rank."""
    if env.optimizer is None:
        return
    x = env.here(torch.randn(3, 4, generator=torch.Generator().manual_seed(env.step)))

    def closure() -> float:
        env.module.zero_grad()
        loss = env.front(x).square().mean()
        loss.backward()
        return loss.item()

    env.optimizer.step(closure)


# --- more --------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.0), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.body(x), dim=1)


@case(Norm, torch={})
def batch_norm(env: Env) -> None:
    mean_square(env)


@case(mlp, options={"reduce": "sum"}, tolerance=1e-11)
def summed(env: Env) -> None:
    env.front(env.x()).square().mean().backward()


@case(mlp, options={"reduce": "sum"}, tolerance=1e-11, zero=None)
def summed_with_autograd_grad_beside(env: Env) -> None:
    """`autograd.grad` passes the parameters' hooks, but adds nothing to `.grad`."""
    env.front(env.x()).square().mean().backward()
    torch.autograd.grad(env.front(env.x()).sum(), list(env.module.parameters()))


@case(Branches, options={"reduce": "sum"}, tolerance=1e-11, zero=None)
def summed_over_several_backwards(env: Env) -> None:
    """What is there already is a sum over all ranks, and must not be summed once more."""
    env.front(env.x(), left=(env.rank + env.step) % 3 == 0).square().mean().backward()
    with env.no_sync():
        env.front(env.x(), left=env.step % 2 == 0).square().mean().backward()
    env.front(env.x(), left=True).square().mean().backward()


def _weighted(env: Env, samples: list[int]) -> None:
    """Each rank has another number of samples; the gradient is that of the mean over all of them."""
    mine = samples[env.rank]
    loss = env.front(env.x(mine, 4)).square().mean()  # NaN where there are no samples
    if not env.alone:
        env.front.set_round_weight(mine)  # type: ignore[attr-defined]
        loss.backward()
    elif mine:
        (loss * mine / sum(samples[: env.size])).backward()


@case(mlp, tolerance=1e-11)
def weighted(env: Env) -> None:
    _weighted(env, [1 + env.step, 7, 2 * env.step + 2])


@case(mlp, tolerance=1e-11)
def weighted_with_ranks_without_data(env: Env) -> None:
    _weighted(env, [[5, 0, 3], [0, 4, 0], [900, 0, 0], [1, 1, 1]][env.step])


@case(mlp, dtype=torch.float32, tolerance=1e-5)
def weighted_by_many_tokens(env: Env) -> None:
    _weighted(env, [[2000, 10, 5], [1, 1, 3000], [3, 5, 7], [1500, 1500, 2]][env.step])
