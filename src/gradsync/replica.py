"""What both fronts offer on a replicated module, and how to find its engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsync import arguments, contract
from gradsync.engine.backward_rounds import skip_together
from gradsync.engine.engine import Engine
from gradsync.engine.module_names import named_parameters
from gradsync.engine.parameter_policy import ParameterPolicy
from gradsync.engine.uneven import uneven as _uneven
from gradsync.errors import InvalidOptionError, NoProcessGroupError, NotReplicatedError, WrongTypeError
from gradsync.groups import check_group
from gradsync.hooks.comm_hook import Hook
from gradsync.hooks.optimizer_overlap import make_optimizer, make_stepper
from gradsync.observe.statistics import Statistics
from gradsync.options import Options
from gradsync.sharing.in_backward import SharesInBackward
from gradsync.transport.choice import choose

API = "replicate"
T = TypeVar("T")
_when_made: list[Callable[[Engine], None]] = []


class Replica:
    """Methods of a replicated module, by either front."""

    @property
    def _engine(self) -> Engine:
        assert isinstance(self, nn.Module)
        return engine_of(self)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate; the next one outside synchronizes all of it.

        What counts is where `backward` is called; forward may be inside or outside.
        """
        with self._engine.no_sync():
            yield

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether backwards from now on synchronize: `no_sync` without the indentation."""
        self._engine.synchronize(requires_gradient_sync)

    def synchronize_gradients(self) -> None:
        """Synchronizes what is in `.grad`, without another backward: on all ranks, also where there is nothing.

        It takes what backwards inside `no_sync` have left, and what was put there by hand, from
        `torch.autograd.grad` for example, or by pipelines that split a backward; of replicated submodules too.
        """
        assert isinstance(self, nn.Module)
        for engine in engines_in(self):
            engine.synchronize_now()

    def skip_round(self) -> None:
        """Instead of a backward, on a rank that has to skip its batch: takes part in the others' round with weight 0.

        `.grad` is then the mean over the other ranks, as it is there; step as they do. Also in the handler of an
        exception that backward has raised: what had left by then still counts in the mean. All replicas that this
        backward had reached are skipped together, whichever of them this is called on.
        """
        assert isinstance(self, nn.Module)
        skip_together(engines_in(self))

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """`hook(state, bucket) -> Future[Tensor]` reduces each bucket instead of the mean; see `gradsync.hooks`.

        At any time between two rounds, on all ranks, once.
        """
        self._engine.register_comm_hook(state, hook)

    def set_round_weight(self, weight: float) -> None:
        """How much this rank counts in the next round's mean: its number of samples or tokens, say.

        Call it before backward, on every rank. The gradient is then that of the mean over all
        samples of all ranks if each rank's loss is the mean over its own. A weight of 0 takes part
        and changes nothing. After the round the weight is 1 again.
        """
        self._engine.set_round_weight(weight)

    def change_process_group(self, group: dist.ProcessGroup) -> None:
        """Goes on over another group: between two rounds, on all of its ranks together.

        Parameters, gradients and hooks stay; buckets are planned anew. On a rank that is not in the group it
        raises, and nothing is changed.
        """
        check_group("the group", group)
        rank = self._engine.transport.rank
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise NoProcessGroupError(
                f"rank {rank} (of the present group) is not a member of the process group it was given ({group!r}): "
                "nothing was changed. Call this only on the ranks of the new group."
            )
        move_engine(self._engine, group)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ever, on all ranks; parameters that lie once a host are written to by one of its ranks."""
        with self._engine.one_writer(restores=True):
            return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def set_sparse_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Which rows of sparse embeddings any rank will use, from the next round on, by the parameters' names.

        Ranks that know them need not exchange indices: one dense block of these rows is reduced, and `.grad` has
        exactly these rows. On all ranks alike, before backward. Parameters left out go the usual way.
        """
        self._engine.know_sparse_rows(rows)


def make_engine(
    modules: Sequence[nn.Module],
    group: dist.ProcessGroup,
    options: Options,
    ignored: frozenset[str],
    policy: ParameterPolicy | None,
    *,
    input_device: torch.device | None = None,
    left_alone: Iterable[Tensor] = (),
    copied: bool = False,
    is_wrapped: bool = False,
) -> Engine:
    """An engine over `group`, with the transport that suits its ranks, who all call this together; see `Engine`."""
    tensors: list[Tensor] = [parameter for name, parameter in named_parameters(modules) if name not in ignored]
    if policy is not None and policy.compute_device is not None:  # where buckets are, too
        tensors.append(torch.empty(0, device=policy.compute_device))
    may_talk, start = options.init_sync != "none", str(options.init_sync)
    transport = choose(
        group,
        options.transport,
        tensors,
        dedicated=may_talk,
        may_communicate=may_talk,
        init_sync=start,
        alone=copied,
    )
    engine = Engine(
        modules,
        transport,
        options,
        ignored,
        policy,
        group=group,
        input_device=input_device,
        left_alone=left_alone,
        copied=copied,
        is_wrapped=is_wrapped,
    )
    for tell in _when_made:
        tell(engine)
    return engine


def move_engine(engine: Engine, group: dist.ProcessGroup, must: bool = True) -> None:
    """Goes on over another group, of which this rank is a member. `must`: by the transport that was asked for."""
    engine.options.check_ranks(group.size())
    transport = choose(group, engine.options.transport, engine.reducer.parameters, must=must)
    with transport.starting():
        engine.change_group(group, transport)


def when_made(tell: Callable[[Engine], None]) -> None:
    """From now on it is told of each engine that a front makes: for who watches a script that does not know of it."""
    _when_made.append(tell)


def is_replicated(module: nn.Module) -> bool:
    return _find_engine(module) is not None


def engine_of(module: nn.Module, who: str = "this function") -> Engine:
    """The engine of a replicated module, also behind `torch.compile`'s wrapper."""
    engine = _find_engine(arguments.module(module, who))
    if engine is not None:
        return engine
    raise NotReplicatedError(
        f"{type(module).__name__} is not replicated. Call gradsync.replicate(module) first, or pass the "
        "module it was called on rather than a submodule."
    )


