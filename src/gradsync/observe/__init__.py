"""What is kept of events, and where it may be written to."""

from gradsync.observe.scalars import ScalarLog, log_to

__all__ = ["ScalarLog", "log_to"]
