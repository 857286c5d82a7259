"""Puts gradsync in the place of torch's own: what the training code imports from torch is then ours, unchanged.

`install()` replaces torch's `DistributedDataParallel` and both its `replicate`s, wherever modules that are imported
have them under a name of their own, and where modules that are not imported yet will find them. `uninstall()` takes it
back. Nothing is replaced by importing gradsync, nor this module.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing.context
import sys
import threading
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gradsync import contract, ddp, log
from gradsync.groups import resolve_group
from gradsync.replica import API, is_replicated
from gradsync.replicate import ReplicateModule as OurReplicateModule
from gradsync.replicate import replicate as our_replicate

_log = log.logger()
_DDP, _REPLICATE, _SHARDED = (
    "torch.nn.parallel.distributed",
    "torch.distributed._composable.replicate",
    "torch.distributed._composable.replicate_with_fsdp",  # takes seconds to import: replaced when somebody does
)
_SPAWNED = "__mp_main__"  # what the main module is called in a process that `multiprocessing` has spawned
TorchDistributedDataParallel = nn.parallel.DistributedDataParallel
"""torch's own class, also while another one is in its place."""


class _TakenForTorchs(ABCMeta):
    """Whoever asks for what now stands in the place of torch's class means any of its kind, torch's and ours."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if cls is DistributedDataParallel:
            return isinstance(instance, TorchDistributedDataParallel)  # ours is registered with it
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Not torch's: an ABC asks its subclasses, too, so that `gradsync.DistributedDataParallel` would say yes."""
        if cls is DistributedDataParallel:
            return ddp.DistributedDataParallel in subclass.__mro__
        return super().__subclasscheck__(subclass)


class DistributedDataParallel(ddp.DistributedDataParallel, metaclass=_TakenForTorchs):
    """`gradsync.DistributedDataParallel` in the place of torch's. A class of its own, for `uninstall()` to find."""


class _TakenForReplicas(type):
    """The same for what torch's two `replicate`s give: those made before the replacement, and ours."""

    kinds: tuple[type, ...]

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.kinds)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.kinds)


def _replica_class(torchs: type) -> type:
    return _TakenForReplicas(torchs.__name__, (), {"kinds": (OurReplicateModule, torchs), "__doc__": torchs.__doc__})


def _replicate(torchs: Any) -> Callable[..., Any]:
    """In the place of `torch.distributed._composable.replicate`."""

    @functools.wraps(our_replicate)
    def replicate(*args: Any, **kwargs: Any) -> Any:
        return our_replicate(*args, **kwargs)

    return _with_state(replicate, torchs)


def _replicate_over_a_mesh(torchs: Any) -> Callable[..., Any]:
    """In the place of `replicate_with_fsdp`'s, whose parameters are DTensors whether it was given a mesh or not."""

    @functools.wraps(our_replicate)
    def replicate(module: Any, *, mesh: Any = None, **kwargs: Any) -> Any:
        return our_replicate(module, mesh=_whole_world() if mesh is None else mesh, **kwargs)

    return _with_state(replicate, torchs)


def _with_state(replicate: Callable[..., Any], torchs: Any) -> Callable[..., Any]:
    """torch's composable functions are asked for the state that they have left on a module."""

    def state(module: nn.Module) -> Any:
        return contract.state_of(module, API) if is_replicated(module) else torchs.state(module)

    vars(replicate)["state"] = state
    return replicate


def _whole_world() -> Any:
    device = torch.accelerator.current_accelerator()
    kind = "cpu" if device is None else device.type
    resolve_group(None, kind)  # made from the environment, if there is none
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("replicate",))


@dataclass(frozen=True)
class Installed:
    """What `install()` has done so far."""

    replaced: tuple[str, ...]
    """The names that were replaced, as `module.name`."""
    left: tuple[str, ...]
    """Classes derived from torch's before: they and what is made of them train on torch's engine."""

    def __str__(self) -> str:
        line = "torch's DistributedDataParallel and both its replicate() are gradsync's from here on"
        if others := len([name for name in self.replaced if not name.startswith("torch.")]):
            line += f", also under {others} name{'s' * (others > 1)} in modules imported before"
        return line + (f". Not replaced, for they were derived before: {', '.join(self.left)}" if self.left else "")


