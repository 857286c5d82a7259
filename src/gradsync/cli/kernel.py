"""The Linux calls that Python has no name for."""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own, so that none gets out of sight."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int) -> set[int]:
    """The child processes of `pid`, those that ended but were not reaped included."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended while we looked
            found.update(map(int, (task / "children").read_text().split()))
    return found


def command_line(pid: int) -> str:
    """What `pid` runs, for people to read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip() or "starting or ended"
    except (FileNotFoundError, ProcessLookupError):
        return "ended"


def is_running(pid: int) -> bool:
    """False if `pid` has ended, even if nobody has reaped it yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def thread_count() -> int:
    """The native threads of this process, those that Python doesn't know of included."""
    return len(list(Path("/proc/self/task").iterdir()))


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) was refused")
