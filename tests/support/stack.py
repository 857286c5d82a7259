"""Where a stuck rank stood, read from what faulthandler dumped."""

import linecache
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_HARNESS = Path(__file__).parent
_TESTS = _HARNESS.parent
_THREAD = re.compile(r"^(?P<current>Current thread|Thread) .*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line} in {self.function}" + (f": {source}" if source else "")


@dataclass(frozen=True)
class Stack:
    """The main thread of a rank, innermost frame first. Empty if the rank could not even dump it."""

    frames: tuple[Frame, ...]

    @property
    def innermost(self) -> Frame | None:
        """Where it stood, more often than not deep inside torch."""
        return self.frames[0] if self.frames else None

    @property
    def ours(self) -> Frame | None:
        """The innermost frame of the test or of gradsync: the line to look at first."""
        roots = _our_roots()
        return next((frame for frame in self.frames if _is_ours(Path(frame.file), roots)), None)

    def __str__(self) -> str:
        if not self.frames:
            return "no stack: it did not answer the signal (stopped, or not yet running Python)"
        places = dict.fromkeys(frame for frame in (self.ours, self.innermost) if frame)
        return ",\n  within ".join(map(str, places))


def read_stack(dump: str) -> Stack:
    """The main thread's stack in a dump of all threads.

    The signal interrupts the main thread, unless it is gone from Python's view; then the oldest thread, which
    faulthandler lists last, is the best guess.
    """
    heads = list(_THREAD.finditer(dump))
    if not heads:
        return Stack(())
    head = next((head for head in heads if head["current"].startswith("Current")), heads[-1])
    following = next((other.start() for other in heads if other.start() > head.start()), len(dump))
    frames = _FRAME.finditer(dump, head.end(), following)
    return Stack(tuple(Frame(frame["file"], int(frame["line"]), frame["function"]) for frame in frames))


def _our_roots() -> list[Path]:
    spec = find_spec("gradsync")
    return [_TESTS, *map(Path, (spec and spec.submodule_search_locations) or ())]


def _is_ours(file: Path, roots: list[Path]) -> bool:
    return any(file.is_relative_to(root) for root in roots) and not file.is_relative_to(_HARNESS)
