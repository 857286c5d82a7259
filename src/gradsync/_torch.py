"""The one door to torch's private names. Checked against torch 2.13; each says what it relies on."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils.dlpack
from torch import Tensor
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES, AllgatherOptions, HashStore, PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._utils import _get_device_index
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _apply_to_tensors, _to_kwargs
from torch.nn.parallel.distributed import DistributedDataParallel as _TorchDDP

from gradsync.errors import InvalidOptionError, NotSupportedError

NO_GRAPH_TASK = -1
Future = torch._C.Future
"""What c10d's works give; `torch.futures.Future` derives from it."""


current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The id of the backward that runs in this thread; `NO_GRAPH_TASK` outside of any.

A nested backward (reentrant checkpointing) has an id of its own.
"""


profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler of torch's takes down what this thread does (2.13; 40 ns)."""


F = TypeVar("F", bound=Callable[..., Any])


def current_node() -> Node | None:
    """The autograd node being evaluated in this thread, if any.

    In an end-of-backward callback it is `None` for an outermost backward, and the node that
    started the nested backward for a nested one (2.13: the engine leaves the node's guard before
    it runs callbacks). That is how the end of a nested backward is told from the real end.
    """
    node: Node | None = torch._C._current_autograd_node()
    return node


def inside_another_backward() -> bool:
    """Whether the backward that runs in this thread was started by a node of another one, as reentrant checkpoints do.

    Told by the Python frames of this thread: there is one of torch's for each backward that it has started (2.13:
    `torch.autograd.graph._engine_run_backward`). A thread of autograd's own, for a GPU, has started none itself.
    """
    starts, frame = 0, sys._getframe()
    while frame is not None:
        starts += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back  # type: ignore[assignment]
    return starts > (0 if threading.get_ident() not in threading._active else 1)


def runs_grad() -> bool:
    """Whether `torch.autograd.grad` runs in this thread, which accumulates nowhere (2.13: told by the frames)."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            caller = frame.f_back
            return caller is not None and caller.f_code.co_name == "grad"
        frame = frame.f_back  # type: ignore[assignment]
    return False


def another_half_follows() -> bool:
    """Whether what runs is `torch.autograd.grad` that keeps its graph, for another one, or a backward, to follow."""
    return torch._C._autograd._get_current_graph_task_keep_graph() and runs_grad()


def splits_backward() -> bool:
    """Whether torch's pipelining runs the first half of a backward in this thread: that of the inputs.

    The second half goes through `torch.autograd.grad`, past any hook, and is put into `.grad` by hand (2.13: told by
    the frames).
    """
    if "torch.distributed.pipelining._backward" not in sys.modules:
        return False
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "stage_backward_input":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def outside_of_graphs(function: F) -> F:
    """What torch.compile neither traces nor looks into: as `torch.compiler.disable`, which imports dynamo (seconds)."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    vars(function)["_torchdynamo_disable"] = True
    return function


def frame_outside_of_graphs(function: F) -> F:
    """What torch.compile does not trace, but what it calls: so no graph is broken off, which `fullgraph` refuses."""
    frames = torch._C._dynamo.eval_frame
    actions = frames._FrameAction
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT))
    return function


