"""Composable activation checkpointing: `checkpoint(module)`, in place, names unchanged.

The recomputing is torch's own (`torch.utils.checkpoint`, without reentrant autograd). What is ours is
where it sits: in a class over the module's own, around `forward` alone. So whatever surrounds `forward`
(the module's hooks, the call of a replicated module) happens once, outside of what is recomputed; there
is nothing to switch off meanwhile, and no state that an error could leave behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from gradsync import _torch
from gradsync.contract import ComposableModule, contract, put_on
from gradsync.errors import UnsuitableForCheckpointError

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """How a module is recomputed; see `checkpoint`."""

    preserve_rng_state: bool = True
    context_fn: ContextFn | None = None
    determinism_check: str = "default"
    debug: bool = False
    early_stop: bool = True

    def __post_init__(self) -> None:
        """Here rather than at the first forward, which is where torch would notice."""
        if self.determinism_check not in ("default", "none"):
            raise ValueError(
                f"determinism_check should be one of ['default', 'none'], but got {self.determinism_check}"
            )
        if self.debug and self.context_fn is not None:
            raise ValueError("debug=True is incompatible with non-default context_fn: leave one of them out")

    def arguments(self) -> dict[str, Any]:
        """As torch's function takes them: without a context_fn unless there is one."""
        return {key: value for key, value in vars(self).items() if value is not None}


class CheckpointState:
    """What `checkpoint.state(module)` is."""

    options = CheckpointOptions()

    def choose(self, options: CheckpointOptions) -> None:
        self.options = options


class CheckpointModule(ComposableModule, nn.Module):
    """A module whose activations are recomputed in backward."""

    API = "checkpoint"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        state = checkpoint.state(self)
        if state is None or not torch.is_grad_enabled():  # nothing would be saved anyway
            return forward(*args, **kwargs)
        count, names = len(args), tuple(kwargs)

        def run(*inputs: Any) -> Any:
            return forward(*inputs[:count], **dict(zip(names, inputs[count:], strict=True)))

        # Keyword arguments travel as positional ones. Passed as keywords, torch would take those named like its
        # own options for itself, not see their devices' generators, and not notice if they are written to.
        inputs = (*args, *kwargs.values())
        again = run if torch.compiler.is_compiling() else _Repeatable(self, run)
        return torch_checkpoint.checkpoint(again, *inputs, use_reentrant=False, **state.options.arguments())

    def _apply_to(self, duplicate: nn.Module) -> None:
        super()._apply_to(duplicate)
        state = checkpoint.state(self)
        if state is not None:
            checkpoint(duplicate, **vars(state.options))


@contract(CheckpointState)
def checkpoint(
    module: nn.Module,
    /,
    *,
    preserve_rng_state: bool = True,
    context_fn: ContextFn | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    use_reentrant: bool = False,
    **unexpected: Any,
) -> None:
    """Recomputes the activations inside `module` in backward instead of keeping them; returns the module.

    In place: the same object with the same names. Its class becomes one of the same name, a subclass of
    its own class. Its inputs are kept, its outputs are as long as somebody needs them, and all between
    is computed a second time. Composes with `replicate` in any order, with other checkpointed modules
    inside and around it, and with `torch.compile`. What the second forward does to buffers (running
    statistics, counters) is undone: they look as if there had been one.

    preserve_rng_state: dropout and the like draw the same the second time.
    context_fn: returns two context managers, for the forward and for its repetition: selective
        checkpointing, for example (`torch.utils.checkpoint.create_selective_checkpoint_contexts`).
    determinism_check: "default" compares shapes, types and devices of what is recomputed; "none".
    debug: errors about a difference show the operators of both forwards.
    early_stop: the repetition ends as soon as everything needed is there.
    """
    if use_reentrant:
        raise NotImplementedError(
            "use_reentrant=True is not supported in composable checkpoint. "
            "Please use torch.utils.checkpoint.checkpoint instead."
        )
    if unexpected:
        raise ValueError("Unexpected keyword arguments: " + ",".join(unexpected))
    _check_suitable(module)
    state = checkpoint.state(module)
    assert state is not None
    state.choose(
        CheckpointOptions(
            preserve_rng_state=preserve_rng_state,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
        )
    )
    put_on(module, CheckpointModule, "Checkpoint")


def _check_suitable(module: nn.Module) -> None:
    """Where checkpointing would do nothing, and nobody would notice."""
    if not isinstance(module, nn.Module):
        raise TypeError("checkpoint takes one module; call it for each")
    name = type(module).__name__
    if type(module).forward is nn.Module.forward:
        raise UnsuitableForCheckpointError(
            f"{name} has no forward: calls of what it contains would not be checkpointed. "
            "Call checkpoint on each of the modules in it."
        )
    if "forward" in module.__dict__:
        raise UnsuitableForCheckpointError(
            f"this {name}'s forward was replaced on the object, which hides that of its class. "
            "Call checkpoint before whatever replaces it."
        )


class _Repeatable:
    """A module's forward whose repetitions leave the module's buffers as they were."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.module = module
        self.run = run
        self.writers: list[nn.Module] | None = None  # whose buffers the first forward changed

    def __call__(self, *inputs: Any) -> Any:
        if self.writers is not None:
            with _buffers_kept(self.writers):
                return self.run(*inputs)
        before = _versions(self.module)
        output = self.run(*inputs)
        after = _versions(self.module)
        self.writers = [owner for owner in after if after[owner] != before.get(owner)]
        return output


def _versions(module: nn.Module) -> dict[nn.Module, object]:
    """For each module that has buffers itself, something that differs after they were written to."""
    return {
        owner: object() if _has_statistics(owner) else [(id(b), _torch.version_of(b)) for b in _own_buffers(owner)]
        for owner in module.modules()
        if owner._buffers
    }


def _has_statistics(module: nn.Module) -> bool:
    """Normalization layers write to their running statistics without torch counting it as a write."""
    return module.training and getattr(module, "running_mean", None) is not None


def _own_buffers(module: nn.Module) -> list[Tensor]:
    return [buffer for buffer in module._buffers.values() if buffer is not None]


@contextmanager
def _buffers_kept(owners: list[nn.Module]) -> Iterator[None]:
    """Whatever happens to the modules' buffers inside is undone."""
    kept = [(owner, dict(owner._buffers), [b.detach().clone() for b in _own_buffers(owner)]) for owner in owners]
    try:
        yield
    finally:
        for owner, buffers, values in kept:
            owner._buffers.update(buffers)
            for buffer, value in zip(_own_buffers(owner), values, strict=True):
                # Through `data`, uncounted: the buffer holds what it held when something else saved it.
                buffer.data.copy_(value)
