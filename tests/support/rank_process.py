"""What happens inside a rank, from the fork to its end."""

import faulthandler
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from gradsync.cli import kernel
from tests.support.channel import DUMP_STACKS, LEAVE, Channel, Fork, Reported, Started
from tests.support.patience import crowding
from tests.support.run_folder import Call, Raised, Returned, RunFolder, Setting

GROUP_TIMEOUT = timedelta(seconds=10)
_LINGER_SECONDS = 1.0
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|socket closed|broken pipe|timed out waiting|wait timeout", re.IGNORECASE
)


def run_rank(order: Fork, channel: Channel, fork_server: int) -> NoReturn:
    """Be one rank. Leaves by `os._exit`, since a wedged thread or exit handler must not hold up a test."""
    folder = RunFolder(order.folder)
    _become_killable(fork_server)
    _redirect_output(folder.output(order.rank))
    _prepare_stack_dump(folder.stack(order.rank))
    channel.send(Started(order.rank, os.getpid()))
    report = _call_body(order.rank, folder)
    _write_report(order.rank, folder, report)
    _flush_output()
    returned = isinstance(report, Returned)
    channel.send(Reported(order.rank, returned))
    if returned:
        _linger()
    os._exit(0 if returned else 1)


def _become_killable(fork_server: int) -> None:
    """Lead an own session, so that whatever the body starts can be killed with it."""
    kernel.die_with(fork_server)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {LEAVE})  # kept pending until `_linger` asks for it


def _redirect_output(path: Path) -> None:
    """Send stdout and stderr, those of C++ included, to one file; by lines, so that SIGKILL loses none."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _prepare_stack_dump(path: Path) -> None:
    """Dump from the C signal handler: it works while the main thread is blocked inside gloo."""
    faulthandler.enable()
    faulthandler.register(DUMP_STACKS, file=path.open("w"), all_threads=True)


def _call_body(rank: int, folder: RunFolder) -> Returned | Raised:
    try:
        with folder.open_job() as job:
            setting: Setting = pickle.load(job)
            _apply(setting, rank, folder)
            with _bytecode_kept(folder.bytecode):
                call: Call = pickle.load(job)
        _apply_warning_filters(call.warning_filters)
        if setting.backend is not None:
            _join_group(setting, rank, folder)
        with _loose_ends_warned():
            return Returned(call.body(*call.args, **call.kwargs))
    except SystemExit as leaving:
        _flush_output()
        os._exit(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
    except BaseException as error:  # pytest's own outcomes and KeyboardInterrupt are news as well
        return _describe(error)


def _apply(setting: Setting, rank: int, folder: RunFolder) -> None:
    os.environ.clear()
    os.environ.update(setting.environ)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), TMPDIR=str(folder.temporary))
    tempfile.tempdir = None  # forget a TMPDIR that was looked up before the fork
    sys.path[:] = setting.sys_path
    os.chdir(setting.cwd)
    torch.set_num_threads(1)
    # A different seed on each rank, so that replicas which nobody brought in step can't look as if they were.
    torch.manual_seed(rank)
    random.seed(rank)


@contextmanager
def _bytecode_kept(path: Path) -> Iterator[None]:
    """Where Python may write no bytecode, keep that of the test for the ranks of later runs: to compile it
    and rewrite its assertions takes longer than the rest of a run.
    """
    before = sys.dont_write_bytecode, sys.pycache_prefix
    if sys.dont_write_bytecode:
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(path)
    yield
    sys.dont_write_bytecode, sys.pycache_prefix = before


def _apply_warning_filters(filters: list[tuple[Any, ...]]) -> None:
    """Warn exactly as pytest does in this test, its marks included: what is an error there is one here."""
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        warnings.filterwarnings(action, _pattern(message), category, _pattern(module), line)


@contextmanager
def _loose_ends_warned() -> Iterator[None]:
    """Warn as pytest does about errors that Python can only print: those of destructors and of threads."""
    loose_ends: list[Warning] = []

    def in_destructor(event: "sys.UnraisableHookArgs") -> None:
        text = _format(event.exc_value)
        loose_ends.append(pytest.PytestUnraisableExceptionWarning(f"{event.err_msg} {event.object!r}\n{text}"))

    def in_thread(event: threading.ExceptHookArgs) -> None:
        loose_ends.append(pytest.PytestUnhandledThreadExceptionWarning(_format(event.exc_value)))

    sys.unraisablehook, threading.excepthook = in_destructor, in_thread
    yield
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    for loose_end in loose_ends:
        warnings.warn(loose_end, stacklevel=1)


def _format(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error)) if error else ""


def _pattern(matcher: re.Pattern[str] | str | None) -> str:
    return matcher.pattern if isinstance(matcher, re.Pattern) else matcher or ""


def _join_group(setting: Setting, rank: int, folder: RunFolder) -> None:
    """Meet in a file: no port to race for, and no rank whose death takes the store away from the others.

    The barrier lets no body start, and possibly end, while a peer is still connecting.
    """
    dist.init_process_group(
        setting.backend,
        init_method=folder.store.as_uri(),
        rank=rank,
        world_size=setting.world_size,
        timeout=GROUP_TIMEOUT * crowding(),
    )
    dist.barrier()


def _write_report(rank: int, folder: RunFolder, report: Returned | Raised) -> None:
    try:
        folder.write_report(rank, report)
    except Exception as error:
        kind = type(report.result).__name__ if isinstance(report, Returned) else "its own report"
        excuse = TypeError(f"the result of rank {rank} ({kind}) can't be pickled: {error}")
        folder.write_report(rank, _describe(excuse))


def _describe(error: BaseException) -> Raised:
    return Raised(
        type_name=type(error).__qualname__,
        message=str(error),
        traceback="".join(traceback.format_exception(type(error), error, _without_harness(error))),
        exception=_pickled(error),
        lost_peer=any(_LOST_PEER.search(str(link)) for link in _chain(error)),
        when=time.monotonic(),
    )


def _without_harness(error: BaseException) -> Any:
    """The traceback from the test's own frame on."""
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _pickled(error: BaseException) -> bytes | None:
    """The exception, if it survives the trip: many an `__init__` can't be called again from `args`."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        return None
    return pickled


def _flush_output() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _linger() -> None:
    """Keep the connections open until all have reported, so that a peer half-way through its last operation
    sees no closed connection. Not for long: a peer that waits for us in vain should find out quickly.
    """
    signal.sigtimedwait({LEAVE}, _LINGER_SECONDS * crowding())
