"""`gradsync.dropin` without ranks: which names stand for what, and that it is all taken back."""

from __future__ import annotations

import importlib
import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync import dropin

TORCHS = [nn.parallel.DistributedDataParallel]  # in a list, where it is not looked for
SHARDED = "torch.distributed._composable.replicate_with_fsdp"
EXPORTS = [
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed._composable", "replicate"),
    ("torch.distributed._composable.replicate", "replicate"),
    (SHARDED, "replicate"),
    (SHARDED, "ReplicateModule"),
]


@pytest.fixture(autouse=True)
def _taken_back() -> Iterator[None]:
    yield
    dropin.uninstall()
    assert nn.parallel.DistributedDataParallel is TORCHS[0]


def exported() -> list[Any]:
    return [vars(importlib.import_module(module))[name] for module, name in EXPORTS]


def test_importing_replaces_nothing() -> None:
    assert not dropin.is_installed()
    assert nn.parallel.DistributedDataParallel is TORCHS[0]


def test_every_export_is_replaced_and_comes_back() -> None:
    before = exported()
    done = dropin.install()
    assert dropin.is_installed()
    assert {f"{module}.{name}" for module, name in EXPORTS} <= set(done.replaced)
    for torchs, ours in zip(before, exported(), strict=True):
        assert ours is not torchs
    assert issubclass(nn.parallel.DistributedDataParallel, gradsync.DistributedDataParallel)
    dropin.uninstall()
    assert all(torchs is now for torchs, now in zip(before, exported(), strict=True))


def globals_of_all() -> dict[tuple[str, str], int]:
    modules = [(key, one) for key, one in sys.modules.items() if isinstance(one, ModuleType)]
    return {(key, name): id(value) for key, one in modules for name, value in list(vars(one).items())}


def test_taken_back_exactly() -> None:
    """No global name of any module stands for something else than before."""
    exported()
    before, finders = globals_of_all(), list(sys.meta_path)
    dropin.install()
    changed = {key for key, value in globals_of_all().items() if before.get(key) != value}
    changed -= {key for key in changed if key[0].startswith("hypothesis")}  # it counts collections of garbage meanwhile
    assert ("torch.nn.parallel", "DistributedDataParallel") in changed
    dropin.uninstall()
    after = globals_of_all()
    assert {key: after.get(key) for key in changed} == {key: before[key] for key in changed}
    assert sys.meta_path == finders


def module_with(**names: Any) -> ModuleType:
    made = ModuleType("imported_before")
    vars(made).update(names)
    sys.modules[made.__name__] = made
    return made


def test_names_of_modules_imported_before_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imported_before", ModuleType("imported_before"))
    early = module_with(DDP=TORCHS[0], other=nn.Linear)
    assert "imported_before.DDP" in dropin.install().replaced
    assert vars(early)["DDP"] is nn.parallel.DistributedDataParallel
    vars(early)["late"] = nn.parallel.DistributedDataParallel
    vars(early)["explicitly"] = gradsync.DistributedDataParallel
    vars(early)["again"] = TORCHS[0]
    assert "imported_before.again" in dropin.install().replaced  # bound to torch's meanwhile
    dropin.uninstall()
    assert vars(early)["DDP"] is vars(early)["late"] is vars(early)["again"] is TORCHS[0]
    assert vars(early)["other"] is nn.Linear
    assert vars(early)["explicitly"] is gradsync.DistributedDataParallel


def test_twice_is_once() -> None:
    first = dropin.install()
    assert dropin.install() == first
    dropin.uninstall()
    dropin.uninstall()
    assert not dropin.is_installed()


