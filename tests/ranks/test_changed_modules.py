"""Modules that are changed after they were replicated: pruned, parametrized, resized; on all ranks, or on one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import fusion, parametrizations, parametrize, prune

import gradsync
from gradsync.errors import ParametersChangedError
from tests.ranks.small import (
    FRONTS,
    TRANSPORTS,
    assert_gradients,
    backward,
    batch,
    gradients_of,
    make,
    mean_backward,
    same_everywhere,
)
from tests.support.outcome import Outcome
from tests.support.ranks import Ranks, on_ranks

Change = Callable[[Any], None]
# Of torch's older weight norm and spectral norm.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated in favor of:FutureWarning")


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor.reshape(-1)


class Adapted(nn.Module):
    """A frozen layer with a low-rank addition."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.T


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Scale(), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


# --- on all ranks alike ------------------------------------------------------------------------------------


def pruned(module: Any) -> None:
    prune.l1_unstructured(module[0], "weight", 0.5)


def pruned_at_random(module: Any) -> None:
    prune.random_unstructured(module[0], "weight", 0.5)
    prune.ln_structured(module[3], "weight", 0.5, n=2, dim=0)


def pruned_globally(module: Any) -> None:
    prune.global_unstructured([(module[0], "weight"), (module[3], "weight")], prune.L1Unstructured, amount=0.5)


def pruning_made_permanent(module: Any) -> None:
    prune.remove(module[0], "weight")


def weight_norm(module: Any) -> None:
    parametrizations.weight_norm(module[3])


def older_norms(module: Any) -> None:
    nn.utils.weight_norm(module[0])
    nn.utils.spectral_norm(module[3])


def orthogonal(module: Any) -> None:
    parametrizations.orthogonal(module[3])


def spectral_norm(module: Any) -> None:
    parametrizations.spectral_norm(module[3])


def symmetric(module: Any) -> None:
    parametrize.register_parametrization(module[3], "weight", Symmetric())


def plain_again(module: Any) -> None:
    parametrize.remove_parametrizations(module[3], "weight")


def replaced(module: Any) -> None:
    module[3] = nn.Linear(8, 8, bias=False)


def appended(module: Any) -> None:
    module.append(nn.Linear(2, 3))


def normalized(module: Any) -> None:
    """With running statistics, which differ between ranks until the first round with them is over."""
    module[4] = nn.Sequential(nn.BatchNorm1d(8), nn.Tanh())


def removed(module: Any) -> None:
    module[0].bias = None
    del module[3:5]


def adapted(module: Any) -> None:
    module[0], module[3] = Adapted(module[0]), Adapted(module[3])


def swapped(module: Any) -> None:
    """The same parameters, each under the other's name."""
    module[0].bias, module[3].bias = module[3].bias, module[0].bias


def tied(module: Any) -> None:
    module[0].bias = module[3].bias


def other_data(module: Any) -> None:
    module[5].weight.data = torch.randn(3, 8)
    module[5].bias.data = torch.randn(3)


def same_number_of_elements(module: Any) -> None:
    module[1].factor.data = torch.randn(8)


def set_and_resized(module: Any) -> None:
    with torch.no_grad():
        module[5].weight.set_(torch.randn(3, 8))
    module[5].bias.requires_grad_(False).resize_(3).fill_(1).requires_grad_(True)


ALIKE: list[list[Change]] = [
    [pruned, pruning_made_permanent],
    [pruned, weight_norm],
    [pruned_at_random],
    [pruned_globally],
    [weight_norm, plain_again],
    [older_norms],
    [orthogonal],
    [spectral_norm],
    [symmetric, plain_again],
    [replaced, pruned],
    [appended],
    [removed],
    [adapted],
    [swapped],
    [tied],
    [other_data],
    [same_number_of_elements],
    [set_and_resized],
]


