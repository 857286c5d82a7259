"""The file in which torchrun looks for the exception of a rank that failed (`torch.distributed.elastic`)."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from pathlib import Path

VARIABLE = "TORCHELASTIC_ERROR_FILE"
# torchrun takes the earliest failure for the root cause, in whole seconds. A rank that only fell with another one has
# seen that one's end before torchrun did, and on a busy machine before that one has written its own file.
_LATER = 5


def write(error: BaseException, fell_with_others: bool) -> None:
    """As torch's `record` does around a main function; what that has written stays, but for the time."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    if Path(name).exists():
        if fell_with_others:
            _date_later(Path(name))
        return
    info = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(time.time()) + (_LATER if fell_with_others else 0)),
    }
    said = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": info}}
    with contextlib.suppress(OSError):
        Path(name).write_text(json.dumps(said))


def _date_later(file: Path) -> None:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # something else wrote it, in its own way
        said = json.loads(file.read_text())
        info = said["message"]["extraInfo"]
        info["timestamp"] = str(int(info["timestamp"]) + _LATER)
        file.write_text(json.dumps(said))
