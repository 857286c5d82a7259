"""The code in README.md and docs/ runs, with real ranks, and leaves replicas equal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks.small import same_everywhere
from tests.support.patience import crowding
from tests.support.ranks import Ranks

ROOT = Path(__file__).parents[2]
NEEDS = re.compile(r"# needs: (\w+)\n")  # a framework: see tests/frameworks/test_pages.py
ALONE = re.compile(r"# (\w+\.py): start it with  python \1\n")


def blocks() -> list[tuple[str, str]]:
    """Python blocks with the heading they stand under."""
    found = []
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        heading = file.name
        # Blocks are taken whole: a line in one that begins with "#" is no heading.
        for match in re.finditer(r"^```(\w*)\n(.*?)^```|^#+ ([^\n]*)$", file.read_text(), re.DOTALL | re.MULTILINE):
            language, code, line = match.groups()
            heading = line or heading
            if language == "python":
                found.append((f"{file.name}: {heading}", code))
    return found


def body(code: str, folder: Path) -> None:
    """As torchrun would run it: the environment is there, a process group is not."""
    os.chdir(folder)  # for what it saves
    torch.manual_seed(int(os.environ["RANK"]))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "recipe", "exec"), namespace)
    try:
        check(code, namespace)
    finally:
        dist.destroy_process_group()


def check(code: str, namespace: dict[str, Any]) -> None:
    modules = [value for value in namespace.values() if isinstance(value, nn.Module)]
    assert modules or "assert" in code, "a recipe leaves a replica to compare, or checks itself"
    if "mesh" in namespace:
        return  # ranks hold different parts
    for module in modules:
        same_everywhere(module)


FOR_RANKS = [block for block in blocks() if not ALONE.match(block[1]) and not NEEDS.match(block[1])]
SCRIPTS = [block for block in blocks() if ALONE.match(block[1])]


@pytest.mark.parametrize(("name", "code"), SCRIPTS, ids=[name for name, _ in SCRIPTS])
def test_it_runs_as_a_script(name: str, code: str, tmp_path: Path) -> None:
    """One that starts its ranks itself, and leaves a file to show for it."""
    (tmp_path / "script.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100 * crowding(),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.suffix for path in tmp_path.iterdir() if path.name != "script.py"] == [".pt"]


# torch's own, from its RPC over a process group
@pytest.mark.filterwarnings("ignore:You are using a Backend:UserWarning")
@pytest.mark.parametrize(("name", "code"), FOR_RANKS, ids=[name for name, _ in FOR_RANKS])
def test_it_runs(ranks: Ranks, name: str, code: str, tmp_path: Path) -> None:
    wanted = re.match(r"# ranks: (\d+)", code)
    ranks(body, int(wanted[1]) if wanted else 2, code, tmp_path, limit=60, backend=None)


def test_there_are_recipes() -> None:
    names = [name for name, _ in blocks()]
    assert len(names) >= 30
    assert "recipes.md: Tensor parallelism x data parallelism" in names  # its first line looks like a heading
