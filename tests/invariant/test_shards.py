"""What a user of `gradsync.Shards` may do, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gradsync
from gradsync.errors import InvalidOptionError, OptionsMismatchError, RoundMismatchError, ShardsError, WrongTypeError
from tests.invariant.test_equality import digest
from tests.ranks.small import FRONTS, Fails, batch, build, full, make, same_everywhere
from tests.support.ranks import Ranks, on_ranks

SIZES = (1, 2, 3, 4)


def same_from_all_sizes(ranks: Ranks, body: Any, *args: Any, sizes: tuple[int, ...] = SIZES) -> Any:
    """What `body` gives, once it is known to be the same on all ranks of any number of them."""
    alone = ranks(body, sizes[0], *args)[0]
    for size in sizes[1:]:
        for found in ranks(body, size, *args):
            assert found == alone, f"{size} ranks"
    return alone


def noisy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 2))


def _numpy_state() -> list[int]:
    found: Any = np.random.get_state()
    return found[1].tolist()


def dropout_and_noise() -> list[Any]:
    module = noisy()
    shards = gradsync.Shards(gradsync.replicate(module), 8, seed=5)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    before = torch.get_rng_state(), random.getstate(), _numpy_state()
    found: list[Any] = []
    for step in range(3):
        for shard in shards.each(shards.mine):
            noise = torch.randn(3, 4) + random.random() + np.random.rand()
            (module(batch(shard, step) + noise).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(digest(module))
    assert torch.equal(before[0], torch.get_rng_state())  # those of the process are where they were
    assert before[1:] == (random.getstate(), _numpy_state())
    return found


def test_random_numbers_belong_to_the_shard(ranks: Ranks) -> None:
    found = same_from_all_sizes(ranks, dropout_and_noise)
    assert len(set(found)) == 3


def test_eight_ranks(ranks: Ranks) -> None:
    """As many as there are shards: each has one."""
    same_from_all_sizes(ranks, dropout_and_noise, sizes=(2, 8))


def large_gradients() -> list[Any]:
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(4, 256), nn.Linear(256, 256), nn.Linear(256, 2))  # 256 KiB: brought early
    shards = gradsync.Shards(gradsync.replicate(module), 8)
    found = []
    for step in range(3):
        for shard in shards.each(shards.mine):
            module(batch(shard, step)).square().mean().backward()
        found.append(digest(module))
        module.zero_grad()
    return found


def test_gradients_that_are_brought_to_their_bucket_early(ranks: Ranks) -> None:
    same_from_all_sizes(ranks, large_gradients)


def gradients_of_weighted_shards(weights: list[float], reduce: str, dtype: torch.dtype) -> list[Any]:
    module: Any = build().to(dtype)
    shards = gradsync.Shards(gradsync.replicate(module, reduce=reduce), len(weights))
    for shard in shards.each(shards.mine):
        if reduce == "mean":
            module.set_round_weight(weights[shard])
        module(batch(shard).to(dtype)).float().square().mean().backward()
    return [digest(module), *(p.grad.double().flatten().tolist() for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", [[1.0] * 6, [300.0, 7.0, 0.0, 41.0, 1000.0, 3.0]], ids=["equal", "weighted"])
def test_weighted(ranks: Ranks, weights: list[float], dtype: torch.dtype) -> None:
    _, *found = same_from_all_sizes(ranks, gradients_of_weighted_shards, weights, "mean", dtype)
    plain, total = build().to(dtype), sum(weights)
    for shard, weight in enumerate(weights):
        (plain(batch(shard).to(dtype)).float().square().mean() * (weight / total)).backward()
    tolerance = 0.03 if dtype.itemsize == 2 else 1e-5
    for one, parameter in zip(found, plain.parameters(), strict=True):
        assert parameter.grad is not None
        wanted = parameter.grad.double().flatten()
        torch.testing.assert_close(torch.tensor(one).double(), wanted, rtol=tolerance, atol=tolerance)


def test_summed(ranks: Ranks) -> None:
    _, *found = same_from_all_sizes(ranks, gradients_of_weighted_shards, [1.0] * 5, "sum", torch.float64, sizes=SIZES)
    plain = build().double()
    for shard in range(5):
        plain(batch(shard).double()).float().square().mean().backward()
    for one, parameter in zip(found, plain.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(torch.tensor(one).double(), parameter.grad.flatten().double(), rtol=1e-6, atol=1e-6)


def full_digest(module: nn.Module) -> str:
    """Of what the ranks have in common, whatever form it has."""
    plain = nn.ParameterList(nn.Parameter(full(one.detach())) for one in module.parameters())
    for copy, one in zip(plain, module.parameters(), strict=True):
        copy.grad = full(one.grad)
    return digest(plain)


def train_with(front: str, what: str) -> list[str]:
    module: Any = build()
    options: dict[str, Any] = {}
    if what == "half":
        module = module.to(torch.float16)
    if what in ("precision", "less", "mesh"):
        front, options["mesh"] = "replicate", init_device_mesh("cpu", (dist.get_world_size(),))
    if what == "precision":
        options["mp_policy"] = gradsync.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if what == "less":
        options["mp_policy"] = gradsync.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    replica = make(front, module, **options)
    shards, found = gradsync.Shards(replica, 6), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        if what == "frozen" and step == 2:
            module[0].requires_grad_(False)
        if what == "converted" and step == 2:
            module.double()
        dtype = next(module.parameters()).dtype
        for shard in shards.each(shards.mine):
            if what == "skipped" and (shard + step) % 3 == 0:
                continue
            parts = (0, 1) if what == "accumulated" else (0,)
            for part in parts:
                replica(batch(shard + 8 * part, step).to(dtype)).float().square().mean().backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1 if what == "clipped" else 1e9)
        found.append(f"{float(full(norm)).hex()} {full_digest(module)}")
        if what != "kept" or step % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=what != "zeroed")
        found.append(full_digest(module))
    return found


@pytest.mark.parametrize(
    "what",
    [
        "plain",
        "frozen",
        "converted",
        "skipped",
        "accumulated",
        "clipped",
        "kept",
        "zeroed",
        "half",
        "precision",
        "mesh",
    ],
)
def test_between_steps(ranks: Ranks, what: str) -> None:
    same_from_all_sizes(ranks, train_with, "replicate" if len(what) % 2 else "DistributedDataParallel", what)


def compute(replica: Any, shards: gradsync.Shards, times: int = 1, raises: bool = False) -> None:
    for shard in shards.each(shards.mine):
        for _ in range(times):
            replica(batch(shard)).sum().backward()
        if raises:
            raise KeyError(shard)


def synchronize_inside(replica: Any, shards: gradsync.Shards) -> None:
    for _ in shards.each(shards.mine):
        replica.synchronize_gradients()


@FRONTS
@on_ranks(2)
def test_what_is_refused(front: str) -> None:
    replica = make(front, build())
    with pytest.raises(InvalidOptionError, match="2 ranks can't share 1 shards"):
        gradsync.Shards(replica, 1)
    with pytest.raises(WrongTypeError, match="shards must be an integer"):
        gradsync.Shards(replica, 2.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="needs a replicated module"):
        gradsync.Shards(build(), 4)
    shards = gradsync.Shards(replica, 4)
    rank = dist.get_rank()
    with pytest.raises(
        InvalidOptionError, match=rf"rank {rank}: shards.each\(\) was given 4 batches, .* 2 of 4 shards"
    ):
        shards.each([1, 2, 3, 4])
    with pytest.raises(WrongTypeError, match="takes a list with a batch for each"):
        shards.each(iter([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(ShardsError, match=r"a communication hook does not go together with gradsync\.Shards"):
        replica.register_comm_hook(None, lambda state, bucket: bucket)
    with pytest.raises(ShardsError, match=r"set_round_weight\(\) outside of a step by shards"):
        replica.set_round_weight(3.0)
    with pytest.raises(ShardsError, match="a backward outside of a step by shards"):
        replica(batch(0)).sum().backward()
    replica.zero_grad()
    with pytest.raises(ShardsError, match=r"inside no_sync\(\)"), replica.no_sync():
        list(shards.each(shards.mine))
    with pytest.raises(ShardsError, match=r"skip_round\(\) in a training by shards: .* `continue`"):
        replica.skip_round()
    with pytest.raises(ShardsError, match=r"gradsync\.uneven\(\) does not go together"):
        next(gradsync.uneven([1], replica))
    with pytest.raises(ShardsError, match=r"synchronize_gradients\(\) inside a step by shards"):
        synchronize_inside(replica, shards)
    others = gradsync.Shards(replica, 4)
    with pytest.raises(ShardsError, match=r"another gradsync\.Shards was made"):
        compute(replica, shards)
    shards = others
    with pytest.raises(InvalidOptionError, match="made with 8 shards, but there are 4 now"):
        shards.load_state_dict({"shards": 8, "seed": 0, "step": 3})
    compute(replica, shards)  # nothing of that is left
    same_everywhere(replica)


@on_ranks(2)
def test_another_number_of_shards_on_another_rank() -> None:
    replica = make("replicate", build())
    shards = gradsync.Shards(replica, 4 + 2 * dist.get_rank())
    with pytest.raises(OptionsMismatchError, match=r"shards: .*4.*6"):
        compute(replica, shards)


@on_ranks(2)
def test_ranks_in_different_steps() -> None:
    """One rank has left out a step, after an exception for example."""
    replica = make("replicate", build())
    shards = gradsync.Shards(replica, 4)
    shards.step += dist.get_rank()
    with pytest.raises(RoundMismatchError, match=r"(?s)rank 1: in step 1 of its shards.*shards\.step is its number"):
        compute(replica, shards)


@on_ranks(2)
def test_more_backwards_than_before_on_one_rank() -> None:
    """All ranks raise, and nobody steps on what is not whole; without overlap it is no matter."""
    replica = make("replicate", build())
    shards = gradsync.Shards(replica, 2)
    for _ in range(2):
        compute(replica, shards)
        replica.zero_grad()
    with pytest.raises(ShardsError, match=r"received gradients more often .* overlap=False"):
        compute(replica, shards, times=1 + dist.get_rank())
    assert all(parameter.grad is None for parameter in replica.parameters())
    shards = gradsync.Shards(replica, 2, overlap=False)
    for _ in range(3):
        compute(replica, shards, times=1 + dist.get_rank())
        same_everywhere(replica)
        replica.zero_grad()


@on_ranks(2)
def test_left_by_an_exception_and_gone_on() -> None:
    replica = make("replicate", build())
    shards = gradsync.Shards(replica, 4)
    state = torch.get_rng_state()
    with pytest.raises(KeyError):
        compute(replica, shards, raises=True)
    assert torch.equal(state, torch.get_rng_state())
    assert shards.step == 0
    replica.zero_grad()
    compute(replica, shards)
    wanted = build()
    for shard in range(4):
        (wanted(batch(shard)).sum() / 4).backward()
    for one, other in zip(replica.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def two_models(front: str) -> list[str]:
    """A generator and its judge, each with a round of its own, and both in one."""
    torch.manual_seed(1)
    maker, judge = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    replicas = make(front, maker), make(front, judge)
    shards, found = gradsync.Shards(replicas, 5), []
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (maker, judge)]
    for step in range(3):
        for shard in shards.each(shards.mine):
            x = batch(shard, step)
            (replicas[1](x).mean() - replicas[1](replicas[0](x).detach()).mean()).backward()
        optimizers[1].step()
        for shard in shards.each(shards.mine):
            replicas[1](replicas[0](batch(shard, step))).square().mean().backward()
        optimizers[0].step()
        for one in optimizers:
            one.zero_grad()
        found += [digest(maker), digest(judge)]
    return found


@FRONTS
def test_several_models(ranks: Ranks, front: str) -> None:
    same_from_all_sizes(ranks, two_models, front)


def goes_on(state: dict[str, Any] | None, steps: int) -> tuple[str, dict[str, Any]]:
    module = noisy()
    replica = gradsync.replicate(module)
    shards = gradsync.Shards(replica, 8, seed=2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    if state is not None:
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        shards.load_state_dict(state["shards"])
    for _ in range(steps):
        for shard in shards.each(shards.mine):
            module(batch(shard, shards.step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(module), {
        "module": {key: value.clone() for key, value in module.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "shards": shards.state_dict(),
    }


def test_a_checkpoint_goes_on_with_any_number_of_ranks(ranks: Ranks) -> None:
    undisturbed, _ = ranks(goes_on, 2, None, 6)[0]
    _, state = ranks(goes_on, 4, None, 3)[0]
    for size in (1, 3):
        assert ranks(goes_on, size, state, 3)[0][0] == undisturbed


@FRONTS
@on_ranks(2)
def test_a_backward_that_raises_in_the_last_shard(front: str) -> None:
    """On one rank, when buckets have left: nobody steps on a part, and a step that was not whole is made again."""
    replica, oracle, failures = make(front, build()), build(), list[type]()
    shards = gradsync.Shards(replica, 4)
    while (step := shards.step) < 5:
        try:
            for shard in shards.each(shards.mine):
                x = batch(shard, step)
                if (step, shard) == (2, 3) and not failures:
                    x = Fails.apply(x.requires_grad_())
                replica(x).square().mean().backward()
        except (ZeroDivisionError, RoundMismatchError) as error:
            assert step == 2
            failures.append(type(error))
            replica.zero_grad()
            continue
        for shard in range(4):
            (oracle(batch(shard, step)).square().mean() / 4).backward()
        for one, other in zip(replica.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        with torch.no_grad():
            for parameter in (*replica.parameters(), *oracle.parameters()):
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    assert failures == [[RoundMismatchError], [ZeroDivisionError, RoundMismatchError]][dist.get_rank()]
    same_everywhere(replica)