def call(module: Callable[..., Any], forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`forward` of `module`, called so that torch.compile makes a graph of it.

    From a frame that is not traced it makes none of what lies in files of torch's, as a `Sequential` does: that needs
    one around it (2.13). All others are called as they are: what goes through one frame shares its limit of graphs.
    """
    own = getattr(type(module), "forward", None)  # which script modules don't have
    if compiles() and getattr(own, "__module__", "").startswith("torch.nn."):
        return _traced(forward, args, kwargs)
    return forward(*args, **kwargs)


def _traced(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


frame_outside_of_graphs(call)


@dataclass(frozen=True)
class GraphsSplit:
    """For whose forward torch.compile splits graphs, as far as it asks."""

    bucket_bytes_cap: int


def split_graphs(cap: int | None) -> Any:
    """From now on torch.compile splits what it makes graphs of where gradients of `cap` bytes are complete; None: not.

    Else all gradients of a graph come when its backward is over, and nothing overlaps. Gives what was set before, for
    `graphs_split_as`. (2.13: dynamo does that for what torch's own class calls active, and asks it for the size of a
    bucket, which must be at least that of torch's first.)
    """
    before = graphs_are_split()
    graphs_split_as(None if cap is None else GraphsSplit(max(cap, _DEFAULT_FIRST_BUCKET_BYTES)))
    return before


def graphs_are_split() -> Any:
    """For whom, now."""
    return _TorchDDP._active_ddp_module


def graphs_split_as(whom: Any) -> None:
    """Puts back what `split_graphs` gave."""
    _TorchDDP._active_ddp_module = whom


def leave_to_python() -> None:
    """Should torch.compile trace this: what calls it, and what follows, is left to Python.

    A hook on what the traced part returns would be forgotten (2.13: on a tensor that is no input of its graph).
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break()


def check_not_compiled() -> None:
    """Refuses a backward that runs under compiled autograd: what `at_end_of_backward` was given, it never calls.

    (2.13: it is told by a variable of the module that does it, which is set while its graph runs.)
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.in_compiled_autograd_region:
        raise NotSupportedError(
            "this backward runs under compiled autograd, which does not tell when it is over, so that gradients can't "
            "be synchronized. Set torch._dynamo.config.compiled_autograd = False, or call backward outside of "
            "torch._dynamo.compiled_autograd; torch.compile(model) works without. The setting optimize_ddp = "
            "'python_reducer', which needs it, is for torch's own class: leave it at its default."
        )


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` when the backward that runs in this thread ends (not if it raises)."""
    Variable._execution_engine.queue_callback(callback)


def compiles() -> bool:
    """Whether torch.compile was ever used in this process."""
    return "torch._dynamo" in sys.modules


def is_compiled(node: Node) -> bool:
    """Whether a node of autograd's is a whole graph that torch.compile has made (2.13: told by its name)."""
    return node.name() == "CompiledFunctionBackward"


def made_before(node: Node) -> int:
    """A number that is smaller for a node made earlier, to which a backward comes later (2.13)."""
    return node._sequence_nr()


def will_accumulate(parameter: Tensor) -> bool:
    """Whether the running backward will accumulate into `parameter.grad`.

    False also inside `torch.autograd.grad`, which accumulates nowhere; there the engine refuses to
    answer for a parameter that is asked for (2.13: RuntimeError).
    """
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
    except RuntimeError:
        return False


def will_execute(node: Node) -> bool:
    """Whether the running backward will come to this node."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def inside_transform() -> bool:
    """Whether a transform of `torch.func` runs in this thread: what is computed in it is its own affair."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_of_transforms() -> AbstractContextManager[Any]:
    """Inside, what is done is not part of any transform of `torch.func` that runs in this thread (2.13)."""
    return torch._C._DisableFuncTorch() if inside_transform() else nullcontext()


def other_hooks_follow(parameter: Tensor) -> bool:
    """Whether somebody else has a post-accumulate-grad hook on `parameter` besides our one."""
    hooks = parameter._post_accumulate_grad_hooks
    return hooks is not None and len(hooks) > 1


def is_dtensor(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor. Does not import that package, which takes a second, to say no."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(tensor, package.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The tensor of this rank: of a DTensor the one inside, without a graph."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_gradient(gradient: Tensor, parameter: Tensor, apart: Sequence[str] = ()) -> Tensor:
    """This rank's part of a gradient, laid out over the mesh as its parameter is.

    Over the dimensions `apart` it is what this rank contributes to it, or all of it.
    """
    if not is_dtensor(gradient):
        return gradient
    placements = list(parameter.placements)  # type: ignore[attr-defined]
    for name in apart:
        at = parameter.device_mesh.mesh_dim_names.index(name)  # type: ignore[attr-defined]
        if gradient.placements[at].is_partial():  # type: ignore[attr-defined]
            placements[at] = gradient.placements[at]  # type: ignore[attr-defined]
    if list(gradient.placements) != placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return local(gradient)


def as_dtensor(tensor: Tensor, mesh: DeviceMesh, placements: Any, shape: Sequence[int], stride: Any) -> Tensor:
    """A DTensor of which this rank has `tensor`, where that lies: `from_local` would bring it to the mesh's device.

    (2.13: as `fully_shard` makes them, for parameters that it offloads.)
    """
    from torch.distributed.tensor import DTensor

    if tensor.device.type == mesh.device_type or tensor.is_meta:
        return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    form = TensorMeta(torch.Size(shape), stride, tensor.dtype)
    return DTensor(tensor, DTensorSpec(mesh, tuple(placements), tensor_meta=form), requires_grad=False)


def in_form_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A local gradient as what the parameter's `.grad` must be: a DTensor for a DTensor."""
    if not is_dtensor(parameter):
        return gradient
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return as_dtensor(gradient, mesh, placements, parameter.shape, parameter.stride())


def in_form_to_compute(tensor: Tensor, compute: Tensor) -> Tensor:
    """A tensor in dtype and layout of one that computes, by operations that have a gradient; itself if it is so."""
    if is_dtensor(tensor) and not (is_dtensor(compute) and compute.device_mesh == tensor.device_mesh):  # type: ignore[attr-defined]
        tensor = tensor.to_local()  # type: ignore[attr-defined]
        if is_dtensor(compute):
            tensor = in_form_of(compute, tensor)
    return tensor.to(compute.device, compute.dtype) if tensor.is_floating_point() else tensor


def joined_mesh(first: DeviceMesh, second: DeviceMesh, name: str) -> DeviceMesh:
    """The mesh with the dimensions of both, which must be slices of one larger mesh."""
    root = first._get_root_mesh()
    if root is not second._get_root_mesh() or not first.mesh_dim_names or not second.mesh_dim_names:
        raise InvalidOptionError(
            f"parameter '{name}' is a DTensor over {second}, which is not part of the same named mesh as {first}. "
            "Make one mesh, init_device_mesh(type, (dp, tp), mesh_dim_names=('dp', 'tp')), and slice both from it."
        )
    names = (*first.mesh_dim_names, *second.mesh_dim_names)
    return root[names]


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A nested value, dataclasses included, with each tensor replaced."""
    return _apply_to_tensors(function, value)


def store_of(group: dist.ProcessGroup) -> Store:
    """The store through which the group's ranks met (2.13: kept in c10d's table of groups)."""
    store: Store = distributed_c10d._world.pg_map[group][1]
    return store


def host_of(store: Store) -> str:
    """The name or address of the host that keeps it; "" if none does (2.13: below layers of prefixes)."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def cat_into(flat: Tensor, tensors: list[Tensor]) -> bool:
    """Writes tensors one after the other into `flat`, of shape (1, their elements); False if torch has no quick way.

    A third of the time of a multi-tensor copy if they are small. None of them may be a scalar or empty (2.13: that
    ends the process), nor overlap with `flat`.
    """
    if not hasattr(torch, "_chunk_cat") or tensors[0].dtype != flat.dtype:
        return False
    try:
        torch._chunk_cat(tensors, 0, 1, out=flat)
    except RuntimeError:  # of several types, for example
        return False
    return True


def references_to(tensor: Tensor) -> int:
    """How many tensors have the same memory, and one more, which is asked here; 0 if torch does not count."""
    return count_references([storage_of(tensor)])[0]


def of_its_own(flat: Tensor) -> Tensor:
    """A tensor over the same memory that does not tell of what lies beside it: no view, with a storage of its own.

    Only on the CPU (2.13: through DLPack). On a GPU such a storage could not be sent to other processes.
    """
    with torch.inference_mode(False):
        return torch.utils.dlpack.from_dlpack(flat) if flat.device.type == "cpu" else flat.data


def storage_of(tensor: Tensor) -> int:
    """Names the tensor's storage for `count_references`, as long as the tensor has it."""
    named: int = tensor.untyped_storage()._cdata
    return named


def count_references(storages: list[int]) -> list[int]:
    """How many tensors have each of these storages, and perhaps one more; 0 if torch does not count."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    return [0] * len(storages) if count is None else list(map(count, storages))


@lru_cache(maxsize=1)
def references_as_grad() -> int:
    """How many references Python counts more for a tensor that is some parameter's `.grad` (2.13: one)."""
    gradient, parameter = torch.empty(0), torch.nn.Parameter(torch.empty(0))
    before = sys.getrefcount(gradient)
    parameter.grad = gradient
    return sys.getrefcount(gradient) - before


def is_alone(tensor: Tensor) -> bool:
    """Whether certainly no other tensor has the same memory (2.13: two hold it, the tensor, and what is asked here)."""
    return 0 < references_to(tensor) <= 2


def read_all(store: Store, keys: list[str]) -> list[bytes]:
    """Values that are all there, in one request where the store can do that (2.13: a file or a dictionary can't)."""
    at_once = store.has_extended_api()  # type: ignore[attr-defined]
    return store.multi_get(keys) if at_once else [store.get(key) for key in keys]


def knows(group: dist.ProcessGroup) -> bool:
    """Whether c10d made the group; one written in Python may have been made without it."""
    return group in distributed_c10d._world.pg_map


def forget_failed_group() -> None:
    """If the default group could not be made, nothing is left of it (2.13: but a number: the next one would go by
    another name than on ranks where the same has not happened, and they would wait for each other)."""
    if not dist.is_initialized():
        distributed_c10d._world.group_count = 0


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Its ranks in the world; of a group that c10d does not know, something that only the same group has."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError, AssertionError):
        return [-1 - id(group)]


@lru_cache(maxsize=1)
def group_of_one() -> dist.ProcessGroup:
    """A group that has this process alone, and that c10d does not know (2.13: `get_world_size` asks the group)."""
    return dist.ProcessGroup(HashStore(), 0, 1)


def normalize_over(layer: torch.nn.SyncBatchNorm, group: Any) -> None:
    """Over whose batches it takes its statistics (2.13: it looks this up in each forward)."""
    layer.process_group = group


def twin_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of all ranks, with the same backend; all of them take part in making it."""
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timeout_of(group),
        backend=str(dist.get_backend_config(group)),
    )
    return made


def gloo_of(group: dist.ProcessGroup) -> Any:
    """What carries the group's tensors on the CPU, if that is gloo itself (2.13: not if c10d is set to debug)."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # a group for GPUs, or one that is written in Python
        return None
    return backend if type(backend) is getattr(dist, "ProcessGroupGloo", None) else None


def gloo_threads(group: dist.ProcessGroup) -> int | None:
    """With how many threads the group's gloo works (2.13: an option that is readable, but private)."""
    threads: int | None = getattr(getattr(gloo_of(group), "options", None), "_threads", None)
    return threads


def connect_gloo(like: Any, store: Store, name: str, rank: int, size: int, seconds: float, to_connect: float) -> Any:
    """Connections of their own between some ranks of a gloo group, through the same network device and its thread.

    Beside c10d's table of groups: that names groups by counting those that a rank has made, which other ranks would
    not count, and gives names twice. Ends when the last reference does. (2.13: has the collectives that a group has.)
    `seconds`: for each collective. `to_connect`: for each connection, once all have told where they are. (2.13: gloo
    tries five times, and takes its limit for each of them.)
    """
    for_a_try = timedelta(seconds=to_connect / _GLOO_TRIES)
    if like is None:  # a network device of its own, as the environment says
        made = dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, for_a_try)
    else:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = like.options._devices
        options._threads = 2
        options._timeout = for_a_try
        made = dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, options)
    made._set_default_timeout(timedelta(seconds=seconds))
    return made


