"""Who imports whom, what is public, and how quiet an import is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradsync

SOURCE = Path(gradsync.__file__).parent
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# They import nothing of ours but each other.
GROUND = {"errors", "arguments", "options", "events", "launchers", "log", "restarts", "_torch", "_version"}
# For each room or file at the top: what it may import besides itself and the ground floor.
MAY_IMPORT = {
    "watch": set[str](),
    "transport": {"watch"},
    "observe": {"watch"},
    "contract": set[str](),
    "checkpoint": {"contract"},
    "guard": {"transport", "watch"},
    "hooks": set[str](),
    "engine": {"transport", "guard", "observe", "hooks", "watch"},
    "sharing": {"engine", "guard", "hooks", "transport"},
    "invariant": {"engine", "replica", "transport"},
    "data": {"invariant"},
    "groups": set[str](),
    "tensor_parallel": set[str](),
    "replica": {"engine", "observe", "contract", "groups", "hooks", "sharing", "transport"},
    "replicate_setters": {"engine", "replica"},
    "joinable": {"engine", "replica"},
    "replicate": {"engine", "contract", "groups", "guard", "joinable", "replica", "replicate_setters", "transport"},
    "ddp_private": {"engine", "ddp_logging", "groups", "transport", "ddp"},  # the last for annotations only
    "ddp_logging": {"engine", "ddp"},
    "ddp": {"engine", "contract", "groups", "joinable", "replica", "transport", "ddp_private"},
    "dropin": {"contract", "ddp", "groups", "replica", "replicate"},
    "tracing": {"engine", "observe", "replica", "transport"},
    "elastic": {"data", "engine", "groups", "guard", "invariant", "replica", "transport", "watch"},
    "run": {"dropin", "elastic", "log", "tracing", "watch"},
    "integrations": {"ddp"},
    "cli": {"gradsync"},
    "__main__": {"cli"},
    "__init__": {
        "ddp",
        "elastic",
        "invariant",
        "replica",
        "replicate",
        "guard",
        "observe",
        "tracing",
        "errors",
        "options",
        "_version",
    },
}
# `plan.py` and the transports know nothing of what is above them; see also MAY_IMPORT.
PURE = {"engine/plan.py": {"torch", "math", "collections", "dataclasses", "typing", "__future__"}}
PUBLIC = {
    "CPUOffloadPolicy",
    "DistributedDataParallel",
    "Elastic",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Options",
    "ReplicateModule",
    "Shards",
    "Statistics",
    "__version__",
    "allow_unsynchronized_steps",
    "checkpoint",
    "contract",
    "data",
    "dropin",
    "errors",
    "fingerprint",
    "observe",
    "one_writer",
    "overlap_optimizer",
    "register_forward_method",
    "replicate",
    "share_optimizer",
    "statistics",
    "tensor_parallel",
    "trace",
    "uneven",
    "unreplicate",
    "verify",
}


def _files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def _imports(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _rooms_imported(path: Path) -> set[str]:
    ours = [name.split(".") for name in _imports(path) if name.split(".")[0] == "gradsync"]
    return {parts[1] if len(parts) > 1 else "gradsync" for parts in ours}


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_who_imports_whom(path: Path) -> None:
    room = _room(path)
    rooms = _rooms_imported(path) - {room}
    if room in GROUND:
        assert rooms <= GROUND, f"the ground floor imports nothing of ours: {rooms - GROUND}"
    elif room == "cli":  # uses what everybody can use
        public = {*PUBLIC, *GROUND, "gradsync", "run"}
        if "doctor" in path.parts:  # which tries and measures transports by themselves
            public.add("transport")
        assert rooms <= public, f"the command line uses public names only: {rooms - public}"
    elif room != "__init__":
        allowed = MAY_IMPORT[room] | GROUND
        assert rooms <= allowed, f"{room} may not import {rooms - allowed}"


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.name)
def test_benchmarks_use_what_everybody_can_use(path: Path) -> None:
    public = {*PUBLIC, *GROUND, "gradsync", "cli", "transport"}  # transports are measured by themselves, too
    inside = {"engine"} if path.name == "records_rank.py" else set[str]()  # the engine without what it records
    assert _rooms_imported(path) <= public | inside


def test_the_plan_is_pure() -> None:
    for file, allowed in PURE.items():
        assert {name.split(".")[0] for name in _imports(SOURCE / file)} <= allowed
        assert "distributed" not in (SOURCE / file).read_text()


def test_one_door_to_torchs_private_names() -> None:
    for path in _files():
        if path.name == "_torch.py":
            continue
        for name in _imports(path):
            private = [part for part in name.split(".") if part.startswith("_") and not part.startswith("__")]
            assert not name.startswith("torch") or not private, f"{path}: {name} belongs behind _torch.py"
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("torch", "dist")
            ):
                reached = ast.unparse(node)
                fine = not node.attr.startswith("_") or reached.startswith("torch._foreach_")
                assert fine or node.attr.startswith("__"), f"{path}: {reached} belongs behind _torch.py"


def test_the_engine_is_our_own() -> None:
    forbidden = ("torch.nn.parallel.DistributedDataParallel", "dist.Reducer", "fully_shard", "_fsdp")
    for path in _files():
        names = _imports(path)
        assert not any(word in name for name in names for word in forbidden), path


# What belongs to torch or Python, and is meant to be set by whoever has the object.
SET_BY_ANYBODY = {
    *("grad", "data", "requires_grad", "__class__", "param_groups"),  # tensors, modules and optimizers
    *("_opt_called", "_wrapped_by_lr_sched", "_ddp_ignored", "_ddp_params_and_buffers_to_ignore"),  # torch's marks
    *("atexit", "restype", "argtypes"),  # of weakref.finalize and ctypes
    "gradient_norm",  # of an optimizer, for its user to read
    "last_value",  # of sys: as Python itself leaves it there at the end of a script
}


def _sets_of_others(path: Path) -> list[str]:
    """Assignments to attributes of something other than `self`, or than what the same file has at its top level."""
    tree, found, own = ast.parse(path.read_text()), [], {"self", "cls"}
    for top in tree.body:
        if isinstance(top, ast.ClassDef):
            own.add(top.name)
        for target in [*getattr(top, "targets", ()), getattr(top, "target", None)]:
            if isinstance(target, ast.Name):
                own.add(target.id)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        of_our_own = isinstance(node.value, ast.Name) and node.value.id in own
        if not of_our_own and node.attr not in SET_BY_ANYBODY:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_nobody_sets_anothers_attributes(path: Path) -> None:
    if path.name in ("_torch.py", "contract.py"):  # options of torch's own; `state` of a function, as torch has it
        return
    assert not _sets_of_others(path)


def test_public_names() -> None:
    assert set(gradsync.__all__) == PUBLIC
    for name in PUBLIC:
        assert hasattr(gradsync, name)


QUIET = """
import logging, os, sys, threading, warnings
warnings.simplefilter("error")
import torch
before = dict(os.environ), list(logging.root.handlers), threading.active_count(), set(sys.modules)
import gradsync
assert dict(os.environ) == before[0]
assert logging.root.handlers == before[1]
assert threading.active_count() == before[2]
new = set(sys.modules) - before[3]
assert "torch._dynamo" not in sys.modules, "importing gradsync imports torch._dynamo"
assert not [name for name in new if name.startswith(("torch._inductor", "rich", "typer", "matplotlib", "gradsync.cli"))]
assert "gradsync.integrations" not in new
"""


def test_importing_is_quiet() -> None:
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_one_door_to_loggers() -> None:
    """Records of another one would have no rank, and a format that asks for it would fail."""
    for path in _files():
        if path.name != "log.py":
            assert "getLogger" not in path.read_text(), f"{path}: ask gradsync.log for a logger"


def test_every_folder_of_the_house_says_what_it_is() -> None:
    for path in (*_files(), *BENCHMARKS.glob("*.py")):
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree) or path.name in ("_version.py",), f"{path} has no docstring"
