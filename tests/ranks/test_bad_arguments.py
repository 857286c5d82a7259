"""Arguments that make no sense: refused at once, by name, with what was given and the cure.

Rank 1 makes every mistake of the tables below while rank 0 makes none: nothing may be communicated. Then both train
with the very modules that were refused: nothing may have been changed.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gradsync as typed_gradsync
from gradsync.errors import GradsyncError, InvalidOptionError, UnsuitableModuleError
from tests.support.ranks import Ranks

gradsync: Any = typed_gradsync  # mistakes are what this is about
FRONTS = ("replicate", "DistributedDataParallel")
WRONG_TYPE = (InvalidOptionError, TypeError)
WRONG_VALUE = (InvalidOptionError, ValueError)
NO_MODULE = (UnsuitableModuleError, TypeError)


@functools.cache
def dp() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


class Case(SimpleNamespace):
    call: Callable[..., Any]
    kinds: tuple[type[Exception], ...]
    pattern: str


def case(call: Callable[..., Any], kinds: tuple[type[Exception], ...], pattern: str) -> Case:
    return Case(call=call, kinds=kinds, pattern=pattern)


def option(kinds: tuple[type[Exception], ...], pattern: str, **options: Any) -> Case:
    return case(lambda make, module: make(module, **options), kinds, pattern)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


class Policy(SimpleNamespace):
    """Looks like torch's `MixedPrecisionPolicy`, and its `_MixedPrecision`."""

    def __init__(self, **settings: Any) -> None:
        usual = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"))
        flags = dict.fromkeys(("cast_forward_inputs", "cast_root_forward_inputs", "keep_low_precision_grads"), True)
        super().__init__(**{**usual, **flags, **settings})


SAME_FOR_BOTH = {
    "no module": case(lambda make, _: make(None), NO_MODULE, r"nn\.Module.*None"),
    "a text": case(lambda make, _: make("x"), NO_MODULE, r"nn\.Module.*'x'"),
    "a number": case(lambda make, _: make(3), NO_MODULE, r"nn\.Module.*3"),
    "a class": case(lambda make, _: make(nn.Linear), NO_MODULE, r"the class Linear.*Linear\(\.\.\.\)"),
    "a tensor": case(lambda make, _: make(torch.ones(2)), NO_MODULE, r"nn\.Module.*Tensor"),
    "a cap of text": option(WRONG_TYPE, r"bucket_cap_mb must be a number.*'a'", bucket_cap_mb="a"),
    "an infinite cap": option(WRONG_VALUE, r"bucket_cap_mb must be .*finite.*inf", bucket_cap_mb=math.inf),
    "a cap of nan": option(WRONG_VALUE, r"bucket_cap_mb must be .*finite.*nan", bucket_cap_mb=math.nan),
    "a cap of zero": option(WRONG_VALUE, r"bucket_cap_mb must be .*greater than 0.*0", bucket_cap_mb=0),
    "a cap of True": option(WRONG_TYPE, r"bucket_cap_mb must be a number.*True", bucket_cap_mb=True),
    "caps of text": option(WRONG_TYPE, r"bucket_cap_mb_list must be.*'a'", bucket_cap_mb_list="a"),
    "caps with text": option(WRONG_TYPE, r"bucket_cap_mb_list\[1\] must be a number.*'a'", bucket_cap_mb_list=[1, "a"]),
    "caps of one": option(WRONG_TYPE, r"bucket_cap_mb_list must be.*3", bucket_cap_mb_list=3),
    "caps with inf": option(WRONG_VALUE, r"bucket_cap_mb_list\[0\].*finite", bucket_cap_mb_list=[math.inf]),
    "buffers of nobody": option(WRONG_VALUE, r"buffers_from.*9.*0 to 1", buffers_from=9),
    "buffers of rank -1": option(WRONG_VALUE, r"buffers_from.*-1", buffers_from=-1),
    "buffers of text": option(WRONG_TYPE, r"buffers_from must be an integer.*'a'", buffers_from="a"),
    "buffers of half": option(WRONG_TYPE, r"buffers_from must be an integer.*0\.5", buffers_from=0.5),
    "buffers of True": option(WRONG_TYPE, r"buffers_from must be an integer.*True", buffers_from=True),
    "a mesh of text": option(WRONG_TYPE, r"device_mesh must be a DeviceMesh.*'x'", device_mesh="x"),
    "a group of text": option(WRONG_TYPE, r"process_group must be a ProcessGroup.*'x'", process_group="x"),
    "a group of numbers": option(WRONG_TYPE, r"process_group must be .*\[0, 1\].*new_group", process_group=[0, 1]),
    "static by text": option(WRONG_TYPE, r"static_graph must be True or False.*'yes'", static_graph="yes"),
    "views of 3": option(WRONG_TYPE, r"gradient_as_bucket_view must be True or False.*3", gradient_as_bucket_view=3),
    "unused by text": option(WRONG_TYPE, r"find_unused_parameters must be True or False", find_unused_parameters="x"),
    "a wrong transport": option(WRONG_VALUE, r"transport must be one of 'auto'.*3", transport=3),
    "no reduction": option(WRONG_VALUE, r"reduce must be one of 'mean', 'sum'.*None", reduce=None),
    "no such verify": option(WRONG_VALUE, r"verify must be one of .*\[\]", verify=[]),
    "no such buffers": option(WRONG_VALUE, r"buffers must be one of .*'all'", buffers="all"),
    "no such start": option(WRONG_TYPE, r"init_sync must be", init_sync=object()),
}