def test_threads() -> None:
    together = threading.Barrier(4)

    def many() -> None:
        together.wait()
        for _ in range(5):
            dropin.install()
            dropin.uninstall()

    threads = [threading.Thread(target=many) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert nn.parallel.DistributedDataParallel is TORCHS[0]


def test_who_is_of_which_class() -> None:
    dropin.install()
    replaced = nn.parallel.DistributedDataParallel
    late: Any = type("Late", (replaced,), {})
    assert issubclass(replaced, TORCHS[0])
    assert issubclass(gradsync.DistributedDataParallel, replaced)
    assert issubclass(late, replaced)
    assert issubclass(late, gradsync.DistributedDataParallel)
    assert not issubclass(nn.Linear, replaced)
    assert not isinstance(nn.Linear(1, 1), replaced)
    # torch's, made before: asked for under the old name, it is one; it is none of ours
    made_before = TORCHS[0].__new__(TORCHS[0])
    assert isinstance(made_before, replaced)
    assert not isinstance(made_before, (gradsync.DistributedDataParallel, late))
    assert not issubclass(TORCHS[0], gradsync.DistributedDataParallel)
    assert not isinstance(nn.Linear(1, 1), late)


def test_replicas_are_asked_for_by_torchs_names() -> None:
    torchs = vars(importlib.import_module(SHARDED))["ReplicateModule"]
    dropin.install()
    replaced = vars(importlib.import_module(SHARDED))["ReplicateModule"]
    assert issubclass(gradsync.ReplicateModule, replaced)
    assert issubclass(torchs, replaced)
    assert not issubclass(nn.Linear, replaced)
    assert not isinstance(nn.Linear(1, 1), replaced)


def test_what_is_not_replaced_is_said(caplog: pytest.LogCaptureFixture) -> None:
    derived = type("DerivedBefore", (TORCHS[0],), {})
    with caplog.at_level(logging.INFO, "gradsync"):
        done = dropin.install()
    assert any("DerivedBefore" in name for name in done.left)
    (told,) = (record for record in caplog.records if record.name == "gradsync")
    assert told.levelno == logging.WARNING
    assert "\n" not in told.getMessage()
    assert derived.__name__ in told.getMessage()


def test_the_class_pickles_by_name() -> None:
    dropin.install()
    assert pickle.loads(pickle.dumps(nn.parallel.DistributedDataParallel)) is nn.parallel.DistributedDataParallel


LAZY = f"""
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
import torch
from gradsync import dropin
dropin.install()
assert "{SHARDED}" not in sys.modules  # takes seconds
from {SHARDED} import replicate, ReplicateModule
import {SHARDED} as module
assert module.__spec__.name == "{SHARDED}" and module.__file__.endswith("replicate_with_fsdp.py")
assert replicate.__module__ == "gradsync.replicate", replicate.__module__
import gradsync
assert issubclass(gradsync.ReplicateModule, ReplicateModule)
dropin.uninstall()
assert replicate is module.replicate  # a variable of the main module, which is looked through as well
"""


def test_a_module_that_is_imported_later() -> None:
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch's DistributedDataParallel and both its replicate() are gradsync's from here on\n"


def test_torchs_own_can_still_be_had() -> None:
    dropin.install()
    assert dropin.TorchDistributedDataParallel is TORCHS[0]
    assert torch.nn.parallel.DistributedDataParallel is not TORCHS[0]


SPAWNING = """
import multiprocessing, sys
from torch.nn.parallel import DistributedDataParallel as DDP

def seen():
    from torch.nn.parallel import DistributedDataParallel as Inside
    assert DDP is Inside
    print(DDP.__module__, flush=True)

if __name__ == "__main__":
    from gradsync import dropin
    def start(kind):
        process = kind(target=seen)
        process.start()
        process.join()
        assert process.exitcode == 0
    dropin.install()
    if sys.argv[1] == "forkserver":
        multiprocessing.set_start_method("forkserver", force=True)
        start(multiprocessing.Process)
    else:
        start(multiprocessing.get_context("spawn").Process)
        dropin.uninstall()
        start(multiprocessing.get_context("spawn").Process)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_are_spawned(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNING)
    done = subprocess.run([sys.executable, str(script), method], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    taken_back = ["torch.nn.parallel.distributed"] if method == "spawn" else []
    assert done.stdout.splitlines() == ["gradsync.dropin", *taken_back]
