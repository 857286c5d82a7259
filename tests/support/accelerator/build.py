"""Compiles the part that is in C++, once for each of its texts."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

_HERE = Path(__file__).parent
_NAME = "standin_device"
_FLAGS = ("-std=c++20", "-O0", "-fPIC", "-DAT_PER_OPERATOR_HEADERS", f"-DTORCH_EXTENSION_NAME={_NAME}")
_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")


def compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++")


def load() -> ModuleType:
    """The compiled module. It lies beside the environment's packages until its text or torch changes."""
    path = make()
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make() -> Path:
    """Gives where it is."""
    folder = Path(sys.prefix) / "standin"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:  # tests run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        objects = _objects(folder)
        made = folder / f"{_NAME}-{_digest(*(path.name.encode() for path in objects))}.so"
        if not made.exists():
            _compile(objects)
            libraries = [f"-L{_package() / 'lib'}", *(f"-l{name}" for name in _LIBRARIES)]
            unfinished = made.with_suffix(".unfinished")
            _run([["-shared", *map(str, objects), *libraries, "-o", str(unfinished)]])
            unfinished.rename(made)
        for old in {*folder.glob("*.o"), *folder.glob("*.so")} - {made, *objects}:
            old.unlink()
    return made


def _objects(folder: Path) -> dict[Path, Path]:
    """Where each source is compiled to."""
    common = b"".join(path.read_bytes() for path in sorted(_HERE.glob("*.h")))
    common += f"{torch.__version__} {sys.version} {_FLAGS}".encode()
    sources = sorted(_HERE.glob("*.cpp"))
    return {folder / f"{each.stem}-{_digest(common, each.read_bytes())}.o": each for each in sources}


def _compile(objects: dict[Path, Path]) -> None:
    """About half a minute, on two cores that are free."""
    include = _package() / "include"
    roots = [include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_paths()["include"])]
    missing = {made: source for made, source in objects.items() if not made.exists()}
    unfinished = {made: made.with_suffix(".unfinished") for made in missing}
    flags = [*_FLAGS, *(f"-I{root}" for root in roots)]
    _run([[*flags, "-c", str(source), "-o", str(unfinished[made])] for made, source in missing.items()])
    for made, path in unfinished.items():
        path.rename(made)


def _run(commands: list[list[str]]) -> None:
    found = compiler()
    assert found is not None
    running = [subprocess.Popen([found, *command]) for command in commands]
    if max(one.wait() for one in running):
        raise RuntimeError("the stand-in device could not be compiled, see above")


def _package() -> Path:
    return Path(torch.__file__).parent


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
