"""docs/architecture.md names the files that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
ENTRY = re.compile(r"( *)((?:[\w/]+(?:\.py|\.md|/),? +)+)(\S.*)")


def named(page: str) -> dict[str, str]:
    """Paths in the page's tree, each with what is said of it; folders end with a slash."""
    _, _, tree = page.partition("## The tree")
    found: dict[str, str] = {}
    folders: list[str] = []  # one for each level of indentation
    for line in tree.split("```")[1].strip().splitlines():
        entry = ENTRY.fullmatch(f"{line} .") if line.endswith("/") else ENTRY.fullmatch(line)
        assert entry, f"neither a name nor what it is for: {line}"
        indent, names, words = entry.groups()
        folders = folders[: len(indent) // 2]
        paths = ["".join((*folders, name)) for name in re.split(r",? +", names.strip())]
        assert not found.keys() & set(paths), f"named twice: {line}"
        found |= dict.fromkeys(paths, words)
        folders.append(names.strip() if paths[-1].endswith("/") else "")
    return found


def test_what_is_named_exists() -> None:
    for path in named(PAGE.read_text()):
        exists = (ROOT / path).is_dir if path.endswith("/") else (ROOT / path).is_file
        assert exists(), f"docs/architecture.md names {path}, which does not exist"


@pytest.mark.parametrize("pattern", ["src/gradsync/**/*.py", "docs/*.md"])
def test_what_exists_is_named(pattern: str) -> None:
    there = {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)}
    there -= {path for path in there if path.endswith("/__init__.py") and path != "src/gradsync/__init__.py"}
    missing = sorted(there - named(PAGE.read_text()).keys())
    assert not missing, f"docs/architecture.md does not say what {missing} are for"


def test_a_name_that_is_wrong_or_missing_is_noticed() -> None:
    page = "## The tree\n```\nsrc/\n  a.py, b.py  two\n  in/  more\n    c.py  one\n  d.py  last\n```"
    assert list(named(page)) == ["src/", "src/a.py", "src/b.py", "src/in/", "src/in/c.py", "src/d.py"]
    with pytest.raises(AssertionError, match="what it is for"):
        named("## The tree\n```\nsrc/\n  a.py\n```")