def train(replica: Any, module: nn.Module, oracle: nn.Module, steps: int = 2) -> None:
    optimizers = [torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1) for one in (module, oracle)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(replica, step)
        mean_backward(oracle, step)
        for (name, found), (same, expected) in zip(module.named_parameters(), oracle.named_parameters(), strict=True):
            assert name == same
            torch.testing.assert_close(found.grad, expected.grad, msg=f"gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
    same_everywhere(module)


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("rounds", [0, 2])
@on_ranks(2)
def test_the_same_change_on_all_ranks(front: str, transport: str, rounds: int) -> None:
    for changes in ALIKE:
        module, oracle = build(), build()
        if spectral_norm in changes or older_norms in changes:  # the oracle has more forwards, which count there
            for one in (module, oracle):
                one[3].requires_grad_(False)
        replica = make(front, module, transport=transport, verify="every")
        train(replica, module, oracle, steps=rounds)
        for change in changes:
            for one in (module, oracle):
                one.zero_grad()
                torch.manual_seed(5)
                change(one)
            if spectral_norm in changes or older_norms in changes:
                module.eval()
                oracle.eval()
            try:
                train(replica, module, oracle)
            except Exception as error:
                raise AssertionError(f"{[one.__name__ for one in changes]}, at {change.__name__}: {error}") from error
        gradsync.verify(replica)


@FRONTS
@on_ranks(2)
def test_buffers_of_new_modules_are_kept_in_step(front: str) -> None:
    module = build()
    replica = make(front, module)
    for change in (None, normalized, None):
        if change is not None:
            change(module)
        module.zero_grad()
        backward(replica)
        same_everywhere(module)
    assert module[4][0].running_mean.abs().max() > 0  # type: ignore[index]


@FRONTS
@on_ranks(2)
def test_a_convolution_fused_with_its_norm(front: str) -> None:
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(8, 2))
    replica = make(front, module)
    x = [batch(part).unsqueeze(1) for part in range(2)]
    for _ in range(2):
        replica(x[dist.get_rank()]).sum().backward()
    module.zero_grad()
    module[0], module[1] = fusion.fuse_conv_bn_eval(module[0].eval(), module[1].eval()), nn.Identity()
    module[0].bias.requires_grad_(True)
    oracle = nn.Sequential(*(copy.deepcopy(part) for part in module))
    replica(x[dist.get_rank()]).square().mean().backward()
    for part in x:
        (oracle(part).square().mean() / 2).backward()
    assert_gradients(module, gradients_of(oracle))


