"""The site is whole as far as that can be seen without building it, which `make docs` does."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import gradsync

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MADE = {"changelog.md", "decisions.md", "examples.md"}  # by docs/site/hooks.py
# The site knows what stands for these.
OUTSIDE = {f"../{name}" for name in ("CHANGELOG.md", "benchmarks/published.json", "benchmarks/published_sharing.json")}
API = (DOCS / "api.md").read_text()


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(
        r"^ +- (?:[^:\n]+: )?(\w+\.md)$", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1], re.MULTILINE
    )
    assert len(listed) == len(set(listed))
    assert set(listed) == {path.name for path in DOCS.glob("*.md")} | MADE


def test_links_lead_somewhere() -> None:
    for page in (*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "examples" / "README.md"):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            target, _, anchor = link.partition("#")
            assert not link.startswith("http"), f"{page}: {link} needs a network"
            if target in OUTSIDE or (page.parent == DOCS and target in MADE):
                continue
            file = page.parent / target if target else page
            assert file.exists(), f"{page}: {link} leads nowhere"
            if anchor:
                assert anchor in anchors(file), f"{page}: there is no {link}"


def anchors(page: Path) -> set[str]:
    """As GitHub and mkdocs make them of headings, and those written by hand."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="(\w+)">', text))


def test_every_public_name_is_in_the_reference() -> None:
    assert set(re.findall(r'<a id="(\w+)"></a>', API)) == set(gradsync.__all__)
    shown = dict(re.findall(r'<a id="(\w+)"></a>\n\n::: ([\w.]+)', API))
    assert len(shown) > 15
    for name, path in shown.items():
        assert find(path) is getattr(gradsync, name), f"{path} is not gradsync.{name}"


def find(path: str) -> Any:
    """A module, or what a module has under its last name."""
    module, _, name = path.rpartition(".")
    found = vars(importlib.import_module(module)).get(name) if module != "gradsync" else None
    return importlib.import_module(path) if found is None else found


def test_every_error_has_a_docstring_for_the_reference() -> None:
    for name, error in vars(gradsync.errors).items():
        if isinstance(error, type) and issubclass(error, gradsync.errors.GradsyncError):
            assert error.__dict__.get("__doc__"), name
