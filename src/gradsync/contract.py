"""What a composable API leaves on a module: its name in a registry, and its state.

Both are kept where torch's own composable APIs keep theirs, so that `fully_shard` sees
`replicate` and the other way round.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gradsync import _torch
from gradsync.errors import AlreadyReplicatedError


class RegistryItem:
    """Says that an API was applied. Compares by identity; modules of one call share one."""


def enrol(module: nn.Module, api: str, state: object) -> None:
    """Registers `api` on `module`, at most once."""
    check_not_applied(module, api)
    state_key, registry_key = _torch.composable_keys()
    module.__dict__.setdefault(state_key, {})[api] = state
    module.__dict__.setdefault(registry_key, {})[api] = RegistryItem()


def check_not_applied(module: nn.Module, api: str) -> None:
    """Refuses a module that `api` was applied to already."""
    if api in registry(module):
        raise AlreadyReplicatedError(
            "Each distinct composable distributed API can only be applied to a module once. "
            f"{api} has already been applied to the following module:\n{module}\n"
            "Use the module as it is, or undo the first call with gradsync.unreplicate(module)."
        )


def withdraw(module: nn.Module, api: str) -> None:
    """Takes `api` off `module`, leaving no trace."""
    for key in _torch.composable_keys():
        entries = module.__dict__.get(key, {})
        entries.pop(api, None)
        if not entries:
            module.__dict__.pop(key, None)


def state_of(module: nn.Module, api: str) -> Any:
    """The state that `api` left on `module`; None if it was never applied."""
    state_key, _ = _torch.composable_keys()
    return module.__dict__.get(state_key, {}).get(api)


def registry(module: nn.Module) -> dict[str, RegistryItem]:
    """Which composable APIs were applied to `module`, in order."""
    _, registry_key = _torch.composable_keys()
    found: dict[str, RegistryItem] = module.__dict__.get(registry_key, {})
    return dict(found)