class _Dropin:
    """The one replacement of this process: which objects stand in for which, and where."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.installed = False
        self.stand_ins: dict[int, tuple[object, object]] = {}  # by the id of torch's, which is kept alive beside
        self.names: list[str] = []  # as `module.name`
        self.finder = _Finder(self)

    def install(self) -> None:
        importlib.import_module(_REPLICATE)
        self.stand_ins = {}
        self.learn(_DDP)
        self.learn(_REPLICATE)
        self.installed = True
        if _SHARDED in sys.modules:
            self.learn(_SHARDED)
        else:
            sys.meta_path.insert(0, self.finder)
        self.replace(sys.modules)
        for kind in _PICKLED:
            ForkingPickler.register(kind, _pass_on)

    def uninstall(self) -> None:
        """Names bound since then are found, too: what stands in is used for nothing else."""
        self.installed = False
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        torchs = {id(ours): original for original, ours in self.stand_ins.values()}
        for _, namespace, name, value in _names_in(sys.modules):
            if id(value) in torchs:
                namespace[name] = torchs[id(value)]
        self.stand_ins, self.names = {}, []

    def learn(self, name: str) -> None:
        """What stands in for what of a module of torch's that was imported."""
        module = vars(sys.modules[name])
        pairs: list[tuple[object, object]]
        if name == _DDP:
            pairs = [(TorchDistributedDataParallel, DistributedDataParallel)]
        elif name == _REPLICATE:
            pairs = [
                (module["replicate"], _replicate(module["replicate"])),
                (module["DDP"], _replica_class(module["DDP"])),
            ]
        else:
            replicate, kind = module["replicate"], module["ReplicateModule"]
            pairs = [(replicate, _replicate_over_a_mesh(replicate)), (kind, _replica_class(kind))]
        self.stand_ins |= {id(torchs): (torchs, ours) for torchs, ours in pairs}

    def replace(self, modules: Mapping[str, ModuleType]) -> None:
        for module, namespace, name, value in _names_in(modules):
            if id(value) in self.stand_ins:
                _, namespace[name] = self.stand_ins[id(value)]
                self.names.append(f"{module}.{name}")

    def result(self) -> Installed:
        kinds = _derived_from(TorchDistributedDataParallel)
        left = sorted(
            f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind.__module__ != nn.parallel.__name__
        )
        return Installed(tuple(sorted(set(self.names))), tuple(left))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module of torch's that is replaced when it is imported."""

    def __init__(self, dropin: _Dropin) -> None:
        self._dropin = dropin

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _SHARDED:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if found is None or found.origin is None:
            return found
        loader = _Loader(found.loader, self._dropin)
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=loader)


class _Loader(importlib.abc.Loader):
    """Lets another one load a module, and replaces what is in it."""

    def __init__(self, loader: Any, dropin: _Dropin) -> None:
        self._loader, self._dropin = loader, dropin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        with self._dropin.lock:
            if self._dropin.installed:
                self._dropin.learn(module.__name__)
                self._dropin.replace({module.__name__: module})


# How `multiprocessing` hands a process that it does not fork to the new interpreter.
_PICKLED = (
    multiprocessing.context.Process,
    multiprocessing.context.SpawnProcess,
    multiprocessing.context.ForkServerProcess,
)


def _pass_on(process: Any) -> Any:
    """Ranks that are spawned (`mp.spawn`) would train on torch's engine otherwise: a new interpreter knows nothing."""
    return (_begin, (type(process),), vars(process)) if _dropin.installed else process.__reduce_ex__(2)


def _begin(kind: type) -> object:
    """In that one, when the main module has been imported, and before what it is to run."""
    install()
    return object.__new__(kind)


def _names_in(modules: Mapping[str, ModuleType]) -> Iterator[tuple[str, dict[str, Any], str, object]]:
    """All global names of these modules but ours, as they are now: others may be imported meanwhile."""
    for key, module in list(modules.items()):
        if isinstance(module, ModuleType) and key.partition(".")[0] != "gradsync":
            hidden = _globals_of_spawned(module) if key == _SPAWNED else {}
            for namespace in (vars(module), hidden):
                for name, value in list(namespace.items()):
                    yield module.__name__, namespace, name, value


def _globals_of_spawned(main: ModuleType) -> dict[str, Any]:
    """`multiprocessing` runs the main module elsewhere and copies its names; functions look there (3.10 to 3.13)."""
    for value in list(vars(main).values()):
        for one in vars(value).values() if isinstance(value, type) else (value,):
            if isinstance(one, FunctionType) and one.__globals__.get("__name__") == _SPAWNED:
                return one.__globals__
    return {}


def _derived_from(kind: type) -> Iterator[type]:
    derived: type
    for derived in type.__subclasses__(kind):
        yield derived
        yield from _derived_from(derived)


_dropin = _Dropin()


def install() -> Installed:
    """Replaces torch's `DistributedDataParallel` and both its `replicate`s by ours, in this process; the log says so.

    Call it before models are made, the earlier the better. Found are global names of all modules, those imported
    before and those imported later. Not found is what has them elsewhere: in a variable of a function, a default
    argument, a dictionary, an attribute of a class; nor classes derived from torch's before: see `Installed.left`.
    Processes that this one starts by `multiprocessing` (`mp.spawn`) have it, too.
    Once installed, another call changes nothing but names that were bound to torch's meanwhile.
    """
    with _dropin.lock:
        if _dropin.installed:
            _dropin.replace(sys.modules)
            return _dropin.result()
        _dropin.install()
        done = _dropin.result()
    (_log.warning if done.left else _log.info)("%s", done)
    return done


def uninstall() -> None:
    """torch's own again under all these names, also those bound since `install()`. Models keep their engine."""
    with _dropin.lock:
        if _dropin.installed:
            _dropin.uninstall()


def is_installed() -> bool:
    return _dropin.installed
