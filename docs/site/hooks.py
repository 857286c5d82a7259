"""What mkdocs is told besides mkdocs.yml: pages made of files that are elsewhere, and a look at the reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import gradsync

ROOT = Path(__file__).parents[2]
# Links out of docs/, as they are written for readers of the repository, and the pages that stand for them here.
ELSEWHERE = {
    "../CHANGELOG.md": "changelog.md",
    "../benchmarks/published.json": "published.json",
    "../benchmarks/published_sharing.json": "published_sharing.json",
}


def on_files(files: Files, config: Any) -> Files:
    for name, text in pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def pages() -> dict[str, str]:
    scripts = {path.name: path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))}
    examples = re.sub(r"\[(\w+)\.py\]\(\1\.py\)", r"[\1.py](#\1py)", (ROOT / "examples" / "README.md").read_text())
    examples = examples.replace("](../docs/", "](")  # its pages lie side by side here
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    titles = [(path.name, path.read_text().partition("\n")[0].removeprefix("# ")) for path in decisions]
    return {
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "published.json": (ROOT / "benchmarks" / "published.json").read_text(),
        "published_sharing.json": (ROOT / "benchmarks" / "published_sharing.json").read_text(),
        "examples.md": examples + "".join(f"\n## {name}\n\n```python\n{text}```\n" for name, text in scripts.items()),
        "decisions.md": "# Decisions\n\nHalf a page for each choice that could have gone another way.\n\n"
        + "".join(f"- [{title}](decisions/{name})\n" for name, title in titles),
    }


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    for outside, inside in ELSEWHERE.items():
        markdown = markdown.replace(f"]({outside}", f"]({inside}")
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Every public name has its place in the reference, or the build fails."""
    if page.file.src_uri == "api.md":
        missing = [name for name in gradsync.__all__ if f'id="{name}"' not in html]
        if missing:
            raise PluginError(f"docs/api.md has no place for {', '.join(missing)}")
    return html
