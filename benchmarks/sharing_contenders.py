"""Who is measured with its optimizer: one model a host, a copy a rank, torch's ZeRO, MPI, and a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import gradsync
from benchmarks import contenders
from benchmarks.contenders import MPI, PLAIN, TRANSPORTS, nothing
from gradsync.cli.launch import cores


@dataclass(frozen=True)
class OptimizerKind:
    key: str
    name: str
    make_class: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self.make_class(parameters, **self.options)


# AdamW moves each element by about this much, whatever its gradient. Models that learn in a run what there is to learn
# would have gradients too small for a float in the end, with which processors take their time.
SLOWLY = 1e-5
OPTIMIZERS = (
    OptimizerKind("adamw", "AdamW as it comes", torch.optim.AdamW, {"lr": SLOWLY}),
    OptimizerKind("fused", "AdamW(fused)", torch.optim.AdamW, {"lr": SLOWLY, "fused": True}),
    OptimizerKind("sgd", "SGD", torch.optim.SGD, {"lr": 1e-3}),
)


@dataclass(frozen=True)
class Training:
    """A module, and what is called once a step beside forward and backward."""

    module: nn.Module
    zero_grad: Callable[[], object] = nothing
    step: Callable[[], object] = nothing


@dataclass(frozen=True)
class Contender:
    """`prepare` may raise anything: then the contender is absent, and what it raised is the reason."""

    key: str
    name: str
    prepare: Callable[[nn.Module, OptimizerKind], Training]
    is_ours: bool = False
    is_alone: bool = False
    """One process, rank 0, has all batches and a thread for each rank; the others wait until it is done."""


def _usual(wrapped: contenders.Contender, module: nn.Module, kind: OptimizerKind) -> Training:
    """A copy on each rank, which steps all of it."""
    prepared = wrapped.wrap(module)
    optimizer = kind.make(prepared.module.parameters())

    def step() -> None:
        prepared.finish()
        optimizer.step()

    return Training(prepared.module, optimizer.zero_grad, step)


def _zero(module: nn.Module, kind: OptimizerKind) -> Training:
    """As fast as its options make it: parameters travel in one piece a rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a second

    wrapper = contenders.TORCH_BEST.wrap(module).module
    optimizer = ZeroRedundancyOptimizer(
        wrapper.parameters(), optimizer_class=kind.make_class, parameters_as_bucket_view=True, **kind.options
    )
    return Training(wrapper, optimizer.zero_grad, optimizer.step)


def _shared(module: nn.Module, kind: OptimizerKind, transport: str = "shared_memory") -> Training:
    replica = gradsync.replicate(module, transport=transport, share_parameters=True)
    optimizer = gradsync.share_optimizer(kind.make(replica.parameters()))
    return Training(replica, optimizer.zero_grad, optimizer.step)


def _in_backward(module: nn.Module, kind: OptimizerKind, transport: str = "shared_memory") -> Training:
    replica = gradsync.replicate(module, transport=transport, share_parameters=True)
    gradsync.overlap_optimizer(replica, kind.make(replica.parameters()))
    return Training(replica)


def threads(ranks: int) -> int:
    """Of the single process: a core each, if there are as many."""
    return min(ranks, cores())


def _from(one: contenders.Contender, name: str = "", *, is_ours: bool = False) -> Contender:
    return Contender(one.key, name or one.name, partial(_usual, one), is_ours=is_ours)


NO_COMMUNICATION = _from(PLAIN)
TORCH = _from(contenders.TORCH_BEST)
ZERO = Contender("zero", "torch DDP + ZeRO", _zero)
MPI_REDUCER = _from(MPI[0])
ONE_PROCESS = Contender("one_process", "one process, all batches", partial(_usual, PLAIN), is_alone=True)
UNSHARED = _from(TRANSPORTS[0], "gradsync, a copy a rank", is_ours=True)
SHARED = Contender("shared", "gradsync, shared", _shared, is_ours=True)
IN_BACKWARD = Contender("in_backward", "gradsync, in backward", _in_backward, is_ours=True)
OVER_GROUP = (
    Contender("shared_group", "shared, process group", partial(_shared, transport="process_group"), is_ours=True),
    Contender(
        "in_backward_group", "in backward, group", partial(_in_backward, transport="process_group"), is_ours=True
    ),
)

BY_DEFAULT = (NO_COMMUNICATION, TORCH, ZERO, MPI_REDUCER, ONE_PROCESS, UNSHARED, SHARED, IN_BACKWARD)
ALL = (*BY_DEFAULT, *OVER_GROUP)
JUDGED = (SHARED, IN_BACKWARD)
IN_MEMORY = (NO_COMMUNICATION, TORCH, ZERO, UNSHARED, SHARED, IN_BACKWARD)


def contender(key: str) -> Contender:
    return next(one for one in ALL if one.key == key)


def optimizer_kind(key: str) -> OptimizerKind:
    return next(one for one in OPTIMIZERS if one.key == key)


def is_here(one: Contender) -> bool:
    """Whether it computes on this rank."""
    return not one.is_alone or dist.get_rank() == 0
