"""What the environment says about the watch."""

from __future__ import annotations

import os

from gradsync.errors import InvalidOptionError

WATCH, EXPLAIN_AFTER = "GRADSYNC_WATCH", "GRADSYNC_EXPLAIN_AFTER"
_DEFAULT_SECONDS = 10.0


def is_wanted() -> bool:
    """Whether this rank wants a watch. If one does not, none has it."""
    return os.environ.get(WATCH) != "0"


def explain_after() -> float:
    """Seconds after which a wait says in the log for whom it waits."""
    text = os.environ.get(EXPLAIN_AFTER) or str(_DEFAULT_SECONDS)
    try:
        return float(text)
    except ValueError:
        raise InvalidOptionError(f"the variable {EXPLAIN_AFTER} must be a number of seconds, not {text!r}") from None