def engines_in(module: nn.Module) -> list[Engine]:
    """The engines of a module and of replicated modules inside it, each once."""
    found = (_find_engine(part) for part in module.modules())
    return list(dict.fromkeys(engine for engine in found if engine is not None))


def _find_engine(module: nn.Module) -> Engine | None:
    inside = module._modules if isinstance(module._modules, dict) else {}  # a ScriptModule has no dict
    for candidate in (module, inside.get("_orig_mod")):
        if candidate is not None and isinstance(engine := contract.state_of(candidate, API), Engine):
            return engine
    return None


def overlap_optimizer(
    module: nn.Module,
    optimizer: Any,
    *,
    clip_value: float | None = None,
    max_norm: float | None = None,
    free_gradients: bool | None = None,
) -> Optimizer:
    """Steps `optimizer` during backward: each bucket's parameters as soon as their gradients are reduced.

    `optimizer` is one, or a function that makes one of a list of parameters. Leave out your own `step()`;
    learning-rate schedules, parameter groups, `no_sync` and accumulation work as ever. Returns the optimizer.

    `clip_value` clips each gradient by value before the step. `max_norm` clips them all by their norm, which is in
    `optimizer.gradient_norm` then; the steps have to wait for it, until the end of backward. `free_gradients` drops
    each gradient after its step.

    With `share_parameters=True` each rank steps its share of a bucket, and no gradients are delivered.

    Of torch's `ZeroRedundancyOptimizer` each rank steps its shard; the new values are exchanged at the end of backward.
    """
    engine = engine_of(module, "overlap_optimizer()")
    clip_value = None if clip_value is None else arguments.number("clip_value", clip_value)
    max_norm = None if max_norm is None else arguments.number("max_norm", max_norm)
    if max_norm is not None and not max_norm > 0:
        raise InvalidOptionError(f"max_norm must be above 0, but is {max_norm}")
    frees = None if free_gradients is None else arguments.flag("free_gradients", free_gradients)
    made = make_optimizer(optimizer, engine.reducer.parameters)
    if engine.shared is None:
        engine.overlap_optimizer(make_stepper(made, clip_value, max_norm, bool(frees)))
        return made
    if frees is False:
        raise InvalidOptionError(
            "free_gradients=False does not go together with share_parameters=True: each rank has only its share of the "
            "gradients, and lets it go. Leave it out, or use gradsync.share_optimizer(), which has all of them."
        )
    engine.overlap_shares(SharesInBackward(made, clip_value, max_norm))
    return made


@contextlib.contextmanager
def one_writer(module: nn.Module) -> Iterator[None]:
    """Around code that writes to parameters which lie once a host (`share_parameters=True`): it counts once, not once
    for each rank. On all ranks, who all run the body; those that do not write do it to copies, which are dropped.
    """
    with contextlib.ExitStack() as stack:
        for engine in engines_in(arguments.module(module, "one_writer()")):
            stack.enter_context(engine.one_writer())
        yield


def uneven(loader: Iterable[T], module: nn.Module) -> Iterator[T]:
    """`for batch in gradsync.uneven(loader, module)`: ranks may have different numbers of batches.

    A rank that has run out goes over its last batch again, with weight 0: the gradient is the mean over the ranks that
    still have data, its optimizer takes the same steps as theirs, and all ranks leave the loop together.
    """
    engine = engine_of(module, "gradsync.uneven(loader, module)")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise WrongTypeError(f"the loader must be something to iterate over, but is {arguments.shown(loader)}.")
    return _uneven([engine, *(other for other in engines_in(module) if other is not engine)], loader)


def verify(module: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Compares the replicas of a module, and the state of an optimizer, over all ranks, at once and to the last bit.

    All ranks call it together, between steps. Raises `ReplicaDivergedError` on all of them, with the names of what
    differs and the ranks that are off.
    """
    first = engine_of(module, "verify()")
    if optimizer is not None:
        arguments.instance("optimizer", optimizer, Optimizer, "Leave it out to compare the module only.")
    for engine in engines_in(module) or [first]:
        engine.verify(optimizer)


def statistics(module: nn.Module) -> Statistics:
    """What the rounds of a replicated module have cost so far."""
    return engine_of(module, "statistics()").statistics
