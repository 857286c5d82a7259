"""What a user gets: the library and the demo, and nothing that only a checkout can run."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
OTHERS = {"bench", "benchmarks", "mpi", "network", "netns", "tests"}  # what only a checkout can run


def wheel_files() -> set[str]:
    return {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}


def sdist_files() -> set[str]:
    return {file.distribution_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}


def test_the_wheel_has_the_library_and_the_demo() -> None:
    files = wheel_files()
    assert {"gradsync/__init__.py", "gradsync/py.typed", "gradsync/cli/demo.py", "gradsync/cli/gpt.py"} <= files
    source = ROOT / "src"
    ours = {str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in (".py", ".typed")}
    assert files == ours


def test_no_benchmark_is_in_the_wheel() -> None:
    for file in wheel_files():
        assert OTHERS.isdisjoint(re.split(r"\W|_", file)), file
        assert not re.search("mpi4py|mpiexec|netns add", (ROOT / "src" / file).read_text()), file


def test_the_source_distribution_can_be_worked_on() -> None:
    wanted = {"README.md", "CONTRIBUTING.md", "Makefile", "docs/guide.md", "benchmarks/app.py", "tests/conftest.py"}
    assert wanted <= sdist_files()


def test_users_are_asked_for_torch_alone() -> None:
    needed = [one for one in requires("gradsync") or [] if "extra ==" not in one]
    assert [one.split(">")[0] for one in needed] == ["torch"]
