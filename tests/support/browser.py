"""A real browser without a window, for pages that people open."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.patience import crowding

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # of its own: root may not have one
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--no-first-run",
)


def chromium() -> str:
    """Skips the test where there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("no browser here: apt-get install chromium")
    return found


def dom(page: Path, width: int = 1300) -> str:
    """The page as it is after its scripts have run."""
    return _run(page, width, "--dump-dom")


def screenshot(page: Path, into: Path, width: int = 1300, height: int = 2200, dark: bool = False) -> None:
    _run(page, width, f"--screenshot={into}", *(("--blink-settings=preferredColorScheme=0",) * dark), height=height)


def _run(page: Path, width: int, *options: str, height: int = 1000) -> str:
    # With a profile of its own: another one at the same time would be spoken to instead.
    profile = page.with_suffix(".profile")
    command = [chromium(), *_OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}", *options]
    try:
        done = subprocess.run(
            [*command, page.resolve().as_uri()],
            capture_output=True,
            text=True,
            check=True,
            timeout=60 * crowding(),
        )
    finally:
        shutil.rmtree(profile, ignore_errors=True)
    return done.stdout
