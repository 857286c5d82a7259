"""Front 1: `replicate(module)`, in place, names unchanged. Translates arguments; the engine does the rest."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable

from gradsync import _torch, arguments, contract
from gradsync.engine.engine import Engine
from gradsync.engine.module_names import named_buffers, named_parameters
from gradsync.engine.parameter_policy import ParameterPolicy, check_replicated
from gradsync.engine.step import owner_of
from gradsync.errors import InvalidOptionError, UnsuitableModuleError, WrongTypeError
from gradsync.groups import check_mesh, group_of_mesh, replicated_dimensions, resolve_group
from gradsync.guard import unsynchronized
from gradsync.joinable import JoinableReplica
from gradsync.options import Options
from gradsync.replica import API, Replica, engine_of, is_replicated, make_engine
from gradsync.replicate_setters import Setters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

M = TypeVar("M", bound=nn.Module)
Method = Callable[..., Any]
_NAMED_MODULES = "Pass modules, also a single one as [module]; one by its name is module.get_submodule('name')."
_NAMED_TENSORS = "Pass parameters, also a single one as [parameter]; by its name it is module.get_parameter('name')."


class ReplicateModule(Setters, JoinableReplica, Replica, contract.ComposableModule, nn.Module):
    """What a replicated module can do besides what its own class can.

    No hook is put on the module: `__call__` of this class surrounds the original one. So copies,
    pickles and the order of the user's own hooks are as if it were not there.
    """

    API = API

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Whoever makes another one of this class, as slicing a container does, gets a plain one."""
        return contract.original_class(cls)(*args, **kwargs)

    @_torch.frame_outside_of_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _surrounded(self._engine, self, super().__call__, args, kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._engine.managed.compute_parameters.to_registered()
        return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Into what is registered, also after a forward whose backward never came."""
        self._engine.managed.compute_parameters.to_registered()
        super()._load_from_state_dict(*args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self._engine.managed.compute_parameters.to_registered()
        return super().requires_grad_(requires_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also between forward and backward, when the registered parameters are not in the module."""
        super().zero_grad(set_to_none)
        self._engine.managed.compute_parameters.zero_grad(set_to_none)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Converts and moves what is registered; what computes follows before the next forward."""
        self._engine.managed.compute_parameters.to_registered()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _apply_to(self, duplicate: nn.Module) -> None:
        """Makes a copy a working replica of its own, in step over the same group, without communicating.

        Good for an exponential moving average, and a copy that is trained on is not trained alone.
        """
        super()._apply_to(duplicate)
        engine = self._engine
        options = dataclasses.replace(engine.options, init_sync="none")
        duplicates = Engine(
            [duplicate],
            engine.transport,
            options,
            engine.ignored,
            engine.policy,
            group=engine.process_group,
            copied=True,
        )
        _attach([duplicate], duplicates)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is registered is copied and pickled."""
        self._engine.managed.compute_parameters.to_registered()
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
            reduced[2][unsynchronized.SAVED] = True  # who trains it as it is, loaded, is told
        return reduced


# Registered, not a base: that one's metaclass would clash with that of a user's class.
Joinable.register(ReplicateModule)


if TYPE_CHECKING:

    class Replicated(ReplicateModule, Any, Generic[M]):
        """A replica as type checkers see it, for Python has no type for an `M` that is a `ReplicateModule` too.

        What `ReplicateModule` has is known. The rest is the module's own and `Any`; it passes for an `M` wherever one
        is wanted. After `assert isinstance(module, ReplicateModule)` both are known.
        """

        def __getattr__(self, name: str) -> Any: ...


@overload
def replicate(
    module: M,
    ignored_modules: Iterable[nn.Module] | None = ...,
    *,
    mesh: DeviceMesh | None = ...,
    process_group: dist.ProcessGroup | None = ...,
    device_mesh: DeviceMesh | None = ...,
    device_id: int | torch.device | None = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    mp_policy: Any = ...,
    offload_policy: Any = ...,
    dp_mesh_dims: Any = ...,
    **options: Any,
) -> Replicated[M]: ...


@overload
def replicate(
    module: list[M],
    ignored_modules: Iterable[nn.Module] | None = ...,
    *,
    mesh: DeviceMesh | None = ...,
    process_group: dist.ProcessGroup | None = ...,
    device_mesh: DeviceMesh | None = ...,
    device_id: int | torch.device | None = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    mp_policy: Any = ...,
    offload_policy: Any = ...,
    dp_mesh_dims: Any = ...,
    **options: Any,
) -> list[Replicated[M]]: ...


def replicate(
    module: Any,
    ignored_modules: Iterable[nn.Module] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    device_id: int | torch.device | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    dp_mesh_dims: Any = None,
    **options: Any,
) -> Any:
    """Makes `module` a replica that is kept in step with those of the other ranks, and returns it.

    In place: the same object, with the same names of parameters, buffers and submodules. Its class
    becomes one of the same name, a subclass of both its own class and `ReplicateModule`. A list of
    modules makes one group, whose gradients travel together.

    All ranks of `process_group` (default: the default group, made from torchrun's environment if
    need be) call this with the same model; rank 0's values are broadcast. From then on every
    backward that reaches the module's parameters, however, leaves the gradient of the mean loss
    over all ranks in their `.grad`.

    - `mesh`: a 1-D mesh instead of a group. Registered parameters become DTensors over it;
      forward and backward use plain local tensors. With `dp_mesh_dims` a larger mesh of which
      the named dimensions are replicated: parameters and inputs are DTensors over all of it.
      `device_mesh`: only its group; parameters stay what they are.
    - `ignored_modules`, `ignored_params`: left out. So are submodules that are replicated already
      (they have their own engine), and those under `fully_shard`.
    - `mp_policy`, `offload_policy`: torch's `MixedPrecisionPolicy` and `CPUOffloadPolicy`.
    - `device_id`: where inputs are moved to.
    - everything else: see `gradsync.Options`; names of torch's DDP arguments work too.
    """
    modules = contract.roots(arguments.modules(module, "replicate()"))
    checked = _options(options)
    device = _check_device(device_id)
    for one in modules:
        _check(one)
    inner: list[nn.Module] = arguments.items("ignored_modules", ignored_modules, nn.Module, _NAMED_MODULES)
    single: list[nn.Parameter] = arguments.items("ignored_params", ignored_params, Tensor, _NAMED_TENSORS)
    ignored = _ignored(modules, inner, single)
    checked.check_names({name for name, _ in named_parameters(modules)} - ignored)
    policy = _policy(mp_policy, offload_policy, device or _computing_device(mesh))
    group, over = _where(modules, mesh, process_group, device_mesh, dp_mesh_dims)
    checked.check_ranks(group.size())
    policy = dataclasses.replace(policy, mesh=over, whole_mesh=None if dp_mesh_dims is None else mesh)
    if policy.mesh is not None:
        for name, parameter in named_parameters(modules):
            check_replicated(name, parameter, policy.mesh)
    _check_unowned(modules, ignored)
    outside = [*single, *(parameter for one in inner for parameter in one.parameters())]
    input_device = device if device is not None and device.type != "cpu" else None
    engine = make_engine(modules, group, checked, ignored, policy, input_device=input_device, left_alone=outside)
    _attach(modules, engine)
    return module


@overload
def unreplicate(module: Replicated[M]) -> M: ...


@overload
def unreplicate(module: M) -> M: ...


@overload
def unreplicate(module: list[M]) -> list[M]: ...


def unreplicate(module: Any) -> Any:
    """Undoes `replicate`: the module is again what it was, and keeps its values and gradients.

    With a mesh its parameters stay DTensors. Of a list, undoing one undoes all.
    """
    first, *_ = arguments.modules(module, "unreplicate()")
    engine = engine_of(first)
    engine.disarm()
    for one in engine.modules:
        contract.withdraw(one, API)
        contract.take_off(one, ReplicateModule)
    return module


def register_forward_method(module: nn.Module, name: str) -> None:
    """Makes another method of a replicated module count as a forward: its inputs are cast, its outputs hooked.

    Needed only with a mesh or a precision policy; gradients are synchronized without it.
    """
    engine_of(module)
    arguments.instance("the name", name, str, "Pass the name of a method, as 'generate'.")
    method = getattr(type(module), name, None)
    if not callable(method):
        raise InvalidOptionError(f"{type(module).__name__} has no method '{name}'")

    @functools.wraps(method)
    def surrounded(self: ReplicateModule, *args: Any, **kwargs: Any) -> Any:
        return _surrounded(self._engine, self, functools.partial(method, self), args, kwargs)

    setattr(type(module), name, surrounded)


@_torch.frame_outside_of_graphs
def _surrounded(engine: Engine, module: nn.Module, forward: Method, args: Any, kwargs: Any) -> Any:
    """A forward with what the engine does before and after it."""
    engine.before_forward((args, kwargs))
    try:
        args, kwargs = engine.prepare_inputs(args, kwargs)
        output = engine.policy.cast_outputs(_torch.call(module, forward, args, kwargs))
    except BaseException:
        engine.end_forward()
        raise
    engine.after_forward(output)
    return output


def _attach(modules: Sequence[nn.Module], engine: Engine) -> None:
    for module in modules:
        module.__dict__.pop(unsynchronized.SAVED, None)
        contract.enrol(module, API, engine)
        contract.put_on(module, ReplicateModule, "Replicate", shared=False)


# --- arguments -------------------------------------------------------------------------------------------


def _check(module: nn.Module) -> None:
    if "fully_shard" in contract.registry(module):
        raise UnsuitableModuleError(
            "Cannot apply `replicate()` on a Module already managed by `fully_shard`. Replicate its parent, "
            "which leaves it alone, or use one of the two."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsuitableModuleError(
            f"{type(module).__name__} was compiled by torch.jit: it can't get another class, as replicate() gives it. "
            "Wrap it, gradsync.DistributedDataParallel(module), or replicate the plain module that holds it."
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise InvalidOptionError(
            f"replicate does not support containers that do not implement forward: {type(module).__name__}. "
            "Pass the module that calls them, or a list of modules."
        )
    contract.check_not_applied(module, API)


def _options(given: dict[str, Any]) -> Options:
    """Options, also under the names that torch's DDP has for them."""
    given = dict(given)
    for name in ("broadcast_buffers", "forward_sync_buffers"):
        kept = given.pop(name, None)
        if kept is not None and not arguments.flag(name, kept):
            given.setdefault("buffers", "never")
    for name in ("check_reduction", "batched_grad_copy"):
        arguments.flag(name, given.pop(name, False))  # nothing to choose here
    known = {field.name for field in dataclasses.fields(Options)}
    if unknown := set(given) - known:
        raise InvalidOptionError(
            f"replicate() has no option {', '.join(map(repr, sorted(unknown)))}. It has: {', '.join(sorted(known))}."
        )
    return Options(**given)


def _check_device(device_id: object) -> torch.device | None:
    if device_id is None or isinstance(device_id, torch.device):
        return device_id
    if isinstance(device_id, int) and not isinstance(device_id, bool):
        return torch.device(_torch.accelerator(), device_id)
    raise UnsuitableModuleError(
        f"Expected device_id to be int or torch.device, but got {type(device_id)}. Pass for example "
        "torch.device('cuda', local_rank)."
    )


def _where(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh | None,
    process_group: dist.ProcessGroup | None,
    device_mesh: DeviceMesh | None,
    dp_mesh_dims: Any,
) -> tuple[dist.ProcessGroup, DeviceMesh | None]:
    """The group over which to replicate, and the mesh over which parameters are to be registered."""
    for name, each in (("mesh", mesh), ("device_mesh", device_mesh)):
        if each is not None:
            check_mesh(name, each)
    given = [x for x in (mesh, process_group, device_mesh) if x is not None]
    if len(given) > 1:
        raise InvalidOptionError("Cannot specify both process_group and device_mesh arguments, or mesh. Choose one.")
    if dp_mesh_dims is not None:
        return replicated_dimensions(mesh, dp_mesh_dims)
    if mesh is not None and mesh.ndim != 1:
        raise InvalidOptionError(
            f"replicate expects a 1D DeviceMesh but got {mesh}. Pass one of its dimensions, as mesh['name'], or "
            "say with dp_mesh_dims which ones to replicate over."
        )
    if mesh is not None:
        return group_of_mesh(mesh), mesh
    if device_mesh is not None:
        return group_of_mesh(device_mesh), None
    device_type = next((p.device.type for module in modules for p in module.parameters()), "cpu")
    return resolve_group(process_group, device_type), None


def _ignored(
    modules: Sequence[nn.Module], ignored_modules: Iterable[nn.Module], ignored_params: Iterable[nn.Parameter]
) -> frozenset[str]:
    """Names of parameters and buffers that are not ours."""
    left_out = {id(parameter) for parameter in ignored_params}
    others = list(ignored_modules)
    for module in modules:
        for sub in module.modules():
            if sub is not module and {"replicate", "fully_shard"} & contract.registry(sub).keys():
                others.append(sub)
    for sub in others:
        left_out |= {id(tensor) for tensor in (*sub.parameters(), *sub.buffers())}
    named = (*named_parameters(modules), *named_buffers(modules))
    return frozenset(name for name, tensor in named if id(tensor) in left_out)


def _check_unowned(modules: Sequence[nn.Module], ignored: frozenset[str]) -> None:
    """An ancestor that was replicated first has these parameters, and would lose them unnoticed."""
    for name, parameter in named_parameters(modules):
        owner = owner_of(parameter)
        if name not in ignored and owner is not None and is_replicated(owner.module):
            raise InvalidOptionError(
                f"parameter '{name}' belongs to {type(owner.module).__name__}, which was replicated before. "
                "Replicate inner modules first, then the outer one, which leaves theirs alone."
            )


def _computing_device(mesh: DeviceMesh | None) -> torch.device | None:
    """Where what is offloaded computes, if nobody says: this rank's device of the mesh's kind."""
    if mesh is None or getattr(mesh, "device_type", "cpu") == "cpu":  # what is no mesh is refused in a moment
        return None
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _policy(mp_policy: Any, offload_policy: Any, device: torch.device | None) -> ParameterPolicy:
    kinds = {kind.__name__ for kind in type(offload_policy).__mro__}
    if offload_policy is not None and "OffloadPolicy" not in kinds:
        raise WrongTypeError(
            "offload_policy must be a gradsync.OffloadPolicy or CPUOffloadPolicy, but is "
            f"{arguments.shown(offload_policy)}. Leave it out, or pass gradsync.CPUOffloadPolicy()."
        )
    precision = {}
    if mp_policy is not None:
        names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
        cure = "Pass for example gradsync.MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
        precision = arguments.policy("mp_policy", mp_policy, "MixedPrecisionPolicy", names, cure)
    return ParameterPolicy(compute_device=device if "CPUOffloadPolicy" in kinds else None, **precision)
