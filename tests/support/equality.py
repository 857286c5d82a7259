"""Correctness is equality: with one process, between ranks, with torch's own DDP.

A case is a module and the code of one step, written once. Ranks run it on a replicated module; the
oracle, in one process, runs it for each rank in turn on a plain module, every loss divided by the
number of ranks, so that its gradients are those of the mean over all ranks. After each step
gradients and parameters must agree: with the oracle to the stated tolerance, `None` where the
oracle has `None`, and between ranks to the last bit.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync

STEPS = 4
TINY_BUCKETS = 0.0005  # MiB: about a layer a bucket, so that launching early and in order matters


@dataclass
class Env:
    """What the code of a step sees: the same for a rank and for the oracle playing that rank."""

    front: Callable[..., Any]  # what the user calls: wrapper, replicated module, or plain module
    module: nn.Module  # the module itself
    rank: int
    size: int
    step: int
    alone: bool  # the oracle: one process for all ranks
    optimizer: torch.optim.Optimizer | None = None
    device: str = "cpu"
    drawn: int = 0

    def here(self, tensor: Tensor) -> Tensor:
        """The same on the device on which the module computes."""
        return tensor.to(self.device)

    def x(self, *shape: int) -> Tensor:
        """This rank's data, another draw each time."""
        self.drawn += 1
        seed = ((self.step * 16 + self.rank) << 8) + self.drawn
        return self.here(torch.randn(*(shape or (3, 4)), generator=torch.Generator().manual_seed(seed)))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        (loss / self.size if self.alone else loss).backward(**kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        if self.alone:
            return contextlib.nullcontext()
        return self.front.no_sync()  # type: ignore[attr-defined]


Step = Callable[[Env], None]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    step: Step
    optimizer: MakeOptimizer = sgd
    zero: bool | None = True  # zero_grad's set_to_none; None: the step does it itself
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12
    options: dict[str, Any] = field(default_factory=dict)  # for both fronts
    torch: dict[str, Any] | None = None  # torch's DDP gets the same result with these options


def replicate_front(case: Case, module: nn.Module, transport: str) -> Callable[..., Any]:
    return gradsync.replicate(module, **_options(case, transport))


def ddp_front(case: Case, module: nn.Module, transport: str) -> Callable[..., Any]:
    return gradsync.DistributedDataParallel(module, **_options(case, transport))


def copies_front(case: Case, module: nn.Module, transport: str) -> Callable[..., Any]:
    options = {**_options(case, transport), "gradient_as_bucket_view": False}
    return gradsync.DistributedDataParallel(module, **options)


def shared_front(case: Case, module: nn.Module, transport: str) -> Callable[..., Any]:
    """One model a host: the optimizer is shared, too."""
    return gradsync.replicate(module, share_parameters=True, **_options(case, transport))


def shared_ddp_front(case: Case, module: nn.Module, transport: str) -> Callable[..., Any]:
    return gradsync.DistributedDataParallel(module, share_parameters=True, **_options(case, transport))


def _options(case: Case, transport: str) -> dict[str, Any]:
    return {"bucket_cap_mb": TINY_BUCKETS, "transport": transport, **case.options}


def torch_front(case: Case, module: nn.Module, transport: str) -> Callable[..., Any]:
    return nn.parallel.DistributedDataParallel(module, bucket_cap_mb=TINY_BUCKETS, **(case.torch or {}))


SHARED = {"shared": shared_front, "shared_ddp": shared_ddp_front}
FRONTS = {"replicate": replicate_front, "ddp": ddp_front, "copies": copies_front, "torch": torch_front} | SHARED


def check_case(
    case: Case,
    fronts: Iterable[str] = ("replicate", "ddp"),
    transports: Iterable[str] = ("auto",),
    device: str = "cpu",
) -> None:
    """On a rank: trains the case on each front and over each transport in turn, next to the oracle on the CPU."""
    for name, transport in itertools.product(fronts, transports):
        with _default_dtype(case.dtype):
            try:
                _check(case, name, transport, device)
            except Exception as error:
                where = f"case {case.name}, front {name}, transport {transport}"
                error.add_note(where) if hasattr(error, "add_note") else None
                raise


def _check(case: Case, name: str, transport: str, device: str) -> None:
    buffers = name != "torch"  # which leaves those apart until the next forward
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    module = case.build()
    oracle = copy.deepcopy(module)
    if device != "cpu":  # made there, as moving it would part weights that are tied
        torch.manual_seed(7)
        with torch.device(device):
            module = case.build()
    with torch.no_grad():  # ranks begin apart: replicating has to make them equal
        for parameter in module.parameters():
            parameter.add_(rank)
    front = FRONTS[name](case, module, transport)
    optimizer, expected = case.optimizer(module.parameters()), case.optimizer(oracle.parameters())
    if name in SHARED:
        gradsync.share_optimizer(optimizer)
    for step in range(STEPS):
        for r in range(size):
            torch.manual_seed(step)
            case.step(Env(oracle, oracle, r, size, step, alone=True, optimizer=expected if r == size - 1 else None))
        torch.manual_seed(step)
        case.step(Env(front, module, rank, size, step, alone=False, optimizer=optimizer, device=device))
        _compare_gradients(module, oracle, case.tolerance, step)
        _compare_ranks(module, step, buffers)
        for each in (optimizer, expected):
            if case.zero is not None:
                each.step()
                each.zero_grad(set_to_none=case.zero)
        _compare(module, oracle, case.tolerance, step)


def _compare_gradients(module: nn.Module, oracle: nn.Module, tolerance: float, step: int) -> None:
    for (name, found), expected in zip(module.named_parameters(), oracle.parameters(), strict=True):
        where = f"gradient of {name} in step {step}"
        if expected.grad is None or found.grad is None:
            assert expected.grad is found.grad, f"{where}: {found.grad}, not {expected.grad}"
        else:
            assert found.grad.dtype is found.dtype
            _close(found.grad, expected.grad, tolerance, where)


def _compare(module: nn.Module, oracle: nn.Module, tolerance: float, step: int) -> None:
    for (name, found), expected in zip(module.named_parameters(), oracle.parameters(), strict=True):
        _close(found, expected, tolerance, f"{name} after step {step}")


def _close(found: Tensor, expected: Tensor, tolerance: float, where: str) -> None:
    found, expected = found.detach().to(expected.device), expected.detach()
    if found.is_sparse or expected.is_sparse:
        found, expected = found.to_dense(), expected.to_dense()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")


def _compare_ranks(module: nn.Module, step: int, buffers: bool) -> None:
    """Bitwise: parameters, buffers and gradients."""
    digest = hashlib.sha256(gradsync.fingerprint(module).encode() if buffers else b"")
    for parameter in module.parameters():
        digest.update(str(parameter.reshape(-1).tolist()).encode())
        if parameter.grad is not None:
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            digest.update(str(gradient.reshape(-1).tolist()).encode())
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    assert len(set(digests)) == 1, f"ranks differ after backward {step}"


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
