"""The files of one run: the job goes in; reports, output and stacks come out.

Files rather than pipes: a large result can't block on a reader, a grandchild that inherits nothing can't keep
a reader waiting, and what a killed rank wrote is still there.
"""

import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANK_BODY = "rank_body"  # the attribute of a test made by `on_ranks` that holds the function for the ranks


@dataclass(frozen=True)
class Setting:
    """What a rank must put in place before it can import anything of the test. Plain values only."""

    world_size: int
    backend: str | None
    environ: Mapping[str, str]
    sys_path: list[str]
    cwd: str


@dataclass(frozen=True)
class Call:
    """The body of the test, by reference, and the warning filters that pytest set for this test."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    warning_filters: list[tuple[Any, ...]]

    @property
    def body(self) -> Callable[..., Any]:
        """What a rank calls. Under the name of a test made by `on_ranks` it finds what pytest is to call."""
        body: Callable[..., Any] = getattr(self.function, RANK_BODY, self.function)
        return body


@dataclass(frozen=True)
class Returned:
    """The report of a rank whose body returned."""

    result: Any


@dataclass(frozen=True)
class Raised:
    """The report of a rank whose body raised.

    `exception` is pickled on its own, or None if it can't be; the text needs no import to be read.
    """

    type_name: str
    message: str
    traceback: str
    exception: bytes | None
    lost_peer: bool
    when: float


class RunFolder:
    """One folder for one run, in the folder of the session."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path / "tmp"  # TMPDIR of the ranks
        self.store = path / "store"  # where they meet
        self.bytecode = path.parent / "bytecode"  # shared by the runs of a session

    @classmethod
    def create(cls, path: Path) -> "RunFolder":
        """Make the folder on disk."""
        folder = cls(path)
        folder.temporary.mkdir(parents=True)
        return folder

    def output(self, rank: int) -> Path:
        """What the rank wrote to stdout and stderr."""
        return self.path / f"rank{rank}.out"

    def stack(self, rank: int) -> Path:
        """Where faulthandler dumps the stacks of the rank when it is asked to."""
        return self.path / f"rank{rank}.stack"

    def write_job(self, setting: Setting, call: Call) -> None:
        """Two pickles one after the other: the first makes the second importable."""
        try:
            job = pickle.dumps(setting) + pickle.dumps(call)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"{call.function!r} and its arguments must be picklable to reach the ranks: {error}. "
                "Use a function at module level and plain values or tensors."
            ) from error
        self._job.write_bytes(job)

    def open_job(self) -> Any:
        """The file that holds a `Setting`, then a `Call`."""
        return self._job.open("rb")

    def write_report(self, rank: int, report: Returned | Raised) -> None:
        """Rename into place, so that a rank killed while it writes leaves no half report."""
        draft = self._report(rank).with_suffix(".draft")
        draft.write_bytes(pickle.dumps(report))
        draft.rename(self._report(rank))

    def read_report(self, rank: int) -> Returned | Raised | None:
        """The report of the rank, if it lived to write one."""
        if not self._report(rank).exists():
            return None
        report: Returned | Raised = pickle.loads(self._report(rank).read_bytes())
        return report

    def read_output(self, rank: int) -> str:
        """What the rank printed, ready to show."""
        path = self.output(rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def read_stack(self, rank: int) -> str:
        """The stacks that the rank dumped so far."""
        path = self.stack(rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def remove(self, *, keep_litter: bool) -> None:
        """Remove the folder. With `keep_litter`, what ranks left in TMPDIR stays, for the leak check to find.

        torch keeps its compile cache in TMPDIR by design; that is no litter.
        """
        litter = [path for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]
        if not (litter and keep_litter):
            shutil.rmtree(self.path)

    @property
    def _job(self) -> Path:
        return self.path / "job"

    def _report(self, rank: int) -> Path:
        return self.path / f"rank{rank}.report"