REPLICATE = {
    "a list with no module": case(
        lambda make, module: make([module, 3]), NO_MODULE, r"a list of nn\.Modules.*\[1\] is 3"
    ),
    "an empty list": case(lambda make, _: make([]), WRONG_VALUE, "empty list"),
    "a list of parameters": case(
        lambda make, module: make(list(module.parameters())), NO_MODULE, r"\[0\] is a Parameter"
    ),
    "mesh of text": option(WRONG_TYPE, r"mesh must be a DeviceMesh.*'x'", mesh="x"),
    "policy of text": option(WRONG_TYPE, r"mp_policy must be a MixedPrecisionPolicy.*'bf16'", mp_policy="bf16"),
    "policy with text": option(WRONG_TYPE, r"mp_policy\.param_dtype.*'bf16'", mp_policy=Policy(param_dtype="bf16")),
    "offload of text": option(WRONG_TYPE, r"offload_policy must be.*CPUOffloadPolicy.*'x'", offload_policy="x"),
    "ignored by name": option(WRONG_TYPE, r"ignored_params.*'0\.weight'.*get_parameter", ignored_params=["0.weight"]),
    "ignored text": option(WRONG_TYPE, r"ignored_params.*'0\.weight'", ignored_params="0.weight"),
    "ignored number": option(WRONG_TYPE, r"ignored_params.*3", ignored_params=3),
    "one ignored parameter": case(
        lambda make, module: make(module, ignored_params=module[0].weight), WRONG_TYPE, r"ignored_params.*\[parameter\]"
    ),
    "modules ignored by name": option(WRONG_TYPE, r"ignored_modules.*'0'.*get_submodule", ignored_modules=["0"]),
    "one ignored module": case(
        lambda make, module: make(module, ignored_modules=module[0]), WRONG_TYPE, r"ignored_modules.*Linear.*\[module\]"
    ),
    "parameters as modules": case(
        lambda make, module: make(module, ignored_modules=list(module.parameters())), WRONG_TYPE, "ignored_modules"
    ),
    "modules as parameters": case(
        lambda make, module: make(module, ignored_params=[module[0]]), WRONG_TYPE, "ignored_params.*Linear"
    ),
    "delayed unknown": option(
        WRONG_VALUE, r"delayed.*'9\.weight'.*no parameter", delayed=("9.weight",), delayed_until="0.bias"
    ),
    "delayed text": option(WRONG_TYPE, r"delayed.*'0\.weight'", delayed="0.weight", delayed_until="0.bias"),
    "delayed numbers": option(WRONG_TYPE, r"delayed\[0\].*3", delayed=(3,), delayed_until="0.bias"),
    "delayed until nothing": option(
        WRONG_VALUE, r"delayed_until.*'9\.bias'", delayed=("0.weight",), delayed_until="9.bias"
    ),
    "delayed alone": option(WRONG_VALUE, "delayed and delayed_until.*together", delayed=("0.weight",)),
    "flags of text": option(WRONG_TYPE, "init_sync_buffers must be True or False", init_sync_buffers="x"),
    "broadcast by text": option(WRONG_TYPE, "broadcast_buffers must be True or False", broadcast_buffers="x"),
    "no such option": option(WRONG_VALUE, "no option 'bucket_cap'", bucket_cap=3),
    "device of text": option((UnsuitableModuleError, RuntimeError), "device_id", device_id="cuda"),
    "dimensions of text": case(
        lambda make, module: make(module, mesh=dp(), dp_mesh_dims="dp"),
        WRONG_TYPE,
        r"dp_mesh_dims must be a DataParallelMeshDims.*'dp'",
    ),
}

