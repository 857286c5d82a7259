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
_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")


def compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++")


def load() -> ModuleType:
    """The compiled module. It lies beside the environment's packages until its text or torch changes."""
    path = _made()
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _made() -> Path:
    texts = [path.read_bytes() for path in sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h")])]
    key = hashlib.sha256(b"".join([*texts, torch.__version__.encode(), sys.version.encode()])).hexdigest()[:16]
    folder = Path(sys.prefix) / "standin"
    folder.mkdir(exist_ok=True)
    made = folder / key / f"{_NAME}.so"
    with (folder / "lock").open("w") as lock:  # tests run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            for old in folder.glob("*/"):
                shutil.rmtree(old)
            made.parent.mkdir()
            _compile(made)
    return made


def _compile(made: Path) -> None:
    found = compiler()
    assert found is not None
    package = Path(torch.__file__).parent
    include = package / "include"
    roots = [include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_paths()["include"])]
    flags = ["-std=c++20", "-O0", "-fPIC", "-DAT_PER_OPERATOR_HEADERS", f"-DTORCH_EXTENSION_NAME={_NAME}", *(f"-I{root}" for root in roots)]
    objects = []
    running = []
    for source in sorted(_HERE.glob("*.cpp")):
        objects.append(made.with_name(f"{source.stem}.o"))
        running.append(subprocess.Popen([found, *flags, "-c", str(source), "-o", str(objects[-1])]))
    for one in running:
        if one.wait():
            raise RuntimeError("the stand-in device could not be compiled, see above")
    unfinished = made.with_suffix(".unfinished")
    libraries = [f"-L{package / 'lib'}", *(f"-l{name}" for name in _LIBRARIES)]
    subprocess.run([found, "-shared", *map(str, objects), *libraries, "-o", str(unfinished)], check=True)
    for one in objects:
        one.unlink()
    unfinished.rename(made)