def break_off(gloo: Any) -> None:
    """Ends what is under way, with an error here and on the other ranks: gloo would wait for it when it is freed.

    (2.13: its `abort` does nothing, but after a receive that takes too long it closes all connections.) Of every rank,
    since one from a rank that has closed its own already fails at once, and then the connections with others stay.
    """
    for other in range(gloo.size()):
        if other != gloo.rank():
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.zeros(1)], other, _UNUSED_TAG).wait(timedelta(milliseconds=1))


_UNUSED_TAG = 0x67720000
_GLOO_TRIES = 5


def all_reduce(group: Any, tensor: Tensor) -> dist.Work:
    """Starts a sum. By the group's own method: a group written in Python need not be in c10d's table."""
    options = dist.AllreduceOptions()
    options.asyncOp = True
    started: dist.Work = group.allreduce([_as_real(tensor)], options)
    return started


def broadcast(group: Any, tensor: Tensor, root: int) -> dist.Work:
    """Starts a broadcast from a rank of the group."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
    started: dist.Work = group.broadcast([tensor], options)
    return started


def all_gather(group: Any, of_all: list[Tensor], mine: Tensor) -> dist.Work:
    """Starts collecting a tensor of the same shape from each rank."""
    options = AllgatherOptions()
    options.asyncOp = True
    started: dist.Work = group.allgather([list(map(_as_real, of_all))], [_as_real(mine)], options)
    return started


def all_to_all(group: Any, received: Tensor, sent: Tensor, sizes: list[int], of_sent: list[int]) -> dist.Work:
    """Starts sending each rank its part of a flat tensor; of what is received, so many elements come from each."""
    if received.is_complex():
        received, sent = _as_real(received).view(-1), _as_real(sent).view(-1)
        sizes, of_sent = [2 * size for size in sizes], [2 * size for size in of_sent]
    options = dist.AllToAllOptions()
    options.asyncOp = True
    started: dist.Work = group.alltoall_base(received, sent, sizes, of_sent, options)
    return started


def _as_real(tensor: Tensor) -> Tensor:
    """(2.13: no backend adds up complex numbers.)"""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the group's collectives may take (2.13: an option of the backend, not of the group)."""
    for device in device_types(group):
        with contextlib.suppress(RuntimeError):  # written in Python
            options = getattr(group._get_backend(device), "options", None)
            if options is not None:
                found: timedelta = options._timeout
                return found
    return default_pg_timeout