WRAPPER = {
    "a list": case(lambda make, module: make([module]), NO_MODULE, r"nn\.Module.*list.*replicate"),
    "precision of text": option(WRONG_TYPE, r"mixed_precision must be.*'x'", mixed_precision="x"),
    "precision with text": option(
        WRONG_TYPE, r"mixed_precision\.reduce_dtype.*'x'", mixed_precision=Policy(reduce_dtype="x")
    ),
    "one device id": option(WRONG_TYPE, r"device_ids must be.*0.*\[0\]", device_ids=0),
    "half a device id": option(WRONG_TYPE, r"device_ids\[0\].*0\.5", device_ids=[0.5]),
    "a dim of text": option(WRONG_TYPE, "dim must be an integer", dim="x"),
    "init_sync of text": option(WRONG_TYPE, "init_sync must be True or False", init_sync="x"),
    "buffers by text": option(WRONG_TYPE, "forward_sync_buffers must be True or False", forward_sync_buffers="x"),
    "views of buckets": option(WRONG_TYPE, "batched_grad_copy must be True or False", batched_grad_copy="x"),
    "delayed unknown": case(
        lambda make, module: make(
            module,
            delay_all_reduce_named_params=[("9.weight", module[0].weight)],
            param_to_hook_all_reduce=module[0].bias,
        ),
        WRONG_VALUE,
        r"'9\.weight'.*no parameter",
    ),
    "delayed without names": case(
        lambda make, module: make(
            module, delay_all_reduce_named_params=[module[0].weight], param_to_hook_all_reduce=module[0].bias
        ),
        WRONG_TYPE,
        r"delay_all_reduce_named_params.*pairs.*named_parameters",
    ),
    "delayed until another": case(
        lambda make, module: make(
            module,
            delay_all_reduce_named_params=[("0.weight", module[0].weight)],
            param_to_hook_all_reduce=nn.Parameter(torch.ones(1)),
        ),
        WRONG_VALUE,
        r"param_to_hook_all_reduce must be a parameter of the module",
    ),
}

