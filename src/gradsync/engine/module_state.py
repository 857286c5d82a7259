"""What all ranks must have in common, in words that they can compare: parameters, buffers and settings."""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

from gradsync.engine.buffers import Buffers
from gradsync.engine.managed_parameters import ManagedParameters
from gradsync.engine.parameter_policy import ParameterPolicy
from gradsync.options import Options


class Changes(NamedTuple):
    """What this rank has changed since the ranks last compared."""

    parameters: bool = False
    described: str = ""
    """What there is now, in words; empty: nothing has changed."""


class ModuleState:
    """What ranks compare before the first round, and whenever one of them has changed something."""

    def __init__(self, managed: ManagedParameters, buffers: Buffers) -> None:
        self._managed, self._buffers = managed, buffers

    def find_changes(self, doubt: bool) -> Changes:
        """Reads the modules anew where they have changed. `doubt`: see `ManagedParameters.look_for_changes`."""
        changed = self._managed.look_for_changes(doubt)
        changed = changed and self._managed.refresh()  # not if somebody attached something without parameters
        differs = self._buffers.look_for_changes() or changed
        return Changes(changed, self.describe() if differs else "")

    def describe(self) -> str:
        """A text that is equal on two ranks if they manage the same parameters and have the same buffers."""
        return f"{self._managed.describe()}\n{self._buffers.describe(with_values=self._managed.is_disputed)}"

    def mark_agreed(self) -> None:
        """All ranks have described the same."""
        self._managed.mark_agreed()
        self._buffers.mark_agreed()


# Options that ranks may set differently: what is sent and what becomes of it is the same.
_HARMLESS = frozenset({"transport", "gradient_as_bucket_view", "static_graph", "verify"})
# Those that mean something only when the replica is made. A copy has other ones.
_AT_START = frozenset({"init_sync", "init_sync_buffers"})


class Settings:
    """Of one replicated module: its options, and what was set by hand since."""

    def __init__(self, options: Options, policy: ParameterPolicy) -> None:
        self._policy = policy
        self._by_hand: dict[str, str] = {}  # hooks and the like
        self.verify = options.verify_mode()
        self.take(options)

    def take(self, options: Options) -> None:
        """From now on these options."""
        self._options = options
        self.described = self._describe(_HARMLESS | _AT_START)
        """A line `name: value` for each."""

    def describe_start(self) -> str:
        """The same, with what counts only while the replica is made."""
        return self._describe(_HARMLESS)

    def set_by_hand(self, name: str, value: str) -> None:
        """A hook was registered, for example: all ranks must do so before the next round."""
        self._by_hand[name] = value
        self.take(self._options)

    def is_set(self, name: str) -> bool:
        return name in self._by_hand

    def _describe(self, left_out: frozenset[str]) -> str:
        names = [field.name for field in fields(self._options) if field.name not in left_out]
        rows = {name: repr(getattr(self._options, name)) for name in names}
        rows["verify"] = repr(self.verify)
        if self._policy != ParameterPolicy():
            rows |= self._policy.settings()
        return "\n".join(f"{name}: {value}" for name, value in (rows | self._by_hand).items())
