"""What torch's classes can be called with, ours can: the same names, by keyword and by place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from inspect import Parameter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate_with_fsdp as over_mesh
from torch.distributed._composable.replicate import DDP as Composable
from torch.distributed._composable.replicate import replicate as over_group

import gradsync
from tests.support.ranks import Ranks, on_ranks

DDP = gradsync.DistributedDataParallel

# Methods of torch's that ours have not, and why. What they do is done in another way, or not needed.
_REDUCER = "drives torch's C++ reducer"
_FORWARD = "a part of torch's forward; ours has one of its own"
_BUFFERS = "a part of torch's buffer exchange; ours is in engine/buffers.py"
_JOIN = "a part of torch's join hook; ours is in engine/uneven.py"
LEFT_OUT = {
    "_register_accum_grad_hook": "of the Python reducer, which is refused by name",
    "_delayed_all_reduce_hook": _REDUCER,
    "_register_delay_all_reduce_hook": _REDUCER,
    "_setup_in_backward_optimizers": "done by the engine before the first forward",
    "_fire_reducer_autograd_hook": _REDUCER,
    "_root_copy_hook": "of torch's mixed precision; ours is in engine/form.py",
    "_module_wait_for_copy_hook": "of torch's mixed precision; ours is in engine/form.py",
    "_log_and_throw": "writes to torch's C++ logger",
    "_ddp_init_helper": "makes torch's reducer",
    "_assign_modules_buffers": _BUFFERS,
    "_get_parameters": "of modules that nn.DataParallel has copied",
    "_check_default_group": "of torch's unpickling",
    "_inside_ddp_forward": _FORWARD,
    "_run_ddp_forward": _FORWARD,
    "_clear_grad_buffer": "of delayed all-reduces in torch's way",
    "_lazy_init": "ours is complete when it is made",
    "_pre_forward": _FORWARD,
    "_post_forward": _FORWARD,
    "_check_global_requires_backward_grad_sync": _JOIN,
    "_check_and_sync_module_buffers": _JOIN,
    "_sync_final_model": _JOIN,
    "_match_all_reduce_for_bwd_pass": _JOIN,
    "_match_unused_params_allreduce": _JOIN,
    "_find_common_rank": _JOIN,
    "_distributed_broadcast_coalesced": "over a group without our transport",
    "_check_sync_bufs_post_fwd": _BUFFERS,
    "_check_sync_bufs_pre_fwd": _BUFFERS,
    "_sync_buffers": _BUFFERS,
    "_sync_module_buffers": _BUFFERS,
    "_passing_sync_batchnorm_handle": "refuses SyncBatchNorm on the CPU; ours does so in guard/start.py",
    "_check_comm_hook": "hooks are checked in hooks/comm_hook.py",
    "_get_fsdp_state": "the state of torch's sharding",
    "_set_unshard_async_op": "there is nothing to gather",
}


def methods(cls: type) -> Iterator[str]:
    """Names of what a class, and those it is made of, can do beyond any module."""
    seen = set()
    for base in cls.__mro__:
        if base not in (object, nn.Module) and base.__module__ != "abc":
            seen |= {name for name, value in vars(base).items() if callable(value) or isinstance(value, wrapped)}
    return (name for name in sorted(seen) if name == "__init__" or not name.startswith("__"))


wrapped = (staticmethod, classmethod, property)


def missing(ours: Callable[..., Any], theirs: Callable[..., Any]) -> list[str]:
    """What `theirs` takes that `ours` does not, or takes at another place."""
    wanted, found = (list(inspect.signature(one).parameters.values()) for one in (theirs, ours))
    names = [parameter.name for parameter in found]
    kinds = {parameter.kind for parameter in found}
    problems = []
    for place, parameter in enumerate(wanted):
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            continue  # says nothing of what is taken
        if parameter.name not in names:
            if Parameter.VAR_KEYWORD not in kinds:
                problems.append(f"no {parameter.name}")
        elif parameter.kind is not Parameter.KEYWORD_ONLY and names.index(parameter.name) != place:
            problems.append(f"{parameter.name} at another place")
    extra = [p for p in found if p.name not in {q.name for q in wanted}]
    variable = any(p.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for p in wanted)
    problems += [f"{p.name} has no default" for p in extra if p.default is p.empty and p.kind < 2 and not variable]
    return problems


CLASSES: list[tuple[type, type]] = [
    (gradsync.DistributedDataParallel, nn.parallel.DistributedDataParallel),
    (gradsync.ReplicateModule, Composable),
    (gradsync.ReplicateModule, over_mesh.ReplicateModule),
]


@pytest.mark.parametrize(("ours", "theirs"), CLASSES, ids=["DistributedDataParallel", "DDP", "ReplicateModule"])
def test_methods(ours: type, theirs: type) -> None:
    problems = {}
    for name in methods(theirs):
        if name in LEFT_OUT:
            assert not hasattr(ours, name), f"{name} is there, and need not be listed"
        elif not hasattr(ours, name):
            problems[name] = ["is missing"]
        elif isinstance(value := inspect.getattr_static(theirs, name), property):
            ours_has = inspect.getattr_static(ours, name)
            if value.fset is not None and isinstance(ours_has, property) and ours_has.fset is None:
                problems[name] = ["can't be set"]
        elif name != "__init__" or theirs is nn.parallel.DistributedDataParallel:
            problems[name] = missing(getattr(ours, name), getattr(theirs, name))
    assert {name: found for name, found in problems.items() if found} == {}


def test_what_is_left_out_is_torchs() -> None:
    assert set(LEFT_OUT) <= {name for _, theirs in CLASSES for name in methods(theirs)}


@pytest.mark.parametrize("theirs", [over_group, over_mesh.replicate], ids=["group", "mesh"])
def test_replicate(theirs: Callable[..., Any]) -> None:
    assert missing(gradsync.replicate, theirs) == []


@on_ranks(2)
def test_ignored_by_keyword() -> None:
    """As TorchRec calls it."""
    module = nn.Linear(2, 2)
    DDP._set_params_and_buffers_to_ignore_for_model(module=module, params_and_buffers_to_ignore=["bias"])
    wrapper = DDP(module=module)
    assert wrapper.parameters_to_ignore == {"bias"}
    assert wrapper._distributed_rank == dist.get_rank()


def buffers_switched(name: str) -> list[float]:
    """torch reads the flag in each forward; a framework may set it."""
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapper: Any = DDP(module)
    assert wrapper.will_sync_module_buffers()

    def step() -> float:
        wrapper(batch()).sum().backward()
        wrapper.zero_grad()
        return float(module[1].running_mean[0])

    found = [step()]
    setattr(wrapper, name, False)
    assert wrapper.forward_sync_buffers is wrapper.broadcast_buffers is False
    assert not wrapper.will_sync_module_buffers()
    found.append(step())
    setattr(wrapper, name, True)
    return [*found, step()]


def batch() -> torch.Tensor:
    return torch.arange(4.0).view(2, 2) * (1 + dist.get_rank())


@pytest.mark.parametrize("name", ["forward_sync_buffers", "broadcast_buffers"])
def test_buffers_switched_off_and_on(ranks: Ranks, name: str) -> None:
    first, second = ranks(buffers_switched, 2, name)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True]