ON_A_REPLICA: dict[str, Case] = {
    "weight of text": case(lambda m: m.set_round_weight("a"), WRONG_TYPE, "weight must be a number.*'a'"),
    "weight of None": case(lambda m: m.set_round_weight(None), WRONG_TYPE, "weight must be a number.*None"),
    "weight of two": case(lambda m: m.set_round_weight(torch.ones(2)), WRONG_TYPE, "weight must be a number.*Tensor"),
    "weight below 0": case(lambda m: m.set_round_weight(-1), WRONG_VALUE, "finite number from 0 on.*-1"),
    "a hook of 3": case(lambda m: m.register_comm_hook(None, 3), WRONG_TYPE, "Communication hook must be callable.*3"),
    "a hook's bucket": case(
        lambda m: m.register_comm_hook(None, wrong_hook), WRONG_VALUE, "bucket annotation should be"
    ),
    "rows of a list": case(lambda m: m.set_sparse_rows([1]), WRONG_TYPE, r"rows must be.*\[1\].*\{'name': rows\}"),
    "rows of nobody": case(lambda m: m.set_sparse_rows({"x": torch.ones(1)}), WRONG_VALUE, "'x' is no managed"),
    "rows of text": case(lambda m: m.set_sparse_rows({"table.weight": "x"}), WRONG_TYPE, r"'table\.weight'.*'x'"),
    "rows of half": case(
        lambda m: m.set_sparse_rows({"table.weight": torch.tensor([0.5])}), WRONG_TYPE, r"'table\.weight'.*float32"
    ),
    "no group": case(lambda m: m.change_process_group(None), WRONG_TYPE, "ProcessGroup.*None.*group.WORLD"),
    "a group of text": case(lambda m: m.change_process_group("x"), WRONG_TYPE, "ProcessGroup.*'x'"),
    "sync by text": case(lambda m: m.set_requires_gradient_sync("x"), WRONG_TYPE, "must be True or False.*'x'"),
    "an optimizer of 3": case(lambda m: gradsync.overlap_optimizer(m, 3), WRONG_TYPE, "an Optimizer.*3.*overlap"),
    "a maker of 3": case(lambda m: gradsync.overlap_optimizer(m, lambda p: 3), WRONG_TYPE, "an Optimizer.*3.*overlap"),
    "a clip of text": case(
        lambda m: gradsync.overlap_optimizer(m, torch.optim.SGD, clip_value="a"), WRONG_TYPE, "clip_value.*'a'"
    ),
    "freed by text": case(
        lambda m: gradsync.overlap_optimizer(m, torch.optim.SGD, free_gradients="a"), WRONG_TYPE, "free_gradients.*'a'"
    ),
    "verify of text": case(lambda m: gradsync.verify(m, "x"), WRONG_TYPE, "optimizer.*'x'"),
    "uneven, swapped": case(lambda m: gradsync.uneven(m, [1]), NO_MODULE, r"uneven\(loader, module\).*\[1\]"),
    "uneven of 3": case(lambda m: gradsync.uneven(3, m), WRONG_TYPE, "loader.*3"),
}

REPLICATE_SETTERS: dict[str, Case] = {
    "factor of text": case(lambda m: m.set_gradient_divide_factor("a"), WRONG_TYPE, "factor must be a number.*'a'"),
    "factor of 0": case(lambda m: m.set_gradient_divide_factor(0), WRONG_VALUE, "finite number above 0.*0"),
    "all-reduce by text": case(lambda m: m.set_requires_all_reduce("x"), WRONG_TYPE, "True or False"),
    "an all-reduce hook of 3": case(lambda m: m.set_all_reduce_hook(3), WRONG_TYPE, "must be callable.*3"),
    "prefetch of text": case(
        lambda m: m.set_modules_to_forward_prefetch(["x"]), WRONG_VALUE, "Expects FSDPModule but got"
    ),
    "prefetch of 3": case(lambda m: m.set_modules_to_backward_prefetch(3), WRONG_TYPE, "modules must be.*3"),
    "a method of 3": case(lambda m: gradsync.register_forward_method(m, 3), WRONG_TYPE, "name.*3"),
    "no such method": case(lambda m: gradsync.register_forward_method(m, "x"), WRONG_VALUE, "no method 'x'"),
}

