"""Each call that puts things in order is taken out in turn: the detector must say so, on every run."""

from __future__ import annotations
import __future__

import ast
import contextlib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import gradsync
from tests.accelerator.test_streams import Fork
from tests.ranks.small import batch, build
from tests.support import accelerator
from tests.support.accelerator.ranks import on_accelerator

SOURCE = Path(gradsync.__file__).parent


def backward(replica: Any, number: int) -> None:
    x = batch(dist.get_rank(), number).to(torch.accelerator.current_accelerator())
    replica(x).square().mean().backward()


def step(replica: Any, module: nn.Module, number: int) -> None:
    backward(replica, number)
    for parameter in module.parameters():  # a user's step
        if parameter.grad is not None:
            parameter.data.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None


def steps(module: nn.Module, cap: float = 0.0001, **options: Any) -> None:
    module.to(torch.accelerator.current_accelerator())
    replica = gradsync.DistributedDataParallel(module, bucket_cap_mb=cap, **options)
    for number in range(3):
        step(replica, module, number)


def plain() -> None:
    steps(build())


def branches() -> None:
    steps(Fork(lambda: torch.Stream(torch.accelerator.current_accelerator())))


def in_low_precision() -> None:
    module = Fork(lambda: torch.Stream(torch.accelerator.current_accelerator()))
    module.to(torch.accelerator.current_accelerator())
    replica = gradsync.replicate(
        module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    for number in range(3):
        with replica.no_sync():
            backward(replica, number)
        step(replica, module, number)


def buffers() -> None:
    steps(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def buffers_averaged() -> None:
    steps(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), buffers="average")


class Late(nn.Module):
    """Its layer comes more often in later steps, and after its bucket has left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.times = nn.Linear(4, 4), nn.Linear(4, 4), 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(lambda x: self.layer(x).tanh(), x, use_reentrant=True)
        self.times += 1
        return x


def late_gradients() -> None:
    steps(Late(), cap=0.00001)


def communication_hook() -> None:
    module = build().to(torch.accelerator.current_accelerator())
    replica = gradsync.DistributedDataParallel(module, bucket_cap_mb=0.0001)
    replica.register_comm_hook(None, allreduce_hook)
    for number in range(3):
        step(replica, module, number)


def buffer_hook() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.accelerator.current_accelerator())
    replica = gradsync.DistributedDataParallel(module)

    def hook(state: object, named: dict[str, Tensor]) -> list[Any]:
        work = dist.all_reduce(named["1.running_mean"], async_op=True)
        assert work is not None
        return [work.get_future()]

    replica._register_buffer_comm_hook(None, hook)
    for number in range(3):
        step(replica, module, number)


class Fault(NamedTuple):
    file: str
    function: str  # with its class
    line: str  # what is taken out
    scenario: Callable[[], None]
    left: str = "pass"  # what is left in its place


ANNOTATIONS = __future__.__dict__["annotations"].compiler_flag
WAIT_OF_CONNECTIONS = "finish(work, on_cpu, self._find_watch, self._limit)"
SUM_OF_BUFFERS, SUM_OF_LATE = "1 / self._transport.size)", "scaling.factor, label)"
FAULTS = [
    Fault("engine/arrival_streams.py", "ArrivalStreams.join", "here.wait_stream(came)", branches),
    Fault("engine/arrival_streams.py", "ArrivalStreams.join", "_torch.keep_for(gradient, here)", in_low_precision),
    Fault("engine/round.py", "Round._send", "group.join_streams(bucket.indices)", branches),
    Fault("engine/step.py", "TrainingStep.show_registered", "self.reducer.group.join_streams()", in_low_precision),
    Fault("engine/parameter_group.py", "ParameterGroup.join_streams", "self._streams.join(indices)", branches),
    Fault("engine/flights.py", "Flights.wait_for", "flight.work.wait()", plain),
    Fault("engine/buffers.py", "Buffers._average", SUM_OF_BUFFERS + ".wait()", buffers_averaged, SUM_OF_BUFFERS),
    Fault("engine/buffers.py", "Buffers._run_hook", "future.wait()", buffer_hook),
    Fault("engine/late_gradients.py", "carry_late", SUM_OF_LATE + ".wait()", late_gradients, SUM_OF_LATE),
    Fault(
        "hooks/comm_hook.py", "HookWork._take_result", "self.future.wait()", communication_hook, "self.future.value()"
    ),
    Fault("hooks/comm_hook.py", "HookWork.wait", "self.tail.wait()", communication_hook),
    Fault(
        "transport/process_group.py", "_InFlight.wait", "self.connections.finish(self.work, self.buffer.is_cpu)", plain
    ),
    Fault(
        "transport/process_group.py", "ProcessGroupTransport._run", "self._connections.finish(work, on_cpu)", buffers
    ),
    Fault("transport/dedicated_group.py", "Connections.finish", WAIT_OF_CONNECTIONS, plain),
    Fault("transport/waiting.py", "finish", "        work.wait()\n        return\n", plain, "        return\n"),
]
WAITS = ("wait", "wait_stream", "wait_event", "record_stream", "keep_for", "join_streams")
EXEMPT = {
    ("engine/flights.py", "_await_hook"): "on the CPU, or of buckets that are thrown away",
    ("engine/reducer.py", "leave"): "of a round that is dropped: nothing of it is read",
    ("engine/uneven.py", "_announce"): "torch's Join, whose result nobody reads here; gather orders what follows",
    ("engine/sparse_rows.py", "reduce"): "sparse gradients, which the stand-in does not have",
    (
        "engine/parameter_group.py",
        "fold_in",
    ): "behind show_registered at the end of a backward, else behind _send",
    ("transport/waiting.py", "_finished_in_slice"): "on the CPU",
    ("engine/sharded_step.py", "end_shard"): "what it adds up is taken on the stream that backward ended on",
    ("replicate_setters.py", "unshard"): "a handle of ours, which has nothing to wait for",
    ("_torch.py", "keep_for"): "taken out in ArrivalStreams.join",
    ("_torch.py", "break_off"): "on the CPU",
}


def plant(fault: Fault) -> None:
    """In this process, from now on."""
    module = importlib.import_module("gradsync." + fault.file.removesuffix(".py").replace("/", "."))
    *outer, name = fault.function.split(".")
    owner = getattr(module, outer[0]) if outer else module
    original = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(fault.line) == 1, f"'{fault.line}' is no longer in {fault.function}: change this list"
    made: dict[str, Any] = {}
    changed = source.replace(fault.line, fault.left)
    exec(compile(changed, fault.file, "exec", flags=ANNOTATIONS, dont_inherit=True), vars(module), made)
    everywhere = [each for key, each in sys.modules.items() if key.startswith("gradsync")]  # who imported it, too
    for holder in [owner, *(each for each in everywhere if vars(each).get(name) is original)]:
        setattr(holder, name, made[name])


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.function}: {fault.line.strip().splitlines()[0]}")
@on_accelerator(2)
def test_what_is_not_in_order_is_found(fault: Fault) -> None:
    fault.scenario()
    assert not accelerator.races(), accelerator.races()[0]
    plant(fault)
    with contextlib.suppress(accelerator.Race):
        fault.scenario()
    assert accelerator.races()
    torch.accelerator.synchronize()
    accelerator.reset()


def ordering_calls() -> Iterator[tuple[str, str]]:
    """Where in what runs with accelerators something is waited for."""
    files = [
        *SOURCE.glob("*.py"),
        *SOURCE.glob("engine/*.py"),
        *SOURCE.glob("hooks/*.py"),
        SOURCE / "guard" / "replicas.py",
    ]
    files += [SOURCE / "transport" / f"{name}.py" for name in ("process_group", "dedicated_group", "waiting")]
    for file in files:
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                for call in ast.walk(function):
                    if isinstance(call, ast.Call) and name_of(call) in WAITS:
                        yield str(file.relative_to(SOURCE)), function.name


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def test_no_call_is_left_out() -> None:
    found = set(ordering_calls())
    planted = {(fault.file, fault.function.split(".")[-1]) for fault in FAULTS}
    assert found - planted == EXEMPT.keys()