def seconds_to_connect(seconds: float) -> timedelta:
    """The limit to give gloo so that its ranks have so long to connect (2.13: it tries five times)."""
    return timedelta(seconds=seconds / _GLOO_TRIES)


def set_timeout(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Of collectives from now on."""
    for device in device_types(group):
        with contextlib.suppress(RuntimeError):  # written in Python
            group._get_backend(device)._set_default_timeout(limit)


def device_types(group: dist.ProcessGroup) -> list[torch.device]:
    """The kinds of device whose tensors the group can carry."""
    found: list[torch.device] = group._device_types
    return found


def device_index(device: int | torch.device) -> int:
    """The number of a GPU, also where only its kind is given."""
    return int(_get_device_index(device, True))


def accelerator() -> str:
    """The kind of device that a bare number means."""
    found = torch.accelerator.current_accelerator()
    return "cuda" if found is None else found.type


@lru_cache(maxsize=64)
def has_streams(device: torch.device) -> bool:
    """Whether what is computed on a device is queued on streams."""
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == device.type


def current_stream(device: torch.device) -> torch.Stream:
    """As `torch.accelerator.current_stream`, in a fifth of its time (0.45 us): it is asked for each gradient (2.13)."""
    found: torch.Stream = torch._C._accelerator_getStream(device.index)
    return found


def keep_for(tensor: Tensor, stream: torch.Stream) -> None:
    """Its memory is used on that stream too: freed, it is not used again before that (2.13: also inside a DTensor)."""
    inside = local(tensor)
    if inside.layout is torch.strided:
        inside.record_stream(stream)
        return
    for part in (inside._indices(), inside._values()):
        part.record_stream(stream)


def to_kwargs(inputs: Any, kwargs: Any, device: torch.device) -> Any:
    """Positional and keyword inputs with their tensors on `device`, each in a tuple of one."""
    return _to_kwargs(inputs, kwargs, device, use_side_stream_for_tensor_copies=True)


def outside_of_join() -> Any:
    """The settings of a joinable that is in no `Join` context (2.13: a named tuple with `enable`)."""
    from torch.distributed.algorithms.join import _JoinConfig

    return _JoinConfig.construct_disabled_join_config()


def distributed_autograd_context() -> int | None:
    """The id of the distributed autograd context (torch's RPC) that this thread is in, if any."""
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc is None or not getattr(rpc, "_is_current_rpc_agent_set", lambda: False)():
        return None
    from torch._C._distributed_autograd import _current_context

    try:
        found: int = _current_context()._context_id()
    except RuntimeError:  # there is no way to ask
        return None
    return found


def distributed_gradients(context: int) -> dict[Tensor, Tensor]:
    """The gradients that a distributed backward has left: in its context, not in `.grad`."""
    from torch._C._distributed_autograd import get_gradients

    found: dict[Tensor, Tensor] = get_gradients(context)
    return found


def local_value(value: Any) -> Any:
    """What a remote reference of torch's RPC refers to, if that is in this process; else the value itself."""
    return value.local_value() if _is_reference(value) and value.is_owner() else value


def is_remote(value: Any) -> bool:
    """Whether this is a reference of torch's RPC to something in another process."""
    return _is_reference(value) and not value.is_owner()


def _is_reference(value: Any) -> bool:
    """(2.13: `rpc.remote` gives a `PyRRef`, of which the public `RRef` is a subclass.)"""
    rpc: Any = sys.modules.get("torch.distributed.rpc")
    return rpc is not None and rpc.is_available() and isinstance(value, rpc.PyRRef)


def in_backward_optimizers(parameter: Tensor) -> list[Any]:
    """What `torch.distributed.optim._apply_optimizer_in_backward` has put on a parameter."""
    return getattr(parameter, "_in_backward_optimizers", [])


def remove_in_backward_hooks(parameter: Tensor) -> None:
    """Takes the hooks off that would step in backward by themselves (2.13: kept in a table of that module)."""
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for handle in param_to_optim_hook_handle_map.get(parameter, []):
        handle.remove()


def overlapped_optimizer(kind: type, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's functional optimizer for a communication hook, behind `_register_fused_optim`."""
    from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

    return _as_overlapped_optim(kind, parameters, *args, **kwargs)


def builtin_hook(kind: Any) -> Any:
    """The Python hook that does what one of torch's built-in hooks does in C++."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    names = {"ALLREDUCE": "allreduce_hook", "FP16_COMPRESS": "fp16_compress_hook"}
    return getattr(default_hooks, names[str(kind).split(".")[-1]])


def composable_keys() -> tuple[str, str]:
    """The names under which torch's composable APIs keep state and registry in a module.

    Ours are kept in the same place, so that torch's `fully_shard` sees `replicate` and we see it.
    The names are random for each process, hence the late import.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    return STATE_KEY, REGISTRY_KEY


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written to, as far as torch counts; constant for one made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