CALLS: dict[str, Callable[[Any], Any]] = {
    "statistics": gradsync.statistics,
    "verify": gradsync.verify,
    "unreplicate": gradsync.unreplicate,
    "overlap_optimizer": lambda given: gradsync.overlap_optimizer(given, torch.optim.SGD),
    "uneven": lambda given: gradsync.uneven([1], given),
    "register_forward_method": lambda given: gradsync.register_forward_method(given, "forward"),
    "fingerprint": gradsync.fingerprint,
}
WITHOUT_A_REPLICA: dict[str, Case] = {
    f"{name} of {what}": case(functools.partial(call, given), NO_MODULE, pattern)
    for name, call in CALLS.items()
    for what, given, pattern in [
        ("None", None, "None"),
        ("text", "x", "'x'"),
        ("a class", nn.Linear, "the class Linear"),
        ("a plain module", nn.Linear(2, 2), "not replicated"),
    ]
    if (name, what) != ("fingerprint", "a plain module")
}


def wrong_hook(state: object, bucket: int) -> Any:
    raise AssertionError


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.table(x)
        return out


def outcome(case: Case, *args: Any) -> tuple[list[bool], str, str]:
    try:
        case.call(*args)
    except Exception as error:
        kinds = [isinstance(error, kind) for kind in (*case.kinds, GradsyncError)]
        return kinds, f"{type(error).__name__}: {error}", str(error)
    return [False], "nothing was raised", ""


def tables(front: str) -> dict[str, Case]:
    own, setters = (REPLICATE, REPLICATE_SETTERS) if front == "replicate" else (WRAPPER, {})
    made = {f"made: {name}": each for name, each in {**SAME_FOR_BOTH, **own}.items()}
    return made | {f"called: {name}": each for name, each in {**ON_A_REPLICA, **setters}.items()}


def mistakes(front: str) -> dict[str, tuple[list[bool], str, str]]:
    make = getattr(gradsync, front)
    module = model()
    last: Any = module[2]
    before = gradsync.fingerprint(module)
    replica = make(Table())
    second = dist.get_rank() == 1
    dp()  # made by all ranks together
    found = {}
    for name, each in tables(front).items() if second else ():
        found[name] = outcome(each, *((make, module) if name.startswith("made") else (replica,)))
    assert gradsync.fingerprint(module) == before
    assert type(module) is nn.Sequential
    trained = make(module)
    for one, x in ((trained, torch.ones(4, 2) * dist.get_rank()), (replica, torch.tensor([dist.get_rank()]))):
        one(x).sum().backward()
    assert torch.equal(last.bias.grad, torch.full((2,), 4.0))
    assert replica.get_parameter("table.weight" if front == "replicate" else "module.table.weight").grad is not None
    gradsync.verify(trained)
    return found


_told: dict[str, Any] = {}


def told(ranks: Ranks, front: str) -> dict[str, tuple[list[bool], str, str]]:
    """What rank 1 was told of each mistake. Run once, also if that fails."""
    if front not in _told:
        try:
            _told[front] = ranks(mistakes, 2, front, limit=30)[1]
        except Exception as failure:
            _told[front] = failure
    found = _told[front]
    if isinstance(found, Exception):
        raise found
    answers: dict[str, tuple[list[bool], str, str]] = found
    return answers


@pytest.mark.parametrize(
    ("front", "name"), [(front, name) for front in FRONTS for name in tables(front)], ids=lambda value: str(value)
)
def test_refused(ranks: Ranks, front: str, name: str) -> None:
    wanted = tables(front)[name]
    kinds, shown, text = told(ranks, front)[name]
    assert all(kinds), f"no {' and '.join(kind.__name__ for kind in wanted.kinds)}: {shown}"
    assert re.search(wanted.pattern, text, re.DOTALL), shown


@pytest.mark.parametrize("name", WITHOUT_A_REPLICA)
def test_functions_that_want_a_replica(name: str) -> None:
    wanted = WITHOUT_A_REPLICA[name]
    kinds, shown, text = outcome(wanted)
    assert all(kinds), shown
    assert re.search(wanted.pattern, text, re.DOTALL), shown