@FRONTS
@on_ranks(2)
def test_what_is_ignored_may_be_changed_by_one_rank(front: str) -> None:
    """What is left out stays left out, also under another name, and what it becomes; one rank may do that alone."""
    module: Any = build()
    if front == "replicate":
        replica = make(front, module, ignored_modules=[module[3]])
    else:
        module._ddp_params_and_buffers_to_ignore = ["3.weight", "3.bias"]
        replica = make(front, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(4):
        if step and dist.get_rank() == 1:
            [lambda _: prune.random_unstructured(module[3], "bias", 0.5), weight_norm, plain_again][step - 1](module)
        optimizer.zero_grad()
        backward(replica)
        optimizer.step()


# --- in different ways -------------------------------------------------------------------------------------


def masked(module: Any) -> None:
    prune.random_unstructured(module[0], "weight", 0.5)


def rescaled(module: Any) -> None:
    """Frozen ones too: nobody would look at their gradients."""
    module[3] = nn.Linear(8, 8).requires_grad_(False)


def crossed(module: Any) -> None:
    """The same objects under the same names, paired in another way."""
    biases = [module[0].bias, module[3].bias]
    module[0].bias, module[3].bias = biases if dist.get_rank() == 0 else reversed(biases)


def remembering(module: Any) -> None:
    module[1].register_buffer("memory", torch.zeros(3))


ALONE: list[tuple[Change, str]] = [
    (pruned, r"'0\.weight' is missing on rank 1"),
    (weight_norm, r"'3\.weight' is missing on rank 1"),
    (appended, r"'6\.weight' exists only on rank 1"),
    (removed, r"'0\.bias' is missing on rank 1"),
    (adapted, r"'0\.weight' is missing on rank 1"),
    (swapped, r"'0\.bias' is \[8\] torch\.float32 formerly '3\.bias' on rank 1"),
    (other_data, r"'5\.weight' is \[3, 8\] .* on rank 1, but \[2, 8\]"),
    (same_number_of_elements, r"'1\.factor' is \[8\] .* on rank 1, but \[2, 4\]"),
    (remembering, r"'1\.memory' exists only on rank 1 \(buffer"),
]
APART: list[tuple[Change, str]] = [
    (masked, r"'0\.weight_mask' is buffer \[8, 4\] torch\.float32 with values \w+ on rank 1, but"),
    (appended, r"'6\.weight' is \[3, 2\] torch\.float32 with values \w+ on rank 1, but .* elsewhere"),
    (adapted, r"'0\.down\.weight' is \[2, 4\] .* with values .*"),
    (replaced, r"'3\.weight' is \[8, 8\] .* with values"),
    (rescaled, r"'3\.weight' is frozen \[8, 8\] .* with values"),
    (other_data, r"'5\.weight' is \[3, 8\] .* with values"),
    (crossed, r"'0\.bias' is \[8\] torch\.float32 formerly '3\.bias' on rank 1"),
]


def changed_by_rank(front: str, transport: str, rounds: int, change: Change, alone: bool) -> None:
    """By rank 1 alone, or by both with their own random numbers."""
    module = build()
    replica = make(front, module, transport=transport, verify="never")
    for step in range(rounds):
        backward(replica, step)
        module.zero_grad()
    torch.manual_seed(dist.get_rank())
    if dist.get_rank() == 1 or not alone:
        change(module)
    for _ in range(2):  # what is only gone at first seems to be unused
        backward(replica)


def assert_all_raised(outcomes: list[Outcome], pattern: str) -> None:
    for outcome in outcomes:
        assert isinstance(outcome.exception, ParametersChangedError), outcome
        assert re.search(pattern, str(outcome.exception)), str(outcome.exception)
        assert f"rank {outcome.rank}" in str(outcome.exception)
        assert "gradsync.unreplicate(module)" in str(outcome.exception)


@FRONTS
@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize(("change", "pattern"), ALONE)
def test_a_change_by_one_rank_alone(ranks: Ranks, front: str, rounds: int, change: Change, pattern: str) -> None:
    transport = "process_group" if rounds else "shared_memory"
    assert_all_raised(ranks.outcomes(changed_by_rank, 2, front, transport, rounds, change, True), pattern)


@FRONTS
@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize(("change", "pattern"), APART)
def test_a_change_by_different_values(ranks: Ranks, front: str, rounds: int, change: Change, pattern: str) -> None:
    transport = "shared_memory" if rounds else "process_group"
    assert_all_raised(ranks.outcomes(changed_by_rank, 2, front, transport, rounds, change, False), pattern)


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_after_the_error(front: str, transport: str) -> None:
    """After the error: undone where it was made, or made where it was not, training goes on."""
    for undone in (True, False):
        module, oracle = build(), build()
        replica = make(front, module, transport=transport)
        train(replica, module, oracle)
        torch.manual_seed(1)
        wider = nn.Linear(2, 3)
        if dist.get_rank() == 1:
            module.append(wider)
        with pytest.raises(ParametersChangedError):
            backward(replica)
        if not undone:
            oracle.append(copy.deepcopy(wider))
            if dist.get_rank() == 0:
                module.append(wider)
        elif dist.get_rank() == 1:
            del module[6]
        train(replica, module, oracle)


# --- over a mesh -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [0, 2])
@on_ranks(2)
def test_over_a_mesh_it_is_refused(rounds: int) -> None:
    module = build()
    replica: Any = gradsync.replicate(module, mesh=init_device_mesh("cpu", (2,)))
    for step in range(rounds):
        backward(replica, step)
        module.zero_grad()
    pruned(module)
    with pytest.raises(ParametersChangedError, match=r"mesh.*'0\.weight_orig'.*gradsync\.unreplicate"):
        backward(replica)


@pytest.mark.parametrize("change", [pruned, weight_norm, symmetric, replaced, adapted, other_data])
@on_ranks(2)
def test_with_a_precision_policy(change: Change) -> None:
    """The compute parameters follow to where the parameters went."""
    module, oracle = build(), build()
    policy = MixedPrecisionPolicy(param_dtype=torch.float64)
    replica: Any = gradsync.replicate(module, mp_policy=policy)
    for step in range(3):
        backward(replica)
        mean_backward(oracle)
        for (name, found), expected in zip(module.named_parameters(), oracle.parameters(), strict=True):
            assert found.dtype is torch.float32
            torch.testing.assert_close(found.grad, expected.grad, msg=f"gradient of {name}")
        for one in (module, oracle):
            one.zero_grad()
            torch.manual_seed(5)
            if step == 0:
                change(one)
